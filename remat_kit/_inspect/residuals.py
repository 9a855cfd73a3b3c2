"""Find the residuals of a loss: the values that the backward pass reads, and why they are saved.

`jax.ad_checkpoint.print_saved_residuals` names the line that computed an array. This module also
follows each array through calls, loops and copies to the equation that computes it. It gives a
reason for each: a rule of a policy, the input of a checkpoint region, or no region at all.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from remat_kit import _frames
from remat_kit._apply.labels import read_label
from remat_kit._apply.region import user_name
from remat_kit._policy.algebra import Decision
from remat_kit._program import ops as _ops
from remat_kit._program.flow import Argument, Element, Op, Region, Shard, Stack, Unshard
from remat_kit._program.paths import short_path
from remat_kit._program.steps.gradient import Gradient, trace_gradient


@dataclasses.dataclass(frozen=True)
class Residual:
    """One value that is saved in the forward pass for the backward pass.

    `Report.saved` and `Report.inputs` hold residuals, and `inspect` makes them. This class follows
    `jax.ad_checkpoint.print_saved_residuals`.

    >>> import jax, jax.numpy as jnp
    >>> from remat_kit import inspect
    >>> x = jax.ShapeDtypeStruct((4,), jnp.float32)
    >>> residual = inspect(lambda x: jnp.sum(jnp.exp(x)), x).saved[0]
    >>> residual.primitive, residual.shape, residual.bytes, residual.memory
    ('exp', (4,), 16, 'device')

    Attributes:
        shape: the shape; for a value computed in a loop, the length of the loop comes first.
        dtype: the dtype.
        bytes: the size in bytes, of all iterations together; on one device, if the loss is
            partitioned over several.
        module: path of the module that computes it; empty outside every module.
        source: ``file:line`` of the user's line that computes it.
        primitive: the primitive that computes it; empty for an argument or a constant.
        names: the names that the user gave it with `jax.ad_checkpoint.checkpoint_name`.
        reason: why it is saved.
        memory: ``"device"``, or ``"pinned_host"`` for an offloaded value.
        times: how many loop iterations compute it; 1 outside loops.
        is_input: whether it is an argument or a constant, which is live anyway.
        frames: the frames of the user's code around its line, innermost first, each as
            ``file:line in function``.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    module: str
    source: str
    primitive: str
    names: tuple[str, ...]
    reason: str
    memory: str = "device"
    times: int = 1
    is_input: bool = False
    frames: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return plain | {
            "shape": list(self.shape),
            "names": list(self.names),
            "frames": list(self.frames),
        }

    def __str__(self) -> str:
        dims = ",".join(map(str, self.shape))
        loop = f" × {self.times}" if self.times > 1 else ""
        where = "  ".join(filter(None, (self.module, self.source)))
        return f"{self.dtype}[{dims}]  {self.primitive or 'input'}{loop}  {where}  ({self.reason})"


def saved_residuals(
    fn: Callable[..., Any], args: Sequence[Any], argnums: int | Sequence[int] = 0
) -> list[Residual]:
    """Return the values that the backward pass of a loss needs from its forward pass.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((4,), jnp.float32)
    >>> for r in saved_residuals(lambda x: jnp.sum(jnp.sin(x) * x), (x,)):
    ...     print(r.dtype, r.shape, r.primitive, r.reason)
    float32 (4,) sin needed by the backward pass, outside every region
    float32 (4,) cos needed by the backward pass, outside every region
    float32 (4,)  argument x

    Args:
        fn: called as ``fn(*args)``; returns a real scalar, or a pair of a scalar and anything.
        args: pytrees of arrays or `jax.ShapeDtypeStruct`.
        argnums: which arguments to differentiate.

    Returns:
        One entry for each value, in the order of the program, arguments last. An array that the
        backward pass never reads is left out, because the compiler leaves it out too. A value that
        the forward pass hands to the backward pass twice counts once.

    Raises:
        NotDifferentiableError, UserError: `fn` has no gradient there.
    """
    return residuals_of(trace_gradient(fn, args, argnums, call="saved_residuals"))


def residuals_of(gradient: Gradient) -> list[Residual]:
    """Return the residuals of a traced gradient, arguments and constants last."""
    return [r for _, r in kept_of(gradient)]


def kept_of(gradient: Gradient) -> list[tuple[Op, Residual]]:
    """Return the same residuals, each with the operation of kind "residual" that saves it."""
    why = _Reasons(gradient)
    chosen: dict[tuple[int, bool, int], tuple[Op, Any]] = {}
    least: dict[int, int] = {}
    for op, aval in sorted(gradient.residuals, key=lambda r: r[0].producer.index):
        # A device may save all of a value, and a slice of it for a region.
        number, size = op.inputs[0].number, gradient.nbytes(op, aval)
        if op in gradient.needed and _ops.nbytes(aval):
            chosen.setdefault((number, op.inputs[0].on_host, size), (op, aval))
            least[number] = min(size, least.get(number, size))
    found = [
        (op, _residual(why, op, aval, is_whole=size > least[number]))
        for (number, _, size), (op, aval) in chosen.items()
    ]
    return sorted(found, key=lambda kept: kept[1].is_input)


_FRAMES = 3  # of the user's code; those further out are the same for the whole model


