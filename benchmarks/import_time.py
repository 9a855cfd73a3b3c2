"""Time what `import remat_kit` adds to `import jax, flax`, in fresh interpreters.

    python benchmarks/import_time.py
    python benchmarks/import_time.py --times 20 --json import.json

Exit status: 0 if the median is at most ``--limit`` seconds, 1 if it is above, 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys

LIMIT_SECONDS = 0.1
_TIMED = """
import time
begun = time.process_time()
import jax, flax
middle = time.process_time()
import remat_kit
remat_kit.plan  # names are imported when they are first used
print(middle - begun, time.process_time() - middle)
"""


def added_seconds(times: int) -> list[float]:
    """Return the CPU seconds that the import of remat_kit took in each of ``times`` interpreters.

    The first interpreter, which reads the files from the disk and compiles them, is not kept.
    """
    return [_once() for _ in range(times + 1)][1:]


def _once() -> float:
    # With bytecode kept, as it is for an installed package.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", _TIMED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.split()[1])


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--times", type=_count, default=7, help="interpreters (default: 7)")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, metavar="S")
    parser.add_argument("--json", metavar="PATH", help="write every time there")
    options = parser.parse_args(argv)
    seconds = added_seconds(options.times)
    median = statistics.median(seconds)
    if options.json:
        report = {"python": platform.python_version(), "median_seconds": median, "seconds": seconds}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    print(
        f"import remat_kit adds {median:.3f} s to import jax, flax "
        f"(least {min(seconds):.3f}, most {max(seconds):.3f}, {len(seconds)} interpreters)"
    )
    if median > options.limit:
        print(f"error: more than {options.limit:g} s", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
