"""Models whose batch grows."""

import functools
import pathlib

import jax
import jax.numpy as jnp
from zoo import load

import remat_kit

ROOT = pathlib.Path(__file__).parents[1]
MLP = "models/mlp.py:build"
SIZES = {"features": 32, "hidden": 128, "layers": 2}
CHIP = "cpu@1MiB"
mlp = functools.partial(load("mlp").build, **SIZES)


def stack(policy=None, batch=32):
    """A scan of twelve layers; XLA:CPU of jax 0.10 undoes recomputation outside of a loop."""

    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.sin(jnp.tanh(jnp.sin(x @ w))), None

    def loss(weights, x):
        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    shapes = (12, 16, 16), (batch, 16)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return (loss if policy is None else remat_kit.policy(policy, at="layer")(loss)), args


def measured(batch, policy=None, chip=CHIP):
    fn, args = mlp(batch=batch, policy=policy)
    return remat_kit.measure(fn, *args, target=chip)


SMALL = ("--size", *(f"{name}={value}" for name, value in SIZES.items()))
