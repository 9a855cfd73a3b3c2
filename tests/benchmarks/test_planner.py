"""The benchmark of the planner: its summary, its table, and when its plans are sound."""

import json

import jax
import jax.numpy as jnp
import planner
import pytest
from shapes import struct

from remat_kit._chip.target import target
from remat_kit._planner.costs.build import trace
from remat_kit._policy.schedule import LoopPart, Segment


def point(peak, seconds, gap=0.0, work=None):
    return {
        "predicted_peak_bytes": peak * planner.MIB,
        "extra_seconds": seconds,
        "saved_bytes": 0,
        "extra_work": work if work is not None else seconds,
        "extra_flops_fraction": seconds,
        "extra_products_fraction": seconds / 2,
        "bound_extra_work": 0.0,
        "gap": gap,
    }


def plan(budget, peak):
    """A plan that compiled to ``peak`` MiB, predicted exactly."""
    return {
        "budget": str(budget),
        "budget_bytes": None if budget == "min" else budget * planner.MIB,
        "predicted_peak_bytes": peak * planner.MIB,
        "compiled_peak_bytes": peak * planner.MIB,
        "baseline_temp_bytes": 100 * planner.MIB,
        "compiled_temp_bytes": (peak - 10) * planner.MIB,
        "extra_flops_fraction": 0.5,
        "extra_products_fraction": 0.75,
        "extra_seconds": 0.5,
        "extra_work": 0.5,
        "bound_extra_work": 0.25,
        "gap": 0.125,
        "policy": "planned(...)",
    }


FRONT = {
    "points": [point(30, 1.0, 0.3), point(50, 0.5, 0.2), point(60, 0.25, 0.1), point(110, 0.0)],
    "leaner": [point(29, 2.0)],
    "argument_bytes": 10 * planner.MIB,
    "planning_seconds": 1.0,
    "equations": 7,
    "forward_seconds": 2.0,
}
WANTED = {
    "model": "mlp",
    "target": "cpu",
    "objective": "time",
    "budgets": ["50", "5"],
    "planner": 7,
    "versions": {"jax": "1.0"},
}
RAW = {
    **WANTED,
    "frontier": FRONT,
    "plans": [plan(50, 50), {"budget": "5", "error": "too little\nhint: more"}],
}


def shown(raw):
    """The table of one row."""
    about = {"command": "python benchmarks/planner.py", "date": "2030-01-01"}
    report = about | {key: raw[key] for key in ("versions", "target", "objective")}
    return planner.rendered(report | {"rows": [planner.summarized(raw)]})


def test_the_summary_has_no_points_and_no_policies():
    row = planner.summarized(RAW)
    assert {key: row[key] for key in WANTED} == WANTED
    assert row["frontier"]["points"] == 4
    first, last = FRONT["points"][0], FRONT["points"][-1]
    assert row["frontier"]["ends"] == [
        planner._common.without(p, "saved_bytes") for p in (first, last)
    ]
    assert "leaner" not in row["frontier"]
    found, error = row["plans"]
    assert "policy" not in found
    # The second point has the plan's work, so the frontier predicted 50 MiB of it.
    assert found["first_predicted_peak_bytes"] == 50 * planner.MIB
    assert error == RAW["plans"][1]


def test_shares_have_the_plans_of_the_least_work_for_a_share_of_the_activations():
    # Of the 100 MiB beside the arguments, 0.3, 0.4 and 0.5 leave 40, 50 and 60 MiB in all.
    shares = planner.summarized(RAW)["shares"]
    assert [found["share"] for found in shares] == [0.3, 0.4, 0.5]
    assert [found["point"]["gap"] for found in shares] == [0.3, 0.2, 0.1]
    assert "saved_bytes" in FRONT["points"][0]
    assert "saved_bytes" not in shares[0]["point"]
    assert planner.point_at(FRONT, 0.1) is None
    slow = point(20, 2.0, work=0.01)  # takes the most time, and has the least work
    assert planner.point_at({**FRONT, "points": [slow, *FRONT["points"]]}, 0.5) == slow


def test_the_table_shows_the_summary():
    table = shown(RAW)
    assert "| mlp | 7 | 1.0 | 4 | 30 – 110 | 1.000 | 0.500 |" in table
    assert "| mlp | 0.4 | 50 | 0.500 | 0.250 | 0.250 | 0.200 |" in table
    line = "| mlp | 50 | 100 → 40 | 60 % | 0.500 | 0.750 | 0.250 | 0.125 | 1.000 | 1.000 | yes |"
    assert line in table
    assert "| mlp | 5 | too little | | | | | | | | no |" in table
    assert "Planned for cpu, objective time." in table
    lean = {**FRONT, "points": FRONT["points"][2:]}
    assert "| mlp | 0.3 | none | | | | |" in shown({**RAW, "frontier": lean, "plans": []})


