"""Explain the peak: which buffers are live then, which module computed them and in which phase.

`liveness` computes when each buffer is live. This module adds the module path, the source line and
the phase (forward, recompute, backward, update) from the metadata of the instruction that computes
the buffer. An instruction that the compiler added, such as a copy or a change of layout, has no
metadata; it gets the origin of its operands.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remat_kit._backend.interface import Backend
from remat_kit._compiled import liveness as _liveness
from remat_kit._compiled.duplicates import module_and_primitive, pieces_of
from remat_kit._compiled.hlo import MARK, HloModule, Instruction, is_xla_remat
from remat_kit._compiled.liveness import ARGUMENT, DEVICE, FUSED, TEMPORARY, Buffer, Schedule
from remat_kit._program.paths import roll_up

FORWARD, RECOMPUTE, BACKWARD, UPDATE, OTHER = "forward", "recompute", "backward", "update", "other"


PHASES = (FORWARD, RECOMPUTE, BACKWARD, UPDATE, OTHER)


# -- where an instruction comes from ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where an instruction comes from.

    Attributes:
        module: the module path. Outside of every module it is the name of the function, and for an
            argument the name of the argument; empty if nothing is known.
        primitive: the JAX primitive, or XLA's opcode if there is none.
        source: ``file:line`` of the user's code, or the empty string.
        phase: one of ``PHASES``.
        pieces: the loop over pieces that it is in: ``"16 pieces of axis 0"``.
    """

    module: str
    primitive: str
    source: str
    phase: str
    pieces: str = ""


def origins(program: HloModule) -> dict[str, Origin]:
    """Return the origin of every scheduled instruction, by its name."""
    tracer = _Tracer(program)
    tracer.computation(program.entry)
    return tracer.found


class _Tracer:
    def __init__(self, program: HloModule):
        self.program = program
        self.found: dict[str, Origin] = {}

    def computation(self, name: str, around: Origin | None = None) -> None:
        instructions = self.program.computations[name]
        for instruction in instructions:
            self.found[instruction.name] = self.origin(instruction, around)
            for body in instruction.bodies:
                self.computation(body, self.found[instruction.name])
        # Some instructions, such as a broadcast zero, have no module; use that of their reader.
        readers: dict[str, str] = {}
        for instruction in reversed(instructions):
            mine = self.found[instruction.name]
            if not mine.module and instruction.name in readers:
                reader = self.found[readers[instruction.name]]
                mine = dataclasses.replace(mine, module=reader.module)
                if not mine.source:
                    mine = dataclasses.replace(mine, source=reader.source)
                self.found[instruction.name] = mine
            if mine.module:
                for operand in instruction.operands:
                    readers[operand] = instruction.name

    def origin(self, instruction: Instruction, around: Origin | None) -> Origin:
        makers = [self.found[o] for o in instruction.operands if o in self.found]
        told = self.told(instruction)
        if instruction.opcode == "parameter":
            if around is None:
                return Origin(told.op_name.replace("\\'", "'"), ARGUMENT, told.source, OTHER)
            return dataclasses.replace(around, primitive="parameter")
        module, primitive = module_and_primitive(told.op_name) if told.op_name else ("", "")
        near = next((m for m in makers if m.module), around)
        if primitive in _PLUMBING:
            module = max(
                [module, *self.inside(instruction), near.module if near else ""], key=_depth
            )
        if not module and told.op_name:
            module = _function(told.op_name)
        elif not told.op_name and near is not None:
            module = near.module
        return Origin(
            module,
            primitive or instruction.opcode,
            told.source or (near.source if near and not told.op_name else ""),
            _phase(instruction, told.op_name, [m.phase for m in makers], around),
            pieces_of(told.op_name) or (around.pieces if around else ""),
        )

    def inside(self, instruction: Instruction) -> list[str]:
        """Return the module paths of the instructions that are fused into an instruction."""
        if instruction.opcode not in FUSED or not instruction.called:
            return []
        body = self.program.computations.get(instruction.called[0], ())
        return [module_and_primitive(i.op_name)[0] for i in body if i.op_name]

    def told(self, instruction: Instruction) -> Instruction:
        """Return the instruction with the metadata: itself, or one that was fused into it."""
        if instruction.op_name or instruction.opcode not in FUSED or not instruction.called:
            return instruction
        inside = self.program.computations.get(instruction.called[0], ())
        return next((i for i in reversed(inside) if i.op_name), instruction)


