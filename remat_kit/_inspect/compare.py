"""Compare two reports, module by module: which figures grew and which shrank.

The comparison works on the plain form of reports, so a JSON file from an earlier day can be
compared with a new trace.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from remat_kit._errors import UserError
from remat_kit._program.paths import roll_up
from remat_kit._show.table import Shown, Table, cut
from remat_kit._units import format_bytes, format_flops, format_seconds


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure before and after; None if one of the reports does not have it.

    Attributes:
        name: what it measures; for a compiled program, with the name of the target.
        unit: ``bytes``, ``flops`` or ``seconds``.
        before, after: the two amounts.
    """

    name: str
    unit: str
    before: float | None
    after: float | None

    @property
    def change(self) -> float | None:
        """After less before."""
        if self.before is None or self.after is None:
            return None
        return self.after - self.before

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return dataclasses.asdict(self) | {"change": self.change}


@dataclasses.dataclass(frozen=True)
class Change(Shown):
    """The differences between two reports; `compare` returns it.

    What a target needs is taken from `jax.stages.Compiled.memory_analysis`.

    >>> import jax, jax.numpy as jnp
    >>> from remat_kit import inspect
    >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> loss = lambda w: jnp.sum(jnp.sin(jnp.exp(w @ w)))
    >>> change = compare(inspect(loss, w), inspect(loss, w, policy="dots"))
    >>> saved = change.figures[0]
    >>> saved.name, saved.before, saved.after, saved.unit
    ('saved', 32768, 16384, 'bytes')

    Attributes:
        before, after: the names of the two reports.
        figures: totals: what is saved and recomputed, and what each target needs.
        saved: bytes saved for the backward pass by module, with repeated blocks combined.
        peak: for each target, live bytes at the peak by module or argument.
    """

    before: str
    after: str
    figures: tuple[Figure, ...]
    saved: tuple[Figure, ...]
    peak: Mapping[str, tuple[Figure, ...]] = dataclasses.field(hash=False)

    def to_json(self) -> dict[str, Any]:
        """Return plain values: ``before``, ``after``, and lists of figures.

        ``figures`` and ``saved`` are lists and ``peak`` an object of lists, by target; each figure
        has ``name``, ``unit``, ``before``, ``after`` and ``change``.
        """
        return {
            "before": self.before,
            "after": self.after,
            "figures": [f.to_json() for f in self.figures],
            "saved": [f.to_json() for f in self.saved],
            "peak": {name: [f.to_json() for f in found] for name, found in self.peak.items()},
        }

    def tables(self) -> list[Table]:
        """Return tables: the totals, the saved bytes by module and the peak by module."""
        title = f"{self.before} → {self.after}"
        found = [_table(title, "figure", self.figures)]
        for what, figures in (
            ("kept for the backward pass", self.saved),
            *((f"alive at the peak on {name}", figures) for name, figures in self.peak.items()),
        ):
            moved = [f for f in figures if f.change]
            if moved:
                found.append(_table(f"{what}, by module: what changed", "module", moved))
        return found


_FORMATS: dict[str, Callable[[float], str]] = {
    "bytes": format_bytes,
    "flops": format_flops,
    "seconds": format_seconds,
}


def _table(title: str, first: str, figures: Sequence[Figure]) -> Table:
    rows = []
    for f in figures:
        write = _FORMATS[f.unit]
        amounts = ["" if x is None else write(x) for x in (f.before, f.after)]
        change = f.change
        sign = "" if change is None else "=" if not change else "+" if change > 0 else "-"
        moved = f"{sign}{write(abs(change))}" if change else sign
        rows.append((f.name or "(no module)", *amounts, moved))
    shown, more = cut(rows, "lines")
    return Table(title, (first, "before", "after", "change"), shown, more)


