"""Train with a plan and without on real images, and show that the two runs are one.

The images are 32x32 crops in colour of the two photographs that ship with scikit-learn, and the
class is where a crop comes from: each photograph is cut into six places. A crop covers 96x96
pixels of the photograph, shrunk, some of them flipped, darker or brighter; no position is both
trained on and tested, though the crops overlap. The network is a VGG-11, 16 channels wide, trained
for two epochs with Adam from the same seed, once as it is and once with `remat_kit.plan(...,
budget=...)`. It runs on the CPU, whatever chip the plan is made for.

With batch normalization, as in a ResNet, XLA fuses, and so rounds, the two programs differently,
and the losses drift apart.

    python benchmarks/train_cifar_like.py --target h100 \\
        --json benchmarks/results/train_cifar_like.json \\
        --png train_cifar_like.png

Exit status: 0 if the accuracies are equal and every loss within ``--tolerance-ulps``, 1 if not, 2
for a wrong call or a budget that cannot be met.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import _common
import jax
import numpy as np
from _common import MIB
from sklearn.datasets import load_sample_images
from train_digits import BASELINE, Images, Task, batches, cross_entropy, max_ulps, trained

import remat_kit

ROWS, COLUMNS = 2, 3  # places in each photograph
SIDE, SHRINK = 32, 3  # pixels of an image, and of the photograph for each of them
PLACES = 2 * ROWS * COLUMNS
TRAINED, TESTED = 200, 40  # images of each place


# -- the images ------------------------------------------------------------------------------------


def places(seed: int) -> Images:
    """Return train images, train labels, test images, test labels; pixels in [0, 1] and beyond."""
    rng = np.random.default_rng(seed)
    found = [crops(place, rng) for photo in photographs() for place in cut(photo)]
    train = [(image, label) for label, images in enumerate(found) for image in images[:TRAINED]]
    test = [(image, label) for label, images in enumerate(found) for image in images[TRAINED:]]
    return (*_shuffled(train, rng), *_shuffled(test, rng))


def photographs() -> list[np.ndarray]:
    """Return scikit-learn's two photographs, a temple and a flower, as (427, 640, 3) bytes."""
    data: Any = load_sample_images()
    return data.images


def cut(photo: np.ndarray) -> list[np.ndarray]:
    """Cut a photograph into places of equal size.

    >>> [place.shape for place in cut(np.zeros((8, 9, 3)))]
    [(4, 3, 3), (4, 3, 3), (4, 3, 3), (4, 3, 3), (4, 3, 3), (4, 3, 3)]
    """
    height, width = photo.shape[0] // ROWS, photo.shape[1] // COLUMNS
    return [
        photo[row * height : (row + 1) * height, column * width : (column + 1) * width]
        for row in range(ROWS)
        for column in range(COLUMNS)
    ]


