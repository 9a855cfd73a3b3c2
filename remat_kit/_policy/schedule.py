"""A schedule: how the backward pass gets the activations of each part of a program.

A schedule divides the flat program into segments of consecutive equations. A segment is one region
(one `jax.checkpoint`), a region around smaller segments, or "plain", that is, no region. For each
region, the schedule says which activations the first forward pass saves or offloads. The planner
simulates schedules, a plan holds one as text, and `remat_kit._apply.run_schedule` runs it.

The text names an activation by its place: equation 15, output 0 is ``15.0``. Equations are counted
in the flat program, so a plan is bound to the program that it was made for. `describe` returns a
short form of that program, which the plan carries, and `check` says what has changed if the plan
does not fit. Each line below is an example of the text:

    0:12 plain                        equations 0 to 11 are in no region
    12:40 save 15.0 22.0              one region, which saves two activations
    40:90 save 70.0 around (40:60; 60:90 save 70.0 81.0)    a region around two regions
    140:141 plain loop 140 24*1 (0:9 save 3.0) 48*4 (0:9)     a scan: 24 iterations as the first
                                      parentheses say, then 48 in groups of 4, each group one region
    0:9 save 3.0 offload in.2 5.0     argument 2 of the program and 5.0 wait in the host's memory
    12 times (5:40 save 9.0; 40:57)   the same for 12 blocks, of which 5:57 is the first
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax.extend.core as jec

from remat_kit import _units
from remat_kit._errors import PolicyError
from remat_kit._policy import algebra as _algebra
from remat_kit._program import program as _program
from remat_kit._program.program import Program, flat_program

# The names of activations: `Place`s in the text and where a schedule runs, and the indices of
# tensors in the planner, which compares sets of them millions of times.
_V = TypeVar("_V")


Place = tuple[int, int]  # (equation, output), or (`GIVEN`, argument)


GIVEN = -1


@dataclasses.dataclass(frozen=True)
class Segment(Generic[_V]):
    """Consecutive equations of a program, and how the backward pass gets their activations.

    Attributes:
        start, stop: the segment holds the equations ``start <= i < stop``.
        save: activations made in the segment that the first forward pass saves on the device. The
            backward pass recomputes the other residuals from these, from the offloaded ones and
            from what enters the segment.
        offload: activations made in the segment that are offloaded to the host's memory. Arguments
            of the program, such as the carry of a scan in its body, may be offloaded too.
        plain: if True, the segment is no region, and everything that its derivative reads is saved.
        inside: smaller segments that cover this one. This segment is then one region around them.
            Its backward pass first recomputes the whole segment from what it saves, which the
            smaller segments save too. Whatever else they save is live from then on.
        loops: pairs of the index of a scan's equation and the plan by which its iterations run.
    """

    start: int
    stop: int
    save: frozenset[_V] = frozenset()
    offload: frozenset[_V] = frozenset()
    plain: bool = False
    inside: tuple[Segment[_V], ...] = ()
    loops: tuple[tuple[int, LoopPlan[_V]], ...] = ()

    def __hash__(self) -> int:  # segments are keys of caches that the search reads very often
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        own = self.start, self.stop, self.save, self.plain
        return hash((*own, self.inside, self.offload, self.loops))

    @property
    def kept(self) -> frozenset[_V]:
        """What the first forward pass saves or offloads."""
        return self.save | self.offload if self.offload else self.save

    def leaves(self) -> Iterator[Segment[_V]]:
        """Yield the innermost segments, in order."""
        if self.inside:
            for part in self.inside:
                yield from part.leaves()
        else:
            yield self


class LoopPart(NamedTuple, Generic[_V]):
    """Consecutive iterations of a scan that run alike.

    Attributes:
        times: the number of iterations.
        group: if greater than 1, every ``group`` iterations form one region, which saves only the
            carry that enters it.
        body: the schedule of each iteration.
    """

    times: int
    group: int
    body: Schedule[_V]


# How the iterations of a scan run, from the first to the last.
LoopPlan: TypeAlias = tuple[LoopPart[_V], ...]


# Segments that follow one another from the first equation to the last.
Schedule: TypeAlias = tuple[Segment[_V], ...]


# -- the text -----------------------------------------------------------------------------------


def has_regions(schedule: Sequence[Segment[Any]]) -> bool:
    """Tell whether a schedule runs any part of a program in another way than it is written."""
    return any(not s.plain or s.kept or s.inside or s.loops for s in schedule)


def lines(schedule: Sequence[Segment[Place]]) -> tuple[str, ...]:
    """Return the text of a schedule.

    Neighbours with equal decisions, such as the blocks of a model often are, share one line.

    >>> plain, region = Segment[Place](2, 4, plain=True), Segment[Place](0, 2)
    >>> lines([region, plain, _shifted(region, 4), _shifted(plain, 4)])
    ('2 times (0:2; 2:4 plain)',)
    """
    alike = [_shifted(s, -s.start) for s in schedule]

    def times(at: int, size: int) -> int:
        rest = range(at + size, len(alike) - size + 1, size)
        differs = (k for k in rest if alike[k : k + size] != alike[at : at + size])
        return (next(differs, at + size + len(rest) * size) - at) // size

    found, at = [], 0
    while at < len(schedule):
        sizes = range(1, max(2, 1 + (len(schedule) - at) // 2))
        size = max(sizes, key=lambda size: (size * (times(at, size) - 1), -size))
        count, text = times(at, size), _joined(schedule[at : at + size])
        found.append(f"{count} times ({text})" if count > 1 else text)
        at += count * size
    return tuple(found)


def _joined(segments: Sequence[Segment[Place]]) -> str:
    return "; ".join(map(text_of, segments))


def text_of(segment: Segment[Place]) -> str:
    """Return the text of one segment.

    >>> text_of(Segment(0, 9, save=frozenset({(5, 0), (3, 0)}), offload=frozenset({(GIVEN, 2)})))
    '0:9 save 3.0 5.0 offload in.2'
    """
    words = [f"{segment.start}:{segment.stop}"]
    if segment.plain:
        words.append("plain")
    for name, places in (("save", segment.save), ("offload", segment.offload)):
        if places:
            words += [name, *map(_written, sorted(places))]
    if segment.inside:
        words.append(f"around ({_joined(segment.inside)})")
    for equation, parts in segment.loops:
        words += ["loop", str(equation)]
        words += [f"{part.times}*{part.group} ({_joined(part.body)})" for part in parts]
    return " ".join(words)


def _written(place: Place) -> str:
    return f"{'in' if place[0] == GIVEN else place[0]}.{place[1]}"


def _shifted(segment: Segment[Place], by: int) -> Segment[Place]:
    """Return the same decisions for the equations that many places later."""

    def places(given: Iterable[Place]) -> frozenset[Place]:
        return frozenset((e if e == GIVEN else e + by, p) for e, p in given)

    return dataclasses.replace(
        segment,
        start=segment.start + by,
        stop=segment.stop + by,
        save=places(segment.save),
        offload=places(segment.offload),
        inside=tuple(_shifted(part, by) for part in segment.inside),
        loops=tuple((equation + by, plan) for equation, plan in segment.loops),
    )


def parse(text: str, where: str = "`planned(...)`") -> Schedule[Place]:
    """Read one line: a segment, or segments that are repeated.

    >>> lines(parse("40:90 save 70.0 around (40:60; 60:90 save 70.0 81.0)"))
    ('40:90 save 70.0 around (40:60; 60:90 save 70.0 81.0)',)
    >>> [text_of(s) for s in parse("2 times (0:2 save 1.0; 2:3 plain)")]
    ['0:2 save 1.0', '2:3 plain', '3:5 save 4.0', '5:6 plain']

    Args:
        text: the line.
        where: the place of the text, as error messages name it.

    Raises:
        PolicyError: the text is no line of a plan, or it is too long or too deeply nested.
    """
    reader = _Reader(text, where)
    found = reader.line()
    reader.end()
    return found


_NUMBER = r"\d{1,9}"


_PLACE = rf"(?:{_NUMBER}|in)\.{_NUMBER}"


_MAX_SEGMENTS = 100_000


_TWICE = "it keeps one value twice"


AS_WRITTEN = "leave the lines of a plan as `remat-kit plan --save` wrote them"


class _Reader:
    def __init__(self, text: str, where: str):
        self.text = text
        self.where = where
        self.tokens = re.findall(r"\d+:\d+|(?:\d+|in)\.\d+|\d+\*\d+|\d+|[a-z]+|[();]|\S", text)
        self.at = 0
        self.depth = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, pattern: str) -> str:
        token = self.peek()
        if not re.fullmatch(pattern, token, re.ASCII):
            word = _units.shortened(token or "the end")
            raise self.fault(f"{word} is out of place in {self.text[:80]!r}")
        self.at += 1
        return token

    def fault(self, reason: str) -> PolicyError:
        return PolicyError(f"{self.where}: {reason}", hint=AS_WRITTEN)

    def pair(self, separator: str) -> tuple[int, int]:
        pattern = rf"{_NUMBER}{re.escape(separator)}{_NUMBER}"
        first, second = self.take(pattern).split(separator)
        return int(first), int(second)

    def places(self, segment: str) -> frozenset[Place]:
        found = []
        while not found or re.fullmatch(_PLACE, self.peek(), re.ASCII):
            first, second = self.take(_PLACE).split(".")
            found.append((GIVEN if first == "in" else int(first), int(second)))
        if len({*found}) < len(found):
            raise unfit(f"{self.where}: {segment}: {_TWICE}")
        return frozenset(found)

    def line(self) -> Schedule[Place]:
        if ":" in self.peek():
            return (self.segment(),)
        times = int(self.take(r"[1-9]\d{0,4}"))
        self.take("times")
        block = self.segments()
        step = block[-1].stop - block[0].start
        if times * len(block) > _MAX_SEGMENTS:
            raise self.fault(f"{times} times {len(block)} segments are more than any program has")
        if step < 1:
            raise self.fault(f"a block of {step} equations cannot be repeated")
        return tuple(_shifted(s, k * step) for k in range(times) for s in block)

    def segment(self) -> Segment[Place]:
        start, stop = self.pair(":")
        fields: dict[str, Any] = {}
        loops: list[tuple[int, LoopPlan[Place]]] = []
        while self.peek() not in ("", ")", ";"):
            word = self.take("plain|save|offload|around|loop")
            if word in fields or ("inside" in fields and word == "around"):
                raise self.fault(f"{word!r} stands twice in the segment {start}:{stop}")
            if word == "plain":
                fields["plain"] = True
            elif word in ("save", "offload"):
                fields[word] = self.places(f"{start}:{stop}")
            elif word == "loop":
                equation = int(self.take(_NUMBER))
                parts: list[LoopPart[Place]] = []
                while not parts or re.fullmatch(r"\d+\*\d+", self.peek()):
                    times, group = self.pair("*")
                    parts.append(LoopPart(times, group, self.segments()))
                loops.append((equation, tuple(parts)))
            else:
                fields["inside"] = self.segments()
        return Segment(start, stop, loops=tuple(loops), **fields)

    def segments(self) -> Schedule[Place]:
        self.take(r"\(")
        self.depth += 1
        if self.depth > _algebra.MAX_NESTING:
            raise self.fault(f"more than {_algebra.MAX_NESTING} segments inside of one another")
        found = [self.segment()]
        while self.peek() == ";":
            self.take(";")
            found.append(self.segment())
        self.take(r"\)")
        self.depth -= 1
        return tuple(found)

    def end(self) -> None:
        if self.peek():
            self.take("(?!)")


# -- whether a plan fits a program ---------------------------------------------------------------


def describe(program: Program) -> str:
    """Return the short form of a program.

    It consists of a hash of which operation reads the results of which, a hash of their shapes and
    types, and the number of operations of each kind.
    """
    numbers: dict[Any, int] = {}
    joined, shapes = hashlib.sha256(), hashlib.sha256()
    counts = collections.Counter(_program.primitive_name(e) for e in program.eqns)
    for var in program.invars[len(program.consts) :]:
        numbers[var] = len(numbers)
        shapes.update(_aval(var).encode())
    for eqn in program.eqns:
        reads = [numbers.get(v, -1) for v in eqn.invars if not isinstance(v, jec.Literal)]
        for var in eqn.outvars:
            numbers[var] = len(numbers)
            shapes.update(_aval(var).encode())
        joined.update(f"{_program.primitive_name(eqn)}{reads}{len(eqn.outvars)};".encode())
    ends = joined.hexdigest()[:12], shapes.hexdigest()[:12]
    listed = " ".join(f"{name}={count}" for name, count in sorted(counts.items()))
    return f"joined={ends[0]} shapes={ends[1]} {listed}"


def _aval(var: Any) -> str:
    return f"{getattr(var.aval, 'dtype', '')}{list(getattr(var.aval, 'shape', ()))};"


ANOTHER_PROGRAM = "the plan was made for another program"


def check(planned: str, program: Program, *, strict: bool, call: str) -> None:
    """Raise if a plan was made for another program.

    Raises:
        PolicyError: says which operations came or went, or that only shapes differ.
    """
    found = describe(program)
    if found == planned:
        return
    words = [word.partition("=") for word in planned.split()]
    before = {name: value for name, _, value in words}
    now = dict(word.split("=") for word in found.split())
    if "joined" not in before or not all(value for _, _, value in words):
        raise PolicyError(
            f"`{call}`: {_units.shortened(planned)} does not say which program the plan was made "
            "for",
            hint=AS_WRITTEN,
        )
    if before.get("joined") == now["joined"]:
        if strict:
            raise PolicyError(
                f"`{call}`: the plan was made for the same operations with other shapes or types",
                hint="plan again for these arguments, or accept it with "
                "`dataclasses.replace(plan.policy, strict=False)`; the memory is then another",
            )
        return
    changes = [
        f"{name} {before.get(name, 0)} -> {now.get(name, 0)}"
        for name in sorted({*before, *now} - {"joined", "shapes"})
        if before.get(name) != now.get(name)
    ]
    changes = [change if len(change) <= 80 else change[:77] + "..." for change in changes]
    what = ", ".join(changes[:8]) if changes else "the same operations, joined in another way"
    raise PolicyError(
        f"`{call}`: {ANOTHER_PROGRAM}: {what}",
        hint="plan again; a plan holds for one model, one version of JAX and the function it was "
        "made for",
    )


def read(lines: Sequence[str], program: Program, *, call: str) -> Schedule[Place]:
    """Read the lines of a plan, and check that they fit a program.

    Args:
        lines: the lines, as `lines` returns them.
        program: the flat program.
        call: the call of the user, as error messages quote it.

    Returns:
        A schedule that covers the program. All equations and activations that it names exist.

    Raises:
        PolicyError: a line does not fit the program. The message names the line and the reason.
    """
    found: list[Segment[Place]] = []
    for number, text in enumerate(lines, 1):
        where = f"`{call}`: line {number} of the plan, {_units.shortened(text)}"
        some = parse(text, where)
        _CheckedSchedule(program, 0, where).cover(some, found[-1].stop if found else 0)
        found += some
    end = found[-1].stop if found else 0
    if end != len(program.eqns):
        raise unfit(
            f"`{call}`: the plan ends before equation {end}, but the program has "
            f"{len(program.eqns)}: the last ones are in no segment"
        )
    return tuple(found)


def unfit(message: str) -> PolicyError:
    return PolicyError(message, hint=f"{AS_WRITTEN}, or plan again for the program as it is now")


@dataclasses.dataclass(frozen=True)
class _CheckedSchedule:
    """Checks segments against a program, or against the body of one of its scans.

    Attributes:
        program: the program or the body. Its equations are counted from 0.
        depth: the number of regions around the segments.
        where: the place of the text, as error messages name it.
    """

    program: Program
    depth: int
    where: str

    def fault(self, segment: Segment[Place], reason: str) -> PolicyError:
        return unfit(f"{self.where}: {segment.start}:{segment.stop}: {reason}")

    def cover(
        self, segments: Sequence[Segment[Place]], start: int, stop: int | None = None
    ) -> None:
        """Raise unless segments follow one another from ``start``, and to ``stop`` if given."""
        count = len(self.program.eqns)
        for s in segments:
            if s.start != start:
                kind = "a gap" if s.start > start else "an overlap"
                raise self.fault(s, f"{kind}: the next equation is {start}")
            if s.stop <= s.start and count:
                raise self.fault(s, "it ends where it begins, or before")
            if s.stop > count:
                raise self.fault(s, f"there are only {count} equations")
            self.one(s)
            start = s.stop
        if stop is not None and start != stop:
            raise unfit(f"{self.where}: the segments end at {start} instead of {stop}")

    def one(self, s: Segment[Place]) -> None:
        for equation, output in (*sorted(s.save), *sorted(s.offload)):
            if equation == GIVEN:
                self.argument(s, output)
            else:
                self.output(s, equation, output)
        if s.save & s.offload:
            raise self.fault(s, _TWICE)
        if s.plain and (s.kept or s.inside):
            raise self.fault(s, "a plain segment is no region, so that it keeps nothing itself")
        if s.loops and not s.plain:
            raise self.fault(s, "only a plain segment runs a loop in another way")
        if len(dict(s.loops)) < len(s.loops):
            raise self.fault(s, "it has two loops for one equation")
        for equation, parts in s.loops:
            self.loop(s, equation, parts)
        if s.inside:
            inner = dataclasses.replace(self, depth=self.depth + 1)
            inner.cover(s.inside, s.start, s.stop)
            named = {place for part in s.inside for place in part.kept}
            if missing := s.kept - named:
                raise self.fault(
                    s, f"it keeps {_written(min(missing))}, which no segment inside of it keeps"
                )

    def output(self, s: Segment[Place], equation: int, output: int) -> None:
        place = _written((equation, output))
        if not s.start <= equation < s.stop:
            raise self.fault(s, f"it keeps {place}, whose equation lies outside of it")
        outvars = self.program.eqns[equation].outvars
        name = _program.primitive_name(self.program.eqns[equation])
        if output >= len(outvars):
            raise self.fault(s, f"it keeps {place}, but {name} has no such output")

    def argument(self, s: Segment[Place], position: int) -> None:
        place = _written((GIVEN, position))
        if (GIVEN, position) in s.save or self.depth:
            raise self.fault(
                s, f"{place} can wait on the host (`offload`), where no region is around, only"
            )
        invars = self.program.invars
        if position >= len(invars):
            raise self.fault(s, f"it keeps {place}, but there are {len(invars)} arguments")
        eqns = self.program.eqns[s.start : s.stop]
        if not any(v is invars[position] for e in eqns for v in e.invars):
            raise self.fault(s, f"it keeps {place}, which it does not read")

    def loop(self, s: Segment[Place], equation: int, parts: LoopPlan[Place]) -> None:
        if not s.start <= equation < s.stop:
            raise self.fault(s, f"loop {equation}: this equation lies outside of it")
        eqn = self.program.eqns[equation]
        if eqn.primitive.name != "scan":
            raise self.fault(s, f"loop {equation}: {_program.primitive_name(eqn)} is no scan")
        times, length = sum(part.times for part in parts), eqn.params["length"]
        if times != length:
            raise self.fault(s, f"loop {equation}: {times} iterations, but the scan has {length}")
        body = flat_program(eqn.params["jaxpr"])
        inner = _CheckedSchedule(body, 0, f"{self.where}: loop {equation}")
        for part in parts:
            if not 1 <= part.group <= part.times:
                raise self.fault(
                    s, f"loop {equation}: groups of {part.group} among {part.times} iterations"
                )
            inner.cover(part.body, 0, len(body.eqns))
