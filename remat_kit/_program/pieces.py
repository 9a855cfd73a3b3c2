"""How can one equation run on a piece of an axis?

A loop over pieces of an axis of ``n`` entries computes a part of each value at a time. An equation
can take part if its inputs and outputs fit together in one of a few ways: each of them is split
along an axis (`Along`), whole (None), or, for an output, a sum, maximum or minimum that is complete
only after the last piece (`Partial`). The rules of this module list these ways for each primitive,
and `on_piece` runs an equation in one of them.

Example: the product of ``x`` of shape (8, 3) and ``w`` of shape (3, 5) can run on pieces of the
rows of ``x``, on pieces of the columns of ``w``, or on pieces of the axis that it sums over:

>>> import jax, jax.numpy as jnp
>>> (dot,) = jax.make_jaxpr(jnp.dot)(jnp.ones((8, 3)), jnp.ones((3, 5))).eqns
>>> ways(dot, 8, In(0), Along(0))
[Way(inputs=(Along(axis=0, outer=1, inner=1), None), outputs=(Along(axis=0, outer=1, inner=1),))]
>>> [way.outputs for way in ways(dot, 3, In(0), Along(1))]
[(<Partial.SUM: 'sum'>,)]
"""

from __future__ import annotations

import contextvars
import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax import lax

from remat_kit import _jax
from remat_kit._program import program as _program
from remat_kit._program.program import Program

# -- values in pieces -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Along:
    """A value is split along an axis, or along one factor of it.

    The axis has ``outer * n * inner`` entries, in this order, and a piece of ``size`` of the ``n``
    has ``outer * size * inner`` of them. So the rows (batch, token) of a matrix are split by tokens
    with ``outer`` equal to the batch size, and the columns (head, channel) by heads with ``inner``
    equal to the number of channels.
    """

    axis: int
    outer: int = 1
    inner: int = 1


