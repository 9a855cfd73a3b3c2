"""Which schedules of a loss does the planner propose, and which of them are worth offering?

The planner looks for the schedules on the frontier: those for which no other schedule has both a
lower peak and less extra work. It collects proposals from four sources:

1. For each of a range of prices per byte, a minimum cut decides which activations to save (module
   `mincut`; maximum closure, Picard 1976).
2. The program is divided into a chain of blocks (module `chain`), and a dynamic program chooses how
   to run each block for every amount of memory (module `compose`; Beaumont et al. 2019).
3. Each scan is planned as a program of its own. Its body gets schedules, and a schedule runs all
   iterations, or one of two ranges of them, or groups of iterations.
4. The proposals include the schedules that people write by hand, such as one region per module
   (Chen et al. 2016). If the graph is small, a local search then changes the best schedules one
   array, one cut or one region at a time.

The planner simulates each proposal (module `simulate`) and then discards the dominated ones.

Example: take eight layers ``x = tanh(x @ w)``, with ``x`` of 4 MiB on an H100. ``candidates``
returns six schedules. The loop prints the peak of each in MiB, without the arguments, and its extra
FLOPs as a share of the forward pass:

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
>>> for cost in (candidate.cost for candidate in candidates(graph)):
...     print(cost.peak_bytes >> 20, f"{cost.extra_flops / graph.forward_flops:+.1%}")
24 +187.5%
28 +50.0%
32 +37.5%
36 +25.0%
40 +12.5%
44 +0.0%

With 44 MiB, the step saves every activation that the backward pass reads. With 24 MiB, one region
around three smaller regions covers the first 11 of the 17 equations, so that some of these
equations run three times.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from remat_kit._planner.costs.graph import CostGraph, Loop
from remat_kit._planner.costs.simulate import Simulated, closure, loop_cost, simulate
from remat_kit._planner.schedules.bounds import price_range
from remat_kit._planner.schedules.chain import Chain, coarser, positions, unbroken
from remat_kit._planner.schedules.compose import RECURSIVE, Composer, Layer, joined
from remat_kit._planner.schedules.mincut import TIME, Cutter, Worth
from remat_kit._policy.schedule import LoopPart, LoopPlan, Schedule, Segment
from remat_kit._program import paths as _paths

_T = TypeVar("_T")


# Limits on the number of equations, because planning should take a few seconds. Up to `_SMALL`, a
# local search improves the schedules one change at a time. Up to `_SHORT`, the dynamic program runs
# with more than one measure of work. Below `_MIDDLE` and below `_LONG`, more proposals are made. Up
# to `_TINY`, every chain of regions that save nothing is one.
_TINY, _SMALL, _SHORT, _MIDDLE, _LONG = 8, 32, 128, 2000, 4500


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A schedule, with the memory and the extra work that `simulate` predicts for it."""

    schedule: Schedule[int]
    cost: Simulated


# -- all together ---------------------------------------------------------------------------------


def candidates(
    graph: CostGraph,
    *,
    tick: Callable[[str], None] = lambda what: None,
    levels: int = 20,
    slots: int = 240,
    host_bandwidth: float = 0.0,
    worth: Worth = TIME,
) -> list[Candidate]:
    """Return the schedules on the frontier of peak and extra work, from the lowest peak up.

    No other proposal has both a lower peak and less extra work than one of these.

    Args:
        graph, tick, levels, slots, host_bandwidth, worth: as for `proposed`.
    """
    return pareto(
        proposed(
            graph,
            tick=tick,
            levels=levels,
            slots=slots,
            host_bandwidth=host_bandwidth,
            worth=worth,
        ),
        worth,
    )


def proposed(
    graph: CostGraph,
    *,
    tick: Callable[[str], None] = lambda what: None,
    levels: int = 20,
    slots: int = 240,
    host_bandwidth: float = 0.0,
    host_bytes: float = math.inf,
    worth: Worth = TIME,
) -> list[Candidate]:
    """Return every proposed schedule with its simulated cost; the first schedule has no region.

    Args:
        graph: the cost graph of the loss, or of the body of a scan.
        tick: called with a description of the current work. If it raises `KeyboardInterrupt`, the
            search ends and returns the schedules found so far.
        levels: number of prices per byte to try. In a graph below `_LONG` equations the number is
            doubled, and in one below `_MIDDLE` equations it is tripled.
        slots: number of equal steps into which the dynamic program divides memory.
        host_bandwidth: bytes per second between device and host, in one direction; 0 if nothing
            may be offloaded.
        host_bytes: the most that the iterations of one scan may offload.
        worth: how FLOPs and seconds are combined into extra work.
    """
    found: list[Candidate] = []
    try:
        for candidate in _simulated(graph, tick, levels, slots, host_bandwidth, worth, host_bytes):
            found.append(candidate)
    except KeyboardInterrupt:
        if len(found) < 2:
            raise
    return found


