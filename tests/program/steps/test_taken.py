"""Gradients that a function takes itself: steps, and losses with a gradient inside."""

import jax
import jax.numpy as jnp
import pytest
from step_programs import AT, WEIGHTS, X, forces, loss, same_gradients

import remat_kit
from remat_kit import (
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


def test_a_gradient_beside_a_loss_is_no_step():
    def watched(weights, x):
        return loss(weights, x), jnp.linalg.norm(jax.grad(loss, 1)(weights, x))

    assert remat_kit.measure(watched, WEIGHTS, X).fits
