"""A model with a variable batch size: how to build it, and how to compile it for one size."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from remat_kit._apply import decorate as _decorate
from remat_kit._chip import compile as _compile
from remat_kit._chip.compile import Compiled
from remat_kit._chip.target import Target
from remat_kit._compiled import hlo as _hlo
from remat_kit._compiled import peak as _peak
from remat_kit._compiled.collectives import collectives, link_times
from remat_kit._compiled.roofline import estimate
from remat_kit._errors import NotDifferentiableError, RematKitError, UserError
from remat_kit._inspect.tables import NO_POLICY
from remat_kit._planner import frontier as _frontier
from remat_kit._planner import plan as _plan
from remat_kit._policy.reading import as_policy
from remat_kit._program.builder import Builder, Loss
from remat_kit._program.steps import losses as _losses
from remat_kit._program.steps.gradient import Argnums
from remat_kit._units import format_bytes

Progress = Callable[[str], None]


# Policies that are made for each chip and batch size, and whether they may offload.
PLANS = {"plan": False, "plan+offload": True}


AT_MOST = 2**20


_FIRST = 8  # the first batch size to try if the builder has no default


# -- what is compiled -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Model:
    """A builder with all arguments fixed except the policy and the batch size.

    Attributes:
        builder: builds the loss.
        sizes: the other arguments of the builder.
        at: the module paths that policies are applied at; if None, the builder applies them.
        batch_name: the parameter of the builder for the batch size.
        argnums, donate_argnums, optimizer: as for `remat_kit.measure`.
        pieces: whether plans may run segments in pieces.
    """

    builder: Builder
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    at: str | None = None
    batch_name: str = "batch"
    argnums: Argnums = 0
    donate_argnums: int | Sequence[int] = ()
    optimizer: Any = None
    pieces: bool = False

    def check(self, policies: Sequence[Any], call: str) -> None:
        """Raise if the builder has no parameter for the batch size or for one of the policies."""
        if not self.builder.takes(self.batch_name):
            names = [name for name in _parameters(self.builder.function) if name != "policy"]
            raise UserError(
                f"`{call}`: the builder `{self.builder.address}` takes no {self.batch_name!r}, so "
                f"nothing says how large the batch is; it takes {', '.join(names) or 'nothing'}",
                hint="give it a parameter `batch`, or name the one that it has with "
                "`batch_name=` (--batch-name on the command line)",
            )
        if self.batch_name in self.sizes:
            raise UserError(
                f"`{call}`: {self.batch_name}={self.sizes[self.batch_name]!r} is given, and it is "
                "what is varied here",
                hint=f"leave {self.batch_name} out of the sizes",
            )
        given = [policy for policy in policies if not is_plan(policy)]
        if self.pieces and len(given) == len(policies):
            raise UserError(
                f"`{call}`: pieces=True (--pieces) is for plans, and there is none",
                hint="add the policy 'plan', or use the policy `pieces(n)`",
            )
        some = any(as_policy(policy, call=call) is not None for policy in given)
        if self.at is not None and not some:
            plans = ", for a plan says itself where its regions are" if policies else ""
            raise UserError(
                f"`{call}`: at={self.at!r} (--at) has no policy to apply at these modules{plans}",
                hint="name a policy, or leave it out",
            )
        if some and self.at is None and not self.builder.takes("policy"):
            raise UserError(
                f"`{call}`: the builder `{self.builder.address}` takes no policy",
                hint="say with `at=` (--at) where the policies go, for example '*/block_*', or "
                "give the builder a parameter `policy`",
            )

    def loss(self, policy: Any, batch: int, chip: Target | None = None) -> Loss:
        """Build the loss for a batch size with a policy, or with the plan of the least memory."""
        sizes = {**self.sizes, self.batch_name: batch}
        if is_plan(policy):
            fn, args = self.builder.build(sizes)
            with self.builder.explained((fn, args)):
                found = _frontier.frontier(
                    fn,
                    *args,
                    target=chip or "cpu",
                    argnums=self.argnums,
                    objective="balanced",
                    optimizer=self.optimizer,
                    offload=PLANS[policy],
                    pieces=self.pieces,
                )
            return _decorate.policy(found.policy(found.points[0]))(fn), args
        if policy is None or policy == NO_POLICY:
            return self.builder.build(sizes)
        if self.at is None:
            return self.builder.build(sizes, policy)
        fn, args = self.builder.build(sizes)
        return _decorate.policy(policy, at=self.at)(fn), args

    def compiled(self, loss: Loss, batch: int, chip: Target, call: str) -> Compiled:
        """Compile the gradient; return an answer also for a program that needs too much memory."""
        fn, args = loss
        try:
            return _compile.compile_program(
                fn,
                args,
                chip,
                argnums=self._argnums(fn, args, call),
                donate_argnums=self.donate_argnums,
                optimizer=self.optimizer,
                call=call,
                code=False,
            )
        except RematKitError:
            raise
        except Exception:
            with self.builder.explained(self.loss(None, batch)):
                raise

    def _argnums(self, fn: Callable[..., Any], args: Sequence[Any], call: str) -> Argnums:
        """Return the positions of the parameters, or None if the builder gives a step."""
        return _losses.argnums_of(
            fn, args, self.argnums, self.donate_argnums, self.optimizer, call=call
        )

    def planned(self, policy: str, batch: int, chip: Target) -> tuple[Loss, int]:
        """Build the loss with the fastest plan that fits, or else with that of the least memory.

        Returns:
            The loss, and the number of programs that were compiled for the plan.
        """
        fn, args = self.loss(None, batch)
        try:
            with self.builder.explained((fn, args)):
                plan = _plan.plan(
                    fn,
                    *args,
                    budget="fit",
                    target=chip,
                    argnums=self.argnums,
                    optimizer=self.optimizer,
                    offload=PLANS[policy],
                    pieces=self.pieces,
                )
        except NotDifferentiableError:
            raise
        except UserError:  # nothing fits
            return self.loss(policy, batch, chip), 0
        return (_decorate.policy(plan)(fn), args), plan.tried

    def first_batch(self) -> int:
        """Return the default batch size of the builder, or 8 if it has none."""
        given = _parameters(self.builder.function).get(self.batch_name)
        default = None if given is None else given.default
        if isinstance(default, int) and not isinstance(default, bool) and default > 0:
            return default
        return _FIRST


def is_plan(policy: Any) -> bool:
    return isinstance(policy, str) and policy in PLANS


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


class _Given(Builder):
    """A builder that was given as a function; its exceptions reach the caller unchanged."""

    @contextlib.contextmanager
    def explained(self, loss: Loss | None = None) -> Iterator[None]:
        del loss
        yield


def model_of(build: Any, call: str, **rest: Any) -> Model:
    if not callable(build):
        raise UserError(
            f"`{call}`: {build!r} is no builder",
            hint="give a function that is called as `build(batch=8)` and returns "
            "`(loss_fn, args)`; `functools.partial` gives it other sizes",
        )
    name = getattr(inspect.unwrap(_inner(build)), "__name__", type(build).__name__)
    return Model(_Given(name, build, pathlib.Path.cwd()), **rest)


def _inner(build: Any) -> Any:
    while isinstance(build, functools.partial):
        build = build.func
    return build


def step_seconds_of(compiled: Compiled, chip: Target) -> float | None:
    """Return the roofline time of a compiled step; None if the compiler gave no program."""
    if compiled.hlo_text is None:
        return None
    program = _hlo.parse(compiled.hlo_text)
    chip, origins = compiled.chip, _peak.origins(program)
    found = collectives(program, origins, chip, compiled.meshes)
    return estimate(program, chip, origins, chip_name=chip.name, **link_times(found)).seconds


def bytes_or_unknown(size: float | None) -> str:
    return "?" if size is None else format_bytes(size)


def same_program(model: Model, one: int, other: int, call: str) -> UserError:
    name = model.batch_name
    return UserError(
        f"`{call}`: {name}={one} and {name}={other} give the same program, so {name!r} is not the "
        "size of the batch",
        hint="name the builder's parameter that is with `batch_name=` (--batch-name on the command "
        "line)",
    )
