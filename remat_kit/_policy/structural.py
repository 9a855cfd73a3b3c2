"""Where do checkpoint regions begin and end?

A structural policy says this, and which values are saved inside a region.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from remat_kit._errors import PolicyError
from remat_kit._policy.algebra import Decision, Policy, Rule, _Leaf, read
from remat_kit._policy.selectors import checked_patterns, nothing
from remat_kit._program.value import Value
from remat_kit._units import shortened

_MAX_COUNT = 10**9


@dataclasses.dataclass(frozen=True, repr=False)
class Structural(Policy):
    """A policy that also says where checkpoint regions begin and end.

    Attributes:
      keep: the policy for the values inside a region, which also answers ``decide``, ``matches``,
        ``rule`` and ``destination``. Structural policies do not combine with others.
    """

    keep: Policy = dataclasses.field(default=Rule(Decision.SAVE, nothing), kw_only=True)
    places_regions: ClassVar[bool] = True
    _head: ClassVar[str] = ""

    def matches(self, value: Value) -> bool:
        return self.keep.matches(value)

    def deciding(self, value: Value) -> _Leaf:
        return self.keep.deciding(value)

    def rules(self) -> Iterator[_Leaf]:
        return self.keep.rules()

    def _shown(self, name: str, *args: Any) -> str:
        shown = [repr(a) for a in args]
        if self.keep != Rule(Decision.SAVE, nothing):
            shown.append(f"keep={self.keep!r}")
        return f"{name}({', '.join(shown)})"


def _kept(call: str, keep: Any) -> Policy:
    policy = read(keep, call=call)
    if policy is None or policy.places_regions:
        raise PolicyError(
            f"`{call[:-1]}, keep={keep!r})`: keep= must be a policy for the values inside a region",
            hint="for example `keep=save(dots)`; the default saves nothing",
        )
    return policy


def _count(call: str, n: Any) -> int:
    if isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= _MAX_COUNT:
        return n
    raise PolicyError(
        f"`{call}`: {shortened(n)} is not a count",
        hint=f"give an integer of one or more, and at most {_MAX_COUNT}",
    )


@dataclasses.dataclass(frozen=True, repr=False)
class Uniform(Structural):
    """See `uniform`."""

    n: int
    _head = "uniform(n"

    def __repr__(self) -> str:
        return self._shown("uniform", self.n)


def uniform(n: int, keep: Any = nothing) -> Uniform:
    """Make one region of every ``n`` consecutive blocks.

    The blocks are the modules that ``at=`` matches, in the order in which they run; the last region
    may be shorter. Follows Megatron-LM's ``--recompute-method uniform --recompute-num-layers n``.

    >>> from remat_kit import dots
    >>> uniform(2, keep=dots)
    uniform(2, keep=save(dots))

    Args:
      n: blocks per region.
      keep: what is saved inside a region, by default nothing.

    Raises:
      PolicyError: ``n`` is not a positive int, or ``keep`` is not a policy for values.
    """
    call = f"uniform({shortened(n)})"
    return Uniform(_count(call, n), keep=_kept(call, keep))


@dataclasses.dataclass(frozen=True, repr=False)
class Block(Structural):
    """See `block`."""

    n: int
    _head = "block(n"

    def __repr__(self) -> str:
        return self._shown("block", self.n)


def block(n: int, keep: Any = nothing) -> Block:
    """Make a region of each of the first ``n`` blocks, and leave the other blocks alone.

    The blocks are the modules that ``at=`` matches, in the order in which they run. Follows
    Megatron-LM's ``--recompute-method block --recompute-num-layers n``.

    >>> block(4)
    block(4)

    Args:
      n: blocks that become regions.
      keep: what is saved inside a region, by default nothing.

    Raises:
      PolicyError: ``n`` is not a positive int, or ``keep`` is not a policy for values.
    """
    call = f"block({shortened(n)})"
    return Block(_count(call, n), keep=_kept(call, keep))


@dataclasses.dataclass(frozen=True, repr=False)
class Segments(Structural):
    """See `segments`."""

    names: tuple[str, ...]
    _head = "segments(*names"

    def __repr__(self) -> str:
        return self._shown("segments", *self.names)


def segments(*names: str, keep: Any = nothing) -> Segments:
    """Cut a function at these checkpoint names, and make a region of each part.

    By default a region saves nothing, so only the named values at the cuts are saved. The part
    after the last cut does not become a region. Follows Paddle's
    ``RecomputeOptimizer._set_checkpoints``.

    >>> segments("block_1", "block_2")
    segments('block_1', 'block_2')

    Args:
      *names: checkpoint names, in the order in which the function computes the named values.
      keep: what is saved inside a region, by default nothing.

    Raises:
      PolicyError: there is no name, a name is given twice, or ``keep`` is not a policy for values.
    """
    checked_patterns("segments", names)
    call = f"segments({', '.join(map(repr, names))})"
    if len(set(names)) < len(names):
        raise PolicyError(f"`{call}`: a name is given twice", hint="each cut has its own name")
    return Segments(names, keep=_kept(call, keep))


@dataclasses.dataclass(frozen=True, repr=False)
class Nested(Structural):
    """See `nested`."""

    group: int | None = None
    _head = "nested(group"

    def __repr__(self) -> str:
        return self._shown("nested", *(() if self.group is None else (self.group,)))


def nested(group: int | None = None, keep: Any = nothing) -> Nested:
    """Turn a scan over L layers into a scan over groups of layers, each group a region.

    Only the carries between groups stay live until the backward pass reaches them, and the carries
    inside a group are recomputed. At the peak about 2·√L carries are live instead of L (Chen et al.
    2016, "Training Deep Nets with Sublinear Memory Cost"). Follows Haliax's
    ``ScanCheckpointPolicy(nested=...)``.

    >>> from remat_kit import dots
    >>> nested(), nested(4, keep=dots)
    (nested(), nested(4, keep=save(dots)))

    Args:
      group: layers per group; None means about √L.
      keep: what is saved inside a layer, by default nothing.

    Raises:
      PolicyError: ``group`` is not a positive int or None, or ``keep`` is not a policy for values.
    """
    call = f"nested({shortened(group)})"
    return Nested(None if group is None else _count(call, group), keep=_kept(call, keep))


@dataclasses.dataclass(frozen=True, repr=False)
class Pieces(Structural):
    """See `pieces`."""

    n: int
    axis: int | None = None
    _head = "pieces(n"
    _takes_keep = False

    def __repr__(self) -> str:
        return f"pieces({self.n})" if self.axis is None else f"pieces({self.n}, axis={self.axis})"


def pieces(n: int, axis: int | None = None) -> Pieces:
    """Compute a function in ``n`` pieces of an axis, and recompute each piece in the backward pass.

    A region of `jax.checkpoint` needs all of its activations at once while it is recomputed. If
    these are the largest of the program (the logits of a language model, the scores of a long
    attention, the hidden layer of an MLP), recomputation alone does not reduce the peak. In pieces,
    a loop computes 1/n of them at a time, forward and backward.

    >>> import jax, jax.numpy as jnp
    >>> from remat_kit import policy
    >>> @policy(pieces(4))
    ... def loss_head(w, x, labels):
    ...     logits = jax.nn.log_softmax(x @ w)
    ...     return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))
    >>> w, x, labels = jnp.ones((8, 1000)), jnp.ones((64, 8)), jnp.zeros(64, int)
    >>> jax.grad(loss_head)(w, x, labels).shape
    (8, 1000)

    The largest array that the function computes and does not return is divided along ``axis``, and
    with it everything from which it is computed and that is computed from it, as far as the
    operations allow. What comes before and after runs once, without a region. Random numbers are
    those of the undecorated function. Sums over pieces add up in another order, so results agree
    within rounding.

    Follows Liger's ``FusedLinearCrossEntropy``, MaxText's ``num_vocab_tiling`` and the tiled MLPs
    of ALST (2025), each of which is written by hand for one function.

    Args:
      n: the number of pieces. If it does not divide the axis, the last piece is smaller, and there
        may be fewer of them.
      axis: an axis of the largest array that the function computes and does not return. By
        default it is the axis that keeps the fewest bytes alive; of equally good ones, the first.

    Raises:
      PolicyError: ``n`` or ``axis`` is not an integer. At the first trace: the axis cannot be
        divided, and the message names the operation that blocks it and the axes that work.
    """
    call = f"pieces({shortened(n)})"
    if axis is not None and (not isinstance(axis, int) or isinstance(axis, bool)):
        raise PolicyError(
            f"`{call[:-1]}, axis={shortened(axis)})`: the axis is not an integer",
            hint="give the position of an axis of the largest array, or leave axis= out",
        )
    return Pieces(_count(call, n), axis)


@dataclasses.dataclass(frozen=True, repr=False)
class Sliced(Structural):
    """See `sliced`."""

    axis: str
    _head = "sliced(axis"
    _takes_keep = False

    def __repr__(self) -> str:
        return f"sliced({self.axis!r})"


def sliced(axis: str) -> Sliced:
    """Save the activations that enter a region in slices over a mesh axis, and nothing inside it.

    A region of `jax.checkpoint` saves its inputs: for a block of a model, the output of the block
    before it. In tensor parallelism every device along the axis of the model has all of this
    activation, and saves all of it. With this policy each device saves one slice of it, and the
    devices gather the slices before they recompute the region. The forward pass exchanges nothing
    more, and the residuals of a region take the size of the axis less memory.

    >>> import jax, remat_kit
    >>> from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
    >>> mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    >>> def array(*shape, split):
    ...     return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, P(*split)))
    >>> w, x = array(8, 8, split=(None, "model")), array(16, 6, 8, split=("data",))
    >>> @remat_kit.policy(sliced("model"))
    ... def block(w, x):
    ...     return x + jax.numpy.tanh(x @ w) @ w.T
    >>> def loss(w, x):
    ...     return block(w, jax.numpy.sin(x)).sum()
    >>> for residual in remat_kit.inspect(loss, w, x).saved[:1]:  # of 768 bytes on each device
    ...     print(residual.bytes, residual.reason)
    384 sliced('model'), input of region (no module)

    An input is sliced if it is computed in the program (an argument, such as a parameter, is in
    memory anyway), is a floating-point array of two dimensions or more, is whole along the axis,
    and has a dimension that is not split yet and that the size of the axis divides. The first such
    dimension after the first split one is sliced, or else the first such dimension. Other inputs
    are saved as they are.

    How the devices split the inputs must be known: see `collective`. In forward mode (`jax.jvp`) a
    region is computed twice, once from its inputs and once from the slices.

    Follows ``Cell.recompute(recompute_slice_activation=True)`` of MindSpore and
    ``--distribute-saved-activations`` of Megatron-LM.

    Args:
      axis: the name of an axis of the mesh.

    Raises:
      PolicyError: ``axis`` is not a name.
      UserError: at the first trace: the mesh has no such axis, or the function is inside of a
        `shard_map`.

    Warns:
      RematKitWarning: at the first trace: the shardings are unknown, or no input can be sliced.
    """
    if not isinstance(axis, str) or not axis:
        raise PolicyError(
            f"`sliced({shortened(axis)})`: the axis is not a name",
            hint="give the name of an axis of the mesh, as in sliced('model')",
        )
    return Sliced(axis)


@dataclasses.dataclass(frozen=True, repr=False)
class Planned(Structural):
    """See `planned`."""

    program: str
    lines: tuple[str, ...]
    strict: bool = True
    step: bool = False
    _head = "planned(program"
    _takes_keep = False

    def __repr__(self) -> str:
        lines = ", ".join(map(repr, (self.program, *self.lines)))
        strict = "" if self.strict else ", strict=False"
        return f"planned({lines}{strict}{', step=True' if self.step else ''})"

    def losses(self) -> list[Planned]:
        """Return one plan for each loss; only the plan of a step has several."""
        plans = [dataclasses.replace(_bare(self), lines=())]
        for line in self.lines:
            if line.startswith(_PROGRAM):
                plans.append(dataclasses.replace(plans[0], program=line, lines=()))
            else:
                plans[-1] = dataclasses.replace(plans[-1], lines=(*plans[-1].lines, line))
        return plans

    @property
    def title(self) -> str:
        """The name of the plan in reports, since its own text can be long."""
        return f"plan {hashlib.sha256(repr(self).encode()).hexdigest()[:6]}"


# How the description of a program begins, unlike any line of a schedule.
_PROGRAM = "joined="


def _bare(plan: Planned) -> Planned:
    return Planned(program=plan.program, lines=plan.lines, strict=plan.strict, step=plan.step)


def joined(plans: Sequence[Planned], *, step: bool = False) -> Planned:
    """Return one plan, from those of the losses of a step.

    >>> one, two = planned("joined=1 sin=1", "0:1 plain"), planned("joined=2 cos=1", "0:1 plain")
    >>> joined([one, two])
    planned('joined=1 sin=1', '0:1 plain', 'joined=2 cos=1', '0:1 plain')
    >>> joined([one, two]).losses() == [one, two]
    True
    """
    first, *rest = plans
    lines = [line for plan in rest for line in (plan.program, *plan.lines)]
    return dataclasses.replace(_bare(first), lines=(*first.lines, *lines), step=step)


def planned(program: str, *lines: str, strict: bool = True, step: bool = False) -> Planned:
    """Run one program with the regions of a plan; `remat_kit.plan` returns such a policy.

    Each region runs under `jax.checkpoint`, with a policy that saves the chosen values.

    >>> planned("joined=1f shapes=2e sin=2", "0:1 plain", "1:2 save 1.0")
    planned('joined=1f shapes=2e sin=2', '0:1 plain', '1:2 save 1.0')

    Args:
      program: a short description of the program that the plan was made for. Applying the plan to
        another program is an error.
      lines: the segments of the program in order, each with the values that it saves. Equal blocks
        with equal decisions share a line. In the plan of a step with several losses, the
        description of another program begins the lines of another loss.
      strict: whether a program that differs only in its shapes is an error too.
      step: whether the plan is of a training step, and ``program`` is one of its losses.

    Raises:
      PolicyError: a line is not a text. When the plan is applied to a program: the lines do not
        fit the program.
    """
    for text in (program, *lines):
        if not isinstance(text, str):
            raise PolicyError(
                f"`planned(...)`: {shortened(text)} is not a text",
                hint="use a plan as `plan.save` or `remat-kit plan --save` wrote it",
            )
    return Planned(program=program, lines=lines, strict=bool(strict), step=bool(step))


@dataclasses.dataclass(frozen=True, repr=False)
class Automatic(Structural):
    """See `auto`."""

    budget: str | int | float
    target: str
    objective: str
    path: str | None
    strict: bool
    pieces: bool = False
    _head = "auto(budget"
    _takes_keep = False

    def __repr__(self) -> str:
        rest = {
            "target": (self.target, "local"),
            "objective": (self.objective, "balanced"),
            "path": (self.path, None),
            "strict": (self.strict, False),
            "pieces": (self.pieces, False),
        }
        given = [f"{name}={value!r}" for name, (value, usual) in rest.items() if value != usual]
        return f"auto({', '.join([repr(self.budget), *given])})"


def auto(
    budget: str | int | float = "fit",
    *,
    target: str = "local",
    objective: str = "balanced",
    path: str | None = None,
    strict: bool = False,
    pieces: bool = False,
) -> Automatic:
    """Plan a loss or a training step at its first call, for the shapes that it is called with.

    This is the counterpart of PyTorch's ``activation_memory_budget``.

    >>> import jax, jax.numpy as jnp, remat_kit
    >>> def loss(w, x):
    ...     return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))
    >>> step = jax.jit(lambda w, x: w - 0.1 * jax.grad(loss)(w, x), donate_argnums=0)
    >>> lean = remat_kit.policy(auto("min", target="cpu"))(step)
    >>> lean(jnp.ones((8, 8)), jnp.ones((64, 8))).shape
    (8, 8)

    The plan is remembered for each program, chip and set of versions, on disk too, so a second
    start plans nothing. A line on the standard error says what was planned. In a program of several
    processes (`jax.distributed`), the first one plans and the others take its plan.

    Args:
      budget: as for `remat_kit.plan`.
      target: the chip to plan for; the one in this machine by default.
      objective: as for `remat_kit.plan`.
      path: a recipe that is read if it exists and is of this program, and written otherwise.
      strict: whether a failure to plan is an error. By default it is a `RematKitWarning`, and the
        program runs as it is.
      pieces: whether segments may run in pieces, as for `remat_kit.plan`.

    Raises:
      UserError: at the first call: ``budget`` is not an amount of memory.
    """
    where = None if path is None else str(path)
    return Automatic(budget, target, objective, where, bool(strict), bool(pieces))
