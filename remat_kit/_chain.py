"""A graph condensed into a chain of blocks, and what regions over its blocks take.

The program is cut where few bytes are alive. For each of some sets of arrays to keep (a `Level`)
the chain knows, block by block, what is kept, what crosses to later blocks, and what a region over
any few blocks rebuilds. `_compose.py` puts schedules together from that. The chain is only a model:
what it proposes has to be simulated.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from remat_kit._cost import CostGraph
from remat_kit._cut import TIME, Worth
from remat_kit._simulate import Segment, plain_keeps

# The most blocks that one region is around, where it is not around regions.
LONGEST = 16

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
    scans = [e.index for e in graph.equations if e.loop is not None]
    return {0, len(graph.equations), *scans, *(i + 1 for i in scans)}


def _uncovered(graph: CostGraph, keep: frozenset[int]) -> np.ndarray:
    """Bytes that cross each position and are not kept."""
    steps = np.zeros(len(graph.equations) + 2)
    for t in map(graph.tensors.__getitem__, keep):
        if t.producer >= 0 and t.users and t.users[-1] > t.producer:
            steps[t.producer + 1] -= t.bytes
            steps[t.users[-1] + 1] += t.bytes
    return np.array(graph.live_bytes) + np.cumsum(steps)[:-1]


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


def coarser(
    graph: CostGraph, cuts: list[int], keeps: Sequence[frozenset[int]], most: int = 40
) -> list[int]:
    """Cuts for larger blocks: those where the fewest bytes are alive."""
    forced = _forced(graph)
    if len(cuts) <= most:
        return sorted(forced | set(cuts[::2]))
    chosen = _spread(graph, [c for c in cuts if c not in forced], most, keeps)
    return sorted(forced | set(chosen))


def unbroken(graph: CostGraph, cuts: Sequence[int]) -> list[int]:
    """Leave out the cuts where most of the cotangents that cross are written for the cut alone.

    Within a stretch the compiler fuses them into what reads them, such as that of the logits. A
    chain adds up its blocks, and does not see that two of them take less as one.
    """
    forced = _forced(graph)
    arriving = ((p, graph.arriving(p)) for p in cuts)
    return [p for p, a in arriving if p in forced or 2 * a.fused_bytes <= sum(a.ends.values())]


@dataclasses.dataclass(frozen=True)
class Level:
    """What is kept at one price, and what that means block by block (arrays over blocks)."""

    keep: frozenset[int]
    kept: np.ndarray  # bytes kept inside the block
    out: np.ndarray  # [s, j]: bytes made in blocks s..j, not kept, that later blocks read
    spared: np.ndarray  # [s, j]: those of them that block j + 1 alone reads, not as a residual


class Chain:
    """A graph condensed at its cuts, with the levels of each block."""

    def __init__(self, graph: CostGraph, cuts: Sequence[int], worth: Worth = TIME):
        self.graph = graph
        self.worth = worth
        self.work = _exact(np.array(worth.equations(graph)))
        self.levels: dict[frozenset[int], Level] = {}
        self.made_regions: dict[tuple[int, int, frozenset[int]], Segment] = {}
        self.alone: dict[tuple[frozenset[int], int], list[list[tuple[float, float]]]] = {}
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
        flowing = [self.cotangents(lo, hi) for lo, hi in self.ranges]
        self.flowing, self.flow_first, self.flow_last, self.flow_alone = np.array(flowing).T
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
        # The last block whose derivative reads an array where no region is.
        self.plain_last = {
            t: b for b, part in enumerate(self.ranges) for t in plain_keeps(graph, *part)
        }
        # Without regions, an array in memory that some derivative reads is kept where it is made.
        keep = plain_keeps(graph, 0, len(graph.equations))
        own = [float(graph.made_outside[lo:hi].sum()) for lo, hi in self.ranges]
        level = self.level(frozenset(t for t in keep if graph.tensors[t].producer >= 0))
        self.plain = np.array(own) + level.kept
        self.plain_out = level.out

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

    def cotangents(self, lo: int, hi: int) -> tuple[int, int, int, int]:
        """The most bytes of cotangents alive while the backward pass goes through a block: in the
        midst of a region, as its first block, as its last, as all of it. Those that the compiler
        would fuse are written down where a region begins or ends.
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
        """Bytes of cotangents that are written down where a region begins or ends, in its other
        blocks: [s, b], in block b of one that begins with s; [j, b], of one that ends with j.
        """
        first, last = np.zeros((2, self.count, self.count))
        for b in range(self.count):
            for read, size in self.graph.arriving(self.cuts[b]).begins.items():
                first[b, b + 1 : self.block[read] + 1] += size
            for made, size in self.graph.arriving(self.cuts[b + 1]).fused.items():
                last[b, self.block[made] : b] += size
        return first, last

    def level(self, keep: frozenset[int]) -> Level:
        """Return what it means block by block to keep a set of arrays."""
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
        # [s, j]: made in s..j and read after j.
        out, spared = (np.triu(np.cumsum(x[::-1], axis=0)[::-1]) for x in (out, spared))
        return Level(keep, kept, out, spared)

    def region(self, first: int, last: int, keep: frozenset[int]) -> Segment:
        """Return a region over some blocks that keeps what is made there of a set."""
        lo, hi = self.cuts[first], self.cuts[last + 1]
        found = self.made_regions.get((lo, hi, keep))
        if found is None:
            save = frozenset(t for t in keep if lo <= self.producers[t] < hi)
            found = self.made_regions[lo, hi, keep] = Segment(lo, hi, save=save)
        return found

    def reach(self, keep: frozenset[int]) -> list[int]:
        """For each equation, all that runs again for it, itself too, where a set is kept: a bit
        for each equation.
        """
        found: list[int] = []
        for i, reads in enumerate(self.reads):
            bits = 1 << i
            for t in reads:
                if t not in keep and self.producers[t] >= 0:
                    bits |= found[self.producers[t]]
            found.append(bits)
        return found

    @functools.cached_property
    def reach_from_nothing(self) -> list[int]:
        """`reach` where nothing is kept."""
        return self.reach(frozenset())

    def making(self, block: int, arrays: Iterable[int]) -> float:
        """Return the work in a block for those of some arrays that it makes."""
        made = (p for p in map(self.producers.__getitem__, arrays) if self.block[p] == block)
        bits = _union(self.reach_from_nothing[p] for p in made if p >= 0)
        return float(self.sums([bits], block, block, self.work)[0])

    def sums(self, masks: Sequence[int], first: int, last: int, amounts: np.ndarray) -> np.ndarray:
        """Add up amounts of those equations that are in some blocks, for each of some masks with a
        bit for each equation.
        """
        lo, count = self.cuts[first], self.cuts[last + 1] - self.cuts[first]
        size, within = (count + 7) // 8, (1 << count) - 1
        packed = b"".join(((bits >> lo) & within).to_bytes(size, "little") for bits in masks)
        rows = np.frombuffer(packed, dtype=np.uint8).reshape(len(masks), size)
        some = np.unpackbits(rows, axis=1, count=count, bitorder="little")
        return some @ amounts[lo : lo + count]

    def regions(self, level: Level, most: int = LONGEST) -> list[list[tuple[float, float]]]:
        """What one region over blocks ``s..j`` takes, by s and then j, for so many blocks at most:
        the bytes that it needs beside what it keeps, and the work that it does again.
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
        """Yield what one region over blocks ``first..j`` takes, for each j.

        Args:
            first: the block that it begins with.
            again: what runs again for the derivatives of each block, a bit for each equation.
            amounts: the bytes that each equation writes once more, and its work.
            most: blocks of a region.
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
    """Round amounts so that sums of them are exact: what takes the same is equal then."""
    unit = 2.0 ** (math.frexp(amounts.sum())[1] - 40)
    return np.round(amounts / unit) * unit


def _union(masks: Iterable[int]) -> int:
    return functools.reduce(operator.or_, masks, 0)
