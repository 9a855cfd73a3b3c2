"""How many devices does a target with a topology have, and how are they connected?

The part of a target's name after the colon is its topology: the shape of a TPU slice
(``tpu-v5e:4x4``), the GPUs of one host or of several (``h100:8``, ``h100:4x8``), or a number of
CPU devices (``cpu:8``). A target without a colon is one device.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from remat_kit._chip.catalogue import ASSUMED_HOSTS, LINKS, TPUS, Links
from remat_kit._errors import UserError

# JAX describes every device as an object; a slice with more would take minutes.
_MOST_DEVICES = 16384


_MOST_CPUS = 1024  # each is a set of threads of the process that compiles


@dataclass(frozen=True)
class Topology:
    """Devices that run one program.

    Attributes:
        text: as in the name of a target.
        devices: the number of devices.
        hosts: the number of groups of devices between which the slower network runs; 1 for a slice
            of TPUs, whose links connect all chips.
    """

    text: str
    devices: int
    hosts: int = 1


def topology(kind: str, text: str, call: str) -> Topology:
    """Read a topology.

    >>> topology("tpu-v5p", "4x4x4", "target").devices
    64
    >>> topology("h100", "4x8", "target")
    Topology(text='4x8', devices=32, hosts=4)

    Args:
        kind: the name of a target with one device.
        text: what follows the colon.
        call: the public function that errors name.

    Raises:
        UserError: no such topology exists for this kind of chip.
    """
    sizes = [int(n) for n in text.split("x")] if _SIZES.fullmatch(text) else []
    form = _forms(kind)
    if len(sizes) not in form.ranks or not all(sizes):
        raise UserError(
            f"`{call}`: {text!r} is not a topology of {kind}", hint=f"write {form.words}"
        )
    devices = math.prod(sizes) * (TPUS[kind].devices_per_chip if kind in TPUS else 1)
    if devices > form.most:
        raise UserError(
            f"`{call}`: {devices} devices are too many for a target; at most {form.most} work",
            hint="figures are per device, so a smaller part with the same shards gives the same",
        )
    hosts = sizes[0] if len(sizes) == 2 and kind not in TPUS else 1
    return Topology(text, devices, hosts)


_SIZES = re.compile(r"\d{1,5}(x\d{1,5}){0,2}", re.A)


@dataclass(frozen=True)
class _Form:
    ranks: tuple[int, ...]
    words: str
    most: int = _MOST_DEVICES


def _forms(kind: str) -> _Form:
    if kind == "cpu":
        return _Form((1,), "the number of devices, as in 'cpu:8'", _MOST_CPUS)
    if kind in TPUS:
        example = "4x4" if TPUS[kind].axes == 2 else "4x4x4"
        return _Form((TPUS[kind].axes,), f"the shape of a slice in chips, as in '{kind}:{example}'")
    words = f"the GPUs of one host, as in '{kind}:8', or hosts x GPUs, as in '{kind}:4x8'"
    return _Form((1, 2), words)


# The usual shapes of slices with as many chips, by the number of axes.
_SLICES = {
    2: ("1x1", "1x2", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: (
        *("1x1x1", "1x1x2", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8"),
        *("8x8x8", "8x8x16", "8x16x16", "16x16x16"),
    ),
}


def usual_topology(kind: str, devices: int) -> str | None:
    """Return the usual topology of so many devices of a kind, or None if there is none.

    >>> usual_topology("h100", 8), usual_topology("h100", 64), usual_topology("tpu-v5e", 8)
    ('8', '8x8', '2x4')
    """
    if kind == "cpu":
        return str(devices) if devices <= _MOST_CPUS else None
    if kind in TPUS:
        chips, rest = divmod(devices, TPUS[kind].devices_per_chip)
        shapes = {math.prod(map(int, s.split("x"))): s for s in _SLICES[TPUS[kind].axes]}
        return None if rest else shapes.get(chips)
    host = LINKS.get(kind, Links()).hosts_of
    if devices <= host:
        return str(devices)
    return f"{devices // host}x{host}" if devices % host == 0 else None


def links_of(kind: str, host_bandwidth: float) -> dict[str, float]:
    """Return the bytes/s of each link of a device, in one direction, by the name of the link.

    ``ici`` is along one axis of a slice. A GPU without NVLink reaches the GPUs of its host over
    ``pcie``.

    >>> links_of("h100", 64e9)
    {'nvlink': 450000000000.0, 'pcie': 64000000000.0, 'network': 50000000000.0}
    """
    if kind in TPUS:
        return {"ici": TPUS[kind].ici, "pcie": host_bandwidth}
    if kind == "cpu":
        return {"memory": host_bandwidth}
    links = LINKS.get(kind, Links())
    own = {"nvlink": links.nvlink} if links.nvlink else {}
    return own | {"pcie": host_bandwidth, "network": links.network}


def host_memory_of(kind: str) -> int | None:
    """Return the bytes of the host's memory by its devices; None if no system is the usual one."""
    if kind in TPUS:
        return TPUS[kind].host_memory_bytes
    return LINKS.get(kind, Links()).host_memory_bytes


def assumed_of(kind: str) -> str:
    """Return the end of `Target.source`: what of a kind is assumed, because no source is known.

    >>> assumed_of("b300"), assumed_of("h100")
    ('; the memory of the host is assumed', '')
    """
    assumed = {
        "the link to the host": kind in TPUS,
        "the network between hosts": kind not in TPUS and kind not in LINKS,
        "the memory of the host": kind in ASSUMED_HOSTS,
    }
    return "".join(f"; {what} is assumed" for what, holds in assumed.items() if holds)
