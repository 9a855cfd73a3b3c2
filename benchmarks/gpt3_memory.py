"""Draw the memory of one training step of a 72-layer GPT, phase by phase, with and without remat.

This is the picture of MindSpore's recomputation tutorial: loss, gradients and an update of a GPT of
72 layers, parameters and optimizer state donated, in bfloat16. The optimizer is GPT-3's: Adam with
weight decay, the gradients clipped by their global norm (Brown et al. 2020, appendix B), so that
all of them are there before the update begins. On one chip the layers are narrow, compiled unrolled
and as a scan; with GPT-3's width of 12,288 they are a scan on a slice of 64 TPUs v5p, sharded over
both axes of a mesh of 8 by 8 (``sharding="fsdp+tp"`` of `models/gpt.py`). Scans are planned too,
for fractions of the temporaries without a plan.

What is drawn are the bytes alive at each step of the compiled schedule; nothing is run. A scan's
body stands once in the schedule, so its part is short though it runs 72 times. Compiled answers
are kept on disk; without them the whole takes about half an hour on two cores.

    python benchmarks/gpt3_memory.py --json benchmarks/results/gpt3_memory.json \\
        --png gpt3_memory.png

Rows of the JSON file that are not asked for by ``--form`` and ``--policy`` stay there.

A row is written as soon as it is taken.

Exit status: 0 when done, 2 for a wrong call or a compiler that is not installed.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import _common
import jax
import optax
from _common import MIB, POLICIES, Case

import remat_kit
from remat_kit._chip.compile import compile_program
from remat_kit._chip.target import target as target_of
from remat_kit._compiled import hlo as _hlo
from remat_kit._compiled.peak import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    UPDATE,
    Anatomy,
    anatomy,
    running_module,
    running_phases,
)
from remat_kit._inspect.reading import Reading
from remat_kit._show import figures as _figures

LOSS = "loss"
PHASES = (FORWARD, LOSS, RECOMPUTE, BACKWARD, UPDATE)
HEAD = "wte.attend"  # the module that makes the logits
POINTS = 400  # of a curve in the JSON

# GPT-3's blocks at full width; the vocabulary is rounded up to a multiple of 128, as in
# Megatron-LM, so that it can be split.
_FULL = {"size": "175b", "layers": 72, "vocab": 50304, "batch": 8, "dtype": "bf16", "scan": True}
_SHARDED = {"mesh": "data=8,model=8", "sharding": "fsdp+tp"}
_SIZE = {"size": "72l", "batch": 4, "dtype": "bf16"}
CASES = (
    Case("unrolled", "gpt", _SIZE),
    Case("scan", "gpt", {**_SIZE, "scan": True}),
    Case("slice", "gpt", _FULL | _SHARDED),
)
SLICE = "tpu-v5p:4x4x4"
_TINY = {"size": "tiny", "layers": 2, "batch": 4, "dtype": "bf16"}
SMOKE = (
    Case("unrolled", "gpt", _TINY),
    Case("scan", "gpt", {**_TINY, "scan": True}),
    Case("slice", "gpt", {**_TINY, "scan": True, **_SHARDED, "mesh": "data=2,model=2"}),
)
SMOKE_SLICE = "tpu-v5p:2x2x1"
BUDGETS = ("0.3", "0.2", "0.15")  # of the temporaries

Row = dict[str, Any]


def training_step(loss: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    """Return a whole step: ``(params, state, *batch)`` to ``(params, state, loss)``."""

    def train_step(params, state, *batch):
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return train_step


def adamw() -> Any:
    """Return GPT-3's optimizer."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))


def row_on_a_chip(case: Case, policy: str, target: str, compiles: int) -> Row:
    """Compile one step for one chip and take its memory apart."""
    budget = budget_of(policy)
    loss, (params, *batch) = case.loss("none" if budget else policy)
    if budget:
        how = {"budget": budget, "target": target, "optimizer": adamw(), "compiles": compiles}
        plan = remat_kit.plan(loss, params, *batch, **how)
        loss = remat_kit.policy(plan)(loss)
    args = (params, jax.eval_shape(adamw().init, params), *batch)
    step = training_step(loss, adamw())
    compiled = compile_program(step, args, target, argnums=None, donate_argnums=(0, 1))
    memory = compiled.memory
    row = begun(case, policy, memory, remat_kit.inspect(loss, params, *batch))
    if compiled.hlo_text is None:
        return row
    parts = anatomy(
        _hlo.parse(compiled.hlo_text), memory.peak_bytes, platform=target_of(target).platform
    )
    return row | taken_apart(parts)


