"""Compute which buffers a compiled program holds in memory at each step of its schedule.

The text of a compiled program is scheduled: its instructions run in the order in which they are
printed. The walk in this module derives from that order, and from which instruction reads which
value, the steps at which each buffer is live. The compiler packs the same buffers into one heap.
Gaps in the heap and other choices of the compiler add to the sum of the live buffers; the report
shows that amount as a separate number.

The rules for aliasing are XLA's documented ones (``HloDataflowAnalysis``, ``HloAliasAnalysis`` and
``HloLiveRange`` of github.com/openxla/xla): a loop reuses the buffers that it is given, a
dynamic-update-slice writes in place, a bitcast is another view. A loop body occurs once in the
schedule. The branches of a conditional occur one after the other, and each holds only the buffers
that it needs itself, so the peak is that of the branch that needs the most memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from remat_kit._compiled.hlo import HloModule, Instruction, words

DEVICE, HOST, VMEM, OTHER = "device", "host", "vmem", "other"


_SPACES = {"0": DEVICE, "5": HOST, "1": VMEM}


# -- shapes -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a printed shape.

    Attributes:
        dtype: in XLA's spelling, as in ``f32``.
        dims: the sizes of the logical shape.
        bytes: its size in memory, including the padding of its tiles.
        space: the memory that it lies in: ``device``, ``host``, ``vmem`` or ``other``.
        order: the dimensions in the order of the layout, the one with the smallest stride first.
    """

    dtype: str
    dims: tuple[int, ...]
    bytes: int
    space: str
    order: tuple[int, ...] = dataclasses.field(default=(), repr=False)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


Tree = Any  # a leaf, or a list of trees


@functools.lru_cache(maxsize=65536)
def _parsed(shape: str) -> Tree:
    tree, _ = _parse(_COMMENT.sub("", shape), 0)
    return tree


def parse_shape(shape: str) -> Tree:
    """Parse a printed shape into an `Array`, or into a list of trees for a tuple.

    >>> [str(a) for a in parse_shape("(f32[2,3]{1,0}, s32[])")]
    ['f32[2,3]', 's32[]']
    >>> parse_shape("bf16[3,100]{1,0:T(8,128)(2,1)S(1)}")
    Array(dtype='bf16', dims=(3, 100), bytes=2048, space='vmem')
    """
    return _parsed(shape)


def _parse(text: str, at: int) -> tuple[Tree, int]:
    if text[at] == "(":
        parts: list[Tree] = []
        at += 1
        while text[at] != ")":
            part, at = _parse(text, at)
            parts.append(part)
            while text[at] in ", ":
                at += 1
        return parts, at + 1
    found = _ARRAY.match(text, at)
    if found is None:
        raise ValueError(f"not a shape: {text[at : at + 60]!r}")
    dtype, dims, layout = found.group(1), found.group(2), found.group(3) or ""
    return _array(dtype, dims or "", layout), found.end()


