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
import sys
from typing import Any

import _common
import jax
from _common import POLICIES, ROOT, TARGETS, Case

import remat_kit
from remat_kit._chip.compile import measure
from remat_kit._units import format_bytes

README = ROOT / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"

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
    rows = []
    with _common.progress() as bar:
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
    about = (
        "Temporary memory of one compiled `value_and_grad` in MiB, float32, policies on every "
        "block."
    )
    return "\n".join([*lines, *_common.ending(report, about)])


def _cell(memory: dict[str, Any]) -> str:
    if memory["temp_bytes"] is None:
        needs = memory["needs_bytes"]
        return "does not fit" + ("" if needs is None else f": needs {format_bytes(needs)}")
    shown = f"{memory['temp_bytes'] / 2**20:,.0f}"
    # How much the CPU has is a matter of the machine that compiled, not of the program.
    return shown if memory["fits"] or memory["target"] == "cpu" else f"{shown} (does not fit)"


def with_results(readme: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """Return the README's text with its table replaced.

    >>> print(with_results(f"a\\n{BEGIN}\\nold\\n{END}\\nb", "new"))
    a
    <!-- results:begin -->
    new
    <!-- results:end -->
    b
    """
    before, opening, rest = readme.partition(begin)
    _, closing, after = rest.partition(end)
    if not opening or not closing:
        raise ValueError(f"the README must hold {begin} and, after it, {end}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    out = _common.parser(__doc__)
    out.add_argument("--target", action="append", metavar="T", help="default: all three")
    out.add_argument("--update-readme", action="store_true", help="put the table into README.md")
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
    report = _common.described(__file__, given, (row["memory"]["versions"] for row in rows))
    report |= {"targets": list(targets), "rows": rows}
    table = rendered(report)
    if options.json:
        _common.write(options.json, report, table)
    if options.update_readme:
        text = README.read_text(encoding="utf-8")
        README.write_text(with_results(text, table), encoding="utf-8")
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
