"""How much less memory do plans with pieces take than plans without, and what do they cost?

Recomputation alone cannot go below the largest working set of a program: the logits of a GPT, the
scores of a long attention, the first convolutions of an image network. With ``pieces=True`` the
planner also runs segments in pieces. For each model this compiles the gradient without a plan, and
plans without and with pieces: those of least memory, and those for four shares of the activations.
Then it compiles the plan with pieces for the memory of the least plan without.

    python benchmarks/pieces.py --target cpu --json benchmarks/results/pieces_cpu.json
    python benchmarks/pieces.py --target h100 --models gpt12 vgg16
    python benchmarks/pieces.py --merge OTHER.json --json benchmarks/results/pieces_h100.json
    python benchmarks/pieces.py --longest --target h100 --json longest.json
    python benchmarks/pieces.py --longest 1.1b --target tpu-v5e --json longest.json

With ``--longest`` it looks for the longest sequence of a Llama of 1.5 billion parameters, or of one
with the sizes of TinyLlama (1.1 billion), whose gradient fits on the chip: with each block
recomputed, with a plan without pieces, and with one with pieces. It doubles the length until it
does not fit, and then bisects.

A run that was cut off begins again where it stopped: a model in the file that was taken with the
same planner and compilers is kept, and compiled programs come from the cache. ``--fresh`` takes all
models again. A model that fails gets a row that says why.

Exit status: 0 when done, 1 if a model failed, 2 for a wrong call or a compiler that is not
installed.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import _common
from _common import MIB, Case

import remat_kit
from remat_kit._chip.memory import temporaries
from remat_kit._planner.revision import PIECES_REVISIONS, REVISION
from remat_kit._planner.search import Answer, Search
from remat_kit._planner.steps import frontier_for

_SMALL = {"seq": 8192, "width": 512, "heads": 8, "kv_heads": 8, "hidden": 1536, "vocab": 32000}
CASES = {
    "gpt12": Case("GPT-12, batch 8", "gpt", {}),
    "gpt48": Case("GPT-48, batch 1", "gpt", {"size": "xl", "batch": 1}),
    "bert": Case("BERT-Large, 16 × 512", "bert", {"size": "large", "batch": 16, "seq": 512}),
    "llama8k-small": Case("Llama 512 wide, 8k tokens", "llama_nnx", {"layers": 2, **_SMALL}),
    "llama8k": Case("Llama, 8k tokens", "llama_nnx", {"layers": 2, "seq": 8192}),
    "llama32k": Case("Llama, 32k tokens", "llama_nnx", {"layers": 2, "seq": 32768}),
    "vgg16": Case("VGG-16, batch 64", "vgg", {}),
    "alexnet": Case("AlexNet, batch 1024", "alexnet", {}),
    "resnet18": Case("ResNet-18, batch 64", "resnet", {"depth": 18}),
    "resnet50": Case("ResNet-50, batch 64", "resnet", {"depth": 50}),
    "unet": Case("U-Net, batch 4", "unet", {"batch": 4}),
    "vit": Case("ViT-B/16, batch 64", "vit", {}),
    "moe": Case("MoE, 8 × 1024", "moe", {"seq": 1024}),
}
SMOKE = {"gpt": Case("GPT, 2 layers", "gpt", {"size": "tiny", "seq": 64, "vocab": 2048})}
SHARES = (0.5, 0.3, 0.2, 0.1)
LEAST = "least"  # the budget that is the least memory without pieces
BUDGETS = ("min", *map(str, SHARES), LEAST)
COMPILES = 2  # for each plan, and up to three more if nothing fits

_SCANNED = {"size": "8b", "width": 2048, "dtype": "bf16", "scan": True}
_TINY = {"layers": 22, "hidden": 5632, "heads": 32, "kv_heads": 4, "vocab": 32000}
LLAMAS = {
    "1.5b": Case(
        "Llama, 1.5 billion parameters, bfloat16",
        "llama_nnx",
        {**_SCANNED, "layers": 16, "hidden": 8192},
    ),
    "1.1b": Case("TinyLlama, 1.1 billion parameters, bfloat16", "llama_nnx", _SCANNED | _TINY),
}
SMOKE_LLAMA = Case("Llama, tiny", "llama_nnx", {"size": "tiny", "scan": True})
SHORTEST = {"llama": 1024, "smoke": 64}
WAYS = ("blocks", "regions", "pieces")
FINER = 3  # bisections after the last length that was doubled

Row = dict[str, Any]


def rows_of(
    case: Case, target: str, shares: Sequence[float], tick: Callable[[str], None]
) -> Iterator[Row]:
    """Compile the plans of one model for one chip, and yield its row after each of them."""
    loss, args = case.loss("none")
    chip = remat_kit.target(target)
    row: Row = {**current(case.name, target), "shares": [*shares], "planning_seconds": []}
    row |= {"regions": {}, "pieces": {}}
    least: int | None = None
    for name in ("regions", "pieces"):
        begun = time.perf_counter()
        front, argnums = frontier_for(
            loss, args, chip, 0, "balanced", None, False, tick, "pieces", name == "pieces"
        )
        row["planning_seconds"].append(round(time.perf_counter() - begun, 1))
        search = _Watched(loss, args, argnums, chip, front, COMPILES, tick)
        budgets: dict[str, str | int | float] = {"min": "min"} | {str(s): s for s in shares}
        if least is not None:
            budgets[LEAST] = least
        for budget, amount in budgets.items():
            answer = _answer(search, amount, row[name].get("min"))
            row[name][budget] = None if answer is None else _figures(search, answer)
            row["none_mib"] = _mib(temporaries(search.known[search.plain]))
            yield row
            if least is None and answer is not None:
                least = search.measured(answer.place)
    row["complete"] = True
    yield row


def current(model: str, target: str) -> Row:
    """What a row must have in common with the one that would be taken now."""
    versions = _common.versions(target)
    row = {"model": model, "target": target, "planner": REVISION, "versions": versions}
    return {**row, "pieces_revision": PIECES_REVISIONS[remat_kit.target(target).platform]}


@dataclasses.dataclass
class _Watched(Search):
    """A search that remembers what it predicted for each point before it compiled the point.

    Attributes:
        before: the predicted peak in bytes, corrected by the programs that were compiled before, by
            the index of the point.
    """

    before: dict[int, int] = dataclasses.field(default_factory=dict)

    def compile(self, place: int) -> None:
        if self.is_new(place):
            self.before[place] = self.predicted(place)
        super().compile(place)


def _answer(search: Search, budget: str | int | float, least: Any) -> Answer | None:
    """Return a plan for a budget, or None if the budget is below the memory of the least plan.

    Args:
        search: compiles the plans.
        budget: the budget.
        least: the figures of the least plan; None for that plan itself.
    """
    if least is not None:
        limit = search.limit(budget)
        assert limit is not None
        if limit < search.fixed() + least[0] * MIB:
            return None
    try:
        return search.run(budget)
    except remat_kit.UserError:
        if least is None:
            raise
        return None


def _figures(search: _Watched, answer: Answer) -> list[Any]:
    """Return the figures of a plan.

    They are: MiB of temporaries; how far the predicted peak is above the compiled one, as a share
    of it; extra FLOPs and extra time as shares of the step's; the segments in pieces; the numbers
    of pieces; how far the prediction that `remat_kit.plan` reports is above the compiled peak,
    which is corrected by the programs that were compiled before; whether the compiler compiled the
    program. It refuses one that takes more than the chip has, and says how much it needs, which the
    other figures then take for the peak.
    """
    point, memory = search.points[answer.place], search.known[answer.place]
    step = search.frontier.forward_seconds + search.frontier.backward_seconds
    peak = search.measured(answer.place)
    divided = None if point.graph is None else point.graph.divided
    return [
        _mib(temporaries(memory)),
        round(point.predicted_peak_bytes / peak - 1, 4) if peak else None,
        round(point.extra_flops / (3 * point.forward_flops), 4),
        round(point.extra_seconds / step, 4),
        len(divided.divisions) if divided else 0,
        [*point.pieces],
        round(search.before[answer.place] / peak - 1, 4) if peak else None,
        memory.temp_bytes is not None,
    ]


def _mib(size: int | None) -> float | None:
    return None if size is None else round(size / MIB, 1)


# -- the longest sequence -------------------------------------------------------------------------


def fits(case: Case, length: int, way: str, target: str) -> bool:
    """Tell whether the gradient for one sequence of a length fits on a chip.

    A length at which the compiler refuses the program counts as one that does not fit.
    """
    sized = Case(case.name, case.module, {**case.size, "batch": 1, "seq": length})
    loss, args = sized.loss("nothing" if way == "blocks" else "none")
    if way == "blocks":
        return bool(remat_kit.measure(loss, *args, target=target).fits)
    try:
        plan = remat_kit.plan(loss, *args, budget="fit", target=target, pieces=way == "pieces")
    except (remat_kit.UserError, remat_kit.CompileError):
        return False
    return bool(plan.compiled and plan.compiled.fits)


def longest(fitting: Callable[[int], bool], shortest: int) -> int:
    """Return the longest length that fits, to an eighth of a doubling; 0 if the shortest does not.

    >>> longest(lambda length: length <= 1000, 64), longest(lambda length: length < 10, 64)
    (960, 0)
    """
    if not fitting(shortest):
        return 0
    lower = shortest
    while fitting(2 * lower):
        lower *= 2
    step = lower // 2
    for _ in range(FINER):
        lower += step if fitting(lower + step) else 0
        step //= 2
    return lower


def longest_rows(
    options: Any, given: Sequence[str], old: Mapping[str, Row], tick: Callable[[str], None]
) -> dict[str, Any]:
    """Look for the longest sequence of each way, and write the report after each trial."""
    case = SMOKE_LLAMA if options.smoke else LLAMAS[options.longest]
    shortest = SHORTEST["smoke" if options.smoke else "llama"]
    wanted = current(case.name, options.memory or options.target)
    rows = {row["way"]: row for row in old.values() if wanted.items() <= row.items()}
    report: dict[str, Any] = {}
    for way in WAYS:
        row = rows.setdefault(way, {**wanted, "way": way, "trials": {}})

        def fitting(length: int, row: Row = row, way: str = way) -> bool:
            trials = row["trials"]
            if str(length) not in trials:
                tick(f"{way}, {length} tokens")
                trials[str(length)] = fits(case, length, way, row["target"])
                _written(options.json, reported_longest(given, rows.values()))
            return trials[str(length)]

        row["tokens"] = longest(fitting, shortest)
        report = reported_longest(given, rows.values())
        _written(options.json, report)
    return report


def reported_longest(given: Sequence[str], rows: Iterable[Row]) -> dict[str, Any]:
    """Return a report of the longest sequences."""
    found = sorted(rows, key=lambda row: WAYS.index(row["way"]))
    return _common.described(__file__, given, [found[0]["versions"]]) | {"longest": found}


def rendered_longest(report: Mapping[str, Any]) -> str:
    """Return a report of the longest sequences in Markdown."""
    rows = report["longest"]
    lines = ["| model | chip | plan | tokens | times blocks |", "|---|---|---|---:|---:|"]
    blocks = next((row.get("tokens") for row in rows if row["way"] == "blocks"), None)
    for row in rows:
        tokens = row.get("tokens")
        share = f"{tokens / blocks:.1f}" if tokens and blocks else ""
        cells = (row["model"], row["target"], row["way"], f"{tokens:,}" if tokens else "–", share)
        lines.append("| " + " | ".join(cells) + " |")
    about = (
        "Tokens of the longest sequence whose gradient fits, batch 1, without an optimizer, to an "
        "eighth of a doubling. *blocks* recomputes each block (`nothing`), *regions* is a plan "
        "without pieces, *pieces* one with them."
    )
    return "\n".join([*lines, *_common.ending(report, about)])


# -- the report -----------------------------------------------------------------------------------


def rendered(report: Mapping[str, Any]) -> str:
    """Return a report in Markdown."""
    if "longest" in report:
        return rendered_longest(report)
    side = "MiB | FLOPs | time | model | corrected"
    lines = [
        f"| | budget | {side} | with pieces: {side} | segments | pieces |",
        "|---|---|" + "---:|" * 12,
    ]
    for row in report["rows"]:
        lines += _lines(row)
    about = (
        "Temporaries of the compiled gradient in MiB, without pieces and with them. A budget is a "
        "share of the temporaries without a plan; *min* is the least memory, and *least* the "
        "memory of the least plan without pieces. FLOPs are those that are computed more, as a "
        "share of a step of three forward passes; time is the roofline's. The column *model* says "
        "how far the planner's prediction of the peak, arguments and results included, is above "
        "the compiled one, and *corrected* the same of the prediction that `plan` reports, which "
        "the programs compiled before have corrected. – stands for a budget that no plan fits. "
        "Where *refused* stands, the program needs more than the chip has, so that XLA refuses it, "
        "and the figures are of the amount that its message names. "
        f"{_accuracy(report['rows'])}Compiled, not run."
    )
    ending = _common.ending(report, about, compiled_only=False)
    return "\n".join([*lines, *ending, *_mixed(report["rows"])])


def _accuracy(rows: Sequence[Row]) -> str:
    """Say how many peaks of plans in pieces were predicted badly; nothing if there are none."""
    plans = [plan for row in rows for plan in row.get("pieces", {}).values() if plan and plan[4]]
    compiled = [plan for plan in plans if plan[7]]
    if not compiled:
        return ""
    alone, corrected = (sum(abs(plan[i] or 0) > 0.1 for plan in compiled) for i in (1, 6))
    return (
        f"Of {len(compiled)} plans in pieces that were compiled, the model is more than 10 % off "
        f"for {alone}, and the corrected prediction for {corrected}. "
    )


def _lines(row: Row) -> Iterator[str]:
    name = row["model"]
    if row.get("none_mib") is not None:
        yield f"| {name} | none | {row['none_mib']:,.0f} |" + " |" * 11
    for budget in ("min", *map(str, row.get("shares", ())), LEAST):
        sides = [row[kind].get(budget, ...) for kind in ("regions", "pieces") if kind in row]
        if all(side is ... for side in sides):
            continue
        without, pieces = ([*_cells(side)] for side in sides)
        yield "| " + " | ".join([name, budget, *without[:5], *pieces]) + " |"
    if "error" in row:
        yield f"| {name} | {row['error']} |" + " |" * 12
    elif not row.get("complete"):
        yield f"| {name} | not all plans were taken |" + " |" * 12


def _cells(figures: Any) -> Iterator[str]:
    if figures is ... or figures is None:
        yield from ["–" if figures is None else "", *[""] * 6]
        return
    size, error, flops, seconds, segments, pieces, corrected, is_compiled = figures
    yield f"{size:,.0f}" if is_compiled else f"{size:,.0f} (refused)"
    yield from (f"{100 * share:+.0f} %" for share in (flops, seconds))
    yield from ("" if e is None else f"{100 * e:+.1f} %" for e in (error, corrected))
    yield from (str(segments or ""), ", ".join(map(str, pieces)))


def _mixed(rows: Sequence[Row]) -> Iterator[str]:
    """Say which models were taken with other versions, if not all were taken with the same."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        text = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        groups.setdefault(text, []).append(row["model"])
    if len(groups) > 1:
        yield ""
        yield from (f"{'; '.join(models)}: with {text}." for text, models in groups.items())


