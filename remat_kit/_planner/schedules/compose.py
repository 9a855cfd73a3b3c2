"""For each amount of memory, how should each block of a chain run to keep the extra work low?

`Composer` is a dynamic program over the blocks of a `Chain`. It divides memory into equal steps,
called slots, and covers the chain with items. An item is a run of consecutive blocks that takes one
of these forms:

- "plain": the blocks are in no region, so they save every activation that their derivatives read.
- "leaf": one region. A level of the chain says which of its activations the region saves.
- "layer": one region around smaller regions (`Layer`). The outer region saves what a level says.
  When its backward pass has recomputed it once, the inner regions save more. Thus few bytes are
  live through the forward pass, and only a little work is done three times.
- "nest": one region that saves nothing, around the best schedule of its own blocks. This recursion
  is that of Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019. For equal
  blocks its special case is the binomial schedule (Griewank and Walther, "Revolve", ACM TOMS 2000).
- "loop": a scan that runs by one of its plans.

Example: take eight layers ``x = tanh(x @ w)``, with ``x`` of 4 MiB on an H100, one block per layer,
and a level that saves nothing. For each schedule that `Composer.solve` returns, the loop prints the
simulated peak in MiB, the extra FLOPs as a share of the forward pass, and the equations of its
regions. Each layer has two equations, so ``(2, 6)`` is a region around the second and third layer:

>>> import jax, jax.numpy as jnp
>>> from remat_kit._chip.target import target
>>> from remat_kit._planner.costs.build import trace
>>> from remat_kit._planner.costs.simulate import simulate
>>> def tower(weights, x):
...     for w in weights:
...         x = jnp.tanh(x @ w)
...     return jnp.sum(x)
>>> weights = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 8
>>> x = jax.ShapeDtypeStruct((2048, 512), jnp.float32)
>>> graph = trace(tower, (weights, x), target("h100"))
>>> chain = Chain(graph, [0, 2, 4, 6, 8, 10, 12, 14, 17])
>>> composer = Composer(chain, [chain.level(frozenset())], loops={})
>>> for schedule in composer.solve(top=48 << 20, slots=240):
...     cost = simulate(graph, schedule)
...     regions = [(s.start, s.stop) for s in schedule if not s.plain]
...     extra = f"{cost.extra_flops / graph.forward_flops:+.0%}"
...     print(cost.peak_bytes >> 20, extra, *regions)
24 +337% (0, 14)
28 +125% (0, 10) (10, 14)
32 +75% (0, 6) (6, 12)
36 +50% (2, 10)
36 +37% (2, 8)
40 +25% (2, 6)
44 +0%
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from remat_kit._errors import InternalError
from remat_kit._planner.costs.simulate import loop_cost
from remat_kit._planner.schedules.chain import EVERY, Chain, Level
from remat_kit._policy.schedule import LoopPlan, Schedule, Segment

_GOLDEN = (math.sqrt(5) - 1) / 2


def _rounded(amount: float, size: float, first: int) -> int:
    """Return an amount in slots, rounded up for some blocks and down for others.

    The direction depends on the first block, so that the errors of equal blocks do not add up.
    """
    return math.floor(amount / size + (first * _GOLDEN) % 1)


def _improve(known: np.ndarray, picked: np.ndarray, work: float | np.ndarray, choice: int) -> None:
    """Update the least known work where ``work`` is less, and record the choice there."""
    better = work < known
    if better.any():
        np.copyto(known, work, where=better)
        np.copyto(picked, choice, where=better)


class _Choice(Protocol):
    """A way to run some consecutive blocks: the last block, the extra work and the bytes."""

    @property
    def last(self) -> int: ...

    @property
    def work(self) -> float: ...

    def takes(self) -> tuple[float, ...]: ...


_C = TypeVar("_C", bound=_Choice)


def _undominated(choices: Iterable[_C]) -> list[_C]:
    """Remove each choice that has no advantage in work or bytes over one for the same blocks."""
    # Many levels save the same arrays of a block, so most choices equal an earlier one.
    apart: dict[tuple[float, ...], _C] = {}
    for choice in choices:
        apart.setdefault((choice.work, *choice.takes(), choice.last), choice)
    kept: list[_C] = []
    by_last: dict[int, list[tuple[float, ...]]] = {}
    for key, choice in sorted(apart.items(), key=lambda pair: pair[0][:-1]):
        others, takes = by_last.setdefault(choice.last, []), key[1:-1]
        if not any(all(map(operator.le, other, takes)) for other in others):
            others.append(takes)
            kept.append(choice)
    return kept


# -- a region that saves one level, around regions that save more ---------------------------------

# Maximum number of blocks of a region inside another region, and of that outer region.
_INNER, _OUTER = 8, 24


class _ComposedPart(NamedTuple):
    """One region inside another region, from a known block to ``last``.

    All bytes are in addition to those that the outer region saves.

    Attributes:
        last: the last block.
        kept: bytes live during the backward pass of later blocks.
        stay: those of ``kept`` that are still live during the backward pass of these blocks.
        working: further bytes live during the backward pass of these blocks.
        work: the recompute of this region, and the work of the outer region to make the arrays that
            this region saves and those that later blocks read.
        less: ``work`` without making the arrays that only later blocks read.
        keep: the arrays that the region saves.
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


