"""The zoo: every model has its published parameters and trains alike under every policy."""

import doctest
import math
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from zoo import ROOT, equations, load

import remat_kit

ALEXNET, BERT, CELLS, DENSENET = map(load, ("alexnet", "bert", "cells", "densenet"))
INCEPTION, LLAMA_NNX, LSTM, MOE = map(load, ("inception", "llama_nnx", "lstm", "moe"))
RESIDUAL_MLP, UNET, VGG, VIT = map(load, ("residual_mlp", "unet", "vgg", "vit"))
MODULES = [ALEXNET, BERT, CELLS, DENSENET, INCEPTION, LLAMA_NNX, LSTM, MOE, RESIDUAL_MLP]
MODULES += [UNET, VGG, VIT]
ELSEWHERE = {"mlp", "gpt", "gpt_nnx", "resnet"}  # in test_models.py

TINY = {"size": "tiny", "batch": 2}
CELL = {"batch": 4, "image": 8, "width": 2, "layers": 3}

# Each model at a size that compiles in seconds, and its number of blocks. The first two train in
# the default run, layers one after the other and a scan; all others together take minutes:
# `pytest -m slow tests/models/test_zoo.py`.
REDUCED = [
    ("residual_mlp", {"batch": 4, "features": 12, "width": 8, "layers": 4}, 4),
    ("lstm", TINY, 1),
    ("densenet", {"batch": 2, "image": 16, "classes": 10, "growth": 4, "stages": (1, 1)}, 2),
    ("unet", {"image": 20, "width": 2, "levels": 1}, 3),
    ("llama_nnx", TINY | {"scan": True}, 1),
    ("alexnet", {"batch": 2, "image": 63, "classes": 10, "width": 2, "hidden": 8}, 5),
    ("vgg", {"depth": 11, "batch": 2, "image": 32, "classes": 10, "width": 2, "hidden": 8}, 5),
    ("bert", TINY | {"scan": True}, 1),
    ("vit", TINY | {"scan": True, "dropout": 0.1}, 1),
    ("moe", TINY | {"scan": True}, 1),
    ("cells", CELL | {"arch": "darts"}, 3),
    ("cells", CELL | {"arch": "nasnet"}, 3),
    ("cells", CELL | {"arch": "amoebanet"}, 3),
    ("inception", {"batch": 2, "image": 75, "classes": 10, "width": 2}, 11),
    # Those of test_models.py, which has no training under policies.
    ("mlp", {"batch": 4, "features": 12, "hidden": 8}, 2),
    ("gpt", TINY | {"dropout": 0.1}, 2),
    ("gpt_nnx", TINY, 2),
    ("resnet", {"depth": 18, "batch": 2, "image": 32, "classes": 10, "width": 4}, 8),
]
UNROLLED = [("bert", TINY, 2), ("vit", TINY, 2), ("moe", TINY, 2), ("llama_nnx", TINY, 2)]
SAME = {"cells-nasnet", "cells-amoebanet"}  # the network of "cells-darts"
FAST = 2


def named(cases):
    """Test parameters, with the model's name and architecture to tell them apart."""
    ids = ["-".join([name, *([s["arch"]] if "arch" in s else [])]) for name, s, _ in cases]
    slow = [[] if i < FAST else [pytest.mark.slow] for i in range(len(cases))]
    return [pytest.param(*case, id=i, marks=m) for case, i, m in zip(cases, ids, slow)]


