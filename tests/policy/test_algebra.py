"""The algebra of selectors and policies, and policies as plain JAX policies."""

from __future__ import annotations

import dataclasses
import functools
import re

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
from remat_kit._policy.check import check, unmatched
from remat_kit._policy.patterns import path_matches, prefix_matching
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


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("GPT/mlp", "GPT/mlp", True),
        ("GPT/mlp", "GPT/mlp/up", False),
        ("*/mlp", "GPT/mlp", True),
        ("*/mlp", "Root/GPT/block_0/mlp", True),
        ("*/mlp", "mlp", False),
        ("**/mlp", "mlp", True),
        ("**/mlp", "a/b/mlp", True),
        ("*", "GPT", True),
        ("*", "GPT/mlp", False),
        ("GPT/*", "GPT/mlp", True),
        ("GPT/*", "GPT/mlp/up", False),
        ("GPT/*/up", "GPT/mlp/up", True),
        ("GPT/*/up", "GPT/a/b/up", False),
        ("GPT/**", "GPT", True),
        ("GPT/**/up", "GPT/up", True),
        ("GPT/**/up", "GPT/a/b/up", True),
        ("**", "", True),
        ("*", "", False),
        ("*/block_*", "GPT/block_12", True),
        ("*/block_*", "GPT/my_block_1", False),
        ("*/block_[0-3]", "GPT/block_3", True),
        ("*/block_[!0-3]", "GPT/block_3", False),
        ("*/block_?", "GPT/block_12", False),
        ("a.b/c+", "a.b/c+", True),
        ("a.b", "axb", False),
        ("x[", "x[", True),
    ],
)
def test_path_matches(pattern: str, path: str, expected: bool) -> None:
    assert path_matches(pattern, path) is expected


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("*/block_*", "GPT/block_0/attn/out", "GPT/block_0"),
        ("*/block_*", "Root/GPT/block_0", "Root/GPT/block_0"),
        ("*/block_*", "block_0/mlp", "block_0"),
        ("*/block_*", "block_0/block_1", "block_0"),
        ("block_*", "GPT/block_0", None),
        ("*/block_*", "GPT/head", None),
        ("*/block_*", "", None),
        ("**", "GPT", ""),
    ],
)
def test_prefix_matching(pattern: str, path: str, expected: str | None) -> None:
    assert prefix_matching(pattern, path) == expected


@given(_paths, st.lists(st.sampled_from(["GPT", "block_0", "mlp", "attn", "out"]), max_size=5))
def test_a_module_selects_all_inside_it(pattern: str, parts: list[str]) -> None:
    prefixes = ["/".join(parts[:n]) for n in range(len(parts) + 1)]
    selected = module(pattern).matches(Value(module=prefixes[-1]))
    assert selected == any(path_matches(pattern, p) for p in prefixes)


@pytest.mark.parametrize("pattern", ["", "/mlp", "mlp/", "a//b"])
def test_paths_with_empty_components_are_refused(pattern: str) -> None:
    with pytest.raises(PolicyError, match="hint: "):
        module(pattern)


def test_dots_see_batch_axes() -> None:
    def dot(batch: tuple[int, ...]) -> Value:
        numbers = (((1 + len(batch),), (len(batch),)), (batch, batch))
        return Value(primitives=("jit", "dot_general"), params={"dimension_numbers": numbers})

    assert dots.matches(dot(()))
    assert dots.matches(dot((0,)))
    assert dots_no_batch.matches(dot(()))
    assert not dots_no_batch.matches(dot((0,)))
    assert not dots_no_batch.matches(Value(primitives=("dot_general",)))
    for name in ("conv_general_dilated", "scaled_matmul_wrapper", "ragged_dot_general"):
        assert dots.matches(Value(primitives=(name,)))
    for batch, expected in ((1, True), (2, False)):
        operand = jax.ShapeDtypeStruct((batch, 8, 8), jnp.float32)
        value = Value(primitives=("scaled_matmul_wrapper",), in_avals=(operand,))
        assert dots_no_batch.matches(value) is expected


def test_collectives() -> None:
    for name in ("psum", "psum_invariant", "all_gather", "reduce_scatter", "all_to_all", "pmax"):
        assert collective.matches(Value(primitives=(name,)))
    for name in ("reduce_sum", "dot_general", "pbroadcast", "pvary"):
        assert not collective.matches(Value(primitives=(name,)))


