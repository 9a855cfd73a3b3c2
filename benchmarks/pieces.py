"""How far below the least plan without pieces does a plan with pieces come, and what does it cost?

Recomputation alone cannot go below the largest working set of a program: the logits of a GPT, the
scores of a long attention, the first convolutions of an image network. With ``pieces=True`` the
planner also runs segments in pieces. For each model and chip this compiles the gradient without a
plan, the plan of least memory without pieces, that with pieces, and the plan with pieces for the
memory of the one without.

    python benchmarks/pieces.py --target cpu --json benchmarks/results/pieces_cpu.json
    python benchmarks/pieces.py --target h100 --models gpt12 vgg16

A run that was cut off begins again, but programs come from the cache.

Exit status: 0 when done, 2 for a wrong call or a compiler that is not installed.
"""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import _common
from _common import MIB, Case

import remat_kit
from remat_kit._chip.memory import temporaries
from remat_kit._inspect import tables as _tables
from remat_kit._planner.search import Answer, Search
from remat_kit._planner.steps import frontier_for

CASES = {
    "gpt12": Case("GPT-12, batch 8", "gpt", {}),
    "vgg16": Case("VGG-16, batch 64", "vgg", {}),
    "alexnet": Case("AlexNet, batch 1024", "alexnet", {}),
    "llama8k": Case("Llama 7B, 2 layers, 8192 tokens", "llama_nnx", {"layers": 2, "seq": 8192}),
}
SMOKE = {"gpt": Case("GPT, 2 layers", "gpt", {"size": "tiny", "seq": 64, "vocab": 2048})}
COMPILES = 2  # for each plan, and up to three more if nothing fits

Row = dict[str, Any]


def rows_of(case: Case, target: str, tick: Callable[[str], None]) -> list[Row]:
    """Compile the plans of one model for one chip."""
    loss, args = case.loss("none")
    chip = remat_kit.target(target)
    found: list[Row] = []
    limit: int | None = None
    for pieces in (False, True):
        begun = time.perf_counter()
        front, argnums = frontier_for(
            loss, args, chip, 0, "balanced", None, False, tick, "pieces", pieces
        )
        planning = time.perf_counter() - begun
        search = Search(loss, args, argnums, chip, front, COMPILES, tick)
        budgets: Sequence[str | int] = ["min"] if limit is None else ["min", limit]
        for budget in budgets:
            answer = search.run(budget)
            name = "pieces" if pieces else "no pieces"
            how = "least" if budget == "min" else "in the memory of the least without pieces"
            found.append(_row(case, target, f"{name}, {how}", search, answer, planning))
        if limit is None:
            limit = search.measured(answer.place)
            found.insert(0, _row(case, target, "no plan", search, None, 0.0))
    return found


def _row(
    case: Case, target: str, name: str, search: Search, answer: Answer | None, planning: float
) -> Row:
    place = search.plain if answer is None else answer.place
    point, memory = search.points[place], search.known[place]
    step = search.frontier.forward_seconds + search.frontier.backward_seconds
    divided = None if point.graph is None else point.graph.divided
    return {
        "model": case.name,
        "target": target,
        "plan": name,
        "temporary_bytes": temporaries(memory),
        "peak_bytes": memory.peak_bytes,
        "modelled_peak_bytes": None if answer is None else point.predicted_peak_bytes,
        "extra_flops_of_step": point.extra_flops / (3 * point.forward_flops),
        "extra_time_of_step": point.extra_seconds / step,
        "pieces": sorted({d.pieces for d in divided.divisions}) if divided else [],
        "segments_in_pieces": len(divided.divisions) if divided else 0,
        "planning_seconds": round(planning, 1),
    }


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| model | plan | temporaries | model | FLOPs | time | segments | pieces |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        error = ""
        if row["modelled_peak_bytes"] and row["peak_bytes"]:
            error = f"{100 * (row['modelled_peak_bytes'] / row['peak_bytes'] - 1):+.1f} %"
        cells = (
            row["model"],
            row["plan"],
            f"{row['temporary_bytes'] / MIB:,.0f} MiB",
            error,
            f"{100 * row['extra_flops_of_step']:+.0f} %",
            f"{100 * row['extra_time_of_step']:+.0f} %",
            str(row["segments_in_pieces"] or ""),
            ", ".join(map(str, row["pieces"])),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _common.parser(__doc__)
    parser.add_argument("--target", default="cpu", choices=_common.TARGETS)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    options = parser.parse_args(given)
    cases = list(SMOKE.values()) if options.smoke else [CASES[name] for name in options.models]
    rows: list[Row] = []
    for case in cases:

        def tick(what: str, case: Case = case) -> None:
            print(f"{case.name}: {what}", file=sys.stderr)

        try:
            rows += rows_of(case, options.target, tick)
        except remat_kit.MissingPluginError as error:
            print(error, file=sys.stderr)
            return 2
        versions = [_tables.versions()]
        report = _common.described(__file__, given, versions) | {"rows": rows}
        if options.json is not None:
            _common.write(pathlib.Path(options.json), report, rendered(report))
    print(rendered(report))
    return 0


def rendered(report: dict[str, Any]) -> str:
    """Return a report in Markdown."""
    about = (
        "Temporaries of the compiled gradient. The column *model* says by how much the planner's "
        "own prediction of the peak, arguments and results included, is above the compiled one. "
        "FLOPs are those that are computed more, as a share of a step of three forward passes; "
        "time is the roofline's."
    )
    return "\n".join([table(report["rows"]), *_common.ending(report, about)])


if __name__ == "__main__":
    sys.exit(main())
