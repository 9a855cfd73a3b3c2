"""Draw curves of a report's memory or of a frontier, and write traces for ui.perfetto.dev.

The functions take the plain values of `Report.to_json` and `Frontier.to_json`, so stored reports
can be drawn again. The curves need matplotlib, which the extra ``plot`` installs; the trace needs
nothing.
"""

from __future__ import annotations

import io
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from remat_kit import _files
from remat_kit._errors import UserError
from remat_kit._units import format_bytes

RESIDENT = "arguments and outputs"


# Legible on white and on black; blue, yellow and red differ for every kind of colour blindness.
COLORS: Mapping[str, tuple[str, str]] = {
    "forward": ("#3d72b4", "#5b93d8"),
    "recompute": ("#d99a1c", "#e3b04b"),
    "backward": ("#b5495b", "#d4707f"),
    "update": ("#257a70", "#4fb3a6"),
    "other": ("#8d8d94", "#7f8590"),
    "argument": ("#8a99ad", "#64748b"),
    "output": ("#b9c4d2", "#475569"),
}


LINES = ("#1f2937", "#3d72b4", "#d99a1c", "#b5495b", "#2f8f83", "#7b5ea7", "#5f6b7a", "#a0522d")


_MIB = 2**20


# -- curves -----------------------------------------------------------------------------------


def timeline(report: Mapping[str, Any], target: str, path: Any, *, title: str = "") -> None:
    """Draw the live bytes over the schedule, stacked by phase, with the peak marked.

    Args:
        report: as `Report.to_json` returns it.
        target: one of the targets that it was compiled for.
        path: of the picture; its suffix selects the format: ``.png``, ``.svg`` or ``.pdf``.
        title: of the picture; precedes policy and target.

    Raises:
        UserError: matplotlib is missing, or the report has no timeline for the target.
    """
    line = _timeline(report, target, call="to_png")
    figure, axes = _axes(title, f"{report.get('policy', '')} on {target}")
    steps = [*line["steps"], line["steps"][-1] + 1]
    resident = [line.get("resident_bytes", 0)] * len(line["steps"])
    bottoms = [0.0] * len(steps)
    for name, sizes in {RESIDENT: resident, **line.get("by_phase", {})}.items():
        tops = [b + s / _MIB for b, s in zip(bottoms, [*sizes, sizes[-1]], strict=True)]
        color = COLORS["argument" if name == RESIDENT else name if name in COLORS else "other"][0]
        axes.fill_between(steps, bottoms, tops, step="post", color=color, label=name, linewidth=0)
        bottoms = tops
    step, size = _peak(report, target, line)
    axes.axvline(step, color=LINES[0], linewidth=0.8, linestyle=(0, (4, 3)))
    axes.plot([step], [size / _MIB], marker="o", markersize=4, color=LINES[0])
    right = step > line["steps"][-1] / 2
    axes.annotate(
        f"peak {format_bytes(size)}",
        (step, size / _MIB),
        xytext=(-8 if right else 8, 6),
        textcoords="offset points",
        ha="right" if right else "left",
        fontsize=9,
    )
    axes.set_xlim(0, steps[-1])
    axes.set_xlabel("step of the schedule")
    _finish(figure, axes, path)


def comparison(
    reports: Sequence[Mapping[str, Any]], target: str, path: Any, *, title: str = ""
) -> None:
    """Draw the live bytes of several policies over their schedules, one line for each.

    Schedules differ in length, so each is drawn from its beginning to its end.

    Args:
        reports: as `Report.to_json` returns them; those without a timeline for the target are left
            out.
        target: one of the targets that they were compiled for.
        path: of the picture; its suffix selects the format: ``.png``, ``.svg`` or ``.pdf``.
        title: of the picture; precedes the target.

    Raises:
        UserError: matplotlib is missing, or no report has a timeline for the target.
    """
    known = [r for r in reports if target in r.get("timeline", {})]
    if not known:
        raise _no_timeline("to_png", target, _targets(reports))
    figure, axes = _axes(title, f"on {target}")
    for number, report in enumerate(known):
        line = _timeline(report, target, call="to_png")
        steps = [*line["steps"], line["steps"][-1] + 1]
        color = LINES[number % len(LINES)]
        step, size = _peak(report, target, line)
        axes.plot(
            [100 * s / steps[-1] for s in steps],
            [b / _MIB for b in [*line["bytes"], line["bytes"][-1]]],
            drawstyle="steps-post",
            color=color,
            linewidth=1.4,
            label=f"{report.get('policy', '?')}, peak {format_bytes(size)}",
        )
        axes.plot([100 * step / steps[-1]], [size / _MIB], marker="o", markersize=4, color=color)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the schedule")
    _finish(figure, axes, path)


