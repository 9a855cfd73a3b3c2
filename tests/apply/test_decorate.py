"""`policy` on everything it decorates: the same numbers, the same parameters, clear errors."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from interpreter import one_by_one

import remat_kit
from remat_kit import (
    PolicyError,
    UnknownNameError,
    UserError,
    module,
    named,
    offload,
    primitive,
    save,
)

X = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)
POLICIES = ["nothing", "dots", "offload_dots", save(named("act")), save(primitive("tanh"))]


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def regions(f, *args):
    """How many checkpoint regions a function has."""
    text = str(jax.make_jaxpr(f)(*args))
    return len(re.findall(r"remat2\[|checkpoint\[|RematTraced\[", text))


# -- Linen ------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Dropout, BatchNorm, a name, and a Python bool among the arguments."""

    @nn.compact
    def __call__(self, x, train: bool = True):
        h = nn.Dense(16, name="up")(x)
        h = remat_kit.name(jnp.tanh(h), "act")
        h = nn.Dropout(0.5, deterministic=not train)(h)
        h = nn.BatchNorm(use_running_average=not train)(h)
        return x + nn.Dense(8, name="down")(h)


def net(layer):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            for _ in range(2):
                x = layer()(x, train=train)
            return x.sum()

    return Net()


class WithInstances(nn.Module):
    policy: object

    @nn.compact
    def __call__(self, x, train):
        for _ in range(2):
            x = remat_kit.policy(self.policy)(Layer())(x, train=train)
        return x.sum()


class WithSetup(nn.Module):
    policy: object

    def setup(self):
        self.first = remat_kit.policy(self.policy)(Layer())
        self.second = remat_kit.policy(self.policy)(Layer)(name="other")

    def __call__(self, x, train):
        return self.second(self.first(x, train), train).sum()


class WithMethod(nn.Module):
    @remat_kit.policy("dots")
    @nn.compact
    def __call__(self, x, train):
        for _ in range(2):
            x = Layer()(x, train=train)
        return x.sum()


class WithScan(nn.Module):
    layer: object

    @nn.compact
    def __call__(self, x, train):
        layer = self.layer

        class Body(nn.Module):
            @nn.compact
            def __call__(self, carry, _):
                return layer(name="layer")(carry, train=train), None

        axes = {"params": 0, "batch_stats": 0}
        rngs = {"params": True, "dropout": True}
        scanned = nn.scan(Body, variable_axes=axes, split_rngs=rngs, length=3)
        return scanned(name="layers")(x, None)[0].sum()


def step(model, train=True):
    """Variables, loss, new batch statistics and gradients of one training step."""
    rngs = {"dropout": jax.random.key(1)}
    variables = model.init({"params": jax.random.key(0), **rngs}, X, train)

    def loss(params, x):
        return model.apply(
            {**variables, "params": params}, x, train, rngs=rngs, mutable=["batch_stats"]
        )

    out = one_by_one(jax.value_and_grad(loss, has_aux=True), variables["params"], X)
    return variables, out


@functools.cache
def plain_step():
    """The step without a policy, once for all tests."""
    return step(net(Layer))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_linen_class(policy):
    assert_equal(step(net(remat_kit.policy(policy)(Layer))), plain_step())


def test_linen_bound_layers():
    assert_equal(step(WithInstances(save(named("act")))), plain_step())


def test_linen_layers_made_in_setup():
    assert_equal(step(WithSetup("dots")), step(WithSetup(None)))


def test_linen_method():
    assert_equal(step(WithMethod()), plain_step())


def test_linen_scan_body():
    assert_equal(step(WithScan(remat_kit.policy("dots")(Layer))), step(WithScan(Layer)))


def test_linen_top_instance_whole_and_by_path():
    assert_equal(step(remat_kit.policy("dots")(net(Layer))), plain_step())
    assert_equal(step(remat_kit.policy("dots", at="*/Layer_*")(net(Layer))), plain_step())


