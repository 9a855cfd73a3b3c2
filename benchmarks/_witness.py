"""What the compiler itself says is alive: its dump of live ranges and of its buffer assignment.

XLA writes both files when it is asked to (``xla_dump_to``), on every backend. The assignment puts
each value at an offset of an allocation, the other file says from when to when each is alive; so
the bytes in use at every step follow, and how much of what the compiler reserves is gaps. It is a
second witness for the walk over the schedule, which reads neither file.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from remat_kit._chip.compile import Compiled, compile_program

Interval = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Placed:
    """A value of the program, where the compiler put it.

    Attributes:
        name: the instruction, with the place in its tuple: ``fusion.3{1}``.
        allocation, offset, bytes: which part of which allocation is its own.
        alive: the first and the last step of its life, as often as the file has it.
    """

    name: str
    allocation: int
    offset: int
    bytes: int
    alive: tuple[Interval, ...]


@dataclasses.dataclass(frozen=True)
class Witness:
    """The compiler's account of the device's memory.

    Attributes:
        reserved_bytes: arguments, outputs and every other allocation, constants left out.
        fixed_bytes: of these, what is there all the time: arguments and outputs.
        live_bytes: the fixed ones and the temporaries alive at the fullest step.
        step: the fullest, in the compiler's numbering.
        order: the instructions in that numbering.
        temporaries: every value in an allocation that is neither argument nor output.
    """

    reserved_bytes: int
    fixed_bytes: int
    live_bytes: int
    step: int
    order: tuple[str, ...]
    temporaries: tuple[Placed, ...] = dataclasses.field(repr=False)

    @property
    def gap_bytes(self) -> int:
        """What it reserves beyond what is alive at the fullest step."""
        return self.reserved_bytes - self.live_bytes

    def alive(self) -> list[Placed]:
        """Return the temporaries alive at the fullest step, one a place, largest first."""
        places: dict[Interval, Placed] = {}
        for value in self.temporaries:
            key = value.allocation, value.offset
            held = places.get(key)
            if _is_alive(value, self.step) and (held is None or held.bytes < value.bytes):
                places[key] = value
        return sorted(places.values(), key=lambda v: -v.bytes)


def witnessed(fn: Callable[..., Any], args: Sequence[Any], target: str) -> tuple[Compiled, Witness]:
    """Compile ``value_and_grad(fn)`` for a chip and read what the compiler writes about it."""
    with tempfile.TemporaryDirectory() as folder:
        options = dump_options(folder)
        compiled = compile_program(fn, args, target, cache=False, compiler_options=options)
        return compiled, read_folder(folder)


def dump_options(folder: str) -> dict[str, str]:
    """Return the options with which a compiler writes about one program into a folder."""
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": "True"}


def read_folder(folder: str) -> Witness:
    """Read what a compiler has written into a folder about its only program."""
    (assignment,) = pathlib.Path(folder).glob("*-buffer-assignment.txt")
    (ranges,) = pathlib.Path(folder).glob("*-live-range.txt")
    return read_dump(assignment.read_text(), ranges.read_text())


def read_dump(assignment: str, ranges: str) -> Witness:
    """Read the text of the two files.

    >>> read_dump(
    ...     "allocation 0: size 8, page 0, parameter 0, shape |f32[2]|:\\n"
    ...     " value: <1 x @0> (size=8,offset=0): f32[2]{0}\\n"
    ...     "allocation 1: size 24, page 0, preallocated-temp:\\n"
    ...     " value: <2 a @0> (size=8,offset=0): f32[2]{0}\\n"
    ...     " value: <3 b @0> (size=8,offset=16): f32[2]{0}\\n",
    ...     "  InstructionSequence:\\n    0:x\\n    1:a\\n    2:b\\n    3:c\\n"
    ...     "  BufferLiveRange:\\n    x{}:0-3\\n    a{}:1-2\\n    b{}:2-3\\n"
    ...     "  Live ranges at 2 (peak):\\n",
    ... )
    Witness(reserved_bytes=32, fixed_bytes=8, live_bytes=24, step=2, order=('x', 'a', 'b', 'c'))
    """
    order = tuple(_ORDER.findall(_between(ranges, "InstructionSequence:", "BufferLiveRange:")))
    alive = defaultdict(list)
    for name, first, last in _RANGE.findall(_between(ranges, "BufferLiveRange:", "Live ranges at")):
        alive[name].append((int(first), int(last)))
    sizes, fixed, temporaries = {}, 0, []
    for number, size, kind, values in _allocations(assignment):
        if _ELSEWHERE.search(kind):
            continue
        sizes[number] = size
        if _FIXED.search(kind):
            fixed += size
        else:
            temporaries += _placed(number, values, alive)
    step, most = _fullest(temporaries)
    return Witness(sum(sizes.values()), fixed, fixed + most, step, order, tuple(temporaries))


def _between(text: str, start: str, end: str) -> str:
    return text.partition(start)[2].partition(end)[0]


def _allocations(text: str) -> Iterator[tuple[int, int, str, str]]:
    for part in re.split(r"^allocation ", text.partition("\nUsed values")[0], flags=re.M)[1:]:
        head, _, values = part.partition("\n")
        found = _HEAD.match(head)
        assert found is not None, head
        yield int(found[1]), int(found[2]), found[3], values


def _placed(number: int, values: str, alive: Mapping[str, Sequence[Interval]]) -> Iterator[Placed]:
    for name, index, size, offset in _VALUE.findall(values):
        full = name + (index or "{}")
        yield Placed(full, number, int(offset), int(size), tuple(alive.get(full, ())))


def _is_alive(value: Placed, step: int) -> bool:
    return any(first <= step <= last for first, last in value.alive)


def _fullest(values: Sequence[Placed]) -> tuple[int, int]:
    """Return the step at which the most bytes are in use, and how many; a place counts once."""
    last = max((end for value in values for _, end in value.alive), default=0)
    steps: list[list[Placed]] = [[] for _ in range(last + 1)]
    for value in values:
        for begin, end in value.alive:
            for step in range(begin, end + 1):
                steps[step].append(value)
    used = [_covered(step) for step in steps]
    most = max(used)
    return used.index(most), most


def _covered(values: Iterable[Placed]) -> int:
    total, allocation, end = 0, -1, 0
    for value in sorted(values, key=lambda v: (v.allocation, v.offset)):
        if value.allocation != allocation:
            allocation, end = value.allocation, 0
        begin = max(value.offset, end)
        total += max(0, value.offset + value.bytes - begin)
        end = max(end, value.offset + value.bytes)
    return total


_HEAD = re.compile(r"(\d+): size (\d+)(.*)")
_FIXED = re.compile(r"parameter|maybe-live-out|output shape")
# Another memory than the device's, or none of its own: constants are in the program.
_ELSEWHERE = re.compile(r"color [1-9]|thread-local|constant")
_ORDER = re.compile(r"^\s+\d+:(\S+)$", re.M)
_RANGE = re.compile(r"^\s+(\S+?\{[\d,]*\}):(\d+)-(\d+)$", re.M)
_VALUE = re.compile(
    r"value: <\d+ (\S+?)(\{[\d,]+\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)"
)
