"""What does a whole training step compute, with an optimizer around a loss?

A step computes the gradients of the loss and updates the parameters and the state of the optimizer.
The optimizer may be any object with the methods ``init`` and ``update`` of an
``optax.GradientTransformation``; optax itself is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from remat_kit._errors import UserError
from remat_kit._program import ops as _ops
from remat_kit._program.steps.gradient import Argnums, abstract, gradient_program

Step = Callable[..., Any]


def state_of(optimizer: Any, args: Sequence[Any], argnums: Argnums, call: str) -> Any:
    """Return the shapes of an optimizer's state.

    Raises:
        UserError: ``optimizer`` is not an optimizer, or ``argnums`` is not a single position.
    """
    if argnums is None:
        raise UserError(
            f"`{call}(..., argnums=None, optimizer=...)`: a whole step already contains an "
            "optimizer",
            hint="leave optimizer out, or give the loss and the position of its parameters",
        )
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise UserError(
            f"`{call}(..., optimizer={optimizer!r})`: an optimizer has the methods init and update",
            hint="give an optax.GradientTransformation, such as optax.adam(1e-3)",
        )
    if not isinstance(argnums, int):
        raise UserError(
            f"`{call}(..., argnums={argnums!r}, optimizer=...)`: a step updates one argument",
            hint="put all parameters into one pytree, and give the position of that argument",
        )
    params = abstract(args, call=call)[argnums]
    return _sharded_like(jax.eval_shape(optimizer.init, params), params)


def _sharded_like(state: Any, params: Any) -> Any:
    """Return the shapes of a state, with the shardings of the parameters on each copy of them.

    The moments of an optimizer have the tree and the shapes of the parameters. JAX gives them the
    shardings of the parameters, because they are made from them.
    """
    leaves, tree = jax.tree.flatten(params)
    if all(leaf.sharding is None for leaf in leaves):
        return state
    shapes = [leaf.shape for leaf in leaves]

    def is_copy(x: Any) -> bool:
        return jax.tree.structure(x) == tree and [y.shape for y in jax.tree.leaves(x)] == shapes

    def sharded(x: Any) -> Any:
        if not is_copy(x):
            return x
        return jax.tree.map(lambda y, p: y.update(sharding=p.sharding), x, params)

    return jax.tree.map(sharded, state, is_leaf=is_copy)


def state_bytes(optimizer: Any, args: Sequence[Any], argnums: Argnums, call: str) -> int:
    """Return the bytes of an optimizer's state, on each device if it is split over several."""
    return sum(map(_ops.shard_bytes, jax.tree.leaves(state_of(optimizer, args, argnums, call))))


def adamw_bytes(args: Sequence[Any], argnums: Argnums, call: str) -> int | None:
    """Return the bytes of AdamW's state with its default options, or None for a whole step.

    The state consists of two copies of the parameters and a count of steps. If they are split over
    several devices, these are the bytes of one device.

    >>> adamw_bytes((jnp.ones((8, 4)), jnp.ones(3)), 0, "measure")
    260
    """
    if argnums is None:
        return None
    structs = abstract(args, call=call)
    chosen = [structs[i] for i in ([argnums] if isinstance(argnums, int) else argnums)]
    return 2 * sum(map(_ops.shard_bytes, jax.tree.leaves(chosen))) + 4


def training_step(
    fn: Callable[..., Any], optimizer: Any, args: Sequence[Any], argnums: Argnums, call: str
) -> tuple[Step, tuple[Any, ...], tuple[int, ...]]:
    """Return a training step, its arguments, and the positions of those that it may overwrite.

    >>> import optax
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    >>> args = jnp.ones((3, 2)), jnp.ones((4, 3))
    >>> step, given, donated = training_step(loss, optax.sgd(0.5), args, 0, "plan")
    >>> donated
    (0, 1)
    >>> params, state, loss = step(optax.sgd(0.5).init(args[0]), *args)
    >>> params.shape, loss.shape
    ((3, 2), ())

    Args:
        fn: the loss, called as ``fn(*args)``.
        optimizer: an ``optax.GradientTransformation``.
        args: arrays or `jax.ShapeDtypeStruct`, in pytrees.
        argnums: the position of the parameters.
        call: the public function that errors name.

    Returns:
        The step, called as ``step(state, *args)``, which returns new parameters, the new state and
        the result of the loss; the arguments of the step, with the shapes of the state; and the
        positions of the state and the parameters among these arguments.

    Raises:
        UserError: see `state_of`.
    """
    state = state_of(optimizer, args, argnums, call)
    gradient = gradient_program(fn, args, argnums, call=call)
    assert isinstance(argnums, int)

    def step(state: Any, *args: Any) -> tuple[Any, Any, Any]:
        value, gradients = gradient(*args)
        params = args[argnums]
        with jax.named_scope("update"):
            updates, state = optimizer.update(gradients, state, params)
            params = jax.tree.map(lambda p, u: jnp.asarray(p + u, p.dtype), params, updates)
        return params, state, value

    return step, (state, *args), (0, 1 + argnums % len(args))
