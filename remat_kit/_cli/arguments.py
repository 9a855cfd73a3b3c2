"""The options of each command. The module imports nothing slow, so that `--help` is quick."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any, NoReturn

from remat_kit._cli.commands import (
    bench_command,
    diff_command,
    fit_command,
    frontier_command,
    inspect_command,
    max_batch_command,
    measure_command,
    plan_command,
    policies_command,
    targets_command,
)
from remat_kit._cli.output import BASELINE, STATUSES, USER_FAULT

# -- the arguments ----------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser that prints its errors in the form of remat_kit's errors."""

    def error(self, message: str) -> NoReturn:
        hint = f"`{self.prog} --help` shows what it takes"
        if "FILE_OR_MODULE:build" in message:
            hint = f"the model comes first: {self.prog} models/gpt.py:build --policy dots"
        self.exit(USER_FAULT, f"error: {message}\nhint: {hint}\n")


_FILES = {
    "html": "write a page for a browser to this file",
    "png": "draw the memory over the schedule to this file, for each target; also .svg and .pdf",
    "perfetto": "write the timeline to this file, for each target, as a trace for ui.perfetto.dev",
}


_MODEL_HELP = (
    "a Python file or module and a function in it that returns (loss_fn, args): "
    "models/gpt.py:build, my_package.train:build"
)


def argument_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="remat-kit",
        description="Inspect, plan and measure the memory of a JAX training step.",
        epilog=STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", dest="command", parser_class=_Parser
    )
    for name, run, about in (
        ("inspect", inspect_command, "list what is saved and what is computed twice"),
        ("diff", diff_command, "show the gradient programs without and with a policy, aligned"),
        (
            "measure",
            measure_command,
            "compile for chips, in this machine or not, and show the memory that it takes",
        ),
        ("plan", plan_command, "find the fastest schedule that fits a budget, and compile it"),
        ("frontier", frontier_command, "show the best schedules for every budget, not compiled"),
        ("max-batch", max_batch_command, "find the largest batch that fits, by compiling a few"),
        ("fit", fit_command, "show which batches fit which chips with which policies"),
    ):
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        _add_model(command)
        command.set_defaults(run=run)
    for name in ("inspect", "diff"):
        commands.choices[name].add_argument(
            "--full", action="store_true", help="show everything, not only the most important lines"
        )
    for kind, about in _FILES.items():
        commands.choices["inspect"].add_argument(
            f"--{kind}", metavar="PATH", type=pathlib.Path, help=about
        )
    commands.choices["inspect"].add_argument(
        "--against",
        metavar="PATH",
        help="show what grew and what shrank since an earlier `inspect --json PATH`",
    )
    for name in ("inspect", "measure", "plan", "frontier", "max-batch", "fit"):
        commands.choices[name].add_argument(
            "--optimizer",
            metavar="O",
            help="count the whole training step with this optimizer of optax (adamw, sgd, "
            "'optax.lion(1e-4)'): its state, its update, donated parameters",
        )
    _add_plan(commands.choices["plan"], commands.choices["frontier"])
    _add_batch(commands.choices["max-batch"], commands.choices["fit"])
    _add_bench(commands)
    policies = commands.add_parser(
        "policies", help="list the presets, or show one", allow_abbrev=False
    )
    policies.add_argument("name", nargs="?", metavar="NAME", help="a preset, a recipe or a policy")
    policies.set_defaults(run=policies_command)
    targets = commands.add_parser(
        "targets", help="list the chips that can be compiled for", allow_abbrev=False
    )
    targets.set_defaults(run=targets_command)
    for command in commands.choices.values():
        command.add_argument(
            "--json", metavar="PATH", help="write JSON to this file; - is standard output"
        )
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="FILE_OR_MODULE:build", help=_MODEL_HELP)
    parser.add_argument(
        "--policy",
        action="extend",
        nargs="+",
        default=[],
        metavar="P",
        help="a preset, the path of a recipe or the text of a policy; repeatable; "
        f"{BASELINE!r} is always the first",
    )
    parser.add_argument(
        "--at",
        metavar="PATTERN",
        help="apply the policies to these module paths ('*/block_*') of the loss, "
        "instead of through the builder",
    )
    parser.add_argument(
        "--target",
        action="extend",
        nargs="+",
        default=[],
        metavar="T",
        help="a chip to compile for (see `remat-kit targets`); repeatable; h100@40GiB is an "
        "h100 with less memory",
    )
    parser.add_argument(
        "--size",
        action="extend",
        nargs="+",
        default=[],
        metavar="k=v",
        help="an argument for the builder; repeatable",
    )


