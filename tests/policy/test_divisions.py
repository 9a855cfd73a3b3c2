"""The text of segments in pieces: written, read, and checked against a program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_kit import PolicyError
from remat_kit._policy.divisions import Division, is_division, lines, parse, read, text_of
from remat_kit._program.program import flat_program

small = st.integers(0, 99)


@st.composite
def divisions(draw: st.DrawFn) -> Division:
    start, size = draw(small), draw(st.integers(1, 20))
    of = draw(st.integers(start, start + size - 1)), draw(st.integers(0, 2))
    loop = tuple(draw(st.lists(small, max_size=2)))
    return Division(start, start + size, draw(st.integers(2, 64)), of, draw(small), loop)


@given(st.lists(divisions(), max_size=6, unique=True), st.integers(1, 4), st.integers(20, 300))
def test_what_is_written_is_read(some, times, step):
    every = {d.shifted(k * step) for d in some for k in range(times)}
    texts = lines(sorted(every, key=lambda d: d.place))
    assert all(map(is_division, texts))
    found = [d for text in texts for d in parse(text)]
    assert len(found) == len(every)
    assert set(found) == every


def test_equal_blocks_share_a_line():
    first = Division(3, 20, 4, (9, 0), 1)
    assert lines([first.shifted(k * 30) for k in range(12)]) == (
        f"12 times ({text_of(first)}) every 30",
    )


@pytest.mark.parametrize(
    "text",
    [
        "3:20 pieces 4",
        "3:20 pieces 4 of 9 axis 1",
        "3:20 pieces 4 of 9.0 axis 1 more",
        "3:20 pieces -4 of 9.0 axis 1",
        "0 times (3:20 pieces 4 of 9.0 axis 1) every 3",
        "99999 times (3:20 pieces 4 of 9.0 axis 1) every 3",
        "2 times (3:20 pieces 4 of 9.0 axis 1) every 0",
        "loop (3:20 pieces 4 of 9.0 axis 1)",
        "loop 1 " * 40 + "(3:20 pieces 4 of 9.0 axis 1)",
        "3:20 pieces 99999999999 of 9.0 axis 1",
        "٣:20 pieces 4 of 9.0 axis 1",
    ],
)
def test_what_is_no_division(text):
    with pytest.raises(PolicyError, match="does not say which equations run in pieces"):
        parse(text)


def _program():
    def loss(w, x):
        x = jnp.tanh(x @ w)

        def layer(x, w):
            return jnp.sin(x @ w), None

        return jnp.sum(jax.lax.scan(layer, x, jnp.stack([w, w]))[0])

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 4), (8, 4))]
    return flat_program(jax.make_jaxpr(loss)(*shapes))


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["0:90 pieces 2 of 0.0 axis 0"], "only"),
        (["0:2 pieces 2 of 5.0 axis 0"], "outside of the segment"),
        (["0:2 pieces 2 of 1.3 axis 0"], "has no output 3"),
        (["0:2 pieces 2 of 1.0 axis 2"], "no axis 2"),
        (["0:2 pieces 9 of 1.0 axis 0"], "8 entries makes no 9 pieces"),
        (["0:2 pieces 1 of 1.0 axis 0"], "makes no 1 pieces"),
        (["0:2 pieces 2 of 1.0 axis 0", "1:3 pieces 2 of 2.0 axis 0"], "overlaps"),
        (["loop 1 (0:2 pieces 2 of 1.0 axis 0)"], "tanh is no scan"),
        (["loop 77 (0:2 pieces 2 of 1.0 axis 0)"], "only"),
    ],
)
def test_divisions_that_do_not_fit_a_program(texts, reason):
    with pytest.raises(PolicyError, match=reason) as caught:
        read(texts, _program(), call="policy(p)")
    assert "`policy(p)`" in caught.value.message


def test_divisions_in_the_body_of_a_scan():
    program = _program()
    (at,) = (i for i, e in enumerate(program.eqns) if e.primitive.name == "scan")
    text = f"loop {at} (0:2 pieces 2 of 0.0 axis 0)"
    found = read([text, "0:2 pieces 4 of 1.0 axis 0"], program, call="policy(p)")
    assert found == (Division(0, 2, 4, (1, 0), 0), Division(0, 2, 2, (0, 0), 0, (at,)))
    around = f"0:{at + 1} pieces 2 of 0.0 axis 0"
    with pytest.raises(PolicyError, match="lies inside of it"):
        read([text, around], program, call="policy(p)")
