"""What remat_kit knows of Flax: how Linen lifts a function, how NNX makes one pure, who is who.

Flax is imported when a Flax object is first met. The lifting hooks of Linen that are used here
(`flax.linen.transforms.lift_transform`, `flax.core.lift.pack`) and in NNX
(`flax.nnx.transforms.general.split_inputs`) are no documented API; seen on flax 0.12.8 and 0.12.12.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

# runs (function, args, kwargs) as one or several checkpoint regions
Runner = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


# -- who is who -------------------------------------------------------------------------------


def _module_type(package: str) -> type | tuple[()]:
    """The `Module` class of flax.linen or flax.nnx, or () while nobody has imported it."""
    loaded = sys.modules.get(package)
    return getattr(loaded, "Module", ()) if loaded is not None else ()


def is_linen(x: Any) -> bool:
    """Tell whether ``x`` is a Linen module."""
    return isinstance(x, _module_type("flax.linen"))


def is_linen_class(x: Any) -> bool:
    """Tell whether ``x`` is a Linen module class, or a partial of one."""
    return _is_class_of(x, "flax.linen")


def is_nnx(x: Any) -> bool:
    """Tell whether ``x`` is an NNX module."""
    return isinstance(x, _module_type("flax.nnx"))


def is_nnx_class(x: Any) -> bool:
    """Tell whether ``x`` is an NNX module class."""
    return _is_class_of(x, "flax.nnx") and isinstance(x, type)


def _is_class_of(x: Any, package: str) -> bool:
    x = x.func if isinstance(x, functools.partial) else x
    base = _module_type(package)
    return isinstance(x, type) and base != () and issubclass(x, base)


def holds_nnx(tree: Any) -> bool:
    """Tell whether an NNX module is among the leaves of ``tree``, looking into plain pytrees."""
    base = _module_type("flax.nnx")
    if base == ():
        return False
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, base))
    return any(isinstance(x, base) for x in leaves)


# -- Linen ------------------------------------------------------------------------------------


def lift_linen(target: Any, run: Runner, methods: Sequence[str] | None = None) -> Any:
    """Return a Linen class, or a function of a module, whose calls go through ``run``.

    The class keeps its name, so parameters stay where they were (`nn.remat` renames an unnamed
    ``Block_0`` to ``CheckpointBlock_0``).
    """
    from flax.linen import transforms

    def remat_kit(fn: Callable[..., Any]) -> Callable[..., Any]:
        return _lifted(fn, run)

    lifted = (
        transforms.lift_transform(remat_kit, target, methods=methods)
        if methods
        else (transforms.lift_transform(remat_kit, target))
    )
    if is_linen_class(target):
        _keep_names(lifted, target)
    return lifted


def _lifted(fn: Callable[..., Any], run: Runner) -> Callable[..., Any]:
    """The pattern of `flax.core.lift.checkpoint`, with ``run`` in the place of `jax.checkpoint`."""
    from flax.core import lift

    def inner(scope_fn: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any):
        def pure(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            scope = scope_fn(variables, rngs)
            out = fn(scope, *args, **kwargs)
            return out, repack(scope)

        if _makes_parameters(scope_fn(variables, rngs)):
            return pure(variables, rngs, *args, **kwargs)
        return run(pure, (variables, rngs, *args), kwargs)

    return lift.pack(inner, (True,), (True,), (True,), name="remat_kit", enable_kwargs=True)


def _makes_parameters(scopes: Any) -> bool:
    """Whether this call initialises: nobody differentiates it, and `init` runs without `jit`."""
    return any(s.is_mutable_collection("params") for s in jax.tree.leaves(scopes))


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
    """Call a function of NNX modules through ``run``, which sees arrays alone.

    What the function changes in the modules (BatchNorm statistics, dropout counters, new
    variables) is carried out of the regions and written back, as `nnx.remat` does.
    """
    from flax.nnx.transforms.general import merge_inputs, split_inputs

    tag = "remat_kit"

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fn(*args, **kwargs)

    pure = merge_inputs(call, ctxtag=tag)

    def regions(*pure_args: Any) -> Any:
        return run(pure, pure_args, {})

    return split_inputs(regions, ctxtag=tag)(args, kwargs)


def nnx_subclass(cls: type, wrap: Callable[[Any], Any], methods: Sequence[str]) -> type:
    """Return a subclass whose ``methods`` are wrapped, under the name of the class itself."""
    body = {m: wrap(getattr(cls, m)) for m in methods}
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), body)


def nnx_like(module: Any, cls: type) -> Any:
    """Return a module of class ``cls`` that shares every variable with ``module``."""
    new = object.__new__(cls)
    vars(new).update(vars(module))
    return new


# -- module paths of NNX ----------------------------------------------------------------------
# Linen opens a named scope per module call; NNX does not. While a trace of ours runs, the
# `__call__` of every NNX class does so, by the path of the instance under the module that was
# called first.


@dataclasses.dataclass
class _Scopes:
    """The modules met in one trace: their paths by identity, and the one being called."""

    paths: dict[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    alive: list[Any] = dataclasses.field(default_factory=list)  # ids stay valid while these live
    current: tuple[str, ...] = ()

    def enter(self, module: Any) -> tuple[str, ...]:
        if id(module) not in self.paths:
            self._adopt(module)
        return self.paths[id(module)]

    def _adopt(self, root: Any) -> None:
        """Take in a module nobody knows: the first one, or one made inside a transformation.

        `nnx.scan` and its like call a copy of the module they were given; it gets the path of
        the one module of its class below the caller, where there is one.
        """
        from flax import nnx

        depth = len(self.current)
        kin = {
            self.paths[id(m)]
            for m in self.alive
            if type(m) is type(root) and self.paths[id(m)][:depth] == self.current
        }
        base = kin.pop() if len(kin) == 1 else (*self.current, type(root).__name__)
        for path, module in nnx.iter_modules(root):
            self.paths.setdefault(id(module), (*base, *map(str, path)))
            self.alive.append(module)


_scopes: contextvars.ContextVar[_Scopes | None] = contextvars.ContextVar("nnx_scopes", default=None)
_patched: dict[type, Any] = {}
_users = 0
_lock = threading.Lock()


@contextlib.contextmanager
def nnx_scopes() -> Iterator[None]:
    """While it is open, calls of NNX modules write their path into the name stack."""
    base = _module_type("flax.nnx")
    if base == () or _scopes.get() is not None:
        yield
        return
    _patch(base)
    token = _scopes.set(_Scopes())
    try:
        yield
    finally:
        _scopes.reset(token)
        _unpatch()


def _patch(base: Any) -> None:
    global _users
    with _lock:
        _users += 1
        for cls in _subclasses(base):
            if cls not in _patched and "__call__" in vars(cls):
                _patched[cls] = vars(cls)["__call__"]
                cls.__call__ = _scoped(_patched[cls])


def _unpatch() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            while _patched:
                cls, original = _patched.popitem()
                cls.__call__ = original


def _subclasses(cls: type) -> Iterator[type]:
    for sub in type.__subclasses__(cls):
        yield sub
        yield from _subclasses(sub)


def _scoped(original: Any) -> Any:
    if not inspect.isfunction(original):
        return original

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        scopes = _scopes.get()
        if scopes is None:
            return original(self, *args, **kwargs)
        path, outer = scopes.enter(self), scopes.current
        if path == outer:  # `super().__call__`
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
