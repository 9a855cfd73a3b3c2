"""Compare a decorated program with the undecorated one.

Both are traced, and the two traces are evaluated operation by operation: `interpreted` enters
jitted functions, loops, branches, rules and checkpoint regions, so that XLA never fuses two
operations, and what is recomputed must be *bitwise* what it was. That holds where the whole
program is one region and is differentiated once. Several regions add up the cotangents of a value
that more than one of them reads in another order, as regions of `jax.checkpoint` do, and so does
the derivative of a derivative, which reads values of the first one's passes. Under `jit` XLA fuses
differently. There the two agree within ``ROUNDING`` units of the dtype's precision of the largest
value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from interpreter import interpreted as interpreted
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from programs import Program, scale_of

import remat_kit
from remat_kit import _jax
from remat_kit._apply import divide as _divide
from remat_kit._policy import divisions as _divisions
from remat_kit._policy import schedule as _schedule
from remat_kit._program import program as _program
from remat_kit._program.pieces.split import Split

# Programs have up to a few hundred operations; each may round differently by one unit, and an
# ill-conditioned one makes more of it.
ROUNDING = 256

IS_OLD = jax.__version_info__ < (0, 11)
FLAGS = ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3", "jax_remat_barrier_no_cotangents")


@contextlib.contextmanager
def flagged(flags: Sequence[str]) -> Iterator[None]:
    """Switch some of JAX's flags on, those that this release has."""
    there = [f for f in flags if f in jax.config.values]
    before = {f: getattr(jax.config, f) for f in there}
    for flag in there:
        jax.config.update(flag, True)
    try:
        yield
    finally:
        for flag, value in before.items():
            jax.config.update(flag, value)


# -- what is done to a program -------------------------------------------------------------------

Fn = Callable[[Any, Any, Any], Any]


def loss_of(fn: Fn, used: Sequence[int]) -> Fn:
    def loss(x: Any, w: Any, rest: Any) -> Any:
        ys = fn(x, w, rest)["ys"]
        return sum(jnp.sum(jnp.real(ys[i % len(ys)]) * (i + 1)) for i in set(used))

    return loss


