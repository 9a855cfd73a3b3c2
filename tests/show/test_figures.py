"""Pictures and traces: that they show the report's figures, and say what is missing."""

import itertools
import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest

from remat_kit import UserError, inspect, policy
from remat_kit._inspect.comparison import Comparison
from remat_kit._show import figures as _figures
from remat_kit._units import format_bytes

X = jax.ShapeDtypeStruct((2, 64, 64), jnp.float32)


def layer(x, w):
    return jnp.sin(jnp.tanh(x @ w)), None


def loss(weights):
    # XLA:CPU of jax 0.10 merges what a region recomputes, but not a loop.
    x = weights[0]
    for i in range(3):
        with jax.named_scope(f"block_{i}"):
            x, _ = jax.lax.scan(layer, x, weights)
    return jnp.mean(x**2)


@pytest.fixture(scope="module")
def comparison():
    again = policy("nothing", at="block_*")(loss)
    reports = (inspect(loss, X, target="cpu"), inspect(again, X, target="cpu", label="nothing"))
    return Comparison(reports, model="blocks")


@pytest.fixture
def read():
    image = pytest.importorskip("matplotlib.image")
    return lambda path: image.imread(path)[..., :3]


def painted(pixels, color):
    """The share of the pixels that have a colour, given as ``#rrggbb``."""
    wanted = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return (abs(pixels - wanted).max(axis=-1) < 0.01).mean()


# -- pictures ---------------------------------------------------------------------------------


def test_one_report_is_stacked_by_phase(comparison, read, tmp_path):
    report = comparison.reports[1]
    report.to_png(tmp_path / "memory.png")
    pixels = read(tmp_path / "memory.png")
    line = report.to_json()["timeline"]["cpu"]
    area = {name: sum(sizes) for name, sizes in line["by_phase"].items()}
    area["argument"] = line["resident_bytes"] * len(line["steps"])
    large = [name for name in area if area[name] > 0.05 * sum(area.values())]
    assert len(large) >= 2
    for name in large:
        assert painted(pixels, _figures.COLORS[name][0]) > 0.005, name
    assert painted(pixels, _figures.COLORS["update"][0]) == 0


def test_several_reports_are_a_line_each(comparison, read, tmp_path):
    comparison.to_png(tmp_path / "memory.png")
    pixels = read(tmp_path / "memory.png")
    shown = [painted(pixels, color) > 0.0005 for color in _figures.LINES]
    assert shown == [True, True] + [False] * (len(_figures.LINES) - 2)


@pytest.mark.parametrize("suffix", ["svg", "pdf"])
def test_suffix_says_the_format(comparison, suffix, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"memory.{suffix}"
    comparison.to_png(path)
    if suffix == "svg":
        assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    else:
        assert path.read_bytes().startswith(b"%PDF-")


@pytest.mark.parametrize("name", ["memory", "memory.jpeg2"])
def test_unknown_suffix_is_refused(comparison, name, tmp_path):
    with pytest.raises(UserError, match=r"known picture format.*\nhint: .*\.png, \.svg or \.pdf"):
        comparison.to_png(tmp_path / name)


def test_missing_matplotlib_is_named_with_its_extra(comparison, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"matplotlib is not installed.*\n.*remat-kit\[plot\]"):
        comparison.to_png(tmp_path / "memory.png")
    comparison.to_html(tmp_path / "memory.html")
    comparison.to_perfetto(tmp_path / "memory.json")


def test_matplotlib_is_not_imported_before_it_draws(tmp_path):
    code = "import sys, remat_kit; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -- traces -----------------------------------------------------------------------------------


def test_trace_counts_the_bytes_of_the_timeline(comparison, tmp_path):
    comparison.to_perfetto(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    for process, report in enumerate(comparison.reports, start=1):
        events = [e for e in trace["traceEvents"] if e["pid"] == process]
        line = report.to_json()["timeline"]["cpu"]
        counted = [e for e in events if e["ph"] == "C" and e["name"] == "device bytes"]
        assert [e["args"]["bytes"] for e in counted] == line["bytes"]
        assert [e["ts"] for e in counted] == line["steps"]
        for phase, sizes in line["by_phase"].items():
            made = [e["args"]["bytes"] for e in events if e["name"] == f"made in {phase}"]
            assert made == list(sizes)
        (name,) = [e["args"]["name"] for e in events if e["name"] == "process_name"]
        assert name == f"{report.policy} on cpu"


def test_trace_has_a_slice_for_every_interval_of_a_phase(comparison):
    report = comparison.reports[1].to_json()
    line = report["timeline"]["cpu"]
    events = _figures.perfetto([report], "cpu")["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert slices[0]["ts"] == line["steps"][0]
    for before, after in itertools.pairwise(slices):
        assert before["ts"] + before["dur"] == after["ts"]
        assert before["name"] != after["name"]
    for step, phase in zip(line["steps"], line["phases"], strict=True):
        (there,) = [s for s in slices if s["ts"] <= step < s["ts"] + s["dur"]]
        assert there["name"] == phase
    assert {"forward", "recompute", "backward"} <= {s["name"] for s in slices}


def test_trace_marks_the_peak_with_its_buffers(comparison):
    report = comparison.reports[0].to_json()
    peak = report["peak"]["cpu"]
    (mark,) = [e for e in _figures.perfetto([report], "cpu")["traceEvents"] if e["ph"] == "i"]
    assert mark["ts"] == peak["step"]
    assert mark["args"]["bytes"] == peak["bytes"]
    assert mark["name"] == f"peak {format_bytes(peak['bytes'])}"
    largest = peak["buffers"][0]
    (first,) = [k for k in mark["args"] if k.startswith("1. ")]
    assert first == f"1. {largest['module']} {largest['shape']}"


def test_trace_has_what_the_format_asks_of_every_event(comparison):
    wanted = {
        "C": {"ts", "args"},
        "X": {"ts", "dur", "tid"},
        "i": {"ts", "s", "tid"},
        "M": {"args"},
    }
    reports = [r.to_json() for r in comparison.reports]
    trace = _figures.perfetto(reports, "cpu")
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid"} | wanted[event["ph"]] <= set(event)
        assert all(isinstance(event[k], int) for k in ("ts", "dur", "pid", "tid") if k in event)
        if event["ph"] == "C":
            assert all(isinstance(v, int) for v in event["args"].values())


# -- what is missing --------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["to_png", "to_perfetto"])
def test_nothing_compiled_is_explained(method, tmp_path):
    report = inspect(loss, X)
    with pytest.raises(UserError, match=f"`{method}`: .*nothing was compiled\\n.*target="):
        getattr(report, method)(tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


@pytest.mark.parametrize("method", ["to_png", "to_perfetto"])
def test_another_target_is_refused(comparison, method, tmp_path):
    with pytest.raises(UserError, match=r"no timeline for 'h100'\nhint: it was compiled for cpu"):
        getattr(comparison, method)(tmp_path / "out.png", target="h100")


def test_a_policy_that_did_not_compile_is_left_out(comparison, read, tmp_path):
    reports = [r.to_json() for r in comparison.reports]
    reports[0]["timeline"] = {}
    _figures.comparison(reports, "cpu", tmp_path / "memory.png")
    pixels = read(tmp_path / "memory.png")
    assert painted(pixels, _figures.LINES[1]) == 0
    trace = _figures.perfetto(reports, "cpu")
    assert {e["pid"] for e in trace["traceEvents"]} == {1}
