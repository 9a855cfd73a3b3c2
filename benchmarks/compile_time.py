"""Compare programs that are compiled to the end with programs whose buffers are assigned.

The planner stops a compiler before it generates machine code (`compile_program` with
``code=False``). This script compiles the gradients of our models both ways, compares the bytes, and
gives the seconds that the compiler took.

    python benchmarks/compile_time.py --json benchmarks/results/compile_time.json

Exit status: 0 if all bytes are the same, 1 if some are not, 2 for a wrong call or a compiler that
is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import _common
import jax
from _common import MIB, TARGETS, Case

import remat_kit
from remat_kit._chip.compile import compile_program

CASES = (
    Case("VGG-11, batch 64", "vgg", {"depth": 11}),
    Case("GPT-12, batch 8", "gpt", {}),
    Case("GPT-12 as a scan, batch 8", "gpt", {"scan": True}),
    Case("Llama, 2 layers, 2k tokens", "llama_nnx", {"layers": 2, "seq": 2048}),
)
SMOKE = (Case("VGG-11, batch 4", "vgg", {"depth": 11, "batch": 4, "image": 64}),)
POLICIES = ("none", "nothing")
BYTES = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "host_bytes", "peak_bytes")

Row = dict[str, Any]


def row_of(case: Case, policy: str, target: str) -> Row:
    """Compile a model both ways."""
    loss, args = case.loss(policy)
    found = {
        code: compile_program(loss, args, target, code=code, cache=False).memory
        for code in (False, True)
    }
    return {
        "model": case.name,
        "policy": policy,
        "target": target,
        "stopped": found[False].fits and found[False].code_bytes is None,
        "seconds": [found[code].compile_seconds for code in (True, False)],
        "bytes": [{name: getattr(found[code], name) for name in BYTES} for code in (True, False)],
        "versions": dict(found[True].versions),
    }


def is_same(row: Row) -> bool:
    """Tell whether both compilations of a model found the same bytes."""
    whole, assigned = row["bytes"]
    return whole == assigned


def rendered(report: Mapping[str, Any]) -> str:
    """Return a report as Markdown."""
    lines = [
        "| target | model | policy | MiB | same bytes | whole, s | stopped, s | times |",
        "|---|---|---|---:|---|---:|---:|---:|",
    ]
    for row in report["rows"]:
        temporaries = row["bytes"][0]["temp_bytes"]
        cells = [row["target"], row["model"], row["policy"]]
        if temporaries is None:
            cells += ["refused", _yes(is_same(row)), "", "", ""]
        else:
            whole, assigned = row["seconds"]
            cells += [f"{temporaries / MIB:,.0f}", _yes(is_same(row)), f"{whole:.1f}"]
            cells += [f"{assigned:.1f}" + ("" if row["stopped"] else " (not stopped)")]
            cells += [f"{whole / assigned:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    about = (
        "MiB of temporaries. Seconds until the compiler has the whole program, and until it is "
        "stopped, a second after it has assigned all buffers. *Same bytes*: arguments, results, "
        "aliased, temporaries, host and peak. *Refused*: it does not fit on the chip."
    )
    return "\n".join([*lines, *_common.ending(report, about)])


def _yes(found: bool) -> str:
    return "yes" if found else "no"


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given: Sequence[str] = sys.argv[1:] if argv is None else argv
    parser = _common.parser(__doc__)
    parser.add_argument("--target", action="append", metavar="T", help="default: all three")
    options = parser.parse_args(given)
    jax.config.update("jax_platforms", "cpu")
    rows: list[Row] = []
    try:
        for target in options.target or TARGETS:
            for case in SMOKE if options.smoke else CASES:
                for policy in POLICIES:
                    print(f"{target}: {case.name}, {policy}", file=sys.stderr)
                    rows.append(row_of(case, policy, target))
    except remat_kit.RematKitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = _common.described(__file__, given, (row["versions"] for row in rows))
    report["rows"] = rows
    table = rendered(report)
    if options.json:
        _common.write(options.json, report, table)
    print(table)
    return 0 if all(map(is_same, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
