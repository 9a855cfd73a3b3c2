"""NNX: an `nnx.Optimizer`, dropout, batch normalization and a metric, all changed by the step."""

from __future__ import annotations

from typing import Any

import digits
import jax
import optax
from flax import nnx


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(digits.WIDTH, rngs=rngs)
        self.up = nnx.Linear(digits.WIDTH, 4 * digits.WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * digits.WIDTH, digits.WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Linear(64, digits.WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(digits.LAYERS)])
        self.head = nnx.Linear(digits.WIDTH, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@nnx.jit
def train_step(
    model: Net, optimizer: nnx.Optimizer, average: Any, images: jax.Array, labels: jax.Array
) -> jax.Array:
    def loss_fn(model: Net) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, gradient = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradient)
    average.update(values=loss)
    return loss


def build() -> tuple[Any, tuple[Any, ...]]:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(digits.RATE), wrt=nnx.Param)
    return train_step, (model, optimizer, nnx.metrics.Average(), *digits.batch())


def after(args: tuple[Any, ...], result: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of the next step, and the loss."""
    return args, result
