"""Run a schedule: the segments of a traced program as regions, as plain code and as scans.

`remat_kit._policy.schedule` says what a schedule is. Here each region becomes a function that
`run_region` evaluates, and each scan that a schedule names runs part by part (`scans.run`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax.extend.core as jec

from remat_kit import _jax
from remat_kit._apply import scans as _scans
from remat_kit._apply.labels import keep_labelled, label
from remat_kit._apply.pieces import loop_of
from remat_kit._apply.region import run_region
from remat_kit._backend import rewrites as _rewrites
from remat_kit._backend.barriers import (
    computed_once,
    is_key,
    materialized,
    waiting_for_gradients,
    without_delay,
    without_delay_equations,
)
from remat_kit._policy import algebra as _algebra
from remat_kit._policy import selectors as _selectors
from remat_kit._policy.schedule import GIVEN, LoopPart, LoopPlan, Place, Schedule, Segment
from remat_kit._program import program as _program
from remat_kit._program.program import Program, flat_program

_KEPT, _MOVED = "remat_kit plan: kept", "remat_kit plan: moved"


_NOTHING = _algebra.save(_selectors.nothing)


def run(
    program: Program, schedule: Schedule[Place], args: Sequence[Any], *, prevent_cse: bool
) -> list[Any]:
    """Evaluate a flat program with the regions of a schedule.

    Args:
        program: the program.
        schedule: segments that cover the program, as `remat_kit._policy.schedule.read` returns
            them.
        args: one value or tracer for each argument of the program.
        prevent_cse: as for `jax.checkpoint`.

    Returns:
        One value for each output of the program.
    """
    return _Run(program, schedule, args, _Surroundings(prevent_cse)).outputs()


@dataclasses.dataclass(frozen=True)
class _Surroundings:
    """What is around a program that runs by a schedule.

    Attributes:
        prevent_cse: as for `jax.checkpoint`.
        start: the index of the program's first equation, as the schedule counts equations.
        depth: the number of regions around the program.
        kept: what these regions save or offload, with the depth of the outermost one that does.
        stacked: whether the program is the body of a scan. The scan then stacks each value that a
            derivative reads over the iterations. A value behind a barrier is another value, with a
            stack of its own, so the forward pass of the body has no barriers.
        slices: the number of the program's last inputs that are slices of the scan's stacked
            inputs.
    """

    prevent_cse: bool
    start: int = 0
    depth: int = 0
    kept: Mapping[Place, int] = dataclasses.field(default_factory=dict)
    stacked: bool = False
    slices: int = 0


class _Run:
    """One evaluation of a program with the regions of a schedule."""

    def __init__(
        self,
        program: Program,
        schedule: Schedule[Place],
        args: Sequence[Any],
        around: _Surroundings,
    ):
        self.program, self.schedule, self.around = program, schedule, around
        self.env = dict(zip(program.invars, (*program.consts, *args), strict=True))
        self.invars = {*program.invars}
        self.made = {v for e in program.eqns for v in e.outvars}
        self.last_use = _last_use(program)
        self.from_regions = set[Any]()  # made by regions of this schedule inside another region
        # What a derivative reads: operands of convolutions, and what enters a region or a loop.
        self.read_later = _rewrites.operands_of_convolutions(program.eqns)
        self.unread = _rewrites.sums_of_products(program.eqns)
        self.first_reader: dict[Any, Segment[Place]] = {}  # of each argument
        arguments = {*program.invars[len(program.consts) :]}  # constants have no gradient
        self.read_later.update(_reads([e for e in program.eqns if loop_of(e) is not None]))
        for segment in schedule:
            reads = _reads(self.equations(segment))
            for v in arguments.intersection(reads):
                self.first_reader.setdefault(v, segment)
            if not segment.plain:
                self.read_later.update(reads)

    def outputs(self) -> list[Any]:
        for segment in self.schedule:
            eqns = [_rewrites.lean_pick(_rewrites.lean_pooling(e)) for e in self.equations(segment)]
            reads = [v for v in _reads(eqns) if v in self.env]
            # An earlier segment reads these arguments too, so that their gradients are sums.
            tied = {v: self.env[v] for v in reads if self.first_reader.get(v, segment) != segment}
            if segment.plain:
                self.plain(segment, eqns, reads, tied)
            else:
                self.region(segment, eqns, tied)
            self.env.update(tied)
        return [self.read(v) for v in self.program.outvars]

    def equations(self, segment: Segment[Place]) -> Sequence[Any]:
        start = self.around.start
        return self.program.eqns[segment.start - start : segment.stop - start]

    def read(self, atom: Any) -> Any:
        return atom.val if isinstance(atom, jec.Literal) else self.env[atom]

    def plain(
        self,
        segment: Segment[Place],
        eqns: Sequence[Any],
        reads: Sequence[Any],
        tied: Collection[Any],
    ) -> None:
        """Evaluate a segment without a region."""
        shared = self.shared(segment)
        self.materialize(v for v in reads if v in shared)
        self.env.update(computed_once({v: self.env[v] for v in reads if v in self.from_regions}))
        self.wait(reads, tied)
        loops = dict(segment.loops)
        for place, eqn in enumerate(eqns, segment.start):
            eqn = _rewrites.convolution_with_late_copies(eqn)
            eqn = _rewrites.lean_relu(eqn, self.read_later, self.unread)
            values: Sequence[Any] = [self.read(v) for v in eqn.invars]
            if self.around.depth and not self.around.stacked:
                values = without_delay(eqn, values)
            if place in loops:
                outs = _scan(self.program, eqn, values, loops[place])
            else:
                outs = _jax.bind(eqn, values)
            self.env.update(zip(eqn.outvars, outs, strict=True))

    def region(self, segment: Segment[Place], eqns: Sequence[Any], tied: Collection[Any]) -> None:
        """Evaluate a segment as one region, which may contain regions."""
        stop, around = segment.stop - self.around.start, self.around
        wanted = {v for e in eqns for v in e.outvars if self.last_use.get(v, -1) >= stop}
        same = _handed_through(eqns) if around.stacked else {}
        part = _program.part(eqns, wanted - {*same}, self.program.base)
        shared = self.shared(segment)
        self.materialize(v for v in part.invars if v in self.made or v in shared or is_key(v.aval))
        self.wait(part.invars, tied)
        values = [self.env[v] for v in part.invars]
        # They are rounded inside the region, because what it reads is stacked for the backward
        # pass, and a slice is in a stack already.
        slices = self.slices(part)
        if segment.inside:
            outs = _around_regions(part, segment, values, slices, around)
        else:
            given = {self.program.invars[p] for e, p in segment.offload if e == GIVEN}
            outs = _region(part, segment, values, given, slices, around)
        self.env.update(zip(part.outvars, outs, strict=True))
        self.env.update((v, self.env[source]) for v, source in same.items())
        if around.depth:
            self.env.update(_labelled(part, segment, self.env, around))
            self.from_regions.update(part.outvars)

    # .. barriers

    def shared(self, segment: Segment[Place]) -> Collection[Any]:
        """Return the inputs of the region around the program that this segment may read again."""
        return self.invars if self.around.depth and segment.start > self.around.start else ()

    def materialize(self, variables: Iterable[Any]) -> None:
        self.env.update(materialized({v: self.env[v] for v in variables}, self.around.stacked))

    def slices(self, part: Program) -> list[Any]:
        """Return the slices of stacked inputs that a region reads and may round."""
        invars = self.program.invars
        slices = {*invars[len(invars) - self.around.slices :]}
        return [v for v in part.invars if v in slices and _rewrites.may_be_rounded(v.aval)]

    def wait(self, reads: Sequence[Any], tied: Collection[Any]) -> None:
        """Make the derivative of a segment wait for the gradients that it adds to."""
        if tied:
            values = {v: self.env[v] for v in reads if v in tied or v in self.made}
            self.env.update(waiting_for_gradients(values, self.around.stacked))


def _reads(eqns: Sequence[Any]) -> dict[Any, None]:
    return dict.fromkeys(v for e in eqns for v in e.invars if _is_var(v))


def _handed_through(eqns: Sequence[Any]) -> dict[Any, Any]:
    """Map each output of a region that is one of its inputs under another name to that input."""
    inside = {v for e in eqns for v in e.outvars}
    found: dict[Any, Any] = {}
    for eqn in eqns:
        if _program.is_identity(eqn) and _is_var(eqn.invars[0]):
            source = found.get(eqn.invars[0], eqn.invars[0])
            if source not in inside:
                found[eqn.outvars[0]] = source
    return found


def _last_use(program: Program) -> dict[Any, int]:
    last = {v: i for i, e in enumerate(program.eqns) for v in e.invars if _is_var(v)}
    return last | {v: len(program.eqns) for v in program.outvars if _is_var(v)}


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, jec.Literal)


# -- regions --------------------------------------------------------------------------------------


def _region(
    part: Program,
    segment: Segment[Place],
    values: Sequence[Any],
    given: Collection[Any],
    slices: Sequence[Any],
    around: _Surroundings,
) -> list[Any]:
    """Run one region without regions inside; its inputs ``given`` wait in the host's memory."""
    names = _names(segment, around)
    rules = [_rule(name) for name in dict.fromkeys(names.values())]
    policy = _algebra.first(*rules) if len(rules) > 1 else (rules or [_NOTHING])[0]
    named = _rounding_late(_named(part, segment, names, given), slices)
    if not around.stacked:
        eqns = itertools.chain.from_iterable(map(without_delay_equations, named.eqns))
        named = dataclasses.replace(named, eqns=tuple(eqns))
    return run_region(named, policy, values, prevent_cse=around.prevent_cse, full=False)


