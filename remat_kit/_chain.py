"""A graph condensed into a chain of blocks, and the schedules that put its blocks together best.

The program is cut where few bytes are alive. A dynamic program over the chain then puts blocks
together: some blocks in no region; one region over some blocks that keeps what one of its levels
says; a region around such regions that holds what they keep (so that what lies between them is
rebuilt late and dropped early) or drops it (the recursion of Beaumont et al., "Optimal
checkpointing for heterogeneous chains", 2019, whose special case for equal steps is Griewank's
binomial schedule). The chain is only a model: what it proposes has to be simulated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from remat_kit._cost import CostGraph
from remat_kit._cut import TIME, Worth
from remat_kit._simulate import (
    LoopPlan,
    Segment,
    closure,
    loop_cost,
    plain_keeps,
)

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
    rebuild: np.ndarray  # work to rebuild what the block's derivative needs
    pass_on: np.ndarray  # work to rebuild what the block hands on
    rebuilt: np.ndarray  # bytes that the rebuild writes and the derivative reads
    out: np.ndarray  # [s, j]: bytes made in blocks s..j, not kept, that later blocks read
    spared: np.ndarray  # [s, j]: those of them that block j + 1 alone reads, not as a residual


class Chain:
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

    def cotangents(self, lo: int, hi: int) -> int:
        """The most bytes of cotangents alive while the backward pass goes through a block."""
        graph = self.graph
        return max(
            graph.flowing_bytes[i + 1]
            + graph.begun_bytes[i]
            + graph.equations[i].working_bytes
            + graph.standing_bytes[i]
            for i in range(lo, hi)
        )

    def level(self, keep: frozenset[int]) -> Level:
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
        out, spared = np.zeros((k, k)), np.zeros((k, k))
        for t, first, last in self.crossing:
            if t not in keep:
                out[first, first:last] += graph.tensors[t].bytes
                if all(self.plain_last.get(s, 0) < last for s in (t, *graph.tensors[t].sources)):
                    spared[first, last - 1] += graph.tensors[t].bytes
        # [s, j]: made in s..j and read after j.
        out, spared = (np.triu(np.cumsum(x[::-1], axis=0)[::-1]) for x in (out, spared))
        return Level(keep, kept, rebuild, pass_on, rebuilt, out, spared)

    def merged(self, level: Level, first: int) -> Iterator[tuple[float, float]]:
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


class _Item(NamedTuple):
    """Some consecutive blocks treated alike, as the chain sees them.

    ``form`` is "plain", "leaf" (one region), "hold" or "drop" (a region around one region per
    block), "nest" (a region that drops, around whatever the recursion finds best) or "loop".
    ``kept`` bytes are there while later blocks are differentiated, ``stay`` of them and ``working``
    others while these are: what was only handed on is free by then. If no region comes next,
    ``spared`` of the bytes kept are not: what the next block makes of them is kept there.
    """

    first: int
    last: int
    form: str
    level: int
    kept: float
    stay: float
    working: float
    work: float
    spared: float = 0.0

    def slots(self, size: float) -> tuple[int, int]:
        """Return the slots of memory kept, and the slots that the item needs in all."""
        kept, stay = self.rounded(self.kept, size), self.rounded(self.stay, size)
        return kept, max(kept, stay + math.ceil(self.working / size))

    def ways(self) -> list[tuple[_Item, int]]:
        """Return what it is before a region (1) and before what is in none (0)."""
        if self.form == "plain":  # two of them are one
            return [(self, 1)]
        less = self._replace(kept=self.kept - self.spared) if self.spared else self
        return [(self, 1), (less, 0)]

    def rounded(self, amount: float, size: float) -> int:
        """Return an amount in slots, up or down by turns over the blocks, so that errors of equal
        blocks do not add up.
        """
        return math.floor(amount / size + (self.first * _GOLDEN) % 1)


_LONGEST = 16
_GOLDEN = (math.sqrt(5) - 1) / 2


class Composer:
    def __init__(
        self,
        chain: Chain,
        levels: Sequence[Level],
        loops: dict[int, list[LoopPlan]],
        host_bandwidth: float = math.inf,
    ):
        self.chain = chain
        self.levels = levels
        self.loops = loops
        self.host_bandwidth = host_bandwidth
        self.parts: dict[tuple[int, int, int], frozenset[int]] = {}
        self.handed_on = chain.level(frozenset()).out

    @functools.cached_property
    def items(self) -> list[list[tuple[_Item, int]]]:
        """The items of a few blocks that are worth having, as `ways`, by their first block."""
        chain = self.chain
        k = chain.count
        found: list[list[_Item]] = [[] for _ in range(k)]
        for b in range(k):
            if chain.scans[b]:
                found[b] += self.loop_items(b)
            found[b] += _plain_items(chain, b)
        for number, level in enumerate(self.levels):
            for s in range(k):
                if not chain.scans[s]:
                    found[s] += self.group_items(number, level, s)
        return [[w for item in _undominated(options) for w in item.ways()] for options in found]

    def group_items(self, number: int, level: Level, s: int) -> list[_Item]:
        chain = self.chain
        found = []
        kept = work = between = 0.0
        merged_peak = grouped_peak = dropped_peak = 0.0
        inner = held = 0.0
        for j, (built, again) in zip(range(s, chain.count), chain.merged(level, s), strict=False):
            out = level.out[s, j]
            spared = level.spared[s, j]
            kept += level.kept[j]
            work += level.rebuild[j]
            # One region over all: what it rebuilds is there at once.
            merged_peak = max(merged_peak, built + chain.flowing[j])
            both = kept + out, kept
            found.append(_Item(s, j, "leaf", number, *both, merged_peak, again, spared))
            # A region around one per block: what they hand on is there at once, and the rest late.
            held += level.kept[j]
            grouped_peak = max(grouped_peak, inner + level.rebuilt[j] + chain.flowing[j])
            dropped_peak = max(dropped_peak, inner + held + level.rebuilt[j] + chain.flowing[j])
            if j > s:
                extra = work + between
                found.append(_Item(s, j, "hold", number, *both, grouped_peak, extra, spared))
                extra = chain.forward[s : j + 1].sum() + work
                out = self.handed_on[s, j]  # what it keeps inside is handed on too
                found.append(_Item(s, j, "drop", number, out, 0.0, dropped_peak, extra))
            inner += level.out[j, j]
            between += level.pass_on[j]
        return found

    def loop_items(self, b: int) -> list[_Item]:
        (scan,) = [e for e in self.chain.graph.equations[slice(*self.chain.ranges[b])] if e.loop]
        assert scan.loop is not None
        found = []
        for number, plan in enumerate(self.loops.get(scan.index, ())):
            cost = loop_cost(scan.loop, plan, self.host_bandwidth)
            stay = float(self.chain.plain[b]) - scan.made_in_memory + cost.saved_bytes
            found.append(
                _Item(
                    b,
                    b,
                    "loop",
                    number,
                    stay + float(self.chain.plain_out[b, b]),
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
        # By the block and by whether a region comes next (1) or none (0).
        best = np.full((k + 1, 2, slots + 1), np.inf)
        best[k] = 0.0
        choice = np.full((k, 2, slots + 1), -1, dtype=int)
        chosen: list[list[tuple[_Item, int]]] = []
        memory = np.arange(slots + 1)
        for t in range(k - 1, -1, -1):
            options = [*items[t], *(way for item in nested[t] for way in item.ways())]
            chosen.append(options)
            for number, (item, follower) in enumerate(options):
                kept, need = item.slots(size)
                if need > slots:
                    continue
                value = item.work + best[item.last + 1][follower][memory[need:] - kept]
                if item.form == "nest":
                    inside = memory[need:] - item.rounded(item.stay, size)
                    value += self.inner[(item.first, item.last)][inside]
                known, numbers = (x[t][int(item.form != "plain")][need:] for x in (best, choice))
                better = value < known * (1 - 1e-9)
                known[better] = value[better]
                numbers[better] = number
        chosen.reverse()
        found: dict[tuple[Segment, ...], None] = {}
        previous = math.inf
        for m in range(slots + 1):
            least = best[0][:, m].min()
            if not math.isfinite(least) or least >= previous * (1 - 1e-6) - 1e-15:
                continue
            previous = least
            found[self.schedule(choice, chosen, int(best[0][:, m].argmin()), m, size)] = None
        return list(found)

    def schedule(
        self,
        choice: np.ndarray,
        chosen: list[list[tuple[_Item, int]]],
        region: int,
        m: int,
        size: float,
    ) -> tuple[Segment, ...]:
        t, parts = 0, []
        while t < self.chain.count:
            item, follower = chosen[t][choice[t][region][m]]
            kept, _ = item.slots(size)
            parts += self.segment(item, m)
            m, t, region = m - kept, item.last + 1, follower
        return joined(tuple(parts))

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
        out = self.handed_on
        singles: list[list[_Item]] = []
        for b in range(k):
            options = [next(_plain_items(chain, b))]
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
                        item = item._replace(kept=item.stay)
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
                    found[s].append(_Item(s, t, "nest", -1, float(out[s, t]), 0.0, 0.0, again))
        return found

    def backtrack(self, s: int, t: int, room: int) -> tuple[Segment, ...]:
        cuts, parts = self.chain.cuts, []
        size = self.size
        while s <= t:
            pick = int(self.inner_choice[(s, t)][room])
            if pick >= 1000:
                j = pick - 1000
                inside = self.backtrack(s, j, room)
                room -= round(self.handed_on[s, j] / size)
                parts.append(Segment(cuts[s], cuts[j + 1], inside=inside, hold=False))
                s = j + 1
                continue
            item = self.inner_options[s][pick]
            parts += self.segment(item, room)
            room -= item.rounded(item.kept if s < t else item.stay, size)
            s += 1
        return joined(tuple(parts))

    size = 1.0


def _plain_items(chain: Chain, first: int) -> Iterator[_Item]:
    """Yield blocks ``first..j`` without a region, for each j: between them nothing is handed on but
    what their derivatives read.
    """
    stay = need = 0.0
    for j in range(first, chain.count):
        stay += float(chain.plain[j])
        need = max(need, stay + chain.flowing[j])
        kept = stay + float(chain.plain_out[first, j])
        yield _Item(first, j, "plain", -1, kept, stay, need - stay, 0.0)


def _undominated(items: Sequence[_Item]) -> list[_Item]:
    """Leave out items that take no less of anything than another over the same blocks."""
    found: list[_Item] = []
    by_last: dict[int, list[tuple[float, float, float]]] = {}
    for item in sorted(items, key=lambda i: (i.work, i.kept, i.working)):
        others = by_last.setdefault(item.last, [])
        # Before a region, before what is in none, by itself.
        kept, less, used = item.kept, item.kept - item.spared, item.stay + item.working
        if any(a <= kept and b <= less and c <= used for a, b, c in others):
            continue
        others.append((kept, less, used))
        found.append(item)
    return found


def joined(parts: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Put neighbours that have no region together."""
    found: list[Segment] = []
    for part in parts:
        if part.plain and found and found[-1].plain:
            last = found.pop()
            part = Segment(last.start, part.stop, plain=True, loops=(*last.loops, *part.loops))
        found.append(part)
    return tuple(found)
