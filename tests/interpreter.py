"""Evaluation of a program operation by operation.

XLA fuses the operations of what it compiles as one, and rounds a fusion as the processor has it:
with a fused multiply-add, or with wider vectors in a sum. Two programs of the same operations then
differ in the last places, on one processor and not on another. Where a test says that values are
the same to the bit, both sides are evaluated here, one primitive at a time, those of inner programs
too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from remat_kit import _jax
from remat_kit._program import program as _program


def one_by_one(f: Callable[..., Any], *args: Any) -> Any:
    """Call a function, every operation a program of its own."""
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    return jax.tree.unflatten(
        jax.tree.structure(shapes), interpreted(closed, jax.tree.leaves(args))
    )


def interpreted(closed: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluate a closed jaxpr one primitive at a time, those of inner programs too."""
    return _run(closed.jaxpr, closed.consts, args)


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else env[atom]

    for eqn in jaxpr.eqns:
        rule = _INTERPRET.get(eqn.primitive.name, _jax.bind)
        out = rule(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _call(eqn: Any, values: list[Any]) -> list[Any]:
    (body,) = _program.bodies(eqn)
    return _run(body.jaxpr, getattr(body.jaxpr, "consts", ()), values)


def _closed(body: Any, values: Sequence[Any]) -> list[Any]:
    return _run(body, getattr(body, "consts", ()), values)


def _scan(eqn: Any, values: list[Any]) -> list[Any]:
    consts, carried = _jax.scan_arity(eqn)
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    fixed, carry = values[:consts], values[consts : consts + carried]
    xs = values[consts + carried :]
    stacks: list[list[Any]] = [[] for _ in eqn.outvars[carried:]]
    order = range(length)
    for i in reversed(order) if eqn.params["reverse"] else order:
        outs = _closed(body, [*fixed, *carry, *(x[i] for x in xs)])
        carry = outs[:carried]
        for stack, y in zip(stacks, outs[carried:], strict=True):
            stack.append(y)
    ys = []
    for var, stack in zip(eqn.outvars[carried:], stacks, strict=True):
        if eqn.params["reverse"]:
            stack.reverse()
        ys.append(jnp.stack(stack) if stack else jnp.zeros(var.aval.shape, var.aval.dtype))
    return [*carry, *ys]


def _while(eqn: Any, values: list[Any]) -> list[Any]:
    of_cond, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    first, second = values[:of_cond], values[of_cond : of_cond + of_body]
    carry = values[of_cond + of_body :]
    while bool(_closed(cond, [*first, *carry])[0]):
        carry = _closed(body, [*second, *carry])
    return carry


def _cond(eqn: Any, values: list[Any]) -> list[Any]:
    index, *operands = values
    branches = eqn.params["branches"]
    return _closed(branches[min(max(int(index), 0), len(branches) - 1)], operands)


def _custom_call(eqn: Any, values: list[Any]) -> list[Any]:
    return _closed(eqn.params["call_jaxpr"], values)


_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "eval_jaxpr")
_INTERPRET: dict[str, Callable[[Any, list[Any]], list[Any]]] = {
    **dict.fromkeys(_CALLS, _call),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_jvp_call": _custom_call,
    "custom_vjp_call": _custom_call,
}
