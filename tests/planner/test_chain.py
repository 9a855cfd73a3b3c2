"""The chain of segments that the dynamic program runs over, and where it is cut."""

from planner_graphs import tower

from remat_kit._planner import chain as _chain


def test_cuts_are_where_little_is_alive():
    graph = tower(20)
    cuts = _chain.positions(graph)
    assert cuts[0] == 0
    assert cuts[-1] == len(graph.equations)
    assert max(graph.live_bytes[c] for c in cuts) == 64 * 16 * 4
