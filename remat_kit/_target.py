"""Chips, present or not, and what a program needs on them.

A program is lowered here and compiled in a child process by the chip's own compiler (see
`_compile_worker.py`), so a laptop answers for an H100 and a TPU. Nothing is run, except on the
target ``local``.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import mmap
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from remat_kit import _jax
from remat_kit._cache import Cache, default_cache, key_of
from remat_kit._compile_worker import Worker, WorkerDiedError
from remat_kit._errors import (
    CompileError,
    MissingPluginError,
    PolicyError,
    TargetError,
    UserError,
    unknown,
)
from remat_kit._gradient import Argnums, abstract, gradient_program, materialise
from remat_kit._policy import format_bytes, parse_bytes

GIB = 2**30
_T = 1e12

Options = Mapping[str, str | int | bool]


@dataclass(frozen=True)
class Target:
    """A chip that programs can be compiled for.

    Attributes:
        name: as `target` takes it.
        platform: ``cpu``, ``tpu`` or ``cuda``.
        memory_bytes: what a program may use of one device.
        bandwidth_bytes_per_second: between the chip and its memory.
        flops_per_second: peak by type, dense, for one device. ``float32`` is the rate of the vector
            units on a GPU (``tensorfloat32`` that of its matrix units) and the rate of JAX's
            default matrix product on a TPU, which rounds to bfloat16.
        host_bandwidth_bytes_per_second: between the chip and the host's memory, one way, nominal.
        description: the vendor's name for it.
        source: where the figures come from.
        available: whether its compiler is installed here.
        needs: what to install when it is not, or None.
        notes: what to know about figures for it.
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
    topology: str = field(default="", repr=False)
    spec: str = field(default="", repr=False)
    compiler_options: tuple[tuple[str, str], ...] = field(default=(), repr=False)


# -- TPUs -----------------------------------------------------------------------------------
# Memory is what the compiler enforces per device. Rates are Google's per chip, halved where a chip
# is two devices. Links to the host are not published; PCIe of the hosts' generation is assumed.


@dataclass(frozen=True)
class _Tpu:
    topology: str
    memory_gib: float
    bandwidth: float
    flops: Mapping[str, float]
    host_bandwidth: float
    description: str


def _tpu_flops(bfloat16: float, *, narrow: str = "", times: float = 2) -> dict[str, float]:
    rates = {"bfloat16": bfloat16 * _T, "float32": bfloat16 * _T}
    return rates | ({narrow: times * bfloat16 * _T} if narrow else {})


_TPUS: dict[str, _Tpu] = {
    "tpu-v2": _Tpu("v2:2x2", 7.48, 350e9, _tpu_flops(23), 16e9, "TPU v2, one core of two"),
    "tpu-v3": _Tpu("v3:2x2", 15.48, 450e9, _tpu_flops(61.5), 16e9, "TPU v3, one core of two"),
    "tpu-v4": _Tpu(
        "v4:2x2x1", 30.75, 1228e9, _tpu_flops(275, narrow="int8", times=1), 16e9, "TPU v4, megacore"
    ),
    "tpu-v5e": _Tpu("v5e:1x1", 15.75, 819e9, _tpu_flops(197, narrow="int8"), 32e9, "TPU v5e"),
    "tpu-v5p": _Tpu("v5p:2x2x1", 95.73, 2765e9, _tpu_flops(459, narrow="int8"), 32e9, "TPU v5p"),
    "tpu-v6e": _Tpu("v6e:1x1", 31.24, 1640e9, _tpu_flops(918, narrow="int8"), 32e9, "TPU v6e"),
    "tpu-7x": _Tpu(
        "tpu7x:1x1x1",
        94.74,
        3690e9,
        _tpu_flops(1153.5, narrow="float8"),
        64e9,
        "TPU7x, one core of two",
    ),
}
_TOPOLOGY_OPTIONS: dict[str, dict[str, str]] = {"v4:2x2x1": {"chip_config_name": "megacore"}}


# -- NVIDIA GPUs ----------------------------------------------------------------------------
# The compiler wants a description of the chip. The CUDA plugin carries those of most data-centre
# cards as text, read from it when they are asked for; the rest are described here. Peak rates are
# those of the vendor's data sheets, dense.


@dataclass(frozen=True)
class _Gpu:
    description: str
    memory_bytes: int
    bandwidth: float
    teraflops: Mapping[str, float]
    host_bandwidth: float


def _rates(
    float32: float, half: float, *, tf32: float = 0, f64: float = 0, fp8: float = 0, int8: float = 0
) -> dict[str, float]:
    rates = {"float64": f64, "float32": float32, "tensorfloat32": tf32, "float16": half}
    rates |= {"bfloat16": half if tf32 else 0, "float8": fp8, "int8": int8}
    return {name: rate for name, rate in rates.items() if rate}


