"""Which schedules of a cost graph are worth having: the least extra time for every peak.

1. The program is condensed into a chain of blocks, cut where few bytes are alive.
2. What to keep inside the blocks is a minimum cut (of the maximum-closure kind): for a price of a
   byte, the cheapest choice between keeping an array and computing it again, where an operation
   that runs again needs its inputs. A sweep over the price gives the convex hull of all choices,
   each a *level*, and its lower envelope is a bound that no schedule can beat.
3. A dynamic program over the chain puts blocks together: a block kept as it is; one region over
   some blocks that keeps what its level says; a region around such regions that holds what they
   keep (so that what lies between them is rebuilt late and dropped early) or drops it (the
   recursion of Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019, whose
   special case for equal steps is Griewank's binomial schedule).

The chain is only a model: what comes out is simulated exactly, and what is not better than
something else is thrown away.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from remat_kit._cost import (
    CostGraph,
    LoopPlan,
    Segment,
    Simulated,
    closure,
    loop_cost,
    plain_keeps,
    simulate,
)

_T = TypeVar("_T")

# -- the answer ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A schedule and what it takes."""

    schedule: tuple[Segment, ...]
    cost: Simulated


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What no schedule can beat, whatever its regions.

    Attributes:
        lines: pairs ``(price, value)``: keeping B bytes takes at least ``value - price * B``
            seconds of recompute, for each of them.
        working_bytes: the largest set of arrays that one operation's derivative needs at once.
    """

    lines: tuple[tuple[float, float], ...]
    working_bytes: int

    def seconds(self, held_bytes: float) -> float:
        """Return the least extra time of any schedule that holds so many bytes at its peak.

        When the backward pass begins at most that many bytes are held, so everything else that
        it needs has to be computed again from them, at least once.
        """
        return max((float(v - price * held_bytes) for price, v in self.lines), default=0.0)


@dataclasses.dataclass(frozen=True)
class Worth:
    """What a search minimises: seconds and floating-point operations in one number.

    A roofline's seconds take it for granted that matrix units run at their peak, so they flatter
    the recompute of convolutions and matrix products; FLOPs alone count a pass through memory as
    nothing. The mean of both, each as a share of the forward pass, is led astray by neither.

    Attributes:
        flop_share: of the operations in the mean: 0 is time alone, 1 is FLOPs alone.
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


class _Cutter:
    """The choice between keeping and computing again, as a flow problem."""

    def __init__(self, graph: CostGraph, worth: Worth = TIME, *, fused_is_free: bool = False):
        self.graph = graph
        self.wanted = list(graph.residuals)
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
        self.size = offset + len(self.equations)
        # Going through the graph once; only the prices change from one cut to the next.
        rows, columns = [], []
        for t in self.tensors:
            rows.append(self.tensor_node[t])
            columns.append(self.equation_node[graph.tensors[t].producer])
        self.kept_edges = len(rows)
        for i in self.equations:
            rows.append(self.equation_node[i])
            columns.append(1)
        self.work_edges = len(rows)
        for t in self.wanted:
            rows.append(0)
            columns.append(self.tensor_node[t])
        for i in self.equations:
            for t in graph.equations[i].reads:
                if t in self.tensor_node:
                    rows.append(self.equation_node[i])
                    columns.append(self.tensor_node[t])
        self.rows, self.columns = np.array(rows), np.array(columns)
        self.bytes = np.array([graph.tensors[t].bytes for t in self.tensors], dtype=float)
        work = worth.equations(graph)
        self.work = np.array(
            [
                0.0
                if fused_is_free
                and not any(graph.tensors[t].in_memory for t in graph.equations[i].makes)
                else work[i]
                for i in self.equations
            ]
        )

    def cut(
        self, price: float, free: Iterable[int] = (), per_bytes: Any = None
    ) -> tuple[frozenset[int], float]:
        """Return what to keep when a byte costs ``price`` seconds, and a lower bound of the total.

        ``free`` arrays cost nothing to keep.
        """
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        if not len(self.wanted):
            return frozenset(), 0.0
        keeping = price * (self.bytes if per_bytes is None else per_bytes)
        free = set(free)
        if free:
            keeping = np.where([t in free for t in self.tensors], 0.0, keeping)
        costs = np.concatenate([keeping, self.work])
        # The flow is integral: 2^29 stands for all the costs that a cut could ever have.
        total = min(keeping.sum(), keeping.sum() + self.work.sum()) or 1.0
        total = min(total, self.work.sum() or 1.0) * 1.01
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
        reached = set(
            breadth_first_order(residual, 0, directed=True, return_predecessors=False).tolist()
        )
        kept = frozenset(
            t
            for t in self.tensors
            if self.tensor_node[t] in reached
            and self.equation_node[self.graph.tensors[t].producer] not in reached
        )
        return kept, found.flow_value / scale


