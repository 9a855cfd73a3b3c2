"""Runs the last equation of a function in pieces, in every way that the rules name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_kit import _jax
from remat_kit._program.pieces import Along, In, Out, Piece, Way, on_piece, ways
from remat_kit._program.pieces.values import candidates


def all_ways(eqn: Any, n: int) -> list[Way]:
    """Return every way to run an equation in pieces of an axis of ``n`` entries."""
    found: list[Way] = []
    places = [(In(i), v) for i, v in enumerate(eqn.invars)]
    places += [(Out(i), v) for i, v in enumerate(eqn.outvars)]
    for where, atom in places:
        for along in candidates(atom, n):
            found += ways(eqn, n, where, along)
    return list(dict.fromkeys(found))


def in_pieces(eqn: Any, way: Way, values: list[Any], n: int, k: int) -> list[Any]:
    """Run an equation piece by piece; the last piece may be smaller."""
    size = -(-n // k)
    outs: list[Any] = [None] * len(eqn.outvars)
    for offset in range(0, n, size):
        piece = Piece(n, min(size, n - offset), jnp.asarray(offset))
        given = [
            piece.cut(x, how) if isinstance(how, Along) else x
            for x, how in zip(values, way.inputs, strict=True)
        ]
        found = on_piece(eqn, way, given, piece)
        for i, (var, how, y) in enumerate(zip(eqn.outvars, way.outputs, found, strict=True)):
            assert y.shape == piece.shape(var.aval.shape, how)
            if isinstance(how, Along):
                whole = jnp.zeros_like(y, shape=var.aval.shape) if outs[i] is None else outs[i]
                outs[i] = piece.put(whole, y, how)
            else:
                outs[i] = y if outs[i] is None or how is None else how.join(outs[i], y)
    return outs


def check_all_ways(fn: Callable[..., Any], *args: Any, pieces: int = 3) -> list[Way]:
    """Check every way to run the last equation of a function, and return these ways."""
    closed = jax.make_jaxpr(fn)(*args)
    env = dict(zip(closed.jaxpr.invars, args, strict=True))
    env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    if not closed.jaxpr.eqns:  # a reshape to the same shape, for example
        return []
    for eqn in closed.jaxpr.eqns:
        values = [v.val if isinstance(v, jax.extend.core.Literal) else env[v] for v in eqn.invars]
        outs = _jax.bind(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    sizes = {s for v in (*eqn.invars, *eqn.outvars) for s in getattr(v.aval, "shape", ())}
    found = []
    for n in sorted({d for s in sizes for d in range(2, s + 1) if s % d == 0}):
        for way in all_ways(eqn, n):
            split = jax.jit(functools.partial(in_pieces, eqn, way, n=n, k=pieces))(values)
            for a, b in zip(split, outs, strict=True):
                assert a.dtype == b.dtype
                rounded = jnp.issubdtype(a.dtype, jnp.inexact)
                tolerance = 2e-5 if rounded else 0.0
                wide = np.result_type(a.dtype if a.dtype != jnp.bfloat16 else np.float32, float)
                np.testing.assert_allclose(
                    np.asarray(a, dtype=wide),
                    np.asarray(b, dtype=wide),
                    rtol=tolerance,
                    atol=tolerance,
                )
            found.append(way)
    return found


def floats(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def ints(*shape: int, high: int = 5, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, size=shape), jnp.int32)


def last(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.make_jaxpr(fn)(*args).eqns[-1]
