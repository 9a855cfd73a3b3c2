"""The benchmark of planning time, at smoke size."""

import json

import jax
import pytest
import scale


@pytest.mark.slow
def test_each_program_is_planned_in_a_process_of_its_own(tmp_path, capsys):
    path = tmp_path / "scale.json"
    assert scale.main(["--smoke", "--json", str(path)]) == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    assert [row["program"] for row in report["rows"]] == [p.name for p in scale.SMOKE.values()]
    for row in report["rows"]:
        assert row["equations"] > 50
        assert row["points"] > 1
        assert 0 < row["planned_seconds"] <= row["limit_seconds"]
        assert row["least_bytes"] < row["most_bytes"]
        assert row["process_bytes_before"] <= row["process_bytes"]
    assert capsys.readouterr().out == scale.rendered(report) + "\n"


@pytest.mark.parametrize(("name", "least"), [("equal-1e3", 900), ("differing-1e3", 900)])
def test_the_programs_have_about_as_many_operations_as_their_names_say(name, least):
    loss, args = scale.built(scale.PROGRAMS[name])
    count = len(jax.make_jaxpr(loss)(*args).eqns)
    assert least < count < 1.2 * least


def test_layers_differ_where_the_name_says_so():
    alike = scale._layers(scale.PROGRAMS["equal-1e3"])
    differing = scale._layers(scale.PROGRAMS["differing-1e3"])
    assert len(set(alike)) == 1
    assert len(set(differing)) > 10


def test_too_slow_is_exit_status_1(monkeypatch, capsys):
    row = {"planned_seconds": 2.0, "limit_seconds": 1.0, "traced_seconds": 0.1, "equations": 9}
    row |= {"program": "one", "points": 3, "process_bytes_before": 1, "process_bytes": 2}
    monkeypatch.setattr(scale, "rows", lambda names: [row])
    assert scale.main(["--program", "equal-1e3"]) == 1
    assert "| one |" in capsys.readouterr().out
