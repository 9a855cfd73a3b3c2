"""Fixtures for the tests of pages."""

import html
import json
import re

import pytest
from browser import ACT, WATCH, chromium


@pytest.fixture
def browse(tmp_path):
    """Open a page, run the body of a function in it, and return what it returned."""

    def browse(text, script, hash=""):
        assert text.count("<head>") == text.count("</body>") == 1
        text = text.replace("<head>", "<head>" + WATCH)
        text = text.replace("</body>", ACT.replace("%s", script) + "</body>")
        path = tmp_path / "page.html"
        path.write_text(text, encoding="utf-8")
        shown = chromium(tmp_path, "--dump-dom", f"file://{path}{hash}")
        (found,) = re.findall(r'<pre id="found">(.*?)</pre>', shown, re.S)
        found = json.loads(html.unescape(found))
        assert found["faults"] == []
        return found["found"]

    return browse
