"""The fastest step that fits a budget, as a value that is a policy.

`plan` chooses a schedule from the frontier, corrects the model by what the compiler says of the
programs that it tries, and answers with a program that was compiled. A `Plan` is a policy:
`remat_kit.policy(plan)` runs it.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from remat_kit import _anatomy, _graph, _recipe, _solve
from remat_kit._cost import CostGraph
from remat_kit._errors import UserError
from remat_kit._frontier import Point, Tick, policy_of, search_frontier
from remat_kit._gradient import Argnums
from remat_kit._policy import Planned, format_bytes
from remat_kit._search import Answer, Search, parsed_budget, temporaries
from remat_kit._simulate import Segment, Simulation
from remat_kit._table import Table
from remat_kit._target import Memory, Target
from remat_kit._target import target as find_target

# -- a plan ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ModulePlan:
    """What a plan does with one module, equal blocks together.

    Attributes:
        module: its path.
        saved_bytes, offloaded_bytes: kept through the forward pass.
        recomputed_flops, recomputed_seconds: of what the backward pass computes again.
        equations: how many operations it computes again.
    """

    module: str
    saved_bytes: int
    offloaded_bytes: int
    recomputed_flops: float
    recomputed_seconds: float
    equations: int


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Planned):
    """A schedule for one program and one budget, and what the compiler made of it.

    It is a policy: `remat_kit.policy(plan)` runs it, `save` writes it as a recipe, and its repr is
    the policy alone.

    Attributes:
        target: the chip that it was compiled for.
        budget_bytes: what was allowed on the device; None for ``"min"`` and ``"free"``.
        predicted_peak_bytes: by the model, before this program was compiled.
        compiled: what the compiler says of the step under this plan.
        baseline: the same without any plan.
        minimum_bytes: the least peak that the planner knows of, as far as that was compiled, else
            predicted.
        point: the figures of the schedule.
        step_seconds: roofline time of the whole step, without the optimizer.
        peak_phase: of the compiled program: ``"forward"``, ``"recompute"``, ``"backward"`` or
            ``"update"``; "" where nothing was compiled.
        tried: how many programs were compiled.
        modules: what it does, by module.
        notes: what to know.
    """

    target: str = dataclasses.field(default="", compare=False)
    budget_bytes: int | None = dataclasses.field(default=None, compare=False)
    predicted_peak_bytes: int = dataclasses.field(default=0, compare=False)
    compiled: Memory | None = dataclasses.field(default=None, compare=False)
    baseline: Memory | None = dataclasses.field(default=None, compare=False)
    minimum_bytes: int = dataclasses.field(default=0, compare=False)
    point: Point | None = dataclasses.field(default=None, compare=False)
    step_seconds: float = dataclasses.field(default=0.0, compare=False)
    peak_phase: str = dataclasses.field(default="", compare=False)
    tried: int = dataclasses.field(default=0, compare=False)
    modules: tuple[ModulePlan, ...] = dataclasses.field(default=(), compare=False)
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def policy(self) -> Planned:
        """The policy alone."""
        return Planned(program=self.program, lines=self.lines, strict=self.strict)

    @property
    def compiled_peak_bytes(self) -> int | None:
        """Bytes on the device, as compiled."""
        return self.compiled.peak_bytes if self.compiled else None

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return {
            "target": self.target,
            "budget_bytes": self.budget_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "compiled_peak_bytes": self.compiled_peak_bytes,
            "baseline_peak_bytes": self.baseline.peak_bytes if self.baseline else None,
            "compiled_host_bytes": self.compiled.host_bytes if self.compiled else None,
            "compiled_temp_bytes": temporaries(self.compiled) if self.compiled else None,
            "baseline_temp_bytes": temporaries(self.baseline) if self.baseline else None,
            "extra_flops_fraction": self.point.extra_flops_fraction if self.point else None,
            "extra_seconds": self.point.extra_seconds if self.point else None,
            "bound_extra_seconds": self.point.bound_extra_seconds if self.point else None,
            "gap": self.point.gap if self.point else None,
            "step_seconds": self.step_seconds,
            "peak_phase": self.peak_phase,
            "minimum_bytes": self.minimum_bytes,
            "tried": self.tried,
            "notes": list(self.notes),
            "policy": repr(self.policy),
        }

    def save(self, path: str | pathlib.Path) -> None:
        """Write the plan as a recipe, which `remat_kit.policy` reads back."""
        text = _recipe.dumps(
            _recipe.Recipe(
                "plan",
                repr(self.policy),
                description=str(self).splitlines()[0],
                origin=f"remat-kit plan, jax {jax.__version__}",
            )
        )
        pathlib.Path(path).write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        peak = self.compiled_peak_bytes
        before = self.baseline.peak_bytes if self.baseline else None
        extra = self.point.extra_flops_fraction if self.point else 0.0
        within = f" (budget {format_bytes(self.budget_bytes)})" if self.budget_bytes else ""
        parts = [
            f"{self.target}: {format_bytes(peak or self.predicted_peak_bytes)}{within}",
            f"without a plan {format_bytes(before)}" if before else "",
            f"+{100 * extra:.1f} % of the forward FLOPs",
        ]
        return ", ".join(filter(None, parts)) + "".join(f"\n{note}" for note in self.notes)

    def explain(self) -> Table:
        """Return what is saved, offloaded and recomputed, by module."""
        rows = [
            (
                m.module or "(no module)",
                format_bytes(m.saved_bytes) if m.saved_bytes else "",
                format_bytes(m.offloaded_bytes) if m.offloaded_bytes else "",
                f"{m.equations} operations, {m.recomputed_flops / 1e9:.3g} GFLOP"
                if m.equations
                else "",
                _why(m),
            )
            for m in self.modules
        ]
        return Table(str(self), ("module", "saved", "offloaded", "recomputed", "why"), tuple(rows))


def _why(m: ModulePlan) -> str:
    if m.offloaded_bytes:
        return "waits on the host: the transfer costs less than computing it again"
    if not m.equations:
        return "kept: computing it again would cost more than its bytes are worth"
    if m.saved_bytes:
        return "its dear values are kept, its cheap ones are computed from them"
    return "cheaper to compute again than to hold"


# -- choosing -------------------------------------------------------------------------------------


def plans(
    fn: Callable[..., Any],
    *args: Any,
    budgets: Sequence[str | int | float],
    target: str | Target = "cpu",
    argnums: Argnums = 0,
    objective: str = "balanced",
    offload: bool = False,
    compiles: int = 5,
    progress: Tick | None = None,
) -> tuple[Plan | UserError, ...]:
    """Return what `plan` does for several budgets, which share what is compiled.

    Args:
        budgets: as for `plan`; a budget that nothing fits gets the error in the plan's place.
        fn, args, target, argnums, objective, offload, progress: as for `plan`.
        compiles: how many programs may be compiled for each budget.
    """
    chip, tick = find_target(target), progress or _solve.silent
    found = search_frontier(fn, args, chip, argnums, objective, None, offload, tick, "plans")
    search = Search(fn, args, argnums, chip, found, compiles, tick)

    def predicted(budget: str | int | float) -> dict[int, int]:
        try:
            answer = search.run(parsed_budget(budget))
        except UserError:
            return {}
        return {answer.place: answer.predicted}

    def answered(budget: str | int | float, tried: dict[int, int]) -> Plan | UserError:
        try:
            return _answered(search, search.answer(parsed_budget(budget), tried))
        except UserError as error:
            return error

    # What is compiled for a later budget may be better for an earlier one too.
    every = [predicted(budget) for budget in budgets]
    return tuple(map(answered, budgets, every))


def plan(
    fn: Callable[..., Any],
    *args: Any,
    budget: str | int | float,
    target: str | Target = "cpu",
    argnums: Argnums = 0,
    objective: str = "balanced",
    optimizer: Any = None,
    offload: bool = False,
    compiles: int = 5,
    progress: Tick | None = None,
) -> Plan:
    """Return the fastest schedule of a loss that fits a budget, compiled to be sure.

    >>> import jax, jax.numpy as jnp
    >>> import remat_kit
    >>> def tower(weights, x):
    ...     for w in weights:
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.mean(x)
    >>> weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 16
    >>> x = jax.ShapeDtypeStruct((8192, 64), jnp.float32)
    >>> found = plan(tower, weights, x, budget="min")
    >>> found.compiled_peak_bytes <= found.baseline.peak_bytes
    True
    >>> lean = remat_kit.policy(found)(tower)

    Args:
        fn: called as ``fn(*args)``; its result is a scalar, or ``(scalar, aux)``.
        args: arrays or `jax.ShapeDtypeStruct`, in pytrees.
        budget: bytes on the device, arguments and results included (``"14GiB"``, an integer); a
            fraction of the step's activation memory (0.5), that is of its temporaries without a
            plan; ``"min"``, the least memory for at most four forward passes more; ``"free"``, the
            least at no more than 2 % extra time; ``"fit"``, what the chip has.
        target: the chip to compile for.
        argnums: what to differentiate.
        objective: what to spend least of, as for `frontier`, but that both count by default.
        optimizer: an ``optax.GradientTransformation``. What is compiled is then the whole training
            step: gradients, the optimizer's state, the update, and parameters and state donated;
            budgets count all of it.
        offload: whether what the iterations of scans keep may wait in the host's memory, as for
            `frontier`. XLA has given wrong gradients with that on GPUs (openxla/xla#46231): compare
            a step's gradients before you train.
        compiles: how many programs may be compiled beside the one without a plan.
        progress: called with what is worked on. Ctrl-C ends the search with the best so far.

    Raises:
        UserError: nothing fits; it says what the least is, in which phase, and what holds it.
        NotDifferentiableError: ``fn`` is no loss.
        UnknownNameError, MissingPluginError: of the target.
    """
    chip = find_target(target)
    wanted = parsed_budget(budget)
    tick = progress or _solve.silent
    found = search_frontier(fn, args, chip, argnums, objective, optimizer, offload, tick, "plan")
    search = Search(fn, args, argnums, chip, found, compiles, tick, optimizer)
    return _answered(search, search.run(wanted))


def _answered(search: Search, answer: Answer) -> Plan:
    graph, point = search.frontier.graph, search.points[answer.place]
    policy = policy_of(graph, point.schedule)
    least = min(range(len(search.points)), key=search.predicted)
    memory = search.known[answer.place]
    phase = search.phase(answer.place)
    notes = []
    if phase == _anatomy.UPDATE:
        notes.append("the peak is in the update of the parameters: recomputing more cannot help")
    elif memory.peak_bytes is not None and point.cost.peak_bytes <= search.frontier.output_bytes:
        notes.append("arguments and gradients alone make the peak: no recompute can help")
    if point.host_bytes > 2 * (memory.host_bytes or 0):
        notes.append(
            f"the compiler left on the device what was to wait on the host: "
            f"{format_bytes(memory.host_bytes or 0)} of {format_bytes(point.host_bytes)} are there"
        )
    step = search.frontier.forward_seconds + search.frontier.backward_seconds
    return Plan(
        program=policy.program,
        lines=policy.lines,
        target=search.chip.name,
        budget_bytes=answer.limit,
        predicted_peak_bytes=answer.predicted,
        compiled=memory,
        baseline=search.known[search.plain],
        minimum_bytes=search.predicted(least),
        point=point,
        step_seconds=step + point.extra_seconds,
        peak_phase=phase,
        tried=len(search.known),
        modules=_by_module(graph, point.schedule),
        notes=tuple(notes),
    )


def _by_module(graph: CostGraph, schedule: Sequence[Segment]) -> tuple[ModulePlan, ...]:
    saved: dict[str, list[float]] = {}

    def row(module: str) -> list[float]:
        return saved.setdefault(_graph.roll_up(module), [0, 0, 0.0, 0.0, 0])

    def count(
        graph: CostGraph,
        segments: Sequence[Segment],
        times: int,
        carry: Sequence[tuple[int, int]] = (),
    ) -> None:
        simulation = Simulation(graph, 1.0)
        for segment, held in zip(segments, simulation.held(segments), strict=True):
            for t in held:
                tensor = graph.tensors[t]
                if tensor.producer >= segment.start:
                    place = 1 if t in segment.offload else 0
                    row(graph.equations[tensor.producer].module)[place] += times * tensor.bytes
            for t, size in carry:
                if t in segment.offload:
                    row(graph.equations[segment.start].module)[1] += times * size
            for part in (segment, *segment.inside):
                for i in simulation.demand(part).again:
                    e = graph.equations[i]
                    if e.seconds or e.flops:
                        found = row(e.module)
                        found[2] += times * e.flops
                        found[3] += times * e.seconds
                        found[4] += times
            for equation, loop_plan in segment.loops:
                loop = graph.equations[equation].loop
                assert loop is not None
                for rounds, _, body in loop_plan.parts:
                    count(loop.graph, body, times * rounds, loop.carry)

    count(graph, schedule, 1)
    rows = [ModulePlan(m, int(a), int(b), c, d, int(n)) for m, (a, b, c, d, n) in saved.items()]
    return tuple(sorted(rows, key=lambda m: -(m.saved_bytes + m.offloaded_bytes)))
