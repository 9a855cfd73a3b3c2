"""What to keep and what to compute again, as a minimum cut, and what no schedule can beat.

An operation that runs again needs its inputs, so the choice is one of maximum closure: for a price
of a byte, the minimum cut of a flow network is the cheapest set of arrays to keep. A sweep over
the price gives the convex hull of all choices, and its lower envelope is a bound.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from remat_kit._cost import CostGraph, Equation, Loop
from remat_kit._simulate import Simulated, closure

# -- what is minimised ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What no schedule can beat, whatever its regions.

    Attributes:
        lines: triples ``(price, value, busy)``: a peak of B bytes takes at least
            ``value - price * (B - busy)`` seconds of recompute, for each of them.
        working_bytes: the largest set of arrays that one operation's derivative needs at once.
    """

    lines: tuple[tuple[float, float, int], ...]
    working_bytes: int

    def seconds(self, held_bytes: float) -> float:
        """Return the least extra time of any schedule that holds so many bytes at its peak.

        When the backward pass arrives at an operation at most that many bytes are held, some of
        them by the operation itself, so everything else that those before it need has to be
        computed again from the rest, at least once. A schedule that parts operations which the
        compiler would fuse is taken to write down what crosses.
        """
        return max(
            (float(v - price * max(0, held_bytes - busy)) for price, v, busy in self.lines),
            default=0.0,
        )


@dataclasses.dataclass(frozen=True)
class Worth:
    """What a search minimises: seconds and floating-point operations in one number.

    A roofline's seconds take it for granted that matrix units run at their peak, so they flatter
    the recompute of convolutions and matrix products; FLOPs alone count a pass through memory as
    nothing. A mean of both, each as a share of the forward pass, is led astray by neither.

    Attributes:
        flop_share: the weight of operations in the mean: 0 is time alone, 1 is FLOPs alone.
        flop_seconds: what one operation counts as, so that the forward pass is worth its seconds.
    """

    flop_share: float = 0.0
    flop_seconds: float = 0.0

    @classmethod
    def of_graph(cls, graph: CostGraph, flop_share: float) -> Worth:
        """Return the mean for a graph; its time alone if it has no operations that count."""
        if not graph.forward_flops:
            return cls()
        return cls(flop_share, graph.forward_seconds / graph.forward_flops)

    def of(self, seconds: float, flops: float) -> float:
        """Return the worth of some work, in seconds."""
        return (1 - self.flop_share) * seconds + self.flop_share * self.flop_seconds * flops

    def extra(self, cost: Simulated) -> float:
        """Return the worth of what a schedule computes again."""
        return self.of(cost.extra_seconds, cost.extra_flops)

    def equations(self, graph: CostGraph) -> list[float]:
        """Return the worth of each equation's forward run."""
        return [self.of(e.seconds, e.flops) for e in graph.equations]


TIME = Worth()


# -- minimum cuts ---------------------------------------------------------------------------------


class Cut(NamedTuple):
    """What to keep at a price of a byte.

    Attributes:
        keep: the tensors.
        value: a lower bound of the seconds and of the price of the bytes, together.
        bytes: that are paid for.
    """

    keep: frozenset[int]
    value: float
    bytes: float


