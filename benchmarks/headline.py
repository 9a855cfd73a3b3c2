"""Put the README's first table together from results that are there: memory and work, side by side.

Nothing is compiled. A row is one model on one chip: what it takes with no policy, with two presets
on every block and under plans, and what each computes twice. Compiled memory is that of
`results/readme_table.json`, `results/planner_CHIP.json` and, for plans with segments in pieces,
`results/pieces_CHIP.json`; what presets compute twice is in `results/baselines_CHIP.json`.

    python benchmarks/headline.py --update-readme

Exit status: 0 when done, 2 for a wrong call or a result that is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Mapping
from typing import Any

import _common
import pieces
import planner
import readme_table
from _common import MIB, ROOT

RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- headline:begin -->", "<!-- headline:end -->"
PRESETS = ("nothing", "dots")
BUDGETS = ("min", "0.3", "0.45")
GAP_AT = "0.3"
IN_PIECES = ("0.1", "min")


class MissingError(Exception):
    """A result that the table needs is not there."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A model on a chip, by its name in each of the results."""

    name: str
    chip: str
    case: str  # in planner.CASES and in pieces.CASES
    model: str  # in readme_table.json
    baseline: str  # in baselines_CHIP.json

    @property
    def planner(self) -> str:
        """The file with its plans."""
        return f"planner_{self.chip}"

    @property
    def files(self) -> tuple[str, ...]:
        """The results that it is taken from."""
        kinds = ("planner", "pieces", "baselines")
        return *(f"{kind}_{self.chip}.json" for kind in kinds), "readme_table.json"

    def cells(self) -> list[str]:
        """Return the row's cells."""
        found = row_in(self.planner, planner.CASES[self.case].name)
        plans = {plan["budget"]: plan for plan in found["plans"] if "error" not in plan}
        plain = of(plans, "min", self.planner)["baseline_temp_bytes"]
        cells = [self.name, self.chip, f"{plain / MIB:,.0f}"]
        for preset in PRESETS:
            cells.append(cell(self.compiled_bytes(preset), self.extra(preset)))
        for budget in BUDGETS:
            plan = of(plans, budget, self.planner)
            memory = cell(plan["compiled_temp_bytes"], plan["extra_flops_fraction"])
            cells.append(f"{memory}, {time_cell(plan)}")
        cells.append(f"{of(plans, GAP_AT, self.planner)['gap']:.3f}")
        least = of(plans, "min", self.planner)["compiled_temp_bytes"]
        return cells + [self.in_pieces(budget, least) for budget in IN_PIECES]

    def in_pieces(self, budget: str, least: int) -> str:
        """A plan with pieces, or – if none has any or takes less than the least plan without."""
        found = row_in(f"pieces_{self.chip}", pieces.CASES[self.case].name)["pieces"][budget]
        if found is None:
            return "–"
        size, _, flops, seconds, segments, *_ = found
        if not segments or size * MIB >= least:
            return "–"
        # A step is three forward passes.
        return f"{cell(size * MIB, 3 * flops)}, +{100 * seconds:.1f} %"

    def compiled_bytes(self, preset: str) -> int:
        """What the compiler takes for temporaries with a preset on every block."""
        rows = loaded("readme_table.json")["rows"]
        memories = {(r["model"], r["policy"], r["memory"]["target"]): r["memory"] for r in rows}
        return of(memories, (self.model, preset, self.chip), "readme_table")["temp_bytes"]

    def extra(self, preset: str) -> float:
        """What a preset on every block computes twice, in forward passes."""
        file = f"baselines_{self.chip}"
        found = _common.unpacked(row_in(file, self.baseline)["points"])
        points = {point["name"]: point for point in found}
        return of(points, f"block {preset}", file)["extra_flops_fraction"]


