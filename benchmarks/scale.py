"""How long does planning take, and how much memory, for programs of 10³, 10⁴ and 10⁵ operations?

Each program is planned in a process of its own, for a CPU and without compiling. ``traced`` is the
processor time that JAX takes to trace the loss once, ``planned`` that of
``remat_kit.frontier(loss, *args, target="cpu")``, which traces the loss too. Processor time counts
all threads, and other programs on the machine change it little. The programs are transformers: in
the equal one, all layers are alike; in the differing one, each layer has its own widths, number of
heads and activation. The scan has 24 iterations.

    python benchmarks/scale.py --json benchmarks/results/scale.json

Exit status: 0 when done, 1 if planning took longer than the limit, 2 for a wrong call.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import _common
import jax
import jax.numpy as jnp

_BATCH, _SEQ, _WIDTH = 8, 256, 512


@dataclasses.dataclass(frozen=True)
class Program:
    """A transformer, and the most processor seconds that planning it may take.

    Attributes:
        name: what the table calls it.
        layers: the number of layers, of about 60 operations each.
        differing: whether no two neighbouring layers are alike.
        iterations: 0 for a program without a scan; else all layers are the body of a scan.
        limit: the most processor seconds of planning.
    """

    name: str
    layers: int
    limit: float
    differing: bool = False
    iterations: int = 0


PROGRAMS = {
    "equal-1e3": Program("equal layers, 10³", 17, 5),
    "differing-1e3": Program("differing layers, 10³", 17, 5, differing=True),
    "equal-1e4": Program("equal layers, 10⁴", 170, 10),
    "differing-1e4": Program("differing layers, 10⁴", 170, 10, differing=True),
    "equal-1e5": Program("equal layers, 10⁵", 1640, 120),
    "differing-1e5": Program("differing layers, 10⁵", 1640, 120, differing=True),
    "scan-1e3": Program("scan, equal layers, 10³", 17, 20, iterations=24),
    "scan-differing-1e3": Program(
        "scan, differing layers, 10³", 17, 20, differing=True, iterations=24
    ),
}
SMOKE = {
    "equal": Program("equal layers", 2, 60),
    "differing": Program("differing layers", 3, 60, differing=True),
    "scan": Program("scan", 1, 60, iterations=4),
}


# -- the programs ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The shape of one layer."""

    heads: int = 8
    hidden: int = 4 * _WIDTH
    act: Callable[[Any], Any] = jax.nn.gelu

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters."""
        return {
            "norm1": (_WIDTH,),
            "qkv": (_WIDTH, 3 * _WIDTH),
            "out": (_WIDTH, _WIDTH),
            "norm2": (_WIDTH,),
            "up": (_WIDTH, self.hidden),
            "down": (self.hidden, _WIDTH),
        }

    def __call__(self, w: Any, x: Any) -> Any:
        """Apply attention and a feed-forward layer to ``x`` (batch, sequence, width)."""
        with jax.named_scope("attention"):
            x = x + self.attention(w, _normed(x, w["norm1"]))
        with jax.named_scope("mlp"):
            return x + self.act(_normed(x, w["norm2"]) @ w["up"]) @ w["down"]

    def attention(self, w: Any, x: Any) -> Any:
        batch, seq, width = x.shape
        heads = (x @ w["qkv"]).reshape(batch, seq, 3, self.heads, width // self.heads)
        query, key, value = (heads[:, :, i] for i in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // self.heads) ** -0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        return mixed.reshape(x.shape) @ w["out"]


def _normed(x: Any, scale: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    norm = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
    return centred * norm * scale[None, None]


def _layers(program: Program) -> list[_Layer]:
    if not program.differing:
        return [_Layer()] * program.layers
    drawn = random.Random(0)
    acts = (jax.nn.gelu, jax.nn.silu, jax.nn.relu, jnp.tanh, jax.nn.softplus)
    return [
        _Layer(drawn.choice((4, 8, 16)), 256 * drawn.randint(2, 12), drawn.choice(acts))
        for _ in range(program.layers)
    ]


def built(program: Program) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """Return the loss of a program and the shapes of its parameters and its input."""
    layers = _layers(program)
    times = (program.iterations,) if program.iterations else ()
    weights = [
        {name: jax.ShapeDtypeStruct((*times, *s), jnp.float32) for name, s in w.items()}
        for w in (layer.weights() for layer in layers)
    ]

    def apply(weights: Any, x: Any) -> Any:
        for number, (layer, w) in enumerate(zip(layers, weights, strict=True)):
            with jax.named_scope(f"layer_{number}"):
                x = layer(w, x)
        return x

    def loss(weights: Any, x: Any) -> Any:
        if program.iterations:
            x, _ = jax.lax.scan(lambda x, w: (apply(w, x), None), x, weights)
        else:
            x = apply(weights, x)
        return jnp.mean(jnp.square(x))

    return loss, (weights, jax.ShapeDtypeStruct((_BATCH, _SEQ, _WIDTH), jnp.float32))


# -- measuring ------------------------------------------------------------------------------------


def measured(program: Program) -> dict[str, Any]:
    """Plan a program in this process, and return its processor seconds and its peak memory."""
    import remat_kit

    loss, args = built(program)
    begun = time.process_time()
    jaxpr = jax.make_jaxpr(loss)(*args).jaxpr
    traced = time.process_time() - begun
    before = _peak_bytes()
    begun = time.process_time()
    found = remat_kit.frontier(loss, *args, target="cpu")
    planned = time.process_time() - begun
    return {
        "program": program.name,
        "equations": max(found.equations, _inner(jaxpr)),
        "traced_seconds": traced,
        "planned_seconds": planned,
        "limit_seconds": program.limit,
        "points": len(found.points),
        "least_bytes": found.points[0].predicted_peak_bytes,
        "most_bytes": found.points[-1].predicted_peak_bytes,
        "process_bytes_before": before,
        "process_bytes": _peak_bytes(),
    }


def _inner(jaxpr: Any) -> int:
    """Return the number of operations of the largest scan body, without those of inner calls."""
    bodies = (e.params["jaxpr"].jaxpr for e in jaxpr.eqns if e.primitive.name == "scan")
    return max((len(body.eqns) for body in bodies), default=0)


def _peak_bytes() -> int:
    """Return the most memory that this process has had, in bytes (on Linux and on macOS)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def rows(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Measure each program in a process of its own."""
    with _common.progress() as bar:
        job = bar.add_task("", total=len(names))
        for name in names:
            bar.update(job, description=(PROGRAMS | SMOKE)[name].name)
            command = [sys.executable, __file__, "--only", name]
            done = subprocess.run(
                command,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
            yield json.loads(done.stdout)
            bar.advance(job)


def rendered(report: dict[str, Any]) -> str:
    """Return a report as Markdown."""
    lines = [
        "| program | operations | traced s | planned s | limit s | µs per operation | points | "
        "process MiB, before → after |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        each = 1e6 * row["planned_seconds"] / row["equations"]
        before, after = (
            row[key] / _common.MIB for key in ("process_bytes_before", "process_bytes")
        )
        lines.append(
            f"| {row['program']} | {row['equations']:,} | {row['traced_seconds']:.1f} | "
            f"{row['planned_seconds']:.1f} | {row['limit_seconds']:.0f} | {each:,.0f} | "
            f"{row['points']} | {before:,.0f} → {after:,.0f} |"
        )
    about = (
        "Processor time of one process, all threads together. Planned for a CPU, without compiling."
    )
    return "\n".join([*lines, *_common.ending(report, about)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _common.parser(__doc__)
    parser.add_argument(
        "--program", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME"
    )
    parser.add_argument(
        "--only", choices=[*PROGRAMS, *SMOKE], metavar="NAME", help="measure here, print JSON"
    )
    options = parser.parse_args(given)
    if options.only:
        print(json.dumps(measured((PROGRAMS | SMOKE)[options.only])))
        return 0
    names = list(SMOKE) if options.smoke else options.program
    versions = {name: __import__(name).__version__ for name in ("jax", "jaxlib", "numpy", "scipy")}
    report = _common.described(__file__, given, [versions])
    report["rows"] = list(rows(names))
    table = rendered(report)
    if options.json is not None:
        _common.write(options.json, report, table)
    print(table)
    return int(any(row["planned_seconds"] > row["limit_seconds"] for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
