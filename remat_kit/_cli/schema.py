"""What does the JSON that each command writes contain?

The answer is `schemas.json` beside this module, a JSON Schema with a definition for each command
and for the parts that they share.
"""

from __future__ import annotations

import argparse
import functools
import importlib.resources
import json
import re
from typing import Any

from remat_kit._cli.output import answer, check_writable
from remat_kit._errors import unknown


@functools.cache
def _definitions() -> dict[str, Any]:
    file = importlib.resources.files("remat_kit._cli") / "schemas.json"
    return json.loads(file.read_text(encoding="utf-8"))


def schema_names() -> tuple[str, ...]:
    """Return the names that `schema` takes: the commands, then the parts of what they write."""
    return tuple(_definitions()["$defs"])


def schema(name: str) -> dict[str, Any]:
    """Return a JSON Schema (2020-12) that is complete in itself.

    >>> schema("targets")["properties"]["targets"]["items"]
    {'$ref': '#/$defs/target'}

    Args:
      name: of a command, or of a part of what it writes: ``report`` is what `Report.to_json`
        returns.

    Raises:
      UnknownNameError: nothing has that name.
    """
    document = _definitions()
    known = document["$defs"]
    if name not in known:
        raise unknown("schema", name, known, call=f"remat-kit schema {name}")
    used = _uses(known, known[name], {})
    return {"$schema": document["$schema"], "title": name} | known[name] | {"$defs": used}


def _uses(known: dict[str, Any], part: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Add to ``found`` the definitions that a part of a schema refers to."""
    for name in re.findall(r'"#/\$defs/([^"]+)"', json.dumps(part)):
        if name not in found:
            found[name] = known[name]
            _uses(known, known[name], found)
    return found


def schema_command(options: argparse.Namespace) -> None:
    from remat_kit._show.table import Table

    check_writable(options.json)
    if options.name:
        found = schema(options.name)
        answer(options, found, [json.dumps(found, indent=1, ensure_ascii=False)])
        return
    known = _definitions()["$defs"]
    rows = tuple((name, part["description"]) for name, part in known.items())
    answer(options, _definitions(), [Table("schemas", ("schema", "of what"), rows)])
