"""One compiled program read back in full: what it holds, what it repeats, how long it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_kit import _hlo
from remat_kit._anatomy import RECOMPUTE, Origin, Peak, Timeline, anatomy
from remat_kit._dataflow import Gradient
from remat_kit._hlo import RecomputedOps
from remat_kit._liveness import Schedule
from remat_kit._residuals import Residual
from remat_kit._roofline import Cost, Estimate, estimate
from remat_kit._target import Compiled, target
from remat_kit._verdict import Verdict, natural_residuals, verdicts
from remat_kit._whatif import Counterfactual, counterfactuals


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a compiled gradient says about itself.

    Attributes:
        peak: the step at which it holds the most, and what it holds then.
        timeline: what it holds over its schedule.
        ops: what it computes twice.
        regions: what became of each checkpoint region.
        estimate: how long it takes on its chip.
        what_if: for the modules that hold most at the peak, what recomputing them would do.
        schedule: its steps and buffers.
        origins: where its instructions come from, by name.
    """

    peak: Peak
    timeline: Timeline
    ops: RecomputedOps
    regions: tuple[Verdict, ...]
    estimate: Estimate
    what_if: tuple[Counterfactual, ...]
    schedule: Schedule = dataclasses.field(repr=False)
    origins: Mapping[str, Origin] = dataclasses.field(repr=False, hash=False)

    def recomputed(self) -> list[dict[str, Any]]:
        """Return what the compiled program computes twice, by primitive and module, as plain data.

        FLOPs, bytes and seconds are those of the instructions that bear the name, loops counted in
        full. What is ``fused`` bears none: it runs inside an instruction that is there anyway.
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
        """Return the estimates of a step's time, each under its name, and the measured one."""
        return self.estimate.to_json() | {"measured": measured}


@dataclasses.dataclass(frozen=True)
class Traced:
    """A gradient as it was traced, to read its compiled programs by.

    Attributes:
        gradient: the trace.
        residuals: what it keeps.
        natural: what it would keep without checkpoint regions; None where that is unknown.
    """

    gradient: Gradient
    residuals: Sequence[Residual]
    natural: Sequence[Residual] | None

    @staticmethod
    def of(
        gradient: Gradient,
        residuals: Sequence[Residual],
        fn: Callable[..., Any],
        args: Sequence[Any],
        argnums: int | Sequence[int],
    ) -> Traced:
        """Trace ``fn`` once more without its regions, where it has any."""
        if not gradient.primal.regions:
            return Traced(gradient, residuals, residuals)
        return Traced(gradient, residuals, natural_residuals(fn, args, argnums))


def read(compiled: Compiled, traced: Traced) -> Reading | None:
    """Read a compiled gradient back; None where the compiler gave no program.

    Args:
        compiled: as `_target.compile_program` gives it.
        traced: the gradient that was compiled.
    """
    if compiled.hlo_text is None:
        return None
    memory = compiled.memory
    chip = target(memory.target)
    program = _hlo.parse(compiled.hlo_text)
    ops = _hlo.recomputed_ops(program)
    parts = anatomy(program, memory.peak_bytes, platform=chip.platform)
    time = estimate(program, chip, parts.origins, chip_name=chip.name)
    found = verdicts(
        traced.gradient, traced.residuals, traced.natural, ops, memory, time, parts.origins
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
    )