def test_linen_keeps_the_names_of_classes_and_parameters():
    decorated = remat_kit.policy("dots")(Layer)
    assert decorated.__name__ == "Layer"
    variables = net(decorated).init(jax.random.key(0), X, False)
    assert set(variables["params"]) == {"Layer_0", "Layer_1"}


def test_linen_methods():
    class Two(nn.Module):
        def setup(self):
            self.dense = nn.Dense(8)

        def __call__(self, x):
            return self.encode(x)

        def encode(self, x):
            return jnp.tanh(self.dense(x))

    model = remat_kit.policy("nothing", methods=["encode"])(Two)()
    variables = model.init(jax.random.key(0), X)

    def loss(v):
        return model.apply(v, X, method="encode").sum()

    assert regions(jax.grad(loss), variables) == 1


# -- functions --------------------------------------------------------------------------------


def test_a_function_with_keywords_and_flags():
    @remat_kit.policy("dots")
    def f(x, *, activation, scale=2.0, flip=False):
        y = activation(x * scale)
        return -y if flip else y

    np.testing.assert_allclose(f(X, activation=jnp.tanh, flip=True), -jnp.tanh(X * 2.0), rtol=1e-6)


def test_static_arrays():
    @remat_kit.policy("nothing", static_argnums=1, static_argnames="stop")
    def f(x, n, stop=3):
        return x if n > stop else jnp.tanh(x)

    np.testing.assert_array_equal(f(X, np.int32(7), stop=np.int32(3)), X)
    with pytest.raises(UserError, match="is static, but its value is being traced"):
        jax.jit(f)(X, np.int32(7))
    with pytest.raises(UserError, match=r"static_argnums=\(5,\), but the call has 1"):
        remat_kit.policy("nothing", static_argnums=5)(jnp.tanh)(X)


def test_policies_of_jax_and_tables():
    for what in (jax.checkpoint_policies.dots_saveable, {"save": {"primitive": "dot_general"}}):
        g = remat_kit.policy(what)(lambda x: jnp.tanh(x @ x.T))
        assert regions(g, X) == 1


def test_none_changes_nothing():
    assert remat_kit.policy(None)(jnp.tanh) is jnp.tanh
    assert remat_kit.policy("none")(Layer) is Layer


def prevent_cse_of(f, *args):
    return set(re.findall(r"prevent_cse=(\w+)", str(jax.make_jaxpr(jax.grad(f))(*args))))


@pytest.mark.parametrize("policy", ["nothing", "dots"])
def test_prevent_cse_is_chosen(policy):
    layer = remat_kit.policy(policy)(jnp.tanh)

    def unrolled(x):
        return layer(layer(x)).sum()

    def scanned(x):
        return jax.lax.scan(lambda c, _: (layer(c), None), x, length=3)[0].sum()

    assert prevent_cse_of(unrolled, X) == {"True"}
    assert prevent_cse_of(scanned, X) == {"False"}
    forced = remat_kit.policy(policy, prevent_cse=False)(jnp.tanh)
    with pytest.warns(remat_kit.RematKitWarning, match="leave prevent_cse out"):
        assert prevent_cse_of(lambda x: forced(x).sum(), X) == {"False"}


# -- at= --------------------------------------------------------------------------------------


def test_module_selectors_see_full_paths_on_classes_and_at_paths():
    policy = save(module("*/up"))
    assert_equal(step(net(remat_kit.policy(policy)(Layer))), plain_step())
    assert_equal(step(remat_kit.policy(policy, at="*/Layer_*")(net(Layer))), plain_step())


# -- NNX --------------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        h = remat_kit.name(jnp.tanh(self.up(x)), "act")
        return x + self.down(self.dropout(self.norm(h)))


