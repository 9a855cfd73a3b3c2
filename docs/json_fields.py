"""Write the fields of every command's JSON as Markdown tables, from the schemas of the package.

`python docs/json_fields.py` prints the tables. The page of the reference includes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from remat_kit._cli.schema import schema, schema_names

_REFERENCE = "#/$defs/"


def rendered() -> str:
    """Return a section for each command, and then for each part that several commands share."""
    return "\n".join(_section(name) for name in schema_names())


def _section(name: str) -> str:
    part = schema(name)
    lines = [f"\n(json-{name})=", f"## `{name}`", "", part["description"].rstrip(".") + ".", ""]
    rows = list(_rows(part))
    if rows:
        lines += ["| field | type | what it is |", "|---|---|---|"]
        lines += [f"| `{field}` | {kind} | {what} |" for field, kind, what in rows]
    return "\n".join(lines) + "\n"


def _rows(part: dict[str, Any], before: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (field, type, description), those of an object inside right after it."""
    for inner in part.get("anyOf", ()):
        yield from _rows(inner, before)
    for name, field in part.get("properties", {}).items():
        yield before + name, _kind(field), field["description"].replace("|", "\\|")
        yield from _rows(field.get("items", {}), f"{before}{name}[].")


def _kind(field: dict[str, Any]) -> str:
    if "$ref" in field:
        name = field["$ref"].removeprefix(_REFERENCE)
        return f"[{name}](#json-{name})"
    if "anyOf" in field:
        return " or ".join(_kind(part) for part in field["anyOf"])
    kind = field.get("type", "")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return f"list of {_kind(field['items'])}"
    if kind == "object" and "properties" not in field:
        return f"map to {_kind(field['additionalProperties'])}"
    return kind


if __name__ == "__main__":
    print(rendered())
