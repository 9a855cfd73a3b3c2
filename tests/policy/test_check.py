"""A policy checked against the names, modules and primitives of a program."""

from __future__ import annotations

import pytest

from remat_kit._errors import UnknownNameError
from remat_kit._policy.algebra import (
    Policy,
    offload,
    recompute,
    save,
)
from remat_kit._policy.check import check, unmatched
from remat_kit._policy.selectors import (
    dots,
    larger_than,
    module,
    named,
    named_regex,
    nothing,
    primitive,
)
from remat_kit._policy.structural import segments, uniform
from remat_kit._program.value import Value

_MODEL = [
    Value(primitives=("dot_general",), names=("attn_out",), module="GPT/block_0/attn/out"),
    Value(primitives=("custom_jvp_call", "jit", "max"), module="GPT/block_0/mlp"),
    Value(primitives=("my_kernel",), names=("mlp_up",), module="GPT/block_0/mlp/up"),
]


@pytest.mark.parametrize(
    ("policy", "word", "near"),
    [
        (save(named("atn_out")), "atn_out", "'attn_out'"),
        (save(named("attn_*", "mlp_dwn*")), "mlp_dwn*", "'mlp_up'"),
        (recompute(~named("atn_out")), "atn_out", "'attn_out'"),
        (save(named_regex("atn_out")), "atn_out", "'attn_out'"),
        (save(dots) | offload(module("*/mpl")), "*/mpl", "'*/mlp'"),
        (offload(module("*/atn/out")), "*/atn/out", "'*/attn/out'"),
        (offload(module("*/mpl/**")), "*/mpl/**", "'*/mlp/**'"),
        (offload(module("GPT/block_0/atn")), "GPT/block_0/atn", "'GPT/block_0/attn'"),
        (save(primitive("dot_generl")), "dot_generl", "'dot_general'"),
        (save(primitive("my_kernl")), "my_kernl", "'my_kernel'"),
        (uniform(2, keep=named("atn_out")), "atn_out", "'attn_out'"),
        (segments("attn_out", "mlp_u"), "mlp_u", "'mlp_up'"),
    ],
)
def test_what_matches_nothing_is_an_error(policy: Policy, word: str, near: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        check(policy, _MODEL, call="policy(...)")
    assert f"named {word!r}" in caught.value.message
    assert "`policy(...)`" in caught.value.message
    assert near in (caught.value.hint or "")


@pytest.mark.parametrize(
    "policy",
    [
        save(named("attn_*", "mlp_up")),
        save(named("atn_out", strict=False)),
        save(module("*/atn", strict=False)),
        save(module("*/mlp", "**/attn", "GPT/**")),
        save(primitive("tanh", "conv_*", "my_kernel", "max")),
        save(larger_than("1GiB")),
        segments("attn_out"),
    ],
)
def test_what_exists_passes_the_check(policy: Policy) -> None:
    check(policy, iter(_MODEL), call="policy(...)")


def test_the_known_primitives_can_be_given() -> None:
    with pytest.raises(UnknownNameError):
        check(save(primitive("tanh")), _MODEL, primitives=["exp"])


def test_a_model_without_names_says_so() -> None:
    with pytest.raises(UnknownNameError, match="there is no checkpoint name here at all"):
        check(save(named("x")), [Value()])


def test_unmatched_rules() -> None:
    p = save(named("attn_out")) | offload(larger_than("1GiB")) | save(nothing)
    assert unmatched(p, iter(_MODEL)) == ["offload(larger_than('1GiB'))"]
    assert unmatched(uniform(2, keep=dots), _MODEL) == []
