"""How does a decorated function learn how the devices split its inputs?

The selectors `collective` and `gathered_parameters` ask what the partitioner of XLA will exchange,
which depends on the shardings of the whole program (`remat_kit._program.communication`). A trace
does not contain them, so this module looks for them where the function is called:

* `inspect`, `measure` and `diff` have traced the program once before, and know them.
* A decorated step that is called with arrays is traced once before, for each set of shardings.
* In a call that runs operation by operation, the inputs are arrays, which have shardings.
* In a `jax.jit` of the user, the arguments of the outermost jitted function have shardings. JAX is
  tracing this function at that moment; it is traced once more, from its beginning.

Elsewhere they are unknown: in a scan that is called outside of a jit, or in an `nnx.jit`, which
cannot be traced in the middle of its own trace.

Example: `jax.jit(step)(weights, x)` with sharded arrays traces ``step``, and the trace meets a
decorated block. Then ``step`` is traced a second time with barriers behind the inputs of its
blocks, Shardy propagates the shardings of ``weights`` and ``x`` to the barriers, and the first
trace goes on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from remat_kit import _jax
from remat_kit._frameworks import flax as _flax
from remat_kit._program import communication as _communication
from remat_kit._program.communication import Known
from remat_kit._program.program import Program
from remat_kit._program.steps import traced as _traced
from remat_kit._program.steps.gradient import abstract

UNKNOWN = (
    "`{call}`: it is unknown here how the devices split the arrays, so the policy does not select "
    "the collectives that XLA adds"
)


UNSLICED = (
    "`{call}`: it is unknown here how the devices split the arrays, so the regions save their "
    "inputs whole"
)


UNSLICED_HINT = (
    "decorate the jitted step, or call the function inside of a `jax.jit` (not `nnx.jit`) whose "
    "arguments have shardings"
)


UNKNOWN_HINT = f"{UNSLICED_HINT}; or name the gathered value and save the name"


def marked(program: Program, inputs: Sequence[Any]) -> Program | None:
    """Return a program in which the values that a collective makes have a checkpoint name.

    None if the shardings of its inputs are unknown.

    Args:
        program: the program of a decorated function.
        inputs: the values that enter it from outside, for its last variables.
    """
    context = _communication.current()
    known = context if isinstance(context, Known) else _of_arrays(program, inputs) or _of_jit()
    return None if known is None else known.marked(program, len(inputs))


def known_of_program() -> Known | None:
    """Return the shardings of the program that is being traced; None if they are unknown."""
    context = _communication.current()
    return context if isinstance(context, Known) else _of_jit()


def _of_arrays(program: Program, inputs: Sequence[Any]) -> Known | None:
    """Return the shardings of inputs that are arrays, or that are differentiated outside of jit."""
    values = list(map(_jax.concrete_value, inputs))
    if any(isinstance(v, _jax.Tracer) for v in values):
        return None
    key = _communication.key_of(program.base, [v.aval for v in program.invars[-len(inputs) :]])
    return Known({key: {tuple(map(_split_sharding, values))}})


def _split_sharding(value: Any) -> jax.sharding.NamedSharding | None:
    sharding = getattr(value, "sharding", None)
    is_named = isinstance(sharding, jax.sharding.NamedSharding)
    return sharding if is_named and _jax.partitions_of(sharding) > 1 else None


def _of_jit() -> Known | None:
    """Return what the outermost jitted function that is being traced says of its arguments."""
    call = _jax.outermost_jit()
    if call is None or _flax.nnx_jit_around(call.frame) is not None:
        # `nnx.jit` notes the changes of its arguments while it traces, and would lose them.
        return None
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))
    given = tuple(map(_shape, leaves))
    if any(isinstance(leaf, _jax.Tracer) for leaf in given):
        return None
    shapes = _Shapes(call.fn, (call.options, given, tree, _jax.trace_context()))
    return _jax.shared(_found, getattr(call.fn, "__wrapped__", call.fn), shapes)


class _Shapes:
    """A jitted function and the shapes of its arguments; equal for equal options and shapes."""

    def __init__(self, fn: Any, key: tuple[Any, ...]):
        self.fn, self.key = fn, key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shapes) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _found(_: Any, shapes: _Shapes) -> Known | None:
    def trace() -> Any:
        _, given, tree, _ = shapes.key
        args, kwargs = tree.unflatten(given)
        return shapes.fn.trace(*args, **kwargs)

    with _flax.outside_of_modules():
        return _found_in(trace, lambda traced: traced)


def _found_in(trace: Callable[[], Any], traced_of: Callable[[Any], Any]) -> Known | None:
    try:
        return _communication.found_in(trace, traced_of)
    except Exception:
        # The function cannot be traced a second time. The user's own trace raises what is wrong
        # with it; otherwise there is a warning that the shardings are unknown.
        return None


def _shape(leaf: Any) -> Any:
    """Return the shape of an array with its sharding; static arguments as they are."""
    value = _jax.concrete_value(leaf)
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) and not isinstance(value, _jax.Tracer):
        return abstract((value,))[0]
    return value


class CalledSteps:
    """The shardings in the calls of one decorated function that may be a step."""

    def __init__(self) -> None:
        self.known: dict[Any, Known | None] = {}

    def known_in(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the decorated functions of a call know their inputs' shardings.

        It changes nothing inside of a trace, or if another context has told them already.
        """
        if not _jax.is_outside_of_traces() or _communication.current() is not None:
            return contextlib.nullcontext()
        shapes, named = _flax.map_arrays(_shape, (args, kwargs))
        leaves, tree = jax.tree.flatten(_flax.arrays_of((shapes, named)))
        key = tree, tuple(leaves)
        try:
            is_new = key not in self.known
        except TypeError:  # a static argument without a hash, which `jax.jit` refuses
            return contextlib.nullcontext()
        if is_new:
            whole = functools.partial(fn, **named) if named else fn
            self.known[key] = _found_in(
                lambda: _traced.trace(whole, shapes, None, call="policy"),
                lambda program: program.traced,
            )
        known = self.known[key]
        return contextlib.nullcontext() if known is None else _communication.within(known)
