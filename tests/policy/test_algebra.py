"""The algebra of selectors and policies, and policies as plain JAX policies."""

from __future__ import annotations

import dataclasses
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from hypothesis import given
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

from remat_kit._errors import PolicyError, UnknownNameError
from remat_kit._policy import recipe as _recipe
from remat_kit._policy.algebra import (
    Decision,
    Policy,
    Selector,
    callable_policy,
    first,
    offload,
    recompute,
    save,
)
from remat_kit._policy.reading import as_policy
from remat_kit._policy.selectors import (
    cheap,
    collective,
    dots,
    dots_no_batch,
    dtype,
    everything,
    larger_than,
    module,
    named,
    named_regex,
    nothing,
    primitive,
    smaller_than,
    source,
    where,
)
from remat_kit._policy.structural import block, nested, segments, uniform
from remat_kit._program.value import Value
from remat_kit._units import format_bytes, parse_bytes

RECOMPUTE, OFFLOAD, SAVE = Decision


# -- strategies --------------------------------------------------------------------------------
_words = st.sampled_from(["dot_general", "max", "attn_out", "mlp_up", "a*", "*_out", "it's", 'q"'])
_sizes = st.one_of(st.integers(0, 1 << 40), st.sampled_from(["1KiB", "3MiB", "2kB"]))
_paths = st.sampled_from(["*/mlp", "**/attn/**", "GPT/block_[01]", "*/attn/out", "?/x"])
leaf_selectors = st.one_of(
    st.sampled_from([everything, nothing, dots, dots_no_batch, collective]),
    st.lists(_words, min_size=1, max_size=2).map(lambda p: primitive(*p)),
    st.builds(lambda p, s: named(*p, strict=s), st.lists(_words, min_size=1), st.booleans()),
    st.sampled_from([named_regex(r".*(_out|'q')"), named_regex("a{2}", "b", strict=False)]),
    st.builds(lambda p, s: module(p, strict=s), _paths, st.booleans()),
    st.sampled_from([dtype("float32"), dtype("*16"), source("m.py"), source("n/m.py:3-9")]),
    _sizes.map(larger_than),
    _sizes.map(smaller_than),
    st.floats(0, 1e6).map(cheap),
)
selectors = st.recursive(
    leaf_selectors,
    lambda s: st.one_of(
        st.builds(lambda a, b: a | b, s, s),
        st.builds(lambda a, b: a & b, s, s),
        st.builds(lambda a, b: a - b, s, s),
        s.map(lambda a: ~a),
    ),
    max_leaves=4,
)
leaf_policies = st.one_of(
    selectors.map(save),
    selectors.map(recompute),
    st.builds(offload, selectors, st.sampled_from(["pinned_host", "unpinned_host"])),
    st.just(callable_policy(jax.checkpoint_policies.everything_saveable)),
)
policies = st.recursive(
    leaf_policies,
    lambda p: st.one_of(
        st.builds(lambda a, b: a | b, p, p),
        st.builds(lambda a, b: a & b, p, p),
        st.builds(lambda a, b: a >> b, p, p),
    ),
    max_leaves=5,
)
values = st.builds(
    Value,
    primitives=st.lists(_words, max_size=2).map(tuple),
    names=st.lists(_words, max_size=2).map(tuple),
    module=st.sampled_from(["", "mlp", "GPT/block_0/mlp/up", "GPT/block_1/attn/out", "a/x"]),
    source=st.tuples(st.sampled_from(["", "m.py", "src/n/m.py"]), st.integers(0, 12)),
    dtype=st.sampled_from(["float32", "bfloat16", "int32"]),
    bytes=st.integers(0, 1 << 41),
    flops=st.floats(0, 1e9),
    moved_bytes=st.floats(0, 1e9),
)


# -- the algebra -------------------------------------------------------------------------------


@given(selectors, selectors, values)
def test_selectors_are_a_boolean_algebra(a: Selector, b: Selector, v: Value) -> None:
    assert (a | b).matches(v) == (a.matches(v) or b.matches(v))
    assert (a & b).matches(v) == (a.matches(v) and b.matches(v))
    assert (a - b).matches(v) == (a.matches(v) and not b.matches(v))
    assert (~a).matches(v) == (not a.matches(v))


