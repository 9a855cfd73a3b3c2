"""The model files: sizes as published, deterministic arguments, equal variants, clear errors."""

import ast
import dataclasses
import doctest
import functools
import math
import pathlib
import sys

import explicit_gpt
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from other_process import printed_by
from zoo import ROOT, equations, load

MODELS = pathlib.Path(__file__).parents[2] / "models"


MLP, GPT, GPT_NNX, RESNET = (load(name) for name in ("mlp", "gpt", "gpt_nnx", "resnet"))

TINY = {"size": "tiny", "batch": 2}
VARIANTS = [
    pytest.param(MLP, {"batch": 4, "features": 12, "hidden": 8}, id="mlp"),
    pytest.param(GPT, TINY, id="gpt"),
    pytest.param(GPT, TINY | {"scan": True}, id="gpt-scan"),
    pytest.param(GPT, TINY | {"dropout": 0.1, "dtype": "bf16"}, id="gpt-dropout-bf16"),
    pytest.param(GPT, TINY | {"dropout": 0.1, "scan": True, "tied": False}, id="gpt-dropout-scan"),
    pytest.param(GPT_NNX, TINY, id="gpt_nnx"),
    pytest.param(GPT_NNX, TINY | {"scan": True}, id="gpt_nnx-scan"),
    pytest.param(GPT_NNX, TINY | {"dropout": 0.1, "dtype": "bf16"}, id="gpt_nnx-dropout-bf16"),
    pytest.param(
        GPT_NNX, TINY | {"dropout": 0.1, "scan": True, "tied": False}, id="gpt_nnx-dropout-scan"
    ),
    pytest.param(RESNET, {"depth": 18, "batch": 2, "image": 32, "width": 4}, id="resnet-18"),
]
ABSTRACT = [
    *VARIANTS,
    pytest.param(RESNET, {"depth": 50, "batch": 2, "image": 32, "dtype": "bf16"}, id="resnet-50"),
    pytest.param(RESNET, {"depth": 152, "batch": 1, "image": 64}, id="resnet-152"),
    pytest.param(GPT, {"size": "72l", "batch": 1, "scan": True}, id="gpt-72l"),
]


def count(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def built(module, size):
    """Build with arrays, once for all tests: ``(loss_fn, args, (loss, grads))``."""
    return _built(module, tuple(size.items()))


@functools.cache
def _built(module, size):
    loss_fn, args = module.build(**dict(size), materialize=True)
    return loss_fn, args, loss_and_grads(loss_fn, args)


def loss_and_grads(loss_fn, args):
    return quick_jit(jax.value_and_grad(loss_fn))(*args)


def quick_jit(fn):
    """``jax.jit`` for programs that take longer to compile than to run."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def assert_same(a, b):
    """Bitwise."""
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(a) == len(b) > 0
    for x, y in zip(a, b):
        np.testing.assert_array_equal(x, y)


def assert_near(a, b):
    """Within float32's rounding of sums, element for element and against the largest one."""
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(a) == len(b) > 0
    largest = max(float(jnp.abs(x).max()) for x in a)
    for x, y in zip(a, b):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6 * largest)


def assert_drawn_alike(a, b):
    """The same random draws: within 4 ulp, since the map from bits to normals may be fused."""
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(a) == len(b) > 0
    for x, y in zip(a, b):
        if jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_array_max_ulp(np.asarray(x), np.asarray(y), maxulp=4)
        else:
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("depth", "parameters"),
    [(18, 11689512), (34, 21797672), (50, 25557032), (101, 44549160), (152, 60192808)],
)
def test_resnet_has_the_published_parameters(depth, parameters):
    assert count(RESNET.build(depth=depth)[1][0]) == parameters


GPT_PARAMETERS = {
    "small": 124439808,
    "medium": 354823168,
    "large": 774030080,
    "xl": 1557611200,
}


@pytest.mark.parametrize(("size", "parameters"), GPT_PARAMETERS.items())
@pytest.mark.parametrize("scan", [False, True])
def test_gpt2_has_the_published_parameters(size, parameters, scan):
    if not scan and size != "small":
        pytest.skip("unrolled layers have the scanned parameters, as `small` shows")
    assert count(GPT.build(size=size, scan=scan)[1][0]) == parameters


def test_gpt_nnx_has_the_published_parameters():
    assert count(GPT_NNX.build(size="small")[1][0]) == GPT_PARAMETERS["small"]
    assert count(GPT_NNX.build(size="xl", scan=True)[1][0]) == GPT_PARAMETERS["xl"]


