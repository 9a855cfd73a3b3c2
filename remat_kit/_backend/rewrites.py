"""Rewrite equations so that their derivatives take less memory and compute the same values."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from remat_kit import _jax
from remat_kit._backend import facts as _facts
from remat_kit._backend.barriers import batched_in_turn, computed_early, kernel_first
from remat_kit._backend.facts import Fact
from remat_kit._jax import (
    ad,
    ad_util,
    batching,
    core,
    dispatch,
    mlir,
    own_primitive,
    rule_of,
    windowed_reductions,
)
from remat_kit._program import ops as _ops

# The derivative of a maximum over windows is a select-and-scatter, which XLA's GPU compiler does
# not have. It scatters into an array of zeros as large as the pooled array instead. The zeros
# depend on nothing, so they are allocated at the beginning of the program and stay live. XLA's CPU
# compiler does the same, and it also saves, for each maximum, an index of four bytes for each
# dimension. The two primitives below are those of JAX with another lowering: on GPUs the zeros
# depend on the cotangent; on CPUs the derivative saves one byte for each maximum and does not
# scatter. Seen on jax 0.10.2 and 0.12.


def lean_pooling(eqn: Any) -> Any:
    """Rewrite a maximum or minimum over windows so that its derivative takes less memory.

    Other equations are returned unchanged. Values and derivatives are bitwise the same.
    """
    if eqn.primitive.name not in ("reduce_window_max", "reduce_window_min"):
        return eqn
    dilation = (*eqn.params["base_dilation"], *eqn.params["window_dilation"])
    (x,) = eqn.invars
    if any(d != 1 for d in dilation) or not jnp.issubdtype(x.aval.dtype, jnp.floating):
        return eqn
    return _in_place_of(eqn, _pooled(eqn.primitive, tuple(sorted(eqn.params.items()))))


@functools.lru_cache(maxsize=256)
def _pooled(primitive: Any, given: tuple[tuple[str, Any], ...]) -> Any:
    params = dict(given)
    largest = primitive.name == "reduce_window_max"
    select = jax.lax.ge_p if largest else jax.lax.le_p

    @jax.custom_jvp
    def pooled(x: Any) -> Any:
        return primitive.bind(x, **params)

    @pooled.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        (x,), (dx,) = primals, tangents
        return pooled(x), _gather_p.bind(dx, x, select_prim=select, **params)

    return pooled


def _like(primitive: Any) -> Any:
    """Return a primitive with the rules of another, but no transpose and no lowering.

    Both primitives of pooling are linear in their first argument, and no cotangent flows to the
    second one, the array that was pooled.
    """
    made = own_primitive(f"remat_kit_{primitive.name}", primitive.name)
    made.def_impl(functools.partial(dispatch.apply_primitive, made))
    made.def_effectful_abstract_eval(primitive.abstract_eval)

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        (_, operand), (tangent, _) = primals, tangents
        out = made.bind(*primals, **params)
        if type(tangent) is ad_util.Zero:
            return out, ad_util.p2tz(out)
        return out, made.bind(tangent, operand, **params)  # reached by regions inside regions

    ad.primitive_jvps[made] = jvp
    batching.fancy_primitive_batchers[made] = batching.fancy_primitive_batchers[primitive]
    return made


def saved_places(eqn: Any) -> int:
    """Return the bytes that the derivative of a maximum over windows saves on a CPU.

    For each window, the derivative saves the position of the maximum in one byte. For large windows
    it saves an index for each dimension instead.
    """
    if eqn.primitive.name not in ("reduce_window_max", "reduce_window_min"):
        return 0
    window = eqn.params["window_dimensions"]
    one = 1 if math.prod(window) <= LARGE_WINDOW else 4 * len(window)
    return math.prod(eqn.outvars[0].aval.shape) * one


_CONV = jax.lax.conv_general_dilated_p


_PRODUCTS = (_CONV, jax.lax.dot_general_p)


def lean_relu(eqn: Any, read_later: Collection[Any], unread: Collection[Any]) -> Any:
    """Rewrite a `jax.nn.relu` so that its derivative saves less than the input.

    The derivative in JAX asks whether the input is positive. If a later derivative reads the
    output, it asks whether the output is positive instead: otherwise compilers save the input as
    well (`facts.READS_THE_INPUT_OF_RELU`). On a CPU, the stack in
    `tests/apply/test_run_schedule.py` takes 21 MiB instead of 15 MiB (jax 0.12). If none does, for
    example because a maximum over windows follows, and no derivative reads what the input is
    computed from, the derivative reads a mask, which has one byte for each element. XLA's CPU
    compiler would compute the mask in the derivative and save the input for that
    (`facts.COMPUTES_MASKS_AGAIN`). Values and derivatives are bitwise the same.

    `rule_of` finds the rule of `jax.nn.relu` on jax 0.10.2 and 0.12.

    Args:
        eqn: an equation. If it is not a relu, it is returned unchanged.
        read_later: variables that derivatives read.
        unread: variables that are computed from products, and that no derivative reads.
    """
    if eqn.primitive.name != "custom_jvp_call" or rule_of(eqn) is not jax.nn.relu.jvp:
        return eqn
    if eqn.outvars[0] in read_later:
        return _in_place_of(eqn, _relu)
    return _in_place_of(eqn, _relu_with_mask) if eqn.invars[0] in unread else eqn


def operands_of_convolutions(eqns: Iterable[Any]) -> set[Any]:
    """Return the variables that convolutions multiply, so that derivatives read them.

    Those that a convolution reads through a view are among them too. Operands of other products are
    not: a TPU stores them in half precision if no derivative of a relu reads them, so `lean_relu`
    made a residual MLP take more memory there (v5e, jax 0.12).
    """
    found = set[Any]()
    for eqn in reversed([*eqns]):
        reads = [v for v in eqn.invars if not isinstance(v, jec.Literal)]
        is_seen = _ops.is_view(eqn) and not found.isdisjoint(eqn.outvars)
        if eqn.primitive is _CONV or is_seen:
            found.update(reads)
    return found


def sums_of_products(eqns: Iterable[Any]) -> set[Any]:
    """Return the variables that are products or convolutions, perhaps with a bias added to them.

    The derivative of a sum reads nothing, so if nothing else does, no derivative reads them.
    """
    found = set[Any]()
    for eqn in eqns:
        reads = [v for v in eqn.invars if not isinstance(v, jec.Literal)]
        adds = eqn.primitive is jax.lax.add_p or _ops.is_view(eqn)
        if eqn.primitive in _PRODUCTS or (adds and not found.isdisjoint(reads)):
            found.update(eqn.outvars)
    return found


@jax.custom_jvp
def _relu(x: Any) -> Any:
    return jnp.maximum(x, 0)


@_relu.defjvp
def _relu_derivative(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    # Without the barrier, XLA finds that the input has the same sign and reads the input again.
    out = jax.lax.optimization_barrier(_relu(x))
    return out, jax.lax.select(out > 0, dx, jax.lax.full_like(dx, 0))


@jax.custom_jvp
def _relu_with_mask(x: Any) -> Any:
    return jnp.maximum(x, 0)


@_relu_with_mask.defjvp
def _relu_with_mask_derivative(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    (mask,) = computed_early([x > 0])
    return _relu_with_mask(x), jax.lax.select(mask, dx, jax.lax.full_like(dx, 0))


def evaluated_on_piece(
    eqn: Any, values: Sequence[Any], summed: Collection[int] = ()
) -> list[Any] | None:
    """Evaluate an equation in its lean form on pieces of its operands.

    ``summed`` has the sizes of the arrays that the loop sums, for `batched_in_turn`.
    Returns None if the equation has no lean form. Only a gather of single elements has one for
    operands that are not floating-point arrays, and not if the axis that it indexes is cut.
    """
    pick = _pick(eqn)
    if pick is not None:
        axes = eqn.params["dimension_numbers"].start_index_map
        cut = any(values[0].shape[a] != eqn.invars[0].aval.shape[a] for a in axes)
        return None if cut else [pick(*values)]
    if any(jax.typeof(x).dtype not in _BITS for x in values):
        return None
    product = batched_in_turn(eqn, values, summed)
    if product is not None:
        return product
    given = tuple(sorted(eqn.params.items())) if eqn.primitive.name in _LEAN else ()
    if eqn.primitive is _CONV:
        return [_convolution(given, _looped_p)(*values)]
    if lean_pooling(eqn) is not eqn:
        return [_pooled(eqn.primitive, given)(*values)]
    if eqn.primitive.name == "custom_jvp_call" and rule_of(eqn) is jax.nn.relu.jvp:
        return [_relu(*values)]
    return None


_LEAN = ("conv_general_dilated", "reduce_window_max", "reduce_window_min")


def _in_place_of(eqn: Any, fn: Any) -> Any:
    """Trace ``fn`` to one equation and put it in the place of ``eqn``."""
    (found,) = jax.make_jaxpr(fn)(*(v.aval for v in eqn.invars)).eqns
    return found.replace(
        invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info, ctx=eqn.ctx
    )


# The derivative of an element that is picked from each row, as losses with integer labels pick
# logits, scatters the cotangents into zeros. XLA's TPU compiler turns the scatter into a comparison
# with the index, unless the array has an axis of one entry beside the rows, such as a batch of one
# sequence. Then it scatters into an array in another order of elements, and the cotangent of the
# logits is in memory twice. The probe `scatters_picked_elements` takes 1,500 MiB in place of 500.
# On TPUs such axes are dropped first. XLA's CPU and GPU compilers scatter in either case, and may
# need more memory without the axes. Seen on jax 0.10.2 and 0.12.


def lean_pick(eqn: Any) -> Any:
    """Rewrite a gather of single elements so that, on TPUs, its derivative takes less memory.

    Other equations are returned unchanged. Values and derivatives are bitwise the same.
    """
    pick = _pick(eqn)
    return eqn if pick is None else _in_place_of(eqn, jax.jit(pick))


def _pick(eqn: Any) -> Callable[[Any, Any], Any] | None:
    """Return a gather that drops the axes of one entry of its operand on TPUs.

    None if the equation gathers more than single elements, or if its operand has no such axes.
    """
    if eqn.primitive is not jax.lax.gather_p or math.prod(eqn.params["slice_sizes"]) != 1:
        return None
    numbers = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    away = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    units = [a for a in range(len(shape)) if a not in away]
    if not units or any(shape[a] != 1 or a in numbers.start_index_map for a in units):
        return None
    kept = sorted(away)

    def among_kept(axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(kept.index(a) for a in axes)

    params = eqn.params | {
        "slice_sizes": (1,) * len(kept),
        "dimension_numbers": jax.lax.GatherDimensionNumbers(
            offset_dims=(),
            collapsed_slice_dims=among_kept(numbers.collapsed_slice_dims),
            start_index_map=among_kept(numbers.start_index_map),
            operand_batching_dims=among_kept(numbers.operand_batching_dims),
            start_indices_batching_dims=numbers.start_indices_batching_dims,
        ),
    }

    def lean(x: Any, indices: Any) -> Any:
        out = jax.lax.gather_p.bind(jax.lax.squeeze(x, units), indices, **params)
        return jax.lax.expand_dims(out, numbers.offset_dims)

    def plain(x: Any, indices: Any) -> Any:
        return jax.lax.gather_p.bind(x, indices, **eqn.params)

    def pick(x: Any, indices: Any) -> Any:
        there = dict.fromkeys(_facts.SCATTERS_PICKED_ELEMENTS.backends, lean)
        return jax.lax.platform_dependent(x, indices, **there, default=plain)

    return pick


# The gradient of a convolution's kernel reads a transposed copy of the convolution's input. The
# copy depends on nothing from the backward pass, so XLA's CPU compiler makes it in the forward
# pass. If a region saves the input too, the input and its copy are both live until the backward
# pass. The primitives below make the copy depend on the cotangent.
# Seen on jax 0.10.2 and 0.12.


_BITS = {
    np.dtype(t): np.dtype(f"uint{jnp.finfo(t).bits}")
    for t in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
}


def convolution_with_late_copies(eqn: Any) -> Any:
    """Rewrite a convolution so that, on CPUs, its derivative copies the input late.

    Other equations are returned unchanged. Values and derivatives are bitwise the same.
    """
    if eqn.primitive is not _CONV or any(v.aval.dtype not in _BITS for v in eqn.invars):
        return eqn
    return _in_place_of(eqn, _convolution(tuple(sorted(eqn.params.items()))))


@functools.lru_cache(maxsize=256)
def _convolution(given: tuple[tuple[str, Any], ...], conv: Any = _CONV) -> Any:
    """Return a convolution with the derivative above, made of JAX's primitive or of `_looped_p`."""
    params = dict(given)

    @jax.custom_jvp
    def convolution(x: Any, kernel: Any) -> Any:
        return conv.bind(x, kernel, **params)

    def derivative(primals: Any, tangents: Any) -> Any:
        (x, kernel), (dx, dkernel) = primals, tangents
        out = conv.bind(x, kernel, **params)
        given = [type(t) is not SymbolicZero for t in (dx, dkernel)]
        if all(given):
            return out, _both_p.bind(dx, dkernel, x, kernel, conv=conv, **params)
        if given[0]:
            return out, conv.bind(dx, kernel, **params)
        if given[1]:
            return out, _conv_p.bind(x, dkernel, conv=conv, **params)
        return out, jnp.zeros_like(out)

    convolution.defjvp(derivative, symbolic_zeros=True)
    return convolution


