"""Plans that are made at the first call."""

import functools
import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import one_by_one
from step_programs import updated

from remat_kit import PolicyError, RematKitWarning, UserError, _jax, auto, policy
from remat_kit._cli.main import main
from remat_kit._planner import auto as planner
from remat_kit._policy import recipe


def deep(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"block_{i}"):
            x = x + jnp.tanh(jnp.tanh(x @ w) @ w)
    return jnp.mean(x**2)


def step_of(loss):
    return jax.jit(lambda w, x: updated(w, jax.grad(loss)(w, x)), donate_argnums=0)


WEIGHTS = [jnp.full((64, 64), 0.01 * i) for i in range(12)]
X = jnp.linspace(-1, 1, 2048 * 64).reshape(2048, 64)


def copies():
    return jax.tree.map(jnp.array, WEIGHTS)


def same(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_KIT_CACHE", str(tmp_path / "cache"))


def test_a_step_is_planned_for_the_shapes_of_its_call(capsys, monkeypatch):
    made = []
    real = planner.frontier_of_step
    monkeypatch.setattr(
        planner, "frontier_of_step", lambda *args, **how: made.append(1) or real(*args, **how)
    )
    step = step_of(deep)
    lean = policy(auto(0.7))(step)
    for _ in range(2):
        same(lean(copies(), X), step(copies(), X))
    assert len(made) == 1
    said = capsys.readouterr().err
    assert said.startswith("remat_kit.auto: planned ")
    assert "without a plan" in said
    same(lean(copies(), X[:1024]), step(copies(), X[:1024]))
    assert len(made) == 2
    # Another decorated step finds both plans on disk.
    again = policy("auto:0.7")(step)
    same(again(copies(), X), step(copies(), X))
    assert len(made) == 2
    assert "from the cache" in capsys.readouterr().err


def test_a_loss_is_planned_when_it_is_differentiated():
    lean = policy(auto(0.7))(deep)
    found, expected = (one_by_one(jax.grad(f), WEIGHTS, X) for f in (lean, deep))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert float(lean(WEIGHTS, X)) == pytest.approx(float(deep(WEIGHTS, X)))
    text = str(jax.make_jaxpr(jax.grad(lean))(WEIGHTS, X))
    assert "remat2" in text or "checkpoint" in text or "Remat" in text


def test_a_plan_in_a_file_is_read_and_written(tmp_path, capsys):
    path = tmp_path / "plan.toml"
    step = step_of(deep)
    policy(auto(0.7, path=path))(step)(copies(), X)
    written, chosen = path.read_text(), recipe.load(str(path)).policy
    capsys.readouterr()
    policy(auto(0.7, path=path))(step)(copies(), X)
    assert path.read_text() == written
    assert capsys.readouterr().err == ""
    policy(str(path))(step)(copies(), X)  # it is a recipe
    path.write_text("description = 'nothing'\npolicy = \"save(nothing)\"\n")
    policy(auto(0.7, path=path))(step)(copies(), X)
    assert recipe.load(str(path)).policy == chosen


def test_a_budget_that_cannot_be_met_is_a_warning_or_an_error():
    step = step_of(deep)
    with pytest.warns(RematKitWarning, match="no plan was found"):
        same(policy(auto("200KiB"))(step)(copies(), X), step(copies(), X))
    with pytest.raises((UserError, PolicyError)):
        policy(auto("200KiB", strict=True))(step)(copies(), X)
    with pytest.raises(UserError, match="not an amount of memory"):
        policy(auto("banana"))(step)(copies(), X)


_PARTITIONED = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
import remat_kit

def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

@jax.jit
def step(weights, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

mesh = jax.sharding.Mesh(jax.devices(), ("data",))
place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
weights = [0.1 * jax.random.normal(jax.random.key(i), (64, 64)) for i in range(8)]
x = jax.random.normal(jax.random.key(9), (4096, 64))
for batch in (jax.device_put(x, place), x):
    lean = remat_kit.policy("auto:min")(step)
    assert all(map(jnp.allclose, lean(weights, batch), step(weights, batch)))
    print(remat_kit.measure(step, weights, batch, argnums=None).peak_bytes)
"""


@pytest.mark.slow
def test_a_partitioned_step_has_a_plan_of_its_own():
    done = subprocess.run([sys.executable, "-c", _PARTITIONED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"planned step/loss: local: (.*) MiB, without a plan (.*) MiB", done.stderr)
    peaks = [int(line) / 2**20 for line in done.stdout.splitlines()]
    assert [float(without) for _, without in said] == pytest.approx(peaks, abs=0.1)
    assert peaks[0] < 0.7 * peaks[1]
    if jax.__version_info__ >= (0, 11):  # XLA:CPU of jax 0.10 undoes recompute outside of loops
        assert all(float(lean) < 0.7 * float(without) for lean, without in said)


def test_what_is_no_loss_and_no_step():
    with pytest.raises(PolicyError, match="plans a loss or a training step"):
        jax.grad(lambda w: policy(auto(0.7))(lambda w: w @ w)(w).sum())(WEIGHTS[0])


def test_the_blocks_of_a_model_have_no_plan_of_their_own():
    with pytest.raises(UserError, match="plans a whole loss or step"):
        policy("auto:0.7", at="block_*")


@pytest.mark.skipif(
    _jax.JAX_VERSION < (0, 11), reason="XLA:CPU of JAX 0.10.2 does not bring this loss to 0.7"
)
def test_the_command_line_plans_the_whole_loss(capsys):
    size = ["--size", "batch=4096", "features=64", "hidden=64"]
    assert main(["measure", "models/mlp.py:build", *size, "--policy", "auto:0.7"]) == 0
    said = capsys.readouterr()
    assert said.err.count("remat_kit.auto: planned") == 1
    assert "auto:0.7" in said.out


def test_the_text_of_the_policy():
    chosen = auto(0.5, target="cpu", objective="time", path="plan.toml", strict=True)
    assert repr(chosen) == (
        "auto(0.5, target='cpu', objective='time', path='plan.toml', strict=True)"
    )
    assert eval(repr(chosen), {"auto": auto}) == chosen
    assert repr(auto()) == "auto('fit')"


_PROCESS = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import jax.numpy as jnp
import remat_kit
from remat_kit._jax import distributed

def loss(weights, x):
    for w in weights:
        x = x + jnp.tanh(jnp.tanh(x @ w) @ w)
    return jnp.mean(x**2)

@remat_kit.policy("auto:0.5")
@jax.jit
def step(weights, x):
    value, gradient = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value

weights = [jnp.full((32, 32), 0.01 * i, jnp.float32) for i in range(6)]
x = jnp.linspace(-1, 1, 1024 * 32).reshape(1024, 32)
values = []
for _ in range(3):
    weights, value = step(weights, x)
    values.append(float(value))
(plan,) = step.__remat_kit_step__.plans.values()
print(repr((values, repr(plan))))
"""


@pytest.mark.slow
def test_all_processes_take_the_plan_of_the_first(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(_PROCESS))
    address = f"127.0.0.1:{20000 + os.getpid() % 20000}"
    start = functools.partial(
        subprocess.Popen, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    both = [start([sys.executable, str(script), address, str(i)]) for i in range(2)]
    outs = [p.communicate(timeout=300) for p in both]
    assert all(p.returncode == 0 for p in both), outs
    assert outs[0][0] == outs[1][0]
    assert "planned(" in outs[0][0]
    assert "remat_kit.auto" in outs[0][1]
    assert "remat_kit.auto" not in outs[1][1]
