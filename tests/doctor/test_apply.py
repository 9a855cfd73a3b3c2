"""A policy around the losses of code that is not edited."""

import jax
import jax.numpy as jnp
import pytest

import remat_kit
from remat_kit import RematKitWarning
from remat_kit._doctor.apply import applied


def loss(w, x):
    for _ in range(4):
        x = jnp.sin(jnp.tanh(x @ w))
    return jnp.mean(x)


W, X = jnp.full((16, 16), 0.1), jnp.ones((512, 16))


@jax.jit
def step(w, x):
    return w - 0.1 * jax.grad(loss)(w, x)


@jax.jit
def other_step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)


def tanhs(step):
    return str(jax.make_jaxpr(step)(W, X)).count("= tanh")


@pytest.fixture(scope="module")
def plan():
    return remat_kit.plan(step, W, X, budget="min", argnums=None).policy


def test_a_plan_goes_around_the_loss_that_it_was_made_for(plan):
    assert (tanhs(step), tanhs(other_step)) == (4, 1)
    before = step(W, X)
    with applied(plan, None, "run"):
        assert tanhs(step) > 4
        assert tanhs(other_step) == 1
        assert jnp.allclose(step(W, X), before, rtol=1e-6)
    assert tanhs(step) == 4


def test_a_plan_that_fits_no_loss_is_a_warning(plan):
    other = "made for another program than other_step/<lambda>"
    with pytest.warns(RematKitWarning, match=other), applied(plan, None, "run"):
        other_step(W, X)
    with pytest.warns(RematKitWarning, match="took no gradient"), applied(plan, None, "run"):
        loss(W, X)