def _conv_transpose(ct: Any, x: Any, kernel: Any, *, conv: Any, **params: Any) -> list[Any]:
    if ad.is_undefined_primal(kernel) and type(ct) is not ad_util.Zero:
        x = _after_p.bind(x, ct)
    return ad.primitive_transposes[conv](ct, x, kernel, **params)


def _conv_jvp(primals: Any, tangents: Any, *, conv: Any, **params: Any) -> Any:
    return ad.primitive_jvps[conv](primals, tangents, **params)


def _batched_conv(*args: Any, conv: Any = None, **params: Any) -> Any:
    return batching.fancy_primitive_batchers[_CONV](*args, **params)


def _shape_of_conv(*avals: Any, conv: Any = None, **params: Any) -> Any:
    return _CONV.abstract_eval(*avals, **params)


_conv_p = own_primitive("remat_kit_conv", _CONV.name)


_conv_p.def_impl(functools.partial(dispatch.apply_primitive, _conv_p))


_conv_p.def_effectful_abstract_eval(_shape_of_conv)


ad.primitive_jvps[_conv_p] = _conv_jvp


ad.primitive_transposes[_conv_p] = _conv_transpose


batching.fancy_primitive_batchers[_conv_p] = _batched_conv


_FAST_ORDER = {
    3: ("NWC", "WIO", "NWC"),
    4: ("NHWC", "HWIO", "NHWC"),
    5: ("NDHWC", "DHWIO", "NDHWC"),
}


