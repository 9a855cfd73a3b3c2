"""The fastest step that fits: the frontier of memory and time, and a plan for one budget.

`frontier` traces a loss and solves, without compiling: every schedule worth having, from the least
memory to no recompute at all, beside a bound that no schedule can beat. `plan` chooses one for a
budget, corrects the model by what the compiler says of the programs it tries, and answers with a
program that was compiled. A `Plan` is a policy: `remat_kit.policy(plan)` runs it.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import io
import itertools
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from remat_kit import _anatomy, _cost, _figures, _graph, _hlo, _recipe, _schedule, _solve, _step
from remat_kit import _policy as algebra
from remat_kit._cost import CostGraph, Segment, Simulated
from remat_kit._errors import UserError, unknown
from remat_kit._gradient import Argnums, abstract
from remat_kit._policy import Planned, format_bytes, parse_bytes
from remat_kit._remat import policy as apply
from remat_kit._table import Table
from remat_kit._target import Memory, Target, compile_program
from remat_kit._target import target as find_target

Tick = Callable[[str], None]
_FREE_SHARE = 0.02  # of the step, what "free" may cost

# The share of FLOPs, against seconds, in the work that a search minimises.
OBJECTIVES = {"balanced": 0.5, "time": 0.0, "flops": 1.0}


# -- the frontier ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Point:
    """One schedule on the frontier.

    Attributes:
        predicted_peak_bytes: on the device, arguments and results included.
        saved_bytes: kept on the device from the forward to the backward pass.
        extra_seconds: roofline time of what is computed twice.
        extra_flops: floating-point operations that are computed twice.
        extra_work: what the search minimised, in seconds: of these two what the objective says.
        forward_flops: floating-point operations of the forward pass, to divide by.
        bound_extra_seconds: the least extra time of any schedule with this peak.
        gap: ``extra_seconds`` over the bound, as a fraction of the forward pass.
    """

    predicted_peak_bytes: int
    saved_bytes: int
    extra_seconds: float
    extra_flops: float
    extra_work: float
    forward_flops: float
    bound_extra_seconds: float
    gap: float
    schedule: tuple[Segment, ...] = dataclasses.field(repr=False)
    cost: Simulated = dataclasses.field(repr=False)

    @property
    def extra_flops_fraction(self) -> float:
        """Operations computed twice, as a fraction of the forward pass."""
        return self.extra_flops / self.forward_flops if self.forward_flops else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        names = (
            *("predicted_peak_bytes", "saved_bytes", "extra_seconds", "extra_flops"),
            *("extra_work", "forward_flops", "bound_extra_seconds", "gap"),
            "extra_flops_fraction",
        )
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class Frontier:
    """Every schedule of a loss that is worth having, from the least memory to the least time.

    Attributes:
        points: by peak, smallest first; each with less extra work than those before it.
        target: the chip's name.
        objective: what work is: ``"balanced"``, ``"time"`` or ``"flops"``.
        planning_seconds: what tracing and solving took.
        equations: operations of the traced forward pass.
        argument_bytes: the arguments, which are there all the time.
        output_bytes: the loss and the gradients.
        forward_seconds: roofline time of the forward pass.
        backward_seconds: roofline time of the backward pass, with nothing computed twice.
        working_bytes: the largest set of arrays that one operation's derivative needs at once; no
            schedule has a lower peak beside the arguments.
        plain: the function as it is, with no region.
    """

    points: tuple[Point, ...]
    target: str
    objective: str
    planning_seconds: float
    equations: int
    argument_bytes: int
    output_bytes: int
    forward_seconds: float
    backward_seconds: float
    working_bytes: int
    plain: Point
    graph: CostGraph = dataclasses.field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        names = (
            *(
                "target",
                "objective",
                "planning_seconds",
                "equations",
                "argument_bytes",
                "output_bytes",
            ),
            *("forward_seconds", "backward_seconds", "working_bytes"),
        )
        plain = {name: getattr(self, name) for name in names}
        return plain | {"points": [p.to_json() for p in self.points]}

    def policy(self, point: Point) -> Planned:
        """Return the policy that runs one of the points, for `remat_kit.policy`."""
        return _policy_of(self.graph, point.schedule)

    def table(self, most: int = 24) -> Table:
        """Return at most so many of the points, spread over the range of memory."""
        rows = [
            (
                format_bytes(p.predicted_peak_bytes),
                format_bytes(p.saved_bytes),
                f"+{100 * p.extra_flops_fraction:.1f} %",
                f"+{100 * _share(p.extra_seconds, self.forward_seconds):.1f} %",
                f"+{100 * _share(p.bound_extra_seconds, self.forward_seconds):.1f} %",
            )
            for p in _thinned(self.points, most)
        ]
        head = ("peak", "saved", "extra FLOPs", "extra time", "bound")
        title = f"{self.target}: predicted peak against extra work, in parts of the forward pass"
        return Table(title, head, tuple(rows))

    def __str__(self) -> str:
        return str(self.table())

    def to_png(self, path: str | pathlib.Path) -> None:
        """Draw memory against time: the points and the bound (extra ``plot``).

        Args:
            path: of the picture; its suffix says the format: ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            UserError: matplotlib is missing, or the suffix is no format of pictures.
        """
        _figures.check_picture(path, call="to_png")
        _figures.frontier(self.to_json(), path)

    def to_html(self, path: str | pathlib.Path) -> None:
        """Write one page with the picture and the table (extra ``plot``).

        Raises:
            UserError: matplotlib is missing.
        """
        drawn = io.StringIO()
        _figures.frontier(self.to_json(), drawn, call="to_html")
        picture = drawn.getvalue()[drawn.getvalue().index("<svg") :]
        title = html.escape(f"memory against time on {self.target}")
        text = html.escape(str(self.table(most=len(self.points))))
        pathlib.Path(path).write_text(
            f"<!doctype html><meta charset=utf-8><title>{title}</title>"
            f"{picture}<pre>{text}</pre>\n",
            encoding="utf-8",
        )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _thinned(points: Sequence[Point], most: int) -> list[Point]:
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def frontier(
    fn: Callable[..., Any],
    *args: Any,
    target: str | Target = "cpu",
    argnums: Argnums = 0,
    objective: str = "balanced",
    optimizer: Any = None,
    progress: Tick | None = None,
) -> Frontier:
    """Return every schedule of a loss that is worth having; nothing is compiled.

    >>> import jax, jax.numpy as jnp
    >>> def tower(weights, x):
    ...     for w in weights:
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.mean(x)
    >>> weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8
    >>> found = frontier(tower, weights, jax.ShapeDtypeStruct((4096, 64), jnp.float32))
    >>> found.points[-1].extra_flops
    0.0
    >>> found.points[0].predicted_peak_bytes < found.points[-1].predicted_peak_bytes
    True

    Args:
        fn: called as ``fn(*args)``; its result is a scalar, or ``(scalar, aux)``.
        args: arrays or `jax.ShapeDtypeStruct`, in pytrees.
        target: the chip whose rates turn operations and bytes into seconds.
        argnums: what to differentiate.
        objective: what to spend least of: ``"time"``, by the chip's roofline; ``"flops"``; or
            ``"balanced"``, the mean of the two, each as a share of the forward pass. A roofline
            has matrix units run at their peak, which they do not, so time alone recomputes too
            many convolutions; FLOPs alone recompute elementwise operations without an end.
        optimizer: an ``optax.GradientTransformation`` whose state is there too, as for `plan`.
        progress: called with what is worked on. Ctrl-C ends the search with what it has.

    Raises:
        NotDifferentiableError, UserError: ``fn`` is no loss.
        UnknownNameError: no chip or objective has that name.
    """
    return _frontier(
        fn,
        args,
        find_target(target),
        argnums,
        objective,
        optimizer,
        progress or _solve.silent,
        "frontier",
    )


def _frontier(
    fn: Callable[..., Any],
    args: Sequence[Any],
    chip: Target,
    argnums: Argnums,
    objective: str,
    optimizer: Any,
    tick: Tick,
    call: str,
) -> Frontier:
    begun = time.perf_counter()
    if objective not in OBJECTIVES:
        raise unknown("objective", objective, OBJECTIVES, call=f"{call}(..., objective=...)")
    tick("tracing")
    graph = _cost.trace(fn, args, chip, argnums, call=call)
    worth = _solve.Worth.of_graph(graph, OBJECTIVES[objective])
    found = _solve.candidates(
        graph, tick=tick, host_bandwidth=chip.host_bandwidth_bytes_per_second, worth=worth
    )
    tick("bounds")
    bounds = _solve.bounds(graph)
    given, made = _sizes(graph, args, argnums, call)
    if optimizer is not None:
        state = _step.state_of(optimizer, args, argnums, call)
        given += sum(_graph.nbytes(x) for x in jax.tree.leaves(state))
    points = tuple(_point(graph, c.schedule, c.cost, bounds, worth, given, made) for c in found)
    whole = (Segment(0, len(graph.equations), plain=True),)
    plain = _point(graph, whole, _cost.simulate(graph, whole), bounds, worth, given, made)
    return Frontier(
        points=points,
        target=chip.name,
        objective=objective,
        planning_seconds=time.perf_counter() - begun,
        equations=len(graph.equations),
        argument_bytes=given,
        output_bytes=made,
        forward_seconds=graph.forward_seconds,
        backward_seconds=graph.backward_seconds,
        working_bytes=bounds.working_bytes,
        plain=plain,
        graph=graph,
    )


def _point(
    graph: CostGraph,
    schedule: tuple[Segment, ...],
    cost: Simulated,
    bounds: _solve.Bounds,
    worth: _solve.Worth,
    given: int,
    made: int,
) -> Point:
    bound = min(bounds.seconds(cost.peak_bytes), cost.extra_seconds)
    return Point(
        predicted_peak_bytes=given + max(made, cost.peak_bytes),
        saved_bytes=cost.saved_bytes,
        extra_seconds=cost.extra_seconds,
        extra_flops=cost.extra_flops,
        extra_work=worth.extra(cost),
        forward_flops=graph.forward_flops,
        bound_extra_seconds=bound,
        gap=_share(cost.extra_seconds - bound, graph.forward_seconds),
        schedule=schedule,
        cost=cost,
    )


def _sizes(graph: CostGraph, args: Sequence[Any], argnums: Argnums, call: str) -> tuple[int, int]:
    """Bytes of the arguments and of the loss and its gradients."""
    structs = abstract(args, call=call)
    chosen = [argnums] if isinstance(argnums, int) else list(argnums or ())
    gradients = [structs[p] for p in chosen]
    given, made = (sum(_graph.nbytes(x) for x in jax.tree.leaves(t)) for t in (structs, gradients))
    return given, made + sum(_graph.nbytes(v.aval) for v in graph.program.outvars)


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
            "compiled_temp_bytes": self.compiled.temp_bytes if self.compiled else None,
            "baseline_temp_bytes": self.baseline.temp_bytes if self.baseline else None,
            "extra_flops_fraction": self.point.extra_flops_fraction if self.point else None,
            "extra_seconds": self.point.extra_seconds if self.point else None,
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
    compiles: int = 5,
    progress: Tick | None = None,
) -> tuple[Plan | UserError, ...]:
    """Return what `plan` does for several budgets, which share what is compiled.

    Args:
        budgets: as for `plan`; a budget that nothing fits gets the error in the plan's place.
        fn, args, target, argnums, objective, progress: as for `plan`.
        compiles: how many programs may be compiled for each budget.
    """
    chip, tick = find_target(target), progress or _solve.silent
    found = _frontier(fn, args, chip, argnums, objective, None, tick, "plans")
    search = _Search(fn, args, chip, argnums, found, "min", compiles, tick)

    def one(budget: str | int | float) -> Plan | UserError:
        try:
            return search.for_budget(budget)
        except UserError as error:
            return error

    return tuple(one(budget) for budget in budgets)


def plan(
    fn: Callable[..., Any],
    *args: Any,
    budget: str | int | float,
    target: str | Target = "cpu",
    argnums: Argnums = 0,
    objective: str = "balanced",
    optimizer: Any = None,
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
            plan; ``"min"``, the least memory; ``"free"``, the least at no more than 2 % extra time;
            ``"fit"``, what the chip has.
        target: the chip to compile for.
        argnums: what to differentiate.
        objective: what to spend least of, as for `frontier`.
        optimizer: an ``optax.GradientTransformation``. What is compiled is then the whole training
            step: gradients, the optimizer's state, the update, and parameters and state donated;
            budgets count all of it.
        compiles: how many programs may be compiled beside the one without a plan.
        progress: called with what is worked on. Ctrl-C ends the search with the best so far.

    Raises:
        UserError: nothing fits; it says what the least is, in which phase, and what holds it.
        NotDifferentiableError: ``fn`` is no loss.
        UnknownNameError, MissingPluginError: of the target.
    """
    chip = find_target(target)
    wanted = _parsed(budget)
    tick = progress or _solve.silent
    found = _frontier(fn, args, chip, argnums, objective, optimizer, tick, "plan")
    return _Search(fn, args, chip, argnums, found, wanted, compiles, tick, optimizer).run()


