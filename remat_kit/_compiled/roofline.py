"""Estimate how long a compiled training step takes on a chip.

The module makes two estimates and never mixes them.

The *roofline* divides the floating-point operations of each scheduled instruction by the chip's
peak rate, and its bytes by the memory bandwidth, and takes the longer time. The instructions of a
loop count once for each iteration. Which branch of a conditional runs is unknown before the step
runs, so the branch that takes longest counts, with its operations and bytes as well as its time.
Otherwise the estimate is a lower bound: it contains no launch overhead, no stalls and no clock
below the maximum. Use it to rank programs, not to predict their times.

The *compiler's estimate* exists on TPUs, where the compiler writes into the program the number of
cycles that it expects for every fusion.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 2009.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from remat_kit._backend.interface import Chip, peak_rate
from remat_kit._compiled.hlo import HloModule, Instruction, words
from remat_kit._compiled.liveness import DEVICE, HOST, Array, leaves, parse_shape
from remat_kit._compiled.peak import Origin


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one or more instructions.

    Attributes:
        seconds: run time; 0 for copies in the background.
        flops: floating-point operations; a multiplication and an addition count one each.
        bytes: bytes read from and written to the device's memory.
        host_bytes: bytes sent to and received from the host.
        cycles: the cycles that the compiler expects; 0 if the program does not say.
    """

    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    host_bytes: float = 0.0
    cycles: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.seconds + other.seconds,
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.host_bytes + other.host_bytes,
            self.cycles + other.cycles,
        )

    def __mul__(self, times: float) -> Cost:
        return Cost(*(amount * times for amount in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """How long a program takes.

    Attributes:
        seconds: the roofline: the sum over the instructions, or the time to transfer all bytes at
            the bandwidth of the memory or of the host link, whichever is longest.
        total: the cost of the whole program.
        by_place: the cost for each (phase, module path, primitive).
        compiler_seconds: the compiler's cycles at the chip's clock; None if either is unknown.
        endless: loops whose number of iterations is unknown; their bodies count once.
        link_seconds: the time of all collectives on the links between devices, by their peak rates.
            Part of ``seconds``: a collective that the program waits for adds its time, and one in
            the background hides behind computation where there is enough of it.
        uncounted: targets of custom calls for which the program does not give the number of
            operations. They contribute no FLOPs, and their time is that of their bytes.
    """

    seconds: float
    total: Cost
    by_place: Mapping[tuple[str, str, str], Cost] = dataclasses.field(hash=False, repr=False)
    compiler_seconds: float | None
    endless: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()
    link_seconds: float = 0.0

    def by_phase(self) -> dict[str, Cost]:
        """Return the cost of each phase."""
        found: dict[str, Cost] = {}
        for (phase, *_), cost in self.by_place.items():
            found[phase] = found.get(phase, Cost()) + cost
        return found

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return {
            "roofline": self.seconds,
            "compiler": self.compiler_seconds,
            "flops": self.total.flops,
            "bytes": self.total.bytes,
            "links": self.link_seconds,
            "by_phase": {phase: cost.seconds for phase, cost in self.by_phase().items()},
        }


# Published clock rates in cycles/s of one core: Jouppi et al., "TPU v4", ISCA 2023, for v2 to v4;
# Austin et al., "How to scale your model", 2025, for v5e and v5p.
_CLOCKS = {
    "tpu-v2": 0.70e9,
    "tpu-v3": 0.94e9,
    "tpu-v4": 1.05e9,
    "tpu-v5e": 1.5e9,
    "tpu-v5p": 1.75e9,
}


def estimate(
    program: HloModule,
    chip: Chip,
    origins: Mapping[str, Origin],
    *,
    chip_name: str = "",
    waiting_seconds: float = 0.0,
    background_seconds: float = 0.0,
) -> Estimate:
    """Estimate the step time of a compiled program on the chip that it was compiled for.

    Args:
        program: as `hlo.parse` returns it.
        chip: its peak rates in FLOP/s by dtype, and its bandwidths in bytes/s.
        origins: as `peak.origins` returns them.
        chip_name: selects the clock rate that converts cycles into seconds.
        waiting_seconds: link time of the collectives that the program waits for.
        background_seconds: link time of the collectives that run beside its computation.
    """
    counter = _Counter(program, chip, origins)
    by_place = counter.computation(program.entry)
    total = sum(by_place.values(), Cost())
    seconds = max(
        total.seconds + waiting_seconds,
        waiting_seconds + background_seconds,
        total.bytes / chip.bandwidth_bytes_per_second,
        total.host_bytes / chip.host_bandwidth_bytes_per_second,
    )
    clock = _CLOCKS.get(re.split("[:@]", chip_name)[0])
    compiler = total.cycles / clock if clock and total.cycles else None
    uncounted = tuple(dict.fromkeys(counter.uncounted))
    return Estimate(
        seconds,
        total,
        by_place,
        compiler,
        tuple(counter.endless),
        uncounted,
        waiting_seconds + background_seconds,
    )


_Places = dict[tuple[str, str, str], Cost]  # by phase, module path and primitive


class _Counter:
    def __init__(self, program: HloModule, chip: Chip, origins: Mapping[str, Origin]):
        self.program = program
        self.chip = chip
        self.origins = origins
        self.endless: list[str] = []
        self.uncounted: list[str] = []
        self.arrays = _Arrays(program)

    def computation(self, name: str) -> _Places:
        """Return the cost of one run of a computation."""
        found: _Places = {}
        for instruction in self.program.computations[name]:
            for place, cost in self.instruction(instruction, name).items():
                found[place] = found[place] + cost if place in found else cost
        return found

    def instruction(self, instruction: Instruction, computation: str) -> _Places:
        opcode = instruction.opcode
        if opcode == "while":
            return self.loop(instruction, computation)
        if opcode == "conditional":
            return max(map(self.computation, instruction.bodies), key=_seconds, default={})
        if opcode == "call":
            return self.computation(instruction.bodies[0])
        if opcode in _FREE or opcode.endswith("-done"):
            return {}
        return {self.place(instruction): self.cost(instruction)}

    def loop(self, instruction: Instruction, computation: str) -> _Places:
        trips = trip_count(self.program, instruction, computation)
        if trips is None:
            self.endless.append(instruction.name)
        _, body = instruction.bodies
        times = 1 if trips is None else trips
        return {place: cost * times for place, cost in self.computation(body).items()}

    def place(self, instruction: Instruction) -> tuple[str, str, str]:
        origin = self.origins.get(instruction.name)
        if origin is None:
            return "other", "", instruction.opcode
        return origin.phase, origin.module, origin.primitive

    def cost(self, instruction: Instruction) -> Cost:
        flops, seconds = 0.0, 0.0
        for heavy in self.heavy(instruction):
            amount = self.arrays.flops(heavy) or self.library_flops(heavy)
            flops += amount
            seconds += amount / self.rate(heavy)
        size, host = self.arrays.traffic(instruction)
        slowest = max(seconds, size / self.chip.bandwidth_bytes_per_second)
        if instruction.opcode.endswith("-start"):
            slowest = 0.0  # the copy runs in the background
        cycles = _CYCLES.search(instruction.attributes)
        return Cost(slowest, flops, size, host, float(cycles.group(1)) if cycles else 0.0)

    def library_flops(self, instruction: Instruction) -> float:
        """Return the FLOPs that a custom call declares; record its target if it declares none."""
        said = _SAID_FLOPS.search(instruction.attributes)
        if said:
            return float(said.group(1))
        target = instruction.target
        if target and target not in _MOVES_ONLY:
            self.uncounted.append(target)
        return 0.0

    def heavy(self, instruction: Instruction) -> list[Instruction]:
        """Return the matrix products and custom calls that run as part of an instruction."""
        if instruction.is_heavy or instruction.target:
            return [instruction]
        return [
            product
            for name in instruction.called
            for inner in self.program.computations.get(name, ())
            for product in self.heavy(inner)
        ]

    def rate(self, instruction: Instruction) -> float:
        dtype = self.arrays.of(instruction.operands[0]).dtype if instruction.operands else "f32"
        return peak_rate(self.chip, _DTYPES.get(dtype, "float32"))


def _seconds(places: _Places) -> tuple[float, float, float]:
    """Sort key for the branches of a conditional."""
    total = sum(places.values(), Cost())
    return total.seconds, total.bytes, total.flops


_FREE = words(
    """add-dependency after-all bitcast constant copy-done domain get-tuple-element
    opt-barrier optimization-barrier parameter partition-id replica-id slice-done tuple
    async-done async-update"""
)


_FUSIONS = ("fusion", "fusion-start")  # the second runs on another stream of a GPU


# In the configuration of a Pallas kernel on a TPU, if its author gave a `pl.CostEstimate`.
_SAID_FLOPS = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')


# Custom calls that compute nothing: they place, join or convert arrays.
_MOVES_ONLY = words(
    """AllocateBuffer ConcatBitcast MoveToDevice MoveToHost PadToStatic PinToDevice Sharding
    SliceToDynamic SPMDFullToShardShape SPMDShardToFullShape X64Combine X64SplitHigh X64SplitLow
    annotate_device_placement"""
)


_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


# The dtypes with a peak rate of their own, by XLA's names.
_DTYPES = {"f64": "float64", "f16": "float16", "bf16": "bfloat16", "s8": "int8", "u8": "int8"}


# -- one instruction ----------------------------------------------------------------------------


class _Arrays:
    """The shapes of a program's instructions, and the costs that follow from them."""

    def __init__(self, program: HloModule):
        self.program = program
        self.shapes = {i.name: i.shape for i in program.instructions()}

    def tree(self, name: str) -> Any:
        return parse_shape(self.shapes[name]) if name in self.shapes else []

    def of(self, name: str) -> Array:
        return next(iter(leaves(self.tree(name))), Array("f32", (), 0, DEVICE))

    def flops(self, instruction: Instruction) -> float:
        """Count the floating-point operations of a matrix product or a convolution."""
        if instruction.opcode == "dot" or _LHS_CONTRACTING.search(instruction.attributes):
            return self.dot_flops(instruction)
        labels = _LABELS.search(instruction.attributes)
        return self.convolution_flops(instruction, labels.groups()) if labels else 0.0

    def dot_flops(self, instruction: Instruction) -> float:
        found = _LHS_CONTRACTING.search(instruction.attributes)
        axes = [int(x) for x in re.findall(r"\d+", found.group(1))] if found else []
        lhs = self.of(instruction.operands[0]).dims
        result = self.of(instruction.name).dims
        return 2.0 * math.prod(result) * math.prod(lhs[a] for a in axes if a < len(lhs))

    def convolution_flops(self, instruction: Instruction, labels: Sequence[str]) -> float:
        """Count as XLA's cost analysis does: without products with padding or dilation zeros."""
        first, second, result = (
            *(self.of(o).dims for o in instruction.operands[:2]),
            self.of(instruction.name).dims,
        )
        if "convBackwardInput" in instruction.attributes:
            first, result = result, first
        elif "convBackwardFilter" in instruction.attributes:
            second, result = result, second
        inputs, kernel, outputs = labels
        window = _Window.parse(instruction.attributes, kernel.count("o") and len(kernel) - 2)
        products = 1.0
        for axis in range(len(kernel) - 2):
            products *= _valid(
                first[inputs.index(str(axis))],
                second[kernel.index(str(axis))],
                result[outputs.index(str(axis))],
                window.axes[axis],
            )
        batch, features = result[outputs.index("b")], result[outputs.index("f")]
        return 2.0 * products * batch * features * second[kernel.index("i")]

    def traffic(self, instruction: Instruction) -> tuple[float, float]:
        """Return the bytes moved to and from the device's memory, and to and from the host."""
        device = host = 0.0
        sliced = self.sliced(instruction)
        reads = [
            (self.tree(name), sliced.get(position))
            for position, name in enumerate(dict.fromkeys(instruction.operands))
        ]
        result = parse_shape(instruction.shape)
        if instruction.opcode == "fusion-start" and isinstance(result, list):
            result = result[1]  # the result is the second element, after the operands
        writes = [(array, sliced.get(-1 - k)) for k, array in enumerate(leaves(result))]
        for tree, part in [*reads, *writes]:
            for array in leaves(tree):
                amount = min(part, array.bytes) if part is not None else array.bytes
                if array.space == DEVICE:
                    device += amount
                elif array.space == HOST:
                    host += amount
        if instruction.opcode.endswith("-start") and instruction.opcode != "fusion-start":
            device /= 2  # the result contains the source a second time
        return device, host

    def sliced(self, instruction: Instruction) -> dict[int, float]:
        """Return the bytes touched where an instruction touches only a part of an array.

        Keys are positions of operands; the results are -1, -2, ….
        """
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            return {0: self.bytes(instruction.name)}
        if instruction.opcode == "dynamic-update-slice":
            update = self.bytes(instruction.operands[1])
            return {0: 0.0, -1: update}
        if instruction.opcode not in _FUSIONS or not instruction.called:
            return {}
        return self.sliced_by_fusion(instruction.called[0])

    @functools.cache  # noqa: B019 (lives as long as one estimate)
    def sliced_by_fusion(self, name: str) -> dict[int, float]:
        body = self.program.computations.get(name, ())
        parameters = {i.name: int(i.literal) for i in body if i.opcode == "parameter"}
        views = {p: p for p in parameters}
        touched: dict[str, float] = {}
        whole: set[str] = set()
        out: dict[int, float] = {}
        for i in body:
            if i.opcode == "bitcast" and i.operands and i.operands[0] in views:
                views[i.name] = views[i.operands[0]]
                continue
            for position, operand in enumerate(i.operands):
                source = views.get(operand)
                if source is None:
                    continue
                if i.opcode in ("dynamic-slice", "slice", "gather") and position == 0:
                    touched[source] = touched.get(source, 0.0) + self.bytes(i.name)
                elif i.opcode == "dynamic-update-slice" and position == 0:
                    touched.setdefault(source, 0.0)
                else:
                    whole.add(source)
            if i.opcode == "dynamic-update-slice" and len(i.operands) > 1:
                out[-1] = out.get(-1, 0.0) + self.bytes(i.operands[1])
        if body and body[-1].opcode == "tuple":
            out = self.updated(body, set(views))
        return out | {parameters[p]: n for p, n in touched.items() if p not in whole}

    def updated(self, body: Sequence[Instruction], views: set[str]) -> dict[int, float]:
        """Return the bytes written to each of several results that update an operand in place."""
        by_name = {i.name: i for i in body}
        out: dict[int, float] = {}
        for number, name in enumerate(body[-1].operands):
            made = by_name[name]
            while made.opcode == "bitcast":
                made = by_name[made.operands[0]]
            if made.opcode == "dynamic-update-slice" and made.operands[0] in views:
                out[-1 - number] = self.bytes(made.operands[1])
        return out

    def bytes(self, name: str) -> float:
        return float(sum(a.bytes for a in leaves(self.tree(name))))


_LHS_CONTRACTING = re.compile(
    r'(?:lhs_contracting_dims=\{|"lhs_contracting_dimensions":\[)([\d,"]*)[\]}]'
)


_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


@dataclasses.dataclass(frozen=True)
class _Axis:
    """The window of a convolution along one spatial axis."""

    stride: int = 1
    low: int = 0
    input_dilation: int = 1
    kernel_dilation: int = 1


@dataclasses.dataclass(frozen=True)
class _Window:
    axes: tuple[_Axis, ...]

    @staticmethod
    def parse(attributes: str, rank: int) -> _Window:
        found = re.search(r"window=\{([^}]*)\}", attributes)
        fields = dict(re.findall(r"(\w+)=([\w\-]+)", found.group(1))) if found else {}

        def column(name: str, default: str) -> list[str]:
            return fields[name].split("x") if name in fields else [default] * rank

        rows = zip(
            column("stride", "1"),
            column("pad", "0_0"),
            column("lhs_dilate", "1"),
            column("rhs_dilate", "1"),
            strict=True,
        )
        return _Window(
            tuple(_Axis(int(s), int(p.split("_")[0]), int(a), int(b)) for s, p, a, b in rows)
        )


@functools.lru_cache(maxsize=4096)
def _valid(size: int, kernel: int, outputs: int, axis: _Axis) -> int:
    """Count the (output, kernel) positions that read an element of the input, not padding."""
    count = 0
    reach = (size - 1) * axis.input_dilation
    for k in range(kernel):
        offset = k * axis.kernel_dilation - axis.low
        if axis.input_dilation == 1:
            first = max(0, (axis.stride - 1 - offset) // axis.stride)
            last = (reach - offset) // axis.stride
            count += max(0, min(outputs - 1, last) - first + 1)
        else:
            places = (o * axis.stride + offset for o in range(outputs))
            count += sum(0 <= p <= reach and p % axis.input_dilation == 0 for p in places)
    return count


# -- loops --------------------------------------------------------------------------------------


def trip_count(program: HloModule, loop: Instruction, computation: str) -> int | None:
    """Return how often the body of a loop runs, or None if the program does not say.

    CPU and CUDA programs state the number. For a TPU it is the constant in the loop's condition.
    """
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known.group(1))
    body = program.computations.get(loop.bodies[0], ()) if loop.bodies else ()
    by_name = {i.name: i for i in body}
    root = body[-1] if body else None
    if root is None or root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    around = {i.name: i for i in program.computations[computation]}
    start, end = (_number(by_name.get(o), loop, around) for o in root.operands)
    if end is None:
        return None
    return max(0, end - (start or 0))


def _number(
    instruction: Instruction | None, loop: Instruction, around: Mapping[str, Instruction]
) -> int | None:
    """Return a scalar of a loop's condition when the loop begins, if it is constant."""
    seen = instruction
    if seen is not None and seen.opcode == "get-tuple-element":
        index = re.search(r"index=(\d+)", seen.attributes)
        given = around.get(loop.operands[0])
        inside = index is not None and given is not None and given.opcode == "tuple"
        seen = around.get(given.operands[int(index.group(1))]) if inside else None  # pyright: ignore
    while seen is not None and seen.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        seen = around.get(seen.operands[0])
    if seen is None or seen.opcode != "constant" or not seen.literal.lstrip("-").isdigit():
        return None
    return int(seen.literal)