class Cutter:
    """The choice between keeping and computing again, as a flow problem.

    Args:
        graph: of the loss, or of the body of a scan.
        worth: what work is.
        wanted: tensors that are needed; all residuals by default.
        instead: others, as ``(bytes, tensors)``: not needed where so many bytes are kept.
    """

    def __init__(
        self,
        graph: CostGraph,
        worth: Worth = TIME,
        wanted: Iterable[int] | None = None,
        instead: Sequence[tuple[int, Sequence[int]]] = (),
    ):
        self.graph = graph
        always = list(graph.residuals if wanted is None else wanted)
        self.wanted = list(dict.fromkeys([*always, *(t for _, some in instead for t in some)]))
        found = closure(graph, self.wanted, frozenset(), 0, len(graph.equations))
        self.equations = list(found.again)
        tensors = {t for i in self.equations for t in graph.equations[i].makes}
        tensors.update(self.wanted)
        used = set(self.wanted)
        for i in self.equations:
            used.update(graph.equations[i].reads)
        self.tensors = sorted(t for t in tensors if t in used)
        self.tensor_node = {t: 2 + k for k, t in enumerate(self.tensors)}
        offset = 2 + len(self.tensors)
        self.equation_node = {i: offset + k for k, i in enumerate(self.equations)}
        offset += len(self.equations)
        self.size = offset + len(instead)
        # Going through the graph once; only the prices change from one cut to the next.
        edges = [*self.priced(offset), *self.endless(offset, always, instead)]
        self.rows, self.columns = np.array(edges, dtype=int).reshape(-1, 2).T
        self.bytes = np.array([graph.tensors[t].bytes for t in self.tensors], dtype=float)
        work = worth.equations(graph)
        self.work = np.array([work[i] for i in self.equations])
        self.instead = np.array([size for size, _ in instead], dtype=float)

    def priced(self, offset: int) -> Iterator[tuple[int, int]]:
        """Yield the edges that cost something to cut: what is kept, run again and kept instead."""
        for t, node in self.tensor_node.items():
            yield node, self.equation_node[self.graph.tensors[t].producer]
        yield from ((node, 1) for node in self.equation_node.values())
        yield from ((0, node) for node in range(offset, self.size))

    def endless(
        self, offset: int, always: Iterable[int], instead: Sequence[tuple[int, Sequence[int]]]
    ) -> Iterator[tuple[int, int]]:
        """Yield the edges that cannot be cut: what is wanted, and by what."""
        yield from ((0, self.tensor_node[t]) for t in always)
        for node, (_, some) in enumerate(instead, offset):
            yield from ((node, self.tensor_node[t]) for t in some)
        for i, node in self.equation_node.items():
            reads = (t for t in self.graph.equations[i].reads if t in self.tensor_node)
            yield from ((node, self.tensor_node[t]) for t in reads)

    def cut(self, price: float, free: Iterable[int] = ()) -> Cut:
        """Return what to keep when a byte costs ``price`` seconds; ``free`` arrays cost nothing."""
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        if not len(self.wanted):
            return Cut(frozenset(), 0.0, 0.0)
        free = set(free)
        keeping = self.bytes
        if free:
            keeping = np.where([t in free for t in self.tensors], 0.0, keeping)
        sizes = np.concatenate([keeping, 0 * self.work, self.instead])
        costs = price * sizes
        costs[len(keeping) : len(keeping) + len(self.work)] = self.work
        # The flow is integral: 2^29 stands for all the costs that a cut could ever have.
        total = 1.01 * min(price * keeping.sum() or 1.0, self.work.sum() or 1.0)
        scale = 2**29 / total
        endless = 2**30
        capacities = np.full(len(self.rows), endless, dtype=np.int64)
        capacities[: len(costs)] = np.minimum(np.floor(costs * scale), endless).astype(np.int64)
        matrix = csr_matrix(
            (capacities.astype(np.int32), (self.rows, self.columns)), (self.size, self.size)
        )
        found = maximum_flow(matrix, 0, 1)
        residual = matrix - found.flow
        residual.data[residual.data < 0] = 0
        residual.eliminate_zeros()
        reached = np.zeros(self.size, dtype=bool)
        reached[breadth_first_order(residual, 0, directed=True, return_predecessors=False)] = True
        through = reached[self.rows[: len(costs)]] & ~reached[self.columns[: len(costs)]]
        # A constant, which has no bytes, would have to be written down.
        kept = np.flatnonzero(through[: len(self.tensors)] & (self.bytes > 0)).tolist()
        keep = frozenset(map(self.tensors.__getitem__, kept))
        return Cut(keep, found.flow_value / scale, float(sizes[through].sum()))


def bounds(graph: CostGraph) -> Bounds:
    """Return what no schedule of a graph can beat.

    >>> import jax, jax.numpy as jnp
    >>> from remat_kit import _cost
    >>> from remat_kit._target import target
    >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> graph = _cost.trace(lambda x: jnp.sum(jnp.tanh(jnp.tanh(x @ x) @ x)), (x,), target("cpu"))
    >>> found = bounds(graph)
    >>> found.seconds(0) > 0, found.seconds(1e9)
    (True, 0.0)
    """
    lines = [(0.0, 0.0, 0)]
    for moment in _busiest(graph):
        parts = list(_parts(graph, moment))

        def least(price: float, parts: Sequence[_Part] = parts) -> tuple[float, float]:
            values, sizes = zip(*(part.least(price) for part in parts), strict=True)
            return sum(values), sum(sizes)

        found = _tangents(least, price_range(graph, 5), 1e-3 * graph.forward_seconds)
        lines += [(price, value, moment.bytes) for price, value in found.items()]
    working = [
        _arrays_of(graph, e.needs) + _cotangents_of(graph, e)
        for e in graph.equations
        if e.needs and e.loop is None
    ]
    return Bounds(tuple(lines), max(working, default=0))


def _tangents(
    least: Callable[[float], tuple[float, float]],
    prices: Sequence[float],
    enough: float,
    most: int = 48,
) -> dict[float, float]:
    """Return, by price, the values that a bound is made of: it changes by no more than ``enough``
    seconds with any others.

    ``least`` gives the least cost at a price and the bytes that are kept for it. Over the price the
    cost is a concave curve, and the bytes are its slope: where two tangents meet it is looked at
    next, first where that could raise the bound most.
    """
    known = {price: least(price) for price in prices}

    def between(low: float, high: float) -> tuple[float, float, float, float]:
        """How much the bound could rise with a price in between, and which that is."""
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
    """The backward pass at one equation: what is there whatever the schedule.

    Attributes:
        place: the equation; the derivatives of those before it are still to come.
        bytes: cotangents, gradients and what derivatives at work read; at first what is set apart
            for gradients.
        present: the tensors among them.
    """

    place: int
    bytes: int = 0
    present: frozenset[int] = frozenset()


