"""What a traced program computes: its values numbered, its operations linked to what they read.

Two values with the same number are equal whenever the program runs, because the number is made
of the primitive, its parameters and the numbers of its inputs (global value numbering: Alpern,
Wegman, Zadeck, POPL 1988). That two operations are the same computation is then a proof, where
a comparison of names and source lines would be a guess.

Calls are entered. Identities (names, copies, barriers, transfers) keep the number of what they
move. A value inside a loop is a function of the position in the stacked arrays, so what a forward
loop stacks and a backward loop reads, in whatever order, has one number again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import jax
import jax.extend.core as jec
import numpy as np
from jax.core import Tracer

from remat_kit import _frames, _jax
from remat_kit._files import is_own_file
from remat_kit._program import ops as _ops
from remat_kit._program import paths as _paths
from remat_kit._program import program as _program
from remat_kit._program.paths import Path
from remat_kit._program.shares import Share

FORWARD, BACKWARD = "forward", "backward"


# -- numbers ----------------------------------------------------------------------------------
# What a number stands for. Each kind of value has a class of its own, so that none can be taken for
# another, whatever a primitive is called: JAX has primitives named `stack` and `cond`, and a
# library may name its own as it likes. Arrays and values are given by their numbers.


@dataclasses.dataclass(frozen=True)
class Computed:
    """The first result of a primitive, from its parameters, its inputs and the results' types."""

    primitive: str
    parameters: Hashable
    inputs: tuple[int, ...]
    results: tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class FurtherResult:
    """Another result of the operation whose first one is known."""

    first: int
    position: int


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of the program."""

    index: int
    shape: tuple[int, ...] | None
    dtype: str


@dataclasses.dataclass(frozen=True)
class ConstantNumber:
    """A literal, or a captured constant that is small: known by its content."""

    shape: tuple[int, ...] | None
    dtype: str
    content: Hashable


@dataclasses.dataclass(frozen=True)
class Object:
    """A captured constant that is large: known by its identity."""

    id: int


@dataclasses.dataclass(frozen=True)
class Unique:
    """A value that equals no other."""

    count: int


@dataclasses.dataclass(frozen=True)
class Input:
    """A placeholder for an input of a body that is a parameter of a primitive."""

    index: int
    aval: Hashable


@dataclasses.dataclass(frozen=True)
class BodyOf:
    """What a body that is a parameter of a primitive computes."""

    results: Hashable


@dataclasses.dataclass(frozen=True)
class Element:
    """The slice of a stacked array at the position of the loop of depth ``level``."""

    level: int
    array: int
    aval: Hashable


@dataclasses.dataclass(frozen=True)
class Stack:
    """The array of a value at every position of the loop of depth ``level``."""

    level: int
    value: int
    length: int


@dataclasses.dataclass(frozen=True)
class Hole:
    """A stand-in for a carried value; see `Numbering.hole`."""

    level: int
    init: int
    aval: Hashable
    occurrence: int


@dataclasses.dataclass(frozen=True)
class Carry:
    """A value that a loop carries, by the recurrences that it takes part in."""

    loop: Hashable
    hole: int
    steps: frozenset[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Last:
    """A carried value after the last iteration."""

    value: int


@dataclasses.dataclass(frozen=True)
class Selected:
    """What a conditional gives when its branches give these."""

    index: int
    branches: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of a value that one device holds."""

    spec: Hashable
    value: int


@dataclasses.dataclass(frozen=True)
class Unshard:
    """The value that is made of the devices' parts."""

    spec: Hashable
    value: int


