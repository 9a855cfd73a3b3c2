"""Where can a program be cut into blocks, and what do regions of these blocks need and recompute?

The dynamic program of module `compose` needs a chain, in which each block reads only what blocks
before it make. A cost graph becomes a chain if it is cut at some positions of its program order.
Good positions are those where few bytes are live. A position is the boundary of a lower set in the
sense of Kusumoto et al., "A graph theoretic framework of recomputation algorithms for
memory-efficient backpropagation", NeurIPS 2019, who search over such sets.

A `Level` is a set of arrays to save. For each level, the chain knows block by block how many bytes
are saved, how many cross to later blocks, and what a region of a few blocks recomputes. These
figures are estimates, so `simulate` must check each schedule that is made from them.

Example: take four layers ``x = tanh(x @ w)``, with ``x`` of 4 MiB on an H100, and one block per
layer. If a level saves nothing, 4 MiB cross each cut. For regions of one to four blocks that begin
with the first block, `Chain.regions` then gives the MiB that are live in the backward pass of the
region, and the work of its recompute, here as a share of the forward pass:

>>> import jax, jax.numpy as jnp
>>> from remat_kit._chip.target import target
>>> from remat_kit._planner.build import trace
>>> def tower(weights, x):
...     for w in weights:
...         x = jnp.tanh(x @ w)
...     return jnp.sum(x)
>>> weights = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 4
>>> x = jax.ShapeDtypeStruct((2048, 512), jnp.float32)
>>> graph = trace(tower, (weights, x), target("h100"))
>>> chain = Chain(graph, [0, 2, 4, 6, 9])
>>> first, *_ = chain.regions(chain.level(frozenset()))
>>> [(int(size) >> 20, f"{work / graph.forward_seconds:.0%}") for size, work in first]
[(16, '27%'), (20, '53%'), (24, '80%'), (28, '94%')]
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from remat_kit._planner.graph import CostGraph
from remat_kit._planner.mincut import TIME, Worth
from remat_kit._planner.simulate import plain_keeps
from remat_kit._policy.schedule import Segment

# Maximum number of blocks of a region that contains no other region.
LONGEST = 16


# -- the chain ------------------------------------------------------------------------------------


def positions(graph: CostGraph, keeps: Sequence[frozenset[int]] = (), most: int = 120) -> list[int]:
    """Return the positions at which to cut a program into blocks.

    These are positions where fewer bytes are live than on both sides, and the positions before and
    after each scan. Of neighbouring positions with equally many live bytes, those where a module
    begins are preferred. A program of at most 24 equations is cut everywhere. The first position is
    always 0, and the last is the number of equations.

    Args:
        graph: the cost graph.
        keeps: sets of arrays that may be saved. The function looks for cuts once for each set, and
            does not count the arrays in the set as live, because they are saved anyway.
        most: maximum number of cuts.
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
            # Along a plateau, the number of live bytes is constant but the live arrays change. Cut
            # where a module begins, or else after each equation that writes an array to memory.
            written = [p for p in run if any(graph.tensors[t].in_memory for t in made[p - 1])]
            for p in [p for p in run if p in starts] or written or run[-1:]:
                votes[p] = votes.get(p, 0) + 1
    chosen = [p for p in votes if p not in forced]
    room = most - len(forced)
    if len(chosen) > room:
        chosen = _spread(graph, chosen, room, keeps)
    return sorted(forced | set(chosen))


def _forced(graph: CostGraph) -> set[int]:
    scans = [e.index for e in graph.equations if e.loop is not None]
    return {0, len(graph.equations), *scans, *(i + 1 for i in scans)}


def _uncovered(graph: CostGraph, keep: frozenset[int]) -> np.ndarray:
    """Return, for each position, the bytes that cross it and are not saved."""
    steps = np.zeros(len(graph.equations) + 2)
    for t in map(graph.tensors.__getitem__, keep):
        if t.producer >= 0 and t.users and t.users[-1] > t.producer:
            steps[t.producer + 1] -= t.bytes
            steps[t.users[-1] + 1] += t.bytes
    return np.array(graph.live_bytes) + np.cumsum(steps)[:-1]


def _valleys(live: np.ndarray) -> list[list[int]]:
    """Return runs of positions where a curve is constant and lower than on both sides.

    The first and the last position of the curve are in no run.
    """
    valleys, start = [], 1
    n = len(live) - 1
    for p in range(2, n + 1):
        if p < n and live[p] == live[start]:
            continue
        before = live[start - 1] if start > 1 else math.inf
        after = live[p] if p < n else math.inf
        if before > live[start] < after:
            valleys.append(list(range(start, p)))
        start = p
    return valleys


