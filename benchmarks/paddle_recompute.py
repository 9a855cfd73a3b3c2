"""Train Paddle's recompute example with and without recompute of chosen blocks, and compare.

The network of the example of ``paddle.distributed.fleet.utils.recompute``: five blocks of two
bias-free dense layers with dropout 0.5 between, the last with a third layer to one output; the loss
is the mean of the output, ten steps of gradient descent at 0.01. Paddle has two ways to say what is
computed again. ``recompute(block, x)`` calls a block so: here `remat_kit.policy("nothing")` on the
class of the chosen blocks, in Linen and in NNX. ``RecomputeOptimizer._set_checkpoints`` names the
values between which nothing is kept: here `remat_kit.segments` on the loss.

Losses, gradients and parameters of every step are held against those of no recompute, dropout
included; and each step is compiled for a CPU and an H100.

https://paddlepaddle.org.cn/documentation/docs/en/api/paddle/distributed/fleet/utils/recompute_en.html
https://paddlepaddle.org.cn/documentation/docs/en/2.2/api/paddle/fluid/optimizer/RecomputeOptimizer_en.html

    python benchmarks/paddle_recompute.py --json benchmarks/results/paddle_recompute.json

Exit status: 0 if all are equal to the last bit, 1 if not, 2 for a compiler that is not installed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import _common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from _common import MIB
from flax import nnx

import remat_kit

BLOCKS = 5
RATE = 0.01
DROPOUT = 0.5
STEPS = 10

Row = dict[str, Any]
Loss = Callable[..., jax.Array]  # (params, x, key) to a scalar


# -- the network, twice ----------------------------------------------------------------------------


class LinenBlock(nn.Module):
    """Two dense layers, dropout and two ReLUs; the last block has a layer to one output more."""

    last: bool = False

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(x.shape[-1], use_bias=False, name="fc_0")(x)
        y = nn.relu(nn.Dropout(DROPOUT, deterministic=False, name="dropout")(y))
        y = nn.relu(nn.Dense(x.shape[-1], use_bias=False, name="fc_1")(y))
        return nn.Dense(1, use_bias=False, name="fc_2")(y) if self.last else y


class LinenNet(nn.Module):
    """The blocks in a row, some of them recomputed; each block's output has the block's name."""

    recompute: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, x):
        again = remat_kit.policy("nothing")(LinenBlock)
        for i in range(BLOCKS):
            kind = again if i in self.recompute else LinenBlock
            x = remat_kit.name(kind(i == BLOCKS - 1, name=f"block_{i}")(x), f"block_{i}")
        return x


def linen(width: int, recompute: tuple[int, ...]) -> tuple[Loss, Any]:
    """Return the loss of the Linen network and its parameters."""
    model = LinenNet(recompute)
    first, second = jax.random.split(jax.random.key(0))
    variables = model.init({"params": first, "dropout": second}, jnp.zeros((1, width)))

    def loss(params, x, key):
        out: Any = model.apply({"params": params}, x, rngs={"dropout": key})
        return out.mean()

    return loss, variables["params"]


class NnxBlock(nnx.Module):
    """The same block; its dropout takes the key of the call."""

    def __init__(self, width: int, last: bool, rngs: nnx.Rngs):
        self.fc_0 = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(DROPOUT, deterministic=False)
        self.fc_1 = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.fc_2 = nnx.Linear(width, 1, use_bias=False, rngs=rngs) if last else None

    def __call__(self, x, rngs):
        y = nnx.relu(self.dropout(self.fc_0(x), rngs=rngs))
        y = nnx.relu(self.fc_1(y))
        return y if self.fc_2 is None else self.fc_2(y)


class NnxNet(nnx.Module):
    """The blocks in a row, some of them recomputed."""

    def __init__(self, width: int, recompute: tuple[int, ...], rngs: nnx.Rngs):
        again = remat_kit.policy("nothing")(NnxBlock)
        for i in range(BLOCKS):
            kind = again if i in recompute else NnxBlock
            setattr(self, f"block_{i}", kind(width, i == BLOCKS - 1, rngs))

    def __call__(self, x, rngs):
        for i in range(BLOCKS):
            x = remat_kit.name(getattr(self, f"block_{i}")(x, rngs), f"block_{i}")
        return x


def in_nnx(width: int, recompute: tuple[int, ...]) -> tuple[Loss, Any]:
    """Return the loss of the NNX network and its parameters."""
    graph, params = nnx.split(NnxNet(width, recompute, nnx.Rngs(0)))

    def loss(params, x, key):
        return nnx.merge(graph, params)(x, nnx.Rngs(dropout=key)).mean()

    return loss, nnx.to_pure_dict(params)


# -- ways to recompute -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Way:
    """Blocks called through ``recompute``, or the checkpoints given to the optimizer."""

    recompute: tuple[int, ...] = ()
    checkpoints: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.checkpoints:
            return f"checkpoints {', '.join(self.checkpoints)}"
        return f"blocks {', '.join(map(str, self.recompute))}" if self.recompute else "none"

    def build(self, form: str, width: int) -> tuple[Loss, Any]:
        """Return the loss with this recompute, and the first parameters."""
        loss, params = FORMS[form](width, self.recompute)
        if self.checkpoints:
            loss = remat_kit.policy(remat_kit.segments(*self.checkpoints))(loss)
        return loss, params


FORMS: Mapping[str, Callable[[int, tuple[int, ...]], tuple[Loss, Any]]]
FORMS = {"Linen": linen, "NNX": in_nnx}
WAYS = (
    Way(),
    Way(recompute=(1, 3)),
    Way(recompute=tuple(range(BLOCKS))),
    Way(checkpoints=("block_1", "block_3")),
    Way(checkpoints=tuple(f"block_{i}" for i in range(BLOCKS))),
)


# -- training --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """What every step of a training run gave."""

    losses: list[np.ndarray]
    gradients: list[Any]
    parameters: list[Any]


def batch_of(step: int, batch: int, width: int) -> np.ndarray:
    """Return the step's inputs, the same in every run."""
    return np.random.default_rng(step).standard_normal((batch, width), np.float32)