def bounds(graph: CostGraph, prices: Sequence[float] = ()) -> Bounds:
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
    # Outside every region the compiler fuses what it can into its readers, for nothing.
    cutters = [(times, _Cutter(part, TIME, fused_is_free=True)) for times, part in _unrolled(graph)]
    lines = [(0.0, 0.0)]
    for price in prices or _prices(graph, 12):
        # What an iteration of a scan needs is its own; what comes into it counts as free.
        lines.append((price, sum(times * cutter.cut(price)[1] for times, cutter in cutters)))
    working = 0
    for e in graph.equations:
        held = {t for t in e.needs if graph.tensors[t].in_memory}
        flowing = {t for t in (*e.makes, *e.reads) if _has_cotangent(graph, t)}
        both = sum(graph.tensors[t].bytes for t in held)
        both += sum(graph.tensors[t].bytes for t in flowing if graph.tensors[t].in_memory)
        working = max(working, both if e.needs and e.loop is None else 0)
    return Bounds(tuple(lines), working)


def _unrolled(graph: CostGraph, times: int = 1) -> Iterator[tuple[int, CostGraph]]:
    """Yield a graph and the bodies of its scans, each with how often it runs."""
    yield times, graph
    for e in graph.equations:
        if e.loop is not None:
            yield from _unrolled(e.loop.graph, times * e.loop.length)


def _has_cotangent(graph: CostGraph, t: int) -> bool:
    return graph.tensors[t].active and graph.tensors[t].producer >= 0


def _prices(graph: CostGraph, count: int) -> list[float]:
    """Prices of a byte from one that keeps everything to one that keeps nothing."""
    total = sum(
        times * part.tensors[t].bytes for times, part in _unrolled(graph) for t in part.residuals
    )
    middle = graph.forward_seconds / max(total, 1)
    return [middle * 10 ** (-2 + 4 * k / (count - 1)) for k in range(count)]


# -- the chain ------------------------------------------------------------------------------------


def positions(graph: CostGraph, keeps: Sequence[frozenset[int]] = (), most: int = 120) -> list[int]:
    """Return where to cut a program: few bytes alive, module boundaries, around each scan.

    A cut costs the arrays that cross it. What is kept anyway, in one of ``keeps``, crosses free.
    The first position is 0 and the last is the number of equations.
    """
    n = len(graph.equations)
    forced = _forced(graph)
    if n <= 24:
        return list(range(n + 1))
    starts = _module_starts(graph)
    votes: dict[int, int] = {}
    made = [e.makes for e in graph.equations]
    for keep in [frozenset(), *keeps]:
        live = _uncovered(graph, keep)
        for run in _valleys(live):
            # Along a plateau the arrays that cross change: a cut where a module begins, or else
            # after everything that is written down.
            written = [p for p in run if any(graph.tensors[t].in_memory for t in made[p - 1])]
            for p in [p for p in run if p in starts] or written or run[-1:]:
                votes[p] = votes.get(p, 0) + 1
    chosen = [p for p in votes if p not in forced]
    room = most - len(forced)
    if len(chosen) > room:
        chosen = _spread(graph, chosen, room, keeps)
    return sorted(forced | set(chosen))


def _forced(graph: CostGraph) -> set[int]:
    # Those whose derivative is cheaper outside of regions are to be left out of them.
    scans = [e.index for e in graph.equations if e.loop is not None or e.early_bytes]
    return {0, len(graph.equations), *scans, *(i + 1 for i in scans)}


def _uncovered(graph: CostGraph, keep: frozenset[int]) -> np.ndarray:
    """Bytes that cross each position and are not kept."""
    steps = np.zeros(len(graph.equations) + 2)
    for t in graph.tensors:
        if t.producer >= 0 and t.users and t.users[-1] > t.producer and t.index not in keep:
            steps[t.producer + 1] += t.bytes
            steps[t.users[-1] + 1] -= t.bytes
    return np.cumsum(steps)[:-1]


def _valleys(live: np.ndarray) -> list[list[int]]:
    """Runs of positions where a curve is lower than on both sides; neither end counts."""
    found, start = [], 1
    n = len(live) - 1
    for p in range(2, n + 1):
        if p < n and live[p] == live[start]:
            continue
        before = live[start - 1] if start > 1 else math.inf
        after = live[p] if p < n else math.inf
        if before > live[start] < after:
            found.append(list(range(start, p)))
        start = p
    return found


def _module_starts(graph: CostGraph) -> set[int]:
    paths = [e.module for e in graph.equations]
    return {i for i in range(1, len(paths)) if paths[i] != paths[i - 1]}


def _spread(
    graph: CostGraph, candidates: list[int], count: int, keeps: Sequence[frozenset[int]]
) -> list[int]:
    """Keep the candidate with the fewest live bytes in each of ``count`` equal shares of memory."""
    live = sum((_uncovered(graph, k) for k in keeps), _uncovered(graph, frozenset()))
    kept = np.zeros(len(graph.equations) + 1)
    for t in graph.residuals:
        kept[graph.tensors[t].producer] += graph.tensors[t].bytes
    share = np.cumsum(kept + kept.sum() / max(len(kept), 1) * 0.1)
    buckets: dict[int, int] = {}
    for p in candidates:
        bucket = min(count - 1, int(count * share[p] / share[-1]))
        if bucket not in buckets or live[p] < live[buckets[bucket]]:
            buckets[bucket] = p
    return list(buckets.values())


@dataclasses.dataclass(frozen=True)
class _Level:
    """What is kept at one price, and what that means block by block (arrays over blocks)."""

    keep: frozenset[int]
    kept: np.ndarray  # bytes kept inside the block
    rebuild: np.ndarray  # work to rebuild what the block's derivative needs
    pass_on: np.ndarray  # work to rebuild what the block hands on
    rebuilt: np.ndarray  # bytes that the rebuild writes and the derivative reads
    out: np.ndarray  # [s, j]: bytes made in blocks s..j, not kept, that later blocks read


