"""Which collectives does a compiled program run, over which axes of its mesh, and how long?

The partitioner of XLA adds collectives that no program mentions: an all-reduce after a product over
a split dimension, an all-gather before a product with a split parameter. Each has a group of
devices and the name stack of the operation that needs it. Checkpoint regions repeat some of them.

Example: eight devices in a mesh of 4 by 2 form these groups along its second axis, which
`ReplicaGroups.parse` reads in the three spellings of XLA:

>>> plain = ReplicaGroups.parse("replica_groups={{0,1},{2,3},{4,5},{6,7}}", 8)
>>> strided = ReplicaGroups.parse("replica_groups=[4,2]<=[8]", 8)
>>> named = ReplicaGroups.parse("replica_groups=mesh['a'=4,'b'=2] {'b'}", 8)
>>> plain == strided == named, plain.size
(True, 2)

A collective is *repeated* if it is in the program only because of recomputation: a checkpoint
region needs it, and an earlier one moves the same value, or its operand is recomputed and the
forward pass has a collective of the same kind and shape.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from remat_kit._compiled.duplicates import module_and_primitive, value_numbers
from remat_kit._compiled.hlo import MARK, TRANSPARENT, HloModule, Instruction, parts_of_scope
from remat_kit._compiled.liveness import Array, leaves, parse_shape
from remat_kit._compiled.peak import BACKWARD, FORWARD, RECOMPUTE, Origin
from remat_kit._compiled.roofline import trip_count

KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"),
    *("collective-broadcast", "ragged-all-to-all"),
)


class Mesh(Protocol):
    """A mesh of a program: see `lowering.ProgramMesh`."""

    @property
    def axes(self) -> tuple[tuple[str, int], ...]: ...
    @property
    def order(self) -> tuple[int, ...] | None: ...


class Linked(Protocol):
    """The attributes of a `Target` that the time of a collective depends on."""

    @property
    def devices(self) -> int: ...
    @property
    def hosts(self) -> int: ...
    @property
    def links(self) -> Mapping[str, float]: ...


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a compiled program.

    Attributes:
        kind: XLA's name: ``all-gather``, ``all-reduce``, ``reduce-scatter``, ``all-to-all``, ….
        bytes: the bytes of its result on one device, of one run.
        axes: the names of the mesh axes that it runs over; empty if its groups are no axes of the
            program's mesh.
        group: the number of devices that take part together.
        module: the module path of the operation that needs it.
        source: ``file:line`` of that operation.
        phase: the phase in which it runs.
        seconds: the time of all its runs on the links, by their peak rates.
        repeated: whether it is there only because of recomputation.
        times: how often a step runs it: the iterations of the loops around it.
        background: whether the program computes while it runs.
    """

    kind: str
    bytes: int
    axes: tuple[str, ...]
    group: int
    module: str
    source: str
    phase: str
    seconds: float
    repeated: bool
    times: int = 1
    background: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return dataclasses.asdict(self) | {"axes": list(self.axes)}


# -- groups -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ReplicaGroups:
    """The groups of devices of a collective, each in ascending order.

    For a permutation these are the devices that are connected by its transfers.
    """

    groups: frozenset[tuple[int, ...]]

    @property
    def size(self) -> int:
        """The number of devices in a group; that of the largest if they differ."""
        return max(map(len, self.groups), default=1)

    @staticmethod
    def of(groups: Any) -> ReplicaGroups:
        """Return groups from lists of devices."""
        return ReplicaGroups(frozenset(tuple(sorted(map(int, group))) for group in groups))

    @staticmethod
    def parse(attributes: str, devices: int) -> ReplicaGroups:
        """Read the groups in the attributes of an instruction; without any, all devices are one."""
        if found := _PAIRS.search(attributes):
            return ReplicaGroups.of(_connected(_numbers(found.group(1))))
        if found := _LISTED.search(attributes):
            return ReplicaGroups.of(
                [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", found.group(1))]
            )
        if found := _IOTA.search(attributes):
            shape, dims, order = (_numbers(text or "") for text in found.groups())
            ids = np.arange(math.prod(dims)).reshape(dims)
            ids = ids.transpose(order) if order else ids
            return ReplicaGroups.of(ids.reshape(shape))
        if found := _MESH.search(attributes):
            return _of_mesh(*found.groups())
        return ReplicaGroups.of([range(devices)])


_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}")


