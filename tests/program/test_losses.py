"""Which losses a step differentiates, and every verb on whole steps."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from step_programs import AT, STEPS, WEIGHTS, X, loss, loss_first, taken, updated

import remat_kit
from remat_kit import NotDifferentiableError, UserError, _jax, policy, testing
from remat_kit._program import losses

VERBS = {
    "measure": lambda fn, **k: remat_kit.measure(fn, WEIGHTS, X, **k),
    "inspect": lambda fn, **k: remat_kit.inspect(fn, WEIGHTS, X, target="cpu", **k),
    "diff": lambda fn, **k: remat_kit.diff(fn, policy("nothing")(fn), WEIGHTS, X, **k),
    "plan": lambda fn, **k: remat_kit.plan(fn, WEIGHTS, X, budget="min", **k),
    "frontier": lambda fn, **k: remat_kit.frontier(fn, WEIGHTS, X, **k),
    "estimate": lambda fn, **k: remat_kit.estimate(fn, WEIGHTS, X, checkpoints=["block_0"], **k),
    "assert_fits": lambda fn, **k: testing.assert_fits(fn, WEIGHTS, X, target="cpu", **k),
}


@pytest.mark.parametrize("argnums", [0, None])
@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
@pytest.mark.parametrize("step", [loss_first, jax.jit(taken, donate_argnums=0)])
def test_every_verb_takes_a_step(verb, step, argnums):
    verb(step, argnums=argnums)


@pytest.mark.parametrize("name", STEPS)
def test_the_figures_of_a_step_are_its_own(name):
    step = STEPS[name]
    found = remat_kit.measure(step, WEIGHTS, X)
    own = jax.jit(step).lower(WEIGHTS, X).compile().memory_analysis()
    assert found.argument_bytes == own.argument_size_in_bytes
    assert found.output_bytes == own.output_size_in_bytes
    (what,) = losses.observe(step, (WEIGHTS, X)).losses
    assert what.name.endswith(("loss", "by_linearize/<lambda>"))
    assert what.times == (2 if name in ("accumulation", "several") else 1)


def test_a_loss_that_is_called_several_times_is_one_loss():
    def step(weights, x):
        first, second = jax.grad(loss)(weights, x), jax.grad(loss)(weights, x + 1)
        return updated(updated(weights, first), second)

    (found,) = losses.observe(step, (WEIGHTS, X)).losses
    assert (found.name, found.times, found.loop) == ("step/loss", 2, "")


def test_a_report_of_a_step_names_its_losses_and_has_an_update():
    optimizer = optax.adam(1e-3)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights, state, x):
        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, part[None])), None

        gradient, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), x)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(weights, updates), state

    report = remat_kit.inspect(
        step, WEIGHTS, optimizer.init(WEIGHTS), X, target="cpu", policy="nothing", at=AT
    )
    (found,) = report.losses
    assert (found.name, found.times) == ("add/loss", 2)
    assert found.loop == "a scan of 2 iterations"
    assert "update" in report.readings["cpu"].timeline.phase_peaks
    assert report.recomputed
    assert report.to_json()["losses"][0]["source"].startswith("tests/step_programs.py:")
    assert "add/loss" in str(report)


def test_a_plan_of_a_step_fits_and_gives_the_same_losses():
    def deep(weights, x):
        for i, w in enumerate(weights):
            with jax.named_scope(f"block_{i}"):
                x = jnp.tanh(jnp.sin(x @ w))
        return jnp.mean(x**2)

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
    testing.assert_equivalent(step, lean, *args)

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
    def deep(w, x):
        for i in range(6):
            with jax.named_scope(f"block_{i}"):
                x = jnp.tanh(jnp.sin(x @ w))
        return jnp.mean(x**2)

    def other(w, x):
        return deep(w, jnp.exp(x)) + jnp.sum(w)

    @jax.jit
    def step(a, b, x):
        return a - jax.grad(deep)(a, x), b - jax.grad(other)(b, x)

    args = jnp.ones((64, 64)), jnp.ones((64, 64)), jnp.ones((2048, 64))
    # JAX 0.10.2 runs the two losses side by side, so that a plan brings nothing.
    plan = remat_kit.plan(step, *args, budget=0.6 if _jax.JAX_VERSION >= (0, 11) else "min")
    assert plan.budget_bytes is None or plan.compiled_peak_bytes <= plan.budget_bytes
    assert len(plan.losses()) == 2
    testing.assert_equivalent(step, policy(plan)(step), *args)


def test_a_function_without_a_gradient_is_no_step():
    for verb in ("inspect", "plan", "frontier", "estimate"):
        with pytest.raises(UserError, match="takes no gradient"):
            VERBS[verb](jax.jit(lambda w, x: (w, x)), argnums=None)
    with pytest.raises(NotDifferentiableError, match="a loss is one scalar"):
        remat_kit.inspect(lambda w, x: (w, x), WEIGHTS, X)


def test_an_optimizer_for_a_step_is_an_error():
    with pytest.raises(UserError, match="already contains an optimizer"):
        remat_kit.measure(taken, WEIGHTS, X, argnums=None, optimizer=optax.sgd(1.0))


def test_two_versions_of_a_step_that_differ():
    def other(weights, x):
        new, value = taken(weights, x)
        return jax.tree.map(lambda w: 1.01 * w, new), value

    testing.assert_equivalent(taken, policy("nothing", at=AT)(taken), WEIGHTS, X)
    with pytest.raises(AssertionError, match="result"):
        testing.assert_equivalent(taken, other, WEIGHTS, X)
