"""The training steps of `benchmarks/steps/` with and without a plan."""

import importlib.util
import json
import subprocess
import sys

import pytest
import step_table

from remat_kit import _jax


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
    assert "| accumulation | cpu |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", step_table.PROGRAMS)
def test_every_program(name):
    if name.startswith("equinox") and importlib.util.find_spec("equinox") is None:
        pytest.skip("no equinox")
    row = step_table.row(name, "cpu", 3)
    assert row["compiled_bytes"] <= row["budget_bytes"] < row["before_bytes"]
    assert row["difference"] < 1e-4


@pytest.mark.slow
def test_the_script_runs_by_itself():
    command = [sys.executable, str(step_table.STEPS / "script.py"), "--steps", "2"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.startswith("step 0: loss ")
