"""What a gradient computes twice: each recomputed operation with its forward twin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from remat_kit import _graph
from remat_kit._dataflow import Gradient, Op, trace_gradient


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """One computation that the backward pass does again, and how often.

    Attributes:
        primitive: the JAX primitive.
        module: path of the module whose forward pass did it first.
        source: ``file:line`` of the user's line.
        shape: of the result.
        dtype: of the result.
        count: how many of them; in a loop once per iteration.
        flops: floating-point operations of all of them.
        bytes: of their results together, which is what keeping them would take.
        region: path of the checkpoint region.
    """

    primitive: str
    module: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    flops: float
    bytes: int
    region: str = ""

    @property
    def is_free(self) -> bool:
        """Tell whether it only moves data: a reshape, a broadcast, a transposition."""
        return self.flops == 0

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return plain | {"shape": list(self.shape)}


@dataclasses.dataclass(frozen=True, eq=False)
class Duplicate:
    """One recomputed operation and the forward operation that did the same."""

    op: Op
    twin: Op


def duplicates(gradient: Gradient) -> Iterator[Duplicate]:
    """Yield the operations of a traced gradient that a checkpoint region runs a second time.

    Equal numbers say that they are the same computation. What depends on no argument (a zero, a
    mask made of iotas) is left out: compilers fold it.
    """
    first: dict[int, Op] = {}
    is_constant = gradient.flow.numbering.is_constant
    for op in gradient.ops():
        number = op.numbers[0] if op.numbers else None
        if number is None or is_constant(number):
            continue
        twin = first.setdefault(number, op)
        if twin is not op and op.recomputed:
            yield Duplicate(op, twin)


def recomputed(
    fn: Callable[..., Any], args: Sequence[Any], argnums: int | Sequence[int] = 0
) -> list[Recomputed]:
    """Return what the gradient of a loss computes twice because of checkpoint regions.

    >>> import jax, jax.numpy as jnp
    >>> layer = jax.checkpoint(lambda x, w: jnp.sin(jnp.tanh(x @ w)))
    >>> x = w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    >>> for r in recomputed(lambda w, x: layer(x, w).sum(), (w, x)):
    ...     print(r.primitive, r.shape, r.count, r.flops)
    dot_general (8, 8) 1 1024.0
    tanh (8, 8) 1 64.0

    Args:
        fn: called as ``fn(*args)``; gives a real scalar, or a pair of one and anything.
        args: arrays or `jax.ShapeDtypeStruct`, in pytrees.
        argnums: what to differentiate.

    Returns:
        One entry for each primitive, module, source line and shape, most FLOPs first. The sine
        above is not computed again: its cosine is new in the backward pass.

    Raises:
        NotDifferentiableError, UserError: `fn` has no gradient there.
    """
    return recomputed_of(trace_gradient(fn, args, argnums, call="recomputed"))


def recomputed_of(gradient: Gradient) -> list[Recomputed]:
    """Return the recomputed operations of a traced gradient, most FLOPs first."""
    groups: dict[tuple[Any, ...], list[Op]] = {}
    for found in duplicates(gradient):
        aval, twin = found.op.eqn.outvars[0].aval, found.twin
        key = (twin.primitive, twin.module, twin.source, aval.shape, str(aval.dtype))
        groups.setdefault(key, []).append(found.op)
    regions = region_paths(gradient)
    found = [_summary(key, ops, regions) for key, ops in groups.items()]
    return sorted(found, key=lambda r: (-r.flops, -r.bytes))


def region_paths(gradient: Gradient) -> dict[int, str]:
    """Map each number of a value to the path of the checkpoint region that computes it."""
    regions: dict[int, str] = {}
    for region in gradient.primal.regions:
        for op in region.ops:
            for number in op.numbers:
                regions[number] = region.module
    return regions


def _summary(key: tuple[Any, ...], ops: Sequence[Op], regions: dict[int, str]) -> Recomputed:
    primitive, module, source, shape, dtype = key
    size = sum(_graph.nbytes(v.aval) for v in ops[0].eqn.outvars)
    count = round(sum(op.times for op in ops))
    return Recomputed(
        primitive=primitive,
        module=module,
        source=source,
        shape=tuple(shape),
        dtype=dtype,
        count=count,
        flops=sum(op.flops for op in ops),
        bytes=count * size,
        region=regions.get(ops[0].numbers[0], ""),
    )


def forward_flops(gradient: Gradient) -> float:
    """Return the floating-point operations of the loss alone, loops counted in full."""
    return sum(op.flops for op in gradient.primal_live if op.kind == "equation")
