"""Classes and callable pytrees stay what they are when they are decorated."""

import copy
import dataclasses
import functools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import remat_kit
from remat_kit import UserError
from remat_kit._apply import decorate as _decorate

X = jnp.linspace(-1.0, 1.0, 4)
W = jnp.linspace(0.1, 1.6, 16).reshape(4, 4)
nothing = functools.partial(remat_kit.policy, "nothing")


@flax.struct.dataclass
class Struct:
    w: jax.Array
    factor: float = flax.struct.field(pytree_node=False, default=2.0)

    def __call__(self, x):
        return self.factor * jnp.sin(jnp.tanh(self.w @ x))

    def encode(self, x):
        return jnp.sin(jnp.tanh(self.w @ x))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["factor"])
@dataclasses.dataclass(frozen=True)
class Registered:
    w: jax.Array
    factor: float = 2.0
    __call__ = Struct.__call__


@jax.tree_util.register_pytree_node_class
class Slotted:
    __slots__ = ("factor", "w")

    def __init__(self, w, factor=2.0):
        self.w, self.factor = w, factor

    def tree_flatten(self):
        return (self.w,), self.factor

    @classmethod
    def tree_unflatten(cls, factor, children):
        return cls(*children, factor)

    __call__ = Struct.__call__


class Tuple(NamedTuple):
    w: jax.Array
    factor: float = 2.0

    def __call__(self, x):
        return self.factor * jnp.sin(jnp.tanh(self.w @ x))


def loss(layer, x):
    return jnp.sum(layer(x) ** 2)


def regions(layer):
    return str(jax.make_jaxpr(jax.grad(loss))(layer, X)).count("remat")


KINDS = [Struct, Registered, Slotted, Tuple]


