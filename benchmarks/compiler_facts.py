"""Which facts about the compilers hold for the installed versions?

The facts are those of `remat_kit/_backend/facts.py`, and the programs that show them are in
`tests/probes/probes.py`. The answers of one run are added to those in the file of ``--json``, so
that a run with each release of JAX makes a table of facts and releases. The compilers for CUDA and
for TPUs may be in two environments with the same release: ``--compilers`` names those to ask, and
the answers of the others stay. ``--facts`` asks about some facts alone, for example new ones.
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


def answers(platforms: list[str], names: list[str]) -> dict[str, dict[str, str]]:
    """Compile the probe of each fact for the compilers to which it applies, and return its answer.

    >>> answers([], ["rounds_products", "reuses_results"])
    {'rounds_products': {}, 'reuses_results': {}}
    """
    found: dict[str, dict[str, str]] = {}
    for fact in facts():
        if fact.name not in names:
            continue
        found[fact.name] = {}
        for platform in fact.backends:
            if platform in platforms:
                needs = target(probes.CHIPS[platform]).needs
                missing = f"not compiled: {needs}" if needs else ""
                found[fact.name][platform] = missing or str(getattr(probes, fact.name)(platform))
    return found


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return a run's answers and versions, and those of an earlier run for what was not asked now.

    >>> both = {"cpu": "no", "tpu": "yes"}
    >>> old = {"on": {"jax": "1", "libtpu": "2"}, "answers": {"a": both, "c": {"cpu": "no"}}}
    >>> new = {"on": {"jax": "1"}, "answers": {"a": {"cpu": "yes"}, "b": {"cpu": "yes"}}}
    >>> merged(old, new)["answers"]
    {'a': {'cpu': 'yes', 'tpu': 'yes'}, 'c': {'cpu': 'no'}, 'b': {'cpu': 'yes'}}
    >>> merged(old, new)["on"]
    {'jax': '1', 'libtpu': '2'}
    """
    before = old.get("answers", {})
    asked = {name: {**before.get(name, {}), **found} for name, found in new["answers"].items()}
    answers = {**before, **asked}
    return {**new, "on": {**old.get("on", {}), **new["on"]}, "answers": answers}


def rendered(runs: dict[str, Any]) -> str:
    """Return the table of all runs as Markdown."""
    lines = ["# Facts about the compilers", ""]
    lines += ["Which of the facts in `remat_kit/_backend/facts.py` hold, by the programs in"]
    lines += ["`tests/probes/probes.py`, which are compiled and not run. Made by", ""]
    lines += [f"    python benchmarks/compiler_facts.py --compilers NAME ... --json {_JSON}", ""]
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
_PLUGINS = {"tpu": ["libtpu"], "cuda": ["jax-cuda12-plugin", "jax-cuda13-plugin"]}


def main() -> None:
    parser = _common.parser(__doc__, smoke="the probes for CPUs alone")
    parser.add_argument(
        "--compilers", nargs="+", choices=list(probes.CHIPS), default=list(probes.CHIPS)
    )
    names = [fact.name for fact in facts()]
    parser.add_argument("--facts", nargs="+", choices=names, default=names, metavar="NAME")
    options = parser.parse_args()
    compilers = ["cpu"] if options.smoke else options.compilers
    plugins = [p for c, names in _PLUGINS.items() if c in compilers for p in names]
    packages = [p for p in ("jax", "jaxlib", *plugins) if _installed(p)]
    run = {
        "date": datetime.date.today().isoformat(),
        "on": {p: importlib.metadata.version(p) for p in packages},
        "answers": answers(compilers, options.facts),
    }
    path: pathlib.Path | None = options.json
    runs = json.loads(path.read_text()) if path and path.exists() else {}
    release = importlib.metadata.version("jax")
    old = runs.get(release, {})
    if options.facts != names:  # most answers are those of the earlier run, and so is its date
        run["date"] = old.get("date", run["date"])
    runs = dict(sorted({**runs, release: merged(old, run)}.items()))
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
