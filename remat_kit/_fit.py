"""How large a batch fits: the largest by search, and a table of chips, policies and batch sizes.

Every answer is a program that was compiled for its chip. What a chip with less memory runs may be
another program, for its compiler knows the memory, so each chip is compiled for; where the compiler
is told the same for two of them (``cpu`` and ``cpu@4GiB``), the second answer comes from the cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from remat_kit import _anatomy, _frontier, _hlo, _plan, _remat, _target
from remat_kit._builder import Builder, Loss
from remat_kit._errors import CompileError, NotDifferentiableError, RematKitError, UserError
from remat_kit._gradient import Argnums, abstract
from remat_kit._policy import as_policy, format_bytes
from remat_kit._report import NO_POLICY, policy_text, versions
from remat_kit._roofline import estimate
from remat_kit._table import Table, format_seconds
from remat_kit._target import Compiled, Memory, Target

Progress = Callable[[str], None]

# Policies that are made anew for each chip and batch size, and whether they may offload.
PLANS = {"plan": False, "plan+offload": True}
AT_MOST = 2**20
_FIRST = 8  # where the builder has no batch of its own


# -- what is compiled -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Model:
    """A builder of which everything is decided but the policy and the batch size.

    Attributes:
        builder: makes the loss.
        sizes: what else it is called with.
        at: the module paths that policies are applied at; None leaves it to the builder.
        batch_name: its parameter for the batch size.
        argnums, donate_argnums: as for `remat_kit.measure`.
    """

    builder: Builder
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    at: str | None = None
    batch_name: str = "batch"
    argnums: Argnums = 0
    donate_argnums: int | Sequence[int] = ()

    def check(self, policies: Sequence[Any], call: str) -> None:
        """Raise where the builder has no place for the batch, or for one of the policies."""
        if not self.builder.takes(self.batch_name):
            names = [name for name in _parameters(self.builder.function) if name != "policy"]
            raise UserError(
                f"`{call}`: the builder `{self.builder.address}` takes no {self.batch_name!r}, so "
                f"nothing says how large the batch is; it takes {', '.join(names) or 'nothing'}",
                hint="give it a parameter `batch`, or name the one that it has with "
                "`batch_name=` (--batch-name on the command line)",
            )
        if self.batch_name in self.sizes:
            raise UserError(
                f"`{call}`: {self.batch_name}={self.sizes[self.batch_name]!r} is given, and it is "
                "what is varied here",
                hint=f"leave {self.batch_name} out of the sizes",
            )
        given = [policy for policy in policies if not _is_plan(policy)]
        if len(given) < len(policies) and self.argnums is None:
            raise UserError(
                f"`{call}`: a plan is made for a loss, and argnums=None says that the builder "
                "gives a whole step",
                hint="plan the loss with `remat_kit.plan`, and build the step of the planned loss",
            )
        some = any(as_policy(policy, call=call) is not None for policy in given)
        if some and self.at is None and not self.builder.takes("policy"):
            raise UserError(
                f"`{call}`: the builder `{self.builder.address}` takes no policy",
                hint="say with `at=` (--at) where the policies go, for example '*/block_*', or "
                "give the builder a parameter `policy`",
            )

    def loss(self, policy: Any, batch: int, chip: Target | None = None) -> Loss:
        """Build the loss for a batch size, with a policy on it, or the plan of least memory."""
        sizes = {**self.sizes, self.batch_name: batch}
        if _is_plan(policy):
            fn, args = self.builder.build(sizes)
            with self.builder.explained((fn, args)):
                found = _frontier.frontier(
                    fn,
                    *args,
                    target=chip or "cpu",
                    argnums=self._argnums,
                    objective="balanced",
                    offload=PLANS[policy],
                )
            return _remat.policy(found.policy(found.points[0]))(fn), args
        if policy is None or policy == NO_POLICY:
            return self.builder.build(sizes)
        if self.at is None:
            return self.builder.build(sizes, policy)
        fn, args = self.builder.build(sizes)
        return _remat.policy(policy, at=self.at)(fn), args

    def compiled(self, loss: Loss, batch: int, chip: Target, call: str) -> Compiled:
        """Compile the gradient; a program that needs too much memory is an answer too."""
        fn, args = loss
        try:
            return _target.compile_program(
                fn,
                args,
                chip,
                argnums=self.argnums,
                donate_argnums=self.donate_argnums,
                call=call,
            )
        except RematKitError:
            raise
        except Exception:
            with self.builder.explained(self.loss(None, batch)):
                raise

    def planned(self, policy: str, batch: int, chip: Target) -> tuple[Loss, int]:
        """Build the loss with the fastest plan that fits; where none does, that of least memory.

        Returns:
            The loss and how many programs were compiled for the plan.
        """
        fn, args = self.loss(None, batch)
        try:
            with self.builder.explained((fn, args)):
                plan = _plan.plan(
                    fn,
                    *args,
                    budget="fit",
                    target=chip,
                    argnums=self._argnums,
                    offload=PLANS[policy],
                )
        except NotDifferentiableError:
            raise
        except UserError:  # nothing fits
            return self.loss(policy, batch, chip), 0
        return (_remat.policy(plan)(fn), args), plan.tried

    @property
    def _argnums(self) -> int | Sequence[int]:
        assert self.argnums is not None
        return self.argnums

    def first_batch(self) -> int:
        """Return the builder's own batch size, if it has one."""
        given = _parameters(self.builder.function).get(self.batch_name)
        default = None if given is None else given.default
        if isinstance(default, int) and not isinstance(default, bool) and default > 0:
            return default
        return _FIRST


