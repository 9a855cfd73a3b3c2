"""Which facts about the compilers hold for the installed versions?

The facts are those of `remat_kit/_backend/facts.py`, and the programs that show them are in
`tests/probes/probes.py`. The answers of one run are added to those in the file of ``--json``, so
that a run with each release of JAX makes a table of facts and releases.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import sys
from typing import Any

import _common

sys.path.insert(0, str(_common.ROOT / "tests" / "probes"))
if importlib.metadata.version("jax").startswith("0.10."):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_enable_concurrency_optimized_scheduler=false")

import probes  # pyright: ignore[reportMissingImports]

from remat_kit._backend.facts import facts
from remat_kit._chip.target import target


def answers(platforms: list[str]) -> dict[str, dict[str, str]]:
    """Compile the probe of each fact for the compilers to which it applies, and return its answer.

    >>> answers([])["rounds_products"]
    {}
    """
    found: dict[str, dict[str, str]] = {}
    for fact in facts():
        found[fact.name] = {}
        for platform in fact.backends:
            if platform in platforms:
                needs = target(probes.CHIPS[platform]).needs
                missing = f"not compiled: {needs}" if needs else ""
                found[fact.name][platform] = missing or str(getattr(probes, fact.name)(platform))
    return found


def rendered(runs: dict[str, Any]) -> str:
    """Return the table of all runs as Markdown."""
    lines = ["# Facts about the compilers", ""]
    lines += ["Which of the facts in `remat_kit/_backend/facts.py` hold, by the programs in"]
    lines += ["`tests/probes/probes.py`, which are compiled and not run. Made by", ""]
    lines += [f"    python benchmarks/compiler_facts.py --json {_JSON}", ""]
    lines += ["with each of these releases:", ""]
    for run in runs.values():
        lines.append("- " + ", ".join([run["date"], *(f"{k} {v}" for k, v in run["on"].items())]))
    head = [f"jax {jax}" for jax in runs]
    lines += ["", f"| fact | compiler | {' | '.join(head)} |", "|---" * (2 + len(head)) + "|"]
    for fact in facts():
        for platform in fact.backends:
            cells = [run["answers"].get(fact.name, {}).get(platform, "–") for run in runs.values()]
            lines.append(f"| `{fact.name}` | {platform} | {' | '.join(cells)} |")
    lines += ["", "What they say:", ""]
    lines += [f"- `{fact.name}`: {fact.sentence}" for fact in facts()]
    return "\n".join(lines) + "\n"


_JSON = "benchmarks/results/compiler_facts.json"


def main() -> None:
    parser = _common.parser(__doc__, smoke="the probes for CPUs alone")
    options = parser.parse_args()
    packages = [p for p in ("jax", "jaxlib", "libtpu") if _installed(p)]
    run = {
        "date": datetime.date.today().isoformat(),
        "on": {p: importlib.metadata.version(p) for p in packages},
        "answers": answers(["cpu"] if options.smoke else ["cpu", "cuda", "tpu"]),
    }
    path: pathlib.Path | None = options.json
    runs = json.loads(path.read_text()) if path and path.exists() else {}
    runs = dict(sorted({**runs, importlib.metadata.version("jax"): run}.items()))
    if path:
        path.write_text(json.dumps(runs, indent=1) + "\n")
        path.with_suffix(".md").write_text(rendered(runs))
    print(rendered(runs))


def _installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    main()
