"""What remat_kit knows of Haiku: how to carry its state in and out of a traced function.

Inside `hk.transform`, parameters, state and the random stream live in a frame that modules read
and write. The functions of `haiku._src.stateful` that `hk.remat` is made of are no documented API;
seen on dm-haiku 0.0.17. Haiku is looked at only once somebody has imported it.
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
    """Keep Haiku from opening the scope of the module for ``method``, which calls one that does."""
    import haiku as hk

    return hk.transparent(method)


def threaded(run: Runner) -> Runner:
    """Return ``run``, inside `hk.transform` with Haiku's state among arguments and results."""
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
            # A second trace of the call must number its modules as the first one did.
            counters.clear()
            counters.update(numbers)
            names.intersection_update(used)
            return fn(*args, **kwargs)

        def decorator(stateful_fn: Callable[..., Any]) -> Callable[..., Any]:
            return functools.wraps(stateful_fn)(lambda *a, **k: run(stateful_fn, a, k))

        return stateful.thread_hk_state_in_kwargs(decorator)(again)(*args, **kwargs)

    return with_state
