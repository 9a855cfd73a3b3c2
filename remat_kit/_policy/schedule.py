"""The text of a plan: stretches of a program, and which of their values are kept.

The text names equations by their place in the flat program, so a plan is bound to the program that
it was made for: `describe` gives the short form of a program that a plan carries, and `check` says
what changed when it does not fit.

    0:12 plain                        no region
    12:40 save 15.0 22.0              a region; outputs 0 of equations 15 and 22 are kept
    40:90 save 70.0 around (40:60; 60:90 save 70.0 81.0)    regions in a region that keeps one value
    140:141 plain loop 140 24*1 (0:9 save 3.0) 48*4 (0:9)     a scan: 24 rounds, then groups of 4
    0:9 save 3.0 offload in.2 5.0     argument 2 of the program and 5.0 wait in the host's memory
    12 times (5:40 save 9.0; 40:57)   the same for 12 blocks, of which 5:57 is the first
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jec

from remat_kit import _units
from remat_kit._errors import PolicyError
from remat_kit._policy import algebra as _algebra
from remat_kit._program import program as _program
from remat_kit._program.program import Program, flat_program

Place = tuple[int, int]  # equation, output; or `_GIVEN` and the place of an argument


GIVEN = -1


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Consecutive equations, and what is kept of them; see `remat_kit._planner.simulate.Segment`.

    Attributes:
        start, stop: equations ``start <= i < stop``.
        save, offload: the values that are kept on the device and in the host's memory.
        plain: no region.
        inside: smaller stretches; this one is then a region around them, which keeps what it says
            through the first forward pass. They keep that too, and what else they say once it runs
            again.
        loops: the scans that are run in another way.
    """

    start: int
    stop: int
    save: tuple[Place, ...] = ()
    offload: tuple[Place, ...] = ()
    plain: bool = False
    inside: tuple[Stretch, ...] = ()
    loops: tuple[tuple[int, tuple[LoopPart, ...]], ...] = ()

    def __str__(self) -> str:
        words = [f"{self.start}:{self.stop}"]
        if self.plain:
            words.append("plain")
        for name, places in (("save", self.save), ("offload", self.offload)):
            if places:
                words += [name, *map(_written, places)]
        if self.inside:
            inner = "; ".join(map(str, self.inside))
            words.append(f"around ({inner})")
        for equation, parts in self.loops:
            words += ["loop", str(equation), *map(str, parts)]
        return " ".join(words)

    def shifted(self, by: int) -> Stretch:
        """Return the same so many equations later."""

        def places(given: tuple[Place, ...]) -> tuple[Place, ...]:
            return tuple((e if e == GIVEN else e + by, p) for e, p in given)

        return dataclasses.replace(
            self,
            start=self.start + by,
            stop=self.stop + by,
            save=places(self.save),
            offload=places(self.offload),
            inside=tuple(part.shifted(by) for part in self.inside),
            loops=tuple((equation + by, parts) for equation, parts in self.loops),
        )


@dataclasses.dataclass(frozen=True)
class LoopPart:
    """Some iterations of a scan: in groups of ``group``, each iteration as ``body`` says."""

    times: int
    group: int
    body: tuple[Stretch, ...]

    def __str__(self) -> str:
        return f"{self.times}*{self.group} ({'; '.join(map(str, self.body))})"


# -- the text -----------------------------------------------------------------------------------