def _frames_of(op: Op) -> tuple[str, ...]:
    """Return the user's frames of an operation, or of the call that contains it."""
    eqn, frame = op.eqn, op.frame
    while eqn is not None:
        if stack := _frames.stack_of(eqn, _FRAMES):
            return tuple(f"{short_path(file)}:{line} in {name}" for file, line, name in stack)
        if frame is None:
            break
        eqn, frame = frame.eqn, frame.parent
    return ()


def _residual(why: _Reasons, op: Op, aval: Any, *, is_whole: bool) -> Residual:
    value, producer = op.inputs[0], op.producer
    argument = why.argument(value.number)
    is_input = argument is not None or producer.kind not in ("equation", "carry", "cond")
    labels, names = why.names(value.number)
    if is_whole:
        labels = [x for x in labels if not x[1].startswith(_SLICED)]
    if argument is not None:
        reason = f"argument {argument}"
    elif is_input:
        reason = "constant"
    else:
        reason = why.reason(op, labels, is_whole=is_whole)
    return Residual(
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        bytes=why.gradient.nbytes(op, aval),
        module="" if is_input else producer.module,
        source="" if is_input else producer.source,
        frames=() if is_input else _frames_of(producer),
        primitive="" if is_input else producer.primitive,
        names=names,
        reason=reason,
        memory=_host_memory(labels) if value.on_host else "device",
        times=1 if is_input else round(producer.times),
        is_input=is_input,
    )


_SLICED = "sliced("  # how the label of an input begins that a region saves in slices


_SLICED_INPUT = re.compile(r"sliced\('(.*)'\), input of region (.*?)(?: and \d+ more)?")


def sliced_input(residual: Residual) -> tuple[str, str] | None:
    """Return the mesh axis and the region of an input that a region saves in slices, or None."""
    found = _SLICED_INPUT.fullmatch(residual.reason)
    if found is None:
        return None
    axis, region = found.groups()
    return axis, "" if region == NO_MODULE else region


NO_MODULE = "(no module)"  # the name of a region outside of all modules, in reasons


_Label = tuple[Decision, str, str]


def _host_memory(labels: Sequence[_Label]) -> str:
    return next((to for _, _, to in labels if to), "pinned_host")


class _Reasons:
    """Explains why values are saved, from the loss divided into its regions."""

    def __init__(self, gradient: Gradient) -> None:
        self.gradient = gradient
        self.numbering = gradient.flow.numbering
        self.inputs: dict[int, list[Region]] = {}
        self.inside: dict[int, Region] = {}
        for region in gradient.primal.regions:
            for number in region.inputs:
                for core in self._cores(number):
                    self.inputs.setdefault(core, []).append(region)
            for op in region.ops:
                for number in op.numbers:
                    self.inside.setdefault(number, region)
        self.outputs = {v.number for v in gradient.outputs}
        self.readers = self._readers()

    def _cores(self, number: int) -> Iterator[int]:
        """Yield the value that a region reads and, in a loop, the arrays it is a slice of."""
        number = self.numbering.core(number)
        yield number
        match self.numbering.key(number):
            case Element(array=array):
                yield from self._cores(array)

    def _readers(self) -> dict[Op, Region]:
        """Map each residual that a region's backward pass reads to that region."""
        readers: dict[Op, Region] = {}
        for op in self.gradient.flow.ops:
            if op.frame.regions:
                for value in op.inputs:
                    if value.origin is not None and value.origin.kind == "residual":
                        readers.setdefault(value.origin, op.frame.regions[0])
        return readers

    def argument(self, number: int) -> str | None:
        """Return the name of the argument that a value or a stack of values is, or None."""
        match self.numbering.key(number):
            case Argument(index):
                return self.gradient.names[index]
            case (
                Element(array=inner)
                | Stack(value=inner)
                | Shard(value=inner)
                | Unshard(value=inner)
            ):
                return self.argument(inner)
        return None

    def names(self, number: int) -> tuple[list[_Label], tuple[str, ...]]:
        """Return the labels of remat_kit and the user's names of a value."""
        given = self.gradient.flow.names
        both = [*given.get(number, ()), *given.get(self.numbering.core(number), ())]
        labels = [x for x in map(read_label, both) if x]
        return labels, tuple(dict.fromkeys(n for n in map(user_name, both) if n is not None))

    def reason(self, op: Op, labels: Sequence[_Label], *, is_whole: bool) -> str:
        core = self.numbering.core(op.inputs[0].number)
        if labels and labels[0][1].startswith(_SLICED) and core in self.inputs:
            return f"{labels[0][1]}, {_input_of(self.inputs[core])}"
        if labels:
            return _rule(*labels[0])
        if core in self.inputs and not is_whole:
            return _input_of(self.inputs[core])
        if core in self.inside:
            return f"kept by the policy of region {_name(self.inside[core])}"
        if op in self.readers:
            return _input_of([self.readers[op]])
        if op.inputs[0].number in self.outputs:
            return "output of the function"
        return "needed by the backward pass, outside every region"


def _rule(decision: Decision, rule: str, destination: str) -> str:
    if decision is Decision.OFFLOAD:
        return f"{rule} to {destination}"
    return f"not in {rule}" if rule.startswith("recompute(") else rule


def _input_of(regions: Sequence[Region]) -> str:
    paths = list(dict.fromkeys(map(_name, regions)))
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"input of region {paths[0]}{more}"


def _name(region: Region) -> str:
    return region.module or NO_MODULE
