"""Plans of whole training steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from interpreter import one_by_one
from planner_graphs import tower
from step_programs import updated

import remat_kit
from remat_kit import PolicyError, _jax, policy, testing
from remat_kit._chip.compile import compile_program
from remat_kit._planner import steps
from remat_kit._planner.frontier import Surroundings, frontier_of


def deep(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"block_{i}"):
            x = x + jnp.tanh(jnp.tanh(x @ w) @ w)
    return jnp.mean(x**2)


def test_a_plan_of_a_step_fits_and_gives_the_same_losses():
    optimizer = optax.adamw(1e-3)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights, state, batch):
        value, gradient = jax.value_and_grad(deep)(weights, batch)
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, value

    weights = [jnp.full((64, 64), 0.01 * i) for i in range(12)]
    batch = jnp.linspace(-1, 1, 2048 * 64).reshape(2048, 64)
    args = weights, optimizer.init(weights), batch
    plan = remat_kit.plan(step, *args, budget=0.5)
    assert plan.compiled_peak_bytes <= plan.budget_bytes < plan.baseline.peak_bytes
    assert plan.compiled.alias_bytes == plan.baseline.alias_bytes
    lean = policy(plan)(step)
    assert remat_kit.measure(lean, *args).peak_bytes == plan.compiled_peak_bytes
    # Compiled, some of the small gradients round differently.
    plain = step.__wrapped__
    found, expected = (one_by_one(f, *args) for f in (policy(plan)(plain), plain))
    jax.tree.map(np.testing.assert_array_equal, found, expected)

    def run(step):
        weights, state, _ = jax.tree.map(jnp.array, args)
        values = []
        for _ in range(3):
            weights, state, value = step(weights, state, batch)
            values.append(float(value))
        return values

    sizes = [step._cache_size()]
    values = []
    for run_step in (lean, step):
        values.append(run(run_step))
        sizes.append(step._cache_size())
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1]  # as many compilations as without a plan


def test_a_plan_of_a_step_with_two_losses():
    def other(w, x):
        return deep(w, jnp.exp(x)) + jnp.sum(w[0])

    @jax.jit
    def step(a, b, x):
        return updated(a, jax.grad(deep)(a, x)), updated(b, jax.grad(other)(b, x))

    weights = [jnp.full((64, 64), 0.01 * i) for i in range(6)]
    args = weights, weights, jnp.ones((2048, 64))
    # JAX 0.10.2 runs the two losses side by side, so that a plan brings nothing.
    plan = remat_kit.plan(step, *args, budget=0.6 if _jax.JAX_VERSION >= (0, 11) else "min")
    assert plan.budget_bytes is None or plan.compiled_peak_bytes <= plan.budget_bytes
    assert len(plan.losses()) == 2
    testing.assert_equivalent(step, policy(plan)(step), *args)


@pytest.mark.parametrize("objective", ["time", "balanced", "flops"])
def test_no_schedules_of_two_losses_beat_the_bound(objective):
    """Each of the losses may use as much memory as the other, which makes the peak."""

    @jax.jit
    def step(a, b, x, y):
        return updated(a, jax.grad(deep)(a, x)), updated(b, jax.grad(deep)(b, y))

    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6
    args = (weights, weights, *(jax.ShapeDtypeStruct((n, 64), jnp.float32) for n in (4096, 1536)))
    front = remat_kit.frontier(step, *args, objective=objective)
    slack = 0
    for point in front.points:
        peak = point.predicted_peak_bytes
        (other,) = point.others
        own = point.extra_work - other.extra_work
        leasts = [
            min(least.at(peak)[1], work)
            for least, work in ((point.least, own), (other.least, other.extra_work))
        ]
        assert point.bound_extra_work == pytest.approx(sum(leasts), abs=1e-15)
        assert point.bound_extra_seconds <= point.extra_seconds
        assert point.gap == pytest.approx(
            (point.extra_work - point.bound_extra_work) / front.forward_seconds, abs=1e-9
        )
        slack += leasts[1] < other.bound_extra_work * (1 - 1e-3)
    assert slack > 0


def test_no_schedule_beats_the_bound_where_the_rest_of_the_step_has_the_peak():
    graph = tower(12, batch=512)
    chip = remat_kit.target("cpu")
    alone = frontier_of(
        *(graph, Surroundings(0, 0), chip, "balanced", False, print, 0.0, "frontier")
    )
    middle = alone.points[len(alone.points) // 2].predicted_peak_bytes
    found = frontier_of(
        *(graph, Surroundings(0, 0, middle), chip, "balanced", False, print, 0.0, "frontier")
    )
    least = min(p.extra_work for p in found.points if p.predicted_peak_bytes == middle)
    same = [p for p in found.points if p.predicted_peak_bytes == middle]
    assert len(same) > 1
    assert all(p.bound_extra_work <= least for p in same)
    assert max(p.gap for p in same) > 0


def test_what_a_step_holds_beside_its_loss():
    @functools.partial(jax.jit, donate_argnums=0)
    def step(weights, x):
        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(deep)(weights, part)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), x)
        return updated(weights, total)

    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4
    x = jax.ShapeDtypeStruct((4, 512, 256), jnp.float32)
    compiled = compile_program(step, (weights, x), "cpu", argnums=None)
    beside, least = steps.rest_of_step(compiled)
    size = 256 * 256 * 4
    # The weights, the batch and the sums of the gradients are live beside the loss.
    assert compiled.memory.argument_bytes + 3 * size <= beside
    assert beside <= compiled.memory.argument_bytes + 10 * size
    assert compiled.memory.argument_bytes <= least <= compiled.memory.peak_bytes


def test_the_frontier_of_a_step_counts_what_is_beside_the_loss():
    @jax.jit
    def step(weights, x):
        return updated(weights, jax.grad(deep)(weights, x))

    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8
    x = jax.ShapeDtypeStruct((2048, 64), jnp.float32)
    whole, loss = remat_kit.frontier(step, weights, x), remat_kit.frontier(deep, weights, x)
    assert [p.saved_bytes for p in whole.points] == [p.saved_bytes for p in loss.points]
    assert whole.points[0].predicted_peak_bytes >= loss.points[0].predicted_peak_bytes * 0.9
    one, other = (
        remat_kit.estimate(fn, weights, x, checkpoints=["block_3"]) for fn in (step, deep)
    )
    assert one.extra_flops == other.extra_flops


@pytest.mark.slow
def test_a_plan_of_an_nnx_step_that_is_not_jitted_says_to_jit_it():
    """Outside of jit, NNX updates its counters by scattering, which no plan of the step has."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(6)])
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = self.dropout(jnp.tanh(layer(x)))
            return jnp.mean(x**2)

    def step(net, x):
        value, gradient = nnx.value_and_grad(lambda net: net(x))(net)
        nnx.update(net, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(net, nnx.Param), gradient))
        return value

    net, x = Net(nnx.Rngs(0)), jnp.ones((512, 64))
    plan = remat_kit.plan(step, net, x, budget="min")
    with pytest.raises(PolicyError, match=r"hint: jit the step, with jax\.jit or nnx\.jit"):
        policy(plan)(step)(net, x)
    again, net = nnx.clone(net), nnx.clone(net)
    value = float(nnx.jit(policy(plan)(step))(net, x))
    assert value == pytest.approx(float(nnx.jit(step)(again, x)), rel=1e-6)
