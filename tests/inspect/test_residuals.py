"""What is kept for the backward pass: how much, where it was made, and why."""

import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from zoo import load

import remat_kit
from remat_kit import NotDifferentiableError, UserError, named, offload, primitive, recompute, save
from remat_kit._inspect.residuals import saved_residuals

is_old = jax.__version_info__ < (0, 11)


gpt, gpt_nnx, mlp, resnet = map(load, ("gpt", "gpt_nnx", "mlp", "resnet"))
OUTSIDE = "needed by the backward pass, outside every region"


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


W, X = f32(4, 4), f32(2, 4)


def layer(w, x):
    return jnp.sin(jnp.exp(x @ w) @ w)


def total(f):
    return lambda w, x: f(w, x).sum()


def counted(f, *args, **kwargs):
    return [r for r in saved_residuals(f, args, **kwargs) if not r.is_input]


def reasons(f, *args):
    return [(r.primitive, r.reason) for r in counted(f, *args)]


def test_without_a_region(implementation):
    assert reasons(total(layer), W, X) == [("exp", OUTSIDE), ("cos", OUTSIDE)]


def test_arguments_are_listed_by_name_and_apart(implementation):
    found = saved_residuals(lambda params, x: jnp.sin(x @ params["w"]).sum(), ({"w": W}, X))
    assert [(r.is_input, r.reason) for r in found] == [(False, OUTSIDE), (True, "argument x")]
    found = saved_residuals(lambda params, x: (x @ params["w"] @ params["w"]).sum(), ({"w": W}, X))
    assert [r.reason for r in found if r.is_input] == ["argument params['w']", "argument x"]


def test_a_policy_gives_its_rule(implementation):
    f = remat_kit.policy("dots")(layer)
    assert reasons(total(f), W, X) == [("dot_general", "save(dots)")] * 2
    f = remat_kit.policy(save(primitive("exp")))(layer)
    assert reasons(total(f), W, X) == [("exp", "save(primitive('exp'))")]
    f = remat_kit.policy(recompute(primitive("exp")))(layer)
    rule = "not in recompute(primitive('exp'))"
    assert ("dot_general", rule) in reasons(total(f), W, X)


def test_the_input_of_a_region(implementation):
    def f(w, x):
        with jax.named_scope("first"):
            h = jnp.tanh(x @ w)
        with jax.named_scope("second"):
            return jax.checkpoint(layer)(w, h).sum()

    found = {r.primitive: r for r in counted(f, W, X)}
    assert found["tanh"].reason == "input of region second"
    assert found["tanh"].module == "first"


def test_a_policy_of_jax(implementation):
    kept = jax.checkpoint_policies.dots_saveable
    if implementation and is_old:
        pytest.skip("the first jax_remat3 takes only named policies")
    f = jax.checkpoint(layer, policy=kept)
    why = "kept by the policy of region (no module)"
    assert reasons(total(f), W, X) == [("dot_general", why)] * 2


def test_the_source_is_the_users_line(implementation):
    (exp, cos) = counted(total(layer), W, X)
    line = layer.__code__.co_firstlineno + 1
    assert exp.source.endswith(f"test_residuals.py:{line}")
    assert cos.source == exp.source


def test_names_of_the_user(implementation):
    def f(w, x):
        return jnp.sin(checkpoint_name(jnp.exp(x @ w), "h") @ w)

    (found,) = counted(total(remat_kit.policy(save(named("h")))(f)), W, X)
    assert found.names == ("h",)
    assert found.reason == "save(named('h'))"


def test_one_value_counts_once(implementation):
    def f(w, x):
        return (jnp.exp(x @ w) * jnp.exp(x @ w)).sum()

    assert [r.primitive for r in counted(f, W, X)] == ["exp"]


def test_what_no_gradient_reads_is_left_out(implementation):
    """The rule of max hands on a zero that nobody reads; the policy would keep it."""
    loss, args = mlp.build(recompute(primitive("max")), batch=4, features=8, hidden=6, classes=3)
    blocks = [r for r in counted(loss, *args) if r.module.startswith("MLP")]
    assert [(r.primitive, r.dtype) for r in blocks] == [("add", "float32"), ("gt", "bool")] * 2


def test_an_output_that_is_read_again(implementation):
    def f(w, x):
        y = jnp.exp(x @ w)
        return y.sum(), y

    assert reasons(f, W, X) == [("exp", "output of the function")]


def test_offloaded_values_lie_on_the_host():
    f = remat_kit.policy(save(primitive("exp")) | offload(primitive("dot_general")))(layer)
    kept, moved = sorted(counted(total(f), W, X), key=lambda r: r.memory)
    assert (kept.primitive, kept.memory) == ("exp", "device")
    assert (moved.primitive, moved.memory) == ("dot_general", "pinned_host")
    assert moved.reason == "offload(primitive('dot_general')) to pinned_host"


def test_offload_of_jax_lies_on_the_host():
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    f = jax.checkpoint(layer, policy=policy)
    assert {r.memory for r in counted(total(f), W, X)} == {"pinned_host"}


# -- where the producer is hidden ---------------------------------------------------------------


def scanned(body):
    def f(ws, x):
        def step(c, w):
            with jax.named_scope("layer"):
                return body(w, c), None

        return jax.lax.scan(step, x, ws)[0].sum()

    return f


def test_a_loop_stacks(implementation):
    found = counted(scanned(remat_kit.policy(save(primitive("exp")))(layer)), f32(3, 4, 4), X)
    assert [(r.primitive, r.shape, r.times, r.module) for r in found] == [
        ("exp", (3, 2, 4), 3, "layer"),
        ("sin", (3, 2, 4), 3, "layer"),
    ]
    assert [r.reason for r in found] == ["save(primitive('exp'))", "input of region layer"]


