"""Handwritten digits that ship with scikit-learn, as the batches of all programs of this folder.

The 1,797 images are repeated until a batch is full. The sizes are large enough that the activations
do not fit into the vector memory of a TPU core, where they would need none of the device's memory.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

ROWS = 4096
WIDTH = 256
LAYERS = 8
RATE = 1e-4


def make_small() -> None:
    """Make all programs small, for tests on a CPU."""
    global ROWS, WIDTH
    ROWS, WIDTH = 1800, 96


def batch(parts: int = 1) -> tuple[jnp.ndarray, jnp.ndarray]:
    """Return images as (rows, 64) floats from 0 to 1, and their labels; ``parts`` times ROWS."""
    images, labels = _all_images()
    order = np.arange(parts * ROWS) % len(labels)
    return jnp.asarray(images[order]), jnp.asarray(labels[order])


@functools.cache
def _all_images() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.asarray(images, np.float32) / 16.0, np.asarray(labels, np.int32)
