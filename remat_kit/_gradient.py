"""The gradient program of a loss: what is compiled, inspected and planned.

Every check that a function can be differentiated is made here, once, before anything is traced
for real, so that each caller reports the same error for the same mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_kit._errors import NotDifferentiableError, UserError

Argnums = int | Sequence[int] | None


def gradient_program(
    fn: Callable[..., Any], args: Sequence[Any], argnums: Argnums = 0, *, call: str = "measure"
) -> Callable[..., Any]:
    """Return ``jax.value_and_grad(fn, argnums)``, or ``fn`` itself when ``argnums`` is None.

    A loss that returns ``(scalar, aux)`` is recognised.

    >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    >>> w, x = jnp.ones((3, 2)), jnp.ones((4, 3))
    >>> value, gradient = gradient_program(loss, (w, x))(w, x)
    >>> gradient.shape
    (3, 2)

    Args:
        fn: called as ``fn(*args)``; its result is a real scalar, or a pair of one and anything.
        args: arrays or `jax.ShapeDtypeStruct`, in pytrees.
        argnums: the arguments to differentiate; None when ``fn`` is a whole step already.
        call: the public function that the errors should name.

    Raises:
        NotDifferentiableError: the result is not a real scalar, or an argument that is to be
            differentiated holds something other than floating-point values.
        UserError: an argument is no array, or ``argnums`` names none.
    """
    structs = abstract(args, call=call)
    if argnums is None:
        return fn
    _check_inputs(structs, argnums, call)
    has_aux = _check_result(jax.eval_shape(fn, *structs), call)
    return jax.value_and_grad(fn, argnums, has_aux=has_aux)


def abstract(args: Sequence[Any], *, call: str = "measure") -> tuple[Any, ...]:
    """Return the arguments as `jax.ShapeDtypeStruct`, placed on no particular device.

    >>> abstract((np.ones((2, 3), np.float32), {"n": 1.0}))
    (ShapeDtypeStruct(shape=(2, 3), dtype=float32), {'n': ShapeDtypeStruct(shape=(), dtype=float32, weak_type=True)})
    """  # noqa: E501
    leaves, tree = jax.tree_util.tree_flatten_with_path(tuple(args))
    return tree.unflatten(_struct(path, leaf, call) for path, leaf in leaves)


def _struct(path: Any, leaf: Any, call: str) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        aval, weak_type = leaf, leaf.weak_type
    else:
        try:
            aval = jax.typeof(leaf)
        except TypeError as error:
            raise UserError(
                f"`{call}(fn, *args)`: {_name(path)} is {_shown(leaf)}, not an array",
                hint="give arrays, numbers, `jax.ShapeDtypeStruct` or pytrees of them, and close "
                "over everything else: `lambda params: fn(params, config)`",
            ) from error
        weak_type = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=weak_type, sharding=_host_sharding(leaf)
    )


def _host_sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Keep where a value lives if that is the host's memory; the device is the target's."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    if kind not in ("pinned_host", "unpinned_host"):
        return None
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


def _check_inputs(structs: tuple[Any, ...], argnums: int | Sequence[int], call: str) -> None:
    positions = [argnums] if isinstance(argnums, int) else list(argnums)
    if not positions:
        raise UserError(
            f"`{call}(fn, ..., argnums={argnums!r})`: no argument to differentiate",
            hint="name one, or give argnums=None for a function that is a whole step",
        )
    for position in positions:
        if not -len(structs) <= position < len(structs):
            raise UserError(
                f"`{call}(fn, *args, argnums={argnums!r})`: there is no argument {position}; "
                f"{len(structs)} came",
                hint=f"positions run from 0 to {len(structs) - 1}"
                if structs
                else "give the arguments of the function after it",
            )
        _check_argument(position % len(structs), structs[position], call)


def _check_argument(position: int, struct: Any, call: str) -> None:
    leaves, _ = jax.tree_util.tree_flatten_with_path(struct)
    if not leaves:
        raise NotDifferentiableError(
            f"`{call}`: argument {position} of the function holds no arrays, so it has no gradient",
            hint="name the argument that holds the parameters with argnums=",
        )
    for path, leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        where = f"args[{position}]{jax.tree_util.keystr(path)}"
        raise NotDifferentiableError(
            f"`{call}`: {where} is {leaf.dtype}{list(leaf.shape)}; only floating-point values have "
            "a gradient here",
            hint="name the argument that holds the parameters with argnums=, and pass integers "
            "(labels, steps, keys) as another argument",
        )


def _check_result(result: Any, call: str) -> bool:
    has_aux = isinstance(result, tuple) and len(result) == 2 and _is_scalar(result[0])
    value: Any = result[0] if has_aux else result
    if not _is_scalar(value):
        raise NotDifferentiableError(
            f"`{call}`: the function returns {_described(value)}; a loss is one scalar, or "
            "`(scalar, aux)`",
            hint="reduce it with jnp.mean or jnp.sum, or give argnums=None for a function that "
            "is a whole step",
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise NotDifferentiableError(
            f"`{call}`: the function returns a scalar of {value.dtype}, which has no gradient",
            hint="return a real floating-point scalar",
        )
    return has_aux


def _is_scalar(value: Any) -> bool:
    return getattr(value, "shape", None) == () and hasattr(value, "dtype")


def _described(value: Any) -> str:
    if value is None:
        return "None"
    if hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return f"{type(value).__name__} of {len(jax.tree.leaves(value))} arrays"


def _name(path: Any) -> str:
    return "args" + jax.tree_util.keystr(path)


def _shown(leaf: Any) -> str:
    text = repr(leaf)
    return text if len(text) <= 60 else f"a {type(leaf).__name__}"


def materialise(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments with every `jax.ShapeDtypeStruct` replaced by zeros.

    >>> materialise((jax.ShapeDtypeStruct((2,), jnp.float32),))
    (Array([0., 0.], dtype=float32),)
    """
    return tuple(jax.tree.map(_materialised, arg) for arg in args)


def _materialised(leaf: Any) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        keys = [jax.random.key(0)] * int(np.prod(leaf.shape))
        return jnp.stack(keys).reshape(leaf.shape) if leaf.shape else keys[0]
    return jnp.zeros(leaf.shape, leaf.dtype)
