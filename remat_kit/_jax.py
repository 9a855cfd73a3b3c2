"""Every private import and every difference between JAX releases, and nothing else.

Each entry says on which releases it was seen. The rest of the package imports JAX's public
API, or a name from here. Seen on: jax 0.10.2, 0.11.x, 0.12.0.1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax._src import (
    ad_checkpoint,
    ad_util,
    api_util,
    config,
    core,
    custom_derivatives,
    debugging,
    distributed,
    effects,
    linear_util,
    pjit,
    sharding_impls,
    source_info_util,
    traceback_util,
    tree_util,
    util,
)

# What is imported `as` itself is for `_backend.rewrites`, which defines primitives, and for
# `_chip.lowering`, which compiles. They use it as 0.10.2 and 0.12 have it.
from jax._src import compiler as compiler
from jax._src import dispatch as dispatch
from jax._src.interpreters import ad, batching, mlir, partial_eval, pxla
from jax._src.lax import lax as lax_internal
from jax._src.lax import windowed_reductions as windowed_reductions
from jax._src.lib import xla_client as xla_client
from jax._src.lib.mlir import ir as ir
from jax._src.state.types import AbstractRef, RefEffect

JAX_VERSION: tuple[int, ...] = jax.__version_info__


# -- jaxprs ---------------------------------------------------------------------------------
# 0.10.2: `ClosedJaxpr` wraps `Jaxpr`; 0.12: one class, `.jaxpr` is itself. Only the attributes
# that both spell alike are used: `.jaxpr`, `.consts`, `.eqns`, `.invars`, `.outvars`.


Tracer: Any = core.Tracer


# JAX's function, as it was when this package was imported. If a user replaces `jax.checkpoint` by a
# decorator of ours, that decorator must not call itself.
checkpoint = jax.checkpoint


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
        if eqn.primitive.name == "cond":  # whose index may come from another region
            values = [*without_integer_tangents(values[:1]), *values[1:]]
        out = eqn.primitive.bind(*values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def with_scopes(eqn: Any, scopes: Sequence[str], **changes: Any) -> Any:
    """Return the equation with its name stack made of plain ``scopes``, no transformations."""
    stack = source_info_util.NameStack(tuple(source_info_util.Scope(s) for s in scopes))
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack), **changes)


def with_inner_scope(eqn: Any, scope: str, **changes: Any) -> Any:
    """Return the equation with one more scope, the innermost one, in its name stack."""
    info = eqn.source_info
    stack = source_info_util.NameStack((*info.name_stack.stack, source_info_util.Scope(scope)))
    return eqn.replace(source_info=info.replace(name_stack=stack), **changes)


def without_transformations(eqn: Any) -> Any:
    """Return the equation with the scopes of its name stack, and no transformations among them."""
    info = eqn.source_info
    plain = _scopes_only(info.name_stack)
    if plain is info.name_stack:
        return eqn
    return eqn.replace(source_info=info.replace(name_stack=plain))


@functools.lru_cache(maxsize=4096)
def _scopes_only(stack: Any) -> Any:
    scopes = tuple(s for s in stack.stack if isinstance(s, source_info_util.Scope))
    return stack if len(scopes) == len(stack.stack) else source_info_util.NameStack(scopes)


def with_caller(eqn: Any, caller: Any) -> Any:
    """Return the equation under the traceback of ``caller``, where its own shows no user's line.

    `jit` keeps the trace of a library function from its first call, cut off from that call.
    """
    if caller is None or next(user_frames(eqn), None) is not None:
        return eqn
    traceback = caller.source_info.traceback
    return eqn.replace(source_info=eqn.source_info.replace(traceback=traceback))


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


def transforms_of(eqn: Any) -> frozenset[str]:
    """Return the transformations in an equation's name stack, such as "jvp" and "transpose".

    `jax.grad`, `jax.vjp` and `jax.linearize` write "jvp" on what they take over from the forward
    pass and "transpose" on the backward pass (0.10.2 and 0.12). The equations in the body of a
    `jit` that was differentiated as a whole have neither; the `jit` equation has them.
    """
    stack = eqn.source_info.name_stack.stack
    return frozenset(p.name for p in stack if isinstance(p, source_info_util.Transform))


def gradient_site(eqn: Any, is_library: Any) -> tuple[str, str, int]:
    """Return where the gradient was taken that made an equation: (function, file, line).

    The function is the one that was differentiated, the line is the one that asked for the
    gradient. Either is empty where the traceback does not show it, as in a `jit` that was traced
    before. `jax.grad`, `jax.vjp`, `jax.linearize` and `jax.jvp` call what they differentiate from
    functions of these names in `jax/_src/api.py` (0.10.2 and 0.12).
    """
    traceback = eqn.source_info.traceback
    codes, places = traceback.raw_frames() if traceback else ([], [])
    function, taken = "", False
    for code, place in zip(codes, places, strict=True):
        if _takes_derivative(code):
            taken = True
        elif not is_library(code.co_filename):
            if taken:
                frame = source_info_util.raw_frame_to_frame(code, place)
                return function, code.co_filename, frame.start_line
            function = code.co_name
    return function if taken else "", "", 0


def _takes_derivative(code: Any) -> bool:
    return code.co_name in _DERIVATIVES and code.co_filename.endswith(_API_FILE)


_API_FILE = os.path.join("jax", "_src", "api.py")


_DERIVATIVES = frozenset({"vjp", "_vjp", "jvp", "_jvp", "linearize"})


def being_differentiated() -> bool:
    """Tell whether the caller is called, at whatever depth, by a function that differentiates it.

    Tracers do not tell, for an inner `jit` hides those of the gradient around it; the Python frames
    do. A `jit` that finds its trace in its cache is the exception: it does not call anything.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if _takes_derivative(frame.f_code):
            return True
        frame = frame.f_back
    return False


def compiled_with_its_gradient(x: Any) -> bool:
    """Tell whether a value is differentiated inside a `jit`: both passes are then one program.

    The kinds of tracer are told by name, as not all of them are in one module (0.10.2 and 0.12).
    """
    is_differentiated = False
    while isinstance(x, Tracer):
        kind = type(x).__name__
        if kind in ("JVPTracer", "LinearizeTracer"):
            is_differentiated, x = True, x.primal
        elif kind == "BatchTracer":
            x = x.val
        else:
            return is_differentiated and kind == "DynamicJaxprTracer"
    return False


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
    """Return the derivative rule that the user gave a `custom_jvp_call`, or None."""
    wrapped = _wrapped_rule(eqn)
    return None if wrapped is None else wrapped.f


def custom_function_of(eqn: Any) -> Any:
    """Return what tells the function of a `custom_jvp_call` or a `custom_vjp_call` from others.

    This is the place of its source and its program. The rules themselves are wrapped anew whenever
    the equation is evaluated. Seen on 0.10.2, 0.12.
    """
    called = eqn.params["call_jaxpr"]
    return called.jaxpr.debug_info.func_src_info, str(called)


