"""Before and after: figures and modules, from reports, from JSON, from the command line."""

import json

import jax
import jax.numpy as jnp
import pytest

import remat_kit
from remat_kit import compare, inspect
from remat_kit._cli.main import main

W = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def loss(w):
    with jax.named_scope("block_0"):
        h = jnp.exp(jnp.tanh(w @ w) @ w)
    with jax.named_scope("block_1"):
        return jnp.sum(jnp.sin(h @ w))


def figures(found):
    return {f.name: f for f in found}


@pytest.fixture(scope="module")
def reports():
    return [inspect(loss, W, policy=p, target="cpu") for p in (None, "nothing")]


def test_what_shrank_and_what_grew(reports):
    before, after = reports
    change = compare(before, after)
    assert (change.before, change.after) == ("none", "nothing")
    totals = figures(change.figures)
    assert totals["saved"].change == after.saved_bytes - before.saved_bytes < 0
    assert totals["recomputed FLOPs"].change == after.recomputed_flops > 0
    peak = [r.memory["cpu"].peak_bytes for r in reports]
    assert (totals["peak, cpu"].before, totals["peak, cpu"].after) == tuple(peak)
    assert totals["step by roofline, cpu"].after > 0
    assert sum(f.change for f in change.saved) == totals["saved"].change
    assert {f.name for f in change.saved} == {"block_*"}
    walk = [r.readings["cpu"].peak.bytes for r in reports]
    assert sum(f.change for f in change.peak["cpu"]) == walk[1] - walk[0]


def test_equal_reports_have_no_change(reports):
    before, _ = reports
    change = compare(before, before)
    assert all(f.change == 0 for f in (*change.figures, *change.saved, *change.peak["cpu"]))
    assert len(change.tables()) == 1


def test_a_target_that_one_of_them_lacks_is_left_out(reports):
    _, after = reports
    change = compare(inspect(loss, W), after)
    assert not change.peak
    assert {f.name for f in change.figures} == {"saved", "offloaded", "recomputed FLOPs"}


def test_plain_reports_and_files(reports, tmp_path):
    before, after = reports
    path = tmp_path / "before.json"
    path.write_text(json.dumps(before.to_json()))
    expected = compare(before, after)
    assert compare(before.to_json(), after.to_json()).to_json() == expected.to_json()
    assert compare(path, after).to_json() == expected.to_json()
    both = remat_kit.Comparison((after, before))
    assert compare(both, before).before == "none"  # the report of the same policy
    assert json.loads(json.dumps(expected.to_json())) == expected.to_json()


def test_inspect_against(reports):
    before, _ = reports
    report = inspect(loss, W, policy="nothing", against=before)
    assert report.change is not None
    assert report.to_json()["against"]["before"] == "none"
    assert "none → nothing" in str(report)
    assert "by module: what changed" in report._repr_html_()
    assert inspect(loss, W).to_json()["against"] is None


@pytest.mark.parametrize("bad", [3, {}, {"policies": []}, "no/such/file.json"])
def test_what_is_no_report(reports, bad):
    with pytest.raises(remat_kit.UserError, match="report"):
        compare(bad, reports[0])


MODEL = """
import jax, jax.numpy as jnp

def build(policy=None, width=16):
    def loss(w):
        return jnp.sum(jnp.sin(jnp.tanh(w @ w)))
    if policy is not None:
        import remat_kit
        loss = remat_kit.policy(policy)(loss)
    return loss, (jax.ShapeDtypeStruct((width, width), jnp.float32),)
"""


def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    call = ["inspect", "model.py:build", "--policy", "dots"]
    assert main([*call, "--json", "before.json"]) == 0
    capsys.readouterr()
    out = ["--size", "width=32", "--against", "before.json", "--json", "after.json"]
    assert main([*call, *out]) == 0
    text = capsys.readouterr().out
    assert "none → none" in text
    assert "dots → dots" in text
    after = json.loads((tmp_path / "after.json").read_text())
    saved = [
        next(f for f in p["against"]["figures"] if f["name"] == "saved") for p in after["policies"]
    ]
    # jax 0.10 keeps one more value of a tanh: it writes 1 - tanh² out.
    values = (3 if jax.__version_info__ < (0, 11) else 2, 1)
    assert [(f["before"], f["after"]) for f in saved] == [
        (n * 16 * 16 * 4, n * 32 * 32 * 4) for n in values
    ]


def test_a_damaged_file_is_found_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "before.json").write_text("{")
    assert main(["inspect", "model.py:build", "--against", "before.json"]) == 2
    error = capsys.readouterr().err
    assert "it is not JSON" in error
    assert "hint:" in error
    assert "1/1" not in error
