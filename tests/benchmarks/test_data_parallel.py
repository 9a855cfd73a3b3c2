"""MindSpore's MNIST example on eight CPU devices, with and without recomputation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import data_parallel
import numpy as np
import pytest


@pytest.mark.slow
def test_recomputation_on_eight_devices_changes_no_loss(tmp_path):
    """A process of its own, because this one has another number of devices."""
    path = tmp_path / "data_parallel.json"
    command = [sys.executable, data_parallel.__file__, "--smoke", "--json", str(path)]
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text())
    assert (
        path.with_suffix(".md").read_text() == done.stdout == data_parallel.rendered(report) + "\n"
    )
    plain, relu, fleet = report["rows"]
    for row in (plain, relu, fleet):
        assert row["ulps"] <= data_parallel.ULPS
        assert row["from_one_device"] <= data_parallel.FROM_ONE_DEVICE
        assert row["last_loss"] < row["first_loss"]
        assert row["collectives"] > 0 == row["repeated"]
    assert (plain["recomputed"], relu["recomputed"]) == (0, 2)  # one ReLU in each block
    assert fleet["saved_bytes"] < plain["saved_bytes"]
    assert report["graph"].count("⟲ %") == 2
    assert report["graph"].count("max f32[256,512]") == 4


def test_every_batch_is_divided_over_the_devices():
    found = list(data_parallel.batches(600, 2))
    assert [len(rows) for rows in found] == [256] * 4
    assert len(np.unique(np.concatenate(found[:2]))) == 512
    assert not np.array_equal(found[0], found[2])


def test_the_images_have_the_pixels_of_mnist():
    images, labels, test_images, _ = data_parallel.images_of_mnist_size()
    small, *_ = data_parallel.train_digits.digits(0)
    assert images.shape == (len(labels), 784)
    assert test_images.shape[1:] == (784,)
    square = images.reshape(-1, 28, 28)
    np.testing.assert_array_equal(square[:, 3:26:3, 3:26:3], small)
    assert not square[:, :2].any()
