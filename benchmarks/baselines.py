"""Published ways to choose checkpoints, on the cost graph of a loss, under one accounting.

Each baseline turns a `CostGraph` into schedules of the same `Segment`s that the planner makes, and
`_simulate.simulate` says what any of them takes, so that they differ by their choice alone:

- ``chen``: Chen et al., "Training deep nets with sublinear memory cost", 2016, algorithm 3.
- ``ogc``: Feng and Huang, "Optimal gradient checkpoint search for arbitrary computation graphs",
  CVPR 2021: the checkpoints with the least sum of themselves and the largest part between them.
- ``binomial``: Griewank and Walther, "Revolve", ACM TOMS 2000, on the blocks as a chain.
- ``block``: one region for each block, with a policy in it.
- ``knapsack``: the activation memory budget of PyTorch's partitioner: the expensive results to keep
  chosen as independent items, the rest of the saved set by min cut. PyTorch recomputes each array
  just before it is read; one region of JAX recomputes all of them first, so the peak is that of
  JAX, and the saved bytes and the work are the ones to compare.

    python benchmarks/baselines.py --model resnet50 --json resnet50.json

Nothing is compiled. Exit status: 0 when done, 2 for a wrong call.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import _common
import numpy as np
from _common import MIB, Case

from remat_kit._chip.target import target
from remat_kit._planner import frontier as _frontier
from remat_kit._planner.costs import build as _build
from remat_kit._planner.costs import graph as _graph
from remat_kit._planner.costs import simulate as _simulate
from remat_kit._planner.costs.graph import CostGraph, Equation
from remat_kit._planner.costs.simulate import Simulated, simulate
from remat_kit._planner.schedules import mincut as _mincut
from remat_kit._planner.schedules import proposals as _proposals
from remat_kit._policy.algebra import Decision
from remat_kit._policy.patterns import path_matches
from remat_kit._policy.reading import as_policy
from remat_kit._policy.schedule import LoopPart, LoopPlan, Segment
from remat_kit._program import ops as _ops
from remat_kit._program import value as _value

Schedule = tuple[Segment[int], ...]
Range = tuple[int, int]

POLICIES = ("nothing", "dots", "dots_no_batch")
BUDGETS = tuple(i / 10 for i in range(11))
_FEW = 4
NEGLIGIBLE = 1 / 2048  # of the largest array; less counts as nothing where checkpoints are set


@dataclasses.dataclass(frozen=True)
class Point:
    """A schedule of one baseline, and what it takes.

    Attributes:
        name: of the baseline, with what tells its points apart: ``"binomial 5"``.
        schedule: segments from the first equation to the last.
        simulated: what it takes.
    """

    name: str
    schedule: Schedule = dataclasses.field(repr=False)
    simulated: Simulated

    def to_json(self, graph: CostGraph) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`; extra work in parts of the forward pass."""
        found = self.simulated
        return {
            "name": self.name,
            "predicted_peak_bytes": found.peak_bytes,
            "saved_bytes": found.saved_bytes,
            "extra_flops_fraction": found.extra_flops / (graph.forward_flops or 1.0),
            "extra_seconds_fraction": found.extra_seconds / (graph.forward_seconds or 1.0),
        }


def points(graph: CostGraph, at: str | None = None) -> list[Point]:
    """Return the schedules of every baseline, and of nothing at all (``none``), simulated.

    >>> import jax, jax.numpy as jnp
    >>> from remat_kit._planner.costs.build import trace
    >>> w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((9, 16, 16), (64, 16)))
    >>> def loss(ws, x):
    ...     for i in range(9):
    ...         with jax.named_scope(f"block_{i}"):
    ...             x = jnp.tanh(x @ ws[i])
    ...     return jnp.sum(x)
    >>> graph = trace(loss, (w, x), target("cpu"))
    >>> found = {point.name: point.simulated for point in points(graph, "block_*")}
    >>> found["chen"].peak_bytes < found["none"].peak_bytes
    True

    Args:
        graph: as `_cost.trace` gives it.
        at: the module paths of the blocks; without it there are none, and the chain is cut where
            least is alive.
    """
    return [
        Point(name, schedule, simulate(graph, schedule))
        for name, schedule in _schedules(graph, at)
        if schedule is not None
    ]


def _schedules(graph: CostGraph, at: str | None) -> Iterator[tuple[str, Schedule | None]]:
    yield "none", plain(graph)
    if any(_is_long(e) for e in graph.equations):
        yield from _in_scans(graph, at)
        return
    yield "chen", chen(graph)
    for scale in (0.25, 0.5, 2.0, 4.0):
        yield f"chen {scale:g}", chen(graph, scale)
    yield "ogc", ogc(graph)
    steps = block_steps(graph, at) or chain_steps(graph)
    for slots in _slots(len(steps)):
        yield f"binomial {slots}", binomial(graph, steps, slots)
    if at is not None:
        for policy in POLICIES:
            yield f"block {policy}", preset(graph, at, policy)
    for budget in BUDGETS:
        yield f"knapsack {budget}", knapsack(graph, budget)


def plain(graph: CostGraph) -> Schedule:
    """Return the schedule of the program as it is."""
    return (Segment(0, len(graph.equations), plain=True),)


def segmented(graph: CostGraph, cuts: Iterable[int]) -> Schedule:
    """Return one region between each two cuts that keeps nothing inside."""
    stops = sorted({c for c in cuts if 0 < c < len(graph.equations)})
    edges = itertools.pairwise([0, *stops, len(graph.equations)])
    return _tail_alone(graph, tuple(Segment(a, b) for a, b in edges))


