"""The training steps of `benchmarks/steps/` with and without a plan."""

import json
import subprocess
import sys

import pytest
import step_table

import remat_kit
from remat_kit import _jax


@pytest.mark.slow
@pytest.mark.skipif(
    _jax.JAX_VERSION < (0, 11), reason="XLA:CPU of JAX 0.10.2 does not bring Linen's step to half"
)
def test_a_program_trains_with_its_plan_as_without(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["step_table.py", "--smoke", "--json", str(tmp_path / "table.json")]
    )
    step_table.main()
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["program"] for row in rows] == ["linen", "accumulation"]
    for row in rows:
        assert row["compiled_bytes"] <= row["budget_bytes"] < row["before_bytes"]
        assert row["aliased_bytes"] == row["aliased_before_bytes"]
        assert row["difference"] < 1e-5
        assert row["compilations"] == 1
    assert "| accumulation | cpu |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", step_table.PROGRAMS)
def test_every_program(name):
    if not step_table.is_installed(name):
        pytest.skip(f"no {step_table.NEEDS[name]}")
    step_table.module("digits").make_small()
    row = step_table.row(name, "cpu", 3)
    assert row["compiled_bytes"] <= row["budget_bytes"] < row["before_bytes"]
    assert row["difference"] < 1e-4
    assert row["compilations"] == row["compilations_before"]


@pytest.mark.slow
def test_the_script_runs_by_itself():
    command = [sys.executable, str(step_table.STEPS / "script.py"), "--steps", "2"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.startswith("step 0: loss ")


@pytest.mark.slow
def test_a_plan_saves_in_the_scan_what_it_saves_of_the_loss_alone():
    step_table.module("digits").make_small()
    accumulation, plain = step_table.module("accumulation"), step_table.module("plain")
    step, args = accumulation.build()
    part = [x[: len(x) // accumulation.PARTS] for x in args[2:]]
    saved = []
    for fn, given in ((step, args), (plain.loss, (args[0], *part))):
        plan = remat_kit.plan(fn, *given, budget="min")
        saved.append(plan.baseline.temp_bytes - plan.compiled.temp_bytes)
    assert saved[0] == pytest.approx(saved[1], rel=0.05)
