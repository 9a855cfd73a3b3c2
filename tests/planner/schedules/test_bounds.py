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
from remat_kit._planner.schedules import bounds as _bounds
from remat_kit._planner.schedules import proposals as _proposals
from remat_kit._policy.schedule import LoopPart, Segment


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
    plans = [(LoopPart(length, 1, body),) for body in bodies]
    plans += [(LoopPart(length, group, bodies[0]),) for group in range(2, length)]
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
