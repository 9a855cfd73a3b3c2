"""The FLOPs that a report gives of a partitioned program are those that one device computes."""

import json

import jax
import mesh_flops
import pytest
from other_process import printed_by

# XLA gives some products of these programs to other devices than their shardings say, and splits
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
        assert answer["unplaced"] == answer["estimated"] == [], case
        # XLA:CPU of jax 0.10 undoes some recomputation outside of a loop.
        undone = jax.__version_info__ < (0, 11) and case[2] == "nothing"
        if not undone or answer["traced"] < answer["compiled"]:
            assert answer["traced"] == answer["compiled"], case


@pytest.mark.parametrize(
    "shardings",
    [
        pytest.param(("both",), id="some"),
        pytest.param(
            # Without shardings, nothing is split but by the constraints.
            tuple({*mesh_flops.SHARDINGS} - {"both", "replicated"}),
            id="others",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_the_partitioner_may_split_in_another_way_is_called_an_estimate(shardings):
    cases = [(n, s, p) for n in FREE for s in shardings for p in mesh_flops.POLICIES]
    answers = printed_by(mesh_flops.__file__, json.dumps(cases))
    kinds = {"constrained": ["dot_general"], "convolution": ["conv_general_dilated"]}
    for case, answer in zip(cases, answers, strict=True):
        if answer["traced"] != answer["compiled"]:
            assert answer["estimated"] == kinds[case[0]], case
    assert any(a["traced"] != a["compiled"] for a in answers)
