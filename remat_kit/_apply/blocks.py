"""Which equations of a program form a region?

With ``at=``, each call of a matching module is a region, also in the body of a loop, a branch or a
jitted function. Structural policies merge such regions or leave some of them out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core as jec

from remat_kit import _jax
from remat_kit._apply import divide as _divide
from remat_kit._apply import pieces as _pieces
from remat_kit._apply import run_schedule as _run_schedule
from remat_kit._apply import scans as _scans
from remat_kit._apply.region import relative, run_region
from remat_kit._apply.slices import Slice, Slicing
from remat_kit._errors import PolicyError, UserError, unknown
from remat_kit._policy import algebra as _algebra
from remat_kit._policy import check as _check
from remat_kit._policy import divisions as _divisions
from remat_kit._policy import patterns as _patterns
from remat_kit._policy import schedule as _schedule
from remat_kit._policy import selectors as _selectors
from remat_kit._policy import structural as _structural
from remat_kit._policy.algebra import Policy
from remat_kit._program import communication as _communication
from remat_kit._program import paths as _paths
from remat_kit._program import program as _program
from remat_kit._program.paths import Path
from remat_kit._program.program import Program, evaluate

if TYPE_CHECKING:
    from remat_kit._apply.decorate import Application


@functools.cache
def reads_sources(policy: Policy) -> bool:
    return any(isinstance(leaf, (_selectors.Source, _selectors.Where)) for leaf in policy.leaves())


# -- cutting a program into regions -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Consecutive equations; ``block`` is the module path that ``at`` matched, or None."""

    eqns: tuple[Any, ...]
    block: str | None