def _parsed(budget: str | int | float) -> str | int | float:
    """Return a word, a fraction (float) or bytes (int)."""
    if isinstance(budget, str):
        text = budget.strip()
        if text in ("min", "free", "fit"):
            return text
        try:
            number = float(text)
        except ValueError:
            return parse_bytes(text)
        budget = number if "." in text or number <= 1 else int(number)
    if isinstance(budget, bool) or budget <= 0:
        raise UserError(
            f"`plan(..., budget={budget!r})`: this is no amount of memory",
            hint='give bytes ("14GiB"), a fraction of the activations (0.5), "min", "free" or '
            '"fit"',
        )
    return float(budget) if isinstance(budget, float) and budget <= 1 else int(budget)


class _Search:
    """Compiles, corrects the prediction, chooses again.

    What was compiled for one budget is there for the next: see `for_budget`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        chip: Target,
        argnums: Argnums,
        frontier: Frontier,
        budget: str | int | float,
        compiles: int,
        tick: Tick,
        optimizer: Any = None,
    ):
        self.optimizer = optimizer
        self.fn, self.args, self.chip, self.argnums = fn, args, chip, argnums
        self.frontier, self.budget, self.compiles, self.tick = frontier, budget, compiles, tick
        self.known: dict[int, Memory] = {}  # by the place of the point
        self.texts: dict[int, str | None] = {}
        self.points = (*frontier.points, frontier.plain)
        self.plain = len(frontier.points)

    def for_budget(self, budget: str | int | float) -> Plan:
        """Return a plan for another budget, with what is known by now."""
        self.budget = _parsed(budget)
        return self.run()

    def run(self) -> Plan:
        self.compile(self.plain)
        limit = self.limit()
        tried: list[tuple[int, int]] = []  # point, what was predicted of it
        try:
            for _ in range(self.compiles):
                choice = self.choice(limit)
                if choice is None or choice in self.known:
                    break
                tried.append((choice, self.predicted(choice)))
                self.compile(choice)
        except KeyboardInterrupt:
            if not self.fitting(limit):
                raise
        best = self.best(limit)
        return self.plan(best, limit, dict(tried).get(best, self.predicted(best)))

    def limit(self) -> int | None:
        """The budget in bytes; None where it is no amount."""
        base = self.known[self.plain]
        if self.budget == "fit":
            return base.memory_bytes
        if isinstance(self.budget, str):
            return None
        if isinstance(self.budget, int):
            least = base.argument_bytes
            if self.budget < least:
                raise UserError(
                    f"`plan(..., budget={format_bytes(self.budget)!r})`: the arguments alone take "
                    f"{format_bytes(least)}",
                    hint="smaller parameters or inputs, or more devices; recomputing cannot help",
                )
            return self.budget
        temp = base.temp_bytes or max(0, (base.needs_bytes or 0) - base.argument_bytes)
        return self.fixed() + int(self.budget * temp)

    def fixed(self) -> int:
        base = self.known[self.plain]
        return base.argument_bytes + base.output_bytes - (base.alias_bytes or 0)

    def compile(self, place: int) -> None:
        if place in self.known:
            return
        point = self.points[place]
        fn = self.fn
        if place != self.plain:
            fn = apply(_policy_of(self.frontier.graph, point.schedule))(fn)
        share = f"+{100 * point.extra_flops_fraction:.1f} % FLOPs"
        self.tick(f"compiling for {self.chip.name}: {share}{self.so_far()}")
        args, argnums, donated = self.args, self.argnums, ()
        if self.optimizer is not None:
            fn, args, donated = _step.training_step(fn, self.optimizer, args, argnums, "plan")
            argnums = None
        compiled = compile_program(
            fn, args, self.chip, argnums=argnums, donate_argnums=donated, call="plan"
        )
        self.known[place], self.texts[place] = compiled.memory, compiled.hlo_text

    def so_far(self) -> str:
        peaks = [m.peak_bytes for m in self.known.values() if m.peak_bytes]
        return f" (best so far {format_bytes(min(peaks))})" if peaks else ""

    # .. prediction, through what was compiled

    def measured(self, place: int) -> int | None:
        memory = self.known[place]
        return memory.peak_bytes if memory.peak_bytes is not None else memory.needs_bytes

    def predicted(self, place: int) -> int:
        """The peak of a point: between compiled points in proportion, below them in parallel."""
        if place in self.known and self.measured(place):
            return self.measured(place) or 0
        own = self.points[place].predicted_peak_bytes
        pairs = sorted(
            (self.points[p].predicted_peak_bytes, self.measured(p) or 0)
            for p in self.known
            if self.measured(p)
        )
        if not pairs:
            return own
        below = [pair for pair in pairs if pair[0] <= own]
        above = [pair for pair in pairs if pair[0] > own]
        if below and above:
            (x0, y0), (x1, y1) = below[-1], above[0]
            return round(y0 + (y1 - y0) * (own - x0) / max(x1 - x0, 1))
        x, y = (below or above)[-1 if below else 0]
        if len(pairs) == 1:  # one program: the same factor on what is not fixed
            fixed = min(self.fixed(), y, x)
            return round(fixed + (own - fixed) * (y - fixed) / max(x - fixed, 1))
        return max(self.fixed(), y + own - x)

    def choice(self, limit: int | None) -> int | None:
        """The point to compile next."""
        points = self.points
        if self.budget == "min":
            new = [p for p in range(len(points)) if p not in self.known]
            if not new:
                return None
            best = min(new, key=self.predicted)
            least = min(self.measured(p) or 2**62 for p in self.known)
            small = self.predicted(best) < least or len(self.known) < 3
            return best if small else None
        if self.budget == "free":
            allowed = self.free()
            return min(allowed, key=self.predicted)
        assert limit is not None
        fitting = [p for p in range(len(points)) if self.predicted(p) <= limit]
        if fitting:
            return min(fitting, key=lambda p: points[p].extra_work)
        new = [p for p in range(len(points)) if p not in self.known]
        return min(new, key=self.predicted) if new else None

    def free(self) -> list[int]:
        step = self.frontier.forward_seconds + self.frontier.backward_seconds
        points = self.points
        return [p for p in range(len(points)) if points[p].extra_seconds <= _FREE_SHARE * step]

    def fitting(self, limit: int | None) -> list[int]:
        sizes = {p: self.measured(p) for p in self.known}
        return [p for p, size in sizes.items() if size and (limit is None or size <= limit)]

    def best(self, limit: int | None) -> int:
        fitting = self.fitting(limit)
        points = self.points
        if self.budget == "free":
            fitting = [p for p in fitting if p in self.free()]
        if limit is None and fitting:
            return min(fitting, key=lambda p: (self.measured(p), points[p].extra_work))
        if fitting:
            return min(fitting, key=lambda p: (points[p].extra_work, self.measured(p)))
        raise self.nothing_fits(limit or 0)

    def nothing_fits(self, limit: int) -> UserError:
        least = min(self.known, key=lambda p: self.measured(p) or 2**62)
        size = self.measured(least) or 0
        point = self.points[least]
        start, stop = point.cost.peak_segment
        holding = "; ".join(_held(self.frontier.graph, start, stop))
        place = self.frontier.graph.equations[min(start, self.frontier.equations - 1)].module
        return UserError(
            f"`plan(..., budget={format_bytes(limit)!r})`: the least that was reached is "
            f"{format_bytes(size)}, of which {format_bytes(self.fixed())} are arguments and "
            f"results; its peak is in the {point.cost.peak_kind} pass at {place or 'the top'}: "
            f"{holding}",
            hint="a smaller batch, or a chip with more memory; budget='min' gives the least",
        )

    def phase(self, place: int) -> str:
        """The phase of the compiled program's peak; "" where the compiler gave no program."""
        text = self.texts.get(place)
        if text is None:
            return ""
        return _anatomy.anatomy(_hlo.parse(text), platform=self.chip.platform).peak.phase

    # .. the answer

    def plan(self, place: int, limit: int | None, predicted: int) -> Plan:
        graph, point = self.frontier.graph, self.points[place]
        policy = _policy_of(graph, point.schedule)
        least = min(range(len(self.points)), key=self.predicted)
        memory = self.known[place]
        phase = self.phase(place)
        notes = []
        if phase == _anatomy.UPDATE:
            notes.append(
                "the peak is in the update of the parameters: recomputing more cannot help"
            )
        elif memory.peak_bytes is not None and point.cost.peak_bytes <= self.frontier.output_bytes:
            notes.append("arguments and gradients alone make the peak: no recompute can help")
        step = self.frontier.forward_seconds + self.frontier.backward_seconds
        return Plan(
            program=policy.program,
            lines=policy.lines,
            target=self.chip.name,
            budget_bytes=limit,
            predicted_peak_bytes=predicted,
            compiled=memory,
            baseline=self.known[self.plain],
            minimum_bytes=self.predicted(least),
            point=point,
            step_seconds=step + point.extra_seconds,
            peak_phase=phase,
            tried=len(self.known),
            modules=_by_module(graph, point.schedule),
            notes=tuple(notes),
        )


