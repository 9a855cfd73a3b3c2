"""The commands that run a training script: `doctor` and `run`."""

import builtins
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

from remat_kit import measure
from remat_kit._cli.main import main

PLAIN = """
    import argparse, pathlib, sys
    import jax, jax.numpy as jnp

    def loss_fn(params, x):
        for w in params:
            x = jnp.sin(jnp.tanh(x @ w))
        return jnp.mean(x**2)

    @jax.jit
    def train_step(params, x):
        value, grads = jax.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--rows", type=int, required=True)
        parser.add_argument("--budget", default="")
        rows = parser.parse_args().rows
        print("slope", jax.grad(lambda x: x**2)(3.0))
        params = [jnp.full((16, 16), 0.1 * i) for i in range(1, 5)]
        for _ in range(3):
            params, value = train_step(params, jnp.ones((rows, 16)))
        print(f"loss {value:.6f}")
        pathlib.Path(__file__).with_name("done").touch()

    if __name__ == "__main__":
        main()
"""


def plain_step(params, x):
    def loss_fn(params, x):
        for w in params:
            x = jnp.sin(jnp.tanh(x @ w))
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss_fn)(params, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def plain_arguments(rows):
    return [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 4, jnp.ones((rows, 16))


@pytest.fixture
def diagnosed(run):
    """Run `doctor` for a script and return its JSON and what went to standard error."""

    def diagnosed(*argv):
        status, out, err = run("doctor", "--json", "-", *argv)
        assert status == 0, err
        return json.loads(out), err

    return diagnosed


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A script, a plan for it, what `doctor` answered about it, and what it printed."""
    folder = tmp_path_factory.mktemp("planned")
    script, plan, out = (folder / name for name in ("train.py", "plan.toml", "out.json"))
    script.write_text(textwrap.dedent(PLAIN))
    words = ["--budget", "min", "--save", plan, "--json", out, script, "--rows", "512"]
    with contextlib.redirect_stderr(io.StringIO()) as err:
        assert main(["doctor", *map(str, words)]) == 0
    found = json.loads(out.read_text())
    out.unlink()
    return script, plan, found, err.getvalue()


def test_the_answer_for_a_plain_script(planned):
    script, _, found, err = planned
    assert "slope 6.0" in err
    assert "loss 0" not in err
    assert not script.with_name("done").exists()
    assert found["step"] == {"name": "train_step", "source": f"{script}:10", "jitted": True}
    assert found["losses"] == [
        {"name": "train_step/loss_fn", "source": f"{script}:5", "times": 1.0, "loop": ""}
    ]
    expected = measure(jax.jit(plain_step), *plain_arguments(512), argnums=None)
    assert found["target"] == "cpu"
    assert found["peak_bytes"] == expected.peak_bytes
    assert found["memory_bytes"] == expected.memory_bytes
    assert found["fits"] is True
    assert found["holders"][0]["kind"] == "forward"
    assert sum(h["share"] for h in found["holders"]) == pytest.approx(1.0)
    assert found["headline"].startswith("The step needs ")
    assert found["plan"]["compiled_peak_bytes"] < expected.peak_bytes
    assert (found["plan"]["model"], found["plan"]["size"]) == (str(script), {})
    assert sorted(p.name for p in script.parent.iterdir()) == ["plan.toml", "train.py"]


def test_a_plan_with_pieces(diagnosed, model):
    words = ("--target", "cpu", "--budget", "min", model(PLAIN), "--rows", "65536")
    lean, _ = diagnosed("--pieces", *words)
    whole, _ = diagnosed(*words)
    assert " pieces " in lean["plan"]["policy"]
    assert " pieces " not in whole["plan"]["policy"]
    assert lean["plan"]["compiled_peak_bytes"] < whole["plan"]["compiled_peak_bytes"]


def test_the_lines_to_paste_work(planned, monkeypatch):
    script, _, found, _ = planned
    monkeypatch.chdir(script.parent)
    names = {"train_step": jax.jit(plain_step)}
    exec(found["patch"], names)
    memory = measure(names["train_step"], *plain_arguments(512), argnums=None)
    assert memory.peak_bytes == found["plan"]["compiled_peak_bytes"]


def test_run_prints_what_the_script_prints(run, planned, model, tmp_path):
    _, plan, _, _ = planned
    script = model(PLAIN, "train.py")
    status, without, _ = run("run", "--policy", "everything", script, "--rows", "512")
    assert status == 0
    (tmp_path / "done").unlink()
    status, out, err = run("run", "--plan", plan, script, "--rows", "512")
    assert (status, out, err) == (0, without, "")
    assert (tmp_path / "done").exists()
    status, out, err = run("run", "--plan", plan, script, "--rows", "256")
    assert status == 0
    assert out.startswith("slope 6.0\nloss ")
    assert err.startswith(f"warning: `remat-kit run {script}`: the plan had no effect: it was made")


def test_run_gives_the_loss_its_plan(monkeypatch, run, planned, model):
    _, plan, found, _ = planned
    script = model(PLAIN, "train.py")
    peaks = []
    script.write_text(
        script.read_text().replace(
            "params, value = train_step(params,",
            "params, value = seen(train_step, params,",
        )
    )

    def seen(step, *args):
        memory = step.lower(*args).compile().memory_analysis()
        peaks.append(
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )
        return step(*args)

    monkeypatch.setattr(builtins, "seen", seen, raising=False)
    assert run("run", "--plan", plan, script, "--rows", "512")[0] == 0
    assert peaks[0] == found["plan"]["compiled_peak_bytes"] < found["peak_bytes"]


def test_modules_are_run_from_the_current_folder(diagnosed, model, tmp_path, monkeypatch):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    model("rows = 64", "pkg/settings.py")
    script = textwrap.dedent(PLAIN).replace(
        "import argparse", "from . import settings\nimport argparse"
    )
    (tmp_path / "pkg" / "train.py").write_text(script)
    before = list(sys.path), list(sys.argv)
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json", "out.json", "-m", "pkg.train", "--rows", "64"]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["step"]["name"] == "train_step"
    assert (list(sys.path), list(sys.argv)) == before
    assert "pkg.train" not in sys.modules
    assert not (tmp_path / "pkg" / "done").exists()


ABSL = """
    from absl import app, flags
    import jax, jax.numpy as jnp, optax
    from flax import nnx

    rows = flags.DEFINE_integer("rows", 0, "rows")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(4)])

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.relu(layer(x))
            return x

    @nnx.jit
    def train_step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def main(_):
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        print("ran", train_step(model, optimizer, jnp.ones((rows.value, 16))))

    if __name__ == "__main__":
        app.run(main)
