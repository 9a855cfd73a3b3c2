"""Which losses does a training step differentiate, and how often does each of them run?

A step is a function in which a gradient is taken, in a jitted, scanned or nested function at any
depth. While a step is traced, `_jax.catching` hands over each function that the step
differentiates. `observe` records these losses as programs of their own: a loss is then a function
of the parameters, and everything else that it reads (the batch, masks, other parameters) is a
constant, as it is for `jax.grad`.

Example: a step accumulates the gradient over four parts of its batch in a scan:

>>> import jax, jax.numpy as jnp
>>> def loss(w, x):
...     return jnp.sum(jnp.tanh(x @ w))
>>> def step(w, batch):
...     def accumulate(total, part):
...         return total + jax.grad(loss)(w, part), None
...     return w - 0.1 * jax.lax.scan(accumulate, jnp.zeros_like(w), batch)[0]
>>> w, batch = jnp.ones((3, 3)), jnp.ones((4, 2, 3))
>>> [(found.name, found.times, found.loop) for found in observe(step, (w, batch)).losses]
[('accumulate/loss', 4.0, 'a scan of 4 iterations')]
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from remat_kit import _frames, _jax
from remat_kit._errors import UserError
from remat_kit._files import is_own_file
from remat_kit._frameworks import arguments as _arguments
from remat_kit._frameworks import flax as _flax
from remat_kit._program import communication as _communication
from remat_kit._program import paths as _paths
from remat_kit._program import sharding as _sharding
from remat_kit._program.flow import Numbering
from remat_kit._program.paths import Path
from remat_kit._program.program import Program, bodies, without_region_boundaries
from remat_kit._program.steps import taken as _taken
from remat_kit._program.steps import traced as _traced
from remat_kit._program.steps.gradient import (
    Argnums,
    Gradient,
    abstract,
    may_be_of_a_loss,
    trace_gradient,
    without_shares,
)
from remat_kit._program.steps.traced import CompilableProgram

# -- one loss -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A function that a step differentiates, as a program.

    Attributes:
        name: the function that takes the gradient, and the loss: ``"train_step/loss_fn"``.
        source: the file and line of the loss.
        jaxpr: its program. The first ``constants`` inputs are the values that it is closed over,
            and the others are the arrays that it is differentiated by.
        constants: the number of values that it is closed over.
        active: for each input, whether it has a derivative.
        wanted: for each result, whether the step differentiates it; the rest is auxiliary.
        names: the names of the inputs.
        base: the module path of the place where the gradient is taken.
        times: how often one step runs it; an iteration of unknown number counts once.
        loop: the loops around it in words, or "".
        shardings: for each input, how a partitioned step splits it, or None; empty if the step is
            not partitioned, or if nobody asked (`on_mesh`).
        axes: the axes of the `shard_map` that it is inside of, or None.
    """

    name: str
    source: str
    jaxpr: Any
    constants: int
    active: tuple[bool, ...]
    wanted: tuple[bool, ...]
    names: tuple[str, ...]
    base: Path
    times: float = 1.0
    loop: str = ""
    shardings: tuple[jax.sharding.NamedSharding | None, ...] = ()
    axes: _jax.MappedAxes | None = None

    def function(self, *inputs: Any) -> tuple[Any, list[Any]]:
        """Run the loss on its constants and its arguments, and return ``(scalar, auxiliary)``.

        `jax.vjp` may have been given a function of several results or of a result that is no
        scalar. Their sum then stands for the product with the cotangents.
        """
        outs = jec.jaxpr_as_fun(self.jaxpr)(*inputs)
        pairs = list(zip(outs, self.wanted, strict=True))
        results, rest = [x for x, w in pairs if w], [x for x, w in pairs if not w]
        if len(results) == 1 and results[0].shape == ():
            return jnp.real(results[0]) if jnp.iscomplexobj(results[0]) else results[0], rest
        sums = [jnp.sum(jnp.real(x), dtype=jnp.float32) for x in results]
        return functools.reduce(jnp.add, sums), rest

    @property
    def inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of the constants, then those of the arguments, with their shardings."""
        structs = tuple(_struct(a) for a in self.jaxpr.in_avals)
        if not self.shardings:
            return structs
        pairs = zip(structs, self.shardings, strict=True)
        return tuple(x if s is None else x.update(sharding=s) for x, s in pairs)

    @property
    def argnums(self) -> tuple[int, ...]:
        """The positions of the inputs that have a derivative."""
        avals = self.jaxpr.in_avals
        return tuple(
            i
            for i, active in enumerate(self.active)
            if active and jnp.issubdtype(avals[i].dtype, jnp.floating)
        )

    def flat(self) -> Program:
        """Return the flattened program, with placeholders for the values of its constants."""
        program = without_region_boundaries(Program.of(self.jaxpr, self.base))
        # A scan or a call inside may have brought constants of its own, which come first.
        own = len(program.consts)
        consts = (*program.consts, *[None] * self.constants)
        assert len(program.invars) == own + len(self.active)
        return dataclasses.replace(program, consts=consts)


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        weak_type=bool(getattr(aval, "weak_type", False)),
        **_jax.manual_type(aval),
    )


def name_of(found: _jax.Differentiated) -> str:
    """Return the name of a loss: the function that takes its gradient, and its own name."""
    inner = _inner(found)
    own = getattr(inner, "__qualname__", type(inner).__name__)
    parts = [own.rpartition("<locals>.")[2]]
    asking = next(_asking(found), None)
    if asking is not None and asking[0].co_name != "<module>":
        parts.insert(0, asking[0].co_qualname.rpartition("<locals>.")[2])
    return "/".join(parts)


def source_of(found: _jax.Differentiated) -> str:
    """Return the file and line of a loss, or of the line that takes its gradient."""
    code = getattr(_inner(found), "__code__", None)
    if code is not None and not _frames.is_installed_file(code.co_filename):
        return f"{_paths.short_path(code.co_filename)}:{code.co_firstlineno}"
    return next((f"{_paths.short_path(c.co_filename)}:{line}" for c, line in _asking(found)), "")


def _inner(found: _jax.Differentiated) -> Any:
    return _jax.function_inside(found.fun, _frames.is_installed_file)


def _asking(found: _jax.Differentiated) -> Iterator[tuple[Any, int]]:
    """Yield the code and line of the user's frames, or of a library's where there are none.

    Who calls this package is not part of the step, which a library may have made (Keras does).
    """

    def is_own(frame: tuple[Any, int]) -> bool:
        return is_own_file(frame[0].co_filename)

    frames = itertools.dropwhile(is_own, found.frames)
    inside = list(itertools.takewhile(lambda frame: not is_own(frame), frames))
    for is_library in (_frames.is_installed_file, _frames.is_library_file):
        yield from ((c, line) for c, line in inside if not is_library(c.co_filename))


class LossOfArrays:
    """A caught loss with its arguments, as a function of arrays that returns a list of arrays.

    Leaves of the result that are not arrays are kept as they are, because the auxiliary part of a
    result may contain any objects. The loss is called once, because NNX makes losses that can be
    called only once: JAX finds the trace of `function` in its cache, since its arguments are a flat
    list (the pytrees of NNX are not equal to themselves).

    Attributes:
        function: the function of the arrays of the arguments.
        inputs: these arrays.
    """

    def __init__(self, found: _jax.Differentiated, args: tuple[Any, ...]):
        self.found = found
        self.tree: Any = None
        self.leaves: list[tuple[Any, bool]] = []
        self.inputs, given = jax.tree.flatten(args)

        def function(*inputs: Any) -> list[Any]:
            leaves, self.tree = jax.tree.flatten(found.fun(*given.unflatten(inputs)))
            traced = [_arguments.is_traceable(x) for x in leaves]
            self.leaves = [(None if t else x, t) for x, t in zip(leaves, traced, strict=True)]
            return [x for x, t in zip(leaves, traced, strict=True) if t]

        self.function = function

    def result(self, arrays: Sequence[Any]) -> Any:
        """Return the whole result, with ``arrays`` in the place of its arrays."""
        outs = iter(arrays)
        return self.tree.unflatten(next(outs) if t else x for x, t in self.leaves)

    @property
    def differentiated(self) -> int:
        """The number of arrays that are differentiated; those of the auxiliary part follow."""
        tree = self.tree.children()[0] if self.found.has_aux else self.tree
        return sum(t for _, t in self.leaves[: tree.num_leaves])


# -- the losses of a step -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A step that has been traced.

    Attributes:
        program: the step as its user runs it.
        losses: the losses that it differentiates, in the order in which they were traced. Calls of
            equal losses are one entry, and their ``times`` are added up.
    """

    program: CompilableProgram
    losses: tuple[Loss, ...]


