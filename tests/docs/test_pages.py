"""The pages of the documentation: their examples run, and they name what there is."""

import importlib.util
import pathlib
import re
import warnings

import pytest

from remat_kit import _jax

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.glob("**/*.md") if "_build" not in path.parts)
# Pages that compile many programs, or for a TPU.
SLOW = {
    "getting_started.md",
    "howto/accumulation.md",
    "howto/budget.md",
    "howto/ci.md",
    "howto/does_not_fit.md",
    "howto/nnx.md",
    "howto/other_chip.md",
    "howto/pieces.md",
    "howto/presets.md",
    "howto/steps.md",
}


def script(name):
    """A script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run_pages = script("run_pages")


def name_of(page):
    return str(page.relative_to(DOCS))


def marked(page):
    slow = [pytest.mark.slow] if name_of(page) in SLOW else []
    return pytest.param(page, id=name_of(page), marks=slow)


@pytest.mark.parametrize("page", [marked(page) for page in PAGES])
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if ".to_png(" in page.read_text(encoding="utf-8"):
        pytest.importorskip("matplotlib")
    if name_of(page) == "howto/keras.md":
        pytest.importorskip("keras")
    pages = ("howto/doctor.md", "howto/keras.md", "howto/nnx.md")
    if name_of(page) in pages and _jax.JAX_VERSION < (0, 11):
        pytest.skip("XLA:CPU of JAX 0.10.2 needs as much memory with the page's plan")
    with warnings.catch_warnings():  # a page may set filters
        ran = run_pages.run(page)
    written = page.read_text(encoding="utf-8")
    # The outputs are those of another machine; all else is as it was.
    assert without_outputs(ran) == without_outputs(written)
    if re.search(r"^```text\n", written, re.M):
        assert "```text\n```" not in ran, "an example printed nothing"
        assert "```text\n```" not in written, "run `python docs/run_pages.py --write` on the page"


def without_outputs(text):
    text = re.sub(r"^```text\n.*?^```\n", "", text, flags=re.M | re.S)
    return re.sub(
        r"^(```(?:console|sh)\n)(.*?)^```",
        lambda found: "\n".join(run_pages._commands(found.group(2))),
        text,
        flags=re.M | re.S,
    )


def test_most_pages_have_an_example():
    howto = [p for p in PAGES if p.parent.name == "howto" and p.stem != "index"]
    assert len(howto) >= 11
    for page in howto:
        assert "```python\n" in page.read_text(encoding="utf-8"), page.name


def test_an_example_that_fails_is_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    assert run_pages.run(page) == "```python\nprint(1)\n```\n\n```text\n1\n```\n"
    page.write_text("<!-- not executed -->\n```python\nraise ValueError\n```\n")
    assert run_pages.run(page) == page.read_text()
    page.write_text("```python\nraise ValueError\n```\n")
    with pytest.raises(ValueError, match=r"^$"):
        run_pages.run(page)
    page.write_text("```console\n$ remat-kit policies no_such\n```\n")
    with pytest.raises(RuntimeError, match="status 2"):
        run_pages.run(page)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_examples_fit_the_column_of_the_site(page):
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    for language, block in blocks:
        for line in block.splitlines():
            # The command `policies` prints the texts of presets as they are.
            if not line.startswith(("  keeps ", "  about ", "  from ")):
                assert len(line) <= 100 or language in ("", "mermaid"), line


def test_the_tests_that_the_promises_name_are_there():
    text = (DOCS / "promises.md").read_text(encoding="utf-8")
    assert all(f"## {number}. " in text for number in range(1, 6))
    for path in re.findall(r"`(tests/[\w/]+\.py|[A-Z]+\.md)`", text):
        assert (ROOT / path).exists(), path


def test_every_script_is_described():
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    for path in (ROOT / "benchmarks").glob("[a-z]*.py"):
        assert f"`{path.name}`" in text, path.name
