"""What does each operation of a loss cost, and which arrays does its derivative read?

`trace` turns a loss into a frozen `CostGraph`. The graph holds the operations of the forward pass
in order, the arrays between them with their bytes, and for each operation the arrays that its
derivative reads. There is no table of derivatives: `trace` linearizes each operation on its own and
follows the residuals back to the operation's inputs and outputs (module `derivative`). The seconds
come from the roofline model (Williams, Waterman and Patterson, CACM 2009): an operation takes as
long as its FLOPs or its memory traffic, whichever takes longer on the chip.

`trace` inlines plain calls and the checkpoint regions of the model. A scan carries the graph of its
body. Every other operation with a body (``custom_vjp``, ``while``, ``shard_map``, a kernel) is one
opaque operation. Reshapes, names and transposes make no tensor of their own: their output is the
same tensor as their input.

Example: take ``sum(sin(tanh(x @ w)))`` with ``x`` of shape (1024, 256), so that an array of the
forward pass takes 1 MiB. The derivative of ``tanh`` reads its output, and that of ``sin`` its
input. These are one array, so the only residual is the result of ``tanh``:

>>> from remat_kit._chip.target import target
>>> w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 256), (1024, 256)))
>>> graph = trace(lambda w, x: jnp.sum(jnp.sin(jnp.tanh(x @ w))), (w, x), target("cpu"))
>>> [(e.primitive, int(e.flops)) for e in graph.equations[:3]]
[('dot_general', 134217728), ('tanh', 262144), ('sin', 262144)]
>>> [(graph.equations[graph.tensors[t].producer].primitive, graph.tensors[t].bytes)
...  for t in graph.residuals]
[('tanh', 1048576)]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from remat_kit import _jax
from remat_kit._apply.divide import Divided
from remat_kit._apply.pieces import loop_of
from remat_kit._backend import facts as _facts
from remat_kit._backend.fusion import FusionFlow
from remat_kit._backend.interface import Backend, Chip, peak_rate
from remat_kit._compiled.collectives import Linked, axes_seconds
from remat_kit._errors import UserError
from remat_kit._planner.costs.derivative import OperationDerivative, derivative_of
from remat_kit._planner.costs.graph import CostGraph, Equation, Loop, Partition, Tensor
from remat_kit._program import ops as _ops
from remat_kit._program import program as _program
from remat_kit._program import sharding as _sharding
from remat_kit._program.ops import is_fusible, is_view, reduces
from remat_kit._program.program import Program, flat_program, has_regions
from remat_kit._program.sharding import Shards, SplitProduct, ValueShard
from remat_kit._program.steps import taken as _taken
from remat_kit._program.steps.gradient import (
    Argnums,
    abstract,
    check_program,
    gradient_program,
    partitioned,
)
from remat_kit._program.steps.losses import Loss


class LinkedChip(Chip, Linked, Protocol):
    """The attributes of a `Target` that costs depend on."""


# -- tracing --------------------------------------------------------------------------------------


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    chip: LinkedChip,
    argnums: Argnums = 0,
    *,
    call: str = "frontier",
    returned: bool = True,
) -> CostGraph:
    """Trace a loss into its cost graph, without compiling or running anything.

    >>> from remat_kit._chip.target import target
    >>> w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (8, 64)))
    >>> graph = trace(lambda w, x: jnp.sum(jnp.tanh(jnp.sin(x @ w)) ** 2), (w, x), target("cpu"))
    >>> [e.primitive for e in graph.equations]
    ['dot_general', 'sin', 'tanh', 'integer_pow', 'reduce_sum']
    >>> [graph.equations[graph.tensors[t].producer].primitive for t in graph.residuals]
    ['dot_general', 'tanh']

    Args:
        fn: the loss. It is called as ``fn(*args)`` and returns a real scalar, or a pair of a real
            scalar and anything.
        args: pytrees of arrays or of `jax.ShapeDtypeStruct`.
        chip: a `Target`, whose rates turn operations and bytes into seconds.
        argnums: the positions of the arguments to differentiate.
        call: the public function that errors name.
        returned: whether the program returns the gradients, so that the compiler chooses how a
            mesh splits them. Else they are split as the arguments are.

    Raises:
        NotDifferentiableError: ``fn`` cannot be differentiated.
        UserError: ``fn`` is not a loss, or ``argnums`` is None.
    """
    if argnums is None:
        raise UserError(
            f"`{call}(..., argnums=None)`: the planner cannot tell where the forward pass of a "
            "whole training step ends",
            hint="pass the loss, and in argnums= the arguments to differentiate; optimizer= counts "
            "the memory of the whole step",
        )
    gradient = gradient_program(fn, args, argnums, call=call)  # raises if ``fn`` is not a loss
    structs = abstract(args, call=call)
    positions = [argnums] if isinstance(argnums, int) else list(argnums)
    positions = [p % len(structs) for p in positions]
    active = [
        i in positions and jnp.issubdtype(leaf.dtype, jnp.floating)
        for i, struct in enumerate(structs)
        for leaf in jax.tree.leaves(struct)
    ]
    with _taken.differentiated_later():
        closed = jax.make_jaxpr(fn)(*structs)
    check_program(closed, call, shardings=True)
    program = flat_program(closed)
    active = [False] * len(program.consts) + active
    wanted = [i == 0 for i in range(len(program.outvars))]
    shards = _shards_of(closed, program, jax.tree.leaves(structs), call)
    gradients = None
    if shards is not None and returned:
        own = len(program.consts)
        found = _gradient_bytes(gradient, structs, positions)
        gradients = {own + i: size for i, size in found.items()}
    graph = _build(program, active, wanted, chip, shards=shards, gradients=gradients)
    return dataclasses.replace(graph, regions=has_regions(Program.of(closed)))


def _gradient_bytes(
    gradient: Callable[..., Any], structs: Sequence[Any], positions: Sequence[int]
) -> dict[int, int]:
    """Return the bytes on one device of the gradients that a program returns, by flat argument."""
    leaves, tree = jax.tree.flatten(tuple(structs))
    found = _sharding.result_shards(
        lambda *given: jax.tree.leaves(gradient(*tree.unflatten(given))), leaves
    )
    places = jax.tree.unflatten(tree, range(len(leaves)))
    chosen = [place for p in positions for place in jax.tree.leaves(places[p])]
    shapes = (found or [])[-len(chosen) :]  # they come after the value and the auxiliary results
    return {
        i: _ops.nbytes(jax.ShapeDtypeStruct(shape, leaves[i].dtype))
        for i, shape in zip(chosen, shapes, strict=False)
    }


def _shards_of(
    closed: Any, program: Program, structs: Sequence[jax.ShapeDtypeStruct], call: str
) -> Shards | None:
    """Return the shapes on one device, if an argument or a constraint names a mesh of several."""
    given = [_jax.partitions_of(getattr(x, "sharding", None)) for x in structs]
    devices = max([*given, _jax.devices_within(closed)], default=1)
    if devices == 1:
        return None
    shards = _sharding.value_shards(program, structs)
    if shards is None:  # no argument is on the mesh, or no compiler lowers the program
        raise partitioned("the function is partitioned", devices, call)
    return shards


def of_loss(loss: Loss, chip: LinkedChip, *, call: str = "frontier") -> CostGraph:
    """Return the cost graph of a loss that a step differentiates.

    Raises:
        UserError: the step is partitioned, and the shardings inside of the loss are unknown.
    """
    graph = _of_flat(loss, loss.flat(), chip, call)
    return dataclasses.replace(graph, regions=has_regions(Program.of(loss.jaxpr)))


def _of_flat(loss: Loss, program: Program, chip: LinkedChip, call: str) -> CostGraph:
    own = len(program.invars) - len(loss.active)
    active = [False] * own + list(loss.active)
    if loss.axes is not None:
        if loss.axes.splits_more:
            raise partitioned(
                "a loss is inside of a `shard_map` that leaves some axes to the partitioner",
                loss.axes.mesh.size,
                call,
            )
        with loss.axes.opened():  # the shapes inside of it are those of one device
            return _build(program, active, loss.wanted, chip, axes=loss.axes.sizes)
    shards = None
    if loss.shardings:
        check_program(loss.jaxpr, call, shardings=True)
        given = dataclasses.replace(program, consts=program.consts[:own])
        shards = _shards_of(loss.jaxpr, given, loss.inputs, call)
    return _build(program, active, loss.wanted, chip, shards=shards)


def _build(
    program: Program,
    active_in: Sequence[bool],
    wanted: Sequence[bool],
    chip: LinkedChip,
    stacked: bool = False,
    shards: Shards | None = None,
    axes: MeshAxes = (),
    gradients: Mapping[int, int] | None = None,
    parts: Parts | None = None,
) -> CostGraph:
    builder = _Builder(program, chip, stacked, shards, axes, gradients, parts)
    return builder.graph(active_in, wanted)


MeshAxes = tuple[tuple[str, int], ...]  # the names and sizes of the axes of a mesh


@dataclasses.dataclass(frozen=True)
class PieceCost:
    """The cost of a loop over pieces of a segment.

    Attributes:
        forward_bytes: bytes that one piece of the forward pass needs.
        backward_bytes: bytes that one piece of the derivative needs.
        flops: floating-point operations of the forward pass of all pieces.
        seconds: roofline time of these.
        again_flops: those of them that the derivative computes again.
        again_seconds: roofline time of these.
        backward_flops: floating-point operations of the derivative of all pieces, without those
            that it recomputes.
        backward_seconds: roofline time of these, and of adding up the gradients of all pieces.
    """

    forward_bytes: int
    backward_bytes: int
    flops: float
    seconds: float
    again_flops: float
    again_seconds: float
    backward_flops: float
    backward_seconds: float


class Parts(Protocol):
    """What the graph of a divided program asks about its segments in pieces."""

    @property
    def divided(self) -> Divided:
        """The divided program."""
        ...

    def cost(self, equation: int, active: Sequence[bool]) -> PieceCost | None:
        """Return the cost of the loop that an equation is, or None if it is another operation.

        ``active`` says by which inputs it is differentiated.
        """
        ...

    def body(self, equation: int) -> Parts | None:
        """Return the same for the body of a scan."""
        ...


def graph_of(
    program: Program,
    active: Sequence[bool],
    wanted: Sequence[bool],
    chip: LinkedChip,
    parts: Parts | None = None,
    *,
    stacked: bool = False,
    partition: Partition | None = None,
) -> CostGraph:
    """Return the cost graph of a flat program.

    Args:
        program: the program.
        active: for each input, whether the program is differentiated by it.
        wanted: for each output, whether it is differentiated.
        chip: as for `trace`.
        parts: the segments that run in pieces.
        stacked: whether the program is the body of a scan.
        partition: what one device has of the values, if the program is partitioned.
    """
    if partition is None:
        return _build(program, active, wanted, chip, stacked, parts=parts)
    shards, gradients = partition.shards, partition.gradients
    return _build(
        *(program, active, wanted, chip, stacked, shards), gradients=gradients, parts=parts
    )


class _Builder:
    """Builds the cost graph of a flat program.

    If the program is partitioned, all bytes and FLOPs are those of one device.

    Attributes:
        axes: the axes of the mesh of the `shard_map` that the program is inside of.
        gradients: the bytes of the gradients by input, where they differ from those of the input.
    """

    def __init__(
        self,
        program: Program,
        chip: LinkedChip,
        stacked: bool,
        shards: Shards | None,
        axes: MeshAxes,
        gradients: Mapping[int, int] | None,
        parts: Parts | None,
    ):
        self.axes = axes
        self.gradients = gradients or {}
        self.program = program
        self.parts = parts
        self.chip = chip
        self.backend = Backend(chip.platform)
        self.stacked = stacked
        self.shards = shards
        self.index: dict[Any, int] = {}  # variable -> tensor
        self.made: list[tuple[Any, int, int]] = []  # aval on a device, producer, position
        self.split: dict[Any, ValueShard] = {}  # variable -> what a device has of it
        if shards is not None:
            self.axes = shards.axes
            self.split = shards.by_variable(program)

    def new(self, var: Any, producer: int, position: int) -> int:
        aval = var.aval
        if var in self.split and self.split[var].shape != getattr(aval, "shape", None):
            aval = aval.update(shape=self.split[var].shape)
        self.index[var] = len(self.made)
        self.made.append((aval, producer, position))
        return self.index[var]

    def aval(self, atom: Any) -> Any:
        """Return the abstract value of a variable or a literal on one device."""
        return atom.aval if isinstance(atom, jec.Literal) else self.made[self.index[atom]][0]

    def share(self, eqn: Any) -> float:
        """Return the part of an operation's work that one device does."""
        if self.shards is None:
            return 1.0

        def shard(atom: Any) -> ValueShard | None:
            return None if isinstance(atom, jec.Literal) else self.split.get(atom)

        return _sharding.work_share(eqn, shard, self.part, dict(self.axes))

    def split_product(self, eqn: Any) -> SplitProduct | None:
        """Return how devices compute a product together; None for other operations."""
        if eqn.primitive.name != "dot_general" or not self.split:
            return None
        if any(isinstance(v, jec.Literal) for v in eqn.invars):
            return None
        left, right, out = (self.split[v] for v in (*eqn.invars, *eqn.outvars))
        numbers = eqn.params["dimension_numbers"]
        return _sharding.split_product(numbers, left, right, out, dict(self.axes))

    def size_of(self, axes: Iterable[str]) -> int:
        """Return the number of devices along axes of the mesh."""
        sizes = dict(self.axes)
        return math.prod(sizes[axis] for axis in axes)

    def gathered(self, eqn: Any) -> list[tuple[int, tuple[str, ...]]]:
        """Return the operands that a device gathers for a product: their bytes, and the axes."""
        found = self.split_product(eqn)
        if found is None:
            return []
        pairs = zip(eqn.invars, found.gathers, strict=True)
        return [(_ops.nbytes(self.aval(v)) * self.size_of(axes), axes) for v, axes in pairs if axes]

    def part(self, atom: Any) -> float:
        """Return the part of an array that is on one device."""
        whole = _ops.nbytes(atom.aval)
        return _ops.nbytes(self.aval(atom)) / whole if whole else 1.0

    def on_one_device(self, eqn: Any, rule: OperationDerivative) -> OperationDerivative:
        share = self.share(eqn)
        if share == 1.0:
            return rule
        return dataclasses.replace(
            rule,
            made_bytes=round(share * rule.made_bytes),
            flops=share * rule.flops,
            working_bytes=round(share * rule.working_bytes),
        )

    def graph(self, active_in: Sequence[bool], wanted: Sequence[bool]) -> CostGraph:
        program = self.program
        active: set[int] = set()
        for i, (var, is_active) in enumerate(zip(program.invars, active_in, strict=True)):
            t = self.new(var, -1, i)
            if is_active:
                active.add(t)
        reads: list[tuple[int, ...]] = []
        makes: list[tuple[int, ...]] = []
        rules: list[OperationDerivative | None] = []
        for i, eqn in enumerate(program.eqns):
            inputs = [None if isinstance(v, jec.Literal) else self.index[v] for v in eqn.invars]
            reads.append(tuple(dict.fromkeys(t for t in inputs if t is not None)))
            if is_view(eqn) and inputs[0] is not None:
                self.index[eqn.outvars[0]] = inputs[0]
                makes.append(())
                rules.append(None)
                continue
            makes.append(tuple(self.new(v, i, p) for p, v in enumerate(eqn.outvars)))
            mask = tuple(t is not None and t in active for t in inputs)
            rule = derivative_of(eqn, mask) if any(mask) else None
            rules.append(None if rule is None else self.on_one_device(eqn, rule))
            if rule is not None:
                active.update(t for t, a in zip(makes[i], rule.active, strict=True) if a)
        outs = [-1 if isinstance(v, jec.Literal) else self.index[v] for v in program.outvars]
        reached = {t for t, w in zip(outs, wanted, strict=True) if w and t in active}
        self.drop_unread(rules, makes, reached, active)
        return self.assemble(reads, makes, rules, reached, outs)

    def drop_unread(
        self,
        rules: list[OperationDerivative | None],
        makes: Sequence[tuple[int, ...]],
        reached: set[int],
        active: set[int],
    ) -> None:
        """Remove derivatives that get no cotangent; add the tensors that get one to ``reached``."""
        for i in range(len(rules) - 1, -1, -1):
            if rules[i] is None:
                continue
            if reached.isdisjoint(makes[i]):
                rules[i] = None
                continue
            variables = (v for v in self.program.eqns[i].invars if not isinstance(v, jec.Literal))
            reached.update(t for v in variables if (t := self.index[v]) in active)

    def assemble(
        self,
        reads: Sequence[tuple[int, ...]],
        makes: Sequence[tuple[int, ...]],
        rules: Sequence[OperationDerivative | None],
        reached: set[int],
        outputs: Sequence[int],
    ) -> CostGraph:
        eqns = self.program.eqns
        needs = [
            tuple(self.places(e, makes[i], rule.needs)) if (rule := rules[i]) else ()
            for i, e in enumerate(eqns)
        ]
        avals, producers, positions = zip(*self.made, strict=True) if self.made else ((), (), ())
        flow = FusionFlow(eqns, reads, makes, needs, avals, producers, reached, outputs)
        found = self.backend.layout(flow, self.stacked)
        constant: set[int] = set()
        for i, inputs in enumerate(reads):
            if makes[i] and all(t in constant for t in inputs) and not _jax.has_effects(eqns[i]):
                constant.update(makes[i])
        tensors: list[Tensor] = []
        for t, (aval, producer) in enumerate(zip(avals, producers, strict=True)):
            stored = found.padded.get(t, _ops.nbytes(aval)) // (2 if t in found.halved else 1)
            stored *= 2 if t in found.doubled else 1
            size = stored if producer >= 0 and t not in constant else 0
            users = tuple(flow.users[t])
            tensors.append(
                Tensor(
                    index=t,
                    bytes=size,
                    producer=producer,
                    position=positions[t],
                    users=users,
                    shape=tuple(getattr(aval, "shape", ())),
                    dtype=str(getattr(aval, "dtype", "")),
                    in_memory=found.written[t],
                    active=t in reached,
                    cotangent_bytes=size if found.flowing[t] else 0,
                    gradient_bytes=self.gradients.get(t, _ops.nbytes(aval))
                    if producer < 0 and t in reached
                    else 0,
                    sources=self.sources(t, producer, found.written[t], reads, tensors, len(users)),
                )
            )
        traffic = _traffic(
            reads,
            makes,
            tensors,
            [_ops.nbytes(a) for a in avals],
        )
        written = _to_written(traffic, makes, tensors)
        built = []
        for i, eqn in enumerate(eqns):
            moved = traffic[i], written[i]
            built.append(self.equation(i, eqn, reads[i], makes[i], rules[i], moved, tensors))
        return CostGraph(
            tuple(tensors),
            tuple(self.assumed(built)),
            tuple(outputs),
            self.program,
            self.stacked,
            reuses=self.backend.reuses_outputs,
            early=self.backend.recomputes_regions_early and not self.stacked,
            puts_off=self.backend.puts_off_large_gradients and not self.stacked,
            partition=None if self.shards is None else Partition(self.shards, self.gradients),
        )

    def assumed(self, equations: Sequence[Equation]) -> Iterator[Equation]:
        """Give an operation of unknown cost one so high that recomputing it is a last resort."""
        flops = sum(e.flops for e in equations)
        seconds = sum(e.seconds for e in equations)
        for eqn, e in zip(self.program.eqns, equations, strict=True):
            if not e.unknown or e.loop is not None:
                yield e
                continue
            size = sum(math.prod(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars))
            own = max(flops, float(_UNKNOWN_FLOPS * size))
            time = max(seconds, own / max(self.chip.flops_per_second.values(), default=math.inf))
            yield dataclasses.replace(e, flops=own, seconds=time)

    def sources(
        self,
        t: int,
        producer: int,
        in_memory: bool,
        reads: Sequence[tuple[int, ...]],
        tensors: Sequence[Tensor],
        users: int,
    ) -> tuple[int, ...]:
        if producer < 0:
            return ()
        if in_memory:
            return (t,)
        found = tuple(dict.fromkeys(s for r in reads[producer] for s in tensors[r].sources))
        held = sum(tensors[s].bytes for s in found)
        shared = users > 1 and held > _FUSED_FROM * _ops.nbytes(self.made[t][0])
        return (t,) if shared else found

    def places(self, eqn: Any, makes: Sequence[int], places: Iterable[tuple[str, int]]):
        for kind, i in places:
            if kind == "out":
                yield makes[i]
            elif not isinstance(eqn.invars[i], jec.Literal):
                yield self.index[eqn.invars[i]]

    def equation(
        self,
        i: int,
        eqn: Any,
        reads: tuple[int, ...],
        makes: tuple[int, ...],
        rule: OperationDerivative | None,
        moved: tuple[float, float],
        tensors: Sequence[Tensor],
    ) -> Equation:
        loop = self.loop(eqn, rule) if rule and eqn.primitive.name == "scan" else None
        flops, seconds, backward_seconds = self.work(eqn, makes, rule, loop, moved)
        needs, keeps = (
            tuple(dict.fromkeys(self.places(eqn, makes, places)))
            for places in ((rule.needs, rule.keeps) if rule else ((), ()))
        )
        places = round(self.share(eqn) * self.backend.extra_residual_bytes(eqn)) if rule else 0
        made = rule.made_bytes if rule and self.backend.stores_made(eqn) else 0
        working = self.working_bytes(eqn, rule) if rule and loop is None else 0
        copies = sum(size for size, _ in self.gathered(eqn)) if rule else 0
        if self.stacked:  # a scan saves what its iterations gathered in shards
            copies, working = 0, working + copies
        if loop is not None:
            copies += loop.copied_bytes
        found = Equation(
            index=i,
            primitive=_program.primitive_name(eqn),
            module="/".join(self.program.path(eqn)),
            reads=reads,
            makes=makes,
            needs=needs,
            keeps=() if places else keeps,
            made_bytes=(rule.made_bytes if rule else 0) + places + copies,
            made_in_memory=made + places + copies,
            flops=flops,
            seconds=seconds,
            backward_flops=rule.flops if rule else 0.0,
            backward_seconds=backward_seconds,
            working_bytes=working,
            rounds=self.backend.rounds(eqn),
            loop=loop,
            unknown=tuple(e.primitive.name for e in _ops.unknown_costs(eqn)),
        )
        active = rule.mask if rule else (False,) * len(eqn.invars)
        cost = self.cost_in_pieces(i, eqn, active)
        return found if cost is None else self.in_pieces(found, eqn, active, cost, tensors)

    def cost_in_pieces(self, i: int, eqn: Any, active: Sequence[bool]) -> PieceCost | None:
        """Return the cost of a loop over pieces, from a division or from a policy of the user."""
        if self.parts is not None and (cost := self.parts.cost(i, active)) is not None:
            return cost
        loop = loop_of(eqn) if self.shards is None else None
        if loop is None:
            return None
        # That module computes the cost from the graph of one piece, which this one builds.
        from remat_kit._planner.costs.divided import cost_of

        return cost_of(loop, active, self.chip)

    def in_pieces(
        self,
        e: Equation,
        eqn: Any,
        active: Sequence[bool],
        cost: PieceCost,
        tensors: Sequence[Tensor],
    ) -> Equation:
        """Return a loop over pieces with its cost."""
        differentiated = any(active)
        # If a later operation reads an input as well, its derivative has made a cotangent before.
        # Then the one that the loop adds up is another array.
        second = 0
        for v, is_active in zip(eqn.invars, active, strict=True):
            if not is_active:  # a literal, for one
                continue
            tensor = tensors[self.index[v]]
            later = bool(tensor.users) and tensor.users[-1] > e.index
            if later or (tensor.producer < 0 and len(tensor.users) > 1):
                second += _ops.nbytes(self.aval(v))
        # Other operations compute an array of constants where they read it. The loop reads memory,
        # except for a single number.
        computed = [t for t in e.reads if tensors[t].producer >= 0 and not tensors[t].bytes]
        sizes = (_ops.nbytes(self.made[t][0]) for t in computed if math.prod(tensors[t].shape) > 1)
        constants = sum(sizes)
        return dataclasses.replace(
            e,
            flops=cost.flops,
            seconds=cost.seconds,
            backward_flops=cost.backward_flops if differentiated else 0.0,
            backward_seconds=cost.again_seconds + cost.backward_seconds if differentiated else 0.0,
            working_bytes=cost.backward_bytes + second + constants if differentiated else 0,
            transient_bytes=cost.forward_bytes + constants,
            again_flops=cost.again_flops if differentiated else 0.0,
            again_seconds=cost.again_seconds if differentiated else 0.0,
        )

    def work(
        self,
        eqn: Any,
        makes: tuple[int, ...],
        rule: OperationDerivative | None,
        loop: Any,
        moved: tuple[float, float],
    ) -> tuple[float, float, float]:
        """Return the FLOPs and seconds of an equation, and the seconds of its derivative."""
        traffic, written = moved
        flops = self.share(eqn) * _ops.flops(eqn) if makes or not is_view(eqn) else 0.0
        links = self.link_seconds(eqn)
        seconds, backward = links + self.seconds(eqn, flops, written), 0.0
        if rule is not None:
            products = rule.flops / _rate(self.chip, eqn) if rule.heavy else 0.0
            backward = max(products, 2 * traffic / self.chip.bandwidth_bytes_per_second) + links
        if eqn.primitive.name == "scan":
            length = eqn.params["length"]
            inner = loop.graph if loop else self.body(eqn, ())
            seconds = length * inner.forward_seconds
            if self.shards is not None or any(e.unknown for e in inner.equations):
                flops = length * inner.forward_flops
            if loop is not None:
                backward = length * inner.backward_seconds
        if eqn.primitive.name == "cond":
            branches, share = self.branches(eqn, rule.mask if rule else ()), self.share(eqn)
            seconds = max([seconds, *(share * b.forward_seconds for b in branches)])
            if rule is not None:
                backward = max([backward, *(share * b.backward_seconds for b in branches)])
        return flops, seconds, backward

    def working_bytes(self, eqn: Any, rule: OperationDerivative) -> int:
        by_kernel = any(rule.mask[1:2])
        copied = self.backend.copied_bytes(eqn, by_kernel)
        return rule.working_bytes + round(self.share(eqn) * copied)

    def seconds(self, eqn: Any, flops: float, traffic: float) -> float:
        moving = traffic / self.chip.bandwidth_bytes_per_second
        if is_fusible(eqn) or reduces(eqn):
            return moving
        return max(flops / _rate(self.chip, eqn), moving)

    def link_seconds(self, eqn: Any) -> float:
        """Return the time on the links between the devices.

        A collective takes it, and a product whose operands are gathered or whose parts are added
        up.
        """
        seconds = 0.0
        if (collective := _ops.collective_of(eqn)) is not None:
            size = sum(_ops.nbytes(v.aval) for v in eqn.outvars)
            seconds += axes_seconds(*(collective[0], size, collective[1]), self.axes, self.chip)
        for size, over in self.gathered(eqn):
            seconds += axes_seconds("all-gather", size, over, self.axes, self.chip)
        if (found := self.split_product(eqn)) is not None:
            size = _ops.nbytes(self.aval(eqn.outvars[0]))
            seconds += axes_seconds("all-reduce", size, found.sums, self.axes, self.chip)
        return seconds

    def body(self, eqn: Any, active: Sequence[bool]) -> CostGraph:
        program = flat_program(eqn.params["jaxpr"], self.program.path(eqn))
        flags = [False] * len(program.consts) + (list(active) or [False] * len(eqn.invars))
        wanted = [bool(active)] * len(program.outvars)
        parts = self.parts and self.parts.body(self.place(eqn))
        shards = self.shards_of(eqn)
        found = _build(program, flags, wanted, self.chip, True, shards, self.axes, parts=parts)
        return dataclasses.replace(found, divided=parts.divided) if parts else found

    def place(self, eqn: Any) -> int:
        return next(i for i, e in enumerate(self.program.eqns) if e is eqn)

    def shards_of(self, eqn: Any) -> Shards | None:
        """Return the shapes on one device in the body of a scan of this program."""
        if self.shards is None:
            return None
        return self.shards.bodies[self.place(eqn)]

    def branches(self, eqn: Any, mask: Sequence[bool]) -> list[CostGraph]:
        """Return the graphs of a conditional's branches; the most expensive one sets its cost."""
        path, flags = self.program.path(eqn), list(mask[1:]) or [False] * (len(eqn.invars) - 1)
        found = []
        for branch in eqn.params["branches"]:
            program = flat_program(branch, path)
            active = [False] * len(program.consts) + flags
            wanted = [bool(mask)] * len(program.outvars)
            found.append(_build(program, active, wanted, self.chip, axes=self.axes))
        return found

    def loop(self, eqn: Any, rule: OperationDerivative) -> Loop:
        consts, carry = _jax.scan_arity(eqn)
        active = [
            not isinstance(v, jec.Literal) and a for v, a in zip(eqn.invars, rule.mask, strict=True)
        ]
        while True:  # a carry that is active when it leaves the body is active when it enters
            graph = self.body(eqn, active)
            outs = [
                not isinstance(v, jec.Literal) and jnp.issubdtype(v.aval.dtype, jnp.floating) and a
                for v, a in zip(eqn.outvars[:carry], rule.active[:carry], strict=True)
            ]
            grown = list(active)
            for i, is_active in enumerate(outs):
                grown[consts + i] = grown[consts + i] or is_active
            if grown == active:
                break
            active = grown
        first = len(graph.program.consts) + consts
        given = graph.tensors[first : len(graph.program.invars)]
        sizes = [_ops.nbytes(self.aval(v)) for v in eqn.invars[consts:]]
        carried = [i for i in range(carry) if rule.active[i]]
        in_turn = range(carry, len(given))
        copies = self.backend.has(_facts.COPIES_STACKED_INPUTS)
        return Loop(
            graph,
            int(eqn.params["length"]),
            tuple((first + i, sizes[i]) for i in carried),
            tuple(graph.outputs[i] for i in carried),
            rule.made_bytes,
            sum(sizes[i] for i in in_turn if rule.mask[consts + i]),
            tuple(
                (first + i, sizes[i] // 2) for i in in_turn if copies and graph.rounded(given[i])
            ),
            self.backend.makes_zeros_first,
        )


# A fused array with several readers is recomputed from its sources if the sources take at most this
# multiple of its bytes. A residual stream, for example, is the sum of many arrays, and no compiler
# keeps all of these live in its place.
_FUSED_FROM = 1.5


# Minimum number of floating-point operations assumed of a kernel of unknown cost, for each element
# that it reads or writes. Attention over a sequence of 250 does as many.
_UNKNOWN_FLOPS = 1000


def _rate(chip: LinkedChip, eqn: Any) -> float:
    """Return the chip's peak rate in FLOP/s for the type of an operation's first operand."""
    dtype = getattr(eqn.invars[0].aval, "dtype", "float32") if eqn.invars else "float32"
    return peak_rate(chip, str(dtype))


def _traffic(
    reads: Sequence[tuple[int, ...]],
    makes: Sequence[tuple[int, ...]],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
) -> list[float]:
    """Return the bytes that each equation moves to and from memory.

    Equations that fuse into one another form a cluster. A cluster reads each array in memory only
    once, and the function charges these bytes to the first equation in the cluster that reads it.
    """
    cluster = list(range(len(reads)))

    def root(i: int) -> int:
        while cluster[i] != i:
            cluster[i] = cluster[cluster[i]]
            i = cluster[i]
        return i

    for tensor in tensors:
        if tensor.producer >= 0 and not tensor.in_memory:
            for user in tensor.users:
                a, b = root(tensor.producer), root(user)
                cluster[max(a, b)] = min(a, b)
    charged: set[tuple[int, int]] = set()
    out = []
    for i, (inputs, made) in enumerate(zip(reads, makes, strict=True)):
        if not made:
            out.append(0.0)
            continue
        amount = 0.0
        for t in inputs:
            tensor = tensors[t]
            if (tensor.producer < 0 or tensor.in_memory) and (t, root(i)) not in charged:
                charged.add((t, root(i)))
                amount += sizes[t]
        amount += sum(sizes[t] for t in made if tensors[t].in_memory)
        out.append(amount)
    return out


def _to_written(
    traffic: Sequence[float], makes: Sequence[tuple[int, ...]], tensors: Sequence[Tensor]
) -> list[float]:
    """Charge the bytes that a fusion reads to the operation whose result the fusion writes.

    If a region does not save that result, recomputing it costs these bytes. An operation that fuses
    only into derivatives costs nothing extra, because it runs inside of them with and without a
    region. If a fusion writes several results, the largest one is charged, since small ones are
    more likely to be saved.
    """
    out = list(traffic)
    for i, amount in enumerate(traffic):
        if amount and makes[i] and not any(_is_held(tensors[t]) for t in makes[i]):
            end = _written_from(makes[i], makes, tensors)
            if end is not None:
                out[i] = 0.0
                out[end] += amount
    return out


def _is_held(tensor: Tensor) -> bool:
    """Return whether an array is written to memory, either at once or for later readers."""
    return tensor.in_memory or tensor.index in tensor.sources


def _written_from(
    made: Sequence[int], makes: Sequence[tuple[int, ...]], tensors: Sequence[Tensor]
) -> int | None:
    """Return the operation that writes the most bytes of all that use the fused results."""
    todo, ends = list(made), dict[int, int]()
    for t in todo:
        for user in tensors[t].users:
            held = [tensors[m] for m in makes[user] if _is_held(tensors[m])]
            if held:
                ends[user] = sum(x.bytes for x in held)
            else:
                todo += (m for m in makes[user] if m not in todo)
    return max(ends, key=lambda user: ends[user], default=None)
