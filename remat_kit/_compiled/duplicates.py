"""Count the operations that an optimized program computes twice.

XLA keeps on every instruction the name stack that it came from (`op_name`). The name stack of an
operation that `jax.checkpoint` recomputes contains `rematted_computation`. This mark alone proves
nothing: when the compiler merges a recomputed instruction with its original, the remaining
instruction may carry the mark. The module therefore counts only *matched* duplicates, those whose
original is still in the program.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remat_kit._compiled.hlo import (
    ENTERED_BY_CONTROL_FLOW,
    HEAVY_PRIMITIVES,
    MARK,
    SHAPE_DIMS,
    TRANSFORM,
    TRANSPARENT,
    TUPLE_INDEX,
    UNCOUNTED,
    VOLATILE,
    HloModule,
    Instruction,
    RecomputedOp,
    is_xla_remat,
    parse,
    parts_of_scope,
    words,
)
from remat_kit._program.paths import PIECES, join_scopes, piece_loop


@dataclass(frozen=True)
class RecomputedOps:
    """What a compiled program computes twice.

    Attributes:
        ops: the duplicates whose original is still in the program.
        unmatched: instructions marked as recomputed whose original is no longer in the program, so
            that the value is computed once.
        xla_remat: names of the instructions that XLA's own rematerialization added.
        forward: how often the forward pass runs each (module, primitive). The compiler may have
            merged several operations of the jaxpr into one.
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
        """Return the number of duplicated matrix products and convolutions."""
        return sum(op.count for op in self.ops if op.heavy)

    @property
    def by_primitive(self) -> dict[str, int]:
        """Return the number of duplicates by primitive, largest first."""
        return _tally((op.primitive, op.count) for op in self.ops)

    @property
    def by_module(self) -> dict[str, int]:
        """Return the number of duplicates by module path, largest first."""
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


def recomputed_ops(hlo: str | HloModule) -> RecomputedOps:
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

    Each matrix product and each convolution counts by itself. The compiler copies a cheap
    operation into every fusion that reads it; all copies of one value count once. A loop body
    counts once.

    Args:
        hlo: the optimized HLO of a gradient program, as from ``compiled.as_text()``, or parsed.

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


def xla_remat_names(program: HloModule) -> tuple[str, ...]:
    """Return the instructions that XLA's own rematerialization pass added, which it names so."""
    return tuple(i.name for i in program.instructions() if is_xla_remat(i.name))


def module_and_primitive(op_name: str) -> tuple[str, str]:
    """Return the module path and the primitive that an ``op_name`` names.

    >>> module_and_primitive("jit(f)/transpose(jvp(GPT))/jvp(GPT)/checkpoint/b0/mlp/dot")
    ('GPT/b0/mlp', 'dot')
    >>> module_and_primitive("jit(f)/jvp(GPT)/while/body/closed_call/b0/jit(relu)/max")
    ('GPT/b0', 'max')
    >>> module_and_primitive("jit(f)/transpose(jvp(GPT))/while/body/b/b/checkpoint/mlp/dot")
    ('GPT/b/mlp', 'dot')

    An instruction that the compiler merged from two carries both names; the first is its own.

    >>> module_and_primitive("jit(f)/jvp(GPT)/b0/mul;jit(f)/jvp(GPT)/b1/broadcast_in_dim")
    ('GPT/b0', 'mul')

    One that it combined from several has a list of their names. The module is what their paths have
    in common, and the primitive is that of the first.

    >>> module_and_primitive("jit(f)/(jvp(GPT)/b0/up/dot:jvp(GPT)/b0/down/mul)")
    ('GPT/b0', 'dot')
    """
    if (start := op_name.find("/(")) >= 0 and op_name.endswith(")"):
        head, rest = op_name[:start], op_name[start + 2 : -1]
        found = [module_and_primitive(f"{head}/{name}") for name in rest.split(":")]
        paths = [module.split("/") for module, _ in found]
        same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
        return "/".join(parts[0] for parts in same), found[0][1]
    *scopes, primitive = list(parts_of_scope(op_name.partition(";")[0])) or [""]
    return "/".join(_without_repeats(join_scopes(_groups(scopes)))), primitive


def pieces_of(op_name: str) -> str:
    """Return the loop over pieces that an instruction is in, or the empty string.

    >>> pieces_of("jit(f)/transpose(jvp(GPT))/head/16 pieces of axis 0/while/body/checkpoint/dot")
    '16 pieces of axis 0'
    """
    if PIECES not in op_name:
        return ""
    found = piece_loop(_groups(parts_of_scope(op_name.partition(";")[0])))
    return found[1] if found else ""


# -- from op_name to a key ------------------------------------------------------------------


_Values = Mapping[str, set[int]]  # by opcode


@dataclass(frozen=True)
class _Key:
    module: str
    primitive: str
    heavy: bool


def _key(instruction: Instruction) -> _Key | None:
    """Return the key under which an instruction is counted; None if it computes nothing itself."""
    if not instruction.op_name or instruction.opcode in UNCOUNTED:
        return None
    module, primitive = module_and_primitive(instruction.op_name)
    heavy = instruction.is_heavy
    # Padding, splitting and type conversion around a product carry the product's name.
    if not heavy and (primitive in HEAVY_PRIMITIVES or instruction.opcode == "custom-call"):
        return None
    return _Key(module, primitive, heavy)


