"""A compiled program read back: what the optimised HLO still computes twice.

XLA keeps on every instruction the name stack it came from (`op_name`); what `jax.checkpoint`
recomputes carries `rematted_computation` in it. The mark alone proves nothing: when the compiler
merges a recomputed instruction with its original, the survivor may keep the mark. Only *matched*
duplicates are counted, those whose original is still in the program.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remat_kit._graph import join_scopes, short_path

MARK = "rematted_computation"


def words(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())


# Opcodes that compute nothing: they move, name or regroup values.
_TRANSPARENT = words(
    """bitcast bitcast-convert convert copy copy-done copy-start opt-barrier optimization-barrier
    reduce-precision reshape transpose async-update async-done"""
)
_UNCOUNTED = _TRANSPARENT | words(
    """add-dependency after-all async-start broadcast call concatenate conditional constant domain
    dynamic-slice dynamic-update-slice fusion get-tuple-element iota pad parameter partition-id
    replica-id slice slice-done slice-start tuple while"""
)
_HEAVY_TARGET = re.compile(r"cublas|cudnn|onednn|gemm|matmul|conv|fmha|triton|mosaic", re.I)
_HEAVY_PRIMITIVES = words("dot_general conv_general_dilated ragged_dot_general")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program.

    Attributes:
        name: unique within the program.
        opcode: XLA's, as in ``dot`` or ``custom-call``.
        shape: as printed, with layout.
        operands: names of the instructions it reads.
        attributes: everything after the operands, as printed.
        op_name: the name stack it came from, or the empty string.
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

    @property
    def called(self) -> tuple[str, ...]:
        """Return the names of the computations that run as part of this one."""
        return tuple(_CALLED.findall(self.attributes)) if self.opcode != "reduce" else ()

    @property
    def is_heavy(self) -> bool:
        """Tell whether this is a matrix product, a convolution or a library call for one."""
        if self.opcode == "custom-call":
            target = _TARGET.search(self.attributes)
            return target is not None and _HEAVY_TARGET.search(target.group(1)) is not None
        return self.opcode in ("dot", "convolution")


@dataclass(frozen=True)
class Program:
    """The computations of a compiled program, by name, and which of them is the entry.

    Attributes:
        computations: each with its instructions in order.
        entry: the name of the one that is called.
        aliased: the results that take over the memory of donated arguments, as (position of the
            result, position of the argument); the first is None where there is one result alone.
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
    """One primitive of one module that the compiled program computes again.

    Attributes:
        primitive: the JAX primitive, as in ``dot_general``.
        module: the module path, as in ``GPT/block_0/mlp``; empty when there is none.
        count: how many times; a loop body counts once.
        source: ``file:line`` of one of them.
        heavy: whether they are matrix products, convolutions or library calls.
    """

    primitive: str
    module: str
    count: int
    source: str
    heavy: bool


@dataclass(frozen=True)
class RecomputedOps:
    """What a compiled program computes twice.

    Attributes:
        ops: the duplicates whose original is still in the program.
        unmatched: marked as recomputed, but the original is gone: the value is computed once.
        xla_remat: names of the instructions that XLA's own rematerialization added.
        forward: how often the forward pass runs each primitive of each module, as (module,
            primitive); the compiler may have merged several of the jaxpr.
    """

    ops: tuple[RecomputedOp, ...]
    unmatched: tuple[RecomputedOp, ...]
    xla_remat: tuple[str, ...]
    forward: Mapping[tuple[str, str], int] = field(default_factory=dict, hash=False, repr=False)

    @property
    def total(self) -> int:
        """Return the number of duplicated operations."""
        return sum(op.count for op in self.ops)

    @property
    def heavy(self) -> int:
        """Return the number of duplicated products and convolutions."""
        return sum(op.count for op in self.ops if op.heavy)

    @property
    def by_primitive(self) -> dict[str, int]:
        """Return the duplicates by primitive, most first."""
        return _tally((op.primitive, op.count) for op in self.ops)

    @property
    def by_module(self) -> dict[str, int]:
        """Return the duplicates by module path, most first."""
        return _tally((op.module, op.count) for op in self.ops)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return {
            "total": self.total,
            "heavy": self.heavy,
            "by_primitive": self.by_primitive,
            "by_module": self.by_module,
            "unmatched": sum(op.count for op in self.unmatched),
            "xla_remat": len(self.xla_remat),
        }


