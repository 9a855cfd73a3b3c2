"""Which values a collective makes, from the shardings of operands and results."""

import doctest
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from remat_kit._program import communication
from remat_kit._program.communication import Known, exchange, key_of
from remat_kit._program.program import GATHERED_PARAMETER, MADE_BY_COLLECTIVE, Program
from remat_kit._program.sharding import ValueShard

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
SIZES = {"data": 4, "model": 2}


def test_examples():
    assert doctest.testmod(communication).failed == 0


def product(x, w, out):
    """Return what is exchanged for a product of 16 by 8 and 8 by 8, split over ``data``."""
    (dot,) = jax.make_jaxpr(jnp.dot)(jnp.ones((16, 8)), jnp.ones((8, 8))).eqns
    shapes = ((16, 8), (8, 8), (16, 8))
    x, w, out = (
        ValueShard(tuple(n // (4 if a else 1) for n, a in zip(s, axes, strict=True)), axes)
        for s, axes in zip(shapes, (x, w, out), strict=True)
    )
    return exchange(dot, [x, w], [out], SIZES)


WHOLE, ROWS, COLUMNS = ((), ()), (("data",), ()), ((), ("data",))


@pytest.mark.parametrize(
    ("x", "w", "out", "gathered", "summed"),
    [
        (ROWS, WHOLE, ROWS, (False, False), False),
        (ROWS, ROWS, ROWS, (False, True), False),
        (COLUMNS, ROWS, WHOLE, (False, False), True),
        (WHOLE, COLUMNS, COLUMNS, (False, False), False),
        (WHOLE, WHOLE, WHOLE, (False, False), False),
    ],
)
def test_products(x, w, out, gathered, summed):
    found = product(x, w, out)
    assert tuple(axes is not None for axes in found.whole) == gathered
    assert found.summed == (summed,)


def program(fn, *shapes):
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return Program.of(jax.make_jaxpr(fn)(*args))


def names(found):
    return [e.params["name"] for e in found.eqns if e.primitive.name == "name"]


def known(flat, *splits):
    """Return what is known of the inputs of a program; each split is that of one call of it."""
    key = key_of(flat.base, [v.aval for v in flat.invars])
    shardings = {
        tuple(None if spec is None else NamedSharding(MESH, spec) for spec in split)
        for split in splits
    }
    return Known({key: shardings})


def layer(w, x):
    return jnp.tanh(x @ w)


def test_a_gathered_parameter_has_a_name():
    flat = program(layer, (8, 8), (16, 8))
    found = known(flat, (P("data"), P("data"))).marked(flat, 2)
    assert names(found) == [GATHERED_PARAMETER]


def test_a_product_that_is_added_up_has_a_name():
    flat = program(layer, (8, 8), (16, 8))
    found = known(flat, (P("model"), P("data", "model"))).marked(flat, 2)
    assert names(found) == [MADE_BY_COLLECTIVE]


def test_the_body_of_a_scan_has_names():
    def layers(ws, x):
        return jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0]

    flat = program(layers, (3, 8, 8), (16, 8))
    found = known(flat, (P(None, "data"), P("data"))).marked(flat, 2)
    (scan,) = [e for e in found.eqns if e.primitive.name == "scan"]
    assert names(Program.of(scan.params["jaxpr"])) == [GATHERED_PARAMETER]


def test_programs_that_are_not_split_stay():
    flat = program(layer, (8, 8), (16, 8))
    assert known(flat, (None, None)).marked(flat, 2) is flat


def test_calls_that_differ_in_their_shardings_alone_are_unknown():
    flat = program(layer, (8, 8), (16, 8))
    assert known(flat, (P("data"), P("data")), (P(), P("data"))).marked(flat, 2) is None
    other = program(layer, (8, 4), (16, 8))
    assert known(flat, (P("data"), P("data"))).marked(other, 2) is None


def test_a_split_into_unequal_parts_does_not_hide_the_others():
    def masked(w, x, mask):
        return layer(w, x) + jnp.sum(mask)

    flat = program(masked, (8, 8), (16, 8), (3, 3))
    found = known(flat, (P("data"), P("data"), P("model", "data"))).marked(flat, 3)
    assert names(found) == [GATHERED_PARAMETER]


# -- the inputs of regions ------------------------------------------------------------------------


def activations(fn, *args):
    """Return, for each region that ``fn`` has behind a barrier, which inputs it computes."""
    collector = communication.Collector()

    def block(w, x):
        flat = Program.of(jax.make_jaxpr(layer)(w, x))
        return communication.evaluate(*collector.barred(flat, [w, x], ()))[0]

    traced = jax.jit(functools.partial(fn, block)).trace(*args)
    found = collector.known(traced)
    key = key_of((), [jax.typeof(a) for a in (W, X)])
    return [tuple(not moved for moved in flags) for flags in found.arguments[key]]


W, X = jnp.ones((8, 8)), jnp.ones((16, 8))


def test_arguments_are_not_activations():
    assert activations(lambda block, w, x: block(w, x), W, X) == [(False, False)]
    assert activations(lambda block, w, x: block(w.T, jnp.sin(x)), W, X) == [(False, True)]
    assert activations(lambda block, w, x: block(w * 2, x), W, X) == [(True, False)]


def test_calls_that_cannot_be_told_apart_have_all_activations_of_any():
    found = activations(lambda block, w, x: block(w, block(w, x)), W, X)
    assert sorted(found) == [(False, False), (False, True)]
    shared = activations(lambda block, w, x: (b := jax.jit(block))(w, b(w, x)), W, X)
    assert shared == [(False, True)]


@pytest.mark.parametrize("wrap", [jax.grad, lambda f: jax.jit(jax.grad(jax.jit(f)))])
def test_the_backward_pass_does_not_count(wrap):
    def step(block, w, x):
        return wrap(lambda w: jnp.sum(block(w, jnp.sin(x))))(w)

    assert activations(step, W, X) == [(False, True)]


def test_a_scan_over_layers_and_a_scan_over_steps():
    def layers(block, ws, x):
        return jax.lax.scan(lambda x, w: (block(w, x), None), x, ws)

    assert activations(layers, W[None], X) == [(False, True)]

    def steps(block, w, x):
        def step(w, _):
            return w - jax.grad(lambda w: jnp.sum(block(w, jnp.sin(x))))(w), None

        return jax.lax.scan(step, w, length=3)

    assert activations(steps, W, X) == [(False, True)]


def test_a_branch_of_a_conditional():
    def either(block, w, x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: block(w, x), lambda x: x, jnp.sin(x))

    assert activations(either, W, X) == [(False, True)]


def test_how_the_activations_are_split():
    data = NamedSharding(MESH, P("data"))
    key, avals = key_of(("net",), [jax.typeof(W), jax.typeof(X)]), [jax.typeof(W), jax.typeof(X)]
    found = Known({key: {(None, data)}}, {key: {(True, False)}})
    assert found.activations(("net",), avals) == [None, (("data",), ())]
    assert found.has_activations
    assert found.mesh == MESH
    assert found.activations((), avals) is None
    assert not Known({key: {(None, data)}}, {key: {(True, True)}}).has_activations
    assert Known({key: {(None, None)}}).mesh is None
    several = Known({key: {(None, data), (None, None)}}, {key: {(True, False)}})
    assert several.activations(("net",), avals) is None
