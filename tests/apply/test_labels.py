"""What a region keeps has the name that the user gave it, for JAX and for our reports."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

import remat_kit


def _layer(x: Any, w: Any) -> Any:
    h = checkpoint_name(x @ w, "hidden")
    return checkpoint_name(jnp.sin(h), "out") @ w


def _named(fn: Any, *args: Any) -> list[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print_saved_residuals(fn, *args)
    return [line for line in out.getvalue().splitlines() if "named" in line]


X, W = jnp.ones((2, 3)), jnp.full((3, 3), 0.3)
KEEP = jax.checkpoint_policies.save_only_these_names("hidden")


@pytest.mark.parametrize("what", [KEEP, remat_kit.named("hidden"), "dots"], ids=["jax", "ours", ""])
def test_saved_residuals_have_the_names_of_the_user(what: Any) -> None:
    want = _named(jax.checkpoint(_layer, policy=KEEP), X, W)
    assert len(want) == 1
    assert _named(remat_kit.policy(what)(_layer), X, W) == want


def test_reports_know_the_rule_and_the_name() -> None:
    kept = remat_kit.policy(remat_kit.named("hidden"))(_layer)
    report = remat_kit.inspect(lambda w, x: kept(x, w).sum(), W, X)
    found = [r for r in report.saved if "hidden" in r.names]
    assert [r.reason for r in found] == ["save(named('hidden'))"]


def test_equal_regions_that_keep_a_name_for_other_reasons_are_told_apart() -> None:
    inner = [remat_kit.policy(p)(_layer) for p in ("dots", "nothing", remat_kit.named("out"))]

    def loss(w: Any, x: Any) -> Any:
        for layer in inner:
            x = remat_kit.policy("everything")(layer)(x, w)
        return jnp.sum(x)

    def plain(w: Any, x: Any) -> Any:
        for _ in inner:
            x = _layer(x, w)
        return jnp.sum(x)

    np.testing.assert_allclose(jax.grad(loss)(W, X), jax.grad(plain)(W, X), rtol=1e-6)


def test_complex_values_keep_their_parts() -> None:
    def f(x: Any) -> Any:
        return jnp.real(jnp.exp(checkpoint_name(x @ x, "hidden"))).sum()

    x = jnp.full((3, 3), 0.3 + 0.2j, jnp.complex64)
    kept = remat_kit.policy(remat_kit.named("hidden"))(f)
    np.testing.assert_allclose(jax.jit(jax.grad(kept))(x), jax.grad(f)(x), rtol=1e-5)
