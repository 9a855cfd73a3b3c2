"""What the commands answer."""

import json
import pathlib

from remat_kit._chip.target import targets
from remat_kit._policy import recipe as _recipe

ROOT = pathlib.Path(__file__).parents[2]
MLP = "models/mlp.py:build"
SMALL = ["--size", "batch=8", "features=16", "hidden=32"]


def test_measure_has_the_baseline_first(run):
    status, out, err = run("measure", MLP, *SMALL, "--policy", "dots", "nothing")
    assert status == 0
    lines = [line.split()[:2] for line in out.splitlines()[5:]]
    assert out.startswith("Without a policy the gradient needs ")
    rows, footer = lines[:3], lines[3:]
    assert rows == [["none", "cpu"], ["dots", "cpu"], ["nothing", "cpu"]]
    assert all(word in ("note:", "lint:") for word, _ in footer)
    assert err.splitlines() == [
        "1/3 compiling for cpu without a policy",
        "2/3 compiling for cpu with dots",
        "3/3 compiling for cpu with nothing",
    ]


def test_measure_writes_what_it_shows(run, tmp_path):
    path = tmp_path / "out.json"
    argv = ["measure", MLP, *SMALL, "--policy", "none", "--policy", "dots", "--target", "cpu"]
    status, out, _ = run(*argv, "--json", path)
    assert status == 0
    found = json.loads(path.read_text())
    assert found["model"] == MLP
    assert found["size"] == {"batch": 8, "features": 16, "hidden": 32}
    assert [p["policy"] for p in found["policies"]] == ["none", "dots"]
    memory = found["policies"][1]["memory"]["cpu"]
    assert memory["fits"] is True
    assert memory["peak_bytes"] == (
        memory["argument_bytes"]
        + memory["output_bytes"]
        - memory["alias_bytes"]
        + memory["temp_bytes"]
    )
    # Three weights, three biases and the batch, in four bytes each.
    parameters = 16 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10
    assert memory["argument_bytes"] == 4 * (parameters + 8 * 16 + 8)
    status, out, _ = run(*argv, "--json", "-")
    assert status == 0
    again = json.loads(out)
    assert again["policies"][1]["memory"]["cpu"]["temp_bytes"] == memory["temp_bytes"]
    assert again["policies"][1]["memory"]["cpu"]["cached"] is True


def test_local_runs_the_program(run):
    status, out, _ = run("measure", MLP, *SMALL, "--target", "local", "--json", "-")
    assert status == 0
    assert json.loads(out)["policies"][0]["memory"]["local"]["step_seconds"] > 0


def test_a_target_that_is_too_small(run):
    status, out, _ = run("measure", MLP, *SMALL, "--target", "cpu@1KiB", "--json", "-")
    assert status == 0
    memory = json.loads(out)["policies"][0]["memory"]["cpu@1KiB"]
    assert memory["fits"] is False
    assert memory["headroom_bytes"] < 0


KEYS = {"saved_bytes", "saved", "recomputed", "recomputed_flops", "forward_flops", "memory"}


def test_inspect_compares_side_by_side(run, tmp_path):
    path = tmp_path / "out.json"
    status, out, err = run(
        *("inspect", MLP, *SMALL, "--policy", "nothing", "--policy", "dots"),
        *("--target", "cpu", "--json", path),
    )
    assert status == 0, err
    assert all(name in out for name in ("none", "nothing", "dots"))
    assert "2/3 compiling for cpu with nothing" in err
    reports = json.loads(path.read_text())["policies"]
    assert [report["policy"] for report in reports] == ["none", "nothing", "dots"]
    for report in reports:
        assert set(report) >= KEYS | {"hlo_recomputed_ops"}
        assert report["memory"]["cpu"]["temp_bytes"] > 0
        assert report["saved_bytes"] > 0
    assert reports[0]["recomputed"] == []
    assert reports[1]["recomputed"] != []


