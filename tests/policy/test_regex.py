"""Regular expressions that take linear time."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from remat_kit._policy.selectors import (
    named_regex,
)
from remat_kit._program.value import Value

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
