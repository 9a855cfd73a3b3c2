"""How many bytes does a value of a partitioned program take on one device?

Before XLA compiles a program, Shardy propagates the shardings of the arguments and of the
constraints to every value. This module lowers a program, runs the same propagation, which jaxlib
contains, and reads the shardings of the results.

Example: an array of 16 by 8 floats, split over an axis of 4 devices, gives a product that Shardy
splits in the same way:

>>> import jax
>>> from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
>>> mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
>>> x = jax.ShapeDtypeStruct((16, 8), "float32", sharding=NamedSharding(mesh, P("data")))
>>> w = jax.ShapeDtypeStruct((8, 8), "float32")
>>> result_shards(lambda x, w: [x @ w], [x, w])
[(4, 8)]

Xia et al., Shardy, https://openxla.org/shardy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from remat_kit import _jax

Shape = tuple[int, ...]


def result_shards(
    fn: Callable[..., Sequence[Any]], structs: Sequence[jax.ShapeDtypeStruct]
) -> list[Shape] | None:
    """Return the shape of each result on one device, or None if the program is not partitioned.

    Args:
        fn: called with arrays; returns a list of arrays.
        structs: the shapes of the arguments, with their shardings.
    """
    traced = jax.jit(fn).trace(*structs)
    shapes = [tuple(info.shape) for info in traced.out_info]
    lowered = _lowered(traced)
    if lowered is None:
        return None
    module = lowered.compiler_ir("stablehlo")
    if "mhlo.num_partitions" not in module.operation.attributes:
        return None
    if int(module.operation.attributes["mhlo.num_partitions"]) == 1:
        return None
    texts = _jax.propagated_result_shardings(module)
    if texts is None or len(texts) != len(shapes):
        return None
    sizes = _jax.axis_sizes(module)
    return [_shard(shape, text, sizes) for shape, text in zip(shapes, texts, strict=True)]


def _lowered(traced: Any) -> Any:
    """Lower for the first platform that has a rule for every primitive; a kernel may have one."""
    for platform in ("cpu", "tpu", "cuda"):
        try:
            return traced.lower(lowering_platforms=(platform,))
        except Exception:  # another platform may lower it; without any, the shardings are unknown
            continue
    return None


def _shard(shape: Shape, sharding: str, sizes: dict[str, int]) -> Shape:
    """Return the shape on one device.

    >>> _shard((16, 8), '<@mesh, [{"data", "model"}, {"x":(1)2, ?}]>', {"data": 2, "model": 4})
    (2, 4)
    """
    parts = re.findall(r"\{([^{}]*)\}", sharding)
    if len(parts) != len(shape):
        return shape
    counts = [
        math.prod(int(part) if part else sizes.get(name, 1) for name, part in _AXIS.findall(text))
        for text in parts
    ]
    return tuple(-(-n // count) for n, count in zip(shape, counts, strict=True))


_AXIS = re.compile(r'"([^"]*)"(?::\(\d+\)(\d+))?')
