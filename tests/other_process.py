"""Programs that need a process of their own, such as those on several CPU devices."""

import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

_SECONDS = 300.0  # two processes of which one has ended would wait for each other without an end


@functools.cache
def printed_by(file: str, *arguments: str) -> Any:
    """Run a Python file once with these arguments, and return what its last line says in JSON."""
    return _result(_started(file, *arguments))


@functools.cache
def printed_by_both(file: str) -> tuple[Any, Any]:
    """Run a Python file in two processes at once, and return what both say.

    Their arguments are the address of `jax.distributed.initialize` and the number of the process.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    first, second = (_started(file, address, str(number)) for number in range(2))
    try:
        return _result(first), _result(second)
    finally:
        for each in (first, second):
            each.kill()


def _started(file: str, *arguments: str) -> "subprocess.Popen[str]":
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, file, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _result(process: "subprocess.Popen[str]") -> Any:
    out, errors = process.communicate(timeout=_SECONDS)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(out.splitlines()[-1])
