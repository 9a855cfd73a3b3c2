"""A point of the frontier as plain values."""

import dataclasses
import json

import pytest
from planner_graphs import tower

from remat_kit._planner.costs.simulate import simulate
from remat_kit._planner.point import Point
from remat_kit._policy.schedule import Segment


@pytest.fixture(scope="module")
def point():
    graph = tower(3)
    schedule = (Segment(0, len(graph.equations)),)
    cost = simulate(graph, schedule)
    return Point(
        predicted_peak_bytes=4096,
        saved_bytes=cost.saved_bytes,
        host_bytes=0,
        extra_seconds=cost.extra_seconds,
        extra_flops=cost.extra_flops,
        extra_work=cost.extra_seconds,
        forward_flops=graph.forward_flops,
        bound_extra_seconds=0.0,
        gap=0.5,
        schedule=schedule,
        cost=cost,
    )


def test_recomputed_operations_are_a_fraction_of_the_forward_pass(point):
    # One region around all layers runs them again, and only the last sum is not needed.
    last = 64 * 16
    assert point.extra_flops_fraction == 1 - last / point.forward_flops
    assert dataclasses.replace(point, forward_flops=0.0).extra_flops_fraction == 0.0


def test_a_point_is_plain_data_without_its_schedule(point):
    plain = json.loads(json.dumps(point.to_json()))
    fields = {field.name for field in dataclasses.fields(point)} - {
        "schedule",
        "cost",
        "others",
        "graph",
    }
    assert set(plain) == fields | {"extra_flops_fraction"}
    assert plain["predicted_peak_bytes"] == 4096
    assert plain["extra_flops"] == point.extra_flops
    assert "Segment" not in repr(point)