class Numbering:
    """Gives equal computations equal numbers; one numbering may serve several programs."""

    def __init__(self) -> None:
        self._table: dict[Hashable, int] = {}
        self._keys: list[Any] = []
        self._constant: list[bool] = []
        self._holes: list[frozenset[int]] = []
        self._bodies: dict[int, tuple[Any, Hashable]] = {}
        self._alive: list[Any] = []  # objects known by their id
        self._unique = 0

    def number(
        self, key: Hashable, inputs: Iterable[int] = (), *, constant: bool | None = None
    ) -> int:
        """Return the number of ``key``, which already holds the numbers of its inputs."""
        found = self._table.get(key)
        if found is not None:
            return found
        inputs = tuple(inputs)
        new = len(self._keys)
        self._table[key] = new
        self._keys.append(key)
        if constant is None:
            constant = all(self._constant[i] for i in inputs)
        self._constant.append(constant)
        holes = [self._holes[i] for i in inputs if self._holes[i]]
        self._holes.append(frozenset().union(*holes) if holes else frozenset())
        return new

    def key(self, number: int) -> Any:
        """Return what a number stands for."""
        return self._keys[number]

    def is_constant(self, number: int) -> bool:
        """Tell whether a value depends on no argument of the program."""
        return self._constant[number]

    def fresh(self) -> int:
        """Return the number of a value that equals no other."""
        self._unique += 1
        return self.number(Unique(self._unique), constant=False)

    def argument(self, index: int, aval: Any) -> int:
        """Return the number of a program's argument."""
        return self.number(Argument(index, *_aval(aval)), constant=False)

    def constant(self, value: Any, aval: Any) -> int:
        """Return the number of a literal or captured constant: by value where it is small."""
        if isinstance(value, Tracer) or math.prod(getattr(aval, "shape", ())) > 64:
            self._alive.append(value)
            return self.number(Object(id(value)), constant=True)
        try:
            content: Hashable = np.asarray(value).tobytes()
        except TypeError:  # a random key
            self._alive.append(value)
            content = id(value)
        return self.number(ConstantNumber(*_aval(aval), content), constant=True)

    # .. loops, branches, shards: entering one and leaving it again gives the same number

    def element(self, level: int, array: int, aval: Any) -> int:
        """Return the slice of a stacked array at the position of the loop of depth ``level``."""
        match self._keys[array]:
            case Stack(stacked_level, value) if stacked_level == level:
                return value
        return self.number(Element(level, array, _aval(aval)), (array,))

    def stack(self, level: int, value: int, length: int) -> int:
        """Return the array of a value at every position of a loop."""
        match self._keys[value]:
            case Element(sliced_level, array) if sliced_level == level:
                return array
        return self.number(Stack(level, value, length), (value,))

    def selected(self, index: int, branches: tuple[int, ...]) -> int:
        """Return what a cond gives when its branches give these."""
        if len(set(branches)) == 1:
            return branches[0]
        return self.number(Selected(index, branches), (index, *branches))

    def within_branch(self, index: int, branch: int, value: int) -> int:
        """Return a value as a branch sees it, knowing which branch it is."""
        match self._keys[value]:
            case Selected(i, branches) if i == index:
                return branches[branch]
        return value

    def shard(self, spec: Hashable, value: int) -> int:
        """Return the part of a value that one device holds."""
        match self._keys[value]:
            case Unshard(s, inner) if s == spec:
                return inner
        return self.number(Shard(spec, value), (value,))

    def unshard(self, spec: Hashable, value: int) -> int:
        """Return the value that is made of the devices' parts."""
        return self.number(Unshard(spec, value), (value,))

    def core(self, number: int) -> int:
        """Return the value inside a loop, branch or shard that a value is made of."""
        while True:
            match self._keys[number]:
                case Stack(value=value) | Unshard(value=value) | Last(value):
                    number = value
                case Selected(branches=branches):
                    number = next((b for b in branches if not self._constant[b]), branches[0])
                case _:
                    return number

    # .. what a loop carries

    def hole(self, level: int, init: int, aval: Any, occurrence: int) -> int:
        """Return a stand-in for a carried value, while its recurrence is not known yet."""
        key = Hole(level, init, _aval(aval), occurrence)
        number = self.number(key, (init,))
        self._holes[number] |= {number}
        return number

    def carried(
        self, holes: Sequence[int], outs: Sequence[int], inits: Sequence[int], loop: Hashable
    ) -> list[int]:
        """Return the numbers of carried values from their recurrences ``hole -> out``.

        A carried value is known by the recurrences that it takes part in, so a loop that also
        carries other things, or carries them in another order, gives it the same number.
        """
        index = {h: i for i, h in enumerate(holes)}
        numbers = []
        for hole, out, init in zip(holes, outs, inits, strict=True):
            if out == hole:
                numbers.append(init)
                continue
            reached, todo = {hole}, [hole]
            while todo:
                for other in self._holes[outs[index[todo.pop()]]] & index.keys() - reached:
                    reached.add(other)
                    todo.append(other)
            steps = frozenset((h, outs[index[h]]) for h in reached)
            inputs = [x for h in reached for x in (inits[index[h]], outs[index[h]])]
            new = self.number(Carry(loop, hole, steps), inputs)
            self._holes[new] -= index.keys()
            numbers.append(new)
        return numbers

    # .. parameters

    def parameters(self, params: dict[str, Any]) -> Hashable:
        """Return a hashable form of an equation's parameters."""
        return tuple((k, self._frozen(v)) for k, v in sorted(params.items()) if k != "weak_type")

    def _frozen(self, value: Any) -> Hashable:
        if _jax.is_jaxpr(value):
            return self._body(value)
        if isinstance(value, (list, tuple)):
            return tuple(map(self._frozen, value))
        if isinstance(value, dict):
            return tuple((k, self._frozen(v)) for k, v in value.items())
        try:
            hash(value)
        except TypeError:
            self._alive.append(value)
            return value.tobytes() if isinstance(value, np.ndarray) else id(value)
        return value

    def _body(self, jaxpr: Any) -> Hashable:
        """Return what a body computes, its inputs being placeholders."""
        if id(jaxpr) not in self._bodies:
            if getattr(jaxpr, "effects", None):
                what: Hashable = str(jaxpr)  # a kernel: loads and stores have an order
            else:
                flow = Flow(self)
                inner = _open(jaxpr)
                inputs = [
                    NumberedValue(
                        self.number(Input(i, _aval(v.aval)), constant=False), None, 0, False
                    )
                    for i, v in enumerate(inner.invars)
                ]
                what = tuple(v.number for v in flow.run(jaxpr, inputs, record=False))
            self._bodies[id(jaxpr)] = (jaxpr, BodyOf(what))
        return self._bodies[id(jaxpr)][1]


