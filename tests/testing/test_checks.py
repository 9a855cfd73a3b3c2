"""What other projects' tests call: does a step fit, is it the same step, has it grown?"""

import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit
from remat_kit import _units, testing
from remat_kit._errors import CheckError, NotDifferentiableError, UserError
from remat_kit._units import format_bytes
from remat_kit.testing import baseline as _baseline
from remat_kit.testing import equivalence as _equivalence

ROOT = pathlib.Path(__file__).parents[2]
pytest_plugins = ["pytester"]

MIB = 2**20


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def tower(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = x + jnp.sin(jnp.tanh(x @ w)) @ w.T
    return jnp.mean(x**2)


WEIGHTS, X = [struct(64, 256)] * 6, struct(1024, 64)


# -- does it fit ------------------------------------------------------------------------------


def test_a_step_that_fits_gives_its_memory():
    peak = remat_kit.measure(tower, WEIGHTS, X, target="cpu").peak_bytes
    for budget in (None, "1GiB", peak):
        memory = testing.assert_fits(tower, WEIGHTS, X, target="cpu", budget=budget)
        assert memory.peak_bytes == peak


def test_a_step_that_does_not_fit_says_what_holds_the_memory_and_what_to_do():
    peak = remat_kit.measure(tower, WEIGHTS, X).peak_bytes
    with pytest.raises(AssertionError) as caught:
        testing.assert_fits(tower, WEIGHTS, X, target="cpu", budget=peak - 1)
    assert isinstance(caught.value, CheckError)
    text = str(caught.value)
    assert f"`assert_fits(..., target='cpu', budget={peak - 1})`: needs" in text
    assert "the budget has" in text
    assert "1 B too much" in text
    kept = remat_kit.inspect(tower, WEIGHTS, X).saved_bytes
    assert f"kept for the backward pass: {format_bytes(kept)}" in text
    assert re.search(r"layer_\*: \d+ × \w+ float32\[1024, 256\]", text)
    assert "policy='nothing', at='layer_*' saves" in caught.value.hint


def test_the_advice_is_what_tracing_says():
    with pytest.raises(CheckError) as caught:
        testing.assert_fits(tower, WEIGHTS, X, target="cpu", budget=1)
    then, now = re.search(r"saves (.*) instead of (.*) \(traced", caught.value.hint).groups()
    report = remat_kit.inspect(tower, WEIGHTS, X, policy="nothing", at="layer_*")
    assert then == _units.format_bytes(report.saved_bytes)
    assert now == _units.format_bytes(remat_kit.inspect(tower, WEIGHTS, X).saved_bytes)


def test_a_policy_that_keeps_nothing_is_not_advised_again():
    with pytest.raises(CheckError) as caught:
        testing.assert_fits(
            tower, WEIGHTS, X, target="cpu", budget=1, policy="nothing", at="layer_*"
        )
    assert "arguments and results take" in caught.value.hint
    assert "donate" in caught.value.hint


def test_a_policy_is_applied():
    plain = testing.assert_fits(tower, WEIGHTS, X, target="cpu")
    kept = testing.assert_fits(tower, WEIGHTS, X, target="cpu", policy="nothing", at="layer_*")
    assert kept.temp_bytes < plain.temp_bytes
    with pytest.raises(CheckError):
        testing.assert_fits(tower, WEIGHTS, X, target="cpu", budget=kept.peak_bytes)
    testing.assert_fits(
        *(tower, WEIGHTS, X),
        target="cpu",
        budget=kept.peak_bytes,
        policy="nothing",
        at="layer_*",
    )


def test_the_budget_is_never_more_than_the_chip():
    with pytest.raises(CheckError, match="the budget has 1 MiB"):
        testing.assert_fits(tower, WEIGHTS, X, target="cpu@1MiB", budget="1GiB")
    with pytest.raises(CheckError, match="the chip has 1 MiB"):
        testing.assert_fits(tower, WEIGHTS, X, target="cpu@1MiB")


def test_a_whole_step_has_no_residuals_to_name():
    def step(weights, x):
        return jax.tree.map(jnp.subtract, weights, jax.grad(tower)(weights, x))

    memory = testing.assert_fits(step, WEIGHTS, X, target="cpu", argnums=None, donate_argnums=0)
    assert memory.alias_bytes == 6 * 64 * 256 * 4
    with pytest.raises(CheckError, match="give the loss instead"):
        testing.assert_fits(step, WEIGHTS, X, target="cpu", budget=1, argnums=None)


def test_the_peak_has_a_bound_of_its_own():
    peak = remat_kit.measure(tower, WEIGHTS, X).peak_bytes
    assert testing.assert_peak_at_most(tower, WEIGHTS, X, target="cpu", peak=peak).fits
    assert not testing.assert_peak_at_most(tower, WEIGHTS, X, target="cpu@1MiB", peak="1GiB").fits
    with pytest.raises(CheckError, match="the peak allowed has"):
        testing.assert_peak_at_most(tower, WEIGHTS, X, target="cpu", peak=peak - 1)


def test_what_the_compiler_refuses_does_not_fit():
    if not remat_kit.target("tpu-v5e").available:
        pytest.skip("the compiler for TPUs is not installed")
    loss, x = lambda w, x: jnp.sum(jnp.sin(jnp.sin(x @ w))), struct(2**20, 512)
    with pytest.raises(CheckError, match="too much") as caught:
        testing.assert_fits(loss, struct(512, 512), x, target="tpu-v5e@1GiB")
    assert "refused by tpu-v5e@1GiB: arguments 2 GiB" in str(caught.value)
    assert "(no module): 2 × cos float32[1048576, 512]" in str(caught.value)
    assert "jax.named_scope" in caught.value.hint
    with pytest.raises(CheckError, match="the peak allowed has 1 GiB"):
        testing.assert_peak_at_most(loss, struct(512, 512), x, target="tpu-v5e@1GiB", peak="1GiB")


@pytest.mark.parametrize("size", ["14 gigs", -1, None])
def test_a_size_that_is_none(size):
    with pytest.raises(UserError, match="is not a size") as caught:
        testing.assert_peak_at_most(tower, WEIGHTS, X, target="cpu", peak=size)
    assert not isinstance(caught.value, AssertionError)
    assert "14GiB" in caught.value.hint


def test_a_fault_of_the_call_is_no_failed_check():
    with pytest.raises(NotDifferentiableError, match="`assert_fits`"):
        testing.assert_fits(lambda x: x, X, target="cpu")


# -- is it the same ---------------------------------------------------------------------------


class Net(nn.Module):
    """Layers with dropout, unrolled or scanned."""

    scan: bool = False

    @nn.compact
    def __call__(self, x):
        if self.scan:
            scanned = nn.scan(
                Layer,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=3,
            )
            return scanned(name="layers")(x, None)[0]
        for i in range(3):
            x, _ = Layer(name=f"layer_{i}")(x, None)
        return x


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(32)(nn.LayerNorm()(x))
        y = nn.Dropout(0.3, deterministic=False)(nn.gelu(y))
        return x + nn.Dense(x.shape[-1])(y), None


def net_loss(scan=False):
    model = Net(scan)

    def loss(params, x, key):
        return jnp.mean(model.apply({"params": params}, x, rngs={"dropout": key}) ** 2)

    x, key = struct(8, 16), jax.eval_shape(jax.random.key, 0)
    params = jax.eval_shape(model.init, {"params": key, "dropout": key}, x)["params"]
    return loss, (params, x, key)


@pytest.mark.parametrize("scan", [False, True])
def test_recomputed_dropout_is_the_same(scan):
    loss, args = net_loss(scan)
    at = "*/layers" if scan else "*/layer_*"
    for policy in ("nothing", "dots"):
        testing.assert_equivalent(loss, remat_kit.policy(policy, at=at)(loss), *args)


def test_operation_by_operation_the_bits_are_the_same():
    loss, args = net_loss()
    kept = remat_kit.policy("nothing", at="*/layer_*")(loss)
    testing.assert_equivalent(loss, kept, *args, exact=True, jit=False)


def test_another_dropout_mask_is_found():
    loss, args = net_loss()

    def other(params, x, key):
        return loss(params, x, jax.random.fold_in(key, 1))

    with pytest.raises(CheckError, match="different results even if nothing is fused"):
        testing.assert_equivalent(loss, other, *args)


def pair_loss(w, x):
    out = x @ w["in"]["kernel"] + w["bias"]
    return jnp.sum(jnp.tanh(out)), {"out": out, "steps": jnp.int32(3)}


PAIR = {"in": {"kernel": struct(8, 4)}, "bias": struct(1, 4)}


def with_gradient(path, index, amount):
    """`pair_loss` with one element of one gradient changed."""

    @jax.custom_vjp
    def off(w):
        return w

    def forward(w):
        return w, None

    def backward(_, g):
        keys = path.split("/")
        leaf = g[keys[0]] if len(keys) == 1 else g[keys[0]][keys[1]]
        leaf = leaf.at[index].add(amount * jnp.max(jnp.abs(leaf)))
        new = leaf if len(keys) == 1 else {keys[1]: leaf}
        return ({**g, keys[0]: new},)

    off.defvjp(forward, backward)
    return lambda w, x: pair_loss(off(w), x)


def test_the_worst_leaf_is_named_with_its_index_and_values():
    worse = with_gradient("in/kernel", (5, 2), 1e-3)
    with pytest.raises(CheckError) as caught:
        testing.assert_equivalent(pair_loss, worse, PAIR, struct(3, 8))
    first, second = str(caught.value).splitlines()[:2]
    pattern = (
        r"gradient\['in'\]\['kernel'\] differs by ([\d.e+]+) units of rounding at \[5, 2\]: "
        r"(\S+) in f, (\S+) in g$"
    )
    units, f, g = map(float, re.search(pattern, first).groups())
    assert units == pytest.approx(1e-3 / np.finfo(np.float32).eps, rel=0.01)
    assert g > f
    assert second == "in 1 of its 32 elements; 1 of 5 results differ"


@pytest.mark.parametrize(("amount", "passes"), [(3, True), (6, False)])
def test_the_tolerance_is_in_units_of_the_largest_element(amount, passes):
    eps = float(np.finfo(np.float32).eps)
    near = with_gradient("in/kernel", (0, 0), amount * eps)
    args = (PAIR, struct(3, 8))
    if passes:
        testing.assert_equivalent(pair_loss, near, *args)
    else:
        with pytest.raises(CheckError, match=r"size of rounding.*allow ulps=7"):
            testing.assert_equivalent(pair_loss, near, *args)
    testing.assert_equivalent(pair_loss, near, *args, ulps=8)
    for strict in ({"ulps": 0}, {"exact": True}):
        with pytest.raises(CheckError):
            testing.assert_equivalent(pair_loss, near, *args, **strict)


def test_what_is_zero_but_for_rounding_may_differ():
    def noisy(noise):
        def loss(w):
            return jnp.sum(w["large"] ** 2) + noise * jnp.sum(w["none"])

        return loss

    w = {"large": jnp.ones(4), "none": jnp.ones(2)}
    testing.assert_equivalent(noisy(1e-9), noisy(-1e-9), w)
    with pytest.raises(CheckError, match=r"gradient\['none'\]"):
        testing.assert_equivalent(noisy(1e-6), noisy(-1e-6), w)


def test_parameters_in_float32_of_a_model_in_bfloat16():
    def loss(w, x):
        for _ in range(3):
            x = jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
        return jnp.sum(x.astype(jnp.float32) ** 2)

    def near(w, x):
        return loss(w, x) * (1 + 2.0**-7)

    args = struct(16, 16), struct(8, 16)
    testing.assert_equivalent(loss, remat_kit.policy("nothing")(loss), *args)
    testing.assert_equivalent(loss, near, *args)
    with pytest.raises(CheckError):
        testing.assert_equivalent(loss, near, *args, exact=True)
    with pytest.raises(CheckError):
        testing.assert_equivalent(loss, lambda w, x: loss(w, x) * 1.1, *args)


def test_auxiliary_results_are_compared():
    def other(w, x):
        loss, aux = pair_loss(w, x)
        return loss, aux | {"steps": aux["steps"] + 1}

    with pytest.raises(CheckError, match=r"aux\['steps'\] differs: 3 in f, 4 in g"):
        testing.assert_equivalent(pair_loss, other, PAIR, struct(3, 8))
    with pytest.raises(CheckError, match=r"aux\['out'\] is float32\[3, 4\] in f and nothing in g"):
        testing.assert_equivalent(
            pair_loss, lambda w, x: (pair_loss(w, x)[0], {}), PAIR, struct(3, 8)
        )
    with pytest.raises(CheckError, match=r"aux\['out'\] is .* and nothing in g"):
        testing.assert_equivalent(pair_loss, lambda w, x: pair_loss(w, x)[0], PAIR, struct(3, 8))


def test_nan_equals_nan_and_nothing_else():
    def loss(fill):
        return lambda w: (jnp.sum(w), jnp.array([1.0, fill, jnp.inf]))

    w = jnp.ones(3)
    testing.assert_equivalent(loss(jnp.nan), loss(jnp.nan), w)
    testing.assert_equivalent(loss(jnp.nan), loss(jnp.nan), w, exact=True)
    with pytest.raises(CheckError, match=r"aux differs at \[1\]: nan in f, 2.0 in g"):
        testing.assert_equivalent(loss(jnp.nan), loss(2.0), w)
    with pytest.raises(CheckError, match=r"aux differs at \[1\]: inf in f, -inf in g"):
        testing.assert_equivalent(loss(jnp.inf), loss(-jnp.inf), w)


def test_a_zero_has_a_sign_only_in_its_bits():
    def loss(zero):
        return lambda w: (jnp.sum(w), jnp.float32(zero))

    testing.assert_equivalent(loss(0.0), loss(-0.0), jnp.ones(3))
    with pytest.raises(CheckError, match=r"aux differs: 0.0 in f, -0.0 in g"):
        testing.assert_equivalent(loss(0.0), loss(-0.0), jnp.ones(3), exact=True)


def test_keys_and_integers_among_the_results():
    def loss(seed):
        return lambda w: (jnp.sum(w), {"key": jax.random.key(seed), "flag": jnp.array([True])})

    testing.assert_equivalent(loss(1), loss(1), jnp.ones(2))
    with pytest.raises(CheckError, match=r"aux\['key'\] differs at \[1\]"):
        testing.assert_equivalent(loss(1), loss(2), jnp.ones(2))


def test_shapes_become_seeded_values():
    shapes = (
        {"w": struct(64, 8), "h": struct(4, dtype=jnp.bfloat16)},
        struct(5, dtype=jnp.int32),
        jax.eval_shape(jax.random.key, 0),
        struct(3, dtype=jnp.bool_),
    )
    first, second = _equivalence.seeded(shapes, 0), _equivalence.seeded(shapes, 0)
    assert jax.tree.map(jax.typeof, first) == jax.tree.map(jax.typeof, second)
    assert bool(jnp.all(first[0]["w"] == second[0]["w"]))
    assert not bool(jnp.all(first[0]["w"] == _equivalence.seeded(shapes, 1)[0]["w"]))
    assert 0.05 < float(jnp.std(first[0]["w"])) < 0.2
    assert set(np.asarray(first[1]).tolist()) <= {0, 1}
    given = (jnp.ones(3), 2.0)
    assert _equivalence.seeded(given, 0) is given


def test_values_that_compare_nothing_are_refused():
    with pytest.raises(UserError, match="nothing to compare"):
        testing.assert_equivalent(lambda w: jnp.sum(0 * w), lambda w: jnp.sum(0 * w), struct(3))
    with pytest.raises(UserError, match="0 or more"):
        testing.assert_equivalent(tower, tower, WEIGHTS, X, ulps=-1)
    with pytest.raises(NotDifferentiableError, match="`assert_equivalent`"):
        testing.assert_equivalent(jnp.sin, jnp.sin, struct(3))


def test_several_arguments_are_differentiated():
    def loss(a, b):
        return jnp.sum(a * b)

    def other(a, b):
        return jnp.sum(a * jax.lax.stop_gradient(b))

    args = struct(3), struct(3)
    testing.assert_equivalent(loss, other, *args)
    with pytest.raises(CheckError, match=r"gradient\[1\] differs"):
        testing.assert_equivalent(loss, other, *args, argnums=(0, 1))


# -- has it grown -----------------------------------------------------------------------------


def snapshot(**changed):
    sizes = {"argument_bytes": 64, "output_bytes": 8, "alias_bytes": 0, "host_bytes": 0}
    plain = {
        "target": "cpu",
        "temp_bytes": 1024,
        "peak_bytes": 1096,
        "saved_bytes": 1024,
        "saved": {"Net/block_0": 512, "Net/block_1": 512},
        "versions": {"jax": "0.12.0"},
    }
    return _baseline.Snapshot(**{**sizes, **plain, **changed})


def test_changes_name_the_modules_that_changed():
    saved = {"Net/block_0": 512, "Net/block_1": 2048, "": 64}
    text = _baseline.changes(snapshot(), snapshot(saved=saved, saved_bytes=2624))
    assert re.search(r"^Net/block_1 +512 B +2 KiB +\+1.5 KiB$", text, re.M)
    assert re.search(r"^\(no module\) +0 B +64 B +\+64 B$", text, re.M)
    assert "block_0" not in text


def test_changes_fold_the_copies_of_a_block():
    text = _baseline.changes(snapshot(), snapshot(saved={"Net/block_0": 1, "Net/block_1": 1}))
    assert re.search(r"^Net/block_\* ×2 +2 × 512 B +2 × 1 B +-1022 B$", text, re.M)


def test_changes_say_that_the_compiler_is_another():
    text = _baseline.changes(snapshot(), snapshot(temp_bytes=2048, versions={"jax": "0.13.0"}))
    assert "the compiler itself may be what changed: jax 0.12.0 → 0.13.0" in text
    assert "keeps for the backward pass is the same as before" in text


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "folder" / "test.json"
    assert _baseline.read(path) is None
    checks = {"dots": snapshot(), "none": snapshot(temp_bytes=None, saved_bytes=None, saved={})}
    _baseline.write(path, "test", checks)
    assert _baseline.read(path) == checks
    assert [p.name for p in path.parent.iterdir()] == ["test.json"]
    assert path.read_text().endswith("}\n")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("baseline 1", "baseline 2"),
        lambda text: text.replace('"peak_bytes": 1096', '"peak_bytes": "1096"'),
        lambda text: text.replace('"peak_bytes"', '"peek_bytes"'),
        lambda text: text.replace('"checks"', '"chequers"'),
        lambda text: "[]",
        lambda text: "",
    ],
)
def test_a_damaged_file_is_no_baseline(tmp_path, damage):
    path = tmp_path / "test.json"
    _baseline.write(path, "test", {"cpu": snapshot()})
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    with pytest.raises(ValueError, match=r".+"):
        _baseline.read(path)
    baseline = testing.MemoryBaseline(path)
    with pytest.raises(CheckError, match="cannot be read") as caught:
        baseline.check(tower, WEIGHTS, X)
    assert "--update-memory-baselines" in caught.value.hint


