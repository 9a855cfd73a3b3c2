"""Training steps as people write them, on handwritten digits, with and without a plan.

    python benchmarks/step_table.py --target cpu tpu-v5e --json benchmarks/results/step_table.json
    python benchmarks/step_table.py --target h100 --json benchmarks/results/step_table.json
    python benchmarks/step_table.py --render --json benchmarks/results/step_table.json

Each program of `benchmarks/steps/` is inspected and compiled as it is, and with a plan for half of
its temporaries. On the CPU it trains with both for five steps on this machine; "difference" is the
largest relative difference between the losses of the two runs, and "compilations" are those of the
run with the plan. "Aliased" are the bytes that results take over from donated arguments, with the
plan; without it they are the same. Where no schedule fits the budget, the table says which memory
was reached.

Rows of another run that are in the JSON file already stay there, so the compilers of several
environments can take part in one table.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pathlib
import platform
import sys
from collections.abc import Mapping
from typing import Any

import _common

import remat_kit

STEPS = pathlib.Path(__file__).parent / "steps"
BUDGET = 0.5


PROGRAMS = (
    *("linen", "multi_steps", "nnx_dropout", "accumulation", "gan", "mixed_precision"),
    *("moving_average", "equinox_filtered", "haiku_transformed", "keras_fit"),
)
NEEDS = {"equinox_filtered": "equinox", "haiku_transformed": "haiku", "keras_fit": "keras"}


def module(name: str) -> Any:
    """Import one of the programs."""
    if str(STEPS) not in sys.path:
        sys.path.insert(0, str(STEPS))
    return importlib.import_module(name)


def is_installed(name: str) -> bool:
    """Tell whether the library of a program is there."""
    return name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None


def train(name: str, plan: Any, steps: int) -> tuple[list[float], int]:
    """Return the losses of a few steps, and how many programs were compiled for them."""
    program = module(name)
    step, args = program.build()
    step = step if plan is None else remat_kit.policy(plan)(step)
    losses = []
    with _common.counted_compiles() as compiled:
        for _ in range(steps):
            args, loss = program.after(args, step(*args))
            losses.append(float(loss))
    return losses, compiled[0]


def trained(name: str, plan: Any, steps: int) -> dict[str, Any]:
    """Train a program without a plan and with it, and return the figures of both."""
    (without, before), (with_plan, after) = train(name, None, steps), train(name, plan, steps)
    apart = max(abs(a - b) / max(abs(a), 1e-9) for a, b in zip(without, with_plan, strict=True))
    return {
        "first_loss": without[0],
        "last_loss": without[-1],
        "difference": apart,
        "compilations_before": before,
        "compilations": after,
    }


def row(name: str, target: str, steps: int) -> dict[str, Any]:
    """Return the figures of one program."""
    step, args = module(name).build()
    report = remat_kit.inspect(step, *args, target=target)
    memory = report.memory[target]
    found: dict[str, Any] = {
        "program": name,
        "target": target,
        "losses": [str(x) for x in report.losses],
        "before_bytes": memory.peak_bytes,
        "aliased_before_bytes": memory.alias_bytes,
        "versions": {"python": platform.python_version(), **memory.versions},
    }
    try:
        plan = remat_kit.plan(step, *args, budget=BUDGET, target=target)
    except remat_kit.UserError as error:
        return found | {"error": error.message}
    assert plan.compiled is not None
    assert plan.compiled.fits
    found |= {
        "budget_bytes": plan.budget_bytes,
        "compiled_bytes": plan.compiled_peak_bytes,
        "predicted_bytes": plan.predicted_peak_bytes,
        "aliased_bytes": plan.compiled.alias_bytes,
        "extra_flops_fraction": plan.point.extra_flops_fraction if plan.point else None,
        "compiled_programs": plan.tried,
    }
    return found | trained(name, plan.policy, steps) if target == "cpu" else found


COLUMNS = (
    *("program", "target", "before", "budget", "with the plan", "predicted", "aliased"),
    *("extra FLOPs", "loss, first to last", "difference", "compilations"),
)


def rendered(report: Mapping[str, Any]) -> str:
    """Return a report as Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---|" + "---:|" * (len(COLUMNS) - 2)]
    for r in report["rows"]:
        cells = [r["program"], r["target"], f"{r['before_bytes'] / _common.MIB:.1f}"]
        if "error" in r:
            cells.append(r["error"].partition("its peak")[0].rpartition(": ")[2].rstrip("; "))
        else:
            sizes = (r[f"{k}_bytes"] for k in ("budget", "compiled", "predicted", "aliased"))
            cells += [f"{size / _common.MIB:.1f}" for size in sizes]
            cells.append(f"+{100 * r['extra_flops_fraction']:.1f} %")
        if "first_loss" in r:
            cells.append(f"{r['first_loss']:.4f} to {r['last_loss']:.4f}")
            cells += [f"{r['difference']:.1e}", str(r["compilations"])]
        lines.append("| " + " | ".join(cells + [""] * (len(COLUMNS) - len(cells))) + " |")
    return "\n".join([*lines, *_ending(report)])


def _ending(report: Mapping[str, Any]) -> list[str]:
    """Return the last lines: each target with the versions that its rows were taken with."""
    groups: dict[str, dict[str, None]] = {}
    for r in report["rows"]:
        text = ", ".join(f"{name} {version}" for name, version in r["versions"].items())
        groups.setdefault(text, {})[r["target"]] = None
    about = "Peak of the compiled step in MiB. No chip but a CPU was there. Taken on "
    taken = "; ".join(f"{' and '.join(targets)} with {text}" for text, targets in groups.items())
    commands = dict.fromkeys(report["commands"][t] for t in report["commands"])
    return ["", f"{about}{report['date']}: {taken}, by", "", "```", *commands, "```"]


def merged(old: Mapping[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Return a report with the rows of an earlier one that the new one does not replace."""
    if old is None:
        return new
    rows = {(r["program"], r["target"]): r for r in (*old["rows"], *new["rows"])}
    ordered = [
        rows[name, target]
        for target in dict.fromkeys(t for _, t in rows)
        for name in PROGRAMS
        if (name, target) in rows
    ]
    commands = {**old["commands"], **new["commands"]}
    versions = {**old["versions"], **new["versions"]}
    return new | {"commands": commands, "versions": versions, "rows": ordered}


def main() -> None:
    parser = _common.parser(__doc__, smoke="two small programs and two steps")
    parser.add_argument("--target", nargs="+", default=["cpu"], help="chips to compile for")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--render", action="store_true", help="write only the table again")
    options = parser.parse_args()
    if options.render:
        report = json.loads(options.json.read_text())
        _common.write(options.json, report, rendered(report))
        return
    names = ["linen", "accumulation"] if options.smoke else options.programs
    if options.smoke:
        module("digits").make_small()
    report = None
    if options.json and options.json.exists():
        report = json.loads(options.json.read_text())
    cases = [(name, t) for t in options.target for name in names if is_installed(name)]
    with _common.progress() as bar:
        task = bar.add_task("programs", total=len(cases))
        for name, target in cases:
            found = row(name, target, 2 if options.smoke else 5)
            bar.advance(task)
            new = _common.described(__file__, sys.argv[1:], [found["versions"]])
            new |= {"commands": {target: new["command"]}, "rows": [found]}
            report = merged(report, new)
            if options.json:
                _common.write(options.json, report, rendered(report))
    print(rendered(report or {}))


if __name__ == "__main__":
    main()
