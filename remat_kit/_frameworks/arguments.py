"""Which arguments of a decorated function are traced, and which are constants?

`jax.checkpoint` traces every leaf of the arguments, including Python's numbers and bools, and
refuses a leaf that is not an array. `Call` does the same with two differences, so that a program
that runs without the decorator also runs with it. A leaf that is not an array (None, a string, a
function) is a constant. A Python bool or int is a constant if the function needs its value (in an
``if``, a ``range`` or a shape): `attempt` traces it as an array first, and if that fails traces the
function again with its value.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np

from remat_kit import _jax
from remat_kit._errors import UserError, unknown

# A function, its positional arguments and its keyword arguments.
Split = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Call:
    """One call of a function, turned into a function of the arrays among the arguments.

    ``fn``, ``args`` and ``kwargs`` are the new function and its arguments, which have None in the
    places of the constants. Two calls with the same constants have the same ``fn``, because JAX
    caches traces by the function and the types of its arguments.

    >>> call = Call(lambda x, scale, kind: {kind: x * scale}, (jnp.ones(2), 3.0, "out"), {})
    >>> [jax.typeof(x).str_short() for x in call.arrays]
    ['float32[2]', 'float32[]']
    >>> call.apply(jax.jit)
    {'out': Array([3., 3.], dtype=float32)}
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        constants: Iterable[str] = (),
    ):
        fn = self._original = _jax.remembered(fn)
        paths, leaves, tree = _leaves((args, kwargs))
        constants = set(constants)
        traced = [t and p not in constants for (x, t), p in zip(leaves, paths, strict=True)]
        self.traced = traced
        self.arrays = [_array(x) for (x, _), t in zip(leaves, traced, strict=True) if t]
        # The paths of the arguments at which a Python bool or int is traced.
        self.steering = {
            p
            for (x, _), t, p in zip(leaves, traced, paths, strict=True)
            if t and isinstance(x, int)
        }
        given = iter(self.arrays)
        holes = [next(given) if t else None for t in traced]
        self.args, self.kwargs = jax.tree.unflatten(tree, holes)
        if all(traced) and not _equinox_modules():
            self.fn = fn
            return
        filling = _Filling(
            tree,
            tuple(None if t else Static(x) for (x, _), t in zip(leaves, traced, strict=True)),
            tuple(map(jax.typeof, self.arrays)),
        )
        fixed = all(t or _is_fixed(x) for (x, _), t in zip(leaves, traced, strict=True))
        self.fn = _jax.shared(_filled, fn, filling) if fixed else _filled(lambda: fn, filling)

    def trace(self) -> _jax.Traced:
        """Trace the function, or return the trace that the cache of `jax.checkpoint` contains."""
        return _jax.trace(self.fn, self.args, self.kwargs)

    def apply(self, transform: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
        """Call the function under a transformation, and return its result."""
        return self._whole(transform(self.fn)(*self.args, **self.kwargs))

    def result(self, traced: _jax.Traced, outs: Sequence[Any]) -> Any:
        """Return the result of the function with ``outs`` as its arrays.

        The other leaves of the result are those of the trace.
        """
        return self._whole(jax.tree.unflatten(traced.out_tree, outs))

    def evaluated(self, traced: _jax.Traced) -> Any:
        """Run the program of a trace on the arrays of this call, and return the result."""
        outs = jec.jaxpr_as_fun(traced.closed)(*traced.consts, *self.arrays)
        return self.result(traced, outs)

    def like_arguments(self, values: Sequence[Any]) -> Any:
        """Return one value for each array, arranged as `jax.checkpoint` arranges the arguments."""
        tree = _jax.flatten((self.args, self.kwargs))[1]
        args, kwargs = jax.tree.unflatten(tree, values)
        return (args, kwargs) if kwargs else args

    def _whole(self, out: Any) -> Any:
        outputs = getattr(self.fn, _OUTPUTS, None)
        return out if outputs is None else outputs.whole(out)


@dataclasses.dataclass(frozen=True)
class _Filling:
    """The constants among the leaves of the arguments (None for an array) and the array types."""

    tree: Any
    constants: tuple[Static | None, ...]
    avals: tuple[Any, ...]


class _Outputs:
    """The leaves of a result that are not arrays, as the last trace returned them."""

    def __init__(self) -> None:
        self.leaves: list[tuple[Any, bool]] = []
        self.tree: Any = None

    def arrays(self, out: Any) -> list[Any]:
        leaves, self.tree = _outputs(out)
        self.leaves = [(None if t else x, t) for x, t in leaves]
        return [x for x, t in leaves if t]

    def whole(self, arrays: Sequence[Any]) -> Any:
        given = iter(arrays)
        return jax.tree.unflatten(self.tree, [next(given) if t else x for x, t in self.leaves])


_OUTPUTS = "__remat_kit_outputs__"


def _filled(of: Callable[[], Any], filling: _Filling) -> Callable[..., list[Any]]:
    """Return ``of()`` as a function of its arguments with None in the places of the constants."""
    outputs = _Outputs()

    def filled(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        given = iter(_jax.flatten((args, kwargs))[0])
        full = [next(given) if c is None else c.value for c in filling.constants]
        args, kwargs = jax.tree.unflatten(filling.tree, full)
        return outputs.arrays(fn(*args, **kwargs))

    made = _jax.Remade(of, filled)
    made.__dict__[_OUTPUTS] = outputs
    return made


class Static:
    """A value in a key, compared as `jax.checkpoint` compares static arguments.

    Values with a hash are compared by type and ``==``; other values are equal only if they are the
    same object.

    >>> Static(1) == Static(1), Static(1) == Static(True), Static([1]) == Static([1])
    (True, False, False)
    """

    def __init__(self, value: Any):
        self.value = value
        try:
            self.hash, self.hashable = hash((type(value), value)), True
        except TypeError:
            self.hash, self.hashable = id(value), False

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Static) or type(other.value) is not type(self.value):
            return False
        if self.value is other.value:
            return True
        if isinstance(self.value, (float, complex)):
            return repr(self.value) == repr(other.value)  # tells 0.0 and -0.0 apart
        return self.hashable and other.hashable and bool(self.value == other.value)


def _is_fixed(x: Any) -> bool:
    """Tell whether a constant is immutable, unlike a list to which a function may append."""
    kinds = (bool, int, float, complex, str, bytes, enum.Enum, np.dtype, type)
    return x is None or isinstance(x, kinds)


def attempt(
    run: Callable[[Call], Any],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    constants: set[str],
) -> tuple[Call, Any]:
    """Run a call with its Python bools and ints as arrays and, if that fails, as constants.

    Returns the call that worked and the result of ``run``. The paths of the arguments that had to
    be constants are added to ``constants``, and further calls make them constants at once.

    >>> remembered = set()
    >>> def f(x, double): return 2 * x if double else x
    >>> call, _ = attempt(Call.trace, f, (jnp.ones(2), True), {}, remembered)
    >>> len(call.arrays), remembered
    (1, {'f[0][1]'})
    """
    name = getattr(fn, "__qualname__", "")
    known = {c.removeprefix(name) for c in constants if c.startswith(name)}
    call = Call(fn, args, kwargs, known)
    steering = call.steering
    try:
        return call, run(call)
    except Exception as error:
        if not steering:
            explain(error)
            raise
    # A traced Python bool or int may have caused the error. If not, the same error is raised again.
    call = Call(fn, args, kwargs, known | steering)
    try:
        out = run(call)
    except Exception as error:
        explain(error)
        raise
    constants |= {name + path for path in steering}
    return call, out


def untraced(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], constants: set[str]
) -> Any:
    """Call a function with the arguments that a trace would give it, but without tracing it.

    >>> untraced(lambda x, n: x[:n], (jnp.arange(4), 2), {}, set())
    Array([0, 1], dtype=int32)
    """

    def run(call: Call) -> Any:
        return call.apply(lambda fn: fn)

    return attempt(run, fn, args, kwargs, constants)[1]


