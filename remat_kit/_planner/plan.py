"""Which schedule makes a step the fastest within a memory budget?

`plan` computes the frontier of schedules (module `frontier`), compiles a few of them for the target
and corrects the predicted peaks by the compiled ones (module `search`). It returns the schedule
with the least extra work among the compiled ones that fit the budget. A `Plan` is a policy:
``remat_kit.policy(plan)`` runs it.

The example of `plan` compiles sixteen layers ``x = tanh(x @ w)``, with ``x`` of 2 MiB, for a CPU.
Its budget, ``"min"``, asks for the lowest peak that the planner reaches.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from remat_kit import _files, _frames
from remat_kit._chip.memory import Memory, temporaries
from remat_kit._chip.target import Target, for_arguments
from remat_kit._errors import UserError
from remat_kit._frameworks import flax as _flax
from remat_kit._policy import recipe as _recipe
from remat_kit._policy import schedule as _schedule
from remat_kit._policy.schedule import Segment
from remat_kit._policy.structural import Planned
from remat_kit._program import paths as _paths
from remat_kit._program.steps.gradient import Argnums
from remat_kit._show.table import Table
from remat_kit._units import format_bytes, format_flops, format_percent

# The rest of the planner is imported by the functions that plan: it takes 0.1 s, and reading the
# name `remat_kit.plan` does not need it.
if TYPE_CHECKING:
    from remat_kit._apply.pieces import PieceLoop
    from remat_kit._planner.costs.graph import CostGraph
    from remat_kit._planner.frontier import Tick
    from remat_kit._planner.point import Point
    from remat_kit._planner.search import Answer, Search

# -- a plan ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ModulePlan:
    """What a plan saves, offloads and recomputes in one module; equal blocks are added up.

    `Plan.modules` lists them. Module paths are those of Flax, Haiku and `jax.named_scope`.

    >>> ModulePlan("GPT/block_*/mlp", 4096, 0, recomputed_flops=2e6, recomputed_seconds=1e-6,
    ...            equations=3).saved_bytes
    4096

    Attributes:
        module: the path of the module.
        saved_bytes: bytes of its activations that are saved on the device.
        offloaded_bytes: bytes of its activations that are offloaded to the host's memory.
        recomputed_flops: floating-point operations that the backward pass recomputes.
        recomputed_seconds: roofline time of this recompute.
        equations: number of operations that the backward pass recomputes.
        unknown: the primitives in the module whose cost is unknown.
        unknown_again: whether some of these are recomputed.
        before_bytes: bytes of its activations that are saved on the device without a plan.
        pieces: the segments in it that run in pieces, each as a text.
    """

    module: str
    saved_bytes: int
    offloaded_bytes: int
    recomputed_flops: float
    recomputed_seconds: float
    equations: int
    unknown: tuple[str, ...] = ()
    unknown_again: bool = False
    before_bytes: int = 0
    pieces: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Planned):
    """A schedule for one program and one budget, with the memory of the compiled step.

    A plan is a policy: ``remat_kit.policy(plan)`` runs it, and `save` writes it as a recipe. Its
    ``repr`` shows only the policy. `plan` returns it and has an example. Each region of the plan
    runs under `jax.checkpoint`.

    Attributes:
        target: the chip for which the step was compiled.
        objective: the extra work that was minimized: ``"balanced"``, ``"time"`` or ``"flops"``.
        budget_bytes: the budget in bytes on the device; None for ``"min"`` and ``"free"``.
        predicted_peak_bytes: the peak that was predicted before this program was compiled.
        compiled: the memory of the compiled step under this plan.
        baseline: the memory of the compiled step without a plan; None if the compiler refuses that
            program.
        minimum_bytes: the lowest peak that the planner knows of. It is the compiled peak if that
            schedule was compiled, and otherwise the predicted one.
        point: the predicted figures of the schedule.
        step_seconds: roofline time of the step, without the optimizer's update. For a program that
            is partitioned over several devices it is that of the compiled program on one device,
            with the collectives that it waits for.
        extra_seconds: how much longer the step takes than without a plan, by the same roofline. It
            is negative if the compiled program of a plan is the faster one.
        peak_phase: the phase in which the compiled program has its peak: ``"forward"``,
            ``"recompute"``, ``"backward"`` or ``"update"``; "" if the compiler returned no program.
        tried: number of programs that were compiled.
        modules: what is saved, offloaded and recomputed, by module.
        notes: remarks, for example that recomputing more cannot lower the peak.
    """

    target: str = dataclasses.field(default="", compare=False)
    objective: str = dataclasses.field(default="", compare=False)
    budget_bytes: int | None = dataclasses.field(default=None, compare=False)
    predicted_peak_bytes: int = dataclasses.field(default=0, compare=False)
    compiled: Memory | None = dataclasses.field(default=None, compare=False)
    baseline: Memory | None = dataclasses.field(default=None, compare=False)
    minimum_bytes: int = dataclasses.field(default=0, compare=False)
    point: Point | None = dataclasses.field(default=None, compare=False)
    step_seconds: float = dataclasses.field(default=0.0, compare=False)
    extra_seconds: float = dataclasses.field(default=0.0, compare=False)
    peak_phase: str = dataclasses.field(default="", compare=False)
    tried: int = dataclasses.field(default=0, compare=False)
    modules: tuple[ModulePlan, ...] = dataclasses.field(default=(), compare=False)
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def policy(self) -> Planned:
        """The policy alone."""
        return Planned(program=self.program, lines=self.lines, strict=self.strict, step=self.step)

    @property
    def compiled_peak_bytes(self) -> int | None:
        """Peak of the compiled step on the device in bytes, or None if it is unknown."""
        return self.compiled.peak_bytes if self.compiled else None

    @property
    def headline(self) -> str:
        """The plan in one sentence: the memory without it, with it, and its price."""
        from remat_kit._inspect.headline import plan_headline

        if self.baseline is None or self.compiled is None or self.point is None:
            return str(self)
        extra = self.extra_seconds
        return plan_headline(
            self.baseline, self.compiled, self.step_seconds, extra, self.peak_phase
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return {
            "headline": self.headline,
            "target": self.target,
            "budget_bytes": self.budget_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "compiled_peak_bytes": self.compiled_peak_bytes,
            "baseline_peak_bytes": self.baseline.peak_bytes if self.baseline else None,
            "compiled_host_bytes": self.compiled.host_bytes if self.compiled else None,
            "compiled_temp_bytes": temporaries(self.compiled) if self.compiled else None,
            "baseline_temp_bytes": temporaries(self.baseline) if self.baseline else None,
            "extra_flops_fraction": self.point.extra_flops_fraction if self.point else None,
            "objective": self.objective,
            "extra_seconds": self.extra_seconds if self.point else None,
            "extra_work": self.point.extra_work if self.point else None,
            "bound_extra_seconds": self.point.bound_extra_seconds if self.point else None,
            "bound_extra_work": self.point.bound_extra_work if self.point else None,
            "gap": self.point.gap if self.point else None,
            "step_seconds": self.step_seconds,
            "peak_phase": self.peak_phase,
            "minimum_bytes": self.minimum_bytes,
            "tried": self.tried,
            "notes": list(self.notes),
            "policy": repr(self.policy),
        }

    def to_html(self, path: str | pathlib.Path, *, command: str = "") -> None:
        """Write a page that shows the memory before and after, in all and by module.

        Args:
            path: where to write the page, which needs no server and no network.
            command: the command that made the plan, for the page.
        """
        _files.write_whole(path, self._page(command))

    def _page(self, command: str = "") -> str:
        from remat_kit._show import chart as _chart

        modules = [dataclasses.asdict(m) | {"why": _why(m)} for m in self.modules]
        memory = self.compiled.memory_bytes if self.compiled else None
        return _chart.plan_page(
            self.to_json() | {"modules": modules, "memory_bytes": memory}, command
        )

    def _repr_html_(self) -> str:
        from remat_kit._show import chart as _chart

        return _chart.inline(self._page())

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
        _files.write_whole(path, text)

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
                _operations(m) if m.equations else "",
                _why(m),
            )
            for m in self.modules
        ]
        return Table(str(self), ("module", "saved", "offloaded", "recomputed", "why"), tuple(rows))


def _operations(m: ModulePlan) -> str:
    count = "1 operation" if m.equations == 1 else f"{m.equations} operations"
    return f"{count}, {format_flops(m.recomputed_flops)}" if m.recomputed_flops else count


def _why(m: ModulePlan) -> str:
    if m.pieces:
        return f"in pieces: {'; '.join(m.pieces)}"
    if m.unknown:
        names = ", ".join(m.unknown)
        return f"cost unknown ({names}): " + (
            "recomputed, because nothing else fits" if m.unknown_again else "saved"
        )
    if m.offloaded_bytes:
        return "offloaded: the transfer costs less than recomputing it"
    if not m.equations and not m.saved_bytes:
        return "neither saved nor recomputed"
    if not m.equations:
        return "saved: recomputing it would cost more than storing it"
    if m.saved_bytes:
        return "partly saved: costly values are saved, and cheap ones are recomputed from them"
    return "recomputed: recomputing it costs less than storing it"


# A plan whose peak is at most this multiple of the least one says whether pieces could lower it.
_LEAST = 1.02


# -- choosing -------------------------------------------------------------------------------------


def plans(
    fn: Callable[..., Any],
    *args: Any,
    budgets: Sequence[str | int | float],
    target: str | Target = "cpu",
    argnums: Argnums = 0,
    objective: str = "balanced",
    offload: bool = False,
    pieces: bool = False,
    compiles: int = 5,
    progress: Tick | None = None,
) -> tuple[Plan | UserError, ...]:
    """Return the plans for several budgets, which share the compiled programs.

    Args:
        fn, args, target, argnums, objective, offload, pieces, progress: as for `plan`.
        budgets: budgets as for `plan`. If nothing fits a budget, the error takes the plan's place.
        compiles: maximum number of programs to compile for each budget.
    """
    from remat_kit._planner.schedules.proposals import silent
    from remat_kit._planner.search import Search, parsed_budget
    from remat_kit._planner.steps import frontier_for

    wanted = [parsed_budget(budget) for budget in budgets]
    chip = for_arguments(target, _flax.arrays_of(args), "plans")
    tick = progress or silent
    front, argnums = frontier_for(
        fn, args, chip, argnums, objective, None, offload, tick, "plans", pieces
    )
    search = Search(fn, args, argnums, chip, front, compiles, tick)

    def predicted(budget: str | int | float) -> dict[int, int]:
        try:
            answer = search.run(budget)
        except UserError:
            return {}
        return {answer.place: answer.predicted}

    def best(budget: str | int | float, tried: dict[int, int]) -> Plan | UserError:
        try:
            return answered(search, search.answer(budget, tried))
        except UserError as error:
            return error

    # A program that is compiled for a later budget may also be the best one for an earlier budget.
    every = [predicted(budget) for budget in wanted]
    return tuple(map(best, wanted, every))


def plan(
    fn: Callable[..., Any],
    *args: Any,
    budget: str | int | float,
    target: str | Target = "cpu",
    argnums: Argnums = 0,
    objective: str = "balanced",
    optimizer: Any = None,
    offload: bool = False,
    pieces: bool = False,
    compiles: int = 5,
    progress: Tick | None = None,
) -> Plan:
    """Return the schedule of a loss or a step that recomputes least within a budget.

    The compiler checks it.

    >>> import jax, jax.numpy as jnp
    >>> import remat_kit
    >>> def tower(weights, x):
    ...     for w in weights:
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.mean(x)
    >>> weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 16
    >>> x = jax.ShapeDtypeStruct((8192, 64), jnp.float32)
    >>> found = plan(tower, weights, x, budget="min")
    >>> found.target, found.budget_bytes, found.compiled_peak_bytes <= found.baseline.peak_bytes
    ('cpu', None, True)
    >>> lean = remat_kit.policy(found)(tower)

    Args:
        fn: the loss. It is called as ``fn(*args)`` and returns a scalar, or ``(scalar, aux)``. It
            may also be a training step, jitted or not, with the arguments that it is called with.
            The whole step is then compiled, and ``remat_kit.policy(plan)(step)`` runs it.
            If it has checkpoint regions of its own, the regions of the plan take their place; a
            note says so.
        args: pytrees of arrays or of `jax.ShapeDtypeStruct`.
        budget: one of these: bytes on the device, arguments and results included (``"14GiB"``, an
            integer); a share of the step's activation memory (0.5, ``"50%"``), that is, of its
            temporaries without a plan; ``"min"``, the lowest peak with extra work of at most four
            forward passes; ``"free"``, the lowest peak with at most 2 % extra time; ``"fit"``, the
            memory of the chip.
        target: the chip to compile for.
        argnums: the positions of the arguments to differentiate.
        objective: the extra work to minimize, as for `frontier`, but ``"balanced"`` by default.
        optimizer: an ``optax.GradientTransformation``. With it, the planner compiles the whole
            training step: gradients, the optimizer's state and the update, with parameters and
            state donated. Budgets then count all of these.
        offload: whether the iterations of scans may offload their saved arrays, as for `frontier`.
            XLA has returned wrong gradients with such offloads on GPUs (openxla/xla#46231), so
            compare a step's gradients before you train.
        pieces: whether segments may run in pieces of an axis, as for `frontier`. The programs that
            would be compiled without pieces are compiled too, unless all of them are predicted to
            need far more than the budget. So for the same budget, the plan never has more extra
            work, as the objective measures it, than the one without pieces. Up to twice as many
            programs are compiled.
        compiles: maximum number of programs to compile beside the one without a plan. If none of
            them fits, up to three more are compiled, those with the lowest predicted peaks. If one
            fits, but another candidate should fit with much less recomputation, up to three more
            of these are compiled.
            For a program over several devices, up to two more are compiled: those that recompute
            each repeated block. With the objective ``"time"``, the time of the compiled programs,
            with the collectives that they wait for, then chooses among those that fit.
        progress: called with a description of the current work. Ctrl-C ends the search with the
            best plan so far.

    Raises:
        UserError: nothing fits. The error names the lowest peak that was reached, its phase, and
            the largest arrays that are live then.
        NotDifferentiableError: ``fn`` cannot be differentiated.
        UnknownNameError: no chip or objective has that name.
        MissingPluginError: the compiler for the target is not installed.
        CompileError: the compiler refuses the program without a plan, and either the plan with the
            lowest predicted peak, too, or the budget is a share. If the compiler refuses only some
            programs, a note of the plan says so.
    """
    from remat_kit._planner.schedules.proposals import silent
    from remat_kit._planner.search import Search, check_reachable, parsed_budget
    from remat_kit._planner.steps import frontier_for

    chip = for_arguments(target, _flax.arrays_of(args), "plan")
    wanted = parsed_budget(budget)
    check_reachable(wanted, args, argnums, optimizer)
    tick = progress or silent
    front, argnums = frontier_for(
        fn, args, chip, argnums, objective, optimizer, offload, tick, "plan", pieces
    )
    if pieces and all(p.graph is None for p in front.points):
        axis = " of an axis that the mesh does not split" if chip.devices > 1 else ""
        _frames.warn(
            f"`plan(..., pieces=True)`: no segment in pieces{axis} needs less memory than "
            "recomputing it as a whole, so pieces=True has no effect",
            "leave pieces out",
        )
    search = Search(fn, args, argnums, chip, front, compiles, tick, optimizer)
    return answered(search, search.run(wanted))


def _seconds(search: Search, place: int) -> tuple[float, float]:
    """Return the time of a step without a plan, and what a point adds to it."""
    compiled = search.seconds
    if search.plain in compiled and place in compiled:
        return compiled[search.plain], compiled[place] - compiled[search.plain]
    front = search.frontier
    return front.forward_seconds + front.backward_seconds, search.points[place].extra_seconds


def answered(search: Search, answer: Answer) -> Plan:
    """Return the plan for the answer of a search."""
    front, point = search.frontier, search.points[answer.place]
    policy = front.policy(point)
    least = min(map(search.predicted, range(len(search.points))))
    memory = search.known[answer.place]
    phase = search.phase(answer.place)
    parts = [(front, point), *zip(front.others, point.others, strict=True)]
    modules = tuple(
        m
        for f, p in parts
        for m in _beside(
            _by_module(f.graph_of(p), p.schedule), _by_module(f.graph, f.plain.schedule)
        )
    )
    step, extra = _seconds(search, answer.place)
    return Plan(
        program=policy.program,
        lines=policy.lines,
        step=policy.step,
        target=search.chip.name,
        objective=front.objective,
        budget_bytes=answer.limit,
        predicted_peak_bytes=answer.predicted,
        compiled=memory,
        baseline=search.known.get(search.plain),
        minimum_bytes=least,
        point=point,
        step_seconds=step + extra,
        extra_seconds=extra,
        peak_phase=phase,
        tried=len(search.known),
        modules=modules,
        notes=(*_notes(search, answer, phase), *_unknown_costs(modules)),
    )


def _notes(search: Search, answer: Answer, phase: str) -> Iterator[str]:
    """Yield what the reader must know about the memory of a plan."""
    from remat_kit._compiled.peak import UPDATE

    front, point = search.frontier, search.points[answer.place]
    memory = search.known[answer.place]
    if phase == UPDATE:
        yield "the peak is in the update of the parameters, so recomputing more cannot lower it"
    elif memory.peak_bytes is not None and point.cost.peak_bytes <= front.output_bytes:
        yield "arguments and gradients alone make the peak, so no recompute can lower it"
    if any(part.graph.regions for part in (front, *front.others)):
        parts = (point, *point.others)
        does = "takes their place" if any(map(_has_regions, parts)) else "leaves them as they are"
        yield (
            f"the function has checkpoint regions of its own, and this plan {does}; the memory "
            "without a plan is that of the function with its regions"
        )
    if search.refused:
        yield search.refusals()
    yield from _nearly_fits(search, answer)
    if memory.drops_offload(point.host_bytes):
        dropped = (
            f"the compiler left arrays on the device that the plan offloads: only "
            f"{format_bytes(memory.host_bytes or 0)} of {format_bytes(point.host_bytes)} are in "
            "the host's memory"
        )
        yield dropped
        _frames.warn(
            f"`plan(..., offload=True, target={search.chip.name!r})`: {dropped}",
            "plan without offload, or for another chip; the compiled peak counts these bytes on "
            "the device",
        )
    least = min(map(search.predicted, range(len(search.points))))
    if search.predicted(answer.place) <= _LEAST * least:
        lower = search.floor(memory.peak_bytes or answer.predicted)
        if lower is not None:
            yield str(lower)


# A faster plan is mentioned if it needs at most this multiple of the budget, and takes at most this
# share of the time.
_NEARLY = 1.02
_FASTER = 0.95


def _nearly_fits(search: Search, answer: Answer) -> Iterator[str]:
    """Yield which compiled plan is much faster and misses the budget by little, if there is one."""
    peaks = {place: search.measured(place) for place in search.known}
    limit = math.inf if answer.limit is None else answer.limit
    missed = [p for p, peak in peaks.items() if peak and limit < peak <= _NEARLY * limit]
    times = {p: sum(_seconds(search, p)) for p in (*missed, answer.place)}
    best = min(times, key=lambda p: times[p])
    if times[best] <= _FASTER * times[answer.place]:
        peak = peaks[best] or 0
        less = format_percent(1 - times[best] / times[answer.place])
        more = format_bytes(peak - limit)
        yield f"with {more} more, budget={peak}, a plan takes {less} less time by the roofline"


def _has_regions(point: Point) -> bool:
    return _schedule.has_regions(point.schedule) or point.graph is not None


def _unknown_costs(modules: Sequence[ModulePlan]) -> Iterator[str]:
    """Yield which operations of the plan have no known cost."""
    if names := dict.fromkeys(name for m in modules for name in m.unknown):
        again = any(m.unknown_again for m in modules)
        what = "some of them are recomputed" if again else "none of them is recomputed"
        yield (
            f"the cost of these primitives is unknown: {', '.join(names)}. Each counts as much as "
            f"all other operations together, and {what}"
        )


def _in_pieces(loop: PieceLoop) -> str:
    """Say in how many pieces a segment runs, and what it would need as a whole.

    The first part is, for example, ``16 of axis 1 of float32[8,1024,50257]``.
    """
    split = loop.split
    value, count = split.value.aval, -(-split.n // loop.size)
    shape = ",".join(map(str, value.shape))
    size = format_bytes(split.inside_bytes)
    return f"{count} of axis {loop.axis} of {value.dtype}[{shape}]; as a whole it makes {size}"


def _beside(modules: Sequence[ModulePlan], without: Sequence[ModulePlan]) -> tuple[ModulePlan, ...]:
    """Return modules with the bytes that they save without a plan."""
    before = {m.module: m.saved_bytes for m in without}
    found = [dataclasses.replace(m, before_bytes=before.pop(m.module, 0)) for m in modules]
    gone = (
        ModulePlan(m, 0, 0, 0.0, 0.0, 0, before_bytes=size) for m, size in before.items() if size
    )
    return (*found, *gone)


def _by_module(graph: CostGraph, schedule: Sequence[Segment[int]]) -> tuple[ModulePlan, ...]:
    from remat_kit._planner.costs.simulate import Simulation

    saved: dict[str, list[float]] = {}
    unknown: dict[str, dict[str, None]] = {}
    again: set[str] = set()
    pieces: dict[str, dict[str, None]] = {}

    def row(module: str) -> list[float]:
        return saved.setdefault(_paths.roll_up(module), [0, 0, 0.0, 0.0, 0])

    def count(
        graph: CostGraph,
        segments: Sequence[Segment[int]],
        times: int,
        carry: Sequence[tuple[int, int]] = (),
    ) -> None:
        simulation = Simulation(graph, 1.0)
        for e in graph.equations:
            if e.unknown:
                row(e.module)
                unknown.setdefault(_paths.roll_up(e.module), {}).update(dict.fromkeys(e.unknown))
        for i, loop in graph.divided.loops.items() if graph.divided else ():
            e = graph.equations[i]
            found = row(e.module)
            found[2] += times * e.again_flops
            found[3] += times * e.again_seconds
            found[4] += times * len(loop.split.ways)
            pieces.setdefault(_paths.roll_up(e.module), {})[_in_pieces(loop)] = None
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
                    if e.unknown:
                        again.add(_paths.roll_up(e.module))
                    if e.seconds or e.flops:
                        found = row(e.module)
                        found[2] += times * e.flops
                        found[3] += times * e.seconds
                        found[4] += times
            for equation, loop_plan in segment.loops:
                loop = graph.equations[equation].loop
                assert loop is not None
                for rounds, _, body in loop_plan:
                    count(loop.graph, body, times * rounds, loop.carry)

    count(graph, schedule, 1)
    rows = [
        ModulePlan(
            *(m, int(a), int(b), c, d, int(n), tuple(unknown.get(m, ())), m in again),
            pieces=tuple(pieces.get(m, ())),
        )
        for m, (a, b, c, d, n) in saved.items()
    ]
    return tuple(sorted(rows, key=lambda m: -(m.saved_bytes + m.offloaded_bytes)))
