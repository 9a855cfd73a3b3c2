"""Find a chip by name: ``"h100"``, ``"tpu-v5e"``, ``"cpu@4GiB"``, or ``"local"``.

A name may also give a topology of several chips: ``"h100:8"``, ``"tpu-v5p:4x4x4"``.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from remat_kit import _jax
from remat_kit._chip.catalogue import (
    GIB,
    GPUS,
    MIB,
    REFUSED,
    SILICON,
    TERA,
    TPUS,
    Gpu,
    cuda_plugin,
    embedded_specs,
    number_field,
    teraflops_of,
    text_field,
)
from remat_kit._chip.topology import assumed_of, host_memory_of, links_of, topology, usual_topology
from remat_kit._errors import PolicyError, TargetError, UserError, unknown
from remat_kit._units import format_bytes, parse_bytes


@dataclass(frozen=True)
class Target:
    """A chip, or several, that programs can be compiled for; `target` and `targets` return it.

    >>> chip = target("tpu-v5e")
    >>> chip.platform, chip.memory_bytes / 2**30, chip.flops_per_second["bfloat16"] / 1e12
    ('tpu', 15.75, 197.0)

    All figures are those of one device.

    >>> chips = target("h100:4x8")
    >>> chips.devices, chips.hosts, chips.links["nvlink"] / 1e9
    (32, 4, 450.0)

    Attributes:
        name: as `target` takes it.
        platform: ``cpu``, ``tpu`` or ``cuda``.
        memory_bytes: the memory of one device that a program may use.
        bandwidth_bytes_per_second: bandwidth between the chip and its memory.
        flops_per_second: peak rate of one device by dtype, for dense matrices. On a GPU,
            ``float32`` is the rate of the vector units, and ``tensorfloat32`` that of the matrix
            units. On a TPU, ``float32`` is the rate of JAX's default matrix product, which rounds
            to bfloat16.
        host_bandwidth_bytes_per_second: nominal bandwidth to or from the host's memory.
        description: the vendor's name for it.
        source: where the figures come from: the vendor's data sheets, or the CUDA plugin.
        available: whether its compiler is installed here.
        needs: what to install if it is not, or None.
        notes: what the reader must know about figures for this chip.
        devices: how many devices run a program together; 1 without a topology.
        hosts: between how many groups of them the slower network runs.
        links: the bytes/s that a device sends over a link, in one direction, by the name of the
            link: ``nvlink``, ``pcie``, ``network`` (between hosts), or ``ici`` (along one axis of a
            slice of TPUs).
        host_memory_bytes: the memory of the host by its devices, or None if there is no usual host.
    """

    name: str
    platform: str
    memory_bytes: int
    bandwidth_bytes_per_second: float
    flops_per_second: Mapping[str, float] = field(hash=False)
    host_bandwidth_bytes_per_second: float
    description: str
    source: str
    available: bool = field(default=True, compare=False)
    needs: str | None = field(default=None, compare=False)
    notes: tuple[str, ...] = field(default=(), repr=False)
    devices: int = 1
    hosts: int = 1
    links: Mapping[str, float] = field(default_factory=dict, hash=False, repr=False)
    host_memory_bytes: int | None = field(default=None, repr=False)
    topology: str = field(default="", repr=False)
    spec: str = field(default="", repr=False)
    compiler_options: tuple[tuple[str, str], ...] = field(default=(), repr=False)


# -- names ----------------------------------------------------------------------------------


def targets() -> list[Target]:
    """Return every chip that can be named, and whether its compiler is installed here.

    >>> [t.name for t in targets() if t.platform == "tpu"][:3]
    ['tpu-v2', 'tpu-v3', 'tpu-v4']

    The chips are those for which `jax.experimental.topologies.get_topology_desc` can describe a
    compile-only device, the CPU, and ``local``, the device of this process.
    """
    return [_build(name) for name in ("cpu", *TPUS, *_cuda_names())] + [_local()]


def target(name: str | Target) -> Target:
    """Return the chip with this name.

    >>> target("tpu-v5e").memory_bytes / 2**30
    15.75
    >>> target("tpu-v5e@8GiB").memory_bytes / 2**30
    8.0
    >>> target("h10")
    Traceback (most recent call last):
    remat_kit._errors.UnknownNameError: `target('h10')`: no target is named 'h10'
    hint: did you mean 'h100' or 'v100' or 'p100'?

    Args:
        name: one of `targets`. With ``@SIZE`` the chip has less memory: ``h100@40GiB``. The
            compilers for TPU and CUDA are told of the smaller memory; for ``cpu`` it only decides
            what fits. ``local`` is the device of this process. A topology after a colon makes a
            target of several devices: ``tpu-v5e:4x4`` is a slice of 16 chips, ``h100:8`` a host of
            eight GPUs, ``h100:4x8`` four such hosts, ``cpu:8`` eight CPU devices of one process.
            A program that is partitioned over a mesh needs as many devices; a name without a
            topology then gets the usual topology of the mesh's size.

    Raises:
        UnknownNameError: there is no such chip.
        TargetError: XLA cannot compile for this vendor's chips unless one is in the machine.
        UserError: the size is not a size, or is larger than the chip's memory, or the topology is
            none of this kind.
    """
    if isinstance(name, Target):
        return name
    if not isinstance(name, str):
        raise UserError(
            f"`target({name!r})`: a chip has a name, and this is {type(name).__name__}",
            hint="give one name, for example 'h100'; `measure` and `inspect` take a list of them, "
            "`fit` takes targets=[...]",
        )
    full, at, size = name.partition("@")
    base, colon, text = full.partition(":")
    call = f"target({name!r})"
    known = ["cpu", "local", *TPUS, *_cuda_names()]
    if base not in known:
        if REFUSED.fullmatch(base):
            raise TargetError(
                f"`{call}`: XLA cannot compile for AMD and Intel chips that are not in this "
                "machine; its compiler ends the process that tries",
                hint="measure on the chip itself with target 'local'",
            )
        if base.lower() in ("gpu", "cuda", "nvidia"):
            known = _cuda_names()  # `cpu` would be near, and is not meant
        raise unknown("target", base, known, call=call)
    chip = _local() if base == "local" else _build(base)
    chip = _with_topology(chip, text, call) if colon else chip
    return _shrunk(chip, size, call) if at else chip


def _with_topology(chip: Target, text: str, call: str) -> Target:
    if chip.name == "local":
        raise UserError(
            f"`{call}`: the topology of 'local' is that of this process",
            hint="leave it out; the mesh of the program says how many of the devices it uses",
        )
    shape = topology(chip.name, text, call)
    several = dataclasses.replace(
        chip, name=f"{chip.name}:{text}", devices=shape.devices, hosts=shape.hosts
    )
    if chip.platform == "tpu":
        return dataclasses.replace(several, topology=f"{TPUS[chip.name].kind}:{text}")
    return _sharing(several, shape.devices) if chip.platform == "cpu" else several


def _sharing(chip: Target, devices: int) -> Target:
    """Return CPU devices of one machine, which share its memory, its cores and its bandwidth."""
    return dataclasses.replace(
        chip,
        devices=devices,
        memory_bytes=chip.memory_bytes // devices,
        bandwidth_bytes_per_second=chip.bandwidth_bytes_per_second / devices,
        flops_per_second={k: rate / devices for k, rate in chip.flops_per_second.items()},
        host_bandwidth_bytes_per_second=chip.host_bandwidth_bytes_per_second / devices,
        links={name: rate / devices for name, rate in chip.links.items()},
    )


def for_arguments(name: str | Target, args: Any, call: str) -> Target:
    """Return the target of a program whose arguments may be split over several devices.

    The mesh that `jax.set_mesh` has set counts too.

    Args:
        name: the chip or its name.
        args: pytrees of arrays or of `jax.ShapeDtypeStruct`.
        call: the public function that errors name.

    Raises:
        UserError: as `for_devices` does.
    """
    chip = target(name)
    most = _jax.devices_of_arguments(args)
    return chip if most == 1 else for_devices(chip, most, call)


def for_devices(chip: Target, devices: int, call: str) -> Target:
    """Return the target of a program that is partitioned over so many devices.

    A target without a topology gets the usual one.

    >>> for_devices(target("h100@40GiB"), 8, "measure").name
    'h100:8@40GiB'

    Args:
        chip: the target that the user named.
        devices: the size of the program's mesh; 1 without a mesh.
        call: the public function that errors name.

    Raises:
        UserError: the topology of the target has another size, or no topology has this size.
    """
    if chip.devices == devices:
        return chip
    full, at, size = chip.name.partition("@")
    base, colon, _ = full.partition(":")
    if colon:
        mesh = f"partitioned over a mesh of {devices} devices" if devices > 1 else "for one device"
        raise UserError(
            f"`{call}(..., target={chip.name!r})`: the program is {mesh}, and the target has "
            f"{chip.devices} devices",
            hint=f"name the kind alone, as in {base!r}, or a topology of {devices} devices"
            if devices > 1
            else f"give arguments with shardings over a mesh of {chip.devices} devices, or name "
            f"the kind alone, as in {base!r}",
        )
    if base == "local":
        return _local_devices(chip, devices, call)
    usual = usual_topology(base, devices)
    if usual is None:
        raise UserError(
            f"`{call}(..., target={chip.name!r})`: the program is partitioned over a mesh of "
            f"{devices} devices, and {base} has no usual topology of that size",
            hint=f"name a topology, as in '{base}:4x8', or make a mesh of another size",
        )
    call = f"target('{base}:{usual}')"
    several = _with_topology(_build(base), usual, call)
    return _shrunk(several, size, call) if at else several


def _local_devices(chip: Target, devices: int, call: str) -> Target:
    there = len(jax.devices())
    if there < devices:
        raise UserError(
            f"`{call}(..., target={chip.name!r})`: the program is partitioned over a mesh of "
            f"{devices} devices, and this process has {there}",
            hint="name another target, such as 'h100', or give a process more CPU devices with "
            f"jax.config.update('jax_num_cpu_devices', {devices}) at its beginning",
        )
    if chip.platform != "cpu":
        hosts = len({device.process_index for device in jax.devices()[:devices]})
        return dataclasses.replace(chip, devices=devices, hosts=hosts)
    if "@" in chip.name:
        return dataclasses.replace(_sharing(chip, devices), memory_bytes=chip.memory_bytes)
    return _sharing(chip, devices)


def _shrunk(chip: Target, size: str, call: str) -> Target:
    try:
        memory = parse_bytes(size)
    except PolicyError as error:
        raise UserError(
            f"`{call}`: {size!r} is not a size", hint="write it as 'h100@40GiB'"
        ) from error
    if memory == 0:
        raise UserError(f"`{call}`: a chip needs memory", hint="write it as 'h100@40GiB'")
    if memory > chip.memory_bytes and chip.platform != "cpu":
        raise UserError(
            f"`{call}`: {chip.name} has {format_bytes(chip.memory_bytes)}, less than {size}",
            hint="the size after @ makes a chip smaller; name a larger chip instead",
        )
    options = chip.compiler_options
    if chip.platform == "tpu":
        options += (("xla_tpu_max_hbm_size_mib", str(-(-memory // MIB))),)
    spec = re.sub(r"(\bdevice_memory_size:) \d+", rf"\1 {memory}", chip.spec)
    return dataclasses.replace(
        chip,
        name=f"{chip.name}@{size}",
        memory_bytes=memory,
        compiler_options=options,
        spec=spec,
    )


def _cuda_names() -> list[str]:
    return list(dict.fromkeys([*GPUS, *sorted(embedded_specs())]))


def _build(name: str) -> Target:
    if name == "cpu":
        chip = _cpu("cpu", "a CPU of this machine's kind")
        return dataclasses.replace(chip, notes=_scheduler_note())
    return _tpu(name) if name in TPUS else _cuda(name)


def _tpu(name: str) -> Target:
    chip = TPUS[name]
    available = importlib.util.find_spec("libtpu") is not None
    return Target(
        name=name,
        platform="tpu",
        memory_bytes=int(chip.memory_gib * GIB),
        bandwidth_bytes_per_second=chip.bandwidth,
        flops_per_second=dict(chip.flops),
        host_bandwidth_bytes_per_second=chip.host_bandwidth,
        description=chip.description,
        source="Google's TPU pages and papers, per device; memory as the compiler enforces it"
        + assumed_of(name),
        available=available,
        needs=None if available else EXTRAS["tpu"],
        links=links_of(name, chip.host_bandwidth),
        host_memory_bytes=host_memory_of(name),
        topology=chip.topology,
    )


def _cuda(name: str) -> Target:
    plugin = cuda_plugin() is not None
    text = embedded_specs().get(name, "")
    gpu = GPUS.get(name) or Gpu(
        text_field(text, "device_description_str"), 0, 0.0, teraflops_of(text), 32e9
    )
    if not text and name in SILICON:
        text = SILICON[name].text(gpu)
    available = plugin and bool(text)
    text, caveat = _supported(text)
    return Target(
        name=name,
        platform="cuda",
        memory_bytes=int(number_field(text, "device_memory_size")) or gpu.memory_bytes,
        bandwidth_bytes_per_second=number_field(text, "memory_bandwidth") or gpu.bandwidth,
        flops_per_second={kind: rate * TERA for kind, rate in gpu.teraflops.items()},
        host_bandwidth_bytes_per_second=gpu.host_bandwidth,
        description=gpu.description,
        source=(
            "the CUDA plugin's description of the card"
            if name in embedded_specs()
            else "the vendor's data sheet"
        )
        + assumed_of(name),
        available=available,
        needs=None if available else EXTRAS["cuda"],
        notes=(_NO_AUTOTUNING, *caveat),
        links=links_of(name, gpu.host_bandwidth),
        host_memory_bytes=host_memory_of(name),
        topology=name,
        spec=text,
        compiler_options=_CUDA_OPTIONS,
    )


# Without the GPU, XLA cannot try its kernels. At the default autotuning level XLA (jax 0.12)
# compiles the candidates anyway. That takes up to half of the compile time and changes neither the
# program nor its memory. XLA of jax 0.11.2 refuses some matrix products at level 0 ("No supported
# config found").
_CUDA_OPTIONS = (("xla_gpu_autotune_level", "0"),) if _jax.JAX_VERSION >= (0, 12) else ()


_NO_AUTOTUNING = (
    "compiled without the GPU, hence without autotuning: its workspace bytes may differ"
)


_CAPABILITY = re.compile(r"cuda_compute_capability \{\s*major: (\d+)(?:\s+minor: (\d+))?")


def _supported(text: str) -> tuple[str, tuple[str, ...]]:
    """Raise the compute capability of a description to the lowest that CUDA 13 supports."""
    library, found = cuda_plugin(), _CAPABILITY.search(text)
    if library is None or found is None or library.parent.name != "xla_cuda13":
        return text, ()
    own = int(found.group(1)), int(found.group(2) or 0)
    if own >= (7, 5):
        return text, ()
    raised = _CAPABILITY.sub("cuda_compute_capability { major: 7 minor: 5", text)
    note = f"CUDA 13 has dropped compute capability {own[0]}.{own[1]}: compiled for 7.5"
    return raised, (note,)


def _cpu(name: str, description: str) -> Target:
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # We assume two fused multiply-adds of 8 float32 values in each cycle at 2.5 GHz, and one memory
    # channel for 4 cores.
    rate = cores * 2.5e9 * 32
    return Target(
        name=name,
        platform="cpu",
        memory_bytes=memory,
        bandwidth_bytes_per_second=20e9 * max(1, cores // 4),
        flops_per_second={"float32": rate, "float64": rate / 2, "bfloat16": rate},
        host_bandwidth_bytes_per_second=20e9 * max(1, cores // 4),
        links=links_of("cpu", 20e9 * max(1, cores // 4)),
        host_memory_bytes=memory,
        description=description,
        source=f"this machine's memory; rates estimated from its {cores} cores",
    )


def _local() -> Target:
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return _cpu("local", "the CPU of this process")
    platform = "cuda" if device.platform == "gpu" else device.platform
    kind = device.device_kind
    likeness = next(
        (
            chip
            for chip in (_build(name) for name in (*TPUS, *_cuda_names()))
            if chip.platform == platform and kind.lower() in chip.description.lower()
        ),
        None,
    )
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    return Target(
        name="local",
        platform=platform,
        memory_bytes=int(limit or (likeness.memory_bytes if likeness else 0)),
        bandwidth_bytes_per_second=likeness.bandwidth_bytes_per_second if likeness else 0.0,
        flops_per_second=dict(likeness.flops_per_second) if likeness else {},
        host_bandwidth_bytes_per_second=likeness.host_bandwidth_bytes_per_second
        if likeness
        else 0.0,
        links=dict(likeness.links) if likeness else {},
        host_memory_bytes=likeness.host_memory_bytes if likeness else None,
        description=kind,
        source=f"memory as JAX's allocator has it; rates of {likeness.name}"
        if likeness
        else "memory as JAX's allocator has it",
    )


EXTRAS = {"tpu": "pip install 'remat-kit[tpu]'", "cuda": "pip install 'remat-kit[cuda]'"}


def several_targets(targets: Any) -> list[Target]:
    if not isinstance(targets, Sequence) or not targets:
        raise UserError(
            f"`measure(..., target={targets!r})`: this names no chip",
            hint="give a name, such as 'h100', or a list of names; `remat_kit.targets` has them",
        )
    return [target(name) for name in targets]


SCHEDULER_FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler"


def needs_scheduler_flag() -> bool:
    """Tell whether XLA:CPU schedules for concurrency, which undoes rematerialization (jax 0.10)."""
    return _jax.JAX_VERSION < (0, 11) and SCHEDULER_FLAG not in os.environ.get("XLA_FLAGS", "")


def _scheduler_note() -> tuple[str, ...]:
    if not needs_scheduler_flag():
        return ()
    return (
        f"compiled with {SCHEDULER_FLAG}=false, because otherwise XLA:CPU of jax "
        f"{jax.__version__} undoes what rematerialization saves; later releases save more",
    )
