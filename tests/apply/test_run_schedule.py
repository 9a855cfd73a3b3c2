"""What a schedule runs: which arrays its regions save, sum up and hand on."""

import itertools
import re

import chex
import jax
import jax.extend.core as jec
import jax.numpy as jnp
import pytest
from interpreter import one_by_one
from shapes import struct
from zoo import load

import remat_kit
from remat_kit._apply import run_schedule as _run_schedule
from remat_kit._backend import barriers as _barriers
from remat_kit._backend import rewrites as _rewrites
from remat_kit._chip.target import target
from remat_kit._planner import frontier as _frontier
from remat_kit._planner.costs.simulate import simulate
from remat_kit._policy import schedule as _schedule
from remat_kit._policy.schedule import LoopPart, Segment
from remat_kit._program import program as _program


def products_of(jaxpr):
    inner = (products_of(j) for e in jaxpr.eqns for j in jec.jaxprs_in_params(e.params))
    return sum(e.primitive.name == "dot_general" for e in jaxpr.eqns) + sum(inner)


def around(depth, kept="dot_general"):
    """Return the gradient of a program with two regions inside of ``depth`` others.

    The outer regions and the first inner one keep the second result of the primitive ``kept``.
    """

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x * x)

    args = [struct(16, 16)] * 4, struct(64, 16)
    graph = remat_kit.frontier(loss, *args).graph
    n = len(graph.equations)
    second = [e for e in graph.equations if e.primitive == kept][1]
    stop = second.index + 1
    parts = Segment(0, stop, save=frozenset(second.makes)), Segment(stop, n)
    for _ in range(depth):
        parts = (Segment(0, n, save=frozenset(second.makes), inside=parts),)
    planned = remat_kit.policy(_frontier.policy_of(graph, parts))(loss)
    return jax.make_jaxpr(jax.grad(planned))(*args)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_a_region_inside_of_others_keeps_and_hands_on_is_not_made_again(depth):
    # Four of the loss, one of which is to be made again in either region, and two for each.
    assert products_of(around(depth).jaxpr) == 14


@pytest.mark.parametrize("depth", [1, 2])
def test_a_region_does_what_it_says_after_a_trace_with_the_other_implementation(depth):
    _run_schedule._keeping_under.cache_clear()
    jax.config.update("jax_remat3", True)
    try:
        around(depth, "tanh")
    finally:
        jax.config.update("jax_remat3", False)
    assert products_of(around(depth, "tanh").jaxpr) == 14


@pytest.mark.parametrize(
    ("outer", "inner", "again"),
    # What the outer region keeps is not made again. What the inner ones keep beside it the outer
    # one makes once more, and what they hand on; the rest the inner ones do.
    [
        *[((), (), 4 + 6), ((), (1, 3), 4 + 4), ((1, 3), (1, 3), 0 + 4), ((1,), (1, 3), 2 + 4)],
        *[((1, 3, 5), range(6), 3 + 0), ((), range(6), 6 + 0)],
    ],
)
def test_a_region_around_regions_keeps_what_it_says_and_no_more(outer, inner, again):
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x * x)

    key = jax.random.key(0)
    args = (
        [jax.random.normal(k, (16, 16)) / 4 for k in jax.random.split(key, 6)],
        jnp.ones((64, 16)),
    )
    graph = remat_kit.frontier(loss, *args).graph
    n = len(graph.equations)
    dots = [e for e in graph.equations if e.primitive == "dot_general"]
    keeps = [frozenset(t for k in some for t in dots[k].makes) for some in (outer, inner)]
    cuts = [0, dots[2].index, dots[4].index, n]
    parts = tuple(
        Segment(a, b, save=frozenset(t for t in keeps[1] if a <= graph.tensors[t].producer < b))
        for a, b in itertools.pairwise(cuts)
    )
    schedule = (Segment(0, n, save=keeps[0], inside=parts),)
    planned = remat_kit.policy(_frontier.policy_of(graph, schedule))(loss)
    gradient = jax.make_jaxpr(jax.grad(planned))(*args)
    # Six of the loss; a gradient of each matrix and a cotangent of what all but the first read.
    assert products_of(gradient.jaxpr) == 6 + 6 + 5 + again
    extra = simulate(graph, schedule).extra_flops
    assert extra == pytest.approx(dots[0].flops * again, rel=0.1)
    chex.assert_trees_all_equal(*(one_by_one(jax.grad(f), *args) for f in (planned, loss)))
    saved = remat_kit.inspect(planned, *args).saved
    assert sum(v.shape == (64, 16) for v in saved) == len(outer)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA:CPU undoes recompute outside loops")