def _busiest(graph: CostGraph, most: int = 3) -> list[_Moment]:
    """Return some moments before which much of the program comes, and when much is there beside
    what is set apart for gradients from the start.
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
        # Derivatives fuse until a cotangent is written, and what they read is there until then.
        reading += e.held
        if e.needs or begun:
            there, present = _least_bytes(graph, reading)
            there += graph.flowing_bytes[e.index + 1] + begun + graph.standing_bytes[e.index]
            yield _Moment(e.index, there + e.made_in_memory + e.working_bytes, present)
        if begun:
            reading = []


def _least_bytes(graph: CostGraph, tensors: Iterable[int]) -> tuple[int, frozenset[int]]:
    """Return the least bytes that some tensors take, each as it is or as what it is fused from, and
    all of those.
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
        if size and found.isdisjoint(way):  # what two share is counted once
            total += size
            found |= way
    return total, frozenset(found)


class _Part:
    """What comes before a moment, or one iteration of a scan there, over all its iterations.

    Args:
        graph: of the program, or of the body.
        place: the equations before it are the part.
        present: tensors that are there anyway.
        times: how often it runs.
    """

    def __init__(
        self, graph: CostGraph, place: int, present: frozenset[int] = frozenset(), times: int = 1
    ):
        # What comes out of a scan is made where its iterations are: here it costs nothing.
        equations = tuple(
            e if e.loop is None else dataclasses.replace(e, reads=(), seconds=0.0)
            for e in graph.equations
        )
        graph = dataclasses.replace(graph, equations=equations)
        self.cutter = Cutter(graph, TIME, *_needs(graph, place))
        self.present = present
        self.times = times

    def least(self, price: float) -> tuple[float, float]:
        """Return the least seconds and, at so much a byte, bytes; and how many bytes those are."""
        found = self.cutter.cut(price, self.present)
        return self.times * found.value, self.times * found.bytes


class _Iteration(_Part):
    """One iteration of a scan: what comes in is what the one before hands on.

    The iterations are taken as a ring, in which the last hands on to the first: a cut of least cost
    is then the same in all of them. What it keeps more than the scan is one carry. Or what comes in
    counts as free.
    """

    def __init__(self, loop: Loop, times: int):
        graph = loop.graph
        super().__init__(graph, len(graph.equations), times=times * loop.length)
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
        # What products read in half precision may be handed on in it.
        halved = {out for t, out in made.items() if graph.rounded(graph.tensors[t])}
        tensors = tuple(
            dataclasses.replace(t, bytes=t.bytes // 2) if t.index in halved else t
            for t in graph.tensors
        )
        parts = dataclasses.replace(graph, equations=equations, tensors=tensors)
        self.ring = _Part(parts, len(equations), times=self.times)
        self.more = times * sum(tensors[t].bytes for t in dict.fromkeys(made.values()))

    def least(self, price: float) -> tuple[float, float]:
        value, size = self.ring.least(price)
        return max(super().least(price), (value - price * self.more, size - self.more))


def _parts(graph: CostGraph, moment: _Moment) -> Iterator[_Part]:
    """Yield what comes before a moment, and the iterations of its scans."""
    yield _Part(graph, moment.place, moment.present)
    for times, loop in _loops(graph.equations[: moment.place]):
        yield _Iteration(loop, times)


def _loops(equations: Sequence[Equation], times: int = 1) -> Iterator[tuple[int, Loop]]:
    """Yield the scans among some equations and within their bodies, each with how often it runs."""
    for e in equations:
        if e.loop is not None:
            yield times, e.loop
            yield from _loops(e.loop.graph.equations, times * e.loop.length)


_Needs: TypeAlias = "tuple[list[int], list[tuple[int, list[int]]]]"


def _needs(graph: CostGraph, place: int) -> _Needs:
    """Return what the derivatives of the equations before one read, and what they do not where they
    keep what they make of it instead, as outside of every region.
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
    """Prices of a byte from one that keeps everything to one that keeps nothing."""
    parts = [(1, graph)]
    parts += [(times * loop.length, loop.graph) for times, loop in _loops(graph.equations)]
    total = sum(times * part.tensors[t].bytes for times, part in parts for t in part.residuals)
    middle = graph.forward_seconds / max(total, 1)
    return [middle * 10 ** (-2 + 4 * k / (count - 1)) for k in range(count)]
