"""The frontier of memory and time: every schedule of a loss worth having, beside a bound.

`frontier` traces a loss and solves, without compiling: from the least memory to no recompute at
all. `estimate` says what hand-chosen checkpoints would take, by the same model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import html
import io
import itertools
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from remat_kit import _cost, _cut, _figures, _graph, _schedule, _simulate, _solve, _step
from remat_kit import _policy as algebra
from remat_kit._cost import CostGraph
from remat_kit._errors import UserError, unknown
from remat_kit._gradient import Argnums, abstract
from remat_kit._policy import Planned, format_bytes
from remat_kit._simulate import Segment, Simulated
from remat_kit._table import Table
from remat_kit._target import Target
from remat_kit._target import target as find_target

Tick = Callable[[str], None]

# The share of FLOPs, against seconds, in the work that a search minimises. FLOPs are certain and
# seconds are a roofline's, so where both count it is FLOPs that count more.
OBJECTIVES = {"balanced": 0.75, "time": 0.0, "flops": 1.0}


# -- the frontier ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Point:
    """One schedule on the frontier.

    Attributes:
        predicted_peak_bytes: on the device, arguments and results included.
        saved_bytes: kept on the device from the forward to the backward pass.
        host_bytes: kept in the host's memory meanwhile.
        extra_seconds: roofline time of what is computed twice, and of transfers to and from the
            host as far as no computation of theirs hides them.
        extra_flops: floating-point operations that are computed twice.
        extra_work: what the search minimised, in seconds: of these two what the objective says.
        forward_flops: floating-point operations of the forward pass, to divide by.
        bound_extra_seconds: the least extra time of any schedule with this peak; with what the
            host keeps counted as if it were on the device.
        gap: ``extra_seconds`` over the bound, as a fraction of the forward pass.
    """

    predicted_peak_bytes: int
    saved_bytes: int
    host_bytes: int
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
            *("predicted_peak_bytes", "saved_bytes", "host_bytes", "extra_seconds"),
            *("extra_flops", "extra_work", "forward_flops", "bound_extra_seconds", "gap"),
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
        leaner: schedules of about the first point's predicted peak that keep less for more work,
            for `plan` to try where a compiler holds more than was predicted.
        plain: the function as it is, with no region.
        presets: what the presets ``nothing`` and ``dots`` would take around each block, by name.
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
    leaner: tuple[Point, ...]
    plain: Point
    presets: tuple[tuple[str, Point], ...]
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
        return plain | {
            "points": [p.to_json() for p in self.points],
            "leaner": [p.to_json() for p in self.leaner],
            "presets": [{"name": name} | p.to_json() for name, p in self.presets],
        }

    def policy(self, point: Point) -> Planned:
        """Return the policy that runs one of the points, for `remat_kit.policy`."""
        return policy_of(self.graph, point.schedule)

    def table(self, most: int = 24) -> Table:
        """Return at most so many of the points, spread over the range of memory."""
        shown = _thinned(self.points, most)
        columns = {
            "peak": [format_bytes(p.predicted_peak_bytes) for p in shown],
            "saved": [format_bytes(p.saved_bytes) for p in shown],
            "on the host": [format_bytes(p.host_bytes) for p in shown],
            "extra FLOPs": [f"+{100 * p.extra_flops_fraction:.1f} %" for p in shown],
            "extra time": [self._part(p.extra_seconds) for p in shown],
            "bound": [self._part(p.bound_extra_seconds) for p in shown],
        }
        if not any(p.host_bytes for p in self.points):
            del columns["on the host"]
        title = f"{self.target}: predicted peak against extra work, in parts of the forward pass"
        return Table(title, tuple(columns), tuple(zip(*columns.values(), strict=True)))

    def _part(self, seconds: float) -> str:
        return f"+{100 * _share(seconds, self.forward_seconds):.1f} %"

    def __str__(self) -> str:
        return str(self.table())

    def to_png(self, path: str | pathlib.Path) -> None:
        """Draw memory against time: the points, presets and the bound (extra ``plot``).

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
    objective: str = "time",
    optimizer: Any = None,
    offload: bool = False,
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
        objective: what to spend least of: ``"time"``, by the chip's roofline, which the bound is
            of too; ``"flops"``; or ``"balanced"``, three quarters FLOPs and one quarter time, each
            as a share of the forward pass, which is what `plan` chooses by. A roofline has matrix
            units run at their peak, which they do not, so time alone recomputes too many
            convolutions; FLOPs alone recompute elementwise operations without an end.
        optimizer: an ``optax.GradientTransformation`` whose state is there too, as for `plan`.
        offload: whether what the iterations of scans keep may wait in the host's memory. Outside of
            scans compilers undo it or take more memory for it, so it is not proposed there.
        progress: called with what is worked on. Ctrl-C ends the search with what it has.

    Raises:
        NotDifferentiableError, UserError: ``fn`` is no loss.
        UnknownNameError: no chip or objective has that name.
        UserError: ``offload`` on a chip whose memory is the host's.
    """
    return search_frontier(
        fn,
        args,
        find_target(target),
        argnums,
        objective,
        optimizer,
        offload,
        progress or _solve.silent,
        "frontier",
    )


def search_frontier(
    fn: Callable[..., Any],
    args: Sequence[Any],
    chip: Target,
    argnums: Argnums,
    objective: str,
    optimizer: Any,
    offload: bool,
    tick: Tick,
    call: str,
) -> Frontier:
    """Do what `frontier` does, for the call that an error names."""
    begun = time.perf_counter()
    if objective not in OBJECTIVES:
        raise unknown("objective", objective, OBJECTIVES, call=f"{call}(..., objective=...)")
    if offload and chip.platform == "cpu":
        raise UserError(
            f"`{call}(..., offload=True, target={chip.name!r})`: a CPU's memory is the host's, so "
            "there is nowhere to move an array to",
            hint="leave offload out, or plan for a GPU or a TPU; `remat-kit targets` lists them",
        )
    with _collection_put_off():
        tick("tracing")
        graph = _cost.trace(fn, args, chip, argnums, call=call)
        worth = _cut.Worth.of_graph(graph, OBJECTIVES[objective])
        found = _solve.proposed(
            graph,
            tick=tick,
            host_bandwidth=chip.host_bandwidth_bytes_per_second if offload else 0.0,
            worth=worth,
        )
        tick("bounds")
        bounds = _cut.bounds(graph)
    given, made = _sizes(graph, args, argnums, call)
    if optimizer is not None:
        state = _step.state_of(optimizer, args, argnums, call)
        given += sum(_graph.nbytes(x) for x in jax.tree.leaves(state))

    def point(schedule: tuple[Segment, ...]) -> Point:
        cost = _simulate.simulate(graph, schedule)
        return _point(graph, schedule, cost, bounds, worth, given, made)

    def points(some: Sequence[_solve.Candidate]) -> tuple[Point, ...]:
        return tuple(_point(graph, c.schedule, c.cost, bounds, worth, given, made) for c in some)

    return Frontier(
        points=points(_solve.pareto(found, worth)),
        target=chip.name,
        objective=objective,
        planning_seconds=time.perf_counter() - begun,
        equations=len(graph.equations),
        argument_bytes=given,
        output_bytes=made,
        forward_seconds=graph.forward_seconds,
        backward_seconds=graph.backward_seconds,
        working_bytes=bounds.working_bytes,
        leaner=points(_solve.leaner(found, worth)),
        plain=point((Segment(0, len(graph.equations), plain=True),)),
        presets=tuple((name, point(schedule)) for name, schedule in _solve.presets(graph)),
        graph=graph,
    )


@contextlib.contextmanager
def _collection_put_off() -> Iterator[None]:
    """Let no garbage be collected meanwhile: among so many live objects that is a third of the time
    that a search takes, and there are few cycles to find.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _point(
    graph: CostGraph,
    schedule: tuple[Segment, ...],
    cost: Simulated,
    bounds: _cut.Bounds,
    worth: _cut.Worth,
    given: int,
    made: int,
) -> Point:
    bound = min(bounds.seconds(cost.peak_bytes + cost.host_bytes), cost.extra_seconds)
    return Point(
        predicted_peak_bytes=given + max(made, cost.peak_bytes),
        saved_bytes=cost.saved_bytes,
        host_bytes=cost.host_bytes,
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
    cost = _simulate.simulate(graph, schedule)
    given, made = _sizes(graph, args, argnums, "estimate")
    return _point(graph, schedule, cost, _cut.bounds(graph), _cut.TIME, given, made)


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


# -- from schedules to policies -------------------------------------------------------------------


def policy_of(graph: CostGraph, schedule: Iterable[Segment]) -> Planned:
    lines = _schedule.lines([_stretch(graph, s) for s in schedule])
    return algebra.planned(_described(graph), *lines)


@functools.lru_cache(maxsize=8)
def _described(graph: CostGraph) -> str:
    return _schedule.describe(graph.program)


def _stretch(graph: CostGraph, s: Segment) -> _schedule.Stretch:
    def places(tensors: Iterable[int]) -> tuple[tuple[int, int], ...]:
        return tuple(
            sorted((graph.tensors[t].producer, graph.tensors[t].position) for t in tensors)
        )  # an argument's producer is -1, and its position is its place

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
        save=places(s.save - s.offload),
        offload=places(s.offload),
        plain=s.plain,
        inside=tuple(_stretch(graph, part) for part in s.inside),
        loops=tuple(loops),
    )


def held_arrays(graph: CostGraph, start: int, stop: int, most: int = 3) -> list[str]:
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