@pytest.mark.parametrize(
    ("size", "billions"),
    {
        "350m": 0.35,
        "760m": 0.76,
        "1.3b": 1.3,
        "2.7b": 2.7,
        "6.7b": 6.7,
        "13b": 13,
        "175b": 175,
    }.items(),
)
def test_gpt3_sizes_are_those_of_their_names(size, billions):
    assert count(GPT.build(size=size, scan=True)[1][0]) / 1e9 == pytest.approx(billions, rel=0.025)


def test_an_untied_head_adds_a_matrix_of_its_own():
    tied, untied = (GPT.build(**TINY, tied=t)[1][0] for t in (True, False))
    assert count(untied) - count(tied) == 32 * 128


def test_mlp_is_the_mnist_network():
    params = MLP.build()[1][0]
    assert count(params) == 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10


def test_both_gpt_files_have_the_same_sizes():
    linen, other = (
        {size: dataclasses.asdict(config) for size, config in module.SIZES.items()}
        for module in (GPT, GPT_NNX)
    )
    assert linen == other


@pytest.mark.parametrize("module", [MLP, GPT, GPT_NNX, RESNET], ids=lambda m: m.__name__)
def test_the_examples_in_the_docstrings_run(module, monkeypatch):
    # doctest takes for the file's own what sys.modules has under the file's name.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize(("module", "size"), ABSTRACT)
def test_arguments_take_no_memory_by_default(module, size):
    loss_fn, args = module.build(**size)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
    loss = jax.eval_shape(loss_fn, *args)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


@pytest.mark.parametrize(
    ("module", "size"),
    [
        *(v for v in VARIANTS if v.id in ("mlp", "gpt", "gpt_nnx-scan")),
        # pytest -m slow tests/models/test_models.py
        *(pytest.param(*v.values, id=v.id, marks=pytest.mark.slow) for v in VARIANTS[-1:]),
    ],
)
def test_materialized_arguments_have_the_same_shapes_and_depend_on_the_seed(module, size):
    abstract = module.build(**size)[1]
    one, same, other = (module.build(**size, materialize=True, seed=s)[1] for s in (1, 1, 2))
    assert jax.tree.structure(one) == jax.tree.structure(abstract)
    for array, struct in zip(jax.tree.leaves(one), jax.tree.leaves(abstract)):
        assert (array.shape, array.dtype) == (struct.shape, struct.dtype)
    assert_same(one, same)
    differ = [bool(jnp.any(a != b)) for a, b in zip(one[1:], other[1:]) if not isinstance(a, dict)]
    assert differ
    assert all(differ)
    assert any(jnp.any(a != b) for a, b in zip(*map(jax.tree.leaves, (one[0], other[0]))))


# Scanned layers without dropout are held against unrolled ones, gradients too, further below.
_LARGE = ("resnet-18", "gpt-dropout-bf16", "gpt_nnx-dropout-scan")


@pytest.mark.parametrize(
    ("module", "size"),
    [
        pytest.param(*v.values, id=v.id, marks=pytest.mark.slow if v.id in _LARGE else [])
        for v in VARIANTS
        if v.id not in ("gpt-scan", "gpt_nnx-scan")
    ],
)
def test_gradients_are_finite_and_reach_the_parameters(module, size):
    _, args, (loss, grads) = built(module, size)
    classes = size.get("classes", {MLP: 10, RESNET: 1000}.get(module, 128))
    assert loss == pytest.approx(math.log(classes), rel=0.5)
    assert jax.tree.structure(grads) == jax.tree.structure(args[0])
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads))
    nonzero = [bool(jnp.any(g != 0)) for g in jax.tree.leaves(grads)]
    # A zero last scale in each residual block keeps ResNet's branches out of its first step.
    assert any(nonzero) if module is RESNET else all(nonzero)


@pytest.mark.parametrize(
    "module",
    [MLP, GPT, GPT_NNX, pytest.param(RESNET, marks=pytest.mark.slow)],
    ids=lambda m: m.__name__,
)
def test_steps_of_gradient_descent_lower_the_loss(module):
    size = {MLP: {"batch": 8}, RESNET: {"depth": 18, "batch": 2, "image": 32, "width": 4}}
    loss_fn, (params, *rest) = module.build(**size.get(module, TINY), materialize=True)

    @quick_jit
    def step(params):
        loss, grads = jax.value_and_grad(loss_fn)(params, *rest)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    first, params = step(params)
    for _ in range(5):
        last, params = step(params)
    assert last < first