def _aval(aval: Any) -> tuple[tuple[int, ...] | None, str]:
    return getattr(aval, "shape", None), str(getattr(aval, "dtype", aval))


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


# -- operations -------------------------------------------------------------------------------


class NumberedValue(NamedTuple):
    """What a variable holds: its number, and the operation that made it.

    ``on_host`` says that this copy of it lies in the host's memory.
    """

    number: int
    origin: Op | None
    position: int
    on_host: bool


@dataclasses.dataclass(eq=False)
class Region:
    """One checkpoint region: the numbers of its inputs, and the operations inside it."""

    inputs: tuple[int, ...]
    ops: list[Op] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def module(self) -> str:
        """The module path that its operations share."""
        paths = [op.path for op in self.ops if op.path]
        shared = zip(*paths)  # as long as the shortest
        return "/".join(column[0] for column in takewhile(lambda c: len(set(c)) == 1, shared))


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """Where an operation stands: the equation around it and what that says about it.

    Attributes:
        times: how often its loops run it.
        share: 1, or 0 in a branch of a cond that is not the most expensive one.
        level: how many loops are around it.
        regions: the checkpoint regions around it, outermost first.
        recomputed: whether a checkpoint's backward pass runs it once more.
    """

    phase: str = FORWARD
    parent: Frame | None = None
    eqn: Any = None
    times: float = 1.0
    share: int = 1
    level: int = 0
    regions: tuple[Region, ...] = ()
    recomputed: bool = False
    record: bool = True

    @functools.cached_property
    def path(self) -> Path:
        """The module path of the equation around."""
        if self.parent is None:
            return ()
        return _paths.module_path(self.eqn, self.parent.path)

    @functools.cached_property
    def loop(self) -> tuple[Path, str] | None:
        """The loop over pieces that the equation around stands in; see `Op.loop`."""
        return None if self.parent is None else _loop_of(self.eqn, self.parent)

    @functools.cached_property
    def equations(self) -> tuple[Any, ...]:
        """The equations around, outermost first."""
        return () if self.parent is None else (*self.parent.equations, self.eqn)

    def inside(self, eqn: Any, **changes: Any) -> Frame:
        """Return the frame of the bodies of an equation that stands in this one."""
        return dataclasses.replace(self, parent=self, eqn=eqn, **changes)


