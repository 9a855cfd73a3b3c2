"""Predict which arrays a compiler writes to memory, and at what precision.

A compiler fuses operations: an array that only one fusion reads exists in registers and takes no
memory. The compilers differ, and module `facts` says how. `layout` predicts for each array of the
forward pass whether it is written. `tests/backend/test_fusion.py` and
``benchmarks/results/planner_*`` compare its predictions with the compilers.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from remat_kit._program import ops as _ops
from remat_kit._program import program as _program
from remat_kit._program.ops import is_fusible, is_rounding, is_single_gather, is_view, reduces
from remat_kit._program.program import primitive_name

# -- a program ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FusionFlow:
    """The data flow of a program: which operation computes each array and which ones read it.

    Arrays and operations are numbered; the arguments of the program are the first arrays.

    Attributes:
        eqns: the operations.
        reads, makes: for each operation, the arrays that it reads and computes. A view computes
            no array.
        needs: for each operation, the arrays that its derivative reads; empty if it has no
            derivative.
        avals: the shape and dtype of each array.
        producers: for each array, the operation that computes it; -1 for an argument.
        active: the arrays that receive a cotangent.
        outputs: for each result of the program, its array, or -1.
    """

    eqns: Sequence[Any]
    reads: Sequence[tuple[int, ...]]
    makes: Sequence[tuple[int, ...]]
    needs: Sequence[tuple[int, ...]]
    avals: Sequence[Any]
    producers: Sequence[int]
    active: set[int]
    outputs: Sequence[int]

    @functools.cached_property
    def users(self) -> list[list[int]]:
        """For each array, the operations that read it; views are left out."""
        found: list[list[int]] = [[] for _ in self.avals]
        for i, tensors in enumerate(self.reads):
            if self.makes[i] or not is_view(self.eqns[i]):
                for t in tensors:
                    found[t].append(i)
        return found

    @functools.cached_property
    def needed(self) -> set[int]:
        """The arrays that the derivative of some operation reads."""
        return {t for tensors in self.needs for t in tensors}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which arrays a compiler writes to memory.

    Attributes:
        written: for each array, whether the forward pass writes it to memory.
        halved: the arrays that are stored in half precision.
        doubled: the arrays of random bits that are stored as two words for each element.
        padded: for each array that is stored in tiles which it does not fill, its bytes with them.
        flowing: for each array, whether the backward pass writes its cotangent to memory.
    """

    written: list[bool]
    halved: set[int]
    doubled: set[int]
    padded: dict[int, int]
    flowing: list[bool]


def layout(
    flow: FusionFlow,
    *,
    writes_shared: bool,
    into_products: bool,
    rounds: bool,
    keeps_words: bool,
    writes_masks: bool,
    pads: bool,
) -> Layout:
    """Predict which arrays of a program a compiler writes to memory.

    Args:
        flow: the program.
        writes_shared: whether the compiler writes an array that two fusions would both compute.
        into_products: whether it computes elementwise operations inside of the products that read
            their results.
        rounds: whether products round float32 operands to half precision.
        keeps_words: whether it writes the two words that Threefry returns for each element.
        writes_masks: whether it writes what is computed from random bits alone if a derivative
            reads it, such as a mask of dropout. If not, the derivative computes it again.
        pads: whether it stores the arrays of convolutions in tiles of images or channels.
    """
    bits, words = _drawn(flow)
    draws = {flow.producers[t] for t in bits}
    fusible = [
        not keeps_words if i in draws else is_fusible(e) or not words.isdisjoint(makes)
        for i, (e, makes) in enumerate(zip(flow.eqns, flow.makes, strict=True))
    ]
    # `merging` marks the operations that the compiler fuses others into.
    merging = [
        f or (into_products and e.primitive.name == "dot_general")
        for f, e in zip(fusible, flow.eqns, strict=True)
    ]
    writing = {
        t
        for i, tensors in enumerate(flow.needs)
        if writes_shared or not merging[i]
        for t in tensors
    }
    if bits:
        masks = _random(flow, bits)
        writing = writing | flow.needed & masks if writes_masks else writing - masks
    written = [
        producer >= 0
        and t not in words
        and (
            not fusible[producer]
            or any(not merging[u] and not reduces(flow.eqns[u]) for u in flow.users[t])
            or t in writing
        )
        for t, producer in enumerate(flow.producers)
    ]
    halved = _rounded(flow) if rounds else set[int]()
    flowing = [w and t in flow.active for t, w in enumerate(written)]
    if merging != fusible:
        for t, source in _ends(flow, written, halved):
            written[t], flowing[t], flowing[source] = True, flowing[source], False
        made = _from_products(flow, fusible)
        for t in flow.active:
            if flowing[t] and t not in made and merging[flow.producers[t]]:
                flowing[t] = False
    doubled = bits if keeps_words else set[int]()
    return Layout(written, halved, doubled, _padded(flow) if pads else {}, flowing)


def _drawn(flow: FusionFlow) -> tuple[set[int], set[int]]:
    """Return the arrays of random bits, and the words that some of them are combined from.

    In a loop over pieces there is one equation for the two words of Threefry, and one that combines
    them. Elsewhere one equation does both.
    """
    bits, words = set[int](), set[int]()
    for eqn, reads, makes in zip(flow.eqns, flow.reads, flow.makes, strict=True):
        if eqn.primitive.name == "threefry2x32":
            words.update(makes)
        elif _ops.is_threefry(eqn) or (
            eqn.primitive.name == "xor" and reads and words.issuperset(reads)
        ):
            bits.update(makes)
    return bits, words


