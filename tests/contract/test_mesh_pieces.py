"""Plans with pieces of partitioned programs need less memory, and compute the same values.

Sums over pieces add up in another order, so gradients are equal within rounding.
"""

import mesh_pieces
import pytest
from other_process import printed_by

pytestmark = pytest.mark.slow  # six minutes


@pytest.mark.parametrize("name", mesh_pieces.NAMES)
def test_a_plan_with_pieces_fits_each_device_and_computes_the_same(name):
    least, other = printed_by(mesh_pieces.__file__, *mesh_pieces.NAMES)[name]
    for answer in (least, other):
        assert answer["devices"] == mesh_pieces.DEVICES
        assert answer["is"] == answer["said"]
        assert answer["apart"] < 2e-6
        assert answer["same shardings"]
    assert least["pieces"]
    assert least["said"] < least["without pieces"]
    if "data" in name:
        assert least["said"] < 0.4 * least["without pieces"]
    assert least["said"] <= other["said"] <= other["budget"]