class _Observer:
    """Records each loss of a step while the step is traced.

    With ``marks_inputs``, the step that is traced shows which values are the inputs of each loss.
    """

    def __init__(self, marks_inputs: bool = False) -> None:
        self.losses: list[Loss] = []
        self.marks_inputs = marks_inputs

    def __call__(self, found: _jax.Differentiated) -> Callable[..., Any]:
        return functools.wraps(found.fun, updated=())(functools.partial(self.run, found))

    def run(self, found: _jax.Differentiated, *args: Any) -> Any:
        base = _paths.join_scopes(_jax.current_scopes())
        loss = LossOfArrays(found, args)
        call = _arguments.Call(loss.function, tuple(loss.inputs), {})
        with _flax.nnx_scopes(), _taken.differentiated_later():
            traced = call.trace()
        traced = _jax.reordered(traced, _jax.order_of_making(traced.consts))
        closed, constants = traced.closed, len(traced.consts)
        active = [i >= constants and _taken.is_inexact(a) for i, a in enumerate(closed.in_avals)]
        wanted = [
            i < loss.differentiated and _taken.is_inexact(a) for i, a in enumerate(closed.out_avals)
        ]
        mark = _mark(len(self.losses))
        self.losses.append(
            Loss(
                name=name_of(found),
                source=source_of(found),
                jaxpr=closed,
                constants=constants,
                active=tuple(active),
                wanted=tuple(wanted),
                names=(*["constant"] * constants, *_names(found, args)),
                base=base,
                axes=_jax.mapped_axes(),
            )
        )
        if self.marks_inputs and self.losses[-1].axes is None:  # else their shapes are local
            scope = f"{_INPUTS}{len(self.losses) - 1}"
            traced, call.arrays = _communication.behind_barrier(traced, call.arrays, scope)
        with jax.named_scope(mark):
            return loss.result(call.evaluated(traced))