_RESNET = ("resnet50", "ResNet-50, 64 images", "ResNet-50, 64 images")
_GPT = ("gpt12", "GPT, 12 layers, 8 × 1024 tokens", "GPT, 12 layers, 8 × 1024 tokens")
ROWS = (
    Row("ResNet-50, 64 images", "h100", *_RESNET),
    Row("ResNet-50, 64 images", "cpu", *_RESNET),
    Row("ResNet-50, 64 images", "tpu-v5e", *_RESNET),
    Row("GPT, 12 layers, 8 × 1024 tokens", "h100", *_GPT),
    Row("GPT, 12 layers, 8 × 1024 tokens", "cpu", *_GPT),
    Row("GPT, 12 layers, 8 × 1024 tokens", "tpu-v5e", *_GPT),
)


def loaded(file: str) -> dict[str, Any]:
    """Return one of the results."""
    path = RESULTS / file
    if not path.exists():
        raise MissingError(f"{path.relative_to(ROOT)} is not there")
    return _read(file, path.stat().st_mtime_ns)


@functools.cache
def _read(file: str, mtime_ns: int) -> dict[str, Any]:
    return json.loads((RESULTS / file).read_text(encoding="utf-8"))


def row_in(file: str, model: str) -> dict[str, Any]:
    """Return a model's row of a result."""
    return of({row["model"]: row for row in loaded(f"{file}.json")["rows"]}, model, file)


def of(found: Mapping[Any, Any], key: Any, file: str) -> Any:
    """Return one entry of a result.

    >>> of({"a": 1}, "b", "planner")
    Traceback (most recent call last):
    headline.MissingError: benchmarks/results/planner.json has no 'b'
    """
    if key not in found:
        raise MissingError(f"benchmarks/results/{file}.json has no {key!r}")
    return found[key]


def cell(temp_bytes: float, extra_fraction: float) -> str:
    """Return memory and work.

    >>> cell(2**31, 0.123)
    '2,048, +12.3 %'
    """
    return f"{temp_bytes / MIB:,.0f}, +{100 * extra_fraction:.1f} %"


def time_cell(plan: Mapping[str, Any]) -> str:
    """Return what a plan adds to the roofline time of the step.

    >>> time_cell({"extra_seconds": 0.01, "step_seconds": 0.11})
    '+10.0 %'
    """
    return f"+{100 * plan['extra_seconds'] / (plan['step_seconds'] - plan['extra_seconds']):.1f} %"


def lines() -> dict[Row, str]:
    """Return the table's line of each row."""
    return {row: "| " + " | ".join(row.cells()) + " |" for row in ROWS}


def rendered() -> str:
    """Return the table as Markdown."""
    columns = ["model", "chip", "`none`", *(f"`{preset}` on blocks" for preset in PRESETS)]
    columns += [f"plan `{budget}`" for budget in BUDGETS]
    columns += [f"over the bound at `{GAP_AT}`", *(f"`{b}` in pieces" for b in IN_PIECES)]
    return "\n".join(
        [
            "Temporary memory of one compiled `value_and_grad` in MiB, float32, and after the "
            "comma what is computed twice, in FLOPs of the forward pass. For plans, the extra time "
            "of the step by the roofline follows. A plan's budget is a fraction of the temporaries "
            "without it; `min` is the least memory. *Over the bound* is the extra work of a plan "
            "less the lower bound on it, in forward passes. Plans *in pieces* also run segments in "
            "pieces of an axis (`pieces=True`); – stands where none takes less than the least plan "
            "without pieces. "
            "No chip but a CPU was there. "
            "Made from `benchmarks/results/` by `python benchmarks/headline.py --update-readme`.",
            "",
            "| " + " | ".join(columns) + " |",
            "|---|---|" + "---:|" * (len(columns) - 2),
            *lines().values(),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--update-readme", action="store_true", help="put it into README.md")
    options = parser.parse_args(argv)
    try:
        table = rendered()
    except MissingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.update_readme:
        text = readme_table.README.read_text(encoding="utf-8")
        text = readme_table.with_results(text, table, BEGIN, END)
        readme_table.README.write_text(text, encoding="utf-8")
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