# A loop stacks the values of its body and takes slices of them under its own name, so the module
# comes from the operands of these primitives.
_PLUMBING = frozenset(
    {"dynamic_update_slice", "dynamic_slice", "while", "scan", "broadcast_in_dim"}
)


def _depth(module: str) -> int:
    return module.count("/") + bool(module)


def _function(op_name: str) -> str:
    """Return the name of the function whose program this is.

    >>> _function("jit(loss_fn)/jvp()/log")
    'loss_fn'
    """
    found = re.match(r"jit\(([^()]*)\)", op_name)
    return found.group(1) if found else ""


def _phase(
    instruction: Instruction, op_name: str, operands: Sequence[str], around: Origin | None
) -> str:
    if MARK in op_name or is_xla_remat(instruction.name):
        return RECOMPUTE
    if "transpose(" in op_name:
        return BACKWARD
    if "jvp(" in op_name:
        return FORWARD
    if op_name and any(phase in (BACKWARD, UPDATE) for phase in operands):
        return UPDATE
    if op_name:
        return around.phase if around else FORWARD
    # An instruction of the compiler belongs to the latest phase of its operands.
    order = [p for p in (UPDATE, BACKWARD, RECOMPUTE, FORWARD) if p in operands]
    return order[0] if order else (around.phase if around else OTHER)


# -- the peak -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Held:
    """One buffer that is live at the peak.

    Attributes:
        bytes: its size, including the padding of tiles.
        shape: as in ``f32[64,112,112,64]``.
        kind: ``argument``, ``output`` or ``temporary``.
        module, source, phase, op, pieces: the origin of the instruction that computes it; see
            `Origin`.
    """

    bytes: int
    shape: str
    kind: str
    module: str
    source: str
    phase: str
    op: str
    pieces: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Peak:
    """The step at which a program needs the most memory of the device.

    Attributes:
        bytes: arguments, outputs and temporaries that are live at this step, by the walk.
        compiler_bytes: the compiler's own figure: arguments + outputs - aliased + temporaries.
        phase: the phase of this step.
        step, steps: the position of this step, and the number of steps.
        module: the module of the instruction that runs at this step.
        pieces: the loop over pieces that this instruction is in, or the empty string.
        held: the buffers that are live, largest first.
    """

    bytes: int
    compiler_bytes: int | None
    phase: str
    step: int
    steps: int
    module: str
    held: tuple[Held, ...] = dataclasses.field(repr=False)
    pieces: str = ""

    @property
    def packing_bytes(self) -> int | None:
        """Bytes that the compiler needs beyond the live buffers, for gaps and scratch memory.

        Negative if the compiler shares memory that the walk counts twice.
        """
        return None if self.compiler_bytes is None else self.compiler_bytes - self.bytes

    @property
    def attributed_fraction(self) -> float:
        """Fraction of the bytes that have a module path or the name of an argument."""
        total = sum(h.bytes for h in self.held)
        return sum(h.bytes for h in self.held if h.module) / total if total else 1.0

    def by_module(self) -> dict[str, int]:
        """Return bytes by module path, largest first."""
        return _sums((h.module, h.bytes) for h in self.held)

    def by_phase(self) -> dict[str, int]:
        """Return bytes by the phase that computed them; arguments and outputs are separate."""
        return _sums((h.phase if h.kind == TEMPORARY else h.kind, h.bytes) for h in self.held)

    def to_json(self, limit: int = 200) -> dict[str, Any]:
        """Return plain values: the ``limit`` largest buffers, and how many were left out."""
        return {
            "bytes": self.bytes,
            "compiler_bytes": self.compiler_bytes,
            "packing_bytes": self.packing_bytes,
            "phase": self.phase,
            "step": self.step,
            "steps": self.steps,
            "module": self.module,
            "pieces": self.pieces,
            "attributed_fraction": self.attributed_fraction,
            "by_phase": self.by_phase(),
            "buffers": [h.to_json() for h in self.held[:limit]],
            "buffers_left_out": max(0, len(self.held) - limit),
        }


