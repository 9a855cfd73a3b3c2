"""Run a plan: the stretches of a traced program as regions, plain code and loops.

What a plan says is in `remat_kit._policy.schedule`; here its stretches become functions under
`run_region`, and each round of a scan runs the regions that its part of the plan asks for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from remat_kit import _jax
from remat_kit._apply.labels import keep_labelled, label
from remat_kit._apply.region import run_region
from remat_kit._backend import rewrites as _rewrites
from remat_kit._backend.barriers import computed_once, materialized, waiting_for_gradients
from remat_kit._policy import algebra as _algebra
from remat_kit._policy import selectors as _selectors
from remat_kit._policy.schedule import GIVEN, LoopPart, Place, Stretch
from remat_kit._program import program as _program
from remat_kit._program.program import Program, flat_program

# -- running it -----------------------------------------------------------------------------------

_KEPT, _MOVED = "remat_kit plan: kept", "remat_kit plan: moved"


_NOTHING = _algebra.save(_selectors.nothing)


def run(
    program: Program,
    schedule: Sequence[Stretch],
    args: Sequence[Any],
    *,
    prevent_cse: bool,
    start: int = 0,
    around: Mapping[Place, int] | None = None,
    depth: int = 0,
    stacked: bool = False,
) -> list[Any]:
    """Evaluate a flat program with the regions of a schedule.

    Args:
        program: what to run.
        schedule: stretches that cover the program.
        args: one value or tracer for each of its arguments.
        prevent_cse: as in `jax.checkpoint`.
        start: the place of the program's first equation in the plan's count.
        around: what the regions around the program keep, and how deep the first that does is.
        depth: how many those are.
        stacked: whether the program is the body of a scan, which keeps a stack of each value that
            a derivative reads. A value behind a barrier is another one, so that there are none in
            the forward pass.
    """
    env = dict(zip(program.invars, (*program.consts, *args), strict=True))
    made = {v for e in program.eqns for v in e.outvars}
    regions = (program.eqns[s.start - start : s.stop - start] for s in schedule if not s.plain)
    entering = {v for eqns in regions for e in eqns for v in e.invars if _is_var(v)}
    last = _last_use(program)
    first = _first_readers(program, schedule, start)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jec.Literal) else env[atom]

    handed = set[Any]()  # by regions inside of this one
    for stretch in schedule:
        lo, hi = stretch.start - start, stretch.stop - start
        eqns = [*map(_rewrites.lean_pooling, program.eqns[lo:hi])]
        # What a region was given, its later stretches read once more.
        shared = {*program.invars} if depth and lo else set()
        reads = dict.fromkeys(v for e in eqns for v in e.invars if _is_var(v) and v in env)
        tied = {v: env[v] for v in reads if first.get(v, stretch) is not stretch}
        if stretch.plain:
            env.update(materialized({v: env[v] for v in reads if v in shared}, stacked))
            env.update(computed_once({v: env[v] for v in reads if v in handed}))
            if tied:
                env.update(
                    waiting_for_gradients(
                        {v: env[v] for v in reads if v in tied or v in made}, stacked
                    )
                )
            loops = dict(stretch.loops)
            for place, eqn in enumerate(eqns, stretch.start):
                eqn = _rewrites.convolution_with_late_copies(eqn)
                if entering.intersection(eqn.outvars):
                    eqn = _rewrites.relu_by_output(eqn)
                values = [read(v) for v in eqn.invars]
                if place in loops:
                    outs = _scan(program, eqn, values, loops[place])
                else:
                    outs = _jax.bind(eqn, values)
                env.update(zip(eqn.outvars, outs, strict=True))
            env.update(tied)
            continue
        wanted = {v for e in eqns for v in e.outvars if last.get(v, -1) >= hi}
        same = _handed_through(eqns) if stacked else {}
        wanted -= {*same}
        part = _program.part(eqns, wanted, program.base)
        env.update(
            materialized({v: env[v] for v in part.invars if v in made or v in shared}, stacked)
        )
        if tied:
            env.update(
                waiting_for_gradients(
                    {v: env[v] for v in part.invars if v in tied or v in made}, stacked
                )
            )
        values = [env[v] for v in part.invars]
        given = {program.invars[p]: p for e, p in stretch.offload if e == GIVEN}
        outs = _region(part, stretch, values, prevent_cse, given, around or {}, depth)
        env.update(zip(part.outvars, outs, strict=True))
        env.update((v, env[source]) for v, source in same.items())
        if depth:
            env.update(_labelled(part, stretch, env, around or {}, depth))
            handed.update(part.outvars)
        env.update(tied)
    return [read(v) for v in program.outvars]


def _handed_through(eqns: Sequence[Any]) -> dict[Any, Any]:
    """Map what is an input of a region by another name to that input."""
    inside = {v for e in eqns for v in e.outvars}
    found: dict[Any, Any] = {}
    for eqn in eqns:
        if _program.is_identity(eqn) and _is_var(eqn.invars[0]):
            source = found.get(eqn.invars[0], eqn.invars[0])
            if source not in inside:
                found[eqn.outvars[0]] = source
    return found


def _labelled(
    part: Program,
    stretch: Stretch,
    env: Mapping[Any, Any],
    around: Mapping[Place, int],
    depth: int,
) -> dict[Any, Any]:
    """Put the labels of what a region keeps on what it hands on, for the regions around it: of a
    region inside of another JAX keeps nothing but what that one's own derivative reads.
    """
    names = _names(stretch, around, depth)
    found = {}
    for place, eqn in enumerate(part.eqns, stretch.start):
        for position, var in enumerate(eqn.outvars):
            if (place, position) in names and var in part.outvars:
                found[var] = _jax.checkpoint_name(env[var], _label(names[place, position]))
    return found


def _names(stretch: Stretch, around: Mapping[Place, int], depth: int) -> dict[Place, str]:
    """The names of what a region keeps, which say how deep the outermost is that does."""
    return {
        place: _name(what, around.get(place, depth))
        for what, places in ((_KEPT, stretch.save), (_MOVED, stretch.offload))
        for place in places
    }


def _name(what: str, depth: int) -> str:
    return f"{what} at depth {depth}" if depth else what


def _label(name: str) -> str:
    decision = _algebra.Decision.SAVE if name.startswith(_KEPT) else _algebra.Decision.OFFLOAD
    text = label(decision, repr(_rule(name)), "pinned_host")
    assert text is not None
    return text


def _first_readers(program: Program, schedule: Sequence[Stretch], start: int) -> dict[Any, Stretch]:
    """Return the first stretch that reads each argument; constants have no gradient."""
    given = {*program.invars[len(program.consts) :]}
    found: dict[Any, Stretch] = {}
    for stretch in schedule:
        for eqn in program.eqns[stretch.start - start : stretch.stop - start]:
            for v in eqn.invars:
                if _is_var(v) and v in given:
                    found.setdefault(v, stretch)
    return found


def _last_use(program: Program) -> dict[Any, int]:
    last = {v: i for i, e in enumerate(program.eqns) for v in e.invars if _is_var(v)}
    return last | {v: len(program.eqns) for v in program.outvars if _is_var(v)}


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, jec.Literal)


def _region(
    part: Program,
    stretch: Stretch,
    values: Sequence[Any],
    prevent_cse: bool,
    given: Collection[Any],
    around: Mapping[Place, int],
    depth: int,
) -> list[Any]:
    """Run one region; those of its inputs that are ``given`` wait in the host's memory."""
    if stretch.inside:
        kept = dict.fromkeys((*stretch.save, *stretch.offload), depth) | dict(around)

        def inner(*args: Any) -> list[Any]:
            return run(
                part,
                stretch.inside,
                args,
                prevent_cse=prevent_cse,
                start=stretch.start,
                around=kept,
                depth=depth + 1,
            )

        policy = _keeping(depth) if kept else None
        region = _jax.checkpoint(inner, prevent_cse=prevent_cse, policy=policy)
        return _jax.without_integer_tangents(region(*values))
    names = _names(stretch, around, depth)
    rules = [_rule(name) for name in dict.fromkeys(names.values())]
    policy = _algebra.first(*rules) if len(rules) > 1 else (rules or [_NOTHING])[0]
    named = _named(part, stretch, names, given)
    return run_region(named, policy, values, prevent_cse=prevent_cse, full=False)


