"""Which program is compiled: the gradient of a loss, or a training step as its user runs it?

A jitted step is traced by its own ``trace`` method, because its jit determines which arguments are
donated, which are static and, with NNX, which are changed. Any other function is jitted here.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from remat_kit import _jax
from remat_kit._errors import UserError
from remat_kit._frameworks import arguments as _arguments
from remat_kit._frameworks import flax as _flax
from remat_kit._program import communication as _communication
from remat_kit._program.steps import gradient as _gradient
from remat_kit._program.steps import step as _step
from remat_kit._program.steps.gradient import Argnums, abstract


@dataclass(frozen=True)
class CompilableProgram:
    """A traced program and its arguments.

    Attributes:
        traced: a `jax.stages.Traced`.
        args, kwargs: the arguments of the compiled program, which are arrays or
            `jax.ShapeDtypeStruct` in pytrees, without the static arguments.
    """

    traced: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the arguments, as a flat list."""
        return [_shape(info) for info in jax.tree.leaves(self.traced.args_info)]

    @property
    def values_donated(self) -> list[bool]:
        """For each argument, whether it is donated, as a flat list."""
        return [info.donated for info in jax.tree.leaves(self.traced.args_info)]

    @property
    def results(self) -> Any:
        """The shapes of the results."""
        return self.traced.out_info

    def values(self) -> tuple[list[Any], list[bool], Any]:
        """Return flat arguments to run the program with, which of them are donated, and their tree.

        Arguments that are only shapes become zeros. The tree is that of ``(args, kwargs)``.
        """
        leaves, tree = jax.tree.flatten((self.args, self.kwargs))
        return [_gradient.materialised(leaf) for leaf in leaves], self.values_donated, tree


def _shape(info: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(info.shape, info.dtype)


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    argnums: Argnums = 0,
    donate_argnums: int | Sequence[int] = (),
    *,
    optimizer: Any = None,
    call: str = "measure",
) -> CompilableProgram:
    """Trace the gradient of a loss, a training step around it, or a step as it is.

    >>> step = jax.jit(lambda w, n: w * n, donate_argnums=0, static_argnums=1)
    >>> program = trace(step, (jax.ShapeDtypeStruct((3,), "float32"), 2), argnums=None)
    >>> program.values()[1]
    [True]

    Args:
        fn: a loss, or with ``argnums=None`` a step.
        args: arrays or `jax.ShapeDtypeStruct`, in pytrees, and the static arguments of a jitted
            step.
        argnums: positions of the arguments to differentiate, or None.
        donate_argnums: positions of the arguments whose memory the results may reuse, if the step
            is not jitted with this option itself.
        optimizer: with a loss, the whole step with this optimizer is traced. It donates its
            parameters and state.
        call: the public function that errors name.

    Raises:
        UserError: the call cannot work.
        NotDifferentiableError: ``fn`` is not a loss.
    """
    again = functools.partial(
        _trace_once, fn, args, argnums, _positions(donate_argnums), optimizer, call
    )
    if not _is_split(fn, args):
        return again()
    with _communication.known_within(again, lambda program: program.traced):
        return again()


