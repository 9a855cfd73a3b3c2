"""What the derivative of an operation reads and makes, beside what JAX's linearization finds."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from shapes import struct

from remat_kit._planner.costs import derivative as _derivative
from remat_kit._program.program import flat_program


def _with_axis(x, y):
    return x * y[None], x + y[None], x - y[None], jnp.sum(x, 0), jnp.concatenate([x, y[None]])


def _arithmetic(x, y):
    y = lax.broadcast_in_dim(y, (1, 8), (1,))
    return [p.bind(x, y) for p in (lax.add_p, lax.sub_p, lax.mul_p)]


@pytest.mark.parametrize("fn", [_with_axis, _arithmetic])
def test_what_is_known_of_a_derivative_is_what_linearizing_finds(fn):
    program = flat_program(jax.make_jaxpr(fn)(struct(4, 8), struct(8)))
    for eqn in program.eqns:
        for mask in itertools.product((True, False), repeat=len(eqn.invars)):
            if any(mask):
                assert _derivative.derivative_of(eqn, mask) == _derivative._linearized(eqn, mask), (
                    eqn
                )
