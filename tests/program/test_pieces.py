"""Each rule: an equation that runs in pieces computes what the whole equation computes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from remat_kit import _jax
from remat_kit._program.pieces import (
    Along,
    In,
    Out,
    Partial,
    Piece,
    Way,
    all_ways,
    may_join,
    on_piece,
    readers,
    ways,
)
from remat_kit._program.program import Program


def in_pieces(eqn: Any, way: Way, values: list[Any], n: int, k: int) -> list[Any]:
    """Run an equation piece by piece; the last piece may be smaller."""
    size = -(-n // k)
    outs: list[Any] = [None] * len(eqn.outvars)
    for offset in range(0, n, size):
        piece = Piece(n, min(size, n - offset), jnp.asarray(offset))
        given = [
            piece.cut(x, how) if isinstance(how, Along) else x
            for x, how in zip(values, way.inputs, strict=True)
        ]
        found = on_piece(eqn, way, given, piece)
        for i, (var, how, y) in enumerate(zip(eqn.outvars, way.outputs, found, strict=True)):
            assert y.shape == piece.shape(var.aval.shape, how)
            if isinstance(how, Along):
                whole = jnp.zeros_like(y, shape=var.aval.shape) if outs[i] is None else outs[i]
                outs[i] = piece.put(whole, y, how)
            else:
                outs[i] = y if outs[i] is None or how is None else how.join(outs[i], y)
    return outs


def check_all_ways(fn: Callable[..., Any], *args: Any, pieces: int = 3) -> list[Way]:
    """Check every way to run the last equation of a function, and return these ways."""
    closed = jax.make_jaxpr(fn)(*args)
    env = dict(zip(closed.jaxpr.invars, args, strict=True))
    env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    if not closed.jaxpr.eqns:  # a reshape to the same shape, for example
        return []
    for eqn in closed.jaxpr.eqns:
        values = [v.val if isinstance(v, jax.extend.core.Literal) else env[v] for v in eqn.invars]
        outs = _jax.bind(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    sizes = {s for v in (*eqn.invars, *eqn.outvars) for s in getattr(v.aval, "shape", ())}
    found = []
    for n in sorted({d for s in sizes for d in range(2, s + 1) if s % d == 0}):
        for way in all_ways(eqn, n):
            split = in_pieces(eqn, way, values, n, pieces)
            for a, b in zip(split, outs, strict=True):
                assert a.dtype == b.dtype
                np.testing.assert_allclose(
                    np.asarray(a, dtype=np.float64),
                    np.asarray(b, dtype=np.float64),
                    rtol=2e-5,
                    atol=2e-5,
                )
            found.append(way)
    return found


def floats(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def ints(*shape: int, high: int = 5, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, size=shape), jnp.int32)


# Few sizes, because each new shape compiles each operation anew.
_SIZES = st.sampled_from([1, 4, 6])
_PIECES = st.integers(2, 4)


# -- matches of dimensions ------------------------------------------------------------------------

_UNARY: list[Callable[[Any], Any]] = [
    *(jnp.negative, jnp.sin, jnp.exp, jnp.abs, lax.sign, lax.floor, lax.is_finite, lax.tanh),
    *(lax.logistic, lax.erf, lax.erfc, lax.exp2, lax.square, lax.cbrt, lax.stop_gradient),
    lambda x: lax.integer_pow(x, 3),
    lambda x: lax.convert_element_type(x, jnp.bfloat16),
    lambda x: lax.bitcast_convert_type(x, jnp.int32),
    lambda x: lax.reduce_precision(x, 8, 7),
    lambda x: checkpoint_name(x, "x"),
    lambda x: x * 2.0,
    lambda x: lax.clamp(-0.5, x, 0.5),
]


@settings(max_examples=4)
@given(shape=st.tuples(_SIZES, _SIZES, _SIZES), pieces=_PIECES)
@pytest.mark.parametrize("fn", _UNARY)
def test_elementwise(fn: Callable[[Any], Any], shape: tuple[int, ...], pieces: int) -> None:
    found = check_all_ways(fn, floats(*shape), pieces=pieces)
    whole_axes = {w.outputs[0] for w in found} & {Along(d) for d in range(3)}
    assert whole_axes == {Along(d) for d in range(3) if shape[d] > 1}


@settings(max_examples=4)
@given(shape=st.tuples(_SIZES, _SIZES), pieces=_PIECES)
@pytest.mark.parametrize("fn", [lax.add, lax.mul, lax.max, lax.lt, lax.pow, lax.atan2, lax.rem])
def test_elementwise_of_two(fn: Any, shape: tuple[int, ...], pieces: int) -> None:
    found = check_all_ways(fn, jnp.abs(floats(*shape)), floats(*shape, seed=1), pieces=pieces)
    assert all(w.inputs == w.outputs * 2 for w in found)
    assert len({w.outputs[0].axis for w in found if w.outputs[0]}) == sum(s > 1 for s in shape)


@pytest.mark.parametrize("which", ["array", "scalar"])
def test_select(which: str) -> None:
    x, y = floats(4, 6), floats(4, 6, seed=1)
    where = x > 0 if which == "array" else jnp.asarray(True)
    found = check_all_ways(lax.select_n, where, x, y)
    assert {w.inputs[0] is None for w in found} == {which == "scalar"}
    assert {w.outputs[0].axis for w in found if w.outputs[0]} == {0, 1}


@settings(max_examples=6)
@given(shape=st.tuples(_SIZES, _SIZES), extra=_SIZES, pieces=_PIECES)
def test_shapes(shape: tuple[int, int], extra: int, pieces: int) -> None:
    check = functools.partial(check_all_ways, pieces=pieces)
    x = floats(*shape)
    check(lambda x: lax.broadcast_in_dim(x, (shape[0], extra, shape[1]), (0, 2)), x)
    check(lambda x: lax.broadcast_in_dim(x, (extra, shape[1]), (0, 1)), x[:1])
    check(lambda x: lax.transpose(x, (1, 0)), x)
    check(lambda x: lax.squeeze(x, (0,)), x[None])
    check(lambda x: lax.expand_dims(x, (1,)), x)
    check(lambda x: lax.rev(x, (0,)), x)
    check(lambda x: lax.pad(x, 0.0, ((1, 0, 0), (0, 0, 0))), x)
    check(lambda x: lax.concatenate([x, x], 0), x)
    check(lambda x: lax.slice(x, (0, 0), (1, shape[1])), x)
    check(lambda x: lax.dynamic_slice(x, (0, 0), (1, shape[1])), x)
    check(lambda x: lax.dynamic_update_slice(x, x[:1], (0, 0)), x)
    check(lambda x: jnp.stack([x, x], 1), x)


@settings(max_examples=6)
@given(shape=st.tuples(_SIZES, _SIZES, _SIZES), dim=st.integers(0, 2), pieces=_PIECES)
def test_iota(shape: tuple[int, ...], dim: int, pieces: int) -> None:
    found = check_all_ways(lambda: lax.broadcasted_iota(jnp.int32, shape, dim), pieces=pieces)
    assert {w.outputs[0].axis for w in found if w.outputs[0]} == {
        d for d in range(3) if shape[d] > 1
    }


@settings(max_examples=6)
@given(sizes=st.tuples(_SIZES, _SIZES, _SIZES, _SIZES), pieces=_PIECES)
def test_products(sizes: tuple[int, ...], pieces: int) -> None:
    b, m, c, n = sizes
    found = check_all_ways(
        lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))),
        floats(b, m, c),
        floats(b, c, n, seed=1),
        pieces=pieces,
    )
    assert {w.outputs[0].axis for w in found if isinstance(w.outputs[0], Along)} == {
        d for d, s in enumerate((b, m, n)) if s > 1
    }
    assert any(w.outputs == (Partial.SUM,) for w in found) == (c > 1)


@pytest.mark.parametrize("groups", [1, 2])
def test_convolution(groups: int) -> None:
    x, w = floats(4, 6, 6, 4), floats(3, 3, 4 // groups, 6, seed=1)
    found = check_all_ways(
        lambda x, w: lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        ),
        x,
        w,
    )
    outs = {w.outputs[0].axis if isinstance(w.outputs[0], Along) else "sum" for w in found}
    assert outs == ({0, 3, "sum"} if groups == 1 else {0})


@pytest.mark.parametrize(
    "fn", [jnp.sum, jnp.max, jnp.min, jnp.prod, jnp.argmax, jnp.argmin], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_reductions(fn: Any, axis: int) -> None:
    found = check_all_ways(lambda x: fn(x, axis=axis), floats(4, 6, 3))
    outs = {w.outputs[0].axis for w in found if isinstance(w.outputs[0], Along)}
    assert outs == {0, 1}
    assert any(w.partial for w in found) == (fn in (jnp.sum, jnp.max, jnp.min))


@pytest.mark.parametrize("fn", [jnp.any, jnp.all])
def test_reductions_of_bools(fn: Any) -> None:
    found = check_all_ways(lambda x: fn(x > 0, axis=1), floats(4, 6))
    assert {w.partial for w in found} == {True, False}


def test_maxima_join_only_where_nobody_differentiates_them() -> None:
    def softmax(x: Any) -> Any:
        return jnp.exp(x - lax.stop_gradient(jnp.max(x, 1, keepdims=True)))

    for fn, expected in ((softmax, True), (lambda x: jnp.max(x, 1) * 2, False)):
        program = Program.of(jax.make_jaxpr(fn)(floats(4, 6)))
        (eqn,) = [e for e in program.eqns if e.primitive.name == "reduce_max"]
        (way,) = ways(eqn, 6, In(0), Along(1))
        assert way.outputs == (Partial.MAX,)
        assert may_join(eqn, way, readers(program)) is expected


@pytest.mark.parametrize("axis", [0, 1])
def test_operations_along_an_axis(axis: int) -> None:
    x = floats(4, 6)
    for fn in (
        lambda x: lax.cumsum(x, axis),
        lambda x: lax.cummax(x, axis),
        lambda x: lax.cumlogsumexp(x, axis),
        lambda x: lax.sort(x, dimension=axis),
        lambda x: lax.sort((x, x), dimension=axis, num_keys=1),
    ):
        found = check_all_ways(fn, x)
        assert {w.outputs[0].axis for w in found if isinstance(w.outputs[0], Along)} == {1 - axis}
    assert {w.outputs[1] for w in check_all_ways(lambda x: lax.top_k(x, 2), x)} >= {Along(0)}


def test_windows() -> None:
    x = floats(4, 6, 6, 3)
    found = check_all_ways(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), x
    )
    assert {w.outputs[0].axis for w in found if isinstance(w.outputs[0], Along)} == {0, 3}


@settings(max_examples=4)
@given(shape=st.tuples(_SIZES, _SIZES), width=_SIZES, pieces=_PIECES)
def test_gather(shape: tuple[int, int], width: int, pieces: int) -> None:
    table, index = floats(5, width), ints(*shape)
    lookup = check_all_ways(lambda t, i: t.at[i].get(mode="fill"), table, index, pieces=pieces)
    axes = {w.outputs[0].axis for w in lookup if isinstance(w.outputs[0], Along)}
    assert axes == {d for d, s in enumerate((*shape, width)) if s > 1}
    rows = floats(*shape, 5)
    check_all_ways(
        lambda x, i: jnp.take_along_axis(x, i[..., None], -1), rows, index, pieces=pieces
    )


# -- factors of axes ------------------------------------------------------------------------------


@settings(max_examples=10)
@given(
    shape=st.lists(_SIZES, min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    pieces=_PIECES,
)
def test_reshape(shape: list[int], order: Any, pieces: int) -> None:
    size = math.prod(shape)
    new, rest = [], size
    while rest > 1:
        d = order.choice([d for d in range(2, rest + 1) if rest % d == 0])
        new.append(d)
        rest //= d
    check_all_ways(lambda x: lax.reshape(x, new or [1, 1]), floats(*shape), pieces=pieces)


def test_reshape_keeps_batch_and_tokens_apart() -> None:
    closed = jax.make_jaxpr(lambda x: lax.reshape(x, (24, 5)))(floats(4, 6, 5))
    (eqn,) = closed.eqns
    assert [w.outputs for w in ways(eqn, 4, In(0), Along(0))] == [(Along(0, 1, 6),)]
    assert [w.outputs for w in ways(eqn, 6, In(0), Along(1))] == [(Along(0, 4, 1),)]
    assert [w.inputs for w in ways(eqn, 6, Out(0), Along(0, 4, 1))] == [(Along(1),)]
    assert ways(eqn, 24, Out(0), Along(0)) == []  # neither of the two axes


def test_equal_parts_of_an_axis() -> None:
    x = floats(4, 18)
    found = check_all_ways(lambda x: jnp.split(x, 3, 1), x)
    assert Way((Along(1, 3, 3),), (Along(1, 1, 3),) * 3) in found
    found = check_all_ways(lambda x: x[:, 6:12], x)
    assert Way((Along(1, 3, 3),), (Along(1, 1, 3),)) in found
    found = check_all_ways(lambda x: jnp.split(x, [4], 1), x)
    assert all(w.inputs[0].axis == 0 for w in found if w.inputs[0])


# -- programs inside equations --------------------------------------------------------------------


def _last(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.make_jaxpr(fn)(*args).eqns[-1]


@pytest.mark.parametrize(
    "fn",
    [
        jax.nn.relu,
        jax.nn.silu,
        jax.nn.gelu,
        jax.nn.softplus,
        jax.nn.elu,
        jax.nn.relu6,
        jax.nn.softmax,
        jax.nn.log_softmax,
        jax.nn.standardize,
        jax.nn.glu,
        jax.nn.sparse_plus,
        jax.nn.squareplus,
        functools.partial(jax.nn.logsumexp, axis=1),
        jax.checkpoint(jnp.sin),
    ],
    ids=lambda f: getattr(f, "__name__", "f"),
)
def test_functions_of_jax_nn(fn: Any) -> None:
    def called(x: Any) -> Any:
        return jax.jit(fn)(x)

    found = check_all_ways(called, floats(4, 6))
    assert Along(0) in {w.inputs[0] for w in found}


def _square(x: Any) -> Any:
    return x * x


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


def test_a_derivative_of_its_own_stays() -> None:
    x, y = floats(6, 4), floats(6, 4, seed=1)
    for fn, args in ((_odd, (x, y)), (_scaled, (x, floats(4, 3, seed=2)))):
        check_all_ways(fn, *args)
        eqn = _last(fn, *args)
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
    eqn = _last(normed, floats(6, 4))
    assert ways(eqn, 6, In(0), Along(0)) == []
    assert len(ways(eqn, 4, In(0), Along(1))) == 1


def test_branches() -> None:
    def fn(i: Any, x: Any, y: Any) -> Any:
        return lax.switch(i, [lambda x, y: x * 2, lambda x, y: x + jnp.sum(y, 1)], x, y)

    for i in range(2):
        found = check_all_ways(fn, jnp.asarray(i), floats(6), floats(6, 4, seed=1))
        assert Way((None, Along(0), Along(0)), (Along(0),)) in found


def test_scans() -> None:
    w = floats(4, 4)

    def fn(w: Any, h: Any, xs: Any) -> Any:
        return lax.scan(lambda h, x: (jnp.tanh(h @ w + x), h * 2), h, xs)

    found = check_all_ways(fn, w, floats(6, 4), floats(3, 6, 4, seed=1))
    assert Way((None, Along(0), Along(1)), (Along(0), Along(1))) in found
    eqn = _last(fn, w, floats(6, 4), floats(3, 6, 4))
    assert ways(eqn, 3, In(2), Along(0)) == []  # the axis that it scans over
    assert ways(eqn, 4, In(1), Along(1)) == []  # the product mixes the columns


# -- what cannot run in pieces --------------------------------------------------------------------


def _unsplittable() -> Iterator[Any]:
    yield _last(lambda x: lax.fft(x, "fft", (4,)), jnp.ones((6, 4), jnp.complex64))
    yield _last(lambda k: jax.random.bits(k, (6,)), jax.random.key(0))
    yield _last(lambda x: jax.debug.callback(print, x), floats(6, 4))


def test_unknown_primitives_and_effects_have_no_ways() -> None:
    for eqn in _unsplittable():
        assert all_ways(eqn, 6) == []
