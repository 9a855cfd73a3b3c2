"""Regions: which values are kept, under both implementations of checkpoint, and all of AD."""

import contextlib
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import one_by_one
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

import remat_kit
from remat_kit import (
    Decision,
    dots,
    everything,
    module,
    named,
    nothing,
    offload,
    primitive,
    recompute,
    save,
)
from remat_kit._apply.labels import keep_labelled, label, read_label

OLD_REMAT3 = "the first jax_remat3 has no vmap of names and no offload (jax 0.10)"
is_old = jax.__version_info__ < (0, 11)


def layers(x, w):
    h = checkpoint_name(jnp.tanh(x @ w), "h")
    h = jnp.exp(h * 0.1)
    return jnp.sin(h @ w)


def loop(x, w):
    def body(c, w):
        return jnp.tanh(c @ w), jnp.exp(c)

    h, ys = jax.lax.scan(body, x, jnp.stack([w, w]))
    return jax.nn.relu(h) + ys.sum(axis=0)


def branch(x, w):
    return jax.lax.cond(x.sum() > 0, lambda h: jnp.exp(h @ w), lambda h: jnp.tanh(h @ w), x)


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, g: (g * c,))


def opaque(x, w):
    return sine(jnp.tanh(x @ w)) @ w


def nested(x, w):
    return jax.checkpoint(lambda h: jnp.tanh(h @ w))(jnp.exp(x))


def jitted(x, w):
    return jax.jit(lambda h: jnp.tanh(h @ w) + jax.nn.gelu(h))(x)


FUNCTIONS = [layers, loop, branch, opaque, nested, jitted]
POLICIES = [
    save(nothing),
    save(everything),
    save(dots),
    save(primitive("tanh")),
    save(primitive("exp")),
    recompute(primitive("max", "tanh")),
]
X = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)
W = jnp.linspace(-0.5, 0.4, 64).reshape(8, 8)


def total(f):
    return lambda x, w: f(x, w).sum()


