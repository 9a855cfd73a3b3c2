"""Search for the largest batch that fits on a chip.

Every trial is a program that was compiled for the chip.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from remat_kit._batch.model import (
    AT_MOST,
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
from remat_kit._errors import CompileError, UserError
from remat_kit._inspect.tables import NO_POLICY, policy_text
from remat_kit._program.builder import Loss
from remat_kit._program.steps.gradient import Argnums, abstract
from remat_kit._show.table import Shown, Table
from remat_kit._units import format_bytes, format_seconds

# -- the largest batch ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trial:
    """One batch size that was compiled.

    Attributes:
        batch: the number of examples in it.
        fits: whether the program fits.
        memory: the memory that it needs; None if the compiler refused it for another reason.
        reason: that reason.
    """

    batch: int
    fits: bool
    memory: Memory | None
    reason: str = ""

    @property
    def peak_bytes(self) -> int | None:
        """The bytes that the program needs; None if the compiler does not say."""
        return None if self.memory is None else self.memory.peak_bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return {
            "batch": self.batch,
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "cached": self.memory is not None and self.memory.cached,
            "reason": self.reason,
        }


@dataclasses.dataclass(frozen=True)
class MaxBatch(Shown):
    """The largest batch that fits on a chip; `max_batch` returns it.

    >>> import jax, jax.numpy as jnp
    >>> def build(batch=8):
    ...     x = jax.ShapeDtypeStruct((batch, 1024), jnp.float32)
    ...     return lambda x: jnp.mean(jnp.sin(x)), (x,)
    >>> found = max_batch(build, target="cpu@1MiB", step=16)
    >>> found.batch % 16, found.best.fits, found.refused.batch - found.batch
    (0, True, 16)

    Attributes:
        batch: the largest batch that was compiled and fits; 0 if none does.
        policy: its name or its text; ``none`` without a policy.
        target: the name of the chip.
        memory_bytes: the memory of the chip.
        step: batch sizes are multiples of this.
        trials: every program that was compiled, in order.
        step_seconds: a lower bound for a step with ``batch`` examples, by the roofline (Williams et
            al., 2009); None if none fits. With ``"plan"`` it is that of the fastest plan that fits.
        complete: whether the search ended; False if it was interrupted.
        planning_compiles: programs that the fastest plan took in addition, with ``"plan"``.
        notes: what the reader must know about the answer.
    """

    batch: int
    policy: str
    target: str
    memory_bytes: int
    step: int
    trials: tuple[Trial, ...] = dataclasses.field(repr=False)
    step_seconds: float | None
    complete: bool = True
    planning_compiles: int = 0
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Trial | None:
        """The program of the largest batch that fits."""
        return next((t for t in self.trials if t.batch == self.batch), None)

    @property
    def refused(self) -> Trial | None:
        """The smallest batch that was compiled and does not fit."""
        return min((t for t in self.trials if not t.fits), key=lambda t: t.batch, default=None)

    @property
    def compiles(self) -> int:
        """How many programs were compiled, including those found in the cache."""
        return len(self.trials) + self.planning_compiles

    @property
    def bytes_per_example(self) -> float | None:
        """Growth of the peak with the batch, between the smallest and the largest program."""
        return _slope(self.trials)

    @property
    def examples_per_second(self) -> float | None:
        """An upper bound, by the roofline."""
        return self.batch / self.step_seconds if self.step_seconds else None

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`.

        The keys::

            policy, target       str
            batch                int    the largest that was compiled and fits, 0 if none does
            step                 int    batches are multiples of it
            memory_bytes         int    of the chip
            peak_bytes, headroom_bytes, host_bytes   int    at that batch, or null
            refused_batch, refused_peak_bytes        int    the smallest that does not fit, or null
            bytes_per_example    float  or null
            step_seconds, examples_per_second        float  bounds by the roofline, or null
            compiles             int    programs compiled, including those found in the cache
            cached               int    trials that were found in the cache
            complete             bool   false if it was interrupted
            trials               list   batch, fits, peak_bytes, cached, reason of each
            notes                list of str
        """
        best = self.best.memory if self.best else None
        refused = self.refused
        return {
            "policy": self.policy,
            "target": self.target,
            "batch": self.batch,
            "step": self.step,
            "memory_bytes": self.memory_bytes,
            "peak_bytes": best and best.peak_bytes,
            "headroom_bytes": best and best.headroom_bytes,
            "host_bytes": best and best.host_bytes,
            "refused_batch": refused and refused.batch,
            "refused_peak_bytes": refused and refused.peak_bytes,
            "bytes_per_example": self.bytes_per_example,
            "step_seconds": self.step_seconds,
            "examples_per_second": self.examples_per_second,
            "compiles": self.compiles,
            "cached": sum(t.memory is not None and t.memory.cached for t in self.trials),
            "complete": self.complete,
            "trials": [t.to_json() for t in self.trials],
            "notes": list(self.notes),
        }

    def tables(self) -> list[Table]:
        """Return the one table."""
        return [self.table()]

    def table(self) -> Table:
        """Return the answer as a table of one row."""
        return max_batch_table([self])

    def trial_table(self) -> Table:
        """Return a table of the batch sizes that were compiled."""
        rows = [
            (str(t.batch), "yes" if t.fits else "no", bytes_or_unknown(t.peak_bytes), t.reason)
            for t in sorted(self.trials, key=lambda t: t.batch)
        ]
        title = f"batch sizes that were compiled for {self.target} with {self.policy}"
        return Table(title, ("batch", "fits", "peak", "reason"), tuple(rows))