def test_source_lines() -> None:
    value = Value(source=("/home/me/net/model.py", 130))
    for place in ("model.py", "net/model.py", "model.py:130", "model.py:120-140"):
        assert source(place).matches(value), place
    for place in ("odel.py", "other.py", "model.py:131", "model.py:131-140"):
        assert not source(place).matches(value), place
    assert source("net/model.py").matches(Value(source=("C:\\net\\model.py", 1)))


def test_where_shows_its_function() -> None:
    selector = where(_is_image)
    assert selector.matches(Value(shape=(1, 2, 3, 4)))
    assert selector == where(_is_image)
    assert repr(save(selector)).endswith("._is_image))")


def _is_image(value: Value) -> bool:
    return len(value.shape) == 4


@given(st.integers(0, 1 << 60))
def test_byte_sizes_survive_the_repr(n: int) -> None:
    assert _recipe.parse(repr(larger_than(n))) == save(larger_than(n))


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


# -- regular expressions ------------------------------------------------------------------------

_letters = st.sampled_from(["a", "b", ".", " ", r"\w", r"\d", "[ab]", "[^a]", "^", "$", r"\b", ""])
_repetitions = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{3,}", "*?", "{0,2}?"])
_looks = st.sampled_from(["(?=", "(?!", "(?:"])
_patterns = st.recursive(
    _letters | st.sampled_from(["(?<=a)", "(?<!b)"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("({0[0]}|{0[1]})".format),
        st.tuples(inner, _repetitions).map("({0[0]}){0[1]}".format),
        st.tuples(_looks, inner).map("{0[0]}{0[1]})".format),
    ),
    max_leaves=6,
)


@given(st.sampled_from(["", "(?i)"]), _patterns.filter(bool), st.text("abAB 1", max_size=6))
def test_names_match_as_re_matches_them(flags: str, pattern: str, name: str) -> None:
    expected = re.fullmatch(flags + pattern, name) is not None
    assert named_regex(flags + pattern).matches(Value(names=(name,))) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a+)+b", "(a|a)*b", "a?" * 30 + "a" * 30 + "b", "a*" * 100 + "b", "(.*.*.*)*=.*"),
        *("(" * 40 + "a" + ")*" * 40 + "b", "((a{9999}){9999}){9999}", "(?=(a+)+b)(.*a){30}"),
    ],
)
def test_no_pattern_takes_forever(pattern: str) -> None:
    """`re` takes longer than anybody waits for some of these."""
    assert not named_regex(pattern).matches(Value(names=("a" * 40,)))


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "said", "hinted"),
    [
        (lambda: save("dots"), "`save('dots')`", "save(named('dots'))"),
        (lambda: save(save(dots)), "a selector is wanted", "save(dots)"),
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
        (lambda: uniform(2, keep=None), "inside a region is wanted", "keep=save(dots)"),
        (lambda: uniform(2, keep=block(2)), "inside a region is wanted", "keep=save(dots)"),
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


# -- whatever stands for a policy --------------------------------------------------------------


def test_as_policy() -> None:
    assert as_policy(None) is None
    assert as_policy("none") is None
    assert as_policy(dots) == save(dots)
    assert as_policy(save(dots)) == save(dots)
    assert as_policy("dots") == save(dots)
    assert as_policy("recompute(primitive('max'))") == recompute(primitive("max"))
    saveable = jax.checkpoint_policies.nothing_saveable
    assert as_policy(saveable) == callable_policy(saveable)


def test_tables_from_configuration_files() -> None:
    assert as_policy({"policy": "uniform:2"}) == uniform(2)
    assert as_policy({"policy": "none"}) is None
    assert as_policy({"save": "a", "offload": "b"}) == save(named("a")) | offload(named("b"))
    table = {
        "recompute": {"primitive": ["max", "exp"]},
        "save": ["a", "b", {"module": "*/attn", "primitive": "tanh"}],
        "offload": {"module": ["*/mlp"]},
        "to": "unpinned_host",
    }
    assert as_policy(table) == recompute(primitive("max", "exp")) >> (
        save(named("a", "b") | module("*/attn") | primitive("tanh"))
        | offload(module("*/mlp"), to="unpinned_host")
    )
    assert as_policy({"recompute": {"name": "x"}}) == recompute(named("x"))
    assert as_policy({"save": []}) == save(nothing)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"sav": ["a"]}, "did you mean 'save'"),
        ({"save": {"modul": "*/mlp"}}, "did you mean 'module'"),
        ({}, "must have 'policy' alone"),
        ({"to": "pinned_host"}, "must have 'policy' alone"),
        ({"policy": "dots", "save": ["a"]}, "must have 'policy' alone"),
        ({"save": 3}, "3 selects no value"),
        ({"save": {}}, "selects no value"),
    ],
)
def test_tables_that_are_none(table: dict, said: str) -> None:
    with pytest.raises((PolicyError, UnknownNameError), match=said):
        as_policy(table)


