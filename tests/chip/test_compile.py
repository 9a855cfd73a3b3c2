"""Programs compiled for absent chips: the figures of plain JAX, and answers from the cache."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.compilation_cache import compilation_cache as jax_cache
from shapes import struct

import remat_kit
from remat_kit import _jax, policy
from remat_kit._chip import catalogue as _catalogue
from remat_kit._chip import compile as _compile
from remat_kit._chip.compile import compile_program, measure
from remat_kit._chip.target import target, targets
from remat_kit._errors import (
    CompileError,
    RematKitWarning,
)
from remat_kit._program.steps import traced as _traced

PLATFORMS = ["cpu", "tpu-v5e", "h100"]
# What another process needs to import this file: the package and `shapes`.
SHARED = os.pathsep.join(str(Path(__file__).parents[up]) for up in (2, 1))


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


def plain(ws, x):
    for i in range(3):
        with jax.named_scope(f"block_{i}"):
            x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, ws[i])
    return jnp.sum(x * x)


def step(ws, x):
    value, gradient = jax.value_and_grad(plain)(ws, x)
    return value, ws - 0.1 * gradient


def offloading(ws, x):
    keep = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["product"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def body(x, w):
        return jnp.tanh(checkpoint_name(x @ w, "product")), None

    y, _ = jax.lax.scan(jax.checkpoint(body, policy=keep, prevent_cse=False), x, ws)
    return jnp.sum(y * y)


STACK = (struct(4, 256, 256), struct(1024, 256))
PROGRAMS = {
    "plain": (plain, {}),
    "donating": (step, {"argnums": None, "donate_argnums": (0,)}),
    "offloading": (offloading, {}),
}


def compile_here(name):
    """Print what plain JAX says of the programs: run in a process of its own."""
    chip = target(name)
    options = {"topology_name": chip.topology, "platform": chip.platform}
    if chip.platform == "cuda":
        options |= {"target_config": chip.spec, "topology": "1x1x1"}
    if chip.platform == "cpu":
        device = jax.devices()[0]
    else:
        from jax.experimental import topologies

        device = topologies.get_topology_desc(**options).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in STACK]
    figures = {}
    for label, (fn, how) in PROGRAMS.items():
        fn = fn if how.get("argnums", 0) is None else jax.value_and_grad(fn)
        jitted = jax.jit(fn, donate_argnums=how.get("donate_argnums", ()))
        stats = jitted.lower(*args).compile().memory_analysis()
        figures[label] = [
            stats.argument_size_in_bytes,
            stats.output_size_in_bytes,
            stats.alias_size_in_bytes,
            stats.temp_size_in_bytes,
            stats.host_temp_size_in_bytes,
        ]
    print(json.dumps(figures))


@functools.cache
def figures_of_plain_jax(name):
    environment = {**os.environ, **_compile._environment(target(name).platform)}
    environment["PYTHONPATH"] = SHARED
    done = subprocess.run(
        [sys.executable, __file__, name], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("label", PROGRAMS)
@pytest.mark.parametrize("name", PLATFORMS)
def test_child_gives_the_figures_of_plain_jax(name, label):
    fn, how = PROGRAMS[label]
    stays = (name, label) == ("cpu", "offloading")
    said = pytest.warns(RematKitWarning, match="4 MiB are offloaded, but a CPU's memory")
    with said if stays else contextlib.nullcontext():
        memory = measure(fn, *STACK, target=needs(name), **how)
    assert figures_of_plain_jax(name)[label] == [
        memory.argument_bytes,
        memory.output_bytes,
        memory.alias_bytes,
        memory.temp_bytes,
        memory.host_bytes,
    ]
    assert memory.peak_bytes == (
        memory.argument_bytes + memory.output_bytes - memory.alias_bytes + memory.temp_bytes
    )
    assert memory.headroom_bytes == memory.memory_bytes - memory.peak_bytes
    if label == "donating":
        assert memory.alias_bytes >= 4 * 256 * 256 * 4


@pytest.mark.parametrize("name", ["tpu-v5e", "h100"])
def test_offloaded_values_are_in_the_host_and_not_in_the_peak(name):
    memory = measure(offloading, *STACK, target=needs(name))
    assert memory.host_bytes == 4 * 1024 * 256 * 4
    assert memory.compiler_peak_bytes >= memory.host_bytes
    assert memory.peak_bytes < memory.argument_bytes + memory.output_bytes + 16 * 2**20


@pytest.mark.parametrize("name", PLATFORMS)
def test_compiled_program_keeps_module_paths_and_lines(name):
    compiled = compile_program(plain, STACK, needs(name))
    for i in range(3):
        assert f"block_{i}" in compiled.hlo_text
    assert "rematted_computation" in compiled.hlo_text
    assert __file__ in compiled.hlo_text
    assert compiled.memory.fits


def convolved(w, x):
    dims = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, w[0], (1, 1), "SAME", dimension_numbers=dims)
    return jnp.sum(jnp.tanh(jax.nn.relu(y).reshape(8, -1).astype(jnp.bfloat16) @ w[1]))


def test_autotuning_would_change_nothing_without_a_card():
    args = (struct(3, 3, 16, 32), struct(32768, 64, dtype=jnp.bfloat16)), struct(8, 32, 32, 16)

    def program(options):
        found = compile_program(convolved, args, needs("h100"), compiler_options=options)
        instructions = re.findall(r"^ +(?:ROOT )?(%\S+ = .*?[a-z]\()", found.hlo_text, re.M)
        return found.memory.temp_bytes, instructions

    bytes_here, instructions = program(None)
    assert any("custom-call(" in line for line in instructions)
    assert (bytes_here, instructions) == program({"xla_gpu_autotune_level": "4"})


def test_cards_older_than_the_installed_cuda_say_what_they_are_compiled_for():
    chip = target(needs("v100"))
    old = [note for note in chip.notes if "compute capability 7.0" in note]
    if _catalogue.cuda_plugin().parent.name == "xla_cuda13":
        assert len(old) == 1
        assert "major: 7 minor: 5" in chip.spec
    else:
        assert not old
    assert not any("compute capability" in note for note in target("t4").notes)
    assert measure(plain, *STACK, target="v100").fits


def test_json_has_the_contract():
    memory = measure(loss, *ARGS, target="cpu")
    plain_values = json.loads(json.dumps(memory.to_json()))
    for key in [
        "temp",
        "argument",
        "output",
        "alias",
        "host",
        "peak",
        "headroom",
        "memory",
        "code",
    ]:
        assert isinstance(plain_values[f"{key}_bytes"], int), key
    assert plain_values["fits"] is True
    assert plain_values["target"] == "cpu"
    assert plain_values["versions"]["jax"] == jax.__version__
    assert str(memory).startswith("cpu: ")
    assert plain_values["argument_bytes"] == (64 * 64 + 256 * 64) * 4


def test_running_out_of_memory_is_an_answer_and_is_kept():
    needs("tpu-v5e")
    args = (struct(30000, 30000), struct(30000, 30000))
    first = measure(loss, *args, target="tpu-v5e@4GiB")
    again = measure(loss, *args, target="tpu-v5e@4GiB")
    assert not first.fits
    assert first.needs_bytes == first.peak_bytes > 4 * 2**30
    assert first.headroom_bytes < 0
    assert first.temp_bytes is None
    assert first.argument_bytes == 2 * 30000**2 * 4
    assert "does not fit" in str(first)
    assert again.cached
    assert again.needs_bytes == first.needs_bytes
    json.dumps(first.to_json())


@pytest.mark.parametrize("name", ["cpu@1MiB", "h100@1MiB"])
def test_program_larger_than_the_chip_does_not_fit(name):
    needs(name)
    memory = measure(loss, struct(512, 512), struct(1024, 512), target=name)
    assert not memory.fits
    assert memory.needs_bytes == memory.peak_bytes > 2**20


@pytest.mark.parametrize(
    ("message", "needs_bytes"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
            "memory required for HLO temporaries (73.80G) exceeds available HBM (15.75G).",
            int(73.80 * 2**30),
        ),
        (
            "RESOURCE_EXHAUSTED: CompileTimeHbmOom: total memory required (1.75T) exceeds "
            "available HBM (15.75G)",
            int(1.75 * 2**40),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.5G of 15.75G hbm.",
            int(20.5 * 2**30),
        ),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate", None),
    ],
)
def test_complaints_about_memory_are_read(message, needs_bytes):
    assert _compile._out_of_memory(message) == {"needs": needs_bytes}


@pytest.mark.parametrize(
    "message",
    ["RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.", "INTERNAL: out of memory"],
)
def test_other_complaints_are_not_about_the_chips_memory(message):
    assert _compile._out_of_memory(message) is None


def test_notes_say_how_the_figures_came(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # the user has not set the flag that conftest sets
    notes = measure(loss, *ARGS, target="cpu").notes
    assert bool(notes) == (_jax.JAX_VERSION < (0, 11))
    if target("h100").available:
        assert any("autotuning" in note for note in measure(loss, *ARGS, target="h100").notes)


def test_callbacks_cannot_be_compiled_for_an_absent_chip():
    needs("tpu-v5e")

    def talkative(w):
        jax.debug.print("w {}", w[0])
        return w.sum()

    with pytest.raises(CompileError, match="cannot be lowered for tpu") as caught:
        measure(talkative, struct(3), target="tpu-v5e")
    assert "jax.debug.print" in caught.value.hint


def test_refused_compiler_option_is_an_error_of_the_compiler():
    with pytest.raises(CompileError, match=r"refused the program.*no_such_option"):
        measure(loss, *ARGS, target="cpu", compiler_options={"no_such_option": True})
    assert measure(loss, *ARGS, target="cpu").fits


@pytest.mark.parametrize("value", [True, False])
def test_a_compiler_option_may_be_a_bool(value, tmp_path):
    options = {"xla_dump_hlo_as_dot": value, "xla_dump_to": str(tmp_path)}
    assert compile_program(loss, ARGS, "cpu", cache=False, compiler_options=options).hlo_text
    assert bool(list(tmp_path.glob("*.dot"))) == value


@pytest.mark.parametrize("chip", ["cpu", "tpu-v5e"])
def test_what_is_measured_does_not_depend_on_the_optimization_of_machine_code(chip):
    """The tests compile without it (`tests/conftest.py`)."""

    needs(chip)

    def compiled(disabled):
        with disable_most_optimizations(disabled):
            return compile_program(plain, (struct(3, 64, 64), struct(256, 64)), chip, cache=False)

    one, other = map(compiled, (False, True))  # from one place, which the text names
    assert one.hlo_text == other.hlo_text
    assert one.memory.temp_bytes == other.memory.temp_bytes


@contextlib.contextmanager
def disable_most_optimizations(disabled):
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", disabled)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def test_local_runs_the_program():
    memory = measure(loss, *ARGS, target="local")
    assert 0 < memory.step_seconds < 5
    assert memory.fits
    assert memory.measured_peak_bytes is None  # the CPU keeps no account
    assert memory.target == "local"


def test_local_runs_a_program_that_donates():
    weights = jnp.ones((4, 256, 256))
    memory = measure(step, weights, STACK[1], target="local", argnums=None, donate_argnums=0)
    assert memory.alias_bytes == weights.nbytes
    assert memory.step_seconds > 0
    assert not weights.is_deleted()


@pytest.fixture
def compilation_cache(tmp_path):
    """JAX's own cache of compiled programs, empty."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path / "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}

    def use(values):
        for name, value in values.items():
            jax.config.update(name, value)
        jax_cache.reset_cache()

    use(settings)
    yield tmp_path / "jax"
    use(before)


