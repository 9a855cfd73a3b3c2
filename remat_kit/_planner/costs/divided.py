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
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax

from remat_kit._apply.divide import Divided
from remat_kit._apply.pieces import PieceLoop
from remat_kit._planner.costs import build as _build
from remat_kit._planner.costs.build import LinkedChip, PieceCost
from remat_kit._planner.costs.graph import CostGraph
from remat_kit._planner.costs.simulate import Simulation
from remat_kit._policy.schedule import Segment
from remat_kit._program import ops as _ops
from remat_kit._program.pieces import Piece
from remat_kit._program.program import flat_program


def graph_of(graph: CostGraph, divided: Divided, chip: LinkedChip) -> CostGraph:
    """Return the cost graph of a divided program.

    Args:
        graph: the cost graph of the program as it was.
        divided: the program with segments in pieces.
        chip: the chip of the graph.
    """
    active = [t.active for t in graph.tensors[: len(graph.program.invars)]]
    wanted = [t >= 0 and graph.tensors[t].active for t in graph.outputs]
    parts = _Parts(divided, chip, {})
    found = _build.graph_of(divided.program, active, wanted, chip, parts, stacked=graph.stacked)
    return dataclasses.replace(found, divided=divided)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The segments in pieces of a program; equal ones have the same loop and the same cost."""

    divided: Divided
    chip: LinkedChip
    known: dict[tuple[PieceLoop, tuple[bool, ...]], PieceCost]

    def cost(self, equation: int, active: Sequence[bool]) -> PieceCost | None:
        loop = self.divided.loops.get(equation)
        if loop is None:
            return None
        key = loop, tuple(active)
        if key not in self.known:
            self.known[key] = cost_of(loop, active, self.chip)
        return self.known[key]

    def body(self, equation: int) -> _Parts | None:
        inner = self.divided.bodies.get(equation)
        return None if inner is None else dataclasses.replace(self, divided=inner)


def cost_of(loop: PieceLoop, active: Sequence[bool], chip: LinkedChip) -> PieceCost:
    """Return the cost of a loop over pieces.

    Args:
        loop: the loop.
        active: for each of its inputs, whether the loop is differentiated by it.
        chip: the chip whose rates turn operations and bytes into seconds.
    """
    split = loop.split
    piece = Piece(split.n, min(loop.size, split.n), 0)
    count = split.n / piece.size
    avals = [
        jax.ShapeDtypeStruct(piece.shape(v.aval.shape, how), v.aval.dtype) for v, how in loop.inputs
    ]
    program = flat_program(jax.make_jaxpr(lambda *xs: loop.body(xs, piece))(*avals))
    flags = [False] * len(program.consts) + list(active)
    graph = _build.graph_of(program, flags, loop.moving, chip)
    whole = (Segment(0, len(graph.equations), plain=True),)
    without = tuple(dataclasses.replace(t, gradient_bytes=0) for t in graph.tensors)
    forward = Simulation(dataclasses.replace(graph, tensors=without), math.inf)
    forward.forward(whole, frozenset())
    # The loop of the derivative computes again what the derivative of a piece needs.
    again = Simulation(graph, math.inf).run((Segment(0, len(graph.equations)),))
    added = sum(
        _ops.nbytes(v.aval)
        for (v, how), is_active in zip(loop.inputs, active, strict=True)
        if is_active and how is None
    )
    # A gradient that all pieces contribute to is read, added to, and written for each piece.
    adding = 3 * added / chip.bandwidth_bytes_per_second
    return PieceCost(
        forward_bytes=forward.peak,
        backward_bytes=Simulation(graph, math.inf).run(whole).peak_bytes,
        flops=count * graph.forward_flops,
        seconds=count * graph.forward_seconds,
        again_flops=count * again.extra_flops,
        again_seconds=count * again.extra_seconds,
        backward_flops=count * sum(e.backward_flops for e in graph.equations),
        backward_seconds=count * (graph.backward_seconds + adding),
    )
