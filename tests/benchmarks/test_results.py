"""The committed results: they are small, and each table is what its script makes of the JSON."""

import doctest
import importlib
import json
import pathlib

import _common
import pytest

RESULTS = _common.ROOT / "benchmarks" / "results"
SCRIPTS = sorted((path.stem for path in RESULTS.parent.glob("[a-z]*.py")), key=len, reverse=True)


# The JSON of the compilers' facts is a table of several runs, by release of JAX.
REPORTS = sorted(path for path in RESULTS.glob("*.json") if path.stem != "compiler_facts")


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_table_is_made_from_the_json_beside_it(path):
    script = next(name for name in SCRIPTS if path.stem.startswith(name))
    if script == "train_cifar_like":
        pytest.importorskip("PIL")
    report = json.loads(path.read_text(encoding="utf-8"))
    table = importlib.import_module(script).rendered(report)
    assert path.with_suffix(".md").read_text(encoding="utf-8") == table + "\n"
    assert path.read_text(encoding="utf-8") == _common.as_text(report)
    assert {"command", "date", "versions"} <= set(report)


def test_the_results_take_less_than_a_megabyte():
    files = [path for path in RESULTS.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1e6
    assert {path.suffix for path in files} <= {".md", ".json", ".txt"}
    assert "benchmarks/results/raw/" in (_common.ROOT / ".gitignore").read_text().splitlines()


def test_a_report_is_written_with_its_table_and_its_raw_form(tmp_path):
    path = tmp_path / "report.json"
    raw = {"date": "today", "rows": [{"bytes": 3, "curve": [1, 3, 2]}, {"bytes": 4, "curve": []}]}
    _common.write(path, _common.without(raw, "curve"), "| table |", raw=raw)
    assert path.read_text().splitlines() == [
        '{"date":"today",',
        '"rows":[',
        '{"bytes":3},',
        '{"bytes":4}]}',
    ]
    assert path.with_suffix(".md").read_text() == "| table |\n"
    assert json.loads((tmp_path / "raw" / "report.json").read_text()) == raw
    other = pathlib.Path(tmp_path / "other.json")
    _common.write(other, {"rows": []}, "")
    assert not (tmp_path / "raw" / "other.json").exists()
    assert doctest.testmod(_common).failed == 0
