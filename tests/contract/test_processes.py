"""A program of two processes, connected by `jax.distributed`, against the same one in one process.

Each process holds a part of every array. The two train to the losses of one process, and both say
the same of the program.
"""

import functools

import process_programs
import pytest
from other_process import printed_by, printed_by_both


@functools.cache
def answers():
    return printed_by(process_programs.__file__), *printed_by_both(process_programs.__file__)


def test_a_process_holds_a_part_of_each_array():
    alone, *both = answers()
    assert alone["whole"]
    assert not any(each["whole"] for each in both)


@pytest.mark.parametrize("way", process_programs.WAYS)
def test_two_processes_train_to_the_losses_of_one(way):
    alone, *both = answers()
    assert alone[way] == pytest.approx(alone["plain"], rel=1e-5)
    assert alone[way][-1] < alone[way][0]
    for each in both:
        assert each[way] == pytest.approx(alone[way], rel=1e-5)
    assert both[0][way] == both[1][way]


def test_auto_plans_or_says_that_it_does_not():
    for each in answers():
        assert each["auto said"] == [] or "no plan was found" in each["auto said"][0]


@pytest.mark.parametrize(
    "what", ["planned", "policy of the plan", "measured", "collectives", "same"]
)
def test_every_process_says_what_one_process_says(what):
    alone, *both = answers()
    assert all(each[what] == alone[what] for each in both)
    assert both[0]["other"] == both[1]["other"]


def test_the_program_runs_on_the_devices_of_both():
    for each in answers():
        assert each["ran"]
        assert len(each["measured"]) == 3
        assert {devices for devices, *_ in each["measured"]} == {8}
        assert each["same"] is None
        assert "differs by" in each["other"]
