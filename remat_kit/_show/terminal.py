"""Fit a table into the width of a terminal without breaking a word or a name.

A column that says the same in every row becomes one line below the table. Sentences wrap between
words. Long names end in an ellipsis, at the end of one of their parts where possible. If the table
is still too wide, the columns that it calls spare are left out, and at last every row becomes a few
lines. Nothing of this happens with ``--full`` or in a pipe.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

GAP = "  "


_PROSE = 4  # words; a column with so long a cell contains sentences, which wrap


_LEAST_PROSE, _LEAST_NAME = 14, 24  # characters to which a column is shortened at most


_LONGEST_FIRST = 48


_PLACE = re.compile(r"\S+/(\S+\.\w+:\d+)")


@dataclasses.dataclass(frozen=True)
class Laid:
    """A table as lines of text.

    Attributes:
        head: the line with the names of the columns, or "" if the rows have no columns.
        body: the rows.
        notes: what is the same in every row, and what was shortened or left out.
    """

    head: str
    body: tuple[str, ...]
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column; the first one of a table names its rows, and is not cut."""

    name: str
    cells: tuple[str, ...]
    is_first: bool = False

    @property
    def is_prose(self) -> bool:
        return any(len(cell.split()) >= _PROSE for cell in self.cells)

    @property
    def width(self) -> int:
        return max(map(len, (self.name, *self.cells)))

    @property
    def least(self) -> int:
        """The width below which the column cannot be read."""
        if self.is_prose:
            words = (len(word) for cell in self.cells for word in cell.split())
            return min(self.width, max([_LEAST_PROSE, len(self.name), *words]))
        is_code = any(cell.startswith("remat_kit.") for cell in self.cells)
        names_rows = self.is_first and self.width <= _LONGEST_FIRST
        if self.width <= _LEAST_NAME or is_code or names_rows:
            return self.width
        return max(_LEAST_NAME, len(self.name))


def laid_out(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, spare: Sequence[str] = ()
) -> Laid:
    """Return a table that is at most ``width`` characters wide.

    >>> laid = laid_out(("size", "chip"), [("1 KiB", "cpu"), ("2 KiB", "cpu")], 17)
    >>> laid.head, laid.body[0], laid.notes[0]
    ('size', '1 KiB', 'in every row: chip cpu')

    Args:
        columns: their names.
        rows: of cells.
        width: of the terminal, in characters.
        spare: the columns to leave out if the table is too wide, the first one first.
    """
    shown, notes = _without_constants(
        [
            _Column(name, cells, is_first=not number)
            for number, (name, cells) in enumerate(
                zip(columns, zip(*rows, strict=True), strict=True)
            )
        ]
        if rows
        else []
    )
    left_out: list[str] = []
    for name in [*spare, None]:
        if _total(c.least for c in shown) <= width:
            break
        if name is None:
            return Laid("", _records(columns, rows, width), ())
        if name in (c.name for c in shown):
            shown = [c for c in shown if c.name != name]
            left_out.append(name)
    widths = _widths(shown, width)
    cut = any(c.width > w and not c.is_prose for c, w in zip(shown, widths, strict=True))
    said = [f"without the columns {', '.join(left_out)}"] if left_out else []
    said += ["with long names cut"] if cut else []
    if said:
        notes.append(f"{' and '.join(said)}: --full shows all")
    head = GAP.join(c.name.ljust(w) for c, w in zip(shown, widths, strict=True)).rstrip()
    cells = zip(*(c.cells for c in shown), strict=True)
    body = [line for row in cells for line in _row(shown, row, widths)]
    return Laid(head, tuple(body), tuple(notes))


def _without_constants(columns: Sequence[_Column]) -> tuple[list[_Column], list[str]]:
    """Remove the columns that say the same in every row, and say it once."""
    if not columns or len(columns[0].cells) < 2:
        return list(columns), []
    constant = [c for c in columns if len(set(c.cells)) == 1]
    kept = [c for c in columns if c not in constant] or [columns[0]]
    said = [f"{c.name} {c.cells[0]}" for c in constant if c.cells[0] and c not in kept]
    return kept, [f"in every row: {'; '.join(said)}"] if said else []


def _total(widths: Iterable[int]) -> int:
    widths = list(widths)
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _widths(columns: Sequence[_Column], width: int) -> list[int]:
    """Return the widths of the columns: the widest ones become narrower until they fit."""
    widths = [c.width for c in columns]
    while _total(widths) > width:
        some = [i for i, c in enumerate(columns) if widths[i] > c.least]
        if not some:
            break
        widths[max(some, key=lambda i: widths[i])] -= 1
    return widths


def _row(columns: Sequence[_Column], cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of one row."""
    parts = [
        wrapped(cell, width) if column.is_prose else [shortened(cell, width)]
        for column, cell, width in zip(columns, cells, widths, strict=True)
    ]
    for number in range(max(map(len, parts))):
        line = (p[number] if number < len(p) else "" for p in parts)
        yield GAP.join(text.ljust(w) for text, w in zip(line, widths, strict=True)).rstrip()


def _records(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> tuple[str, ...]:
    """Return each row as lines: the first cell, then the name and the text of each other cell."""
    names = max(map(len, columns[1:]))
    lines: list[str] = []
    for row in rows:
        lines += wrapped(row[0], width)
        for name, cell in zip(columns[1:], row[1:], strict=True):
            indent = f"  {name.ljust(names)}  "
            texts = wrapped(cell, width - len(indent)) if cell else []
            for number, text in enumerate(texts):
                lines.append((" " * len(indent) if number else indent) + text)
    return tuple(lines)


def wrapped(text: str, width: int) -> list[str]:
    """Return a text as lines, broken between words only.

    >>> wrapped("one two three", 7)
    ['one two', 'three']
    """
    lines = [
        textwrap.wrap(line, max(1, width), break_long_words=False, break_on_hyphens=False) or [""]
        for line in text.split("\n")
    ]
    return [line for some in lines for line in some]


def shortened(text: str, width: int) -> str:
    """Return a name that is at most ``width`` characters long, with an ellipsis if it is cut.

    >>> shortened("GPT/block_*/attn/value", 18), shortened("a/very/long/path/gpt.py:12", 12)
    ('GPT/block_*/attn…', '…/gpt.py:12')
    """
    if len(text) <= width:
        return text
    place = _PLACE.fullmatch(text)
    if place and len(place[1]) + 2 <= width:
        return f"…/{place[1]}"
    room = text[: max(0, width - 1)]
    end = max((room.rfind(mark) for mark in "/ ,"), default=-1)
    return (room[:end] if 2 * end > width else room).rstrip(" ,") + "…"
