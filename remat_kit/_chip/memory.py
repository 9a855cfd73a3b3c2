"""The memory that a compiled program needs, in bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remat_kit._units import format_apart, format_bytes


def kind_of(target: str) -> str:
    """Return the kind of chip in the name of a target.

    >>> kind_of("h100:8@40GiB"), kind_of("cpu")
    ('h100', 'cpu')
    """
    return target.partition("@")[0].partition(":")[0]


# -- answers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """The memory that one compiled program needs on one chip; `measure` returns it.

    The byte counts are those of `jax.stages.Compiled.memory_analysis`.

    >>> import jax, jax.numpy as jnp
    >>> from remat_kit import measure
    >>> w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> memory = measure(lambda w: jnp.sum(jnp.sin(w)), w, target="cpu")
    >>> memory.argument_bytes, memory.fits, memory.headroom_bytes > 0
    (262144, True, True)

    Attributes:
        target: the name of the chip.
        argument_bytes: the arguments, in the layout of the chip.
        output_bytes: the results.
        alias_bytes: results that take over the memory of donated arguments.
        temp_bytes: the temporaries; None if the program did not compile.
        code_bytes: the machine code. The compiler for TPUs counts it against the chip's memory.
            None if it generated none: the planner stops the compiler before the code.
        host_bytes: arguments, results and temporaries in the host's memory.
        peak_bytes: on the device: arguments + results − aliased + temporaries. If the program does
            not fit, the bytes that it needs according to the compiler, or None.
        compiler_peak_bytes: the compiler's own figure, which includes the host's memory; None if it
            generated no machine code.
        memory_bytes: the memory of the chip.
        fits: whether the compiler accepted the program and its peak is at most the memory of the
            chip, to the byte.
        needs_bytes: the bytes that a program that does not fit needs according to the compiler, or
            None.
        compile_seconds: how long compiling took when it was done.
        cached: whether the answer came from the cache.
        versions: of everything that took part.
        notes: what the reader must know about these numbers.
        step_seconds: median time of several runs; for ``local`` only.
        measured_peak_bytes: the allocator's peak during the runs; for ``local`` only, if the
            allocator records it.
        devices: over how many devices the program is partitioned. All figures are those of one of
            them.
        mesh: the axes of the program's mesh and their sizes; empty if it runs on one device, or the
            program names no mesh.
        optimizer_bytes: the optimizer's state, which is part of the arguments; None if no optimizer
            is given.
        adamw_bytes: what the state of AdamW would add to the gradients of a loss; None if an
            optimizer is given or the function is a whole step.
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
    optimizer_bytes: int | None = None
    adamw_bytes: int | None = None
    devices: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def optimizer_note(self) -> str | None:
        """A sentence about the missing optimizer, if the figures are of the gradients alone."""
        if self.adamw_bytes is None:
            return None
        return (
            "no optimizer is counted: the state of AdamW would add "
            f"{format_bytes(self.adamw_bytes)} ({self.adamw_bytes} bytes); optimizer= "
            "(--optimizer) counts one"
        )

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The notes, and a sentence about the missing optimizer."""
        return (*self.notes, *filter(None, [self.optimizer_note]))

    @property
    def headroom_bytes(self) -> int | None:
        """Memory left over in bytes: negative exactly if the program does not fit.

        None if the program does not fit and nobody says by how much.
        """
        if self.peak_bytes is None:
            return None
        left = self.memory_bytes - self.peak_bytes
        return None if left >= 0 and not self.fits else left

    @property
    def on_cpu(self) -> bool:
        """Whether the target is a CPU, whose memory is the host's."""
        return kind_of(self.target) == "cpu"

    def drops_offload(self, offloaded_bytes: int) -> bool:
        """Tell whether the compiled program leaves most of what it should offload on the device.

        >>> import jax, jax.numpy as jnp
        >>> from remat_kit import measure
        >>> memory = measure(jnp.sum, jax.ShapeDtypeStruct((4,), jnp.float32), target="cpu")
        >>> memory.drops_offload(2**20)  # a CPU has no other memory to offload to
        False

        Args:
            offloaded_bytes: the bytes that the traced program offloads.
        """
        host = self.host_bytes
        # The traced program has the bytes of all devices. A value of which each device holds a copy
        # is allowed to hide a part that stayed on the device.
        total = None if host is None else host * self.devices
        return not self.on_cpu and total is not None and 2 * total < offloaded_bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        plain = dataclasses.asdict(self) | {"headroom_bytes": self.headroom_bytes}
        return plain | {
            "notes": list(self.all_notes),
            "versions": dict(self.versions),
            "mesh": dict(self.mesh),
        }

    def __str__(self) -> str:
        note = self.optimizer_note
        return self._figures() + (f"\nnote: {note}" if note else "")

    def _figures(self) -> str:
        if not self.fits:
            if self.headroom_bytes is None:
                return f"{self.target}: does not fit: needs more, has {self._has}{self._each}"
            needed, has = format_apart(self.peak_bytes or 0, self.memory_bytes)
            return f"{self.target}: does not fit: needs {needed}, has {has}{self._each}"
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
        return f"{self.target}: {peak} of {self._has}{self._each} ({sum_}){host}{step}"

    @property
    def _has(self) -> str:
        return format_bytes(self.memory_bytes)

    @property
    def _each(self) -> str:
        return f" on each of {self.devices} devices" if self.devices > 1 else ""


def temporaries(memory: Memory) -> int | None:
    """Return the bytes of a program's temporaries.

    If the compiler refuses the program because the chip has too little memory, the function takes
    the bytes that the compiler says the program needs, less its arguments and results.
    """
    if memory.temp_bytes is not None or memory.needs_bytes is None:
        return memory.temp_bytes
    return max(0, memory.needs_bytes - memory.argument_bytes - memory.output_bytes)