def explain(error: Exception) -> None:
    """Add a hint about the options of `policy` to an error of JAX."""
    if isinstance(error, jax.errors.ConcretizationTypeError):
        error.add_note(
            "hint: if an argument of the decorated function must be a Python value, not an array, "
            "name it with static_argnums= or static_argnames= of remat_kit.policy"
        )


def _leaves(tree: Any) -> tuple[list[str], list[tuple[Any, bool]], Any]:
    """Return the path of each leaf, each leaf and whether it is traced, and the tree structure."""
    modules = _equinox_modules()
    nodes = _jax.flatten_with_path(tree, is_leaf=lambda x: isinstance(x, modules))[0]
    traced = []
    for _, node in nodes:
        test = _is_array if isinstance(node, modules) else is_traceable
        traced += [test(x) for x in _jax.flatten(node)[0]]
    leaves, structure = _jax.flatten_with_path(tree)
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    return paths, [(x, t) for (_, x), t in zip(leaves, traced, strict=True)], structure


def _outputs(out: Any) -> tuple[list[tuple[Any, bool]], Any]:
    """Return the leaves of a result, each with whether it is an array, and the tree structure.

    Only the fields of an Equinox module may be something other than arrays. `jax.make_jaxpr`
    refuses other results that are not arrays, as `jax.checkpoint` does.
    """
    modules = _equinox_modules()
    nodes = jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, modules))
    arrays = []
    for node in nodes:
        inside = isinstance(node, modules)
        arrays += [not inside or _is_array(x) for x in jax.tree.leaves(node)]
    leaves, structure = jax.tree.flatten(out)
    return list(zip(leaves, arrays, strict=True)), structure


