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


def loss_first(weights, x):
    new, value = taken(weights, x)
    return value, new


def by_vjp(weights, x):
    value, back = jax.vjp(loss, weights, x)
    return updated(weights, back(jnp.ones_like(value))[0])


def by_linearize(weights, x):
    value, tangent = jax.linearize(lambda w: loss(w, x), weights)
    (gradient,) = jax.linear_transpose(tangent, weights)(jnp.ones_like(value))
    return updated(weights, gradient)


def accumulated(weights, x):
    def add(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, part[None])), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), x)
    return updated(weights, total)


def several_steps(weights, x):
    return jax.lax.scan(lambda w, part: taken(w, part[None]), weights, x)


STEPS = {
    "value_and_grad": taken,
    "the loss first": loss_first,
    "vjp": by_vjp,
    "linearize": by_linearize,
    "accumulation": accumulated,
    "several": several_steps,
    "jit inside": jax.jit(taken),
    "donated": jax.jit(taken, donate_argnums=0),
    "a jitted loss": lambda w, x: updated(w, jax.grad(jax.jit(loss))(w, x)),
    "gradients beside the loss": jax.value_and_grad(loss),
    "gradients": jax.grad(loss),
}


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
