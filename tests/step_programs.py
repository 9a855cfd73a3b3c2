"""Losses, and steps that take their gradients."""

import jax
import jax.numpy as jnp
import numpy as np

WEIGHTS = [jnp.full((4, 4), 0.3), jnp.full((4, 4), 0.2)]
X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
AT = "block_*"


def loss(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"block_{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def updated(weights, gradient):
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient)


def taken(weights, x):
    value, gradient = jax.value_and_grad(loss)(weights, x)
    return updated(weights, gradient), value


def forces(weights, x):
    return -jax.grad(loss, 1)(weights, x)


def same_gradients(decorated, plain, *args):
    expected = jax.jit(jax.grad(plain))(*args)
    for got in (
        jax.grad(decorated)(*args),
        jax.jit(jax.grad(decorated))(*args),
        jax.grad(jax.jit(decorated))(*args),
        jax.grad(jax.checkpoint(decorated))(*args),
    ):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), got, expected)