def _depth(op_name: str) -> int:
    """Return how many regions contain the recomputed operation; each of them recomputes it."""
    return [*parts_of_scope(op_name.partition(MARK)[0])].count("checkpoint")


def _executions(values_by_opcode: _Values) -> int:
    """Return how often a primitive runs, because one run may be several instructions."""
    return min(len(values) for values in values_by_opcode.values())


_WRAPPERS = words(
    """closed_call cond core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr eval_jaxpr
    pjit while"""
)


_CALLS = words("checkpoint core_call jit pjit remat xla_call")


def _groups(parts: Iterable[str]) -> list[list[str]]:
    """Split scopes at each transformation or call, which are not scopes themselves."""
    groups: list[list[str]] = [[]]
    previous = ""
    for part in parts:
        transform = TRANSFORM.fullmatch(part)
        if transform:
            inner = (
                [] if transform.group(1) in _CALLS else _groups(parts_of_scope(transform.group(2)))
            )
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

    Inside a scan, JAX repeats the path before a jitted helper: ``b/mlp/b/mlp/max``.
    """
    result: list[str] = []
    for scope in path:
        result.append(scope)
        for n in range(2, len(result) // 2 + 1):
            if result[-n:] == result[-2 * n : -n]:
                del result[-n:]
                break
    return result


# -- value numbers --------------------------------------------------------------------------
# A fusion has private copies of the cheap instructions that it reads. To recognise the copies of
# one value, each instruction gets a number. Two instructions get the same number if they compute
# the same operation on the same inputs, also across the boundaries of fusions. The same operation
# in two layers reads different inputs and gets different numbers.

_Value = Any  # an int, or a tuple of values


@dataclass(frozen=True)
class _Unknown:
    """The value of an instruction about which nothing is known."""

    name: str


@dataclass(frozen=True)
class _Parameter:
    computation: str
    index: int


@dataclass(frozen=True)
class _Element:
    """An element of a tuple where the tuple itself is a single value."""

    whole: _Value
    index: int


@dataclass(frozen=True)
class _Computed:
    """The result of an operation; ``parameters`` are everything besides the operands that decides
    the result."""

    opcode: str
    operands: tuple[_Value, ...]
    parameters: tuple[Any, ...]


class _Numbering:
    def __init__(self, program: HloModule):
        self.program = program
        self.numbers: dict[Any, int] = {}
        self.seen: list[tuple[Instruction, int]] = []
        self.signatures: dict[str, tuple[Any, ...]] = {}

    def number(self, what: Any) -> int:
        return self.numbers.setdefault(what, len(self.numbers))

    def signature(self, computation: str) -> tuple[Any, ...]:
        """Describe what a computation does, independent of the names in its text."""
        if computation not in self.signatures:
            place: dict[str, int] = {}
            rows = []
            for i in self.program.computations.get(computation, ()):
                place[i.name] = len(place)
                reads = tuple(place.get(o, -1) for o in i.operands)
                rows.append((i.opcode, i.shape, i.literal, reads, self.parameters(i)))
            self.signatures[computation] = tuple(rows)
        return self.signatures[computation]

    def parameters(self, instruction: Instruction) -> tuple[Any, ...]:
        kept = VOLATILE.sub("", instruction.attributes)
        return (kept, *map(self.signature, instruction.called))

    def run(self, computation: str, arguments: tuple[_Value, ...] | None) -> _Value:
        values: dict[str, _Value] = {}
        result: _Value = self.number(_Unknown(computation))
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
            values[name] if name in values else self.number(_Unknown(name))
            for name in instruction.operands
        )
        if opcode == "parameter":
            index = int(instruction.literal)
            if arguments is not None and index < len(arguments):
                return arguments[index]
            return self.number(_Parameter(computation, index))
        if opcode in ENTERED_BY_CONTROL_FLOW and instruction.called:
            return self.run(instruction.called[0], operands)
        if opcode in ("while", "conditional"):
            for called in instruction.bodies:
                self.run(called, None)
            return self.number(_Unknown(instruction.name))
        if opcode in TRANSPARENT and operands:
            return operands[0]
        if opcode == "tuple":
            return operands
        if opcode == "get-tuple-element" and operands:
            index = int(TUPLE_INDEX.search(instruction.attributes).group(1))  # pyright: ignore
            whole = operands[0]
            if isinstance(whole, tuple) and index < len(whole):
                return whole[index]
            return self.number(_Element(whole, index))
        parameters = (_dims(instruction.shape), instruction.literal)
        parameters += self.parameters(instruction)
        return self.number(_Computed(opcode, operands, parameters))


def _values(program: HloModule) -> list[tuple[Instruction, int]]:
    numbering = _Numbering(program)
    numbering.run(program.entry, None)
    return numbering.seen


def value_numbers(program: HloModule) -> dict[str, int]:
    """Return the number of the value of each instruction, by the name of the instruction.

    Two instructions with one number compute the same value. Collectives that differ in their
    channel alone do not have one number.
    """
    return {instruction.name: number for instruction, number in reversed(_values(program))}


def _dims(shape: str) -> str:
    """Return a shape without its layout, its element type and its axes of size one."""
    return re.sub(r"\b1,|,1\b", "", " ".join(SHAPE_DIMS.findall(shape)))


def _tally(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, count in pairs:
        counts[name] += count
    return dict(counts.most_common())