@pytest.mark.parametrize("module", [GPT, GPT_NNX], ids=lambda m: m.__name__)
def test_scanned_and_unrolled_layers_agree(module):
    _, (params, tokens), (loss, grads) = built(module, TINY)
    scanned, (stacked, _) = module.build(**TINY, scan=True, materialize=True)

    def restack(tree):
        tree = nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else dict(tree)
        blocks = [tree.pop(f"block_{i}") for i in range(2)]
        return tree | {"block_scan": jax.tree.map(lambda *x: jnp.stack(x), *blocks)}

    stacked = with_values(stacked, restack(params))
    loss_scanned, grads_scanned = loss_and_grads(scanned, (stacked, tokens))
    assert_near(loss, loss_scanned)
    assert_near(restack(grads), plain(grads_scanned))


def plain(tree):
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree


def with_values(tree, values):
    """Return ``tree``, an ``nnx.State`` or a dict, with the leaves of the dict ``values``."""
    assert jax.tree.structure(plain(tree)) == jax.tree.structure(values)
    if not isinstance(tree, nnx.State):
        return values
    nnx.replace_by_pure_dict(tree, values)
    return tree


@pytest.mark.parametrize("scan", [False, True])
def test_nnx_and_linen_agree_on_the_same_parameters(scan):
    size = TINY | ({"scan": True} if scan else {})
    _, (params, tokens), (loss, grads) = built(GPT, size)
    other, (state, _) = GPT_NNX.build(**size, materialize=True)
    loss_nnx, grads_nnx = loss_and_grads(other, (with_values(state, params), tokens))
    assert_near(loss, loss_nnx)
    assert_near(grads, plain(grads_nnx))


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("module", [GPT, GPT_NNX], ids=lambda m: m.__name__)
def test_dropout_follows_its_key(module, scan):
    loss_fn, args = module.build(**TINY, dropout=0.2, scan=scan, materialize=True)
    loss_fn = quick_jit(loss_fn)
    params, tokens, key = args
    assert loss_fn(*args) == loss_fn(*args)
    assert loss_fn(*args) != loss_fn(params, tokens, jax.random.PRNGKey(7))
    assert key.shape == jax.random.PRNGKey(7).shape


@pytest.mark.parametrize("module", [GPT, GPT_NNX], ids=lambda m: m.__name__)
def test_each_scanned_layer_draws_its_own_dropout_mask(module):
    loss_fn, args = module.build(**TINY, dropout=0.5, scan=True, materialize=True)
    scan = next(e for e in equations(jax.make_jaxpr(loss_fn)(*args).jaxpr) if "scan" in str(e))
    keys = [v.aval for v in scan.invars if v.aval.shape[:1] == (2,) and "key" in str(v.aval.dtype)]
    raw = [v.aval for v in scan.invars if v.aval.shape == (2, 2) and v.aval.dtype == jnp.uint32]
    assert keys or raw


def test_build_module_gives_a_live_module():
    module, tokens = GPT_NNX.build_module(size="tiny", batch=2, scan=True, seed=3)
    loss_fn, args = GPT_NNX.build(**TINY, scan=True, seed=3, materialize=True)
    expected = loss_and_grads(loss_fn, args)
    assert_near(expected, nnx.jit(nnx.value_and_grad(GPT_NNX.loss))(module, tokens))


@pytest.mark.parametrize(
    ("module", "block", "size"),
    [
        (MLP, "Block", {"batch": 4, "features": 12, "hidden": 8}),
        (GPT, "Block", TINY | {"dropout": 0.1, "scan": True, "tied": False}),
    ],
    ids=["mlp", "gpt-scan"],
)
def test_the_block_can_be_rematerialized_by_hand(module, block, size, monkeypatch):
    _, args, expected = built(module, size)
    monkeypatch.setattr(module, block, nn.remat(getattr(module, block)))
    loss_fn, again = module.build(**size, materialize=True)
    assert_drawn_alike(args, again)
    assert_near(expected, loss_and_grads(loss_fn, args))