# XLA's CPU compiler has a fast convolution for axes in the order NHWC, HWIO and NHWC. It transposes
# the operands of other convolutions, such as all gradients, but not of those in loops, which run in
# plain nested loops and take many times as long. This is JAX's primitive for the bodies of our
# loops; on CPUs it transposes there. Seen on jax 0.10.2 and 0.12.
_looped_p = own_primitive("remat_kit_conv_in_loop", _CONV.name)


_looped_p.def_impl(functools.partial(dispatch.apply_primitive, _looped_p))


_looped_p.def_effectful_abstract_eval(_shape_of_conv)


def _looped_transpose(ct: Any, *operands: Any, **params: Any) -> list[Any]:
    """Return the cotangents as JAX does, but compute them with `_looped_p` as well."""
    at = [ad.is_undefined_primal(v) for v in operands].index(True)
    if type(ct) is ad_util.Zero:
        return [None, None]

    def by_rule(ct: Any, known: Any) -> Any:
        given = [known, known]
        given[at] = operands[at]
        return ad.primitive_transposes[_CONV](ct, *given, **params)[at]

    values = ct, operands[1 - at]
    closed = jax.make_jaxpr(by_rule)(*map(jax.typeof, values))
    assert not closed.consts
    eqns = [
        eqn.replace(primitive=_looped_p) if eqn.primitive is _CONV else eqn
        for eqn in closed.jaxpr.eqns
    ]
    looped = _jax.jaxpr_of(closed.jaxpr.invars, closed.jaxpr.outvars, eqns)
    found: list[Any] = [None, None]
    (found[at],) = jec.jaxpr_as_fun(jec.ClosedJaxpr(looped, ()))(*values)
    return found