def test_what_a_region_inside_of_another_hands_on_is_not_fused_into_what_follows():
    def loss(ws, x):
        left, right, square, last = ws
        total = jnp.tanh(jnp.sin(x @ left)) + jnp.tanh(x @ right)
        return jnp.sum(jnp.sin(jnp.sin(jax.nn.relu(total) @ square) @ last))

    width, batch = 256, 1024
    weights = [struct(64, width), struct(64, width), struct(width, width), struct(width, 16)]
    args = weights, struct(batch, 64)
    graph = remat_kit.frontier(loss, *args, target="cpu").graph
    n = len(graph.equations)
    total = next(e for e in graph.equations if e.primitive == "add")
    stop = total.index + 1
    parts = Segment(0, stop, save=frozenset(total.makes)), Segment(stop, n, plain=True)
    planned = _frontier.policy_of(graph, [Segment(0, n, inside=parts)])
    found = remat_kit.measure(remat_kit.policy(planned)(loss), *args, target="cpu")
    # The sum, what the square matrix is multiplied by and gives, and their two cotangents; neither
    # of the terms.
    assert found.temp_bytes < 5.5 * 4 * batch * width


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA:CPU undoes recompute outside loops")
def test_what_comes_into_a_region_is_not_made_again_of_all_its_terms():
    """XLA's CPU compiler would fuse a residual stream into each later block: 17 MiB, not 10."""

    def stack(ws, x):
        for i, w in enumerate(ws):
            with jax.named_scope(f"block_{i}"):
                h = x @ w
                x = jax.nn.relu((h - h.mean(0, keepdims=True)) + x)
        return jnp.sum(x)

    args = [struct(64, 64)] * 12, struct(4096, 64)
    point = remat_kit.estimate(stack, *args, checkpoints=["block_2", "block_5", "block_8"])
    graph = remat_kit.frontier(stack, *args).graph
    planned = _frontier.policy_of(graph, point.schedule)
    assert len([s for line in planned.lines for s in _schedule.parse(line)]) == 4
    assert remat_kit.measure(remat_kit.policy(planned)(stack), *args).temp_bytes < 15 * 2**20


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA:CPU undoes recompute outside loops")
def test_cotangents_of_what_a_region_is_given_are_summed_as_they_come():
    """XLA's CPU compiler would keep what each layer's part is made of: 117 MiB, not 88."""
    loss, args = load("densenet").build(stages=(6, 1), batch=8, image=112)
    program = _program.flat_program(jax.make_jaxpr(loss)(*args))
    layers = [i for i, e in enumerate(program.eqns) if e.primitive.name == "concatenate"][:6]
    stem = 1 + [e.primitive.name for e in program.eqns].index("reduce_window_max")
    nest = f"{stem}:{layers[1]}"
    for start, stop in itertools.pairwise(layers[1:]):
        nest = f"{stem}:{stop} around ({nest}; {start}:{stop} plain)"
    lines = f"0:{stem}", nest, f"{layers[-1]}:{len(program.eqns)} plain"
    plan = remat_kit.planned(_schedule.describe(program), *lines)
    assert remat_kit.measure(remat_kit.policy(plan)(loss), *args).temp_bytes < 100 * 2**20


def alternating(program, bounds):
    """Return the policy of plain segments and regions by turns."""
    pairs, kinds = itertools.pairwise(bounds), itertools.cycle((" plain", ""))
    lines = [f"{lo}:{hi}{kind}" for (lo, hi), kind in zip(pairs, kinds, strict=False)]
    return remat_kit.policy(remat_kit.planned(_schedule.describe(program), *lines))


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA:CPU undoes recompute outside loops")
def test_a_relu_that_a_region_reads_is_kept_once():
    """XLA's CPU compiler would keep its input for its derivative as well: 21 MiB, not 15."""

    def stack(ws, x):
        for u, w in ws:
            h = x @ u
            x = jax.nn.relu((h - h.mean(0, keepdims=True)) + x)
            x = jnp.sin(jnp.sin(x) @ w) + x
        return jnp.sum(x**2)

    args = [(struct(64, 64), struct(64, 64))] * 6, struct(4096, 64)
    program = _program.flat_program(jax.make_jaxpr(stack)(*args))
    names = [e.primitive.name for e in program.eqns]
    relus = [i + 1 for i, name in enumerate(names) if name == "custom_jvp_call"]
    ends = [i + 2 for i, name in enumerate(names) if name == "sin"][1::2]
    bounds = [0, *itertools.chain(*zip(relus, ends, strict=True)), len(names)]
    assert remat_kit.measure(alternating(program, bounds)(stack), *args).temp_bytes < 18 * 2**20


