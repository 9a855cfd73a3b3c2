"""The FLOPs that a report gives of a partitioned program are those that one device computes."""

import json

import jax
import mesh_flops
import pytest
from other_process import printed_by

# XLA gives one product of this program to fewer devices than its shardings say, and splits the
# convolutions over devices in ways of its own.
FREE = ("constrained", "convolution")
EXACT = tuple(name for name in mesh_flops.PROGRAMS if name not in FREE)
DEFAULT = (
    ("perceptron", "fully sharded", "nothing"),
    ("scanned", "tensor parallel", "nothing"),
    ("attention", "rows", None),
    ("called_twice", "both", None),
    ("with_rule", "data parallel", None),
    ("mapped", "fully sharded", "nothing"),
    ("partly_mapped", "rows", None),
    ("branches", "replicated", None),
)
OTHERS = tuple(
    (name, sharding, policy)
    for name in EXACT
    for sharding in mesh_flops.SHARDINGS
    for policy in mesh_flops.POLICIES
    if (name, sharding, policy) not in DEFAULT
)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(DEFAULT, id="some"),
        pytest.param(OTHERS, id="others", marks=pytest.mark.slow),
    ],
)
def test_traced_products_are_those_of_one_device_of_the_compiled_program(cases):
    answers = printed_by(mesh_flops.__file__, json.dumps(cases))
    for case, answer in zip(cases, answers, strict=True):
        assert answer["unplaced"] == [], case
        # XLA:CPU of jax 0.10 undoes some recomputation outside of a loop.
        undone = jax.__version_info__ < (0, 11) and case[2] == "nothing"
        if not undone or answer["traced"] < answer["compiled"]:
            assert answer["traced"] == answer["compiled"], case
