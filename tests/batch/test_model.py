"""The model whose batch grows: its builder, its policy and its step."""

import functools
import json

import pytest
from batch_programs import CHIP, MLP, SMALL, mlp, stack

import remat_kit
from remat_kit._errors import RematKitWarning


@pytest.mark.parametrize("call", ["fit", "max_batch"])
def test_an_offload_that_stays_on_a_cpu_is_said_once(call):
    offloaded = remat_kit.offload(remat_kit.primitive("sin"))
    calls = {
        "fit": lambda: remat_kit.fit(stack, policies=[offloaded], targets=[CHIP], batches=[8, 16]),
        "max_batch": lambda: remat_kit.max_batch(stack, policy=offloaded, target=CHIP, at_most=16),
    }
    with pytest.warns(RematKitWarning) as said:
        calls[call]()
    (warning,) = said
    assert f"`{call}(..., target='{CHIP}')`" in str(warning.message)
    assert "are offloaded, but a CPU's memory is the host's" in str(warning.message)
    assert warning.filename == __file__


def test_interrupted_at_once():
    def progress(line):
        raise KeyboardInterrupt

    for call in (remat_kit.max_batch, functools.partial(remat_kit.fit, batches=[8])):
        with pytest.raises(KeyboardInterrupt):
            call(mlp, progress=progress)


def test_a_plan_needs_no_place_in_the_builder(run):
    status, out, err = run(
        *("max-batch", MLP, *SMALL, "--target", CHIP, "--policy", "plan", "--json", "-"),
        *("--start", "64", "--at-most", "64"),
    )
    assert status == 0, err
    none, plan = json.loads(out)["results"]
    assert plan["batch"] == none["batch"] == 64
    assert "the fastest plan" in err.splitlines()[-1]
