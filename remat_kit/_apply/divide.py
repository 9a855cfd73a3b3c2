"""Make the segments of a program that a plan divides into one operation each.

`remat_kit._policy.divisions` says what a division is. In the divided program the loop over the
pieces of a segment is one equation, a `jax.custom_jvp` call whose rules `remat_kit._apply.pieces`
defines. So the planner prices the loop like any other operation, and a schedule puts it into a
region, or leaves it in none, like any other operation.

What the loop needs whole, for example normalized weights, stands before it, and what needs the
result of all pieces after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jec

from remat_kit import _jax
from remat_kit._apply.pieces import PieceLoop
from remat_kit._apply.region import relative
from remat_kit._errors import PolicyError
from remat_kit._policy.divisions import Division, text_of
from remat_kit._program import program as _program
from remat_kit._program.pieces import split as _split
from remat_kit._program.pieces.split import Blocked, Split
from remat_kit._program.program import Program, flat_program
from remat_kit._program.structure import structure_of


@dataclasses.dataclass(frozen=True)
class Divided:
    """A program with segments in pieces.

    Attributes:
        program: the divided program.
        loops: the loop over pieces of each of its equations that is one.
        bodies: for each scan whose body has segments in pieces, the divided body.
        whole: the program as it was.
        divisions: the segments in pieces, in order.
    """

    program: Program
    loops: dict[int, PieceLoop]
    bodies: dict[int, Divided]
    whole: Program
    divisions: tuple[Division, ...] = ()


def divided(program: Program, divisions: Sequence[Division], call: str = "planned") -> Divided:
    """Return a program in which each division is one equation.

    Args:
        program: the flat program.
        divisions: the segments, in order; they fit the program (`divisions.read`).
        call: the call of the user, as error messages quote it.

    Raises:
        PolicyError: a segment cannot be divided like that.
    """
    return _Dividing(call, frozenset(program.invars)).divided(program, tuple(divisions))


def segment_of(program: Program, start: int, stop: int) -> Program:
    """Return a segment as a program of its own; its outputs are what the rest of the program reads.

    Module paths are relative to the one that all equations of the segment have in common.
    """
    eqns = program.eqns[start:stop]
    later = {v for e in program.eqns[stop:] for v in e.invars if not isinstance(v, jec.Literal)}
    later.update(v for v in program.outvars if not isinstance(v, jec.Literal))
    part = _program.part(eqns, later, program.base)
    dropped = (v for e in eqns for v in e.outvars if isinstance(v, jec.DropVar))
    assert later.isdisjoint(dropped)
    return part


def split_of(part: Program, place: tuple[int, int], axis: int) -> Split | Blocked:
    """Divide a segment along an axis of one of its values, or say what blocks."""
    return _split.split(part, part.eqns[place[0]].outvars[place[1]], axis)


class _Dividing:
    """Divides a program; equal segments share one loop, so that JAX traces the loop once."""

    def __init__(self, call: str, arguments: frozenset[Any]):
        self.call = call
        self.arguments = arguments
        self.splits: dict[Any, Split | Blocked] = {}
        self.known: dict[Any, tuple[Program, PieceLoop, Any]] = {}

    def divided(self, program: Program, divisions: tuple[Division, ...]) -> Divided:
        here = [d for d in divisions if not d.loop]
        scans: dict[int, list[Division]] = {}
        for d in divisions:
            if d.loop:
                inner = dataclasses.replace(d, loop=d.loop[1:])
                scans.setdefault(d.loop[0], []).append(inner)
        eqns: list[Any] = []
        loops: dict[int, PieceLoop] = {}
        bodies: dict[int, Divided] = {}

        def plain(indices: Sequence[int]) -> None:
            for i in indices:
                eqn = program.eqns[i]
                if i in scans:
                    body = flat_program(eqn.params["jaxpr"])
                    if body.consts:
                        raise self.fault(scans[i][0], "the body of the scan has constants")
                    bodies[len(eqns)] = found = self.divided(body, tuple(scans[i]))
                    eqn = _with_body(eqn, found.program)
                eqns.append(eqn)

        at = 0
        for d in here:
            plain(range(at, d.start))
            split, loop, eqn = self.loop(program, d)
            plain([d.start + i for i in split.before])
            loops[len(eqns)] = loop
            eqns.append(eqn)
            plain([d.start + i for i in split.after])
            at = d.stop
        plain(range(at, len(program.eqns)))
        found = dataclasses.replace(program, eqns=tuple(eqns))
        return Divided(found, loops, bodies, program, divisions)

    def fault(self, division: Division, reason: str) -> PolicyError:
        return PolicyError(
            f"`{self.call}`: {text_of(division)}: the segment cannot run in pieces: {reason}",
            hint="plan again; a plan holds for one model and one version of remat_kit",
        )

    def loop(self, program: Program, division: Division) -> tuple[Split, PieceLoop, Any]:
        """Return the split of a segment, its loop, and the equation that runs the loop."""
        d = division
        prefix, part = relative(segment_of(program, d.start, d.stop))
        place = d.of[0] - d.start, d.of[1]
        key = structure_of(part), place, d.axis, d.pieces
        split = self.splits.get(key)
        if split is None:
            split = self.splits[key] = split_of(part, place, d.axis)
        if isinstance(split, Blocked):
            raise self.fault(d, str(split))
        # The split has the variables of the first of the equal segments.
        at = {v: i for i, v in enumerate(split.program.invars)}
        read = {at[v] for v, _ in (*((v, None) for v in split.whole), *split.cut) if v in at}
        given = frozenset(i for i in read if part.invars[i] in self.arguments)
        known = self.known.get((key, given))
        if known is None:
            arguments = frozenset(split.program.invars[i] for i in given)
            loop = PieceLoop(split, -(-split.n // min(d.pieces, split.n)), arguments)
            known = self.known[key, given] = split.program, loop, _equation(loop)
        first, loop, eqn = known
        same = dict(zip(first.invars, part.invars, strict=True))
        for a, b in zip(first.eqns, part.eqns, strict=True):
            same.update(zip(a.outvars, b.outvars, strict=True))
        return (
            loop.split,
            loop,
            _jax.with_scopes(
                eqn,
                prefix,
                invars=[same[v] for v, _ in loop.inputs],
                outvars=[same[v] for v, _ in loop.split.outputs],
            ),
        )


def _equation(loop: PieceLoop) -> Any:
    """Return the equation that a loop is traced to."""
    closed = jax.make_jaxpr(lambda *xs: loop(xs))(*(v.aval for v, _ in loop.inputs))
    (eqn,) = closed.jaxpr.eqns
    assert not closed.consts
    return eqn


def _with_body(eqn: Any, body: Program) -> Any:
    """Return a scan with another body, which reads no constants."""
    jaxpr = jec.ClosedJaxpr(_jax.jaxpr_of(body.invars, body.outvars, body.eqns), ())
    return eqn.replace(params=dict(eqn.params, jaxpr=jaxpr))