def test_a_policy_goes_through_the_builder_or_to_module_paths(run):
    def saved_bytes(*more):
        status, out, err = run("inspect", MLP, *SMALL, "--policy", "nothing", "--json", "-", *more)
        assert status == 0, err
        return [report["saved_bytes"] for report in json.loads(out)["policies"]]

    through, at = saved_bytes(), saved_bytes("--at", "*/block_*")
    assert through == at
    first = saved_bytes("--at", "*/block_0")
    assert first[0] == through[0] > first[1] > through[1]


def test_inspect_without_a_target_compiles_nothing(run, monkeypatch):
    from remat_kit._chip import compile as _compile

    def refuse(*args, **kwargs):
        raise AssertionError("compiled")

    monkeypatch.setattr(_compile, "compile_program", refuse)
    status, out, err = run("inspect", MLP, *SMALL)
    assert status == 0, err
    assert "MLP/block_*" in out


def test_diff_shows_one_repeated_relu_for_each_hidden_layer(run):
    argv = ["diff", MLP, *SMALL, "--size", "layers=3", "--policy", 'recompute(primitive("max"))']
    status, out, err = run(*argv)
    assert status == 0, err
    assert "3 operations computed twice" in out
    status, out, err = run(*argv, "--json", "-")
    assert status == 0, err
    (diff,) = json.loads(out)["diffs"]
    assert diff["policy"] == diff["after"] == 'recompute(primitive("max"))'
    again = [(d["primitive"], d["module"]) for d in diff["duplicates"]]
    assert sorted(again) == [("max", f"MLP/block_{i}") for i in range(3)]
    for duplicate in diff["duplicates"]:
        (fed,) = duplicate["feeds"]
        assert "dot_general" in fed
        assert f"gradient of {duplicate['module']}/dense" in fed


def test_full_diff_is_longer(run):
    argv = ["diff", MLP, *SMALL, "--policy", "nothing"]
    short, full = run(*argv)[1], run(*argv, "--full")[1]
    assert len(full.splitlines()) > len(short.splitlines())


def test_diff_needs_a_policy(refused):
    message, hint = refused("diff", MLP)
    assert "nothing to compare" in message
    assert "--policy" in hint


def test_policies_lists_every_preset(run):
    status, out, err = run("policies")
    assert (status, err) == (0, "")
    assert all(recipe.usage in out for recipe in _recipe.recipes())
    status, out, _ = run("policies", "--json", "-")
    listed = json.loads(out)["policies"]
    assert [p["name"] for p in listed] == [r.name for r in _recipe.recipes()]


def test_policies_shows_one_by_name_alias_parameter_or_text(run):
    assert "save(dots)" in run("policies", "dots")[1]
    assert "maxtext_minimal" in run("policies", "minimal")[1]
    assert "uniform(2)" in run("policies", "uniform:2")[1]
    assert "save(dots & ~named('x'))" in run("policies", "save(dots - named('x'))")[1]
    status, out, _ = run("policies", "uniform:2", "--json", "-")
    assert (status, json.loads(out)["policy"]) == (0, "uniform(2)")


def test_targets_lists_every_chip(run):
    status, out, err = run("targets")
    assert (status, err) == (0, "")
    rest = (": pip install", "note: ")
    lines = [line for line in out.splitlines()[3:] if not any(text in line for text in rest)]
    listed = {line.split()[0]: line for line in lines}
    assert set(listed) == {chip.name for chip in targets()}
    for chip in targets():
        assert ("needs remat-kit[" in listed[chip.name]) is not chip.available
    by_name = {t["name"]: t for t in json.loads(run("targets", "--json", "-")[1])["targets"]}
    assert by_name["tpu-v5e"]["memory_bytes"] == 15.75 * 2**30
    assert by_name["h100"]["links"] == {"nvlink": 450e9, "pcie": 64e9, "network": 50e9}
    assert by_name["tpu-v5p"]["host_memory_bytes"] == 448 * 2**30 / 4
    assert "h100:4x8" in out
    assert "nvlink 450" in run("targets", "--full")[1]
