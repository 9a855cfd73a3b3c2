"""What `measure` says of a partitioned program is what its compiled program says of one device."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import mesh_programs
import pytest


@functools.cache
def figures():
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, mesh_programs.__file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", mesh_programs.PROGRAMS)
def test_figures_are_those_of_one_device_of_the_partitioned_program(name):
    theirs, ours = figures()[name]
    assert ours is not None, theirs
    target, mesh, found = ours
    assert found == theirs
    assert mesh == {"data": 4, "model": 2}
    assert target == ("local" if name == "local" else "cpu:8")
