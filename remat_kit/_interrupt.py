"""What happens on Ctrl-C while the command line is still importing its modules?

Importing JAX takes seconds, during which Python would answer Ctrl-C with a traceback. The package
imports this module first, so that Ctrl-C ends the command line with a short message. The module
does nothing if remat_kit is used as a library.
"""

import itertools
import os
import signal
import sys
import threading

INTERRUPTED = 130


def quit_quietly(*_: object) -> None:
    """End the process at once, which loses nothing before the command starts or after it ends."""
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
        argv: `sys.argv` at the time at which the package is imported.
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