def test_a_loop_and_its_unrolled_form_keep_the_same_bytes(implementation):
    for policy in ("nothing", "dots", None):
        loop, args = gpt.build(policy, size="tiny", batch=2, layers=3, scan=True)
        unrolled, flat_args = gpt.build(policy, size="tiny", batch=2, layers=3)

        in_loop = sum(r.bytes for r in counted(loop, *args))
        assert in_loop == sum(r.bytes for r in counted(unrolled, *flat_args)) > 0


def test_loops_in_loops(implementation):
    def f(ws, x):
        def outer(c, ws):
            def inner(c, w):
                return jax.checkpoint(layer)(w, c), None

            return jax.lax.scan(inner, c, ws)

        return jax.lax.scan(outer, x, ws)[0].sum()

    (found,) = counted(f, f32(5, 3, 4, 4), X)
    assert (found.shape, found.times, found.primitive) == ((5, 3, 2, 4), 15, "sin")


def test_calls_and_derivative_rules_are_passed_through(implementation):
    @jax.jit
    def f(w, x):
        return jax.nn.relu(jax.jit(lambda x: jnp.exp(x @ w))(x)) @ w

    assert {r.primitive for r in counted(total(f), W, X)} == {"exp", "gt", "max"}


def test_a_function_with_its_own_derivative(implementation):
    @jax.custom_vjp
    def f(w, x):
        return jnp.tanh(x @ w)

    f.defvjp(
        lambda w, x: (jnp.tanh(x @ w), (w, jnp.exp(x))),
        lambda kept, g: (kept[1].T @ g, g @ kept[0].T),
    )
    found = saved_residuals(total(f), (W, X), (0, 1))
    assert [(r.primitive, r.is_input) for r in found] == [("exp", False), ("", True)]


def test_a_branch(implementation):
    def f(w, x):
        return jax.lax.cond(x[0, 0] > 0, lambda: jnp.exp(x @ w), lambda: jnp.zeros((2, 4))).sum()

    assert "exp" in [r.primitive for r in counted(f, W, X)]


def test_nnx_modules_have_paths(implementation):
    loss, args = gpt_nnx.build("dots", size="tiny", batch=2)
    ups = [r for r in counted(loss, *args) if r.module.endswith("/mlp/up")]
    assert [(r.module, r.reason) for r in ups] == [
        (f"GPT/block_{i}/mlp/up", "save(dots)") for i in range(len(ups))
    ]
    assert ups


# -- both implementations -----------------------------------------------------------------------

SMALL = {
    "mlp": lambda p: mlp.build(p, batch=4, features=8, hidden=6, classes=3),
    "gpt": lambda p: gpt.build(p, size="tiny", batch=2, dropout=0.1),
    "gpt_scan": lambda p: gpt.build(p, size="tiny", batch=2, scan=True),
    "gpt_nnx": lambda p: gpt_nnx.build(p, size="tiny", batch=2),
    "resnet": lambda p: resnet.build(p, depth=18, batch=2, image=32, width=8),
}
POLICIES = {
    "none": None,
    "nothing": "nothing",
    "dots": "dots",
    "tanh": save(primitive("tanh", "exp", "max")),
    "no dots": recompute(primitive("dot_general", "conv_general_dilated")),
    "offload": offload(primitive("dot_general")) | save(primitive("tanh", "max")),
}


@pytest.mark.filterwarnings("ignore::remat_kit.RematKitWarning")  # not every model has every kind
@pytest.mark.parametrize(
    ("policy", "model"),
    [
        pytest.param(
            policy,
            model,
            marks=[pytest.mark.slow] if model == "resnet" or policy in ("none", "no dots") else [],
        )
        for policy in POLICIES
        for model in SMALL
    ],
)
def test_both_implementations_keep_the_same(model, policy):
    if policy == "offload" and is_old:
        pytest.skip("the first jax_remat3 (jax 0.10) has no offload")
    sets = []
    for flag in (False, True):
        jax.config.update("jax_remat3", flag)
        try:
            loss, args = SMALL[model](POLICIES[policy])
            found = saved_residuals(loss, args)
        finally:
            jax.config.update("jax_remat3", False)
        sets.append({(r.shape, r.dtype, r.module, r.reason, r.memory) for r in found})
    assert sets[0] == sets[1]


# -- errors ---------------------------------------------------------------------------------------


def test_errors_name_the_call():
    with pytest.raises(NotDifferentiableError, match=r"`saved_residuals`.*a loss is one scalar"):
        saved_residuals(lambda x: x, (X,))
    with pytest.raises(NotDifferentiableError, match="only floating-point"):
        saved_residuals(lambda x: x.sum(), (jax.ShapeDtypeStruct((2,), jnp.int32),))
    with pytest.raises(UserError, match="there is no argument 3"):
        saved_residuals(lambda x: x.sum(), (X,), 3)


def inner(x):
    return jnp.exp(x)


def middle(x):
    return jnp.sin(inner(x))


def test_a_value_has_the_frames_of_the_users_code():
    here = pathlib.Path(__file__).name
    lines = pathlib.Path(__file__).read_text().splitlines()

    def called(x):
        return jnp.sum(middle(x))

    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    (saved, *_) = (r for r in saved_residuals(called, (x,)) if r.primitive == "exp")
    names = [frame.rpartition(" in ")[2] for frame in saved.frames]
    assert names == ["inner", "middle", "called"]
    places = [frame.partition(" in ")[0] for frame in saved.frames]
    assert places[0] == saved.source
    for place, text in zip(places, ("jnp.exp(x)", "inner(x)", "middle(x)"), strict=True):
        file, _, line = place.rpartition(":")
        assert file.endswith(here)
        assert text in lines[int(line) - 1]
