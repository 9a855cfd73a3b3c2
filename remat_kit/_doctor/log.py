"""What does an out-of-memory message of XLA say?

The compiler for TPUs refuses a program that does not fit. On GPUs and CPUs a program fails when it
allocates memory, and XLA lists the largest buffers of the program. The formats were seen in
libtpu 0.0.52, in XLA's documentation of its errors (E1000, E0100, E0101), in reports of users of
earlier releases, and for CPUs in jaxlib 0.12.

>>> found = read_log("RESOURCE_EXHAUSTED: Out of memory allocating 70368744177664 bytes.")
>>> found.requested_bytes, found.headline
(70368744177664, 'The program ran out of memory: it asked for 64 TiB at once.')
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from remat_kit._errors import UserError
from remat_kit._show.table import Table
from remat_kit._units import format_bytes


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One of the largest allocations that a message lists.

    Attributes:
        bytes: its size.
        shape: its shape, as in ``f32[8,4096,4096]``, or "".
        op: the operation of JAX that makes it, with its module path, or "".
        source: the file and line of this operation, or "".
    """

    bytes: int
    shape: str = ""
    op: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """What an out-of-memory message says; None where it does not say it.

    Attributes:
        needed_bytes: the bytes that the program needs in all.
        available_bytes: the bytes that the device has, or that were free.
        requested_bytes: the bytes of the allocation that failed.
        program: the name of the compiled program.
        largest: the largest allocations, in the order of the message.
    """

    needed_bytes: int | None = None
    available_bytes: int | None = None
    requested_bytes: int | None = None
    program: str = ""
    largest: tuple[Allocation, ...] = ()

    @property
    def headline(self) -> str:
        """The message in one sentence."""
        who = f"The program `{self.program}`" if self.program else "The program"
        parts = [f"{who} ran out of memory"]
        has = "" if self.available_bytes is None else format_bytes(self.available_bytes)
        if self.needed_bytes is not None:
            parts[0] += f": it needs {format_bytes(self.needed_bytes)}"
            parts[0] += f", and {has} are available" if has else ""
        elif self.requested_bytes is not None:
            parts[0] += f": it asked for {format_bytes(self.requested_bytes)} at once"
            parts[0] += f", and {has} are available" if has else ""
        if self.largest:
            first = self.largest[0]
            what = " ".join(filter(None, [first.shape, first.op and f"of {first.op}"]))
            said = f"its largest allocation is {format_bytes(first.bytes)}"
            parts.append(f"{said}, {what}" if what else said)
        return "; ".join(parts) + "."

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return {"headline": self.headline, **dataclasses.asdict(self)}

    def table(self) -> Table:
        """Return the largest allocations."""
        rows = [(format_bytes(a.bytes), a.shape, a.op, a.source) for a in self.largest]
        return Table("largest allocations", ("bytes", "shape", "operation", "source"), tuple(rows))


_SIZE = r"([\d.]+\s*(?:[KMGTP](?:i?B)?|B|bytes)?)"


_NEEDED = (
    rf"total memory required[^()]*\({_SIZE}\) exceeds available",
    rf"Used {_SIZE} of [\d.]+[KMGTP]? hbm",
    rf"Total hbm usage >= {_SIZE}",
    rf"total allocation:\s+{_SIZE}",
    rf"Hbm usage: {_SIZE}",
)


_AVAILABLE = (
    rf"exceeds available HBM \({_SIZE}\)",
    rf"Used [\d.]+[KMGTP]? of {_SIZE} hbm",
    rf"exceeding available bytes: {_SIZE}",
    rf"There are {_SIZE} free",
    rf"^Limit:\s+{_SIZE}",
    rf"\bLimit:\s+{_SIZE}",
)


_REQUESTED = (
    rf"[Oo]ut of memory while trying to allocate {_SIZE}",
    rf"ran out of memory trying to allocate {_SIZE}",
    rf"[Oo]ut of memory allocating {_SIZE}",
    rf"Attempting to (?:allocate|reserve) {_SIZE}",
    rf"[Ff]ailed to allocate {_SIZE}",
)


_PROGRAM = (r"HLO module: ([\w.<>-]+?)\.?\s", r"Error loading program '([^']+)'")


_IS_ONE = re.compile(r"RESOURCE_EXHAUSTED|[Oo]ut of memory|ran out of memory|CompileTimeHbmOom")


def read_log(text: str, call: str = "doctor --log") -> OutOfMemory:
    """Return what the last out-of-memory message in a log says.

    Args:
        text: the log.
        call: the command, which errors quote.

    Raises:
        UserError: the log contains no such message.
    """
    if not _IS_ONE.search(text):
        raise UserError(
            f"`{call}`: the log contains no out-of-memory message of XLA",
            hint="such a message contains RESOURCE_EXHAUSTED; give the whole log, standard error "
            "included",
        )
    program = _last(_PROGRAM, text + "\n")
    return OutOfMemory(
        needed_bytes=_bytes(_last(_NEEDED, text)),
        available_bytes=_bytes(_last(_AVAILABLE, text)),
        requested_bytes=_bytes(_last(_REQUESTED, text)),
        program=program or "",
        largest=tuple(_allocations(text)),
    )


def _last(patterns: tuple[str, ...], text: str) -> str | None:
    """Return the last match of the first pattern that matches."""
    for pattern in patterns:
        if matches := re.findall(pattern, text, re.M):
            return matches[-1]
    return None


def _bytes(text: str | None) -> int | None:
    """Return a number of bytes: XLA's K, KB and KiB all mean 1,024 bytes.

    >>> _bytes("1.5G"), _bytes("6.00MiB"), _bytes("512 bytes"), _bytes("0B")
    (1610612736, 6291456, 512, 0)
    """
    found = text and re.match(r"([\d.]+)\s*([KMGTP]?)", text)
    if not found or not re.fullmatch(r"\d+(\.\d+)?", number := found[1].rstrip(".")):
        return None
    power = " KMGTP".index(found[2]) if found[2] else 0
    return int(float(number) * 2 ** (10 * power))


def _allocations(text: str) -> Iterator[Allocation]:
    """Yield the allocations of the last list: each begins with its number and its size."""
    starts = list(re.finditer(rf"(?:Buffer (\d+):|^\s*(\d+)\.)\s*Size: {_SIZE}", text, re.M))
    first = max((i for i, s in enumerate(starts) if (s[1] or s[2]) == "1"), default=0)
    for start in starts[first:]:
        block = re.split(r"={10,}|\n\s*\n", text[start.start() :], maxsplit=1)[0]
        shape = re.search(r"[Ss](?:ubs)?hape:\s*(\w+\[[\d,]*\])", block)
        op = re.search(r'op_name="([^"]*)"', block)
        file = re.search(r'source_file="([^"]*)"', block)
        line = re.search(r"source_line=(\d+)", block)
        source = f"{file[1]}:{line[1]}" if file and line else ""
        size = _bytes(start[3])
        if size is not None:
            yield Allocation(size, shape[1] if shape else "", op[1] if op else "", source)
