"""When two programs or equations count as the same."""

import functools

import jax
import jax.extend.core
import jax.interpreters.ad
import jax.interpreters.mlir
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit
from remat_kit._program.structure import equation_key

X = jax.random.normal(jax.random.key(0), (3, 4))
W = jax.random.normal(jax.random.key(1), (4, 4))
POLICIES = ("nothing", "dots", "everything")


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def spike(x, slope):
    del slope
    return (x > 0).astype(x.dtype)


@spike.defjvp
def _(slope, primals, tangents):
    width = slope["width"] if isinstance(slope, dict) else slope
    return spike(primals[0], slope), tangents[0] * width / (1 + jnp.abs(primals[0])) ** 2


STATIC = {
    "floats": (1.0, 10.0, 100.0),
    "equal numbers of other types": (1, True, 1.0),
    "signs of zero": (0.0, -0.0, 1.0),
    "arrays": tuple(np.full((), s, np.float32) for s in (1, 10, 100)),
    "trees": tuple({"width": s} for s in (1.0, 10.0, 100.0)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("static", STATIC)
def test_blocks_on_one_line_keep_their_static_arguments(static, policy, implementation):
    def net(weights, x):
        for i, (w, slope) in enumerate(zip(weights, STATIC[static], strict=True)):
            with jax.named_scope(f"layer_{i}"):
                x = spike(x @ w, slope)
        return x.sum()

    weights = [W, 2 * W, 3 * W]
    decorated = remat_kit.policy(policy, at="layer_*")(net)
    same(jax.grad(decorated)(weights, X), jax.grad(net)(weights, X))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_function_called_with_other_static_arguments_has_another_derivative(policy):
    @remat_kit.policy(policy, static_argnums=1)
    def layer(x, slope):
        return spike(jnp.sin(x), slope).sum()

    for slope in (1.0, 10.0, 1.0):
        expected = jax.grad(lambda x, slope=slope: spike(jnp.sin(x), slope).sum())(X)
        same(jax.grad(layer)(X, slope), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_rules_that_are_made_in_a_loop_are_told_apart(policy):
    def scaled(scale):
        @jax.custom_jvp
        def identity(x):
            return x + 0.0

        identity.defjvp(lambda primals, tangents: (primals[0] + 0.0, scale * tangents[0]))
        return identity

    def net(x):
        for i, layer in enumerate(layers):
            with jax.named_scope(f"layer_{i}"):
                x = layer(jnp.sin(x))
        return x.sum()

    layers = [scaled(s) for s in (1.0, 10.0, 100.0)]
    same(jax.grad(remat_kit.policy(policy, at="layer_*")(net))(X), jax.grad(net)(X))


# Equinox keeps jaxprs and other values in one tuple of a primitive's parameters.
apply_p = jax.extend.core.Primitive("apply")


@apply_p.def_impl
def _(x, *, parts):
    closed, _, times = parts
    for _ in range(times):
        (x,) = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, x)
    return x


@apply_p.def_abstract_eval
def _(x, *, parts):
    del parts
    return jax.core.ShapedArray(x.shape, x.dtype)


def _applied_jvp(primals, tangents, *, parts):
    return jax.jvp(functools.partial(apply_p.impl, parts=parts), primals, tangents)


jax.interpreters.ad.primitive_jvps[apply_p] = _applied_jvp
jax.interpreters.mlir.register_lowering(
    apply_p, jax.interpreters.mlir.lower_fun(apply_p.impl, multiple_results=False)
)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_parameter_that_holds_jaxprs_among_other_values(policy):
    def net(x):
        for fn, times in ((jnp.sin, 1), (jnp.cos, 1), (jnp.sin, 2)):
            x = apply_p.bind(x, parts=(jax.make_jaxpr(fn)(x), object(), times))
        return x.sum()

    lean = remat_kit.policy(policy)(net)
    for run in (jax.value_and_grad, lambda fn: jax.jit(jax.value_and_grad(fn))):
        same(run(lean)(X), run(net)(X))
    found = [
        equation_key(jax.make_jaxpr(lambda x, p=p: apply_p.bind(x, parts=p))(X).eqns[0])
        for p in [(jax.make_jaxpr(fn)(X), "", n) for fn, n in ((jnp.sin, 1), (jnp.cos, 1))]
    ]
    assert found[0] != found[1]
