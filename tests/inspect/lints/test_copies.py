"""Lints about saved copies and masks: each is found, and its fix takes it away."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lint_programs import bf16, codes, f32, fixed, only

from remat_kit import inspect

# Many of the programs are made to have a policy without an effect, which is a warning too.
pytestmark = pytest.mark.filterwarnings("ignore::remat_kit.RematKitWarning")


def same_gradients(f, g, *args):
    """The gradients of both, run operation by operation, are equal to the last bit."""
    filled = jax.tree.map(filled_like, args)
    with jax.disable_jit():  # a compiled loop may keep bfloat16 values wider than they are
        gradients = [jax.tree.leaves(jax.grad(h)(*filled)) for h in (f, g)]
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_array_equal(a, b)


def filled_like(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key(7)
    if x.dtype == jnp.uint32:
        return jax.random.PRNGKey(7)
    return jax.random.normal(jax.random.key(x.size), x.shape).astype(x.dtype)


def upcast(w, x):
    y = jnp.sin(x @ w).astype(jnp.float32)
    return jnp.sum(jnp.sin(y) * y)


def test_saved_upcast():
    args = bf16(32, 32), bf16(64, 32)
    lint = only(inspect(upcast, *args), "saved-upcast")
    assert lint.bytes == 64 * 32 * (4 - 2)
    assert "float32 copy of bfloat16 values, 8 KiB" in lint.message
    assert "its source takes 4 KiB" in lint.message
    assert "test_copies.py:" in lint.message
    assert lint.source in lint.message
    after = fixed(lint, upcast)
    assert "saved-upcast" not in codes(inspect(after, *args))
    assert inspect(after, *args).saved_bytes < inspect(upcast, *args).saved_bytes
    same_gradients(upcast, after, *args)


def test_saved_upcast_in_a_loop_is_fixed_in_its_body():
    def layer(c, w):
        y = (c @ w).astype(jnp.float32)
        return (jnp.sin(y) * y).astype(c.dtype), None

    def loss(layer, w, x):
        return jax.lax.scan(layer, x, w)[0].astype(jnp.float32).sum()

    args = bf16(4, 16, 16), bf16(8, 16)
    lint = only(inspect(functools.partial(loss, layer), *args), "saved-upcast")
    assert lint.bytes == 4 * 8 * 16 * 2
    assert "the body of the loop" in lint.fix
    after = functools.partial(loss, fixed(lint, layer))
    assert "saved-upcast" not in codes(inspect(after, *args))
    same_gradients(functools.partial(loss, layer), after, *args)


def test_upcast_that_a_policy_keeps():
    args = bf16(32, 32), bf16(64, 32)
    keep = "save(primitive('convert_element_type') | dots)"
    lint = only(inspect(upcast, *args, policy=keep), "saved-upcast")
    assert f">> {keep}" in lint.fix
    after = inspect(fixed(lint, upcast), *args)
    assert "saved-upcast" not in codes(after)
    assert {r.primitive for r in after.saved} == {"dot_general"}


def test_upcast_that_is_the_input_of_a_region():
    def loss(x):
        y = jnp.tanh(x).astype(jnp.float32)
        return jax.checkpoint(lambda y: jnp.sum(jnp.sin(jnp.exp(y))))(y)

    lint = only(inspect(loss, bf16(64)), "saved-upcast")
    assert lint.fix.startswith("# move this convert_element_type into the block")


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: upcast(w.astype(jnp.float32), x.astype(jnp.float32)) * 0.5,
        lambda w, x: jnp.sum(jnp.sin(x @ w).astype(jnp.float32)),
    ],
    ids=["of an argument's product", "linear from there on"],
)
def test_no_upcast(loss):
    assert "saved-upcast" not in codes(inspect(loss, f32(32, 32), f32(64, 32)))
    assert "saved-upcast" not in codes(inspect(loss, bf16(32, 32), f32(64, 32)))


def test_saved_view():
    def loss(w, x):
        k = jnp.sin(x @ w)
        many = jnp.broadcast_to(k[None], (16, *k.shape))
        return jnp.sum(jnp.sin(many * many))

    args = f32(32, 32), f32(64, 32)
    lint = only(inspect(loss, *args), "saved-view")
    assert lint.bytes == 15 * 64 * 32 * 4
    assert "result of broadcast_in_dim, 128 KiB" in lint.message
    after = fixed(lint, loss)
    assert "saved-view" not in codes(inspect(after, *args))
    assert inspect(after, *args).saved_bytes <= inspect(loss, *args).saved_bytes - lint.bytes
    same_gradients(loss, after, *args)


def transposed(x, w):
    y = jnp.exp(x @ w)
    return jnp.sin(y) * (y.T * jnp.cos(y.T)).T


def test_saved_transpose_counts_in_a_loop_only():
    def looped(w, x):
        return jax.lax.scan(lambda c, w: (transposed(c, w), None), x, w)[0].sum()

    def once(w, x):
        return transposed(x, w).sum()

    lint = only(inspect(looped, f32(3, 8, 8), f32(8, 8)), "saved-view")
    assert "transpose" in lint.message
    assert "is in memory anyway" in lint.message
    assert lint.bytes == 3 * 8 * 8 * 4
    assert codes(inspect(once, f32(8, 8), f32(8, 8))) == []


def test_what_is_small_beside_the_rest_is_left_out():
    def loss(x, y):
        return upcast(*x) + jnp.sum(jnp.sin(jnp.tanh(y)))

    small = (bf16(2, 2), bf16(2, 2))
    assert "saved-upcast" not in codes(inspect(loss, small, f32(64, 64), argnums=(0, 1)))
    assert "saved-upcast" in codes(inspect(loss, small, f32(2, 2), argnums=(0, 1)))


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.Dense(16, name=f"dense_{i}")(x)
            x = jnp.sin(nn.Dropout(0.5, deterministic=False, name=f"drop_{i}")(x))
        return x


def linen_dropout(params, x, key):
    return Dropped().apply(params, x, rngs={"dropout": key}).sum()


KEYS = [jax.eval_shape(lambda: jax.random.key(0)), jax.eval_shape(lambda: jax.random.PRNGKey(0))]


@pytest.mark.parametrize("key", KEYS, ids=["typed key", "raw key"])
def test_dropout_mask(key):
    x = f32(8, 16)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    args = jax.eval_shape(Dropped().init, rngs, x), x, key
    before = inspect(linen_dropout, *args)
    lint = only(before, "dropout-mask-saved")
    assert (lint.module, lint.bytes) == ("Dropped/drop_*", 2 * 8 * 16)
    assert lint.fix == "remat_kit.policy(\"recompute(module('Dropped/drop_*'))\")"
    after = fixed(lint, linen_dropout)
    report = inspect(after, *args)
    assert "dropout-mask-saved" not in codes(report)
    assert "bool" not in {r.dtype for r in report.saved}
    assert report.saved_bytes < before.saved_bytes
    same_gradients(linen_dropout, after, *args)


def test_dropout_without_a_module():
    def loss(w, x, key):
        y = x @ w
        mask = jax.random.bernoulli(key, 0.5, y.shape)
        return jnp.sum(jnp.sin(jnp.where(mask, y, 0.0)))

    args = f32(16, 16), f32(8, 16), KEYS[0]
    lint = only(inspect(loss, *args), "dropout-mask-saved")
    assert "source(" in lint.fix
    after = fixed(lint, loss)
    assert "dropout-mask-saved" not in codes(inspect(after, *args))
    same_gradients(loss, after, *args)


def test_a_mask_that_is_no_dropout():
    def loss(w, x):
        y = x @ w
        return jnp.sum(jnp.sin(jnp.where(y > 0, y, 0.0)))

    assert codes(inspect(loss, f32(16, 16), f32(8, 16))) == []
