"""Output of the command line: exit statuses, files, JSON and messages."""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from remat_kit._errors import UserError
from remat_kit._files import write_whole
from remat_kit._show.table import Table

BASELINE = "none"


DONE, OWN_FAULT, USER_FAULT = 0, 1, 2


PIPE_CLOSED = 141  # the status that a shell reports for a process that SIGPIPE ended


def flushed(status: int) -> int:
    """Flush what `--help` printed, which nobody may be there to read."""
    try:
        sys.stdout.flush()
    except OSError:
        drop_output()
    return status


def say_on_stderr(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def drop_output() -> None:
    """Discard the buffers; otherwise flushing them would raise again when Python exits."""
    for stream in (sys.stdout, sys.stderr):
        try:
            number = stream.fileno()
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        except ValueError:  # a stream without a file
            pass


class OutputError(UserError):
    """Standard output cannot be written."""


@contextlib.contextmanager
def explained_output() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"`remat-kit ... > ...`: standard output cannot be written: {error.strerror}",
            hint="write to a disk that has room",
        ) from error


STATUSES = """\
exit status:
  0    done
  1    a fault of remat_kit; please report it
  2    a fault of the call, the model, a file or the installation; the message says which
  130  interrupted by Ctrl-C
  141  nobody reads standard output any more (| head)
"""


def refuse_idle(options: argparse.Namespace) -> None:
    """Raise for an option that has no effect on the command."""
    command, given = options.command, dict(vars(options))
    policies = [text for text in options.policy if text != BASELINE]
    if command in ("plan", "frontier"):
        reason = "a plan decides what is saved and where its regions are"
        instead = f"`remat-kit measure {options.model}` shows what a policy takes"
        for name in ("policy", "at"):
            _refuse(name, given[name], reason, instead)
    elif not policies or (command in BATCH_OPTIONS and set(policies) <= set(PLAN_OPTIONS)):
        _refuse("at", options.at, "there is no policy to apply at these modules", "give --policy")
    if command == "diff":
        reason = "diff compares traced programs, and compiles nothing"
        _refuse("target", options.target, reason, "`remat-kit inspect` compiles")


BATCH_OPTIONS = ("max-batch", "fit")


PLAN_OPTIONS = ("plan", "plan+offload")


def _refuse(name: str, value: Any, reason: str, instead: str) -> None:
    if value:
        shown = " ".join(value) if isinstance(value, list) else value
        raise UserError(
            f"`--{name} {shown}`: it has no effect here: {reason}",
            hint=f"leave it out; {instead}",
        )


def write_file(file: tuple[str, str, pathlib.Path], comparison: Any) -> None:
    from remat_kit._chip.target import target

    kind, chip, path = file
    name = target(chip).name if chip else ""
    if name and not any(name in report.readings for report in comparison.reports):
        print(f"note: no --{kind} for {name}, because nothing compiled for it", file=sys.stderr)
        return
    with explained_write(path, kind):
        getattr(comparison, f"to_{kind}")(path, *([name] if name else []))


LONGEST_OPTIMIZER = 200  # characters


def read_call(text: str, call: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Parse a name, or a call with literals, into the name and its arguments."""
    wrong = UserError(
        f"`{call}`: this is not an optimizer",
        hint="give the name of an optimizer of optax (adamw), or a call with numbers: "
        "optax.adamw(1e-3)",
    )
    if len(text) > LONGEST_OPTIMIZER:
        raise wrong
    try:
        node: Any = ast.parse(text.strip(), mode="eval").body
        args, kwargs = (), {}
        if isinstance(node, ast.Call):
            args = tuple(ast.literal_eval(arg) for arg in node.args)
            kwargs = {k.arg or "": ast.literal_eval(k.value) for k in node.keywords}
            node = node.func
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise wrong from None
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "optax":
        return node.attr, args, kwargs
    if isinstance(node, ast.Name):
        return node.id, args, kwargs
    raise wrong


def lints_of_a_raised_peak(found: dict[str, dict[str, Any]], policy: str) -> list[Any]:
    """Return the lints for a policy that takes more memory than none, as `inspect` has them."""
    from remat_kit._inspect.lints.lint import raised_peak

    if policy == BASELINE:
        return []
    lints = (raised_peak(m, found[BASELINE].get(name)) for name, m in found[policy].items())
    return [lint for lint in lints if lint is not None]


def shown_recipe(recipe: Any) -> str:
    lines = {
        "keeps": recipe.text,
        "also": ", ".join(recipe.aliases),
        "takes": ", ".join(f"{name}: {kind}" for name, kind in recipe.parameters),
        "about": recipe.description,
        "from": recipe.origin,
    }
    rows = [f"  {name:<7} {text}" for name, text in lines.items() if text]
    return "\n".join([recipe.usage, *rows])


def answer(
    options: argparse.Namespace,
    plain: Any,
    shown: Sequence[Any],
    writes: Sequence[Callable[[], None]] = (),
) -> None:
    """Print an answer, write the files that were asked for, and write JSON.

    If one of them cannot be written, the others are written anyway.
    """
    steps: list[Callable[[], None]] = list(writes)
    if options.json != "-":
        steps.insert(0, lambda: _show(shown, getattr(options, "full", False)))
    if options.json:
        steps.append(lambda: _write_json(options.json, plain))
    failed: UserError | None = None
    for step in steps:
        try:
            step()
        except UserError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def write_with(path: Any, kind: str, write: Callable[[Any], None]) -> None:
    with explained_write(path, kind):
        write(path)


def _write_json(path: str, value: Any) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    if path == "-":
        with explained_output():
            sys.stdout.write(text)
        return
    with explained_write(path):
        write_whole(path, text)


@contextlib.contextmanager
def explained_write(path: str | pathlib.Path, kind: str = "json") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"`--{kind} {path}`: it cannot be written: {error.strerror}",
            hint="name a file in a folder that exists and can be written"
            + (", or - for the terminal" if kind == "json" else ""),
        ) from error


def check_writable(path: str | pathlib.Path | None, kind: str = "json") -> None:
    """Raise before the long work if the file cannot be written after it."""
    if path is None or path == "-":
        return
    with explained_write(path, kind):
        if "\0" in str(path):
            raise OSError(0, "a path cannot contain a NUL character")
        existed = os.path.lexists(path)
        if existed and not os.path.isfile(path) and not os.path.isdir(path):
            return  # opening a pipe would wait for its reader
        with open(path, "a"):
            pass
        if not existed:
            os.unlink(path)


def _show(values: Sequence[Any], full: bool) -> None:
    """Print tables and lines: fitted into a terminal, and complete otherwise.

    Args:
        values: tables, lines, answers that consist of them, or texts.
        full: whether a terminal shows tables as they are, too, which may be wider than it is.
    """
    from rich.console import Console

    console = Console()
    parts = [
        p for value in values for p in (value.tables() if hasattr(value, "tables") else [value])
    ]
    with explained_output():
        for number, part in enumerate(parts):
            fitted = console.is_terminal and hasattr(part, "rich")
            if number:
                print()
            if fitted and not (full and isinstance(part, Table)):
                console.print(part.rich(), crop=False)
            else:
                print(str(part))
