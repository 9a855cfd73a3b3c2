"""Compile a training step for chips, policies and batch sizes, and tabulate which of them fit.

Every answer is a program that was compiled for its chip. The compiler knows how much memory the
chip has and may produce another program for a chip with less memory, so the step is compiled for
each chip. If the compiler gets the same input for two chips (``cpu`` and ``cpu@4GiB``), the second
answer comes from the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from remat_kit._batch.model import (
    Model,
    Progress,
    bytes_or_unknown,
    is_plan,
    model_of,
    same_program,
    step_seconds_of,
)
from remat_kit._chip import compile as _compile
from remat_kit._chip import target as _target
from remat_kit._chip.compile import Compiled
from remat_kit._chip.memory import Memory
from remat_kit._chip.target import Target
from remat_kit._errors import UserError
from remat_kit._inspect.headline import batches_headline
from remat_kit._inspect.tables import NO_POLICY, policy_text, versions
from remat_kit._program.builder import Loss
from remat_kit._program.steps.gradient import Argnums, abstract
from remat_kit._show.table import Lines, Shown, Table, headed
from remat_kit._units import format_bytes, format_seconds

# -- the fit matrix ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cell:
    """One policy with one batch size on one chip; `fit` returns a table of these.

    >>> import jax, jax.numpy as jnp
    >>> def build(batch):
    ...     x = jax.ShapeDtypeStruct((batch, 64), jnp.float32)
    ...     return lambda x: jnp.mean(jnp.sin(x)), (x,)
    >>> cell = fit(build, targets=["cpu@4MiB"], batches=[64])["cpu@4MiB", None, 64]
    >>> cell.fits, cell.batch, cell.memory.argument_bytes
    (True, 64, 16384)

    Attributes:
        target: the name of the chip.
        policy: its name or its text; ``none`` without a policy.
        batch: the number of examples in a step.
        memory: the memory that the step needs, in bytes, and whether it fits.
        step_seconds: a lower bound by the roofline (Williams et al., 2009), in seconds; None if the
            compiler gave no program.
        slowdown: roofline time of an example divided by the time without a policy; None if one of
            the two is unknown.
        baseline_batch: the batch size without a policy that the slowdown refers to: the same one,
            or the largest one for which the compiler gave a program.
    """

    target: str
    policy: str
    batch: int
    memory: Memory
    step_seconds: float | None = None
    slowdown: float | None = None
    baseline_batch: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the step fits on the chip."""
        return self.memory.fits

    @property
    def headroom_bytes(self) -> int | None:
        """The memory of the chip that is left over, in bytes; negative if the step does not fit."""
        return self.memory.headroom_bytes

    def __str__(self) -> str:
        room = self.headroom_bytes
        if self.fits:
            text = f"yes, {bytes_or_unknown(room)} left"
        else:
            text = "no" if room is None else f"no, {format_bytes(-room)} over"
        if self.slowdown is None or self.policy == NO_POLICY:
            return text
        return f"{text}, ×{self.slowdown:.2f}{'' if self.baseline_batch == self.batch else '*'}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        kept = ("peak_bytes", "temp_bytes", "host_bytes", "memory_bytes", "headroom_bytes")
        return {
            "target": self.target,
            "policy": self.policy,
            "batch": self.batch,
            "fits": self.fits,
            **{name: getattr(self.memory, name) for name in kept},
            "step_seconds": self.step_seconds,
            "slowdown": self.slowdown,
            "baseline_batch": self.baseline_batch,
            "compile_seconds": self.memory.compile_seconds,
            "cached": self.memory.cached,
        }


def _largest_then_fastest(cell: Cell) -> tuple[float, ...]:
    unknown = cell.step_seconds is None
    return -cell.batch, unknown, cell.step_seconds or 0.0


