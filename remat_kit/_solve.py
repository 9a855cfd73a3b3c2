"""Which schedules of a cost graph are worth having: the least extra time for every peak.

1. What to keep is a minimum cut for each of a range of prices of a byte (`_cut.py`).
2. The program becomes a chain of blocks, which a dynamic program puts together (`_chain.py`,
   `_compose.py`).
3. A scan is solved as a program of its own: schedules of its body, for all its iterations, for two
   ranges of them, or in groups.
4. What people write by hand is proposed too, and small graphs are improved change by change.

Whatever is proposed is simulated exactly, and what is not better than something else is thrown
away.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from remat_kit._chain import Chain, coarser, positions, unbroken
from remat_kit._compose import RECURSIVE, Composer, Layer, joined
from remat_kit._cost import CostGraph, Loop
from remat_kit._cut import TIME, Cutter, Worth, price_range
from remat_kit._simulate import LoopPlan, Segment, Simulated, closure, loop_cost, simulate

_T = TypeVar("_T")

# Equations: up to so many a graph is improved change by change; a chain is put together by more
# than one measure; and below so many, more is tried, for planning is to take a few seconds.
_SMALL, _SHORT, _MIDDLE, _LONG = 32, 128, 2000, 4500


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A schedule and what it takes."""

    schedule: tuple[Segment, ...]
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
    """Return the schedules of which none is beaten in both peak and extra work, by peak.

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
    worth: Worth = TIME,
) -> list[Candidate]:
    """Return every schedule that is worth a look, simulated; the first has no region.

    Args:
        graph: of the loss, or of the body of a scan.
        worth: what work is.
        tick: told what is worked on; may raise `KeyboardInterrupt`.
        levels: how many prices of a byte are tried, two or three times as many in a graph that is
            not long.
        slots: into how many steps memory is divided.
        host_bandwidth: bytes a second to the host, one way; 0 where nothing is to be moved there.
    """
    found: list[Candidate] = []
    try:
        for candidate in _simulated(graph, tick, levels, slots, host_bandwidth, worth):
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
            loops[e.index] = loop_plans(e, worth, host_bandwidth)
    bandwidth = host_bandwidth or math.inf
    seen: set[tuple[Segment, ...]] = set()
    for schedule in _proposals(graph, loops, levels, slots, bandwidth, tick, worth):
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
    host_bandwidth: float,
    tick: Callable[[str], None],
    worth: Worth,
) -> Iterable[tuple[Segment, ...]]:
    if len(graph.equations) <= _TINY:
        yield from _every_chain(len(graph.equations))
    cutter = Cutter(graph, worth)
    tick("what to keep")
    few, small = (len(graph.equations) < most for most in (_MIDDLE, _LONG))
    prices = price_range(graph, levels * (3 if few else 2 if small else 1))
    everywhere = list(dict.fromkeys([frozenset(), *(cutter.cut(p).keep for p in prices)]))
    # What is the cheapest to keep by another measure fits budgets between those of this one's.
    besides = Worth.of_graph(graph, 0.0 if worth.flop_share >= 0.25 else 0.5)
    other = Cutter(graph, besides)
    others = [other.cut(price).keep for price in prices] if small else []
    fine = positions(graph, everywhere)
    coarse = coarser(graph, fine, everywhere)
    if loops:
        yield from (schedule for _, schedule in presets(graph))
    else:
        yield from _even(graph, everywhere, fine)
    short = len(graph.equations) <= _SHORT
    measures = [worth, besides] if short else [worth]
    sets = [fine, coarse, *([unbroken(graph, fine)] if short else [])]
    if few:  # near the least memory, equal blocks are best treated as such
        blocks = sorted({*_absorbed(graph, _modules(graph, 2)), *_around_scans(graph)})
        sets += [blocks] if len(blocks) <= RECURSIVE else []
    more = [frozenset(), _products(graph), frozenset(graph.residuals)]
    outer = set(everywhere)
    for cuts, measure in itertools.product(dict.fromkeys(map(tuple, sets)), measures):
        chain = Chain(graph, cuts, measure)
        handed = {t for t, _, _ in chain.crossing}
        keeps = dict.fromkeys(everywhere)
        for number, price in enumerate(prices):
            keeps.setdefault(cutter.cut(price, free=handed).keep)
            if small:
                keeps.setdefault(others[number])
                keeps.setdefault(other.cut(price, free=handed).keep)
        kept = [chain.level(k) for k in _distinct(graph, keeps)]
        composer = Composer(chain, kept, loops, host_bandwidth)
        top = 1.02 * float(chain.plain.sum() + chain.flowing.max())
        # Each schedule is simulated; short chains and small graphs can have finer steps.
        steps = slots * (4 if chain.count <= 32 else 2 if small else 1)
        around = [level for level in kept if level.keep in outer]
        layers = [Layer(chain, level, more) for level in around]
        tick(f"schedules of {chain.count} blocks")
        lean = [composer.solve(top * s, steps, layers) for s in ((0.5, 0.3) if few else (0.3,))]
        full = composer.solve(top, steps, layers if few or not lean[0] else ())
        if few and full and not lean[0]:  # the least is above: finer steps up to a bit more
            least = simulate(graph, full[0]).peak_bytes
            lean.append(composer.solve(1.1 * least, 2 * steps, layers))
        for schedules in (full, *lean):
            yield from schedules


def _even(
    graph: CostGraph, keeps: Sequence[frozenset[int]], fine: list[int]
) -> Iterator[tuple[Segment, ...]]:
    """Yield what people write by hand: a region for each module, or for some equal parts, all with
    the same policy; with and without one around what comes last or is in no module.
    """
    n = len(graph.equations)
    paths = [e.module.split("/") for e in graph.equations]
    plain = Segment(0, n, plain=True)
    sets = [_modules(graph, depth) for depth in (1, 2)]
    small = n < _LONG
    sets += [_absorbed(graph, cuts) for cuts in sets if small]
    sets += [coarser(graph, fine, keeps, most) for most in (4, 8, 16, 32)[:: 1 if small else 2]]
    keeps = keeps[:: 1 if n < _MIDDLE else 4]  # the first keeps nothing
    for cuts in dict.fromkeys(tuple(cuts) for cuts in sets if len(cuts) < 200):
        for keep in dict.fromkeys([*keeps, _products(graph)]):
            parts = [
                _useful(graph, _part(graph, Segment(0, n, save=keep), a, b))
                for a, b in itertools.pairwise(cuts)
            ]
            yield tuple(parts)
            yield (*parts[:-1], Segment(cuts[-2], n, plain=True))
            yield joined(
                tuple(
                    p if paths[p.start][0] else _part(graph, plain, p.start, p.stop) for p in parts
                )
            )


def _modules(graph: CostGraph, depth: int) -> list[int]:
    """Return where modules begin, so far down their paths, and both ends."""
    paths = [e.module.split("/")[:depth] for e in graph.equations]
    return [0, *(i for i in range(1, len(paths)) if paths[i] != paths[i - 1]), len(paths)]


def _around_scans(graph: CostGraph) -> list[int]:
    """Return where scans begin and end: each is a part of its own."""
    return [i + k for i, e in enumerate(graph.equations) if e.loop is not None for k in (0, 1)]


def _absorbed(graph: CostGraph, cuts: Sequence[int], share: float = 0.25) -> list[int]:
    """Give parts that make little beside the median one to the part before, or the first after."""
    made = [0]
    for e in graph.equations:
        made.append(made[-1] + sum(graph.tensors[t].bytes for t in e.makes))
    sizes = sorted(made[b] - made[a] for a, b in itertools.pairwise(cuts))
    found = [cuts[-1]]
    for cut in reversed(cuts[:-1]):
        if made[found[-1]] - made[cut] > share * sizes[len(sizes) // 2]:
            found.append(cut)
    return [0, *reversed(found[:-1])]


def presets(graph: CostGraph) -> Iterator[tuple[str, tuple[Segment, ...]]]:
    """Yield what people reach for first, by name: a region for each module below the outermost one,
    or for each iteration of a scan, that keeps nothing or the results of matrix products.
    """
    n = len(graph.equations)
    paths = [e.module.split("/") for e in graph.equations]
    scans = {e.index: e.loop for e in graph.equations if e.loop is not None}
    cuts = sorted({*_modules(graph, 2), *_around_scans(graph)})
    for name, kept in (("nothing", lambda part: frozenset[int]()), ("dots", _products)):
        schedule = []
        for lo, hi in itertools.pairwise(cuts):
            if lo in scans:
                loop = scans[lo]
                body = (Segment(0, len(loop.graph.equations), save=kept(loop.graph)),)
                loops = ((lo, LoopPlan(((loop.length, 1, body),))),)
                schedule.append(Segment(lo, hi, plain=True, loops=loops))
            elif len(paths[lo]) > 1:
                part = _part(graph, Segment(0, n, save=kept(graph)), lo, hi)
                schedule.append(_useful(graph, part))
            else:
                schedule.append(Segment(lo, hi, plain=True))
        yield f"{name}, per block", joined(tuple(schedule))


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


def pareto(found: Iterable[Candidate], worth: Worth = TIME) -> list[Candidate]:
    """Return the candidates that no other beats in both peak and extra work, by peak."""
    return _pareto(found, lambda c: c.cost, worth)


def leaner(found: Sequence[Candidate], worth: Worth = TIME, most: int = 8) -> list[Candidate]:
    """Return candidates that keep less than that of the least peak, for about the same peak.

    The simulation sees no use in them. But where it misses what a compiler holds for long, such as
    weight gradients that are put off to the end, to keep less helps all the same.
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
    e: Any, worth: Worth = TIME, host_bandwidth: float = 0.0, most: int = 96
) -> list[LoopPlan]:
    """Return ways to run a scan: its body's schedules, two depth ranges, groups.

    With a ``host_bandwidth`` what an iteration keeps may wait in the host's memory.
    """
    loop = e.loop
    n = len(loop.graph.equations)
    length = loop.length
    whole = (Segment(0, n),)
    # All that is proposed, for what counts here is what an iteration keeps, many times over, and
    # not its own peak.
    proposed = _simulated(loop.graph, silent, 8, 120, 0.0, worth)
    regions = [whole, *_regions(loop.graph, worth)]
    bodies = dict.fromkeys([*regions, *(c.schedule for c in proposed)])
    if host_bandwidth:
        bodies |= dict.fromkeys(b for r in regions for b in _moved(loop, r))
    one = [LoopPlan(((length, 1, body),)) for body in bodies]
    bandwidth = host_bandwidth or math.inf
    cost = {p: loop_cost(loop, p, bandwidth) for p in one}
    hull = _toggled(loop, _pareto(one, cost.__getitem__, worth), cost, worth)
    found = list(hull)
    corners = _convex(hull, [(cost[p].peak_bytes, worth.extra(cost[p])) for p in hull])
    for a, b in itertools.pairwise(corners):
        for share in (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875):
            first = round(length * share)
            if 0 < first < length:
                parts = ((first, 1, b.parts[0][2]), (length - first, 1, a.parts[0][2]))
                found.append(LoopPlan(parts))
    here = [p for p in hull if not cost[p].host_bytes]  # a group keeps nothing but what came in
    for group in range(2, min(length, 16)):
        for body in dict.fromkeys([here[0].parts[0][2], whole] if here else [whole]):
            found.append(LoopPlan(((length, group, body),)))
    cost |= {p: loop_cost(loop, p, bandwidth) for p in found}
    kept = _pareto(found, cost.__getitem__, worth)
    return _thinned(kept, [(cost[p].peak_bytes, worth.extra(cost[p])) for p in kept], most)