class Partial(enum.Enum):
    """Each piece contributes to a value of full shape, and this operation joins contributions."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"

    def join(self, a: Any, b: Any) -> Any:
        if self is Partial.SUM:
            return a + b if a.dtype != bool else a | b
        return jnp.maximum(a, b) if self is Partial.MAX else jnp.minimum(a, b)


How = Along | Partial | None


@dataclasses.dataclass(frozen=True)
class Way:
    """One consistent way to run an equation in pieces: what each input and output is."""

    inputs: tuple[How, ...]
    outputs: tuple[How, ...]

    @property
    def partial(self) -> bool:
        return any(isinstance(how, Partial) for how in self.outputs)


@dataclasses.dataclass(frozen=True)
class In:
    """An input of an equation, by position."""

    position: int


@dataclasses.dataclass(frozen=True)
class Out:
    """An output of an equation, by position."""

    position: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """``size`` entries of ``n``, from ``offset``, which may be a tracer."""

    n: int
    size: int
    offset: Any

    def shape(self, shape: Sequence[int], how: How) -> tuple[int, ...]:
        """Return the shape of a piece of a value of this shape."""
        if not isinstance(how, Along):
            return tuple(shape)
        length = how.outer * self.size * how.inner
        return tuple(length if d == how.axis else s for d, s in enumerate(shape))

    def cut(self, x: Any, along: Along) -> Any:
        """Return the piece of a whole value."""
        factored = self._factored(x, along, self.n)
        piece = lax.dynamic_slice_in_dim(factored, self.offset, self.size, along.axis + 1)
        return piece.reshape(self.shape(jnp.shape(x), along))

    def put(self, x: Any, piece: Any, along: Along) -> Any:
        """Return a whole value with this piece of it replaced."""
        factored = self._factored(x, along, self.n)
        small = self._factored(piece, along, self.size)
        whole = lax.dynamic_update_slice_in_dim(factored, small, self.offset, along.axis + 1)
        return whole.reshape(jnp.shape(x))

    def _factored(self, x: Any, along: Along, entries: int) -> Any:
        s = jnp.shape(x)
        factors = (along.outer, entries, along.inner)
        return jnp.reshape(x, (*s[: along.axis], *factors, *s[along.axis + 1 :]))


def shape_of(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def fits(atom: Any, along: Along, n: int) -> bool:
    """Tell whether an axis of a value has the number of entries that `Along` says."""
    shape = shape_of(atom)
    return along.axis < len(shape) and shape[along.axis] == along.outer * n * along.inner


def candidates(atom: Any, n: int) -> Iterator[Along]:
    """Yield all ways to split a value, whole axes first."""
    for axis, length in enumerate(shape_of(atom)):
        if n > 1 and length and length % n == 0:
            rest = length // n
            for outer in (d for d in range(1, rest + 1) if rest % d == 0):
                yield Along(axis, outer, rest // outer)


# -- the rules ------------------------------------------------------------------------------------
# Most rules match dimensions: a way is a dimension (or None) for each input, and a dimension or
# a `Partial` for each output. All of its dimensions are split alike.

_Match = tuple[tuple[int | None, ...], tuple[int | Partial, ...]]

_MATCHES: dict[str, Callable[[Any], list[_Match]]] = {}


_WAYS: dict[str, Callable[[Any, int, In | Out, Along], list[Way]]] = {}


def _rule(table: dict[str, Any], *names: str) -> Callable[[Any], Any]:
    """Return a decorator that enters a rule for these primitives in a table."""

    def register(rule: Any) -> Any:
        table.update(dict.fromkeys(names, rule))
        return rule

    return register


def is_known(eqn: Any) -> bool:
    """Tell whether there is a rule for the primitive of an equation."""
    name = eqn.primitive.name
    return _program.checkpoint_name_of(eqn) is not None or name in _MATCHES or name in _WAYS


def ways(eqn: Any, n: int, where: In | Out, along: Along) -> list[Way]:
    """Return the ways to run an equation in pieces, given how one input or output is split.

    Args:
        eqn: the equation.
        n: the number of entries of the axis that pieces are taken from.
        where: the input or output.
        along: how it is split.

    Returns:
        The ways; empty if the equation cannot run in pieces like that.
    """
    name = eqn.primitive.name
    if _jax.has_effects(eqn):
        return []
    found: list[Way] = []
    matches = _elementwise if _program.checkpoint_name_of(eqn) is not None else _MATCHES.get(name)
    if matches is not None:
        found += _of_matches(eqn, matches(eqn), n, where, along)
    if name in _WAYS:
        found += _WAYS[name](eqn, n, where, along)
    return list(dict.fromkeys(found))


def all_ways(eqn: Any, n: int) -> list[Way]:
    """Return every way to run an equation in pieces of an axis of ``n`` entries."""
    found: list[Way] = []
    places = [(In(i), v) for i, v in enumerate(eqn.invars)]
    places += [(Out(i), v) for i, v in enumerate(eqn.outvars)]
    for where, atom in places:
        for along in candidates(atom, n):
            found += ways(eqn, n, where, along)
    return list(dict.fromkeys(found))


def _of_matches(
    eqn: Any, matches: Sequence[_Match], n: int, where: In | Out, along: Along
) -> list[Way]:
    def how(atom: Any, dim: int | Partial | None) -> How:
        return Along(dim, along.outer, along.inner) if isinstance(dim, int) else dim

    found = []
    for ins, outs in matches:
        side = ins if isinstance(where, In) else outs
        if side[where.position] != along.axis:
            continue
        way = Way(
            tuple(how(v, d) for v, d in zip(eqn.invars, ins, strict=True)),
            tuple(how(v, d) for v, d in zip(eqn.outvars, outs, strict=True)),
        )
        atoms = zip((*eqn.invars, *eqn.outvars), (*way.inputs, *way.outputs), strict=True)
        if all(fits(v, h, n) for v, h in atoms if isinstance(h, Along)):
            found.append(way)
    return found


_ELEMENTWISE = (
    *("add", "sub", "mul", "div", "max", "min", "rem", "pow", "atan2", "nextafter", "add_any"),
    *("neg", "sign", "abs", "square", "sqrt", "rsqrt", "cbrt", "integer_pow", "floor", "ceil"),
    *("round", "is_finite", "exp", "exp2", "log", "log1p", "expm1", "sin", "cos", "tan", "asin"),
    *("acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "logistic", "erf"),
    *("erfc", "erf_inv", "lgamma", "digamma", "igamma", "igammac", "polygamma", "zeta"),
    *("regularized_incomplete_beta", "bessel_i0e", "bessel_i1e", "real", "imag", "complex"),
    *("conj", "eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "and", "or", "xor"),
    *("not", "population_count", "clz", "shift_left", "shift_right_logical"),
    *("shift_right_arithmetic", "select_n", "clamp", "convert_element_type"),
    *("bitcast_convert_type", "reduce_precision", "stop_gradient", "copy", "copy_p", "mul_add"),
    *("optimization_barrier", "threefry2x32"),
)


@_rule(_MATCHES, *_ELEMENTWISE)
def _elementwise(eqn: Any) -> list[_Match]:
    """All operands have the shape of the result, are scalars, or are broadcast along axes of 1."""
    out = shape_of(eqn.outvars[0])
    shapes = [shape_of(v) for v in eqn.invars]
    same_rank = (
        len(s) == len(out) and all(a in (1, b) for a, b in zip(s, out, strict=True)) for s in shapes
    )
    if not all(alike or s == () for alike, s in zip(same_rank, shapes, strict=True)):
        return []
    if any(shape_of(v) != out for v in eqn.outvars):
        return []
    return [
        (
            tuple(d if s and s[d] == out[d] else None for s in shapes),
            (d,) * len(eqn.outvars),
        )
        for d in range(len(out))
    ]


@_rule(_MATCHES, "broadcast_in_dim")
def _broadcast(eqn: Any) -> list[_Match]:
    dims, source = eqn.params["broadcast_dimensions"], shape_of(eqn.invars[0])
    out = shape_of(eqn.outvars[0])
    rest = (None,) * (len(eqn.invars) - 1)
    found: list[_Match] = []
    for d in range(len(out)):
        at = dims.index(d) if d in dims else None
        split = at if at is not None and source[at] == out[d] else None
        found.append(((split, *rest), (d,)))
    return found


@_rule(_MATCHES, "transpose")
def _transpose(eqn: Any) -> list[_Match]:
    return [((source,), (d,)) for d, source in enumerate(eqn.params["permutation"])]


@_rule(_MATCHES, "squeeze")
def _squeeze(eqn: Any) -> list[_Match]:
    rank = len(shape_of(eqn.invars[0]))
    gone = {d % rank for d in eqn.params["dimensions"]}
    return [((d,), (j,)) for j, d in enumerate(d for d in range(rank) if d not in gone)]


@_rule(_MATCHES, "expand_dims")
def _expand_dims(eqn: Any) -> list[_Match]:
    rank = len(shape_of(eqn.outvars[0]))
    new = {d % rank for d in eqn.params["dimensions"]}
    return [((j,), (d,)) for j, d in enumerate(d for d in range(rank) if d not in new)]


@_rule(_MATCHES, "iota")
def _iota(eqn: Any) -> list[_Match]:
    return [((None,) * len(eqn.invars), (d,)) for d in range(len(shape_of(eqn.outvars[0])))]


@_rule(_MATCHES, "dot_general")
def _dot_general(eqn: Any) -> list[_Match]:
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left, right = (range(len(shape_of(v))) for v in eqn.invars)
    left_free = [d for d in left if d not in (*left_sum, *left_batch)]
    right_free = [d for d in right if d not in (*right_sum, *right_batch)]
    count = len(left_batch)
    found: list[_Match] = []
    found += [((a, b), (i,)) for i, (a, b) in enumerate(zip(left_batch, right_batch, strict=True))]
    found += [((d, None), (count + i,)) for i, d in enumerate(left_free)]
    found += [((None, d), (count + len(left_free) + i,)) for i, d in enumerate(right_free)]
    found += [((a, b), (Partial.SUM,)) for a, b in zip(left_sum, right_sum, strict=True)]
    return found


@_rule(_MATCHES, "conv_general_dilated")
def _convolution(eqn: Any) -> list[_Match]:
    dims = eqn.params["dimension_numbers"]
    if eqn.params["batch_group_count"] != 1:
        return []
    found: list[_Match] = [((dims.lhs_spec[0], None), (dims.out_spec[0],))]
    if eqn.params["feature_group_count"] == 1:
        found.append(((None, dims.rhs_spec[0]), (dims.out_spec[1],)))
        found.append(((dims.lhs_spec[1], dims.rhs_spec[1]), (Partial.SUM,)))
    return found


_JOINING = {
    "reduce_sum": Partial.SUM,
    "reduce_max": Partial.MAX,
    "reduce_min": Partial.MIN,
    "reduce_or": Partial.MAX,
    "reduce_and": Partial.MIN,
}


@_rule(_MATCHES, *_JOINING, "reduce_prod", "reduce_xor", "argmax", "argmin")
def _reduction(eqn: Any) -> list[_Match]:
    axes = eqn.params["axes"]
    kept = [d for d in range(len(shape_of(eqn.invars[0]))) if d not in axes]
    found: list[_Match] = [((d,), (i,)) for i, d in enumerate(kept)]
    partial = _JOINING.get(eqn.primitive.name)
    return found + ([((d,), (partial,)) for d in axes] if partial else [])


def _all_but(eqn: Any, axis: int) -> list[_Match]:
    """Return the matches of an operation that treats all entries of the other axes alike."""
    rank = len(shape_of(eqn.invars[0]))
    return [
        ((d,) * len(eqn.invars), (d,) * len(eqn.outvars)) for d in range(rank) if d != axis % rank
    ]


@_rule(_MATCHES, "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split")
def _along_axis(eqn: Any) -> list[_Match]:
    return _all_but(eqn, eqn.params["axis"])


@_rule(_MATCHES, "sort", "concatenate")
def _along_dimension(eqn: Any) -> list[_Match]:
    return _all_but(eqn, eqn.params["dimension"])


@_rule(_MATCHES, "top_k")
def _top_k(eqn: Any) -> list[_Match]:
    return _all_but(eqn, eqn.params.get("axis", -1))


@_rule(_MATCHES, "stack")
def _stack(eqn: Any) -> list[_Match]:
    axis = eqn.params["axis"]
    rank = len(shape_of(eqn.invars[0]))
    return [((d,) * len(eqn.invars), (d + (d >= axis),)) for d in range(rank)]


@_rule(_MATCHES, "rev")
def _reverse(eqn: Any) -> list[_Match]:
    reversed_axes, rank = eqn.params["dimensions"], len(shape_of(eqn.invars[0]))
    return [((d,), (d,)) for d in range(rank) if d not in reversed_axes]


@_rule(_MATCHES, "pad")
def _pad(eqn: Any) -> list[_Match]:
    config = eqn.params["padding_config"]
    return [((d, None), (d,)) for d, around in enumerate(config) if tuple(around) == (0, 0, 0)]


@_rule(_MATCHES, "slice")
def _slice_others(eqn: Any) -> list[_Match]:
    source, out = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    return [((d,), (d,)) for d in range(len(out)) if source[d] == out[d]]


@_rule(_MATCHES, "dynamic_slice")
def _dynamic_slice(eqn: Any) -> list[_Match]:
    source, out = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    rest = (None,) * (len(eqn.invars) - 1)
    return [((d, *rest), (d,)) for d in range(len(out)) if source[d] == out[d]]


@_rule(_MATCHES, "dynamic_update_slice")
def _dynamic_update_slice(eqn: Any) -> list[_Match]:
    source, update = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    rest = (None,) * (len(eqn.invars) - 2)
    return [((d, d, *rest), (d,)) for d in range(len(source)) if source[d] == update[d]]


@_rule(_MATCHES, "reduce_window_max", "reduce_window_min", "reduce_window_sum")
def _window(eqn: Any) -> list[_Match]:
    p = eqn.params

    def alone(d: int) -> bool:
        window = (p["window_dimensions"][d], p["window_strides"][d], tuple(p["padding"][d]))
        dilation = (p["base_dilation"][d], p["window_dilation"][d])
        return window == (1, 1, (0, 0)) and dilation == (1, 1)

    rank = len(shape_of(eqn.invars[0]))
    return [((d,), (d,)) for d in range(rank) if alone(d)]


@_rule(_MATCHES, "gather")
def _gather(eqn: Any) -> list[_Match]:
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    source, out = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    found: list[_Match] = []
    of_indices = [d for d in range(len(out)) if d not in dims.offset_dims]
    for i, d in enumerate(of_indices):  # the last axis of the indices is the vector of an index
        if i in dims.start_indices_batching_dims:
            at = dims.operand_batching_dims[dims.start_indices_batching_dims.index(i)]
            found.append(((at, i), (d,)))
        else:
            found.append(((None, i), (d,)))
    gone = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    windows = [d for d in range(len(source)) if d not in gone]
    return found + [
        ((w, None), (d,))
        for w, d in zip(windows, dims.offset_dims, strict=True)
        if sizes[w] == source[w] and w not in dims.start_index_map
    ]


# -- rules that split a factor of an axis ---------------------------------------------------------


@_rule(_WAYS, "reshape")
def _reshape(eqn: Any, n: int, where: In | Out, along: Along) -> list[Way]:
    """A factor of an axis stays a factor of an axis, unless it is cut."""
    if len(eqn.invars) > 1 or eqn.params.get("dimensions") is not None:
        return []
    ends = (eqn.invars[0], eqn.outvars[0])
    here, there = ends if isinstance(where, In) else ends[::-1]
    if not fits(here, along, n):
        return []
    other = _refactored(shape_of(here), shape_of(there), n, along)
    if other is None:
        return []
    pair = (along, other) if isinstance(where, In) else (other, along)
    return [Way(pair[:1], pair[1:])]


def _refactored(a: Sequence[int], b: Sequence[int], n: int, along: Along) -> Along | None:
    before = math.prod(a[: along.axis]) * along.outer
    done = 1
    for axis, length in enumerate(b):
        if before and length and before % done == 0 and (done * length) % (before * n) == 0:
            return Along(axis, before // done, done * length // (before * n))
        done *= length
    return None


@_rule(_WAYS, "split")
def _split(eqn: Any, n: int, where: In | Out, along: Along) -> list[Way]:
    """Equal parts of an axis are split alike: three heads of one projection, for example."""
    axis, parts = eqn.params["axis"], len(eqn.outvars)
    if along.axis != axis or len(set(map(int, eqn.params["sizes"]))) > 1:
        return []
    if isinstance(where, In):
        if along.outer % parts or not fits(eqn.invars[0], along, n):
            return []
        along = Along(axis, along.outer // parts, along.inner)
    elif not fits(eqn.outvars[0], along, n):
        return []
    whole = Along(axis, along.outer * parts, along.inner)
    return [Way((whole,), (along,) * parts)]


@_rule(_WAYS, "slice")
def _slice(eqn: Any, n: int, where: In | Out, along: Along) -> list[Way]:
    """One of several equal parts of an axis is split as the axis is."""
    p, axis = eqn.params, along.axis
    source, out = shape_of(eqn.invars[0])[axis], shape_of(eqn.outvars[0])[axis]
    strides = p["strides"] or (1,) * (axis + 1)
    if source == out or not out or strides[axis] != 1:
        return []
    parts, rest = divmod(source, out)
    if rest or p["start_indices"][axis] % out:
        return []
    if isinstance(where, In):
        if along.outer % parts or not fits(eqn.invars[0], along, n):
            return []
        along = Along(axis, along.outer // parts, along.inner)
    elif not fits(eqn.outvars[0], along, n):
        return []
    return [Way((Along(axis, along.outer * parts, along.inner),), (along,))]


# -- running an equation on a piece ---------------------------------------------------------------


def on_piece(eqn: Any, way: Way, values: Sequence[Any], piece: Piece) -> list[Any]:
    """Run an equation on a piece: ``values`` are the pieces of the inputs that the way splits."""
    if _program.checkpoint_name_of(eqn) is not None:
        return list(values)  # a region of pieces saves nothing, so nobody reads the name
    name = eqn.primitive.name
    if name in _RUN:
        return _RUN[name](eqn, way, values, piece)
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
    factors = (how.outer, piece.size, how.inner)
    outer, entry, inner = (lax.broadcasted_iota(dtype, factors, d) for d in range(3))
    offset = jnp.asarray(piece.offset, dtype)
    inners = jnp.asarray(how.inner, dtype)
    blocks = jnp.asarray(piece.n * how.inner, dtype)
    counted = (outer * blocks + (entry + offset) * inners + inner).reshape(-1)
    return [lax.broadcast_in_dim(counted, shape, (how.axis,))]


_RUN: dict[str, Callable[[Any, Way, Sequence[Any], Piece], list[Any]]] = {"iota": _run_iota}


# -- equations with programs inside ---------------------------------------------------------------
# A call runs in pieces if each equation of its body does that depends on a split input. What such
# an equation reads of the other values is cut to size inside.


@dataclasses.dataclass(frozen=True)
class Inside:
    """How a program runs in pieces.

    Attributes:
        program: the program.
        ways: the equations that run in pieces, by index; the others run whole.
        how: each variable that is split or partial.
    """

    program: Program
    ways: Mapping[int, Way]
    how: Mapping[Any, Along | Partial]

    def of(self, atom: Any) -> How:
        return None if isinstance(atom, jec.Literal) else self.how.get(atom)

    @property
    def inputs(self) -> tuple[How, ...]:
        """How the arguments are split; constants are whole."""
        return tuple(map(self.of, self.program.invars[len(self.program.consts) :]))

    @property
    def outputs(self) -> tuple[How, ...]:
        return tuple(map(self.of, self.program.outvars))

    def run(self, values: Sequence[Any], piece: Piece) -> list[Any]:
        """Run the program on one value for each argument, a piece of those that are split."""
        program = self.program
        env = dict(zip(program.invars, (*program.consts, *values), strict=True))

        def read(atom: Any, how: How) -> Any:
            value = atom.val if isinstance(atom, jec.Literal) else env[atom]
            if isinstance(how, Along) and self.of(atom) is None:
                return piece.cut(value, how)
            return value

        for index, eqn in enumerate(program.eqns):
            way = self.ways.get(index)
            if way is None:
                outs = _jax.bind(eqn, [read(v, None) for v in eqn.invars])
            else:
                given = zip(eqn.invars, way.inputs, strict=True)
                outs = on_piece(eqn, way, [read(v, how) for v, how in given], piece)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v, None) for v in program.outvars]


def readers(program: Program) -> dict[Any, list[Any]]:
    """Return the equations that read each variable."""
    found: dict[Any, list[Any]] = {}
    for eqn in program.eqns:
        for v in eqn.invars:
            if not isinstance(v, jec.Literal):
                found.setdefault(v, []).append(eqn)
    return found


def may_join(eqn: Any, way: Way, read_by: Mapping[Any, Sequence[Any]]) -> bool:
    """Tell whether partial results have the derivative of the whole operation.

    The derivative of a maximum is shared by all entries that are equal to it. Maxima of pieces
    would share it among the pieces first, so they may stand only where it is not used.
    """
    return not any(
        how in (Partial.MAX, Partial.MIN)
        and jnp.issubdtype(var.aval.dtype, jnp.inexact)
        and not _is_stopped(var, read_by)
        for var, how in zip(eqn.outvars, way.outputs, strict=True)
    )


def _is_stopped(var: Any, read_by: Mapping[Any, Sequence[Any]], depth: int = 4) -> bool:
    """Tell whether everything that reads a value passes it on to a `stop_gradient`."""
    after = read_by.get(var, ())
    return bool(after) and all(
        e.primitive.name == "stop_gradient"
        or (
            depth > 0
            and e.primitive.name in ("broadcast_in_dim", "reshape", "max", "squeeze")
            and _is_stopped(e.outvars[0], read_by, depth - 1)
        )
        for e in after
    )


def inside(closed: Any, given: Sequence[How], n: int) -> Inside | None:
    """Run the body of a call in pieces, given how its arguments are split; None if it cannot.

    More arguments than those may be split in the result.
    """
    program = Program.of(closed) if hasattr(closed, "consts") else _opened(closed)
    arguments = program.invars[len(program.consts) :]
    split = {v: how for v, how in zip(arguments, given, strict=True) if how is not None}
    read_by = readers(program)
    while True:
        found = _carried(program, split, n, read_by)
        if not isinstance(found, dict):
            return found
        split = found


def _opened(jaxpr: Any) -> Program:
    return Program.of(jec.ClosedJaxpr(jaxpr, ()))


def _carried(
    program: Program, split: dict[Any, Any], n: int, read_by: Mapping[Any, Sequence[Any]]
) -> Inside | dict[Any, Any] | None:
    """Carry splits forward through a program; a dict says that more of its inputs are split."""
    how: dict[Any, Along | Partial] = dict(split)
    inputs, read_whole = set(program.invars[len(program.consts) :]), set()
    chosen: dict[int, Way] = {}
    for index, eqn in enumerate(program.eqns):
        reads = [(i, v) for i, v in enumerate(eqn.invars) if not isinstance(v, jec.Literal)]
        known = [(i, how[v]) for i, v in reads if v in how]
        if not known:
            read_whole.update(v for _, v in reads)
            continue
        position, first = known[0]
        if not isinstance(first, Along):
            return None
        way = next(
            (
                w
                for w in ways(eqn, n, In(position), first)
                if all(w.inputs[i] == h for i, h in known) and may_join(eqn, w, read_by)
            ),
            None,
        )
        if way is None:
            return None
        for i, v in reads:
            wanted = way.inputs[i]
            if wanted is None:
                read_whole.add(v)
            elif v in inputs and v not in how and v not in read_whole:
                return {**split, v: wanted}
        chosen[index] = way
        how.update((v, h) for v, h in zip(eqn.outvars, way.outputs, strict=True) if h is not None)
    return Inside(program, chosen, how)


Bodies = Callable[[Any, Sequence[How], int], "Way | None"]


def _of_calls(eqn: Any, n: int, where: In | Out, along: Along, forward: Bodies) -> list[Way]:
    """Return the ways of a call, which are found by carrying splits of its inputs forward."""
    if isinstance(where, In):
        given: list[How] = [None] * len(eqn.invars)
        given[where.position] = along
        way = forward(eqn, given, n) if fits(eqn.invars[where.position], along, n) else None
        return [] if way is None else [way]
    for i, v in enumerate(eqn.invars):
        first = [along] if fits(v, along, n) else []
        for start in [*first, *(c for c in candidates(v, n) if c != along)]:
            given = [None] * len(eqn.invars)
            given[i] = start
            way = forward(eqn, given, n)
            if way is not None and way.outputs[where.position] == along:
                return [way]
    return []


def _call_of(eqn: Any) -> Any:
    (body,) = _program.bodies(eqn)
    return body.jaxpr


def _through_body(eqn: Any, given: Sequence[How], n: int) -> Way | None:
    found = inside(_call_of(eqn), given, n)
    return None if found is None else Way(found.inputs, found.outputs)


def _run_body(eqn: Any, way: Way, values: Sequence[Any], piece: Piece) -> list[Any]:
    found = inside(_call_of(eqn), way.inputs, piece.n)
    assert found is not None
    return found.run(values, piece)


def _register(
    names: Sequence[str],
    forward: Bodies,
    run: Callable[[Any, Way, Sequence[Any], Piece], list[Any]],
) -> None:
    def rule(eqn: Any, n: int, where: In | Out, along: Along) -> list[Way]:
        return _of_calls(eqn, n, where, along, forward)

    for name in names:
        _WAYS[name], _RUN[name] = rule, run


# A region inside a piece is run without its boundary, since a piece is a region itself.
_register(("jit", "pjit", "closed_call", "core_call"), _through_body, _run_body)
_register(("remat2", "remat", "checkpoint"), _through_body, _run_body)


# .. functions with a derivative of their own


def _moving(eqn: Any) -> list[bool]:
    return [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.invars]


def _rule_of_jvp(eqn: Any, hows: Sequence[How], n: int) -> Inside | None:
    """Return the derivative rule of a `custom_jvp` function in pieces."""
    moving = _moving(eqn)
    avals = [v.aval for v in eqn.invars]
    changes = [a.to_tangent_aval() for a, m in zip(avals, moving, strict=True) if m]

    def both(xs: Sequence[Any], ds: Sequence[Any]) -> list[Any]:
        ys, dys = jax.jvp(_of_moving(eqn, xs), _those(xs, moving), list(ds))
        return [*ys, *_those(dys, _moving_outputs(eqn))]

    found = inside(jax.make_jaxpr(both)(avals, changes), [*hows, *_those(hows, moving)], n)
    return found if found is not None and found.inputs == (*hows, *_those(hows, moving)) else None


def _those(values: Sequence[Any], chosen: Sequence[bool]) -> list[Any]:
    return [x for x, c in zip(values, chosen, strict=True) if c]


def _moving_outputs(eqn: Any) -> list[bool]:
    return [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars]


def _of_moving(eqn: Any, xs: Sequence[Any]) -> Callable[..., list[Any]]:
    """Return an equation as a function of those of its inputs that have tangents."""
    moving = _moving(eqn)

    def call(*some: Any) -> list[Any]:
        given = iter(some)
        return _jax.bind(eqn, [next(given) if m else x for x, m in zip(xs, moving, strict=True)])

    return call


# The functions whose derivative rules are being examined.
_being_checked: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "functions", default=()
)


def _through_jvp(eqn: Any, given: Sequence[How], n: int) -> Way | None:
    way = _through_body(eqn, given, n)
    if way is None or way.partial:
        return None
    function = str(eqn.params["call_jaxpr"])
    if function in _being_checked.get():  # the rule of `relu`, for example, calls `relu`
        return way
    token = _being_checked.set((*_being_checked.get(), function))
    try:
        rule = _rule_of_jvp(eqn, way.inputs, n)
    finally:
        _being_checked.reset(token)
    if rule is None:
        return None
    tangents = _those(way.outputs, _moving_outputs(eqn))
    return way if rule.outputs == (*way.outputs, *tangents) else None


def _run_jvp(eqn: Any, way: Way, values: Sequence[Any], piece: Piece) -> list[Any]:
    # The offset of the piece is an argument, because a rule must not close over a tracer.
    @jax.custom_jvp
    def call(offset: Any, *xs: Any) -> list[Any]:
        return _run_body(eqn, way, xs, dataclasses.replace(piece, offset=offset))

    @call.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        offset, *xs = primals
        here = dataclasses.replace(piece, offset=offset)
        inner = _rule_of_jvp(eqn, way.inputs, piece.n)
        assert inner is not None
        outs = inner.run([*xs, *_those(tangents[1:], _moving(eqn))], here)
        ys, changes = outs[: len(eqn.outvars)], iter(outs[len(eqn.outvars) :])
        return ys, [
            next(changes) if m else np.zeros(jnp.shape(y), jax.dtypes.float0)
            for y, m in zip(ys, _moving_outputs(eqn), strict=True)
        ]

    return list(call(jnp.asarray(piece.offset), *values))


_register(("custom_jvp_call",), _through_jvp, _run_jvp)


@dataclasses.dataclass(frozen=True)
class _Vjp:
    """The rules of a `custom_vjp` function in pieces."""

    forward: Inside
    backward: Inside


def _whole_rules(eqn: Any) -> tuple[Any, Any] | None:
    """Return the rules of a `custom_vjp` function as jaxprs; None if JAX cannot trace them.

    The first one returns the outputs and the residuals, the second one takes the residuals and the
    cotangents.
    """
    avals = [v.aval for v in eqn.invars]
    tree: Any = None

    def forward(*xs: Any) -> list[Any]:
        nonlocal tree
        outs, pull = jax.vjp(_of_moving(eqn, xs), *_those(xs, _moving(eqn)))
        residuals, tree = jax.tree.flatten(pull)
        return [*outs, *residuals]

    def backward(residuals: Sequence[Any], cts: Sequence[Any]) -> Any:
        return jax.tree.unflatten(tree, residuals)(list(cts))

    try:
        first = jax.make_jaxpr(forward)(*avals)
        count = len(eqn.outvars)
        outs = first.out_avals
        cts = [a.to_tangent_aval() for a in outs[:count]]
        return first, jax.make_jaxpr(backward)(outs[count:], cts)
    except Exception:
        return None  # JAX raises the error where the function is differentiated


def _rules_of_vjp(eqn: Any, way: Way, n: int) -> _Vjp | None:
    rules = _whole_rules(eqn)
    if rules is None:
        return None
    first = inside(rules[0], way.inputs, n)
    count = len(way.outputs)
    if first is None or first.inputs != way.inputs or first.outputs[:count] != way.outputs:
        return None
    residuals = first.outputs[count:]
    if any(isinstance(r, Partial) for r in residuals):
        return None
    given = (*residuals, *way.outputs)
    second = inside(rules[1], given, n)
    if second is None or second.inputs != given:
        return None
    # The cotangent of a whole input is a sum over the pieces, and that of a split one is split.
    expected = [how or Partial.SUM for how in _those(way.inputs, _moving(eqn))]
    return _Vjp(first, second) if list(second.outputs) == expected else None


def _through_vjp(eqn: Any, given: Sequence[How], n: int) -> Way | None:
    way = _through_body(eqn, given, n)
    if way is None or way.partial or None in way.outputs or not all(_moving_outputs(eqn)):
        return None
    return way if _rules_of_vjp(eqn, way, n) is not None else None


def _run_vjp(eqn: Any, way: Way, values: Sequence[Any], piece: Piece) -> list[Any]:
    rules = _rules_of_vjp(eqn, way, piece.n)
    assert rules is not None

    @jax.custom_vjp
    def call(offset: Any, *xs: Any) -> list[Any]:
        return _run_body(eqn, way, xs, dataclasses.replace(piece, offset=offset))

    def forward(offset: Any, *xs: Any) -> Any:
        outs = rules.forward.run(xs, dataclasses.replace(piece, offset=offset))
        count = len(way.outputs)
        return outs[:count], (offset, outs[count:])

    def backward(residuals: Any, cts: Any) -> Any:
        offset, values = residuals
        here = dataclasses.replace(piece, offset=offset)
        found = iter(rules.backward.run([*values, *cts], here))
        return None, *(next(found) if m else None for m in _moving(eqn))

    call.defvjp(forward, backward)
    return list(call(jnp.asarray(piece.offset), *values))


_register(("custom_vjp_call",), _through_vjp, _run_vjp)


# .. branches and loops


def _branches(eqn: Any, given: Sequence[How], n: int) -> list[Inside] | None:
    operands = list(given[1:])
    while True:
        found = [inside(branch, operands, n) for branch in eqn.params["branches"]]
        if any(f is None for f in found):
            return None
        bodies = [f for f in found if f is not None]
        wanted = [f.inputs for f in bodies if list(f.inputs) != operands]
        if not wanted:
            return bodies
        operands = list(wanted[0])


def _through_branches(eqn: Any, given: Sequence[How], n: int) -> Way | None:
    if given[0] is not None:
        return None
    bodies = _branches(eqn, given, n)
    if bodies is None or len({b.outputs for b in bodies}) > 1:
        return None
    way = Way((None, *bodies[0].inputs), bodies[0].outputs)
    return None if way.partial else way


def _run_branches(eqn: Any, way: Way, values: Sequence[Any], piece: Piece) -> list[Any]:
    bodies = _branches(eqn, way.inputs, piece.n)
    assert bodies is not None
    index, *operands = values

    def branch(body: Inside) -> Callable[..., list[Any]]:
        return lambda *xs: body.run(xs, piece)

    return list(lax.switch(index, [branch(b) for b in bodies], *operands))


_register(("cond",), _through_branches, _run_branches)


def _iteration(eqn: Any, given: Sequence[How], n: int) -> Inside | None:
    """Return the body of a scan in pieces of axes that it does not scan over."""
    consts, carried = _jax.scan_arity(eqn)
    start = consts + carried
    moved = [_shifted(how, -1) if i >= start else how for i, how in enumerate(given)]
    if any(isinstance(h, Along) and h.axis < 0 for h in moved):
        return None
    while True:
        found = inside(eqn.params["jaxpr"], moved, n)
        if found is None:
            return None
        hows = list(found.inputs)
        for i, how in enumerate(found.outputs[:carried], consts):
            if hows[i] is None:
                hows[i] = how
            elif hows[i] != how:
                return None
        if hows == list(found.inputs):
            return found
        if any(isinstance(h, Partial) for h in hows):
            return None
        moved = hows


def _shifted(how: How, by: int) -> How:
    return dataclasses.replace(how, axis=how.axis + by) if isinstance(how, Along) else how


def _through_scan(eqn: Any, given: Sequence[How], n: int) -> Way | None:
    found = _iteration(eqn, given, n)
    if found is None or any(isinstance(h, Partial) for h in found.outputs):
        return None
    consts, carried = _jax.scan_arity(eqn)
    start = consts + carried
    inputs = [_shifted(h, 1) if i >= start else h for i, h in enumerate(found.inputs)]
    outputs = [_shifted(h, 1) if i >= carried else h for i, h in enumerate(found.outputs)]
    return Way(tuple(inputs), tuple(outputs))


def _run_scan(eqn: Any, way: Way, values: Sequence[Any], piece: Piece) -> list[Any]:
    body = _iteration(eqn, way.inputs, piece.n)
    assert body is not None
    consts, carried = _jax.scan_arity(eqn)
    given, carry = list(values[:consts]), list(values[consts : consts + carried])

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = body.run([*given, *carry, *xs], piece)
        return outs[:carried], outs[carried:]

    p = eqn.params
    carry, ys = lax.scan(
        step,
        carry,
        list(values[consts + carried :]),
        length=p["length"],
        reverse=p["reverse"],
        unroll=p["unroll"],
    )
    return [*carry, *ys]


_register(("scan",), _through_scan, _run_scan)
