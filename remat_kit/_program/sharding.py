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

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jec

from remat_kit import _jax
from remat_kit._program import ops as _ops
from remat_kit._program.program import Program, flat_program

Shape = tuple[int, ...]


def result_shards(
    fn: Callable[..., Sequence[Any]], structs: Sequence[jax.ShapeDtypeStruct]
) -> list[Shape] | None:
    """Return the shape of each result on one device, or None if the program is not partitioned.

    Args:
        fn: called with arrays; returns a list of arrays.
        structs: the shapes of the arguments, with their shardings.
    """
    found = _results(fn, structs)
    return None if found is None else [shard.shape for shard in found[0]]


@dataclasses.dataclass(frozen=True)
class ValueShard:
    """What one device has of an array.

    Attributes:
        shape: its shape on one device.
        axes: for each dimension, the names of the mesh axes that it is split over. A part of an
            axis is not named.
    """

    shape: Shape
    axes: tuple[tuple[str, ...], ...]

    def without(self, dimensions: int) -> ValueShard:
        """Return it without its first dimensions."""
        return ValueShard(self.shape[dimensions:], self.axes[dimensions:])

    def on(self, mesh: Any) -> jax.sharding.NamedSharding:
        """Return the sharding of the whole array over a mesh with these axes."""
        return _over(mesh, self.axes)


def _results(
    fn: Callable[..., Sequence[Any]], structs: Sequence[jax.ShapeDtypeStruct]
) -> tuple[list[ValueShard], dict[str, int]] | None:
    """Return what one device has of each result, and the axes of the mesh."""
    found = lowered_partitions(fn, structs)
    if found is None:
        return None
    module, shapes = found
    texts = _jax.propagated_result_shardings(module)
    if texts is None or len(texts) != len(shapes):
        return None
    sizes = _jax.axis_sizes(module)
    return [shard_of(shape, text, sizes) for shape, text in zip(shapes, texts, strict=True)], sizes


def lowered_partitions(
    fn: Callable[..., Sequence[Any]], structs: Sequence[jax.ShapeDtypeStruct]
) -> tuple[Any, list[Shape]] | None:
    """Return a lowered module and the shapes of its results; None if it is not partitioned."""
    traced = jax.jit(fn).trace(*structs)
    lowered = _lowered(traced)
    if lowered is None:
        return None
    module = lowered.compiler_ir("stablehlo")
    if "mhlo.num_partitions" not in module.operation.attributes:
        return None
    if int(module.operation.attributes["mhlo.num_partitions"]) == 1:
        return None
    return module, [tuple(info.shape) for info in traced.out_info]


def barrier_shardings(
    traced: Any, scope: str
) -> dict[int, list[jax.sharding.NamedSharding | None]] | None:
    """Return the shardings at the barriers of a program, or None if they are unknown.

    Args:
        traced: a `jax.stages.Traced`. In it, `jax.lax.optimization_barrier` is called in scopes
            with the name ``scope`` and a number.
        scope: the beginning of the name.

    Returns:
        For each number the shardings of the arrays at the first barrier of the forward pass, or an
        empty list if the program does not split them.
    """
    lowered = _lowered(traced)
    if lowered is None:
        return None
    module = lowered.compiler_ir("stablehlo")
    barriers = _jax.propagated_barrier_shardings(module)
    if barriers is None:
        return None
    mesh = _mesh_of(lowered, _jax.axis_sizes(module))
    found: dict[int, list[jax.sharding.NamedSharding | None]] = {}
    for name, texts in barriers:
        number = re.search(rf"\b{scope}(\d+)\b", name)
        if number is not None and "transpose(" not in name:
            found.setdefault(int(number.group(1)), [_named(text, mesh) for text in texts])
    return found


def _mesh_of(lowered: Any, sizes: dict[str, int]) -> Any:
    """Return the mesh of a lowered program; an abstract one if no argument or result is on it."""
    parts = _jax.partitioned(lowered)
    for _, sharding in (*parts.arguments, *parts.results):
        mesh = getattr(sharding, "mesh", None)
        if mesh is not None and dict(mesh.shape) == sizes:
            return mesh
    return abstract_mesh(sizes)


def abstract_mesh(sizes: Mapping[str, int]) -> jax.sharding.AbstractMesh:
    """Return a mesh with automatic axes of these names and sizes, without devices.

    >>> abstract_mesh({"data": 4, "model": 2}).shape_tuple
    (('data', 4), ('model', 2))
    """
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def _over(mesh: Any, axes: Sequence[tuple[str, ...]]) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*(a or None for a in axes)))


