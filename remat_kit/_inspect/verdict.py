"""Decide for each checkpoint region whether the compiler kept its rematerialization.

A region asks for operations to be computed twice. The jaxpr of the gradient says which operations
these are. The compiled program says which of them are still there, next to the operations of the
forward pass that compute the same values. If an operation is missing, the compiler merged the two
again, and the region does not save the memory that it was meant to save.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

import jax
import jax.extend.core as jec

from remat_kit import _jax
from remat_kit._chip.memory import Memory
from remat_kit._compiled.duplicates import RecomputedOps
from remat_kit._compiled.peak import RECOMPUTE, Origin
from remat_kit._compiled.roofline import Estimate
from remat_kit._inspect import residuals as _residuals
from remat_kit._inspect.recomputed import duplicates, loops_of, region_paths
from remat_kit._inspect.residuals import Residual
from remat_kit._program import program as _program
from remat_kit._program.steps import gradient as _gradient
from remat_kit._program.steps.gradient import Gradient
from remat_kit._units import format_bytes

EFFECTIVE, PARTLY, UNDONE = "effective", "partly", "undone by CSE"


OFFLOAD_DROPPED, COMPILER_ADDED, IDLE = "offload dropped", "compiler-added", "recomputes nothing"


_KEPT_ENOUGH, _KEPT_AT_ALL = 0.75, 0.05


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the compiler did with one checkpoint region.

    Attributes:
        module: the module path of the region; empty for a region around everything.
        verdict: ``effective``, ``partly``, ``undone by CSE``, ``offload dropped``,
            ``compiler-added`` (XLA's own rematerialization, no region of the program) or
            ``recomputes nothing``.
        saved_bytes: how many bytes more would be saved without regions; None if unknown.
        recomputed_flops: floating-point operations that the region asks for a second time.
        recomputed_seconds: the roofline time of what the compiled program recomputes there.
        kept_fraction: the fraction of the recomputation, by FLOPs, that the program still does.
        message: the verdict in a sentence.
        pieces: if the region is a loop over pieces, which: ``"16 pieces of axis 0"``.
    """

    module: str
    verdict: str
    saved_bytes: int | None
    recomputed_flops: float
    recomputed_seconds: float
    kept_fraction: float
    message: str
    pieces: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The operations that a region asks to be recomputed, by primitive.

    Attributes:
        counts: how many operations. An operation that nested regions recompute several times
            counts each time.
        flops: their floating-point operations.
        originals: how many operations of the forward pass they repeat.
    """

    counts: Counter[str] = field(default_factory=Counter)
    flops: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    originals: Counter[str] = field(default_factory=Counter)


def verdicts(
    gradient: Gradient,
    residuals: Sequence[Residual],
    natural: Sequence[Residual] | None,
    ops: RecomputedOps,
    memory: Memory,
    estimate: Estimate,
    origins: Mapping[str, Origin],
) -> tuple[Verdict, ...]:
    """Judge every checkpoint region of a gradient by the program that was compiled from it.

    Args:
        gradient: the traced gradient.
        residuals: the values that it saves.
        natural: the values that it would save without regions; None if unknown.
        ops: the operations that the compiled program computes twice.
        memory: the memory of the compiled program.
        estimate: its time.
        origins: the origins of its instructions.
    """
    regions = tuple(dict.fromkeys(region_paths(gradient).values()))
    loops = loops_of(gradient)
    asked = _asked(gradient)
    place = _Places(regions, _recomputed_in(gradient))
    present = _by_region(((op.module, op.primitive, op.count) for op in ops.ops), place)
    forward = _by_region(((*key, count) for key, count in ops.forward.items()), place)
    saved = _saved(residuals, natural, place)
    slices = _in_slices(residuals)
    seconds: dict[str, float] = defaultdict(float)
    for (phase, module, _), cost in estimate.by_place.items():
        if phase == RECOMPUTE and (region := place.of(module)) is not None:
            seconds[region] += cost.seconds
    dropped = memory.drops_offload(sum(r.bytes for r in residuals if r.memory != "device"))
    found = []
    for region in regions:
        wanted = asked.get(region, _Asked())
        kept = _kept_fraction(wanted, present[region], forward[region])
        offloads = sum(
            r.bytes for r in residuals if r.memory != "device" and place.of(r.module) == region
        )
        verdict, message = _judge(wanted, kept, offloads if dropped else 0, memory)
        flops = float(sum(wanted.flops.values()))
        pieces = loops.get(region, "")
        # What the pieces would save as a whole is unknown, because the loop stays without regions.
        saving = None if natural is None or pieces else saved[region]
        if pieces:
            message = f"{pieces}; {message}"
        if region in slices:
            message = f"{message}; {slices[region]}"
        found.append(
            Verdict(region, verdict, saving, flops, seconds[region], kept, message, pieces)
        )
    return (*found, *_compiler_added(ops, origins))


def _recomputed_in(gradient: Gradient) -> dict[str, str]:
    """Map each module to the region that recomputes it, or the largest part of it, by FLOPs.

    The path of a region is what the paths of its operations have in common, so that the path of a
    smaller region may be a longer prefix of the module.
    """
    paths = region_paths(gradient)
    flops: dict[tuple[str, str], float] = defaultdict(float)
    for duplicate in duplicates(gradient):
        twin = duplicate.twin
        region = paths.get(twin.numbers[0], twin.module)
        flops[twin.module, region] += duplicate.op.flops
    return {module: region for (module, region), _ in sorted(flops.items(), key=lambda x: x[1])}


class _Places:
    """Finds the region of a module path: the deepest one whose path is a prefix of it.

    Args:
        regions: the paths of all regions.
        known: the regions of modules for which this does not hold.
    """

    def __init__(self, regions: Sequence[str], known: Mapping[str, str]):
        self.regions = sorted(regions, key=len, reverse=True)
        self.known: dict[str, str | None] = dict(known)

    def of(self, module: str) -> str | None:
        if module not in self.known:
            inside = (r for r in self.regions if not r or f"{module}/".startswith(f"{r}/"))
            self.known[module] = next(inside, None)
        return self.known[module]


def _asked(gradient: Gradient) -> dict[str, _Asked]:
    paths = region_paths(gradient)
    firsts = Counter(op.numbers[0] for op in gradient.ops() if op.numbers and not op.recomputed)
    found: dict[str, _Asked] = {}
    for duplicate in duplicates(gradient):
        twin, number = duplicate.twin, duplicate.twin.numbers[0]
        asked = found.setdefault(paths.get(number, twin.module), _Asked())
        asked.counts[twin.primitive] += 1
        asked.flops[twin.primitive] += duplicate.op.flops
        asked.originals[twin.primitive] += firsts.pop(number, 0)
    return found


def _by_region(ops: Iterable[tuple[str, str, int]], place: _Places) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for module, primitive, count in ops:
        region = place.of(module)
        if region is not None:
            found[region][primitive] += count
    return found


def _saved(
    residuals: Sequence[Residual], natural: Sequence[Residual] | None, place: _Places
) -> Counter[str]:
    """Return, for each region, the bytes saved without regions minus the bytes saved with them."""
    saved: Counter[str] = Counter()
    for sign, found in ((1, natural or ()), (-1, residuals)):
        for r in found:
            region = place.of(r.module)
            if region is not None and not r.is_input and r.memory == "device":
                saved[region] += sign * r.bytes
    return saved


def _in_slices(residuals: Sequence[Residual]) -> dict[str, str]:
    """Say for each region that saves inputs in slices how many bytes of them a device saves."""
    sizes: Counter[tuple[str, str]] = Counter()
    for r in residuals:
        if found := _residuals.sliced_input(r):
            sizes[found] += r.bytes
    return {
        region: f"its inputs are saved in slices over {axis!r}, {format_bytes(n)} on each device"
        for (axis, region), n in sizes.items()
    }


def _kept_fraction(asked: _Asked, present: Counter[str], forward: Counter[str]) -> float:
    """Return the fraction of the requested operations that the compiled program computes twice.

    The operations are weighted by FLOPs. Operations that only move data do not count, because the
    compiler fuses them at no cost. If the compiler merged equal operations of the forward pass, it
    merges their recomputation as well, and this is not counted against the region.
    """
    total = sum(asked.flops.values())
    if not total:
        return 1.0
    kept = 0.0
    for primitive, flops in asked.flops.items():
        unmerged = min(1.0, forward[primitive] / max(1, asked.originals[primitive]))
        if possible := unmerged * asked.counts[primitive]:
            kept += flops * min(1.0, present[primitive] / possible)
    return kept / total


def _judge(asked: _Asked, kept: float, dropped: int, memory: Memory) -> tuple[str, str]:
    if dropped:
        return OFFLOAD_DROPPED, (
            f"{format_bytes(dropped)} should be offloaded to the host's memory, and the compiled "
            f"program holds {format_bytes(memory.host_bytes or 0)} there in all: the compiler "
            "removed the copies"
        )
    if not sum(asked.flops.values()):
        return IDLE, "the backward pass recomputes nothing in this region"
    percent = f"{100 * kept:.0f} %"
    if kept >= _KEPT_ENOUGH:
        return EFFECTIVE, f"{percent} of the recomputation is in the compiled program"
    if kept >= _KEPT_AT_ALL:
        return PARTLY, (
            f"{percent} of the recomputation is in the compiled program; the compiler merged the "
            "rest with the forward pass and saves its results"
        )
    return UNDONE, (
        "the compiler merged the recomputation with the forward pass, so nothing is recomputed and "
        "no memory is saved; outside a loop a region needs prevent_cse, which is the default"
    )


def _compiler_added(ops: RecomputedOps, origins: Mapping[str, Origin]) -> list[Verdict]:
    counts = Counter(origins[n].module for n in ops.xla_remat if n in origins)
    return [
        Verdict(
            module,
            COMPILER_ADDED,
            None,
            0.0,
            0.0,
            1.0,
            f"XLA's own rematerialization recomputes {count} instructions, because the program "
            "did not fit in memory",
        )
        for module, count in counts.most_common()
    ]


# -- without regions ----------------------------------------------------------------------------


def natural_residuals(
    fn: Callable[..., Any],
    args: Sequence[Any],
    argnums: int | Sequence[int],
    axes: _jax.MappedAxes | None = None,
) -> list[Residual] | None:
    """Return what a loss would save without its checkpoint regions.

    Every region gets a policy that saves everything. The result is None under ``jax_remat3``,
    where the policy of a region cannot be replaced.
    """

    def without(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        changed = jec.jaxpr_as_fun(_program.without_regions(closed))
        return jax.tree.unflatten(jax.tree.structure(shape), changed(*jax.tree.leaves(args)))

    if _jax.remat3():
        return None
    gradient = _gradient.trace_gradient(without, args, argnums, call="inspect", axes=axes)
    return _residuals.residuals_of(gradient)
