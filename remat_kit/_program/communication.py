"""Which values of a partitioned program does a collective make?

XLA's partitioner adds collectives where the shardings of an operation's operands and results do not
fit together. Shardy propagates the shardings of the arguments and of the constraints to every value
before XLA compiles the program (see `remat_kit._program.sharding`). From these shardings this
module finds the operands that the devices gather and the results whose parts they add up. It gives
these values a checkpoint name, by which the selector ``collective`` finds them.

An operation fits if the devices can compute its result piece by piece from what they have. The
rules for this are those of `remat_kit._program.pieces`, with one piece for each device of a mesh
axis.

Example: eight devices split the rows of ``x`` and the rows of ``w``. For ``x @ w`` each device
needs all of ``w``, so the devices gather ``w``:

>>> x, w = ValueShard((2, 8), (("data",), ())), ValueShard((1, 6), (("data",), ()))
>>> (dot,) = jax.make_jaxpr(jnp.dot)(jnp.ones((16, 8)), jnp.ones((8, 6))).eqns
>>> exchange(dot, [x, w], [ValueShard((2, 6), (("data",), ()))], {"data": 8})
Exchange(whole=(None, ((), ())), summed=(False,))

If the columns of ``x`` are split instead of its rows, each device has a part of the sum:

>>> x = ValueShard((16, 1), ((), ("data",)))
>>> exchange(dot, [x, w], [ValueShard((16, 6), ((), ()))], {"data": 8})
Exchange(whole=(None, None), summed=(True,))

A policy is applied while JAX traces a function, and a trace does not contain the shardings of
automatic mesh axes. So a partitioned program is traced twice. In the first trace a `Collector` puts
a barrier behind the inputs of each decorated function, and Shardy propagates the shardings of the
whole program to these barriers. In the second trace they are `Known`. Both are the value of a
context that is part of the keys of JAX's caches of traces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from remat_kit import _jax
from remat_kit._program import ops as _ops
from remat_kit._program import pieces as _pieces
from remat_kit._program import sharding as _sharding
from remat_kit._program.paths import module_path
from remat_kit._program.pieces import Along, In, Out, Partial, Way
from remat_kit._program.program import (
    GATHERED_PARAMETER,
    MADE_BY_COLLECTIVE,
    Program,
    bodies,
    evaluate,
)
from remat_kit._program.sharding import Shards, ValueShard

Axes = tuple[tuple[str, ...], ...]


# -- one operation --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What the devices exchange for an operation.

    Attributes:
        whole: for each operand that they gather, the mesh axes that split its dimensions
            afterwards; None for the other operands.
        summed: for each result, whether a collective makes it from what the devices computed.
    """

    whole: tuple[Axes | None, ...]
    summed: tuple[bool, ...]


def exchange(
    eqn: Any,
    operands: Sequence[ValueShard | None],
    results: Sequence[ValueShard],
    sizes: Mapping[str, int],
) -> Exchange:
    """Return what the devices exchange for an equation.

    Operations without a rule in `remat_kit._program.pieces` count as if they exchanged nothing,
    because nobody knows how XLA partitions them.

    Args:
        eqn: the equation.
        operands: what one device has of each operand; None for a literal.
        results: what one device has of each result.
        sizes: the sizes of the mesh axes.
    """
    if eqn.primitive.name in ("sharding_constraint", "reshard"):
        lost = _lost(operands[0], results[0]) if operands[0] is not None else False
        return Exchange((None,), (lost,))
    dropped: list[set[str]] = [set() for _ in operands]
    summed = [False] * len(results)
    for axis, size in sizes.items():
        way = _way(eqn, operands, results, axis, sizes) if size > 1 else None
        if way is None:
            continue
        for i, (how, shard) in enumerate(zip(way.inputs, operands, strict=True)):
            if how is None and shard is not None and _dimension(shard, axis) is not None:
                dropped[i].add(axis)
        for i, (how, shard) in enumerate(zip(way.outputs, results, strict=True)):
            split = _dimension(shard, axis) is not None
            summed[i] |= isinstance(how, Partial) or (isinstance(how, Along) and not split)
    whole = tuple(
        tuple(tuple(a for a in names if a not in gone) for names in shard.axes)
        if gone and shard is not None
        else None
        for gone, shard in zip(dropped, operands, strict=True)
    )
    return Exchange(whole, tuple(summed))


