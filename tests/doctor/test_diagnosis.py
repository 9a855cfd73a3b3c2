"""What `remat_kit.doctor` answers about a step."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import remat_kit
from remat_kit import UserError, measure
from remat_kit._units import format_bytes


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


# -- pieces ---------------------------------------------------------------------------------------


@jax.jit
def head_step(params, x):
    def head(params):
        h = jnp.tanh(x @ params["body"])
        return -jnp.mean(jax.nn.log_softmax(h @ params["head"])[:, 0])

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(head)(params))


HEAD = {
    "body": jax.ShapeDtypeStruct((16, 16), jnp.float32),
    "head": jax.ShapeDtypeStruct((16, 2000), jnp.float32),
}
ROWS = jax.ShapeDtypeStruct((1024, 16), jnp.float32)


def test_pieces_are_proposed_where_the_peak_is_a_loss_head():
    found = remat_kit.doctor(head_step, HEAD, ROWS, target="cpu")
    assert found.plan is not None
    notes = " ".join((*found.notes, *found.plan.notes))
    assert notes.count("pieces=True (--pieces)") == 1
    with_pieces = remat_kit.doctor(head_step, HEAD, ROWS, target="cpu", budget="min", pieces=True)
    assert with_pieces.plan.compiled_peak_bytes < found.plan.compiled_peak_bytes / 3
    assert "pieces=True" not in str(with_pieces)


def test_where_no_plan_fits_pieces_may():
    found = remat_kit.doctor(head_step, HEAD, ROWS, target="cpu@4MiB")
    assert found.plan is None
    assert found.notes[0].startswith("no plan: ")
    (note,) = [n for n in found.notes if "with pieces=True (--pieces) a plan fits" in n]
    lean = remat_kit.doctor(head_step, HEAD, ROWS, target="cpu@4MiB", pieces=True)
    assert lean.plan is not None
    assert format_bytes(lean.plan.compiled_peak_bytes) in note
