"""The page: what its data says, and what a browser makes of it."""

import functools
import html
import json
import re

import jax
import jax.numpy as jnp
import pytest
from browser import chromium, needs_browser

from remat_kit import Comparison, diff, inspect, policy
from remat_kit._show import page as _page
from remat_kit._units import format_bytes

NAMES = ("none", "dots", "nothing")


def layer(x, w):
    return jnp.sin(jnp.tanh(x @ w)), None


def loss(weights, x):
    # XLA:CPU of jax 0.10 merges what a region recomputes, but not a loop.
    for i, w in enumerate(weights):
        with jax.named_scope(f"block_{i}"):
            x, _ = jax.lax.scan(layer, x, w)
    return jnp.mean(x**2)


WEIGHTS = [jax.ShapeDtypeStruct((2, 64, 64), jnp.float32)] * 3
X = jax.ShapeDtypeStruct((128, 64), jnp.float32)


def applied(name):
    return loss if name == "none" else policy(name, at="block_*")(loss)


@functools.cache
def comparison():
    reports = [inspect(applied(n), WEIGHTS, X, target="cpu", label=n) for n in NAMES]
    return Comparison(tuple(reports), model="three blocks")


@pytest.fixture(scope="module")
def real():
    """The JSON of a comparison that was compiled."""
    return comparison().to_json()


def synthetic(buffers=3, saved=3, points=5, name="p"):
    """A report with every key, of any size."""
    made = [
        {"bytes": 4 * (buffers - i), "shape": f"f32[{i}]", "kind": "temporary", "phase": "forward"}
        | {"module": f"Net/block_{i % 97}/up", "source": f"/a/net.py:{i}", "op": "dot"}
        for i in range(buffers)
    ]
    values = [
        {"shape": [i, 2], "dtype": "float32", "bytes": 8 * i, "module": f"Net/block_{i % 97}"}
        | {"source": "net.py:1", "reason": "save(dots)", "primitive": "dot_general", "names": []}
        | {"memory": "device", "times": 1, "is_input": False}
        for i in range(saved)
    ]
    twice = {"primitive": "tanh", "module": "Net", "source": "net.py:3", "shape": [2], "bytes": 8}
    total = sum(b["bytes"] for b in made)
    half = points // 2
    phases = ["forward"] * half + ["backward"] * (points - half)
    return {
        "policy": name,
        "saved_bytes": sum(v["bytes"] for v in values),
        "offloaded_bytes": 0,
        "saved": values,
        "inputs": values[:2],
        "recomputed": [twice | {"dtype": "f32", "count": 1, "flops": 4.0, "region": "Net"}],
        "recomputed_flops": 4.0,
        "forward_flops": 100.0,
        "memory": {
            "chip": {"target": "chip", "fits": True, "peak_bytes": total, "temp_bytes": total}
            | {"argument_bytes": 0, "output_bytes": 0, "alias_bytes": 0, "host_bytes": 0}
            | {"memory_bytes": 2 * total, "headroom_bytes": total, "needs_bytes": None}
        },
        "hlo_recomputed_ops": {"chip": 1},
        "hlo_xla_remat": {"chip": 0},
        "peak": {
            "chip": {"bytes": total, "compiler_bytes": total, "packing_bytes": 0, "step": half}
            | {"steps": points, "phase": "backward", "module": "Net", "attributed_fraction": 1.0}
            | {"by_phase": {"forward": total}, "buffers": made, "buffers_left_out": 0}
        },
        "timeline": {
            "chip": {
                "steps": list(range(points)),
                "bytes": [i % (total + 1) for i in range(points)],
            }
            | {"phases": phases, "resident_bytes": 0, "phase_peaks": {}}
            | {"by_phase": {"forward": [i % (total + 1) for i in range(points)]}, "by_module": {}}
        },
        "regions": {
            "chip": [
                {"module": "Net", "verdict": "undone by CSE", "saved_bytes": None}
                | {"recomputed_flops": 4.0, "message": "merged"}
            ]
        },
        "counterfactuals": {
            "chip": [
                {"module": "Net/*", "bytes_at_peak": 8, "saved_bytes": 4, "extra_seconds": 1e-6}
                | {"extra_flops_fraction": 0.5, "next_peak_bytes": 2, "next_phase": "backward"}
                | {"next_module": "Net/head", "policy": "nothing", "at": "Net/*"}
            ]
        },
        "hlo_recomputed": {
            "chip": [
                {"primitive": "tanh", "module": "Net", "source": "net.py:3", "count": 2}
                | {"heavy": False, "state": "fused", "flops": 4.0, "bytes": 8.0, "seconds": 1e-6}
            ]
        },
        "step_seconds": {"chip": {"roofline": 1e-3, "compiler": None, "measured": None}},
        "notes": ["a note"],
        "lints": [
            {"code": "saved-upcast", "message": "why", "fix": "save(dots)", "module": "Net"}
            | {"source": "net.py:2", "bytes": 4}
        ],
        "diff": [{"sign": "+", "text": "+ %1 = dot"}],
    }


