"""How does an equation with a program inside run in pieces?

A call runs in pieces if each equation of its body does that depends on a split input. What such an
equation reads of the other values is cut to size inside. The branches of a conditional run in the
same way each, and the body of a scan in pieces of the axes that the scan does not run over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.extend.core as jec
import jax.numpy as jnp
from jax import lax

from remat_kit import _jax
from remat_kit._program import program as _program
from remat_kit._program.pieces.rules import WAYS, ways
from remat_kit._program.pieces.run import RUN, on_piece
from remat_kit._program.pieces.values import (
    Along,
    How,
    In,
    Out,
    Partial,
    Piece,
    Way,
    candidates,
    fits,
)
from remat_kit._program.program import Program


@dataclasses.dataclass(frozen=True)
class Inside:
    """How a program runs in pieces.

    Attributes:
        program: the program.
        ways: the equations that run in pieces, by index; the others run whole.
        how: each variable that is split or partial.
    """

    program: Program
    ways: Mapping[int, Way]
    how: Mapping[Any, Along | Partial]

    def of(self, atom: Any) -> How:
        return None if isinstance(atom, jec.Literal) else self.how.get(atom)

    @property
    def inputs(self) -> tuple[How, ...]:
        """How the arguments are split; constants are whole."""
        return tuple(map(self.of, self.program.invars[len(self.program.consts) :]))

    @property
    def outputs(self) -> tuple[How, ...]:
        return tuple(map(self.of, self.program.outvars))

    def run(self, values: Sequence[Any], piece: Piece) -> list[Any]:
        """Run the program on one value for each argument, a piece of those that are split."""
        program = self.program
        env = dict(zip(program.invars, (*program.consts, *values), strict=True))

        def read(atom: Any, how: How) -> Any:
            value = atom.val if isinstance(atom, jec.Literal) else env[atom]
            if isinstance(how, Along) and self.of(atom) is None:
                return piece.cut(value, how)
            return value

        for index, eqn in enumerate(program.eqns):
            way = self.ways.get(index)
            if way is None:
                outs = _jax.bind(eqn, [read(v, None) for v in eqn.invars])
            else:
                given = zip(eqn.invars, way.inputs, strict=True)
                outs = on_piece(eqn, way, [read(v, how) for v, how in given], piece)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v, None) for v in program.outvars]


def readers(program: Program) -> dict[Any, list[Any]]:
    """Return the equations that read each variable."""
    found: dict[Any, list[Any]] = {}
    for eqn in program.eqns:
        for v in eqn.invars:
            if not isinstance(v, jec.Literal):
                found.setdefault(v, []).append(eqn)
    return found


def may_join(eqn: Any, way: Way, read_by: Mapping[Any, Sequence[Any]]) -> bool:
    """Tell whether partial results have the derivative of the whole operation.

    The derivative of a maximum is shared by all entries that are equal to it. Maxima of pieces
    would share it among the pieces first, so they may stand only where it is not used.
    """
    return not any(
        how in (Partial.MAX, Partial.MIN)
        and jnp.issubdtype(var.aval.dtype, jnp.inexact)
        and not _is_stopped(var, read_by)
        for var, how in zip(eqn.outvars, way.outputs, strict=True)
    )


def _is_stopped(var: Any, read_by: Mapping[Any, Sequence[Any]], depth: int = 4) -> bool:
    """Tell whether everything that reads a value passes it on to a `stop_gradient`."""
    after = read_by.get(var, ())
    return bool(after) and all(
        e.primitive.name == "stop_gradient"
        or (
            depth > 0
            and e.primitive.name in ("broadcast_in_dim", "reshape", "max", "squeeze")
            and _is_stopped(e.outvars[0], read_by, depth - 1)
        )
        for e in after
    )


def inside(closed: Any, given: Sequence[How], n: int) -> Inside | None:
    """Run the body of a call in pieces, given how its arguments are split; None if it cannot.

    More arguments than those may be split in the result.
    """
    program = Program.of(closed) if hasattr(closed, "consts") else _opened(closed)
    arguments = program.invars[len(program.consts) :]
    split = {v: how for v, how in zip(arguments, given, strict=True) if how is not None}
    read_by = readers(program)
    while True:
        found = _carried(program, split, n, read_by)
        if not isinstance(found, dict):
            return found
        split = found


def _opened(jaxpr: Any) -> Program:
    return Program.of(jec.ClosedJaxpr(jaxpr, ()))


def _carried(
    program: Program, split: dict[Any, Any], n: int, read_by: Mapping[Any, Sequence[Any]]
) -> Inside | dict[Any, Any] | None:
    """Carry splits forward through a program; a dict says that more of its inputs are split."""
    how: dict[Any, Along | Partial] = dict(split)
    inputs, read_whole = set(program.invars[len(program.consts) :]), set()
    chosen: dict[int, Way] = {}
    for index, eqn in enumerate(program.eqns):
        reads = [(i, v) for i, v in enumerate(eqn.invars) if not isinstance(v, jec.Literal)]
        known = [(i, how[v]) for i, v in reads if v in how]
        if not known:
            read_whole.update(v for _, v in reads)
            continue
        position, first = known[0]
        if not isinstance(first, Along):
            return None
        way = next(
            (
                w
                for w in ways(eqn, n, In(position), first)
                if all(w.inputs[i] == h for i, h in known) and may_join(eqn, w, read_by)
            ),
            None,
        )
        if way is None:
            return None
        for i, v in reads:
            wanted = way.inputs[i]
            if wanted is None:
                read_whole.add(v)
            elif v in inputs and v not in how and v not in read_whole:
                return {**split, v: wanted}
        chosen[index] = way
        how.update((v, h) for v, h in zip(eqn.outvars, way.outputs, strict=True) if h is not None)
    return Inside(program, chosen, how)


Bodies = Callable[[Any, Sequence[How], int], "Way | None"]


def _of_calls(eqn: Any, n: int, where: In | Out, along: Along, forward: Bodies) -> list[Way]:
    """Return the ways of a call, which are found by carrying splits of its inputs forward."""
    if isinstance(where, In):
        given: list[How] = [None] * len(eqn.invars)
        given[where.position] = along
        way = forward(eqn, given, n) if fits(eqn.invars[where.position], along, n) else None
        return [] if way is None else [way]
    for i, v in enumerate(eqn.invars):
        first = [along] if fits(v, along, n) else []
        for start in [*first, *(c for c in candidates(v, n) if c != along)]:
            given = [None] * len(eqn.invars)
            given[i] = start
            way = forward(eqn, given, n)
            if way is not None and way.outputs[where.position] == along:
                return [way]
    return []


def _call_of(eqn: Any) -> Any:
    (body,) = _program.bodies(eqn)
    return body.jaxpr


def through_body(eqn: Any, given: Sequence[How], n: int) -> Way | None:
    found = inside(_call_of(eqn), given, n)
    return None if found is None else Way(found.inputs, found.outputs)


def run_body(eqn: Any, way: Way, values: Sequence[Any], piece: Piece) -> list[Any]:
    found = inside(_call_of(eqn), way.inputs, piece.n)
    assert found is not None
    return found.run(values, piece)


def register(
    names: Sequence[str],
    forward: Bodies,
    run: Callable[[Any, Way, Sequence[Any], Piece], list[Any]],
) -> None:
    def rule(eqn: Any, n: int, where: In | Out, along: Along) -> list[Way]:
        return _of_calls(eqn, n, where, along, forward)

    for name in names:
        WAYS[name], RUN[name] = rule, run


# A region inside a piece is run without its boundary, since a piece is a region itself.
register(("jit", "pjit", "closed_call", "core_call"), through_body, run_body)
register(("remat2", "remat", "checkpoint"), through_body, run_body)


# .. branches and loops


def _branches(eqn: Any, given: Sequence[How], n: int) -> list[Inside] | None:
    operands = list(given[1:])
    while True:
        found = [inside(branch, operands, n) for branch in eqn.params["branches"]]
        if any(f is None for f in found):
            return None
        bodies = [f for f in found if f is not None]
        wanted = [f.inputs for f in bodies if list(f.inputs) != operands]
        if not wanted:
            return bodies
        operands = list(wanted[0])


def _through_branches(eqn: Any, given: Sequence[How], n: int) -> Way | None:
    if given[0] is not None:
        return None
    bodies = _branches(eqn, given, n)
    if bodies is None or len({b.outputs for b in bodies}) > 1:
        return None
    way = Way((None, *bodies[0].inputs), bodies[0].outputs)
    return None if way.partial else way


def _run_branches(eqn: Any, way: Way, values: Sequence[Any], piece: Piece) -> list[Any]:
    bodies = _branches(eqn, way.inputs, piece.n)
    assert bodies is not None
    index, *operands = values

    def branch(body: Inside) -> Callable[..., list[Any]]:
        return lambda *xs: body.run(xs, piece)

    return list(lax.switch(index, [branch(b) for b in bodies], *operands))


register(("cond",), _through_branches, _run_branches)


def _iteration(eqn: Any, given: Sequence[How], n: int) -> Inside | None:
    """Return the body of a scan in pieces of axes that it does not scan over."""
    consts, carried = _jax.scan_arity(eqn)
    start = consts + carried
    moved = [_shifted(how, -1) if i >= start else how for i, how in enumerate(given)]
    if any(isinstance(h, Along) and h.axis < 0 for h in moved):
        return None
    while True:
        found = inside(eqn.params["jaxpr"], moved, n)
        if found is None:
            return None
        hows = list(found.inputs)
        for i, how in enumerate(found.outputs[:carried], consts):
            if hows[i] is None:
                hows[i] = how
            elif hows[i] != how:
                return None
        if hows == list(found.inputs):
            return found
        if any(isinstance(h, Partial) for h in hows):
            return None
        moved = hows


def _shifted(how: How, by: int) -> How:
    return dataclasses.replace(how, axis=how.axis + by) if isinstance(how, Along) else how


def _through_scan(eqn: Any, given: Sequence[How], n: int) -> Way | None:
    found = _iteration(eqn, given, n)
    if found is None or any(isinstance(h, Partial) for h in found.outputs):
        return None
    consts, carried = _jax.scan_arity(eqn)
    start = consts + carried
    inputs = [_shifted(h, 1) if i >= start else h for i, h in enumerate(found.inputs)]
    outputs = [_shifted(h, 1) if i >= carried else h for i, h in enumerate(found.outputs)]
    return Way(tuple(inputs), tuple(outputs))


def _run_scan(eqn: Any, way: Way, values: Sequence[Any], piece: Piece) -> list[Any]:
    body = _iteration(eqn, way.inputs, piece.n)
    assert body is not None
    consts, carried = _jax.scan_arity(eqn)
    given, carry = list(values[:consts]), list(values[consts : consts + carried])

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = body.run([*given, *carry, *xs], piece)
        return outs[:carried], outs[carried:]

    p = eqn.params
    carry, ys = lax.scan(
        step,
        carry,
        list(values[consts + carried :]),
        length=p["length"],
        reverse=p["reverse"],
        unroll=p["unroll"],
    )
    return [*carry, *ys]


register(("scan",), _through_scan, _run_scan)
