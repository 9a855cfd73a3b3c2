"""Which operations does a loss consist of, which arrays lie between them, and what do they cost?

A `CostGraph` answers this for the planner. Like the computation graphs of Feng and Huang, "Optimal
gradient checkpoint search for arbitrary computation graphs", CVPR 2021, it consists of tensors with
sizes in bytes and of the operations that connect them. ``graph.tensors[t]`` has ``bytes`` (0 for
arguments and constants, which are live anyway), ``producer`` (the index of an equation, or -1) and
``users``. ``graph.equations[i]`` has ``reads`` and ``makes`` (tensors), ``needs`` (the tensors that
its derivative reads), and the ``flops`` and ``seconds`` of one forward run.

Example: take ``sum(tanh(tanh(x @ w) @ w))``, with activations of 1 MiB. 1 MiB crosses each position
between the equations. The backward pass reads the results of both ``tanh``, tensors 3 and 5:

>>> import jax, jax.numpy as jnp
>>> from remat_kit._chip.target import target
>>> from remat_kit._planner.costs.build import trace
>>> w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 256), (1024, 256)))
>>> graph = trace(lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w)), (w, x), target("h100"))
>>> [e.primitive for e in graph.equations]
['dot_general', 'tanh', 'dot_general', 'tanh', 'reduce_sum']
>>> [size >> 20 for size in graph.live_bytes], graph.residuals
([0, 1, 1, 1, 1, 0], (3, 5))
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from remat_kit._apply.divide import Divided
from remat_kit._backend import barriers as _barriers
from remat_kit._program.program import Program
from remat_kit._program.sharding import Shards

# -- the graph ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One array of the forward pass.

    Attributes:
        index: its index in ``CostGraph.tensors``.
        bytes: bytes of the array as the compiler stores it; 0 for an argument or a constant, which
            are live anyway.
        producer: the equation that makes it, or -1 for an argument or a constant.
        position: its index among the outputs of the producer.
        users: the equations that read it, in order.
        shape: the shape of the array.
        dtype: the type of the array's elements.
        in_memory: whether the compiler writes the array to memory when it is computed. It does not
            if the array fuses into every operation that reads it.
        active: whether the tensor has a cotangent.
        cotangent_bytes: bytes of that cotangent if the compiler writes it to memory, else 0.
        gradient_bytes: bytes of its gradient if it is an argument that is differentiated, else 0.
        sources: the arrays that must be live if the tensor is needed later. If it is in memory,
            this is the tensor itself. Otherwise these are the arrays in memory from which it is
            fused, unless they have many more bytes than the tensor.
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
    """A scan: the cost graph of its body, the number of its iterations and its carry.

    Attributes:
        graph: the cost graph of one iteration. Its arguments have no bytes.
        length: the number of iterations.
        carry: the active arrays of the carry, which are saved for each iteration: pairs of the
            body's input tensor and its bytes.
        handed: for each of them, the body's output tensor that becomes the input of the next
            iteration, or -1 for a constant.
        stacked_bytes: bytes of the residuals that all iterations save without a plan.
        gradient_bytes: bytes of the gradients of the stacked inputs, of which each iteration reads
            its own slice.
        copied: stacked inputs of which the compiler makes copies in half precision before the first
            iteration: pairs of the body's input tensor and the bytes of the copy. The copies are
            live until the loop's backward pass ends. Inputs that only regions read are not copied.
        early: whether the compiler creates the zeros, in which these gradients are accumulated,
            before everything else. It can, because they depend on nothing.
    """

    graph: CostGraph
    length: int
    carry: tuple[tuple[int, int], ...]
    handed: tuple[int, ...]
    stacked_bytes: int
    gradient_bytes: int
    copied: tuple[tuple[int, int], ...]
    early: bool

    @property
    def carry_bytes(self) -> int:
        """Bytes of the active arrays in the carry."""
        return sum(size for _, size in self.carry)

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies of stacked inputs without a plan."""
        return sum(size for _, size in self.copied)


