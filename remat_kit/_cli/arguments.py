"""The commands and their options, as data. The module imports nothing slow, so `--help` is quick.

The package cyclopts would accept the same calls, but it starts too slowly: importing it takes
0.09 s of processor time and importing argparse 0.02 s, so that cyclopts prints the help of an
example with two commands in 0.19 s, and argparse the help of these commands in 0.1 s; the limit is
0.2 s.
"""

from __future__ import annotations

import argparse
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import remat_kit
from remat_kit._cli.commands import (
    bench_command,
    completion_command,
    diff_command,
    fit_command,
    frontier_command,
    inspect_command,
    max_batch_command,
    mcp_command,
    measure_command,
    plan_command,
    policies_command,
    targets_command,
)
from remat_kit._cli.completion import SHELLS
from remat_kit._cli.doctor import SCRIPT_COMMANDS, doctor_command, run_command, split_script
from remat_kit._cli.models import models_command
from remat_kit._cli.output import BASELINE, STATUSES, USER_FAULT
from remat_kit._cli.published import COMPILES, TABLE
from remat_kit._cli.schema import schema_command
from remat_kit._errors import near_matches


class _Parser(argparse.ArgumentParser):
    """A parser that prints its errors in the form of remat_kit's errors."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            self.fail(*_unrecognized(options.command, rest))
        return options

    def error(self, message: str) -> NoReturn:
        hint = f"`{self.prog} --help` shows what it takes"
        if example := _example(self.prog):
            hint = f"for example `{example}`; {hint}"
        if "FILE_OR_MODULE:build" in message:
            hint = f"the model comes first: {self.prog} gpt --policy dots"
        found = re.match(r"argument COMMAND: invalid choice: '(.*?)' \(", message)
        if found:
            message = f"`remat-kit {found[1]}`: no command is named {found[1]!r}"
            if ".py" in found[1] or ":" in found[1]:
                hint = f"the command comes before the model: remat-kit inspect {found[1]}"
            elif near := near_matches(found[1], _COMMANDS):
                hint = f"did you mean {_or(near)}?"
        self.fail(message, hint)

    def fail(self, message: str, hint: str) -> NoReturn:
        self.exit(USER_FAULT, f"error: {message}\nhint: {hint}\n")


def _example(prog: str) -> str:
    """Return an example of a call of a command, or "" for the whole program."""
    name = prog.split()[-1]
    return _COMMANDS[name][2] if name in _COMMANDS else ""


def _unrecognized(command: str, words: Sequence[str]) -> tuple[str, str]:
    """Return the message and the hint about words that a command does not take."""
    help_ = f"`remat-kit {command} --help` shows what it takes"
    word = next((w for w in words if w.startswith("-")), words[0])
    if not word.startswith("-"):
        what = "it takes no such word here"
        hint = f"put quotes around a value that contains spaces; {help_}"
        return f"`remat-kit {command} ... {word}`: {what}", hint
    name = word.partition("=")[0]
    message = f"`remat-kit {command} ... {name}`: {command} has no option {name}"
    takers = [c for o, some, *_ in _OPTIONS if o == name for c in some]
    if takers:
        return message, f"{name} is an option of {', '.join(dict.fromkeys(takers))}; {help_}"
    own = [o for o, some, *_ in _OPTIONS if command in some and o.startswith("-")]
    short = re.fullmatch(r"-(\w)", name)
    near = [o for o in own if o.startswith(f"--{short[1]}")] if short else near_matches(name, own)
    return message, f"did you mean {_or(near)}?" if near else help_


def _or(words: Sequence[str]) -> str:
    return " or ".join(map(repr, words))


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _wholes(text: str) -> list[int]:
    return [_whole(part) for part in text.split(",")]


# Each command: the function that runs it, its help, and an example of a call.
_COMMANDS = {
    "inspect": (
        inspect_command,
        "list what is saved and what is computed twice",
        "remat-kit inspect gpt --policy dots --target tpu-v5e",
    ),
    "diff": (
        diff_command,
        "show the gradient programs without and with a policy, aligned",
        "remat-kit diff gpt --size size=tiny --policy dots",
    ),
    "measure": (
        measure_command,
        "compile for chips, in this machine or not, and show the memory that it takes",
        "remat-kit measure gpt --policy dots nothing --target tpu-v5e h100",
    ),
    "plan": (
        plan_command,
        "find the fastest schedule that fits a budget, and compile it",
        "remat-kit plan gpt --budget fit --target tpu-v5e --save plan.toml",
    ),
    "frontier": (
        frontier_command,
        "show the best schedules for every budget, not compiled",
        "remat-kit frontier gpt --target h100 --html frontier.html",
    ),
    "max-batch": (
        max_batch_command,
        "find the largest batch that fits, by compiling a few",
        "remat-kit max-batch gpt --policy nothing --target tpu-v5e --step 8",
    ),
    "fit": (
        fit_command,
        "show which batches fit which chips with which policies",
        "remat-kit fit gpt --batch 8,16,32 --policy dots --target tpu-v5e",
    ),
    "bench": (
        bench_command,
        "plan one of the CNNs of a published table, and compare with the paper's figures",
        "remat-kit bench --arch vgg16 --target cpu",
    ),
    "policies": (policies_command, "list the presets, or show one", "remat-kit policies uniform:2"),
    "targets": (
        targets_command,
        "list the chips that can be compiled for",
        "remat-kit targets --full",
    ),
    "completion": (
        completion_command,
        "print a script that completes commands and options in a shell",
        "remat-kit completion bash > ~/.local/share/bash-completion/completions/remat-kit",
    ),
    "models": (
        models_command,
        "list the models that come with remat_kit, or show one",
        "remat-kit models gpt",
    ),
    "schema": (
        schema_command,
        "list the JSON Schemas of what --json writes, or show one",
        "remat-kit schema plan",
    ),
    "mcp": (
        mcp_command,
        "answer agents and editors by the Model Context Protocol, on standard input and output",
        "remat-kit mcp",
    ),
    "doctor": (
        doctor_command,
        "run a training script until its step, and say what holds its memory and what to do",
        "remat-kit doctor --target h100 --save plan.toml train.py --epochs 3",
    ),
    "run": (
        run_command,
        "run a training script, unedited, with a plan",
        "remat-kit run --plan plan.toml train.py --epochs 3",
    ),
}


_MODEL = ("inspect", "diff", "measure", "plan", "frontier", "max-batch", "fit")
_PLANNING = ("plan", "frontier")
_BATCHES = ("max-batch", "fit")
_ANSWERS = tuple(name for name in _COMMANDS if name not in ("completion", "mcp", "run"))
_FULL = tuple(name for name in _ANSWERS if name not in ("bench", "models", "schema"))


_REPEATABLE: dict[str, Any] = {"action": "extend", "nargs": "+", "default": []}
_FLAG: dict[str, Any] = {"action": "store_true"}
_FILE: dict[str, Any] = {"metavar": "PATH", "type": pathlib.Path}
_NUMBER: dict[str, Any] = {"metavar": "N", "type": _whole}


# Each option: its name, the commands that take it, its help, and what else argparse must know.
_OPTIONS: tuple[tuple[str, tuple[str, ...], str, dict[str, Any]], ...] = (
    (
        "model",
        _MODEL,
        "a Python file or module and a function in it that returns (loss_fn, args): "
        "train.py:build, my_package.train:build; or a model of `remat-kit models`: gpt",
        {"metavar": "FILE_OR_MODULE:build"},
    ),
    (
        "--policy",
        _MODEL,
        "a preset, the path of a recipe or the text of a policy; repeatable; "
        f"{BASELINE!r} is always the first",
        {"metavar": "P", **_REPEATABLE},
    ),
    (
        "--at",
        _MODEL,
        "apply the policies to these module paths ('*/block_*') of the loss, "
        "instead of through the builder",
        {"metavar": "PATTERN"},
    ),
    (
        "--target",
        _MODEL,
        "a chip to compile for (see `remat-kit targets`); repeatable; h100@40GiB is an "
        "h100 with less memory",
        {"metavar": "T", **_REPEATABLE},
    ),
    (
        "--size",
        _MODEL,
        "an argument for the builder; repeatable",
        {"metavar": "k=v", **_REPEATABLE},
    ),
    (
        "--full",
        _FULL,
        "show everything: all rows and columns, and no name cut, even if the terminal is narrow",
        _FLAG,
    ),
    (
        "--html",
        ("inspect", "doctor", *_PLANNING),
        "write a page for a browser to this file",
        _FILE,
    ),
    (
        "--png",
        ("inspect",),
        "draw the memory over the schedule to this file, for each target; also .svg and .pdf",
        _FILE,
    ),
    (
        "--perfetto",
        ("inspect",),
        "write the timeline to this file, for each target, as a trace for ui.perfetto.dev",
        _FILE,
    ),
    (
        "--against",
        ("inspect",),
        "show what grew and what shrank since an earlier `inspect --json PATH`",
        {"metavar": "PATH"},
    ),
    (
        "--optimizer",
        ("inspect", "measure", *_PLANNING, *_BATCHES),
        "count the whole training step with this optimizer of optax (adamw, sgd, "
        "'optax.lion(1e-4)'): its state, its update, donated parameters",
        {"metavar": "O"},
    ),
    (
        "--budget",
        ("plan",),
        "bytes on the device (14GiB), a fraction of the step's activations (0.5, 50%%), min, "
        "free (the least memory at 2 %% extra time or less) or fit (the memory of the chip)",
        {"metavar": "B", "required": True},
    ),
    (
        "words",
        SCRIPT_COMMANDS,
        "the script, or -m and a module, and its own words",
        {"metavar": "SCRIPT", "nargs": "*"},
    ),
    (
        "--plan",
        ("run",),
        "the plan, as `remat-kit doctor --save PATH` or `remat-kit plan --save PATH` wrote it",
        {"metavar": "PATH"},
    ),
    ("--policy", ("run",), "a preset or the text of a policy, instead of a plan", {"metavar": "P"}),
    ("--at", ("run",), "apply the policy to these module paths", {"metavar": "PATTERN"}),
    (
        "--target",
        ("doctor",),
        "the chip (see `remat-kit targets`); by default the one in this machine, or cpu",
        {"metavar": "T"},
    ),
    (
        "--budget",
        ("doctor",),
        "the budget of the plan, as for `remat-kit plan`; by default fit if the step does not fit, "
        "and else free",
        {"metavar": "B"},
    ),
    (
        "--log",
        ("doctor",),
        "instead of running a script, read XLA's out-of-memory message from this file; - is "
        "standard input",
        {"metavar": "PATH"},
    ),
    ("--save", ("plan", "doctor"), "write the plan to this file, as a recipe", _FILE),
    *(
        (
            "--objective",
            (command,),
            "what to minimize: time (by the chip's roofline), flops, or balanced (three parts "
            "FLOPs and one part time, as fractions of the forward pass) (default: %(default)s)",
            {"metavar": "O", "default": default},
        )
        for command, default in (("plan", "balanced"), ("frontier", "time"))
    ),
    ("--offload", _PLANNING, "also offload residuals of scans to the host's memory", _FLAG),
    (
        "--pieces",
        (*_PLANNING, *_BATCHES, "doctor"),
        "plans may also run segments in pieces of an axis, recomputed one after the other",
        _FLAG,
    ),
    ("--png", ("frontier",), "draw memory against time to this file", _FILE),
    (
        "--batch-name",
        _BATCHES,
        "the builder's argument for the batch size; 'batch' by default",
        {"metavar": "NAME", "default": "batch"},
    ),
    (
        "--start",
        ("max-batch",),
        "the first batch size to compile; by default that of the builder",
        _NUMBER,
    ),
    ("--step", ("max-batch",), "try only multiples of N", {**_NUMBER, "default": 1}),
    (
        "--step",
        ("doctor",),
        "the name of the step, if the first one is not meant; * matches any part of a name",
        {"metavar": "NAME"},
    ),
    ("--at-most", ("max-batch",), "try no batch size above N", _NUMBER),
    (
        "--batch",
        ("fit",),
        "the batch sizes: 8,16,32; repeatable",
        {"metavar": "N,N", "type": _wholes, "required": True, **_REPEATABLE},
    ),
    (
        "--arch",
        ("bench",),
        f"one of {', '.join(line.arch for line in TABLE)}",
        {"metavar": "NAME", "required": True},
    ),
    (
        "--target",
        ("bench",),
        "the chip to compile for; 'cpu' by default",
        {"metavar": "T", "default": "cpu"},
    ),
    (
        "--models",
        ("bench",),
        "a folder with model files that replace those of remat_kit",
        {"metavar": "DIR"},
    ),
    (
        "--size",
        ("bench",),
        "an argument for the builder that replaces the paper's; repeatable",
        {"metavar": "k=v", **_REPEATABLE},
    ),
    (
        "--compiles",
        ("bench",),
        "compile at most N programs for each of the three plans",
        {**_NUMBER, "default": COMPILES},
    ),
    (
        "--pieces",
        ("bench",),
        "where no plan reaches a goal, try plans that run segments in pieces of an axis",
        _FLAG,
    ),
    ("name", ("policies",), "a preset, a recipe or a policy", {"metavar": "NAME", "nargs": "?"}),
    ("name", ("models",), "a model", {"metavar": "NAME", "nargs": "?"}),
    ("name", ("schema",), "a command, or a part of its JSON", {"metavar": "NAME", "nargs": "?"}),
    (
        "shell",
        ("completion",),
        "the shell that reads the script",
        {"metavar": "|".join(SHELLS), "choices": SHELLS},
    ),
    (
        "--json",
        _ANSWERS,
        "write JSON to this file; - is standard output",
        {"metavar": "PATH"},
    ),
    ("--debug", tuple(_COMMANDS), "show the traceback of an error", _FLAG),
)


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the words of a command line; the words of a script are left as they are."""
    own, words = list(argv), None
    if argv and argv[0] in SCRIPT_COMMANDS:
        flags = {"-h", "--help", *(name for name, _, _, how in _OPTIONS if how is _FLAG)}
        own, words = split_script(argv[1:], flags)
        own.insert(0, argv[0])
    options = argument_parser().parse_args(own)
    if words is not None:
        options.words = words
    return options


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; ``run`` of what it parses is the command."""
    parser = _Parser(
        prog="remat-kit",
        description="Inspect, plan and measure the memory of a JAX training step.",
        epilog=STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {remat_kit.__version__}")
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", dest="command", parser_class=_Parser
    )
    for name, (run, about, example) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=about,
            description=about,
            epilog=f"example:\n  {example}\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(run=run)
        if name in SCRIPT_COMMANDS:
            command.usage = f"remat-kit {name} [OPTION ...] SCRIPT [ARG ...]"
        for option, takers, text, how in _OPTIONS:
            if name in takers:
                command.add_argument(option, help=text, **how)
    return parser
