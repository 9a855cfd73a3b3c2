"""Write the pages of a frontier and of a plan, in the design of a report's page.

The pages are made from the plain values of `Frontier.to_json` and `Plan.to_json`, so stored answers
can be shown again. Everything is in the HTML; `chart.js` shows the plan of a point that the reader
points at.
"""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remat_kit._show.figures import WORK, extra_name
from remat_kit._show.page import asset, colors, framed
from remat_kit._units import format_bytes, format_flops, format_percent, format_seconds

_WIDTH, _HEIGHT = 960, 380


_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 26, 46


_MOST_ROWS = 500


# -- the frontier -----------------------------------------------------------------------------


def frontier_page(plain: Mapping[str, Any], command: str = "", plan_command: str = "") -> str:
    """Return the page of a frontier.

    Args:
        plain: as `Frontier.to_json` returns it.
        command: the command that made it, or "".
        plan_command: a command that makes a plan of the same program, without its budget and its
            target; by default the Python call.
    """
    points = plain["points"]
    details = [_details(p, p["predicted_peak_bytes"], plain, plan_command) for p in points]
    details += [
        {**_details(p, None, plain, plan_command), "title": f"the preset {p['name']}, predicted"}
        for p in plain["presets"]
    ]
    chart, name = _Chart(plain), extra_name(plain)
    measure = name.removeprefix("extra ")
    about = "predicted by the planner; remat_kit.plan compiles the schedules that it returns"
    legend = (
        _key("var(--forward)", "schedules"),
        _key("var(--recompute)", "presets, predicted"),
        f'<span><span class="stroke"></span>lower bound of the {measure} with this peak</span>',
    )
    body = _section(
        f"Memory against {measure}",
        about,
        f'<div class="plot chart">{chart.svg()}</div>'
        f'<div class="legend">{"".join(legend)}</div>'
        '<div id="chosen" class="card" aria-live="polite"><p>Point at a schedule, or move to it '
        "with the Tab key, to see its plan.</p></div>",
    )
    rows = [
        (
            format_bytes(p["predicted_peak_bytes"]),
            format_bytes(p["saved_bytes"]),
            format_bytes(p["host_bytes"]),
            *(text for _, text in _extra(p, plain)),
        )
        for p in points[:_MOST_ROWS]
    ]
    columns = ["predicted peak", "saved", "on the host", *_EXTRA[name]]
    if not any(p["host_bytes"] for p in points):
        columns.pop(2)
        rows = [(*row[:2], *row[3:]) for row in rows]
    left = f"; the first {_MOST_ROWS} of {len(points)}" if len(points) > _MOST_ROWS else ""
    what = "extra work as a share of the forward pass"
    what += (f"; {WORK}" if name == "extra work" else "") + left
    body += _section("Schedules", what, _table(columns, rows))
    return _document(
        f"memory against {measure} on {plain['target']}",
        plain.get("headline", ""),
        command,
        body,
        details,
    )


def _details(
    point: Mapping[str, Any], budget: int | None, plain: Mapping[str, Any], plan_command: str
) -> dict[str, Any]:
    """Return what the page says about a point: its figures, and the command that makes a plan."""
    lines = [
        ("saved", format_bytes(point["saved_bytes"])),
        ("on the host", format_bytes(point["host_bytes"]) if point["host_bytes"] else ""),
        *((name, f"{text} of the forward pass") for name, text in _extra(point, plain)),
    ]
    made = ""
    if budget is not None:
        size, target = _rounded_up(budget), plain["target"]
        made = f'remat_kit.plan(..., budget="{size}", target="{target}")'
        if plan_command:
            made = f"{plan_command} --budget {size} --target {target}"
    return {
        "title": f"{format_bytes(point['predicted_peak_bytes'])} at the peak",
        "lines": [line for line in lines if line[1]],
        "command": made,
    }


# The columns of extra work, by what the schedules minimize. The bound follows what it bounds.
_EXTRA = {
    "extra time": ("extra time", "lower bound", "extra FLOPs"),
    "extra FLOPs": ("extra FLOPs", "lower bound", "extra time"),
    "extra work": ("extra work", "lower bound", "extra time", "extra FLOPs"),
}


