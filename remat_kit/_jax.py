"""Every private import and every difference between JAX releases, and nothing else.

Each entry says on which releases it was seen. The rest of the package imports JAX's public
API, or a name from here. Seen on: jax 0.10.2, 0.11.x, 0.12.0.1.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax._src import (
    ad_checkpoint,
    ad_util,
    config,
    core,
    dispatch,
    sharding_impls,
    source_info_util,
)
from jax._src.interpreters import ad, batching, mlir, partial_eval
from jax._src.lax import windowed_reductions
from jax.custom_derivatives import SymbolicZero

JAX_VERSION: tuple[int, ...] = jax.__version_info__


# -- jaxprs ---------------------------------------------------------------------------------
# 0.10.2: `ClosedJaxpr` wraps `Jaxpr`; 0.12: one class, `.jaxpr` is itself. Only the attributes
# that both spell alike are used: `.jaxpr`, `.consts`, `.eqns`, `.invars`, `.outvars`.


Tracer: Any = core.Tracer


def is_jaxpr(x: Any) -> bool:
    """Tell whether ``x`` is an open or a closed jaxpr."""
    return isinstance(x, (jec.Jaxpr, jec.ClosedJaxpr))


def hi_primitive(eqn: Any) -> Any | None:
    """Return the high-level primitive that an equation calls, or None.

    Under ``jax_remat3``, `checkpoint_name` and `jax.checkpoint` are such primitives, with their
    parameters one level down. Seen on 0.10.2 and 0.12.
    """
    return eqn.params.get("_prim") if eqn.primitive.name == "call_hi_primitive" else None


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluate one equation, under its own source line and its own name stack.

    What `jax.core.eval_jaxpr` does for each equation; 0.10.2 and 0.12 agree.
    """
    params = eqn.primitive.get_bind_params(eqn.params)
    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
        out = eqn.primitive.bind(*values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def with_scopes(eqn: Any, scopes: Sequence[str], **changes: Any) -> Any:
    """Return the equation with its name stack made of plain ``scopes``, no transformations."""
    stack = source_info_util.NameStack(tuple(source_info_util.Scope(s) for s in scopes))
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack), **changes)


def with_caller(eqn: Any, caller: Any) -> Any:
    """Return the equation under the traceback of ``caller``, where its own shows no user's line.

    `jit` keeps the trace of a library function from its first call, cut off from that call.
    """
    if caller is None or next(user_frames(eqn), None) is not None:
        return eqn
    traceback = caller.source_info.traceback
    return eqn.replace(source_info=eqn.source_info.replace(traceback=traceback))


# XLA's GPU compiler has no select-and-scatter: it scatters into an array of zeros, which depends on
# nothing and is made at the beginning of the program, as large as what was pooled. Its CPU compiler
# does that too, and keeps an index of four bytes for each dimension, for each maximum. The two
# primitives below are JAX's own but for that: on GPUs the zero is made of the cotangent, on CPUs a
# byte is kept and nothing is scattered. Seen on 0.10.2, 0.12.


