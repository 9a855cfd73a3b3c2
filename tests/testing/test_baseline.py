"""Baselines of memory: files, and what has grown."""

import re

import jax
import jax.numpy as jnp
import pytest
from shapes import struct

import remat_kit
from remat_kit import testing
from remat_kit._errors import CheckError, UserError
from remat_kit.testing import baseline as _baseline


def tower(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = x + jnp.sin(jnp.tanh(x @ w)) @ w.T
    return jnp.mean(x**2)


WEIGHTS, X = [struct(64, 256)] * 6, struct(1024, 64)


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
    found = remat_kit.inspect(tower, WEIGHTS, X).saved_bytes
    assert entry.saved_bytes == found > 0  # of the loss that the step differentiates
    assert set(entry.versions) >= {"jax", "jaxlib"}


def test_growth_within_the_tolerance_passes(tmp_path):
    path = tmp_path / "test.json"
    testing.MemoryBaseline(path, update=True, say=str).check(tower, WEIGHTS, X)
    more = struct(1024 + 16, 64)
    testing.MemoryBaseline(path).check(tower, WEIGHTS, more)
    with pytest.raises(CheckError, match="the peak grew"):
        testing.MemoryBaseline(path).check(tower, WEIGHTS, more, tolerance=0.01)
