"""Train MindSpore's MNIST example data-parallel on eight devices, with its ReLUs recomputed.

MindSpore's tutorial trains a network of 784-512-512-10 on eight cards: each card has all parameters
and 32 images, the gradients are averaged, and ``relu.recompute()`` marks what is computed again.
Here the cards are CPU devices of this process, the images are scikit-learn's digits (8x8 pixels
that ship with the package, enlarged to 28x28), and the mark is a policy. Beside it stands what
Paddle's Fleet does with ``strategy.recompute = True`` and
``strategy.recompute_configs = {"checkpoints": [...]}``: the values that it names are kept. Each is
one line:

    MindSpore   remat_kit.policy(recompute(primitive("max")), at="*/block_*")(loss)
    Fleet       remat_kit.policy(segments("hidden_0", "hidden_1"))(loss)

The losses of each way on eight devices are compared with those without recomputation on eight
devices and on one, and the report shows the graph of the first: which operations run twice.

    python benchmarks/data_parallel.py --json benchmarks/results/data_parallel.json

Exit status: 0 if recomputation changes no loss by more than ``ULPS`` units in the last place and
eight devices give the losses of one, 1 if not, 2 for a wrong call.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import _common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import train_digits
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import remat_kit
from remat_kit import primitive, recompute, segments

DEVICES = 8
BATCH = 32  # images of one device
RATE = 0.1
EPOCHS = 20
ULPS = 4.0  # as `train_digits.py` allows
FROM_ONE_DEVICE = 1e-5  # relative: eight devices add up a gradient in another order

Row = dict[str, Any]
Loss = Callable[..., jax.Array]  # (params, images, labels) to a scalar


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to recompute: whose it is, and the line that does it here."""

    name: str
    line: str
    apply: Callable[[Loss], Loss]


WAYS = (
    Way("none", "", lambda loss: loss),
    Way(
        "MindSpore, `relu.recompute()`",
        'policy(recompute(primitive("max")), at="*/block_*")',
        lambda loss: remat_kit.policy(recompute(primitive("max")), at="*/block_*")(loss),
    ),
    Way(
        "Fleet, `strategy.recompute`",
        'policy(segments("hidden_0", "hidden_1"))',
        lambda loss: remat_kit.policy(segments("hidden_0", "hidden_1"))(loss),
    ),
)


class Network(nn.Module):
    """The network of `models/mlp.py`, with a name on each hidden layer for Fleet's checkpoints."""

    @nn.compact
    def __call__(self, x):
        block = _block()
        x = remat_kit.name(nn.Dense(512, name="inputs")(x), "hidden_0")
        x = remat_kit.name(block(512, name="block_0")(x), "hidden_1")
        return block(10, name="block_1")(x)


@functools.cache
def _block() -> Any:
    return _common.load("mlp").Block


def loss_of(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross entropy of the network."""
    logits: Any = Network().apply({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def images_of_mnist_size() -> train_digits.Images:
    """Return the digits as rows of 784 pixels, each pixel enlarged to 3x3 with a margin of two."""

    def enlarged(images: np.ndarray) -> np.ndarray:
        large = np.kron(images, np.ones((1, 3, 3), images.dtype))
        return np.pad(large, ((0, 0), (2, 2), (2, 2))).reshape(len(images), -1)

    images, labels, test_images, test_labels = train_digits.digits(0)
    return enlarged(images), labels, enlarged(test_images), test_labels


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices in a row: the parameters are on each of them, and the images are divided."""

    count: int

    def on(self, *axes: str) -> NamedSharding:
        mesh = Mesh(np.array(jax.devices()[: self.count]), ("data",))
        return NamedSharding(mesh, PartitionSpec(*axes))

    def copied(self, tree: Any) -> Any:
        return jax.device_put(tree, self.on())

    def divided(self, *arrays: np.ndarray) -> tuple[jax.Array, ...]:
        return tuple(jax.device_put(array, self.on("data")) for array in arrays)


def batches(count: int, epochs: int) -> Iterator[np.ndarray]:
    """Yield the row numbers of each batch of all devices, shuffled anew in every epoch."""
    random, size = np.random.default_rng(0), DEVICES * BATCH
    for _ in range(epochs):
        for start in range(0, count - size + 1, size):
            if start == 0:
                order = random.permutation(count)
            yield order[start : start + size]


def train(loss: Loss, devices: Devices, epochs: int) -> tuple[np.ndarray, float]:
    """Train by gradient descent, and return every loss and the accuracy on images held out."""
    images, labels, test_images, test_labels = images_of_mnist_size()
    params = devices.copied(Network().init(jax.random.key(0), images[:1])["params"])

    @jax.jit
    def step(params: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, images, labels)
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradient), value

    values = []
    for rows in batches(len(labels), epochs):
        params, value = step(params, *devices.divided(images[rows], labels[rows]))
        values.append(value)
    logits = Network().apply({"params": params}, test_images)
    accuracy = float(np.mean(np.argmax(logits, -1) == test_labels))
    return np.asarray(jax.device_get(values), np.float32), accuracy


