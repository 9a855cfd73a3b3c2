"""Draw the memory of one training step of a 72-layer GPT, phase by phase, with and without remat.

This is the picture of MindSpore's recomputation tutorial: loss, gradients and an update of a GPT of
72 layers, parameters and optimizer state donated, in bfloat16. The optimizer is GPT-3's: Adam with
weight decay, the gradients clipped by their global norm (Brown et al. 2020, appendix B), so that
all of them are there before the update begins. The layers are compiled unrolled and as a scan.
What is drawn are the bytes alive at each step of the compiled schedule; nothing is run. A scan's
body stands once in the schedule, so its stretch is short though it runs 72 times. Compiled answers
are kept on disk; without them the whole takes about a quarter of an hour on two cores.

    python benchmarks/gpt3_memory.py --json benchmarks/results/gpt3_memory.json \\
        --png benchmarks/results/gpt3_memory.png

Exit status: 0 when done, 2 for a wrong call or a compiler that is not installed.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import _common
import jax
import optax
from _common import MIB, POLICIES, Case

import remat_kit
from remat_kit import _figures, _hlo
from remat_kit._anatomy import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    UPDATE,
    Anatomy,
    anatomy,
    running_module,
    running_phases,
)
from remat_kit._target import compile_program
from remat_kit._target import target as target_of

LOSS = "loss"
PHASES = (FORWARD, LOSS, RECOMPUTE, BACKWARD, UPDATE)
HEAD = "wte.attend"  # the module that makes the logits
POINTS = 400  # of a curve in the JSON

_SIZE = {"size": "72l", "batch": 4, "dtype": "bf16"}
CASES = (Case("unrolled", "gpt", _SIZE), Case("scan", "gpt", {**_SIZE, "scan": True}))
_TINY = {"size": "tiny", "layers": 2, "batch": 4, "dtype": "bf16"}
SMOKE = (Case("unrolled", "gpt", _TINY), Case("scan", "gpt", {**_TINY, "scan": True}))

Row = dict[str, Any]


def training_step(loss: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    """Return a whole step: ``(params, state, *batch)`` to ``(params, state, loss)``."""

    def train_step(params, state, *batch):
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return train_step


def row_of(case: Case, policy: str, target: str) -> Row:
    """Compile one step for one chip and take its memory apart."""
    loss, (params, *batch) = case.loss(policy)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    args = (params, jax.eval_shape(optimizer.init, params), *batch)
    step = training_step(loss, optimizer)
    compiled = compile_program(step, args, target, argnums=None, donate_argnums=(0, 1))
    memory = compiled.memory
    row = {"form": case.name, "size": dict(case.size), "policy": policy}
    row |= {"target": memory.target, "fits": memory.fits, "compiler_bytes": memory.peak_bytes}
    row["versions"] = dict(memory.versions)
    if compiled.hlo_text is None:
        return row
    parts = anatomy(
        _hlo.parse(compiled.hlo_text), memory.peak_bytes, platform=target_of(target).platform
    )
    return row | taken_apart(parts)


def taken_apart(parts: Anatomy) -> Row:
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


def phases_of(parts: Anatomy) -> list[str]:
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
    """Yield the fullest step of each of at most ``POINTS`` stretches.

    >>> list(points([3, 1, 2]))
    [0, 1, 2]
    """
    count = min(POINTS, len(alive))
    for i in range(count):
        stretch = range(i * len(alive) // count, (i + 1) * len(alive) // count)
        yield max(stretch, key=lambda s: (alive[s], -s))


def rendered(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = [
        "| layers | policy | " + " | ".join(PHASES) + " | peak in | of it activations | fits |",
        "|---|---|" + "---:|" * len(PHASES) + "---|---:|---|",
        *(_cells(row) for row in report["rows"]),
    ]
    size = report["rows"][0]["size"]
    about = (
        f"Most bytes alive on {report['target']} while each phase of a training step runs, in "
        f"MiB: GPT `{size['size']}`, {size['batch']} sequences, AdamW with the gradients clipped "
        "by their global norm, donated state. *Activations* are the temporaries that the forward "
        "pass made and that are alive at the peak. A phase without a figure has no step of its "
        "own: the compiler fused it with another."
    )
    return "\n".join([*lines, *_common.ending(report, about)])


def _cells(row: Row) -> str:
    head = f"| {row['form']} | `{row['policy']}` | "
    if "bytes" not in row:
        return head + " | ".join([*[""] * len(PHASES), "does not fit", "", "no"]) + " |"
    peaks = [row["phase_peaks"].get(phase) for phase in PHASES]
    cells = ["" if b is None else f"{b / MIB:,.0f}" for b in peaks]
    held = f"{row['held'].get(FORWARD, 0) / MIB:,.0f}"
    return head + " | ".join([*cells, row["phase"], held, "yes" if row["fits"] else "no"]) + " |"


def draw(report: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw the curves, a column for each policy, coloured by phase."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [row for row in report["rows"] if "bytes" in row]
    forms = list(dict.fromkeys(row["form"] for row in rows))
    colors = {phase: color for phase, (color, _) in _figures.COLORS.items()} | {LOSS: "#7b5ea7"}
    figure = Figure(figsize=(11, 3.1 * len(forms) + 0.6), layout="constrained", facecolor="white")
    grid = figure.subplots(len(forms), len(POLICIES), squeeze=False, sharey="row")
    for row in rows:
        axes = grid[forms.index(row["form"])][POLICIES.index(row["policy"])]
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


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = sys.argv[1:] if argv is None else argv
    parser = _common.parser(__doc__)
    parser.add_argument("--target", default="h100", metavar="T", help="default: h100")
    parser.add_argument("--png", type=_common.output, metavar="PATH", help="draw the curves there")
    options = parser.parse_args(given)
    jax.config.update("jax_platforms", "cpu")  # leaves an accelerator that is here alone
    rows = []
    try:
        with _common.progress() as bar:
            cases = SMOKE if options.smoke else CASES
            job = bar.add_task("", total=len(cases) * len(POLICIES))
            for case in cases:
                for policy in POLICIES:
                    bar.update(job, description=f"{case.name}, {policy}, {options.target}")
                    rows.append(row_of(case, policy, options.target))
                    bar.advance(job)
    except remat_kit.RematKitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = _common.described(__file__, given, (row["versions"] for row in rows))
    report |= {"target": options.target, "rows": rows}
    table = rendered(report)
    if options.json:
        _common.write(options.json, report, table)
    if options.png:
        draw(report, options.png)
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
