"""What a lowered program is known by."""

import jax
import jax.numpy as jnp
import pytest
from shapes import struct

from remat_kit._chip import compile as _compile
from remat_kit._chip.compile import compile_program, measure


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_KIT_CACHE", str(tmp_path / "cache"))


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w))


ARGS = (struct(64, 64), struct(256, 64))


def test_who_asks_does_not_matter_but_the_program_does():
    def through_another_function():
        return compile_program(loss, ARGS, "cpu", call="inspect").memory

    assert not measure(loss, *ARGS, target="cpu").cached
    assert through_another_function().cached
    assert not measure(lambda w, x: loss(w, x) * 2, *ARGS, target="cpu").cached
    assert not measure(loss, ARGS[0], struct(128, 64), target="cpu").cached
    assert not measure(loss, *ARGS, target="cpu", donate_argnums=0).cached
    named = jax.named_scope("renamed")(loss)
    assert not measure(named, *ARGS, target="cpu").cached


def test_flags_of_the_compiler_are_part_of_the_key(monkeypatch):
    assert not measure(loss, *ARGS, target="cpu").cached
    request = {"platform": "cpu", "options": {}}
    before = _compile._key(request, "program")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert _compile._key(request, "program") != before
    assert _compile._key({**request, "options": {"a": "b"}}, "program") != before
