"""The minimum cut, beside brute force."""

import itertools

import pytest
from planner_graphs import size, small_graphs, work

from remat_kit._planner.schedules import bounds as _bounds
from remat_kit._planner.schedules import mincut as _mincut


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
