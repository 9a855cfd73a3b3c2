"""Equinox: a module with activation functions, under `filter_jit` and `filter_value_and_grad`."""

from __future__ import annotations

from typing import Any

import digits
import equinox as eqx
import jax
import optax
import plain


class Net(eqx.Module):
    embed: eqx.nn.Linear
    blocks: list[eqx.nn.MLP]
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        first, last, *keys = jax.random.split(key, 2 + digits.LAYERS)
        width = digits.WIDTH
        self.embed = eqx.nn.Linear(64, width, key=first)
        self.blocks = [eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=k) for k in keys]
        self.head = eqx.nn.Linear(width, 10, key=last)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        for i, block in enumerate(self.blocks):
            with jax.named_scope(f"block_{i}"):
                x = x + block(x)
        return self.head(x)


@eqx.filter_jit
def train_step(model: Net, state: Any, images: jax.Array, labels: jax.Array) -> Any:
    def loss_fn(model: Net) -> jax.Array:
        logits = jax.vmap(model)(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradient = eqx.filter_value_and_grad(loss_fn)(model)
    updates, state = plain.OPTIMIZER.update(gradient, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss


def build() -> tuple[Any, tuple[Any, ...]]:
    model = Net(jax.random.key(0))
    state = plain.OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    return train_step, (model, state, *digits.batch())


def after(args: tuple[Any, ...], result: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of the next step, and the loss."""
    model, state, loss = result
    return (model, state, *args[2:]), loss