def _is_split(fn: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Tell whether XLA may partition a program: its arguments or its own jit may say so."""
    inner = getattr(fn, STEP, None)
    devices = _jax.devices_of_arguments(_flax.arrays_of(tuple(args)))
    return devices > 1 or _jax.is_jitted(fn if inner is None else inner.fn)


def _trace_once(
    fn: Callable[..., Any],
    args: Sequence[Any],
    argnums: Argnums,
    donated: tuple[int, ...],
    optimizer: Any,
    call: str,
) -> CompilableProgram:
    if optimizer is not None:
        step, given, own = _step.training_step(fn, optimizer, args, argnums, call)
        own = {*own, *(1 + i % len(args) for i in donated)}
        program = _jitted_here(step, given, own, call)
    elif argnums is not None:
        gradient = _gradient.gradient_program(fn, args, argnums, call=call)
        program = _jitted_here(gradient, args, donated, call)
    else:
        program = _step_as_it_is(fn, tuple(args), donated, call)
    return program


def _positions(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def _jitted_here(
    fn: Callable[..., Any], args: Sequence[Any], donated: Iterable[int], call: str
) -> CompilableProgram:
    structs = abstract(args, call=call)
    traced = jax.jit(fn, donate_argnums=tuple(donated)).trace(*structs)
    return CompilableProgram(traced, tuple(args), {})


# -- steps --------------------------------------------------------------------------------------


STEP = "__remat_kit_step__"  # of a decorated function: the function, and its context as a step


def _step_as_it_is(
    fn: Callable[..., Any], args: tuple[Any, ...], donated: tuple[int, ...], call: str
) -> CompilableProgram:
    decorated = getattr(fn, STEP, None)
    if decorated is not None and decorated.known is not False:
        # A decorated step runs as it is, so its own jit determines the program.
        with decorated.catching():
            program = _step_as_it_is(decorated.fn, args, donated, call)
        if decorated.seen:
            return program
    inner, full, kwargs = _bound(fn, args)
    jitted = _flax.jitted_of(inner) if _flax.is_nnx_jitted(inner) else inner
    if not _jax.is_jitted(jitted):
        return _plain_step(fn, args, donated, call)
    own = _jax.donated_positions(jitted)
    if donated and not own and jitted is inner:
        return _plain_step(fn, args, donated, call)  # as if `jax.jit` had this option
    shift = len(full) - len(args)
    if not {shift + i % max(1, len(args)) for i in donated} <= set(own):
        raise UserError(
            f"`{call}(..., donate_argnums={donated!r})`: the function is jitted, and its own "
            f"donate_argnums is {own or 'empty'}",
            hint="leave donate_argnums out here, and give it to the function's own jit",
        )
    if jitted is not inner:
        return _of_shapes(_flax.trace_jitted(inner, full, kwargs))
    full, kwargs = jax.tree.map(_without_place, (full, kwargs), is_leaf=_flax.is_state)
    traced = inner.trace(*full, **kwargs)
    positions, names = _jax.static_arguments(jitted)
    return CompilableProgram(
        traced,
        tuple(x for i, x in enumerate(full) if i not in positions),
        {name: x for name, x in kwargs.items() if name not in names},
    )


def _bound(
    fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the function inside of `functools.partial` and methods, with all its arguments."""
    kwargs: dict[str, Any] = {}
    while True:
        if isinstance(fn, functools.partial):
            fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
        elif isinstance(fn, types.MethodType):
            fn, args = fn.__func__, (fn.__self__, *args)
        else:
            return fn, args, kwargs


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or _arguments.is_traceable(leaf)


def _of_arrays(
    fn: Callable[..., Any], args: tuple[Any, ...], donated: tuple[int, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
    """Return a step as a function of the arrays among its arguments, and what it donates."""
    leaves, tree = jax.tree.flatten(args)
    owners = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    @functools.wraps(fn, updated=())
    def step(*arrays: Any) -> Any:
        full = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            full[place] = array
        return _arrays_of(fn(*tree.unflatten(full)))

    own = {i % len(args) for i in donated}
    given = tuple(n for n, place in enumerate(places) if owners[place] in own)
    return step, tuple(leaves[place] for place in places), given


def _arrays_of(result: Any) -> Any:
    return [x for x in jax.tree.leaves(result) if _is_array(x)]


def _without_place(leaf: Any) -> Any:
    """Return the shape of an array, and its sharding over several devices if it has one.

    Anything else may be a static argument.
    """
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return abstract((leaf,))[0]
    return leaf


def _of_shapes(traced: Any) -> CompilableProgram:
    args, kwargs = jax.tree.map(_shape, traced.args_info)
    return CompilableProgram(traced, args, kwargs)


def _plain_step(
    fn: Callable[..., Any], args: tuple[Any, ...], donated: tuple[int, ...], call: str
) -> CompilableProgram:
    if _flax.holds_state(args):
        # `jax.jit` would drop the changes of NNX objects, and with them the update of the step.
        return _of_shapes(_flax.trace_jitted(_flax.jitted_step(fn, donated), args, {}))
    leaves, tree = jax.tree.flatten(args)
    if not all(map(_is_array, leaves)):
        # Equinox modules have fields that are not arrays, such as activation functions.
        fn, args, donated = _of_arrays(fn, args, donated)
    program = _jitted_here(fn, args, donated, call)
    if donated or not (inner := _jax.donated_by_only_call(program.traced)):
        return program
    leaves, tree = jax.tree.flatten(tuple(args))
    return _jitted_here(lambda *leaves: fn(*tree.unflatten(leaves)), leaves, sorted(inner), call)
