"""Tables and lines of text that print as plain text, in a terminal and in a notebook.

The package `rich` prints them in a terminal, where `terminal` fits the tables into its width. This
module writes the plain text for pipes, files and doctests itself, which takes eight lines and no
import (`rich` takes 0.03 s of processor time), and the HTML too, because that of `rich` does not
follow the colours of a notebook.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from typing import Any

from remat_kit._show.terminal import laid_out, wrapped


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text with three renderings.

    Attributes:
        title, columns, rows, footer: its texts.
        spare: the columns that a narrow terminal leaves out, the first one first.

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
    spare: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the table as plain text with padded columns."""
        head, *rest = aligned([self.columns, *self.rows])
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join([self.title, head, rule, *rest, *filter(None, [self.footer])])

    def __str__(self) -> str:
        return self.text()

    def rich(self) -> Any:
        """Return the table for `rich`, fitted into the width of the terminal."""
        return _Fitted(self)

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


@dataclasses.dataclass(frozen=True)
class _Fitted:
    """A table as `rich` prints it."""

    table: Table

    def __rich_console__(self, console: Any, options: Any) -> Any:
        del console
        width = options.max_width
        laid = laid_out(self.table.columns, self.table.rows, width, self.table.spare)
        yield _unwrapped(wrapped(self.table.title, width), "bold")
        if laid.head:
            yield _unwrapped([laid.head], "cyan")
        yield _unwrapped(laid.body, "")
        notes = filter(None, (*laid.notes, self.table.footer))
        if lines := [line for text in notes for line in wrapped(text, width)]:
            yield _unwrapped(lines, "dim")


def _unwrapped(lines: Sequence[str], style: str) -> Any:
    from rich.text import Text

    return Text("\n".join(lines), style=style, no_wrap=True, overflow="ignore")


# For each mark of a line: its style in a terminal, and its colour in a notebook, which has a medium
# lightness so that it is legible on a white page and on a dark one.
_MARKS = {
    "+": ("green", "#2e9e44"),
    "-": ("red", "#d1484f"),
    "~": ("cyan", "#2a8fb3"),
    "⟲": ("yellow", "#c08a00"),
    "#": ("bold", ""),
}


@dataclasses.dataclass(frozen=True)
class Lines:
    """Lines of text, each with a mark that gives its colour, with the renderings of a `Table`.

    >>> print(Lines((("#", "heading"), ("+", "+ added"), ("", "common"))))
    heading
    + added
    common
    """

    marked: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """Return the lines as plain text."""
        return "\n".join(text for _, text in self.marked)

    def __str__(self) -> str:
        return self.text()

    def rich(self) -> Any:
        """Return the lines for `rich`."""
        from rich.text import Text

        lines = (Text(text, style=_MARKS.get(mark, ("",))[0]) for mark, text in self.marked)
        return Text("\n").join(lines)

    def html(self) -> str:
        """Return the lines as HTML that inherits the background of the page."""
        shown = []
        for mark, text in self.marked:
            _, colour = _MARKS.get(mark, ("", ""))
            style = f' style="color:{colour}"' if colour else ""
            shown.append(f"<span{style}>{html.escape(text)}</span>")
        body = "\n".join(shown)
        return f'<pre style="color:inherit;background:transparent">{body}</pre>'


def headed(text: str) -> Lines:
    """Return a headline, which opens an answer."""
    return Lines((("#", text),))


class Shown:
    """Base class of answers: they print as plain text, in a terminal and in a notebook."""

    def tables(self) -> Sequence[Table | Lines]:
        """Return what is shown, in order."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n\n".join(table.text() for table in self.tables())

    def __rich_console__(self, console: Any, options: Any) -> Any:
        del console, options
        for number, table in enumerate(self.tables()):
            yield from [""] * bool(number)
            yield table.rich()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print as text where IPython would print the repr, which contains every value."""
        del cycle
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return f'<div class="remat-kit">{"".join(table.html() for table in self.tables())}</div>'


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return each row as a line, with the columns padded to a common width.

    >>> aligned([("a", "bc", "d"), ("long", "", "e")])
    ['a     bc  d', 'long      e']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]


def document(title: str, body: str) -> str:
    """Return HTML as a page of its own.

    >>> document("a < b", "<p>text</p>")
    '<!doctype html><meta charset=utf-8><title>a &lt; b</title><p>text</p>\\n'
    """
    return f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>{body}\n"


_LONGEST = 40  # rows in a table


def cut(
    rows: Sequence[tuple[str, ...]], kind: str, longest: int = _LONGEST
) -> tuple[tuple[tuple[str, ...], ...], str]:
    """Return the first rows, and a sentence that says how many were left out."""
    left = len(rows) - longest
    return tuple(rows[:longest]), f"… and {left} more {kind}" if left > 0 else ""