def shapes(devices: Devices) -> tuple[Any, ...]:
    """Return the shapes of parameters and of one batch, with their shardings."""

    def struct(leaf: Any, *axes: str) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=devices.on(*axes))

    size = DEVICES * BATCH
    images = jax.ShapeDtypeStruct((size, 784), jnp.float32)
    labels = jax.ShapeDtypeStruct((size,), jnp.int32)
    params = jax.eval_shape(Network().init, jax.random.key(0), images)["params"]
    return jax.tree.map(struct, params), struct(images, "data"), struct(labels, "data")


def row(way: Way, epochs: int) -> tuple[Row, np.ndarray]:
    """Train one way on all devices, and return its figures and its losses."""
    devices = Devices(DEVICES)
    loss = way.apply(loss_of)
    losses, accuracy = train(loss, devices, epochs)
    report = remat_kit.inspect(loss, *shapes(devices), target="cpu")
    (reading,) = report.readings.values()
    return {
        "way": way.name,
        "line": way.line,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "accuracy": accuracy,
        "saved_bytes": report.saved_bytes,
        "recomputed": sum(r.count for r in report.recomputed),
        "recomputed_flops": report.recomputed_flops,
        "forward_flops": report.forward_flops,
        "collectives": sum(c.times for c in reading.collectives),
        "repeated": sum(c.times for c in reading.collectives if c.repeated),
        "versions": dict(next(iter(report.memory.values())).versions),
    }, losses


def graph() -> str:
    """Return the gradient program of the tutorial's way, its repeated operations marked."""
    args = shapes(Devices(DEVICES))
    return remat_kit.diff(loss_of, WAYS[1].apply(loss_of), *args, labels=("plain", "again")).text()


def apart(losses: np.ndarray, others: np.ndarray) -> float:
    """Return the largest relative difference of losses.

    >>> apart(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
    0.5
    """
    return float(np.max(np.abs(losses - others) / np.abs(others)))


COLUMNS = (
    *("recomputation", "first loss", "last loss", "ulps", "from one device", "accuracy"),
    *("saved, KiB", "twice", "collectives", "repeated"),
)


def rendered(report: Any) -> str:
    """Return the report as Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    for found in report["rows"]:
        cells = [
            found["way"],
            f"{found['first_loss']:.6f}",
            f"{found['last_loss']:.6f}",
            f"{found['ulps']:g}",
            f"{found['from_one_device']:.1e}",
            f"{found['accuracy']:.1%}",
            f"{found['saved_bytes'] / 1024:.0f}",
            f"{found['recomputed']}",
            f"{found['collectives']}",
            f"{found['repeated']}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    about = (
        f"Training on {report['devices']} CPU devices with {report['batch']} images each, "
        f"{report['steps']} steps. *Ulps* is the largest difference of a loss from that without "
        "recomputation, in units in the last place; *from one device* is the largest relative "
        "difference from the losses of one device without it. *Saved* are the residuals of one "
        "device, *twice* the operations that the traced gradient computes a second time."
    )
    ways = [f"- {r['way']}: `remat_kit.{r['line']}(loss)`" for r in report["rows"] if r["line"]]
    shown = ["", "The gradient of the second row (⟲ marks what is computed again):", ""]
    shown += ["```", report["graph"], "```"]
    ending = _common.ending(report, about, compiled_only=False)
    return "\n".join([*lines, "", *ways, *shown, *ending])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _common.parser(__doc__, smoke="one epoch, for tests")
    options = parser.parse_args(given)
    epochs = 1 if options.smoke else EPOCHS
    jax.config.update("jax_platforms", "cpu")  # leaves an accelerator that is here alone
    jax.config.update("jax_num_cpu_devices", DEVICES)
    alone, _ = train(loss_of, Devices(1), epochs)
    found = []
    base = None
    with _common.progress() as bar:
        for way in bar.track(WAYS):
            figures, losses = row(way, epochs)
            base = losses if base is None else base
            gaps = {"ulps": train_digits.max_ulps(losses, base)}
            found.append(figures | gaps | {"from_one_device": apart(losses, alone)})
    report = _common.described(__file__, given, [found[0]["versions"]])
    report |= {"devices": DEVICES, "batch": BATCH, "steps": len(alone), "graph": graph()}
    report |= {"rows": _common.without(found, "versions")}
    table = rendered(report)
    if options.json:
        _common.write(options.json, report, table)
    print(table)
    same = all(r["ulps"] <= ULPS and r["from_one_device"] <= FROM_ONE_DEVICE for r in found)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
