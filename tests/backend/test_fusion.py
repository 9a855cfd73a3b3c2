"""What compilers fuse and what they write down, and the predictions that rest on it."""

import dataclasses

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p
from shapes import struct

import remat_kit
from remat_kit._chip.target import target
from remat_kit._planner import frontier as _frontier
from remat_kit._planner.costs import build as _build
from remat_kit._planner.costs.simulate import Simulation, simulate
from remat_kit._policy.schedule import Segment


def tied(params, tokens):
    """The loss of a stack between an embedding and its transpose."""
    table, layers = params
    x = table[tokens]
    for up, down in layers:
        x = x + jax.nn.gelu(x @ up) @ down
    logits = x @ table.T
    picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def arguments(words=64, width=16, hidden=32, layers=2, batch=(4, 8)):
    blocks = [(struct(width, hidden), struct(hidden, width))] * layers
    return (struct(words, width), blocks), struct(*batch, dtype=jnp.int32)


def products(graph):
    return [e for e in graph.equations if e.primitive == "dot_general"]


@pytest.mark.parametrize(("chip", "written"), [("cpu", True), ("h100", True), ("tpu-v5e", False)])
def test_products_on_tpus_run_the_elementwise_operations_before_them(chip, written):
    graph = _build.trace(tied, arguments(), target(chip))
    up, down, *_ = products(graph)
    read = graph.tensors[next(t for t in down.reads if graph.tensors[t].producer >= 0)]
    assert read.in_memory is written
    assert read.sources == ((read.index,) if written else up.makes)


@pytest.mark.parametrize(
    ("images", "channels", "order", "times"),
    [
        (64, 64, "NHWC", 2),
        (64, 64, "NCHW", 2),
        (128, 64, "NHWC", 1),
        (64, 96, "NHWC", 128 / 96),
        (16, 16, "NHWC", 8),
    ],
)
def test_arrays_of_convolutions_fill_tiles_on_tpus(images, channels, order, times):
    sizes = {"N": images, "C": channels, "H": 16, "W": 16}
    orders = order, "HWIO", order

    def loss(kernels, x):
        for kernel in kernels:
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=orders)
            x = jnp.sin(x)
        return jnp.sum(x)

    args = [struct(3, 3, channels, channels)] * 3, struct(*(sizes[c] for c in order))
    tpu, gpu = (_build.trace(loss, args, target(chip)) for chip in ("tpu-v5e", "h100"))
    made = [t for t in gpu.tensors if len(t.shape) == 4 and t.bytes]
    assert made
    for t in made:
        assert tpu.tensors[t.index].bytes == round(times * t.bytes)


def test_what_an_iteration_of_a_scan_keeps_is_written_down_on_tpus_too():
    def loss(ws, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (x + jnp.tanh(jnp.sin(x) @ w), None), x, ws)[0])

    graph = _build.trace(loss, (struct(3, 16, 16), struct(8, 16)), target("tpu-v5e"))
    (scan,) = (e.loop for e in graph.equations if e.loop)
    (product,) = products(scan.graph)
    assert all(scan.graph.tensors[t].in_memory for t in product.reads if t >= 2)


@pytest.mark.parametrize(("chip", "written"), [("cpu", True), ("h100", True), ("tpu-v5e", False)])
def test_on_tpus_cotangents_that_no_product_makes_run_inside_of_those_that_read_them(chip, written):
    graph = _build.trace(tied, arguments(), target(chip))
    *_, logits = (graph.tensors[e.makes[0]] for e in products(graph))
    first, *_ = (graph.tensors[e.makes[0]] for e in products(graph))
    assert logits.active
    assert logits.cotangent_bytes == (logits.bytes if written else 0)
    assert first.cotangent_bytes == first.bytes  # a product makes part of it


def test_on_tpus_what_products_alone_read_is_written_down_in_place_of_what_it_is_made_of():
    def loss(w, b, v, x):
        return jnp.sum(((x @ w + b[None]) * 2) @ v)

    args = struct(8, 8), struct(8), struct(8, 8), struct(32, 8)
    graph = _build.trace(loss, args, target("tpu-v5e"), argnums=(0, 1, 2, 3))
    first, second = products(graph)
    (read,) = (graph.tensors[t] for t in second.reads if graph.tensors[t].producer >= 0)
    assert read.in_memory
    assert read.sources == (read.index,)
    assert read.bytes == 32 * 8 * 2
    assert read.cotangent_bytes == read.bytes
    assert graph.tensors[first.makes[0]].cotangent_bytes == 0