def recomputed_ops(hlo: str | Program) -> RecomputedOps:
    """Count the operations that a compiled program computes twice.

    >>> text = '''HloModule small
    ... ENTRY %main (x: f32[4], w: f32[4]) -> f32[4] {
    ...   %x = f32[4]{0} parameter(0)
    ...   %w = f32[4]{0} parameter(1)
    ...   %sin.1 = f32[4]{0} sine(%x), metadata={op_name="jit(f)/jvp(Net)/mlp/sin"}
    ...   %mul.1 = f32[4]{0} multiply(%sin.1, %w)
    ...   %sin.2 = f32[4]{0} sine(%x), metadata={
    ...   ROOT %mul.2 = f32[4]{0} multiply(%mul.1, %sin.2)
    ... }'''.replace("{\\n  ROOT", '{op_name="jit(f)/transpose(jvp(Net))/checkpoint/'
    ...     'rematted_computation/mlp/sin"}\\n  ROOT')
    >>> recomputed_ops(text).by_module
    {'Net/mlp': 1}

    Products and convolutions count one by one. Cheap operations are copied by the compiler into
    every fusion that reads them; copies of one value count once. A loop body counts once.

    Args:
        hlo: the optimised HLO of a gradient program, as from ``compiled.as_text()``, or parsed.

    Raises:
        ValueError: the text holds no entry computation.
    """
    program = parse(hlo) if isinstance(hlo, str) else hlo
    forward: defaultdict[_Key, _Values] = defaultdict(lambda: defaultdict(set))
    again: defaultdict[_Key, dict[int, _Values]] = defaultdict(dict)
    sources: dict[_Key, str] = {}
    for instruction, value in _values(program):
        key = _key(instruction)
        if key is None:
            continue
        if MARK in instruction.op_name:
            depth = _depth(instruction.op_name)
            again[key].setdefault(depth, defaultdict(set))[instruction.opcode].add(value)
            sources.setdefault(key, instruction.source)
        elif "transpose(" not in instruction.op_name:
            forward[key][instruction.opcode].add(value)
    ops, unmatched = [], []
    for key, by_depth in again.items():
        originals = _executions(forward[key]) if key in forward else 0
        runs_again = [*map(_executions, by_depth.values())]
        marked, matched = sum(runs_again), sum(min(n, originals) for n in runs_again)
        if matched:
            ops.append(RecomputedOp(key.primitive, key.module, matched, sources[key], key.heavy))
        if matched < marked:
            rest = marked - matched
            unmatched.append(RecomputedOp(key.primitive, key.module, rest, sources[key], key.heavy))
    runs: Counter[tuple[str, str]] = Counter()
    for key, found in forward.items():
        runs[key.module, key.primitive] += _executions(found)
    return RecomputedOps(tuple(ops), tuple(unmatched), xla_remat_names(program), runs)


def xla_remat_names(program: Program) -> tuple[str, ...]:
    """Return the instructions that XLA's own rematerialization pass added: it names them so."""
    return tuple(i.name for i in program.instructions() if is_xla_remat(i.name))


def is_xla_remat(name: str) -> bool:
    """Tell by its name whether XLA's own rematerialization pass added an instruction."""
    return _XLA_REMAT.search(name) is not None


