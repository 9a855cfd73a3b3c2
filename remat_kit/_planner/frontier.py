"""Which checkpoint schedules trade memory for time best, and how close are they to the optimum?

`frontier` traces a loss and returns its best schedules, from the lowest peak memory to no recompute
at all. Each one comes with a lower bound on the extra work of any schedule with its peak. Nothing
is compiled: peaks and times come from the simulation. `estimate` applies the same simulation to
checkpoints that the user chose, by hand or for example by Feng and Huang, "Optimal gradient
checkpoint search for arbitrary computation graphs", CVPR 2021.

Example: take a function ``tower`` of eight layers ``x = tanh(x @ w)``, with ``x`` of 4 MiB and 1
MiB per weight matrix. The peaks include 12 MiB of arguments:

>>> import jax, jax.numpy as jnp
>>> def tower(weights, x):
...     for w in weights:
...         x = jnp.tanh(x @ w)
...     return jnp.sum(x)
>>> weights = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 8
>>> x = jax.ShapeDtypeStruct((2048, 512), jnp.float32)
>>> print(frontier(tower, weights, x, target="h100"))
h100: predicted peak, and extra work as a share of the forward pass
peak    saved   extra FLOPs  extra time  bound
------  ------  -----------  ----------  -------
36 MiB  12 MiB  +187.5 %     +193.2 %    +64.4 %
40 MiB  16 MiB  +50.0 %      +51.5 %     +51.5 %
44 MiB  20 MiB  +37.5 %      +38.6 %     +38.6 %
48 MiB  24 MiB  +25.0 %      +25.8 %     +25.8 %
52 MiB  28 MiB  +12.5 %      +12.9 %     +12.9 %
56 MiB  32 MiB  +0.0 %       +0.0 %      +0.0 %

The extra time of all points but the first equals the bound, so no schedule with such a peak is
faster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from remat_kit import _files, _frames, _jax
from remat_kit._backend.interface import Backend
from remat_kit._chip.target import Target, for_arguments
from remat_kit._errors import UnknownNameError, UserError, unknown
from remat_kit._frameworks import flax as _flax
from remat_kit._planner.costs import simulate as _simulate
from remat_kit._planner.costs.graph import CostGraph
from remat_kit._planner.costs.simulate import Simulated
from remat_kit._planner.point import Least, Point, bounded, with_more
from remat_kit._planner.schedules import bounds as _bounds
from remat_kit._planner.schedules import mincut as _mincut
from remat_kit._planner.schedules import pieces as _pieces
from remat_kit._planner.schedules import proposals as _proposals
from remat_kit._policy import divisions as _divisions
from remat_kit._policy import patterns as _patterns
from remat_kit._policy import schedule as _schedule
from remat_kit._policy import structural as _structural
from remat_kit._policy.schedule import LoopPart, Place, Schedule, Segment
from remat_kit._policy.structural import Planned
from remat_kit._program import ops as _ops
from remat_kit._program import program as _program
from remat_kit._program.program import Program
from remat_kit._program.steps.gradient import Argnums, abstract
from remat_kit._show import chart as _chart
from remat_kit._show import figures as _figures
from remat_kit._show.table import Table
from remat_kit._units import format_bytes, format_flops

Tick = Callable[[str], None]


# For each objective, the weight of FLOPs in the work that the search minimises; the rest is the
# weight of seconds. FLOPs are certain, while seconds come from a roofline model. Therefore FLOPs
# have the greater weight if both count.
OBJECTIVES = {"balanced": 0.75, "time": 0.0, "flops": 1.0}


@dataclasses.dataclass(frozen=True)
class Frontier:
    """The best schedules of a loss, from the lowest peak memory to the least extra work.

    `frontier` returns it. It is the trade of memory for recomputation of Chen et al., "Training
    Deep Nets with Sublinear Memory Cost", 2016.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((4096,), jnp.float32)
    >>> found = frontier(lambda x: jnp.sum(jnp.exp(jnp.sin(x))), x)
    >>> found.argument_bytes, found.points[-1].extra_flops
    (16384, 0.0)

    Attributes:
        points: the schedules by peak, smallest first. Each has less extra work than those before.
        target: the chip's name.
        objective: how work is measured: ``"balanced"``, ``"time"`` or ``"flops"``.
        planning_seconds: the time in seconds that tracing and solving took.
        equations: number of operations of the traced forward pass.
        argument_bytes: bytes of the arguments, which are live all the time.
        output_bytes: bytes of the loss and the gradients.
        forward_seconds: roofline time of the forward pass.
        backward_seconds: roofline time of the backward pass without any recompute.
        working_bytes: bytes of the largest set of arrays that the derivative of one operation needs
            at once. No schedule has a lower peak, arguments not counted.
        leaner: schedules with about the predicted peak of the first point, which save fewer bytes
            and recompute more. `plan` tries them if the compiler keeps more live than predicted.
        plain: the loss as it is, without a region.
        presets: the names and the points of the presets ``nothing`` and ``dots``, with one region
            per block.
        blocks: of a partitioned loss, the schedules that recompute each repeated block as a whole.
            `plan` compiles them too.
        whole: with ``pieces=True``, the frontier without pieces. `plan` searches it as well, so
            that a plan with pieces never has more work than one without.
        memory_bytes: the memory of the chip in bytes.
        graph: the cost graph of the loss; of a step with several losses, that of the loss which
            needs most.
        others: the frontiers of the other losses of a step.
        of_step: whether it is the frontier of a step.
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
    memory_bytes: int
    graph: CostGraph = dataclasses.field(repr=False)
    others: tuple[Frontier, ...] = dataclasses.field(default=(), repr=False)
    blocks: tuple[Point, ...] = dataclasses.field(default=(), repr=False)
    whole: Frontier | None = dataclasses.field(default=None, repr=False)
    of_step: bool = False

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
            *("forward_seconds", "backward_seconds", "working_bytes", "memory_bytes"),
        )
        plain = {"headline": self.headline} | {name: getattr(self, name) for name in names}
        return plain | {
            "points": [p.to_json() for p in self.points],
            "leaner": [p.to_json() for p in self.leaner],
            "presets": [{"name": name} | p.to_json() for name, p in self.presets],
        }

    def policy(self, point: Point) -> Planned:
        """Return the policy that runs the schedule of a point, for `remat_kit.policy`."""
        own = policy_of(self.graph_of(point), point.schedule)
        others = (policy_of(f.graph_of(p), p.schedule) for f, p in zip(self.others, point.others))
        return _structural.joined([own, *others], step=self.of_step)

    def graph_of(self, point: Point) -> CostGraph:
        """Return the cost graph to which the schedule of a point belongs."""
        return self.graph if point.graph is None else point.graph

    def table(self, most: int = 24, *, full: bool = False) -> Table:
        """Return a table of at most ``most`` points, spread evenly over all points.

        Args:
            most: the number of points.
            full: whether the table has all points, their FLOPs and their segments.
        """
        shown = list(self.points) if full else _thinned(self.points, most)
        columns = {
            "peak": [format_bytes(p.predicted_peak_bytes) for p in shown],
            "saved": [format_bytes(p.saved_bytes) for p in shown],
            "on the host": [format_bytes(p.host_bytes) for p in shown],
            "extra FLOPs": [f"+{100 * p.extra_flops_fraction:.1f} %" for p in shown],
            "extra time": [self._part(p.extra_seconds) for p in shown],
            "extra work": [self._part(p.extra_work) for p in shown],
        }
        if not any(p.host_bytes for p in self.points):
            del columns["on the host"]
        # The bound stands beside what it bounds.
        flops = {"forward_flops": self.plain.forward_flops}
        name = _figures.extra_name({"objective": self.objective, "points": [flops]})
        if name != "extra work":
            del columns["extra work"]
        columns[name] = columns.pop(name)
        columns["bound"] = [self._part(p.bound_extra_work) for p in shown]
        if full:
            columns["recomputed"] = [format_flops(p.extra_flops) for p in shown]
            columns["segments"] = [str(len(p.schedule)) for p in shown]
        title = f"{self.target}: predicted peak, and extra work as a share of the forward pass"
        if name == "extra work":
            title += f"; {_figures.WORK}"
        return Table(title, tuple(columns), tuple(zip(*columns.values(), strict=True)))

    def _part(self, seconds: float) -> str:
        return f"+{100 * _share(seconds, self.forward_seconds):.1f} %"

    def __str__(self) -> str:
        return str(self.table())

    def to_png(self, path: str | pathlib.Path) -> None:
        """Draw memory against what is minimized: the points, the presets and the bound.

        This needs matplotlib, which the extra ``plot`` installs.

        Args:
            path: where to write the picture. The suffix gives the format: ``.png``, ``.svg`` or
                ``.pdf``.

        Raises:
            UserError: matplotlib is missing, or the suffix is none of these.
        """
        _figures.check_picture(path, call="to_png")
        _figures.frontier(self.to_json(), path)

    @property
    def headline(self) -> str:
        """The frontier in one sentence: the memory without recompute, and what less costs."""
        from remat_kit._inspect.headline import frontier_headline

        forward = self.forward_seconds
        steps = [(p.predicted_peak_bytes, _share(p.extra_seconds, forward)) for p in self.points]
        plain = self.plain.predicted_peak_bytes
        return frontier_headline(self.target, self.memory_bytes, plain, steps)

    def to_html(
        self, path: str | pathlib.Path, *, command: str = "", plan_command: str = ""
    ) -> None:
        """Write a page with the schedules, the presets, the lower bound and the chip's capacity.

        The page needs no server and no network. Pointing at a schedule shows its figures and the
        command that makes its plan.

        Args:
            path: where to write the page.
            command: the command that made the frontier, for the page.
            plan_command: a command that makes a plan, without its budget and its target; by default
                the Python call.
        """
        page = _chart.frontier_page(self.to_json(), command, plan_command)
        _files.write_whole(path, page)

    def _repr_html_(self) -> str:
        return _chart.inline(_chart.frontier_page(self.to_json()))


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
    pieces: bool = False,
    progress: Tick | None = None,
) -> Frontier:
    """Return the schedules with the best trade of memory for time.

    For a loss, nothing is compiled. A training step is compiled once, without a plan, because the
    compiled program shows what the step holds beside its losses.

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
        fn: the loss. It is called as ``fn(*args)`` and returns a scalar, or ``(scalar, aux)``. It
            may also be a training step, jitted or not, whose losses get the schedules.
        args: pytrees of arrays or of `jax.ShapeDtypeStruct`.
        target: the chip whose rates turn operations and bytes into seconds.
        argnums: the positions of the arguments to differentiate.
        objective: the extra work to minimize, which has a lower bound of its own. ``"time"`` is the
            roofline time on the chip. ``"flops"`` is the number of floating-point operations.
            ``"balanced"`` is three quarters FLOPs and one quarter time, each as a share of the
            forward pass; `plan` uses it by default. A roofline model assumes that matrix units run
            at their peak rate, which they do not. Time alone therefore recomputes too many
            convolutions, while FLOPs alone recompute any number of elementwise operations.
        optimizer: an ``optax.GradientTransformation`` whose state counts as live, as for `plan`.
        offload: whether the iterations of scans may offload their saved arrays to the host's
            memory. Outside of scans, compilers undo an offload or need more memory for it, so the
            planner does not propose it there.
        pieces: whether segments may run in pieces of an axis, as with `remat_kit.pieces`. The
            planner then chooses the segments, the axes and the numbers of pieces. It is off by
            default, because sums over pieces round in another order. An axis that a mesh splits is
            not divided, and a program with explicit mesh axes is refused.
        progress: called with a description of the current work. Ctrl-C ends the search, and
            `frontier` returns the schedules found so far.

    Raises:
        NotDifferentiableError: ``fn`` cannot be differentiated.
        UserError: ``fn`` is not a loss, or ``offload`` is set for a CPU.
        UnknownNameError: no chip or objective has that name.
    """
    # That module combines the frontiers that this one computes.
    from remat_kit._planner.steps import frontier_for

    tick = progress or _proposals.silent
    chip = for_arguments(target, _flax.arrays_of(args), "frontier")
    found, _ = frontier_for(
        fn, args, chip, argnums, objective, optimizer, offload, tick, "frontier", pieces
    )
    return found