class BlockCutter:
    """Runs a program with the regions that one application of a policy asks for."""

    def __init__(
        self, app: Application, loop: bool, prevent_cse: bool | tuple[bool, ...] | None = None
    ):
        self.app = app
        self.loop = loop
        # One flag for all arguments or one for each; None chooses one for each region.
        self.prevent_cse = prevent_cse
        self.blocks = 0  # number of blocks so far, in the order in which they run
        structure = app.policy if isinstance(app.policy, _structural.Structural) else None
        self.structure = structure
        self.slicing = Slicing(app) if isinstance(structure, _structural.Sliced) else None
        self.keep = app.policy if structure is None else structure.keep

    # .. entry points

    def run(self, program: Program, args: Sequence[Any]) -> list[Any]:
        if isinstance(self.structure, _structural.Planned):
            return self.planned(program, args, self.structure)
        if self.slicing is not None:
            outs = (self.region if self.app.at is None else self.within)(program, args)
            self.slicing.check()
            return outs
        if self.app.at is not None:
            return self.within(program, args)
        if isinstance(self.structure, (_structural.Uniform, _structural.Block, _structural.Nested)):
            return self.scans_of(program, args)
        return self.region(program, args)

    def check_at(self, program: Program) -> None:
        """Raise if ``at=`` matches no module of the program."""
        planned = isinstance(self.structure, _structural.Planned)
        if not planned and next(self.matches(program.eqns, program.base), None) is None:
            raise self.nothing_at(program)

    def planned(
        self, program: Program, args: Sequence[Any], plan: _structural.Planned
    ) -> list[Any]:
        if self.app.at is not None:
            raise UserError(
                f"`{self.app.call}`: a plan already says where its regions are",
                hint="leave at= out",
            )
        written, program = program, _program.without_region_boundaries(program)
        has_regions = program is not written  # of its own
        plan = self.plan_of(program, plan.losses())
        cse = not self.loop if self.prevent_cse is None else bool(self.prevent_cse)
        in_pieces = [line for line in plan.lines if _divisions.is_division(line)]
        if in_pieces:
            found = _divisions.read(in_pieces, program, call=self.app.call)
            program = _divide.divided(program, found, self.app.call).program
        lines = [line for line in plan.lines if not _divisions.is_division(line)]
        schedule = _schedule.read(lines, program, call=self.app.call)
        if has_regions and not in_pieces and not _schedule.has_regions(schedule):
            return evaluate(written, args)  # with its regions, as the planner compiled it
        return _run_schedule.run(program, schedule, args, prevent_cse=cse)

    def fits(self, program: Program, plan: _structural.Planned) -> bool:
        """Tell whether a plan was made for a program."""
        try:
            self.plan_of(_program.without_region_boundaries(program), plan.losses())
        except PolicyError:
            return False
        return True

    def plan_of(
        self, program: Program, plans: Sequence[_structural.Planned]
    ) -> _structural.Planned:
        """Return the plan that was made for a program; raise if there is none."""
        errors = []
        for plan in plans:
            try:
                _schedule.check(plan.program, program, strict=plan.strict, call=self.app.call)
                return plan
            except PolicyError as error:
                errors.append(error)
        raise errors[0]

    def nothing_at(self, program: Program) -> Exception:
        paths = {"/".join(p) for p in _module_paths(program.eqns, program.base)}
        everywhere = _module_paths(program.eqns, program.base, enter=None)
        if any(self.block_of(path) is not None for path in everywhere):
            return PolicyError(
                f"`{self.app.call}`: the matching modules are inside a checkpoint region, a "
                "shard_map or a function with its own derivative, which at= does not enter",
                hint="remove the policy or nn.remat around the modules, or decorate the class of "
                "the module itself",
            )
        similar = _check.similar_paths(self.app.at or "", paths)
        return unknown("module", self.app.at or "", similar, call=self.app.call)

    def matches(self, eqns: Sequence[Any], base: Path) -> Iterator[str]:
        for path in _module_paths(eqns, base):
            block = self.block_of(path)
            if block is not None:
                yield block

    def block_of(self, path: Path) -> str | None:
        return (
            None if self.app.at is None else _patterns.prefix_matching(self.app.at, "/".join(path))
        )

    # .. one region

    def region(
        self, program: Program, args: Sequence[Any], keep: Policy | None = None
    ) -> list[Any]:
        if isinstance(self.structure, _structural.Segments) and keep is None:
            return self.segments(program, args, self.structure.names)
        if isinstance(self.structure, _structural.Pieces):
            return _pieces.run(program, self.structure, args, call=self.app.call)
        slices: tuple[Slice, ...] = ()
        if self.slicing is not None:
            base = (*program.base, *relative(program)[0])
            collector = _communication.current()
            if isinstance(collector, _communication.Collector):
                return evaluate(*collector.barred(program, args, base))
            slices = self.slicing.slices(program, args, base)
        chosen = self.keep if keep is None else keep
        cse = not self.loop if self.prevent_cse is None else self.prevent_cse
        if isinstance(cse, tuple):
            cse = (*[False] * len(program.consts), *cse)
        full = reads_sources(chosen)
        return run_region(program, chosen, args, prevent_cse=cse, full=full, slices=slices)

    def segments(self, program: Program, args: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """Run a region for the equations up to each name; those after the last name stay plain."""
        program = _program.without_dead(program)
        pieces: list[_Piece] = []
        run: list[Any] = []
        for eqn in program.eqns:
            run.append(eqn)
            if _program.checkpoint_name_of(eqn) in names:
                pieces.append(_Piece(tuple(run), block="segment"))
                run = []
        pieces.append(_Piece(tuple(run), block=None))
        return self.pieces(program, pieces, args, lambda p, a: self.region(p, a, self.keep))

    # .. one region per block

    def within(self, program: Program, args: Sequence[Any]) -> list[Any]:
        """Evaluate a program with a region for each block that ``at`` matches."""
        program = _program.without_dead(program)
        pieces = list(self.split(program))
        if isinstance(self.structure, _structural.Uniform):
            pieces = _grouped(pieces, self.structure.n)
        elif isinstance(self.structure, _structural.Nested):
            count = sum(p.block is not None for p in pieces)
            size = self.structure.group or max(1, math.isqrt(max(count, 1)))
            return self.pieces(program, _grouped(pieces, size), args, self.nest)
        return self.pieces(program, pieces, args, self.one_block)

    def one_block(self, program: Program, args: Sequence[Any]) -> list[Any]:
        self.blocks += 1
        if isinstance(self.structure, _structural.Block) and self.blocks > self.structure.n:
            return evaluate(program, args)
        return self.region(program, args)

    def nest(self, program: Program, args: Sequence[Any]) -> list[Any]:
        """Run a group of blocks as one region, in which each block is a region too."""

        def blocks(*args: Any) -> list[Any]:
            return self.pieces(program, list(self.split(program)), args, self.region)

        return self.region(_traced(blocks, args, program.base), args, _NOTHING)

    def split(self, program: Program) -> Iterator[_Piece]:
        run: list[Any] = []
        current: str | None = None
        for eqn in program.eqns:
            block = self.block_of(program.path(eqn))
            if block != current and run:
                yield _Piece(tuple(run), current)
                run = []
            current = block
            run.append(eqn)
        if run:
            yield _Piece(tuple(run), current)

    def pieces(
        self,
        program: Program,
        pieces: Sequence[_Piece],
        args: Sequence[Any],
        region: Callable[[Program, Sequence[Any]], list[Any]],
    ) -> list[Any]:
        env = dict(zip(program.invars, (*program.consts, *args), strict=True))
        later = _used_later(pieces, program.outvars)

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jec.Literal) else env[atom]

        for piece, wanted in zip(pieces, later, strict=True):
            if piece.block is None:
                for eqn in piece.eqns:
                    outs = self.step(eqn, [read(v) for v in eqn.invars], program.base)
                    env.update(zip(eqn.outvars, outs, strict=True))
            else:
                part = _program.part(piece.eqns, wanted, program.base)
                outs = region(part, [env[v] for v in part.invars])
                env.update(zip(part.outvars, outs, strict=True))
        return [read(v) for v in program.outvars]

    # .. blocks inside other equations

    def step(self, eqn: Any, values: list[Any], base: Path) -> list[Any]:
        """Evaluate an equation that belongs to no block; blocks may be inside of it."""
        path = _paths.module_path(eqn, base)
        enter = _ENTER.get(eqn.primitive.name)
        inside = (b for body in _program.bodies(eqn) for b in self.matches(body.jaxpr.eqns, path))
        if enter is None or next(inside, None) is None:
            return _jax.bind(eqn, values)
        with _scans.scoped(path[len(base) :]):
            return enter(self, eqn, values, path)

    def scan(self, eqn: Any, values: list[Any], path: Path, *, whole: bool = False) -> list[Any]:
        """Run a scan with regions; if ``whole``, its whole body is a block."""
        loop, self.loop = self.loop, True
        try:
            parts = self.parts(eqn, path, whole)
            return _scans.run(eqn, values, parts, unroll=eqn.params["unroll"])
        finally:
            self.loop = loop

    def parts(self, eqn: Any, path: Path, whole: bool) -> list[_scans.Part]:
        """Return the iterations of a scan with the regions that the structure asks for."""
        program, length = Program.of(eqn.params["jaxpr"], path), eqn.params["length"]

        def plain(args: Sequence[Any]) -> list[Any]:
            return evaluate(program, args)

        def regions(args: Sequence[Any]) -> list[Any]:
            if whole:
                return self.region(program, args, self.keep)
            app = dataclasses.replace(self.app, policy=of_each)
            cutter = BlockCutter(app, loop=True, prevent_cse=self.prevent_cse)
            cutter.slicing = self.slicing
            return cutter.within(program, args)

        def around(keep: Policy) -> Callable[[_scans.Body, Sequence[Any]], list[Any]]:
            def region(fn: _scans.Body, args: Sequence[Any]) -> list[Any]:
                return self.region(_traced(lambda *args: fn(args), args, path), args, keep)

            return region

        structure = self.structure
        kinds = (_structural.Pieces, _structural.Segments, _structural.Sliced)
        within_blocks = isinstance(structure, kinds)
        of_each = structure if within_blocks else self.keep
        if length == 0:  # nothing to group
            return [_scans.Part(0, plain)]
        if isinstance(structure, _structural.Uniform):
            return [_scans.Part(length, plain, structure.n, around(self.keep))]
        if isinstance(structure, _structural.Nested):
            size = structure.group or math.isqrt(length)
            return [_scans.Part(length, regions, size, around(_NOTHING))]
        if isinstance(structure, _structural.Block):
            first = min(max(structure.n - self.blocks, 0), length)
            self.blocks += length
            parts = _scans.Part(first, regions), _scans.Part(length - first, plain)
            return [part for part in parts if part.times]
        return [_scans.Part(length, regions)]

    def cond(self, eqn: Any, values: list[Any], path: Path) -> list[Any]:
        def branch(jaxpr: Any) -> Callable[..., Any]:
            return lambda *ops: self.within(Program.of(jaxpr, path), ops)

        index, *operands = values
        return jax.lax.switch(index, [branch(j) for j in eqn.params["branches"]], *operands)

    def jit(self, eqn: Any, values: list[Any], path: Path) -> list[Any]:
        inner = Program.of(eqn.params["jaxpr"], path)
        traced = jax.make_jaxpr(lambda *a: self.within(inner, a))(*map(jax.typeof, values))
        return _jax.bind(eqn.replace(params={**eqn.params, "jaxpr": traced}), values)

    # .. structural policies on a function that is one scan, without ``at``

    def scans_of(self, program: Program, args: Sequence[Any]) -> list[Any]:
        scans = [e for e in program.eqns if e.primitive.name == "scan"]
        if not scans:
            raise PolicyError(
                f"`{self.app.call}`: there are no blocks to group in one call",
                hint="apply it to the whole model or loss with at='*/block_*', or to a scan",
            )

        def step(eqn: Any, values: list[Any]) -> list[Any]:
            path = program.path(eqn)
            if eqn.primitive.name != "scan":
                return _jax.bind(eqn, values)
            with _scans.scoped(path[len(program.base) :]):
                return self.scan(eqn, values, path, whole=True)

        return evaluate(program, args, step)


