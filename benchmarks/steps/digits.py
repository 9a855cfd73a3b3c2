"""Handwritten digits that ship with scikit-learn, as the batches of all programs of this folder."""

from __future__ import annotations

import functools

import jax.numpy as jnp

WIDTH = 96
LAYERS = 8
RATE = 1e-3


@functools.cache
def batch() -> tuple[jnp.ndarray, jnp.ndarray]:
    """Return all 1,797 images as (1797, 64) floats from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return jnp.asarray(images, jnp.float32) / 16.0, jnp.asarray(labels, jnp.int32)