def is_kept(row: Row, wanted: Row, shares: Sequence[float]) -> bool:
    """Tell whether a row has all plans, and is what would be found now."""
    same = all(row.get(name) == value for name, value in wanted.items())
    return same and bool(row.get("complete")) and row["shares"] == [*shares]


def reported(given: Sequence[str], rows: Iterable[Row]) -> dict[str, Any]:
    """Return a report of rows, in the order of the models."""
    report = _common.reported(__file__, given, rows, (*CASES.values(), *SMOKE.values()))
    found = report.pop("rows")
    return report | {"target": found[0]["target"] if found else "", "rows": found}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _common.parser(__doc__)
    parser.add_argument("--target", default="cpu", choices=_common.TARGETS)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--fresh", action="store_true", help="keep no model of the file")
    parser.add_argument("--merge", nargs="+", type=pathlib.Path, default=[], metavar="PATH")
    parser.add_argument(
        "--longest",
        nargs="?",
        const="1.5b",
        choices=list(LLAMAS),
        help="of a Llama, on the chip; of 1.5 billion parameters by default",
    )
    parser.add_argument("--memory", metavar="CHIP", help="for --longest: a chip as h100@40GiB")
    options = parser.parse_args(given)
    if options.longest:
        return _longest(options, given)
    cases = SMOKE if options.smoke else {name: CASES[name] for name in options.models}
    shares = SHARES[:1] if options.smoke else SHARES
    rows = {} if options.fresh else _common.rows_by_model(options.json)
    for path in options.merge:
        rows |= _common.rows_by_model(path)
    if not options.merge:
        try:
            for case in cases.values():
                _take(case, options, shares, given, rows)
        except remat_kit.MissingPluginError as error:
            print(error, file=sys.stderr)
            return 2
    merged = {"--merge", *map(str, options.merge)}  # their rows were taken by the same command
    report = reported([word for word in given if word not in merged], rows.values())
    _written(options.json, report)
    print(rendered(report))
    return int(any("error" in row for row in rows.values()))


