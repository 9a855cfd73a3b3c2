"""Which function of a script is its training step, and with which arguments it is called."""

import textwrap

import jax
import jax.numpy as jnp
import pytest

from remat_kit import BuildError, measure
from remat_kit._doctor.capture import find_step
from remat_kit._doctor.script import Script


@pytest.fixture
def found(tmp_path):
    """Find the step of a script, whose text is given."""

    def found(text, name=None):
        path = tmp_path / "train.py"
        path.write_text("import jax, jax.numpy as jnp\n" + textwrap.dedent(text))
        return find_step(Script(str(path)), name, "doctor train.py")

    return found


def test_without_a_jit_it_is_the_loss(found, capsys):
    step = found(
        """
        def loss(w, x):
            return jnp.mean(jnp.sin(jnp.tanh(x @ w)))
        w, x = jnp.ones((16, 16)), jnp.ones((64, 16))
        for _ in range(2):
            w = w - jax.grad(loss)(w, x)
            print("ran")
        """
    )
    assert capsys.readouterr().err == ""
    assert (step.name, step.jitted, step.argnums, step.is_own) == ("loss", False, 0, True)

    def loss(w, x):
        return jnp.mean(jnp.sin(jnp.tanh(x @ w)))

    expected = measure(loss, jnp.ones((16, 16)), jnp.ones((64, 16)))
    assert measure(step.fn, *step.args).peak_bytes == expected.peak_bytes


def test_a_gradient_of_nnx_without_a_jit(found):
    step = found(
        """
        from flax import nnx
        def loss(model, x):
            return jnp.mean(jnp.sin(jnp.tanh(model(x))))
        nnx.grad(loss)(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), jnp.ones((64, 16)))
        """
    )
    assert (step.name, step.argnums) == ("loss", 0)
    # The weight and the bias with their gradients, and the batch.
    assert measure(step.fn, *step.args).peak_bytes > 4 * (2 * (16 * 16 + 16) + 64 * 16)


def test_a_step_that_a_library_wraps_has_the_name_of_the_user_s_function(found, tmp_path):
    step = found(
        """
        import equinox as eqx
        @eqx.filter_jit
        def make_step(model, x):
            def loss(model):
                return jnp.mean(jax.vmap(model)(x) ** 2)
            return eqx.apply_updates(model, eqx.filter_grad(loss)(model))
        make_step(eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0)), jnp.ones((64, 8)))
        """
    )
    assert (step.name, step.source) == ("make_step", f"{tmp_path / 'train.py'}:4")


def test_a_method_with_static_and_donated_arguments(found):
    step = found(
        """
        import functools
        class Trainer:
            @functools.partial(
                jax.jit, static_argnums=0, static_argnames="twice", donate_argnums=1
            )
            def step(self, w, x, *, twice):
                new = w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
                return new if twice else w
        Trainer().step(jnp.ones((16, 16)), jnp.ones((64, 16)), twice=True)
        """
    )
    assert step.name == "Trainer.step"
    memory = measure(step.fn, *step.args, argnums=None)
    assert memory.alias_bytes == 4 * 16 * 16


def test_a_step_that_is_compiled_before_it_runs(found):
    step = found(
        """
        step = jax.jit(jax.grad(lambda w: jnp.mean(jnp.tanh(w @ w))))
        step.lower(jax.ShapeDtypeStruct((16, 16), jnp.float32)).compile()
        """
    )
    assert step.args[0].shape == (16, 16)


def test_a_step_inside_of_a_loop(found):
    step = found(
        """
        @jax.jit
        def step(w, x):
            return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
        jax.lax.scan(lambda w, x: (step(w, x), None), jnp.ones((16, 16)), jnp.ones((3, 64, 16)))
        """
    )
    assert [x.shape for x in step.args] == [(16, 16), (64, 16)]
    assert not any(isinstance(x, jax.core.Tracer) for x in step.args)


def test_small_gradients_do_not_count_unless_they_are_named(found):
    text = """
        def slope(x):
            return jnp.sum(x**2)
        jax.jit(jax.grad(slope))(jnp.ones(3))
        """
    with pytest.raises(BuildError, match=r"fewer than 64 numbers \(slope\)"):
        found(text)
    assert found(text, "slope").args[0].shape == (3,)


def test_a_jitted_function_that_was_called_before_is_found_again(found):
    text = "jax.jit(jax.grad(lambda w: jnp.sum(jnp.tanh(w @ w))))(jnp.ones((16, 16)))"
    assert found(text).name == found(text).name == "<lambda>"
    assert jax.grad(jnp.sum)(jnp.ones(100)).shape == (100,)
