"""Which segments of a program run in pieces?

A plan may say that a segment of its program runs in pieces of an axis, as a function does with
`remat_kit.pieces`. Each such segment is a `Division`, and has a line of its own before the segments
of the schedule:

    40:90 pieces 16 of 46.0 axis 1      equations 40 to 89 in 16 pieces of axis 1 of output 0 of
                                        equation 46
    loop 140 (3:20 pieces 4 of 9.0 axis 0)   the same in the body of a scan, equation 140
    12 times (40:90 pieces 16 of 46.0 axis 1) every 100      the same for 12 blocks, the first
                                        equation of each 100 after that of the one before

These lines count the equations of the flat program. The segments of the schedule count those of the
*divided* program, in which the loop over the pieces of a division is one operation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from remat_kit import _units
from remat_kit._errors import PolicyError
from remat_kit._policy.schedule import AS_WRITTEN, Place, unfit
from remat_kit._program import program as _program
from remat_kit._program.program import Program, flat_program

_MOST = 10_000  # maximum number of divisions in one plan


@dataclasses.dataclass(frozen=True)
class Division:
    """A segment that runs in pieces.

    Attributes:
        start, stop: the segment holds the equations ``start <= i < stop``.
        pieces: the number of pieces.
        of: the value that is divided: an equation of the segment and its output.
        axis: the axis of that value.
        loop: if the segment is in the body of a scan, the equation of the scan; for a scan in a
            scan there are several, the outermost first.
    """

    start: int
    stop: int
    pieces: int
    of: Place
    axis: int
    loop: tuple[int, ...] = ()

    def holds(self, other: Division) -> bool:
        """Tell whether another segment is in the body of a scan that lies in this one."""
        depth = len(self.loop)
        if len(other.loop) <= depth or other.loop[:depth] != self.loop:
            return False
        return self.start <= other.loop[depth] < self.stop

    def shifted(self, by: int) -> Division:
        """Return the same division, that many equations later."""
        if self.loop:
            return dataclasses.replace(self, loop=(self.loop[0] + by, *self.loop[1:]))
        of = self.of[0] + by, self.of[1]
        return dataclasses.replace(self, start=self.start + by, stop=self.stop + by, of=of)

    @property
    def place(self) -> tuple[int, ...]:
        """A sort key: the equations at which it begins, outermost first."""
        return (*self.loop, self.start)


# -- the text -------------------------------------------------------------------------------------


def text_of(division: Division) -> str:
    """Return the text of one division.

    >>> text_of(Division(3, 20, 4, (9, 0), 1)), text_of(Division(3, 20, 4, (9, 0), 1, (140,)))
    ('3:20 pieces 4 of 9.0 axis 1', 'loop 140 (3:20 pieces 4 of 9.0 axis 1)')
    """
    d = division
    text = f"{d.start}:{d.stop} pieces {d.pieces} of {d.of[0]}.{d.of[1]} axis {d.axis}"
    for equation in reversed(d.loop):
        text = f"loop {equation} ({text})"
    return text


def lines(divisions: Sequence[Division]) -> tuple[str, ...]:
    """Return the text of some divisions. Those of equal blocks share a line.

    >>> one = Division(3, 20, 4, (9, 0), 1)
    >>> lines([one, one.shifted(40), one.shifted(80), Division(200, 210, 8, (205, 0), 0)])
    ('3 times (3:20 pieces 4 of 9.0 axis 1) every 40', '200:210 pieces 8 of 205.0 axis 0')
    """
    found: list[str] = []
    rest = sorted(divisions, key=lambda d: d.place)
    while rest:
        first, *rest = rest
        step = next((d.place[0] - first.place[0] for d in rest if _alike(first, d)), 0)
        count = 1
        while step and (d := first.shifted(count * step)) in rest:
            rest.remove(d)
            count += 1
        text = text_of(first)
        found.append(f"{count} times ({text}) every {step}" if count > 1 else text)
    return tuple(found)


def _alike(a: Division, b: Division) -> bool:
    return b == a.shifted(b.place[0] - a.place[0])


def is_division(line: str) -> bool:
    """Tell whether a line of a plan is about pieces.

    >>> is_division("3:20 pieces 4 of 9.0 axis 1"), is_division("0:12 plain")
    (True, False)
    """
    return " pieces " in line


_NUMBER = r"\d{1,9}"
_ONE = re.compile(
    rf"({_NUMBER}):({_NUMBER}) pieces ({_NUMBER}) of ({_NUMBER})\.({_NUMBER}) axis ({_NUMBER})",
    re.ASCII,
)
_LOOP = re.compile(rf"loop ({_NUMBER}) \((.*)\)", re.ASCII)
_TIMES = re.compile(r"([1-9]\d{0,4}) times \((.*)\) every ([1-9]\d{0,8})", re.ASCII)
_DEEPEST = 16  # maximum number of scans in one another


def parse(text: str, where: str = "`planned(...)`") -> tuple[Division, ...]:
    """Read one line, which `lines` wrote.

    >>> parse("2 times (3:20 pieces 4 of 9.0 axis 1) every 40")[1]
    Division(start=43, stop=60, pieces=4, of=(49, 0), axis=1, loop=())

    Raises:
        PolicyError: the text is no such line.
    """
    repeated = _TIMES.fullmatch(text)
    times, step, one = (1, 0, text) if repeated is None else (repeated[1], repeated[3], repeated[2])
    loop: list[int] = []
    while len(loop) < _DEEPEST and (inner := _LOOP.fullmatch(one)) is not None:
        loop.append(int(inner[1]))
        one = inner[2]
    found = _ONE.fullmatch(one)
    if found is None or int(times) > _MOST:
        raise PolicyError(
            f"{where}: {_units.shortened(text)} does not say which equations run in pieces",
            hint=AS_WRITTEN,
        )
    start, stop, pieces, equation, output, axis = map(int, found.groups())
    first = Division(start, stop, pieces, (equation, output), axis, tuple(loop))
    return tuple(first.shifted(k * int(step)) for k in range(int(times)))


# -- whether they fit a program -------------------------------------------------------------------


def read(texts: Sequence[str], program: Program, *, call: str) -> tuple[Division, ...]:
    """Read the lines of a plan about pieces, and check that they fit a program.

    Args:
        texts: the lines, as `lines` returns them.
        program: the flat program.
        call: the call of the user, as error messages quote it.

    Returns:
        The divisions in order. They do not overlap, and the equations and values that they name
        exist.

    Raises:
        PolicyError: a line does not fit the program. The message names the line and the reason.
    """
    found: list[Division] = []
    for text in texts:
        where = f"`{call}`: {_units.shortened(text)}"
        some = parse(text, where)
        if len(found) + len(some) > _MOST:
            raise unfit(f"{where}: a plan has at most {_MOST} divisions")
        for division in some:
            _check(division, program, where)
        found += some
    found.sort(key=lambda d: d.place)
    last: dict[tuple[int, ...], int] = {}
    for d in found:
        if d.start < last.get(d.loop, 0):
            raise unfit(f"`{call}`: {text_of(d)}: another segment in pieces overlaps it")
        last[d.loop] = d.stop
    for d in found:
        if any(d.holds(o) for o in found):
            raise unfit(f"`{call}`: {text_of(d)}: another segment in pieces lies inside of it")
    return tuple(found)


def _check(division: Division, program: Program, where: str) -> None:
    d = division
    for equation in d.loop:
        if equation >= len(program.eqns):
            raise unfit(f"{where}: there are only {len(program.eqns)} equations")
        eqn = program.eqns[equation]
        if eqn.primitive.name != "scan":
            raise unfit(f"{where}: loop {equation}: {_program.primitive_name(eqn)} is no scan")
        program = flat_program(eqn.params["jaxpr"])
    equation, output = d.of
    if d.stop > len(program.eqns):
        raise unfit(f"{where}: there are only {len(program.eqns)} equations")
    if not d.start <= equation < d.stop:
        raise unfit(f"{where}: equation {equation} lies outside of the segment")
    outvars: Sequence[Any] = program.eqns[equation].outvars
    if output >= len(outvars):
        name = _program.primitive_name(program.eqns[equation])
        raise unfit(f"{where}: {name} has no output {output}")
    rank = len(getattr(outvars[output].aval, "shape", ()))
    if d.axis >= rank:
        raise unfit(f"{where}: the value has {rank} axes, and no axis {d.axis}")
    entries = outvars[output].aval.shape[d.axis]
    if not 2 <= d.pieces <= entries:
        raise unfit(f"{where}: an axis of {entries} entries makes no {d.pieces} pieces")