def _names(found: _jax.Differentiated, args: tuple[Any, ...]) -> list[str]:
    """Return the names of the arrays among the arguments of a loss."""
    code: Any = getattr(_inner(found), "__code__", None)
    plain: Sequence[str] = () if code is None else code.co_varnames[: code.co_argcount]
    names = []
    for path, _ in jax.tree_util.tree_flatten_with_path(args)[0]:
        index = path[0].idx
        head = str(plain[index]) if len(args) <= len(plain) else f"args[{index}]"
        names.append(head + jax.tree_util.keystr(path[1:]))
    return names


def _mark(number: int) -> str:
    return f"remat_kit_loss_{number}"


def observe(
    fn: Callable[..., Any],
    args: Sequence[Any],
    donate_argnums: int | Sequence[int] = (),
    *,
    call: str = "inspect",
) -> Step:
    """Trace a step and record its losses.

    Args:
        fn: the step, jitted or not.
        args: its arguments, as for `measure`.
        donate_argnums: as for `measure`.
        call: the public function that errors name.
    """
    observer = _Observer()
    with _jax.catching(observer):
        program = _traced.trace(fn, args, None, donate_argnums, call=call)
    marks = [_mark(i) for i in range(len(observer.losses))]
    places = _places(program.traced.jaxpr.jaxpr, set(marks))
    losses = [
        dataclasses.replace(loss, times=places[m].times, loop=places[m].words())
        if m in places
        else loss
        for loss, m in zip(observer.losses, marks, strict=True)
    ]
    return Step(program, tuple(_joined(losses)))


