"""Tables: the same cells as plain text, in a terminal and in a notebook."""

import io

from rich.console import Console

from remat_kit._show.table import Table, cut

TABLE = Table("sizes <of> blocks", ("block", "bytes"), (("a[0]", "4"), ("b & c", "1024")), "end")


def test_plain_text_is_padded_to_the_widest_cell():
    assert TABLE.text().splitlines() == [
        "sizes <of> blocks",
        "block  bytes",
        "-----  -----",
        "a[0]   4",
        "b & c  1024",
        "end",
    ]


def test_a_terminal_shows_cells_as_they_are():
    out = io.StringIO()
    Console(file=out, width=60).print(TABLE.rich())
    shown = out.getvalue()
    for text in (TABLE.title, TABLE.footer, *TABLE.columns, *TABLE.rows[0], *TABLE.rows[1]):
        assert text in shown  # "[0]" is no markup


def test_html_is_escaped():
    shown = TABLE.html()
    assert "sizes &lt;of&gt; blocks" in shown
    assert "b &amp; c" in shown
    assert "<of>" not in shown
    assert shown.count("<tr>") == 3


def test_long_tables_say_how_many_rows_were_left_out():
    rows = tuple((str(i),) for i in range(5))
    assert cut(rows, "values", longest=3) == (rows[:3], "… and 2 more values")
    assert cut(rows, "values", longest=5) == (rows, "")