def check_options(objective: str, offload: bool, chip: Target, call: str) -> None:
    """Raise for an unknown objective, or an offload on a chip that has one memory."""
    if objective not in OBJECTIVES:
        raise unknown("objective", objective, OBJECTIVES, call=f"{call}(..., objective=...)")
    if offload and Backend(chip.platform).has_one_memory:
        raise UserError(
            f"`{call}(..., offload=True, target={chip.name!r})`: a CPU's memory is the host's "
            "memory, so there is nowhere to move an array to",
            hint="leave offload out, or plan for a GPU or a TPU; `remat-kit targets` lists them",
        )


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What the program around a loss needs.

    Attributes:
        given: bytes that are live while the loss and its backward pass run, such as its arguments.
        made: bytes of the results and the gradients.
        least: bytes of the peak of the rest of a step, such as the update of the parameters.
        times: how often a step runs the loss.
    """

    given: int
    made: int
    least: int = 0
    times: float = 1.0


def frontier_of(
    graph: CostGraph,
    around: Surroundings,
    chip: Target,
    objective: str,
    offload: bool,
    tick: Tick,
    begun: float,
    call: str,
    pieces: bool = False,
) -> Frontier:
    """Return the frontier of a loss from its cost graph."""
    with collection_put_off():
        if offload and not any(e.loop for e in graph.equations):
            _frames.warn(
                f"`{call}(..., offload=True)`: the loss has no scan. The planner offloads only "
                "arrays that the iterations of a scan save, so offload=True has no effect",
                "leave offload out, or run equal layers in a scan",
            )
        worth = _mincut.Worth.of_graph(graph, OBJECTIVES[objective])
        bandwidth = chip.host_bandwidth_bytes_per_second if offload else 0.0
        found = _proposals.proposed(
            graph,
            tick=tick,
            host_bandwidth=bandwidth,
            host_bytes=chip.host_memory_bytes or math.inf,
            worth=worth,
        )
        found = _within_host(graph, found, chip, call) if offload else found
        tick("computing lower bounds")
        bounds = _bounds.bounds(graph, worth)

    def point(schedule: Schedule[int]) -> Point:
        cost = _simulate.simulate(graph, schedule)
        return _point(graph, schedule, cost, bounds, worth, around)

    def points(some: Sequence[_proposals.Candidate]) -> tuple[Point, ...]:
        return tuple(_point(graph, c.schedule, c.cost, bounds, worth, around) for c in some)

    blocks = _proposals.repeated_blocks(graph) if chip.devices > 1 else ()
    whole = Frontier(
        points=points(_proposals.pareto(found, worth)),
        target=chip.name,
        objective=objective,
        planning_seconds=time.perf_counter() - begun,
        equations=len(graph.equations),
        argument_bytes=around.given,
        output_bytes=around.made,
        forward_seconds=around.times * graph.forward_seconds,
        backward_seconds=around.times * graph.backward_seconds,
        working_bytes=bounds.working_bytes,
        leaner=points(_proposals.leaner(found, worth)),
        plain=point((Segment(0, len(graph.equations), plain=True),)),
        presets=tuple((name, point(schedule)) for name, schedule in _proposals.presets(graph)),
        blocks=tuple(map(point, blocks)),
        memory_bytes=chip.memory_bytes,
        graph=graph,
    )
    if not pieces:
        return whole
    every, leaner = _with_pieces(whole, chip, around, worth, bandwidth, tick, call)
    seconds = time.perf_counter() - begun
    return dataclasses.replace(
        whole, points=every, leaner=leaner, planning_seconds=seconds, whole=whole
    )


def _within_host(
    graph: CostGraph, found: Sequence[_proposals.Candidate], chip: Target, call: str
) -> list[_proposals.Candidate]:
    """Return the schedules whose offloaded arrays fit into the host's memory for one device.

    Warns if the scans of the loss save more than that.
    """
    room = chip.host_memory_bytes
    if room is None:
        return list(found)
    loops = (e.loop for e in graph.equations if e.loop is not None)
    most = sum(loop.stacked_bytes + loop.length * loop.carry_bytes for loop in loops)
    if most > room:
        _frames.warn(
            f"`{call}(..., offload=True, target={chip.name!r})`: the scans of the loss save "
            f"{format_bytes(most)}, and the host has {format_bytes(room)} for each device. Plans "
            "that offload more than that are left out",
            "use a smaller batch to offload all; `remat-kit targets` shows the memory of the hosts",
        )
    return [c for c in found if c.cost.host_bytes <= room]


def _with_pieces(
    whole: Frontier,
    chip: Target,
    around: Surroundings,
    worth: _mincut.Worth,
    host_bandwidth: float,
    tick: Tick,
    call: str,
) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Return the points and leaner points of a frontier, with those with segments in pieces.

    A point with pieces needs no more FLOPs and no more time than the points whose place it takes.
    If none of those is below the floor of the points without pieces, others are.

    Raises:
        UserError: the program is partitioned over a mesh with explicit axes.
    """
    graph, points, leaner = whole.graph, whole.points, whole.leaner
    if _pieces.has_explicit_shardings(graph):
        raise UserError(
            f"`{call}(..., pieces=True)`: the function is partitioned over a mesh with "
            "explicit axes; the planner chooses pieces for automatic axes only",
            hint="leave pieces out, or choose them yourself: `policy(pieces(8), at=...)`",
        )
    found, others = list(points), list[Point]()
    floor = min(p.predicted_peak_bytes for p in points)
    room = chip.host_memory_bytes or math.inf
    prices = list[tuple[_pieces.Variant, Callable[[_proposals.Candidate], Point]]]()
    with collection_put_off():
        variants = list(_pieces.explored(graph, chip, worth, host_bandwidth, room, tick))
    for variant in variants:
        bounds = _bounds.bounds(variant.graph, worth)
        priced = functools.partial(_priced, variant, graph, bounds, worth=worth, around=around)
        prices.append((variant, priced))
        for p in map(priced, _proposals.pareto(variant.candidates, worth)):
            (found if _is_improvement(p, points) else others).append(p)
    if all(p.predicted_peak_bytes >= floor for p in found):
        found += [p for p in others if p.predicted_peak_bytes < floor]
    kept: list[Point] = []
    for p in sorted(found, key=lambda p: (p.predicted_peak_bytes, p.extra_work)):
        if not kept or p.extra_work < kept[-1].extra_work * (1 - 1e-6):
            kept.append(p)
    for variant, priced in prices:
        if kept[0].graph is variant.graph:
            leaner = tuple(map(priced, _proposals.leaner(variant.candidates, worth)))
    return tuple(kept), leaner


