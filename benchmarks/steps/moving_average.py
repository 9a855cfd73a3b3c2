"""An exponential moving average of the weights beside them, updated by the step."""

from __future__ import annotations

import functools
from typing import Any

import digits
import jax
import jax.numpy as jnp
import optax
import plain


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def train_step(weights: Any, average: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
    loss, gradient = jax.value_and_grad(plain.loss)(weights, images, labels)
    weights, state = plain.updated(weights, state, gradient)
    return weights, optax.incremental_update(weights, average, 0.01), state, loss


def build() -> tuple[Any, tuple[Any, ...]]:
    weights = plain.init()
    average = jax.tree.map(jnp.array, weights)
    return train_step, (weights, average, plain.OPTIMIZER.init(weights), *digits.batch())


def after(args: tuple[Any, ...], result: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of the next step, and the loss."""
    weights, average, state, loss = result
    return (weights, average, state, *args[3:]), loss