def compare(before: Any, after: Any) -> Change:
    """Compare two reports: which figures grew and which shrank.

    What a target needs is taken from `jax.stages.Compiled.memory_analysis`.

    >>> import jax, jax.numpy as jnp
    >>> from remat_kit import inspect
    >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> loss = lambda w: jnp.sum(jnp.sin(jnp.exp(w @ w)))
    >>> print(compare(inspect(loss, w), inspect(loss, w, policy="dots")))
    none → dots
    figure            before  after      change
    ----------------  ------  ---------  ----------
    saved             32 KiB  16 KiB     -16 KiB
    offloaded         0 B     0 B        =
    recomputed FLOPs  0 FLOP  4.1 kFLOP  +4.1 kFLOP
    <BLANKLINE>
    kept for the backward pass, by module: what changed
    module       before  after   change
    -----------  ------  ------  -------
    (no module)  32 KiB  16 KiB  -16 KiB

    Args:
        before, after: reports, or what `Report.to_json` returns, or the path of a JSON file that
            ``remat-kit inspect --json`` wrote. If a file holds several reports, the one of the
            same policy is compared, else the first.

    Raises:
        UserError: the argument is not a report, or the file holds none.
    """
    new = _plain(after, None, "compare")
    old = _plain(before, new.get("policy"), "compare")
    return Change(
        before=str(old.get("policy", "before")),
        after=str(new.get("policy", "after")),
        figures=tuple(_figures(old, new)),
        saved=tuple(_by_module("bytes", old.get("saved", ()), new.get("saved", ()))),
        peak={
            name: tuple(_by_module("bytes", _held(old, name), _held(new, name)))
            for name in _shared(old, new, "peak")
        },
    )


def _plain(report: Any, policy: str | None, call: str) -> Mapping[str, Any]:
    if hasattr(report, "to_json"):
        report = report.to_json()
    elif isinstance(report, (str, os.PathLike)):
        report = _read(pathlib.Path(report), call)
    if isinstance(report, Mapping) and "policies" in report:
        reports = [r for r in report["policies"] if isinstance(r, Mapping)]
        same = (r for r in reports if r.get("policy") == policy)
        report = next(same, reports[0] if reports else None)
    if not isinstance(report, Mapping) or "saved_bytes" not in report:
        raise UserError(
            f"`{call}(...)`: this is not a report: {type(report).__name__}",
            hint="give what `remat_kit.inspect` returns, or the path of a file that "
            "`remat-kit inspect --json` wrote",
        )
    return report


def read_report(path: str | os.PathLike[str], *, call: str = "compare") -> Mapping[str, Any]:
    """Read and check a file that ``remat-kit inspect --json`` wrote.

    Raises:
        UserError: the file cannot be read, or holds no report.
    """
    plain = _read(pathlib.Path(path), call)
    _plain(plain, None, call)
    return plain


def _read(path: pathlib.Path, call: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise UserError(
            f"`{call}({str(path)!r})`: the report cannot be read: {reason}",
            hint="give the path of a file that `remat-kit inspect --json` wrote",
        ) from error


def _shared(old: Mapping[str, Any], new: Mapping[str, Any], key: str) -> list[str]:
    return [name for name in new.get(key, {}) if name in old.get(key, {})]


def _figures(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterable[Figure]:
    for name, key, unit in (
        ("saved", "saved_bytes", "bytes"),
        ("offloaded", "offloaded_bytes", "bytes"),
        ("recomputed FLOPs", "recomputed_flops", "flops"),
    ):
        yield Figure(name, unit, old.get(key), new.get(key))
    for target in _shared(old, new, "memory"):
        for name, key in (("temp", "temp_bytes"), ("peak", "peak_bytes"), ("host", "host_bytes")):
            was, now = (report["memory"][target].get(key) for report in (old, new))
            if was is not None or now is not None:
                yield Figure(f"{name}, {target}", "bytes", was, now)
    for target in _shared(old, new, "step_seconds"):
        for key in ("roofline", "compiler", "measured"):
            was, now = (report["step_seconds"][target].get(key) for report in (old, new))
            if was is not None or now is not None:
                yield Figure(f"step by {key}, {target}", "seconds", was, now)


def _held(report: Mapping[str, Any], target: str) -> Sequence[Mapping[str, Any]]:
    return report["peak"][target].get("buffers", ())


def _by_module(
    unit: str, old: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]]
) -> list[Figure]:
    sums: list[dict[str, float]] = [defaultdict(float), defaultdict(float)]
    for found, rows in zip(sums, (old, new), strict=True):
        for row in rows:
            found[roll_up(row["module"])] += row["bytes"]
    was, now = sums
    figures = [
        Figure(name, unit, was.get(name, 0.0), now.get(name, 0.0))
        for name in dict.fromkeys([*was, *now])
    ]
    return sorted(figures, key=lambda f: -abs(f.change or 0.0))
