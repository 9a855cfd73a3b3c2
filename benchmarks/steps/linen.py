"""Linen: a jitted step of a `TrainState` that donates its state."""

from __future__ import annotations

import functools
from typing import Any

import digits
import flax.linen as nn
import jax
import optax
from flax.training.train_state import TrainState


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Dense(4 * digits.WIDTH, name="up")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(digits.WIDTH, name="down")(nn.gelu(y))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(digits.WIDTH, name="embed")(x)
        for i in range(digits.LAYERS):
            x = Block(name=f"block_{i}")(x)
        return nn.Dense(10, name="head")(x)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradient = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=gradient), loss


def build() -> tuple[Any, tuple[Any, ...]]:
    images, labels = digits.batch()
    net = Net()
    params = net.init(jax.random.key(0), images[:1])
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(digits.RATE))
    return train_step, (state, images, labels)


def after(args: tuple[Any, ...], result: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of the next step, and the loss."""
    state, loss = result
    return (state, *args[1:]), loss
