"""Partitioned steps on eight CPU devices, for `test_collective_programs.py`, which runs this file.

A process of its own, because XLA must be told of eight devices before JAX starts. It prints, for
each program, what the step gives without a policy and with several, and how many collectives the
compiled text has.
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
import re  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import remat_kit  # noqa: E402

KEPT = "save(collective)"
_COLLECTIVE = re.compile(r"\b(?:all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(")


def collectives(compiled):
    return len(_COLLECTIVE.findall(compiled.as_text()))


def compared(make):
    """Return the collectives of a step for each policy, the largest difference, and warnings.

    Args:
        make: returns the function to call for a policy, which may be None, and its arguments.
    """
    found, plain, error, same = {}, None, 0.0, True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", remat_kit.RematKitWarning)
        for policy in (None, "nothing", KEPT):
            fn, args = make(policy)
            compiled = fn.lower(*args).compile()
            found[str(policy)] = collectives(compiled)
            out = jax.tree.leaves(fn(*args))
            plain = out if plain is None else plain
            same &= all(
                a.sharding.is_equivalent_to(b.sharding, a.ndim)
                for a, b in zip(plain, out, strict=True)
            )
            pairs = zip(plain, out, strict=True)
            differences = [np.max(np.abs(np.asarray(a) - np.asarray(b))) for a, b in pairs]
            error = max(error, float(max(differences)))
    return found | {"error": error, "same": same, "warnings": [str(w.message) for w in caught]}


# -- GPT, in the user's own jit -------------------------------------------------------------------

GPT = {"size": "tiny", "width": 32, "batch": 16, "seq": 32, "materialize": True}
MESHES = {"dp": "data=8", "fsdp": "data=8", "tp": "data=2,model=4", "fsdp+tp": "data=4,model=2"}


def gpt(policy, sharding, **sizes):
    sys.path.append(str(pathlib.Path(__file__).parents[2] / "models"))
    module = importlib.import_module("gpt")
    loss, args = module.build(policy, mesh=MESHES[sharding], sharding=sharding, **GPT, **sizes)

    def step(params, tokens):
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    return jax.jit(step), args


# -- other ways to call ---------------------------------------------------------------------------


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(kind,))


ROWS = P("data")


def arrays(spec=ROWS, on=None):
    place = NamedSharding(on or mesh(), spec)
    keys = jax.random.split(jax.random.key(0), 4)
    made = [jax.random.normal(key, (64, 64)) / 8 for key in keys]
    weights = jax.device_put(made[:3], place)
    return weights, jax.device_put(made[3], NamedSharding(on or mesh(), P("data")))


def block(w, x):
    return jnp.tanh(x @ w)


def loss(weights, x, block=block):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = block(w, x)
    return jnp.mean(x**2)


def step(weights, x, loss=loss):
    value, gradient = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value


def decorated_block(policy):
    mine = remat_kit.policy(policy)(block)
    return jax.jit(functools.partial(step, loss=functools.partial(loss, block=mine))), arrays()


def inner_jits(policy):
    mine = jax.jit(functools.partial(loss, block=remat_kit.policy(policy)(jax.jit(block))))
    return jax.jit(functools.partial(step, loss=mine)), arrays()


def decorated_step(policy):
    return jax.jit(remat_kit.policy(policy, at="layer_*")(functools.partial(step))), arrays()


def explicit(policy):
    def gathered(w, x):
        return jnp.tanh(jnp.dot(x, jax.sharding.reshard(w, P()), out_sharding=P("data")))

    mine = remat_kit.policy(policy)(gathered)
    on = mesh(AxisType.Explicit)
    jax.set_mesh(on)
    return jax.jit(functools.partial(step, loss=functools.partial(loss, block=mine))), arrays(on=on)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(64, 64, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.dense(x))


class Net(nnx.Module):
    def __init__(self, policy):
        decorate = remat_kit.policy(policy)
        self.layers = nnx.List([decorate(Layer(nnx.Rngs(i))) for i in range(3)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return jnp.mean(x**2)


class Nnx:
    """A step of `nnx.jit`, as something that is lowered and called as a function of `jax.jit`."""

    def __init__(self, policy, around=None):
        self.net = Net(policy)
        state = jax.device_put(nnx.state(self.net), NamedSharding(mesh(), P("data")))
        nnx.update(self.net, state)
        self.optimizer = nnx.Optimizer(self.net, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(net, optimizer, x):
            value, gradient = nnx.value_and_grad(lambda net: net(x))(net)
            optimizer.update(net, gradient)
            return value

        self.jitted = step
        self.step = remat_kit.policy(around)(step)

    def lower(self, x):
        return self.jitted.lower(self.net, self.optimizer, x).lowered

    def __call__(self, x):
        return self.step(self.net, self.optimizer, x), nnx.state(self.net)


def in_nnx_jit(policy):
    return Nnx(policy), arrays()[1:]


def around_nnx_jit(policy):
    return Nnx(None, policy), arrays()[1:]


# -- a decorated step with several shardings, and where nothing is known ---------------------------


def called():
    """Call one decorated jitted step with arrays of the same shapes that are split differently."""
    mine = remat_kit.policy(KEPT, at="layer_*")(jax.jit(functools.partial(step)))
    errors = []
    for spec in (P("data"), P(), P(None, "data"), P("data")):
        outs = [jax.tree.leaves(fn(*arrays(spec))) for fn in (jax.jit(step), mine)]
        pairs = zip(*outs, strict=True)
        errors.append(float(max(np.max(np.abs(np.asarray(a) - np.asarray(b))) for a, b in pairs)))
    return errors


def reused():
    """Call one jitted function with arrays on eight devices, on one and on four of them."""
    mine = jax.jit(functools.partial(step, loss=remat_kit.policy(KEPT, at="layer_*")(loss)))
    four = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    values = [mine(*arrays())[1], mine(*jax.device_put(arrays(), jax.devices()[0]))[1]]
    values.append(mine(*jax.device_put(arrays(), NamedSharding(four, P("data"))))[1])
    return [float(v) for v in values]


def unknown():
    """Return the warnings of a scan that runs outside of a jit."""

    def total(weights, x):
        mine = remat_kit.policy(KEPT)(block)
        x, _ = jax.lax.scan(lambda x, w: (mine(w, x), None), x, jnp.stack(weights))
        return jnp.mean(x**2)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", remat_kit.RematKitWarning)
        jax.grad(total)(*arrays())
    return [str(w.message) for w in caught]


PROGRAMS = {
    **{f"gpt {s}": functools.partial(gpt, sharding=s) for s in MESHES},
    **{f"gpt {s} scan": functools.partial(gpt, sharding=s, scan=True) for s in ("fsdp", "fsdp+tp")},
    "decorated block": decorated_block,
    "inner jits": inner_jits,
    "decorated step": decorated_step,
    "in nnx.jit": in_nnx_jit,
    "around nnx.jit": around_nnx_jit,
    "explicit": explicit,  # the last one, as it sets the mesh
}


def main(remat3):
    if remat3:
        jax.config.update("jax_remat3", True)
    found = {"called": called(), "reused": reused(), "unknown": unknown()}
    found |= {name: compared(make) for name, make in PROGRAMS.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main("remat3" in sys.argv))