def _tail_alone(graph: CostGraph, regions: Schedule) -> Schedule:
    """Make the last segment no region, where that takes no more memory: its turn comes at once."""
    tail = (*regions[:-1], dataclasses.replace(regions[-1], plain=True))
    alone = simulate(graph, tail).peak_bytes <= simulate(graph, regions).peak_bytes
    return tail if alone else regions


# -- Chen et al. ------------------------------------------------------------------------------


def chen(graph: CostGraph, scale: float = 1.0, tries: int = 8) -> Schedule:
    """Cut where what was computed since the last cut outgrows a budget; search for the budget.

    With the budget 0 the plan keeps x bytes between segments and needs y within one; the budgets
    tried are from sqrt(x y / 2) to sqrt(2 x y), and the plan with the lowest peak is the answer. On
    n equal layers that is about sqrt(n) segments.

    Args:
        graph: of the loss.
        scale: times the budgets of the paper; larger ones make fewer segments.
        tries: how many budgets are tried.
    """
    plans = set()
    for cuts in (_single_cuts(graph), _low_cuts(graph)):
        _, kept, largest = _chen_plan(graph, cuts, 0.0)
        middle = scale * math.sqrt(max(kept * largest, 1.0))
        budgets = np.geomspace(middle / math.sqrt(2), middle * math.sqrt(2), tries)
        plans |= {_chen_plan(graph, cuts, float(budget))[0] for budget in budgets}
    found = [segmented(graph, plan) for plan in sorted(plans)]
    return min(found, key=lambda schedule: simulate(graph, schedule).peak_bytes)


def _chen_plan(
    graph: CostGraph, cuts: Sequence[int], budget: float
) -> tuple[tuple[int, ...], float, float]:
    """Return the cuts, what crosses them and the most that is computed between two of them."""
    made = _made_bytes(graph)
    chosen: list[int] = []
    since = kept = largest = 0.0
    begin = 0
    for cut in cuts:
        since += made[cut] - made[begin]
        begin = cut
        if since > budget:
            chosen.append(cut)
            kept += graph.live_bytes[cut]
            largest = max(largest, since)
            since = 0.0
    return tuple(chosen), kept, max(largest, since + made[-1] - made[begin])


def _made_bytes(graph: CostGraph) -> list[int]:
    """For each position, the bytes of all arrays that are written down before it."""
    sizes = [sum(_bytes(graph, t) for t in e.makes) for e in graph.equations]
    return [0, *itertools.accumulate(sizes)]


def _bytes(graph: CostGraph, t: int) -> int:
    tensor = graph.tensors[t]
    return tensor.bytes if tensor.in_memory else 0


def _negligible(graph: CostGraph) -> float:
    """Bytes of the smallest array that counts: not a random key or the mean of a normalization."""
    return max(1.0, NEGLIGIBLE * max((t.bytes for t in graph.tensors), default=0))


def _single_cuts(graph: CostGraph) -> list[int]:
    """Positions that one array crosses, those that take next to nothing left aside."""
    least = _negligible(graph)
    steps = [0] * (len(graph.equations) + 1)
    for tensor in graph.tensors:
        if tensor.producer >= 0 and tensor.bytes >= least and tensor.users:
            steps[tensor.producer + 1] += 1
            steps[tensor.users[-1] + 1] -= 1
    crossing = list(itertools.accumulate(steps))
    return [p for p in range(1, len(graph.equations)) if crossing[p] == 1]


def _low_cuts(graph: CostGraph) -> list[int]:
    """Positions where no less is alive one operation earlier or later."""
    live = graph.live_bytes
    inner = range(1, len(graph.equations))
    return [p for p in inner if live[p] <= live[p - 1] or p == 1 if live[p] <= live[p + 1]]


# -- Feng and Huang ---------------------------------------------------------------------------


def ogc(graph: CostGraph) -> Schedule:
    """Set the checkpoints with the least sum of their bytes and those of the largest part between.

    Args:
        graph: of the loss.
    """
    dag, equations = dag_of(graph)
    found = optimal_checkpoints(dag)
    cuts = {equations[v] + 1 for v in found.checkpoints}
    for one, other in itertools.pairwise(found.parts):
        low, high = equations[one[-1]] + 1, equations[other[0]]
        # Branches side by side are computed again one at a time.
        if low <= high and not any(low <= cut <= high for cut in cuts):
            cuts.add(min(range(low, high + 1), key=lambda p: graph.live_bytes[p]))
    return segmented(graph, cuts)


@dataclasses.dataclass(frozen=True)
class Dag:
    """Activations and what they are computed from.

    Attributes:
        costs: bytes of each vertex as a checkpoint, in a topological order; the first is the only
            source, the last the only sink, and both are there anyway.
        before: for each vertex, those that it is computed from.
        rebuilt: bytes of each vertex in a part that is computed again; 0 where it is fused away.
    """

    costs: tuple[int, ...]
    before: tuple[frozenset[int], ...]
    rebuilt: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """What the search found.

    Attributes:
        cost: bytes of the checkpoints and of the largest part between them.
        checkpoints: vertices that are kept.
        parts: the closed sets in between, each computed again as a whole.
    """

    cost: int
    checkpoints: frozenset[int]
    parts: tuple[tuple[int, ...], ...]


