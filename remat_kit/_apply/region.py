"""How does one region save exactly the residuals that a policy chooses?

A policy of `jax.checkpoint` sees one primitive at a time, without its module, source line, size or
consumers. Under ``jax_remat3``, JAX asks it about a few primitives only. A checkpoint name does not
help if a derivative rule reads the value before it gets its name:
``checkpoint_name(jnp.tanh(x), "t")`` saves nothing, because the rule of ``tanh`` reads the unnamed
output.

So a region is a function that defines its own derivative, under `jax.checkpoint`. Its derivative
rule runs the two programs of `remat_kit._program.derivative`::

    outputs, residuals = forward(inputs)           computes all values that the backward pass reads
    output tangents    = linear(residuals, input tangents)

The policy decides about each value of the forward program and sees all properties of its equation.
The values to save, at which recomputation stops, get a `checkpoint_name`, and `jax.checkpoint` gets
a policy that saves these names alone. JAX calls the rule only if it differentiates the region, and
tells the rule which inputs have a tangent. A call that nobody differentiates runs the undecorated
program.

``jax_remat3`` looks for names in the function itself and not in derivative rules. Under this flag
the region runs the forward program first, with its names, and then a function of the outputs and
residuals that has the derivative rule::

    outputs, residuals = forward(inputs)
    return attach(inputs, outputs, residuals)      returns outputs; its tangents are those of linear

Higher derivatives, `vmap`, forward mode and both implementations of `jax.checkpoint` work as usual,
because regions consist of JAX's own transformations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from remat_kit import _jax
from remat_kit._apply import slices as _slices
from remat_kit._apply.labels import LABEL_PREFIX, choose, keep_labelled, read_label
from remat_kit._apply.slices import Slice
from remat_kit._policy.algebra import Policy, callable_policy, save
from remat_kit._policy.selectors import Module, Where, everything, nothing
from remat_kit._program.derivative import Derivative, derive
from remat_kit._program.paths import Path, common_prefix, module_path
from remat_kit._program.program import (
    MARKS,
    KeptName,
    Program,
    bodies,
    checkpoint_name_of,
    evaluate,
)
from remat_kit._program.structure import structure_of


def user_name(name: str) -> str | None:
    """Return the checkpoint name that the user gave, or None if a name is only a label of ours.

    >>> user_name(KeptName("attn_out", "remat_kit:save:dots")), user_name("remat_kit:save:dots")
    ('attn_out', None)
    """
    if name in MARKS:
        return None
    if isinstance(name, KeptName):
        return str(name)
    return name if read_label(name) is None else None


# -- the region -------------------------------------------------------------------------------


def run_region(
    program: Program,
    policy: Policy,
    args: Sequence[Any],
    *,
    prevent_cse: Any,
    full: bool,
    slices: Sequence[Slice] = (),
) -> list[Any]:
    """Evaluate a program on flat ``args`` as one region under ``policy``.

    Args:
      program: the program; its constants are concrete values or tracers of the current trace.
      policy: decides which values are saved. It is not asked if it is ``save(nothing)``.
      args: one value or tracer for each argument of the program.
      prevent_cse: as in `jax.checkpoint`.
      full: whether the selectors of the policy read source lines.
      slices: the inputs that are saved in slices.

    Returns:
      The program's outputs.
    """
    inputs = [*program.consts, *args]
    concrete = [not isinstance(c, _jax.Tracer) for c in program.consts] + [False] * len(args)
    diff = tuple(i for i, x in enumerate(inputs) if not concrete[i] and _differentiable(x))
    if not diff:
        # No input has a gradient, as in the computation of a mask, so nothing is ever recomputed.
        return evaluate(program, args)

    program = _folded(program)
    if any(map(_is_literal, program.outvars)):
        how: dict[str, Any] = {"prevent_cse": prevent_cse, "full": full, "slices": slices}
        return _around_constants(program, policy, args, **how)
    prefix, program = relative(dataclasses.replace(program, consts=()))
    avals = tuple(map(jax.typeof, inputs))
    base = (*program.base, *prefix)
    # Only a policy that reads module paths can tell one of several equal blocks from another.
    key = (structure_of(program), avals, diff, policy, base if _reads_paths(policy) else None)
    key = (*key, full, tuple(slices), _jax.remat3(), _jax.trace_context())
    body = _shared_bodies.get(key)
    if body is None:
        based = dataclasses.replace(program, base=base)
        labelled = _Labelled(based, policy, avals, full, _jax.axis_env(), tuple(slices))
        body = _body(labelled, diff)
        _shared_bodies.put(key, body)
    keep = body.keep or _jax.keep_names(body.saved, keep_labelled)
    with jax.named_scope("/".join(prefix)) if prefix else contextlib.nullcontext():
        if body.jaxpr is not None:
            return _jax.checkpointed(body.jaxpr, inputs, prevent_cse=prevent_cse, policy=keep)
        assert body.run is not None
        region = _jax.checkpoint(body.run, prevent_cse=prevent_cse, policy=keep)
        return _jax.without_integer_tangents(region(*inputs))


def _around_constants(
    program: Program, policy: Policy, args: Sequence[Any], **how: Any
) -> list[Any]:
    """Run a region without its constant outputs, and put the constants among its results.

    Under ``jax_remat3``, JAX 0.10.2 cannot compile code that reads a constant output of a region.
    """
    outvars = tuple(v for v in program.outvars if not _is_literal(v))
    rest = iter(run_region(dataclasses.replace(program, outvars=outvars), policy, args, **how))
    return [v.val if _is_literal(v) else next(rest) for v in program.outvars]


@dataclasses.dataclass(frozen=True)
class _Body:
    """The function or jaxpr that a region runs.

    Attributes:
        run: the function, or None if there is a jaxpr.
        saved: the labels of the values that the region saves.
        jaxpr: the jaxpr, or None if there is a function.
        keep: a policy for `jax.checkpoint` that takes the place of the one that saves the labels.
    """

    run: Callable[..., list[Any]] | None
    saved: Sequence[str] = ()
    jaxpr: Any = None
    keep: Any = None


# -- equal blocks share one body ----------------------------------------------------------------
# Most blocks of a model are equal, and equal blocks share one body. So a body is differentiated and
# labelled once, and JAX, whose caches use the identity of functions, traces it once.


class _Recent:
    """The most recently used bodies."""

    def __init__(self, size: int):
        self.size = size
        self.entries: dict[Any, _Body] = {}

    def get(self, key: Any) -> _Body | None:
        body = self.entries.pop(key, None)
        if body is not None:
            self.entries[key] = body
        return body

    def put(self, key: Any, body: _Body) -> None:
        self.entries[key] = body
        while len(self.entries) > self.size:
            self.entries.pop(next(iter(self.entries)))


_shared_bodies = _Recent(64)


@functools.lru_cache(maxsize=256)
def _reads_paths(policy: Policy) -> bool:
    kinds = (Module, Where)
    return any(isinstance(leaf, kinds) for leaf in policy.leaves())


def relative(program: Program) -> tuple[Path, Program]:
    """Split off the components that all module paths of a program begin with.

    Returns these components, and the program with paths that are relative to them.
    """
    paths = [module_path(e) for e in program.eqns]
    prefix = common_prefix(*paths)
    if not prefix:
        return (), program
    size = len(prefix)
    eqns = [_jax.with_scopes(e, p[size:]) for e, p in zip(program.eqns, paths, strict=True)]
    return prefix, dataclasses.replace(program, eqns=tuple(eqns))


def _folded(program: Program) -> Program:
    """Replace conversions of scalar constants by their results, as JAX does after each trace.

    Such conversions arise from a flattened call that converts an argument, if the argument is a
    constant.
    """
    subst: dict[Any, Any] = {}
    eqns = []

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, jec.Literal) else subst.get(atom, atom)

    for eqn in program.eqns:
        if subst and not subst.keys().isdisjoint(v for v in eqn.invars if not _is_literal(v)):
            eqn = eqn.replace(invars=[read(v) for v in eqn.invars])
        value = _jax.folded(eqn)
        if value is None:
            eqns.append(eqn)
        else:
            subst[eqn.outvars[0]] = value
    if not subst:
        return program
    return dataclasses.replace(program, eqns=tuple(eqns), outvars=tuple(map(read, program.outvars)))


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, jec.Literal)


def keeps_nothing(policy: Policy) -> bool:
    """Tell whether a policy is known to recompute every value."""
    return policy == save(nothing)


_EVERYTHING = (save(everything), callable_policy(jax.checkpoint_policies.everything_saveable))


def keeps_everything(policy: Policy) -> bool:
    """Tell whether a policy is known to save every value."""
    return policy in _EVERYTHING


def _plain(program: Program) -> Callable[..., list[Any]]:
    def region(*args: Any) -> list[Any]:
        return evaluate(program, args)

    return region


def _differentiable(x: Any) -> bool:
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)


def _body(labelled: _Labelled, diff: tuple[int, ...]) -> _Body:
    """Return the body of a region; ``diff`` are the positions of inputs that may have a tangent."""
    program, policy, avals = labelled.program, labelled.policy, labelled.avals
    has_rule = _jax.allows_custom_rule(program.eqns, avals)
    has_rule = has_rule and (bool(labelled.slices) or not keeps_nothing(policy))
    if _jax.remat3():
        if not has_rule:
            return _Body(_plain(program))
        if keeps_everything(policy) and _jax.knows_everything():
            return _Body(_plain(program), keep=jax.checkpoint_policies.everything_saveable)
        return _named_outside(labelled, diff)
    jaxpr = _jax.jaxpr_of(program.invars, program.outvars, program.eqns)
    return _Body(None, jaxpr=_jax.with_rule(jaxpr, labelled.rule) if has_rule else jaxpr)


@dataclasses.dataclass(frozen=True)
class _Labelled:
    """A program whose derivative contains the decisions of a policy as labels."""

    program: Program
    policy: Policy
    avals: tuple[Any, ...]
    full: bool
    axes: Any
    slices: tuple[Slice, ...] = ()
    known: dict[Any, tuple[Derivative, list[str]]] = dataclasses.field(default_factory=dict)

    def derivative(self, wrt: tuple[int, ...]) -> tuple[Derivative, list[str]]:
        """Return the derivative with labels on the values to save, and the list of these labels.

        `jax.vmap` asks for a rule after it has closed its named axis. The program may contain
        collectives over that axis, so the axis is opened again.
        """
        key = wrt, _jax.trace_context()
        if key not in self.known:
            with _jax.open_axes(self.axes):
                derivative = derive(self.program, self.avals, wrt)
            if self.slices:
                derivative = _slices.from_slices(derivative, self.program, self.slices, self.avals)
            forward, labels = choose(
                derivative.forward, derivative.residuals, self.policy, full=self.full
            )
            labels += dict.fromkeys(s.name for s in self.slices)
            self.known[key] = dataclasses.replace(derivative, forward=forward), labels
        return self.known[key]

    def rule(self, zeros: Sequence[bool]) -> tuple[Any, list[bool]]:
        """Return the derivative rule of the program for the inputs whose tangents are not zero.

        The rule is a jaxpr of the inputs and their nonzero tangents. It returns the outputs and
        their nonzero tangents. The second result tells for each output whether its tangent is zero.
        """
        given = [i for i, zero in enumerate(zeros) if not zero]
        wrt = tuple(i for i in given if jnp.issubdtype(self.avals[i].dtype, jnp.inexact))
        try:
            derivative, _ = self.derivative(wrt)
        except Exception:
            # Forward mode may still work. If it does not, the user sees the error of JAX.
            return self._pushed_forward(given, wrt)
        rule = derivative.in_forward_mode() if len(wrt) == len(given) else None
        return self._traced_rule(derivative, given) if rule is None else rule

    def _pushed_forward(self, given: Sequence[int], wrt: Sequence[int]) -> tuple[Any, list[bool]]:
        zeros: list[bool] = []

        def both(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
            moving = dict(zip(given, tangents, strict=True))

            def of_some(*some: Any) -> list[Any]:
                full = dict(zip(wrt, some, strict=True))
                return evaluate(self.program, [full.get(i, x) for i, x in enumerate(primals)])

            ys, changes = jax.jvp(of_some, [primals[i] for i in wrt], [moving[i] for i in wrt])
            zeros[:] = [d.dtype == jax.dtypes.float0 for d in changes]
            return [*ys, *(d for d in changes if d.dtype != jax.dtypes.float0)]

        return self._traced(both, given), zeros

    def _traced_rule(self, derivative: Derivative, given: Sequence[int]) -> tuple[Any, list[bool]]:
        zeros: list[bool] = []

        def both(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
            moving = dict(zip(given, tangents, strict=True))
            outs = evaluate(derivative.forward, primals)
            ys, rs = outs[: derivative.outputs], outs[derivative.outputs :]
            changes = derivative.tangents(rs, [moving[i] for i in derivative.wrt])
            zeros[:] = [d is None for d in changes]
            return [*ys, *(d for d in changes if d is not None)]

        return self._traced(both, given), zeros

    def _traced(self, rule: Callable[..., Any], given: Sequence[int]) -> Any:
        tangents = [self.avals[i].to_tangent_aval() for i in given]
        with _jax.open_axes(self.axes):
            return jax.make_jaxpr(rule)(list(self.avals), tangents)


def _named_outside(labelled: _Labelled, diff: tuple[int, ...]) -> _Body:
    """Return a region whose labels are in the function itself, as ``jax_remat3`` needs them."""
    try:
        derivative, labels = labelled.derivative(diff)
    except Exception:
        # The program has no derivative. It can still be evaluated, and a user who differentiates it
        # sees the error of JAX.
        return _Body(_plain(labelled.program), ())
    attach = _attachment(derivative)

    def region(*args: Any) -> list[Any]:
        outs = evaluate(derivative.forward, args, _without_error)
        ys, rs = outs[: derivative.outputs], outs[derivative.outputs :]
        return attach([args[i] for i in derivative.wrt], ys, rs)

    return _Body(region, [x for x in labels if x.startswith(f"{LABEL_PREFIX}:save:")])


def _without_error(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluate an equation so that a missing derivative is an error only if somebody uses it.

    JAX differentiates the forward program as well as the function that has the derivative rule, and
    then discards the derivative of the forward program.
    """
    if not _may_lack_derivative(eqn):
        return _jax.bind(eqn, values)

    def guarded(*values: Any) -> list[Any]:
        return _jax.bind(eqn, values)

    def rule(primals: Any, tangents: Any) -> Any:
        moving = [i for i, d in enumerate(tangents) if not _is_zero(d)]

        def of_moving(*some: Any) -> list[Any]:
            given = dict(zip(moving, some, strict=True))
            return _jax.bind(eqn, [given.get(i, x) for i, x in enumerate(primals)])

        given = [tangents[i] for i in moving]
        try:
            outs, changes = jax.jvp(of_moving, [primals[i] for i in moving], given)
        except Exception as error:
            outs = _without_error(eqn, primals)
            avals = [jax.typeof(y).to_tangent_aval() for y in outs]
            changes = _jax.undefined_tangents(given, avals, error)
        return outs, _symbolic(outs, [None if _is_zero(d) else d for d in changes])

    return _jax.with_symbolic_zeros(guarded, rule)(*values)


def _has_tangents(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _may_lack_derivative(eqn: Any) -> bool:
    if checkpoint_name_of(eqn) is not None:
        return False
    if not any(_has_tangents(v.aval) for v in eqn.invars):
        return False
    inner = [b for b in bodies(eqn) if b.kind != "rule"]
    if inner:
        return any(_may_lack_derivative(e) for b in inner for e in b.jaxpr.eqns)
    return _jax.may_lack_derivative(eqn)


def _attachment(derivative: Derivative) -> Callable[..., list[Any]]:
    def attach(xs: Any, ys: Any, rs: Any) -> list[Any]:
        del xs, rs
        return ys

    def rule(primals: Any, tangents: Any) -> Any:
        _, ys, rs = primals
        given = [None if _is_zero(d) else d for d in tangents[0]]
        return ys, _symbolic(ys, derivative.tangents(rs, given))

    return _jax.with_symbolic_zeros(attach, rule)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero) or jax.typeof(tangent).dtype == jax.dtypes.float0


def _symbolic(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Replace each tangent that is None by a symbolic zero of JAX."""
    return [
        SymbolicZero(jax.typeof(y).to_tangent_aval()) if d is None else d
        for y, d in zip(primals, tangents, strict=True)
    ]
