"""Rewritten operations compute the same values and derivatives."""

import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pooled_network import pooled, pooled_args
from shapes import struct
from zoo import load

import remat_kit
from remat_kit import _jax
from remat_kit._backend import rewrites as _rewrites
from remat_kit._chip.target import target
from remat_kit._planner import frontier as _frontier
from remat_kit._policy.schedule import Segment
from remat_kit._program.program import flat_program

LAYERS, BATCH = 8, 512


def values():
    keys = iter(jax.random.split(jax.random.key(1), 2 * LAYERS + 1))
    ws = [
        (jax.random.normal(next(keys), (16, 64)) / 4, jax.random.normal(next(keys), (64, 16)) / 8)
        for _ in range(LAYERS)
    ]
    return ws, jax.random.normal(next(keys), (BATCH, 16))


@pytest.mark.parametrize("by", ["output", "mask"])
def test_a_lean_relu_has_the_same_derivative(by):
    """Zeros of both signs, what is no number and infinities included; second derivatives too."""
    x = jnp.array([-jnp.inf, -1.5, -0.0, 0.0, 1e-45, 2.0, jnp.inf, jnp.nan])
    ct = jnp.array([1.0, jnp.nan, 2.0, 3.0, 4.0, -5.0, 6.0, 7.0])
    (eqn,) = jax.make_jaxpr(jax.nn.relu)(x).eqns
    known = ({*eqn.outvars}, set()) if by == "output" else (set(), {*eqn.invars})
    other = _rewrites.lean_relu(eqn, *known)
    assert other is not eqn
    assert _rewrites.lean_relu(eqn, set(), set()) is eqn

    @jax.jit
    def replaced(x):
        return _jax.bind(other, [x])[0]

    pair = jax.nn.relu, replaced
    np.testing.assert_array_equal(*(jax.vjp(f, x)[1](ct)[0] for f in pair))
    np.testing.assert_array_equal(*(jax.jvp(f, (x,), (ct,))[1] for f in pair))
    np.testing.assert_array_equal(
        *(jax.hessian(lambda x, f=f: jnp.sum(f(x) ** 3))(x) for f in pair)
    )
    (square,) = jax.make_jaxpr(jnp.square)(x).eqns
    assert _rewrites.lean_relu(square, {*square.outvars}, {*square.invars}) is square


def test_the_operands_of_convolutions_and_the_sums_of_products_are_found():
    def layers(x, w, b, scale):
        y = jax.nn.relu(x @ w + b[None])  # read by a convolution behind a view
        y = convolved(y.reshape(1, 4, 4, 1), jnp.ones((2, 2, 1, 1)), 1)
        z = jax.nn.relu(y) * scale  # the next one reads no sum, and no convolution reads it
        return jax.nn.relu(z)

    closed = jax.make_jaxpr(layers)(jnp.ones((4, 4)), jnp.ones((4, 4)), jnp.ones(4), 2.0)
    eqns = closed.jaxpr.eqns
    relus = [e for e in eqns if e.primitive.name == "custom_jvp_call"]
    read, sums = _rewrites.operands_of_convolutions(eqns), _rewrites.sums_of_products(eqns)
    assert [e.outvars[0] in read for e in relus] == [True, False, False]
    assert [e.invars[0] in sums for e in relus] == [True, True, False]


