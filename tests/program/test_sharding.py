"""Shapes on one device, by Shardy's propagation, against the shards of arrays that XLA made."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from remat_kit._program.sharding import result_shards

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def struct(*shape, spec=None):
    place = None if spec is None else NamedSharding(MESH, spec)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)


def test_programs_for_one_device_have_no_shards():
    assert result_shards(lambda x: [x @ x], [struct(8, 8)]) is None


def constrained(x, w):
    return [jax.lax.with_sharding_constraint(x @ w, NamedSharding(MESH, P("data", "model")))]


def mapped(x, w):
    def local(x, w):
        return jax.lax.psum(x @ w, "model")

    specs = {"in_specs": (P("data", "model"), P("model")), "out_specs": P("data")}
    return [jax.shard_map(local, mesh=MESH, **specs)(x, w)]


WHOLE = struct(16, 8, spec=P())  # JAX asks for an argument that names the devices
ROWS, COLUMNS = struct(16, 8, spec=P("data")), struct(8, 6, spec=P(None, "model"))
CASES = {
    "product": (lambda x, w: [x @ w], ROWS, COLUMNS, (4, 3)),
    "reduced": (lambda x, w: [jnp.sum(x @ w, axis=0)], ROWS, COLUMNS, (3,)),
    "constraint": (constrained, WHOLE, struct(8, 6), (4, 3)),
    "shard_map": (mapped, WHOLE, struct(8, 6), (4, 6)),
    "two axes": (lambda x, w: [jnp.sin(x)], struct(16, 8, spec=P(("data", "model"))), ROWS, (2, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_shards_of_results(name):
    fn, x, w, shard = CASES[name]
    assert result_shards(fn, [x, w]) == [shard]


def test_loops_hand_their_shardings_on():
    def scanned(x, ws):
        carry, ys = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, ws)
        return [carry, ys]

    assert result_shards(scanned, [ROWS, struct(3, 8, 8)]) == [(4, 8), (3, 4, 8)]


def test_shards_are_those_of_the_arrays():
    code = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from remat_kit._program.sharding import result_shards
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
x = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("data")))
w = jax.device_put(jnp.ones((8, 6)), NamedSharding(mesh, P(None, "model")))
fn = lambda x, w: [x @ w, jnp.tanh(x), (x @ w).T]
structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in (x, w)]
theirs = [y.sharding.shard_shape(y.shape) for y in jax.jit(fn)(x, w)]
assert result_shards(fn, structs) == theirs, theirs
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **flags, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
