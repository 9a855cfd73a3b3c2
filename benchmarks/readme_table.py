"""Compile two models under three policies for three chips, and write the README's table.

ResNet-50 with 64 images and a GPT of 12 layers with 8 sequences of 1024 tokens, both in float32,
each with no policy and with two presets on its blocks. What is compiled is
``value_and_grad(loss)``; no chip is needed. Compiled answers are kept on disk, so a run that was
stopped goes on where it was. The whole takes about a quarter of an hour on two cores, most of it
in the TPU's compiler.

    python benchmarks/readme_table.py --json benchmarks/results/readme_table.json --update-readme

Exit status: 0 when done, 2 for a wrong call or a compiler that is not installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import pathlib
import platform
import sys
from typing import Any

import jax
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

import remat_kit
from remat_kit._policy import format_bytes
from remat_kit._target import measure

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "readme_table.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"

POLICIES = ("none", "nothing", "dots")
TARGETS = ("cpu", "h100", "tpu-v5e")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model at a size."""

    name: str
    module: str
    size: dict[str, Any]

    def loss(self, policy: str) -> tuple[Any, Any]:
        """Build the loss and its arguments, ``policy`` on each block."""
        spec = importlib.util.spec_from_file_location(
            self.module, ROOT / "models" / f"{self.module}.py"
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        spec.loader.exec_module(module)
        return module.build(policy=None if policy == "none" else policy, **self.size)


CASES = (
    Case("ResNet-50, 64 images", "resnet", {"depth": 50, "batch": 64}),
    Case("GPT, 12 layers, 8 × 1024 tokens", "gpt", {"size": "small", "batch": 8}),
)
SMOKE = (
    Case("ResNet-18, 2 images", "resnet", {"depth": 18, "batch": 2, "image": 32, "width": 4}),
    Case("GPT, 2 layers, 2 × 16 tokens", "gpt", {"size": "tiny", "batch": 2}),
)


def measured(cases: tuple[Case, ...], targets: tuple[str, ...]) -> list[dict[str, Any]]:
    """Compile everything, with a progress bar on stderr."""
    bar = Progress(
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    rows = []
    with bar:
        job = bar.add_task("", total=len(cases) * len(POLICIES) * len(targets))
        for case in cases:
            for policy in POLICIES:
                fn, args = case.loss(policy)
                for target in targets:
                    bar.update(job, description=f"{case.name}, {policy}, {target}")
                    memory = measure(fn, *args, target=target)
                    bar.advance(job)
                    row = {"model": case.name, "size": case.size, "policy": policy}
                    rows.append(row | {"memory": memory.to_json()})
    return rows


def rendered(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    targets = report["targets"]
    lines = [
        "| model | policy | " + " | ".join(targets) + " |",
        "|---|---|" + "---:|" * len(targets),
    ]
    cells: dict[tuple[str, str], list[str]] = {}
    for row in report["rows"]:
        cells.setdefault((row["model"], row["policy"]), []).append(_cell(row["memory"]))
    for (model, policy), found in cells.items():
        lines.append(f"| {model} | `{policy}` | " + " | ".join(found) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return "\n".join(
        [
            *lines,
            "",
            "Temporary memory of one compiled `value_and_grad` in MiB, float32, policies on every "
            f"block. No chip but a CPU was there. Taken on {report['date']} with {versions}, by",
            "",
            "```",
            report["command"],
            "```",
        ]
    )


def _cell(memory: dict[str, Any]) -> str:
    if memory["temp_bytes"] is None:
        needs = memory["needs_bytes"]
        return "does not fit" + ("" if needs is None else f": needs {format_bytes(needs)}")
    shown = f"{memory['temp_bytes'] / 2**20:,.0f}"
    # How much the CPU has is a matter of the machine that compiled, not of the program.
    return shown if memory["fits"] or memory["target"] == "cpu" else f"{shown} (does not fit)"


def with_results(readme: str, table: str) -> str:
    """Return the README's text with its table replaced.

    >>> print(with_results(f"a\\n{BEGIN}\\nold\\n{END}\\nb", "new"))
    a
    <!-- results:begin -->
    new
    <!-- results:end -->
    b
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README must hold {BEGIN} and, after it, {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _versions(rows: list[dict[str, Any]]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for row in rows:
        found |= row["memory"]["versions"]
    return found


def _output(text: str) -> pathlib.Path:
    path = pathlib.Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file that can be written")
    return path


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    out = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    out.add_argument("--target", action="append", metavar="T", help="default: all three")
    out.add_argument("--json", type=_output, metavar="PATH", help="write every figure there")
    out.add_argument("--update-readme", action="store_true", help="put the table into README.md")
    out.add_argument("--smoke", action="store_true", help="small models, for tests")
    return out


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = sys.argv[1:] if argv is None else argv
    options = parser().parse_args(given)
    targets = tuple(dict.fromkeys(options.target or TARGETS))
    jax.config.update("jax_platforms", "cpu")  # leaves an accelerator that is here alone
    try:
        rows = measured(SMOKE if options.smoke else CASES, targets)
    except remat_kit.RematKitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = {
        "command": " ".join(["python benchmarks/readme_table.py", *given]),
        "date": datetime.date.today().isoformat(),
        "versions": _versions(rows),
        "targets": list(targets),
        "rows": rows,
    }
    table = rendered(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        options.json.with_suffix(".md").write_text(table + "\n", encoding="utf-8")
    if options.update_readme:
        text = README.read_text(encoding="utf-8")
        README.write_text(with_results(text, table), encoding="utf-8")
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
