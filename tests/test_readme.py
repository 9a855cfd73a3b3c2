"""The README: its Python runs, its commands work, its figures are those of the results."""

import doctest
import json
import pathlib
import re
import shlex

import headline
import pytest
import readme_table

from remat_kit import _cli
from remat_kit._target import target
from remat_kit.testing import MemoryBaseline

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results" / "readme_table.json"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [
    match.group(0)
    for language, text in BLOCKS
    if language != "python"
    for match in re.finditer(r"\bremat-kit .*$", text, re.M)
]


def test_python_blocks_run_one_after_the_other(capsys, tmp_path):
    assert len(PYTHON) >= 3
    if not target("tpu-v5e").available:
        pytest.skip("the compiler for TPUs is not installed")
    namespace = {"__name__": "readme"}
    for number, block in enumerate(PYTHON):
        exec(compile(block, f"README.md, block {number}", "exec"), namespace)
    shown = capsys.readouterr().out
    assert "tpu-v5e" in shown
    assert "Net/block_*" in shown
    assert "16 operations computed twice" in shown
    temp_bytes, fits = shown.split()[-2:]
    assert int(temp_bytes) > 0
    assert fits == "True"
    namespace["test_the_step_fits"]()
    namespace["test_the_policy_changes_no_gradient"]()
    for update in (True, False):
        baseline = MemoryBaseline(tmp_path / "baseline.json", update=update)
        namespace["test_memory_does_not_grow"](baseline)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_works(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    argv = shlex.split(command)[1:]
    for name in ("tpu-v5e", "h100"):
        if name in argv and not target(name).available:
            pytest.skip(f"the compiler for {name} is not installed")
    assert _cli.main(argv) == 0
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


@pytest.mark.parametrize("row", headline.ROWS, ids=lambda row: row.planner)
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
    assert "planner_resnet50_h100.json is not there" in capsys.readouterr().err


def test_links_lead_somewhere():
    paths = re.findall(r"`([\w./]+/(?:README\.md)?|[A-Z]+\.md)`", README)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path