@functools.lru_cache
def _keeping(depth: int) -> Any:
    """Return the policy of a region around regions: it keeps what it or one around it keeps."""
    labels = [_label(_name(what, d)) for what in (_KEPT, _MOVED) for d in range(depth + 1)]

    def keep(prim: Any, /, *avals: Any, **params: Any) -> Any:
        name = params.get("name")
        known = (name.label if isinstance(name, _program.KeptName) else name) in labels
        return keep_labelled(prim, *avals, **params) if known else _jax.RECOMPUTE

    return _jax.keep_names(labels, keep)


def _rule(name: str) -> Any:
    make = _algebra.save if name.startswith(_KEPT) else _algebra.offload
    return make(_selectors.named(name, strict=False))


def _named(
    part: Program, stretch: Stretch, names: Mapping[Place, str], given: Collection[Any]
) -> Program:
    """Put the names that carry the plan on the values that it keeps."""
    if not names:
        return part
    subst: dict[Any, Any] = {}
    eqns = []

    def carry(var: Any, text: str, eqn: Any) -> None:
        fresh = type(var)(var.aval)
        eqns.extend(_jax.name_equations(var, fresh, text, eqn))
        subst[var] = fresh

    for var in part.invars:
        if var in given:
            carry(var, _MOVED, part.eqns[0])

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, jec.Literal) else subst.get(atom, atom)

    for place, eqn in enumerate(part.eqns, stretch.start):
        eqns.append(eqn.replace(invars=[read(v) for v in eqn.invars]))
        for position, var in enumerate(eqn.outvars):
            # Of an output that nothing reads there is nothing to keep.
            if (place, position) in names and not isinstance(var, jec.DropVar):
                carry(var, names[place, position], eqn)
    outvars = tuple(read(v) for v in part.outvars)
    return dataclasses.replace(part, eqns=tuple(eqns), outvars=outvars)


