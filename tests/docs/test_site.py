"""The site: it builds without a warning, is complete, its links lead somewhere, and it shows."""

import argparse
import ast
import html
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse

import pytest

import remat_kit
from remat_kit._cli.arguments import argument_parser

pytest.importorskip("furo")
pytest.importorskip("myst_nb")

ROOT = pathlib.Path(__file__).parents[2]
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site. A request to the network would fail, and -W would report it."""
    folder = tmp_path_factory.mktemp("site")
    nowhere = "http://127.0.0.1:9"
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "http_proxy": nowhere,
        "https_proxy": nowhere,
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"),
            *("-d", str(folder / "doctrees"), str(ROOT / "docs"), str(folder / "html")),
        ],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def read(site, page):
    return (site / f"{page}.html").read_text(encoding="utf-8")


def exported(stub):
    tree = ast.parse((ROOT / "remat_kit" / stub).read_text(encoding="utf-8"))
    return {a.asname for node in tree.body for a in getattr(node, "names", ())} - {"testing"}


def test_every_public_name_is_there(site):
    api, testing = read(site, "reference/api"), read(site, "reference/testing")
    names = exported("__init__.pyi")
    assert len(names) > 60
    assert not [name for name in names if f'id="remat_kit.{name}"' not in api]
    inner = exported("testing/__init__.pyi")
    assert not [name for name in inner if f'id="remat_kit.testing.{name}"' not in testing]
    # With their docstrings: an example, the arguments, the errors.
    assert "jax.grad(lambda w: layer" in html.unescape(re.sub(r"<[^>]*>", "", api))
    assert api.count("Parameters") > 30
    assert api.count("Raises") > 30


def test_every_preset_target_and_lint_is_there(site):
    recipes = html.unescape(re.sub(r"<[^>]*>", "", read(site, "reference/recipes")))
    for recipe in remat_kit.recipes():
        assert recipe.usage in recipes, recipe.name
        assert recipe.description.split(";")[0][:40] in recipes, recipe.name
    targets = read(site, "reference/targets")
    for target in remat_kit.targets():
        assert f">{target.name}<" in targets, target.name
    sources = (ROOT / "remat_kit" / "_inspect" / "lints").glob("*.py")
    codes = set()
    for path in sources:
        for call in filter(
            lambda node: isinstance(node, ast.Call), ast.walk(ast.parse(path.read_text()))
        ):
            codes |= {
                a.value
                for a in call.args
                if isinstance(a, ast.Constant)
                and isinstance(a.value, str)
                and re.fullmatch(r"[a-z]+(-[a-z]+)+", a.value)
            }
    assert len(codes) >= 12
    shown = set(re.findall(r'<section id="([a-z-]+)"', read(site, "reference/lints")))
    assert shown - {"lints"} == codes


def test_every_command_and_option_is_there(site):
    text = html.unescape(re.sub(r"<[^>]*>", "", read(site, "reference/commands")))
    (commands,) = (
        action
        for action in argument_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    parts = re.split(r"\bremat-kit ([a-z-]+)(?=¶)", text)
    shown = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert set(shown) == set(commands.choices)
    for name, parser in commands.choices.items():
        for action in parser._actions:
            for option in action.option_strings:
                assert option in shown[name] or option in ("-h", "--help"), (name, option)


def test_every_field_of_the_json_is_there(site):
    text = html.unescape(re.sub(r"<[^>]*>", "", read(site, "reference/json")))
    document = json.loads((ROOT / "remat_kit" / "_cli" / "schemas.json").read_text())
    count = 0
    for name, definition in document["$defs"].items():
        assert definition["description"].replace("`", "") in text, name
        parts = [definition]
        while parts:
            part = parts.pop()
            if isinstance(part, list):
                parts += part
            elif isinstance(part, dict):
                parts += part.values()
                for field in part.get("properties", {}):
                    assert re.search(rf"(?<![\w]){re.escape(field)}(?!\w)", text), (name, field)
                    count += 1
    assert count > 150


def links(site):
    for path in sorted(site.rglob("*.html")):
        text = path.read_text(encoding="utf-8")
        for address in re.findall(r'\b(?:href|src)="([^"]*)"', text):
            yield path, html.unescape(address)


def test_links_within_the_site_lead_somewhere(site):
    anchors = {}
    count = 0
    for path, address in links(site):
        parts = urllib.parse.urlsplit(address)
        if parts.scheme or parts.netloc or not address:
            continue
        count += 1
        there = path
        if parts.path:
            there = (path.parent / urllib.parse.unquote(parts.path)).resolve()
        assert there.exists(), (path.name, address)
        if parts.fragment and there.suffix == ".html":
            if there not in anchors:
                text = there.read_text(encoding="utf-8")
                anchors[there] = set(re.findall(r'\bid="([^"]*)"', text)) | {""}
            assert urllib.parse.unquote(parts.fragment) in anchors[there], (path.name, address)
    assert count > 500


def test_nothing_is_loaded_from_elsewhere(site):
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", text):
            outer = re.search(r'\b(?:src|href)="(?:https?:)?//', tag)
            assert not outer or 'rel="' in tag, (path.name, tag)
            assert not (outer and "stylesheet" in tag), (path.name, tag)


# -- in a browser -----------------------------------------------------------------------------

WATCH = """<script>
const faults = [];
const fault = (e) => faults.push(e.message || `${e.target.src || e.target.href}`);
addEventListener("error", fault, true);
addEventListener("load", () => {
  document.body.dataset.theme = "%s";
  const out = document.createElement("pre");
  out.id = "found";
  const page = document.documentElement;
  out.textContent = JSON.stringify({faults, wider: page.scrollWidth - page.clientWidth,
                                    text: document.querySelector("article").innerText.length});
  out.style.display = "none";
  document.body.append(out);
});
</script>"""


@needs_browser
@pytest.mark.parametrize(
    ("page", "theme", "width"),
    [
        ("index", "light", 1400),
        ("howto/report", "dark", 500),
        pytest.param("reference/api", "light", 500, marks=pytest.mark.slow),
        pytest.param("benchmarks", "dark", 1400, marks=pytest.mark.slow),
        pytest.param("notebooks/1_what_is_saved", "light", 500, marks=pytest.mark.slow),
        pytest.param("notebooks/3_plan_a_budget", "dark", 1400, marks=pytest.mark.slow),
    ],
)
def test_a_page_can_be_seen(site, page, theme, width, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = site / f"{page}.html"
    watched = path.with_name(f"_{theme}_{path.name}")
    text = path.read_text(encoding="utf-8").replace("<head>", "<head>" + WATCH % theme, 1)
    watched.write_text(text, encoding="utf-8")
    shot = tmp_path / "page.png"
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", "--virtual-time-budget=4000", f"--window-size={width},1200"),
        *(f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}", "--dump-dom"),
        f"file://{watched}",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    finally:
        watched.unlink()
    (found,) = re.findall(r'<pre id="found"[^>]*>(.*?)</pre>', done.stdout, re.S)
    found = json.loads(html.unescape(found))
    assert found["faults"] == []
    assert found["wider"] <= 0, "the page is wider than its window"
    assert found["text"] > 500
    if not shot.exists():  # one of the two options wins, whichever release it is
        subprocess.run([c for c in command if c != "--dump-dom"], capture_output=True, check=True)
    pixels = image.imread(shot)[..., :3]
    assert pixels.shape[1] == width
    for part in (pixels[:600], pixels[600:]):
        assert len({tuple(p) for p in part[::5, ::5].reshape(-1, 3).tolist()}) > 10
    assert (pixels.mean() > 0.6) == (theme == "light")