def lean_pooling(eqn: Any) -> Any:
    """Return a maximum or minimum over windows as an equation whose derivative takes less memory.

    Other equations are returned as they are. Values and derivatives are the same to the bit.
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
    """Return a primitive with the name and the rules of another, but no transpose or lowering.

    Both are linear in their first argument, and no derivative flows to what was pooled.
    """
    made = core.Primitive(primitive.name)
    made.def_impl(functools.partial(dispatch.apply_primitive, made))
    made.def_effectful_abstract_eval(primitive.abstract_eval)

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        (_, operand), (tangent, _) = primals, tangents
        out = made.bind(*primals, **params)
        if type(tangent) is ad_util.Zero:
            return out, ad_util.p2tz(out)
        return out, made.bind(tangent, operand, **params)  # regions in regions come here

    ad.primitive_jvps[made] = jvp
    batching.fancy_primitive_batchers[made] = batching.fancy_primitive_batchers[primitive]
    return made


def relu_by_output(eqn: Any) -> Any:
    """Return a `jax.nn.relu` as an equation whose derivative is taken from its output.

    JAX asks whether the input is positive. XLA's CPU compiler then keeps the input beside the
    output where a region that follows needs that: the stack in `tests/test_plan.py` takes 21 MiB
    instead of 15 (jax 0.12). Other equations are returned as they are. Values and derivatives are
    the same to the bit.

    `rule_of` finds the rule of `jax.nn.relu` on 0.10.2 and 0.12.
    """
    if eqn.primitive.name != "custom_jvp_call" or rule_of(eqn) is not jax.nn.relu.jvp:
        return eqn
    return _in_place_of(eqn, _relu)


@jax.custom_jvp
def _relu(x: Any) -> Any:
    return jnp.maximum(x, 0)


@_relu.defjvp
def _relu_derivative(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    # The barrier keeps XLA from seeing that the input tells the sign as well.
    out = jax.lax.optimization_barrier(_relu(x))
    return out, jax.lax.select(out > 0, dx, jax.lax.full_like(dx, 0))


def _in_place_of(eqn: Any, fn: Any) -> Any:
    """Return the one equation that a function traces to, in the place of another."""
    (found,) = jax.make_jaxpr(fn)(*(v.aval for v in eqn.invars)).eqns
    return found.replace(
        invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info, ctx=eqn.ctx
    )


# XLA's CPU compiler transposes what the gradient of a convolution's kernel reads, and does so in
# the forward pass, as nothing holds the copy back. Where a region keeps the array as well, both
# live until the backward pass. The two primitives below tie the copy to the cotangent.
# Seen on 0.10.2, 0.12.

_CONV = jax.lax.conv_general_dilated_p
_BITS = {
    np.dtype(t): np.dtype(f"uint{jnp.finfo(t).bits}")
    for t in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
}


def convolution_with_late_copies(eqn: Any) -> Any:
    """Return a convolution as an equation whose derivative copies its input late on CPUs.

    Other equations are returned as they are. Values and derivatives are the same to the bit.
    """
    if eqn.primitive is not _CONV or any(v.aval.dtype not in _BITS for v in eqn.invars):
        return eqn
    return _in_place_of(eqn, _convolution(tuple(sorted(eqn.params.items()))))


@functools.lru_cache(maxsize=256)
def _convolution(given: tuple[tuple[str, Any], ...]) -> Any:
    params = dict(given)

    @jax.custom_jvp
    def convolution(x: Any, kernel: Any) -> Any:
        return _CONV.bind(x, kernel, **params)

    def derivative(primals: Any, tangents: Any) -> Any:
        (x, kernel), (dx, dkernel) = primals, tangents
        out = _CONV.bind(x, kernel, **params)
        given = [type(t) is not SymbolicZero for t in (dx, dkernel)]
        if all(given):
            return out, _both_p.bind(dx, dkernel, x, kernel, **params)
        if given[0]:
            return out, _CONV.bind(dx, kernel, **params)
        return out, _conv_p.bind(x, dkernel, **params) if given[1] else jnp.zeros_like(out)

    convolution.defjvp(derivative, symbolic_zeros=True)
    return convolution


def _conv_transpose(ct: Any, x: Any, kernel: Any, **params: Any) -> list[Any]:
    if ad.is_undefined_primal(kernel) and type(ct) is not ad_util.Zero:
        x = _after_p.bind(x, ct)
    return ad.primitive_transposes[_CONV](ct, x, kernel, **params)


_conv_p = core.Primitive(_CONV.name)
_conv_p.def_impl(functools.partial(dispatch.apply_primitive, _conv_p))
_conv_p.def_effectful_abstract_eval(_CONV.abstract_eval)
ad.primitive_jvps[_conv_p] = ad.primitive_jvps[_CONV]
ad.primitive_transposes[_conv_p] = _conv_transpose
batching.fancy_primitive_batchers[_conv_p] = batching.fancy_primitive_batchers[_CONV]

# The derivative by both arguments. The gradient of the kernel is made first: what it reads, often
# the largest arrays there are, can go before the cotangent of the input is there. XLA's CPU
# compiler puts kernel gradients off.
_both_p = core.Primitive("convolutions")
_both_p.def_impl(functools.partial(dispatch.apply_primitive, _both_p))
_both_p.def_abstract_eval(
    lambda dx, dkernel, x, kernel, **params: _CONV.abstract_eval(dx, kernel, **params)[0]
)


def _both(dx: Any, dkernel: Any, x: Any, kernel: Any, **params: Any) -> Any:
    return jax.lax.add(_CONV.bind(dx, kernel, **params), _conv_p.bind(x, dkernel, **params))


def _both_transpose(
    ct: Any, dx: Any, dkernel: Any, x: Any, kernel: Any, **params: Any
) -> list[Any]:
    if type(ct) is ad_util.Zero:
        return [None] * 4
    given = [ad.is_undefined_primal(v) for v in (dx, dkernel)]  # zeros may be known
    found: list[Any] = [None] * 4
    if given[1]:
        found[1] = _conv_transpose(ct, x, dkernel, **params)[1]
    if all(given):
        kernel, found[1] = together_on_cpus([kernel, found[1]])
    if given[0]:
        found[0] = ad.primitive_transposes[_CONV](ct, dx, kernel, **params)[0]
    return found


def _both_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    given = tuple(ad.instantiate_zeros(t) for t in tangents)
    if all(type(t) is ad_util.Zero for t in tangents[2:]):  # regions in regions come here
        return _both_p.bind(*primals, **params), _both_p.bind(*given[:2], *primals[2:], **params)
    return jax.jvp(functools.partial(_both, **params), tuple(primals), given)


def _both_batch(values: Any, dims: Any, **params: Any) -> Any:
    return jax.vmap(functools.partial(_both, **params), dims)(*values), 0


ad.primitive_jvps[_both_p] = _both_jvp
ad.primitive_transposes[_both_p] = _both_transpose
batching.primitive_batchers[_both_p] = _both_batch

# An array, to be had once another one is there.
_after_p = core.Primitive("after")
_after_p.def_impl(lambda x, y: x)
_after_p.def_abstract_eval(lambda x, y: x)
ad.defjvp(_after_p, lambda dx, x, y: _after_p.bind(dx, y), None)
ad.primitive_transposes[_after_p] = lambda ct, x, y: [_after_p.bind(ct, y), None]
batching.primitive_batchers[_after_p] = lambda values, dims: (_after_p.bind(*values), dims[0])


def _after(x: Any, y: Any) -> Any:
    """Fill an array's bits up with those of a zero that is made of the other one.

    Without the barrier XLA makes the array anew from what it was made of, which is then kept too.
    """
    if not x.size or not y.size:
        return x
    bits = jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(x), _BITS[x.dtype])
    zero = jax.lax.bitcast_convert_type(_zero_after(y), _BITS[y.dtype]).astype(bits.dtype)
    return jax.lax.bitcast_convert_type(bits | zero, x.dtype)


_gather_p = _like(windowed_reductions.select_and_gather_add_p)
_scatter_p = _like(windowed_reductions.select_and_scatter_add_p)


def _gather_transpose(
    ct: Any, tangents: Any, operand: Any, *, base_dilation: Any, window_dilation: Any, **params: Any
) -> list[Any]:
    del base_dilation, window_dilation  # all ones
    if type(ct) is ad_util.Zero:
        return [ad_util.Zero(tangents.aval), None]
    return [_scatter_p.bind(*core.auto_insert_reshard(ct, operand), **params), None]


def _late_scatter(source: Any, operand: Any, **params: Any) -> Any:
    """What JAX's lowering for GPUs does, but for the zero that it begins with."""
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


