"""How much extra work does every schedule with a given peak need at least?

When the backward pass begins, the saved arrays fit the peak. The backward pass must recompute every
other residual from them at least once. A lower bound on that recompute follows from Lagrangian
relaxation. Put a price in seconds on each saved byte, and let V be the value of the minimum cut at
that price, that is, the least sum of recompute work and price of the saved bytes (module `mincut`;
Picard 1976). A schedule that saves at most B bytes then recomputes for at least V - price * B. The
bound is the maximum of this expression over several prices, and over several moments of the
backward pass: at a later moment, cotangents and gradients take up part of the peak as well.

Work is time, FLOPs or a weighted mean of both (`mincut.Worth`). Each of them has a bound of its
own: a search that minimizes one of them is compared with the bound for the same one.

Example: take eight layers ``x = tanh(x @ w)``, with ``x`` of 4 MiB on an H100. With 44 MiB beside
the arguments, no recompute is needed. With 40, 32 or 24 MiB, every schedule needs at least this
extra time, as a share of the forward pass:

>>> import jax, jax.numpy as jnp
>>> from remat_kit._chip.target import target
>>> from remat_kit._planner.costs.build import trace
>>> def tower(weights, x):
...     for w in weights:
...         x = jnp.tanh(x @ w)
...     return jnp.sum(x)
>>> weights = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 8
>>> x = jax.ShapeDtypeStruct((2048, 512), jnp.float32)
>>> graph = trace(tower, (weights, x), target("h100"))
>>> least = bounds(graph)
>>> [round(least.seconds(m << 20) / graph.forward_seconds, 2) for m in (44, 40, 32, 24)]
[0.0, 0.13, 0.39, 0.64]
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from remat_kit._planner.costs.graph import CostGraph, Equation, Loop
from remat_kit._planner.schedules.mincut import TIME, Cutter, Worth

# -- what is minimised ----------------------------------------------------------------------------


# Triples ``(price, value, busy)``. Each of them says that a schedule with a peak of B bytes
# recomputes for at least ``value - price * (B - busy)`` seconds of work.
_Lines: TypeAlias = "tuple[tuple[float, float, int], ...]"


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Lower bounds on the extra work and the peak of every schedule, whatever its regions.

    Attributes:
        lines: the bound on the work that a search minimizes: triples ``(price, value, busy)``. Each
            of them says that a schedule with a peak of B bytes recomputes for at least ``value -
            price * (B - busy)`` seconds of work.
        time_lines: the same for roofline time; equal to ``lines`` if the work is time.
        working_bytes: bytes of the largest set of arrays that the derivative of one operation needs
            at once.
    """

    lines: _Lines
    time_lines: _Lines
    working_bytes: int

    def work(self, held_bytes: float) -> float:
        """Return the least extra work in seconds of any schedule with a peak of ``held_bytes``.

        When the backward pass arrives at an operation, at most ``held_bytes`` are live, and the
        operation itself needs some of them. The rest holds saved arrays. The derivatives of the
        earlier operations read further residuals, which must be recomputed from the saved arrays at
        least once. If a schedule separates operations that the compiler would fuse, the bound
        assumes that the arrays between them are written to memory.
        """
        return _highest(self.lines, held_bytes)

    def seconds(self, held_bytes: float) -> float:
        """Return the least extra roofline time of any schedule with a peak of ``held_bytes``."""
        return _highest(self.time_lines, held_bytes)


def _highest(lines: _Lines, held_bytes: float) -> float:
    return max(
        (float(v - price * max(0, held_bytes - busy)) for price, v, busy in lines), default=0
    )