_ENTER: dict[str, Callable[..., list[Any]]] = {
    "scan": BlockCutter.scan,
    "cond": BlockCutter.cond,
    "jit": BlockCutter.jit,
    "pjit": BlockCutter.jit,
}


_NOTHING = _algebra.save(_selectors.nothing)


# -- parts of programs ------------------------------------------------------------------------


def _traced(fn: Callable[..., Any], args: Sequence[Any], base: Path) -> Program:
    return Program.of(jax.make_jaxpr(fn)(*map(jax.typeof, args)), base)


def _module_paths(eqns: Sequence[Any], base: Path, *, enter: Any = ()) -> Iterator[Path]:
    """Yield the module paths of equations and of the bodies that ``at=`` enters.

    With ``enter=None`` the paths inside all bodies are yielded.
    """
    for eqn in eqns:
        path = _paths.module_path(eqn, base)
        yield path
        if enter is None or eqn.primitive.name in _ENTER:
            for body in _program.bodies(eqn):
                yield from _module_paths(body.jaxpr.eqns, path, enter=enter)


def _used_later(pieces: Sequence[_Piece], outvars: Sequence[Any]) -> list[set[Any]]:
    """Return for each piece the variables that later pieces or the outputs read."""
    later: list[set[Any]] = []
    used = {v for v in outvars if not isinstance(v, jec.Literal)}
    for piece in reversed(pieces):
        later.append(set(used))
        used |= {v for e in piece.eqns for v in e.invars if not isinstance(v, jec.Literal)}
    return later[::-1]


def _grouped(pieces: Sequence[_Piece], size: int) -> list[_Piece]:
    """Merge each ``size`` consecutive blocks, and the pieces between them, into one piece."""
    out: list[_Piece] = []
    group: list[_Piece] = []
    count = 0
    for piece in pieces:
        if piece.block is None and not group:
            out.append(piece)
            continue
        group.append(piece)
        count += piece.block is not None
        if count == size:
            out.append(_merged(group))
            group, count = [], 0
    tail: list[_Piece] = []
    while group and group[-1].block is None:
        tail.append(group.pop())
    return [*out, *([_merged(group)] if group else []), *reversed(tail)]


def _merged(group: Sequence[_Piece]) -> _Piece:
    return _Piece(tuple(e for p in group for e in p.eqns), block=group[0].block)