"""


def test_a_step_of_nnx_under_absl(diagnosed, model):
    from absl import flags

    try:
        found, err = diagnosed(model(ABSL), "--rows=256")
    finally:
        flags.FLAGS.unparse_flags()
        delattr(flags.FLAGS, "rows")
    assert "ran" not in err
    assert found["step"]["name"] == "train_step"
    assert [loss["name"] for loss in found["losses"]] == ["train_step/<lambda>"]
    # Weights, biases, two moments of each, and the batch.
    assert found["peak_bytes"] > 3 * 4 * 4 * (16 * 16 + 16) + 4 * 256 * 16


@pytest.mark.slow  # importing Keras
@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed")
def test_keras(model, tmp_path):
    script = model(
        """
        import os
        os.environ["KERAS_BACKEND"] = "jax"
        import keras, numpy as np
        layers = [keras.layers.Dense(32, activation="tanh") for _ in range(4)]
        model = keras.Sequential([keras.layers.Input((8,)), *layers])
        model.compile("adam", "mse")
        model.fit(np.ones((64, 8)), np.ones((64, 32)), batch_size=32, verbose=2)
        print("trained")
        """
    )
    out = tmp_path / "out.json"
    words = [sys.executable, "-m", "remat_kit", "doctor", "--json", out, script]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert "trained" not in done.stdout + done.stderr
    assert found["step"]["name"] == "JAXTrainer.train_step"
    assert found["patch"] == f"remat-kit run --plan plan.toml {script}"
    assert len(found["losses"]) == 1


TWO = """
    import jax, jax.numpy as jnp
    @jax.jit
    def generator_step(w, x):
        return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
    @jax.jit
    def critic_step(w, x):
        return jax.grad(lambda w: jnp.mean(jnp.sin(jnp.exp(x @ w))))(w)
    w, x = jnp.ones((16, 16)), jnp.ones((64, 16))
    generator_step(w, x); print("one"); critic_step(w, x); print("two")
