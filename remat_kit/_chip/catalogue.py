"""The known chips: their memory, rates and compiler options.

If the CUDA plugin is installed, the specifications of NVIDIA GPUs are read from it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from remat_kit._chip.cache import default_cache, key_of

GIB = 2**30


GB = 10**9


TERA = 1e12


ETHERNET = 12.5e9 / 8  # 100 Gbit/s for eight devices


Options = Mapping[str, str | int | bool]


# -- TPUs -----------------------------------------------------------------------------------
# The memory is the limit that the compiler enforces for each device. The rates are Google's for a
# chip, halved if a chip is two devices. Google does not publish the link to the host, so we assume
# PCIe of the generation of the host.
#
# The rate of the links between chips (ICI) is the one along one axis of the slice, over the two
# links of the axis, in one direction of data:
# - v5e, v5p, v6e, TPU7x: the bidirectional bandwidth of a chip by its number of ports, which is
#   400 GB/s by 4, 1200 by 6, 800 by 4 and 1200 by 6 (docs.cloud.google.com/tpu/docs/v5e, v5p, v6e,
#   and Google's announcement of Ironwood: 9.6 Tbit/s).
# - v4: 50 GB/s for each link and direction (Jouppi et al., "TPU v4", ISCA 2023, table 4).
# - v3: 82 GB/s, so that the 4 links of 1024 chips have the 340 TB/s of all-reduce of a pod in
#   docs.cloud.google.com/tpu/docs/v3. The paper about v4 has 70 GB/s, and Google DeepMind's "How to
#   Scale Your Model" 100.
# - v2: 500 Gbit/s (Norrie et al., "The design process for Google's training chips", 2021).
# For v4, v5e, v5p and v6e, "How to Scale Your Model" has a tenth less.
#
# The memory of a host is that of Google's virtual machines, by their devices. Their GB are GiB: 340
# for ct3-hightpu-4t, 407 for ct4p-hightpu-4t, 384 for ct5lp-hightpu-8t, 448 for ct5p-hightpu-4t,
# 1440 for ct6e-standard-8t and 960 for tpu7x-standard-4t (`gcloud compute machine-types list` and
# docs.cloud.google.com/compute/docs/tpus/tpu-machines). That of v2 is assumed to be that of v3.


@dataclass(frozen=True)
class _Tpu:
    topology: str
    memory_gib: float
    bandwidth: float
    flops: Mapping[str, float]
    host_bandwidth: float
    description: str
    ici: float
    host_memory_bytes: int
    devices_per_chip: int = 1

    @property
    def kind(self) -> str:
        """The name of the kind in libtpu's names of topologies."""
        return self.topology.partition(":")[0]

    @property
    def axes(self) -> int:
        """The number of axes of its slices."""
        return 1 + self.topology.partition(":")[2].count("x")


def _tpu_flops(bfloat16: float, *, narrow: str = "", times: float = 2) -> dict[str, float]:
    rates = {"bfloat16": bfloat16 * TERA, "float32": bfloat16 * TERA}
    return rates | ({narrow: times * bfloat16 * TERA} if narrow else {})


