"""Compare two gradient programs: which operations the second one computes twice.

Operations are aligned by value number, so the same operation is one line wherever it occurs in the
two programs. An operation that a region recomputes is an additional line, marked with the
operation of the forward pass that computes the same value, its twin.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from remat_kit._errors import UserError
from remat_kit._inspect.recomputed import Duplicate, duplicates, warn_of_pieces
from remat_kit._program.flow import FORWARD, ConstantNumber, NumberedValue, Numbering, Op
from remat_kit._program.steps.gradient import Gradient
from remat_kit._program.steps.losses import gradients_of
from remat_kit._show.table import Lines, Shown

_CONTEXT = 2  # lines shown before and after a duplicate


_LONGEST = 400  # lines of a text that is not full


def diff(
    before: Callable[..., Any],
    after: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    full: bool = False,
    labels: tuple[str, str] = ("before", "after"),
) -> Diff:
    """Align the gradient programs of two versions of a loss and mark what is computed twice.

    >>> import jax, jax.numpy as jnp, remat_kit
    >>> def loss(w, x):
    ...     return jnp.sum(jnp.maximum(x, 0.0) @ w)
    >>> w = x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    >>> found = diff(loss, remat_kit.policy("nothing")(loss), w, x)
    >>> [(d.primitive, d.feeds) for d in found.duplicates]
    [('max', ('dot_general %6 (gradient)',))]

    Args:
        before, after: losses of the same arguments; each returns a real scalar, or a pair of a
            scalar and anything. Or two versions of a training step, whose losses are compared.
        args: pytrees of arrays or `jax.ShapeDtypeStruct`.
        argnums: which arguments to differentiate.
        full: whether to print every line; by default, duplicates and the lines around them.
        labels: the names of the two versions.

    Returns:
        The difference. Its ``duplicates`` are the operations of ``after`` that repeat an earlier
        one in a checkpoint region. Names, copies, barriers and transfers do not count. If the
        program is partitioned over several devices, FLOPs are those of all devices together.

    Raises:
        NotDifferentiableError, UserError: a loss has no gradient for these arguments.
    """
    numberings: dict[int, Numbering] = {}
    _, old = gradients_of(before, args, argnums, call="diff", numberings=numberings)
    _, new = gradients_of(after, args, argnums, call="diff", numberings=numberings)
    warn_of_pieces([part.gradient for part in (*old, *new)], "diff")
    if len(old) != len(new):
        raise UserError(
            f"`diff`: the first function differentiates {len(old)} losses, and the second "
            f"{len(new)}",
            hint="compare two versions of the same step",
        )
    lines: tuple[Line, ...] = ()
    for one, other in zip(old, new, strict=True):
        lines += _Aligned(one.gradient, other.gradient, len(lines)).lines()
    in_order = tuple(line.duplicate for line in lines if line.duplicate is not None)
    return Diff(labels, lines, in_order, full)


@dataclasses.dataclass(frozen=True)
class DuplicateLine:
    """One operation that is computed a second time.

    Attributes:
        id: the name of its line.
        twin: the name of the line that computes it in the forward pass.
        primitive, shape, dtype: the operation and its result.
        module, source: where the forward pass computes it.
        count: how often it runs; in a loop once for each iteration.
        flops: floating-point operations of all its runs.
        feeds: the operations that read the recomputed result.
        pieces: the loop over pieces that recomputes it, as ``"16 pieces of axis 0"``, or "".
    """

    id: str
    twin: str
    primitive: str
    shape: tuple[int, ...]
    dtype: str
    module: str
    source: str
    count: int
    flops: float
    feeds: tuple[str, ...]
    pieces: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return dataclasses.asdict(self) | {"shape": list(self.shape), "feeds": list(self.feeds)}


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a difference.

    ``sign`` is ``+`` for an operation that only the second program has, ``-`` for one that only
    the first has, ``~`` for one that moved between the forward and the backward pass.
    """

    sign: str
    phase: str
    op: Op = dataclasses.field(repr=False)
    id: str
    operands: tuple[str, ...]
    duplicate: DuplicateLine | None = None

    def text(self) -> str:
        """Return the line as text; for a duplicate, its readers follow below."""
        op, again = self.op, self.duplicate
        loop = f" × {op.times:g}" if op.times > 1 else ""
        what = f"{op.primitive}{loop} {_results(op)} {' '.join(self.operands)}".rstrip()
        if again is None:
            where = "  ".join(filter(None, (op.module, op.source)))
            return f"{self.sign} {self.id} = {what}   {where}".rstrip()
        where = ", ".join(filter(None, (again.module, again.pieces, again.source)))
        mark = f"{self.sign} {self.id} = ⟲ {again.twin} {what}"
        feeds = "".join(f"\n      feeds {f}" for f in again.feeds)
        return mark + (f"   from {where}" if where else "") + feeds