class Stack(nnx.Module):
    def __init__(self, block, rngs):
        self.blocks = nnx.List([block(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()


def nnx_step(block=Block, instance=lambda m: m, loss=lambda f: f):
    graph, state = nnx.split(instance(Stack(block, nnx.Rngs(0))))

    def run(state):
        model = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(loss(lambda m: m(X)))(model)
        return value, nnx.to_pure_dict(grads), nnx.to_pure_dict(nnx.state(model))

    return one_by_one(run, state)


@functools.cache
def plain_nnx_step():
    """The step without a policy, once for all tests."""
    return nnx_step()


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_nnx_class(policy):
    assert_equal(nnx_step(remat_kit.policy(policy)(Block)), plain_nnx_step())


def test_nnx_instance_shares_its_variables():
    assert_equal(nnx_step(instance=remat_kit.policy("dots")), plain_nnx_step())
    block = Block(nnx.Rngs(0))
    decorated = remat_kit.policy("dots")(block)
    assert type(block) is Block
    assert decorated.up.kernel is block.up.kernel
    decorated(X)
    assert int(block.dropout.rngs.count[...]) == 1  # what the call changed is in the shared module


def test_nnx_instance_shares_its_attributes():
    class Counting(nnx.Module):
        def __init__(self):
            self.calls = 0

        def __call__(self, x):
            self.calls += 1
            self.last = nnx.Intermediate(x.sum())
            return jnp.tanh(x)

    original = Counting()
    decorated = remat_kit.policy("nothing")(original)
    decorated(X)
    nnx.grad(lambda m: m(X).sum())(decorated)
    assert isinstance(decorated, Counting)
    assert original.calls == decorated.calls == 2
    assert original.last is decorated.last
    original.extra = "seen"
    assert decorated.extra == "seen"


@pytest.mark.parametrize("policy", ["nothing", "dots"])
@pytest.mark.parametrize("transform", [jax.jit, nnx.jit, jax.grad, jax.vmap, jax.checkpoint])
def test_nnx_module_that_a_traced_function_closes_over(policy, transform):
    """`nnx.remat` fails there, and takes the variables out of the module."""
    plain = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.tanh)
    decorated = remat_kit.policy(policy)(plain)
    x = jnp.arange(8.0).reshape(2, 4)
    if transform is jax.vmap:
        x = jnp.stack([x, 2 * x])
    expected = transform(lambda x: plain(x).sum())(x)
    found = transform(lambda x: decorated(x).sum())(x)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(decorated(x), plain(x), rtol=1e-6)


def test_nnx_module_that_a_traced_function_changes():
    statistics = remat_kit.policy("nothing")(nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    before = statistics.mean[...]
    with pytest.raises(remat_kit.PolicyError, match="changes an NNX object"):
        jax.jit(lambda x: statistics(x))(jnp.ones((2, 4)))
    assert statistics.mean[...] is before
    nnx.jit(lambda layer, x: layer(x))(statistics, jnp.ones((2, 4)))
    assert not jnp.array_equal(statistics.mean[...], before)


def noise(x, rngs):
    return x * jax.random.bernoulli(rngs.dropout(), 0.5, x.shape)


def averaged(metric, x):
    metric.update(values=x)
    return x * metric.compute()


def counted(variable, x):
    variable[...] = variable[...] + x.sum()
    return x * variable[...]


def updated(pair, x):
    model, optimizer = pair
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    return model(x)


def pair():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


STATEFUL = {
    "rngs": (lambda: nnx.Rngs(0), lambda r, f: f(noise)(X, r)),
    "rngs in a pytree": (
        lambda: nnx.Rngs(0),
        lambda r, f: f(lambda x, *, state: noise(x, state["rngs"][0]))(X, state={"rngs": [r]}),
    ),
    "partial": (lambda: nnx.Rngs(0), lambda r, f: f(functools.partial(noise, rngs=r))(X)),
    "pytree partial": (
        lambda: nnx.Rngs(0),
        lambda r, f: f(jax.tree_util.Partial(noise, rngs=r))(X),
    ),
    "metric": (lambda: nnx.metrics.Average(), lambda m, f: f(averaged)(m, X)),
    "variable": (lambda: nnx.BatchStat(jnp.zeros(())), lambda v, f: f(counted)(v, X)),
    "optimizer": (pair, lambda p, f: f(updated)(p, X)),
    "bound method": (lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)), lambda d, f: f(d.__call__)(X)),
    "instance": (lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)), lambda d, f: f(d)(X)),
    "flag": (
        lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
        lambda d, f: f(lambda d, x, train: d(x) if train else x)(d, X, True),
    ),
}