def test_several_checks_of_one_test(tmp_path):
    said = []
    path = tmp_path / "test.json"
    writer = testing.MemoryBaseline(path, update=True, say=said.append)
    writer.check(tower, WEIGHTS, X)
    writer.check(tower, WEIGHTS, X, label="nothing", policy="nothing", at="layer_*")
    assert len(said) == 2
    with pytest.raises(UserError, match="another check of that label"):
        writer.check(tower, WEIGHTS, X)
    reader = testing.MemoryBaseline(path, say=said.append)
    reader.check(tower, WEIGHTS, X)
    with pytest.raises(CheckError, match="the peak grew"):
        reader.check(tower, WEIGHTS, X, label="nothing")
    with pytest.raises(CheckError, match="no entry 'dots' in the file"):
        reader.check(tower, WEIGHTS, X, label="dots", policy="dots", at="layer_*")
    with pytest.raises(UserError, match="tolerance"):
        reader.check(tower, WEIGHTS, X, label="x", tolerance=-1)
    assert len(said) == 2


def test_a_baseline_of_another_chip(tmp_path):
    path = tmp_path / "test.json"
    testing.MemoryBaseline(path, update=True, say=str).check(tower, WEIGHTS, X, label="a")
    with pytest.raises(CheckError, match="is of cpu"):
        testing.MemoryBaseline(path).check(tower, WEIGHTS, X, label="a", target="cpu@1TiB")


