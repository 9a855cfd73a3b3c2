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


@pytest.mark.parametrize("chip", ["cpu", pytest.param("tpu-v5e", marks=pytest.mark.slow)])
def test_python_blocks_run_one_after_the_other(chip, capsys, tmp_path):
    """As they stand, and by default compiled for a CPU, which takes less time."""
    assert len(PYTHON) >= 3
    assert any('"tpu-v5e"' in block for block in PYTHON)
    if not target(chip).available:
        pytest.skip("the compiler for TPUs is not installed")
    namespace = {"__name__": "readme"}
    for number, block in enumerate(PYTHON):
        block = block.replace('"tpu-v5e"', f'"{chip}"')
        exec(compile(block, f"README.md, block {number}", "exec"), namespace)
    shown = capsys.readouterr().out
    assert chip in shown
    assert "Net/block_*" in shown
    assert "16 operations computed twice" in shown
    temp_bytes, fits = shown.split()[-2:]
    assert int(temp_bytes) > 0
    assert fits == "True"
    if chip == "tpu-v5e":  # its budget is of that chip
        namespace["test_the_step_fits"]()
    namespace["test_the_policy_changes_no_gradient"]()
    for update in (True, False):
        baseline = MemoryBaseline(tmp_path / "baseline.json", update=update)
        namespace["test_memory_does_not_grow"](baseline)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("**/*.md")), ids=lambda p: p.name)
def test_python_blocks_of_the_docs_run_one_after_the_other(page):
    text = page.read_text(encoding="utf-8")
    namespace = {"__name__": page.stem}
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


def test_the_tests_that_the_promises_name_are_there():
    text = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    assert all(f"## {number}. " in text for number in range(1, 6))
    for path in re.findall(r"`(tests/[\w/]+\.py|[A-Z]+\.md)`", text):
        assert (ROOT / path).exists(), path


# They compile many programs.
LONG = (
    "remat-kit max-batch",
    "remat-kit bench",
    "remat-kit measure models/gpt.py:build --size size=tiny --policy nothing dots --target cpu tpu",
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
    paths = re.findall(r"`([\w./]+/(?:README\.md)?|(?:docs/)?\w+\.md)`", README)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path