def _extra(point: Mapping[str, Any], plain: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the columns of a point's extra work, as shares of the forward pass."""
    forward = plain["forward_seconds"] or 1.0
    shares = {
        "extra time": point["extra_seconds"] / forward,
        "extra FLOPs": point["extra_flops_fraction"],
        "extra work": point["extra_work"] / forward,
        "lower bound": point["bound_extra_work"] / forward,
    }
    return [(name, f"+{format_percent(shares[name])}") for name in _EXTRA[extra_name(plain)]]


def _rounded_up(size: int) -> str:
    """Return a budget that is at least a size, with a unit.

    >>> _rounded_up(36 * 2**20), _rounded_up(36 * 2**20 + 1), _rounded_up(5000)
    ('36MiB', '37MiB', '5KiB')
    """
    unit, name = (2**20, "MiB") if size >= 10 * 2**20 else (2**10, "KiB")
    return f"{-(-size // unit)}{name}"


class _Chart:
    """The picture of memory against extra work."""

    def __init__(self, plain: Mapping[str, Any]):
        self.plain = plain
        self.forward = plain["forward_seconds"] or 1.0
        self.name = extra_name(plain)
        shown = [*plain["points"], *plain["presets"]]
        sizes = [p["predicted_peak_bytes"] for p in shown]
        low, high = min(sizes, default=0), max(sizes, default=1)
        self.capacity = plain.get("memory_bytes") or 0
        if self.capacity and low / 1.5 <= self.capacity <= 1.5 * high:
            low, high = min(low, self.capacity), max(high, self.capacity)
        room = max(high - low, high / 20, 1)
        self.low, self.high = max(0, low - room / 20), high + room / 20
        highest = max((p["extra_work"] for p in shown), default=0.0) / self.forward
        self.top = max(highest * 1.08, 0.01)

    def x(self, size: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (size - self.low) / (self.high - self.low)

    def y(self, seconds: float) -> float:
        part = seconds / self.forward / self.top
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * part

    def svg(self) -> str:
        parts = [*self.axes(), *self.limit(), self.line("bound_extra_work", "bound")]
        parts += [self.line("extra_work", "schedules"), *self.marks()]
        what = self.name.removeprefix("extra ")
        label = f"memory against {what}; each schedule can be reached with the Tab key"
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="group" aria-label="{label}">'
            f"{''.join(parts)}</svg>"
        )

    def axes(self) -> Iterable[str]:
        floor = _HEIGHT - _BOTTOM
        for share in _ticks(0, self.top):
            y = self.y(share * self.forward)
            yield _line(_LEFT, y, _WIDTH - _RIGHT, y, "grid")
            yield _text(_LEFT - 8, y + 4, f"+{format_percent(share)}", "end")
        for size in _ticks(self.low, self.high, base=2):
            yield _text(self.x(size), floor + 18, format_bytes(size), "middle")
        yield _text(_WIDTH - _RIGHT, _HEIGHT - 6, "predicted peak on the device", "end")
        yield _text(_LEFT, 14, f"{self.name}, as a share of the forward pass", "start")

    def limit(self) -> Iterable[str]:
        """Yield the line of the chip's capacity, or a note if it is far away."""
        text = f"{self.plain['target']} has {format_bytes(self.capacity)}"
        if self.low <= self.capacity <= self.high:
            x = self.x(self.capacity)
            yield _line(x, _TOP, x, _HEIGHT - _BOTTOM, "capacity")
            late = x > _WIDTH / 2
            yield _text(
                x + (-6 if late else 6), _TOP + 12, text, "end" if late else "start", "limit"
            )
        elif self.capacity:
            yield _text(_WIDTH - _RIGHT, 14, text, "end", "limit")

    def line(self, what: str, kind: str) -> str:
        """Return a curve with corners: a schedule serves every budget up to the next one's peak."""
        places = [
            (self.x(p["predicted_peak_bytes"]), self.y(p[what])) for p in self.plain["points"]
        ]
        path = [f"{x:.1f},{y:.1f}" for x, y in places[:1]]
        for (_, before), (x, y) in itertools.pairwise(places):
            path += [f"{x:.1f},{before:.1f}", f"{x:.1f},{y:.1f}"]
        return f'<path class="{kind}" d="M{"L".join(path)}"/>' if path else ""

    def marks(self) -> Iterable[str]:
        points, what = self.plain["points"], self.name.removeprefix("extra ")
        for number, p in enumerate([*points, *self.plain["presets"]]):
            x, y = self.x(p["predicted_peak_bytes"]), self.y(p["extra_work"])
            size = format_bytes(p["predicted_peak_bytes"])
            share = format_percent(p["extra_work"] / self.forward)
            name = html.escape(p.get("name", "a schedule"))
            shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
            if "name" in p:
                box = f'x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10"'
                shape = f'<rect {box} transform="rotate(45 {x:.1f} {y:.1f})"/>'
                late = x > _WIDTH - 160
                at = (x + (-10 if late else 10), y - 6)
                shape += _text(*at, p["name"], "end" if late else "start", "name")
            kind = "preset" if "name" in p else "schedule"
            yield (
                f'<g class="mark-{kind}" tabindex="0" role="button" data-point="{number}" '
                f'aria-label="{name}, {size}, +{share} {what}">{shape}'
                f"<title>{name}: {size}, +{share} {what}</title></g>"
            )


def _ticks(low: float, high: float, base: int = 10) -> list[float]:
    """Return four to eight round numbers between two numbers.

    >>> _ticks(0, 1), _ticks(0, 40 * 2**20, base=2)[1] / 2**20
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], 8.0)
    """
    rough = (high - low) / 5
    power = base ** math.floor(math.log(rough, base)) if rough > 0 else 1
    steps = (1, 2, 2.5, 5, 10) if base == 10 else (1, 2)
    step = next((s * power for s in steps if s * power >= rough), rough)
    first = math.ceil(low / step)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {where}>{html.escape(text)}</text>'


# -- a plan -----------------------------------------------------------------------------------


def plan_page(plain: Mapping[str, Any], command: str = "") -> str:
    """Return the page of a plan: before and after, in all and by module.

    Args:
        plain: as `Plan.to_json` returns it, with ``modules`` and ``memory_bytes``.
        command: the command that made it, or "".
    """
    before, after = plain["baseline_peak_bytes"], plain["compiled_peak_bytes"]
    most = max(before or 0, after or 0, 1)
    budget = plain["budget_bytes"]
    cards = [
        _card("Peak without a plan", _size(before), _meter(before, most)),
        _card("Peak with the plan", _size(after), _meter(after, most, "var(--accent)")),
        _card("Price", _price(plain), f"<p>{_extra_flops(plain)}</p>"),
        _card("Budget", format_bytes(budget) if budget else "the least", _chip(plain)),
    ]
    if plain["peak_phase"]:
        tried = f"<p>{plain['tried']} programs were compiled</p>"
        cards.append(_card("The peak is in", f"the {html.escape(plain['peak_phase'])}", tried))
    body = f'<div class="cards">{"".join(cards)}</div>'
    body += _section(
        "By module",
        "activations that wait for the backward pass, without the plan and with it",
        _module_table(plain["modules"]),
    )
    if plain["notes"]:
        notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in plain["notes"])
        body += _section("Notes", "", notes)
    policy = f"<pre>{html.escape(plain['policy'])}</pre>"
    body += _section("The policy", "what remat_kit.policy runs", policy)
    return _document(f"a plan for {plain['target']}", plain.get("headline", ""), command, body, [])


