"""How is a training script run inside of this process, and everything put back afterwards?

`running` runs a script as ``python SCRIPT ARG...`` or ``python -m MODULE ARG...`` does: as the
module ``__main__``, with its own ``sys.argv`` and its folder first on ``sys.path``. Afterwards the
process is as it was before: the arguments, the module path, the working folder, the environment,
the standard streams and the signal handlers are restored, modules of the script's folder are
forgotten, its threads are asked to end, and its child processes are ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import pathlib
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from remat_kit._errors import BuildError, near_matches


@dataclasses.dataclass(frozen=True)
class Script:
    """A script or a module with its arguments.

    Attributes:
        name: the path of a file, or the name of a module.
        args: the words after it.
        is_module: whether ``name`` is that of a module, as for ``python -m``.
    """

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def folder(self) -> str:
        """The folder that Python puts first on the module path."""
        return os.getcwd() if self.is_module else str(pathlib.Path(self.name).resolve().parent)

    def __str__(self) -> str:
        return f"-m {self.name}" if self.is_module else self.name

    def check(self, call: str) -> None:
        """Raise a `BuildError` if there is no such file."""
        path = pathlib.Path(self.name)
        if self.is_module or (path.is_file() and "\0" not in self.name):
            return
        if path.is_dir():
            raise BuildError(f"`{call}`: {path} is a folder", hint="name a Python file in it")
        close = []
        if path.parent.is_dir():
            close = near_matches(path.name, [f.name for f in path.parent.glob("*.py")])
        hint = "did you mean " + " or ".join(str(path.parent / c) for c in close) + "?"
        raise BuildError(
            f"`{call}`: there is no file {path}",
            hint=hint if close else "name a Python file, or a module after -m",
        )

    def run(self) -> None:
        """Run it as ``__main__``; exceptions, `SystemExit` included, are those of the script."""
        if self.is_module:
            sys.argv[:] = [self.name, *self.args]
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = [self.name, *self.args]
            runpy.run_path(self.name, run_name="__main__")


@contextlib.contextmanager
def running(script: Script, *, forever: bool = False) -> Iterator[Callable[[], None]]:
    """Yield the function that runs a script; afterwards the process is as it was before.

    Args:
        script: the script.
        forever: whether threads and child processes of the script may go on after its end, as they
            do under Python.
    """
    with _restored(script, forever), _python_signals():
        yield script.run


@contextlib.contextmanager
def _restored(script: Script, forever: bool) -> Iterator[None]:
    argv, path = sys.argv, list(sys.path)
    folder, environment = os.getcwd(), dict(os.environ)
    streams = sys.stdin, sys.stdout, sys.stderr
    modules, main = set(sys.modules), sys.modules.get("__main__")
    threads, children = set(threading.enumerate()), set(multiprocessing.active_children())
    sys.argv, own = list(argv), script.folder
    sys.path.insert(0, own)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        sys.stdin, sys.stdout, sys.stderr = streams
        os.chdir(folder)
        _restore_environment(environment)
        if main is not None:
            sys.modules["__main__"] = main
        for name in set(sys.modules) - modules:
            if _is_inside(getattr(sys.modules[name], "__file__", None), own):
                del sys.modules[name]
        if not forever:
            _end_children(children)
            _end_threads(threads)


def _restore_environment(before: dict[str, str]) -> None:
    """Change only what differs, because other threads may be reading the environment meanwhile."""
    for name in {*os.environ, *before}:
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


def _is_inside(file: str | None, folder: str) -> bool:
    """Tell whether a module belongs to a folder, and not to a virtual environment in it."""
    if not file or f"{os.sep}site-packages{os.sep}" in file:
        return False
    return os.path.abspath(file).startswith(folder + os.sep)


@contextlib.contextmanager
def _python_signals() -> Iterator[None]:
    """Give the script the signal handlers that a Python process starts with.

    Restores the handlers that were there before, and those that the script has replaced.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.getsignal(s) for s in signal.valid_signals()}
    wakeup = signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)


# -- what the script leaves behind ----------------------------------------------------------------

_SECONDS_TO_END = 1.0


def _end_children(before: set[Any]) -> None:
    """End the child processes that the script has started, first by asking them."""
    left = [p for p in multiprocessing.active_children() if p not in before]
    for process in left:
        process.terminate()
    for process in left:
        process.join(_SECONDS_TO_END)
        if process.is_alive():
            process.kill()
            process.join()


def _end_threads(before: set[threading.Thread]) -> None:
    """Raise `SystemExit` in the threads that the script has started.

    A thread that waits for a lock or a queue does not notice it; `left_threads` returns it.
    """
    for thread in _new_threads(before):
        if thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
            )
    until = time.monotonic() + _SECONDS_TO_END
    for thread in _new_threads(before):
        thread.join(max(0.0, until - time.monotonic()))
    _left.update(t for t in _new_threads(before) if not t.daemon)


def _new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t not in before]


_left: set[threading.Thread] = set()


def left_threads() -> list[threading.Thread]:
    """Return the threads of scripts that still run and that Python would wait for at its end."""
    return [t for t in _left if t.is_alive()]
