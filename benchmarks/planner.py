"""Time the planner on real models and hold its plans against the compiler.

For each model: how long the frontier takes without compiling, its ends, and its plans for 0.3, 0.4
and 0.5 of the activations. With ``--budget``, a plan for each of them is compiled: does it fit, how
far off was the prediction, how much is computed twice. Recomputed work is shown as all FLOPs, as
those of matrix products and convolutions alone, which is what PyTorch's planner counts, and as
roofline time. The bound is that of the objective.

    python benchmarks/planner.py --model resnet50 --budget 0.37 0.62 --target cpu
    python benchmarks/planner.py --target h100 --json planner_h100.json

A model is written as soon as it is done. One that is in the file already, with the same planner,
versions, budgets and objective, is not taken again.

Exit status: 0 when done, 1 if a plan is over its budget or takes more memory than one for a larger
budget, 2 for a wrong call.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import _common
from _common import MIB, Case

import remat_kit
from remat_kit._planner import plan as _plan
from remat_kit._planner.costs.graph import CostGraph, Equation
from remat_kit._planner.costs.simulate import simulate
from remat_kit._planner.revision import REVISION

Row = dict[str, Any]

CASES = {
    "mlp32": Case("residual MLP, 32 blocks", "residual_mlp", {}),
    "resnet50": Case("ResNet-50, 64 images", "resnet", {"depth": 50, "batch": 64}),
    "resnet152": Case("ResNet-152, 16 images", "resnet", {"depth": 152, "batch": 16}),
    "gpt12": Case("GPT, 12 layers, 8 × 1024", "gpt", {"size": "small", "batch": 8}),
    "gpt72scan": Case("GPT, 72 layers, a scan", "gpt", {"layers": 72, "batch": 8, "scan": True}),
    "gpt72": Case("GPT, 72 layers, unrolled", "gpt", {"layers": 72, "batch": 8}),
    "gpt48": Case("GPT, 48 layers of 1600, 1 × 1024", "gpt", {"size": "xl", "batch": 1}),
    "densenet121": Case("DenseNet-121, 32 images", "densenet", {"depth": 121, "batch": 32}),
    "densenet201": Case("DenseNet-201, 16 images", "densenet", {"depth": 201, "batch": 16}),
    "nasnet": Case("NASNet-A, 64 images", "cells", {"arch": "nasnet", "batch": 64}),
}
SMOKE = {
    "mlp": Case("residual MLP, 4 blocks", "residual_mlp", {"batch": 64, "width": 8, "layers": 4}),
    "gpt": Case("GPT, 2 layers, a scan", "gpt", {"size": "tiny", "batch": 2, "scan": True}),
}


def row_of(case: Case, wanted: Row) -> Row:
    """Plan a model, compile a plan for each budget, and return all of it.

    Args:
        case: the model.
        wanted: what `wanted_row` returns.
    """
    fn, args = case.loss("none")
    options: dict[str, Any] = {"target": wanted["target"], "objective": wanted["objective"]}
    front = remat_kit.frontier(fn, *args, **options)
    plans = _plan.plans(fn, *args, budgets=wanted["budgets"], **options)
    products = products_only(front.graph)
    plain = front.to_json()
    for point, shown in zip(front.points, plain["points"], strict=True):
        shown["extra_products_fraction"] = products_again(products, point.schedule)
    found = [_described(plan, products) for plan in plans]
    for budget, plan in zip(wanted["budgets"], found, strict=True):
        plan["budget"] = budget
    return {**wanted, "frontier": plain, "plans": found}


def wanted_row(case: Case, chip: str, budgets: Sequence[str], objective: str) -> Row:
    """Return what a row must have in common with the one that would be taken now."""
    return {
        "model": case.name,
        "target": chip,
        "objective": objective,
        "budgets": [*budgets],
        "planner": REVISION,
        "versions": _common.versions(chip),
    }


def _described(plan: Any, products: CostGraph) -> dict[str, Any]:
    if isinstance(plan, Exception):
        return {"error": str(plan)}
    again = products_again(products, plan.point.schedule)
    return plan.to_json() | {"extra_products_fraction": again}


# What PyTorch's tracer counts: matrix products and convolutions.
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def products_only(graph: CostGraph) -> CostGraph:
    """Return a cost graph in which only matrix products and convolutions have FLOPs."""

    def counted(e: Equation) -> Equation:
        if e.loop is None:
            return e if e.primitive in _PRODUCTS else dataclasses.replace(e, flops=0.0)
        loop = dataclasses.replace(e.loop, graph=products_only(e.loop.graph))
        return dataclasses.replace(e, loop=loop, flops=loop.length * loop.graph.forward_flops)

    return dataclasses.replace(graph, equations=tuple(map(counted, graph.equations)))


def products_again(products: CostGraph, schedule: Any) -> float:
    """Return the FLOPs that a schedule recomputes, as a fraction of those of the forward pass.

    Args:
        products: the graph of the schedule, as `products_only` returns it.
        schedule: the schedule.
    """
    found = simulate(products, schedule).extra_flops
    return found / products.forward_flops if products.forward_flops else 0.0


def rendered(report: dict[str, Any]) -> str:
    """Return a report as Markdown."""
    lines = [
        "| model | operations | planning s | points | predicted MiB | at the least: extra FLOPs | "
        "products alone |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        front = row["frontier"]
        first, last = front["ends"]
        peaks = f"{first['predicted_peak_bytes'] / MIB:,.0f} – "
        peaks += f"{last['predicted_peak_bytes'] / MIB:,.0f}"
        lines.append(
            f"| {row['model']} | {front['equations']} | {front['planning_seconds']:.1f} | "
            f"{front['points']} | {peaks} | {first['extra_flops_fraction']:.3f} | "
            f"{first['extra_products_fraction']:.3f} |"
        )
    lines += [
        "",
        "| model | of the activations | predicted MiB | extra FLOPs | products alone | "
        "extra time | over the bound |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        lines += [_share_line(row["model"], row["frontier"], found) for found in row["shares"]]
    if any(row["plans"] for row in report["rows"]):
        lines += [
            "",
            "| model | budget | temporaries MiB, without → with | cut | extra FLOPs | "
            "products alone | extra time | over the bound | predicted / compiled peak | "
            "before any compile | fits |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
        ]
    for row in report["rows"]:
        seconds = row["frontier"]["forward_seconds"]
        lines += [_plan_line(row["model"], plan, seconds) for plan in row["plans"]]
    about = "Extra FLOPs, those of matrix products and convolutions alone, and extra roofline time "
    about += "in parts of those of the forward pass; over the bound in parts of the forward pass's "
    about += f"work. Planned for {report['target']}, objective {report['objective']}."
    about += _accuracy([plan for row in report["rows"] for plan in row["plans"]])
    return "\n".join([*lines, *_common.ending(report, about)])


def _accuracy(plans: Iterable[Mapping[str, Any]]) -> str:
    """Say how many peaks were predicted well; nothing if no plan was compiled."""
    found = [plan for plan in plans if "error" not in plan]
    if not found:
        return ""
    first = [plan for plan in found if plan["first_predicted_peak_bytes"]]

    def near(plans: Sequence[Mapping[str, Any]], which: str, share: float) -> int:
        peaks = [(plan[which], plan["compiled_peak_bytes"]) for plan in plans]
        return sum(abs(predicted - peak) <= share * peak for predicted, peak in peaks)

    return (
        f" Of {len(found)} plans, {near(found, 'predicted_peak_bytes', 0.05)} are predicted to "
        f"within 5 % of the compiled peak; before any compile, "
        f"{near(first, 'first_predicted_peak_bytes', 0.1)} of {len(first)} to within 10 %."
    )


SHARES = (0.3, 0.4, 0.5)
# What a report keeps of the points of a frontier, of the frontier, and of compiled plans.
_KEPT = (
    *("predicted_peak_bytes", "extra_flops_fraction", "extra_products_fraction"),
    *("extra_seconds", "extra_work", "bound_extra_work", "gap"),
)
_FRONTIER = ("planning_seconds", "equations", "argument_bytes", "forward_seconds")
_PLAN = (
    *("budget", "error", "budget_bytes", *_KEPT, "step_seconds", "tried", "notes"),
    *("compiled_peak_bytes", "compiled_temp_bytes", "baseline_temp_bytes"),
)


def summarized(raw: Row) -> Row:
    """Return a row without the points of its frontier and the policies of its plans.

    Of the points there remain their number, the first and the last, those for ``SHARES``, and what
    the frontier predicted of each plan.
    """
    points = raw["frontier"]["points"]
    ends = [_only(point, _KEPT) for point in (points[0], points[-1])]
    front = _only(raw["frontier"], _FRONTIER) | {"points": len(points), "ends": ends}
    plans = [_only(plan, _PLAN) for plan in raw["plans"]]
    for plan in plans:
        if "error" not in plan:
            plan["first_predicted_peak_bytes"] = first_prediction(points, plan)
    shares = []
    for share in SHARES:
        point = point_at(raw["frontier"], share)
        shares.append({"share": share, "point": point and _only(point, _KEPT)})
    return {**raw, "frontier": front, "shares": shares, "plans": plans}


def _only(found: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: found[key] for key in keys if key in found}


def point_at(front: Mapping[str, Any], share: float) -> Mapping[str, Any] | None:
    """Return the plan with the least extra work for a share of the activations, if one fits."""
    fixed, plain = front["argument_bytes"], front["points"][-1]["predicted_peak_bytes"]
    room = fixed + share * (plain - fixed)
    fitting = [p for p in front["points"] if p["predicted_peak_bytes"] <= room]
    return min(fitting, key=lambda p: p["extra_work"], default=None)


def _share_line(model: str, front: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    point = found["point"]
    if point is None:
        return f"| {model} | {found['share']} | none | | | | |"
    return (
        f"| {model} | {found['share']} | {point['predicted_peak_bytes'] / MIB:,.0f} | "
        f"{point['extra_flops_fraction']:.3f} | {point['extra_products_fraction']:.3f} | "
        f"{point['extra_seconds'] / front['forward_seconds']:.3f} | {point['gap']:.3f} |"
    )


def first_prediction(points: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> int | None:
    """Return what the frontier predicts of a plan, in bytes; None where the plan is none of its
    points, such as one that keeps less than the least of them.
    """
    found = [
        point["predicted_peak_bytes"]
        for point in points
        if point["extra_work"] == plan["extra_work"]
        and point["extra_flops_fraction"] == plan["extra_flops_fraction"]
    ]
    return found[0] if len(found) == 1 else None


def _plan_line(model: str, plan: dict[str, Any], forward_seconds: float) -> str:
    if "error" in plan:
        # Where the peak is does not belong in a table.
        said = plan["error"].splitlines()[0].partition("; its peak is")[0]
        return f"| {model} | {plan['budget']} | {said} | | | | | | | | no |"
    before, after = plan["baseline_temp_bytes"], plan["compiled_temp_bytes"]
    fits = "yes" if fits_budget(plan) else "no"
    ratio = plan["predicted_peak_bytes"] / plan["compiled_peak_bytes"]
    first = plan["first_predicted_peak_bytes"]
    raw = f"{first / plan['compiled_peak_bytes']:.3f}" if first else ""
    return (
        f"| {model} | {plan['budget']} | {before / MIB:,.0f} → {after / MIB:,.0f} | "
        f"{100 * (1 - after / before):.0f} % | {plan['extra_flops_fraction']:.3f} | "
        f"{plan['extra_products_fraction']:.3f} | "
        f"{plan['extra_seconds'] / forward_seconds:.3f} | {plan['gap']:.3f} | "
        f"{ratio:.3f} | {raw} | {fits} |"
    )


def fits_budget(plan: Mapping[str, Any]) -> bool:
    """Tell whether a plan compiled to no more than its budget."""
    budget = plan.get("budget_bytes")
    return "error" in plan or budget is None or plan["compiled_peak_bytes"] <= budget


def are_sound(plans: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether the plans of one model fit, and none for a larger budget takes less memory."""
    compiled = sorted(
        (plan.get("budget_bytes") or 0, plan["compiled_peak_bytes"])
        for plan in plans
        if "error" not in plan
    )
    peaks = [peak for _, peak in compiled]
    return all(map(fits_budget, plans)) and peaks == sorted(peaks)


