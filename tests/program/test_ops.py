"""Operations that run code from outside JAX: their FLOPs where they can be known, else the word
that nobody knows them, and plans that do not take them for free.
"""

import json
import math
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import remat_kit
from remat_kit._planner import frontier as _frontier
from remat_kit._program import ops as _ops


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def counted(fn, *args):
    """The operations of a function, and the primitives of which nobody knows them."""
    eqns = jax.make_jaxpr(fn)(*args).eqns
    unknown = [u.primitive.name for e in eqns for u in _ops.unknown_costs(e)]
    return sum(map(_ops.flops, eqns)), unknown


def matmul_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.tanh(x_ref[...] @ y_ref[...])


def matmul(x, y, block=64, **more):
    (m, k), (_, n) = x.shape, y.shape
    return pl.pallas_call(
        matmul_kernel,
        grid=(m // block, n // block),
        in_specs=[
            pl.BlockSpec((block, k), lambda i, j: (i, 0)),
            pl.BlockSpec((k, block), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j: (i, j)),
        out_shape=struct(m, n),
        **more,
    )(x, y)


def test_a_pallas_kernel_counts_its_body_for_each_place_of_its_grid():
    flops, unknown = counted(matmul, struct(256, 96), struct(96, 128))
    assert flops == 2 * 256 * 96 * 128 + 256 * 128
    assert not unknown
    batched = jax.vmap(matmul)
    assert counted(batched, struct(3, 256, 96), struct(3, 96, 128))[0] == 3 * flops


def test_a_pallas_kernel_counts_what_it_says_of_itself():
    estimate = pl.CostEstimate(flops=12345, transcendentals=5, bytes_accessed=1)
    said = counted(lambda x, y: matmul(x, y, cost_estimate=estimate), struct(64, 8), struct(8, 64))
    assert said == (12350, [])


def test_a_kernel_whose_loop_depends_on_data_is_unknown():
    def kernel(n_ref, x_ref, o_ref):
        o_ref[...] = jax.lax.fori_loop(0, n_ref[0], lambda _, y: jnp.sin(y), x_ref[...])

    def call(n, x):
        return pl.pallas_call(kernel, out_shape=struct(8, 128))(n, x)

    assert counted(call, struct(1, dtype=jnp.int32), struct(8, 128)) == (0, ["pallas_call"])


@pytest.mark.parametrize(
    ("batch", "heads", "length", "depth"), [(2, 4, 1024, 128), (1, 2, 512, 64)]
)
def test_flash_attention(batch, heads, length, depth):
    x = struct(batch, heads, length, depth)
    flops, unknown = counted(lambda x: flash_attention(x, x, x), x)
    exact = 4 * batch * heads * length**2 * depth
    assert exact <= flops < 1.05 * exact
    assert not unknown
    loss = lambda x: jnp.sum(flash_attention(x, x, x))  # noqa: E731
    recomputed = remat_kit.inspect(loss, x, policy="nothing")
    assert recomputed.forward_flops >= exact


@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_attention(monkeypatch, causal):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 90000)
    capable = mock.patch.object(
        fused_attention_stablehlo, "check_compute_capability", return_value=True
    )
    x = struct(2, 256, 4, 64, dtype=jnp.bfloat16)

    def loss(x):
        out = jax.nn.dot_product_attention(x, x, x, is_causal=causal, implementation="cudnn")
        return jnp.sum(out.astype(jnp.float32))

    product = 2 * 2 * 256 * 4 * 64 * 256
    with capable:
        forward, unknown = counted(loss, x)
        whole, _ = counted(jax.grad(loss), x)
    assert 2 * product <= forward < 2.1 * product
    assert 7 * product <= whole < 7.1 * product
    assert not unknown


FACTORISATIONS = {
    "cholesky": (jnp.linalg.cholesky, 1 / 3),
    "eigh": (lambda a: jnp.linalg.eigh(a)[0], 9),
    "lu": (lambda a: jax.lax.linalg.lu(a)[0], 2 / 3),
    "svd": (lambda a: jnp.linalg.svd(a)[1], 21),
    "inverse": (jnp.linalg.inv, 8 / 3),
}


@pytest.mark.parametrize("name", FACTORISATIONS)
def test_factorisations_grow_with_the_third_power(name):
    fn, factor = FACTORISATIONS[name]
    for n in (64, 128):
        flops, unknown = counted(fn, struct(3, n, n))
        assert flops == pytest.approx(3 * factor * n**3, rel=0.25)
        assert not unknown


def test_transforms_and_sorting_are_more_than_linear():
    n = 4096
    assert counted(jnp.fft.fft, struct(n, dtype=jnp.complex64))[0] >= 5 * n * math.log2(n)
    assert counted(jnp.sort, struct(8, n))[0] >= 8 * n * math.log2(n)


def callback(x):
    return jax.pure_callback(lambda x: 2 * x, struct(*x.shape), x, vmap_method="sequential")


def foreign(x):
    return jax.ffi.ffi_call("somebody_elses", struct(*x.shape))(x)


own_p = Primitive("somebody_elses_primitive")
own_p.def_abstract_eval(lambda x: x)

UNKNOWN = {
    "callback": (callback, "pure_callback"),
    "foreign": (foreign, "ffi_call"),
    "primitive": (own_p.bind, "somebody_elses_primitive"),
    "while": (lambda x: jax.lax.while_loop(lambda x: jnp.sum(x) < 9, jnp.exp, x), "while"),
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: jax.jit(jax.checkpoint(f))])
def test_what_nobody_knows_is_said(name, wrap):
    fn, primitive = UNKNOWN[name]
    assert counted(wrap(fn), struct(8, 8))[1] == [primitive]
    assert counted(
        lambda x: jax.lax.scan(lambda c, _: (wrap(fn)(c), None), x, None, 3), struct(8, 8)
    )[1] == [primitive]


