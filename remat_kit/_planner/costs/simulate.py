"""How high is the peak memory of a checkpoint schedule of a loss, and how much does it recompute?

A schedule divides the program into segments, each with or without a region. `simulate` walks the
forward and the backward pass of a schedule through a `CostGraph` and counts the live bytes after
each equation. The planner, the presets and the baselines all use this one simulation. In the
cost model of Chen et al., "Training deep nets with sublinear memory cost", 2016, the peak is the
sum of what all regions save and what the largest one recomputes. The simulation adds nested
regions, saved and offloaded activations, scans, cotangents and the fusions of the compiler.

Example: take eight layers, each of which makes 4 MiB of activations on an H100. Without a region,
the step saves 32 MiB. With one region per two layers, it saves only what enters the regions, and
its peak is lower. One region around everything saves nothing, but because it recomputes everything
at once, its peak is as high as without a region. The last figure of a line is the extra FLOPs as a
share of the forward pass:

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
>>> end = len(graph.equations)
>>> for schedule in (
...     [Segment(0, end, plain=True)],
...     [*(Segment(i, i + 4) for i in range(0, 16, 4)), Segment(16, end, plain=True)],
...     [Segment(0, end)],
... ):
...     cost = simulate(graph, schedule)
...     saved, peak = cost.saved_bytes >> 20, cost.peak_bytes >> 20
...     print(f"saved {saved} MiB, peak {peak}, +{cost.extra_flops / graph.forward_flops:.0%}")
saved 32 MiB, peak 44, +0%
saved 12 MiB, peak 36, +100%
saved 0 MiB, peak 44, +100%
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from remat_kit._planner.costs.graph import CostGraph, Equation, Loop
from remat_kit._policy.schedule import LoopPlan, Schedule, Segment

# -- whole programs -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Simulated:
    """The predicted memory and extra work of a schedule.

    Attributes:
        peak_bytes: the most bytes that are live at one time, without the arguments: intermediate
            arrays and gradients. A gradient counts from the time when memory is reserved for it,
            which may be before it is computed.
        saved_bytes: bytes saved on the device when the backward pass begins.
        host_bytes: bytes offloaded to the host's memory when the backward pass begins.
        extra_flops: floating-point operations that are recomputed.
        extra_seconds: roofline time of the recompute and of the transfers between device and host.
        peak_segment: equations ``(start, stop)`` of the innermost segment in which the peak occurs.
        peak_kind: the phase of the peak: ``"forward"``, ``"recompute"`` or ``"backward"``.
    """

    peak_bytes: int
    saved_bytes: int
    host_bytes: int
    extra_flops: float
    extra_seconds: float
    peak_segment: tuple[int, int]
    peak_kind: str


def simulate(
    graph: CostGraph, schedule: Sequence[Segment[int]], *, host_bandwidth: float = math.inf
) -> Simulated:
    """Return the predicted peak memory and extra work of a schedule.

    A saved array is live from its computation to the end of the backward pass of the first segment
    that reads it. The backward pass of a region first recomputes its missing residuals. Then it
    visits the region's equations in reverse order, while the cotangents at that point are live. An
    array that the compiler fuses into its readers takes no bytes.

    >>> import jax, jax.numpy as jnp
    >>> from remat_kit._planner.costs.build import trace
    >>> from remat_kit._chip.target import target
    >>> x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    >>> graph = trace(lambda x: jnp.sum(jnp.sin(jnp.cumsum(jnp.sin(jnp.cumsum(x))))), (x,),
    ...               target("cpu"))
    >>> n = len(graph.equations)
    >>> simulate(graph, [Segment(0, n)]).extra_flops > 0
    True
    >>> simulate(graph, [Segment(0, n, plain=True)]).extra_flops
    0.0

    Args:
        graph: the cost graph of the loss.
        schedule: segments that cover the program from the first equation to the last.
        host_bandwidth: bytes per second between the device and the host, for offloaded arrays.
    """
    return Simulation(graph, host_bandwidth).run(tuple(schedule))


@dataclasses.dataclass(frozen=True)
class _Demand:
    """What the backward pass of a segment needs.

    Attributes:
        again: the equations that run again.
        outside: the tensors from outside the segment that these equations or derivatives read.
        flops: floating-point operations of ``again``.
        seconds: roofline time of ``again``.
        makes: the tensors with bytes that ``again`` makes.
    """

    again: tuple[int, ...]
    outside: frozenset[int]
    flops: float = 0.0
    seconds: float = 0.0
    makes: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class _SimulationWalk:
    """Peaks of one segment's backward pass, above the bytes live at its start, and its scans' work.

    Attributes:
        recompute: the most bytes while the segment recomputes.
        backward: the most bytes while its derivatives run.
        flops: floating-point operations that scans in the segment recompute.
        seconds: roofline time of these, and of transfers that scans wait for.
    """

    recompute: float
    backward: float
    flops: float
    seconds: float


class Simulation:
    """One walk through a schedule.

    The walk caches the needs and the costs of segments in ``CostGraph.memory``, because the
    schedules that a search compares share most of their segments.
    """

    def __init__(self, graph: CostGraph, host_bandwidth: float):
        self.graph = graph
        self.host_bandwidth = host_bandwidth
        self.peak, self.where, self.kind = 0, (0, len(graph.equations)), "forward"
        self.flops = self.seconds = 0.0

    def run(self, schedule: Schedule[int]) -> Simulated:
        held = self.held(schedule)
        on_host = frozenset().union(*(s.offload for s in schedule))
        saved = frozenset().union(*held)
        twice = self.twice(schedule, held)
        own = sum(self.own_bytes(s) for s in schedule) + sum(twice)
        host = self.bytes(saved & on_host)
        self.forward(schedule, saved)
        self.seconds += 2 * host / self.host_bandwidth
        self.backward(schedule, held, 0, frozenset(), on_host, twice)
        if self.graph.early:
            self.rebuilt_early(schedule)
        return Simulated(
            peak_bytes=self.peak,
            saved_bytes=self.bytes(saved - on_host) + own,
            host_bytes=host + self.loops_on_host(schedule),
            extra_flops=self.flops,
            extra_seconds=self.seconds,
            peak_segment=self.where,
            peak_kind=self.kind,
        )

    # .. what is saved

    def bytes(self, tensors: Iterable[int]) -> int:
        return sum(map(self.graph.sizes.__getitem__, tensors))

    def held(self, schedule: Sequence[Segment[int]]) -> list[frozenset[int]]:
        """Return, for each segment, the tensors that must be live when its backward pass begins."""
        return [self.plain_keeps(s) if s.plain else self.region_holds(s) for s in schedule]

    def region_holds(self, segment: Segment[int]) -> frozenset[int]:
        found = self.graph.memory.get(("holds", segment))
        if found is None:
            found = self.demand(segment).outside | segment.kept
            self.graph.memory["holds", segment] = found
        return found

    def plain_keeps(self, segment: Segment[int]) -> frozenset[int]:
        key = segment.start, segment.stop
        found = self.graph.memory.get(key)
        if found is None:
            found = self.graph.memory[key] = plain_keeps(self.graph, *key)
        return found

    def own_bytes(self, segment: Segment[int]) -> int:
        """Return bytes of residuals that derivatives make themselves; regions recompute theirs."""
        if not segment.plain:
            return 0
        own = int(self.graph.made_outside[segment.start : segment.stop].sum())
        for i, plan in segment.loops:
            e = self.graph.equations[i]
            assert e.loop is not None
            own += loop_bytes(e.loop, plan) - e.made_in_memory
        return own

    def twice(self, schedule: Sequence[Segment[int]], held: Sequence[frozenset[int]]) -> list[int]:
        """Return, for each segment, the bytes of its saved tensors that later segments hold too.

        In the body of a scan, XLA stacks over the iterations the arrays that a region saves and
        those that it passes to later segments. An array that is both has two stacks (seen in a
        program for CPU, jax 0.12). Outside of scans such an array exists once.
        """
        found = [0] * len(schedule)
        if not self.graph.stacked:
            return found
        later = set[int]()
        for number in range(len(schedule) - 1, -1, -1):
            if not schedule[number].plain:
                found[number] = self.bytes(schedule[number].kept & later)
            later.update(held[number])
        return found

    def loops_on_host(self, schedule: Sequence[Segment[int]]) -> int:
        """Return the bytes that the iterations of all scans offload to the host's memory."""
        total = 0
        for i, plan in (loop for s in schedule for leaf in s.leaves() for loop in leaf.loops):
            loop = self.graph.equations[i].loop
            assert loop is not None
            total += loop_cost(loop, plan).host_bytes
        return total

    def demand(self, segment: Segment[int]) -> _Demand:
        found = self.graph.memory.get(segment)
        if found is None:
            found = self.graph.memory[segment] = self._demand(segment)
        return found

    def _demand(self, segment: Segment[int]) -> _Demand:
        lo, hi = segment.start, segment.stop
        tensors = self.graph.tensors
        if segment.plain:
            return _Demand(
                (), frozenset(t for t in self.plain_keeps(segment) if tensors[t].producer < lo)
            )
        if segment.inside:
            wanted = set[int]()
            for part in segment.inside:
                wanted |= self.demand(part).outside | part.kept
                if part.plain:  # derivatives compute their own residuals from what they need
                    wanted |= self.plain_keeps(part)
                    wanted.update(
                        t for e in self.graph.equations[part.start : part.stop] for t in e.needs
                    )
        else:
            wanted = {t for e in self.graph.equations[lo:hi] for t in e.needs}
        return closure(self.graph, wanted, segment.kept, lo, hi)

    # .. the two passes

    def note(self, live: float, segment: Segment[int], kind: str) -> None:
        if live > self.peak:
            self.peak, self.where, self.kind = int(live), (segment.start, segment.stop), kind

    def forward(self, schedule: Sequence[Segment[int]], kept: frozenset[int]) -> None:
        """Note the live bytes of the first forward pass after each equation.

        Live are those of the arrays ``kept`` that have been computed, and all arrays that later
        equations read.
        """
        graph = self.graph
        steps = graph.written_steps.copy()
        at, amounts, fused = graph.kept_steps
        some = np.fromiter(kept, int, len(kept))
        np.add.at(steps, at[some], amounts[some])
        for t in kept & fused.keys():
            for s, until in fused[t]:
                if s not in kept:
                    for place, amount in until:
                        steps[place] += amount
        for segment in schedule:
            if segment.plain:
                steps[segment.start : segment.stop] += graph.made_outside[
                    segment.start : segment.stop
                ]
                for i, plan in segment.loops:
                    e = graph.equations[i]
                    assert e.loop is not None
                    steps[i] += loop_bytes(e.loop, plan) - e.made_in_memory
        # Add the memory that the compiler reserves for gradients from the start.
        live = np.cumsum(steps) + graph.standing_bytes[-1]
        if schedule := [s for s in schedule if s.stop > s.start]:
            most = np.maximum.reduceat(live[: schedule[-1].stop], [s.start for s in schedule])
            number = int(most.argmax())
            self.note(float(most[number]), schedule[number], "forward")

    def backward(
        self,
        schedule: Sequence[Segment[int]],
        held: Sequence[frozenset[int]],
        base: float,
        given: frozenset[int],
        on_host: frozenset[int],
        twice: Sequence[int] = (),
    ) -> None:
        """Walk back through the segments, while ``base`` bytes and the tensors ``given`` are live.

        Args:
            schedule: the segments, in forward order.
            held: for each segment, the tensors that its backward pass needs.
            base: bytes that are live throughout, those of ``given`` included.
            given: tensors that are live throughout.
            on_host: tensors that are on the host while a segment runs that does not need them.
            twice: for each segment, the bytes that `twice` counts.
        """
        own = [self.own_bytes(s) for s in schedule]
        if twice:
            own = [a + b for a, b in zip(own, twice, strict=True)]
        # For each segment, `mine` holds the tensors that no earlier segment needs. One set of what
        # is there takes less time than the union of all earlier segments for each segment.
        there, mine, levels, away = set(given), [], [base], []
        for tensors, made in zip(held, own, strict=True):
            away.append(self.bytes((on_host & there) - tensors) if on_host else 0)
            # A set keeps its hash, and the walks of segments are found by these sets.
            mine.append(tensors if tensors.isdisjoint(there) else tensors - there)
            levels.append(levels[-1] + self.bytes(mine[-1]) + made)
            there.update(mine[-1])
        for number in range(len(schedule) - 1, -1, -1):
            segment = schedule[number]
            level = levels[number + 1] - away[number] + self.cotangents_across(segment.stop)
            live = given | held[number] if given else held[number]
            self.segment(segment, level, live, mine[number])

    def rebuilt_early(self, schedule: Sequence[Segment[int]]) -> None:
        """Note the peak if XLA:CPU recomputes the last region before the derivatives after it.

        This can happen if a region around regions precedes the last equations, which are in no
        region. Then the arrays that this region recomputes for its inner regions may be live during
        the backward pass of the last equations.
        """
        last = max((k for k, s in enumerate(schedule) if not s.plain), default=-1)
        if last < 0 or last + 1 == len(schedule) or not schedule[last].inside:
            return
        outer = schedule[last]
        before, after = schedule[: last + 1], schedule[last + 1 :]
        there = frozenset().union(*self.held(before))
        rebuilt = frozenset().union(*self.held(outer.inside)) - there
        tail = Simulation(self.graph, self.host_bandwidth)
        base = self.bytes(there | rebuilt) + sum(map(self.own_bytes, before))
        tail.backward(after, self.held(after), base, there, frozenset())
        self.note(tail.peak, outer, "recompute")

    def segment(
        self, segment: Segment[int], level: float, available: frozenset[int], mine: frozenset[int]
    ) -> None:
        """Walk back through one segment.

        Args:
            segment: the segment.
            level: bytes live when its backward pass begins.
            available: tensors live when its backward pass begins. Those that only other segments
                need may be left out.
            mine: those of ``available`` that no earlier segment needs.
        """
        demand = self.demand(segment)
        self.flops += demand.flops
        self.seconds += demand.seconds
        if segment.inside:
            # The inner segments add the cotangents of the segment's results themselves.
            self.backward(
                segment.inside,
                self.held(segment.inside),
                level - self.cotangents_across(segment.stop),
                available,
                frozenset(),
            )
            return
        key = segment, demand.makes & available, mine, self.host_bandwidth
        walk = self.graph.memory.get(key)
        if walk is None:
            walk = self.graph.memory[key] = self.leaf(segment, demand.again, key[1], mine)
        self.flops += walk.flops
        self.seconds += walk.seconds
        self.note(level + walk.recompute, segment, "recompute")
        self.note(level + walk.backward, segment, "backward")

    def leaf(
        self,
        segment: Segment[int],
        again: Sequence[int],
        available: frozenset[int],
        mine: frozenset[int],
    ) -> _SimulationWalk:
        """Walk back through a segment without inner segments: recompute, then differentiate.

        The backward pass visits readers from last to first. When the derivative of the first reader
        of a tensor is done, the tensor is freed, unless an earlier segment needs it.
        """
        graph, present = self.graph, available | mine
        equations = graph.equations[segment.start : segment.stop]
        first_need: dict[int, int] = {}
        for e in reversed(equations):
            for t in e.needs:
                sources = (t,) if t in present else graph.tensors[t].sources
                first_need.update(dict.fromkeys(sources, e.index))
        recompute, rebuilt = self.recomputed(again, available, first_need, segment.stop)
        live = float(self.bytes(rebuilt))
        if not segment.plain:
            live += sum(e.made_in_memory for e in equations if e.loop is None)
        recompute = max(recompute, live + graph.standing_bytes[segment.stop])
        released: dict[int, int] = {}
        for t in rebuilt | (mine & first_need.keys()):
            released[first_need[t]] = released.get(first_need[t], 0) + graph.sizes[t]
        before = self.flops, self.seconds
        backward = self.differentiated(segment, live, released)
        flops, seconds = self.flops - before[0], self.seconds - before[1]
        self.flops, self.seconds = before
        return _SimulationWalk(recompute, backward, flops, seconds)

    def recomputed(
        self,
        again: Sequence[int],
        available: frozenset[int],
        first_need: Mapping[int, int],
        stop: int,
    ) -> tuple[float, set[int]]:
        """Return the most live bytes while equations run again, and the residuals they make.

        Args:
            again: the equations, in order.
            available: tensors that are live already.
            first_need: the first reader of each tensor that a derivative reads.
            stop: the end of the segment; its later readers do not run again.
        """
        tensors, live, most = self.graph.tensors, 0, 0
        dies: dict[int, int] = {}
        rebuilt = set[int]()
        for i in again:
            for t in self.graph.equations[i].makes:
                if t in available:
                    continue
                tensor = tensors[t]
                if t in first_need:
                    rebuilt.add(t)
                    live += tensor.bytes
                elif tensor.in_memory:
                    last = max((u for u in tensor.users if u < stop), default=i)
                    live += tensor.bytes
                    dies[last] = dies.get(last, 0) + tensor.bytes
            most = max(most, live + self.graph.equations[i].transient_bytes)
            live -= dies.pop(i, 0)
        return float(most), rebuilt

    def differentiated(
        self, segment: Segment[int], live: float, released: Mapping[int, int]
    ) -> float:
        """Return the most live bytes while the derivatives of a segment run.

        Args:
            segment: the segment, without inner segments.
            live: bytes that the segment holds when its first derivative begins.
            released: bytes of the residuals that no derivative before each equation's reads.
        """
        graph, plans, most, waiting = self.graph, dict(segment.loops), 0.0, 0
        begun, ended, gradients = graph.begun_bytes, graph.ended_bytes, graph.standing_bytes
        arriving, begins = graph.arriving(segment.stop), graph.arriving(segment.start).begins
        for e in reversed(graph.equations[segment.start : segment.stop]):
            i = e.index
            live += begun[i]
            if i in begins:
                live += begins[i]
            extra = e.working_bytes
            if e.loop is not None:
                extra = self.loop(e, plans.get(i), segment)
            most = max(most, live + extra + gradients[i])
            # A residual stays live until the cotangent that is computed from it is written.
            live -= ended[i]
            if i in arriving.ends:
                live += arriving.ends[i] - arriving.fused.get(i, 0)
                waiting += arriving.ends[i]
            waiting += released.get(i, 0)
            if begun[i] or i in begins:
                live -= waiting
                waiting = 0
            if segment.plain and i not in plans:
                live -= float(graph.made_outside[i])
            elif not segment.plain and e.loop is None:
                live -= e.made_in_memory
        return most

    def cotangents_across(self, position: int) -> int:
        return self.graph.flowing_bytes[position] + self.graph.arriving(position).fused_bytes

    def loop(self, e: Equation, plan: LoopPlan[int] | None, segment: Segment[int]) -> int:
        """Return the working bytes of a scan's backward pass, and add the work of its recompute."""
        assert e.loop is not None
        if plan is None:
            plain = Segment(0, len(e.loop.graph.equations), plain=True)
            inner = simulate(e.loop.graph, (plain,), host_bandwidth=self.host_bandwidth)
            kept = 0 if segment.plain else e.made_in_memory
            return kept + inner.peak_bytes - inner.saved_bytes
        found = loop_cost(e.loop, plan, self.host_bandwidth)
        self.flops += found.extra_flops
        self.seconds += found.extra_seconds
        return found.peak_bytes - found.saved_bytes + (0 if segment.plain else found.saved_bytes)


