"""Selectors: what each selects, and the arguments they refuse."""

from __future__ import annotations

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

from remat_kit._errors import PolicyError
from remat_kit._policy import recipe as _recipe
from remat_kit._policy.algebra import (
    save,
)
from remat_kit._policy.patterns import path_matches
from remat_kit._policy.selectors import (
    collective,
    dots,
    dots_no_batch,
    gathered_parameters,
    larger_than,
    module,
    source,
    where,
)
from remat_kit._program.value import Value

_paths = st.sampled_from(["*/mlp", "**/attn/**", "GPT/block_[01]", "*/attn/out", "?/x"])


@given(_paths, st.lists(st.sampled_from(["GPT", "block_0", "mlp", "attn", "out"]), max_size=5))
def test_a_module_selects_all_inside_it(pattern: str, parts: list[str]) -> None:
    prefixes = ["/".join(parts[:n]) for n in range(len(parts) + 1)]
    selected = module(pattern).matches(Value(module=prefixes[-1]))
    assert selected == any(path_matches(pattern, p) for p in prefixes)


@pytest.mark.parametrize("pattern", ["", "/mlp", "mlp/", "a//b"])
def test_paths_with_empty_components_are_refused(pattern: str) -> None:
    with pytest.raises(PolicyError, match="hint: "):
        module(pattern)


def test_dots_see_batch_axes() -> None:
    def dot(batch: tuple[int, ...]) -> Value:
        numbers = (((1 + len(batch),), (len(batch),)), (batch, batch))
        return Value(primitives=("jit", "dot_general"), params={"dimension_numbers": numbers})

    assert dots.matches(dot(()))
    assert dots.matches(dot((0,)))
    assert dots_no_batch.matches(dot(()))
    assert not dots_no_batch.matches(dot((0,)))
    assert not dots_no_batch.matches(Value(primitives=("dot_general",)))
    for name in ("conv_general_dilated", "scaled_matmul_wrapper", "ragged_dot_general"):
        assert dots.matches(Value(primitives=(name,)))
    for batch, expected in ((1, True), (2, False)):
        operand = jax.ShapeDtypeStruct((batch, 8, 8), jnp.float32)
        value = Value(primitives=("scaled_matmul_wrapper",), in_avals=(operand,))
        assert dots_no_batch.matches(value) is expected


def test_collectives() -> None:
    for name in ("psum", "psum_invariant", "all_gather", "reduce_scatter", "all_to_all", "pmax"):
        assert collective.matches(Value(primitives=(name,)))
    for name in ("reduce_sum", "dot_general", "pbroadcast", "pvary"):
        assert not collective.matches(Value(primitives=(name,)))


def test_collectives_of_the_partitioner() -> None:
    added = Value(primitives=("dot_general",), collective=True)
    gathered = Value(primitives=("custom_jvp_call",), collective=True, gathered_parameter=True)
    both = (added, gathered)
    assert [collective.matches(v) for v in both] == [True, True]
    assert [gathered_parameters.matches(v) for v in both] == [False, True]
    assert [(collective - gathered_parameters).matches(v) for v in both] == [True, False]
    assert not gathered_parameters.matches(Value(primitives=("all_gather",)))


def test_source_lines() -> None:
    value = Value(source=("/home/me/net/model.py", 130))
    for place in ("model.py", "net/model.py", "model.py:130", "model.py:120-140"):
        assert source(place).matches(value), place
    for place in ("odel.py", "other.py", "model.py:131", "model.py:131-140"):
        assert not source(place).matches(value), place
    assert source("net/model.py").matches(Value(source=("C:\\net\\model.py", 1)))


def test_where_shows_its_function() -> None:
    selector = where(_is_image)
    assert selector.matches(Value(shape=(1, 2, 3, 4)))
    assert selector == where(_is_image)
    assert repr(save(selector)).endswith("._is_image))")


def _is_image(value: Value) -> bool:
    return len(value.shape) == 4


@given(st.integers(0, 1 << 60))
def test_byte_sizes_survive_the_repr(n: int) -> None:
    assert _recipe.parse(repr(larger_than(n))) == save(larger_than(n))
