"""What holds the memory of a training step, does it fit, and which plan makes it fit?"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from remat_kit._chip.target import Target
from remat_kit._chip.target import target as find_target
from remat_kit._doctor.capture import FoundStep, step_named
from remat_kit._errors import UserError
from remat_kit._inspect import headline as _headline
from remat_kit._inspect.lints.scene import Lint
from remat_kit._inspect.report import Report, StepLoss
from remat_kit._inspect.report import inspect as inspect_step
from remat_kit._planner.plan import Plan
from remat_kit._planner.plan import plan as find_plan
from remat_kit._planner.search import parsed_budget
from remat_kit._program.paths import roll_up
from remat_kit._show.table import Lines, Shown, Table, headed
from remat_kit._units import format_bytes, format_percent

PLAN_FILE = "plan.toml"


_MOST_HOLDERS = 8


@dataclasses.dataclass(frozen=True)
class Holder:
    """Arrays that are live at the peak of a step.

    Attributes:
        module: their module path, where blocks of the same kind are one; "" outside every module.
        kind: ``argument``, ``output``, or the phase that computes them, such as ``forward``.
        bytes: their size together.
        share: their share of the peak.
    """

    module: str
    kind: str
    bytes: int
    share: float


@dataclasses.dataclass(frozen=True)
class Diagnosis(Shown):
    """The memory of a training step on one chip, and what can be done about it.

    `doctor` returns it and has an example. ``print(diagnosis)`` shows the headline and the tables,
    and `to_json` the same as plain values. The memory is that of
    `jax.stages.Compiled.memory_analysis`.

    Attributes:
        step: its name and its source.
        report: the step without a plan, as `inspect` reports it.
        plan: the fastest plan that fits, or None.
        losses: the losses that it differentiates.
        holders: what holds the peak, largest first.
        notes: what the reader must know, for example why there is no plan.
        patch: the lines to add to the script, or the command that runs it with the plan.
    """

    step: FoundStep
    report: Report = dataclasses.field(repr=False)
    plan: Plan | None
    losses: tuple[StepLoss, ...]
    holders: tuple[Holder, ...]
    notes: tuple[str, ...]
    patch: str

    @property
    def target(self) -> str:
        """The name of the chip."""
        return next(iter(self.report.memory))

    @property
    def memory(self) -> Any:
        """The memory of the step without a plan, as `measure` returns it."""
        return self.report.memory[self.target]

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        reading = self.report.readings.get(self.target)
        held = _headline.holders(reading.peak) if reading else ""
        if self.plan is None:
            return _headline.compiled_headline(
                [_headline.Case(_headline.NO_POLICY, self.memory, reading=reading)], held=held
            )
        extra = self.plan.extra_seconds
        return _headline.doctor_headline(
            self.memory, held, self.plan.compiled, self.plan.step_seconds, extra
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`.

        The keys::

            headline      str   the answer in one sentence
            step          dict  name, source, and whether it is jitted
            losses        list  name, source, times and loop of each loss
            target        str   the chip
            peak_bytes    int   of the step without a plan, or null if the compiler does not say
            memory_bytes  int   of the chip
            fits          bool  whether the step fits without a plan
            holders       list  module, kind, bytes and share of what holds the peak
            plan          dict  as `Plan.to_json`, or null
            notes         list of str
            patch         str   the lines to paste
        """
        return {
            "headline": self.headline,
            "step": {
                "name": self.step.name,
                "source": self.step.source,
                "jitted": self.step.jitted,
            },
            "losses": [loss.to_json() for loss in self.losses],
            "target": self.target,
            "peak_bytes": self.memory.peak_bytes,
            "memory_bytes": self.memory.memory_bytes,
            "fits": self.memory.fits,
            "holders": [dataclasses.asdict(holder) for holder in self.holders],
            "plan": None if self.plan is None else self.plan.to_json(),
            "notes": list(self.notes),
            "patch": self.patch,
        }

    def save(self, path: str | pathlib.Path) -> None:
        """Write the plan as a recipe, which `remat_kit.policy` reads back.

        Raises:
            UserError: no plan fits.
        """
        if self.plan is None:
            raise UserError(
                f"`--save {path}`: there is no plan to save, because none fits",
                hint="the answer says what was reached; ask for another budget with --budget",
            )
        self.plan.save(path)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report of the step as a page for a browser."""
        self.report.to_html(path)

    def tables(self) -> Sequence[Table | Lines]:
        """Return what is shown: the headline, the holders, the plan and the lines to paste."""
        parts: list[Table | Lines] = [headed(self.headline), self._holders_table()]
        if self.plan is not None:
            parts.append(self.plan.explain())
        last = [("", f"note: {note}") for note in self.notes]
        last += [("+", line) for line in self.patch.splitlines()]
        return [*parts, Lines(tuple(last))] if last else parts

    def _holders_table(self) -> Table:
        rows = [
            (h.module or "(no module)", h.kind, format_bytes(h.bytes), format_percent(h.share))
            for h in self.holders
        ]
        names = "; ".join(map(str, self.losses))
        where = f"{self.step.name} ({self.step.source})" if self.step.source else self.step.name
        title = f"{where} at its peak on {self.target}"
        return Table(title, ("module", "kind", "bytes", "share"), tuple(rows), names)


def doctor(
    step: Callable[..., Any],
    *args: Any,
    target: str | Target | None = None,
    budget: str | int | float | None = None,
    argnums: int | Sequence[int] | None = 0,
    pieces: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Say what holds the memory of a training step, whether it fits, and which plan to use.

    The command ``remat-kit doctor SCRIPT`` does the same for a script. The step does not run,
    except with the target ``local``.

    >>> import jax, jax.numpy as jnp
    >>> def loss(weights, x):
    ...     for w in weights:
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.mean(x**2)
    >>> @jax.jit
    ... def train_step(weights, x):
    ...     return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))
    >>> weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8
    >>> x = jax.ShapeDtypeStruct((8192, 64), jnp.float32)
    >>> found = doctor(train_step, weights, x, target="cpu", budget="min")
    >>> found.step.name, [loss.name for loss in found.losses]
    ('train_step', ['train_step/loss'])
    >>> found.plan.compiled_peak_bytes <= found.memory.peak_bytes
    True

    Args:
        step: a training step, jitted or not, or a loss.
        args: its arguments, which are arrays or `jax.ShapeDtypeStruct` in pytrees.
        target: the chip; by default the accelerator of this process, or ``cpu``.
        budget: as for `plan`. By default the memory of the chip if the step does not fit, and else
            ``free``, the least memory for at most 2 % extra time.
        argnums: as for `measure`.
        pieces: whether the plan may run segments in pieces, as for `plan`. Without it, the doctor
            says what such a plan needs if no other one fits.
        progress: called with a description of the current work.

    Raises:
        UserError, TargetError: as for `inspect` and `plan`. A plan that does not exist is no error.
    """
    found = step_named(step, args, argnums)
    return diagnose(found, target, budget, pieces=pieces, progress=progress)


