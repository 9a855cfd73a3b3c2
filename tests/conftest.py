"""What holds for every test: the CPU, strict shapes, and a cache of compiled programs of its own.

The environment is set before jax is imported, which reads it then.
"""

import atexit
import gc
import importlib.metadata
import os
import pathlib
import shutil
import signal
import sys
import tempfile

# `REMAT_KIT_TEST_PLATFORMS=cuda,cpu pytest tests/contract/test_gpu.py` runs on a GPU.
_PLATFORMS = os.environ.get("REMAT_KIT_TEST_PLATFORMS", "cpu")
os.environ["JAX_PLATFORMS"] = _PLATFORMS
# XLA:CPU of jax 0.10 shows no saving from rematerialization with this scheduler. Later releases do
# not need the flag; a large program takes a few percent more memory with it there.
if importlib.metadata.version("jax").startswith("0.10."):
    os.environ["XLA_FLAGS"] = " ".join(
        ["--xla_cpu_enable_concurrency_optimized_scheduler=false", os.environ.get("XLA_FLAGS", "")]
    ).strip()  # what the environment asks for comes last and wins

# Most programs of the tests run once. The optimization of machine code takes half of the time of a
# compilation, and changes nothing in what remat_kit measures (tests/chip/test_compile.py).
# `JAX_DISABLE_MOST_OPTIMIZATIONS=0 pytest` compiles as users do, and so does `.ci/run oldest`.
# So are thousands of random programs, and what runs on a GPU.
if "REMAT_KIT_EXAMPLES" not in os.environ and _PLATFORMS == "cpu":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# One cache for all workers of pytest-xdist: they inherit the first process's environment.
_SHARED = "REMAT_KIT_TEST_CACHE"
if _SHARED not in os.environ:
    os.environ[_SHARED] = tempfile.mkdtemp(prefix="remat_kit_tests_")
    atexit.register(shutil.rmtree, os.environ[_SHARED], ignore_errors=True)
os.environ["REMAT_KIT_CACHE"] = os.environ[_SHARED]

import jax  # noqa: E402
import pytest  # noqa: E402
import same_examples  # noqa: E402, F401

jax.config.update("jax_numpy_rank_promotion", "raise")
# Other tests and workers compile many of the same programs. Random programs hardly repeat.
if _PLATFORMS == "cpu" and "REMAT_KIT_EXAMPLES" not in os.environ:
    jax.config.update("jax_compilation_cache_dir", os.path.join(os.environ[_SHARED], "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# Tracing makes many objects that stay and few cycles; to look for those takes 5 % of a run.
gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Run one worker more than there are cores: tests often wait for the processes that compile."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (cores or 1) + 1


def pytest_sessionfinish():
    """Save the measured coverage, if any, before pytest-xdist ends its workers.

    When the tests are done, pytest-xdist kills each worker that has not ended after a few seconds.
    A worker whose memory is large may take longer, and its coverage would be lost.
    """
    coverage = sys.modules.get("coverage")
    measured = coverage.Coverage.current() if coverage else None
    if measured and os.environ.get("PYTEST_XDIST_WORKER"):
        measured.stop()
        measured.save()


@pytest.fixture(params=[False, True], ids=["remat2", "remat3"])
def implementation(request):
    """Each of JAX's two implementations of checkpoint."""
    jax.config.update("jax_remat3", request.param)
    yield request.param
    jax.config.update("jax_remat3", False)


@pytest.fixture
def optimized():
    """Optimized machine code, for programs that are compared to the bit under `jax.jit`."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def interruptible():
    """Answer to Ctrl-C, which a shell tells a job in its background to ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command line here, at the root of the checkout: (status, stdout, stderr)."""
    from remat_kit._cli import main as _main

    monkeypatch.chdir(pathlib.Path(__file__).parents[1])

    def run(*argv):
        status = _main.main([str(word) for word in argv])
        out, err = capsys.readouterr()
        return status, out, err

    return run