def test_what_a_kept_array_is_fused_from_is_there_until_it_is_written_down():
    def loss(w, x):
        return jnp.sum(jnp.log(jnp.sum(jnp.exp((x @ w) - 1.0), axis=-1)))

    graph = _build.trace(loss, (struct(16, 512), struct(64, 16)), target("h100"))
    (product,) = products(graph)
    (exp,) = (e for e in graph.equations if e.primitive == "exp")
    schedule = (Segment(0, len(graph.equations), save=frozenset(exp.makes)),)
    assert not graph.tensors[exp.makes[0]].in_memory
    found = Simulation(graph, 1.0)
    found.forward(schedule, frozenset().union(*found.held(schedule)))
    assert found.peak >= sum(graph.tensors[t].bytes for t in (*product.makes, *exp.makes))


def test_what_may_be_rebuilt_early_counts_beside_the_last_derivatives():
    """XLA:CPU took 6.3 GB for a plan of GPT-12 that was predicted at 4.4 without this."""
    graph = _build.trace(tied, arguments(2048, 64, 256, 3, (8, 128)), target("cpu"))
    assert graph.early
    logits = products(graph)[-1].index
    middle = products(graph)[4].index
    kept = frozenset(t for e in graph.equations[middle : logits - 1] for t in e.keeps)
    inside = Segment(0, middle), Segment(middle, logits, save=kept)
    schedule = Segment(0, logits, inside=inside), Segment(logits, len(graph.equations), plain=True)
    peak = simulate(graph, schedule).peak_bytes
    late = simulate(dataclasses.replace(graph, early=False), schedule).peak_bytes
    assert late < peak <= late + sum(graph.tensors[t].bytes for t in kept)


@pytest.mark.parametrize("regions", [False, True])
def test_the_gradient_of_a_tied_argument_is_there_before_the_backward_pass_goes_on(regions):
    args = arguments()
    front = remat_kit.frontier(tied, *args)
    n = len(front.graph.equations)
    last = products(front.graph)[-1].index - 1  # the transpose of the table
    schedule = Segment(0, last), Segment(last, n, plain=not regions)
    planned = remat_kit.policy(_frontier.policy_of(front.graph, schedule))(tied)
    gradient = jax.make_jaxpr(jax.grad(planned))(*args)
    shape = args[0][0].shape

    def terms(jaxpr):
        """The products that make a gradient of the table, and the barriers that take it in."""
        made, taken = set(), set()
        for eqn in jaxpr.eqns:
            for inner in jec.jaxprs_in_params(eqn.params):
                a, b = terms(inner)
                made, taken = made | a, taken | b
            if eqn.primitive.name in ("dot_general", "transpose", "remat2", "checkpoint"):
                made |= {v for v in eqn.outvars if v.aval.shape == shape}
            if eqn.primitive.name == "remat_kit_barrier":
                taken |= {v for v in eqn.invars if v in made}
        return made, taken

    assert terms(gradient.jaxpr)[1]


def test_the_loss_of_a_model_on_a_tpu_is_one_segment():
    """Of a cut through it the cotangent of the logits would be written once more, for nothing."""
    args = arguments(16384, 512, 2048, 4, (16, 1024))
    front = remat_kit.frontier(tied, *args, target="tpu-v5e")
    room = (front.points[0].predicted_peak_bytes + front.plain.predicted_peak_bytes) / 2
    fitting = [p for p in front.points if p.predicted_peak_bytes <= room]
    assert min(p.extra_flops_fraction for p in fitting) < 0.25  # through the loss: 0.75


