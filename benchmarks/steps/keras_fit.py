"""Keras 3 on JAX: `model.fit` jits its own training step, which no line of this file shows.

remat-kit doctor benchmarks/steps/keras_fit.py
remat-kit run --plan plan.toml benchmarks/steps/keras_fit.py
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

from typing import Any

import digits
import jax
import jax.numpy as jnp
import keras
import numpy as np


def network() -> keras.Model:
    """Return a compiled network of residual blocks."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((64,))
    x = keras.layers.Dense(digits.WIDTH, name="embed")(x)
    for i in range(digits.LAYERS):
        y = keras.layers.LayerNormalization(name=f"block_{i}_norm")(x)
        y = keras.layers.Dense(4 * digits.WIDTH, activation="gelu", name=f"block_{i}_up")(y)
        x = x + keras.layers.Dense(digits.WIDTH, name=f"block_{i}_down")(y)
    model = keras.Model(inputs, keras.layers.Dense(10, name="head")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(digits.RATE), loss)
    return model


def main(steps: int = 5) -> list[float]:
    """Train for some epochs of one batch each, and return their losses."""
    images, labels = map(np.asarray, digits.batch())
    model = network()
    history = model.fit(
        images, labels, batch_size=len(images), epochs=steps, shuffle=False, verbose="0"
    )
    for number, loss in enumerate(history.history["loss"]):
        print(f"step {number}: loss {loss:.6f}")
    return history.history["loss"]


def build() -> tuple[Any, tuple[Any, ...]]:
    """Return the step that `model.fit` makes, and its arguments."""
    model = network()
    model.optimizer.build(model.trainable_variables)
    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([jnp.array(v.value) for v in each] for each in variables)
    return jax.jit(model.train_step, donate_argnums=0), (state, (*digits.batch(), None))


def after(args: tuple[Any, ...], result: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of the next step, and the loss."""
    logs, state = result
    # Keras logs the mean over the steps of an epoch, and an epoch has one step here.
    state = (*state[:3], [jnp.zeros_like(m) for m in state[3]])
    return (state, *args[1:]), logs["loss"]


if __name__ == "__main__":
    main()
