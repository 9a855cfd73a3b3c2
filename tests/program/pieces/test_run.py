"""An equation whose parameters are sizes computes a piece with the sizes of the piece."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from piece_programs import check_all_ways, floats, ints

from remat_kit._program.pieces import Along

# Few sizes, because each new shape compiles each operation anew.
_SIZES = st.sampled_from([1, 4, 6])
_PIECES = st.integers(2, 4)


@settings(max_examples=3)
@given(shape=st.tuples(_SIZES, _SIZES, _SIZES), dim=st.integers(0, 2), pieces=_PIECES)
def test_iota(shape: tuple[int, ...], dim: int, pieces: int) -> None:
    found = check_all_ways(lambda: lax.broadcasted_iota(jnp.int32, shape, dim), pieces=pieces)
    assert {w.outputs[0].axis for w in found if w.outputs[0]} == {
        d for d in range(3) if shape[d] > 1
    }


@settings(max_examples=4)
@given(shape=st.tuples(_SIZES, _SIZES, st.sampled_from([4, 6, 12])), pieces=_PIECES)
def test_random_bits(shape: tuple[int, ...], pieces: int) -> None:
    """Each piece has the bits that the whole array has there, along factors of axes too."""
    key = jax.random.key(7)
    found = check_all_ways(lambda k: jax.random.bits(k, shape), key, pieces=pieces)
    axes = {w.outputs[0].axis for w in found if isinstance(w.outputs[0], Along)}
    assert axes == {d for d in range(3) if shape[d] > 1}
    assert all(w.inputs == (None,) for w in found)


def test_windows() -> None:
    x = floats(4, 6, 6, 3)
    found = check_all_ways(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), x
    )
    assert {w.outputs[0].axis for w in found if isinstance(w.outputs[0], Along)} == {0, 3}


@settings(max_examples=3)
@given(shape=st.tuples(_SIZES, _SIZES), width=_SIZES, pieces=_PIECES)
def test_gather(shape: tuple[int, int], width: int, pieces: int) -> None:
    table, index = floats(5, width), ints(*shape)
    lookup = check_all_ways(lambda t, i: t.at[i].get(mode="fill"), table, index, pieces=pieces)
    axes = {w.outputs[0].axis for w in lookup if isinstance(w.outputs[0], Along)}
    assert axes == {d for d, s in enumerate((*shape, width)) if s > 1}
    rows = floats(*shape, 5)
    check_all_ways(
        lambda x, i: jnp.take_along_axis(x, i[..., None], -1), rows, index, pieces=pieces
    )
