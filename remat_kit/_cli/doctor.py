"""The commands for scripts that nobody edits: ``doctor`` and ``run``.

Both take the options of remat_kit first, then a script or ``-m MODULE``, and then the words of the
script, whatever they look like.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import shlex
import sys
import traceback
from collections.abc import Collection, Sequence
from typing import Any

from remat_kit._cli.output import answer, check_writable, write_with
from remat_kit._cli.progress import Progress
from remat_kit._errors import BuildError, RematKitError, UserError
from remat_kit._files import is_own_file

SCRIPT_COMMANDS = ("doctor", "run")


_MODULE = "-m"


def split_script(argv: Sequence[str], flags: Collection[str]) -> tuple[list[str], list[str]]:
    """Divide the words of a command into its own, and those of the script.

    >>> split_script(["--budget", "0.5", "train.py", "--budget", "9"], flags=())
    (['--budget', '0.5'], ['train.py', '--budget', '9'])
    >>> split_script(["--save=a.toml", "-m", "pkg.train", "--lr", "1"], flags=())
    (['--save=a.toml'], ['-m', 'pkg.train', '--lr', '1'])

    Args:
        argv: the words after the name of the command.
        flags: the options that take no value.
    """
    at = 0
    while at < len(argv):
        word = argv[at]
        if word == "--":
            return list(argv[:at]), list(argv[at + 1 :])
        if word == _MODULE or not word.startswith("-"):
            break
        at += 1 if "=" in word or word in flags else 2
    return list(argv[:at]), list(argv[at:])


def _script(options: argparse.Namespace) -> Any:
    """Return the script of a command, or raise if there is none."""
    from remat_kit._doctor.script import Script

    words: list[str] = options.words
    call = f"remat-kit {options.command}"
    if words[:1] == [_MODULE]:
        words = words[1:]
        if not words:
            raise BuildError(f"`{call} -m`: no module is named", hint="for example -m pkg.train")
        return Script(words[0], tuple(words[1:]), is_module=True)
    if not words:
        raise BuildError(
            f"`{call}`: no script is named",
            hint=f"for example {call} train.py --epochs 1, or {call} -m my_package.train",
        )
    return Script(words[0], tuple(words[1:]))


# -- doctor ---------------------------------------------------------------------------------------


def doctor_command(options: argparse.Namespace) -> None:
    for kind in ("json", "save", "html"):
        check_writable(getattr(options, kind), kind)
    if options.log is not None:
        _read_log(options)
        return
    script = _script(options)
    call = f"remat-kit doctor {script}"

    from remat_kit._doctor import diagnosis as _diagnosis
    from remat_kit._doctor.capture import find_step
    from remat_kit._planner.search import parsed_budget

    if options.budget is not None:
        parsed_budget(options.budget, where=f"--budget {options.budget[:64]}")
    if options.target is not None and not options.target.startswith("local"):
        _check_target(options.target)
    with Progress() as progress:
        progress.say(f"{script}: running until its step")
        step = find_step(script, options.step, call)
        found = _diagnosis.diagnose(
            step,
            options.target,
            options.budget,
            pieces=options.pieces,
            patch=functools.partial(_patch, options=options),
            progress=progress.say,
        )
    writes = []
    if options.save:
        writes.append(functools.partial(write_with, options.save, "save", found.save))
    if options.html:
        writes.append(functools.partial(write_with, options.html, "html", found.to_html))
    plain = found.to_json()
    if plain["plan"] is not None:
        # The same fields as `remat-kit plan --json`, whose model is the script.
        plain["plan"] = {"model": str(script), "size": {}, "at": None, **plain["plan"]}
    answer(options, plain, [found], writes)


def _check_target(name: str) -> None:
    from remat_kit._chip.target import target
    from remat_kit._errors import MissingPluginError

    chip = target(name)
    if not chip.available:
        raise MissingPluginError(
            f"`--target {name}`: the compiler for {chip.platform} is not installed", hint=chip.needs
        )


def _patch(step: Any, options: argparse.Namespace) -> str:
    """Return the lines to paste, or for a step of a library the command that runs the script."""
    from remat_kit._doctor.diagnosis import PLAN_FILE, lines_to_paste

    file = str(options.save or PLAN_FILE)
    if step.is_own and step.name.rpartition(".")[2].isidentifier():
        return lines_to_paste(step, file)
    return shlex.join(["remat-kit", "run", "--plan", file, *options.words])


def _read_log(options: argparse.Namespace) -> None:
    from remat_kit._doctor.log import read_log
    from remat_kit._show.table import headed

    call = f"remat-kit doctor --log {options.log}"
    if options.words:
        raise UserError(
            f"`{call} {options.words[0]}`: a log and a script are given",
            hint="give one of them; the script need not run to read a log",
        )
    for name in ("save", "html", "step", "budget", "target", "pieces"):
        if getattr(options, name) not in (None, False):
            raise UserError(
                f"`--{name}`: it has no effect with --log, because a log contains no program",
                hint="leave it out, or name the script",
            )
    try:
        if options.log == "-":
            text = sys.stdin.read()
        else:
            text = pathlib.Path(options.log).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"`{call}`: the log cannot be read: {reason}", hint="name a text file, or - for a pipe"
        ) from error
    found = read_log(text, call)
    tables = [found.table()] if found.largest else []
    plain = {"log": options.log, **found.to_json()}
    answer(options, plain, [headed(found.headline), *tables])


# -- run ------------------------------------------------------------------------------------------


def run_command(options: argparse.Namespace) -> None:
    """Run a script with a plan; always raises `SystemExit` with the status of the script."""
    script = _script(options)
    call = f"remat-kit run {script}"
    what = options.plan or options.policy
    if what is None or (options.plan and options.policy):
        raise UserError(
            f"`{call}`: {'a plan and a policy are' if what else 'no plan is'} given",
            hint="give --plan PATH, which `remat-kit doctor --save PATH` wrote, or --policy",
        )
    if options.plan and options.at:
        raise UserError(f"`--at {options.at}`: a plan names its own regions", hint="leave it out")
    if options.plan:
        from remat_kit._policy.reading import as_policy
        from remat_kit._policy.structural import Planned

        what = as_policy(str(options.plan), call=f"--plan {options.plan}")
        if not isinstance(what, Planned):
            raise UserError(
                f"`--plan {options.plan}`: this is a policy and not a plan",
                hint="give it with --policy",
            )
    script.check(call)

    from remat_kit._doctor.apply import applied
    from remat_kit._doctor.script import running

    with running(script, forever=True) as run, applied(what, options.at, call):
        status = _status(run)
    raise SystemExit(status)


def _status(run: Any) -> int:
    """Run a script, and return its exit status; print an uncaught exception as Python does."""
    try:
        run()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except (KeyboardInterrupt, RematKitError):
        raise
    except BaseException as error:
        _hide_own_frames(error)
        traceback.print_exception(error)
        return 1
    return 0


def _hide_own_frames(error: BaseException) -> None:
    """Leave the frames before the script's own out of a traceback, as ``python SCRIPT`` does."""
    trace = error.__traceback__
    while trace is not None and (
        is_own_file(trace.tb_frame.f_code.co_filename)
        or trace.tb_frame.f_code.co_filename.startswith("<frozen runpy")
    ):
        trace = trace.tb_next
    error.__traceback__ = trace or error.__traceback__