ad.defjvp(
    _looped_p,
    lambda dx, x, kernel, **params: _looped_p.bind(dx, kernel, **params),
    lambda dkernel, x, kernel, **params: _looped_p.bind(x, dkernel, **params),
)


ad.primitive_transposes[_looped_p] = _looped_transpose


batching.fancy_primitive_batchers[_looped_p] = _batched_conv


def _in_fast_order(x: Any, kernel: Any, *, dimension_numbers: Any, **params: Any) -> Any:
    """Convolve arrays that are transposed to the order of axes for which XLA:CPU is fast.

    The gradient of the input of a grouped convolution has few products for each element. It is
    faster without.
    """
    specs = dimension_numbers
    if x.ndim not in _FAST_ORDER or params["feature_group_count"] > 1:
        return _CONV.bind(x, kernel, dimension_numbers=specs, **params)
    fast = jax.lax.conv_dimension_numbers(x.shape, kernel.shape, _FAST_ORDER[x.ndim])
    if specs == fast:
        return _CONV.bind(x, kernel, dimension_numbers=specs, **params)
    x, kernel = (
        jax.lax.transpose(v, [old[new.index(axis)] for axis in range(v.ndim)])
        for v, old, new in (
            (x, specs.lhs_spec, fast.lhs_spec),
            (kernel, specs.rhs_spec, fast.rhs_spec),
        )
    )
    out = _CONV.bind(x, kernel, dimension_numbers=fast, **params)
    return jax.lax.transpose(out, [fast.out_spec[specs.out_spec.index(a)] for a in range(out.ndim)])


