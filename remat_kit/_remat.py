"""Apply a policy: to functions, Linen and NNX classes and instances, layers, and scan bodies.

`policy` is the one public entry. Whatever it decorates ends as a function of arrays that is
traced, cut into regions and run (`_region`). Without ``at=`` the whole call is one region; with it
every matching submodule call is one, found by its module path in the trace, inside scans,
branches and jitted functions too, so the model itself is not edited.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np

from remat_kit import _flax, _graph, _jax, _schedule
from remat_kit import _policy as algebra
from remat_kit._errors import PolicyError, UserError, unknown
from remat_kit._graph import Path, Program, evaluate
from remat_kit._policy import Policy
from remat_kit._region import run_region


def policy(
    what: Any,
    *,
    at: str | None = None,
    methods: Sequence[str] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    prevent_cse: bool | Sequence[Any] | None = None,
) -> Callable[[Any], Any]:
    """Return a decorator that keeps, offloads or recomputes residuals as ``what`` says.

    >>> import jax, jax.numpy as jnp
    >>> from remat_kit import policy
    >>> @policy("dots")
    ... def layer(x, w):
    ...     return jnp.sin(jnp.tanh(x @ w))
    >>> jax.grad(lambda w: layer(jnp.ones((2, 3)), w).sum())(jnp.ones((3, 3))).shape
    (3, 3)

    Args:
      what: a preset (``"dots"``), a policy or selector, the path of a recipe, a table from a
        configuration file, a policy callable of JAX, or None (the decorator then changes nothing).
      at: a pattern of module paths. Each matching submodule call is one region of its own
        (``"*/block_*"``); without it the decorated call is the region. ``*`` stays inside one
        component of a path, ``**`` does not.
      methods: the methods of a module class that become regions; ``__call__`` by default.
      static_argnums: positions of arguments that are not traced. What is no array (a bool, a
        string, a number, None, a function) is never traced, so this is seldom needed; it is for
        arrays that steer Python control flow.
      static_argnames: the same by name.
      prevent_cse: as in `jax.checkpoint`. By default it is chosen: True, but False in the body of
        a scan or a while loop, where the compiler cannot merge the two computations anyway and
        the barrier costs time.

    Returns:
      A decorator for a function, a Linen or NNX module class, an instance of one (bound to its
      parent or not), a method, or a scan body. Parameters keep their names and places.

    Raises:
      UnknownNameError: at the first trace, for a name, a module pattern or a primitive of the
        policy, or an ``at``, that the decorated function does not have; at once for a preset.
      PolicyError: ``what`` is no policy.

    What `jax.checkpoint`, `nn.remat` and `nnx.remat` do for one fixed kind of policy.
    """
    chosen = algebra.as_policy(what, call=f"policy({what!r})")
    if chosen is None:
        return lambda target: target
    application = _Application(
        policy=chosen,
        at=at,
        static_argnums=_indices(static_argnums),
        static_argnames=(static_argnames,)
        if isinstance(static_argnames, str)
        else tuple(static_argnames),
        prevent_cse=tuple(prevent_cse) if isinstance(prevent_cse, (list, tuple)) else prevent_cse,
        call=f"policy({_text(what)}{'' if at is None else f', at={at!r}'})",
    )
    return functools.partial(_decorate, application, methods=methods)


def name(x: Any, name: str) -> Any:
    """Give a value (or every leaf of a pytree) a name that `named` selects.

    >>> import jax.numpy as jnp
    >>> float(name(jnp.float32(1.0), "attn_out"))
    1.0

    The same as `jax.ad_checkpoint.checkpoint_name`, which models may use directly.
    """
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(x, name)


def _indices(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def _text(what: Any) -> str:
    text = repr(what)
    return text if len(text) <= 80 else text[:77] + "..."


# -- what is decorated ------------------------------------------------------------------------


def _decorate(app: _Application, target: Any, methods: Sequence[str] | None = None) -> Any:
    if _flax.is_linen_class(target) or _flax.is_nnx_class(target):
        app = dataclasses.replace(app, calls=[])
        if _flax.is_linen_class(target):
            found = _flax.lift_linen(target, app.run, methods)
        else:
            found = _flax.nnx_subclass(target, app.function, methods or ("__call__",))
        _decorated[found] = app
        return found
    if _flax.is_linen(target):
        return _linen_instance(app, target, methods)
    if _flax.is_nnx(target):
        cls = _flax.nnx_subclass(type(target), app.function, methods or ("__call__",))
        return _flax.nnx_like(target, cls)
    if methods is not None:
        raise UserError(
            f"`{app.call}`: methods={tuple(methods)} was given for {target!r}",
            hint="methods= is for a module class or instance; leave it out for a function",
        )
    if not callable(target):
        raise UserError(
            f"`{app.call}`: {target!r} cannot be decorated",
            hint="decorate a function, a Flax module class or an instance of one",
        )
    return app.function(target)


def _linen_instance(app: _Application, module: Any, methods: Sequence[str] | None) -> Any:
    if not _flax.is_bound(module):
        return _flax.linen_like(module, _flax.lift_linen(type(module), app.run, methods))

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    lifted = _flax.lift_linen(call, app.run)
    return functools.partial(lifted, module)


@dataclasses.dataclass(frozen=True)
class _Application:
    """A policy and the way it is applied."""

    policy: Policy
    at: str | None
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    prevent_cse: Any
    call: str
    calls: list[bool] = dataclasses.field(default_factory=list, compare=False)  # empty until one

    def function(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fn`` with its calls cut into regions; its arguments may hold Flax modules."""

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if args and _flax.is_linen(args[0]):
                return _flax.lift_linen(fn, self.run)(*args, **kwargs)
            if _flax.holds_nnx((args, kwargs)):
                return _flax.run_nnx(self.run, fn, args, kwargs)
            return self.run(fn, args, kwargs)

        wrapped.__dict__[_APPLIED] = self
        return wrapped

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of arrays, cut into regions."""
        if not self.calls:
            self.calls.append(True)
        pure, values = self._arrays_only(fn, args, kwargs)
        loop = _jax.inside_loop()
        base = _graph.join_scopes(_jax.current_scopes())
        with _flax.nnx_scopes():
            closed, shapes = jax.make_jaxpr(pure, return_shape=True)(*values)
        program = Program.of(closed, base)
        self._check(program)
        flat = _Cutter(self, loop).run(program, values)
        return jax.tree.unflatten(jax.tree.structure(shapes), flat)

    def _arrays_only(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Close ``fn`` over everything that is not to be traced."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        static = self._static_leaves(fn, args, kwargs)
        traced = [_is_array(x) and not s for x, s in zip(leaves, static, strict=True)]

        @functools.wraps(fn)
        def pure(*arrays: Any) -> Any:
            given = iter(arrays)
            full = [next(given) if t else x for x, t in zip(leaves, traced, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, full)
            return fn(*args, **kwargs)

        return pure, [x for x, t in zip(leaves, traced, strict=True) if t]

    def _static_leaves(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[bool]:
        positions = {self._position(i, len(args)) for i in self.static_argnums}
        names = set(self.static_argnames)
        if names:
            positions |= _positions(fn, names)
        marked_args = [self._marked(x, i in positions, f"argument {i}") for i, x in enumerate(args)]
        marked_kwargs = {k: self._marked(x, k in names, f"{k!r}") for k, x in kwargs.items()}
        return jax.tree.leaves((tuple(marked_args), marked_kwargs))

    def _position(self, index: int, count: int) -> int:
        if not -count <= index < count:
            raise UserError(
                f"`{self.call}`: static_argnums={self.static_argnums}, but the call has "
                f"{count} positional arguments",
                hint="count from 0, without `self`; keyword arguments go into static_argnames",
            )
        return index % count

    def _marked(self, x: Any, static: bool, where: str) -> Any:
        if static and any(isinstance(leaf, _jax.Tracer) for leaf in jax.tree.leaves(x)):
            raise UserError(
                f"`{self.call}`: {where} is static, but its value is being traced",
                hint="mark it static in the enclosing jit or grad too, or do not mark it here",
            )
        return jax.tree.map(lambda _: static, x)

    def _check(self, program: Program) -> None:
        if _checkable(self.policy):
            values = _graph.values(program, full=False)
            algebra.check(self.policy, values, call=self.call)


_decorated: weakref.WeakKeyDictionary[type, _Application] = weakref.WeakKeyDictionary()


def uncalled() -> dict[type, str]:
    """Return the decorated module classes that nothing has called so far, with their decorators."""
    return {c: f"remat_kit.{app.call}" for c, app in _decorated.items() if not app.calls}


def applied(fn: Any) -> tuple[Policy | None, str | None]:
    """Return the policy that `policy` applied to a function last, and its ``at``; None for none.

    >>> applied(policy("dots", at="*/block_*")(lambda x: x)), applied(len)
    ((save(dots), '*/block_*'), (None, None))
    """
    found = getattr(fn, _APPLIED, None)
    return (None, None) if found is None else (found.policy, found.at)


_APPLIED = "__remat_kit_policy__"


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic, _jax.Tracer))


def _positions(fn: Callable[..., Any], names: set[str]) -> set[int]:
    try:
        parameters = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return set()
    return {i for i, p in enumerate(parameters) if p in names}


@functools.cache
def _checkable(policy: Policy) -> bool:
    kinds = (algebra.Named, algebra.Module, algebra.Primitive)
    return isinstance(policy, algebra.Segments) or any(
        isinstance(leaf, kinds) for leaf in policy.leaves()
    )


@functools.cache
def _reads_sources(policy: Policy) -> bool:
    return any(isinstance(leaf, (algebra.Source, algebra.Where)) for leaf in policy.leaves())


# -- cutting a program into regions -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A run of consecutive equations; ``block`` is the module path that ``at`` matched, or None."""

    eqns: tuple[Any, ...]
    block: str | None