def kept(f, *args):
    """The intermediate values that the backward pass keeps: how often each type is there."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print_saved_residuals(f, *args)
    lines = [x for x in out.getvalue().splitlines() if "argument" not in x and "constant" not in x]
    return sorted(re.match(r"\S+", x)[0] for x in lines)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "policy",
    [
        *POLICIES[:4],
        *(pytest.param(policy, marks=pytest.mark.slow) for policy in POLICIES[4:]),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore::remat_kit.RematKitWarning")  # not every function has an exp
def test_derivatives_are_those_of_the_function(f, policy, implementation):
    g = remat_kit.policy(policy)(f)
    # Without jit too, where the functions that `f` jits itself run equation by equation.
    np.testing.assert_allclose(g(X, W), f(X, W), rtol=1e-6)
    for argnums in (0, 1):
        got = jax.jit(jax.grad(total(g), argnums))(X, W)
        expected = jax.jit(jax.grad(total(f), argnums))(X, W)
        # The compiler fuses the two programs differently: one unit in the last place per term.
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)


TRANSFORMATIONS = {
    "second derivative": lambda f: jax.grad(jax.grad(lambda v: f(X * v, W * v)))(1.3),
    "mixed derivative": lambda f: jax.grad(lambda v: jax.grad(lambda u: f(X * v, W * u))(1.1))(1.3),
    "third derivative": lambda f: jax.grad(jax.grad(jax.grad(lambda v: f(X, W * v))))(1.3),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f), (0, None))(X[:, None], W),
    "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f, (0, None))(x[:, None], W).sum())(X),
}
FORWARD = {
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(lambda v: f(X, W * v)))(1.3),
    "forward over reverse": lambda f: jax.jacfwd(jax.grad(lambda v: f(X, W * v)))(1.3),
    "jvp": lambda f: jax.jvp(lambda x: f(x, W), (X,), (W[:4],))[1],
}


SLOW = ("third derivative", "mixed derivative", "forward over forward")


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "policy",
    [
        save(dots),
        pytest.param(save(everything), marks=pytest.mark.slow),
        pytest.param(save(primitive("tanh")), marks=pytest.mark.slow),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else [])
        for name in [*TRANSFORMATIONS, *FORWARD]
    ],
)
def test_transformations_compose(f, policy, transform, implementation):
    if f is opaque and transform in FORWARD:
        pytest.skip("a custom_vjp function has no forward mode")
    if is_old and implementation:
        pytest.skip(OLD_REMAT3)
    apply = (TRANSFORMATIONS | FORWARD)[transform]
    got = np.asarray(apply(total(remat_kit.policy(policy)(f))))
    expected = np.asarray(apply(total(f)))
    # A higher derivative is a sum of hundreds of terms of both signs, which the compiler orders
    # and fuses differently in the two programs: 18 units in the last place of the largest at most.
    scale = np.finfo(np.float32).eps * np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=0, atol=64 * scale)


def test_forward_mode_of_a_custom_vjp_fails_as_in_jax():
    g = remat_kit.policy("dots")(opaque)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(g, (X, W), (X, W))


def test_a_chosen_primitive_is_kept_even_where_its_rule_reads_its_output(implementation):
    # `print_saved_residuals` lists a value once for each time it is kept.
    nothing_kept = kept(total(remat_kit.policy("nothing")(layers)), X, W)
    tanh_kept = kept(total(remat_kit.policy(save(primitive("tanh")))(layers)), X, W)
    both_kept = kept(total(remat_kit.policy(save(primitive("tanh", "exp")))(layers)), X, W)
    assert nothing_kept == []
    assert tanh_kept == ["f32[4,8]"]
    assert both_kept == ["f32[4,8]"] * 2


def test_a_name_keeps_the_value_that_the_derivative_rule_reads(implementation):
    """JAX saves the named output and still recomputes tanh: its rule reads the unnamed one."""
    g = remat_kit.policy(save(named("h")))(layers)
    text = str(jax.make_jaxpr(jax.grad(total(g)))(X, W))
    assert len(re.findall(r"= tanh ", text)) == 1


@pytest.mark.filterwarnings("ignore::remat_kit.RematKitWarning")  # not every function has an exp
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_both_implementations_keep_the_same(f, policy):
    if is_old and f is opaque:
        pytest.skip("the first jax_remat3 (jax 0.10) keeps inputs of custom_vjp functions twice")
    sets = []
    for flag in (False, True):
        jax.config.update("jax_remat3", flag)
        try:
            sets.append(kept(total(remat_kit.policy(policy)(f)), X, W))
        finally:
            jax.config.update("jax_remat3", False)
    if f is nested:
        # The old implementation hands a kept input of the inner region on through an empty
        # region, and the list counts the one value twice.
        sets = [set(s) for s in sets]
    assert sets[0] == sets[1]


@pytest.mark.filterwarnings("ignore::remat_kit.RematKitWarning")
@pytest.mark.parametrize(
    ("f", "target", "twice"),
    [
        (lambda x, w: jnp.square(x @ w), "dot_general", ["dot_general"]),
        (lambda x, w: jax.jit(lambda h: h**2)(x @ w), "dot_general", ["dot_general"]),
        (lambda x, w: jax.jit(jnp.matmul)(x, w) ** 2, "dot_general", ["dot_general"]),
        (lambda x, w: jnp.square(x @ w) + jnp.sin(x), "dot_general", ["dot_general"]),
        (lambda x, w: jnp.tanh(x @ w), "tanh", ["tanh"]),
        (lambda x, w: jax.nn.relu(x @ w), "max", []),  # its mask is made of the product
        (lambda x, w: jnp.square(x @ w), "tanh", []),
    ],
    ids=["square", "square in jit", "product in jit", "sine", "tanh", "relu", "nothing matched"],
)
def test_what_a_derivative_rule_makes_goes_with_what_it_is_made_of(f, target, twice):
    """``2 * x`` is no value of the model: nobody who recomputes ``x`` means to keep it."""
    if target == "tanh" and not twice:
        policy = recompute(primitive("dot_general") & module("*/elsewhere", strict=False))
    else:
        policy = recompute(primitive(target))
    found = remat_kit.inspect(total(remat_kit.policy(policy)(f)), X, W).recomputed
    assert [r.primitive for r in found] == twice


def test_what_a_rule_selects_is_kept_though_only_a_derivative_makes_it():
    g = remat_kit.policy(save(~primitive("tanh")))(lambda x, w: jnp.tanh(x @ w))
    report = remat_kit.inspect(total(g), X, W)
    assert {r.reason for r in report.saved} == {"save(~primitive('tanh'))"}
    # jax 0.10 writes 1 - tanh² out: its difference is kept, and what the tanh is made from.
    kept = ["dot_general", "sub"] if is_old else ["one_minus_square"]
    assert [r.primitive for r in report.saved] == kept
    assert [r.primitive for r in report.recomputed] == (["tanh"] if is_old else [])


def test_everything_keeps_what_no_policy_keeps():
    for f in (layers, loop, branch, jitted):
        plain, region = kept(total(f), X, W), kept(total(remat_kit.policy("everything")(f)), X, W)
        assert len(region) <= len(plain) + 1, f.__name__


def test_a_scan_body_keeps_stacked_values(implementation):
    g = remat_kit.policy(save(primitive("tanh")))(loop)
    assert "f32[2,4,8]" in kept(total(g), X, W)


def test_offload_goes_to_the_host():
    policy = save(primitive("tanh")) | offload(primitive("exp"))
    values = kept(total(remat_kit.policy(policy)(layers)), X, W)
    assert values == ["f32<host>[4,8]", "f32[4,8]"]
    got = jax.jit(jax.grad(total(remat_kit.policy(policy)(layers))))(X, W)
    expected = jax.jit(jax.grad(total(layers)))(X, W)
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-8)


def test_a_named_input_can_wait_on_the_host():
    @remat_kit.policy(offload(named("entry")))
    def body(c, w):
        return jnp.sin(checkpoint_name(c, "entry") @ w), None

    def f(x, w):
        return jax.lax.scan(body, x, jnp.stack([w, w]))[0]

    values = kept(total(f), X, W)
    assert "f32<host>[2,4,8]" in values
    assert "f32[2,4,8]" not in values


def test_inputs_without_a_tangent_cost_nothing():
    """The gradient for the weights alone has no product for the gradient of the input."""

    def products(f):
        text = str(jax.make_jaxpr(jax.grad(total(f), 1))(X, W))
        return text.count("dot_general")

    def one(x, w):
        return jnp.tanh(x @ w)

    assert products(remat_kit.policy("everything")(one)) == products(one)


def test_integer_inputs_and_outputs():
    def f(x, i):
        return jnp.tanh(x[i]), i + 1

    g = remat_kit.policy("everything")(f)
    out, i = g(X, jnp.array([1, 2]))
    np.testing.assert_array_equal(i, [2, 3])
    grads = [
        one_by_one(jax.grad(lambda x, h=h: h(x, jnp.array([1, 2]))[0].sum()), X) for h in (g, f)
    ]
    np.testing.assert_array_equal(*grads)
    assert out.shape == (2, 8)


def test_random_keys_are_inputs():
    def f(key, x):
        return jnp.tanh(x * jax.random.bernoulli(key, 0.5, x.shape))

    key = jax.random.key(3)
    for policy in ("everything", "nothing", "dots"):
        g = remat_kit.policy(policy)(f)
        np.testing.assert_array_equal(one_by_one(g, key, X), one_by_one(f, key, X))
        grads = [one_by_one(jax.grad(lambda x, h=h: h(key, x).sum()), X) for h in (g, f)]
        np.testing.assert_array_equal(*grads)


def test_closed_over_values_get_their_gradients():
    def loss(w):
        return remat_kit.policy("everything")(lambda x: jnp.tanh(x @ w).sum())(X)

    expected = jax.grad(lambda w: jnp.tanh(X @ w).sum())(W)
    np.testing.assert_allclose(jax.grad(loss)(W), expected, rtol=1e-6)


def test_labels_carry_decisions():
    for decision in (Decision.SAVE, Decision.OFFLOAD):
        text = label(decision, "save(named('a:b'))", "pinned_host")
        read = read_label(text)
        assert read is not None
        assert read[:2] == (decision, "save(named('a:b'))")
    assert label(Decision.RECOMPUTE, "x") is None
    assert read_label("attn_out") is None


def test_the_jax_policy_asks_for_labelled_names_only():
    policy = keep_labelled
    from jax.ad_checkpoint import checkpoint_name as mark

    def f(x):
        return jnp.sin(mark(jnp.sin(x), "attn_out"))

    assert kept(lambda x: jax.checkpoint(f, policy=policy)(x).sum(), X) == []
