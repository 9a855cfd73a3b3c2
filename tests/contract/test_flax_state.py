"""Flax layers, lifted transformations and state train as they do without a policy.

Every case is a small network around one layer. It trains for three steps of gradient descent, with
and without a policy on the layer. Parameters, mutable state, random streams and the loss must be
the same. Evaluated operation by operation (see `harness.interpreted`) they must be bitwise the
same. Under `jit` XLA fuses the two programs differently, so the results agree within `ROUNDING`
units of the dtype's precision of the largest value, and integers and random keys are still equal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from harness import ROUNDING, interpreted

import remat_kit

X = jnp.sin(jnp.arange(32.0)).reshape(2, 4, 4)  # batch, time, width
STEPS = 3
RATE = 0.05

nothing = remat_kit.policy("nothing")
dots = remat_kit.policy("dots")


def plain(target: Any) -> Any:
    return target


# -- what both halves share -------------------------------------------------------------------


def leaves_of(tree: Any) -> dict[str, np.ndarray]:
    """The arrays of a pytree by their path; random keys as the integers they are made of."""

    def data(x: Any) -> np.ndarray:
        is_key = jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): data(x) for path, x in found}


def operation_by_operation(step: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], str]:
    """The step without any fusion, and the text of its program."""
    closed, shape = jax.make_jaxpr(step, return_shape=True)(*args)
    tree = jax.tree.structure(shape)

    def run(*args: Any) -> Any:
        return jax.tree.unflatten(tree, interpreted(closed, jax.tree.leaves(args)))

    return run, str(closed)


def train(step: Callable[..., Any], state: Any, jit: bool) -> tuple[list[Any], str]:
    """What a step ``(state, key) -> (state, results)`` returns, three times, and its text."""
    keys = [jax.random.key(i) for i in range(STEPS)]
    run, text = (jax.jit(step), "") if jit else operation_by_operation(step, state, keys[0])
    history = []
    for key in keys:
        state, results = run(state, key)
        history.append((state, results))
    return history, text


def assert_same(got: Any, expected: Any, units: int) -> None:
    got, expected = leaves_of(got), leaves_of(expected)
    assert list(got) == list(expected)
    for path, value in expected.items():
        if units and np.issubdtype(value.dtype, np.inexact):
            atol = units * np.finfo(value.dtype).eps * max(1.0, np.abs(value).max(initial=0.0))
            np.testing.assert_allclose(got[path], value, rtol=0, atol=atol, err_msg=path)
        else:
            np.testing.assert_array_equal(got[path], value, err_msg=path)


def assert_learns(history: list[Any]) -> None:
    """The comparison says nothing unless something changes from step to step."""
    first, last = (leaves_of(history[i]) for i in (0, -1))
    assert all(np.isfinite(x).all() for x in last.values() if np.issubdtype(x.dtype, np.inexact))
    assert any(not np.array_equal(first[path], last[path]) for path in last)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer: ``build(decorate, ...)``, and where its results may round in another way.

    Where two regions read one value, their cotangents are added up in another order. Around a loop
    (``like`` is then Flax's own `remat`) JAX's derivative of the loop rounds differently than the
    loop in a region does. There the results must be bitwise those of Flax's own `remat`.
    """

    build: Callable[..., Any]
    regions: int = 1
    like: Callable[..., Any] | None = None

    @property
    def units(self) -> int:
        return 0 if self.regions == 1 and self.like is None else ROUNDING


def check(net: Callable[..., Any], case: Case, policy: Any, at: str | None, jit: bool) -> None:
    """Train ``net(decorate_layer, decorate_net)``, which returns a step and its state."""
    expected, text = train(*net(plain, plain), jit)
    assert_learns(expected)
    if at is None:
        step, state = net(policy, plain)
    else:
        step, state = net(plain, remat_kit.policy("nothing", at=at))
    got, decorated = train(step, state, jit)
    assert jit or decorated.count("remat") + decorated.count("checkpoint") > text.count(
        "remat"
    ) + text.count("checkpoint")
    assert_same(got, expected, ROUNDING if jit else case.units)
    if case.like is not None and at is None and not jit:
        as_flax, _ = train(net(case.like, plain)[0], state, jit)
        assert_same(got, as_flax, 0)


