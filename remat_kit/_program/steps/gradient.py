"""Is a function a loss, and what does its gradient compute?

All public functions that measure, inspect or plan a loss use the gradient program of this module.
It also checks that the function can be differentiated, so that all of them report the same error
for the same mistake.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np

from remat_kit import _jax
from remat_kit._errors import NotDifferentiableError, UserError
from remat_kit._frameworks import flax as _flax
from remat_kit._program import communication as _communication
from remat_kit._program import ops as _ops
from remat_kit._program.flow import BACKWARD, Flow, NumberedValue, Numbering, Op
from remat_kit._program.shares import Labelled, Shares
from remat_kit._program.steps import taken as _taken

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
        fn: called as ``fn(*args)``; returns a real scalar, or a pair of a real scalar and anything.
        args: arrays or `jax.ShapeDtypeStruct`, in pytrees.
        argnums: positions of the arguments to differentiate; None if ``fn`` is a whole step.
        call: the public function that errors name.

    Raises:
        NotDifferentiableError: the result is not a real scalar, or an argument to differentiate
            contains something other than floating-point values.
        UserError: an argument is not an array, or ``argnums`` names no argument.
    """
    structs = abstract(args, call=call)
    if argnums is None:
        return fn
    _check_inputs(structs, argnums, call)
    with _taken.differentiated_later():
        closed, result = jax.make_jaxpr(fn, return_shape=True)(*structs)
    has_aux = check_loss(closed, structs, result, argnums, call)
    return jax.value_and_grad(fn, argnums, has_aux=has_aux)


def abstract(args: Sequence[Any], *, call: str = "measure") -> tuple[Any, ...]:
    """Return the arguments as `jax.ShapeDtypeStruct`.

    A sharding over several devices is part of the program, and is kept. Anything else is placed on
    no particular device.

    Raises:
        UserError: a leaf is not an array.

    >>> abstract((np.ones((2, 3), np.float32), {"n": 1.0}))
    (ShapeDtypeStruct(shape=(2, 3), dtype=float32), {'n': ShapeDtypeStruct(shape=(), dtype=float32, weak_type=True)})
    """  # noqa: E501
    leaves, tree = jax.tree_util.tree_flatten_with_path(tuple(args))
    return tree.unflatten(_struct(path, leaf, call) for path, leaf in leaves)


def check_program(closed: Any, call: str, *, shardings: bool = False) -> None:
    """Raise `UserError` if a traced function uses a mesh or a sharding of several devices.

    With ``shardings`` it may say how its values are split, but not call `shard_map`.
    """
    if (devices := _jax.devices_within(closed, shardings=not shardings)) > 1:
        raise partitioned("the function is partitioned", devices, call)


def partitioned(what: str, devices: int, call: str) -> UserError:
    """Return the error of a function that does not know such partitioned programs."""
    return UserError(
        f"`{call}`: {what} over {devices} devices, which `{call}` does not know",
        hint="`measure` and `inspect` take every partitioned program. `plan`, `frontier` and "
        "`estimate` take a loss or a step whose arguments have shardings, and a step whose loss is "
        "inside of `shard_map`; otherwise give the program of one device: its part of the batch "
        "and of the parameters as `jax.ShapeDtypeStruct` without a sharding, and the function "
        "without mesh and shardings",
    )


def _struct(path: Any, leaf: Any, call: str) -> jax.ShapeDtypeStruct:
    if _jax.manual_type(leaf):  # an input of a loss inside of a `shard_map`
        return leaf
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
        aval.shape, aval.dtype, weak_type=weak_type, sharding=_kept_sharding(leaf)
    )


