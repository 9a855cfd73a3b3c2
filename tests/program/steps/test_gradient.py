"""The gradient of a loss: what can be differentiated, and what arguments may be."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from shapes import struct

from remat_kit._chip.compile import measure
from remat_kit._chip.target import target
from remat_kit._errors import (
    NotDifferentiableError,
    UserError,
)

PLATFORMS = ["cpu", "tpu-v5e", "h100"]


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w))


ARGS = (struct(64, 64), struct(256, 64))


def test_auxiliary_results_and_several_arguments():
    def with_aux(w, b, x):
        y = x @ w + b[None]
        return jnp.sum(y), {"mean": y.mean(0)}

    memory = measure(
        with_aux, struct(64, 32), struct(32), struct(256, 64), argnums=(0, 1), target="cpu"
    )
    # Each result lies on its own, and a table of pointers goes with them.
    assert 4 * (64 * 32 + 32 + 32 + 1) <= memory.output_bytes < 4 * (64 * 32 + 32 + 32 + 1) + 64


def test_keys_numbers_and_arrays_are_arguments():
    def noisy(w, x, rate, key):
        keep = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.sum(jnp.where(keep, x, 0) @ w) * rate

    x = np.ones((8, 64), np.float32)
    for name in PLATFORMS:
        if target(name).available:
            assert measure(noisy, struct(64, 64), x, 0.5, jax.random.key(0), target=name).fits
    assert measure(noisy, struct(64, 64), x, 0.5, jax.random.key(0), target="local").step_seconds


BAD = {
    "vector": (lambda w: w * 2, (struct(3),), {}, NotDifferentiableError, r"float32\[3\]"),
    "nothing": (lambda w: None, (struct(3),), {}, NotDifferentiableError, "returns None"),
    "dict": (lambda w: {"a": w}, (struct(3),), {}, NotDifferentiableError, "dict of 1"),
    "integer result": (
        lambda w: w.astype(int).sum(),
        (struct(3),),
        {},
        NotDifferentiableError,
        "scalar of int32",
    ),
    "complex result": (
        lambda w: (w * 1j).sum(),
        (struct(3),),
        {},
        NotDifferentiableError,
        "scalar of complex64",
    ),
    "integer argument": (
        lambda w: w.sum() * 1.0,
        (struct(3, dtype=jnp.int32),),
        {},
        NotDifferentiableError,
        r"args\[0\] is int32\[3\]",
    ),
    "integer leaf": (
        lambda p: p["w"].sum(),
        ({"w": struct(3), "step": struct(dtype=jnp.int32)},),
        {},
        NotDifferentiableError,
        r"args\[0\]\['step'\] is int32",
    ),
    "key": (lambda k: 1.0, (jax.random.key(0),), {}, NotDifferentiableError, r"key<"),
    "no leaves": (lambda p: jnp.zeros(()), ({},), {}, NotDifferentiableError, "no arrays"),
    "no such argument": (loss, ARGS, {"argnums": 2}, UserError, "no argument 2; 2 were given"),
    "no arguments": (lambda: 1.0, (), {}, UserError, "no argument 0; 0 were given"),
    "no argnums": (loss, ARGS, {"argnums": ()}, UserError, "no argument to differentiate"),
    "text": (lambda w, s: w.sum(), (struct(3), "mean"), {}, UserError, r"args\[1\] is 'mean'"),
    "function": (lambda w, s: w.sum(), (struct(3), loss), {}, UserError, "not an array"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_differentiated(case):
    fn, args, how, kind, message = BAD[case]
    with pytest.raises(kind, match=message) as caught:
        measure(fn, *args, **how)
    assert caught.value.hint
    assert "`measure" in str(caught.value)


def test_errors_of_the_function_itself_pass_through():
    def broken(w):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        measure(broken, struct(3))


def test_programs_over_several_devices_keep_their_shardings():
    code = """
import jax, jax.numpy as jnp, numpy as np, remat_kit._chip.compile as t
mesh = jax.sharding.Mesh(np.array(jax.devices()), "d")
s = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
f = lambda x: jnp.sum(jax.lax.with_sharding_constraint(x, s) ** 2)
print(t.measure(f, jax.ShapeDtypeStruct((8, 8), jnp.float32)).devices)
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **flags, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "4\n", done.stderr


def test_a_module_with_random_streams_needs_a_step():
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    with pytest.raises(NotDifferentiableError) as error:
        measure(lambda model, x: jnp.sum(model(x)), model, struct(8), target="cpu")
    assert "nnx.value_and_grad" in str(error.value.hint)