def optimal_checkpoints(dag: Dag, tries: int = 200) -> Checkpoints:
    """Return the checkpoints of the least cost, over every size of the largest part.

    The graph is split into closed sets: vertices that meet the rest of the graph in one vertex
    before them and one behind them. For a given size of the largest part, a set that is no larger
    has no checkpoints; a series of sets is cut by a shortest path; sets side by side are cut each
    on its own; and a set that is neither is divided into the largest closed sets inside it, the
    vertices between those being checkpoints.

    >>> bytes = (0, *[1] * 8, 0)
    >>> chain = Dag(bytes, tuple(frozenset({v - 1} - {-1}) for v in range(10)), bytes)
    >>> found = optimal_checkpoints(chain)
    >>> found.cost, sorted(found.checkpoints)
    (4, [3, 6])

    Args:
        dag: the activations.
        tries: sizes that are tried where there are more; up to then the answer is the optimum.
    """
    root = _closed(dag, 0, len(dag.costs) - 1, tuple(range(1, len(dag.costs) - 1)))
    sizes = sorted(_sizes(root))
    best: tuple[int, int] | None = None
    tried: set[int] = set()
    while True:
        fresh = [sizes[i] for i in _spread(sizes, best, tried, tries)]
        if not fresh:
            break
        for size in fresh:
            tried.add(size)
            cost = _least(root, size).bytes + size
            if best is None or cost < best[0]:
                best = cost, size
    assert best is not None
    found = _least(root, best[1])
    parts = tuple(sorted(p for p in found.parts if p))
    largest = max((sum(dag.rebuilt[v] for v in p) for p in parts), default=0)
    return Checkpoints(found.bytes + largest, frozenset(found.checkpoints), parts)


