"""Take the table of Feng and Huang (CVPR 2021): 18 CNNs, planned and compiled, beside theirs.

Each model is planned for each chip three times: at their fraction of the memory (how much extra
work?), at their extra work (how little memory?) and for the least memory. Where a goal is not
reached, plans that run segments in pieces are tried too. Each row is kept in the JSON as soon as it
is there. A row of the same versions, planner and options is not taken again, so a run that was
interrupted goes on where it stopped; compiled answers are kept on disk as well.

    python benchmarks/ogc_table.py --json benchmarks/results/ogc_table.json
    python benchmarks/ogc_table.py --arch resnet50 darts --target h100 tpu-v5e

`remat-kit bench --arch resnet101 --target h100` shows one row. Exit status: 0 when done, 2 for a
wrong call or a compiler that is not installed.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import _common
import jax
from _common import MIB, ROOT

import remat_kit
from remat_kit._chip import compile as _compile
from remat_kit._cli import bench as _bench
from remat_kit._cli import published as _published
from remat_kit._cli.bench import NOT_MEASURED
from remat_kit._cli.published import COMPILES, TABLE
from remat_kit._planner.revision import PIECES_REVISIONS, REVISION

Row = dict[str, Any]

# What compiles fastest first, so that a run that is cut short has most rows.
CHEAPEST_FIRST = (
    *("alexnet", "vgg11", "vgg13", "vgg16", "vgg19", "resnet18", "resnet34", "resnet50"),
    *("resnet101", "inception", "resnet152", "densenet121", "darts", "densenet161", "densenet169"),
    *("densenet201", "amoebanet", "nasnet"),
)
SMOKE: dict[str, dict[str, Any]] = {
    "vgg11": {"batch": 2, "image": 32, "width": 4, "hidden": 16, "classes": 10},
    "resnet18": {"batch": 2, "image": 32, "width": 4, "classes": 10},
}
QUESTIONS = {"memory": "at their memory", "work": "at their work", "least": "least memory"}


# -- taking rows ----------------------------------------------------------------------------------


def taken(arch: str, chip: str, sizes: Mapping[str, Any], compiles: int, say: Any = None) -> Row:
    """Take one row."""
    found = _bench.bench(
        *(arch, chip),
        models=ROOT / "models",
        sizes=sizes,
        compiles=compiles,
        pieces=True,
        progress=say,
    ).to_json()
    found |= _wanted(arch, chip, sizes, compiles) | {"date": _today()}
    return found | {"pieces_revision": _pieces_revision(chip)} if found["pieces"] else found


def _pieces_revision(chip: str) -> int:
    return PIECES_REVISIONS[remat_kit.target(chip).platform]


def _wanted(arch: str, chip: str, sizes: Mapping[str, Any], compiles: int) -> Row:
    """What a row must have in common with the one that would be taken now."""
    versions = {"python": platform.python_version()}
    versions |= _compile._versions(remat_kit.target(chip).platform)
    return {
        "arch": arch,
        "target": remat_kit.target(chip).name,
        "sizes": dict(_published.published(arch).sizes) | dict(sizes),
        "compiles": compiles,
        "planner": REVISION,
        "versions": versions,
    }


def _today() -> str:
    return datetime.date.today().isoformat()


def is_current(row: Row, wanted: Row) -> bool:
    """Tell whether a row is what would be found now."""
    if row.get("pieces"):
        wanted = wanted | {"pieces_revision": _pieces_revision(wanted["target"])}
    elif not all(outcome["reached"] for outcome in row["outcomes"]):
        return False
    return all(row.get(name) == value for name, value in wanted.items())


def kept(path: pathlib.Path | None) -> dict[tuple[str, str], Row]:
    """Return the rows of an earlier run, by model and chip."""
    if path is None or not path.exists() or not path.stat().st_size:
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {(row["arch"], row["target"]): row for row in rows}


def missing(
    archs: Sequence[str], chips: Sequence[str], options: Any, rows: Mapping[tuple[str, str], Row]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield what has to be taken: model, chip and sizes."""
    for chip in chips:
        for arch in sorted(archs, key=CHEAPEST_FIRST.index):
            sizes = SMOKE[arch] if options.smoke else {}
            name = remat_kit.target(chip).name
            row = rows.get((arch, name))
            wanted = _wanted(arch, chip, sizes, options.compiles)
            if options.fresh or row is None or not is_current(row, wanted):
                yield arch, chip, sizes