def _kept_sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Return the sharding of a value over several devices or in the host's memory.

    Other values get the target's device.
    """
    sharding = getattr(leaf, "sharding", None)
    if _jax.devices_of(sharding) > 1:
        return getattr(sharding, "sharding", sharding)
    kind = getattr(sharding, "memory_kind", None)
    if kind not in ("pinned_host", "unpinned_host"):
        return None
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


def _check_inputs(structs: tuple[Any, ...], argnums: int | Sequence[int], call: str) -> None:
    positions = [argnums] if isinstance(argnums, int) else list(argnums)
    if not positions:
        raise UserError(
            f"`{call}(fn, ..., argnums={argnums!r})`: there is no argument to differentiate",
            hint="give the position of an argument, or argnums=None for a function that is a whole "
            "step",
        )
    for position in positions:
        if not -len(structs) <= position < len(structs):
            raise UserError(
                f"`{call}(fn, *args, argnums={argnums!r})`: there is no argument {position}; "
                f"{len(structs)} were given",
                hint=f"positions run from 0 to {len(structs) - 1}"
                if structs
                else "give the arguments of the function after it",
            )
        _check_argument(position % len(structs), structs[position], call)


def may_be_of_a_loss(args: Sequence[Any]) -> bool:
    """Tell whether a loss could be differentiated by the first of some arguments.

    It could not if the argument contains integers, as the state of an optimizer does. If that is
    unknown, because the arguments are not all arrays, the answer is True.

    >>> may_be_of_a_loss((1.0, 2)), may_be_of_a_loss(((1.0, 2), 1.0))
    (True, False)
    """
    try:
        _check_inputs(abstract(args), 0, "")
    except NotDifferentiableError:
        return False
    except UserError:  # some argument is not an array, or there is none
        return True
    return True


def _check_argument(position: int, struct: Any, call: str) -> None:
    leaves, _ = jax.tree_util.tree_flatten_with_path(struct)
    if not leaves:
        raise NotDifferentiableError(
            f"`{call}`: argument {position} of the function contains no arrays, so it has no "
            "gradient",
            hint="give the position of the argument that contains the parameters with argnums=",
        )
    for path, leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        where = f"args[{position}]{jax.tree_util.keystr(path)}"
        raise NotDifferentiableError(
            f"`{call}`: {where} is {leaf.dtype}{list(leaf.shape)}; only floating-point values have "
            "a gradient here",
            hint=_OF_A_MODULE if _flax.is_nnx(struct) else _OF_INTEGERS,
        )


_OF_INTEGERS = (
    "give the position of the argument that contains the parameters with argnums=, and pass "
    "integers (labels, steps, keys) as another argument"
)
_OF_A_MODULE = (
    "the gradient of an NNX module is that of all its values, its random streams too. "
    "`nnx.value_and_grad` takes that of its parameters alone: pass a step that calls it"
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


def check_loss(
    closed: Any, structs: Sequence[Any], result: Any, argnums: int | Sequence[int], call: str
) -> bool:
    """Raise for a traced function that is no loss; tell whether its result is ``(scalar, aux)``.

    A step that returns ``(loss, parameters)`` or ``(loss, gradients)`` has that form too. It is not
    a loss: its scalar does not depend on the gradient that the step takes, and the second part of
    its result contains an update, or the gradient of an argument that ``argnums`` names.

    Args:
        closed: the jaxpr of the function.
        structs: the shapes of its arguments.
        result: the shapes of its result.
        argnums: positions of the arguments to differentiate.
        call: the public function that errors name.

    Raises:
        NotDifferentiableError: the function is not a loss.
    """
    has_aux = _check_result(result, call)
    gradient = _taken.taken(closed) if has_aux else None
    if gradient is None or _taken.is_loss(gradient, result):
        return has_aux
    chosen = [structs[p] for p in ([argnums] if isinstance(argnums, int) else argnums)]
    if any(gradient.updated) or _taken.returns_gradient_of(gradient, result, chosen):
        raise NotDifferentiableError(
            f"`{call}`: the function takes a gradient itself and returns it or an update beside "
            "the loss, so it is a whole step; its own gradient is of no use",
            hint="give the loss that it differentiates, or argnums=None to measure the step itself",
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
    return tuple(jax.tree.map(materialised, arg) for arg in args)


def materialised(leaf: Any) -> Any:
    """Return zeros in the place of a `jax.ShapeDtypeStruct`, and anything else as it is."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        keys = [jax.random.key(0)] * int(np.prod(leaf.shape))
        made = jnp.stack(keys).reshape(leaf.shape) if leaf.shape else keys[0]
        place = _placed(leaf)
        return made if place is None else jax.device_put(made, place)
    return jnp.zeros(leaf.shape, leaf.dtype, device=_placed(leaf))


def _placed(struct: jax.ShapeDtypeStruct) -> jax.sharding.Sharding | None:
    """Return the sharding of a shape over several devices of this process."""
    sharding = _kept_sharding(struct)
    if sharding is None or _jax.devices_of(sharding) == 1:
        return None
    return _jax.concrete(sharding) if _jax.is_abstract(sharding) else sharding


