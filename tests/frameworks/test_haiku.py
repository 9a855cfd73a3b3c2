"""Haiku: classes, instances, methods and functions decorated inside `hk.transform`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit

if jax.__version_info__ < (0, 11):
    pytest.skip("the releases that the tests need ask for a newer jax", allow_module_level=True)
hk = pytest.importorskip("haiku", exc_type=ImportError)

KEY = jax.random.PRNGKey(0)
X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
nothing = functools.partial(remat_kit.policy, "nothing")


class Block(hk.Module):
    """Parameters, state, a random stream, a method, and a Python bool among the arguments."""

    def __call__(self, x, train=True):
        h = jnp.tanh(hk.Linear(4)(x))
        h = hk.BatchNorm(True, True, 0.9)(h, is_training=train)
        if train:
            h = hk.dropout(hk.next_rng_key(), 0.5, h)
        return self.down(h) + x

    def down(self, h):
        return jnp.sin(hk.Linear(4, name="out")(h))


def of_class(x, wrap):
    decorated = wrap(Block)
    assert issubclass(decorated, Block)
    return decorated()(decorated()(x), True)


def of_instance(x, wrap):
    block = wrap(Block())
    assert isinstance(block, Block)
    return block(Block()(x))


def of_method(x, wrap):
    block = Block()
    return wrap(block.down)(wrap(block.__call__)(x))


def of_function(x, wrap):
    def layer(x, train):
        return hk.Linear(4)(Block()(x, train))

    return wrap(layer)(wrap(layer)(x, True), train=True)


def of_stack(x, wrap):
    return hk.experimental.layer_stack(3)(lambda c: wrap(Block)()(c))(x)


def step(f, wrap, at=None):
    model = hk.transform_with_state(lambda x: f(x, wrap))
    params, state = model.init(KEY, X)

    def loss(params, state):
        y, state = model.apply(params, state, KEY, X)
        return jnp.sum(y**2), state

    loss = loss if at is None else nothing(at=at)(loss)
    text = str(jax.make_jaxpr(jax.grad(loss, has_aux=True))(params, state))
    out = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, state)
    return (params, state, out), text.count("remat")


@pytest.mark.parametrize("f", [of_class, of_instance, of_method, of_function, of_stack])
def test_parameters_state_and_random_streams(f):
    expected, none = step(f, lambda x: x)
    got, regions = step(f, nothing())
    assert regions > none == 0
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got[:2], expected[:2])
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_blocks_by_their_path():
    expected, _ = step(of_class, lambda x: x)
    got, regions = step(of_class, lambda x: x, at="block*")
    assert regions >= 2
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