def rule_identity(eqn: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the rule of a `custom_jvp_call` and everything that is bound around it.

    The second part holds the names and static arguments of the wrappers that JAX has put around
    the rule, among them the arguments of ``nondiff_argnums``. None if one of the wrappers is not
    known. Seen on 0.10.2, 0.12.
    """
    wrapped = _wrapped_rule(eqn)
    if wrapped is None:
        return None
    around: list[Any] = []
    for transform, given in wrapped.transforms:
        if transform.__name__ not in _RULE_WRAPPERS:
            return None
        around.append(transform.__name__)
        for value in given:
            # The thunk of the output's type and the tag of a trace are new each time.
            if callable(value) or isinstance(value, core.TraceTag):
                continue
            is_static = isinstance(value, tuple) and value and hasattr(value[0], "val")
            around.append(tuple(x.val for x in value) if is_static else value)
    return wrapped.f, tuple(around)


def is_structural(value: Any) -> bool:
    """Tell whether a value describes trees or batch axes: equal ones mean the same."""
    return isinstance(value, (jax.tree_util.PyTreeDef, batching.AxisData))


_RULE_WRAPPERS = ("_flatten_jvp", "_prepend_static_args", "batch_custom_jvp_subtrace")


def _wrapped_rule(eqn: Any) -> Any | None:
    """Return the function that holds the rule of a `custom_jvp_call`.

    The equation holds the rule wrapped anew at each trace: a memoized thunk, around a wrapped
    function, around the rule (0.10.2 and 0.12).
    """
    memoized = getattr(eqn.params.get("jvp_jaxpr_fun"), "f", None)
    for thunk in _closed_over(memoized, "function"):
        for wrapped in _closed_over(thunk, "WrappedFun"):
            return wrapped
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


def knows_everything() -> bool:
    """Tell whether ``jax_remat3`` runs a region under `everything_saveable` as if there were none.

    So it is in 0.12; 0.10.2 takes it for a policy that keeps what has a name.
    """
    return JAX_VERSION >= (0, 12)


def name_primitive() -> Any:
    """Return the primitive that `checkpoint_name` binds and that policies are asked about."""
    return ad_checkpoint.name_p


def _allow_stop_gradient_in_linear_programs() -> None:
    """Teach JAX to transpose `stop_gradient`: nothing flows back.

    `vmap` turns a `cond` whose predicate is mapped into selects between a value and its
    `stop_gradient`. JAX differentiates a `cond` after that. But it batches the derivative rule of a
    `custom_jvp` function as a whole, so the selects and the `stop_gradient` are in the linear part,
    which JAX transposes later, without a rule for `stop_gradient` (0.10.2 and 0.12).

    The rule is added when remat_kit first makes such a function, and only if JAX has none, so that
    the import of remat_kit changes nothing in JAX. It cannot be removed again, because the
    transposition comes later. No program that JAX could transpose before is changed by it.
    """

    def transpose(ct: Any, x: Any) -> list[Any]:
        del ct
        return [ad.Zero(x.aval)]

    ad.primitive_transposes.setdefault(ad_util.stop_gradient_p, transpose)


def with_symbolic_zeros(fn: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a derivative rule that may return symbolic zeros.

    Under ``jax_custom_jvp3`` JAX makes arrays of them, and differentiates what is behind them: a
    second backward pass, of zeros. It is switched off for the call (0.12; 0.10.2 has no such flag).
    """
    _allow_stop_gradient_in_linear_programs()
    ruled = jax.custom_jvp(fn)
    ruled.defjvp(rule, symbolic_zeros=True)
    flag = getattr(config, "custom_jvp3", None)
    if flag is None:
        return ruled

    def call(*args: Any) -> Any:
        with flag(False):
            return ruled(*args)

    return call


def without_integer_tangents(values: Sequence[Any]) -> list[Any]:
    """Return the results of a region, of which no integer seems to have a tangent.

    Under ``jax_remat3`` JAX 0.10.2 takes all results of a region to have tangents. It asserts that
    the index of a conditional has none, which stands when an operation is in between.
    """
    if not remat3() or JAX_VERSION >= (0, 11):
        return list(values)

    def behind_operation(x: Any) -> Any:
        dtype = jax.typeof(x).dtype
        is_integer = jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_
        return jax.lax.bitwise_or(x, jnp.zeros_like(x)) if is_integer else x

    return [behind_operation(x) for x in values]


def first_entry(x: Any) -> Any:
    """Return the first entry of an array.

    Where an explicit mesh axis splits an axis of the array, JAX 0.10.2 cannot slice it.
    """
    if JAX_VERSION < (0, 11) and any(explicit_spec(jax.typeof(x))):
        places = tuple(jnp.zeros(1, jnp.int32) for _ in x.shape)
        return x.at[places].get(out_sharding=jax.sharding.PartitionSpec(None)).reshape(())
    return jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())


def checkpoint_name(x: Any, name: str) -> Any:
    """Give a value a name. Of a complex one, the real and the imaginary part get it."""
    if not jnp.issubdtype(jax.typeof(x).dtype, jnp.complexfloating):
        return ad_checkpoint.checkpoint_name(x, name)
    parts = (ad_checkpoint.checkpoint_name(p, name) for p in (jax.lax.real(x), jax.lax.imag(x)))
    return jax.lax.complex(*parts)


def is_debug_callback(primitive: Any) -> bool:
    """Tell whether a primitive is that of `jax.debug.callback` or of `jax.debug.print`.

    JAX asks a policy about them. One that is not kept is staged a second time, and so is a kept one
    whose inputs are all recomputed; in the first case JAX fails if an input is saved and nothing
    else reads it (0.10.2 and 0.12).
    """
    return primitive.name in ("debug_callback", "debug_print")


def has_debug_effect(eqn: Any) -> bool:
    """Tell whether a debug callback is in an equation (0.10.2 and 0.12)."""
    return any(
        isinstance(e, (debugging.DebugEffect, debugging.OrderedDebugEffect)) for e in eqn.effects
    )


def copy_equation(var: Any, out: Any, like: Any) -> Any:
    """Return an equation that computes ``out``, a copy of ``var``, at the place of ``like``."""
    found = core.new_jaxpr_eqn([var], [out], lax_internal.copy_p, {}, set(), like.source_info)
    return found.replace(ctx=like.ctx)


def name_equations(var: Any, out: Any, name: str, like: Any) -> list[Any]:
    """Return equations that compute ``out = checkpoint_name(var, name)``, at the place of ``like``.

    The equation is traced once per name on a scalar and given its variables by hand: tracing on
    the real value would fail inside `shard_map`, whose axes are not open here.

    JAX rounds what it saves with `reduce_precision`, which refuses complex numbers. Of a complex
    value the real and the imaginary part get the name (0.10.2 and 0.12).
    """
    dtype = getattr(var.aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.complexfloating):
        return [_name_equation(var, out, name, like)]
    real, imag, whole = (
        e.replace(source_info=like.source_info, ctx=like.ctx)
        for e in _parts_of_complex(var.aval.dtype)
    )
    found, parts = [], []
    for part in (real, imag):
        aval = var.aval.update(dtype=part.outvars[0].aval.dtype, weak_type=False)
        bare, named = type(var)(aval), type(var)(aval)
        found += [
            part.replace(invars=[var], outvars=[bare]),
            _name_equation(bare, named, name, like),
        ]
        parts.append(named)
    return [*found, whole.replace(invars=parts, outvars=[out])]


@functools.cache
def _parts_of_complex(dtype: Any) -> list[Any]:
    def whole(x: Any) -> Any:
        return jax.lax.complex(jax.lax.real(x), jax.lax.imag(x))

    return jax.make_jaxpr(whole)(jax.ShapeDtypeStruct((), dtype)).eqns


def _name_equation(var: Any, out: Any, name: str, like: Any) -> Any:
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


def renamed_equation(eqn: Any, name: str, var: Any) -> Any:
    """Return a `checkpoint_name` equation that gives another name, to ``var``."""
    params = {**eqn.params, "name": name}
    hi = hi_primitive(eqn)
    if hi is not None:
        params = {**eqn.params, "_prim": type(hi)(name, var.aval)}
    return eqn.replace(params=params, invars=[var])


def can_be_renamed(eqn: Any) -> bool:
    """Tell whether a value can be kept by way of a `checkpoint_name` equation of the user's.

    `jax.checkpoint` cannot keep complex values (`name_equations`).
    """
    dtype: Any = getattr(eqn.outvars[0].aval, "dtype", None)
    return names_are_objects() and not jnp.issubdtype(dtype, jnp.complexfloating)


def names_are_objects() -> bool:
    """Tell whether a policy that is asked about a name gets the very object that named the value.

    Not from the first ``jax_remat3`` (0.10.2), which compares names (`keep_names`).
    """
    return JAX_VERSION >= (0, 11) or not remat3()


@functools.cache
def _name_template(name: str, hi: bool) -> Any:
    del hi  # part of the key: the flag decides which primitive is bound
    traced = jax.make_jaxpr(lambda x: ad_checkpoint.checkpoint_name(x, name))(np.float32(0))
    return traced.eqns[0]


def replace_body(closed: Any, eqns: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """Return a closed or open jaxpr with other equations and outputs, the same inputs."""
    if isinstance(closed, jec.ClosedJaxpr) and closed.jaxpr is not closed:  # 0.10.2
        return closed.replace(jaxpr=replace_body(closed.jaxpr, eqns, outvars))
    return closed.replace(
        eqns=list(eqns), outvars=list(outvars), is_high=closed.is_high or _are_high(eqns)
    )


def _are_high(eqns: Sequence[Any]) -> bool:
    """Tell whether an equation is a high-level primitive, or calls a program that has one.

    A program says so with ``is_high``. JAX lowers a program that does not say so as it is, and has
    no lowering for these primitives. Seen on 0.10.2, 0.12.
    """
    inner = (jaxpr for eqn in eqns for jaxpr in core.jaxprs_in_params(eqn.params))
    return any(hi_primitive(eqn) is not None for eqn in eqns) or any(j.is_high for j in inner)


# -- regions built by hand ----------------------------------------------------------------------
# `jax.checkpoint` and `jax.custom_jvp` trace the functions that they are given. The programs that
# go into a region are traced already, and tracing them again, once for each of the two, took as
# long as everything else. Seen on 0.10.2, 0.12.


def jaxpr_of(invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any]) -> Any:
    """Return an open jaxpr of these equations, which read no constants but literals."""
    joined = core.join_effects(*(e.effects for e in eqns))
    high = _are_high(eqns)
    info = _no_debug_info()
    return core.Jaxpr((), list(invars), list(outvars), list(eqns), joined, info, is_high=high)


@functools.cache
def _no_debug_info() -> Any:
    return jax.make_jaxpr(lambda: ())().jaxpr.debug_info.with_unknown_names()


def folded(eqn: Any) -> Any | None:
    """Return the constant that a conversion of a scalar constant makes; None for other equations.

    JAX's rules for this are in `partial_eval.const_fold_rules` (0.10.2 and 0.12).
    """
    rule = partial_eval.const_fold_rules.get(eqn.primitive)
    if rule is None or not all(isinstance(v, core.Literal) for v in eqn.invars):
        return None
    (out,) = eqn.outvars
    found = rule([v.val for v in eqn.invars], eqn.params, [out.aval])
    return None if found is None or found[0] is None else core.Literal(found[0], out.aval)