class _Chain:
    """A graph condensed at its cuts, with the levels of each block."""

    def __init__(self, graph: CostGraph, cuts: Sequence[int], worth: Worth = TIME):
        self.graph = graph
        self.worth = worth
        self.work = worth.equations(graph)
        self.cuts = list(cuts)
        self.count = len(cuts) - 1
        self.block = np.zeros(len(graph.equations) + 1, dtype=int)
        for b in range(self.count):
            self.block[cuts[b] : cuts[b + 1]] = b
        self.ranges = [(cuts[b], cuts[b + 1]) for b in range(self.count)]
        self.forward = np.array([sum(self.work[lo:hi]) for lo, hi in self.ranges])
        self.scans = np.array(
            [any(e.loop for e in graph.equations[lo:hi]) for lo, hi in self.ranges]
        )
        self.flowing = np.array([self.cotangents(lo, hi) for lo, hi in self.ranges])
        self.needs = [
            list(dict.fromkeys(t for e in graph.equations[lo:hi] for t in e.needs))
            for lo, hi in self.ranges
        ]
        self.producers = [t.producer for t in graph.tensors]
        # What a rebuild writes and some derivative reads.
        tensors = graph.tensors
        self.rebuilt = {s: tensors[s].bytes for t in graph.residuals for s in tensors[t].sources}
        self.reads = [e.reads for e in graph.equations]
        self.written = [
            [(t, self.rebuilt[t]) for t in e.makes if t in self.rebuilt] for e in graph.equations
        ]
        self.made = [
            sum(e.made_in_memory for e in graph.equations[lo:hi] if e.loop is None)
            for lo, hi in self.ranges
        ]
        self.early = [sum(e.early_bytes for e in graph.equations[lo:hi]) for lo, hi in self.ranges]
        # Without regions, an array in memory that some derivative reads is kept where it is made.
        keep = plain_keeps(graph, 0, len(graph.equations))
        own = [sum(e.made_in_memory for e in graph.equations[lo:hi]) for lo, hi in self.ranges]
        level = self.level(frozenset(t for t in keep if graph.tensors[t].producer >= 0))
        self.plain = np.array(own) + level.kept
        self.plain_out = np.diagonal(level.out)

    @functools.cached_property
    def crossing(self) -> list[tuple[int, int, int]]:
        """Arrays that cross a cut: (tensor, block that makes it, last block that reads it)."""
        found = []
        for t in self.graph.tensors:
            if t.producer >= 0 and t.users and t.bytes:
                first, last = int(self.block[t.producer]), int(self.block[t.users[-1]])
                if last > first:
                    found.append((t.index, first, last))
        return found

    def cotangents(self, lo: int, hi: int) -> int:
        """The most bytes of cotangents alive while the backward pass goes through a block."""
        from remat_kit import _cost

        across = _cost._cotangents_across(self.graph)
        peak = 0
        for i in range(lo, hi):
            made = sum(
                self.graph.tensors[t].bytes
                for t in self.graph.equations[i].reads
                if self.graph.tensors[t].active
                and self.graph.tensors[t].in_memory
                and self.graph.tensors[t].users[-1] == i
            )
            made += self.graph.equations[i].working_bytes + self.graph.gradient_bytes[i]
            peak = max(peak, across[i + 1] + made)
        return peak

    def level(self, keep: frozenset[int]) -> _Level:
        graph = self.graph
        k = self.count
        kept, rebuild, pass_on, rebuilt = (np.zeros(k) for _ in range(4))
        handed: list[list[int]] = [[] for _ in range(k)]
        for t, first, _ in self.crossing:
            if t not in keep:
                handed[first].append(t)
        for t in keep:
            kept[self.block[graph.tensors[t].producer]] += graph.tensors[t].bytes
        for b, (lo, hi) in enumerate(self.ranges):
            needs = set(self.needs[b])
            found = closure(graph, needs, keep, lo, hi)
            rebuild[b] = sum(self.work[i] for i in found.again)
            made = {t for i in found.again for t in graph.equations[i].makes}
            held = {s for t in needs if t not in keep for s in graph.tensors[t].sources}
            rebuilt[b] = sum(self.rebuilt[t] for t in made & held if t not in keep)
            rebuilt[b] += self.made[b]
            again = closure(graph, handed[b], keep, lo, hi).again
            pass_on[b] = sum(self.work[i] for i in again)
        out = np.zeros((k, k))
        for t, first, last in self.crossing:
            if t not in keep:
                out[first, first:last] += graph.tensors[t].bytes
        # out[s, j]: made in s..j and read after j.
        out = np.cumsum(out[::-1], axis=0)[::-1]
        return _Level(keep, kept, rebuild, pass_on, rebuilt, np.triu(out))

    def merged(self, level: _Level, first: int) -> Iterator[tuple[float, float]]:
        """Yield what one region over blocks ``first..j`` takes, for each j: bytes that it rebuilds
        and the work of that.
        """
        start, keep = self.cuts[first], level.keep
        producers, written, reads, price = self.producers, self.written, self.reads, self.work
        seen: set[int] = set(keep)
        again: set[int] = set()
        built = work = 0.0
        for b in range(first, min(self.count, first + _LONGEST)):
            if self.scans[b]:
                return
            todo = list(self.needs[b])
            while todo:
                t = todo.pop()
                if t in seen:
                    continue
                seen.add(t)
                i = producers[t]
                if i >= start and i not in again:
                    again.add(i)
                    work += price[i]
                    todo += reads[i]
                    for made, size in written[i]:
                        if made not in keep:
                            built += size
            built += self.made[b]
            yield built, work


