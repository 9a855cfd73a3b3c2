"""The child process that compiles: it is replaced, interrupted, silent, and leaves."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from shapes import struct

from remat_kit._chip import compile as _compile
from remat_kit._chip import lowering as _lowering
from remat_kit._chip import worker as _worker
from remat_kit._chip.compile import measure
from remat_kit._chip.target import target
from remat_kit._chip.worker import Worker
from remat_kit._errors import (
    CompileError,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_KIT_CACHE", str(tmp_path / "cache"))


def needs(name):
    if not target(name).available:
        pytest.skip(f"the compiler for {name} is not installed")
    return name


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w))


ARGS = (struct(64, 64), struct(256, 64))


def child_of(platform):
    return _compile._workers[os.getpid(), platform, 1]._process


def fresh(n):
    """A program of its own for every n; each test has a cache of its own."""
    return lambda w, x: loss(w, x) * n


def stop_then(act):
    """Hold the child where it is, and act on it once the request is on its way."""
    process = child_of("cpu")
    os.kill(process.pid, signal.SIGSTOP)
    threading.Timer(0.3, act, [process]).start()
    return process


def test_child_that_is_killed_is_reported_and_replaced():
    measure(fresh(1), *ARGS, target="cpu")
    process = stop_then(lambda p: os.kill(p.pid, signal.SIGKILL))
    with pytest.raises(CompileError, match="was ended by SIGKILL") as caught:
        measure(fresh(2), *ARGS, target="cpu")
    assert "next call" in caught.value.hint
    assert measure(fresh(3), *ARGS, target="cpu").fits
    assert child_of("cpu").pid != process.pid


def test_interrupt_ends_the_child(interruptible):
    measure(fresh(1), *ARGS, target="cpu")
    process = stop_then(lambda _: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        measure(fresh(2), *ARGS, target="cpu")
    assert process.poll() == -signal.SIGKILL
    assert measure(fresh(3), *ARGS, target="cpu").fits


def test_child_says_nothing_on_the_terminal(capfd):
    needs("tpu-v5e")
    _compile.close_workers()
    measure(fresh(1), *ARGS, target="tpu-v5e")
    assert capfd.readouterr() == ("", "")


def test_last_words_of_a_child_are_shown(monkeypatch):
    _compile.close_workers()
    monkeypatch.setattr(_compile, "_workers", {})
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    with pytest.raises(CompileError, match="xla_no_such_flag"):
        measure(fresh(1), *ARGS, target="cpu")
    _compile.close_workers()


def test_description_for_another_vendor_ends_only_the_child():
    chip = target(needs("h100"))
    text = chip.spec.replace('"CUDA"', '"ROCM"').replace("cuda_compute", "rocm_compute")
    text = text[: text.index("rocm_compute_capability")] + (
        'rocm_compute_capability { gcn_arch_name: "gfx942" } }\nplatform_name: "ROCM"\n'
        'device_description_str: "MI300X"\n'
    )
    with pytest.raises(CompileError):
        measure(fresh(1), *ARGS, target=dataclasses.replace(chip, spec=text))
    assert measure(fresh(2), *ARGS, target="h100").fits


def request_for(platform="cpu"):
    traced = jax.jit(loss).trace(*ARGS)
    lowered = _lowering.lower(traced, platform, boundary=())
    return _compile._request(lowered, target(platform), {})


def test_idle_child_leaves_and_another_takes_its_place():
    worker = Worker(_compile._environment("cpu"), idle_seconds=0.3)
    request = request_for()
    first = worker.ask(request)
    process = worker._process
    assert process.wait(timeout=20) == 0
    assert worker.ask(request)["memory"] == first["memory"]
    assert worker._process is not process
    # The same, when it leaves between the look at it and the request.
    process = worker._process
    assert process.wait(timeout=20) == 0
    process.poll = lambda: None
    assert worker.ask(request)["memory"] == first["memory"]
    worker.close()
    worker.close()


def test_child_leaves_when_its_parent_does():
    code = (
        "import os, signal, test_worker as t; t.measure(t.loss, *t.ARGS, cache=False);"
        "print(t.child_of('cpu').pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = os.pathsep.join(str(Path(__file__).parents[up]) for up in range(3))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        assert not Path(f"/proc/{pid}/stat").exists()


def test_ways_a_process_ends_in_words():
    assert _worker.describe_status(-signal.SIGABRT) == "was ended by SIGABRT"
    assert _worker.describe_status(-1000) == "was ended by signal 1000"