# -- Linen ------------------------------------------------------------------------------------


class Block(nn.Module):
    """Parameters, statistics, a random stream, a counter and sown values."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(4)(x))
        x = nn.Dropout(0.5, deterministic=False)(jnp.sin(x))
        count = self.variable("counter", "calls", jnp.zeros, (), jnp.int32)
        if not self.is_initializing():
            count.value = count.value + 1
        self.sow("intermediates", "out", x)
        return x


class Body(nn.Module):
    """A block as the body of `nn.scan`."""

    @nn.compact
    def __call__(self, x, _):
        return Block()(x), jnp.sum(x)


class Perturbed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.sin(self.perturb("between", nn.Dense(4)(x)))


class InSetup(nn.Module):
    decorate: Any

    def setup(self):
        self.first = self.decorate(Block)()
        self.more = [nn.Dense(4) for _ in range(2)]

    def __call__(self, x):
        return self.more[1](jnp.sin(self.more[0](self.first(x))))


class Branches(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x):
        one, other = nn.Dense(4, name="one"), nn.Dense(4, name="other")
        index = (jnp.sum(x) > 0).astype(jnp.int32)
        if self.is_initializing():
            return one(x) + other(x)
        if self.kind == "cond":
            functions = [lambda _, x: jnp.sin(one(x)), lambda _, x: jnp.tanh(other(x))]
            return nn.cond(index > 0, *functions, self, x)
        functions = [lambda _, x: jnp.sin(one(x)), lambda _, x: jnp.tanh(other(x))]
        return nn.switch(index, functions, self, x)


class Loop(nn.Module):
    """A loop that counts, which has no derivative, next to a layer."""

    @nn.compact
    def __call__(self, x):
        count = self.variable("counter", "rounds", jnp.zeros, (), jnp.int32)
        x = jnp.sin(nn.Dense(4)(x))
        if self.is_initializing():
            return x

        def body(module, left):
            module.put_variable("counter", "rounds", module.get_variable("counter", "rounds") + 1)
            return left - 1

        nn.while_loop(lambda _, left: left > 0, body, self, 3, carry_variables="counter")
        return x * (1.0 + 0.1 * count.value)


class Shared(nn.Module):
    decorate: Any

    @nn.compact
    def __call__(self, x):
        layer = self.decorate(Block)(name="shared")
        return layer(jnp.cos(layer(x)))


class WeightNormed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.sin(nn.WeightNorm(nn.Dense(4))(x))


class SpectralNormed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.sin(nn.SpectralNorm(nn.Dense(4))(x, update_stats=True))


class Doubled(nn.Module):
    decorate: Any

    @nn.compact
    def __call__(self, x):
        mapped = nn.map_variables(
            self.decorate(Block),
            "params",
            trans_in_fn=functools.partial(jax.tree.map, lambda p: 2.0 * p),
            trans_out_fn=functools.partial(jax.tree.map, lambda p: 0.5 * p),
            init=self.is_initializing(),
            mutable=self.is_initializing(),
        )
        return mapped()(x)


class Recurrent(nn.Module):
    cell: Any

    @nn.compact
    def __call__(self, x):
        return nn.RNN(self.cell(4))(x)


def layer(cls: Any, *args: Any, **kwargs: Any) -> Case:
    return Case(lambda r, x: r(cls)(*args, name="layer", **kwargs)(x))


AXES: dict[str, Any] = {
    "variable_axes": dict.fromkeys(("params", "batch_stats", "counter", "intermediates"), 0),
    "split_rngs": {"params": True, "dropout": True},
}


def scanned(target: Any) -> Any:
    return nn.scan(target, length=2, **AXES)


LINEN: dict[str, Case] = {
    "Dense": layer(nn.Dense, 4),
    "DenseGeneral": layer(nn.DenseGeneral, (4,)),
    "Conv": layer(nn.Conv, 4, (3,)),
    "ConvTranspose": layer(nn.ConvTranspose, 4, (3,)),
    "Embed": Case(lambda r, x: r(nn.Embed)(8, 4, name="layer")(jnp.argmax(x, -1))),
    "LayerNorm": layer(nn.LayerNorm),
    "RMSNorm": layer(nn.RMSNorm),
    "GroupNorm": layer(nn.GroupNorm, num_groups=2),
    "BatchNorm": layer(nn.BatchNorm, use_running_average=False),
    "Dropout": layer(nn.Dropout, 0.5, deterministic=False),
    "attention": layer(
        nn.MultiHeadDotProductAttention, num_heads=2, dropout_rate=0.2, deterministic=False
    ),
    "RNN of GRUCell": Case(lambda r, x: r(Recurrent)(nn.GRUCell, name="layer")(x), like=nn.remat),
    "RNN of LSTMCell": Case(lambda r, x: r(Recurrent)(nn.LSTMCell, name="layer")(x), like=nn.remat),
    "RNN of OptimizedLSTMCell": Case(
        lambda r, x: r(Recurrent)(nn.OptimizedLSTMCell, name="layer")(x), like=nn.remat
    ),
    "cells in an RNN": Case(lambda r, x: nn.RNN(r(nn.GRUCell)(4), name="layer")(x)),
    "SpectralNorm": layer(SpectralNormed),
    "WeightNorm": layer(WeightNormed),
    "variables, sow": layer(Block),
    "perturb": layer(Perturbed),
    "body of scan": Case(lambda r, x: scanned(r(Body))(name="layer")(x, None)[0]),
    "around scan": Case(lambda r, x: r(scanned(Body))(name="layer")(x, None)[0], like=nn.remat),
    "in vmap": Case(lambda r, x: nn.vmap(r(Block), **AXES)(name="layer")(x)),
    "around vmap": Case(lambda r, x: r(nn.vmap(Block, **AXES))(name="layer")(x)),
    "in jit": Case(lambda r, x: nn.jit(r(Block))(name="layer")(x)),
    "around jit": Case(lambda r, x: r(nn.jit(Block))(name="layer")(x)),
    "in remat": Case(lambda r, x: nn.remat(r(Block))(name="layer")(x)),
    "around remat": Case(lambda r, x: r(nn.remat(Block))(name="layer")(x)),
    "map_variables": Case(lambda r, x: Doubled(r, name="layer")(x)),
    "cond": layer(Branches, "cond"),
    "switch": layer(Branches, "switch"),
    "while_loop": layer(Loop),
    "Sequential": Case(
        lambda r, x: r(nn.Sequential)([nn.Dense(4), jnp.sin, nn.LayerNorm()], name="layer")(x)
    ),
    "in Sequential": Case(lambda r, x: nn.Sequential([r(Block)(), r(Block)()], name="layer")(x)),
    "setup": Case(lambda r, x: InSetup(r, name="layer")(x)),
    "shared": Case(lambda r, x: Shared(r, name="layer")(x), regions=2),
    "an instance": Case(lambda r, x: r(Block(name="layer"))(x)),
}


class LinenNet(nn.Module):
    """The layer between two others; a random number after it shows the stream's counter."""

    build: Any
    decorate: Any

    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(4, name="before")(x))
        x = nn.Dense(4, name="after")(self.build(self.decorate, x))
        return jnp.sin(x) + jax.random.uniform(self.make_rng("dropout"))