# -- putting blocks together ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Item:
    """Some consecutive blocks treated alike, as the chain sees them.

    ``form`` is "plain", "leaf" (one region), "hold" or "drop" (a region around one region per
    block), "nest" (a region that drops, around whatever the recursion finds best) or "loop".
    ``kept`` bytes are there while later blocks are differentiated, ``stay`` of them and ``working``
    others while these are: what was only handed on is free by then.
    """

    first: int
    last: int
    form: str
    level: int
    kept: float
    stay: float
    working: float
    work: float

    def slots(self, size: float) -> tuple[int, int]:
        """Return the slots of memory kept, and the slots that the item needs in all."""
        kept, stay = self.rounded(self.kept, size), self.rounded(self.stay, size)
        return kept, max(kept, stay + math.ceil(self.working / size))

    def rounded(self, amount: float, size: float) -> int:
        """Return an amount in slots, up or down by turns over the blocks, so that errors of equal
        blocks do not add up.
        """
        return math.floor(amount / size + (self.first * _GOLDEN) % 1)


_LONGEST = 16
_GOLDEN = (math.sqrt(5) - 1) / 2


class _Composer:
    def __init__(self, chain: _Chain, levels: Sequence[_Level], loops: dict[int, list[LoopPlan]]):
        self.chain = chain
        self.levels = levels
        self.loops = loops
        self.parts: dict[tuple[int, int, int], frozenset[int]] = {}
        self.plain_out = chain.level(frozenset()).out

    @functools.cached_property
    def items(self) -> list[list[_Item]]:
        """The items of a few blocks that are worth having, by their first block."""
        chain = self.chain
        k = chain.count
        found: list[list[_Item]] = [[] for _ in range(k)]
        for b in range(k):
            if chain.scans[b]:
                found[b] += self.loop_items(b)
            found[b].append(_plain_item(chain, b))
        for number, level in enumerate(self.levels):
            for s in range(k):
                if not chain.scans[s]:
                    found[s] += self.group_items(number, level, s)
        return [_undominated(options) for options in found]

    def group_items(self, number: int, level: _Level, s: int) -> list[_Item]:
        chain = self.chain
        found = []
        kept = work = between = 0.0
        merged_peak = grouped_peak = dropped_peak = 0.0
        inner = held = early = 0.0
        for j, (built, again) in zip(range(s, chain.count), chain.merged(level, s), strict=False):
            early += chain.early[j]
            out = level.out[s, j] + early
            kept += level.kept[j]
            work += level.rebuild[j]
            # One region over all: what it rebuilds is there at once.
            merged_peak = max(merged_peak, built + chain.flowing[j])
            found.append(_Item(s, j, "leaf", number, kept + out, kept + early, merged_peak, again))
            # A region around one per block: what they hand on is there at once, and the rest late.
            held += level.kept[j]
            grouped_peak = max(grouped_peak, inner + level.rebuilt[j] + chain.flowing[j])
            dropped_peak = max(dropped_peak, inner + held + level.rebuilt[j] + chain.flowing[j])
            if j > s:
                extra = work + between
                found.append(
                    _Item(s, j, "hold", number, kept + out, kept + early, grouped_peak, extra)
                )
                extra = chain.forward[s : j + 1].sum() + work
                out = self.plain_out[s, j] + early  # what it keeps inside is handed on too
                found.append(_Item(s, j, "drop", number, out, early, dropped_peak, extra))
            inner += level.out[j, j]
            between += level.pass_on[j]
        return found

    def loop_items(self, b: int) -> list[_Item]:
        (scan,) = [e for e in self.chain.graph.equations[slice(*self.chain.ranges[b])] if e.loop]
        assert scan.loop is not None
        found = []
        for number, plan in enumerate(self.loops.get(scan.index, ())):
            cost = loop_cost(scan.loop, plan)
            stay = float(self.chain.plain[b]) - scan.made_in_memory + cost.saved_bytes
            found.append(
                _Item(
                    b,
                    b,
                    "loop",
                    number,
                    stay + float(self.chain.plain_out[b]),
                    stay,
                    float(self.chain.flowing[b]) + cost.peak_bytes - cost.saved_bytes,
                    self.chain.worth.extra(cost),
                )
            )
        return found

    # .. the table: least extra work for blocks t.. with m slots of memory

    def solve(self, top: float, slots: int) -> list[tuple[Segment, ...]]:
        """Return the schedules that are best for some memory up to ``top`` bytes."""
        k = self.chain.count
        size = top / slots
        items = self.items
        nested = self.nested(size, slots)
        best = np.full((k + 1, slots + 1), np.inf)
        best[k] = 0.0
        choice = np.full((k, slots + 1), -1, dtype=int)
        chosen: list[list[_Item]] = []
        memory = np.arange(slots + 1)
        for t in range(k - 1, -1, -1):
            options = items[t] + nested[t]
            chosen.append(options)
            for number, item in enumerate(options):
                kept, need = item.slots(size)
                if need > slots:
                    continue
                value = np.full(slots + 1, np.inf)
                rest = memory[need:] - kept
                value[need:] = item.work + best[item.last + 1][rest]
                if item.form == "nest":
                    inside = memory[need:] - item.rounded(item.stay, size)
                    value[need:] += self.inner[(item.first, item.last)][inside]
                better = value < best[t] * (1 - 1e-9)
                best[t][better] = value[better]
                choice[t][better] = number
        chosen.reverse()
        found: dict[tuple[Segment, ...], None] = {}
        previous = math.inf
        for m in range(slots + 1):
            if not math.isfinite(best[0][m]) or best[0][m] >= previous * (1 - 1e-6) - 1e-15:
                continue
            previous = best[0][m]
            found[self.schedule(choice, chosen, m, size)] = None
        return list(found)

    def schedule(
        self, choice: np.ndarray, chosen: list[list[_Item]], m: int, size: float
    ) -> tuple[Segment, ...]:
        t, parts = 0, []
        while t < self.chain.count:
            item = chosen[t][choice[t][m]]
            kept, _ = item.slots(size)
            parts += self.segment(item, m)
            m -= kept
            t = item.last + 1
        return _merged(tuple(parts))

    def segment(self, item: _Item, room: int) -> list[Segment]:
        cuts = self.chain.cuts
        lo, hi = cuts[item.first], cuts[item.last + 1]
        if item.form == "plain":
            return [Segment(lo, hi, plain=True)]
        if item.form == "loop":
            (scan,) = [e.index for e in self.chain.graph.equations[lo:hi] if e.loop]
            plan = self.loops[scan][item.level]
            return [Segment(lo, hi, plain=True, loops=((scan, plan),))]
        if item.form == "leaf":
            return [Segment(lo, hi, save=self.kept(item.level, lo, hi))]
        if item.form == "nest":
            room -= item.rounded(item.stay, self.size)
            return [Segment(lo, hi, inside=self.backtrack(item.first, item.last, room), hold=False)]
        inside = tuple(
            Segment(a, b, save=self.kept(item.level, a, b))
            for a, b in self.chain.ranges[item.first : item.last + 1]
        )
        return [Segment(lo, hi, inside=inside, hold=item.form == "hold")]

    def kept(self, level: int, lo: int, hi: int) -> frozenset[int]:
        found = self.parts.get((level, lo, hi))
        if found is None:
            tensors = self.chain.graph.tensors
            keep = self.levels[level].keep
            found = frozenset(t for t in keep if lo <= tensors[t].producer < hi)
            self.parts[level, lo, hi] = found
        return found

    # .. regions in regions in regions: the recursion of heterogeneous chains

    def nested(self, size: float, slots: int) -> list[list[_Item]]:
        """Items that drop what they keep and go back through themselves as best they can."""
        self.inner: dict[tuple[int, int], np.ndarray] = {}
        self.inner_choice: dict[tuple[int, int], np.ndarray] = {}
        self.inner_options: list[list[_Item]] = []
        chain, k = self.chain, self.chain.count
        found: list[list[_Item]] = [[] for _ in range(k)]
        if chain.scans.any() or k > 160 or k < 3:
            return found
        out = self.plain_out
        singles: list[list[_Item]] = []
        for b in range(k):
            options = [_plain_item(chain, b)]
            for number, level in enumerate(self.levels):
                kept = level.kept[b] + level.out[b, b]
                working = level.rebuilt[b] + chain.flowing[b]
                options.append(
                    _Item(b, b, "leaf", number, kept, level.kept[b], working, level.rebuild[b])
                )
            singles.append(_undominated(options))
        self.inner_options = singles
        forward = np.concatenate([[0.0], np.cumsum(chain.forward)])
        memory = np.arange(slots + 1)
        never = np.full(slots + 1, np.inf)
        for length in range(1, k):
            for s in range(k - length + 1):
                t = s + length - 1
                value, pick = never.copy(), np.full(slots + 1, -1, dtype=np.int32)
                rest = self.inner.get((s + 1, t)) if length > 1 else np.zeros(slots + 1)
                for number, item in enumerate(singles[s]):
                    # The last block inside a region hands on to nothing inside it.
                    if s == t:
                        item = dataclasses.replace(item, kept=item.stay)
                    kept_slots, need = item.slots(size)
                    if need > slots or rest is None:
                        continue
                    new = item.work + rest[memory[need:] - kept_slots]
                    better = new < value[need:] * (1 - 1e-9)
                    value[need:][better] = new[better]
                    pick[need:][better] = number
                if length > 2 and k <= 80:
                    for j in range(s + 1, t):  # blocks s..j once more in a region of their own
                        kept_slots = round(out[s, j] / size)
                        if kept_slots > slots:
                            continue
                        ahead = self.inner[(j + 1, t)][memory[kept_slots:] - kept_slots]
                        new = (
                            forward[j + 1]
                            - forward[s]
                            + ahead
                            + self.inner[(s, j)][memory[kept_slots:]]
                        )
                        better = new < value[kept_slots:] * (1 - 1e-9)
                        value[kept_slots:][better] = new[better]
                        pick[kept_slots:][better] = 1000 + j
                self.inner[(s, t)], self.inner_choice[(s, t)] = value, pick
                if length > 2:
                    again = float(forward[t + 1] - forward[s])
                    early = float(sum(chain.early[s : t + 1]))
                    kept = float(out[s, t]) + early
                    found[s].append(_Item(s, t, "nest", -1, kept, early, 0.0, again))
        return found

    def backtrack(self, s: int, t: int, room: int) -> tuple[Segment, ...]:
        cuts, parts = self.chain.cuts, []
        size = self.size
        while s <= t:
            pick = int(self.inner_choice[(s, t)][room])
            if pick >= 1000:
                j = pick - 1000
                inside = self.backtrack(s, j, room)
                room -= round(self.plain_out[s, j] / size)
                parts.append(Segment(cuts[s], cuts[j + 1], inside=inside, hold=False))
                s = j + 1
                continue
            item = self.inner_options[s][pick]
            parts += self.segment(item, room)
            room -= item.rounded(item.kept if s < t else item.stay, size)
            s += 1
        return _merged(tuple(parts))

    size = 1.0


