"""Draw the map of the package in CONTRIBUTING.md from the imports in the code.

    python docs/module_map.py          # prints the map
    python docs/module_map.py --write  # puts it into CONTRIBUTING.md

An arrow means that a subpackage imports from another one. An arrow is left out where a chain of
other arrows says the same, so the map shows the order in which the subpackages build on each other.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "remat_kit"
BEGIN, END = "<!-- map:begin -->\n", "<!-- map:end -->\n"


def imports() -> dict[str, set[str]]:
    """Map each subpackage, or module at the top, to those that it imports from."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        layer = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if layer.startswith("__"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("remat_kit"):
                inner = node.module.split(".")[1:]  # pyright: ignore[reportOptionalMemberAccess]
                named = [inner[0]] if inner else [alias.name for alias in node.names]
                found.setdefault(layer, set()).update(named)
    return {layer: uses - {layer} for layer, uses in found.items()}


def reduced(uses: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Leave out what a chain of other imports says too.

    >>> sorted(reduced({"a": {"b", "c"}, "b": {"c"}})["a"])
    ['b']
    """

    def reached(layer: str) -> set[str]:
        below = uses.get(layer, set())
        return below.union(*map(reached, below))

    return {
        layer: {one for one in below if not any(one in reached(two) for two in below - {one})}
        for layer, below in uses.items()
    }


def rendered() -> str:
    """Return the map as a Mermaid graph, in a fenced block."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    edges = {
        a: {b for b in below if b in folders} for a, below in imports().items() if a in folders
    }
    lines = [
        f"    {a} --> {b}" for a, below in sorted(reduced(edges).items()) for b in sorted(below)
    ]
    return "\n".join(["```mermaid", "graph TD", *lines, "```"]) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="put the map into CONTRIBUTING.md")
    if not parser.parse_args(argv).write:
        print(rendered(), end="")
        return 0
    page = ROOT / "CONTRIBUTING.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + rendered() + END + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
