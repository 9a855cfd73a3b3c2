"""Convert a traced program to bytes that another process can compile, and read the result.

The parent process lowers a program, and a child process compiles it. `worker` loads this module
and `_jax` on their own, so this module imports nothing else of the package.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_kit._jax import (
    MEMORY_FIELDS,
    compiler,
    ir,
    mlir,
    partitioned,
    xla_client,
)


@dataclasses.dataclass(frozen=True)
class ProgramMesh:
    """A mesh that a lowered program names.

    Attributes:
        axes: the names and sizes of its axes, in order.
        order: the logical number of the device at each place of the mesh, or None if the places are
            numbered in order.
    """

    axes: tuple[tuple[str, int], ...]
    order: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program for one platform, ready to be compiled in another process.

    Attributes:
        bytecode: MLIR, including the locations that become `op_name` and source lines, and the
            attributes for donation and memory kinds.
        identity: a hash that is equal for equal programs, whichever function asked for them.
        devices: the number of devices over which the program is partitioned.
        meshes: the meshes over all of these devices that the program names, the main one first.
        unsharded: for each argument and each result of the compiled program, whether the compiler
            may choose its sharding. They are what JAX passes to the compiler.
        shard_bytes: of a partitioned program, the bytes of its arguments and of its results on one
            device by their shardings. What has no sharding counts as split over all devices.
    """

    bytecode: bytes
    identity: str
    devices: int
    meshes: tuple[ProgramMesh, ...] = ()
    unsharded: tuple[tuple[bool, ...], tuple[bool, ...]] = ((), ())
    shard_bytes: tuple[int, int] = (0, 0)


def lower(traced: Any, platform: str, boundary: Sequence[str]) -> Lowered:
    """Lower the result of `jax.jit(f).trace(...)` for ``platform``.

    The plugin of the platform need not be installed. ``boundary`` names source files: their stack
    frames, and the frames that called them, do not count in the identity. The function uses
    `mlir.module_to_bytecode` and the printed form of locations: jax 0.10.2, 0.12.
    """
    lowered = traced.lower(lowering_platforms=(platform,))
    module = lowered.compiler_ir("stablehlo")
    attributes = module.operation.attributes
    devices = int(attributes["mhlo.num_partitions"]) if "mhlo.num_partitions" in attributes else 1
    text = module.operation.get_asm(enable_debug_info=True)
    identity = _identity(text, tuple(boundary))
    bytecode = mlir.module_to_bytecode(module)
    if devices == 1:
        return Lowered(bytecode, identity, devices)
    meshes = tuple(m for m in _meshes(module) if math.prod(n for _, n in m.axes) == devices)
    parts = partitioned(lowered)
    sizes = tuple(
        sum(_shard_bytes(aval, sharding, devices) for aval, sharding in pairs)
        for pairs in (parts.arguments, parts.results)
    )
    return Lowered(bytecode, identity, devices, meshes, parts.unsharded, sizes)  # pyright: ignore


def _shard_bytes(aval: Any, sharding: Any, devices: int) -> int:
    if sharding is None:
        return nbytes(aval) // devices
    return nbytes(jax.ShapeDtypeStruct(sharding.shard_shape(aval.shape), aval.dtype))


def nbytes(struct: Any) -> int:
    """Return the bytes of an array with this shape and dtype, which may be that of keys."""
    if jnp.issubdtype(struct.dtype, jax.dtypes.prng_key):
        struct = jax.eval_shape(jax.random.key_data, struct)
    return struct.size * struct.dtype.itemsize


_AXIS = re.compile(r'"([^"]*)"=(\d+)')


_ORDER = re.compile(r"device_ids=\[([\d, ]*)\]")


def _meshes(module: Any) -> list[ProgramMesh]:
    """Return the meshes that Shardy's part of a module names; seen on jax 0.10.2, 0.12."""
    found = []
    for operation in module.body.operations:
        if operation.operation.name != "sdy.mesh":
            continue
        text = str(operation).partition("{stablehlo.mesh")[0]
        order = _ORDER.search(text)
        ids = tuple(map(int, order.group(1).split(","))) if order else None
        found.append(ProgramMesh(tuple((a, int(n)) for a, n in _AXIS.findall(text)), ids))
    return list(dict.fromkeys(found))


_LOCATION = re.compile(r"^#loc(\d*) = loc\((.*)\)$\n?", re.M)


_LOCATION_USE = re.compile(r"#loc(\d*)")


_CALL_SITE = re.compile(r"callsite\(#loc(\d*) at #loc(\d*)\)")