def _plain_item(chain: _Chain, b: int) -> _Item:
    stay = float(chain.plain[b])
    kept = stay + float(chain.plain_out[b])
    working = float(max(chain.flowing[b], sum(chain.early[b:])))
    return _Item(b, b, "plain", -1, kept, stay, working, 0.0)


def _undominated(items: Sequence[_Item]) -> list[_Item]:
    """Leave out items that take no less of anything than another over the same blocks."""
    found: list[_Item] = []
    by_last: dict[int, list[_Item]] = {}
    for item in sorted(items, key=lambda i: (i.work, i.kept, i.working)):
        others = by_last.setdefault(item.last, [])
        used = item.stay + item.working
        if any(o.kept <= item.kept and o.stay + o.working <= used for o in others):
            continue
        others.append(item)
        found.append(item)
    return found


def _merged(parts: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Put neighbours that have no region together."""
    found: list[Segment] = []
    for part in parts:
        if part.plain and found and found[-1].plain:
            last = found.pop()
            part = Segment(last.start, part.stop, plain=True, loops=(*last.loops, *part.loops))
        found.append(part)
    return tuple(found)


# -- all together ---------------------------------------------------------------------------------


def candidates(
    graph: CostGraph,
    *,
    tick: Callable[[str], None] = lambda what: None,
    levels: int = 10,
    slots: int = 240,
    host_bandwidth: float = math.inf,
    worth: Worth = TIME,
) -> list[Candidate]:
    """Return the schedules of which none is beaten in both peak and extra work, by peak.

    Args:
        graph: of the loss, or of the body of a scan.
        worth: what work is.
        tick: told what is worked on; may raise `KeyboardInterrupt`.
        levels: how many prices of a byte are tried.
        slots: into how many steps memory is divided.
        host_bandwidth: bytes a second to the host.
    """
    found: list[Candidate] = []
    try:
        for candidate in _simulated(graph, tick, levels, slots, host_bandwidth, worth):
            found.append(candidate)
    except KeyboardInterrupt:
        if len(found) < 2:
            raise
    return pareto(found, worth)


def _simulated(
    graph: CostGraph,
    tick: Callable[[str], None],
    levels: int,
    slots: int,
    host_bandwidth: float,
    worth: Worth,
) -> Iterator[Candidate]:
    """Yield every schedule that is proposed, and what it takes; the first has no region."""
    n = len(graph.equations)
    if n == 0:
        return
    plain = (Segment(0, n, plain=True),)
    found = [Candidate(plain, simulate(graph, plain))]
    yield found[0]
    if not graph.residuals and not any(e.loop for e in graph.equations):
        return
    loops: dict[int, list[LoopPlan]] = {}
    for e in graph.equations:
        if e.loop is not None:
            tick(f"the scan at {e.module or 'the top'}")
            loops[e.index] = loop_plans(e, worth)
    seen: set[tuple[Segment, ...]] = set()
    for schedule in _proposals(graph, loops, levels, slots, tick, worth):
        if schedule not in seen:
            seen.add(schedule)
            cost = simulate(graph, schedule, host_bandwidth=host_bandwidth)
            found.append(Candidate(schedule, cost))
            yield found[-1]
    if n <= _SMALL:
        yield from _polished(graph, pareto(found, worth), seen, host_bandwidth, worth)


_SMALL = 32


def _polished(
    graph: CostGraph,
    found: list[Candidate],
    seen: set[tuple[Segment, ...]],
    host_bandwidth: float,
    worth: Worth,
    most: int = 6000,
) -> list[Candidate]:
    """Improve schedules of a small graph one change at a time until nothing is left to improve."""
    done: set[tuple[Segment, ...]] = set()
    while len(seen) < most:
        fresh = [c.schedule for c in found if c.schedule not in done]
        if not fresh:
            break
        for schedule in fresh:
            done.add(schedule)
            for other in _neighbours(graph, schedule):
                if other not in seen:
                    seen.add(other)
                    cost = simulate(graph, other, host_bandwidth=host_bandwidth)
                    found.append(Candidate(other, cost))
        found = pareto(found, worth)
    return found


def _neighbours(graph: CostGraph, schedule: tuple[Segment, ...]) -> Iterable[tuple[Segment, ...]]:
    """Schedules that differ in one kept array, one cut or one region."""
    for k, s in enumerate(schedule):
        before, after = schedule[:k], schedule[k + 1 :]
        if s.inside or s.loops:
            continue
        if not s.plain:
            yield (*before, dataclasses.replace(s, plain=True, save=frozenset()), *after)
            for t in graph.tensors:
                if s.start <= t.producer < s.stop and t.bytes:
                    yield (*before, dataclasses.replace(s, save=s.save ^ {t.index}), *after)
        else:
            yield (*before, dataclasses.replace(s, plain=False), *after)
        for p in range(s.start + 1, s.stop):
            yield (*before, _part(graph, s, s.start, p), _part(graph, s, p, s.stop), *after)
        if after and not after[0].inside and not after[0].loops:
            both = Segment(s.start, after[0].stop, save=s.save | after[0].save)
            yield (*before, both, *after[1:])


def _part(graph: CostGraph, s: Segment, lo: int, hi: int) -> Segment:
    save = frozenset(t for t in s.save if lo <= graph.tensors[t].producer < hi)
    return Segment(lo, hi, save=save, plain=s.plain)


def _proposals(
    graph: CostGraph,
    loops: dict[int, list[LoopPlan]],
    levels: int,
    slots: int,
    tick: Callable[[str], None],
    worth: Worth,
) -> Iterable[tuple[Segment, ...]]:
    if len(graph.equations) <= _TINY:
        yield from _every_chain(len(graph.equations))
    cutter = _Cutter(graph, worth)
    tick("what to keep")
    prices = _prices(graph, levels)
    everywhere = list(dict.fromkeys([frozenset(), *(cutter.cut(p)[0] for p in prices)]))
    fine = positions(graph, everywhere)
    coarse = _coarser(graph, fine, everywhere)
    if not loops:
        yield from _even(graph, everywhere, fine)
    for cuts in [fine] if coarse == fine else [fine, coarse]:
        chain = _Chain(graph, cuts, worth)
        handed = {t for t, _, _ in chain.crossing}
        keeps = dict.fromkeys(everywhere)
        for price in prices:
            keeps.setdefault(cutter.cut(price, free=handed)[0])
        composer = _Composer(chain, [chain.level(k) for k in _distinct(graph, keeps)], loops)
        top = float(chain.plain.sum() + chain.flowing.max())
        # Each schedule is simulated; short chains and small graphs can have finer steps.
        steps = slots * (4 if chain.count <= 32 else 2 if len(graph.equations) < 2500 else 1)
        for share in (1.0, 0.3):
            tick(f"schedules of {chain.count} blocks")
            composer.size = top * share * 1.02 / steps
            found = composer.solve(top * share * 1.02, steps)
            yield from found


def _even(
    graph: CostGraph, keeps: Sequence[frozenset[int]], fine: list[int]
) -> Iterator[tuple[Segment, ...]]:
    """Yield what people write by hand: a region for each module, or for some equal parts, all with
    the same policy; with and without one around what comes last or is in no module.
    """
    n = len(graph.equations)
    paths = [e.module.split("/") for e in graph.equations]
    forced = {0, n}
    plain = Segment(0, n, plain=True)
    sets = [
        sorted(forced | {i for i in range(1, n) if paths[i][:depth] != paths[i - 1][:depth]})
        for depth in (1, 2)
    ]
    sets += [_coarser(graph, fine, keeps, most) for most in (4, 8, 16, 32)[:: 1 if n < 2500 else 2]]
    for cuts in dict.fromkeys(tuple(cuts) for cuts in sets if len(cuts) < 200):
        for keep in dict.fromkeys([*keeps, _products(graph)]):
            parts = [
                _useful(graph, _part(graph, Segment(0, n, save=keep), a, b))
                for a, b in itertools.pairwise(cuts)
            ]
            yield tuple(parts)
            yield (*parts[:-1], Segment(cuts[-2], n, plain=True))
            yield _merged(
                tuple(
                    p if paths[p.start][0] else _part(graph, plain, p.start, p.stop) for p in parts
                )
            )


def _useful(graph: CostGraph, s: Segment) -> Segment:
    """Leave out what a region keeps and its own derivative makes no use of."""
    wanted = {t for e in graph.equations[s.start : s.stop] for t in e.needs}
    again = closure(graph, wanted, s.save, s.start, s.stop).again
    read = wanted.union(*(graph.equations[i].reads for i in again))
    return dataclasses.replace(s, save=s.save & read)


def _products(graph: CostGraph) -> frozenset[int]:
    """The results of matrix products and convolutions."""
    products = ("dot_general", "conv_general_dilated", "ragged_dot_general")
    return frozenset(t for e in graph.equations if e.primitive in products for t in e.makes)


_TINY = 8


def _every_chain(n: int) -> Iterable[tuple[Segment, ...]]:
    """Every way to cut a few equations into regions that keep nothing and stretches without."""
    for inner in itertools.product((False, True), repeat=n - 1):
        marks = [0, *(i for i, cut in enumerate(inner, 1) if cut), n]
        pairs = list(itertools.pairwise(marks))
        for plain in itertools.product((False, True), repeat=len(pairs)):
            yield tuple(Segment(a, b, plain=p) for (a, b), p in zip(pairs, plain, strict=True))


def _distinct(graph: CostGraph, keeps: Iterable[frozenset[int]]) -> list[frozenset[int]]:
    """Leave out sets that differ from an earlier one by next to nothing."""
    total = sum(graph.tensors[t].bytes for t in graph.residuals) or 1
    found: list[frozenset[int]] = []
    for keep in keeps:
        apart = (sum(graph.tensors[t].bytes for t in keep ^ other) for other in found)
        if all(a > 0.002 * total for a in apart):
            found.append(keep)
    return found


def _coarser(
    graph: CostGraph, cuts: list[int], keeps: Sequence[frozenset[int]], most: int = 40
) -> list[int]:
    """Cuts for larger blocks: those where the fewest bytes are alive."""
    forced = _forced(graph)
    if len(cuts) <= most:
        return sorted(forced | set(cuts[::2]))
    chosen = _spread(graph, [c for c in cuts if c not in forced], most, keeps)
    return sorted(forced | set(chosen))


def pareto(found: Iterable[Candidate], worth: Worth = TIME) -> list[Candidate]:
    """Return the candidates that no other beats in both peak and extra work, by peak."""
    return _pareto(found, lambda c: c.cost, worth)


def _pareto(found: Iterable[_T], cost: Callable[[_T], Simulated], worth: Worth) -> list[_T]:
    sized = [(cost(x).peak_bytes, worth.extra(cost(x)), n, x) for n, x in enumerate(found)]
    kept: list[_T] = []
    least = math.inf
    for _, work, _, x in sorted(sized, key=lambda entry: entry[:3]):
        if not kept or work < least * (1 - 1e-6):
            kept.append(x)
            least = work
    return kept


# -- scans ----------------------------------------------------------------------------------------


def loop_plans(e: Any, worth: Worth = TIME, most: int = 48) -> list[LoopPlan]:
    """Return ways to run a scan: its body's schedules, two depth ranges, groups."""
    loop = e.loop
    n = len(loop.graph.equations)
    length = loop.length
    whole = (Segment(0, n),)
    # All that is proposed, for what counts here is what an iteration keeps, many times over, and
    # not its own peak.
    proposed = _simulated(loop.graph, silent, 8, 120, math.inf, worth)
    bodies = dict.fromkeys([whole, *_regions(loop.graph, worth), *(c.schedule for c in proposed)])
    one = [LoopPlan(((length, 1, body),)) for body in bodies]
    cost = {p: loop_cost(loop, p) for p in one}
    hull = _pareto(one, cost.__getitem__, worth)
    found = list(hull)
    corners = _convex(hull, [(cost[p].peak_bytes, worth.extra(cost[p])) for p in hull])
    for a, b in itertools.pairwise(corners):
        for share in (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875):
            first = round(length * share)
            if 0 < first < length:
                parts = ((first, 1, b.parts[0][2]), (length - first, 1, a.parts[0][2]))
                found.append(LoopPlan(parts))
    lean = hull[0].parts[0][2]
    for group in range(2, min(length, 16)):
        for body in dict.fromkeys([lean, whole]):
            found.append(LoopPlan(((length, group, body),)))
    cost |= {p: loop_cost(loop, p) for p in found}
    kept = _pareto(found, cost.__getitem__, worth)
    return _thinned(kept, [(cost[p].peak_bytes, worth.extra(cost[p])) for p in kept], most)


def silent(what: str) -> None:
    """Show no progress."""
    del what


def _regions(graph: CostGraph, worth: Worth) -> Iterator[tuple[Segment, ...]]:
    """Yield one region over everything for each price of a byte, and one for each part of it."""
    cutter = _Cutter(graph, worth)
    n = len(graph.equations)
    keeps = dict.fromkeys(cutter.cut(price)[0] for price in _prices(graph, 40))
    keeps[_products(graph)] = None
    cuts = _coarser(graph, positions(graph, list(keeps)), list(keeps), most=8)
    for keep in keeps:
        yield (Segment(0, n, save=keep),)
        yield tuple(
            _part(graph, Segment(0, n, save=keep), a, b) for a, b in itertools.pairwise(cuts)
        )


def _convex(items: Sequence[_T], at: Sequence[tuple[float, float]]) -> list[_T]:
    """Return the corners of the convex hull below a falling curve: a mean of two is on no other."""
    hull: list[tuple[float, float, _T]] = []
    for (x, y), item in zip(at, items, strict=True):
        while len(hull) > 1:
            (x0, y0, _), (x1, y1, _) = hull[-2:]
            if (x1 - x0) * (y - y0) - (y1 - y0) * (x - x0) > 0:
                break
            hull.pop()
        hull.append((x, y, item))
    return [item for _, _, item in hull]


def _thinned(items: Sequence[_T], at: Sequence[tuple[float, float]], most: int) -> list[_T]:
    """Leave out, one by one, the item whose neighbours on a curve are nearest to each other.

    A step in memory counts by its ratio, one in work by its share of all of it.
    """
    highest = max((work for _, work in at), default=0.0) or 1.0
    left = [
        (math.log(max(peak, 1.0)), work / highest, item)
        for (peak, work), item in zip(at, items, strict=True)
    ]
    while len(left) > max(most, 2):
        gaps = [abs(b[0] - a[0]) + abs(b[1] - a[1]) for a, b in zip(left, left[2:], strict=False)]
        del left[1 + gaps.index(min(gaps))]
    return [item for _, _, item in left]