# The derivative with respect to both arguments. The gradient of the kernel is computed first, so
# that the arrays that it reads, often the largest of the program, can be freed before the cotangent
# of the input is allocated. XLA's CPU compiler otherwise computes kernel gradients late.
_both_p = core.Primitive("remat_kit_convolutions")


_both_p.def_impl(functools.partial(dispatch.apply_primitive, _both_p))


_both_p.def_abstract_eval(
    lambda dx, dkernel, x, kernel, **params: _shape_of_conv(dx, kernel, **params)[0]
)


def _both(dx: Any, dkernel: Any, x: Any, kernel: Any, *, conv: Any, **params: Any) -> Any:
    of_input = conv.bind(dx, kernel, **params)
    return jax.lax.add(of_input, _conv_p.bind(x, dkernel, conv=conv, **params))


def _both_transpose(
    ct: Any, dx: Any, dkernel: Any, x: Any, kernel: Any, *, conv: Any, **params: Any
) -> list[Any]:
    if type(ct) is ad_util.Zero:
        return [None] * 4
    given = [ad.is_undefined_primal(v) for v in (dx, dkernel)]  # a tangent may be a known zero
    found: list[Any] = [None] * 4
    if given[1]:
        found[1] = _conv_transpose(ct, x, dkernel, conv=conv, **params)[1]
    if all(given):
        kernel, found[1] = kernel_first([kernel, found[1]])
    if given[0]:
        found[0] = ad.primitive_transposes[conv](ct, dx, kernel, **params)[0]
    return found


