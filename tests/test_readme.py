"""The README: its Python runs, its commands work, its figures are those of the results."""

import doctest
import json
import pathlib
import re
import shlex

import headline
import pytest
import readme_table

from remat_kit._chip.target import target
from remat_kit._cli import main as _main

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results" / "readme_table.json"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [
    match.group(0)
    for language, text in BLOCKS
    if language in ("", "console")
    for match in re.finditer(r"\bremat-kit .*$", text.replace("\\\n", ""), re.M)
]


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_each_python_block_runs_alone(number, capsys):
    exec(compile(PYTHON[number], f"README.md, block {number}", "exec"), {"__name__": "readme"})
    shown = capsys.readouterr().out
    if number == 0:  # it ends in a headline and a plan
        headline_line, plan = shown.splitlines()
        assert headline_line.startswith("The gradient needs 1")
        assert "cpu@96MiB has 96 MiB" in headline_line
        assert plan.startswith("cpu@96MiB: 9")
        assert "(budget 96 MiB)" in plan


def test_the_first_screen_is_shown():
    (shown,) = re.findall(r"^```text\n(.*?)^```", README, re.M | re.S)
    assert shown.startswith("The gradient needs 1")
    assert "cpu@96MiB: 9" in shown
    assert len(PYTHON) >= 3


# They compile many programs.
LONG = (
    "remat-kit max-batch",
    "remat-kit bench",
    "remat-kit measure models/gpt.py:build --size size=tiny scan=true layers=8",
    "remat-kit measure models/gpt.py:build --policy nothing dots --target cpu tpu",
)


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=pytest.mark.slow if c.startswith(LONG) else []) for c in COMMANDS],
)
def test_command_works(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    argv = shlex.split(command)[1:]
    for name in ("tpu-v5e", "h100"):
        if name in argv and not target(name).available:
            pytest.skip(f"the compiler for {name} is not installed")
    assert _main.main(argv) == 0
    shown = capsys.readouterr().out
    if "--json" in argv:
        assert json.loads(shown)["model"] == "models/mlp.py:build"
    assert shown.strip()


def test_every_command_is_shown():
    shown = {shlex.split(command)[1] for command in COMMANDS}
    looked_at = {"inspect", "diff", "measure", "max-batch", "fit", "plan", "frontier", "bench"}
    assert shown == looked_at | {"policies", "targets"}


def test_the_first_block_fits_a_screen():
    assert len(PYTHON[0].splitlines()) <= 40


def test_the_second_command_is_that_of_the_checks():
    (tests,) = re.findall(r"^pip install -e '\.\[dev\]' && (pytest.*)$", README, re.M)
    assert f'say "pytest" && {tests}\n' in (ROOT / ".ci" / "run").read_text()


@pytest.mark.skipif(not RESULTS.exists(), reason="no results in this checkout")
def test_figures_are_those_of_the_results():
    table = readme_table.rendered(json.loads(RESULTS.read_text(encoding="utf-8")))
    assert RESULTS.with_suffix(".md").read_text(encoding="utf-8") == table + "\n"
    assert readme_table.with_results(README, table) == README


@pytest.mark.parametrize("row", headline.ROWS, ids=lambda row: f"{row.case}-{row.chip}")
def test_the_first_table_is_that_of_the_results(row):
    files = ", ".join(row.files)
    line = headline.lines()[row]
    assert line in README.splitlines(), (
        f"the README's line of {row.name} on {row.chip} is not what benchmarks/results/ has in "
        f"{files}: run `python benchmarks/headline.py --update-readme`"
    )


def test_the_first_table_is_written_by_its_command(capsys, monkeypatch, tmp_path):
    begin, end = headline.BEGIN, headline.END
    assert readme_table.with_results(README, headline.rendered(), begin, end) == README
    copy = tmp_path / "README.md"
    copy.write_text(f"a\n{begin}\n{end}\n", encoding="utf-8")
    monkeypatch.setattr(readme_table, "README", copy)
    assert headline.main(["--update-readme"]) == 0
    assert copy.read_text(encoding="utf-8") == f"a\n{begin}\n{capsys.readouterr().out}{end}\n"
    assert doctest.testmod(headline).failed == 0
    monkeypatch.setattr(headline, "RESULTS", headline.ROOT / "nowhere")
    assert headline.main([]) == 2
    assert "planner_h100.json is not there" in capsys.readouterr().err


def test_links_lead_somewhere():
    paths = re.findall(r"`([\w./]+/(?:README\.md)?|(?:docs/)?\w+\.md)`", README)
    paths += re.findall(r"\]\(([^)]+)\)", README)
    assert len(paths) > 20
    for path in paths:
        assert (ROOT / path).exists(), path
