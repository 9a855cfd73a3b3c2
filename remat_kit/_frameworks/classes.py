"""How is a class or a callable pytree decorated so that all other code can use it as before?

A decorated class is a subclass of the same name whose methods are decorated. A decorated instance
of a pytree class (an Equinox module, a dataclass of `flax.struct`, a registered class) is a copy
whose class is such a subclass. The copy has the leaves of the original, so it is differentiated,
updated, stacked and saved as before.
"""

from __future__ import annotations

import functools
import inspect
import sys
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from remat_kit._errors import UserError, unknown

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def is_callable_pytree(x: Any) -> bool:
    """Tell whether ``x`` is a callable that JAX flattens as a pytree.

    >>> from jax.tree_util import Partial
    >>> [is_callable_pytree(x) for x in (Partial(max, 1), max, [1], Partial)]
    [True, False, False, False]
    """
    return callable(x) and not isinstance(x, type) and not jax.tree_util.all_leaves([x])


def subclass(cls: type, wrap: Wrap, methods: Sequence[str], *, call: str, **members: Any) -> type:
    """Return a subclass of ``cls``, under the same name, whose ``methods`` are wrapped.

    Raises:
        UserError: the class has no such method, a method is a property, or the class refuses
            subclasses.
    """
    body = {m: _wrapped(_member(cls, m, call), wrap, m, call) for m in methods}
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    try:
        return type(cls)(cls.__name__, (cls,), body | members)
    except TypeError as error:
        raise UserError(
            f"`{call}`: the class {cls.__qualname__} cannot be decorated, because it refuses "
            f"subclasses: {error}",
            hint="decorate its method in the body of the class, or a function that calls it",
        ) from error


def _member(cls: type, method: str, call: str) -> Any:
    for base in cls.__mro__:
        if method in vars(base):
            return vars(base)[method], getattr(cls, method)
    known = [m for m in dir(cls) if inspect.isroutine(getattr(cls, m, None)) and m[:2] != "__"]
    if method == "__call__":
        raise UserError(
            f"`{call}`: {cls.__qualname__} has no method `__call__`",
            hint=f"name the methods that become regions: methods={known[:3] or ['forward']}",
        )
    raise unknown(f"method of {cls.__qualname__}", method, known, call=call)


def _wrapped(member: tuple[Any, Any], wrap: Wrap, name: str, call: str) -> Any:
    raw, method = member
    if isinstance(raw, (staticmethod, classmethod)):
        return type(raw)(wrap(raw.__func__))
    if isinstance(raw, (property, functools.cached_property)) or not callable(method):
        raise UserError(
            f"`{call}`: {name} is a {type(raw).__name__}, not a method",
            hint="name methods, or decorate the function that computes it",
        )
    return wrap(method)


# -- copies and pickles -------------------------------------------------------------------------
# Python pickles a class by its name, and a decorated class may have the name of the original class.
# So the pickle of an instance contains how to decorate the original class again.

_MADE = "__remat_kit_made__"


# The decorated classes of this process, by the token that pickles contain.
_made: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


def remember(cls: Any, make: Callable[..., Any], app: Any, original: Any, methods: Any) -> None:
    """Record that ``make(app, original, methods)`` returned ``cls``, to pickle its instances."""
    if isinstance(cls, functools.partial):
        cls, original = cls.func, original.func
    parent = cls.__reduce_ex__

    def reduce(self: Any, protocol: Any) -> Any:
        reduced = parent(self, protocol)
        if isinstance(reduced, str):
            return reduced
        function, args, *state = reduced
        return (_restored, (_portable(function), *map(_portable, args)), *state)

    token = uuid.uuid4().hex
    _made[token] = cls
    setattr(cls, _MADE, (token, make, app, original, methods))
    cls.__reduce_ex__ = reduce


def _portable(x: Any) -> Any:
    """Return ``x``, or a reference to it if it is a decorated class without a name of its own."""
    if not isinstance(x, type) or _MADE not in vars(x):
        return x
    named: Any = sys.modules.get(x.__module__)
    for part in x.__qualname__.split("."):
        named = getattr(named, part, None)
    return x if named is x else _Reference(x)


class _Reference:
    """A reference to a decorated class: `copy` shares the class, `pickle` decorates it again."""

    def __init__(self, cls: type):
        self.cls = cls

    def __deepcopy__(self, memo: Any) -> _Reference:
        return self

    def __reduce__(self) -> Any:
        token, make, app, original, methods = vars(self.cls)[_MADE]
        return _made_again, (token, make, app, _portable(original), methods)


def _made_again(
    token: str, make: Callable[..., Any], app: Any, original: Any, methods: Any
) -> _Reference:
    """Return a reference to the class of a pickle, which is decorated once in each process."""
    cls = _made.get(token)
    if cls is None:
        cls = _made[token] = make(app, _class_in(original), methods)
    return _Reference(cls)


def _restored(function: Any, *args: Any) -> Any:
    return _class_in(function)(*map(_class_in, args))


def _class_in(x: Any) -> Any:
    return x.cls if isinstance(x, _Reference) else x


# -- instances ----------------------------------------------------------------------------------


def of_class(x: Any, cls: Any) -> Any:
    """Return a shallow copy of the pytree ``x`` whose class is ``cls``, a sub- or superclass.

    Fields are copied as they are; neither ``__init__`` nor a converter runs.
    """
    if isinstance(x, tuple):
        return tuple.__new__(cls, x)
    copy = object.__new__(cls)
    slots = (s for base in type(x).__mro__ for s in vars(base).get("__slots__", ()))
    fields = {s: getattr(x, s) for s in slots if hasattr(x, s)}
    for name, value in {**fields, **getattr(x, "__dict__", {})}.items():
        object.__setattr__(copy, name, value)
    return copy


def sharing(x: Any, cls: Any) -> Any:
    """Return an object of class ``cls`` that shares its attributes with ``x``.

    If a method sets an attribute of one of the two objects, the other has it too.
    """
    twin = object.__new__(cls)
    object.__setattr__(twin, "__dict__", vars(x))
    return twin


def is_pytree_class(cls: Any) -> bool:
    """Tell whether JAX flattens instances of ``cls`` as pytrees.

    >>> import flax
    >>> @flax.struct.dataclass
    ... class Layer:
    ...     w: jax.Array
    >>> is_pytree_class(Layer), is_pytree_class(Exception)
    (True, False)
    """
    if issubclass(cls, tuple):
        return hasattr(cls, "_fields")
    try:
        return not jax.tree_util.all_leaves([object.__new__(cls)])
    except TypeError:  # an abstract class, or a built-in class
        return False


def register(cls: type, like: type) -> None:
    """Make JAX flatten instances of ``cls`` like those of its superclass ``like``.

    Nothing is done for named tuples, and for classes such as Equinox's that register their
    subclasses themselves.
    """
    if issubclass(cls, tuple):
        return

    def children(x: Any) -> tuple[Any, Any]:
        parent = of_class(x, like)
        return jax.tree_util.tree_flatten_with_path(parent, is_leaf=lambda y: y is not parent)

    def with_keys(x: Any) -> tuple[Any, Any]:
        paths_and_children, tree = children(x)
        return [(path[0], child) for path, child in paths_and_children], tree

    def flatten(x: Any) -> tuple[Any, Any]:
        paths_and_children, tree = children(x)
        return [child for _, child in paths_and_children], tree

    def unflatten(tree: Any, children: Any) -> Any:
        return of_class(jax.tree.unflatten(tree, children), cls)

    try:
        jax.tree_util.register_pytree_with_keys(cls, with_keys, unflatten, flatten)
    except ValueError:  # registered already
        return