@given(selectors, values)
def test_what_each_rule_decides(s: Selector, v: Value) -> None:
    hit = s.matches(v)
    assert save(s).decide(v) == (SAVE if hit else RECOMPUTE)
    assert offload(s).decide(v) == (OFFLOAD if hit else RECOMPUTE)
    assert recompute(s).decide(v) == (RECOMPUTE if hit else SAVE)
    assert recompute(s).decide(v) == save(~s).decide(v)


@given(policies, policies, policies, values)
def test_policies_are_a_distributive_lattice(a: Policy, b: Policy, c: Policy, v: Value) -> None:
    def same(x: Policy, y: Policy) -> bool:
        return x.decide(v) == y.decide(v)

    assert (a | b).decide(v) == max(a.decide(v), b.decide(v))
    assert (a & b).decide(v) == min(a.decide(v), b.decide(v))
    assert same(a | b, b | a)
    assert same(a & b, b & a)
    assert same(a | (a & b), a)
    assert same(a & (a | b), a)
    assert same(a & (b | c), (a & b) | (a & c))
    assert same(a | save(nothing), a)
    assert same(a & save(everything), a)


@given(policies, policies, policies, values)
def test_the_first_that_matches_decides(a: Policy, b: Policy, c: Policy, v: Value) -> None:
    expected = next((p for p in (a, b) if p.matches(v)), c)
    assert (a >> b >> c).decide(v) == expected.decide(v)
    assert (a >> b >> c).rule(v) == expected.rule(v)
    assert first(a, b, c) == a >> b >> c
    assert first(a) == a


@given(policies, policies, policies)
def test_operators_are_associative_values(a: Policy, b: Policy, c: Policy) -> None:
    for join in (Policy.__or__, Policy.__and__, Policy.__rshift__):
        left, right = join(join(a, b), c), join(a, join(b, c))
        assert left == right
        assert hash(left) == hash(right)


@given(policies, values)
def test_one_leaf_rule_gives_the_decision(p: Policy, v: Value) -> None:
    leaf = p.deciding(v)
    assert leaf in set(p.rules())
    assert leaf.decide(v) == p.decide(v)
    assert p.rule(v) == repr(leaf)
    assert p.destination(v).endswith("_host") == (p.decide(v) is OFFLOAD)


@given(policies)
def test_repr_rebuilds_a_policy(p: Policy) -> None:
    again = _recipe.parse(repr(p))
    assert again == p
    assert hash(again) == hash(p)
    assert repr(again) == repr(p)


@given(selectors)
def test_repr_rebuilds_a_selector(s: Selector) -> None:
    assert _recipe.parse(repr(s)) == save(s)


@given(policies)
def test_repr_rebuilds_inside_a_structural_policy(p: Policy) -> None:
    for outer in (uniform(2, keep=p), block(3, keep=p), segments("a", keep=p), nested(keep=p)):
        assert _recipe.parse(repr(outer)) == outer
        assert outer.keep == p


def test_different_policies_are_unequal() -> None:
    many = [
        save(dots),
        recompute(dots),
        offload(dots),
        offload(dots, to="unpinned_host"),
        save(dots_no_batch),
        save(named("x")),
        save(named("x", strict=False)),
        save(named_regex("x")),
        save(primitive("x")),
        save(module("x")),
        save(dots) | save(named("x")),
        save(dots) & save(named("x")),
        save(dots) >> save(named("x")),
        save(dots | named("x")),
        uniform(2),
        block(2),
        nested(2),
        nested(),
        uniform(2, keep=dots),
        segments("a"),
    ]
    assert len(set(many)) == len(many)


def test_precedence_survives_the_repr() -> None:
    a, b, c = save(named("a")), offload(named("b")), recompute(named("c"))
    assert repr((a | b) & c) == ("(save(named('a')) | offload(named('b'))) & recompute(named('c'))")
    assert repr(a | b & c) == "save(named('a')) | offload(named('b')) & recompute(named('c'))"
    assert repr(a & (b >> c)) == "save(named('a')) & offload(named('b')) >> recompute(named('c'))"
    assert repr(~(dots | named("x"))) == "~(dots | named('x'))"
    assert repr(~dots & named("x")) == "~dots & named('x')"


