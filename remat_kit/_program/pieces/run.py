"""How does an equation run on a piece?

Most primitives do not know the sizes of their operands and run on a piece as they are. Those that
have sizes as parameters get the sizes of the piece.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from remat_kit import _jax
from remat_kit._program import program as _program
from remat_kit._program.pieces.values import Along, Piece, Way, shape_of


def on_piece(eqn: Any, way: Way, values: Sequence[Any], piece: Piece) -> list[Any]:
    """Run an equation on a piece: ``values`` are the pieces of the inputs that the way splits."""
    if _program.checkpoint_name_of(eqn) is not None:
        return list(values)  # a region of pieces saves nothing, so nobody reads the name
    name = eqn.primitive.name
    if name in RUN:
        return RUN[name](eqn, way, values, piece)
    rewrite = _REWRITTEN.get(name)
    if rewrite is not None:
        eqn = eqn.replace(params={**eqn.params, **rewrite(eqn, way, piece)})
    return _jax.bind(eqn, list(values))


def _out_shape(eqn: Any, way: Way, piece: Piece) -> tuple[int, ...]:
    return piece.shape(shape_of(eqn.outvars[0]), way.outputs[0])


def _slice_bounds(eqn: Any, way: Way, piece: Piece) -> dict[str, Any]:
    out = _out_shape(eqn, way, piece)
    starts = list(eqn.params["start_indices"])
    limits = list(eqn.params["limit_indices"])
    how = way.outputs[0]
    assert isinstance(how, Along)
    d = how.axis
    starts[d] = starts[d] // shape_of(eqn.outvars[0])[d] * out[d]
    limits[d] = starts[d] + out[d]
    return {"start_indices": tuple(starts), "limit_indices": tuple(limits)}


def _split_sizes(eqn: Any, way: Way, piece: Piece) -> dict[str, Any]:
    how, axis = way.outputs[0], eqn.params["axis"]
    if not isinstance(how, Along) or how.axis != axis:
        return {}
    return {"sizes": (_out_shape(eqn, way, piece)[axis],) * len(eqn.outvars)}


def _window_sizes(eqn: Any, way: Way, piece: Piece) -> dict[str, Any]:
    return {"slice_sizes": piece.shape(eqn.params["slice_sizes"], way.inputs[0])}


def _gathered_sizes(eqn: Any, way: Way, piece: Piece) -> dict[str, Any]:
    return {} if way.inputs[1] is not None else _window_sizes(eqn, way, piece)


_REWRITTEN: dict[str, Callable[[Any, Way, Piece], dict[str, Any]]] = {
    "broadcast_in_dim": lambda e, w, p: {"shape": _out_shape(e, w, p)},
    "reshape": lambda e, w, p: {"new_sizes": _out_shape(e, w, p)},
    "slice": _slice_bounds,
    "split": _split_sizes,
    "dynamic_slice": _window_sizes,
    "gather": _gathered_sizes,
}


def _run_iota(eqn: Any, way: Way, values: Sequence[Any], piece: Piece) -> list[Any]:
    how, dtype = way.outputs[0], eqn.params["dtype"]
    shape = _out_shape(eqn, way, piece)
    assert isinstance(how, Along)
    if how.axis != eqn.params["dimension"]:
        return _jax.bind(eqn.replace(params={**eqn.params, "shape": shape}), list(values))
    return [lax.broadcast_in_dim(_places(how, piece, dtype), shape, (how.axis,))]


def _places(how: Along, piece: Piece, dtype: Any) -> Any:
    """Return the places in the whole axis of the entries that a piece of the axis has."""
    factors = (how.outer, piece.size, how.inner)
    outer, entry, inner = (lax.broadcasted_iota(dtype, factors, d) for d in range(3))
    offset = jnp.asarray(piece.offset, dtype)
    inners = jnp.asarray(how.inner, dtype)
    blocks = jnp.asarray(piece.n * how.inner, dtype)
    return (outer * blocks + (entry + offset) * inners + inner).reshape(-1)


def _run_random_bits(eqn: Any, way: Way, values: Sequence[Any], piece: Piece) -> list[Any]:
    """Draw the bits of a piece: those that the whole array has there.

    The counter of an element is its place in the whole array, in row-major order, as 64 bits
    (``jax_threefry_partitionable``; the same on 0.10.2 and 0.12).
    """
    how = way.outputs[0]
    assert isinstance(how, Along)
    shape, size = _out_shape(eqn, way, piece), 1
    place = jnp.zeros(shape, jnp.uint32)
    for axis, length in reversed([*enumerate(shape_of(eqn.outvars[0]))]):
        if axis == how.axis:
            entries = _places(how, piece, jnp.uint32)
        else:
            entries = lax.iota(jnp.uint32, length)
        place += lax.broadcast_in_dim(entries * jnp.uint32(size), shape, (axis,))
        size *= length
    first, second = jax.random.key_data(values[0])
    return [operator.xor(*threefry2x32_p.bind(first, second, jnp.zeros_like(place), place))]


# The primitives that run in another way on a piece; other modules add theirs.
RUN: dict[str, Callable[[Any, Way, Sequence[Any], Piece], list[Any]]] = {
    "iota": _run_iota,
    "random_bits": _run_random_bits,
}
