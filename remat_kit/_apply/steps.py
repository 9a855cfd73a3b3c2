"""How does a policy get to the losses inside a training step?

A step has differentiated its losses before a region around the step could do anything. So a
decorated step runs in a context in which each loss gets the policy at the moment at which the step
differentiates it (`_jax.catching`). The step itself runs as it is: its `jit` keeps its donation,
its static arguments and its shardings, and a step that was traced before is traced again.

It is not always known whether a function is a step. `StepCalls` finds out at the first call. If
the function is jitted with donated arguments, or by `nnx.jit` and gets an optimizer, or if the
policy is the plan of a step, it is called as a step. Any other function is traced, as it is for a
region around it, and the trace shows whether it takes a gradient and what it returns
(`void.is_step`). A step is then traced again, with regions around its losses, at its first call.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax

from remat_kit import _frames, _jax
from remat_kit._errors import PolicyError, unknown
from remat_kit._frameworks import flax as _flax
from remat_kit._frameworks import haiku as _haiku
from remat_kit._frameworks.arguments import Call
from remat_kit._policy import patterns as _patterns
from remat_kit._policy import schedule as _schedule
from remat_kit._policy.algebra import Policy
from remat_kit._policy.structural import Automatic
from remat_kit._program import paths as _paths
from remat_kit._program.steps import losses as _losses
from remat_kit._program.steps import taken as _taken
from remat_kit._program.steps.gradient import abstract


class Applied(Protocol):
    """A policy with its options, which runs functions of arrays in regions."""

    @property
    def call(self) -> str:
        """The call of `policy` as the user wrote it."""
        ...

    @property
    def step(self) -> bool | None:
        """Whether the user says that the decorated function is a step."""
        ...

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of arrays in the regions of the policy."""
        ...

    def with_policy(self, policy: Policy) -> Applied:
        """Return the same application of another policy."""
        ...