DIFFERENTIATED = ("params", "perturbations")


@functools.cache
def linen_variables(build: Any) -> Any:
    streams = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(LinenNet(build, plain).init)(streams, X)
    return {k: v for k, v in variables.items() if k != "intermediates"}


def linen_net(case: Case, on_layer: Any, on_net: Any) -> tuple[Callable[..., Any], Any]:
    net = on_net(LinenNet)(case.build, on_layer)

    def step(variables: Any, key: Any) -> Any:
        def loss(diff: Any) -> Any:
            y, changed = net.apply(
                {**variables, **diff},
                X,
                rngs={"dropout": key},
                mutable=nn.DenyList(DIFFERENTIATED),
            )
            return jnp.sum(y**2), changed

        diff = {k: variables[k] for k in DIFFERENTIATED if k in variables}
        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(diff)
        diff = jax.tree.map(lambda p, g: p - RATE * g, diff, grads)
        sown = changed.pop("intermediates", {})
        return {**variables, **changed, **diff}, (value, sown)

    return step, linen_variables(case.build)


# The default run takes a sample of the table; `pytest -m slow` takes the rest.
QUICK = ("BatchNorm", "variables, sow", "body of scan")
QUICK_NNX = ("LoRA", "state", "forks")
JIT = pytest.param(True, id="jit", marks=pytest.mark.slow)
BITWISE = pytest.param(False, id="bitwise")
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


