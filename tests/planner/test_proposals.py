"""The solver: minimum cuts, the chain, and brute force on small graphs."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_kit._chip.target import target
from remat_kit._planner import bounds as _bounds
from remat_kit._planner import build as _build
from remat_kit._planner import chain as _chain
from remat_kit._planner import compose as _compose
from remat_kit._planner import mincut as _mincut
from remat_kit._planner import proposals as _proposals
from remat_kit._planner import simulate as _simulate
from remat_kit._planner.simulate import LoopPlan, Segment, simulate

CHIP = target("cpu")


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def traced(fn, *args):
    return _build.trace(fn, args, CHIP)


def tower(depth, width=16, batch=64):
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    return traced(loss, [struct(width, width)] * depth, struct(batch, width))


def cumulative(depth, size=1024):
    """A chain of equal steps of one operation each, whose derivative reads its input."""

    def loss(x):
        for _ in range(depth):
            x = jnp.sin(jax.lax.cumsum(x))
        return jnp.sum(x)

    return traced(loss, struct(size))


def work(graph, keep):
    again = _simulate.closure(graph, graph.residuals, keep, 0, len(graph.equations)).again
    return sum(graph.equations[i].seconds for i in again)


def size(graph, tensors):
    return sum(graph.tensors[t].bytes for t in tensors)


# -- minimum cuts -----------------------------------------------------------------------------


def small_graphs():
    def diamond(w, x):
        a = jnp.tanh(x @ w)
        return jnp.sum(jnp.sin(a) * jnp.exp(a @ w))

    def skip(w, x):
        a = jnp.exp(x @ w)
        b = jnp.sin(a) @ w
        return jnp.sum(jnp.tanh(b + a))

    def dense(w, x):
        a = jnp.tanh(x @ w)
        b = jnp.tanh((x + a) @ w)
        return jnp.sum(a * b * x)

    return [traced(fn, struct(16, 16), struct(64, 16)) for fn in (diamond, skip, dense)]


@pytest.mark.parametrize("number", range(3))
def test_minimum_cut_equals_brute_force(number):
    graph = small_graphs()[number]
    assert len(graph.equations) <= 10
    cutter = _mincut.Cutter(graph)
    made = [t.index for t in graph.tensors if t.producer >= 0 and t.bytes]
    subsets = [frozenset(s) for n in range(len(made) + 1) for s in itertools.combinations(made, n)]
    for price in _bounds.price_range(graph, 7):
        keep, bound, kept = cutter.cut(price)
        assert kept == size(graph, keep)
        found = price * size(graph, keep) + work(graph, keep)
        least = min(price * size(graph, s) + work(graph, s) for s in subsets)
        assert found == pytest.approx(least, rel=1e-5)
        assert bound <= least * (1 + 1e-9)


@pytest.mark.parametrize("number", range(3))
def test_no_set_of_kept_values_beats_the_bound(number):
    graph = small_graphs()[number]
    bounds = _bounds.bounds(graph)
    # At the beginning of the backward pass alone, where nothing is there but the kept values and
    # what is set apart for gradients.
    apart = graph.standing_bytes[-1]
    lines = tuple((price, value, 0) for price, value, busy in bounds.lines if busy == apart)
    bounds = dataclasses.replace(bounds, lines=lines)
    assert len(bounds.lines) > 1
    made = [t.index for t in graph.tensors if t.producer >= 0 and t.bytes]
    for n in range(len(made) + 1):
        for kept in map(frozenset, itertools.combinations(made, n)):
            assert bounds.seconds(size(graph, kept)) <= work(graph, kept) * (1 + 1e-6) + 1e-15


# -- schedules --------------------------------------------------------------------------------


def every_schedule(graph):
    """Every chain of regions over every cut, with every set of kept values, and plain stretches."""
    n = len(graph.equations)
    for count in range(n):
        for cuts in itertools.combinations(range(1, n), count):
            marks = [0, *cuts, n]
            options = []
            for a, b in itertools.pairwise(marks):
                made = [t.index for t in graph.tensors if a <= t.producer < b and t.bytes]
                options.append(
                    [Segment(a, b, plain=True)]
                    + [
                        Segment(a, b, save=frozenset(s))
                        for k in range(len(made) + 1)
                        for s in itertools.combinations(made, k)
                    ]
                )
            yield from itertools.product(*options)


def test_the_frontier_is_that_of_brute_force():
    graph = tower(2, batch=256)
    assert len(graph.equations) <= 6
    found = _proposals.candidates(graph)
    best = [simulate(graph, s) for s in every_schedule(graph)]
    for budget in sorted({c.peak_bytes for c in best}):
        least = min(c.extra_seconds for c in best if c.peak_bytes <= budget)
        ours = [c.cost.extra_seconds for c in found if c.cost.peak_bytes <= budget]
        assert ours, budget
        assert min(ours) <= least * (1 + 1e-6) + 1e-15


def some_schedules(graph, count, seed=0):
    """Random cuts, random kept values, some stretches without a region.

    No cut is amid operations that fuse: the cotangent that crosses it would be written down for
    the cut alone, and `simulate` does not count it.
    """
    random = np.random.default_rng(seed)
    n = len(graph.equations)
    fused = [t.index for t in graph.tensors if t.active and t.index not in t.sources]
    cuts = [p for p in range(1, n) if not {*fused}.intersection(graph.crossing(p))]
    for _ in range(count):
        some = random.choice(cuts, random.integers(1, max(2, len(cuts) // 2)), False)
        marks = [0, *sorted(some), n]
        schedule = []
        for a, b in itertools.pairwise(map(int, marks)):
            made = [t.index for t in graph.tensors if a <= t.producer < b and t.bytes]
            kept = frozenset(t for t in made if random.random() < random.random() ** 2)
            plain = random.random() < 0.3
            schedule.append(Segment(a, b, save=frozenset() if plain else kept, plain=plain))
        yield tuple(schedule)


def waves(ws, x):
    """Elementwise operations between products: h100 fuses them into what reads them."""
    for w in ws:
        y = jnp.tanh(x @ w)
        x = jnp.sin(jnp.cos(y) * y)
    return jnp.sum(x)


def classes(ws, x):
    """A stream of normed products, then many classes: the most is there at the loss."""
    for w in ws:
        y = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x + jax.nn.gelu(y @ w) @ w.T
    logits = x @ jnp.concatenate(ws * 2, axis=-1)
    return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])


@pytest.mark.parametrize("chip", [pytest.param("cpu", marks=pytest.mark.slow), "h100"])
@pytest.mark.parametrize("loss", [waves, classes])
def test_no_schedule_beats_the_bound(loss, chip):
    graph = _build.trace(loss, ([struct(16, 16)] * 6, struct(4096, 16)), target(chip))
    bounds = _bounds.bounds(graph)
    schedules = [*some_schedules(graph, 1500), *(c.schedule for c in _proposals.candidates(graph))]
    costs = [simulate(graph, schedule) for schedule in schedules]
    found = [bounds.seconds(cost.peak_bytes) for cost in costs]
    for bound, cost in zip(found, costs, strict=True):
        assert bound <= cost.extra_seconds * (1 + 1e-6) + 1e-15
    assert sum(bound > 0 for bound in found) > 20


def rounds(length):
    """A scan that hands on two arrays, one of them as it is, and stacks a third; then a product."""

    def loss(w, x):
        def body(carry, scale):
            x, kept, _ = carry
            y = jnp.tanh(x @ w)
            return (x + jnp.sin(y @ w), kept, y), jnp.cos(y * scale) * kept

        start = x, jnp.tanh(x), x
        (x, _, y), made = jax.lax.scan(body, start, jnp.arange(float(length)))
        return jnp.sum(jnp.sin(x @ w) * y) + jnp.sum(jnp.sin(made))

    return loss


def layers(length):
    """What products alone read again is handed on: TPUs keep it in half precision."""

    def loss(w, x):
        def body(x, _):
            return x + jnp.tanh(jnp.sin(x @ w)), None

        return jnp.sum(jax.lax.scan(body, x, length=length)[0])

    return loss


@pytest.mark.parametrize("chip", ["cpu", "h100", "tpu-v5e"])
@pytest.mark.parametrize(
    "length", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 8)), 24]
)
@pytest.mark.parametrize("model", [rounds, layers])
def test_no_schedule_of_a_scan_beats_the_bound(model, length, chip):
    graph = _build.trace(model(length), (struct(64, 64), struct(512, 64)), target(chip))
    bounds = _bounds.bounds(graph)
    n = len(graph.equations)
    (scan,) = [e for e in graph.equations if e.loop is not None]
    assert scan.loop is not None
    bodies = [(Segment(0, len(scan.loop.graph.equations)),), *some_schedules(scan.loop.graph, 100)]
    plans = [LoopPlan(((length, 1, body),)) for body in bodies]
    plans += [LoopPlan(((length, group, bodies[0]),)) for group in range(2, length)]
    plans += _proposals.loop_plans(scan)
    around = [(), (Segment(0, scan.index),), (Segment(0, scan.index, plain=True),)]
    binding = 0
    for before, plan in itertools.product(around, plans):
        middle = Segment(
            len(before) and scan.index, scan.index + 1, plain=True, loops=((scan.index, plan),)
        )
        for after in ((Segment(scan.index + 1, n),), (Segment(scan.index + 1, n, plain=True),)):
            cost = simulate(graph, (*before, middle, *after))
            bound = bounds.seconds(cost.peak_bytes)
            assert bound <= cost.extra_seconds * (1 + 1e-6) + 1e-15
            binding += bound > 0
    assert length < 8 or binding > 20


def test_the_bound_counts_the_logits_and_their_cotangent():
    """With what the softmax reads there for the cotangent that is made of it, less is kept."""
    shapes = ([struct(16, 16)] * 6, struct(4096, 16))
    graph = _build.trace(classes, shapes, target("h100"))
    logits = 4096 * 16 * 12 * 4
    found = _bounds.bounds(graph)
    assert max(busy for _, _, busy in found.lines) >= 2 * logits
    least = min(c.cost.peak_bytes for c in _proposals.candidates(graph))
    assert least >= 2 * logits


def test_candidates_do_not_beat_one_another():
    found = _proposals.candidates(tower(10))
    peaks = [c.cost.peak_bytes for c in found]
    extra = [c.cost.extra_seconds for c in found]
    assert len(found) > 3
    assert peaks == sorted(set(peaks))
    assert extra == sorted(set(extra), reverse=True)
    assert extra[-1] == 0
    graph = tower(10)
    bounds = _bounds.bounds(graph)
    assert all(bounds.seconds(c.cost.peak_bytes) <= c.cost.extra_seconds + 1e-12 for c in found)


def binomial(steps, slots):
    """Griewank's schedule: how many forward steps it runs again, and where it splits."""
    if steps == 1:
        return 0, 0
    if slots == 1:
        return sum(range(steps)), steps - 1
    return min(
        (k + binomial(steps - k, slots - 1)[0] + binomial(k, slots)[0], k) for k in range(1, steps)
    )


