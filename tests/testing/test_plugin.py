"""The pytest plugin, in test runs of its own."""

import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
pytest_plugins = ["pytester"]
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


@pytest.mark.slow
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