class _Cutter:
    """Runs a program with the regions that one application of a policy asks for."""

    def __init__(self, app: _Application, loop: bool):
        self.app = app
        self.loop = loop
        self.blocks = 0  # blocks met so far, in the order in which they run
        structure = app.policy if isinstance(app.policy, algebra.Structural) else None
        self.structure = structure
        self.keep = app.policy if structure is None else structure.keep

    # .. the two ways to begin

    def run(self, program: Program, args: Sequence[Any]) -> list[Any]:
        if isinstance(self.structure, algebra.Planned):
            return self.planned(program, args, self.structure)
        if self.app.at is not None:
            if not any(True for _ in self.matches(program.eqns, program.base)):
                raise self.nothing_at(program)
            return self.within(program, args)
        if isinstance(self.structure, (algebra.Uniform, algebra.Block, algebra.Nested)):
            return self.scans_of(program, args)
        return self.region(program, args)

    def planned(self, program: Program, args: Sequence[Any], plan: algebra.Planned) -> list[Any]:
        if self.app.at is not None:
            raise UserError(
                f"`{self.app.call}`: a plan says itself where its regions are",
                hint="leave at= out",
            )
        program = _graph.without_region_boundaries(program)
        _schedule.check(plan.program, program, strict=plan.strict, call=self.app.call)
        cse = not self.loop if self.app.prevent_cse is None else self.app.prevent_cse
        stretches = [stretch for line in plan.lines for stretch in _schedule.parse(line)]
        return _schedule.run(program, stretches, args, prevent_cse=cse)

    def nothing_at(self, program: Program) -> Exception:
        paths = {"/".join(p) for p in _paths(program.eqns, program.base)}
        everywhere = _paths(program.eqns, program.base, enter=None)
        if any(self.block_of(path) is not None for path in everywhere):
            return PolicyError(
                f"`{self.app.call}`: what matches lies inside a checkpoint region, a shard_map or "
                "a function with its own derivative, which at= does not enter",
                hint="take the policy or nn.remat off that is there, or decorate the class of the "
                "module itself",
            )
        similar = algebra.similar_paths(self.app.at or "", paths)
        return unknown("module", self.app.at or "", similar, call=self.app.call)

    def matches(self, eqns: Sequence[Any], base: Path) -> Iterator[str]:
        for path in _paths(eqns, base):
            found = self.block_of(path)
            if found is not None:
                yield found

    def block_of(self, path: Path) -> str | None:
        return None if self.app.at is None else algebra.prefix_matching(self.app.at, "/".join(path))

    # .. one region

    def region(
        self, program: Program, args: Sequence[Any], keep: Policy | None = None
    ) -> list[Any]:
        if isinstance(self.structure, algebra.Segments) and keep is None:
            return self.segments(program, args, self.structure.names)
        chosen = self.keep if keep is None else keep
        cse = self.app.prevent_cse
        if cse is None:
            cse = not self.loop
        full = _reads_sources(chosen)
        return run_region(program, chosen, args, prevent_cse=cse, full=full)

    def segments(self, program: Program, args: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """Regions between checkpoint names; what follows the last name is left alone."""
        pieces: list[_Piece] = []
        run: list[Any] = []
        for eqn in program.eqns:
            run.append(eqn)
            if _graph.checkpoint_name_of(eqn) in names:
                pieces.append(_Piece(tuple(run), block="segment"))
                run = []
        pieces.append(_Piece(tuple(run), block=None))
        return self.pieces(program, pieces, args, lambda p, a: self.region(p, a, self.keep))

    # .. one region per block

    def within(self, program: Program, args: Sequence[Any]) -> list[Any]:
        """Evaluate a program with a region for each block that ``at`` matches."""
        pieces = list(self.split(program))
        if isinstance(self.structure, algebra.Uniform):
            pieces = _grouped(pieces, self.structure.n)
        elif isinstance(self.structure, algebra.Nested):
            count = sum(p.block is not None for p in pieces)
            size = self.structure.group or max(1, math.isqrt(max(count, 1)))
            return self.pieces(program, _grouped(pieces, size), args, self.nest)
        return self.pieces(program, pieces, args, self.one_block)

    def one_block(self, program: Program, args: Sequence[Any]) -> list[Any]:
        self.blocks += 1
        if isinstance(self.structure, algebra.Block) and self.blocks > self.structure.n:
            return evaluate(program, args)
        return self.region(program, args)

    def nest(self, program: Program, args: Sequence[Any]) -> list[Any]:
        """One region around a group of blocks, each of them a region again."""

        def blocks(*args: Any) -> list[Any]:
            return self.pieces(program, list(self.split(program)), args, self.region)

        return self.region(_traced(blocks, args, program.base), args, _NOTHING)

    def split(self, program: Program) -> Iterator[_Piece]:
        run: list[Any] = []
        current: str | None = None
        for eqn in program.eqns:
            block = self.block_of(program.path(eqn))
            if block != current and run:
                yield _Piece(tuple(run), current)
                run = []
            current = block
            run.append(eqn)
        if run:
            yield _Piece(tuple(run), current)

    def pieces(
        self,
        program: Program,
        pieces: Sequence[_Piece],
        args: Sequence[Any],
        region: Callable[[Program, Sequence[Any]], list[Any]],
    ) -> list[Any]:
        env = dict(zip(program.invars, (*program.consts, *args), strict=True))
        later = _used_later(pieces, program.outvars)

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jec.Literal) else env[atom]

        for piece, wanted in zip(pieces, later, strict=True):
            if piece.block is None:
                for eqn in piece.eqns:
                    outs = self.step(eqn, [read(v) for v in eqn.invars], program.base)
                    env.update(zip(eqn.outvars, outs, strict=True))
            else:
                part = _graph.part(piece.eqns, wanted, program.base)
                outs = region(part, [env[v] for v in part.invars])
                env.update(zip(part.outvars, outs, strict=True))
        return [read(v) for v in program.outvars]

    # .. blocks inside other equations

    def step(self, eqn: Any, values: list[Any], base: Path) -> list[Any]:
        """Evaluate an equation outside every block; blocks may be inside it."""
        path = _graph.module_path(eqn, base)
        enter = _ENTER.get(eqn.primitive.name)
        inside = (b for body in _graph.bodies(eqn) for b in self.matches(body.jaxpr.eqns, path))
        if enter is None or next(inside, None) is None:
            return _jax.bind(eqn, values)
        with _scoped(path[len(base) :]):
            return enter(self, eqn, values, path)

    def scan(self, eqn: Any, values: list[Any], path: Path) -> list[Any]:
        return _Scan(self, eqn, values, path).run()

    def cond(self, eqn: Any, values: list[Any], path: Path) -> list[Any]:
        def branch(jaxpr: Any) -> Callable[..., Any]:
            return lambda *ops: self.within(Program.of(jaxpr, path), ops)

        index, *operands = values
        return jax.lax.switch(index, [branch(j) for j in eqn.params["branches"]], *operands)

    def jit(self, eqn: Any, values: list[Any], path: Path) -> list[Any]:
        inner = Program.of(eqn.params["jaxpr"], path)
        traced = jax.make_jaxpr(lambda *a: self.within(inner, a))(*map(jax.typeof, values))
        return _jax.bind(eqn.replace(params={**eqn.params, "jaxpr": traced}), values)

    # .. structural policies on a function that is one scan, without ``at``

    def scans_of(self, program: Program, args: Sequence[Any]) -> list[Any]:
        scans = [e for e in program.eqns if e.primitive.name == "scan"]
        if not scans:
            raise PolicyError(
                f"`{self.app.call}`: there are no blocks to group in one call",
                hint="apply it to the whole model or loss with at='*/block_*', or to a scan",
            )

        def step(eqn: Any, values: list[Any]) -> list[Any]:
            path = program.path(eqn)
            if eqn.primitive.name != "scan":
                return _jax.bind(eqn, values)
            with _scoped(path[len(program.base) :]):
                return _Scan(self, eqn, values, path, whole=True).run()

        return evaluate(program, args, step)


