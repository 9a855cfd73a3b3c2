"""Programs whose buffers are assigned but that have no code: the same memory, in less time."""

import dataclasses
import json
import tempfile

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from shapes import struct
from zoo import load

import remat_kit
from remat_kit import named, offload, policy
from remat_kit._chip import assignment
from remat_kit._chip import compile as _compile
from remat_kit._chip.compile import compile_program
from remat_kit._chip.target import target
from remat_kit._compiled import hlo as _hlo
from remat_kit._compiled import peak as _peak
from remat_kit._errors import CompileError

TPU = "tpu-v5e"

CHIPS = ("cpu", "h100", TPU)


def needs(chip):
    if not target(chip).available:
        pytest.skip(f"the compiler for {chip} is not installed")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_KIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def impatient(monkeypatch):
    """Stop even the compilations that are about to end."""
    monkeypatch.setattr(_compile, "_START_SECONDS", 0.0)


def both(fn, args, chip, **options):
    """Compile a program without its code, and with it."""
    needs(chip)
    one, other = (
        compile_program(fn, args, chip, code=code, cache=False, **options) for code in (False, True)
    )
    assert (one.memory.code_bytes is None) == (one.memory.compiler_peak_bytes is None)
    return one, other


def numbers(memory):
    unknown = {"code_bytes", "compiler_peak_bytes", "compile_seconds", "cached"}
    return {
        field.name: getattr(memory, field.name)
        for field in dataclasses.fields(memory)
        if field.name not in unknown
    }


# -- programs -------------------------------------------------------------------------------


def convolve(x, kernel):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def convolutional(kernels, x):
    for kernel in kernels:
        x = jax.nn.relu(convolve(x, kernel))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean(x**2)


def normalized(kernels, x):
    for kernel in kernels:
        x = convolve(x, kernel)
        mean, variance = (f(x, (0, 1, 2), keepdims=True) for f in (jnp.mean, jnp.var))
        x = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
    return jnp.mean(jnp.abs(x))


def attention(weights, x):
    for w in weights:
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        x = x + jax.nn.softmax(q @ k.mT / 8.0) @ v
    return jnp.mean(x**2)


def scanned(weights, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)[0] ** 2)


def random(w, x):
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, x.shape)
    return jnp.mean(jnp.sort(jnp.where(keep, x, 0) @ w) ** 2)


def offloaded(weights, x):
    @policy(offload(named("product")))
    def layer(x, w):
        return jnp.tanh(checkpoint_name(x @ w, "product"))

    return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0] ** 2)


def small(weights, x):
    return jnp.sum(jnp.tanh(x @ weights[0]))


def few(weights, x):
    return jnp.sum(weights[0] * 2) + jnp.sum(x)


KERNELS = [struct(3, 3, 64, 64)] * 3
IMAGES = struct(64, 64, 64, 64)
PROGRAMS = {
    "convolutional": (convolutional, KERNELS, IMAGES),
    "normalized": (normalized, KERNELS, struct(16, 56, 56, 64)),
    "attention": (attention, [struct(64, 192)] * 3, struct(8, 1024, 64)),
    "scanned": (scanned, struct(8, 512, 512), struct(16384, 512)),
    "random": (random, struct(1024, 1024), struct(4096, 1024)),
    "offloaded": (offloaded, struct(8, 1024, 1024), struct(16384, 1024)),
    "small": (small, [struct(64, 64)], struct(256, 64)),
    "few": (few, [struct(2)], struct(3)),
}