def _lost(before: ValueShard, after: ValueShard) -> bool:
    """Tell whether a constraint takes an axis away from a dimension."""
    pairs = zip(before.axes, after.axes, strict=True)
    return any(axis not in names for given, names in pairs for axis in given)


def _dimension(shard: ValueShard, axis: str) -> int | None:
    return next((d for d, names in enumerate(shard.axes) if axis in names), None)


def _along(
    atom: Any, shard: ValueShard | None, axis: str, sizes: Mapping[str, int]
) -> Along | None:
    """Return how a mesh axis splits a value, or None if it does not."""
    dimension = None if shard is None else _dimension(shard, axis)
    if shard is None or dimension is None:
        return None
    names = shard.axes[dimension]
    outer = math.prod(sizes[a] for a in names[: names.index(axis)])
    length = _pieces.shape_of(atom)[dimension]
    return Along(dimension, outer, length // (outer * sizes[axis]))


def _way(
    eqn: Any,
    operands: Sequence[ValueShard | None],
    results: Sequence[ValueShard],
    axis: str,
    sizes: Mapping[str, int],
) -> Way | None:
    """Return the way in which the devices along a mesh axis compute an operation.

    Of all ways, it is the one in which the fewest bytes of the fewest values are exchanged. None if
    the axis splits no value, or if there is no way.
    """
    given = [_along(v, s, axis, sizes) for v, s in zip(eqn.invars, operands, strict=True)]
    wanted = [_along(v, s, axis, sizes) for v, s in zip(eqn.outvars, results, strict=True)]
    size = sizes[axis]
    places = [(In(i), how) for i, how in enumerate(given)]
    places += [(Out(i), how) for i, how in enumerate(wanted)]
    found = [
        way
        for where, how in places
        if how is not None
        for way in _pieces.ways(eqn, size, where, how)
    ]

    def cost(way: Way) -> tuple[int, int]:
        moved = [
            _ops.nbytes(v.aval)
            for v, how, have in zip(eqn.invars, way.inputs, given, strict=True)
            if have is not None and how != have
        ]
        moved += [
            _ops.nbytes(v.aval)
            for v, how, have in zip(eqn.outvars, way.outputs, wanted, strict=True)
            if how != have
        ]
        return len(moved), sum(moved)

    return min(dict.fromkeys(found), key=cost, default=None)


# -- a program ------------------------------------------------------------------------------------

# Operations that hand an input of a program on, so that what they make of a parameter is one.
_MOVES = frozenset(
    {
        *("convert_element_type", "transpose", "reshape", "squeeze", "expand_dims", "slice"),
        *("dynamic_slice", "broadcast_in_dim", "copy", "copy_p", "reduce_precision", "name"),
        *("sharding_constraint", "reshard", "optimization_barrier"),
    }
)


def marked(program: Program, shards: Shards, mesh: Any) -> Program:
    """Return a program in which the values that a collective makes have a checkpoint name.

    A gathered operand becomes a value of its own, by a constraint. Its cotangent has no constraint,
    so that the partitioner scatters the gradient as it does without the name.

    Args:
        program: the program.
        shards: what one device has of its values (`sharding.value_shards`).
        mesh: the mesh of its shardings.
    """
    return _Marking(program, shards, mesh, program.invars).run()


class _Marking:
    def __init__(self, program: Program, shards: Shards, mesh: Any, parameters: Sequence[Any]):
        self.program, self.shards, self.mesh = program, shards, mesh
        self.split: dict[Any, ValueShard] = dict(zip(program.invars, shards.inputs, strict=True))
        self.parameters = set(parameters)
        self.gathered: dict[tuple[Any, Axes], Any] = {}
        self.subst: dict[Any, Any] = {}
        self.eqns: list[Any] = []

    def run(self) -> Program:
        for place, eqn in enumerate(self.program.eqns):
            results = self.shards.results[place]
            self.split.update(zip(eqn.outvars, results, strict=True))
            first = eqn.invars[0] if eqn.primitive.name in _MOVES else None
            if isinstance(first, jec.Var) and first in self.parameters:
                self.parameters.update(eqn.outvars)
            if place in self.shards.bodies:
                self.scan(eqn, self.shards.bodies[place])
            else:
                self.equation(eqn, results)
        outvars = tuple(map(self.read, self.program.outvars))
        return dataclasses.replace(self.program, eqns=tuple(self.eqns), outvars=outvars)

    def read(self, atom: Any) -> Any:
        return atom if isinstance(atom, jec.Literal) else self.subst.get(atom, atom)

    def equation(self, eqn: Any, results: Sequence[ValueShard]) -> None:
        operands = [None if isinstance(v, jec.Literal) else self.split[v] for v in eqn.invars]
        found = exchange(eqn, operands, results, dict(self.shards.axes))
        # The types of values contain the shardings of explicit axes, so no constraint changes them.
        is_typed = bool(self.mesh.explicit_axes)
        invars = [
            self.read(v) if axes is None or is_typed else self.whole(v, axes, eqn)
            for v, axes in zip(eqn.invars, found.whole, strict=True)
        ]
        self.eqns.append(eqn.replace(invars=invars))
        for var, made in zip(eqn.outvars, found.summed, strict=True):
            if made and not isinstance(var, jec.DropVar):
                is_parameter = eqn.primitive.name in _MOVES and var in self.parameters
                name = GATHERED_PARAMETER if is_parameter else MADE_BY_COLLECTIVE
                self.subst[var] = self.named(var, name, eqn)

    def named(self, var: Any, name: str, like: Any) -> Any:
        fresh = type(var)(var.aval)
        self.eqns += _jax.name_equations(var, fresh, name, like)
        return fresh

    def whole(self, var: Any, axes: Axes, reader: Any) -> Any:
        """Return the gathered value of a variable, which the first equation that reads it makes."""
        if (var, axes) not in self.gathered:
            spec = jax.sharding.PartitionSpec(*(names or None for names in axes))
            place = jax.sharding.NamedSharding(self.mesh, spec)
            (eqn,) = jax.make_jaxpr(functools.partial(_gather, place))(var.aval).eqns
            fresh = jec.Var(var.aval)
            path = module_path(reader)
            info = {"source_info": reader.source_info, "ctx": reader.ctx}
            made = eqn.replace(invars=[self.read(var)], outvars=[fresh], **info)
            self.eqns.append(_jax.with_scopes(made, path))
            name = GATHERED_PARAMETER if var in self.parameters else MADE_BY_COLLECTIVE
            self.gathered[var, axes] = self.named(fresh, name, self.eqns[-1])
        return self.gathered[var, axes]

    def scan(self, eqn: Any, shards: Shards) -> None:
        invars = list(map(self.read, eqn.invars))
        body = Program.of(eqn.params["jaxpr"])
        if len(body.eqns) == len(shards.results):  # without regions of its own
            constants, carried = len(body.consts), sum(_jax.scan_arity(eqn))
            inner = body.invars[constants:]
            first = _jax.scan_arity(eqn)[0]
            parameters = [
                var
                for i, (var, outer) in enumerate(zip(inner, eqn.invars, strict=True))
                if not first <= i < carried
                if not isinstance(outer, jec.Literal) and outer in self.parameters
            ]
            new = _Marking(body, shards, self.mesh, parameters).run()
            if len(new.eqns) > len(body.eqns):
                avals = [v.aval for v in inner]
                jaxpr = jax.make_jaxpr(lambda *xs: evaluate(new, xs))(*avals)
                eqn = eqn.replace(params={**eqn.params, "jaxpr": jaxpr})
        self.eqns.append(eqn.replace(invars=invars))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gather(place: jax.sharding.NamedSharding, x: Any) -> Any:
    """Return the same value, which each device has as ``place`` says."""
    return jax.lax.with_sharding_constraint(x, place)


@_gather.defjvp
def _gather_jvp(place: jax.sharding.NamedSharding, primals: Any, tangents: Any) -> Any:
    return _gather(place, primals[0]), tangents[0]


# -- the shardings of decorated functions ---------------------------------------------------------

Key = tuple[str, tuple[str, ...]]


def key_of(base: Sequence[str], avals: Sequence[Any]) -> Key:
    """Return what tells the calls of decorated functions in a program apart.

    Args:
        base: the module path of the call.
        avals: the types of all arrays that enter it.
    """
    return "/".join(base), tuple(map(str, avals))


class Collector:
    """Puts a barrier behind the inputs of decorated functions in a first trace."""

    def __init__(self) -> None:
        self.met: list[tuple[Key, list[int], int]] = []

    def barrier(
        self, traced: _jax.Traced, arrays: Sequence[Any], base: Sequence[str]
    ) -> tuple[_jax.Traced, list[Any]]:
        """Return a trace and its arguments behind a barrier."""
        scope = self._meet(traced.closed.in_avals, base)
        return behind_barrier(traced, arrays, scope)

    def barred(
        self, program: Program, args: Sequence[Any], base: Sequence[str]
    ) -> tuple[Program, list[Any]]:
        """Return a region and its arguments behind a barrier; ``base`` is its module path."""
        values = [*program.consts, *args]
        values = _behind_barrier(values, self._meet(list(map(jax.typeof, values)), base))
        count = len(program.consts)
        return dataclasses.replace(program, consts=tuple(values[:count])), values[count:]

    def _meet(self, avals: Sequence[Any], base: Sequence[str]) -> str:
        self.met.append((key_of(base, avals), markable(avals), len(avals)))
        return f"{_REGION}{len(self.met) - 1}"

    def known(self, traced: Any) -> Known:
        """Return the shardings that Shardy finds in the first trace, a `jax.stages.Traced`."""
        given = _barred_arguments(traced.jaxpr)
        found = _sharding.barrier_shardings(traced, _REGION) or {}
        known: dict[Key, set[Any]] = {}
        arguments: dict[Key, set[tuple[bool, ...]]] = {}
        for i, (key, places, count) in enumerate(self.met):
            if i in found:
                split = dict(zip(places, found[i], strict=False))
                known.setdefault(key, set()).add(tuple(split.get(p) for p in range(count)))
            if i in given:
                flags = dict(zip(places, given[i], strict=False))
                arguments.setdefault(key, set()).add(
                    tuple(flags.get(p, True) for p in range(count))
                )
        return Known(known, arguments)


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """The shardings of the inputs of decorated functions.

    Attributes:
        found: for each call of a decorated function, the shardings of its inputs, None for those
            that are not split; several if calls that cannot be told apart are split differently.
        arguments: for each call, which of its inputs are arguments of the whole program, cast or
            moved at most.
    """

    found: Mapping[Key, set[tuple[jax.sharding.NamedSharding | None, ...]]]
    arguments: Mapping[Key, set[tuple[bool, ...]]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def mesh(self) -> Any:
        """The mesh of the program, an abstract one; None if it splits no input."""
        every = (s for calls in self.found.values() for split in calls for s in split)
        return next((s.mesh.abstract_mesh for s in every if s is not None), None)

    @functools.cached_property
    def has_activations(self) -> bool:
        """Whether the program computes an input of any region."""
        return not all(all(flags) for calls in self.arguments.values() for flags in calls)

    def activations(self, base: Sequence[str], avals: Sequence[Any]) -> list[Axes | None] | None:
        """Return the mesh axes that split each input of a region that the program computes.

        An input counts as computed if it is in any of the calls that cannot be told apart.

        None for an input that is an argument of the program. The result is None if the shardings
        are unknown, or those of several calls.

        Args:
            base: the module path of the region.
            avals: the types of its inputs.
        """
        key = key_of(base, avals)
        splits, arguments = self.found.get(key, set()), self.arguments.get(key, set())
        if len(splits) != 1 or not arguments:
            return None
        given = [all(flags) for flags in zip(*arguments, strict=True)]
        shardings = next(iter(splits))
        return [
            None if moved else _axes_of(len(aval.shape), sharding)
            for aval, sharding, moved in zip(avals, shardings, given, strict=True)
        ]

    def marked(self, program: Program, inputs: int) -> Program | None:
        """Return a program in which the values that a collective makes have a checkpoint name.

        None if the shardings of its inputs are unknown, or those of several calls.

        Args:
            program: the program of a decorated function.
            inputs: the number of its last variables that are values from outside; the ones before
                are constants of its own, which are not split.
        """
        avals = [v.aval for v in program.invars]
        own = len(avals) - inputs
        splits = self.found.get(key_of(program.base, avals[own:]), set())
        if len(splits) != 1:
            return None
        shardings = (*[None] * own, *next(iter(splits)))
        mesh = next((s.mesh for s in shardings if s is not None), None)
        if mesh is None:
            return program
        structs = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=_divisible(a.shape, s))
            for a, s in zip(avals, shardings, strict=True)
        ]
        bare = dataclasses.replace(program, consts=())
        with _jax.outside_of_traces():
            shards = _sharding.value_shards(bare, structs)
        # JAX may use a trace again for arrays on other devices, so it must not name devices.
        return None if shards is None else marked(program, shards, mesh.abstract_mesh)


