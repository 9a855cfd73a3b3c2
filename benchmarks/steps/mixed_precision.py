"""Mixed precision: float16 activations, and a loss scale that follows overflows."""

from __future__ import annotations

import functools
from typing import Any

import digits
import jax
import jax.numpy as jnp
import plain


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def train_step(
    weights: Any, state: Any, scale: jax.Array, images: jax.Array, labels: jax.Array
) -> Any:
    def scaled_loss(weights: Any) -> tuple[jax.Array, jax.Array]:
        half = jax.tree.map(lambda w: w.astype(jnp.float16), weights)
        loss = plain.loss(half, images.astype(jnp.float16), labels).astype(jnp.float32)
        return loss * scale, loss

    (_, loss), gradient = jax.value_and_grad(scaled_loss, has_aux=True)(weights)
    gradient = jax.tree.map(lambda g: g / scale, gradient)
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradient)]))
    new = plain.updated(weights, state, gradient)
    weights, state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), new, (weights, state)
    )
    return weights, state, jnp.where(finite, scale * 1.001, scale / 2), loss


def build() -> tuple[Any, tuple[Any, ...]]:
    weights = plain.init()
    scale = jnp.float32(2.0**10)
    return train_step, (weights, plain.OPTIMIZER.init(weights), scale, *digits.batch(2))


def after(args: tuple[Any, ...], result: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of the next step, and the loss."""
    weights, state, scale, loss = result
    return (weights, state, scale, *args[3:]), loss
