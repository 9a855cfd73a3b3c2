"""A policy that saves what collectives give: the step's values, its shardings, its collectives."""

import collective_programs
import pytest
from other_process import printed_by


@pytest.fixture(params=[(), ("remat3",)], ids=["remat2", "remat3"])
def found(request):
    """What a program prints, with each of JAX's two implementations of checkpoint."""
    return lambda name: printed_by(collective_programs.__file__, *request.param)[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", collective_programs.PROGRAMS)
def test_values_and_shardings_are_those_of_the_undecorated_step(found, name):
    program = found(name)
    assert program["error"] < 1e-6
    assert program["same"]


@pytest.mark.slow
@pytest.mark.parametrize("name", collective_programs.PROGRAMS)
def test_no_collective_runs_a_second_time(found, name):
    program = found(name)
    plain, again, kept = (program[p] for p in ("None", "nothing", collective_programs.KEPT))
    assert kept <= again
    if name == "gpt dp":  # the devices only add up the gradients
        assert plain == again == kept
        assert any("selects none" in text for text in program["warnings"])
        return
    if name == "around nnx.jit":  # the step is lowered without its policy
        assert not program["warnings"]
        return
    if name == "in nnx.jit":
        assert any("unknown here" in text for text in program["warnings"])
        return
    assert not program["warnings"]
    if "scan" not in name:  # the compiler already gathers once in a scan
        assert plain < again
    assert kept <= plain + 1  # XLA combines some of the all-reduces of the plain step


@pytest.mark.slow
def test_a_decorated_step_takes_other_shardings_of_the_same_shapes(found):
    assert max(found("called")) < 1e-6


@pytest.mark.slow
def test_a_traced_step_takes_arrays_on_other_devices(found):
    eight, one, four = found("reused")
    assert one == pytest.approx(eight, rel=1e-6)
    assert four == pytest.approx(eight, rel=1e-6)


@pytest.mark.slow
def test_unknown_shardings_are_said(found):
    (text,) = found("unknown")
    assert "unknown here how the devices split the arrays" in text
    assert "\nhint: " in text