def with_rule(jaxpr: Any, rule: Any) -> Any:
    """Return an open jaxpr that calls another one, which has a derivative rule of its own.

    ``rule(zeros)`` says which inputs have no tangent. It returns a jaxpr of the inputs and the
    tangents that are there, with constants or without; it returns the outputs and their tangents,
    and beside the jaxpr which of the tangents are zero and left out.
    """

    def jvp_jaxpr(*zeros: bool) -> Any:
        found, out_zeros = rule(zeros)
        return (
            found.jaxpr if hasattr(found, "jaxpr") else found,
            getattr(found, "consts", ()),
            out_zeros,
        )

    _allow_stop_gradient_in_linear_programs()
    invars = [core.Var(v.aval) for v in jaxpr.invars]
    outvars = [core.Var(v.aval) for v in jaxpr.outvars]
    params = {
        "call_jaxpr": jec.ClosedJaxpr(jaxpr, ()),
        "jvp_jaxpr_fun": linear_util.wrap_init(jvp_jaxpr, debug_info=_no_debug_info()),
        "num_consts": 0,
        "symbolic_zeros": True,
    }
    primitive = custom_derivatives.custom_jvp_call_p
    eqn = core.new_jaxpr_eqn(invars, outvars, primitive, params, jaxpr.effects)
    return jaxpr_of(invars, outvars, [eqn])


def checkpointed(jaxpr: Any, inputs: Sequence[Any], *, prevent_cse: Any, policy: Any) -> list[Any]:
    """Run an open jaxpr as one region of `jax.checkpoint`."""
    return ad_checkpoint.remat_p.bind(
        *inputs, jaxpr=jaxpr, prevent_cse=prevent_cse, differentiated=False, policy=policy
    )


def zeros(aval: Any) -> Any:
    """Return zeros of an abstract value, its sharding and its varying axes included.

    `jnp.zeros` would lose both inside `shard_map` and on meshes with explicit axes. 0.10.2, 0.12.
    """
    return ad_util.zeros_like_aval(aval)


def explicit_spec(aval: Any) -> tuple[Any, ...]:
    """Return how the explicit axes of a mesh split a value, for each axis as in a `PartitionSpec`.

    A type without a sharding, such as that of a token, has none.
    """
    return tuple(getattr(getattr(aval, "sharding", None), "spec", ()))


def explicit_ways(aval: Any, axis: int) -> int:
    """Return into how many parts the explicit axes of a mesh split an axis of a value."""
    names = dict(enumerate(explicit_spec(aval))).get(axis)
    if names is None:
        return 1
    return math.prod(aval.sharding.mesh.shape[n] for n in jax.tree.leaves(names))


def broadcast_like(x: Any, aval: Any) -> Any:
    """Broadcast a scalar to the shape and the explicit sharding of an abstract value."""
    if not any(explicit_spec(aval)):
        return jnp.broadcast_to(x, aval.shape)
    return jax.lax.broadcast_in_dim(x, aval.shape, (), out_sharding=aval.sharding)


def allows_custom_rule(eqns: Sequence[Any], avals: Sequence[Any]) -> bool:
    """Tell whether equations may stand in a function with a derivative rule of its own.

    JAX refuses some effects there, and references to mutable arrays cannot be linearized apart
    from their users. 0.10.2, 0.12.
    """
    allowed = effects.custom_derivatives_allowed_effects
    found = {e for eqn in eqns for e in eqn.effects}
    refs = any(map(is_ref, avals))
    return not refs and not allowed.filter_not_in(found) and not any(map(_is_ref_effect, found))


def is_ref(aval: Any) -> bool:
    """Tell whether an abstract value is that of a `jax.Ref`."""
    return isinstance(aval, AbstractRef)


def _is_ref_effect(effect: Any) -> bool:
    return isinstance(effect, (RefEffect, core.InternalMutableArrayEffect))


@dataclasses.dataclass(frozen=True)
class MappedAxes:
    """The named axes of a `shard_map` (and those of `vmap` in it), and its mesh.

    Attributes:
        env: as `axis_env` returns it.
        mesh: the abstract mesh, some of whose axes are manual.
        checks: whether the types of values say over which axes they vary (``check_vma``).
    """

    env: Any
    mesh: Any
    checks: bool

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """The names and sizes of the mesh's axes, in order."""
        return tuple(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))

    @property
    def splits_more(self) -> bool:
        """Whether the partitioner of XLA splits values over other axes of the mesh."""
        kinds = zip(self.mesh.axis_types, self.mesh.axis_sizes, strict=True)
        return any(kind != jax.sharding.AxisType.Manual and size > 1 for kind, size in kinds)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Open the axes, so that what was traced inside of the `shard_map` can be traced again.

        ``check_vma`` is in `jax._src.config`: 0.10.2, 0.12.
        """
        with (
            open_axes(self.env),
            jax.sharding.use_abstract_mesh(self.mesh),
            config._check_vma(self.checks),
        ):
            yield


def manual_type(aval: Any) -> dict[str, Any]:
    """Return over which axes of a `shard_map` a value varies, as `jax.ShapeDtypeStruct` takes it.

    Nothing for a value that varies over none. 0.10.2 and 0.12 have the same name for it, and ask
    for the mesh too.
    """
    kind = getattr(aval, "manual_axis_type", None)
    if kind is None or not getattr(kind, "varying", None):
        return {}
    return {"manual_axis_type": kind, "sharding": aval.sharding}


def mapped_axes() -> MappedAxes | None:
    """Return the axes of the `shard_map` whose body is being traced, or None. 0.10.2, 0.12."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = jax.sharding.AxisType.Manual in tuple(mesh.axis_types or ())
    return MappedAxes(core.get_axis_env(), mesh, config._check_vma.value) if manual else None


def axis_env() -> Any:
    """Return the named axes that are open: of `vmap`, `shard_map` and the like. 0.10.2, 0.12."""
    return core.get_axis_env()


@contextlib.contextmanager
def open_axes(env: Any) -> Iterator[None]:
    """Open the named axes that `axis_env` returned. 0.10.2, 0.12."""
    before = core.get_axis_env()
    core.trace_ctx.set_axis_env(env)
    try:
        yield
    finally:
        core.trace_ctx.set_axis_env(before)


# -- rules for `vmap` ---------------------------------------------------------------------------
# JAX calls the batching rule of a primitive that is told the axis even where no input is mapped.
# Seen on 0.10.2, 0.12.


def _same_along(axis_data: Any, dims: Sequence[Any], effects: Any = ()) -> bool:
    """Tell whether an equation computes the same along an axis that is mapped.

    Its results must not be mapped then. ``jax.jacfwd`` maps the tangents of a function and relies
    on it that the value of the function, which may be computed by one of our equations, is not.

    Args:
        axis_data: the axis, as batching rules get it.
        dims: for each input the axis of the array that is mapped, or None.
        effects: the effects of the program that the equation runs, which tell whether it contains
            a collective operation over the axis.
    """
    return all(d is None for d in dims) and core.NamedAxisEffect(axis_data.name) not in effects


# -- linear programs that can only be transposed ------------------------------------------------
# The derivative of a `custom_vjp` function is the equation `custom_lin`, which has a rule for
# transposition and no other: JAX batches a `custom_vjp` function before it differentiates it. A
# derivative rule that contains the equation may be batched. So the linear program goes into an
# equation of ours, which remembers over which axes it was batched and batches its transpose.
# A backward rule that need not be linear is called as often as JAX calls it, and with the same
# cotangents. Seen on 0.10.2, 0.12.

_transposable_p = core.Primitive("remat_kit_transposable")


_transposable_p.multiple_results = True


TRANSPOSED_ONLY = frozenset({"custom_lin", _transposable_p.name})


@dataclasses.dataclass(frozen=True)
class _BatchAxis:
    """An axis that an equation was batched over, and which of its inputs have it (in front)."""

    data: Any
    inputs: tuple[bool, ...]


