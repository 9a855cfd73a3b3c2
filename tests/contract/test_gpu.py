"""What only a GPU can show: plans, offload and fused kernels run on it, and its figures are ours.

    REMAT_KIT_TEST_PLATFORMS=cuda,cpu pytest tests/contract/test_gpu.py

These tests are skipped where JAX has no GPU.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_kit
from remat_kit import everything, named, offload, policy, save, testing
from remat_kit._chip.target import target

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(4 * x.shape[-1], name="up")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(x.shape[-1], name="down")(nn.gelu(y))


class Net(nn.Module):
    blocks: int = 8

    @nn.compact
    def __call__(self, x):
        for i in range(self.blocks):
            x = Block(name=f"block_{i}")(x)
        return x


X = jnp.asarray(np.random.default_rng(0).standard_normal((8192, 256)), jnp.float32)
NET = Net()
PARAMS = NET.init(jax.random.key(0), X[:2])


def loss(params, x):
    return jnp.mean((NET.apply(params, x) - 1.0) ** 2)


def adam_step():
    tx = optax.adam(1e-3)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x):
        value, gradient = jax.value_and_grad(loss)(params, x)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, lambda: (jax.tree.map(jnp.copy, PARAMS), tx.init(PARAMS))


def trained(step, state, steps=5):
    losses = []
    for _ in range(steps):
        *state, value = step(*state, X)
        losses.append(float(value))
    return losses


def test_the_local_target_is_the_card():
    device, chip = jax.devices()[0], target("local")
    assert chip.platform == "cuda"
    limit = device.memory_stats()["bytes_limit"]
    assert 0.5 * limit <= chip.memory_bytes <= 1.6 * limit
    assert chip.flops_per_second
    assert chip.bandwidth_bytes_per_second


def test_measure_is_what_jax_compiles():
    memory = remat_kit.measure(loss, PARAMS, X, target="local")
    own = jax.jit(jax.value_and_grad(loss)).lower(PARAMS, X).compile().memory_analysis()
    assert memory.temp_bytes == own.temp_size_in_bytes
    assert memory.argument_bytes == own.argument_size_in_bytes


def test_a_policy_frees_memory_and_keeps_the_gradient():
    lean = policy("nothing", at="*/block_*")(loss)
    before, after = (remat_kit.measure(f, PARAMS, X, target="local") for f in (loss, lean))
    assert after.temp_bytes < 0.5 * before.temp_bytes
    testing.assert_equivalent(loss, lean, PARAMS, X)


@pytest.mark.parametrize("budget", [0.7, 0.5, "min"])
def test_a_planned_step_trains_as_the_step(budget):
    step, state = adam_step()
    plan = remat_kit.plan(step, *state(), X, budget=budget, target="local")
    if plan.budget_bytes is not None:
        assert plan.compiled_peak_bytes <= plan.budget_bytes
    assert plan.compiled_peak_bytes < plan.baseline.peak_bytes
    planned = policy(plan)(adam_step()[0])
    assert trained(planned, state()) == pytest.approx(trained(step, state()), rel=1e-3)


def test_auto_plans_for_the_card(tmp_path):
    step, state = adam_step()
    lean = policy(remat_kit.auto(0.6, target="local", path=tmp_path / "plan.toml"))(step)
    assert trained(lean, state()) == pytest.approx(trained(step, state()), rel=1e-3)
    assert (tmp_path / "plan.toml").exists()


def layers(weights, x):
    def layer(x, w):
        y = checkpoint_name(x @ w, "product")
        return x + jnp.tanh(y), None

    return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


WEIGHTS = jnp.asarray(np.random.default_rng(1).standard_normal((12, 256, 256)) / 16, jnp.float32)


def test_offloaded_residuals_of_a_scan_reach_the_host_with_right_gradients():
    lean = decorated_scan(offload(named("product")))
    memory = remat_kit.measure(lean, WEIGHTS, X, target="local")
    assert memory.host_bytes >= 12 * X.nbytes
    found, wanted = (jax.jit(jax.grad(f))(WEIGHTS, X) for f in (lean, layers))
    assert jnp.linalg.norm(found - wanted) <= 1e-3 * jnp.linalg.norm(wanted)


def decorated_scan(chosen):
    def lean(weights, x):
        @policy(chosen)
        def layer(x, w):
            y = checkpoint_name(x @ w, "product")
            return x + jnp.tanh(y), None

        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    return lean


def attention_loss(params, x):
    for w in params:
        q, k, v = jnp.split((x @ w).reshape(*x.shape[:2], 8, 192), 3, axis=-1)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        x = x + y.reshape(x.shape)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def attention_args():
    random = np.random.default_rng(2)
    params = [jnp.asarray(random.standard_normal((512, 1536)) / 32, jnp.bfloat16)] * 4
    return params, jnp.asarray(random.standard_normal((4, 1024, 512)), jnp.bfloat16)


def test_cudnn_attention_in_a_plan():
    params, x = attention_args()
    plan = remat_kit.plan(attention_loss, params, x, budget="min", target="local")
    assert plan.compiled_peak_bytes <= plan.baseline.peak_bytes
    testing.assert_equivalent(attention_loss, policy(plan)(attention_loss), params, x)


def test_cudnn_attention_is_reported():
    params, x = attention_args()
    report = remat_kit.inspect(attention_loss, params, x, target="local")
    assert report.memory["local"].temp_bytes
    assert "attention" in str(report) or "custom" in str(report)


@pytest.mark.parametrize("chosen", [save(everything), "dots", "nothing"])
def test_forward_mode_and_second_order(chosen):
    small = X[:64]
    lean = policy(chosen, at="*/block_*")(loss)
    tangent = jax.tree.map(jnp.ones_like, PARAMS)
    found, wanted = (
        jax.jit(lambda p, f=f: jax.jvp(jax.grad(lambda q: f(q, small)), (p,), (tangent,)))(PARAMS)
        for f in (lean, loss)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert jnp.linalg.norm(a - b) <= 1e-3 * jnp.linalg.norm(b) + 1e-6
