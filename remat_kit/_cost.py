"""What a loss costs, operation by operation, and what any checkpoint schedule of it would take.

`trace` turns a loss into a frozen `CostGraph`: its primal operations in order, the arrays between
them with their bytes, and for each operation the arrays that its derivative reads. What a
derivative reads is not looked up in a table: each operation is linearized on its own, and the
residuals are followed back to its inputs and outputs. Plain calls and checkpoint regions of the
model are spliced in; a scan carries the graph of its body; every other operation with a body
(``custom_vjp``, ``while``, ``shard_map``, a kernel) is one opaque operation.

Reading the graph: ``graph.tensors[t]`` has ``bytes`` (0 for arguments and constants, which live
anyway), ``producer`` (an equation's index, -1 for none) and ``users``; ``graph.equations[i]`` has
``reads`` and ``makes`` (tensors), ``needs`` (the residual set: tensors that its derivative reads),
``flops`` and ``seconds`` of one forward run. Reshapes, names and transposes make no tensor of their
own: their output is their input.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from remat_kit import _fusion, _graph, _jax
from remat_kit._fusion import Flow, is_fusible, is_rounding, is_view, reduces
from remat_kit._gradient import Argnums, abstract, gradient_program
from remat_kit._graph import Program
from remat_kit._region import equation_key
from remat_kit._roofline import Chip
from remat_kit._schedule import flat_program

# -- the graph ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One array of the forward pass.

    Attributes:
        index: its place in ``CostGraph.tensors``.
        bytes: of the array as the compiler stores it; 0 for an argument or a constant, which live
            anyway.
        producer: the equation that makes it, -1 for an argument or a constant.
        position: which of the producer's outputs it is.
        users: the equations that read it, in order.
        shape: of the array.
        dtype: of the array.
        in_memory: whether the compiler writes it down when it is computed: False for what fuses
            into everything that reads it.
        active: whether a cotangent flows back to it.
        cotangent_bytes: of that cotangent where the compiler writes it down, else 0.
        gradient_bytes: of the gradient of an argument that is differentiated, else 0.
        sources: the arrays that are held where it is needed later: itself where it is in memory,
            else those in memory that it is fused from, unless they are many more bytes than it.
    """

    index: int
    bytes: int
    producer: int
    position: int
    users: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    in_memory: bool
    active: bool
    cotangent_bytes: int = 0
    gradient_bytes: int = 0
    sources: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Loop:
    """The body of a scan: its own graph, how often it runs and what it hands on.

    Attributes:
        graph: of one iteration; its arguments are free.
        length: iterations.
        carry: what one iteration hands to the next and is differentiated, kept for each iteration:
            the tensor of the body that comes in, and its bytes.
        handed: the tensor of the body that each of them is made of for the next iteration, or -1
            for a constant.
        stacked_bytes: residuals that the scan keeps when nothing is planned, all iterations.
        gradient_bytes: of the gradients of what the iterations read in turn, all iterations.
        copied_bytes: of copies in half precision of what the iterations read in turn, all
            iterations: made before the first, and there until the backward pass is through.
        early: whether the compiler makes the zeros that those begin with before everything else,
            since they depend on nothing.
    """

    graph: CostGraph
    length: int
    carry: tuple[tuple[int, int], ...]
    handed: tuple[int, ...]
    stacked_bytes: int
    gradient_bytes: int
    copied_bytes: int
    early: bool

    @property
    def carry_bytes(self) -> int:
        """Bytes of all that is carried from one iteration to the next."""
        return sum(size for _, size in self.carry)


