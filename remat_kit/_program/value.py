"""What does a selector see of an intermediate value of a program?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.extend.core as jec

from remat_kit import _jax
from remat_kit._frames import source_of
from remat_kit._program.ops import flops, is_kernel, moved_bytes, nbytes
from remat_kit._program.paths import Path, module_path
from remat_kit._program.program import (
    GATHERED_PARAMETER,
    MARKS,
    Program,
    bodies,
    checkpoint_name_of,
    is_identity,
    primitive_name,
    producers,
)


def offloaded_bytes(jaxpr: Any) -> int:
    """Return the bytes that a jaxpr moves to host memory, in all iterations of its loops."""
    own = (e for e in jaxpr.eqns if e.primitive.name == "device_put")
    size = sum(nbytes(v.aval) for e in own for v in e.outvars if _jax.is_on_host(v.aval))
    inner = (b for e in jaxpr.eqns for b in bodies(e))
    return size + sum(round(b.times) * offloaded_bytes(b.jaxpr) for b in inner)


# -- values, as selectors see them ----------------------------------------------------------


def value_of(
    eqn: Any, position: int, path: Path, names: Sequence[str] = (), *, full: bool = True
) -> Value:
    """Describe one output of an equation to the selectors of a policy.

    ``full=False`` leaves out the source line, because finding it takes most of the time.
    """
    var = eqn.outvars[position]
    chain = producers(eqn, position)
    return Value(
        primitives=tuple(dict.fromkeys((*map(primitive_name, chain), *_kernels(eqn, position)))),
        names=tuple(name for name in names if name not in MARKS),
        module="/".join(path),
        source=source_of(eqn) if full else ("", 0),
        shape=tuple(getattr(var.aval, "shape", ())),
        dtype=str(getattr(var.aval, "dtype", "")),
        bytes=nbytes(var.aval),
        flops=flops(eqn),
        moved_bytes=moved_bytes(eqn),
        primitive=chain[-1].primitive,
        in_avals=tuple(v.aval for v in chain[-1].invars),
        params=chain[-1].params,
        collective=not MARKS.isdisjoint(names),
        gathered_parameter=GATHERED_PARAMETER in names,
    )


def _kernels(eqn: Any, position: int) -> list[str]:
    """Return the names of the kernels that run again if an output of a custom rule is recomputed.

    A policy saves nothing inside of a custom rule, so all of its outputs that a kernel takes part
    in have to be saved, or the kernel runs again: the output of an attention kernel, and the
    normalizers that are cut out of another result of it.
    """
    found: list[str] = []
    for body in bodies(eqn):
        if body.kind == "rule" and position < len(body.jaxpr.outvars):
            _needed_kernels(body.jaxpr, [body.jaxpr.outvars[position]], found)
    return found


def _needed_kernels(jaxpr: Any, outs: Sequence[Any], found: list[str]) -> None:
    """Add the names of the kernels in a body that some of its outputs need."""
    needed = {v for v in outs if not isinstance(v, jec.Literal)}
    for eqn in reversed(jaxpr.eqns):
        wanted = [v in needed for v in eqn.outvars]
        if not any(wanted):
            continue
        if is_kernel(eqn):
            found.append(primitive_name(eqn))
        for body in bodies(eqn):
            chosen = list(body.jaxpr.outvars)
            if body.kind in ("call", "rule") and len(chosen) == len(wanted):
                chosen = [v for v, w in zip(chosen, wanted, strict=True) if w]
            _needed_kernels(body.jaxpr, chosen, found)
        needed |= {v for v in eqn.invars if not isinstance(v, jec.Literal)}


def effect_of(eqn: Any, path: Path, *, full: bool = True) -> Value:
    """Describe an equation without outputs, such as a debug callback, to a policy's selectors."""
    return Value(
        primitives=(primitive_name(eqn),),
        module="/".join(path),
        source=source_of(eqn) if full else ("", 0),
        dtype="",
        primitive=eqn.primitive,
        in_avals=tuple(v.aval for v in eqn.invars),
        params=eqn.params,
    )