@dataclasses.dataclass(frozen=True)
class Diff(Shown):
    """The difference of two gradient programs; `diff` returns it.

    The programs are jaxprs, as `jax.make_jaxpr` returns them.

    >>> import jax, jax.numpy as jnp, remat_kit
    >>> loss = lambda w: jnp.sum(jnp.sin(jnp.exp(w)))
    >>> w = jax.ShapeDtypeStruct((4,), jnp.float32)
    >>> found = diff(loss, remat_kit.policy("nothing")(loss), w)
    >>> found.summary
    'before → after: 1 operation computed twice (4 FLOP); lines: 6 common, 1 added, 1 moved'

    Attributes:
        labels: the names of the two programs.
        lines: the lines of both programs, in the order of the second.
        duplicates: the operations that the second program computes twice.
        full: whether every line is printed.
    """

    labels: tuple[str, str]
    lines: tuple[Line, ...] = dataclasses.field(repr=False)
    duplicates: tuple[DuplicateLine, ...]
    full: bool = False

    def counts(self) -> dict[str, int]:
        """Return how many lines are common, added, removed and moved."""
        names = {" ": "common", "+": "added", "-": "removed", "~": "moved"}
        return {name: sum(x.sign == sign for x in self.lines) for sign, name in names.items()}

    @property
    def summary(self) -> str:
        """Return one line that says how much is computed twice."""
        again = sum(d.count for d in self.duplicates)
        flops = sum(d.flops for d in self.duplicates)
        changed = ", ".join(f"{n} {name}" for name, n in self.counts().items() if n)
        word = "operation" if again == 1 else "operations"
        twice = f"{again} {word} computed twice ({flops:,.0f} FLOP)"
        return f"{self.labels[0]} → {self.labels[1]}: {twice}; lines: {changed}"

    def text(self, full: bool | None = None) -> str:
        """Return the difference as plain text; ``full`` overrides the attribute."""
        return Lines(tuple(self._marked(self.full if full is None else full))).text()

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`.

        The keys are ``before`` and ``after`` (labels), ``duplicates`` (a list of objects with id,
        twin, primitive, shape, dtype, module, source, count, flops, feeds and pieces), ``common``,
        ``added``, ``removed``, ``moved`` (numbers of lines) and ``text``.
        """
        return {
            "before": self.labels[0],
            "after": self.labels[1],
            "duplicates": [d.to_json() for d in self.duplicates],
            **self.counts(),
            "text": self.text(),
        }

    def tables(self) -> list[Lines]:
        """Return the lines that are printed."""
        return [Lines(tuple(self._marked(self.full)))]

    def _marked(self, full: bool) -> Iterator[tuple[str, str]]:
        """Yield each shown line with its mark: a sign, ``⟲``, or ``#`` for a heading."""
        yield "#", self.summary
        chosen = range(len(self.lines)) if full else self._chosen()
        left = 0 if full else max(0, len(chosen) - _LONGEST)
        phase, last = "", -1
        for i in chosen[: len(chosen) - left]:
            line = self.lines[i]
            if i > last + 1:
                skipped = i - last - 1
                yield "", f"  … {skipped} {'line' if skipped == 1 else 'lines'}"
            if line.phase != phase:
                phase = line.phase
                yield "#", f"── {phase}"
            yield "⟲" if line.duplicate else line.sign, line.text()
            last = i
        if left:
            yield "", f"  … and {left} more; full=True shows them"
        elif last + 1 < len(self.lines):
            yield "", f"  … {len(self.lines) - last - 1} lines"

    def _chosen(self) -> list[int]:
        twins = {d.twin for d in self.duplicates}
        chosen: set[int] = set()
        for i, line in enumerate(self.lines):
            if line.duplicate is not None:
                chosen.update(range(max(0, i - _CONTEXT), min(len(self.lines), i + _CONTEXT + 1)))
            elif line.id in twins:
                chosen.add(i)
        return sorted(chosen)


def _results(op: Op) -> str:
    return " ".join(_array(v.aval) for v in op.eqn.outvars)


def _array(aval: Any) -> str:
    short = getattr(aval, "str_short", None)
    return short(short_dtypes=True) if short is not None else str(aval)


# -- alignment --------------------------------------------------------------------------------

_Key = tuple[int, int]  # a value number, and how many earlier operations have the same number


class _Aligned:
    """The operations of two programs in one order, with one id for the same operation in both."""

    def __init__(self, old: Gradient, new: Gradient, first: int = 0) -> None:
        self.numbering = new.flow.numbering
        self.gradients = {"-": old, "+": new}
        self.old, self.new = _keyed(old), _keyed(new)
        self.order = list(self._merged())
        self.ids: dict[Op, str] = {}
        for i, (_, ops) in enumerate(self.order, first + 1):
            self.ids.update((op, f"%{i}") for op in ops)

    def _merged(self) -> Iterator[tuple[str, tuple[Op, ...]]]:
        """Yield (sign, operations): the order of the new program, with removed lines in place."""
        removed: dict[_Key | None, list[Op]] = {}
        anchor: _Key | None = None
        for key, op in self.old.items():
            if key in self.new:
                anchor = key
            else:
                removed.setdefault(anchor, []).append(op)
        yield from (("-", (op,)) for op in removed.get(None, ()))
        for key, op in self.new.items():
            twin = self.old.get(key)
            if twin is None:
                yield "+", (op,)
            else:
                yield "~" if twin.frame.phase != op.frame.phase else " ", (op, twin)
            yield from (("-", (op,)) for op in removed.get(key, ()))

    def lines(self) -> tuple[Line, ...]:
        repeated = self.repeated()
        lines = []
        for sign, (op, *_) in self.order:
            gradient = self.gradients["-" if sign == "-" else "+"]
            operands = tuple(self.operand(v, gradient) for v in op.inputs)
            phase = op.frame.phase
            lines.append(Line(sign, phase, op, self.ids[op], operands, repeated.get(op)))
        return tuple(lines)

    def repeated(self) -> dict[Op, DuplicateLine]:
        found = {d.op: d for d in duplicates(self.gradients["+"])}
        readers = self.readers(found)
        return {
            op: self.duplicate(again, [self.feeds(r, r in found) for r in readers[op]])
            for op, again in found.items()
        }

    def duplicate(self, again: Duplicate, feeds: Sequence[str]) -> DuplicateLine:
        op, twin = again.op, again.twin
        aval = op.eqn.outvars[0].aval
        return DuplicateLine(
            id=self.ids[op],
            twin=self.ids[twin],
            primitive=op.primitive,
            shape=tuple(aval.shape),
            dtype=str(aval.dtype),
            module=twin.module,
            source=twin.source,
            count=round(op.times),
            flops=op.flops,
            feeds=tuple(feeds),
            pieces=again.pieces,
        )

    def feeds(self, reader: Op, again: bool) -> str:
        role = "recomputed" if again else "gradient"
        of = f" of {reader.module}" if reader.module and not again else ""
        return f"{reader.primitive} {self.ids[reader]} ({role}{of})"

    def readers(self, ops: Iterable[Op]) -> dict[Op, list[Op]]:
        """Return the operations that read each of ``ops``."""
        found: dict[Op, list[Op]] = {op: [] for op in ops}
        for reader in self.gradients["+"].ops():
            for value in reader.inputs:
                origin = _made_by(value)
                if origin in found and reader not in found[origin]:
                    found[origin].append(reader)
        return found

    def operand(self, value: NumberedValue, gradient: Gradient) -> str:
        op = _made_by(value)
        if op is None or op.kind == "constant":
            return self.literal(value.number)
        if op.kind == "argument":
            return gradient.names[value.position]
        id = self.ids.get(op, "%?")
        return f"{id}.{value.position}" if len(op.numbers) > 1 else id

    def literal(self, number: int) -> str:
        match self.numbering.key(number):
            case ConstantNumber((), dtype, bytes(content)):
                return str(np.frombuffer(content, _dtype(dtype))[0])
        return "const"


def _made_by(value: NumberedValue) -> Op | None:
    """Return the operation that computes a value, not one that only passes it on."""
    op = value.origin
    return op if op is None or op.kind in ("equation", "argument", "constant") else op.producer


@functools.cache
def _dtype(name: str) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(name)


def _keyed(gradient: Gradient) -> dict[_Key, Op]:
    seen: dict[int, int] = {}
    found: dict[_Key, Op] = {}
    for op in sorted(gradient.ops(), key=lambda op: op.frame.phase != FORWARD):
        number = op.numbers[0] if op.numbers else -1
        count = seen.get(number, 0)
        seen[number] = count + 1
        found[number, count] = op
    return found
