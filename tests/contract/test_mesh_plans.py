"""Plans of partitioned losses and steps fit each device, and compute the same values."""

import mesh_plans
import pytest
from other_process import printed_by

# The others, losses and steps with each sharding, take three minutes.
DEFAULT = ("jitted step, tensor parallel",)
OTHERS = tuple(name for name in mesh_plans.NAMES if name not in DEFAULT)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        *(pytest.param(name, DEFAULT, id=name) for name in DEFAULT),
        *(pytest.param(name, OTHERS, id=name, marks=pytest.mark.slow) for name in OTHERS),
    ],
)
def test_a_plan_fits_each_device_and_keeps_gradients_and_shardings(name, names):
    found = printed_by(mesh_plans.__file__, *names)[name]
    for answer in found:
        assert answer["target"] == "cpu:8"
        assert answer["is"] == answer["said"]
        if answer["budget"] is not None:  # of the least memory, no compiled program is known before
            assert answer["said"] <= answer["budget"] < answer["baseline"]
            assert answer["predicted"] == pytest.approx(answer["said"], rel=0.1)
        assert answer["apart"] < 1e-5
        assert answer["same shardings"]
    peaks = [answer["said"] for answer in found]
    assert peaks == sorted(peaks, reverse=True)
