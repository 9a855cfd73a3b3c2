"""Which equations does a function run, in which order and in which module?

A `Program` is a flattened jaxpr: a call that only groups equations is replaced by its equations,
and each equation has its complete module path. The modules that apply a policy, write a report or
plan all read a `Program`, so the meaning of each kind of equation is defined here alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from remat_kit import _jax
from remat_kit._program.paths import Path, module_path

# Complete names, because the name of another library's primitive may begin with any of these words.
SCATTERS = frozenset(
    {"scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"}
)


REDUCTIONS = frozenset(
    {*("reduce", "reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "argmax", "argmin")}
    | {*("reduce_and", "reduce_or", "reduce_xor", "reduce_window", "reduce_window_sum")}
    | {*("reduce_window_max", "reduce_window_min")}
)


SCANNED = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})


@dataclasses.dataclass(frozen=True)
class Body:
    """A jaxpr inside an equation.

    Attributes:
        key: the parameter of the equation that contains the jaxpr.
        jaxpr: the jaxpr.
        kind: "loop" (scan), "while", "branch" (cond), "call" (runs once with the inputs of the
            equation), or "rule" (the body of a function that defines its own derivative).
        times: the number of times that the equation runs the jaxpr.
    """

    key: str
    jaxpr: Any
    kind: str
    times: float = 1.0


def bodies(eqn: Any) -> tuple[Body, ...]:
    """Return the jaxprs that an equation runs, without its derivative rules."""
    name, params = eqn.primitive.name, eqn.params
    hi = _jax.hi_primitive(eqn)
    if hi is not None:
        inner = hi.params.get("jaxpr")
        return (Body("jaxpr", inner, "call"),) if inner is not None else ()
    if name == "scan":
        return (Body("jaxpr", params["jaxpr"], "loop", float(params["length"])),)
    if name == "while":
        # A jaxpr does not contain the number of iterations, so one iteration is counted.
        return (
            Body("cond_jaxpr", params["cond_jaxpr"], "while"),
            Body("body_jaxpr", params["body_jaxpr"], "while"),
        )
    if name == "cond":
        return tuple(Body("branches", b, "branch") for b in params["branches"])
    if name == "custom_vjp_call":
        key = "call_jaxpr" if "call_jaxpr" in params else "fun_jaxpr"
        return (Body(key, params[key], "rule"),) if _jax.is_jaxpr(params.get(key)) else ()
    if name == "custom_jvp_call":
        return (Body("call_jaxpr", params["call_jaxpr"], "rule"),)
    if name in ("pallas_call", "custom_lin") or name in REDUCTIONS or name in SCATTERS:
        return ()  # their jaxprs are a kernel, a linear map, or a function of two scalars
    return tuple(Body(k, v, "call") for k, v in params.items() if _jax.is_jaxpr(v))


def without_regions(jaxpr: Any) -> Any:
    """Return the same program with checkpoint regions that save everything.

    Two kinds of regions stay as they are: those in the rules of functions that define their own
    derivative, and those that JAX makes under ``jax_remat3``, whose policy cannot be replaced.
    """
    eqns = []
    for eqn in jaxpr.eqns:
        params = dict(eqn.params)
        if eqn.primitive.name in ("remat2", "remat", "checkpoint"):
            params["policy"] = jax.checkpoint_policies.everything_saveable
        if _jax.hi_primitive(eqn) is None:
            for body in bodies(eqn):
                if body.kind == "rule":
                    continue
                if body.kind == "branch":
                    params[body.key] = tuple(map(without_regions, eqn.params[body.key]))
                else:
                    params[body.key] = without_regions(body.jaxpr)
        eqns.append(eqn.replace(params=params))
    outvars = getattr(jaxpr, "jaxpr", jaxpr).outvars
    return _jax.replace_body(jaxpr, eqns, outvars)


def producers(eqn: Any, position: int = 0) -> list[Any]:
    """Return the equation and, for a call, the equations inside that compute one of its outputs.

    The outermost equation comes first.

    `jax.nn.relu` is a ``custom_jvp_call`` of a ``jit`` of ``max``: three equations, one value.
    """
    chain = [eqn]
    for body in bodies(eqn):
        if body.kind in ("call", "rule") and position < len(body.jaxpr.outvars):
            target = body.jaxpr.outvars[position]
            inner = next((e for e in body.jaxpr.eqns if target in e.outvars), None)
            if inner is not None:
                chain.extend(producers(inner, inner.outvars.index(target)))
    return chain


def primitive_name(eqn: Any) -> str:
    """Return the name of an equation's primitive; for a high-level one, the name of its class."""
    hi = _jax.hi_primitive(eqn)
    return _jax.name_of(eqn.primitive) if hi is None else type(hi).__name__


