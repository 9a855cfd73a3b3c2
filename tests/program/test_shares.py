"""What one device does of the operations of a program, at any depth."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from remat_kit._program.shares import Labelled

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


COPIED = P()


def struct(*shape, spec=COPIED):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, spec))


def products(closed, *structs):
    """Return the share of each product, in the order of the program."""
    labelled = Labelled(closed)
    shares = labelled.shares(labelled.function, structs)
    found = []

    def look(jaxpr, around):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found.append(shares.of((*around, eqn)).work)
            for value in eqn.params.values():
                if hasattr(value, "eqns"):
                    look(value, (*around, eqn))

    look(closed, ())
    return found


def test_a_jitted_function_has_a_share_for_each_of_its_calls():
    layer = jax.jit(lambda x, w: x @ w)
    args = struct(8, 8, spec=P("data")), struct(8, 8, spec=P(None, "model"))
    closed = jax.make_jaxpr(lambda x, w: (layer(x, w), layer(w.T, w)))(*args)
    first, second = products(closed, *args)
    assert first == 1 / 8
    assert second > first


def test_a_product_in_a_scan_is_split_as_the_slices_of_its_inputs_are():
    args = struct(8, 8, spec=P("data")), struct(3, 8, 8, spec=P(None, None, "model"))

    def scanned(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ w) @ w.T, None), x, ws)[0]

    assert products(jax.make_jaxpr(scanned)(*args), *args) == [1 / 8, 1 / 8]


def test_inside_of_shard_map_a_device_does_the_work_of_its_shapes():
    args = struct(8, 8, spec=P("data")), struct(8, 8)
    specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
    local = jax.shard_map(lambda x, w: x @ w, mesh=MESH, **specs)
    closed = jax.make_jaxpr(lambda x, w: local(x, w) @ w)(*args)
    inside, outside = products(closed, *args)
    assert (inside, outside) == (1.0, 1 / 4)


def test_a_program_may_have_arrays_without_elements():
    args = struct(8, 8, spec=P("data")), struct(0, 8)
    closed = jax.make_jaxpr(lambda x, empty: jnp.sum(empty @ x) + jnp.sum(x @ x))(*args)
    _, product = products(closed, *args)
    assert product == 1 / 4


def test_a_program_for_one_device_has_no_shares():
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    labelled = Labelled(jax.make_jaxpr(jnp.dot)(x, x))
    assert labelled.shares(labelled.function, [x, x]) is None
