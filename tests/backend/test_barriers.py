"""Barriers that keep a compiler from undoing a schedule."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import remat_kit
from remat_kit._backend import barriers as _barriers


def test_a_barrier_for_the_derivative_is_one_for_gpus_and_tpus_alone():
    def loss(w, x):
        w, x = _barriers.together([w, jnp.sin(x)])
        return jnp.sum(jnp.tanh(x @ w))

    def plain(w, x):
        return jnp.sum(jnp.tanh(jnp.sin(x) @ w))

    args = np.full((4, 4), 0.3, np.float32), np.full((2, 4), 0.2, np.float32)
    gradient = jax.grad(loss, argnums=(0, 1))
    for platform, barriers in (("cpu", 0), ("cuda", 2), ("tpu", 2)):
        text = jax.jit(gradient).trace(*args).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("optimization_barrier") == barriers
    # What transforms functions goes through it.
    for wrap in (
        lambda f: f,
        lambda f: jax.grad(f, argnums=(0, 1)),
        lambda f: jax.hessian(f, argnums=1),
        lambda f: lambda w, x: jax.vmap(f, in_axes=(None, 0))(w, x[:, None]),
    ):
        for a, b in zip(
            *map(jax.tree.leaves, (wrap(loss)(*args), wrap(plain)(*args))), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def two_layers(ws, x):
    for w in ws:
        eqn = jax.make_jaxpr(jnp.matmul)(x, w).eqns[-1]
        x = jnp.tanh(jnp.matmul(*_barriers.without_delay(eqn, [x, w])))
    return jnp.sum(x)


def barriers(fn, *args, platform="cuda", **how):
    traced = jax.jit(fn, **how).trace(*args)
    return traced.lower(lowering_platforms=(platform,)).as_text().count("optimization_barrier")


def test_the_two_gradients_of_a_product_wait_for_each_other_on_gpus():
    args = [np.full((4, 4), 0.3, np.float32)] * 2, np.full((2, 4), 0.2, np.float32)
    gradient = jax.grad(two_layers, argnums=(0, 1))
    assert [barriers(gradient, *args, platform=p) for p in ("cuda", "cpu", "tpu")] == [2, 0, 0]
    assert barriers(two_layers, *args) == 0  # a loss that nobody differentiates has none
    assert barriers(lambda *args: jax.vmap(gradient)(*args), *stacked(args)) == 2

    def plain(ws, x):
        return jnp.sum(functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x))

    chex.assert_trees_all_equal(gradient(*args), jax.grad(plain, argnums=(0, 1))(*args))
    second = (jax.hessian(f, argnums=1)(*args) for f in (two_layers, plain))
    chex.assert_trees_all_close(*second, rtol=1e-5)


def stacked(args):
    return jax.tree.map(lambda x: np.stack([x, 2 * x]), args)


def attention(query, key, value, weigh=jax.nn.softmax):
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    return jnp.einsum("bhqk,bkhd->bqhd", weigh(scores), value)


def test_the_gradients_of_attention_in_pieces_come_one_by_one_on_cpus():
    """One barrier is on the cotangent of the scores, one on the gradients of weights and values."""
    keys = jax.random.split(jax.random.key(0), 3)
    args = [jax.random.normal(key, (1, 16, 2, 8)) for key in keys]

    def loss(attention):
        return lambda *args: jnp.sum(jnp.sin(attention(*args)))

    divided = remat_kit.policy(remat_kit.pieces(4, axis=-2))(attention)
    gradient = jax.grad(loss(divided), argnums=(0, 1, 2))
    without = [barriers(loss(divided), *args, platform=p) for p in ("cpu", "cuda", "tpu")]
    found = [barriers(gradient, *args, platform=p) for p in ("cpu", "cuda", "tpu")]
    assert without == [0, 0, 0]
    assert found[0] == found[1] + 2 == found[2] + 2
    ours, theirs = (
        [f(*args), jax.grad(f, (0, 1, 2))(*args), jax.jvp(f, args, args), jax.hessian(f)(*args)]
        for f in (loss(divided), loss(attention))
    )
    chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "dtype", "weigh", "expected"),
    [
        (8, np.float32, jax.nn.softmax, 1),  # fused: 4096 queries in a piece for all heads
        (7, np.float32, jax.nn.softmax, 2),
        (8, np.float32, jnp.tanh, 2),  # no sums
        (8, jnp.bfloat16, jax.nn.softmax, 2),
    ],
)
def test_no_barrier_where_the_sums_of_a_softmax_are_fused(heads, dtype, weigh, expected):
    args = [jax.ShapeDtypeStruct((1, 1024, heads, 8), dtype)] * 3

    def loss(*args):
        return jnp.sum(divided(*args), dtype=jnp.float32)

    divided = remat_kit.policy(remat_kit.pieces(2, axis=-2))(
        lambda *args: attention(*args, weigh=weigh)
    )
    gradient = jax.grad(loss, argnums=(0, 1, 2))
    cpu, cuda = (barriers(gradient, *args, platform=p) for p in ("cpu", "cuda"))
    assert cpu - cuda == expected


def test_products_without_batch_dimensions_are_as_they_were():
    (eqn,) = jax.make_jaxpr(jnp.matmul)(np.ones((2, 3)), np.ones((3, 4))).eqns
    assert _barriers.batched_in_turn(eqn, [np.ones((2, 3)), np.ones((3, 4))]) is None


def test_gradients_that_are_summed_over_devices_do_not_hold_up_the_others():
    """Otherwise the backward pass of a layer would wait for the communication of the next one."""
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    args = [np.ones((4, 4), np.float32)] * 2, np.ones((2, 4), np.float32)
    everywhere, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    gradient = jax.grad(two_layers, argnums=(0, 1))
    assert barriers(gradient, *args, in_shardings=(everywhere, rows)) == 0

    # Each device of a `shard_map` computes its own gradients, and adds them up afterwards.
    specs = PartitionSpec(), PartitionSpec("data")
    local = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=specs)
    assert barriers(local, *args) == 2


def test_products_without_weights_have_no_barrier():
    x, y = np.ones((2, 4, 4), np.float32), np.ones((4, 4), np.float32)
    for fn, args, expected in (
        (jnp.matmul, (x, y), True),
        (jnp.matmul, (x, x), False),  # with a batch dimension, as the scores of an attention
        (jnp.add, (y, y), False),
        (lambda x: x @ y, (x,), True),
        # A gradient much larger than what it is computed from may be put off, a cotangent may not.
        (jnp.matmul, (np.ones((1, 12), np.float32), np.ones((12, 12), np.float32)), False),
        (jnp.matmul, (np.ones((1, 8), np.float32), np.ones((8, 8), np.float32)), True),
        (jnp.matmul, (np.ones((12, 12), np.float32), np.ones((12, 1), np.float32)), True),
    ):
        eqn = jax.make_jaxpr(fn)(*args).eqns[-1]
        assert _barriers.has_weight_gradient(eqn) is expected
        assert len(_barriers.without_delay_equations(eqn)) == 1 + expected