_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


# The names of the axes are XLA's own, and an axis may be a part of one: 'a':(1)2 are the 2 places
# of 'a' with a factor of 1 before them. Seen with jax 0.10.2 and 0.12.
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:,? ?device_ids=\(?\[?([\d,]*)\]?\)?)? \{([^}]*)\}"
)


_AXIS = re.compile(r"'([^']*)'=(\d+)")


_CHOSEN = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _of_mesh(axes: str, order: str | None, chosen: str) -> ReplicaGroups:
    """Return the groups along some axes of a mesh, or parts of axes."""
    wanted = {
        name: (int(before or 1), int(taken) if taken else None)
        for name, before, taken in _CHOSEN.findall(chosen)
    }
    shape, moving = [], []
    for name, size in _AXIS.findall(axes):
        if name not in wanted:
            shape.append(int(size))
            continue
        before, taken = wanted[name]
        taken = int(size) // before if taken is None else taken
        after = int(size) // (before * taken)
        moving.append(len(shape) + 1)
        shape += [before, taken, after]
    ids = np.arange(math.prod(shape))
    ids = np.array(_numbers(order))[ids] if order else ids
    ids = np.moveaxis(ids.reshape(shape), moving, range(-len(moving), 0)) if moving else ids
    return ReplicaGroups.of(ids.reshape(-1, math.prod(shape[m] for m in moving)))


def _connected(ends: Sequence[int]) -> list[set[int]]:
    groups: list[set[int]] = []
    for pair in zip(ends[::2], ends[1::2], strict=True):
        met = [g for g in groups if g & set(pair)]
        groups = [g for g in groups if not g & set(pair)] + [set(pair).union(*met)]
    return groups


def axes_of(groups: ReplicaGroups, meshes: Sequence[Mesh]) -> tuple[str, ...]:
    """Return the names of the mesh axes whose devices form these groups, or none."""
    for mesh in meshes:
        for names, found in _groups_by_axes(mesh.axes, mesh.order).items():
            if found == groups:
                return names
    return ()


@functools.lru_cache(maxsize=64)
def _groups_by_axes(
    axes: tuple[tuple[str, int], ...], order: tuple[int, ...] | None
) -> dict[tuple[str, ...], ReplicaGroups]:
    """Return the groups along each choice of axes of a size above 1, fewer axes first."""
    sizes = [n for _, n in axes]
    ids = np.array(order if order is not None else range(math.prod(sizes))).reshape(sizes)
    real = [i for i, (_, n) in enumerate(axes) if n > 1][:10]  # 2 to the power of this many choices
    found = {}
    for count in range(1, len(real) + 1):
        for chosen in itertools.combinations(real, count):
            moved = np.moveaxis(ids, chosen, range(-count, 0))
            size = math.prod(sizes[i] for i in chosen)
            names = tuple(axes[i][0] for i in chosen)
            found[names] = ReplicaGroups.of(moved.reshape(-1, size))
    return found


# -- time ---------------------------------------------------------------------------------------


