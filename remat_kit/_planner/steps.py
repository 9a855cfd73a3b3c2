"""Which schedules does a whole training step have?

Each loss of a step has a frontier of its own. The step is compiled once without a plan. At its
peak, the compiled program shows the arrays that do not belong to the loss: parameters, the
optimizer's state, the batch and accumulated gradients. They are added to the predicted peak of each
schedule. No schedule brings a step below the peak of what follows its last backward pass.

If a step has several losses, their schedules are chosen together: for each peak of the loss that
needs most, every other loss gets the schedule with the least extra work at that peak.

Example: at the peak of a compiled step of 90 MiB, parameters and state take 25 MiB, accumulated
gradients 5 MiB, and arrays of the loss and its derivative 60 MiB. The update after the backward
pass needs 50 MiB. A schedule of the loss that needs 15 MiB by the model is predicted at 50 MiB
(and not at 15 + 30 = 45), and one that needs 40 MiB at 70 MiB.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from remat_kit._backend.interface import Backend
from remat_kit._chip.compile import Compiled, compile_program
from remat_kit._chip.target import Target
from remat_kit._compiled import hlo as _hlo
from remat_kit._compiled.duplicates import MARK
from remat_kit._compiled.hlo import Instruction
from remat_kit._compiled.liveness import DEVICE, TEMPORARY
from remat_kit._compiled.peak import anatomy
from remat_kit._errors import UserError
from remat_kit._planner.costs import build as _build
from remat_kit._planner.costs.graph import CostGraph
from remat_kit._planner.frontier import (
    Frontier,
    Surroundings,
    Tick,
    check_options,
    collection_put_off,
    frontier_of,
    sizes_of,
)
from remat_kit._planner.point import Point, bounded
from remat_kit._program.steps.gradient import (
    Argnums,
)
from remat_kit._program.steps.losses import Step, on_mesh, step_of
from remat_kit._program.steps.step import state_bytes


def frontier_for(
    fn: Callable[..., Any],
    args: Sequence[Any],
    chip: Target,
    argnums: Argnums,
    objective: str,
    optimizer: Any,
    offload: bool,
    tick: Tick,
    call: str,
    pieces: bool = False,
) -> tuple[Frontier, Argnums]:
    """Return the frontier of a loss or a step, and the positions of the parameters of a loss.

    For a step the second part of the pair is None. Errors name the public function ``call``.
    """
    step = step_of(fn, args, argnums, call=call) if optimizer is None else None
    if step is None:
        begun = time.perf_counter()
        check_options(objective, offload, chip, call)
        tick("tracing the loss")
        graph, around = _graph_of_loss(fn, args, chip, argnums, optimizer, call)
        front = frontier_of(graph, around, chip, objective, offload, tick, begun, call, pieces)
        return front, argnums
    return frontier_of_step(step, fn, args, chip, objective, offload, tick, call, pieces), None


def graphs_for(
    fn: Callable[..., Any], args: Sequence[Any], chip: Target, argnums: Argnums, call: str
) -> tuple[list[CostGraph], Surroundings]:
    """Return the cost graph of a loss, or those of the losses of a step, and what is around it."""
    step = step_of(fn, args, argnums, call=call)
    if step is None:
        graph, around = _graph_of_loss(fn, args, chip, argnums, None, call)
        return [graph], around
    _check_losses(step, call)
    compiled = compile_program(*(fn, args, chip), argnums=None, call=call, run=False, code=False)
    given, least = rest_of_step(compiled)
    return _graphs_of_step(step, fn, args, compiled, call), Surroundings(given, 0, least)


def _graph_of_loss(
    fn: Callable[..., Any],
    args: Sequence[Any],
    chip: Target,
    argnums: Argnums,
    optimizer: Any,
    call: str,
) -> tuple[CostGraph, Surroundings]:
    with collection_put_off():
        graph = _build.trace(fn, args, chip, argnums, call=call, returned=optimizer is None)

    def sums(size: int, whole: int) -> int:
        # A gradient that is split over all devices is no sum over them.
        return size if size * chip.devices > whole else 0

    apart = Backend(chip.platform).sums_gradients_apart and chip.devices > 1 and optimizer is None
    given, made = sizes_of(graph, args, argnums, call, *([sums] if apart else []))
    if optimizer is not None:
        given += state_bytes(optimizer, args, argnums, call)
    return graph, Surroundings(given, made)


def _graphs_of_step(
    step: Step, fn: Callable[..., Any], args: Sequence[Any], compiled: Compiled, call: str
) -> list[CostGraph]:
    """Return the cost graphs of a step's losses; of a partitioned step, those of one device."""
    if compiled.memory.devices > 1:
        step = on_mesh(step, fn, args, call=call)
    return [_build.of_loss(loss, compiled.chip, call=call) for loss in step.losses]


def _check_losses(step: Step, call: str) -> None:
    if not step.losses:
        raise UserError(
            f"`{call}`: the function takes no gradient, so there is nothing to plan",
            hint="give a loss, or a step that calls `jax.grad`, `jax.value_and_grad`, `jax.vjp` or "
            "`nnx.grad`",
        )


