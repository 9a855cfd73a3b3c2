"""Module paths of NNX: the attributes, in every way in which a policy is put at one."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import remat_kit

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


class Pair(nnx.Module):
    """Two layers of one class, and state."""

    def __init__(self, rngs):
        self.up = nnx.Linear(4, 4, rngs=rngs)
        self.down = nnx.Linear(4, 4, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.sin(self.down(jnp.tanh(self.up(x))))


def stacked(rngs):
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return Pair(rngs)

    return make(rngs)


def call(module, x):
    return module(x)


def call_too(module, x):
    return module(x)


scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
mapped = nnx.vmap(in_axes=(0, None))(call)
jitted = nnx.jit(call)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layer = Pair(rngs)
        self.layers = nnx.List([Pair(rngs), Pair(rngs)])
        self.chain = nnx.Sequential(Pair(rngs), jnp.sin, Pair(rngs))
        self.scans, self.more_scans, self.maps = stacked(rngs), stacked(rngs), stacked(rngs)
        self.jitted = Pair(rngs)

    def __call__(self, x):
        return self.decode(self.encode(x))

    def encode(self, x):
        x = self.layer(x)
        for layer in self.layers:
            x = layer(x)
        return self.chain(x)

    def decode(self, x):
        x = scan(call_too)(self.more_scans, scan(call)(self.scans, x))
        x = jnp.sum(mapped(self.maps, x), 0)
        return jnp.sum(jitted(self.jitted, x) ** 2)


def by_state(module):
    """A module as the function of its arrays."""
    graph, state = nnx.split(module)
    return lambda state, x: nnx.merge(graph, state)(x), state


def in_class(policy):
    def run(net, x):
        graph = nnx.graphdef(policy(Net)(nnx.Rngs(0)))
        return nnx.merge(graph, nnx.state(net))(x)

    return run


def of_state(policy):
    def run(net, x):
        graph, state = nnx.split(net)
        return policy(lambda state, x: nnx.merge(graph, state)(x))(state, x)

    return run


# Ways to decorate a network, each as a function of the plain one.
WAYS = {
    "class": in_class,
    "instance": lambda p: lambda net, x: p(net)(x),
    "bound method": lambda p: lambda net, x: p(net.__call__)(x),
    "other method": lambda p: lambda net, x: net.decode(p(net.encode)(x)),
    "function": lambda p: p(lambda net, x: net(x)),
    "function of methods": lambda p: p(lambda net, x: net.decode(net.encode(x))),
    "function of layers": lambda p: p(lambda net, x: net.layers[1](net.layer(x))),
    "function of state": of_state,
    "in jit": lambda p: nnx.jit(p(lambda net, x: net(x))),
    "around jit": lambda p: p(nnx.jit(lambda net, x: net(x))),
    "in vmap": lambda p: nnx.vmap(p(lambda net, x: net(x)), in_axes=(None, None), axis_size=2),
}
PATHS = {
    "**/layer": 1,
    "Net/layer": 1,
    "Net/layers/*": 2,
    "Net/layers/0": 1,
    "**/layers/1/up": 1,
    "**/chain/layers/2": 1,
    "**/scans": 1,
    "**/more_scans/down": 1,
    "**/maps": 1,
    "**/jitted": 1,
}


def regions(f):
    """How many checkpoint regions a function of a network has."""
    graph, state = nnx.split(Net(nnx.Rngs(0)))
    text = str(jax.make_jaxpr(lambda state, x: f(nnx.merge(graph, state), x))(state, X))
    return len(re.findall(r"remat2\[|checkpoint\[|RematTraced\[", text))


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_that_of_an_attribute(path):
    assert regions(WAYS["function"](remat_kit.policy("nothing", at=path))) == PATHS[path]


@pytest.mark.parametrize("way", WAYS)
def test_paths_are_the_same_in_every_way_of_decorating(way):
    for path in ("**/layer", "**/layers/1/up"):
        assert regions(WAYS[way](remat_kit.policy("nothing", at=path))) == 1


def test_a_policy_selects_values_by_path_in_a_decorated_module():
    policy = remat_kit.save(remat_kit.module("*/layer/up"))
    run = WAYS["instance"](remat_kit.policy(policy))
    assert regions(run) == 1  # no error: there is such a module


def test_a_module_that_is_made_in_a_jit():
    def made(at):
        net = jax.jit(lambda x: remat_kit.policy("nothing", at=at)(Net)(nnx.Rngs(0))(x))
        return str(jax.make_jaxpr(net)(X))

    assert len(re.findall(r"remat2\[|checkpoint\[|RematTraced\[", made("**/layer"))) == 1
    with pytest.raises(remat_kit.UnknownNameError, match="layer"):
        made("**/lyer")


def test_what_was_jitted_and_called_before_is_looked_into():
    net = Net(nnx.Rngs(0))
    net(X)
    assert regions(WAYS["function"](remat_kit.policy("nothing", at="**/jitted/up"))) == 1


def test_the_report_shows_the_paths_that_a_policy_takes():
    net = Pair(nnx.Rngs(0))
    graph, state = nnx.split(net, nnx.Param, ...)[0], nnx.split(net, nnx.Param, ...)[1:]

    def loss(params, rest, x):
        return jnp.sum(nnx.merge(graph, params, rest, copy=True)(x))

    report = remat_kit.inspect(loss, *state, X)
    shown = {r.module for r in report.saved} - {""}
    assert "Pair/down" in shown or "Pair" in shown
    for path in shown:
        remat_kit.policy("nothing", at=path)(net)(X)
