"""Tables: rows of text that print as plain text, in a terminal and in a notebook."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text with three renderings.

    >>> print(Table("fruit", ("name", "number"), (("apple", "2"),)))
    fruit
    name   number
    -----  ------
    apple  2
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    footer: str = ""

    def text(self) -> str:
        """Return the table as plain text with padded columns."""
        grid = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in grid) for i in range(len(self.columns))]
        rule = tuple("-" * w for w in widths)
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in (self.columns, rule, *self.rows)
        ]
        return "\n".join([self.title, *lines, *filter(None, [self.footer])])

    def __str__(self) -> str:
        return self.text()

    def rich(self) -> Any:
        """Return the table for `rich`."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(self.title),
            caption=Text(self.footer) if self.footer else None,
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
        )
        for column in self.columns:
            table.add_column(Text(column), overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def html(self) -> str:
        """Return the table as HTML that inherits the colours of the page."""
        cell = 'style="text-align:left;padding:2px 12px 2px 0;border:0"'
        head = "".join(f"<th {cell}>{html.escape(c)}</th>" for c in self.columns)
        rows = "".join(
            "<tr>" + "".join(f"<td {cell}>{html.escape(c)}</td>" for c in row) + "</tr>"
            for row in self.rows
        )
        footer = f"<p>{html.escape(self.footer)}</p>" if self.footer else ""
        return (
            '<table style="border-collapse:collapse;font-size:90%;color:inherit;'
            'background:transparent;margin-bottom:1em">'
            f'<caption style="text-align:left;font-weight:bold">{html.escape(self.title)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{footer}"
        )


_LONGEST = 40  # rows in a table


def cut(
    rows: Sequence[tuple[str, ...]], kind: str, longest: int = _LONGEST
) -> tuple[tuple[tuple[str, ...], ...], str]:
    """Return the first rows, and a sentence that says how many were left out."""
    left = len(rows) - longest
    return tuple(rows[:longest]), f"… and {left} more {kind}" if left > 0 else ""