def module_and_primitive(op_name: str) -> tuple[str, str]:
    """Return the module path and the primitive that an ``op_name`` speaks of.

    >>> module_and_primitive("jit(f)/transpose(jvp(GPT))/jvp(GPT)/checkpoint/b0/mlp/dot")
    ('GPT/b0/mlp', 'dot')
    >>> module_and_primitive("jit(f)/jvp(GPT)/while/body/closed_call/b0/jit(relu)/max")
    ('GPT/b0', 'max')
    >>> module_and_primitive("jit(f)/transpose(jvp(GPT))/while/body/b/b/checkpoint/mlp/dot")
    ('GPT/b/mlp', 'dot')

    An instruction that the compiler merged carries the names of both; the first is its own.

    >>> module_and_primitive("jit(f)/jvp(GPT)/b0/mul;jit(f)/jvp(GPT)/b1/broadcast_in_dim")
    ('GPT/b0', 'mul')
    """
    *scopes, primitive = list(_split(op_name.partition(";")[0])) or [""]
    return "/".join(_without_repeats(join_scopes(_groups(scopes)))), primitive


# -- from op_name to a key ------------------------------------------------------------------


_Values = Mapping[str, set[int]]  # by opcode


@dataclass(frozen=True)
class _Key:
    module: str
    primitive: str
    heavy: bool


def _key(instruction: Instruction) -> _Key | None:
    """Return under what an instruction is counted; None when it computes nothing by itself."""
    if not instruction.op_name or instruction.opcode in _UNCOUNTED:
        return None
    module, primitive = module_and_primitive(instruction.op_name)
    heavy = instruction.is_heavy
    # Padding, splitting and type conversion around a product carry the product's name.
    if not heavy and (primitive in _HEAVY_PRIMITIVES or instruction.opcode == "custom-call"):
        return None
    return _Key(module, primitive, heavy)


def _depth(op_name: str) -> int:
    """Return how many regions are around the recomputation: each of them recomputes by itself."""
    return [*_split(op_name.partition(MARK)[0])].count("checkpoint")


def _executions(values_by_opcode: _Values) -> int:
    """Return how often a primitive runs: one run may be several instructions of several opcodes."""
    return min(len(values) for values in values_by_opcode.values())


_WRAPPERS = words(
    """closed_call cond core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr eval_jaxpr
    pjit while"""
)
_CALLS = words("checkpoint core_call jit pjit remat xla_call")


def _groups(parts: Iterable[str]) -> list[list[str]]:
    """Split scopes where a transformation or a call begins, which are not scopes themselves."""
    groups: list[list[str]] = [[]]
    previous = ""
    for part in parts:
        transform = _TRANSFORM.fullmatch(part)
        if transform:
            inner = [] if transform.group(1) in _CALLS else _groups(_split(transform.group(2)))
            groups += inner or [[]]
        elif part in _WRAPPERS or (previous == "while" and part == "body"):
            groups.append([])
        elif part == "checkpoint":
            # In a loop's backward pass JAX writes the path of a region twice.
            half = len(groups[-1]) // 2
            if groups[-1][:half] == groups[-1][half:]:
                del groups[-1][half:]
        else:
            groups[-1].append(part)
        previous = part
    return groups