def _module_table(modules: Sequence[Mapping[str, Any]]) -> str:
    largest = max([1, *(max(m["before_bytes"], m["saved_bytes"]) for m in modules)])
    rows = []
    for m in modules[:_MOST_ROWS]:
        again = format_flops(m["recomputed_flops"]) if m["equations"] else ""
        rows.append(
            (
                m["module"] or "(no module)",
                format_bytes(m["before_bytes"]),
                _Html(_meter(m["before_bytes"], largest)),
                format_bytes(m["saved_bytes"]),
                _Html(_meter(m["saved_bytes"], largest, "var(--accent)")),
                format_bytes(m["offloaded_bytes"]) if m["offloaded_bytes"] else "",
                again,
                format_seconds(m["recomputed_seconds"]) if m["recomputed_seconds"] else "",
                m["why"],
            )
        )
    columns = [
        "module",
        "without",
        "",
        "with the plan",
        "",
        "on the host",
        "recomputed",
        "time",
        "why",
    ]
    if not any(m["offloaded_bytes"] for m in modules):
        columns.pop(5)
        rows = [(*row[:5], *row[6:]) for row in rows]
    return _table(columns, rows)


def _size(size: int | None) -> str:
    return "?" if size is None else format_bytes(size)


def _price(plain: Mapping[str, Any]) -> str:
    extra, whole = plain["extra_seconds"], plain["step_seconds"]
    if extra is None or not whole or whole <= extra:
        return "?"
    return f"+{format_percent(extra / (whole - extra))} time"


