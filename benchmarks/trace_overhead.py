"""Time the tracing of a training step under remat_kit, against `nn.remat` with JAX's own policy.

Every model is traced three ways: with `nn.remat` around its repeated block (the baseline), with
`remat_kit.policy` on the same class (``class``), and with ``remat_kit.policy(..., at=...)`` on the
loss of the unedited model (``at``). Two functions of 10,000 equations stand beside the models. One
is a single region: `jax.checkpoint` against `remat_kit.policy` on the function (``function``). The
other has a region for each of its hundred blocks, which are thirty different programs:
`jax.checkpoint` around each block against ``remat_kit.policy(..., at=...)`` (``at``).

The last case is a whole training step with AdamW and donation: the step as it is (``plain step``)
against ``remat_kit.policy(plan)(step)`` (``planned step``), with the plan of least memory
on the CPU. Policies have no part in it.

What is timed is ``jax.jit(value_and_grad(loss)).trace``, with JAX's caches emptied before every
run, as they are in a new process. A run of the baseline and one of each form make a round; a ratio
is formed within a round, so that a machine that slows down slows both of its sides; seconds are of
CPU time, which other programs take less part in. Arguments are shapes only: the models keep their
full width.

    python benchmarks/trace_overhead.py
    python benchmarks/trace_overhead.py --model gpt --policy dots --rounds 9 --json overhead.json

Exit status: 0 if every median ratio is at most ``--limit``, 1 if one is above, 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import functools
import gc
import io
import json
import os
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import _common
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from rich import box
from rich.console import Console
from rich.table import Table

import remat_kit

JAX_POLICIES: dict[str, Any] = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
}
FORMS = ("nn.remat", "class", "at", "jax.checkpoint", "function", "plain step", "planned step")
# The largest median ratio of each form that passes.
LIMITS = {"class": 1.5, "at": 1.7, "function": 1.3, "planned step": 1.1}


def _policies(given: list[str] | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(given or JAX_POLICIES))


Loss = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model at a size, and the class of its repeated block."""

    name: str
    module: str
    block: str
    size: dict[str, Any]
    forms = ("nn.remat", "class", "at")
    policies = staticmethod(_policies)

    def loss(self, form: str, policy: str) -> Loss:
        """Build the loss anew, so that nothing traced before is known of it."""
        module = _common.load(self.module)
        if form == "at":
            return module.build(policy=policy, **self.size)
        block = getattr(module, self.block)
        if form == "nn.remat":
            setattr(module, self.block, nn.remat(block, policy=JAX_POLICIES[policy]))
        else:
            setattr(module, self.block, remat_kit.policy(policy)(block))
        return module.build(**self.size)


@dataclasses.dataclass(frozen=True)
class Chain:
    """A function of blocks, of which each is the same program as every thirtieth after it.

    Attributes:
        whole: whether it is one region, rather than one for each block.
        size: the number of blocks, and of equations in each.
    """

    name: str
    whole: bool
    size: dict[str, Any]
    policies = staticmethod(_policies)

    @property
    def forms(self) -> tuple[str, str]:
        """What it is traced as; the first is the baseline."""
        return "jax.checkpoint", "function" if self.whole else "at"

    def loss(self, form: str, policy: str) -> Loss:
        """Build the loss anew, so that nothing traced before is known of it."""
        count, length = self.size["blocks"], self.size["equations"]

        def around(fn: Callable[..., Any]) -> Callable[..., Any]:
            return jax.checkpoint(fn, policy=JAX_POLICIES[policy])

        inner = around if form == "jax.checkpoint" and not self.whole else lambda fn: fn

        def loss(ws: Any, x: Any) -> Any:
            for i, w in enumerate(ws):
                with jax.named_scope(f"block_{i}"):
                    x = inner(_block(i, length))(x, w)
            return jnp.sum(x)

        weight = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        args = ([weight] * count, jax.ShapeDtypeStruct((128, 64), jnp.float32))
        if form == "at":
            return remat_kit.policy(policy, at="block_*")(loss), args
        if form == "function":
            return remat_kit.policy(policy)(loss), args
        return (around(loss) if self.whole else loss), args


