"""Training steps as people write them, on handwritten digits, with and without a plan.

    python benchmarks/step_table.py --json benchmarks/results/step_table.json
    python benchmarks/step_table.py --target tpu-v5e

Each program of `benchmarks/steps/` is compiled as it is and with a plan for half of its
temporaries, and trains with both for five steps on this machine. "Difference" is the largest
relative difference between the losses of the two runs. Where no schedule fits the budget, the
table says which memory was reached.
"""

from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import _common

import remat_kit

STEPS = pathlib.Path(__file__).parent / "steps"
BUDGET = 0.5


PROGRAMS = (
    *("linen", "multi_steps", "nnx_dropout", "accumulation", "gan", "mixed_precision"),
    *("moving_average", "equinox_filtered", "haiku_transformed"),
)


def module(name: str) -> Any:
    """Import one of the programs."""
    if str(STEPS) not in sys.path:
        sys.path.insert(0, str(STEPS))
    return importlib.import_module(name)


def train(name: str, plan: Any, steps: int) -> list[float]:
    """Return the losses of a few steps, with a plan or without one."""
    program = module(name)
    step, args = program.build()
    step = step if plan is None else remat_kit.policy(plan)(step)
    losses = []
    for _ in range(steps):
        args, loss = program.after(args, step(*args))
        losses.append(float(loss))
    return losses


def row(name: str, target: str, steps: int) -> dict[str, Any]:
    """Return the figures of one program."""
    step, args = module(name).build()
    try:
        plan = remat_kit.plan(step, *args, budget=BUDGET, target=target)
    except remat_kit.UserError as error:
        memory = remat_kit.measure(step, *args, target=target)
        return {
            "program": name,
            "target": target,
            "before_bytes": memory.peak_bytes,
            "error": error.message,
            "versions": dict(memory.versions),
        }
    assert plan.compiled is not None
    assert plan.baseline is not None
    found: dict[str, Any] = {
        "program": name,
        "target": target,
        "losses": [str(x) for x in remat_kit.inspect(step, *args).losses],
        "before_bytes": plan.baseline.peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "compiled_bytes": plan.compiled_peak_bytes,
        "predicted_bytes": plan.predicted_peak_bytes,
        "aliased_before_bytes": plan.baseline.alias_bytes,
        "aliased_bytes": plan.compiled.alias_bytes,
        "extra_flops_fraction": plan.point.extra_flops_fraction if plan.point else None,
        "compiled_programs": plan.tried,
        "versions": dict(plan.compiled.versions),
    }
    without, with_plan = train(name, None, steps), train(name, plan.policy, steps)
    apart = max(abs(a - b) / max(abs(a), 1e-9) for a, b in zip(without, with_plan, strict=True))
    return found | {"first_loss": without[0], "last_loss": without[-1], "difference": apart}


def rendered(report: Mapping[str, Any]) -> str:
    """Return a report as Markdown."""
    head = "| program | target | before | budget | with the plan | predicted | extra FLOPs |"
    lines = [head + " loss, first to last | difference |", "|---|---|" + "---:|" * 7]
    for r in report["rows"]:
        if "error" in r:
            before = f"{r['before_bytes'] / _common.MIB:.1f}"
            reason = r["error"].partition("its peak")[0].rpartition(": ")[2].rstrip("; ")
            lines.append(f"| {r['program']} | {r['target']} | {before} | {reason} |" + " |" * 5)
            continue
        sizes = [
            r[f"{k}_bytes"] / _common.MIB for k in ("before", "budget", "compiled", "predicted")
        ]
        cells = [r["program"], r["target"], *(f"{s:.1f}" for s in sizes)]
        cells += [f"+{100 * r['extra_flops_fraction']:.1f} %"]
        cells += [f"{r['first_loss']:.4f} to {r['last_loss']:.4f}", f"{r['difference']:.1e}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *_common.ending(report, "Peak of the compiled step in MiB.")])


def main() -> None:
    parser = _common.parser(__doc__, smoke="two programs and two steps")
    parser.add_argument("--target", nargs="+", default=["cpu"], help="chips to compile for")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    options = parser.parse_args()
    names = ["linen", "accumulation"] if options.smoke else options.programs
    cases = [(name, target) for target in options.target for name in names]
    rows = []
    with _common.progress() as bar:
        task = bar.add_task("programs", total=len(cases))
        for name, target in cases:
            rows.append(row(name, target, 2 if options.smoke else 5))
            bar.advance(task)
    versions = [row.pop("versions") for row in rows]
    report = _common.described(__file__, sys.argv[1:], versions) | {"rows": rows}
    print(rendered(report))
    if options.json:
        _common.write(options.json, report, rendered(report))


if __name__ == "__main__":
    main()
