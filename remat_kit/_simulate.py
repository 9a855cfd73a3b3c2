"""What a checkpoint schedule of a loss would take: its peak of live bytes and its extra work.

`simulate` is the one accounting that the planner, the presets and the baselines share: it walks
the forward and the backward pass of a schedule of nested `Segment`s through a `CostGraph`.

    graph = trace(loss, args, chip)
    whole = (Segment(0, len(graph.equations)),)          # one region, nothing saved
    plain = (Segment(0, len(graph.equations), plain=True),)
    simulate(graph, plain).peak_bytes, simulate(graph, whole).extra_flops
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from remat_kit._cost import CostGraph, Equation, Loop

# -- schedules ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Segment:
    """A stretch of the program, and what becomes of it between the two passes.

    A schedule is a tuple of segments that follow one another from the first equation to the last.

    Attributes:
        start, stop: equations ``start <= i < stop``.
        save: tensors made inside that are kept through the first forward pass; the others that the
            backward pass needs are computed again from them and from what came in.
        plain: no region at all: everything that the derivative reads is kept as it is.
        inside: smaller segments that cover this one. The segment is then one region around them:
            it is computed again as a whole from ``save``, which they save too, and what else they
            save they keep from then on.
        offload: those of ``save`` that wait in the host's memory; in the body of a scan also what
            comes in from the iteration before.
        loops: for each scan inside, by its equation's index, how its iterations are run.
    """

    start: int
    stop: int
    save: frozenset[int] = frozenset()
    plain: bool = False
    inside: tuple[Segment, ...] = ()
    offload: frozenset[int] = frozenset()
    loops: tuple[tuple[int, LoopPlan], ...] = ()

    def __hash__(self) -> int:  # what is found of segments is looked up again and again
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        own = self.start, self.stop, self.save, self.plain
        return hash((*own, self.inside, self.offload, self.loops))

    def leaves(self) -> Iterator[Segment]:
        """Yield the innermost segments, in order."""
        if self.inside:
            for part in self.inside:
                yield from part.leaves()
        else:
            yield self


@dataclasses.dataclass(frozen=True)
class LoopPlan:
    """How the iterations of one scan are run.

    Attributes:
        parts: one or more ``(iterations, group, body)``: the schedule of the body, in groups of
            ``group`` iterations, each group one region that keeps what comes in alone (1: no
            groups).
    """

    parts: tuple[tuple[int, int, tuple[Segment, ...]], ...]


@dataclasses.dataclass(frozen=True)
class Simulated:
    """What a schedule takes.

    Attributes:
        peak_bytes: the most bytes alive at one time beside the arguments: intermediate arrays and
            the gradients, those too for which memory is set apart before they are there.
        saved_bytes: on the device when the backward pass begins.
        host_bytes: in the host's memory when the backward pass begins.
        extra_flops: floating-point operations that are computed again.
        extra_seconds: roofline time of what is computed again and of transfers to the host.
        peak_segment: equations ``(start, stop)`` of the innermost segment that holds the peak.
        peak_kind: ``"forward"``, ``"recompute"`` or ``"backward"``.
    """

    peak_bytes: int
    saved_bytes: int
    host_bytes: int
    extra_flops: float
    extra_seconds: float
    peak_segment: tuple[int, int]
    peak_kind: str


def simulate(
    graph: CostGraph, schedule: Sequence[Segment], *, host_bandwidth: float = math.inf
) -> Simulated:
    """Walk the forward and the backward pass of a schedule and say what it takes.

    A kept array lives from its computation to the backward pass of the first segment that reads
    it. A region's backward pass first computes what it lacks, then goes back through its
    operations, with the cotangents that are alive then. What fuses into its readers takes no bytes
    of its own.

    >>> import jax, jax.numpy as jnp
    >>> from remat_kit._cost import trace
    >>> from remat_kit._target import target
    >>> x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    >>> graph = trace(lambda x: jnp.sum(jnp.sin(jnp.cumsum(jnp.sin(jnp.cumsum(x))))), (x,),
    ...               target("cpu"))
    >>> n = len(graph.equations)
    >>> simulate(graph, [Segment(0, n)]).extra_flops > 0
    True
    >>> simulate(graph, [Segment(0, n, plain=True)]).extra_flops
    0.0

    Args:
        graph: of the loss.
        schedule: segments from the first equation to the last.
        host_bandwidth: bytes a second between the device and the host, for offloaded arrays.
    """
    return Simulation(graph, host_bandwidth).run(tuple(schedule))


@dataclasses.dataclass(frozen=True)
class _Demand:
    """What a segment's backward pass asks for: equations to run again, tensors from outside."""

    again: tuple[int, ...]
    outside: frozenset[int]
    flops: float = 0.0
    seconds: float = 0.0
    makes: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class _Walk:
    """The peaks of one region's backward pass, above what is alive when it begins; the work."""

    recompute: float
    backward: float
    flops: float
    seconds: float


