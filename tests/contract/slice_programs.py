"""Steps on eight CPU devices with inputs saved in slices, for `test_slice_programs.py`.

A process of its own, because XLA must be told of eight devices before JAX starts. For each program
it prints what the step gives without a policy, with `nothing` and with `sliced`: the largest
difference, the shardings of the results, the collectives and the bytes of the compiled program.
"""

import os

DEVICES = 8

if __name__ == "__main__":  # pytest imports this file too, for its docstrings
    flag = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

import functools  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import pathlib  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402

import flax.linen as nn  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import remat_kit  # noqa: E402
from remat_kit import _jax  # noqa: E402

SLICED = "mindspore_recompute_slice_activation:model"
LAYERS, WIDTH, HIDDEN = 4, 64, 128
UP, DOWN = P(None, "model"), P("model", None)  # the tensor parallelism of Megatron-LM


def mesh(*explicit):
    kinds = [AxisType.Explicit if axis in explicit else AxisType.Auto for axis in ("data", "model")]
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=tuple(kinds))


def placed(x, *spec, on=None):
    return jax.device_put(x, NamedSharding(on or mesh(), P(*spec)))


def arrays(on=None):
    """Return the weights of the layers, and tokens of which each device along `model` has all."""
    keys = jax.random.split(jax.random.key(0), 3)
    up = jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)) / 8
    down = jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)) / 11
    weights = [(placed(u, *UP, on=on), placed(d, *DOWN, on=on)) for u, d in zip(up, down)]
    return weights, placed(jax.random.normal(keys[2], (16, 32, WIDTH)), "data", on=on)


def block(w, x):
    return x + jnp.tanh(x @ w[0]) @ w[1]


def loss(weights, x, block=block):
    x = jnp.sin(x)
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = block(w, x)
    return jnp.mean(x**2)


def stepping(loss):
    def step(weights, *args):
        value, gradient = jax.value_and_grad(loss)(weights, *args)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value

    return step


# -- a step for each policy -----------------------------------------------------------------------


def decorated_block(policy):
    mine = remat_kit.policy(policy)(block)
    return stepping(functools.partial(loss, block=mine)), arrays()


def decorated_loss(policy):
    return stepping(remat_kit.policy(policy, at="layer_*")(loss)), arrays()


def decorated_step(policy):
    return remat_kit.policy(policy, at="layer_*")(stepping(loss)), arrays()


def inner_jit(policy):
    mine = jax.jit(remat_kit.policy(policy)(block))
    return stepping(jax.jit(functools.partial(loss, block=mine))), arrays()


def in_a_scan(policy):
    mine = remat_kit.policy(policy)(block)

    def scanned(weights, x):
        x, _ = jax.lax.scan(lambda x, w: (mine(w, x), None), jnp.sin(x), weights)
        return jnp.mean(x**2)

    weights, x = arrays()
    on = mesh()
    stacked = [
        placed(jnp.stack([w[i] for w in weights]), None, *s, on=on) for i, s in ((0, UP), (1, DOWN))
    ]
    return stepping(scanned), (tuple(stacked), x)


def over_a_scan(policy):
    """A loss with `at=`, whose layers are in a scan, in a loop of two training steps."""
    step, (weights, x) = in_a_scan(None)

    def scanned(weights, x):
        def layer(x, w):
            with jax.named_scope("layer"):
                return block(w, x), None

        return jnp.mean(jax.lax.scan(layer, jnp.sin(x), weights)[0] ** 2)

    step = stepping(remat_kit.policy(policy, at="layer")(scanned))

    def steps(weights, x):
        return jax.lax.scan(lambda w, _: step(w, x), weights, None, length=2)

    return steps, (weights, x)


def batched(policy):
    mine = remat_kit.policy(policy)(block)
    own = jax.vmap(lambda w, x: mine(w, x), in_axes=(None, 0))
    return stepping(functools.partial(loss, block=own)), arrays()


def tangents(policy):
    """The second derivative of a loss along the input, in forward mode over reverse mode."""
    one = functools.partial(loss, block=remat_kit.policy(policy)(block))

    def step(weights, x):
        return jax.jvp(lambda x: jax.grad(one)(weights, x), (x,), (jnp.cos(x),))

    return step, arrays()