_ENTER: dict[str, Callable[..., list[Any]]] = {
    "scan": _Cutter.scan,
    "cond": _Cutter.cond,
    "jit": _Cutter.jit,
    "pjit": _Cutter.jit,
}
_NOTHING = algebra.save(algebra.nothing)


class _Scan:
    """A scan run again, in one or several loops, with regions in its body."""

    def __init__(
        self, cutter: _Cutter, eqn: Any, values: list[Any], path: Path, *, whole: bool = False
    ):
        consts, carried = _jax.scan_arity(eqn)
        self.cutter = cutter
        self.consts = values[:consts]
        self.carry = tuple(values[consts : consts + carried])
        self.xs = tuple(values[consts + carried :])
        self.length: int = eqn.params["length"]
        self.reverse: bool = eqn.params["reverse"]
        self.unroll = eqn.params["unroll"]
        self.program = Program.of(eqn.params["jaxpr"], path)
        self.whole = whole

    def run(self) -> list[Any]:
        loop, self.cutter.loop = self.cutter.loop, True
        if self.reverse:
            self.xs = jax.tree.map(lambda x: jnp.flip(x, 0), self.xs)
        try:
            carry, ys = self.loops()
        finally:
            self.cutter.loop = loop
        if self.reverse:
            ys = jax.tree.map(lambda y: jnp.flip(y, 0), ys)
        return [*carry, *ys]

    def loops(self) -> tuple[Any, Any]:
        structure = self.cutter.structure
        if isinstance(structure, algebra.Uniform):
            return self.grouped(structure.n, self.plain)
        if isinstance(structure, algebra.Nested):
            return self.grouped(structure.group or math.isqrt(self.length), self.regions)
        if isinstance(structure, algebra.Block):
            first = min(max(structure.n - self.cutter.blocks, 0), self.length)
            self.cutter.blocks += self.length
            return self.chained([(self.regions, 0, first), (self.plain, first, self.length)])
        return self.loop(self.regions, self.carry, self.xs, self.length)

    def plain(self, args: Sequence[Any]) -> list[Any]:
        return evaluate(self.program, args)

    def regions(self, args: Sequence[Any]) -> list[Any]:
        if self.whole:
            return self.cutter.region(self.program, args, self.cutter.keep)
        cutter = _Cutter(dataclasses.replace(self.cutter.app, policy=self.cutter.keep), loop=True)
        return cutter.within(self.program, args)

    def loop(self, body: Callable[..., Any], carry: Any, xs: Any, length: int) -> tuple[Any, Any]:
        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            outs = body([*self.consts, *carry, *x])
            return tuple(outs[: len(carry)]), tuple(outs[len(carry) :])

        return jax.lax.scan(step, carry, xs, length=length, unroll=min(self.unroll, length))

    def grouped(self, size: int, body: Callable[..., Any]) -> tuple[Any, Any]:
        """Groups of ``size`` iterations, each group one region; the last may be shorter."""
        groups, rest = divmod(self.length, size)
        done = groups * size

        def group(length: int) -> Callable[[Any, Any], tuple[Any, Any]]:
            def run(carry: Any, xs: Any) -> tuple[Any, Any]:
                args, tree = jax.tree.flatten((self.consts, carry, xs))

                def inner(*args: Any) -> Any:
                    consts, carry, xs = jax.tree.unflatten(tree, args)
                    outer, self.consts = self.consts, consts
                    try:
                        return self.loop(body, carry, xs, length)
                    finally:
                        self.consts = outer

                shapes = jax.eval_shape(inner, *args)
                program = _traced(lambda *a: jax.tree.leaves(inner(*a)), args, self.program.base)
                keep = self.cutter.keep if body == self.plain else _NOTHING
                flat = self.cutter.region(program, args, keep)
                return jax.tree.unflatten(jax.tree.structure(shapes), flat)

            return run

        head = jax.tree.map(lambda x: x[:done].reshape(groups, size, *x.shape[1:]), self.xs)
        carry, ys = jax.lax.scan(group(size), self.carry, head, length=groups)
        ys = jax.tree.map(lambda y: y.reshape(done, *y.shape[2:]), ys)
        if rest:
            carry, tail = group(rest)(carry, jax.tree.map(lambda x: x[done:], self.xs))
            ys = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), ys, tail)
        return carry, ys

    def chained(self, parts: Sequence[tuple[Callable[..., Any], int, int]]) -> tuple[Any, Any]:
        """Several loops after one another, over slices of the iterations."""
        carry, stacked = self.carry, []
        for body, start, stop in parts:
            if stop > start:
                xs = jax.tree.map(lambda x: x[start:stop], self.xs)  # noqa: B023
                carry, ys = self.loop(body, carry, xs, stop - start)
                stacked.append(ys)
        return carry, jax.tree.map(lambda *y: jnp.concatenate(y), *stacked)