def _simulated(
    graph: CostGraph,
    tick: Callable[[str], None],
    levels: int,
    slots: int,
    host_bandwidth: float,
    worth: Worth,
    host_bytes: float = math.inf,
) -> Iterator[Candidate]:
    """Yield every proposed schedule with its simulated cost; the first schedule has no region."""
    n = len(graph.equations)
    if n == 0:
        return
    plain = (Segment(0, n, plain=True),)
    found = [Candidate(plain, simulate(graph, plain))]
    yield found[0]
    if not graph.residuals and not any(e.loop for e in graph.equations):
        return
    if not any(t.bytes for t in graph.tensors):  # all arrays have a dimension of 0
        return
    loops: dict[int, list[LoopPlan[int]]] = {}
    for e in graph.equations:
        if e.loop is not None:
            tick(f"planning the scan at {e.module or 'the top'}")
            loops[e.index] = loop_plans(e, worth, host_bandwidth, host_bytes=host_bytes)
    bandwidth = host_bandwidth or math.inf
    seen: set[Schedule[int]] = set()
    problem = _Problem(graph, loops, levels, slots, bandwidth, tick, worth)
    for schedule in (schedule for propose in _PROPOSERS for schedule in propose(problem)):
        if schedule not in seen:
            seen.add(schedule)
            cost = simulate(graph, schedule, host_bandwidth=bandwidth)
            found.append(Candidate(schedule, cost))
            yield found[-1]
    if n <= _SMALL:
        yield from _polished(graph, pareto(found, worth), seen, bandwidth, worth)


def _polished(
    graph: CostGraph,
    found: list[Candidate],
    seen: set[Schedule[int]],
    host_bandwidth: float,
    worth: Worth,
    most: int = 6000,
) -> list[Candidate]:
    """Improve the schedules of a small graph, one change at a time, until no change helps."""
    done: set[Schedule[int]] = set()
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


def _neighbours(graph: CostGraph, schedule: Schedule[int]) -> Iterable[Schedule[int]]:
    """Yield the schedules that differ from this one in one saved array, one cut or one region."""
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


def _divided(graph: CostGraph, keep: Iterable[int], cuts: Sequence[int]) -> Iterator[Segment[int]]:
    """Yield one region between each two cuts, which saves those arrays of a set that it makes."""
    kept = sorted((graph.tensors[t].producer, t) for t in keep)
    for lo, hi in itertools.pairwise(cuts):
        first, last = (bisect.bisect_left(kept, (cut, -1)) for cut in (lo, hi))
        yield Segment(lo, hi, save=frozenset(t for _, t in kept[first:last]))


def _part(graph: CostGraph, s: Segment[int], lo: int, hi: int) -> Segment[int]:
    save = frozenset(t for t in s.save if lo <= graph.tensors[t].producer < hi)
    return Segment(lo, hi, save=save, plain=s.plain)