class Layer:
    """Regions that save one level of a chain, each around smaller regions that save more.

    In the backward pass, the outer region first recomputes its blocks once. From then on, the
    arrays that the inner regions save and those that enter them are live. The inner regions then
    recompute the rest, one after the other, from last to first.

    Args:
        chain: the chain of the program.
        level: the arrays that the outer regions save.
        more: sets of further arrays; each inner region saves one of these sets beside the level.
    """

    def __init__(self, chain: Chain, level: Level, more: Sequence[frozenset[int]]):
        self.chain = chain
        self.level = level
        parts: list[list[_ComposedPart]] = [[] for _ in range(chain.count)]
        handed = self.handed()
        for keep in dict.fromkeys(level.keep | extra for extra in more):
            for s, some in enumerate(self.parts_of(chain.level(keep), handed)):
                parts[s] += some
        self.parts = [_undominated(some) for some in parts]

    def handed(self) -> np.ndarray:
        """Return which inner regions run each equation again for what later blocks read.

        The result is as that of `Chain.again`.
        """
        keep = self.level.keep
        crossing = ((t, last - first) for t, first, last in self.chain.crossing if t not in keep)
        return self.chain.again(keep, ((t, (1 << min(d, _INNER)) - 1) for t, d in crossing))

    def parts_of(self, finer: Level, handed: np.ndarray) -> Iterator[list[_ComposedPart]]:
        """Yield, for each block, the inner regions that begin with it and save a finer level."""
        chain = self.chain
        own = chain.again(self.level.keep, ((t, EVERY) for t in finer.keep - self.level.keep))
        keeping, handing = (chain.sums(x, chain.work).tolist() for x in (own, own | handed))
        regions = chain.regions(finer)
        size, again = regions.bytes.tolist(), regions.work.tolist()
        more = finer.kept - self.level.kept
        for s, length in enumerate(chain.lengths):  # no region begins with a scan
            count = min(length, _INNER)
            stay = np.cumsum(more[s : s + count])
            kept, stay = (stay + finer.out[s, s : s + count]).tolist(), stay.tolist()
            yield [
                _ComposedPart(
                    s + n,
                    kept[n],
                    stay[n],
                    size[s][n],
                    again[s][n] + handing[s][n],
                    again[s][n] + keeping[s][n],
                    finer.keep,
                )
                for n in range(count)
            ]

    def needs(self, size: float) -> list[list[tuple[int, int, int]]]:
        """Return, for each part, its slots if it is the last one, before others, and for ``kept``.

        Args:
            size: bytes of a slot.
        """
        found = []
        for s, parts in enumerate(self.parts):
            amounts = [(part.kept, part.stay, part.working) for part in parts]
            kept, stay, working = np.array(amounts).reshape(-1, 3).T / size
            kept, stay = (np.floor(x + (s * _GOLDEN) % 1).astype(int) for x in (kept, stay))
            alone = stay + np.ceil(working).astype(int)
            before = np.maximum(kept, alone)
            columns = (x.tolist() for x in (np.maximum(alone, 0), before, kept))
            found.append(list(zip(*columns, strict=True)))
        return found

    def solve(self, size: float, found: np.ndarray) -> None:
        """Find the least work for all runs of blocks and all amounts of memory.

        The memory excludes the bytes that the outer region saves.

        Args:
            size: bytes of a slot.
            found: the array to fill with the work, indexed by the first block, by the number of
                blocks after it and by slots.
        """
        k, slots = self.chain.count, found.shape[-1] - 1
        self.size, self.value, self.slots = size, found, self.needs(size)
        self.spare = np.empty((_OUTER, slots + 1))
        # For each block, the fewest slots in which regions that begin with it fit, and the slots
        # from which on more memory does not lower their work. Between them lie the entries that
        # differ, often a small part of all.
        least, enough = [slots + 1] * (k + 1), [0] * (k + 1)
        for s in range(k - 1, -1, -1):
            value, (least[s], most) = self.value[s], self.bounds_of(s, least, enough)
            if least[s] > slots:
                value.fill(np.inf)
                continue
            most = min(most, slots)
            value[:, : most + 1] = np.inf
            self.fill(s, least, most)
            value[:, most + 1 :] = value[:, most : most + 1]
            differs = (value[:, least[s] : most] != value[:, most : most + 1]).any(axis=0)
            enough[s] = least[s] + max(np.flatnonzero(differs).tolist(), default=-1) + 1

    def bounds_of(self, s: int, least: Sequence[int], enough: Sequence[int]) -> tuple[int, int]:
        """Return the fewest slots for regions that begin with a block, and slots that suffice.

        Args:
            s: the block.
            least, enough: the same figures for all later blocks.
        """
        fewest, most = self.value.shape[-1], 0
        for part, (alone, need, kept) in zip(self.parts[s], self.slots[s], strict=True):
            fewest = min(fewest, alone, max(need, kept + least[part.last + 1]))
            most = max(most, alone, need, kept + enough[part.last + 1])
        return fewest, most

    def fill(self, s: int, least: Sequence[int], most: int) -> None:
        """Find the least work for all runs of blocks that begin with s, up to ``most`` slots."""
        value = self.value[s]
        for part, (alone, need, kept) in zip(self.parts[s], self.slots[s], strict=True):
            length = part.last - s
            if alone <= most:
                own = value[length, alone : most + 1]
                np.minimum(own, part.less, out=own)
            start = max(need, kept + least[part.last + 1])
            rest = min(_OUTER - 1 - length, self.chain.count - 1 - part.last)
            if start <= most and rest > 0:
                ahead = self.value[part.last + 1, :rest, start - kept : most + 1 - kept]
                work = np.add(ahead, part.work, out=self.spare[:rest, : most + 1 - start])
                later = value[length + 1 : length + 1 + rest, start : most + 1]
                np.minimum(later, work, out=later)

    def first_part(self, first: int, last: int, room: int) -> int:
        """Return the number of the first inner region of the best ones in ``room`` slots.

        `solve` keeps only the least work. Few of its entries become schedules, so it is faster to
        find the region that led to an entry when it is asked for.
        """
        least = self.value[first, last - first, room]
        for number, part in enumerate(self.parts[first]):
            alone, need, kept = self.slots[first][number]
            if part.last == last:
                if alone <= room and part.less == least:
                    return number
            elif part.last < last and need <= room:
                ahead = self.value[part.last + 1, last - part.last - 1, room - kept]
                if ahead + part.work == least:
                    return number
        raise InternalError("no inner region leads to an entry of `Layer.solve`")

    def segment(self, first: int, last: int, room: int) -> Segment[int]:
        """Return the outer region over some blocks with the least work in ``room`` slots."""
        chain = self.chain
        inside, s = [], first
        while s <= last:
            part = self.parts[s][self.first_part(s, last, room)]
            inside.append(chain.region(s, part.last, part.keep))
            room -= _rounded(part.kept if part.last < last else part.stay, self.size, s)
            s = part.last + 1
        outer = chain.region(first, last, self.level.keep)
        return dataclasses.replace(outer, inside=tuple(inside)) if len(inside) > 1 else outer