@pytest.mark.parametrize("policy", ["nothing", "dots"])
@pytest.mark.parametrize(
    ("module", "size", "regions"),
    [
        (MLP, {"batch": 4, "features": 12, "hidden": 8}, 2),
        (GPT, TINY, 2),
        (GPT, TINY | {"dropout": 0.1, "scan": True, "tied": False}, 1),
        (GPT_NNX, TINY, 2),
        (GPT_NNX, TINY | {"dropout": 0.1, "scan": True, "tied": False}, 1),
        pytest.param(
            *(RESNET, {"depth": 18, "batch": 2, "image": 32, "width": 4}, 8),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["mlp", "gpt", "gpt-scan", "gpt_nnx", "gpt_nnx-scan", "resnet"],
)
def test_a_policy_makes_one_region_of_each_block(module, size, regions, policy):
    _, args, expected = built(module, size)
    loss_fn, _ = module.build(policy, **size)
    found = equations(jax.make_jaxpr(loss_fn)(*args).jaxpr)
    regions_found = [e for e in found if e.primitive.name in ("checkpoint", "remat", "remat2")]
    # jax 0.10.2 moves the causal mask out of the scan: a region of its own, without a product.
    products = {"dot_general", "conv_general_dilated"}
    inside = [{e.primitive.name for e in equations(r.params["jaxpr"])} for r in regions_found]
    assert sum(bool(products & names) for names in inside) == regions
    if policy == "nothing":
        assert_near(expected, loss_and_grads(loss_fn, args))


NAMES = {"query_proj", "key_proj", "value_proj", "context", "out_proj", "attn_out"}
NAMES |= {"mlpwi", "mlpwo", "decoder_layer_input"}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("module", [GPT, GPT_NNX], ids=lambda m: m.__name__)
def test_gpt_names_its_values(module, scan):
    loss_fn, args = module.build(**TINY, scan=scan)
    found = equations(jax.make_jaxpr(loss_fn)(*args).jaxpr)
    assert {e.params["name"] for e in found if e.primitive.name == "name"} == NAMES


@pytest.mark.parametrize(
    ("module", "size", "path"),
    [
        (MLP, {}, "MLP/block_1/dense"),
        (GPT, TINY, "GPT/block_1/attn/out"),
        (GPT, TINY | {"scan": True}, "block_scan/attn/out"),
        (RESNET, {"depth": 50, "batch": 1, "image": 32}, "ResNet/block_15/conv_3"),
    ],
)
def test_linen_blocks_have_the_paths_that_a_policy_asks_for(module, size, path):
    loss_fn, args = module.build(**size)
    found = equations(jax.make_jaxpr(loss_fn)(*args).jaxpr)
    assert path in {str(e.source_info.name_stack) for e in found}


def test_the_mlp_block_begins_at_the_pre_activation():
    loss_fn, args = MLP.build()
    primitives = [
        e.primitive.name
        for e in equations(jax.make_jaxpr(loss_fn)(*args).jaxpr)
        if "block_0" in str(e.source_info.name_stack) or e.primitive.name == "max"
    ]
    assert primitives.index("max") < primitives.index("dot_general")


@pytest.mark.parametrize(
    ("module", "size", "message"),
    [
        (MLP, {"batch": 0}, "batch=0: must be a positive whole number"),
        (MLP, {"layers": 1.5}, "layers=1.5: must be a positive whole number"),
        (MLP, {"hidden": True}, "hidden=True: must be"),
        (RESNET, {"depth": 20}, "depth=20: must be one of 18, 34, 50, 101, 152"),
        (RESNET, {"dtype": "f16"}, "dtype='f16': must be one of f32, bf16"),
        (RESNET, {"image": "big"}, "image='big': must be a positive whole number"),
        *[
            (module, size, message)
            for module in (GPT, GPT_NNX)
            for size, message in [
                ({"size": "huge"}, "size='huge': must be one of tiny, small, "),
                ({"size": 350}, "size=350: must be one of tiny"),
                ({"batch": -1}, "batch=-1: must be a positive whole number"),
                ({"layers": 0}, "layers=0: must be a positive whole number"),
                ({"heads": 5}, "heads=5 does not divide width=768"),
                ({"dtype": "fp8"}, "dtype='fp8': must be one of f32, bf16"),
                ({"dropout": 1}, r"dropout=1: must be a rate in \[0, 1\)"),
                ({"dropout": "some"}, r"dropout='some': must be a rate"),
                ({"scan": 1}, "scan=1: must be True or False"),
                ({"tied": "no"}, "tied='no': must be True or False"),
            ]
        ],
    ],
)
def test_a_bad_size_says_what_is_allowed(module, size, message):
    with pytest.raises(ValueError, match=message):
        module.build(**size)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the figures are those of jax 0.12")
def test_resnet50_takes_the_memory_of_the_reference_table(monkeypatch):
    def temp_mib():
        loss_fn, args = RESNET.build(depth=50, batch=64)
        compiled = jax.jit(jax.value_and_grad(loss_fn)).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes / 2**20

    assert temp_mib() == pytest.approx(8113, rel=0.05)
    monkeypatch.setattr(RESNET, "Bottleneck", nn.remat(RESNET.Bottleneck))
    assert temp_mib() == pytest.approx(2483, rel=0.05)


@pytest.mark.parametrize("sharding", ["dp", "fsdp", "tp", "fsdp+tp"])
@pytest.mark.parametrize("name", ["gpt", "gpt_nnx", "llama_nnx", "bert", "moe"])
def test_shardings_of_a_mesh(name, sharding):
    """Parameters are split as asked, and a whole model is not: a device has its part."""
    model = load(name)
    _, whole = model.build(size="tiny", batch=4)
    _, args = model.build(size="tiny", batch=4, mesh="data=2,model=2", sharding=sharding)
    assert jax.tree.structure(args) == jax.tree.structure(whole)
    assert {leaf.sharding.mesh.size for leaf in jax.tree.leaves(args)} == {4}
    parts = {"dp": 1, "fsdp": 2, "tp": 2, "fsdp+tp": 4}[sharding]
    for kernel in ("query", "value", "out", "up", "down"):
        leaves = [
            leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(args[0])
            if f"'{kernel}'" in (text := jax.tree_util.keystr(path)) and "kernel" in text
        ]
        assert leaves
        for leaf in leaves:
            shard = leaf.sharding.shard_shape(leaf.shape)
            assert leaf.size == parts * math.prod(shard), (kernel, leaf)
    assert args[1].sharding.shard_shape(args[1].shape)[0] == 2  # the batch, over `data`


def test_experts_are_split_over_their_axis():
    _, (params, _) = load("moe").build(
        size="tiny", batch=4, mesh="data=2,expert=4", sharding="fsdp"
    )
    kernel = params["block_0"]["moe"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape)[0] == kernel.shape[0] // 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mesh": "data=0", "sharding": "dp"}, "mesh="),
        ({"mesh": "eight", "sharding": "dp"}, "mesh="),
        ({"mesh": "data=2", "sharding": "tp"}, "the axis 'model'"),
        ({"mesh": "data=2", "sharding": "zero"}, "sharding="),
        ({"sharding": "dp"}, "needs a mesh"),
        ({"explicit": True}, "needs a mesh"),
        ({"mesh": "data=2,model=2", "sharding": "tp", "explicit": True}, "'dp' or 'fsdp'"),
    ],
)
def test_wrong_meshes_and_shardings_are_named(given, said):
    with pytest.raises(ValueError, match=said):
        load("gpt").build(size="tiny", **given)