def binomial_schedule(marks, slots):
    """The same as nested regions over the stretches between ``marks``."""
    steps = len(marks) - 1
    if steps == 1:
        return (Segment(marks[0], marks[1]),)
    _, k = binomial(steps, slots)
    first = binomial_schedule(marks[: k + 1], slots)
    if k > 1:
        first = (Segment(marks[0], marks[k], inside=first),)
    return (*first, *binomial_schedule(marks[k:], max(1, slots - 1)))


def test_homogeneous_chains_are_no_worse_than_binomial():
    depth = 12
    graph = cumulative(depth, size=4096)
    starts = [e.index for e in graph.equations if e.primitive == "cumsum"]
    marks = [*starts, len(graph.equations)]
    found = _proposals.candidates(graph)
    for slots in (1, 2, 3, 4, 6):
        theirs = simulate(graph, binomial_schedule(marks, slots))
        ours = [c.cost.extra_seconds for c in found if c.cost.peak_bytes <= theirs.peak_bytes]
        assert ours, slots
        assert min(ours) <= theirs.extra_seconds * (1 + 1e-9), slots


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_chain_knows_what_its_schedules_take(share, monkeypatch):
    graph = tower(24, batch=256)
    worth = _mincut.Worth.of_graph(graph, share)
    seen, forms = [], set()
    schedule = _compose.Composer.schedule

    def spy(self, choice, chosen, region, m):
        found, size = schedule(self, choice, chosen, region, m), self.size
        cost = simulate(graph, found)
        t, room, work = 0, m, 0.0
        while t < self.chain.count:
            item, region = chosen[t][choice[t][region][room]]
            work += item.work
            if item.form in ("nest", "layer"):
                work += self.inside(item)[room - item.room(size)]
            forms.add(item.form)
            room -= item.slots(size)[0]
            t = item.last + 1
        seen.append((m * size, cost.peak_bytes, work, self.chain.worth.extra(cost)))
        return found

    monkeypatch.setattr(_compose.Composer, "schedule", spy)
    _proposals.candidates(graph, worth=worth)
    assert len(seen) > 20
    assert forms >= {"plain", "leaf", "layer", "nest"}
    for room, peak, work, extra in seen:
        assert 0.85 * room <= peak <= 1.05 * room
        assert extra == pytest.approx(work, rel=1e-6, abs=1e-12)