@dataclasses.dataclass(frozen=True)
class Equation:
    """One operation of the forward pass.

    Attributes:
        index: its index in ``CostGraph.equations``.
        primitive: the name of its primitive.
        module: the module path, or "" outside of all modules.
        reads: the tensors that it reads.
        makes: the tensors that it makes. A reshape or a name makes none.
        needs: the tensors of ``reads`` and ``makes`` from which its derivative is computed.
        keeps: those of ``needs`` that its derivative reads as they are.
        made_bytes: bytes of the residuals that its derivative computes from ``needs``, such as
            ``cos x`` for ``sin x``. They are saved unless a region recomputes them.
        made_in_memory: those of ``made_bytes`` that the compiler writes to memory: on a CPU all,
            elsewhere those of operations that do not fuse.
        flops: floating-point operations of one run.
        seconds: roofline time of one run inside the compiler's fusions. The bytes that a fusion
            reads are charged to the operation whose result the fusion writes.
        backward_flops: floating-point operations of its derivative.
        backward_seconds: roofline time of its derivative.
        working_bytes: bytes that its derivative needs beside its residuals. For an opaque operation
            these are all the residuals that it computes; for a convolution on a CPU, a copy of its
            input.
        rounds: whether it is a product that reads float32 matrices in half precision.
        loop: the scan, or None if the equation is not a scan.
        unknown: the primitives in it whose cost is unknown. The equation then counts as much work
            as the rest of the program together, so that it is recomputed only as a last resort.
        transient_bytes: bytes that are live only while it runs, in a loop over pieces those of one
            piece.
        again_flops: floating-point operations that its derivative always recomputes, in a loop over
            pieces those of all pieces.
        again_seconds: roofline time of these.
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
    unknown: tuple[str, ...] = ()
    transient_bytes: int = 0
    again_flops: float = 0.0
    again_seconds: float = 0.0

    @property
    def held(self) -> tuple[int, ...]:
        """The tensors that its derivative reads outside of regions.

        If the residuals that the derivative computes itself are fused, they take no bytes, and the
        tensors from which they are computed are read in their place.
        """
        return self.needs if self.made_bytes and not self.made_in_memory else self.keeps


# Number of neighbouring positions for which `CostGraph.crossing` looks at the same tensors.
_SPAN = 64

# Pairs of an equation and the change of the live bytes there.
_Steps = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Partition:
    """What one device has of a partitioned program.

    Attributes:
        shards: what it has of each value.
        gradients: the bytes that it has of gradients, by the number of the input, where these
            differ from the bytes of the input.
    """

    shards: Shards
    gradients: Mapping[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class CostGraph:
    """The forward pass of a loss, and the arrays that its derivative reads.

    Attributes:
        tensors: all arrays, arguments first.
        equations: all operations, in the order of the program.
        outputs: for each result of the function, its tensor, or -1 for a constant.
        program: the flat program of which the graph was made, equation by equation.
        stacked: whether this is the body of a scan. The arrays that an iteration saves outside of
            regions are then written to memory as they are, because no fusion reaches from the loop
            of the forward pass into that of the backward pass.
        reuses: whether the compiler stores temporaries in the memory of later results.
        divided: the program with the segments that run in pieces; None if there are none.
        partition: what one device has of the values; None if the program is not partitioned. The
            bytes and FLOPs of the graph are those of one device then.
        regions: whether the function has checkpoint regions of its own. They are not in the graph.
        early: whether the compiler may recompute a region around regions before the derivatives of
            the later equations outside of all regions have run. XLA:CPU does, because it removes
            the barriers before it orders the operations (jax 0.12).
        puts_off: whether the compiler computes large gradients at the end of the program.
    """

    tensors: tuple[Tensor, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[int, ...]
    program: Program = dataclasses.field(repr=False)
    stacked: bool = False
    reuses: bool = True
    early: bool = False
    puts_off: bool = False
    divided: Divided | None = dataclasses.field(default=None, repr=False)
    partition: Partition | None = dataclasses.field(default=None, repr=False)
    regions: bool = False

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
        """Roofline time of the backward pass without any recompute."""
        return sum(e.backward_seconds for e in self.equations)

    @functools.cached_property
    def residuals(self) -> tuple[int, ...]:
        """The tensors from which the derivative is computed, without arguments, in program order.

        If all of them are saved, the backward pass runs no equation of the forward pass again.
        """
        needed = {t for e in self.equations for t in e.needs}
        return tuple(t for t in sorted(needed) if self.tensors[t].producer >= 0)

    @functools.cached_property
    def saved_bytes(self) -> int:
        """Bytes that the program saves without any region."""
        kept = {t for e in self.equations for t in e.keeps}
        own = sum(e.made_bytes for e in self.equations)
        return sum(self.tensors[t].bytes for t in kept) + own

    @functools.cached_property
    def standing_bytes(self) -> tuple[int, ...]:
        """Bytes of gradients while the backward pass is at each equation.

        The last entry is for the time before the backward pass. A compiler reserves memory for each
        result from the start. Until the result is computed, one temporary at a time may use this
        memory, if it is no larger and is freed in time. If no array of the backward pass that is
        still live has nearly that size, the reserved memory counts as occupied (seen in programs
        for CPU and CUDA, jax 0.12; a program for TPU reuses little). The gradients in the body of a
        scan are not yet results of the program, so no memory is reserved for them.
        """
        out = [0] * (len(self.equations) + 1)
        begins: dict[int, list[int]] = {}  # where gradients begin, by their bytes
        for tensor in self.tensors:
            if tensor.gradient_bytes and tensor.users:
                begin = -1 if self._is_put_off(tensor) else tensor.users[-1]
                begins.setdefault(tensor.gradient_bytes, []).append(begin)
        for size, places in begins.items():
            for place, left in self._reusing(size, places):
                out[place] += size - left
                out[-1] += left
        return tuple(reversed(list(itertools.accumulate(reversed(out)))))

    def _is_put_off(self, tensor: Tensor) -> bool:
        """Return whether a gradient is computed at the end of the program.

        Like the unused bytes of `_reusing`, this counts only in a program with segments in pieces.
        """
        if not self.puts_off or self.divided is None:
            return False
        eqn = self.program.eqns[tensor.users[-1]]
        is_weight = eqn.invars[-1] is self.program.invars[tensor.index]
        return is_weight and _barriers.has_large_gradient(eqn)

    def _reusing(self, size: int, begins: Sequence[int]) -> list[tuple[int, int]]:
        """Return which arrays lie in the memory that is reserved for gradients of some size.

        Args:
            size: the bytes of each gradient.
            begins: the equation at which the backward pass computes each of them, or -1 for the end
                of the program.

        Returns:
            for each gradient, the first later equation that makes an array of nearly its size, or
            -1 without one; and the bytes that this array leaves unused. They count only in a
            program with segments in pieces. Counting them in all programs would change the plans
            without pieces as well, and was not tried.
        """
        if self.stacked:
            return [(begin, 0) for begin in begins]
        if not self.reuses:
            return [(-1, 0)] * len(begins)
        made, sizes = self._written
        fitting = (sizes >= size // 2) & (sizes <= size)
        made, sizes = np.append(made[fitting], -1), np.append(sizes[fitting], size)
        found = np.searchsorted(made[:-1], begins, side="right")
        left = size - sizes[found] if self.divided is not None else np.zeros_like(found)
        return list(zip(made[found].tolist(), left.tolist(), strict=True))

    @functools.cached_property
    def _written(self) -> tuple[np.ndarray, np.ndarray]:
        """The producers of the arrays in memory, in order, and the bytes of these arrays."""
        arrays = sorted((t.producer, t.bytes) for t in self.tensors if t.in_memory)
        made, sizes = np.array(arrays, dtype=int).reshape(-1, 2).T
        return made, sizes

    @functools.cached_property
    def begun_bytes(self) -> list[int]:
        """Bytes of the cotangents that become live when the backward pass is at each equation.

        These belong to the tensors of which the equation is the last reader.
        """
        out = [0] * len(self.equations)
        for tensor in self.tensors:
            if tensor.cotangent_bytes and tensor.users:
                out[tensor.users[-1]] += tensor.cotangent_bytes
        return out

    @functools.cached_property
    def ended_bytes(self) -> list[int]:
        """Bytes of the cotangents that are freed after the derivative of each equation.

        These belong to the tensors that the equation makes.
        """
        out = [0] * len(self.equations)
        for tensor in self.tensors:
            if tensor.cotangent_bytes and tensor.users:
                out[tensor.producer] += tensor.cotangent_bytes
        return out

    @functools.cached_property
    def flowing_bytes(self) -> tuple[int, ...]:
        """Bytes of the cotangents that are live when the backward pass arrives at each position."""
        steps = zip([0, *self.ended_bytes], [0, *self.begun_bytes], strict=True)
        return tuple(itertools.accumulate(ended - begun for ended, begun in steps))

    def arriving(self, position: int) -> Arriving:
        """Return the cotangents that are live when the backward pass arrives at a position."""
        found = self.memory.get(("arriving", position))
        if found is None:
            found = self.memory["arriving", position] = Arriving.at(self, position)
        return found

    @functools.cached_property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes of the activations that cross each position of the forward pass.

        Entry i counts the tensors that equations before i make and that equation i or a later one
        reads. There is one entry more than there are equations.
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
        """The change of the live bytes at each equation of the forward pass if nothing is saved.

        Each array in memory is live until its last reader has run.
        """
        steps = np.zeros(len(self.equations) + 1)
        for tensor in self.tensors:
            if tensor.producer >= 0 and tensor.in_memory and tensor.users:
                steps[tensor.producer] += tensor.bytes
                steps[tensor.users[-1] + 1] -= tensor.bytes
        for e in self.equations:
            steps[e.index] += e.transient_bytes
            steps[e.index + 1] -= e.transient_bytes
        return steps

    @functools.cached_property
    def again_flops(self) -> float:
        """Floating-point operations that derivatives recompute under every schedule."""
        return sum(
            e.again_flops + (e.loop.length * e.loop.graph.again_flops if e.loop else 0.0)
            for e in self.equations
        )

    @functools.cached_property
    def again_seconds(self) -> float:
        """Roofline time of `again_flops`."""
        return sum(
            e.again_seconds + (e.loop.length * e.loop.graph.again_seconds if e.loop else 0.0)
            for e in self.equations
        )

    @functools.cached_property
    def kept_steps(self) -> tuple[np.ndarray, np.ndarray, dict[int, list[tuple[int, _Steps]]]]:
        """The changes of `written_steps` if an array is saved.

        The first two results hold, for each array, an equation and the change there. If the
        compiler would fuse an array, saving it writes it to memory, and its sources are live until
        then. The third holds, for each such array, the changes for each of its sources, which apply
        if the source itself is not saved.
        """
        at, amounts = np.zeros((2, len(self.tensors)), dtype=int)
        fused: dict[int, list[tuple[int, _Steps]]] = {}
        for tensor in self.tensors:
            t, written = tensor.index, tensor.producer
            if tensor.in_memory and tensor.users:  # otherwise it is freed there
                at[t], amounts[t] = tensor.users[-1] + 1, tensor.bytes
            elif written >= 0:
                at[t], amounts[t] = written, tensor.bytes
                for s in map(self.tensors.__getitem__, tensor.sources):
                    last = s.users[-1] if s.users else written
                    if last < written:
                        until = [(last + 1, s.bytes), (written + 1, -s.bytes)]
                        fused.setdefault(t, []).append((s.index, until))
        return at, amounts, fused

    @functools.cached_property
    def made_outside(self) -> np.ndarray:
        """Bytes of the residuals that each equation's derivative writes outside of regions."""
        return np.array(
            [float(e.made_bytes if self.stacked else e.made_in_memory) for e in self.equations]
        )

    @functools.cached_property
    def memory(self) -> dict[Any, Any]:
        """A cache for the costs of segments, which many schedules share."""
        return {}

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [t.bytes for t in self.tensors]

    def rounded(self, tensor: Tensor) -> bool:
        """Return whether a product reads an array in half precision."""
        return tensor.dtype == "float32" and any(self.equations[i].rounds for i in tensor.users)

    @functools.cached_property
    def _spans(self) -> list[list[tuple[int, int, int]]]:
        """The tensors that live at some of each `_SPAN` positions: (tensor, first, last position).

        A tensor lives at the positions after its producer, up to its last reader.
        """
        found: list[list[tuple[int, int, int]]] = [
            [] for _ in range(len(self.equations) // _SPAN + 1)
        ]
        for t in self.tensors:
            if t.producer >= 0 and t.users:
                first, last = t.producer + 1, t.users[-1]
                for part in range(first // _SPAN, last // _SPAN + 1):
                    found[part].append((t.index, first, last))
        return found

    def crossing(self, position: int) -> tuple[int, ...]:
        """Return the tensors made before a position that equations at or after it read."""
        near = self._spans[position // _SPAN]
        return tuple(t for t, first, last in near if first <= position <= last)


@dataclasses.dataclass(frozen=True)
class Arriving:
    """The cotangents that cross the edge of a region.

    The edge has an optimization barrier, so the compiler writes all of them to memory.

    Attributes:
        ends: bytes of the cotangents, by the equation that makes the tensor.
        fused: bytes of those that the compiler would fuse without the barrier, by the same
            equation.
        begins: bytes of those that it would fuse, by the last equation that reads the tensor.
        fused_bytes: the total bytes of those that it would fuse.
    """

    ends: dict[int, int]
    fused: dict[int, int]
    begins: dict[int, int]
    fused_bytes: int

    @classmethod
    def at(cls, graph: CostGraph, position: int) -> Arriving:
        """Return the cotangents that cross a position of a graph."""
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
