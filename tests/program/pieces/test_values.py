"""Pieces of a value, along an axis or a factor of one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from piece_programs import floats

from remat_kit._program.pieces import Along, Partial, Piece
from remat_kit._program.pieces.values import candidates, fits


@pytest.mark.parametrize("along", [Along(0), Along(1, 3), Along(1, 1, 2), Along(1, 2, 3)], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_pieces_are_cut_and_put_together_again(along: Along, size: int) -> None:
    n = 4
    length = along.outer * n * along.inner
    x = floats(*(length if axis == along.axis else 5 for axis in range(2)))
    assert fits(jax.make_jaxpr(jnp.sin)(x).jaxpr.invars[0], along, n)
    whole = jnp.zeros_like(x)
    for offset in range(0, n, size):
        piece = Piece(n, min(size, n - offset), jnp.asarray(offset))
        part = piece.cut(x, along)
        assert part.shape == piece.shape(x.shape, along)
        factors = np.reshape(np.moveaxis(x, along.axis, 0), (along.outer, n, along.inner, 5))
        wanted = factors[:, offset : offset + piece.size].reshape(-1, 5)
        np.testing.assert_array_equal(np.moveaxis(np.asarray(part), along.axis, 0), wanted)
        whole = piece.put(whole, part, along)
    np.testing.assert_array_equal(whole, x)


def test_every_factor_of_an_axis_is_a_candidate() -> None:
    (x,) = jax.make_jaxpr(jnp.sin)(floats(5, 12)).jaxpr.invars
    found = list(candidates(x, 3))
    assert found == [Along(1, 1, 4), Along(1, 2, 2), Along(1, 4, 1)]
    assert all(fits(x, along, 3) for along in found)
    assert not fits(x, Along(0), 3)
    assert list(candidates(x, 1)) == []


@pytest.mark.parametrize("dtype", [bool, jnp.int32, jnp.float32])
def test_partial_results_are_joined(dtype: Any) -> None:
    a, b = jnp.asarray([0, 1, 1], dtype), jnp.asarray([1, 0, 1], dtype)
    found = {how: how.join(a, b).tolist() for how in Partial}
    assert found[Partial.SUM] == ([True] * 3 if dtype is bool else [1, 1, 2])
    assert found[Partial.MAX] == [1, 1, 1]
    assert found[Partial.MIN] == [0, 0, 1]


def test_sums_of_half_precision_are_added_up_in_float32() -> None:
    types = {t: Partial.SUM.dtype(jnp.dtype(t)) for t in ("bfloat16", "float16", "float8_e4m3fn")}
    assert set(types.values()) == {jnp.dtype("float32")}
    for same in ("float32", "float64", "complex64", "int8", "bool"):
        assert Partial.SUM.dtype(jnp.dtype(same)) == same
    for how in (Partial.MAX, Partial.MIN):
        assert how.dtype(jnp.dtype("bfloat16")) == "bfloat16"
    small = jnp.full(4, 0.01, jnp.bfloat16)
    whole = Partial.SUM.join(jnp.full(4, 8.0, jnp.float32), small)
    assert whole.dtype == jnp.float32
    assert whole[0] > 8