def convolved(x, kernel, stride=2):
    """A convolution of images."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA:CPU undoes recompute outside loops")
def test_what_a_convolution_and_a_region_read_is_kept_once():
    """XLA's CPU compiler would hold a transposed copy for the kernel's gradient: 56 MiB, not 40."""

    def stack(ws, x):
        for w in ws:
            x = jax.nn.relu(x - x.mean(0, keepdims=True))
            h = jnp.sin(jnp.sin(x))
            x = convolved(x, w, stride=1) + h
        return jnp.sum(x**2)

    args = [struct(3, 3, 16, 16)] * 6, struct(64, 32, 32, 16)
    program = _program.flat_program(jax.make_jaxpr(stack)(*args))
    names = [e.primitive.name for e in program.eqns]
    sines = [i for i, name in enumerate(names) if name == "sin"]
    bounds = [0, *(i + n % 2 for n, i in enumerate(sines)), len(names)]
    assert remat_kit.measure(alternating(program, bounds)(stack), *args).temp_bytes < 48 * 2**20


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA:CPU undoes recompute outside loops")
def test_gradients_of_kernels_are_not_put_off():
    """XLA's CPU compiler would make them after the cotangents: 23.1 MiB, not 20.6."""

    def normed(x):
        mean = x.mean((0, 1, 2), keepdims=True)
        variance = (x * x).mean((0, 1, 2), keepdims=True) - mean * mean
        return (x - mean) * jax.lax.rsqrt(variance + 1e-3)

    def dense(ws, x):
        for narrow, wide in ws:
            out = convolved(jax.nn.relu(normed(x)), narrow, stride=1)
            out = convolved(jax.nn.relu(normed(out)), wide, stride=1)
            x = jnp.concatenate([x, out], -1)
        return jnp.sum(x**2)

    kernels = [(struct(1, 1, 32 + 8 * i, 32), struct(3, 3, 32, 8)) for i in range(4)]
    args = kernels, struct(16, 32, 32, 32)
    front = remat_kit.frontier(dense, *args, target="cpu")
    least = remat_kit.policy(front.policy(front.points[0]))(dense)
    found = remat_kit.measure(least, *args, target="cpu")
    assert found.peak_bytes < 22 * 2**20


def with_dropout(weights, x, key):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
            x = x + jnp.where(kept, jnp.sin(x @ w), 0.0)
    return jnp.sum(x**2)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_random_bits_of_a_region_wait_for_what_comes_into_it(make):
    """XLA's CPU compiler would draw those of all regions at the beginning of the program."""
    args = [jnp.eye(8)] * 3, jnp.ones((4, 8)), make(0)
    program = _program.flat_program(jax.make_jaxpr(with_dropout)(*args))
    count = len(program.eqns)
    starts = [i for i, e in enumerate(program.eqns) if e.primitive.name == "random_fold_in"]
    cuts = [0, *(i - 1 for i in starts[1:]), count]
    lines = _schedule.lines([Segment(a, b) for a, b in itertools.pairwise(cuts)])
    plan = remat_kit.planned(_schedule.describe(program), *lines)
    planned = remat_kit.policy(plan)(with_dropout)
    barriers = [
        e
        for e in jax.make_jaxpr(planned)(*args).eqns
        if e.primitive.name == "remat_kit_barrier"
        and any(_barriers.is_key(v.aval) for v in e.invars)
    ]
    assert len(barriers) == len(cuts) - 2  # nothing is computed before the first region
    assert all(any(v.aval.shape == (4, 8) for v in e.invars) for e in barriers)
    chex.assert_trees_all_close(jax.grad(planned)(*args), jax.grad(with_dropout)(*args), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA:CPU undoes recompute")
def test_masks_of_dropout_are_drawn_again_in_a_plan_of_bert():
    """Without the barriers, the random bits of all layers would be live, 3.8 GiB.

    They are two words for each element of six masks of (16, 16, 512, 512) and of 13 masks of (16,
    512, 1024).
    """
    loss, args = load("bert").build(size="large", layers=6, batch=16, seq=512)
    plan = remat_kit.plan(loss, *args, budget="min")
    assert plan.compiled.temp_bytes < 2.2 * 2**30


def layers(ws, x):
    def layer(x, w):
        up, down = (each.astype(jnp.bfloat16) for each in w)
        return x + jnp.tanh(x @ up) @ down, None

    return jnp.sum(jax.lax.scan(layer, x, ws)[0].astype(jnp.float32))


def in_regions(around, n, save=False):
    """Return the layers with the body of the scan as a region, or as two in a region.

    The region may save what `tanh` reads.
    """
    args = (struct(16, n, 2 * n), struct(16, 2 * n, n)), struct(512, n, dtype=jnp.bfloat16)
    graph = remat_kit.frontier(layers, *args).graph
    (scan,) = [e for e in graph.equations if e.loop]
    last = len(scan.loop.graph.equations)
    half = next(e.index for e in scan.loop.graph.equations if e.primitive == "tanh")
    (product,) = scan.loop.graph.equations[half].reads
    saved = frozenset([product] if save else [])
    parts = (Segment(0, half, save=saved), Segment(half, last)) if around else ()
    plan = (LoopPart(16, 1, (Segment(0, last, save=saved, inside=parts),)),)
    end = len(graph.equations)
    schedule = (Segment(0, end, plain=True, loops=((scan.index, plan),)),)
    return remat_kit.policy(_frontier.policy_of(graph, schedule))(layers), args


@pytest.mark.parametrize("around", [False, True])
def test_matrices_that_regions_of_a_scan_read_are_rounded_there(around):
    planned, args = in_regions(around, 64)
    text = str(jax.make_jaxpr(jax.grad(planned))(*args))
    assert text.count("= remat_kit_rounded_late") == 2 + 2  # in both passes
    assert "f32[16,64,128] = remat_kit_rounded_late" not in text
    saving, _ = in_regions(around, 64, save=True)
    traced = [jax.make_jaxpr(jax.grad(fn))(*args).jaxpr for fn in (planned, saving)]
    products = [products_of(jaxpr) for jaxpr in traced]
    assert products == [8 - 1, 8 - 2]  # the last product's result is not read again
    w, x = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype) / 64, args)
    chex.assert_trees_all_equal(jax.jit(jax.grad(planned))(w, x), jax.jit(jax.grad(layers))(w, x))


