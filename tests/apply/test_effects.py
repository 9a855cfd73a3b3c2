"""Effects in regions: what `jax.checkpoint` does with them, a policy does too.

A region may run twice, in the forward pass and again in the backward pass, and so may a callback in
it. How often depends on what is saved, and on whether the policy keeps the callback itself.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, io_callback

from remat_kit import policy

X = jnp.arange(3.0)
SHAPE = jax.ShapeDtypeStruct((3,), jnp.float32)
calls = []


def note(x):
    calls.append(np.sum(x))


def noted(x):
    note(x)
    return np.asarray(x, np.float32)


def then(y, _):
    return y


def callback_in_a_branch(y):
    return then(
        y, jax.lax.cond(y[0] > -9, lambda z: jax.debug.callback(note, z), lambda z: None, y)
    )


def callback_in_a_loop(y):
    def body(c, _):
        return then(jnp.sin(c), jax.debug.callback(note, c)), None

    return jax.lax.scan(body, y, None, length=2)[0]


def pure(x):
    return jax.pure_callback(noted, SHAPE, x, vmap_method="sequential")


EFFECTS = {
    "debug print": lambda y: then(y, jax.debug.print("{}", jnp.sum(y))),
    "debug callback": lambda y: then(y, jax.debug.callback(note, y)),
    "debug callback on a value of its own": lambda y: then(
        y, jax.debug.callback(note, jnp.exp(jax.lax.stop_gradient(y)))
    ),
    "debug callback in a jit": jax.jit(lambda y: then(y, jax.debug.callback(note, jnp.sin(y)))),
    "debug callback in a branch": callback_in_a_branch,
    "debug callback in a loop": callback_in_a_loop,
    "ordered debug callback": lambda y: then(y, jax.debug.callback(note, y, ordered=True)),
    "io callback": lambda y: y * io_callback(noted, SHAPE, jax.lax.stop_gradient(y)),
    "ordered io callback": lambda y: (
        y * io_callback(noted, SHAPE, jax.lax.stop_gradient(y), ordered=True)
    ),
    "io callback on a tangent": lambda y: then(y, io_callback(note, None, y)),
    "pure callback": lambda y: y * pure(jax.lax.stop_gradient(y)),
    "pure callback on a tangent": lambda y: y * pure(y),
}
POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "names:product": jax.checkpoint_policies.save_only_these_names("product"),
}


def in_loops(f):
    """Gradients of a batch, and the gradient of a loop."""

    def loop(x):
        return jax.lax.scan(lambda c, _: (f(c * x), None), 1.0, None, length=3)[0]

    return jax.jit(lambda x: (jax.vmap(jax.grad(f))(jnp.stack([x, x])), jax.grad(loop)(x)))


MODES = {
    "forward": lambda f: f,
    "jit(grad)": lambda f: jax.jit(jax.grad(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "loops": in_loops,
}


def outcome(fn):
    """Return (value, None, number of calls), or (None, the error, 0)."""
    calls.clear()
    try:
        value = fn(X)
        jax.effects_barrier()
    except Exception as error:
        return None, error, 0
    return value, None, len(calls)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "what",
    [
        "dots",
        pytest.param("everything", marks=pytest.mark.slow),
        pytest.param("nothing", marks=pytest.mark.slow),  # that is `jax.checkpoint` itself
        pytest.param("names:product", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("effect", EFFECTS.values(), ids=EFFECTS)
def test_effects_are_those_of_jax_checkpoint(effect, what, mode, implementation, capsys):
    def fn(x):
        y = checkpoint_name(jnp.tanh(2.0 * x) @ jnp.eye(3), "product")
        return jnp.sum(jnp.sin(effect(y)))

    transformed = MODES[mode]
    # A loop that is differentiated as a whole needs no barriers, so we make none there.
    reference = jax.checkpoint(fn, policy=POLICIES[what], prevent_cse=mode != "loops")
    expected, refusal, often = outcome(transformed(reference))
    often_printed = len(capsys.readouterr().out.splitlines())
    got, error, times = outcome(transformed(policy(what)(fn)))
    times_printed = len(capsys.readouterr().out.splitlines())
    if refusal is not None:
        assert type(error) is type(refusal)
        assert str(error).split("[")[0] == str(refusal).split("[")[0]
        return
    assert error is None
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)
    assert (times, times_printed) == (often, often_printed)


@pytest.mark.parametrize("what", ["everything", "names:product"])
def test_pure_callbacks_in_the_gradient_of_a_batch(what, implementation):
    """One that is kept runs once for each example, others run again with what is recomputed."""
    if jax.__version_info__ < (0, 11) and jax.config.values["jax_remat3"]:
        pytest.skip("under jax_remat3 of jax 0.10.2, JAX cannot batch a name")

    def fn(x):
        y = checkpoint_name(pure(jax.lax.stop_gradient(jnp.tanh(x))), "product")
        return jnp.sum(jnp.sin(y * x) * pure(jax.lax.stop_gradient(jnp.cos(x))))

    def counted(decorated):
        def total(x):
            return jnp.sum(jax.vmap(decorated)(jnp.stack([x, 2 * x])))

        _, error, times = outcome(jax.grad(total))
        assert error is None
        return times

    expected = counted(jax.checkpoint(fn, policy=POLICIES[what]))
    assert counted(policy(what)(fn)) == expected
    assert expected == (4 if what == "everything" else 6)


@pytest.mark.parametrize("what", ["dots", "names:product"])
@pytest.mark.parametrize("inside", [lambda f: f, jax.jit], ids=["", "jit"])
def test_what_a_callback_alone_reads_is_kept(inside, what, implementation):
    """JAX itself fails here: it saves the product, and then does not hand it to the callback."""

    def fn(x):
        y = checkpoint_name(jnp.tanh(2.0 * x) @ jnp.eye(3), "product")
        inside(lambda y: jax.debug.callback(note, y))(y)
        return jnp.sum(x * x)

    decorated = policy(what)(fn)
    np.testing.assert_allclose(jax.grad(decorated)(X), 2 * X)
    _, error, times = outcome(jax.jit(jax.grad(decorated)))
    assert error is None
    assert times == 2
    jaxpr = jax.make_jaxpr(jax.grad(decorated))(X)
    assert str(jaxpr).count("tanh") == 1


@pytest.mark.parametrize("ordered", [False, True])
def test_the_error_of_jax_carries_a_hint(ordered):
    @policy("nothing")
    def fn(x):
        y = jax.lax.stop_gradient(x)
        return jnp.sum(jnp.sin(x) * io_callback(noted, SHAPE, y, ordered=ordered))

    assert fn(X) == jnp.sum(jnp.sin(X) * X)
    with pytest.raises(NotImplementedError, match="Effects not supported in") as caught:
        jax.grad(fn)(X)
    (hint,) = (n for n in caught.value.__notes__ if n.startswith("hint: "))
    assert "`policy('nothing')`" in hint


def test_other_errors_are_left_alone():
    with pytest.raises(NotImplementedError, match="mine") as caught:
        policy("nothing")(lambda x: then(x, exec("raise NotImplementedError('mine')")))(X)
    assert not any("hint" in n for n in getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize("what", ["nothing", "dots", "everything"])
def test_checks_in_a_region(what):
    def fn(x):
        y = jnp.tanh(x)
        checkify.check(jnp.all(x < 2.5), "too large: {}", jnp.max(x))
        return jnp.sum(jnp.sin(y))

    for wrap in (lambda f: f, jax.grad):
        expected, plain = checkify.checkify(wrap(fn))(X)
        error, got = checkify.checkify(wrap(policy(what)(fn)))(X)
        np.testing.assert_allclose(got, plain, rtol=1e-6)
        assert error.get() == expected.get() is None
        error, _ = checkify.checkify(wrap(policy(what)(fn)))(X + 1)
        expected, _ = checkify.checkify(wrap(fn))(X + 1)
        assert error.get().split(" (")[0] == expected.get().split(" (")[0]