def sample(names: Any, quick: tuple[str, ...]) -> list[Any]:
    return [name if name in quick else SLOW(name) for name in names]


@pytest.mark.parametrize("jit", [BITWISE, JIT])
@pytest.mark.parametrize("name", sample(LINEN, QUICK))
def test_linen(name, jit):
    case = LINEN[name]
    check(functools.partial(linen_net, case), case, nothing, None, jit)


@pytest.mark.parametrize(
    "name", sample(["Dense", "attention", "variables, sow", "body of scan"], ("variables, sow",))
)
def test_linen_keeping_products(name):
    case = LINEN[name]
    check(functools.partial(linen_net, case), case, dots, None, jit=False)


@pytest.mark.parametrize("jit", [BITWISE, JIT])
@pytest.mark.parametrize("name", sample(LINEN, ("variables, sow",)))
def test_linen_at(name, jit):
    case = LINEN[name]
    # The names of the modules are inside the region of `nn.remat`, which ``at=`` does not enter.
    refused = pytest.raises(remat_kit.PolicyError, match="lies inside a checkpoint region")
    with refused if name in ("in remat", "around remat") else contextlib.nullcontext():
        check(functools.partial(linen_net, case), case, None, "**/layer", jit)


@pytest.mark.parametrize("decorate", [nothing, dots], ids=["nothing", "dots"])
def test_the_cache_of_a_decoder(decorate):
    def decoded(cls: Any) -> Any:
        attention = cls(num_heads=2, decode=True)
        variables = jax.jit(attention.init)(jax.random.key(0), X)
        params, cache, out = variables["params"], variables["cache"], []
        for i in range(STEPS):
            y, changed = attention.apply(
                {"params": params, "cache": cache}, X[:, i : i + 1], mutable=["cache"]
            )
            cache = changed["cache"]
            out.append((y, cache))
        return out

    expected = decoded(nn.MultiHeadDotProductAttention)
    assert_learns(expected)
    assert_same(decoded(decorate(nn.MultiHeadDotProductAttention)), expected, ROUNDING)


# -- NNX --------------------------------------------------------------------------------------


class Count(nnx.Variable):
    """A kind of state that Flax knows nothing of."""


class XBlock(nnx.Module):
    """Parameters, statistics, a random stream and a counter."""

    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=False, rngs=rngs)
        self.count = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.count[...] += 1
        return self.drop(jnp.sin(self.norm(self.dense(x))))


class Layer(nnx.Module):
    """A function of inner objects as a layer."""

    def __init__(self, call: Any, **inner: Any):
        self.call = call
        for name, value in inner.items():
            setattr(self, name, value)

    def __call__(self, x):
        return self.call(self, x)


def xlayer(cls: Any, *args: Any, **kwargs: Any) -> Case:
    return Case(lambda r, rngs: r(cls)(*args, rngs=rngs, **kwargs))


def xblock(call: Callable[..., Any], like: Any = None, **inner: Any) -> Case:
    """A layer that calls ``call(decorate, self, x)`` with a block."""

    def build(r: Any, rngs: nnx.Rngs) -> Any:
        made = {name: make(rngs) for name, make in inner.items()}
        return Layer(functools.partial(call, r), block=XBlock(rngs), **made)

    return Case(build, like=like)


def run_block(block: Any, x: Any) -> Any:
    return block(x)


def two_blocks(rngs: nnx.Rngs) -> Any:
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return XBlock(rngs)

    return make(rngs)


SCAN = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)


