"""Reports: what a training step keeps, what it computes twice, what that costs on a chip.

A report is a value. It prints as plain text, as tables where `rich` prints it, as HTML in a
notebook, and as JSON; it can be written as a page, a picture and a trace.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_kit import _duplicates, _figures, _html, _remat, _residuals, _target
from remat_kit._anatomy import Held, Peak
from remat_kit._compare import Change as Change
from remat_kit._compare import compare as compare
from remat_kit._dataflow import trace_gradient
from remat_kit._diff import Diff as Diff
from remat_kit._diff import diff as diff
from remat_kit._duplicates import Recomputed
from remat_kit._graph import roll_up as roll_up
from remat_kit._hlo import RecomputedOps
from remat_kit._lint import Compiled, Lint, lints_of, raised_peak
from remat_kit._policy import Planned, format_bytes
from remat_kit._reading import Reading, Traced, read
from remat_kit._residuals import Residual
from remat_kit._table import Table, cut, format_flops, format_seconds
from remat_kit._target import Memory, Target
from remat_kit._verdict import Verdict

NO_POLICY = "none"


# -- one report -------------------------------------------------------------------------------


def inspect(
    fn: Callable[..., Any],
    *args: Any,
    policy: Any = None,
    at: str | None = None,
    target: str | Target | Sequence[str | Target] | None = None,
    argnums: int | Sequence[int] = 0,
    label: str | None = None,
    against: Any = None,
) -> Report:
    """Say what the gradient of a loss keeps, what it computes twice, and what a chip needs for it.

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
        fn: called as ``fn(*args)``; gives a real scalar, or a pair of one and anything.
        args: arrays or `jax.ShapeDtypeStruct`, in pytrees.
        policy: applied to ``fn`` first, as `remat_kit.policy` does; None leaves it alone.
        at: the module paths that ``policy`` is applied at.
        target: one chip or several to compile for; none is compiled for by default.
        argnums: what to differentiate.
        label: what the report calls itself; the policy by default.
        against: an earlier report, or the path of one that ``remat-kit inspect --json`` wrote; the
            report then says what grew and what shrank since, as `compare` does.

    Returns:
        A report. ``saved`` holds intermediate values alone; arguments and constants that the
        backward pass reads are in ``inputs``, for they live anyway.

    Raises:
        NotDifferentiableError, UserError: ``fn`` has no gradient there.
        PolicyError, UnknownNameError: the policy does not fit.
        TargetError: a chip cannot be compiled for here.
    """
    loss = fn if policy is None else _remat.policy(policy, at=at)(fn)
    gradient = trace_gradient(loss, args, argnums, call="inspect")
    kept = _residuals.kept_of(gradient)
    recomputed = tuple(_duplicates.recomputed_of(gradient))
    forward_flops = _duplicates.forward_flops(gradient)
    memory: dict[str, Memory] = {}
    readings: dict[str, Reading] = {}
    chips = _several(target)
    if chips:
        traced = Traced.of(gradient, [r for _, r in kept], loss, args, argnums)
    for chip in chips:
        compiled = _target.compile_program(loss, args, chip, argnums=argnums, call="inspect")
        name = compiled.memory.target
        memory[name] = compiled.memory
        reading = read(compiled, traced)
        if reading is not None:
            readings[name] = reading
    hlo = {name: reading.ops for name, reading in readings.items()}
    chosen, place = _remat.applied(loss)
    lints = lints_of(
        gradient,
        kept,
        recomputed,
        forward_flops=forward_flops,
        policy=chosen,
        at=place,
        compiled={name: Compiled(memory[name], hlo.get(name)) for name in memory},
    )
    report = Report(
        policy=label or policy_text(policy),
        saved=tuple(r for _, r in kept if not r.is_input),
        inputs=tuple(r for _, r in kept if r.is_input),
        recomputed=recomputed,
        forward_flops=forward_flops,
        memory=memory,
        hlo=hlo,
        readings=readings,
        notes=tuple(dict.fromkeys(n for m in memory.values() for n in m.notes)),
        lints=lints,
    )
    return report if against is None else report.against(against)


def policy_text(policy: Any) -> str:
    """Return what reports call a policy: the name that it was given by, a plan's title, its repr.

    >>> from remat_kit import dots, save
    >>> policy_text(None), policy_text("dots"), policy_text(save(dots))
    ('none', 'dots', 'save(dots)')
    """
    if policy is None:
        return NO_POLICY
    if isinstance(policy, Planned):
        return policy.title
    return policy if isinstance(policy, str) else repr(policy)


def _several(target: Any) -> Sequence[str | Target]:
    if target is None:
        return ()
    return (target,) if isinstance(target, (str, Target)) else tuple(target)


class _Shown:
    """What every report can do: print itself, plain, in a terminal and in a notebook."""

    def tables(self) -> list[Table]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n\n".join(t.text() for t in self.tables())

    def __rich_console__(self, console: Any, options: Any) -> Any:
        del console, options
        for table in self.tables():
            yield table.rich()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print as text where IPython would print the repr, which holds every value."""
        del cycle
        printer.text(str(self))

    def _repr_html_(self) -> str:
        tables = f'<div class="remat-kit">{"".join(t.html() for t in self.tables())}</div>'
        plain = self._plain()
        if not any(r["timeline"] for r in plain["policies"]):
            return tables
        return f"{_html.inline(plain)}<details><summary>as tables</summary>{tables}</details>"

    def _plain(self) -> dict[str, Any]:
        """What pages and pictures are made of: the JSON of a comparison, with every buffer."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        raise NotImplementedError

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that shows everything in a browser, from a file and with no network."""
        pathlib.Path(path).write_text(_html.page(self._plain()), encoding="utf-8")

    def to_png(self, path: str | os.PathLike[str], target: str | None = None) -> None:
        """Draw the memory over the schedule: of one policy by phase, of several a line each.

        Args:
            path: of the picture; its suffix says the format: ``.png``, ``.svg`` or ``.pdf``.
            target: one of those that were compiled for; the first by default.

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
        """Write the timeline as a trace for ui.perfetto.dev; a step counts as a microsecond.

        Args:
            path: of the JSON file.
            target: one of those that were compiled for; the first by default.

        Raises:
            UserError: nothing was compiled.
        """
        reports = self._plain()["policies"]
        chosen = _figures.chosen_target(reports, target, call="to_perfetto")
        trace = json.dumps(_figures.perfetto(reports, chosen))
        pathlib.Path(path).write_text(trace, encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Report(_Shown):
    """What one policy makes of one loss.

    Attributes:
        policy: its name or its text, a plan's title; ``none`` without one.
        saved: the intermediate values that are kept for the backward pass, in program order.
        inputs: the arguments and constants that the backward pass reads.
        recomputed: what the backward pass computes once more, most FLOPs first.
        forward_flops: floating-point operations of the loss alone.
        memory: what the compiled gradient needs, by target.
        hlo: what the compiled gradient still computes twice, by target.
        readings: the compiled gradient read back: peak, timeline, regions, time; by target.
        notes: what to know about the figures.
        lints: what costs memory or time for nothing, and what to do about it.
        change: what differs from the report that it was held against, if it was.
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

    def against(self, before: Any) -> Report:
        """Return the report with what differs from an earlier one.

        Args:
            before: a report, or what `compare` takes for one.

        Raises:
            UserError: not a report.
        """
        return dataclasses.replace(self, change=compare(before, self))

    @property
    def saved_bytes(self) -> int:
        """Bytes of the kept values that stay on the device."""
        return sum(r.bytes for r in self.saved if r.memory == "device")

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the kept values that wait in the host's memory."""
        return sum(r.bytes for r in self.saved if r.memory != "device")

    @property
    def recomputed_flops(self) -> float:
        """Floating-point operations that are done twice."""
        return sum(r.flops for r in self.recomputed)

    def by_module(self) -> dict[str, Totals]:
        """Return totals by module path, most bytes kept first."""
        return _totals(self, lambda x: x.module)

    def by_primitive(self) -> dict[str, Totals]:
        """Return totals by primitive, most bytes kept first."""
        return _totals(self, lambda x: x.primitive)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`.

        The keys::

            policy             str     the policy: name, text, a plan's title; "none" without one
            saved_bytes        int     intermediate values kept on the device
            offloaded_bytes    int     intermediate values kept in the host's memory
            saved              list    one object for each kept value, in program order:
                shape          list of int; what a loop makes is stacked, its length first
                dtype          str
                bytes          int
                module         str     module path, "" outside every module
                source         str     "file:line" of the user's line, "" if there is none
                reason         str     the rule that keeps it ("save(dots)", "offload(dots) to
                                       pinned_host", "not in recompute(...)"), "input of region
                                       PATH", "kept by the policy of region PATH", "output of the
                                       function", or "needed by the backward pass, outside every
                                       region"
                primitive      str     what computes it
                names          list of str     checkpoint names that the user gave it
                memory         str     "device", or "pinned_host"
                times          int     iterations of the loops around its producer, else 1
                is_input       bool    false here
            inputs             list    the same for arguments and constants that the backward pass
                                       reads; not counted, for they live anyway; reason is
                                       "argument NAME" or "constant", is_input is true
            recomputed         list    one object for each primitive, module, line and shape that
                                       is computed twice, most FLOPs first:
                primitive      str
                module         str     of the forward pass
                source         str
                count          int     how many; in a loop once per iteration
                flops          float   of all of them; 0 for what only moves data
                bytes          int     of their results together
                shape, dtype   of one result
                region         str     module path of the checkpoint region
            recomputed_flops   float
            forward_flops      float   of the loss alone
            memory             object, by target; null where the compiler did not say:
                temp_bytes, argument_bytes, output_bytes, alias_bytes, host_bytes, code_bytes,
                peak_bytes     int     peak: arguments + outputs - aliased + temporaries
                compiler_peak_bytes, memory_bytes, headroom_bytes, needs_bytes  int
                fits           bool
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
                attributed_fraction  float   of the bytes: with a module path or argument name
                by_phase       object  bytes by the phase that made them; arguments, outputs apart
                buffers        list, largest first: bytes, shape, kind ("argument", "output",
                               "temporary"), module (of an argument its name, outside every module
                               the function's), source, phase, op
                buffers_left_out  int  smaller ones
            timeline           object, by target; lists of one length, at most 600 points:
                steps, bytes, phases   position, device bytes, what runs then
                resident_bytes int     arguments and outputs
                phase_peaks    object  phase to the most bytes while it runs
                by_phase, by_module    object of lists: bytes of temporaries by who made them
            regions            object, by target: a list, one object for each checkpoint region
                module         str
                verdict        str     "effective", "partly", "undone by CSE", "offload dropped",
                                       "compiler-added" or "recomputes nothing"
                saved_bytes    int     that the region keeps out of memory, or null
                recomputed_flops     float   that it asks for again
                recomputed_seconds   float   of what is recomputed there, by the roofline
                kept_fraction  float   of the recomputation that the compiled program still has
                message        str
            counterfactuals    object, by target: a list, one object for each of the modules that
                               hold most at the peak; a model's answer, not the compiler's
                module         str     repeated blocks rolled up
                bytes_at_peak, saved_bytes, next_peak_bytes   int
                next_phase, next_module   str   where the peak is then
                extra_flops_fraction, extra_seconds   float   of the forward pass; by the roofline
                policy, at     str     what to give to remat_kit.policy
            hlo_recomputed     object, by target: a list, one object for each primitive and module
                               that the compiled program computes twice
                primitive, module, source, count, heavy
                state          str     "kept", "fused" (inside an instruction that is there anyway)
                               or "removed" (its forward twin is gone: computed once)
                flops, bytes, seconds    float   of its instructions, loops counted in full
            step_seconds       object, by target:
                roofline       float   lower bound by peak rates and bandwidth
                compiler       float   the compiler's own estimate (TPU), else null
                measured       float   of runs on "local", else null
                flops, bytes   float   of the compiled program, loops counted in full
                by_phase       object  phase to roofline seconds
            notes              list of str
            against            object  what differs from an earlier report: `Change.to_json`; null
                                       where none was given
            lints              list    one object for each thing that costs for nothing:
                code           str     its kind: "saved-upcast", "no-effect", …
                message        str     what, where, how many bytes, and why it costs
                fix            str     a policy or a line of code to paste
                module         str     with repeated blocks rolled up, "" outside every module
                source         str
                bytes          int     that need not be kept, moved or computed again

        FLOPs count a multiplication and an addition each as one.
        """
        return {
            "policy": self.policy,
            "saved_bytes": self.saved_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "saved": [r.to_json() for r in self.saved],
            "inputs": [r.to_json() for r in self.inputs],
            "recomputed": [r.to_json() for r in self.recomputed],
            "recomputed_flops": self.recomputed_flops,
            "forward_flops": self.forward_flops,
            "memory": {name: m.to_json() for name, m in self.memory.items()},
            "hlo_recomputed_ops": {name: ops.total for name, ops in self.hlo.items()},
            "hlo_recomputed_by_primitive": {n: dict(o.by_primitive) for n, o in self.hlo.items()},
            "hlo_xla_remat": {name: len(ops.xla_remat) for name, ops in self.hlo.items()},
            "peak": {name: r.peak.to_json() for name, r in self.readings.items()},
            "timeline": {name: r.timeline.to_json() for name, r in self.readings.items()},
            "regions": {n: [v.to_json() for v in r.regions] for n, r in self.readings.items()},
            "counterfactuals": {
                name: [c.to_json() for c in r.what_if] for name, r in self.readings.items()
            },
            "hlo_recomputed": {name: r.recomputed() for name, r in self.readings.items()},
            "step_seconds": {
                name: r.step_seconds(self.memory[name].step_seconds)
                for name, r in self.readings.items()
            },
            "notes": list(self.notes),
            "lints": [lint.to_json() for lint in self.lints],
            "against": None if self.change is None else self.change.to_json(),
        }

    def _plain(self) -> dict[str, Any]:
        return {"versions": versions(), "policies": [self._with_buffers()]}

    def _with_buffers(self) -> dict[str, Any]:
        peaks = {name: r.peak.to_json(limit=len(r.peak.held)) for name, r in self.readings.items()}
        return self.to_json() | {"peak": peaks}

    def tables(self) -> list[Table]:
        """Return the report as tables: totals, kept, recomputed, memory, and lints if any."""
        found = [_summary_table([self], title=f"policy {self.policy}")]
        if self.saved:
            found.append(_saved_table(self))
        if self.recomputed:
            found.append(_recomputed_table(self))
        if self.memory:
            found.append(_memory_table([self]))
        for name, reading in self.readings.items():
            found += _reading_tables(name, reading)
        return [*found, *_lint_tables([self]), *(self.change.tables() if self.change else [])]


@dataclasses.dataclass(frozen=True)
class Totals:
    """What one module, or one primitive, keeps and recomputes."""

    saved: int = 0
    saved_bytes: int = 0
    offloaded_bytes: int = 0
    recomputed: int = 0
    recomputed_flops: float = 0.0
    recomputed_bytes: int = 0


def _totals(report: Report, key: Callable[[Any], str]) -> dict[str, Totals]:
    found: dict[str, Totals] = {}

    def add(name: str, **amounts: float) -> None:
        old = found.get(name, Totals())
        new = {field: getattr(old, field) + amount for field, amount in amounts.items()}
        found[name] = dataclasses.replace(old, **new)

    for r in report.saved:
        kind = "saved_bytes" if r.memory == "device" else "offloaded_bytes"
        add(key(r), saved=1, **{kind: r.bytes})
    for r in report.recomputed:
        add(key(r), recomputed=r.count, recomputed_flops=r.flops, recomputed_bytes=r.bytes)
    order = sorted(found.items(), key=lambda x: (-x[1].saved_bytes, -x[1].recomputed_flops))
    return dict(order)


# -- several reports --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Comparison(_Shown):
    """Several policies on one loss, side by side; ``none`` comes first.

    >>> import jax, jax.numpy as jnp
    >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> loss = lambda w: jnp.sum(jnp.sin(jnp.exp(w @ w)))
    >>> both = Comparison((inspect(loss, w, policy="dots"), inspect(loss, w)))
    >>> [r.policy for r in both.reports]
    ['none', 'dots']
    >>> print(both)
    policies
    policy  saved          offloaded  recomputed FLOPs
    ------  -------------  ---------  ----------------
    none    32 KiB         0 B        0 %
    dots    16 KiB  ×0.50  0 B        0.76 %

    Args:
        reports: as `inspect` gives them, for the same loss.
        model: what the loss is called.
    """

    reports: tuple[Report, ...]
    model: str = ""

    def __post_init__(self) -> None:
        ordered = sorted(self.reports, key=lambda r: r.policy != NO_POLICY)
        base = ordered[0] if ordered and ordered[0].policy == NO_POLICY else None
        reports = tuple(r if base is None or r is base else _beside(r, base) for r in ordered)
        object.__setattr__(self, "reports", reports)

    def to_json(self) -> dict[str, Any]:
        """Return plain values: ``versions``, and ``policies``, a list of reports.

        Each report is what `Report.to_json` returns; ``none`` is the first, where it is there. With
        a ``model``, its name stands before them.
        """
        named = {"model": self.model} if self.model else {}
        return named | {"versions": versions(), "policies": [r.to_json() for r in self.reports]}

    def _plain(self) -> dict[str, Any]:
        return self.to_json() | {"policies": [r._with_buffers() for r in self.reports]}

    def tables(self) -> list[Table]:
        """Return the comparison as tables: all policies, all targets, and their lints if any."""
        found = [_summary_table(self.reports, title=f"policies{_of(self.model)}")]
        if any(r.memory for r in self.reports):
            found.append(_memory_table(self.reports))
        changes = [table for r in self.reports if r.change for table in r.change.tables()]
        return [*found, *_lint_tables(self.reports), *changes]


def _beside(report: Report, base: Report) -> Report:
    """Add what only a comparison with the memory of no policy shows."""
    found = [raised_peak(m, base.memory.get(name)) for name, m in report.memory.items()]
    new = [lint for lint in found if lint is not None and lint not in report.lints]
    return dataclasses.replace(report, lints=(*report.lints, *new))


def _of(model: str) -> str:
    return f" of {model}" if model else ""


def versions() -> dict[str, str]:
    """Return the versions of what the figures depend on."""
    found = {}
    for name in ("remat-kit", "jax", "jaxlib", "flax"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# -- tables -----------------------------------------------------------------------------------


def _summary_table(reports: Sequence[Report], title: str) -> Table:
    base = next((r for r in reports if r.policy == NO_POLICY), None)
    rows = []
    for r in reports:
        share = r.recomputed_flops / r.forward_flops if r.forward_flops else 0.0
        saved = _against(r.saved_bytes, None if base is None or r is base else base.saved_bytes)
        rows.append((r.policy, saved, format_bytes(r.offloaded_bytes), f"{100 * share:.2g} %"))
    return Table(title, ("policy", "saved", "offloaded", "recomputed FLOPs"), tuple(rows))


def _against(size: int | None, base: int | None) -> str:
    if size is None:
        return "?"
    ratio = f"  ×{size / base:.2f}" if base else ""
    return format_bytes(size) + ratio


def _memory_table(reports: Sequence[Report]) -> Table:
    base = next((r for r in reports if r.policy == NO_POLICY), None)
    rows = []
    for name in dict.fromkeys(name for r in reports for name in r.memory):
        first = base.memory.get(name) if base is not None else None
        for r in reports:
            if name in r.memory:
                rows.append(_memory_row(name, r, None if r is base else first))
    columns = ("target", "policy", "temp", "peak", "reached in", "host", "fits", "headroom")
    columns += ("computed twice", "step ≥")
    notes = tuple(dict.fromkeys(n for r in reports for n in r.notes))
    return Table("compiled", columns, tuple(rows), footer="\n".join(f"note: {n}" for n in notes))


def _memory_row(name: str, report: Report, base: Memory | None) -> tuple[str, ...]:
    m, ops = report.memory[name], report.hlo.get(name)
    headroom = "?" if m.headroom_bytes is None else format_bytes(m.headroom_bytes)
    xla = f" (+{len(ops.xla_remat)} by XLA)" if ops is not None and ops.xla_remat else ""
    reading = report.readings.get(name)
    return (
        name,
        report.policy,
        _against(m.temp_bytes, base.temp_bytes if base else None),
        _against(m.peak_bytes, base.peak_bytes if base else None),
        reading.peak.phase if reading else "?",
        format_bytes(m.host_bytes or 0),
        "yes" if m.fits else "no",
        headroom,
        "?" if ops is None else f"{ops.total}{xla}",
        format_seconds(reading.estimate.seconds) if reading else "?",
    )


def _reading_tables(name: str, reading: Reading) -> list[Table]:
    tables = [_peak_table(name, reading.peak)]
    if reading.regions:
        tables.append(_regions_table(name, reading))
    if reading.what_if:
        rows = [
            (
                c.module,
                f"-{format_bytes(c.saved_bytes)}",
                f"+{100 * c.extra_flops_fraction:.2g} %",
                f"{format_bytes(c.next_peak_bytes)} in the {c.next_phase} of {c.next_module}",
                f"remat_kit.policy({c.policy!r}, at={c.at!r})",
            )
            for c in reading.what_if
            if c.saved_bytes
        ]
        columns = ("recompute", "peak", "FLOPs", "the next peak", "how")
        title = f"what recomputing would do on {name}, by the model of this program"
        tables += [Table(title, columns, tuple(rows))] if rows else []
    return tables


def _peak_table(name: str, peak: Peak) -> Table:
    groups: dict[tuple[str, ...], list[Held]] = {}
    for held in peak.held:
        key = (roll_up(held.module), held.op, held.shape, held.phase, held.kind, held.source)
        groups.setdefault(key, []).append(held)
    rows = []
    for key, found in sorted(groups.items(), key=lambda g: -sum(h.bytes for h in g[1])):
        module, op, shape, phase, kind, source = key
        size = sum(h.bytes for h in found)
        count = f"{len(found)} × " if len(found) > 1 else ""
        made = phase if kind == "temporary" else kind
        rows.append((format_bytes(size), f"{count}{shape}", op, module, made, source))
    title = f"the peak on {name}: {format_bytes(peak.bytes)} in the {peak.phase} of {peak.module}"
    if peak.packing_bytes:
        title += f"; the compiler's packing {'+' if peak.packing_bytes > 0 else '-'}"
        title += format_bytes(abs(peak.packing_bytes))
    columns = ("bytes", "array", "op", "module or argument", "made in", "source")
    shown, more = cut(rows, "kinds of buffers", 15)
    return Table(title, columns, shown, more)


def _regions_table(name: str, reading: Reading) -> Table:
    groups: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in reading.regions:
        key = (roll_up(verdict.module), verdict.verdict, verdict.message)
        groups.setdefault(key, []).append(verdict)
    rows = []
    for (module, verdict, message), found in groups.items():
        known = [v.saved_bytes for v in found if v.saved_bytes is not None]
        rows.append(
            (
                _rolled(module, len(found)),
                verdict,
                format_bytes(sum(known)) if known else "?",
                format_flops(sum(v.recomputed_flops for v in found)),
                format_seconds(sum(v.recomputed_seconds for v in found)),
                message,
            )
        )
    columns = ("region", "verdict", "saves", "recomputes", "takes ≥", "why")
    shown, more = cut(rows, "regions")
    return Table(f"regions on {name}", columns, shown, more)


def _rolled(path: str, blocks: int) -> str:
    return f"{path or '(no module)'}{f' ×{blocks}' if blocks > 1 else ''}"


def _saved_table(report: Report) -> Table:
    groups: dict[tuple[Any, ...], list[Residual]] = {}
    for r in report.saved:
        key = (roll_up(r.module), r.primitive, r.dtype, r.shape, r.source, roll_up(r.reason))
        groups.setdefault((*key, r.memory), []).append(r)
    ordered = sorted(groups.items(), key=lambda g: -sum(r.bytes for r in g[1]))
    rows = []
    for (module, primitive, dtype, shape, source, reason, memory), found in ordered:
        blocks = len({r.module for r in found})
        size = format_bytes(sum(r.bytes for r in found))
        where = "" if memory == "device" else f" on {memory}"
        count = f"{len(found)} × " if len(found) > 1 else ""
        array = f"{count}{_array(dtype, shape)}"
        rows.append((size + where, array, primitive, _rolled(module, blocks), source, reason))
    total = f"kept for the backward pass: {format_bytes(report.saved_bytes)}"
    if report.offloaded_bytes:
        total += f" on the device, {format_bytes(report.offloaded_bytes)} on the host"
    shown, more = cut(rows, "kinds of values")
    columns = ("bytes", "array", "primitive", "module", "source", "why")
    return Table(total, columns, shown, more)


def _array(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _recomputed_table(report: Report) -> Table:
    groups: dict[tuple[Any, ...], list[Recomputed]] = {}
    for r in report.recomputed:
        key = (roll_up(r.module), r.primitive, r.dtype, r.shape, r.source)
        groups.setdefault(key, []).append(r)
    ordered = sorted(groups.items(), key=lambda g: -sum(r.flops for r in g[1]))
    rows = []
    for (module, primitive, dtype, shape, source), found in ordered:
        flops = sum(r.flops for r in found)
        rows.append(
            (
                format_flops(flops) if flops else "free",
                str(sum(r.count for r in found)),
                primitive,
                _array(dtype, shape),
                _rolled(module, len({r.module for r in found})),
                source,
            )
        )
    total = f"computed twice: {format_flops(report.recomputed_flops)}"
    if report.forward_flops:
        total += f", {100 * report.recomputed_flops / report.forward_flops:.2g} % of the forward"
    shown, more = cut(rows, "kinds of operations")
    return Table(total, ("FLOPs", "count", "primitive", "array", "module", "source"), shown, more)


def _lint_tables(reports: Sequence[Report]) -> list[Table]:
    """One table of what is wrong, with the policies it is wrong with, or none."""
    policies: dict[Lint, list[str]] = {}
    for report in reports:
        for lint in report.lints:
            policies.setdefault(lint, []).append(report.policy)
    if not policies:
        return []
    rows = [
        (lint.code, *([", ".join(names)] if len(reports) > 1 else []), lint.message, lint.fix)
        for lint, names in policies.items()
    ]
    columns = ("lint", *(["policy"] if len(reports) > 1 else []), "what", "fix")
    shown, more = cut(rows, "lints")
    return [Table("lints", columns, shown, more)]
