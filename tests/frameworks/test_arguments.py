"""What the arguments of a decorated function become: traced arrays or Python values."""

import functools
import traceback

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import remat_kit
from remat_kit import UserError

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
nothing = functools.partial(remat_kit.policy, "nothing")


@pytest.mark.parametrize("value", [2.0, 3, True, 1j, np.float32(2.0)], ids=repr)
def test_scalars_are_traced_as_jax_checkpoint_traces_them(value):
    seen = []

    def f(x, value, *, other):
        assert isinstance(value, jax.core.Tracer)
        seen.append((jax.typeof(value), jax.typeof(other)))
        return x * value + other

    expected = jax.checkpoint(f)(X, value, other=value)
    jax.clear_caches()  # the two share their traces
    got = nothing()(f)(X, value, other=value)
    assert jax.typeof(got) == jax.typeof(expected)
    np.testing.assert_array_equal(got, expected)
    first, second = seen
    assert first == second


def test_the_gradient_of_a_scalar():
    f = nothing()(lambda x, scale: (jnp.sin(x) * scale).sum())
    np.testing.assert_allclose(jax.grad(f, 1)(X, 3.0), jnp.sin(X).sum(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("f", "value"),
    [
        (lambda x, n: -x if n else x, True),
        (lambda x, n: sum((x for _ in range(n)), jnp.zeros_like(x)), 3),
        (lambda x, n: x[:, :n], 2),
        (lambda x, n: jnp.zeros((n, 3)) + x[:1], 4),
        (lambda x, n: x * {1: 2.0, 5: 3.0}[n], 5),
        (lambda x, n: x.sum(axis=n, keepdims=True), 1),
        (lambda x, n: x * (n % 7), 2**40),  # no array of 32 bits
    ],
)
def test_bools_and_ints_may_steer_python(f, value):
    g = nothing()(f)
    for _ in range(2):
        np.testing.assert_array_equal(g(X, value), f(X, value))
        np.testing.assert_array_equal(g(X, n=value), f(X, n=value))


def test_a_function_that_needs_a_python_value_is_traced_twice_only_the_first_time():
    count = []

    @nothing()
    def f(x, train):
        count.append(1)
        return jnp.sin(x) if train else x

    f(X, True)
    assert len(count) == 2
    f(X, False)
    assert len(count) == 3


def test_a_float_that_steers_python_has_to_be_static():
    def f(x, rate):
        return x / rate if rate > 0 else x

    with pytest.raises(jax.errors.TracerBoolConversionError):
        nothing()(f)(X, 0.5)
    try:
        nothing()(f)(X, 0.5)
    except jax.errors.TracerBoolConversionError:
        text = traceback.format_exc()
    assert "rate > 0" in text
    assert "hint: if an argument of the decorated function must be a Python value" in text
    np.testing.assert_array_equal(nothing(static_argnums=1)(f)(X, 0.5), f(X, 0.5))


def test_the_error_of_a_function_comes_once():
    def f(x, train):
        raise KeyError("missing")

    with pytest.raises(KeyError) as caught:
        nothing()(f)(X, True)
    assert caught.value.__context__ is None


def test_what_is_no_array_is_a_constant():
    @nothing()
    def f(x, activation, options, kind=None):
        return activation(x) * options["scale"][0] if kind == "scaled" else x

    expected = jnp.tanh(X) * 2.0
    got = f(X, jnp.tanh, {"scale": (2.0, "unused"), "other": None}, kind="scaled")
    np.testing.assert_array_equal(got, expected)


def test_static_arguments_by_position_by_name_and_by_keyword():
    def f(x, n, stop=3):
        assert type(n) is int
        assert type(stop) is int
        return x if n > stop else jnp.tanh(x)

    for mark in (
        {"static_argnums": (1, 2)},
        {"static_argnames": ("n", "stop")},
        {"static_argnums": -1, "static_argnames": "n"},
    ):
        g = nothing(**mark)(f)
        np.testing.assert_array_equal(g(X, 7, 3), X)
        if mark != {"static_argnums": -1, "static_argnames": "n"}:
            np.testing.assert_array_equal(g(X, n=2, stop=3), jnp.tanh(X))
            np.testing.assert_array_equal(g(X, 7), X)
    with pytest.raises(UserError, match=r"static_argnums=\(5,\), but the call has 1"):
        nothing(static_argnums=5)(jnp.tanh)(X)


def scaled(x, factor, *, flip=False):
    return -x * factor if flip else x * factor


class Scaling(nnx.Module):
    def __call__(self, x, factor):
        return x * factor

    def encode(self, x, mode):
        return x


@pytest.mark.parametrize(
    "decorate",
    [
        lambda p: p(scaled),
        lambda p: p(functools.partial(scaled, flip=True)),
        lambda p: p(jax.tree_util.Partial(scaled)),
        lambda p: p(Scaling),
        lambda p: p(Scaling()),
        lambda p: p(Scaling().__call__),
        lambda p: p(staticmethod(scaled)),
    ],
)
def test_a_static_argument_that_is_no_parameter_is_refused_as_jit_refuses_it(decorate):
    with pytest.raises(ValueError, match="factr"):
        jax.jit(scaled, static_argnames="factr")
    with pytest.raises(remat_kit.UnknownNameError, match="no parameter is named 'factr'") as caught:
        decorate(remat_kit.policy("nothing", static_argnames=["x", "factr"]))
    assert caught.value.hint == "did you mean 'factor'?"
    decorate(remat_kit.policy("nothing", static_argnames="factor"))


def test_a_static_argument_of_one_of_several_methods():
    remat_kit.policy("nothing", methods=["__call__", "encode"], static_argnames="mode")(Scaling)
    with pytest.raises(remat_kit.UnknownNameError, match="'mode'"):
        remat_kit.policy("nothing", static_argnames="mode")(Scaling)


def test_a_static_argument_of_a_function_that_takes_any_keyword():
    f = remat_kit.policy("nothing", static_argnames="mode")(lambda x, **options: x)
    np.testing.assert_array_equal(f(jnp.ones(2), mode="a"), jnp.ones(2))
    remat_kit.policy("nothing", static_argnames="k")(max)  # which has no signature


def test_unhashable_and_traced_static_arguments():
    f = nothing(static_argnums=1)(lambda x, config: x * config["scale"])
    np.testing.assert_array_equal(f(X, {"scale": 2.0}), 2.0 * X)
    # `jax.checkpoint` closes over a traced argument that is called static.
    gradient = jax.grad(lambda s: f(X, {"scale": s}).sum())(3.0)
    np.testing.assert_allclose(gradient, X.sum(), atol=1e-6)


class Block(nn.Module):
    """A module that checks how its flag arrives."""

    flag: type

    @nn.compact
    def __call__(self, x, train=False):
        assert isinstance(train, self.flag)
        return nn.Dense(3)(x)


@pytest.mark.parametrize(
    ("mark", "flag"),
    [
        ({"static_argnums": (2,)}, bool),  # as in `nn.remat`, `self` is 0
        ({"static_argnames": "train"}, bool),
        ({}, jax.Array),
    ],
)
def test_arguments_of_linen_modules(mark, flag):
    model = nothing(**mark)(Block)(flag)
    variables = model.init(jax.random.key(0), X, True)
    expected = Block(object).apply(variables, X)
    np.testing.assert_array_equal(model.apply(variables, X, True), expected)
    np.testing.assert_array_equal(model.apply(variables, X, train=True), expected)


def test_a_linen_method_with_a_static_argument():
    class Method(nn.Module):
        @nothing(static_argnums=(2,))
        @nn.compact
        def __call__(self, x, train):
            assert isinstance(train, bool)
            return nn.Dense(3)(x)

    model = Method()
    variables = model.init(jax.random.key(0), X, True)
    assert model.apply(variables, X, train=False).shape == X.shape


def test_a_second_trace_draws_the_same_random_numbers():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = x + jax.random.normal(self.make_rng("noise"), x.shape)
            x = nn.Dense(3, kernel_init=nn.initializers.normal())(x)
            return nn.Dropout(0.5, rng_collection="noise")(x, deterministic=not train)

    rngs = {"params": jax.random.key(0), "noise": jax.random.key(1)}
    plain, decorated = Noisy(), nothing()(Noisy)()
    variables = plain.init(rngs, X, True)
    jax.tree.map(np.testing.assert_array_equal, variables, decorated.init(rngs, X, True))
    expected = plain.apply(variables, X, True, rngs=rngs)
    np.testing.assert_array_equal(decorated.apply(variables, X, True, rngs=rngs), expected)


def test_a_linen_module_that_may_change_everything_keeps_its_policy():
    model = nothing()(Block)(object)
    variables = model.init(jax.random.key(0), X)
    for mutable in (True, ["params"], ["batch_stats"], False):

        def apply(variables, mutable=mutable):
            return model.apply(variables, X, mutable=mutable)

        assert "remat" in str(jax.make_jaxpr(apply)(variables))


def test_linen_modules_in_any_argument():
    def through(x, layers):
        return layers["first"](x)

    class Net(nn.Module):
        function: object

        @nn.compact
        def __call__(self, x):
            layers = {"first": nn.Dense(3), "second": nn.BatchNorm(False)}
            return layers["second"](self.function(x, layers))

    variables = Net(through).init(jax.random.key(0), X)
    expected = Net(through).apply(variables, X, mutable=["batch_stats"])
    got = Net(nothing()(through)).apply(variables, X, mutable=["batch_stats"])
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_a_linen_module_without_variables_is_a_constant():
    model = Block(object)
    variables = model.init(jax.random.key(0), X)

    def apply(model, variables, x):
        return model.apply(variables, x)

    got = nothing()(apply)(model, variables, X)
    np.testing.assert_array_equal(got, apply(model, variables, X))
    np.testing.assert_array_equal(nothing()(model.apply)(variables, X), got)