@dataclasses.dataclass(frozen=True)
class Fit(Shown):
    """A table of chips, policies and batch sizes: what fits, and how much memory is left.

    `fit` returns it. ``fit[target, policy, batch]`` is one `Cell`, whose memory is that of
    `jax.stages.Compiled.memory_analysis`.

    >>> Fit((), complete=False, model="gpt:build").notes
    ('interrupted: some are missing',)

    Attributes:
        cells: the steps that were compiled; after Ctrl-C the last ones are missing.
        complete: whether all of them are there.
        model: the name of the builder.

    Raises:
        KeyError: the table has no cell for a chip, a policy and a batch size.
    """

    cells: tuple[Cell, ...]
    complete: bool = True
    model: str = ""

    def __getitem__(self, place: tuple[str, Any, int]) -> Cell:
        """Return the cell of a chip, a policy and a batch size; raise `KeyError` if none."""
        target, policy, batch = place
        for cell in self.cells:
            if (cell.target, cell.policy, cell.batch) == (target, policy_text(policy), batch):
                return cell
        raise KeyError(place)

    @property
    def fitting(self) -> tuple[Cell, ...]:
        """The cells that fit: largest batch first, then the fastest by the roofline."""
        return tuple(sorted((c for c in self.cells if c.fits), key=_largest_then_fastest))

    @property
    def headline(self) -> str:
        """The answer in one sentence: the largest batch that fits each chip."""
        return batches_headline((c.target, c.policy, c.batch * c.fits) for c in self.cells)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader must know about these numbers."""
        own = [] if self.complete else ["interrupted: some are missing"]
        return tuple(dict.fromkeys([*own, *(n for c in self.cells for n in c.memory.all_notes)]))

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`.

        The keys::

            headline             str     the largest batch that fits each chip
            targets, policies    list of str
            batches              list of int
            cells                list, one object for each that was compiled:
                target, policy   str
                batch            int
                fits             bool
                peak_bytes, temp_bytes, host_bytes   int   null if the compiler does not say
                memory_bytes, headroom_bytes         int   of the chip, and what is left of it
                step_seconds     float   lower bound by the roofline, or null
                slowdown         float   time of an example over that of none, by the roofline, or
                                         null
                baseline_batch   int     batch of none that the slowdown refers to, or null
                compile_seconds  float
                cached           bool
            complete             bool    false if it was interrupted
            notes                list of str
            versions             object
        """
        named = {"model": self.model} if self.model else {}
        return named | {
            "headline": self.headline,
            "targets": list(dict.fromkeys(c.target for c in self.cells)),
            "policies": list(dict.fromkeys(c.policy for c in self.cells)),
            "batches": sorted({c.batch for c in self.cells}),
            "cells": [c.to_json() for c in self.cells],
            "complete": self.complete,
            "notes": list(self.notes),
            "versions": versions(),
        }

    def tables(self) -> list[Table | Lines]:
        """Return the headline and the table."""
        return [*([headed(self.headline)] if self.cells else []), self.table()]

    def table(self) -> Table:
        """Return a table with a column for each batch size."""
        batches = sorted({c.batch for c in self.cells})
        lines: dict[tuple[str, str], dict[int, Cell]] = {}
        for cell in self.cells:
            lines.setdefault((cell.target, cell.policy), {})[cell.batch] = cell
        rows = []
        for (target, policy), found in lines.items():
            memory = format_bytes(next(iter(found.values())).memory.memory_bytes)
            rows.append((target, memory, policy, *(str(found.get(b, "")) for b in batches)))
        footer = []
        if any(c.slowdown is not None and c.policy != NO_POLICY for c in self.cells):
            footer.append("×: time of an example compared with none, by the roofline")
        if any(c.slowdown and c.baseline_batch != c.batch for c in self.cells):
            footer.append("*: none did not compile here; compared with its largest batch that did")
        footer += [f"note: {note}" for note in self.notes]
        columns = ("target", "memory", "policy", *(f"batch {b}" for b in batches))
        title = "what fits" + (f", {self.model}" if self.model else "")
        return Table(title, columns, tuple(rows), "\n".join(footer))

    def cell_table(self) -> Table:
        """Return a table with a row for each program that was compiled."""
        columns = ("target", "policy", "batch", "fits", "peak", "temporaries", "host", "step ≥")
        return Table("every program", columns, tuple(_cell_row(c) for c in self.cells))


def _cell_row(cell: Cell) -> tuple[str, ...]:
    m, seconds = cell.memory, cell.step_seconds
    return (
        *(cell.target, cell.policy, str(cell.batch), "yes" if cell.fits else "no"),
        *(bytes_or_unknown(size) for size in (m.peak_bytes, m.temp_bytes, m.host_bytes)),
        "?" if seconds is None else format_seconds(seconds),
    )


def fit(
    build: Callable[..., Loss],
    *,
    batches: Sequence[int],
    policies: Sequence[Any] = (),
    targets: Sequence[str | Target] = ("cpu",),
    at: str | None = None,
    batch_name: str = "batch",
    argnums: Argnums = 0,
    donate_argnums: int | Sequence[int] = (),
    optimizer: Any = None,
    pieces: bool = False,
    progress: Progress | None = None,
) -> Fit:
    """Compile a training step for chips, policies and batch sizes, and report which of them fit.

    The memory of each step is taken from `jax.stages.Compiled.memory_analysis`.

    >>> import jax, jax.numpy as jnp
    >>> def build(batch):
    ...     w, x = (jax.ShapeDtypeStruct((n, 64), jnp.float32) for n in (64, batch))
    ...     return lambda w, x: jnp.mean(jnp.sin(x @ w) ** 2), (w, x)
    >>> found = fit(build, targets=["cpu@1MiB", "cpu@4MiB"], batches=[64, 4096])
    >>> for cell in found.cells:
    ...     print(cell.target, cell.batch, cell.fits)
    cpu@1MiB 64 True
    cpu@1MiB 4096 False
    cpu@4MiB 64 True
    cpu@4MiB 4096 True

    Args:
        build, at, batch_name, argnums, donate_argnums, optimizer, pieces, progress: as for
            `max_batch`.
        batches: the batch sizes.
        policies: each as `remat_kit.policy` takes it; ``none`` is always the first. ``"plan"`` is
            the fastest plan that fits, made for each chip and batch size. ``"plan+offload"`` is a
            plan that may also offload residuals of scans to the host's memory.
        targets: the chips, or their names.

    Returns:
        A value that prints as a table. After Ctrl-C it holds the answers so far, and ``complete``
        is False.

    Raises:
        UserError: the builder has no parameter for the batch size, or no chip or size is given.
        RematKitError: another error of `remat_kit.measure`.
    """
    call = "fit"
    model = model_of(
        build,
        call,
        at=at,
        batch_name=batch_name,
        argnums=argnums,
        donate_argnums=donate_argnums,
        optimizer=optimizer,
        pieces=pieces,
    )
    model.check(policies, call)
    chips = [_target.target(name) for name in targets]
    return matrix(model, policies, chips, batches, progress=progress, call=call)