_A100 = _rates(19.5, 312, tf32=156, f64=19.5, int8=624)
_HOPPER = _rates(66.9, 989.4, tf32=494.7, f64=66.9, fp8=1978.9, int8=1978.9)
_GPUS: dict[str, _Gpu] = {
    "p100": _Gpu("Tesla P100-SXM2-16GB", 17066885120, 732e9, _rates(10.6, 21.2, f64=5.3), 16e9),
    "v100": _Gpu("Tesla V100-SXM2-16GB", 16935682048, 898e9, _rates(15.7, 125, f64=7.8), 16e9),
    "a100-40g": _Gpu("NVIDIA A100-SXM4-40GB", 42331013120, 1555e9, _A100, 32e9),
    "a100-80g": _Gpu("NVIDIA A100-SXM4-80GB", 85100068864, 2039e9, _A100, 32e9),
    "a100-80g-pcie": _Gpu("NVIDIA A100 80GB PCIe", 79050250240, 1935e9, _A100, 32e9),
    "a6000": _Gpu(
        "NVIDIA RTX A6000", 51041271808, 768e9, _rates(38.7, 154.8, tf32=77.4, int8=309.7), 32e9
    ),
    "rtx-pro-6000": _Gpu(
        "NVIDIA RTX PRO 6000 Blackwell",
        103079215104,
        1792e9,
        _rates(125, 503.8, tf32=251.9, fp8=1007.6, int8=1007.6),
        64e9,
    ),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", 84942979072, 3352e9, _HOPPER, 64e9),
    "h100-pcie": _Gpu(
        "NVIDIA H100 PCIe",
        84942979072,
        2039e9,
        _rates(51.2, 756, tf32=378, f64=51.2, fp8=1513, int8=1513),
        64e9,
    ),
    "h200": _Gpu("NVIDIA H200 141GB HBM3e", 151397597184, 4800e9, _HOPPER, 64e9),
    "b200": _Gpu(
        "NVIDIA B200",
        191514411008,
        7672e9,
        _rates(75, 2250, tf32=1125, f64=37, fp8=4500, int8=4500),
        64e9,
    ),
    "b300": _Gpu(
        "NVIDIA B300", 297021865984, 7936e9, _rates(75, 2250, tf32=1125, f64=1.2, fp8=4500), 64e9
    ),
    "gb200": _Gpu(
        "NVIDIA GB200",
        197897748480,
        7928e9,
        _rates(80, 2500, tf32=1250, f64=40, fp8=5000, int8=5000),
        450e9,
    ),
    "gb300": _Gpu(
        "NVIDIA GB300", 297021079552, 7928e9, _rates(80, 2500, tf32=1250, f64=1.3, fp8=5000), 450e9
    ),
    "v100-32g": _Gpu("Tesla V100-SXM2-32GB", 34089730048, 898e9, _rates(15.7, 125, f64=7.8), 16e9),
    "t4": _Gpu("Tesla T4", 15843721216, 320e9, _rates(8.1, 65, int8=130), 16e9),
    "l4": _Gpu(
        "NVIDIA L4", 23821418496, 300e9, _rates(30.3, 121, tf32=60, fp8=242.5, int8=242.5), 32e9
    ),
    "a10g": _Gpu("NVIDIA A10G", 23835181056, 600e9, _rates(35, 70, tf32=35, int8=140), 32e9),
    "rtx4090": _Gpu(
        "NVIDIA GeForce RTX 4090",
        25393692672,
        1008e9,
        _rates(82.6, 165.2, tf32=82.6, fp8=330.3, int8=660.6),
        32e9,
    ),
}