# -- the proposers --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What a proposer is given: a graph, the plans of its scans, and minimum cuts of it.

    Attributes:
        graph: the cost graph.
        loops: the plans of each scan, by the index of its equation.
        levels, slots, tick, worth: as for `proposed`.
        host_bandwidth: bytes per second between device and host, infinite if nothing may be
            offloaded.
    """

    graph: CostGraph
    loops: dict[int, list[LoopPlan[int]]]
    levels: int
    slots: int
    host_bandwidth: float
    tick: Callable[[str], None]
    worth: Worth

    @property
    def few(self) -> bool:
        """Whether there are so few equations that a finer search takes little time."""
        return len(self.graph.equations) < _MIDDLE

    @property
    def small(self) -> bool:
        """Whether there are so few equations that some more proposals take little time."""
        return len(self.graph.equations) < _LONG

    @functools.cached_property
    def prices(self) -> list[float]:
        times = 3 if self.few else 2 if self.small else 1
        return price_range(self.graph, self.levels * times)

    @functools.cached_property
    def cutter(self) -> Cutter:
        return Cutter(self.graph, self.worth)

    @functools.cached_property
    def keeps(self) -> list[frozenset[int]]:
        """The empty set, and the arrays that the minimum cut at each price saves."""
        self.tick("choosing what to save")
        return list(dict.fromkeys([frozenset(), *(self.cutter.cut(p).keep for p in self.prices)]))

    @functools.cached_property
    def besides(self) -> Worth:
        """A second measure of work, which leads to other minimum cuts.

        Their memory lies between that of the cuts of the first measure, so they fit budgets that
        the first measure misses.
        """
        return Worth.of_graph(self.graph, 0.0 if self.worth.flop_share >= 0.25 else 0.5)

    @functools.cached_property
    def other_cutter(self) -> Cutter:
        return Cutter(self.graph, self.besides)

    @functools.cached_property
    def other_keeps(self) -> list[frozenset[int]]:
        """The arrays that the minimum cut at each price saves by the second measure of work."""
        return [self.other_cutter.cut(price).keep for price in self.prices]

    @functools.cached_property
    def fine(self) -> list[int]:
        """The positions of many cuts."""
        return positions(self.graph, self.keeps)

    @functools.cached_property
    def coarse(self) -> list[int]:
        """The positions of fewer cuts."""
        return coarser(self.graph, self.fine, self.keeps)


def _every_chain(problem: _Problem) -> Iterator[Schedule[int]]:
    """Yield every way to cut a few equations into regions that save nothing and plain segments."""
    n = len(problem.graph.equations)
    if n > _TINY:
        return
    for inner in itertools.product((False, True), repeat=n - 1):
        marks = [0, *(i for i, cut in enumerate(inner, 1) if cut), n]
        pairs = list(itertools.pairwise(marks))
        for plain in itertools.product((False, True), repeat=len(pairs)):
            yield tuple(Segment(a, b, plain=p) for (a, b), p in zip(pairs, plain, strict=True))


def _by_hand(problem: _Problem) -> Iterator[Schedule[int]]:
    """Yield schedules that people write by hand."""
    if problem.loops:
        return (schedule for _, schedule in presets(problem.graph))
    return _even(problem.graph, problem.keeps, problem.fine)


def _composed(problem: _Problem) -> Iterator[Schedule[int]]:
    """Yield the schedules of the dynamic program over several chains."""
    graph, short = problem.graph, len(problem.graph.equations) <= _SHORT
    sets = [problem.fine, problem.coarse, *([unbroken(graph, problem.fine)] if short else [])]
    if problem.few:  # near the minimum memory, blocks with equal contents need equal cuts
        blocks = sorted({*_absorbed(graph, _modules(graph, 2)), *_around_scans(graph)})
        sets += [blocks] if len(blocks) <= RECURSIVE else []
    measures = [problem.worth, problem.besides] if short else [problem.worth]
    for cuts, measure in itertools.product(dict.fromkeys(map(tuple, sets)), measures):
        yield from _solved(problem, Chain(graph, cuts, measure))


def _solved(problem: _Problem, chain: Chain) -> Iterator[Schedule[int]]:
    """Yield the schedules of the dynamic program over one chain."""
    graph, few = problem.graph, problem.few
    kept = [chain.level(keep) for keep in _distinct(graph, _worth_saving(problem, chain))]
    composer = Composer(chain, kept, problem.loops, problem.host_bandwidth)
    top = 1.02 * float(chain.plain.sum() + chain.flowing.max())
    if top <= 0:  # no activation has an element
        return
    # Every schedule that the dynamic program returns is simulated, which takes time. A short chain
    # or a small graph leaves time for finer steps of memory.
    steps = problem.slots * (4 if chain.count <= 32 else 2 if problem.small else 1)
    outer = set(problem.keeps)
    more = [frozenset(), _products(graph), frozenset(graph.residuals)]
    layers = [Layer(chain, level, more) for level in kept if level.keep in outer]
    problem.tick(f"searching the schedules of {chain.count} blocks")
    lean = [composer.solve(top * s, steps, layers) for s in ((0.5, 0.3) if few else (0.3,))]
    full = composer.solve(top, steps, layers if few or not lean[0] else ())
    # If nothing fits half of ``top``, search again with finer steps just above the minimum.
    if few and full and not lean[0]:
        least = simulate(graph, full[0]).peak_bytes
        lean.append(composer.solve(1.1 * least, 2 * steps, layers))
    for schedules in (full, *lean):
        yield from schedules


def _worth_saving(problem: _Problem, chain: Chain) -> Iterable[frozenset[int]]:
    """Return sets of arrays to save: minimum cuts, with and without the arrays that cross cuts."""
    crossing = {t for t, _, _ in chain.crossing}
    keeps = dict.fromkeys(problem.keeps)
    for number, price in enumerate(problem.prices):
        keeps.setdefault(problem.cutter.cut(price, free=crossing).keep)
        if problem.small:
            keeps.setdefault(problem.other_keeps[number])
            keeps.setdefault(problem.other_cutter.cut(price, free=crossing).keep)
    return keeps


# Each proposer yields schedules for a problem. If Ctrl-C ends the search, only the schedules of the
# first ones are known, so the fastest come first.
_PROPOSERS: tuple[Callable[[_Problem], Iterator[Schedule[int]]], ...] = (
    _every_chain,
    _by_hand,
    _composed,
)


# -- schedules by hand ----------------------------------------------------------------------------


def _even(
    graph: CostGraph, keeps: Sequence[frozenset[int]], fine: list[int]
) -> Iterator[Schedule[int]]:
    """Yield schedules that people write by hand, in which all regions share one policy.

    There is one region per module, or one for each of several parts of about equal size. Variants
    leave the last part, or the equations outside all modules, without a region.
    """
    n = len(graph.equations)
    paths = [e.module.split("/") for e in graph.equations]
    plain = Segment(0, n, plain=True)
    sets = [_modules(graph, depth) for depth in (1, 2)]
    small = n < _LONG
    sets += [_absorbed(graph, cuts) for cuts in sets if small]
    sets += [coarser(graph, fine, keeps, most) for most in (4, 8, 16, 32)[:: 1 if small else 2]]
    keeps = keeps[:: 1 if n < _MIDDLE else 4]  # the first set is empty, so it saves nothing
    for cuts in dict.fromkeys(tuple(cuts) for cuts in sets if len(cuts) < 200):
        for keep in dict.fromkeys([*keeps, _products(graph)]):
            parts = [_useful(graph, part) for part in _divided(graph, keep, cuts)]
            yield tuple(parts)
            yield (*parts[:-1], Segment(cuts[-2], n, plain=True))
            yield joined(
                tuple(
                    p if paths[p.start][0] else _part(graph, plain, p.start, p.stop) for p in parts
                )
            )


def _modules(graph: CostGraph, depth: int) -> list[int]:
    """Return the positions where a module of this depth begins, and both ends of the program."""
    paths = [e.module.split("/")[:depth] for e in graph.equations]
    return [0, *(i for i in range(1, len(paths)) if paths[i] != paths[i - 1]), len(paths)]


def _around_scans(graph: CostGraph) -> list[int]:
    """Return the positions before and after each scan, so that each scan is a part of its own."""
    return [i + k for i, e in enumerate(graph.equations) if e.loop is not None for k in (0, 1)]


def _absorbed(graph: CostGraph, cuts: Sequence[int], share: float = 0.25) -> list[int]:
    """Merge each small part into the part before it; the first part merges into the next one.

    A part is small if its equations make at most ``share`` of the bytes of the median part.
    """
    made = [0]
    for e in graph.equations:
        made.append(made[-1] + sum(graph.tensors[t].bytes for t in e.makes))
    sizes = sorted(made[b] - made[a] for a, b in itertools.pairwise(cuts))
    ends = [cuts[-1]]
    for cut in reversed(cuts[:-1]):
        if made[ends[-1]] - made[cut] > share * sizes[len(sizes) // 2]:
            ends.append(cut)
    return [0, *reversed(ends[:-1])]


def presets(graph: CostGraph) -> Iterator[tuple[str, Schedule[int]]]:
    """Yield the name and the schedule of the most common hand-written choices.

    There is one region for each module one level below the outermost one, and one for each
    iteration of a scan. The regions save nothing ("nothing, per block") or the results of matrix
    products ("dots, per block").
    """
    paths = [e.module.split("/") for e in graph.equations]
    scans = {e.index: e.loop for e in graph.equations if e.loop is not None}
    cuts = sorted({*_modules(graph, 2), *_around_scans(graph)})
    for name, kept in (("nothing", lambda part: frozenset[int]()), ("dots", _products)):
        schedule = []
        for part in _divided(graph, kept(graph), cuts):
            lo, hi = part.start, part.stop
            if lo in scans:
                loop = scans[lo]
                body = (Segment(0, len(loop.graph.equations), save=kept(loop.graph)),)
                loops = ((lo, (LoopPart(loop.length, 1, body),)),)
                schedule.append(Segment(lo, hi, plain=True, loops=loops))
            elif len(paths[lo]) > 1:
                schedule.append(_useful(graph, part))
            else:
                schedule.append(Segment(lo, hi, plain=True))
        yield f"{name}, per block", joined(tuple(schedule))


def repeated_blocks(graph: CostGraph) -> Iterator[Schedule[int]]:
    """Yield the schedules with one region for each repeated block, which saves nothing.

    A block is the outermost module whose name ends in a number, as in ``GPT/block_3``, or an
    iteration of a scan. In a program without such modules, as those of Flax NNX mostly are, it is
    one of several equal sequences of equations (`equal_parts`). In the first schedule, everything
    else has no region, as if the model applied the policy ``nothing`` to its blocks. In the second
    one the first block's region begins with the program, and the other modules are in regions too.
    There is none if the program repeats no block.
    """
    inside = [_paths.outermost_block(e.module) for e in graph.equations]
    if not any(inside):
        cuts = equal_parts(graph)
        for part, (start, stop) in enumerate(itertools.pairwise(cuts)):
            inside[start:stop] = [f"part {part}"] * (stop - start)
    if not any(inside) and not any(e.loop for e in graph.equations):
        return
    first = next((i for i, block in enumerate(inside) if block), 0)
    around = [
        e.module.partition("/")[0] if i >= first else inside[first]
        for i, e in enumerate(graph.equations)
    ]
    wider = [block or other for block, other in zip(inside, around, strict=True)]
    for names in dict.fromkeys((tuple(inside), tuple(wider))):
        starts = (i for i in range(1, len(names)) if names[i] != names[i - 1])
        cuts = sorted({0, len(names), *starts, *_around_scans(graph)})
        parts = itertools.pairwise(cuts)
        yield joined(tuple(_block(graph, lo, hi, bool(names[lo])) for lo, hi in parts))


def equal_parts(graph: CostGraph) -> list[int]:
    """Return the positions at which equal parts of a program begin, and the end of the last one.

    The parts follow each other, and their equations have the same primitives, FLOPs and results.
    If the program repeats several sequences, it is the one that covers most of it. If it repeats
    none, the list is empty.
    """
    bytes_of = [tensor.bytes for tensor in graph.tensors]
    keys = [(e.primitive, e.flops, *(bytes_of[t] for t in e.makes)) for e in graph.equations]
    places: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        places.setdefault(key, []).append(i)
    # What runs once in each part is there at equal distances.
    regular: dict[tuple[int, int], list[int]] = {}
    for where in places.values():
        steps = {b - a for a, b in itertools.pairwise(where)}
        if len(steps) == 1:
            regular.setdefault((steps.pop(), len(where)), where)
    longest = sorted(regular.items(), key=lambda found: math.prod(found[0]), reverse=True)
    for (size, _), where in longest[:_MOST_PERIODS]:
        back = 0
        while back < min(size - 1, where[0]) and len({keys[i - back - 1] for i in where}) == 1:
            back += 1
        starts = [i - back for i in where]
        if all(keys[i : i + size] == keys[starts[0] : starts[0] + size] for i in starts):
            return [*starts, starts[-1] + size]
    return []


# How many periods of a program are tried, the ones that would cover most of it first.
_MOST_PERIODS = 64


def _block(graph: CostGraph, start: int, stop: int, in_region: bool) -> Segment[int]:
    """Return a region that saves nothing, or one for each iteration if the part is a scan."""
    loop = graph.equations[start].loop
    if loop is None:
        return Segment(start, stop, plain=not in_region)
    body = (Segment(0, len(loop.graph.equations)),)
    loops = ((start, (LoopPart(loop.length, 1, body),)),)
    return Segment(start, stop, plain=True, loops=loops)


def _useful(graph: CostGraph, s: Segment[int]) -> Segment[int]:
    """Remove from a region's saved arrays those that its own backward pass does not use."""
    wanted = {t for e in graph.equations[s.start : s.stop] for t in e.needs}
    again = closure(graph, wanted, s.save, s.start, s.stop).again
    read = wanted.union(*(graph.equations[i].reads for i in again))
    return dataclasses.replace(s, save=s.save & read)


