"""Which activations should a region save, and which should it recompute, at a given price per byte?

An operation that runs again needs its inputs, so these must be saved or recomputed too. The choice
is therefore a maximum closure problem, which a minimum cut of a flow network solves (Picard,
"Maximal closure of a graph and applications to combinatorial problems", Management Science, 1976).
If a saved byte costs a price in seconds, the minimum cut is the set of arrays with the least sum of
storage cost and recompute time. A sweep over the price yields the lower convex hull of all choices
of bytes and seconds.

Example: take eight layers ``x = tanh(x @ w)``, with ``x`` of 4 MiB on an H100. Recomputing the
result of a layer takes 5.3 µs, which is 1.27e-12 seconds per byte. The last layer takes only 2.8
µs, or 0.67e-12 seconds per byte, because its ``tanh`` fuses into the sum that follows. At a low
price, the minimum cut saves the results of all layers, and at a high price those of none:

>>> import jax, jax.numpy as jnp
>>> from remat_kit._chip.target import target
>>> from remat_kit._planner.costs.build import trace
>>> def tower(weights, x):
...     for w in weights:
...         x = jnp.tanh(x @ w)
...     return jnp.sum(x)
>>> weights = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 8
>>> x = jax.ShapeDtypeStruct((2048, 512), jnp.float32)
>>> cutter = Cutter(trace(tower, (weights, x), target("h100")))
>>> [len(cutter.cut(price).keep) for price in (0.5e-12, 1e-12, 1.5e-12)]
[8, 7, 0]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from remat_kit._planner.costs.graph import CostGraph
from remat_kit._planner.costs.simulate import Simulated, closure


@dataclasses.dataclass(frozen=True)
class Worth:
    """The measure of work that a search minimizes: a weighted mean of seconds and FLOPs.

    A roofline model assumes that matrix units run at their peak rate, so its seconds underestimate
    the recompute of convolutions and matrix products. FLOPs alone ignore the time of reading and
    writing memory. A mean of both, each as a share of the forward pass, avoids either error.

    Attributes:
        flop_share: the weight of FLOPs in the mean: 0 is time alone, 1 is FLOPs alone.
        flop_seconds: the seconds that one floating-point operation counts as. With this value, the
            FLOPs of the forward pass count as much as its roofline time.
    """

    flop_share: float = 0.0
    flop_seconds: float = 0.0

    @classmethod
    def of_graph(cls, graph: CostGraph, flop_share: float) -> Worth:
        """Return the measure for a graph; if the graph has no FLOPs, it is time alone."""
        if not graph.forward_flops:
            return cls()
        return cls(flop_share, graph.forward_seconds / graph.forward_flops)

    def of(self, seconds: float, flops: float) -> float:
        """Return the measure of some work, in seconds."""
        return (1 - self.flop_share) * seconds + self.flop_share * self.flop_seconds * flops

    def extra(self, cost: Simulated) -> float:
        """Return the measure of the extra work of a schedule, in seconds."""
        return self.of(cost.extra_seconds, cost.extra_flops)

    def equations(self, graph: CostGraph) -> list[float]:
        """Return the measure of each equation's forward run, in seconds."""
        return [self.of(e.seconds, e.flops) for e in graph.equations]


TIME = Worth()


# -- minimum cuts ---------------------------------------------------------------------------------


class Cut(NamedTuple):
    """The arrays to save at a price per byte.

    Attributes:
        keep: the tensors to save.
        value: a lower bound on the recompute time plus the cost of the saved bytes, in seconds.
        bytes: the saved bytes that the cut pays for.
    """

    keep: frozenset[int]
    value: float
    bytes: float