def _held(graph: CostGraph, start: int, stop: int, most: int = 3) -> list[str]:
    found = {t for e in graph.equations[start:stop] for t in (*e.needs, *e.makes)}
    largest = sorted(found, key=lambda t: -graph.tensors[t].bytes)[:most]
    out = []
    for t in largest:
        tensor = graph.tensors[t]
        if tensor.bytes:
            dims = ",".join(map(str, tensor.shape))
            made = graph.equations[tensor.producer]
            out.append(f"{tensor.dtype}[{dims}] of {made.module or made.primitive}")
    return out or ["one operation's working set"]


# -- from schedules to policies -------------------------------------------------------------------


def _policy_of(graph: CostGraph, schedule: Iterable[Segment]) -> Planned:
    lines = tuple(str(_stretch(graph, s)) for s in schedule)
    return algebra.planned(_described(graph), *lines)


@functools.lru_cache(maxsize=8)
def _described(graph: CostGraph) -> str:
    return _schedule.describe(graph.program)


def _stretch(graph: CostGraph, s: Segment) -> _schedule.Stretch:
    def places(tensors: Iterable[int]) -> tuple[tuple[int, int], ...]:
        return tuple(
            sorted((graph.tensors[t].producer, graph.tensors[t].position) for t in tensors)
        )

    loops = []
    for equation, loop_plan in s.loops:
        loop = graph.equations[equation].loop
        assert loop is not None
        parts = tuple(
            _schedule.LoopPart(times, group, tuple(_stretch(loop.graph, b) for b in body))
            for times, group, body in loop_plan.parts
        )
        loops.append((equation, parts))
    return _schedule.Stretch(
        start=s.start,
        stop=s.stop,
        save=() if s.inside else places(s.save - s.offload),
        offload=() if s.inside else places(s.save & s.offload),
        plain=s.plain,
        inside=tuple(_stretch(graph, part) for part in s.inside),
        hold=s.hold,
        loops=tuple(loops),
    )