def _priced(
    variant: _pieces.Variant,
    graph: CostGraph,
    bounds: _bounds.Bounds,
    candidate: _proposals.Candidate,
    worth: _mincut.Worth,
    around: Surroundings,
) -> Point:
    """Return a point of a divided program, with what the pieces cost under every schedule."""
    times = around.times
    point = _point(variant.graph, candidate.schedule, candidate.cost, bounds, worth, around)
    flops, seconds = (times * x for x in variant.extra(graph))
    return dataclasses.replace(
        with_more(point, flops, seconds, worth.of(seconds, flops)),
        forward_flops=times * graph.forward_flops,
        gap=point.gap * _share(variant.graph.forward_seconds, graph.forward_seconds),
        graph=variant.graph,
    )


def _is_improvement(point: Point, points: Sequence[Point]) -> bool:
    """Tell whether a point has no more FLOPs and no more time than those whose place it takes.

    These are the points without pieces that some budget would choose if the point were not there.
    """
    peak, work = point.predicted_peak_bytes, point.extra_work
    within = [p for p in points if p.predicted_peak_bytes <= peak]
    others = [p for p in points if p.predicted_peak_bytes >= peak and p.extra_work >= work]
    if within:
        others.append(min(within, key=lambda p: p.extra_work))
    return all(
        point.extra_flops <= p.extra_flops and point.extra_seconds <= p.extra_seconds
        for p in others
    )


