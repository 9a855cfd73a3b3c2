"""Barriers that keep a compiler from undoing a schedule."""

import jax
import jax.numpy as jnp
import numpy as np

from remat_kit._backend import barriers as _barriers


def test_a_barrier_for_the_derivative_is_one_for_gpus_and_tpus_alone():
    def loss(w, x):
        w, x = _barriers.together([w, jnp.sin(x)])
        return jnp.sum(jnp.tanh(x @ w))

    def plain(w, x):
        return jnp.sum(jnp.tanh(jnp.sin(x) @ w))

    args = np.full((4, 4), 0.3, np.float32), np.full((2, 4), 0.2, np.float32)
    gradient = jax.grad(loss, argnums=(0, 1))
    for platform, barriers in (("cpu", 0), ("cuda", 2), ("tpu", 2)):
        text = jax.jit(gradient).trace(*args).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("optimization_barrier") == barriers
    # What transforms functions goes through it.
    for wrap in (
        lambda f: f,
        lambda f: jax.grad(f, argnums=(0, 1)),
        lambda f: jax.hessian(f, argnums=1),
        lambda f: lambda w, x: jax.vmap(f, in_axes=(None, 0))(w, x[:, None]),
    ):
        for a, b in zip(
            *map(jax.tree.leaves, (wrap(loss)(*args), wrap(plain)(*args))), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-6)