def with_rule(fn):
    """Give a function from outside the derivative of doubling."""
    rule = jax.custom_vjp(fn)
    rule.defvjp(lambda x: (rule(x), None), lambda _, g: (2 * g,))
    return rule


def tower(fn, depth=6):
    outside = with_rule(fn)

    def loss(ws, x):
        for i, w in enumerate(ws):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.sin(outside(jnp.tanh(x @ w)))
        return jnp.mean(x**2)

    return loss, ([struct(32, 32)] * depth, struct(2048, 32))


@pytest.mark.parametrize("fn", [callback, foreign])
def test_reports_say_what_no_figure_counts(fn):
    loss, args = tower(fn, depth=2)
    report = remat_kit.inspect(loss, *args, policy="nothing")
    assert [(u.module, u.count) for u in report.unknown_costs] == [("layer_0", 1), ("layer_1", 1)]
    assert "cost unknown" in str(report)
    plain = json.loads(json.dumps(report.to_json()))
    assert (
        plain["unknown_costs"][0]["primitive"]
        == UNKNOWN["callback" if fn is callback else "foreign"][1]
    )
    again = [r for r in plain["recomputed"] if not r["cost_known"]]
    assert again
    assert "unknown" in str(report).split("computed twice")[1]


def again_in(graph, schedule):
    """What a schedule computes again, by primitive."""
    from remat_kit._planner.costs.simulate import Simulation

    simulation = Simulation(graph, 1.0)
    parts = [part for s in schedule for part in (s, *s.inside)]
    return [graph.equations[i].primitive for p in parts for i in simulation.demand(p).again]


@pytest.mark.parametrize("fn", [callback, foreign])
def test_plans_compute_it_again_only_where_nothing_else_helps(fn):
    loss, args = tower(fn)
    found = _frontier.frontier(loss, *args)
    free = [p for p in found.points if p.extra_flops_fraction < 0.15]
    assert len(free) > 2
    for point in free:
        assert "custom_vjp_call" not in again_in(found.graph, point.schedule)
    dear = [p for p in found.points if "custom_vjp_call" in again_in(found.graph, p.schedule)]
    assert all(p.predicted_peak_bytes < min(q.predicted_peak_bytes for q in free) for p in dear)


def test_a_plan_says_what_it_does_with_it():
    loss, args = tower(callback, depth=4)
    kept = remat_kit.plan(loss, *args, budget="free", compiles=1)
    assert "is unknown: pure_callback. Each" in str(kept)
    assert "none of them is recomputed" in str(kept)
    assert "cost unknown (pure_callback): saved" in kept.explain().text()


@pytest.mark.parametrize("flops", [None, 3 * 10**12])
def test_the_step_time_of_a_compiled_kernel(flops):
    pytest.importorskip("libtpu")
    said = flops and pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0)

    def forward(x, w):
        return matmul(x, w, 128, cost_estimate=said)

    kernel = jax.custom_vjp(forward)
    kernel.defvjp(lambda x, w: (forward(x, w), (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    args = struct(512, 256), struct(256, 256)
    report = remat_kit.inspect(lambda x, w: jnp.sum(kernel(x, w) ** 2), *args, target="tpu-v5e")
    total = report.readings["tpu-v5e"].estimate.total
    silent = "counts only the bytes of tpu_custom_call" in str(report)
    assert silent == (flops is None)
    assert (total.flops >= 3e12) == (flops is not None)


def test_a_reshard_computes_nothing():
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh, P()))
    with jax.sharding.use_abstract_mesh(mesh):
        closed = jax.make_jaxpr(lambda x: jax.sharding.reshard(x, P("data")))(x)
    assert [_ops.flops(e) for e in closed.eqns if e.primitive.name == "reshard"] == [0.0]
