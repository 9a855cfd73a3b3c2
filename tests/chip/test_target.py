import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from remat_kit import _jax
from remat_kit._chip import catalogue as _catalogue
from remat_kit._chip import compile as _compile
from remat_kit._chip import lowering as _lowering
from remat_kit._chip import target as _target
from remat_kit._chip import worker as _worker
from remat_kit._chip.compile import compile_program, measure
from remat_kit._chip.target import target, targets
from remat_kit._chip.worker import Worker
from remat_kit._errors import (
    CompileError,
    MissingPluginError,
    NotDifferentiableError,
    RematKitWarning,
    TargetError,
    UnknownNameError,
    UserError,
)

PLATFORMS = ["cpu", "tpu-v5e", "h100"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_KIT_CACHE", str(tmp_path / "cache"))


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def needs(name):
    if not target(name).available:
        pytest.skip(f"the compiler for {name} is not installed")
    return name


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w))


ARGS = (struct(64, 64), struct(256, 64))


# -- the programs that are compiled both ways -----------------------------------------------


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
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
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


# -- names ----------------------------------------------------------------------------------

NAMED_IN_THE_CONTRACT = (
    frozenset(
        ("cpu", "local", "tpu-v2", "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-7x")
    )
    | frozenset(
        ("p100", "v100", "a100-40g", "a100-80g", "a6000", "h100", "h100-pcie", "h200", "b200")
    )
    | frozenset(("b300", "gb200", "gb300", "v100-32g", "t4", "l4", "a10g", "rtx4090"))
)


def test_every_promised_name_is_listed_with_figures():
    listed = {t.name: t for t in targets()}
    assert set(listed) >= NAMED_IN_THE_CONTRACT
    for chip in listed.values():
        assert chip.memory_bytes > 2**30, chip.name
        assert chip.bandwidth_bytes_per_second > 1e10, chip.name
        assert chip.host_bandwidth_bytes_per_second > 1e9, chip.name
        assert chip.flops_per_second["float32"] > 1e9, chip.name
        assert chip.available == (chip.needs is None)
        assert hash(chip) == hash(dataclasses.replace(chip))


def test_figures_of_the_table_agree_with_the_plugin():
    needs("h100")
    embedded = _catalogue.embedded_specs()
    assert {"p100", "v100", "a100-40g", "h100", "h200", "b200", "gb300"} <= set(embedded)
    for name in set(embedded) & set(_catalogue.GPUS):
        gpu, text = _catalogue.GPUS[name], embedded[name]
        assert gpu.memory_bytes == _catalogue.number_field(text, "device_memory_size"), name
        bandwidth = _catalogue.number_field(text, "memory_bandwidth")
        assert gpu.bandwidth == pytest.approx(bandwidth, rel=0.06), name
        if name == "a100-80g-pcie":
            continue  # the plugin gives its base clock
        implied = _catalogue.teraflops_of(text)
        assert gpu.teraflops["float32"] == pytest.approx(implied["float32"], rel=0.2), name
        if "bfloat16" in implied:
            assert gpu.teraflops["bfloat16"] == pytest.approx(implied["bfloat16"], rel=0.1), name


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("h10", UnknownNameError, "did you mean 'h100'"),
        ("tpu-v5", UnknownNameError, "'tpu-v5e'"),
        ("mi300x", TargetError, "AMD and Intel"),
        ("h100@", UserError, "not a size"),
        ("h100@lots", UserError, "not a size"),
        ("h100@0", UserError, "needs memory"),
        ("tpu-v5e@32GiB", UserError, "15.8 GiB"),
        ("", UnknownNameError, "there are:"),
    ],
)
def test_names_that_cannot_be(name, kind, message):
    with pytest.raises(kind, match=message) as caught:
        target(name)
    assert caught.value.hint
    assert f"`target({name!r})`" in str(caught.value)


def test_smaller_chip():
    assert target("h100@40GiB").memory_bytes == 40 * 2**30
    assert target("cpu@1TiB").memory_bytes == 2**40
    assert ("xla_tpu_max_hbm_size_mib", "8192") in target("tpu-v5e@8GiB").compiler_options
    if target("h100").available:
        assert f"device_memory_size: {40 * 2**30}\n" in target("h100@40GiB").spec
    assert target(target("t4")) == target("t4")


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


