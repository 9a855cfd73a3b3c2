"""Compare the peak of the walk over the schedule with the compiler's, on every model and chip.

Each model is compiled as ``value_and_grad(loss)`` under each policy for each chip, and read back.
The walk sums the buffers that are alive at each step; the compiler says how much it reserves. Where
the two differ by more than 1 %, the program is compiled once more with the compiler's dump of its
buffer assignment and live ranges (`_witness`), which says what is alive by its own account; what it
reserves beyond that is gaps in its heap. Compiled answers are kept on disk, so a run that was
stopped goes on where it was; the whole takes about an hour on two cores, most of it in the TPU's
compiler.

    python benchmarks/peak_table.py --json benchmarks/results/peak_table.json

Exit status: 0 when done, 2 for a wrong call or a compiler that is not installed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import _common
import jax
from _common import MIB, POLICIES, TARGETS, Case
from _witness import witnessed

import remat_kit
from remat_kit._chip.compile import compile_program
from remat_kit._inspect.reading import TracedReading, read
from remat_kit._inspect.residuals import kept_of
from remat_kit._program.steps.gradient import trace_gradient
from remat_kit._program.steps.losses import LossGradient

CASES = (
    Case("MLP", "mlp", {}),
    Case("GPT, 12 layers, 8 × 1024 tokens", "gpt", {"size": "small", "batch": 8}),
    Case("GPT, the same as a scan", "gpt", {"size": "small", "batch": 8, "scan": True}),
    Case(
        "GPT, 4 layers, 4 × 512, bf16, dropout",
        "gpt",
        {"size": "small", "layers": 4, "batch": 4, "seq": 512, "dtype": "bf16", "dropout": 0.1},
    ),
    Case("GPT in NNX, 4 layers, 4 × 1024", "gpt_nnx", {"size": "small", "layers": 4, "batch": 4}),
    Case("ResNet-18, 64 images", "resnet", {"depth": 18, "batch": 64}),
    Case("ResNet-50, 64 images", "resnet", {"depth": 50, "batch": 64}),
    Case("ResNet-152, 16 images", "resnet", {"depth": 152, "batch": 16}),
)
_TINY = {"size": "tiny", "batch": 2}
SMOKE = (
    Case("MLP, 4 images", "mlp", {"batch": 4, "features": 16, "hidden": 8}),
    Case("GPT, 2 layers as a scan", "gpt", {**_TINY, "scan": True}),
)
BEYOND = 5.0  # percent of the compiler's peak
ASK_BEYOND = 1.0  # from where on the compiler's own account is asked for
LARGEST = 12  # buffers of a row in the JSON

Row = dict[str, Any]


def rows(cases: Sequence[Case], targets: Sequence[str]) -> Iterator[Row]:
    """Read back every model under every policy, the first target of all of them first."""
    traces: dict[tuple[str, str], tuple[Any, Any, TracedReading]] = {}
    with _common.progress() as bar:
        job = bar.add_task("", total=len(cases) * len(POLICIES) * len(targets))
        for target in targets:
            for case in cases:
                for policy in POLICIES:
                    bar.update(job, description=f"{case.name}, {policy}, {target}")
                    if (case.name, policy) not in traces:
                        traces[case.name, policy] = _traced(*case.loss(policy))
                    row = _row(target, *traces[case.name, policy])
                    row = {"model": case.name, "size": dict(case.size), "policy": policy} | row
                    bar.console.print(_line(row), markup=False, highlight=False, soft_wrap=True)
                    bar.advance(job)
                    yield row


def _traced(fn: Any, args: Any) -> tuple[Any, Any, TracedReading]:
    gradient = trace_gradient(fn, args, 0, call="inspect")
    kept = [r for _, r in kept_of(gradient)]
    return fn, args, TracedReading.of(LossGradient(gradient, fn, args, 0), kept)


def _row(target: str, fn: Any, args: Any, traced: TracedReading) -> Row:
    compiled = compile_program(fn, args, target)
    begun = time.perf_counter()
    reading = read(compiled, [traced])
    seconds = time.perf_counter() - begun
    memory = compiled.memory
    plain = witness = None
    if reading is not None:
        difference = _percent(reading.peak.bytes, memory.peak_bytes)
        plain = reading.peak.to_json(limit=LARGEST) | {"difference_percent": difference}
        if abs(difference) > ASK_BEYOND:
            witness = _asked(target, fn, args, reading.peak.bytes)
    return {
        "target": memory.target,
        "peak": plain,
        "witness": witness,
        "read_seconds": seconds,
        "compile_seconds": memory.compile_seconds,
        "needs_bytes": memory.needs_bytes,
        "versions": dict(memory.versions),
    }


def _asked(target: str, fn: Any, args: Any, walk_bytes: int) -> dict[str, Any]:
    _, witness = witnessed(fn, args, target)
    return {
        "live_bytes": witness.live_bytes,
        "gap_bytes": witness.gap_bytes,
        "difference_percent": _percent(walk_bytes, witness.live_bytes),
    }


def _percent(found: int, reference: int | None) -> float:
    return 100 * (found / reference - 1) if reference else 0.0


def _line(row: Row) -> str:
    peak, witness = row["peak"], row["witness"]
    what = "does not fit" if peak is None else f"{peak['difference_percent']:+.2f} %"
    line = f"{row['target']:8} {row['policy']:8} {what:>12}  {row['model']}"
    if witness is None:
        return line
    return f"{line}; {witness['difference_percent']:+.2f} % of what its dump has alive"


def rendered(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = [
        "| target | model | policy | walk MiB | reserved MiB | difference | alive MiB | difference "
        "| gaps MiB | peak in | named | read s |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---|---:|---:|",
    ]
    lines += [_cells(row) for row in report["rows"]]
    lines += ["", *_summary(report["rows"])]
    return "\n".join(
        [
            *lines,
            *_common.ending(
                report,
                "Peak of the device's memory in one compiled `value_and_grad`: by the *walk* over "
                "its schedule, and as the compiler *reserves* it (arguments + outputs − aliased + "
                f"temporaries). Where they differ by more than {ASK_BEYOND:g} %: what is *alive* "
                "at its fullest step by the compiler's own dump of live ranges and buffer "
                "assignment, and the *gaps* in its heap beyond that. *named* is the share of the "
                "bytes alive at the peak that carry a module path or an argument's name; *read* "
                "the time from the compiled text to everything that is known of it.",
            ),
        ]
    )


def _cells(row: Row) -> str:
    head = f"| {row['target']} | {row['model']} | `{row['policy']}` "
    peak, witness = row["peak"], row["witness"]
    if peak is None:
        return f"{head}| does not fit | | | | | | | | |"
    asked = "| | | "
    if witness is not None:
        asked = (
            f"| {witness['live_bytes'] / MIB:,.1f} | {witness['difference_percent']:+.2f} % "
            f"| {witness['gap_bytes'] / MIB:,.1f} "
        )
    return (
        f"{head}| {peak['bytes'] / MIB:,.1f} | {peak['compiler_bytes'] / MIB:,.1f} "
        f"| {peak['difference_percent']:+.2f} % {asked}"
        f"| {peak['phase']} | {100 * peak['attributed_fraction']:.1f} % "
        f"| {row['read_seconds']:.2f} |"
    )


def _summary(found: Sequence[Row]) -> Iterator[str]:
    known = [row for row in found if row["peak"] is not None]
    for target in dict.fromkeys(row["target"] for row in known):
        mine = [row for row in known if row["target"] == target]
        within = sum(abs(r["peak"]["difference_percent"]) <= BEYOND for r in mine)
        far = max(mine, key=lambda r: abs(r["peak"]["difference_percent"]))
        off = max(mine, key=lambda r: abs(_against_alive(r)))
        yield (
            f"- **{target}**: {within} of {len(mine)} within {BEYOND:g} % of what is reserved; the "
            f"furthest is {far['peak']['difference_percent']:+.2f} %, {far['model']}, "
            f"`{far['policy']}`. Against what is alive by the compiler's account, where it was "
            f"asked, and what is reserved elsewhere, the furthest is {_against_alive(off):+.2f} %, "
            f"{off['model']}, `{off['policy']}`."
        )


def _against_alive(row: Row) -> float:
    return (row["witness"] or row["peak"])["difference_percent"]


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = sys.argv[1:] if argv is None else argv
    parser = _common.parser(__doc__)
    parser.add_argument("--target", action="append", metavar="T", help="default: all three")
    parser.add_argument(
        "--model", action="append", metavar="M", help="the file in models/; default: all"
    )
    options = parser.parse_args(given)
    cases = SMOKE if options.smoke else CASES
    chosen = [case for case in cases if options.model is None or case.module in options.model]
    if not chosen:
        parser.error(f"no model of {', '.join(dict.fromkeys(c.module for c in cases))} is chosen")
    jax.config.update("jax_platforms", "cpu")  # leaves an accelerator that is here alone
    try:
        found = list(rows(chosen, tuple(dict.fromkeys(options.target or TARGETS))))
    except remat_kit.RematKitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = _common.described(__file__, given, (row["versions"] for row in found))
    report["rows"] = found
    table = rendered(report)
    if options.json:
        _common.write(options.json, _common.without(report, "buffers"), table, raw=report)
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
