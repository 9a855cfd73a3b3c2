"""Does a policy have no effect on a function, and why?

A policy without an effect goes unnoticed until the step runs out of memory. So these checks look at
the traced function to which a policy is applied:

* The function is a training step. It has already differentiated its loss, so no region in it is
  ever recomputed. This is an error, because moving the policy to the loss is always right.
* A rule selects none of the values, or no input of a region has a gradient. This is a
  `RematKitWarning`, because it may be intended if the same policy is used for several models.
* The compiler or this version of JAX undoes the decisions of the policy. This is a warning too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from remat_kit import _frames, _jax
from remat_kit._errors import PolicyError, UserError, near_matches
from remat_kit._policy import algebra as _algebra
from remat_kit._policy import check as _check
from remat_kit._policy import selectors as _selectors
from remat_kit._policy import structural as _structural
from remat_kit._policy.algebra import Decision, Policy, Rule, Selector
from remat_kit._program import paths as _paths
from remat_kit._program import program as _program
from remat_kit._program import value as _value
from remat_kit._program.paths import Path
from remat_kit._program.program import Program
from remat_kit._program.steps import taken as _taken
from remat_kit._program.value import Value
from remat_kit._units import format_bytes

Matches = Callable[[Path], bool]


def check_at(policy: Any, at: str | None, call: str) -> None:
    """Raise if ``at=`` is given without a policy.

    >>> check_at("dots", "*/block_*", "inspect")
    """
    if at is not None and policy is None:
        raise UserError(
            f"`{call}(..., at={at!r})`: there is no policy to apply at these modules",
            hint="give policy= too, or leave at= out",
        )


# -- a policy on a step -----------------------------------------------------------------------


def is_step(
    policy: Policy,
    closed: Any,
    result: Any,
    *,
    base: Path,
    matches: Matches | None,
    arguments: Sequence[Any],
    optimizer: bool,
) -> bool:
    """Tell whether a traced function is a step, whose losses get the policy.

    A function that takes a gradient may also be a loss, as with a penalty on a gradient, or it may
    be differentiated once more, like the inner step of MAML or the forces of an energy model. It
    counts as a step if nothing differentiates the running call, its result is no loss, and one of
    these holds: it has the state of an optimizer among its arguments, it returns updated arguments
    or the gradient of an argument, the policy is a plan, or ``at=`` matches only modules that are
    differentiated inside of it.

    Args:
        policy: the policy.
        closed: the jaxpr of the function.
        result: the shapes of its result.
        base: the module path of the call.
        matches: tells whether ``at=`` matches a module path; None without ``at=``.
        arguments: the arguments of the function, which are pytrees of arrays.
        optimizer: whether the state of an optimizer is among the arguments.
    """
    gradient = _taken.taken(closed)
    if gradient is None or _taken.is_loss(gradient, result) or _taken.being_differentiated():
        return False
    if optimizer or any(gradient.updated) or isinstance(policy, _structural.Planned):
        return True
    if any(
        jax.tree.leaves(a) and _taken.returns_gradient_of(gradient, result, a) for a in arguments
    ):
        return True
    blocks = [
        inside
        for path, inside in _places(closed.jaxpr, base, False)
        if matches is not None and matches(path)
    ]
    return bool(blocks) and all(blocks)


def check_step(step: bool, closed: Any, *, function: str, call: str) -> None:
    """Raise for a policy on a method that is a step, whose losses the policy does not reach.

    Args:
        step: whether it is a step, from `is_step`.
        closed: the jaxpr of the function.
        function: the name of the function.
        call: the call of `policy` as the user wrote it.

    Raises:
        PolicyError: the function is a step.
    """
    gradient = _taken.taken(closed) if step else None
    if gradient is not None:
        message, hint = _misplaced(gradient, function, call)
        raise PolicyError(message, hint=hint)


def _misplaced(gradient: _taken.Taken, function: str, call: str) -> tuple[str, str]:
    """Return a message and a hint about a policy on a function that takes a gradient."""
    loss, file, line = _jax.gradient_site(gradient.equation, _frames.is_library_file)
    site = f" at {_paths.short_path(file)}:{line}" if line else ""
    name = loss if loss.isidentifier() else "loss"
    decorator = "remat_kit.policy(...)" if "..." in call else f"remat_kit.{call}"
    return (
        f"`{call}`: `{function}` takes a gradient itself{site}, so its parts are differentiated "
        "before the policy reaches them, and none of their values would be recomputed",
        f"put the policy on the loss that is differentiated: `{name} = {decorator}({name})` "
        f"before the line that takes its gradient{f' ({file}:{line})' if line else ''}",
    )


def _places(jaxpr: Any, base: Path, inside: bool) -> Iterator[tuple[Path, bool]]:
    """Yield the module path of each equation, and whether this function differentiates it."""
    for eqn in jaxpr.eqns:
        path = _paths.module_path(eqn, base)
        within = inside or _taken.differentiated(eqn)
        bodies = [b for b in _program.bodies(eqn) if b.kind != "rule"]
        for body in bodies:
            yield from _places(getattr(body.jaxpr, "jaxpr", body.jaxpr), path, within)
        if not bodies:
            yield path, within


# -- what matches nothing ---------------------------------------------------------------------


def unmatched(
    policy: Policy, program: Program, matches: Matches | None, *, full: bool
) -> list[tuple[Any, list[Value]]]:
    """Return each rule that selects no value of the regions, with the values of the regions.

    A rule may also select a value that only a derivative rule computes. So the program is
    differentiated if a rule selects none of its own values. A program without a derivative has no
    unmatched rules.

    Args:
        policy: the policy.
        program: the program to which it is applied.
        matches: tells whether ``at=`` matches a module path; None without ``at=``.
        full: whether a selector reads source lines.
    """
    left = [rule for rule in dict.fromkeys(policy.rules()) if _should_match(rule)]
    seen: list[Value] = []

    def look_at(program: Program) -> None:
        for value in _value.values(program, full=full) if left else ():
            if matches is None or matches(tuple(filter(None, value.module.split("/")))):
                seen.append(value)
                left[:] = [rule for rule in left if not rule.matches(value)]
                if not left:
                    return

    look_at(program)
    derived = differentiated(program) if left and seen else None
    if derived is None:
        return []
    look_at(derived)
    return [(rule, seen) for rule in left]


def _should_match(rule: Any) -> bool:
    """Tell whether it is a mistake if a rule selects no value of a function.

    It is no mistake for ``save(nothing)``, nor for ``save(dots)``, which says for all functions
    which values are too expensive to recompute. Among JAX's policies only those with names can be
    checked.
    """
    if isinstance(rule, _algebra.Wrapped):
        return any(_jax.policy_names(rule.fn).values())
    of_any_function = (_selectors.everything, _selectors.dots, _selectors.dots_no_batch)
    if rule.decision is Decision.SAVE and rule.selector in of_any_function:
        return False
    return rule.selector != _selectors.nothing


def differentiated(program: Program) -> Program | None:
    """Return the program with the values that its derivative rules compute in the forward pass.

    None if the program has no derivative.
    """
    avals = [v.aval for v in program.invars]
    diff = [i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)]
    plain = Program(program.invars, program.outvars, program.eqns, base=program.base)

    def forward(*xs: Any) -> Any:
        def of_differentiable(*ds: Any) -> list[Any]:
            given = list(xs)
            for i, d in zip(diff, ds, strict=True):
                given[i] = d
            return _program.evaluate(plain, given)

        return jax.tree.leaves(jax.vjp(of_differentiable, *(xs[i] for i in diff)))

    try:
        return Program.of(jax.make_jaxpr(forward)(*avals), program.base)
    except Exception:  # nobody differentiates the program, or the user will see the error of JAX
        return None


def names_in_rules(program: Program) -> Iterator[str]:
    """Yield the checkpoint names inside of custom derivative rules and of kernels."""

    def look(eqns: Sequence[Any], within: bool) -> Iterator[str]:
        for eqn in eqns:
            name = _program.checkpoint_name_of(eqn)
            if within and name is not None:
                yield name
            found = [(b.jaxpr, within or b.kind == "rule") for b in _program.bodies(eqn)]
            if eqn.primitive.name == "pallas_call":
                found.append((eqn.params["jaxpr"], True))
            for jaxpr, inside in found:
                yield from look(jaxpr.eqns, inside)

    yield from look(program.eqns, False)


def explain(rule: Any, values: Sequence[Value]) -> str:
    """Say why a rule selects none of the values, and which similar values exist.

    >>> from remat_kit import named, save
    >>> explain(save(named("atn_out", strict=False)), [Value(names=("attn_out",))])
    "no value is named 'atn_out'; did you mean 'attn_out'?"
    """
    if isinstance(rule, _algebra.Wrapped):
        wanted = sorted(frozenset().union(*_jax.policy_names(rule.fn).values()))
        return _reason(_selectors.named(*wanted), values)
    leaves = list(dict.fromkeys(rule.leaves()))
    reasons = [_reason(leaf, values) for leaf in leaves if not any(map(leaf.matches, values))]
    if reasons:
        return "; ".join(reasons)
    return "each part of the rule selects some values, but no value meets all its conditions"


def _reason(leaf: Selector, values: Sequence[Value]) -> str:
    if isinstance(leaf, _selectors.Named):
        names = sorted({n for v in values for n in v.names})
        return f"no value is named {_either(leaf.patterns)}{_instead(leaf.patterns, names)}"
    if isinstance(leaf, _selectors.Module):
        paths = {v.module for v in values}
        known = {p for pattern in leaf.patterns for p in _check.similar_paths(pattern, paths)}
        return f"no module is {_either(leaf.patterns)}{_instead(leaf.patterns, sorted(known))}"
    if isinstance(leaf, _selectors.Primitive):
        known = sorted({p for v in values for p in v.primitives})
        return f"no operation is {_either(leaf.patterns)}{_instead(leaf.patterns, known)}"
    if isinstance(leaf, _selectors.Dtype):
        known = sorted({v.dtype for v in values})
        return f"no value is of type {_either(leaf.patterns)}{_instead(leaf.patterns, known)}"
    if isinstance(leaf, (_selectors.LargerThan, _selectors.SmallerThan)):
        sizes = [v.bytes for v in values]
        return f"the values take {format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
    if leaf in (_selectors.collective, _selectors.gathered_parameters):
        return (
            "the function calls no collective, and under automatic partitioning XLA adds none that "
            f"{leaf!r} selects, as far as the shardings of its inputs say"
        )
    known = ", ".join(sorted({p for v in values for p in v.primitives})[:12])
    return f"{leaf!r} selects nothing; the operations are {known}"


def _either(patterns: Iterable[str]) -> str:
    shown = [repr(p) for p in patterns]
    return " or ".join(shown) if len(shown) < 5 else f"any of {', '.join(shown)}"


def _instead(patterns: Sequence[str], known: Sequence[str]) -> str:
    near = list(dict.fromkeys(k for p in patterns for k in near_matches(p, known, 1)))
    if near:
        return f"; did you mean {' or '.join(map(repr, near[:3]))}?"
    if not known:
        return "; there is none here at all"
    more = f", … ({len(known)} in all)" if len(known) > 12 else ""
    return f"; there are {', '.join(map(repr, known[:12]))}{more}"


# -- other reasons ----------------------------------------------------------------------------


def has_gradient(program: Program, args: Sequence[Any], matches: Matches | None) -> bool:
    """Tell whether any input of the regions has a floating-point or complex type."""
    if matches is None:
        traced = [c for c in program.consts if isinstance(c, _jax.Tracer)]
        return not args or any(map(is_inexact, (*traced, *args)))
    inside = [eqn for path, eqn in _equations(program.eqns, program.base) if matches(path)]
    atoms = [v for eqn in inside for v in eqn.invars if not isinstance(v, jec.Literal)]
    return not inside or any(_taken.is_inexact(v.aval) for v in atoms)


def is_inexact(x: Any) -> bool:
    """Tell whether a value has a floating-point or complex type, so that it can have a gradient."""
    return _taken.is_inexact(jax.typeof(x))


def _equations(eqns: Sequence[Any], base: Path) -> Iterator[tuple[Path, Any]]:
    for eqn in eqns:
        path = _paths.module_path(eqn, base)
        yield path, eqn
        for body in _program.bodies(eqn):
            yield from _equations(body.jaxpr.eqns, path)


def in_a_loop(program: Program, matches: Matches | None) -> bool:
    """Tell whether any region is in a loop of the program."""
    loops = [(p, e) for p, e in _equations(program.eqns, program.base) if _is_loop(e)]
    if matches is None:
        return False
    return any(
        matches(path)
        for where, eqn in loops
        for body in _program.bodies(eqn)
        for path, _ in _equations(body.jaxpr.eqns, where)
    )


def _is_loop(eqn: Any) -> bool:
    return eqn.primitive.name in ("scan", "while")


def offloads(policy: Policy) -> bool:
    """Tell whether a rule of a policy offloads values."""
    rules = (rule for rule in policy.rules() if isinstance(rule, Rule))
    return any(r.decision is Decision.OFFLOAD and r.selector != _selectors.nothing for r in rules)
