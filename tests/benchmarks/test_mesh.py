"""The table of sharded models at smoke size, and how runs take part in one table."""

import doctest
import json

import mesh
import pytest


@pytest.mark.slow
def test_a_sharded_model_with_every_policy(capsys, tmp_path):
    path = tmp_path / "mesh.json"
    assert mesh.main(["--smoke", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    out = capsys.readouterr().out
    assert path.with_suffix(".md").read_text() == out == mesh.rendered(report) + "\n"
    rows = {row["policy"]: row for row in report["rows"]}
    assert tuple(rows) == mesh.POLICIES
    assert {(row["target"], row["sharding"]) for row in rows.values()} == {("cpu:2", "fsdp")}
    plain, again, plan = rows["none"], rows["nothing"], rows["plan"]
    assert plain["repeated"] == 0 < again["repeated"] <= again["collectives"]
    assert plain["collectives"] + again["repeated"] >= again["collectives"]
    assert again["compiled_bytes"] < plain["compiled_bytes"]
    assert rows[mesh.KEEPING]["repeated"] < again["repeated"]
    assert rows[mesh.KEEPING]["collectives"] < again["collectives"]
    assert plan["compiled_bytes"] <= plan["budget_bytes"] == again["compiled_bytes"]
    assert plan["predicted_bytes"] == pytest.approx(plan["compiled_bytes"], rel=0.1)
    for row in rows.values():
        assert row["step_seconds"] > row["link_seconds"] > 0
        assert row["moved_bytes"] > row["repeated_bytes"] >= 0


def row(policy, target="cpu:8@16GiB", **figures):
    names = {"model": "GPT", "sharding": "dp", "mesh": "data=8", "target": target}
    return names | {"policy": policy, "versions": {"jax": target}} | figures


def test_rows_of_an_earlier_run_stay():
    case = mesh.CASES["gpt"]
    report = None
    for found in (row("none", fits=1), row("plan", fits=2), row("none", "h100:8", fits=3)):
        report = mesh.merged(report, mesh.report_of(found, case, ["--target", found["target"]]))
    again = mesh.merged(report, mesh.report_of(row("none", fits=4), case, []))
    assert [(r["policy"], r["target"], r["fits"]) for r in again["rows"]] == [
        ("none", "cpu:8@16GiB", 4),
        ("plan", "cpu:8@16GiB", 2),
        ("none", "h100:8", 3),
    ]
    assert list(again["taken"]) == ["cpu:8@16GiB", "h100:8"]
    assert again["taken"]["h100:8"]["commands"] == ["python benchmarks/mesh.py --target h100:8"]
    assert len(again["taken"]["cpu:8@16GiB"]["commands"]) == 2
    assert again["taken"]["cpu:8@16GiB"]["versions"]["jax"] == "cpu:8@16GiB"


def test_a_budget_that_no_plan_meets_is_a_row():
    found = {"error": "no", "budget_bytes": 3 * 2**20}
    line = mesh._line(row("plan", **found))
    assert "no schedule within 3 |" in line
    assert line.count("|") == len(mesh.COLUMNS) + 1


def test_what_is_wrong_is_said(capsys, tmp_path):
    assert mesh.main(["--target", "nowhere:8", "--model", "gpt"]) == 2
    assert "nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        mesh.main(["--render", "--json", str(tmp_path / "none.json")])
    assert doctest.testmod(mesh).failed == 0
