"""Which values a collective makes, from the shardings of operands and results."""

import doctest

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
