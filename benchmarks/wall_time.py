"""Run planned steps on this machine's CPU, and hold what they take against what was predicted.

For each model and budget the gradient is compiled with and without the plan, and the two run by
turns, so that whatever else the machine does meets both. The ratio of a pair says how much longer
a planned step takes; the median of them is shown beside the prediction, which is the roofline's
extra time as a part of the step's, and beside the same in FLOPs. New memory costs time too, which
the roofline leaves out: the kernel's part of the processors' time is shown apart.

    python benchmarks/wall_time.py --json benchmarks/results/wall_time.json
    python benchmarks/wall_time.py --model mlp --budget 0.3 --pairs 20

With ``--pieces`` the plans may run segments in pieces, and the models are ones in which that helps:

    python benchmarks/wall_time.py --pieces --json benchmarks/results/wall_time_pieces.json

This takes more than 40 minutes on two cores. The file is written after each plan, so a run that is
cut off leaves a shorter table: it has no rows for the plans that were not reached.

Exit status: 0 when done, 2 for a wrong call.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import _common
import jax
from _common import MIB, Case

import remat_kit
from remat_kit.testing import equivalence as _equivalence

CASES = {
    "mlp": Case("residual MLP, 32 blocks", "residual_mlp", {}),
    "resnet50": Case("ResNet-50, 8 images", "resnet", {"depth": 50, "batch": 8}),
    "gpt12": Case(
        "GPT, 12 layers, 2 × 256", "gpt", {"size": "small", "batch": 2, "seq": 256, "vocab": 8192}
    ),
}
IN_PIECES = {
    "gpt12": Case("GPT, 12 layers, 1 × 1024", "gpt", {"size": "small", "batch": 1}),
    "vgg16": Case("VGG-16, 8 images", "vgg", {"batch": 8}),
    "vit": Case("ViT-B/16, 8 images", "vit", {"batch": 8}),
}
SMOKE = {
    "mlp": Case("residual MLP, 2 blocks", "residual_mlp", {"batch": 2048, "width": 8, "layers": 2})
}
BUDGETS = ("0.6", "0.4", "min")

Row = dict[str, Any]


def rows(
    cases: Sequence[Case], budgets: Sequence[str], pairs: int, pieces: bool = False
) -> Iterator[Row]:
    """Plan each model for each budget, in pieces or not, and time it."""
    for case in cases:
        fn, args = case.loss("none")
        values = _equivalence.seeded(args, 0)
        plain = jax.jit(jax.value_and_grad(fn))
        once(plain, values)
        for budget in budgets:
            try:
                plan = remat_kit.plan(fn, *args, budget=budget, pieces=pieces)
            except remat_kit.UserError as error:  # nothing fits
                yield {"model": case.name, "budget": budget, "error": error.message}
                continue
            planned = jax.jit(jax.value_and_grad(remat_kit.policy(plan)(fn)))
            once(planned, values)
            times = [(once(plain, values), once(planned, values)) for _ in range(pairs)]
            yield described(case.name, budget, plan, times)


@dataclasses.dataclass(frozen=True)
class Seconds:
    """What one step took: on the clock, and of all processors in the program and in the kernel."""

    wall: float
    program: float
    kernel: float


def once(step: Callable[..., Any], values: Sequence[Any]) -> Seconds:
    """Run a step and time it."""
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    jax.block_until_ready(step(*values))
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    return Seconds(wall, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime)


def described(
    name: str, budget: str, plan: remat_kit.Plan, times: Sequence[tuple[Seconds, Seconds]]
) -> Row:
    """Put a plan's prediction beside the times of the pairs."""
    point = plan.point
    assert point is not None
    before = plan.step_seconds - plan.extra_seconds
    ratios = [planned.wall / plain.wall for plain, planned in times]
    medians = {
        f"{which}_{of}seconds": statistics.median(getattr(pair[number], field) for pair in times)
        for number, which in enumerate(("plain", "planned"))
        for of, field in (("", "wall"), ("program_", "program"), ("kernel_", "kernel"))
    }
    return {
        "model": name,
        "budget": budget,
        "compiled_temp_bytes": plan.compiled.temp_bytes if plan.compiled else None,
        "baseline_temp_bytes": plan.baseline.temp_bytes if plan.baseline else None,
        **medians,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "predicted_time_ratio": 1 + point.extra_seconds / before,
        # A backward pass is about two forward passes of work.
        "predicted_flops_ratio": 1 + point.extra_flops_fraction / 3,
    }


def rendered(report: dict[str, Any]) -> str:
    """Return a report as Markdown."""
    lines = [
        "| model | budget | temporaries MiB, without → with | step s, without → with | longer by | "
        "predicted, time | predicted, FLOPs | processor s in the program | in the kernel |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        if "error" in row:
            lines.append(f"| {row['model']} | {row['budget']} | {row['error']} | | | | | | |")
            continue
        before, after = row["baseline_temp_bytes"] / MIB, row["compiled_temp_bytes"] / MIB
        spread = sorted(row["ratios"])
        lines.append(
            f"| {row['model']} | {row['budget']} | {before:,.0f} → {after:,.0f} | "
            f"{_both(row, 'seconds')} | "
            f"{_percent(row['ratio'])} ({_percent(spread[0])} to {_percent(spread[-1])}) | "
            f"{_percent(row['predicted_time_ratio'])} | {_percent(row['predicted_flops_ratio'])} | "
            f"{_both(row, 'program_seconds')} | {_both(row, 'kernel_seconds')} |"
        )
    about = (
        f"Medians of {report['pairs']} pairs, run by turns on {jax.local_device_count()} CPU "
        f"device with {report['cores']} cores; in brackets the least and the most. Predicted: of "
        "the step, by the roofline of the target cpu, and by FLOPs, a step being three forward "
        "passes."
    )
    return "\n".join([*lines, *_common.ending(report, about)])


def _both(row: Row, name: str) -> str:
    return f"{row[f'plain_{name}']:.3g} → {row[f'planned_{name}']:.3g}"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.0f} %"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _common.parser(__doc__)
    known = list(dict.fromkeys((*CASES, *IN_PIECES)))
    parser.add_argument("--model", nargs="+", choices=known, metavar="NAME", help="default: all")
    parser.add_argument("--pieces", action="store_true", help="plans may run segments in pieces")
    parser.add_argument("--budget", nargs="+", default=list(BUDGETS), help="as for remat-kit plan")
    parser.add_argument("--pairs", type=int, default=9, help="how often both are run; 9 by default")
    options = parser.parse_args(given)
    chosen = IN_PIECES if options.pieces else CASES
    cases = list(SMOKE.values()) if options.smoke else list(chosen.values())
    if options.model and not options.smoke:
        if missing := [name for name in options.model if name not in chosen]:
            parser.error(f"choose from {', '.join(chosen)}, not {', '.join(missing)}")
        cases = [chosen[name] for name in options.model]
    versions = {name: __import__(name).__version__ for name in ("jax", "jaxlib")}
    report = _common.described(__file__, given, [versions])
    report |= {"pairs": options.pairs, "cores": os.cpu_count()}
    report["rows"] = []
    for row in rows(cases, options.budget, options.pairs, options.pieces):
        print(f"{row['model']}, {row['budget']}", file=sys.stderr, flush=True)
        report["rows"].append(row)
        if options.json is not None:
            _common.write(options.json, report, rendered(report))
    print(rendered(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
