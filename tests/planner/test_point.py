"""A point of the frontier as plain values."""

import dataclasses
import json

import pytest
from planner_graphs import tower

from remat_kit._planner.costs.simulate import simulate
from remat_kit._planner.point import Least, Point, bounded, with_more
from remat_kit._planner.schedules.bounds import Bounds
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
        bound_extra_work=0.0,
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
        "least",
    }
    assert point.pieces == ()
    assert set(plain) == fields | {"extra_flops_fraction"}
    assert plain["predicted_peak_bytes"] == 4096
    assert plain["extra_flops"] == point.extra_flops
    assert "Segment" not in repr(point)


def test_bounds_hold_for_peaks_of_the_whole_program(point):
    """Without what is beside the loss, and for all of its runs."""
    # With B bytes, 100 - B seconds of work and half of that in time.
    bounds = Bounds(lines=((1.0, 100.0, 0),), time_lines=((0.5, 50.0, 0),), working_bytes=0)
    whole = dataclasses.replace(
        point, extra_seconds=90.0, extra_work=190.0, least=Least(bounds, given=1000, times=2.0)
    )
    assert bounded(whole, 1020) == (80.0, 160.0)
    assert bounded(dataclasses.replace(whole, host_bytes=10), 1020) == (70.0, 140.0)
    # No schedule needs more than one that is known.
    assert bounded(whole, 1000) == (90.0, 190.0)
    assert bounded(point, 1020) == (0.0, 0.0)
    more = with_more(whole, flops=3.0, seconds=5.0, work=7.0)
    assert bounded(more, 1020) == (85.0, 167.0)
    assert (more.extra_flops, more.extra_seconds) == (whole.extra_flops + 3, 95.0)
    assert (more.extra_work, more.bound_extra_work, more.bound_extra_seconds) == (197.0, 7.0, 5.0)
