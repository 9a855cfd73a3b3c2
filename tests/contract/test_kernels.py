"""Attention kernels and kernels of one's own in training steps: priced, and kept or recomputed."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

import remat_kit
from remat_kit import UnknownNameError, _jax

OPTIMIZER = optax.adamw(1e-3)
ROWS = 128


def train_step(mix):
    """A step of two blocks, each of which mixes three projections of its input."""

    def loss(weights, x):
        for i, w in enumerate(weights):
            with jax.named_scope(f"block_{i}"):
                parts = ((x @ p).reshape(*x.shape[:2], 2, -1) for p in w)
                x = x + jnp.tanh(mix(*parts).reshape(x.shape))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights, state, x):
        value, gradient = jax.value_and_grad(loss)(weights, x)
        updates, state = OPTIMIZER.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, value

    return step


def arguments(dtype=jnp.float32, batch=2, length=256, width=128):
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.random.normal(k, (3, width, width), dtype) * 0.05 for k in keys[:2]]
    return (
        weights,
        OPTIMIZER.init(weights),
        jax.random.normal(keys[2], (batch, length, width), dtype),
    )


def losses(step, steps=3):
    weights, state, x = arguments()
    found = []
    for _ in range(steps):
        weights, state, value = step(weights, state, x)
        found.append(float(value))
    return found


def report(step, args, policy=None, target=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat_kit.RematKitWarning)
        at = None if policy is None else "block_*"
        return remat_kit.inspect(step, *args, policy=policy, at=at, target=target)


def again(found):
    return [r.primitive for r in found.recomputed if not r.is_free]


def needs(target):
    if not remat_kit.target(target).available:
        pytest.skip(f"the compiler for {target} is not installed")


without_savings = pytest.mark.skipif(
    _jax.JAX_VERSION < (0, 11), reason="XLA:CPU of JAX 0.10.2 saves nothing here by recomputing"
)


# -- attention of JAX, written out for XLA --------------------------------------------------------


def by_xla(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def test_attention_of_xla_is_ordinary_operations():
    args = arguments()
    plain = report(train_step(by_xla), args)
    scores = 2 * 2 * 2 * 256 * 256 * 64  # of one block, for query times key
    assert plain.forward_flops > 2 * 2 * scores
    assert not plain.unknown_costs
    lean = report(train_step(by_xla), args, "dots")
    assert "dot_general" not in again(lean)
    assert "exp" in again(lean)


@pytest.mark.slow
@without_savings
def test_a_planned_step_with_attention_trains_as_without():
    step = train_step(by_xla)
    plan = remat_kit.plan(step, *arguments(), budget="min")
    assert plan.compiled_peak_bytes < 0.7 * plan.baseline.peak_bytes
    np.testing.assert_allclose(losses(remat_kit.policy(plan)(step)), losses(step), rtol=1e-5)


# -- a kernel of one's own ------------------------------------------------------------------------


def _body(x_ref, o_ref):
    o_ref[...] = jnp.tanh(x_ref[...]) * x_ref[...]


def own_kernel(interpret):
    def call(x):
        rows = x.reshape(-1, 128)
        block = pl.BlockSpec((ROWS, 128), lambda i: (i, 0))
        made = pl.pallas_call(
            _body,
            out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
            grid=(len(rows) // ROWS,),
            in_specs=[block],
            out_specs=block,
            interpret=interpret,
        )(rows)
        return made.reshape(x.shape)

    @jax.custom_vjp
    def kernel(x):
        return call(x)

    def forward(x):
        out = checkpoint_name(call(x), "kernel_out")
        return out, (x, out)

    kernel.defvjp(forward, lambda kept, g: (g * (jnp.tanh(kept[0]) + kept[1]),))
    return lambda q, k, v: kernel(q) * k + v


def test_a_kernel_of_ones_own_is_priced_and_recomputed_knowingly():
    step, args = train_step(own_kernel(interpret=True)), arguments()
    plain = report(step, args)
    assert not plain.unknown_costs
    products = 2 * 3 * 2 * 2 * 256 * 128 * 128
    assert plain.forward_flops > products + 2 * 2 * 2 * 256 * 128  # the kernel's two operations
    assert again(report(step, args, "dots")).count("pallas_call") == 2  # one a block
    assert "pallas_call" not in again(report(step, args, "save(primitive('pallas_call'))"))


def test_a_name_in_the_forward_rule_of_a_kernel_is_honoured():
    step, args = train_step(own_kernel(interpret=True)), arguments()
    found = report(step, args, "save(named('kernel_out'))")
    assert "pallas_call" not in again(found)
    assert "save(named('kernel_out'))" in {r.reason for r in found.saved}
    with pytest.raises(UnknownNameError, match="did you mean 'kernel_out'"):
        report(step, args, "save(named('kernel_ou'))")


def test_a_name_in_a_rule_that_another_rule_calls_is_out_of_reach():
    @jax.custom_vjp
    def inner(x):
        return checkpoint_name(jnp.sin(x), "inside") * 2

    inner.defvjp(lambda x: (inner(x), x), lambda x, g: (g * jnp.cos(x),))

    @jax.custom_vjp
    def outer(x):
        return inner(x)

    outer.defvjp(lambda x: (inner(x), x), lambda x, g: (g * jnp.cos(x),))
    step = train_step(lambda q, k, v: outer(q) * k + v)
    with pytest.raises(UnknownNameError, match="'inside' is inside of a custom derivative rule"):
        report(step, arguments(), "save(named('inside'))")


@without_savings
def test_a_planned_step_with_a_kernel_trains_as_without():
    step = train_step(own_kernel(interpret=True))
    plan = remat_kit.plan(step, *arguments(), budget="min")
    assert plan.compiled_peak_bytes < plan.baseline.peak_bytes
    np.testing.assert_allclose(losses(remat_kit.policy(plan)(step)), losses(step), rtol=1e-5)


@pytest.mark.slow
def test_a_kernel_of_ones_own_is_compiled_for_a_tpu():
    needs("tpu-v5e")
    step, args = train_step(own_kernel(interpret=False)), arguments(batch=8, length=8192)
    plan = remat_kit.plan(step, *args, budget="min", target="tpu-v5e", compiles=2)
    assert plan.compiled_peak_bytes < plan.baseline.peak_bytes
    assert not plan.notes or "unknown" not in " ".join(plan.notes)


# -- flash attention for TPUs, and cuDNN ----------------------------------------------------------


def by_flash(q, k, v):
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    return flash_attention(q, k, v, causal=True).transpose(0, 2, 1, 3)


def test_flash_attention_is_priced_and_kept_by_its_primitive():
    step, args = train_step(by_flash), arguments()
    plain = report(step, args)
    assert not plain.unknown_costs
    assert plain.forward_flops > report(train_step(lambda q, k, v: v), args).forward_flops
    found = report(step, args, "dots")
    assert [lint.code for lint in found.lints].count("opaque-kernel") == 1
    kept = report(step, args, "save(dots | primitive('pallas_call'))")
    assert "pallas_call" not in again(kept)
    assert not kept.lints
    # The wide results from which the normalizers are cut are not saved.
    assert kept.saved_bytes < found.saved_bytes + 1.1 * 2 * np.prod((2, 256, 128)) * 4


@pytest.mark.slow
def test_a_step_with_flash_attention_is_planned_for_a_tpu():
    needs("tpu-v5e")
    step, args = train_step(by_flash), arguments(batch=8, length=4096, width=256)
    plan = remat_kit.plan(step, *args, budget="min", target="tpu-v5e", compiles=2)
    assert plan.compiled_peak_bytes < plan.baseline.peak_bytes


def test_attention_of_cudnn_is_priced_and_kept_by_its_primitive():
    needs("h100")

    def by_cudnn(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    step, args = train_step(by_cudnn), arguments(jnp.bfloat16, batch=4, length=512)
    try:
        plain = report(step, args, target="h100")
    except remat_kit.CompileError as error:
        pytest.skip(f"cuDNN does not compile here: {error.message[:200]}")
    assert not plain.unknown_costs
    products = report(train_step(lambda q, k, v: v), args).forward_flops
    assert plain.forward_flops > 1.5 * products
    found = report(step, args, "dots")
    assert any(p.startswith("dot_product_attention") for p in again(found))
    kept = report(step, args, "save(dots | primitive('dot_product_attention*'))")
    assert not any(p.startswith("dot_product_attention") for p in again(kept))