def reported(given: Sequence[str], rows: Iterable[Row]) -> dict[str, Any]:
    """Return a report of rows, in the order of the models."""
    report = _common.reported(__file__, given, rows, (*CASES.values(), *SMOKE.values()))
    found = report.pop("rows")
    return report | {key: found[0][key] for key in ("target", "objective")} | {"rows": found}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _common.parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--target", default="h100", help="the chip; h100 by default")
    parser.add_argument("--budget", nargs="+", default=[], help="compile a plan for each of them")
    parser.add_argument("--objective", default="balanced", help="balanced (default), time or flops")
    options = parser.parse_args(given)
    cases = list(SMOKE.values()) if options.smoke else [CASES[name] for name in options.model]
    same = {"target": options.target, "objective": options.objective}
    earlier = _common.rows_by_model(options.json)
    rows = {name: row for name, row in earlier.items() if _only(row, same) == same}
    with _common.progress() as bar:
        for case in bar.track(cases):
            wanted = wanted_row(case, options.target, options.budget, options.objective)
            row = rows.get(case.name, {})
            if _only(row, wanted) == wanted:
                continue
            rows[case.name] = summarized(row_of(case, wanted))
            _written(options.json, reported(given, rows.values()))
    report = reported(given, rows.values())
    _written(options.json, report)
    print(rendered(report))
    return int(not all(are_sound(row["plans"]) for row in report["rows"]))


def _written(path: pathlib.Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        _common.write(path, report, rendered(report))


if __name__ == "__main__":
    sys.exit(main())
