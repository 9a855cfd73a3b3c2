"""Find what a gradient computes twice: each recomputed operation and its forward original."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from remat_kit import _frames
from remat_kit._program import ops as _ops
from remat_kit._program.flow import Op
from remat_kit._program.steps.gradient import Gradient, trace_gradient


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """Operations that the backward pass recomputes, and how often.

    `Report.recomputed` holds them.

    >>> import jax, jax.numpy as jnp, remat_kit
    >>> loss = remat_kit.policy("nothing")(lambda w: jnp.sum(jnp.sin(jnp.exp(w @ w))))
    >>> w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    >>> [(r.primitive, r.count, r.flops) for r in remat_kit.inspect(loss, w).recomputed]
    [('dot_general', 1, 1024.0), ('exp', 1, 64.0)]

    Attributes:
        primitive: the JAX primitive.
        module: path of the module whose forward pass computes it first.
        source: ``file:line`` of the user's line.
        shape: the shape of one result.
        dtype: the dtype of the result.
        count: how many of them; in a loop once for each iteration.
        flops: floating-point operations of all of them.
        bytes: the size of all results together, which is the memory that saving them would take.
        region: path of the checkpoint region.
        cost_known: whether ``flops`` includes them; the cost of a foreign kernel is unknown.
        pieces: if they are in a loop over pieces, which: ``"16 pieces of axis 0"``. ``shape`` is
            then that of one piece, and ``count`` includes all pieces.
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
    cost_known: bool = True
    pieces: str = ""

    @property
    def is_free(self) -> bool:
        """Tell whether the operation only moves data: a reshape, a broadcast, a transpose."""
        return self.flops == 0 and self.cost_known

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return plain | {"shape": list(self.shape)}


@dataclasses.dataclass(frozen=True, eq=False)
class Duplicate:
    """One recomputed operation and the operation of the forward pass that computes the same."""

    op: Op
    twin: Op

    @property
    def pieces(self) -> str:
        """The loop over pieces that recomputes it, or the empty string."""
        return self.op.loop[1] if self.op.loop else ""


def duplicates(gradient: Gradient) -> Iterator[Duplicate]:
    """Yield the operations of a traced gradient that a checkpoint region runs a second time.

    Operations with equal numbers are the same computation. Values that depend on no argument, such
    as zeros or masks of iotas, are left out, because compilers fold them.
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
        fn: called as ``fn(*args)``; returns a real scalar, or a pair of a scalar and anything.
        args: pytrees of arrays or `jax.ShapeDtypeStruct`.
        argnums: which arguments to differentiate.

    Returns:
        One entry for each primitive, module, source line and shape, most FLOPs first. The sine
        above is not recomputed: the backward pass computes its cosine, which is a new value.

    Raises:
        NotDifferentiableError, UserError: `fn` has no gradient for these arguments.
    """
    return recomputed_of(trace_gradient(fn, args, argnums, call="recomputed"))


def recomputed_of(gradient: Gradient) -> list[Recomputed]:
    """Return the recomputed operations of a traced gradient, most FLOPs first."""
    groups: dict[tuple[Any, ...], list[Op]] = {}
    for found in duplicates(gradient):
        aval, twin = found.op.eqn.outvars[0].aval, found.twin
        key = (twin.primitive, twin.module, twin.source, aval.shape, str(aval.dtype), found.pieces)
        groups.setdefault(key, []).append(found.op)
    regions = region_paths(gradient)
    found = [_summary(key, ops, regions) for key, ops in groups.items()]
    return sorted(found, key=lambda r: (-r.flops, -r.bytes))


def warn_of_pieces(gradients: Iterable[Gradient], call: str) -> None:
    """Emit a `RematKitWarning` if what a loop over pieces recomputes is not found.

    The backward pass begins each piece with the slices of its inputs, which the forward pass has
    taken too. If no operation of the loop has a twin in the forward pass, the two loops could not
    be matched.

    Args:
        gradients: of the losses.
        call: the public function that the warning names.
    """
    missing: set[str] = set()
    for gradient in gradients:
        loops = {op.loop for op in gradient.ops() if op.recomputed and op.loop}
        found = {d.op.loop for d in duplicates(gradient)}
        missing.update("/".join(path) for path, _ in loops - found)
    if missing:
        where = ", ".join(sorted(path or "the loss" for path in missing))
        _frames.warn(
            f"`{call}`: {where}: what the backward pass recomputes in pieces has no counterpart in "
            "the forward pass, so it is not counted as recomputed; the compiled memory is right",
            "compare the memory with and without `pieces`, and measure the time of a step",
        )


def region_paths(gradient: Gradient) -> dict[int, str]:
    """Map each number of a value to the path of the region that computes it.

    A loop over pieces is one region, although each of its pieces is a region for JAX.
    """
    regions: dict[int, str] = {}
    for region in gradient.primal.regions:
        regions.update((number, region.module) for op in region.ops for number in op.numbers)
    for op in gradient.primal.ops:
        if op.kind == "equation" and op.loop is not None:
            regions.update(dict.fromkeys(op.numbers, "/".join(op.loop[0])))
    return regions


def loops_of(gradient: Gradient) -> dict[str, str]:
    """Return the loops over pieces of a loss: their names by the paths of their regions."""
    ops = (op for op in gradient.primal.ops if op.kind == "equation")
    names: dict[str, list[str]] = {}
    for path, name in sorted({op.loop for op in ops if op.loop is not None}):
        names.setdefault("/".join(path), []).append(name)
    return {path: " and ".join(found) for path, found in names.items()}


def _summary(key: tuple[Any, ...], ops: Sequence[Op], regions: dict[int, str]) -> Recomputed:
    primitive, module, source, shape, dtype, pieces = key
    count = round(sum(op.times for op in ops))
    return Recomputed(
        primitive=primitive,
        module=module,
        source=source,
        shape=tuple(shape),
        dtype=dtype,
        count=count,
        flops=sum(op.flops for op in ops),
        bytes=round(sum(op.times * op.result_bytes for op in ops)),
        region=regions.get(ops[0].numbers[0], ""),
        cost_known=not any(_ops.unknown_costs(op.eqn) for op in ops),
        pieces=pieces,
    )


def forward_flops(gradient: Gradient) -> float:
    """Return the floating-point operations of the loss alone, with loops counted in full."""
    return sum(op.flops for op in gradient.primal_live if op.kind == "equation")


@dataclasses.dataclass(frozen=True)
class UnknownCost:
    """Operations of a loss whose cost is unknown, because JAX knows only their shapes.

    Attributes:
        primitive: the JAX primitive: ``ffi_call``, ``pure_callback``, ….
        module: path of the module.
        source: ``file:line`` of the user's line.
        count: how many of them; in a loop once for each iteration.
    """

    primitive: str
    module: str
    source: str
    count: int

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return dataclasses.asdict(self)


def unknown_costs(gradient: Gradient) -> tuple[UnknownCost, ...]:
    """Return the operations of the loss that no FLOPs include."""
    found: dict[tuple[str, str, str], float] = {}
    for op in gradient.primal_live:
        if op.kind == "equation":
            for eqn in _ops.unknown_costs(op.eqn):
                key = (eqn.primitive.name, op.module, op.source)
                found[key] = found.get(key, 0) + op.times
    return tuple(UnknownCost(*key, count=round(times)) for key, times in sorted(found.items()))
