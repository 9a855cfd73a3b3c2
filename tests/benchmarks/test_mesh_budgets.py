"""The table of budgets on meshes: a smoke run, what is kept, and what counts as a fault."""

import json

import mesh_budgets
import pytest


@pytest.mark.slow
def test_smoke_run_is_kept(capsys, monkeypatch, tmp_path):
    path = tmp_path / "table.json"
    given = ["--smoke", "--json", str(path)]
    assert mesh_budgets.main(given) == 0
    report = json.loads(path.read_text())
    (row,) = report["rows"]
    assert (row["sharding"], row["target"], row["mesh"]) == ("fsdp", "cpu:2", "data=2")
    least, half, most = row["plans"]
    assert least["compiled_peak_bytes"] <= half["compiled_peak_bytes"] <= half["budget_bytes"]
    assert most["compiled_peak_bytes"] <= most["budget_bytes"] < row["none_bytes"]
    assert mesh_budgets.rendered(report) + "\n" == path.with_suffix(".md").read_text()

    def refused(*_):
        raise AssertionError("the model was taken again")

    monkeypatch.setattr(mesh_budgets, "row_of", refused)
    assert mesh_budgets.main(given) == 0
    assert json.loads(path.read_text())["rows"] == [row]
    other = tmp_path / "other.json"
    assert mesh_budgets.main(["--merge", str(path), "--json", str(other)]) == 0
    assert json.loads(other.read_text())["rows"] == [row]


def plan(budget, peak, predicted=None, first=None):
    predicted = peak if predicted is None else predicted
    return {
        "budget": 0.5,
        "budget_bytes": budget,
        "compiled_peak_bytes": peak,
        "predicted_peak_bytes": predicted,
        "first_predicted_peak_bytes": first,
        "extra_flops_fraction": 0.1,
    }


@pytest.mark.parametrize(
    ("plans", "count"),
    [
        ([plan(100, 90), plan(200, 150)], 0),
        ([{"budget": 0.2, "error": "too little"}, plan(200, 150)], 0),
        ([plan(100, 101)], 1),
        ([plan(100, 95), plan(200, 90)], 1),
        ([plan(100, 100, predicted=109)], 0),
        ([plan(100, 100, predicted=111)], 1),
        ([plan(100, 100, first=150)], 0),
        ([plan(100, 101, predicted=80)], 2),
    ],
)
def test_faults_are_counted(plans, count):
    assert len(mesh_budgets.faults({"plans": plans})) == count


def test_a_row_without_a_plan_is_shown():
    row = {"model": "GPT", "sharding": "dp", "mesh": "data=8", "target": "cpu:8"}
    line = mesh_budgets._line(
        row | {"none_bytes": 2**20, "plans": [{"budget": 0.2, "error": "no"}]}
    )
    assert "| 0 of 1 | 0 |" in line
