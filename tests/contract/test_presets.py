"""Every preset on every model: the loss and the gradients of the undecorated model.

The gradient programs are evaluated equation by equation, so that no fusion of XLA's stands between
the two: what is recomputed must then be *bitwise* what it was. A scan is compiled as one equation,
and XLA:CPU fuses its body differently when values are recomputed in it; there the bound is 2 units
in the last place of the largest gradient. Under `jit` XLA does to whole programs what it does to a
scan's body, with `nn.remat` too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import load

import remat_kit
from remat_kit._policy import recipe as _recipe

GPT = {"size": "tiny", "layers": 3, "width": 8, "heads": 2, "vocab": 11, "seq": 4, "batch": 2}
CASES = {
    "mlp": ("mlp", {"batch": 4, "features": 12, "hidden": 8, "layers": 3}),
    "gpt": ("gpt", GPT),
    "gpt dropout": ("gpt", {**GPT, "dropout": 0.25}),
    "gpt scan dropout": ("gpt", {**GPT, "scan": True, "dropout": 0.25}),
    "gpt_nnx": ("gpt_nnx", GPT),
    "gpt_nnx dropout": ("gpt_nnx", {**GPT, "dropout": 0.25}),
    "gpt_nnx scan dropout": ("gpt_nnx", {**GPT, "scan": True, "dropout": 0.25}),
    "resnet": ("resnet", {"depth": 18, "batch": 2, "image": 16, "width": 4, "classes": 5}),
}
# A preset that takes a parameter, with one that every model can follow.
PARAMETERS = {
    "axlearn_offload": "attn_.*|context",
    "axlearn_save": "attn_.*|context",
    "block": "2",
    "larger_than": "256B",
    "mindspore_primitive": "max,exp,tanh",
    "mindspore_recompute_slice_activation": "model",
    "chunked_attention": "2",
    "maxtext_vocab_tiling": "2",
    "names": "attn_out",
    "nested": "2",
    "segments": "attn_out",
    "tiled_mlp": "2",
    "uniform": "2",
}
# These add up in another order, and divide axes that not every block has.
IN_PIECES = {"chunked_attention", "maxtext_vocab_tiling", "tiled_mlp"}
NAMED = {"axlearn_offload", "axlearn_save", "names", "segments"}  # need names, which GPTs have
PRESETS = [r.name for r in remat_kit.recipes()]
# By default every preset is tried on one model, and models in Linen and in NNX with these. Scans
# have a body that is kept another way, and take what is said of several layers at once.
FEW = ["nothing", "dots"]


# Not every model has the names that every preset asks for, which is said as a warning.
pytestmark = pytest.mark.filterwarnings("ignore::remat_kit.RematKitWarning")


@pytest.fixture(autouse=True, scope="module")
def fast_compiles():
    if jax.config.values["jax_disable_most_optimizations"]:  # by tests/conftest.py
        yield
        return
    jax.clear_caches()  # what other tests compiled with optimizations may round differently
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def arguments(case):
    name, sizes = CASES[case]
    return load(name).build(materialize=True, **sizes)[1]


def gradient_program(case, policy, remat3=False):
    """Trace the gradient, with JAX's new implementation of checkpoint or with the old one.

    Both are evaluated under one setting, so that JAX compiles each operation only once.
    """
    name, sizes = CASES[case]
    args = arguments(case)
    jax.config.update("jax_remat3", remat3)
    try:
        loss, _ = load(name).build(policy, **sizes)
        return jax.make_jaxpr(jax.value_and_grad(loss))(*args)
    finally:
        jax.config.update("jax_remat3", False)


def evaluate(case, program):
    leaves = jax.tree.leaves(arguments(case))
    return jax.core.eval_jaxpr(program.jaxpr, program.consts, *leaves)


@functools.cache
def undecorated(case):
    return evaluate(case, gradient_program(case, None))


def assert_same(case, policy, **options):
    expected, got = undecorated(case), evaluate(case, gradient_program(case, policy, **options))
    scale = max(float(jnp.max(jnp.abs(g))) for g in expected[1:])
    bound = 2 * np.spacing(np.float32(scale)) if "scan" in case else 0.0
    if policy.partition(":")[0] in IN_PIECES:
        bound = 8 * np.spacing(np.float32(scale))
    assert len(got) == len(expected)
    worst = max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(expected, got, strict=True))
    assert worst <= bound, f"{policy} on {case}: {worst} apart, largest gradient {scale}"


def spelled(preset):
    return f"{preset}:{PARAMETERS[preset]}" if preset in PARAMETERS else preset


def combinations(presets):
    return [
        (case, spelled(preset))
        for case in CASES
        for preset in presets
        if preset not in NAMED | IN_PIECES or "gpt" in case
    ]


def test_the_table_of_parameters_is_complete():
    parametrised = {r.name for r in remat_kit.recipes() if r.parameters}
    assert parametrised == set(PARAMETERS)


@pytest.mark.parametrize(
    ("case", "policy"),
    [(c, p) for c, p in combinations(FEW) if c in ("mlp", "gpt dropout", "gpt_nnx dropout")]
    + [("gpt_nnx scan dropout", "uniform:2")],
)
def test_gradients_are_those_of_the_undecorated_model(case, policy):
    assert_same(case, policy)


@pytest.mark.parametrize("preset", [p for p in PRESETS if p not in FEW])
def test_every_other_preset_too(preset):
    assert_same("gpt dropout" if preset in NAMED else "mlp", spelled(preset))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "policy"), combinations(PRESETS))
def test_every_preset_on_every_model(case, policy):
    assert_same(case, policy)


@pytest.mark.parametrize("case", ["mlp", "gpt dropout", "gpt scan dropout"])
@pytest.mark.parametrize("policy", ["nothing", "mindspore_primitive:max,tanh"])
def test_gradients_under_the_new_checkpoint(case, policy):
    assert_same(case, policy, remat3=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("policy", ["nothing", "dots", "mindspore_primitive:max,tanh"])
def test_every_model_under_the_new_checkpoint(case, policy):
    assert_same(case, policy, remat3=True)


def test_recipes_are_checked_by_their_names():
    assert set(FEW) <= set(PRESETS)
    assert all(_recipe.resolve(spelled(p)) is not None for p in PRESETS)
