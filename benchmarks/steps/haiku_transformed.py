"""Haiku: a transformed network."""

from __future__ import annotations

import functools
from typing import Any

import digits
import haiku as hk
import jax
import optax
import plain


def network(x: jax.Array) -> jax.Array:
    x = hk.Linear(digits.WIDTH, name="embed")(x)
    for i in range(digits.LAYERS):
        x = x + hk.nets.MLP([4 * digits.WIDTH, digits.WIDTH], name=f"block_{i}")(x)
    return hk.Linear(10, name="head")(x)


NET = hk.without_apply_rng(hk.transform(network))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        logits = NET.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradient = jax.value_and_grad(loss_fn)(params)
    return *plain.updated(params, state, gradient), loss


def build() -> tuple[Any, tuple[Any, ...]]:
    images, labels = digits.batch()
    params = NET.init(jax.random.key(0), images[:1])
    return train_step, (params, plain.OPTIMIZER.init(params), images, labels)


def after(args: tuple[Any, ...], result: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of the next step, and the loss."""
    params, state, loss = result
    return (params, state, *args[2:]), loss