@dataclasses.dataclass(frozen=True)
class Equation:
    """One operation of the forward pass.

    Attributes:
        index: its place in ``CostGraph.equations``.
        primitive: its name.
        module: the module path, "" outside every module.
        reads: the tensors that it reads.
        makes: the tensors that it makes; none for a reshape or a name.
        needs: the tensors (of ``reads`` and ``makes``) that its derivative is computed from.
        keeps: those of ``needs`` that its derivative reads as they are.
        made_bytes: residuals that its derivative makes for itself (``cos x`` for ``sin x``), which
            are kept where no region recomputes them.
        made_in_memory: those of them that the compiler writes down; on a CPU all, elsewhere
            those of operations that do not fuse.
        flops: floating-point operations of one run.
        seconds: roofline time of one run, inside the fusions that a compiler makes: what a fusion
            reads is charged to the operation whose result it writes down.
        backward_flops: floating-point operations of its derivative.
        backward_seconds: roofline time of its derivative.
        working_bytes: what its derivative needs beside its residuals: all that an opaque one makes;
            on a CPU a copy of what a convolution reads.
        rounds: whether it is a product that reads float32 matrices in half precision.
        loop: the body of a scan, or None.
    """

    index: int
    primitive: str
    module: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    needs: tuple[int, ...]
    keeps: tuple[int, ...]
    made_bytes: int
    made_in_memory: int
    flops: float
    seconds: float
    backward_flops: float
    backward_seconds: float
    working_bytes: int = 0
    rounds: bool = False
    loop: Loop | None = None

    @property
    def held(self) -> tuple[int, ...]:
        """What its derivative reads where no region is: fused, what it makes takes no bytes."""
        return self.needs if self.made_bytes and not self.made_in_memory else self.keeps