@pytest.mark.parametrize("decorate", ["class", "instance"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_callable_pytree_keeps_its_leaves_and_its_type(kind, decorate):
    plain = kind(W)
    layer = nothing()(kind)(W) if decorate == "class" else nothing()(plain)
    assert isinstance(layer, kind)
    assert type(layer).__name__ == kind.__name__
    paths, leaves = zip(*jax.tree_util.tree_flatten_with_path(layer)[0], strict=True)
    expected = jax.tree_util.tree_flatten_with_path(plain)[0]
    assert list(paths) == [path for path, _ in expected]
    assert leaves[0] is W
    expected, got = jax.grad(loss)(plain, X), jax.grad(loss)(layer, X)
    assert type(got) is type(layer)
    np.testing.assert_allclose(got.w, expected.w, rtol=1e-6)
    assert regions(layer) > regions(plain) == 0


def test_decorated_instances_can_be_stacked():
    layers = [nothing()(Struct(W * i)) for i in (1.0, 2.0)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    assert isinstance(stacked, Struct)
    got = jax.vmap(lambda layer: layer(X))(stacked)
    np.testing.assert_allclose(got, jnp.stack([layer(X) for layer in layers]), rtol=1e-6)
    assert stacked.replace(w=W)(X).shape == X.shape


def test_methods_of_a_pytree():
    layer = nothing(methods=["encode"])(Struct(W))
    text = str(jax.make_jaxpr(jax.grad(lambda f: f.encode(X).sum()))(layer))
    assert "remat" in text
    assert regions(layer) == 0


def test_a_partial_keeps_what_it_is_bound_to():
    f = nothing()(jax.tree_util.Partial(lambda w, x: jnp.sin(jnp.tanh(w @ x)), W))
    gradient = jax.grad(lambda f: f(X).sum())(f)
    assert isinstance(gradient, jax.tree_util.Partial)
    assert gradient.args[0].shape == W.shape
    g = nothing(static_argnums=0)(
        jax.tree_util.Partial(lambda w, n, x: x if n > 1 else jnp.tanh(w @ x), W)
    )
    np.testing.assert_array_equal(g(2.0, X), X)


def test_static_and_class_methods():
    class Plain:
        scale = 3.0

        @nothing()
        @staticmethod
        def double(x):
            return 2.0 * jnp.sin(x)

        @nothing()
        @classmethod
        def scaled(cls, x):
            return cls.scale * jnp.sin(x)

        def __call__(self, x):
            return self.scaled(self.double(x))

    expected = 3.0 * jnp.sin(2.0 * jnp.sin(X))
    np.testing.assert_allclose(Plain()(X), expected, rtol=1e-6)
    decorated = nothing(methods=["double", "__call__"])(Plain)
    assert isinstance(decorated(), Plain)
    np.testing.assert_allclose(decorated()(X), expected, rtol=1e-6)


class Without:
    size = property(lambda self: 3)

    def forward(self, x):
        return x


def generator(x):
    yield x


@pytest.mark.parametrize(
    ("target", "methods", "message"),
    [
        (3, None, "3 cannot be decorated\nhint: decorate a function, a module class or an"),
        (property(len), None, "cannot be decorated"),
        (generator, None, "generator is a generator or a coroutine, so calling it computes"),
        (Without, None, r"Without has no method `__call__`\nhint: name .* methods=\['forward'\]"),
        (Without, ["forwad"], "no method of Without is named 'forwad'\nhint: did you mean"),
        (Without, ["size"], "size is a property, not a method"),
        (bool, ["conjugate"], "the class bool cannot be decorated, because it refuses"),
        (jnp.tanh, ["x"], r"methods=\('x',\) was given"),
    ],
)
def test_what_cannot_be_decorated(target, methods, message):
    with pytest.raises(UserError, match=message):
        nothing(methods=methods)(target)


# -- copies and pickles -------------------------------------------------------------------------


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.sin(nn.Dense(4)(x))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return jnp.sin(self.dense(x))


def of_linen(module, x):
    return module.apply(module.init(jax.random.key(0), x), x)


def called(module, x):
    return module(x)


COPIED = {
    "an instance of Linen": (lambda p: p(Dense()), of_linen),
    "a class of Linen": (lambda p: p(Dense)(), of_linen),
    "an instance of NNX": (lambda p: p(Layer(nnx.Rngs(0))), called),
    "a class of NNX": (lambda p: p(Layer)(nnx.Rngs(0)), called),
    "a pytree": (lambda p: p(Struct(W)), called),
    "slots": (lambda p: p(Slotted(W)), called),
    "a named tuple": (lambda p: p(Tuple(W)), called),
    "decorated twice": (lambda p: nothing()(p(Struct(W))), called),
}
COPIES = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "old pickle": lambda x: pickle.loads(pickle.dumps(x, protocol=2)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", COPIED)
def test_copies_and_pickles_are_decorated(kind, how):
    make, call = COPIED[kind]
    before = make(remat_kit.policy("dots"))
    after = COPIES[how](before)
    assert type(after) is type(before)
    assert _decorate.applied(type(after)) == _decorate.applied(type(before))
    np.testing.assert_array_equal(call(after, X), call(before, X))


def test_a_pickle_is_read_in_another_process(tmp_path):
    """One file with two layers, which must be of one class there too."""
    file = tmp_path / "layers.pickle"
    layers = [nothing()(Struct(W)) for _ in range(2)] + [nothing()(Layer(nnx.Rngs(0)))]
    file.write_bytes(pickle.dumps(layers))
    program = f"""
import importlib, pickle, sys
import jax
sys.path[:0] = {[str(Path(__file__).parents[n]) for n in (2, 1)]}
test_classes = importlib.import_module({__name__!r})
first, second, layer = pickle.load(open({str(file)!r}, "rb"))
assert type(first) is type(second) is not test_classes.Struct
assert isinstance(first, test_classes.Struct) and isinstance(layer, test_classes.Layer)
text = str(jax.make_jaxpr(lambda x: first(x) + second(x))(test_classes.X))
print(text.count("checkpoint[") + text.count("remat2["))
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout.strip()) == (0, "2"), found.stderr


def test_what_a_pickle_cannot_hold_is_said_by_python():
    layer = remat_kit.policy(remat_kit.save(remat_kit.where(lambda value: True)))(Struct(W))
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(layer)
    assert type(copy.deepcopy(layer)) is type(layer)
