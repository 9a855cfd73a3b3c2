"""Equinox: classes, instances and methods decorated, and programs that its users write."""

import copy
import functools
import io
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit

if jax.__version_info__ < (0, 11):
    pytest.skip("the releases that the tests need ask for a newer jax", allow_module_level=True)
eqx = pytest.importorskip("equinox", exc_type=ImportError)

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 4)
nothing = functools.partial(remat_kit.policy, "nothing")


def mlp(seed=0):
    return eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(seed))


class Net(eqx.Module):
    first: eqx.Module
    second: eqx.Module
    dropout: eqx.nn.Dropout
    scale: float = 2.0

    def __call__(self, x, key):
        return self.dropout(self.second(jnp.tanh(self.first(x))) * self.scale, key=key)

    def encode(self, x):
        return jnp.sin(self.first(x))


def net(wrap=lambda x: x):
    return Net(wrap(mlp(0)), wrap(mlp(1)), eqx.nn.Dropout(0.5))


def loss(model, x):
    return jnp.sum(model(x, KEY) ** 2)


def arrays(tree):
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


def assert_near(a, b):
    assert len(arrays(a)) == len(arrays(b))
    for x, y in zip(arrays(a), arrays(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def regions(f, *args):
    return str(eqx.filter_make_jaxpr(f)(*args)[0]).count("remat")


@pytest.mark.parametrize("how", ["class", "instance", "layers", "method in the class"])
def test_gradients_of_all_leaves(how):
    class Inside(Net):
        @remat_kit.policy("dots")
        def __call__(self, x, key):
            return super().__call__(x, key)

    model = {
        "class": lambda: nothing()(Net)(mlp(0), mlp(1), eqx.nn.Dropout(0.5)),
        "instance": lambda: nothing()(net()),
        "layers": lambda: net(nothing()),
        "method in the class": lambda: Inside(mlp(0), mlp(1), eqx.nn.Dropout(0.5)),
    }[how]()
    assert isinstance(model, Net)
    assert regions(eqx.filter_grad(loss), model, X) > 0
    expected = eqx.filter_jit(eqx.filter_value_and_grad(loss))(net(), X)
    assert_near(eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, X), expected)
    assert len(arrays(eqx.filter_grad(loss)(model, X))) == 12


def test_a_decorated_module_is_used_as_any_other():
    plain, layer = mlp(), nothing()(mlp())
    assert isinstance(layer, eqx.nn.MLP)
    assert nothing()(eqx.nn.MLP).__name__ == "MLP"
    changed = eqx.tree_at(lambda m: m.layers[0].weight, layer, jnp.zeros((8, 4)))
    assert type(changed) is type(layer)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, layer)
    file.seek(0)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, plain), plain)
    stacked = eqx.filter_vmap(lambda key: nothing()(eqx.nn.MLP(4, 4, 8, 2, key=key)))(
        jax.random.split(KEY, 3)
    )
    outs = eqx.filter_vmap(lambda m, x: m(x), in_axes=(eqx.if_array(0), None))(stacked, X)
    assert outs.shape == (3, 4)


def test_methods_and_bound_methods():
    model = nothing(methods=["encode"])(Net)(mlp(0), mlp(1), eqx.nn.Dropout(0.5))
    assert regions(eqx.filter_grad(lambda m: m.encode(X).sum()), model) > 0
    assert regions(eqx.filter_grad(loss), model, X) == 0
    bound = nothing()(net().encode)
    expected = eqx.filter_grad(lambda f: f(X).sum())(net().encode)
    assert_near(eqx.filter_grad(lambda f: f(X).sum())(bound), expected)


