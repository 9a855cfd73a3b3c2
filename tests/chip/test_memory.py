"""The figures of a compiled program: whether it fits and the headroom."""

import dataclasses

import jax.numpy as jnp
import pytest
from shapes import struct

import remat_kit
from remat_kit._chip import compile as _compile
from remat_kit._chip import target as _target


def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x)


ARGS = [struct(48, 48)] * 6, struct(4096, 48)


@pytest.mark.parametrize("over", [-1, 0, 1, 700])
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_fits_and_headroom_are_one_comparison(platform, over):
    chip = dataclasses.replace(_target.target("cpu"), platform=platform, memory_bytes=10**6)
    names = ("alias", "temp", "generated_code", "host_argument", "host_output", "host_temp")
    stats = {f"{n}_size_in_bytes": 0 for n in (*names, "host_alias")}
    stats |= {"argument_size_in_bytes": 10**6 + over, "output_size_in_bytes": 0}
    stats |= {"peak_memory_in_bytes": 0}
    answer = {"memory": stats, "hlo": "", "compile_seconds": 0.0}
    memory = _compile._memory(answer, chip, False, (0, 0))
    assert memory.headroom_bytes == -over
    assert memory.fits == (over <= 0)
    if over == 1:
        assert "1,000,001 bytes" in str(memory)


@pytest.mark.parametrize("needs", ["15.75G", "15.7G", "20G", None])
def test_a_refused_program_has_no_room_left(needs):
    chip = dataclasses.replace(_target.target("cpu"), memory_bytes=int(15.75 * 2**30))
    how = "out of memory on hbm" if needs is None else f"Used {needs} of 15.75G hbm"
    memory = _compile._memory({"refused": f"RESOURCE_EXHAUSTED: {how}"}, chip, False, (0, 0))
    assert not memory.fits
    assert (memory.headroom_bytes is None) if needs is None else memory.headroom_bytes < 0


def test_a_program_that_runs_out_while_it_runs_has_no_headroom():
    memory = dataclasses.replace(remat_kit.measure(loss, *ARGS), fits=False)
    assert memory.headroom_bytes is None
    assert "needs more" in str(memory)