def _sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for key, size in pairs:
        found[key] += size
    return dict(sorted(found.items(), key=lambda x: -x[1]))


# -- the timeline -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Live bytes over the schedule, sampled at the maximum of each interval.

    Attributes:
        steps: the positions of the samples in the schedule.
        bytes: live bytes on the device at each sample, including arguments and outputs.
        phases: the phase of the instruction that runs at each sample.
        resident_bytes: bytes of arguments and outputs, which are live at every step.
        by_phase: for each phase, the live bytes of the temporaries that it computed, at each
            sample.
        by_module: the same for the modules with the most bytes, then ``(other)``.
    """

    steps: tuple[int, ...]
    bytes: tuple[int, ...]
    phases: tuple[str, ...]
    resident_bytes: int
    by_phase: Mapping[str, tuple[int, ...]] = dataclasses.field(repr=False, hash=False)
    by_module: Mapping[str, tuple[int, ...]] = dataclasses.field(repr=False, hash=False)

    @functools.cached_property
    def phase_peaks(self) -> dict[str, int]:
        """The most bytes that are live while each phase runs, in the order of the phases."""
        found: dict[str, int] = {}
        for phase in PHASES:
            sizes = [b for b, p in zip(self.bytes, self.phases, strict=True) if p == phase]
            if sizes:
                found[phase] = max(sizes)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return {
            "steps": list(self.steps),
            "bytes": list(self.bytes),
            "phases": list(self.phases),
            "resident_bytes": self.resident_bytes,
            "phase_peaks": self.phase_peaks,
            "by_phase": {k: list(v) for k, v in self.by_phase.items()},
            "by_module": {k: list(v) for k, v in self.by_module.items()},
        }


@dataclasses.dataclass(frozen=True)
class Anatomy:
    """The memory of a compiled program: its schedule, and the origin of each value."""

    schedule: Schedule = dataclasses.field(repr=False)
    origins: Mapping[str, Origin] = dataclasses.field(repr=False, hash=False)
    peak: Peak
    timeline: Timeline = dataclasses.field(repr=False)


_POINTS = 600


_GROUPS = 8


REST = "(other)"


def anatomy(
    program: HloModule, compiler_bytes: int | None = None, *, platform: str = "cpu"
) -> Anatomy:
    """Analyse the memory of a compiled program.

    Args:
        program: as `hlo.parse` returns it.
        compiler_bytes: the peak that the compiler reports, in bytes; shown next to the walk's.
        platform: ``cpu``, ``cuda`` or ``tpu``.
    """
    backend = Backend(platform)
    schedule = _liveness.schedule(
        program,
        reuses_outputs=backend.reuses_outputs,
        through_views=backend.overwrites_through_views,
    )
    found = origins(program)
    step = schedule.peak_step
    running = running_phases(schedule, found)
    held = tuple(_held(buffer, found) for buffer in schedule.alive_at(step))
    peak = Peak(
        bytes=schedule.peak_bytes,
        compiler_bytes=compiler_bytes,
        phase=running[step] if running else OTHER,
        step=step,
        steps=len(schedule.steps),
        module=running_module(schedule, found, step),
        held=held,
        pieces=_running_origin(schedule, found, step).pieces,
    )
    return Anatomy(schedule, found, peak, _timeline(schedule, found, running))


def _held(buffer: Buffer, found: Mapping[str, Origin]) -> Held:
    o = origin_of(buffer, found)
    shape = str(buffer.array)
    of = (o.module, o.source, o.phase, o.primitive, o.pieces)
    return Held(buffer.bytes, shape, buffer.kind, *of)


def origin_of(buffer: Buffer, found: Mapping[str, Origin]) -> Origin:
    """Return the origin of a buffer; of several, the one deepest in the model.

    The zeros that a loop starts with are added by the compiler and have no phase.
    """
    if buffer.kind == ARGUMENT:
        return next(found[m.name] for m in buffer.makers if m.opcode == "parameter")
    makers = (found[m.name] for m in buffer.makers)
    return max(makers, key=lambda o: (_depth(o.module), o.phase != OTHER))


def running_phases(schedule: Schedule, found: Mapping[str, Origin]) -> list[str]:
    """Return the phase of each step; a step of the compiler has the phase of the step before."""
    out: list[str] = []
    for instruction in schedule.steps:
        phase = found[instruction.name].phase
        own = not instruction.op_name and instruction.opcode not in FUSED
        out.append(out[-1] if out and (own or phase == OTHER) else phase)
    known = next((phase for phase in out if phase != OTHER), OTHER)
    return [known if phase == OTHER else phase for phase in out]


def running_module(schedule: Schedule, found: Mapping[str, Origin], step: int) -> str:
    """Return the module that runs at a step; the compiler's steps have that of the step before."""
    return _running_origin(schedule, found, step).module