class StepCalls:
    """The calls of one decorated function, which may be a step.

    Attributes:
        fn: the function.
        known: whether the function is a step; None before the first call.
        seen: the names of the losses that were caught, and whether ``losses=`` matched them.
        plans: if the policy is `auto`, the plan for each call's shapes.
        planned: the calls with each of these plans.
    """

    def __init__(
        self, app: Applied, fn: Callable[..., Any], known: bool | None, losses: str | None
    ):
        self.app, self.fn, self.known, self.losses = app, fn, known, losses
        self.seen: dict[str, bool] = {}
        self.is_warned = False
        self.plans: dict[Any, Any] = {}
        self.planned: dict[Any, StepCalls] = {}

    # .. the losses

    def __call__(self, found: _jax.Differentiated) -> Callable[..., Any]:
        """Return a loss in the regions of the policy; `_jax.catching` calls this."""
        name = _losses.name_of(found)
        self.seen[name] = self.losses is None or matches(self.losses, name)
        if not self.seen[name]:
            return found.fun

        def run(*args: Any) -> Any:
            loss = _losses.LossOfArrays(found, args)
            with _taken.differentiated_later():
                outs = _haiku.threaded(self.app.run)(loss.function, tuple(loss.inputs), {})
            return loss.result(outs)

        return functools.wraps(found.fun, updated=())(run)

    # .. calls

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """In this context, the losses of a step that is traced get the policy."""
        with _jax.catching(self):
            yield
        self.check_losses()

    def is_step(self, args: Any) -> bool:
        """Tell whether the function is called as a step at once, without a trace of its own."""
        if self.known is False or _taken.being_differentiated():
            return False
        return self.known is True or is_jitted_step(self.fn, args)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function as a step."""
        runs_one_by_one = _jax.is_outside_of_traces() and not _is_jitted(self.fn)
        try:
            with self.catching():
                result = self.fn(*args, **kwargs)
        except PolicyError as error:
            if runs_one_by_one and _schedule.ANOTHER_PROGRAM in error.message:
                raise _should_be_jitted(error) from None
            raise
        if self.known is None:
            self.known = bool(self.seen)
        elif not self.seen and not self.is_warned:
            self.is_warned = True
            _frames.warn(
                f"`{self.app.call}`: the step takes no gradient, so the policy has no effect",
                "decorate the function that calls `jax.grad`, `jax.value_and_grad` or `nnx.grad`, "
                "or leave step=True out",
            )
        return result

    def automatic(
        self, auto: Automatic, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """Call the function with a plan for the shapes of this call, if it is a step.

        Returns whether it is one, and the result.
        """
        if self.known is False or _taken.being_differentiated():
            return False, None
        fn = functools.partial(self.fn, **kwargs) if kwargs else self.fn
        shapes, key = _shapes(args, kwargs)
        if key not in self.plans:
            self.plans[key] = _planner().plan_for_step(auto, fn, shapes, self.app.call)
        plan = self.plans[key]
        if plan is False:
            self.known = self.app.step
            return False, None
        if plan is None:
            return True, self.fn(*args, **kwargs)
        if plan not in self.planned:
            app = self.app.with_policy(plan)
            self.planned[plan] = StepCalls(app, self.fn, True, self.losses)
        return True, self.planned[plan].run(args, kwargs)

    def check_losses(self) -> None:
        """Raise if ``losses=`` matches none of the losses that the step differentiates."""
        if self.losses is not None and self.seen and not any(self.seen.values()):
            raise unknown("loss", self.losses, self.seen, call=self.app.call)


def planned_loss(auto: Automatic, app: Applied, call: Call, traced: _jax.Traced) -> Policy | None:
    """Return the plan of a loss that is about to be differentiated, or None if there is none."""
    closed, constants = traced.closed, len(traced.consts)
    differentiated = [_jax.is_differentiated(x) for x in call.arrays]
    if not any(differentiated):  # a `jit` hides the tangents
        differentiated = [True] * len(call.arrays)
    active = [False] * constants + differentiated
    first = closed.out_avals[0] if closed.out_avals else None
    if not _taken.is_real_scalar(first):
        raise PolicyError(
            f"`{app.call}`: `auto` plans a loss or a training step, and the result of this "
            "function is no scalar",
            hint="decorate the loss, or the step that takes its gradient",
        )
    loss = _losses.Loss(
        name=getattr(call.fn, "__name__", "loss"),
        source="",
        jaxpr=closed,
        constants=constants,
        active=tuple(
            a and _taken.is_inexact(v) for a, v in zip(active, closed.in_avals, strict=True)
        ),
        wanted=tuple(i == 0 for i in range(len(closed.out_avals))),
        names=tuple(f"args[{i}]" for i in range(len(closed.in_avals))),
        base=_paths.join_scopes(_jax.current_scopes()),
    )
    return _planner().plan_for_loss(auto, loss, app.call)


def _planner() -> Any:
    # The planner applies policies, so it imports this package, and not the other way round.
    return importlib.import_module("remat_kit._planner.auto")


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments with shapes in the place of arrays, and a key of them.

    The shapes have the shardings of the arrays.
    """

    def shape(leaf: Any) -> Any:
        return abstract((leaf,))[0] if isinstance(leaf, jax.Array) else leaf

    shapes, named = _flax.map_arrays(shape, (args, kwargs))
    leaves, tree = jax.tree.flatten(_flax.arrays_of((shapes, named)))
    return shapes, (tree, tuple(map(str, leaves)))


def matches(pattern: str, name: str) -> bool:
    """Tell whether a pattern matches the name of a loss, or its last component.

    >>> matches("*/critic_loss", "train_step/critic_loss"), matches("critic_*", "step/critic_loss")
    (True, True)
    """
    own = name.rpartition("/")[2]
    return any(_patterns.prefix_matching(pattern, n) == n for n in (name, own))


def _is_jitted(fn: Callable[..., Any]) -> bool:
    return _jax.is_jitted(fn) or _flax.is_nnx_jitted(fn)


def _should_be_jitted(error: PolicyError) -> PolicyError:
    return PolicyError(
        error.message,
        hint="jit the step, with jax.jit or nnx.jit: outside of jit it may run other operations "
        f"than the plan was made for, as Flax NNX does to update its counters. Or {error.hint}",
    )


def is_jitted_step(fn: Callable[..., Any], args: Any) -> bool:
    """Tell whether a function is jitted with donated arguments, or has those of an NNX step.

    Args:
        fn: the function.
        args: the arguments of a call.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    by_nnx = _flax.is_nnx_jitted(fn)
    jitted = _flax.jitted_of(fn) if by_nnx else fn
    if _jax.is_jitted(jitted) and _jax.donated_positions(jitted):
        return True
    return by_nnx and _losses.holds_optimizer(args)