@pytest.mark.slow
@pytest.mark.parametrize("name", explicit_gpt.NAMES)
def test_explicit_axes_change_no_value(name):
    """The loss and the gradients are those of automatic axes, with a policy and without."""
    found = printed_by(explicit_gpt.__file__)[name]
    plain = found["automatic"]
    for which in ("explicit", "explicit, nothing"):
        assert found[which]["loss"] == pytest.approx(plain["loss"], rel=1e-6)
        assert found[which]["apart"] < 1e-6
        assert found[which]["gradients are split as the parameters"]
    assert found["explicit, nothing"]["peak"] < found["explicit"]["peak"]
    assert found["explicit, nothing"]["recomputed"] > 0 == found["explicit"]["recomputed"]
    gathers = found["explicit"]["gathers"]
    assert (gathers > 0) == ("fsdp" in name)


@pytest.mark.parametrize("name", ["gpt_nnx", "llama_nnx", "bert", "moe"])
def test_the_copies_of_the_functions_for_meshes_are_equal(name):
    """Each model is a file of its own, so they cannot share them."""

    def functions(model):
        tree = ast.parse((ROOT / "models" / f"{model}.py").read_text(encoding="utf-8"))
        return {f.name: ast.dump(f) for f in tree.body if isinstance(f, ast.FunctionDef)}

    first, other = functions("gpt"), functions(name)
    shared = ["_mesh_of", "_check_sharding", "_spec", "_stream", "_split"]
    if name != "moe":  # whose experts are split over an axis of their own
        shared.append("_on_mesh")
    for function in shared:
        assert other[function] == first[function], function