def _products(graph: CostGraph) -> frozenset[int]:
    """Return the results of matrix products and convolutions."""
    products = ("dot_general", "conv_general_dilated", "ragged_dot_general")
    return frozenset(t for e in graph.equations if e.primitive in products for t in e.makes)


def _distinct(graph: CostGraph, keeps: Iterable[frozenset[int]]) -> list[frozenset[int]]:
    """Drop each set that differs from an earlier one by at most 0.2 % of all residual bytes."""
    total = sum(graph.tensors[t].bytes for t in graph.residuals) or 1
    distinct: list[frozenset[int]] = []
    for keep in keeps:
        apart = (sum(graph.tensors[t].bytes for t in keep ^ other) for other in distinct)
        if all(a > 0.002 * total for a in apart):
            distinct.append(keep)
    return distinct


def pareto(found: Iterable[Candidate], worth: Worth = TIME) -> list[Candidate]:
    """Return the candidates that no other beats in both peak and extra work, sorted by peak."""
    return _pareto(found, lambda c: c.cost, worth)


def leaner(found: Sequence[Candidate], worth: Worth = TIME, most: int = 8) -> list[Candidate]:
    """Return candidates that save less than the one with the lowest peak, at about the same peak.

    By the simulation they have no advantage. The simulation can miss buffers that a compiler keeps
    live for long, for example weight gradients that it computes only at the end. Saving fewer bytes
    then lowers the compiled peak although the predicted peak stays the same.

    Args:
        found: the simulated candidates.
        worth: how FLOPs and seconds are combined into extra work.
        most: maximum number of candidates to return.
    """
    least = min(found, key=lambda c: (c.cost.peak_bytes, worth.extra(c.cost))).cost
    near = [
        c
        for c in found
        if c.cost.peak_bytes <= _NEAR * least.peak_bytes
        and c.cost.saved_bytes + c.cost.host_bytes < least.saved_bytes
    ]
    near.sort(key=lambda c: (c.cost.saved_bytes, worth.extra(c.cost)))
    kept: list[Candidate] = []
    for c in near:
        if not kept or worth.extra(c.cost) < worth.extra(kept[-1].cost) * (1 - 1e-6):
            kept.append(c)
    at = [(float(c.cost.saved_bytes), worth.extra(c.cost)) for c in kept]
    return _thinned(kept, at, most)