def frontier_of_step(
    step: Step,
    fn: Callable[..., Any],
    args: Sequence[Any],
    chip: Target,
    objective: str,
    offload: bool,
    tick: Tick,
    call: str,
    pieces: bool = False,
) -> Frontier:
    """Return the frontier of a step; the step is compiled once, without a plan.

    Args:
        step: the step with its losses.
        fn, args: the step as its user runs it, and its arguments.
        chip, objective, offload, tick, call, pieces: as for `frontier_for`.

    Raises:
        UserError: the step differentiates nothing.
    """
    begun = time.perf_counter()
    check_options(objective, offload, chip, call)
    _check_losses(step, call)
    tick(f"compiling for {chip.name}: the step without a plan")
    compiled = compile_program(*(fn, args, chip), argnums=None, call=call, run=False, code=False)
    chip = compiled.chip  # it has as many devices as the step's own jit names
    graphs = _graphs_of_step(step, fn, args, compiled, call)
    given, least = rest_of_step(compiled)
    fronts = [
        frontier_of(
            graph,
            Surroundings(given, 0, least, loss.times),
            chip,
            objective,
            offload,
            tick,
            begun,
            call,
            pieces,
        )
        for loss, graph in zip(step.losses, graphs, strict=True)
    ]
    main = max(range(len(fronts)), key=lambda i: fronts[i].plain.cost.peak_bytes)
    others = tuple(f for i, f in enumerate(fronts) if i != main)
    whole = together(fronts[main], others) if others else fronts[main]
    return _of_step(whole)


def _of_step(front: Frontier) -> Frontier:
    whole = front.whole and _of_step(front.whole)
    return dataclasses.replace(front, of_step=True, whole=whole)


def rest_of_step(compiled: Compiled) -> tuple[int, int]:
    """Return what a step holds beside its losses, and the least peak of any schedule, in bytes.

    Args:
        compiled: the step without a plan.
    """
    memory = compiled.memory
    arguments = memory.argument_bytes + memory.output_bytes - (memory.alias_bytes or 0)
    if compiled.hlo_text is None:
        return arguments, arguments
    parts = anatomy(
        _hlo.parse(compiled.hlo_text), memory.peak_bytes, platform=compiled.chip.platform
    )
    schedule = parts.schedule
    temporary = schedule.temporary_bytes
    losses = [i for i, step in enumerate(schedule.steps) if _is_of_a_loss(step)]
    peak = max(losses, key=lambda i: temporary[i], default=schedule.peak_step)
    beside = sum(
        buffer.bytes
        for buffer in schedule.alive_at(peak)
        if buffer.kind == TEMPORARY and buffer.space == DEVICE and not buffer.within
        if not any(map(_is_of_a_loss, buffer.makers))
    )
    after = max(temporary[losses[-1] + 1 :], default=0) if losses else 0
    return arguments + beside, arguments + after


def _is_of_a_loss(instruction: Instruction) -> bool:
    """Tell whether an instruction belongs to a loss or to its derivative.

    JAX writes the transformations by which it differentiates a function into its name.
    """
    name = instruction.op_name
    return "jvp(" in name or "transpose(" in name or MARK in name


def together(main: Frontier, others: Sequence[Frontier]) -> Frontier:
    """Return one frontier for a step with several losses."""
    forward = main.forward_seconds + sum(f.forward_seconds for f in others)

    def joined(point: Point) -> Point:
        chosen = [_at_most(front, point.predicted_peak_bytes) for front in others]
        every = [point, *chosen]
        peak = max(p.predicted_peak_bytes for p in every)
        # A loss whose own peak is lower may use as much memory as the others.
        seconds, work = zip(*(bounded(p, peak) for p in every), strict=True)
        extra_work = sum(p.extra_work for p in every)
        return dataclasses.replace(
            point,
            predicted_peak_bytes=peak,
            extra_seconds=sum(p.extra_seconds for p in every),
            extra_flops=sum(p.extra_flops for p in every),
            extra_work=extra_work,
            forward_flops=sum(p.forward_flops for p in every),
            bound_extra_seconds=sum(seconds),
            bound_extra_work=sum(work),
            gap=(extra_work - sum(work)) / forward if forward else 0.0,
            others=tuple(chosen),
        )

    def plain() -> Point:
        every = [main.plain, *(f.plain for f in others)]
        return dataclasses.replace(
            main.plain,
            predicted_peak_bytes=max(p.predicted_peak_bytes for p in every),
            forward_flops=sum(p.forward_flops for p in every),
            others=tuple(f.plain for f in others),
        )

    whole = main.whole and together(main.whole, [f.whole or f for f in others])
    return dataclasses.replace(
        main,
        points=tuple(map(joined, main.points)),
        leaner=tuple(map(joined, main.leaner)),
        plain=whole.plain if whole else plain(),
        presets=(),
        blocks=whole.blocks if whole else tuple(map(joined, main.blocks)),
        whole=whole,
        equations=main.equations + sum(f.equations for f in others),
        forward_seconds=forward,
        backward_seconds=main.backward_seconds + sum(f.backward_seconds for f in others),
        others=tuple(others),
    )


def _at_most(front: Frontier, peak: int) -> Point:
    """Return the point with the least extra work at a peak, or the one with the lowest peak."""
    within = [p for p in (front.plain, *front.points) if p.predicted_peak_bytes <= peak]
    return min(within, key=lambda p: p.extra_work) if within else front.points[0]
