"""Redo the pictures of MindSpore's recomputation tutorial: which operations a gradient repeats.

The MLP with its ReLU recomputed, and ResNet-50 with its convolutions recomputed: the gradient
programs with and without the policy, aligned, every duplicated operation marked; and a picture of
what is around one of them before and after. Nothing is compiled; it takes some seconds.

    python benchmarks/mindspore_graphs.py --out benchmarks/results

Exit status: 0 when done, 2 for a wrong call.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import _common
import jax
from _common import Case

import remat_kit
from remat_kit import primitive, recompute

# (the name of the files, the model, the operation that is recomputed)
CASES = (
    ("mindspore_mlp", Case("MLP", "mlp", {}), "max"),
    ("mindspore_resnet50", Case("ResNet-50", "resnet", {"depth": 50}), "conv_general_dilated"),
)
_TINY = {"depth": 18, "batch": 2, "image": 32, "width": 4}
SMOKE = (CASES[0], ("mindspore_resnet18", Case("ResNet-18", "resnet", _TINY), CASES[1][2]))

# What only views or reshapes a value is left out of the pictures.
VIEWS = ("reshape", "transpose", "broadcast_in_dim", "squeeze", "convert_element_type", "copy")


# -- the graph around a duplicate -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Node:
    """One operation of a picture."""

    label: str
    phase: str
    order: int
    duplicate: bool = False


@dataclasses.dataclass(frozen=True)
class Graph:
    """Operations, and which reads which: pairs (maker, reader)."""

    nodes: Mapping[str, Node]
    edges: tuple[tuple[str, str], ...]


def graphs(diff: remat_kit.Diff, duplicate: Any) -> tuple[Graph, Graph]:
    """Return what is around a duplicate: before, where its twin is read, and after.

    Args:
        diff: of the two gradient programs.
        duplicate: one of its ``duplicates``.
    """
    after = _whole(diff)
    twins = {d.id: d.twin for d in diff.duplicates}
    before = _renamed(after, twins)
    near = _near(after, {duplicate.id, duplicate.twin})
    return _cut(before, {twins.get(n, n) for n in near}), _cut(after, near)


def _whole(diff: remat_kit.Diff) -> Graph:
    nodes: dict[str, Node] = {}
    stands_for: dict[str, str] = {}  # a view, and what it is a view of
    edges = []
    for order, line in enumerate(diff.lines):
        if line.sign == "-":
            continue
        read = [stands_for.get(name, name).partition(".")[0] for name in line.operands]
        makers = [name for name in read if name in nodes]
        if line.op.primitive in VIEWS and line.duplicate is None and len(makers) == 1:
            stands_for[line.id] = makers[0]
            continue
        nodes[line.id] = Node(_label(line), line.phase, order, line.duplicate is not None)
        edges += [(maker, line.id) for maker in makers]
    return Graph(nodes, tuple(dict.fromkeys(edges)))


def _label(line: Any) -> str:
    shape = ",".join(map(str, line.op.eqn.outvars[0].aval.shape))
    module = line.op.module.partition("/")[2]
    return "\n".join(filter(None, (line.op.primitive, f"[{shape}]", module)))


def _renamed(graph: Graph, twins: Mapping[str, str]) -> Graph:
    nodes = {name: node for name, node in graph.nodes.items() if name not in twins}
    edges = ((twins.get(a, a), b) for a, b in graph.edges if b not in twins)
    return Graph(nodes, tuple(dict.fromkeys(edges)))


def _near(graph: Graph, middle: set[str]) -> set[str]:
    """The operations that read one of ``middle``, what both read, and what reads the readers."""
    readers = {b for a, b in graph.edges if a in middle}
    around = middle | readers
    makers = {a for a, b in graph.edges if b in around}
    return around | makers


def _cut(graph: Graph, names: Iterable[str]) -> Graph:
    kept = {name: graph.nodes[name] for name in graph.nodes if name in set(names)}
    return Graph(kept, tuple((a, b) for a, b in graph.edges if a in kept and b in kept))


# -- the picture ------------------------------------------------------------------------------

FILL = {"forward": "#dbe7f5", "backward": "#f6dfe3", "duplicate": "#f9d98a"}


def draw(pair: Sequence[Graph], titles: Sequence[str], path: pathlib.Path) -> None:
    """Draw two graphs: the forward pass down on the left, the backward pass up on the right."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = max(max(_columns(graph).values(), default=1) for graph in pair)
    figure = Figure(figsize=(13, 0.95 * rows + 1.6), layout="constrained", facecolor="white")
    for axes, graph, title in zip(figure.subplots(1, 2), pair, titles, strict=True):
        places = _places(graph, rows)
        boxes = {}
        for name, node in graph.nodes.items():
            kind = "duplicate" if node.duplicate else node.phase
            boxes[name] = axes.text(
                *places[name],
                f"{name} {node.label}",
                ha="center",
                va="center",
                fontsize=7.5,
                zorder=3,
                bbox={
                    "boxstyle": "round,pad=0.4",
                    "facecolor": FILL[kind],
                    "edgecolor": "#b7791f" if node.duplicate else "#9ca3af",
                },
            )
        for a, b in graph.edges:
            again = graph.nodes[a].duplicate
            axes.annotate(
                "",
                places[b],
                places[a],
                zorder=1,
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": "#b7791f" if again else "#6b7280",
                    "linewidth": 1.3 if again else 0.8,
                    "patchA": boxes[a].get_bbox_patch(),
                    "patchB": boxes[b].get_bbox_patch(),
                    "connectionstyle": f"arc3,rad={0.45 if _far(places[a], places[b]) else 0}",
                },
            )
        axes.set_xlim(-0.65, 2.65)
        axes.set_ylim(-rows + 0.4, 0.6)
        axes.set_title(title, loc="left", fontsize=10)
        axes.axis("off")
    names = {"forward": "forward", "duplicate": "computed again", "backward": "gradient"}
    handles = [Patch(facecolor=FILL[k], edgecolor="#9ca3af", label=v) for k, v in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _far(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Whether there may be boxes between two of one column."""
    return a[0] == b[0] and abs(a[1] - b[1]) > 1


def _column(node: Node) -> float:
    return 1.0 if node.duplicate else 0.0 if node.phase == "forward" else 2.0


def _columns(graph: Graph) -> dict[float, int]:
    return dict(collections.Counter(_column(node) for node in graph.nodes.values()))


def _places(graph: Graph, rows: int) -> dict[str, tuple[float, float]]:
    places = {}
    for x in (0.0, 1.0, 2.0):
        mine = [name for name, node in graph.nodes.items() if _column(node) == x]
        mine.sort(key=lambda name: graph.nodes[name].order, reverse=x > 0)
        first = -(rows - len(mine)) / 2
        places |= {name: (x, first - i) for i, name in enumerate(mine)}
    return places


# -- the command ------------------------------------------------------------------------------


def _ending(described: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in described["versions"].items())
    return f"\n\nTaken on {described['date']} with {versions}, by\n{described['command']}\n"


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = sys.argv[1:] if argv is None else argv
    parser = _common.parser(__doc__)
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="DIR",
        help="write the texts there, and the pictures to the folder raw in it",
    )
    options = parser.parse_args(given)
    if options.out and not options.out.is_dir():
        parser.error(f"--out: {str(options.out)!r} is not a folder")
    jax.config.update("jax_platforms", "cpu")  # leaves an accelerator that is here alone
    described = _common.described(__file__, given, [{"jax": jax.__version__}])
    results = []
    for name, case, again in SMOKE if options.smoke else CASES:
        policy = recompute(primitive(again))
        plain, args = case.loss("none")
        labels = (f"{case.name}", repr(policy))
        diff = remat_kit.diff(plain, case.loss(policy)[0], *args, labels=labels)
        print(diff.summary)
        results.append({"model": case.name, "size": dict(case.size)} | diff.to_json())
        if options.out:
            text = f"{diff.text()}{_ending(described)}"
            (options.out / f"{name}.txt").write_text(text, encoding="utf-8")
            chosen = diff.duplicates[-1]
            titles = (f"{labels[0]}: around {chosen.twin} without a policy", labels[1])
            pictures = options.out / "raw"
            pictures.mkdir(exist_ok=True)
            draw(graphs(diff, chosen), titles, pictures / f"{name}.png")
    if options.json:
        _common.write_json(options.json, described | {"results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
