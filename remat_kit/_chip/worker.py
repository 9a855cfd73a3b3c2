"""A worker process that compiles, with the code of both the parent and the child.

Compilers for chips that are not in the machine need environment variables that are read only once,
print to the terminal, and may abort the process. They therefore run in a child process. The child
runs this file as a script. Its environment is set before JAX is imported, and it loads `lowering`,
`assignment` and `_jax` on their own, so that it imports neither Flax nor the rest of the package.

A request may ask for the memory without machine code, which takes long to generate. The child then
answers as soon as the compiler has assigned all buffers, and ends, because nothing else stops a
compiler. A program that needs nearly all of a TPU's memory is compiled to the end.

Requests and answers are pickled dictionaries on the standard streams, each preceded by its length.
What libraries print goes to standard error; the parent stores it and shows it only if the child
dies.

`concurrent.futures.ProcessPoolExecutor` does not serve here: a spawned child runs the user's script
again and fails if the script has no ``if __name__ == "__main__"``, and a child that a compiler ends
is a `BrokenProcessPool` with neither its exit status nor its last lines.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import math
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

IDLE_SECONDS = 300.0
_PACKAGE = Path(__file__).resolve().parents[1]


WITHOUT_CODE = "without_code"  # marks a request for the memory alone; arguments of `_assigned`


UNFINISHED = "unfinished"  # marks the last answer of a child, which ends without finishing


_TAIL_BYTES = 64 * 1024


_POLL_SECONDS = 0.02


_LENGTH = struct.Struct("<Q")


def send(stream: IO[bytes], message: Any) -> None:
    """Write one message."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read one message; raise EOFError if the other side has ended."""
    (length,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
    return pickle.loads(_read(stream, length))


def _read(stream: IO[bytes], n: int) -> bytes:
    chunks = []
    while n:
        if not (chunk := stream.read(n)):
            raise EOFError
        chunks.append(chunk)
        n -= len(chunk)
    return b"".join(chunks)


# -- the parent's end -----------------------------------------------------------------------


class WorkerDiedError(Exception):
    """The child process ended without an answer."""

    def __init__(self, status: int, stderr_lines: tuple[str, ...]):
        self.status = status
        self.stderr_lines = stderr_lines
        super().__init__(f"the compiler's process {describe_status(status)}")


def describe_status(status: int) -> str:
    """Describe how a process ended.

    >>> describe_status(-6), describe_status(3)
    ('was ended by SIGABRT', 'ended with exit status 3')
    """
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


class Worker:
    """A child process that compiles, started by the first request and again after it has died.

    Args:
        environment: variables to set in the child; they override those of this process.
        idle_seconds: how long the child waits for the next request before it exits.
    """

    def __init__(self, environment: Mapping[str, str], *, idle_seconds: float = IDLE_SECONDS):
        self._environment = dict(environment)
        self._idle_seconds = idle_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request and return its answer.

        Raises:
            WorkerDiedError: the child ended before it answered.
        """
        with self._lock:
            fresh = self._start()
            try:
                return self._exchange(request)
            except WorkerDiedError as death:
                # The child may have exited between the check and the request, because it was idle.
                if fresh or death.status != 0:
                    raise
                self._start()
                return self._exchange(request)

    def close(self) -> None:
        """End the child; the next request starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            self._end(process)

    def _start(self) -> bool:
        if self._process is not None and self._process.poll() is None:
            return False
        self.close()
        self._stderr = _scratch_file()
        self._process = subprocess.Popen(
            [sys.executable, "-P", os.path.abspath(__file__), str(self._idle_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **self._environment},
        )
        return True

    def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            send(process.stdin, request)
            found = receive(process.stdout)
        except (OSError, EOFError) as error:
            # A process that closed its pipes is about to end, so this wait is short.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            lines = self._last_lines()
            self.close()
            raise WorkerDiedError(process.returncode, lines) from error
        except BaseException:
            process.kill()
            self.close()
            raise
        if found.pop(UNFINISHED, False):
            self.close()
        return found

    def _last_lines(self) -> tuple[str, ...]:
        assert self._stderr is not None
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _TAIL_BYTES))
        text = self._stderr.read().decode("utf-8", "replace")
        return tuple(line for line in text.splitlines() if line.strip())

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None