@dataclass(frozen=True)
class _Silicon:
    """What the compiler needs to know of a card that the plugin does not describe."""

    capability: tuple[int, int]
    cores: int
    clock_ghz: float
    l2_bytes: int
    shared_per_core: int
    shared_optin: int
    threads_per_core: int
    lanes_per_core: int

    def text(self, gpu: _Gpu) -> str:
        major, minor = self.capability
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_per_core} threads_per_core_limit: {self.threads_per_core}
  core_count: {self.cores} fpus_per_core: {self.lanes_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(gpu.bandwidth)} l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz} device_memory_size: {gpu.memory_bytes}
  shared_memory_per_block_optin: {self.shared_optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{gpu.description}"
"""


_MIB = 2**20
_SILICON: dict[str, _Silicon] = {
    "v100-32g": _Silicon((7, 0), 80, 1.53, 6 * _MIB, 98304, 98304, 2048, 64),
    "t4": _Silicon((7, 5), 40, 1.59, 4 * _MIB, 65536, 65536, 1024, 64),
    "l4": _Silicon((8, 9), 58, 2.04, 48 * _MIB, 102400, 101376, 1536, 128),
    "a10g": _Silicon((8, 6), 80, 1.71, 6 * _MIB, 102400, 101376, 1536, 128),
    "rtx4090": _Silicon((8, 9), 128, 2.52, 72 * _MIB, 102400, 101376, 1536, 128),
}
_REFUSED = re.compile(r"mi\d{3}\w*|gfx\w+|arc\b.*|.*\bmax-?1100|radeon.*|instinct.*", re.I)


def _cuda_plugin() -> Path | None:
    """Return the library of the installed CUDA plugin."""
    for name in ("xla_cuda13", "xla_cuda12"):
        try:
            found = importlib.util.find_spec(f"jax_plugins.{name}")
        except ModuleNotFoundError:
            continue
        for folder in (found.submodule_search_locations or []) if found else []:
            library = Path(folder) / "xla_cuda_plugin.so"
            if library.exists():
                return library
    return None


def _embedded_specs() -> dict[str, str]:
    """Return the card descriptions inside the CUDA plugin, by our name for them."""
    library = _cuda_plugin()
    if library is None:
        return {}
    status = library.stat()
    return _scan(library, status.st_size, status.st_mtime_ns)


@functools.cache
def _scan(library: Path, size: int, mtime_ns: int) -> dict[str, str]:
    cache = default_cache()
    key = key_of("cuda specs 1", str(size), str(mtime_ns))
    if (known := cache.get(key)) is not None:
        return json.loads(known)
    specs = dict(_read_specs(library))
    cache.put(key, json.dumps(specs).encode())
    return specs


def _read_specs(library: Path) -> list[tuple[str, str]]:
    by_description = {gpu.description: name for name, gpu in _GPUS.items()}
    found = []
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(b"gpu_device_info {")
        while at >= 0:
            end = data.find(b"\0", at)
            text = data[data.rfind(b"\0", 0, at) + 1 : end].decode("utf-8", "replace")
            # A description for another vendor makes this plugin abort its process.
            if _text_field(text, "platform_name") == "CUDA":
                description = _text_field(text, "device_description_str")
                found.append((by_description.get(description) or _slug(description), text))
            at = data.find(b"gpu_device_info {", end)
    return found


def _slug(description: str) -> str:
    words = [w for w in description.split() if w not in ("NVIDIA", "Tesla", "80GB", "HBM3")]
    return "-".join(words).lower()


def _text_field(text: str, name: str) -> str:
    found = re.search(rf'\b{name}: "([^"]*)"', text)
    return found.group(1) if found else ""


def _number_field(text: str, name: str) -> float:
    found = re.search(rf"\b{name}: ([\d.]+)", text)
    return float(found.group(1)) if found else 0.0


# Keys of the plugin's rate table: XLA's numbers of the types.
_XLA_TYPES = {10: "float16", 11: "tensorfloat32", 12: "float64", 16: "bfloat16", 19: "float8"}


def _teraflops_of(text: str) -> dict[str, float]:
    """Return the peak rates that a description implies."""
    cores = _number_field(text, "core_count")
    lanes = _number_field(text, "fpus_per_core")
    rates = {"float32": 2e-3 * cores * lanes * _number_field(text, "clock_rate_ghz")}
    _, _, matrix = text.partition("matrix_unit_description {")
    entry = re.compile(
        r"key: (\d+)\s+value \{\s+clock_rate_ghz: ([\d.]+)\s+units_per_core: (\d+)\s+"
        r"ops_per_clock: (\d+)"
    )
    for kind, clock, units, ops in entry.findall(matrix):
        if name := _XLA_TYPES.get(int(kind)):
            rates[name] = 2e-3 * cores * float(clock) * int(units) * int(ops)
    return rates


# -- names ----------------------------------------------------------------------------------


def targets() -> list[Target]:
    """Return every chip that can be named, and whether its compiler is installed here.

    >>> [t.name for t in targets() if t.platform == "tpu"][:3]
    ['tpu-v2', 'tpu-v3', 'tpu-v4']
    """
    return [_build(name) for name in ("cpu", *_TPUS, *_cuda_names())] + [_local()]


def target(name: str | Target) -> Target:
    """Return the chip of that name.

    >>> target("tpu-v5e").memory_bytes / 2**30
    15.75
    >>> target("tpu-v5e@8GiB").memory_bytes / 2**30
    8.0
    >>> target("h10")
    Traceback (most recent call last):
    remat_kit._errors.UnknownNameError: `target('h10')`: no target is named 'h10'
    hint: did you mean 'h100' or 'v100' or 'p100'?

    Args:
        name: one of `targets`, with ``@SIZE`` for a chip with less memory: ``h100@40GiB``. The
            compilers of TPU and CUDA are told of the smaller memory; for ``cpu`` it only decides
            what fits. ``local`` is the device of this process.

    Raises:
        UnknownNameError: there is no such chip.
        TargetError: a chip of a vendor whose compiler cannot work without it.
        UserError: the size is none, or larger than the chip's memory.
    """
    if isinstance(name, Target):
        return name
    base, at, size = name.partition("@")
    call = f"target({name!r})"
    known = ["cpu", "local", *_TPUS, *_cuda_names()]
    if base not in known:
        if _REFUSED.fullmatch(base):
            raise TargetError(
                f"`{call}`: XLA cannot compile for AMD and Intel chips that are absent; its "
                "compiler ends the process that tries",
                hint="measure on the chip itself with target 'local'",
            )
        raise unknown("target", base, known, call=call)
    chip = _local() if base == "local" else _build(base)
    return _shrunk(chip, size, call) if at else chip


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
        options += (("xla_tpu_max_hbm_size_mib", str(max(1, memory // _MIB))),)
    spec = re.sub(r"(\bdevice_memory_size:) \d+", rf"\1 {memory}", chip.spec)
    return dataclasses.replace(
        chip,
        name=f"{chip.name}@{size}",
        memory_bytes=memory,
        compiler_options=options,
        spec=spec,
    )


def _cuda_names() -> list[str]:
    return list(dict.fromkeys([*_GPUS, *sorted(_embedded_specs())]))


def _build(name: str) -> Target:
    if name == "cpu":
        chip = _cpu("cpu", "a CPU of this machine's kind")
        return dataclasses.replace(chip, notes=_scheduler_note())
    return _tpu(name) if name in _TPUS else _cuda(name)


def _tpu(name: str) -> Target:
    chip = _TPUS[name]
    available = importlib.util.find_spec("libtpu") is not None
    return Target(
        name=name,
        platform="tpu",
        memory_bytes=int(chip.memory_gib * GIB),
        bandwidth_bytes_per_second=chip.bandwidth,
        flops_per_second=dict(chip.flops),
        host_bandwidth_bytes_per_second=chip.host_bandwidth,
        description=chip.description,
        source="Google Cloud's TPU pages, per device; memory as the compiler enforces it; "
        "the link to the host is assumed",
        available=available,
        needs=None if available else _EXTRAS["tpu"],
        topology=chip.topology,
    )


def _cuda(name: str) -> Target:
    plugin = _cuda_plugin() is not None
    text = _embedded_specs().get(name, "")
    gpu = _GPUS.get(name) or _Gpu(
        _text_field(text, "device_description_str"), 0, 0.0, _teraflops_of(text), 32e9
    )
    if not text and name in _SILICON:
        text = _SILICON[name].text(gpu)
    available = plugin and bool(text)
    text, caveat = _supported(text)
    return Target(
        name=name,
        platform="cuda",
        memory_bytes=int(_number_field(text, "device_memory_size")) or gpu.memory_bytes,
        bandwidth_bytes_per_second=_number_field(text, "memory_bandwidth") or gpu.bandwidth,
        flops_per_second={kind: rate * _T for kind, rate in gpu.teraflops.items()},
        host_bandwidth_bytes_per_second=gpu.host_bandwidth,
        description=gpu.description,
        source="the CUDA plugin's description of the card"
        if name in _embedded_specs()
        else "the vendor's data sheet",
        available=available,
        needs=None if available else _EXTRAS["cuda"],
        notes=(_NO_AUTOTUNING, *caveat),
        topology=name,
        spec=text,
        compiler_options=_CUDA_OPTIONS,
    )


# There is no card to try kernels on. At its default level XLA (jax 0.12) still compiles what it
# would try, which takes up to half of the time and changes neither the program nor its memory.
_CUDA_OPTIONS = (("xla_gpu_autotune_level", "0"),)
_NO_AUTOTUNING = (
    "compiled without the card, hence without autotuning: workspace bytes may differ on it"
)
_CAPABILITY = re.compile(r"cuda_compute_capability \{\s*major: (\d+)(?:\s+minor: (\d+))?")


def _supported(text: str) -> tuple[str, tuple[str, ...]]:
    """Raise the compute capability of a description to the oldest that CUDA 13 assembles for."""
    library, found = _cuda_plugin(), _CAPABILITY.search(text)
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
    # Two fused multiply-adds of 8 float32 a cycle at 2.5 GHz, one memory channel for 4 cores.
    rate = cores * 2.5e9 * 32
    return Target(
        name=name,
        platform="cpu",
        memory_bytes=memory,
        bandwidth_bytes_per_second=20e9 * max(1, cores // 4),
        flops_per_second={"float32": rate, "float64": rate / 2, "bfloat16": rate},
        host_bandwidth_bytes_per_second=20e9 * max(1, cores // 4),
        description=description,
        source=f"this machine's memory; rates guessed from its {cores} cores",
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
            for chip in (_build(name) for name in (*_TPUS, *_cuda_names()))
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
        description=kind,
        source=f"memory as JAX's allocator has it; rates of {likeness.name}"
        if likeness
        else "memory as JAX's allocator has it",
    )


_EXTRAS = {"tpu": "pip install 'remat-kit[tpu]'", "cuda": "pip install 'remat-kit[cuda]'"}


# -- answers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """What one compiled program needs on one chip.

    Attributes:
        target: the chip's name.
        argument_bytes: the arguments, as the chip lays them out.
        output_bytes: the results.
        alias_bytes: results that take over the memory of donated arguments.
        temp_bytes: everything in between; None when the program did not compile.
        code_bytes: the program itself.
        host_bytes: arguments, results and temporaries in the host's memory.
        peak_bytes: on the device: arguments + results − aliased + temporaries. When the program
            does not fit, what the compiler says it needs, or None.
        compiler_peak_bytes: the compiler's own figure, which counts the host's memory too.
        memory_bytes: what the chip has.
        fits: whether the program fits; the compiler's word where it refuses what does not.
        needs_bytes: what a program that does not fit needs, as the compiler says, or None.
        compile_seconds: what compiling took, when it was done.
        cached: whether the answer was kept from before.
        versions: of everything that took part.
        notes: what to know about the figures.
        step_seconds: median of several runs, for ``local`` alone.
        measured_peak_bytes: the allocator's peak while it ran, for ``local`` where there is one.
    """

    target: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int | None
    temp_bytes: int | None
    code_bytes: int | None
    host_bytes: int | None
    peak_bytes: int | None
    compiler_peak_bytes: int | None
    memory_bytes: int
    fits: bool
    needs_bytes: int | None
    compile_seconds: float
    cached: bool
    versions: Mapping[str, str] = field(hash=False)
    notes: tuple[str, ...] = ()
    step_seconds: float | None = None
    measured_peak_bytes: int | None = None

    @property
    def headroom_bytes(self) -> int | None:
        """Return the memory left over; negative when the program does not fit."""
        return None if self.peak_bytes is None else self.memory_bytes - self.peak_bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        plain = dataclasses.asdict(self) | {"headroom_bytes": self.headroom_bytes}
        return plain | {"notes": list(self.notes), "versions": dict(self.versions)}

    def __str__(self) -> str:
        if not self.fits:
            needed = "more" if self.peak_bytes is None else format_bytes(self.peak_bytes)
            return f"{self.target}: does not fit: needs {needed}, has {self._has}"
        parts = {
            "arguments": self.argument_bytes,
            "outputs": self.output_bytes,
            "aliased": -(self.alias_bytes or 0),
            "temporaries": self.temp_bytes or 0,
        }
        sum_ = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        host = f"; host {format_bytes(self.host_bytes)}" if self.host_bytes else ""
        step = f"; step {1e3 * self.step_seconds:.3g} ms" if self.step_seconds else ""
        peak = format_bytes(self.peak_bytes or 0)
        return f"{self.target}: {peak} of {self._has} ({sum_}){host}{step}"

    @property
    def _has(self) -> str:
        return format_bytes(self.memory_bytes)


@dataclass(frozen=True)
class Compiled:
    """A compiled program: what it needs, and its optimised HLO.

    Attributes:
        memory: what it needs.
        hlo_text: the optimised, scheduled HLO; None when the program did not fit.
    """

    memory: Memory
    hlo_text: str | None = field(repr=False)


def measure(
    fn: Callable[..., Any],
    *args: Any,
    target: str | Target = "cpu",
    argnums: Argnums = 0,
    donate_argnums: int | Sequence[int] = (),
    cache: bool = True,
    compiler_options: Options | None = None,
) -> Memory:
    """Compile the gradient of a loss for a chip and say what it needs there.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    >>> w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> x = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    >>> memory = measure(loss, w, x, target="cpu")
    >>> memory.argument_bytes, memory.fits
    (1310720, True)

    Args:
        fn: called as ``fn(*args)``; its result is a scalar, or ``(scalar, aux)``.
        args: arrays, numbers or `jax.ShapeDtypeStruct`, in pytrees. Only their shapes and types
            matter, and whether they lie in the host's memory; ``local`` runs the program, on zeros
            where it has only shapes.
        target: a chip, or the name of one (see `target`).
        argnums: what to differentiate; None compiles ``fn`` as it is, for a whole training step.
        donate_argnums: the arguments whose memory the results may take over, as in `jax.jit`.
        cache: whether to look the answer up on disk and keep it there.
        compiler_options: for XLA, over those of the target.

    Raises:
        UnknownNameError: no chip has that name.
        MissingPluginError: the chip's compiler is not installed.
        NotDifferentiableError: ``fn`` is no loss, or what it should be differentiated by has no
            gradient.
        CompileError: the compiler refused the program for another reason than memory, or died.
    """
    return compile_program(
        fn,
        args,
        target,
        argnums=argnums,
        donate_argnums=donate_argnums,
        cache=cache,
        compiler_options=compiler_options,
    ).memory


def compile_program(
    fn: Callable[..., Any],
    args: Sequence[Any],
    target: str | Target,
    *,
    argnums: Argnums = 0,
    donate_argnums: int | Sequence[int] = (),
    cache: bool = True,
    compiler_options: Options | None = None,
    call: str = "measure",
) -> Compiled:
    """Do what `measure` does, and hand back the optimised HLO too.

    Args:
        fn, target, argnums, donate_argnums, cache, compiler_options: as for `measure`.
        args: the arguments of ``fn``.
        call: the public function that errors should name.

    Raises:
        RematKitError: as for `measure`.
    """
    chip = _target_of(target)
    _require(chip, call)
    program = gradient_program(fn, args, argnums, call=call)
    jitted = jax.jit(program, donate_argnums=donate_argnums)
    options: Options = {**dict(chip.compiler_options), **(compiler_options or {})}
    if chip.name.partition("@")[0] == "local":
        return _run_here(jitted, args, chip, options, donate_argnums, call)
    structs = abstract(args, call=call)
    traced = jitted.trace(*structs)
    lowered = _lowered(traced, chip, call)
    request = _request(lowered, chip, options)
    key = _key(request, lowered.identity)
    answer, cached = _answer(request, key, chip, default_cache() if cache else None, call)
    shapes = _shape_bytes(structs), _shape_bytes(traced.out_info)
    return Compiled(_memory(answer, chip, cached, shapes), answer.get("hlo"))


def _target_of(name: str | Target) -> Target:
    return target(name)  # under another name, where `target` is a parameter


def _require(chip: Target, call: str) -> None:
    if chip.available:
        return
    if chip.platform == "cuda" and _cuda_plugin() is not None:
        raise TargetError(
            f"`{call}(..., target={chip.name!r})`: the installed CUDA plugin has no description "
            "of this card",
            hint="install the newest: " + _EXTRAS["cuda"],
        )
    raise MissingPluginError(
        f"`{call}(..., target={chip.name!r})`: the compiler for {chip.platform} is not installed",
        hint=_EXTRAS[chip.platform],
    )


# -- asking the child -----------------------------------------------------------------------


def _lowered(traced: Any, chip: Target, call: str) -> _jax.Lowered:
    try:
        # What asked for the program is no part of it: `measure` on one line of a script and
        # `inspect` on the next share an answer.
        lowered = _jax.lower(traced, chip.platform, boundary=_OWN_FILES)
    except Exception as error:
        raise CompileError(
            f"`{call}(..., target={chip.name!r})`: the program cannot be lowered for "
            f"{chip.platform}: {str(error).strip()}",
            hint="callbacks into Python (jax.debug.print, io_callback) and kernels written for "
            "another kind of chip cannot be; take them out, or measure on the chip itself with "
            "target 'local'",
        ) from error
    if lowered.devices > 1:
        raise UserError(
            f"`{call}(..., target={chip.name!r})`: the program is partitioned over "
            f"{lowered.devices} devices; a target is one",
            hint="give the function that one device runs, with the shapes of its shard",
        )
    return lowered


_OWN_FILES = (__file__, str(Path(__file__).with_name("_gradient.py")))


def _request(lowered: _jax.Lowered, chip: Target, options: Options) -> dict[str, Any]:
    topology_options: dict[str, Any] = dict(_TOPOLOGY_OPTIONS.get(chip.topology, {}))
    if chip.platform == "cuda":
        topology_options = {"target_config": chip.spec, "topology": "1x1x1"}
    return {
        "program": lowered.bytecode,
        "platform": chip.platform,
        "topology": chip.topology,
        "topology_options": topology_options,
        "options": options,
        "settings": _jax.compile_settings(),
    }


def _key(request: Mapping[str, Any], identity: str) -> str:
    """Name an answer by everything that decides it."""
    rest = {name: value for name, value in request.items() if name != "program"}
    outside = [_environment(request["platform"]), _versions(request["platform"])]
    outside.append({name: os.environ.get(name, "") for name in _COMPILER_VARIABLES})
    return key_of("memory 1", identity, json.dumps([rest, outside], sort_keys=True))


def _answer(
    request: dict[str, Any], key: str, chip: Target, cache: Cache | None, call: str
) -> tuple[dict[str, Any], bool]:
    if cache is not None and (known := cache.get(key)) is not None:
        return json.loads(known), True
    answer = _ask(request, chip, call)
    if "refused" in answer and _out_of_memory(answer["refused"]) is None:
        raise CompileError(
            f"`{call}(..., target={chip.name!r})`: the compiler refused the program: "
            f"{answer['refused'].strip()}",
            hint="if the program runs on the chip itself, please report this",
        )
    if cache is not None:
        cache.put(key, json.dumps(answer).encode())
    return answer, False


# Variables from which the compilers take flags; the child inherits them.
_COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TF_XLA_FLAGS")

_workers: dict[tuple[int, str], Worker] = {}


def _ask(request: dict[str, Any], chip: Target, call: str) -> dict[str, Any]:
    # A fork inherits the table but not the right to read the pipes: the process is in the key.
    place = (os.getpid(), chip.platform)
    if place not in _workers:
        _workers[place] = Worker(_environment(chip.platform))
    try:
        return _workers[place].ask(request)
    except WorkerDiedError as death:
        last = "\n".join(f"    {line[:300]}" for line in death.stderr_lines[-8:])
        raise CompileError(
            f"`{call}(..., target={chip.name!r})`: {death}"
            + (f"; its last words:\n{last}" if last else " without a word"),
            hint="the next call starts another one; if this program does it every time, the "
            "compiler has a fault: try a smaller program or another version of it",
        ) from None


@atexit.register
def close_workers() -> None:
    """End the processes that compile; the next call starts others."""
    for (process, _), worker in list(_workers.items()):
        if process == os.getpid():
            worker.close()


def _environment(platform: str) -> dict[str, str]:
    common = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    }
    if platform == "cpu" and _needs_scheduler_flag():
        given = os.environ.get("XLA_FLAGS", "")
        common["XLA_FLAGS"] = f"{given} {_SCHEDULER_FLAG}=false".strip()
    return common


_SCHEDULER_FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler"


def _needs_scheduler_flag() -> bool:
    """XLA:CPU of jax 0.10 schedules for concurrency, which undoes rematerialization."""
    return _jax.JAX_VERSION < (0, 11) and _SCHEDULER_FLAG not in os.environ.get("XLA_FLAGS", "")


def _scheduler_note() -> tuple[str, ...]:
    if not _needs_scheduler_flag():
        return ()
    return (
        f"compiled with {_SCHEDULER_FLAG}=false, without which XLA:CPU of jax {jax.__version__} "
        "loses what rematerialization saves; later releases save more",
    )


def _versions(platform: str) -> dict[str, str]:
    packages = ["jax", "jaxlib"]
    packages += ["libtpu"] if platform == "tpu" else []
    packages += ["jax-cuda13-pjrt", "jax-cuda12-pjrt"] if platform == "cuda" else []
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# -- from an answer to a Memory -------------------------------------------------------------


def _memory(
    answer: Mapping[str, Any], chip: Target, cached: bool, shapes: tuple[int, int]
) -> Memory:
    common: dict[str, Any] = {
        "target": chip.name,
        "memory_bytes": chip.memory_bytes,
        "cached": cached,
        "versions": _versions(chip.platform),
    }
    notes = chip.notes
    if "refused" in answer:
        needs = (_out_of_memory(answer["refused"]) or {}).get("needs")
        return Memory(
            argument_bytes=shapes[0],
            output_bytes=shapes[1],
            **dict.fromkeys(
                ("alias_bytes", "temp_bytes", "code_bytes", "host_bytes", "compiler_peak_bytes")
            ),
            peak_bytes=needs,
            needs_bytes=needs,
            fits=False,
            compile_seconds=0.0,
            notes=(*notes, "did not compile: argument and output bytes are those of the shapes"),
            **common,
        )
    stats = answer["memory"]
    peak = (
        stats["argument_size_in_bytes"]
        + stats["output_size_in_bytes"]
        - stats["alias_size_in_bytes"]
        + stats["temp_size_in_bytes"]
    )
    fits = chip.platform == "tpu" or peak <= chip.memory_bytes
    if added := _xla_remat_count(answer["hlo"]):
        notes += (f"XLA's own rematerialization added {added} instructions",)
    return Memory(
        argument_bytes=stats["argument_size_in_bytes"],
        output_bytes=stats["output_size_in_bytes"],
        alias_bytes=stats["alias_size_in_bytes"],
        temp_bytes=stats["temp_size_in_bytes"],
        code_bytes=stats["generated_code_size_in_bytes"],
        host_bytes=sum(stats[f"host_{n}_size_in_bytes"] for n in ("argument", "output", "temp"))
        - stats["host_alias_size_in_bytes"],
        peak_bytes=peak,
        compiler_peak_bytes=stats["peak_memory_in_bytes"],
        fits=fits,
        needs_bytes=None if fits else peak,
        compile_seconds=answer["compile_seconds"],
        notes=notes,
        **common,
    )


def _xla_remat_count(hlo_text: str) -> int:
    return len(_XLA_REMAT.findall(hlo_text))


_XLA_REMAT = re.compile(r"^\s+(?:ROOT )?%[\w.\-]*\.remat\d*(?:\.[\w.\-]*)? = ", re.M)
_NEEDS = (
    re.compile(r"total memory required[^()]*\(([\d.]+[KMGTP]?)\) exceeds available HBM"),
    re.compile(r"Used ([\d.]+[KMGTP]?) of [\d.]+[KMGTP]? hbm", re.I),
    re.compile(r"Total hbm usage >= ([\d.]+[KMGTP]?)", re.I),
)


def _out_of_memory(message: str) -> dict[str, int | None] | None:
    """Read a compiler's complaint: None unless it is about the chip's main memory."""
    if "RESOURCE_EXHAUSTED" not in message or not re.search(r"hbm|out of memory", message, re.I):
        return None
    for pattern in _NEEDS:
        if found := pattern.search(message):
            return {"needs": _binary(found.group(1))}
    if re.search(r"\b[vs]mem\b", message, re.I):
        return None  # on-chip scratch memory: no chip of this kind has more
    return {"needs": None}


def _binary(text: str) -> int:
    powers = {unit: 2 ** (10 * power) for power, unit in enumerate("KMGTP", start=1)}
    return int(float(text.rstrip("KMGTP")) * powers.get(text[-1], 1))


def _shape_bytes(tree: Any) -> int:
    total = 0
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        total += leaf.size * leaf.dtype.itemsize
    return total


# -- the present device ---------------------------------------------------------------------

_RUN_SECONDS = 2.0
_MIN_RUNS, _MAX_RUNS = 3, 20


def _run_here(
    jitted: Any,
    args: Sequence[Any],
    chip: Target,
    options: Options,
    donate_argnums: int | Sequence[int],
    call: str,
) -> Compiled:
    abstract(args, call=call)
    values = materialise(args)
    shapes = _shape_bytes(abstract(args)), 0
    start = time.perf_counter()
    try:
        compiled = jitted.lower(*values).compile(compiler_options=options or None)
    except _jax.compile_failure_types() as error:
        if _out_of_memory(str(error)) is None:
            raise CompileError(
                f"`{call}(..., target='local')`: the compiler refused the program: {error}",
                hint="try it with plain `jax.jit`; if it works there, please report this",
            ) from error
        return Compiled(_memory({"refused": str(error)}, chip, False, shapes), None)
    answer = {
        "compile_seconds": time.perf_counter() - start,
        "memory": _jax.memory_stats_to_dict(compiled.memory_analysis()),
        "hlo": compiled.as_text() or "",
    }
    memory = _memory(answer, chip, False, shapes)
    donated = {donate_argnums} if isinstance(donate_argnums, int) else set(donate_argnums)
    return Compiled(_with_run(memory, compiled, values, donated), answer["hlo"])


def _with_run(memory: Memory, compiled: Any, values: tuple[Any, ...], donated: set[int]) -> Memory:
    device = jax.local_devices()[0]
    before = device.memory_stats() or {}
    try:
        seconds = _timed_runs(compiled, values, donated)
    except _jax.compile_failure_types() as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        note = "compiled, but ran out of memory while it ran"
        return dataclasses.replace(memory, fits=False, notes=(*memory.notes, note))
    after = device.memory_stats() or {}
    peak, note = _peak_between(before, after, memory.argument_bytes)
    return dataclasses.replace(
        memory,
        step_seconds=statistics.median(seconds),
        measured_peak_bytes=peak,
        notes=(*memory.notes, *note),
    )


def _timed_runs(compiled: Any, values: tuple[Any, ...], donated: set[int]) -> list[float]:
    seconds: list[float] = []
    begun = time.perf_counter()
    # The first run is a warm-up and is not kept.
    for run in range(_MAX_RUNS + 1):
        inputs = [jax.tree.map(_copy, v) if i in donated else v for i, v in enumerate(values)]
        jax.block_until_ready(inputs)
        start = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        if run:
            seconds.append(time.perf_counter() - start)
        if run >= _MIN_RUNS and time.perf_counter() - begun > _RUN_SECONDS:
            break
    return seconds


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, jax.Array) else value


def _peak_between(
    before: Mapping[str, int], after: Mapping[str, int], argument_bytes: int
) -> tuple[int | None, tuple[str, ...]]:
    """Read the allocator's peak, which is that of the whole process so far."""
    if "peak_bytes_in_use" not in after:
        return None, ()
    if after["peak_bytes_in_use"] <= before.get("peak_bytes_in_use", 0):
        return None, ("no measured peak: something earlier in this process used more memory",)
    others = max(0, before.get("bytes_in_use", 0) - argument_bytes)
    return int(after["peak_bytes_in_use"]) - others, ()