def test_a_whole_step_has_a_baseline_too(tmp_path):
    path = tmp_path / "test.json"
    step = jax.grad(tower)
    for update in (True, False):
        baseline = testing.MemoryBaseline(path, update=update, say=str)
        baseline.check(step, WEIGHTS, X, argnums=None)
    (entry,) = _baseline.read(path).values()
    assert entry.saved_bytes is None
    assert set(entry.versions) >= {"jax", "jaxlib"}


def test_growth_within_the_tolerance_passes(tmp_path):
    path = tmp_path / "test.json"
    testing.MemoryBaseline(path, update=True, say=str).check(tower, WEIGHTS, X)
    more = struct(1024 + 16, 64)
    testing.MemoryBaseline(path).check(tower, WEIGHTS, more)
    with pytest.raises(CheckError, match="the peak grew"):
        testing.MemoryBaseline(path).check(tower, WEIGHTS, more, tolerance=0.01)


# -- the plugin -------------------------------------------------------------------------------

TEST_FILE = """
    import jax, jax.numpy as jnp, pytest, remat_kit

    def loss(weights, x):
        for i, w in enumerate(weights):
            with jax.named_scope(f"layer_{{i}}"):
                x = {body}
        return jnp.mean(x**2)

    weights, x = [jnp.ones((16, 64))] * 3, jnp.ones((1024, 16))

    @pytest.mark.parametrize("which", ["a", "b/c"])
    def test_memory(memory_baseline, which):
        memory_baseline.check(loss, weights, x)
"""
LESS, MORE = "x + jnp.tanh(x @ w) @ w.T", "x + jnp.sin(jnp.tanh(x @ w)) @ w.T"
UPDATE = "--update-memory-baselines"