def transposable(linear: Any, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Bind a linear program, a closed jaxpr of the residuals and the tangents, as one equation."""
    count = len(residuals)
    return _transposable_p.bind(*residuals, *tangents, linear=linear, residuals=count, axes=())


@_transposable_p.def_abstract_eval
def _transposable_avals(*_: Any, linear: Any, residuals: int, axes: Any) -> list[Any]:
    del residuals
    avals = list(linear.out_avals)
    for axis in axes:
        mesh_axis = axis.data.explicit_mesh_axis
        avals = [core.unmapped_aval(axis.data.size, 0, a, mesh_axis) for a in avals]
    return avals


def _transposable_impl(*_: Any, **__: Any) -> Any:
    return ad.raise_custom_vjp_error_on_jvp()


def _transposable_batch(axis_data: Any, args: Any, dims: Any, **params: Any) -> Any:
    if _same_along(axis_data, dims, params["linear"].effects):
        outs = _transposable_p.bind(*args, **params)
        return outs, [None] * len(outs)
    moved = [
        x if d is None else batching.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)
    ]
    axis = _BatchAxis(axis_data, tuple(d is not None for d in dims))
    params["axes"] = (*params["axes"], axis)
    outs = _transposable_p.bind(*moved, **params)
    return outs, [0] * len(outs)


def _transposable_transpose(
    cts: Any, *args: Any, linear: Any, residuals: int, axes: Any
) -> list[Any]:
    wanted = [ad.is_undefined_primal(d) for d in args[residuals:]]
    given = [type(ct) is not ad_util.Zero for ct in cts]
    if not any(given):
        return [None] * len(args)
    backward = _Backward(linear, residuals, wanted, given)
    run: Any = backward
    for axis in axes:
        run = backward.batched(run, axis)
    outs = iter(run(list(args[:residuals]), [ct for ct, g in zip(cts, given, strict=True) if g]))
    found = [next(outs) if i in backward.nonzero else None for i in range(len(wanted))]
    return [*[None] * residuals, *found]


class _Backward:
    """The transpose of a linear program for some of its outputs and with respect to some inputs."""

    def __init__(self, linear: Any, residuals: int, wanted: list[bool], given: list[bool]):
        self.linear = linear
        self.residuals = residuals
        self.wanted = wanted
        self.given = given
        self.nonzero: list[int] = []  # the inputs whose cotangents are returned, once it has run

    def __call__(self, residuals: list[Any], cts: list[Any]) -> list[Any]:
        inputs = self.linear.in_avals[self.residuals :]
        primals = [
            ad.UndefinedPrimal(a) if w else zeros(a)
            for a, w in zip(inputs, self.wanted, strict=True)
        ]
        # `backward_pass` calls a backward rule even where all of its cotangents are zero. JAX drops
        # such equations before, as dead code of the linear program.
        jaxpr, _ = partial_eval.dce_jaxpr(self.linear.jaxpr, self.given, True)
        outs = ad.backward_pass(jaxpr, False, self.linear.consts, [*residuals, *primals], cts)
        found = outs[self.residuals :]
        self.nonzero = [
            i for i, ct in enumerate(found) if self.wanted[i] and type(ct) is not ad_util.Zero
        ]
        return [found[i] for i in self.nonzero]

    def batched(self, run: Any, axis: _BatchAxis) -> Any:
        """Return the transpose over one more axis: what an input without it gets is summed up."""
        data, dims = axis.data, [0 if there else None for there in axis.inputs]

        def over_axis(residuals: list[Any], cts: list[Any]) -> list[Any]:
            outs = jax.vmap(
                run,
                in_axes=(dims[: self.residuals], 0),
                axis_size=data.size,
                axis_name=None if data.name is core.no_axis_name else data.name,
                spmd_axis_name=data.spmd_name,
            )(residuals, cts)
            inputs = axis.inputs[self.residuals :]
            return [
                ct if inputs[i] else jnp.sum(ct, 0)
                for i, ct in zip(self.nonzero, outs, strict=True)
            ]

        return over_axis


def _transposable_dce(used: Sequence[bool], *rest: Any) -> Any:
    """Remove the results and the operands that nothing needs.

    An operand that the linear program does not read would get a cotangent of zeros, and JAX would
    call the backward rule of the operation that computed the operand.
    """
    eqn = rest[-1]  # 0.12 says before which operands are alive
    if not any(used):
        return [False] * len(eqn.invars), None
    linear, count = eqn.params["linear"], eqn.params["residuals"]
    jaxpr, needed = partial_eval.dce_jaxpr(linear.jaxpr, list(used), False)

    def those(values: Sequence[Any], which: Sequence[bool]) -> list[Any]:
        return [v for v, w in zip(values, which, strict=True) if w]

    params = {
        "linear": jec.ClosedJaxpr(jaxpr, linear.consts),
        "residuals": sum(needed[:count]),
        "axes": tuple(
            dataclasses.replace(axis, inputs=tuple(those(axis.inputs, needed)))
            for axis in eqn.params["axes"]
        ),
    }
    lean = eqn.replace(
        invars=those(eqn.invars, needed), outvars=those(eqn.outvars, used), params=params
    )
    return needed, lean


_transposable_p.def_impl(_transposable_impl)


partial_eval.dce_rules[_transposable_p] = _transposable_dce


ad.primitive_transposes[_transposable_p] = _transposable_transpose


batching.fancy_primitive_batchers[_transposable_p] = _transposable_batch


mlir.register_lowering(_transposable_p, _transposable_impl)


# -- linear maps with a transpose of their own --------------------------------------------------
# What `jax.custom_derivatives.linear_call` is, and `vmap` and derivatives with respect to the
# residuals too, which that function lacks. Seen on 0.10.2, 0.12.

_linear_map_p = core.Primitive("remat_kit_linear_map")


_linear_map_p.multiple_results = True


def linear_map(
    evaluate: Any,
    transpose: Callable[[list[Any], list[Any]], list[Any]],
    residuals: Sequence[Any],
    tangents: Sequence[Any],
) -> list[Any]:
    """Evaluate a map that is linear in the tangents, and transpose it by a function of its own.

    Args:
        evaluate: a function of the residuals and the tangents, in one flat list of arguments.
        transpose: returns one cotangent for each tangent, given the residuals and the cotangents
            of the results, of which those that are zero are None.
        residuals, tangents: the arguments.
    """
    values = [*residuals, *tangents]
    closed = jax.make_jaxpr(evaluate)(*map(jax.typeof, values))
    return _linear_map_p.bind(
        *values, evaluate=closed, transpose=transpose, residuals=len(residuals)
    )


def _linear_map_impl(*args: Any, evaluate: Any, **_: Any) -> list[Any]:
    return core.eval_jaxpr(evaluate.jaxpr, evaluate.consts, *args)


def _linear_map_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    outs = _linear_map_p.bind(*primals, **params)
    count = params["residuals"]
    zero = [type(t) is ad_util.Zero for t in tangents]
    if all(zero[:count]):
        moved = [ad.instantiate_zeros(t) for t in tangents[count:]]
        return outs, _linear_map_p.bind(*primals[:count], *moved, **params)

    def of_moving(*some: Any) -> list[Any]:
        given = iter(some)
        return _linear_map_impl(
            *(x if z else next(given) for x, z in zip(primals, zero, strict=True)), **params
        )

    moving = [(x, t) for x, t, z in zip(primals, tangents, zero, strict=True) if not z]
    _, changes = jax.jvp(of_moving, [x for x, _ in moving], [t for _, t in moving])
    return outs, changes


def _linear_map_transpose(
    cts: Any, *args: Any, evaluate: Any, transpose: Any, residuals: int
) -> list[Any]:
    del evaluate
    given = [None if type(ct) is ad_util.Zero else ct for ct in cts]
    if all(ct is None for ct in given):
        return [None] * len(args)
    found = transpose(list(args[:residuals]), given)
    wanted = [ad.is_undefined_primal(x) for x in args[residuals:]]
    return [None] * residuals + [ct if w else None for ct, w in zip(found, wanted, strict=True)]


def _linear_map_batch(
    axis_data: Any, args: Any, dims: Any, evaluate: Any, transpose: Any, residuals: int
) -> Any:
    if _same_along(axis_data, dims, evaluate.effects):
        outs = _linear_map_p.bind(
            *args, evaluate=evaluate, transpose=transpose, residuals=residuals
        )
        return outs, [None] * len(outs)

    def moved(x: Any, d: Any, linear: bool) -> Any:
        if d is not None:
            return batching.moveaxis(x, d, 0)
        # The broadcast sums up the cotangents of a tangent that is not mapped.
        return jnp.broadcast_to(x, (axis_data.size, *jnp.shape(x))) if linear else x

    values = [moved(x, d, i >= residuals) for i, (x, d) in enumerate(zip(args, dims, strict=True))]
    axes = [None if d is None and i < residuals else 0 for i, d in enumerate(dims)]
    mapped = functools.partial(
        jax.vmap,
        axis_size=axis_data.size,
        axis_name=None if axis_data.name is core.no_axis_name else axis_data.name,
        spmd_axis_name=axis_data.spmd_name,
    )
    outs = _linear_map_p.bind(
        *values,
        evaluate=jax.make_jaxpr(mapped(jec.jaxpr_as_fun(evaluate), in_axes=axes))(
            *map(jax.typeof, values)
        ),
        transpose=mapped(transpose, in_axes=(axes[:residuals], 0)),
        residuals=residuals,
    )
    return outs, [0] * len(outs)


_linear_map_p.def_impl(_linear_map_impl)


_linear_map_p.def_abstract_eval(lambda *_, evaluate, **__: list(evaluate.out_avals))


ad.primitive_jvps[_linear_map_p] = _linear_map_jvp


ad.primitive_transposes[_linear_map_p] = _linear_map_transpose


batching.fancy_primitive_batchers[_linear_map_p] = _linear_map_batch


mlir.register_lowering(_linear_map_p, mlir.lower_fun(_linear_map_impl, multiple_results=True))


# -- tangents that nobody may use ---------------------------------------------------------------
# The forward rule of a `custom_vjp` function may call what has no derivative: a kernel, a callback.
# Where such an equation is differentiated although nobody needs the result, its tangent is the
# output of this primitive. It disappears as dead code, or raises the error once it is used.

_undefined_p = core.Primitive("remat_kit_undefined_tangent")


_undefined_p.multiple_results = True


_undefined_p.def_abstract_eval(lambda *_, avals, error: list(avals))


def undefined_tangents(
    tangents: Sequence[Any], avals: Sequence[Any], error: Exception
) -> list[Any]:
    """Return tangents of these abstract values that raise ``error`` when they are used."""
    return _undefined_p.bind(*tangents, avals=tuple(avals), error=error)


def _undefined_impl(*_: Any, error: Exception, **__: Any) -> Any:
    raise error


def _undefined_batch(axis_data: Any, args: Any, dims: Any, *, avals: Any, error: Any) -> Any:
    if _same_along(axis_data, dims):
        return undefined_tangents(args, avals, error), [None] * len(avals)
    mesh_axis = axis_data.explicit_mesh_axis
    mapped = [core.unmapped_aval(axis_data.size, 0, a, mesh_axis) for a in avals]
    return undefined_tangents(args, mapped, error), [0] * len(avals)


_undefined_p.def_impl(_undefined_impl)


mlir.register_lowering(_undefined_p, _undefined_impl)


batching.fancy_primitive_batchers[_undefined_p] = _undefined_batch


ad.primitive_transposes[_undefined_p] = lambda cts, *_, error, **__: _undefined_impl(error=error)


def may_lack_derivative(eqn: Any) -> bool:
    """Tell whether an equation is one of a kind that JAX may refuse to differentiate.

    It has no rule, or runs code that JAX does not see. 0.10.2 and 0.12.
    """
    primitive = eqn.primitive
    known = primitive in ad.primitive_jvps or primitive in ad.primitive_linearizations
    custom = primitive.name.startswith(("custom_jvp_call", "custom_vjp_call"))
    hidden = primitive.name.endswith(("_callback", "_call")) and not custom
    return hidden or not (known or custom) or hi_primitive(eqn) is not None


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
    if names_are_objects():
        return policy
    return jax.checkpoint_policies.save_only_these_names(*names)


def is_on_host(aval: Any) -> bool:
    """Tell whether a traced array lies in the host's memory (0.10.2 and 0.12)."""
    return getattr(aval, "memory_space", None) == core.MemorySpace.Host


def drops_offload() -> bool:
    """Tell whether this is the first ``jax_remat3`` (0.10.2), which offloads nothing."""
    return JAX_VERSION < (0, 11) and remat3()


def inside_loop() -> bool:
    """Tell whether the caller is part of a loop body that is differentiated with its loop.

    In such a body the forward and the backward pass are loops of their own, which the compiler
    does not merge. Where a gradient is taken within the body, both stand in one body, and they can
    be merged as anywhere else. A `jit` remembers what was traced in it, so a trace inside of one
    serves later calls in other places too.

    JAX keeps no record of any of this, so the Python frames are read, innermost first. What is
    nearest decides: `scan` and `while_loop` trace their bodies from
    `jax/_src/lax/control_flow/loops.py`, gradients come from `jax/_src/interpreters/ad.py`, and
    `jit` traces from `jax/_src/pjit.py` (0.10.2 and 0.12).
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(_LOOPS_FILE):
            return True
        if file.endswith(_MERGING_FILES):
            return False
        frame = frame.f_back
    return False


_SOURCE = os.path.join("jax", "_src")


_LOOPS_FILE = os.path.join(_SOURCE, "lax", "control_flow", "loops.py")


_MERGING_FILES = (
    os.path.join(_SOURCE, "interpreters", "ad.py"),
    os.path.join(_SOURCE, "pjit.py"),
)


# -- traces ---------------------------------------------------------------------------------
# `jax.checkpoint` remembers what it has traced by the function (as long as it lives), the types of
# the arguments and JAX's settings. We use the same cache, so that a decorated function is traced as
# often as one under `jax.checkpoint`, and `jax.clear_caches` works. Seen on 0.10.2, 0.12.


@dataclasses.dataclass(frozen=True)
class Traced:
    """What a function is as a program; ``consts`` are the values of its first inputs."""

    jaxpr: Any
    consts: tuple[Any, ...]
    out_tree: Any

    @property
    def closed(self) -> Any:
        """The program as a closed jaxpr without constants of its own."""
        return self.jaxpr if hasattr(self.jaxpr, "consts") else jec.ClosedJaxpr(self.jaxpr, ())


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves and the structure of a pytree as `jax.checkpoint` flattens arguments.

    A view of a `jax.Ref`, such as ``ref.at[0]``, is a node there and a leaf of `jax.tree.flatten`.
    Structures of the two kinds are not compatible. Seen on 0.10.2, 0.12.
    """
    return tree_util.tracing_registry.flatten(tree)


def flatten_with_path(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[Any, Any]], Any]:
    """Return the leaves with their paths, and the structure, as `flatten` does. 0.10.2, 0.12."""
    is_end = None if is_leaf is None else lambda _, x: is_leaf(x)
    return tree_util.tracing_registry.flatten_with_path(tree, is_end)