def crops(place: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the images of a place, each from another position."""
    size = SIDE * SHRINK
    across = place.shape[1] - size + 1
    positions = rng.permutation((place.shape[0] - size + 1) * across)[: TRAINED + TESTED]
    images = []
    for top, left in zip(*np.divmod(positions, across), strict=True):
        crop = place[top : top + size, left : left + size] / np.float32(255)
        image = crop.reshape(SIDE, SHRINK, SIDE, SHRINK, 3).mean((1, 3))
        image = image[:, ::-1] if rng.random() < 0.5 else image
        images.append(image * rng.uniform(0.8, 1.2))
    return np.asarray(images, np.float32)


def _shuffled(
    examples: Sequence[tuple[np.ndarray, int]], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    order = rng.permutation(len(examples))
    images, labels = zip(*(examples[i] for i in order), strict=True)
    return np.asarray(images), np.asarray(labels, np.int32)


# -- the network -----------------------------------------------------------------------------------


def task() -> Task:
    """VGG-11, 16 channels wide, without dropout."""
    vgg = _common.load("vgg")
    model = vgg.VGG(11, PLACES, width=16, hidden=128, dropout=0.0)

    def logits(params, stats, inputs):
        return model.apply({"params": params}, inputs)

    return Task("vgg11", vgg.BLOCKS, lambda x: x, model.init, cross_entropy(logits), logits)


def planned(chosen: Task, data: Images, options: Any) -> remat_kit.Plan:
    """Return the plan for the loss of one batch."""
    images, labels = data[0][: options.batch], data[1][: options.batch]
    variables = chosen.init(jax.random.key(options.seed), images[:1])
    args = variables["params"], {}, images, labels
    return remat_kit.plan(chosen.loss, *args, budget=options.budget, target=options.target)


# -- the report ------------------------------------------------------------------------------------


def compared(options: Any) -> dict[str, Any]:
    """Train without and with the plan, and return both runs."""
    chosen, data = task(), places(options.seed)
    with _common.progress() as bar:
        job = bar.add_task("planning", total=None)
        plan = planned(chosen, data, options)
        steps = sum(1 for _ in batches(len(data[1]), options))
        runs = []
        for name, loss in (
            (BASELINE, chosen.loss),
            ("plan", remat_kit.policy(plan)(chosen.loss)),
        ):
            bar.update(job, description=name, total=2 * steps)
            runs.append(trained(chosen, name, loss, data, options, lambda: bar.advance(job)))
    assert plan.compiled is not None
    return {
        "target": plan.target,
        "batch": options.batch,
        "epochs": options.epochs,
        "plan": plan.to_json(),
        "max_ulps": max_ulps(runs[1].losses, runs[0].losses),
        "runs": [
            {"name": run.policy, "accuracy": run.accuracy, "losses": run.losses.tolist()}
            for run in runs
        ],
        "versions": dict(plan.compiled.versions),
    }


def rendered(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    plan = report["plan"]
    sizes = (plan["baseline_temp_bytes"], plan["compiled_temp_bytes"])
    extra = (0.0, plan["extra_flops_fraction"])
    lines = [
        "| run | steps | first loss | last loss | accuracy | temporaries MiB | extra FLOPs |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {run['name']} | {len(run['losses'])} | {run['losses'][0]:.6f} | "
            f"{run['losses'][-1]:.6f} | {100 * run['accuracy']:.1f} % | {size / MIB:.1f} | "
            f"{100 * more:.0f} % |"
            for run, size, more in zip(report["runs"], sizes, extra, strict=True)
        ),
    ]
    about = (
        f"VGG-11, {report['epochs']} epochs of {report['batch']} images a step, on a CPU; "
        f"accuracy on {PLACES * TESTED} images that were not trained on, of {PLACES} classes. The "
        f"largest difference of a loss is {report['max_ulps']:g} units in the last place. "
        f"Temporaries of the compiled step on {report['target']}, extra FLOPs in parts of the "
        "forward pass."
    )
    return "\n".join([*lines, *_common.ending(report, about)])


def draw(report: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw one loss curve over the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    plan = report["plan"]
    sizes = (plan["baseline_temp_bytes"], plan["compiled_temp_bytes"])
    styles: list[dict[str, Any]] = [
        {"color": "#9ec5e8", "linewidth": 5},
        {"color": "#b3372f", "linewidth": 1.2, "linestyle": (0, (5, 2))},
    ]
    for run, size, style in zip(report["runs"], sizes, styles, strict=True):
        label = f"{run['name']}: {size / MIB:.1f} MiB, {100 * run['accuracy']:.1f} % right"
        axes.plot(range(1, len(run["losses"]) + 1), run["losses"], label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _common.parser(__doc__, smoke="four steps an epoch, for tests")
    parser.add_argument("--budget", default="min", help="of the plan (default: min)")
    parser.add_argument("--target", default="cpu", metavar="T", help="to plan for (default: cpu)")
    parser.add_argument("--tolerance-ulps", type=float, default=4.0, metavar="N")
    parser.add_argument("--png", type=_common.output, metavar="PATH", help="draw the losses there")
    parser.set_defaults(epochs=2, batch=64, seed=0)
    options = parser.parse_args(given)
    jax.config.update("jax_platforms", "cpu")  # leaves an accelerator that is here alone
    try:
        remat_kit.target(options.target)  # an unknown one is said before the images are read
        found = compared(options)
    except remat_kit.RematKitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = _common.described(__file__, given, [found.pop("versions")]) | found
    table = rendered(report)
    if options.json:
        _common.write(options.json, report, table)
    if options.png:
        draw(report, options.png)
    print(table)
    first, second = (run["accuracy"] for run in report["runs"])
    return int(first != second or report["max_ulps"] > options.tolerance_ulps)


if __name__ == "__main__":
    sys.exit(main())
