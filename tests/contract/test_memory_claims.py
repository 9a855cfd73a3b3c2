"""What is claimed about memory, held against JAX and against the compilers.

For every model of ``models/`` and ten policies drawn at random:

* the bytes that `inspect` says are saved are those that JAX's own derivative hands from the forward
  to the backward pass, but for values that are equal and counted once;
* the peak that the walk over the compiled program finds is what the compiler itself says is live at
  the fullest step, within 1 % on CPUs and TPUs and 5 % on GPUs. The compiler writes that into the
  dump of its buffer assignment, which the walk does not read (`benchmarks/_witness.py` does). What
  the compiler reserves beyond it is gaps in its heap, which are up to 4 % of some of these programs
  on CPUs, and on a TPU memory for the temporaries in its VMEM;
* what the compiler writes that it reserves is the peak of its memory analysis, within 1 % on CPUs
  and 5 % on other chips, whose compilers reserve some memory that no instruction names;
* a program is never said to fit a chip, made smaller and smaller, whose compiler refuses it, with
  donated parameters and without.

The default run takes one policy for a few models. The rest takes about an hour on two cores:
``pytest -m slow tests/contract/test_memory_claims.py``.
"""

import dataclasses
import functools
import itertools
import math
import random
import re
import tempfile

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import pytest
from _witness import dump_options, read_folder
from zoo import ROOT, load

import remat_kit
from remat_kit import target
from remat_kit._program import ops as _ops

TINY = {"size": "tiny", "batch": 8}
CELLS = {"batch": 8, "image": 16, "width": 4, "layers": 3}
MODELS = {
    "mlp": ("mlp", {"batch": 512, "features": 64, "hidden": 64, "layers": 3}),
    "residual_mlp": ("residual_mlp", {"batch": 256, "features": 48, "width": 64, "layers": 4}),
    "gpt": ("gpt", TINY | {"batch": 16}),
    "gpt scan dropout": ("gpt", TINY | {"layers": 6, "scan": True, "dropout": 0.1}),
    "gpt_nnx": ("gpt_nnx", TINY),
    "llama_nnx scan": ("llama_nnx", TINY | {"scan": True}),
    "bert scan": ("bert", TINY | {"scan": True}),
    "vit": ("vit", TINY | {"dropout": 0.1}),
    "moe": ("moe", TINY),
    "lstm": ("lstm", TINY),
    "resnet": ("resnet", {"depth": 18, "batch": 4, "image": 32, "classes": 10, "width": 8}),
    "densenet": (
        "densenet",
        {"batch": 4, "image": 32, "classes": 10, "growth": 8, "stages": (2, 2)},
    ),
    "unet": ("unet", {"batch": 2, "image": 36, "width": 4, "levels": 1}),
    "alexnet": ("alexnet", {"batch": 4, "image": 63, "classes": 10, "width": 4, "hidden": 16}),
    "vgg": ("vgg", {"depth": 11, "batch": 4, "image": 32, "classes": 10, "width": 4, "hidden": 16}),
    "inception": ("inception", {"batch": 2, "image": 75, "classes": 10, "width": 4}),
    **{f"cells {arch}": ("cells", CELLS | {"arch": arch}) for arch in ("darts", "nasnet")},
}
# Each chip with two tolerances: of the live bytes, and of the bytes that the compiler reserves.
CHIPS = {"cpu": (0.01, 0.01), "tpu-v5e": (0.01, 0.05), "h100": (0.05, 0.05)}
POLICIES = 10
QUICK = {("mlp", 3), ("gpt scan dropout", 1), ("residual_mlp", 2)}
QUICK_WALKS = {("residual_mlp", 6, "cpu"), ("residual_mlp", 2, "tpu-v5e")}

# A policy may select nothing in a model: it is drawn at random.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def selector(rng):
    """A set of values, drawn at random."""
    dtype, size = remat_kit.dtype("float32"), rng.choice(["1KiB", "16KiB", "64KiB"])
    primitives = rng.sample(["tanh", "exp", "add", "mul", "max", "reduce_sum", "rsqrt"], 3)
    found = rng.choice(
        [
            remat_kit.dots,
            remat_kit.dots_no_batch,
            remat_kit.larger_than(size),
            remat_kit.smaller_than(size) & dtype,
            remat_kit.cheap(rng.choice([0.5, 2.0])),
            remat_kit.where(lambda v, p=frozenset(primitives): not p.isdisjoint(v.primitives)),
            remat_kit.named_regex(".*(up|out|attn|conv).*", strict=False),
        ]
    )
    return ~found if rng.random() < 0.2 else found


def drawn_policy(name, number):
    """One of the policies that are drawn for a model."""
    rng = random.Random(f"{name} {number}")
    if number < 2:
        return ("nothing", "dots")[number]
    policy = remat_kit.save(selector(rng))
    for _ in range(rng.randrange(3)):
        other = rng.choice([remat_kit.save, remat_kit.recompute])(selector(rng))
        policy = policy | other if rng.random() < 0.5 else remat_kit.first(policy, other)
    return policy


def built(name, number):
    module, size = MODELS[name]
    return load(module).build(drawn_policy(name, number), **size)