def max_batch_table(found: Sequence[MaxBatch], model: str = "") -> Table:
    """Return several answers as a table, each compared with ``none`` on its chip."""
    base = {m.target: m for m in found if m.policy == NO_POLICY}
    rows = []
    for m in found:
        none = base.get(m.target)
        gain = f"  ×{m.batch / none.batch:.3g}" if none and none is not m and none.batch else ""
        refused = m.refused
        rows.append(
            (
                m.target,
                m.policy,
                f"{m.batch}{gain}" if m.batch else "none fits",
                "" if m.best is None else bytes_or_unknown(m.best.peak_bytes),
                format_bytes(m.memory_bytes),
                "" if refused is None else f"{refused.batch}: {_refusal(refused)}",
                bytes_or_unknown(m.bytes_per_example),
                "" if m.step_seconds is None else format_seconds(m.step_seconds / m.batch),
                str(m.compiles),
            )
        )
    columns = ("target", "policy", "batch", "peak", "memory", "does not fit", "per example")
    notes = dict.fromkeys(f"note: {m.target}, {m.policy}: {n}" for m in found for n in m.notes)
    title = "the largest batch that fits" + (f", {model}" if model else "")
    spare = ("compiled", "per example", "time of one ≥", "memory")
    columns += ("time of one ≥", "compiled")
    return Table(title, columns, tuple(rows), "\n".join(notes), spare)


def _refusal(trial: Trial) -> str:
    if trial.memory is None:
        return "refused by the compiler"
    over = trial.memory.headroom_bytes
    return "needs more" if over is None else f"{format_bytes(-over)} over"


def max_batch(
    build: Callable[..., Loss],
    *,
    target: str | Target = "cpu",
    policy: Any = None,
    at: str | None = None,
    batch_name: str = "batch",
    start: int | None = None,
    step: int = 1,
    at_most: int = AT_MOST,
    argnums: Argnums = 0,
    donate_argnums: int | Sequence[int] = (),
    optimizer: Any = None,
    pieces: bool = False,
    progress: Progress | None = None,
) -> MaxBatch:
    """Find the largest batch whose training step fits on a chip, by compiling a few batch sizes.

    >>> import jax, jax.numpy as jnp
    >>> def build(policy=None, batch=8):
    ...     def loss(w, x):
    ...         return jnp.mean(jnp.sin(x @ w) ** 2)
    ...     array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    ...     return loss, (array(64, 64), array(batch, 64))
    >>> found = max_batch(build, target="cpu@1MiB")
    >>> known = {trial.batch: trial.fits for trial in found.trials}
    >>> known[found.batch], known[found.batch + 1]
    (True, False)

    The peak of a step is nearly linear in the batch size. Two programs determine the line, and the
    next batch size to compile is the one at which the line reaches the memory of the chip. The
    answer fits, and the next larger batch size does not; both were compiled.

    Args:
        build: called as ``build(batch=n)``, and with ``policy=`` too if there is a policy and no
            ``at``; returns ``(loss_fn, args)``. Give other arguments with `functools.partial`.
        target: the chip; ``h100@40GiB`` is an h100 with less memory.
        policy: as `remat_kit.policy` takes it, or None. ``"plan"`` makes a plan of the least memory
            for each batch size; ``"plan+offload"`` makes one that may also offload residuals of
            scans to the host's memory.
        at: the module paths that the policy is applied at, instead of through the builder.
        batch_name: the parameter of the builder for the batch size.
        start: the first batch size to compile; by default that of the builder.
        step: only multiples of this are tried.
        at_most: no batch size above this is tried.
        argnums: which arguments to differentiate; None if the builder returns a whole training
            step.
        donate_argnums: the arguments whose memory the results may take over.
        optimizer: an ``optax.GradientTransformation``. If it is given, the whole training step with
            its state must fit; otherwise the answer says what the state of AdamW would add.
        pieces: whether a plan may run segments in pieces, as for `remat_kit.plan`.
        progress: called with a line of text before each program is compiled, such as `print`.

    Returns:
        The answer; after Ctrl-C, the best one so far, with ``complete`` False.

    Raises:
        UserError: the builder has no parameter for the batch size, or its program does not depend
            on it.
        RematKitError: another error of `remat_kit.measure`.
    """
    call = "max_batch"
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
    model.check([policy], call)
    return search(
        model,
        policy,
        _target.target(target),
        start=start,
        step=step,
        at_most=at_most,
        progress=progress,
        call=call,
    )


