"""A script as people write it: argparse, a loop, a print. It knows nothing of remat_kit.

remat-kit doctor benchmarks/steps/script.py --steps 5
"""

from __future__ import annotations

import argparse

import accumulation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    step, args = accumulation.build()
    for number in range(options.steps):
        args, loss = accumulation.after(args, step(*args))
        print(f"step {number}: loss {float(loss):.6f}")


if __name__ == "__main__":
    main()