"""


def test_one_of_several_steps(diagnosed, refused, model):
    script = model(TWO)
    found, err = diagnosed(script)
    assert found["step"]["name"] == "generator_step"
    assert "one" not in err.split("\n")
    found, err = diagnosed("--step", "critic_*", script)
    assert found["step"]["name"] == "critic_step"
    lines = err.split("\n")
    assert "one" in lines
    assert "two" not in lines


def test_a_step_that_is_not_there(run, model):
    status, _, err = run("doctor", "--step", "critic", model(TWO))
    assert status == 2
    assert "no step is named 'critic'" in err
    assert "critic_step" in err


GRADIENT = "jax.jit(jax.grad(lambda w: jnp.sum(jnp.tanh(w @ w))))(jnp.ones((16, 16)))"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print(1)", "the script ended before it took a gradient"),
        ("import sys; sys.exit(3)", "ended, with exit status 3, before it took a gradient"),
        ("1 / 0", "the script raised ZeroDivisionError: division by zero (model.py:1)"),
        ("def f(:", "the script raised SyntaxError: invalid syntax"),
        ("raise KeyError", "the script raised KeyError: without a message"),
        ("import jax; jax.grad(lambda x: x**2)(3.0)", "its only gradients are of fewer than 64"),
        ("import argparse; argparse.ArgumentParser().parse_args(['-x'])", "with exit status 2"),
    ],
)
def test_scripts_without_a_step(run, model, text, message):
    script = model(text)
    status, out, err = run("doctor", script)
    assert status == 2
    assert out == ""
    assert "Traceback" not in err
    assert message in err.replace(f"{script.parent}{os.sep}", "")


def test_scripts_that_are_missing(refused, tmp_path):
    (tmp_path / "train.py").touch()
    message, hint = refused("doctor", tmp_path / "trian.py")
    assert "there is no file" in message
    assert "train.py" in hint
    assert "is a folder" in refused("doctor", tmp_path)[0]
    assert "no script is named" in refused("doctor", "--budget", "0.5")[0]
    assert "no module is named" in refused("doctor", "-m")[0]
    assert "there is no file" in refused("run", "--policy", "dots", tmp_path / "trian.py")[0]
    assert "no plan is given" in refused("run", tmp_path / "train.py")[0]


def test_a_thread_that_waits_for_ever_does_not_keep_the_process(model):
    script = model(
        f"""
        import atexit, pathlib, queue, threading
        import jax, jax.numpy as jnp
        path = pathlib.Path(__file__).with_name("temporary")
        path.touch()
        atexit.register(path.unlink)
        threading.Thread(target=queue.Queue().get).start()
        {GRADIENT}
        """
    )
    words = [sys.executable, "-m", "remat_kit", "doctor", "--json", "-", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"]["name"] == "<lambda>"
    assert not script.with_name("temporary").exists()


@pytest.mark.parametrize(
    ("text", "status", "shown"),
    [
        ("import sys; print('out'); sys.exit(7)", 7, ""),
        ("import sys; print('out'); sys.exit('why')", 1, "why\n"),
        ("print('out'); 1 / 0", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
def test_the_status_of_run_is_the_scripts(run, model, text, status, shown):
    script = model(text)
    found, out, err = run("run", "--policy", "dots", script)
    assert (found, out) == (status, "out\n")
    assert shown in err
    assert "remat_kit" not in err.split("warning")[0].replace(str(script), "")


def test_settings_that_come_too_late(run, model):
    script = model(
        f"import os; os.environ['JAX_ENABLE_X64'] = '1'\nimport jax, jax.numpy as jnp\n{GRADIENT}"
    )
    status, _, err = run("doctor", script)
    assert status == 0
    assert "warning: the script sets JAX_ENABLE_X64 in `os.environ`" in err


@pytest.mark.slow
def test_a_plan_that_does_not_exist_is_said(run, model, tmp_path):
    script = model(PLAIN)
    plan = tmp_path / "plan.toml"
    status, out, err = run("doctor", "--budget", "1KiB", "--save", plan, script, "--rows", "64")
    assert status == 2
    assert "note: no plan: " in out
    assert "there is no plan to save" in err
    assert not plan.exists()


# -- logs -----------------------------------------------------------------------------------------


def test_a_log(run, refused, tmp_path, monkeypatch):
    log = tmp_path / "log.txt"
    log.write_text("...\nRESOURCE_EXHAUSTED: Out of memory while trying to allocate 4096 bytes.\n")
    status, out, _ = run("doctor", "--log", log, "--json", "-")
    assert status == 0
    assert json.loads(out)["requested_bytes"] == 4096
    monkeypatch.setattr(sys, "stdin", io.StringIO(log.read_text()))
    assert run("doctor", "--log", "-")[1].startswith(
        "The program ran out of memory: it asked for 4 KiB"
    )
    log.write_text("all is well")
    assert "contains no out-of-memory message" in refused("doctor", "--log", log)[0]
    assert "cannot be read" in refused("doctor", "--log", tmp_path / "none")[0]
    assert "a log and a script" in refused("doctor", "--log", log, "train.py")[0]
    assert "has no effect with --log" in refused("doctor", "--log", log, "--budget", "1")[0]