@pytest.mark.parametrize(
    ("program", "chip"),
    [
        # TPU compilers take half a minute for each of these.
        pytest.param(program, chip, marks=pytest.mark.slow)
        if chip == TPU and program in ("convolutional", "normalized", "attention", "random")
        else (program, chip)
        for program in PROGRAMS
        for chip in CHIPS
    ],
)
def test_what_a_compiler_writes_is_the_memory_that_it_returns(program, chip, tmp_path):
    needs(chip)
    fn, *args = PROGRAMS[program]
    options, platform = assignment.dump_options(str(tmp_path)), target(chip).platform
    try:
        whole = compile_program(fn, args, chip, cache=False, compiler_options=options)
    except CompileError as error:
        if assignment.is_unknown_option(error):
            pytest.skip("the compilers of this jaxlib are not stopped")
        raise
    found = assignment.read(str(tmp_path), platform)
    memory = _compile._memory({**found, "compile_seconds": 0.0}, target(chip), False, (0, 0))
    assert memory.code_bytes is None
    shapes = {"adamw_bytes": whole.memory.adamw_bytes}
    assert numbers(dataclasses.replace(memory, **shapes)) == numbers(whole.memory)
    if program == "offloaded" and chip != "cpu":
        assert memory.host_bytes >= 8 * 16384 * 1024 * 4
    peaks = [
        _peak.anatomy(_hlo.parse(text), platform=platform).peak
        for text in (found["hlo"], whole.hlo_text)
    ]
    assert peaks[0].phase == peaks[1].phase
    assert peaks[0].bytes == peaks[1].bytes


def step(kernels, x):
    gradients = jax.grad(convolutional)(kernels, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, kernels, gradients)


@pytest.mark.parametrize("chip", [*CHIPS[:-1], pytest.param(TPU, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fn", "options"),
    [
        pytest.param(convolutional, {"optimizer": optax.adamw(1e-3)}, marks=pytest.mark.slow),
        (step, {"argnums": None, "donate_argnums": 0}),
    ],
)
def test_results_that_take_over_memory(fn, options, chip, impatient):
    one, other = both(fn, (KERNELS, IMAGES), chip, **options)
    assert numbers(one.memory) == numbers(other.memory)
    assert one.memory.alias_bytes > 0


@pytest.mark.parametrize(
    "chip", ["cpu:4", "h100:4", pytest.param("tpu-v5e:2x2", marks=pytest.mark.slow)]
)
def test_a_program_over_a_mesh(chip, impatient):
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    fn, weights, x = PROGRAMS["attention"]
    whole = NamedSharding(mesh, PartitionSpec())
    weights = jax.tree.map(lambda w: w.update(sharding=whole), weights)
    x = x.update(sharding=NamedSharding(mesh, PartitionSpec("data")))
    one, other = both(fn, (weights, x), chip)
    assert numbers(one.memory) == numbers(other.memory)
    assert one.memory.devices == 4


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("vgg", {"depth": 11}),
        ("gpt", {"layers": 4}),
        ("llama_nnx", {"layers": 2, "seq": 1024}),
    ],
)
def test_models_have_the_memory_of_the_whole_compilation(model, sizes, chip, impatient):
    """``benchmarks/compile_time.py`` compares more of them."""
    one, other = both(*load(model).build(**sizes), chip)
    assert one.memory.code_bytes is None
    assert numbers(one.memory) == numbers(other.memory)


# -- when the compiler is not stopped -------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS[1:])  # the compiler for CPUs may be faster than we are
def test_the_compiler_is_stopped_before_the_code(chip, impatient):
    needs(chip)
    fn, *args = PROGRAMS["convolutional"]
    found = compile_program(fn, args, chip, code=False)
    assert found.memory.code_bytes is None
    assert remat_kit.measure(fn, *args, target=chip).code_bytes is not None


@pytest.mark.slow
def test_a_program_that_nearly_fills_a_tpu_is_compiled_to_the_end(monkeypatch, impatient):
    needs(TPU)
    fn, *args = PROGRAMS["convolutional"]
    memory = compile_program(fn, args, TPU, code=False, cache=False).memory
    part = memory.peak_bytes / memory.memory_bytes
    for enough, stops in ((1.01 * part, True), (0.99 * part, False)):
        monkeypatch.setattr(_compile, "_SURELY_FITS", enough)
        found = compile_program(fn, args, TPU, code=False, cache=False).memory
        assert (found.code_bytes is None) == stops
        assert numbers(found) == numbers(memory)