def test_a_thinned_curve_keeps_its_ends_and_its_corners():
    at = [(2.0**k, 10.0 - k) for k in range(10)]
    at.insert(5, (2.0**4 * 1.001, 5.999))  # next to nothing apart from the one before it
    kept = _proposals._thinned(range(len(at)), at, 10)
    assert kept[0] == 0
    assert kept[-1] == len(at) - 1
    assert len({4, 5} & set(kept)) == 1


def test_cuts_are_where_little_is_alive():
    graph = tower(20)
    cuts = _chain.positions(graph)
    assert cuts[0] == 0
    assert cuts[-1] == len(graph.equations)
    assert max(graph.live_bytes[c] for c in cuts) == 64 * 16 * 4


def test_a_scan_has_ways_to_run_it():
    def loss(ws, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(jnp.sin(x @ w)), None), x, ws)[0])

    graph = traced(loss, struct(16, 16, 16), struct(64, 16))
    (scan,) = [e for e in graph.equations if e.loop]
    plans = _proposals.loop_plans(scan)
    assert any(len(p.parts) == 2 for p in plans)  # depth ranges
    assert any(p.parts[0][1] > 1 for p in plans)  # groups
    found = _proposals.candidates(graph)
    assert found[0].cost.peak_bytes < found[-1].cost.peak_bytes / 2


def test_ctrl_c_gives_what_there_is():
    graph = tower(10)
    told = []

    def tick(what):
        told.append(what)
        if len(told) == 3:
            raise KeyboardInterrupt

    assert len(_proposals.candidates(graph, tick=tick)) >= 2


def test_nothing_to_recompute_is_one_candidate():
    (only,) = _proposals.candidates(traced(jnp.sum, struct(8)))
    assert only.cost.extra_seconds == 0
    assert math.isfinite(only.cost.peak_bytes)