@pytest.mark.slow
@pytest.mark.skipif(not target("tpu-v5e").available, reason="needs libtpu")
def test_predictions_of_unrolled_layers_on_a_tpu_are_what_its_compiler_says():
    args = arguments(16384, 512, 2048, 4, (16, 1024))
    front = remat_kit.frontier(tied, *args, target="tpu-v5e")
    points = front.points
    for point in (points[-1], points[len(points) // 2], points[0]):
        planned = remat_kit.policy(front.policy(point))(tied)
        compiled = remat_kit.measure(planned, *args, target="tpu-v5e")
        # Too high where much is kept in pairs of sums: some of them are in a memory of their own.
        assert 0.97 < point.predicted_peak_bytes / compiled.peak_bytes < 1.06


def dropped(ws, x, key):
    for i, w in enumerate(ws):
        mask = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
        x = jnp.where(mask, jnp.sin(x @ w), 0.0)
    return jnp.sum(x * x)


KEY = struct(2, dtype=jnp.uint32)


def bytes_for_mask(graph):
    """Return the bytes that are live for each element of the mask that a derivative reads."""
    (select,) = (e for e in graph.equations if e.primitive == "select_n")
    (mask,) = (graph.tensors[t] for t in select.needs if graph.tensors[t].dtype == "bool")
    return sum(graph.tensors[s].bytes for s in mask.sources) // mask.bytes


@pytest.mark.parametrize(("chip", "size"), [("cpu", 8), ("h100", 1), ("tpu-v5e", 0)])
def test_a_mask_of_dropout_takes_the_words_that_it_is_drawn_from_or_one_byte_or_nothing(chip, size):
    graph = _build.trace(dropped, ([struct(64, 64)], struct(64, 64), KEY), target(chip))
    assert bytes_for_mask(graph) == size


@pytest.mark.parametrize("chip", ["cpu", "h100", "tpu-v5e"])
def test_the_words_of_a_piece_take_what_random_bits_take(chip):
    def of_piece(ws, x, key):
        first, second = key
        words = threefry2x32_p.bind(first, second, jnp.zeros_like(x, jnp.uint32), counts)
        mask = jax.lax.shift_right_logical(words[0] ^ words[1], np.uint32(9)) < np.uint32(2**22)
        return jnp.sum(jnp.where(mask, jnp.sin(x @ ws[0]), 0.0) ** 2)

    counts = jax.lax.iota(jnp.uint32, 64**2).reshape(64, 64)
    args = [struct(64, 64)], struct(64, 64), KEY
    whole, piece = (_build.trace(fn, args, target(chip)) for fn in (dropped, of_piece))
    assert bytes_for_mask(piece) == bytes_for_mask(whole)
    (draw,) = (e for e in piece.equations if e.primitive == "threefry2x32")
    assert not any(piece.tensors[t].in_memory for t in draw.makes)
    (bits,) = (piece.tensors[e.makes[0]] for e in piece.equations if e.primitive == "xor")
    assert bits.in_memory is (chip == "cpu")


@pytest.mark.parametrize("chip", ["cpu", "h100", "tpu-v5e"])
def test_random_bits_of_another_generator_are_written_to_memory(chip):
    key = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
    graph = _build.trace(dropped, ([struct(64, 64)], struct(64, 64), key), target(chip))
    (bits,) = (e for e in graph.equations if e.primitive == "random_bits")
    (made,) = (graph.tensors[t] for t in bits.makes)
    assert made.in_memory
    assert made.bytes == 4 * 64 * 64


@pytest.mark.parametrize("chip", ["cpu", "h100"])
def test_a_scan_saves_the_masks_of_its_iterations(chip):
    def loss(ws, x, keys):
        return jnp.sum(jax.lax.scan(lambda x, k: (dropped_once(x, *k), None), x, (ws, keys))[0])

    def dropped_once(x, w, key):
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), jnp.sin(x @ w), 0.0)

    keys = struct(3, 2, dtype=jnp.uint32)
    graph = _build.trace(loss, (struct(3, 64, 64), struct(64, 64), keys), target(chip))
    (scan,) = (e.loop for e in graph.equations if e.loop)
    assert bytes_for_mask(scan.graph) == 1
    (bits,) = (e for e in scan.graph.equations if e.primitive == "random_bits")
    (made,) = (scan.graph.tensors[t] for t in bits.makes)
    assert made.in_memory is (chip == "cpu")
    assert made.bytes == (8 if chip == "cpu" else 4) * 64**2


def test_dropout_is_predicted_as_well_as_everything_else():
    """A prediction with one byte for each element of a mask would be far too low."""
    args = [struct(512, 512)] * 8, struct(2048, 512), KEY
    plain = remat_kit.frontier(dropped, *args).plain
    compiled = remat_kit.measure(dropped, *args).peak_bytes
    assert abs(plain.predicted_peak_bytes / compiled - 1) < 0.1