# Of windows with more elements XLA's own derivative is taken: there are as many sums to add up.
LARGE_WINDOW = 64


def _by_place(source: Any, operand: Any, **params: Any) -> Any:
    """The same for CPUs: which element of its window each maximum is, and from that the sum of what
    flows back to each element, in the order of the windows as XLA has it.
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
    place = jax.lax.optimization_barrier(place)  # or it would be found once more for each element
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
    """Sum up what flows to each element from the windows that it is in: for each dimension the one
    that begins in the same stride, and those before it.
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
    """A zero that is there when an array is: all bits of a value of it, shifted out.

    A constant behind a barrier does not do: XLA removes the barriers, then shares the array of
    zeros with the ones of every `relu` of that shape.
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


def _lower(primitive: Any, function: Any, platform: str | None = None) -> None:
    mlir.register_lowering(
        primitive, mlir.lower_fun(function, multiple_results=False), platform=platform
    )


_lower(_gather_p, windowed_reductions.select_and_gather_add_p.bind)
_lower(_scatter_p, windowed_reductions.select_and_scatter_add_p.bind)
_lower(_scatter_p, _late_scatter, "gpu")
_lower(_scatter_p, _by_place, "cpu")
_lower(_conv_p, _CONV.bind)
_lower(_both_p, _both)
_lower(_after_p, lambda x, y: x)
_lower(_after_p, _after, "cpu")


def has_effects(eqn: Any) -> bool:
    """Tell whether an equation does more than compute its outputs.

    A collective is marked with the axis that it runs over, which is no effect (0.10.2 and 0.12).
    """
    return any(not isinstance(e, core.NamedAxisEffect) for e in eqn.effects)


def name_stack_groups(eqn: Any) -> list[list[str]]:
    """Return the scopes of an equation's name stack, split where a transformation begins."""
    return _groups(eqn.source_info.name_stack)


