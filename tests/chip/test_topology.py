"""Targets of several devices: their names, sizes and links."""

import pytest

from remat_kit import UserError, target
from remat_kit._chip import catalogue as _catalogue
from remat_kit._chip.target import for_devices
from remat_kit._chip.topology import topology, usual_topology

SIZES = {
    "tpu-v5e:4x4": (16, 1),
    "tpu-v5p:4x4x4": (64, 1),
    "tpu-v6e:2x4": (8, 1),
    "tpu-7x:2x2x1": (8, 1),  # a chip is two devices
    "tpu-v3:2x2": (8, 1),
    "h100:8": (8, 1),
    "h100:4x8": (32, 4),
    "a100-80g:2x8": (16, 2),
    "cpu:8": (8, 1),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_topology_has_devices_and_hosts(name):
    chip = target(name)
    assert (chip.devices, chip.hosts) == SIZES[name]
    assert chip.name == name
    kind, _, text = name.partition(":")
    assert topology(kind, text, "target").devices == chip.devices
    if kind != "cpu":
        one = target(kind)
        assert (chip.memory_bytes, chip.flops_per_second) == (
            one.memory_bytes,
            one.flops_per_second,
        )


def test_cpu_devices_share_the_machine():
    one, eight = target("cpu"), target("cpu:8")
    assert eight.memory_bytes == one.memory_bytes // 8
    assert eight.flops_per_second["float32"] == one.flops_per_second["float32"] / 8


def test_a_smaller_memory_is_of_each_device():
    chip = target("h100:8@40GiB")
    assert (chip.devices, chip.memory_bytes) == (8, 40 * 2**30)


WRONG = ["tpu-v5e:4", "tpu-v5e:4x4x4", "tpu-v5p:4x4", "h100:2x2x2", "h100:", "h100:0", "h100:x8"]


@pytest.mark.parametrize("name", [*WRONG, "cpu:2x2", "cpu:9999", "h100:99999x99999", "local:2"])
def test_other_shapes_are_refused(name):
    with pytest.raises(UserError) as caught:
        target(name)
    assert name in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("kind", [*_catalogue.GPUS, *_catalogue.TPUS, "cpu"])
def test_every_kind_has_links_and_a_usual_topology(kind):
    chip = target(kind)
    assert chip.devices == 1
    assert all(rate > 0 for rate in chip.links.values())
    assert chip.links
    text = usual_topology(kind, 8)
    assert text is not None
    assert target(f"{kind}:{text}").devices == 8


def test_a_kind_takes_the_size_of_the_mesh():
    assert for_devices(target("h100"), 1, "measure").name == "h100"
    assert for_devices(target("h100"), 64, "measure").name == "h100:8x8"
    assert for_devices(target("gb200"), 72, "measure").name == "gb200:72"
    assert for_devices(target("tpu-v5p@8GiB"), 64, "measure").name == "tpu-v5p:4x4x4@8GiB"
    assert for_devices(target("cpu"), 6, "measure").name == "cpu:6"


@pytest.mark.parametrize(
    ("name", "devices", "said"),
    [
        ("h100:8", 4, "a mesh of 4 devices, and the target has 8"),
        ("h100:8", 1, "for one device, and the target has 8"),
        ("tpu-v5e", 6, "a mesh of 6 devices"),
        ("h100", 12, "a mesh of 12 devices"),
        ("local", 64, "a mesh of 64 devices, and this process has"),
    ],
)
def test_sizes_that_do_not_fit_are_named(name, devices, said):
    with pytest.raises(UserError, match=said) as caught:
        for_devices(target(name), devices, "measure")
    assert "measure" in str(caught.value)
    assert caught.value.hint


def test_sources_say_what_is_assumed():
    assert "network between hosts is assumed" in target("rtx4090").source
    assert "memory of the host is assumed" in target("b300").source
    assert "link to the host is assumed; the memory of the host" in target("tpu-v2").source
    assert target("tpu-v5e").source.count("assumed") == 1
    assert "assumed" not in target("h100:8").source
    for name in _catalogue.ASSUMED_HOSTS:
        assert target(name).host_memory_bytes
