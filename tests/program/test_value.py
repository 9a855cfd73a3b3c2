"""Intermediate values, as the selectors of policies see them."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from shapes import struct

from remat_kit._program.program import Program
from remat_kit._program.value import aliases, offloaded_bytes, values

X = struct(4, 8)


def seen(fn, *args):
    return list(values(Program.of(jax.make_jaxpr(fn)(*args))))


def test_a_value_says_what_made_it_and_what_it_takes():
    def fn(x, w):
        with jax.named_scope("block"):
            return x @ w

    (value,) = seen(fn, X, struct(8, 16))
    assert value.primitives == ("dot_general",)
    assert (value.module, value.shape, value.dtype) == ("block", (4, 16), "float32")
    assert value.bytes == 4 * 16 * 4
    assert value.flops == 2 * 4 * 8 * 16
    assert value.source[0] == __file__
    assert [aval.shape for aval in value.in_avals] == [(4, 8), (8, 16)]


def test_a_call_has_the_primitives_inside_it():
    (value,) = (v for v in seen(jax.nn.relu, X) if v.primitives[0] == "custom_jvp_call")
    assert value.primitives[-1] == "max"
    assert value.primitive.name == "max"


def test_a_name_counts_for_the_value_that_it_is_given_to():
    found = seen(lambda x: jnp.exp(checkpoint_name(jnp.sin(x), "act")), X)
    assert [(v.primitives[0], v.names) for v in found] == [("sin", ("act",)), ("exp", ())]
    # An input has no operation that made it, so the operation that names it stands for it.
    named, _ = seen(lambda x: jnp.exp(checkpoint_name(x, "input")), X)
    assert named.names == ("input",)


def test_a_value_may_have_two_names():
    def fn(x):
        return checkpoint_name(checkpoint_name(jnp.sin(x), "first"), "second")

    eqns = Program.of(jax.make_jaxpr(fn)(X)).eqns
    assert aliases(eqns) == {eqns[0].outvars[0]: ("first", "second")}


def test_the_values_of_a_loop_are_among_them():
    def fn(x):
        with jax.named_scope("stack"):
            return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0]

    found = {v.primitives[0]: v for v in seen(fn, X)}
    assert found["sin"].module.startswith("stack")
    assert found["sin"].bytes == 4 * 8 * 4


@pytest.mark.parametrize("length", [1, 3])
def test_bytes_that_go_to_the_host_count_in_every_round(length):
    host = jax.memory.Space.Host

    def fn(x):
        put = lambda c, _: (jnp.sin(c), jax.device_put(c, host))  # noqa: E731
        return jax.lax.scan(put, x, length=length)

    assert offloaded_bytes(jax.make_jaxpr(fn)(X).jaxpr) == length * 4 * 8 * 4
    assert offloaded_bytes(jax.make_jaxpr(jnp.sin)(X).jaxpr) == 0
