"""What the planner asks a compiler."""

import jax
import jax.numpy as jnp
import pytest
from shapes import struct

from remat_kit._chip.target import target
from remat_kit._planner.costs import build as _build


@pytest.mark.parametrize(
    ("chip", "window", "places"), [("cpu", 2, 1), ("cpu", 8, 1), ("cpu", 9, 16), ("h100", 2, 0)]
)
def test_max_pooling_on_a_cpu_keeps_where_in_its_window_each_is(chip, window, places):
    def pooled(x):
        shape, strides = (1, window, window, 1), (1, 2, 2, 1)
        y = jax.lax.reduce_window(jnp.exp(x), -jnp.inf, jax.lax.max, shape, strides, "SAME")
        return jnp.sum(y**2)

    graph = _build.trace(pooled, (struct(2, 16, 16, 4),), target(chip))
    (pool,) = [e for e in graph.equations if e.primitive == "reduce_window_max"]
    assert pool.made_bytes == places * 2 * 8 * 8 * 4
    assert bool(pool.keeps) == (chip != "cpu")
