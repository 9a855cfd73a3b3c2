"""Parse the text of an optimized program into computations and instructions.

XLA keeps on every instruction the name stack that it came from (`op_name`) and its source line.
This module reads the text because jaxlib's objects for instructions have neither. The serialized
proto of a module has both, and it also has the schedule, the aliases and the layouts (tried on the
CPU and for a TPU v5e with jax 0.12). But jaxlib ships no classes to read it with, so the package
would have to contain those that protoc generates from `hlo.proto` and `xla_data.proto`, and the
modules that read attributes and shapes from the text would have to be written again.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from remat_kit._program.paths import short_path

MARK = "rematted_computation"


def words(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())


# Opcodes that compute nothing: they move, rename or reshape values.
TRANSPARENT = words(
    """bitcast bitcast-convert convert copy copy-done copy-start opt-barrier optimization-barrier
    reduce-precision reshape transpose async-update async-done call-done fusion-done"""
)


UNCOUNTED = TRANSPARENT | words(
    """add-dependency after-all async-start broadcast call call-start concatenate conditional
    constant domain dynamic-slice dynamic-update-slice fusion fusion-start get-tuple-element iota
    pad parameter partition-id replica-id slice slice-done slice-start tuple while"""
)


# Opcodes that run the instructions of other computations one after the other.
_CONTROL_FLOW = words("async-start call call-start conditional while")


# Opcodes whose value is the value of the computation that they call.
ENTERED_BY_CONTROL_FLOW = words("async-start call call-start fusion fusion-start")


_HEAVY_TARGET = re.compile(r"cublas|cudnn|onednn|gemm|matmul|conv|fmha|triton|mosaic", re.I)


HEAVY_PRIMITIVES = words("dot_general conv_general_dilated ragged_dot_general")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program.

    Attributes:
        name: unique within the program.
        opcode: XLA's name of the operation, as in ``dot`` or ``custom-call``.
        shape: as printed, with layout.
        operands: names of the instructions it reads.
        attributes: everything after the operands, as printed.
        op_name: the name stack that it came from, or the empty string.
        source: ``file:line`` of the user's code, or the empty string.
        is_root: whether it is the result of its computation.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str = field(repr=False)
    literal: str = field(repr=False)
    op_name: str = ""
    source: str = ""
    is_root: bool = False

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Return the names of all computations that this one refers to, in the order printed.

        These are the bodies of loops, branches and fusions, the function that a reduction combines
        two numbers with, the comparison of a sort, and the computations given to a custom call.

        >>> line = "c = f32[] conditional(), branch_computations={%left, %right}, index=1"
        >>> Instruction("c", "conditional", "f32[]", (), line, "").called
        ('left', 'right')
        """
        found = _CALLED.findall(_NOTES.split(self.attributes, maxsplit=1)[0])
        return tuple(name for names in found for name in _OPERAND.findall(names))

    @property
    def bodies(self) -> tuple[str, ...]:
        """Return the computations of `called` whose instructions are themselves scheduled steps.

        These are the condition and the body of a loop, the branches of a conditional, and the
        computation that a call runs, whether or not it runs in the background. A computation that
        a fusion or a reduction calls is part of a single step.
        """
        return self.called if self.opcode in _CONTROL_FLOW else ()

    @property
    def is_heavy(self) -> bool:
        """Tell whether this is a matrix product, a convolution or a library call for one."""
        if self.opcode == "custom-call":
            return _HEAVY_TARGET.search(self.target) is not None
        return self.opcode in ("dot", "convolution")

    @property
    def target(self) -> str:
        """Return the target of a custom call, and an empty string for any other instruction."""
        found = _TARGET.search(self.attributes) if self.opcode == "custom-call" else None
        return found.group(1) if found else ""


@dataclass(frozen=True)
class HloModule:
    """The computations of a compiled program.

    Attributes:
        computations: by name; each is its instructions in order.
        entry: the name of the computation that a call of the program runs.
        aliased: the results that take over the memory of donated arguments, as (position of the
            result, position of the argument). The first is None if the program has one result.
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    aliased: tuple[tuple[int | None, int], ...] = ()

    def instructions(self) -> Iterator[Instruction]:
        """Yield every instruction of every computation."""
        for instructions in self.computations.values():
            yield from instructions


@dataclass(frozen=True)
class RecomputedOp:
    """A primitive of a module that the compiled program computes a second time.

    Attributes:
        primitive: the JAX primitive, as in ``dot_general``.
        module: the module path, as in ``GPT/block_0/mlp``; empty if there is none.
        count: how often it is recomputed; a loop body counts once.
        source: ``file:line`` of one of the operations.
        heavy: whether they are matrix products, convolutions or library calls.
    """

    primitive: str
    module: str
    count: int
    source: str
    heavy: bool


def is_xla_remat(name: str) -> bool:
    """Tell from its name whether XLA's own rematerialization pass added an instruction."""
    return _XLA_REMAT.search(name) is not None