def test_a_selector_stands_for_saving() -> None:
    assert save(dots) | named("x") == save(dots) | save(named("x"))
    assert named("x") | offload(dots) == save(named("x")) | offload(dots)
    assert named("x") >> offload(dots) == save(named("x")) >> offload(dots)
    assert dots >> named("x") == save(dots) >> save(named("x"))
    assert (dots & offload(everything)).decide(Value(primitives=("dot_general",))) is OFFLOAD


def test_an_explicit_match_explains_a_tie() -> None:
    p = save(named("a")) | recompute(named("b"))
    assert p.rule(Value(names=("a",))) == "save(named('a'))"
    assert p.rule(Value()) == "recompute(named('b'))"
    tie = save(named("a")) | save(named("b"))
    assert tie.rule(Value(names=("b",))) == "save(named('b'))"
    assert (save(dots) & recompute(named("b"))).rule(Value(names=("b",))) == (
        "recompute(named('b'))"
    )


# -- selectors ---------------------------------------------------------------------------------


def _is_image(value: Value) -> bool:
    return len(value.shape) == 4


def test_bytes_are_read_and_written() -> None:
    texts = ["1KiB", "1 kib", "1kB", "1KB", "1.5MiB", "2e3B", "1_000", "16GB", "0"]
    expected = [1024, 1024, 1000, 1000, 1572864, 2000, 1000, 16 * 10**9, 0]
    assert [parse_bytes(t) for t in texts] == expected
    shown = [format_bytes(n) for n in (999, 1023, 1024, 1572864, 16 << 30, 8113 << 20)]
    assert shown == ["999 B", "1023 B", "1 KiB", "1.5 MiB", "16 GiB", "7.92 GiB"]


@pytest.mark.parametrize("text", ["", "MiB", "1 M", "-1", "1,5MiB", "1 MiBs", -1, True, None, 1.5])
def test_sizes_that_are_none(text: object) -> None:
    with pytest.raises(PolicyError, match="not a size in bytes"):
        parse_bytes(text)  # pyright: ignore[reportArgumentType]


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "said", "hinted"),
    [
        (lambda: save("dots"), "`save('dots')`", "save(named('dots'))"),
        (lambda: save(save(dots)), "must be a selector", "save(dots)"),
        (lambda: offload(None), "`offload(None)`", "offload(nothing)"),
        (lambda: named(), "no pattern was given", 'named("attn_*")'),
        (lambda: named(3), "3 is not a pattern", 'named("attn_*")'),
        (lambda: primitive(""), "'' is not a pattern", "conv_*"),
        (lambda: named_regex("("), "not a regular expression", "named(...)"),
        (lambda: named_regex(r"(a+)\1"), "a reference to a group cannot be", "several patterns"),
        (lambda: named_regex("(?>a|b)c"), "an atomic group cannot be", "several patterns"),
        (lambda: named_regex("a++"), "a possessive repetition cannot be", "several patterns"),
        (lambda: named_regex("(a)?(?(1)b|c)"), "a condition on a group", "several patterns"),
        (lambda: named_regex("(?i:a)b"), "flags for one group", "several patterns"),
        (lambda: named_regex("a" * 1001), "more than 1,000 characters", "several patterns"),
        (lambda: named_regex("(" * 200 + ")" * 200), "100 levels of groups", "several patterns"),
        (lambda: source("m.py:9-3"), "`source('m.py:9-3')`", "smaller line first"),
        (lambda: cheap(-1), "not a ratio", "zero or more"),
        (lambda: cheap(float("nan")), "not a ratio", "zero or more"),
        (lambda: where(dots), "a function of one `Value`", "lambda"),
        (lambda: where(3), "a function of one `Value`", "lambda"),
        (lambda: first(), "no policy was given", "a >> b"),
        (lambda: save(dots) | None, "None means that no policy", "save(everything)"),
        (lambda: save(dots) | 3, "3 is not a policy", "give a preset"),
        (lambda: as_policy(3, call="policy(3)"), "`policy(3)`: 3 is not", "give a preset"),
        (lambda: as_policy(Value), "is not a policy", "give a preset"),
        (lambda: uniform(0), "`uniform(0)`: 0 is not a count", "one or more"),
        (lambda: block("2"), "is not a count", "one or more"),
        (lambda: nested(True), "is not a count", "one or more"),
        (lambda: segments(), "no pattern was given", "segments("),
        (lambda: segments("a", "a"), "given twice", "own name"),
        (lambda: uniform(2, keep=None), "for the values inside a region", "keep=save(dots)"),
        (lambda: uniform(2, keep=block(2)), "for the values inside a region", "keep=save(dots)"),
        (lambda: uniform(2) | save(dots), "cannot be combined", "keep=..."),
        (lambda: save(dots) & block(2), "cannot be combined", "keep=..."),
        (lambda: dots >> nested(), "cannot be combined", "keep=..."),
        (lambda: callable_policy(3), "`callable_policy(3)`", "dots_saveable"),
    ],
)
def test_refusals_say_what_to_do(build, said: str, hinted: str) -> None:
    with pytest.raises(PolicyError) as caught:
        build()
    assert said in caught.value.message
    assert hinted in (caught.value.hint or "")