def test_missing_plugins_name_the_extra_and_stay_listed(monkeypatch):
    monkeypatch.setattr(_catalogue, "cuda_plugin", lambda: None)
    find = _target.importlib.util.find_spec
    monkeypatch.setattr(
        _target.importlib.util, "find_spec", lambda n: None if n == "libtpu" else find(n)
    )
    for name, extra in [("h100", "cuda"), ("t4", "cuda"), ("tpu-v5e@8GiB", "tpu")]:
        with pytest.raises(MissingPluginError, match=rf"remat-kit\[{extra}\]"):
            measure(loss, *ARGS, target=name)
    listed = {t.name: t for t in targets()}
    assert set(listed) >= NAMED_IN_THE_CONTRACT
    assert listed["h100"].needs == "pip install 'remat-kit[cuda]'"
    assert listed["tpu-v4"].needs == "pip install 'remat-kit[tpu]'"
    assert listed["cpu"].available


# -- memory ---------------------------------------------------------------------------------


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


# -- what is compiled -----------------------------------------------------------------------


def test_auxiliary_results_and_several_arguments():
    def with_aux(w, b, x):
        y = x @ w + b[None]
        return jnp.sum(y), {"mean": y.mean(0)}

    memory = measure(
        with_aux, struct(64, 32), struct(32), struct(256, 64), argnums=(0, 1), target="cpu"
    )
    # Each result lies on its own, and a table of pointers goes with them.
    assert 4 * (64 * 32 + 32 + 32 + 1) <= memory.output_bytes < 4 * (64 * 32 + 32 + 32 + 1) + 64


def test_whole_step_is_compiled_as_it_is():
    memory = measure(
        lambda x: (x + 1, x.astype(jnp.int32)), struct(1024), target="cpu", argnums=None
    )
    assert memory.argument_bytes == 4096


def test_keys_numbers_and_arrays_are_arguments():
    def noisy(w, x, rate, key):
        keep = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.sum(jnp.where(keep, x, 0) @ w) * rate

    x = np.ones((8, 64), np.float32)
    for name in PLATFORMS:
        if target(name).available:
            assert measure(noisy, struct(64, 64), x, 0.5, jax.random.key(0), target=name).fits
    assert measure(noisy, struct(64, 64), x, 0.5, jax.random.key(0), target="local").step_seconds


