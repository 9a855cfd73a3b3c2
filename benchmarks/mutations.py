"""Break the library in forty places, one at a time, and see that the default tests notice.

A mutation is a text of one file, and what it is replaced by. Each brings back a fault that the
library had, or one that would make it wrong or silent. It is applied to a copy of the repository,
and the tests that should notice run there. First all of these tests run on an unbroken copy, since
a test that fails anyway notices nothing.

    python benchmarks/mutations.py
    python benchmarks/mutations.py --only custom_jvp_static --jobs 1

Exit status: 0 when every mutation is noticed; 1 when one is not, when its text is no longer there
exactly once, or when its tests fail without it; 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from _common import ROOT
from _mutations import MUTATIONS, Mutation

COPIED = ("remat_kit", "policies", "models", "tests", "benchmarks", "docs", "pyproject.toml")
SECONDS = 900  # a mutation may make a program run forever


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a mutation: "noticed", "not noticed", or why it could not be tried."""

    mutation: Mutation
    verdict: str
    seconds: float
    output: str = ""


def places(mutation: Mutation) -> int:
    """Return how often the text of a mutation is in its file."""
    path = ROOT / mutation.file
    return path.read_text(encoding="utf-8").count(mutation.old) if path.is_file() else 0


def tried(mutation: Mutation) -> Outcome:
    """Run a mutation's tests on a copy of the repository that it is applied to."""
    begun = time.monotonic()
    if (count := places(mutation)) != 1:
        return Outcome(mutation, f"its text is in {mutation.file} {count} times", 0.0)
    with copied() as root:
        path = root / mutation.file
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        code, output = tested(root, mutation.tests)
    verdicts = {0: "not noticed", 1: "noticed", -1: "noticed"}  # -1: ran for too long
    verdict = verdicts.get(code, f"pytest ended with status {code}")
    return Outcome(mutation, verdict, time.monotonic() - begun, output)


@contextlib.contextmanager
def copied() -> Iterator[pathlib.Path]:
    """Make a temporary copy of what the tests need of the repository."""
    ignored = shutil.ignore_patterns("__pycache__", "results")
    with tempfile.TemporaryDirectory(prefix="remat_kit_mutation_") as name:
        root = pathlib.Path(name)
        for part in COPIED:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, root / part, ignore=ignored)
            else:
                shutil.copy(ROOT / part, root / part)
        yield root


def tested(root: pathlib.Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests of a copy until the first one fails; return pytest's status, and what it wrote."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    # Without deadlines, which a busy machine misses, and with the same examples each time.
    command += ["--hypothesis-profile=ci", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    # Every copy has a cache of its own: what one mutation compiles is not another's.
    environment.pop("REMAT_KIT_TEST_CACHE", None)
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return -1, ""
    return done.returncode, done.stdout + done.stderr


def unbroken(mutations: Sequence[Mutation]) -> str:
    """Return what pytest wrote if a test of some mutations fails without them, else nothing."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    with copied() as root:
        code, output = tested(root, tests)
    return output if code else ""


def outcomes(mutations: Sequence[Mutation], jobs: int) -> Iterator[Outcome]:
    """Try mutations, some at a time, and yield what became of each as it is known."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for each in concurrent.futures.as_completed(pool.submit(tried, m) for m in mutations):
            yield each.result()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    names = [mutation.name for mutation in MUTATIONS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="some of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="one per core")
    options = parser.parse_args(argv)
    chosen = [m for m in MUTATIONS if options.only is None or m.name in options.only]
    if output := unbroken(chosen):
        print(output, "\nThese tests fail without any mutation.", file=sys.stderr)
        return 1
    found = []
    for outcome in outcomes(chosen, options.jobs):
        found.append(outcome)
        print(f"{outcome.verdict:12} {outcome.seconds:4.0f} s  {outcome.mutation.name}", flush=True)
        if outcome.verdict != "noticed":
            print(outcome.output[-2000:], file=sys.stderr)
    noticed = sum(outcome.verdict == "noticed" for outcome in found)
    print(f"{noticed} of {len(found)} mutations are noticed")
    for outcome in found:
        if outcome.verdict != "noticed":
            mutation = outcome.mutation
            print(
                f"{mutation.name}: {outcome.verdict}. {mutation.fault} {' '.join(mutation.tests)}"
            )
    return 0 if noticed == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