def search(
    model: Model,
    policy: Any,
    chip: Target,
    *,
    start: int | None = None,
    step: int = 1,
    at_most: int = AT_MOST,
    progress: Progress | None = None,
    call: str = "max_batch",
) -> MaxBatch:
    """Do what `max_batch` does, for a model that has been checked."""
    for name, value in (("start", start), ("step", step), ("at_most", at_most)):
        if value is not None and (isinstance(value, bool) or value < 1 or value != int(value)):
            raise UserError(
                f"`{call}(..., {name}={value!r})`: this is no batch size",
                hint="give a whole number above 0",
            )
    if at_most < step:
        raise UserError(
            f"`{call}(..., step={step}, at_most={at_most})`: no multiple of {step} is that small",
            hint="give a smaller step or a larger limit",
        )
    run = _Search(model, policy, chip, step, at_most // step * step, call)
    first = model.first_batch() if start is None else start
    return run.result(progress or (lambda _: None), first)


class _Search:
    """The trials so far, and the next batch size that follows from them."""

    def __init__(
        self, model: Model, policy: Any, chip: Target, step: int, at_most: int, call: str
    ) -> None:
        self.model, self.policy, self.chip, self.call = model, policy, chip, call
        self.step, self.at_most = step, at_most
        self.trials: list[Trial] = []
        self.arguments: Any = None
        self.best: Compiled | None = None
        self.last: Compiled | None = None

    @property
    def low(self) -> int:
        return max((t.batch for t in self.trials if t.fits), default=0)

    @property
    def high(self) -> int:
        """The smallest batch size that does not fit; larger ones are not tried."""
        above = self.at_most + self.step
        return min((t.batch for t in self.trials if not t.fits), default=above)

    def result(self, progress: Progress, first: int) -> MaxBatch:
        complete = True
        try:
            self.run(progress, self.rounded(first))
        except KeyboardInterrupt:
            if not self.trials:
                raise
            complete = False
        if (shown := self.best or self.last) is not None:
            _compile.warn_of_offload_on_cpu(shown, self.call)
        best, planning = self.best, 0
        if best is not None and complete and is_plan(self.policy):
            progress(f"{self.described(self.low)}: the fastest plan")
            loss, planning = self.model.planned(self.policy, self.low, self.chip)
            faster = self.model.compiled(loss, self.low, self.chip, self.call)
            best = faster if faster.memory.fits else best
        return MaxBatch(
            batch=self.low,
            policy=policy_text(self.policy),
            target=self.chip.name,
            memory_bytes=self.chip.memory_bytes,
            step=self.step,
            trials=tuple(self.trials),
            step_seconds=None if best is None else step_seconds_of(best, self.chip),
            complete=complete,
            planning_compiles=planning,
            notes=self.notes(complete),
        )

    def run(self, progress: Progress, guess: int) -> None:
        hop = self.step
        while (self.high - self.low) > self.step:
            low, high = self.low, self.high
            batch = guess
            if guess <= low:
                batch = low + hop
            elif guess >= high:
                batch = high - hop
            if not low < batch < high:
                batch = self.rounded((low + high) // 2)
            progress(self.described(batch))
            trial = self.tried(batch)
            # The line was wrong by more than a step: move away from it in growing steps.
            surprised = (guess <= low and trial.fits) or (guess >= high and not trial.fits)
            hop = 2 * hop if surprised else self.step
            guess = self.guess()

    def rounded(self, batch: float) -> int:
        return min(max(int(batch) // self.step, 1) * self.step, self.at_most)

    def guess(self) -> int:
        """Return the batch size at which the line through the trials reaches the chip's memory."""
        if len(self.trials) >= _PATIENCE and self.high <= self.at_most:
            return self.rounded((self.low + self.high) / 2)
        limit = self.chip.memory_bytes
        known = [(t.batch, t.peak_bytes) for t in self.trials if t.peak_bytes is not None]
        known.sort(key=lambda point: abs(point[1] - limit))
        slope = _local_slope(known) or self.first_slope()
        if not known or slope <= 0:
            return self.rounded(2 * self.low if self.low else self.high / 2)
        batch, peak = known[0]
        met = batch + (limit - peak) / slope
        around = [point for point in known if point[0] in (self.low, self.high)]
        if len(around) == 2 and not self.low < met < self.high:
            (batch, peak), (other, reached) = around
            met = batch + (limit - peak) * (other - batch) / ((reached - peak) or 1)
        # Below one step the answer is 0, which `rounded` would hide.
        return 0 if met < self.step else self.rounded(met)

    def first_slope(self) -> float:
        """Return a slope from one program, as if only its temporaries grew with the batch."""
        memory = self.trials[0].memory
        return (memory.temp_bytes or 0) / self.trials[0].batch if memory is not None else 0.0

    def tried(self, batch: int) -> Trial:
        loss = self.model.loss(self.policy, batch, self.chip)
        try:
            compiled = self.model.compiled(loss, batch, self.chip, self.call)
        except CompileError as error:
            if not self.low:
                raise
            trial = Trial(batch, False, None, reason=error.message)
        else:
            self.last = compiled
            self.chip = compiled.chip  # with as many devices as the program's mesh
            trial = Trial(batch, compiled.memory.fits, compiled.memory)
            if trial.fits and batch > self.low:
                self.best = compiled
        self.trials.append(trial)
        structs = jax.tree.leaves(abstract(loss[1], call=self.call))
        self.check_growth([(s.shape, s.dtype) for s in structs])
        return trial

    def check_growth(self, arguments: Any) -> None:
        first, last = self.trials[0], self.trials[-1]
        if len(self.trials) == 2 and (arguments, last.peak_bytes) == (
            self.arguments,
            first.peak_bytes,
        ):
            raise same_program(self.model, first.batch, last.batch, self.call)
        self.arguments = arguments

    def described(self, batch: int) -> str:
        known = [f"{self.low} fits"] if self.low else []
        known += [f"{self.high} does not"] if any(not t.fits for t in self.trials) else []
        text = f"{policy_text(self.policy)} on {self.chip.name}: {self.model.batch_name} {batch}"
        return text + (f" ({', '.join(known)})" if known else "")

    def notes(self, complete: bool) -> tuple[str, ...]:
        shown = next((t for t in self.trials if t.batch == self.low), self.trials[-1]).memory
        found = [] if complete else ["interrupted: a larger batch may fit"]
        if complete and self.low == self.at_most:
            found.append(f"nothing above {self.at_most} was tried")
        if complete and not self.low and (last := self.trials[-1].memory) is not None:
            fixed = last.argument_bytes + last.output_bytes - (last.alias_bytes or 0)
            if fixed > self.chip.memory_bytes:
                found.append(f"arguments and results alone take {format_bytes(fixed)}")
        found += [f"{t.batch}: {t.reason}" for t in self.trials if t.reason]
        return (*found, *(() if shown is None else shown.all_notes))


_PATIENCE = 8  # number of programs after which the search bisects


def _local_slope(known: Sequence[tuple[int, int]]) -> float | None:
    """Return bytes per example near the first of some points, from the next distant point.

    The line has kinks where the compiler begins to save memory by itself, and small steps where it
    rounds sizes up.
    """
    for batch, peak in known[1:]:
        if abs(batch - known[0][0]) >= max(batch, known[0][0]) / 64:
            return (peak - known[0][1]) / (batch - known[0][0])
    return None


def _slope(trials: Sequence[Trial]) -> float | None:
    """Return the growth of the peak in bytes per example, between the outermost known trials."""
    known = sorted((t.batch, t.peak_bytes) for t in trials if t.peak_bytes is not None)
    if len(known) < 2:
        return None
    (first, low), (last, high) = known[0], known[-1]
    return (high - low) / (last - first)
