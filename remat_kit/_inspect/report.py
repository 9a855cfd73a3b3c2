"""Report what a training step saves, what it computes twice and what that costs on a chip.

A report is a value. It prints as plain text, as tables where `rich` prints it, as HTML in a
notebook, and as JSON. Its methods also write it as a page, a picture and a trace.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_kit import _files, _frames
from remat_kit._apply import decorate as _decorate
from remat_kit._apply import void as _void
from remat_kit._chip import compile as _compile
from remat_kit._chip.memory import Memory
from remat_kit._chip.target import Target
from remat_kit._compiled.duplicates import RecomputedOps
from remat_kit._inspect import recomputed as _recomputed
from remat_kit._inspect import residuals as _residuals
from remat_kit._inspect.compare import Change as Change
from remat_kit._inspect.compare import compare as compare
from remat_kit._inspect.diff import Diff as Diff
from remat_kit._inspect.diff import diff as diff
from remat_kit._inspect.headline import headline as _headline
from remat_kit._inspect.lints.lint import lints_of
from remat_kit._inspect.lints.scene import CompiledFacts, Lint
from remat_kit._inspect.reading import Reading, TracedReading, read
from remat_kit._inspect.recomputed import Recomputed, UnknownCost
from remat_kit._inspect.residuals import Residual
from remat_kit._inspect.tables import (
    EVERYTHING,
    SHORT,
    Totals,
    lint_tables,
    memory_table,
    policy_text,
    reading_tables,
    recomputed_table,
    saved_table,
    summary_table,
    target_names,
    today,
    totals_by,
    unknown_table,
    versions,
)
from remat_kit._inspect.whatif import worthwhile
from remat_kit._program import ops as _ops
from remat_kit._program.paths import roll_up as roll_up
from remat_kit._program.steps.gradient import Gradient
from remat_kit._program.steps.losses import Loss, gradients_of
from remat_kit._show import figures as _figures
from remat_kit._show import page as _page
from remat_kit._show.table import Lines, Shown, Table, headed

# -- one report -------------------------------------------------------------------------------


def inspect(
    fn: Callable[..., Any],
    *args: Any,
    policy: Any = None,
    at: str | None = None,
    target: str | Target | Sequence[str | Target] | None = None,
    argnums: int | Sequence[int] = 0,
    optimizer: Any = None,
    label: str | None = None,
    against: Any = None,
) -> Report:
    """Report what the gradient of a loss saves, what it computes twice, and what a chip needs.

    This function follows `jax.ad_checkpoint.print_saved_residuals` and adds the cost of each value.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.sum(jnp.sin(jnp.tanh(x @ w)))
    >>> w = x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> report = inspect(loss, w, x, policy="dots")
    >>> [(r.primitive, r.bytes, r.reason) for r in report.saved]
    [('dot_general', 16384, 'save(dots)')]
    >>> [r.primitive for r in report.recomputed]
    ['tanh']

    Args:
        fn: called as ``fn(*args)``; returns a real scalar, or a pair of a scalar and anything. It
            may also be a training step, jitted or not: the report then lists what its losses save,
            and compiles the whole step.
        args: pytrees of arrays or `jax.ShapeDtypeStruct`.
        policy: applied to ``fn`` first, as `remat_kit.policy` does; None changes nothing.
        at: the module paths that ``policy`` is applied at.
        target: one chip or several to compile for; by default nothing is compiled.
        argnums: which arguments to differentiate.
        optimizer: an ``optax.GradientTransformation``. If it is given, the whole training step
            with this optimizer is compiled, as for `measure`.
        label: the name of the report; by default the policy.
        against: an earlier report, or the path of one that ``remat-kit inspect --json`` wrote. The
            report then also says what grew and what shrank since, as `compare` does.

    Returns:
        A report. ``saved`` holds intermediate values only. Arguments and constants that the
        backward pass reads are in ``inputs``, because they are live anyway.

    Raises:
        NotDifferentiableError, UserError: ``fn`` has no gradient for these arguments.
        PolicyError, UnknownNameError: the policy does not fit the loss.
        TargetError: a chip is not known, or this machine cannot compile for it.
    """
    _void.check_at(policy, at, "inspect")
    loss = fn if policy is None else _decorate.policy(policy, at=at)(fn)
    step, parts = gradients_of(loss, args, argnums, call="inspect")
    gradients = [part.gradient for part in parts]
    _recomputed.warn_of_pieces(gradients, "inspect")
    kept = [_residuals.kept_of(gradient) for gradient in gradients]
    recomputed = [tuple(_recomputed.recomputed_of(gradient)) for gradient in gradients]
    forward_flops = [_recomputed.forward_flops(gradient) for gradient in gradients]
    chips = _OnTargets()
    if names := target_names(target):
        traced = [
            TracedReading.of(part, [r for _, r in saved])
            for part, saved in zip(parts, kept, strict=True)
        ]
        wrt = argnums if step is None else None
        for name in names:
            chips.add(loss, args, name, argnums=wrt, optimizer=optimizer, traced=traced)
    chosen, place = _decorate.applied(loss)
    lints = tuple(
        dict.fromkeys(
            lint
            for gradient, saved, again, flops in zip(
                gradients, kept, recomputed, forward_flops, strict=True
            )
            for lint in lints_of(
                gradient,
                saved,
                again,
                forward_flops=flops,
                policy=chosen,
                at=place,
                compiled=chips.facts(),
            )
        )
    )
    for lint in lints:
        if lint.code in _VOID and chips.readings:
            _frames.warn(f"`inspect`: {lint.message}", lint.fix)
    unknown = tuple(u for gradient in gradients for u in _recomputed.unknown_costs(gradient))
    parameters = [leaf for part in parts for leaf in part.parameters]
    report = Report(
        policy=label or policy_text(policy),
        saved=tuple(r for saved in kept for _, r in saved if not r.is_input),
        inputs=tuple(r for saved in kept for _, r in saved if r.is_input),
        recomputed=tuple(r for again in recomputed for r in again),
        forward_flops=sum(forward_flops),
        losses=() if step is None else tuple(StepLoss.of(loss) for loss in step.losses),
        memory=chips.memory,
        hlo=chips.hlo,
        readings=chips.readings,
        notes=tuple(dict.fromkeys(_notes(chips, step, unknown, gradients))),
        lints=lints,
        unknown_costs=unknown,
        parameters=sum(x.size for x in parameters),
        parameter_bytes=sum(_ops.nbytes(x) for x in parameters),
    )
    return report if against is None else report.against(against)


@dataclasses.dataclass(frozen=True)
class _OnTargets:
    """A loss or a step compiled for several targets: what is known of it, by the target's name.

    Attributes:
        memory: the memory that it needs.
        before: of a step with a policy, the memory that it needs without the policy.
        readings: what was read from the compiled program, where the compiler returns it.
    """

    memory: dict[str, Memory] = dataclasses.field(default_factory=dict)
    before: dict[str, Memory | None] = dataclasses.field(default_factory=dict)
    readings: dict[str, Reading] = dataclasses.field(default_factory=dict)

    def add(
        self,
        loss: Callable[..., Any],
        args: Sequence[Any],
        chip: Any,
        *,
        argnums: int | Sequence[int] | None,
        optimizer: Any,
        traced: Sequence[TracedReading],
    ) -> None:
        """Compile for one more target. ``argnums`` is None for a step."""
        compiled = _compile.compile_program(
            loss, args, chip, argnums=argnums, optimizer=optimizer, call="inspect"
        )
        _compile.warn_of_offload_on_cpu(compiled, "inspect")
        name = compiled.memory.target
        self.memory[name] = compiled.memory
        if argnums is None:
            self.before[name] = _compile.without_policy(compiled, loss, args)
            _compile.warn_if_not_lower(compiled.memory, self.before[name], loss, "inspect")
        reading = read(compiled, traced)
        if reading is not None:
            self.readings[name] = reading

    @property
    def hlo(self) -> dict[str, RecomputedOps]:
        """The operations that the compiled programs compute twice."""
        return {name: reading.ops for name, reading in self.readings.items()}

    def facts(self) -> dict[str, CompiledFacts]:
        """Return what the lints need to know."""
        return {
            name: CompiledFacts(
                memory,
                self.hlo.get(name),
                self.before.get(name),
                collectives=self.readings[name].collectives if name in self.readings else (),
                peak=self.readings[name].peak if name in self.readings else None,
            )
            for name, memory in self.memory.items()
        }


def _notes(
    chips: _OnTargets, step: Any, unknown: Sequence[UnknownCost], gradients: Sequence[Gradient]
) -> list[str]:
    """Return what the reader must know about the figures of a report."""
    notes = [n for m in chips.memory.values() for n in m.all_notes]
    if any(m.devices > 1 for m in chips.memory.values()):
        notes.append("the program is partitioned: bytes, FLOPs and times are those of one device")
    unplaced = dict.fromkeys(name for gradient in gradients for name in gradient.unplaced)
    if unplaced:
        names = ", ".join(unplaced)
        notes.append(
            f"it is unknown how the devices split {names}: the traced FLOPs and bytes of these "
            "operations, saved, recomputed or in the loss, are those of all devices together"
        )
    estimated = {name for gradient in gradients for name in gradient.estimated}
    if kinds := [text for name, text in _ESTIMATED.items() if name in estimated]:
        notes.append(
            f"the traced FLOPs of {' and '.join(kinds)} are estimates, because the partitioner may "
            "split them in another way; the roofline's are those of the compiled program"
        )
    if step is not None:
        notes.append("a training step, with " + "; ".join(str(StepLoss.of(x)) for x in step.losses))
    if unknown:
        names = ", ".join(dict.fromkeys(u.primitive for u in unknown))
        notes.append(f"cost unknown of {names}: the FLOPs and times here leave it out")
    for place, reading in chips.readings.items():
        if silent := ", ".join(reading.estimate.uncounted):
            notes.append(
                f"the step time on {place} counts only the bytes of {silent}: the compiled program "
                "does not say how much they compute"
            )
    return notes


_ESTIMATED = {
    "conv_general_dilated": "convolutions that the devices split",
    "dot_general": "products whose operands and result are split in contradicting ways",
}
_VOID = ("offload-dropped", "cse-undone")  # a compiled program shows that the policy had no effect


class ShownReport(Shown):
    """Base class of reports, which can also be pages, pictures and traces."""

    def _repr_html_(self) -> str:
        tables = super()._repr_html_()
        plain = self._plain()
        if not any(r["timeline"] for r in plain["policies"]):
            return tables
        return f"{_page.inline(plain)}<details><summary>as tables</summary>{tables}</details>"

    def _plain(self) -> dict[str, Any]:
        """Return the data of pages and pictures: the JSON of a comparison, with every buffer."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        raise NotImplementedError

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page for a browser that needs no server and no network."""
        _files.write_whole(path, _page.page(self._plain()))

    def to_png(self, path: str | os.PathLike[str], target: str | None = None) -> None:
        """Draw the live bytes over the schedule: by phase for one policy, else a line for each.

        Args:
            path: of the picture; its suffix selects the format: ``.png``, ``.svg`` or ``.pdf``.
            target: one of the targets that were compiled for; the first by default.

        Raises:
            UserError: matplotlib is missing (the extra ``plot``), or nothing was compiled.
        """
        plain = self._plain()
        reports = plain["policies"]
        chosen = _figures.chosen_target(reports, target, call="to_png")
        _figures.check_picture(path, call="to_png")
        title = plain.get("model", "")
        if len(reports) == 1:
            _figures.timeline(reports[0], chosen, path, title=title)
        else:
            _figures.comparison(reports, chosen, path, title=title)

    def to_perfetto(self, path: str | os.PathLike[str], target: str | None = None) -> None:
        """Write the timeline as a trace for ui.perfetto.dev, with 1 µs for each step.

        Args:
            path: of the JSON file.
            target: one of the targets that were compiled for; the first by default.

        Raises:
            UserError: nothing was compiled.
        """
        reports = self._plain()["policies"]
        chosen = _figures.chosen_target(reports, target, call="to_perfetto")
        trace = json.dumps(_figures.perfetto(reports, chosen))
        _files.write_whole(path, trace)


@dataclasses.dataclass(frozen=True)
class StepLoss:
    """A loss that a training step differentiates.

    Attributes:
        name: the function that takes the gradient, and the loss: ``"train_step/loss_fn"``.
        source: its file and line.
        times: how often one step runs it; a loop of unknown length counts once.
        loop: the loops around it in words, or "".
    """

    name: str
    source: str
    times: float = 1.0
    loop: str = ""

    @staticmethod
    def of(loss: Loss) -> StepLoss:
        """Return the description of a loss."""
        return StepLoss(loss.name, loss.source, loss.times, loss.loop)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        often = f", {self.times:g} times" if self.times != 1 else ""
        return f"{self.name} ({self.source}{often}{f', in {self.loop}' if self.loop else ''})"


@dataclasses.dataclass(frozen=True)
class Report(ShownReport):
    """What one policy does to the memory and the time of one loss.

    The saved values are residuals, as `jax.ad_checkpoint.print_saved_residuals` lists them. Memory
    on a target is that of `jax.stages.Compiled.memory_analysis`.

    >>> import jax, jax.numpy as jnp
    >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> report = inspect(lambda w: jnp.sum(jnp.sin(jnp.exp(w @ w))), w, policy="dots")
    >>> report.policy, report.saved_bytes, report.recomputed_flops
    ('dots', 16384, 4096.0)

    Attributes:
        policy: its name or its text, or the title of a plan; ``none`` without a policy.
        saved: the intermediate values that are saved for the backward pass, in program order.
        inputs: the arguments and constants that the backward pass reads.
        recomputed: the operations that the backward pass recomputes, most FLOPs first.
        forward_flops: floating-point operations of the loss alone.
        memory: for each target, the memory that the compiled gradient needs.
        hlo: for each target, the operations that the compiled gradient computes twice.
        readings: for each target, the peak, timeline, regions and time of the compiled gradient.
        notes: what the reader must know about these numbers.
        lints: things that cost memory or time without a benefit, and what to do about them.
        change: the difference from an earlier report, if `against` was called.
        unknown_costs: operations of the loss whose cost is unknown; no FLOPs include them.
        parameters: numbers in the arguments that are differentiated.
        parameter_bytes: their bytes.
        plan_command: the command that the headline names for a plan, without its target; by default
            the Python call.
        losses: of a training step, the losses that it differentiates. What is saved and recomputed
            is then listed for one run of each loss, and memory and readings are of the whole step.
    """

    policy: str
    saved: tuple[Residual, ...]
    inputs: tuple[Residual, ...] = dataclasses.field(repr=False)
    recomputed: tuple[Recomputed, ...]
    forward_flops: float
    memory: Mapping[str, Memory] = dataclasses.field(default_factory=dict, hash=False)
    hlo: Mapping[str, RecomputedOps] = dataclasses.field(default_factory=dict, hash=False)
    readings: Mapping[str, Reading] = dataclasses.field(
        default_factory=dict, hash=False, repr=False
    )
    notes: tuple[str, ...] = ()
    lints: tuple[Lint, ...] = ()
    change: Change | None = None
    unknown_costs: tuple[UnknownCost, ...] = ()
    parameters: int = 0
    parameter_bytes: int = 0
    plan_command: str = dataclasses.field(default="", repr=False, compare=False)
    losses: tuple[StepLoss, ...] = ()

    @property
    def headline(self) -> str:
        """The report in one sentence: what is needed, what holds it, and what to do about it."""
        return _headline([self], self.plan_command)

    def against(self, before: Any) -> Report:
        """Return this report with its differences from an earlier one.

        Args:
            before: a report, or anything else that `compare` takes for one.

        Raises:
            UserError: ``before`` is not a report.
        """
        return dataclasses.replace(self, change=compare(before, self))

    @property
    def saved_bytes(self) -> int:
        """Bytes of the saved values that stay on the device."""
        return sum(r.bytes for r in self.saved if r.memory == "device")

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the saved values that are offloaded to the host's memory."""
        return sum(r.bytes for r in self.saved if r.memory != "device")

    @property
    def recomputed_flops(self) -> float:
        """Floating-point operations that are computed twice."""
        return sum(r.flops for r in self.recomputed)

    def by_module(self) -> dict[str, Totals]:
        """Return totals by module path, most saved bytes first."""
        return totals_by(self, lambda x: x.module)

    def by_primitive(self) -> dict[str, Totals]:
        """Return totals by primitive, most saved bytes first."""
        return totals_by(self, lambda x: x.primitive)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`.

        The keys::

            headline           str     the report in one sentence
            policy             str     the policy: name, text, a plan's title; "none" without one
            saved_bytes        int     of intermediate values saved on the device
            offloaded_bytes    int     of intermediate values saved in the host's memory
            saved              list    one object for each saved value, in program order:
                shape          list of int; of a value computed in a loop, its length comes first
                dtype          str
                bytes          int
                module         str     module path, "" outside every module
                source         str     "file:line" of the user's line, "" if there is none
                reason         str     the rule that saves it ("save(dots)", "offload(dots) to
                                       pinned_host", "not in recompute(...)"), "input of region
                                       PATH", "kept by the policy of region PATH", "output of the
                                       function", or "needed by the backward pass, outside every
                                       region"
                primitive      str     the primitive that computes it
                names          list of str     checkpoint names that the user gave it
                memory         str     "device", or "pinned_host"
                times          int     iterations of the loops around it, else 1
                is_input       bool    false here
                frames         list of str     up to three frames of the user's code, innermost
                                       first: "file:line in function"
            inputs             list    the same for arguments and constants that the backward pass
                                       reads; not counted, because they are live anyway; reason is
                                       "argument NAME" or "constant", is_input is true
            recomputed         list    one object for each primitive, module, line and shape that
                                       is computed twice, most FLOPs first:
                primitive      str
                module         str     of the forward pass
                source         str
                count          int     how many; in a loop once for each iteration
                flops          float   of all of them; 0 for operations that only move data
                bytes          int     of their results together
                shape, dtype   of one result
                region         str     module path of the checkpoint region
                cost_known     bool    false if the cost is unknown and flops leave it out
                pieces         str     the loop over pieces that recomputes it, as "16 pieces of
                                       axis 0", or ""; shape is then that of one piece
            parameters         int     numbers in the arguments that are differentiated
            parameter_bytes    int     their bytes
            recomputed_flops   float
            forward_flops      float   of the loss alone
            unknown_costs      list    operations of the loss whose cost is unknown, so that no
                                       FLOPs include them: primitive, module, source, count
            memory             object, by target; null if the compiler did not say:
                temp_bytes, argument_bytes, output_bytes, alias_bytes, host_bytes, code_bytes,
                peak_bytes     int     peak: arguments + outputs - aliased + temporaries
                compiler_peak_bytes, memory_bytes, headroom_bytes, needs_bytes  int
                fits           bool
                optimizer_bytes       int     of the state of the optimizer, if one is counted
                adamw_bytes           int     the state of AdamW, if no optimizer is counted
                step_seconds, measured_peak_bytes     for "local"
                compile_seconds, cached, notes, target, versions
            hlo_recomputed_ops           object: target to int; operations that the compiled
                                         program computes twice, each with its original still there
            hlo_recomputed_by_primitive  object: target to {primitive: int}
            hlo_xla_remat                object: target to int; XLA's own rematerialization
            peak               object, by target: the step that needs the most memory
                bytes          int     arguments, outputs and temporaries alive then, by a walk over
                                       the compiled schedule
                compiler_bytes int     what the compiler says, as memory's peak_bytes
                packing_bytes  int     their difference: gaps in its heap, its own scratch
                phase          str     "forward", "recompute", "backward", "update" or "other"
                step, steps    int     position in the schedule, and its length
                module         str     of the instruction that runs then
                pieces         str     the loop over pieces that the instruction is in, or ""
                attributed_fraction  float   of the bytes: with a module path or argument name
                by_phase       object  bytes by the phase that made them; arguments, outputs apart
                buffers        list, largest first: bytes, shape, kind ("argument", "output",
                               "temporary"), module (of an argument its name, outside every module
                               the function's), source, phase, op, pieces
                buffers_left_out  int  smaller ones
            timeline           object, by target; lists of one length, at most 600 samples:
                steps, bytes, phases   position, device bytes, what runs then
                resident_bytes int     arguments and outputs
                phase_peaks    object  for each phase, the most live bytes while it runs
                by_phase, by_module    object of lists: bytes of temporaries by who computed them
            regions            object, by target: a list, one object for each checkpoint region
                module         str
                verdict        str     "effective", "partly", "undone by CSE", "offload dropped",
                                       "compiler-added" or "recomputes nothing"
                saved_bytes    int     bytes that the region saves, or null
                recomputed_flops     float   that the region asks to compute again
                recomputed_seconds   float   time of what is recomputed there, by the roofline
                kept_fraction  float   fraction of the recomputation in the compiled program
                message        str
                pieces         str     "16 pieces of axis 0" if the region is that loop, or ""
            counterfactuals    object, by target: a list, one object for each of the modules that
                               hold most at the peak; a prediction, not the compiler's answer
                module         str     repeated blocks combined
                bytes_at_peak, saved_bytes, next_peak_bytes   int
                next_phase, next_module   str   where the peak is then
                extra_flops_fraction, extra_seconds   float   of the forward pass; by the roofline
                policy, at     str     arguments for remat_kit.policy
                worthwhile     bool    false where the price is too high for what it saves: a
                                       suggestion must lower the peak by 1 %, and by 1 % for each
                                       1 % of the step's time
            hlo_recomputed     object, by target: a list, one object for each primitive and module
                               that the compiled program computes twice
                primitive, module, source, count, heavy
                state          str     "kept", "fused" (inside an instruction that is there anyway)
                               or "removed" (its forward original is gone: computed once)
                flops, bytes, seconds    float   of its instructions, loops counted in full
            step_seconds       object, by target:
                roofline       float   lower bound by peak rates and bandwidth
                compiler       float   the compiler's own estimate (TPU), else null
                measured       float   of runs on "local", else null
                flops, bytes   float   of the compiled program, loops counted in full
                links          float   of the collectives on the links between devices
                by_phase       object  phase to roofline seconds
            devices            object  target to int: the devices that the program is partitioned
                                       over; every figure of the target is that of one of them
            mesh               object  by target: the axes of the mesh and their sizes
            collectives        object, by target: a list in the order of the program, one object for
                               each operation in which devices exchange values
                kind           str     "all-gather", "all-reduce", "reduce-scatter", "all-to-all",
                                       "collective-permute", …
                bytes          int     of its result on one device, of one run
                axes           list of str     mesh axes that it runs over; empty if its groups of
                                       devices are none of the mesh
                group          int     devices that take part together
                module, source str     of the operation that needs it
                phase          str     in which it runs
                seconds        float   of all its runs on the links, by their peak rates
                repeated       bool    true if it is there only because of recomputation
                times          int     iterations of the loops around it, else 1
                background     bool    true if the program computes while it runs
            losses             list    of a training step, one object for each loss that it
                                       differentiates; empty for a bare loss:
                name, source   str     the function that takes the gradient and the loss; its line
                times          float   how often one step runs it
                loop           str     the loops around it in words, or ""
            notes              list of str
            against            object  the differences from an earlier report: `Change.to_json`;
                                       null if none was given
            lints              list    one object for each cost without a benefit:
                code           str     its kind: "saved-upcast", "no-effect", …
                message        str     what, where, how many bytes, and why it costs
                fix            str     a policy or a line of code to paste
                module         str     with repeated blocks rolled up, "" outside every module
                source         str
                bytes          int     that need not be saved, moved or recomputed

        FLOPs count a multiplication and an addition each as one.
        """
        return {
            "headline": self.headline,
            "policy": self.policy,
            "saved_bytes": self.saved_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "saved": [r.to_json() for r in self.saved],
            "inputs": [r.to_json() for r in self.inputs],
            "recomputed": [r.to_json() for r in self.recomputed],
            "parameters": self.parameters,
            "parameter_bytes": self.parameter_bytes,
            "recomputed_flops": self.recomputed_flops,
            "forward_flops": self.forward_flops,
            "unknown_costs": [u.to_json() for u in self.unknown_costs],
            "memory": {name: m.to_json() for name, m in self.memory.items()},
            "hlo_recomputed_ops": {name: ops.total for name, ops in self.hlo.items()},
            "hlo_recomputed_by_primitive": {n: dict(o.by_primitive) for n, o in self.hlo.items()},
            "hlo_xla_remat": {name: len(ops.xla_remat) for name, ops in self.hlo.items()},
            "peak": {name: r.peak.to_json() for name, r in self.readings.items()},
            "timeline": {name: r.timeline.to_json() for name, r in self.readings.items()},
            "regions": {n: [v.to_json() for v in r.regions] for n, r in self.readings.items()},
            "counterfactuals": {
                name: [
                    c.to_json() | {"worthwhile": worthwhile(c, r.peak.bytes, r.estimate.seconds)}
                    for c in r.what_if
                ]
                for name, r in self.readings.items()
            },
            "hlo_recomputed": {name: r.recomputed() for name, r in self.readings.items()},
            "devices": {name: m.devices for name, m in self.memory.items()},
            "mesh": {name: dict(m.mesh) for name, m in self.memory.items()},
            "collectives": {
                name: [c.to_json() for c in r.collectives] for name, r in self.readings.items()
            },
            "step_seconds": {
                name: r.step_seconds(self.memory[name].step_seconds)
                for name, r in self.readings.items()
            },
            "losses": [loss.to_json() for loss in self.losses],
            "notes": list(self.notes),
            "lints": [lint.to_json() for lint in self.lints],
            "against": None if self.change is None else self.change.to_json(),
        }

    def _plain(self) -> dict[str, Any]:
        said = {"headline": self.headline, "date": today(), "versions": versions()}
        return said | {"policies": [self._with_buffers()]}

    def _with_buffers(self) -> dict[str, Any]:
        peaks = {name: r.peak.to_json(limit=len(r.peak.held)) for name, r in self.readings.items()}
        return self.to_json() | {"peak": peaks}

    def tables(self, full: bool = False) -> list[Table | Lines]:
        """Return the headline, and tables: totals, kept, recomputed, memory, and lints if any.

        Args:
            full: whether the tables of values and operations show every row.
        """
        found: list[Table | Lines] = [headed(self.headline)]
        found.append(summary_table([self], title=f"policy {self.policy}"))
        found += self.kept_tables(full)
        if self.unknown_costs:
            found.append(unknown_table(self))
        if self.memory:
            found.append(memory_table([self]))
        for name, reading in self.readings.items():
            found += reading_tables(name, reading)
        return [*found, *lint_tables([self]), *(self.change.tables() if self.change else [])]

    def kept_tables(self, full: bool = False) -> list[Table]:
        """Return the tables of the values that are saved and of the operations that run twice."""
        longest = EVERYTHING if full else SHORT
        saved = [saved_table(self, longest)] if self.saved else []
        return saved + ([recomputed_table(self, longest)] if self.recomputed else [])