@dataclasses.dataclass(frozen=True)
class Planned:
    """A jitted training step of a model with AdamW, as it is and with a plan."""

    name: str
    module: str
    size: dict[str, Any]
    forms = ("plain step", "planned step")

    def policies(self, given: list[str] | None) -> tuple[str, ...]:
        """Return what stands in the column of policies."""
        del given
        return ("plan",)

    def loss(self, form: str, policy: str) -> Loss:
        """Build the step anew, so that nothing traced before is known of it."""
        del policy
        step, args = self.step()
        if form == "planned step":
            step = remat_kit.policy(self.plan)(step)
        return jax.jit(step), args  # for both, because the decorated step has no method `trace`

    def step(self) -> Loss:
        """Return the step as it is, and the shapes of its arguments."""
        loss, (params, *rest) = _common.load(self.module).build(policy=None, **self.size)
        optimizer = optax.adamw(1e-3)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def train_step(params: Any, state: Any, *batch: Any) -> Any:
            value, gradient = jax.value_and_grad(loss)(params, *batch)
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, value

        return train_step, (params, jax.eval_shape(optimizer.init, params), *rest)

    @functools.cached_property
    def plan(self) -> Any:
        """The plan, which is made once."""
        step, args = self.step()
        return remat_kit.plan(step, *args, budget="min", compiles=1).policy


def _block(number: int, equations: int) -> Callable[..., Any]:
    """Return a function of a number of equations, in an order that depends on the block."""
    steps = (jnp.tanh, jnp.sin, lambda x: x * 0.5, jnp.exp, lambda x: x + 1.0, jax.lax.logistic)

    def block(x: Any, w: Any) -> Any:
        for k in range(equations):
            x = x @ w if k % 10 == number % 10 else steps[(k * (number + 1)) % len(steps)](x)
        return x

    return block


CASES = {
    "gpt": Case("GPT, 72 layers", "gpt", "Block", {"size": "72l", "batch": 1}),
    "resnet": Case("ResNet-152", "resnet", "Bottleneck", {"depth": 152, "batch": 16}),
    "function": Chain("10,000 equations", True, {"blocks": 100, "equations": 100}),
    "blocks": Chain("100 blocks of 100", False, {"blocks": 100, "equations": 100}),
    "step": Planned("GPT step, 12 layers", "gpt", {"size": "small", "batch": 1}),
}
SMOKE = {
    "gpt": Case("GPT, 2 layers", "gpt", "Block", {"size": "tiny", "batch": 1}),
    "resnet": Case(
        "ResNet-50, 4 wide", "resnet", "Bottleneck", {"depth": 50, "batch": 1, "width": 4}
    ),
    "function": Chain("40 equations", True, {"blocks": 4, "equations": 10}),
    "blocks": Chain("4 blocks of 10", False, {"blocks": 4, "equations": 10}),
    "step": Planned("GPT step, 2 layers", "gpt", {"size": "tiny", "batch": 1}),
}


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of each round, by form."""

    case: Case | Chain | Planned
    policy: str
    trace_seconds: dict[str, list[float]]
    lower_seconds: dict[str, list[float]]

    def ratios(self, form: str) -> list[float]:
        """Return tracing time over the baseline's, round by round."""
        baseline = self.trace_seconds[self.case.forms[0]]
        pairs = zip(self.trace_seconds[form], baseline, strict=True)
        return [ours / theirs for ours, theirs in pairs]

    def median(self, form: str) -> float:
        """Return the median of the ratios."""
        return statistics.median(self.ratios(form))


def _traceable(fn: Any) -> Any:
    """Return what is traced: a jitted step as it is, or the gradient of a loss."""
    return fn if hasattr(fn, "trace") else jax.jit(jax.value_and_grad(fn))


def timed(loss: Loss) -> tuple[float, float]:
    """Return the CPU seconds that tracing and lowering of the gradient program take."""
    fn, args = loss
    jax.clear_caches()
    gc.collect()
    step = _traceable(fn)
    begun = time.process_time()
    traced = step.trace(*args)
    middle = time.process_time()
    traced.lower()
    return middle - begun, time.process_time() - middle


def rounds(
    case: Case | Chain | Planned, policy: str, count: int, tick: Callable[[], object]
) -> Times:
    """Time every form ``count`` times, the order turning, after one round that is not kept."""
    trace: dict[str, list[float]] = {form: [] for form in case.forms}
    lower: dict[str, list[float]] = {form: [] for form in case.forms}
    for number in range(count + 1):
        turn = number % len(case.forms)
        for form in case.forms[turn:] + case.forms[:turn]:
            seconds = timed(case.loss(form, policy))
            if number:
                trace[form].append(seconds[0])
                lower[form].append(seconds[1])
            tick()
    return Times(case, policy, trace, lower)


