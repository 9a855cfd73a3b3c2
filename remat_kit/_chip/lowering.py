"""Convert a traced program to bytes that another process can compile, and read the result.

The parent process lowers a program, and a child process compiles it. `worker` loads this module
and `_jax` on their own, so this module imports nothing else of the package.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from remat_kit._jax import MEMORY_FIELDS, compiler, ir, mlir, xla_client


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program for one platform, ready to be compiled in another process.

    Attributes:
        bytecode: MLIR, including the locations that become `op_name` and source lines, and the
            attributes for donation and memory kinds.
        identity: a hash that is equal for equal programs, whichever function asked for them.
        devices: the number of devices over which the program is partitioned.
    """

    bytecode: bytes
    identity: str
    devices: int


def lower(traced: Any, platform: str, boundary: Sequence[str]) -> Lowered:
    """Lower the result of `jax.jit(f).trace(...)` for ``platform``.

    The plugin of the platform need not be installed. ``boundary`` names source files: their stack
    frames, and the frames that called them, do not count in the identity. The function uses
    `mlir.module_to_bytecode` and the printed form of locations: jax 0.10.2, 0.12.
    """
    module = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    attributes = module.operation.attributes
    devices = int(attributes["mhlo.num_partitions"]) if "mhlo.num_partitions" in attributes else 1
    text = module.operation.get_asm(enable_debug_info=True)
    identity = _identity(text, tuple(boundary))
    return Lowered(mlir.module_to_bytecode(module), identity, devices)


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


def topology_device(platform: str, topology: str, options: dict[str, Any]) -> Any:
    """Return a compile-only device, or this machine's device for ``cpu``.

    `get_topology_desc` is experimental; its interface is the same in jax 0.10.2 and 0.12.
    """
    if platform == "cpu":
        return jax.devices("cpu")[0]
    from jax.experimental import topologies

    return topologies.get_topology_desc(topology, platform, **options).devices[0]


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


def compile_bytes(program: bytes, device: Any, options: dict[str, str]) -> Any:
    """Compile MLIR bytecode for ``device`` (compile-only or real) and return the executable.

    The compile options are those of `jit(f).lower(...).compile()` for one committed device.
    `backend_compile_and_load` works with both kinds of client, the compile-only one that JAX is
    about to remove and the real one: jax 0.10.2, 0.12.
    """
    with mlir.make_ir_context():
        module = ir.Module.parse(program)
    compile_options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=1,
        device_assignment=np.array([[device]]),
        env_options_overrides=dict(options),
        backend=device.client,
    )
    devices = xla_client.DeviceList((device,))
    return compiler.backend_compile_and_load(device.client, module, devices, compile_options, [])


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