def _named(text: str, mesh: Any) -> jax.sharding.NamedSharding | None:
    """Return the sharding that Shardy prints, or None if it splits nothing.

    A dimension that is split over a part of an axis counts as whole.
    """
    axes = [tuple(name for name, part in parts if not part) for parts in _axes(text)]
    return _over(mesh, axes) if any(axes) else None


@dataclasses.dataclass(frozen=True)
class Shards:
    """What one device has of the values of a flat program.

    Attributes:
        inputs: for each of the program's variables for constants and arguments.
        results: for each equation, those of its results.
        bodies: for each scan, by the place of its equation, the values in one iteration.
        axes: the names and sizes of the axes of the mesh.
    """

    inputs: tuple[ValueShard, ...]
    results: tuple[tuple[ValueShard, ...], ...]
    bodies: Mapping[int, Shards]
    axes: tuple[tuple[str, int], ...]

    def by_variable(self, program: Program) -> dict[Any, ValueShard]:
        """Return what one device has of each variable of the program."""
        makers = zip(program.eqns, self.results, strict=True)
        pairs = [(program.invars, self.inputs), *((e.outvars, outs) for e, outs in makers)]
        return {v: x for vs, xs in pairs for v, x in zip(vs, xs, strict=True)}


def value_shards(program: Program, structs: Sequence[jax.ShapeDtypeStruct]) -> Shards | None:
    """Return what one device has of all values, or None if the program is not partitioned.

    Every value becomes a result of the program, those of a scan's body stacked over its iterations,
    and Shardy says how it splits each result.

    Args:
        program: a flat program.
        structs: the shapes of its arguments, with their shardings.
    """
    trees: list[Any] = []

    def every(*values: Any) -> list[Any]:
        found = _every_value(program, values)[1]
        leaves, tree = jax.tree.flatten(found)
        trees.append(tree)
        return leaves

    found = _results(every, structs)
    if found is None:
        return None
    shards, sizes = found
    return _shards(jax.tree.unflatten(trees[-1], shards), 0, tuple(sizes.items()))


def _every_value(program: Program, args: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """Run a flat program; return its results, and a tree of all values.

    The tree is a triple of the inputs, the results of each equation, and a mapping of the trees of
    the bodies of scans.
    """
    inputs = [*program.consts, *args]
    env = dict(zip(program.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jec.Literal) else env[atom]

    results, bodies = [], {}
    for i, eqn in enumerate(program.eqns):
        values = [read(v) for v in eqn.invars]
        if eqn.primitive.name == "scan":
            outs, bodies[i] = _every_value_of_scan(eqn, values)
        else:
            variables = [jec.Var(v.aval) for v in eqn.invars]
            alone = _jax.jaxpr_of(
                variables, list(eqn.outvars), [eqn.replace(invars=list(variables))]
            )
            outs = jec.jaxpr_as_fun(jec.ClosedJaxpr(alone, ()))(*values)
        env.update(zip(eqn.outvars, outs, strict=True))
        results.append(list(outs))
    return [read(v) for v in program.outvars], (inputs, results, bodies)


def _every_value_of_scan(eqn: Any, values: Sequence[Any]) -> tuple[list[Any], Any]:
    consts, carried = _jax.scan_arity(eqn)
    body = flat_program(eqn.params["jaxpr"])

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], Any]:
        outs, found = _every_value(body, [*values[:consts], *carry, *xs])
        return outs[:carried], (outs[carried:], found)

    carry, (stacked, found) = jax.lax.scan(
        step,
        list(values[consts : consts + carried]),
        list(values[consts + carried :]),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
    )
    return [*carry, *stacked], found


def _shards(found: Any, loops: int, axes: tuple[tuple[str, int], ...]) -> Shards:
    """Return the values without the dimensions of the loops that a body is in."""
    inputs, results, bodies = found
    return Shards(
        tuple(x.without(loops) for x in inputs),
        tuple(tuple(x.without(loops) for x in outs) for outs in results),
        {place: _shards(body, loops + 1, axes) for place, body in bodies.items()},
        axes,
    )


def _lowered(traced: Any) -> Any:
    """Lower for the first platform that has a rule for every primitive; a kernel may have one."""
    for platform in ("cpu", "tpu", "cuda"):
        try:
            return traced.lower(lowering_platforms=(platform,))
        except Exception:  # another platform may lower it; without any, the shardings are unknown
            continue
    return None


