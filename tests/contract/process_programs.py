"""A loss partitioned over eight CPU devices of one process or of two; `test_processes.py` runs it.

Without arguments it is one process with eight devices. With an address and a number it is one of
two processes with four devices each, which `jax.distributed` connects. It prints the losses that
each way of training gives, and what the functions of `remat_kit` say of arrays of which a process
holds only a part.
"""

import json
import sys
import warnings

import jax

if __name__ == "__main__":  # pytest imports this file too, for its docstrings
    both = len(sys.argv) > 1
    jax.config.update("jax_num_cpu_devices", 4 if both else 8)
    if both:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import remat_kit
from remat_kit.testing import assert_equivalent

STEPS = 4
BUDGET = 0.6 if jax.__version_info__ >= (0, 11) else "min"  # XLA:CPU of 0.10.2 saves little
WAYS = ("plain", "policy", "plan", "auto")


def loss(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = x + jnp.sin(jnp.tanh(x @ w)) @ w.T
    return jnp.mean(x**2)


def scaled(weights, x):
    return 1.01 * loss(weights, x)


def rows():
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))


def arguments():
    draw = np.random.default_rng(0)
    weights = [draw.standard_normal((64, 256)).astype(np.float32) / 16 for _ in range(3)]
    x = draw.standard_normal((2048, 64)).astype(np.float32)

    def place(array):
        return jax.make_array_from_callback(array.shape, rows(), lambda index: array[index])

    return jax.tree.map(place, (weights, x))


def step_of(loss):
    @jax.jit
    def step(weights, x):
        value, gradient = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value

    return step


def trained(step):
    weights, x = arguments()
    values = []
    for _ in range(STEPS):
        weights, value = step(weights, x)
        values.append(float(value))
    return values


def refusal(call, *args):
    """Return the first line of the error of a call, or None if there is none."""
    try:
        call(*args)
    except AssertionError as error:
        return str(error).splitlines()[0]
    return None


def found():
    args = arguments()
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows()), args)
    lean = remat_kit.policy("nothing", at="layer_*")(loss)
    plan = remat_kit.plan(loss, *args, budget=BUDGET)
    yield "whole", all(array.is_fully_addressable for array in jax.tree.leaves(args))
    yield "plain", trained(step_of(loss))
    yield "policy", trained(step_of(lean))
    yield "plan", trained(step_of(remat_kit.policy(plan)(loss)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield "auto", trained(remat_kit.policy(remat_kit.auto(BUDGET))(step_of(loss)))
    yield "auto said", [str(w.message) for w in caught if w.category is remat_kit.RematKitWarning]
    yield "planned", str(plan)
    yield "policy of the plan", repr(plan.policy)
    memories = [remat_kit.measure(loss, *each) for each in (args, shapes)]
    memories.append(remat_kit.measure(loss, *args, target="local"))
    yield "measured", [[m.devices, m.peak_bytes, m.argument_bytes] for m in memories]
    yield "ran", memories[-1].step_seconds is not None
    report = remat_kit.inspect(lean, *args, target="cpu")
    yield "collectives", [c.to_json() for c in report.readings["cpu:8"].collectives]
    yield "same", refusal(assert_equivalent, loss, lean, *args)
    yield "other", refusal(assert_equivalent, loss, scaled, *args)


if __name__ == "__main__":
    print(json.dumps(dict(found())))