def _both_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    given = tuple(ad.instantiate_zeros(t) for t in tangents)
    if all(type(t) is ad_util.Zero for t in tangents[2:]):  # reached by regions inside regions
        return _both_p.bind(*primals, **params), _both_p.bind(*given[:2], *primals[2:], **params)
    return jax.jvp(functools.partial(_both, **params), tuple(primals), given)


def _both_batch(values: Any, dims: Any, **params: Any) -> Any:
    return jax.vmap(functools.partial(_both, **params), dims)(*values), 0


ad.primitive_jvps[_both_p] = _both_jvp


ad.primitive_transposes[_both_p] = _both_transpose


batching.primitive_batchers[_both_p] = _both_batch


# The identity on the first argument, computed only after the second argument is there.
_after_p = core.Primitive("remat_kit_after")


_after_p.def_impl(lambda x, y: x)


_after_p.def_abstract_eval(lambda x, y: x)


ad.defjvp(_after_p, lambda dx, x, y: _after_p.bind(dx, y), None)


ad.primitive_transposes[_after_p] = lambda ct, x, y: [_after_p.bind(ct, y), None]


batching.primitive_batchers[_after_p] = lambda values, dims: (_after_p.bind(*values), dims[0])


def _after(x: Any, y: Any) -> Any:
    """Return ``x`` after ``y``: OR the bits of ``x`` with a zero that is computed from ``y``.

    Without the barrier, XLA recomputes ``x`` here and keeps its inputs live for that.
    """
    if not x.size or not y.size:
        return x
    bits = jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(x), _BITS[x.dtype])
    zero = jax.lax.bitcast_convert_type(_zero_after(y), _BITS[y.dtype]).astype(bits.dtype)
    return jax.lax.bitcast_convert_type(bits | zero, x.dtype)


# The identity on a slice of a stacked input of a scan, from which no compiler moves the rounding.
_slice_p = own_primitive("remat_kit_rounded_late", "optimization_barrier")


_slice_p.def_impl(functools.partial(dispatch.apply_primitive, _slice_p))


_slice_p.def_abstract_eval(lambda x: x)


ad.deflinear(_slice_p, lambda ct: [ct])


batching.defvectorized(_slice_p)


def rounded_late(x: Any) -> Any:
    """Return ``x``, a slice of a stacked input of a scan, so that it is rounded where it is read.

    Where a product or a conversion rounds a slice to bfloat16, XLA's TPU compiler rounds the whole
    stack instead, before the first iteration. The rounded stack of all weights is then live through
    both passes: 1.8 GiB for a Llama of 1.5 billion parameters on a v5e. A barrier does not keep the
    compiler from that, nor does a `select`. It does not happen where the slice is not rounded
    directly, so an OR of its bits with zeros comes between (jax 0.12). The zeros are the same bits,
    all shifted out. On other compilers this is ``x`` itself.
    """
    return _slice_p.bind(x)


def rounded_late_equation(x: Any, out: Any, like: Any) -> Any:
    """Return the equation ``out = rounded_late(x)`` at the place of another equation."""
    return like.replace(
        primitive=_slice_p, params={}, invars=[x], outvars=[out], effects=core.no_effects
    )


def may_be_rounded(aval: Any) -> bool:
    """Tell whether `rounded_late` is of use for a slice: matrices, and not scales or biases.

    >>> [may_be_rounded(jax.typeof(jnp.ones(shape))) for shape in ((2, 2), (2,))]
    [True, False]
    """
    return getattr(aval, "dtype", None) == jnp.float32 and aval.ndim > 1


