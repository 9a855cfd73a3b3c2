"""Functions with derivative rules of their own keep them in pieces."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from piece_programs import check_all_ways, floats, in_pieces, last

import remat_kit
from remat_kit._program.pieces import Along, In, ways


@jax.custom_jvp
def _odd(x: Any, y: Any) -> Any:
    return x * y


@_odd.defjvp
def _odd_jvp(primals: Any, tangents: Any) -> Any:
    (x, y), (dx, dy) = primals, tangents
    return x * y, 2 * dx * y + 3 * dy * x  # recognizably not the derivative of the product


@jax.custom_vjp
def _scaled(x: Any, w: Any) -> Any:
    return x @ w


def _scaled_fwd(x: Any, w: Any) -> Any:
    return x @ w, (x, w)


def _scaled_bwd(residuals: Any, ct: Any) -> Any:
    x, w = residuals
    return 2 * ct @ w.T, 3 * x.T @ ct


_scaled.defvjp(_scaled_fwd, _scaled_bwd)


@jax.custom_jvp
def _without_derivative(x: Any) -> Any:
    return jnp.sin(x)


@_without_derivative.defjvp
def _refusing(primals: Any, tangents: Any) -> Any:
    raise TypeError("not differentiable")


def test_a_function_whose_derivative_cannot_be_traced_stays_whole() -> None:
    eqn = last(_without_derivative, floats(6, 4))
    assert not ways(eqn, 6, In(0), Along(0))

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(x @ w) * _without_derivative(jax.lax.stop_gradient(x[:, :4])))

    args = floats(4, 4), floats(6, 4)
    with pytest.raises(remat_kit.PolicyError, match="custom_jvp_call"):
        remat_kit.policy(remat_kit.pieces(2))(lambda x: _without_derivative(x * 2) + 1)(args[1])
    planned = remat_kit.plan(loss, *args, budget="min", pieces=True)
    found = jax.grad(remat_kit.policy(planned)(loss))(*args)
    np.testing.assert_allclose(found, jax.grad(loss)(*args), rtol=1e-5)


def test_a_derivative_of_its_own_stays() -> None:
    x, y = floats(6, 4), floats(6, 4, seed=1)
    for fn, args in ((_odd, (x, y)), (_scaled, (x, floats(4, 3, seed=2)))):
        check_all_ways(fn, *args)
        eqn = last(fn, *args)
        (way,) = ways(eqn, 6, In(0), Along(0))

        def loss(call: Any, *args: Any) -> Any:
            return jnp.sum(jnp.sin(call(*args)))

        def split(*args: Any, eqn: Any = eqn, way: Any = way) -> Any:
            return in_pieces(eqn, way, list(args), 6, 4)[0]

        whole = jax.grad(functools.partial(loss, fn), (0, 1))(*args)
        found = jax.grad(functools.partial(loss, split), (0, 1))(*args)
        for a, b in zip(whole, found, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_backward_rule_that_mixes_pieces_blocks() -> None:
    @jax.custom_vjp
    def normed(x: Any) -> Any:
        return x * 1.0

    normed.defvjp(lambda x: (x * 1.0, None), lambda _, ct: (ct - jnp.mean(ct, 0, keepdims=True),))
    eqn = last(normed, floats(6, 4))
    assert ways(eqn, 6, In(0), Along(0)) == []
    assert len(ways(eqn, 4, In(0), Along(1))) == 1


@jax.custom_vjp
def _twice(x: Any) -> Any:
    return jnp.sin(x)


# As JAX's documentation has it, the rules call the function.
_twice.defvjp(lambda x: (_twice(x), x), lambda x, ct: (2 * ct * jnp.cos(x) * _twice(x),))


@jax.custom_vjp
def _other(x: Any) -> Any:
    return jnp.sin(x)


# The same body as `_twice`, which it calls, and another backward rule, which mixes pieces.
_other.defvjp(lambda x: (_twice(x), None), lambda _, ct: (ct - jnp.mean(ct, 0, keepdims=True),))


@pytest.mark.parametrize("order", [1, 2])
def test_a_rule_may_call_its_own_function(order: int) -> None:
    x, w = floats(6, 4), floats(4, 4, seed=1)

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.square(_twice(jnp.tanh(x) @ w)))

    def derivative(fn: Any) -> Any:
        first = jax.grad(fn, (0, 1))
        if order == 1:
            return first(x, w)
        return jax.grad(lambda x, w: sum(jnp.vdot(g, g) for g in first(x, w)), (0, 1))(x, w)

    divided = remat_kit.policy(remat_kit.pieces(3, axis=0))(loss)
    for a, b in zip(derivative(divided), derivative(loss), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_rule_may_call_another_function_with_the_same_body() -> None:
    assert ways(last(_other, floats(6, 4)), 6, In(0), Along(0)) == []
    assert len(ways(last(_other, floats(6, 4)), 4, In(0), Along(1))) == 1


@jax.custom_jvp
def _plain(x: Any) -> Any:
    return jnp.sin(x)


@_plain.defjvp
def _mixing_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return _plain(x), dx - jnp.mean(dx, 0, keepdims=True)


@jax.custom_jvp
def _calling(x: Any) -> Any:
    return jnp.sin(x)


@_calling.defjvp
def _calling_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return _calling(x), dx * _plain(x)


def test_a_forward_rule_may_call_another_function_with_the_same_body() -> None:
    """Its second derivative mixes pieces."""
    assert ways(last(_calling, floats(6, 4)), 6, In(0), Along(0)) == []
    assert len(ways(last(_calling, floats(6, 4)), 4, In(0), Along(1))) == 1