def _running_origin(schedule: Schedule, found: Mapping[str, Origin], step: int) -> Origin:
    ran = reversed(schedule.steps[: step + 1])
    return next((found[i.name] for i in ran if i.op_name), Origin("", "", "", OTHER))


def _timeline(schedule: Schedule, found: Mapping[str, Origin], running: Sequence[str]) -> Timeline:
    temporary = schedule.temporary_bytes
    points = _points(temporary)
    base = schedule.base_bytes
    parts: dict[str, dict[str, list[int]]] = {"phase": {}, "module": {}}
    live = [
        b
        for b in schedule.buffers
        if b.kind == TEMPORARY and b.space == DEVICE and not b.within and b.bytes
    ]
    made_by = [origin_of(b, found) for b in live]
    weight: dict[str, int] = defaultdict(int)
    at_peak = schedule.peak_step
    for b, origin in zip(live, made_by, strict=True):
        at = any(first <= at_peak <= last for first, last in b.alive)
        weight[_group(origin)] += b.bytes * at
    top = set(sorted(weight, key=lambda g: -weight[g])[:_GROUPS])
    for b, origin in zip(live, made_by, strict=True):
        group = _group(origin)
        for kind, key in (("phase", origin.phase), ("module", group if group in top else REST)):
            change = parts[kind].setdefault(key, [0] * (len(temporary) + 1))
            for first, last in b.alive:
                change[first] += b.bytes
                change[min(last + 1, len(temporary))] -= b.bytes
    by_phase = {p: _sampled(parts["phase"][p], points) for p in PHASES if p in parts["phase"]}
    names = sorted(parts["module"], key=lambda g: (g == REST, -weight[g]))
    return Timeline(
        steps=tuple(points),
        bytes=tuple(base + temporary[p] for p in points),
        phases=tuple(running[p] for p in points),
        resident_bytes=base,
        by_phase=by_phase,
        by_module={g: _sampled(parts["module"][g], points) for g in names},
    )


def _points(temporary: Sequence[int]) -> list[int]:
    """Divide the schedule into at most ``_POINTS`` intervals; return the fullest step of each."""
    n = len(temporary)
    parts = min(n, _POINTS)
    bounds = [i * n // parts for i in range(parts + 1)] if n else []
    return [
        max(range(a, b), key=lambda s: (temporary[s], -s)) for a, b in itertools.pairwise(bounds)
    ]


def _sampled(change: Sequence[int], points: Sequence[int]) -> tuple[int, ...]:
    out, total, step = [], 0, 0
    for point in points:
        while step <= point:
            total += change[step]
            step += 1
        out.append(total)
    return tuple(out)


def _group(origin: Origin) -> str:
    """Return the module path of a block, with the numbers of repeated blocks left out.

    What is in a loop over pieces is a group of its own: ``GPT/head, 16 pieces of axis 0``.
    """
    module = "/".join(roll_up(origin.module).split("/")[:3]) or "(unknown)"
    return with_pieces(module, origin.pieces)


def with_pieces(module: str, pieces: str) -> str:
    """Return a module together with the loop over pieces in it, as reports name them.

    >>> with_pieces("GPT/head", "16 pieces of axis 0"), with_pieces("GPT/head", "")
    ('GPT/head, 16 pieces of axis 0', 'GPT/head')
    """
    return f"{module}, {pieces}" if pieces else module