def extra_name(plain: Mapping[str, Any]) -> str:
    """Return the name of what the schedules of a frontier minimize.

    >>> points = [{"forward_flops": 2.0}]
    >>> [extra_name({"objective": o, "points": points}) for o in ("time", "flops", "balanced")]
    ['extra time', 'extra FLOPs', 'extra work']

    Args:
        plain: as `Frontier.to_json` returns it.
    """
    if not any(p["forward_flops"] for p in plain["points"]):
        return "extra time"  # there is nothing else to minimize
    return {"time": "extra time", "flops": "extra FLOPs"}.get(plain["objective"], "extra work")


# What "extra work" is.
WORK = "extra work is three parts FLOPs and one part time"


def frontier(plain: Mapping[str, Any], path: Any, *, call: str = "to_png") -> None:
    """Draw memory against extra work: the schedules, the presets and the lower bound.

    Args:
        plain: as `Frontier.to_json` returns it.
        path: of the picture; its suffix selects the format. A text stream gets SVG.
        call: the call that error messages name.

    Raises:
        UserError: matplotlib is missing.
    """
    name = extra_name(plain)
    what = name.removeprefix("extra ")
    figure, axes = _axes(f"memory against {what} on {plain['target']}", call=call)
    forward = plain["forward_seconds"] or 1.0
    memory = [p["predicted_peak_bytes"] / _MIB for p in plain["points"]]
    extra = [100 * p["extra_work"] / forward for p in plain["points"]]
    bound = [100 * p["bound_extra_work"] / forward for p in plain["points"]]
    style = {"drawstyle": "steps-post", "linewidth": 1.4}
    axes.plot(memory, extra, marker="o", markersize=3, color=LINES[1], label="schedules", **style)
    axes.plot(memory, bound, linestyle=(0, (4, 3)), color=LINES[0], label="bound", **style)
    for number, preset in enumerate(plain["presets"]):
        place = preset["predicted_peak_bytes"] / _MIB, 100 * preset["extra_work"] / forward
        axes.plot(*place, "Dsv^"[number % 4], color=LINES[2], label=preset["name"])
    axes.set_xlabel("predicted peak, MiB")
    _finish(figure, axes, path, ylabel=f"{name}, % of the forward pass")


def _axes(*title: str, call: str = "to_png") -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            f"`{call}`: matplotlib is not installed, and it draws the pictures",
            hint="pip install 'remat-kit[plot]'; the tables and the JSON do not need it",
        ) from error
    figure = Figure(figsize=(9, 4.2), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_title(", ".join(filter(None, title)), loc="left", fontsize=11)
    return figure, axes


def _finish(figure: Any, axes: Any, path: Any, ylabel: str = "device memory, MiB") -> None:
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.set_ylabel(ylabel)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    if hasattr(path, "write"):
        figure.savefig(path, dpi=150, format="svg")
        return
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format=pathlib.Path(path).suffix[1:].lower())
    _files.write_whole(path, drawn.getvalue())


def check_picture(path: Any, *, call: str) -> None:
    """Raise unless a picture can be drawn: its suffix is known and matplotlib is installed."""
    suffix = pathlib.Path(path).suffix.lower()
    if suffix not in (".png", ".svg", ".pdf"):
        raise UserError(
            f"`{call}`: {suffix or 'no suffix'} is not a known picture format",
            hint="end the name in .png, .svg or .pdf",
        )
    check_drawing(call=call)


def check_drawing(*, call: str) -> None:
    """Raise unless matplotlib is installed."""
    _axes(call=call)


# -- the trace --------------------------------------------------------------------------------