def row_on_a_slice(case: Case, policy: str, target: str, compiles: int) -> Row:
    """Compile one step for a slice of TPUs and take the memory of one of its chips apart."""
    budget = budget_of(policy)
    loss, args = case.loss("none" if budget else policy)
    how = {"target": target, "optimizer": adamw()}
    if budget:
        plan = remat_kit.plan(loss, *args, budget=budget, compiles=compiles, **how)
        loss = remat_kit.policy(plan)(loss)
    report = remat_kit.inspect(loss, *args, **how)
    row = begun(case, policy, report.memory[target], report)
    if target not in report.readings:
        return row
    return row | taken_apart(report.readings[target])


def budget_of(policy: str) -> str:
    """Return the budget of a plan; "" for a preset.

    >>> budget_of("plan 0.3"), budget_of("dots")
    ('0.3', '')
    """
    return policy.removeprefix("plan ") if policy.startswith("plan ") else ""


def begun(case: Case, policy: str, memory: remat_kit.Memory, report: remat_kit.Report) -> Row:
    """Return what is known of a row without its compiled program."""
    return {
        "form": case.name,
        "size": dict(case.size),
        "policy": policy,
        "target": memory.target,
        "extra_flops_fraction": report.recomputed_flops / report.forward_flops,
        "fits": memory.fits,
        "compiler_bytes": memory.peak_bytes,
        "versions": dict(memory.versions),
    }


def taken_apart(parts: Anatomy | Reading) -> Row:
    """Return the curve of a step, its peak in each phase, and what is held at the highest."""
    phases = phases_of(parts)
    base = parts.schedule.base_bytes
    alive = [base + temporary for temporary in parts.schedule.temporary_bytes]
    peaks = {
        phase: max(b for b, p in zip(alive, phases, strict=True) if p == phase)
        for phase in PHASES
        if phase in phases
    }
    peak = parts.peak
    return {
        "bytes": peak.bytes,
        "phase": phases[peak.step],
        "step": peak.step,
        "steps": peak.steps,
        "module": peak.module,
        "phase_peaks": peaks,
        "held": peak.by_phase(),
        "resident_bytes": base,
        "curve": [
            {"step": step, "bytes": alive[step], "phase": phases[step]} for step in points(alive)
        ],
    }


def phases_of(parts: Anatomy | Reading) -> list[str]:
    """Return the phase of each step, the loss and its derivative apart.

    That is what runs outside of every module after the logits are made and before the backward
    pass comes to a module.
    """
    phases = running_phases(parts.schedule, parts.origins)
    modules = [running_module(parts.schedule, parts.origins, s) for s in range(len(phases))]
    places = list(zip(phases, modules, strict=True))
    made = [s for s, (phase, module) in enumerate(places) if phase == FORWARD and HEAD in module]
    if not made:
        return phases
    back = (BACKWARD, RECOMPUTE)
    later = range(made[-1] + 1, len(phases))
    end = next((s for s in later if phases[s] in back and "/" in modules[s]), len(phases))
    return [
        LOSS if made[-1] < s < end and "/" not in module else phase
        for s, (phase, module) in enumerate(places)
    ]