class Project:
    """A project with one test file, whose tests run in a process of their own."""

    def __init__(self, pytester):
        self.pytester = pytester
        self.folder = pytester.path / "tests"
        self.folder.mkdir()
        installed = {e.name for e in importlib.metadata.entry_points(group="pytest11")}
        self.plugin = () if "remat_kit" in installed else ("-p", "remat_kit.testing.plugin")

    def write(self, body):
        text = textwrap.dedent(TEST_FILE.format(body=body))
        (self.folder / "test_step.py").write_text(text)

    def run(self, *args):
        return self.pytester.runpytest_subprocess(*self.plugin, "-p", "no:cacheprovider", *args)

    def files(self):
        found = (self.folder / "memory_baselines").rglob("*")
        return sorted(p.relative_to(self.folder).as_posix() for p in found if p.is_file())


@pytest.fixture
def project(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Project(pytester)


@pytest.mark.slow
def test_the_life_of_a_baseline(project):
    project.write(LESS)
    result = project.run()
    result.assert_outcomes(failed=2)
    text = result.stdout.str()
    assert "there is no baseline yet" in text
    (command, *_) = re.findall(r"pytest (--update.*test_memory\[a\]\S*)", text)
    assert not project.files()

    project.run(*[part.strip("'") for part in command.split()]).assert_outcomes(passed=1)
    assert project.files() == ["memory_baselines/test_step/test_memory[a].json"]
    result = project.run(UPDATE)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*memory baselines*", "*b/c*: cpu: baseline written, peak *"])
    assert len(project.files()) == 2
    assert re.fullmatch(r".*/test_memory\[b_c\]-[0-9a-f]{8}\.json", project.files()[1])
    result = project.run()
    result.assert_outcomes(passed=2)
    assert "memory baselines" not in result.stdout.str()

    project.write(MORE)
    result = project.run()
    result.assert_outcomes(failed=2)
    text = result.stdout.str()
    assert re.search(r"the peak grew from .* to .* \(", text)
    assert re.search(r"layer_\* ×2( +2 × \S+ [KM]iB){2} +\+\S+ [KM]iB", text)
    assert "hint: if this is meant" in text

    project.run(UPDATE).assert_outcomes(passed=2)
    project.write(LESS)
    result = project.run()
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*test_memory?a?: cpu: the peak shrank from *; keep it: pytest *"])


def test_another_version_and_a_damaged_file(project):
    project.write(LESS)
    project.run(UPDATE).assert_outcomes(passed=2)
    first, second = (project.folder / name for name in project.files())
    plain = json.loads(first.read_text())
    (entry,) = plain["checks"].values()
    entry["versions"]["jax"] = "0.0.1"
    entry["peak_bytes"] //= 2
    first.write_text(json.dumps(plain))
    second.write_text(second.read_text()[:-20])
    result = project.run()
    result.assert_outcomes(failed=2)
    text = result.stdout.str()
    assert f"the compiler itself may be what changed: jax 0.0.1 → {jax.__version__}" in text
    assert "cannot be read" in text
    project.run(UPDATE).assert_outcomes(passed=2)
    project.run().assert_outcomes(passed=2)


@pytest.mark.slow
def test_workers_of_xdist_write_and_report(project):
    project.write(LESS)
    result = project.run(UPDATE, "-n", "2")
    result.assert_outcomes(passed=2)
    assert len(re.findall("baseline written", result.stdout.str())) == 2
    assert len(project.files()) == 2
    assert all("writing" not in name for name in project.files())
    project.run("-n", "2").assert_outcomes(passed=2)


def test_the_plugin_brings_no_jax():
    code = "import remat_kit.testing.plugin, sys; print({'jax', 'numpy'} & set(sys.modules))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
