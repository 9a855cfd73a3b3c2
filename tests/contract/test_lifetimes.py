"""What a decorated function captures or gets lives no longer than without the policy.

A cache that holds a function holds what the function is closed over: all parameters of a model, for
each call of an evaluation that runs without `jax.jit`.
"""

import gc
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import remat_kit

X = jnp.ones((4, 16))


def loss(w, x, kind="a"):
    return jnp.sum(jnp.tanh(x @ w)) if kind == "a" else 0.0


@remat_kit.policy("nothing")
class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=True, kind="a"):
        return nn.Dense(16)(x) if train else x


class Model(nnx.Module):
    def __init__(self, w):
        self.w = nnx.Param(w)

    @remat_kit.policy("nothing")
    def __call__(self, x, kind="a"):
        return loss(self.w[...], x, kind)


def planned(w):
    plan = remat_kit.plan(lambda x: loss(w, x), X, budget="min", compiles=1)
    return jax.grad(remat_kit.policy(plan)(lambda x: loss(w, x)))(X)


def decorated(policy="nothing", **options):
    return lambda w: remat_kit.policy(policy, **options)(lambda x, kind: loss(w, x, kind))


USES = {
    "call": lambda w: decorated()(w)(X, "a"),
    "static argument": lambda w: decorated(static_argnums=1)(w)(X, "a"),
    "gradient": lambda w: jax.grad(decorated("dots")(w))(X, "a"),
    "jitted gradient": lambda w: jax.jit(jax.grad(decorated()(w)), static_argnums=1)(X, "a"),
    "pieces": lambda w: jax.grad(decorated(remat_kit.pieces(2))(w))(X, "a"),
    "linen": lambda w: Net().apply({"params": {"Dense_0": {"kernel": w, "bias": w[0]}}}, X),
    "linen with a flag": lambda w: Net().apply(
        {"params": {"Dense_0": {"kernel": w, "bias": w[0]}}}, X, train=True, kind="b"
    ),
    "nnx": lambda w: Model(w)(X, kind="a"),
    "nnx gradient": lambda w: nnx.grad(lambda m, x: m(x))(Model(w), X),
    "plan": planned,
    "measure": lambda w: remat_kit.measure(lambda x: loss(w, x), X),
    "inspect": lambda w: remat_kit.inspect(lambda x: loss(w, x), X, policy="nothing"),
    "frontier": lambda w: remat_kit.frontier(lambda x: loss(w, x), X),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_nothing_stays_alive(use):
    w = 0.1 * jnp.ones((16, 16))
    alive = weakref.ref(w)
    use(w)
    del w
    gc.collect()
    assert alive() is None


def test_a_function_is_traced_once_although_its_cache_does_not_hold_it():
    runs = []

    def fn(x, kind):
        runs.append(kind)
        return jnp.sum(jnp.tanh(x))

    lean = remat_kit.policy("nothing")(fn)
    for _ in range(3):
        jax.grad(lean)(X, "a")
    assert runs == ["a"]
