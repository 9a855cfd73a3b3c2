"""What does one schedule of a frontier need, and how far is it from the lower bound?

A `Point` holds a schedule with its predicted memory and extra work, and the least extra work and
time that any schedule with the same peak needs (module `bounds`).

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
from remat_kit._planner.schedules.bounds import Bounds
from remat_kit._policy.schedule import Schedule

# -- the frontier ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Least:
    """The lower bounds of a loss, for the peaks of the whole program.

    Attributes:
        bounds: the bounds for one run of the loss alone.
        given: bytes that are live beside the loss, such as its arguments.
        times: how often the program runs the loss.
        more_seconds: extra time that every schedule needs, such as that of its pieces.
        more_work: the same for the work that the search minimizes, in seconds.
    """

    bounds: Bounds
    given: int
    times: float
    more_seconds: float = 0.0
    more_work: float = 0.0

    def at(self, peak_bytes: float) -> tuple[float, float]:
        """Return the least extra time and work in seconds of any schedule with a peak."""
        held = peak_bytes - self.given
        seconds, work = self.bounds.seconds(held), self.bounds.work(held)
        return self.more_seconds + self.times * seconds, self.more_work + self.times * work


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
            count as if they were on the device. If segments run in pieces, it is the least of all
            schedules with these pieces.
        bound_extra_work: the same for the extra work that the search minimized. No schedule with
            this peak has less of it.
        gap: ``extra_work`` less ``bound_extra_work``, as a fraction of the work of the forward
            pass. It is 0 if no schedule with this peak is better by the objective.
        schedule: the segments of the schedule.
        cost: the simulated memory and extra work, without arguments and results.
        least: the lower bounds for every peak; None if they are not known.
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
    bound_extra_work: float
    gap: float
    schedule: Schedule[int] = dataclasses.field(repr=False)
    cost: Simulated = dataclasses.field(repr=False)
    least: Least | None = dataclasses.field(default=None, repr=False, compare=False)
    graph: CostGraph | None = dataclasses.field(default=None, repr=False)
    others: tuple[Point, ...] = dataclasses.field(default=(), repr=False)

    @property
    def extra_flops_fraction(self) -> float:
        """Recomputed floating-point operations, as a fraction of those of the forward pass."""
        return self.extra_flops / self.forward_flops if self.forward_flops else 0.0

    @property
    def pieces(self) -> tuple[int, ...]:
        """The numbers of pieces that segments run in, without repetition; empty if none does."""
        divided = self.graph.divided if self.graph else None
        return tuple(sorted({d.pieces for d in divided.divisions})) if divided else ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        names = (
            *("predicted_peak_bytes", "saved_bytes", "host_bytes", "extra_seconds"),
            *("extra_flops", "extra_work", "forward_flops"),
            *("bound_extra_seconds", "bound_extra_work", "gap", "extra_flops_fraction"),
        )
        return {name: getattr(self, name) for name in names}


def bounded(point: Point, peak_bytes: float) -> tuple[float, float]:
    """Return the least extra time and work in seconds of any schedule with a given peak.

    They are at most those of the point's own schedule, so its peak must not be higher.

    Args:
        point: the point, whose bounds are used.
        peak_bytes: the peak on the device, arguments and results included.
    """
    if point.least is None:
        return 0.0, 0.0
    seconds, work = point.least.at(peak_bytes + point.host_bytes)
    return min(seconds, point.extra_seconds), min(work, point.extra_work)


def with_more(point: Point, flops: float, seconds: float, work: float) -> Point:
    """Return a point with extra work that every schedule of its program needs."""
    least = point.least and dataclasses.replace(
        point.least,
        more_seconds=point.least.more_seconds + seconds,
        more_work=point.least.more_work + work,
    )
    return dataclasses.replace(
        point,
        extra_flops=point.extra_flops + flops,
        extra_seconds=point.extra_seconds + seconds,
        extra_work=point.extra_work + work,
        bound_extra_seconds=point.bound_extra_seconds + seconds,
        bound_extra_work=point.bound_extra_work + work,
        least=least,
    )
