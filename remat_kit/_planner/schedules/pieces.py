"""Which segments of a program should run in pieces, along which axis, and in how many?

No schedule has a lower peak than the largest working set of one operation: the logits of a language
model, the scores of a long attention, the first convolutions of an image network. A segment in k
pieces needs about 1/k of it. `variants` proposes programs with segments in pieces, each of which is
then planned like any other program (module `divided`):

1. The largest array of the program that is in no segment yet gives the next segments, one for each
   array of about its size. A segment begins where its inputs are narrow, that is, at most half of
   the array, and ends where what it hands on is narrow again. So the equal blocks of a model get
   equal segments.
2. Each axis of the array is tried. `remat_kit._program.pieces.split` says whether it can be
   divided. In a program that is partitioned over several devices, an axis that the mesh splits is
   left alone: the devices would have to exchange parts of each piece.
3. The number of pieces is the smallest power of two at which the segment is no longer what needs
   the most memory. Of several axes the fastest one wins: where pieces read the weights as a whole,
   they read them k times. On TPUs, segments that follow each other and divide the images of
   convolutions get equal numbers of pieces, unless their pieces are stored alike in any case.

Example: GPT-2 with 12 layers and a batch of 8 has logits of 1570 MiB, scores of 384 MiB in each
block and hidden layers of 96 MiB. The first variant has the loss head in pieces, the second the
twelve attentions as well, and the third also the twelve MLPs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from remat_kit import _jax
from remat_kit._apply.divide import divided, segment_of, split_of
from remat_kit._apply.pieces import PieceLoop
from remat_kit._apply.region import relative
from remat_kit._backend.interface import Backend
from remat_kit._planner.costs import divided as _divided
from remat_kit._planner.costs.build import LinkedChip, PieceCost
from remat_kit._planner.costs.divided import ShardsOfValues
from remat_kit._planner.costs.graph import CostGraph, Tensor
from remat_kit._planner.schedules.mincut import Worth
from remat_kit._planner.schedules.proposals import Candidate, proposed
from remat_kit._policy.divisions import Division
from remat_kit._program import ops as _ops
from remat_kit._program.pieces import Along
from remat_kit._program.pieces.split import Split
from remat_kit._program.structure import structure_of
from remat_kit._units import format_bytes

# An array is narrow if it has at most this share of the bytes of the array that is divided.
_NARROW = 0.5

# Arrays of at least this share of the largest one are divided together with it.
_ALIKE = 0.75

# The search for the end of a segment gives up after this many equations.
_LONGEST = 400

# More pieces than this are never proposed.
_MOST_PIECES = 64

# Twice as many pieces must need at most this share of the memory, or they are not worth it.
_GAIN = 0.85

# The search for more segments ends if the peak does not fall below this share of the least so far.
_PROGRESS = 0.98

# The arrays of the largest working set that `floor` tries to divide.
_TRIED = 3

# Arrays below this share of the largest working set are not worth dividing.
_SMALLEST = 1 / 64


@dataclasses.dataclass(frozen=True)
class PieceWay:
    """One way to run a segment in pieces.

    Attributes:
        division: the segment, the axis and the number of pieces.
        cost: what it costs.
        images: how many images of a convolution a piece has, or 0 if they are not divided.
    """

    division: Division
    cost: PieceCost
    images: int


@dataclasses.dataclass(frozen=True)
class Option:
    """A segment, and all ways to run it in pieces that are worth considering."""

    start: int
    stop: int
    ways: tuple[PieceWay, ...]

    def fitting(self, most: float) -> PieceWay:
        """Return the fastest way that needs at most some bytes, or else the one that needs least.

        More pieces that save little are not used.
        """

        def time(way: PieceWay) -> tuple[float, int, int]:
            cost, d = way.cost, way.division
            seconds = cost.seconds + cost.again_seconds + cost.backward_seconds
            return seconds, d.pieces, d.axis

        fits = [w for w in self.ways if w.cost.backward_bytes <= most]
        if fits:
            return min(fits, key=time)
        least = min(w.cost.backward_bytes for w in self.ways)
        return min((w for w in self.ways if w.cost.backward_bytes * _GAIN <= least), key=time)

    def in_pieces(self, axis: int, pieces: int) -> PieceWay | None:
        """Return the way that divides an axis into a number of pieces, if there is one."""
        wanted = axis, pieces
        found = (w for w in self.ways if (w.division.axis, w.division.pieces) == wanted)
        return next(found, None)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A program with segments in pieces, and its schedules.

    Attributes:
        graph: the cost graph of the divided program.
        candidates: schedules of it.
    """

    graph: CostGraph
    candidates: Sequence[Candidate]

    def extra(self, graph: CostGraph) -> tuple[float, float]:
        """Return the FLOPs and the seconds that the pieces cost under every schedule.

        Args:
            graph: the cost graph of the program without pieces.
        """
        own = self.graph
        flops = own.again_flops + max(0.0, own.forward_flops - graph.forward_flops)
        longer = own.forward_seconds + own.backward_seconds
        longer -= graph.forward_seconds + graph.backward_seconds
        return flops, max(own.again_seconds, longer)


