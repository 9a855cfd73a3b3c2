"""Plans of partitioned losses and steps, run on eight CPU devices; `test_mesh_plans.py` runs it.

A process of its own, because XLA must be told of eight devices before JAX starts. It prints, for
each program and each sharding, what the plan says and what the compiled program says.
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
import optax  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import remat_kit  # noqa: E402

# XLA:CPU of JAX 0.10.2 brings some of the unrolled losses to no more than 0.8.
BUDGETS = (0.8, 0.6, "min") if jax.__version_info__ >= (0, 11) else ("min",)
SHARDINGS = {  # of the weights and of the batch
    "data parallel": (P(), P(("data", "model"))),
    "fully sharded": (P("data"), P(("data", "model"))),
    "tensor parallel": (P(None, "model"), P("data")),
}
LOSSES = ("unrolled", "scanned", "explicit")
NAMES = (
    *(f"{kind}, {sharding}" for kind in LOSSES[:2] for sharding in SHARDINGS),
    "step, fully sharded",
    "jitted step, tensor parallel",
    "accumulating step, data parallel",
    "accumulating step, fully sharded",
    "explicit, data parallel",
    "explicit step, data parallel",
    "mapped step, fully sharded",
    "checked mapped step, data parallel",
)
ADAM = optax.adam(1e-3)
PARTS = 2  # of the batch, whose gradients a step accumulates


def layer(x, w):
    return x + jnp.sin(jnp.tanh(x @ w)) @ w.T


def unrolled(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = layer(x, w)
    return jnp.mean(x**2)


def scanned(weights, x):
    def body(x, w):
        return layer(x, w), None

    return jnp.mean(jax.lax.scan(body, x, weights)[0] ** 2)


def mesh(kind=""):
    devices = np.array(jax.devices()[:DEVICES]).reshape(4, 2)
    types = AxisType.Explicit if kind.startswith("explicit") else AxisType.Auto
    return Mesh(devices, ("data", "model"), axis_types=(types,) * 2)


def arguments(kind, weights_spec, batch_spec):
    draw = np.random.default_rng(0)
    layers = [draw.standard_normal((64, 256)).astype(np.float32) / 16 for _ in range(6)]
    x = draw.standard_normal((4096, 64)).astype(np.float32)
    if kind == "scanned":
        stacked = NamedSharding(mesh(kind), P(None, *weights_spec))
        weights = jax.device_put(np.stack(layers), stacked)
    else:
        weights = [jax.device_put(w, NamedSharding(mesh(kind), weights_spec)) for w in layers]
    return weights, jax.device_put(x, NamedSharding(mesh(kind), batch_spec))


# -- steps ------------------------------------------------------------------------------------


def mapped_gradients(kind, weights, x, weights_spec, batch_spec):
    """Return the value and the gradient of each device's part, added up by hand."""
    axes = tuple(name for names in batch_spec for name in (names if names else ()))

    def of_device(weights, x):
        def of_part(weights, x):
            if weights_spec:
                weights = [jax.lax.all_gather(w, "data", axis=0, tiled=True) for w in weights]
            return unrolled(weights, x) / DEVICES

        value, found = jax.value_and_grad(of_part)(weights, x)
        # The derivative of a gather has added the parts of "data" up already.
        rest = tuple(axis for axis in axes if axis not in weights_spec)
        if kind == "mapped step":
            found = jax.lax.psum(found, rest)
        return jax.lax.psum(value, axes), found

    return jax.shard_map(
        of_device,
        mesh=mesh(),
        in_specs=([weights_spec] * len(weights), batch_spec),
        out_specs=(P(), [weights_spec] * len(weights)),
        check_vma=kind != "mapped step",
    )(weights, x)


def gradients(kind, weights, x, weights_spec, batch_spec):
    if kind.endswith("mapped step"):
        return mapped_gradients(kind, weights, x, weights_spec, batch_spec)
    if kind != "accumulating step":
        return jax.value_and_grad(unrolled)(weights, x)

    def accumulate(total, part):
        # Without it, the partitioner splits the parts over the devices, and not their rows.
        part = jax.lax.with_sharding_constraint(part, NamedSharding(mesh(), batch_spec))
        found = jax.value_and_grad(unrolled)(weights, part)
        return jax.tree.map(jnp.add, total, found), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights)
    return jax.lax.scan(accumulate, zeros, x.reshape(PARTS, -1, x.shape[-1]))[0]


def step_of(kind, weights_spec, batch_spec):
    """Return a jitted step that donates its state, its arguments, and these with shardings."""

    def step(state, x):
        weights, moments = state
        value, gradient = gradients(kind, weights, x, weights_spec, batch_spec)
        updates, moments = ADAM.update(gradient, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    weights, x = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments(kind, weights_spec, batch_spec)
    )
    state = weights, jax.eval_shape(ADAM.init, weights)

    def place(leaf):  # the optimizer's state is split as the parameters are
        return NamedSharding(mesh(kind), weights_spec if leaf.ndim == 2 else P())

    places = jax.tree.map(place, state), NamedSharding(mesh(kind), batch_spec)
    how = {"donate_argnums": 0, "out_shardings": (places[0], NamedSharding(mesh(kind), P()))}
    structs = jax.tree.map(lambda leaf, s: leaf.update(sharding=s), (state, x), places)
    if kind != "jitted step" and kind != "accumulating step":
        return jax.jit(step, **how), structs, structs
    return jax.jit(step, in_shardings=places, **how), (state, x), structs


def state_and_batch(kind, weights_spec, batch_spec):
    weights, x = arguments(kind, weights_spec, batch_spec)
    with jax.set_mesh(mesh(kind)):  # JAX 0.10.2 asks for it where axes are explicit
        return (weights, jax.jit(ADAM.init)(weights)), x


# -- what the plans say -----------------------------------------------------------------------


def compiled(fn, args, kind):
    donated = () if kind in LOSSES else (0,)  # a jit around a step's own does not know what it does
    gradient = jax.value_and_grad(fn) if kind in LOSSES else fn
    return jax.jit(gradient, donate_argnums=donated).lower(*args).compile()


def peak(program):
    """Return the bytes on one device: arguments and results are there at the same time."""
    found = program.memory_analysis()
    sizes = found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes
    return sum(sizes) - found.alias_size_in_bytes


def answers(kind, sharding):
    """Yield for each budget what the plan says, and what its program says and computes."""
    specs = SHARDINGS[sharding]
    if kind in LOSSES:
        fn, args = scanned if kind == "scanned" else unrolled, arguments(kind, *specs)
        structs = args
    else:
        fn, args, structs = step_of(kind, *specs)

    def result(program):
        given = args if kind in LOSSES else state_and_batch(kind, *specs)
        given = jax.tree.map(lambda a, s: jax.device_put(a, s.sharding), given, structs)
        return jax.tree.leaves(program(*given))

    wanted = result(compiled(fn, structs, kind))
    for budget in BUDGETS:
        plan = remat_kit.plan(fn, *args, budget=budget)
        program = compiled(remat_kit.policy(plan)(fn), structs, kind)
        leaves = list(zip(result(program), wanted, strict=True))
        yield {
            "target": plan.target,
            "budget": plan.budget_bytes,
            "baseline": plan.baseline.peak_bytes,
            "said": plan.compiled_peak_bytes,
            "predicted": plan.predicted_peak_bytes,
            "is": peak(program),
            "apart": max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in leaves),
            "same shardings": all(a.sharding == b.sharding for a, b in leaves),
        }


if __name__ == "__main__":
    names = sys.argv[1:] or NAMES
    print(json.dumps({name: list(answers(*name.split(", "))) for name in names}))