def _divisible(
    shape: Sequence[int], sharding: jax.sharding.NamedSharding | None
) -> jax.sharding.NamedSharding | None:
    """Return a sharding without the axes that do not divide a dimension.

    Shardy may split a value into unequal parts. JAX does not take such an argument.
    """
    if sharding is None:
        return None
    axes = []
    for size, names in zip(shape, sharding.spec, strict=False):
        kept = (names,) if isinstance(names, str) else tuple(names or ())
        while kept and size % math.prod(sharding.mesh.shape[a] for a in kept):
            kept = kept[:-1]
        axes.append(kept or None)
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*axes))


_REGION = "remat_kit_region_"


def behind_barrier(
    traced: _jax.Traced, arrays: Sequence[Any], scope: str
) -> tuple[_jax.Traced, list[Any]]:
    """Return a trace and its arguments with a barrier behind all values that enter the program."""
    values = _behind_barrier([*traced.consts, *arrays], scope)
    constants = len(traced.consts)
    return dataclasses.replace(traced, consts=tuple(values[:constants])), values[constants:]


def _behind_barrier(values: Sequence[Any], scope: str) -> list[Any]:
    places = markable(list(map(jax.typeof, values)))
    with jax.named_scope(scope):
        outs = jax.lax.optimization_barrier([values[i] for i in places])
    passed = dict(zip(places, outs, strict=True))
    return [passed.get(i, x) for i, x in enumerate(values)]


