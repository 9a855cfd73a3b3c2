"""Twenty steps of the training run that `benchmarks/long_run.py` makes with five hundred."""

import json

import long_run
import pytest

SOUND = {
    "policy": "plan",
    "microbatches": 1,
    "largest_drift": 0.0,
    "compiles": 1,
    "compiles_after_the_first_step": 0,
    "live_arrays_growth": 0,
    "resident_growth_bytes": 0,
    "first_loss": 2.0,
    "last_loss": 1.0,
}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("long_run") / "report.json"
    assert long_run.main(["--smoke", "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.slow
def test_losses_stay_and_nothing_is_compiled_again(report):
    assert [(row["policy"], row["microbatches"]) for row in report["rows"]] == [
        ("none", 1),
        ("plan", 1),
        ("none", long_run.MICROBATCHES),
        ("plan", long_run.MICROBATCHES),
    ]
    for row in report["rows"]:
        assert row["largest_drift"] <= long_run.LARGEST_DRIFT
        assert row["compiles"] == 1
        assert row["compiles_after_the_first_step"] == 0
        assert row["live_arrays_growth"] <= 0
        assert row["last_loss"] < row["first_loss"]
    assert long_run.faults(report) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"largest_drift": 1e-2}, "drift"),
        ({"compiles": 2}, "compiled more than once"),
        ({"live_arrays_growth": 3}, "arrays are alive"),
        ({"resident_growth_bytes": 2**30}, "resident"),
        ({"last_loss": 1e3}, "did not fall"),
    ],
)
def test_what_does_not_hold_is_said(change, word):
    assert long_run.faults({"rows": [SOUND, SOUND]}) == []
    (said,) = long_run.faults({"rows": [SOUND, SOUND | change]})
    assert word in said