def _rounding_late(part: Program, slices: Sequence[Any]) -> Program:
    """Return a program that rounds some of its inputs where it reads them."""
    fresh = {v: type(v)(v.aval) for v in slices}
    first = [_rewrites.rounded_late_equation(v, w, part.eqns[0]) for v, w in fresh.items()]
    rest = [
        e.replace(invars=[fresh.get(v, v) if _is_var(v) else v for v in e.invars])
        for e in part.eqns
    ]
    return dataclasses.replace(part, eqns=(*first, *rest)) if slices else part


def _around_regions(
    part: Program,
    segment: Segment[Place],
    values: Sequence[Any],
    slices: Sequence[Any],
    around: _Surroundings,
) -> list[Any]:
    """Run one region around smaller segments."""
    depth, cse = around.depth, around.prevent_cse
    kept = dict.fromkeys(sorted(segment.kept), depth) | dict(around.kept)
    inside = _Surroundings(cse, segment.start, depth + 1, kept)

    def inner(*args: Any) -> list[Any]:
        given = dict(zip(part.invars, args, strict=True))
        given |= {v: _rewrites.rounded_late(given[v]) for v in slices}
        return _Run(part, segment.inside, [*given.values()], inside).outputs()

    region = _jax.checkpoint(inner, prevent_cse=cse, policy=_keeping(depth) if kept else None)
    return _jax.without_integer_tangents(region(*values))