@functools.lru_cache(maxsize=65536)
def _array(dtype: str, dims: str, layout: str) -> Array:
    sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
    order, _, rest = layout.partition(":")
    minor_to_major = [int(i) for i in order.split(",") if i]
    tiles = [_numbers(t) for t in _TILE.findall(rest)]
    elements = 1
    physical = [sizes[i] for i in reversed(minor_to_major)] if minor_to_major else list(sizes)
    if tiles:
        tile = tiles[0]
        physical = [1] * (len(tile) - len(physical)) + physical
        for i, size in enumerate(reversed(tile), start=1):
            physical[-i] = -(-physical[-i] // size) * size
    for size in physical:
        elements *= size
    space = _SPACE.search(rest)
    where = _SPACES.get(space.group(1), OTHER) if space else DEVICE
    return Array(dtype, sizes, -(-elements * _bits(dtype) // 8), where, tuple(minor_to_major))


def _numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x.strip("*")]


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    if dtype in ("token", "opaque"):
        return 0
    found = _WIDTH.search(dtype)
    return int(found.group(1)) if found else 8


_COMMENT = re.compile(r"/\*[^*]*\*/")


_ARRAY = re.compile(r"([a-z][\w]*)(?:\[([\d,<=]*)\])?(?:\{([^{}]*)\})?")


_TILE = re.compile(r"(?<=[T)])\(([\d,*]+)\)")


_SPACE = re.compile(r"S\((\d+)\)")


_WIDTH = re.compile(r"^(?:[a-z]+?)(\d+)")


def leaves(tree: Tree) -> Iterator[Any]:
    """Yield the leaves of a tree, first to last."""
    if isinstance(tree, list):
        for part in tree:
            yield from leaves(part)
    else:
        yield tree


# -- values and the buffers they share ----------------------------------------------------------


@dataclasses.dataclass
class _Value:
    """One array that an instruction computes: its bytes, and when it is live."""

    array: Array
    maker: Instruction
    computation: str
    start: int
    end: int
    reads: list[int] = dataclasses.field(default_factory=list)
    stacked: bool = False


class _Values:
    """All values of a program, and which of them share a buffer."""

    def __init__(self) -> None:
        self.all: list[_Value] = []
        self.parent: list[int] = []

    def new(self, array: Array, maker: Instruction, computation: str, at: int) -> int:
        self.all.append(_Value(array, maker, computation, at, at))
        self.parent.append(len(self.parent))
        return len(self.parent) - 1

    def buffer(self, value: int) -> int:
        while self.parent[value] != value:
            self.parent[value] = self.parent[self.parent[value]]
            value = self.parent[value]
        return value

    def share(self, a: Tree, b: Tree) -> None:
        """Record that two trees share memory, leaf by leaf."""
        for x, y in zip(leaves(a), leaves(b), strict=False):
            x, y = self.buffer(x), self.buffer(y)
            if x != y:
                self.parent[max(x, y)] = min(x, y)


class _LivenessWalk:
    """A walk over the schedule that computes for each value the steps at which it is live."""

    def __init__(self, program: HloModule, through_views: bool):
        self.program = program
        self.values = _Values()
        self.steps: list[Instruction] = []
        self.read: dict[int, list[Tree]] = {}
        self.arguments: dict[int, Tree] = {}
        self.depth = 0  # number of loops around the current instruction
        self.in_place = _InPlace(program)
        self.elementwise = _Elementwise(program, through_views)

    def computation(self, name: str, arguments: Sequence[Tree] | None) -> Tree:
        """Walk one computation; ``arguments`` are None for the entry."""
        trees: dict[str, Tree] = {}
        root: Tree = []
        for instruction in self.program.computations[name]:
            tree = self.instruction(instruction, name, arguments, trees)
            trees[instruction.name] = root = tree
            if instruction.is_root:
                break
        return root

    def fresh(self, instruction: Instruction, computation: str) -> Tree:
        return self._fresh(parse_shape(instruction.shape), instruction, computation)

    def _fresh(self, shape: Tree, instruction: Instruction, computation: str) -> Tree:
        if isinstance(shape, list):
            return [self._fresh(part, instruction, computation) for part in shape]
        return self.values.new(shape, instruction, computation, len(self.steps))

    def use(self, tree: Tree) -> None:
        now = len(self.steps)
        for number in leaves(tree):
            value = self.values.all[number]
            value.end = max(value.end, now)
            value.reads.append(now)

    def instruction(
        self,
        instruction: Instruction,
        computation: str,
        arguments: Sequence[Tree] | None,
        trees: dict[str, Tree],
    ) -> Tree:
        opcode = instruction.opcode
        operands = [trees[name] for name in instruction.operands if name in trees]
        if opcode == "parameter":
            index = int(instruction.literal)
            if arguments is None:
                self.arguments[index] = tree = self.fresh(instruction, computation)
                for value in leaves(tree):
                    self.values.all[value].start = 0
                return tree
            return arguments[index]
        if opcode == "constant":
            return self.fresh(instruction, computation)
        if opcode == "tuple":
            return operands
        if opcode == "get-tuple-element":
            return operands[0][_index(instruction)]
        if opcode in _FORWARDING and operands:
            return operands[0]
        if opcode in ("copy-done", "slice-done"):
            self.step(instruction, operands)
            return operands[0][0]
        if opcode.endswith("-done") and operands and isinstance(operands[0], list):
            self.step(instruction, operands)
            return _done(operands[0])
        if opcode == "while":
            return self.loop(instruction, computation, operands)
        if opcode == "conditional":
            return self.branch(instruction, computation, operands)
        if opcode == "call":
            for tree in operands:
                self.use(tree)
            return self.computation(instruction.bodies[0], operands)
        for body in instruction.bodies:  # the bodies of a call that runs in the background
            self.computation(body, operands)
        result = self.fresh(instruction, computation)
        self.alias(instruction, operands, result)
        self.step(instruction, operands)
        return result

    def step(self, instruction: Instruction, operands: Sequence[Tree]) -> None:
        for tree in operands:
            self.use(tree)
        self.read[len(self.steps)] = list(operands)
        self.steps.append(instruction)

    def operands(self, value: _Value) -> Sequence[Tree]:
        """Return what the instruction reads that computes a value."""
        made = value.start < len(self.steps) and self.steps[value.start] is value.maker
        return self.read.get(value.start, ()) if made else ()

    def overwritable(self, result: int) -> Iterator[int]:
        """Yield the values that a value may overwrite, being read for the last time for it.

        A copy never overwrites what it copies.
        """
        value = self.values.all[result]
        read = self.operands(value)
        if not read or value.maker.opcode == "copy":
            return
        for position in self.elementwise.operands(value.maker):
            for number in leaves(read[position]) if position < len(read) else ():
                source = self.values.all[number]
                if source.end == value.start and self.elementwise.fits(value.array, source.array):
                    yield number

    def alias(self, instruction: Instruction, operands: Sequence[Tree], result: Tree) -> None:
        if instruction.opcode.endswith("-start") and isinstance(result, list):
            # A copy starts as (target, source, context); other operations start as
            # (sources, results, ...).
            held = result[1 if instruction.opcode == "copy-start" else 0]
            self.values.share(operands, held)
            for source, view in zip(leaves(operands), leaves(held), strict=False):
                self.values.all[view].maker = self.values.all[source].maker
            result = result[1]
        for output, operand in self.in_place.pairs(instruction):
            target = result[output] if isinstance(result, list) and output is not None else result
            if operand < len(operands):
                self.values.share(operands[operand], target)
                for value in leaves(target):
                    self.values.all[value].stacked = self.depth > 0

    def loop(self, instruction: Instruction, computation: str, operands: list[Tree]) -> Tree:
        (initial,) = operands
        self.use(initial)
        condition, body = instruction.bodies
        carried = self._renewed(initial, instruction, computation)
        self.values.share(initial, carried)
        self.depth += 1
        self.computation(condition, [carried])
        out = self.computation(body, [carried])
        self.depth -= 1
        self.use(out)
        self.values.share(carried, out)
        result = self._renewed(initial, instruction, computation)
        self.values.share(carried, result)
        self.steps.append(instruction)
        return result

    def _renewed(self, tree: Tree, instruction: Instruction, computation: str) -> Tree:
        """Return a new value in the same buffer, which is free between the two values."""
        if isinstance(tree, list):
            return [self._renewed(part, instruction, computation) for part in tree]
        array = self.values.all[tree].array
        return self.values.new(array, self.values.all[tree].maker, computation, len(self.steps))

    def branch(self, instruction: Instruction, computation: str, operands: list[Tree]) -> Tree:
        self.use(operands[0])
        names = instruction.bodies
        roots = []
        for name, tree in zip(names, operands[1:], strict=False):
            self.use(tree)
            roots.append(self.computation(name, [tree]))
        result = self.fresh(instruction, computation)
        for root in roots:
            self.use(root)
            self.values.share(root, result)
        self.steps.append(instruction)
        return result


def _index(instruction: Instruction) -> int:
    found = re.search(r"index=(\d+)", instruction.attributes)
    assert found is not None
    return int(found.group(1))


_FORWARDING = frozenset(
    {"bitcast", "opt-barrier", "optimization-barrier", "domain", "add-dependency"}
)


def _done(start: list[Tree]) -> Tree:
    return start[1] if len(start) > 1 else start[0]


FUSED = ("fusion", "fusion-start")


class _InPlace:
    """Finds the operand whose memory an instruction writes its result into."""

    def __init__(self, program: HloModule):
        self.program = program
        self.known: dict[str, list[tuple[int | None, int]]] = {}

    def pairs(self, instruction: Instruction) -> list[tuple[int | None, int]]:
        """Return pairs (element of the result, operand); the element is None for an array."""
        if instruction.opcode in ("dynamic-update-slice", "scatter"):
            return [(None, 0)]
        declared = _DECLARED.search(instruction.attributes)
        if declared:
            found = _PAIR.findall(declared.group(1))
            return [(int(out) if out else None, int(operand)) for out, operand in found]
        if instruction.opcode not in FUSED or not instruction.called:
            return []
        name = instruction.called[0]
        if name not in self.known:
            self.known[name] = self.of_fusion(name)
        return self.known[name]

    def of_fusion(self, name: str) -> list[tuple[int | None, int]]:
        by_name = {i.name: i for i in self.program.computations[name]}
        root = self.program.computations[name][-1]
        if root.opcode == "tuple":
            outputs = [(n, by_name.get(o)) for n, o in enumerate(root.operands)]
        else:
            outputs = [(None, root)]
        pairs = []
        for n, instruction in outputs:
            updated = _through(instruction, by_name)
            if updated is None or updated.opcode not in ("dynamic-update-slice", "scatter"):
                continue
            target = _through(by_name.get(updated.operands[0]), by_name)
            if target is not None and target.opcode == "parameter":
                pairs.append((n, int(target.literal)))
        return pairs


def _through(
    instruction: Instruction | None, by_name: dict[str, Instruction]
) -> Instruction | None:
    while instruction is not None and instruction.opcode in ("bitcast", "reshape"):
        instruction = by_name.get(instruction.operands[0])
    return instruction


_DECLARED = re.compile(r"output_to_operand_aliasing=\{((?:[^{}]|\{[^{}]*\})*)\}")


_PAIR = re.compile(r"\{(\d*)\}: \((\d+), \{\}\)")


# -- sharing that the compiler may choose -------------------------------------------------------


class _Elementwise:
    """Finds the operands that an instruction can overwrite with its result if nobody reads them
    afterwards."""

    def __init__(self, program: HloModule, through_views: bool):
        self.program = program
        self.through_views = through_views
        self.known: dict[str, frozenset[int]] = {}

    def fits(self, result: Array, operand: Array) -> bool:
        """Return whether a result of this shape can overwrite an operand of this shape."""
        a, b = result, operand
        same = a.dims == b.dims and a.bytes == b.bytes and a.space == b.space
        return same and (self.through_views or (a.dtype, a.order) == (b.dtype, b.order))

    def operands(self, instruction: Instruction) -> Sequence[int]:
        """Return the positions of the operands that the instruction reads elementwise."""
        if instruction.opcode in _ELEMENTWISE:
            return range(len(instruction.operands))
        if instruction.opcode != "fusion" or not instruction.called:
            return ()
        name = instruction.called[0]
        if name not in self.known:
            self.known[name] = self._of_fusion(
                self.program.computations[name], "kind=kInput" in instruction.attributes
            )
        return sorted(self.known[name])

    def _of_fusion(self, body: Sequence[Instruction], is_input: bool) -> frozenset[int]:
        by_name = {i.name: i for i in body}
        outputs = set(body[-1].operands) if body[-1].opcode == "tuple" else set()
        moved: set[str] = set()  # values that an operation other than an elementwise one reads
        for instruction in reversed(body):
            spoils = instruction.name in moved or (
                instruction.opcode not in _ELEMENTWISE
                and instruction.opcode not in ("parameter", "tuple")
                and not (instruction.opcode == "bitcast" and self.through_views)
            )
            if spoils and is_input and instruction.opcode == "reduce":
                # XLA:GPU writes a result that it also reduces at the index at which it reads it.
                summed = _through(by_name.get(instruction.operands[0]), by_name)
                spoils = summed is None or summed.name not in outputs
            if spoils:
                moved.update(instruction.operands)
        return frozenset(
            int(i.literal) for i in body if i.opcode == "parameter" and i.name not in moved
        )


_ELEMENTWISE = words(
    """abs add and atan2 cbrt ceil clamp compare complex convert copy cosine divide erf exponential
    exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum multiply
    negate not or popcnt power real reduce-precision remainder round-nearest-afz
    round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine
    sqrt subtract tan tanh xor"""
)


# -- buffers ------------------------------------------------------------------------------------

ARGUMENT, OUTPUT, TEMPORARY, CONSTANT = "argument", "output", "temporary", "constant"


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Memory that holds one or more values, one after the other.

    Attributes:
        makers: the instructions that compute the values.
        array: the largest of the values.
        kind: ``argument``, ``output``, ``temporary`` or ``constant``.
        alive: the steps at which the buffer is live, as (first, last) pairs in order.
        within: whether a temporary lies in the memory of an output that is not yet written.
        reads: the steps at which a value is read.
        stacked: whether a loop fills the buffer, one slice in each iteration.
        donated: whether it is the memory of an argument that a result takes over.
    """

    makers: tuple[Instruction, ...]
    array: Array
    kind: str
    alive: tuple[tuple[int, int], ...]
    within: bool = False
    reads: tuple[int, ...] = dataclasses.field(default=(), repr=False)
    stacked: bool = False
    donated: bool = False

    @property
    def bytes(self) -> int:
        """Size in bytes, including the padding of tiles."""
        return self.array.bytes

    @property
    def space(self) -> str:
        """The memory that it lies in; see `Array`."""
        return self.array.space


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The steps of a compiled program, and the buffers that are live during them.

    Attributes:
        steps: the instructions in the order they run; the body of a loop occurs once, before the
            loop.
        buffers: all buffers, in the order in which they are written.
    """

    steps: tuple[Instruction, ...]
    buffers: tuple[Buffer, ...]

    def bytes_of(self, kind: str) -> int:
        """Sum the buffers of one kind on the device."""
        return sum(b.bytes for b in self.buffers if b.kind == kind and b.space == DEVICE)

    @functools.cached_property
    def temporary_bytes(self) -> tuple[int, ...]:
        """Bytes of the temporaries live on the device at each step, except those in outputs."""
        change = [0] * (len(self.steps) + 2)
        for buffer in self.buffers:
            if buffer.kind == TEMPORARY and buffer.space == DEVICE and not buffer.within:
                for first, last in buffer.alive:
                    change[first] += buffer.bytes
                    change[last + 1] -= buffer.bytes
        total, out = 0, []
        for step in range(len(self.steps)):
            total += change[step]
            out.append(total)
        return tuple(out)

    @functools.cached_property
    def peak_step(self) -> int:
        """The first step at which the most bytes of temporaries are alive."""
        temporary = self.temporary_bytes
        return max(range(len(temporary)), key=lambda s: (temporary[s], -s), default=0)

    @property
    def base_bytes(self) -> int:
        """Bytes that are live at every step: arguments, and outputs in memory of their own."""
        return self.bytes_of(ARGUMENT) + self.bytes_of(OUTPUT)

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak: arguments, outputs and the temporaries of the fullest step."""
        return self.base_bytes + max(self.temporary_bytes, default=0)

    def alive_at(self, step: int) -> list[Buffer]:
        """Return the buffers that are live on the device at a step, largest first."""
        found = [
            b
            for b in self.buffers
            if b.space == DEVICE
            and b.kind != CONSTANT
            and not b.within
            and (b.kind != TEMPORARY or any(first <= step <= last for first, last in b.alive))
        ]
        return sorted(found, key=lambda b: -b.bytes)


def schedule(
    program: HloModule, *, reuses_outputs: bool = True, through_views: bool = False
) -> Schedule:
    """Walk the schedule of a compiled program and return its buffers.

    >>> from remat_kit._compiled.hlo import parse
    >>> text = '''HloModule small, is_scheduled=true
    ... ENTRY %main (x: f32[256]) -> f32[] {
    ...   %x = f32[256]{0} parameter(0)
    ...   %a = f32[256]{0} sine(%x)
    ...   %b = f32[256]{0} cosine(%a)
    ...   ROOT %c = f32[] dot(%a, %b)
    ... }'''
    >>> schedule(parse(text)).temporary_bytes
    (1024, 2048, 2048)

    Args:
        program: as `hlo.parse` returns it.
        reuses_outputs: whether temporaries may use the memory of an output before it is written.
            They may on CPU and CUDA, and not on a TPU.
        through_views: whether a fusion may overwrite an operand that it reads through a bitcast.
            It may on CUDA and TPU.
    """
    walk = _LivenessWalk(program, through_views)
    root = walk.computation(program.entry, None)
    walk.use(root)
    values = walk.values
    for output, argument in program.aliased:
        values.share(walk.arguments[argument], root if output is None else root[output])
    outputs = {values.buffer(v) for v in leaves(root)}
    members: dict[int, list[_Value]] = {}
    for number, value in enumerate(values.all):
        members.setdefault(values.buffer(number), []).append(value)
    kinds = {b: _kind(b, found, outputs) for b, found in members.items()}
    placed = _Placement(walk, members, kinds, outputs).placed() if reuses_outputs else set()
    _let_results_take_over(walk, members, kinds, placed)
    buffers = [_buffer(found, kinds[b], b in outputs, b in placed) for b, found in members.items()]
    return Schedule(tuple(walk.steps), tuple(buffers))


def _kind(buffer: int, values: Sequence[_Value], outputs: set[int]) -> str:
    if any(v.maker.opcode == "parameter" for v in values):
        return ARGUMENT
    if buffer in outputs:
        return OUTPUT
    return CONSTANT if values[0].maker.opcode == "constant" else TEMPORARY


def _let_results_take_over(
    walk: _LivenessWalk, members: dict[int, list[_Value]], kinds: dict[int, str], placed: set[int]
) -> None:
    """End a temporary one step early if the instruction that reads it last can overwrite it.

    XLA's heap shares memory in this way between two buffers of one value each, if the instruction
    reads the operand itself and not a view of it. A copy never overwrites what it copies.
    """
    values = walk.values.all
    alone = {b for b, kind in kinds.items() if kind == TEMPORARY and len(members[b]) == 1} - placed
    numbers = [n for n in range(len(values)) if walk.values.buffer(n) in alone]
    for result in sorted(numbers, key=lambda n: (values[n].start, values[n].end)):
        names = values[result].maker.operands
        for source in walk.overwritable(result):
            if walk.values.buffer(source) in alone and values[source].maker.name in names:
                values[source].end -= 1
                break


def _buffer(values: Sequence[_Value], kind: str, is_result: bool, within: bool) -> Buffer:
    alive: list[tuple[int, int]] = []
    for first, last in sorted((v.start, v.end) for v in values if v.end >= v.start):
        if alive and first <= alive[-1][1] + 1:
            alive[-1] = (alive[-1][0], max(alive[-1][1], last))
        else:
            alive.append((first, last))
    largest = max(values, key=lambda v: v.array.bytes)
    makers = tuple({v.maker.name: v.maker for v in values}.values())
    reads = tuple(sorted({step for v in values for step in v.reads}))
    stacked = any(v.stacked for v in values)
    return Buffer(
        makers,
        largest.array,
        kind,
        tuple(alive),
        within,
        reads=reads,
        stacked=stacked,
        donated=kind == ARGUMENT and is_result,
    )


class _Placement:
    """Puts temporaries into the memory of outputs that are not yet written.

    The memory of a donated argument is free from its last use until its output is written.

    XLA assigns memory from the largest buffer to the smallest, and in the order of the operands
    among buffers of one size. It tries the memory of an operand, then every output from the
    smallest and the last one, and opens a heap only if the buffer fits into none of them (its
    ``BufferAssigner``). This class does the same.
    """

    def __init__(
        self,
        walk: _LivenessWalk,
        members: dict[int, list[_Value]],
        kinds: dict[int, str],
        outputs: set[int],
    ):
        self.walk, self.members, self.kinds, self.outputs = walk, members, kinds, outputs
        self.numbers: dict[int, list[int]] = {}
        for number in range(len(walk.values.all)):
            self.numbers.setdefault(walk.values.buffer(number), []).append(number)

    def placed(self) -> set[int]:
        """Return the temporaries that lie in the memory of an output."""
        largest = {b: max(v, key=lambda v: v.array.bytes).array for b, v in self.members.items()}
        position = _post_order(self.walk.program)

        def turn(buffer: int) -> tuple[int, bool, int]:
            first = min(position[v.maker.name] for v in self.members[buffer])
            return -largest[buffer].bytes, buffer not in self.outputs, first

        always = len(self.walk.steps)
        outputs: list[_OutputMemory] = []
        found: dict[int, _OutputMemory] = {}
        for buffer in sorted((b for b in largest if largest[b].space == DEVICE), key=turn):
            new = _OutputMemory(self.mask(buffer), self.numbers[buffer])
            if buffer in self.outputs:
                # An argument that is updated in place is never free. There may be thousands.
                if new.taken.bit_count() <= always:
                    found[buffer] = new
                    outputs.append(new)
            elif self.kinds[buffer] == TEMPORARY and outputs:
                own = (found[b] for b in self.operands(buffer) if b in found)
                tried = (memory for memory in (*own, *reversed(outputs)) if self.fits(new, memory))
                if memory := next(tried, None):
                    memory.taken |= new.taken
                    memory.values += new.values
                    found[buffer] = memory
        return found.keys() - self.outputs

    def mask(self, buffer: int) -> int:
        """Return the steps at which a buffer is live, as the bits of an integer."""
        mask = 0
        for value in self.members[buffer]:
            mask |= ((1 << (value.end - value.start + 1)) - 1) << value.start
        return mask

    def operands(self, buffer: int) -> Iterator[int]:
        """Yield the buffers from which a buffer is computed; elements of tuples have none."""
        for value in self.members[buffer]:
            if not value.maker.shape.startswith("("):
                for tree in self.walk.operands(value):
                    if not isinstance(tree, list):
                        yield self.walk.values.buffer(tree)

    def fits(self, new: _OutputMemory, memory: _OutputMemory) -> bool:
        """Return whether the memory is free while the values of a new buffer are live.

        Two values may share one step, at which one of them overwrites the other.
        """
        shared = (memory.taken & new.taken).bit_count()
        return not shared or (
            shared <= 2
            and all(
                b in self.walk.overwritable(a) or a in self.walk.overwritable(b)
                for a, b in itertools.product(new.values, memory.values)
                if self.overlap(a, b)
            )
        )

    def overlap(self, a: int, b: int) -> bool:
        x, y = self.walk.values.all[a], self.walk.values.all[b]
        return x.start <= y.end and y.start <= x.end


@dataclasses.dataclass
class _OutputMemory:
    """The steps at which the memory of an output is in use, and the values that lie in it."""

    taken: int
    values: list[int]


def _post_order(program: HloModule) -> dict[str, int]:
    """Number the instructions so that operands come first, as XLA does to break ties."""
    computations: list[str] = []

    def visit(name: str) -> None:
        for instruction in program.computations[name]:
            for body in instruction.bodies:
                if body not in computations:
                    visit(body)
        computations.append(name)

    visit(program.entry)
    position: dict[str, int] = {}
    for name in reversed(computations):
        by_name = {i.name: i for i in program.computations[name]}
        read = {o for i in by_name.values() for o in i.operands}
        stack = [n for n in reversed(by_name) if n not in read]
        opened: set[str] = set()
        while stack:
            current = stack[-1]
            if current not in opened:
                opened.add(current)
                stack += [o for o in reversed(by_name[current].operands) if o in by_name]
                continue
            stack.pop()
            position.setdefault(current, len(position))
    return position
