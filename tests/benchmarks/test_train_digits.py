"""The benchmark on real images: equal losses, honest exit statuses, clean errors."""

import doctest
import json

import numpy as np
import pytest
import train_digits


def smoke(tmp_path, *more):
    path = tmp_path / "digits.json"
    status = train_digits.main(["--smoke", "--epochs", "1", "--json", str(path), *more])
    return status, json.loads(path.read_text())


def test_examples():
    failed, tried = doctest.testmod(train_digits)
    assert (failed, tried) == (0, 2)


@pytest.mark.parametrize(
    ("model", "given", "run"),
    [
        ("mlp", [], ["none", "nothing", "dots"]),
        # pytest -m slow tests/benchmarks/test_train_digits.py
        pytest.param(
            *("resnet", ["nothing"], ["none", "nothing"]), id="resnet", marks=pytest.mark.slow
        ),
    ],
)
def test_policies_keep_every_loss(tmp_path, capsys, model, given, run):
    policies = [word for policy in given for word in ("--policy", policy)]
    status, report = smoke(tmp_path, "--model", model, *policies)
    assert status == 0
    assert [each["policy"] for each in report["runs"]] == run
    assert all(len(run["losses"]) == 4 for run in report["runs"])
    assert all(run["max_ulps"] <= report["options"]["tolerance_ulps"] for run in report["runs"])
    out, err = capsys.readouterr()
    assert model in out
    assert "error" not in err


def test_the_mlp_learns_the_digits(tmp_path):
    path = tmp_path / "digits.json"
    arguments = ["--model", "mlp", "--policy", "none", "--epochs", "10", "--json", str(path)]
    assert train_digits.main(arguments) == 0
    (run,) = json.loads(path.read_text())["runs"]
    assert len(run["losses"]) == 10 * (1437 // 64)
    assert run["accuracy"] > 0.9
    assert run["losses"][-1] < 0.3 * run["losses"][0]


def test_a_loss_that_moves_fails_the_run(tmp_path, capsys, monkeypatch):
    def wrong(task, policy):
        def loss(*args):
            value, stats = task.loss(*args)
            return value * (1.0 if policy == "none" else 1.0001), stats

        return loss

    monkeypatch.setattr(train_digits, "with_policy", wrong)
    status, report = smoke(tmp_path, "--model", "mlp", "--policy", "dots")
    assert status == 1
    assert report["runs"][1]["max_ulps"] > 100
    assert "mlp under 'dots' is" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_fails_the_run(tmp_path, monkeypatch):
    def nan_loss(task, policy):
        def loss(*args):
            value, stats = task.loss(*args)
            return value * np.float32("nan"), stats

        return loss

    monkeypatch.setattr(train_digits, "with_policy", nan_loss)
    status, report = smoke(tmp_path, "--model", "mlp", "--policy", "dots")
    assert status == 1
    assert report["runs"][0]["losses"] == [None] * 4
    assert report["runs"][0]["max_ulps"] is None


def test_ulps():
    one = np.ones(3, np.float32)
    assert train_digits.max_ulps(one, one) == 0
    assert train_digits.max_ulps(one, one + np.float32(2**-22)) == 2
    assert train_digits.max_ulps(one, one * np.float32("nan")) == float("inf")


def test_train_and_test_images_do_not_overlap():
    images, labels, test_images, test_labels = train_digits.digits(0)
    assert (len(images), len(test_images)) == (len(labels), len(test_labels)) == (1437, 360)
    assert images.max() == 1
    assert set(np.unique(test_labels)) == set(range(10))
    again = train_digits.digits(0)
    np.testing.assert_array_equal(images, again[0])
    assert not np.array_equal(images, train_digits.digits(1)[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "'0' is not a positive whole number"),
        (["--batch", "2000"], "2000 is more than the 1437 images"),
        (["--seed", "-1"], "is not a whole number"),
        (["--model", "vgg"], "invalid choice: 'vgg'"),
        (["--tolerance-ulps", "-1"], "is not a number of ulps"),
        (["--json", "no/such/folder/x.json"], "is not a file that can be written"),
    ],
)
def test_a_wrong_call_is_explained(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        train_digits.main(arguments)
    assert message in capsys.readouterr().err


def test_an_unknown_policy_is_explained(capsys):
    assert train_digits.main(["--smoke", "--model", "mlp", "--policy", "dotz"]) == 2
    err = capsys.readouterr().err
    assert "dotz" in err
    assert "hint:" in err
    assert "Traceback" not in err