def bounds(graph: CostGraph, worth: Worth = TIME) -> Bounds:
    """Return lower bounds for all schedules of a graph.

    >>> import jax, jax.numpy as jnp
    >>> from remat_kit._chip.target import target
    >>> from remat_kit._planner.costs.build import trace
    >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> graph = trace(lambda x: jnp.sum(jnp.tanh(jnp.tanh(x @ x) @ x)), (x,), target("cpu"))
    >>> found = bounds(graph, Worth.of_graph(graph, 0.75))
    >>> found.work(0) > 0, found.work(1e9), found.seconds(1e9)
    (True, 0.0, 0.0)

    Args:
        graph: the cost graph of the loss.
        worth: how FLOPs and seconds are combined into the work that the search minimizes.
    """
    moments = _busiest(graph)
    time = _lines(graph, moments, TIME)
    work = _lines(graph, moments, worth) if worth.flop_share else time
    working = [
        _arrays_of(graph, e.needs) + _cotangents_of(graph, e)
        for e in graph.equations
        if e.needs and e.loop is None
    ]
    return Bounds(work, time, max(working, default=0))


def _lines(graph: CostGraph, moments: Iterable[_Moment], worth: Worth) -> _Lines:
    """Return the bound on one measure of work, at some moments of the backward pass."""
    lines = [(0.0, 0.0, 0)]
    for moment in moments:
        parts = list(_parts(graph, moment, worth))

        def least(price: float, parts: Sequence[_BoundPart] = parts) -> tuple[float, float]:
            values, sizes = zip(*(part.least(price) for part in parts), strict=True)
            return sum(values), sum(sizes)

        found = _tangents(least, price_range(graph, 5), 1e-3 * graph.forward_seconds)
        lines += [(price, value, moment.bytes) for price, value in found.items()]
    return tuple(lines)


def _tangents(
    least: Callable[[float], tuple[float, float]],
    prices: Sequence[float],
    enough: float,
    most: int = 48,
) -> dict[float, float]:
    """Return, by price, enough least costs that no other price raises the bound by much.

    The least cost is a concave function of the price, and the saved bytes are its slope. The
    function therefore evaluates the price at which two neighbouring tangents meet, and begins where
    this could raise the bound the most.

    Args:
        least: returns the least cost at a price, and the bytes that are saved for it.
        prices: the prices to begin with.
        enough: the search ends if no other price can raise the bound by more than this, in seconds.
        most: maximum number of prices to evaluate.
    """
    known = {price: least(price) for price in prices}

    def between(low: float, high: float) -> tuple[float, float, float, float]:
        """Return minus the most that a price between two others can raise the bound, the price at
        which their tangents meet, and the two.
        """
        (v0, k0), (v1, k1) = known[low], known[high]
        if k0 - k1 < 1:
            return 0.0, low, low, high
        price = (v1 - k1 * high - v0 + k0 * low) / (k0 - k1)
        room = (v1 - v0) / (high - low)  # the bytes for which both bounds are the same
        return -(k0 - room) * (price - low), price, low, high

    todo = [between(low, high) for low, high in itertools.pairwise(sorted(known))]
    heapq.heapify(todo)
    while todo and len(known) < most:
        rise, price, low, high = heapq.heappop(todo)
        if -rise <= enough or not low < price < high:
            continue
        known[price] = least(price)
        for pair in ((low, price), (price, high)):
            heapq.heappush(todo, between(*pair))
    return {price: value for price, (value, _) in known.items()}


@dataclasses.dataclass(frozen=True)
class _Moment:
    """A moment of the backward pass, and the bytes that are live then in every schedule.

    Attributes:
        place: the index of the current equation. The derivatives of the equations before it are
            still to run.
        bytes: bytes of cotangents, of gradients and of the arrays that the current derivatives
            read. When the backward pass begins, these are the bytes reserved for gradients.
        present: the forward tensors among them.
    """

    place: int
    bytes: int = 0
    present: frozenset[int] = frozenset()


