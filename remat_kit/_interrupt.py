"""Ctrl-C while the command line is still being imported.

Importing JAX takes seconds, in which Python would answer Ctrl-C with a traceback. The package
imports this module first; it does nothing where remat_kit is used as a library.
"""

import itertools
import os
import signal
import sys
import threading

INTERRUPTED = 130


def quit_quietly(*_: object) -> None:
    """End the process at once: nothing has begun that could be lost, or all is done."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def is_command_line(argv: list[str], original: list[str]) -> bool:
    """Tell whether a process was started as ``remat-kit`` or ``python -m remat_kit``.

    >>> is_command_line(["/usr/bin/remat-kit", "plan"], ["python", "/usr/bin/remat-kit", "plan"])
    True
    >>> is_command_line(["-m", "plan"], ["python", "-m", "remat_kit", "plan"])
    True
    >>> is_command_line(["train.py"], ["python", "train.py"])
    False

    Args:
        argv: `sys.argv`, as it is while the package is imported.
        original: `sys.orig_argv`.
    """
    if argv[:1] == ["-m"]:
        return ("-m", "remat_kit") in itertools.pairwise(original)
    return bool(argv) and os.path.basename(argv[0]) in ("remat-kit", "remat-kit.exe")


if (
    is_command_line(sys.argv, sys.orig_argv)
    and threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, quit_quietly)