def test_memory_kinds_are_checked() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'pinned_host'"):
        offload(dots, to="pined_host")


# -- plain JAX policies ------------------------------------------------------------------------


def _layer(w: jax.Array, x: jax.Array) -> jax.Array:
    h = checkpoint_name(jnp.tanh(x @ w), "hidden")
    return jnp.sin(jnp.exp(h) @ w).sum()


_W, _X = jnp.full((8, 8), 0.1), jnp.ones((4, 8))


def _residuals(policy: object, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `jax.checkpoint` saves beside the arguments, one line of JAX's own report each."""
    print_saved_residuals(jax.checkpoint(_layer, policy=policy), _W, _X)
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if "from the argument" not in line]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (save(nothing), jax.checkpoint_policies.nothing_saveable),
        (save(everything), jax.checkpoint_policies.everything_saveable),
        (save(dots), jax.checkpoint_policies.dots_saveable),
        (save(dots_no_batch), jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
        (save(named("hidden")), jax.checkpoint_policies.save_only_these_names("hidden")),
        (save(named("other")), jax.checkpoint_policies.save_only_these_names("other")),
        (
            callable_policy(jax.checkpoint_policies.dots_saveable),
            jax.checkpoint_policies.dots_saveable,
        ),
        (
            save(dots) | callable_policy(jax.checkpoint_policies.save_only_these_names("hidden")),
            jax.checkpoint_policies.save_from_both_policies(
                jax.checkpoint_policies.dots_saveable,
                jax.checkpoint_policies.save_only_these_names("hidden"),
            ),
        ),
    ],
)
def test_saves_what_the_jax_policy_saves(ours, theirs, capsys) -> None:
    assert _residuals(ours, capsys) == _residuals(theirs, capsys)


def test_selects_by_primitive_in_jax_checkpoint(capsys) -> None:
    assert len(_residuals(save(primitive("tanh")), capsys)) == 1
    assert _residuals(recompute(everything), capsys) == []
    both = _residuals(recompute(primitive("exp", "sin", "cos") | named("*")), capsys)
    assert any("dot_general" in line for line in both)


def test_offload_composes_with_save_in_jax_checkpoint(capsys) -> None:
    p = save(dots) | offload(named("hidden"))
    lines = _residuals(p, capsys)
    assert sorted("<host>" in line for line in lines) == [False, False, True]
    assert all("dot_general" in line for line in lines if "<host>" not in line)
    grads = jax.jit(jax.grad(jax.checkpoint(_layer, policy=p)))
    assert jnp.array_equal(grads(_W, _X), jax.jit(jax.grad(_layer))(_W, _X))


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="0.10.2 ignores all policies but its own under the flag"
)
def test_jax_remat3_asks_at_names_and_dots(capsys) -> None:
    policies = (save(dots), save(named("hidden")), save(dots) | offload(named("hidden")))
    before = [_residuals(p, capsys) for p in policies]
    jax.config.update("jax_remat3", True)
    try:
        after = [_residuals(p, capsys) for p in policies]
    finally:
        jax.config.update("jax_remat3", False)
    assert [len(lines) for lines in after] == [len(lines) for lines in before] == [2, 1, 3]
    assert ["<host>" in str(lines) for lines in after] == [False, False, True]


