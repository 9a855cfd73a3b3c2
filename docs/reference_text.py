"""The text of the reference pages, made from the package: names, presets, chips, commands.

python docs/reference_text.py commands  # prints the Markdown of one of them
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import json_fields

import remat_kit
from remat_kit._cli.arguments import argument_parser
from remat_kit._units import format_bytes

PACKAGE = Path(__file__).parents[1] / "remat_kit"

# The section of a public name is that of the subpackage in which it lives.
SECTIONS = {
    "Policies": ("_apply", "_policy", "_program"),
    "Inspecting": ("_inspect",),
    "Chips and memory": ("_chip",),
    "Planning": ("_planner",),
    "Scripts": ("_doctor",),
    "Batch sizes": ("_batch",),
    "Errors and warnings": ("_errors",),
}


def public_names(stub: Path) -> dict[str, str]:
    """Map each public name of a stub to the module from which it comes."""
    return {
        str(alias.asname): node.module or ""
        for node in ast.parse(stub.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _documented(name: str, value: object) -> str:
    """Return the directive that documents a name from its docstring."""
    if inspect.isclass(value):
        lines = [
            f".. autoclass:: {name}",
            "   :members:",
            "   :inherited-members: Exception, str, int, Enum",
        ]
    elif inspect.isfunction(value):
        lines = [f".. autofunction:: {name}"]
    else:
        lines = [f".. py:data:: {name}"]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def names() -> str:
    """Return the public names, by section, each from its docstring."""
    places = public_names(PACKAGE / "__init__.pyi")
    del places["testing"]
    parts = []
    for title, subpackages in SECTIONS.items():
        here = [n for n, place in places.items() if place.split(".")[0] in subpackages]
        parts += [f"## {title}", *_entries("remat_kit", remat_kit, here)]
    return "\n\n".join(parts)


def _entries(prefix: str, owner: object, here: Iterable[str]) -> list[str]:
    """Return functions first, then values, then classes. Equal docstrings are written once."""
    found = {name: getattr(owner, name) for name in here}
    out = [_documented(f"{prefix}.{n}", v) for n, v in found.items() if inspect.isfunction(v)]
    constants = [n for n, v in found.items() if not callable(v) and not inspect.isclass(v)]
    if constants:
        listed = ["```{eval-rst}", *(f".. py:data:: {prefix}.{n}\n" for n in constants)]
        text = inspect.cleandoc(type(found[constants[0]]).__doc__ or "")
        listed += [*(f"   {line}" if line else "" for line in text.splitlines()), "```"]
        out.append("\n".join(listed))
    return out + [_documented(f"{prefix}.{n}", v) for n, v in found.items() if inspect.isclass(v)]


def testing() -> str:
    """Return the names of `remat_kit.testing`."""
    here = public_names(PACKAGE / "testing" / "__init__.pyi")
    return "\n\n".join(_entries("remat_kit.testing", remat_kit.testing, here))


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join([_row(*head), _row(*["---"] * len(head)), *(_row(*row) for row in rows)])


def recipes() -> str:
    """Return a section for each library from which presets come."""
    groups: dict[str, list[remat_kit.Recipe]] = {}
    for recipe in remat_kit.recipes():
        groups.setdefault(recipe.origin.split(",")[0], []).append(recipe)
    parts = []
    for origin, found in sorted(groups.items(), key=lambda entry: (entry[0] != "JAX", entry[0])):
        parts.append(f"## {origin}")
        for recipe in found:
            also = f" Also `{'`, `'.join(recipe.aliases)}`." if recipe.aliases else ""
            address = recipe.origin.partition(", ")[2]
            source = f" [Source]({address})." if address.startswith("https://") else ""
            parts += [
                f"### `{recipe.usage}`",
                f"{recipe.description}{also}{source}",
                f"```python\n{recipe.text}\n```",
            ]
    return "\n\n".join(parts)


def targets() -> str:
    """Return a table of the chips."""
    rows = []
    for chip in remat_kit.targets():
        fixed = chip.platform != "cpu"
        rates = chip.flops_per_second if fixed else {}
        rows.append(
            (
                f"`{chip.name}`",
                chip.description,
                format_bytes(chip.memory_bytes) if fixed else "of this machine",
                f"{chip.bandwidth_bytes_per_second / 1e9:,.0f}" if fixed else "",
                f"{rates['bfloat16'] / 1e12:,.0f}" if "bfloat16" in rates else "",
                f"{rates['float32'] / 1e12:,.0f}" if "float32" in rates else "",
                {"cuda": "`cuda`", "tpu": "`tpu`"}.get(chip.platform, ""),
            )
        )
    head = ("name", "chip", "memory", "GB/s", "bfloat16 TFLOP/s", "float32 TFLOP/s", "extra")
    return _table(head, rows)


def _plain(text: str) -> str:
    """Escape what would be markup in Markdown, outside of code.

    >>> _plain("'*/block_*' as `a_b`")
    "'\\\\*/block\\\\_\\\\*' as `a_b`"
    """
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*_<\[])", r"\\\1", p) for p in parts)


def _subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (
        action
        for action in argument_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return dict(action.choices)


def commands() -> str:
    """Return a section for each command of the command line, with its options."""
    parts = []
    for name, parser in _subparsers().items():
        rows = []
        for action in parser._actions:
            if isinstance(action, argparse._HelpAction):
                continue
            words = " ".join(action.option_strings) or str(action.metavar or action.dest)
            takes = action.metavar if action.option_strings and action.nargs != 0 else ""
            shown = f"{words} {takes}".strip()
            text = (action.help or "") % {"default": action.default, "prog": parser.prog}
            rows.append((f"`{shown}`", _plain(text)))
        about = parser.description or ""
        parts += [f"## remat-kit {name}", f"{about[:1].upper()}{_plain(about[1:])}."]
        parts.append(_table(("argument", "meaning"), rows))
    return "\n\n".join(parts)


TEXTS: dict[str, Callable[[], str]] = {
    "names": names,
    "testing": testing,
    "recipes": recipes,
    "targets": targets,
    "commands": commands,
    "json": json_fields.rendered,
}


def main(argv: list[str] | None = None) -> int:
    """Print the texts that are named."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("text", choices=TEXTS, nargs="+")
    for text in parser.parse_args(argv).text:
        print(TEXTS[text]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
