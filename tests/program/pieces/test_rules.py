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
from piece_programs import all_ways, check_all_ways, floats, last

import remat_kit
from remat_kit._program.pieces import Along, In, Out, Partial, Way, ways

# Few sizes, because each new shape compiles each operation anew.
_SIZES = st.sampled_from([1, 4, 6])
_PIECES = st.integers(2, 4)


# -- matches of dimensions ------------------------------------------------------------------------

_UNARY: list[Callable[[Any], Any]] = [
    jnp.sin,
    lambda x: lax.convert_element_type(x, jnp.bfloat16),
    lambda x: checkpoint_name(x, "x"),
    lambda x: x * 2.0,
    lambda x: lax.clamp(-0.5, x, 0.5),
]
# They have the rule of `sin`.
_LIKE_SIN: list[Callable[[Any], Any]] = [
    *(jnp.negative, jnp.exp, jnp.abs, lax.sign, lax.floor, lax.tanh),
    *(lax.logistic, lax.erf, lax.erfc, lax.exp2, lax.square, lax.cbrt, lax.stop_gradient),
    lax.is_finite,
    lambda x: jnp.log2(jnp.abs(x)),
    lambda x: jax.grad(lambda y: jnp.sum(lax.tanh(y)))(x),
    lambda x: lax.integer_pow(x, 3),
    lambda x: lax.bitcast_convert_type(x, jnp.int32),
    lambda x: lax.reduce_precision(x, 8, 7),
]


@settings(max_examples=4)
@given(shape=st.tuples(_SIZES, _SIZES, _SIZES), pieces=_PIECES)
@pytest.mark.parametrize(
    "fn", [*_UNARY, *(pytest.param(fn, marks=pytest.mark.slow) for fn in _LIKE_SIN)]
)
def test_elementwise(fn: Callable[[Any], Any], shape: tuple[int, ...], pieces: int) -> None:
    found = check_all_ways(fn, floats(*shape), pieces=pieces)
    whole_axes = {w.outputs[0] for w in found} & {Along(d) for d in range(3)}
    assert whole_axes == {Along(d) for d in range(3) if shape[d] > 1}


@settings(max_examples=4)
@given(shape=st.tuples(_SIZES, _SIZES), pieces=_PIECES)
@pytest.mark.parametrize(
    "fn",
    [
        *(lax.add, lax.lt),
        *(
            pytest.param(fn, marks=pytest.mark.slow)
            for fn in (lax.mul, lax.max, lax.pow, lax.atan2, lax.rem)
        ),
    ],
)
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


@settings(max_examples=3)
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


def test_the_parts_of_an_axis_that_is_unstacked() -> None:
    for axis in (0, 1):
        found = check_all_ways(lambda x, a=axis: jnp.unstack(x, axis=a), floats(4, 6))
        assert {w.inputs[0].axis for w in found if w.inputs[0]} == {1 - axis}
        assert found


_PLACES = jnp.array([3, 0, 2, 2])


def _at(place: Callable[[Any], Any], updates: Callable[[Any], Any]) -> Callable[..., Any]:
    def scatter(x: Any, u: Any, kind: str) -> Any:
        return getattr(place(x), kind)(updates(u), unique_indices=False)

    return scatter


def _batched(x: Any, u: Any, kind: str) -> Any:
    def one(x: Any, u: Any, place: Any) -> Any:
        return getattr(x.at[place], kind)(u[0])

    return jax.vmap(one)(x, u, _PLACES)


