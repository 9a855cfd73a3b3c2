"""How does a function of Flax modules become a function of arrays, for Linen and for NNX?

Linen lifts a function of modules, and NNX splits its objects into a structure and arrays. Flax is
imported only if a Flax object is given. The functions `flax.linen.transforms.lift_transform`,
`flax.core.lift.pack` and `flax.nnx.transforms.general.split_inputs` that this module uses are not
documented API; they were seen on flax 0.12.8 and 0.12.12.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax

from remat_kit import _jax
from remat_kit._errors import PolicyError

# runs (function, args, kwargs) as one or several checkpoint regions
Runner = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Regions(Protocol):
    """An object that runs a function of a Linen module in regions."""

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of arrays in one or several checkpoint regions."""
        ...

    def untraced(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function of arrays without regions."""
        ...

    def without_static(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        signature_of: Any,
        skip: int,
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return ``fn`` closed over its static arguments, and its other arguments."""
        ...


# -- which library an object belongs to -------------------------------------------------------


def _module_type(package: str) -> type | tuple[()]:
    """Return the `Module` class of flax.linen or flax.nnx, or () if it has not been imported."""
    loaded = sys.modules.get(package)
    return getattr(loaded, "Module", ()) if loaded is not None else ()


def is_linen(x: Any) -> bool:
    """Tell whether ``x`` is a Linen module."""
    return isinstance(x, _module_type("flax.linen"))


def is_linen_class(x: Any) -> bool:
    """Tell whether ``x`` is a Linen module class, or a partial of one."""
    x = x.func if isinstance(x, functools.partial) else x
    return isinstance(x, type) and issubclass(x, _module_type("flax.linen"))


def is_nnx(x: Any) -> bool:
    """Tell whether ``x`` is an NNX module, or another NNX object such as `nnx.Rngs`."""
    return isinstance(x, _nnx_types("Pytree", "Module"))


def holds_nnx(tree: Any) -> bool:
    """Tell whether a pytree contains an NNX object with state.

    Such objects are modules, `nnx.Rngs`, `nnx.Optimizer`, metrics (`nnx.Pytree`) and variables.
    """
    kinds = _nnx_types("Pytree", "Module", "Variable")
    if not kinds:
        return False
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return any(isinstance(x, kinds) for x in leaves)


def _nnx_types(*names: str) -> tuple[type, ...]:
    """Return the classes of flax.nnx with these names that exist, if it has been imported."""
    loaded = sys.modules.get("flax.nnx")
    members = (getattr(loaded, name, None) for name in names)
    return tuple(x for x in members if isinstance(x, type))


# -- whole steps of NNX -----------------------------------------------------------------------


def holds_state(tree: Any) -> bool:
    """Tell whether a pytree contains an NNX object that a step can change.

    Such objects are modules, optimizers, metrics, random streams and variables.
    """
    return any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


def is_state(x: Any) -> bool:
    """Tell whether ``x`` is an NNX object that may have state."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, (nnx.Pytree, nnx.Variable))


def arrays_of(tree: Any) -> Any:
    """Return a pytree with each NNX object replaced by its state, which contains no cycles."""

    def state(x: Any) -> Any:
        return sys.modules["flax.nnx"].split(x)[1] if is_state(x) else x

    return jax.tree.map(state, tree, is_leaf=is_state)


# The classes of the objects that `nnx.jit` returns, whose method `trace` returns a wrapper of a
# `jax.stages.Traced`; seen on flax 0.12.8 and 0.12.12.
_NNX_JITTED = ("JitWrapped", "SimpleJitWrapped", "SimpleJitPartialWrapped")


def is_nnx_jitted(fn: Any) -> bool:
    """Tell whether ``fn`` is a function that `nnx.jit` returned."""
    module = sys.modules.get("flax.nnx.transforms.compilation")
    kinds = tuple(getattr(module, name) for name in _NNX_JITTED if hasattr(module, name))
    return isinstance(fn, kinds)


def nnx_jit_around(frame: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Return the call of an `nnx.jit` function that a call of its `jax.jit` function belongs to.

    Args:
        frame: the Python frame of the call of the `jax.jit` function.

    Returns:
        The function, its arguments and its keyword arguments, as the user gave them; or None.
    """
    found = None
    while frame is not None:
        values = frame.f_locals if frame.f_code.co_filename.endswith("compilation.py") else {}
        if is_nnx_jitted(values.get("self")) and "args" in values:
            found = values["self"], tuple(values["args"]), dict(values.get("kwargs", {}))
        frame = frame.f_back
    return found


def nnx_gradient_around(frame: Any) -> tuple[Any, tuple[Any, ...], Any] | None:
    """Return the call of `nnx.grad` or `nnx.value_and_grad` that a call of JAX's belongs to.

    Args:
        frame: the Python frame of the call of JAX's gradient function.

    Returns:
        The loss, its arguments as the user gave them, and the positions of those that are
        differentiated; or None.
    """
    for _ in range(_MOST_FRAMES_BETWEEN):
        if frame is None:
            return None
        if frame.f_code.co_name == "grad_wrapper":
            values = frame.f_locals
            if {"f", "args", "jax_argnums"} <= set(values):
                return values["f"], tuple(values["args"]), values["jax_argnums"]
        frame = frame.f_back
    return None


_MOST_FRAMES_BETWEEN = 8


def jitted_of(fn: Any) -> Any:
    """Return the function of `jax.jit` inside of a function that `nnx.jit` returned."""
    return fn.jitted_fn


def trace_jitted(fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Trace a function that `nnx.jit` returned; the program also returns the changed state."""
    return fn.trace(*args, **kwargs).traced


def jitted_step(fn: Callable[..., Any], donate_argnums: Sequence[int]) -> Any:
    """Return ``nnx.jit(fn)``, for a step that changes the state of its arguments."""
    from flax import nnx

    return nnx.jit(fn, donate_argnums=tuple(donate_argnums))


def map_arrays(f: Callable[[Any], Any], tree: Any) -> Any:
    """Return a pytree with ``f`` applied to its arrays, also inside of copies of NNX objects."""
    if not holds_state(tree):
        return jax.tree.map(f, tree)
    from flax import nnx

    structure, state = nnx.split(tree)
    return nnx.merge(structure, jax.tree.map(f, state))


def functional(
    fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a step as a function of arrays, and its arguments.

    If NNX objects are among the arguments, the new function takes their state, and it returns the
    changed state beside the result.
    """
    if not holds_state(args):
        return fn, args
    from flax import nnx

    structure, state = nnx.split(args)

    def pure(state: Any) -> tuple[Any, Any]:
        objects = nnx.merge(structure, state)
        return fn(*objects), nnx.split(objects)[1]

    return pure, (state,)


# -- Linen ------------------------------------------------------------------------------------


@contextlib.contextmanager
def outside_of_modules() -> Iterator[None]:
    """In this context, a new Linen module has no parent, though a module is being called.

    The stack of called modules belongs to the thread; seen on flax 0.12.8 and 0.12.12.
    """
    context = getattr(sys.modules.get("flax.linen.module"), "_context", None)
    if context is None:
        yield
        return
    called, context.module_stack = context.module_stack, [None]
    try:
        yield
    finally:
        context.module_stack = called


def lift_linen(target: Any, regions: Regions, methods: Sequence[str] | None = None) -> Any:
    """Return a Linen class, or a function of a module, whose calls go through ``regions``.

    The class keeps its name, so parameters stay where they were (`nn.remat` renames an unnamed
    ``Block_0`` to ``CheckpointBlock_0``).
    """
    from flax.linen import transforms

    def remat_kit(fn: Callable[..., Any], signature_of: Any) -> Callable[..., Any]:
        return _lifted(fn, regions, signature_of)

    if not is_linen_class(target):
        return transforms.lift_transform(remat_kit, target, signature_of=target)
    cls = target.func if isinstance(target, functools.partial) else target
    chosen = {m: {"signature_of": getattr(cls, m)} for m in methods or ("__call__",)}
    lifted = transforms.lift_transform(remat_kit, target, methods=chosen)
    _keep_names(lifted, target)
    return lifted


def _lifted(fn: Callable[..., Any], regions: Regions, signature_of: Any) -> Callable[..., Any]:
    """Lift ``fn`` as `flax.core.lift.checkpoint` does, with ``regions`` for `jax.checkpoint`."""
    from flax.core import lift

    def inner(scope_fn: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any):
        # The scope takes the place of `self`, which has position 0, as for `nn.remat`.
        call, args, kwargs = regions.without_static(fn, args, kwargs, signature_of, skip=1)

        scopes = jax.tree.leaves(scope_fn(variables, rngs))
        counters = [_copied(scope.rng_counters) for scope in scopes]

        def pure(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            scope = scope_fn(variables, rngs)
            # All scopes that `scope_fn` returns share their counters. A second trace of the call
            # must draw the same random keys as the first trace.
            for one, before in zip(jax.tree.leaves(scope), counters, strict=True):
                _restore(one.rng_counters, before)
            out = call(scope, *args, **kwargs)
            return out, repack(scope)

        # Nobody differentiates `init`, and it often runs without `jit`. It is recognised by its
        # flag, since other calls such as `apply(..., mutable=True)` may create parameters too.
        initializing = any(scope.get_flag("initializing", False) for scope in scopes)
        call_pure = regions.untraced if initializing else regions.run
        return call_pure(pure, (variables, rngs, *args), kwargs)

    return lift.pack(inner, (True,), (True,), (True,), name="remat", enable_kwargs=True)


def _copied(counters: dict[Any, Any]) -> dict[Any, Any]:
    """Copy the counters of the random streams of a scope and of its children."""
    return {k: _copied(v) if isinstance(v, dict) else v for k, v in counters.items()}


def _restore(counters: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Reset counters in place, because equal scopes share one dictionary."""
    for key in counters.keys() - before.keys():
        del counters[key]
    for key, value in before.items():
        if isinstance(value, dict):
            _restore(counters[key], value)
        else:
            counters[key] = value


def _keep_names(lifted: Any, target: Any) -> None:
    if isinstance(target, functools.partial):
        lifted, target = lifted.func, target.func
    lifted.__name__ = target.__name__
    lifted.__qualname__ = target.__qualname__
    lifted.__module__ = target.__module__
    lifted.__doc__ = target.__doc__


def is_bound(module: Any) -> bool:
    """Tell whether a Linen module already has its variables, as inside ``nn.compact``."""
    return module.scope is not None


def bound_linen(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first Linen module among the arguments that has its variables, or None."""
    if _module_type("flax.linen") == ():
        return None
    leaves = jax.tree.leaves((args, kwargs))
    return next((x for x in leaves if is_linen(x) and is_bound(x)), None)


def call_linen(
    fn: Callable[..., Any],
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    regions: Regions,
) -> Any:
    """Call a function of bound Linen modules, ``module`` one of them, through ``regions``."""
    if args and args[0] is module:
        return lift_linen(fn, regions)(*args, **kwargs)

    # Flax lifts functions whose first argument is a module, and finds those in later ones.
    def with_module_first(module: Any, *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    functools.update_wrapper(with_module_first, fn)
    return lift_linen(with_module_first, regions)(module, *args, **kwargs)


def linen_like(module: Any, cls: Any) -> Any:
    """Return a module of class ``cls`` with the fields, name and parent of ``module``."""
    fields = {
        f.name: getattr(module, f.name)
        for f in dataclasses.fields(module)
        if f.init and f.name not in ("parent", "name")
    }
    return cls(**fields, name=module.name, parent=module.parent)


# -- NNX --------------------------------------------------------------------------------------


def run_nnx(
    run: Runner, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function of NNX objects through ``run``, which gets a function of arrays.

    Changes that the function makes in the objects (BatchNorm statistics, counters of random
    streams, new variables) are returned from the regions and written back, as by `nnx.remat`.
    Objects that were created outside of the running trace, such as a model that a jitted function
    closes over, can be read but not changed. Their values are constants here, whereas `nnx.remat`
    fails.
    """
    if not _can_be_changed((args, kwargs)):
        fn = _reading_only(fn)
        args, kwargs = _nnx_copies((args, kwargs))
    from flax.nnx.transforms.general import merge_inputs, split_inputs

    tag = "remat_kit"

    known = with_known_arguments(fn)

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return known(*args, **kwargs)

    pure = merge_inputs(call, ctxtag=tag)

    def regions(*pure_args: Any) -> Any:
        return run(pure, pure_args, {})

    return split_inputs(regions, ctxtag=tag)(args, kwargs)


def _is_nnx(x: Any) -> bool:
    return isinstance(x, _nnx_types("Pytree", "Module", "Variable"))


def _variables(tree: Any) -> list[Any]:
    """Return the variables of the NNX objects in a pytree, in the order of their paths."""
    from flax import nnx

    objects = [x for x in jax.tree.leaves(tree, is_leaf=_is_nnx) if _is_nnx(x)]
    return [x for _, x in nnx.iter_graph(objects) if isinstance(x, nnx.Variable)]


def _can_be_changed(tree: Any) -> bool:
    """Tell whether the variables in a pytree belong to the running trace.

    The attribute ``_can_update`` was seen on flax 0.12.8 and 0.12.12.
    """
    return all(getattr(x, "_can_update", True) for x in _variables(tree))


def _nnx_copies(tree: Any) -> Any:
    """Return a pytree with its NNX objects copied into the running trace."""
    from flax import nnx

    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_nnx)
    places = [i for i, x in enumerate(leaves) if _is_nnx(x)]
    copies = nnx.merge(*nnx.split([leaves[i] for i in places]), copy=True)
    for i, copy in zip(places, copies, strict=True):
        leaves[i] = copy
    return jax.tree.unflatten(structure, leaves)


def _reading_only(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` with a check that it does not change its NNX objects, which are copies."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = [(x, x.get_raw_value()) for x in _variables((args, kwargs))]
        out = fn(*args, **kwargs)
        after = _variables((args, kwargs))
        if [(id(x), id(value)) for x, value in before] != [
            (id(x), id(x.get_raw_value())) for x in after
        ]:
            raise PolicyError(
                f"`{getattr(fn, '__name__', 'the function')}` changes an NNX object that was made "
                "outside of the function that JAX is tracing, so the change would be lost",
                hint="pass the object as an argument through `nnx.jit`, `nnx.grad` or another "
                "transformation of NNX, which carries changes out",
            )
        return out

    return call


def opened_nnx(fn: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Split a bound method or a partial function into a function and its NNX objects.

    Returns the function, and the positional and keyword arguments that precede those of a caller.
    `nnx.remat` refuses bound methods, because a change of ``self`` would be lost.
    """
    if isinstance(fn, functools.partial) and holds_nnx((fn.args, fn.keywords, _self_of(fn.func))):
        inner, args, kwargs = opened_nnx(fn.func)
        return inner, (*args, *fn.args), {**kwargs, **fn.keywords}
    if isinstance(fn, types.MethodType) and holds_nnx(fn.__self__):
        return fn.__func__, (fn.__self__,), {}
    return fn, (), {}


def _self_of(fn: Any) -> Any:
    return fn.__self__ if isinstance(fn, types.MethodType) else None


# -- module paths of NNX ----------------------------------------------------------------------
# Linen opens a named scope for each call of a module, and NNX does not. During a trace of ours, the
# methods of every NNX class open a scope too. It is the path of the instance from the first module
# that was called. JAX's cached traces of jitted functions from outside contain no such scopes, so
# traces of ours use a cache of their own.


class _Scopes:
    """The modules of one trace: their paths by identity, and the path of the running module.

    Modules are not kept alive: one that was copied into an inner trace contains its tracers.
    """

    def __init__(self) -> None:
        self.paths: dict[int, tuple[str, ...]] = {}
        self.ends: dict[
            int, weakref.ref[Any]
        ] = {}  # each removes its module, whose id is free then
        self.known: dict[tuple[type, tuple[str, ...]], None] = {}  # classes and paths of all
        self.current: tuple[str, ...] = ()
        self.outside = list(_contexts())

    def enter(self, module: Any) -> tuple[str, ...]:
        """Return the path of a module whose method is called."""
        if id(module) not in self.paths:
            self._take(module, self._path_of_copy(module) or self._path_by_class(module))
        return self.paths[id(module)]

    def arguments(self, tree: Any) -> None:
        """Record the paths of the modules among the arguments of a function."""
        base = _module_type("flax.nnx")
        for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, base)):
            if isinstance(x, base) and id(x) not in self.paths:
                self._take(x, self._path_of_copy(x) or (*self.current, type(x).__name__))

    def _take(self, root: Any, base: tuple[str, ...]) -> None:
        from flax import nnx

        for path, module in nnx.iter_modules(root):
            if id(module) not in self.paths:
                self._record(module, (*base, *map(str, path)))

    def _record(self, module: Any, path: tuple[str, ...]) -> None:
        key = id(module)
        self.paths[key] = path
        self.known[type(module), path] = None

        def forget(_: Any) -> None:
            self.paths.pop(key, None)
            self.ends.pop(key, None)

        self.ends[key] = weakref.ref(module, forget)

    def _path_of_copy(self, module: Any) -> tuple[str, ...] | None:
        """Return the path of the module that an NNX transformation in this trace has copied."""
        for context in _contexts():
            if not any(context is c for c in self.outside):
                original = _original(context, module)
                if original is not None:
                    return self.enter(original)
        return None

    def _path_by_class(self, module: Any) -> tuple[str, ...]:
        """Return a path for a module of unknown origin, such as a copy by `nnx.merge`.

        If exactly one module of its class is below the caller, the module gets the path of that
        module. Otherwise its path consists of the path of the caller and the name of its class.
        """
        depth = len(self.current)
        kin = {
            path for cls, path in self.known if cls is type(module) and path[:depth] == self.current
        }
        return kin.pop() if len(kin) == 1 else (*self.current, type(module).__name__)


# `GraphContext` and `UpdateContext` of `flax.nnx.graphlib` are not documented API; they were seen
# on flax 0.12.8 and 0.12.12.


def _contexts() -> Iterator[Any]:
    """Yield the contexts of the NNX transformations that are running."""
    graphlib = sys.modules.get("flax.nnx.graphlib")
    known = getattr(graphlib, "GRAPH_CONTEXT", None)
    for stack in getattr(known, "update_context_stacks", {}).values():
        yield from stack


def _original(context: Any, copy: Any) -> Any:
    """Return the object of which ``copy`` is a copy, or None if it is not a copy.

    While a transformed function runs, the context of the transformation gives equal numbers to the
    objects that were passed in and to their copies.
    """
    numbers = getattr(context, "inner_ref_outer_index", None)
    objects = getattr(context, "outer_index_outer_ref", None)
    if numbers is None or objects is None or copy not in numbers:
        return None
    original = objects.get(numbers[copy])
    return None if original is copy else original


_scopes: contextvars.ContextVar[_Scopes | None] = contextvars.ContextVar("nnx_scopes", default=None)


_patched: list[tuple[type, str, Any]] = []


_users = 0


_lock = threading.Lock()


@contextlib.contextmanager
def nnx_scopes() -> Iterator[None]:
    """In this context, calls of NNX modules write their paths into the name stack."""
    base = _module_type("flax.nnx")
    if base == () or _scopes.get() is not None:
        yield
        return
    _patch(base)
    token = _scopes.set(_Scopes())
    try:
        with _jax.traces_of_their_own():
            yield
    finally:
        _scopes.reset(token)
        _unpatch()


def with_known_arguments(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` so that within `nnx_scopes` the modules among its arguments get paths."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        scopes = _scopes.get()
        if scopes is not None:
            scopes.arguments((args, kwargs))
        return fn(*args, **kwargs)

    return call


def scoped_method(fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """Return ``fn``, which opens the scope of its module if it is a method of an NNX module.

    >>> from flax import nnx
    >>> layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    >>> scoped_method(nnx.Linear.__call__, (layer,)) is nnx.Linear.__call__
    False
    >>> scoped_method(max, (layer,)) is max
    True
    """
    if not args or not isinstance(args[0], _module_type("flax.nnx")):
        return fn
    name = getattr(fn, "__name__", "")
    methods = (vars(cls).get(name) for cls in type(args[0]).__mro__)
    return _scoped(fn) if any(_wraps(method, fn) for method in methods) else fn


def _wraps(method: Any, fn: Any) -> bool:
    """Tell whether ``fn`` is ``method`` or a function that its decorators call."""
    while method is not None:
        if method is fn:
            return True
        method = getattr(method, "__wrapped__", None)
    return False


def _patch(base: Any) -> None:
    global _users
    with _lock:
        _users += 1
        done = {cls for cls, _, _ in _patched}
        for cls in _subclasses(base):
            for name, method in list(vars(cls).items()) if cls not in done else ():
                if inspect.isfunction(method) and (name == "__call__" or name[0] != "_"):
                    _patched.append((cls, name, method))
                    setattr(cls, name, _scoped(method))


def _unpatch() -> None:
    global _users
    with _lock:
        _users -= 1
        while _users == 0 and _patched:
            cls, name, original = _patched.pop()
            setattr(cls, name, original)


def _subclasses(cls: type) -> Iterator[type]:
    for sub in type.__subclasses__(cls):
        yield sub
        yield from _subclasses(sub)


def _scoped(original: Any) -> Any:
    """Return a method that opens the scope of its module; equal calls return the same object."""
    return _jax.shared(_make_scoped, original, None)


def _make_scoped(of: Any, _: None) -> Any:
    original = of()  # the method of a class: the wrapper takes its place and must keep it

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        scopes = _scopes.get()
        if scopes is None or not isinstance(self, _module_type("flax.nnx")):
            return original(self, *args, **kwargs)
        path, outer = scopes.enter(self), scopes.current
        if path == outer:  # another method of the same module, or `super().__call__`
            return original(self, *args, **kwargs)
        new = path[len(outer) :] if path[: len(outer)] == outer else path
        with contextlib.ExitStack() as stack:
            for part in new:
                stack.enter_context(jax.named_scope(part))
            scopes.current = path
            try:
                return original(self, *args, **kwargs)
            finally:
                scopes.current = outer

    return call
