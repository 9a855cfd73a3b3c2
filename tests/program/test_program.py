"""Flat programs: calls are spliced in, regions too where asked, and values stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_kit._program.program import (
    Program,
    bodies,
    evaluate,
    flat_program,
    part,
    producers,
    without_dead,
    without_regions,
)

X = jnp.linspace(-1.0, 1.0, 8)


@jax.jit
def scaled(x):
    with jax.named_scope("inner"):
        return jnp.sin(x) * np.arange(8.0, dtype=np.float32)


def called(x):
    with jax.named_scope("outer"):
        return jnp.sum(scaled(x))


def in_a_region(x):
    with jax.named_scope("block"):
        return jnp.sum(jax.checkpoint(lambda x: jnp.exp(jnp.tanh(x)))(x))


def primitives(program):
    return [eqn.primitive.name for eqn in program.eqns]


def test_calls_are_spliced_in_with_their_paths_and_values():
    program = Program.of(jax.make_jaxpr(called)(X))
    assert primitives(program) == ["sin", "mul", "reduce_sum"]
    assert program.path(program.eqns[0]) == ("outer", "inner")
    assert program.path(program.eqns[2]) == ("outer",)
    np.testing.assert_array_equal(evaluate(program, [X])[0], called(X))


def test_regions_are_spliced_into_the_program_of_a_plan():
    closed = jax.make_jaxpr(in_a_region)(X)
    assert len(Program.of(closed).eqns) == 2
    flat = flat_program(closed)
    assert primitives(flat) == ["tanh", "exp", "reduce_sum"]
    assert flat.path(flat.eqns[0])[0] == "block"
    np.testing.assert_allclose(evaluate(flat, [X])[0], in_a_region(X), rtol=1e-6)


def test_a_region_that_keeps_everything_computes_nothing_twice():
    closed = jax.make_jaxpr(in_a_region)(X)
    kept = Program.of(without_regions(closed))

    def count(program):
        gradient = jax.make_jaxpr(jax.grad(lambda x: evaluate(program, [x])[0]))(X)
        return str(gradient).count("= tanh")

    assert count(Program.of(closed)) == 2
    assert count(kept) == 1


def test_operations_that_nothing_depends_on_are_dropped():
    def wasteful(x):
        jnp.cos(x)
        jax.debug.callback(lambda value: None, jnp.exp(x))
        return jnp.sum(x)

    program = Program.of(jax.make_jaxpr(wasteful)(X))
    kept = primitives(without_dead(program))
    assert "cos" in primitives(program)
    assert kept == [name for name in primitives(program) if name != "cos"]


def test_a_part_has_what_it_reads_and_what_is_wanted():
    program = Program.of(jax.make_jaxpr(lambda x: jnp.sin(jnp.cos(jnp.tanh(x))))(X))
    tanh, cos, sin = program.eqns
    middle = part([cos, sin], {cos.outvars[0]}, ())
    assert middle.invars == tuple(tanh.outvars)
    assert middle.outvars == tuple(cos.outvars)


@pytest.mark.parametrize(
    ("fn", "kinds"),
    [
        (lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=5)[0], [("loop", 5)]),
        (lambda x: jax.lax.while_loop(lambda x: x[0] < 1, jnp.exp, x), [("while", 1)] * 2),
        (lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), [("branch", 1)] * 2),
        (scaled, [("call", 1)]),
        (jax.nn.relu, [("rule", 1)]),
    ],
    ids=["scan", "while", "cond", "jit", "custom_jvp"],
)
def test_bodies_say_how_often_they_run(fn, kinds):
    eqn = jax.make_jaxpr(fn)(X).eqns[-1]
    assert [(body.kind, body.times) for body in bodies(eqn)] == kinds


def test_a_value_is_known_by_the_calls_around_it():
    (eqn,) = jax.make_jaxpr(jax.nn.relu)(X).eqns
    names = [inner.primitive.name for inner in producers(eqn)]
    assert names[0] == "custom_jvp_call"
    assert names[-1] == "max"
