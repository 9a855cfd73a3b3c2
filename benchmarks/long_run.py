"""Train the small GPT for many steps, with and without a plan, with and without accumulation.

A policy must not only be right once: over hundreds of steps the losses stay those of the plain
step, nothing is compiled again, and neither the arrays that JAX holds nor the memory of the
process grow. Accumulation takes the gradients of four microbatches in a scan and adds them up;
what differs there is the order of sums, so the losses with a plan are held against those of the
same step without one.

    python benchmarks/long_run.py --json benchmarks/results/long_run.json
    python benchmarks/long_run.py --steps 100

Exit status: 0 when all of this holds, 1 when it does not, 2 for a wrong call.
"""

from __future__ import annotations

import gc
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import _common
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
from _common import MIB

import remat_kit

SIZE = {"size": "tiny", "batch": 4, "dropout": 0.1}
SMOKE = {"size": "tiny", "layers": 1, "width": 8, "heads": 2, "vocab": 16, "seq": 8, "batch": 2}
MICROBATCHES = 4
WARM_UP = 10  # steps after which nothing may grow

# The losses of two compilations of one program drift apart by rounding. Each step differs by some
# units of 2^-24 in the gradients, and Adam divides by their size; this was 4e-7 after 500 steps.
LARGEST_DRIFT = 1e-5
# Memory of the process that its allocator may hold more of after the warm-up, and the most arrays.
RSS_BYTES = 16 * MIB

Row = dict[str, Any]
Step = Callable[..., Any]


def rows(size: Mapping[str, Any], steps: int) -> Iterator[Row]:
    """Train with each step and describe how it went."""
    loss, args = _common.load("gpt").build(materialize=True, **size)
    # Two plans are compiled at most: this one, and the step without it.
    plan = remat_kit.plan(loss, *args, budget="min", compiles=1)
    for count in (1, MICROBATCHES):
        plain = None
        for name, fn in (("none", loss), ("plan", remat_kit.policy(plan)(loss))):
            step = single(fn) if count == 1 else accumulating(fn, count)
            row = trained(step, args, count, steps)
            losses = row.pop("all_losses")
            plain = losses if plain is None else plain
            drift = np.max(np.abs(losses - plain) / plain)
            yield {"policy": name, "microbatches": count, **row, "largest_drift": float(drift)}


optimizer = optax.adamw(1e-3)


def single(loss: Callable[..., Any]) -> Step:
    """Return a training step that takes one gradient."""

    @jax.jit
    def step(params: Any, state: Any, tokens: Any, *key: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens, *key)
        return *updated(params, state, gradients), value

    return step


def accumulating(loss: Callable[..., Any], count: int) -> Step:
    """Return a training step that takes the gradients of ``count`` microbatches in a scan."""

    @jax.jit
    def step(params: Any, state: Any, tokens: Any, *key: Any) -> Any:
        def microbatch(total: Any, given: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, *given)
            return jax.tree.map(jnp.add, total, gradients), value

        parts = tokens.reshape(count, -1, tokens.shape[1])
        zeros = jax.tree.map(jnp.zeros_like, params)
        total, values = jax.lax.scan(
            microbatch, zeros, (parts, *(jax.random.split(k, count) for k in key))
        )
        gradients = jax.tree.map(lambda g: g / count, total)
        return *updated(params, state, gradients), values.mean()

    return step


def updated(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
    """Apply one update of the optimizer."""
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def trained(step: Step, args: Sequence[Any], count: int, steps: int) -> Row:
    """Train with a step; say what the losses were, what was compiled and what memory did."""
    params, example, *key = args  # with dropout there is a random key
    sequences, length = count * example.shape[0], example.shape[1]
    vocabulary = int(example.max()) + 1
    state = optimizer.init(params)
    numbers = np.random.default_rng(0)
    losses: list[float] = []
    compiled: list[int] = []
    arrays = resident = 0
    for number in range(steps):
        start = numbers.integers(0, vocabulary, (sequences, 1))
        tokens = jnp.asarray((start + np.arange(length)) % vocabulary, jnp.int32)
        with _common.counted_compiles() as found:
            params, state, value = step(
                params, state, tokens, *(jax.random.fold_in(k, number) for k in key)
            )
            losses.append(float(value))
        compiled.append(found[0])
        if number == min(WARM_UP, steps - 1):
            arrays, resident = memory()
    after_arrays, after_resident = memory()
    return {
        "steps": steps,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "compiles": int(step._cache_size()),  # pyright: ignore[reportFunctionMemberAccess]
        "compiles_after_the_first_step": sum(compiled[1:]),
        "live_arrays_growth": after_arrays - arrays,
        "resident_growth_bytes": after_resident - resident,
        "all_losses": np.array(losses),
    }


def memory() -> tuple[int, int]:
    """Return how many arrays JAX holds, and the bytes of the process in memory."""
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return len(jax.live_arrays()), pages * os.sysconf("SC_PAGE_SIZE")


def faults(report: dict[str, Any]) -> list[str]:
    """Say in words what does not hold."""
    found = []
    for row in report["rows"]:
        name = f"{row['policy']}, {row['microbatches']} microbatches"
        if row["largest_drift"] > LARGEST_DRIFT:
            found.append(f"{name}: the losses drift apart by {row['largest_drift']:.1e}")
        if row["compiles"] != 1 or row["compiles_after_the_first_step"]:
            found.append(f"{name}: the step was compiled more than once")
        if row["live_arrays_growth"] > 0:
            found.append(f"{name}: {row['live_arrays_growth']} more arrays are alive")
        if row["resident_growth_bytes"] > RSS_BYTES:
            found.append(f"{name}: {row['resident_growth_bytes']} more bytes are resident")
        if not row["last_loss"] < row["first_loss"]:
            found.append(f"{name}: the loss did not fall")
    return found


def rendered(report: dict[str, Any]) -> str:
    """Return a report as Markdown."""
    lines = [
        "| policy | microbatches | steps | loss, first → last | largest difference of a loss from "
        "the plain step's | compiles | more live arrays | resident memory grows by, MiB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        lines.append(
            f"| {row['policy']} | {row['microbatches']} | {row['steps']} | "
            f"{row['first_loss']:.4f} → {row['last_loss']:.4f} | {row['largest_drift']:.1e} | "
            f"{row['compiles'] + row['compiles_after_the_first_step']} | "
            f"{row['live_arrays_growth']} | {row['resident_growth_bytes'] / MIB:.1f} |"
        )
    about = (
        f"GPT of {SIZE['size']} size, dropout included, AdamW. The plan is the leanest there is. "
        "Arrays and resident memory are compared with those after "
        f"{WARM_UP} steps; differences of losses are relative."
    )
    return "\n".join([*lines, *_common.ending(report, about)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _common.parser(__doc__, smoke="20 steps of a smaller model, for tests")
    parser.add_argument("--steps", type=int, default=500, help="500 by default")
    options = parser.parse_args(given)
    size, steps = (SMOKE, 20) if options.smoke else (SIZE, options.steps)
    versions = {name: __import__(name).__version__ for name in ("jax", "jaxlib", "optax")}
    report = _common.described(__file__, given, [versions])
    report["rows"] = list(rows(size, steps))
    table = rendered(report)
    if options.json is not None:
        _common.write(options.json, report, table)
    print(table)
    for fault in (found := faults(report)):
        print(fault, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
