"""The rates of a chip that the planner and the roofline read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


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