# -- scans ----------------------------------------------------------------------------------------


def loop_bytes(loop: Loop, plan: LoopPlan[int]) -> int:
    """Return the bytes that a scan saves on the device for its backward pass."""
    return loop_cost(loop, plan).saved_bytes


def _stored(
    loop: Loop, kept: Collection[int] | None = None, again: Collection[int] | None = None
) -> dict[int, int]:
    """Return the bytes per iteration in which each array of the carry is saved.

    The compiler saves an array in half precision if the backward pass reads it only in products
    that round it anyway.

    Args:
        loop: the scan.
        kept: the arrays of the carry that are saved; None for all of them.
        again: the equations that each iteration runs again; None for all of them.
    """
    graph = loop.graph

    def halved(t: int) -> bool:
        users = [graph.equations[i] for i in graph.tensors[t].users]
        later = [e for e in users if again is None or e.index in again or t in e.needs]
        return graph.rounded(graph.tensors[t]) and all(e.rounds for e in later)

    some = [(t, size) for t, size in loop.carry if kept is None or t in kept]
    return {t: size // (2 if halved(t) else 1) for t, size in some}


def _copied(loop: Loop, body: Schedule[int]) -> int:
    """Return the bytes of the copies of the stacked inputs that a body reads outside of regions."""
    outside = {i for s in body if s.plain for i in range(s.start, s.stop)}
    tensors = loop.graph.tensors
    return sum(size for t, size in loop.copied if not outside.isdisjoint(tensors[t].users))


def loop_cost(loop: Loop, plan: LoopPlan[int], host_bandwidth: float = math.inf) -> Simulated:
    """Return the cost of a scan under a plan, as `simulate` does for a program."""
    saved = host = 0
    flops = seconds = 0.0
    transient = 0
    for times, group, body in plan:
        one = simulate(loop.graph, body)
        simulation = Simulation(loop.graph, math.inf)
        again = {i for s in body for i in simulation.demand(s).again}
        # A region recomputes from the carry, so it saves all of it. A body without regions saves
        # only the arrays of the carry that derivatives read.
        alone = all(s.plain for s in body)
        needed = frozenset[int]().union(*simulation.held(body)) if alone else None
        stored = _stored(loop, needed, again)
        away = sum(size for t, size in stored.items() if any(t in s.offload for s in body))
        carry = sum(stored.values()) - away
        kept = one.saved_bytes + carry
        flops += times * one.extra_flops
        seconds += times * one.extra_seconds
        # Offloaded arrays are on the device during the iteration that reads them.
        working = one.peak_bytes - one.saved_bytes + away
        if group == 1:
            saved += times * kept
            host += times * (one.host_bytes + away)
            moving = (one.host_bytes + away) / host_bandwidth
            # A transfer overlaps with the computation of its own iteration. Only the time by which
            # it takes longer is extra.
            behind = loop.graph.backward_seconds + one.extra_seconds
            seconds += times * max(0.0, moving - loop.graph.forward_seconds)
            seconds += times * max(0.0, moving - behind)
        else:
            groups = math.ceil(times / group)
            saved += groups * sum(_stored(loop).values())  # a group saves its whole carry
            working += min(group, times) * kept
            flops += times * loop.graph.forward_flops
            seconds += times * loop.graph.forward_seconds
        saved += _copied(loop, body) * times // loop.length
        transient = max(transient, working)
    if len(plan) > 1:  # each range stacks its own gradients, which are joined at the end
        if loop.early:
            saved += loop.gradient_bytes
        else:
            transient += loop.gradient_bytes
    return Simulated(
        saved + transient, saved, host, flops, seconds, (0, len(loop.graph.equations)), "backward"
    )


def plain_keeps(graph: CostGraph, lo: int, hi: int) -> frozenset[int]:
    """Return the arrays in memory that the derivatives of ``lo..hi`` read without a region.

    If the compiler fuses an array into its readers, the array itself is not in memory. The
    derivative then computes it from its sources, which are returned in its place.
    """
    if graph.stacked:
        return frozenset(t for e in graph.equations[lo:hi] for t in e.keeps)
    tensors = graph.tensors
    found: set[int] = set()
    for e in graph.equations[lo:hi]:
        found.update(s for t in e.held for s in tensors[t].sources)
    return frozenset(found)


# -- what has to be recomputed --------------------------------------------------------------------


def closure(
    graph: CostGraph, wanted: Iterable[int], available: frozenset[int] | set[int], lo: int, hi: int
) -> _Demand:
    """Return the equations of ``lo..hi`` that recompute ``wanted``, and what they read of others.

    The walk from ``wanted`` to its producers stops at each tensor that is ``available`` or that an
    equation outside the range makes.
    """
    tensors, equations = graph.tensors, graph.equations
    again: set[int] = set()
    outside: set[int] = set()
    seen: set[int] = set()
    todo = list(wanted)
    while todo:
        t = todo.pop()
        if t in seen or t in available:
            continue
        seen.add(t)
        producer = tensors[t].producer
        if producer < lo:
            if producer >= 0:
                outside.add(t)
        elif producer < hi and producer not in again:
            again.add(producer)
            todo.extend(equations[producer].reads)
    return _Demand(
        tuple(sorted(again)),
        frozenset(outside),
        sum(equations[i].flops for i in again),
        sum(equations[i].seconds for i in again),
        frozenset(t for i in again for t in equations[i].makes if tensors[t].bytes),
    )