def _equinox_modules() -> tuple[type, ...]:
    """Return ``(equinox.Module,)`` if Equinox has been imported, and else an empty tuple.

    Some fields of an Equinox module are not arrays but hyperparameters (the rate of a dropout, an
    activation function), which `equinox.filter_checkpoint` does not trace either.
    """
    loaded = sys.modules.get("equinox")
    return () if loaded is None else (loaded.Module,)


def holds_equinox(tree: Any) -> bool:
    """Tell whether a pytree contains an Equinox module."""
    modules = _equinox_modules()
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, modules))
    return any(isinstance(x, modules) for x in leaves)


def _is_array(x: Any) -> bool:
    return is_traceable(x) and not isinstance(x, (bool, int, float, complex))


def is_traceable(x: Any) -> bool:
    """Tell whether JAX can trace ``x`` as an array, which it cannot if an int is too large.

    >>> [is_traceable(x) for x in (1.0, True, jnp.ones(2), 2**70, "relu", None, jnp.tanh)]
    [True, True, True, False, False, False, False]
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return False
    try:
        dtype = jax.typeof(x).dtype
    except (TypeError, OverflowError):
        return False
    if type(x) is int:
        limits = jnp.iinfo(dtype)
        return int(limits.min) <= x <= int(limits.max)
    return True


def _array(x: Any) -> Any:
    """Return ``x``, or for a Python scalar the array of weak type that JAX converts it to."""
    return jnp.asarray(x) if isinstance(x, (bool, int, float, complex)) else x


# -- arguments that the user declares static ----------------------------------------------------


def without_static(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    argnums: Sequence[int],
    argnames: Sequence[str],
    signature_of: Any,
    skip: int = 0,
    call: str,
) -> Split:
    """Return ``fn`` closed over its static arguments, and its other arguments.

    >>> f = lambda x, n, *, flip: (x * n, flip)
    >>> closed, args, kwargs = without_static(
    ...     f, (2.0, 3), {"flip": True}, argnums=(1,), argnames=("flip",), signature_of=f, call="f")
    >>> args, kwargs, closed(*args, **kwargs)
    ((2.0,), {}, (6.0, True))

    Args:
        signature_of: the function to whose signature the positions and names refer.
        skip: the number of arguments of that signature before ``args`` (1 for ``self``), which the
            returned function takes first. It is negative if ``args`` begins with arguments that the
            signature does not have.
        call: the call of the decorator, which errors quote.

    Raises:
        UserError: neither the call nor the signature has a position in ``argnums``. When the
            returned function runs: it needs the value of a static argument that is being traced.
    """
    if not argnums and not argnames:
        return fn, args, kwargs
    parameters = _parameters(signature_of)
    positions = {_position(i, len(args) + skip, parameters, argnums, call) for i in argnums}
    names = set(argnames) | {parameters[i] for i in positions if i < len(parameters)}
    positions |= {i for i, name in enumerate(parameters) if name in names}
    static = {i - skip: args[i - skip] for i in positions if skip <= i < len(args) + skip}
    static_kwargs = {k: v for k, v in kwargs.items() if k in names}

    values = tuple(static.values()), tuple(static_kwargs.values())
    closing = _Closing(
        tuple(static),
        tuple(static_kwargs),
        tuple(map(Static, values[0])),
        tuple(map(Static, values[1])),
        len(args),
        skip,
        call,
    )
    traced = next(_traced_among(static, static_kwargs, skip), None)
    if traced is not None:
        closed = _closed(lambda: fn, closing)
    else:
        closed = _jax.shared(_closed, fn, closing)
    rest = tuple(x for i, x in enumerate(args) if i not in static)
    return closed, rest, {k: v for k, v in kwargs.items() if k not in names}


@dataclasses.dataclass(frozen=True)
class _Closing:
    """Static arguments: their positions and names, their values, and the number of positions."""

    positions: tuple[int, ...]
    names: tuple[str, ...]
    by_position: tuple[Static, ...]
    by_name: tuple[Static, ...]
    count: int
    skip: int
    call: str


def _closed(of: Callable[[], Any], closing: _Closing) -> Callable[..., Any]:
    """Return ``of()`` as a function of its other arguments."""
    static = {i: s.value for i, s in zip(closing.positions, closing.by_position, strict=True)}
    static_kwargs = {k: s.value for k, s in zip(closing.names, closing.by_name, strict=True)}

    def closed(fn: Callable[..., Any], *rest: Any, **others: Any) -> Any:
        given = iter(rest)
        first = [next(given) for _ in range(closing.skip)]
        places = range(closing.count)
        full = [*first, *(static[i] if i in static else next(given) for i in places)]
        try:
            return fn(*full, **others, **static_kwargs)
        except jax.errors.ConcretizationTypeError as error:
            traced = next(_traced_among(static, static_kwargs, closing.skip), None)
            if traced is None:
                raise
            raise UserError(
                f"`{closing.call}`: {traced} is static, but its value is being traced",
                hint="mark it static in the enclosing jit or grad too, or do not mark it here",
            ) from error

    made = _jax.Remade(of, closed)
    made.__dict__["__signature__"] = _ANY_ARGUMENTS
    return made


_ANY_ARGUMENTS = inspect.signature(lambda *args, **kwargs: None)


def check_names(names: Sequence[str], functions: Iterable[Any], call: str) -> None:
    """Raise for a static argument that no function has a parameter for, as `jax.jit` does.

    >>> check_names(["n"], [lambda x, n: x], "policy(...)")

    Raises:
        UnknownNameError: no function has such a parameter; the hint lists the parameters.
    """
    known: list[str] = []
    for fn in functions:
        try:
            parameters = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError):
            return  # the signature of a C function is unknown
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            return
        known += [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    for name in names:
        if name not in known:
            raise unknown("parameter", name, known, call=f"{call}: static_argnames={name!r}")


def _parameters(fn: Any) -> list[str]:
    """Return the names of the positional parameters in order, or nothing if they are unknown."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]