def _longest(options: Any, given: Sequence[str]) -> int:
    old: dict[str, Row] = {}
    if options.json is not None and options.json.exists() and options.json.stat().st_size:
        rows = json.loads(options.json.read_text(encoding="utf-8"))["longest"]
        old = {row["way"]: row for row in rows}
    try:
        print(rendered(longest_rows(options, given, old, _say)))
    except remat_kit.MissingPluginError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _take(
    case: Case, options: Any, shares: Sequence[float], given: Sequence[str], rows: dict[str, Row]
) -> None:
    """Take the row of a model, unless it is there already."""
    wanted = current(case.name, options.target)
    if case.name in rows and is_kept(rows[case.name], wanted, shares):
        return

    def tick(what: str) -> None:
        print(f"{case.name}: {what}", file=sys.stderr, flush=True)

    try:
        for row in rows_of(case, options.target, shares, tick):
            rows[case.name] = row
            _written(options.json, reported(given, rows.values()))
    except remat_kit.MissingPluginError:
        raise
    except Exception as error:
        taken = rows.get(case.name, {})
        said = str(error).partition("\n")[0] or type(error).__name__
        rows[case.name] = (taken if taken.get("versions") == wanted["versions"] else {}) | wanted
        rows[case.name]["error"] = f"{type(error).__name__}: {said}"[:300]
        tick(rows[case.name]["error"])


def _written(path: pathlib.Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        _common.write(path, report, rendered(report))


if __name__ == "__main__":
    sys.exit(main())