class Simulation:
    """One walk through a schedule. What segments ask for and take is remembered in the graph, for
    the schedules that a search compares have most of their segments in common.
    """

    def __init__(self, graph: CostGraph, host_bandwidth: float):
        self.graph = graph
        self.host_bandwidth = host_bandwidth
        self.peak, self.where, self.kind = 0, (0, len(graph.equations)), "forward"
        self.flops = self.seconds = 0.0

    def run(self, schedule: tuple[Segment, ...]) -> Simulated:
        held = self.held(schedule)
        on_host = frozenset().union(*(s.offload for s in schedule)) if schedule else frozenset()
        saved = frozenset().union(*held) if held else frozenset()
        twice = self.twice(schedule, held)
        own = sum(self.own_bytes(s) for s in schedule) + sum(twice)
        host = self.bytes(saved & on_host)
        self.forward(schedule, held)
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

    # .. what is held

    def bytes(self, tensors: Iterable[int]) -> int:
        return sum(map(self.graph.sizes.__getitem__, tensors))

    def held(self, schedule: Sequence[Segment]) -> list[frozenset[int]]:
        """For each segment, what must be held for its backward pass when that begins."""
        return [self.plain_keeps(s) if s.plain else self.region_holds(s) for s in schedule]

    def region_holds(self, segment: Segment) -> frozenset[int]:
        found = self.graph.memory.get(("holds", segment))
        if found is None:
            found = self.demand(segment).outside | segment.save
            self.graph.memory["holds", segment] = found
        return found

    def plain_keeps(self, segment: Segment) -> frozenset[int]:
        key = segment.start, segment.stop
        found = self.graph.memory.get(key)
        if found is None:
            found = self.graph.memory[key] = plain_keeps(self.graph, *key)
        return found

    def own_bytes(self, segment: Segment) -> int:
        """Residuals that derivatives make for themselves, where no region recomputes them."""
        if not segment.plain:
            return 0
        own = int(self.graph.made_outside[segment.start : segment.stop].sum())
        for i, plan in segment.loops:
            e = self.graph.equations[i]
            assert e.loop is not None
            own += loop_bytes(e.loop, plan) - e.made_in_memory
        return own

    def twice(self, schedule: Sequence[Segment], held: Sequence[frozenset[int]]) -> list[int]:
        """For each segment, bytes of what it keeps that later ones hold too.

        In the body of a scan what a region keeps and what it hands on are two stacks, even of the
        same array (seen in a program for CPU, jax 0.12). Outside of scans they are one.
        """
        found = [0] * len(schedule)
        if not self.graph.stacked:
            return found
        later = frozenset[int]()
        for number in range(len(schedule) - 1, -1, -1):
            if not schedule[number].plain:
                found[number] = self.bytes(schedule[number].save & later)
            later |= held[number]
        return found

    def loops_on_host(self, schedule: Sequence[Segment]) -> int:
        """What the iterations of scans have in the host's memory."""
        total = 0
        for i, plan in (loop for s in schedule for leaf in s.leaves() for loop in leaf.loops):
            loop = self.graph.equations[i].loop
            assert loop is not None
            total += loop_cost(loop, plan).host_bytes
        return total

    def demand(self, segment: Segment) -> _Demand:
        found = self.graph.memory.get(segment)
        if found is None:
            found = self.graph.memory[segment] = self._demand(segment)
        return found

    def _demand(self, segment: Segment) -> _Demand:
        lo, hi = segment.start, segment.stop
        tensors = self.graph.tensors
        if segment.plain:
            return _Demand(
                (), frozenset(t for t in self.plain_keeps(segment) if tensors[t].producer < lo)
            )
        if segment.inside:
            wanted = set[int]()
            for part in segment.inside:
                wanted |= self.demand(part).outside | part.save
                if part.plain:  # what derivatives make for themselves is made of what they need
                    wanted |= self.plain_keeps(part)
                    wanted.update(
                        t for e in self.graph.equations[part.start : part.stop] for t in e.needs
                    )
        else:
            wanted = {t for e in self.graph.equations[lo:hi] for t in e.needs}
        return closure(self.graph, wanted, segment.save, lo, hi)

    # .. the two passes

    def note(self, live: float, segment: Segment, kind: str) -> None:
        if live > self.peak:
            self.peak, self.where, self.kind = int(live), (segment.start, segment.stop), kind

    def forward(self, schedule: Sequence[Segment], held: Sequence[frozenset[int]]) -> None:
        """The first forward pass: what is held so far, and what crosses to the next operation."""
        graph = self.graph
        kept = frozenset().union(*held) if held else frozenset()
        steps = graph.written_steps.copy()
        changes: list[tuple[int, int]] = []
        for t in kept:
            change, made_of = graph.kept_steps[t]
            changes += change
            for s, until in made_of:
                if s not in kept:
                    changes += until
        if changes:
            at, amounts = np.array(changes).T
            np.add.at(steps, at, amounts)
        for segment in schedule:
            if segment.plain:
                steps[segment.start : segment.stop] += graph.made_outside[
                    segment.start : segment.stop
                ]
                for i, plan in segment.loops:
                    e = graph.equations[i]
                    assert e.loop is not None
                    steps[i] += loop_bytes(e.loop, plan) - e.made_in_memory
        # What is set apart for gradients from the start.
        live = np.cumsum(steps) + graph.standing_bytes[-1]
        for segment in schedule:
            if segment.stop > segment.start:
                self.note(float(live[segment.start : segment.stop].max()), segment, "forward")

    def backward(
        self,
        schedule: Sequence[Segment],
        held: Sequence[frozenset[int]],
        base: float,
        given: frozenset[int],
        on_host: frozenset[int],
        twice: Sequence[int] = (),
    ) -> None:
        """Go back through segments; ``base`` bytes and the tensors ``given`` are held anyway."""
        own = [self.own_bytes(s) for s in schedule]
        if twice:
            own = [a + b for a, b in zip(own, twice, strict=True)]
        below = [given]
        levels = [base]
        for tensors, made in zip(held, own, strict=True):
            levels.append(levels[-1] + self.bytes(tensors - below[-1]) + made)
            below.append(below[-1] | tensors)
        for number in range(len(schedule) - 1, -1, -1):
            segment = schedule[number]
            away = self.bytes((on_host & below[number]) - held[number]) if on_host else 0
            level = levels[number + 1] - away + self.cotangents_across(segment.stop)
            self.segment(segment, level, below[number + 1], held[number] - below[number])

    def rebuilt_early(self, schedule: Sequence[Segment]) -> None:
        """Where a region around regions comes before the last operations, which are in none: what
        it rebuilds may be there beside the most that the derivatives of these take.
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
        self, segment: Segment, level: float, available: frozenset[int], mine: frozenset[int]
    ) -> None:
        """One segment, when ``available`` tensors are there, ``mine`` for this segment alone."""
        demand = self.demand(segment)
        self.flops += demand.flops
        self.seconds += demand.seconds
        if segment.inside:
            # The cotangents of what comes out are counted once more by the segments inside.
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
        segment: Segment,
        again: Sequence[int],
        available: frozenset[int],
        mine: frozenset[int],
    ) -> _Walk:
        """One region without regions inside: recompute, then go back through its operations.

        What is there for this segment alone goes when its first reader's derivative is done.
        """
        graph, plans = self.graph, dict(segment.loops)
        equations = graph.equations[segment.start : segment.stop]
        live = recompute = backward = 0.0
        before = self.flops, self.seconds
        first_need: dict[int, int] = {}
        for e in reversed(equations):
            for t in e.needs:
                there = t in available or t in mine
                first_need.update(
                    dict.fromkeys((t,) if there else graph.tensors[t].sources, e.index)
                )
        dies: dict[int, list[int]] = {}
        rebuilt = set[int]()
        for i in again:
            for t in graph.equations[i].makes:
                tensor = graph.tensors[t]
                if t in available:
                    continue
                if t in first_need:
                    rebuilt.add(t)
                    live += tensor.bytes
                elif tensor.in_memory:
                    last = max((u for u in tensor.users if u < segment.stop), default=i)
                    live += tensor.bytes
                    dies.setdefault(last, []).append(t)
            recompute = max(recompute, live)
            for t in dies.pop(i, ()):
                live -= graph.tensors[t].bytes
        for tensors in dies.values():
            live -= self.bytes(tensors)
        released: dict[int, list[int]] = {}
        for t in rebuilt | (mine & first_need.keys()):
            released.setdefault(first_need[t], []).append(t)
        if not segment.plain:
            live += sum(e.made_in_memory for e in equations if e.loop is None)
        begun, ended, gradients = graph.begun_bytes, graph.ended_bytes, graph.standing_bytes
        recompute = max(recompute, live + gradients[segment.stop])
        waiting = 0
        arriving, begins = graph.arriving(segment.stop), graph.arriving(segment.start).begins
        for e in reversed(equations):
            i = e.index
            live += begun[i]
            if i in begins:
                live += begins[i]
            extra = e.working_bytes
            if e.loop is not None:
                extra = self.loop(e, plans.get(i), segment)
            backward = max(backward, live + extra + gradients[i])
            # What a derivative reads is there until the cotangent that it helps to make is written.
            live -= ended[i]
            if i in arriving.ends:
                live += arriving.ends[i] - arriving.fused.get(i, 0)
                waiting += arriving.ends[i]
            if i in released:
                waiting += self.bytes(released[i])
            if begun[i] or i in begins:
                live -= waiting
                waiting = 0
            if segment.plain and i not in plans:
                live -= float(graph.made_outside[i])
            elif not segment.plain and e.loop is None:
                live -= e.made_in_memory
        flops, seconds = self.flops - before[0], self.seconds - before[1]
        self.flops, self.seconds = before
        return _Walk(recompute, backward, flops, seconds)

    def cotangents_across(self, position: int) -> int:
        return self.graph.flowing_bytes[position] + self.graph.arriving(position).fused_bytes

    def loop(self, e: Equation, plan: LoopPlan | None, segment: Segment) -> int:
        """A scan in the backward pass: what one iteration takes, and what it computes again."""
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


def loop_bytes(loop: Loop, plan: LoopPlan) -> int:
    """Return what a scan keeps on the device for its backward pass."""
    return loop_cost(loop, plan).saved_bytes


def _stored(
    loop: Loop, kept: Collection[int] | None = None, again: Collection[int] | None = None
) -> dict[int, int]:
    """Bytes of what comes into each iteration as it is stored for the backward pass: in half
    precision where nothing but products that round it will read it.

    Args:
        loop: the scan.
        kept: what is kept of what comes in; None for all of it.
        again: the equations that it computes again; None for all of them.
    """
    graph = loop.graph

    def halved(t: int) -> bool:
        users = [graph.equations[i] for i in graph.tensors[t].users]
        later = [e for e in users if again is None or e.index in again or t in e.needs]
        return graph.rounded(graph.tensors[t]) and all(e.rounds for e in later)

    some = [(t, size) for t, size in loop.carry if kept is None or t in kept]
    return {t: size // (2 if halved(t) else 1) for t, size in some}


def loop_cost(loop: Loop, plan: LoopPlan, host_bandwidth: float = math.inf) -> Simulated:
    """Return what the iterations of a scan take under a plan, as `simulate` does for a program."""
    saved = host = 0
    flops = seconds = 0.0
    transient = 0
    for times, group, body in plan.parts:
        one = simulate(loop.graph, body)
        simulation = Simulation(loop.graph, math.inf)
        again = {i for s in body for i in simulation.demand(s).again}
        # A region needs what came in to begin with; without any, derivatives may read it.
        alone = all(s.plain for s in body)
        needed = frozenset[int]().union(*simulation.held(body)) if alone else None
        stored = _stored(loop, needed, again)
        away = sum(size for t, size in stored.items() if any(t in s.offload for s in body))
        carry = sum(stored.values()) - away
        kept = one.saved_bytes + carry
        flops += times * one.extra_flops
        seconds += times * one.extra_seconds
        # What comes back from the host is there for the iteration that reads it.
        working = one.peak_bytes - one.saved_bytes + away
        if group == 1:
            saved += times * kept
            host += times * (one.host_bytes + away)
            moving = (one.host_bytes + away) / host_bandwidth
            # Transfers run beside the computation of their own iteration, as far as that lasts.
            behind = loop.graph.backward_seconds + one.extra_seconds
            seconds += times * max(0.0, moving - loop.graph.forward_seconds)
            seconds += times * max(0.0, moving - behind)
        else:
            groups = math.ceil(times / group)
            saved += groups * sum(_stored(loop).values())  # a group runs again as a whole
            working += min(group, times) * kept
            flops += times * loop.graph.forward_flops
            seconds += times * loop.graph.forward_seconds
        transient = max(transient, working)
    if len(plan.parts) > 1:  # each range has stacks of its own, which are joined at the end
        if loop.early:
            saved += loop.gradient_bytes
        else:
            transient += loop.gradient_bytes
    return Simulated(
        saved + transient, saved, host, flops, seconds, (0, len(loop.graph.equations)), "backward"
    )


def plain_keeps(graph: CostGraph, lo: int, hi: int) -> frozenset[int]:
    """Return the arrays in memory that the derivatives of ``lo..hi`` read where no region is.

    What fuses into its readers is not one of them: it is made of its sources once more.
    """
    if graph.stacked:
        return frozenset(t for e in graph.equations[lo:hi] for t in e.keeps)
    tensors = graph.tensors
    found: set[int] = set()
    for e in graph.equations[lo:hi]:
        found.update(s for t in e.held for s in tensors[t].sources)
    return frozenset(found)


# -- what has to be computed again ----------------------------------------------------------------


def closure(
    graph: CostGraph, wanted: Iterable[int], available: frozenset[int] | set[int], lo: int, hi: int
) -> _Demand:
    """Return the equations of ``lo..hi`` that rebuild ``wanted``, and what they read from outside.

    The walk stops at what is ``available`` and at what comes from outside the range.
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
