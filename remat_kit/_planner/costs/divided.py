"""What does a loop over pieces of a segment cost?

`graph_of` returns the cost graph of a program with segments in pieces. Each such segment is one
operation there. Its forward pass needs the activations of one piece for a time. Its derivative
recomputes one piece after the other and needs the activations and the cotangents of one. Both are
simulated on the cost graph of one piece. What each piece reads as a whole, such as the weights of a
loss head, is read again for each piece, and its gradient is added up once for each piece.

Example: a loss head with logits of 64 MiB, computed from the weights of 16 MiB and from activations
of 1 MiB. In 16 pieces its forward pass needs 4 MiB at a time, the logits of one piece. Its
derivative needs these, their cotangent, and the gradient of the weights of one piece, together 24
MiB.

If the program is partitioned over several devices, all costs are those of one device. The values of
a piece are split as those of the whole segment are; the axis that is cut into pieces is not split.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jec

from remat_kit._apply.divide import Divided
from remat_kit._apply.pieces import PieceLoop
from remat_kit._backend.interface import Backend
from remat_kit._planner.costs import build as _build
from remat_kit._planner.costs.build import LinkedChip, PieceCost
from remat_kit._planner.costs.graph import CostGraph, Partition
from remat_kit._planner.costs.simulate import Simulation
from remat_kit._policy.schedule import Segment
from remat_kit._program import ops as _ops
from remat_kit._program import sharding as _sharding
from remat_kit._program.pieces import Partial, Piece
from remat_kit._program.program import Program, flat_program
from remat_kit._program.sharding import Shards, ValueShard


def graph_of(graph: CostGraph, divided: Divided, chip: LinkedChip) -> CostGraph:
    """Return the cost graph of a divided program.

    Args:
        graph: the cost graph of the program as it was.
        divided: the program with segments in pieces.
        chip: the chip of the graph.
    """
    active = [t.active for t in graph.tensors[: len(graph.program.invars)]]
    wanted = [t >= 0 and graph.tensors[t].active for t in graph.outputs]
    partition, parts = graph.partition, _Parts(divided, chip, {})
    if partition is not None:
        parts = dataclasses.replace(parts, shards=partition.shards)
        shards = shards_of(divided, partition.shards)
        partition = dataclasses.replace(partition, shards=shards)
    found = _build.graph_of(
        *(divided.program, active, wanted, chip, parts),
        stacked=graph.stacked,
        partition=partition,
    )
    return dataclasses.replace(found, divided=divided)


def shards_of(divided: Divided, shards: Shards) -> Shards:
    """Return what one device has of the values of a divided program.

    Args:
        divided: the divided program, whose variables are those of the program as it was.
        shards: what one device has of these.
    """
    has = shards.by_variable(divided.whole)
    eqns = divided.program.eqns
    place = {e.outvars[0]: i for i, e in enumerate(divided.whole.eqns) if e.outvars}
    bodies = {}
    for i, eqn in enumerate(eqns):
        body = shards.bodies.get(place[eqn.outvars[0]]) if eqn.outvars else None
        if body is not None and eqn.primitive.name == "scan":
            inner = divided.bodies.get(i)
            bodies[i] = body if inner is None else shards_of(inner, body)
    results = tuple(tuple(has[v] for v in e.outvars) for e in eqns)
    return dataclasses.replace(shards, results=results, bodies=bodies)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The segments in pieces of a program; equal ones have the same loop and the same cost.

    Attributes:
        divided: the divided program.
        chip: as for `graph_of`.
        known: the costs of the loops so far.
        shards: what one device has of the values of the program as it was; None if it has all.
    """

    divided: Divided
    chip: LinkedChip
    known: dict[tuple[PieceLoop, tuple[bool, ...]], PieceCost]
    shards: Shards | None = None

    def cost(self, equation: int, active: Sequence[bool]) -> PieceCost | None:
        loop = self.divided.loops.get(equation)
        if loop is None:
            return None
        key = loop, tuple(active)
        if key not in self.known:
            # The loop has the variables of the first of the equal segments.
            self.known[key] = cost_of(loop, active, self.chip, self.of_values)
        return self.known[key]

    @functools.cached_property
    def of_values(self) -> ShardsOfValues | None:
        if self.shards is None:
            return None
        return ShardsOfValues(self.shards.by_variable(self.divided.whole), self.shards.axes)

    def body(self, equation: int) -> _Parts | None:
        inner = self.divided.bodies.get(equation)
        if inner is None:
            return None
        shards = None
        if self.shards is not None:
            scan = self.divided.program.eqns[equation].outvars[0]
            whole = enumerate(self.divided.whole.eqns)
            shards = self.shards.bodies[next(i for i, e in whole if scan in e.outvars)]
        return dataclasses.replace(self, divided=inner, shards=shards)