@contextlib.contextmanager
def collection_put_off() -> Iterator[None]:
    """Suspend Python's garbage collection.

    A search creates many objects but few reference cycles. Collecting them would take a third of
    the search's time.
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
    schedule: Schedule[int],
    cost: Simulated,
    bounds: _bounds.Bounds,
    worth: _mincut.Worth,
    around: Surroundings,
) -> Point:
    times, work = around.times, around.times * worth.extra(cost)
    least = Least(bounds, around.given, times)
    point = Point(
        predicted_peak_bytes=max(around.least, around.given + max(around.made, cost.peak_bytes)),
        saved_bytes=cost.saved_bytes,
        host_bytes=cost.host_bytes,
        extra_seconds=times * cost.extra_seconds,
        extra_flops=times * cost.extra_flops,
        extra_work=work,
        forward_flops=times * graph.forward_flops,
        bound_extra_seconds=0.0,
        bound_extra_work=0.0,
        gap=0.0,
        schedule=schedule,
        cost=cost,
        least=least,
    )
    seconds, bound = bounded(point, point.predicted_peak_bytes)
    return dataclasses.replace(
        point,
        bound_extra_seconds=seconds,
        bound_extra_work=bound,
        gap=_share(work - bound, times * graph.forward_seconds),
    )


def sizes_of(
    graph: CostGraph,
    args: Sequence[Any],
    argnums: Argnums,
    call: str,
    sums: Callable[[int, int], int] = lambda *_: 0,
) -> tuple[int, int]:
    """Return the bytes of the arguments, and the bytes of the results with the gradients.

    If they are split over several devices, these are the bytes of one device.

    Args:
        graph: the cost graph of the loss.
        args, argnums, call: as for `frontier`.
        sums: returns how many bytes a gradient takes beside the result, from its bytes on one
            device and on all.
    """
    structs = abstract(args, call=call)
    leaves, tree = jax.tree.flatten(structs)
    places = jax.tree.unflatten(tree, range(len(leaves)))
    sizes = [_ops.shard_bytes(x) for x in leaves]
    chosen = [argnums] if isinstance(argnums, int) else list(argnums or ())
    own = len(graph.program.invars) - len(leaves)
    made = sum(_ops.nbytes(v.aval) for v in graph.program.outvars)
    for i in (i for p in chosen for i in jax.tree.leaves(places[p])):
        # The compiler may return the gradient of an argument that is split as a whole.
        size = max(sizes[i], graph.tensors[own + i].gradient_bytes)
        made += size + sums(size, _ops.nbytes(leaves[i]))
    return sum(sizes), made


# -- hand-made checkpoints ------------------------------------------------------------------------


def estimate(
    fn: Callable[..., Any],
    *args: Any,
    checkpoints: Sequence[str] = (),
    target: str | Target = "cpu",
    argnums: Argnums = 0,
) -> Point:
    """Return the predicted memory and extra work of hand-chosen checkpoints, or of pieces.

    For a loss, nothing is compiled. A training step is compiled once, without the checkpoints, and
    they are placed in the first of its losses that contains them.

    Each checkpoint ends a region. The backward pass recomputes a region from the arrays that enter
    it, such as the checkpoint before it. The equations after the last checkpoint are in no region.
    `segments` and Paddle's ``RecomputeOptimizer`` follow the same rule.

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

    A part that the policy `pieces` divides is priced as it runs: what one piece needs, and what is
    computed again for all pieces. Then checkpoints may be left out.

    >>> lean = remat_kit.policy(remat_kit.pieces(16))(tower)
    >>> estimate(lean, weights, x).predicted_peak_bytes < point.predicted_peak_bytes / 2
    True

    Args:
        fn, args, target, argnums: as for `frontier`.
        checkpoints: names given by `name` or ``checkpoint_name``, or patterns of module paths. A
            region ends after each named value and after each call of a matching module.

    Raises:
        UnknownNameError: a checkpoint is neither a name nor a module of the program.
        UserError: ``checkpoints`` is empty, and no part of the program runs in pieces.
    """
    # That module combines the frontiers that this one computes.
    from remat_kit._planner.steps import graphs_for

    chip = for_arguments(target, _flax.arrays_of(args), "estimate")
    graphs, around = graphs_for(fn, args, chip, argnums, "estimate")
    graph = next((g for g in graphs if all(_knows(g, text) for text in checkpoints)), graphs[0])
    if not checkpoints and not graph.again_flops:
        raise UserError(
            "`estimate(..., checkpoints=())`: there is no checkpoint and no part in pieces to "
            "estimate",
            hint="give at least one name, as in checkpoints=['layer_1'], or one pattern of module "
            "paths; `remat_kit.measure` compiles the function as it is",
        )
    cuts = {stop for text in checkpoints for stop in _ends(graph, text)}
    n = len(graph.equations)
    marks = sorted({0, *cuts})
    schedule = tuple(Segment(a, b) for a, b in itertools.pairwise(marks))
    if marks[-1] < n:
        schedule += (Segment(marks[-1], n, plain=True),)
    cost = _simulate.simulate(graph, schedule)
    point = _point(graph, schedule, cost, _bounds.bounds(graph), _mincut.TIME, around)
    seconds = around.times * graph.again_seconds
    return with_more(point, around.times * graph.again_flops, seconds, seconds)


def _knows(graph: CostGraph, text: str) -> bool:
    try:
        return bool(_ends(graph, text))
    except UnknownNameError:
        return False


def _ends(graph: CostGraph, text: str) -> list[int]:
    """Return the positions after each value of a name, or after each call of a module."""
    eqns = graph.program.eqns
    named = [i + 1 for i, e in enumerate(eqns) if _program.checkpoint_name_of(e) == text]
    if named:
        return named
    inside = [_patterns.prefix_matching(text, e.module) for e in graph.equations]
    ends = [
        i + 1
        for i, block in enumerate(inside)
        if block is not None and (i + 1 == len(inside) or inside[i + 1] != block)
    ]
    if not ends:
        names = {n for e in eqns if (n := _program.checkpoint_name_of(e))}
        known = names | {e.module for e in graph.equations if e.module}
        raise unknown("name or module", text, known, call="estimate(..., checkpoints=...)")
    return ends


# -- from schedules to policies -------------------------------------------------------------------


def policy_of(graph: CostGraph, schedule: Iterable[Segment[int]]) -> Planned:
    """Return the policy that runs a schedule of a graph."""
    lines = _schedule.lines([_by_place(graph, s) for s in schedule])
    program, divisions = graph.program, ()
    if graph.divided is not None:
        program, divisions = graph.divided.whole, graph.divided.divisions
    return _structural.planned(_described(program), *_divisions.lines(divisions), *lines)


def _described(program: Program) -> str:
    return _jax.shared(_description, program, ())


def _description(of: Callable[[], Program], _: Any) -> str:
    return _schedule.describe(of())


def _by_place(graph: CostGraph, segment: Segment[int]) -> Segment[Place]:
    """Return a segment that names activations by their places instead of by their tensors."""

    def places(tensors: Iterable[int]) -> frozenset[Place]:
        # For an argument, the producer is -1 and the position is its number.
        return frozenset((graph.tensors[t].producer, graph.tensors[t].position) for t in tensors)

    def by_place(part: LoopPart[int], equation: int) -> LoopPart[Place]:
        loop = graph.equations[equation].loop
        assert loop is not None
        return LoopPart(part.times, part.group, tuple(_by_place(loop.graph, s) for s in part.body))

    return Segment(
        segment.start,
        segment.stop,
        save=places(segment.save),
        offload=places(segment.offload),
        plain=segment.plain,
        inside=tuple(_by_place(graph, part) for part in segment.inside),
        loops=tuple((i, tuple(by_place(part, i) for part in plan)) for i, plan in segment.loops),
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
    return out or ["the working set of one operation"]
