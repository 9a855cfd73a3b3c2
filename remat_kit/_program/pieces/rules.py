"""In which ways can an equation run in pieces?

Most rules match dimensions: a way is a dimension (or None) for each input, and a dimension or a
`Partial` for each output. All of its dimensions are split alike. The other rules split a factor of
an axis, as a reshape does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from remat_kit import _jax
from remat_kit._program import ops as _ops
from remat_kit._program import program as _program
from remat_kit._program.pieces.values import Along, How, In, Out, Partial, Way, fits, shape_of

_Match = tuple[tuple[int | None, ...], tuple[int | Partial, ...]]

_MATCHES: dict[str, Callable[[Any], list[_Match]]] = {}


# The rules of primitives that do not match dimensions; other modules add theirs.
WAYS: dict[str, Callable[[Any, int, In | Out, Along], list[Way]]] = {}


def _rule(table: dict[str, Any], *names: str) -> Callable[[Any], Any]:
    """Return a decorator that enters a rule for these primitives in a table."""

    def register(rule: Any) -> Any:
        table.update(dict.fromkeys(names, rule))
        return rule

    return register


def is_known(eqn: Any) -> bool:
    """Tell whether there is a rule for the primitive of an equation."""
    name = eqn.primitive.name
    return _program.checkpoint_name_of(eqn) is not None or name in _MATCHES or name in WAYS


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
    if name in WAYS:
        found += WAYS[name](eqn, n, where, along)
    return list(dict.fromkeys(found))


def _of_matches(
    eqn: Any, matches: Sequence[_Match], n: int, where: In | Out, along: Along
) -> list[Way]:
    def how(atom: Any, dim: int | Partial | None) -> How:
        if dim is None or isinstance(dim, Partial):
            return dim
        # `jax.vmap` writes some axes of gathers and scatters as NumPy's integers.
        return Along(int(dim), along.outer, along.inner)

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
    *("optimization_barrier", "threefry2x32", "polynomial", "log2", "mulhi", "one_minus_square"),
    *("igamma_grad_a", "random_gamma_grad"),
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


@_rule(_MATCHES, "random_bits")
def _random_bits(eqn: Any) -> list[_Match]:
    """Threefry computes each element from the key and the element's place in the whole array."""
    size = math.prod(shape_of(eqn.outvars[0]))
    if shape_of(eqn.invars[0]) or not _ops.is_threefry(eqn) or size >= 2**32:
        return []
    return [((None,), (d,)) for d in range(len(shape_of(eqn.outvars[0])))]


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


@_rule(_MATCHES, "unstack")
def _unstack(eqn: Any) -> list[_Match]:
    axis = eqn.params["axis"]
    rank = len(shape_of(eqn.outvars[0]))
    return [((d + (d >= axis),), (d,) * len(eqn.outvars)) for d in range(rank)]


@_rule(_MATCHES, "fft")
def _fourier(eqn: Any) -> list[_Match]:
    rank = len(shape_of(eqn.invars[0]))
    return [((d,), (d,)) for d in range(rank - len(eqn.params["fft_lengths"]))]


@_rule(_MATCHES, "cholesky", "eigh", "lu", "qr", "svd", "triangular_solve")
def _of_each_matrix(eqn: Any) -> list[_Match]:
    """The last two axes of each operand are a matrix, and all others are a batch of them."""
    batch = range(len(shape_of(eqn.invars[0])) - 2)
    return [((d,) * len(eqn.invars), (d,) * len(eqn.outvars)) for d in batch]


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


@_rule(_MATCHES, *(f"scatter{kind}" for kind in ("", "-add", "-sub", "-mul", "-min", "-max")))
def _scatter(eqn: Any) -> list[_Match]:
    """A batch is split, and so is an axis of which each update has all entries."""
    dims = eqn.params["dimension_numbers"]
    source, _, updates = map(shape_of, eqn.invars)
    of_indices = [d for d in range(len(updates)) if d not in dims.update_window_dims]
    batch = zip(dims.operand_batching_dims, dims.scatter_indices_batching_dims, strict=True)
    found: list[_Match] = [((d, i, of_indices[i]), (d,)) for d, i in batch]
    gone = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    windows = [d for d in range(len(source)) if d not in gone]
    return found + [
        ((d, None, u), (d,))
        for d, u in zip(windows, dims.update_window_dims, strict=True)
        if source[d] == updates[u] and d not in dims.scatter_dims_to_operand_dims
    ]


# -- rules that split a factor of an axis ---------------------------------------------------------


@_rule(WAYS, "reshape")
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


@_rule(WAYS, "split")
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


@_rule(WAYS, "slice")
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


@_rule(WAYS, "tile")
def _tile(eqn: Any, n: int, where: In | Out, along: Along) -> list[Way]:
    """Each repetition of an axis is split as the axis is."""
    times = int(eqn.params["reps"][along.axis])
    if isinstance(where, In):
        source = along
    elif times and along.outer % times == 0:
        source = Along(along.axis, along.outer // times, along.inner)
    else:
        return []
    if not times or not fits(eqn.invars[0], source, n):
        return []
    return [Way((source,), (Along(source.axis, source.outer * times, source.inner),))]