def _spread(
    sizes: Sequence[int], best: tuple[int, int] | None, tried: set[int], tries: int
) -> list[int]:
    """Indices to try next: evenly spread over all, then ever closer around the best."""
    if best is None:
        return sorted(set(np.linspace(0, len(sizes) - 1, min(tries, len(sizes))).astype(int)))
    known = [i for i, size in enumerate(sizes) if size in tried]
    at = known.index(bisect.bisect_left(sizes, best[1]))
    low = known[max(at - 1, 0)]
    high = known[min(at + 1, len(known) - 1)]
    inner = [i for i in range(low, high + 1) if sizes[i] not in tried]
    return inner[:: max(1, len(inner) // max(tries // 4, 1))]


@dataclasses.dataclass(eq=False)
class _Closed:
    """A closed set and what it is made of.

    Attributes:
        inner: its vertices, in order.
        bytes: of all of them when they are computed again.
        splits: the vertices that every path through it passes.
        series: between each two of them, and at both ends, a closed set.
        branches: closed sets side by side, where nothing splits it.
        members: the largest closed sets inside, where it is neither.
    """

    dag: Dag
    inner: tuple[int, ...]
    bytes: int
    splits: tuple[int, ...] = ()
    series: tuple[_Closed, ...] = ()
    branches: tuple[_Closed, ...] = ()
    members: tuple[_Closed, ...] = ()

    def children(self) -> tuple[_Closed, ...]:
        return self.series + self.branches + self.members


def _closed(dag: Dag, first: int, last: int, inner: tuple[int, ...]) -> _Closed:
    found = _Closed(dag, inner, sum(dag.rebuilt[v] for v in inner))
    if not inner:
        return found
    splits = _splits(dag, first, last, inner)
    if splits:
        ends = [first, *splits, last]
        found.splits = tuple(splits)
        found.series = tuple(
            _closed(dag, a, b, inner[bisect.bisect(inner, a) : bisect.bisect_left(inner, b)])
            for a, b in itertools.pairwise(ends)
        )
        return found
    parts = _components(dag.before, inner)
    if len(parts) > 1:
        found.branches = tuple(_closed(dag, first, last, part) for part in parts)
    else:
        found.members = _members(dag, first, last, inner)
    return found


def _splits(dag: Dag, first: int, last: int, inner: tuple[int, ...]) -> list[int]:
    """The inner vertices that no edge of the set passes by, that from end to end left aside."""
    order = {v: i for i, v in enumerate((first, *inner, last))}
    passed = [0] * (len(order) + 1)
    for v in (*inner, last):
        for u in dag.before[v]:
            if u in order and (u, v) != (first, last):
                passed[order[u] + 1] += 1
                passed[order[v]] -= 1
    return [v for v, n in zip((first, *inner, last), itertools.accumulate(passed)) if n == 0][1:-1]


def _components(before: Any, vertices: Sequence[int]) -> list[tuple[int, ...]]:
    """The parts of a set of vertices that no edge connects, in order."""
    root = {v: v for v in vertices}

    def find(v: int) -> int:
        while root[v] != v:
            root[v] = root[root[v]]
            v = root[v]
        return v

    for v in vertices:
        for u in before[v]:
            if u in root:
                root[find(v)] = find(u)
    groups: dict[int, list[int]] = {}
    for v in vertices:
        groups.setdefault(find(v), []).append(v)
    return sorted(map(tuple, groups.values()))


def _members(dag: Dag, first: int, last: int, inner: tuple[int, ...]) -> tuple[_Closed, ...]:
    """The largest closed sets strictly inside a set, disjoint, the ends of each outside of all."""
    edges = _reduced(dag, first, last, inner)
    found = [(a, b, tuple(sorted(part))) for (a, b), part in edges.items() if part]
    if len({v for edge in edges for v in edge}) <= _RIGID:
        found += _closed_pairs(edges, first, last)
    size = {part: sum(dag.rebuilt[v] for v in part) for _, _, part in found}
    chosen: list[_Closed] = []
    taken: set[int] = set()
    ends: set[int] = set()
    for a, b, part in sorted(found, key=lambda f: (-size[f[2]], -len(f[2]), f[0])):
        if taken.isdisjoint({*part, a, b}) and ends.isdisjoint(part):
            taken.update(part)
            ends |= {a, b}
            chosen.append(_closed(dag, a, b, part))
    return tuple(sorted(chosen, key=lambda c: c.inner))


_RIGID = 200  # vertices up to which closed sets that are no series and no branches are looked for


def _reduced(
    dag: Dag, first: int, last: int, inner: tuple[int, ...]
) -> dict[tuple[int, int], list[int]]:
    """Draw series and branches together into edges; each edge has the vertices that it stands for.

    Every vertex with one way in and one way out becomes part of an edge, and edges between the same
    two vertices become one (Valdes, Tarjan and Lawler, 1982).
    """
    own = {first, *inner, last}
    edges = {(u, v): list[int]() for v in (*inner, last) for u in dag.before[v] & own}
    ways_in: dict[int, set[int]] = {v: set() for v in own}
    ways_out: dict[int, set[int]] = {v: set() for v in own}
    for u, v in edges:
        ways_in[v].add(u)
        ways_out[u].add(v)
    todo = list(inner)
    while todo:
        v = todo.pop()
        if v in (first, last) or not (len(ways_in[v]) == len(ways_out[v]) == 1):
            continue
        (u,), (w,) = ways_in[v], ways_out[v]
        ways_in[v], ways_out[v] = set(), set()
        part = [*edges.pop((u, v)), v, *edges.pop((v, w))]
        edges[u, w] = edges.get((u, w), []) + part
        ways_out[u] = ways_out[u] - {v} | {w}
        ways_in[w] = ways_in[w] - {v} | {u}
        todo += [u, w]
    return edges


def _closed_pairs(
    edges: dict[tuple[int, int], list[int]], first: int, last: int
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield the closed sets between two vertices of a graph whose edges stand for vertices."""
    order = sorted({v for edge in edges for v in edge} - {first, last})
    order = [first, *order, last]
    place = {v: i for i, v in enumerate(order)}
    before: dict[int, frozenset[int]] = {v: frozenset() for v in order}
    after: dict[int, set[int]] = {v: set() for v in order}
    for u, v in edges:
        before[v] |= {u}
        after[u].add(v)
    ahead, behind = [0] * len(order), [0] * len(order)  # as bits: what leads there, what follows
    for i, v in enumerate(order):
        for u in before[v]:
            ahead[i] |= ahead[place[u]] | 1 << place[u]
        for j in _bits(ahead[i]):
            behind[j] |= 1 << i
    for i, j in itertools.combinations(range(len(order)), 2):
        between = behind[i] & ahead[j]
        if not between or (i, j) == (0, len(order) - 1):
            continue
        for part in _components(before, [order[k] for k in _bits(between)]):
            own = {*part, order[i], order[j]}
            if all(before[v] <= own and after[v] <= own for v in part):
                inside = [x for (u, v), xs in edges.items() if {u, v} & {*part} for x in xs]
                yield order[i], order[j], tuple(sorted([*part, *inside]))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _sizes(closed: _Closed) -> set[int]:
    """The bytes of every closed set that may be computed again as a whole."""
    found = {closed.bytes, 0}
    for child in closed.children():
        found |= _sizes(child)
    if closed.series:
        ends = _prefix(closed)
        found |= {b - a for (_, a), (b, _) in itertools.combinations(ends, 2)}
    return found


def _prefix(closed: _Closed) -> list[tuple[int, int]]:
    """For each end and split of a series, the bytes before it and those up to it."""
    out, total = [(0, 0)], 0
    for part, split in zip(closed.series, (*closed.splits, None)):
        before = total + part.bytes
        total = before + (0 if split is None else closed.dag.rebuilt[split])
        out.append((before, total))
    return out


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Checkpoints inside a closed set, and the parts that they leave."""

    bytes: int
    checkpoints: tuple[int, ...] = ()
    parts: tuple[tuple[int, ...], ...] = ()


def _least(closed: _Closed, size: int) -> _Cut:
    """The fewest bytes of checkpoints that leave no part larger than ``size``."""
    if closed.bytes <= size:
        return _Cut(0, (), (closed.inner,))
    if closed.series:
        return _least_series(closed, size)
    inside = [_least(child, size) for child in closed.children()]
    free = {v for child in closed.children() for v in child.inner}
    between = tuple(v for v in closed.inner if v not in free)
    return _Cut(
        sum(closed.dag.costs[v] for v in between) + sum(cut.bytes for cut in inside),
        (*between, *(v for cut in inside for v in cut.checkpoints)),
        tuple(part for cut in inside for part in cut.parts),
    )


def _least_series(closed: _Closed, size: int) -> _Cut:
    """A shortest path over the splits: one step skips those that are not checkpoints."""
    ends = _prefix(closed)
    last = len(ends) - 1
    costs = [closed.dag.costs[v] for v in closed.splits] + [0]
    best = [math.inf] * last + [0]
    choice: list[tuple[int, _Cut | None]] = [(0, None)] * len(ends)
    for i in range(last - 1, -1, -1):
        for j in range(i + 1, last + 1):
            fits = ends[j][0] - ends[i][1] <= size
            if not fits and j > i + 1:
                break
            cut = None if fits else _least(closed.series[i], size)
            total = best[j] + costs[j - 1] + (cut.bytes if cut else 0)
            if total < best[i]:
                best[i], choice[i] = total, (j, cut)
    checkpoints: list[int] = []
    parts: list[tuple[int, ...]] = []
    i = 0
    while i < last:
        j, cut = choice[i]
        if cut is None:
            low = closed.splits[i - 1] if i else -1
            high = closed.splits[j - 1] if j <= len(closed.splits) else math.inf
            parts.append(tuple(v for v in closed.inner if low < v < high))
        else:
            checkpoints += cut.checkpoints
            parts += cut.parts
        if j < last:
            checkpoints.append(closed.splits[j - 1])
        i = j
    return _Cut(int(best[0]), tuple(checkpoints), tuple(parts))


def dag_of(graph: CostGraph) -> tuple[Dag, list[int]]:
    """Return the activations of a loss as a graph, and the equation that makes each vertex.

    What takes next to nothing and what the loss does not depend on is left out; a vertex behind it
    is then computed from what came before it. A concatenation that repeats another and appends to
    it is computed from that one, as in the authors' DenseNet.
    """
    least = _negligible(graph)
    wanted = set(graph.outputs[:1])
    relevant: set[int] = set()
    for e in reversed(graph.equations):
        if e.index == len(graph.equations) - 1 or not wanted.isdisjoint(e.makes):
            relevant.add(e.index)
            wanted.update(e.reads)
    vertex: dict[int, int] = {}  # equation -> vertex
    sources: dict[int, frozenset[int]] = {}  # equation -> the vertices that it stands for
    joined: dict[tuple[int, ...], int] = {}  # operands of a concatenation -> its equation
    costs, before, rebuilt, equations = [0], [frozenset[int]()], [0], [-1]
    needed = {t for e in graph.equations for t in e.needs}
    for e in graph.equations:
        read = [graph.tensors[t] for t in e.reads]
        makers = [t.producer for t in read if t.producer >= 0 and t.bytes]
        if e.primitive == "concatenate":
            makers = _appended(graph, e, joined) or makers
            joined[e.reads] = e.index
        sources[e.index] = frozenset().union(*(sources[m] for m in makers))
        size = sum(graph.tensors[t].bytes for t in e.makes)
        if e.index in relevant and size >= least:
            vertex[e.index] = len(costs)
            costs.append(size)
            rebuilt.append(sum(_bytes(graph, t) for t in e.makes if t in needed))
            before.append(sources[e.index] or frozenset({0}))
            equations.append(e.index)
            sources[e.index] = frozenset({vertex[e.index]})
    inner = range(1, len(costs))
    ends = frozenset(inner) - frozenset().union(*before)
    return (
        Dag((*costs, 0), (*before, ends or frozenset({0})), (*rebuilt, 0)),
        [*equations, len(graph.equations) - 1],
    )


def _appended(
    graph: CostGraph, e: Equation, joined: Mapping[tuple[int, ...], int]
) -> list[int] | None:
    """What makes the longest concatenation that one begins with, and what is appended to it."""
    for length in range(len(e.reads) - 1, 1, -1):
        if (known := joined.get(e.reads[:length])) is not None:
            makers = (graph.tensors[t].producer for t in e.reads[length:])
            return [known, *(m for m in makers if m >= 0)]
    return None


# -- Griewank and Walther ---------------------------------------------------------------------


def binomial(graph: CostGraph, steps: Sequence[Range], slots: int) -> Schedule | None:
    """Reverse a chain of steps with a number of checkpoints and the fewest steps run again.

    Args:
        graph: of the loss.
        steps: ranges of equations that follow one another and cover the program.
        slots: checkpoints that may be held at a time, the input of the chain among them.

    Returns:
        The schedule, or None where that many checkpoints cannot reverse the chain.
    """
    if len(steps) < 2 or math.isinf(steps_run_again(len(steps), slots)):
        return None
    return _tail_alone(graph, _reversal(tuple(steps), slots))


def _reversal(steps: tuple[Range, ...], slots: int) -> Schedule:
    start, stop = steps[0][0], steps[-1][1]
    if len(steps) == 1:
        return (Segment(start, stop),)
    k = _split(len(steps), slots)
    head = Segment(*steps[0])
    if k > 1:
        inside = _reversal(steps[:k], slots)
        head = Segment(start, steps[k - 1][1], inside=inside)
    return (head, *_reversal(steps[k:], slots - 1))


@functools.cache
def steps_run_again(length: int, slots: int) -> float:
    """Return the fewest steps that are run again to reverse a chain.

    >>> [steps_run_again(10, slots) for slots in (1, 2, 3, 10)]
    [45, 20, 15, 9]
    """
    if length == 1:
        return 0
    if slots == 0:
        return math.inf
    return min(
        k + steps_run_again(length - k, slots - 1) + steps_run_again(k, slots)
        for k in range(1, length)
    )


@functools.cache
def _split(length: int, slots: int) -> int:
    """How many steps to run before the next checkpoint."""
    return min(
        range(1, length),
        key=lambda k: k + steps_run_again(length - k, slots - 1) + steps_run_again(k, slots),
    )


def _slots(length: int) -> list[int]:
    """Numbers of checkpoints worth a try."""
    return sorted({n for n in (2, 3, 4, 5, 6, 8, 12, 16, 24) if 1 < n < length} | {length})


# -- blocks -----------------------------------------------------------------------------------


def block_ranges(graph: CostGraph, at: str) -> list[Range]:
    """Return the ranges of equations of the blocks whose module path matches a pattern.

    A block whose equations have those of another among them is left out.
    """
    ends: dict[str, list[int]] = {}
    for e in graph.equations:
        if (path := _block_of(e, at)) is not None:
            ends.setdefault(path, [e.index, e.index])[1] = e.index
    found = sorted((first, last + 1) for first, last in ends.values())
    kept: list[Range] = []
    for first, stop in found:
        if not kept or first >= kept[-1][1]:
            kept.append((first, stop))
    return kept


def _block_of(e: Equation, at: str) -> str | None:
    parts = e.module.split("/")
    paths = ("/".join(parts[:n]) for n in range(1, len(parts) + 1))
    return next((path for path in paths if path_matches(at, path)), None)


def block_steps(graph: CostGraph, at: str | None) -> list[Range]:
    """Return the program as a chain of blocks, what lies around them with the outermost."""
    found = block_ranges(graph, at) if at is not None else []
    starts = [0, *(first for first, _ in found[1:]), len(graph.equations)]
    return list(itertools.pairwise(starts)) if len(found) > 1 else []


def chain_steps(graph: CostGraph, most: int = 64) -> list[Range]:
    """Return the program as a chain of steps of about equal work, cut where least is alive."""
    work = [0.0, *itertools.accumulate(e.seconds for e in graph.equations)]
    cuts = _single_cuts(graph)
    if len(cuts) < _FEW:
        lowest = min((graph.live_bytes[p] for p in _low_cuts(graph)), default=0)
        cuts = [p for p in _low_cuts(graph) if graph.live_bytes[p] <= 2 * lowest]
    chosen: list[int] = []
    for share in range(1, min(most, len(cuts) + 1)):
        wanted = work[-1] * share / min(most, len(cuts) + 1)
        chosen.append(min(cuts, key=lambda p: abs(work[p] - wanted)))
    return list(itertools.pairwise([0, *sorted(set(chosen)), len(graph.equations)]))


def preset(graph: CostGraph, at: str, policy: Any) -> Schedule | None:
    """Return one region for each block that keeps what a policy says; None without blocks.

    Args:
        graph: of the loss.
        at: the module paths of the blocks.
        policy: as `remat_kit.policy` takes it.
    """
    found: list[Segment[int]] = []
    done = 0
    for first, stop in block_ranges(graph, at):
        if first > done:
            found.append(Segment(done, first, plain=True))
        found.append(Segment(first, stop, save=_chosen(graph, first, stop, policy)))
        done = stop
    if done == 0:
        return None
    if done < len(graph.equations):
        found.append(Segment(done, len(graph.equations), plain=True))
    return tuple(found)


def _chosen(graph: CostGraph, first: int, stop: int, policy: Any) -> frozenset[int]:
    """The arrays of a range that a policy keeps and the backward pass has a use for."""
    chosen = as_policy(policy)
    assert chosen is not None
    program = graph.program
    names = _value.aliases(program.eqns)
    kept = set()
    for e in graph.equations[first:stop]:
        eqn = program.eqns[e.index]
        for position, t in enumerate(e.makes):
            named = names.get(eqn.outvars[position], ())
            value = _value.value_of(eqn, position, program.path(eqn), named, full=False)
            if chosen.decide(value) is Decision.SAVE:
                kept.add(t)
    return useful(graph, first, stop, kept)


def useful(graph: CostGraph, first: int, stop: int, kept: Iterable[int]) -> frozenset[int]:
    """Return those of ``kept`` that a region meets when it rebuilds what it needs."""
    kept = set(kept)
    todo = [t for e in graph.equations[first:stop] for t in e.needs]
    seen: set[int] = set()
    while todo:
        t = todo.pop()
        producer = graph.tensors[t].producer
        if t in seen or not first <= producer < stop:
            continue
        seen.add(t)
        if t not in kept:
            todo.extend(graph.equations[producer].reads)
    return frozenset(seen & kept)


# -- PyTorch's budget -------------------------------------------------------------------------


def knapsack(graph: CostGraph, budget: float) -> Schedule:
    """Return one region around everything that keeps what a share of the memory has room for.

    The results of products, convolutions and other expensive operations are the items of a
    knapsack, each with its bytes and its own time, as if no item changed what another costs. A
    minimum cut then chooses what is cheapest to keep, so that no chosen operation runs again.

    Args:
        graph: of the loss.
        budget: from 0, nothing kept, to 1, what the cut keeps when no expensive operation runs
            again.
    """
    everything = Segment(0, len(graph.equations))
    if budget <= 0:
        return (everything,)
    needed = set(closure_of(graph))
    heavy = [e for e in graph.equations if e.index in needed and _is_expensive(graph, e)]
    full = cheapest_cut(graph, {e.index for e in heavy})
    room = budget * sum(graph.tensors[t].bytes for t in full)
    if budget >= 1:
        chosen = {e.index for e in heavy}
    else:
        sizes = [sum(graph.tensors[t].bytes for t in e.makes) for e in heavy]
        kept = _fill(sizes, [e.seconds for e in heavy], room)
        chosen = {heavy[i].index for i in kept}
    return (dataclasses.replace(everything, save=cheapest_cut(graph, chosen)),)


def closure_of(graph: CostGraph) -> tuple[int, ...]:
    """Return the equations that a region around everything runs again."""
    wanted = {t for e in graph.equations for t in e.needs}
    return _simulate.closure(graph, wanted, frozenset(), 0, len(graph.equations)).again


def _is_expensive(graph: CostGraph, e: Equation) -> bool:
    return any(graph.tensors[t].bytes for t in e.makes) and not _ops.is_fusible(
        graph.program.eqns[e.index]
    )


def _fill(sizes: Sequence[int], values: Sequence[float], room: float, cells: int = 4096):
    """Solve a knapsack whose sizes are rounded up to cells of the room; return the items."""
    unit = max(room / cells, 1.0)
    width = [math.ceil(size / unit) for size in sizes]
    best = np.zeros(int(room / unit) + 1)
    took = np.zeros((len(sizes), len(best)), bool)
    for i, (w, value) in enumerate(zip(width, values, strict=True)):
        if 0 < w < len(best):
            with_it = np.concatenate([np.full(w, -np.inf), best[:-w] + value])
            took[i] = with_it > best
            best = np.maximum(best, with_it)
        elif w == 0:
            took[i], best = True, best + value
    at, chosen = len(best) - 1, []
    for i in range(len(sizes) - 1, -1, -1):
        if took[i, at]:
            chosen.append(i)
            at -= width[i]
    return chosen


def cheapest_cut(graph: CostGraph, once: Iterable[int]) -> frozenset[int]:
    """Return the arrays of the fewest bytes that spare each equation of ``once`` a second run.

    A minimum cut between what those equations make and what the backward pass needs; running any
    other equation again is free.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    needed = closure_of(graph)
    made = [t for i in needed for t in graph.equations[i].makes]
    place = {t: i for i, t in enumerate(made)}
    source, sink = 2 * len(made), 2 * len(made) + 1
    total = sum(graph.tensors[t].bytes for t in made)
    # The flow of scipy counts in 32 bits.
    unit = max(1, math.ceil(total / 2**29))
    endless = 2**30
    edges: dict[tuple[int, int], int] = {}
    for t, i in place.items():
        edges[2 * i, 2 * i + 1] = math.ceil(graph.tensors[t].bytes / unit)
    for index in needed:
        e = graph.equations[index]
        for t in e.makes:
            for r in e.reads:
                if r in place:
                    edges[2 * place[r] + 1, 2 * place[t]] = endless
    for index in set(once) & set(needed):
        for t in graph.equations[index].makes:
            edges[source, 2 * place[t]] = endless
    for t in {t for e in graph.equations for t in e.needs} & place.keys():
        edges[2 * place[t] + 1, sink] = endless
    rows, columns = zip(*edges, strict=True) if edges else ((), ())
    shape = (sink + 1, sink + 1)
    network = csr_array((np.fromiter(edges.values(), np.int32), (rows, columns)), shape)
    left = network - maximum_flow(network, source, sink).flow
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    reached = set(breadth_first_order(left, source, return_predecessors=False).tolist())
    cut = {t for t, i in place.items() if 2 * i in reached and 2 * i + 1 not in reached}
    return useful(graph, 0, len(graph.equations), cut)


# -- scans ------------------------------------------------------------------------------------


def _is_long(e: Equation) -> bool:
    return e.loop is not None and e.loop.length > 1 and e.loop.stacked_bytes > 0


def _in_scans(graph: CostGraph, at: str | None) -> Iterator[tuple[str, Schedule | None]]:
    """The baselines where they choose the iterations of scans; the rest of the program is plain."""
    for name, plan in (
        ("chen", lambda e: _group_plan(e, _sqrt_group(e))),
        ("ogc", lambda e: _group_plan(e, _ogc_group(e))),
    ):
        yield name, _with_plans(graph, plan)
    if at is not None:
        for policy in POLICIES:
            yield f"block {policy}", _with_plans(graph, functools.partial(_body_plan, policy, at))
    for budget in BUDGETS:
        yield f"knapsack {budget}", _with_plans(graph, functools.partial(_budget_plan, budget))


def _with_plans(
    graph: CostGraph, plan: Callable[[Equation], LoopPlan[int] | None]
) -> Schedule | None:
    plans = [(e.index, plan(e)) for e in graph.equations if _is_long(e)]
    loops = tuple((i, p) for i, p in plans if p is not None)
    return (Segment(0, len(graph.equations), plain=True, loops=loops),) if loops else None


def _group_plan(e: Equation, group: int) -> LoopPlan[int]:
    assert e.loop is not None
    body = Segment(0, len(e.loop.graph.equations), plain=True)
    if group == 1:
        body = dataclasses.replace(body, plain=False)
    return (LoopPart(e.loop.length, group, (body,)),)


def _sqrt_group(e: Equation) -> int:
    """Groups that hold as much as is kept between them, at the least peak of their neighbours."""
    assert e.loop is not None
    inner = e.loop.stacked_bytes / e.loop.length
    around = math.sqrt(e.loop.length * e.loop.carry_bytes / max(inner, 1.0))
    near = {max(1, math.floor(around)), max(1, math.ceil(around))}
    return min(near, key=lambda g: _simulate.loop_cost(_loop(e), _group_plan(e, g)).peak_bytes)


def _ogc_group(e: Equation) -> int:
    """The group with the least sum of the checkpoints and what one group makes."""
    loop = _loop(e)
    inner = loop.stacked_bytes / loop.length
    return min(
        range(1, loop.length + 1),
        key=lambda g: math.ceil(loop.length / g) * loop.carry_bytes + g * inner,
    )


def _loop(e: Equation) -> _graph.Loop:
    assert e.loop is not None
    return e.loop


def _body_plan(policy: str, at: str, e: Equation) -> LoopPlan[int] | None:
    loop = _loop(e)
    if not any(_block_of(inner, at) for inner in loop.graph.equations):
        return None
    stop = len(loop.graph.equations)
    body = Segment(0, stop, save=_chosen(loop.graph, 0, stop, policy))
    return (LoopPart(loop.length, 1, (body,)),)


def _budget_plan(budget: float, e: Equation) -> LoopPlan[int]:
    loop = _loop(e)
    return (LoopPart(loop.length, 1, knapsack(loop.graph, budget)),)


# -- the table --------------------------------------------------------------------------------

CASES = {
    "mlp32": Case("residual MLP, 32 blocks, 1024 × 1024", "residual_mlp", {}),
    "gpt12": Case("GPT, 12 layers, 8 × 1024 tokens", "gpt", {"size": "small", "batch": 8}),
    "gpt12scan": Case("GPT, the same as a scan", "gpt", {"size": "small", "scan": True}),
    "resnet50": Case("ResNet-50, 64 images", "resnet", {"depth": 50, "batch": 64}),
    "resnet152": Case("ResNet-152, 16 images", "resnet", {"depth": 152, "batch": 16}),
    "densenet121": Case("DenseNet-121, 32 images", "densenet", {"depth": 121, "batch": 32}),
    "densenet201": Case("DenseNet-201, 16 images", "densenet", {"depth": 201, "batch": 16}),
    "nasnet": Case("NASNet-A, 64 images", "cells", {"arch": "nasnet", "batch": 64}),
    "gpt72scan": Case("GPT, 72 layers, a scan", "gpt", {"layers": 72, "batch": 8, "scan": True}),
}
SMOKE = {
    "mlp": Case("residual MLP, 4 blocks", "residual_mlp", {"batch": 8, "width": 8, "layers": 4}),
    "gpt": Case("GPT, 2 layers as a scan", "gpt", {"size": "tiny", "batch": 2, "scan": True}),
}


def rows(cases: Sequence[Case], chip: str) -> Iterator[dict[str, Any]]:
    """Trace each model and simulate every baseline on it."""
    with _common.progress() as bar:
        job = bar.add_task("", total=len(cases))
        for case in cases:
            bar.update(job, description=case.name)
            fn, args = case.loss("none")
            graph = _build.trace(fn, args, target(chip))
            found = points(graph, _common.load(case.module).BLOCKS)
            yield {
                "model": case.name,
                "size": dict(case.size),
                "equations": len(graph.equations),
                "forward_flops": graph.forward_flops,
                "points": _common.packed(beside_plans(graph, found, chip)),
            }
            bar.advance(job)


# A plan may need this much more memory than a baseline to count as one with no higher peak.
NO_HIGHER = 1.001


def beside_plans(graph: CostGraph, found: Sequence[Point], chip: str) -> list[dict[str, Any]]:
    """Return points as plain values, each with its work and the least of a plan with its peak.

    Work is the mean of time and operations, in parts of the forward pass, weighted as plans do by
    default; None where no plan has so low a peak.
    """
    worth = _mincut.Worth.of_graph(graph, _frontier.OBJECTIVES["balanced"])
    plans = _proposals.candidates(graph, worth=worth)
    rows = []
    for point in found:
        peak = NO_HIGHER * point.simulated.peak_bytes
        ours = [worth.extra(c.cost) for c in plans if c.cost.peak_bytes <= peak]
        work = worth.extra(point.simulated) / (graph.forward_seconds or 1.0)
        least = min(ours) / (graph.forward_seconds or 1.0) if ours else None
        rows.append(point.to_json(graph) | {"work_fraction": work, "plan_work_fraction": least})
    return rows


def rendered(report: dict[str, Any]) -> str:
    """Return a report as Markdown."""
    lines = []
    for row in report["rows"]:
        lines += [
            f"**{row['model']}**",
            "",
            "| baseline | peak MiB | kept MiB | extra FLOPs | time | work | a plan's work |",
        ]
        lines.append("|---|---:|---:|---:|---:|---:|---:|")
        for point in _common.unpacked(row["points"]):
            peak, kept = point["predicted_peak_bytes"] / MIB, point["saved_bytes"] / MIB
            names = ("extra_flops_fraction", "extra_seconds_fraction", "work_fraction")
            work = [point[name] for name in (*names, "plan_work_fraction")]
            cells = [f"`{point['name']}`", f"{peak:,.1f}", f"{kept:,.1f}", *map(_percent, work)]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    about = (
        "Peak and kept bytes of intermediate arrays, simulated, not compiled; extra work in "
        "percent of the forward pass, in operations and in time by the roofline of "
        f"{report['chip']}, and as plans weight them: three parts operations, one part time "
        "(work). A plan's work is the least of our "
        f"plans with no higher peak (to {NO_HIGHER - 1:.1%})."
    )
    return "\n".join([*lines[:-1], *_common.ending(report, about)])


def _percent(share: float | None) -> str:
    return "none so low" if share is None else f"{100 * share:.1f} %"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _common.parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--chip", default="h100", help="whose roofline; h100 by default")
    options = parser.parse_args(given)
    cases = list(SMOKE.values()) if options.smoke else [CASES[name] for name in options.model]
    versions = {name: __import__(name).__version__ for name in ("jax", "jaxlib")}
    report = _common.described(__file__, given, [versions])
    report |= {"chip": options.chip, "rows": list(rows(cases, options.chip))}
    table = rendered(report)
    if options.json is not None:
        _common.write(options.json, report, table)
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