def test_local_names_the_modules_of_the_program_although_jax_has_a_cache(compilation_cache):
    def named(name):
        def loss(w, x):
            with jax.named_scope(name):
                return jnp.sum(jnp.tanh(x @ w))

        return loss

    values, here = (jnp.ones((64, 64)), jnp.ones((256, 64))), target("local")
    scopes = ["the_old_scope", "the_new_scope"]
    texts = [compile_program(named(scope), values, here).hlo_text for scope in scopes]
    assert list(compilation_cache.glob("jit_*"))
    assert [[scope in text for scope in scopes] for text in texts] == [[True, False], [False, True]]


@pytest.mark.parametrize("hours", [0, 1])
def test_processes_run_a_program_equally_often_whatever_their_clocks_say(monkeypatch, hours):
    runs, clock = [], itertools.count(step=3600 * hours)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_compile.time, "perf_counter", lambda: float(next(clock)))
    _compile._timed_runs(lambda *args: runs.append(args), _traced.trace(loss, ARGS))
    assert len(runs) == 4


@pytest.mark.parametrize(
    ("before", "after", "peak"),
    [
        ({}, {}, None),
        ({"peak_bytes_in_use": 50, "bytes_in_use": 30}, {"peak_bytes_in_use": 100}, 90),
        ({"peak_bytes_in_use": 100, "bytes_in_use": 30}, {"peak_bytes_in_use": 100}, None),
    ],
)
def test_measured_peak_is_that_of_this_program(before, after, peak):
    found, notes = _compile._peak_between(before, after, argument_bytes=20)
    assert found == peak
    assert bool(notes) == (peak is None and bool(after))