def _labelled(
    part: Program, segment: Segment[Place], env: Mapping[Any, Any], around: _Surroundings
) -> dict[Any, Any]:
    """Label what a region saves among the outputs that it hands on, for the regions around it.

    Of a region inside another region, JAX saves nothing but what the inner region's own derivative
    reads.
    """
    names = _names(segment, around)
    found = {}
    for place, eqn in enumerate(part.eqns, segment.start):
        for position, var in enumerate(eqn.outvars):
            if (place, position) in names and var in part.outvars:
                found[var] = _jax.checkpoint_name(env[var], _label(names[place, position]))
    return found


def _names(segment: Segment[Place], around: _Surroundings) -> dict[Place, str]:
    """Return the names of what a region saves or offloads.

    A name says at which depth the outermost region is that saves the value.
    """
    return {
        place: _name(what, around.kept.get(place, around.depth))
        for what, places in ((_KEPT, segment.save), (_MOVED, segment.offload))
        for place in sorted(places)
    }


def _name(what: str, depth: int) -> str:
    return f"{what} at depth {depth}" if depth else what


def _label(name: str) -> str:
    decision = _algebra.Decision.SAVE if name.startswith(_KEPT) else _algebra.Decision.OFFLOAD
    text = label(decision, repr(_rule(name)), "pinned_host")
    assert text is not None
    return text


def _keeping(depth: int) -> Any:
    """Return the policy of a region around regions: save what it or a region around it saves."""
    return _keeping_under(depth, _jax.remat3())


@functools.lru_cache
def _keeping_under(depth: int, remat3: bool) -> Any:
    del remat3  # part of the key: on jax 0.10.2 the flag decides what `keep_names` returns
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
    part: Program, segment: Segment[Place], names: Mapping[Place, str], given: Collection[Any]
) -> Program:
    """Give the values that a region saves or offloads the names by which its policy knows them."""
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

    for place, eqn in enumerate(part.eqns, segment.start):
        eqns.append(eqn.replace(invars=[read(v) for v in eqn.invars]))
        for position, var in enumerate(eqn.outvars):
            # If nothing reads an output, there is nothing to save.
            if (place, position) in names and not isinstance(var, jec.DropVar):
                carry(var, names[place, position], eqn)
    outvars = tuple(read(v) for v in part.outvars)
    return dataclasses.replace(part, eqns=tuple(eqns), outvars=outvars)


# -- scans ----------------------------------------------------------------------------------------


def _scan(program: Program, eqn: Any, values: Sequence[Any], plan: LoopPlan[Place]) -> list[Any]:
    path = program.path(eqn)
    body = flat_program(eqn.params["jaxpr"], path)
    consts, carry = _jax.scan_arity(eqn)
    slices = len(eqn.invars) - consts - carry
    around = _Surroundings(prevent_cse=False, stacked=True, slices=slices)
    with _scans.scoped(path[len(program.base) :]):
        return _scans.run(eqn, values, [_iterations(body, part, around) for part in plan])


def _iterations(body: Program, part: LoopPart[Place], around: _Surroundings) -> _scans.Part:
    def one(args: Sequence[Any]) -> list[Any]:
        return _Run(body, part.body, args, around).outputs()

    def region(fn: _scans.Body, args: Sequence[Any]) -> list[Any]:
        return _jax.checkpoint(lambda *args: fn(args), prevent_cse=False)(*args)

    return _scans.Part(part.times, one, part.group, region if part.group > 1 else None)
