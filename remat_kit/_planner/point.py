"""What does one schedule of a frontier need, and how far is it from the lower bound?

A `Point` holds a schedule with its predicted memory and extra work, and the least extra time that
any schedule with the same peak needs (module `bounds`).

Example (the table in module `frontier` has it): eight layers ``x = tanh(x @ w)``, with ``x`` of 4
MiB on an H100, have a schedule with a peak of 36 MiB, arguments and results included. Its recompute
takes 193 % of the forward pass. By the bound, every schedule with this peak recomputes for at least
64 % of the forward pass. The gap is the difference, 1.29 forward passes. At 40 MiB, both figures
are 52 % and the gap is 0, so that no schedule with a peak of 40 MiB is faster.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from remat_kit._planner.costs.graph import CostGraph
from remat_kit._planner.costs.simulate import Simulated
from remat_kit._policy.schedule import Schedule

# -- the frontier ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Point:
    """One schedule on the frontier; `estimate` returns one for checkpoints of your own.

    Times are those of a roofline model (Williams et al., "Roofline", 2009).

    >>> import jax, jax.numpy as jnp
    >>> from remat_kit import estimate, name
    >>> x = jax.ShapeDtypeStruct((4096,), jnp.float32)
    >>> loss = lambda x: jnp.sum(jnp.exp(name(jnp.sin(x), "sin")))
    >>> point = estimate(loss, x, checkpoints=["sin"])
    >>> point.forward_flops, point.host_bytes
    (12288.0, 0)

    Attributes:
        predicted_peak_bytes: predicted peak on the device in bytes, arguments and results included.
        saved_bytes: bytes saved on the device from the forward to the backward pass.
        host_bytes: bytes offloaded to the host's memory from the forward to the backward pass.
        extra_seconds: roofline time of the recompute, and of transfers between device and host
            that do not overlap with computation.
        extra_flops: floating-point operations that are recomputed.
        extra_work: the extra work that the search minimized, in seconds. The objective says how
            ``extra_seconds`` and ``extra_flops`` are combined.
        forward_flops: floating-point operations of the forward pass.
        bound_extra_seconds: the least extra time of any schedule with this peak. Offloaded bytes
            count as if they were on the device.
        gap: ``extra_seconds`` less ``bound_extra_seconds``, as a fraction of the forward pass.
        schedule: the segments of the schedule.
        cost: the simulated memory and extra work, without arguments and results.
        graph: if segments run in pieces, the cost graph of the divided program, to which the
            schedule belongs; otherwise None.
        others: of a step with several losses, the points of its other losses. The figures are sums
            over all losses, and peaks are the largest.
    """

    predicted_peak_bytes: int
    saved_bytes: int
    host_bytes: int
    extra_seconds: float
    extra_flops: float
    extra_work: float
    forward_flops: float
    bound_extra_seconds: float
    gap: float
    schedule: Schedule[int] = dataclasses.field(repr=False)
    cost: Simulated = dataclasses.field(repr=False)
    graph: CostGraph | None = dataclasses.field(default=None, repr=False)
    others: tuple[Point, ...] = dataclasses.field(default=(), repr=False)

    @property
    def extra_flops_fraction(self) -> float:
        """Recomputed floating-point operations, as a fraction of those of the forward pass."""
        return self.extra_flops / self.forward_flops if self.forward_flops else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        names = (
            *("predicted_peak_bytes", "saved_bytes", "host_bytes", "extra_seconds"),
            *("extra_flops", "extra_work", "forward_flops", "bound_extra_seconds", "gap"),
            "extra_flops_fraction",
        )
        return {name: getattr(self, name) for name in names}