def xla_remat_count(hlo_text: str) -> int:
    """Count the instructions that XLA's own rematerialization pass added, without parsing the rest.

    >>> xla_remat_count("  %dot.3.remat2 = f32[] dot(%x)\\n  ROOT %add = f32[] add(%dot.3.remat2)")
    1
    """
    return sum(map(is_xla_remat, _DEFINED.findall(hlo_text)))


def parts_of_scope(op_name: str) -> Iterator[str]:
    """Split a name stack at the slashes that are not inside parentheses."""
    depth, start = 0, 0
    for position, character in enumerate(op_name):
        if character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == "/" and depth == 0:
            if position > start:
                yield op_name[start:position]
            start = position + 1
    if start < len(op_name):
        yield op_name[start:]


# -- parsing --------------------------------------------------------------------------------

# `calls`, `to_apply`, `condition`, `body`, `select`, `scatter`, `true_computation` and
# `false_computation` name one computation; `branch_computations` and `called_computations` name
# several.
_REFERENCE = r"(?:calls|to_apply|condition|body|select|scatter|\w+_computations?)"


_REFERENCED = r"=(%[\w.\-]+|\{ *%[^{}]*\})"


_CALLED = re.compile(rf"\b{_REFERENCE}{_REFERENCED}")


_NOTES = re.compile(", (?:metadata=[{]|backend_config=)")  # these attributes may hold any text


_TARGET = re.compile(r'custom_call_target="([^"]*)"')


TUPLE_INDEX = re.compile(r"index=(\d+)")


_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


_FRAME = re.compile(r"stack_frame_id=(\d+)")


_SOURCE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')


_XLA_REMAT = re.compile(r"\.remat\d*(?:\.|$)")


TRANSFORM = re.compile(r"(\w+)\((.*)\)")


SHAPE_DIMS = re.compile(r"\[([\d,<=]*)\]")


_HEADER = re.compile(r"(ENTRY )?%([\w.\-]+)(?: \(.*)? \{$|(ENTRY )?%([\w.\-]+) \{$")


_BEGIN = re.compile(r"\s+(ROOT )?%([\w.\-]+) = ")


_DEFINED = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = ", re.M)


_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")


_OPERAND = re.compile(r"%([\w.\-]+)")


VOLATILE = re.compile(
    r",? ?(?:metadata|frontend_attributes|control-predecessors|sharding)=\{[^}]*\}"
    rf"|,? ?{_REFERENCE}{_REFERENCED}|,? ?backend_config=.*$"
)


def parse(hlo_text: str) -> HloModule:
    """Return the computations of an HLO text.

    >>> program = parse("HloModule m\\nENTRY %e (x: f32[]) -> f32[] {\\n"
    ...                 "  ROOT %x = f32[] parameter(0)\\n}")
    >>> program.entry, program.computations["e"][0].opcode
    ('e', 'parameter')
    """
    lines = hlo_text.splitlines()
    frames = _Frames(lines)
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, current, body = "", "", []
    for line in lines:
        if line.startswith("}"):
            computations[current] = tuple(body)
        elif line[:1] in ("%", "E") and (header := _HEADER.match(line)):
            current, body = header.group(2) or header.group(4), []
            entry = current if header.group(1) or header.group(3) else entry
        elif line[:1] == " " and (begin := _BEGIN.match(line)):
            body.append(_instruction(line, begin, frames))
    if not entry:
        raise ValueError("the text holds no entry computation; is it optimised HLO?")
    _Renaming(computations).run(entry)
    return HloModule(computations, entry, _aliased(lines[0]))


class _Renaming:
    """Gives the instructions of a loop the name stack of the loop.

    JAX lowers a function that it calls several times once, and XLA copies it to each call. In the
    copies a loop has the name stack of its own call, but the instructions of its body keep that of
    the first call (jax 0.10.2 and 0.12). So the body of a loop in the backward pass would count as
    a part of the forward pass.
    """

    def __init__(self, computations: dict[str, tuple[Instruction, ...]]):
        self.computations = computations
        self.seen: set[str] = set()

    def run(self, name: str, old: str = "", new: str = "") -> None:
        """Rename the instructions of a computation that stands in a loop, and all that it calls."""
        if name in self.seen or name not in self.computations:
            return
        self.seen.add(name)
        found = self.computations[name]
        if old != new:
            found = tuple(_renamed(i, old, new) for i in found)
            self.computations[name] = found
        for instruction in found:
            inner = old, new
            if instruction.opcode == "while":
                inner = self.of_loop(instruction, old, new)
            for called in instruction.called:
                self.run(called, *inner)

    def of_loop(self, loop: Instruction, old: str, new: str) -> tuple[str, str]:
        """Return how the name stacks of the instructions in a loop begin, and how they should."""
        if not loop.op_name.endswith("/while"):
            return old, new
        depth = loop.op_name.count(_IN_LOOP) + 1
        inside = (i.op_name for c in loop.called for i in self.computations.get(c, ()))
        stacks = [name.split(_IN_LOOP) for name in inside]
        found = {_IN_LOOP.join(stack[:depth]) for stack in stacks if len(stack) > depth}
        if len(found) != 1:
            return old, new
        return f"{found.pop()}/while/", f"{loop.op_name}/"