@dataclasses.dataclass(eq=False)
class Op:
    """One operation of a program, and what it reads.

    ``kind`` is "equation"; "argument" or "constant" (no inputs); "carry", which reads what a loop
    carries in first and what it carries on; "cond", which reads the index and each branch; or
    "residual", which reads what the forward pass hands to the backward pass.

    ``share`` is what one device does of it, in a program that is partitioned over several.
    """

    index: int
    kind: str
    eqn: Any
    frame: Frame
    inputs: list[NumberedValue]
    numbers: tuple[int, ...]
    recomputed: bool = False
    share: Share | None = None

    @property
    def primitive(self) -> str:
        """The name of the primitive."""
        return _program.primitive_name(self.eqn)

    @functools.cached_property
    def path(self) -> Path:
        """The full module path."""
        path = _paths.module_path(self.eqn, self.frame.path) if self.eqn is not None else ()
        return _without_repeats(path)

    @property
    def loop(self) -> tuple[Path, str] | None:
        """The module path and the name of the loop over pieces around it, as `piece_loop`."""
        return self.frame.loop if self.eqn is None else _loop_of(self.eqn, self.frame)

    @property
    def module(self) -> str:
        """The full module path, as text."""
        return "/".join(self.path)

    @property
    def source(self) -> str:
        """``file:line`` of the user's line; of the call, where a jitted function hides its own."""
        eqn, frame = self.eqn, self.frame
        while eqn is not None:
            text = source_text(eqn)
            if text or frame is None:
                return text
            eqn, frame = frame.eqn, frame.parent
        return ""

    @property
    def times(self) -> float:
        """How often it runs."""
        return self.frame.times

    @property
    def flops(self) -> float:
        """Floating-point operations of all its runs, on one device."""
        part = 1.0 if self.share is None else self.share.work
        return part * self._whole_flops

    @functools.cached_property
    def _whole_flops(self) -> float:
        return _ops.flops(self.eqn) * self.frame.times * self.frame.share

    @property
    def result_bytes(self) -> int:
        """Bytes of the results of one run, on one device."""
        shapes = None if self.share is None else self.share.results
        return _bytes_on_device([v.aval for v in self.eqn.outvars], shapes)

    def operand_bytes(self, position: int) -> int:
        """Bytes of an operand of one run, on one device."""
        shapes = None if self.share is None else [self.share.operands[position]]
        return _bytes_on_device([self.eqn.invars[position].aval], shapes)

    @property
    def producer(self) -> Op:
        """The equation that computes the value: for what a loop carries or a cond selects, too."""
        op, seen = self, set()
        while op.kind in ("carry", "cond", "residual") and op not in seen:
            seen.add(op)
            # The last input is the result of a branch, or of the loop's body. The first is the
            # value with which the loop begins.
            read = op.inputs[-1:] if op.kind == "cond" else op.inputs
            made = [v.origin for v in reversed(read) if v.origin is not None]
            made = [o for o in made if o not in seen and o.kind not in ("argument", "constant")]
            if not made and op.kind == "residual":
                return op.inputs[0].origin or op
            op = made[0] if made else op
        return op


def _bytes_on_device(avals: Sequence[Any], shapes: Sequence[tuple[int, ...]] | None) -> int:
    if shapes is None:
        return sum(map(_ops.nbytes, avals))
    return sum(
        _ops.nbytes(jax.ShapeDtypeStruct(shape, aval.dtype) if hasattr(aval, "shape") else aval)
        for aval, shape in zip(avals, shapes, strict=True)
    )


def _loop_of(eqn: Any, frame: Frame) -> tuple[Path, str] | None:
    return frame.loop or _paths.piece_loop([frame.path, *_jax.name_stack_groups(eqn)])


