"""Inputs saved in slices: the step's values, its shardings, its collectives, its memory."""

import pytest
import slice_programs
from other_process import printed_by

from remat_kit import _jax


@pytest.fixture(params=[(), ("remat3",)], ids=["remat2", "remat3"])
def found(request):
    """What a program prints, with each of JAX's two implementations of checkpoint."""

    def of(name):
        printed = printed_by(slice_programs.__file__, *request.param)
        if name not in printed:
            pytest.skip("this release of JAX cannot run it")
        return printed[name]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("name", slice_programs.PROGRAMS)
def test_values_and_shardings_are_those_of_the_undecorated_step(found, name):
    program = found(name)
    # XLA compiles the body of a scan, and what is differentiated twice, in another way.
    assert program["error"] <= (1e-7 if "scan" in name or name == "tangents" else 0.0)
    assert program["same"]
    assert not program["warnings"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in slice_programs.PROGRAMS if n != "tangents"])
def test_only_the_recomputation_gathers_the_slices(found, name):
    program = found(name)
    whole, parts = (program[p] for p in ("nothing", slice_programs.SLICED))
    assert parts["gathers"] == whole["gathers"]
    # The input of the first layer of the Linen model is an argument of the step.
    layers = 1 if "scan" in name else slice_programs.LAYERS - (name == "linen")
    assert parts["again"] - whole["again"] == layers


@pytest.mark.slow
@pytest.mark.skipif(_jax.JAX_VERSION < (0, 11), reason="XLA:CPU of jax 0.10 merges the regions")
@pytest.mark.parametrize("name", slice_programs.PROGRAMS)
def test_the_compiled_step_takes_less_memory(found, name):
    program = found(name)
    whole, parts = (program[p]["bytes"] for p in ("nothing", slice_programs.SLICED))
    # The peak of the unrolled GPT is in its loss, where nothing else is alive.
    assert parts == whole if name == "gpt" else parts < whole
