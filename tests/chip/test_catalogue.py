"""The catalogue of chips, beside what the CUDA plugin says of them."""

import re

import pytest

from remat_kit._chip import catalogue as _catalogue
from remat_kit._chip.target import target


def needs(name):
    if not target(name).available:
        pytest.skip(f"the compiler for {name} is not installed")
    return name


def _embedded():
    found = _catalogue.embedded_specs()
    if not found:
        pytest.skip("there is no CUDA plugin, or it describes no GPU, as before jax 0.12")
    assert {"p100", "v100", "a100-40g", "h100", "h200", "b200", "gb300"} <= set(found)
    return found


def test_figures_of_the_table_agree_with_the_plugin():
    embedded = _embedded()
    for name in set(embedded) & set(_catalogue.GPUS):
        gpu, text = _catalogue.GPUS[name], embedded[name]
        assert gpu.memory_bytes == _catalogue.number_field(text, "device_memory_size"), name
        bandwidth = _catalogue.number_field(text, "memory_bandwidth")
        assert gpu.bandwidth == pytest.approx(bandwidth, rel=0.06), name
        if name == "a100-80g-pcie":
            continue  # the plugin gives its base clock
        implied = _catalogue.teraflops_of(text)
        assert gpu.teraflops["float32"] == pytest.approx(implied["float32"], rel=0.2), name
        if "bfloat16" in implied:
            assert gpu.teraflops["bfloat16"] == pytest.approx(implied["bfloat16"], rel=0.1), name


def test_every_gpu_can_be_described_without_the_plugin():
    assert set(_catalogue.SILICON) == set(_catalogue.GPUS)
    for name, gpu in _catalogue.GPUS.items():
        text = _catalogue.SILICON[name].text(gpu)
        assert _catalogue.text_field(text, "device_description_str") == gpu.description
        assert _catalogue.number_field(text, "device_memory_size") == gpu.memory_bytes


def test_descriptions_agree_with_those_of_the_plugin():
    embedded = _embedded()
    fields = (
        *("shared_memory_per_core", "threads_per_core_limit", "core_count", "fpus_per_core"),
        *("l2_cache_size", "clock_rate_ghz", "shared_memory_per_block_optin", "device_memory_size"),
        *("registers_per_core_limit", "registers_per_block_limit", "major"),
    )
    for name in set(embedded) & set(_catalogue.SILICON):
        ours, theirs = _catalogue.SILICON[name].text(_catalogue.GPUS[name]), embedded[name]
        for field in fields:
            numbers = [_catalogue.number_field(text, field) for text in (ours, theirs)]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-6), (name, field)
        features = [
            re.findall(r"feature_extension: (\w+)", text) or ["NONE"] for text in (ours, theirs)
        ]
        assert features[0] == features[1], name


def test_a_plugin_without_descriptions_compiles(monkeypatch):
    import jax
    import jax.numpy as jnp

    from remat_kit._chip import target as _target
    from remat_kit._chip.compile import measure

    needs("h100")
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)

    def loss(x):
        return jnp.sum(jnp.tanh(x @ x))

    known = measure(loss, x, target="h100")
    monkeypatch.setattr(_target, "embedded_specs", dict)
    own = _target._build("h100")
    assert own.source == "the vendor's data sheet"
    assert measure(loss, x, target=own).peak_bytes == known.peak_bytes
