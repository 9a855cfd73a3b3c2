"""Products of partitioned programs on eight CPU devices; `test_mesh_flops.py` runs it.

A process of its own, because XLA must be told of eight devices before JAX starts. It prints, for
each program, sharding and policy, the FLOPs of the products of the traced gradient on one device,
and those in the partitioned program that XLA compiled.
"""

import json
import os
import sys

DEVICES = 8

if __name__ == "__main__":  # pytest imports this file too, for its docstrings
    flag = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import remat_kit  # noqa: E402
from remat_kit._compiled import hlo  # noqa: E402
from remat_kit._compiled.roofline import estimate  # noqa: E402
from remat_kit._program.steps.losses import gradients_of  # noqa: E402

SHARDINGS = {  # of the weights' two dimensions, and of the batch
    "data parallel": (P(), P(("data", "model"))),
    "fully sharded": (P("data"), P(("data", "model"))),
    "tensor parallel": (P(None, "model"), P("data")),
    "both": (P("data", "model"), P("data")),
    "rows": (P("model"), P("data")),
    "replicated": (P(), P()),
}
POLICIES = (None, "nothing")


def mesh(kind=AxisType.Auto):
    devices = np.array(jax.devices()[:DEVICES]).reshape(4, 2)
    return Mesh(devices, ("data", "model"), axis_types=(kind,) * 2)


# -- losses of two weights (64, 64) and a batch (32, 16, 64)


def perceptron(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def scanned(weights, x):
    def body(x, w):
        return jnp.tanh(x @ w) @ w.T, None

    return jnp.mean(jax.lax.scan(body, x, jnp.stack(weights))[0] ** 2)


def attention(weights, x):
    q, k = (jnp.reshape(x @ w, (*x.shape[:2], 4, 16)) for w in weights)
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.mean(jnp.einsum("bhqk,bkhd->bqhd", scores, q) ** 2)


def convolution(weights, x):
    kernel = jnp.stack(weights)  # two pixels wide
    for _ in range(2):
        x = jnp.sin(jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", None, None, _LAYOUT))
    return jnp.mean(x**2)


_LAYOUT = ("NWC", "WIO", "NWC")


@jax.custom_vjp
def _scaled(x, w):
    return jnp.sin(x @ w)


def _scaled_forward(x, w):
    y = x @ w
    return jnp.sin(y), (x, w, y)


def _scaled_backward(kept, ct):
    x, w, y = kept
    dy = ct * jnp.cos(y)
    return dy @ w.T, jnp.einsum("bsi,bsj->ij", x, dy)


_scaled.defvjp(_scaled_forward, _scaled_backward)


def with_rule(weights, x):
    for w in weights:
        x = _scaled(x, w)
    return jnp.mean(x**2)


def called_twice(weights, x):
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    return jnp.mean(layer(layer(x, weights[0]), weights[1]) ** 2)


def branches(weights, x):
    first, second = weights
    x = jax.lax.cond(x[0, 0, 0] > 0, lambda: jnp.tanh(x @ first) @ second, lambda: x)
    return jnp.mean((x @ second) ** 2)


def constrained(weights, x):
    first, second = weights
    h = jax.lax.with_sharding_constraint(x @ first, NamedSharding(mesh(), P("data", None, "model")))
    h = jax.lax.with_sharding_constraint(jnp.sin(h) @ second, NamedSharding(mesh(), P("data")))
    return jnp.mean(h**2)


def mapped(weights, x):
    """The products in `shard_map` are those of one device; the ones outside are not."""

    def local(x, first):
        return jnp.tanh(x @ first) @ first.T

    specs = {"in_specs": (P("data"), P(None, "model")), "out_specs": P("data")}
    y = jax.shard_map(lambda x, w: jax.lax.psum(local(x, w), "model"), mesh=mesh(), **specs)(
        x, weights[0]
    )
    return jnp.mean(jnp.sin(y @ weights[1]) ** 2)


def partly_mapped(weights, x):
    """A `shard_map` over one axis leaves the other one to the partitioner."""

    def local(x, w):
        return jax.lax.psum(jnp.sum(jnp.tanh(x @ w) ** 2), "data")

    specs = {"in_specs": (P("data"), P()), "out_specs": P()}
    total = jax.shard_map(local, mesh=mesh(), axis_names={"data"}, **specs)(x, weights[0])
    return total + jnp.mean((x @ weights[1]) ** 2)


PROGRAMS = {
    fn.__name__: fn
    for fn in (
        *(perceptron, scanned, attention, convolution, with_rule, called_twice, branches),
        *(constrained, mapped, partly_mapped),
    )
}


def arguments(sharding):
    weights, batch = SHARDINGS[sharding]

    def struct(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh(), spec))

    return [struct((64, 64), weights)] * 2, struct((32, 16, 64), batch)


def compiled_flops(fn, args):
    """Return the FLOPs of the products of a compiled gradient, loops in full."""
    text = jax.jit(jax.value_and_grad(fn)).lower(*args).compile().as_text()
    return estimate(hlo.parse(text), remat_kit.target("cpu"), {}).total.flops


def traced_flops(fn, args):
    """Return those of the traced gradient, and that gradient."""
    _, parts = gradients_of(fn, args, call="inspect")
    gradient = parts[0].gradient
    products = ("dot_general", "conv_general_dilated")
    return sum(op.flops for op in gradient.ops() if op.primitive in products), gradient


def found(name, sharding, policy):
    fn, args = PROGRAMS[name], arguments(sharding)
    fn = fn if policy is None else remat_kit.policy(policy)(fn)
    ours, gradient = traced_flops(fn, args)
    return {
        "compiled": compiled_flops(fn, args),
        "traced": ours,
        "unplaced": gradient.unplaced,
        "estimated": gradient.estimated,
    }


if __name__ == "__main__":
    cases = json.loads(sys.argv[1])
    print(json.dumps([found(*case) for case in cases]))
