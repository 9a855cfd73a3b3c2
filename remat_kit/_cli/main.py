"""The command line: ``remat-kit inspect | diff | measure | plan | frontier | max-batch | fit | …``.

Standard output is data: formatted in a terminal, plain text in a pipe, JSON on request. Progress
and errors go to standard error. The exit status is 0 for success, 1 for a fault of remat_kit, 2 for
a wrong call or a model that does not work, 130 for an interruption, and 141 if nobody reads the
output any more.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import shlex
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from remat_kit._cli.arguments import parsed
from remat_kit._cli.output import (
    DONE,
    OWN_FAULT,
    PIPE_CLOSED,
    USER_FAULT,
    OutputError,
    drop_output,
    explained_output,
    flushed,
    say_on_stderr,
)
from remat_kit._errors import InternalError, RematKitError, RematKitWarning
from remat_kit._interrupt import INTERRUPTED, quit_quietly


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    >>> main(["policies", "nothing"])
    nothing
      keeps   save(nothing)
      about   Keep only the inputs of the region, recompute the rest.
      from    JAX, https://docs.jax.dev/en/latest/gradient-checkpointing.html
    0

    Args:
      argv: the arguments; by default those of the process.
    """
    status = _status(sys.argv[1:] if argv is None else list(argv))
    if argv is None:
        _end_now_if_threads_are_left(status)
    return status


def _end_now_if_threads_are_left(status: int) -> None:
    """End the process if threads of a script are left for which Python would wait for ever."""
    scripts = sys.modules.get("remat_kit._doctor.script")
    if scripts is not None and scripts.left_threads():
        atexit._run_exitfuncs()
        flushed(status)
        os._exit(status)


def _status(argv: list[str]) -> int:
    debug = "--debug" in argv or os.environ.get("REMAT_KIT_DEBUG", "") not in ("", "0")
    _open_streams()
    try:
        with _heard_at_once():
            options = parsed(argv)
            options.call = shlex.join(["remat-kit", *argv])
            with _warnings_as_lines():
                options.run(options)
            with explained_output():
                sys.stdout.flush()
    except SystemExit as error:  # argparse: --help, --version, a wrong call
        return flushed(error.code if isinstance(error.code, int) else USER_FAULT)
    except KeyboardInterrupt:
        say_on_stderr("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return PIPE_CLOSED
    except Exception as error:
        return _failed(error, debug)
    return DONE


def _open_streams() -> None:
    """Replace closed streams, and let no character cause an encoding error."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # `>&-` in a shell
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (lives as long as the process)
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


_SECONDS_TO_STOP = 1.5


@contextlib.contextmanager
def _heard_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process soon, even if the main thread is inside a compiler.

    Python raises KeyboardInterrupt only when the main thread runs Python code. If a program is
    compiled in this process (the target `local`), that may take minutes. Another thread, which the
    signal wakes, then ends the process.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, quit_quietly)
        or os.name != "posix"
    ):
        yield
        return
    raised = threading.Event()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)

    def interrupt(*_: object) -> None:
        raised.set()
        raise KeyboardInterrupt

    def wait() -> None:
        while (signals := os.read(woken, 1)) and signals[0] != signal.SIGINT:
            pass
        os.close(woken)
        if signals and not raised.wait(_SECONDS_TO_STOP):
            quit_quietly()  # the worker processes notice it and end

    before = signal.signal(signal.SIGINT, interrupt)
    wakeup = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        # A second Ctrl-C while the process ends would show a traceback.
        own = before is quit_quietly
        signal.signal(signal.SIGINT, signal.SIG_IGN if own and raised.is_set() else before)
        os.close(wake)


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print each `RematKitWarning` once, as ``warning: ...``, on standard error."""
    seen: set[str] = set()
    with warnings.catch_warnings():
        otherwise = warnings.showwarning

        def show(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
            if not issubclass(category, RematKitWarning):
                otherwise(message, category, *args, **kwargs)
            elif str(message) not in seen:
                seen.add(str(message))
                say_on_stderr(f"warning: {message}")

        warnings.simplefilter("always", RematKitWarning)
        warnings.showwarning = show
        yield


def _failed(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    if isinstance(error, OutputError):
        drop_output()
    if isinstance(error, RematKitError) and not isinstance(error, InternalError):
        say_on_stderr(f"error: {error}")
        return USER_FAULT
    say_on_stderr(
        f"internal error: {type(error).__name__}: {error}\n"
        "hint: this is a fault of remat_kit; please report it with the command you ran and what "
        "the same command prints with --debug"
    )
    return OWN_FAULT
