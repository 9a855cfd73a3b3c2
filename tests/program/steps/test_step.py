"""The training step around a loss, and the state of its optimizer."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from shapes import struct

import remat_kit
from remat_kit._cli import commands as _commands
from remat_kit._cli import main as _main
from remat_kit._errors import UnknownNameError, UserError
from remat_kit._program.steps import step as _step


def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x)


def build(batch=256, policy=None):
    layer = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
    layer = layer if policy is None else remat_kit.policy(policy)(layer)

    def loss(ws, x):
        for w in ws:
            x = layer(x, w)
        return jnp.mean(x)

    return loss, ([struct(48, 48)] * 3, struct(batch, 48))


MODEL = f"{__file__}:build"
PARAMETERS = 3 * 48 * 48 * 4


@pytest.fixture
def run(capsys):
    def run(*argv):
        assert _main.main(list(argv)) == 0
        return capsys.readouterr().out

    return run


def test_adamw_is_what_optax_makes_of_it():
    params = {"a": struct(31, 7), "b": struct(5, dtype=jnp.bfloat16)}
    assert _step.adamw_bytes((params,), 0, "measure") == _step.state_bytes(
        optax.adamw(1e-3), (params,), 0, "measure"
    )
    both = (struct(3), struct(4))
    assert _step.adamw_bytes(both, (0, 1), "measure") == 2 * 7 * 4 + 4


def test_figures_say_that_no_optimizer_is_counted():
    fn, args = build()
    added = 2 * PARAMETERS + 4
    memory = remat_kit.measure(fn, *args)
    assert memory.adamw_bytes == added
    answers = [
        memory,
        remat_kit.fit(build, batches=[64]),
        remat_kit.max_batch(build, target="cpu@1MiB"),
        remat_kit.inspect(fn, *args, target="cpu"),
    ]
    for answer in answers:
        assert "no optimizer is counted" in str(answer)
        assert str(added) in str(answer)
        assert any(str(added) in note for note in answer.to_json()["notes"])


def test_a_whole_step_has_its_optimizer_in_it():
    fn, args = build()
    step = lambda ws, x: jax.tree.map(jnp.subtract, ws, jax.grad(fn)(ws, x))  # noqa: E731
    assert remat_kit.measure(step, *args, argnums=None).adamw_bytes is None
    with pytest.raises(UserError, match="whole step already contains an"):
        remat_kit.measure(step, *args, argnums=None, optimizer=optax.sgd(1.0))


def test_the_optimizer_is_counted_where_it_is_given():
    fn, args = build()
    adamw = optax.adamw(1e-3)
    step, given, donated = _step.training_step(fn, adamw, args, 0, "measure")
    whole = remat_kit.measure(step, *given, argnums=None, donate_argnums=donated)
    state = 2 * PARAMETERS + 4
    memory = remat_kit.measure(fn, *args, optimizer=adamw)
    assert memory.peak_bytes == whole.peak_bytes
    assert memory.optimizer_bytes == state
    assert memory.alias_bytes >= state + PARAMETERS
    cell = remat_kit.fit(build, batches=[256], optimizer=adamw).cells[0]
    assert cell.memory.peak_bytes == memory.peak_bytes
    inspected = remat_kit.inspect(fn, *args, target="cpu", optimizer=adamw)
    assert inspected.memory["cpu"].peak_bytes == memory.peak_bytes
    assert "no optimizer" not in str(inspected)
    full = remat_kit.max_batch(build, target="cpu@1MiB", optimizer=adamw)
    assert full.best.memory.optimizer_bytes == state
    assert full.best.memory.alias_bytes >= state + PARAMETERS
    assert not any("no optimizer" in note for note in full.notes)


def test_commands_take_an_optimizer(run):
    fn, args = build()
    want = remat_kit.measure(fn, *args, optimizer=optax.adamw(1e-3)).peak_bytes
    for name in ("adamw", "optax.adamw(1e-3)", "adamw(1e-3, b1=0.9)"):
        plain = json.loads(run("measure", MODEL, "--optimizer", name, "--json", "-"))
        assert plain["policies"][0]["memory"]["cpu"]["peak_bytes"] == want
    plain = json.loads(
        run("inspect", MODEL, "--target", "cpu", "--optimizer", "adamw", "--json", "-")
    )
    assert plain["policies"][0]["memory"]["cpu"]["peak_bytes"] == want
    plain = json.loads(run("fit", MODEL, "--batch", "256", "--optimizer", "adamw", "--json", "-"))
    assert plain["cells"][0]["peak_bytes"] == want
    for command in (["measure"], ["fit", "--batch", "64"], ["max-batch", "--target", "cpu@1MiB"]):
        assert str(2 * PARAMETERS + 4) in run(command[0], MODEL, *command[1:])


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os')", "optax.adamw(open('x'))", "adamx", "a.b.adamw", "adamw()()", "1"),
        *("(" * 999, "optax.adamw(1e-3).init", "lambda: 1", "", "optax.adamw(bogus=1)"),
        "adamw(**{})",
    ],
)
def test_nothing_of_an_optimizers_text_is_run(text, capsys):
    with pytest.raises((UserError, UnknownNameError)):
        _commands._optimizer(text)
    assert _main.main(["measure", "no/such.py:build", f"--optimizer={text}"]) == 2
    assert "no/such" not in capsys.readouterr().err
