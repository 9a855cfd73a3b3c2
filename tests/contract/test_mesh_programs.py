"""What `measure` says of a partitioned program is what its compiled program says of one device."""

import mesh_programs
import pytest
from other_process import printed_by


@pytest.mark.parametrize("name", mesh_programs.PROGRAMS)
def test_figures_are_those_of_one_device_of_the_partitioned_program(name):
    theirs, ours = printed_by(mesh_programs.__file__)[name]
    assert ours is not None, theirs
    target, mesh, found = ours
    assert found == theirs
    assert mesh == {"data": 4, "model": 2}
    assert target == ("local" if name == "local" else "cpu:8")
