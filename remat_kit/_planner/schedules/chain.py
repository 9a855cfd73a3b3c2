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
>>> from remat_kit._planner.costs.build import trace
>>> def tower(weights, x):
...     for w in weights:
...         x = jnp.tanh(x @ w)
...     return jnp.sum(x)
>>> weights = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 4
>>> x = jax.ShapeDtypeStruct((2048, 512), jnp.float32)
>>> graph = trace(tower, (weights, x), target("h100"))
>>> chain = Chain(graph, [0, 2, 4, 6, 9])
>>> found = chain.regions(chain.level(frozenset()))
>>> [int(size) >> 20 for size in found.bytes[0, :4]]
[16, 20, 24, 28]
>>> [f"{work / graph.forward_seconds:.0%}" for work in found.work[0, :4]]
['27%', '53%', '80%', '94%']
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from remat_kit._planner.costs.graph import CostGraph
from remat_kit._planner.costs.simulate import closure, plain_keeps
from remat_kit._planner.schedules.mincut import TIME, Worth
from remat_kit._policy.schedule import Segment

# Maximum number of blocks of a region that contains no other region.
LONGEST = 16

# One bit for each number of blocks from the block of an equation to the last block of a region.
EVERY = (1 << LONGEST) - 1


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


class LevelRegions(NamedTuple):
    """The regions of consecutive blocks that save one level and contain no other region.

    The region of blocks ``s..s + d`` is at ``[s, d]``. At most `LONGEST` blocks form a region, and
    no region contains a scan.

    Attributes:
        bytes: bytes live in the backward pass of the region, without the arrays that it saves.
        work: the work of its recompute.
    """

    bytes: np.ndarray
    work: np.ndarray


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
        self.alone: dict[frozenset[int], LevelRegions] = {}
        self.cuts = list(cuts)
        self.count = len(cuts) - 1
        self.block = np.zeros(len(graph.equations) + 1, dtype=int)
        for b in range(self.count):
            self.block[cuts[b] : cuts[b + 1]] = b
        self.blocks = self.block.tolist()
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
    def lengths(self) -> list[int]:
        """For each block, the number of blocks of the longest region that begins with it."""
        found = [0] * (self.count + 1)
        for b in range(self.count - 1, -1, -1):
            found[b] = 0 if self.scans[b] else min(LONGEST, found[b + 1] + 1)
        return found[:-1]

    @functools.cached_property
    def needs(self) -> list[list[int]]:
        """For each block, the arrays that its derivatives read."""
        parts = (self.graph.equations[lo:hi] for lo, hi in self.ranges)
        return [list(dict.fromkeys(t for e in part for t in e.needs)) for part in parts]

    @functools.cached_property
    def wanted(self) -> dict[int, int]:
        """For each array, the regions whose derivatives read it, as bits for `again`."""
        first: dict[int, int] = {}
        for b, needs in enumerate(self.needs):
            for t in needs:
                first.setdefault(t, b)
        made = ((t, b, self.producers[t]) for t, b in first.items())
        after = ((t, b - self.blocks[producer]) for t, b, producer in made if producer >= 0)
        return {t: EVERY & (EVERY << d) for t, d in after if d < LONGEST}

    @functools.cached_property
    def written(self) -> dict[int, int]:
        """The bytes of each array that a recompute writes to memory for some derivative."""
        tensors = self.graph.tensors
        return {
            s: tensors[s].bytes
            for t in self.graph.residuals
            for s in tensors[t].sources
            if tensors[s].producer >= 0
        }

    @functools.cached_property
    def made(self) -> np.ndarray:
        """For each block, the bytes of the residuals that its derivatives make in a region."""
        parts = (self.graph.equations[lo:hi] for lo, hi in self.ranges)
        return np.array([sum(e.made_in_memory for e in p if e.loop is None) for p in parts], float)

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

    @functools.cached_property
    def read(self) -> list[list[tuple[int, int, int]]]:
        """The arrays that each equation reads and that a region can make again.

        Each entry has the array, the equation that makes it, and the number of blocks between that
        equation and the reader.
        """
        found: list[list[tuple[int, int, int]]] = []
        for i, e in enumerate(self.graph.equations):
            made = ((t, self.producers[t]) for t in e.reads)
            apart = ((t, p, self.blocks[i] - self.blocks[p]) for t, p in made if p >= 0)
            found.append([(t, p, d) for t, p, d in apart if d < LONGEST])
        return found

    def again(self, keep: frozenset[int], wanted: Iterable[tuple[int, int]]) -> np.ndarray:
        """Return which regions run each equation again to make some arrays.

        A walk from an array to what it is made of only goes back in the program. Therefore it
        depends on the last block of a region, but not on the first one, whether the region runs an
        equation again. An equation in block b has one bit for each last block ``b + d``. This takes
        the same memory for each equation, while the set of all equations that lead to it grows with
        the program.

        Args:
            keep: saved arrays, for which nothing runs again.
            wanted: pairs of an array and of the regions that need it: bit d is for those that end d
                blocks after the block of its producer.

        Returns:
            Booleans, at ``[i, d]`` for equation i and the regions that end d blocks after its own.
        """
        bits = [0] * len(self.graph.equations)
        for t, some in wanted:
            bits[self.producers[t]] |= some
        read = self.read
        for i in range(len(bits) - 1, -1, -1):
            if some := bits[i]:
                for t, producer, apart in read[i]:
                    if t not in keep:
                        bits[producer] |= some << apart & EVERY
        packed = np.array(bits, dtype="<u2").view(np.uint8).reshape(-1, 2)
        return np.unpackbits(packed, axis=1, bitorder="little").view(bool)

    def sums(self, again: np.ndarray, amounts: np.ndarray) -> np.ndarray:
        """Return the sum of the amounts of all equations that each region runs again.

        Args:
            again: the equations, as `again` returns them.
            amounts: one amount for each equation.

        Returns:
            The sums, at ``[s, d]`` for the region of blocks ``s..s + d``.
        """
        each = np.where(again, amounts[:, None], 0.0)
        found = np.add.reduceat(each, self.cuts[:-1], axis=0)  # for each block and last block
        for d in range(1, min(LONGEST, self.count)):
            found[:-d, d] += found[1 : self.count - d + 1, d - 1]
        return found

    def making(self, block: int, arrays: Iterable[int]) -> float:
        """Return the work in a block to make those of some arrays that the block makes."""
        lo, hi = self.ranges[block]
        made = [t for t in arrays if lo <= self.producers[t] < hi]
        return float(self.work[list(closure(self.graph, made, frozenset(), lo, hi).again)].sum())

    def regions(self, level: Level) -> LevelRegions:
        """Return the bytes and the work of the regions that save a level."""
        found = self.alone.get(level.keep)
        if found is None:
            keep, written = level.keep, np.zeros(len(self.work))
            for t, size in self.written.items():
                if t not in keep:
                    written[self.producers[t]] += size
            wanted = ((t, bits) for t, bits in self.wanted.items() if t not in keep)
            again = self.again(keep, wanted)
            peaks = self.peaks(self.sums(again, written))
            found = self.alone[keep] = LevelRegions(peaks, self.sums(again, self.work))
        return found

    def peaks(self, written: np.ndarray) -> np.ndarray:
        """Return the bytes that are live in the backward pass of each region.

        Args:
            written: the bytes that each region writes when it runs again, at ``[s, d]``.
        """
        begun, ended = self.edges_by_region
        made = np.concatenate([[0.0], np.cumsum(self.made)])
        s = np.arange(self.count)[:, None]
        b = np.minimum(s + np.arange(LONGEST), self.count - 1)
        built = written + (made[b + 1] - made[s]) + begun
        last, inner = self.flow_last[b], self.flowing[b]
        last[:, 0], inner[:, 0] = self.flow_alone, self.flow_first
        # While the derivatives of one of its earlier blocks run, a region ends with a later block.
        earlier = (built + inner)[:, None, :] + ended
        return np.maximum(built + last, earlier.max(axis=-1))

    @functools.cached_property
    def edges_by_region(self) -> tuple[np.ndarray, np.ndarray]:
        """The figures of `edges` for the regions of `regions`.

        The first array holds them at ``[s, d]`` for block ``s + d`` of a region that begins with
        block s. The second holds at ``[s, d, e]`` those for block ``s + e`` of a region that ends
        with block ``s + d``, and minus infinity if that block is not before the last one.
        """
        first, last = self.edges
        k, steps = self.count, np.arange(LONGEST)
        s = np.arange(k)[:, None]
        at = s + steps
        begun = np.where(at < k, first[s, np.minimum(at, k - 1)], 0.0)
        j, b = np.minimum(at, k - 1)[:, :, None], np.minimum(at, k - 1)[:, None, :]
        inside = (steps[None, :] < steps[:, None]) & (at < k)[:, :, None]
        return begun, np.where(inside, last[j, b], -np.inf)


def _exact(amounts: np.ndarray) -> np.ndarray:
    """Round amounts so that their sums are exact, and equal work compares as equal."""
    unit = 2.0 ** (math.frexp(amounts.sum())[1] - 40)
    return np.round(amounts / unit) * unit