BAD = {
    "vector": (lambda w: w * 2, (struct(3),), {}, NotDifferentiableError, r"float32\[3\]"),
    "nothing": (lambda w: None, (struct(3),), {}, NotDifferentiableError, "returns None"),
    "dict": (lambda w: {"a": w}, (struct(3),), {}, NotDifferentiableError, "dict of 1"),
    "integer result": (
        lambda w: w.astype(int).sum(),
        (struct(3),),
        {},
        NotDifferentiableError,
        "scalar of int32",
    ),
    "complex result": (
        lambda w: (w * 1j).sum(),
        (struct(3),),
        {},
        NotDifferentiableError,
        "scalar of complex64",
    ),
    "integer argument": (
        lambda w: w.sum() * 1.0,
        (struct(3, dtype=jnp.int32),),
        {},
        NotDifferentiableError,
        r"args\[0\] is int32\[3\]",
    ),
    "integer leaf": (
        lambda p: p["w"].sum(),
        ({"w": struct(3), "step": struct(dtype=jnp.int32)},),
        {},
        NotDifferentiableError,
        r"args\[0\]\['step'\] is int32",
    ),
    "key": (lambda k: 1.0, (jax.random.key(0),), {}, NotDifferentiableError, r"key<"),
    "no leaves": (lambda p: jnp.zeros(()), ({},), {}, NotDifferentiableError, "no arrays"),
    "no such argument": (loss, ARGS, {"argnums": 2}, UserError, "no argument 2; 2 came"),
    "no arguments": (lambda: 1.0, (), {}, UserError, "no argument 0; 0 came"),
    "no argnums": (loss, ARGS, {"argnums": ()}, UserError, "no argument to differentiate"),
    "text": (lambda w, s: w.sum(), (struct(3), "mean"), {}, UserError, r"args\[1\] is 'mean'"),
    "function": (lambda w, s: w.sum(), (struct(3), loss), {}, UserError, "not an array"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_differentiated(case):
    fn, args, how, kind, message = BAD[case]
    with pytest.raises(kind, match=message) as caught:
        measure(fn, *args, **how)
    assert caught.value.hint
    assert "`measure" in str(caught.value)


def test_errors_of_the_function_itself_pass_through():
    def broken(w):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        measure(broken, struct(3))


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


def test_programs_over_several_devices_are_refused():
    code = """
import jax, jax.numpy as jnp, numpy as np, remat_kit._chip.compile as t
mesh = jax.sharding.Mesh(np.array(jax.devices()), "d")
s = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
f = lambda x: jnp.sum(jax.lax.with_sharding_constraint(x, s) ** 2)
try:
    t.measure(f, jax.ShapeDtypeStruct((8, 8), jnp.float32))
except t.UserError as error:
    print(error)
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **flags, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert "partitioned over 4 devices" in done.stdout, done.stderr


# -- the present device ---------------------------------------------------------------------


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


# -- the cache ------------------------------------------------------------------------------


def test_second_answer_comes_from_disk_and_is_the_same(tmp_path):
    first = compile_program(loss, ARGS, "cpu")
    again = compile_program(loss, ARGS, "cpu")
    assert (first.memory.cached, again.memory.cached) == (False, True)
    assert dataclasses.replace(first.memory, cached=True) == again.memory
    assert first.hlo_text == again.hlo_text
    assert not measure(loss, *ARGS, target="cpu", cache=False).cached


def test_who_asks_does_not_matter_but_the_program_does():
    def through_another_function():
        return compile_program(loss, ARGS, "cpu", call="inspect").memory

    assert not measure(loss, *ARGS, target="cpu").cached
    assert through_another_function().cached
    assert not measure(lambda w, x: loss(w, x) * 2, *ARGS, target="cpu").cached
    assert not measure(loss, ARGS[0], struct(128, 64), target="cpu").cached
    assert not measure(loss, *ARGS, target="cpu", donate_argnums=0).cached
    named = jax.named_scope("renamed")(loss)
    assert not measure(named, *ARGS, target="cpu").cached


def test_flags_of_the_compiler_are_part_of_the_key(monkeypatch):
    assert not measure(loss, *ARGS, target="cpu").cached
    request = {"platform": "cpu", "options": {}}
    before = _compile._key(request, "program")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert _compile._key(request, "program") != before
    assert _compile._key({**request, "options": {"a": "b"}}, "program") != before


def test_damaged_answer_is_compiled_again(tmp_path):
    measure(loss, *ARGS, target="cpu")
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    assert not measure(loss, *ARGS, target="cpu").cached
    assert measure(loss, *ARGS, target="cpu").cached


def test_another_process_finds_the_answer(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_target as t;"
        "print(t.measure(t.plain, *t.STACK, target='cpu').cached)"
    )
    found = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(Path(__file__).parent)],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
            capture_output=True,
            text=True,
        )
        found.append(done.stdout.strip())
        assert done.returncode == 0, done.stderr
    assert found == ["False", "True"]


# -- the child ------------------------------------------------------------------------------


def child_of(platform):
    return _compile._workers[os.getpid(), platform]._process


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


@pytest.fixture
def interruptible():
    """Answer to Ctrl-C, which a shell tells a job in its background to ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
        "import os, signal, test_target as t; t.measure(t.plain, *t.STACK, cache=False);"
        "print(t.child_of('cpu').pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
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


# -- everything -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [t.name for t in targets() if t.name != "local"])
def test_every_target_compiles(name):
    memory = measure(plain, *STACK, target=needs(name))
    assert memory.fits
    assert memory.temp_bytes is not None


if __name__ == "__main__":
    compile_here(sys.argv[1])