def _extra_flops(plain: Mapping[str, Any]) -> str:
    share = plain["extra_flops_fraction"]
    said = "" if share is None else f"+{format_percent(share)} of the forward FLOPs, "
    return f"{said}by the roofline"


def _chip(plain: Mapping[str, Any]) -> str:
    memory = plain.get("memory_bytes")
    target = html.escape(plain["target"])
    return f"<p>{target} has {format_bytes(memory)}</p>" if memory else f"<p>for {target}</p>"


# -- the parts of both ------------------------------------------------------------------------


class _Html(str):
    """A cell that is HTML already."""


def _document(title: str, headline: str, command: str, body: str, details: Sequence[Any]) -> str:
    parts = html.escape(headline).split("`")
    said = "".join(f"<code>{p}</code>" if n % 2 else p for n, p in enumerate(parts))
    # The data contains no "<", so that it cannot end the script or begin a comment.
    data = json.dumps(list(details), ensure_ascii=False).replace("<", "\\u003c")
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{html.escape(title)} · remat_kit</title>
<style>
:root{{{colors()}}}
{asset("page.css")}
</style>
</head>
<body>
<header class="top"><div class="title"><span class="mark">remat_kit</span>
<h1>{html.escape(title)}</h1></div></header>
<div class="lead"><p id="headline">{said}</p><code id="command">{html.escape(command)}</code></div>
<main>{body}</main>
<script type="application/json" id="data">{data}</script>
<script>
{asset("chart.js")}
</script>
</body>
</html>
"""


def _section(title: str, about: str, inside: str) -> str:
    head = f'<h2>{html.escape(title)}</h2><span class="about">{html.escape(about)}</span>'
    name = html.escape(title)
    return f'<section aria-label="{name}"><div class="head">{head}</div>{inside}</section>'


def _card(title: str, value: str, more: str) -> str:
    head = f"<h3>{html.escape(title)}</h3>"
    return f'<div class="card">{head}<div class="value">{html.escape(value)}</div>{more}</div>'


def _meter(size: int | None, most: int, color: str = "var(--muted)") -> str:
    width = 100 * (size or 0) / most
    return f'<span class="meter"><i style="width:{width:.1f}%;background:{color}"></i></span>'


def _key(color: str, text: str) -> str:
    return f'<span><span class="dot" style="background:{color}"></span>{html.escape(text)}</span>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def cell(number: int, text: str) -> str:
        if isinstance(text, _Html):
            return f'<td class="fill">{text}</td>'
        kind = "num" if text[:1].isdigit() or text[:1] == "+" else "wrap" if number else "mono"
        return f'<td class="{kind}">{html.escape(text)}</td>'

    head = "".join(f'<th scope="col"><span>{html.escape(c)}</span></th>' for c in columns)
    body = "".join(
        f"<tr>{''.join(cell(n, text) for n, text in enumerate(row))}</tr>" for row in rows
    )
    return (
        f'<div class="scroll low" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def inline(page: str, height: int = 620) -> str:
    """Return a page of this module in a frame for a notebook."""
    return framed(page, height)