def _value(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    return fn(x, w, rest)


def _gradient(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    return jax.value_and_grad(loss, (0, 1))(x, w, rest)


def _gradient_of_one(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    return jax.grad(loss, 1)(x, w, rest)


def _pullback(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    """Random cotangents for every output, twice through one pullback."""
    ys, pull = jax.vjp(lambda x, w: fn(x, w, rest)["ys"], x, w)
    cts = tuple(jnp.sin(3 * x + i) for i in range(len(ys)))
    return pull(cts), pull(tuple(2 * ct for ct in cts))


def _jvp(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    return jax.jvp(lambda x, w: fn(x, w, rest)["ys"], (x, w), (jnp.cos(w), jnp.sin(x)))


def _jvp_of_one(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    return jax.jvp(lambda x: fn(x, w, rest)["ys"], (x,), (jnp.cos(w),))


def _linearized(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    ys, linear = jax.linearize(lambda w: fn(x, w, rest)["ys"], w)
    return ys, linear(x), linear(w)


def _slopes(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    """Several tangents at once, as `jax.jacfwd` has them: the value must not be mapped."""

    def along(dx: Any) -> Any:
        return jax.jvp(lambda x: fn(x, w, rest)["ys"], (x,), (dx,))

    return jax.vmap(along, out_axes=(None, 0))(jnp.stack([jnp.cos(w), jnp.sin(x)]))


def _unrelated_jvp(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    """The program's arguments have no tangent."""
    return jax.jvp(lambda t: (t * 2, fn(x, w, rest)["ys"]), (1.0,), (1.0,))


def _gradient_of_gradient(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    def penalty(x: Any, w: Any) -> Any:
        dx, dw = jax.grad(loss, (0, 1))(x, w, rest)
        return jnp.sum(jnp.real(jnp.sin(dx))) + jnp.sum(jnp.real(dw * dw.conj()))

    return jax.grad(penalty, (0, 1))(x, w)


def _mixed(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    """The derivative by one argument of the derivative by the other."""
    return jax.grad(lambda w: jnp.sum(jnp.real(jnp.sin(jax.grad(loss)(x, w, rest)))))(w)


def _jvp_of_gradient(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    return jax.jvp(lambda x: jax.grad(loss, (0, 1))(x, w, rest), (x,), (jnp.cos(w),))


def _gradient_of_jvp(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    def slope(w: Any) -> Any:
        _, out = jax.jvp(lambda x: loss(x, w, rest), (x,), (jnp.cos(x),))
        return jnp.real(out)

    return jax.grad(slope)(w)


def _jvp_of_slopes(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    return jax.jvp(lambda w: _slopes(fn, loss, x, w, rest), (w,), (jnp.cos(x),))


def _gradient_of_slopes(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    def total(x: Any, w: Any) -> Any:
        made = jax.tree.leaves(_slopes(fn, loss, x, w, rest))
        return sum(jnp.sum(jnp.real(jnp.sin(y))) for y in made)

    return jax.grad(total, (0, 1))(x, w)


def _accumulated(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    """Gradients added up in a loop."""

    def step(total: Any, x: Any) -> Any:
        value, dw = jax.value_and_grad(loss, 1)(x, w, rest)
        return total + dw, value

    return lax.scan(step, jnp.zeros_like(w), jnp.stack([x, w]))


def _over_loop(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    """The gradient of a loop over the program."""

    def total(x: Any, w: Any) -> Any:
        def step(x: Any, _: Any) -> Any:
            return jnp.tanh(fn(x, w, rest)["ys"][0]), None

        return jnp.sum(jnp.real(lax.scan(step, x, None, length=2)[0]))

    return jax.grad(total, (0, 1))(x, w)


def _trained(fn: Fn, loss: Fn, x: Any, w: Any, rest: Any) -> Any:
    """Two steps, the second with what the first one made."""
    for _ in range(2):
        dx, dw = jax.grad(loss, (0, 1))(x, w, rest)
        x, w = x - 0.1 * jnp.conj(dx), w - 0.1 * jnp.conj(dw)
    return x, w


TRANSFORMS: dict[str, tuple[str, Callable[..., Any]]] = {
    "value": ("value", _value),
    "gradient": ("gradient", _gradient),
    "gradient of one": ("gradient", _gradient_of_one),
    "pullback": ("gradient", _pullback),
    "accumulated": ("gradient", _accumulated),
    "over a loop": ("gradient", _over_loop),
    "trained": ("gradient", _trained),
    "jvp": ("jvp", _jvp),
    "jvp of one": ("jvp", _jvp_of_one),
    "linearized": ("jvp", _linearized),
    "slopes": ("jvp", _slopes),
    "unrelated jvp": ("value", _unrelated_jvp),
    "gradient of gradient": ("gradient", _gradient_of_gradient),
    "mixed": ("gradient", _mixed),
    "jvp of gradient": ("gradient", _jvp_of_gradient),
    "gradient of jvp": ("second", _gradient_of_jvp),
    "jvp of slopes": ("jvp", _jvp_of_slopes),
    "gradient of slopes": ("second", _gradient_of_slopes),
}
SECOND_ORDER = (
    "gradient of gradient",
    "mixed",
    "jvp of gradient",
    "gradient of jvp",
    "jvp of slopes",
    "gradient of slopes",
)
MODES = ("traced", "vmap", "eager", "jit")


# -- how a policy is applied ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Application:
    """A policy and where it is put.

    Attributes:
        policy: what `remat_kit.policy` takes; ``"plan:2"`` for the plan of a point of the
            frontier, and from ``"plan:8"`` on of one with pieces if there is any; ``"schedule:7"``
            for a random schedule; ``"pieces:7"`` for a random schedule of the program with random
            segments in pieces.
        at: as for `remat_kit.policy`.
        prevent_cse: as for `remat_kit.policy`.
    """

    policy: Any
    at: str | None = None
    prevent_cse: bool | None = None

    @property
    def is_plan(self) -> bool:
        """Whether the policy is a schedule of one program."""
        kinds = ("plan:", "schedule:", "pieces:")
        return isinstance(self.policy, str) and self.policy.startswith(kinds)

    @property
    def whole(self) -> bool:
        """Whether the program becomes one region."""
        return self.at is None and not self.is_plan

    def put_on(self, fn: Fn, program: Program, args: Sequence[Any]) -> Fn:
        what = self.policy
        if self.is_plan:
            kind, _, number = what.partition(":")
            if kind == "plan":
                return _planned(fn, program, args, int(number))
            return _scheduled(fn, args, int(number), in_pieces=kind == "pieces")
        return remat_kit.policy(what, at=self.at, prevent_cse=self.prevent_cse)(fn)


def _flat(fn: Fn, args: Sequence[Any]) -> tuple[Any, Callable[..., Any], list[Any]]:
    """Return a function as one of arrays alone, which is what a plan is for."""
    leaves, tree = jax.tree.flatten(args)
    is_array = [isinstance(x, jax.Array) for x in leaves]
    given = [x for x, a in zip(leaves, is_array, strict=True) if a]

    def of_arrays(*arrays: Any) -> Any:
        rest = iter(arrays)
        full = [next(rest) if a else x for x, a in zip(leaves, is_array, strict=True)]
        return fn(*jax.tree.unflatten(tree, full))

    return tree, of_arrays, given


IN_PIECES = 8  # the plans from this number on may run segments in pieces


def _planned(fn: Fn, program: Program, args: Sequence[Any], number: int) -> Fn:
    _, of_arrays, given = _flat(loss_of(fn, program.used), args)
    how = {"offload": True, "target": "tpu-v5e"} if number % 3 == 2 else {}
    if number >= IN_PIECES:
        how = {"pieces": True}
    found = remat_kit.frontier(of_arrays, *given, argnums=(0, 1), **how)
    points = [p for p in found.points if p.graph is not None] or found.points
    plan = found.policy(points[number % len(points)])
    loss = _of_arrays(plan, loss_of(fn, program.used))
    return lambda x, w, rest: {"ys": (loss(x, w, rest),), "count": rest["n"], "none": None}


def _of_arrays(plan: Any, fn: Fn) -> Fn:
    """The function under a plan, which is for a program whose numbers are constants."""

    def planned(*args: Any) -> Any:
        _, of_arrays, given = _flat(fn, args)
        return remat_kit.policy(plan)(of_arrays)(*given)

    return planned


def _scheduled(fn: Fn, args: Sequence[Any], seed: int, *, in_pieces: bool) -> Fn:
    _, of_arrays, given = _flat(fn, args)
    flat = _program.flat_program(jax.make_jaxpr(of_arrays)(*given))
    rng = np.random.default_rng(seed)
    described, divisions = _schedule.describe(flat), []
    if in_pieces:
        divisions = _random_divisions(flat, rng)
        flat = _divide.divided(flat, divisions).program
    lines = *_divisions.lines(divisions), *_schedule.lines(_random_schedule(flat, rng))
    return _of_arrays(remat_kit.planned(described, *lines), fn)


def _random_divisions(flat: Any, rng: Any) -> list[Any]:
    """Return segments that can run in pieces, around some of the program's values."""
    found, start = [], 0
    for i, eqn in enumerate(flat.eqns):
        for j, v in enumerate(eqn.outvars):
            shape = getattr(v.aval, "shape", ())
            if i < start or not shape or rng.random() < 0.3:
                continue
            axis = int(rng.integers(0, len(shape)))
            low = int(rng.integers(start, i + 1))
            high = int(rng.integers(i + 1, min(i + 8, len(flat.eqns)) + 1))
            part = _divide.segment_of(flat, low, high)
            if isinstance(_divide.split_of(part, (i - low, j), axis), Split):
                pieces = int(rng.integers(2, shape[axis] + 1))
                found.append(_divisions.Division(low, high, pieces, (i, j), axis))
                start = high
    return found


def _random_schedule(flat: Any, rng: Any) -> list[Any]:
    count = len(flat.eqns)
    cuts = sorted({0, count, *rng.integers(0, count + 1, rng.integers(0, 4)).tolist()})
    read = {id(v) for eqn in flat.eqns for v in eqn.invars} | {id(v) for v in flat.outvars}

    def places(start: int, stop: int) -> list[tuple[int, int]]:
        made = ((i, j, v) for i in range(start, stop) for j, v in enumerate(flat.eqns[i].outvars))
        found = [(i, j) for i, j, v in made if id(v) in read]
        return [p for p in found if rng.random() < 0.3]

    def segment(start: int, stop: int, depth: int) -> Any:
        draw = rng.random()
        if draw < 0.2 and depth == 0:
            return _schedule.Segment(start, stop, plain=True)
        saved = places(start, stop)
        if draw < 0.5 and stop - start > 1 and depth < 2:
            middle = int(rng.integers(start + 1, stop))
            parts = ((start, middle), (middle, stop))
            inside = tuple(segment(*part, depth + 1) for part in parts)
            # A region around others keeps what one of them keeps.
            named = (p for part in inside for p in sorted(part.save))
            kept = frozenset(p for p in named if rng.random() < 0.5)
            return _schedule.Segment(start, stop, save=kept, inside=inside)
        away = frozenset(saved[::2] if draw > 0.9 else ())
        kept = frozenset(saved) - away
        return _schedule.Segment(start, stop, save=kept, offload=away)

    return [segment(a, b, 0) for a, b in itertools.pairwise(cuts)]


# -- the comparison ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One program, one policy, what is done to it and how it runs. ``case.check()`` compares."""

    program: Program
    application: Application
    transform: str = "gradient"
    mode: str = "traced"
    flags: tuple[str, ...] = ()

    def check(self) -> bool:
        """Raise AssertionError where the decorated program is not the undecorated one.

        Returns whether JAX can run the undecorated program at all.
        """
        if IS_OLD and self.is_beyond_old_jax():
            return False
        with jax.enable_x64(self.program.dtype in ("float64", "complex128")):
            args = self.program.arguments()
            plan = isinstance(self.application.policy, str)
            plan = plan and self.application.policy.startswith("plan:")
            fn = as_loss(self.program) if plan else self.program.fn
            try:
                expected = self.run(fn, args)
            except Exception:
                return False
            try:
                with flagged(self.flags):
                    decorated = self.application.put_on(self.program.fn, self.program, args)
                got = self.run(decorated, args)
            except (remat_kit.UnknownNameError, remat_kit.NotDifferentiableError):
                # The policy names what the program does not have, or a plan is asked for a loss
                # of complex numbers.
                return False
            except remat_kit.PolicyError as error:
                # A program that takes a gradient itself and adds it to an argument may be a whole
                # step. A policy on its parts is then an error, unless something differentiates it.
                is_step = "takes a gradient itself" in str(error)
                is_step = is_step and TRANSFORMS[self.transform][0] == "value"
                if is_step and not self.application.whole:
                    return False
                # All modules of this name may be inside checkpoint regions of the program.
                if self.application.at == "**/inner" and "at= does not enter" in str(error):
                    return False
                raise
            except Exception as error:
                if self.selects_between_memories() and "memory_space" in str(error):
                    return False
                if all(runs(lambda: self.run(like, args)) for like in self.like_jax(fn)):  # noqa: B023
                    raise
                return False
            bitwise = self.application.whole and self.mode in ("traced", "vmap")
            bitwise = bitwise and self.transform not in SECOND_ORDER
            # In a region that keeps something an inner jit is taken apart, and the cotangents of
            # what it reads twice are no longer summed up inside of it first.
            bitwise = bitwise and "jit" not in self.program.names()
            try:
                self.compare(expected, got, bitwise)
            except AssertionError:
                if not bitwise and not self.is_stable(fn, args, expected):
                    return False
                # With names that are saved, JAX itself may have another second derivative of a
                # function with a backward rule of its own there.
                if self.transform in SECOND_ORDER and "jax_remat3" in self.flags:
                    saving = checkpointed(
                        fn, jax.checkpoint_policies.save_only_these_names("alpha")
                    )
                    if not runs(lambda: self.compare(expected, self.run(saving, args), bitwise)):
                        return False
                # `jax_remat3` calls backward passes with zeros that JAX otherwise never makes.
                if runs(lambda: self.compare(expected, self.run(checkpointed(fn), args), bitwise)):
                    if "jax_remat3" not in self.flags:
                        raise
                    # There the value of a region is the one that JAX's derivative computes.
                    # That of `cumlogsumexp`, for one, adds up in another order.
                    try:
                        self.compare(self.run(differentiated(fn), args), got, bitwise)
                    except AssertionError:
                        # The derivative of the derivative of `prod` computes the value once more.
                        if "prod" not in self.program.names():
                            raise
                        self.compare(expected, got, bitwise=False)
                    return True
                return False
        return True

    def selects_between_memories(self) -> bool:
        """Tell whether `vmap` may select between an array of the host and one of the device.

        Under ``jax_remat3`` a value in a branch is offloaded inside of it; `jax.checkpoint` with a
        name there fails in the same way.
        """
        branches = {"cond", "switch"} & self.program.names()
        return bool(branches) and self.mode == "vmap" and "jax_remat3" in self.flags

    def is_beyond_old_jax(self) -> bool:
        """Tell whether JAX 0.10 itself stands in the way, where it has no rule for something."""
        names_under_vmap = self.mode == "vmap" and "jax_remat3" in self.flags
        # It cannot `jax.linearize` a `custom_vjp` under this flag, which the planner does.
        linearized = "plan:" in str(self.application.policy) and "jax_custom_vjp3" in self.flags
        return names_under_vmap or linearized

    def is_stable(self, fn: Fn, args: Sequence[Any], expected: Any) -> bool:
        """Tell whether the undecorated program is the same when it is compiled as a whole.

        Near a singular matrix, or where numbers overflow, it is another one.
        """
        whole = dataclasses.replace(self, mode="compiled " + self.mode)
        return runs(lambda: self.compare(expected, whole.run(fn, args), False))

    def like_jax(self, fn: Fn) -> Iterator[Fn]:
        """Yield what JAX itself has to be able to run for a failure to be ours."""
        yield checkpointed(fn)
        offloads = self.application.is_plan or "offload" in repr(self.application)
        if self.transform in SECOND_ORDER and offloads:
            yield checkpointed(fn, lambda *_, **__: _jax.offloadable("device", "pinned_host"))
            yield checkpointed(_with_a_name(fn), _OFFLOADED)
        if self.transform in SECOND_ORDER and self.application.is_plan:
            yield nested(fn)

    def run(self, fn: Fn, args: Sequence[Any]) -> Any:
        _, transform = TRANSFORMS[self.transform]
        x, w, rest = args
        arrays = {name: rest[name] for name in ("n", "key")}

        def call(x: Any, w: Any, arrays: dict[str, Any]) -> Any:
            return transform(fn, loss_of(fn, self.program.used), x, w, {**rest, **arrays})

        if self.mode.endswith("vmap"):
            x, w = jnp.stack([x, w]), jnp.stack([w, x])
            call = jax.vmap(call, (0, 0, None))
        with flagged(self.flags):
            if self.mode == "eager":
                return call(x, w, arrays)
            if self.mode == "jit":
                # A plan is for a program in which the number is a constant.
                scale = {} if self.application.is_plan else {"scale": rest["scale"]}
                return jax.jit(call)(x, w, {**arrays, **scale})
            if self.mode.startswith("compiled"):
                return jax.jit(call)(x, w, arrays)
            closed, shapes = jax.make_jaxpr(call, return_shape=True)(x, w, arrays)
        # Without the flags, so that an operation is compiled once for all of them.
        out = interpreted(closed, jax.tree.leaves((x, w, arrays)))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    def checkpointed(self) -> Fn:
        """The program as one region of JAX's own."""
        return checkpointed(self.program.fn)

    def compare(self, expected: Any, got: Any, bitwise: bool) -> None:
        assert jax.tree.structure(expected) == jax.tree.structure(got), self
        a, b = jax.tree.leaves(expected), jax.tree.leaves(got)
        low = {"bfloat16", "float16"} & {self.program.dtype}
        eps = float(jnp.finfo(low.pop() if low else self.program.dtype).eps)
        if "half" in self.program.names():
            eps = float(jnp.finfo("bfloat16").eps)
        bound = 0.0 if bitwise else ROUNDING * eps * scale_of(a)
        for one, other in zip(a, b, strict=True):
            assert one.shape == other.shape, f"{self}\n{one.shape} {other.shape}"
            assert one.dtype == other.dtype, f"{self}\n{one.dtype} {other.dtype}"
            if one.dtype == jax.dtypes.float0:
                continue
            apart = _apart(one, other)
            assert apart <= bound, f"{self}\n{apart} apart, allowed {bound}\n{one}\n{other}"


def as_loss(program: Program) -> Fn:
    loss = loss_of(program.fn, program.used)
    return lambda x, w, rest: {"ys": (loss(x, w, rest),), "count": rest["n"], "none": None}


def differentiated(fn: Fn) -> Fn:
    """The function as JAX computes it on the way to its derivative."""
    return lambda x, w, rest: jax.vjp(lambda x, w: fn(x, w, rest), x, w)[0]


def checkpointed(fn: Fn, policy: Any = None) -> Fn:
    """The function as one region of JAX's own; what is not traced is closed over.

    A Python float is traced, as `remat_kit.policy` has it.
    """

    def region(x: Any, w: Any, rest: dict[str, Any]) -> Any:
        names = [name for name, value in rest.items() if isinstance(value, (jax.Array, float))]
        fixed = {name: value for name, value in rest.items() if name not in names}
        arrays = {name: rest[name] for name in names}

        def of_arrays(x: Any, w: Any, arrays: dict[str, Any]) -> Any:
            return fn(x, w, {**fixed, **arrays})

        return jax.checkpoint(of_arrays, policy=policy)(x, w, arrays)

    return region


def nested(fn: Fn) -> Fn:
    """The function as a region of JAX's own inside of another one, which saves a value in it.

    Under ``jax_remat3`` JAX 0.12 has no JVP of the gradient of that.
    """
    inner = checkpointed(_with_a_name(fn))

    def outer(x: Any, w: Any, rest: dict[str, Any]) -> Any:
        found = inner(x, w, rest)
        return {**found, "ys": tuple(y * y for y in found["ys"])}

    return checkpointed(outer, jax.checkpoint_policies.save_only_these_names("inside"))


_OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["inside"],
    offload_src="device",
    offload_dst="pinned_host",
)


def _with_a_name(fn: Fn) -> Fn:
    return lambda x, w, rest: fn(checkpoint_name(jnp.sin(x), "inside"), w, rest)


def runs(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:
        return False
    return True


def _apart(one: Any, other: Any) -> float:
    """Return the largest difference; two NaNs and two equal infinities are none."""
    kind = np.complex128
    one, other = np.asarray(one, kind), np.asarray(other, kind)
    if not one.size:
        return 0.0
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(one - other))
    return float("inf") if np.isnan(difference).any() else float(difference.max())