def _module_starts(graph: CostGraph) -> set[int]:
    paths = [e.module for e in graph.equations]
    return {i for i in range(1, len(paths)) if paths[i] != paths[i - 1]}


def _spread(
    graph: CostGraph, candidates: list[int], count: int, keeps: Sequence[frozenset[int]]
) -> list[int]:
    """Divide the residuals into ``count`` equal shares, and return the best cut in each.

    The best cut is the candidate with the fewest live bytes.
    """
    live = sum((_uncovered(graph, k) for k in keeps), _uncovered(graph, frozenset()))
    kept = np.zeros(len(graph.equations) + 1)
    for t in graph.residuals:
        kept[graph.tensors[t].producer] += graph.tensors[t].bytes
    if not kept.any():
        return candidates[:count]  # there are no residuals, so any cuts are as good as others
    share = np.cumsum(kept + kept.sum() / len(kept) * 0.1)
    buckets: dict[int, int] = {}
    for p in candidates:
        bucket = min(count - 1, int(count * share[p] / share[-1]))
        if bucket not in buckets or live[p] < live[buckets[bucket]]:
            buckets[bucket] = p
    return list(buckets.values())


def coarser(
    graph: CostGraph, cuts: list[int], keeps: Sequence[frozenset[int]], most: int = 40
) -> list[int]:
    """Return fewer cuts, for larger blocks: those where the fewest bytes are live."""
    forced = _forced(graph)
    if len(cuts) <= most:
        return sorted(forced | set(cuts[::2]))
    chosen = _spread(graph, [c for c in cuts if c not in forced], most, keeps)
    return sorted(forced | set(chosen))


def unbroken(graph: CostGraph, cuts: Sequence[int]) -> list[int]:
    """Remove cuts where most of the crossing cotangents are in memory only because of the cut.

    Without the cut, the compiler fuses such a cotangent, for example that of the logits, into the
    operations that read it. The chain adds up the bytes of its blocks, so it cannot see that two
    blocks take less memory as one block.
    """
    forced = _forced(graph)
    arriving = ((p, graph.arriving(p)) for p in cuts)
    return [p for p, a in arriving if p in forced or 2 * a.fused_bytes <= sum(a.ends.values())]


@dataclasses.dataclass(frozen=True)
class Level:
    """A set of arrays to save, and the bytes that follow from it for each block.

    Attributes:
        keep: the arrays to save.
        kept: for each block, the bytes of the arrays of ``keep`` that it makes.
        out: at ``[s, j]``, the bytes made in blocks ``s..j`` and not saved that later blocks read.
        spared: at ``[s, j]``, those of ``out`` that only block ``j + 1`` reads, and not as a
            residual.
    """

    keep: frozenset[int]
    kept: np.ndarray
    out: np.ndarray
    spared: np.ndarray


