"""Run a scan again, in one or several loops, with regions in its body or around its iterations.

JAX runs all iterations of a scan alike. A policy or a plan may treat some of them in another way:
it may put a region into the body of each, or make one region of every few iterations. `run` splits
the iterations of a scan into `Part`s, runs one loop for each part, and joins the results.

Example: a scan of six iterations whose first four run in two groups, each of them one region:

>>> import jax, jax.numpy as jnp
>>> def region(fn, args):
...     return jax.checkpoint(lambda *args: fn(args))(*args)
>>> def body(args):  # the carry and the slices of one iteration
...     total, x = args
...     return [total + x, total * x]
>>> xs = jnp.arange(6.0)
>>> step = lambda total, x: tuple(body((total, x)))
>>> (eqn,) = jax.make_jaxpr(lambda xs: jax.lax.scan(step, 0.0, xs))(xs).eqns
>>> parts = [Part(4, body, group=2, region=region), Part(2, body)]
>>> [x.tolist() for x in run(eqn, [0.0, xs], parts)]
[15.0, [0.0, 0.0, 2.0, 9.0, 24.0, 50.0]]
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from remat_kit import _jax

# Evaluates one iteration on its constants, its carry and its slices of the inputs, in one list. It
# returns the new carry and the outputs, in one list.
Body = Callable[[Sequence[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive iterations of a scan that run alike.

    Attributes:
        times: the number of iterations.
        body: evaluates one iteration.
        group: the number of iterations in each region. The last region may have fewer.
        region: evaluates a function on flat arguments as one region; None if there are no groups.
    """

    times: int
    body: Body
    group: int = 1
    region: Callable[[Body, Sequence[Any]], list[Any]] | None = None


def run(eqn: Any, values: Sequence[Any], parts: Sequence[Part], *, unroll: int = 1) -> list[Any]:
    """Evaluate the equation of a scan part by part.

    Args:
        eqn: the equation.
        values: one value or tracer for each of its inputs.
        parts: the parts, from the first iteration to the last.
        unroll: the number of iterations that each step of a loop runs, as for `jax.lax.scan`.

    Returns:
        One value for each output of the equation.
    """
    consts, carried = _jax.scan_arity(eqn)
    given, carry = values[:consts], tuple(values[consts : consts + carried])
    xs = tuple(values[consts + carried :])
    if eqn.params["reverse"]:
        xs = tuple(jnp.flip(x, 0) for x in xs)
    stacked, done = [], 0
    for part in parts:
        some = tuple(x[done : done + part.times] for x in xs) if len(parts) > 1 else xs
        carry, ys = _Loop(part, given, unroll).run(carry, some)
        stacked.append(ys)
        done += part.times
    ys = [y[0] if len(y) == 1 else jnp.concatenate(y) for y in zip(*stacked, strict=True)]
    if eqn.params["reverse"]:
        ys = [jnp.flip(y, 0) for y in ys]
    return [*carry, *ys]


_Values = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Loop:
    """Runs one part of a scan, with ``consts`` as the constants of its body."""

    part: Part
    consts: Sequence[Any]
    unroll: int

    def run(self, carry: _Values, xs: _Values) -> tuple[_Values, _Values]:
        """Return the last carry and the stacked outputs."""
        if self.part.region is None:
            return self.iterations(self.consts, carry, xs, self.part.times)
        size = self.part.group
        groups, rest = divmod(self.part.times, size)
        done = groups * size
        head = tuple(x[:done].reshape(groups, size, *x.shape[1:]) for x in xs)

        def step(carry: _Values, xs: _Values) -> tuple[_Values, _Values]:
            return self.as_region(carry, xs, size)

        carry, ys = jax.lax.scan(step, carry, head, length=groups)
        ys = tuple(y.reshape(done, *y.shape[2:]) for y in ys)
        if rest:
            carry, tail = self.as_region(carry, tuple(x[done:] for x in xs), rest)
            ys = tuple(jnp.concatenate(pair) for pair in zip(ys, tail, strict=True))
        return carry, ys

    def as_region(self, carry: _Values, xs: _Values, length: int) -> tuple[_Values, _Values]:
        """Run iterations as one region, which the constants enter as well."""
        consts, carried = len(self.consts), len(carry)

        def group(args: Sequence[Any]) -> list[Any]:
            entering = tuple(args[consts : consts + carried])
            rest = tuple(args[consts + carried :])
            last, ys = self.iterations(args[:consts], entering, rest, length)
            return [*last, *ys]

        assert self.part.region is not None
        outs = self.part.region(group, [*self.consts, *carry, *xs])
        return tuple(outs[:carried]), tuple(outs[carried:])

    def iterations(
        self, consts: Sequence[Any], carry: _Values, xs: _Values, length: int
    ) -> tuple[_Values, _Values]:
        def step(carry: _Values, x: _Values) -> tuple[_Values, _Values]:
            outs = self.part.body([*consts, *carry, *x])
            return tuple(outs[: len(carry)]), tuple(outs[len(carry) :])

        unroll = max(1, min(self.unroll, length))
        return jax.lax.scan(step, carry, xs, length=length, unroll=unroll)


def scoped(parts: Sequence[str]) -> Any:
    """Return the context of `jax.named_scope` for some levels of a module path, or an empty one."""
    return jax.named_scope("/".join(parts)) if parts else contextlib.nullcontext()
