"""What is the training step of a script, found without running the step?

While the script runs, `_jax.catching` hands over each function that the script is about to
differentiate. At this moment JAX is tracing the outermost jitted function, and nothing of it has
run. The step is this function, with the arguments of its call. If the gradient is not taken in a
jitted function, the step is the loss alone. The script is then stopped by an exception.

Gradients of fewer than 64 numbers do not count: they test a function or fit a constant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

from remat_kit import _frames, _jax
from remat_kit._doctor.script import Script, running
from remat_kit._errors import BuildError, RematKitError, RematKitWarning, UserError, unknown
from remat_kit._frameworks import flax as _flax
from remat_kit._program import paths as _paths

_FEWEST_NUMBERS = 64


@dataclasses.dataclass(frozen=True, eq=False)
class FoundStep:
    """A training step, with the arguments of its first call.

    Attributes:
        fn: the step as the user runs it, jitted or not; or a loss.
        args: its arguments. Keyword arguments are bound to ``fn``.
        argnums: as for `measure`: None for a step, and for a loss what is differentiated.
        name: the name of the user's function.
        source: its file and line.
        jitted: whether the step is a jitted function.
        is_own: whether the function is the user's and not one of a library.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    argnums: Any
    name: str
    source: str
    jitted: bool = True
    is_own: bool = True


class StepReached(SystemExit):
    """Stops a script whose step is about to run.

    It is a `SystemExit`, which frameworks pass on silently and which ends a thread silently.
    """


def find_step(script: Script, name: str | None, call: str) -> FoundStep:
    """Run a script until its step is about to run for the first time, and return the step.

    What the script prints goes to standard error.

    Args:
        script: the script.
        name: a pattern of the name of the step; by default the first step counts.
        call: the command, which errors quote.

    Raises:
        BuildError: the script does not exist, raises an exception, or ends before a step.
        UnknownNameError: no step has this name.
    """
    script.check(call)
    met = _Catcher(name)
    ended = ""
    with (
        running(script) as run,
        contextlib.redirect_stdout(sys.stderr),
        _jax.catching(met),
        _no_ignored_settings(),
    ):
        try:
            run()
        except StepReached:
            pass
        except SystemExit as error:
            ended = f", with exit status {0 if error.code is None else error.code},"
        except KeyboardInterrupt:
            raise
        except RematKitError:
            raise
        except BaseException as error:
            if met.found is None:
                raise _explained(error, script, call) from error
    if met.failed is not None:
        raise met.failed
    if met.found is not None:
        return met.found
    if name is not None and met.names:
        raise unknown("step", name, met.names, call=call)
    if met.small:
        small = " and ".join(dict.fromkeys(met.small))
        raise BuildError(
            f"`{call}`: the script ended{ended} before any step, and its only gradients are of "
            f"fewer than {_FEWEST_NUMBERS} numbers ({small})",
            hint="name one of them with --step",
        )
    raise BuildError(
        f"`{call}`: the script ended{ended or ''} before it took a gradient in its main thread",
        hint="give the script the arguments with which it trains, after its name; a step is a "
        "function that calls `jax.grad`, `jax.value_and_grad`, `jax.vjp` or `nnx.grad`",
    )


@contextlib.contextmanager
def _no_ignored_settings() -> Iterator[None]:
    """Warn of settings in the script that come too late, because JAX is imported already."""
    before = _jax_settings()
    yield
    changed = sorted(k for k, v in _jax_settings().items() if before.get(k) != v)
    if changed:
        warnings.warn(
            f"the script sets {', '.join(changed)} in `os.environ`, which JAX has read before\n"
            "hint: set it in the shell, before the command",
            RematKitWarning,
            stacklevel=2,
        )


def _jax_settings() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k.startswith("JAX_")}


def _explained(error: BaseException, script: Script, call: str) -> BuildError:
    shown = f"{type(error).__name__}: {str(error).strip() or 'without a message'}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not _frames.is_installed_file(f.filename) and "<" not in f.filename]
    if isinstance(error, SyntaxError) and error.filename:
        shown = f"{type(error).__name__}: {error.msg}"
        where = f" ({_paths.short_path(error.filename)}:{error.lineno})"
    else:
        where = f" ({_paths.short_path(own[-1].filename)}:{own[-1].lineno})" if own else ""
    python = f"python {script}"
    return BuildError(
        f"`{call}`: the script raised {shown.splitlines()[0]}{where}",
        hint=f"`{python}` shows the same error; --debug shows the whole traceback",
    )