def _busiest(graph: CostGraph, most: int = 3) -> list[_Moment]:
    """Return the first moment of the backward pass, and those that promise the highest bounds.

    A moment is promising if many bytes are live beside those reserved for gradients, and if the
    equations before it make many bytes.
    """
    kept = np.cumsum([sum(graph.tensors[t].bytes for t in e.makes) for e in graph.equations])
    moments = [m for m in _moments(graph) if graph.equations[m.place].loop is None]
    first = _Moment(len(graph.equations), graph.standing_bytes[-1])
    more = {m: (m.bytes - first.bytes) * float(kept[m.place]) for m in moments}
    return [first, *sorted(moments, key=more.__getitem__, reverse=True)[: most - 1]]


def _moments(graph: CostGraph) -> Iterator[_Moment]:
    reading: list[int] = []
    for e in reversed(graph.equations):
        begun = graph.begun_bytes[e.index]
        # Consecutive derivatives fuse until one writes a cotangent to memory. The arrays that they
        # read are live until then.
        reading += e.held
        if e.needs or begun:
            there, present = _least_bytes(graph, reading)
            there += graph.flowing_bytes[e.index + 1] + begun + graph.standing_bytes[e.index]
            yield _Moment(e.index, there + e.made_in_memory + e.working_bytes, present)
        if begun:
            reading = []


def _least_bytes(graph: CostGraph, tensors: Iterable[int]) -> tuple[int, frozenset[int]]:
    """Return the fewest bytes in which some tensors can be live, and the tensors that may be live.

    A tensor is live as itself or as the sources from which the compiler fuses it.
    """
    sizes = graph.sizes
    ways = [
        (min(sizes[t], sum(sizes[s] for s in graph.tensors[t].sources)), t)
        for t in dict.fromkeys(tensors)
        if graph.tensors[t].producer >= 0
    ]
    total, found = 0, set[int]()
    for size, t in sorted(ways, reverse=True):
        way = {t, *graph.tensors[t].sources}
        if size and found.isdisjoint(way):  # a source that two tensors share counts only once
            total += size
            found |= way
    return total, frozenset(found)


class _BoundPart:
    """A part of the program whose recompute is bounded on its own.

    It is either the equations before a moment, without the bodies of their scans, or the body of a
    scan, which counts once for each iteration.

    Args:
        graph: the cost graph of the program or of the body.
        place: the part consists of the equations before this index.
        worth: the measure of work.
        present: tensors that are live anyway, so that saving them costs nothing.
        times: number of times that the part runs.
    """

    def __init__(
        self,
        graph: CostGraph,
        place: int,
        worth: Worth,
        present: frozenset[int] = frozenset(),
        times: int = 1,
    ):
        equations = tuple(_priced(graph, e) for e in graph.equations)
        graph = dataclasses.replace(graph, equations=equations)
        self.cutter = Cutter(graph, worth, *_needs(graph, place))
        self.present = present
        self.times = times

    def least(self, price: float) -> tuple[float, float]:
        """Return the least sum of recompute work and price of saved bytes, and these bytes."""
        found = self.cutter.cut(price, self.present)
        return self.times * found.value, self.times * found.bytes


def _priced(graph: CostGraph, e: Equation) -> Equation:
    """Return an equation with the least work that running it again costs any schedule.

    The iterations of a scan are parts of their own, so its results cost nothing here. If the
    compiler would fuse what an operation makes, the derivatives outside of regions compute it from
    its sources, without work that a schedule counts. The iterations of a scan save such arrays as
    they are.
    """
    if e.loop is not None:
        return dataclasses.replace(e, reads=(), seconds=0.0, flops=0.0)
    made = [graph.tensors[t] for t in e.makes]
    if made and not graph.stacked and not any(t.in_memory or t.index in t.sources for t in made):
        return dataclasses.replace(e, seconds=0.0, flops=0.0)
    return e