# Changes of bytes, by the equation.
_Steps = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True, eq=False)
class CostGraph:
    """The forward pass of a loss and what its derivative needs of it.

    Attributes:
        tensors: all arrays, arguments first.
        equations: all operations, in the order of the program.
        outputs: the tensor that is each result of the function, or -1 for a constant.
        program: the flat program that it was made of, equation by equation.
        stacked: whether this is the body of a scan: what an iteration keeps outside of regions is
            then written down as it is, for no fusion reaches from one loop into another.
        reuses: whether the compiler keeps temporaries where a result will be.
        early: whether it may rebuild a region around regions before the derivatives of what follows
            outside of any are done: XLA:CPU removes barriers, then orders operations (jax 0.12).
    """

    tensors: tuple[Tensor, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[int, ...]
    program: Program = dataclasses.field(repr=False)
    stacked: bool = False
    reuses: bool = True
    early: bool = False

    @functools.cached_property
    def forward_flops(self) -> float:
        """Floating-point operations of the forward pass."""
        return sum(e.flops for e in self.equations)

    @functools.cached_property
    def forward_seconds(self) -> float:
        """Roofline time of the forward pass."""
        return sum(e.seconds for e in self.equations)

    @functools.cached_property
    def backward_seconds(self) -> float:
        """Roofline time of the backward pass, without anything computed twice."""
        return sum(e.backward_seconds for e in self.equations)

    @functools.cached_property
    def residuals(self) -> tuple[int, ...]:
        """The tensors that the derivative needs, in the order of the program; arguments left out.

        This is what one region around nothing saves: the least that no recompute could do without.
        """
        found = {t for e in self.equations for t in e.needs}
        return tuple(t for t in sorted(found) if self.tensors[t].producer >= 0)

    @functools.cached_property
    def saved_bytes(self) -> int:
        """Bytes that the program keeps when nothing is checkpointed."""
        kept = {t for e in self.equations for t in e.keeps}
        own = sum(e.made_bytes for e in self.equations)
        return sum(self.tensors[t].bytes for t in kept) + own

    @functools.cached_property
    def standing_bytes(self) -> tuple[int, ...]:
        """Bytes of gradients and of copies of arguments when the backward pass is at each equation.

        The last entry is of the time before the backward pass. A compiler sets memory apart for
        each result from the start. Until the result is there, temporaries may use it one by one,
        each from its beginning, if they are no larger and gone by then. Where the backward pass has
        no array left that comes near that, the memory is as good as taken (seen in programs for
        CPU and CUDA, jax 0.12; for TPU little is reused). What an iteration of a scan finds is no
        result yet.
        """
        out = [0] * len(self.equations)
        out.append(sum(e.loop.copied_bytes for e in self.equations if e.loop is not None))
        arrays = sorted((t.bytes, t.producer) for t in self.tensors if t.in_memory)
        for tensor in self.tensors:
            size = tensor.gradient_bytes
            if size and tensor.users:
                begins = tensor.users[-1]
                first = bisect.bisect_left(arrays, (size // 2, 0))
                last = bisect.bisect_right(arrays, (size, len(out)))
                later = (p for _, p in arrays[first:last] if self.reuses and p > begins)
                out[begins if self.stacked else min(later, default=-1)] += size
        return tuple(reversed(list(itertools.accumulate(reversed(out)))))

    @functools.cached_property
    def begun_bytes(self) -> list[int]:
        """Bytes of the cotangents that begin when the backward pass is at each equation: of what it
        is the last to read.
        """
        out = [0] * len(self.equations)
        for tensor in self.tensors:
            if tensor.cotangent_bytes and tensor.users:
                out[tensor.users[-1]] += tensor.cotangent_bytes
        return out

    @functools.cached_property
    def ended_bytes(self) -> list[int]:
        """Bytes of the cotangents that end when it is through with each: of what it makes."""
        out = [0] * len(self.equations)
        for tensor in self.tensors:
            if tensor.cotangent_bytes and tensor.users:
                out[tensor.producer] += tensor.cotangent_bytes
        return out

    @functools.cached_property
    def flowing_bytes(self) -> tuple[int, ...]:
        """Bytes of the cotangents alive when the backward pass arrives at each position."""
        steps = zip([0, *self.ended_bytes], [0, *self.begun_bytes], strict=True)
        return tuple(itertools.accumulate(ended - begun for ended, begun in steps))

    def arriving(self, position: int) -> Arriving:
        """Return the cotangents alive when the backward pass arrives at a position."""
        found = self.memory.get(("arriving", position))
        if found is None:
            found = self.memory["arriving", position] = Arriving.at(self, position)
        return found

    @functools.cached_property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes that cross each position: entry i is what equations before i make for later ones.

        There is one entry more than equations.
        """
        steps = [0] * (len(self.equations) + 2)
        for tensor in self.tensors:
            if tensor.producer >= 0 and tensor.users and tensor.users[-1] > tensor.producer:
                steps[tensor.producer + 1] += tensor.bytes
                steps[tensor.users[-1] + 1] -= tensor.bytes
        out, live = [], 0
        for step in steps[: len(self.equations) + 1]:
            live += step
            out.append(live)
        return tuple(out)

    @functools.cached_property
    def written_steps(self) -> np.ndarray:
        """How the bytes of arrays in memory change from one equation to the next in the forward
        pass when each lives until its last reader has run.
        """
        steps = np.zeros(len(self.equations) + 1)
        for tensor in self.tensors:
            if tensor.producer >= 0 and tensor.in_memory and tensor.users:
                steps[tensor.producer] += tensor.bytes
                steps[tensor.users[-1] + 1] -= tensor.bytes
        return steps

    @functools.cached_property
    def kept_steps(self) -> list[tuple[_Steps, list[tuple[int, _Steps]]]]:
        """For each array, how `written_steps` change when it is kept: its own; and, by what it is
        made of, those of what is not kept, which is there until this one is written down.
        """
        found: list[tuple[_Steps, list[tuple[int, _Steps]]]] = []
        for tensor in self.tensors:
            own, made_of, written = [], [], tensor.producer
            if tensor.in_memory and tensor.users:
                own.append((tensor.users[-1] + 1, tensor.bytes))  # it would die there
            elif written >= 0:
                own.append((written, tensor.bytes))
                for s in map(self.tensors.__getitem__, tensor.sources):
                    last = s.users[-1] if s.users else written
                    if last < written:
                        until = [(last + 1, s.bytes), (written + 1, -s.bytes)]
                        made_of.append((s.index, until))
            found.append((own, made_of))
        return found

    @functools.cached_property
    def made_outside(self) -> np.ndarray:
        """For each equation, the residuals that its derivative writes for itself where no region
        is around it.
        """
        return np.array(
            [float(e.made_bytes if self.stacked else e.made_in_memory) for e in self.equations]
        )

    @functools.cached_property
    def memory(self) -> dict[Any, Any]:
        """What was found of parts of its schedules, for the schedules that share them."""
        return {}

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [t.bytes for t in self.tensors]

    def rounded(self, tensor: Tensor) -> bool:
        """Tell whether a product reads an array in half precision."""
        return tensor.dtype == "float32" and any(self.equations[i].rounds for i in tensor.users)

    def crossing(self, position: int) -> tuple[int, ...]:
        """Return the tensors made before an equation that it or later ones read."""
        return tuple(
            t.index
            for t in self.tensors
            if 0 <= t.producer < position and t.users and t.users[-1] >= position
        )


@dataclasses.dataclass(frozen=True)
class Arriving:
    """The cotangents that cross the edge of a region: a barrier is there, so all are written down.

    Attributes:
        ends: bytes by the equation that made what they are of.
        fused: those that are in memory nowhere else, by that equation.
        begins: the same by the equation that is the last to read it.
        fused_bytes: all of those.
    """

    ends: dict[int, int]
    fused: dict[int, int]
    begins: dict[int, int]
    fused_bytes: int

    @classmethod
    def at(cls, graph: CostGraph, position: int) -> Arriving:
        """Return what crosses a position of a graph."""
        tensors = [graph.tensors[t] for t in graph.crossing(position)]
        active = [t for t in tensors if t.active]
        fused = [t for t in active if not t.cotangent_bytes]
        return cls(
            _summed((t.producer, t.bytes) for t in active),
            _summed((t.producer, t.bytes) for t in fused),
            _summed((t.users[-1], t.bytes) for t in fused),
            sum(t.bytes for t in fused),
        )


def _summed(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for key, value in pairs:
        found[key] = found.get(key, 0) + value
    return found


# -- tracing --------------------------------------------------------------------------------------


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    chip: Chip,
    argnums: Argnums = 0,
    *,
    call: str = "frontier",
) -> CostGraph:
    """Trace a loss into its cost graph; nothing is compiled or run.

    >>> from remat_kit._target import target
    >>> w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (8, 64)))
    >>> graph = trace(lambda w, x: jnp.sum(jnp.tanh(jnp.sin(x @ w)) ** 2), (w, x), target("cpu"))
    >>> [e.primitive for e in graph.equations]
    ['dot_general', 'sin', 'tanh', 'integer_pow', 'reduce_sum']
    >>> [graph.equations[graph.tensors[t].producer].primitive for t in graph.residuals]
    ['dot_general', 'tanh']

    Args:
        fn: called as ``fn(*args)``; its result is a real scalar, or a pair of one and anything.
        args: arrays or `jax.ShapeDtypeStruct`, in pytrees.
        chip: a `Target`: its rates turn operations and bytes into seconds.
        argnums: what to differentiate.
        call: the public function that errors should name.

    Raises:
        NotDifferentiableError, UserError: ``fn`` is no loss.
    """
    gradient_program(fn, args, argnums, call=call)  # raises what is wrong with the loss
    structs = abstract(args, call=call)
    positions = [argnums] if isinstance(argnums, int) else list(argnums or ())
    positions = {p % len(structs) for p in positions}
    active = [
        i in positions and jnp.issubdtype(leaf.dtype, jnp.floating)
        for i, struct in enumerate(structs)
        for leaf in jax.tree.leaves(struct)
    ]
    program = flat_program(jax.make_jaxpr(fn)(*structs))
    active = [False] * len(program.consts) + active
    wanted = [i == 0 for i in range(len(program.outvars))]
    return _build(program, active, wanted, chip)


def _build(
    program: Program,
    active_in: Sequence[bool],
    wanted: Sequence[bool],
    chip: Chip,
    stacked: bool = False,
) -> CostGraph:
    return _Builder(program, chip, stacked).graph(active_in, wanted)


class _Builder:
    """Makes a cost graph of a flat program."""

    def __init__(self, program: Program, chip: Chip, stacked: bool):
        self.program = program
        self.chip = chip
        self.stacked = stacked
        self.index: dict[Any, int] = {}  # variable -> tensor
        self.made: list[tuple[Any, int, int]] = []  # aval, producer, position

    def new(self, var: Any, producer: int, position: int) -> int:
        self.index[var] = len(self.made)
        self.made.append((var.aval, producer, position))
        return self.index[var]

    def graph(self, active_in: Sequence[bool], wanted: Sequence[bool]) -> CostGraph:
        program = self.program
        active: set[int] = set()
        for i, (var, is_active) in enumerate(zip(program.invars, active_in, strict=True)):
            t = self.new(var, -1, i)
            if is_active:
                active.add(t)
        reads: list[tuple[int, ...]] = []
        makes: list[tuple[int, ...]] = []
        rules: list[_Derivative | None] = []
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
            rules.append(rule)
            if rule is not None:
                active.update(t for t, a in zip(makes[i], rule.active, strict=True) if a)
        outs = [-1 if isinstance(v, jec.Literal) else self.index[v] for v in program.outvars]
        reached = {t for t, w in zip(outs, wanted, strict=True) if w and t in active}
        for i in range(len(program.eqns) - 1, -1, -1):
            rule = rules[i]
            if rule is None:
                continue
            if reached.isdisjoint(makes[i]):
                rules[i] = None
                continue
            eqn = program.eqns[i]
            for var in eqn.invars:
                if not isinstance(var, jec.Literal) and self.index[var] in active:
                    reached.add(self.index[var])
        return self.assemble(reads, makes, rules, reached, outs)

    def assemble(
        self,
        reads: Sequence[tuple[int, ...]],
        makes: Sequence[tuple[int, ...]],
        rules: Sequence[_Derivative | None],
        reached: set[int],
        outputs: Sequence[int],
    ) -> CostGraph:
        eqns = self.program.eqns
        needs = [
            tuple(self.places(e, makes[i], rule.needs)) if (rule := rules[i]) else ()
            for i, e in enumerate(eqns)
        ]
        avals, producers, positions = zip(*self.made, strict=True) if self.made else ((), (), ())
        flow = Flow(eqns, reads, makes, needs, avals, producers, reached, outputs)
        found = _fusion.layout(flow, self.chip.platform, self.stacked)
        constant: set[int] = set()
        for i, inputs in enumerate(reads):
            if makes[i] and all(t in constant for t in inputs) and not _jax.has_effects(eqns[i]):
                constant.update(makes[i])
        tensors: list[Tensor] = []
        for t, (aval, producer) in enumerate(zip(avals, producers, strict=True)):
            stored = _graph.nbytes(aval) // (2 if t in found.halved else 1)
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
                    gradient_bytes=_graph.nbytes(aval) if producer < 0 and t in reached else 0,
                    sources=self.sources(t, producer, found.written[t], reads, tensors, len(users)),
                )
            )
        traffic = _traffic(
            reads,
            makes,
            tensors,
            [_graph.nbytes(a) for a in avals],
        )
        written = _to_written(traffic, makes, tensors)
        built = []
        for i, eqn in enumerate(eqns):
            moved = traffic[i], written[i]
            built.append(self.equation(i, eqn, reads[i], makes[i], rules[i], moved, tensors))
        return CostGraph(
            tuple(tensors),
            tuple(built),
            tuple(outputs),
            self.program,
            self.stacked,
            reuses=self.chip.platform != "tpu",
            early=self.chip.platform == "cpu" and not self.stacked,
        )

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
        shared = users > 1 and held > _FUSED_FROM * _graph.nbytes(self.made[t][0])
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
        rule: _Derivative | None,
        moved: tuple[float, float],
        tensors: Sequence[Tensor],
    ) -> Equation:
        flops = _graph.flops(eqn) if makes or not is_view(eqn) else 0.0
        loop = None
        traffic, written = moved
        seconds = self.seconds(eqn, flops, written)
        if eqn.primitive.name == "scan" and rule is not None:
            loop = self.loop(eqn, rule)
        if eqn.primitive.name == "scan":
            inner = loop.graph if loop else self.body(eqn, ())
            seconds = eqn.params["length"] * inner.forward_seconds
        needs, keeps = (
            tuple(dict.fromkeys(self.places(eqn, makes, places)))
            for places in ((rule.needs, rule.keeps) if rule else ((), ()))
        )
        backward_seconds = 0.0
        if rule is not None:
            rate = _rate(self.chip, eqn)
            bandwidth = self.chip.bandwidth_bytes_per_second
            backward_seconds = max(
                rule.flops / rate if rule.heavy else 0.0, 2 * traffic / bandwidth
            )
            if loop is not None:
                backward_seconds = loop.length * loop.graph.backward_seconds
        places = _place_bytes(eqn) if rule and self.chip.platform == "cpu" else 0
        return Equation(
            index=i,
            primitive=_graph.primitive_name(eqn),
            module="/".join(self.program.path(eqn)),
            reads=reads,
            makes=makes,
            needs=needs,
            keeps=() if places else keeps,
            made_bytes=(rule.made_bytes if rule else 0) + places,
            made_in_memory=self.made_in_memory(eqn, rule) + places,
            flops=flops,
            seconds=seconds,
            backward_flops=rule.flops if rule else 0.0,
            backward_seconds=backward_seconds,
            working_bytes=self.working_bytes(eqn, rule) if rule and loop is None else 0,
            rounds=self.chip.platform == "tpu" and is_rounding(eqn),
            loop=loop,
        )

    def working_bytes(self, eqn: Any, rule: _Derivative) -> int:
        copied = self.chip.platform == "cpu" and eqn.primitive.name == "conv_general_dilated"
        if copied and rule.mask[1]:  # transposed, for the gradient of the kernel
            return rule.working_bytes + _graph.nbytes(eqn.invars[0].aval)
        return rule.working_bytes

    def made_in_memory(self, eqn: Any, rule: _Derivative | None) -> int:
        if rule is None or (self.chip.platform != "cpu" and is_fusible(eqn)):
            return 0
        return rule.made_bytes

    def seconds(self, eqn: Any, flops: float, traffic: float) -> float:
        moving = traffic / self.chip.bandwidth_bytes_per_second
        if is_fusible(eqn) or reduces(eqn):
            return moving
        return max(flops / _rate(self.chip, eqn), moving)

    def body(self, eqn: Any, active: Sequence[bool]) -> CostGraph:
        program = flat_program(eqn.params["jaxpr"], self.program.path(eqn))
        flags = [False] * len(program.consts) + (list(active) or [False] * len(eqn.invars))
        return _build(program, flags, [bool(active)] * len(program.outvars), self.chip, True)

    def loop(self, eqn: Any, rule: _Derivative) -> Loop:
        consts, carry = _jax.scan_arity(eqn)
        active = [
            not isinstance(v, jec.Literal) and a for v, a in zip(eqn.invars, rule.mask, strict=True)
        ]
        while True:  # what a carry is differentiated by on the way out, it is on the way in
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
        sizes = [_graph.nbytes(v.aval) for v in eqn.invars[consts:]]
        carried = [i for i in range(carry) if rule.active[i]]
        in_turn = range(carry, len(given))
        return Loop(
            graph,
            int(eqn.params["length"]),
            tuple((first + i, sizes[i]) for i in carried),
            tuple(graph.outputs[i] for i in carried),
            rule.made_bytes,
            sum(sizes[i] for i in in_turn if rule.mask[consts + i]),
            sum(sizes[i] // 2 for i in in_turn if graph.rounded(given[i])),
            self.chip.platform == "cpu",
        )


# A fused value with several readers is made again of its sources if these are no more than so many
# times its bytes: a residual stream is the sum of many arrays, and no compiler keeps them all in
# its place.
_FUSED_FROM = 1.5

# -- one equation ---------------------------------------------------------------------------------


def _place_bytes(eqn: Any) -> int:
    """Return what the derivative of a maximum over windows keeps on a CPU: where in its window each
    is, a byte (`_jax.lean_pooling`); of large windows an index for each dimension.
    """
    if eqn.primitive.name not in ("reduce_window_max", "reduce_window_min"):
        return 0
    window = eqn.params["window_dimensions"]
    one = 1 if math.prod(window) <= _jax.LARGE_WINDOW else 4 * len(window)
    return math.prod(eqn.outvars[0].aval.shape) * one


def _rate(chip: Chip, eqn: Any) -> float:
    """Return the peak rate for an operation, FLOP/s, by the type of its first operand."""
    rates = chip.flops_per_second
    dtype = str(getattr(eqn.invars[0].aval, "dtype", "float32")) if eqn.invars else "float32"
    names = {
        "float32": ("tensorfloat32", "float32"),
        "float16": ("float16", "bfloat16"),
        "bfloat16": ("bfloat16", "float16"),
    }.get(dtype, (dtype, "float32"))
    return next((rates[n] for n in names if n in rates), None) or max(rates.values())


def _traffic(
    reads: Sequence[tuple[int, ...]],
    makes: Sequence[tuple[int, ...]],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
) -> list[float]:
    """Bytes that each equation moves, a fused chain reading what it reads once.

    Equations that fuse into one another are one cluster; each array in memory is charged to the
    first of the cluster that reads it.
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
    """Charge what a fusion reads to the operation whose result it writes down.

    That is what runs again for it: what fuses into derivatives alone is run there for nothing, in
    a region and outside. Of several results that of most bytes is charged, since small ones are
    rather kept.
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
    """Tell whether an array is written down, when it is made or for what needs it later."""
    return tensor.in_memory or tensor.index in tensor.sources


def _written_from(
    made: Sequence[int], makes: Sequence[tuple[int, ...]], tensors: Sequence[Tensor]
) -> int | None:
    """Return the operation that writes most of those that some fused results go into."""
    todo, ends = list(made), dict[int, int]()
    for t in todo:
        for user in tensors[t].users:
            held = [tensors[m] for m in makes[user] if _is_held(tensors[m])]
            if held:
                ends[user] = sum(x.bytes for x in held)
            else:
                todo += (m for m in makes[user] if m not in todo)
    return max(ends, key=lambda user: ends[user], default=None)


@dataclasses.dataclass(frozen=True)
class _Derivative:
    """What the derivative of one equation reads; places are ("in" | "out", position)."""

    mask: tuple[bool, ...]
    needs: tuple[tuple[str, int], ...]
    keeps: tuple[tuple[str, int], ...]
    made_bytes: int
    active: tuple[bool, ...]
    flops: float
    heavy: bool
    working_bytes: int


_derivatives: dict[Any, _Derivative] = {}


def derivative_of(eqn: Any, mask: tuple[bool, ...]) -> _Derivative:
    """Linearize one equation in the inputs of ``mask`` and follow its residuals to their source."""
    if eqn.primitive.name in _LINEAR and all(_is_real(v.aval) for v in eqn.invars):
        return _of_linear(eqn, mask)
    eqn, times = _small(eqn, mask)
    key = equation_key(eqn), mask, _jax.trace_context()
    found = _derivatives.get(key)
    if found is None:
        if len(_derivatives) > 4096:
            _derivatives.clear()
        found = _derivatives[key] = _linearized(eqn, mask)
    if times == 1:
        return found
    return dataclasses.replace(
        found, flops=times * found.flops, made_bytes=times * found.made_bytes
    )


# What is its own derivative; large models have many, with arrays of many shapes.
_LINEAR = frozenset({"reduce_sum", "broadcast_in_dim", "concatenate"})


def _of_linear(eqn: Any, mask: tuple[bool, ...]) -> _Derivative:
    flops, heavy = _graph.flops(eqn), not is_fusible(eqn)
    return _Derivative(mask, (), (), 0, (True,), flops, heavy, 0)


def _is_real(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating)


# Those whose derivative by both operands takes the same for one that is broadcast.
_ARITHMETIC = frozenset({"add", "sub", "mul"})

_ELEMENTWISE = frozenset(
    {"add", "add_any", "sub", "mul", "div", "neg", "max", "min", "exp", "log", "sqrt", "rsqrt"}
    | {"square", "integer_pow", "tanh", "logistic", "sin", "cos", "erf", "abs", "sign"}
)


def _small(eqn: Any, mask: tuple[bool, ...]) -> tuple[Any, int]:
    """Return an elementwise equation on one element, and how many it had; others as they are.

    So that the derivative of one operation is traced once and not for each shape in a model.
    """
    if eqn.primitive.name not in _ELEMENTWISE:
        return eqn, 1
    (out,) = eqn.outvars
    shape = out.aval.shape
    literal = [isinstance(v, jec.Literal) for v in eqn.invars]
    alike = all(
        v.aval.shape == (() if constant else shape)
        for v, constant in zip(eqn.invars, literal, strict=True)
    )
    alike = alike or (eqn.primitive.name in _ARITHMETIC and all(mask))
    if not alike or 0 in shape:
        return eqn, 1

    def one(v: Any) -> Any:
        aval = v.aval
        return jec.Var(ShapedArray((1,), aval.dtype, weak_type=aval.weak_type))

    invars = [v if c else one(v) for v, c in zip(eqn.invars, literal, strict=True)]
    return eqn.replace(invars=invars, outvars=[one(out)]), math.prod(shape)


def _linearized(eqn: Any, mask: tuple[bool, ...]) -> _Derivative:
    diff = [
        i for i, (v, a) in enumerate(zip(eqn.invars, mask, strict=True)) if a and _is_real(v.aval)
    ]
    variables = [i for i, v in enumerate(eqn.invars) if not isinstance(v, jec.Literal)]
    tree: Any = None

    def values(given: Sequence[Any]) -> list[Any]:
        full: list[Any] = [getattr(v, "val", None) for v in eqn.invars]
        for i, x in zip(variables, given, strict=True):
            full[i] = x
        return full

    def forward(*given: Any) -> list[Any]:
        nonlocal tree
        full = values(given)

        def of_active(*ds: Any) -> list[Any]:
            xs = list(full)
            for i, d in zip(diff, ds, strict=True):
                xs[i] = d
            return _jax.bind(eqn, xs)

        ys, tangent = jax.linearize(of_active, *(full[i] for i in diff))
        residuals, tree = jax.tree.flatten(tangent)
        return [*ys, *residuals]

    closed = jax.make_jaxpr(forward)(*(eqn.invars[i].aval for i in variables))
    count = len(eqn.outvars)
    residual_avals = closed.out_avals[count:]

    def tangent(residuals: Sequence[Any], ds: Sequence[Any]) -> list[Any]:
        return jax.tree.unflatten(tree, residuals)(*ds)

    linear = Program.of(
        jax.make_jaxpr(tangent)(
            residual_avals, [eqn.invars[i].aval.to_tangent_aval() for i in diff]
        )
    )
    given = linear.invars[len(linear.consts) :]
    read = _needed_by(linear)
    depends = _reached_from(linear, set(given[len(residual_avals) :]))
    flat = Program.of(closed)
    source = dict(zip(flat.invars[len(flat.consts) :], (("in", i) for i in variables)))
    outs = flat.outvars[:count]
    for position, var in enumerate(outs):
        if not isinstance(var, jec.Literal):
            source.setdefault(var, ("out", position))
    makers = {v: e for e in flat.eqns for v in e.outvars}
    needs: dict[tuple[str, int], None] = {}
    keeps: dict[tuple[str, int], None] = {}
    made: dict[Any, int] = {}
    for var, placeholder in zip(flat.outvars[count:], given, strict=False):
        if isinstance(var, jec.Literal) or placeholder not in read:
            continue
        var = _unviewed(var, makers, source)
        if var in source:
            needs[source[var]] = keeps[source[var]] = None
            continue
        found = _sources(var, makers, source)
        needs.update(dict.fromkeys(found))
        if found and var not in made:
            made[var] = _graph.nbytes(var.aval)
    flops = sum(_graph.flops(e) for e in linear.eqns)
    heavy = any(not is_fusible(e) for e in linear.eqns)
    return _Derivative(
        mask=mask,
        needs=tuple(needs),
        keeps=tuple(keeps),
        made_bytes=sum(made.values()),
        active=tuple(
            not isinstance(v, jec.Literal)
            and v in depends
            and not isinstance(o, jec.DropVar)
            and jnp.issubdtype(o.aval.dtype, jnp.inexact)
            for v, o in zip(linear.outvars, eqn.outvars, strict=True)
        ),
        flops=flops,
        heavy=heavy,
        working_bytes=0 if is_fusible(eqn) or not _graph.bodies(eqn) else sum(made.values()),
    )


def _unviewed(var: Any, makers: dict[Any, Any], source: dict[Any, Any]) -> Any:
    while var not in source and var in makers and is_view(makers[var]):
        inner = makers[var].invars[0]
        if isinstance(inner, jec.Literal):
            break
        var = inner
    return var


def _sources(
    var: Any, makers: dict[Any, Any], source: dict[Any, tuple[str, int]]
) -> list[tuple[str, int]]:
    found: dict[tuple[str, int], None] = {}
    seen, todo = set(), [var]
    while todo:
        v = todo.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in source:
            found[source[v]] = None
        elif v in makers:
            todo.extend(x for x in makers[v].invars if not isinstance(x, jec.Literal))
    return list(found)


def _needed_by(program: Program) -> set[Any]:
    """The variables that the outputs of a program depend on."""
    needed = {v for v in program.outvars if not isinstance(v, jec.Literal)}
    for eqn in reversed(program.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, jec.Literal))
    return needed


def _reached_from(program: Program, variables: set[Any]) -> set[Any]:
    reached = set(variables)
    for eqn in program.eqns:
        if any(not isinstance(v, jec.Literal) and v in reached for v in eqn.invars):
            reached.update(eqn.outvars)
    return reached
