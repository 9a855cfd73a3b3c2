"""Optimization barriers that keep a compiler from undoing a schedule.

A compiler may fuse or move operations across the boundary of a region and so save values that the
schedule recomputes. Each function here adds an optimization barrier on the compilers that need it
and changes nothing on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from remat_kit._backend import facts as _facts
from remat_kit._jax import barrier

# Each barrier stands for the compilers of one fact. XLA's CPU compiler, for example, does not need
# `together` and would use a little more memory with it. We do not use JAX's own barrier because JAX
# cannot transpose it where only some of the values have tangents. A barrier with `backward_only`
# acts on the cotangents and leaves the forward pass alone.
together = barrier(_facts.FUSES_GRADIENT_SUMS.backends)
together_backward = barrier(_facts.FUSES_GRADIENT_SUMS.backends, backward_only=True)
apart = barrier(_facts.FUSES_SUMS_INTO_READERS.backends)
apart_backward = barrier(_facts.FUSES_SUMS_INTO_READERS.backends, backward_only=True)
once = barrier(_facts.COMPUTES_RESULTS_AGAIN.backends)
kernel_first = barrier(_facts.DELAYS_KERNEL_GRADIENTS.backends)


def materialized(values: dict[Any, Any], stacked: bool) -> dict[Any, Any]:
    """Keep the compiler from fusing the inputs of a region into every operation that reads them.

    A residual stream is a sum of many arrays. XLA's CPU compiler fuses the partial sum into each
    later block, so that all terms of the sum stay live until the last block: ResNet-152 then takes
    1051 MiB although the plan predicts 634 MiB (jax 0.12). In the backward pass the compiler does
    the same to the sum of the cotangents of a region's inputs, where parts of the region read that
    sum one after the other: the dense block in `tests/apply/test_run_schedule.py` then takes
    117 MiB instead of 88 MiB.
    """
    return _behind(apart_backward if stacked else apart, values)


def computed_once(values: dict[Any, Any]) -> dict[Any, Any]:
    """Keep XLA's CPU compiler from computing the outputs of a region twice.

    The derivative of the operations that follow a region reads the region's outputs. XLA's CPU
    compiler recomputes the outputs there and saves everything that they are computed from. With
    that, the plan of ResNet-50 with the lowest peak took 196 MiB more (jax 0.12). GPUs do not need
    this barrier.
    """
    return _behind(once, values)


def waiting_for_gradients(values: dict[Any, Any], stacked: bool) -> dict[Any, Any]:
    """Make the backward pass of a segment wait for the gradients that the segment adds to.

    Where an earlier segment reads the same argument (a tied embedding, for example), the gradient
    of that argument is a sum of several terms. XLA's TPU compiler fuses the addition into the
    matrix product that computes this segment's term. The product then runs only when the other
    term is there, and everything that the product reads, such as the logits, stays live through
    the backward pass of all layers (GPT-12 on a v5e, jax 0.12).
    """
    return _behind(together_backward if stacked else together, values)


def _behind(
    barrier: Callable[[list[Any]], Sequence[Any]], values: dict[Any, Any]
) -> dict[Any, Any]:
    floats = {v: x for v, x in values.items() if jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)}
    return dict(zip(floats, barrier([*floats.values()]), strict=True)) if floats else {}
