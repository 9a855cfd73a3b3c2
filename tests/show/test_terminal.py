"""Tables that fit into a terminal: what goes, what wraps, what is cut."""

import io

import pytest
from rich.console import Console

from remat_kit._show.table import Table
from remat_kit._show.terminal import laid_out, shortened, wrapped

ROWS = [
    ("cpu", "0 B", "Net/block_*/attention/projection", "a sentence that is too long for a line"),
    ("h100", "0 B", "Net/block_*/mlp", "another sentence"),
]
COLUMNS = ("chip", "host", "module", "why")


def test_what_fits_is_as_it_is():
    laid = laid_out(("a", "b"), [("1", "x"), ("2", "y")], 80)
    assert (laid.head, laid.body, laid.notes) == ("a  b", ("1  x", "2  y"), ())


def test_a_column_that_says_the_same_everywhere_is_said_once():
    laid = laid_out(COLUMNS, ROWS, 200)
    assert "host" not in laid.head
    assert laid.notes == ("in every row: host 0 B",)
    assert laid_out(COLUMNS, ROWS[:1], 200).head.split() == ["chip", "host", "module", "why"]
    same = [("cpu", ""), ("cpu", "")]
    assert laid_out(("chip", "empty"), same, 80).head == "chip"  # something must be left


@pytest.mark.parametrize("width", range(30, 110, 7))
def test_no_line_is_longer_and_no_word_is_broken(width):
    laid = laid_out(COLUMNS, ROWS, width, spare=("module",))
    lines = (laid.head, *laid.body)
    assert all(len(line) <= width for line in lines)
    whole = {word for row in (COLUMNS, *ROWS) for cell in row for word in cell.split()}
    for line in lines:
        for word in line.split():
            assert word in whole or word.endswith("…")


def test_sentences_wrap_and_names_end_in_an_ellipsis():
    laid = laid_out(COLUMNS, ROWS, 50)
    assert laid.body[0].startswith("cpu   Net/block_*/attention…")
    assert laid.body[1].strip() in ROWS[0][3]
    assert laid.notes[-1] == "with long names cut: --full shows all"


def test_spare_columns_go_first():
    laid = laid_out(COLUMNS, ROWS, 40, spare=("module",))
    assert laid.head == "chip  why"
    assert laid.notes == ("in every row: host 0 B", "without the columns module: --full shows all")


def test_a_table_that_cannot_be_narrow_enough_has_rows_of_lines():
    code = "remat_kit.policy('recompute(all)')"
    laid = laid_out(("lint", "what", "fix"), [("upcast", "this is a long story", code)], 30)
    assert laid.head == ""
    assert laid.body == (
        "upcast",
        "  what  this is a long story",
        f"  fix   {code}",
    )


def test_code_is_never_cut():
    code = "remat_kit.policy(" + "x" * 40 + ")"
    table = [("a", code), ("b", code + ".more")]
    assert code in " ".join(laid_out(("name", "how"), table, 40).body)
    assert laid_out(("name", "how"), table, 40, spare=("how",)).head == "name"


@pytest.mark.parametrize(
    ("text", "width", "wanted"),
    [
        ("short", 10, "short"),
        ("GPT/block_*/attn/value", 18, "GPT/block_*/attn…"),
        ("float32[8,16,128]", 14, "float32[8,16…"),
        ("/site-packages/optax/losses.py:40", 20, "…/losses.py:40"),
        ("averyverylongname", 8, "averyve…"),
    ],
)
def test_names_are_cut_at_the_end_of_a_part(text, width, wanted):
    assert shortened(text, width) == wanted


def test_long_words_are_not_wrapped():
    assert wrapped("a-word-with-hyphens 2", 5) == ["a-word-with-hyphens", "2"]
    assert wrapped("first\n\nlast", 9) == ["first", "", "last"]


def test_rich_prints_what_is_laid_out():
    stream = io.StringIO()
    table = Table("sizes", COLUMNS, tuple(ROWS), "a note", spare=("module",))
    Console(file=stream, width=40).print(table.rich())
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["sizes", "chip  why"]
    assert lines[-1] == "a note"
    assert max(map(len, lines)) <= 40


def test_an_empty_table_has_its_columns():
    assert laid_out(COLUMNS, [], 80).body == ()