def on_mesh(
    step: Step,
    fn: Callable[..., Any],
    args: Sequence[Any],
    donate_argnums: int | Sequence[int] = (),
    *,
    call: str = "plan",
) -> Step:
    """Return a partitioned step whose losses know how it splits their inputs.

    The step is traced once more with a barrier behind the inputs of each loss, and Shardy
    propagates the shardings of the step to these barriers.

    >>> from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
    >>> mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    >>> x = jax.ShapeDtypeStruct((8, 3), "float32", sharding=NamedSharding(mesh, P("data")))
    >>> step = lambda w, x: w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
    >>> args = jax.ShapeDtypeStruct((3, 3), "float32"), x
    >>> (loss,) = on_mesh(observe(step, args), step, args).losses
    >>> [None if s is None else tuple(s.spec) for s in loss.shardings]
    [('data', None), None]

    Args:
        step: the step, as `observe` returns it.
        fn, args, donate_argnums, call: as for `observe`.

    Raises:
        UserError: the shardings are unknown, because this jaxlib cannot propagate them.
    """
    observer = _Observer(marks_inputs=True)
    with _jax.catching(observer):
        program = _traced.trace(fn, args, None, donate_argnums, call=call)
    found = _sharding.barrier_shardings(program.traced, _INPUTS)
    if found is None:
        raise UserError(
            f"`{call}`: this version of jaxlib does not say how the step splits its values",
            hint="use the versions of JAX that this package was tested with",
        )
    known = {}
    for i, loss in enumerate(observer.losses):
        places, shardings = _communication.markable(loss.jaxpr.in_avals), found.get(i, [])
        split = dict(zip(places, shardings, strict=False))
        own = tuple(split.get(place) for place in range(len(loss.jaxpr.in_avals)))
        known.setdefault((loss.name, str(loss.jaxpr)), own)
    losses = (
        dataclasses.replace(x, shardings=known.get((x.name, str(x.jaxpr)), ())) for x in step.losses
    )
    return dataclasses.replace(step, losses=tuple(losses))


_INPUTS = "remat_kit_inputs_"


def _joined(losses: Sequence[Loss]) -> Iterator[Loss]:
    """Yield one loss for each program that occurs, with the times of all its calls added up."""
    groups: dict[Any, list[Loss]] = {}
    for loss in losses:
        groups.setdefault((loss.name, str(loss.jaxpr)), []).append(loss)
    for group in groups.values():
        yield dataclasses.replace(group[0], times=sum(x.times for x in group))


@dataclasses.dataclass
class _Place:
    """How often a loss runs, and the loops around one of its calls."""

    times: float = 0.0
    loops: tuple[str, ...] = ()

    def words(self) -> str:
        return " in ".join(reversed(self.loops))


def _places(jaxpr: Any, marks: set[str]) -> dict[str, _Place]:
    places: dict[str, _Place] = {}

    def look(jaxpr: Any, times: float, loops: tuple[str, ...]) -> None:
        here: set[str] = set()
        for eqn in jaxpr.eqns:
            scopes = {scope for group in _jax.name_stack_groups(eqn) for scope in group}
            found = scopes & marks
            for mark in found - here:
                place = places.setdefault(mark, _Place(loops=loops))
                place.times += times
            here |= found
            if found:
                continue
            for body in bodies(eqn):
                if body.kind == "loop":
                    inner = (*loops, f"a scan of {body.times:.0f} iterations")
                elif body.kind == "while":
                    inner = (*loops, "a while loop")
                else:
                    inner = loops
                look(getattr(body.jaxpr, "jaxpr", body.jaxpr), times * body.times, inner)

    look(jaxpr, 1.0, ())
    return places