class KeptName(str):
    """The checkpoint name that the user gave to a value that a region saves, with a label.

    As a string it is the user's name, which JAX's policies and `print_saved_residuals` read. Its
    attribute ``label`` records the decision of the policy.

    >>> name = KeptName("attn_out", "remat_kit:save:save(everything)")
    >>> name, name == "attn_out", name.label
    ('attn_out', True, 'remat_kit:save:save(everything)')
    """

    label: str

    def __new__(cls, name: str, label: str) -> KeptName:
        self = super().__new__(cls, name)
        self.label = label
        return self


# Checkpoint names that remat_kit gives to values which a collective of a partitioned program made
# (see `remat_kit._program.communication`). They are no names of the user.
MADE_BY_COLLECTIVE = "remat_kit.collective"


GATHERED_PARAMETER = "remat_kit.gathered_parameter"


MARKS = frozenset({MADE_BY_COLLECTIVE, GATHERED_PARAMETER})


def checkpoint_name_of(eqn: Any) -> str | None:
    """Return the name in a `jax.ad_checkpoint.checkpoint_name`, or None for another equation."""
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    hi = _jax.hi_primitive(eqn)
    if hi is not None and type(hi).__name__.startswith("CheckpointName"):
        return hi.params["name"]
    return None


def is_identity(eqn: Any) -> bool:
    """Tell whether the output of an equation equals its input.

    That is so for a checkpoint name and for a rounding to the input's own precision. By such a
    rounding `jax.checkpoint` keeps XLA from storing residuals in a wider type.
    """
    if checkpoint_name_of(eqn) is not None:
        return True
    if eqn.primitive.name != "reduce_precision":
        return False
    info = jnp.finfo(eqn.invars[0].aval.dtype)
    params = eqn.params
    return (params["exponent_bits"], params["mantissa_bits"]) == (info.nexp, info.nmant)


# -- a whole program ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A flattened jaxpr.

    Attributes:
        invars: the variables of the constants, then those of the arguments.
        outvars: the variables or literals of the results.
        eqns: the equations in execution order. Plain calls are replaced by their equations, and
            each name stack consists of the module path relative to ``base``.
        consts: the values of the first ``len(consts)`` variables of ``invars``.
        base: the module path of the call that was traced.
    """

    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]
    eqns: tuple[Any, ...]
    consts: tuple[Any, ...] = ()
    base: Path = ()

    @staticmethod
    def of(closed: Any, base: Path = ()) -> Program:
        """Flatten a closed jaxpr (`jax.make_jaxpr`)."""
        flat = _Flattener()
        jaxpr = closed.jaxpr
        consts = tuple(closed.consts)
        for var in (*jaxpr.constvars, *jaxpr.invars):
            flat.subst[var] = var
        flat.splice(jaxpr, ())
        outvars = tuple(flat.read(v) for v in jaxpr.outvars)
        invars = (*flat.constvars, *jaxpr.constvars, *jaxpr.invars)
        return Program(invars, outvars, tuple(flat.eqns), (*flat.consts, *consts), base)

    @staticmethod
    def traced(traced: _jax.Traced, base: Path = ()) -> Program:
        """Flatten the result of `_jax.trace`."""
        flat = _jax.shared(_flattened, traced.jaxpr, ())
        return dataclasses.replace(flat, consts=(*flat.consts, *traced.consts), base=base)

    def path(self, eqn: Any) -> Path:
        """Return the full module path of one of the program's equations."""
        return module_path(eqn, self.base)


def _flattened(of: Any, _: Any) -> Program:
    return Program.of(_jax.Traced(of(), (), None).closed)


