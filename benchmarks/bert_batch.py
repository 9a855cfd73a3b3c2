"""Find the largest batch of BERT-Large that trains on one chip, and what a sentence then takes.

Paddle's table of recomputation (sequences of 512 tokens, mixed precision, a V100 with 32 GB): 18
sentences without, 180 with each layer recomputed, 258 with the kept layer inputs in the host's
memory. Here a whole training step is compiled for each batch size tried: parameters and Adam's two
moments in float32, donated, activations in half precision. The layers are one scan.

    python benchmarks/bert_batch.py --target v100-32g --json benchmarks/results/bert_batch_v100.json
    python benchmarks/bert_batch.py --target tpu-v5e --layers none "per-layer"

What was compiled before comes from the cache: a run that was cut off goes on where it was.

Exit status: 0 when done, 2 for a wrong call or a compiler that is not installed.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import _common
import jax
import optax
from _common import Case
from gpt3_memory import training_step

import remat_kit
from remat_kit._chip.compile import Compiled, compile_program
from remat_kit._chip.target import Target
from remat_kit._compiled import hlo as _hlo
from remat_kit._compiled import peak as _peak
from remat_kit._compiled.roofline import estimate

GIB = 2**30
# Paddle's rows: sentences in a batch, sentences a second.
PUBLISHED = {"none": (18, 23.94), "per-layer": (180, 17.82), "per-layer+offload": (258, 15.47)}
# Ways that are planned for each batch size: whether they may offload, and the multiple of the batch
# of none at which the fastest plan is asked for (Paddle's).
PLANS = {"plan": (False, 10), "plan+offload": (True, 14)}
HALF = {"v100-32g": "f16"}  # a V100's matrix units have no bfloat16


@dataclasses.dataclass(frozen=True)
class Layers:
    """What is kept of each layer; batches are multiples of ``step``, ``start`` is for 32 GiB."""

    name: str
    policy: Any
    start: int
    step: int
    scan: bool = True
    room: int = 4  # times the memory that XLA is told of


WAYS = {
    way.name: way
    for way in (
        Layers("none", "none", 16, 1),
        Layers("per-layer", "nothing", 368, 16),
        Layers(
            "per-layer+offload",
            remat_kit.offload(remat_kit.named("layer_input")),
            544,
            16,
        ),
        Layers("plan", "none", 720, 16),
        Layers("plan+offload", "none", 720, 16, room=16),
        Layers("none-unrolled", "none", 26, 2, scan=False),
    )
}
CASE = Case("BERT-Large", "bert", {"size": "large", "seq": 512})
OPTIMIZER = optax.adamw(1e-4)
SMOKE = Case("BERT, four layers", "bert", {"size": "tiny", "layers": 4})

Row = dict[str, Any]
Step = tuple[Callable[..., Any], tuple[Any, ...]]


# -- the step ------------------------------------------------------------------------------------


def stepped(loss: Callable[..., Any], args: tuple[Any, ...]) -> Step:
    """Return a whole training step with Adam, and its arguments: moments and count too."""
    params, *batch = args
    state = jax.eval_shape(OPTIMIZER.init, params)
    return training_step(loss, OPTIMIZER), (params, state, *batch)


@dataclasses.dataclass(frozen=True)
class Way:
    """Layers on one chip: makes a loss or a training step for a batch size."""

    case: Case
    layers: Layers
    chip: Target

    def loss(self, batch: int) -> Step:
        """Build the loss and its arguments."""
        dtype = HALF.get(self.chip.name.partition("@")[0], "bf16")
        size = {**self.case.size, "batch": batch, "dtype": dtype, "scan": self.layers.scan}
        return dataclasses.replace(self.case, size=size).loss(self.layers.policy)

    def build(self, batch: int = 8) -> Step:
        """Build the step; with a plan that of the least memory."""
        loss, args = self.loss(batch)
        if self.layers.name not in PLANS:
            return stepped(loss, args)
        offload, _ = PLANS[self.layers.name]
        found = remat_kit.frontier(
            loss, *args, target=self.chip, objective="balanced", offload=offload
        )
        return stepped(remat_kit.policy(found.policy(found.points[0]))(loss), args)


def compiled(step: Step, chip: Target) -> Compiled:
    """Compile a step, its parameters and state donated."""
    return compile_program(*step, chip, argnums=None, donate_argnums=(0, 1), call="bert_batch")


def fastest_plan(way: Way, batch: int) -> tuple[Compiled, float] | None:
    """Return the step with the fastest plan that fits at a batch size, and its extra FLOPs.

    None if no plan fits.
    """
    loss, args = way.loss(batch)
    offload, _ = PLANS[way.layers.name]
    try:
        plan = remat_kit.plan(
            loss,
            *args,
            target=way.chip,
            budget="fit",
            objective="time",
            offload=offload,
            optimizer=OPTIMIZER,
        )
    except remat_kit.UserError as error:
        if "The least memory that was reached is" not in str(error):
            raise  # of something other than a budget that is too small
        return None
    step = stepped(remat_kit.policy(plan)(loss), args)
    assert plan.point is not None
    return compiled(step, way.chip), plan.point.extra_flops_fraction


def seconds(program: Compiled, chip: Target) -> float:
    """Return the roofline time of a step."""
    assert program.hlo_text is not None
    parsed = _hlo.parse(program.hlo_text)
    return estimate(parsed, chip, _peak.origins(parsed), chip_name=chip.name).seconds


# -- the largest batch ---------------------------------------------------------------------------


def roomy(chip: Target, times: int) -> Target:
    """Return a chip whose compiler believes in more memory; what fits stays the same.

    XLA begins to recompute by itself well before a card is full, and counts what waits on the
    host. Told of more memory it leaves the program as the policy made it. A TPU's compiler
    enforces the memory and cannot be told so.
    """
    told = f"device_memory_size: {times * chip.memory_bytes}"
    return dataclasses.replace(chip, spec=re.sub(r"device_memory_size: \d+", told, chip.spec))


def row_of(way: Way, tick: Callable[[str], None]) -> Row:
    """Search the largest batch for one way on one chip, and estimate its speed."""
    layers, chip = way.layers, way.chip
    start = max(1, layers.start * chip.memory_bytes // (32 * GIB))

    def say(text: str) -> None:
        tick(text.replace("none", layers.name, 1))

    found = remat_kit.max_batch(
        way.build,
        target=chip,
        start=start,
        step=layers.step,
        argnums=None,
        donate_argnums=(0, 1),
        progress=say,
    )
    row: Row = {"target": chip.name, "layers": layers.name, "batch": found.batch}
    if not found.batch:
        return row
    program = compiled(way.build(found.batch), chip)
    if layers.name in PLANS:
        tick(f"{layers.name} on {chip.name}: the fastest at batch {found.batch}")
        better = fastest_plan(way, found.batch)
        if better is not None:
            program, row["extra_flops_fraction"] = better
    refused = found.refused
    row["refused_batch"] = refused.batch if refused else None
    row["trials"] = [t.to_json() for t in found.trials]
    return row | measured(program, chip, found.batch)


def measured(program: Compiled, chip: Target, batch: int) -> Row:
    """Return what is shown of one compiled step."""
    time, memory = seconds(program, chip), program.memory
    return {
        "peak_bytes": memory.peak_bytes,
        "memory_bytes": memory.memory_bytes,
        "host_bytes": memory.host_bytes,
        "step_seconds": time,
        "sentences_per_second": batch / time,
        "xla_remat": any("own rematerialization" in note for note in memory.notes),
        "versions": dict(memory.versions),
    }


def planned_row(way: Way, batch: int, tick: Callable[[str], None]) -> Row:
    """Return the fastest plan at a batch size that is given."""
    name = way.layers.name
    tick(f"{name} on {way.chip.name}: batch {batch}")
    row: Row = {"target": way.chip.name, "layers": f"{name} at {batch}", "batch": 0}
    found = fastest_plan(way, batch)
    if found is None:
        return row
    known = {"batch": batch, "extra_flops_fraction": found[1]}
    return row | known | measured(found[0], way.chip, batch)


def rows(case: Case, targets: Sequence[str], names: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each way on each chip, and the plans at multiples of the largest of none."""
    with _common.progress() as bar:
        for target in targets:
            chip = remat_kit.target(target)

            def way_of(name: str, chip: Target = chip) -> Way:
                return Way(case, WAYS[name], roomy(chip, WAYS[name].room))

            plans = [name for name in names if name in PLANS]
            job = bar.add_task("", total=len(names) + len(plans))

            def tick(text: str, job: Any = job) -> None:
                bar.update(job, description=text)

            plain = 0
            for name in names:
                row = row_of(way_of(name), tick)
                if name.startswith("none"):
                    plain = max(plain, row["batch"])
                yield row
                bar.advance(job)
            for name in plans if plain else ():
                yield planned_row(way_of(name), PLANS[name][1] * plain, tick)
                bar.advance(job)