@pytest.mark.parametrize("how", ["class", "instance", "function"])
@pytest.mark.parametrize(
    "options",
    [{"what": "nothing", "at": "**/first"}, {"what": remat_kit.save(remat_kit.module("*/first"))}],
)
def test_fields_are_no_paths_and_the_error_says_what_is(options, how):
    policy, model = remat_kit.policy(**options), net()
    call = {
        "class": lambda: policy(Net)(mlp(0), mlp(1), eqx.nn.Dropout(0.5))(X, KEY),
        "instance": lambda: policy(model)(X, KEY),
        "function": lambda: policy(loss)(model, X),
    }[how]
    with pytest.raises(remat_kit.UnknownNameError, match="no module is named") as caught:
        call()
    assert "the fields of an Equinox module have no paths" in caught.value.message
    assert "jax.named_scope" in caught.value.hint
    assert "eqx.tree_at" in caught.value.hint


def test_what_the_error_about_paths_suggests_works():
    class Scoped(Net):
        def __call__(self, x, key):
            with jax.named_scope("first"):
                x = jnp.tanh(self.first(x))
            return self.dropout(self.second(x) * self.scale, key=key)

    model = Scoped(mlp(0), mlp(1), eqx.nn.Dropout(0.5))
    at = nothing(at="**/first")(loss)
    assert regions(eqx.filter_grad(at), model, X) > 0
    assert_near(eqx.filter_grad(at)(model, X), eqx.filter_grad(loss)(model, X))
    field = eqx.tree_at(lambda m: m.first, net(), replace_fn=nothing())
    assert regions(eqx.filter_grad(loss), field, X) > 0
    assert_near(eqx.filter_grad(loss)(field, X), eqx.filter_grad(loss)(net(), X))


def test_copies_and_pickles():
    layer = nothing()(eqx.nn.Linear(4, 4, key=KEY))
    for again in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(again) is type(layer)
        assert regions(eqx.filter_grad(lambda m: m(X).sum()), again) > 0
        assert eqx.tree_equal(again, layer)


def test_functions_of_modules_return_modules():
    out, value = nothing()(lambda m, x: (m, m(x)))(mlp(), X)
    assert isinstance(out, eqx.nn.MLP)
    assert out.activation is mlp().activation or callable(out.activation)
    np.testing.assert_allclose(value, mlp()(X), rtol=1e-6)


def test_state_of_batch_norm():
    class Normed(eqx.Module):
        norm: eqx.nn.BatchNorm
        linear: eqx.nn.Linear

        def __init__(self, key):
            self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
            self.linear = eqx.nn.Linear(4, 4, key=key)

        def __call__(self, x, state):
            x, state = self.norm(self.linear(x), state)
            return jnp.sin(x), state

    model, state = eqx.nn.make_with_state(Normed)(KEY)
    batch = jax.random.normal(KEY, (5, 4))

    def run(model, state):
        layer = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, state = layer(batch, state)
        return jnp.sum(y**2), state

    step = eqx.filter_jit(eqx.filter_value_and_grad(run, has_aux=True))
    assert_near(step(nothing()(model), state), step(model, state))


def test_error_if():
    def checked(x):
        return jnp.sin(eqx.error_if(x, jnp.any(x > 5), "too large")).sum()

    f = eqx.filter_jit(jax.grad(nothing()(checked)))
    np.testing.assert_allclose(f(X), jnp.cos(X), rtol=1e-6)
    with pytest.raises(RuntimeError, match="too large"):
        f(X + 10.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "adjoint", ["RecursiveCheckpointAdjoint", "DirectAdjoint", "BacksolveAdjoint"]
)
@pytest.mark.parametrize("where", ["field", "loss"])
def test_diffrax(adjoint, where):
    diffrax = pytest.importorskip("diffrax")

    def loss(model, y0, wrap=lambda f: f):
        field = wrap(lambda t, y, args: jnp.tanh(args(y)))
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Tsit5(),
            0.0,
            1.0,
            0.1,
            y0,
            model,
            adjoint=getattr(diffrax, adjoint)(),
        )
        return jnp.sum(solution.ys**2)

    if where == "field":
        decorated = functools.partial(loss, wrap=nothing())
    else:
        decorated = nothing()(loss)
    expected = eqx.filter_jit(eqx.filter_value_and_grad(loss))(mlp(), X)
    assert_near(eqx.filter_jit(eqx.filter_value_and_grad(decorated))(mlp(), X), expected)
