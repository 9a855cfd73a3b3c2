"""How does an unedited script run with a plan around the losses that the plan was made for?"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from remat_kit import _frames, _jax
from remat_kit._apply import decorate as _decorate
from remat_kit._apply.steps import StepCalls
from remat_kit._errors import PolicyError
from remat_kit._frameworks import arguments as _arguments
from remat_kit._frameworks import flax as _flax
from remat_kit._frameworks import haiku as _haiku
from remat_kit._policy.structural import Planned
from remat_kit._program.steps import losses as _losses
from remat_kit._program.steps import taken as _taken
from remat_kit._program.steps import traced as _traced


class LossesOfScript:
    """Puts a policy around the losses of a script; `_jax.catching` calls it for each of them.

    A loss whose program is not one of those that a plan was made for runs as it is.

    Attributes:
        matched: the names of the losses that got the policy.
        others: the names of the losses that a plan does not fit.
    """

    def __init__(self, what: Any, at: str | None = None):
        decorated = _decorate.policy(what, at=at)(lambda: None)
        self.steps: StepCalls = getattr(decorated, _traced.STEP)
        self.is_plan = isinstance(self.steps.app.policy, Planned)  # type: ignore[attr-defined]
        self.matched: dict[str, None] = {}
        self.others: dict[str, None] = {}

    def __call__(self, found: _jax.Differentiated) -> Callable[..., Any]:
        """Return a loss in the regions of the policy."""
        return functools.wraps(found.fun, updated=())(functools.partial(self._run, found))

    def _run(self, found: _jax.Differentiated, *args: Any) -> Any:
        name = _losses.name_of(found)
        loss = _losses.LossOfArrays(found, args)
        inputs = tuple(loss.inputs)
        with _taken.differentiated_later():
            try:
                outs = _haiku.threaded(self.steps.app.run)(loss.function, inputs, {})
            except PolicyError:
                if not self.is_plan:
                    raise
            else:
                self.matched[name] = None
                return loss.result(outs)
        self.others[name] = None
        # JAX finds the trace of the function in its cache; NNX lets a loss be called only once.
        call = _arguments.Call(loss.function, inputs, {})
        with _flax.nnx_scopes(), _taken.differentiated_later():
            traced = call.trace()
        return loss.result(call.evaluated(traced))


@contextlib.contextmanager
def applied(what: Any, at: str | None, call: str) -> Iterator[None]:
    """In this context, the losses of a script that fit a plan run with it.

    Warns:
        RematKitWarning: at the end, if no loss of the script fits the plan.
    """
    losses = LossesOfScript(what, at)
    with _jax.catching(losses):
        yield
    if losses.matched:
        return
    if losses.others:
        names = ", ".join(losses.others)
        _frames.warn(
            f"`{call}`: the plan had no effect: it was made for another program than {names}",
            "plan again for this script and these arguments: remat-kit doctor SCRIPT --save PATH",
        )
    else:
        _frames.warn(
            f"`{call}`: the policy had no effect, because the script took no gradient",
            "give the script the arguments with which it trains, after its name",
        )