# -- all together ---------------------------------------------------------------------------------

# Maximum number of blocks of a chain whose regions may contain other regions ("nest"), and of a
# chain where those may contain regions again.
_NESTED, RECURSIVE = 160, 80


# In nested schedules, the choice `_REGION` + j means one region up to block j. Smaller choices are
# numbers of ways to run a single block.
_REGION = 1000


_FORMS = "plain", "leaf", "layer", "nest", "loop"


_LAYER, _NEST = 2, 3


# Number of memory limits at which the dynamic program samples each option before it discards
# dominated options.
_LOOKS = 120


class _Item(NamedTuple):
    """Consecutive blocks that run in one of the forms that the module describes.

    Attributes:
        first: the first block.
        last: the last block.
        form: "plain", "leaf", "layer", "nest" or "loop".
        level: the number of the level, of the layer or of the scan's plan.
        kept: bytes live during the backward pass of later blocks.
        stay: those of ``kept`` that are still live during the backward pass of these blocks. The
            arrays that only later blocks read are free by then.
        working: further bytes live during the backward pass of these blocks.
        work: extra work.
        spared: those of ``kept`` that are free if the next item is no region. The next block then
            saves the activations that it computes from them.
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
        """Return its bytes before a region, before a plain item and in its own backward pass."""
        return self.kept, self.kept - self.spared, self.stay + self.working

    def slots(self, size: float) -> tuple[int, int]:
        """Return the slots for ``kept``, and the total number of slots that the item needs."""
        kept = _rounded(self.kept, size, self.first)
        return kept, max(kept, self.room(size) + math.ceil(self.working / size))

    def room(self, size: float) -> int:
        """Return the slots for ``stay``, which are live in the backward pass of its own blocks."""
        return _rounded(self.stay, size, self.first)


class _Ways(NamedTuple):
    """Items that begin with one block, as arrays over the ways in which they count.

    An item counts in one way before a region and in another before a plain item. The attributes are
    those of `_Item`, with the number of the form, and ``follower``: 1 if a region comes next, 0 if
    a plain item does.
    """

    last: np.ndarray
    form: np.ndarray
    level: np.ndarray
    follower: np.ndarray
    kept: np.ndarray
    stay: np.ndarray
    working: np.ndarray
    work: np.ndarray

    @classmethod
    def of(
        cls,
        form: int | np.ndarray,
        last: np.ndarray,
        level: int | np.ndarray,
        amounts: Sequence[np.ndarray | float],
    ) -> _Ways:
        """Return the ways of items, each before a region and then before a plain item.

        Args:
            form, last, level: as for `_Item`, for each item.
            amounts: ``kept``, ``stay``, ``working``, ``work`` and ``spared`` for each item.
        """
        count = len(last)
        kept, stay, working, work, spared = (np.broadcast_to(x, count) for x in amounts)
        follower = np.tile([1, 0], count)
        before = np.stack([kept, kept - spared], axis=1).ravel()
        last, form, level, stay, working, work = (
            np.repeat(np.broadcast_to(x, count), 2)
            for x in (last, form, level, stay, working, work)
        )
        return cls(last, form, level, follower, before, stay, working, work)

    @classmethod
    def of_items(cls, items: Sequence[_Item]) -> _Ways:
        """Return the ways of items; two plain items in a row are one plain item."""
        form = np.array([_FORMS.index(item.form) for item in items])
        last, level = np.array([(i.last, i.level) for i in items]).T
        amounts = np.array([(i.kept, i.stay, i.working, i.work, i.spared) for i in items]).T
        found = cls.of(form, last, level, [*amounts])
        return found.some((found.form > 0) | (found.follower > 0))

    def some(self, chosen: np.ndarray) -> _Ways:
        """Return some of the ways, by their numbers or by a mask."""
        return _Ways(*(x[chosen] for x in self))

    def joined(self, others: Sequence[_Ways]) -> _Ways:
        """Return these ways and those of others after them."""
        return _Ways(*map(np.concatenate, zip(self, *others, strict=True))) if others else self

    def item(self, first: int, number: int) -> tuple[_Item, int]:
        """Return one of the ways that begin with a block as an item, and its follower."""
        last, form, level, follower, *amounts = (x.item(number) for x in self)
        return _Item(first, last, _FORMS[form], level, *amounts), follower


class _Options(NamedTuple):
    """The ways that begin with one block, with slots instead of bytes as in `_Item.slots`."""

    first: int
    last: np.ndarray
    form: np.ndarray
    level: np.ndarray
    follower: np.ndarray
    kept: np.ndarray
    room: np.ndarray
    need: np.ndarray
    work: np.ndarray

    @classmethod
    def of(cls, first: int, ways: _Ways, size: float) -> _Options:
        """Return the options for ways and for slots of some bytes."""
        start = (first * _GOLDEN) % 1
        kept, room = (np.floor(x / size + start).astype(int) for x in (ways.kept, ways.stay))
        need = np.maximum(kept, room + np.ceil(ways.working / size).astype(int))
        return cls(first, *ways[:4], kept, room, need, ways.work)

    def some(self, numbers: np.ndarray) -> _Options:
        """Return the options with some numbers."""
        return _Options(self.first, *(x[numbers] for x in self[1:]))


class Composer:
    """The dynamic program over a chain.

    Args:
        chain: the chain of the program.
        levels: the sets of arrays that regions may save.
        loops: the plans of each scan, by the index of its equation.
        host_bandwidth: bytes per second between device and host, in one direction.
    """

    def __init__(
        self,
        chain: Chain,
        levels: Sequence[Level],
        loops: dict[int, list[LoopPlan[int]]],
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
    def items(self) -> list[_Ways]:
        """The undominated plain, leaf and loop items, by their first block."""
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
        return [_Ways.of_items(_undominated(options)) for options in found]

    def leaf_items(self, number: int, level: Level, s: int) -> Iterator[_Item]:
        stop = s + self.chain.lengths[s]
        regions = self.chain.regions(level)
        stay = np.cumsum(level.kept[s:stop])
        amounts = stay + level.out[s, s:stop], stay, regions.bytes[s], regions.work[s]
        columns = (x.tolist() for x in (*amounts, level.spared[s, s:stop]))
        for j, (kept, own, working, again, spared) in enumerate(zip(*columns, strict=False), s):
            yield _Item(s, j, "leaf", number, kept, own, working, again, spared)

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

    def solve(self, top: float, slots: int, layers: Sequence[Layer] = ()) -> list[Schedule[int]]:
        """Return the schedules with the least work for each amount of memory up to ``top`` bytes.

        Args:
            top: the highest memory limit, in bytes.
            slots: the number of slots into which ``top`` is divided.
            layers: the regions around smaller regions that may be used.
        """
        self.size, self.layers = top / slots, layers
        self.picked: dict[tuple[int, int], tuple[_Item, int]] = {}  # the options of the schedules
        best, choice, chosen = self.table(slots)
        found: dict[Schedule[int], None] = {}
        previous = math.inf
        for m in range(slots + 1):
            least = best[0][:, m].min()
            if not math.isfinite(least) or least >= previous * (1 - 1e-6) - 1e-15:
                continue
            previous = least
            found[self.schedule(choice, chosen, int(best[0][:, m].argmin()), m)] = None
        return list(found)

    def table(self, slots: int) -> tuple[np.ndarray, np.ndarray, list[_Ways]]:
        """Return the least work from each block on, the option that achieves it, and all options.

        The work and the options' numbers are indexed by the block, by whether a region begins there
        (1) or not (0), and by slots. The options are listed by their first block.
        """
        k = self.chain.count
        items, nested, layered = self.items, self.nested(slots), self.layered(slots)
        best = np.full((k + 1, 2, slots + 1), np.inf)
        best[k] = 0.0
        choice = np.full((k, 2, slots + 1), -1, dtype=int)
        chosen: list[_Ways] = []
        for t in range(k - 1, -1, -1):
            around = [*nested[t], *layered[t]]
            if self.chain.graph.early:  # then another region must follow a region around regions
                around = [ways.some(ways.follower > 0) for ways in around]
            chosen.append(items[t].joined(around))
            options = _Options.of(t, chosen[-1], self.size)
            numbers = self.promising(options, best)
            self.improve(options.some(numbers), numbers.tolist(), best, choice)
        chosen.reverse()
        return best, choice, chosen

    def improve(
        self, options: _Options, numbers: Sequence[int], best: np.ndarray, choice: np.ndarray
    ) -> None:
        """Find the least work from one block on, and the first option that achieves it.

        Args:
            options: the options that begin with the block.
            numbers: their numbers, for ``choice``.
            best, choice: the tables of `table`, filled for all later blocks.
        """
        first, slots = options.first, best.shape[-1] - 1
        columns = (x.tolist() for x in options[1:])
        for number, (last, form, level, follower, kept, room, need, work) in zip(
            numbers, zip(*columns, strict=True), strict=True
        ):
            value = best[last + 1, follower, need - kept : slots + 1 - kept] + work
            if form in (_LAYER, _NEST):
                inside = self.inside(_FORMS[form], level, first, last)
                value += inside[need - room : slots + 1 - room]
            region = int(form > 0)
            _improve(best[first, region, need:], choice[first, region, need:], value, number)

    def promising(self, options: _Options, best: np.ndarray) -> np.ndarray:
        """Return the options from one block on that may be the best for some amount of memory.

        The function compares the options at sampled memory limits. The least work never rises with
        the limit. Hence, if an option at one sampled limit is worse than the best option is at the
        limit before, it is also worse at every limit between the two. A look at few limits leaves
        fewer options for the look at many.
        """
        slots, numbers = best.shape[-1] - 1, np.arange(len(options.last))
        for looks in (_LOOKS // 5, _LOOKS):
            at = np.append(np.arange(0, slots, max(1, slots // looks)), slots)
            some = options.some(numbers)
            value = self.values(some, best, at)
            fits, found = np.isfinite(value[:, 1:]), np.zeros(len(value), dtype=bool)
            for these in (some.form == 0, some.form > 0):
                if these.any():
                    least = value[these].min(axis=0)
                    found[these] = (fits[these] & (value[these, 1:] <= least[:-1])).any(axis=1)
            numbers = numbers[found]
        return numbers

    def values(self, options: _Options, best: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Return the least work with each option, at some memory limits in slots."""

        columns = best.shape[-1]

        def entries(table: np.ndarray, row: np.ndarray, taken: np.ndarray) -> np.ndarray:
            """Return the entries of some rows of a table for the memory that is left."""
            left = np.maximum(at - taken[:, None], 0)
            left += row[:, None] * columns
            return table.reshape(-1).take(left)

        value = entries(best, 2 * (options.last + 1) + options.follower, options.kept)
        value += options.work[:, None]
        first, k = options.first, self.chain.count
        for form, store in ((_LAYER, self.layer_values), (_NEST, self.inner)):
            these = np.flatnonzero(options.form == form)
            if len(these):
                level, last = options.level[these], options.last[these]
                row = (level * k + first) * _OUTER - first if form == _LAYER else first * k
                value[these] += entries(store, row + last, options.room[these])
        value[at < options.need[:, None]] = np.inf
        return value

    def schedule(
        self,
        choice: np.ndarray,
        chosen: Sequence[_Ways],
        region: int,
        m: int,
    ) -> Schedule[int]:
        t, parts = 0, []
        while t < self.chain.count:
            number = int(choice[t, region, m])
            if (t, number) not in self.picked:
                self.picked[t, number] = chosen[t].item(t, number)
            item, follower = self.picked[t, number]
            kept, _ = item.slots(self.size)
            parts += self.segment(item, m)
            m, t, region = m - kept, item.last + 1, follower
        return joined(tuple(parts))

    def segment(self, item: _Item, room: int) -> list[Segment[int]]:
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

    def inside(self, form: str, level: int, first: int, last: int) -> np.ndarray:
        """Return the least work of the regions inside an item, for each amount of memory."""
        if form == "layer":
            return self.layer_values[level, first, last - first]
        return self.inner[first, last]

    def layered(self, slots: int) -> list[list[_Ways]]:
        """Return the "layer" items, by their first block."""
        k, layers = self.chain.count, self.layers
        if not layers:
            return [[] for _ in range(k)]
        shape = len(layers), k, _OUTER, slots + 1
        if self.layer_values.shape != shape:
            self.layer_values = np.empty(shape)
        for number, layer in enumerate(layers):
            layer.solve(self.size, self.layer_values[number])
        total = np.zeros((len(layers), k + 1))
        np.cumsum([layer.level.kept for layer in layers], axis=1, out=total[:, 1:])
        found: list[list[_Ways]] = []
        for s in range(k):
            stop = min(s + _OUTER, k)
            fits = np.isfinite(self.layer_values[:, s, 1 : stop - s, -1])
            out, spared = (
                np.array([x[s, s + 1 : stop] for x in some])[fits]
                for some in zip(*((y.level.out, y.level.spared) for y in layers), strict=True)
            )
            number, length = np.nonzero(fits)
            last = s + 1 + length
            stay = total[number, last + 1] - total[number, s]
            amounts = stay + out, stay, 0.0, 0.0, spared
            found.append([_Ways.of(_LAYER, last, number, amounts)])
        return found

    # .. nested regions: the recursion for heterogeneous chains (Beaumont et al. 2019)

    def nested(self, slots: int) -> list[list[_Ways]]:
        """Return the "nest" items, by their first block: regions that save nothing themselves."""
        chain, k, size = self.chain, self.chain.count, self.size
        found: list[list[_Ways]] = [[] for _ in range(k)]
        if chain.scans.any() or k > _NESTED or k < 3:
            return found
        out, forward = self.handed_on, self.forward
        # The least work for blocks s..t, indexed by s, t and slots.
        if self.inner.shape != (k, k, slots + 1):
            self.inner = np.empty((k, k, slots + 1))
        inner = self.inner
        inner.fill(np.inf)
        self.single_slots = [self.slots_inside(b) for b in range(k)]
        for s in range(k - 1, -1, -1):
            for (item, made_again), (alone, kept, need) in zip(
                self.singles[s], self.single_slots[s], strict=True
            ):
                own = inner[s, s, alone:]
                np.minimum(own, item.work + made_again, out=own)
                if need <= slots and s + 1 < k:
                    ahead = inner[s + 1, s + 1 :, need - kept : slots + 1 - kept]
                    later = inner[s, s + 1 :, need:]
                    np.minimum(later, ahead + item.work, out=later)
            for j in range(s + 1, k - 1 if k <= RECURSIVE else 0):
                # Blocks s..j form a region of their own, which precedes blocks j + 1..t.
                kept = round(out[s, j] / size)
                if kept <= slots:
                    ahead = inner[j + 1, j + 1 :, : slots + 1 - kept]
                    inside = inner[s, j, kept:] + (forward[j] - forward[s])
                    later = inner[s, j + 1 :, kept:]
                    np.minimum(later, ahead + inside, out=later)
            last = np.arange(s + 2, k)
            amounts = out[s, last], 0.0, 0.0, forward[last] - forward[s], 0.0
            found[s].append(_Ways.of(_NEST, last, -1, amounts))
        return found

    @functools.cached_property
    def forward(self) -> np.ndarray:
        """The work of all blocks before each block."""
        return np.concatenate([[0.0], np.cumsum(self.chain.forward)])

    def slots_inside(self, block: int) -> list[tuple[int, int, int]]:
        """Return, for each of `singles`, its slots as the last block, for ``kept`` and in all."""
        found = []
        for item, _ in self.singles[block]:
            # No later block inside the region reads the activations of the last block. The last
            # block therefore runs again only to make what it saves.
            _, alone = item._replace(kept=item.stay).slots(self.size)
            found.append((alone, *item.slots(self.size)))
        return found

    @functools.cached_property
    def singles(self) -> list[list[tuple[_Item, float]]]:
        """The undominated ways to run each single block inside a region.

        With each of them comes the work of the block to make the arrays that it saves.
        """
        found: list[list[tuple[_Item, float]]] = []
        for b in range(self.chain.count):
            options = [next(_plain_items(self.chain, b))]
            for number, level in enumerate(self.levels):
                options += itertools.islice(self.leaf_items(number, level, b), 1)
            found.append([(item, self.made_again(item)) for item in _undominated(options)])
        return found

    def made_again(self, item: _Item) -> float:
        """Return the work of a block to make the arrays that it saves."""
        chain, b = self.chain, item.first
        kept = chain.needs[b] if item.form == "plain" else self.levels[item.level].keep
        return chain.making(b, kept)

    def first_inside(self, s: int, t: int, room: int) -> int:
        """Return the first choice of the best ones for blocks ``s..t`` in ``room`` slots.

        The result is the number of a way to run the first block alone, or `_REGION` + j for a
        region up to block j. `nested` keeps only the least work, as `Layer.solve` does.
        """
        inner, least = self.inner, self.inner[s, t, room]
        for number, (item, made_again) in enumerate(self.singles[s]):
            alone, kept, need = self.single_slots[s][number]
            if s == t:
                if alone <= room and item.work + made_again == least:
                    return number
            elif need <= room and inner[s + 1, t, room - kept] + item.work == least:
                return number
        for j in range(s + 1, t):
            kept = round(self.handed_on[s, j] / self.size)
            if kept <= room:
                inside = inner[s, j, room] + (self.forward[j] - self.forward[s])
                if inner[j + 1, t, room - kept] + inside == least:
                    return _REGION + j
        raise InternalError("no choice leads to an entry of `Composer.nested`")

    def backtrack(self, s: int, t: int, room: int) -> Schedule[int]:
        cuts, parts = self.chain.cuts, []
        size = self.size
        while s <= t:
            pick = self.first_inside(s, t, room)
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
    """Yield a plain item of blocks ``first..j`` for each j.

    Between these blocks, only the arrays that their derivatives read stay live.
    """
    stay = need = 0.0
    for j in range(first, chain.count):
        stay += float(chain.plain[j])
        need = max(need, stay + chain.flowing[j])
        kept = stay + float(chain.plain_out[first, j])
        yield _Item(first, j, "plain", -1, kept, stay, need - stay, 0.0)


def joined(parts: Schedule[int]) -> Schedule[int]:
    """Merge neighbouring segments without a region into one."""
    merged: list[Segment[int]] = []
    for part in parts:
        if part.plain and merged and merged[-1].plain:
            last = merged.pop()
            part = Segment(last.start, part.stop, plain=True, loops=(*last.loops, *part.loops))
        merged.append(part)
    return tuple(merged)