def _is_plan(policy: Any) -> bool:
    return isinstance(policy, str) and policy in PLANS


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


class _Given(Builder):
    """A builder that came as a function: what it raises reaches the caller as it is."""

    @contextlib.contextmanager
    def explained(self, loss: Loss | None = None) -> Iterator[None]:
        del loss
        yield


def _model(build: Any, call: str, **rest: Any) -> Model:
    if not callable(build):
        raise UserError(
            f"`{call}`: {build!r} is no builder",
            hint="give a function that is called as `build(batch=8)` and returns "
            "`(loss_fn, args)`; `functools.partial` gives it other sizes",
        )
    name = getattr(inspect.unwrap(_inner(build)), "__name__", type(build).__name__)
    return Model(_Given(name, build, pathlib.Path.cwd()), **rest)


def _inner(build: Any) -> Any:
    while isinstance(build, functools.partial):
        build = build.func
    return build


def _step_seconds(compiled: Compiled, chip: Target) -> float | None:
    """Return the roofline of a compiled step; None where the compiler gave no program."""
    if compiled.hlo_text is None:
        return None
    program = _hlo.parse(compiled.hlo_text)
    return estimate(program, chip, _anatomy.origins(program), chip_name=chip.name).seconds


class _Shown:
    """Print as text, as a table where `rich` prints, and as HTML in a notebook."""

    def table(self) -> Table:
        raise NotImplementedError

    def __str__(self) -> str:
        return self.table().text()

    def __rich_console__(self, console: Any, options: Any) -> Any:
        del console, options
        yield self.table().rich()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        del cycle
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return f'<div class="remat-kit">{self.table().html()}</div>'