class Chain:
    """A cost graph divided into consecutive blocks, with the bytes and the work of each block.

    Args:
        graph: the cost graph.
        cuts: the positions of the cuts, from 0 to the number of equations.
        worth: how FLOPs and seconds are combined into work.
    """

    def __init__(self, graph: CostGraph, cuts: Sequence[int], worth: Worth = TIME):
        self.graph = graph
        self.worth = worth
        self.work = _exact(np.array(worth.equations(graph)))
        self.levels: dict[frozenset[int], Level] = {}
        self.made_regions: dict[tuple[int, int, frozenset[int]], Segment[int]] = {}
        self.alone: dict[tuple[frozenset[int], int], list[list[tuple[float, float]]]] = {}
        self.cuts = list(cuts)
        self.count = len(cuts) - 1
        self.block = np.zeros(len(graph.equations) + 1, dtype=int)
        for b in range(self.count):
            self.block[cuts[b] : cuts[b + 1]] = b
        self.ranges = [(cuts[b], cuts[b + 1]) for b in range(self.count)]
        self.forward = np.array([sum(self.work[lo:hi]) for lo, hi in self.ranges])
        flowing = [self.cotangents(lo, hi) for lo, hi in self.ranges]
        self.flowing, self.flow_first, self.flow_last, self.flow_alone = np.array(flowing).T
        self.producers = [t.producer for t in graph.tensors]
        # A block without a region saves those of its arrays in memory that some derivative reads.
        keep = plain_keeps(graph, 0, len(graph.equations))
        own = [float(graph.made_outside[lo:hi].sum()) for lo, hi in self.ranges]
        level = self.level(frozenset(t for t in keep if self.producers[t] >= 0))
        self.plain = np.array(own) + level.kept
        self.plain_out = level.out

    @functools.cached_property
    def scans(self) -> np.ndarray:
        """Whether each block contains a scan."""
        equations = self.graph.equations
        return np.array([any(e.loop for e in equations[lo:hi]) for lo, hi in self.ranges])

    @functools.cached_property
    def needs(self) -> list[list[int]]:
        """For each block, the arrays that its derivatives read."""
        parts = (self.graph.equations[lo:hi] for lo, hi in self.ranges)
        return [list(dict.fromkeys(t for e in part for t in e.needs)) for part in parts]

    @functools.cached_property
    def written(self) -> list[list[tuple[int, int]]]:
        """For each equation, the arrays that a recompute writes to memory for some derivative.

        Each array comes with its bytes.
        """
        tensors = self.graph.tensors
        sizes = {s: tensors[s].bytes for t in self.graph.residuals for s in tensors[t].sources}
        return [[(t, sizes[t]) for t in e.makes if t in sizes] for e in self.graph.equations]

    @functools.cached_property
    def made(self) -> list[int]:
        """For each block, the bytes of the residuals that its derivatives make in a region."""
        parts = (self.graph.equations[lo:hi] for lo, hi in self.ranges)
        return [sum(e.made_in_memory for e in part if e.loop is None) for part in parts]

    @functools.cached_property
    def plain_last(self) -> dict[int, int]:
        """For each array, the last block that reads it in its derivative when in no region."""
        parts = (plain_keeps(self.graph, lo, hi) for lo, hi in self.ranges)
        return {t: b for b, part in enumerate(parts) for t in part}

    @functools.cached_property
    def crossing(self) -> list[tuple[int, int, int]]:
        """The arrays that cross cuts: (tensor, block that makes it, last block that reads it)."""
        arrays = []
        for t in self.graph.tensors:
            if t.producer >= 0 and t.users and t.bytes:
                first, last = int(self.block[t.producer]), int(self.block[t.users[-1]])
                if last > first:
                    arrays.append((t.index, first, last))
        return arrays

    def cotangents(self, lo: int, hi: int) -> tuple[int, int, int, int]:
        """Return the most bytes of cotangents that are live during the backward pass of a block.

        The four figures are for a block in the middle of a region, for its first block, for its
        last block and for its only block. They differ because cotangents that the compiler would
        otherwise fuse are written to memory where a region begins or ends.
        """
        graph = self.graph
        after, begins = graph.arriving(hi), graph.arriving(lo).begins
        ending = after.fused_bytes
        begun = sum(size for i, size in begins.items() if i >= hi)
        found = [0, 0, 0, 0]
        for i in range(hi - 1, lo - 1, -1):
            begun += begins.get(i, 0)
            within = graph.flowing_bytes[i + 1] + graph.begun_bytes[i] + graph.standing_bytes[i]
            within += graph.equations[i].working_bytes
            cases = (within, within + begun, within + ending, within + begun + ending)
            found = [max(*pair) for pair in zip(found, cases, strict=True)]
            ending -= after.fused.get(i, 0)
        return found[0], found[1], found[2], found[3]

    @functools.cached_property
    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Cotangents written only because a region begins or ends, in bytes per other block.

        The first array holds at ``[s, b]`` the bytes live in block b of a region that begins with
        block s. The second holds at ``[j, b]`` those of a region that ends with block j.
        """
        first, last = np.zeros((2, self.count, self.count))
        for b in range(self.count):
            for read, size in self.graph.arriving(self.cuts[b]).begins.items():
                first[b, b + 1 : self.block[read] + 1] += size
            for made, size in self.graph.arriving(self.cuts[b + 1]).fused.items():
                last[b, self.block[made] : b] += size
        return first, last

    def level(self, keep: frozenset[int]) -> Level:
        """Return the bytes that follow for each block if a set of arrays is saved."""
        found = self.levels.get(keep)
        if found is None:
            found = self.levels[keep] = self._level(keep)
        return found

    def _level(self, keep: frozenset[int]) -> Level:
        tensors, k = self.graph.tensors, self.count
        kept, out, spared = np.zeros(k), np.zeros((k, k)), np.zeros((k, k))
        for t in keep:
            kept[self.block[tensors[t].producer]] += tensors[t].bytes
        for t, first, last in self.crossing:
            if t not in keep:
                out[first, first:last] += tensors[t].bytes
                if all(self.plain_last.get(s, 0) < last for s in (t, *tensors[t].sources)):
                    spared[first, last - 1] += tensors[t].bytes
        # At [s, j]: the bytes made in blocks s..j and read after block j.
        out, spared = (np.triu(np.cumsum(x[::-1], axis=0)[::-1]) for x in (out, spared))
        return Level(keep, kept, out, spared)

    def region(self, first: int, last: int, keep: frozenset[int]) -> Segment[int]:
        """Return a region of some blocks that saves those arrays of a set that it makes."""
        lo, hi = self.cuts[first], self.cuts[last + 1]
        found = self.made_regions.get((lo, hi, keep))
        if found is None:
            save = frozenset(t for t in keep if lo <= self.producers[t] < hi)
            found = self.made_regions[lo, hi, keep] = Segment(lo, hi, save=save)
        return found

    def reach(self, keep: frozenset[int]) -> list[int]:
        """Return, for each equation, the equations that must run to recompute its results.

        Each entry has one bit per equation, the equation itself included. The arrays of ``keep``
        are saved, so nothing runs again to make them.
        """
        rerun: list[int] = []
        for i, e in enumerate(self.graph.equations):
            bits = 1 << i
            for t in e.reads:
                if t not in keep and self.producers[t] >= 0:
                    bits |= rerun[self.producers[t]]
            rerun.append(bits)
        return rerun

    @functools.cached_property
    def reach_from_nothing(self) -> list[int]:
        """The result of `reach` if nothing is saved."""
        return self.reach(frozenset())

    def making(self, block: int, arrays: Iterable[int]) -> float:
        """Return the work in a block to make those of some arrays that the block makes."""
        made = (p for p in map(self.producers.__getitem__, arrays) if self.block[p] == block)
        bits = _union(self.reach_from_nothing[p] for p in made if p >= 0)
        return float(self.sums([bits], block, block, self.work)[0])

    def sums(self, masks: Sequence[int], first: int, last: int, amounts: np.ndarray) -> np.ndarray:
        """Return, for each mask, the sum of the amounts of its equations in some blocks.

        Args:
            masks: sets of equations, with one bit per equation.
            first: the first block.
            last: the last block.
            amounts: one amount, or one row of amounts, for each equation.
        """
        lo, count = self.cuts[first], self.cuts[last + 1] - self.cuts[first]
        size, within = (count + 7) // 8, (1 << count) - 1
        packed = b"".join(((bits >> lo) & within).to_bytes(size, "little") for bits in masks)
        rows = np.frombuffer(packed, dtype=np.uint8).reshape(len(masks), size)
        some = np.unpackbits(rows, axis=1, count=count, bitorder="little")
        return some @ amounts[lo : lo + count]

    def regions(self, level: Level, most: int = LONGEST) -> list[list[tuple[float, float]]]:
        """Return the bytes and the work of one region of blocks ``s..j``, indexed by s and j - s.

        The bytes are those that are live in the backward pass of the region, without the arrays
        that it saves. The work is that of its recompute. ``most`` is the maximum number of blocks.
        """
        found = self.alone.get((level.keep, most))
        if found is None:
            reach, keep = self.reach(level.keep), level.keep
            again = [
                _union(reach[self.producers[t]] for t in needs if self.producers[t] >= 0)
                for needs in ([t for t in needs if t not in keep] for needs in self.needs)
            ]
            written = [sum(size for t, size in some if t not in keep) for some in self.written]
            amounts = np.array([written, self.work]).T
            found = [list(self.merged(s, again, amounts, most)) for s in range(self.count)]
            self.alone[level.keep, most] = found
        return found

    def merged(
        self, first: int, again: Sequence[int], amounts: np.ndarray, most: int
    ) -> Iterator[tuple[float, float]]:
        """Yield the bytes and the work of one region of blocks ``first..j``, for each j.

        Args:
            first: the first block of the region.
            again: for each block, the equations that run again for its derivatives, with one bit
                per equation.
            amounts: for each equation, the bytes that it writes when it runs again, and its work.
            most: maximum number of blocks of a region.
        """
        stop = min(self.count, first + most)
        last = next((b for b in range(first, stop) if self.scans[b]), stop) - 1
        if last < first:
            return
        masks = list(itertools.accumulate(again[first : last + 1], operator.or_))
        begun, ended = self.edges
        peaks: list[float] = []
        made = 0.0
        for b, (built, work) in enumerate(self.sums(masks, first, last, amounts).tolist(), first):
            made += self.made[b]
            built += made + begun[first, b]
            peak = built + (self.flow_last if peaks else self.flow_alone)[b]
            others = ended[b, first:b]
            yield max([peak, *(peaks + others if others.any() else peaks)]), work
            peaks.append(built + (self.flowing if peaks else self.flow_first)[b])


def _exact(amounts: np.ndarray) -> np.ndarray:
    """Round amounts so that their sums are exact, and equal work compares as equal."""
    unit = 2.0 ** (math.frexp(amounts.sum())[1] - 40)
    return np.round(amounts / unit) * unit


def _union(masks: Iterable[int]) -> int:
    return functools.reduce(operator.or_, masks, 0)