# -- parts of programs ------------------------------------------------------------------------


def _traced(fn: Callable[..., Any], args: Sequence[Any], base: Path) -> Program:
    return Program.of(jax.make_jaxpr(fn)(*map(jax.typeof, args)), base)


def _scoped(parts: Sequence[str]) -> Any:
    return jax.named_scope("/".join(parts)) if parts else contextlib.nullcontext()


def _paths(eqns: Sequence[Any], base: Path, *, enter: Any = ()) -> Iterator[Path]:
    """Yield module paths, inside the bodies that ``at=`` enters too; None for those of all."""
    for eqn in eqns:
        path = _graph.module_path(eqn, base)
        yield path
        if enter is None or eqn.primitive.name in _ENTER:
            for body in _graph.bodies(eqn):
                yield from _paths(body.jaxpr.eqns, path, enter=enter)


def _used_later(pieces: Sequence[_Piece], outvars: Sequence[Any]) -> list[set[Any]]:
    """For each piece, the variables that later pieces or the outputs read."""
    later: list[set[Any]] = []
    used = {v for v in outvars if not isinstance(v, jec.Literal)}
    for piece in reversed(pieces):
        later.append(set(used))
        used |= {v for e in piece.eqns for v in e.invars if not isinstance(v, jec.Literal)}
    return later[::-1]


def _grouped(pieces: Sequence[_Piece], size: int) -> list[_Piece]:
    """Merge each ``size`` consecutive blocks, and what stands between them, into one piece."""
    out: list[_Piece] = []
    group: list[_Piece] = []
    count = 0
    for piece in pieces:
        if piece.block is None and not group:
            out.append(piece)
            continue
        group.append(piece)
        count += piece.block is not None
        if count == size:
            out.append(_merged(group))
            group, count = [], 0
    tail: list[_Piece] = []
    while group and group[-1].block is None:
        tail.append(group.pop())
    return [*out, *([_merged(group)] if group else []), *reversed(tail)]


def _merged(group: Sequence[_Piece]) -> _Piece:
    return _Piece(tuple(e for p in group for e in p.eqns), block=group[0].block)