# Peaks up to this multiple of the lowest peak are about the same for `leaner`.
_NEAR = 1.02


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


def loop_plans(
    e: Any,
    worth: Worth = TIME,
    host_bandwidth: float = 0.0,
    most: int = 96,
    host_bytes: float = math.inf,
) -> list[LoopPlan[int]]:
    """Return the ways to run a scan that are worth having, from the lowest peak up.

    A plan runs all iterations with one schedule of the body, or a first range of them with one
    schedule and the rest with another, or groups of iterations as one region each.

    Args:
        e: the scan.
        worth: how FLOPs and seconds are combined into extra work.
        host_bandwidth: bytes per second between device and host, in one direction. If it is not 0,
            the arrays that an iteration saves may be offloaded.
        most: maximum number of plans to return.
        host_bytes: the most that all iterations may offload.
    """
    loop = e.loop
    n = len(loop.graph.equations)
    length = loop.length
    whole = (Segment(0, n),)
    # Consider all proposals and not only the frontier of the body. The bytes that one iteration
    # saves count once per iteration, so they matter more than the peak within an iteration.
    proposed = _simulated(loop.graph, silent, 8, 120, 0.0, worth)
    regions = [whole, *_regions(loop.graph, worth)]
    bodies = dict.fromkeys([*regions, *(c.schedule for c in proposed)])
    if host_bandwidth:
        bodies |= dict.fromkeys(b for r in regions for b in _moved(loop, r))
    one: list[LoopPlan[int]] = [(LoopPart(length, 1, body),) for body in bodies]
    bandwidth = host_bandwidth or math.inf
    cost = {p: loop_cost(loop, p, bandwidth) for p in one}
    hull = _toggled(loop, _pareto(one, cost.__getitem__, worth), cost, worth)
    found = list(hull)
    corners = _convex(hull, [(cost[p].peak_bytes, worth.extra(cost[p])) for p in hull])
    for a, b in itertools.pairwise(corners):
        for share in (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875):
            first = round(length * share)
            if 0 < first < length:
                rest = LoopPart(length - first, 1, a[0].body)
                found.append((LoopPart(first, 1, b[0].body), rest))
    # A group saves only the carry that enters it, so it offloads nothing.
    here = [p for p in hull if not cost[p].host_bytes]
    for group in range(2, min(length, 16)):
        for body in dict.fromkeys([here[0][0].body, whole] if here else [whole]):
            found.append((LoopPart(length, group, body),))
    cost |= {p: loop_cost(loop, p, bandwidth) for p in found}
    found = [p for p in found if cost[p].host_bytes <= host_bytes]
    kept = _pareto(found, cost.__getitem__, worth)
    return _thinned(kept, [(cost[p].peak_bytes, worth.extra(cost[p])) for p in kept], most)


