"""Programs that are partitioned over eight CPU devices; `test_mesh_programs.py` runs it.

A process of its own, because XLA must be told of eight devices before JAX starts. It prints, for
each program, the figures of plain JAX and those of `measure`.
"""

import json
import os
import sys

DEVICES = 8

if __name__ == "__main__":  # pytest imports this file too, for its docstrings
    flag = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

import flax.linen as nn  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import remat_kit  # noqa: E402

SIZES, NAMES = (4, 2), ("data", "model")
COPIED = P()
ADAM = optax.adamw(1e-3)


def mesh(kind=AxisType.Auto):
    devices = np.array(jax.devices()[:DEVICES]).reshape(SIZES)
    return Mesh(devices, NAMES, axis_types=(kind,) * 2)


def abstract_mesh(kind=AxisType.Auto):
    return AbstractMesh(SIZES, NAMES, axis_types=(kind,) * 2)


def shape(*dims, on=None, spec=COPIED, dtype=jnp.float32):
    place = None if on is None else NamedSharding(on, spec)
    return jax.ShapeDtypeStruct(dims, dtype, sharding=place)


def loss(w, x):
    h = x
    for _ in range(3):
        h = jnp.tanh(h @ w)
    return jnp.mean(h**2)


def constrained(w, x):
    place = NamedSharding(mesh(), P("data", "model"))
    return loss(w, jax.lax.with_sharding_constraint(x, place))


def mapped(w, x):
    def local(w, x):
        full = jax.lax.all_gather(w, "model", axis=1, tiled=True)
        return jax.lax.pmean(loss(full, x), "data")

    specs = {"in_specs": (P(None, "model"), P("data")), "out_specs": P()}
    return jax.shard_map(local, mesh=mesh(), check_vma=False, **specs)(w, x)


def step(w, state, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    updates, state = ADAM.update(gradient, state, w)
    return optax.apply_updates(w, updates), state, value


def fsdp(on):
    return shape(256, 256, on=on, spec=P("data")), shape(512, 256, on=on, spec=P("data"))


def tensor_parallel(on):
    return shape(256, 256, on=on, spec=P(None, "model")), shape(512, 256, on=on, spec=P("data"))


def arrays():
    made = [jnp.zeros(s.shape, s.dtype) for s in fsdp(mesh())]
    return [jax.device_put(a, s.sharding) for a, s in zip(made, fsdp(mesh()), strict=True)]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "model"))
        h = jnp.tanh(nn.Dense(512, kernel_init=init, use_bias=False)(x))
        return nn.Dense(256, kernel_init=init, use_bias=False)(h)


