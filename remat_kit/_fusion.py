"""What a compiler fuses and what it writes down: which arrays take memory, and at what width.

No two compilers agree. XLA's CPU compiler writes down what two fusions would both compute; on GPUs
cheap operations run inside of every elementwise operation or reduction that reads them; on TPUs
inside of the matrix products too. `layout` says so of the forward pass of a program, array by
array, as seen in compiled programs (jax 0.10.2 to 0.12; `tests/test_fusion.py` and
``benchmarks/results/planner_*`` hold it against the compilers).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from remat_kit import _graph, _jax

# -- one operation --------------------------------------------------------------------------------


def is_view(eqn: Any) -> bool:
    """Tell whether an equation's output is its input in another form, with no bytes of its own."""
    name = eqn.primitive.name
    if name in ("reshape", "squeeze", "expand_dims", "transpose", "copy", "copy_p"):
        return len(eqn.outvars) == 1
    return _graph.is_identity(eqn)


_HEAVY = frozenset(
    {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "scan", "while"}
    | {"cond", "sort", "gather", "custom_vjp_call", "pallas_call", "fft", "top_k", "shard_map"}
    | {
        "random_bits",
        "threefry2x32",
        "rng_bit_generator",
        "rng_uniform",
        "custom_call",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
    }
    | {"cumlogsumexp", "cholesky", "triangular_solve", "lu", "qr", "eigh", "svd", "argsort"}
    | {"all_gather", "all_to_all", "psum", "ppermute", "reduce_scatter", "approx_top_k"}
    | {"remat2", "checkpoint", "custom_lin", "ffi_call"}
)


def is_rounding(eqn: Any) -> bool:
    """Tell whether an equation is a product whose float32 operands a TPU rounds to bfloat16."""
    if eqn.primitive.name != "dot_general":
        return False
    precision = eqn.params["precision"]
    given = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, jax.lax.Precision.DEFAULT) for p in given)


def reduces(eqn: Any) -> bool:
    """Tell whether an operation is a reduction: elementwise operations fuse into it."""
    name = eqn.primitive.name
    return (name.startswith("reduce_") and name != "reduce_precision") or name in (
        "argmax",
        "argmin",
    )


def is_fusible(eqn: Any) -> bool:
    """Tell whether compilers fuse an operation into what reads its result."""
    name = eqn.primitive.name
    if name in _HEAVY or name.startswith(("scatter", "select_and")) or reduces(eqn):
        return False
    if _graph.checkpoint_name_of(eqn) is not None:
        return True
    if _jax.hi_primitive(eqn) is not None:
        return False
    return all(is_fusible(e) for b in _graph.bodies(eqn) for e in getattr(b.jaxpr, "eqns", ()))


def _is_single_gather(eqn: Any) -> bool:
    """Tell whether an equation picks single numbers: its derivative is no scatter but a selection,
    which fuses.
    """
    return eqn.primitive.name == "gather" and all(n == 1 for n in eqn.params["slice_sizes"])


# -- a program ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Flow:
    """Which operation makes and which ones read each array of a program, arguments first.

    Attributes:
        eqns: the operations.
        reads, makes: the arrays that each reads and makes; a view makes none.
        needs: the arrays that its derivative reads; none where it has no derivative.
        avals, producers: of each array; a producer of -1 is that of an argument.
        active: the arrays that a cotangent flows back to.
        outputs: the array that is each result, or -1.
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
        """The operations that read each array, views left out."""
        found: list[list[int]] = [[] for _ in self.avals]
        for i, tensors in enumerate(self.reads):
            if self.makes[i] or not is_view(self.eqns[i]):
                for t in tensors:
                    found[t].append(i)
        return found

    @functools.cached_property
    def needed(self) -> set[int]:
        """The arrays that some derivative reads."""
        return {t for tensors in self.needs for t in tensors}


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a compiler writes down.

    Attributes:
        written: by array, whether it is written down when it is made.
        halved: the arrays that are stored in half precision.
        flowing: by array, whether its cotangent is written down.
    """

    written: list[bool]
    halved: set[int]
    flowing: list[bool]


def layout(flow: Flow, platform: str, stacked: bool) -> Layout:
    """Return what the compiler of a platform writes down of a program or, ``stacked``, of the body
    of a scan.
    """
    fusible = [is_fusible(e) for e in flow.eqns]
    # Into which operations others fuse. What an iteration keeps is written down as it is.
    merging = [
        f or (platform == "tpu" and not stacked and e.primitive.name == "dot_general")
        for f, e in zip(fusible, flow.eqns, strict=True)
    ]
    # XLA's CPU compiler writes down what two fusions would both compute.
    writing = {
        t
        for i, tensors in enumerate(flow.needs)
        if platform == "cpu" or not merging[i]
        for t in tensors
    }
    written = [
        producer >= 0
        and (
            not fusible[producer]
            or any(not merging[u] and not reduces(flow.eqns[u]) for u in flow.users[t])
            or t in writing
        )
        for t, producer in enumerate(flow.producers)
    ]
    halved = _rounded(flow) if platform == "tpu" else set[int]()
    flowing = [w and t in flow.active for t, w in enumerate(written)]
    if merging != fusible:
        for t, source in _ends(flow, written, halved):
            written[t], flowing[t], flowing[source] = True, flowing[source], False
        made = _from_products(flow, fusible)
        for t in flow.active:
            if flowing[t] and t not in made and merging[flow.producers[t]]:
                flowing[t] = False
    return Layout(written, halved, flowing)


def _rounded(flow: Flow) -> set[int]:
    """Return the arrays that a TPU stores in half precision.

    It multiplies float32 matrices in bfloat16 unless it is told otherwise, and XLA writes down in
    that type what nothing but such products read (v5e, jax 0.12; `tests/test_cost.py` compares it
    with ``jax.default_matmul_precision("highest")``).
    """
    found, whole = set[int](), set(flow.outputs)
    for i, eqn in enumerate(flow.eqns):
        if is_rounding(eqn):
            found.update(flow.reads[i])
        elif flow.makes[i] or not is_view(eqn):
            whole.update(flow.reads[i], flow.needs[i])
    return {t for t in found - whole if flow.avals[t].dtype == jnp.float32}


def _ends(flow: Flow, written: Sequence[bool], halved: set[int]) -> Iterator[tuple[int, int]]:
    """Yield what is written down in place of the one array that it is fused from, and that array,
    which nothing else needs: elementwise operations run at the end of a product as well as inside
    of the next.
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
            if t in halved and _graph.nbytes(flow.avals[t]) <= _graph.nbytes(flow.avals[s]):
                yield t, s


def _from_products(flow: Flow, fusible: Sequence[bool]) -> set[int]:
    """Return the arrays part of whose cotangent a product or another dear operation makes.

    The others' are made by elementwise operations, which run inside of the products that read them.
    """
    found = set[int]()
    for i in range(len(flow.eqns) - 1, -1, -1):
        eqn = flow.eqns[i]
        if reduces(eqn) or _is_single_gather(eqn):
            continue
        if not fusible[i] or not found.isdisjoint(flow.makes[i]):
            found.update(flow.reads[i])
    return found
