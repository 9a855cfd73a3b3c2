"""Predict what recomputing a part of the program would do to the peak, without compiling again.

The liveness walk gives the live bytes at each step of a compiled program, and the origin of each
buffer. The model takes a value that the forward pass computes and the backward pass reads, and
removes it from the steps in between. The inputs that recompute the value must then stay live until
the value is recomputed. The largest sum that remains is the next peak. The answer is a prediction;
`Counterfactual.check` compiles the program to confirm it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_kit._apply import decorate as _decorate
from remat_kit._chip import compile as _compile
from remat_kit._chip.memory import Memory
from remat_kit._chip.target import Target
from remat_kit._compiled.liveness import DEVICE, TEMPORARY, Buffer, Schedule
from remat_kit._compiled.peak import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    Origin,
    origin_of,
    running_module,
    running_phases,
)
from remat_kit._compiled.roofline import Cost, Estimate
from remat_kit._program.paths import roll_up
from remat_kit._units import format_bytes, format_percent


@dataclasses.dataclass(frozen=True)
class Counterfactual:
    """What recomputing the values of some modules would do to the peak.

    Attributes:
        module: path of the modules, with repeated blocks combined; includes their submodules.
        bytes_at_peak: bytes of residuals that they hold at the peak.
        saved_bytes: by how much the peak falls; 0 if another peak is as high.
        extra_flops_fraction: the recomputed FLOPs as a fraction of the forward pass.
        extra_seconds: the time of the recomputation, by the roofline.
        next_peak_bytes, next_phase, next_module: the highest remaining peak.
        policy, at: the arguments of `remat_kit.policy` that recompute these modules.
    """

    module: str
    bytes_at_peak: int
    saved_bytes: int
    extra_flops_fraction: float
    extra_seconds: float
    next_peak_bytes: int
    next_phase: str
    next_module: str
    policy: str
    at: str

    def __str__(self) -> str:
        where = f" of {self.next_module}" if self.next_module else ""
        return (
            f"recompute {self.module}: -{format_bytes(self.saved_bytes)}, "
            f"+{format_percent(self.extra_flops_fraction)} FLOPs; the next peak is "
            f"{format_bytes(self.next_peak_bytes)} in the {self.next_phase}{where}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return dataclasses.asdict(self)

    def check(
        self,
        fn: Callable[..., Any],
        *args: Any,
        target: str | Target,
        argnums: int | Sequence[int] = 0,
    ) -> Memory:
        """Compile the loss with the policy and return the memory that it takes.

        A region saves what its policy saves, even if the compiler would have fused some of these
        values away. Recomputing one module of a block can therefore save less than predicted, or
        nothing.

        Args:
            fn, args, argnums: the loss that was inspected, without a policy on these modules.
            target: the chip to compile for.

        Raises:
            UnknownNameError: the modules are not in ``fn``, or lie inside a region already.
            TargetError: this machine cannot compile for the chip.
        """
        changed = _decorate.policy(self.policy, at=self.at)(fn)
        return _compile.measure(changed, *args, target=target, argnums=argnums)


def counterfactuals(
    schedule: Schedule,
    origins: Mapping[str, Origin],
    estimate: Estimate,
    *,
    limit: int = 8,
) -> tuple[Counterfactual, ...]:
    """Predict the effect of recomputing each of the modules that hold most at the peak.

    Args:
        schedule: the schedule of the compiled program.
        origins: the origins of its instructions.
        estimate: its time.
        limit: how many modules to predict.

    Returns:
        One entry for each module, sorted by the peak that it leads to, lowest first.
    """
    model = _Model(schedule, origins, estimate)
    held = model.held_at_peak()
    largest = sorted(held, key=lambda module: -held[module])[:limit]
    found = [model.without(module, held[module]) for module in largest]
    return tuple(sorted(found, key=lambda c: (-c.saved_bytes, c.extra_flops_fraction)))


def worthwhile(found: Counterfactual, peak_bytes: int, step_seconds: float) -> bool:
    """Tell whether a suggestion is worth its price.

    It must lower the peak by at least 1 %, and by at least 1 % for each 1 % of the step's time
    that the recomputation takes. A suggestion that lowers the peak by 2 MiB of 10 GiB, or by 5 %
    for +25 % time, is not worth its price.

    Args:
        found: the suggestion.
        peak_bytes: the peak that it lowers.
        step_seconds: the roofline time of the whole program.
    """
    gain = found.saved_bytes / peak_bytes if peak_bytes else 0.0
    price = found.extra_seconds / step_seconds if step_seconds else 0.0
    return gain >= max(0.01, price)


class _Model:
    def __init__(self, schedule: Schedule, origins: Mapping[str, Origin], estimate: Estimate):
        self.schedule = schedule
        self.origins = origins
        self.running = running_phases(schedule, origins)
        self.waiting = [b for b in schedule.buffers if self.waits(b)]
        self.modules = {id(b): origin_of(b, origins).module for b in self.waiting}
        self.made_by: dict[str, Buffer] = {}
        for buffer in schedule.buffers:
            for maker in buffer.makers:
                self.made_by.setdefault(maker.name, buffer)
        self.costs: dict[str, Cost] = {}
        for (phase, module, _), cost in estimate.by_place.items():
            if phase == FORWARD:
                for path in _prefixes(roll_up(module)):
                    self.costs[path] = self.costs.get(path, Cost()) + cost
        self.forward_flops = estimate.by_phase().get(FORWARD, Cost()).flops

    def waits(self, buffer: Buffer) -> bool:
        """Whether a device buffer is written in the forward and read in the backward pass."""
        if buffer.kind != TEMPORARY or buffer.space != DEVICE or buffer.within or not buffer.alive:
            return False
        return not self.is_late(buffer.alive[0][0]) and any(map(self.is_late, buffer.reads))

    def is_late(self, step: int) -> bool:
        return self.phase(step) in (BACKWARD, RECOMPUTE)

    def phase(self, step: int) -> str:
        return self.running[min(step, len(self.running) - 1)]

    def held_at_peak(self) -> dict[str, int]:
        """Bytes of residuals that each module and its submodules hold at the peak."""
        peak = self.schedule.peak_step
        held: dict[str, int] = defaultdict(int)
        for buffer in self.waiting:
            if any(first <= peak <= last for first, last in buffer.alive):
                for path in _prefixes(roll_up(self.modules[id(buffer)])):
                    held[path] += buffer.bytes
        return held

    def without(self, module: str, at_peak: int) -> Counterfactual:
        change = [0] * (len(self.schedule.steps) + 1)
        for instance, members in self.instances(module).items():
            again = self.arrival(members)
            for buffer in members:
                self.take_out(buffer, again, instance, change)
        changes = itertools.accumulate(change)
        sizes = [a + b for a, b in zip(self.schedule.temporary_bytes, changes, strict=False)]
        where = max(range(len(sizes)), key=lambda step: (sizes[step], -step))
        after = self.schedule.base_bytes + sizes[where]
        cost = self.costs.get(module, Cost())
        return Counterfactual(
            module=module,
            bytes_at_peak=at_peak,
            saved_bytes=max(0, self.schedule.peak_bytes - after),
            extra_flops_fraction=cost.flops / self.forward_flops if self.forward_flops else 0.0,
            extra_seconds=cost.seconds,
            next_peak_bytes=after,
            next_phase=self.phase(where),
            next_module=running_module(self.schedule, self.origins, where),
            policy=f"recompute(module({module!r}))",
            at=self.region(module),
        )

    def region(self, module: str) -> str:
        """Return the repeated block of a module, for ``at=``, or else the child of the model."""
        paths = _prefixes(module)
        blocks = [p for p in paths if "*" in p and any(c.startswith(f"{p}/") for c in self.costs)]
        return (blocks or paths)[0]

    def arrival(self, members: Sequence[Buffer]) -> int:
        """Return the step at which the backward pass reaches a block and recomputes it.

        The compiler runs some small operations earlier; these do not count.
        """
        reads = sorted((min(s for s in b.reads if self.is_late(s)), b.bytes) for b in members)
        early = 0.02 * sum(size for _, size in reads)
        sizes = itertools.accumulate(size for _, size in reads)
        return next(s for (s, _), total in zip(reads, sizes, strict=True) if total >= early)

    def instances(self, module: str) -> dict[str, list[Buffer]]:
        """Return the waiting buffers of the modules, by block."""
        depth = module.count("/") + 1
        found: dict[str, list[Buffer]] = defaultdict(list)
        for buffer in self.waiting:
            path = self.modules[id(buffer)]
            if module in _prefixes(roll_up(path)):
                found["/".join(path.split("/")[:depth])].append(buffer)
        return found

    def take_out(self, buffer: Buffer, again: int, instance: str, change: list[int]) -> None:
        """Remove a buffer from the steps between its last forward read and step ``again``."""
        end = len(change) - 1
        if buffer.stacked and buffer.array.dims:
            # A loop would recompute one slice at a time in the backward pass.
            waiting = buffer.bytes - buffer.bytes // max(1, buffer.array.dims[0])
            for first, last in buffer.alive:
                change[first] -= waiting
                change[min(last + 1, end)] += waiting
            return
        rest = max([buffer.alive[0][0], *(s for s in buffer.reads if not self.is_late(s))])
        for first, last in buffer.alive:
            a, z = max(first, rest + 1), min(last, again - 1)
            if a <= z:
                change[a] -= buffer.bytes
                change[z + 1] += buffer.bytes
                self.hold_inputs(buffer, again, instance, change)

    def hold_inputs(self, buffer: Buffer, again: int, instance: str, change: list[int]) -> None:
        """Keep the inputs of a block live until the block is recomputed."""
        end = len(change) - 1
        for name in buffer.makers[0].operands:
            source = self.made_by.get(name)
            if source is None or not source.alive:
                continue
            maker = origin_of(source, self.origins).module
            if f"{maker}/".startswith(f"{instance}/"):
                continue
            last = source.alive[-1][1]
            if source.kind == TEMPORARY and source.space == DEVICE and last < again:
                change[last + 1] += source.bytes
                change[min(again + 1, end)] -= source.bytes


def _prefixes(module: str) -> list[str]:
    """Return the modules around a value that can be recomputed, without the whole model.

    >>> _prefixes("GPT/block_*/mlp/up")
    ['GPT/block_*', 'GPT/block_*/mlp', 'GPT/block_*/mlp/up']
    """
    parts = module.split("/")
    return ["/".join(parts[: n + 1]) for n in range(1, len(parts))]