def _position(
    index: int, count: int, parameters: Sequence[str], argnums: Sequence[int], call: str
) -> int:
    if not -count <= index < max(count, len(parameters)):
        raise UserError(
            f"`{call}`: static_argnums={tuple(argnums)}, but the call has "
            f"{count} positional arguments",
            hint="positions count from 0 as in the signature, including `self` if a class or a "
            "method is decorated; static_argnames takes names",
        )
    return index % count if index < 0 else index


def _traced_among(
    static: dict[int, Any], static_kwargs: dict[str, Any], skip: int
) -> Iterator[str]:
    named = {f"argument {i + skip}": x for i, x in static.items()}
    named |= {f"{k!r}": x for k, x in static_kwargs.items()}
    for name, x in named.items():
        if any(isinstance(leaf, _jax.Tracer) for leaf in jax.tree.leaves(x)):
            yield name


# -- one flag for each argument -----------------------------------------------------------------


def flags(prefix: Any, tree: Any, call: str) -> list[bool]:
    """Return one bool for each leaf of ``tree``, from a prefix of ``tree`` whose leaves are bools.

    A tuple in the prefix matches any container with as many children, as for `jax.checkpoint`.

    >>> flags((False, {"a": True, "b": False}), (1, {"a": (2, 3), "b": 4}), "f")
    [False, True, True, False]
    >>> flags(((True, False),), ({"a": 1, "b": 2},), "f")
    [True, False]
    """
    if isinstance(prefix, bool):
        return [prefix] * len(jax.tree.leaves(tree))
    flatten = jax.tree_util.default_registry.flatten_one_level
    prefix_level, tree_level = flatten(prefix), flatten(tree)
    if prefix_level is None or tree_level is None:
        raise _no_prefix(prefix, tree, call)
    (prefixes, kind), (children, node) = map(_children, (prefix_level, tree_level))
    alike = isinstance(prefix, (tuple, list)) or (type(prefix) is type(tree) and kind == node)
    if not alike or len(prefixes) != len(children):
        raise _no_prefix(prefix, tree, call)
    return [f for p, t in zip(prefixes, children, strict=True) for f in flags(p, t, call)]


def _children(level: tuple[Any, Any]) -> tuple[list[Any], Any]:
    return list(level[0]), level[1]


def _no_prefix(prefix: Any, tree: Any, call: str) -> UserError:
    return UserError(
        f"`{call}`: prevent_cse has {prefix!r} where the arguments have {jax.tree.structure(tree)}",
        hint="give one bool, or bools in the structure of the arguments that are not static",
    )