def convolved(x, kernel, stride=2):
    """A convolution of images."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_a_convolution_with_late_copies_has_the_same_derivative(dtype):
    """One argument at a time and both, forward, batched and twice."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (4, 8, 8, 3), dtype)
    kernel = jax.random.normal(keys[1], (3, 3, 3, 5), dtype)
    (eqn,) = jax.make_jaxpr(convolved)(x, kernel).eqns
    other = _rewrites.convolution_with_late_copies(eqn)
    assert other is not eqn

    def replaced(x, kernel):
        return _jax.bind(other, [x, kernel])[0]

    def all_of(f):
        def loss(x, kernel):
            return jnp.sum(f(x, kernel).astype(jnp.float32) ** 2)

        def twice(x, kernel):
            return sum(jnp.vdot(g, g) for g in jax.grad(loss, (0, 1))(x, kernel))

        once = [jax.jit(jax.grad(loss, n))(x, kernel) for n in (0, 1, (0, 1))]
        once += [jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (0, None)))(jnp.stack([x, -x]), kernel)]
        once += [jax.jit(lambda *v: jax.jvp(f, v, v))(x, kernel)]
        return once, jax.jit(jax.grad(twice, (0, 1)))(x, kernel)

    (found, found_twice), (wanted, wanted_twice) = map(all_of, (replaced, convolved))
    chex.assert_trees_all_equal(found, wanted)
    # The terms of a second derivative are summed in another order.
    chex.assert_trees_all_close(found_twice, wanted_twice, rtol=1e-4, atol=1e-2)
    (square,) = jax.make_jaxpr(jnp.square)(x).eqns
    assert _rewrites.convolution_with_late_copies(square) is square


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "order", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NWC", "WIO", "NWC")]
)
def test_a_convolution_of_a_piece_is_fast_and_has_the_same_derivatives(order, groups):
    """Also with strides and padding, batched, twice, and in a loop."""
    sizes = {"N": 4, "H": 8, "W": 8, "C": 4, "I": 4 // groups, "O": 6} | {"h": 3, "w": 3}
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], [sizes[c] for c in order[0]])
    kernel = order[1].replace("H", "h").replace("W", "w")
    kernel = jax.random.normal(keys[1], [sizes[c] for c in kernel])

    def theirs(x, kernel):
        strides = (2,) * (x.ndim - 2)
        return jax.lax.conv_general_dilated(
            x, kernel, strides, "SAME", dimension_numbers=order, feature_group_count=groups
        )

    (eqn,) = jax.make_jaxpr(theirs)(x, kernel).eqns

    def ours(x, kernel):
        return _rewrites.evaluated_on_piece(eqn, [x, kernel])[0]

    def all_of(f):
        def loss(x, kernel):
            return jnp.sum(f(x, kernel) ** 2)

        def twice(x, kernel):
            return sum(jnp.vdot(g, g) for g in jax.grad(loss, (0, 1))(x, kernel))

        once = [jax.grad(loss, n)(x, kernel) for n in (0, 1, (0, 1))]
        once += [jax.vmap(jax.grad(loss, (0, 1)), (0, None))(jnp.stack([x, -x]), kernel)]
        once += [jax.jvp(f, (x, kernel), (x, kernel))]
        once += [jax.lax.map(lambda x: jax.grad(loss, (0, 1))(x, kernel), jnp.stack([x, -x]))]
        return once, jax.grad(twice, (0, 1))(x, kernel)

    found, wanted = jax.jit(lambda: all_of(ours))(), jax.jit(lambda: all_of(theirs))()
    chex.assert_trees_all_close(found, wanted, rtol=1e-4, atol=1e-2)


def test_loops_over_pieces_have_fast_convolutions_on_cpus():
    x, kernel = jnp.ones((8, 16, 16, 4)), jnp.ones((3, 3, 4, 4))

    def loss(x, kernel):
        return jnp.sum(jnp.sin(convolved(x, kernel, 1)))

    pieced = remat_kit.policy(remat_kit.pieces(4, axis=0))(loss)
    text = jax.jit(jax.grad(pieced, (0, 1))).lower(x, kernel).compile().as_text()
    lines = [line for line in text.splitlines() if " convolution(" in line]
    assert len(lines) >= 2
    assert all("while" in line and "dim_labels=b01f_01io->b01f" in line for line in lines)


