import dataclasses

import jax.numpy as jnp
import pytest
from shapes import struct

from remat_kit._chip import catalogue as _catalogue
from remat_kit._chip import target as _target
from remat_kit._chip.compile import measure
from remat_kit._chip.target import target, targets
from remat_kit._errors import (
    MissingPluginError,
    TargetError,
    UnknownNameError,
    UserError,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_KIT_CACHE", str(tmp_path / "cache"))


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w))


ARGS = (struct(64, 64), struct(256, 64))


# -- names ----------------------------------------------------------------------------------
NAMED_IN_THE_CONTRACT = (
    frozenset(
        ("cpu", "local", "tpu-v2", "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-7x")
    )
    | frozenset(
        ("p100", "v100", "a100-40g", "a100-80g", "a6000", "h100", "h100-pcie", "h200", "b200")
    )
    | frozenset(("b300", "gb200", "gb300", "v100-32g", "t4", "l4", "a10g", "rtx4090"))
)


def test_every_promised_name_is_listed_with_figures():
    listed = {t.name: t for t in targets()}
    assert set(listed) >= NAMED_IN_THE_CONTRACT
    for chip in listed.values():
        assert chip.memory_bytes > 2**30, chip.name
        assert chip.bandwidth_bytes_per_second > 1e10, chip.name
        assert chip.host_bandwidth_bytes_per_second > 1e9, chip.name
        assert chip.flops_per_second["float32"] > 1e9, chip.name
        assert chip.available == (chip.needs is None)
        assert hash(chip) == hash(dataclasses.replace(chip))


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("h10", UnknownNameError, "did you mean 'h100'"),
        ("tpu-v5", UnknownNameError, "'tpu-v5e'"),
        ("mi300x", TargetError, "AMD and Intel"),
        ("h100@", UserError, "not a size"),
        ("h100@lots", UserError, "not a size"),
        ("h100@0", UserError, "needs memory"),
        ("tpu-v5e@32GiB", UserError, "15.8 GiB"),
        ("", UnknownNameError, "there are:"),
    ],
)
def test_names_that_cannot_be(name, kind, message):
    with pytest.raises(kind, match=message) as caught:
        target(name)
    assert caught.value.hint
    assert f"`target({name!r})`" in str(caught.value)


def test_smaller_chip():
    assert target("h100@40GiB").memory_bytes == 40 * 2**30
    assert target("cpu@1TiB").memory_bytes == 2**40
    assert ("xla_tpu_max_hbm_size_mib", "8192") in target("tpu-v5e@8GiB").compiler_options
    if target("h100").available:
        assert f"device_memory_size: {40 * 2**30}" in target("h100@40GiB").spec
    assert target(target("t4")) == target("t4")


def test_missing_plugins_name_the_extra_and_stay_listed(monkeypatch):
    for module in (_catalogue, _target):
        monkeypatch.setattr(module, "cuda_plugin", lambda: None)
    find = _target.importlib.util.find_spec
    monkeypatch.setattr(
        _target.importlib.util, "find_spec", lambda n: None if n == "libtpu" else find(n)
    )
    for name, extra in [("h100", "cuda"), ("t4", "cuda"), ("tpu-v5e@8GiB", "tpu")]:
        with pytest.raises(MissingPluginError, match=rf"remat-kit\[{extra}\]"):
            measure(loss, *ARGS, target=name)
    listed = {t.name: t for t in targets()}
    assert set(listed) >= NAMED_IN_THE_CONTRACT
    assert listed["h100"].needs == "pip install 'remat-kit[cuda]'"
    assert listed["tpu-v4"].needs == "pip install 'remat-kit[tpu]'"
    assert listed["cpu"].available