# -- the gradient of a loss -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Gradient:
    """A traced loss and its derivative, in which equal values have equal numbers.

    Attributes:
        flow: the operations of the forward pass, then those of the backward pass.
        outputs: the results of the loss.
        residuals: for each array that the backward pass reads from the forward pass, an operation
            of kind "residual" that reads its value, and the abstract value of the array.
        gradients: the results of the backward pass.
        live: the operations of ``flow`` that a result or a gradient depends on.
        needed: the operations of ``flow`` that a gradient depends on.
        primal: the operations of the loss alone, with its checkpoint regions.
        primal_live: the operations of ``primal`` that a result depends on.
        names: the names of the arguments, in order.
        shards: of a partitioned program, the shape on one device of the residuals that are split.
        loss: the jaxpr of the loss.
        unplaced: of a partitioned program, the primitives of operations of which it is unknown
            what one device does. Their FLOPs and bytes are those of all devices together.
        estimated: of a partitioned program, the primitives of operations that XLA's partitioner may
            split in another way than Shardy's propagation says, so that their FLOPs on one device
            are estimates: convolutions, and products whose operands and result are split in
            contradicting ways.
    """

    flow: Flow
    outputs: list[NumberedValue]
    residuals: list[tuple[Op, Any]]
    gradients: list[NumberedValue]
    live: set[Op]
    needed: set[Op]
    primal: Flow
    primal_live: set[Op]
    names: tuple[str, ...]
    shards: Mapping[Op, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    loss: Any = dataclasses.field(default=None, repr=False)
    unplaced: tuple[str, ...] = ()
    estimated: tuple[str, ...] = ()

    def nbytes(self, residual: Op, aval: Any) -> int:
        """Return the bytes of a residual, on each device if it is split over several."""
        shape = self.shards.get(residual)
        return _ops.nbytes(aval if shape is None else jax.ShapeDtypeStruct(shape, aval.dtype))

    def ops(self) -> Iterator[Op]:
        """Yield the equations in ``live``, in order."""
        return (op for op in self.flow.ops if op.kind == "equation" and op in self.live)


def trace_gradient(
    fn: Callable[..., Any],
    args: Sequence[Any],
    argnums: int | Sequence[int] | None = 0,
    *,
    call: str,
    numbering: Numbering | None = None,
    axes: _jax.MappedAxes | None = None,
) -> Gradient:
    """Trace a loss and its derivative, and number every value.

    Args:
        fn: called as ``fn(*args)``; returns a real scalar, or a pair of a real scalar and anything.
        args: arrays or `jax.ShapeDtypeStruct`, in pytrees.
        argnums: positions of the arguments to differentiate.
        call: the public function that errors name.
        numbering: the numbering of another trace with the same arguments, to compare the values of
            the two functions.
        axes: the axes of the `shard_map` that the loss is inside of. Its shapes are then those on
            one device of these axes.

    Raises:
        NotDifferentiableError, UserError: as `gradient_program` does.
    """
    if argnums is None:
        raise UserError(
            f"`{call}(..., argnums=None)`: in a whole step it is unknown where the forward pass "
            "ends",
            hint="give the loss, and in argnums= the position of the parameters",
        )
    structs = abstract(args, call=call)
    _check_inputs(structs, argnums, call)
    fn = _flax.with_known_arguments(fn)
    with (
        contextlib.nullcontext() if axes is None else axes.opened(),
        _shardings_known(fn, structs, argnums, call),
        _flax.nnx_scopes(),
        _taken.differentiated_later(),
    ):
        loss, shapes = jax.make_jaxpr(fn, return_shape=True)(*structs)
        has_aux = check_loss(loss, structs, shapes, argnums, call)
        forward, backward = _forward_and_backward(fn, structs, argnums, has_aux)
    primal = Flow(numbering)
    result = primal.run(loss, primal.arguments(loss.in_avals))
    flow = Flow(primal.numbering)
    outs = flow.run(forward, flow.arguments(forward.in_avals))
    count = len(loss.out_avals)
    residuals = [
        (flow.residual(v), a) for v, a in zip(outs[count:], forward.out_avals[count:], strict=True)
    ]
    loss_aval: Any = loss.out_avals[0]
    one = flow.numbering.constant(np.ones((), loss_aval.dtype), loss_aval)
    inputs = [op.inputs[0]._replace(origin=op) for op, _ in residuals]
    gradients = flow.run(backward, [*inputs, NumberedValue(one, None, 0, False)], BACKWARD)
    gradient = Gradient(
        flow=flow,
        outputs=outs[:count],
        residuals=residuals,
        gradients=gradients,
        live=flow.live([*outs[:count], *gradients]),
        needed=flow.live(gradients),
        primal=primal,
        primal_live=primal.live(result),
        names=_argument_names(fn, structs),
        loss=loss,
    )
    if axes is not None:
        return without_shares(gradient) if axes.splits_more else gradient
    if max(_jax.devices_of_arguments(tuple(structs)), _jax.devices_within(forward)) == 1:
        return gradient
    return _on_one_device(gradient, forward, backward, structs)


def _shardings_known(
    fn: Callable[..., Any], structs: Sequence[Any], argnums: Argnums, call: str
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which decorated functions know how their inputs are split."""
    if _jax.devices_of_arguments(tuple(structs)) == 1:
        return contextlib.nullcontext()

    def trace() -> Any:
        return jax.jit(gradient_program(fn, structs, argnums, call=call)).trace(*structs)

    return _communication.known_within(trace, lambda traced: traced)


def _on_one_device(
    gradient: Gradient, forward: Any, backward: Any, structs: Sequence[Any]
) -> Gradient:
    """Return a partitioned gradient whose operations and residuals know their parts on one device.

    Shardy splits the values of the whole gradient. An operation of the loss is split as the equal
    one of the gradient is. Only if there is none, as for a function with a derivative rule of its
    own, the loss is split on its own.
    """
    leaves, count = jax.tree.leaves(tuple(structs)), len(gradient.residuals)
    labelled = Labelled(forward, backward)

    def values(*arrays: Any) -> list[Any]:
        first, second = map(jec.jaxpr_as_fun, labelled.labelled)
        outs = first(*arrays)
        kept = outs[len(outs) - count :]
        # The backward pass is part of the program whose shardings are propagated.
        return [*kept, *outs, *second(*kept, jnp.ones((), outs[0].dtype))]

    shares = labelled.shares(values, leaves)
    if shares is None:
        return without_shares(gradient)
    _place(gradient.flow, shares)
    equal = {op.numbers: op.share for op in gradient.ops() if op.share is not None}
    for op in gradient.primal.ops:
        op.share = equal.get(op.numbers) if op.kind == "equation" else None
    if any(op.share is None and op.flops for op in _equations(gradient.primal_live)):
        alone = Labelled(gradient.loss)
        if (own := alone.shares(alone.function, leaves)) is not None:
            _place(gradient.primal, own)
    every = [*gradient.ops(), *_equations(gradient.primal_live)]
    residuals = [op for op, _ in gradient.residuals]
    return dataclasses.replace(
        gradient,
        shards=dict(zip(residuals, shares.results, strict=False)),
        unplaced=_not_mapped(op for op in every if op.share is None),
        estimated=tuple(
            dict.fromkeys(op.primitive for op in every if op.share and op.share.estimated)
        ),
    )


def without_shares(gradient: Gradient) -> Gradient:
    """Return a partitioned gradient of which it is unknown how the devices split its values."""
    return dataclasses.replace(gradient, unplaced=_not_mapped(gradient.ops()))


def _equations(ops: Iterable[Op]) -> Iterator[Op]:
    return (op for op in ops if op.kind == "equation")


def _place(flow: Flow, shares: Shares) -> None:
    """Give the operations of a program, where they have none, what one device does of them."""
    for op in _equations(flow.ops):
        if op.share is None:
            op.share = shares.of((*op.frame.equations, op.eqn))


def _not_mapped(ops: Iterable[Op]) -> tuple[str, ...]:
    """Return the primitives of operations with FLOPs that are not inside of a `shard_map`."""
    outside = (
        op
        for op in ops
        if op.flops and not any(e.primitive.name == "shard_map" for e in op.frame.equations)
    )
    return tuple(dict.fromkeys(op.primitive for op in outside))


def _forward_and_backward(
    fn: Callable[..., Any], structs: Sequence[Any], argnums: int | Sequence[int], has_aux: bool
) -> tuple[Any, Any]:
    """Return the jaxprs of the forward and the backward pass.

    The forward jaxpr returns the results of the loss and then the residuals. The arguments of the
    backward jaxpr are the residuals and the cotangent of the loss; it returns the gradients.
    """
    positions = [argnums] if isinstance(argnums, int) else argnums
    chosen = [i % len(structs) for i in positions]
    tree: Any = None

    def forward(*args: Any) -> Any:
        nonlocal tree

        def of_chosen(*values: Any) -> Any:
            full = list(args)
            for i, value in zip(chosen, values, strict=True):
                full[i] = value
            return fn(*full)

        out, vjp, *aux = jax.vjp(of_chosen, *(args[i] for i in chosen), has_aux=has_aux)
        residuals, tree = jax.tree.flatten(vjp)
        return out, aux, residuals

    closed = jax.make_jaxpr(forward)(*structs)

    def backward(residuals: Any, one: Any) -> Any:
        return jax.tree.unflatten(tree, residuals)(one)

    handed = closed.out_avals[len(closed.out_avals) - tree.num_leaves :]
    return closed, jax.make_jaxpr(backward)(handed, closed.out_avals[0])


def _argument_names(fn: Callable[..., Any], structs: Sequence[Any]) -> tuple[str, ...]:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = []
    for path, _ in jax.tree_util.tree_flatten_with_path(tuple(structs))[0]:
        index = path[0].idx
        head = plain[index] if index < len(plain) else f"args[{index}]"
        names.append(head + jax.tree_util.keystr(path[1:]))
    return tuple(names)