class Cutter:
    """The choice between saving and recomputing, as a flow network.

    Args:
        graph: the cost graph of the loss, or of the body of a scan.
        worth: how FLOPs and seconds are combined into work.
        wanted: the tensors that the backward pass needs; by default all residuals.
        instead: alternatives, as pairs ``(bytes, tensors)``. These tensors are needed too, unless
            that many bytes are saved in their place.
    """

    def __init__(
        self,
        graph: CostGraph,
        worth: Worth = TIME,
        wanted: Iterable[int] | None = None,
        instead: Sequence[tuple[int, Sequence[int]]] = (),
    ):
        self.graph = graph
        always = list(graph.residuals if wanted is None else wanted)
        self.wanted = list(dict.fromkeys([*always, *(t for _, some in instead for t in some)]))
        recompute = closure(graph, self.wanted, frozenset(), 0, len(graph.equations))
        self.equations = list(recompute.again)
        tensors = {t for i in self.equations for t in graph.equations[i].makes}
        tensors.update(self.wanted)
        used = set(self.wanted)
        for i in self.equations:
            used.update(graph.equations[i].reads)
        self.tensors = sorted(t for t in tensors if t in used)
        self.tensor_node = {t: 2 + k for k, t in enumerate(self.tensors)}
        offset = 2 + len(self.tensors)
        self.equation_node = {i: offset + k for k, i in enumerate(self.equations)}
        offset += len(self.equations)
        self.size = offset + len(instead)
        # Build the edges only once, because from one cut to the next only the capacities change.
        edges = [*self.priced(offset), *self.endless(offset, always, instead)]
        self.rows, self.columns = np.array(edges, dtype=int).reshape(-1, 2).T
        self.order = np.lexsort((self.columns, self.rows)).astype(np.int32)
        starts = np.searchsorted(self.rows[self.order], np.arange(self.size + 1))
        self.sparse = self.columns[self.order].astype(np.int32), starts.astype(np.int32)
        self.bytes = np.array([graph.tensors[t].bytes for t in self.tensors], dtype=float)
        work = worth.equations(graph)
        self.work = np.array([work[i] for i in self.equations])
        self.instead = np.array([size for size, _ in instead], dtype=float)

    def priced(self, offset: int) -> Iterator[tuple[int, int]]:
        """Yield the edges of finite capacity: saved arrays, recomputed equations, alternatives."""
        for t, node in self.tensor_node.items():
            yield node, self.equation_node[self.graph.tensors[t].producer]
        yield from ((node, 1) for node in self.equation_node.values())
        yield from ((0, node) for node in range(offset, self.size))

    def endless(
        self, offset: int, always: Iterable[int], instead: Sequence[tuple[int, Sequence[int]]]
    ) -> Iterator[tuple[int, int]]:
        """Yield the edges of infinite capacity: the arrays that must be saved or recomputed."""
        yield from ((0, self.tensor_node[t]) for t in always)
        for node, (_, some) in enumerate(instead, offset):
            yield from ((node, self.tensor_node[t]) for t in some)
        for i, node in self.equation_node.items():
            reads = (t for t in self.graph.equations[i].reads if t in self.tensor_node)
            yield from ((node, self.tensor_node[t]) for t in reads)

    def cut(self, price: float, free: Iterable[int] = ()) -> Cut:
        """Return the arrays to save if a byte costs ``price`` seconds; ``free`` arrays cost 0."""
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        if not len(self.wanted):
            return Cut(frozenset(), 0.0, 0.0)
        free = set(free)
        keeping = self.bytes
        if free:
            paid = [t not in free for t in self.tensors]
            keeping = keeping * paid
        sizes = np.concatenate([keeping, 0 * self.work, self.instead])
        costs = price * sizes
        costs[len(keeping) : len(keeping) + len(self.work)] = self.work
        # `maximum_flow` needs integers. 2^29 stands for the highest cost that a cut can have.
        total = 1.01 * min(price * keeping.sum() or 1.0, self.work.sum() or 1.0)
        scale = 2**29 / total
        endless = 2**30
        capacities = np.full(len(self.rows), endless, dtype=np.int64)
        capacities[: len(costs)] = np.minimum(np.floor(costs * scale), endless).astype(np.int64)
        edges = capacities[self.order].astype(np.int32), *self.sparse
        matrix = csr_matrix(edges, (self.size, self.size))
        flow = maximum_flow(matrix, 0, 1)
        residual = matrix - flow.flow
        residual.data[residual.data < 0] = 0
        residual.eliminate_zeros()
        reached = np.zeros(self.size, dtype=bool)
        reached[breadth_first_order(residual, 0, directed=True, return_predecessors=False)] = True
        through = reached[self.rows[: len(costs)]] & ~reached[self.columns[: len(costs)]]
        # A constant has no bytes in the graph, so saving it would write an array that costs memory.
        kept = np.flatnonzero(through[: len(self.tensors)] & (self.bytes > 0)).tolist()
        keep = frozenset(map(self.tensors.__getitem__, kept))
        return Cut(keep, flow.flow_value / scale, float(sizes[through].sum()))