def explicit(policy, *axes):
    def split(*names):
        return P(*(name if name in axes else None for name in names))

    def typed(w, x):
        hidden = jnp.tanh(jnp.dot(x, w[0], out_sharding=split("data", None, "model")))
        return x + jnp.dot(hidden, w[1], out_sharding=split("data", None, None))

    on = mesh(*axes)
    jax.set_mesh(on)
    mine = remat_kit.policy(policy)(typed)
    return stepping(functools.partial(loss, block=mine)), arrays(on)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        up = nn.with_partitioning(nn.initializers.normal(0.1), UP)
        down = nn.with_partitioning(nn.initializers.normal(0.1), DOWN)
        hidden = jnp.tanh(nn.Dense(HIDDEN, kernel_init=up, name="up")(x))
        return x + nn.Dense(WIDTH, kernel_init=down, name="down")(hidden)


class LinenNet(nn.Module):
    policy: str | None

    @nn.compact
    def __call__(self, x):
        layer = remat_kit.policy(self.policy)(Linen)
        for i in range(LAYERS):
            x = layer(name=f"layer_{i}")(x)
        return jnp.mean(x**2)


def linen(policy):
    net, (_, x) = LinenNet(policy), arrays()
    boxed = LinenNet(None).init(jax.random.key(0), x)
    spec = nn.get_partition_spec(boxed)
    params = jax.tree.map(lambda p, s: placed(p, *s), nn.unbox(boxed), spec)
    return stepping(lambda params, x: net.apply(params, x)), (params, x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


def nnx_modules(policy):
    decorate = remat_kit.policy(policy)
    layers = nnx.List([decorate(Nnx(nnx.Rngs(i))) for i in range(LAYERS)])
    graph, state = nnx.split(layers)

    def split(path, x):
        spec = {"up": UP, "down": DOWN}[path[-2]] if x.ndim == 2 else ()
        return placed(x, *spec)

    def forward(state, x):
        for layer in nnx.merge(graph, state):
            x = layer(x)
        return jnp.mean(x**2)

    pure = nnx.to_pure_dict(state)
    flat = nnx.traversals.flatten_mapping(pure)
    pure = nnx.traversals.unflatten_mapping({k: split(k, v) for k, v in flat.items()})
    nnx.replace_by_pure_dict(state, pure)
    return stepping(forward), (state, arrays()[1])


def gpt(policy, **sizes):
    sys.path.append(str(pathlib.Path(__file__).parents[2] / "models"))
    module = importlib.import_module("gpt")
    on = {"mesh": "data=4,model=2", "sharding": "fsdp", "materialize": True}
    loss, args = module.build(policy, size="tiny", batch=16, seq=32, layers=4, **on, **sizes)
    return stepping(loss), args


PROGRAMS = {
    "decorated block": decorated_block,
    "decorated loss": decorated_loss,
    "decorated step": decorated_step,
    "inner jit": inner_jit,
    "in a scan": in_a_scan,
    "over a scan": over_a_scan,
    "vmap": batched,
    "tangents": tangents,
    "linen": linen,
    "nnx": nnx_modules,
    "gpt": gpt,
    "gpt scan": functools.partial(gpt, scan=True),
    # The last ones, as they set the mesh.
    "explicit": lambda policy: explicit(policy, "data", "model"),
    "explicit data": lambda policy: explicit(policy, "data"),
    "explicit model": lambda policy: explicit(policy, "model"),
}


# -- what is compared -----------------------------------------------------------------------------


def collectives(compiled):
    """Return the all-gathers of the forward pass, and those of the recomputation."""
    lines = [line for line in compiled.as_text().splitlines() if " all-gather(" in line]
    again = sum("rematted_computation" in line for line in lines)
    return len(lines) - again, again


def compared(make):
    found, plain, error, same = {}, None, 0.0, True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", remat_kit.RematKitWarning)
        for policy in (None, "nothing", SLICED):
            step, args = make(policy)
            compiled = jax.jit(step).lower(*args).compile()
            gathers, again = collectives(compiled)
            bytes = compiled.memory_analysis().temp_size_in_bytes
            found[str(policy)] = {"gathers": gathers, "again": again, "bytes": bytes}
            out = jax.tree.leaves(jax.jit(step)(*args))
            plain = out if plain is None else plain
            pairs = list(zip(plain, out, strict=True))
            same &= all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)
            differences = [np.max(np.abs(np.asarray(a) - np.asarray(b))) for a, b in pairs]
            error = max(error, float(max(differences)))
    return found | {"error": error, "same": same, "warnings": [str(w.message) for w in caught]}


def main(*words):
    if "remat3" in words:
        jax.config.update("jax_remat3", True)
    # JAX 0.10 has no rule to batch a name under `jax_remat3`.
    possible = [n for n in PROGRAMS if n != "vmap" or _jax.names_are_objects()]
    chosen = [word for word in words if word in possible] or possible
    print(json.dumps({name: compared(PROGRAMS[name]) for name in chosen}))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