def values(program: Program, *, full: bool = True) -> Iterator[Value]:
    """Yield every intermediate value of a program, including values inside loops and branches."""
    yield from _values(program.eqns, program.base, full)


def _values(eqns: Sequence[Any], base: Path, full: bool) -> Iterator[Value]:
    names = aliases(eqns)
    computed = {v for e in eqns for v in e.outvars if checkpoint_name_of(e) is None}
    for eqn in eqns:
        path = module_path(eqn, base)
        name = checkpoint_name_of(eqn)
        if name is None:
            for i, var in enumerate(eqn.outvars):
                yield value_of(eqn, i, path, names.get(var, ()), full=full)
        elif isinstance(eqn.invars[0], jec.Literal) or eqn.invars[0] in names.keys() - computed:
            yield value_of(eqn, 0, path, (name,), full=full)  # a named input of the program
        for body in bodies(eqn):
            if body.kind != "rule":
                yield from _values(body.jaxpr.eqns, path, full)


def aliases(eqns: Sequence[Any]) -> dict[Any, tuple[str, ...]]:
    """Map each variable that carries a checkpoint name to its names.

    `checkpoint_name` is the identity, so its input and its output are one value that has the name.
    JAX's own policies treat the two separately: they save the output and recompute the input, even
    if a derivative rule reads the input (see `remat_kit._apply.labels`).
    """
    names: dict[Any, tuple[str, ...]] = {}
    root: dict[Any, Any] = {}
    for eqn in eqns:
        if not is_identity(eqn) or isinstance(eqn.invars[0], jec.Literal):
            continue
        source = root.get(eqn.invars[0], eqn.invars[0])
        root[eqn.outvars[0]] = source
        name = checkpoint_name_of(eqn)
        if name is not None:
            names[source] = (*names.get(source, ()), name)
    return names


@dataclasses.dataclass(frozen=True)
class Value:
    """One intermediate value of a function, with the properties that selectors read.

    A policy callable of `jax.checkpoint` sees only ``primitive``, ``in_avals`` and ``params``.

    >>> from remat_kit import module
    >>> v = Value(primitives=("dot_general",), module="GPT/block_0/mlp/up", bytes=4096)
    >>> module("*/mlp").matches(v)
    True

    Attributes:
      primitives: the name of the primitive that computes the value. For a call (``jit``,
        ``custom_jvp_call``) also the names of the primitives inside the call that compute this
        output, outermost first; for a custom rule, the kernels follow that this output needs.
      names: the checkpoint names of the value.
      module: the path of the module that computes the value, such as ``"GPT/block_0/attn/out"``,
        or ``""`` outside of all modules.
      source: the file and line that compute the value; ``("", 0)`` if they are unknown.
      shape: the sizes of the axes, as in `jax.Array.shape`.
      dtype: the name of the element type, such as ``"bfloat16"``.
      bytes: the size of the whole array, in bytes.
      flops: the floating-point operations of the equation that computes the value.
      moved_bytes: the bytes that this equation reads and writes.
      primitive: the primitive itself, the innermost if ``primitives`` lists several. This and the
        next two attributes take no part in ``==`` and ``hash``.
      in_avals: the abstract values of the inputs of ``primitive``.
      params: the parameters of ``primitive``.
      collective: whether a collective makes the value in a program that XLA partitions, as far as
        the shardings of the program are known.
      gathered_parameter: whether it is a parameter that the devices gather.
    """

    primitives: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    module: str = ""
    source: tuple[str, int] = ("", 0)
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    bytes: int = 0
    flops: float = 0.0
    moved_bytes: float = 0.0
    primitive: Any = dataclasses.field(default=None, compare=False, repr=False)
    in_avals: tuple[Any, ...] = dataclasses.field(default=(), compare=False, repr=False)
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    collective: bool = False
    gathered_parameter: bool = False