# -- the report -----------------------------------------------------------------------------------


def reported(given: Sequence[str], rows: Iterable[Row]) -> dict[str, Any]:
    """Return the report: rows in the paper's order, chip by chip."""
    order = [line.arch for line in TABLE]
    chips = [*_common.TARGETS]
    found = sorted(
        rows,
        key=lambda row: (
            chips.index(row["target"]) if row["target"] in chips else len(chips),
            row["target"],
            order.index(row["arch"]),
        ),
    )
    report = _common.described(__file__, given, (row["versions"] for row in found))
    return report | {"planner": REVISION, "rows": found}


def rendered(report: Mapping[str, Any]) -> str:
    """Return a report as Markdown."""
    rows = report["rows"]
    chips = list(dict.fromkeys(row["target"] for row in rows))
    lines = [
        "| target | models | " + " | ".join(QUESTIONS.values()) + " |",
        "|---|---:|" + "---:|" * len(QUESTIONS),
        *(_summary(chip, [row for row in rows if row["target"] == chip]) for chip in chips),
        "",
        "How many models reach the goal: at their fraction of the memory at most half of their "
        "extra work; at their extra work, and with the least memory, a smaller fraction than "
        "theirs.",
    ]
    for chip in chips:
        lines += ["", *_section(chip, [row for row in rows if row["target"] == chip], report)]
    about = (
        "Memory is that of the temporaries of one compiled `value_and_grad`, in MiB; work is what "
        "is computed twice, in forward passes; *its time* is the roofline's, in those of the "
        "forward pass, and *step* the same as a part of a step. *In pieces*: no plan without "
        "pieces reaches the goal, and this one runs segments in pieces of an axis, which rounds "
        "sums in another order. Theirs: measured on an RTX 2080 "
        "Ti; work from their time, a step being three forward passes, 1 at the most."
    )
    return "\n".join([*lines, *_common.ending(report, about)])


def _summary(chip: str, rows: Sequence[Row]) -> str:
    cells = []
    for goal in QUESTIONS:
        reached = sum(o["reached"] for row in rows for o in row["outcomes"] if o["goal"] == goal)
        cells.append(f"{reached} of {len(rows)}")
    return f"| {chip} | {len(rows)} | " + " | ".join(cells) + " |"