# -- the largest batch ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trial:
    """One batch size that was compiled.

    Attributes:
        batch: examples in it.
        fits: whether the program fits.
        memory: what it needs; None where the compiler refused it for another reason than memory.
        reason: that reason.
    """

    batch: int
    fits: bool
    memory: Memory | None
    reason: str = ""

    @property
    def peak_bytes(self) -> int | None:
        """What the program needs; None where the compiler does not say."""
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
class MaxBatch(_Shown):
    """The largest batch that fits a chip.

    Attributes:
        batch: the largest that was compiled and fits; 0 when none does.
        policy: its name or its text; ``none`` without one.
        target: the chip's name.
        memory_bytes: what the chip has.
        step: batch sizes are multiples of this.
        trials: every program that was compiled, in order.
        step_seconds: a lower bound of the step at ``batch``, by the roofline; None when none fits.
            With ``"plan"`` of the fastest plan that fits there.
        complete: whether the search ended by itself; it did not when it was interrupted.
        planning_compiles: programs that the fastest plan took beside the trials, with ``"plan"``.
        notes: what to know about the answer.
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
        """How many programs the answer took; those found in the cache count too."""
        return len(self.trials) + self.planning_compiles

    @property
    def bytes_per_example(self) -> float | None:
        """Growth of the peak with the batch, between the outermost programs."""
        return _slope(self.trials)

    @property
    def examples_per_second(self) -> float | None:
        """An upper bound, by the roofline."""
        return self.batch / self.step_seconds if self.step_seconds else None

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`.

        The keys::

            policy, target       str
            batch                int    the largest that was compiled and fits, 0 when none does
            step                 int    batches are multiples of it
            memory_bytes         int    of the chip
            peak_bytes, headroom_bytes, host_bytes   int    at that batch, or null
            refused_batch, refused_peak_bytes        int    the smallest that does not fit, or null
            bytes_per_example    float  or null
            step_seconds, examples_per_second        float  bounds by the roofline, or null
            compiles             int    programs it took, those found in the cache too
            cached               int    trials that were found in the cache
            complete             bool   false when it was interrupted
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

    def table(self) -> Table:
        """Return the answer as a table of one row."""
        return max_batch_table([self])


def max_batch_table(found: Sequence[MaxBatch], model: str = "") -> Table:
    """Return several answers as a table, each held against ``none`` on its chip."""
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
                "" if m.best is None else _bytes(m.best.peak_bytes),
                format_bytes(m.memory_bytes),
                "" if refused is None else f"{refused.batch}: {_refusal(refused)}",
                _bytes(m.bytes_per_example),
                "" if m.step_seconds is None else format_seconds(m.step_seconds / m.batch),
                str(m.compiles),
            )
        )
    columns = ("target", "policy", "batch", "peak", "memory", "does not fit", "per example")
    notes = dict.fromkeys(f"note: {m.target}, {m.policy}: {n}" for m in found for n in m.notes)
    title = "the largest batch that fits" + (f", {model}" if model else "")
    return Table(title, (*columns, "time of one ≥", "compiled"), tuple(rows), "\n".join(notes))


def _bytes(size: float | None) -> str:
    return "?" if size is None else format_bytes(size)


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
    progress: Progress | None = None,
) -> MaxBatch:
    """Find the largest batch whose training step fits a chip, by compiling a few batch sizes.

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

    The peak of a step is nearly a straight line in the batch size: two programs give the line, the
    next ones are tried where it meets the chip's memory. The answer fits, and the next batch size
    does not; both were compiled.

    Args:
        build: called as ``build(batch=n)``, and with ``policy=`` too where there is a policy and no
            ``at``; returns ``(loss_fn, args)``. Other sizes are given with `functools.partial`.
        target: the chip; ``h100@40GiB`` is one with less memory.
        policy: as `remat_kit.policy` takes it; None for none; ``"plan"`` for a plan that is made
            for each batch size, of the least memory; ``"plan+offload"`` for one that may keep what
            scans hold in the host's memory.
        at: the module paths that the policy is applied at, not through the builder.
        batch_name: the builder's parameter for the batch size.
        start: the first batch size to compile; by default the builder's own.
        step: only multiples of this are tried.
        at_most: no batch above this is tried.
        argnums: what to differentiate; None where the builder gives a whole training step.
        donate_argnums: the arguments whose memory the results may take over.
        progress: called with a line of text before each program is compiled; `print` will do.

    Returns:
        The answer; after Ctrl-C the best one so far, ``complete`` then being False.

    Raises:
        UserError: the builder takes no batch size, or its program does not depend on it.
        RematKitError: the call cannot work, as for `remat_kit.measure`.
    """
    call = "max_batch"
    model = _model(
        build,
        call,
        at=at,
        batch_name=batch_name,
        argnums=argnums,
        donate_argnums=donate_argnums,
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
    """Do what `max_batch` does, for a model that was checked."""
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
    """The batch sizes tried so far, and what follows from them."""

    def __init__(
        self, model: Model, policy: Any, chip: Target, step: int, at_most: int, call: str
    ) -> None:
        self.model, self.policy, self.chip, self.call = model, policy, chip, call
        self.step, self.at_most = step, at_most
        self.trials: list[Trial] = []
        self.arguments: Any = None
        self.best: Compiled | None = None

    @property
    def low(self) -> int:
        return max((t.batch for t in self.trials if t.fits), default=0)

    @property
    def high(self) -> int:
        """What is not tried: the smallest that does not fit, and all from there on."""
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
        best, planning = self.best, 0
        if best is not None and complete and _is_plan(self.policy):
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
            step_seconds=None if best is None else _step_seconds(best, self.chip),
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
            # The line was off by more than a step: go further and further from it.
            surprised = (guess <= low and trial.fits) or (guess >= high and not trial.fits)
            hop = 2 * hop if surprised else self.step
            guess = self.guess()

    def rounded(self, batch: float) -> int:
        return min(max(int(batch) // self.step, 1) * self.step, self.at_most)

    def guess(self) -> int:
        """Where the line through what is known meets the chip's memory."""
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
        # Below one step it is as good as nothing, and `rounded` would hide that.
        return 0 if met < self.step else self.rounded(met)

    def first_slope(self) -> float:
        """With one program: as if all its temporaries grew with the batch, and nothing else."""
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
            raise UserError(
                f"`{self.call}`: {self.model.batch_name}={first.batch} and "
                f"{self.model.batch_name}={last.batch} give the same program, so "
                f"{self.model.batch_name!r} is not the size of the batch",
                hint="name the builder's parameter that is with `batch_name=` (--batch-name on "
                "the command line)",
            )
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
        return (*found, *(() if shown is None else shown.notes))


