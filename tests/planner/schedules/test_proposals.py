"""The solver: minimum cuts, the chain, and brute force on small graphs."""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from planner_graphs import tower, traced
from shapes import struct

from remat_kit._planner.costs.simulate import simulate
from remat_kit._planner.schedules import bounds as _bounds
from remat_kit._planner.schedules import proposals as _proposals
from remat_kit._policy.schedule import Segment

# -- schedules --------------------------------------------------------------------------------


def every_schedule(graph):
    """Every chain of regions over every cut, with every set of kept values, and plain segments."""
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


def test_a_thinned_curve_keeps_its_ends_and_its_corners():
    at = [(2.0**k, 10.0 - k) for k in range(10)]
    at.insert(5, (2.0**4 * 1.001, 5.999))  # next to nothing apart from the one before it
    kept = _proposals._thinned(range(len(at)), at, 10)
    assert kept[0] == 0
    assert kept[-1] == len(at) - 1
    assert len({4, 5} & set(kept)) == 1


def test_a_scan_has_ways_to_run_it():
    def loss(ws, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(jnp.sin(x @ w)), None), x, ws)[0])

    graph = traced(loss, struct(16, 16, 16), struct(64, 16))
    (scan,) = [e for e in graph.equations if e.loop]
    plans = _proposals.loop_plans(scan)
    assert any(len(p) == 2 for p in plans)  # depth ranges
    assert any(p[0].group > 1 for p in plans)  # groups
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


def blocks(w, x):
    x = jnp.sin(x)
    for i in range(2):
        with jax.named_scope(f"block_{i}"), jax.named_scope("mlp"):
            x = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        x = jnp.exp(x @ w)
    return jnp.sum(x)


def test_repeated_blocks_are_regions_that_save_nothing():
    graph = traced(blocks, struct(8, 8), struct(4, 8))
    modules = [e.module for e in graph.equations]
    first, second, head = map(modules.index, ("block_0/mlp", "block_1/mlp", "head"))
    end, count = len(modules) - modules[::-1].index("head"), len(modules)
    assert list(_proposals.repeated_blocks(graph)) == [
        (
            Segment(0, first, plain=True),
            Segment(first, second),
            Segment(second, head),
            Segment(head, count, plain=True),
        ),
        (
            Segment(0, second),
            Segment(second, head),
            Segment(head, end),
            Segment(end, count, plain=True),
        ),
    ]


def test_iterations_of_a_scan_are_repeated_blocks():
    def scanned(w, x):
        body = lambda x, _: (jnp.tanh(jnp.sin(x @ w)), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(body, x, None, length=3)[0])

    graph = traced(scanned, struct(8, 8), struct(4, 8))
    (schedule,) = _proposals.repeated_blocks(graph)
    ((_, (part,)),) = next(s.loops for s in schedule if s.loops)
    assert (part.times, part.group) == (3, 1)
    assert [(s.save, s.plain) for s in part.body] == [(frozenset(), False)]


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("body", [1, 3])
def test_equal_parts_are_repeated_blocks_of_a_program_without_numbered_modules(body, head):
    def loss(ws, x):
        x = jnp.exp(x) if head else x
        for w in ws:
            x = jnp.tanh(x @ w)
            for _ in range(body - 1):
                x = x * jnp.sin(x)
        return jnp.sum(jnp.cos(x))

    graph = traced(loss, [struct(16, 16)] * 4, struct(64, 16))
    first, size = int(head), 2 * body
    cuts = [first + i * size for i in range(5)]
    assert _proposals.equal_parts(graph) == cuts
    schedule, *_ = _proposals.repeated_blocks(graph)
    assert [(s.start, s.stop) for s in schedule if not s.plain] == list(itertools.pairwise(cuts))


def test_a_program_that_repeats_nothing_has_no_repeated_blocks():
    def loss(w, v, x):
        return jnp.sum(jnp.tanh(x @ w) @ v)

    graph = traced(loss, struct(16, 16), struct(16, 8), struct(64, 16))
    assert _proposals.equal_parts(graph) == []
    assert not list(_proposals.repeated_blocks(graph))


def test_parts_of_different_lengths_are_not_equal():
    def loss(ws, x):
        for i, w in enumerate(ws):
            x = jnp.tanh(x @ w)
            x = x if i == 1 else jnp.sin(x)
        return jnp.sum(x)

    graph = traced(loss, [struct(16, 16)] * 4, struct(64, 16))
    parts = list(itertools.pairwise(_proposals.equal_parts(graph)))
    assert len({stop - start for start, stop in parts}) <= 1