# -- scans ----------------------------------------------------------------------------------------


def _scan(
    program: Program, eqn: Any, values: Sequence[Any], parts: Sequence[LoopPart]
) -> list[Any]:
    consts, carried = _jax.scan_arity(eqn)
    path = program.path(eqn)
    given, carry = values[:consts], tuple(values[consts : consts + carried])
    xs = tuple(values[consts + carried :])
    if eqn.params["reverse"]:
        xs = tuple(jnp.flip(x, 0) for x in xs)
    body = flat_program(eqn.params["jaxpr"], path)
    stacked, done = [], 0
    with _scoped(path[len(program.base) :]):
        for part in parts:
            some = tuple(x[done : done + part.times] for x in xs)
            carry, ys = _iterations(body, part, given, carry, some)
            stacked.append(ys)
            done += part.times
    ys = [y[0] if len(y) == 1 else jnp.concatenate(y) for y in zip(*stacked, strict=True)]
    if eqn.params["reverse"]:
        ys = [jnp.flip(y, 0) for y in ys]
    return [*carry, *ys]


def _iterations(
    body: Program, part: LoopPart, consts: Sequence[Any], carry: Any, xs: Any
) -> tuple[Any, Any]:
    def loop(consts: Any, carry: Any, xs: Any, length: int) -> tuple[Any, Any]:
        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            outs = run(body, part.body, [*consts, *carry, *x], prevent_cse=False, stacked=True)
            return tuple(outs[: len(carry)]), tuple(outs[len(carry) :])

        return jax.lax.scan(step, carry, xs, length=length)

    if part.group == 1:
        return loop(consts, carry, xs, part.times)

    def group(size: int) -> Any:
        def one(consts: Any, carry: Any, xs: Any) -> tuple[Any, Any]:
            return loop(consts, carry, xs, size)

        return _jax.checkpoint(one, prevent_cse=False)

    groups, rest = divmod(part.times, part.group)
    done = groups * part.group
    head = jax.tree.map(lambda x: x[:done].reshape(groups, part.group, *x.shape[1:]), xs)
    carry, ys = jax.lax.scan(
        lambda c, x: group(part.group)(consts, c, x), carry, head, length=groups
    )
    ys = jax.tree.map(lambda y: y.reshape(done, *y.shape[2:]), ys)
    if rest:
        carry, tail = group(rest)(consts, carry, jax.tree.map(lambda x: x[done:], xs))
        ys = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), ys, tail)
    return carry, ys


def _scoped(parts: Sequence[str]) -> Any:
    return jax.named_scope("/".join(parts)) if parts else contextlib.nullcontext()


def innermost(schedule: Sequence[Stretch]) -> Iterator[Stretch]:
    """Yield the stretches that hold no others, in order."""
    for stretch in schedule:
        if stretch.inside:
            yield from innermost(stretch.inside)
        else:
            yield stretch
