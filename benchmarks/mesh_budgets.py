"""Do plans for sharded models fit their budgets, and how well are they predicted?

    python benchmarks/mesh_budgets.py --json benchmarks/results/mesh_budgets.json
    python benchmarks/mesh_budgets.py --target cpu:8 --model gpt --sharding fsdp

Three models are partitioned over the devices of each target under three shardings. For each of them
a plan for ten budgets is compiled: for the least memory and for nine shares of the activations of
one device. All bytes are those of one device. Losses without an optimizer are compiled, and nothing
is run.

The file is written after each row, and a row in it that was taken with the same planner and
compilers is kept, unless with ``--fresh``. ``--merge`` adds the rows of other files.

Exit status: 0 when done; 1 if a plan is over its budget, takes more memory than one for a larger
budget, or was predicted more than ten percent wrongly; 2 for a wrong call or a compiler that is not
installed.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import _common
import mesh
import pieces
import planner
from _common import MIB, Case

import remat_kit
from remat_kit._planner import plan as _plan

_BERT = {"size": "large", "layers": 4, "batch": 64, "seq": 512, "dtype": "bf16"}
CASES = {**mesh.CASES, "bert": Case("BERT", "bert", _BERT)}
SMOKE = {"gpt": Case("GPT, tiny", "gpt", mesh.SMOKE["gpt"].size)}
BUDGETS = ("min", 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.75, 0.9)
TARGETS = ("cpu:8", "h100:8")
TOLERANCE = 0.1  # of a prediction, as a share of the compiled bytes
COMPILES = 5  # for each budget, at most

Row = dict[str, Any]


def row_of(case: Case, sharding: str, target: str, budgets: Sequence[str | float]) -> Row:
    """Plan a model that is sharded over a target for each budget, and compile the plans."""
    split = mesh.mesh_of(sharding, remat_kit.target(target).devices)
    sharded = Case(case.name, case.module, {**case.size, "mesh": split, "sharding": sharding})
    loss, args = sharded.loss("none")
    points = remat_kit.frontier(loss, *args, target=target).to_json()["points"]
    plans = _plan.plans(loss, *args, budgets=budgets, target=target, compiles=COMPILES)
    found = [figures(b, p, points) for b, p in zip(budgets, plans, strict=True)]
    good = [p for p in plans if isinstance(p, _plan.Plan)]
    memory = good[0].baseline if good else remat_kit.measure(loss, *args, target=target)
    assert memory is not None
    return {
        **pieces.current(case.name, target),
        "sharding": sharding,
        "mesh": split,
        "none_bytes": memory.peak_bytes,
        "plans": found,
    }


def figures(budget: str | float, plan: Any, points: Sequence[Mapping[str, Any]]) -> Row:
    """Return what is shown of a plan for a budget, or of the error that takes its place."""
    if isinstance(plan, Exception):
        return {"budget": budget, "error": str(plan).partition("\n")[0].partition(", of which")[0]}
    found = plan.to_json()
    return {
        "budget": budget,
        "budget_bytes": found["budget_bytes"],
        "compiled_peak_bytes": found["compiled_peak_bytes"],
        "predicted_peak_bytes": found["predicted_peak_bytes"],
        "first_predicted_peak_bytes": planner.first_prediction(points, found),
        "extra_flops_fraction": round(found["extra_flops_fraction"], 4),
    }


def predictions(row: Row) -> tuple[list[float], list[float]]:
    """Return the predicted peaks of a row's plans, in parts of the compiled ones.

    The first list is what the frontier predicts before anything is compiled, the second what the
    search predicts with what it has compiled for other plans.
    """
    good = [p for p in row["plans"] if "error" not in p]
    return (
        [
            p["first_predicted_peak_bytes"] / p["compiled_peak_bytes"]
            for p in good
            if p["first_predicted_peak_bytes"] is not None
        ],
        [p["predicted_peak_bytes"] / p["compiled_peak_bytes"] for p in good],
    )


def faults(row: Row) -> list[str]:
    """Return what is wrong with the plans of a row."""
    found = [] if planner.are_sound(row["plans"]) else ["over a budget, or not monotone"]
    wrong = [p for p in predictions(row)[1] if abs(p - 1) > TOLERANCE]
    return found + [f"predicted {share:.2f} of the compiled bytes" for share in wrong]


def rendered(report: Mapping[str, Any]) -> str:
    """Return a report as Markdown."""
    lines = [
        "| model | sharding | target | none, MiB | least, MiB | plans | over their budget | "
        "predicted before any compile | predicted |",
        "|---|---|---|" + "---:|" * 6,
    ]
    lines += [_line(row) for row in report["rows"]]
    about = (
        f"Plans for {len(BUDGETS)} budgets ({', '.join(map(str, BUDGETS))}) of the loss's gradient "
        "on one device. *Plans* are those that were found, of the number of budgets; for one "
        "below the least memory there is none. *Predicted* are the least and the greatest "
        "prediction of a plan's peak, in parts of the compiled peak: as the frontier predicts it, "
        "and corrected by what was compiled for other plans."
    )
    sizes = "; ".join(f"{c['name']}: {mesh._size(c['size'])}" for c in report["cases"])
    return "\n".join([*lines, *_common.ending(report, f"{about} {sizes}.")])


def _line(row: Row) -> str:
    good = [p for p in row["plans"] if "error" not in p]
    first, corrected = map(_range, predictions(row))
    over = sum(not planner.fits_budget(p) for p in good)
    least = min((p["compiled_peak_bytes"] for p in good), default=0)
    cells = [
        *(row["model"], f"{row['sharding']}, {row['mesh']}", row["target"]),
        *(f"{row['none_bytes'] / MIB:,.0f}", f"{least / MIB:,.0f}"),
        *(f"{len(good)} of {len(row['plans'])}", str(over), first, corrected),
    ]
    return "| " + " | ".join(cells) + " |"


def _range(shares: Sequence[float]) -> str:
    return f"{min(shares):.3f} – {max(shares):.3f}" if shares else ""


def key(row: Row) -> tuple[str, ...]:
    """Return what tells one row from the others."""
    return row["model"], row["target"], row["sharding"]


def reported(given: Sequence[str], rows: Iterable[Row]) -> dict[str, Any]:
    """Return a report of rows, in the order of the models, targets and shardings."""
    cases = {case.name: case for case in (*CASES.values(), *SMOKE.values())}
    order = [*cases, *TARGETS, *mesh.SHARDINGS]
    places = {name: place for place, name in enumerate(order)}
    found = sorted(rows, key=lambda row: [places.get(name, len(order)) for name in key(row)])
    report = _common.described(__file__, given, [row["versions"] for row in found])
    used = [cases[name] for name in dict.fromkeys(row["model"] for row in found)]
    report["cases"] = [{"name": case.name, "size": dict(case.size)} for case in used]
    return report | {"rows": found}


def earlier(path: pathlib.Path | None) -> dict[tuple[str, ...], Row]:
    """Return the rows of a file of an earlier run."""
    if path is None or not path.exists() or not path.stat().st_size:
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {key(row): row for row in rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _common.parser(__doc__, smoke="a small model over two CPU devices, for tests")
    parser.add_argument("--target", nargs="+", default=list(TARGETS), metavar="T")
    parser.add_argument("--model", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--sharding", nargs="+", choices=mesh.SHARDINGS, default=list(mesh.SHARDINGS)
    )
    parser.add_argument("--fresh", action="store_true", help="keep no row of the file")
    parser.add_argument("--merge", nargs="+", type=pathlib.Path, default=[], metavar="PATH")
    options = parser.parse_args(given)
    rows = {} if options.fresh else earlier(options.json)
    for path in options.merge:
        rows |= earlier(path)
    merged = {"--merge", *map(str, options.merge)}  # their rows were taken by the same command
    shown = [word for word in given if word not in merged]
    try:
        for job in [] if options.merge else jobs(options):
            case, sharding, target, budgets = job
            old, wanted = rows.get((case.name, target, sharding)), pieces.current(case.name, target)
            if old is not None and wanted.items() <= old.items():
                continue
            print(f"{case.name}, {sharding}, {target}", file=sys.stderr, flush=True)
            row = row_of(case, sharding, target, budgets)
            rows[key(row)] = row
            _write(options.json, reported(shown, rows.values()))
    except remat_kit.RematKitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = reported(shown, rows.values())
    _write(options.json, report)
    print(rendered(report))
    return int(any(map(faults, report["rows"])))


def jobs(options: Any) -> list[tuple[Case, str, str, Sequence[str | float]]]:
    """Return what is to be planned: a case, its sharding, its target and its budgets."""
    if options.smoke:
        return [(case, "fsdp", "cpu:2", ("min", 0.5, 0.9)) for case in SMOKE.values()]
    cases = [CASES[name] for name in options.model]
    return [(c, s, t, BUDGETS) for t in options.target for c in cases for s in options.sharding]


def _write(path: pathlib.Path | None, report: Mapping[str, Any]) -> None:
    if path is not None:
        _common.write(path, report, rendered(report))


if __name__ == "__main__":
    sys.exit(main())
