"""The schedules that put the blocks of a chain together best, for every amount of memory.

`Composer` is a dynamic program over a `Chain`. Consecutive blocks are in no region; in one region
that keeps what one of the chain's levels says; in a region that keeps what a level says around
regions that keep more once it has run again (`Layer`), so that little is held through the forward
pass and little is done a third time; or in a region that keeps nothing around whatever the
recursion finds best (Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019, whose
special case for equal steps is Griewank's binomial schedule).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from remat_kit._chain import Chain, Level
from remat_kit._simulate import LoopPlan, Segment, loop_cost

_GOLDEN = (math.sqrt(5) - 1) / 2


def _rounded(amount: float, size: float, first: int) -> int:
    """Return an amount in slots, up or down by turns over the blocks, so that errors of equal
    blocks do not add up.
    """
    return math.floor(amount / size + (first * _GOLDEN) % 1)


def _improve(known: np.ndarray, picked: np.ndarray, work: float | np.ndarray, choice: int) -> None:
    """Take what is less than the least work known, and note which choice it was."""
    better = work < known
    if better.any():
        np.copyto(known, work, where=better)
        np.copyto(picked, choice, where=better)


class _Choice(Protocol):
    """What is done with some blocks, of which the last is known, and what it takes."""

    @property
    def last(self) -> int: ...

    @property
    def work(self) -> float: ...

    def takes(self) -> tuple[float, ...]: ...


_C = TypeVar("_C", bound=_Choice)


def _undominated(choices: Sequence[_C]) -> list[_C]:
    """Leave out choices that take no less of anything than another for the same blocks."""
    found: list[_C] = []
    by_last: dict[int, list[tuple[float, ...]]] = {}
    for choice in sorted(choices, key=lambda c: (c.work, *c.takes())):
        others, takes = by_last.setdefault(choice.last, []), choice.takes()
        if not any(all(map(operator.le, other, takes)) for other in others):
            others.append(takes)
            found.append(choice)
    return found


# -- a region that keeps one level, around regions that keep more ---------------------------------

# Blocks: of a region inside of another, and of that one.
_INNER, _OUTER = 8, 24


class _Part(NamedTuple):
    """One region inside of another, from a known block to ``last``.

    Bytes are beside those that the outer region keeps: ``kept`` while later blocks are
    differentiated, ``stay`` of them and ``working`` others while these are. ``work`` is its own and
    what the outer region does to make what this one keeps and hands on; ``less`` is without what
    it hands on.
    """

    last: int
    kept: float
    stay: float
    working: float
    work: float
    less: float
    keep: frozenset[int]

    def takes(self) -> tuple[float, ...]:
        return self.kept, self.stay + self.working, self.less

    def need(self, kept: int, size: float, first: int) -> int:
        """Return the slots that it needs in all."""
        return max(kept, _rounded(self.stay, size, first) + math.ceil(self.working / size))


class Layer:
    """Regions that keep one level of a chain, each around regions that keep more.

    The outer region is rebuilt once from what it keeps; the inner ones then find what they keep and
    what comes in, and rebuild the rest one after the other.

    Args:
        chain: of the program.
        level: what the outer regions keep.
        more: sets that inner regions keep beside it, one of them each.
    """

    def __init__(self, chain: Chain, level: Level, more: Sequence[frozenset[int]]):
        self.chain = chain
        self.level = level
        parts: list[list[_Part]] = [[] for _ in range(chain.count)]
        reach = chain.reach(level.keep)
        handed = self.handed(reach)
        for keep in dict.fromkeys(level.keep | extra for extra in more):
            finer = chain.level(keep)
            for s, some in enumerate(self.parts_of(finer, reach, handed)):
                parts[s] += some
        self.parts = [_undominated(some) for some in parts]

    def handed(self, reach: Sequence[int]) -> list[list[int]]:
        """What runs again for what blocks ``s..j`` hand on, by s and then j."""
        chain = self.chain
        ends: list[list[tuple[int, int]]] = [[] for _ in range(chain.count)]
        for t, first, last in chain.crossing:
            if t not in self.level.keep:
                ends[first].append((last, reach[chain.producers[t]]))
        found: list[list[int]] = [[0] * _INNER for _ in range(chain.count)]
        for j in range(chain.count):
            bits = 0
            for s in range(j, max(-1, j - _INNER), -1):
                for last, some in ends[s]:
                    if last > j:
                        bits |= some
                found[s][j - s] = bits
        return found

    def parts_of(
        self, finer: Level, reach: Sequence[int], handed: Sequence[Sequence[int]]
    ) -> Iterator[list[_Part]]:
        """Yield the regions that begin with each block and keep one level."""
        chain = self.chain
        own = [0] * chain.count
        for t in finer.keep - self.level.keep:
            own[chain.block[chain.producers[t]]] |= reach[chain.producers[t]]
        more = finer.kept - self.level.kept
        for s, regions in enumerate(chain.regions(finer, _INNER)):
            found = []
            if regions:  # none begins with a scan
                last = s + len(regions) - 1
                bits = list(itertools.accumulate(own[s : last + 1], operator.or_))
                masks = [*bits, *map(operator.or_, bits, handed[s])]
                keeping, handing = chain.sums(masks, s, last, chain.work).reshape(2, -1).tolist()
                stay = np.cumsum(more[s : last + 1]).tolist()
                for n, (working, again) in enumerate(regions):
                    kept = stay[n] + float(finer.out[s, s + n])
                    work, less = again + handing[n], again + keeping[n]
                    part = _Part(s + n, kept, stay[n], working, work, less, finer.keep)
                    found.append(part)
            yield found

    def solve(self, size: float, found: np.ndarray) -> None:
        """Find the least work for any blocks and any memory beside what the outer region keeps.

        Args:
            size: of a slot, in bytes.
            found: is filled with the work, by the first block, by how many come after it and by
                slots.
        """
        k, slots = self.chain.count, found.shape[-1] - 1
        self.size, self.value = size, found
        self.value.fill(np.inf)
        self.pick = np.empty(found.shape, dtype=np.int16)
        for s in range(k - 1, -1, -1):
            value, pick = self.value[s], self.pick[s]
            for place, part in enumerate(self.parts[s]):
                length = part.last - s
                need = part.need(0, size, s)
                if need <= slots and part.less < value[length, need]:
                    _improve(value[length, need:], pick[length, need:], part.less, place)
                kept = _rounded(part.kept, size, s)
                need = part.need(kept, size, s)
                rest = min(_OUTER - 1 - length, k - 1 - part.last)
                if need <= slots and rest > 0:
                    ahead = self.value[part.last + 1, :rest, need - kept : slots + 1 - kept]
                    later = slice(length + 1, length + 1 + rest), slice(need, None)
                    _improve(value[later], pick[later], ahead + part.work, place)

    def lasts(self, first: int) -> Iterator[int]:
        """Yield the last blocks of the outer regions that begin with one and can be had."""
        for length in range(1, min(_OUTER, self.chain.count - first)):
            if math.isfinite(self.value[first, length, -1]):
                yield first + length

    def segment(self, first: int, last: int, room: int) -> Segment:
        """Return the outer region over some blocks that is best for so many slots of memory."""
        chain = self.chain
        inside, s = [], first
        while s <= last:
            part = self.parts[s][self.pick[s, last - s, room]]
            inside.append(chain.region(s, part.last, part.keep))
            room -= _rounded(part.kept if part.last < last else part.stay, self.size, s)
            s = part.last + 1
        outer = chain.region(first, last, self.level.keep)
        return dataclasses.replace(outer, inside=tuple(inside)) if len(inside) > 1 else outer


# -- all together ---------------------------------------------------------------------------------

# Blocks: of a chain whose regions may be around others that keep nothing, and around those again.
_NESTED, RECURSIVE = 160, 80

# What a choice among nested regions is for a region up to block j: so much and j.
_REGION = 1000

_FORMS = "plain", "leaf", "layer", "nest", "loop"
_LAYER, _NEST = 2, 3

# At how many amounts of memory options are looked at before they are compared at all.
_LOOKS = 120


class _Item(NamedTuple):
    """Some consecutive blocks treated alike, as the chain sees them.

    ``form`` is "plain", "leaf" (one region), "layer" (a region around regions that keep more than
    it), "nest" (a region that keeps nothing, around whatever the recursion finds best) or "loop".
    ``level`` is the number of a level, a layer or a scan's plan.
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

    def takes(self) -> tuple[float, ...]:
        """What it takes before a region, before what is in none and by itself."""
        return self.kept, self.kept - self.spared, self.stay + self.working

    def slots(self, size: float) -> tuple[int, int]:
        """Return the slots of memory kept, and the slots that the item needs in all."""
        kept = _rounded(self.kept, size, self.first)
        return kept, max(kept, self.room(size) + math.ceil(self.working / size))

    def room(self, size: float) -> int:
        """Return the slots that are there while its own blocks are differentiated."""
        return _rounded(self.stay, size, self.first)

    def ways(self) -> list[tuple[_Item, int]]:
        """Return what it is before a region (1) and before what is in none (0)."""
        if self.form == "plain":  # two of them are one
            return [(self, 1)]
        less = self._replace(kept=self.kept - self.spared) if self.spared else self
        return [(self, 1), (less, 0)]


