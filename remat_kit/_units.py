"""Bytes, seconds and FLOPs as text, and text as bytes.

Sizes are written in binary units (KiB, MiB, GiB); KB, MB and GB can be read too.
"""

from __future__ import annotations

import re
import reprlib
from typing import Any

from remat_kit._errors import PolicyError

MAX_BYTES = 2**63 - 1


# ---------------------------------------------------------------------------------------------
# Bytes
# ---------------------------------------------------------------------------------------------

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}


_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


_UNITS = {unit.upper(): size for unit, size in (_DECIMAL | _BINARY).items()}


_SIZE = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?(?:[eE]\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: int | str) -> int:
    """Read a size in bytes: an int, or a number with a unit.

    >>> parse_bytes("1.5MiB"), parse_bytes("2 kB"), parse_bytes(7)
    (1572864, 2000, 7)

    Args:
      text: ``kB``, ``MB``, ``GB``, … count in thousands, ``KiB``, ``MiB``, ``GiB``, … in 1024s; no
        unit or ``B`` means bytes. Case does not matter.

    Raises:
      PolicyError: not a number, negative, or not a unit.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if 0 <= text <= MAX_BYTES:
            return text
    elif isinstance(text, str):
        found = _SIZE.fullmatch(text)
        if found and found[2].upper() in _UNITS:
            size = _scaled(found[1].replace("_", ""), _UNITS[found[2].upper()])
            if size is not None:
                return size
    raise PolicyError(
        f"`parse_bytes({shortened(text)})`: this is not a size in bytes",
        hint="write a number of bytes, or a number with a unit: '512KiB', '1.5MiB', '16GB'",
    )


def _scaled(number: str, scale: int) -> int | None:
    """Return ``number * scale``, or None where that is more than 64 bits hold."""
    if len(number) > 40:
        return None
    if number.isdigit():
        size = int(number) * scale
        return size if size <= MAX_BYTES else None
    size = float(number) * scale
    return round(size) if size < MAX_BYTES else None


def shortened(value: Any) -> str:
    """Return the repr of what a user gave, bounded in length and depth, for a message.

    >>> shortened("short"), len(shortened("long" * 1000)) < 200
    ("'short'", True)
    """
    return _SHORTENED.repr(value)


_SHORTENED = reprlib.Repr()


_SHORTENED.maxstring = _SHORTENED.maxother = _SHORTENED.maxlong = 120


def format_bytes(n: float) -> str:
    """Write a size for a reader, in the largest binary unit that keeps it at 1 or more.

    >>> format_bytes(1572864), format_bytes(1234), format_bytes(0), format_bytes(-2048)
    ('1.5 MiB', '1.21 KiB', '0 B', '-2 KiB')

    Args:
      n: bytes; a negative number is a difference.
    """
    for unit, size in reversed(_BINARY.items()):
        if abs(n) >= size:
            return f"{_short(n / size)} {unit}"
    return f"{_short(n)} B"


def format_apart(first: int, second: int) -> tuple[str, str]:
    """Write two sizes that are compared: to the byte where they would look equal and are not.

    >>> format_apart(1536, 2048), format_apart(2**30, 2**30 + 1)
    (('1.5 KiB', '2 KiB'), ('1,073,741,824 bytes', '1,073,741,825 bytes'))
    """
    texts = format_bytes(first), format_bytes(second)
    if texts[0] != texts[1] or first == second:
        return texts
    return f"{first:,} bytes", f"{second:,} bytes"


def _short(x: float) -> str:
    digits = 2 if abs(x) < 10 else 1
    return f"{x:.{digits}f}".rstrip("0").rstrip(".")


def exact_bytes(n: int) -> int | str:
    """The shortest text that `parse_bytes` reads back as ``n``, for a repr."""
    for unit, size in reversed(_BINARY.items()):
        if n and n % size == 0:
            return f"{n // size}{unit}"
    return n


def format_seconds(seconds: float) -> str:
    """Write a duration for a reader.

    >>> format_seconds(0.01234), format_seconds(2.5e-6)
    ('12.3 ms', '2.5 µs')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def format_percent(share: float) -> str:
    """Write a fraction as a percentage with two significant digits, never with an exponent.

    >>> format_percent(0.00763), format_percent(0.5), format_percent(1.0), format_percent(2.5)
    ('0.76 %', '50 %', '100 %', '250 %')
    """
    percent = round(100 * share, 4)
    return f"{percent:.2g} %" if abs(percent) < 99.5 else f"{percent:.0f} %"


def format_flops(n: float) -> str:
    """Write a number of floating-point operations for a reader.

    >>> format_flops(2.5e9), format_flops(64)
    ('2.5 GFLOP', '64 FLOP')
    """
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}FLOP"
    return f"{n:.3g} FLOP"