@dataclasses.dataclass(frozen=True)
class Floor:
    """The operation with the largest working set, which recomputation alone does not make smaller.

    Attributes:
        module, primitive: the operation.
        array: the largest array that it works on, as ``float32[8,1024,50257]``.
        bytes: what its derivative needs at once.
        way: a segment around it in pieces that needs less at once.
    """

    module: str
    primitive: str
    array: str
    bytes: int
    way: PieceWay

    def __str__(self) -> str:
        d = self.way.division
        where = f"{self.module or 'the top level'} (`{self.primitive}`, {self.array})"
        share = self.way.cost.backward_bytes / self.bytes
        return (
            f"the largest working set is that of one operation: {where}, about "
            f"{format_bytes(self.bytes)} by the planner's model. pieces=True (--pieces) may go "
            f"below it: in {d.pieces} pieces of axis {d.axis} this operation needs about "
            f"{100 * share:.0f} % of that at a time. It is off by default, because sums over "
            "pieces round in another order"
        )


def floor(graph: CostGraph, chip: LinkedChip) -> Floor | None:
    """Return the largest working set of a program, if a segment around it can run in pieces.

    Only this one segment is examined, so the answer takes a small part of the time of a search. It
    is None if no axis of the arrays can be divided.

    >>> import jax.numpy as jnp
    >>> from remat_kit._chip.target import target
    >>> from remat_kit._planner.costs.build import trace
    >>> w, x = jnp.ones((16, 4096)), jnp.ones((256, 16))
    >>> graph = trace(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2), (w, x), target("cpu"))
    >>> found = floor(graph, target("cpu"))
    >>> found.array, found.way.division.axis, found.way.cost.backward_bytes < found.bytes / 2
    ('float32[256,4096]', 1, True)

    Args:
        graph: the cost graph of the program as it is.
        chip: the chip of the graph.
    """
    if has_explicit_shardings(graph):
        return None
    sets = [(size, i, s) for s in _searches(graph, chip) for size, i in s.working_sets()]
    if not sets:
        return None
    size, index, search = max(sets, key=lambda x: x[0])
    e, tensors = search.graph.equations[index], search.graph.tensors
    left = {t.index for t in search.left()}
    arrays = sorted({*e.makes, *e.reads} & left, key=lambda t: -tensors[t].bytes)
    for t in arrays[:_TRIED]:
        option = search.option(t, [])
        way = None if option is None else option.fitting(size / 2)
        if way is not None and way.cost.backward_bytes < _GAIN * size:
            dims = ",".join(map(str, tensors[t].shape))
            return Floor(e.module, e.primitive, f"{tensors[t].dtype}[{dims}]", int(size), way)
    return None


def has_explicit_shardings(graph: CostGraph) -> bool:
    """Tell whether the types of a program's values say how a mesh with explicit axes splits them.

    An operation on a piece would need another type.
    """
    if graph.partition is None:
        return False
    avals = (_aval(graph, t.index) for t in graph.tensors)
    return any(any(_jax.explicit_spec(a)) for a in avals)


def explored(
    graph: CostGraph,
    chip: LinkedChip,
    worth: Worth,
    host_bandwidth: float,
    host_bytes: float,
    tick: Callable[[str], None],
) -> Iterator[Variant]:
    """Yield programs with more and more segments in pieces, while these lower the peak.

    Args:
        graph: the cost graph of the program as it is.
        chip: the chip of the graph.
        worth, host_bandwidth, tick: as for `proposals.proposed`.
        host_bytes: the most that a schedule may offload.
    """
    least, useless = math.inf, 0
    for variant in variants(graph, chip):
        divisions = variant.divided.divisions if variant.divided else ()
        shared = len({(d.stop - d.start, d.pieces) for d in divisions})
        tick(f"planning with {shared} kinds of segments in pieces")
        found = proposed(
            variant,
            levels=8,
            slots=120,
            host_bandwidth=host_bandwidth,
            host_bytes=host_bytes,
            worth=worth,
        )
        found = [c for c in found if c.cost.host_bytes <= host_bytes]
        yield Variant(variant, found)
        peak = min(c.cost.peak_bytes for c in found)
        useless = useless + 1 if peak > _PROGRESS * least else 0
        least = min(peak, least)
        if useless == 2:
            return


