"""Does a function take a gradient itself, as a training step does and a loss seldom does?

A policy is meant for a function that is differentiated later. A training step has already
differentiated its loss, so a region around parts of the step is never recomputed. The jaxpr of a
function shows whether it takes a gradient, because JAX writes "transpose" into the name stack of
every equation of a backward pass.

For example, the result of ``step = lambda w, x: w - 0.1 * jax.grad(loss)(w, x)`` depends on a
gradient, and it is the sum of an argument and a value that depends on a gradient. This module
finds both facts in one pass over the jaxpr, in which it marks each variable.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from remat_kit import _jax


@dataclasses.dataclass(frozen=True)
class Taken:
    """The gradient that a traced function takes itself.

    Attributes:
        equation: the first equation of the backward pass.
        reached: for each result, whether it depends on the gradient.
        updated: for each result, whether it is the sum of an argument and a value that depends on
            the gradient.
    """

    equation: Any
    reached: tuple[bool, ...]
    updated: tuple[bool, ...]


def taken(closed: Any) -> Taken | None:
    """Return the gradient that a traced function takes, or None if it takes none.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    >>> step = lambda w, x: (w - 0.1 * jax.grad(loss)(w, x), jnp.sum(x))
    >>> w = x = jnp.ones((3, 3))
    >>> taken(jax.make_jaxpr(step)(w, x)).updated
    (True, False)
    >>> taken(jax.make_jaxpr(loss)(w, x))

    Args:
        closed: the jaxpr of the function, from `jax.make_jaxpr`.
    """
    first = _first_transposed(closed.jaxpr)
    if first is None:
        return None
    marks = _results(closed.jaxpr, [_Mark(argument=True)] * len(closed.jaxpr.invars), False)
    return Taken(
        first,
        reached=tuple(m.gradient for m in marks),
        updated=tuple(m.update for m in marks),
    )


def is_loss(gradient: Taken, result: Any) -> bool:
    """Tell whether a function that takes a gradient is a loss nevertheless.

    A scalar result is a loss, for example a penalty on a gradient. So is ``(scalar, aux)`` if the
    scalar depends on the gradient. If the scalar does not, the function returns the gradient or an
    update, as ``jax.value_and_grad(loss)`` or a step that returns ``(loss, parameters)`` does.

    Args:
        gradient: the gradient that the function takes, from `taken`.
        result: the shapes of the result of the function.
    """
    if is_real_scalar(result):
        return True
    pair = isinstance(result, tuple) and len(result) == 2 and is_real_scalar(result[0])
    return pair and gradient.reached[0]


def returns_gradient_of(gradient: Taken, result: Any, argument: Any) -> bool:
    """Tell whether the results contain a gradient of an argument.

    They do if, for each array of the argument, some result has its shape and type and depends on
    the gradient.

    Args:
        gradient: the gradient that the function takes, from `taken`.
        result: the shapes of the result of the function.
        argument: a pytree of arrays or shapes.
    """
    wanted = Counter((x.shape, str(x.dtype)) for x in jax.tree.leaves(argument))
    arrays = [x for x in jax.tree.leaves(result) if hasattr(x, "dtype")]
    results = zip(arrays, gradient.reached, strict=False)
    return wanted <= Counter((x.shape, str(x.dtype)) for x, depends in results if depends)


# -- whether the function is differentiated itself ---------------------------------------------

_expected: contextvars.ContextVar[bool] = contextvars.ContextVar("differentiated", default=False)


@contextlib.contextmanager
def differentiated_later() -> Iterator[None]:
    """In this context, remat_kit traces a loss that it differentiates afterwards."""
    token = _expected.set(True)
    try:
        yield
    finally:
        _expected.reset(token)


def expected() -> bool:
    """Tell whether remat_kit differentiates what it traces now (see `differentiated_later`)."""
    return _expected.get()


def being_differentiated() -> bool:
    """Tell whether the running call is being differentiated, as far as that can be known.

    It is unknown whether a `jit` that is being traced will be differentiated in a later call.
    """
    return _expected.get() or _jax.being_differentiated()


def is_inexact(aval: Any) -> bool:
    """Tell whether an array has a floating-point or complex type, and so may have a gradient."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def is_real_scalar(value: Any) -> bool:
    """Tell whether an array is a real floating-point scalar, as a loss is."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or getattr(value, "shape", None) != ():
        return False
    return jnp.issubdtype(dtype, jnp.floating)


# -- the walk ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Mark:
    """Whether a variable is an argument, depends on a gradient, or is an updated argument."""

    argument: bool = False
    gradient: bool = False
    update: bool = False


_NONE = _Mark()


_SUMS = frozenset({"add", "sub", "add_any"})


_SCALED = frozenset({"mul", "div"})  # weight decay scales the parameter before it is updated


_SAME = frozenset(
    {
        *("convert_element_type", "copy", "copy_p", "name", "optimization_barrier", "device_put"),
        *("sharding_constraint", "reduce_precision", "reshape", "pvary", "select_n"),
    }
)


def differentiated(eqn: Any) -> bool:
    """Tell whether an equation belongs to a forward or a backward pass that is differentiated."""
    return bool(_jax.transforms_of(eqn) & {"jvp", "transpose"})


def _inner(eqn: Any) -> list[Any]:
    """Return the jaxprs in the parameters of an equation, without their constants."""
    hi = _jax.hi_primitive(eqn)
    params = eqn.params if hi is None else hi.params
    jaxprs = []
    for value in params.values():
        several = value if isinstance(value, (tuple, list)) else (value,)
        jaxprs += [getattr(v, "jaxpr", v) for v in several if _jax.is_jaxpr(v)]
    return jaxprs


def _first_transposed(jaxpr: Any) -> Any | None:
    for eqn in jaxpr.eqns:
        if "transpose" in _jax.transforms_of(eqn):
            return eqn
        for body in _inner(eqn):
            transposed = _first_transposed(body)
            if transposed is not None:
                return transposed
    return None


def _results(jaxpr: Any, given: Sequence[_Mark], transposed: bool) -> list[_Mark]:
    """Return the marks of a jaxpr's results, given those of its arguments."""
    marks: dict[Any, _Mark] = dict(zip(jaxpr.invars, given, strict=True))

    def of(atom: Any) -> _Mark:
        return _NONE if isinstance(atom, jec.Literal) else marks.get(atom, _NONE)

    for eqn in jaxpr.eqns:
        inside = transposed or "transpose" in _jax.transforms_of(eqn)
        outs = _after(eqn, [of(v) for v in eqn.invars], inside)
        marks.update(zip(eqn.outvars, outs, strict=True))
    return [of(v) for v in jaxpr.outvars]


def _after(eqn: Any, given: Sequence[_Mark], transposed: bool) -> list[_Mark]:
    count = len(eqn.outvars)
    bodies = [b for b in _inner(eqn) if len(b.outvars) == count and len(b.invars) <= len(given)]
    if bodies:
        # The operands of a loop or a conditional may begin with others than those of its bodies.
        marks = [_results(b, given[len(given) - len(b.invars) :], transposed) for b in bodies]
        return [_either(column) for column in zip(*marks, strict=True)]
    gradient = transposed or any(m.gradient for m in given)
    argument = any(m.argument for m in given) and not gradient
    name = _jax.name_of(eqn.primitive)
    update = name in _SUMS and any(m.argument for m in given) and any(m.gradient for m in given)
    if name in _SAME:
        update = any(m.update for m in given)
    elif name not in _SCALED:
        argument = False
    return [_Mark(argument, gradient, update)] * count


def _either(marks: Sequence[_Mark]) -> _Mark:
    return _Mark(
        any(m.argument for m in marks),
        any(m.gradient for m in marks),
        any(m.update for m in marks),
    )