# -- is a function a step? ------------------------------------------------------------------------


def step_of(
    fn: Callable[..., Any],
    args: Sequence[Any],
    argnums: Argnums = 0,
    donate_argnums: int | Sequence[int] = (),
    *,
    call: str,
) -> Step | None:
    """Return a function as a step with its losses, or None if it is a loss.

    A function is a step if it takes a gradient and is jitted with donated arguments, if it takes a
    gradient and has the state of an optimizer among its arguments, or if its result is no loss. A
    function whose result is a scalar is a loss, even if it takes a gradient inside (a penalty on a
    gradient). With ``argnums=None`` every function is a step.

    >>> import jax.numpy as jnp
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    >>> w = x = jnp.ones((3, 3))
    >>> step_of(loss, (w, x), call="plan") is None
    True
    >>> step = lambda w, x: w - 0.1 * jax.grad(loss)(w, x)
    >>> [found.name for found in step_of(step, (w, x), call="plan").losses]
    ['<lambda>/<lambda>']

    Args:
        fn, args, donate_argnums: as for `observe`.
        argnums: the positions of the arguments to differentiate, as the user gave them.
        call: the public function that errors name.
    """
    if argnums is None:
        return observe(fn, args, donate_argnums, call=call)
    decorated = getattr(fn, _traced.STEP, None)
    # Of the positions of a loss's parameters, only the default may also be meant for a step.
    if argnums != 0 or (decorated is not None and decorated.known is False):
        return None
    bare = undecorated(fn)
    try:
        step = observe(bare, args, donate_argnums, call=call)
    except Exception:
        if not may_be_of_a_loss(args):
            raise
        # What is wrong with the function is reported where it is used as a loss.
        return None
    certain = decorated is not None and decorated.known is True
    if not step.losses or not (certain or _is_step(args, step)):
        return None
    return step if bare is fn else observe(fn, args, donate_argnums, call=call)


def undecorated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function without the policies that it is decorated with."""
    while (inner := getattr(fn, _traced.STEP, None)) is not None:
        fn = inner.fn
    return fn


def argnums_of(
    fn: Callable[..., Any],
    args: Sequence[Any],
    argnums: Argnums,
    donate_argnums: int | Sequence[int] = (),
    optimizer: Any = None,
    *,
    call: str,
) -> Argnums:
    """Return the positions of the arguments to differentiate, or None if the function is a step.

    With an optimizer, the function is a loss.
    """
    if argnums is None or optimizer is not None:
        return argnums
    is_loss = step_of(fn, args, argnums, donate_argnums, call=call) is None
    return argnums if is_loss else None


@dataclasses.dataclass(frozen=True, eq=False)
class LossGradient:
    """The gradient of a loss, and the loss as a function of its own.

    Attributes:
        gradient: the traced gradient.
        fn, args, argnums: the loss, its arguments, and the positions of those to differentiate.
        loss: the loss, if a step differentiates it, or else None.
    """

    gradient: Gradient
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    argnums: int | Sequence[int]
    loss: Loss | None = None

    @property
    def parameters(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the arrays by which the loss is differentiated."""
        positions = [self.argnums] if isinstance(self.argnums, int) else self.argnums
        structs = abstract(self.args)
        return jax.tree.leaves([structs[i] for i in positions])


