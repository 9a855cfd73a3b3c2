"""What does the derivative of one operation read, and what does it cost?

There is no table of derivatives. `derivative_of` linearizes each operation on its own with
`jax.linearize` and follows each residual back to the operation's inputs and outputs.

Example: for ``y = tanh(x)``, the derivative is ``1 - y²``, so it reads the output ``y`` and makes a
residual of the same size. For ``y = sin(x)``, it reads the input ``x`` to make ``cos(x)``. For
``y = exp(x)``, it reads ``y`` as it is and makes no residual:

>>> x = jax.ShapeDtypeStruct((1000,), jnp.float32)
>>> for fn in (jnp.tanh, jnp.sin, jnp.exp):
...     derivative = derivative_of(jax.make_jaxpr(fn)(x).eqns[0], (True,))
...     print(derivative.needs, derivative.made_bytes)
(('out', 0),) 4000
(('in', 0),) 4000
(('out', 0),) 0
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax.core import ShapedArray

from remat_kit import _jax
from remat_kit._program import ops as _ops
from remat_kit._program import program as _program
from remat_kit._program.ops import is_fusible, is_view
from remat_kit._program.program import Program
from remat_kit._program.structure import equation_key


@dataclasses.dataclass(frozen=True)
class OperationDerivative:
    """What the derivative of one equation reads, makes and costs.

    A place is a pair ``("in", i)`` or ``("out", i)``: the equation's input or output number i.

    Attributes:
        mask: for each input, whether the equation is differentiated by it.
        needs: the places from which the derivative is computed.
        keeps: those of ``needs`` that it reads as they are.
        made_bytes: bytes of the residuals that it computes itself from ``needs``.
        active: for each output, whether it depends on an input of ``mask``.
        flops: floating-point operations of the derivative.
        heavy: whether it holds operations that do not fuse, such as matrix products.
        working_bytes: bytes that an opaque operation's derivative needs beside its residuals.
    """

    mask: tuple[bool, ...]
    needs: tuple[tuple[str, int], ...]
    keeps: tuple[tuple[str, int], ...]
    made_bytes: int
    active: tuple[bool, ...]
    flops: float
    heavy: bool
    working_bytes: int


_derivatives: dict[Any, OperationDerivative] = {}


def derivative_of(eqn: Any, mask: tuple[bool, ...]) -> OperationDerivative:
    """Linearize one equation in the inputs of ``mask``, and find the source of each residual."""
    # JAX gives every ref of the program a ref for its tangents, even if they are zero at first.
    mask = tuple(m or _jax.is_ref(v.aval) for m, v in zip(mask, eqn.invars, strict=True))
    if eqn.primitive.name in _LINEAR and all(_is_real(v.aval) for v in eqn.invars):
        return _of_linear(eqn, mask)
    eqn, times = _small(eqn, mask)
    key = equation_key(eqn), mask, _jax.trace_context()
    found = _derivatives.get(key)
    if found is None:
        if len(_derivatives) > 4096:
            _derivatives.clear()
        found = _derivatives[key] = _linearized(eqn, mask)
    if times == 1:
        return found
    return dataclasses.replace(
        found, flops=times * found.flops, made_bytes=times * found.made_bytes
    )


# Linear operations with one output, whose derivative needs no residual. They are not linearized,
# which saves time, because large models have many of them on arrays of many shapes.
_LINEAR = frozenset({"reduce_sum", "broadcast_in_dim", "concatenate"})


def _of_linear(eqn: Any, mask: tuple[bool, ...]) -> OperationDerivative:
    flops, heavy = _ops.flops(eqn), not is_fusible(eqn)
    return OperationDerivative(mask, (), (), 0, (True,), flops, heavy, 0)


def _is_real(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating)


# Operations whose derivative by both operands costs the same if one of them is broadcast.
_ARITHMETIC = frozenset({"add", "sub", "mul"})


_ELEMENTWISE = frozenset(
    {"add", "add_any", "sub", "mul", "div", "neg", "max", "min", "exp", "log", "sqrt", "rsqrt"}
    | {"square", "integer_pow", "tanh", "logistic", "sin", "cos", "erf", "abs", "sign"}
)


def _small(eqn: Any, mask: tuple[bool, ...]) -> tuple[Any, int]:
    """Return an elementwise equation reduced to one element, and its number of elements.

    Thus the derivative of an operation is traced only once, and not for each shape in a model.
    Other equations are returned unchanged, with the number 1.
    """
    if eqn.primitive.name not in _ELEMENTWISE:
        return eqn, 1
    (out,) = eqn.outvars
    shape = out.aval.shape
    literal = [isinstance(v, jec.Literal) for v in eqn.invars]
    alike = all(
        v.aval.shape == (() if constant else shape)
        for v, constant in zip(eqn.invars, literal, strict=True)
    )
    alike = alike or (eqn.primitive.name in _ARITHMETIC and all(mask))
    if not alike or 0 in shape:
        return eqn, 1

    def one(v: Any) -> Any:
        aval = v.aval
        return jec.Var(ShapedArray((1,), aval.dtype, weak_type=aval.weak_type))

    invars = [v if c else one(v) for v, c in zip(eqn.invars, literal, strict=True)]
    return eqn.replace(invars=invars, outvars=[one(out)]), math.prod(shape)


def _linearized(eqn: Any, mask: tuple[bool, ...]) -> OperationDerivative:
    forward, linear = _traced(eqn, mask)
    given = linear.invars[len(linear.consts) :]
    residuals = forward.outvars[len(eqn.outvars) :]
    read = _needed_by(linear)
    depends = _reached_from(linear, set(given[len(residuals) :]))
    sources = _Sources(eqn, forward)
    for var, placeholder in zip(residuals, given, strict=False):
        if not isinstance(var, jec.Literal) and placeholder in read:
            sources.add(var)
    made_bytes = sum(_ops.nbytes(v.aval) for v in sources.made)
    return OperationDerivative(
        mask=mask,
        needs=tuple(sources.needs),
        keeps=tuple(sources.keeps),
        made_bytes=made_bytes,
        active=tuple(
            not isinstance(v, jec.Literal)
            and v in depends
            and not isinstance(o, jec.DropVar)
            and jnp.issubdtype(o.aval.dtype, jnp.inexact)
            for v, o in zip(linear.outvars, eqn.outvars, strict=True)
        ),
        flops=sum(_ops.flops(e) for e in linear.eqns),
        heavy=any(not is_fusible(e) for e in linear.eqns),
        working_bytes=0 if is_fusible(eqn) or not _program.bodies(eqn) else made_bytes,
    )


def _variables(eqn: Any) -> list[int]:
    return [i for i, v in enumerate(eqn.invars) if not isinstance(v, jec.Literal)]


def _traced(eqn: Any, mask: tuple[bool, ...]) -> tuple[Program, Program]:
    """Trace an equation and its linearization.

    Returns:
        A program from the equation's variables to its results, followed by the residuals, and a
        program from the residuals, followed by the tangents, to the tangents of the results.
    """
    diff = [
        i for i, (v, a) in enumerate(zip(eqn.invars, mask, strict=True)) if a and _is_real(v.aval)
    ]
    variables = _variables(eqn)
    tree: Any = None

    def forward(*given: Any) -> list[Any]:
        nonlocal tree
        full: list[Any] = [getattr(v, "val", None) for v in eqn.invars]
        for i, x in zip(variables, given, strict=True):
            full[i] = x

        def of_active(*ds: Any) -> list[Any]:
            xs = list(full)
            for i, d in zip(diff, ds, strict=True):
                xs[i] = d
            return _jax.bind(eqn, xs)

        ys, tangent = jax.linearize(of_active, *(full[i] for i in diff))
        residuals, tree = jax.tree.flatten(tangent)
        return [*ys, *residuals]

    def tangent(residuals: Sequence[Any], ds: Sequence[Any]) -> list[Any]:
        return jax.tree.unflatten(tree, residuals)(*ds)

    closed = jax.make_jaxpr(forward)(*(eqn.invars[i].aval for i in variables))
    residuals = closed.out_avals[len(eqn.outvars) :]
    tangents = [eqn.invars[i].aval.to_tangent_aval() for i in diff]
    return Program.of(closed), Program.of(jax.make_jaxpr(tangent)(residuals, tangents))


class _Sources:
    """From which inputs and results of an equation the residuals of its derivative are computed.

    Attributes:
        needs: these inputs and results, as `OperationDerivative.needs` has them.
        keeps: those of them that are residuals themselves.
        made: the residuals that are computed from them.
    """

    def __init__(self, eqn: Any, forward: Program):
        invars = forward.invars[len(forward.consts) :]
        self.source = dict(zip(invars, (("in", i) for i in _variables(eqn)), strict=True))
        for position, var in enumerate(forward.outvars[: len(eqn.outvars)]):
            if not isinstance(var, jec.Literal):
                self.source.setdefault(var, ("out", position))
        self.makers = {v: e for e in forward.eqns for v in e.outvars}
        self.needs: dict[tuple[str, int], None] = {}
        self.keeps: dict[tuple[str, int], None] = {}
        self.made: dict[Any, None] = {}

    def add(self, residual: Any) -> None:
        var = _unviewed(residual, self.makers, self.source)
        if var in self.source:
            place = self.source[var]
            self.needs[place] = self.keeps[place] = None
            return
        places = _sources(var, self.makers, self.source)
        self.needs.update(dict.fromkeys(places))
        if places:
            self.made[var] = None


def _unviewed(var: Any, makers: dict[Any, Any], source: dict[Any, Any]) -> Any:
    while var not in source and var in makers and is_view(makers[var]):
        inner = makers[var].invars[0]
        if isinstance(inner, jec.Literal):
            break
        var = inner
    return var


def _sources(
    var: Any, makers: dict[Any, Any], source: dict[Any, tuple[str, int]]
) -> list[tuple[str, int]]:
    places: dict[tuple[str, int], None] = {}
    seen, todo = set(), [var]
    while todo:
        v = todo.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in source:
            places[source[v]] = None
        elif v in makers:
            todo.extend(x for x in makers[v].invars if not isinstance(x, jec.Literal))
    return list(places)


def _needed_by(program: Program) -> set[Any]:
    """Return the variables on which the outputs of a program depend."""
    needed = {v for v in program.outvars if not isinstance(v, jec.Literal)}
    for eqn in reversed(program.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, jec.Literal))
    return needed


def _reached_from(program: Program, variables: set[Any]) -> set[Any]:
    reached = set(variables)
    for eqn in program.eqns:
        if any(not isinstance(v, jec.Literal) and v in reached for v in eqn.invars):
            reached.update(eqn.outvars)
    return reached