def _add_plan(plan: argparse.ArgumentParser, frontier: argparse.ArgumentParser) -> None:
    plan.add_argument(
        "--budget",
        metavar="B",
        required=True,
        help="bytes on the device (14GiB), a fraction of the step's activations (0.5, 50%%), min, "
        "free (the least memory at 2 %% extra time or less) or fit (the memory of the chip)",
    )
    plan.add_argument(
        "--save", metavar="PATH", type=pathlib.Path, help="write the plan to this file, as a recipe"
    )
    for command, default in ((plan, "balanced"), (frontier, "time")):
        command.add_argument(
            "--objective",
            metavar="O",
            default=default,
            help="what to minimize: time (by the chip's roofline), flops, or balanced (three parts "
            "FLOPs and one part time, as fractions of the forward pass) "
            f"(default: {default})",
        )
        command.add_argument(
            "--offload",
            action="store_true",
            help="also offload residuals of scans to the host's memory",
        )
    for kind, about in (
        ("png", "draw memory against time to this file"),
        ("html", "the same, as a page"),
    ):
        frontier.add_argument(f"--{kind}", metavar="PATH", type=pathlib.Path, help=about)


def _add_batch(max_batch: argparse.ArgumentParser, fit: argparse.ArgumentParser) -> None:
    for parser in (max_batch, fit):
        parser.add_argument(
            "--batch-name",
            metavar="NAME",
            default="batch",
            help="the builder's argument for the batch size; 'batch' by default",
        )
    max_batch.add_argument(
        "--start",
        metavar="N",
        type=_whole,
        help="the first batch size to compile; by default that of the builder",
    )
    max_batch.add_argument(
        "--step", metavar="N", type=_whole, default=1, help="try only multiples of N"
    )
    max_batch.add_argument("--at-most", metavar="N", type=_whole, help="try no batch size above N")
    fit.add_argument(
        "--batch",
        action="extend",
        nargs="+",
        type=_wholes,
        required=True,
        metavar="N,N",
        help="the batch sizes: 8,16,32; repeatable",
    )


def _add_bench(commands: Any) -> None:
    from remat_kit._cli import published as _published

    about = "plan one of the CNNs of a published table, and compare with the paper's figures"
    known = ", ".join(line.arch for line in _published.TABLE)
    bench = commands.add_parser("bench", help=about, description=about, allow_abbrev=False)
    bench.add_argument("--arch", metavar="NAME", required=True, help=f"one of {known}")
    bench.add_argument(
        "--target", metavar="T", default="cpu", help="the chip to compile for; 'cpu' by default"
    )
    bench.add_argument(
        "--models", metavar="DIR", default="models", help="the folder of the model files"
    )
    bench.add_argument(
        "--size",
        action="extend",
        nargs="+",
        default=[],
        metavar="k=v",
        help="an argument for the builder that replaces the paper's; repeatable",
    )
    bench.add_argument(
        "--compiles",
        metavar="N",
        type=_whole,
        default=_published.COMPILES,
        help="compile at most N programs for each of the three plans",
    )
    bench.set_defaults(run=bench_command)


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _wholes(text: str) -> list[int]:
    return [_whole(part) for part in text.split(",")]


def _version() -> str:
    import importlib.metadata

    try:
        return f"remat-kit {importlib.metadata.version('remat-kit')}"
    except importlib.metadata.PackageNotFoundError:
        return "remat-kit, not installed"
