"""A network whose maxima have ties, for tests of rewrites and of plans."""

import jax
import jax.numpy as jnp


def pooled(weights, x):
    for k, w in enumerate(weights):
        with jax.named_scope(f"block_{k}"):
            x = jnp.tanh(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME"))
            x = -jnp.abs(jnp.round(4 * x)) + x / 8  # ties
            if k == 1:
                x = jax.lax.reduce_window(
                    x, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "SAME"
                )
    return jnp.mean(x**2)


POOLED = [(8, 3, 3, 3)] + [(8, 8, 3, 3)] * 3, (4, 3, 18, 18)


def pooled_args(scale=1):
    shapes, (n, *image) = POOLED
    keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    weights = [jax.random.normal(k, s) / 4 for k, s in zip(keys, shapes, strict=False)]
    return weights, jax.random.normal(keys[-1], (scale * n, *image))
