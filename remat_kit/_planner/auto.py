"""How does a program get its plan at its first call?

`remat_kit.auto` is a policy without a decision. When a program that has it is called, this module
plans for the shapes of the call: a step as `remat_kit.plan` plans a step, and a loss at the moment
at which it is differentiated. The plan is stored on disk under everything that it depends on: the
program, the chip, the versions of the compilers and the options of `auto`. The next start of the
same program finds it there.

Example: a step is called with a batch of 32, then with one of 64. The first call plans and stores a
plan, the second call plans again, because the program has other shapes, and a later call with 32
finds the first plan.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec

from remat_kit import _files, _frames, _jax
from remat_kit._apply.decorate import policy as apply
from remat_kit._chip.cache import default_cache, key_of
from remat_kit._chip.target import Target
from remat_kit._chip.target import target as find_target
from remat_kit._errors import PolicyError, RematKitError, UnknownNameError
from remat_kit._planner.costs import build as _build
from remat_kit._planner.frontier import Surroundings, check_options, frontier_of
from remat_kit._planner.plan import Plan, answered
from remat_kit._planner.schedules import proposals as _proposals
from remat_kit._planner.search import Search, parsed_budget
from remat_kit._planner.steps import frontier_of_step
from remat_kit._policy import recipe as _recipe
from remat_kit._policy import schedule as _schedule
from remat_kit._policy.structural import Automatic, Planned
from remat_kit._program import ops as _ops
from remat_kit._program.steps.gradient import check_program
from remat_kit._program.steps.losses import Loss, step_of

_COMPILES = 5  # as for `remat_kit.plan`


# How long the other processes wait for the plan of the first one.
_PATIENCE_SECONDS = 3600.0


_NO_PLAN = "none"


_numbers = itertools.count()  # of the plans of this process; the same in every process


def plan_for_step(
    auto: Automatic, fn: Callable[..., Any], args: Sequence[Any], call: str
) -> Planned | bool | None:
    """Return the plan of a step, None if there is none, or False if the function is no step.

    Args:
        auto: the policy.
        fn, args: the step, and the shapes of its arguments with their shardings.
        call: the call of `policy` as the user wrote it.
    """
    budget = parsed_budget(auto.budget, where=f"auto({auto.budget!r})")
    with _jax.outside_of_traces():
        step = step_of(fn, args, call="auto")
        if step is None or not step.losses:
            return False

        def make(chip: Target) -> Plan:
            check_options(auto.objective, False, chip, "auto")
            front = frontier_of_step(
                *(step, fn, args, chip, auto.objective, False, _proposals.silent, "auto"),
                pieces=auto.pieces,
            )
            search = Search(
                *(fn, args, None, chip, front, _COMPILES, _proposals.silent), run_local=False
            )
            return answered(search, search.run(budget))

        traced = step.program.traced
        text = f"{traced.jaxpr} {step.program.values_donated}{_partition_of(traced)}"
        return _planned(auto, step.losses, text, make, call)


def _partition_of(traced: Any) -> str:
    """Return the shardings of a step as text, "" on one device; its jit may give some of them."""
    if jax.device_count() == 1:
        return ""
    parts = _jax.partitioned(traced.lower())
    split = [
        (x.mesh.shape_tuple, x.spec)
        for _, x in (*parts.arguments, *parts.results)
        if isinstance(x, jax.sharding.NamedSharding)
    ]
    return f" {split}" if split else ""


def plan_for_loss(auto: Automatic, loss: Loss, call: str) -> Planned | None:
    """Return the plan of a loss that is about to be differentiated, or None if there is none.

    Args:
        auto: the policy.
        loss: the loss as a program; its differentiated result comes first.
        call: the call of `policy` as the user wrote it.
    """
    budget = parsed_budget(auto.budget, where=f"auto({auto.budget!r})")
    consts, arrays = loss.inputs[: loss.constants], loss.inputs[loss.constants :]

    def value(consts: Sequence[Any], *arrays: Any) -> tuple[Any, list[Any]]:
        first, *rest = jec.jaxpr_as_fun(loss.jaxpr)(*consts, *arrays)
        return first, rest

    def decorated(plan: Planned) -> Callable[..., Any]:
        def run(consts: Sequence[Any], *arrays: Any) -> Any:
            # The loss is closed over the same values as in the user's program.
            return apply(plan, step=False)(lambda *arrays: value(consts, *arrays))(*arrays)

        return run

    def make(chip: Target) -> Plan:
        check_options(auto.objective, False, chip, "auto")
        check_program(loss.jaxpr, "auto")
        graph = _build.of_loss(loss, chip)
        chosen = [i for i in loss.argnums if i >= loss.constants]
        given = sum(map(_ops.nbytes, loss.inputs))
        made = sum(_ops.nbytes(loss.inputs[i]) for i in chosen)
        made += sum(map(_ops.nbytes, loss.jaxpr.out_avals))
        around = Surroundings(given, made)
        front = frontier_of(
            *(graph, around, chip, auto.objective, False, _proposals.silent, 0.0, "auto"),
            pieces=auto.pieces,
        )
        argnums = tuple(1 + i - loss.constants for i in chosen)
        search = Search(
            *(value, (consts, *arrays), argnums, chip, front, _COMPILES, _proposals.silent),
            decorated=decorated,
            run_local=False,
        )
        return answered(search, search.run(budget))

    with _jax.outside_of_traces():
        return _planned(auto, (loss,), str(loss.jaxpr), make, call)


# -- plans that are remembered --------------------------------------------------------------------


def _planned(
    auto: Automatic,
    losses: Sequence[Loss],
    program: str,
    make: Callable[[Target], Plan],
    call: str,
) -> Planned | None:
    """Return the plan of a file, of the cache or of the first process, or make one."""

    def text() -> str:
        try:
            return _found_or_made(auto, losses, program, make)
        except Exception as error:
            if auto.strict and jax.process_count() == 1:
                raise
            reason = error.message if isinstance(error, RematKitError) else repr(error)
            return f"{_NO_PLAN}: {reason}"

    found = _jax.shared_text(f"auto {next(_numbers)}", text, _PATIENCE_SECONDS)
    if found.startswith(_NO_PLAN):
        return _without_plan(auto, found.removeprefix(f"{_NO_PLAN}: "), call)
    policy = _recipe.parse(found)
    assert isinstance(policy, Planned)
    return policy


def _without_plan(auto: Automatic, reason: str, call: str) -> None:
    """Warn that a program runs without a plan, or raise if the user asked for that."""
    message = f"`{call}`: no plan was found, so the program runs as it is: {reason}"
    hint = "call `remat_kit.plan` with the function and its arguments to see more"
    if auto.strict:
        raise PolicyError(message, hint=hint)
    _frames.warn(message, hint)


def _found_or_made(
    auto: Automatic, losses: Sequence[Loss], program: str, make: Callable[[Target], Plan]
) -> str:
    chip = find_target(auto.target)
    programs = {_schedule.describe(loss.flat()) for loss in losses}
    if auto.path is not None and (known := _of_file(auto.path, programs)) is not None:
        return repr(known)
    # Two runs of a program print the addresses of functions differently.
    identity = re.sub(r" at 0x[0-9a-f]+", "", program)
    options = [
        parsed_budget(auto.budget),
        auto.objective,
        chip.name,
        chip.memory_bytes,
        chip.description,
        *(["pieces"] if auto.pieces else []),
    ]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    cache, key = default_cache(), key_of("auto 3", identity, json.dumps([options, versions]))
    stored = cache.get(key) if cache is not None else None
    recipe = None if stored is None else _of_text(stored, programs)
    said = "from the cache: " if recipe is not None else ""
    if recipe is None:
        plan = make(chip)
        recipe = _recipe.Recipe(
            "plan",
            repr(plan.policy),
            description=str(plan).splitlines()[0],
            origin="remat_kit.auto",
        )
        if cache is not None:
            cache.put(key, _recipe.dumps(recipe).encode())
    if auto.path is not None:
        _files.write_whole(auto.path, _recipe.dumps(recipe))
    names = ", ".join(loss.name for loss in losses)
    print(f"remat_kit.auto: planned {names}: {said}{recipe.description}", file=sys.stderr)
    return repr(recipe.policy)


def _of_file(path: str, programs: set[str]) -> Planned | None:
    try:
        policy = _recipe.load(path).policy
    except (UnknownNameError, PolicyError):
        return None
    return policy if isinstance(policy, Planned) and _fits(policy, programs) else None


def _of_text(stored: bytes, programs: set[str]) -> _recipe.Recipe | None:
    try:
        recipe = _recipe.loads(stored.decode(), name="plan")
        policy = recipe.policy
    except (UnicodeDecodeError, RematKitError):
        return None
    return recipe if isinstance(policy, Planned) and _fits(policy, programs) else None


def _fits(plan: Planned, programs: set[str]) -> bool:
    return {one.program for one in plan.losses()} == programs