TPUS: dict[str, _Tpu] = {
    "tpu-v2": _Tpu(
        *("v2:2x2", 7.48, 350e9, _tpu_flops(23), 16e9, "TPU v2, one core of two"),
        ici=62e9,
        host_memory_bytes=340 * GIB // 8,
        devices_per_chip=2,
    ),
    "tpu-v3": _Tpu(
        *("v3:2x2", 15.48, 450e9, _tpu_flops(61.5), 16e9, "TPU v3, one core of two"),
        ici=82e9,
        host_memory_bytes=340 * GIB // 8,
        devices_per_chip=2,
    ),
    "tpu-v4": _Tpu(
        *("v4:2x2x1", 30.75, 1228e9, _tpu_flops(275, narrow="int8", times=1), 16e9),
        "TPU v4, megacore",
        ici=100e9,
        host_memory_bytes=407 * GIB // 4,
    ),
    "tpu-v5e": _Tpu(
        *("v5e:1x1", 15.75, 819e9, _tpu_flops(197, narrow="int8"), 32e9, "TPU v5e"),
        ici=100e9,
        host_memory_bytes=384 * GIB // 8,
    ),
    "tpu-v5p": _Tpu(
        *("v5p:2x2x1", 95.73, 2765e9, _tpu_flops(459, narrow="int8"), 32e9, "TPU v5p"),
        ici=200e9,
        host_memory_bytes=448 * GIB // 4,
    ),
    "tpu-v6e": _Tpu(
        *("v6e:1x1", 31.24, 1640e9, _tpu_flops(918, narrow="int8"), 32e9, "TPU v6e"),
        ici=200e9,
        host_memory_bytes=1440 * GIB // 8,
    ),
    "tpu-7x": _Tpu(
        *("tpu7x:1x1x1", 94.74, 3690e9, _tpu_flops(1153.5, narrow="float8"), 64e9),
        "TPU7x, one core of two",
        ici=100e9,
        host_memory_bytes=960 * GIB // 8,
        devices_per_chip=2,
    ),
}


# By the kind in a topology's name: options of `get_topology_desc`.
TOPOLOGY_OPTIONS: dict[str, dict[str, str]] = {"v4": {"chip_config_name": "megacore"}}


# -- NVIDIA GPUs ----------------------------------------------------------------------------
# The compiler needs a description of the GPU. The newest CUDA plugin contains the descriptions of
# most data-centre GPUs as text, which this module reads when they are needed. The other GPUs, and
# all GPUs for an older plugin, are described here. The peak rates are those in the vendor's data
# sheets, for dense matrices.


@dataclass(frozen=True)
class Gpu:
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


GPUS: dict[str, Gpu] = {
    "p100": Gpu("Tesla P100-SXM2-16GB", 17066885120, 732e9, _rates(10.6, 21.2, f64=5.3), 16e9),
    "v100": Gpu("Tesla V100-SXM2-16GB", 16935682048, 898e9, _rates(15.7, 125, f64=7.8), 16e9),
    "a100-40g": Gpu("NVIDIA A100-SXM4-40GB", 42331013120, 1555e9, _A100, 32e9),
    "a100-80g": Gpu("NVIDIA A100-SXM4-80GB", 85100068864, 2039e9, _A100, 32e9),
    "a100-80g-pcie": Gpu("NVIDIA A100 80GB PCIe", 79050250240, 1935e9, _A100, 32e9),
    "a6000": Gpu(
        "NVIDIA RTX A6000", 51041271808, 768e9, _rates(38.7, 154.8, tf32=77.4, int8=309.7), 32e9
    ),
    "rtx-pro-6000": Gpu(
        "NVIDIA RTX PRO 6000 Blackwell",
        103079215104,
        1792e9,
        _rates(125, 503.8, tf32=251.9, fp8=1007.6, int8=1007.6),
        64e9,
    ),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 84942979072, 3352e9, _HOPPER, 64e9),
    "h100-pcie": Gpu(
        "NVIDIA H100 PCIe",
        84942979072,
        2039e9,
        _rates(51.2, 756, tf32=378, f64=51.2, fp8=1513, int8=1513),
        64e9,
    ),
    "h200": Gpu("NVIDIA H200 141GB HBM3e", 151397597184, 4800e9, _HOPPER, 64e9),
    "b200": Gpu(
        "NVIDIA B200",
        191514411008,
        7672e9,
        _rates(75, 2250, tf32=1125, f64=37, fp8=4500, int8=4500),
        64e9,
    ),
    "b300": Gpu(
        "NVIDIA B300", 297021865984, 7936e9, _rates(75, 2250, tf32=1125, f64=1.2, fp8=4500), 64e9
    ),
    "gb200": Gpu(
        "NVIDIA GB200",
        197897748480,
        7928e9,
        _rates(80, 2500, tf32=1250, f64=40, fp8=5000, int8=5000),
        450e9,
    ),
    "gb300": Gpu(
        "NVIDIA GB300", 297021079552, 7928e9, _rates(80, 2500, tf32=1250, f64=1.3, fp8=5000), 450e9
    ),
    "v100-32g": Gpu("Tesla V100-SXM2-32GB", 34089730048, 898e9, _rates(15.7, 125, f64=7.8), 16e9),
    "t4": Gpu("Tesla T4", 15843721216, 320e9, _rates(8.1, 65, int8=130), 16e9),
    "l4": Gpu(
        "NVIDIA L4", 23821418496, 300e9, _rates(30.3, 121, tf32=60, fp8=242.5, int8=242.5), 32e9
    ),
    "a10g": Gpu("NVIDIA A10G", 23835181056, 600e9, _rates(35, 70, tf32=35, int8=140), 32e9),
    "rtx4090": Gpu(
        "NVIDIA GeForce RTX 4090",
        25393692672,
        1008e9,
        _rates(82.6, 165.2, tf32=82.6, fp8=330.3, int8=660.6),
        32e9,
    ),
}


