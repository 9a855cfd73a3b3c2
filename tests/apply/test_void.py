"""A policy that has no effect says so: an error where it is misplaced, else a `RematKitWarning`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from interpreter import one_by_one
from jax.ad_checkpoint import checkpoint_name
from step_programs import AT, WEIGHTS, X, forces, loss, same_gradients, taken

import remat_kit
from remat_kit import (
    RematKitWarning,
    _jax,
    collective,
    dots,
    dtype,
    larger_than,
    named,
    offload,
    policy,
    primitive,
    recompute,
    save,
    testing,
)


def test_forces_are_evaluated_without_a_word():
    decorated = policy("nothing")(forces)
    np.testing.assert_array_equal(*(one_by_one(f, WEIGHTS, X) for f in (decorated, forces)))
    np.testing.assert_allclose(jax.jit(decorated)(WEIGHTS, X), forces(WEIGHTS, X), rtol=1e-5)


@pytest.mark.parametrize("at", [AT, None])
def test_the_inner_step_of_maml(at):
    inner = policy("nothing", at=at)(taken)
    same_gradients(
        lambda w: loss(inner(w, X)[0], X + 1), lambda w: loss(taken(w, X)[0], X + 1), WEIGHTS
    )


# -- what matches nothing ----------------------------------------------------------------------


def layer(w, x):
    return jnp.sum(jnp.sin(checkpoint_name(jnp.tanh(x @ w), "hidden")))


MATCH_NOTHING = [
    ("maxtext_minimal", "no value is named"),
    (save(named("hiden", strict=False)), "did you mean 'hidden'"),
    (save(remat_kit.module("*/mlp", strict=False)), "no module is"),
    (larger_than("1MiB"), "the values take"),
    (offload(primitive("exp")), "no operation is 'exp'"),
    (recompute(primitive("max")), "no operation is 'max'"),
    (collective, "under automatic partitioning"),
    (dtype("bfloat16"), "float32"),
    (save(primitive("sin") & larger_than("1KiB")), "the values take"),
    (save(primitive("sin") & named("hidden")), "each part of the rule"),
    (jax.checkpoint_policies.save_only_these_names("hiden"), "did you mean 'hidden'"),
    (save(dots) | offload(larger_than("1MiB")), "offload"),
]


@pytest.mark.parametrize(("what", "wanted"), MATCH_NOTHING)
def test_a_rule_that_selects_nothing_is_a_warning(what, wanted):
    decorated = policy(what)(layer)
    with pytest.warns(RematKitWarning, match="has no effect") as caught:
        gradient = one_by_one(jax.grad(decorated), WEIGHTS[0], X)
    assert len(caught) == 1
    assert wanted in str(caught[0].message)
    assert "\nhint: " in str(caught[0].message)
    np.testing.assert_array_equal(gradient, one_by_one(jax.grad(layer), WEIGHTS[0], X))


@pytest.mark.parametrize(
    "what",
    [
        *("nothing", "everything", "dots", "maxtext_full", "t5x_full", "names:hidden"),
        save(primitive("cos")),  # what the derivative of sin keeps
        jax.checkpoint_policies.nothing_saveable,
        jax.checkpoint_policies.dots_saveable,
    ],
)
def test_a_policy_that_does_what_it_says_is_silent(what):
    jax.grad(policy(what)(layer))(WEIGHTS[0], X)


def test_what_only_a_derivative_rule_names_is_found():
    @jax.custom_vjp
    def kernel(x):
        return jnp.sin(x)

    def forward(x):
        return jnp.sin(x), checkpoint_name(jnp.cos(x), "kernel_residual")

    kernel.defvjp(forward, lambda r, ct: (ct * r,))
    fn = policy(save(named("kernel_residual", strict=False)))(lambda x: jnp.sum(kernel(x * x)))
    np.testing.assert_allclose(jax.grad(fn)(X), 2 * X * jnp.cos(X * X), rtol=1e-6)


def test_only_what_the_regions_hold_counts():
    def fn(weights, x):
        with jax.named_scope("block_0"):
            x = jnp.sin(x * weights[0])
        return jnp.sum(x @ weights[1].T)

    args = [jnp.ones(4), jnp.ones((4, 4))], X
    with jax.numpy_rank_promotion("allow"):
        policy(offload(dots))(fn)(*args)
        with pytest.warns(RematKitWarning, match=r"offload\(dots\) selects none"):
            policy(offload(dots), at=AT)(fn)(*args)


def test_a_rule_for_any_function_may_find_nothing_in_this_one():
    jax.grad(policy("dots")(lambda x: jnp.sum(jnp.sin(jnp.tanh(x)))))(X)


def test_what_does_not_exist_is_an_error_as_before():
    with pytest.raises(remat_kit.UnknownNameError):
        policy(save(named("hiden")))(layer)(WEIGHTS[0], X)
    with pytest.raises(remat_kit.UnknownNameError):
        policy("nothing", at="blok_*")(loss)(WEIGHTS, X)


def test_a_warning_comes_once_for_a_decorator_at_the_users_line():
    decorated = policy(larger_than("1MiB"))(layer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.grad(decorated)(WEIGHTS[0], X)
        jax.jit(jax.grad(decorated))(WEIGHTS[0], X)
        decorated(WEIGHTS[0], jnp.ones((3, 4)))
        policy(larger_than("1MiB"))(layer)(WEIGHTS[0], X)
    assert len(caught) == 2
    assert {w.filename for w in caught} == {__file__}


def test_a_module_class_warns_where_it_is_called():
    @policy(larger_than("1GiB"))
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.up(x))

    block = Block(nnx.Rngs(0))
    with pytest.warns(RematKitWarning) as caught:
        assert jnp.array_equal(block(X), block(X))
    assert [w.filename for w in caught] == [__file__]


def test_the_verbs_warn_too():
    w = x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    decorated = {verb: policy("maxtext_minimal")(layer) for verb in ("measure", "plan", "frontier")}
    with pytest.warns(RematKitWarning):
        remat_kit.measure(decorated["measure"], w, x)
    with pytest.warns(RematKitWarning):
        remat_kit.inspect(layer, w, x, policy="maxtext_minimal")
    with pytest.warns(RematKitWarning):
        remat_kit.frontier(decorated["frontier"], w, x)


# -- other reasons -----------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["mask", None])
def test_integers_have_no_gradient(at):
    def fn(n):
        with jax.named_scope("mask"):
            return (n * 2) // 3

    with pytest.warns(RematKitWarning, match="no input of the decorated function has a gradient"):
        policy("dots", at=at)(fn)(jnp.arange(3))


def test_a_closed_over_parameter_may_have_a_gradient():
    jax.grad(lambda w: policy("dots")(lambda n: jnp.sum(w[n] @ w))(jnp.arange(4)))(WEIGHTS[0])


def test_prevent_cse_false_is_undone_outside_of_a_loop():
    decorated = policy("nothing", prevent_cse=False)(layer)
    jax.grad(decorated)(WEIGHTS[0], X)  # two programs: nothing is merged
    with pytest.warns(RematKitWarning, match="prevent_cse=False"):
        jax.jit(jax.grad(decorated))(WEIGHTS[0], X)


def test_prevent_cse_false_in_a_loop_is_as_it_should_be():
    body = policy("nothing", prevent_cse=False)(lambda x, w: (jnp.tanh(x @ w), None))
    scanned = jax.jit(jax.grad(lambda w: jnp.sum(jax.lax.scan(body, X, w)[0])))
    scanned(jnp.stack(WEIGHTS))


def test_offloading_that_this_jax_cannot_do(implementation):
    decorated = policy("offload_dots")(layer)
    if _jax.drops_offload():
        with pytest.warns(RematKitWarning, match="does not offload"):
            decorated(WEIGHTS[0], X)
    else:
        decorated(WEIGHTS[0], X)


def test_a_plan_that_may_offload_needs_a_scan():
    w = x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    with pytest.warns(RematKitWarning, match="has no scan"):
        remat_kit.frontier(layer, w, x, target="h100", offload=True)


# -- keywords without an effect ------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: remat_kit.inspect(loss, WEIGHTS, X, at=AT),
        lambda: testing.assert_fits(loss, WEIGHTS, X, target="cpu", at=AT),
        lambda: testing.assert_peak_at_most(loss, WEIGHTS, X, target="cpu", peak="1GiB", at=AT),
        lambda: remat_kit.max_batch(lambda batch=8: (loss, (WEIGHTS, X)), at=AT),
        lambda: remat_kit.max_batch(lambda batch=8: (loss, (WEIGHTS, X)), policy="plan", at=AT),
        lambda: remat_kit.fit(lambda batch=8: (loss, (WEIGHTS, X)), batches=[1], at=AT),
        lambda: remat_kit.estimate(loss, WEIGHTS, X, checkpoints=[]),
    ],
)
def test_a_keyword_without_an_effect_is_an_error(call):
    with pytest.raises(remat_kit.UserError, match=r"no policy to apply|no checkpoint"):
        call()