def _toggled(
    loop: Loop,
    found: list[LoopPlan],
    cost: dict[LoopPlan, Simulated],
    worth: Worth,
    most: int = 4000,
) -> list[LoopPlan]:
    """Improve what a body's one region keeps, one array at a time, until no change helps.

    Minimum cuts are the corners of a hull; for a scan, what lies between two of them counts as many
    times as it has iterations. Costs are added to ``cost``.
    """

    def region(p: LoopPlan) -> Segment | None:
        (body,) = [body for _, _, body in p.parts]
        s = body[0]
        return None if len(body) > 1 or s.plain or s.inside or s.loops or s.offload else s

    pool = {t for p in found if (s := region(p)) is not None for t in s.save}
    done: set[LoopPlan] = set()
    while fresh := [p for p in found if p not in done and region(p) is not None]:
        for p in fresh:
            done.add(p)
            s = region(p)
            assert s is not None
            for t in sorted(pool):
                if len(cost) >= most:
                    return found
                other = LoopPlan(((loop.length, 1, (dataclasses.replace(s, save=s.save ^ {t}),)),))
                if other not in cost:
                    cost[other] = loop_cost(loop, other)
        found = _pareto(cost, cost.__getitem__, worth)
    return found


def _moved(loop: Loop, body: tuple[Segment, ...]) -> Iterator[tuple[Segment, ...]]:
    """Yield a body of one region with what came in, what it keeps or both in the host's memory."""
    region, *others = body
    if others:
        return
    carry = frozenset(t for t, _ in loop.carry)
    for moved in dict.fromkeys([carry, region.save, carry | region.save]):
        if moved:
            yield (dataclasses.replace(region, offload=moved),)


def silent(what: str) -> None:
    """Show no progress."""
    del what


def _regions(graph: CostGraph, worth: Worth) -> Iterator[tuple[Segment, ...]]:
    """Yield one region over everything for each price of a byte, and one for each part of it."""
    cutter = Cutter(graph, worth)
    n = len(graph.equations)
    keeps = dict.fromkeys(cutter.cut(price).keep for price in price_range(graph, 40))
    keeps[_products(graph)] = None
    cuts = coarser(graph, positions(graph, list(keeps)), list(keeps), most=8)
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