def diagnose(
    step: FoundStep,
    target: str | Target | None = None,
    budget: str | int | float | None = None,
    *,
    pieces: bool = False,
    patch: Callable[[FoundStep], str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Return the diagnosis of a step; the arguments are those of `doctor`.

    ``patch`` returns the lines to paste for a step.
    """
    tick = progress or (lambda _: None)
    chip = find_target(default_target() if target is None else target)
    if budget is not None:
        budget = parsed_budget(budget)
    tick(f"{step.name}: compiling for {chip.name}")
    report = inspect_step(step.fn, *step.args, target=[chip], argnums=step.argnums)
    memory = report.memory[chip.name]
    wanted = budget if budget is not None else ("free" if memory.fits else "fit")
    notes = []
    if not step.jitted:
        notes.append(
            "the gradient is not taken in a jitted function, so this is about the loss alone, "
            "without the optimizer"
        )

    def planned(pieces: bool) -> Plan:
        return find_plan(
            step.fn,
            *step.args,
            budget=wanted,
            target=chip,
            argnums=step.argnums,
            pieces=pieces,
            progress=tick,
        )

    try:
        plan = planned(pieces)
    except UserError as error:
        plan = None
        notes.append(f"no plan: {error.message.partition('`: ')[2] or error.message}")
        if not pieces and report.memory[chip.name].devices == 1:
            notes += _with_pieces(planned)
    if not pieces and plan is not None and not any("pieces=True" in n for n in plan.notes):
        notes += [_of_lint(lint) for lint in report.lints if lint.code == "peak-in-pieces"]
    losses = report.losses or (StepLoss(step.name, step.source, 1.0, ""),)
    lines = (patch or lines_to_paste)(step) if plan is not None else ""
    return Diagnosis(step, report, plan, losses, _holders(report), tuple(notes), lines)


def _with_pieces(planned: Callable[[bool], Plan]) -> list[str]:
    """Return what a plan with pieces needs, if there is one where no other plan fits."""
    try:
        lean = planned(True)
    except UserError:
        return []
    extra = lean.point.extra_flops_fraction if lean.point else 0.0
    peak = lean.compiled_peak_bytes or lean.predicted_peak_bytes
    return [
        f"with pieces=True (--pieces) a plan fits: {format_bytes(peak)} for "
        f"+{format_percent(extra)} of the forward FLOPs. Segments of it run in pieces of an axis, "
        "so that sums round in another order"
    ]


def _of_lint(lint: Lint) -> str:
    return f"{lint.message}: pieces=True (--pieces) plans with pieces"


def default_target() -> str:
    """Return the chip in this machine: ``local`` for an accelerator, ``cpu`` without one."""
    return "cpu" if jax.default_backend() == "cpu" else "local"


def lines_to_paste(step: FoundStep, file: str = PLAN_FILE) -> str:
    """Return the three lines that give a step its plan.

    >>> print(lines_to_paste(FoundStep(print, (), None, "train_step", "train.py:12")))
    import remat_kit
    with_plan = remat_kit.policy("plan.toml")  # from --save plan.toml
    train_step = with_plan(train_step)  # below its definition, train.py:12
    """
    name = step.name.rpartition(".")[2]
    return (
        "import remat_kit\n"
        f'with_plan = remat_kit.policy("{file}")  # from --save {file}\n'
        f"{name} = with_plan({name})  # below its definition, {step.source}"
    )


def _holders(report: Report) -> tuple[Holder, ...]:
    """Return what holds the peak; if the program did not compile, what its loss saves."""
    reading = next(iter(report.readings.values()), None)
    sizes: dict[tuple[str, str], int] = {}
    if reading is not None:
        for held in reading.peak.held:
            kind = held.phase if held.kind == "temporary" else held.kind
            key = ("" if held.kind == "argument" else roll_up(held.module), kind)
            sizes[key] = sizes.get(key, 0) + held.bytes
    else:
        for value in report.saved:
            if value.memory == "device":
                key = (roll_up(value.module), "saved")
                sizes[key] = sizes.get(key, 0) + value.bytes
    whole = sum(sizes.values()) or 1
    largest = sorted(sizes.items(), key=lambda x: -x[1])[:_MOST_HOLDERS]
    return tuple(Holder(m, kind, size, size / whole) for (m, kind), size in largest if size)
