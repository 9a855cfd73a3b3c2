"""Calls, branches and loops in pieces."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from piece_programs import check_all_ways, floats, last

from remat_kit._program.pieces import Along, In, Partial, Way, ways
from remat_kit._program.pieces.inside import may_join, readers
from remat_kit._program.program import Program


@pytest.mark.parametrize(
    "fn",
    [
        jax.nn.relu,
        jax.nn.silu,
        jax.nn.gelu,
        jax.nn.softplus,
        jax.nn.elu,
        jax.nn.relu6,
        jax.nn.softmax,
        jax.nn.log_softmax,
        jax.nn.standardize,
        jax.nn.glu,
        jax.nn.sparse_plus,
        jax.nn.squareplus,
        functools.partial(jax.nn.logsumexp, axis=1),
        jax.checkpoint(jnp.sin),
    ],
    ids=lambda f: getattr(f, "__name__", "f"),
)
def test_functions_of_jax_nn(fn: Any) -> None:
    def called(x: Any) -> Any:
        return jax.jit(fn)(x)

    found = check_all_ways(called, floats(4, 6))
    assert Along(0) in {w.inputs[0] for w in found}


def test_maxima_join_only_where_nobody_differentiates_them() -> None:
    def softmax(x: Any) -> Any:
        return jnp.exp(x - lax.stop_gradient(jnp.max(x, 1, keepdims=True)))

    for fn, expected in ((softmax, True), (lambda x: jnp.max(x, 1) * 2, False)):
        program = Program.of(jax.make_jaxpr(fn)(floats(4, 6)))
        (eqn,) = [e for e in program.eqns if e.primitive.name == "reduce_max"]
        (way,) = ways(eqn, 6, In(0), Along(1))
        assert way.outputs == (Partial.MAX,)
        assert may_join(eqn, way, readers(program)) is expected


def test_branches() -> None:
    def fn(i: Any, x: Any, y: Any) -> Any:
        return lax.switch(i, [lambda x, y: x * 2, lambda x, y: x + jnp.sum(y, 1)], x, y)

    for i in range(2):
        found = check_all_ways(fn, jnp.asarray(i), floats(6), floats(6, 4, seed=1))
        assert Way((None, Along(0), Along(0)), (Along(0),)) in found


def test_scans() -> None:
    w = floats(4, 4)

    def fn(w: Any, h: Any, xs: Any) -> Any:
        return lax.scan(lambda h, x: (jnp.tanh(h @ w + x), h * 2), h, xs)

    found = check_all_ways(fn, w, floats(6, 4), floats(3, 6, 4, seed=1))
    assert Way((None, Along(0), Along(1)), (Along(0), Along(1))) in found
    eqn = last(fn, w, floats(6, 4), floats(3, 6, 4))
    assert ways(eqn, 3, In(2), Along(0)) == []  # the axis that it scans over
    assert ways(eqn, 4, In(1), Along(1)) == []  # the product mixes the columns
