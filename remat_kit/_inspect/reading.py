"""Read a compiled program in full: its peak, its duplicates and its time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from remat_kit._chip.compile import Compiled
from remat_kit._compiled import duplicates as _duplicates
from remat_kit._compiled import hlo as _hlo
from remat_kit._compiled.collectives import Collective, collectives, link_times
from remat_kit._compiled.duplicates import RecomputedOps
from remat_kit._compiled.liveness import Schedule
from remat_kit._compiled.peak import RECOMPUTE, Origin, Peak, Timeline, anatomy
from remat_kit._compiled.roofline import Cost, Estimate, estimate
from remat_kit._inspect.residuals import Residual
from remat_kit._inspect.verdict import Verdict, natural_residuals, verdicts
from remat_kit._inspect.whatif import Counterfactual, counterfactuals
from remat_kit._program.steps.gradient import Gradient
from remat_kit._program.steps.losses import LossGradient


@dataclasses.dataclass(frozen=True)
class Reading:
    """Everything that a compiled gradient tells about itself.

    Attributes:
        peak: the step with the most live bytes, and the buffers that are live then.
        timeline: live bytes over the schedule.
        ops: the operations that it computes twice.
        regions: what the compiler did with each checkpoint region.
        estimate: how long it takes on its chip.
        what_if: the predicted effect of recomputing each of the modules that hold most at the peak.
        schedule: its steps and buffers.
        origins: the origin of each instruction, by name.
        collectives: the collectives that it runs, if it is partitioned over several devices.
    """

    peak: Peak
    timeline: Timeline
    ops: RecomputedOps
    regions: tuple[Verdict, ...]
    estimate: Estimate
    what_if: tuple[Counterfactual, ...]
    schedule: Schedule = dataclasses.field(repr=False)
    origins: Mapping[str, Origin] = dataclasses.field(repr=False, hash=False)
    collectives: tuple[Collective, ...] = ()

    def recomputed(self) -> list[dict[str, Any]]:
        """Return what the compiled program computes twice, by primitive and module, as plain data.

        FLOPs, bytes and seconds are those of the instructions that carry the name, with loops
        counted in full. A ``fused`` operation has no instruction of its own: it runs inside an
        instruction that is there anyway.
        """
        found = []
        for state, ops in (("kept", self.ops.ops), ("removed", self.ops.unmatched)):
            for op in ops:
                cost = self.estimate.by_place.get((RECOMPUTE, op.module, op.primitive))
                plain = dataclasses.asdict(op)
                plain["state"] = "fused" if state == "kept" and cost is None else state
                there = cost if cost is not None and state == "kept" else Cost()
                plain |= {"flops": there.flops, "bytes": there.bytes, "seconds": there.seconds}
                found.append(plain)
        return sorted(found, key=lambda r: (-r["flops"], -r["bytes"]))

    def step_seconds(self, measured: float | None = None) -> dict[str, Any]:
        """Return the estimates of the step time by name, and the measured time."""
        return self.estimate.to_json() | {"measured": measured}


@dataclasses.dataclass(frozen=True)
class TracedReading:
    """A traced gradient, which the readings of its compiled programs refer to.

    Attributes:
        gradient: the trace.
        residuals: the values that it saves.
        natural: the values that it would save without checkpoint regions; None if unknown.
    """

    gradient: Gradient
    residuals: Sequence[Residual]
    natural: Sequence[Residual] | None

    @staticmethod
    def of(part: LossGradient, residuals: Sequence[Residual]) -> TracedReading:
        """Trace a loss once more without its regions, if it has any."""
        gradient = part.gradient
        if not gradient.primal.regions:
            return TracedReading(gradient, residuals, residuals)
        axes = None if part.loss is None else part.loss.axes
        natural = natural_residuals(part.fn, part.args, part.argnums, axes)
        return TracedReading(gradient, residuals, natural)


def read(compiled: Compiled, traced: Sequence[TracedReading]) -> Reading | None:
    """Read a compiled gradient or step; return None if the compiler gave no program.

    Args:
        compiled: as `compile_program` returns it.
        traced: the gradient that was compiled, or those of all losses of a step.
    """
    if compiled.hlo_text is None:
        return None
    memory, chip = compiled.memory, compiled.chip
    program = _hlo.parse(compiled.hlo_text)
    ops = _duplicates.recomputed_ops(program)
    parts = anatomy(program, memory.peak_bytes, platform=chip.platform)
    moves = collectives(program, parts.origins, chip, compiled.meshes)
    time = estimate(program, chip, parts.origins, chip_name=chip.name, **link_times(moves))
    found = tuple(
        verdict
        for one in traced
        for verdict in verdicts(
            one.gradient, one.residuals, one.natural, ops, memory, time, parts.origins
        )
    )
    return Reading(
        peak=parts.peak,
        timeline=parts.timeline,
        ops=ops,
        regions=found,
        estimate=time,
        what_if=counterfactuals(parts.schedule, parts.origins, time),
        schedule=parts.schedule,
        origins=parts.origins,
        collectives=moves,
    )