def current_scopes() -> list[list[str]]:
    """Return the scopes that are open now, split where a transformation begins."""
    return _groups(source_info_util.current_name_stack())


def _groups(stack: Any) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    for part in stack.stack:
        if isinstance(part, source_info_util.Scope):
            groups[-1].extend(part.name.split("/"))
        elif groups[-1]:
            groups.append([])
    return groups


def user_frames(eqn: Any) -> Iterator[tuple[str, int, str]]:
    """Yield (file, line, function) of the equation's frames outside JAX, innermost first."""
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        yield frame.file_name, frame.start_line, frame.function_name


def user_code(eqn: Any, is_library: Any) -> Any:
    """Return what identifies the innermost frame outside the libraries: its code and its place.

    Cheaper than `user_frames`, which turns places into lines. 0.10.2 and 0.12.
    """
    traceback = eqn.source_info.traceback
    codes, places = traceback.raw_frames() if traceback else ([], [])
    for code, place in zip(codes, places, strict=True):
        if not is_library(code.co_filename):
            return code, place
    return None


def is_jax_file(name: str) -> bool:
    """Tell whether a file belongs to JAX or to the standard library."""
    return not source_info_util.is_user_filename(name)


def rule_of(eqn: Any) -> Any | None:
    """Return the derivative rule that the user gave a `custom_jvp_call`, None if it is not found.

    The equation holds the rule wrapped anew at each trace: a memoized thunk, around a wrapped
    function, around the rule (0.10.2 and 0.12).
    """
    memoized = getattr(eqn.params.get("jvp_jaxpr_fun"), "f", None)
    for thunk in _closed_over(memoized, "function"):
        for wrapped in _closed_over(thunk, "WrappedFun"):
            return wrapped.f
    return None


def _closed_over(fn: Any, kind: str) -> list[Any]:
    cells = (c.cell_contents for c in getattr(fn, "__closure__", None) or ())
    return [x for x in cells if type(x).__name__ == kind]


def trace_context() -> Any:
    """Return the settings that a trace depends on, as JAX's own caches key them."""
    return config.trace_context()


def is_plain_call(eqn: Any) -> bool:
    """Tell whether the equation is a `jit` with nothing to say: no sharding, no donation.

    The primitive is called `jit` (0.10.2 and 0.12; `pjit` before).
    """
    params = eqn.params
    if eqn.primitive.name not in ("jit", "pjit"):
        return eqn.primitive.name in ("closed_call", "core_call")
    unspecified = sharding_impls.UNSPECIFIED
    places = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return (
        all(s is unspecified for s in places)
        and not any(params.get("donated_invars", ()))
        and not params.get("compiler_options_kvs")
    )


def remat3() -> bool:
    """Tell whether JAX's new checkpoint implementation is switched on (0.10.2 and later)."""
    return bool(getattr(jax.config, "jax_remat3", False))


def name_primitive() -> Any:
    """Return the primitive that `checkpoint_name` binds and that policies are asked about."""
    return ad_checkpoint.name_p


def name_equation(var: Any, out: Any, name: str, like: Any) -> Any:
    """Return the equation ``out = checkpoint_name(var, name)``, at the place of ``like``.

    The equation is traced once per name on a scalar and given its variables by hand: tracing on
    the real value would fail inside `shard_map`, whose axes are not open here.
    """
    template = _name_template(name, remat3())
    params = template.params
    hi = hi_primitive(template)
    if hi is not None:
        params = {**params, "_prim": type(hi)(name, var.aval)}
    return like.replace(
        primitive=template.primitive,
        params=params,
        invars=[var],
        outvars=[out],
        effects=template.effects,
    )


@functools.cache
def _name_template(name: str, hi: bool) -> Any:
    del hi  # part of the key: the flag decides which primitive is bound
    traced = jax.make_jaxpr(lambda x: ad_checkpoint.checkpoint_name(x, name))(np.float32(0))
    return traced.eqns[0]


