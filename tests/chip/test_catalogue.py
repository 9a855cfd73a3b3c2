"""The catalogue of chips, beside what the CUDA plugin says of them."""

import pytest

from remat_kit._chip import catalogue as _catalogue
from remat_kit._chip.target import target


def needs(name):
    if not target(name).available:
        pytest.skip(f"the compiler for {name} is not installed")
    return name


def test_figures_of_the_table_agree_with_the_plugin():
    needs("h100")
    embedded = _catalogue.embedded_specs()
    assert {"p100", "v100", "a100-40g", "h100", "h200", "b200", "gb300"} <= set(embedded)
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
