"""The lower bound: no set of saved values and no schedule beats it."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planner_graphs import size, small_graphs, work
from shapes import struct

from remat_kit._chip.target import target
from remat_kit._planner.costs import build as _build
from remat_kit._planner.costs.simulate import simulate
from remat_kit._planner.frontier import OBJECTIVES
from remat_kit._planner.schedules import bounds as _bounds
from remat_kit._planner.schedules import proposals as _proposals
from remat_kit._planner.schedules.mincut import Worth
from remat_kit._policy.schedule import LoopPart, Segment


def measures(graph):
    """The work of each objective."""
    return [Worth.of_graph(graph, share) for share in OBJECTIVES.values()]


def check_bounds(graph, costs, binding=0):
    """Check that no cost is below the bound of any objective, and that some bounds are above 0."""
    for worth in measures(graph):
        bounds = _bounds.bounds(graph, worth)
        count = 0
        for cost in costs:
            bound = bounds.work(cost.peak_bytes)
            assert bound <= worth.extra(cost) * (1 + 1e-6) + 1e-15, worth
            assert bounds.seconds(cost.peak_bytes) <= cost.extra_seconds * (1 + 1e-6) + 1e-15
            count += bound > 0
        assert count >= binding


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("number", range(3))
def test_no_set_of_kept_values_beats_the_bound(number, objective):
    graph = small_graphs()[number]
    worth = Worth.of_graph(graph, OBJECTIVES[objective])
    bounds = _bounds.bounds(graph, worth)
    # At the beginning of the backward pass alone, where nothing is there but the kept values and
    # what is set apart for gradients.
    apart = graph.standing_bytes[-1]
    lines = tuple((price, value, 0) for price, value, busy in bounds.lines if busy == apart)
    bounds = dataclasses.replace(bounds, lines=lines)
    assert len(bounds.lines) > 1
    made = [t.index for t in graph.tensors if t.producer >= 0 and t.bytes]
    for n in range(len(made) + 1):
        for kept in map(frozenset, itertools.combinations(made, n)):
            least = work(graph, kept, worth)
            assert bounds.work(size(graph, kept)) <= least * (1 + 1e-6) + 1e-15


def random_program(seed, equations=3):
    """A program of random operations, each of some earlier results."""
    random = np.random.default_rng(seed)
    ops = [
        lambda w, a, b: a @ w,
        lambda w, a, b: jnp.tanh(a),
        lambda w, a, b: jnp.sin(a),
        lambda w, a, b: a * b,
        lambda w, a, b: a + b,
        lambda w, a, b: jnp.cumsum(a),
    ]
    chosen = [(ops[random.integers(len(ops))], random.random(2)) for _ in range(equations)]

    def loss(w, x):
        values = [jnp.tanh(x @ w)]
        for op, places in chosen:
            # Mostly of the last results, so that the program is deep.
            a, b = (values[-1 - int(len(values) * p**3)] for p in places)
            values.append(op(w, a, b).reshape(x.shape))
        return jnp.sum(values[-1])

    return loss


def every_schedule(graph):
    """Each chain of regions and plain segments, with what regions save: nothing, all, one array."""
    n = len(graph.equations)
    fused = [t.index for t in graph.tensors if t.active and t.index not in t.sources]
    cuts = [p for p in range(1, n) if not {*fused}.intersection(graph.crossing(p))]
    for count in range(len(cuts) + 1):
        for some in itertools.combinations(cuts, count):
            parts = list(itertools.pairwise((0, *some, n)))
            for plain in itertools.product((False, True), repeat=len(parts)):
                made = [
                    [t.index for t in graph.tensors if a <= t.producer < b and t.bytes and not p]
                    for (a, b), p in zip(parts, plain, strict=True)
                ]
                every = list(itertools.chain(*made))
                for saved in {(), tuple(every), *((t,) for t in every)}:
                    yield tuple(
                        Segment(a, b, save=frozenset(saved).intersection(own), plain=p)
                        for (a, b), p, own in zip(parts, plain, made, strict=True)
                    )


@pytest.mark.parametrize("chip", ["cpu", "h100", "tpu-v5e"])
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 40))]
)
def test_no_schedule_of_a_random_program_beats_the_bound(seed, chip):
    args = struct(64, 64), struct(512, 64)
    graph = _build.trace(random_program(seed), args, target(chip))
    every = list(every_schedule(graph))
    # All of them, or of many an even selection.
    check_bounds(graph, [simulate(graph, s) for s in every[:: 1 + len(every) // 1500]])


def test_what_fuses_is_free_in_the_bound_on_flops():
    """Derivatives outside of regions save only the sources of a fused array."""

    def loss(w, x):
        y = jnp.tanh(x @ w)
        return jnp.sum(jnp.sin(jnp.exp(y * 2.0) + 1.0) @ w)

    graph = _build.trace(loss, (struct(16, 16), struct(4096, 16)), target("h100"))
    (plain,) = [simulate(graph, (Segment(0, len(graph.equations), plain=True),))]
    assert plain.extra_flops == 0
    assert plain.saved_bytes < size(graph, graph.residuals)
    worth = Worth.of_graph(graph, OBJECTIVES["flops"])
    assert _bounds.bounds(graph, worth).work(plain.peak_bytes) <= 1e-15


def some_schedules(graph, count, seed=0):
    """Random cuts, random kept values, some segments without a region.

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
@pytest.mark.parametrize("loss", [waves, pytest.param(classes, marks=pytest.mark.slow)])
def test_no_schedule_beats_the_bound(loss, chip):
    graph = _build.trace(loss, ([struct(16, 16)] * 6, struct(4096, 16)), target(chip))
    schedules = [*some_schedules(graph, 1500), *(c.schedule for c in _proposals.candidates(graph))]
    check_bounds(graph, [simulate(graph, schedule) for schedule in schedules], binding=20)


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
    "length", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 8)), 24]
)
@pytest.mark.parametrize("model", [rounds, layers])
def test_no_schedule_of_a_scan_beats_the_bound(model, length, chip):
    graph = _build.trace(model(length), (struct(64, 64), struct(512, 64)), target(chip))
    n = len(graph.equations)
    (scan,) = [e for e in graph.equations if e.loop is not None]
    assert scan.loop is not None
    bodies = [(Segment(0, len(scan.loop.graph.equations)),), *some_schedules(scan.loop.graph, 100)]
    plans = [(LoopPart(length, 1, body),) for body in bodies]
    plans += [(LoopPart(length, group, bodies[0]),) for group in range(2, length)]
    plans += _proposals.loop_plans(scan)
    around = [(), (Segment(0, scan.index),), (Segment(0, scan.index, plain=True),)]
    costs = []
    for before, plan in itertools.product(around, plans):
        middle = Segment(
            len(before) and scan.index, scan.index + 1, plain=True, loops=((scan.index, plan),)
        )
        for after in ((Segment(scan.index + 1, n),), (Segment(scan.index + 1, n, plain=True),)):
            costs.append(simulate(graph, (*before, middle, *after)))
    check_bounds(graph, costs, binding=0 if length < 8 else 20)


@pytest.mark.slow
def test_the_bound_counts_the_logits_and_their_cotangent():
    """With what the softmax reads there for the cotangent that is made of it, less is kept."""
    shapes = ([struct(16, 16)] * 6, struct(4096, 16))
    graph = _build.trace(classes, shapes, target("h100"))
    logits = 4096 * 16 * 12 * 4
    found = _bounds.bounds(graph)
    assert max(busy for _, _, busy in found.lines) >= 2 * logits
    least = min(c.cost.peak_bytes for c in _proposals.candidates(graph))
    assert least >= 2 * logits