@pytest.mark.slow
@pytest.mark.skipif(not target("tpu-v5e").available, reason="needs libtpu")
@pytest.mark.parametrize("around", [False, True])
def test_the_matrices_of_a_scan_are_not_rounded_in_advance_on_a_tpu(around, monkeypatch):
    planned, args = in_regions(around, 2048)
    found = remat_kit.measure(planned, *args, target="tpu-v5e").temp_bytes
    monkeypatch.setattr(_rewrites, "may_be_rounded", lambda aval: False)
    planned, args = in_regions(around, 2048)
    before = remat_kit.measure(planned, *args, target="tpu-v5e").temp_bytes
    copies = 2 * 16 * 2048 * 4096 * 2
    assert before - found == pytest.approx(copies, rel=0.15)


def dense(ws, x):
    for up, bias, down, last in ws:
        x = x + jax.nn.gelu(x @ up + bias[None]) @ down + last[None]
    return jnp.sum(x)


def layer_by_layer(plain=(), around=False):
    """Return the dense layers with a region for each of them, all in one region or not.

    Some of the layers may be plain.
    """
    layer = struct(512, 2048), struct(2048), struct(2048, 512), struct(512)
    args = [layer] * 8, struct(256, 512)
    graph = remat_kit.frontier(dense, *args).graph
    products = [e.index for e in graph.equations if e.primitive == "dot_general"]
    bounds = [0, *products[2::2], len(graph.equations)]
    schedule = tuple(
        Segment(lo, hi, plain=number in plain)
        for number, (lo, hi) in enumerate(itertools.pairwise(bounds))
    )
    if around:
        schedule = (Segment(0, bounds[-1], inside=schedule),)
    return remat_kit.policy(_frontier.policy_of(graph, schedule))(dense), args


@pytest.mark.parametrize(
    ("plain", "around", "expected"),
    [
        pytest.param((), False, 8, marks=pytest.mark.slow),
        pytest.param((1, 2, 7), False, 5, marks=pytest.mark.slow),
        ((1, 2, 7), True, 8),
    ],
)
def test_each_product_that_is_recomputed_has_a_barrier_for_its_gradients(plain, around, expected):
    planned, args = layer_by_layer(plain, around)
    gradient = jax.jit(jax.grad(planned, argnums=(0, 1)))
    text, other = (
        gradient.trace(*args).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cuda", "cpu")
    )
    pairs = "optimization_barrier %[^,]*, %[^,]* : tensor<256x512xf32>, tensor<512x2048xf32>"
    assert len(re.findall(pairs, text)) == expected
    assert not re.findall(pairs, other)
    ws, x = jax.tree.map(lambda a: jnp.full(a.shape, 0.001, a.dtype), args)
    chex.assert_trees_all_equal(*(jax.jit(jax.grad(fn))(ws, x) for fn in (planned, dense)))


def test_products_in_the_body_of_a_scan_have_no_barrier_for_their_gradients():
    planned, args = in_regions(False, 64)
    gradient = jax.jit(jax.grad(planned)).trace(*args)
    text = gradient.lower(lowering_platforms=("cuda",)).as_text()
    assert not re.findall("optimization_barrier %[^,]*, %[^,]* : .*tensor<64x128x", text)