def test_second_answer_comes_from_disk_and_is_the_same(tmp_path):
    first = compile_program(loss, ARGS, "cpu")
    again = compile_program(loss, ARGS, "cpu")
    assert (first.memory.cached, again.memory.cached) == (False, True)
    assert dataclasses.replace(first.memory, cached=True) == again.memory
    assert first.hlo_text == again.hlo_text
    assert not measure(loss, *ARGS, target="cpu", cache=False).cached


def test_damaged_answer_is_compiled_again(tmp_path):
    measure(loss, *ARGS, target="cpu")
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    assert not measure(loss, *ARGS, target="cpu").cached
    assert measure(loss, *ARGS, target="cpu").cached


def test_another_process_finds_the_answer(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_compile as t;"
        "print(t.measure(t.plain, *t.STACK, target='cpu').cached)"
    )
    found = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(Path(__file__).parent)],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": SHARED,
            },
            capture_output=True,
            text=True,
        )
        found.append(done.stdout.strip())
        assert done.returncode == 0, done.stderr
    assert found == ["False", "True"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [t.name for t in targets() if t.name != "local"])
def test_every_target_compiles(name):
    memory = measure(plain, *STACK, target=needs(name))
    assert memory.fits
    assert memory.temp_bytes is not None


if __name__ == "__main__":
    compile_here(sys.argv[1])