def table(results: list[Times], limits: dict[str, float]) -> Table:
    """Lay the results out, one row for each form of each case."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("model", "policy", "form"):
        out.add_column(name, no_wrap=True)
    for name in ("trace s", "ratio", "least", "most", "lower s"):
        out.add_column(name, justify="right", no_wrap=True)
    for times in results:
        for form in times.case.forms:
            ratios = times.ratios(form)
            over = " >" if times.median(form) > limits.get(form, 1) else ""
            out.add_row(
                times.case.name,
                times.policy,
                form,
                f"{statistics.median(times.trace_seconds[form]):.2f}",
                f"{times.median(form):.2f}{over}" if form in limits else "1",
                f"{min(ratios):.2f}" if form in limits else "",
                f"{max(ratios):.2f}" if form in limits else "",
                f"{statistics.median(times.lower_seconds[form]):.2f}",
            )
    return out


def as_json(results: list[Times], options: argparse.Namespace) -> str:
    """Return every time, and on what it was taken."""
    runs = [
        {
            "model": times.case.name,
            "size": times.case.size,
            "policy": times.policy,
            "form": form,
            "median_ratio": times.median(form),
            "ratios": times.ratios(form),
            "trace_seconds": times.trace_seconds[form],
            "lower_seconds": times.lower_seconds[form],
        }
        for times in results
        for form in times.case.forms
    ]
    report = {
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
        },
        "cores": os.cpu_count(),
        "rounds": options.rounds,
        "limits": options.limits,
        "smoke": options.smoke,
        "runs": runs,
    }
    return json.dumps(report, indent=1) + "\n"


def profile(case: Case | Chain | Planned, policy: str, form: str, lines: int = 40) -> str:
    """Return where one tracing of ``form`` spends its time, by cumulative seconds."""
    fn, args = case.loss(form, policy)
    jax.clear_caches()
    step = _traceable(fn)
    profiler = cProfile.Profile()
    profiler.runcall(step.trace, *args)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("cumulative").print_stats(lines)
    return text.getvalue()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _limit(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a ratio above 0")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    out = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    out.add_argument("--model", action="append", choices=CASES, help="default: all")
    out.add_argument("--policy", action="append", choices=JAX_POLICIES, help="default: all")
    out.add_argument("--rounds", type=_count, default=5, help="rounds kept (default: 5)")
    out.add_argument(
        "--limit",
        type=_limit,
        metavar="R",
        help="largest median ratio that passes, instead of "
        + ", ".join(f"{limit:g} for {form}" for form, limit in LIMITS.items()),
    )
    out.add_argument("--json", type=_common.output, metavar="PATH", help="write every time there")
    out.add_argument("--profile", choices=FORMS, help="profile one tracing instead of timing")
    out.add_argument("--smoke", action="store_true", help="small models, for tests")
    return out


def run_all(options: argparse.Namespace) -> list[Times]:
    """Time every case under every policy, with a progress bar on stderr."""
    cases = SMOKE if options.smoke else CASES
    chosen = [
        (cases[model], policy)
        for model in dict.fromkeys(options.model or CASES)
        for policy in cases[model].policies(options.policy)
    ]
    results = []
    with _common.progress() as bar:
        for case, policy in chosen:
            total = (options.rounds + 1) * len(case.forms)
            job = bar.add_task(f"{case.name}, {policy}", total=total)
            results.append(rounds(case, policy, options.rounds, lambda job=job: bar.advance(job)))
    return results


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = parser().parse_args(argv)
    options.limits = {form: options.limit or limit for form, limit in LIMITS.items()}
    cases = SMOKE if options.smoke else CASES
    if options.profile:
        for model in dict.fromkeys(options.model or CASES):
            if options.profile not in cases[model].forms:
                continue
            for policy in cases[model].policies(options.policy):
                print(f"{cases[model].name}, {policy}, {options.profile}")
                print(profile(cases[model], policy, options.profile))
        return 0
    results = run_all(options)
    if options.json:
        options.json.write_text(as_json(results, options))
    Console().print(table(results, options.limits))
    found = [
        (times.median(form) / options.limits[form], form, times)
        for times in results
        for form in times.case.forms[1:]
    ]
    excess, form, times = max(found, key=lambda each: each[0])
    if excess > 1:
        print(
            f"error: tracing {times.case.name} with {times.policy!r} ({form}) takes "
            f"{times.median(form):.2f} times as long as with {times.case.forms[0]}; at most "
            f"{options.limits[form]:g} passes",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
