"""Regions at module paths, in scans and branches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import one_by_one

import remat_kit
from remat_kit import (
    PolicyError,
    UnknownNameError,
    nested,
    segments,
    uniform,
)

X = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)


def regions(f, *args):
    """How many checkpoint regions a function has."""
    text = str(jax.make_jaxpr(f)(*args))
    return len(re.findall(r"remat2\[|checkpoint\[|RematTraced\[", text))


def scoped(layers=4):
    def loss(x):
        for i in range(layers):
            with jax.named_scope(f"block_{i}"):
                x = jnp.exp(jnp.tanh(x @ X.T @ X)) - 1.0
        return x.sum()

    return loss


def looped(x):
    def body(c, _):
        with jax.named_scope("block_scan"):
            return jnp.tanh(c @ X.T @ X), c.sum()

    c, ys = jax.lax.scan(body, x, length=6)
    return c.sum() + ys.sum()


@pytest.mark.parametrize(
    ("policy", "count"),
    [("nothing", 4), (uniform(2), 2), (uniform(3), 2), ("block:3", 3), ("block:9", 4)],
    ids=repr,
)
def test_regions_at_paths(policy, count):
    f = remat_kit.policy(policy, at="*/block_*")(scoped())
    assert regions(f, X) == count
    np.testing.assert_allclose(jax.grad(f)(X), jax.grad(scoped())(X), rtol=1e-5)


@pytest.mark.parametrize(
    "policy", ["nothing", uniform(2), uniform(4), "block:2", nested(3), nested()]
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_regions_inside_scans(policy, wrap):
    f = remat_kit.policy(policy, at="*/block_*")(wrap(looped))
    assert regions(f, X) >= 1
    x = X + 0.25  # X itself sums to zero
    np.testing.assert_allclose(jax.jit(f)(x), jax.jit(looped)(x), rtol=1e-6)
    got, expected = jax.jit(jax.grad(f))(x), jax.jit(jax.grad(looped))(x)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


def test_reversed_scans():
    def loss(x):
        def body(c, s):
            with jax.named_scope("block_scan"):
                return jnp.tanh(c * s), c

        c, ys = jax.lax.scan(body, x, jnp.arange(1.0, 6.0), reverse=True)
        return c.sum() + (ys * jnp.arange(5.0)[:, None, None]).sum()

    for policy in ("dots", uniform(2), nested(2), "block:2"):
        f = remat_kit.policy(policy, at="*/block_*")(loss)
        np.testing.assert_allclose(jax.grad(f)(X), jax.grad(loss)(X), rtol=1e-5, atol=1e-7)


def test_nested_scan_without_paths():
    f = remat_kit.policy(nested(2))(looped)
    np.testing.assert_allclose(jax.grad(f)(X), jax.grad(looped)(X), rtol=1e-5, atol=1e-7)
    with pytest.raises(PolicyError, match="no blocks to group"):
        remat_kit.policy(uniform(2))(jnp.tanh)(X)


def test_segments_cut_at_names():
    def f(x):
        a = remat_kit.name(jnp.tanh(x @ X.T), "a")
        b = remat_kit.name(jnp.tanh(a @ X), "b")
        return (b * b).sum()

    g = remat_kit.policy(segments("a", "b"))(f)
    assert regions(g, X) == 2
    np.testing.assert_allclose(jax.grad(g)(X), jax.grad(f)(X), rtol=1e-6)
    with pytest.raises(UnknownNameError, match="'c'"):
        remat_kit.policy(segments("a", "c"))(f)(X)


def test_segments_of_blocks_inside_of_a_scan():
    """Each block of a scan is cut at the names, as one outside of a scan is."""

    def block(x, _):
        with jax.named_scope("block"):
            a = remat_kit.name(jnp.tanh(x @ X.T), "a")
            b = remat_kit.name(jnp.tanh(a @ X), "b")
            return jnp.sin(b) + x, None

    def f(x):
        return (jax.lax.scan(block, x, None, length=3)[0] ** 2).sum()

    def one(x):
        return (block(x, None)[0] ** 2).sum()

    g = remat_kit.policy(segments("a", "b"), at="block")(f)
    assert regions(g, X) == regions(remat_kit.policy(segments("a", "b"), at="block")(one), X) == 2
    np.testing.assert_allclose(jax.grad(g)(X), jax.grad(f)(X), rtol=1e-6)


def test_branches_hold_blocks():
    def f(x):
        def yes(x):
            with jax.named_scope("block_0"):
                return jnp.tanh(x @ X.T) @ X

        return jax.lax.cond(x.sum() > 0, yes, lambda x: x * 2.0, x).sum()

    g = remat_kit.policy("nothing", at="*/block_*")(f)
    assert regions(g, X) == 1
    for x in (X + 1.0, X - 1.0):
        np.testing.assert_array_equal(one_by_one(jax.grad(g), x), one_by_one(jax.grad(f), x))


def test_at_says_that_another_region_is_in_the_way():
    @remat_kit.policy("nothing")
    def inner(w, x):
        with jax.named_scope("up"):
            x = jnp.tanh(x @ w)
        with jax.named_scope("down"):
            return jnp.tanh(x @ w)

    def model(w, x):
        with jax.named_scope("net"):
            return inner(w, x).sum()

    again = remat_kit.policy("dots", at="*/up")(model)
    with pytest.raises(remat_kit.PolicyError, match="inside a checkpoint region") as caught:
        jax.grad(again)(jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert "remove the policy or nn.remat around" in str(caught.value)