def replace_body(closed: Any, eqns: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """Return a closed or open jaxpr with other equations and outputs, the same inputs."""
    if isinstance(closed, jec.ClosedJaxpr) and closed.jaxpr is not closed:  # 0.10.2
        return closed.replace(jaxpr=replace_body(closed.jaxpr, eqns, outvars))
    high = closed.is_high or any(hi_primitive(e) is not None for e in eqns)
    return closed.replace(eqns=list(eqns), outvars=list(outvars), is_high=high)


def without_dead_code(closed: Any) -> Any:
    """Return a closed jaxpr without the equations that no output needs.

    `dce_jaxpr(jaxpr, used_outputs, instantiate)` in 0.10.2 and 0.12.
    """
    jaxpr = closed.jaxpr
    lean, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)
    return lean if getattr(lean, "jaxpr", None) is lean else closed.replace(jaxpr=lean)


def _allow_stop_gradient_in_linear_programs() -> None:
    """Teach JAX to transpose `stop_gradient`: nothing flows back.

    `vmap` turns a `cond` whose predicate is mapped into selects between a value and its
    `stop_gradient`. Where the cond stands in a linear program, that equation is transposed, and
    JAX has no rule for it (0.10.2 and 0.12): it expects `vmap` before differentiation.
    """

    def transpose(ct: Any, x: Any) -> list[Any]:
        del ct
        return [ad.Zero(x.aval)]

    ad.primitive_transposes.setdefault(ad_util.stop_gradient_p, transpose)


_allow_stop_gradient_in_linear_programs()


def offloadable(source: str, destination: str) -> Any:
    """Return what a policy answers for a value that goes to another memory."""
    return partial_eval.Offloadable(source, destination)


SAVEABLE: Any = partial_eval.Saveable
RECOMPUTE: Any = partial_eval.Recompute


def scan_arity(eqn: Any) -> tuple[int, int]:
    """Return how many of a scan's inputs are constants and how many are carried.

    0.10.2 (and 0.11) say so in ``num_consts`` and ``num_carry``; 0.12 in a flat tree ``ft_in``.
    """
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def keep_names(names: Sequence[str], policy: Any) -> Any:
    """Return what to hand to `jax.checkpoint` so that these names are kept.

    ``policy`` itself, but for the first ``jax_remat3`` (0.10.2), which looks at the names in its
    own policy classes and takes every other callable for full rematerialization. It has no
    offloading either: values that would be offloaded are recomputed there.
    """
    if JAX_VERSION >= (0, 11) or not remat3():
        return policy
    return jax.checkpoint_policies.save_only_these_names(*names)


def float0_zeros(shape: Sequence[int]) -> Any:
    """Return the zero tangent of an integer value."""
    return np.zeros(shape, jax.dtypes.float0)


def inside_loop() -> bool:
    """Tell whether the caller is being traced as the body of a scan or a while loop.

    JAX keeps no record of it, so the Python frames are read: `scan` and `while_loop` trace their
    bodies from `jax/_src/lax/control_flow/loops.py` (0.10.2 and 0.12).
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_LOOPS_FILE):
            return True
        frame = frame.f_back
    return False


_LOOPS_FILE = os.path.join("jax", "_src", "lax", "control_flow", "loops.py")


# -- policies -------------------------------------------------------------------------------
# What policies of `jax.checkpoint` answer, and which primitives exist. 0.10.2 and 0.12 agree.

Offloadable: Any = partial_eval.Offloadable


def policy_names(policy: Any) -> dict[str, frozenset[str]]:
    """Return the checkpoint names that a policy of JAX is made of, by what becomes of them.

    The keys are "save", "offload" and "recompute". Empty for a policy that asks for no names, and
    where its makers in `jax.checkpoint_policies` have changed: they are closures in 0.12, and of
    the three that take names one is in 0.10.2, where the others are dataclasses.
    """
    kind = getattr(policy, "__qualname__", type(policy).__qualname__).partition(".")[0]
    if getattr(policy, "__module__", "") != ad_checkpoint.__name__:
        return {}
    code = getattr(policy, "__code__", None)
    cells = getattr(policy, "__closure__", None) or ()
    held = dict(zip(code.co_freevars, (c.cell_contents for c in cells))) if code else vars(policy)
    if kind == "save_from_both_policies":
        halves = [policy_names(p) for p in held.values() if callable(p)]
        both = {key: [h[key] for h in halves if key in h] for h in halves for key in h}
        return {key: frozenset().union(*sets) for key, sets in both.items()}
    fates = {
        "names_which_can_be_saved": "save",
        "saveable_names": "save",
        "names_which_can_be_offloaded": "offload",
        "names_not_to_save": "recompute",
        "names": "recompute",
    }
    return {
        fates[name]: frozenset(value)
        for name, value in held.items()
        if name in fates and isinstance(value, (set, frozenset))
    }


@functools.cache
def known_primitives() -> frozenset[str]:
    """Return the names of the primitives of JAX.

    There is no list of them: those with a lowering, those with a derivative and the public ones
    are put together, and what JAX defines only when a submodule is imported. Seen on 0.10.2, 0.12.
    """
    tables = [mlir._lowerings, *mlir._platform_specific_lowerings.values(), ad.primitive_jvps]
    public = [p for p in vars(jec.primitives).values() if isinstance(p, jec.Primitive)]
    late = {"pallas_call", "shard_map", "custom_vjp_call", "custom_partitioning"}
    return frozenset({p.name for table in tables for p in table} | {p.name for p in public} | late)


# -- compiling for a chip that is not there -------------------------------------------------
# The parent lowers, a child process compiles; `_compile_worker.py` loads this file on its own,
# so this section needs nothing of the rest of the package.


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program for one platform, ready to be compiled elsewhere.

    Attributes:
        bytecode: MLIR, with the locations that become `op_name` and source lines, and with the
            donation and memory-kind attributes.
        identity: equal for equal programs, whoever asked for them.
        devices: over how many devices it is partitioned.
    """

    bytecode: bytes
    identity: str
    devices: int


