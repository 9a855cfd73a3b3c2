"""The pages of a frontier and of a plan: what they say, and what a browser makes of them."""

import html
import json
import re

import jax
import jax.numpy as jnp
import pytest
from browser import needs_browser

import remat_kit
from remat_kit._show import chart as _chart
from remat_kit._units import format_bytes, format_percent


def tower(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean(x)


ARGS = (
    [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8,
    jax.ShapeDtypeStruct((4096, 64), jnp.float32),
)


@pytest.fixture(scope="module")
def front():
    return remat_kit.frontier(tower, *ARGS, target="h100")


@pytest.fixture(scope="module")
def plan():
    return remat_kit.plan(tower, *ARGS, budget="min", compiles=1)


def data_of(text):
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(found)


def test_a_frontier_has_every_point_and_preset(front):
    text = _chart.frontier_page(front.to_json(), command="remat-kit frontier x")
    details = data_of(text)
    assert len(details) == len(front.points) + len(front.presets)
    for point, shown in zip(front.points, details, strict=False):
        assert shown["title"] == f"{format_bytes(point.predicted_peak_bytes)} at the peak"
        size = re.search(r'budget="(\d+)(MiB|KiB)", target="h100"', shown["command"])
        bytes_ = int(size[1]) * {"MiB": 2**20, "KiB": 2**10}[size[2]]
        assert 0 <= bytes_ - point.predicted_peak_bytes < 2**20
    assert all("predicted" in shown["title"] for shown in details[len(front.points) :])
    assert text.count('class="mark-schedule"') == len(front.points)
    assert text.count('class="mark-preset"') == len(front.presets) > 0
    assert html.escape(front.headline) in text
    assert "h100 has 79.1 GiB" in text
    assert "remat-kit frontier x" in text
    assert len(text) < 300_000


@pytest.mark.parametrize(
    ("objective", "name"), [("time", "time"), ("flops", "FLOPs"), ("balanced", "work")]
)
def test_the_bound_is_that_of_what_is_drawn(objective, name):
    front = remat_kit.frontier(tower, *ARGS, target="h100", objective=objective)
    plain = front.to_json()
    text = _chart.frontier_page(plain)
    assert f"<h2>Memory against {name}</h2>" in text
    assert f"extra {name}, as a share of the forward pass" in text
    assert f"lower bound of the {name} with this peak" in text
    assert ("three parts FLOPs" in text) == (objective == "balanced")
    forward = plain["forward_seconds"]
    for point, shown in zip(plain["points"], data_of(text), strict=False):
        lines = [line for line in shown["lines"] if line[0] not in ("saved", "on the host")]
        work, bound = (
            f"+{format_percent(point[key] / forward)} of the forward pass"
            for key in ("extra_work", "bound_extra_work")
        )
        assert lines[:2] == [[f"extra {name}", work], ["lower bound", bound]]


def test_the_line_of_the_capacity_is_drawn_where_it_is_near(front):
    plain = front.to_json()
    assert 'class="capacity"' not in _chart.frontier_page(plain)
    peak = plain["points"][2]["predicted_peak_bytes"]
    text = _chart.frontier_page(plain | {"memory_bytes": peak})
    assert 'class="capacity"' in text
    assert f"h100 has {format_bytes(peak)}" in text


def test_pages_need_nothing_from_elsewhere(front, plan, tmp_path):
    front.to_html(tmp_path / "frontier.html", plan_command="remat-kit plan x")
    plan.to_html(tmp_path / "plan.html", command="remat-kit plan <x>")
    for name in ("frontier", "plan"):
        text = (tmp_path / f"{name}.html").read_text(encoding="utf-8")
        assert not re.findall(r"https?://|<link|\bsrc=|@import|url\(", text)
        assert "default-src 'none'" in text
        assert "<x>" not in text
    assert "remat-kit plan x --budget " in (tmp_path / "frontier.html").read_text()


def test_notebooks_show_them_in_a_frame(front, plan):
    for found in (front, plan):
        shown = found._repr_html_()
        assert shown.startswith("<iframe srcdoc=")
        assert len(shown) < 600_000


def test_the_headline_of_a_frontier(front):
    plain, least = front.plain.predicted_peak_bytes, front.points[0]
    extra = least.extra_seconds / front.forward_seconds
    assert front.headline == (
        "Without recomputation the gradient is predicted to need "
        f"{format_bytes(plain)} of the 79.1 GiB of h100; "
        f"{format_bytes(least.predicted_peak_bytes)} is enough for +{100 * extra:.0f} % of the "
        "forward pass's time."
    )


def test_a_plan_is_shown_before_and_after_by_module(plan):
    text = plan._page("remat-kit plan y")
    before, after = plan.baseline.peak_bytes, plan.compiled.peak_bytes
    cards = re.findall(r'<h3>(.*?)</h3><div class="value">(.*?)</div>', text)
    assert ("Peak without a plan", format_bytes(before)) in cards
    assert ("Peak with the plan", format_bytes(after)) in cards
    rows = [
        re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)[1:]
    ]
    assert [row[0] for row in rows] == [m.module or "(no module)" for m in plan.modules]
    for row, m in zip(rows, plan.modules, strict=True):
        assert (row[1], row[3]) == (format_bytes(m.before_bytes), format_bytes(m.saved_bytes))
    saved = sum(m.before_bytes for m in plan.modules)
    assert saved > sum(m.saved_bytes for m in plan.modules)
    assert saved >= 7 * 4096 * 64 * 4  # each layer but the last saves its output


@needs_browser
def test_pointing_at_a_schedule_shows_its_plan(browse, front):
    found = browse(
        _chart.frontier_page(front.to_json(), plan_command="remat-kit plan x"),
        """const marks = all("[data-point]"), told = () => one("#chosen").innerText;
           const before = told();
           marks[1].dispatchEvent(new PointerEvent("pointerenter"));
           const first = told(), here = all(".here").length;
           marks[marks.length - 1].dispatchEvent(new FocusEvent("focus"));
           return {before, first, here, last: told(), marks: marks.length,
             reached: [...marks].every(mark => mark.tabIndex === 0),
             wide: document.documentElement.scrollWidth <= innerWidth};""",
    )
    assert "Point at a schedule" in found["before"]
    peak = format_bytes(front.points[1].predicted_peak_bytes)
    assert found["first"].startswith(f"{peak} at the peak")
    assert "remat-kit plan x --budget " in found["first"]
    assert found["here"] == 1
    assert found["last"].startswith(f"the preset {front.presets[-1][0]}, predicted")
    assert found["marks"] == len(front.points) + len(front.presets)
    assert found["reached"]  # by the Tab key
    assert found["wide"]


@needs_browser
def test_the_page_of_a_plan_has_no_fault(browse, plan):
    found = browse(
        plan._page(),
        """return {text: one("main").innerText,
             meters: all(".meter i").map(m => m.offsetWidth)};""",
    )
    assert "BY MODULE" in found["text"].upper()
    assert max(found["meters"]) > 20