def matrix(
    model: Model,
    policies: Sequence[Any],
    chips: Sequence[Target],
    batches: Sequence[int],
    *,
    progress: Progress | None = None,
    call: str = "fit",
) -> Fit:
    """Do what `fit` does, for a model that has been checked."""
    asked = {policy_text(policy): policy for policy in (None, *policies)}
    if not chips or not batches:
        raise UserError(
            f"`{call}`: there is no {'batch size' if chips else 'target'} to compile for",
            hint="give at least one of each: targets=['h100'], batches=[8, 16]",
        )
    for batch in batches:
        if isinstance(batch, bool) or batch != int(batch) or batch < 1:
            raise UserError(
                f"`{call}(..., batches={list(batches)!r})`: {batch!r} is no batch size",
                hint="give whole numbers above 0",
            )
    cells: list[Cell] = []
    complete = True
    sizes, shapes, warned = sorted(set(batches)), {}, set()
    try:
        for chip in chips:
            for batch in sizes:
                for name, policy in asked.items():
                    if progress is not None:
                        progress(f"{name} on {chip.name}: batch {batch}{_so_far(cells, chip)}")
                    compiled, shapes[batch] = _compiled_step(model, policy, chip, batch, call)
                    memory, seconds = compiled.memory, step_seconds_of(compiled, chip)
                    cells.append(Cell(chip.name, name, batch, memory, seconds))
                    once = (chip.name, name)
                    if once not in warned and _compile.warn_of_offload_on_cpu(compiled, call):
                        warned.add(once)
                _check_growth(model, cells, shapes, sizes[0], call)
    except KeyboardInterrupt:
        if not cells:
            raise
        complete = False
    return Fit(tuple(_held_against_none(cells)), complete, model.builder.address)


def _check_growth(
    model: Model, cells: Sequence[Cell], shapes: dict[int, Any], least: int, call: str
) -> None:
    """Raise if the last batch size gives the same program as the smallest one."""
    last = cells[-1]
    for cell in cells:
        if (cell.target, cell.policy, cell.batch) == (last.target, last.policy, least):
            one, other = ((shapes[c.batch], c.memory.peak_bytes) for c in (cell, last))
            if one == other and last.batch != least:
                raise same_program(model, least, last.batch, call)


def _so_far(cells: Sequence[Cell], chip: Target) -> str:
    fitting = [c for c in cells if c.target == chip.name and c.fits]
    if not fitting:
        return ""
    best = max(fitting, key=lambda c: c.batch)
    return f" ({best.batch} fits with {best.policy})"


def _compiled_step(
    model: Model, policy: Any, chip: Target, batch: int, call: str
) -> tuple[Compiled, Any]:
    """Compile one step; return the program and the shapes of its arguments."""
    if is_plan(policy):
        loss, _ = model.planned(policy, batch, chip)
    else:
        loss = model.loss(policy, batch, chip)
    compiled = model.compiled(loss, batch, chip, call)
    shapes = [(s.shape, s.dtype) for s in jax.tree.leaves(abstract(loss[1], call=call))]
    return compiled, shapes


def _held_against_none(cells: Sequence[Cell]) -> Iterator[Cell]:
    """Add the slowdowns; a step that the compiler refused has no time."""
    known = [c for c in cells if c.policy == NO_POLICY and c.step_seconds]
    for cell in cells:
        of_chip = {c.batch: c for c in known if c.target == cell.target}
        base = of_chip.get(cell.batch) or of_chip.get(max(of_chip, default=0))
        if base is None or base.step_seconds is None or cell.step_seconds is None:
            yield cell
            continue
        slowdown = (cell.step_seconds / cell.batch) / (base.step_seconds / base.batch)
        yield dataclasses.replace(cell, slowdown=slowdown, baseline_batch=base.batch)