@dataclass(frozen=True)
class Links:
    """How the GPUs of one kind are connected, and the memory of their host.

    Attributes:
        nvlink: bytes/s that a GPU sends over NVLink to the other GPUs of its host, in one
            direction; 0 if GPUs of one host are connected by PCIe alone.
        network: bytes/s that a GPU sends over the network between hosts, in one direction.
        host_memory_bytes: the memory of the host by its GPUs; None if there is no reference system.
        hosts_of: the number of GPUs of the reference system that are connected by NVLink.
    """

    nvlink: float = 0.0
    network: float = ETHERNET
    host_memory_bytes: int | None = None
    hosts_of: int = 8


# NVLink: NVIDIA's data sheets of the cards, of which a half is one direction: 160 GB/s for P100,
# 300 for V100, 600 for A100, 900 for H100 and H200, 1800 for B200, B300, GB200 and GB300. Network
# and host memory, whose modules have binary sizes, of eight GPUs:
# - DGX-1: four ports of 100 Gbit/s, 512 GB (NVIDIA's white paper WP-08437 and blog).
# - DGX A100: eight ports of 200 Gbit/s, 1 TB with 40 GB cards, 2 TB with 80 GB cards (user guide).
# - DGX H100 and H200: eight of 400 Gbit/s, 2 TB (NVIDIA's and Dell's systems in MLPerf inference).
# - DGX B200: eight of 400 Gbit/s, 2 TB (docs.nvidia.com/dgx/dgxb200-user-guide).
# - DGX B300: eight of 800 Gbit/s (user guide); the memory is assumed to be that of DGX B200.
# - GB200 NVL72: 400 Gbit/s for each GPU (Crusoe's system in MLPerf inference 6.1); GB300 NVL72:
#   800 Gbit/s (docs.nvidia.com/enterprise-reference-architectures/nvl72-ai-factory). 480 GB for two
#   GPUs (nvidia.com/en-us/data-center/gb200-nvl72).
# - T4, A10G and L4: the EC2 instances g4dn.metal (384 GiB), g5.48xlarge and g6.48xlarge (768 GiB),
#   with 100 Gbit/s (aws.amazon.com/ec2/instance-types).
# For the others no system is the usual one; 100 Gbit/s for eight GPUs is assumed.
LINKS: dict[str, Links] = {
    "p100": Links(80e9, 4 * 12.5e9 / 8, 512 * GIB // 8),
    "v100": Links(150e9, 4 * 12.5e9 / 8, 512 * GIB // 8),
    "v100-32g": Links(150e9, 4 * 12.5e9 / 8, 512 * GIB // 8),
    "a100-40g": Links(300e9, 25e9, 1024 * GIB // 8),
    "a100-80g": Links(300e9, 25e9, 2048 * GIB // 8),
    "h100": Links(450e9, 50e9, 2048 * GIB // 8),
    "h200": Links(450e9, 50e9, 2048 * GIB // 8),
    "b200": Links(900e9, 50e9, 2048 * GIB // 8),
    "b300": Links(900e9, 100e9, 2048 * GIB // 8),
    "gb200": Links(900e9, 50e9, 480 * GB // 2, hosts_of=72),
    "gb300": Links(900e9, 100e9, 480 * GB // 2, hosts_of=72),
    "t4": Links(0.0, 12.5e9 / 8, 384 * GIB // 8),
    "a10g": Links(0.0, 12.5e9 / 8, 768 * GIB // 8),
    "l4": Links(0.0, 12.5e9 / 8, 768 * GIB // 8),
}


# The memory of their hosts is assumed, as said above.
ASSUMED_HOSTS = ("tpu-v2", "b300")


@dataclass(frozen=True)
class _Silicon:
    """What the compiler must know about a GPU, where the plugin does not describe it."""

    capability: tuple[int, int]
    cores: int
    clock_ghz: float
    l2_bytes: int
    shared_per_core: int
    shared_optin: int
    threads_per_core: int
    lanes_per_core: int
    accelerated: bool = False  # the compiler may use instructions of this architecture alone

    def text(self, gpu: Gpu) -> str:
        major, minor = self.capability
        extension = "ACCELERATED_FEATURES" if self.accelerated else "NONE"
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_per_core} threads_per_core_limit: {self.threads_per_core}
  core_count: {self.cores} fpus_per_core: {self.lanes_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(gpu.bandwidth)} l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz} device_memory_size: {gpu.memory_bytes}
  shared_memory_per_block_optin: {self.shared_optin}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{gpu.description}"
"""


MIB = 2**20


_A100_SILICON = _Silicon((8, 0), 108, 1.41, 40 * MIB, 167936, 166912, 2048, 64)
_H100_SILICON = _Silicon((9, 0), 132, 1.98, 50 * MIB, 233472, 232448, 2048, 128, accelerated=True)
_B200_SILICON = replace(
    _H100_SILICON, capability=(10, 0), cores=148, clock_ghz=1.965, l2_bytes=253 * MIB // 2
)
_GB200_SILICON = replace(_B200_SILICON, cores=152, clock_ghz=2.062, l2_bytes=517 * MIB // 4)
_GB300_SILICON = replace(_GB200_SILICON, capability=(10, 3), clock_ghz=2.07)


# The plugins of jax 0.10 and 0.11 contain no description of a GPU; that of jax 0.12 describes all
# of these but the last five, with these numbers.
SILICON: dict[str, _Silicon] = {
    "p100": _Silicon((6, 0), 56, 1.4805, 4 * MIB, 65536, 49152, 2048, 64),
    "v100": _Silicon((7, 0), 80, 1.53, 6 * MIB, 98304, 98304, 2048, 64),
    "a100-40g": _A100_SILICON,
    "a100-80g": _A100_SILICON,
    "a100-80g-pcie": replace(_A100_SILICON, clock_ghz=1.1105),
    "a6000": _Silicon((8, 6), 84, 1.8, 6 * MIB, 102400, 101376, 1536, 128),
    "rtx-pro-6000": _Silicon((12, 0), 188, 2.6, 128 * MIB, 131072, 101376, 1536, 128),
    "h100": _H100_SILICON,
    "h100-pcie": replace(_H100_SILICON, cores=114, clock_ghz=1.755),
    "h200": _H100_SILICON,
    "b200": _B200_SILICON,
    "b300": replace(_GB300_SILICON, cores=158, clock_ghz=1.965, accelerated=False),
    "gb200": _GB200_SILICON,
    "gb300": _GB300_SILICON,
    "v100-32g": _Silicon((7, 0), 80, 1.53, 6 * MIB, 98304, 98304, 2048, 64),
    "t4": _Silicon((7, 5), 40, 1.59, 4 * MIB, 65536, 65536, 1024, 64),
    "l4": _Silicon((8, 9), 58, 2.04, 48 * MIB, 102400, 101376, 1536, 128),
    "a10g": _Silicon((8, 6), 80, 1.71, 6 * MIB, 102400, 101376, 1536, 128),
    "rtx4090": _Silicon((8, 9), 128, 2.52, 72 * MIB, 102400, 101376, 1536, 128),
}


REFUSED = re.compile(r"mi\d{3}\w*|gfx\w+|arc\b.*|.*\bmax-?1100|radeon.*|instinct.*", re.I)


def cuda_plugin() -> Path | None:
    """Return the path of the library of the installed CUDA plugin, or None."""
    for name in ("xla_cuda13", "xla_cuda12"):
        try:
            found = importlib.util.find_spec(f"jax_plugins.{name}")
        except Exception:  # there is none, or importing it fails
            continue
        for folder in (found.submodule_search_locations or []) if found else []:
            library = Path(folder) / "xla_cuda_plugin.so"
            if library.exists() and library.stat().st_size:
                return library
    return None


def embedded_specs() -> dict[str, str]:
    """Return the GPU descriptions inside the CUDA plugin, by the name that we give them."""
    library = cuda_plugin()
    if library is None:
        return {}
    try:
        status = library.stat()
        return _scan(library, status.st_size, status.st_mtime_ns)
    except (OSError, ValueError):  # the library cannot be read, or is empty
        return {}


@functools.cache
def _scan(library: Path, size: int, mtime_ns: int) -> dict[str, str]:
    cache = default_cache()
    key = key_of("cuda specs 1", str(size), str(mtime_ns))
    if (known := _checked_specs(cache.get(key))) is not None:
        return known
    specs = dict(_read_specs(library))
    cache.put(key, json.dumps(specs).encode())
    return specs


def _checked_specs(data: bytes | None) -> dict[str, str] | None:
    try:
        specs = json.loads(data) if data is not None else None
    except (ValueError, RecursionError):
        return None
    whole = isinstance(specs, dict) and all(isinstance(text, str) for text in specs.values())
    return specs if whole else None


def _read_specs(library: Path) -> list[tuple[str, str]]:
    by_description = {gpu.description: name for name, gpu in GPUS.items()}
    found = []
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(b"gpu_device_info {")
        while at >= 0:
            end = data.find(b"\0", at)
            text = data[data.rfind(b"\0", 0, at) + 1 : end].decode("utf-8", "replace")
            # A description of another vendor's GPU would abort the process.
            if text_field(text, "platform_name") == "CUDA":
                description = text_field(text, "device_description_str")
                found.append((by_description.get(description) or _slug(description), text))
            at = data.find(b"gpu_device_info {", end)
    return found


def _slug(description: str) -> str:
    words = [w for w in description.split() if w not in ("NVIDIA", "Tesla", "80GB", "HBM3")]
    return "-".join(words).lower()


def text_field(text: str, name: str) -> str:
    found = re.search(rf'\b{name}: "([^"]*)"', text)
    return found.group(1) if found else ""


def number_field(text: str, name: str) -> float:
    found = re.search(rf"\b{name}: ([\d.]+)", text)
    return float(found.group(1)) if found else 0.0


# Keys of the rate table in the plugin: XLA's numbers for the element types.
_XLA_TYPES = {10: "float16", 11: "tensorfloat32", 12: "float64", 16: "bfloat16", 19: "float8"}


def teraflops_of(text: str) -> dict[str, float]:
    """Return the peak rates that a description implies, in TFLOP/s by dtype."""
    cores = number_field(text, "core_count")
    lanes = number_field(text, "fpus_per_core")
    rates = {"float32": 2e-3 * cores * lanes * number_field(text, "clock_rate_ghz")}
    _, _, matrix = text.partition("matrix_unit_description {")
    entry = re.compile(
        r"key: (\d+)\s+value \{\s+clock_rate_ghz: ([\d.]+)\s+units_per_core: (\d+)\s+"
        r"ops_per_clock: (\d+)"
    )
    for kind, clock, units, ops in entry.findall(matrix):
        if name := _XLA_TYPES.get(int(kind)):
            rates[name] = 2e-3 * cores * float(clock) * int(units) * int(ops)
    return rates