def _without_repeats(path: Sequence[str]) -> list[str]:
    """Collapse runs of two or more scopes that follow themselves.

    JAX writes the path once more in front of a jitted helper inside a scan: ``b/mlp/b/mlp/max``.
    """
    result: list[str] = []
    for scope in path:
        result.append(scope)
        for n in range(2, len(result) // 2 + 1):
            if result[-n:] == result[-2 * n : -n]:
                del result[-n:]
                break
    return result


def _split(op_name: str) -> Iterator[str]:
    """Yield the parts between slashes that are not inside parentheses."""
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


# -- value numbers --------------------------------------------------------------------------
# A fusion holds private copies of the cheap instructions it reads. Each instruction gets a number
# that is equal for equal computations on equal inputs, through fusion boundaries, so that copies
# of one value fall together and the same operation of two layers does not.

_Value = Any  # an int, or a tuple of values


class _Numbering:
    def __init__(self, program: Program):
        self.program = program
        self.numbers: dict[Any, int] = {}
        self.seen: list[tuple[Instruction, int]] = []

    def number(self, what: Any) -> int:
        return self.numbers.setdefault(what, len(self.numbers))

    def run(self, computation: str, arguments: tuple[_Value, ...] | None) -> _Value:
        values: dict[str, _Value] = {}
        result: _Value = self.number(("empty", computation))
        for instruction in self.program.computations.get(computation, ()):
            value = self.value(instruction, computation, arguments, values)
            values[instruction.name] = result = value
            if isinstance(value, int):
                self.seen.append((instruction, value))
            else:
                self.seen.append((instruction, self.number(value)))
            if instruction.is_root:
                return value
        return result

    def value(
        self,
        instruction: Instruction,
        computation: str,
        arguments: tuple[_Value, ...] | None,
        values: dict[str, _Value],
    ) -> _Value:
        opcode = instruction.opcode
        operands = tuple(
            values.get(name, self.number(("unknown", name))) for name in instruction.operands
        )
        if opcode == "parameter":
            index = int(instruction.literal)
            if arguments is not None and index < len(arguments):
                return arguments[index]
            return self.number(("parameter", computation, index))
        if opcode in ("fusion", "call", "async-start") and instruction.called:
            return self.run(instruction.called[0], operands)
        if opcode in ("while", "conditional"):
            for called in instruction.called:
                self.run(called, None)
            return self.number((opcode, instruction.name))
        if opcode in _TRANSPARENT and operands:
            return operands[0]
        if opcode == "tuple":
            return operands
        if opcode == "get-tuple-element" and operands:
            index = int(_INDEX.search(instruction.attributes).group(1))  # pyright: ignore
            whole = operands[0]
            if isinstance(whole, tuple) and index < len(whole):
                return whole[index]
            return self.number(("element", whole, index))
        kept = _VOLATILE.sub("", instruction.attributes)
        return self.number((opcode, _dims(instruction.shape), instruction.literal, operands, kept))


def _values(program: Program) -> list[tuple[Instruction, int]]:
    numbering = _Numbering(program)
    numbering.run(program.entry, None)
    return numbering.seen


def _dims(shape: str) -> str:
    """Return a shape without layout, element type and axes of one element."""
    return re.sub(r"\b1,|,1\b", "", " ".join(_SHAPE_DIMS.findall(shape)))


# -- parsing --------------------------------------------------------------------------------

_CALLED = re.compile(r"(?:calls|to_apply|body|condition|branch_computations)=\{?%([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_INDEX = re.compile(r"index=(\d+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_XLA_REMAT = re.compile(r"\.remat\d*(?:\.|$)")
_TRANSFORM = re.compile(r"(\w+)\((.*)\)")
_SHAPE_DIMS = re.compile(r"\[([\d,<=]*)\]")
_HEADER = re.compile(r"(ENTRY )?%([\w.\-]+)(?: \(.*)? \{$|(ENTRY )?%([\w.\-]+) \{$")
_BEGIN = re.compile(r"\s+(ROOT )?%([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_VOLATILE = re.compile(
    r",? ?(?:metadata|frontend_attributes|control-predecessors|sharding)=\{[^}]*\}"
    r"|,? ?(?:calls|to_apply)=%[\w.\-]+|,? ?backend_config=.*$"
)


def parse(hlo_text: str) -> Program:
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
    return Program(computations, entry, _aliased(lines[0]))


def _aliased(header: str) -> tuple[tuple[int | None, int], ...]:
    """Read which results take an argument's place.

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
            # The text numbers frames from 1 and prints their parents one too high, so that a
            # frame without a parent names 1.
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


def _tally(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, count in pairs:
        counts[name] += count
    return dict(counts.most_common())