# -- the report ----------------------------------------------------------------------------------


def rendered(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = [
        "| target | layers | batch | against none | GiB of | host GiB | sentences/s ≥ time | "
        "against none | Paddle: batch, against none |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    base: dict[str, Row] = {}
    for row in report["rows"]:
        known = base.get(row["target"], {"batch": 0})
        if row["layers"].startswith("none") and row["batch"] > known["batch"]:
            base[row["target"]] = row
    lines += [_line(row, base.get(row["target"])) for row in report["rows"]]
    return "\n".join([*lines, *_common.ending(report, _ABOUT)])


_ABOUT = (
    "The largest batch of BERT-Large (sequences of 512 tokens, dropout 0.1) whose whole training "
    "step with Adam compiles into the chip's memory, XLA told of four times as much (sixteen "
    "where a plan offloads) so that its own recomputation stays out. Layers as one scan where not"
    " said otherwise, activations in float16 on the V100 and in bfloat16 elsewhere, parameters "
    "and moments in float32. Batches are multiples of 16, of 1 and unrolled of 2 without "
    "recomputation. *Against none*: the row of none with the larger batch. *Sentences/s* are "
    "those of a roofline, a bound that no chip reaches and not a time that was measured. *plan at"
    " n*: the fastest plan at Paddle's multiple of the batch of none: ten times, with offload "
    "fourteen. Plans offload no more than the memory of the chip's host."
)


def _line(row: Row, base: Row | None) -> str:
    head = f"| {row['target']} | {row['layers']} | "
    if not row["batch"]:
        return head + " | ".join(["none fits", *[""] * 6]) + " |"
    times = slower = ""
    if base is not None and base is not row:
        times = f"×{row['batch'] / base['batch']:.1f}"
        change = row["sentences_per_second"] / base["sentences_per_second"] - 1
        slower = f"{100 * change:+.0f} %"
    batch, speed = PUBLISHED.get(row["layers"], (0, 0.0))
    theirs = ""
    if batch:
        first, fastest = PUBLISHED["none"]
        theirs = f"{batch}, ×{batch / first:.1f}, {100 * (speed / fastest - 1):+.0f} %"
    cells = [
        str(row["batch"]),
        times,
        f"{row['peak_bytes'] / GIB:.1f} of {row['memory_bytes'] / GIB:.1f}",
        f"{(row['host_bytes'] or 0) / GIB:.1f}",
        f"{row['sentences_per_second']:.1f}",
        slower,
        theirs,
    ]
    return head + " | ".join(cells) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _common.parser(__doc__)
    parser.add_argument("--target", nargs="+", default=["v100-32g", "h100"], metavar="T")
    parser.add_argument("--layers", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    options = parser.parse_args(given)
    jax.config.update("jax_platforms", "cpu")  # leaves an accelerator that is here alone
    found: list[Row] = []
    try:
        for row in rows(SMOKE if options.smoke else CASE, options.target, options.layers):
            found.append(row)
            if options.json:  # after each row, for a whole run takes an hour
                report = reported(given, found)
                _common.write(options.json, report, rendered(report))
    except remat_kit.RematKitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(rendered(reported(given, found)))
    return 0


def reported(given: Sequence[str], found: Sequence[Row]) -> dict[str, Any]:
    """Return the rows with what took part in them."""
    versions = (row["versions"] for row in found if "versions" in row)
    return _common.described(__file__, given, versions) | {"rows": list(found)}


if __name__ == "__main__":
    sys.exit(main())
