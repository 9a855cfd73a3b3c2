"""A policy on a training step reaches the losses that the step differentiates."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from interpreter import one_by_one
from jax._src.interpreters import ad
from step_programs import AT, STEPS, WEIGHTS, X, forces, loss, taken, updated

import remat_kit
from remat_kit import PolicyError, RematKitWarning, UnknownNameError, UserError, _jax, policy
from remat_kit._policy import schedule as _schedule
from remat_kit._program import program as _program
from remat_kit._program.steps import losses

_LINEARIZE = ad.linearize


@pytest.fixture(autouse=True)
def jax_is_as_it_was():
    yield
    assert ad.linearize is _LINEARIZE


def copies(tree):
    return jax.tree.map(jnp.array, tree)


def regions(fn, *args):
    """The number of checkpoint regions in the trace of a function."""
    text = str(jax.make_jaxpr(lambda *args: fn(*args))(*args))
    return text.count("remat2[") + text.count("checkpoint[") + text.count("Remat")


@pytest.mark.parametrize("at", [AT, None])
@pytest.mark.parametrize("outside", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", STEPS)
def test_every_loss_of_a_step_gets_the_policy(name, outside, at):
    step = STEPS[name]
    decorated = policy("nothing", at=at)(step)
    for _ in range(2):
        found = outside(decorated)(copies(WEIGHTS), X)
        expected = step(copies(WEIGHTS), X)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), found, expected)
    assert regions(decorated, WEIGHTS, X) > regions(step, WEIGHTS, X) == 0


@pytest.mark.parametrize("name", ["value_and_grad", "vjp", "a jitted loss"])
def test_the_values_are_those_of_the_step(name):
    found, expected = (
        one_by_one(f, WEIGHTS, X) for f in (policy("dots", at=AT)(STEPS[name]), STEPS[name])
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# JAX 0.10.2 schedules these few operations so that nothing is saved, and `measure` warns of that.
@pytest.mark.filterwarnings("ignore:.*saves no memory:remat_kit.RematKitWarning")
def test_memory_falls_and_donation_stays():
    def deep(weights, x):
        for i, w in enumerate(weights):
            with jax.named_scope(f"block_{i}"):
                x = jnp.tanh(jnp.sin(x @ w))
        return jnp.mean(x**2)

    def step_of(loss):
        return jax.jit(lambda w, x: updated(w, jax.grad(loss)(w, x)), donate_argnums=0)

    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8, jnp.ones((2048, 64))
    lean = policy("nothing", at=AT)
    before, wanted, after = (
        remat_kit.measure(f, *args)
        for f in (step_of(deep), step_of(lean(deep)), lean(step_of(deep)))
    )
    assert wanted.temp_bytes < 0.7 * before.temp_bytes or _jax.JAX_VERSION < (0, 11)
    assert abs(after.temp_bytes - wanted.temp_bytes) <= 0.01 * wanted.temp_bytes
    assert after.alias_bytes == before.alias_bytes == 8 * 64 * 64 * 4


def test_a_step_that_was_traced_before_is_traced_again_and_compiled_once():
    traces = []

    @jax.jit
    def step(weights, x):
        traces.append(1)
        return updated(weights, jax.grad(loss)(weights, x))

    plain = step(WEIGHTS, X)
    decorated = policy("nothing", step=True)(step)
    for _ in range(3):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), decorated(WEIGHTS, X), plain
        )
    assert len(traces) == 2
    step(WEIGHTS, X)
    assert len(traces) == 2


def test_losses_are_chosen_by_name():
    def actor_loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    def critic_loss(w, x):
        return jnp.sum(jnp.sin(x @ w))

    def step(a, c, x):
        return updated(a, jax.grad(actor_loss)(a, x)), updated(c, jax.grad(critic_loss)(c, x))

    args = WEIGHTS[0], WEIGHTS[1], X
    assert regions(policy("nothing")(step), *args) == 2
    for pattern in ("*/critic_loss", "critic_*", "step/critic_loss"):
        assert regions(policy("nothing", losses=pattern)(step), *args) == 1
    with pytest.raises(UnknownNameError, match="did you mean 'step/critic_loss'"):
        policy("nothing", losses="step/critc_loss")(step)(*args)


def test_losses_of_what_is_no_step():
    with pytest.raises(UserError, match="no step"):
        jax.grad(policy("nothing", losses="*/loss")(loss))(WEIGHTS, X)
    with pytest.raises(UserError, match="no step"):
        policy("nothing", losses="*/loss")(Net)


def test_a_function_with_step_true_that_takes_no_gradient_is_a_warning():
    with pytest.warns(RematKitWarning, match="takes no gradient"):
        policy("nothing", step=True)(jax.jit(loss))(WEIGHTS, X)


def test_step_false_decorates_the_function_itself():
    closed = jax.make_jaxpr(policy("nothing", step=False)(taken))(WEIGHTS, X)
    around = [e for e in closed.jaxpr.eqns if _program.bodies(e)]
    assert len(around) == 1
    assert len(losses.observe(taken, (WEIGHTS, X)).losses) == 1
    assert "transpose" in str(
        {t for b in _program.bodies(around[0]) for e in b.jaxpr.eqns for t in _jax.transforms_of(e)}
    )


def test_a_block_that_computes_forces_is_no_step():
    def block(weights, x):
        return {"out": x + forces(weights, x) ** 2, "norm": jnp.sum(x)}

    decorated = policy("nothing")(block)
    expected = jax.jit(jax.grad(lambda w: jnp.sum(block(w, X)["out"])))(WEIGHTS)
    found = jax.jit(jax.grad(lambda w: jnp.sum(decorated(w, X)["out"])))(WEIGHTS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), found, expected)


def test_a_plan_of_another_program_says_so():
    plan = remat_kit.planned("joined=1 shapes=2 sin=1", "0:1 plain")
    with pytest.raises(PolicyError, match="another program"):
        policy(plan)(taken)(WEIGHTS, X)


def test_a_plan_of_a_function_that_takes_a_gradient_is_for_the_function():
    def block(weights, x):
        return forces(weights, x)

    closed = jax.make_jaxpr(block)(WEIGHTS, X)
    program = _program.flat_program(closed)
    plan = remat_kit.planned(_schedule.describe(program), f"0:{len(program.eqns)}")
    expected = forces(WEIGHTS, X)
    np.testing.assert_allclose(policy(plan)(block)(WEIGHTS, X), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(policy(plan)(block))(WEIGHTS, X), expected, rtol=1e-5)


def test_threads_do_not_meet():
    found = {}
    inside, done = threading.Event(), threading.Event()

    def slow_loss(weights, x):
        inside.set()
        done.wait(10)
        return loss(weights, x)

    def decorated():
        step = policy("nothing")(lambda w, x: updated(w, jax.grad(slow_loss)(w, x)))
        found["with"] = regions(step, WEIGHTS, X)

    thread = threading.Thread(target=decorated)
    thread.start()
    inside.wait(10)
    found["without"] = regions(taken, WEIGHTS, X)
    done.set()
    thread.join()
    assert found == {"with": 1, "without": 0}


def test_an_error_in_the_loss_leaves_jax_as_it_was():
    def broken(weights, x):
        raise KeyError("in the loss")

    with pytest.raises(KeyError, match="in the loss"):
        policy("nothing")(lambda w, x: updated(w, jax.grad(broken)(w, x)))(WEIGHTS, X)
    assert regions(taken, WEIGHTS, X) == 0


def test_jax_itself_and_backward_passes_are_no_losses():
    @jax.custom_vjp
    def own(x):
        return jnp.sin(x)

    def backward(x, ct):
        return jax.vjp(jnp.sin, x)[1](ct)

    own.defvjp(lambda x: (own(x), x), backward)

    def step(w, x):
        w = w + jnp.linalg.solve(jnp.eye(4) + w, x.T @ x)
        return w - jax.grad(lambda w: jnp.sum(own(x @ w)))(w)

    assert len(losses.observe(step, (WEIGHTS[0], X)).losses) == 1


def test_vmapped_and_scanned_gradients():
    def step(w, x):
        each = jax.vmap(jax.grad(loss), (None, 0))(w, x[:, None])
        return updated(w, jax.tree.map(lambda g: g.sum(0), each))

    (found,) = losses.observe(step, (WEIGHTS, X)).losses
    assert found.name == "step/loss"
    assert regions(policy("nothing")(step), WEIGHTS, X) == 1


# -- NNX ----------------------------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.norm(self.drop(self.up(x))))


def train(model, optimizer, average, x):
    value, gradient = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, gradient)
    average.update(values=value)
    return value


def nnx_run(step):
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    average = nnx.metrics.Average()
    values = [step(model, optimizer, average, X) for _ in range(3)]
    return values, nnx.state((model, optimizer, average))


@pytest.mark.parametrize("at", ["*/up", None])
@pytest.mark.parametrize(
    "jitted", [lambda f: f, nnx.jit, functools.partial(nnx.jit, donate_argnums=(0, 1))]
)
def test_an_nnx_step_keeps_its_state(at, jitted):
    found, expected = nnx_run(policy("nothing", at=at)(jitted(train))), nnx_run(jitted(train))
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        compare(a, b)
