"""How does a function with a derivative rule of its own run in pieces?

A `jax.custom_jvp` or `jax.custom_vjp` function can run in pieces if its rules can, with the same
splits of inputs and outputs. On a piece it is a function with these rules in pieces.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_kit import _jax
from remat_kit._program.pieces.inside import Inside, inside, register, run_body, through_body
from remat_kit._program.pieces.values import How, Partial, Piece, Way


def _moving(eqn: Any) -> list[bool]:
    return [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.invars]


def _rule_of_jvp(eqn: Any, hows: Sequence[How], n: int) -> Inside | None:
    """Return the derivative rule of a `custom_jvp` function in pieces; None if it has none."""
    moving = _moving(eqn)
    avals = [v.aval for v in eqn.invars]
    changes = [a.to_tangent_aval() for a, m in zip(avals, moving, strict=True) if m]

    def both(xs: Sequence[Any], ds: Sequence[Any]) -> list[Any]:
        ys, dys = jax.jvp(_of_moving(eqn, xs), _those(xs, moving), list(ds))
        return [*ys, *_those(dys, _moving_outputs(eqn))]

    try:
        rule = jax.make_jaxpr(both)(avals, changes)
    except Exception:
        return None  # JAX raises the error where the function is differentiated
    found = inside(rule, [*hows, *_those(hows, moving)], n)
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


# The functions whose derivative rules are being examined. A rule may call its own function.
_being_checked: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar(
    "functions", default=()
)


@contextlib.contextmanager
def _checking(function: Any) -> Iterator[None]:
    token = _being_checked.set((*_being_checked.get(), function))
    try:
        yield
    finally:
        _being_checked.reset(token)


def _through_jvp(eqn: Any, given: Sequence[How], n: int) -> Way | None:
    way = through_body(eqn, given, n)
    if way is None or way.partial:
        return None
    function = _jax.custom_function_of(eqn)
    if function in _being_checked.get():  # the rule of `relu`, for example, calls `relu`
        return way
    with _checking(function):
        rule = _rule_of_jvp(eqn, way.inputs, n)
    if rule is None:
        return None
    tangents = _those(way.outputs, _moving_outputs(eqn))
    return way if rule.outputs == (*way.outputs, *tangents) else None


def _run_jvp(eqn: Any, way: Way, values: Sequence[Any], piece: Piece) -> list[Any]:
    # The offset of the piece is an argument, because a rule must not close over a tracer.
    @jax.custom_jvp
    def call(offset: Any, *xs: Any) -> list[Any]:
        return run_body(eqn, way, xs, dataclasses.replace(piece, offset=offset))

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


register(("custom_jvp_call",), _through_jvp, _run_jvp)


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
    count = len(way.outputs)
    with _checking((_jax.custom_function_of(eqn), way.inputs)):
        first = inside(rules[0], way.inputs, n)
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
    way = through_body(eqn, given, n)
    if way is None or way.partial or None in way.outputs or not all(_moving_outputs(eqn)):
        return None
    if (_jax.custom_function_of(eqn), way.inputs) in _being_checked.get():
        return way  # a rule calls its own function
    return way if _rules_of_vjp(eqn, way, n) is not None else None


def _run_vjp(eqn: Any, way: Way, values: Sequence[Any], piece: Piece) -> list[Any]:
    rules = _rules_of_vjp(eqn, way, piece.n)
    assert rules is not None

    @jax.custom_vjp
    def call(offset: Any, *xs: Any) -> list[Any]:
        return run_body(eqn, way, xs, dataclasses.replace(piece, offset=offset))

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


register(("custom_vjp_call",), _through_vjp, _run_vjp)
