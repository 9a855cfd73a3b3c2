"""What `measure` says of a step is what its own compiled program says, or it is refused.

A jitted step knows more than its function: what it donates, which arguments are static, and with
NNX which of them it changes. Every way to write a step down is compared with the compiler's answer
for the very same object. `test_mesh_programs.py` does the same for programs that are partitioned
over several devices; what cannot answer for those refuses them.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import remat_kit
from remat_kit._program.steps import gradient as _gradient

ADAM = optax.adamw(1e-3)


def figures_of(compiled):
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
    )


def measured(fn, *args, **how):
    memory = remat_kit.measure(fn, *args, argnums=None, **how)
    return memory.argument_bytes, memory.output_bytes, memory.alias_bytes, memory.temp_bytes


def loss(params, x, width=0, kind="tanh"):
    h = getattr(jnp, kind)(x @ params["a"])
    return jnp.mean((h @ params["b"])[:, width:] ** 2)


def step(params, state, x, width=0, kind="tanh"):
    value, gradient = jax.value_and_grad(loss)(params, x, width, kind)
    updates, state = ADAM.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value


PARAMS = {"a": jnp.ones((48, 96)), "b": jnp.ones((96, 16))}
ARGS = PARAMS, ADAM.init(PARAMS), jnp.ones((160, 48))

# How a step is jitted, and with what else it is called.
JITTED = {
    "jitted": (jax.jit(step), ()),
    "donated": (jax.jit(step, donate_argnums=(0, 1)), ()),
    "donated by name": (jax.jit(step, donate_argnames=("state", "params")), ()),
    "partly donated": (jax.jit(step, donate_argnums=1), ()),
    "static": (jax.jit(step, static_argnums=(3, 4), donate_argnums=0), (4, "sin")),
    "static by name": (jax.jit(step, static_argnames=("kind", "width")), (3, "cos")),
    "unused kept": (jax.jit(lambda p, s, x, n: step(p, s, x), keep_unused=True), (jnp.ones(999),)),
    "on one device": (
        jax.jit(step, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0])),
        (),
    ),
}


@pytest.mark.parametrize("how", JITTED)
def test_jitted_steps(how):
    fn, more = JITTED[how]
    theirs = figures_of(fn.lower(*ARGS, *more).compile())
    assert measured(fn, *ARGS, *more) == theirs
    assert measured(fn, *_gradient.abstract(ARGS), *more) == theirs
    assert ("donated" in how or how == "static") == bool(theirs[2])


def test_bound_arguments_and_functions_around_a_jitted_one():
    jitted = jax.jit(step, donate_argnums=(0, 1), static_argnames="kind")
    theirs = figures_of(jitted.lower(*ARGS, kind="sin").compile())
    params, state, x = ARGS

    @functools.wraps(jitted)
    def around(*args):
        return jitted(*args, kind="sin")

    class Trainer:
        @functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
        def step(self, params, state, x):
            return step(params, state, x, kind="sin")

    assert measured(functools.partial(jitted, kind="sin"), *ARGS) == theirs
    assert measured(functools.partial(jitted, params, kind="sin"), state, x) == theirs
    assert measured(around, *ARGS) == theirs
    other_order = measured(lambda s, x, p: jitted(p, s, x, kind="sin"), state, x, params)
    assert other_order[:3] == theirs[:3]
    assert measured(Trainer().step, *ARGS) == theirs


def test_local_runs_what_it_compiles():
    fn, more = JITTED["static"]
    memory = remat_kit.measure(fn, *ARGS, *more, argnums=None, target="local")
    assert memory.alias_bytes > 0
    assert memory.step_seconds > 0
    assert not PARAMS["a"].is_deleted()


def test_what_is_donated_is_said_once():
    donating = jax.jit(step, donate_argnums=0)
    assert measured(donating, *ARGS, donate_argnums=0) == measured(donating, *ARGS)
    told = measured(jax.jit(step), *ARGS, donate_argnums=(0, 1))
    assert told == figures_of(JITTED["donated"][0].lower(*ARGS).compile())
    with pytest.raises(remat_kit.UserError, match=r"its own donate_argnums is \(0,\)"):
        measured(donating, *ARGS, donate_argnums=1)


# -- NNX ------------------------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(48, 96, rngs=rngs)
        self.b = nnx.Linear(96, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(96, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.b(self.drop(self.norm(jnp.tanh(self.a(x)))))


def nnx_step(net, optimizer, metrics, x):
    value, gradient = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
    optimizer.update(net, gradient)
    metrics.update(values=value)


def nnx_args():
    net = Net(nnx.Rngs(0))
    return net, nnx.Optimizer(net, ADAM, wrt=nnx.Param), nnx.metrics.Average(), ARGS[2]


@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_steps_of_nnx_keep_their_mutations(donated):
    args = nnx_args()
    jitted = nnx.jit(nnx_step, donate_argnums=donated)
    theirs = figures_of(jitted.lower(*args).compile().compiled)
    weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(args[:2], nnx.Param)))
    assert theirs[1] > weights  # the updated parameters are results
    assert measured(jitted, *args) == theirs
    assert measured(nnx_step, *args, donate_argnums=donated) == theirs
    assert measured(jitted, *nnx.eval_shape(nnx_args)) == theirs
    assert int(args[1].step[...]) == 0  # nothing was run


def test_local_leaves_the_state_of_nnx_alone():
    args = nnx_args()
    memory = remat_kit.measure(
        nnx.jit(nnx_step, donate_argnums=0), *args, argnums=None, target="local"
    )
    assert memory.step_seconds > 0
    assert int(args[1].step[...]) == 0
    assert jnp.isfinite(args[0].a.kernel[...]).all()


# -- several devices ------------------------------------------------------------------------


def mesh_of(*sizes):
    return AbstractMesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


MESH = mesh_of(2, 4)


def split(spec, mesh=MESH, shape=(160, 48)):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


def build(x):
    return lambda batch: (loss, (PARAMS, x))


CALLS = {
    "plan": lambda f, p, x: remat_kit.plan(f, p, x, budget="min"),
    "plan for bytes": lambda f, p, x: remat_kit.plan(f, p, x, budget=2**20),
    "plan a step": lambda f, p, x: remat_kit.plan(jax.jit(jax.grad(f)), p, x, budget="min"),
    "frontier": lambda f, p, x: remat_kit.frontier(f, p, x),
    "estimate": lambda f, p, x: remat_kit.estimate(f, p, x, checkpoints=["h"]),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_the_planner_refuses_of_several_devices(call):
    """Losses and steps with split arguments are planned (`test_mesh_plans.py`).

    Without any, JAX lowers a constraint of an abstract mesh for one device.
    """

    def constrained(params, x):
        return loss(params, jax.lax.with_sharding_constraint(x, split(P("data")).sharding))

    with pytest.raises(remat_kit.UserError, match=r"(partitioned over|mesh of) 8 ") as caught:
        CALLS[call](constrained, PARAMS, ARGS[2])
    assert len(caught.value.message.splitlines()) == 1
    assert caught.value.hint


def test_an_abstract_mesh_needs_an_argument_on_it():
    """JAX lowers such a program for one device: the figures would be of another program."""

    def constrained(params, x):
        return loss(params, jax.lax.with_sharding_constraint(x, split(P("data")).sharding))

    for call in (remat_kit.measure, functools.partial(remat_kit.inspect, target="cpu")):
        with pytest.raises(remat_kit.UserError, match="an abstract mesh of 8 devices") as caught:
            call(constrained, PARAMS, ARGS[2])
        assert caught.value.hint
    assert remat_kit.measure(constrained, PARAMS, split(P())).devices == 8


def test_a_copy_on_each_device_is_an_argument_like_another():
    whole = [split(P()), split(P("data"), mesh_of(1, 4))]
    for x in whole:
        memory = remat_kit.measure(loss, PARAMS, x)
        assert memory.peak_bytes == remat_kit.measure(loss, PARAMS, ARGS[2]).peak_bytes
        assert memory.devices == x.sharding.mesh.size


def test_meshes_of_this_process_are_planned_for_one_device_or_refused():
    code = """
