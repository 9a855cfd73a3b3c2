"""The comparison with a device, on the CPU at small sizes."""

import dataclasses
import json

import on_device
import pytest

from remat_kit import _jax


@pytest.mark.slow
@pytest.mark.skipif(
    _jax.JAX_VERSION < (0, 11), reason="XLA:CPU of JAX 0.10.2 does not bring the step to half"
)
def test_variants_run_and_are_held_against_what_was_planned(capsys, tmp_path):
    path = tmp_path / "table.json"
    given = ["--smoke", "--only", "mlp", "--folder", str(tmp_path / "plans"), "--json", str(path)]
    assert on_device.main(given) == 0
    (row,) = json.loads(path.read_text())["rows"]
    expected, found = row["expected"], row["variants"]
    assert set(found) == set(on_device.VARIANTS)
    for variant in on_device.VARIANTS:
        assert found[variant]["compiled_bytes"] == expected[variant]["peak_bytes"]
        assert found[variant]["seconds"] > 0
        assert found[variant]["allocated_bytes"] is None  # the CPU reports none
    assert found["same"]["compiled_bytes"] <= found["blocks"]["compiled_bytes"]
    assert found["half"]["compiled_bytes"] < found["none"]["compiled_bytes"]
    assert all(found[v]["difference"] < 1e-6 for v in ("blocks", "half", "same"))
    assert "| residual MLP | same |" in capsys.readouterr().out


@pytest.mark.slow
def test_variants_in_pieces_run_and_take_less(capsys, tmp_path):
    path = tmp_path / "table.json"
    given = ["--smoke", "--pieces", "--folder", str(tmp_path / "plans"), "--json", str(path)]
    assert on_device.main(given) == 0
    (row,) = json.loads(path.read_text())["rows"]
    expected, found = row["expected"], row["variants"]
    assert {"none", "least", "pieces"} <= set(found) <= set(on_device.IN_PIECES)
    for variant, figures in found.items():
        assert figures["compiled_bytes"] == expected[variant]["peak_bytes"]
    assert found["pieces"]["compiled_bytes"] < found["least"]["compiled_bytes"]
    assert all(found[v]["difference"] < 1e-5 for v in found if v != "none")
    assert "| GPT, tiny | pieces |" in capsys.readouterr().out


def test_a_variant_that_does_not_fit_is_not_run(tmp_path):
    expected = {
        "none": {"peak_bytes": 2 << 40, "fits": False},
        "blocks": {"error": "no blocks"},
        "fit": {"peak_bytes": 3 << 20},
    }
    (tmp_path / "mlp.json").write_text(json.dumps(expected))
    program = dataclasses.replace(on_device.SMOKE["mlp"], variants=("none", "fit"))
    (tmp_path / "mlp.fit.toml").write_text("")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("remat_kit.policy", lambda path: lambda fn: fn)
        assert set(on_device.variants(program, "mlp", tmp_path)) == {"fit"}
    figures = {"compiled_bytes": 3 << 20, "allocated_bytes": None, "seconds": 90.0, "steps": 1}
    row = {"title": "MLP", "expected": expected, "variants": {"fit": figures}}
    assert on_device._line(row, "none").startswith("| MLP | none | 2,097,152 | does not fit |")
    assert on_device._line(row, "blocks").startswith("| MLP | blocks | no blocks |")
    assert on_device._line(row, "fit") == "| MLP | fit | 3 | 3 | – | 90,000.0 |  |  |  |"


def test_a_long_step_is_taken_once():
    assert on_device._by_turns({}, ()) == {}
    assert on_device._differences({}, on_device.SMOKE["mlp"], ()) == {}


def test_a_program_that_fails_has_a_row_that_says_so(capfd, tmp_path):
    plans = tmp_path / "plans"
    plans.mkdir()
    (plans / "mlp.json").write_text("{}")
    given = ["run", "--only", "mlp", "--folder", str(plans), "--json", str(tmp_path / "t.json")]
    programs, on_device.PROGRAMS = on_device.PROGRAMS, on_device.SMOKE
    try:
        assert on_device.main(given) == 1
    finally:
        on_device.PROGRAMS = programs
    assert "the process ended with status 1: KeyError" in capfd.readouterr().out


def test_a_program_that_cannot_be_planned_is_tried_again(monkeypatch, tmp_path):
    def planned(program, target, stem):
        raise RuntimeError("no plan\nat all")

    monkeypatch.setattr(on_device, "planned", planned)
    monkeypatch.setattr(on_device, "PROGRAMS", on_device.SMOKE)
    plans, path = tmp_path / "plans", tmp_path / "t.json"
    for _ in range(2):
        ended = list(on_device.plan_all(on_device.SMOKE, "cpu", plans))
        assert ended == [("mlp", "RuntimeError: no plan"), ("gpt", "RuntimeError: no plan")]
    given = ["run", "--only", "mlp", "--folder", str(plans), "--json", str(path)]
    assert on_device.main(given) == 1
    assert json.loads(path.read_text())["rows"] == [
        {"program": "mlp", "error": "RuntimeError: no plan"}
    ]
    monkeypatch.setattr(on_device, "planned", lambda *_: {"none": {}})
    assert all(end.endswith(" s") for _, end in on_device.plan_all(on_device.SMOKE, "cpu", plans))
    assert [e for _, e in on_device.plan_all(on_device.SMOKE, "cpu", plans)] == ["is there"] * 2


def test_rows_of_the_same_versions_are_kept(tmp_path):
    path = tmp_path / "t.json"
    assert on_device.kept(path, {}) == {}
    path.write_text(json.dumps({"versions": {"jax": "1"}, "rows": [{"program": "mlp"}]}))
    assert on_device.kept(path, {"jax": "1"}) == {"mlp": {"program": "mlp"}}
    assert on_device.kept(path, {"jax": "2"}) == {}