def linen():
    model, x = Linen(), shape(512, 256, on=mesh(), spec=P("data"))
    boxed = jax.eval_shape(model.init, jax.random.key(0), x)
    places = nn.get_sharding(boxed, mesh())
    params = jax.tree.map(lambda a, s: a.update(sharding=s), nn.unbox(boxed), places)
    return lambda params, x: jnp.mean(model.apply(params, x) ** 2), (params, x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
        self.up = nnx.Linear(256, 512, kernel_init=init, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(512, 256, kernel_init=init, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def nnx_args():
    @nnx.jit
    def made():
        net = Nnx(nnx.Rngs(0))
        return net, nnx.Optimizer(net, ADAM, wrt=nnx.Param)

    with jax.set_mesh(mesh()):
        net, optimizer = made()
        x = jax.device_put(jnp.ones((512, 256)), NamedSharding(mesh(), P("data")))
    return net, optimizer, x


def nnx_step(net, optimizer, x):
    value, gradient = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
    optimizer.update(net, gradient)
    return value


def figures_of(compiled):
    stats = compiled.memory_analysis()
    return [
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
    ]


def plain(fn, *args):
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
    compiled = jitted.lower(*args).compile()
    return figures_of(getattr(compiled, "compiled", compiled))


def measured(fn, *args, **how):
    memory = remat_kit.measure(fn, *args, **how)
    assert memory.devices == DEVICES, memory
    found = memory.argument_bytes, memory.output_bytes, memory.alias_bytes, memory.temp_bytes
    return [memory.target, dict(memory.mesh), list(found)]


def of_loss(fn, *args):
    return plain(jax.value_and_grad(fn), *args), measured(fn, *args)


def of_step(fn, *args):
    return plain(fn, *args), measured(fn, *args, argnums=None)


def with_optimizer():
    """The state of the optimizer is sharded as the parameters are."""
    w, x = fsdp(mesh())
    state = jax.tree.map(
        lambda leaf: leaf.update(sharding=w.sharding) if leaf.shape else leaf,
        jax.eval_shape(ADAM.init, w),
    )

    def whole(state, w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        updates, state = ADAM.update(gradient, state, w)
        return jax.tree.map(lambda p, u: jnp.asarray(p + u, p.dtype), w, updates), state, value

    theirs = plain(jax.jit(whole, donate_argnums=(0, 1)), state, w, x)
    return theirs, measured(loss, w, x, optimizer=ADAM)


def jitted_step():
    w, x = fsdp(mesh())
    state = jax.eval_shape(ADAM.init, w)
    rows, copies = w.sharding, NamedSharding(mesh(), P())
    states = jax.tree.map(lambda leaf: rows if leaf.shape else copies, state)
    places = {"in_shardings": (rows, states, rows), "out_shardings": (rows, states, copies)}
    bare = [jax.tree.map(lambda s: s.update(sharding=None), t) for t in (w, state, x)]
    return of_step(jax.jit(step, donate_argnums=(0, 1), **places), *bare)


def explicit_args(on):
    return shape(256, 256, on=on), shape(512, 256, on=on, spec=P("data"))


def explicit():
    on = mesh(AxisType.Explicit)
    with jax.set_mesh(on):
        return of_loss(loss, *explicit_args(on))


def explicit_abstract():
    on, described = mesh(AxisType.Explicit), abstract_mesh(AxisType.Explicit)
    with jax.set_mesh(on):
        theirs = plain(jax.value_and_grad(loss), *explicit_args(on))
    with jax.sharding.use_abstract_mesh(described):
        return theirs, measured(loss, *explicit_args(described))


def explicit_without_context():
    on, described = mesh(AxisType.Explicit), abstract_mesh(AxisType.Explicit)
    theirs = plain(jax.value_and_grad(loss), *explicit_args(on))
    return theirs, measured(loss, *explicit_args(described))


def set_mesh():
    def inner(w, x):
        return loss(w, jax.lax.with_sharding_constraint(x, P("data", "model")))

    with jax.set_mesh(mesh()):
        return of_loss(inner, *(s.update(sharding=None) for s in fsdp(mesh())))


def nnx_program():
    net, optimizer, x = nnx_args()
    with jax.set_mesh(mesh()):
        return of_step(nnx.jit(nnx_step, donate_argnums=(0, 1)), net, optimizer, x)


def of_abstract(args):
    """Abstract shapes give the figures of the mesh with devices."""
    return plain(jax.value_and_grad(loss), *args(mesh())), measured(loss, *args(abstract_mesh()))


def of_local():
    memory = measured(loss, *fsdp(abstract_mesh()), target="local")
    return plain(jax.value_and_grad(loss), *fsdp(mesh())), memory


def decorated():
    again = remat_kit.policy("nothing")(loss)
    return of_loss(again, *fsdp(mesh()))


PROGRAMS = {
    "fsdp": lambda: of_loss(loss, *fsdp(mesh())),
    "tensor parallel": lambda: of_loss(loss, *tensor_parallel(mesh())),
    "arrays": lambda: of_loss(loss, *arrays()),
    "one of two sharded": lambda: of_loss(loss, fsdp(mesh())[0], shape(512, 256)),
    "abstract": lambda: of_abstract(fsdp),
    "abstract, tensor parallel": lambda: of_abstract(tensor_parallel),
    "local": of_local,
    "constraint": lambda: of_loss(constrained, shape(256, 256), shape(512, 256)),
    "shard_map": lambda: of_loss(mapped, shape(256, 256), shape(512, 256)),
    "jitted step": jitted_step,
    "optimizer": with_optimizer,
    "explicit": explicit,
    "explicit, abstract": explicit_abstract,
    "explicit, without context": explicit_without_context,
    "set_mesh": set_mesh,
    "linen": lambda: of_loss(*(lambda fn, args: (fn, *args))(*linen())),
    "nnx": nnx_program,
    "decorated": decorated,
}


def main():
    found = {}
    for name, program in PROGRAMS.items():
        try:
            found[name] = program()
        except Exception as error:
            found[name] = [f"{type(error).__name__}: {error}", None]
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