def perfetto(reports: Sequence[Mapping[str, Any]], target: str) -> dict[str, Any]:
    """Return a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

    Each report is a process with a counter of the device's bytes, a counter of the temporaries of
    each phase, a slice for each interval of a phase, and an instant at the peak. A schedule has an
    order and no clock, so each of its steps counts as a microsecond.

    >>> line = {"steps": [0, 1], "bytes": [8, 24], "phases": ["forward", "backward"]}
    >>> trace = perfetto([{"policy": "dots", "timeline": {"cpu": line}}], "cpu")
    >>> [e["args"] for e in trace["traceEvents"] if e["name"] == "device bytes"]
    [{'bytes': 8}, {'bytes': 24}]

    Args:
        reports: as `Report.to_json` returns them; those without a timeline for the target are left
            out.
        target: one of the targets that they were compiled for.

    Returns:
        Plain values, ready for `json.dumps`; the format is that of the Trace Event Format,
        https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

    Raises:
        UserError: no report has a timeline for the target.
    """
    known = [r for r in reports if r.get("timeline", {}).get(target)]
    if not known:
        raise _no_timeline("to_perfetto", target, _targets(reports))
    return {
        "traceEvents": [
            event
            for process, report in enumerate(known, start=1)
            for event in _events(report, target, process)
        ],
        "displayTimeUnit": "ms",
        "otherData": {"target": target, "clock": "steps of the schedule, one microsecond each"},
    }


_THREAD = 1


def _events(report: Mapping[str, Any], target: str, process: int) -> Iterator[dict[str, Any]]:
    line = _timeline(report, target, call="to_perfetto")
    at = {"pid": process, "tid": _THREAD}
    name = f"{report.get('policy', '')} on {target}"
    yield {"name": "process_name", "ph": "M", **at, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", **at, "args": {"sort_index": process}}
    yield {"name": "thread_name", "ph": "M", **at, "args": {"name": "phases"}}
    for start, end, phase in _phases(line):
        yield {"name": phase, "cat": "phase", "ph": "X", **at, "ts": start, "dur": end - start}
    for i, step in enumerate(line["steps"]):
        counters = {"device bytes": line["bytes"], **_made(line)}
        for counter, sizes in counters.items():
            args = {"bytes": sizes[i]}
            yield {"name": counter, "ph": "C", "pid": process, "ts": step, "args": args}
    peak = report.get("peak", {}).get(target)
    if peak:
        instant = {"cat": "peak", "ph": "i", "s": "p", **at, "ts": peak["step"]}
        yield {"name": f"peak {format_bytes(peak['bytes'])}", **instant, "args": _told(peak)}


def _made(line: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    return {f"made in {phase}": sizes for phase, sizes in line.get("by_phase", {}).items()}


def _phases(line: Mapping[str, Any]) -> Iterator[tuple[int, int, str]]:
    """Yield the first step, the last step and the phase of each interval with one phase."""
    points = zip(line["steps"], line["phases"], strict=True)
    starts = [(next(group)[0], phase) for phase, group in itertools.groupby(points, lambda p: p[1])]
    ends = [*(step for step, _ in starts[1:]), line["steps"][-1] + 1]
    for (start, phase), end in zip(starts, ends, strict=True):
        yield start, end, phase


def _told(peak: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the instant: where the peak is, and its largest buffers."""
    buffers = {
        f"{number}. {_place(b) or b['op']} {b['shape']}": format_bytes(b["bytes"])
        for number, b in enumerate(peak.get("buffers", ())[:10], start=1)
    }
    return {"bytes": peak["bytes"], "module": _place(peak), **buffers}


def _place(found: Mapping[str, Any]) -> str:
    """Return the module of a buffer or of a peak, and the loop over pieces that it is in."""
    return ", ".join(filter(None, (found["module"], found.get("pieces"))))


# -- what they draw ---------------------------------------------------------------------------


def _timeline(report: Mapping[str, Any], target: str, *, call: str) -> Mapping[str, Any]:
    line = report.get("timeline", {}).get(target)
    if not line or not line["steps"]:
        raise _no_timeline(call, target, _targets([report]))
    return line


def _peak(report: Mapping[str, Any], target: str, line: Mapping[str, Any]) -> tuple[int, int]:
    peak = report.get("peak", {}).get(target)
    if peak:
        return peak["step"], peak["bytes"]
    size = max(line["bytes"])
    return line["steps"][line["bytes"].index(size)], size


def _targets(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for r in reports for name in r.get("timeline", {})))


def chosen_target(reports: Sequence[Mapping[str, Any]], target: str | None, *, call: str) -> str:
    """Return the target that was asked for, or the first one with a timeline."""
    known = _targets(reports)
    if target is None and known:
        return known[0]
    if target not in known:
        raise _no_timeline(call, target, known)
    return target


def _no_timeline(call: str, target: str | None, known: Sequence[str]) -> UserError:
    if known:
        return UserError(
            f"`{call}`: there is no timeline for {target!r}",
            hint=f"it was compiled for {', '.join(known)}",
        )
    return UserError(
        f"`{call}`: there is no timeline, because nothing was compiled",
        hint='give inspect a target, for example target="cpu"',
    )
