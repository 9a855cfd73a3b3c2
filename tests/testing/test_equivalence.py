"""Gradients compared with those of the undecorated function."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shapes import struct

import remat_kit
from remat_kit import testing
from remat_kit._errors import CheckError, NotDifferentiableError, UserError
from remat_kit.testing import equivalence as _equivalence


def tower(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = x + jnp.sin(jnp.tanh(x @ w)) @ w.T
    return jnp.mean(x**2)


WEIGHTS, X = [struct(64, 256)] * 6, struct(1024, 64)


class Net(nn.Module):
    """Layers with dropout, unrolled or scanned."""

    scan: bool = False

    @nn.compact
    def __call__(self, x):
        if self.scan:
            scanned = nn.scan(
                Layer,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=3,
            )
            return scanned(name="layers")(x, None)[0]
        for i in range(3):
            x, _ = Layer(name=f"layer_{i}")(x, None)
        return x


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(32)(nn.LayerNorm()(x))
        y = nn.Dropout(0.3, deterministic=False)(nn.gelu(y))
        return x + nn.Dense(x.shape[-1])(y), None


def net_loss(scan=False):
    model = Net(scan)

    def loss(params, x, key):
        return jnp.mean(model.apply({"params": params}, x, rngs={"dropout": key}) ** 2)

    x, key = struct(8, 16), jax.eval_shape(jax.random.key, 0)
    params = jax.eval_shape(model.init, {"params": key, "dropout": key}, x)["params"]
    return loss, (params, x, key)


@pytest.mark.parametrize("scan", [False, True])
def test_recomputed_dropout_is_the_same(scan):
    loss, args = net_loss(scan)
    at = "*/layers" if scan else "*/layer_*"
    for policy in ("nothing", "dots"):
        testing.assert_equivalent(loss, remat_kit.policy(policy, at=at)(loss), *args)


def test_operation_by_operation_the_bits_are_the_same():
    loss, args = net_loss()
    kept = remat_kit.policy("nothing", at="*/layer_*")(loss)
    testing.assert_equivalent(loss, kept, *args, exact=True, jit=False)


def test_another_dropout_mask_is_found():
    loss, args = net_loss()

    def other(params, x, key):
        return loss(params, x, jax.random.fold_in(key, 1))

    with pytest.raises(CheckError, match="different results even if nothing is fused"):
        testing.assert_equivalent(loss, other, *args)


def pair_loss(w, x):
    out = x @ w["in"]["kernel"] + w["bias"]
    return jnp.sum(jnp.tanh(out)), {"out": out, "steps": jnp.int32(3)}


PAIR = {"in": {"kernel": struct(8, 4)}, "bias": struct(1, 4)}


def with_gradient(path, index, amount):
    """`pair_loss` with one element of one gradient changed."""

    @jax.custom_vjp
    def off(w):
        return w

    def forward(w):
        return w, None

    def backward(_, g):
        keys = path.split("/")
        leaf = g[keys[0]] if len(keys) == 1 else g[keys[0]][keys[1]]
        leaf = leaf.at[index].add(amount * jnp.max(jnp.abs(leaf)))
        new = leaf if len(keys) == 1 else {keys[1]: leaf}
        return ({**g, keys[0]: new},)

    off.defvjp(forward, backward)
    return lambda w, x: pair_loss(off(w), x)


def test_the_worst_leaf_is_named_with_its_index_and_values():
    worse = with_gradient("in/kernel", (5, 2), 1e-3)
    with pytest.raises(CheckError) as caught:
        testing.assert_equivalent(pair_loss, worse, PAIR, struct(3, 8))
    first, second = str(caught.value).splitlines()[:2]
    pattern = (
        r"gradient\['in'\]\['kernel'\] differs by ([\d.e+]+) units of rounding at \[5, 2\]: "
        r"(\S+) in f, (\S+) in g$"
    )
    units, f, g = map(float, re.search(pattern, first).groups())
    assert units == pytest.approx(1e-3 / np.finfo(np.float32).eps, rel=0.01)
    assert g > f
    assert second == "in 1 of its 32 elements; 1 of 5 results differ"


@pytest.mark.parametrize(("amount", "passes"), [(3, True), (6, False)])
def test_the_tolerance_is_in_units_of_the_largest_element(amount, passes):
    eps = float(np.finfo(np.float32).eps)
    near = with_gradient("in/kernel", (0, 0), amount * eps)
    args = (PAIR, struct(3, 8))
    if passes:
        testing.assert_equivalent(pair_loss, near, *args)
    else:
        with pytest.raises(CheckError, match=r"size of rounding.*allow ulps=7"):
            testing.assert_equivalent(pair_loss, near, *args)
    testing.assert_equivalent(pair_loss, near, *args, ulps=8)
    for strict in ({"ulps": 0}, {"exact": True}):
        with pytest.raises(CheckError):
            testing.assert_equivalent(pair_loss, near, *args, **strict)


def test_what_is_zero_but_for_rounding_may_differ():
    def noisy(noise):
        def loss(w):
            return jnp.sum(w["large"] ** 2) + noise * jnp.sum(w["none"])

        return loss

    w = {"large": jnp.ones(4), "none": jnp.ones(2)}
    testing.assert_equivalent(noisy(1e-9), noisy(-1e-9), w)
    with pytest.raises(CheckError, match=r"gradient\['none'\]"):
        testing.assert_equivalent(noisy(1e-6), noisy(-1e-6), w)


def test_parameters_in_float32_of_a_model_in_bfloat16():
    def loss(w, x):
        for _ in range(3):
            x = jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
        return jnp.sum(x.astype(jnp.float32) ** 2)

    def near(w, x):
        return loss(w, x) * (1 + 2.0**-7)

    args = struct(16, 16), struct(8, 16)
    testing.assert_equivalent(loss, remat_kit.policy("nothing")(loss), *args)
    testing.assert_equivalent(loss, near, *args)
    with pytest.raises(CheckError):
        testing.assert_equivalent(loss, near, *args, exact=True)
    with pytest.raises(CheckError):
        testing.assert_equivalent(loss, lambda w, x: loss(w, x) * 1.1, *args)


def test_auxiliary_results_are_compared():
    def other(w, x):
        loss, aux = pair_loss(w, x)
        return loss, aux | {"steps": aux["steps"] + 1}

    with pytest.raises(CheckError, match=r"aux\['steps'\] differs: 3 in f, 4 in g"):
        testing.assert_equivalent(pair_loss, other, PAIR, struct(3, 8))
    with pytest.raises(CheckError, match=r"aux\['out'\] is float32\[3, 4\] in f and nothing in g"):
        testing.assert_equivalent(
            pair_loss, lambda w, x: (pair_loss(w, x)[0], {}), PAIR, struct(3, 8)
        )
    with pytest.raises(CheckError, match=r"aux\['out'\] is .* and nothing in g"):
        testing.assert_equivalent(pair_loss, lambda w, x: pair_loss(w, x)[0], PAIR, struct(3, 8))


def test_nan_equals_nan_and_nothing_else():
    def loss(fill):
        return lambda w: (jnp.sum(w), jnp.array([1.0, fill, jnp.inf]))

    w = jnp.ones(3)
    testing.assert_equivalent(loss(jnp.nan), loss(jnp.nan), w)
    testing.assert_equivalent(loss(jnp.nan), loss(jnp.nan), w, exact=True)
    with pytest.raises(CheckError, match=r"aux differs at \[1\]: nan in f, 2.0 in g"):
        testing.assert_equivalent(loss(jnp.nan), loss(2.0), w)
    with pytest.raises(CheckError, match=r"aux differs at \[1\]: inf in f, -inf in g"):
        testing.assert_equivalent(loss(jnp.inf), loss(-jnp.inf), w)


def test_a_zero_has_a_sign_only_in_its_bits():
    def loss(zero):
        return lambda w: (jnp.sum(w), jnp.float32(zero))

    testing.assert_equivalent(loss(0.0), loss(-0.0), jnp.ones(3))
    with pytest.raises(CheckError, match=r"aux differs: 0.0 in f, -0.0 in g"):
        testing.assert_equivalent(loss(0.0), loss(-0.0), jnp.ones(3), exact=True)


def test_keys_and_integers_among_the_results():
    def loss(seed):
        return lambda w: (jnp.sum(w), {"key": jax.random.key(seed), "flag": jnp.array([True])})

    testing.assert_equivalent(loss(1), loss(1), jnp.ones(2))
    with pytest.raises(CheckError, match=r"aux\['key'\] differs at \[1\]"):
        testing.assert_equivalent(loss(1), loss(2), jnp.ones(2))


def test_shapes_become_seeded_values():
    shapes = (
        {"w": struct(64, 8), "h": struct(4, dtype=jnp.bfloat16)},
        struct(5, dtype=jnp.int32),
        jax.eval_shape(jax.random.key, 0),
        struct(3, dtype=jnp.bool_),
    )
    first, second = _equivalence.seeded(shapes, 0), _equivalence.seeded(shapes, 0)
    assert jax.tree.map(jax.typeof, first) == jax.tree.map(jax.typeof, second)
    assert bool(jnp.all(first[0]["w"] == second[0]["w"]))
    assert not bool(jnp.all(first[0]["w"] == _equivalence.seeded(shapes, 1)[0]["w"]))
    assert 0.05 < float(jnp.std(first[0]["w"])) < 0.2
    assert set(np.asarray(first[1]).tolist()) <= {0, 1}
    given = (jnp.ones(3), 2.0)
    assert _equivalence.seeded(given, 0) is given


def test_values_that_compare_nothing_are_refused():
    with pytest.raises(UserError, match="nothing to compare"):
        testing.assert_equivalent(lambda w: jnp.sum(0 * w), lambda w: jnp.sum(0 * w), struct(3))
    with pytest.raises(UserError, match="0 or more"):
        testing.assert_equivalent(tower, tower, WEIGHTS, X, ulps=-1)
    with pytest.raises(NotDifferentiableError, match="`assert_equivalent`"):
        testing.assert_equivalent(jnp.sin, jnp.sin, struct(3))


def test_several_arguments_are_differentiated():
    def loss(a, b):
        return jnp.sum(a * b)

    def other(a, b):
        return jnp.sum(a * jax.lax.stop_gradient(b))

    args = struct(3), struct(3)
    testing.assert_equivalent(loss, other, *args)
    with pytest.raises(CheckError, match=r"gradient\[1\] differs"):
        testing.assert_equivalent(loss, other, *args, argnums=(0, 1))


@pytest.mark.parametrize("product", ["matmul", "convolution"])
def test_the_unit_is_that_of_the_products_of_the_backend(monkeypatch, product):
    """The default product of a GPU rounds to TensorFloat-32, and that of a TPU to bfloat16."""

    def loss(w, x):
        if product == "matmul":
            return jnp.mean(jnp.tanh(x @ w[:, :, 0]) ** 2)
        return jnp.mean(jax.lax.conv(x[:, :, None], w, (1,), "SAME") ** 2)

    structs = jnp.zeros((4, 4, 1)), jnp.zeros((8, 4))
    for backend, eps in [("gpu", 2.0**-10), ("tpu", 2.0**-7), ("cpu", 2.0**-23)]:
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert _equivalence._rounding([loss], structs) == eps
        # Without a product, the unit is that of float32 on each of them.
        assert _equivalence._rounding([lambda w, x: jnp.sum(jnp.sin(x))], structs) == 2.0**-23