def forked(decorate: Any, self: Any, x: Any) -> Any:
    """Random streams that a decorated function forks and draws from."""

    def call(rngs, x):
        split = rngs.split(2)
        noise = jax.vmap(lambda key: jax.random.uniform(key, x.shape[1:]))(split.dropout.key[...])
        return jnp.sin(x * noise) * jax.random.bernoulli(rngs.dropout(), 0.7, x.shape)

    return self.block(decorate(call)(self.rngs, x))


def branched(decorate: Any, self: Any, x: Any) -> Any:
    def call(block, x):
        return nnx.cond(
            jnp.sum(x) > 0,
            lambda block, x: block(x),
            lambda block, x: jnp.tanh(block.dense(x)),
            block,
            x,
        )

    return decorate(call)(self.block, x)


NNX: dict[str, Case] = {
    "Linear": xlayer(nnx.Linear, 4, 4),
    "LinearGeneral": xlayer(nnx.LinearGeneral, 4, 4),
    "Conv": xlayer(nnx.Conv, 4, 4, (3,)),
    "Embed": Case(
        lambda r, rngs: Layer(
            lambda self, x: self.embed(jnp.argmax(x, -1)), embed=r(nnx.Embed)(8, 4, rngs=rngs)
        )
    ),
    "LayerNorm": xlayer(nnx.LayerNorm, 4),
    "RMSNorm": xlayer(nnx.RMSNorm, 4),
    "BatchNorm": xlayer(nnx.BatchNorm, 4),
    "GroupNorm": xlayer(nnx.GroupNorm, 4, num_groups=2),
    "Dropout": xlayer(nnx.Dropout, 0.5, deterministic=False),
    "attention": xlayer(
        nnx.MultiHeadAttention, 2, 4, decode=False, dropout_rate=0.2, deterministic=False
    ),
    "RNN of GRUCell": xblock(
        lambda r, self, x: r(run_block)(self.rnn, x),
        like=nnx.remat,
        rnn=lambda rngs: nnx.RNN(nnx.GRUCell(4, 4, rngs=rngs), rngs=rngs),
    ),
    "RNN of LSTMCell": xblock(
        lambda r, self, x: r(run_block)(self.rnn, x),
        like=nnx.remat,
        rnn=lambda rngs: nnx.RNN(nnx.LSTMCell(4, 4, rngs=rngs), rngs=rngs),
    ),
    "cells in an RNN": Case(lambda r, rngs: nnx.RNN(r(nnx.GRUCell)(4, 4, rngs=rngs), rngs=rngs)),
    "LoRA": xlayer(nnx.LoRA, 4, 2, 4),
    "state": Case(lambda r, rngs: r(XBlock)(rngs)),
    "an instance": Case(lambda r, rngs: r(XBlock(rngs))),
    "forks": xblock(forked, rngs=lambda rngs: rngs.fork()),
    "body of scan": xblock(
        lambda r, self, x: SCAN(r(run_block))(self.blocks, x), blocks=two_blocks
    ),
    "around scan": xblock(
        lambda r, self, x: r(SCAN(run_block))(self.blocks, x), like=nnx.remat, blocks=two_blocks
    ),
    "in vmap": xblock(lambda r, self, x: nnx.vmap(r(run_block))(self.blocks, x), blocks=two_blocks),
    "around vmap": xblock(
        lambda r, self, x: r(nnx.vmap(run_block))(self.blocks, x), blocks=two_blocks
    ),
    "in jit": xblock(lambda r, self, x: nnx.jit(r(run_block))(self.block, x)),
    "around jit": xblock(lambda r, self, x: r(nnx.jit(run_block))(self.block, x)),
    "in remat": xblock(lambda r, self, x: nnx.remat(r(run_block))(self.block, x)),
    "around remat": xblock(lambda r, self, x: r(nnx.remat(run_block))(self.block, x)),
    "cond": xblock(branched),
    "Sequential": Case(
        lambda r, rngs: r(nnx.Sequential)(XBlock(rngs), jnp.sin, nnx.Linear(4, 4, rngs=rngs))
    ),
    "in Sequential": Case(lambda r, rngs: nnx.Sequential(r(XBlock)(rngs), r(XBlock)(rngs))),
    "List": Case(
        lambda r, rngs: Layer(
            lambda self, x: functools.reduce(lambda x, block: block(x), self.blocks, x),
            blocks=nnx.List([r(XBlock)(rngs), r(XBlock)(rngs)]),
        )
    ),
    "shared": Case(
        lambda r, rngs: Layer(
            lambda self, x: self.block(jnp.cos(self.block(x))), block=r(XBlock)(rngs)
        ),
        regions=2,
    ),
}


