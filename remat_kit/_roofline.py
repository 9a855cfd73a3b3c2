"""How long a compiled step takes on a chip, estimated from its program.

Two estimates, never mixed. The *roofline*: each scheduled instruction takes the longer of its
floating-point operations at the chip's peak rate and its bytes at the memory's bandwidth, loops
times their trip count. It is a lower bound that no launch, no stall and no clock under the peak has
entered; it ranks programs, it does not time them. And the *compiler's own*: a TPU program carries
the cycles that its compiler expects for every fusion.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 2009.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from remat_kit._anatomy import Origin
from remat_kit._hlo import Instruction, Program, words
from remat_kit._liveness import DEVICE, HOST, Array, leaves, parse_shape


class Chip(Protocol):
    """What is asked of a `Target`."""

    @property
    def platform(self) -> str: ...
    @property
    def bandwidth_bytes_per_second(self) -> float: ...
    @property
    def host_bandwidth_bytes_per_second(self) -> float: ...
    @property
    def flops_per_second(self) -> Mapping[str, float]: ...


@dataclasses.dataclass(frozen=True)
class Cost:
    """What some instructions cost.

    Attributes:
        seconds: of the instructions by themselves; copies in the background take none.
        flops: floating-point operations; a multiplication and an addition count one each.
        bytes: read and written in the device's memory.
        host_bytes: to and from the host.
        cycles: that the compiler expects, 0 where it says nothing.
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
        seconds: by the roofline: the instructions one after the other, or all the bytes at the
            memory's or the host link's bandwidth, whichever is longer.
        total: of the whole program.
        by_place: the same by phase, module path and primitive.
        compiler_seconds: the compiler's cycles at the chip's clock; None where either is unknown.
        endless: loops whose number of iterations could not be read; each counts once.
    """

    seconds: float
    total: Cost
    by_place: Mapping[tuple[str, str, str], Cost] = dataclasses.field(hash=False, repr=False)
    compiler_seconds: float | None
    endless: tuple[str, ...] = ()

    def by_phase(self) -> dict[str, Cost]:
        """Return the costs of each phase."""
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
            "by_phase": {phase: cost.seconds for phase, cost in self.by_phase().items()},
        }


# Cycles a second of one core, as published: Jouppi et al., "TPU v4", ISCA 2023, for v2 to v4;
# Austin et al., "How to scale your model", 2025, for v5e and v5p.
_CLOCKS = {
    "tpu-v2": 0.70e9,
    "tpu-v3": 0.94e9,
    "tpu-v4": 1.05e9,
    "tpu-v5e": 1.5e9,
    "tpu-v5p": 1.75e9,
}


def estimate(
    program: Program, chip: Chip, origins: Mapping[str, Origin], *, chip_name: str = ""
) -> Estimate:
    """Estimate the step time of a compiled program on the chip that it was compiled for.

    Args:
        program: as `_hlo.parse` gives it.
        chip: its peak rates, FLOP/s by type, and bandwidths, bytes/s.
        origins: as `_anatomy.origins` gives them.
        chip_name: decides the clock that turns cycles into seconds.
    """
    counter = _Counter(program, chip, origins)
    counter.visit(program.entry, 1.0)
    total = sum(counter.by_place.values(), Cost())
    seconds = max(
        total.seconds,
        total.bytes / chip.bandwidth_bytes_per_second,
        total.host_bytes / chip.host_bandwidth_bytes_per_second,
    )
    clock = _CLOCKS.get(chip_name.partition("@")[0])
    compiler = total.cycles / clock if clock and total.cycles else None
    return Estimate(seconds, total, counter.by_place, compiler, tuple(counter.endless))


class _Counter:
    def __init__(self, program: Program, chip: Chip, origins: Mapping[str, Origin]):
        self.program = program
        self.chip = chip
        self.origins = origins
        self.by_place: dict[tuple[str, str, str], Cost] = {}
        self.endless: list[str] = []
        self.arrays = _Arrays(program)

    def visit(self, computation: str, times: float) -> None:
        for instruction in self.program.computations[computation]:
            if instruction.opcode == "while":
                self.loop(instruction, computation, times)
            elif instruction.opcode == "conditional":
                branches = instruction.called
                for name in branches:  # which one runs is not known: each has its share
                    self.visit(name, times / len(branches))
            elif instruction.opcode == "call":
                self.visit(instruction.called[0], times)
            elif instruction.opcode not in _FREE and not instruction.opcode.endswith("-done"):
                self.count(instruction, times)

    def loop(self, instruction: Instruction, computation: str, times: float) -> None:
        trips = trip_count(self.program, instruction, computation)
        if trips is None:
            self.endless.append(instruction.name)
        body = re.search(r"body=%([\w.\-]+)", instruction.attributes)
        assert body is not None
        self.visit(body.group(1), times * (trips if trips is not None else 1))

    def count(self, instruction: Instruction, times: float) -> None:
        cost = self.cost(instruction)
        if times != 1.0:
            cost = cost * times
        origin = self.origins.get(instruction.name)
        place = ("other", "", instruction.opcode)
        if origin is not None:
            place = (origin.phase, origin.module, origin.primitive)
        self.by_place[place] = self.by_place.get(place, Cost()) + cost

    def cost(self, instruction: Instruction) -> Cost:
        flops, seconds = 0.0, 0.0
        for heavy in self.heavy(instruction):
            amount = self.arrays.flops(heavy)
            flops += amount
            seconds += amount / self.rate(heavy)
        size, host = self.arrays.traffic(instruction)
        slowest = max(seconds, size / self.chip.bandwidth_bytes_per_second)
        if instruction.opcode.endswith("-start"):
            slowest = 0.0  # it runs behind what comes next
        cycles = _CYCLES.search(instruction.attributes)
        return Cost(slowest, flops, size, host, float(cycles.group(1)) if cycles else 0.0)

    def heavy(self, instruction: Instruction) -> list[Instruction]:
        if instruction.opcode in _FUSIONS and instruction.called:
            return [
                i
                for name in instruction.called
                for outer in self.program.computations.get(name, ())
                for i in self.heavy(outer)
            ]
        return [instruction] if instruction.is_heavy else []

    def rate(self, instruction: Instruction) -> float:
        rates = self.chip.flops_per_second
        dtype = self.arrays.of(instruction.operands[0]).dtype if instruction.operands else "f32"
        names = _RATES.get(dtype, ("float32",))
        found = next((rates[n] for n in names if n in rates), None)
        return found or max(rates.values())


_FREE = words(
    """add-dependency after-all bitcast constant copy-done domain get-tuple-element
    opt-barrier optimization-barrier parameter partition-id replica-id slice-done tuple
    async-done async-update"""
)
_FUSIONS = ("fusion", "fusion-start")  # the second runs on another stream
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# JAX's default precision lets a CUDA card round float32 operands to tensorfloat32.
_RATES = {
    "f64": ("float64",),
    "f32": ("tensorfloat32", "float32"),
    "f16": ("float16", "bfloat16"),
    "bf16": ("bfloat16", "float16"),
    "s8": ("int8",),
    "u8": ("int8",),
}


# -- one instruction ----------------------------------------------------------------------------


class _Arrays:
    """The shapes of a program's instructions, and what follows from them."""

    def __init__(self, program: Program):
        self.program = program
        self.shapes = {i.name: i.shape for i in program.instructions()}

    def tree(self, name: str) -> Any:
        return parse_shape(self.shapes[name]) if name in self.shapes else []

    def of(self, name: str) -> Array:
        return next(iter(leaves(self.tree(name))), Array("f32", (), 0, DEVICE))

    def flops(self, instruction: Instruction) -> float:
        """Count the operations of a product or a convolution."""
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
        """As XLA's cost analysis does: products with padding and holes are not counted."""
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
        """Return bytes read and written in the device's memory, and to or from the host."""
        device = host = 0.0
        sliced = self.sliced(instruction)
        reads = [
            (self.tree(name), sliced.get(position))
            for position, name in enumerate(dict.fromkeys(instruction.operands))
        ]
        result = parse_shape(instruction.shape)
        if instruction.opcode == "fusion-start" and isinstance(result, list):
            result = result[1]  # between the operands and the state
        writes = [(array, sliced.get(-1 - k)) for k, array in enumerate(leaves(result))]
        for tree, part in [*reads, *writes]:
            for array in leaves(tree):
                amount = min(part, array.bytes) if part is not None else array.bytes
                if array.space == DEVICE:
                    device += amount
                elif array.space == HOST:
                    host += amount
        if instruction.opcode.endswith("-start") and instruction.opcode != "fusion-start":
            device /= 2  # the source stands in the result once more
        return device, host

    def sliced(self, instruction: Instruction) -> dict[int, float]:
        """Return the bytes touched where only a part is, by operand; results are -1, -2, …."""
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
        """Of several results, the bytes written to those that update an operand in place."""
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
    """The window of one spatial axis of a convolution."""

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
    """Count the pairs of an output and a kernel position that read an element of the input."""
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


def trip_count(program: Program, loop: Instruction, computation: str) -> int | None:
    """Return how often a loop's body runs, or None where the program does not tell.

    CPU and CUDA programs say it; for a TPU it is the constant that the condition compares with.
    """
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known.group(1))
    name = re.search(r"condition=%([\w.\-]+)", loop.attributes)
    body = program.computations.get(name.group(1), ()) if name else ()
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
    """The value of a scalar of a loop's condition, as the loop begins."""
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
