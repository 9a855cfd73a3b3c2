"""Does a function take a gradient itself? What a training step does and a loss seldom does.

A policy is for a function that is differentiated later. A step has already differentiated its
loss, so a region around its parts is never recomputed. The equations of a traced function say which
of the two it is: JAX writes "transpose" into the name stack of every equation of a backward pass.

Example: in ``step = lambda w, x: w - 0.1 * jax.grad(loss)(w, x)`` the one result depends on a
gradient, and it is an argument plus something that depends on a gradient. Both facts are read off
the jaxpr by one walk that marks its variables.
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
        equation: the first one of its backward pass.
        reached: for each result, whether it depends on the gradient.
        updated: for each result, whether it is an argument plus something made of the gradient.
    """

    equation: Any
    reached: tuple[bool, ...]
    updated: tuple[bool, ...]


def taken(closed: Any) -> Taken | None:
    """Return the gradient that a traced function takes, None if it takes none.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    >>> step = lambda w, x: (w - 0.1 * jax.grad(loss)(w, x), jnp.sum(x))
    >>> w = x = jnp.ones((3, 3))
    >>> taken(jax.make_jaxpr(step)(w, x)).updated
    (True, False)
    >>> taken(jax.make_jaxpr(loss)(w, x))

    Args:
        closed: the jaxpr of the function, as `jax.make_jaxpr` gives it.
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


def is_loss(found: Taken, result: Any) -> bool:
    """Tell whether a function that takes a gradient is a loss nevertheless.

    A scalar result is a loss, for example a penalty on a gradient. So is ``(scalar, aux)`` if the
    scalar depends on the gradient; if it does not, the gradient was taken for its own sake, as in
    ``jax.value_and_grad(loss)`` or a step that returns ``(loss, parameters)``.

    Args:
        found: as `taken` gives it.
        result: the result of the function, in shapes.
    """
    if _is_real_scalar(result):
        return True
    pair = isinstance(result, tuple) and len(result) == 2 and _is_real_scalar(result[0])
    return pair and found.reached[0]


def returns_gradient_of(found: Taken, result: Any, argument: Any) -> bool:
    """Tell whether the results hold something of each shape in an argument, made of the gradient.

    Args:
        found: as `taken` gives it.
        result: the result of the function, in shapes.
        argument: a pytree of arrays or shapes.
    """
    wanted = Counter((x.shape, str(x.dtype)) for x in jax.tree.leaves(argument))
    arrays = [x for x in jax.tree.leaves(result) if hasattr(x, "dtype")]
    results = zip(arrays, found.reached, strict=False)
    return wanted <= Counter((x.shape, str(x.dtype)) for x, depends in results if depends)


# -- whether the function is differentiated itself ---------------------------------------------

_expected: contextvars.ContextVar[bool] = contextvars.ContextVar("differentiated", default=False)


@contextlib.contextmanager
def differentiated_later() -> Iterator[None]:
    """Trace a loss inside of it that remat_kit differentiates afterwards."""
    token = _expected.set(True)
    try:
        yield
    finally:
        _expected.reset(token)


def being_differentiated() -> bool:
    """Tell whether the call that is running is differentiated, as far as that can be known.

    A `jit` that is traced now, and differentiated in a later call, cannot be told.
    """
    return _expected.get() or _jax.being_differentiated()


def _is_real_scalar(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None or getattr(value, "shape", None) != ():
        return False
    return jnp.issubdtype(dtype, jnp.floating)


# -- the walk ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Mark:
    """What is known of a variable: it is an argument, depends on a gradient, is an update."""

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
    """Return the open jaxprs of an equation."""
    hi = _jax.hi_primitive(eqn)
    params = eqn.params if hi is None else hi.params
    found = []
    for value in params.values():
        several = value if isinstance(value, (tuple, list)) else (value,)
        found += [getattr(v, "jaxpr", v) for v in several if _jax.is_jaxpr(v)]
    return found


def _first_transposed(jaxpr: Any) -> Any | None:
    for eqn in jaxpr.eqns:
        if "transpose" in _jax.transforms_of(eqn):
            return eqn
        for body in _inner(eqn):
            found = _first_transposed(body)
            if found is not None:
                return found
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
        # A loop or a branch has operands of its own before those of its body.
        found = [_results(b, given[len(given) - len(b.invars) :], transposed) for b in bodies]
        return [_either(column) for column in zip(*found, strict=True)]
    gradient = transposed or any(m.gradient for m in given)
    argument = any(m.argument for m in given) and not gradient
    name = eqn.primitive.name
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