def _identity(text: str, boundary: tuple[str, ...]) -> str:
    """Hash a printed module, with locations cut off where a frame of a boundary file begins."""
    definitions = dict(_LOCATION.findall(text))
    known: dict[str, str | None] = {}

    def canonical(number: str) -> str | None:
        if number not in known:
            known[number] = resolve(definitions.get(number, "unknown"))
        return known[number]

    def resolve(definition: str) -> str | None:
        if site := _CALL_SITE.fullmatch(definition):
            callee, caller = canonical(site.group(1)), canonical(site.group(2))
            parts = callee if caller is None else f"{callee} at {caller}"
            return None if callee is None else _digest(parts or "")
        if definition.startswith(tuple(f'"{file}"' for file in boundary)):
            return None
        used = [canonical(number) for number in _LOCATION_USE.findall(definition)]
        name = _LOCATION_USE.sub("", definition)
        is_name_stack = "/" in name or name.startswith('"jit(')
        if None in used and not is_name_stack:
            return None
        return _digest(name + " ".join(str(part) for part in used))

    body = _LOCATION.sub("", text)
    body = _LOCATION_USE.sub(lambda use: f"#{canonical(use.group(1))}", body)
    return hashlib.sha256(body.encode()).hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def topology_devices(platform: str, topology: str, options: dict[str, Any]) -> list[Any]:
    """Return the compile-only devices of a topology, or this process's devices for ``cpu``.

    `get_topology_desc` is experimental; its interface is the same in jax 0.10.2 and 0.12.
    """
    if platform == "cpu":
        return list(jax.devices("cpu"))
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(topology, platform, **options).devices)


def assigned(devices: Sequence[Any], mesh_shape: Sequence[int]) -> list[Any]:
    """Return devices in the order in which `jax.make_mesh` puts them into a mesh of this shape.

    Its order suits the links between the chips. If it finds none, the devices are taken in their
    own order. `create_device_mesh` is the same in jax 0.10.2 and 0.12.
    """
    from jax.experimental import mesh_utils

    try:
        placed = mesh_utils.create_device_mesh(
            tuple(mesh_shape), devices, allow_split_physical_axes=True
        )
    except (NotImplementedError, ValueError, AssertionError):
        return list(devices)
    return list(np.asarray(placed).flat)


# Settings that `get_compile_options` reads from the process that compiles: jax 0.10.2, 0.12.
COMPILE_SETTINGS = (
    "jax_disable_most_optimizations",
    "jax_memory_fitting_level",
    "jax_optimization_level",
    "jax_use_shardy_partitioner",
    "jax_compiler_enable_remat_pass",
)


def compile_settings() -> dict[str, Any]:
    """Return the settings of this process that change the compile options."""
    names = [name for name in COMPILE_SETTINGS if name in jax.config.values]
    found = {name: getattr(jax.config, name, jax.config.values[name]) for name in names}
    return {name: getattr(value, "value", value) for name, value in found.items()}


def apply_compile_settings(settings: dict[str, Any]) -> None:
    """Apply the settings of another process, as `compile_settings` returned them."""
    for name, value in settings.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)


def compile_bytes(
    program: bytes,
    devices: Sequence[Any],
    options: dict[str, str],
    unsharded: tuple[Sequence[bool], Sequence[bool]] = ((), ()),
) -> Any:
    """Compile MLIR bytecode for ``devices`` (compile-only or real) and return the executable.

    The compile options are those of `jit(f).lower(...).compile()` for committed arguments.
    `backend_compile_and_load` works with both kinds of client, the compile-only one that JAX is
    about to remove and the real one: jax 0.10.2, 0.12.

    Args:
        program: the module.
        devices: one for each partition, in the order of the program's mesh.
        options: for the compiler.
        unsharded: of a partitioned program, as in `Lowered`.
    """
    with mlir.make_ir_context():
        module = ir.Module.parse(program)
    client = devices[0].client
    compile_options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([list(devices)]),
        env_options_overrides=dict(options),
        backend=client,
    )
    if len(devices) > 1:
        build = compile_options.executable_build_options
        build.allow_spmd_sharding_propagation_to_parameters = list(unsharded[0])
        build.allow_spmd_sharding_propagation_to_output = list(unsharded[1])
    where = xla_client.DeviceList(tuple(devices))
    return compiler.backend_compile_and_load(client, module, where, compile_options, [])


def executable_text(executable: Any) -> str:
    """Return the optimized, scheduled HLO of an executable. Seen on jax 0.10.2, 0.12."""
    return "\n\n".join(m.to_string() for m in executable.hlo_modules())


def executable_memory(executable: Any) -> dict[str, int]:
    """Return the byte counts of an executable. Seen on jax 0.10.2, 0.12."""
    return memory_stats_to_dict(executable.get_compiled_memory_stats())


def memory_stats_to_dict(stats: Any) -> dict[str, int]:
    """Return the integer fields of `CompiledMemoryStats` that exist in every release."""
    return {name: int(getattr(stats, name, 0)) for name in MEMORY_FIELDS}


def compile_failure_types() -> tuple[type[BaseException], ...]:
    """Return the exceptions that the compiler raises when it refuses a program."""
    return (jax.errors.JaxRuntimeError,)