class _Iteration(_BoundPart):
    """One iteration of a scan, whose carry comes from the iteration before.

    There are two valid bounds, and the higher one is used. The first treats the carry that enters
    the iteration as free. The second joins the iterations to a ring, in which the last passes its
    carry to the first. Then the same cut has the least cost in every iteration. The ring saves at
    most one carry more than the scan, and the bound subtracts its price.
    """

    def __init__(self, loop: Loop, times: int, worth: Worth):
        graph = loop.graph
        super().__init__(graph, len(graph.equations), worth, times=times * loop.length)
        made = {
            t: out
            for (t, _), out in zip(loop.carry, loop.handed, strict=True)
            if out >= 0 and graph.tensors[out].producer >= 0
        }

        def ring(tensors: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(dict.fromkeys(made.get(t, t) for t in tensors))

        equations = tuple(
            dataclasses.replace(e, reads=ring(e.reads), needs=ring(e.needs), keeps=ring(e.keeps))
            for e in graph.equations
        )
        # An array that products read in half precision may be carried in half precision.
        halved = {out for t, out in made.items() if graph.rounded(graph.tensors[t])}
        tensors = tuple(
            dataclasses.replace(t, bytes=t.bytes // 2) if t.index in halved else t
            for t in graph.tensors
        )
        parts = dataclasses.replace(graph, equations=equations, tensors=tensors)
        self.ring = _BoundPart(parts, len(equations), worth, times=self.times)
        self.more = times * sum(tensors[t].bytes for t in dict.fromkeys(made.values()))

    def least(self, price: float) -> tuple[float, float]:
        value, size = self.ring.least(price)
        return max(super().least(price), (value - price * self.more, size - self.more))


def _parts(graph: CostGraph, moment: _Moment, worth: Worth) -> Iterator[_BoundPart]:
    """Yield the parts of the program before a moment: its equations, and its scans' iterations."""
    yield _BoundPart(graph, moment.place, worth, moment.present)
    for times, loop in _loops(graph.equations[: moment.place]):
        yield _Iteration(loop, times, worth)


def _loops(equations: Sequence[Equation], times: int = 1) -> Iterator[tuple[int, Loop]]:
    """Yield the scans among some equations and inside their bodies, with how often each runs."""
    for e in equations:
        if e.loop is not None:
            yield times, e.loop
            yield from _loops(e.loop.graph.equations, times * e.loop.length)


_Needs: TypeAlias = "tuple[list[int], list[tuple[int, list[int]]]]"


def _needs(graph: CostGraph, place: int) -> _Needs:
    """Return the tensors that derivatives before an equation need, and those with an alternative.

    A derivative may compute its own residual from some of the tensors that it needs. Outside of
    regions it can save this residual in their place. The second list holds these alternatives, as
    pairs of the bytes of the residual and the tensors that it replaces.
    """
    always: dict[int, None] = {}
    instead: list[tuple[int, list[int]]] = []
    for e in graph.equations[:place]:
        own = int(graph.made_outside[e.index])
        rest = [t for t in e.needs if t not in e.keeps and graph.tensors[t].producer >= 0]
        always.update(dict.fromkeys(e.keeps if own else e.needs))
        if own and rest and e.loop is None:
            instead.append((own, rest))
    return [t for t in always if graph.tensors[t].producer >= 0], instead


def _arrays_of(graph: CostGraph, tensors: Iterable[int]) -> int:
    found = {t for t in tensors if graph.tensors[t].in_memory}
    return sum(graph.tensors[t].bytes for t in found)


def _cotangents_of(graph: CostGraph, e: Equation) -> int:
    flowing = {t for t in (*e.makes, *e.reads) if graph.tensors[t].producer >= 0}
    return sum(graph.tensors[t].cotangent_bytes for t in flowing)


def price_range(graph: CostGraph, count: int) -> list[float]:
    """Return prices per byte, from one that saves everything to one that saves nothing."""
    parts = [(1, graph)]
    parts += [(times * loop.length, loop.graph) for times, loop in _loops(graph.equations)]
    total = sum(times * part.tensors[t].bytes for times, part in parts for t in part.residuals)
    middle = graph.forward_seconds / max(total, 1)
    return [middle * 10 ** (-2 + 4 * k / (count - 1)) for k in range(count)]