@pytest.mark.parametrize("kind", ["add", "set", "multiply", "min", "max", "subtract"])
@pytest.mark.parametrize(
    ("scatter", "axes"),
    [
        (_at(lambda x: x.at[:, _PLACES], lambda u: u[:, :4]), {0, 2}),
        (_at(lambda x: x.at[_PLACES], lambda u: u), {1, 2}),
        (_at(lambda x: x.at[:, _PLACES[0], _PLACES[2]], lambda u: u[:, 0, 0]), {0}),
        (_batched, {0, 2}),
    ],
    ids=["middle", "first", "elements", "batched"],
)
def test_scatters(scatter: Any, axes: set[int], kind: str) -> None:
    x, u = floats(4, 6, 3), floats(4, 6, 3, seed=1)
    eqn = last(lambda x, u: scatter(x, u, kind), x, u)
    assert eqn.primitive.name.startswith("scatter")
    found = check_all_ways(lambda x, u: scatter(x, u, kind), x, u)
    assert {w.outputs[0].axis for w in found if w.outputs[0]} == axes


def test_fourier_transforms() -> None:
    def axes(fn: Any, x: Any) -> set[int]:
        return {how.axis for w in check_all_ways(fn, x) for how in w.inputs if how}

    x = floats(4, 6, 3, 3)
    assert axes(lambda x: lax.fft(x, "rfft", (3, 3)), x) == {0, 1}
    assert axes(lambda x: lax.fft(x, "fft", (3,)), x.astype(complex)) == {0, 1, 2}


@pytest.mark.parametrize(
    "fn",
    [
        jnp.linalg.cholesky,
        lambda a: jax.lax.linalg.lu(a)[0],
        lambda a: jnp.linalg.qr(a)[1],
        lambda a: jnp.linalg.svd(a, compute_uv=False),
        lambda a: jnp.linalg.eigh(a)[0],
        lambda a: jax.scipy.linalg.solve_triangular(a, a, lower=True),
    ],
    ids=["cholesky", "lu", "qr", "svd", "eigh", "solve_triangular"],
)
def test_matrices_of_a_batch(fn: Any) -> None:
    def loss(x: Any) -> Any:
        y = jnp.tanh(x)
        return jnp.sum(jnp.sin(fn(y @ y.swapaxes(-1, -2) + jnp.diag(jnp.arange(1.0, 4))[None])))

    divided, x = remat_kit.policy(remat_kit.pieces(2, axis=0))(loss), floats(5, 3, 3)
    np.testing.assert_allclose(divided(x), loss(x), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(divided)(x), jax.grad(loss)(x), rtol=1e-3, atol=1e-4)


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


@pytest.mark.parametrize("reps", [(1, 3), (2, 1), (2, 3), (0, 1)])
def test_repetitions_of_an_axis(reps: tuple[int, int]) -> None:
    found = check_all_ways(lambda x: lax.tile(x, reps), floats(4, 6))
    split = {(w.inputs[0], w.outputs[0]) for w in found}
    for axis, times in enumerate(reps):
        assert ((Along(axis), Along(axis, times)) in split) == (times > 0)
    assert all(all(w.inputs) for w in found)


# -- what cannot run in pieces --------------------------------------------------------------------


def _unsplittable() -> Iterator[Any]:
    yield last(lambda x: lax.fft(x, "fft", (6,)), jnp.ones((4, 6), jnp.complex64))
    yield last(lambda k: jax.random.bits(k, (6,)), jax.random.key(0, impl="rbg"))
    yield last(lambda k: jax.random.bits(k, (6,), jnp.uint8), jax.random.key(0))
    yield last(jax.vmap(lambda k: jax.random.bits(k, (6,))), jax.random.split(jax.random.key(0)))
    yield last(lambda k: jax.random.bits(k, (6, 2**30)), jax.random.key(0))
    yield last(lambda x: jax.debug.callback(print, x), floats(6, 4))


def test_unknown_primitives_and_effects_have_no_ways() -> None:
    for eqn in _unsplittable():
        assert all_ways(eqn, 6) == []


def test_random_bits_of_the_older_threefry_have_no_ways() -> None:
    """There a bit depends on the size of the whole array, and not on its place alone."""
    eqn = last(lambda k: jax.random.bits(k, (6,)), jax.random.key(0))
    assert all_ways(eqn, 6) != []
    with jax.threefry_partitionable(False):
        assert all_ways(eqn, 6) == []
