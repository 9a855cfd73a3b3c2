"""Decorated programs do what undecorated ones do, under each setting of JAX.

Each setting that changes how JAX traces, checks, compiles or runs is set for some programs, and
what they compute with a policy or a plan is compared with what they compute without, in the same
configuration.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import remat_kit
from remat_kit import testing

# Settings of `jax.config`. A release that lacks one skips it.
SETTINGS: dict[str, Any] = {
    "jax_check_tracer_leaks": True,
    "jax_debug_infs": True,
    "jax_debug_nans": True,
    "jax_default_matmul_precision": "highest",
    "jax_default_prng_impl": "rbg",
    "jax_disable_jit": True,
    "jax_enable_checks": True,
    "jax_enable_custom_prng": True,
    "jax_enable_x64": True,
    "jax_explain_cache_misses": True,
    "jax_include_full_tracebacks_in_locations": False,
    "jax_log_compiles": True,
    "jax_mutable_array_checks": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_optimization_level": "O0",
    "jax_random_seed_offset": 7,
    "jax_remat3": True,
    "jax_softmax_custom_jvp": False,
    "jax_threefry_partitionable": False,
    "jax_traceback_filtering": "off",
    "jax_traceback_in_locations_limit": 0,
    "jax_transfer_guard_device_to_host": "disallow",
    "jax_use_direct_linearize": False,
    "jax_use_shardy_partitioner": False,
    "jax_use_simplified_jaxpr_constants": True,
}
# Those that have found a fault; the others are slow tests.
FOUND_A_FAULT = ("jax_check_tracer_leaks", "jax_disable_jit", "jax_explain_cache_misses")


@contextlib.contextmanager
def configured(name: str, value: Any) -> Iterator[None]:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in FOUND_A_FAULT else pytest.mark.slow)
        for name in SETTINGS
    ]
)
def setting(request: Any) -> Iterator[str]:
    name = request.param
    if name not in jax.config.values:
        pytest.skip(f"this release of JAX has no {name}")
    with configured(name, SETTINGS[name]), warnings.catch_warnings():
        if name == "jax_enable_x64":  # Flax's own, of the running averages of `BatchNorm`
            warnings.filterwarnings("ignore", "scatter inputs have", FutureWarning)
        yield name


def same(got: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-5, atol=1e-6
        )


@functools.cache
def values() -> tuple[list[Any], Any]:
    make = np.random.default_rng(0).normal
    with jax.transfer_guard("allow"):
        ws = [jnp.asarray(0.3 * make(size=(16, 16)), "float32") for _ in range(3)]
        return ws, jnp.asarray(make(size=(64, 16)), "float32")


def loss(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x * x)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for i in range(2):
            x = nn.Dense(16, name=f"block_{i}")(x)
            x = nn.Dropout(0.2, deterministic=False)(nn.gelu(x))
        return x


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(self.dropout(nnx.relu(self.linear(x))))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["nothing", "dots", remat_kit.pieces(4)], ids=repr)
def test_a_function(setting: str, policy: Any) -> None:
    lean = remat_kit.policy(policy)(loss)
    same(jax.jit(jax.grad(lean))(*values()), jax.jit(jax.grad(loss))(*values()))


@pytest.mark.parametrize("at", [None, "*/block_*"])
def test_a_linen_module(setting: str, at: str | None) -> None:
    key = jax.random.key(0)
    _, x = values()
    params = Net().init({"params": key, "dropout": key}, x)

    def gradient(cls: Any, policy: Any) -> Any:
        def loss(params: Any) -> Any:
            y = cls().apply(params, x, rngs={"dropout": jax.random.key(1)})
            return jnp.mean(y * y)

        return jax.jit(jax.grad(loss if policy is None else policy(loss)))(params)

    policy = functools.partial(remat_kit.policy, "nothing")
    if at is None:
        same(gradient(policy()(Net), None), gradient(Net, None))
    else:
        same(gradient(Net, policy(at=at)), gradient(Net, None))


def test_an_nnx_module(setting: str) -> None:
    _, x = values()

    def gradient(call: Any) -> Any:
        model = Model(nnx.Rngs(0))
        found = nnx.jit(nnx.grad(lambda m, x: jnp.mean(call(m, x) * call(m, x))))(model, x)
        return jax.tree.leaves(found), model.norm.mean[...]

    same(
        gradient(remat_kit.policy("nothing")(lambda m, x: m(x))),
        gradient(lambda m, x: m(x)),
    )


@pytest.mark.slow
def test_a_step(setting: str) -> None:
    ws, x = values()
    tx = optax.sgd(0.1, momentum=0.9)

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        ws, momentum = state
        value, grads = jax.value_and_grad(loss)(ws, x)
        updates, momentum = tx.update(grads, momentum, ws)
        return (optax.apply_updates(ws, updates), momentum), value

    state = ws, tx.init(ws)
    expected = step(state, x)
    same(remat_kit.policy("nothing")(step)(state, x), expected)
    same(remat_kit.policy(remat_kit.auto("min", target="cpu"))(step)(state, x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", "local"])
def test_a_plan(setting: str, target: str) -> None:
    plan = remat_kit.plan(loss, *values(), budget="min", target=target)
    lean = remat_kit.policy(plan)(loss)
    same(jax.jit(jax.grad(lean))(*values()), jax.jit(jax.grad(loss))(*values()))
    assert plan.compiled
    assert remat_kit.measure(lean, *values(), target=target).temp_bytes == plan.compiled.temp_bytes


@pytest.mark.parametrize("target", ["cpu", "local"])
def test_a_report(setting: str, target: str) -> None:
    report = remat_kit.inspect(loss, *values(), policy="nothing", target=target)
    assert str(report)
    with configured("jax_disable_jit", False):
        compiled = jax.jit(jax.value_and_grad(loss)).lower(*values()).compile().memory_analysis()
    measured = remat_kit.measure(loss, *values(), target=target)
    assert measured.temp_bytes == compiled.temp_size_in_bytes
    assert measured.argument_bytes == compiled.argument_size_in_bytes
    testing.assert_equivalent(loss, remat_kit.policy("nothing")(loss), *values())