class _Flattener:
    """Splices plain calls into one list of equations, with fresh variables."""

    def __init__(self) -> None:
        self.subst: dict[Any, Any] = {}
        self.eqns: list[Any] = []
        self.constvars: list[Any] = []
        self.consts: list[Any] = []

    def read(self, atom: Any) -> Any:
        return atom if isinstance(atom, jec.Literal) else self.subst[atom]

    def splice(self, jaxpr: Any, base: Path, caller: Any = None) -> None:
        for eqn in jaxpr.eqns:
            eqn = _jax.with_caller(eqn, caller)
            path = module_path(eqn, base)
            if _jax.is_plain_call(eqn):
                self.call(eqn, path)
                continue
            invars = [self.read(v) for v in eqn.invars]
            outvars = [self.fresh(v) for v in eqn.outvars]
            self.eqns.append(_jax.with_scopes(eqn, path, invars=invars, outvars=outvars))

    def fresh(self, var: Any) -> Any:
        new = var if isinstance(var, jec.DropVar) else type(var)(var.aval)
        self.subst[var] = new
        return new

    def call(self, eqn: Any, path: Path) -> None:
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        open_jaxpr = inner.jaxpr
        args = [self.read(v) for v in eqn.invars]
        for var, const in zip(open_jaxpr.constvars, getattr(inner, "consts", ()), strict=True):
            self.consts.append(const)
            self.constvars.append(self.fresh(var))
        self.subst.update(zip(open_jaxpr.invars, args, strict=True))
        self.splice(open_jaxpr, path, eqn)
        for outer, out in zip(eqn.outvars, open_jaxpr.outvars, strict=True):
            self.subst[outer] = self.read(out)


def part(eqns: Sequence[Any], wanted: set[Any], base: Path) -> Program:
    """Return a program of some equations, whose outputs are the variables in ``wanted``."""
    computed = {v: None for e in eqns for v in e.outvars}
    read = {v: None for e in eqns for v in e.invars if not isinstance(v, jec.Literal)}
    invars = tuple(v for v in read if v not in computed)
    outvars = tuple(v for v in computed if v in wanted)
    return Program(invars, outvars, tuple(eqns), base=base)


def without_dead(program: Program) -> Program:
    """Return a program without the equations that no result and no effect depends on.

    `jax.checkpoint` drops these equations as well. With a region around them, their operands would
    get cotangents of zeros, and JAX would call backward rules that it does not call otherwise.
    """
    used = {v for v in program.outvars if not isinstance(v, jec.Literal)}
    live = []
    for eqn in reversed(program.eqns):
        if eqn.effects or not used.isdisjoint(eqn.outvars):
            live.append(eqn)
            used.update(v for v in eqn.invars if not isinstance(v, jec.Literal))
    return dataclasses.replace(program, eqns=tuple(reversed(live)))


def evaluate(
    program: Program, args: Sequence[Any], step: Callable[..., Any] = _jax.bind
) -> list[Any]:
    """Run a program on values (or tracers); ``step(eqn, values)`` evaluates one equation."""
    env = dict(zip(program.invars, (*program.consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jec.Literal) else env[atom]

    for eqn in program.eqns:
        env.update(zip(eqn.outvars, step(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in program.outvars]


def without_region_boundaries(program: Program) -> Program:
    """Return the same program with each checkpoint region replaced by its equations."""
    if not has_regions(program):
        return program

    def step(eqn: Any, values: list[Any]) -> list[Any]:
        if not _is_region(eqn):
            return _jax.bind(eqn, values)
        (body,) = bodies(eqn)
        path = "/".join(module_path(eqn))
        with jax.named_scope(path) if path else contextlib.nullcontext():
            inner = body.jaxpr
            closed = inner if hasattr(inner, "consts") else jec.ClosedJaxpr(inner, ())
            return evaluate(Program.of(closed), values, step)

    count = len(program.consts)
    avals = [v.aval for v in program.invars[count:]]
    spliced = jax.make_jaxpr(lambda *args: evaluate(program, args, step))(*avals)
    return Program.of(spliced, program.base)


def has_regions(program: Program) -> bool:
    """Tell whether a program has checkpoint regions, outside of the bodies of its loops."""
    return any(map(_is_region, program.eqns))


_REGIONS = frozenset({"remat2", "remat", "checkpoint"})


def _is_region(eqn: Any) -> bool:
    hi = _jax.hi_primitive(eqn)
    return eqn.primitive.name in _REGIONS or (hi is not None and "Remat" in type(hi).__name__)


# -- the program that a plan is made for ----------------------------------------------------------


def flat_program(closed: Any, base: tuple[str, ...] = ()) -> Program:
    """Return the program that plans are made for, in which calls and regions are flattened."""
    return without_region_boundaries(Program.of(closed, base))