@pytest.mark.parametrize("case", STATEFUL)
def test_state_of_nnx(case):
    make, call = STATEFUL[case]

    def twice(decorator):
        holder = make()
        outs = [call(holder, decorator), call(holder, decorator)]
        state = [
            nnx.to_pure_dict(nnx.state(x)) if not isinstance(x, nnx.Variable) else x[...]
            for x in (holder if isinstance(holder, tuple) else (holder,))
        ]
        return outs, state

    # A region is one compiled program where it is called without `jit`, so sums may be rounded
    # differently; integers and keys are the same.
    got, expected = twice(remat_kit.policy("nothing")), twice(lambda f: f)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_nnx_class_with_several_policies():
    dots, none = (remat_kit.policy(p)(Block) for p in ("dots", "nothing"))
    assert dots is not none

    class Two(nnx.Module):
        def __init__(self):
            self.first, self.second = dots(nnx.Rngs(0)), none(nnx.Rngs(1))

        def __call__(self, x):
            return self.second(self.first(x))

    graphdef, state = nnx.split(Two())
    model = nnx.merge(graphdef, state)
    assert isinstance(model.first, Block)
    assert isinstance(model.second, Block)
    assert regions(lambda state, x: nnx.merge(graphdef, state)(x), state, X) == 2


@pytest.mark.parametrize("at", [None, "*/blocks/*"])
@pytest.mark.parametrize("policy", ["dots", save(module("*/up")), save(named("act"))], ids=repr)
def test_nnx_loss_function(at, policy):
    assert_equal(nnx_step(loss=remat_kit.policy(policy, at=at)), plain_nnx_step())


def test_nnx_classes_are_as_before_after_a_trace():
    before = Block.__call__
    nnx_step(loss=remat_kit.policy("dots", at="*/blocks/*"))
    assert Block.__call__ is before


# -- errors -----------------------------------------------------------------------------------


WRONG = [
    ({"what": save(named("atc"))}, "no checkpoint name is named 'atc'\nhint: did you mean 'act'?"),
    ({"what": save(module("*/upp"))}, "no module is named '*/upp'\nhint: did you mean '*/up'"),
    ({"what": save(primitive("dot_genral"))}, "no primitive is named 'dot_genral'"),
    (
        {"what": "dots", "at": "*/Lyer_*"},
        "no module is named '*/Lyer_*'\nhint: did you mean '*/Layer",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_what_does_not_exist_is_an_error_with_near_matches(call, message):
    with pytest.raises(UnknownNameError) as caught:
        step(remat_kit.policy(**call)(net(Layer)))
    assert message in str(caught.value)


def test_presets_are_looked_up_at_once():
    with pytest.raises(UnknownNameError, match="did you mean 'dots'"):
        remat_kit.policy("dotz")


def test_what_cannot_be_decorated():
    with pytest.raises(UserError, match="cannot be decorated"):
        remat_kit.policy("dots")(3)
    with pytest.raises(UserError, match="methods="):
        remat_kit.policy("dots", methods=["f"])(jnp.tanh)
    with pytest.raises(PolicyError, match="is not a policy"):
        remat_kit.policy(3)


def test_offload_composes_with_save_on_an_unedited_model():
    policy = offload(module("*/down")) | save(module("*/up"))
    assert_equal(step(remat_kit.policy(policy, at="*/Layer_*")(net(Layer))), plain_step())