_IN_LOOP = "/while/body/"


def _renamed(instruction: Instruction, old: str, new: str) -> Instruction:
    name = instruction.op_name
    if not name.startswith(old):
        return instruction
    return dataclasses.replace(instruction, op_name=new + name.removeprefix(old))


def _aliased(header: str) -> tuple[tuple[int | None, int], ...]:
    """Return which results take over the memory of an argument: (result, argument).

    >>> _aliased("HloModule m, input_output_alias={ {0}: (2, {}, may-alias), {3}: (0, {}) }, x=1")
    ((0, 2), (3, 0))
    """
    _, _, listed = header.partition("input_output_alias={")
    listed, _, _ = listed.partition(" }")
    return tuple((int(out) if out else None, int(of)) for out, of in _ALIAS.findall(listed))


_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")


def _instruction(line: str, begin: re.Match[str], frames: _Frames) -> Instruction:
    start = begin.end()
    end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        raise ValueError(f"not an instruction: {line.strip()[:120]}")
    close = _closing(line, opcode.end() - 1)
    inside, attributes = line[opcode.end() : close - 1], line[close:]
    op_name = _OP_NAME.search(attributes)
    return Instruction(
        name=begin.group(2),
        opcode=opcode.group(1),
        shape=line[start:end],
        operands=tuple(_OPERAND.findall(inside)),
        attributes=attributes,
        literal=inside if opcode.group(1) in ("parameter", "constant", "iota") else "",
        op_name=op_name.group(1) if op_name else "",
        source=frames.source(attributes),
        is_root=begin.group(1) is not None,
    )


def _closing(line: str, start: int) -> int:
    """Return the position after the parenthesis that closes the one at ``start``."""
    depth = 0
    for match in _PARENTHESES.finditer(line, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.end()
    return len(line)


_PARENTHESES = re.compile(r"[()]")


class _Frames:
    """The tables of source positions at the head of an HLO text."""

    def __init__(self, lines: Iterable[str]):
        self.files: dict[int, str] = {}
        self.locations: dict[int, tuple[int, int]] = {}
        self.frames: dict[int, tuple[int, int]] = {}
        self.known: dict[int, str] = {}
        table = ""
        for line in lines:
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = line
            elif table and line.startswith(("%", "ENTRY")):
                break
            elif table and line[:1].isdigit():
                self._row(table, line)

    def _row(self, table: str, line: str) -> None:
        number, rest = line.split(" ", 1)
        values = [int(v) for v in re.findall(r"=(\d+)", rest)]
        if table == "FileNames":
            self.files[int(number)] = rest.strip('"')
        elif table == "FileLocations":
            self.locations[int(number)] = (values[0], values[2])
        elif table == "StackFrames":
            # The text numbers frames from 1 and prints the number of a parent one too high, so a
            # frame without a parent names frame 1.
            self.frames[int(number)] = (values[0], values[1] - 1)

    def source(self, attributes: str) -> str:
        """Return ``file:line`` of the innermost frame in the user's code."""
        if plain := _SOURCE.search(attributes):
            file = short_path(plain.group(1))
            return f"{file}:{plain.group(2)}" if plain.group(2) else file
        found = _FRAME.search(attributes)
        return self._innermost(int(found.group(1))) if found else ""

    def _innermost(self, frame: int) -> str:
        if frame not in self.known:
            stack = list(self._stack(frame))
            ours = [place for place in stack if not _LIBRARY.search(place)]
            file, colon, line = next(iter(ours or stack), "").rpartition(":")
            self.known[frame] = f"{short_path(file)}{colon}{line}"
        return self.known[frame]

    def _stack(self, frame: int) -> Iterator[str]:
        while frame in self.frames:
            location, frame = self.frames[frame]
            file, line = self.locations.get(location, (0, 0))
            yield f"{self.files.get(file, '?')}:{line}"


_LIBRARY = re.compile(r"[/\\](?:jax|jaxlib|flax|remat_kit)[/\\][^:]*\.py:\d+$")
