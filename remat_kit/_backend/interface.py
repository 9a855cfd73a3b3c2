"""What the planner and the inspector ask about a compiler, and about the rates of its chip."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from remat_kit._backend import facts as _facts
from remat_kit._backend import fusion as _fusion
from remat_kit._backend import rewrites as _rewrites
from remat_kit._backend.facts import Fact
from remat_kit._backend.fusion import FusionFlow, Layout
from remat_kit._program import ops as _ops
from remat_kit._program.ops import is_fusible, is_rounding
from remat_kit._program.program import primitive_name


class Chip(Protocol):
    """The attributes of a `Target` that cost estimates use: bytes/s and FLOP/s by dtype."""

    @property
    def platform(self) -> str: ...
    @property
    def bandwidth_bytes_per_second(self) -> float: ...
    @property
    def host_bandwidth_bytes_per_second(self) -> float: ...
    @property
    def flops_per_second(self) -> Mapping[str, float]: ...


# The rates that stand for a dtype, best first. JAX's default precision lets an NVIDIA GPU round
# float32 operands to TensorFloat-32.
_RATES = {
    "float32": ("tensorfloat32", "float32"),
    "float16": ("float16", "bfloat16"),
    "bfloat16": ("bfloat16", "float16"),
}


def peak_rate(chip: Chip, dtype: str) -> float:
    """Return a chip's peak rate in FLOP/s for matrix products of a dtype.

    A dtype without a rate of its own counts as float32.
    """
    rates = chip.flops_per_second
    names = _RATES.get(dtype, (dtype, "float32"))
    return next((rates[n] for n in names if n in rates), None) or max(rates.values())


@dataclasses.dataclass(frozen=True)
class Backend:
    """The compiler of one kind of chip, by the facts that apply to it.

    >>> Backend("tpu").reuses_outputs, Backend("cpu").reuses_outputs
    (False, True)

    Attributes:
        platform: ``cpu``, ``cuda`` or ``tpu``. No fact applies to any other compiler.
    """

    platform: str

    def has(self, fact: Fact) -> bool:
        """Return whether a fact applies to the compiler."""
        return self.platform in fact.seen

    @property
    def reuses_outputs(self) -> bool:
        """Whether temporaries may lie in the memory of results that are not yet computed."""
        return self.has(_facts.REUSES_RESULTS)

    @property
    def overwrites_through_views(self) -> bool:
        """Whether a fused operation may overwrite an operand that it reads through a bitcast."""
        return self.has(_facts.OVERWRITES_THROUGH_VIEWS)

    @property
    def recomputes_regions_early(self) -> bool:
        """Whether a region around regions may run again before later derivatives have run."""
        return self.has(_facts.RECOMPUTES_REGIONS_EARLY)

    @property
    def puts_off_large_gradients(self) -> bool:
        """Whether gradients much larger than what they are computed from are computed last."""
        return self.has(_facts.PUTS_OFF_LARGE_GRADIENTS)

    def copies_between_loops(self, images: int, others: int) -> bool:
        """Return whether an array between two loops over images may be in memory twice.

        ``images`` and ``others`` are the images of one piece of each loop.
        """
        tile = _fusion.LANES
        return self.has(_facts.COPIES_BETWEEN_LOOPS) and (images < tile) != (others < tile)

    @property
    def makes_zeros_first(self) -> bool:
        """Whether the zeros of accumulated gradients are allocated before everything else."""
        return self.has(_facts.MAKES_ZEROS_FIRST)

    @property
    def sums_gradients_apart(self) -> bool:
        """Whether gradients are summed over devices beside the memory of the results."""
        return self.has(_facts.SUMS_GRADIENTS_APART)

    def summed_apart(self, eqn: Any, position: int) -> bool:
        """Return whether a loop adds up the gradient of an operand beside the memory of the result.

        ``position`` is the place of the operand among those of the equation.
        """
        is_kernel = primitive_name(eqn) == "conv_general_dilated" and position == 1
        return is_kernel and self.has(_facts.SUMS_KERNEL_GRADIENTS_APART)

    @property
    def has_one_memory(self) -> bool:
        """Whether the host's memory is the memory of the device."""
        return self.has(_facts.HAS_ONE_MEMORY)

    def layout(self, flow: FusionFlow, stacked: bool) -> Layout:
        """Predict which arrays of a program the compiler writes to memory.

        ``stacked`` says that the program is the body of a scan. What one iteration of a scan saves
        is written to memory as it is, so no product computes it again.
        """
        words = self.has(_facts.KEEPS_RANDOM_WORDS)
        return _fusion.layout(
            flow,
            writes_shared=self.has(_facts.WRITES_WHAT_TWO_FUSIONS_READ),
            into_products=self.has(_facts.FUSES_INTO_PRODUCTS) and not stacked,
            rounds=self.has(_facts.ROUNDS_PRODUCTS),
            keeps_words=words,
            pads=self.has(_facts.PADS_IMAGES),
            writes_masks=stacked or not (words or self.has(_facts.DRAWS_MASKS_AGAIN)),
        )

    def rounds(self, eqn: Any) -> bool:
        """Return whether an equation is a product that reads float32 in half precision."""
        return self.has(_facts.ROUNDS_PRODUCTS) and is_rounding(eqn)

    def stores_made(self, eqn: Any) -> bool:
        """Return whether the residuals that an equation's derivative computes are in memory."""
        return self.has(_facts.WRITES_WHAT_TWO_FUSIONS_READ) or not is_fusible(eqn)

    def extra_residual_bytes(self, eqn: Any) -> int:
        """Return the bytes that an equation's derivative saves in place of its residuals."""
        return _rewrites.saved_places(eqn) if self.has(_facts.INDEXES_WINDOWS) else 0

    def copied_bytes(self, eqn: Any, by_kernel: bool) -> int:
        """Return the bytes of copies that an equation's derivative makes beside its residuals.

        ``by_kernel`` says that a convolution is differentiated by its kernel.
        """
        copied = by_kernel and primitive_name(eqn) == "conv_general_dilated"
        if copied and self.has(_facts.COPIES_CONVOLUTION_INPUTS):
            return _ops.nbytes(eqn.invars[0].aval)
        return 0