def shard_of(shape: Shape, sharding: str, sizes: Mapping[str, int]) -> ValueShard:
    """Return what one device has of an array, from its sharding as Shardy prints it.

    Axes that ``sizes`` does not name split nothing.

    >>> shard_of((16, 8), '<@mesh, [{"data", "model"}, {"x":(1)2, ?}]>', {"data": 2, "x": 4})
    ValueShard(shape=(8, 4), axes=(('data',), ()))
    """
    axes = [[(name, part) for name, part in parts if name in sizes] for parts in _axes(sharding)]
    if len(axes) != len(shape):
        return ValueShard(shape, ((),) * len(shape))
    counts = [math.prod(int(part) if part else sizes[name] for name, part in p) for p in axes]
    named = tuple(tuple(name for name, part in parts if not part) for parts in axes)
    return ValueShard(tuple(-(-n // count) for n, count in zip(shape, counts, strict=True)), named)


# -- products -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SplitProduct:
    """How the devices compute a matrix product together.

    Attributes:
        gathers: for each of the two operands, the axes over which a device gathers it before.
        sums: the axes over which the devices add their partial products up.
    """

    gathers: tuple[tuple[str, ...], tuple[str, ...]]
    sums: tuple[str, ...]


def split_product(
    numbers: Any,
    left: ValueShard,
    right: ValueShard,
    out: ValueShard,
    sizes: Mapping[str, int],
) -> SplitProduct:
    """Return how devices compute a matrix product, from the shardings of its values.

    An operand is gathered over an axis that splits a dimension of it and another dimension of the
    result. The parameters of fully sharded training are: their rows are split over the axis of
    the batch. If an axis splits a contracted dimension, each device has a part of the sum. But if
    it does not split that of the other operand too, and the operand is smaller than the result,
    the devices gather the operand instead.

    >>> x, w = ValueShard((2, 8), (("data",), ())), ValueShard((2, 6), (("data",), ()))
    >>> numbers, sizes = (((1,), (0,)), ((), ())), {"data": 4, "model": 4}
    >>> split_product(numbers, x, w, ValueShard((2, 6), (("data",), ())), sizes)
    SplitProduct(gathers=((), ('data',)), sums=())
    >>> x, w = ValueShard((8, 2), ((), ("model",))), ValueShard((2, 6), (("model",), ()))
    >>> split_product(numbers, x, w, ValueShard((8, 6), ((), ())), sizes)
    SplitProduct(gathers=((), ()), sums=('model',))

    Args:
        numbers: the ``dimension_numbers`` of the ``dot_general``.
        left, right, out: the operands and the result.
        sizes: the axes of the mesh.
    """
    contracted, batch = numbers
    used = {axis for names in out.axes for axis in names}
    pairs = zip(*contracted, strict=True)
    added: dict[str, None] = {}
    for i, j in pairs:
        for one, other, names in (
            (left, right.axes[j], left.axes[i]),
            (right, left.axes[i], right.axes[j]),
        ):
            for axis in names:
                is_large = math.prod(one.shape) * sizes[axis] >= math.prod(out.shape)
                if axis not in used and (axis in other or is_large):
                    added[axis] = None
    gathers: list[tuple[str, ...]] = []
    free = len(batch[0])  # the free dimensions of the result, after those of the batch
    for operand, inner, outer in zip((left, right), contracted, batch, strict=True):
        found: dict[str, None] = {}
        for d, names in enumerate(operand.axes):
            if d in inner:
                found.update((a, None) for a in names if a not in added)
                continue
            place = outer.index(d) if d in outer else free
            free += d not in outer
            found.update((a, None) for a in names if a not in out.axes[place])
        gathers.append(tuple(found))
    return SplitProduct((gathers[0], gathers[1]), tuple(added))


def is_contradictory(numbers: Any, left: ValueShard, right: ValueShard, out: ValueShard) -> bool:
    """Tell whether the operands and the result of a product are split in contradicting ways.

    A mesh axis splits one dimension of a product: one of its batch, one that an operand and the
    result have, or a contracted one. The partitioner decides which one, and what is gathered or
    exchanged, in two cases: the operands are split over the axis in different dimensions, and the
    result is not split over it; or the result is split in a dimension of one operand, and only the
    other operand is split, in a dimension that the result has too.

    >>> x, w = ValueShard((2, 8), (("data",), ())), ValueShard((8, 2), ((), ("data",)))
    >>> numbers = (((1,), (0,)), ((), ()))
    >>> is_contradictory(numbers, x, w, ValueShard((2, 8), (("data",), ())))
    False
    >>> is_contradictory(numbers, x, w, ValueShard((8, 8), ((), ())))
    True

    Args:
        numbers: the ``dimension_numbers`` of the ``dot_general``.
        left, right, out: the operands and the result.
    """
    names = _dimensions(numbers, len(left.axes), len(right.axes))
    wanted: list[dict[str, str]] = [
        {axis: name for axes, name in zip(array.axes, own, strict=True) for axis in axes}
        for array, own in zip((left, right, out), names, strict=True)
    ]
    for axis in {axis for found in wanted[:2] for axis in found}:
        *operands, result = (found.get(axis) for found in wanted)
        split = [name for name in operands if name is not None]
        if result is None:
            contradicts = len({*split}) == 2
        else:
            contradicts = result not in split and any(name in names[2] for name in split)
        if contradicts:
            return True
    return False


def may_be_split_otherwise(
    eqn: Any, shard: Callable[[Any], ValueShard | None], work: float
) -> bool:
    """Tell whether XLA's partitioner may split an operation in another way than Shardy's shardings.

    It may do so for a convolution of which one device does a part, and for a product whose
    operands and result are split in contradicting ways.

    Args:
        eqn: the operation.
        shard: returns what one device has of an operand or a result, or None if it is whole there.
        work: the part of the operation's work that one device does.
    """
    if eqn.primitive.name == "conv_general_dilated":
        return work < 1
    if eqn.primitive.name != "dot_general":
        return False
    left, right, out = (shard(v) for v in (*eqn.invars, *eqn.outvars))
    if left is None or right is None or out is None:
        return False
    return is_contradictory(eqn.params["dimension_numbers"], left, right, out)


def _dimensions(numbers: Any, left: int, right: int) -> tuple[list[str], list[str], list[str]]:
    """Name the dimensions of a product's operands and result; equal ones have equal names.

    >>> _dimensions((((2,), (1,)), ((0,), (0,))), 3, 3)
    (['b0', 'l1', 'c0'], ['b0', 'c0', 'r2'], ['b0', 'l1', 'r2'])
    """
    contracted, batch = numbers
    operands = []
    for side, count, inner, outer in zip("lr", (left, right), contracted, batch, strict=True):
        named = {d: f"c{i}" for i, d in enumerate(inner)}
        named |= {d: f"b{i}" for i, d in enumerate(outer)}
        operands.append([named.get(d, f"{side}{d}") for d in range(count)])
    free = [name for own in operands for name in own if name[0] in "lr"]
    return operands[0], operands[1], [*(f"b{i}" for i in range(len(batch[0]))), *free]


def work_share(
    eqn: Any,
    shard: Callable[[Any], ValueShard | None],
    part: Callable[[Any], float],
    sizes: Mapping[str, int],
) -> float:
    """Return the part of an operation's work that one device does.

    For a product these are the parts of its batch, free and contracted dimensions, for a
    convolution those of its result and of the input channels that are summed over. For another
    operation it is the part of its largest operand or result.

    Args:
        eqn: the operation.
        shard: returns what one device has of an operand or a result, or None if it is whole there.
        part: returns the part of its bytes that one device has.
        sizes: the axes of the mesh.
    """
    if eqn.primitive.name == "dot_general":
        left, right, out = (shard(v) for v in (*eqn.invars, *eqn.outvars))
        parts = 1
        if left is not None and right is not None and out is not None:
            numbers = eqn.params["dimension_numbers"]
            parts = math.prod(
                sizes[a] for a in split_product(numbers, left, right, out, sizes).sums
            )
        return part(eqn.outvars[0]) / parts
    if eqn.primitive.name == "conv_general_dilated":
        channels = eqn.params["dimension_numbers"].lhs_spec[1]
        whole, local = max(1, eqn.invars[0].aval.shape[channels]), shard(eqn.invars[0])
        return part(eqn.outvars[0]) * (local.shape[channels] / whole if local else 1.0)
    atoms = [*eqn.invars, *eqn.outvars]
    largest = max(atoms, key=lambda v: _ops.nbytes(v.aval), default=None)
    return 1.0 if largest is None else part(largest)


def _axes(sharding: str) -> list[list[tuple[str, str]]]:
    """Return for each dimension the axes that it is split over: the name, and the size of a part.

    >>> _axes('<@mesh, [{"data", "model"}, {"x":(1)2, ?}, {}]>')
    [[('data', ''), ('model', '')], [('x', '2')], []]
    """
    return [_AXIS.findall(text) for text in re.findall(r"\{([^{}]*)\}", sharding)]


_AXIS = re.compile(r'"([^"]*)"(?::\(\d+\)(\d+))?')