def _toggled(
    loop: Loop,
    found: list[LoopPlan[int]],
    cost: dict[LoopPlan[int], Simulated],
    worth: Worth,
    most: int = 4000,
) -> list[LoopPlan[int]]:
    """Change what the only region of a body saves, one array at a time, until no change helps.

    Minimum cuts yield only the corners of a convex hull of memory and work. In a scan, the distance
    between two corners is multiplied by the number of iterations, so the sets of arrays between two
    corners are worth finding. The function adds the costs that it computes to ``cost``.
    """

    def region(p: LoopPlan[int]) -> Segment[int] | None:
        (body,) = [part.body for part in p]
        s = body[0]
        return None if len(body) > 1 or s.plain or s.inside or s.loops or s.offload else s

    pool = {t for p in found if (s := region(p)) is not None for t in s.save}
    done: set[LoopPlan[int]] = set()
    while fresh := [p for p in found if p not in done and region(p) is not None]:
        for p in fresh:
            done.add(p)
            s = region(p)
            assert s is not None
            for t in sorted(pool):
                if len(cost) >= most:
                    return found
                toggled = dataclasses.replace(s, save=s.save ^ {t})
                other = (LoopPart(loop.length, 1, (toggled,)),)
                if other not in cost:
                    cost[other] = loop_cost(loop, other)
        found = _pareto(cost, cost.__getitem__, worth)
    return found