def gradients_of(
    fn: Callable[..., Any],
    args: Sequence[Any],
    argnums: Argnums = 0,
    donate_argnums: int | Sequence[int] = (),
    *,
    call: str,
    numberings: dict[int, Numbering] | None = None,
) -> tuple[Step | None, list[LossGradient]]:
    """Return the gradient of a loss, or the gradients of all losses of a step.

    Args:
        fn, args, argnums, donate_argnums, call: as for `step_of`.
        numberings: to compare two functions, a dictionary that is given for both. It gets the
            numbering of the values of each loss.

    Raises:
        UserError: the function is a step, and it takes no gradient.
        NotDifferentiableError, UserError: as `trace_gradient` does.
    """
    numberings = {} if numberings is None else numberings
    step = step_of(fn, args, argnums, donate_argnums, call=call)
    if step is None:
        assert argnums is not None
        numbering = numberings.setdefault(0, Numbering())
        gradient = trace_gradient(fn, args, argnums, call=call, numbering=numbering)
        return None, [LossGradient(gradient, fn, tuple(args), argnums)]
    if not step.losses:
        raise UserError(
            f"`{call}`: the function takes no gradient, so it has no backward pass",
            hint="give a loss, or a step that calls `jax.grad`, `jax.value_and_grad`, `jax.vjp` or "
            "`nnx.grad`",
        )
    is_partitioned = devices_of(step, args) > 1
    if is_partitioned:
        with contextlib.suppress(UserError):  # then the gradients say that nothing is known
            step = on_mesh(step, fn, args, donate_argnums, call=call)
    found = []
    for i, loss in enumerate(step.losses):
        numbering = numberings.setdefault(i, Numbering())
        gradient = trace_gradient(
            loss.function,
            loss.inputs,
            loss.argnums,
            call=call,
            numbering=numbering,
            axes=loss.axes,
        )
        if is_partitioned and not loss.shardings and loss.axes is None:
            gradient = without_shares(gradient)
        gradient = dataclasses.replace(gradient, names=loss.names)
        found.append(LossGradient(gradient, loss.function, loss.inputs, loss.argnums, loss))
    return step, found


def devices_of(step: Step, args: Sequence[Any]) -> int:
    """Return the devices that a step is partitioned over, 1 if it is not."""
    traced = step.program.traced
    given, inside = _jax.devices_of_arguments(tuple(args)), _jax.devices_within(traced.jaxpr)
    return max(given, inside, _jax.devices_of_jit(traced))


def _is_step(args: Sequence[Any], step: Step) -> bool:
    if any(info.donated for info in jax.tree.leaves(step.program.traced.args_info)):
        return True
    if _flax.holds_state(args) or holds_optimizer(args):
        return True
    return result_is_of_a_step(step.program.traced.jaxpr, step.program.results, args)


def result_is_of_a_step(closed: Any, result: Any, args: Sequence[Any]) -> bool:
    """Tell whether the result of a function that takes a gradient is that of a step.

    It is not if it is a real scalar. A pair of a scalar and something else is the result of a step
    if the scalar does not depend on the gradient, and the rest contains an update or a gradient.
    """
    leaves = jax.tree.leaves(result)
    if len(leaves) == 1 and _taken.is_real_scalar(leaves[0]):
        return False
    pair = isinstance(result, tuple) and len(result) == 2 and _taken.is_real_scalar(result[0])
    if not pair:
        return True
    gradient = _taken.taken(closed)
    if gradient is None or _taken.is_loss(gradient, result):
        return False
    return any(gradient.updated) or any(
        _taken.returns_gradient_of(gradient, result, a) for a in args if jax.tree.leaves(a)
    )


def holds_optimizer(args: Any) -> bool:
    """Tell whether the state of an optax optimizer or an NNX optimizer is among the arguments."""

    def is_state(x: Any) -> bool:
        return any(
            c.__module__.startswith("optax.") or (c.__module__, c.__name__) == _NNX_OPTIMIZER
            for c in type(x).__mro__
        )

    return any(map(is_state, jax.tree.leaves(args, is_leaf=is_state)))


_NNX_OPTIMIZER = ("flax.nnx.training.optimizer", "Optimizer")
