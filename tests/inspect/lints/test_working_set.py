"""The lint about a peak that is one working set: it is found, and its fix takes it away."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lint_programs import codes, f32, fixed, only
from zoo import load

import remat_kit
from remat_kit import inspect

CODE = "peak-in-pieces"


def head(w, x):
    """A loss head, whose logits are far larger than everything else."""
    with jax.named_scope("body"):
        h = jnp.tanh(x @ w["body"])
    with jax.named_scope("head"):
        return -jnp.mean(jax.nn.log_softmax(h @ w["head"])[:, 0])


W = {"body": f32(16, 16), "head": f32(16, 2000)}
X = f32(1024, 16)


def test_a_loss_head():
    report = inspect(head, W, X, target="cpu")
    lint = only(report, CODE)
    logits = 1024 * 2000 * 4
    assert lint.bytes % logits == 0
    assert lint.bytes >= 0.5 * report.readings["cpu"].peak.bytes
    assert lint.module == "head"
    assert "arrays like f32[1024,2000]" in lint.message
    assert "in 16 pieces of axis 0 only 1/16" in lint.message
    after = fixed(lint, head, loss=head, args=(W, X))
    lower = inspect(after, W, X, target="cpu")
    assert CODE not in codes(lower)
    assert lower.memory["cpu"].temp_bytes < report.memory["cpu"].temp_bytes / 3
    filled = jax.tree.map(lambda s: jax.random.normal(jax.random.key(s.size), s.shape), (W, X))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6),
        *(jax.grad(f)(*filled) for f in (head, after)),
    )


def test_logits_of_a_gpt_with_regions_around_its_blocks():
    loss, args = load("gpt").build("nothing", size="tiny", batch=8, layers=2, vocab=20000)
    lint = only(inspect(loss, *args, target="cpu"), CODE)
    assert lint.module.startswith("GPT")
    assert "f32[8,16,20000]" in lint.message


def cumulative(x):
    return jnp.sum(jnp.sin(jnp.cumsum(jnp.exp(x))))


def small(w, x):
    return head(w, x)


@pytest.mark.parametrize(
    ("loss", "args"),
    [
        (cumulative, (f32(2**20),)),  # its axis cannot be divided
        (small, (W, f32(8, 16))),  # nothing is large
        (remat_kit.policy(remat_kit.pieces(16))(head), (W, X)),
        (lambda w, x: jnp.mean((x @ w) ** 2), (f32(2048, 2048), f32(8, 2048))),  # arguments
    ],
)
def test_sound_programs(loss, args):
    assert CODE not in codes(inspect(loss, *args, target="cpu"))


def test_saved_activations_of_many_layers_are_no_working_set():
    def tower(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    report = inspect(tower, [f32(16, 16)] * 12, f32(2**16, 16), target="cpu")
    assert CODE not in codes(report)


def test_nothing_without_a_target():
    assert CODE not in codes(inspect(head, W, X))
