"""Which losses a step differentiates, and every verb on whole steps."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from step_programs import AT, STEPS, WEIGHTS, X, loss, loss_first, taken, updated

import remat_kit
from remat_kit import NotDifferentiableError, UserError, policy, testing
from remat_kit._program.steps import losses

VERBS = {
    "measure": lambda fn, w=WEIGHTS, **k: remat_kit.measure(fn, w, X, **k),
    "inspect": lambda fn, w=WEIGHTS, **k: remat_kit.inspect(fn, w, X, target="cpu", **k),
    "diff": lambda fn, w=WEIGHTS, **k: remat_kit.diff(fn, policy("nothing")(fn), w, X, **k),
    "plan": lambda fn, w=WEIGHTS, **k: remat_kit.plan(fn, w, X, budget="min", **k),
    "frontier": lambda fn, w=WEIGHTS, **k: remat_kit.frontier(fn, w, X, **k),
    "estimate": lambda fn, w=WEIGHTS, **k: remat_kit.estimate(
        fn, w, X, checkpoints=["block_0"], **k
    ),
    "assert_fits": lambda fn, w=WEIGHTS, **k: testing.assert_fits(fn, w, X, target="cpu", **k),
}


@pytest.mark.parametrize("argnums", [0, None])
@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
@pytest.mark.parametrize("step", [loss_first, jax.jit(taken, donate_argnums=0)])
def test_every_verb_takes_a_step(verb, step, argnums):
    verb(step, argnums=argnums)


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_every_verb_says_what_is_wrong_with_a_step(verb):
    """The state of an optimizer has an integer, but that is not what is wrong."""

    def step(state, x):
        gradient = jax.grad(lambda w: loss(w, x.reshape(-1, 7)))(state[0])
        return updated(state[0], gradient), state[1]

    with pytest.raises(TypeError, match="reshape"):
        verb(step, (WEIGHTS, optax.adam(0.1).init(WEIGHTS)))


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
