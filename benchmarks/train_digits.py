"""Train on real images with and without policies, and show that the losses do not move.

Each model of ``--model`` is trained on scikit-learn's digits (1797 images of 8x8 pixels that ship
with the package) once per policy, from the same seed and in the same order. A policy may change
only what is kept in memory, so every step's loss has to be the baseline's, to the last bit where
XLA compiles the same arithmetic. The table gives the largest difference in units in the last
place (ulps) of a float32 loss.

Any checkpoint, JAX's own with everything saved too, adds barriers that can make XLA fuse, and so
round, differently: on a CPU with jax 0.12.0.1, `nn.remat` moves the ResNet's second loss by 18 ulps
at ``--batch 16``, and by none at the default of 64. Such differences grow with the steps, and the
script reports them as what they are: a failure, unless ``--tolerance-ulps`` allows them.

    python benchmarks/train_digits.py
    python benchmarks/train_digits.py --model mlp --policy dots --epochs 5 --json digits.json

Exit status: 0 if every loss is within ``--tolerance-ulps``, 1 if one is not, 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import _common
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import remat_kit

HELD_OUT = 360  # images, a fifth
BASELINE = "none"
Images = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # as `digits` returns them


@dataclasses.dataclass(frozen=True)
class Task:
    """A model with the function to train and the one to test it by."""

    name: str
    blocks: str
    view: Callable[[np.ndarray], np.ndarray]  # (n, 8, 8) images to the model's input
    init: Callable[[jax.Array, np.ndarray], Any]
    loss: Callable[..., Any]  # (params, stats, inputs, labels) to (loss, new stats)
    logits: Callable[..., Any]  # (params, stats, inputs)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run: its losses in order, and what it reached."""

    model: str
    policy: str
    losses: np.ndarray
    accuracy: float
    step_seconds: float
    max_ulps: float = 0.0


def cross_entropy(logits: Any) -> Any:
    """Return the loss of a network without statistics, called as a task calls it."""

    def loss(params, stats, inputs, labels):
        each = optax.softmax_cross_entropy_with_integer_labels(
            logits(params, stats, inputs), labels
        )
        return each.mean(), stats

    return loss


def mlp_task() -> Task:
    """The MLP with 64 inputs and 128 hidden units."""
    mlp = _common.load("mlp")
    model = mlp.MLP(hidden=128)

    def logits(params, stats, inputs):
        return model.apply({"params": params}, inputs)

    loss = cross_entropy(logits)
    return Task("mlp", mlp.BLOCKS, lambda x: x.reshape(len(x), -1), model.init, loss, logits)


def resnet_task() -> Task:
    """ResNet-18, 8 channels wide, on the images enlarged to 16x16."""
    resnet = _common.load("resnet")
    size = {"depth": 18, "classes": 10, "width": 8}
    model = resnet.ResNet(**size)
    frozen = resnet.ResNet(**size, train=False)

    def enlarged(images):
        return np.kron(images, np.ones((1, 2, 2), images.dtype))[..., None]

    def loss(*args):
        return resnet.loss_and_stats(model, *args)

    def logits(params, stats, inputs):
        return frozen.apply({"params": params, "batch_stats": stats}, inputs)

    return Task("resnet", resnet.BLOCKS, enlarged, model.init, loss, logits)


TASKS = {"mlp": mlp_task, "resnet": resnet_task}


def digits(seed: int) -> Images:
    """Return train images, train labels, test images, test labels; pixels in [0, 1]."""
    data: Any = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.target))
    images = (data.images[order] / 16).astype(np.float32)
    labels = data.target[order].astype(np.int32)
    return images[HELD_OUT:], labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT]


def batches(n: int, options: argparse.Namespace) -> Iterator[np.ndarray]:
    """Yield the row numbers of each full batch, shuffled anew in every epoch."""
    rng = np.random.default_rng(options.seed)
    steps = min(n // options.batch, 4 if options.smoke else n)
    for _ in range(options.epochs):
        yield from rng.permutation(n)[: steps * options.batch].reshape(steps, -1)


def train(task: Task, policy: str, options: argparse.Namespace, tick: Callable[[], object]) -> Run:
    """Train ``task`` under ``policy`` on the digits, calling ``tick`` after every step."""
    return trained(task, policy, with_policy(task, policy), digits(options.seed), options, tick)


def trained(
    task: Task,
    policy: str,
    loss: Callable[..., Any],
    data: Images,
    options: argparse.Namespace,
    tick: Callable[[], object],
) -> Run:
    """Train ``loss``, that of ``task`` under ``policy``, with Adam, and test it."""
    images, labels, test_images, test_labels = data
    inputs = task.view(images)
    variables = task.init(jax.random.key(options.seed), inputs[:1])
    params, stats = variables["params"], variables.get("batch_stats", {})
    optimizer = optax.adam(1e-3)
    state = optimizer.init(params)

    @jax.jit
    def step(params, stats, state, inputs, labels):
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(
            params, stats, inputs, labels
        )
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), stats, state, value

    values, begun = [], time.perf_counter()
    for rows in batches(len(labels), options):
        params, stats, state, value = step(params, stats, state, inputs[rows], labels[rows])
        if not values:
            jax.block_until_ready(value)
            begun = time.perf_counter()  # the first step compiles
        values.append(value)
        tick()
    losses = np.asarray(jax.device_get(values), np.float32)
    seconds = (time.perf_counter() - begun) / max(len(losses) - 1, 1)
    guesses = jnp.argmax(jax.jit(task.logits)(params, stats, task.view(test_images)), -1)
    accuracy = float(np.mean(np.asarray(guesses) == test_labels))
    return Run(task.name, policy, losses, accuracy, seconds)


