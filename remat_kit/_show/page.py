"""Write a report as one HTML file that needs no network, no fonts and no framework.

The page is made from the plain values of `Comparison.to_json`, so a stored report can be shown
again. `page.css` defines its appearance and `page.js` its behaviour. This module makes the data
small: every text is stored once, tables are stored by column, and long lists are cut with a note.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remat_kit._show.figures import COLORS

_LIMITS = (10_000, 3_000, 1_000, 300, 100, 30)  # rows of a table, points of a curve


_RESOLUTION = 50_000  # steps in the height of a curve


_SAVED = (
    "array",
    "bytes",
    "module",
    "source",
    "reason",
    "primitive",
    "names",
    "memory",
    "times",
    "stack",
)


_RECOMPUTED = (
    *("primitive", "module", "source", "count", "flops", "bytes", "array", "region"),
    "pieces",
)


_BUFFERS = ("bytes", "shape", "kind", "module", "source", "phase", "op", "pieces")


_COMPILED = ("primitive", "module", "source", "count", "state", "flops", "bytes", "seconds")


_WHAT_IF = (
    *("module", "bytes_at_peak", "saved_bytes", "extra_flops_fraction", "extra_seconds"),
    *("next_peak_bytes", "next_phase", "next_module", "policy", "at"),
)


_REGIONS = (
    *("module", "verdict", "saved_bytes", "recomputed_flops", "recomputed_seconds"),
    *("kept_fraction", "message", "pieces"),
)


_COLLECTIVES = (
    *("kind", "bytes", "times", "axes", "group", "module", "phase", "seconds", "repeated"),
    "source",
)


def page(
    data: Mapping[str, Any],
    *,
    diffs: Sequence[Mapping[str, Any]] | None = None,
    most_bytes: int = 10**6,
) -> str:
    """Return a comparison of policies as one HTML page.

    >>> text = page({"model": "a </script> name", "policies": [{"policy": "dots"}]})
    >>> text.startswith("<!doctype html>"), text.count("</script>")
    (True, 2)

    Args:
        data: as `Comparison.to_json` returns it; missing parts are not shown.
        diffs: as `Diff.to_json` returns them; each may name its ``policy``.
        most_bytes: the largest size of the page. If the tables are too long for it, they hold only
            their largest rows, but at least 30, and say how many more there are.

    Returns:
        The text of the page.
    """
    text = ""
    for limit in _LIMITS:
        text = _filled(_Packed(limit).page(data, diffs or ()))
        if len(text.encode()) <= most_bytes:
            break
    return text


def inline(data: Mapping[str, Any], *, height: int = 760) -> str:
    """Return the page in a frame for a notebook, with a bounded size.

    Args:
        data: as `Comparison.to_json` returns it.
        height: of the frame, in pixels.
    """
    return framed(page(data, most_bytes=300_000), height)


def framed(text: str, height: int) -> str:
    """Return a page in a frame for a notebook."""
    return (
        f'<iframe srcdoc="{html.escape(text)}" title="remat_kit report" '
        'sandbox="allow-scripts" style="width:100%;border:1px solid #8884;border-radius:6px;'
        f'height:{height}px"></iframe>'
    )


def _filled(packed: Mapping[str, Any]) -> str:
    parts = {
        "title": html.escape(f"{packed['model'] or 'report'} · remat_kit"),
        "colors": colors(),
        "style": asset("page.css"),
        "script": asset("page.js"),
        # The data contains no "<", so that it cannot end the script or begin a comment.
        "data": _compact(packed).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], asset("page.html"))


def colors() -> str:
    """Return the colours of phases as CSS variables."""
    return "".join(f"--{k}:light-dark({a},{b});" for k, (a, b) in COLORS.items())


def asset(name: str) -> str:
    """Return a file of this folder as text."""
    return importlib.resources.files("remat_kit._show").joinpath(name).read_text(encoding="utf-8")


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class _Packed:
    """The data of a page; ``limit`` is the most rows of one table."""

    def __init__(self, limit: int):
        self.limit = limit
        self.strings: dict[str, int] = {}

    def page(self, data: Mapping[str, Any], diffs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        policies = [self.report(report) for report in data.get("policies", ())]
        return {
            "model": _model(data.get("model")),
            **{key: str(data.get(key) or "") for key in ("headline", "command", "date")},
            "versions": dict(data.get("versions") or {}),
            "policies": policies,
            "targets": list(dict.fromkeys(t for p in policies for t in p["memory"])),
            "diffs": [self.diff(d) for d in diffs],
            "strings": list(self.strings),
        }

    def report(self, report: Mapping[str, Any]) -> dict[str, Any]:
        by_target = {
            key: dict(report.get(key) or {})
            for key in ("memory", "step_seconds", "hlo_recomputed_ops", "hlo_xla_remat")
        }
        found = report.get("diff")
        return {
            "name": report.get("policy", ""),
            **{k: report.get(k) for k in ("saved_bytes", "offloaded_bytes")},
            **{k: report.get(k) for k in ("recomputed_flops", "forward_flops")},
            **{k: report.get(k) for k in ("parameters", "parameter_bytes")},
            **by_target,
            "saved": self.arrays(report.get("saved"), _SAVED),
            "inputs": self.arrays(report.get("inputs"), _SAVED),
            "recomputed": self.arrays(report.get("recomputed"), _RECOMPUTED, by="flops"),
            "peak": {t: self.peak(p) for t, p in (report.get("peak") or {}).items() if p},
            "timeline": {t: self.curve(c) for t, c in (report.get("timeline") or {}).items() if c},
            "regions": self.tables(report.get("regions"), _REGIONS, by="saved_bytes"),
            "what_if": self.tables(
                {
                    target: [r for r in rows or () if r.get("worthwhile", True)]
                    for target, rows in (report.get("counterfactuals") or {}).items()
                },
                _WHAT_IF,
                by="saved_bytes",
            ),
            "collectives": self.tables(
                {
                    target: [r | {"axes": ", ".join(r.get("axes") or ())} for r in rows or ()]
                    for target, rows in (report.get("collectives") or {}).items()
                },
                _COLLECTIVES,
                by="seconds",
            ),
            "compiled": self.tables(report.get("hlo_recomputed"), _COMPILED, by="flops"),
            "notes": list(report.get("notes") or ()),
            "lints": [dict(lint) for lint in report.get("lints") or ()],
            "diff": self.diff(found if isinstance(found, Mapping) else {"lines": found})
            if found
            else None,
        }

    def arrays(self, rows: Any, fields: Sequence[str], by: str = "bytes") -> dict[str, Any] | None:
        if rows is None:
            return None
        named = []
        for r in rows:
            names, stack = ", ".join(r.get("names") or ()), "\n".join(r.get("frames") or ())
            named.append(r | {"array": _array(r), "names": names, "stack": stack})
        return self.table(named, fields, by=by)

    def table(
        self, rows: Sequence[Mapping[str, Any]], fields: Sequence[str], by: str = "bytes"
    ) -> dict[str, Any]:
        """Return rows by column, largest first; texts are indices into ``strings``."""
        ordered = sorted(rows, key=lambda r: -(r.get(by) or 0))
        kept, left = ordered[: self.limit], ordered[self.limit :]
        return {
            "rows": len(kept),
            "columns": {f: [self.cell(r.get(f)) for r in kept] for f in fields},
            "texts": [f for f in fields if any(isinstance(r.get(f), str) for r in kept)],
            "left": len(left),
            "left_amount": sum(r.get(by) or 0 for r in left),
        }

    def tables(self, by_target: Any, fields: Sequence[str], by: str) -> dict[str, Any]:
        given = (by_target or {}).items()
        return {target: self.table(rows, fields, by) for target, rows in given if rows}

    def cell(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.strings.setdefault(value, len(self.strings))
        return value

    def peak(self, peak: Mapping[str, Any]) -> dict[str, Any]:
        buffers = self.table(peak.get("buffers") or (), _BUFFERS)
        buffers["left"] += peak.get("buffers_left_out") or 0
        shown = sum(buffers["columns"]["bytes"])
        buffers["left_amount"] = max(0, (peak.get("bytes") or 0) - shown) if buffers["left"] else 0
        return {k: v for k, v in peak.items() if k != "buffers"} | {"buffers": buffers}

    def curve(self, curve: Mapping[str, Any]) -> dict[str, Any]:
        """Return a timeline with fewer points and coarser units, which look the same."""
        points = _highest(curve["bytes"], min(self.limit, 600))
        unit = max(1, max(curve["bytes"], default=0) // _RESOLUTION)

        def coarse(sizes: Sequence[int]) -> list[int]:
            return [round(sizes[p] / unit) for p in points]

        series = {
            by: {name: coarse(sizes) for name, sizes in (curve.get(by) or {}).items()}
            for by in ("by_phase", "by_module")
        }
        phases = list(dict.fromkeys(curve["phases"]))
        return {
            "unit": unit,
            "steps": [curve["steps"][p] for p in points],
            "bytes": coarse(curve["bytes"]),
            "phase_names": phases,
            "phases": [phases.index(curve["phases"][p]) for p in points],
            "resident_bytes": curve.get("resident_bytes") or 0,
            **series,
        }

    def diff(self, diff: Mapping[str, Any]) -> dict[str, Any]:
        """Return a difference as lines with their signs, and how many were left out."""
        lines = diff.get("lines")
        if lines is None:
            lines = [{"sign": t[:1], "text": t} for t in (diff.get("text") or "").split("\n")]
        kept = [[line.get("sign", ""), line.get("text", "")] for line in lines[: self.limit]]
        labels = (diff.get("before"), diff.get("after"))
        title = " → ".join(str(label) for label in labels if label) or diff.get("policy", "")
        found = {k: diff[k] for k in ("common", "added", "removed", "moved") if k in diff}
        return {
            "title": title,
            "policy": diff.get("policy", diff.get("after", "")),
            "counts": found,
            "lines": kept,
            "left": max(0, len(lines) - self.limit),
        }


def _model(model: Any) -> str:
    return "" if model is None else str(model)


def _array(row: Mapping[str, Any]) -> str:
    return f"{row.get('dtype', '')}[{','.join(map(str, row.get('shape') or ()))}]"


def _highest(sizes: Sequence[int], limit: int) -> list[int]:
    """Return the highest point of each of ``limit`` intervals.

    >>> _highest([1, 5, 2, 2, 9, 3], 3)
    [1, 2, 4]
    """
    n = len(sizes)
    count = min(n, limit)
    bounds = [(i * n // count, (i + 1) * n // count) for i in range(count)]
    return [max(range(a, b), key=lambda i: (sizes[i], -i)) for a, b in bounds]