# -- a policy on a step that saves no memory ------------------------------------------------------


def long_step(w, x):
    def chain(w):
        y = x
        for i in range(6):
            with jax.named_scope(f"block_{i}"):
                y = jnp.sin(jnp.tanh(y @ w))
        return jnp.sum(y)

    return w - 0.1 * jax.grad(chain)(w)


def warnings_of(fn, **options):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        memory = measure(fn, struct(64, 64), struct(4096, 64), target="cpu", **options)
    return memory, [str(w.message) for w in found if "saves no memory" in str(w.message)]


@pytest.mark.skipif(
    _jax.JAX_VERSION < (0, 11), reason="XLA:CPU of JAX 0.10.2 saves nothing for this step"
)
def test_a_policy_on_a_step_that_saves_no_memory_is_a_warning():
    _, none = warnings_of(long_step)
    assert not none
    before, said = warnings_of(policy("everything")(long_step))
    assert len(said) == 1
    assert said[0].startswith(
        "`measure(..., target='cpu')`: the policy on the step saves no memory"
    )
    after, none = warnings_of(policy("nothing", at="block_*")(long_step))
    assert after.temp_bytes < before.temp_bytes
    assert not none


def test_a_slow_step_is_not_compiled_a_second_time(monkeypatch):
    monkeypatch.setattr(_compile, "_CHEAP_SECONDS", 0.0)
    kept = policy("everything")(long_step)
    _, none = warnings_of(kept)
    assert not none
    measure(long_step, struct(64, 64), struct(4096, 64))
    _, said = warnings_of(kept)
    assert len(said) == 1  # the answer is in the cache by now
    _, none = warnings_of(kept, cache=False)
    assert not none


def test_a_plan_for_a_step_that_fits_may_save_no_memory():
    args = struct(64, 64), struct(4096, 64)
    fits = remat_kit.plan(long_step, *args, budget="fit")
    _, none = warnings_of(policy(fits)(long_step))
    assert not none


def test_a_captured_array_on_a_mesh_must_be_an_argument(monkeypatch):
    """JAX lowers such a program for one device; the message names the array, not the mesh alone."""
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.device_put(jnp.ones((16, 8)), place)
    monkeypatch.setattr("remat_kit._jax.devices_of", lambda s: 8 if s == place else 1)
    weights = jax.ShapeDtypeStruct((8, 8), "float32")
    with pytest.raises(remat_kit.UserError, match=r"captures an array, f32\[16,8\]") as caught:
        remat_kit.measure(lambda w: jnp.sum(jnp.tanh(x @ w)), weights, target="cpu")
    assert "argument" in caught.value.hint
