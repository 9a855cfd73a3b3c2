"""The tables of a report, and its totals by module and by primitive."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from remat_kit._chip.memory import Memory
from remat_kit._chip.target import Target
from remat_kit._compiled.collectives import Collective
from remat_kit._compiled.peak import Held, Peak, with_pieces
from remat_kit._inspect.lints.scene import Lint
from remat_kit._inspect.reading import Reading
from remat_kit._inspect.recomputed import Recomputed
from remat_kit._inspect.residuals import Residual
from remat_kit._inspect.verdict import Verdict
from remat_kit._inspect.whatif import worthwhile
from remat_kit._policy.structural import Planned
from remat_kit._program.paths import folded
from remat_kit._program.paths import roll_up as roll_up
from remat_kit._show.table import Table, cut
from remat_kit._units import format_bytes, format_flops, format_percent, format_seconds

if TYPE_CHECKING:
    from remat_kit._inspect.report import Report

NO_POLICY = "none"


# The rows of a table whose first rows hold nearly everything, and more rows than any table has.
SHORT, EVERYTHING = 15, 100_000


def policy_text(policy: Any) -> str:
    """Return the name of a policy in reports: the name that was given, a plan's title, or its repr.

    >>> from remat_kit import dots, save
    >>> policy_text(None), policy_text("dots"), policy_text(save(dots))
    ('none', 'dots', 'save(dots)')
    """
    if policy is None:
        return NO_POLICY
    if isinstance(policy, Planned):
        return policy.title
    return policy if isinstance(policy, str) else repr(policy)


def target_names(target: Any) -> Sequence[str | Target]:
    if target is None:
        return ()
    return (target,) if isinstance(target, (str, Target)) else tuple(target)


@dataclasses.dataclass(frozen=True)
class Totals:
    """What one module or one primitive saves and recomputes."""

    saved: int = 0
    saved_bytes: int = 0
    offloaded_bytes: int = 0
    recomputed: int = 0
    recomputed_flops: float = 0.0
    recomputed_bytes: int = 0


def totals_by(report: Report, key: Callable[[Any], str]) -> dict[str, Totals]:
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


def of_model(model: str) -> str:
    return f" of {model}" if model else ""


def today() -> str:
    """Return the date on which a report is written."""
    return datetime.date.today().isoformat()


def versions() -> dict[str, str]:
    """Return the versions of the libraries that the figures depend on."""
    found = {}
    for name in ("remat-kit", "jax", "jaxlib", "flax"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# -- tables -----------------------------------------------------------------------------------


def summary_table(reports: Sequence[Report], title: str) -> Table:
    base = next((r for r in reports if r.policy == NO_POLICY), None)
    rows = []
    for r in reports:
        share = r.recomputed_flops / r.forward_flops if r.forward_flops else 0.0
        saved = _against(r.saved_bytes, None if base is None or r is base else base.saved_bytes)
        rows.append((r.policy, saved, format_bytes(r.offloaded_bytes), format_percent(share)))
    return Table(title, ("policy", "saved", "offloaded", "recomputed FLOPs"), tuple(rows))


def _against(size: int | None, base: int | None) -> str:
    if size is None:
        return "?"
    ratio = f"  ×{size / base:.2f}" if base else ""
    return format_bytes(size) + ratio


def memory_table(reports: Sequence[Report]) -> Table:
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
    footer = "\n".join(f"note: {n}" for n in notes)
    spare = ("host", "computed twice", "reached in", "headroom", "step ≥")
    return Table("compiled", columns, tuple(rows), footer, spare)


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


def reading_tables(name: str, reading: Reading) -> list[Table]:
    tables = [_peak_table(name, reading.peak)]
    if reading.regions:
        tables.append(_regions_table(name, reading))
    if reading.collectives:
        tables.append(collectives_table(name, reading.collectives))
    if reading.what_if:
        rows = [
            (
                c.module,
                f"-{format_bytes(c.saved_bytes)}",
                f"+{format_percent(c.extra_flops_fraction)}",
                f"{format_bytes(c.next_peak_bytes)} in the {c.next_phase} of {c.next_module}",
                f"remat_kit.policy({c.policy!r}, at={c.at!r})",
            )
            for c in reading.what_if
            if worthwhile(c, reading.peak.bytes, reading.estimate.seconds)
        ]
        columns = ("recompute", "peak", "FLOPs", "the next peak", "how")
        title = f"what recomputing would change on {name}, as predicted from this program"
        # How to do it can be read from the module; the page and --full show it.
        tables += [Table(title, columns, tuple(rows), spare=("how",))] if rows else []
    return tables


def _peak_table(name: str, peak: Peak) -> Table:
    groups: dict[tuple[str, ...], list[Held]] = {}
    for held in peak.held:
        module = with_pieces(roll_up(held.module), held.pieces)
        key = (module, held.op, held.shape, held.phase, held.kind, held.source)
        groups.setdefault(key, []).append(held)
    rows = []
    for key, found in sorted(groups.items(), key=lambda g: -sum(h.bytes for h in g[1])):
        module, op, shape, phase, kind, source = key
        size = sum(h.bytes for h in found)
        count = f"{len(found)} × " if len(found) > 1 else ""
        made = phase if kind == "temporary" else kind
        rows.append((format_bytes(size), f"{count}{shape}", op, module, made, source))
    module = with_pieces(peak.module, peak.pieces)
    title = f"the peak on {name}: {format_bytes(peak.bytes)} in the {peak.phase} of {module}"
    if peak.packing_bytes:
        title += f"; the compiler's packing {'+' if peak.packing_bytes > 0 else '-'}"
        title += format_bytes(abs(peak.packing_bytes))
    columns = ("bytes", "array", "op", "module or argument", "made in", "source")
    shown, more = cut(rows, "kinds of buffers", 15)
    return Table(title, columns, shown, more, ("op", "made in", "source"))


def _regions_table(name: str, reading: Reading) -> Table:
    groups: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in reading.regions:
        key = (roll_up(verdict.module), verdict.verdict, verdict.message)
        groups.setdefault(key, []).append(verdict)
    rows = []
    for (_, verdict, message), found in groups.items():
        known = [v.saved_bytes for v in found if v.saved_bytes is not None]
        rows.append(
            (
                _folded([v.module for v in found]),
                verdict,
                format_bytes(sum(known)) if known else "?",
                format_flops(sum(v.recomputed_flops for v in found)),
                format_seconds(sum(v.recomputed_seconds for v in found)),
                message,
            )
        )
    columns = ("region", "verdict", "saves", "recomputes", "takes ≥", "why")
    shown, more = cut(rows, "regions")
    return Table(f"regions on {name}", columns, shown, more, ("takes ≥", "recomputes"))


def collectives_table(name: str, found: Sequence[Collective]) -> Table:
    """Return a table of collectives, with those of repeated blocks on one line."""
    groups: dict[tuple[Any, ...], list[Collective]] = {}
    for c in found:
        key = (c.kind, c.bytes, c.axes, c.group, roll_up(c.module), c.phase, c.repeated)
        groups.setdefault(key, []).append(c)
    rows = []
    ordered = sorted(groups.items(), key=lambda g: -sum(c.seconds for c in g[1]))
    for (kind, size, axes, group, _, phase, repeated), same in ordered:
        runs = sum(c.times for c in same)
        rows.append(
            (
                kind,
                f"{f'{runs} × ' if runs > 1 else ''}{format_bytes(size)}",
                f"{', '.join(axes) or '?'} ({group})",
                _folded([c.module for c in same]),
                phase,
                format_seconds(sum(c.seconds for c in same)),
                "only by recomputation" if repeated else "",
                same[0].source,
            )
        )
    again = [c for c in found if c.repeated]
    title = f"collectives on {name}: {format_seconds(sum(c.seconds for c in found))} on the links"
    if again:
        title += f", {format_seconds(sum(c.seconds for c in again))} only by recomputation"
    columns = ("collective", "bytes", "axes", "module", "phase", "takes ≥", "repeated", "source")
    shown, more = cut(rows, "kinds of collectives")
    return Table(title, columns, shown, more, ("source", "repeated"))


def _folded(modules: Sequence[str]) -> str:
    """Return modules with one rolled-up path as one name, and how many they are."""
    blocks = list(dict.fromkeys(modules))
    many = f" ×{len(blocks)}" if len(blocks) > 1 else ""
    return f"{folded(blocks) or '(no module)'}{many}"


def saved_table(report: Report, longest: int = SHORT) -> Table:
    groups: dict[tuple[Any, ...], list[Residual]] = {}
    for r in report.saved:
        key = (roll_up(r.module), r.primitive, r.dtype, r.shape, r.source, roll_up(r.reason))
        groups.setdefault((*key, r.memory), []).append(r)
    ordered = sorted(groups.items(), key=lambda g: -sum(r.bytes for r in g[1]))
    rows = []
    for (_, primitive, dtype, shape, source, reason, memory), found in ordered:
        size = format_bytes(sum(r.bytes for r in found))
        where = "" if memory == "device" else f" on {memory}"
        count = f"{len(found)} × " if len(found) > 1 else ""
        array = f"{count}{_array(dtype, shape)}"
        module = _folded([r.module for r in found])
        rows.append((size + where, array, primitive, module, source, reason))
    total = f"kept for the backward pass: {format_bytes(report.saved_bytes)}"
    if report.offloaded_bytes:
        total += f" on the device, {format_bytes(report.offloaded_bytes)} on the host"
    shown, more = cut(rows, "kinds of values", longest)
    columns = ("bytes", "array", "primitive", "module", "source", "why")
    return Table(total, columns, shown, more, ("why", "primitive", "source"))


def _array(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _no_flops(found: Sequence[Recomputed]) -> str:
    return "free" if all(r.cost_known for r in found) else "unknown"


def recomputed_table(report: Report, longest: int = SHORT) -> Table:
    groups: dict[tuple[Any, ...], list[Recomputed]] = {}
    for r in report.recomputed:
        key = (roll_up(r.module), r.primitive, r.dtype, r.shape, r.source, r.pieces)
        groups.setdefault(key, []).append(r)
    ordered = sorted(groups.items(), key=lambda g: -sum(r.flops for r in g[1]))
    rows = []
    for (_, primitive, dtype, shape, source, pieces), found in ordered:
        flops = sum(r.flops for r in found)
        rows.append(
            (
                format_flops(flops) if flops else _no_flops(found),
                str(sum(r.count for r in found)),
                primitive,
                _array(dtype, shape),
                with_pieces(_folded([r.module for r in found]), pieces),
                source,
            )
        )
    total = f"computed twice: {format_flops(report.recomputed_flops)}"
    if report.forward_flops:
        share = format_percent(report.recomputed_flops / report.forward_flops)
        total += f", {share} of the forward pass"
    shown, more = cut(rows, "kinds of operations", longest)
    columns = ("FLOPs", "count", "primitive", "array", "module", "source")
    return Table(total, columns, shown, more, ("count", "array", "source"))


def unknown_table(report: Report) -> Table:
    rows = [
        (u.primitive, str(u.count), u.module or "(no module)", u.source)
        for u in report.unknown_costs
    ]
    shown, more = cut(rows, "kinds of operations")
    title = "cost unknown: the FLOPs and times in this report leave these operations out"
    return Table(title, ("primitive", "count", "module", "source"), shown, more)


def lint_tables(reports: Sequence[Report]) -> list[Table]:
    """Return a table of all lints, with the policies that each applies to, or no table."""
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
