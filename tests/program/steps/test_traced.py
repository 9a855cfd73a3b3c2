"""Programs as they are compiled: a loss is differentiated, a step is left as it is."""

import jax.numpy as jnp
from shapes import struct

from remat_kit._chip.compile import measure


def test_whole_step_is_compiled_as_it_is():
    memory = measure(
        lambda x: (x + 1, x.astype(jnp.int32)), struct(1024), target="cpu", argnums=None
    )
    assert memory.argument_bytes == 4096