def _section(chip: str, rows: Sequence[Row], report: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {chip}"
    yield ""
    yield (
        "| model | | MiB, without → with | theirs | left | theirs | work | theirs | its time | "
        "step | theirs | goal |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|"
    for row in rows:
        yield from (_line(row, outcome, report) for outcome in row["outcomes"])
    reasons = [line for row in rows for line in _reasons(row)]
    if reasons:
        yield from ("", "Where a goal is not reached:", "", *reasons)
    yield ""
    yield from _times(rows)
    if any(row["planner"] != report["planner"] for row in rows):
        yield ""
        yield "† planned before the last change of the planner."
    if any(not row["sizes_as_published"] for row in rows):
        yield ""
        yield "Note: the sizes differ from the paper's, so do not compare the figures."


def _reasons(row: Row) -> Iterator[str]:
    """Yield why goals are not reached, those of one reason together."""
    goals: dict[str, list[str]] = {}
    for outcome in row["outcomes"]:
        if not outcome["reached"]:
            goals.setdefault(outcome["reason"], []).append(QUESTIONS[outcome["goal"]])
    for reason, questions in goals.items():
        yield f"- {row['title']}, {', '.join(questions)}: {reason}."


def _line(row: Row, outcome: Row, report: Mapping[str, Any]) -> str:
    paper = row["published"]
    old = "" if row["planner"] == report["planner"] else " †"
    cells = [row["title"] + old, QUESTIONS[outcome["goal"]]]
    cells[-1] += ", in pieces" if outcome.get("pieces") else ""
    before, after = row["plain_temp_bytes"] / MIB, outcome["temp_bytes"]
    cells.append(f"{before:,.0f} → " + ("?" if after is None else f"{after / MIB:,.0f}"))
    cells.append(f"{paper['plain_mib']:,} → {paper['least_mib']:,}")
    cells += [_percent(outcome["fraction"]), _percent(paper["fraction"])]
    cells += [_more(outcome["extra_forward"]), _more(paper["extra_forward"])]
    cells.append(_more(outcome["extra_forward_time"]))
    cells += [_percent(outcome["extra_step_time"], "+"), _percent(paper["extra_step_time"], "+")]
    return "| " + " | ".join([*cells, "yes" if outcome["reached"] else "no"]) + " |"


def _percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{sign}{100 * value:.0f} %"


def _more(value: float | None) -> str:
    return "" if value is None else f"+{value:.2f}"


def _times(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the measured times of steps, or that there are none."""
    measured = [row for row in rows if row["plain_step_seconds"] is not None]
    if not measured:
        yield f"Step times: {NOT_MEASURED}."
        return
    yield "| model | measured step, ms, without | " + " | ".join(QUESTIONS.values()) + " |"
    yield "|---|---:|" + "---:|" * len(QUESTIONS)
    for row in measured:
        times = [row["plain_step_seconds"], *(o["step_seconds"] for o in row["outcomes"])]
        cells = ["" if t is None else f"{1e3 * t:,.1f}" for t in times]
        yield f"| {row['title']} | " + " | ".join(cells) + " |"


# -- the command line -----------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    known = [line.arch for line in TABLE]
    parser = _common.parser(__doc__)
    parser.add_argument("--arch", nargs="+", choices=known, metavar="NAME", help="default: all")
    parser.add_argument(
        "--target", nargs="+", default=["cpu", "h100"], metavar="T", help="default: cpu h100"
    )
    parser.add_argument(
        "--compiles", type=int, default=COMPILES, metavar="N", help="for each plan, at most"
    )
    parser.add_argument("--fresh", action="store_true", help="take rows again that are there")
    parser.add_argument(
        "--render", action="store_true", help="take no row, write the table of those there are"
    )
    options = parser.parse_args(given)
    given = [text for text in given if text != "--render"]
    archs = list(SMOKE) if options.smoke else list(dict.fromkeys(options.arch or known))
    if "local" not in options.target:
        jax.config.update("jax_platforms", "cpu")  # leaves an accelerator that is here alone
    rows = {} if options.smoke else kept(options.json)
    try:
        asked = () if options.render else missing(archs, options.target, options, rows)
        _take(list(asked), options, given, rows)
    except remat_kit.RematKitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = reported(given, rows.values())
    table = rendered(report)
    if options.json:
        _common.write(options.json, report, table)
    print(table)
    return 0


def _take(
    asked: Sequence[tuple[str, str, dict[str, Any]]],
    options: Any,
    given: Sequence[str],
    rows: dict[tuple[str, str], Row],
) -> None:
    with _common.progress() as bar:
        job = bar.add_task("", total=len(asked))
        for arch, chip, sizes in asked:

            def say(text: str, arch: str = arch, chip: str = chip) -> None:
                bar.update(job, description=f"{arch}, {chip}: {text}")

            row = taken(arch, chip, sizes, options.compiles, say)
            if options.json and not options.smoke:
                rows.update(kept(options.json))  # another run may have added to them meanwhile
            rows[arch, row["target"]] = row
            if options.json:
                report = reported(given, rows.values())
                _common.write(options.json, report, rendered(report))
            bar.advance(job)


if __name__ == "__main__":
    sys.exit(main())
