"""Run a program in a loop over pieces of an axis, and each piece again in the backward pass.

`remat_kit._program.pieces.split` says which equations are in the loop. The loop has a derivative of
its own, because the derivative that JAX makes of a scan starts with arrays of zeros that depend on
nothing. XLA then allocates them for all layers at the beginning of the program. Here each buffer
of a loop is made from an input of the loop, or in the backward pass from a cotangent, so that it is
allocated when the loop begins (XLA's CPU and GPU compilers, jax 0.12).

In the backward pass the loop runs over the pieces again. For each one it computes the activations
of the piece, then the cotangents of its inputs. In forward mode it pushes the tangents through the
pieces, and both loops can be differentiated again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from remat_kit import _jax
from remat_kit._apply.region import relative
from remat_kit._backend import barriers as _barriers
from remat_kit._backend import rewrites as _rewrites
from remat_kit._errors import PolicyError
from remat_kit._policy.structural import Pieces
from remat_kit._program import ops as _ops
from remat_kit._program import paths as _paths
from remat_kit._program import program as _program
from remat_kit._program.pieces import Along, How, Partial, Piece, on_piece, shape_of
from remat_kit._program.pieces import split as _split
from remat_kit._program.pieces.split import Blocked, Split
from remat_kit._program.program import Program, primitive_name


def run(program: Program, policy: Pieces, args: Sequence[Any], *, call: str) -> list[Any]:
    """Evaluate a program in pieces.

    Args:
        program: the program; its constants are concrete values or tracers of the current trace.
        policy: the number of pieces, and the axis if the user gave one.
        args: one value or tracer for each argument of the program.
        call: the call of `policy` as the user wrote it, which messages quote.

    Raises:
        PolicyError: the axis, or every axis, is blocked by an operation.
    """
    inputs = [*program.consts, *args]
    prefix, program = relative(dataclasses.replace(_program.without_dead(program), consts=()))
    found = chosen(program, policy, call)
    env = dict(zip(program.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jec.Literal) else env[atom]

    def plain(indices: Iterable[int]) -> None:
        for i in indices:
            eqn = program.eqns[i]
            env.update(zip(eqn.outvars, _jax.bind(eqn, [read(v) for v in eqn.invars]), strict=True))

    with jax.named_scope("/".join(prefix)) if prefix else contextlib.nullcontext():
        plain(found.before)
        loop = PieceLoop(found, -(-found.n // min(policy.n, found.n)))
        outs = loop([env[v] for v, _ in loop.inputs])
        env.update(zip((v for v, _ in found.outputs), outs, strict=True))
        plain(found.after)
    return [read(v) for v in program.outvars]


# -- which axis -----------------------------------------------------------------------------------


def chosen(program: Program, policy: Pieces, call: str) -> Split:
    """Return the division of a program that a policy asks for."""
    value = _split.widest(program)
    if value is None:
        raise PolicyError(
            f"`{call}`: the function computes no array that can be divided",
            hint="decorate a function whose activations are larger than its inputs and outputs",
        )
    rank = len(shape_of(value))
    if policy.axis is not None and not -rank <= policy.axis < rank:
        raise PolicyError(
            f"`{call}`: {_described(program, value)} has no axis {policy.axis}",
            hint=f"it has {rank} {'axis' if rank == 1 else 'axes'}; leave axis= out, and one that "
            "works is chosen",
        )
    axes = range(rank) if policy.axis is None else [policy.axis % rank]
    found = {axis: _along(program, value, axis, policy.n) for axis in axes}
    splits = {axis: s for axis, s in found.items() if isinstance(s, Split)}
    if not splits:
        raise _cannot(program, value, policy, found, call)
    return splits[max(splits, key=lambda axis: splits[axis].saved_bytes(policy.n))]


def _along(program: Program, value: Any, axis: int, pieces: int) -> Split | Blocked:
    entries = shape_of(value)[axis]
    if entries < pieces:
        plural = "y" if entries == 1 else "ies"
        return Blocked(None, f"axis {axis} has {entries} entr{plural}, fewer than {pieces} pieces")
    devices, size = _jax.explicit_ways(value.aval, axis), -(-entries // pieces)
    if size % devices or entries % size % devices:
        return Blocked(
            None,
            f"the mesh splits axis {axis} into {devices}, which does not divide a piece of "
            f"{entries % size if size % devices == 0 else size} entries",
        )
    return _split.split(program, value, axis)


def _cannot(
    program: Program,
    value: Any,
    policy: Pieces,
    found: dict[int, Split | Blocked],
    call: str,
) -> PolicyError:
    what = _described(program, value)
    if policy.axis is None:
        reasons = "; ".join(f"axis {axis}: {reason}" for axis, reason in found.items())
        return PolicyError(
            f"`{call}`: {what} cannot be computed in {policy.n} pieces: {reasons}",
            hint="decorate a smaller part of the function, without the operations that block, or "
            "use fewer pieces",
        )
    ((axis, reason),) = found.items()
    others = [
        a
        for a in range(len(shape_of(value)))
        if a != axis and isinstance(_along(program, value, a, policy.n), Split)
    ]
    works = " and ".join(map(str, others))
    return PolicyError(
        f"`{call}`: {what} cannot be computed in {policy.n} pieces of axis {axis}: {reason}",
        hint=f"axis {works} can be divided; without axis= the best one is chosen"
        if others
        else "no other axis can be divided; decorate a smaller part of the function",
    )


def _described(program: Program, value: Any) -> str:
    eqn = next(e for e in program.eqns if value in e.outvars)
    path = "/".join(program.path(eqn))
    where = f" in {path}" if path else ""
    kind = value.aval.str_short(short_dtypes=True)
    return f"the largest array, {kind} of `{primitive_name(eqn)}`{where},"


# -- the loop -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class PieceLoop:
    """A loop over pieces of ``size`` entries; the last piece may be smaller.

    Its inputs are the values that each piece reads as a whole, then those that are cut. A value
    that is read in several ways is an input several times.

    Attributes:
        split: how the equations run in pieces.
        size: the number of entries of a piece.
        arguments: the inputs that are arguments of the function that a plan decorates. A loop of
            the policy `pieces`, or in the body of a scan, has none.
    """

    split: Split
    size: int
    arguments: frozenset[Any] = frozenset()

    @functools.cached_property
    def inputs(self) -> list[tuple[Any, How]]:
        return [*((v, None) for v in self.split.whole), *self.split.cut]

    @property
    def axis(self) -> int:
        """The axis of the divided value."""
        how = self.split.how[self.split.value]
        assert isinstance(how, Along)
        return how.axis

    @functools.cached_property
    def moving(self) -> list[bool]:
        """Which outputs may have tangents: nobody differentiates a maximum over all pieces."""
        return [
            _is_float(v.aval) and how not in (Partial.MAX, Partial.MIN)
            for v, how in self.split.outputs
        ]

    @functools.cached_property
    def _changing(self) -> dict[tuple[int, ...], list[bool]]:
        return {}

    def changing(self, primals: Sequence[Any], wrt: Sequence[int]) -> list[bool]:
        """Tell which outputs change with some of the inputs; the others have no tangents.

        An output that depends on them only through `jax.lax.stop_gradient`, or through an operation
        like ``sign``, has none, so that what reads it needs no derivative.
        """
        key = tuple(wrt)
        if key not in self._changing:
            avals = [jax.typeof(x) for x in primals]
            moved = [avals[i].to_tangent_aval() for i in wrt]
            closed = jax.make_jaxpr(functools.partial(self._first_changes, key))(avals, moved)
            depends = set(closed.jaxpr.invars[len(avals) :])
            for eqn in closed.jaxpr.eqns:
                if not depends.isdisjoint(v for v in eqn.invars if not isinstance(v, jec.Literal)):
                    depends.update(eqn.outvars)
            outs = (not isinstance(v, jec.Literal) and v in depends for v in closed.jaxpr.outvars)
            self._changing[key] = [m and next(outs) for m in self.moving]
        return self._changing[key]

    def _first_changes(self, wrt: tuple[int, ...], xs: list[Any], ds: list[Any]) -> list[Any]:
        """Return the tangents of the first piece of the outputs that may have some."""
        piece = Piece(self.split.n, self.size, 0)
        values = self.cut(xs, piece)
        moved = self._cut_tangents(ds, wrt, piece)
        fn = self._of_some(wrt, self.moving, values, piece)
        return jax.jvp(fn, [values[i] for i in wrt], moved)[1]

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Evaluate the loop; the result can be differentiated in any mode and order."""
        return list(self._differentiable(*values))

    @functools.cached_property
    def _differentiable(self) -> Callable[..., list[Any]]:
        return _jax.with_symbolic_zeros(self._evaluated, self._rule)

    def _rule(self, primals: Any, tangents: Any) -> Any:
        wrt = [
            i
            for i, d in enumerate(tangents)
            if not isinstance(d, SymbolicZero) and _is_float(jax.typeof(primals[i]))
        ]
        ys = self._differentiable(*primals)
        moving = self.changing(primals, wrt)
        changes = iter(self._tangents(primals, wrt, [tangents[i] for i in wrt], moving))
        return ys, [
            next(changes) if m else SymbolicZero(jax.typeof(y).to_tangent_aval())
            for y, m in zip(ys, moving, strict=True)
        ]

    # .. the pieces

    @property
    def name(self) -> str:
        """The scope of the loop, by which reports and profiles name it."""
        return _paths.pieces_scope(-(-self.split.n // self.size), self.axis)

    def over_pieces(
        self,
        results: Sequence[tuple[Any, How]],
        near: Any,
        step: Callable[[Piece], list[Any]],
    ) -> list[Any]:
        """Join what a step returns for each piece.

        Each step is a region, for second derivatives. Under ``jax_remat3`` it is not, because a
        region is a high-level primitive there, which a linear map cannot contain (jax 0.12).

        Args:
            results: the abstract value of each whole result, and what a piece of it is.
            near: a value before which no buffer is made, see `_nothing_yet`.
            step: returns the results of a piece.
        """
        n, size = self.split.n, self.size
        count, rest = divmod(n, size)
        hows = [how for _, how in results]

        def one(carry: list[Any], offset: Any, size: int) -> list[Any]:
            piece = Piece(n, size, offset)
            return _joined(hows, carry, step(piece), piece)

        def region(size: int) -> Callable[[list[Any], Any], list[Any]]:
            step = functools.partial(one, size=size)
            return step if _jax.remat3() else _jax.checkpoint(step, prevent_cse=False)

        def iteration(carry: list[Any], index: Any) -> tuple[list[Any], None]:
            return region(size)(carry, index * size), None

        start = [_buffer(aval, how, near) for aval, how in results]
        carry, _ = lax.scan(iteration, start, jnp.arange(count))
        carry = region(rest)(carry, jnp.asarray(count * size)) if rest else carry
        return [
            whole if whole.dtype == aval.dtype else whole.astype(aval.dtype)
            for whole, (aval, _) in zip(carry, results, strict=True)
        ]

    def cut(self, values: Sequence[Any], piece: Piece) -> list[Any]:
        return [
            piece.cut(x, how) if isinstance(how, Along) else x
            for x, (_, how) in zip(values, self.inputs, strict=True)
        ]

    def _cut_tangents(self, ds: Sequence[Any], wrt: Sequence[int], piece: Piece) -> list[Any]:
        hows = [self.inputs[i][1] for i in wrt]
        return [
            piece.cut(d, how) if isinstance(how, Along) else d
            for d, how in zip(ds, hows, strict=True)
        ]

    def body(self, values: Sequence[Any], piece: Piece) -> list[Any]:
        """Evaluate the equations of the loop on one piece."""
        return self.values(values, piece, [v for v, _ in self.split.outputs])

    def values(self, values: Sequence[Any], piece: Piece, wanted: Sequence[Any]) -> list[Any]:
        """Evaluate the equations of the loop on one piece; return the values of some variables."""
        eqns, how = self.split.program.eqns, self.split.how
        given = dict(zip(self.inputs, values, strict=True))
        made: dict[Any, Any] = {}

        def read(atom: Any, wanted: How) -> Any:
            if isinstance(atom, jec.Literal):
                return piece.cut(atom.val, wanted) if isinstance(wanted, Along) else atom.val
            inside = atom in made and wanted is not None and how.get(atom) == wanted
            return made[atom] if inside else given[atom, wanted]

        for i, way in self.split.ways.items():
            reads = zip(eqns[i].invars, way.inputs, strict=True)
            values = [read(v, h) for v, h in reads]
            outs = _rewrites.evaluated_on_piece(eqns[i], values, self._summed)
            if outs is None:
                outs = on_piece(eqns[i], way, values, piece)
            made.update(zip(eqns[i].outvars, outs, strict=True))
        return [made[v] for v in wanted]

    @functools.cached_property
    def _summed(self) -> set[int]:
        """The sizes of the arrays that the loop sums, in elements."""
        eqns = (self.split.program.eqns[i] for i in self.split.ways)
        return {e.invars[0].aval.size for e in eqns if e.primitive is lax.reduce_sum_p}

    # .. the loops

    def _evaluated(self, *values: Any) -> list[Any]:
        def step(piece: Piece) -> list[Any]:
            return self.body(self.cut(values, piece), piece)

        with jax.named_scope(self.name):
            near = self._not_before([v for v, _ in self.inputs], values)
            return self.over_pieces([(v.aval, how) for v, how in self.split.outputs], near, step)

    def _of_some(
        self, wrt: Sequence[int], moving: Sequence[bool], values: Sequence[Any], piece: Piece
    ) -> Any:
        """Return the outputs that have tangents, as a function of some of the inputs."""

        def some(*xs: Any) -> list[Any]:
            given = list(values)
            for i, x in zip(wrt, xs, strict=True):
                given[i] = x
            outs = self.body(given, piece)
            return [y for y, m in zip(outs, moving, strict=True) if m]

        return some

    def _tangents(
        self,
        primals: Sequence[Any],
        wrt: Sequence[int],
        tangents: Sequence[Any],
        moving: Sequence[bool],
    ) -> list[Any]:
        outputs = [o for o, m in zip(self.split.outputs, moving, strict=True) if m]
        if not outputs:
            return []
        hows = [how for _, how in outputs]
        entering = [self.inputs[i][1] for i in wrt]
        count = len(primals)

        def evaluate(*args: Any) -> list[Any]:
            xs, ds = args[:count], args[count:]

            def step(piece: Piece) -> list[Any]:
                values = self.cut(xs, piece)
                moved = self._cut_tangents(ds, wrt, piece)
                fn = self._of_some(wrt, moving, values, piece)
                return jax.jvp(fn, [values[i] for i in wrt], moved)[1]

            with jax.named_scope(self.name):
                near = self._not_before([self.inputs[i][0] for i in wrt], ds)
                changes = [(v.aval.to_tangent_aval(), how) for v, how in outputs]
                return self.over_pieces(changes, near, step)

        def transpose(xs: list[Any], cts: list[Any]) -> list[Any]:
            def step(piece: Piece) -> list[Any]:
                with jax.named_scope(_paths.RECOMPUTED):
                    values = self.cut(xs, piece)
                    fn = self._of_some(wrt, moving, values, piece)
                    ys, pull = _linearized(fn, [values[i] for i in wrt])
                given = [
                    _jax.zeros(jax.typeof(y))
                    if ct is None
                    else piece.cut(ct, how)
                    if isinstance(how, Along)
                    else ct
                    for y, ct, how in zip(ys, cts, hows, strict=True)
                ]
                return pull(given)

            with jax.named_scope(self.name):
                known = [(v, ct) for (v, _), ct in zip(outputs, cts, strict=True) if ct is not None]
                near = self._not_before([v for v, _ in known], [ct for _, ct in known])
                xs = self._copied_again(near, xs)
                back = [how or Partial.SUM for how in entering]
                gradients = [(jax.typeof(xs[i]), how) for i, how in zip(wrt, back, strict=True)]
                return self.over_pieces(gradients, near, step)

        return _jax.linear_map(evaluate, transpose, primals, tangents)

    def _copied_again(self, near: Any, xs: Sequence[Any]) -> list[Any]:
        """Return the inputs of the derivative's loop, with a barrier on the arguments."""
        held = {i: xs[i] for i, (v, _) in enumerate(self.inputs) if v in self.arguments}
        found = {} if near is None else _barriers.copied_again(near, held)
        return [found.get(i, x) for i, x in enumerate(xs)]

    # .. buffers that depend on data

    def _not_before(self, variables: Sequence[Any], values: Sequence[Any]) -> Any:
        """Do the same as `_nothing_yet`, in the precision in which compilers store the values.

        Args:
            variables: inputs or outputs of the loop.
            values: for each variable its value, tangent or cotangent.
        """
        return _nothing_yet(
            [
                x.astype(jnp.bfloat16) if v in self._multiplied and x.dtype == jnp.float32 else x
                for v, x in zip(variables, values, strict=True)
            ]
        )

    @functools.cached_property
    def _multiplied(self) -> set[Any]:
        """The inputs that only matrix products read, and the outputs that such products compute.

        XLA's TPU compiler stores the inputs, and the cotangents of the outputs, in bfloat16
        (`remat_kit._backend.facts.ROUNDS_PRODUCTS`). If a buffer depended on an entry of one in
        float32, it would store the whole array in float32 as well (jax 0.12). Other arrays are read
        as they are: an entry in bfloat16 may then be one more copy of the array.
        """
        eqns = [self.split.program.eqns[i] for i in self.split.ways]
        maker = {v: eqn for eqn in eqns for v in eqn.outvars}
        readers: dict[Any, list[Any]] = {}
        for eqn in eqns:
            for v in eqn.invars:
                if not isinstance(v, jec.Literal):
                    readers.setdefault(v, []).append(eqn)

        def is_made(v: Any) -> bool:
            eqn = None if isinstance(v, jec.Literal) else maker.get(v)
            if eqn is None:
                return False
            return _ops.is_rounding(eqn) or (_ops.is_view(eqn) and is_made(eqn.invars[0]))

        def is_read(v: Any) -> bool:
            return v in readers and all(
                _ops.is_rounding(eqn) or (_ops.is_view(eqn) and is_read(eqn.outvars[0]))
                for eqn in readers[v]
            )

        outputs = {v for v, _ in self.split.outputs if is_made(v)}
        return outputs | {v for v, _ in self.inputs if is_read(v)}


def loop_of(eqn: Any) -> PieceLoop | None:
    """Return the loop over pieces that an equation of a traced program runs.

    None for any other equation, and for a loop that `jax.vmap` has changed.
    """
    rule, around = _jax.rule_identity(eqn) or (None, ())
    owner = getattr(rule, "__self__", None)
    is_batched = any("batch" in str(wrapper) for wrapper in around)
    return owner if isinstance(owner, PieceLoop) and not is_batched else None


def _linearized(fn: Callable[..., list[Any]], xs: Sequence[Any]) -> tuple[list[Any], Any]:
    """Return the results of a function and its pullback, as `jax.vjp` does.

    The function is traced before it is evaluated. So the scope that is open now, which says that
    the evaluation recomputes activations, is not also on the equations of the pullback.
    """
    tree: Any = None

    def forward(*xs: Any) -> tuple[list[Any], list[Any]]:
        nonlocal tree
        ys, pull = jax.vjp(fn, *xs)
        residuals, tree = jax.tree.flatten(pull)
        return ys, residuals

    closed, shape = jax.make_jaxpr(forward, return_shape=True)(*map(jax.typeof, xs))
    outs = jec.jaxpr_as_fun(closed)(*xs)
    ys, residuals = jax.tree.unflatten(jax.tree.structure(shape), outs)
    return ys, jax.tree.unflatten(tree, residuals)


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _joined(
    hows: Sequence[How], carry: Sequence[Any], found: Sequence[Any], piece: Piece
) -> list[Any]:
    return [
        piece.put(whole, y, how)
        if isinstance(how, Along)
        else how.join(whole, y)
        if how is not None
        else y
        for how, whole, y in zip(hows, carry, found, strict=True)
    ]


# -- buffers that depend on data ------------------------------------------------------------------


def _nothing_yet(values: Sequence[Any]) -> Any:
    """Return a False that the compiler can only compute once these values are there.

    None if it would depend on nothing, because none of the values is a floating-point array.
    """
    known = None
    for x in values:
        if _is_float(jax.typeof(x)) and jnp.size(x):
            never = jnp.real(_jax.first_entry(x)).astype(jnp.float32) > np.inf
            known = never if known is None else known | never
    return known


def _buffer(aval: Any, how: How, near: Any) -> Any:
    """Return the value that the first piece of a result is joined with."""
    dtype = how.dtype(aval.dtype) if isinstance(how, Partial) else aval.dtype
    neutral: Any = 0
    if how in (Partial.MAX, Partial.MIN):
        low = how is Partial.MAX
        if dtype == jnp.bool_:
            neutral = not low
        elif _is_float(aval):
            neutral = -np.inf if low else np.inf
        else:
            info = jnp.iinfo(dtype)
            neutral = info.min if low else info.max
    value = jnp.asarray(neutral, dtype)
    if near is not None:
        value = jnp.where(near, jnp.zeros((), dtype), value) if neutral else near.astype(dtype)
    return _jax.broadcast_like(value, aval)