def count(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def parameters(module, **size):
    return count(module.build(batch=1, **size)[1][0])


def quick_jit(fn):
    """``jax.jit`` for programs that take longer to compile than to run."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def test_every_file_is_tested():
    files = {path.stem for path in (ROOT / "models").glob("*.py")}
    assert files == {module.__name__ for module in MODULES} | ELSEWHERE


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_the_examples_in_the_docstrings_run(module, monkeypatch):
    # doctest takes for the file's own what sys.modules has under the file's name.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0


# -- parameters -----------------------------------------------------------------------------------


# `num_params` of the weights in torchvision/models/alexnet.py, vgg.py, densenet.py,
# vision_transformer.py and inception.py.
@pytest.mark.parametrize(
    ("module", "size", "published"),
    [
        (ALEXNET, {}, 61_100_840),
        (VGG, {"depth": 11}, 132_863_336),
        (VGG, {"depth": 13}, 133_047_848),
        (VGG, {"depth": 16}, 138_357_544),
        (VGG, {"depth": 19}, 143_667_240),
        (DENSENET, {"depth": 121}, 7_978_856),
        (DENSENET, {"depth": 161}, 28_681_000),
        (DENSENET, {"depth": 169}, 14_149_480),
        (DENSENET, {"depth": 201}, 20_013_928),
        (VIT, {"size": "b16"}, 86_567_656),
        (VIT, {"size": "b32", "scan": True}, 88_224_232),
        (VIT, {"size": "l16", "scan": True}, 304_326_632),
        (VIT, {"size": "l32", "scan": True}, 306_535_400),
        (VIT, {"size": "h14", "scan": True}, 632_045_800),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "__name__") else None,
)
def test_images_have_the_parameters_of_torchvision(module, size, published):
    assert parameters(module, **size) == published


def test_inception_has_the_parameters_of_torchvision_less_the_auxiliary_head():
    # A 1x1 convolution from 768 to 128 channels and a 5x5 one to 768, each with batch
    # normalization, and a linear classifier.
    head = (768 * 128 + 2 * 128) + (5 * 5 * 128 * 768 + 2 * 768) + (768 * 1000 + 1000)
    assert parameters(INCEPTION) == 27_161_264 - head == 23_834_568


OPERATIONS = {
    "sep_3": lambda c: 2 * (9 * c + c * c + 2 * c),
    "sep_5": lambda c: 2 * (25 * c + c * c + 2 * c),
    "sep_7": lambda c: 2 * (49 * c + c * c + 2 * c),
    "dil_3": lambda c: 9 * c + c * c + 2 * c,
    "1x7_7x1": lambda c: 14 * c * c + 2 * c,
}


def of_cells(normal, reduction):
    """The parameters of 20 cells of 36, 72 and 144 channels, by ``cnn/model.py`` of DARTS.

    Each of the two cells is its operations that have parameters, and how many results it joins.
    """

    def conv_and_norm(inputs, outputs):
        return inputs * outputs + 2 * outputs

    total = 3 * 3 * 3 * 108 + 2 * 108  # the stem
    before, last = 108, 108
    for i in range(20):
        channels = 36 * (2 if i >= 6 else 1) * (2 if i >= 13 else 1)
        operations, joined = reduction if i in (6, 13) else normal
        # Two convolutions to half the channels each have the parameters of one to all of them.
        total += conv_and_norm(before, channels) + conv_and_norm(last, channels)
        total += sum(OPERATIONS[name](channels) for name in operations.split())
        before, last = last, joined * channels
    return total + last * 10 + 10


@pytest.mark.parametrize(
    ("arch", "normal", "reduction", "published"),
    [
        # cnn/train.py of DARTS logs "param size = 3.349342MB", which counts parameters, not bytes.
        ("darts", ("sep_3 sep_3 sep_3 sep_3 sep_3 dil_3", 4), ("", 4), 3_349_342),
        # Table 1 of the DARTS paper has 3.1 million for AmoebaNet-A; the rest is the operations of
        # figure 5 of Real et al. and of figure 4 of Zoph et al., as cnn/genotypes.py has them.
        (
            "amoebanet",
            ("sep_3 sep_5 sep_3 sep_3", 3),
            ("sep_3 sep_7 sep_7 1x7_7x1 sep_3", 3),
            3_145_078,
        ),
        (
            "nasnet",
            ("sep_5 sep_3 sep_5 sep_3 sep_3", 5),
            ("sep_5 sep_7 sep_7 sep_5 sep_3", 3),
            3_830_950,
        ),
    ],
)
def test_cells_have_the_published_parameters(arch, normal, reduction, published):
    assert parameters(CELLS, arch=arch) == of_cells(normal, reduction) == published


@pytest.mark.parametrize(("size", "published"), [("base", 110_106_428), ("large", 336_226_108)])
@pytest.mark.parametrize("scan", [False, True])
def test_bert_has_the_parameters_of_its_checkpoint(size, published, scan):
    # The variables of google-research/bert's modeling.py and run_pretraining.py, which are those of
    # its checkpoints; the Hugging Face hub counts {"F32": 110106428} in bert-base-uncased.
    layers, width, vocab = (12, 768, 30522) if size == "base" else (24, 1024, 30522)
    layer = 12 * width**2 + 13 * width
    ends = (vocab + 512 + 2 + 2) * width + (width + 1) * width  # embeddings, their norm, the pooler
    heads = (width + 1) * width + 2 * width + vocab + 2 * (width + 1)
    assert layers * layer + ends + heads == published
    assert parameters(BERT, size=size, scan=scan) == published


@pytest.mark.parametrize(
    ("size", "published"),
    [
        # What the Hugging Face hub counts in meta-llama's Llama-2-7b-hf, Llama-2-13b-hf and
        # Llama-3.1-8B; in Llama-2-70b-hf it counts the 64 wavelengths of each layer too.
        ("7b", 6_738_415_616),
        ("13b", 13_015_864_320),
        ("8b", 8_030_261_248),
        ("70b", 68_976_653_312 - 80 * 64),
    ],
)
def test_llama_has_the_published_parameters(size, published):
    assert parameters(LLAMA_NNX, size=size, scan=True) == published


def test_scanned_and_unrolled_llamas_have_the_same_parameters():
    assert parameters(LLAMA_NNX, size="tiny") == parameters(LLAMA_NNX, size="tiny", scan=True)


def test_unet_has_the_parameters_of_its_figure():
    # Figure 1: 3x3 convolutions in pairs, 2x2 ones up, a 1x1 one to two classes, all with a bias.
    def conv(side, inputs, outputs):
        return side * side * inputs * outputs + outputs

    down = [(1, 64), (64, 128), (128, 256), (256, 512), (512, 1024)]
    total = sum(conv(3, a, b) + conv(3, b, b) for a, b in down) + conv(1, 64, 2)
    total += sum(conv(2, b, a) + conv(3, b, a) + conv(3, a, a) for a, b in down[1:])
    assert parameters(UNET) == total == 31_030_658


@pytest.mark.parametrize(("size", "width", "millions"), [("medium", 650, 20), ("large", 1500, 66)])
def test_lstm_has_the_parameters_of_its_formula(size, width, millions):
    # Zaremba et al.: two layers, a vocabulary of 10,000. Later tables (Zilly et al., "Recurrent
    # highway networks", 2016, table 1) give 66 million for the large one.
    layer = (2 * width + 1) * 4 * width
    found = parameters(LSTM, size=size)
    assert found == 10_000 * width + 2 * layer + (width + 1) * 10_000
    assert round(found / 1e6) == millions


@pytest.mark.parametrize(("size", "gpt", "width"), [("small", 124_439_808, 768)])
def test_experts_add_their_parameters_to_those_of_gpt2(size, gpt, width):
    expert = 8 * width**2 + 5 * width
    assert parameters(MOE, size=size, scan=True) == gpt + 12 * (7 * expert + 8 * width)


def test_residual_mlp_has_the_parameters_of_its_formula():
    width, hidden = 1024, 4096
    block = 2 * width + (width * hidden + hidden) + (hidden * width + width)
    ends = (784 * width + width) + 2 * width + (width * 10 + 10)
    assert parameters(RESIDUAL_MLP) == 32 * block + ends == 269_480_970


def test_the_readme_lists_the_parameters_of_every_gpt():
    lines = (ROOT / "models" / "README.md").read_text().splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines]
    listed = {row[0]: row[-1] for row in rows if len(row) == 6}
    gpt = load("gpt")
    found = {size: f"{parameters(gpt, size=size, scan=True):,}" for size in gpt.SIZES}
    assert {size: listed[size].replace(" ", ",") for size in found} == found


# -- shapes ---------------------------------------------------------------------------------------


def block_outputs(model, *shape):
    """The pixels along a side and the channels that leave each block, in order."""

    def run():
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        found = model.init(keys, jnp.zeros(shape), mutable=True, capture_intermediates=True)
        return found["intermediates"]

    found = {k: v for k, v in jax.eval_shape(run).items() if k.startswith("block_")}
    order = sorted(found, key=lambda name: int(name.removeprefix("block_")))
    return [found[name]["__call__"][0].shape[2:] for name in order]


def test_images_shrink_where_the_papers_say():
    # Table 1 of each paper, figure 1 of the U-Net's. What AlexNet and VGG leave is in `build`.
    assert block_outputs(INCEPTION.Inception(), 1, 299, 299, 3) == [
        *[(35, 256), (35, 288), (35, 288)],
        *[(17, 768)] * 5,
        *[(8, 1280), (8, 2048), (8, 2048)],
    ]
    assert block_outputs(DENSENET.DenseNet(), 1, 224, 224, 3) == [
        *[(56, 32)] * 6 + [(28, 32)] * 12 + [(14, 32)] * 24 + [(7, 32)] * 16
    ]
    assert block_outputs(CELLS.CellNet("nasnet"), 1, 32, 32, 3) == [
        *[(32, 180)] * 6 + [(16, 216)] + [(16, 360)] * 6 + [(8, 432)] + [(8, 720)] * 6
    ]
    assert UNET.output_pixels(572) == 388
    assert [n for n in range(1, 240) if UNET.output_pixels(n)] == [188, 204, 220, 236]


# -- what the models compute ----------------------------------------------------------------------


@pytest.mark.parametrize("module", [LLAMA_NNX, LSTM], ids=lambda m: m.__name__)
def test_a_token_is_predicted_from_earlier_ones_alone(module):
    _, (params, tokens) = drawn(module, {"size": "tiny", "batch": 1})
    tokens, last = tokens[:, :-1], tokens.shape[1] - 2
    config = module.SIZES["tiny"]

    @quick_jit
    def logits(tokens):
        if module is LSTM:
            return module.LSTM(config).apply({"params": params}, tokens)
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: module.Llama(config, nnx.Rngs(0))))
        return nnx.merge(graphdef, params)(tokens)

    before, after = logits(tokens), logits(tokens.at[0, last].add(1))
    assert bool((before == after)[:, :last].all())
    assert bool((before != after)[:, last].any())


def test_padding_is_not_attended_to():
    loss_fn, (params, tokens, segments, *rest) = drawn(BERT, TINY | {"scan": True, "dropout": 0})
    positions = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32)[None], rest[0].shape)
    loss_fn = quick_jit(loss_fn)

    def loss(tokens, segments):
        return loss_fn(params, tokens, segments, positions, *rest[1:])

    flipped = segments.at[:, -1].set(1 - segments[:, -1])
    padded = tokens.at[:, -1].set(0)
    assert loss(padded, segments) == loss(padded, flipped)
    assert loss(tokens, segments) != loss(tokens, flipped)


def test_rotated_products_depend_on_the_distance_alone():
    query, key = (jax.random.normal(jax.random.key(i), (8,)) for i in range(2))
    query, key = (jnp.broadcast_to(x, (1, 6, 1, 8)) for x in (query, key))
    products = jnp.einsum(
        "bqhd,bkhd->qk", *(LLAMA_NNX.rotate(x, theta=10000.0) for x in (query, key))
    )
    for distance in range(-5, 6):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-5, atol=1e-6)
    assert np.ptp(products[0]) > 0.1


def test_grouped_queries_are_heads_that_share_their_keys():
    loss_fn, (params, tokens) = drawn(LLAMA_NNX, TINY | {"scan": True})
    alone, (separate, _) = LLAMA_NNX.build(**TINY, scan=True, kv_heads=4)

    def split(path, leaf, like):
        name = jax.tree_util.keystr(path)
        if "key" in name or "value'" in name:
            leaf = jnp.repeat(leaf, 2, axis=2)
        return leaf.reshape(like.shape)

    @quick_jit
    def losses(params):
        split_params = jax.tree_util.tree_map_with_path(split, params, separate)
        return loss_fn(params, tokens), alone(split_params, tokens)

    np.testing.assert_allclose(*losses(params), rtol=1e-6)


def test_equal_experts_are_one_feedforward_layer():
    layer = MOE.Experts(MOE.config_of("tiny", capacity=4.0))

    @quick_jit
    def outputs(x):
        params = layer.init(jax.random.key(1), x)["params"]
        one = {name: jax.tree.map(lambda leaf: leaf[0], params[name]) for name in ("up", "down")}
        equal = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), one)
        y, balance = layer.apply({"params": params | equal}, x)
        up, down = one["up"], one["down"]
        hidden = nn.gelu(x @ up["kernel"] + up["bias"][None, None])
        return y, hidden @ down["kernel"] + down["bias"][None, None], balance

    y, expected, balance = outputs(jax.random.normal(jax.random.key(0), (2, 16, 32)))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6)
    assert 0.9 < balance < 4


def test_a_slot_of_an_expert_holds_one_token_and_first_choices_go_first():
    config = MOE.config_of("tiny", capacity=0.5)
    router = MOE.Router(config)

    @quick_jit
    def routed(x):
        params = router.init(jax.random.key(1), x)["params"]
        probs = jax.nn.softmax(x @ params["gate"]["kernel"])
        return probs, *router.apply({"params": params}, x)

    probs, taken, weighted, _ = map(
        np.array, routed(jax.random.normal(jax.random.key(0), (2, 16, 32)))
    )
    assert taken.shape == (2, 16, 4, config.slots) == (2, 16, 4, 4)
    assert set(np.unique(taken)) == {0, 1}
    assert taken.sum(1).max() == 1
    first = np.eye(4)[probs.argmax(-1)]
    served = (first * taken.sum(-1)).sum(1)  # first choices that an expert serves
    np.testing.assert_array_equal(served, np.minimum(first.sum(1), config.slots))
    np.testing.assert_array_equal(weighted > 0, taken > 0)


def test_a_step_of_the_lstm_is_that_of_flax():
    cell, reference = LSTM.Cell(jnp.float32), nn.LSTMCell(5)

    @quick_jit
    def outputs(memory, output, x):
        gates = cell.init(jax.random.key(1), (memory, output), x)["params"]["gates"]
        named = {}
        for i, gate in enumerate("ifog"):
            columns = slice(5 * i, 5 * i + 5)
            above, below = jnp.split(gates["kernel"][:, columns], 2)
            named["i" + gate] = {"kernel": above}
            named["h" + gate] = {"kernel": below, "bias": gates["bias"][columns]}
        ours = cell.apply({"params": {"gates": gates}}, (memory, output), x)
        return ours, reference.apply({"params": named}, (memory, output), x)

    ours, theirs = outputs(*jax.random.normal(jax.random.key(0), (3, 2, 5)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)


# -- policies and training ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "blocks"),
    [
        *[pytest.param(*case.values, id=case.id) for case in named(REDUCED) if case.id not in SAME],
        *[pytest.param(*case, id=f"{case[0]}-unrolled") for case in UNROLLED],
    ],
)
def test_a_policy_makes_one_region_of_each_block(name, size, blocks):
    loss_fn, args = load(name).build("nothing", **size)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
    found = list(equations(jax.make_jaxpr(loss_fn)(*args).jaxpr))
    regions = [e for e in found if e.primitive.name in ("checkpoint", "remat", "remat2")]
    # jax 0.10.2 moves a causal mask out of the scan: a region of its own, without a product.
    products = {"dot_general", "conv_general_dilated"}
    inside = [{e.primitive.name for e in equations(r.params["jaxpr"])} for r in regions]
    assert sum(bool(products & names) for names in inside) == blocks


def drawn(module, size, seed=0):
    """``(loss_fn, args)`` with arrays, whose initializers are compiled as one program."""
    loss_fn, _ = module.build(**size)
    return loss_fn, quick_jit(lambda: module.build(**size, materialize=True, seed=seed)[1])()


def trained(loss_fn, params, rest):
    """The losses of three steps of gradient descent."""
    descent = optax.sgd(0.01)

    @quick_jit
    def step(params, *rest):
        loss, grads = jax.value_and_grad(loss_fn)(params, *rest)
        updates, _ = descent.update(grads, descent.init(params))
        return loss, optax.apply_updates(params, updates)

    losses = []
    for _ in range(3):
        loss, params = step(params, *rest)
        losses.append(loss)
    return np.array(losses)


# Where a value of DenseNet or of a cell has several readers, a region adds up its cotangents in
# another order; the others' regions are compiled to other fusions, and to the same bits when they
# run operation by operation. At most 7 units in the last place of a loss were seen, in `cells`.
ULPS = {"densenet": 8, "cells": 8, "lstm": 8, "vit": 8}


@pytest.mark.parametrize(("name", "size", "blocks"), named(REDUCED))
def test_training_is_the_same_under_every_policy(name, size, blocks):
    module = load(name)
    loss_fn, (params, *rest) = drawn(module, size)
    losses = trained(loss_fn, params, rest)
    assert np.isfinite(losses).all()
    assert len({*losses.tolist()}) == len(losses)
    if name != "inception":  # two images, normalized over one pixel: no step is small
        assert losses[-1] < losses[0]
    for policy in ("nothing", "dots"):
        again = trained(module.build(policy, **size)[0], params, rest)
        np.testing.assert_array_max_ulp(losses, again, maxulp=ULPS.get(name, 0))


# At the sizes of REDUCED the peak of these is in the arguments, or in what one operation needs.
ROOMY = {
    "residual_mlp": {"batch": 64},
    "alexnet": {"batch": 8, "hidden": 512},
    "vgg": {"batch": 16},
    "mlp": {"batch": 64},
    "inception": {"batch": 8, "width": 4, "dropout": 0.0},
    "unet": {"image": 44, "levels": 2},
}
# A plan's regions begin and end anywhere, so that XLA fuses and rounds otherwise in each of them,
# and batch normalization over a few pixels makes that a thousand times more in one step. These
# train in float64, where it stays below the last place of a loss, which is of float32: their losses
# are equal to the bit.
DOUBLE = {"bert", "cells", "gpt", "gpt_nnx", "inception", "llama_nnx", "moe"}
DOUBLE |= {"residual_mlp", "resnet"}
DEAR = ("residual_mlp", "lstm")
PLANNED = [
    *[
        pytest.param(
            *c.values[:2],
            id=c.id,
            marks=[*c.marks, pytest.mark.slow] if c.id in DEAR else c.marks,
        )
        for c in named(REDUCED)
    ],
    *[pytest.param(*c[:2], id=f"{c[0]}-unrolled", marks=pytest.mark.slow) for c in UNROLLED],
]


@pytest.fixture
def double():
    """What makes a model and its arguments compute in float64, which JAX has until the end."""

    def widened(module, size, args):
        jax.config.update("jax_enable_x64", True)
        module.DTYPES["f32"] = jnp.float64
        wide = jax.tree.map(lambda x: x.astype("float64") if x.dtype == "float32" else x, args)
        return module.build(**size)[0], wide

    before = jax.config.jax_enable_x64
    yield widened
    jax.config.update("jax_enable_x64", before)


def leanest(loss_fn, args):
    """The plan of least memory, and its figures."""
    if jax.__version_info__ < (0, 11):  # XLA:CPU takes no less for most of these: nothing to choose
        found = remat_kit.frontier(loss_fn, *args)
        return found.policy(found.points[0]), found.points[0]
    plan = remat_kit.plan(loss_fn, *args, budget="min", compiles=1)
    assert plan.compiled.temp_bytes < plan.baseline.temp_bytes
    if plan.point.extra_flops:
        return plan, plan.point
    # AlexNet and VGG hold most in the derivative of their first convolution, with a copy of the
    # images on a CPU: to compute anything again does not help there, but it does on a GPU.
    found = remat_kit.frontier(loss_fn, *args, target="h100")
    return found.policy(found.points[0]), found.points[0]


@pytest.mark.parametrize(("name", "size"), PLANNED)
def test_training_is_the_same_under_a_plan(name, size, double):
    module, size = load(name), size | ROOMY.get(name, {})
    loss_fn, args = drawn(module, size)
    if name in DOUBLE:
        loss_fn, args = double(module, size, args)
    plan, point = leanest(loss_fn, args)
    assert point.extra_flops > 0
    params, *rest = args
    losses = trained(loss_fn, params, rest)
    assert losses.dtype == np.float32
    assert losses[-1] < losses[0]
    again = trained(remat_kit.policy(plan)(loss_fn), params, rest)
    ulps = 0 if name in DOUBLE else ULPS.get(name, 0)
    np.testing.assert_array_max_ulp(losses, again, maxulp=ulps)


@pytest.mark.parametrize(
    ("name", "size", "blocks"),
    [case for case in named(REDUCED) if case.marks or case.id == "lstm"],
)
def test_arguments_depend_on_the_seed_alone(name, size, blocks):
    module = load(name)
    abstract = module.build(**size)[1]
    one, same, other = (drawn(module, size, seed)[1] for seed in (1, 1, 2))
    assert jax.tree.structure(one) == jax.tree.structure(abstract)
    for array, struct in zip(jax.tree.leaves(one), jax.tree.leaves(abstract)):
        assert (array.shape, array.dtype) == (struct.shape, struct.dtype)
    jax.tree.map(np.testing.assert_array_equal, one, same)
    for a, b in ((one[0], other[0]), (one[1:], other[1:])):
        assert any(jnp.any(x != y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.mark.parametrize(
    ("module", "size", "path"),
    [
        (ALEXNET, {}, "AlexNet/block_4/conv"),
        (BERT, TINY, "BERT/block_1/attn/out"),
        (CELLS, CELL, "CellNet/block_0/op_3_1/pointwise_1"),
        (DENSENET, {"stages": (1, 2), "image": 32}, "DenseNet/block_2/conv_2"),
        (INCEPTION, {"batch": 1, "image": 75}, "Inception/block_10/3x3_twice_1x3/conv"),
        (LSTM, TINY, "block_scan/layer_1/gates"),
        (MOE, TINY, "MoE/block_1/attn/out"),
        (RESIDUAL_MLP, {"layers": 2}, "ResidualMLP/block_1/down"),
        (UNET, {"image": 20, "levels": 1}, "UNet/block_bottom/conv_2"),
        (VGG, {"depth": 11}, "VGG/block_4/conv_1"),
        (VIT, TINY, "ViT/block_1/mlp/up"),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "__name__") else None,
)
def test_blocks_compute_in_half_precision_at_the_paths_that_a_policy_asks_for(module, size, path):
    loss_fn, args = module.build(dtype="bf16", **size)
    jaxpr = jax.make_jaxpr(loss_fn)(*args).jaxpr
    assert jaxpr.outvars[0].aval.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(args[0])} == {jnp.dtype("float32")}
    there = [e for e in equations(jaxpr) if str(e.source_info.name_stack) == path]
    products = [e for e in there if e.primitive.name in ("dot_general", "conv_general_dilated")]
    assert [e.outvars[0].aval.dtype for e in products] == [jnp.bfloat16]


@pytest.mark.parametrize("module", [BERT, LLAMA_NNX, MOE, VIT], ids=lambda m: m.__name__)
@pytest.mark.parametrize("scan", [False, True])
def test_attention_and_feedforward_layers_name_their_values(module, scan):
    loss_fn, args = module.build(**TINY, scan=scan, dtype="bf16")
    found = equations(jax.make_jaxpr(loss_fn)(*args).jaxpr)
    named = {e.params["name"]: e.outvars[0].aval.dtype for e in found if e.primitive.name == "name"}
    wide = {"mlpwi_0", "mlpwi_1"} if module is LLAMA_NNX else {"mlpwi"}
    expected = wide | {"query_proj", "key_proj", "value_proj", "context", "out_proj"}
    expected |= {"attn_out", "mlpwo"}
    assert named.keys() >= expected
    assert {named[name] for name in expected} == {jnp.dtype("bfloat16")}


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "size", "message"),
    [
        *[(m, {"batch": 0}, "batch=0: must be a positive whole number") for m in MODULES],
        *[(m, {"dtype": "fp8"}, "dtype='fp8': must be one of f32, bf16") for m in MODULES],
        *[
            (m, {"size": "huge"}, "size='huge': must be one of tiny, ")
            for m in (BERT, LLAMA_NNX, LSTM, MOE, VIT)
        ],
        *[(m, {"heads": 7}, "heads=7 does not divide") for m in (BERT, LLAMA_NNX, MOE, VIT)],
        *[(m, {"scan": 1}, "scan=1: must be True or False") for m in (BERT, LLAMA_NNX, MOE, VIT)],
        *[
            (m, {"dropout": 1}, r"dropout=1: must be a rate in \[0, 1\)")
            for m in (ALEXNET, BERT, INCEPTION, VGG, VIT)
        ],
        (ALEXNET, {"image": 62}, "image=62: must be at least 63"),
        (VGG, {"image": 31}, "image=31: must be at least 32"),
        (VGG, {"depth": 12}, "depth=12: must be one of 11, 13, 16, 19"),
        (DENSENET, {"depth": 264}, "depth=264: must be one of 121, 161, 169, 201"),
        (DENSENET, {"stages": (2, 0)}, r"stages=\(2, 0\): must be positive whole numbers"),
        (DENSENET, {"stages": 4}, "stages=4: must be positive whole numbers"),
        (DENSENET, {"image": 31}, "image=31: must be at least 32"),
        (INCEPTION, {"image": 74}, "image=74: must be at least 75"),
        (INCEPTION, {"width": 3}, "width=3: must be a multiple of 2"),
        (CELLS, {"arch": "enas"}, "arch='enas': must be one of nasnet, amoebanet, darts"),
        (CELLS, {"image": 30}, "image=30: must be a multiple of 4"),
        (CELLS, {"width": 35}, "width=35: must be a multiple of 2"),
        (BERT, {"predictions": 513}, "predictions=513: must be at most seq=512"),
        (LLAMA_NNX, {"kv_heads": 5}, "kv_heads=5 does not divide heads=32"),
        (MOE, {"top": 9}, "top=9: must be at most experts=8"),
        (MOE, {"capacity": 0.0}, "capacity=0.0: must be a positive number"),
        (UNET, {"image": 570}, "image=570: must be 188 pixels or more in steps of 16, such as 556"),
        (VIT, {"image": 225}, "image=225: must be a multiple of patch=16"),
        (RESIDUAL_MLP, {"layers": 1.5}, "layers=1.5: must be a positive whole number"),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "__name__") else None,
)
def test_a_bad_size_says_what_is_allowed(module, size, message):
    with pytest.raises(ValueError, match=message):
        module.build(**size)