def with_policy(task: Task, policy: str) -> Callable[..., Any]:
    """Return the loss of ``task`` with ``policy`` on each of its blocks."""
    if policy == BASELINE:
        return task.loss
    return remat_kit.policy(policy, at=task.blocks)(task.loss)


def max_ulps(losses: np.ndarray, reference: np.ndarray) -> float:
    """Return the largest difference, in units in the last place of float32.

    >>> one = np.ones(1, np.float32)
    >>> max_ulps(one, one), max_ulps(one, np.nextafter(one, np.float32(2)))
    (0.0, 1.0)
    """
    if not (np.isfinite(losses).all() and np.isfinite(reference).all()):
        return float("inf")
    gap = np.abs(losses.astype(np.float64) - reference)
    return float(np.max(gap / np.spacing(np.maximum(np.abs(losses), np.abs(reference)))))


def compared(runs: list[Run]) -> list[Run]:
    """Fill in each run's distance from the baseline of its model."""
    base = {run.model: run.losses for run in runs if run.policy == BASELINE}
    return [
        dataclasses.replace(run, max_ulps=max_ulps(run.losses, base[run.model])) for run in runs
    ]


def table(runs: list[Run]) -> Table:
    """Lay the runs out, one row each."""
    out = Table(box=box.SIMPLE_HEAD)
    for name in ("model", "policy"):
        out.add_column(name, overflow="fold", min_width=8)
    for name in ("steps", "first", "last", "ulps", "accuracy", "ms/step"):
        out.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        out.add_row(
            run.model,
            run.policy,
            str(len(run.losses)),
            f"{run.losses[0]:.6f}",
            f"{run.losses[-1]:.6f}",
            f"{run.max_ulps:g}",
            f"{run.accuracy:.1%}",
            f"{1e3 * run.step_seconds:.2f}",
        )
    return out


def as_json(runs: list[Run], options: argparse.Namespace) -> str:
    """Return what was run, on what, and every loss."""
    modules = {"jax": jax, "flax": flax, "optax": optax, "numpy": np}
    versions = {name: module.__version__ for name, module in modules.items()}
    report = {
        "versions": {"python": platform.python_version(), **versions},
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "options": {
            name: getattr(options, name)
            for name in ("epochs", "batch", "seed", "tolerance_ulps", "smoke")
        },
        "runs": [
            {
                "model": run.model,
                "policy": run.policy,
                "max_ulps": run.max_ulps if np.isfinite(run.max_ulps) else None,
                "accuracy": run.accuracy,
                "step_seconds": run.step_seconds,
                "losses": [float(x) if np.isfinite(x) else None for x in run.losses],
            }
            for run in runs
        ],
    }
    return json.dumps(report, indent=1) + "\n"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _batch(text: str) -> int:
    most = len(digits(0)[1])
    if _count(text) > most:
        raise argparse.ArgumentTypeError(f"{text} is more than the {most} images there are")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**32 - 1")
    return int(text)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ulps, 0 or more")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    out = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    out.add_argument("--model", action="append", choices=TASKS, help="default: all")
    out.add_argument(
        "--policy",
        action="append",
        metavar="P",
        help="a policy as remat_kit.policy takes it; repeatable; default: nothing, dots. "
        f"The baseline, {BASELINE!r}, is always run",
    )
    out.add_argument("--epochs", type=_count, default=20)
    out.add_argument("--batch", type=_batch, default=64, help="images a step")
    out.add_argument("--seed", type=_seed, default=0)
    out.add_argument(
        "--tolerance-ulps",
        type=_tolerance,
        default=4.0,
        metavar="N",
        help="the largest difference of a float32 loss that passes (default: 4)",
    )
    out.add_argument("--json", type=_common.output, metavar="PATH", help="write every loss there")
    out.add_argument("--smoke", action="store_true", help="four steps an epoch, for tests")
    return out


def run_all(tasks: list[Task], policies: list[str], options: argparse.Namespace) -> list[Run]:
    """Train each task under each policy, with a progress bar on stderr."""
    steps = sum(1 for _ in batches(len(digits(options.seed)[1]), options))
    runs = []
    with _common.progress() as bar:
        for task in tasks:
            for policy in policies:
                job = bar.add_task(f"{task.name}, {policy}", total=steps)
                runs.append(train(task, policy, options, lambda job=job: bar.advance(job)))
    return compared(runs)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = parser().parse_args(argv)
    chosen = options.policy or ["nothing", "dots"]
    policies = [BASELINE, *(p for p in dict.fromkeys(chosen) if p != BASELINE)]
    try:
        tasks = [TASKS[name]() for name in dict.fromkeys(options.model or TASKS)]
        runs = run_all(tasks, policies, options)
        if options.json:
            options.json.write_text(as_json(runs, options))
    except (remat_kit.UserError, remat_kit.TargetError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console().print(table(runs))
    worst = max(runs, key=lambda run: run.max_ulps)
    if worst.max_ulps > options.tolerance_ulps:
        print(
            f"error: {worst.model} under {worst.policy!r} is {worst.max_ulps:g} ulps from the "
            f"baseline; at most {options.tolerance_ulps:g} pass",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