# -- the text of the page ---------------------------------------------------------------------


def data_of(text):
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(found)


def test_page_needs_nothing_from_elsewhere(real):
    text = _page.page(real)
    assert set(re.findall(r"https?://[^\"'\s)]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"<link|\bsrc=|@import|url\(", text)
    assert "default-src 'none'" in text


def test_data_cannot_leave_its_script():
    name = "</script><script>alert(1)</script><!-- {{data}} {{script}}"
    text = _page.page({"model": name, "policies": [synthetic(name=name)]})
    plain = _page.page({"model": "m", "policies": [synthetic(name="n")]})
    for mark in ("<script", "</script", "<!--"):
        assert text.count(mark) == plain.count(mark)
    assert data_of(text)["model"] == name
    assert data_of(text)["policies"][0]["name"] == name


def test_every_text_is_stored_once(real):
    found = data_of(_page.page(real))
    assert len(found["strings"]) == len(set(found["strings"]))
    table = found["policies"][0]["saved"]
    saved = sorted(real["policies"][0]["saved"], key=lambda r: -r["bytes"])
    assert table["columns"]["bytes"] == [r["bytes"] for r in saved]
    modules = [found["strings"][i] for i in table["columns"]["module"]]
    assert modules == [r["module"] for r in saved]


def test_curve_is_as_high_as_the_timeline(real):
    for given, report in zip(real["policies"], data_of(_page.page(real))["policies"], strict=True):
        curve, line = report["timeline"]["cpu"], given["timeline"]["cpu"]
        highest = max(line["bytes"])
        assert max(curve["bytes"]) * curve["unit"] == pytest.approx(highest, rel=1e-4)
        steps = dict(zip(line["steps"], line["bytes"], strict=True))
        for step, size in zip(curve["steps"], curve["bytes"], strict=True):
            assert size * curve["unit"] == pytest.approx(steps[step], abs=curve["unit"])


@pytest.mark.parametrize(
    ("buffers", "saved", "reports"), [(10_000, 10_000, 3), (60_000, 100_000, 2), (2_000, 2_000, 40)]
)
def test_page_stays_small_and_says_what_it_leaves_out(buffers, saved, reports):
    given = synthetic(buffers, saved, points=600)
    text = _page.page({"policies": [given | {"policy": str(i)} for i in range(reports)]})
    assert len(text.encode()) < 1e6
    report = data_of(text)["policies"][0]
    table = report["saved"]
    assert table["rows"] + table["left"] == saved
    shown = table["columns"]["bytes"]
    assert shown == sorted(shown, reverse=True)
    assert sum(shown) + table["left_amount"] == given["saved_bytes"]
    held = report["peak"]["chip"]["buffers"]
    assert held["rows"] + held["left"] == buffers
    assert sum(held["columns"]["bytes"]) + held["left_amount"] == given["peak"]["chip"]["bytes"]


def test_notebook_shows_the_page_and_the_tables(real):
    shown = comparison()._repr_html_()
    (inside,) = re.findall(r'<iframe srcdoc="([^"]*)"', shown)
    assert data_of(html.unescape(inside))["targets"] == ["cpu"]
    assert "<summary>as tables</summary>" in shown
    assert 'sandbox="allow-scripts"' in shown


def test_notebook_shows_tables_of_what_was_not_compiled():
    assert "<iframe" not in inspect(loss, WEIGHTS, X)._repr_html_()


def test_notebook_is_spared_a_heavy_page():
    given = {"policies": [synthetic(buffers=50_000, saved=50_000)]}
    assert len(_page.inline(given)) < 4e5 < len(_page.page(given)) < 1e6


def test_report_writes_its_page(tmp_path):
    comparison().reports[1].to_html(tmp_path / "report.html")
    found = data_of((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [p["name"] for p in found["policies"]] == ["dots"]
    assert found["versions"]["jax"] == jax.__version__


# -- the page in a browser --------------------------------------------------------------------


@needs_browser
def test_page_shows_the_figures_of_the_report(browse, real):
    found = browse(
        _page.page(real),
        """return {
          title: one("h1").textContent,
          sections: all("main > *").map(s => s.id),
          cards: all(".card").map(c => c.innerText),
          chosen: all("[aria-pressed=true]").map(b => b.textContent),
          rows: all("#policies tbody tr").map(r => r.innerText),
          buffers: all("#peak tbody tr").map(r => r.cells[0].textContent),
        };""",
        hash="#policy=nothing&target=cpu",
    )
    report = real["policies"][2]
    assert report["policy"] == "nothing"
    memory, peak = report["memory"]["cpu"], report["peak"]["cpu"]
    assert found["title"] == "three blocks"
    assert {"summary", "policies", "timeline", "peak", "kept", "recomputed", "regions"} <= set(
        found["sections"]
    )
    assert found["chosen"] == ["nothing", "cpu", "by phase"]
    cards = "\n".join(found["cards"])
    for size in (memory["peak_bytes"], memory["temp_bytes"], report["saved_bytes"]):
        assert format_bytes(size) in cards
    assert f"the {peak['phase']}" in cards
    assert "fits" in cards
    assert [row.split()[0] for row in found["rows"]] == list(NAMES)
    assert found["buffers"] == [format_bytes(b["bytes"]) for b in peak["buffers"]]


@needs_browser
def test_choosing_a_policy_changes_everything_below(browse, real):
    found = browse(
        _page.page(real),
        """const look = () => [one(".card .value").textContent, one("#kept .about").textContent,
             one("#timeline svg path").getAttribute("d"), one("#peak .about").textContent];
           const choose = name => all("#choosers button").find(b => b.textContent === name).click();
           choose("none"); const before = look();
           choose("nothing"); const after = look();
           one("#policies [data-policy=none]").click();
           return {before, after, back: look(), hash: location.hash};""",
    )
    assert all(a != b for a, b in zip(found["before"], found["after"], strict=True))
    assert found["back"] == found["before"]
    assert "policy=none" in found["hash"]


@needs_browser
def test_timeline_is_read_with_the_keyboard_and_the_pointer(browse, real):
    found = browse(
        _page.page(real),
        """const image = () => one("#timeline svg"), tip = () => one(".tip").innerText;
           const press = key => image().dispatchEvent(new KeyboardEvent("keydown", {key}));
           press("Enter"); const top = tip();
           press("End"); const last = tip();
           press("Escape"); const hidden = one(".tip").hidden;
           const box = image().getBoundingClientRect();
           image().dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + 70}));
           const first = tip();
           one("[data-by=module]").click();
           const modules = one("#timeline .legend").innerText;
           const high = one("#timeline .peak-text").textContent;
           one("#resident").click();
           const less = one("#timeline .peak-text").textContent;
           const line = all("#timeline path.against").length;
           one("#against").value = ""; one("#against").dispatchEvent(new Event("change"));
           const gone = all("#timeline path.against").length, marked = all(".peak-line").length;
           return {top, last, hidden, first, modules, high, less, line, gone, marked};""",
        hash="#policy=nothing",
    )
    report = real["policies"][2]
    peak, line = report["peak"]["cpu"], report["timeline"]["cpu"]
    assert f"step {peak['step']}, {peak['phase']}" in found["top"]
    assert format_bytes(peak["compiler_bytes"]) in found["top"]
    assert f"step {line['steps'][-1]}," in found["last"]
    assert found["hidden"]
    assert "step 0," in found["first"]
    assert "block_*" in found["modules"]
    assert found["high"] == f"peak {format_bytes(peak['compiler_bytes'])}"
    assert found["less"] == f"peak {format_bytes(peak['bytes'] - line['resident_bytes'])}"
    assert (found["line"], found["gone"], found["marked"]) == (1, 0, 1)


@needs_browser
def test_treemap_zooms_in_and_out(browse, real):
    found = browse(
        _page.page(real),
        """const crumbs = () => one(".crumbs").innerText;
           const parts = () => all(".map button").map(b => b.getAttribute("aria-label"));
           const start = [crumbs(), parts()];
           one(".map .frame, .map .deep").click();
           const inside = [crumbs(), parts()];
           const escape = new KeyboardEvent("keydown", {key: "Escape", bubbles: true});
           one(".map button").dispatchEvent(escape);
           const out = crumbs();
           one(".map .frame, .map .deep").click();
           one(".crumbs button").click();
           return {start, inside, out, again: [crumbs(), parts()]};""",
        hash="#policy=none",
    )
    total = format_bytes(real["policies"][0]["memory"]["cpu"]["peak_bytes"])
    (start, parts), (inside, some) = found["start"], found["inside"]
    assert f"all, {total}" in start
    assert "block_" in " ".join(parts)
    assert inside != start
    assert some
    assert some != parts
    assert found["out"] == start
    assert found["again"] == found["start"]


@needs_browser
def test_tree_of_kept_values_opens_and_filters(browse, real):
    saved = real["policies"][0]["saved"]
    primitive = next(r["primitive"] for r in saved if r["module"] == "block_2")
    found = browse(
        _page.page(real),
        """const shown = () => all("#kept .leaf").filter(l => l.checkVisibility()).length;
           const open = text => all("#kept button").find(b => b.textContent === text).click();
           open("close"); await pause(50); const closed = shown();
           open("open"); await pause(50); const opened = shown();
           const names = all("#kept summary").map(s => s.innerText.split("\\n")[0]);
           one("#roll").click(); await pause(50);
           const apart = all("#kept summary").map(s => s.innerText.split("\\n")[0]);
           type("#kept input[type=search]", "block_2 PRIMITIVE"); await pause(300);
           const tally = one("#kept .tally").textContent, found = shown();
           type("#kept input[type=search]", "nowhere"); await pause(300);
           const none = one("#kept .tree").innerText;
           return {closed, opened, names, apart, tally, found, none};""".replace(
            "PRIMITIVE", primitive
        ),
        hash="#policy=none",
    )
    assert found["closed"] < found["opened"]
    assert "block_*" in "".join(found["names"])
    assert {"block_0", "block_1", "block_2"} <= {n.split("/")[0].strip() for n in found["apart"]}
    text = [" ".join([r["module"], r["primitive"], r["source"]]) for r in saved]
    matching = [t for t in text if "block_2" in t and primitive in t]
    assert matching
    assert found["tally"].startswith(f"{len(matching)} of {len(saved)} values")
    assert found["found"] >= 1
    assert found["none"] == "nothing matches"


@needs_browser
def test_ten_thousand_rows_come_in_parts(browse):
    given = synthetic(buffers=10_000, saved=10_000, points=600)
    found = browse(
        _page.page({"policies": [given]}, most_bytes=2**22),
        """const rows = () => all("#peak tbody tr").length;
           const sizes = () => all("#peak tbody tr").slice(0, 3).map(r => r.cells[0].textContent);
           const first = rows(), cells = all(".map button").length, large = sizes();
           one("#peak .more button").click(); const more = rows();
           one("#peak thead button").click(); const small = sizes();
           const sort = one("#peak thead th").getAttribute("aria-sort");
           type("#peak input[type=search]", "net.py:9999 block_8"); await pause(400);
           const tally = one("#peak .tally").textContent;
           return {first, cells, more, large, small, sort, tally, nodes: all("*").length};""",
    )
    assert (found["first"], found["more"]) == (100, 600)
    assert found["cells"] < 2000
    assert found["nodes"] < 20_000
    assert found["large"] == [format_bytes(4 * (10_000 - i)) for i in range(3)]
    assert found["small"] == ["4 B", "8 B", "12 B"]
    assert found["sort"] == "ascending"
    matching = [i for i in range(10_000) if f"net.py:{i}".startswith("net.py:9999")]
    matching = [i for i in matching if f"block_{i % 97}".startswith("block_8")]
    assert found["tally"] == f"{len(matching)} of 10,000 rows"


@needs_browser
def test_lints_offer_their_fix_and_diffs_their_lines(browse):
    lines = diff(loss, applied("nothing"), WEIGHTS, X)
    report = synthetic(name="after")
    report.pop("diff")
    found = browse(
        _page.page({"policies": [report]}, diffs=[lines.to_json()]),
        """document.execCommand = () => true;
           const clipboard = {writeText: async text => { window.took = text; }};
           Object.defineProperty(navigator, "clipboard", {value: clipboard});
           one("#lints .copy").click(); await pause(50);
           return {took: window.took, label: one("#lints .copy").textContent,
             lint: one("#lints .lint").innerText, title: one("#diff h3").innerText,
             again: all("#diff .again").length, lines: all("#diff .diff div").length};""",
    )
    assert found["took"] == "save(dots)"
    assert found["label"] == "copied"
    assert "saved-upcast" in found["lint"]
    assert "before → after" in found["title"]
    assert found["again"] >= len(lines.duplicates) > 0
    assert found["lines"] == len(lines.text().split("\n"))


@needs_browser
def test_what_would_help_is_a_policy_to_copy(browse):
    found = browse(
        _page.page({"policies": [synthetic()]}),
        """document.execCommand = () => true;
           const clipboard = {writeText: async text => { window.took = text; }};
           Object.defineProperty(navigator, "clipboard", {value: clipboard});
           one("#help .copy").click(); await pause(50);
           return {took: window.took, row: one("#help tbody tr").innerText.split("\t"),
             compiled: all("#recomputed tbody")[1].innerText.split("\t")};""",
    )
    assert found["took"] == 'remat_kit.policy("nothing", at="Net/*")'
    assert found["row"][:6] == ["Net/*", "4 B", "+50 %", "+1 µs", "8 B", "2 B"]
    assert found["row"][6] == "backward of Net/head"
    assert found["compiled"][:6] == ["4 FLOP", "1 µs", "8 B", "2", "fused", "tanh"]


@needs_browser
def test_the_headline_and_what_would_help_come_first(browse, real):
    made = {"headline": "The step needs `much`.", "command": "remat-kit inspect x", "date": "today"}
    report = synthetic() | {"parameters": 1_234_567, "parameter_bytes": 2**22}
    found = browse(
        _page.page({"model": "m", "policies": [report], **made}),
        """return {said: one("#headline").innerHTML, text: one("header").innerText,
             command: one("#command").textContent,
             high: one("#headline").getBoundingClientRect().bottom
               <= one("main").getBoundingClientRect().top,
             order: all("main > *").map(s => s.id)};""",
    )
    assert found["said"] == "The step needs <code>much</code>."
    assert "1.23 million parameters, 4 MiB · today" in found["text"]
    assert found["command"] == "remat-kit inspect x"
    assert found["high"]
    assert found["order"][:2] == ["summary", "help"]
    assert data_of(_page.page(comparison()._plain()))["headline"] == comparison().headline


@needs_browser
def test_one_figure_is_the_peak_everywhere(browse, real):
    found = browse(
        _page.page(real),
        """return [one(".card .value").textContent, one("#timeline .about").textContent,
             one("#timeline .peak-text").textContent, one("#peak .about").textContent,
             one(".crumbs").textContent, one("#policies tr[aria-current=true]").innerText];""",
        hash="#policy=none",
    )
    peak = format_bytes(real["policies"][0]["memory"]["cpu"]["peak_bytes"])
    assert all(peak in text for text in found)
    report = synthetic()
    total = report["memory"]["chip"]["peak_bytes"]
    for packing in (4, -4):
        report["memory"]["chip"]["peak_bytes"] = total + packing
        report["peak"]["chip"] |= {"compiler_bytes": total + packing, "packing_bytes": packing}
        found = browse(
            _page.page({"policies": [report]}),
            """return [one(".card .value").textContent, one("#timeline .about").textContent,
                 one("#timeline .peak-text").textContent, one("#peak .about").textContent,
                 one(".crumbs").textContent];""",
        )
        assert all(format_bytes(total + packing) in text for text in found)


@needs_browser
def test_the_timeline_zooms(browse, real):
    found = browse(
        _page.page(real),
        r"""const image = () => one("#timeline svg"), axis = () => all("#timeline svg text")
             .map(t => t.textContent).filter(t => /^(step )?[\d,]+$/.test(t));
           const drag = (a, b) => { const box = image().getBoundingClientRect();
             const at = part => ({clientX: box.left + 66 + part * (box.width - 80),
               pointerType: "mouse"});
             image().dispatchEvent(new PointerEvent("pointerdown", at(a)));
             image().dispatchEvent(new PointerEvent("pointermove", at(b)));
             image().dispatchEvent(new PointerEvent("pointerup", at(b))); };
           const whole = axis(); drag(0.25, 0.5); const part = axis();
           const shown = !one("#zoom-out").hidden;
           one("#zoom-out").click(); const back = axis(), hidden = one("#zoom-out").hidden;
           image().dispatchEvent(new KeyboardEvent("keydown", {key: "+"})); const near = axis();
           image().dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
           return {whole, part, shown, back, hidden, near, end: axis()};""",
        hash="#policy=none",
    )
    steps = real["policies"][0]["peak"]["cpu"]["steps"]

    def ends(texts):
        return [int(t.removeprefix("step ").replace(",", "")) for t in (texts[0], texts[-1])]

    assert ends(found["whole"]) == [0, steps - 1]
    start, end = ends(found["part"])
    assert abs(start - steps / 4) < 2
    assert abs(end - steps / 2) < 3
    assert found["shown"]
    assert found["hidden"]
    assert found["back"] == found["whole"] == found["end"] != found["near"]


@needs_browser
def test_nothing_is_cut_on_a_phone(browse, real, monkeypatch):
    found = browse(
        _page.page(real | {"headline": "The step needs much " * 9, "command": "remat-kit " * 20}),
        """const frame = document.createElement("iframe");
           frame.style = "width:390px;height:800px;border:0";
           frame.srcdoc = PAGE;
           const loaded = new Promise(done => frame.onload = done);
           document.body.append(frame); await loaded; await pause(100);
           const inside = frame.contentDocument;
           const scrolls = e => e.closest(".scroll, .tree, .diff, svg, .map, .hidden, pre");
           const wide = [...inside.body.querySelectorAll("*")].filter(e => !scrolls(e)
             && e.getBoundingClientRect().right > 391).map(e => e.tagName + "." + e.className);
           return {wide, width: inside.documentElement.scrollWidth,
             drawn: inside.querySelectorAll("main > *").length};""".replace(
            "PAGE",
            json.dumps(_page.page(real | {"headline": "The step needs much " * 9}))
            .replace("</", "<\\/")
            .replace("<!--", "<\\!--"),
        ),
        hash="#policy=none",
    )
    assert found["drawn"] > 5
    assert found["wide"] == []
    assert found["width"] <= 390


@needs_browser
def test_a_kept_value_shows_the_lines_that_called_it(browse):
    report = synthetic(saved=2)
    frames = ["net.py:1 in up", "net.py:7 in __call__", "train.py:3 in loss"]
    report["saved"] = [r | {"frames": frames} for r in report["saved"]]
    found = browse(
        _page.page({"policies": [report]}),
        """one("#kept details").open = true; await pause(50);
           return [one("#kept .leaf").innerText, one("#kept .leaf span").title];""",
    )
    assert "net.py:1 ← net.py:7 ← train.py:3" in found[0]
    assert found[1].split("\n") == frames


def test_suggestions_that_are_not_worth_their_price_are_not_shown():
    report = synthetic()
    (good,) = report["counterfactuals"]["chip"]
    bad = good | {"module": "bad", "worthwhile": False}
    report["counterfactuals"]["chip"] = [good, bad]
    found = data_of(_page.page({"policies": [report]}))
    assert found["policies"][0]["what_if"]["chip"]["rows"] == 1
    report["counterfactuals"]["chip"] = [bad]
    assert data_of(_page.page({"policies": [report]}))["policies"][0]["what_if"] == {}


@needs_browser
def test_page_does_without_any_key(browse):
    whole = synthetic()
    reports = [{k: v for k, v in whole.items() if k != gone} | {"policy": gone} for gone in whole]
    empty = {"policy": "empty"}
    nulls = dict.fromkeys(whole) | {"policy": "nulls"}
    unfit = synthetic(name="unfit")
    unfit["memory"]["chip"] |= {"fits": False, "peak_bytes": None, "temp_bytes": None}
    unfit["memory"]["chip"] |= {"headroom_bytes": None, "needs_bytes": 2**40}
    found = browse(
        _page.page({"policies": [*reports, empty, nulls, unfit]}),
        """const select = () => one("#choose-policy"), sections = {};
           for (let i = 0; i < select().options.length; i++) {
             select().selectedIndex = i; select().dispatchEvent(new Event("change"));
             sections[select().value] = [all("main > *").map(s => s.id), one(".card")?.innerText];
           }
           return sections;""",
    )
    assert len(found) == len(reports) + 3
    everything = {"summary", "policies", "lints", "timeline", "peak", "kept", "recomputed"}
    everything |= {"regions", "diff", "notes", "help"}
    assert set(found["policy"][0]) == everything
    absent = {"timeline": "timeline", "peak": "peak", "saved": "kept", "counterfactuals": "help"}
    for key, section in absent.items():
        assert set(found[key][0]) == everything - {section}
    assert found["empty"][0] == ["policies"]
    assert found["nulls"][0] == ["policies"]
    assert "does not fit" in found["unfit"][1]


@needs_browser
def test_page_of_nothing_says_so(browse):
    assert "nothing in this report" in browse(_page.page({}), "return one('main').innerText")


@needs_browser
def test_names_are_text_not_markup(browse):
    name = "</script><img src=x onerror=\"faults.push('ran')\"><script>faults.push('ran')</script>"
    report = synthetic(name=name)
    report["lints"][0] |= {"message": name, "fix": name, "module": name}
    report["saved"][0]["module"] = report["peak"]["chip"]["buffers"][0]["module"] = name
    report["notes"] = [name]
    found = browse(
        _page.page({"model": name, "policies": [report]}),
        "return [one('h1').textContent, one('#notes p').textContent, all('img').length]",
    )
    assert found == [name, name, 0]


@needs_browser
def test_every_control_has_a_name_and_can_be_reached(browse, real):
    found = browse(
        _page.page(real),
        """const named = n => [n.getAttribute("aria-label"), n.textContent, n.title]
             .some(t => t && t.trim()) || (n.labels && n.labels.length);
           const html = nodes => nodes.map(n => n.outerHTML);
           const nodes = all("button, input, select, svg[role], summary");
           return {unnamed: html(nodes.filter(n => !named(n))),
             unreachable: html(nodes.filter(n => n.tabIndex < 0)), some: nodes.length > 50};""",
    )
    assert found == {"unnamed": [], "unreachable": [], "some": True}


# -- how it looks -----------------------------------------------------------------------------


@needs_browser
def test_screenshots_are_not_blank_and_follow_the_theme(tmp_path, real):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "page.html"
    path.write_text(_page.page(real), encoding="utf-8")
    seen = {}
    for theme in ("light", "dark"):
        shot = tmp_path / f"{theme}.png"
        address = f"file://{path}#policy=nothing&theme={theme}"
        chromium(tmp_path, f"--screenshot={shot}", address)
        seen[theme] = image.imread(shot)[..., :3]
    for pixels in seen.values():
        assert pixels.shape[:2] == (1600, 1400)
        assert pixels.std() > 0.05
        # every third of the page is drawn on
        for part in (pixels[:530], pixels[530:1060], pixels[1060:]):
            assert len({tuple(p) for p in part[::7, ::7].reshape(-1, 3).tolist()}) > 20
    assert seen["light"].mean() > 0.6
    assert seen["dark"].mean() < 0.4


@needs_browser
def test_theme_button_goes_round(browse, real):
    found = browse(
        _page.page(real),
        """const look = () => [document.documentElement.dataset.theme,
             getComputedStyle(document.body).backgroundColor];
           const seen = [];
           for (let i = 0; i < 4; i++) { seen.push(look()); one("#theme").click(); }
           return seen;""",
        hash="#theme=auto",
    )
    names, colors = zip(*found, strict=True)
    assert names == ("auto", "light", "dark", "auto")
    assert colors[1] != colors[2]
    assert colors[0] == colors[3] in (colors[1], colors[2])


def test_colors_of_phases_are_told_apart():
    from remat_kit._show.figures import COLORS

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a, b):
        high, low = sorted((luminance(a), luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    style = _page.asset("page.css")
    for name, shown in COLORS.items():
        (pair,) = re.findall(rf"--on-{name}: light-dark\((#\w+), (#\w+)\)", style)
        for ground, text in zip(shown, pair, strict=True):
            assert contrast(ground, text) >= 4.5, (name, ground, text)