def _axes_of(rank: int, sharding: jax.sharding.NamedSharding | None) -> Axes:
    names = () if sharding is None else sharding.spec
    axes = [(a,) if isinstance(a, str) else tuple(a or ()) for a in names]
    return (*axes, *[()] * (rank - len(axes)))


def markable(avals: Sequence[Any]) -> list[int]:
    """Return the places of arrays; keys and references are not split."""
    return [
        i
        for i, aval in enumerate(avals)
        if not _jax.is_ref(aval) and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    ]


# -- which inputs of regions are arguments --------------------------------------------------------


def _barred_arguments(closed: Any) -> dict[int, tuple[bool, ...]]:
    """Tell which values at the barrier of each region are arguments of a program.

    An argument that was only cast or moved counts too, also as a slice of a stack of parameters
    that a scan runs over. What a scan carries is computed, unless a gradient is taken in its body,
    as in a loop of training steps.
    """
    found: dict[int, tuple[bool, ...]] = {}

    def look(jaxpr: Any, given: Sequence[bool], backward: bool) -> list[bool]:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        moved = dict.fromkeys(jaxpr.constvars, True) | dict(zip(jaxpr.invars, given, strict=True))
        seen: set[int] = set()  # in forward mode there is a second barrier, of the tangents

        def of(atom: Any) -> bool:
            return isinstance(atom, jec.Literal) or moved[atom]

        for eqn in jaxpr.eqns:
            flags = list(map(of, eqn.invars))
            is_backward = backward or "transpose" in _jax.transforms_of(eqn)
            if eqn.primitive.name == "optimization_barrier":
                outs = flags
                number = None if is_backward else _region_of(eqn)
                if number is not None and number not in seen:
                    seen.add(number)
                    before = found.get(number, (True,) * len(flags))
                    found[number] = tuple(a and b for a, b in zip(flags, before, strict=False))
            elif eqn.primitive.name in _MOVES:
                outs = flags[:1] * len(eqn.outvars)
            else:
                outs = inside(eqn, flags, is_backward)
            moved.update(zip(eqn.outvars, outs, strict=True))
        return [of(v) for v in jaxpr.outvars]

    def inside(eqn: Any, flags: list[bool], backward: bool) -> list[bool]:
        outs = [False] * len(eqn.outvars)
        for body in bodies(eqn):
            jaxpr = getattr(body.jaxpr, "jaxpr", body.jaxpr)
            if body.kind == "loop":
                first, carried = _jax.scan_arity(eqn)
                if not any("transpose" in _jax.transforms_of(e) for e in jaxpr.eqns):
                    flags = [f and not first <= i < first + carried for i, f in enumerate(flags)]
            elif body.kind == "branch":
                flags = flags[-len(jaxpr.invars) :]
            if len(flags) == len(jaxpr.invars):
                results = look(jaxpr, flags, backward)
                if body.kind in ("call", "rule") and len(results) == len(outs):
                    outs = results
        return outs

    look(closed, [True] * len(closed.jaxpr.invars), False)
    return found