def lines(schedule: Sequence[Stretch]) -> tuple[str, ...]:
    """Write a schedule down; neighbours that are treated alike, as the blocks of a model often are,
    share one line.

    >>> lines([Stretch(0, 2), Stretch(2, 4, plain=True), Stretch(4, 6), Stretch(6, 8, plain=True)])
    ('2 times (0:2; 2:4 plain)',)
    """
    alike = [s.shifted(-s.start) for s in schedule]

    def times(at: int, size: int) -> int:
        rest = range(at + size, len(alike) - size + 1, size)
        differs = (k for k in rest if alike[k : k + size] != alike[at : at + size])
        return (next(differs, at + size + len(rest) * size) - at) // size

    found, at = [], 0
    while at < len(schedule):
        sizes = range(1, max(2, 1 + (len(schedule) - at) // 2))
        size = max(sizes, key=lambda size: (size * (times(at, size) - 1), -size))
        count, text = times(at, size), "; ".join(map(str, schedule[at : at + size]))
        found.append(f"{count} times ({text})" if count > 1 else text)
        at += count * size
    return tuple(found)


def parse(text: str, where: str = "`planned(...)`") -> tuple[Stretch, ...]:
    """Read a line: a stretch, or some that are repeated.

    >>> [str(s) for s in parse("40:90 save 70.0 around (40:60; 60:90 save 70.0 81.0)")]
    ['40:90 save 70.0 around (40:60; 60:90 save 70.0 81.0)']
    >>> [str(s) for s in parse("2 times (0:2 save 1.0; 2:3 plain)")]
    ['0:2 save 1.0', '2:3 plain', '3:5 save 4.0', '5:6 plain']

    Args:
        text: the line.
        where: what messages say about the place of the text.

    Raises:
        PolicyError: the text is not that of a line, or one that is too long or too deeply nested.
    """
    reader = _Reader(text, where)
    found = reader.line()
    reader.end()
    return found


_NUMBER = r"\d{1,9}"


_PLACE = rf"(?:{_NUMBER}|in)\.{_NUMBER}"


_MAX_STRETCHES = 100_000


_AS_WRITTEN = "leave the lines of a plan as `remat-kit plan --save` wrote them"


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
        return PolicyError(f"{self.where}: {reason}", hint=_AS_WRITTEN)

    def pair(self, separator: str) -> tuple[int, int]:
        pattern = rf"{_NUMBER}{re.escape(separator)}{_NUMBER}"
        first, second = self.take(pattern).split(separator)
        return int(first), int(second)

    def places(self) -> tuple[Place, ...]:
        found = []
        while not found or re.fullmatch(_PLACE, self.peek(), re.ASCII):
            first, second = self.take(_PLACE).split(".")
            found.append((GIVEN if first == "in" else int(first), int(second)))
        return tuple(found)

    def line(self) -> tuple[Stretch, ...]:
        if ":" in self.peek():
            return (self.stretch(),)
        times = int(self.take(r"[1-9]\d{0,4}"))
        self.take("times")
        block = self.stretches()
        step = block[-1].stop - block[0].start
        if times * len(block) > _MAX_STRETCHES:
            raise self.fault(f"{times} times {len(block)} stretches are more than any program has")
        if step < 1:
            raise self.fault(f"a block of {step} equations cannot be repeated")
        return tuple(s.shifted(k * step) for k in range(times) for s in block)

    def stretch(self) -> Stretch:
        start, stop = self.pair(":")
        fields: dict[str, Any] = {}
        loops: list[tuple[int, tuple[LoopPart, ...]]] = []
        while self.peek() not in ("", ")", ";"):
            word = self.take("plain|save|offload|around|loop")
            if word in fields or ("inside" in fields and word == "around"):
                raise self.fault(f"{word!r} stands twice in the stretch {start}:{stop}")
            if word == "plain":
                fields["plain"] = True
            elif word in ("save", "offload"):
                fields[word] = self.places()
            elif word == "loop":
                equation = int(self.take(_NUMBER))
                parts = []
                while not parts or re.fullmatch(r"\d+\*\d+", self.peek()):
                    times, group = self.pair("*")
                    parts.append(LoopPart(times, group, self.stretches()))
                loops.append((equation, tuple(parts)))
            else:
                fields["inside"] = self.stretches()
        return Stretch(start, stop, loops=tuple(loops), **fields)

    def stretches(self) -> tuple[Stretch, ...]:
        self.take(r"\(")
        self.depth += 1
        if self.depth > _algebra.MAX_NESTING:
            raise self.fault(f"more than {_algebra.MAX_NESTING} stretches inside of one another")
        found = [self.stretch()]
        while self.peek() == ";":
            self.take(";")
            found.append(self.stretch())
        self.take(r"\)")
        self.depth -= 1
        return tuple(found)

    def end(self) -> None:
        if self.peek():
            self.take("(?!)")


def describe(program: Program) -> str:
    """Return the short form of a program: its operations counted, a hash of how they are joined,
    one of their shapes.
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
            hint=_AS_WRITTEN,
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
        f"`{call}`: the plan was made for another program: {what}",
        hint="plan again; a plan holds for one model, one version of JAX and the function it was "
        "made for",
    )


def read(lines: Sequence[str], program: Program, *, call: str) -> list[Stretch]:
    """Read the lines of a plan and hold them against the program that they are for.

    Args:
        lines: as `lines` writes them.
        program: the flat program.
        call: what the user wrote, for messages.

    Returns:
        Stretches that `run` can take: they cover the program, and all that they name is there.

    Raises:
        PolicyError: says in which line what does not fit the program, and why.
    """
    found: list[Stretch] = []
    for number, text in enumerate(lines, 1):
        where = f"`{call}`: line {number} of the plan, {_units.shortened(text)}"
        some = parse(text, where)
        _CheckedSchedule(program, 0, where).cover(some, found[-1].stop if found else 0)
        found += some
    end = found[-1].stop if found else 0
    if end != len(program.eqns):
        raise _unfit(
            f"`{call}`: the plan ends before equation {end}, but the program has "
            f"{len(program.eqns)}: the last ones are in no stretch"
        )
    return found


def _unfit(message: str) -> PolicyError:
    return PolicyError(message, hint=f"{_AS_WRITTEN}, or plan again for the program as it is now")


@dataclasses.dataclass(frozen=True)
class _CheckedSchedule:
    """A program, or the body of one of its scans, that stretches are held against.

    Attributes:
        program: its equations are counted from 0.
        depth: how many regions are around the stretches.
        where: the place of the text, for messages.
    """

    program: Program
    depth: int
    where: str

    def fault(self, stretch: Stretch, reason: str) -> PolicyError:
        return _unfit(f"{self.where}: {stretch.start}:{stretch.stop}: {reason}")

    def cover(self, stretches: Sequence[Stretch], start: int, stop: int | None = None) -> None:
        """Raise unless stretches follow one another from ``start``, and to ``stop`` if given."""
        count = len(self.program.eqns)
        for s in stretches:
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
            raise _unfit(f"{self.where}: the stretches end at {start} instead of {stop}")

    def one(self, s: Stretch) -> None:
        kept = (*s.save, *s.offload)
        for equation, output in kept:
            if equation == GIVEN:
                self.argument(s, output)
            else:
                self.output(s, equation, output)
        if len({*kept}) < len(kept):
            raise self.fault(s, "it keeps one value twice")
        if s.plain and (kept or s.inside):
            raise self.fault(s, "a plain stretch is no region, so that it keeps nothing itself")
        if s.loops and not s.plain:
            raise self.fault(s, "only a plain stretch runs a loop in another way")
        if len(dict(s.loops)) < len(s.loops):
            raise self.fault(s, "it has two loops for one equation")
        for equation, parts in s.loops:
            self.loop(s, equation, parts)
        if s.inside:
            inner = dataclasses.replace(self, depth=self.depth + 1)
            inner.cover(s.inside, s.start, s.stop)
            named = {place for part in s.inside for place in (*part.save, *part.offload)}
            if missing := {*kept} - named:
                raise self.fault(
                    s, f"it keeps {_written(min(missing))}, which no stretch inside of it keeps"
                )

    def output(self, s: Stretch, equation: int, output: int) -> None:
        place = _written((equation, output))
        if not s.start <= equation < s.stop:
            raise self.fault(s, f"it keeps {place}, whose equation lies outside of it")
        outvars = self.program.eqns[equation].outvars
        name = _program.primitive_name(self.program.eqns[equation])
        if output >= len(outvars):
            raise self.fault(s, f"it keeps {place}, but {name} has no such output")

    def argument(self, s: Stretch, position: int) -> None:
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

    def loop(self, s: Stretch, equation: int, parts: Sequence[LoopPart]) -> None:
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


def _written(place: Place) -> str:
    return f"{'in' if place[0] == GIVEN else place[0]}.{place[1]}"
