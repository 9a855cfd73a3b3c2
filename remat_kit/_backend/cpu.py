"""Facts that hold for XLA's CPU compiler only."""

from __future__ import annotations

import math
from typing import Any

from remat_kit._backend import rewrites as _rewrites

# -- one equation ---------------------------------------------------------------------------------


def window_place_bytes(eqn: Any) -> int:
    """Return the bytes that the derivative of a maximum over windows saves on a CPU.

    For each window, the derivative saves the position of the maximum in one byte
    (`rewrites.lean_pooling`). For large windows it saves an index for each dimension instead.
    """
    if eqn.primitive.name not in ("reduce_window_max", "reduce_window_min"):
        return 0
    window = eqn.params["window_dimensions"]
    one = 1 if math.prod(window) <= _rewrites.LARGE_WINDOW else 4 * len(window)
    return math.prod(eqn.outvars[0].aval.shape) * one