def link_seconds(kind: str, size: int, groups: ReplicaGroups, chip: Linked) -> float:
    """Return the time of a collective by the peak rates of the links between its devices.

    A ring moves (n - 1) / n of the gathered array over each link, twice for an all-reduce. Where a
    group is on several hosts, the devices of one host share the network between hosts.

    >>> from remat_kit import target
    >>> all_devices = ReplicaGroups.of([range(8)])
    >>> link_seconds("all-gather", 450_000_000, all_devices, target("h100:8"))
    0.000875

    Args:
        kind: as in `Collective`.
        size: bytes of the result on one device.
        groups: the devices that take part together.
        chip: the target.
    """
    n = groups.size
    if n == 1 or not chip.links:
        return 0.0
    whole = size * n if kind == "reduce-scatter" else size
    each_host = max(1, chip.devices // chip.hosts)
    hosts = max(len({device // each_host for device in group}) for group in groups.groups)
    near = next((chip.links[name] for name in _NEAR if name in chip.links), 0.0)
    if kind in ("collective-permute", "collective-broadcast"):
        rate = chip.links.get("network", near) if hosts > 1 else near
        return whole / rate if rate else 0.0
    times = 2 if kind == "all-reduce" else 1
    inside = times * whole * (n - 1) / n / near if near else 0.0
    if hosts == 1 or "network" not in chip.links:
        return inside
    sharing = max(1, n // hosts)
    return max(inside, times * whole * (hosts - 1) / hosts / (sharing * chip.links["network"]))


def axes_seconds(
    kind: str, size: int, over: Sequence[str], axes: Sequence[tuple[str, int]], chip: Linked
) -> float:
    """Return the time of a collective over axes of a mesh whose devices are in order.

    >>> from remat_kit import target
    >>> axes_seconds("all-gather", 450_000_000, ["data"], [("data", 8)], target("h100:8"))
    0.000875

    Args:
        kind, size, chip: as for `link_seconds`.
        over: the names of the axes that it runs over.
        axes: the names and sizes of all axes of the mesh.
    """
    names = tuple(name for name, n in axes if name in over and n > 1)
    groups = _groups_by_axes(tuple(axes), None).get(names)
    return 0.0 if groups is None else link_seconds(kind, size, groups, chip)


_NEAR = ("nvlink", "ici", "pcie", "memory")  # the link between neighbours, the fastest first


# -- reading a program --------------------------------------------------------------------------


def collectives(
    program: HloModule, origins: Mapping[str, Origin], chip: Linked, meshes: Sequence[Mesh]
) -> tuple[Collective, ...]:
    """Return the collectives of a compiled program, in the order in which they run.

    The start and the end of a collective in the background are one entry, and so are collectives
    that the compiler combined.

    Args:
        program: as `hlo.parse` returns it.
        origins: as `peak.origins` returns them.
        chip: the target that it was compiled for.
        meshes: the meshes of the program, whose axes name the groups.
    """
    if chip.devices == 1:
        return ()
    reader = _CollectiveFinder(program, origins, chip.devices)
    repeated = _Repeats(reader)
    found = []
    for site in reader.sites:
        place = reader.origin(site)
        seconds = site.times * link_seconds(site.kind, site.bytes, site.groups, chip)
        found.append(
            Collective(
                kind=site.kind,
                bytes=site.bytes,
                axes=axes_of(site.groups, meshes),
                group=site.groups.size,
                module=place.module,
                source=place.source,
                phase=place.phase,
                seconds=seconds,
                repeated=repeated(site),
                times=site.times,
                background=site.background,
            )
        )
    return tuple(found)


def link_times(found: Sequence[Collective]) -> dict[str, float]:
    """Return the time of collectives as the arguments of `roofline.estimate`."""
    waiting = sum(c.seconds for c in found if not c.background)
    behind = sum(c.seconds for c in found if c.background)
    return {"waiting_seconds": waiting, "background_seconds": behind}


@dataclasses.dataclass(frozen=True)
class _Site:
    """A collective where it stands in a program."""

    kind: str
    instruction: Instruction
    scheduled: Instruction
    computation: str
    arrays: tuple[Array, ...]
    groups: ReplicaGroups
    times: int
    background: bool

    @property
    def bytes(self) -> int:
        return sum(a.bytes for a in self.arrays)

    @property
    def shapes(self) -> tuple[Any, ...]:
        return tuple(sorted((a.dtype, a.dims) for a in self.arrays))


def _kind(instruction: Instruction) -> str | None:
    base = instruction.opcode.removesuffix("-start")
    return base if base in KINDS else None


class _CollectiveFinder:
    """Finds the collectives of a program, and the instructions that read them."""

    def __init__(self, program: HloModule, origins: Mapping[str, Origin], devices: int):
        self.program = program
        self.origins = origins
        self.devices = devices
        self.sites: list[_Site] = []
        self.channels: set[tuple[str, str]] = set()
        self.look(program.entry, 1)

    def look(self, computation: str, times: int) -> None:
        for instruction in self.program.computations.get(computation, ()):
            self.instruction(instruction, instruction, computation, times)

    def instruction(
        self, instruction: Instruction, scheduled: Instruction, computation: str, times: int
    ) -> None:
        kind = _kind(instruction)
        if kind is not None:
            self.add(kind, instruction, scheduled, computation, times)
        elif instruction.opcode == "while":
            trips = trip_count(self.program, instruction, computation)
            for body in instruction.bodies:
                self.look(body, times * (1 if trips is None else trips))
        elif instruction.opcode in ("conditional", "call", "async-start"):
            for body in instruction.bodies:
                self.look(body, times)
        elif instruction.opcode.startswith("fusion"):
            for name in instruction.called:
                for inside in self.program.computations.get(name, ()):
                    self.instruction(inside, scheduled, computation, times)

    def add(
        self,
        kind: str,
        instruction: Instruction,
        scheduled: Instruction,
        computation: str,
        times: int,
    ) -> None:
        """Add a collective; a TPU program has one in every fusion that runs beside it."""
        is_fused = instruction is not scheduled
        channel = _CHANNEL.search(instruction.attributes)
        if is_fused and channel is not None:
            if (key := (kind, channel.group(1))) in self.channels:
                return
            self.channels.add(key)
        starts = instruction.opcode.endswith("-start")
        tree = parse_shape(instruction.shape)
        if starts and kind != "all-reduce" and isinstance(tree, list) and len(tree) > 1:
            tree = tree[1]  # the operands come first
        groups = ReplicaGroups.parse(instruction.attributes, self.devices)
        if groups.size == 1:
            return
        arrays = tuple(leaves(tree))
        in_fusion = is_fused and "async_collective_fusion_config" in instruction.attributes
        called = computation != self.program.entry and "async" in computation
        self.sites.append(
            _Site(
                *(kind, instruction, scheduled, computation, arrays, groups, times),
                background=starts or in_fusion or called,
            )
        )

    @functools.cached_property
    def readers(self) -> dict[str, list[Instruction]]:
        """The instructions that read each value of their computation."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.program.instructions():
            for operand in instruction.operands:
                found.setdefault(operand, []).append(instruction)
        return found

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.program.instructions()}

    def reading(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yield what reads a value, through instructions that only move it."""
        for reader in self.readers.get(instruction.name, ()):
            if reader.opcode in _MOVES:
                yield from self.reading(reader)
            else:
                yield reader

    @functools.cached_property
    def modules(self) -> list[str]:
        """The module paths of the program, shorter ones first."""
        return sorted({place.module for place in self.origins.values()}, key=len)

    def module_of_argument(self, name: str) -> str | None:
        """Return the module whose path is in the name of a parameter, as in ``p['mlp']['kernel']``.

        A module inside of it may read the parameter instead, which makes no difference to a policy.
        """
        keys = _KEY.findall(name.replace("\\'", "'"))[:-1]
        for start in range(len(keys)):
            tail = "/".join(keys[start:])
            for module in self.modules:
                if f"/{module}".endswith(f"/{tail}"):
                    return module
        return None

    def origin(self, site: _Site) -> Origin:
        """Return the operation that needs a collective.

        A gathered parameter has the name of the parameter, or that of the region that it enters.
        Then the operation that reads it says more.
        """
        place = self.origins.get(site.scheduled.name) or Origin("", "", "", "other")
        name = site.instruction.op_name
        if _is_marked(site.instruction):
            place = dataclasses.replace(place, phase=RECOMPUTE)
        if "/(" in name:
            return dataclasses.replace(place, module=module_and_primitive(name)[0])
        if site.instruction is not site.scheduled:
            place = dataclasses.replace(place, module=module_and_primitive(name)[0])
        is_named = name.startswith("jit(") and not _enters_region(name) and bool(place.module)
        if is_named and site.kind != "all-gather":
            return place
        if not name.startswith("jit(") and (module := self.module_of_argument(name)):
            return dataclasses.replace(place, module=module, phase=FORWARD)
        for reader in self.reading(site.scheduled):
            there = self.origins.get(reader.name)
            if there is None or not there.module:
                continue
            if is_named and not there.module.startswith(f"{place.module}/"):
                continue
            phase = place.phase if is_named or _is_marked(site.instruction) else there.phase
            return Origin(there.module, place.primitive, there.source or place.source, phase)
        return place


_KEY = re.compile(r"\['([^']*)'\]")


_CHANNEL = re.compile(r"\bchannel_id=(\d+)")


_MOVES = TRANSPARENT | {"get-tuple-element", "tuple", "all-gather-done", "all-reduce-done"}


def _enters_region(op_name: str) -> bool:
    return [*parts_of_scope(op_name.partition(";")[0])][-1:] in (["remat2"], ["checkpoint"])


def _is_in_region(instruction: Instruction) -> bool:
    """Tell whether an instruction belongs to the backward pass of a checkpoint region."""
    return "checkpoint" in parts_of_scope(instruction.op_name.partition(";")[0])


def _is_marked(instruction: Instruction) -> bool:
    return MARK in instruction.op_name or _enters_region(instruction.op_name)


def _is_recomputed_constraint(instruction: Instruction) -> bool:
    """Tell whether a collective is what a constraint on a sharding needs when it is recomputed.

    The forward pass may need none for it, if the region saves the value in slices.
    """
    scopes = parts_of_scope(instruction.op_name.partition(";")[0])
    return MARK in instruction.op_name and [*scopes][-1:] in _CONSTRAINTS


_CONSTRAINTS = (["sharding_constraint"], ["reshard"])


class _Repeats:
    """Tells which collectives are there only because of recomputation."""

    def __init__(self, reader: _CollectiveFinder):
        self.reader = reader
        self.numbers = value_numbers(reader.program)
        self.first: dict[Any, _Site] = {}
        for site in reader.sites:
            for key in self.moved(site):
                self.first.setdefault(key, site)
        self.forward = {
            (site.kind, site.shapes, site.groups)
            for site in reader.sites
            if "transpose(" not in site.instruction.op_name and not _is_marked(site.instruction)
        }

    def moved(self, site: _Site) -> list[Any]:
        """Return a key for each value that a collective moves."""
        what = site.kind, site.groups
        operands = site.instruction.operands
        return [(*what, self.numbers[name]) for name in operands if name in self.numbers]

    def __call__(self, site: _Site) -> bool:
        marked = _is_marked(site.instruction) or self.read_by(site, RECOMPUTE, only=True)
        moved = self.moved(site)
        if moved and all(self.first[key] is not site for key in moved):
            # The boundary of a region keeps the compiler from using the first result.
            return marked or _is_in_region(site.instruction)
        if _is_recomputed_constraint(site.instruction):
            return True
        if not marked or (site.kind, site.shapes, site.groups) not in self.forward:
            return False
        # A collective on a saved input may be there because the derivative itself needs its result.
        return self.moves_recomputed(site) or not self.read_by(site, BACKWARD)

    def moves_recomputed(self, site: _Site) -> bool:
        """Tell whether what a collective moves is recomputed, and not saved."""
        makers = [self.reader.by_name.get(name) for name in site.instruction.operands]
        return any(maker is not None and MARK in maker.op_name for maker in makers)

    def read_by(self, site: _Site, phase: str, only: bool = False) -> bool:
        """Tell whether an operation of a phase reads the result, or only such operations do."""
        origins = self.reader.origins
        readers = self.reader.reading(site.scheduled)
        phases = {origins[reader.name].phase for reader in readers if reader.name in origins}
        return phases == {phase} if only else phase in phases