def handed_over(loss, args):
    """The bytes that JAX's derivative keeps of what the loss computes, unneeded ones left out.

    What the backward pass does not need is what `jax.jit` drops from the arguments of one.
    """
    tree = None

    def forward(params, *rest):
        nonlocal tree
        out, vjp = jax.vjp(lambda p: loss(p, *rest), params)
        leaves, tree = jax.tree.flatten(vjp)
        return out, leaves

    jaxpr = jax.make_jaxpr(forward)(*args).jaxpr
    kept = jaxpr.outvars[1:]  # after the loss
    given = {*jaxpr.invars, *jaxpr.constvars}
    distinct = list(dict.fromkeys(v for v in kept if not isinstance(v, jec.Literal)))
    made = [v for v in distinct if v not in given]
    rest = [v for v in distinct if v in given]

    def backward(residuals, inputs, cotangent):
        known = dict(zip([*made, *rest], [*residuals, *inputs], strict=True))
        leaves = [v.val if isinstance(v, jec.Literal) else known[v] for v in kept]
        return jax.tree.unflatten(tree, leaves)(cotangent)

    structs = [
        [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in vs] for vs in (made, rest)
    ]
    lowered = jax.jit(backward).lower(*structs, jax.ShapeDtypeStruct((), jnp.float32))
    arguments = re.findall(r'loc\("residuals\[(\d+)\]', lowered.as_text(debug_info=True))
    value_of = numbered(jaxpr)
    found = {value_of[made[int(i)]]: made[int(i)].aval for i in set(arguments)}
    return sum(map(_ops.nbytes, found.values()))


def numbered(jaxpr):
    """Give equal numbers to equal values: results of the same operation on equal values."""
    value_of = {v: n for n, v in enumerate([*jaxpr.invars, *jaxpr.constvars])}
    numbers = {}
    for eqn in jaxpr.eqns:
        read = [repr(v) if isinstance(v, jec.Literal) else value_of[v] for v in eqn.invars]
        operation = (eqn.primitive, re.sub(r"0x[0-9a-f]+", "", str(eqn.params)), *read)
        for i, v in enumerate(eqn.outvars):
            value_of[v] = numbers.setdefault((operation, i), len(value_of) + len(numbers))
    return value_of


def cases(quick, *rest):
    for case in itertools.product(MODELS, range(POLICIES), *rest):
        yield pytest.param(*case, marks=() if case in quick else pytest.mark.slow)


def test_every_model_is_claimed_for():
    files = {path.stem for path in (ROOT / "models").glob("*.py")}
    assert files == {module for module, _ in MODELS.values()}


@pytest.mark.parametrize(("name", "number"), list(cases(QUICK)))
def test_what_is_saved_is_what_the_derivative_hands_over(name, number):
    loss, args = built(name, number)
    claimed, handed = remat_kit.inspect(loss, *args).saved_bytes, handed_over(loss, args)
    assert claimed <= handed
    assert claimed == pytest.approx(handed, rel=0.01)


@pytest.mark.parametrize(("name", "number", "chip"), list(cases(QUICK_WALKS, CHIPS)))
def test_the_walk_finds_the_peak_of_the_compiler(name, number, chip):
    if not target(chip).available:
        pytest.skip(f"the compiler for {chip} is not installed")
    loss, args = built(name, number)
    report, witness = dumped(loss, args, target(chip))
    peak, memory = report.readings[chip].peak, report.memory[chip]
    live, reserved = CHIPS[chip]
    assert peak.bytes == pytest.approx(witness.live_bytes, rel=live)
    assert witness.reserved_bytes == pytest.approx(memory.peak_bytes, rel=reserved)
    assert peak.bytes <= memory.peak_bytes * (1 + reserved)
    assert peak.packing_bytes == memory.peak_bytes - peak.bytes
    assert sum(h.bytes for h in peak.held) == peak.bytes
    assert memory.fits
    assert memory.peak_bytes <= memory.memory_bytes


def dumped(loss, args, chip):
    """Inspect a loss, and read what the compiler writes about the program meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        options = {**dict(chip.compiler_options), **dump_options(folder)}
        chip = dataclasses.replace(chip, compiler_options=tuple(options.items()))
        return remat_kit.inspect(loss, *args, target=chip), read_folder(folder)


# -- chips that are too small ---------------------------------------------------------------------

WIDE = {"batch": 4096, "features": 256, "hidden": 256, "layers": 3}
LARGER = {"mlp": ("mlp", WIDE), "gpt": ("gpt", {"size": "tiny", "batch": 64, "layers": 4})}


@functools.cache
def measured(name, number, chip, donated):
    module, size = LARGER[name]
    loss, args = load(module).build(drawn_policy(name, number), **size)
    return remat_kit.measure(loss, *args, target=chip, donate_argnums=(0,) if donated else ())


def shrunken():
    for chip in CHIPS:
        for name in LARGER:
            for number in range(POLICIES):
                for donated in (False, True):
                    quick = (chip, name, number, donated) == ("cpu", "mlp", 0, True)
                    marks = () if quick else pytest.mark.slow
                    yield pytest.param(name, number, chip, donated, marks=marks)


@pytest.mark.parametrize(("name", "number", "chip", "donated"), list(shrunken()))
def test_what_the_compiler_refuses_does_not_fit(name, number, chip, donated):
    if not target(chip).available:
        pytest.skip(f"the compiler for {chip} is not installed")
    whole = measured(name, number, chip, donated)
    # A TPU holds the machine code in the same memory, and its compiler counts it.
    code = whole.code_bytes if chip.startswith("tpu") else 0
    needed = math.ceil((whole.peak_bytes + code) / 2**20)
    less = (max(1, round(whole.peak_bytes / 2**20 * f)) for f in (0.6, 0.9))
    answers = []
    for size in sorted({*less, needed, needed + 1}):
        found = measured(name, number, f"{chip}@{size}MiB", donated)
        answers.append(found.fits)
        if found.fits:
            assert found.temp_bytes is not None, "the compiler refused it"
            assert found.peak_bytes + (code and found.code_bytes) <= size * 2**20
            assert found.headroom_bytes >= 0
    assert answers == sorted(answers), "what fits a chip fits a larger one"
    assert answers[-1], "what the whole chip needs is what a chip of that size has"
