"""Which equations of a program can run together in pieces of one axis, and which one blocks?

`split` starts at one value of a program, an *axis* of which is to be divided. From there it carries
the division backward, to the values that the value is computed from, and forward, to the values
that are computed from it. The result is a `Split`, which says which equations run in a loop over
the pieces, what they read and what leaves the loop, or a `Blocked`, which names the equation that
needs more than a piece.

Example: a loss head with logits of shape (8, 1000). Pieces of axis 0 go through; pieces of the
vocabulary do not, because a softmax needs the largest of all logits first:

>>> import jax, jax.numpy as jnp
>>> def head(w, x):
...     return -jnp.mean(jax.nn.log_softmax(x @ w)[:, 0])
>>> program = Program.of(jax.make_jaxpr(head)(jnp.ones((4, 1000)), jnp.ones((8, 4))))
>>> value = widest(program)
>>> found = split(program, value, 0)
>>> [how for _, how in found.outputs]
[<Partial.SUM: 'sum'>]
>>> isinstance(split(program, value, 1), Blocked)
True
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.extend.core as jec

from remat_kit import _jax
from remat_kit._program import ops as _ops
from remat_kit._program.pieces import rules as _rules
from remat_kit._program.pieces.inside import may_join, readers
from remat_kit._program.pieces.values import Along, How, In, Out, Partial, Way, shape_of
from remat_kit._program.program import Program, primitive_name

# A value that leaves the loop with more than this share of the bytes of the value that is divided
# makes the loop useless.
_WIDE = 0.5


@dataclasses.dataclass(frozen=True)
class Split:
    """A program divided into what runs before a loop over pieces, in it, and after it.

    Attributes:
        program: the program.
        value: the variable whose axis is divided.
        n: the number of entries of that axis.
        ways: the equations in the loop, by index, in order.
        before: the indices of the equations that run before the loop.
        after: the indices of those that run after it.
        cut: the values of which the loop reads pieces, with how they are cut.
        whole: the values that each piece reads as a whole.
        outputs: the values that leave the loop, with how their pieces are joined.
        how: each variable of the loop that is split or partial.
    """

    program: Program
    value: Any
    n: int
    ways: Mapping[int, Way]
    before: tuple[int, ...]
    after: tuple[int, ...]
    cut: tuple[tuple[Any, Along], ...]
    whole: tuple[Any, ...]
    outputs: tuple[tuple[Any, Along | Partial], ...]
    how: Mapping[Any, Along | Partial]

    @property
    def inside_bytes(self) -> int:
        """The bytes of what only the loop computes and reads, if it runs as a whole."""
        leaving = {v for v, _ in self.outputs}
        return sum(
            _bytes(v)
            for i in self.ways
            for v in self.program.eqns[i].outvars
            if v not in leaving and not _ops.is_view(self.program.eqns[i])
        )

    @property
    def made(self) -> list[Any]:
        """The variables that the equations in the loop make."""
        return [v for i in self.ways for v in self.program.eqns[i].outvars]

    def saved_bytes(self, pieces: int) -> float:
        """Return by how much pieces reduce what is live, roughly: a score to compare axes with."""
        handed_on = {v for v in self.program.outvars if not isinstance(v, jec.Literal)}
        leaving = {v for v, _ in self.outputs}
        inside = self.inside_bytes
        crossing = sum(_bytes(v) for v in leaving - handed_on)
        crossing += sum(_bytes(v) for v, how in self.outputs if isinstance(how, Partial))
        made = {v for i in self.before for v in self.program.eqns[i].outvars}
        crossing += sum(_bytes(v) for v in {*self.whole, *(v for v, _ in self.cut)} & made)
        return inside * (1 - 1 / min(pieces, self.n)) - crossing


@dataclasses.dataclass(frozen=True)
class Blocked:
    """Why an axis cannot be divided.

    Attributes:
        eqn: the equation that needs more than one piece; None if the value itself has no such axis.
        reason: one sentence.
    """

    eqn: Any
    reason: str

    def __str__(self) -> str:
        return self.reason


def widest(program: Program) -> Any | None:
    """Return the largest value that a program computes and does not return.

    Values of operations that cannot run in pieces do not count, nor do random bits, which are as
    large as the values that they change. Of several equally large ones, it is the first. Returns
    None if there is no array among them.
    """
    returned = _returned(program)
    best, size = None, 0
    for eqn in program.eqns:
        if not _rules.is_known(eqn) or eqn.primitive.name == "random_bits":
            continue
        for v in eqn.outvars:
            if v not in returned and _bytes(v) > size and shape_of(v):
                best, size = v, _bytes(v)
    return best


def _returned(program: Program) -> set[Any]:
    """Return the outputs of a program, and the values that they are views or names of."""
    found = {v for v in program.outvars if not isinstance(v, jec.Literal)}
    for eqn in reversed(program.eqns):
        if _ops.is_view(eqn) and not found.isdisjoint(eqn.outvars):
            found.update(v for v in eqn.invars if not isinstance(v, jec.Literal))
    return found


def split(program: Program, value: Any, axis: int) -> Split | Blocked:
    """Divide a program along an axis of one of the values that it computes.

    Args:
        program: a flat program, or a segment of one (`remat_kit._program.program.part`).
        value: a variable that one of its equations computes.
        axis: the axis of the value.

    Returns:
        The division, or the reason why there is none.
    """
    shape = shape_of(value)
    n = shape[axis]
    if n < 2:
        return Blocked(None, f"axis {axis} has {n} entr{'y' if n == 1 else 'ies'}")
    for eqn in program.eqns:
        if _jax.has_effects(eqn):
            name = primitive_name(eqn)
            return Blocked(eqn, f"`{name}` has an effect, which would happen once for each piece")
    whole: set[Any] = set()
    facts = _Facts(program, value)
    while True:
        region = _Region(facts, n, whole)
        blocked = region.grow(value, Along(axis))
        if blocked is not None:
            return blocked
        more = region.wanted_whole() - whole
        if not more:
            return region.finished(value)
        whole |= more


def _bytes(v: Any) -> int:
    aval = v.aval
    return math.prod(getattr(aval, "shape", ())) * getattr(
        getattr(aval, "dtype", None), "itemsize", 0
    )


def _variables(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, jec.Literal)]


class _Facts:
    """What does not change while the region grows."""

    def __init__(self, program: Program, value: Any):
        self.program = program
        self.maker = {v: i for i, e in enumerate(program.eqns) for v in e.outvars}
        self.readers = readers(program)
        # The equations that depend on the divided value: they cannot run before the loop.
        self.depends = {self.maker[value]}
        moving = set(program.eqns[self.maker[value]].outvars)
        for i, eqn in enumerate(program.eqns):
            if not moving.isdisjoint(_variables(eqn)):
                self.depends.add(i)
                moving.update(eqn.outvars)

    @functools.cached_property
    def returned(self) -> set[Any]:
        return {v for v in self.program.outvars if not isinstance(v, jec.Literal)}

    @functools.cached_property
    def given(self) -> set[Any]:
        return set(self.program.invars)


class _Region:
    """The equations that run in pieces, while they are found.

    Attributes:
        whole: values that exist before the loop anyway, so that pieces of them are cut.
        ways: the equations of the region.
        how: what they compute, split or partial.
        tainted: values that are there only after the loop.
    """

    def __init__(self, facts: _Facts, n: int, whole: set[Any]):
        self.facts, self.n, self.whole = facts, n, whole
        self.eqns = facts.program.eqns
        self.ways: dict[int, Way] = {}
        self.how: dict[Any, Along | Partial] = {}
        self.tainted: set[Any] = set()
        self.refused: dict[int, str] = {}

    # .. growing

    def grow(self, value: Any, along: Along) -> Blocked | None:
        start = self.facts.maker[value]
        self.backward({value: along}, force=start)
        if start not in self.ways:
            eqn = self.eqns[start]
            return Blocked(eqn, _cannot(eqn, self.n))
        for i, eqn in enumerate(self.eqns):
            if i in self.ways or all(v in self.whole for v in eqn.outvars):
                continue
            reads = _variables(eqn)
            late = [v for v in reads if v in self.tainted]
            inside = [v for v in reads if v in self.how]
            if late or (inside and not self.include(i, inside)):
                self.tainted.update(eqn.outvars)
        return None

    def include(self, i: int, inside: Sequence[Any]) -> bool:
        """Add an equation that reads values of the region; return whether that is possible."""
        eqn = self.eqns[i]
        for v in inside:
            how = self.how[v]
            if isinstance(how, Partial):
                maker = primitive_name(self.eqns[self.facts.maker[v]])
                self.refused[i] = (
                    f"`{primitive_name(eqn)}` needs all pieces of the {_NAMES[how]} that "
                    f"`{maker}` computes"
                )
                return False
        first = inside[0]
        how = self.how[first]
        assert isinstance(how, Along)
        position = next(k for k, v in enumerate(eqn.invars) if v is first)
        for way in _rules.ways(eqn, self.n, In(position), how):
            if self.agrees(i, eqn, way) and may_join(eqn, way, self.facts.readers):
                self.add(i, way)
                wanted: dict[Any, Along] = {}
                for v, h in zip(eqn.invars, way.inputs, strict=True):
                    if isinstance(h, Along) and not isinstance(v, jec.Literal):
                        wanted.setdefault(v, h)
                self.backward({v: h for v, h in wanted.items() if v not in self.how})
                return True
        self.refused[i] = _cannot(eqn, self.n)
        return False

    def agrees(self, i: int, eqn: Any, way: Way) -> bool:
        """Tell whether a way reads what is there: pieces of the region, whole values before it.

        An output that all pieces compute alike, such as a result of a loop that ignores the divided
        input, does not leave the region, so nothing may read it.
        """
        for v, made in zip(eqn.outvars, way.outputs, strict=True):
            if made is None and (v in self.facts.readers or v in self.facts.returned):
                return False
        for v, wanted in zip(eqn.invars, way.inputs, strict=True):
            if isinstance(v, jec.Literal) or v not in self.how or self.how[v] == wanted:
                continue
            made_late = self.facts.maker[v] in self.facts.depends
            if made_late or i not in self.facts.depends:
                return False
        return True

    def add(self, i: int, way: Way) -> None:
        self.ways[i] = way
        for v, how in zip(self.eqns[i].outvars, way.outputs, strict=True):
            if how is not None:
                self.how[v] = how

    def backward(self, targets: Mapping[Any, Along], force: int | None = None) -> None:
        """Let the region compute pieces of these values, as far back as that reads fewer bytes."""
        wanted = {v: how for v, how in targets.items() if v in self.facts.maker}
        if not wanted:
            return
        planned: dict[int, Way] = {}
        for i in range(max(self.facts.maker[v] for v in wanted), -1, -1):
            way = self.planned(i, wanted, force)
            if way is None:
                continue
            planned[i] = way
            for v, how in zip(self.eqns[i].invars, way.inputs, strict=True):
                if isinstance(how, Along) and v in self.facts.maker and v not in self.how:
                    wanted.setdefault(v, how)
        chosen = self.cheapest(planned, wanted, force)
        needed = {v for v in targets if self.facts.maker.get(v) in chosen}
        for i in sorted(chosen, reverse=True):
            if needed.isdisjoint(self.eqns[i].outvars):
                continue
            self.add(i, planned[i])
            for v, how in zip(self.eqns[i].invars, planned[i].inputs, strict=True):
                if isinstance(how, Along) and wanted.get(v) == how:
                    needed.add(v)

    def planned(self, i: int, wanted: Mapping[Any, Along], force: int | None) -> Way | None:
        eqn = self.eqns[i]
        outs = [(k, v) for k, v in enumerate(eqn.outvars) if v in wanted]
        late = i in self.facts.depends and i != force
        if not outs or i in self.ways or late or any(v in self.whole for v in eqn.outvars):
            return None
        position, first = outs[0]
        for way in _rules.ways(eqn, self.n, Out(position), wanted[first]):
            if way.partial or any(way.outputs[k] != wanted[v] for k, v in outs):
                continue
            if not any(v in self.tainted for v in _variables(eqn)) and self.agrees(i, eqn, way):
                return way
        return None

    def cheapest(
        self, planned: Mapping[int, Way], wanted: Mapping[Any, Along], force: int | None
    ) -> set[int]:
        """Choose the equations that run in pieces: those whose inputs are no larger than outputs.

        What the loop reads counts if it is computed only for the loop. If the loop reads a value in
        several places, it counts once.
        """
        chosen: set[int] = set()
        reads_of: dict[Any, frozenset[Any]] = {}

        def alone(v: Any) -> frozenset[Any]:
            there = v in self.facts.given or v in self.whole or v in self.how
            return frozenset() if there else frozenset([v])

        for i in sorted(planned):
            eqn, way = self.eqns[i], planned[i]
            inside: frozenset[Any] = frozenset()
            for v, how in zip(eqn.invars, way.inputs, strict=True):
                if not isinstance(v, jec.Literal):
                    follows = wanted.get(v) == how and v in reads_of
                    inside |= reads_of[v] if follows else alone(v)
            outside = frozenset().union(*map(alone, eqn.outvars))
            if i == force or sum(map(_bytes, inside)) <= sum(map(_bytes, outside)):
                chosen.add(i)
                reads_of.update(dict.fromkeys(eqn.outvars, inside))
        return chosen

    # .. what the region needs

    def before_loop(self) -> set[int]:
        """Return the equations whose whole results the region reads, and all that they need."""
        start: list[Any] = []
        for i, way in self.ways.items():
            for v, how in zip(self.eqns[i].invars, way.inputs, strict=True):
                if not isinstance(v, jec.Literal) and (how is None or self.how.get(v) != how):
                    start.append(v)
        found: set[int] = set()
        while start:
            i = self.facts.maker.get(start.pop())
            if i is not None and i not in found:
                found.add(i)
                start += _variables(self.eqns[i])
        return found

    def wanted_whole(self) -> set[Any]:
        """Return the values that must be there before the loop although the region computes them.

        Then everything that they are computed from is there too.
        """
        before = self.before_loop()
        if before.isdisjoint(self.ways):
            return set()
        return {v for i in before for v in self.eqns[i].outvars}

    # .. the result

    def finished(self, value: Any) -> Split | Blocked:
        program, before = self.facts.program, self.before_loop()
        self._drop_unused(before)
        if value not in self.how:
            return Blocked(None, "no result depends on the value")
        after: set[int] = set()
        late = {v for i in self.ways for v in self.eqns[i].outvars}
        for i, eqn in enumerate(self.eqns):
            if i not in self.ways and i not in before and not late.isdisjoint(_variables(eqn)):
                after.add(i)
                late.update(eqn.outvars)
        outside = {v for i in after for v in _variables(self.eqns[i])}
        returned = {v for v in program.outvars if not isinstance(v, jec.Literal)}
        order = sorted(self.ways)
        outputs = tuple(
            (v, self.how[v])
            for i in order
            for v in self.eqns[i].outvars
            if v in self.how and (v in outside or v in returned)
        )
        blocked = self._too_wide(outputs, returned, after, value)
        if blocked is not None:
            return blocked
        cut, whole = self._reads(order)
        rest = tuple(i for i in range(len(self.eqns)) if i not in self.ways and i not in after)
        return Split(
            program,
            value,
            self.n,
            {i: self.ways[i] for i in order},
            rest,
            tuple(sorted(after)),
            cut,
            whole,
            outputs,
            dict(self.how),
        )

    def _drop_unused(self, before: set[int]) -> None:
        """Drop equations of the region whose results nobody reads any more."""
        used = {v for v in self.facts.program.outvars if not isinstance(v, jec.Literal)}
        for i in range(len(self.eqns) - 1, -1, -1):
            eqn = self.eqns[i]
            if i in self.ways and used.isdisjoint(eqn.outvars):
                del self.ways[i]
                for v in eqn.outvars:
                    self.how.pop(v, None)
            else:
                used.update(_variables(eqn))

    def _reads(self, order: Iterable[int]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        cut: dict[tuple[Any, Along], None] = {}
        whole: dict[Any, None] = {}
        for i in order:
            for v, how in zip(self.eqns[i].invars, self.ways[i].inputs, strict=True):
                if isinstance(v, jec.Literal):
                    continue
                if how is None:
                    whole[v] = None
                elif self.how.get(v) != how:
                    assert isinstance(how, Along)
                    cut[v, how] = None
        return tuple(cut), tuple(whole)

    def _too_wide(
        self,
        outputs: Sequence[tuple[Any, How]],
        returned: set[Any],
        after: set[int],
        value: Any,
    ) -> Blocked | None:
        for v, _ in outputs:
            if v in returned or _bytes(v) <= _WIDE * _bytes(value):
                continue
            for i in sorted(after):
                if v in _variables(self.eqns[i]):
                    eqn = self.eqns[i]
                    # It may be late only because of what it reads: name the first late one.
                    return Blocked(*self._cause(i, eqn))
        return None

    def _cause(self, i: int, eqn: Any) -> tuple[Any, str]:
        while i not in self.refused:
            late = [v for v in _variables(eqn) if v in self.tainted]
            if not late:
                return eqn, f"`{primitive_name(eqn)}` reads the whole value"
            i = self.facts.maker[late[0]]
            eqn = self.eqns[i]
        return eqn, self.refused[i]


_NAMES = {Partial.SUM: "sum", Partial.MAX: "maximum", Partial.MIN: "minimum"}


def _cannot(eqn: Any, n: int) -> str:
    name = primitive_name(eqn)
    if not _rules.is_known(eqn):
        return f"`{name}` is not an operation that remat_kit can run in pieces"
    return f"`{name}` mixes the {n:,} entries that pieces are made of"