def variants(graph: CostGraph, chip: LinkedChip, most: int = 10) -> Iterator[CostGraph]:
    """Yield cost graphs of the program with more and more segments in pieces.

    Args:
        graph: the cost graph of the program as it is.
        chip: the chip of the graph.
        most: maximum number of variants.
    """
    searches = list(_searches(graph, chip))
    smallest = _SMALLEST * max(s.largest_working_set() for s in searches)
    seen = set[tuple[Division, ...]]()
    while (largest := max(s.largest_left() for s in searches)) > smallest:
        for search in searches:
            search.grow(_ALIKE * largest)
        for share in (2, 1):
            target = share * max(s.largest_working_set() for s in searches)
            every = [d for s in searches for d in s.divisions(target)]
            found = tuple(d for d in every if not any(o.holds(d) for o in every))
            if found and found not in seen and len(seen) < most:
                seen.add(found)
                yield _divided.graph_of(graph, divided(graph.program, found, "frontier"), chip)


def _searches(
    graph: CostGraph, chip: LinkedChip, loop: tuple[int, ...] = ()
) -> Iterator[_SegmentSearch]:
    """Yield the search in a program, and those in the bodies of its scans."""
    yield _SegmentSearch(graph, chip, loop)
    for e in graph.equations:
        if e.loop is not None and not e.loop.graph.program.consts:
            yield from _searches(e.loop.graph, chip, (*loop, e.index))