def _by_module(graph: CostGraph, schedule: Sequence[Segment]) -> tuple[ModulePlan, ...]:
    saved: dict[str, list[float]] = {}

    def row(module: str) -> list[float]:
        return saved.setdefault(_graph.roll_up(module), [0, 0, 0.0, 0.0, 0])

    def count(graph: CostGraph, segments: Sequence[Segment], times: int) -> None:
        simulation = _cost._Simulation(graph, 1.0)
        for segment, held in zip(segments, simulation.held(segments), strict=True):
            for t in held:
                tensor = graph.tensors[t]
                if tensor.producer >= segment.start:
                    place = 1 if t in segment.offload else 0
                    row(graph.equations[tensor.producer].module)[place] += times * tensor.bytes
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
                    count(loop.graph, body, times * rounds)

    count(graph, schedule, 1)
    rows = [ModulePlan(m, int(a), int(b), c, d, int(n)) for m, (a, b, c, d, n) in saved.items()]
    return tuple(sorted(rows, key=lambda m: -(m.saved_bytes + m.offloaded_bytes)))


# -- hand-made checkpoints ------------------------------------------------------------------------


def estimate(
    fn: Callable[..., Any],
    *args: Any,
    checkpoints: Sequence[str],
    target: str | Target = "cpu",
    argnums: Argnums = 0,
) -> Point:
    """Return what hand-chosen checkpoints would take, without compiling.

    Each checkpoint ends a region, which is computed again from what the one before it left; what
    follows the last is left alone, as `segments` does (and Paddle's ``RecomputeOptimizer``).

    >>> import jax, jax.numpy as jnp
    >>> import remat_kit
    >>> def tower(weights, x):
    ...     for i, w in enumerate(weights):
    ...         x = remat_kit.name(jnp.tanh(x @ w), f"layer_{i}")
    ...     return jnp.mean(x)
    >>> weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
    >>> x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    >>> point = estimate(tower, weights, x, checkpoints=["layer_1", "layer_2"])
    >>> round(point.extra_flops_fraction, 2)
    0.75

    Args:
        fn, args, target, argnums: as for `frontier`.
        checkpoints: checkpoint names, or patterns of module paths, whose calls end regions.

    Raises:
        UnknownNameError: neither a name nor a module of the program.
    """
    chip = find_target(target)
    graph = _cost.trace(fn, args, chip, argnums, call="estimate")
    cuts = {stop for text in checkpoints for stop in _ends(graph, text)}
    n = len(graph.equations)
    marks = sorted({0, *cuts})
    schedule = tuple(Segment(a, b) for a, b in itertools.pairwise(marks))
    if marks[-1] < n:
        schedule += (Segment(marks[-1], n, plain=True),)
    cost = _cost.simulate(graph, schedule)
    given, made = _sizes(graph, args, argnums, "estimate")
    return _point(graph, schedule, cost, _solve.bounds(graph), _solve.TIME, given, made)


def _ends(graph: CostGraph, text: str) -> list[int]:
    """Positions after the value of a name, or after each call of a module."""
    eqns = graph.program.eqns
    named = [i + 1 for i, e in enumerate(eqns) if _graph.checkpoint_name_of(e) == text]
    if named:
        return named
    inside = [algebra.prefix_matching(text, e.module) for e in graph.equations]
    ends = [
        i + 1
        for i, block in enumerate(inside)
        if block is not None and (i + 1 == len(inside) or inside[i + 1] != block)
    ]
    if not ends:
        names = {n for e in eqns if (n := _graph.checkpoint_name_of(e))}
        known = names | {e.module for e in graph.equations if e.module}
        raise unknown("name or module", text, known, call="estimate(..., checkpoints=...)")
    return ends