@pytest.mark.parametrize("padding", [((0, 0), (0, 0)), ((1, 1), (0, 2))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("smallest", [False, True])
@pytest.mark.parametrize(
    ("derivative", "values"),
    [
        (_rewrites._late_scatter, "ties"),
        *((_rewrites._by_place, values) for values in ("ties", "infinite", "nan")),
    ],
)
def test_lean_pooling_changes_no_derivative(derivative, smallest, values, dtype, padding):
    key, other = jax.random.split(jax.random.key(1))
    x = jnp.round(3 * jax.random.normal(key, (5, 9, 8))).astype(dtype)
    strange = {"infinite": -jnp.inf, "nan": jnp.nan}.get(values, 0)
    x = jnp.where(jax.random.uniform(other, x.shape) < 0.4, strange, x)
    window, strides, padding = (1, 3, 2), (1, 2, 1), ((0, 0), *padding)
    start, reducer = (jnp.inf, jax.lax.min) if smallest else (-jnp.inf, jax.lax.max)

    @jax.jit
    def found(x, ct):
        return derivative(
            ct,
            x,
            select_prim=jax.lax.le_p if smallest else jax.lax.ge_p,
            window_dimensions=window,
            window_strides=strides,
            padding=padding,
        )

    def pool(x):
        return jax.lax.reduce_window(x, start, reducer, window, strides, padding)

    ct = jax.random.normal(jax.random.key(2), jax.eval_shape(pool, x).shape, dtype)
    wanted = jax.jit(lambda x, ct: jax.vjp(pool, x)[1](ct)[0])(x, ct)
    np.testing.assert_array_equal(found(x, ct), wanted)


def test_what_flows_back_through_a_large_window_is_left_to_xla():
    x = jax.random.normal(jax.random.key(0), (40, 40))

    def pool(x):
        return jnp.sum(jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (9, 9), (3, 2), "VALID"))

    front = remat_kit.frontier(pool, x)
    planned = remat_kit.policy(front.policy(front.points[-1]))(pool)
    np.testing.assert_array_equal(jax.jit(jax.grad(planned))(x), jax.jit(jax.grad(pool))(x))
    assert "select_and_scatter" in jax.jit(jax.grad(planned)).lower(x).as_text()


@pytest.mark.parametrize("regions", [False, True])
def test_on_cpus_the_derivative_of_pooling_keeps_a_byte_of_each_window(monkeypatch, regions):
    def loss(w, x):
        y = jnp.tanh(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME"))
        window, strides = (1, 1, 3, 3), (1, 1, 2, 2)
        y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, window, strides, "SAME")
        return jnp.mean(jnp.tanh(y) ** 2)

    args = struct(16, 3, 3, 3), struct(8, 3, 128, 128)
    graph = remat_kit.frontier(loss, *args).graph
    n = len(graph.equations)
    planned = remat_kit.policy(_frontier.policy_of(graph, (Segment(0, n, plain=not regions),)))
    lean = remat_kit.measure(planned(loss), *args).temp_bytes
    monkeypatch.setattr(_rewrites, "lean_pooling", lambda eqn: eqn)
    xla = remat_kit.measure(planned(lambda *args: loss(*args)), *args).temp_bytes
    pooled = 8 * 16 * 128 * 128 * 4
    assert xla - lean > 0.9 * pooled  # the zeros at least; and indices for the places


@pytest.mark.parametrize("nested", [False, True])
def test_every_pooling_of_a_plan_makes_its_zeros_late(nested):
    weights, x = pooled_args()
    graph = remat_kit.frontier(pooled, weights, x).graph
    n = len(graph.equations)
    parts = tuple(Segment(lo, hi) for lo, hi in itertools.pairwise((0, n // 3, 2 * n // 3, n)))
    schedule = (Segment(0, n, inside=parts),) if nested else parts
    planned = remat_kit.policy(_frontier.policy_of(graph, schedule))(pooled)
    step = jax.jit(jax.grad(planned)).trace(weights, x)
    text = step.lower(lowering_platforms=("cuda",)).as_text()
    scatters = text.count("stablehlo.select_and_scatter")
    assert 0 < scatters == text.count("stablehlo.shift_right_logical")


@pytest.mark.slow
@pytest.mark.skipif(not target("h100").available, reason="needs the CUDA plugin")
def test_on_gpus_zeros_to_scatter_into_come_late(monkeypatch):
    fn, args = load("resnet").build(depth=18, batch=16, image=64, width=16, classes=10)
    found = remat_kit.frontier(fn, *args, target="h100")
    plan = remat_kit.policy(found.policy(found.points[0]))
    late = remat_kit.measure(plan(fn), *args, target="h100")
    monkeypatch.setattr(_rewrites, "lean_pooling", lambda eqn: eqn)
    early = remat_kit.measure(plan(lambda *args: fn(*args)), *args, target="h100")
    zeros = 16 * 32 * 32 * 16 * 4
    assert early.temp_bytes - late.temp_bytes > 0.9 * zeros


def test_what_is_rounded_late_stays_the_same_to_the_bit():
    x = jnp.array([[-0.0, 0.0, jnp.nan], [jnp.inf, -1e-45, 2.0]])
    for late in (_rewrites.rounded_late, _rewrites._with_zeros):
        out = jax.jit(late)(x)
        assert np.array_equal(np.array(out).view(np.uint32), np.array(x).view(np.uint32))
    ct = jnp.ones_like(x)
    chex.assert_trees_all_equal(jax.vjp(_rewrites.rounded_late, x)[1](ct)[0], ct)
    chex.assert_trees_all_equal(jax.jvp(_rewrites.rounded_late, (x,), (ct,))[1], ct)
    assert jax.vmap(_rewrites.rounded_late)(jnp.stack([x, x])).shape == (2, *x.shape)


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
@pytest.mark.parametrize("shape", [(1, 6, 8), (6, 1, 8), (1, 6, 1, 8), (1, 1, 8)], ids=str)
def test_a_lean_pick_has_the_same_derivative(shape, mode):
    """Indices out of bounds and repeated ones included."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], shape)
    bounds = (0, 8) if mode == "promise_in_bounds" else (-12, 12)
    index = jax.random.randint(keys[1], (*shape[:-1], 1), *bounds)
    closed = jax.make_jaxpr(lambda x, i: jnp.take_along_axis(x, i, -1, mode=mode))(x, index)
    eqn = next(e for e in flat_program(closed).eqns if e.primitive.name == "gather")
    lean = _rewrites.lean_pick(eqn)
    assert lean is not eqn
    index = index.reshape(eqn.invars[1].aval.shape)

    def both(derivative):
        return [derivative(lambda x, e=e: _jax.bind(e, [x, index])[0]) for e in (eqn, lean)]

    outs = both(lambda f: f(x))
    ct = jnp.cos(jnp.arange(outs[0].size, dtype=jnp.float32)).reshape(outs[0].shape)
    np.testing.assert_array_equal(*outs)
    np.testing.assert_array_equal(*both(lambda f: jax.vjp(f, x)[1](ct)[0]))
    np.testing.assert_array_equal(*both(lambda f: jax.jvp(f, (x,), (jnp.sin(x),))[1]))
    np.testing.assert_array_equal(
        *both(lambda f: jax.vmap(jax.grad(lambda x: jnp.sum(f(x) ** 3)))(jnp.stack([x, 2 * x])))
    )


def test_a_lean_pick_is_for_single_elements_beside_axes_of_one_entry():
    x, index = jnp.ones((1, 6, 8)), jnp.zeros((6, 1), jnp.int32)
    others = (
        lambda x, i: jnp.take_along_axis(x[0], i, -1),  # no axis of one entry
        lambda x, i: x[:, i[:, 0]],  # whole rows
        lambda x, i: x[i[:, 0], 0, 0],  # along the axis of one entry
        lambda x, i: jnp.sin(x),
    )
    for fn in others:
        for eqn in flat_program(jax.make_jaxpr(fn)(x, index)).eqns:
            assert _rewrites.lean_pick(eqn) is eqn


def test_a_loss_of_one_sequence_is_lean_in_pieces_of_its_tokens():
    def loss(w, x, labels):
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[..., None], -1))

    keys = jax.random.split(jax.random.key(0))
    w, x = jax.random.normal(keys[0], (4, 9)), jax.random.normal(keys[1], (1, 6, 4))
    args = w, x, jnp.arange(6)[None]
    split = remat_kit.policy(remat_kit.pieces(3))(loss)
    chex.assert_trees_all_close(
        *(jax.grad(f, (0, 1))(*args) for f in (loss, split)), rtol=1e-6, atol=1e-6
    )

    def scattered(platform):
        traced = jax.jit(jax.grad(split)).trace(*args)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        return set(re.findall(r"stablehlo\.scatter.*?-> tensor<(\S+)xf32>", text, re.DOTALL))

    assert scattered("cpu") == {"1x2x9"}
    assert scattered("tpu") == {"2x9"}