def train(loss: Loss, params: Any, batch: int, width: int) -> Run:
    """Train by gradient descent, keeping everything."""

    @jax.jit
    def step(params, x, key):
        value, gradient = jax.value_and_grad(loss)(params, x, key)
        return value, gradient, jax.tree.map(lambda p, g: p - RATE * g, params, gradient)

    run = Run([], [], [])
    for number in range(STEPS):
        x, key = batch_of(number, batch, width), jax.random.PRNGKey(number)
        value, gradient, params = step(params, x, key)
        run.losses.append(np.asarray(value))
        run.gradients.append(jax.device_get(gradient))
        run.parameters.append(jax.device_get(params))
    return run


def difference(a: Any, b: Any) -> float:
    """Return the largest difference of two pytrees, in parts of the largest value of each array.

    >>> difference({"w": np.array([1.0, 4.0])}, {"w": np.array([1.0, 3.0])})
    0.25
    """

    def one(x: np.ndarray, y: np.ndarray) -> float:
        size = max(np.max(np.abs(x)), np.max(np.abs(y)))
        gap = np.max(np.abs(x - y))
        return float(gap / size) if gap else 0.0

    return max(jax.tree.leaves(jax.tree.map(one, a, b)))


def rows(batch: int, width: int, targets: Sequence[str]) -> Iterator[Row]:
    """Train each form in each way, and compile its gradient."""
    with _common.progress() as bar:
        job = bar.add_task("", total=len(FORMS) * len(WAYS))
        for form in FORMS:
            base: Run | None = None
            for way in WAYS:
                bar.update(job, description=f"{form}, {way}")
                loss, params = way.build(form, width)
                run = train(loss, params, batch, width)
                base = base or run
                args = params, batch_of(0, batch, width), jax.random.PRNGKey(0)
                report = remat_kit.inspect(loss, *args, label=str(way))
                yield {
                    "form": form,
                    "way": str(way),
                    "losses": [float(x) for x in run.losses],
                    "difference": {
                        "losses": difference(run.losses, base.losses),
                        "gradients": difference(run.gradients, base.gradients),
                        "parameters": difference(run.parameters, base.parameters),
                    },
                    "saved_bytes": report.saved_bytes,
                    "recomputed_flops": report.recomputed_flops,
                    "forward_flops": report.forward_flops,
                    "memory": {
                        name: remat_kit.measure(loss, *args, target=name).to_json()
                        for name in targets
                    },
                }
                bar.advance(job)


# -- the report ------------------------------------------------------------------------------------

_ABOUT = (
    "Five blocks, {steps} steps, {batch} rows of {width} numbers, float32, run on a CPU. "
    "*Difference*: the largest over all steps from the run without recompute, in parts of the "
    "largest value of the array; 0 is equal to the last bit. *Computed twice*: FLOPs in parts of "
    "the forward pass. Temporaries of the compiled `value_and_grad` in MiB."
)


def rendered(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    targets = list(report["rows"][0]["memory"])
    lines = [
        "| network | recomputed | difference of losses | gradients | parameters | saved MiB | "
        f"computed twice | {' | '.join(targets)} |",
        "|---|---|---:|---:|---:|---:|---:|" + "---:|" * len(targets),
        *(_line(row) for row in report["rows"]),
    ]
    return "\n".join([*lines, *_common.ending(report, _ABOUT.format(**report))])


def _line(row: Row) -> str:
    cells = [
        *(f"{gap:.1g}" if gap else "0" for gap in row["difference"].values()),
        f"{row['saved_bytes'] / MIB:.2f}",
        f"{row['recomputed_flops'] / row['forward_flops']:.2f}",
        *(f"{memory['temp_bytes'] / MIB:.2f}" for memory in row["memory"].values()),
    ]
    return f"| {row['form']} | {row['way']} | {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _common.parser(__doc__, smoke="Paddle's own size and the CPU alone, for tests")
    parser.add_argument("--target", nargs="+", default=["cpu", "h100"], metavar="T")
    options = parser.parse_args(given)
    batch, width = (4, 10) if options.smoke else (1024, 256)
    targets = ["cpu"] if options.smoke else options.target
    jax.config.update("jax_platforms", "cpu")  # leaves an accelerator that is here alone
    try:
        found = list(rows(batch, width, targets))
    except remat_kit.RematKitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    versions = (memory["versions"] for row in found for memory in row["memory"].values())
    report = _common.described(__file__, given, versions)
    report |= {"steps": STEPS, "batch": batch, "width": width, "rows": found}
    table = rendered(report)
    if options.json:
        _common.write(options.json, report, table)
    print(table)
    return int(any(gap for row in found for gap in row["difference"].values()))


if __name__ == "__main__":
    sys.exit(main())