def _random(flow: FusionFlow, bits: set[int]) -> set[int]:
    """Return the arrays that are computed elementwise from random bits and constants alone.

    If at most one operand of an operation is as large as its result, XLA may compute it again in
    each fusion that reads the result, even if the operand takes more bytes than the result
    (``EffectivelyAtMostUnary`` in XLA's ``instruction_fusion.cc``).
    """
    found = set(bits)
    for t, producer in enumerate(flow.producers):
        if producer >= 0 and is_fusible(flow.eqns[producer]):
            size = flow.avals[t].size
            whole = [r for r in flow.reads[producer] if flow.avals[r].size == size]
            if len(whole) == 1 and whole[0] in found:
                found.add(t)
    return found - bits


def _rounded(flow: FusionFlow) -> set[int]:
    """Return the arrays that a TPU stores in half precision.

    XLA's TPU compiler multiplies float32 matrices in bfloat16 by default. If only such products
    read an array, XLA stores the array in bfloat16 (v5e, jax 0.12;
    `tests/planner/costs/test_build.py` compares with ``jax.default_matmul_precision("highest")``).
    """
    found, whole = set[int](), set(flow.outputs)
    for i, eqn in enumerate(flow.eqns):
        if is_rounding(eqn):
            found.update(flow.reads[i])
        elif flow.makes[i] or not is_view(eqn):
            whole.update(flow.reads[i], flow.needs[i])
    return {t for t in found - whole if flow.avals[t].dtype == jnp.float32}


LANES = 128  # elements in a row of a tile


def _padded(flow: FusionFlow) -> dict[int, int]:
    """Return the bytes of the arrays of convolutions in the tiles of a TPU.

    XLA's TPU compiler stores them with the images or the channels innermost, of which a row of a
    tile has 128. It chooses what leaves less of the rows empty (v5e, jax 0.12). Arrays of the same
    shape, such as the results of elementwise operations, are stored alike.
    """
    rows: dict[tuple[int, ...], float] = {}
    for eqn, reads, makes in zip(flow.eqns, flow.reads, flow.makes, strict=True):
        found = _convolution(eqn)
        if found is None:
            continue
        specs = found.params["dimension_numbers"]
        for t, whole, spec in (
            (reads[0], eqn.invars[0].aval.shape, specs.lhs_spec),
            (makes[0], eqn.outvars[0].aval.shape, specs.out_spec),
        ):
            shape = flow.avals[t].shape  # on one device, and of what a view shows
            if len(shape) == len(whole) and all(map(operator.le, shape, whole)):
                sizes = [shape[axis] for axis in spec[:2]]
                rows[shape] = min((-(-n // LANES) * LANES / n for n in sizes if n), default=1.0)
    return {
        t: round(rows[aval.shape] * _ops.nbytes(aval))
        for t, aval in enumerate(flow.avals)
        if rows.get(getattr(aval, "shape", ()), 1.0) != 1.0
    }


def _convolution(eqn: Any) -> Any | None:
    """Return the convolution that an equation is, or that is all of the call that it is.

    The convolutions of segments in pieces are calls, because they have a derivative of their own.
    """
    if primitive_name(eqn) == "conv_general_dilated":
        return eqn
    inner = [body.jaxpr.eqns for body in _program.bodies(eqn) if body.kind == "rule"]
    return _convolution(inner[0][0]) if len(inner) == 1 == len(inner[0]) else None


def _ends(flow: FusionFlow, written: Sequence[bool], halved: set[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs (array that is written, array that therefore is not).

    The compiler fuses elementwise operations into the end of one product as well as into the
    beginning of the next. If a chain of elementwise operations starts from one array that nothing
    else reads, the compiler therefore writes the end of the chain to memory and not its start.
    """
    sources: list[frozenset[int]] = []
    for t, producer in enumerate(flow.producers):
        if producer < 0:
            sources.append(frozenset())
        elif written[t]:
            sources.append(frozenset((t,)))
        else:
            sources.append(frozenset().union(*(sources[r] for r in flow.reads[producer])))
    made_of: dict[int, list[int]] = {}
    for t in flow.needed:
        for s in sources[t]:
            made_of.setdefault(s, []).append(t)
    for made in made_of.values():
        if len(made) == 1 and not written[made[0]] and len(sources[made[0]]) == 1:
            (t,) = made
            (s,) = sources[t]
            if t in halved and _ops.nbytes(flow.avals[t]) <= _ops.nbytes(flow.avals[s]):
                yield t, s


def _from_products(flow: FusionFlow, fusible: Sequence[bool]) -> set[int]:
    """Return the arrays whose cotangent is computed in part by a product or another operation that
    no other operation is fused into.

    The cotangents of all other arrays come from elementwise operations only, which the compiler
    fuses into the products that read them.
    """
    found = set[int]()
    for i in range(len(flow.eqns) - 1, -1, -1):
        eqn = flow.eqns[i]
        if reduces(eqn) or is_single_gather(eqn):
            continue
        if not fusible[i] or not found.isdisjoint(flow.makes[i]):
            found.update(flow.reads[i])
    return found
