"""Structural policies."""

from __future__ import annotations

import pytest

from remat_kit._errors import PolicyError
from remat_kit._policy.algebra import (
    Decision,
    offload,
    save,
)
from remat_kit._policy.recipe import parse, resolve
from remat_kit._policy.selectors import (
    dots,
    named,
)
from remat_kit._policy.structural import block, nested, pieces, segments, sliced, uniform
from remat_kit._program.value import Value

RECOMPUTE, OFFLOAD, SAVE = Decision
_MODEL = [
    Value(primitives=("dot_general",), names=("attn_out",), module="GPT/block_0/attn/out"),
    Value(primitives=("custom_jvp_call", "jit", "max"), module="GPT/block_0/mlp"),
    Value(primitives=("my_kernel",), names=("mlp_up",), module="GPT/block_0/mlp/up"),
]


def test_structural_policies_decide_as_what_they_keep() -> None:
    keep = save(dots) | offload(named("attn_out"))
    for p in (
        uniform(2, keep=keep),
        block(2, keep=keep),
        nested(keep=keep),
        segments("a", keep=keep),
    ):
        for v in _MODEL:
            assert p.decide(v) == keep.decide(v)
            assert p.matches(v) == keep.matches(v)
            assert p.rule(v) == keep.rule(v)
            assert p.destination(v) == keep.destination(v)
        assert list(p.leaves()) == [dots, named("attn_out")]
    assert uniform(2).decide(_MODEL[0]) is RECOMPUTE


def test_pieces_are_text_too() -> None:
    for p in (pieces(8), pieces(8, axis=2), pieces(1, axis=-1)):
        assert parse(repr(p)) == p
        assert p.decide(_MODEL[0]) is RECOMPUTE
    assert resolve("tiled_mlp:4") == pieces(4, axis=-2)
    for wrong in (0, -1, 2.0, True, "8"):
        with pytest.raises(PolicyError, match="is not a count"):
            pieces(wrong)  # type: ignore[arg-type]
    for axis in ("0", 1.0, True):
        with pytest.raises(PolicyError, match="the axis is not an integer"):
            pieces(8, axis=axis)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="cannot be combined"):
        pieces(8) | save(dots)


def test_slices_are_text_too() -> None:
    assert parse(repr(sliced("model"))) == sliced("model")
    assert resolve("mindspore_recompute_slice_activation:model") == sliced("model")
    assert sliced("model").decide(_MODEL[0]) is RECOMPUTE
    for wrong in ("", 1, None, ("data", "model")):
        with pytest.raises(PolicyError, match="the axis is not a name"):
            sliced(wrong)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="cannot be combined"):
        sliced("model") | save(dots)
    with pytest.raises(PolicyError, match="for the values inside a region"):
        uniform(2, keep=sliced("model"))
