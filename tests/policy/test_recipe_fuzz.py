"""Mutated recipes, policies, tables and plans: an error of ours or a policy, within a bound."""

from __future__ import annotations

import string

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from watchdog import watched

from remat_kit._errors import RematKitError
from remat_kit._policy import recipe as _recipe
from remat_kit._policy import schedule as _schedule
from remat_kit._policy.algebra import Policy
from remat_kit._policy.reading import as_policy
from remat_kit._policy.recipe import dumps, loads, parse

LINES = (
    "2 times (0:3 save 0.0; 3:4 plain)",
    "8:18 save 8.0 around (8:12 save 8.0 9.0; 12:18)",
    "18:19 plain loop 18 4*2 (0:2 save 0.0; 2:5 plain) 2*1 (0:5 offload in.1)",
)
RECIPES = (
    *map(dumps, _recipe.recipes()),
    dumps(parse(f"planned('joined=1 shapes=2 sin=3', {', '.join(map(repr, LINES))})")),
)
POLICIES = (
    *(r.text for r in _recipe.recipes() if not r.parameters),
    "save((named('a') | dots) - larger_than('1MiB')) >> offload(module('*/mlp/**'))",
    "uniform(2, keep=first(recompute(primitive('max')), save(source('m.py:1-9'))))",
    "save(cheap(1e3) & ~dtype('float*')) | callable_policy(jax.checkpoint_policies.dots_saveable)",
)
WORDS = (
    *(
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "'",
        '"',
        "'''",
        '"""',
        "\\",
        "\0",
        "\n",
        "#",
        "=",
        ".",
        ",",
        "*",
    ),
    *(
        "|",
        "&",
        "~",
        "-",
        ">>",
        ":",
        ";",
        "9" * 5000,
        "1e999",
        "inf",
        "None",
        "True",
        "lambda",
        "**x",
    ),
    *("save", "dots", "named", "plain", "around", "loop", "times", "in.0", "99999", "é", "\ud800"),
    *(
        "(" * 300,
        "[" * 300,
        "a." * 300,
        "~" * 300,
        "a|" * 300,
        "'a'," * 12_000,
        "[z-a]",
        "{9999999999}",
    ),
)


@st.composite
def mutated(draw, texts):
    """A text in which some pieces are left out, repeated, or replaced by words."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        stop = min(len(text), at + draw(st.integers(0, 12)))
        word = draw(st.sampled_from(WORDS) | st.text(string.printable, max_size=4))
        times = draw(st.sampled_from([0, 1, 1, 1, 2, 500]))
        text = text[:at] + word * (times if len(word) < 100 else min(times, 1)) + text[stop:]
    return text


def attempt(read, given):
    """Read something, which gives a value or an error of ours with a hint, and ends."""
    refusal = found = None
    try:
        with watched():
            found = read(given)
    except RematKitError as error:
        refusal = error
    assert refusal is None or refusal.hint
    assert len(str(refusal)) < 5000
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::SyntaxWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated(RECIPES))
def test_recipes(text):
    attempt(loads, text)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::SyntaxWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated(POLICIES))
def test_policies(text):
    found = attempt(parse, text)
    if isinstance(found, Policy):
        assert parse(repr(found)) == found
    attempt(as_policy, text)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated(LINES))
def test_lines_of_plans(text):
    found = attempt(_schedule.parse, text)
    assert found is None or _schedule.lines(found)


_entries = st.recursive(
    st.none()
    | st.integers()
    | st.floats()
    | st.binary(max_size=2)
    | st.text(max_size=4)
    | st.sampled_from(["attn_*", "*/mlp", "[z-a]", "dots"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "module", "primitive", "save", "policy", "to"])
            | st.integers(),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from(["policy", "save", "offload", "recompute", "to"]) | st.text(max_size=3),
        _entries,
        max_size=3,
    )
)
def test_tables(table):
    attempt(as_policy, table)


BIG = 2**20 - 100


@pytest.mark.parametrize(
    "text",
    [
        *("\n" * BIG, " " * BIG, "#" * BIG, "#\n" * (BIG // 2), '"' * BIG, "'" * BIG, "." * BIG),
        *('a="""' + '\\"""' * (BIG // 4 - 2), 'a="' + "\\" * (BIG - 3), "a=[" + "," * (BIG - 3)),
        *("a" + " .a" * (BIG // 3 - 1), "[a]\n" * (BIG // 4), "[[a]]\n" * 9999, "a={" * (BIG // 3)),
        *("policy='" + "x" * (BIG - 9) + "'", "a=" + "9" * (BIG - 2), "x = 1 #" + "\ud800" * 9999),
        "\n".join(".".join([f"k{i}", *["a"] * 99]) + "=1" for i in range(99)),
    ],
    ids=lambda text: repr(text[:8]),
)
def test_large_recipes_are_refused_at_once(text):
    assert attempt(loads, text) is None


@pytest.mark.parametrize(
    "text",
    [
        *("(" * BIG, "~" * BIG, "-" * BIG, "not " * (BIG // 4), "lambda:" * (BIG // 7), "'" * BIG),
        *("dots|" * (BIG // 5) + "dots", "dots>>" * 4000 + "dots", "a" + ".a" * (BIG // 2 - 1)),
        *("dots" + "()" * 5000, "dots" + "[1]" * 3000, "await " * 9000, "2**" * 9000 + "2"),
        *("f'" + "{" * 5000 + "'", "named('" + "*a" * 5000 + "')", "module('" + "*a" * 5000 + "')"),
        *("named_regex('" + "(" * 5000 + "')", "named_regex('a{9999999999}')", "module('[z-a]')"),
        *("larger_than('" + "9" * 900 + "GiB')", "larger_than(1e400)", "cheap(1" + "0" * 400 + ")"),
        *("uniform(" + "9" * 900 + ")", "source('m.py:" + "9" * 5000 + "')", "cheap(1e999)"),
    ],
    ids=lambda text: repr(text[:12]),
)
def test_large_policies_are_read_or_refused_at_once(text):
    attempt(parse, text)


def test_patterns_take_no_exponential_time():
    from remat_kit._policy.patterns import path_matches, prefix_matching

    with watched():
        assert not path_matches("*/" + "*a" * 30 + "b", "Net/" + "a" * 60)
        assert not path_matches("**/" * 30 + "b", "a/" * 30 + "a")
        assert prefix_matching("*/" + "*a" * 30 + "*", "Net/" + "a" * 60) == "Net/" + "a" * 60
    assert path_matches("*/b*_[0-9]?", "Net/block_12")
    assert path_matches("*/*lo*k*", "Net/block_12")
    assert not path_matches("*/*lo*k", "Net/block_12")
