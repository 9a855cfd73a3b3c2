"""What the benchmarks share: models at a size, the command line, progress, the end of a report."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import json
import os
import pathlib
import platform
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

import remat_kit
from remat_kit._chip import compile as _compile
from remat_kit._inspect import tables as _tables

ROOT = pathlib.Path(__file__).parents[1]
POLICIES = ("none", "nothing", "dots")
TARGETS = ("cpu", "h100", "tpu-v5e")
MIB = 2**20


def load(name: str) -> ModuleType:
    """Run one of the model files and return it as a module of its own, anew in each call.

    It is not left in `sys.modules`: who imports a module of that name gets their own.
    """
    spec = importlib.util.spec_from_file_location(name, ROOT / "models" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass(frozen=True)
class Case:
    """A model at a size."""

    name: str
    module: str
    size: Mapping[str, Any]

    def loss(self, policy: Any) -> tuple[Any, Any]:
        """Build the loss and its arguments, ``policy`` on each block; ``"none"`` for none."""
        chosen = None if policy == "none" else policy
        return load(self.module).build(policy=chosen, **self.size)


def progress() -> Progress:
    """Return a progress bar on stderr."""
    return Progress(
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


@contextlib.contextmanager
def counted_compiles() -> Iterator[list[int]]:
    """Count the programs that JAX's backend compiles meanwhile."""
    count = [0]

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        count[0] += event.endswith("backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def output(text: str) -> pathlib.Path:
    """Return the path of a file that can be written, for `argparse`."""
    path = pathlib.Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file that can be written")
    return path


def parser(doc: str | None, *, smoke: str = "small models, for tests") -> argparse.ArgumentParser:
    """Return a command line with what every benchmark takes: ``--json`` and ``--smoke``."""
    out = argparse.ArgumentParser(description=str(doc).partition("\n\n")[0])
    out.add_argument("--json", type=output, metavar="PATH", help="write every figure there")
    out.add_argument("--smoke", action="store_true", help=smoke)
    return out


def described(
    script: str, given: Sequence[str], versions: Iterable[Mapping[str, str]]
) -> dict[str, Any]:
    """Say how a report came about: its command, date and versions."""
    found = {"python": platform.python_version()}
    for each in versions:
        found |= each
    return {
        "command": f"python benchmarks/{pathlib.Path(script).name} {shlex.join(given)}".rstrip(),
        "date": datetime.date.today().isoformat(),
        "versions": found,
    }


def versions(target: str) -> dict[str, str]:
    """Return the versions that plans for a chip depend on: Python, JAX, Flax and the compiler.

    Those of remat_kit itself are left out, as the planner's revision says more.
    """
    found = {"python": platform.python_version()} | _tables.versions()
    found |= _compile._versions(remat_kit.target(target).platform)
    return without(found, "remat-kit")


def rows_by_model(path: pathlib.Path | None) -> dict[str, dict[str, Any]]:
    """Return the rows of an earlier run by the name of the model; none without such a file."""
    if path is None or not path.exists() or not path.stat().st_size:
        return {}
    return {row["model"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}


def reported(
    script: str, given: Sequence[str], rows: Iterable[Mapping[str, Any]], cases: Iterable[Case]
) -> dict[str, Any]:
    """Return a report of rows with their versions, in the order of the models."""
    order = [case.name for case in cases]
    found = sorted(rows, key=lambda row: order.index(row["model"]))
    return described(script, given, (row["versions"] for row in found)) | {"rows": found}


def ending(report: Mapping[str, Any], about: str, *, compiled_only: bool = True) -> list[str]:
    """Return the last lines of a report in Markdown: what it shows, when, with what, by what.

    With ``compiled_only`` they say that no chip was there, as is true of all that is only compiled.
    """
    absent = " No chip but a CPU was there." if compiled_only else ""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return [
        "",
        f"{about}{absent} Taken on {report['date']} with {versions}, by",
        "",
        "```",
        report["command"],
        "```",
    ]


def write(
    path: pathlib.Path,
    report: Mapping[str, Any],
    table: str,
    raw: Mapping[str, Any] | None = None,
) -> None:
    """Write a report as JSON, and its table beside it as Markdown.

    ``raw`` is the same report with all points, curves and buffers. It goes to the folder ``raw``
    beside the file, which git ignores.
    """
    write_json(path, report)
    path.with_suffix(".md").write_text(table + "\n", encoding="utf-8")
    if raw is not None:
        folder = path.parent / "raw"
        folder.mkdir(exist_ok=True)
        write_json(folder / path.name, raw)


def write_json(path: pathlib.Path, report: Mapping[str, Any]) -> None:
    """Write a report as JSON."""
    path.write_text(as_text(report), encoding="utf-8")


def as_text(report: Mapping[str, Any]) -> str:
    """Return a report as JSON: a line for each entry and for each row, without spaces.

    Numbers that are not integers have eight significant digits.

    >>> print(as_text({"date": "today", "rows": [{"a": 1}, {"a": 2}]}), end="")
    {"date":"today",
    "rows":[
    {"a":1},
    {"a":2}]}
    """
    entries = []
    for key, value in report.items():
        rows = isinstance(value, list) and any(isinstance(row, dict) for row in value)
        text = "[\n" + ",\n".join(map(_compact, value)) + "]" if rows else _compact(value)
        entries.append(f"{_compact(key)}:{text}")
    return "{" + ",\n".join(entries) + "}\n"


def _compact(value: Any) -> str:
    return json.dumps(_rounded(value), ensure_ascii=False, separators=(",", ":"))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def packed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rows that have the same keys as a table, which is shorter in JSON.

    >>> packed([{"a": 1, "b": 2}, {"a": 3, "b": 4}])
    {'columns': ['a', 'b'], 'values': [[1, 2], [3, 4]]}
    """
    names = list(rows[0]) if rows else []
    return {"columns": names, "values": [[row[name] for name in names] for row in rows]}


def unpacked(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a table that `packed` made.

    >>> unpacked(packed([{"a": 1, "b": 2}]))
    [{'a': 1, 'b': 2}]
    """
    return [dict(zip(table["columns"], row, strict=True)) for row in table["values"]]


def without(value: Any, *keys: str) -> Any:
    """Return plain values without the entries of these keys, at any depth.

    >>> without({"rows": [{"bytes": 3, "curve": [1, 2]}]}, "curve")
    {'rows': [{'bytes': 3}]}
    """
    if isinstance(value, dict):
        return {k: without(v, *keys) for k, v in value.items() if k not in keys}
    return [without(v, *keys) for v in value] if isinstance(value, list | tuple) else value