# -- checks against a function -----------------------------------------------------------------

_MODEL = [
    Value(primitives=("dot_general",), names=("attn_out",), module="GPT/block_0/attn/out"),
    Value(primitives=("custom_jvp_call", "jit", "max"), module="GPT/block_0/mlp"),
    Value(primitives=("my_kernel",), names=("mlp_up",), module="GPT/block_0/mlp/up"),
]


@pytest.mark.parametrize(
    ("policy", "word", "near"),
    [
        (save(named("atn_out")), "atn_out", "'attn_out'"),
        (save(named("attn_*", "mlp_dwn*")), "mlp_dwn*", "'mlp_up'"),
        (recompute(~named("atn_out")), "atn_out", "'attn_out'"),
        (save(named_regex("atn_out")), "atn_out", "'attn_out'"),
        (save(dots) | offload(module("*/mpl")), "*/mpl", "'*/mlp'"),
        (offload(module("*/atn/out")), "*/atn/out", "'*/attn/out'"),
        (offload(module("*/mpl/**")), "*/mpl/**", "'*/mlp/**'"),
        (offload(module("GPT/block_0/atn")), "GPT/block_0/atn", "'GPT/block_0/attn'"),
        (save(primitive("dot_generl")), "dot_generl", "'dot_general'"),
        (save(primitive("my_kernl")), "my_kernl", "'my_kernel'"),
        (uniform(2, keep=named("atn_out")), "atn_out", "'attn_out'"),
        (segments("attn_out", "mlp_u"), "mlp_u", "'mlp_up'"),
    ],
)
def test_what_matches_nothing_is_an_error(policy: Policy, word: str, near: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        check(policy, _MODEL, call="policy(...)")
    assert f"named {word!r}" in caught.value.message
    assert "`policy(...)`" in caught.value.message
    assert near in (caught.value.hint or "")


@pytest.mark.parametrize(
    "policy",
    [
        save(named("attn_*", "mlp_up")),
        save(named("atn_out", strict=False)),
        save(module("*/atn", strict=False)),
        save(module("*/mlp", "**/attn", "GPT/**")),
        save(primitive("tanh", "conv_*", "my_kernel", "max")),
        save(larger_than("1GiB")),
        segments("attn_out"),
    ],
)
def test_what_exists_passes_the_check(policy: Policy) -> None:
    check(policy, iter(_MODEL), call="policy(...)")


def test_the_known_primitives_can_be_given() -> None:
    with pytest.raises(UnknownNameError):
        check(save(primitive("tanh")), _MODEL, primitives=["exp"])


def test_a_model_without_names_says_so() -> None:
    with pytest.raises(UnknownNameError, match="there is no checkpoint name here at all"):
        check(save(named("x")), [Value()])


def test_unmatched_rules() -> None:
    p = save(named("attn_out")) | offload(larger_than("1GiB")) | save(nothing)
    assert unmatched(p, iter(_MODEL)) == ["offload(larger_than('1GiB'))"]
    assert unmatched(uniform(2, keep=dots), _MODEL) == []


# -- structural policies -----------------------------------------------------------------------


def test_structural_policies_decide_as_what_they_keep() -> None:
    keep = save(dots) | offload(named("attn_out"))
    for p in (
        uniform(2, keep=keep),
        block(2, keep=keep),
        nested(keep=keep),
        segments("a", keep=keep),
    ):
        for v in _MODEL:
            assert p.decide(v) == keep.decide(v)
            assert p.matches(v) == keep.matches(v)
            assert p.rule(v) == keep.rule(v)
            assert p.destination(v) == keep.destination(v)
        assert list(p.leaves()) == [dots, named("attn_out")]
    assert uniform(2).decide(_MODEL[0]) is RECOMPUTE


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
