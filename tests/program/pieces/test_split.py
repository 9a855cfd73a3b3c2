"""Which equations run together in pieces of an axis, and which one blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from remat_kit._program.pieces import Along, Partial
from remat_kit._program.pieces.split import Blocked, Split, split, widest
from remat_kit._program.program import Program, flat_program, without_dead


def program_of(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Program:
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return without_dead(flat_program(jax.make_jaxpr(fn)(*args)))


def divided(program: Program, axis: int) -> Split:
    found = split(program, widest(program), axis)
    assert isinstance(found, Split), found
    return found


def names(program: Program, indices: Any) -> list[str]:
    return [program.eqns[i].primitive.name for i in indices]


def attention(x: Any, wq: Any, wk: Any, wv: Any) -> Any:
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))
    q, k, v = (jnp.einsum("btd,dhc->bthc", x, w) for w in (wq, wk, wv))
    scores = jnp.einsum("bqhc,bkhc->bhqk", q, k)
    causal = jnp.tril(jnp.ones((scores.shape[-1],) * 2, bool))[None, None]
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhc->bqhc", weights, v)


ATTENTION = (2, 64, 8), (8, 4, 2), (8, 4, 2), (8, 4, 2)


def test_query_rows_read_all_keys_and_values() -> None:
    program = program_of(attention, *ATTENTION)
    found = divided(program, 2)
    assert found.n == 64
    assert [how for _, how in found.outputs] == [Along(1)]
    # The keys and the values are computed before the loop. The queries are computed in it, from
    # pieces of what the keys read as a whole.
    before = names(program, found.before)
    assert before.count("dot_general") == 2
    assert "rsqrt" in before
    assert names(program, found.ways).count("dot_general") == 3
    assert not found.after


def test_heads_read_slices_of_the_weights() -> None:
    program = program_of(attention, *ATTENTION)
    found = divided(program, 1)
    assert {how for _, how in found.cut} == {Along(1)}
    assert [v for v, _ in found.cut] == list(program.invars[1:])
    assert names(program, found.ways).count("dot_general") == 5


def test_the_key_axis_is_blocked_by_the_softmax() -> None:
    program = program_of(attention, *ATTENTION)
    found = split(program, widest(program), 3)
    assert isinstance(found, Blocked)
    assert "all pieces of the maximum that `reduce_max` computes" in str(found)


def test_a_contracted_axis_makes_partial_sums() -> None:
    def mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    program = program_of(mlp, (16, 4), (4, 64), (4, 64), (64, 4))
    found = divided(program, 1)
    assert [how for _, how in found.outputs] == [Partial.SUM]
    assert found.whole == program.invars[:1]
    assert dict(found.cut) == dict(
        zip(program.invars[1:], (Along(1), Along(1), Along(0)), strict=True)
    )
    assert [how for _, how in divided(program, 0).outputs] == [Along(0)]
    assert divided(program, 0).saved_bytes(4) > found.saved_bytes(4)


def test_tokens_are_a_factor_of_merged_rows() -> None:
    def head(x: Any, w: Any) -> Any:
        wide = jnp.tanh(jnp.einsum("btd,dv->btv", x, w))
        rows = wide.reshape(-1, wide.shape[-1])
        return jnp.sum(jnp.exp(rows))

    program = program_of(head, (4, 16, 8), (8, 100))
    found = divided(program, 1)
    assert names(program, found.ways)[-2:] == ["exp", "reduce_sum"]
    assert Along(0, outer=4) in found.how.values()


def test_masks_and_positions_are_computed_in_the_loop() -> None:
    def fn(x: Any) -> Any:
        wide = x[:, :, None] * jnp.ones((1, 1, 128))
        rows = jax.lax.broadcasted_iota(jnp.int32, wide.shape, 1)
        return jnp.sum(jnp.where(rows < 5, jnp.sin(wide), 0.0))

    program = program_of(fn, (4, 16))
    for axis in (0, 1, 2):
        found = divided(program, axis)
        assert "iota" in names(program, found.ways)
        assert all(how == Partial.SUM for _, how in found.outputs)


def masked(impl: str) -> Callable[..., Any]:
    def fn(x: Any) -> Any:
        wide = jnp.tanh(x[:, None] * jnp.ones((1, 128)))
        mask = jax.random.bernoulli(jax.random.key(0, impl=impl), 0.5, wide.shape)
        return jnp.sum(jnp.where(mask, wide, 0.0))

    return fn


def test_random_bits_are_not_the_widest_value() -> None:
    """They are as large as what is masked, and come first here."""

    def fn(x: Any) -> Any:
        mask = jax.random.bernoulli(jax.random.key(0), 0.5, (16, 128))
        return jnp.sum(jnp.where(mask, jnp.tanh(x[:, None] * jnp.ones((1, 128))), 0.0))

    program = program_of(fn, (16,))
    maker = next(e for e in program.eqns if widest(program) in e.outvars)
    assert maker.primitive.name != "random_bits"


def test_random_masks_are_drawn_in_pieces() -> None:
    program = program_of(masked("threefry2x32"), (16,))
    found = divided(program, 0)
    assert "random_bits" in names(program, found.ways)
    assert not [v for v, _ in found.cut if v.aval.dtype == jnp.bool_]


def test_masks_of_other_generators_are_made_whole() -> None:
    program = program_of(masked("rbg"), (16,))
    found = divided(program, 0)
    assert "random_bits" in names(program, found.before)
    masks = [v for v, _ in found.cut if v.aval.dtype == jnp.bool_]
    assert len(masks) == 1  # the mask is sliced, which is smaller than the bits


def test_a_side_result_before_the_widest_value_joins() -> None:
    def fn(x: Any, w: Any) -> Any:
        h = jnp.tanh(x)
        side = jnp.sum(h * h)
        return jnp.sum(jnp.sin(h @ w)) + side

    program = program_of(fn, (16, 4), (4, 100))
    found = divided(program, 0)
    assert [how for _, how in found.outputs] == [Partial.SUM] * 2
    assert names(program, found.after) == ["add"]


def test_a_mean_over_the_axis_blocks() -> None:
    def fn(x: Any) -> Any:
        wide = jnp.tanh(x[:, None] * jnp.ones((1, 128)))
        return jnp.sum(jnp.sin(wide - jnp.mean(wide, 0, keepdims=True)))

    program = program_of(fn, (16,))
    found = split(program, widest(program), 0)
    assert isinstance(found, Blocked)
    assert "needs all pieces of the sum that `reduce_sum` computes" in str(found)
    assert isinstance(split(program, widest(program), 1), Split)


def test_an_unknown_operation_is_named() -> None:
    def fn(x: Any) -> Any:
        wide = jnp.tanh(x[:, None] * jnp.ones((1, 128)))
        return jnp.sum(jax.lax.approx_max_k(wide, 2)[0])

    program = program_of(fn, (16,))
    found = split(program, widest(program), 0)
    assert isinstance(found, Blocked)
    assert found.eqn.primitive.name == "approx_top_k"
    assert "`approx_top_k` is not an operation that remat_kit can run in pieces" in str(found)


def test_effects_and_single_entries() -> None:
    def fn(x: Any) -> Any:
        wide = jnp.tanh(x[:, None] * jnp.ones((1, 128)))
        jax.debug.print("{}", x[0])
        return jnp.sum(wide)

    program = program_of(fn, (16,))
    assert "has an effect" in str(split(program, widest(program), 0))
    one = program_of(lambda x: jnp.sum(jnp.sin(x[:, None] * jnp.ones((1, 128)))), (1,))
    assert str(split(one, widest(one), 0)) == "axis 0 has 1 entry"


def test_nothing_is_wide() -> None:
    assert widest(program_of(lambda x: x, (4,))) is None


def test_a_value_that_no_result_depends_on_is_not_divided() -> None:
    def fn(x: Any) -> Any:
        unread = jnp.abs(x) * 2
        del unread
        return jnp.sin(x) * 3

    program = flat_program(jax.make_jaxpr(fn)(jnp.ones((8, 4))))
    dead = program.eqns[0].outvars[0]
    found = split(program, dead, 0)
    assert isinstance(found, Blocked)
    assert str(found) == "no result depends on the value"