# -- catching it ----------------------------------------------------------------------------------


class _Catcher:
    """Stops the script at its step; `_jax.catching` calls it for each gradient."""

    def __init__(self, name: str | None):
        self.name = name
        self.found: FoundStep | None = None
        self.failed: UserError | None = None
        self.names: dict[str, None] = {}
        self.small: list[str] = []

    def __call__(self, caught: _jax.Differentiated) -> Callable[..., Any]:
        gradient, jit = _jax.innermost_gradient(), _jax.outermost_jit()
        given = [c for c in (gradient, jit) if c is not None]
        step = self._step(caught, gradient, jit)
        self.names[step.name] = None
        if self.name is not None:
            if not _matches(self.name, step.name):
                return caught.fun
        elif max((_numbers(c) for c in given), default=0) < _FEWEST_NUMBERS:
            self.small.append(step.name)
            return caught.fun
        try:
            args = tuple(jax.tree.map(_as_given, a, is_leaf=_flax.is_state) for a in step.args)
        except UserError as error:
            self.failed = error
            raise StepReached from None
        self.found = dataclasses.replace(step, args=args)
        raise StepReached

    def _step(
        self,
        caught: _jax.Differentiated,
        gradient: _jax.CallBeingTraced | None,
        jit: _jax.CallBeingTraced | None,
    ) -> FoundStep:
        if jit is not None:
            around = _flax.nnx_jit_around(jit.frame)
            fn, args, kwargs = around or (jit.fn, jit.args, jit.kwargs)
            return _of_code(step_named(fn, args, None, kwargs), _first_code(caught, jit.frame))
        assert gradient is not None
        inside = _flax.nnx_gradient_around(gradient.frame)
        if inside is not None:
            fn, args, argnums = inside
            return dataclasses.replace(step_named(fn, args, argnums), jitted=False)
        found = step_named(gradient.fn, gradient.args, gradient.argnums, gradient.kwargs)
        return dataclasses.replace(found, jitted=False)


def _first_code(caught: _jax.Differentiated, frame: Any) -> Any:
    """Return the code of the user's outermost function that a jitted function runs, or None."""
    around = set()
    while frame is not None:
        around.add(frame.f_code)
        frame = frame.f_back
    inside = [code for code, _ in caught.frames if code not in around]
    return next((c for c in reversed(inside) if _is_users(c)), None)


def _is_users(code: Any) -> bool:
    return code is not None and not _frames.is_installed_file(code.co_filename)


def _of_code(step: FoundStep, code: Any) -> FoundStep:
    """Name a step after the user's function, where a library has wrapped it before the jit."""
    if step.is_own or code is None:
        return step
    name = code.co_qualname.rpartition("<locals>.")[2]
    return dataclasses.replace(step, name=name, source=_place(code), is_own=True)


def _place(code: Any) -> str:
    return f"{_paths.short_path(code.co_filename)}:{code.co_firstlineno}"


def step_named(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    argnums: Any,
    kwargs: dict[str, Any] | None = None,
) -> FoundStep:
    """Return a step or a loss with the name and the source of the user's function inside of it."""
    inner = _jax.function_inside(fn, _frames.is_installed_file)
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__qualname__", None) or getattr(fn, "__name__", type(fn).__name__)
    return FoundStep(
        fn=functools.partial(fn, **kwargs) if kwargs else fn,
        args=args,
        argnums=argnums,
        name=name.rpartition("<locals>.")[2],
        source="" if code is None else _place(code),
        is_own=_is_users(code),
    )


def _matches(pattern: str, name: str) -> bool:
    own = (name, name.rpartition(".")[2])
    return any(fnmatch.fnmatchcase(n, pattern) for n in own)


def _numbers(call: _jax.CallBeingTraced) -> int:
    leaves = jax.tree.leaves((call.args, call.kwargs))
    return sum(int(getattr(x, "size", 1)) for x in leaves if hasattr(x, "dtype"))


def _as_given(leaf: Any) -> Any:
    """Return an argument, or its shape if the call is inside of a loop that is being traced."""
    if not isinstance(leaf, _jax.Tracer):
        return leaf
    if not _jax.is_traced_by_jit(leaf):
        raise UserError(
            "`remat-kit doctor`: the step is called inside of `jax.vmap` or of a derivative",
            hint="jit the whole step, or give it to `remat_kit.doctor`",
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