@dataclasses.dataclass(frozen=True)
class ShardsOfValues:
    """What one device has of the variables of a program, and the axes of the mesh."""

    values: Mapping[Any, ValueShard]
    axes: tuple[tuple[str, int], ...]

    def part(self, var: Any, shape: tuple[int, ...]) -> ValueShard:
        """Return what one device has of a piece of a value; it has all of the axis that is cut."""
        own = self.values[var]
        parts = (max(1, -(-n // max(m, 1))) for n, m in zip(var.aval.shape, own.shape, strict=True))
        return ValueShard(tuple(-(-n // k) for n, k in zip(shape, parts, strict=True)), own.axes)

    def partition(self, loop: PieceLoop, program: Program, names: Sequence[Any]) -> Partition:
        """Return what one device has of the values of one piece.

        Args:
            loop: the loop over the pieces.
            program: the program of one piece. It returns all values that the loop makes.
            names: the variables of the loop for these.
        """
        own = len(program.consts)
        inputs = [v for v, _ in loop.inputs]
        known = {x: _whole(x) for x in program.invars[:own]}
        for x, v in (
            *zip(program.invars[own:], inputs, strict=True),
            *zip(program.outvars, names, strict=True),
        ):
            if not isinstance(x, jec.Literal):
                known[x] = self.part(v, x.aval.shape)
        for eqn in program.eqns:
            read = {v.aval.shape: known[v] for v in eqn.invars if not isinstance(v, jec.Literal)}
            for v in eqn.outvars:
                if v not in known:  # of an operation that a rule adds, such as a cast
                    known[v] = read.get(v.aval.shape, _whole(v))
        shards = Shards(
            tuple(known[v] for v in program.invars),
            tuple(tuple(known[v] for v in e.outvars) for e in program.eqns),
            self._bodies(program, known),
            self.axes,
        )
        gathered = {
            own + i: _ops.nbytes(inputs[i].aval.update(shape=shards.inputs[own + i].shape)) * parts
            for i, parts in self._gathered(program, known).items()
        }
        return Partition(shards, gathered)

    def _bodies(self, program: Program, known: Mapping[Any, ValueShard]) -> Mapping[int, Shards]:
        """Return what one device has of the values in the bodies of scans, as Shardy propagates it.

        Args:
            program: the program of one piece.
            known: what one device has of its values.
        """
        if not any(eqn.primitive.name == "scan" for eqn in program.eqns):
            return {}
        mesh = _sharding.abstract_mesh(dict(self.axes))
        structs = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=known[v].on(mesh))
            for v in program.invars[len(program.consts) :]
        ]
        found = _sharding.value_shards(program, structs)
        return _whole_bodies(program) if found is None else found.bodies

    def _gathered(self, program: Program, has: Mapping[Any, ValueShard]) -> dict[int, int]:
        """Return the inputs that a device gathers for a product, each with the number of parts.

        Each device makes such an input's gradient as a whole, from its part of the activations.
        """
        sizes = dict(self.axes)
        own = len(program.consts)
        number = {v: i for i, v in enumerate(program.invars[own:])}
        found: dict[int, int] = {}
        for eqn in program.eqns:
            atoms = [v for v in eqn.invars if not isinstance(v, jec.Literal)]
            if len(eqn.invars) == 1 == len(atoms) and atoms[0] in number:  # a transpose, a cast
                number[eqn.outvars[0]] = number[atoms[0]]
            if eqn.primitive.name != "dot_general" or len(atoms) != 2:
                continue
            numbers = eqn.params["dimension_numbers"]
            left, right, out = (has[v] for v in (*eqn.invars, *eqn.outvars))
            product = _sharding.split_product(numbers, left, right, out, sizes)
            for v, axes in zip(eqn.invars, product.gathers, strict=True):
                if v in number and axes:
                    found[number[v]] = math.prod(sizes[a] for a in axes)
        return found


def _whole_bodies(program: Program) -> dict[int, Shards]:
    """Return what a device has of the values in the bodies of scans, if it has all of them."""
    found = {}
    for i, eqn in enumerate(program.eqns):
        if eqn.primitive.name == "scan":
            body = flat_program(eqn.params["jaxpr"])
            results = tuple(tuple(map(_whole, e.outvars)) for e in body.eqns)
            inputs = tuple(map(_whole, body.invars))
            found[i] = Shards(inputs, results, _whole_bodies(body), ())
    return found


def _whole(var: Any) -> ValueShard:
    shape = getattr(var.aval, "shape", ())
    return ValueShard(shape, ((),) * len(shape))


def cost_of(
    loop: PieceLoop,
    active: Sequence[bool],
    chip: LinkedChip,
    given: ShardsOfValues | None = None,
) -> PieceCost:
    """Return the cost of a loop over pieces.

    Args:
        loop: the loop.
        active: for each of its inputs, whether the loop is differentiated by it.
        chip: the chip whose rates turn operations and bytes into seconds.
        given: what one device has of the variables of the loop, if the program is partitioned. The
            cost is that on one device then.
    """
    split = loop.split
    piece = Piece(split.n, min(loop.size, split.n), 0)
    count = split.n / piece.size
    avals = [
        jax.ShapeDtypeStruct(piece.shape(v.aval.shape, how), v.aval.dtype) for v, how in loop.inputs
    ]
    names = [*(v for v, _ in split.outputs), *split.made]
    every = flat_program(jax.make_jaxpr(lambda *xs: loop.values(xs, piece, names))(*avals))
    program = dataclasses.replace(every, outvars=every.outvars[: len(split.outputs)])
    flags = [False] * len(program.consts) + list(active)
    partition = None if given is None else given.partition(loop, every, names)
    graph = _build.graph_of(program, flags, loop.moving, chip, partition=partition)
    plain = (Segment(0, len(graph.equations), plain=True),)
    without = tuple(dataclasses.replace(t, gradient_bytes=0) for t in graph.tensors)
    forward = Simulation(dataclasses.replace(graph, tensors=without), math.inf)
    forward.forward(plain, frozenset())
    # The loop of the derivative computes again what the derivative of a piece needs.
    again = Simulation(graph, math.inf).run((Segment(0, len(graph.equations)),))
    # Gradients that are added up as a whole, although a device has a part of them in the end.
    first = len(program.consts)
    whole = {} if partition is None else {i - first: n for i, n in partition.gradients.items()}
    added, beside = _sums(loop, active, Backend(chip.platform), given, whole)
    # A gradient that all pieces contribute to is read, added to, and written for each piece.
    adding = 3 * added / chip.bandwidth_bytes_per_second
    return PieceCost(
        forward_bytes=forward.peak,
        backward_bytes=Simulation(graph, math.inf).run(plain).peak_bytes + beside,
        flops=count * graph.forward_flops,
        seconds=count * graph.forward_seconds,
        again_flops=count * again.extra_flops,
        again_seconds=count * again.extra_seconds,
        backward_flops=count * sum(e.backward_flops for e in graph.equations),
        backward_seconds=count * (graph.backward_seconds + adding),
    )


def _sums(
    loop: PieceLoop,
    active: Sequence[bool],
    backend: Backend,
    given: ShardsOfValues | None,
    whole: Mapping[int, int],
) -> tuple[int, int]:
    """Return the bytes of the gradients that are added up over the pieces.

    Args:
        loop, active, given: as for `cost_of`.
        backend: the compiler.
        whole: the bytes of the sums that are larger than a device's part of the gradient, by input.

    Returns:
        the bytes of all sums, and those that do not lie in the memory of the gradients. If the
        program computes a kernel itself, its gradient is no result, and the sum is that gradient.
        The sum of a gradient of half precision is larger than the gradient, so none of it does.
    """
    eqns = [loop.split.program.eqns[i] for i in loop.split.ways]
    apart = {
        v
        for eqn in eqns
        for position, v in enumerate(eqn.invars)
        if backend.summed_apart(eqn, position) and not isinstance(v, jec.Literal)
    }
    added = beside = 0
    for i, ((v, how), is_active) in enumerate(zip(loop.inputs, active, strict=True)):
        if how is not None or not is_active:
            continue
        aval = v.aval if given is None else v.aval.update(shape=given.values[v].shape)
        result = _ops.nbytes(aval)
        size = whole.get(i, result)
        in_sum = Partial.SUM.dtype(v.aval.dtype).itemsize // v.aval.dtype.itemsize
        is_apart = in_sum > 1 or (v in apart and v in loop.arguments)
        added += in_sum * size
        beside += in_sum * size if is_apart else size - result
    return added, beside
