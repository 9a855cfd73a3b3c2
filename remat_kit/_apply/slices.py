"""How does a region save its inputs in slices over a mesh axis?

The policy `remat_kit.sliced` saves an activation that enters a region in slices: each device along
a mesh axis, which has all of the activation, saves a part of it. Before the region is recomputed
the devices gather the slices.

A constraint on the sharding makes the slice, a `checkpoint_name` makes `jax.checkpoint` save it,
and a second constraint gathers it. If the forward pass read the gathered array, it would gather
too, because XLA does not see that the array is the input (jax 0.12). So the region has a derivative
rule, whose outputs are computed from the input itself, and whose residuals are computed from the
gathered array::

    outputs = f(x)
    s = checkpoint_name(constraint(x, sliced))
    residuals = residuals of f at constraint(s, whole)

The backward pass needs only the residuals, so the recomputation begins with ``s``, and XLA drops
the gathered array and the residuals from the forward pass.

Example: two devices along ``model`` hold all of an input of shape (32, 128, 64) that four devices
along ``data`` split. The first dimension after the split one that two divides is the second:

>>> mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
>>> aval = jax.core.ShapedArray((32, 128, 64), jnp.float32)
>>> dimension_of(aval, (("data",), (), ()), "model", 2)
1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from remat_kit import _jax
from remat_kit._apply import partitioned as _partitioned
from remat_kit._apply.labels import label
from remat_kit._errors import UserError
from remat_kit._policy.algebra import Decision
from remat_kit._policy.structural import Sliced
from remat_kit._program.communication import Axes
from remat_kit._program.derivative import Derivative
from remat_kit._program.paths import Path
from remat_kit._program.program import Program, evaluate, without_dead

if TYPE_CHECKING:
    from remat_kit._apply.decorate import Application


@dataclasses.dataclass(frozen=True)
class Slice:
    """An input of a region that is saved in slices.

    Attributes:
        input: its position among the inputs of the region, constants included.
        dimension: the dimension that is sliced.
        axis: the mesh axis over which it is sliced.
        mesh: the abstract mesh.
    """

    input: int
    dimension: int
    axis: str
    mesh: Any

    @property
    def name(self) -> str:
        """The checkpoint name of the slice, which says why it is saved."""
        name = label(Decision.SAVE, repr(Sliced(self.axis)))
        assert name is not None
        return name

    def pinned(self, x: Any) -> Any:
        """Return the input, which the partitioner must not slice as well."""
        if self._is_explicit(x):
            return x
        return jax.lax.with_sharding_constraint(x, self._place(None, x))

    def stored(self, x: Any) -> Any:
        """Return the gathered input, which the name of its slice separates from the input."""
        if not self._is_explicit(x):
            s = jax.lax.with_sharding_constraint(x, self._place(self.axis, x))
            s = _jax.checkpoint_name(s, self.name)
            # Without this constraint XLA gathers what the region saves and not what it reads, and
            # says so in the name of the collective.
            s = jax.lax.with_sharding_constraint(s, self._place(self.axis, x))
            return jax.lax.with_sharding_constraint(s, self._place(None, x))
        whole = jax.typeof(x).sharding
        spec = [*whole.spec]
        spec[self.dimension] = self.axis
        s = jax.sharding.reshard(x, NamedSharding(whole.mesh, PartitionSpec(*spec)))
        s = jax.lax.optimization_barrier(_jax.checkpoint_name(s, self.name))  # for the same reason
        return jax.sharding.reshard(s, whole)

    def _is_explicit(self, x: Any) -> bool:
        """Tell whether the type of the input says whether the axis splits it."""
        mesh = jax.typeof(x).sharding.mesh
        return self.axis in mesh.explicit_axes

    def _place(self, axis: str | None, x: Any) -> NamedSharding:
        spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
        spec[self.dimension] = axis
        return NamedSharding(self.mesh, PartitionSpec(*spec))


class Slicing:
    """Chooses the inputs that the regions of one call save in slices.

    Attributes:
      app: the policy and its options.
      whole: why inputs of regions are saved whole, each reason once.
      sliced: whether any input is saved in slices.
    """

    def __init__(self, app: Application):
        self.app = app
        self.whole: dict[str, None] = {}
        self.sliced = False

    def slices(self, program: Program, args: Sequence[Any], base: Path) -> tuple[Slice, ...]:
        """Return the inputs of a region that are saved in slices; ``base`` is its module path."""
        assert isinstance(self.app.policy, Sliced)
        axis, call = self.app.policy.axis, self.app.call
        if _jax.mapped_axes() is not None:
            raise UserError(
                f"`{call}`: inside of a `shard_map` an array is the part of one device, which "
                "cannot be sliced over the mesh again",
                hint="slice it with `jax.lax.axis_index` there, or use the policy 'nothing'",
            )
        known = _partitioned.known_of_program()
        mesh = None if known is None else known.mesh
        avals = list(map(jax.typeof, (*program.consts, *args)))
        split = None if known is None else known.activations(base, avals)
        if mesh is not None and axis not in mesh.axis_names:
            raise UserError(
                f"`{call}`: the mesh has no axis {axis!r}",
                hint=f"its axes are {', '.join(map(repr, mesh.axis_names))}",
            )
        if known is None or split is None:
            self.app.warn_once(_partitioned.UNSLICED.format(call=call), _partitioned.UNSLICED_HINT)
            self.sliced = True  # there is nothing more to say
            return ()
        if mesh is None:
            self.whole["the program splits no array over a mesh"] = None
            return ()
        if not _jax.allows_custom_rule(program.eqns, avals):
            self.whole["a region has an effect or a mutable array"] = None
            return ()
        found = []
        for i, (aval, axes) in enumerate(zip(avals, split, strict=True)):
            dimension = dimension_of(aval, axes, axis, mesh.shape[axis])
            if isinstance(dimension, str):
                if axes is not None:
                    self.whole[f"{aval.str_short()} {dimension}"] = None
            else:
                found.append(Slice(i, dimension, axis, mesh))
        if not known.has_activations:
            self.whole["all inputs of the regions are arguments of the program"] = None
        self.sliced |= bool(found)
        return tuple(found)

    def check(self) -> None:
        """Warn if no region saves an input in slices."""
        if self.whole and not self.sliced:
            reasons = list(self.whole)
            more = f", and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
            self.app.warn_once(
                f"`{self.app.call}`: no input of a region can be saved in slices, so all are saved "
                "whole",
                "; ".join(reasons[:_SHOWN]) + more,
            )


_SHOWN = 4  # reasons in a warning


def dimension_of(aval: Any, axes: Axes | None, axis: str, size: int) -> int | str:
    """Return the dimension of an input that is sliced, or why it stays whole.

    Args:
        aval: the type of the input.
        axes: the mesh axes that split its dimensions; None for an argument of the program.
        axis, size: the axis over which it is sliced, and its size.
    """
    if axes is None:
        return "is an argument of the program"
    if not jnp.issubdtype(aval.dtype, jnp.floating) or aval.ndim < 2:
        return "is no floating-point array of two or more dimensions"
    if any(axis in names for names in axes):
        return f"is split over {axis!r} already"
    first = next((d for d, names in enumerate(axes) if names), -1)
    free = [d for d, n in enumerate(aval.shape) if not axes[d] and n and n % size == 0]
    if size < 2 or not free:
        return f"has no whole dimension that {size} devices can divide"
    return next((d for d in free if d > first), free[0])


def from_slices(
    derivative: Derivative, program: Program, slices: Sequence[Slice], avals: Sequence[Any]
) -> Derivative:
    """Return a derivative whose residuals are computed from slices of the inputs.

    Args:
        derivative: the derivative of ``program``.
        program: a program without constants.
        slices: the inputs that are saved in slices.
        avals: the types of the inputs.
    """
    forward = dataclasses.replace(
        derivative.forward,
        outvars=derivative.residuals,
        eqns=tuple(e for e in derivative.forward.eqns if not e.effects),
    )
    forward = without_dead(forward)

    def both(*inputs: Any) -> list[Any]:
        whole, again = list(inputs), list(inputs)
        for s in slices:
            whole[s.input] = s.pinned(inputs[s.input])
            again[s.input] = s.stored(whole[s.input])
        return [*evaluate(program, whole), *evaluate(forward, again)]

    with _jax.open_axes(derivative.axes):
        closed = jax.make_jaxpr(both)(*avals)
    return dataclasses.replace(derivative, forward=Program.of(closed, program.base))