def test_products_alone_are_those_of_matrix_products_and_convolutions():
    """Around and inside of scans; what is elementwise has no FLOPs."""

    def loss(ws, kernel, x):
        with jax.named_scope("first"):
            image = jax.lax.conv(x.reshape(4, 1, 8, 64), kernel, (1, 1), "SAME")
            x = jnp.sin(image.reshape(32, 64))
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(jnp.sin(x @ w) @ w), None), x, ws)
        return jnp.sum(jnp.tanh(x @ ws[0]))

    args = struct(6, 64, 64), struct(1, 1, 3, 3), struct(32, 64)
    graph = trace(loss, args, target("h100"), (0, 1))
    products = planner.products_only(graph)
    conv, each = 2 * 9 * 32 * 64, 2 * 32 * 64 * 64
    assert products.forward_flops == conv + 13 * each < graph.forward_flops
    n = len(graph.equations)
    (scan,) = [e for e in graph.equations if e.loop is not None]
    assert scan.loop is not None
    body = (Segment(0, len(scan.loop.graph.equations)),)
    schedule = (
        Segment(0, scan.index),
        Segment(scan.index, n, plain=True, loops=((scan.index, (LoopPart(6, 1, body),)),)),
    )
    # All but the last product, which is in no region.
    again = planner.products_again(products, schedule)
    assert again == pytest.approx((conv + 12 * each) / (conv + 13 * each))
    plain = (Segment(0, n, plain=True),)
    assert planner.products_again(products, plain) == 0.0


@pytest.mark.parametrize(
    ("plans", "sound"),
    [
        ([plan("min", 20), plan(30, 30), plan(40, 35)], True),
        ([plan(40, 35), plan(30, 30)], True),
        ([plan(30, 31)], False),  # over its budget
        ([plan(30, 30), plan(40, 29)], False),  # a larger budget takes less
        ([{"budget": "5", "error": "too little"}, plan(30, 30)], True),
    ],
)
def test_sound_plans_fit_and_grow_with_their_budgets(plans, sound):
    assert planner.are_sound(plans) is sound


def test_a_model_is_kept_until_something_changes(capsys, monkeypatch, tmp_path):
    """Models of earlier runs stay in the file, except for those of another objective."""
    taken = []

    def row_of(case, wanted):
        taken.append(case.name)
        return {**wanted, "frontier": FRONT, "plans": []}

    monkeypatch.setattr(planner, "row_of", row_of)
    path = tmp_path / "planner.json"

    def run(model, *more):
        taken.clear()
        asked = ["--target", "cpu", "--json", str(path), "--model", model, *more]
        assert planner.main(asked) == 0
        capsys.readouterr()
        return [*taken], [row["model"] for row in json.loads(path.read_text())["rows"]]

    mlp, gpt = planner.CASES["mlp32"].name, planner.CASES["gpt12"].name
    assert run("gpt12") == ([gpt], [gpt])
    assert run("mlp32") == ([mlp], [mlp, gpt])
    assert run("gpt12") == ([], [mlp, gpt])
    assert run("gpt12", "--budget", "0.5") == ([gpt], [mlp, gpt])
    monkeypatch.setattr(planner, "REVISION", -1)
    assert run("mlp32") == ([mlp], [mlp, gpt])
    assert run("mlp32", "--objective", "time") == ([mlp], [mlp])


@pytest.mark.slow
def test_benchmark_of_the_planner(capsys, tmp_path):
    path = tmp_path / "planner.json"
    asked = ["--smoke", "--target", "cpu", "--budget", "free", "--json", str(path)]
    assert planner.main(asked) == 0
    shown = capsys.readouterr().out
    assert "residual MLP" in shown
    report = json.loads(path.read_text())
    assert planner.rendered(report) + "\n" == shown == path.with_suffix(".md").read_text()
    assert all(planner.are_sound(row["plans"]) for row in report["rows"])


@pytest.mark.slow
def test_plans_are_predicted():
    """The first program that is compiled corrects the predictions of the others."""
    size = {"batch": 4096, "width": 64, "layers": 12, "features": 64}
    case = planner.Case("residual MLP, 12 blocks", "residual_mlp", size)
    wanted = planner.wanted_row(case, "cpu", ["min", "0.4", "0.6", "0.8"], "balanced")
    first, *others = planner.summarized(planner.row_of(case, wanted))["plans"]
    assert planner.are_sound([first, *others])
    for found in others:
        assert 0.95 < found["predicted_peak_bytes"] / found["compiled_peak_bytes"] < 1.08
        assert found["first_predicted_peak_bytes"] is not None