def lower(traced: Any, platform: str, boundary: Sequence[str]) -> Lowered:
    """Lower what `jax.jit(f).trace(...)` gave for ``platform``, whose plugin need not be here.

    ``boundary`` names source files: frames of theirs, and what called them, do not count in the
    identity. `mlir.module_to_bytecode` and the printed form of locations: 0.10.2, 0.12.
    """
    module = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    attributes = module.operation.attributes
    devices = int(attributes["mhlo.num_partitions"]) if "mhlo.num_partitions" in attributes else 1
    text = module.operation.get_asm(enable_debug_info=True)
    identity = _identity(text, tuple(boundary))
    return Lowered(mlir.module_to_bytecode(module), identity, devices)


_LOCATION = re.compile(r"^#loc(\d*) = loc\((.*)\)$\n?", re.M)
_LOCATION_USE = re.compile(r"#loc(\d*)")
_CALL_SITE = re.compile(r"callsite\(#loc(\d*) at #loc(\d*)\)")


def _identity(text: str, boundary: tuple[str, ...]) -> str:
    """Hash a module as printed, its locations cut where a frame of a boundary file begins."""
    definitions = dict(_LOCATION.findall(text))
    known: dict[str, str | None] = {}

    def canonical(number: str) -> str | None:
        if number not in known:
            known[number] = resolve(definitions.get(number, "unknown"))
        return known[number]

    def resolve(definition: str) -> str | None:
        if site := _CALL_SITE.fullmatch(definition):
            callee, caller = canonical(site.group(1)), canonical(site.group(2))
            parts = callee if caller is None else f"{callee} at {caller}"
            return None if callee is None else _digest(parts or "")
        if definition.startswith(tuple(f'"{file}"' for file in boundary)):
            return None
        used = [canonical(number) for number in _LOCATION_USE.findall(definition)]
        name = _LOCATION_USE.sub("", definition)
        is_name_stack = "/" in name or name.startswith('"jit(')
        if None in used and not is_name_stack:
            return None
        return _digest(name + " ".join(str(part) for part in used))

    body = _LOCATION.sub("", text)
    body = _LOCATION_USE.sub(lambda use: f"#{canonical(use.group(1))}", body)
    return hashlib.sha256(body.encode()).hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def topology_device(platform: str, topology: str, options: dict[str, Any]) -> Any:
    """Return one compile-only device, or the present device for ``cpu``.

    `get_topology_desc` is experimental; 0.10.2 and 0.12 agree on it.
    """
    if platform == "cpu":
        return jax.devices("cpu")[0]
    from jax.experimental import topologies

    return topologies.get_topology_desc(topology, platform, **options).devices[0]


