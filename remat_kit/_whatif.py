"""What would happen to the peak if a part of it were recomputed, without compiling again.

The timeline of a compiled program is known, and who made each buffer. A value that is made in the
forward pass and waits for the backward pass can be taken out of the stretch in between; what it is
made of must then be there when it is made again. What remains has a peak of its own: the next one.
The answer is the model's; `Counterfactual.check` asks the compiler.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_kit import _remat, _target
from remat_kit._anatomy import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    Origin,
    origin_of,
    running_module,
    running_phases,
)
from remat_kit._graph import roll_up
from remat_kit._liveness import DEVICE, TEMPORARY, Buffer, Schedule
from remat_kit._policy import format_bytes
from remat_kit._roofline import Cost, Estimate
from remat_kit._target import Memory, Target


@dataclasses.dataclass(frozen=True)
class Counterfactual:
    """Some modules whose values are held at the peak, and what recomputing them would do.

    Attributes:
        module: path of the modules, repeated blocks rolled up; with all that is inside them.
        bytes_at_peak: what they hold at the peak for the backward pass.
        saved_bytes: by how much the peak falls; 0 where another peak is as high.
        extra_flops_fraction: of the forward pass's floating-point operations.
        extra_seconds: by the roofline.
        next_peak_bytes, next_phase, next_module: the peak that is then the highest.
        policy, at: what to give `remat_kit.policy` for it.
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
            f"+{100 * self.extra_flops_fraction:.2g} % FLOPs; the next peak is "
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
        """Compile the loss with the policy and return what it really takes.

        A region keeps what its policy keeps, where the compiler on its own would have fused some of
        it away: recomputing one module of a block can save less than the model says, or nothing.

        Args:
            fn, args, argnums: the loss that was inspected, without a policy on these modules.
            target: the chip.

        Raises:
            UnknownNameError: the modules are not in ``fn``, or lie inside a region already.
            TargetError: the chip cannot be compiled for here.
        """
        changed = _remat.policy(self.policy, at=self.at)(fn)
        return _target.measure(changed, *args, target=target, argnums=argnums)


def counterfactuals(
    schedule: Schedule,
    origins: Mapping[str, Origin],
    estimate: Estimate,
    *,
    limit: int = 8,
) -> tuple[Counterfactual, ...]:
    """Say of the modules that hold most at the peak what recomputing each would do.

    Args:
        schedule: of the compiled program.
        origins: of its instructions.
        estimate: of its time.
        limit: how many modules are looked at.

    Returns:
        One entry for each module, the one first after which the peak is lowest.
    """
    model = _Model(schedule, origins, estimate)
    held = model.held_at_peak()
    largest = sorted(held, key=lambda module: -held[module])[:limit]
    found = [model.without(module, held[module]) for module in largest]
    return tuple(sorted(found, key=lambda c: (-c.saved_bytes, c.extra_flops_fraction)))


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
        """Whether it is made in the forward pass, on the device, and read in the backward pass."""
        if buffer.kind != TEMPORARY or buffer.space != DEVICE or buffer.within or not buffer.alive:
            return False
        return not self.is_late(buffer.alive[0][0]) and any(map(self.is_late, buffer.reads))

    def is_late(self, step: int) -> bool:
        return self.phase(step) in (BACKWARD, RECOMPUTE)

    def phase(self, step: int) -> str:
        return self.running[min(step, len(self.running) - 1)]

    def held_at_peak(self) -> dict[str, int]:
        """Bytes that each module, with what is inside it, holds for the backward pass."""
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
        """The repeated block that a module lies in, for ``at=``; without one, the model's child."""
        paths = _prefixes(module)
        blocks = [p for p in paths if "*" in p and any(c.startswith(f"{p}/") for c in self.costs)]
        return (blocks or paths)[0]

    def arrival(self, members: Sequence[Buffer]) -> int:
        """The step at which the backward pass reaches a block, where it is made again.

        The compiler runs a small thing early here and there: they do not count.
        """
        reads = sorted((min(s for s in b.reads if self.is_late(s)), b.bytes) for b in members)
        early = 0.02 * sum(size for _, size in reads)
        sizes = itertools.accumulate(size for _, size in reads)
        return next(s for (s, _), total in zip(reads, sizes, strict=True) if total >= early)

    def instances(self, module: str) -> dict[str, list[Buffer]]:
        """The waiting buffers of the modules, by block."""
        depth = module.count("/") + 1
        found: dict[str, list[Buffer]] = defaultdict(list)
        for buffer in self.waiting:
            path = self.modules[id(buffer)]
            if module in _prefixes(roll_up(path)):
                found["/".join(path.split("/")[:depth])].append(buffer)
        return found

    def take_out(self, buffer: Buffer, again: int, instance: str, change: list[int]) -> None:
        """Take a buffer out of the time in which it only waits, until step ``again``."""
        end = len(change) - 1
        if buffer.stacked and buffer.array.dims:
            # A loop would make one slice of it at a time, in the backward pass.
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
        """Keep what comes from outside of a block until the block is run again."""
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
    """The modules that can be recomputed for a value: those around it, but not the whole model.

    >>> _prefixes("GPT/block_*/mlp/up")
    ['GPT/block_*', 'GPT/block_*/mlp', 'GPT/block_*/mlp/up']
    """
    parts = module.split("/")
    return ["/".join(parts[: n + 1]) for n in range(1, len(parts))]