def _region_of(eqn: Any) -> int | None:
    """Return the number of the region whose barrier an equation is, or None for another barrier."""
    number = re.search(rf"\b{_REGION}(\d+)\b", str(eqn.source_info.name_stack))
    return None if number is None else int(number.group(1))


# -- the context ----------------------------------------------------------------------------------

_context = jax.make_user_context(None)


def current() -> Collector | Known | None:
    """Return what is known of the shardings of the program that is being traced."""
    return _context.value


_wanted: list[bool] = []


def want() -> None:
    """Say that some policy reads collectives, so that partitioned programs are traced twice."""
    _wanted[:] = [True]


def known_within(
    trace: Callable[[], Any], traced_of: Callable[[Any], Any]
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the functions that a program calls know their inputs' shardings.

    Args:
        trace: traces the program.
        traced_of: returns the `jax.stages.Traced` of what ``trace`` returns.
    """
    known = found_in(trace, traced_of) if _wanted and current() is None else None
    return contextlib.nullcontext() if known is None else within(known)


def found_in(trace: Callable[[], Any], traced_of: Callable[[Any], Any]) -> Known | None:
    """Return the shardings of the inputs of decorated functions in a program.

    None if no decorated function asks for them.
    """
    collector = Collector()
    with _jax.outside_of_traces(), _context(collector):
        traced = traced_of(trace())
    return collector.known(traced) if collector.met else None


@contextlib.contextmanager
def within(known: Known) -> Iterator[None]:
    """In this context, decorated functions know the shardings of their inputs."""
    with _context(known):
        yield