def test_answers_are_those_that_jax_expects() -> None:
    tanh, name = (
        e.primitive for e in jax.make_jaxpr(lambda x: checkpoint_name(jnp.tanh(x), "h"))(1.0).eqns
    )
    aval = jax.ShapeDtypeStruct((), jnp.float32)
    assert save(primitive("tanh"))(tanh, aval, accuracy=None) is True
    assert save(primitive("tanh"))(name, aval, name="h") is False
    p = save(primitive("tanh")) | offload(named("h"))
    assert not isinstance(p(tanh, aval), bool)
    assert p(name, aval, name="h") == jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )(name, aval, name="h")


@pytest.mark.parametrize(
    "policy",
    [
        save(module("*/mlp")),
        save(dots - larger_than("1MiB")),
        save(dots) | offload(smaller_than(8)),
        recompute(dtype("float32")),
        save(source("m.py")),
        save(cheap()),
        save(where(_is_image)),
        uniform(2),
        nested(),
    ],
)
def test_jax_checkpoint_cannot_take_what_needs_more(policy: Policy) -> None:
    with pytest.raises(PolicyError) as caught:
        jax.grad(jax.checkpoint(_layer, policy=policy))(_W, _X)
    assert "needs more" in caught.value.message
    assert "remat_kit.policy(...)" in (caught.value.hint or "")


def test_the_error_names_the_selector_that_needs_more() -> None:
    p = save(dots & larger_than("1MiB")) | save(named("x"))
    with pytest.raises(PolicyError, match=r"but `larger_than\('1MiB'\)` needs more"):
        p(jax.lax.tanh_p)


@pytest.mark.parametrize("policy", [save(dots), save(dots) | offload(named("h")), recompute(dots)])
def test_flax_takes_policies_as_they_are(policy: Policy) -> None:
    x = jnp.ones((2, 4))

    def forward(make):
        m = make(4)
        params = m.init(jax.random.key(0), x)
        return jax.jit(jax.grad(lambda p: jnp.tanh(m.apply(p, x)).sum()))(params)

    plain = forward(linen.Dense)
    rematted = forward(linen.remat(linen.Dense, policy=policy))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, plain, rematted))

    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    call = nnx.remat(lambda m, x: jnp.tanh(m(x)), policy=policy)
    got = nnx.jit(nnx.grad(lambda m: call(m, x).sum()))(layer)
    want = nnx.jit(nnx.grad(lambda m: jnp.tanh(m(x)).sum()))(layer)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, got, want))


def test_wrapped_policies_see_values_and_their_names() -> None:
    dot = jax.make_jaxpr(jnp.matmul)(_X, _W).eqns[-1]
    value = Value(
        primitives=("dot_general",),
        names=("hidden",),
        primitive=dot.primitive,
        in_avals=tuple(v.aval for v in dot.invars),
        params=dot.params,
    )
    unnamed = dataclasses.replace(value, names=())
    policies = jax.checkpoint_policies
    assert callable_policy(policies.dots_saveable).decide(unnamed) is SAVE
    assert callable_policy(policies.nothing_saveable).decide(value) is RECOMPUTE
    by_name = callable_policy(policies.save_only_these_names("hidden"))
    assert by_name.decide(value) is SAVE
    assert by_name.decide(unnamed) is RECOMPUTE
    offloading = callable_policy(policies.offload_dot_with_no_batch_dims("device", "pinned_host"))
    assert offloading.decide(value) is OFFLOAD
    assert offloading.destination(value) == "pinned_host"
    assert (offloading | save(dots)).decide(value) is SAVE
    assert (offloading & save(dots)).destination(value) == "pinned_host"
    assert offloading.decide(Value(names=())) is RECOMPUTE


def test_a_wrapped_policy_must_give_a_decision() -> None:
    factory = jax.checkpoint_policies.save_only_these_names
    value = Value(primitive=jax.lax.tanh_p)
    with pytest.raises(PolicyError, match="call a policy factory"):
        callable_policy(lambda *_, **__: factory("x")).decide(value)


def test_jax_caches_by_the_value_of_a_policy() -> None:
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def step(policy: Policy, x: jax.Array) -> jax.Array:
        traces.append(policy)
        return jax.checkpoint(jnp.tanh, policy=policy)(x)

    step(save(dots) | named("x"), 1.0)
    step(save(dots) | named("x"), 2.0)
    assert len(traces) == 1
