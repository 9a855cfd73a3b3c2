"""What `remat_kit.doctor` answers about a step."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import remat_kit
from remat_kit import UserError, measure


@jax.jit
def step(params, x):
    def loss(params):
        y = x
        for w in params:
            y = jnp.sin(jnp.tanh(y @ w))
        return jnp.mean(y)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


PARAMS = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 4
X = jax.ShapeDtypeStruct((512, 16), jnp.float32)


def test_the_answer(tmp_path):
    found = remat_kit.doctor(step, PARAMS, X, budget="min")
    expected = measure(step, PARAMS, X, argnums=None)
    assert dataclasses.replace(expected, cached=found.memory.cached) == found.memory
    assert found.step.name == "step"
    assert [loss.name for loss in found.losses] == [
        "step/step.<locals>.loss".replace("step.<locals>.", "")
    ]
    assert str(found).startswith(found.headline)
    assert "step = with_plan(step)" in str(found)
    found.save(tmp_path / "plan.toml")
    lean = remat_kit.policy(str(tmp_path / "plan.toml"))(step)
    memory = measure(lean, PARAMS, X, argnums=None)
    assert memory.peak_bytes == found.plan.compiled_peak_bytes < expected.peak_bytes
    found.to_html(tmp_path / "page.html")
    assert "<html" in (tmp_path / "page.html").read_text()


def test_a_step_that_does_not_fit():
    found = remat_kit.doctor(step, PARAMS, X, target="cpu@1KiB")
    assert found.memory.fits is False
    assert found.plan is None
    assert found.notes[0].startswith("no plan: ")
    assert found.patch == ""
    with pytest.raises(UserError, match="there is no plan to save"):
        found.save("plan.toml")