def _without_repeats(path: Path) -> Path:
    """Drop a path that follows itself, as JAX writes it before what it differentiates twice."""
    while path and len(path) % 2 == 0 and path[: len(path) // 2] == path[len(path) // 2 :]:
        path = path[: len(path) // 2]
    return path


def source_text(eqn: Any) -> str:
    """Return ``file:line`` of an equation's line in the user's code, or the empty string.

    The file is relative to the working directory, or to where packages are installed.
    """
    file, line = _frames.source_of(eqn)
    if not file or is_own_file(file):
        return ""
    return f"{_paths.short_path(file)}:{line}"


# -- the walk ---------------------------------------------------------------------------------


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_IDENTITIES = _words(
    """name optimization_barrier copy copy_p device_put stop_gradient pvary sharding_constraint"""
)


_CALLS = _words(
    """jit pjit closed_call core_call eval_jaxpr custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr remat2 remat checkpoint"""
)


_REGIONS = frozenset({"remat2", "remat", "checkpoint", "RematTraced"})


class Flow:
    """Programs run on numbers instead of arrays."""

    def __init__(self, numbering: Numbering | None = None) -> None:
        self.numbering = numbering or Numbering()
        self.ops: list[Op] = []
        self.names: dict[int, dict[str, None]] = {}  # checkpoint names of each number, in order
        self.regions: list[Region] = []
        self._rematted: dict[Any, bool] = {}

    def arguments(self, avals: Sequence[Any], first: int = 0) -> list[NumberedValue]:
        """Return values for a program's arguments; equal positions have equal numbers."""
        out = []
        for i, aval in enumerate(avals, first):
            number = self.numbering.argument(i, aval)
            out.append(
                NumberedValue(number, self._op("argument", None, Frame(), [], (number,)), i, False)
            )
        return out

    def run(
        self,
        closed: Any,
        inputs: Sequence[NumberedValue],
        phase: str = FORWARD,
        *,
        record: bool = True,
    ) -> list[NumberedValue]:
        """Walk a closed jaxpr whose inputs are these values; return its outputs."""
        return self._jaxpr(closed, inputs, Frame(phase, record=record))

    def live(self, values: Iterable[NumberedValue]) -> set[Op]:
        """Return the operations that these values are computed from."""
        todo = [v.origin for v in values if v.origin is not None]
        found: set[Op] = set()
        while todo:
            op = todo.pop()
            if op in found:
                continue
            found.add(op)
            todo.extend(v.origin for v in op.inputs if v.origin is not None)
        return found

    def residual(self, value: NumberedValue) -> Op:
        """Return the operation that hands a value from the forward to the backward pass."""
        return self._op("residual", None, Frame(), [value], (value.number,))

    # .. one equation

    def _op(
        self,
        kind: str,
        eqn: Any,
        frame: Frame,
        inputs: list[NumberedValue],
        numbers: tuple[int, ...],
    ) -> Op:
        recomputed = frame.phase == BACKWARD and (frame.recomputed or self._is_rematted(eqn))
        op = Op(len(self.ops), kind, eqn, frame, inputs, numbers, recomputed)
        if frame.record:
            self.ops.append(op)
            if kind == "equation":
                for region in frame.regions:
                    region.ops.append(op)
        return op

    def _inside(self, eqn: Any, frame: Frame, **changes: Any) -> Frame:
        recomputed = frame.recomputed or (frame.phase == BACKWARD and self._is_rematted(eqn))
        return frame.inside(eqn, recomputed=recomputed, **changes)

    def _is_rematted(self, eqn: Any) -> bool:
        if eqn is None:
            return False
        stack = eqn.source_info.name_stack
        if stack not in self._rematted:
            groups = _jax.name_stack_groups(eqn)
            self._rematted[stack] = any(_paths.RECOMPUTED in g for g in groups)
        return self._rematted[stack]

    def _jaxpr(
        self, jaxpr: Any, inputs: Sequence[NumberedValue], frame: Frame
    ) -> list[NumberedValue]:
        inner = _open(jaxpr)
        env: dict[Any, NumberedValue] = dict(zip(inner.invars, inputs, strict=True))
        for var, const in zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=True):
            env[var] = self._constant(const, var.aval, frame)

        def read(atom: Any) -> NumberedValue:
            if isinstance(atom, jec.Literal):
                return NumberedValue(self.numbering.constant(atom.val, atom.aval), None, 0, False)
            return env[atom]

        for eqn in inner.eqns:
            outs = self._equation(eqn, [read(v) for v in eqn.invars], frame)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in inner.outvars]

    def _constant(self, const: Any, aval: Any, frame: Frame) -> NumberedValue:
        number = self.numbering.constant(const, aval)
        return NumberedValue(number, self._op("constant", None, frame, [], (number,)), 0, False)

    def _equation(self, eqn: Any, inputs: list[NumberedValue], frame: Frame) -> list[NumberedValue]:
        name = _program.primitive_name(eqn)
        if self._is_identity(eqn, name):
            return self._identity(eqn, inputs)
        special = _SPECIAL.get(name)
        if special is not None:
            return special(self, eqn, inputs, frame)
        if name in _CALLS or _jax.hi_primitive(eqn) is not None:
            bodies = _program.bodies(eqn)
            if len(bodies) == 1 and len(_open(bodies[0].jaxpr).invars) == len(inputs):
                return self._call(eqn, name, bodies[0].jaxpr, inputs, frame)
        return self._leaf(eqn, name, inputs, frame)

    def _is_identity(self, eqn: Any, name: str) -> bool:
        if name in _IDENTITIES or name.startswith(("CheckpointName", "PrimalLeft")):
            return True
        if name == "convert_element_type":
            return eqn.invars[0].aval.dtype == eqn.params["new_dtype"]
        if name == "reduce_precision":
            info = jax.numpy.finfo(eqn.invars[0].aval.dtype)
            params = eqn.params
            return (params["exponent_bits"], params["mantissa_bits"]) == (info.nexp, info.nmant)
        return False

    def _identity(self, eqn: Any, inputs: list[NumberedValue]) -> list[NumberedValue]:
        name = _program.checkpoint_name_of(eqn)
        if name is not None:
            names = self.names.setdefault(inputs[0].number, {})
            if isinstance(name, _program.KeptName):
                names.pop(name, None)  # the same name without a label
            names.setdefault(name)
        outs = zip(inputs, eqn.outvars)  # the inputs may also contain a tangent, the outputs do not
        return [value._replace(on_host=_is_on_host(var.aval)) for value, var in outs]

    def _leaf(
        self, eqn: Any, name: str, inputs: list[NumberedValue], frame: Frame
    ) -> list[NumberedValue]:
        numbering = self.numbering
        ins = tuple(v.number for v in inputs)
        outs = tuple(_aval(v.aval) for v in eqn.outvars)
        if _jax.has_effects(eqn):
            numbers = tuple(numbering.fresh() for _ in outs)
        else:
            key = Computed(name, numbering.parameters(eqn.params), ins, outs)
            first = numbering.number(key, ins)
            rest = [
                numbering.number(FurtherResult(first, i), (first,)) for i in range(1, len(outs))
            ]
            numbers = (first, *rest)[: len(outs)]
        op = self._op("equation", eqn, frame, inputs, numbers)
        return [
            NumberedValue(n, op, i, _is_on_host(v.aval))
            for i, (n, v) in enumerate(zip(numbers, eqn.outvars, strict=True))
        ]

    # .. equations with bodies

    def _call(
        self, eqn: Any, name: str, body: Any, inputs: list[NumberedValue], frame: Frame
    ) -> list[NumberedValue]:
        changes: dict[str, Any] = {}
        if name in _REGIONS and frame.record:
            region = Region(tuple(v.number for v in inputs))
            self.regions.append(region)
            changes["regions"] = (*frame.regions, region)
        return self._jaxpr(body, inputs, self._inside(eqn, frame, **changes))

    def _scan(self, eqn: Any, inputs: list[NumberedValue], frame: Frame) -> list[NumberedValue]:
        consts, carry = _jax.scan_arity(eqn)
        length, level, body = eqn.params["length"], frame.level, eqn.params["jaxpr"]
        inside = self._inside(eqn, frame, times=frame.times * length, level=level + 1)
        inits = inputs[consts : consts + carry]
        carry_vars = _open(body).invars[consts : consts + carry]
        element_vars = _open(body).invars[consts + carry :]
        elements = [
            x._replace(number=self.numbering.element(level, x.number, var.aval))
            for x, var in zip(inputs[consts + carry :], element_vars, strict=True)
        ]

        def run(carried: list[NumberedValue], frame: Frame) -> list[NumberedValue]:
            return self._jaxpr(body, [*inputs[:consts], *carried, *elements], frame)

        holes = self._holes(level, inits, carry_vars)
        numbers: list[int] = []
        if holes:  # run the body once on placeholders to see how it changes each carried value
            trial = dataclasses.replace(inside, record=False)
            outs = run([i._replace(number=h) for i, h in zip(inits, holes, strict=True)], trial)
            numbers = self.numbering.carried(
                holes,
                [v.number for v in outs[:carry]],
                [i.number for i in inits],
                (level, length, eqn.params["reverse"]),
            )
        ops = [self._op("carry", eqn, frame, [i], (n,)) for i, n in zip(inits, numbers)]
        outs = run([NumberedValue(n, op, 0, False) for n, op in zip(numbers, ops)], inside)
        for op, out in zip(ops, outs[:carry], strict=True):
            op.inputs.append(out)
        return self._after_scan(inits, numbers, ops, outs, level, length)

    def _holes(
        self, level: int, inits: Sequence[NumberedValue], variables: Sequence[Any]
    ) -> list[int]:
        seen: dict[Any, int] = {}
        holes = []
        for init, var in zip(inits, variables, strict=True):
            key = (init.number, _aval(var.aval))
            seen[key] = seen.get(key, -1) + 1
            holes.append(self.numbering.hole(level, init.number, var.aval, seen[key]))
        return holes

    def _after_scan(
        self,
        inits: Sequence[NumberedValue],
        numbers: Sequence[int],
        ops: Sequence[Op],
        outs: Sequence[NumberedValue],
        level: int,
        length: int,
    ) -> list[NumberedValue]:
        after: list[NumberedValue] = []
        for init, number, op in zip(inits, numbers, ops, strict=True):
            moved = number != init.number
            last = self.numbering.number(Last(number), (number,)) if moved else number
            after.append(NumberedValue(last, op, 0, init.on_host))
        stacked = [
            v._replace(number=self.numbering.stack(level, v.number, length))
            for v in outs[len(ops) :]
        ]
        return [*after, *stacked]

    def _cond(self, eqn: Any, inputs: list[NumberedValue], frame: Frame) -> list[NumberedValue]:
        index, *operands = inputs
        branches = eqn.params["branches"]
        costs = [sum(map(_ops.flops, _open(b).eqns)) for b in branches]
        heaviest = costs.index(max(costs))
        outs = []
        for i, branch in enumerate(branches):
            seen = [
                v._replace(number=self.numbering.within_branch(index.number, i, v.number))
                for v in operands
            ]
            share = frame.share if i == heaviest else 0
            outs.append(self._jaxpr(branch, seen, self._inside(eqn, frame, share=share)))
        joined = []
        for column in zip(*outs, strict=True):
            number = self.numbering.selected(index.number, tuple(v.number for v in column))
            kept = sorted(column, key=lambda v: not self.numbering.is_constant(v.number))
            op = self._op("cond", eqn, frame, [index, *kept], (number,))
            joined.append(NumberedValue(number, op, 0, column[0].on_host))
        return joined

    def _shard_map(
        self, eqn: Any, inputs: list[NumberedValue], frame: Frame
    ) -> list[NumberedValue]:
        params = eqn.params
        specs_in = params.get("in_specs", params.get("in_names"))
        specs_out = params.get("out_specs", params.get("out_names"))
        if specs_in is None or specs_out is None:
            return self._leaf(eqn, "shard_map", inputs, frame)
        number = self.numbering
        parts = [
            v._replace(number=number.shard(str(s), v.number))
            for v, s in zip(inputs, specs_in, strict=True)
        ]
        outs = self._jaxpr(params["jaxpr"], parts, self._inside(eqn, frame))
        return [
            v._replace(number=number.unshard(str(s), v.number))
            for v, s in zip(outs, specs_out, strict=True)
        ]


_SPECIAL: dict[str, Callable[..., list[NumberedValue]]] = {
    "scan": Flow._scan,
    "cond": Flow._cond,
    "shard_map": Flow._shard_map,
}


def _is_on_host(aval: Any) -> bool:
    return getattr(getattr(aval, "memory_space", None), "name", "") == "Host"
