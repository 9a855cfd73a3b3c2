"""The chain of segments that the dynamic program runs over, and where it is cut."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planner_graphs import tower, traced
from shapes import struct

from remat_kit._planner.costs.simulate import closure
from remat_kit._planner.schedules import chain as _chain


def test_cuts_are_where_little_is_alive():
    graph = tower(20)
    cuts = _chain.positions(graph)
    assert cuts[0] == 0
    assert cuts[-1] == len(graph.equations)
    assert max(graph.live_bytes[c] for c in cuts) == 64 * 16 * 4


def branching(layers=9):
    """A chain with reads across several layers, products of two sizes and two kinds of residual."""

    def loss(ws, x):
        seen = [x]
        for i, w in enumerate(ws):
            y = jnp.tanh(seen[-1] @ w) if i % 3 else jnp.sin(jnp.exp(seen[-1]) @ w)
            seen.append(y + seen[i // 2] if i % 2 else y)
        return jnp.sum(seen[-1] * seen[2])

    return traced(loss, [struct(16, 16)] * layers, struct(64, 16))


def levels(graph):
    rng = random.Random(0)
    every = list(graph.residuals)
    yield frozenset()
    for _ in range(4):
        yield frozenset(rng.sample(every, rng.randrange(1, len(every))))


def marks(graph, every):
    n = len(graph.equations)
    return sorted({*range(0, n, every), n})


@pytest.mark.parametrize("every", [1, 3, 7])
def test_regions_run_again_what_a_walk_from_their_residuals_reaches(every):
    graph = branching()
    chain = _chain.Chain(graph, marks(graph, every))
    seen = 0
    for keep in levels(graph):
        found = chain.regions(chain.level(keep))
        for s in range(chain.count):
            for j in range(s, s + chain.lengths[s]):
                lo, hi = chain.cuts[s], chain.cuts[j + 1]
                wanted = {t for e in graph.equations[lo:hi] for t in e.needs}
                again = closure(graph, wanted, keep, lo, hi).again
                assert found.work[s, j - s] == sum(chain.work[i] for i in again)
                seen += bool(again)
    assert seen > 20


def test_regions_hold_what_they_write_again_and_the_cotangents_at_their_edges():
    graph = branching()
    chain = _chain.Chain(graph, marks(graph, 3))
    begun, ended = chain.edges
    for keep in levels(graph):
        found = chain.regions(chain.level(keep))
        for s in range(chain.count):
            for j in range(s, s + chain.lengths[s]):
                peaks = []
                for b in range(s, j + 1):
                    wanted = {t for some in chain.needs[s : b + 1] for t in some}
                    lo, hi = chain.cuts[s], chain.cuts[b + 1]
                    again = closure(graph, wanted, keep, lo, hi).again
                    made = {t for i in again for t in graph.equations[i].makes} - keep
                    live = sum(chain.written.get(t, 0) for t in made)
                    live += sum(chain.made[s : b + 1]) + begun[s, b] + ended[j, b] * (b < j)
                    first, last = b == s, b == j
                    flows = (chain.flowing, chain.flow_first), (chain.flow_last, chain.flow_alone)
                    peaks.append(live + flows[last][first][b])
                assert found.bytes[s, j - s] == max(peaks)


def test_an_equation_has_bits_for_the_last_blocks_of_regions():
    graph = tower(6)  # two equations for each layer, and a sum
    chain = _chain.Chain(graph, [0, 2, 4, 6, 8, 10, 13])
    (last,) = graph.equations[5].makes  # of the third layer
    again = chain.again(frozenset(), [(last, 0b10)])
    assert again.shape == (13, _chain.LONGEST)
    # A region that ends with the fourth block needs it: one after the third, two after the second.
    assert [np.flatnonzero(row).tolist() for row in again[:6]] == [[3], [3], [2], [2], [1], [1]]
    assert not again[6:].any()
    (saved,) = graph.equations[3].makes
    assert not chain.again(frozenset({saved}), [(last, 0b10)])[:4].any()


def test_no_region_contains_a_scan():
    def loss(w, x):
        x = jnp.tanh(x @ w)
        x, _ = jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=3)
        return jnp.sum(jnp.tanh(x @ w))

    graph = traced(loss, struct(16, 16), struct(64, 16))
    scan = next(e.index for e in graph.equations if e.loop)
    n = len(graph.equations)
    chain = _chain.Chain(graph, list(range(n + 1)))
    assert chain.lengths == [*range(scan, 0, -1), 0, *range(n - scan - 1, 0, -1)]


def test_the_work_of_a_chain_grows_with_the_program_and_not_with_its_square():
    """A long program takes as many steps for each equation as a short one."""

    def steps(depth):
        graph = tower(depth)
        chain = _chain.Chain(graph, _chain.positions(graph))
        return sum(map(len, chain.read)), chain.again(frozenset(), chain.wanted.items()).size

    (short, small), (long, large) = steps(60), steps(600)
    assert long <= 10.1 * short
    assert large <= 10.1 * small