# Settings that `get_compile_options` reads from the process that compiles: 0.10.2, 0.12.
COMPILE_SETTINGS = (
    "jax_disable_most_optimizations",
    "jax_memory_fitting_level",
    "jax_optimization_level",
    "jax_use_shardy_partitioner",
    "jax_compiler_enable_remat_pass",
)


def compile_settings() -> dict[str, Any]:
    """Return the settings of this process that change what the compiler is asked for."""
    names = [name for name in COMPILE_SETTINGS if name in jax.config.values]
    found = {name: getattr(jax.config, name, jax.config.values[name]) for name in names}
    return {name: getattr(value, "value", value) for name, value in found.items()}


def apply_compile_settings(settings: dict[str, Any]) -> None:
    """Take over the settings of another process, as `compile_settings` gave them."""
    for name, value in settings.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)


def compile_bytes(program: bytes, device: Any, options: dict[str, str]) -> Any:
    """Compile MLIR bytecode for ``device`` (compile-only or real) and return the executable.

    The compile options are those of `jit(f).lower(...).compile()` for one committed device.
    `backend_compile_and_load` covers both the compile-only client, on its way out of JAX, and a
    real one: 0.10.2, 0.12.
    """
    from jax._src import compiler
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

    with mlir.make_ir_context():
        module = ir.Module.parse(program)
    compile_options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=1,
        device_assignment=np.array([[device]]),
        env_options_overrides=dict(options),
        backend=device.client,
    )
    devices = xla_client.DeviceList((device,))
    return compiler.backend_compile_and_load(device.client, module, devices, compile_options, [])


def executable_text(executable: Any) -> str:
    """Return the optimised, scheduled HLO of an executable. Seen on 0.10.2, 0.12."""
    return "\n\n".join(m.to_string() for m in executable.hlo_modules())


def executable_memory(executable: Any) -> dict[str, int]:
    """Return the byte counts of an executable. Seen on 0.10.2, 0.12."""
    return memory_stats_to_dict(executable.get_compiled_memory_stats())


def memory_stats_to_dict(stats: Any) -> dict[str, int]:
    """Return the integer fields of a `CompiledMemoryStats`, the ones every release has."""
    names = ("argument", "output", "alias", "temp", "generated_code")
    fields = [f"{host}{name}_size_in_bytes" for host in ("", "host_") for name in names]
    fields.append("peak_memory_in_bytes")
    return {name: int(getattr(stats, name, 0)) for name in fields}


def compile_failure_types() -> tuple[type[BaseException], ...]:
    """Return what the compiler raises when it refuses a program."""
    return (jax.errors.JaxRuntimeError,)


# Barriers on some platforms: what comes out is there when all of what goes in is, and so are its
# cotangents. Seen on 0.10.2, 0.12.


def _barrier(*, on_cpus: bool, elsewhere: bool, backward_only: bool = False) -> Any:
    primitive = core.Primitive("optimization_barrier")
    primitive.multiple_results = True

    def barrier(values: Sequence[Any]) -> list[Any]:
        return primitive.bind(*values) if values else []

    def jvp(primals: Any, tangents: Any) -> Any:
        # The same tracers, so that a scan keeps one stack of a value before and behind the barrier.
        through = list(primals) if backward_only else barrier(primals)
        return through, barrier([ad.instantiate_zeros(t) for t in tangents])

    def transpose(cts: Any, *primals: Any) -> Any:
        del primals
        return barrier([ad.instantiate_zeros(ct) for ct in cts])

    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
    primitive.def_abstract_eval(lambda *avals: avals)
    batching.primitive_batchers[primitive] = lambda values, dims: (barrier(values), dims)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    there = mlir.lower_fun(lambda *v: jax.lax.optimization_barrier(v), multiple_results=True)
    none = mlir.lower_fun(lambda *v: v, multiple_results=True)
    mlir.register_lowering(primitive, there if elsewhere else none)
    mlir.register_lowering(primitive, there if on_cpus else none, platform="cpu")
    return barrier


# For the derivative. XLA's CPU compiler does well without, and takes a little more memory with it.
together = _barrier(on_cpus=False, elsewhere=True)
together_backward = _barrier(on_cpus=False, elsewhere=True, backward_only=True)

# Against XLA's CPU compiler, which makes the same array in several fusions.
together_on_cpus = _barrier(on_cpus=True, elsewhere=False)

# Between cotangents alone, as all that are `backward_only`.
apart_backward = _barrier(on_cpus=True, elsewhere=True, backward_only=True)
