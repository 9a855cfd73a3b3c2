"""Plans of partitioned losses: they fit each device, and compute what the loss computes."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import mesh_plans
import pytest


@functools.cache
def answers():
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, mesh_plans.__file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", mesh_plans.NAMES)
def test_a_plan_fits_each_device_and_keeps_gradients_and_shardings(name):
    found = answers()[name]
    for answer in found:
        assert answer["target"] == "cpu:8"
        assert answer["is"] == answer["said"]
        if answer["budget"] is not None:  # of the least memory, no compiled program is known before
            assert answer["peak"] <= answer["budget"] < answer["baseline"]
            assert answer["predicted"] == pytest.approx(answer["peak"], rel=0.1)
        assert answer["apart"] < 1e-5
        assert answer["same shardings"]
    peaks = [answer["peak"] for answer in found]
    assert peaks == sorted(peaks, reverse=True)
