"""Plain JAX: a list of weights, and what the other programs of this folder have in common."""

from __future__ import annotations

from typing import Any

import digits
import jax
import jax.numpy as jnp
import optax

Weights = list[dict[str, jax.Array]]

OPTIMIZER = optax.adamw(digits.RATE)


def init(seed: int = 0, inputs: int = 64, outputs: int = 10) -> Weights:
    """Return the weights of an embedding, the blocks and a head."""
    sizes = [
        {"w": (inputs, digits.WIDTH)},
        *[{"up": (digits.WIDTH, 4 * digits.WIDTH), "down": (4 * digits.WIDTH, digits.WIDTH)}]
        * digits.LAYERS,
        {"w": (digits.WIDTH, outputs)},
    ]
    keys = iter(jax.random.split(jax.random.key(seed), 3 * len(sizes)))
    return [
        {k: jax.random.normal(next(keys), s) * s[0] ** -0.5 for k, s in part.items()}
        for part in sizes
    ]


def apply(weights: Weights, x: jax.Array) -> jax.Array:
    """Apply the network; each block has a module path of its own."""
    first, *blocks, last = weights
    x = x @ first["w"]
    for i, block in enumerate(blocks):
        with jax.named_scope(f"block_{i}"):
            x = x + jnp.tanh(jax.nn.gelu(x @ block["up"]) @ block["down"])
    return x @ last["w"]


def loss(weights: Weights, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross entropy."""
    logits = apply(weights, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def updated(weights: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
    """Apply one update of the optimizer."""
    updates, state = OPTIMIZER.update(gradient, state, weights)
    return optax.apply_updates(weights, updates), state
