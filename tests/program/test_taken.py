"""Gradients that a function takes itself: steps, and losses with a gradient inside."""

import jax
import jax.numpy as jnp
import pytest
from step_programs import AT, WEIGHTS, X, forces, loss, same_gradients, taken

import remat_kit
from remat_kit import (
    PolicyError,
    policy,
)


def penalty(weights, x):
    return loss(weights, x) + jnp.sum(jax.grad(loss, 1)(weights, x) ** 2)


def penalty_and_more(weights, x):
    return penalty(weights, x), {"x": x}


@pytest.mark.parametrize("at", [AT, None])
@pytest.mark.parametrize("what", ["nothing", "dots"])
def test_a_penalty_on_a_gradient_is_a_loss(what, at):
    decorated = policy(what, at=at)(penalty)
    assert decorated(WEIGHTS, X) == pytest.approx(float(penalty(WEIGHTS, X)))
    same_gradients(decorated, penalty, WEIGHTS, X)
    policy(what, at=at)(penalty_and_more)(WEIGHTS, X)
    assert remat_kit.measure(policy(what, at=at)(penalty_and_more), WEIGHTS, X).fits


@pytest.mark.parametrize("at", [AT, None])
def test_forces_are_differentiated_once_more(at):
    decorated = policy("nothing", at=at)(forces)
    same_gradients(
        lambda w: jnp.sum((decorated(w, X) - X) ** 2),
        lambda w: jnp.sum((forces(w, X) - X) ** 2),
        WEIGHTS,
    )
    # remat_kit traces a loss before it differentiates it
    remat_kit.inspect(lambda w: jnp.sum(decorated(w, X) ** 2), WEIGHTS)
    remat_kit.measure(lambda w: jnp.sum(decorated(w, X) ** 2), WEIGHTS)


def loss_first(weights, x):
    new, value = taken(weights, x)
    return value, new


VERBS = {
    "measure": lambda fn, **k: remat_kit.measure(fn, WEIGHTS, X, **k),
    "inspect": lambda fn, **k: remat_kit.inspect(fn, WEIGHTS, X, **k),
    "diff": lambda fn, **k: remat_kit.diff(loss, fn, WEIGHTS, X, **k),
    "plan": lambda fn, **k: remat_kit.plan(fn, WEIGHTS, X, budget="min", **k),
    "frontier": lambda fn, **k: remat_kit.frontier(fn, WEIGHTS, X, **k),
    "estimate": lambda fn, **k: remat_kit.estimate(fn, WEIGHTS, X, checkpoints=["block_0"], **k),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
@pytest.mark.parametrize("step", [loss_first, jax.value_and_grad(loss), jax.jit(loss_first)])
def test_a_step_is_not_differentiated_once_more(verb, step):
    with pytest.raises(remat_kit.NotDifferentiableError, match="whole step"):
        verb(step)


@pytest.mark.parametrize("verb", [v for k, v in VERBS.items() if k != "measure"])
def test_only_measure_takes_a_whole_step(verb):
    with pytest.raises(remat_kit.UserError, match="argnums=None"):
        verb(taken, argnums=None)


def test_measure_of_a_decorated_step():
    assert remat_kit.measure(taken, WEIGHTS, X, argnums=None).fits
    with pytest.raises(PolicyError, match="takes a gradient itself"):
        remat_kit.measure(policy("nothing", at=AT)(taken), WEIGHTS, X, argnums=None)


def test_a_gradient_beside_a_loss_is_no_step():
    def watched(weights, x):
        return loss(weights, x), jnp.linalg.norm(jax.grad(loss, 1)(weights, x))

    assert remat_kit.measure(watched, WEIGHTS, X).fits
