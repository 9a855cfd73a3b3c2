"""Which values does the backward pass of a program need, and how does it use them?

`derive` splits the derivative into two programs, as `jax.linearize` does::

    outputs, residuals = forward(inputs)
    output tangents    = linear(residuals, input tangents)

The forward program computes every value that the backward pass can read, so it is the program in
which a policy chooses what to save. The linear program is what forward mode evaluates and reverse
mode transposes.

For ``y = tanh(x)``, with respect to ``x``, the two are::

    forward:  y = tanh(x);  r = 1 - y * y;  return y, r
    linear:   dy = dx * r;  return dy
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jec

from remat_kit import _jax
from remat_kit._program.program import Program, bodies, checkpoint_name_of, evaluate


@dataclasses.dataclass(frozen=True)
class Derivative:
    """A program differentiated with respect to some of its inputs.

    Attributes:
        forward: the program whose outputs are those of the original program, then the residuals.
        linear: a program of the residuals and one tangent for each input in ``wrt``. It returns
            one tangent for each output, or None for a tangent that is zero.
        outputs: the number of outputs of the original program.
        wrt: the positions of the inputs that are differentiated.
        axes: the named axes that were open when the program was traced.
    """

    forward: Program
    linear: Program
    outputs: int
    wrt: tuple[int, ...]
    axes: Any

    @property
    def residuals(self) -> tuple[Any, ...]:
        """The outputs of the forward program that the linear program reads."""
        return self.forward.outvars[self.outputs :]

    def in_forward_mode(self) -> tuple[Any, list[bool]] | None:
        """Return a jaxpr that computes outputs and tangents, and which tangents are zero.

        The arguments of the jaxpr are the inputs, then the tangents of the inputs in ``wrt``. Its
        results are the outputs, then their tangents without those that are zero. Returns None if
        the forward and the linear program cannot be joined into one jaxpr.
        """
        if self.forward.consts or self.linear.consts or self._is_transposed_only():
            return None
        count = len(self.residuals)
        renamed = dict(zip(self.linear.invars[:count], self.residuals, strict=True))
        moving = set(self.linear.invars[count:])
        linear = []
        for eqn in self.linear.eqns:
            if any(v in renamed for v in eqn.invars if not isinstance(v, jec.Literal)):
                read = [v if isinstance(v, jec.Literal) else renamed.get(v, v) for v in eqn.invars]
                eqn = eqn.replace(invars=read)
            linear.append(eqn)
            moving.update(eqn.outvars)
        tangents = [v if v is not None and _is_in(v, moving) else None for v in self.linear.outvars]
        outvars = [*self.forward.outvars[: self.outputs], *(v for v in tangents if v is not None)]
        invars = [*self.forward.invars, *self.linear.invars[count:]]
        jaxpr = _jax.jaxpr_of(invars, outvars, [*self.forward.eqns, *linear])
        return jaxpr, [v is None for v in tangents]

    def _is_transposed_only(self) -> bool:
        return any(map(_is_transposed_only, self.linear.eqns))

    def tangents(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """Return the tangents of the outputs, with None for each tangent that is zero.

        Args:
            residuals: the values that the forward program returned after the outputs.
            tangents: one for each input in ``wrt``; None stands for a tangent that is zero.
        """
        if not self._is_transposed_only():
            return _evaluate(self.linear, residuals, tangents)
        present = tuple(t is not None for t in tangents)
        lean, depends = self._for_nonzero(present)
        moving = [t for t in tangents if t is not None]
        given = iter(_jax.transposable(lean, residuals, moving) if any(depends) else ())
        return [next(given) if d else None for d in depends]

    def _for_nonzero(self, present: tuple[bool, ...]) -> tuple[Any, list[bool]]:
        """Return the linear program of the nonzero tangents, and which outputs are nonzero."""
        count = len(self.residuals)
        depends: list[bool] = []

        def some(residuals: Sequence[Any], moving: Sequence[Any]) -> list[Any]:
            given = iter(moving)
            outs = _evaluate(self.linear, residuals, [next(given) if p else None for p in present])
            depends[:] = [y is not None for y in outs]
            return [y for y in outs if y is not None]

        avals = [v.aval for v in self.linear.invars[len(self.linear.consts) :]]
        moving = [a for a, p in zip(avals[count:], present, strict=True) if p]
        with _jax.open_axes(self.axes):
            return jax.make_jaxpr(some)(avals[:count], moving), depends


def derive(program: Program, avals: Sequence[Any], wrt: tuple[int, ...]) -> Derivative:
    """Differentiate a program with respect to the inputs at the positions ``wrt``.

    Args:
        program: a program without constants.
        avals: the abstract value of each of its inputs.
        wrt: the positions of inputs of a floating-point or complex type.

    Raises:
        Exception: JAX raised it, because the program has no derivative.
    """
    split = _split(program, avals, wrt)
    return _linearized(program, avals, wrt) if split is None else split


def _split(program: Program, avals: Sequence[Any], wrt: tuple[int, ...]) -> Derivative | None:
    """Differentiate in forward mode, and move the equations that read a tangent to a program.

    For a program without loops and branches the result equals that of `jax.linearize`, which takes
    three times as long to trace. Returns None if one equation computes both values and tangents.
    """
    if any(map(_is_mixing, program.eqns)):
        return None

    def both(xs: Sequence[Any], ds: Sequence[Any]) -> Any:
        def of_some(*some: Any) -> list[Any]:
            given = dict(zip(wrt, some, strict=True))
            return evaluate(program, [given.get(i, x) for i, x in enumerate(xs)])

        return jax.jvp(of_some, [xs[i] for i in wrt], ds)

    closed = jax.make_jaxpr(both)(list(avals), [avals[i].to_tangent_aval() for i in wrt])
    whole = _flat(closed, program.base)
    given = whole.invars[len(whole.invars) - len(wrt) :]
    moving, forward, linear = {*given}, [], []
    for eqn in whole.eqns:
        if not any(v in moving for v in eqn.invars if not isinstance(v, jec.Literal)):
            forward.append(eqn)
            continue
        if eqn.primitive.name in _jax.TRANSPOSED_ONLY or bodies(eqn) or eqn.effects:
            return None
        moving.update(eqn.outvars)
        linear.append(eqn)

    outputs = len(program.outvars)
    read = {v: None for e in linear for v in e.invars if not isinstance(v, jec.Literal)}
    residuals = tuple(v for v in read if v not in moving)
    return Derivative(
        dataclasses.replace(
            whole,
            invars=whole.invars[: -len(wrt)],
            outvars=(*whole.outvars[:outputs], *residuals),
            eqns=_needed(forward, (*whole.outvars[:outputs], *residuals)),
        ),
        Program(
            (*residuals, *given),
            tuple(v if _is_in(v, moving) else None for v in whole.outvars[outputs:]),
            tuple(linear),
            base=program.base,
        ),
        outputs,
        wrt,
        _jax.axis_env(),
    )


def _flat(closed: Any, base: Any) -> Program:
    """Return a program as `Program.of` does, without copying one that has no calls."""
    if any(map(_jax.is_plain_call, closed.eqns)):
        return Program.of(closed, base)
    jaxpr = closed.jaxpr
    invars = (*jaxpr.constvars, *jaxpr.invars)
    eqns = tuple(map(_jax.without_transformations, closed.eqns))
    return Program(invars, tuple(jaxpr.outvars), eqns, tuple(closed.consts), base)


def _is_mixing(eqn: Any) -> bool:
    """Tell whether the derivative of an equation may compute values and tangents in one body."""
    if checkpoint_name_of(eqn) is not None:
        return False
    inside = any(b.kind != "rule" for b in bodies(eqn))
    is_opaque = eqn.primitive.name == "custom_vjp_call" or _jax.hi_primitive(eqn) is not None
    return inside or is_opaque


def _needed(eqns: Sequence[Any], outvars: Sequence[Any]) -> tuple[Any, ...]:
    """Return the equations that the outputs depend on, and those that have an effect."""
    needed = {v for v in outvars if not isinstance(v, jec.Literal)}
    used = []
    for eqn in reversed(eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, jec.Literal))
            used.append(eqn)
    return tuple(reversed(used))


def _is_in(atom: Any, variables: set[Any]) -> bool:
    return not isinstance(atom, jec.Literal) and atom in variables


def _linearized(program: Program, avals: Sequence[Any], wrt: tuple[int, ...]) -> Derivative:
    tree: Any = None

    def forward(*xs: Any) -> list[Any]:
        nonlocal tree

        def of_some(*ds: Any) -> list[Any]:
            full = list(xs)
            for i, d in zip(wrt, ds, strict=True):
                full[i] = d
            return evaluate(program, full)

        ys, tangent = jax.linearize(of_some, *(xs[i] for i in wrt))
        residuals, tree = jax.tree.flatten(tangent)
        return [*ys, *residuals]

    closed = jax.make_jaxpr(forward)(*avals)
    outputs = len(program.outvars)

    def tangent(residuals: Sequence[Any], ds: Sequence[Any]) -> list[Any]:
        return jax.tree.unflatten(tree, residuals)(*ds)

    ds = [avals[i].to_tangent_aval() for i in wrt]
    linear = jax.make_jaxpr(tangent)(closed.out_avals[outputs:], ds)
    return Derivative(
        Program.of(closed, program.base), _as_program(linear), outputs, wrt, _jax.axis_env()
    )


def _as_program(linear: Any) -> Program:
    jaxpr = linear.jaxpr
    invars = (*jaxpr.constvars, *jaxpr.invars)
    return Program(invars, tuple(jaxpr.outvars), tuple(jaxpr.eqns), tuple(linear.consts))


def _is_transposed_only(eqn: Any) -> bool:
    """Tell whether an equation contains the derivative of a `jax.custom_vjp` function.

    JAX can transpose such a derivative, but neither evaluate nor batch it.
    """
    return eqn.primitive.name in _jax.TRANSPOSED_ONLY or any(
        _is_transposed_only(e) for b in bodies(eqn) for e in b.jaxpr.eqns
    )


def _evaluate(linear: Program, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Evaluate a linear program, and represent zero tangents by None, as JAX's own rules do."""
    count = len(linear.consts) + len(residuals)
    known = dict(zip(linear.invars[:count], (*linear.consts, *residuals), strict=True))
    moving: dict[Any, Any] = dict(zip(linear.invars[count:], tangents, strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, jec.Literal):
            return atom.val
        if atom in known:
            return known[atom]
        value = moving[atom]
        return _jax.zeros(atom.aval) if value is None else value

    for eqn in linear.eqns:
        read_tangents = [v for v in eqn.invars if not isinstance(v, jec.Literal) and v in moving]
        present = [v for v in read_tangents if moving[v] is not None]
        target = moving if read_tangents else known
        if read_tangents and not present:
            outs = [None] * len(eqn.outvars)
        elif _is_barrier(eqn) and len(read_tangents) == len(eqn.invars):
            # JAX cannot transpose a barrier if some of its inputs are symbolic zeros.
            passed = iter(_jax.bind(eqn, [read(v) for v in present]) if present else ())
            outs = [None if moving[v] is None else next(passed) for v in eqn.invars]
        elif eqn.primitive.name == "add_any" and len(present) < len(read_tangents):
            outs = [moving[v] for v in present]
        else:
            outs = _jax.bind(eqn, [read(v) for v in eqn.invars])
        target.update(zip(eqn.outvars, outs, strict=True))
    return [None if isinstance(v, jec.Literal) else moving.get(v) for v in linear.outvars]


def _is_barrier(eqn: Any) -> bool:
    return _jax.name_of(eqn.primitive) == "optimization_barrier"
