"""A GAN: one step that differentiates two losses by two networks."""

from __future__ import annotations

import functools
from typing import Any

import digits
import jax
import jax.numpy as jnp
import plain


def generator_loss(generator: Any, critic: Any, noise: jax.Array) -> jax.Array:
    return jax.nn.softplus(-plain.apply(critic, plain.apply(generator, noise))).mean()


def critic_loss(critic: Any, generator: Any, noise: jax.Array, images: jax.Array) -> jax.Array:
    made = jax.lax.stop_gradient(plain.apply(generator, noise))
    real, fake = plain.apply(critic, images), plain.apply(critic, made)
    return (jax.nn.softplus(-real) + jax.nn.softplus(fake)).mean()


@functools.partial(jax.jit, donate_argnums=0)
def train_step(both: Any, images: jax.Array, noise: jax.Array) -> Any:
    (generator, generator_state), (critic, critic_state) = both
    one, first = jax.value_and_grad(generator_loss)(generator, critic, noise)
    two, second = jax.value_and_grad(critic_loss)(critic, generator, noise, images)
    new = (
        plain.updated(generator, generator_state, first),
        plain.updated(critic, critic_state, second),
    )
    return new, one + two


def build() -> tuple[Any, tuple[Any, ...]]:
    images, _ = digits.batch()
    networks = plain.init(0, 64, 64), plain.init(1, 64, 1)
    both = tuple((weights, plain.OPTIMIZER.init(weights)) for weights in networks)
    noise = jax.random.normal(jax.random.key(2), images.shape, jnp.float32)
    return train_step, (both, images, noise)


def after(args: tuple[Any, ...], result: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of the next step, and the loss."""
    both, loss = result
    return (both, *args[1:]), loss
