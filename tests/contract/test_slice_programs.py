"""Inputs saved in slices: the step's values, its shardings, its collectives."""

import pytest
import slice_programs
from other_process import printed_by


@pytest.fixture(params=[(), ("remat3",)], ids=["remat2", "remat3"])
def found(request):
    """What a program prints, with each of JAX's two implementations of checkpoint."""
    return lambda name: printed_by(slice_programs.__file__, *request.param)[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", slice_programs.PROGRAMS)
def test_values_and_shardings_are_those_of_the_undecorated_step(found, name):
    program = found(name)
    # XLA fuses the body of a scan, and a tangent, in another way.
    assert program["error"] <= (1e-7 if "scan" in name or name == "tangents" else 0.0)
    assert program["same"]
    assert not program["warnings"]


@pytest.mark.slow
@pytest.mark.parametrize("name", slice_programs.PROGRAMS)
def test_the_forward_pass_gathers_nothing_more(found, name):
    program = found(name)
    whole, parts = (program[p] for p in ("nothing", slice_programs.SLICED))
    more = parts["again"] - whole["again"]
    if name == "tangents":
        return
    assert parts["gathers"] == whole["gathers"]
    assert more == (1 if "scan" in name else 3 if name == "linen" else slice_programs.LAYERS)
