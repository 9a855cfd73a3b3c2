"""Settings of the site: `sphinx-build -W docs docs/_build/html`, without a network.

Notebooks are shown as they were stored: `python docs/run_notebooks.py` runs them. The reference
pages hold markers such as ``<!-- generated: lints -->``, which are replaced by what
`reference_text.py` says of the installed package.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

import reference_text  # noqa: E402

project = "remat_kit"
author = "The remat_kit authors"
copyright = "the remat_kit authors"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "remat_kit"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
templates_path: list[str] = []

nb_execution_mode = "off"
nb_mime_priority_overrides = [("html", "text/html", 0), ("html", "image/png", 10)]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]

# Only commands are copied from a console block, without the prompt and the output.
copybutton_prompt_text = "$ "

smartquotes = False  # options begin with two hyphens

# A name in single backticks is code, and a link where the name is documented.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say what an argument is, in its shapes and units
napoleon_use_ivar = True
napoleon_use_rtype = False
python_maximum_signature_line_length = 88

_MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.M)


def _fill(app: Any, docname: str, source: list[str]) -> None:
    """Replace the markers of a page by generated text."""
    source[0] = _MARKER.sub(lambda found: reference_text.TEXTS[found.group(1)](), source[0])


def _copy_notebooks(app: Any) -> None:
    """Copy the notebooks into the folder of the pages, where Sphinx looks for them."""
    folder = DOCS / "notebooks"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for path in (ROOT / "notebooks").glob("*.*"):
        shutil.copyfile(path, folder / path.name)


def setup(app: Any) -> dict[str, bool]:
    """Connect the two functions above."""
    app.connect("builder-inited", _copy_notebooks)
    app.connect("source-read", _fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