_PATIENCE = 8  # programs after which the bracket is halved, whatever the line says


def _local_slope(known: Sequence[tuple[int, int]]) -> float | None:
    """Bytes per example beside the first of some points, by the next one that is not too near.

    The line has kinks, where the compiler begins to save memory by itself, and small steps, where
    it rounds sizes up.
    """
    for batch, peak in known[1:]:
        if abs(batch - known[0][0]) >= max(batch, known[0][0]) / 64:
            return (peak - known[0][1]) / (batch - known[0][0])
    return None


def _slope(trials: Sequence[Trial]) -> float | None:
    """Bytes of the peak per example, between the outermost programs whose peak is known."""
    known = sorted((t.batch, t.peak_bytes) for t in trials if t.peak_bytes is not None)
    if len(known) < 2:
        return None
    (first, low), (last, high) = known[0], known[-1]
    return (high - low) / (last - first)


# -- the fit matrix ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cell:
    """One policy with one batch size on one chip.

    Attributes:
        target: the chip's name.
        policy: its name or its text; ``none`` without one.
        batch: examples in a step.
        memory: what the step needs, and whether it fits.
        step_seconds: a lower bound by the roofline; None where the compiler gave no program.
        slowdown: time of an example against that with no policy, by the roofline; None where one
            of the two is not known.
        baseline_batch: the batch size with no policy that it is held against: the same one, or the
            largest that the compiler gave a program for.
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
        """Whether the step fits."""
        return self.memory.fits

    @property
    def headroom_bytes(self) -> int | None:
        """What it leaves of the chip's memory; negative when it does not fit."""
        return self.memory.headroom_bytes

    def __str__(self) -> str:
        room = self.headroom_bytes
        if self.fits:
            text = f"yes, {_bytes(room)} left"
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
class Fit(_Shown):
    """Chips, policies and batch sizes: what fits, what is left, what it costs.

    Attributes:
        cells: what was compiled; the last ones are missing after Ctrl-C.
        complete: whether all are there.
        model: what the builder is called.
    """

    cells: tuple[Cell, ...]
    complete: bool = True
    model: str = ""

    def __getitem__(self, place: tuple[str, Any, int]) -> Cell:
        """Return the cell of a chip, a policy and a batch size, or raise `KeyError`."""
        target, policy, batch = place
        for cell in self.cells:
            if (cell.target, cell.policy, cell.batch) == (target, policy_text(policy), batch):
                return cell
        raise KeyError(place)

    @property
    def fitting(self) -> tuple[Cell, ...]:
        """The cells that fit, largest batch first, then the fastest by the roofline."""
        return tuple(sorted((c for c in self.cells if c.fits), key=_largest_then_fastest))

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know about the figures."""
        own = [] if self.complete else ["interrupted: some are missing"]
        return tuple(dict.fromkeys([*own, *(n for c in self.cells for n in c.memory.notes)]))

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`.

        The keys::

            targets, policies    list of str
            batches              list of int
            cells                list, one object for each that was compiled:
                target, policy   str
                batch            int
                fits             bool
                peak_bytes, temp_bytes, host_bytes   int   null where the compiler does not say
                memory_bytes, headroom_bytes         int   of the chip, and what is left of it
                step_seconds     float   lower bound by the roofline, or null
                slowdown         float   time of an example against none, by the roofline, or null
                baseline_batch   int     of the program of none that it is held against, or null
                compile_seconds  float
                cached           bool
            complete             bool    false when it was interrupted
            notes                list of str
            versions             object
        """
        named = {"model": self.model} if self.model else {}
        return named | {
            "targets": list(dict.fromkeys(c.target for c in self.cells)),
            "policies": list(dict.fromkeys(c.policy for c in self.cells)),
            "batches": sorted({c.batch for c in self.cells}),
            "cells": [c.to_json() for c in self.cells],
            "complete": self.complete,
            "notes": list(self.notes),
            "versions": versions(),
        }

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
            footer.append("×: time of an example against none, by the roofline")
        if any(c.slowdown and c.baseline_batch != c.batch for c in self.cells):
            footer.append("*: none has no program there; against its largest batch that has one")
        footer += [f"note: {note}" for note in self.notes]
        columns = ("target", "memory", "policy", *(f"batch {b}" for b in batches))
        title = "what fits" + (f", {self.model}" if self.model else "")
        return Table(title, columns, tuple(rows), "\n".join(footer))


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
    progress: Progress | None = None,
) -> Fit:
    """Compile a training step for chips, policies and batch sizes, and say which of them fit.

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
        build, at, batch_name, argnums, donate_argnums, progress: as for `max_batch`.
        batches: the batch sizes.
        policies: each as `remat_kit.policy` takes it; ``none`` is always the first. ``"plan"`` is
            the fastest plan that fits, made for each chip and batch size; ``"plan+offload"`` is one
            that may keep what scans hold in the host's memory.
        targets: the chips, or their names.

    Returns:
        A value that prints as a table; after Ctrl-C what is known so far, ``complete`` then being
        False.

    Raises:
        UserError: the builder takes no batch size, or nothing is asked for.
        RematKitError: the call cannot work, as for `remat_kit.measure`.
    """
    call = "fit"
    model = _model(
        build,
        call,
        at=at,
        batch_name=batch_name,
        argnums=argnums,
        donate_argnums=donate_argnums,
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
    """Do what `fit` does, for a model that was checked."""
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
    try:
        for chip in chips:
            for batch in sorted(set(batches)):
                for name, policy in asked.items():
                    if progress is not None:
                        progress(f"{name} on {chip.name}: batch {batch}{_so_far(cells, chip)}")
                    cells.append(_cell(model, name, policy, chip, batch, call))
    except KeyboardInterrupt:
        if not cells:
            raise
        complete = False
    return Fit(tuple(_held_against_none(cells)), complete, model.builder.address)


def _so_far(cells: Sequence[Cell], chip: Target) -> str:
    fitting = [c for c in cells if c.target == chip.name and c.fits]
    if not fitting:
        return ""
    best = max(fitting, key=lambda c: c.batch)
    return f" ({best.batch} fits with {best.policy})"


def _cell(model: Model, name: str, policy: Any, chip: Target, batch: int, call: str) -> Cell:
    if _is_plan(policy):
        loss, _ = model.planned(policy, batch, chip)
    else:
        loss = model.loss(policy, batch, chip)
    compiled = model.compiled(loss, batch, chip, call)
    return Cell(chip.name, name, batch, compiled.memory, _step_seconds(compiled, chip))


def _held_against_none(cells: Sequence[Cell]) -> Iterator[Cell]:
    """Add the slowdowns; a chip that refuses what does not fit has no time for it."""
    known = [c for c in cells if c.policy == NO_POLICY and c.step_seconds]
    for cell in cells:
        of_chip = {c.batch: c for c in known if c.target == cell.target}
        base = of_chip.get(cell.batch) or of_chip.get(max(of_chip, default=0))
        if base is None or base.step_seconds is None or cell.step_seconds is None:
            yield cell
            continue
        slowdown = (cell.step_seconds / cell.batch) / (base.step_seconds / base.batch)
        yield dataclasses.replace(cell, slowdown=slowdown, baseline_batch=base.batch)