class NnxNet(nnx.Module):
    """The layer between two others; a random number after it shows the stream's counter."""

    def __init__(self, layer: Any, rngs: nnx.Rngs):
        self.before = nnx.Linear(4, 4, rngs=rngs)
        self.layer = layer
        self.after = nnx.Linear(4, 4, rngs=rngs)
        self.rngs = rngs

    def __call__(self, x):
        x = self.after(self.layer(jnp.tanh(self.before(x))))
        return jnp.sin(x) + jax.random.uniform(self.rngs.dropout())


TRAINED = nnx.DiffState(0, nnx.Any(nnx.Param, nnx.LoRAParam))


def nnx_net(case: Case, on_layer: Any, on_net: Any) -> tuple[Callable[..., Any], Any]:
    graphs = []

    def make() -> Any:
        rngs = nnx.Rngs(0, dropout=1)
        net = on_net(NnxNet)(case.build(on_layer, rngs), rngs)
        graph, state = nnx.split(net)
        graphs.append(graph)
        return nnx.to_pure_dict(state)

    state = jax.jit(make)()
    (graph,) = graphs

    def step(state: Any, key: Any) -> Any:
        net = nnx.merge(graph, state)

        def loss(net: Any) -> Any:
            return jnp.sum(net(X + 0.1 * jax.random.normal(key, X.shape)) ** 2)

        value, grads = nnx.value_and_grad(loss, argnums=TRAINED)(net)
        params = nnx.state(net, TRAINED.filter)
        nnx.update(net, jax.tree.map(lambda p, g: p - RATE * g, params, grads))
        return nnx.to_pure_dict(nnx.state(net)), value

    return step, state


@pytest.mark.parametrize("jit", [BITWISE, JIT])
@pytest.mark.parametrize("name", sample(NNX, QUICK_NNX))
def test_nnx(name, jit):
    case = NNX[name]
    check(functools.partial(nnx_net, case), case, nothing, None, jit)


@pytest.mark.parametrize("jit", [BITWISE, JIT])
@pytest.mark.parametrize("name", sample(NNX, ("state",)))
def test_nnx_at(name, jit):
    case = NNX[name]
    check(functools.partial(nnx_net, case), case, None, "**/layer", jit)


@pytest.mark.parametrize(
    "name", sample(["Linear", "attention", "state", "body of scan"], ("state",))
)
def test_nnx_keeping_products(name):
    case = NNX[name]
    check(functools.partial(nnx_net, case), case, dots, None, jit=False)


def test_optimizer_and_metrics_beside_a_module():
    """A decorated loss updates a metric; the step around it owns an optimizer."""

    def trained(decorate: Any) -> Any:
        model = XBlock(nnx.Rngs(0, dropout=1))
        optimizer = nnx.Optimizer(model, optax.sgd(RATE, momentum=0.9), wrt=nnx.Param)
        metric = nnx.metrics.MultiMetric(loss=nnx.metrics.Average("loss"))

        @decorate
        def loss(model, metric):
            value = jnp.sum(model(X) ** 2)
            metric.update(loss=value)
            return value

        @nnx.jit
        def step(model, optimizer, metric):
            value, grads = nnx.value_and_grad(loss)(model, metric)
            optimizer.update(model, grads)
            return value

        history = []
        for _ in range(STEPS):
            value = step(model, optimizer, metric)
            states = [nnx.to_pure_dict(nnx.state(x)) for x in (model, optimizer, metric)]
            history.append((jax.tree.map(jnp.copy, states), value))
        return history

    expected = trained(plain)
    assert_learns(expected)
    assert_same(trained(nothing), expected, ROUNDING)