def points(alive: Sequence[int]) -> Iterator[int]:
    """Yield the fullest step of each of at most ``POINTS`` intervals.

    >>> list(points([3, 1, 2]))
    [0, 1, 2]
    """
    count = min(POINTS, len(alive))
    for i in range(count):
        interval = range(i * len(alive) // count, (i + 1) * len(alive) // count)
        yield max(interval, key=lambda s: (alive[s], -s))


def rendered(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    head = ["layers", "policy", *PHASES, "peak in", "activations", "cut", "temporaries", "cut"]
    lines = [
        "| " + " | ".join([*head, "extra FLOPs", "fits"]) + " |",
        "|---|---|" + "---:|" * len(PHASES) + "---|" + "---:|" * 5 + "---|",
        *(_cells(row, plain_of(row, report["rows"])) for row in report["rows"]),
    ]
    forms = {row["form"]: row for row in report["rows"]}
    sizes = ", ".join(f"{form} {_size(row)}" for form, row in forms.items())
    about = (
        f"Most bytes alive on one chip while each phase of a training step runs, in MiB: GPT, "
        f"{sizes}; AdamW with the gradients clipped by their global norm, donated state. "
        "*Activations* are the temporaries that the forward pass made and that are alive at the "
        "peak, *temporaries* all that is there beside parameters and optimizer state, gradients "
        "too; each cut is from `none`. *Extra FLOPs* are of the traced program, in parts of the "
        "forward pass. A phase without a figure has no step of its own: the compiler fused it "
        "with another."
    )
    for earlier in report.get("earlier", ()):
        versions = ", ".join(f"{name} {version}" for name, version in earlier["versions"].items())
        rows = ", ".join(f"{form} `{policy}`" for form, policy in earlier["rows"])
        about += (
            f" These rows were taken on {earlier['date']} with {versions}, by "
            f"`{earlier['command']}`: {rows}."
        )
    return "\n".join([*lines, *_common.ending(report, about)])


def merged(old: Mapping[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Return a report with the rows of an earlier one that the new one does not replace."""

    def name(row: Row) -> list[str]:
        return [row["form"], row["policy"]]

    found = {tuple(name(row)): row for row in new["rows"]}
    kept = [row for row in old["rows"] if tuple(name(row)) not in found] if old else []
    if not old or not kept:
        return new
    rows = [found.pop(tuple(name(row)), row) for row in old["rows"]]
    names, runs = [name(row) for row in kept], []
    for run in (*old.get("earlier", ()), {k: old[k] for k in ("command", "date", "versions")}):
        its = [row for row in names if row in run.get("rows", names)]
        names = [row for row in names if row not in its]
        runs += [run | {"rows": its}] if its else []
    return new | {"earlier": runs, "rows": [*rows, *found.values()]}


def _size(row: Row) -> str:
    size = dict(row["size"])
    named, batch = size.pop("size"), size.pop("batch")
    rest = "".join(f", {name} {size[name]}" for name in ("layers", "vocab") if name in size)
    return f"`{named}`{rest}, {batch} sequences on {row['target']}"


def plain_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return the row of the same form with no policy."""
    plain = (r for r in rows if (r["form"], r["policy"]) == (row["form"], "none"))
    return next((r for r in plain if "bytes" in r), None)


def activation_bytes(row: Row) -> int:
    """What the forward pass made and is alive at the peak."""
    return row["held"].get(FORWARD, 0)


def temporary_bytes(row: Row) -> int:
    """What is alive at the peak beside parameters, state and batch."""
    return row["bytes"] - row["resident_bytes"]


def _cells(row: Row, plain: Row | None) -> str:
    head = f"| {row['form']} | `{row['policy']}` | "
    extra = f"{row['extra_flops_fraction']:.3f}"
    if "bytes" not in row:
        cells = [*[""] * len(PHASES), "does not fit", *[""] * 4]
        return head + " | ".join([*cells, extra, "no"]) + " |"
    peaks = [row["phase_peaks"].get(phase) for phase in PHASES]
    cells = ["" if b is None else f"{b / MIB:,.0f}" for b in peaks]
    cells.append(row["phase"])
    for size in (activation_bytes, temporary_bytes):
        cells.append(f"{size(row) / MIB:,.0f}")
        cut = None if plain in (None, row) else 1 - size(row) / size(plain)
        cells.append("" if cut is None else f"{100 * cut:.0f} %")
    return head + " | ".join([*cells, extra, "yes" if row["fits"] else "no"]) + " |"


def draw(report: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw the curves, a column for each policy, coloured by phase."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [row for row in report["rows"] if "bytes" in row]
    forms = list(dict.fromkeys(row["form"] for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    colors = {phase: color for phase, (color, _) in _figures.COLORS.items()} | {LOSS: "#7b5ea7"}
    extent = (1 + 3.3 * len(policies), 3.1 * len(forms) + 0.6)
    figure = Figure(figsize=extent, layout="constrained", facecolor="white")
    grid = figure.subplots(len(forms), len(policies), squeeze=False, sharey="row")
    drawn = {(row["form"], row["policy"]) for row in rows}
    for (i, form), (j, policy) in itertools.product(enumerate(forms), enumerate(policies)):
        grid[i][j].set_visible((form, policy) in drawn)
    for row in rows:
        axes = grid[forms.index(row["form"])][policies.index(row["policy"])]
        curve = row["curve"]
        at = [100 * p["step"] / row["steps"] for p in curve] + [100]
        for phase in (*PHASES, "other"):
            sizes = [p["bytes"] / MIB / 1024 if p["phase"] == phase else 0 for p in curve]
            axes.fill_between(at, [*sizes, 0], step="post", color=colors[phase], linewidth=0)
        gib = row["bytes"] / MIB / 1024
        axes.axhline(gib, color="#1f2937", linewidth=0.7, linestyle=(0, (4, 3)))
        axes.set_title(
            f"{row['form']}, {row['policy']}: {gib:.1f} GiB in {row['phase']}",
            loc="left",
            fontsize=9,
        )
        axes.axhline(row["resident_bytes"] / MIB / 1024, color="white", linewidth=0.8)
        axes.set_xlim(0, 100)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    for line in grid:
        line[0].set_ylabel("device memory, GiB")
    for axes in grid[-1]:
        axes.set_xlabel("% of the schedule")
    handles = [Patch(color=colors[phase], label=phase) for phase in PHASES]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(PHASES), frameon=False)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def policies_of(case: Case, budgets: Sequence[str]) -> tuple[str, ...]:
    """Return what a form is compiled with: planning 72 unrolled layers is left out."""
    planned = tuple(f"plan {budget}" for budget in budgets)
    return POLICIES if case.name == "unrolled" else POLICIES + planned


def reported(
    given: Sequence[str], target: str, rows: Sequence[Row], earlier: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a report of rows, and of those of an earlier one that are not among them."""
    report = _common.described(__file__, given, (row["versions"] for row in rows))
    return merged(earlier, report | {"target": target, "rows": [*rows]})


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = sys.argv[1:] if argv is None else argv
    parser = _common.parser(__doc__)
    parser.add_argument("--target", default="h100", metavar="T", help="default: h100")
    parser.add_argument("--png", type=_common.output, metavar="PATH", help="draw the curves there")
    forms = [case.name for case in CASES]
    parser.add_argument(
        "--form", nargs="+", choices=forms, default=forms, help="default: all three", metavar="F"
    )
    parser.add_argument("--policy", nargs="+", metavar="P", help="as in the table; default: all")
    options = parser.parse_args(given)
    jax.config.update("jax_platforms", "cpu")  # leaves an accelerator that is here alone
    cases = [c for c in (SMOKE if options.smoke else CASES) if c.name in options.form]
    budgets = ("min",) if options.smoke else BUDGETS
    jobs = [(case, policy) for case in cases for policy in policies_of(case, budgets)]
    jobs = [job for job in jobs if not options.policy or job[1] in options.policy]
    if not jobs:
        parser.error(f"--policy {shlex.join(options.policy)}: there is no such row")
    earlier = None
    if options.json and options.json.exists():
        earlier = json.loads(options.json.read_text(encoding="utf-8"))
    rows = []
    try:
        with _common.progress() as bar:
            job = bar.add_task("", total=len(jobs))
            for case, policy in jobs:
                bar.update(job, description=f"{case.name}, {policy}")
                if case.name == "slice":
                    target = SMOKE_SLICE if options.smoke else SLICE
                    rows.append(row_on_a_slice(case, policy, target, 1 if options.smoke else 5))
                else:
                    compiles = 1 if options.smoke else 5
                    rows.append(row_on_a_chip(case, policy, options.target, compiles))
                report = reported(given, options.target, rows, earlier)
                table = rendered(report)
                if options.json:  # after each row, as one that follows may fail
                    _common.write(options.json, _common.without(report, "curve"), table, raw=report)
                bar.advance(job)
    except remat_kit.RematKitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.png:
        draw(report, options.png)
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