def test_a_program_that_does_not_fit_is_refused_as_by_the_whole_compilation(impatient):
    fn, *args = PROGRAMS["scanned"]
    one, other = both(fn, args, f"{TPU}@128MiB")
    assert not one.memory.fits
    assert numbers(one.memory) == numbers(other.memory)


def test_a_compilation_that_is_about_to_end_is_not_stopped():
    fn, *args = PROGRAMS["small"]
    assert compile_program(fn, args, "cpu", code=False).memory.code_bytes is not None


@pytest.mark.parametrize("by", ["option", "variable"])
def test_the_folder_of_a_user_gets_what_the_compiler_writes(
    by, tmp_path, monkeypatch, impatient, request
):
    fn, *args = PROGRAMS["small"]
    folder = str(tmp_path / "own")
    options = {"xla_dump_to": folder} if by == "option" else None
    if by == "variable":
        request.addfinalizer(_compile.close_workers)
        _compile.close_workers()  # they have read it
        monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={folder}")
    found = compile_program(fn, args, "cpu", code=False, cache=False, compiler_options=options)
    assert found.memory.code_bytes is not None
    assert [*(tmp_path / "own").iterdir()]


@pytest.mark.parametrize("chip", CHIPS)
def test_nothing_is_left_in_the_temporary_folder(chip, tmp_path, monkeypatch, impatient):
    needs(chip)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for program in ("convolutional", "attention"):
        fn, *args = PROGRAMS[program]
        compile_program(fn, args, chip, code=False, cache=False)
    assert not [*folder.iterdir()]


def test_without_a_temporary_folder_programs_are_compiled_to_the_end(monkeypatch, impatient):
    def fails(**_):
        raise FileNotFoundError("no usable temporary directory")

    fn, *args = PROGRAMS["convolutional"]
    monkeypatch.setattr(tempfile, "TemporaryDirectory", fails)
    memory = compile_program(fn, args, "cpu", code=False, cache=False).memory
    assert memory.code_bytes is not None


def test_a_compiler_that_writes_nothing_is_not_stopped(tmp_path):
    def read():
        return assignment.read(str(tmp_path), "cpu")

    hlo, buffers = (
        tmp_path / f"module_0000.cpu_after_optimizations{end}.txt"
        for end in ("", "-buffer-assignment")
    )
    assert read() is None
    whole = "HloModule a\n\nENTRY %main () -> f32[] {\n  ROOT %c = f32[] constant(1)\n}\n"
    hlo.write_text(whole)
    assert read() is None
    buffers.write_text("of another form")
    assert read() is None
    buffers.write_text("allocation 0: size 4, maybe-live-out:\n")
    assert read() is None
    (tmp_path / "module_0000.before_optimizations.txt").write_text(whole)
    found = read()
    assert found["hlo"] == whole
    assert found["memory"]["output_size_in_bytes"] == 4
    (tmp_path / "module_0001.before_optimizations.txt").write_text(whole)
    assert read() is None  # of two programs it is not known which one is meant
    (tmp_path / "module_0001.before_optimizations.txt").unlink()
    hlo.write_text(whole[: whole.rindex("}")])
    assert read() is None


# -- answers on the disk --------------------------------------------------------------------


@pytest.mark.slow
def test_a_stored_answer_with_code_serves_both_and_one_without_only_its_kind(impatient):
    needs(TPU)
    fn, *args = PROGRAMS["attention"]

    def compiled(code):
        memory = compile_program(fn, args, TPU, code=code).memory
        return memory.cached, memory.code_bytes is not None

    assert compiled(code=False) == (False, False)
    assert compiled(code=False) == (True, False)
    assert compiled(code=True) == (False, True)
    assert compiled(code=False) == (True, True)


def test_a_stored_answer_that_lacks_a_number_is_not_used():
    whole = dict.fromkeys(assignment.FIELDS, 1)
    answer = {"memory": whole, "hlo": "HloModule a", "compile_seconds": 1.0}
    data = json.dumps(answer).encode()
    assert _compile._checked_answer(data, assignment.FIELDS) == answer
    assert _compile._checked_answer(data, [*assignment.FIELDS, "peak_memory_in_bytes"]) is None