def trace(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Trace a function as `jax.checkpoint` does, with its errors and its memory."""
    if remat3():
        return _trace3(fn, args, kwargs)
    leaves, tree = flatten((args, kwargs))
    avals = tuple(map(core.shaped_abstractify, leaves))
    debug = api_util.debug_info("checkpoint / remat", fn, args, kwargs)
    jaxpr, consts, out_tree = ad_checkpoint._trace_to_jaxpr(fn, tree, avals, debug)
    return Traced(jaxpr, tuple(consts), out_tree)


def _trace3(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """The same under ``jax_remat3``, which has a memory of its own."""
    flat: Any = getattr(ad_checkpoint, "ft", None) or getattr(ad_checkpoint, "FlatTree", None)
    avals = flat.flatten_static_argnums_argnames(args, kwargs, (), ()).map(core.typeof)
    debug = api_util.debug_info("remat3", fn, args, kwargs, static_argnums=(), static_argnames=())
    closed, outs = partial_eval.trace_to_jaxpr(fn, avals, debug)
    jaxpr, consts = partial_eval.separate_consts(closed)
    return Traced(jaxpr, tuple(consts), outs.tree)


def remembered(fn: Any) -> Any:
    """Return a function that JAX can remember: ``fn`` itself, if it has a hash."""
    try:
        hash(fn)
        weakref.ref(fn)
    except TypeError:
        return functools.wraps(fn, updated=())(lambda *args, **kwargs: fn(*args, **kwargs))
    return fn


def shared(make: Any, fn: Any, key: Any) -> Any:
    """Return ``make(of, key)``, made once as long as ``fn`` lives and ``key`` is the same.

    ``of()`` is ``fn``. What ``make`` returns must not contain ``fn``, because it is kept until
    ``fn`` is gone; `Remade` functions do not.
    """
    try:
        return _memory(make)(fn, key)
    except TypeError:  # no weak reference to the function, or no hash
        return make(lambda: fn, key)


@functools.cache
def _memory(make: Any) -> Any:
    return util.weakref_lru_cache(lambda fn, key: make(weakref.ref(fn), key))


class Remade:
    """A function that calls another one with other arguments.

    If it is remembered (`shared`), it does not keep the other function alive, nor what that one is
    closed over. Whoever calls it does.

    >>> def double(x): return 2 * x
    >>> negative = Remade(lambda: double, lambda fn, x: fn(-x))
    >>> negative(3), negative.__name__
    (-6, 'double')

    Args:
        of: returns the other function, or None if it is gone.
        body: called with the other function and the arguments.
    """

    def __init__(self, of: Callable[[], Any], body: Callable[..., Any]):
        self._of, self._body = of, body
        fn = of()
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.__qualname__ = getattr(fn, "__qualname__", self.__name__)
        self.__module__ = getattr(fn, "__module__", "")
        self.__doc__ = getattr(fn, "__doc__", None)

    @property
    def __wrapped__(self) -> Any:
        return self._known()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._body(self._known(), *args, **kwargs)

    def _known(self) -> Any:
        fn = self._of()
        if fn is None:
            raise ReferenceError(f"{self.__qualname__} is no longer there")
        return fn


_own_traces = jax.make_user_context(None)


def traces_of_their_own() -> Any:
    """Return a context in which nothing is found that JAX remembers of traces outside of it."""
    return _own_traces("remat_kit")


# -- what a program differentiates -------------------------------------------------------------
# `jax.vjp` and `jax.linearize`, and everything above them (`jax.grad`, `nnx.grad`, `jacrev`), call
# `ad.linearize(fun, primals, has_aux=...)` by that name, and nothing else does. 0.10.2 and 0.12.

# The value is part of the key of jit's caches. Within the context, jit therefore traces a function
# again that it has traced before. After the context it uses the first trace again.
_catchers = jax.make_user_context(())


_catching_lock = threading.Lock()


_catching_users = 0


_linearize: Any = None  # JAX's own function, while ours is in its place


@dataclasses.dataclass(frozen=True)
class Differentiated:
    """A function that is about to be differentiated.

    Attributes:
        fun: the function, of the arguments to differentiate alone.
        has_aux: whether its result is a pair, whose second part has no derivative.
        frames: (code, line) of the Python frames that asked for the derivative, innermost first.
    """

    fun: Callable[..., Any]
    has_aux: bool
    frames: tuple[tuple[Any, int], ...]


@contextlib.contextmanager
def catching(catcher: Callable[[Differentiated], Callable[..., Any]]) -> Iterator[None]:
    """Hand each function that this thread differentiates to ``catcher``, and take its answer.

    The answer is differentiated in the place of the function. Only the outermost functions count:
    not those that are differentiated inside of another one or by a backward pass, nor those that
    JAX itself makes, for example to solve a linear system. JAX is changed while such a context is
    open in some thread, and other threads do not notice.
    """
    _install()
    try:
        with _catchers((catcher, *_catchers.value)):
            yield
    finally:
        _uninstall()


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """Run as if nothing was being traced, in the middle of a trace.

    `jax.ensure_compile_time_eval` would also evaluate constants, so that what is traced in the
    context is another program (0.10.2 and 0.12).
    """
    with core.eval_context(), _catchers(()):
        yield


def _install() -> None:
    global _catching_users, _linearize
    with _catching_lock:
        if not _catching_users:
            _linearize, ad.linearize = ad.linearize, _caught
        _catching_users += 1


def _uninstall() -> None:
    global _catching_users
    with _catching_lock:
        _catching_users -= 1
        if not _catching_users:
            ad.linearize = _linearize


def _caught(fun: Any, primals: Any, *args: Any, has_aux: bool = False, **options: Any) -> Any:
    catchers = _catchers.value
    frames = _asking_frames() if catchers else ()
    if not frames:
        return _linearize(fun, primals, *args, has_aux=has_aux, **options)
    with _catchers(()):
        for catcher in catchers:
            fun = catcher(Differentiated(fun, has_aux, frames))
        return _linearize(fun, primals, *args, has_aux=has_aux, **options)


def _asking_frames() -> tuple[tuple[Any, int], ...]:
    """Return the frames that asked for a derivative; none if JAX did, or a backward pass."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith((_API_FILE, _BOUNDARY_FILE)):
        frame = frame.f_back
    if frame is None or any(place in frame.f_code.co_filename for place in _OWN_DERIVATIVES):
        return ()
    found = []
    while frame is not None:
        code = frame.f_code
        if code.co_name.startswith("backward_pass") and code.co_filename.endswith(_AD_FILE):
            return ()
        if len(found) < _MOST_FRAMES:
            found.append((code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


_MOST_FRAMES = 40


@dataclasses.dataclass(frozen=True)
class CallBeingTraced:
    """A call of a jitted function or of a gradient function that a trace is made for.

    Attributes:
        fn: the jitted function; or the function that is differentiated.
        args, kwargs: the arguments of the call.
        argnums: of a gradient function, the positions of the arguments to differentiate.
        frame: the Python frame of the call.
        options: of a jitted function, what was given to `jax.jit`; equal for equal options.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    argnums: int | Sequence[int] | None
    frame: Any
    options: Any = None


def outermost_jit() -> CallBeingTraced | None:
    """Return the outermost call of a jitted function that this thread is tracing, or None.

    JAX calls `cache_miss` for a call that has no compiled program yet, and `jit_trace` for
    ``trace`` and ``lower``. Their frames hold the function and its arguments (0.10.2 and 0.12).
    """
    found = None
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_JIT_FILE) and code.co_name in ("cache_miss", "jit_trace"):
            found = frame
        frame = frame.f_back
    if found is None:
        return None
    values = found.f_locals
    if found.f_code.co_name == "jit_trace":
        fn = values["jit_func"]
        options = fn._jit_info
    else:
        options = values["jit_info"]
        fn = pjit._cpp_pjit(values["fun"], options)
    return CallBeingTraced(fn, tuple(values["args"]), dict(values["kwargs"]), None, found, options)


_JIT_FILE = os.path.join("jax", "_src", "pjit.py")


def innermost_gradient() -> CallBeingTraced | None:
    """Return the innermost call of a gradient function in this thread, or None.

    `jax.grad` and `jax.value_and_grad` call `value_and_grad_f`, which calls `vjp`. Their frames
    hold what is differentiated and its arguments (0.10.2 and 0.12).
    """
    found = None
    frame: Any = sys._getframe(1)
    while frame is not None:
        code, values = frame.f_code, frame.f_locals
        if code.co_filename.endswith(_API_FILE):
            if code.co_name == "value_and_grad_f":
                argnums, kwargs = values["argnums"], dict(values["kwargs"])
                return CallBeingTraced(values["fun"], tuple(values["args"]), kwargs, argnums, frame)
            if code.co_name in ("vjp", "linearize"):
                args = tuple(values["primals"])
                found = CallBeingTraced(values["fun"], args, {}, tuple(range(len(args))), frame)
        elif found is not None and not code.co_filename.endswith(_BOUNDARY_FILE):
            break
        frame = frame.f_back
    return found


def is_outside_of_traces() -> bool:
    """Tell whether no function is being traced, so that operations run one by one.

    `trace_state_clean` is the same in 0.10.2, 0.11.2 and 0.12.
    """
    return core.trace_state_clean()


def is_traced_by_jit(x: Any) -> bool:
    """Tell whether a tracer stands for a value of a program that is being traced.

    The kinds of tracer are told by name, as not all of them are in one module (0.10.2 and 0.12).
    """
    return type(x).__name__ == "DynamicJaxprTracer"


_BOUNDARY_FILE = os.path.join("jax", "_src", "traceback_util.py")


# The modules of JAX that differentiate functions of their own making.
_OWN_DERIVATIVES = tuple(
    os.path.join("jax", "_src", *place)
    for place in (
        ("lax", "control_flow", "solves.py"),
        ("custom_derivatives.py",),
        ("ad_checkpoint.py",),
        ("cudnn", ""),
        ("pallas", ""),
        ("export", ""),
    )
)


_AD_FILE = os.path.join("jax", "_src", "interpreters", "ad.py")


def order_of_making(values: Sequence[Any]) -> list[int]:
    """Return the positions of traced values in the order in which their program makes them.

    JAX lists what a function is closed over in the order in which it is first read, which differs
    between two versions of the function. Values that are no tracers come last, in the given order.
    A tracer names its variable in ``val``, and its trace lists equations (0.10.2 and 0.12).
    """
    numbers: dict[Any, int] = {}
    for frame in {id(f): f for f in map(_frame_of, values) if f is not None}.values():
        made = (v for e in frame.tracing_eqns for v in getattr(e, "outvars", ()))
        for var in (*getattr(frame, "invars", ()), *made):
            numbers.setdefault(var, len(numbers))
    last = len(numbers)
    places = [last if _frame_of(x) is None else numbers.get(x.val, last) for x in values]
    return sorted(range(len(values)), key=places.__getitem__)


def _frame_of(x: Any) -> Any:
    return getattr(getattr(x, "_trace", None), "frame", None)


def reordered(traced: Traced, order: Sequence[int]) -> Traced:
    """Return a trace with its constants in another order."""
    jaxpr = getattr(traced.jaxpr, "jaxpr", traced.jaxpr)
    count = len(order)
    invars = [*(jaxpr.invars[i] for i in order), *jaxpr.invars[count:]]
    consts = tuple(traced.consts[i] for i in order)
    return Traced(jaxpr.replace(invars=invars), consts, traced.out_tree)


def function_inside(fun: Any, is_library: Callable[[str], bool]) -> Any:
    """Return the user's function inside the wrappers that libraries put around a loss.

    `value_and_grad` differentiates a function that is closed over the other arguments (0.10.2 and
    0.12), and NNX, Haiku and Equinox add functions and objects of their own. A wrapper names its
    function as `functools.wraps` or `functools.partial` do, in an attribute, or in its closure.

    Args:
        fun: the function that is differentiated.
        is_library: tells whether a file belongs to a library.
    """
    for _ in range(_MOST_WRAPPERS):
        code = getattr(fun, "__code__", None)
        if code is not None and not is_library(code.co_filename):
            break
        inner = next((f for f in _inside(fun) if callable(f) and f is not fun), None)
        if inner is None:
            break
        fun = inner
    return fun


_MOST_WRAPPERS = 20


def _inside(fun: Any) -> Iterator[Any]:
    for name in ("__wrapped__", "func", "f", "fun", "_fun"):
        yield getattr(fun, name, None)
    cells = []
    for cell in getattr(fun, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            cells.append(cell.cell_contents)
    yield from (c for c in cells if hasattr(c, "__code__") or hasattr(c, "__wrapped__"))
    yield from (getattr(c, name, None) for c in cells for name in ("_fun", "fun", "f"))


def is_differentiated(x: Any) -> bool:
    """Tell whether a value has a tangent at this place, as far as its tracers show it.

    In a `jit` that is differentiated as a whole they do not. Seen on 0.10.2 and 0.12.
    """
    while isinstance(x, Tracer):
        kind = type(x).__name__
        if kind in ("JVPTracer", "LinearizeTracer"):
            return True
        if kind != "BatchTracer":
            return False
        x = x.val
    return False


def concrete_value(x: Any) -> Any:
    """Return the value that tracers of a derivative stand for, outside of `jit`; else a tracer.

    `JVPTracer` and `LinearizeTracer` have it in ``primal`` (0.10.2 and 0.12).
    """
    while isinstance(x, Tracer) and type(x).__name__ in ("JVPTracer", "LinearizeTracer"):
        x = x.primal
    return x


# -- several processes ----------------------------------------------------------------------
# The store of `jax.distributed` has no public name (0.10.2 and 0.12).


def shared_text(key: str, make: Callable[[], str], seconds: float) -> str:
    """Return a text that the first process makes and that all processes get.

    Args:
        key: the name of the text, the same in all processes and used once.
        make: makes the text; called in the first process alone.
        seconds: how long the others wait for it.
    """
    client = distributed.global_state.client
    if client is None or jax.process_count() == 1:
        return make()
    if jax.process_index() == 0:
        text = make()
        client.key_value_set(f"remat_kit/{key}", text)
        return text
    return str(client.blocking_key_value_get(f"remat_kit/{key}", int(1000 * seconds)))


# -- tracebacks -----------------------------------------------------------------------------


def hide_frames(path: str) -> None:
    """Leave a file, or the files of a directory, out of filtered tracebacks. Seen on 0.10.2, 0.12.

    They stay in the locations of a lowered program: the identity of a program ends where a frame of
    this package begins, so that it does not depend on who asked for it (see `lower`).
    """
    traceback_util.register_exclusion(path)


@contextlib.contextmanager
def own_metadata() -> Iterator[None]:
    """Compile programs with their own names and source lines. Seen on 0.10.2, 0.12.

    By default, JAX's persistent compilation cache may answer with a program that differs in these
    (``jax_compilation_cache_include_metadata_in_key``).
    """
    with config.compilation_cache_include_metadata_in_key(True):
        yield


def entry(fn: Any) -> Any:
    """Mark a function that users call: tracebacks are filtered below it. Seen on 0.10.2, 0.12."""
    return traceback_util.api_boundary(fn)


# One by one, because a wheel has the models in the package too, and their frames are shown.
for _entry in os.scandir(os.path.dirname(__file__)):
    if _entry.name not in ("models", "policies", "__pycache__"):
        hide_frames(_entry.path)


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


_own_primitives: set[str] = set()


_scanned = 0


def is_own_primitive(name: str) -> bool:
    """Tell whether a primitive is JAX's, or this package's; anybody can make others.

    All of JAX's are values of its modules, some imported late. Seen on 0.10.2, 0.12.
    """
    global _scanned
    if name not in _own_primitives and _scanned != len(sys.modules):
        _scanned = len(sys.modules)
        for module_name, module in list(sys.modules.items()):
            if module_name.partition(".")[0] in ("jax", __name__.partition(".")[0]):
                values = list(vars(module).values())
                _own_primitives.update(v.name for v in values if isinstance(v, jec.Primitive))
    return name in _own_primitives


# -- over how many devices --------------------------------------------------------------------
# `num_devices` and `is_fully_replicated` of shardings, `size` of meshes and the parameters of
# equations that hold them: 0.10.2 and 0.12 agree.


def partitions_of(sharding: Any) -> int:
    """Return over how many devices a sharding splits an array: 1 where each holds all of it.

    `jax.ShapeDtypeStruct` also takes a `jax.experimental.layout.Format` in its place.
    """
    sharding = getattr(sharding, "sharding", sharding)
    if not isinstance(sharding, jax.sharding.Sharding) or sharding.is_fully_replicated:
        return 1
    return int(sharding.num_devices)


def devices_of(sharding: Any) -> int:
    """Return the number of devices of a sharding, also of a `Format`; 1 if it is none."""
    sharding = getattr(sharding, "sharding", sharding)
    return int(sharding.num_devices) if isinstance(sharding, jax.sharding.Sharding) else 1


def is_abstract(sharding: Any) -> bool:
    """Tell whether a sharding, or that of a `Format`, is over an abstract mesh."""
    mesh = getattr(getattr(sharding, "sharding", sharding), "mesh", None)
    return isinstance(mesh, jax.sharding.AbstractMesh)


def concrete(sharding: Any) -> jax.sharding.NamedSharding:
    """Return a sharding over an abstract mesh as one over the first devices of this process."""
    named = getattr(sharding, "sharding", sharding)
    mesh = named.mesh
    placed = jax.make_mesh(
        mesh.axis_sizes,
        mesh.axis_names,
        mesh.axis_types,
        devices=jax.devices()[: mesh.size],
    )
    return jax.sharding.NamedSharding(placed, named.spec, memory_kind=named.memory_kind)


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """What JAX tells the partitioner of XLA about a program's arguments and results.

    Attributes:
        arguments, results: pairs of an abstract value and its sharding, or None if it has none.
        unsharded: for each argument and result, whether XLA chooses its sharding.
    """

    arguments: list[tuple[Any, Any]]
    results: list[tuple[Any, Any]]
    unsharded: tuple[tuple[bool, ...], tuple[bool, ...]]


def partitioned(lowered: Any) -> Partitioned:
    """Return what a `jax.stages.Lowered` says about the shardings of its program.

    It keeps them in ``_lowering.compile_args``: 0.10.2 and 0.12 agree.
    """
    given = lowered._lowering.compile_args
    inputs, outputs = pxla.get_prop_to_input_output(
        given["in_shardings"], given["out_shardings"], len(given["ordered_effects"])
    )

    def pairs(way: str) -> list[tuple[Any, Any]]:
        return [
            (aval, s if isinstance(s, jax.sharding.Sharding) else None)
            for aval, s in zip(given[f"global_{way}_avals"], given[f"{way}_shardings"], strict=True)
        ]

    return Partitioned(pairs("in"), pairs("out"), (tuple(inputs), tuple(outputs)))


def propagated_result_shardings(module: Any) -> list[str] | None:
    """Run Shardy's propagation on a lowered module, and print the sharding of each result.

    A result that is replicated has an empty text. Return None if this jaxlib does not have the
    passes. The module changes.
    """
    return result_shardings(module) if _propagate(module) else None


def result_shardings(module: Any) -> list[str]:
    """Print the sharding of each result of a module's main function, the empty text without one."""
    for operation in module.body.operations:
        attributes = operation.attributes
        if "sym_name" in attributes and attributes["sym_name"].value == "main":
            count = len(attributes["function_type"].value.results)
            if "res_attrs" not in attributes:
                return [""] * count
            return [
                str(result["sdy.sharding"]) if "sdy.sharding" in result else ""
                for result in attributes["res_attrs"]
            ]
    return []


def _inline(module: Any) -> None:
    """Replace the calls of a lowered module by what they call.

    Shardy does not propagate shardings into a call. JAX lowers the slices of a scan's inputs, and
    each jitted function, to calls, and XLA inlines them before the propagation. The pass "inline"
    of the jaxlib of jax 0.10.2 and 0.12 does nothing to them.
    """
    functions = {
        f.attributes["sym_name"].value: f.operation
        for f in module.body.operations
        if f.operation.name == "func.func"
    }
    done: set[str] = set()

    def inline(operation: Any) -> None:
        for inner in list(_operations(operation)):
            if inner.name == "func.call":
                name = inner.attributes["callee"].value
                if name not in done:
                    inline(functions[name])
                    done.add(name)
                _replace_call(inner, functions[name])

    with module.context:
        inline(functions["main"])


def _replace_call(call: Any, function: Any) -> None:
    block = function.regions[0].blocks[0]
    known = dict(zip(block.arguments, call.operands, strict=True))
    for operation in block.operations:
        if operation.operation.name == "func.return":
            for old, new in zip(call.results, operation.operands, strict=True):
                old.replace_all_uses_with(known.get(new, new))
            break
        copy = operation.operation.clone(ir.InsertionPoint(call))
        for inner in _operations(copy.operation):
            for i, value in enumerate(inner.operands):
                if value in known:
                    inner.operands[i] = known[value]
        known.update(zip(operation.operation.results, copy.operation.results, strict=True))
    call.erase()


def _propagate(module: Any) -> bool:
    """Run Shardy's propagation on a lowered module; tell whether this jaxlib has the passes.

    `PassManager` and the pipeline are in jaxlib of jax 0.10.2 and 0.12.
    """
    try:
        from jaxlib.mlir.passmanager import PassManager

        _inline(module)
        with module.context:
            PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(module.operation)
    except Exception:  # the pipeline is no public API
        return False
    return True


def propagated_barrier_shardings(module: Any) -> list[tuple[str, list[str]]] | None:
    """Run Shardy's propagation, and print the shardings at each `jax.lax.optimization_barrier`.

    Each barrier has its name stack, and a text for each of its results, in the order of the module.
    Without any sharding the list of texts is empty. Return None as `propagated_result_shardings`
    does. The module changes. 0.10.2 and 0.12 print the same.
    """
    if not _propagate(module):
        return None
    found: list[tuple[str, list[str]]] = []
    for operation in _operations(module.operation):
        if operation.name == "stablehlo.optimization_barrier":
            found.append((_name_stack(operation), _texts(operation, "sdy.sharding")))
    return found


def _operations(operation: Any) -> Iterator[Any]:
    """Yield an operation of a module and all operations inside of it, in order."""
    yield operation
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _operations(inner.operation)


def _name_stack(operation: Any) -> str:
    return str(operation.location).removeprefix('loc("').partition('"')[0]


def _texts(operation: Any, attribute: str) -> list[str]:
    """Return the shardings in an attribute of an operation, one for each value; [] without it."""
    attributes = operation.attributes
    return _SHARDING_OF_VALUE.findall(str(attributes[attribute])) if attribute in attributes else []


@dataclasses.dataclass(frozen=True)
class PropagatedOperation:
    """An operation of a lowered module, after Shardy's propagation.

    Attributes:
        kind: its name, as ``"stablehlo.dot_general"``.
        stack: its name stack, and before it those of the calls around it.
        operands, results: the shape and the printed sharding of each array.
        manual: the axes of the `shard_map` around it: its shapes are those on one device of them.
    """

    kind: str
    stack: str
    operands: tuple[tuple[tuple[int, ...], str], ...]
    results: tuple[tuple[tuple[int, ...], str], ...]
    manual: frozenset[str]


def propagated_operations(module: Any, scope: str) -> list[PropagatedOperation] | None:
    """Run Shardy's propagation, and return the operations with ``scope`` in their name stacks.

    Return None as `propagated_result_shardings` does. The module changes. The types, operands and
    blocks of MLIR have the same names in jaxlib of jax 0.10.2 and 0.12.
    """
    if not _propagate(module):
        return None
    found: list[PropagatedOperation] = []

    def look(operation: Any, manual: frozenset[str]) -> None:
        # The name stacks of calls around an operation come first, and then its own.
        stack = str(operation.location).partition("callsite(")[0]
        if scope in stack:
            given, made = (
                tuple(
                    (tuple(v.type.shape), _text_of(v)) for v in values if hasattr(v.type, "shape")
                )
                for values in (operation.operands, operation.results)
            )
            found.append(PropagatedOperation(operation.name, stack, given, made, manual))
        if operation.name == _MAPPED:
            manual |= set(re.findall(r'"([^"]*)"', str(operation.attributes["manual_axes"])))
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    look(inner.operation, manual)

    look(module.operation, frozenset())
    return found


_MAPPED = "sdy.manual_computation"  # a `shard_map`


def _text_of(value: Any) -> str:
    """Print the sharding of a value of a module; the empty text if it is replicated or unknown."""
    owner = value.owner
    if hasattr(owner, "arguments"):  # a block
        number, around = value.arg_number, owner.owner.operation
        if around.name == "func.func":
            given = around.attributes
            held = given["arg_attrs"][number] if "arg_attrs" in given else {}
            return str(held["sdy.sharding"]) if "sdy.sharding" in held else ""
        texts = _texts(around, "in_shardings" if around.name == _MAPPED else "sdy.sharding")
    else:
        number, maker = value.result_number, owner.operation
        texts = _texts(maker, "out_shardings" if maker.name == _MAPPED else "sdy.sharding")
    return texts[number] if number < len(texts) else ""


_SHARDING_OF_VALUE = re.compile(r"<@[^\[\]<>]*, \[[^\[\]]*\][^<>]*>")


def axis_sizes(module: Any) -> dict[str, int]:
    """Return the sizes of the mesh axes that a lowered module names."""
    found: dict[str, int] = {}
    for operation in module.body.operations:
        if operation.operation.name == "sdy.mesh":
            text = str(operation).partition("{stablehlo.mesh")[0]
            found |= {name: int(n) for name, n in re.findall(r'"([^"]*)"=(\d+)', text)}
    return found


def context_devices() -> int:
    """Return the devices of the mesh that `jax.set_mesh` has set, 1 without one."""
    return max(1, int(jax.sharding.get_abstract_mesh().size))


def devices_of_arguments(args: Any) -> int:
    """Return the most devices that the shardings of arguments and `jax.set_mesh` name, or 1."""
    given = (devices_of(getattr(x, "sharding", None)) for x in jax.tree.leaves(args))
    return max(context_devices(), *given, 1)


def devices_within(closed: Any, *, shardings: bool = True) -> int:
    """Return the most devices that a sharding, a mesh or a captured array of a program names.

    Without ``shardings``, only the mesh of a `shard_map` and captured arrays count, not what
    `jax.lax.with_sharding_constraint` and explicit axes say.
    """
    seen: set[int] = set()

    def of_jaxpr(jaxpr: Any) -> int:
        if id(jaxpr) in seen:
            return 1
        seen.add(id(jaxpr))
        found = [partitions_of(getattr(c, "sharding", None)) for c in getattr(jaxpr, "consts", ())]
        for eqn in jaxpr.eqns:
            if not shardings and eqn.primitive.name == "sharding_constraint":
                continue  # it also names the mesh of its context
            hi = hi_primitive(eqn)
            found += [of(v) for v in (*eqn.params.values(), *(hi.params.values() if hi else ()))]
            found += [of(getattr(v.aval, "sharding", None)) for v in eqn.outvars]
        return max(found, default=1)

    def of(value: Any) -> int:
        if is_jaxpr(value):
            return of_jaxpr(value)
        if isinstance(value, (tuple, list)):
            return max(map(of, value), default=1)
        if isinstance(value, jax.sharding.Sharding):
            return devices_of(value) if shardings else 1
        if isinstance(value, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
            return int(value.size)
        return 1

    return of_jaxpr(closed)


# -- what a jitted function says of itself ----------------------------------------------------
# `trace`, and `args_info` of what it returns, are public. The class has no public name, and the
# options for the compiler and the shardings are in `_params`: 0.10.2 and 0.12 agree.

_JITTED = type(jax.jit(lambda: None))


def is_jitted(fn: Any) -> bool:
    """Tell whether ``fn`` is what `jax.jit` returns, not a function around it."""
    return isinstance(fn, _JITTED)


def static_arguments(jitted: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the positions and the names of the static arguments of a jitted function."""
    info = jitted._jit_info
    return tuple(info.static_argnums), tuple(info.static_argnames)


def donated_positions(jitted: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that a jitted function donates."""
    return tuple(jitted._jit_info.donate_argnums)


def compiler_options_of(traced: Any) -> dict[str, Any]:
    """Return the options for the compiler that were given to `jax.jit`."""
    return dict(getattr(traced, "_params", {}).get("compiler_options_kvs", ()))


def devices_of_jit(traced: Any) -> int:
    """Return the most devices of the shardings that a traced `jax.jit` was given; 1 without any."""
    params = getattr(traced, "_params", {})
    given = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return max(map(devices_of, given), default=1)


def donated_by_only_call(traced: Any) -> frozenset[int]:
    """Return the arguments, counted flat, that a program donates by being one call of a jitted
    function and nothing else: of a function around it, JAX does not say so itself.
    """
    jaxpr = traced.jaxpr.jaxpr
    if len(jaxpr.eqns) != 1 or jaxpr.eqns[0].primitive.name not in ("jit", "pjit"):
        return frozenset()
    (call,) = jaxpr.eqns
    places = {v: i for i, v in enumerate(jaxpr.invars)}
    given = zip(call.invars, call.params["donated_invars"], strict=True)
    return frozenset(places[v] for v, donated in given if donated and v in places)


MEMORY_FIELDS = (
    *(
        f"{host}{name}_size_in_bytes"
        for host in ("", "host_")
        for name in ("argument", "output", "alias", "temp", "generated_code")
    ),
    "peak_memory_in_bytes",
)


# -- primitives of this package -------------------------------------------------------------
# They are in `_backend`, under names of their own.

_stands_for: dict[str, str] = {}


def own_primitive(name: str, stands_for: str) -> Any:
    """Return a new primitive that reports and policies treat as one of JAX's, named second."""
    _stands_for[name] = stands_for
    return core.Primitive(name)


def name_of(primitive: Any) -> str:
    """Return the name of a primitive, or that of JAX's primitive for which one of ours stands."""
    name: str = primitive.name
    return _stands_for.get(name, name)


def lowering_platforms(backends: Sequence[str]) -> list[str]:
    """Return what lowering rules call these compilers: ``gpu`` stands for all kinds of GPUs."""
    return ["gpu" if backend == "cuda" else backend for backend in backends]


def is_partitioned(ctx: Any) -> bool:
    """Tell whether the compiler partitions the code that a rule lowers.

    Args:
        ctx: the context of a lowering rule. Seen on 0.10.2 and 0.12.0.1: that of a `jax.jit` knows
            the number of devices, and that of a `jax.shard_map` the mesh and its manual axes.
    """
    around = ctx.module_context.axis_context
    if hasattr(around, "num_devices"):
        return bool(around.num_devices > 1)
    sizes = getattr(around, "mesh", None)
    automatic = {} if sizes is None else dict(sizes.shape)
    return any(n > 1 for axis, n in automatic.items() if axis not in around.manual_axes)
