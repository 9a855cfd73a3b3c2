"""How does the state of Haiku get into a traced function and out of it?

Inside `hk.transform`, the parameters, the state and the random stream are stored in a frame that
modules read and write. This module uses the functions of `haiku._src.stateful` on which `hk.remat`
is built. They are not documented API, and were seen on dm-haiku 0.0.17. Haiku is never imported
here, only used if it has been imported.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

# runs (function, args, kwargs) as one or several checkpoint regions
Runner = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def is_module_class(x: Any) -> bool:
    """Tell whether ``x`` is a class of Haiku modules."""
    return isinstance(x, type) and issubclass(x, _modules())


def is_module(x: Any) -> bool:
    """Tell whether ``x`` is a Haiku module."""
    return isinstance(x, _modules())


def _modules() -> tuple[type, ...]:
    loaded = sys.modules.get("haiku")
    return () if loaded is None else (loaded.Module,)


def transparent(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``method`` without a scope of its own, because the method that it calls opens one."""
    import haiku as hk

    return hk.transparent(method)


def threaded(run: Runner) -> Runner:
    """Return ``run``, which inside `hk.transform` also takes and returns the state of Haiku."""
    if "haiku" not in sys.modules:
        return run
    base = importlib.import_module("haiku._src.base")
    if not base.inside_transform():
        return run
    stateful = importlib.import_module("haiku._src.stateful")
    if sys.modules["haiku"].running_init():  # nobody differentiates `init`
        return lambda fn, args, kwargs: fn(*args, **kwargs)

    def with_state(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame = base.current_frame()
        counters, names = frame.counter_stack.peek(), frame.used_names_stack.peek()
        numbers, used = dict(counters), set(names)

        @functools.wraps(fn)
        def again(*args: Any, **kwargs: Any) -> Any:
            # A second trace of the call must give its modules the same numbers as the first trace.
            counters.clear()
            counters.update(numbers)
            names.intersection_update(used)
            return fn(*args, **kwargs)

        def decorator(stateful_fn: Callable[..., Any]) -> Callable[..., Any]:
            return functools.wraps(stateful_fn)(lambda *a, **k: run(stateful_fn, a, k))

        return stateful.thread_hk_state_in_kwargs(decorator)(again)(*args, **kwargs)

    return with_state
