"""Blocks of two products, each of which may be one region."""

import jax
import jax.numpy as jnp
import pytest
from shapes import struct

from remat_kit._chip.compile import compile_program
from remat_kit._chip.target import target

DEPTH = 3


def compiled(loss, args, name):
    if not target(name).available:
        pytest.skip(f"the compiler for {name} is not installed")
    return compile_program(loss, args, name)


ARGS = ([struct(64, 64)] * DEPTH * 2, struct(512, 64))


def chain(remat):
    """Two products and tanh a block; one block is one region."""

    def block(x, w0, w1):
        return jnp.tanh(jnp.tanh(x @ w0) @ w1)

    def loss(ws, x):
        for i in range(DEPTH):
            with jax.named_scope(f"block_{i}"):
                x = remat(block)(x, ws[2 * i], ws[2 * i + 1])
        return jnp.sum(x * x)

    return loss
