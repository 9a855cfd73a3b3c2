"""Gradient accumulation: the gradient is taken inside of a scan over three parts of the batch."""

from __future__ import annotations

import functools
from typing import Any

import digits
import jax
import jax.numpy as jnp
import plain

PARTS = 3


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(weights: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
    def add(total: Any, part: Any) -> tuple[Any, jax.Array]:
        loss, gradient = jax.value_and_grad(plain.loss)(weights, *part)
        return jax.tree.map(jnp.add, total, gradient), loss

    parts = jax.tree.map(lambda x: x.reshape(PARTS, -1, *x.shape[1:]), (images, labels))
    total, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), parts)
    gradient = jax.tree.map(lambda g: g / PARTS, total)
    return *plain.updated(weights, state, gradient), losses.mean()


def build() -> tuple[Any, tuple[Any, ...]]:
    weights = plain.init()
    return train_step, (weights, plain.OPTIMIZER.init(weights), *digits.batch(PARTS))


def after(args: tuple[Any, ...], result: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of the next step, and the loss."""
    weights, state, loss = result
    return (weights, state, *args[2:]), loss