def _with_zeros(x: Any) -> Any:
    bits = jax.lax.bitcast_convert_type(x, _BITS[x.dtype])
    gone = np.full(x.shape, 8 * bits.dtype.itemsize, bits.dtype)
    zeros = jax.lax.shift_right_logical(bits, gone)
    return jax.lax.bitcast_convert_type(bits | zeros, x.dtype)


_gather_p = _like(windowed_reductions.select_and_gather_add_p)


_scatter_p = _like(windowed_reductions.select_and_scatter_add_p)


def _gather_transpose(
    ct: Any, tangents: Any, operand: Any, *, base_dilation: Any, window_dilation: Any, **params: Any
) -> list[Any]:
    del base_dilation, window_dilation  # both are all ones
    if type(ct) is ad_util.Zero:
        return [ad_util.Zero(tangents.aval), None]
    return [_scatter_p.bind(*core.auto_insert_reshard(ct, operand), **params), None]


def _late_scatter(source: Any, operand: Any, **params: Any) -> Any:
    """Do what JAX's lowering for GPUs does, but start from zeros that depend on ``source``."""
    select, padding = params["select_prim"], params["padding"]
    dtype = operand.dtype
    least = np.array(-np.inf if select is jax.lax.ge_p else np.inf, dtype)
    padded = jax.lax.pad(operand, least, [(lo, hi, 0) for lo, hi in padding])
    out = windowed_reductions._select_and_scatter(
        padded,
        select.bind,
        params["window_dimensions"],
        params["window_strides"],
        [(0, 0)] * len(padding),
        source,
        _zero_after(source),
        jax.lax.add,
    )
    ends = [lo + n for (lo, _), n in zip(padding, operand.shape, strict=True)]
    return jax.lax.slice(out, [lo for lo, _ in padding], ends)


# For windows with more elements XLA's own derivative is used, because this derivative adds up as
# many terms as a window has elements.
LARGE_WINDOW = 64


def _by_place(source: Any, operand: Any, **params: Any) -> Any:
    """The same as `_late_scatter` for CPUs, by positions instead of a scatter.

    The function finds the position of each maximum in its window. It then adds up the cotangents
    that flow to each element of the operand, in the order of the windows, as XLA does.
    """
    window, strides = params["window_dimensions"], params["window_strides"]
    if math.prod(window) > LARGE_WINDOW:
        return windowed_reductions.select_and_scatter_add_p.bind(source, operand, **params)
    select, padding = params["select_prim"], params["padding"]
    least = np.array(-np.inf if select is jax.lax.ge_p else np.inf, operand.dtype)
    padded = jax.lax.pad(operand, least, [(lo, hi, 0) for lo, hi in padding])
    spans = [(n - 1) * stride + 1 for n, stride in zip(source.shape, strides, strict=True)]
    best, *others = (
        jax.lax.slice(padded, k, [o + n for o, n in zip(k, spans, strict=True)], strides)
        for k in np.ndindex(*window)
    )
    place = jnp.zeros(source.shape, np.uint8)
    for number, other in enumerate(others, 1):
        stays = select.bind(best, other)
        best = jax.lax.select(stays, best, other)
        place = jax.lax.select(stays, place, jax.lax.full_like(place, number))
    # Without the barrier XLA recomputes the positions for each element of the result.
    place = jax.lax.optimization_barrier(place)
    return _gathered(source, place, padded.shape, window, strides, padding)


_NOWHERE = 255