import jax, jax.numpy as jnp, numpy as np, remat_kit
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), "d")
rows, x = NamedSharding(mesh, P("d")), jnp.ones((8, 8))
loss = lambda x: jnp.sum(jnp.sin(x @ x))
total = lambda x: jax.lax.psum(jnp.sum(x), "d")
mapped = jax.shard_map(total, mesh=mesh, in_specs=P("d"), out_specs=P())
there = jax.device_put(x, rows)
refused = {
    "shard_map": mapped,
    "closure": lambda x: loss(x + there),
    "loop": lambda x: jax.lax.scan(lambda c, y: (c + mapped(x), None), 0.0, x)[0],
}
planned = {
    "jit": jax.jit(loss, in_shardings=rows),
    "results": lambda x: jnp.sum(jax.jit(jnp.sin, out_shardings=rows)(x)),
}
step_of = lambda f: jax.jit(jax.grad(f))
sharded = jax.jit(jax.grad(loss), in_shardings=rows, out_shardings=rows)
def check_refused(name, call):
    try:
        call()
        print(name, "was not refused")
    except remat_kit.UserError as error:
        assert "over 4 devices" in str(error) or "mesh of 4 devices" in str(error), error
def check_planned(name, f):
    plan = remat_kit.plan(f, x, budget="min")
    assert plan.target == "cpu:4", (name, plan.target)
    plain, lean = remat_kit.measure(f, x), remat_kit.measure(remat_kit.policy(plan)(f), x)
    assert plain.devices == lean.devices == 4, name
    assert plan.baseline.peak_bytes == plain.peak_bytes, name
    assert plan.compiled_peak_bytes == lean.peak_bytes, name
for name, f in refused.items():
    check_refused(name, lambda: remat_kit.plan(f, x, budget="min"))
    check_refused(name, lambda: remat_kit.frontier(f, x))
    check_refused(name, lambda: remat_kit.frontier(step_of(f), x))
for name, f in planned.items():
    check_planned(name, f)
    check_planned(name, step_of(f))
check_planned("sharded step", sharded)
with jax.set_mesh(mesh):
    check_planned("set_mesh", loss)
    check_planned("set_mesh step", step_of(loss))
print("done")
"""
    flags = "--xla_force_host_platform_device_count=4"
    environment = {"XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "done\n", done.stdout + done.stderr