def _moved(loop: Loop, body: Schedule[int]) -> Iterator[Schedule[int]]:
    """Yield variants of a body with one region that offload its carry, its saved arrays or both."""
    region, *others = body
    if others:
        return
    carry = frozenset(t for t, _ in loop.carry)
    for moved in dict.fromkeys([carry, region.save, carry | region.save]):
        if moved:
            yield (dataclasses.replace(region, save=region.save - moved, offload=moved),)


def silent(what: str) -> None:
    """Ignore a progress message."""
    del what


def _regions(graph: CostGraph, worth: Worth) -> Iterator[Schedule[int]]:
    """Yield, for each price per byte, one region around everything and one region per part."""
    cutter = Cutter(graph, worth)
    n = len(graph.equations)
    keeps = dict.fromkeys(cutter.cut(price).keep for price in price_range(graph, 40))
    keeps[_products(graph)] = None
    cuts = coarser(graph, positions(graph, list(keeps)), list(keeps), most=8)
    for keep in keeps:
        yield (Segment(0, n, save=keep),)
        yield tuple(_divided(graph, keep, cuts))


def _convex(items: Sequence[_T], at: Sequence[tuple[float, float]]) -> list[_T]:
    """Return the corners of the lower convex hull of a falling curve.

    A mixture of two neighbouring corners is never worse than any item between them.
    """
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
    """Remove the item whose two neighbours on the curve are closest, until ``most`` remain.

    The distance of two neighbours is the logarithm of the ratio of their peaks, plus the difference
    of their work as a share of the highest work.
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