def _scratch_file() -> IO[bytes]:
    """Open a file without a name; in memory if no temporary directory can be written."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        if not hasattr(os, "memfd_create"):
            raise
        return os.fdopen(os.memfd_create("remat_kit"), "w+b")


# -- the child's end ------------------------------------------------------------------------


def _load(module: str) -> Any:
    """Import a module of this folder without its package, and without JAX if it needs none."""
    for name, folder in (("remat_kit", _PACKAGE), ("remat_kit._chip", _PACKAGE / "_chip")):
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(folder)]
            sys.modules[name] = package
    return importlib.import_module(f"remat_kit._chip.{module}")


def answer(jax_section: Any, devices: dict[Any, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Compile one program; return an answer also if the compiler refuses the program."""
    jax_section.apply_compile_settings(request["settings"])
    place = (request["platform"], request["topology"], repr(request["topology_options"]))
    mesh = request.get("mesh")
    try:
        if place not in devices:
            devices[place] = jax_section.topology_devices(
                request["platform"], request["topology"], request["topology_options"]
            )
    except Exception as error:
        return {"no_topology": f"{type(error).__name__}: {error}"}
    there = devices[place]
    if mesh is not None and len(there) != math.prod(mesh["shape"]):
        return {"no_topology": f"it has {len(there)} devices"}
    try:
        if mesh is None:
            chosen, unsharded = there[:1], ((), ())
        else:
            chosen, unsharded = jax_section.assigned(there, mesh["shape"]), mesh["unsharded"]
        start = time.perf_counter()

        def compiled(options: Mapping[str, str]) -> dict[str, Any]:
            program = jax_section.compile_bytes(request["program"], chosen, options, unsharded)
            return {
                "memory": jax_section.executable_memory(program),
                "hlo": jax_section.executable_text(program),
            }

        if WITHOUT_CODE not in request:
            found = compiled(request["options"])
        else:
            given = request["options"], request["platform"]
            found = _assigned(compiled, *given, **request[WITHOUT_CODE])
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"compile_seconds": time.perf_counter() - start, **found}


def _assigned(
    compiled: Callable[[Mapping[str, str]], dict[str, Any]],
    options: Mapping[str, str],
    platform: str,
    folder: str,
    enough: float,
    patience: float,
) -> dict[str, Any]:
    """Compile a program until its buffers are assigned.

    Args:
        compiled: compiles to the end.
        options: its argument.
        platform: of the compiler.
        folder: an empty one, which the parent removes: the compiler may write into it to the last.
        enough: the bytes above which the compiler may still refuse the program, so that it has to
            be compiled to the end.
        patience: the seconds that the compilation may take after that and still is not stopped.
    """
    assignment = _load("assignment")
    pool = concurrent.futures.ThreadPoolExecutor(1)
    whole = pool.submit(compiled, {**options, **assignment.dump_options(folder)})
    pool.shutdown(wait=False)  # once the compilation has ended
    found = None
    while found is None and not concurrent.futures.wait([whole], _POLL_SECONDS).done:
        found = assignment.read(folder, platform)
    # A compilation that is about to end is cheaper than a new child.
    ends = concurrent.futures.wait([whole], patience).done
    if ends and assignment.is_unknown_option(whole.exception()):
        return compiled(options)
    if ends or found is None or assignment.needs(found["memory"]) > enough:
        return whole.result()
    return {**found, UNFINISHED: True}


def _leave_with(parent: int) -> None:
    # While it compiles, the child does not read the pipe for minutes; without a parent, nobody
    # would read its answer.
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def main(idle_seconds: float) -> None:
    """Answer requests until the parent ends or no request has come for a while."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    devices: dict[Any, Any] = {}
    jax_section = _load("lowering")
    while select.select([requests], [], [], idle_seconds)[0]:
        try:
            request = receive(requests)
        except EOFError:
            break
        found = answer(jax_section, devices, request)
        send(answers, found)
        if UNFINISHED in found:
            break
    sys.stdout.flush()
    os._exit(0)  # compile-only plugins may abort when they are torn down


if __name__ == "__main__":
    main(float(sys.argv[1]))
