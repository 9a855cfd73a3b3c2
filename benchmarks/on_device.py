"""Hold what is compiled without a GPU against the GPU itself: memory, step time, results.

    python benchmarks/on_device.py plan --folder plans                (no GPU is needed)
    python benchmarks/on_device.py run --folder plans --json benchmarks/results/on_device_h100.json

The first command plans each program for a chip that need not be in the machine, and writes the
plans and the memory that its compiler reports. There are four variants of a program: as it is
(``none``), with each block recomputed as `jax.checkpoint` does (``blocks``), with a plan for half
of the activations (``half``), and with a plan for the memory of ``blocks`` (``same``).

With ``--pieces`` the programs are ones in which running segments in pieces helps, and the variants
are others: with the plan of least memory without pieces (``least``), with a plan in pieces for a
tenth of the activations (``tenth``), and with the plan of least memory in pieces (``pieces``). The
last program is a Llama with a sequence as long as fits on the card (``fit``), in pieces.

    python benchmarks/on_device.py plan --pieces --folder plans
    python benchmarks/on_device.py run --pieces --folder plans --json \
        benchmarks/results/on_device_pieces_h100.json

The second command runs the variants on the device of this machine. Each program is compiled in a
process of its own, ``--jobs`` of them at a time, and then runs in another one, which reads compiled
programs from a cache, so that the allocator's peak contains nothing of the compiler's own trials.
The variants run in the order of their expected peaks and each peak is read after its first step;
then they run by turns, and the table shows the medians. Where a variant does not raise the
allocator's peak, none is shown for it. A variant that needs more memory than the chip has is not
run. A step that takes longer than half a minute runs once.

Each row is written as soon as it is there. A run that was cut off goes on with ``--only`` and the
programs that are missing; the rows of the others are kept if they were taken with the same
versions. ``--cache`` names a folder for compiled programs, so that they are kept as well.

``--smoke`` does both at small sizes on the CPU, which reports no allocator's peak.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import _common
from _common import MIB, Case

# The budget of each planned variant, and whether its plan may run segments in pieces.
PLANS: dict[str, tuple[str | float, bool]] = {
    "half": (0.5, False),
    "same": ("blocks", False),  # the memory of that variant
    "least": ("min", False),
    "tenth": (0.1, True),
    "pieces": ("min", True),
    "fit": ("fit", True),
}
VARIANTS = ("none", "blocks", "half", "same")
IN_PIECES = ("none", "least", "tenth", "pieces")
SHOWN = ("none", "blocks", *PLANS)
SECONDS = 2.0  # of steps of each program, at least
ROUNDS = 5  # of steps of each variant, at least
LONGEST = 30.0  # a step that takes longer runs once


@dataclasses.dataclass(frozen=True)
class Program:
    """A model at a size, whether it is a whole AdamW step or a gradient, and its variants."""

    case: Case
    step: bool = False
    variants: tuple[str, ...] = VARIANTS

    def build(self, policy: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the loss or the step and the shapes of its arguments, with a policy on blocks."""
        import jax

        loss, args = self.case.loss(policy)
        if not self.step:
            return loss, args
        params, *rest = args
        return training_step(loss), (params, jax.eval_shape(_optimizer().init, params), *rest)

    def values(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return values for the arguments. A fresh optimizer's state is computed, not drawn."""
        from remat_kit.testing import equivalence

        if not self.step:
            return equivalence.seeded(args, 0)
        params, _, *rest = args
        params, *rest = equivalence.seeded((params, *rest), 0)
        return params, _optimizer().init(params), *rest


def _optimizer() -> Any:
    import optax

    return optax.adamw(1e-4)


def training_step(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a jitted step that donates its parameters and its optimizer's state."""
    import jax
    import optax

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, Any]:
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        updates, state = _optimizer().update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


PROGRAMS = {
    "gpt12": Program(Case("GPT, 12 layers, 8 × 1024", "gpt", {"size": "small"})),
    "gpt12_step": Program(
        Case("the same, an AdamW step in bfloat16", "gpt", {"size": "small", "dtype": "bf16"}),
        step=True,
    ),
    "gpt24_scan": Program(
        Case(
            "GPT, 24 scanned layers, 4 × 1024", "gpt", {"size": "medium", "scan": True, "batch": 4}
        )
    ),
    "vit": Program(Case("ViT-B/16, 64 images", "vit", {})),
    "resnet50": Program(Case("ResNet-50, 64 images", "resnet", {"depth": 50, "batch": 64})),
    "vgg16": Program(Case("VGG-16, 64 images", "vgg", {"depth": 16})),
    "unet": Program(Case("U-Net, 4 images of 572²", "unet", {"batch": 4})),
    "llama": Program(
        Case(
            "Llama (NNX), 2 layers, 8192 tokens",
            "llama_nnx",
            {"layers": 2, "seq": 8192, "vocab": 32000},
        )
    ),
    "moe": Program(Case("mixture of experts, 8 × 1024", "moe", {"seq": 1024})),
    "bert": Program(
        Case("BERT-Large, 16 × 512", "bert", {"size": "large", "batch": 16, "seq": 512})
    ),
}
LLAMA = {"size": "8b", "width": 2048, "hidden": 8192, "layers": 16, "dtype": "bf16", "scan": True}
PIECES = {
    name: dataclasses.replace(program, variants=IN_PIECES)
    for name, program in {
        "gpt12": PROGRAMS["gpt12"],
        "gpt48": Program(Case("GPT, 48 layers, 1 × 1024", "gpt", {"size": "xl", "batch": 1})),
        "bert": PROGRAMS["bert"],
        "llama": PROGRAMS["llama"],
        "vgg16": PROGRAMS["vgg16"],
        "alexnet": Program(Case("AlexNet, 1024 images", "alexnet", {})),
        "unet": PROGRAMS["unet"],
        "moe": PROGRAMS["moe"],
    }.items()
}
PIECES |= {
    name: Program(
        Case(
            f"Llama, 1.5 billion parameters in bfloat16, {tokens:,} tokens",
            "llama_nnx",
            {**LLAMA, "batch": 1, "seq": tokens},
        ),
        variants=("none", "blocks", "fit"),
    )
    for name, tokens in {"long": 131072, "longest": 163840}.items()
}
SMOKE = {
    "mlp": Program(
        Case("residual MLP", "residual_mlp", {"batch": 4096, "width": 16, "layers": 4}), step=True
    ),
    "gpt": Program(Case("GPT, tiny", "gpt", {"size": "tiny", "batch": 2, "seq": 64})),
}
SMOKE_PIECES = {
    "gpt": Program(
        Case("GPT, tiny", "gpt", {"size": "tiny", "seq": 64, "vocab": 2048}), variants=IN_PIECES
    )
}


# -- without the device ---------------------------------------------------------------------------


def planned(program: Program, target: str, stem: pathlib.Path) -> dict[str, Any]:
    """Plan a program, save its plans beside ``stem``, and return what the compiler reports."""
    import remat_kit

    fn, args = program.build("none")
    none = remat_kit.measure(fn, *args, target=target)
    found: dict[str, Any] = {"none": _expected(none)}
    if "blocks" in program.variants:
        blocks = remat_kit.measure(*_called(program, "nothing"), target=target)
        found["blocks"] = _expected(blocks)
    for variant in program.variants:
        if variant not in PLANS:
            continue
        budget, pieces = PLANS[variant]
        budget = found["blocks"]["peak_bytes"] if budget == "blocks" else budget
        try:
            plan = remat_kit.plan(fn, *args, budget=budget, target=target, pieces=pieces)
        except remat_kit.UserError as error:
            found[variant] = {"error": error.message}
            continue
        plan.save(stem.with_suffix(f".{variant}.toml"))
        assert plan.step_seconds is not None
        before = plan.step_seconds - plan.extra_seconds
        found[variant] = _expected(plan.compiled) | {
            "predicted_bytes": plan.predicted_peak_bytes,
            "predicted_time_ratio": round(plan.step_seconds / before, 4),
        }
    return found | {"target": target, "versions": dict(none.versions)}


def _called(program: Program, policy: str) -> tuple[Any, ...]:
    fn, args = program.build(policy)
    return fn, *args


def _expected(memory: Any) -> dict[str, Any]:
    figures = {"peak_bytes": memory.peak_bytes, "temp_bytes": memory.temp_bytes}
    return figures | ({"fits": False} if memory.fits is False else {})


def plan_all(
    programs: Mapping[str, Program], target: str, folder: pathlib.Path
) -> Iterator[tuple[str, str]]:
    """Plan the programs that the folder does not have yet, and yield each one's name and end.

    A program that cannot be planned gets a file that says why, and is tried again the next time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, program in programs.items():
        path = folder / f"{name}.json"
        if path.exists() and "error" not in expected_of(name, folder):
            yield name, "is there"
            continue
        begun = time.monotonic()
        try:
            found = planned(program, target, folder / name)
        except Exception as error:
            first = str(error).partition("\n")[0]
            found = {"error": f"{type(error).__name__}: {first}"[:300]}
        path.write_text(json.dumps(found), encoding="utf-8")
        yield name, found.get("error", f"{time.monotonic() - begun:.0f} s")


def expected_of(name: str, folder: pathlib.Path) -> dict[str, Any]:
    """Return what was found out about a program without the device."""
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


# -- on the device --------------------------------------------------------------------------------


def variants(program: Program, name: str, folder: pathlib.Path) -> dict[str, Any]:
    """Return the jitted function of each variant that can run, by rising expected peak."""
    import jax

    import remat_kit

    expected = expected_of(name, folder)
    there = [
        v for v in program.variants if "peak_bytes" in expected[v] and expected[v].get("fits", True)
    ]
    functions = {}
    for variant in sorted(there, key=lambda v: expected[v]["peak_bytes"]):
        fn, _ = program.build("nothing" if variant == "blocks" else "none")
        if variant in PLANS:
            fn = remat_kit.policy(str(folder / f"{name}.{variant}.toml"))(fn)
        functions[variant] = (
            jax.jit(fn, donate_argnums=(0, 1)) if program.step else jax.jit(jax.value_and_grad(fn))
        )
    return functions


def compile_all(programs: Mapping[str, Program], folder: pathlib.Path) -> None:
    """Compile every variant, one after the other, so that the cache contains them.

    XLA tries the kernels of an operation once in a process, and the variants share most of them.
    """
    for name, program in programs.items():
        _, args = program.build("none")
        for function in variants(program, name, folder).values():
            function.lower(*args).compile()


@dataclasses.dataclass
class Runner:
    """A compiled variant and the state that its steps carry on."""

    call: Callable[..., Any]
    program: Program
    losses: list[float] = dataclasses.field(default_factory=list)

    def once(self, values: tuple[Any, ...]) -> tuple[float, tuple[Any, ...]]:
        """Run a step, and return its seconds and the arguments of the next one."""
        import jax

        begun = time.perf_counter()
        results = jax.block_until_ready(self.call(*values))
        seconds = time.perf_counter() - begun
        if self.program.step:
            self.losses.append(float(results[2]))
            return seconds, (*results[:2], *values[2:])
        self.losses.append(float(results[0]))
        return seconds, values


def run(program: Program, name: str, folder: pathlib.Path) -> dict[str, Any]:
    """Run the variants of a program on this machine's device and return their figures."""
    import jax

    _, args = program.build("none")
    values = program.values(args)
    device = jax.local_devices()[0]
    found: dict[str, Any] = {}
    runners: dict[str, Runner] = {}
    highest = 0
    lowered = {v: f.lower(*args) for v, f in variants(program, name, folder).items()}
    for variant, each in lowered.items():
        compiled = each.compile()
        runners[variant] = Runner(compiled, program)
        first, values = runners[variant].once(values)
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
        memory = compiled.memory_analysis()
        found[variant] = {
            "compiled_bytes": memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes,
            "allocated_bytes": peak if peak > highest else None,
            "seconds": round(first, 6),
            "steps": 1,
        }
        highest = max(highest, peak)
    if max(each["seconds"] for each in found.values()) > LONGEST:
        runners = {}
    for variant, seconds in _by_turns(runners, values).items():
        found[variant] |= {"seconds": round(statistics.median(seconds), 6), "steps": len(seconds)}
    again = values if not program.step else None  # a step has donated them
    for variant, apart in _differences(runners, program, args, again).items():
        found[variant]["difference"] = apart
    return {
        "program": name,
        "title": program.case.name,
        "device": device.device_kind,
        "expected": expected_of(name, folder),
        "variants": found,
    }


def _by_turns(runners: Mapping[str, Runner], values: tuple[Any, ...]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {variant: [] for variant in runners}
    begun = time.monotonic()
    rounds = 0
    while runners and (rounds < ROUNDS or time.monotonic() - begun < SECONDS):
        for variant, runner in runners.items():
            seconds, values = runner.once(values)
            times[variant].append(seconds)
        rounds += 1
    return times


def _differences(
    runners: Mapping[str, Runner],
    program: Program,
    args: tuple[Any, ...],
    values: tuple[Any, ...] | None = None,
) -> dict[str, float]:
    """Return how far the results of a first step of each variant are from those without a policy.

    Values for the arguments are drawn for each variant, unless they are given.

    The distance is the norm of the difference of all gradients, or of all updated parameters, over
    the norm of the gradients or parameters.
    """
    if "none" not in runners:
        return {}
    import jax
    import jax.numpy as jnp

    def gradients(runner: Runner) -> Any:
        results = runner.call(*(program.values(args) if values is None else values))
        return results[0] if program.step else results[1]

    def norm(tree: Any) -> Any:
        return jnp.sqrt(
            sum(jnp.sum(jnp.square(x.astype("float32"))) for x in jax.tree.leaves(tree))
        )

    reference = gradients(runners["none"])
    apart = {}
    for variant, runner in runners.items():
        if variant != "none":
            other = gradients(runner)
            difference = norm(jax.tree.map(jnp.subtract, other, reference)) / norm(reference)
            apart[variant] = float(f"{float(difference):.3g}")
    return apart


# -- the command line -----------------------------------------------------------------------------


def in_processes(
    names: Sequence[str], given: Sequence[str], cache: str, jobs: int
) -> Iterator[dict[str, Any]]:
    """Compile each program in a process, several at a time, then run each in one of its own."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    # A pool that grows is in parts, and none of them may be as large as the next variant needs.
    alone = environment | {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.98",
    }
    command = [sys.executable, __file__, "child", *given]

    def compiled(name: str) -> None:
        subprocess.run([*command, "--only", name], env=environment, check=False)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(compiled, names))
    for name in names:
        done = subprocess.run(
            [*command, "--run", name], env=alone, capture_output=True, text=True, check=False
        )
        sys.stderr.write(done.stderr)
        lines = done.stdout.splitlines()
        if done.returncode == 0 and lines:
            yield json.loads(lines[-1])
        else:
            last = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]
            said = f"the process ended with status {done.returncode}: {last}"
            yield {"program": name, "error": said[:300]}


def rendered(report: Mapping[str, Any]) -> str:
    """Return a report as Markdown."""
    lines = [
        "| program | variant | MiB, compiled without the card | compiled on the card | allocated | "
        "step ms | × none | predicted | difference |",
        "|---|---|" + "---:|" * 7,
    ]
    for row in report["rows"]:
        if "error" in row:
            lines.append(f"| {row['program']} | {row['error']} |" + " |" * 7)
            continue
        lines += [_line(row, variant) for variant in SHOWN if variant in row["expected"]]
    about = (
        f"Run on {report['device']}; planned for {report['target']} without it. 'Allocated' is the "
        "allocator's peak, 'difference' that of the gradients (of the updated parameters for a "
        "whole step) from those of none, by norm."
    )
    return "\n".join([*lines, *_common.ending(report, about, compiled_only=False)])


def _line(row: Mapping[str, Any], variant: str) -> str:
    expected, found = row["expected"][variant], row["variants"].get(variant)
    if "error" in expected:
        return f"| {row['title']} | {variant} | {expected['error']} |" + " |" * 6
    if found is None:
        size = f"{expected['peak_bytes'] / MIB:,.0f}"
        return f"| {row['title']} | {variant} | {size} | does not fit |" + " |" * 5
    none = row["variants"].get("none", {}).get("seconds")
    allocated, predicted = found["allocated_bytes"], expected.get("predicted_time_ratio")
    cells = [
        *(row["title"], variant, f"{expected['peak_bytes'] / MIB:,.0f}"),
        f"{found['compiled_bytes'] / MIB:,.0f}",
        f"{allocated / MIB:,.0f}" if allocated else "–",
        f"{1e3 * found['seconds']:,.1f}",
        f"{found['seconds'] / none:.3f}" if none else "",
        f"{predicted:.3f}" if predicted else "",
        f"{found['difference']:.1e}" if "difference" in found else "",
    ]
    return "| " + " | ".join(cells) + " |"


def _parser() -> argparse.ArgumentParser:
    parser = _common.parser(__doc__)
    parser.add_argument("command", choices=("plan", "run", "child"), nargs="?", default="run")
    parser.add_argument("--folder", type=pathlib.Path, help="of the plans")
    parser.add_argument("--pieces", action="store_true", help="plans with segments in pieces")
    parser.add_argument("--target", default="h100", help="the chip to plan for; h100 by default")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these programs alone")
    parser.add_argument("--jobs", type=int, default=4, help="programs to compile at a time")
    parser.add_argument("--cache", help="a folder for compiled programs, to be kept")
    parser.add_argument("--run", metavar="NAME", help=argparse.SUPPRESS)
    return parser


def programs_of(options: argparse.Namespace) -> Mapping[str, Program]:
    """Return the programs that a command line is about."""
    if options.pieces:
        return SMOKE_PIECES if options.smoke else PIECES
    return SMOKE if options.smoke else PROGRAMS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(given)
    known = programs_of(options)
    target = "cpu" if options.smoke else options.target
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or pathlib.Path(scratch) / "plans"
        programs = {n: p for n, p in known.items() if options.only is None or n in options.only}
        if options.command == "child":
            if options.run is not None:
                print(json.dumps(run(known[options.run], options.run, folder)))
            else:
                compile_all(programs, folder)
            return 0
        if options.command == "plan" or options.smoke:
            for name, end in plan_all(programs, target, folder):
                print(f"{name}: {end}", file=sys.stderr, flush=True)
        if options.command == "plan":
            return 0
        report = reported([], given, target)
        rows = kept(options.json, report["versions"])
        names = [name for name in programs if (folder / f"{name}.json").exists()]
        failed = {n: found for n in names if "error" in (found := expected_of(n, folder))}
        rows |= {name: {"program": name, **found} for name, found in failed.items()}
        names = [name for name in names if name not in failed]
        flags = {"--smoke": options.smoke, "--pieces": options.pieces}
        passed = ["--folder", str(folder), *(flag for flag, on in flags.items() if on)]
        for row in in_processes(names, passed, options.cache or scratch, options.jobs):
            rows[row["program"]] = row
            report = reported([rows[name] for name in known if name in rows], given, target)
            if options.json is not None:
                _common.write(options.json, report, rendered(report))
    report = reported([rows[name] for name in known if name in rows], given, target)
    if options.json is not None:
        _common.write(options.json, report, rendered(report))
    print(rendered(report))
    return 1 if any("error" in row for row in rows.values()) else 0


def kept(path: pathlib.Path | None, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return the rows of an earlier run with the same versions, by program."""
    if path is None or not path.exists() or not path.stat().st_size:
        return {}
    report = json.loads(path.read_text(encoding="utf-8"))
    return {r["program"]: r for r in report["rows"]} if report["versions"] == versions else {}


def reported(rows: list[dict[str, Any]], given: Sequence[str], target: str) -> dict[str, Any]:
    """Return the report of a run."""
    import importlib.metadata

    names = ("jax", "jaxlib", "jax-cuda13-plugin", "flax")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    report = _common.described(__file__, given, [versions])
    device = next((row["device"] for row in rows if "device" in row), "no device")
    return report | {"device": device, "target": target, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
