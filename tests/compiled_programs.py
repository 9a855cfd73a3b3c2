"""Real programs that are compiled and read back."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from zoo import load

import remat_kit
from remat_kit import inspect

WIDE, DEPTH, ROWS = 512, 4, 16384
gpt = load("gpt")


def needs(name):
    if not remat_kit.target(name).available:
        pytest.skip(f"the compiler for {name} is not installed")
    return name


def _slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


TARGETS = ["cpu", "h100", "tpu-v5e"]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(WIDE, name="up", use_bias=False)(x)
        return nn.Dense(WIDE, name="down", use_bias=False)(jnp.tanh(h))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(DEPTH):
            x = Block(name=f"block_{i}")(x)
        return x


def loss_fn(params, x):
    return jnp.sum(jnp.sin(Net().apply(params, x)))


X = jax.ShapeDtypeStruct((ROWS, WIDE), jnp.float32)
PARAMS = jax.eval_shape(Net().init, jax.random.key(0), X)


@functools.cache
def report(target, policy=None, prevent_cse=None):
    fn = loss_fn
    if policy is not None:
        fn = remat_kit.policy(policy, at="*/block_*", prevent_cse=prevent_cse)(loss_fn)
    return inspect(fn, PARAMS, X, target=target)


# XLA:CPU of jax 0.10 merges what a region outside of a loop recomputes with its original.
MERGES = jax.__version_info__ < (0, 11)