def _gathered(
    source: Any,
    place: Any,
    padded: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> Any:
    """Add up the cotangents that flow to each element from all windows that contain it.

    In each dimension these are the window that begins in the element's stride and earlier ones.
    """
    cells = [-(-n // stride) for n, stride in zip(padded, strides, strict=True)]
    shape = [n for pair in zip(cells, strides, strict=True) for n in pair]
    outer = range(0, len(shape), 2)
    within = np.indices(strides).reshape(len(strides), *strides)
    out = jnp.zeros(shape, source.dtype)
    before = [range((n - 1) // stride, -1, -1) for n, stride in zip(window, strides, strict=True)]
    for back in itertools.product(*before):
        shift = zip(back, cells, place.shape, strict=True)
        config = [(b, n - b - m, 0) for b, n, m in shift]
        wanted = within + np.reshape(np.multiply(back, strides), (-1, *(1 for _ in strides)))
        is_there = np.all([w < n for w, n in zip(wanted, window, strict=True)], axis=0)
        code = np.ravel_multi_index(tuple(wanted), tuple(window), mode="clip")
        code = np.where(is_there, code, _NOWHERE - 1).astype(np.uint8)
        here = jax.lax.pad(place, np.uint8(_NOWHERE), config)
        flow = jax.lax.pad(source, np.zeros((), source.dtype), config)
        here, flow = (jax.lax.broadcast_in_dim(x, shape, [*outer]) for x in (here, flow))
        code = jax.lax.broadcast_in_dim(jnp.asarray(code), shape, [i + 1 for i in outer])
        out += jax.lax.select(here == code, flow, jnp.zeros(shape, source.dtype))
    whole = out.reshape([n * stride for n, stride in zip(cells, strides, strict=True)])
    ends = [n - hi for n, (_, hi) in zip(padded, padding, strict=True)]
    return jax.lax.slice(whole, [lo for lo, _ in padding], ends)


def _zero_after(x: Any) -> Any:
    """Return a zero that depends on ``x``: the bits of one element of ``x``, all shifted out.

    A constant behind a barrier would not work: XLA removes the barrier and then shares one array
    of zeros with every `relu` of that shape.
    """
    if not x.size:
        return np.zeros((), x.dtype)
    first = jax.lax.squeeze(jax.lax.slice(x, [0] * x.ndim, [1] * x.ndim), range(x.ndim))
    bits = jnp.finfo(x.dtype).bits
    integer = np.dtype(f"uint{bits}")
    gone = jax.lax.shift_right_logical(
        jax.lax.bitcast_convert_type(first, integer), np.array(bits, integer)
    )
    return jax.lax.bitcast_convert_type(gone, x.dtype)


ad.primitive_transposes[_gather_p] = _gather_transpose


ad.primitive_transposes[_scatter_p] = ad.primitive_transposes[
    windowed_reductions.select_and_scatter_add_p
]


def _lower(primitive: Any, function: Any, fact: Fact | None = None) -> None:
    """Lower a primitive to a function, on the compilers of a fact or else on all of them."""
    rule = mlir.lower_fun(function, multiple_results=False)
    for platform in [None] if fact is None else _jax.lowering_platforms(fact.backends):
        mlir.register_lowering(primitive, rule, platform=platform)


_lower(_gather_p, windowed_reductions.select_and_gather_add_p.bind)


_lower(_scatter_p, windowed_reductions.select_and_scatter_add_p.bind)


_lower(_scatter_p, _late_scatter, _facts.SCATTERS_WINDOW_GRADIENTS)


_lower(_scatter_p, _by_place, _facts.INDEXES_WINDOWS)


_lower(_conv_p, lambda x, kernel, conv, **params: conv.bind(x, kernel, **params))


_lower(_looped_p, _CONV.bind)


_lower(_looped_p, _in_fast_order, _facts.CONVOLVES_SLOWLY_IN_LOOPS)


_lower(_both_p, _both)


_lower(_after_p, lambda x, y: x)


_lower(_after_p, _after, _facts.COPIES_CONVOLUTION_INPUTS_EARLY)


_lower(_slice_p, lambda x: x)


_lower(_slice_p, _with_zeros, _facts.COPIES_STACKED_INPUTS)