class _SegmentSearch:
    """The search for segments of one program, or of the body of a scan in it."""

    def __init__(self, graph: CostGraph, chip: LinkedChip, loop: tuple[int, ...]):
        self.graph = graph
        self.chip = chip
        self.loop = loop
        self.program = graph.program
        self.arguments = frozenset[Any]() if loop else frozenset(graph.program.invars)
        self.options: list[Option] = []
        self.blocked = set[int]()  # arrays that cannot be divided
        self.sizes = [_size(_aval(graph, t.index), t.shape) for t in graph.tensors]
        partition = graph.partition
        self.shards = {} if partition is None else partition.shards.by_variable(graph.program)
        self.known: dict[Any, tuple[tuple[int, int, PieceCost, int], ...]] = {}

    # .. which segments

    @property
    def inside(self) -> set[int]:
        """The equations that are in segments."""
        return {i for o in self.options for i in range(o.start, o.stop)}

    def left(self) -> list[Tensor]:
        """Return the arrays in no segment that may be divided."""
        inside = self.inside
        return [
            t
            for t in self.graph.tensors
            if t.producer >= 0
            and t.active
            and t.index not in self.blocked
            and t.producer not in inside
            and self.graph.equations[t.producer].loop is None
        ]

    def largest_left(self) -> int:
        return max((t.bytes for t in self.left()), default=0)

    def grow(self, least: float) -> None:
        """Add the segments of all arrays of at least some bytes."""
        for t in self.left():
            if t.bytes < least or any(o.start <= t.producer < o.stop for o in self.options):
                continue
            option = self.option(t.index, self.options)
            if option is None:
                self.blocked.add(t.index)
            else:
                self.options.append(option)
        self.options.sort(key=lambda o: o.start)

    def divisions(self, most: float) -> list[Division]:
        """Return the segments in so many pieces that each needs at most some bytes."""
        ways = [o.fitting(most) for o in self.options]
        ways = in_equal_pieces(self.options, ways, Backend(self.chip.platform))
        return [dataclasses.replace(w.division, loop=self.loop) for w in ways]

    def largest_working_set(self) -> float:
        """Return the bytes that the derivative of one operation in no segment needs at most."""
        return max((size for size, _ in self.working_sets()), default=0)

    def working_sets(self) -> Iterator[tuple[float, int]]:
        """Yield the bytes that the derivative of each operation in no segment needs."""
        inside, tensors = self.inside, self.graph.tensors
        for e in self.graph.equations:
            if e.index in inside or e.loop is not None:
                continue
            held = {t for t in (*e.needs, *e.makes, *e.reads) if tensors[t].in_memory}
            flowing = {t for t in (*e.makes, *e.reads) if tensors[t].producer >= 0}
            size = sum(tensors[t].bytes for t in held) + e.working_bytes
            yield size + sum(tensors[t].cotangent_bytes for t in flowing), e.index

    def option(self, t: int, options: Sequence[Option]) -> Option | None:
        """Return the segment around an array, if it can run in pieces."""
        at = self.graph.tensors[t].producer
        low = max((o.stop for o in options if o.stop <= at), default=0)
        high = min((o.start for o in options if o.start > at), default=len(self.program.eqns))
        found = self.segment(t, low, high)
        if found is None:
            return None
        start, stop = found
        ways = self.ways(start, stop, (at, self.graph.tensors[t].position))
        return Option(start, stop, ways) if ways else None

    def segment(self, t: int, low: int, high: int) -> tuple[int, int] | None:
        """Return where the segment around an array begins and ends."""
        wide = _NARROW * self.sizes[t]
        first = self.graph.tensors[t].producer
        stop = self.narrow_end(t, high)
        if stop is None:
            return None
        start, todo = first, list(range(first, stop))
        while todo:
            for r in self.graph.equations[todo.pop()].reads:
                producer = self.graph.tensors[r].producer
                if self.sizes[r] > wide and low <= producer < start:
                    todo += range(producer, start)
                    start = producer
        return start, stop

    def narrow_end(self, t: int, high: int) -> int | None:
        """Return the first position after an array where little that depends on it is live."""
        graph, wide = self.graph, _NARROW * self.sizes[t]
        first = graph.tensors[t].producer
        outputs = {o for o in graph.outputs if o >= 0}
        live: dict[int, int] = {}  # what depends on the array: its last reader
        depends = set[int]()
        best: tuple[int, int] | None = None
        for i in range(first, min(high, first + _LONGEST)):
            e = graph.equations[i]
            if i == first or not depends.isdisjoint(e.reads):
                for m in e.makes:
                    depends.add(m)
                    users = graph.tensors[m].users
                    live[m] = len(graph.equations) if m in outputs else max(users, default=i)
            crossing = sum(self.sizes[m] for m, last in live.items() if last > i)
            if i > first and crossing <= wide and (best is None or crossing < best[0]):
                best = crossing, i + 1
            # A few equations more may hand on even less.
            if best is not None and (crossing > wide or i + 1 >= best[1] + 8):
                break
        return None if best is None else best[1]

    # .. in which pieces

    def ways(self, start: int, stop: int, place: tuple[int, int]) -> tuple[PieceWay, ...]:
        """Return the ways to run a segment in pieces; empty if there is none."""
        _, part = relative(segment_of(self.program, start, stop))
        inside = place[0] - start, place[1]
        active = self.active(start, stop)
        shards = [self.shards.get(v) for v in (*part.invars, *_made(part))]
        given = tuple(v in self.arguments for v in part.invars)
        key = structure_of(part), inside, tuple(sorted(active)), given, tuple(shards)
        if key not in self.known:
            self.known[key] = tuple(self.costs(part, inside, active))
        return tuple(
            PieceWay(Division(start, stop, pieces, place, axis), cost, images)
            for axis, pieces, cost, images in self.known[key]
        )

    def active(self, start: int, stop: int) -> set[int]:
        """Return which inputs of a segment, by number, have a cotangent."""
        part = segment_of(self.program, start, stop)
        tensor = self.tensor_of
        return {
            k
            for k, v in enumerate(part.invars)
            if jnp.issubdtype(v.aval.dtype, jnp.inexact) and self.graph.tensors[tensor[v]].active
        }

    @functools.cached_property
    def tensor_of(self) -> dict[Any, int]:
        """The tensor of each variable of the program."""
        found = {v: k for k, v in enumerate(self.program.invars)}
        for eqn, e in zip(self.program.eqns, self.graph.equations, strict=True):
            if e.makes:
                found.update(zip(eqn.outvars, e.makes, strict=True))
            elif len(eqn.outvars) == 1 and not isinstance(eqn.invars[0], jec.Literal):
                found[eqn.outvars[0]] = found[eqn.invars[0]]
        return found

    def costs(
        self, part: Any, place: tuple[int, int], active: set[int]
    ) -> Iterator[tuple[int, int, PieceCost, int]]:
        """Yield axes, numbers of pieces, what they cost, and how many images a piece has."""
        number = {v: k for k, v in enumerate(part.invars)}
        value = part.eqns[place[0]].outvars[place[1]]
        for axis in range(len(value.aval.shape)):
            split = split_of(part, place, axis)
            if not isinstance(split, Split) or not self.is_worth(split):
                continue
            if not self.is_whole_along(split):
                continue
            mask, of_images = self.mask(split, number, active), _divides_images(split)
            pieces, least = 2, None
            while pieces <= min(split.n, _MOST_PIECES):
                loop = PieceLoop(split, -(-split.n // pieces), self.arguments)
                cost = _divided.cost_of(loop, mask(loop), self.chip, self.of_values)
                if least is not None and cost.backward_bytes > 0.95 * least:
                    break
                least = cost.backward_bytes
                yield axis, pieces, cost, loop.size if of_images else 0
                pieces *= 2

    def is_whole_along(self, split: Split) -> bool:
        """Tell whether each device has all of the axis that is divided."""
        divided = [*split.cut, *split.how.items(), *split.outputs]
        return not any(
            isinstance(how, Along) and v in self.shards and self.shards[v].axes[how.axis]
            for v, how in divided
        )

    @functools.cached_property
    def of_values(self) -> ShardsOfValues | None:
        """What one device has of the variables of the program; None if it has all."""
        partition = self.graph.partition
        return None if partition is None else ShardsOfValues(self.shards, partition.shards.axes)

    def is_worth(self, split: Split) -> bool:
        """Tell whether what leaves the loop is less than half of what is inside."""
        return split.saved_bytes(split.n) > 0

    def mask(self, split: Split, number: dict[Any, int], active: set[int]) -> Any:
        """Return a function that says which inputs of a loop have a cotangent."""
        moving = {v for v, k in number.items() if k in active}
        for i in (*split.before,):
            eqn = split.program.eqns[i]
            if any(not isinstance(v, jec.Literal) and v in moving for v in eqn.invars):
                moving.update(v for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact))

        def of(loop: PieceLoop) -> tuple[bool, ...]:
            return tuple(v in moving for v, _ in loop.inputs)

        return of


def in_equal_pieces(
    options: Sequence[Option], ways: Sequence[PieceWay], backend: Backend
) -> list[PieceWay]:
    """Return ways in which segments that follow each other store their images alike.

    Where the compiler would copy an array between two segments of such a run, the segments with
    more images in a piece get the largest number of pieces of the run, if they can have it. An
    AlexNet for 1,024 images then takes 731 MiB in 16, 16 and 16 pieces, in place of 887 in 16, 16
    and 8 (v5e, jax 0.12).

    Args:
        options: segments, in the order of the program.
        ways: one way for each of them.
        backend: the compiler.
    """
    out = list(ways)
    places = [k for k, way in enumerate(ways) if way.images]
    while places:
        run = [places.pop(0)]
        while places and options[run[-1]].stop == options[places[0]].start:
            run.append(places.pop(0))
        images = [ways[k].images for k in run]
        most = max(ways[k].division.pieces for k in run)
        for k in run:
            if backend.copies_between_loops(ways[k].images, min(images)):
                out[k] = options[k].in_pieces(ways[k].division.axis, most) or ways[k]
    return out


def _divides_images(split: Split) -> bool:
    how = {**dict(split.cut), **split.how}
    for i in split.ways:
        eqn = split.program.eqns[i]
        if eqn.primitive is jax.lax.conv_general_dilated_p:
            found = how.get(eqn.invars[0])
            if isinstance(found, Along):
                return found.axis == eqn.params["dimension_numbers"].lhs_spec[0]
    return False


def _made(part: Any) -> Iterator[Any]:
    """Yield the variables that the equations of a segment make."""
    for eqn in part.eqns:
        yield from eqn.outvars


def _size(aval: Any, shape: tuple[int, ...]) -> int:
    """Return the bytes of an array, as if a float of less than four bytes had four.

    Args:
        aval: its abstract value.
        shape: its shape on one device.

    The scores of an attention in bfloat16 are converted to float32 for the softmax. They take half
    the bytes then, but are no narrower, and a segment must not begin with them.
    """
    if _ops.nbytes(aval) == 0:
        return 0
    size = _ops.nbytes(aval.update(shape=shape))
    if jnp.issubdtype(aval.dtype, jnp.floating) and size < 4 * math.prod(shape):
        return 4 * math.prod(shape)
    return size


def _aval(graph: CostGraph, t: int) -> Any:
    tensor = graph.tensors[t]
    if tensor.producer < 0:
        return graph.program.invars[tensor.position].aval
    return graph.program.eqns[tensor.producer].outvars[tensor.position].aval
