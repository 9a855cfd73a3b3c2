"""Shapes for arguments."""

import jax
import jax.numpy as jnp


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)