class _Options(NamedTuple):
    """All that can be done from one block on, in arrays: `_Item`s, and what comes next."""

    first: int
    last: np.ndarray
    form: np.ndarray
    level: np.ndarray
    follower: np.ndarray
    region: np.ndarray
    kept: np.ndarray
    room: np.ndarray
    need: np.ndarray
    work: np.ndarray

    @classmethod
    def of(cls, ways: Sequence[tuple[_Item, int]], size: float) -> _Options:
        """Put options together, bytes as `_Item.slots` of a size."""
        first = ways[0][0].first
        last, level, follower = np.array([(i.last, i.level, f) for i, f in ways]).T
        form = np.array([_FORMS.index(item.form) for item, _ in ways])
        amounts = np.array([(i.kept, i.stay, i.working, i.work) for i, _ in ways]).T
        kept, stay, working = amounts[:3] / size
        kept, room = (np.floor(x + (first * _GOLDEN) % 1).astype(int) for x in (kept, stay))
        need = np.maximum(kept, room + np.ceil(working).astype(int))
        return cls(first, last, form, level, follower, form > 0, kept, room, need, amounts[3])


class Composer:
    """The dynamic program over a chain.

    Args:
        chain: of the program.
        levels: what regions may keep.
        loops: how each scan may be run, by its equation.
        host_bandwidth: bytes a second to the host, one way.
    """

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
        self.layers: Sequence[Layer] = ()
        self.layer_values = self.inner = np.empty(0)
        self.size = 1.0
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
                    found[s] += self.leaf_items(number, level, s)
        return [[w for item in _undominated(options) for w in item.ways()] for options in found]

    def leaf_items(self, number: int, level: Level, s: int) -> Iterator[_Item]:
        stay = 0.0
        for j, (working, again) in enumerate(self.chain.regions(level)[s], s):
            stay += float(level.kept[j])
            kept = stay + float(level.out[s, j])
            yield _Item(s, j, "leaf", number, kept, stay, working, again, float(level.spared[s, j]))

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

    def solve(
        self, top: float, slots: int, layers: Sequence[Layer] = ()
    ) -> list[tuple[Segment, ...]]:
        """Return the schedules that are best for some memory up to ``top`` bytes.

        Args:
            top: bytes.
            slots: into how many steps they are divided.
            layers: of regions around regions.
        """
        self.size, self.layers = top / slots, layers
        best, choice, chosen = self.table(slots)
        found: dict[tuple[Segment, ...], None] = {}
        previous = math.inf
        for m in range(slots + 1):
            least = best[0][:, m].min()
            if not math.isfinite(least) or least >= previous * (1 - 1e-6) - 1e-15:
                continue
            previous = least
            found[self.schedule(choice, chosen, int(best[0][:, m].argmin()), m)] = None
        return list(found)

    def table(self, slots: int) -> tuple[np.ndarray, np.ndarray, list[list[tuple[_Item, int]]]]:
        """Return the least work from each block on, for every amount of memory; which option that
        takes; and the options. By the block, by whether a region comes next (1) or none (0), and by
        slots.
        """
        k, size = self.chain.count, self.size
        items, nested, layered = self.items, self.nested(slots), self.layered(slots)
        best = np.full((k + 1, 2, slots + 1), np.inf)
        best[k] = 0.0
        choice = np.full((k, 2, slots + 1), -1, dtype=int)
        chosen: list[list[tuple[_Item, int]]] = []
        for t in range(k - 1, -1, -1):
            around = (way for item in (*nested[t], *layered[t]) for way in item.ways())
            if self.chain.graph.early:  # a region has to come next
                around = (way for way in around if way[1])
            ways = [*items[t], *around]
            chosen.append(ways)
            options = _Options.of(ways, size)
            for number in self.promising(options, best):
                item, follower = ways[number]
                kept, need = int(options.kept[number]), int(options.need[number])
                value = best[item.last + 1, follower, need - kept : slots + 1 - kept] + item.work
                inside = self.inside(item)
                if inside is not None:
                    room = int(options.room[number])
                    value += inside[need - room : slots + 1 - room]
                where = t, int(item.form != "plain"), slice(need, None)
                _improve(best[where], choice[where], value, number)
        chosen.reverse()
        return best, choice, chosen

    def promising(self, options: _Options, best: np.ndarray) -> list[int]:
        """Return those options from one block on that may be the best for some memory.

        More memory never takes more work. So what is no better with the next amount looked at than
        the best is with one, is no better between the two.
        """
        slots = best.shape[-1] - 1
        at = np.append(np.arange(0, slots, max(1, slots // _LOOKS)), slots)
        value = self.values(options, best, at)
        fits, found = np.isfinite(value[:, 1:]), np.zeros(len(value), dtype=bool)
        for region in (False, True):
            these = options.region == region
            if these.any():
                least = value[these].min(axis=0)
                found[these] = (fits[these] & (value[these, 1:] <= least[:-1])).any(axis=1)
        return np.flatnonzero(found).tolist()

    def values(self, options: _Options, best: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Return the least work with each option, for some amounts of memory in slots."""

        def left(amount: np.ndarray) -> np.ndarray:
            return np.maximum(at - amount[:, None], 0)

        value = best[options.last[:, None] + 1, options.follower[:, None], left(options.kept)]
        value += options.work[:, None]
        for form, store in ((_LAYER, self.layer_values), (_NEST, self.inner)):
            these = options.form == form
            if these.any():
                level, last = options.level[these, None], options.last[these, None]
                room = left(options.room[these])
                if form == _LAYER:
                    value[these] += store[level, options.first, last - options.first, room]
                else:
                    value[these] += store[options.first, last, room]
        value[at < options.need[:, None]] = np.inf
        return value

    def schedule(
        self,
        choice: np.ndarray,
        chosen: list[list[tuple[_Item, int]]],
        region: int,
        m: int,
    ) -> tuple[Segment, ...]:
        t, parts = 0, []
        while t < self.chain.count:
            item, follower = chosen[t][choice[t][region][m]]
            kept, _ = item.slots(self.size)
            parts += self.segment(item, m)
            m, t, region = m - kept, item.last + 1, follower
        return joined(tuple(parts))

    def segment(self, item: _Item, room: int) -> list[Segment]:
        chain = self.chain
        lo, hi = chain.cuts[item.first], chain.cuts[item.last + 1]
        if item.form == "plain":
            return [Segment(lo, hi, plain=True)]
        if item.form == "loop":
            (scan,) = [e.index for e in chain.graph.equations[lo:hi] if e.loop]
            plan = self.loops[scan][item.level]
            return [Segment(lo, hi, plain=True, loops=((scan, plan),))]
        if item.form == "leaf":
            return [chain.region(item.first, item.last, self.levels[item.level].keep)]
        room -= item.room(self.size)
        if item.form == "layer":
            return [self.layers[item.level].segment(item.first, item.last, room)]
        return [Segment(lo, hi, inside=self.backtrack(item.first, item.last, room))]

    def inside(self, item: _Item) -> np.ndarray | None:
        """Return the least work of the regions inside of an item, for each amount of memory."""
        if item.form == "layer":
            return self.layer_values[item.level, item.first, item.last - item.first]
        return self.inner[item.first, item.last] if item.form == "nest" else None

    def layered(self, slots: int) -> list[list[_Item]]:
        """Items that keep a level, around regions that keep more."""
        found: list[list[_Item]] = [[] for _ in range(self.chain.count)]
        shape = len(self.layers), self.chain.count, _OUTER, slots + 1
        if self.layer_values.shape != shape:
            self.layer_values = np.empty(shape)
        for number, layer in enumerate(self.layers):
            layer.solve(self.size, self.layer_values[number])
            level = layer.level
            total = np.concatenate([[0.0], np.cumsum(level.kept)])
            for s, items in enumerate(found):
                for t in layer.lasts(s):
                    stay = float(total[t + 1] - total[s])
                    kept = stay + float(level.out[s, t])
                    spared = float(level.spared[s, t])
                    items.append(_Item(s, t, "layer", number, kept, stay, 0.0, 0.0, spared))
        return found

    # .. regions in regions in regions: the recursion of heterogeneous chains

    def nested(self, slots: int) -> list[list[_Item]]:
        """Items that drop what they keep and go back through themselves as best they can."""
        chain, k, size = self.chain, self.chain.count, self.size
        found: list[list[_Item]] = [[] for _ in range(k)]
        if chain.scans.any() or k > _NESTED or k < 3:
            return found
        out, singles = self.handed_on, self.singles
        forward = np.concatenate([[0.0], np.cumsum(chain.forward)])
        # The least work for blocks s..t, by s, t and the slots of memory; and what it begins with.
        self.inner = inner = np.full((k, k, slots + 1), np.inf)
        self.inner_choice = pick = np.full((k, k, slots + 1), -1, dtype=np.int16)
        for s in range(k - 1, -1, -1):
            for number, (item, made_again) in enumerate(singles[s]):
                # The last block inside a region hands on to nothing inside it, and runs again
                # there for no more than what it keeps.
                _, need = item._replace(kept=item.stay).slots(size)
                work = item.work + made_again
                _improve(inner[s, s, need:], pick[s, s, need:], work, number)
                kept, need = item.slots(size)
                if need <= slots and s + 1 < k:
                    later = s, slice(s + 1, None), slice(need, None)
                    ahead = inner[s + 1, s + 1 :, need - kept : slots + 1 - kept]
                    _improve(inner[later], pick[later], ahead + item.work, number)
            for j in range(s + 1, k - 1 if k <= RECURSIVE else 0):
                # Blocks s..j in a region of their own once more, before all those after them.
                kept = round(out[s, j] / size)
                if kept <= slots:
                    later = s, slice(j + 1, None), slice(kept, None)
                    ahead = inner[j + 1, j + 1 :, : slots + 1 - kept]
                    inside = inner[s, j, kept:] + (forward[j] - forward[s])
                    _improve(inner[later], pick[later], ahead + inside, _REGION + j)
            for t in range(s + 2, k):
                again = float(forward[t] - forward[s])
                found[s].append(_Item(s, t, "nest", -1, float(out[s, t]), 0.0, 0.0, again))
        return found

    @functools.cached_property
    def singles(self) -> list[list[tuple[_Item, float]]]:
        """What can be done with each block by itself inside of a region, and the work of it for
        what is kept there.
        """
        found: list[list[tuple[_Item, float]]] = []
        for b in range(self.chain.count):
            options = [next(_plain_items(self.chain, b))]
            for number, level in enumerate(self.levels):
                options += itertools.islice(self.leaf_items(number, level, b), 1)
            found.append([(item, self.made_again(item)) for item in _undominated(options)])
        return found

    def made_again(self, item: _Item) -> float:
        """Return the work of a block for what it keeps."""
        chain, b = self.chain, item.first
        kept = chain.needs[b] if item.form == "plain" else self.levels[item.level].keep
        return chain.making(b, kept)

    def backtrack(self, s: int, t: int, room: int) -> tuple[Segment, ...]:
        cuts, parts = self.chain.cuts, []
        size = self.size
        while s <= t:
            pick = int(self.inner_choice[s, t, room])
            if pick >= _REGION:
                j = pick - _REGION
                inside = self.backtrack(s, j, room)
                room -= round(self.handed_on[s, j] / size)
                parts.append(Segment(cuts[s], cuts[j + 1], inside=inside))
                s = j + 1
                continue
            item, _ = self.singles[s][pick]
            parts += self.segment(item, room)
            room -= _rounded(item.kept if s < t else item.stay, size, s)
            s += 1
        return joined(tuple(parts))


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


def joined(parts: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Put neighbours that have no region together."""
    found: list[Segment] = []
    for part in parts:
        if part.plain and found and found[-1].plain:
            last = found.pop()
            part = Segment(last.start, part.stop, plain=True, loops=(*last.loops, *part.loops))
        found.append(part)
    return tuple(found)
