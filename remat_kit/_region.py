"""One region: a stretch of a program whose residuals a policy chose, recomputed as one.

`jax.checkpoint` asks its policy about one primitive at a time, without module, line, size or
consumers, and (under ``jax_remat3``) about few primitives at all. A name on a value does not help
where a derivative rule uses the value before it got its name: ``checkpoint_name(jnp.tanh(x), "t")``
saves nothing, because the rule of ``tanh`` reads the unnamed output.

So a region is differentiated here, once, and rebuilt from two programs::

    outputs, residuals = forward(inputs)           every value that the backward pass can need
    d_outputs          = tangent(residuals, d_inputs)      linear in d_inputs

`jax.linearize` makes the two. The policy decides about each value of the forward program, with
everything its equation knows; the chosen values that a recompute would stop at get a
`checkpoint_name`; and a `jax.custom_jvp` ties the residuals to the outputs:

    xs = shield(inputs)                  first-order tangents stop here
    ys, rs = forward(xs)
    return attach(inputs, ys, rs)        is ys; its tangent is tangent(rs, d_inputs)

under `jax.checkpoint` with a policy that saves our names alone. Higher derivatives, `vmap`, forward
mode and both implementations of checkpoint keep their meaning, because every part is made of
JAX's own transformations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from remat_kit import _jax
from remat_kit._graph import (
    Body,
    Path,
    Program,
    aliases,
    bodies,
    checkpoint_name_of,
    common_prefix,
    evaluate,
    is_identity,
    is_library_file,
    module_path,
    value_of,
)
from remat_kit._policy import Decision, Module, Policy, Rule, Value, Where, nothing, save

# -- names that carry decisions ---------------------------------------------------------------

_PREFIX = "remat_kit"


def label(decision: Decision, rule: str, destination: str = "") -> str | None:
    """Return the checkpoint name that carries a decision, None for recompute.

    >>> label(Decision.SAVE, "save(dots)")
    'remat_kit:save:save(dots)'
    """
    if decision is Decision.SAVE:
        return f"{_PREFIX}:save:{rule}"
    if decision is Decision.OFFLOAD:
        return f"{_PREFIX}:offload={destination}:{rule}"
    return None


def read_label(name: str) -> tuple[Decision, str, str] | None:
    """Return (decision, rule, destination) of a name that `label` made, None for another name.

    >>> read_label("remat_kit:offload=pinned_host:offload(dots)")
    (<Decision.OFFLOAD: 1>, 'offload(dots)', 'pinned_host')
    """
    prefix, _, rest = name.partition(":")
    if prefix != _PREFIX:
        return None
    what, _, rule = rest.partition(":")
    verb, _, destination = what.partition("=")
    decision = Decision.SAVE if verb == "save" else Decision.OFFLOAD
    return decision, rule, destination


def keep_labelled(prim: Any, *avals: Any, **params: Any) -> Any:
    """Answer `jax.checkpoint`: keep what carries one of our labels, where the label says."""
    if prim is not _jax.name_primitive():
        return _jax.RECOMPUTE
    read = read_label(params["name"])
    if read is None:
        return _jax.RECOMPUTE
    decision, _, destination = read
    if decision is Decision.SAVE:
        return _jax.SAVEABLE
    return _jax.offloadable("device", destination)


# -- the region -------------------------------------------------------------------------------


def run_region(
    program: Program, policy: Policy, args: Sequence[Any], *, prevent_cse: Any, full: bool
) -> list[Any]:
    """Evaluate a program on flat ``args`` as one region under ``policy``.

    Args:
      program: what to run; its constants are values of this trace or of none.
      policy: decides what is kept; None of its values is asked about when it keeps nothing.
      args: one value or tracer for each of the program's arguments.
      prevent_cse: as in `jax.checkpoint`.
      full: whether the policy's selectors read source lines.

    Returns:
      The program's outputs.
    """
    inputs = [*program.consts, *args]
    concrete = [not isinstance(c, _jax.Tracer) for c in program.consts] + [False] * len(args)
    diff = tuple(i for i, x in enumerate(inputs) if not concrete[i] and _differentiable(x))
    if not diff:
        return evaluate(program, args)  # a mask, say: no gradient, so nothing is ever recomputed

    prefix, program = _relative(dataclasses.replace(program, consts=()))
    avals = tuple(map(jax.typeof, inputs))
    base = (*program.base, *prefix)
    # Only a policy that reads module paths can tell one of several equal blocks from another.
    key = (_structure(program), avals, diff, policy, base if _reads_paths(policy) else None)
    key = (*key, full, _jax.remat3(), _jax.trace_context())
    body = _shared_bodies.get(key)
    if body is None:
        if keeps_nothing(policy):
            body = _Body(_plain(program), ())
        else:
            body = _derived(dataclasses.replace(program, base=base), policy, avals, diff, full)
        _shared_bodies.put(key, body)
    keep = _jax.keep_names(body.saved, keep_labelled)
    with jax.named_scope("/".join(prefix)) if prefix else contextlib.nullcontext():
        return jax.checkpoint(body.run, prevent_cse=prevent_cse, policy=keep)(*inputs)


@dataclasses.dataclass(frozen=True)
class _Body:
    """What a region runs, and the labels of what it saves."""

    run: Callable[..., list[Any]]
    saved: Sequence[str]


# -- equal blocks share one body ----------------------------------------------------------------
# A model is mostly the same block over and over. A body is differentiated and labelled once; and
# since JAX caches what it traces by the identity of the function, it too does its part once.


class _Recent:
    """The most recently used bodies."""

    def __init__(self, size: int):
        self.size = size
        self.entries: dict[Any, _Body] = {}

    def get(self, key: Any) -> _Body | None:
        body = self.entries.pop(key, None)
        if body is not None:
            self.entries[key] = body
        return body

    def put(self, key: Any, body: _Body) -> None:
        self.entries[key] = body
        while len(self.entries) > self.size:
            self.entries.pop(next(iter(self.entries)))


_shared_bodies = _Recent(64)


@functools.lru_cache(maxsize=256)
def _reads_paths(policy: Policy) -> bool:
    kinds = (Module, Where)
    return any(isinstance(leaf, kinds) for leaf in policy.leaves())


def _relative(program: Program) -> tuple[Path, Program]:
    """Take the part that all module paths of a program begin with out of them."""
    paths = [module_path(e) for e in program.eqns]
    prefix = common_prefix(*paths)
    if not prefix:
        return (), program
    size = len(prefix)
    eqns = [_jax.with_scopes(e, p[size:]) for e, p in zip(program.eqns, paths, strict=True)]
    return prefix, dataclasses.replace(program, eqns=tuple(eqns))


@dataclasses.dataclass(frozen=True, eq=False)
class _Itself:
    """An object that equals nothing but itself, kept alive by the key it is in."""

    value: Any

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _structure(program: Any) -> Any:
    """A hashable that two programs share when they compute the same from the same lines."""
    number: dict[Any, int] = {}
    inputs = [*getattr(program, "constvars", ()), *program.invars]
    for var in inputs:
        number[var] = len(number)

    def atom(x: Any) -> Any:
        if isinstance(x, jec.Literal):
            scalar = getattr(x.val, "shape", ()) == ()
            # By repr, since 0.0 == -0.0 and 1 == True.
            return str(x.aval), repr(x.val) if scalar else _Itself(x.val)
        return number[x]

    eqns = []
    for eqn in program.eqns:
        reads = tuple(atom(x) for x in eqn.invars)
        for var in eqn.outvars:
            number[var] = len(number)
        makes = tuple(v.aval for v in eqn.outvars)
        scopes = tuple(map(tuple, _jax.name_stack_groups(eqn)))
        params = _parameters(eqn)
        place = _jax.user_code(eqn, is_library_file)
        eqns.append((eqn.primitive, params, reads, makes, scopes, place, eqn.ctx))
    return len(inputs), tuple(eqns), tuple(atom(x) for x in program.outvars)


def equation_key(eqn: Any) -> Any:
    """Return a hashable that equations share when they compute the same, whatever they read."""
    atoms = tuple(
        (str(v.aval), repr(v.val) if getattr(v.val, "shape", ()) == () else _Itself(v.val))
        if isinstance(v, jec.Literal)
        else v.aval
        for v in eqn.invars
    )
    same = tuple(eqn.invars.index(v) for v in eqn.invars if not isinstance(v, jec.Literal))
    return eqn.primitive, _parameters(eqn), atoms, same, eqn.ctx


def _parameters(eqn: Any) -> Any:
    rule = _jax.rule_of(eqn) if eqn.primitive.name == "custom_jvp_call" else None
    out = []
    for name, value in eqn.params.items():
        if name == "jvp_jaxpr_fun" and rule is not None:
            out.append((name, _Itself(rule)))
        elif _jax.is_jaxpr(value):
            out.append((name, _structure(getattr(value, "jaxpr", value)), _consts(value)))
        elif isinstance(value, (tuple, list)) and any(map(_jax.is_jaxpr, value)):
            inner = ((_structure(getattr(v, "jaxpr", v)), _consts(v)) for v in value)
            out.append((name, tuple(inner)))
        else:
            out.append((name, value if _hashable(value) else _Itself(value)))
    return tuple(out)


def _consts(jaxpr: Any) -> tuple[Any, ...]:
    return tuple(_Itself(c) for c in getattr(jaxpr, "consts", ()))


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def keeps_nothing(policy: Policy) -> bool:
    """Tell whether a policy recomputes every value whatever it is."""
    return policy == save(nothing)


def _plain(program: Program) -> Callable[..., list[Any]]:
    def region(*args: Any) -> list[Any]:
        return evaluate(program, args)

    return region


def _differentiable(x: Any) -> bool:
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)


def _derived(
    program: Program, policy: Policy, avals: Sequence[Any], diff: tuple[int, ...], full: bool
) -> _Body:
    split = _split(program, avals, diff)
    chosen, labels = choose(split.forward, split.residuals, policy, full=full)
    attach = _attachment(split)

    def region(*args: Any) -> list[Any]:
        # Under remat3 the values that are saved are computed in a run of their own, apart from
        # the differentiated one: stopping tangents there would lose second derivatives.
        shielded = args if _jax.remat3() else _shield(*args)
        outs = evaluate(chosen, shielded)
        ys, rs = outs[: split.outputs], outs[split.outputs :]
        return attach([args[i] for i in split.diff], ys, rs)

    return _Body(region, [x for x in labels if x.startswith(f"{_PREFIX}:save:")])


@dataclasses.dataclass(frozen=True)
class _Split:
    """A program differentiated: forward gives outputs, then residuals; tangent is linear."""

    forward: Program
    tangent: Any
    outputs: int
    diff: tuple[int, ...]

    @property
    def residuals(self) -> tuple[Any, ...]:
        return self.forward.outvars[self.outputs :]


def _split(program: Program, avals: Sequence[Any], diff: tuple[int, ...]) -> _Split:
    tree: Any = None

    def forward(*xs: Any) -> list[Any]:
        nonlocal tree

        def of_differentiable(*ds: Any) -> list[Any]:
            full = list(xs)
            for i, d in zip(diff, ds, strict=True):
                full[i] = d
            return evaluate(program, full)

        ys, tangent = jax.linearize(of_differentiable, *(xs[i] for i in diff))
        residuals, tree = jax.tree.flatten(tangent)
        return [*ys, *residuals]

    closed = jax.make_jaxpr(forward)(*avals)
    outputs = len(program.outvars)

    def tangent(residuals: Sequence[Any], ds: Sequence[Any]) -> list[Any]:
        return jax.tree.unflatten(tree, residuals)(*ds)

    ds = [avals[i].to_tangent_aval() for i in diff]
    linear = jax.make_jaxpr(tangent)(closed.out_avals[outputs:], ds)
    return _Split(Program.of(closed, program.base), linear, outputs, diff)


# -- shield and attach ------------------------------------------------------------------------


@jax.custom_jvp
def _shield(*xs: Any) -> tuple[Any, ...]:
    """The identity, whose first derivative is zero and whose primal is plain ever after.

    All inputs go through one call: a tangent on any of them must strip the shield of all, or a
    mixed second derivative would stop at the others.
    """
    return xs


def _shield_rule(xs: Any, ds: Any) -> Any:
    del ds
    return xs, tuple(SymbolicZero(jax.typeof(x).to_tangent_aval()) for x in xs)


_shield.defjvp(_shield_rule, symbolic_zeros=True)


def _attachment(split: _Split) -> Callable[..., list[Any]]:
    if _contains(split.tangent, "custom_lin"):
        return _reverse_attachment(split)

    @jax.custom_jvp
    def attach(xs: Any, ys: Any, rs: Any) -> list[Any]:
        del xs, rs
        return ys

    def rule(primals: Any, tangents: Any) -> Any:
        _, ys, rs = primals
        live = tuple(not isinstance(d, SymbolicZero) for d in tangents[0])
        linear = _restricted(split, live)
        ds = [d for d, keep in zip(tangents[0], live, strict=True) if keep]
        return ys, jec.jaxpr_as_fun(linear)(*rs, *ds)

    attach.defjvp(rule, symbolic_zeros=True)
    return attach


def _restricted(split: _Split, live: tuple[bool, ...]) -> Any:
    """The tangent program for inputs of which only the ``live`` ones have a tangent.

    It is the derivative of the linear program in those alone: JAX's own rules then drop the terms
    of the others, where zeros put in by hand would be multiplied out.
    """
    if all(live):
        return split.tangent
    count = len(split.tangent.in_avals) - len(live)
    r_avals, d_avals = split.tangent.in_avals[:count], split.tangent.in_avals[count:]

    def tangent(rs: Any, ds: Any) -> Any:
        def linear(*live_ds: Any) -> Any:
            given = iter(live_ds)
            full = [next(given) if k else _zeros(a) for a, k in zip(d_avals, live, strict=True)]
            return [
                y if y.dtype != jax.dtypes.float0 else None
                for y in jec.jaxpr_as_fun(split.tangent)(*rs, *full)
            ]

        _, out = jax.jvp(linear, tuple(_zeros(d) for d in map(jax.typeof, ds)), tuple(ds))
        return [
            _jax.float0_zeros(a.shape) if y is None else y
            for y, a in zip(out, split.tangent.out_avals, strict=True)
        ]

    live_avals = [a for a, keep in zip(d_avals, live, strict=True) if keep]
    return _jax.without_dead_code(jax.make_jaxpr(tangent)(r_avals, live_avals))


def _zeros(aval: Any) -> Any:
    return jnp.zeros(aval.shape, aval.dtype)


def _reverse_attachment(split: _Split) -> Callable[..., list[Any]]:
    """`attach` for a region that calls a `jax.custom_vjp` function, which has no forward mode.

    Its tangent program holds the linear map of that function as an equation that only
    transposition knows; `vmap` of it is refused by JAX. The transposed program is plain.
    """
    count = len(split.tangent.in_avals) - len(split.diff)
    r_avals, d_avals = split.tangent.in_avals[:count], split.tangent.in_avals[count:]
    floats = [a.dtype != jax.dtypes.float0 for a in split.tangent.out_avals]

    def transposed(rs: Any, cts: Any) -> Any:
        def linear(*ds: Any) -> Any:
            outs = jec.jaxpr_as_fun(split.tangent)(*rs, *ds)
            return [y for y, keep in zip(outs, floats, strict=True) if keep]

        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in d_avals]
        return jax.linear_transpose(linear, *shapes)(cts)

    ct_avals = [a for a, keep in zip(split.tangent.out_avals, floats, strict=True) if keep]
    backward = jax.make_jaxpr(transposed)(r_avals, ct_avals)

    @jax.custom_vjp
    def attach(xs: Any, ys: Any, rs: Any) -> list[Any]:
        del xs, rs
        return ys

    def fwd(xs: Any, ys: Any, rs: Any) -> Any:
        del xs
        return ys, (rs, _zero_cotangents(ys), _zero_cotangents(rs))

    def bwd(kept: Any, cts: Any) -> Any:
        rs, zero_ys, zero_rs = kept
        cts = [c for c, keep in zip(cts, floats, strict=True) if keep]
        return jec.jaxpr_as_fun(backward)(*rs, *cts), zero_ys, zero_rs

    attach.defvjp(fwd, bwd)
    return attach


def _zero_cotangents(xs: Any) -> Any:
    del xs
    return None  # JAX reads None as the zero cotangent of a whole argument


def _contains(jaxpr: Any, primitive: str) -> bool:
    return any(
        e.primitive.name == primitive or any(_contains(b.jaxpr, primitive) for b in bodies(e))
        for e in jaxpr.eqns
    )


# -- the choice -------------------------------------------------------------------------------


def choose(
    forward: Program, residuals: Sequence[Any], policy: Policy, *, full: bool = True
) -> tuple[Program, list[str]]:
    """Put a label on each value that a recompute of ``residuals`` would stop at.

    The walk goes backward from the residuals: a value that the policy keeps is labelled and its
    inputs are not visited; one that it recomputes needs its inputs. So only values that are
    really held carry a label, and what is visited without one is exactly what is recomputed.

    Returns the labelled program and its labels.
    """
    outputs = forward.outvars[: len(forward.outvars) - len(residuals)]
    walk = _Walk(policy, full, _primal_values(forward, outputs) if _has_default(policy) else None)
    eqns, subst, _ = walk.block(forward.eqns, _variables(residuals), forward.base)
    outvars = tuple(
        subst.get(v, v) if not isinstance(v, jec.Literal) else v for v in forward.outvars
    )
    return dataclasses.replace(forward, eqns=tuple(eqns), outvars=outvars), list(walk.used)


def _variables(atoms: Sequence[Any]) -> set[Any]:
    return {v for v in atoms if not isinstance(v, jec.Literal)}


@functools.lru_cache(maxsize=256)
def _has_default(policy: Policy) -> bool:
    """Tell whether a policy keeps values that none of its rules selects."""
    rules = (rule for rule in policy.rules() if isinstance(rule, Rule))
    return any(rule.decision is Decision.RECOMPUTE for rule in rules)


def _primal_values(forward: Program, outputs: Sequence[Any]) -> set[Any]:
    """The values that the outputs need, in bodies too; all others serve a derivative rule alone."""
    walk = _Walk(save(nothing), False, None)
    walk.block(forward.eqns, _variables(outputs), forward.base)
    return walk.visited


@dataclasses.dataclass(frozen=True)
class _Maker:
    """What is known of a value where it is made, apart from what it is needed for."""

    eqn: Any
    position: int
    path: Path
    names: Sequence[str]


@dataclasses.dataclass(frozen=True)
class _Walk:
    """A backward walk under one policy.

    A `recompute` rule keeps by default what it does not select. Such a default is no wish to keep
    the ``2 * x`` that the derivative of ``x ** 2`` makes, or the ``1 - y * y`` of ``tanh``: kept,
    they would spare the recompute that was asked for. So a value that is kept by default and that
    only a derivative rule makes goes with what it is made of.
    """

    policy: Policy
    full: bool
    primal: set[Any] | None  # of the forward program; None where the policy has no default
    used: dict[str, None] = dataclasses.field(default_factory=dict)  # labels, each once, in order
    visited: set[Any] = dataclasses.field(default_factory=set)
    makers: dict[Any, _Maker] = dataclasses.field(default_factory=dict)
    recomputed: dict[Any, bool] = dataclasses.field(default_factory=dict)

    def label(self, var: Any, made: _Maker) -> str | None:
        value = value_of(made.eqn, made.position, made.path, made.names, full=self.full)
        decision = self.policy.decide(value)
        if decision is Decision.RECOMPUTE or self.follows(var, value, made):
            return None
        destination = self.policy.destination(value) if decision is Decision.OFFLOAD else ""
        text = label(decision, self.policy.rule(value), destination)
        if text is not None:
            self.used[text] = None
        return text

    def follows(self, var: Any, value: Value, made: _Maker) -> bool:
        """Tell whether a kept value is recomputed after all, with what it is made of."""
        if self.primal is None or var in self.primal:
            return False
        if self.policy.deciding(value).matches(value):
            return False
        return any(self.is_recomputed(v) for v in _variables(made.eqn.invars))

    def is_recomputed(self, var: Any) -> bool:
        """Tell what becomes of a value, whether or not the backward pass needs it."""
        if var not in self.recomputed:
            made = self.makers.get(var)
            self.recomputed[var] = False
            if made is not None:
                value = value_of(made.eqn, made.position, made.path, made.names, full=self.full)
                decision = self.policy.decide(value)
                found = decision is Decision.RECOMPUTE or self.follows(var, value, made)
                self.recomputed[var] = found
        return self.recomputed[var]

    def block(
        self, eqns: Sequence[Any], needed: set[Any], base: Path
    ) -> tuple[list[Any], dict[Any, Any], set[Any]]:
        """Return the equations with labels, the renaming of labelled values, and all needed."""
        names = aliases(eqns)
        root = _roots(eqns)
        needed = {root.get(v, v) for v in needed}
        labels: dict[Any, str] = {}
        rewritten: list[Any] = []
        paths = [module_path(eqn, base) for eqn in eqns]
        if self.primal is not None:
            self.note_makers(eqns, paths, names, root)
        for eqn, path in zip(reversed(eqns), reversed(paths), strict=True):
            if not eqn.outvars or eqn.outvars[0] not in root:
                eqn = self.equation(eqn, path, needed, labels, names, root)
            rewritten.append(eqn)
        eqns, subst = _insert(list(reversed(rewritten)), labels, root)
        self.visited.update(needed)
        return eqns, subst, needed

    def note_makers(
        self,
        eqns: Sequence[Any],
        paths: Sequence[Path],
        names: dict[Any, tuple[str, ...]],
        root: dict[Any, Any],
    ) -> None:
        for eqn, path in zip(eqns, paths, strict=True):
            for i, var in enumerate(eqn.outvars):
                self.recomputed.pop(var, None)  # one body may be walked for several calls of it
                if var in root:
                    if root[var] in self.makers:
                        self.makers[var] = self.makers[root[var]]
                elif eqn.primitive.name not in _ENTER:
                    self.makers[var] = _Maker(eqn, i, path, names.get(var, ()))
                elif eqn.primitive.name in _CALLS:
                    self.note_inner_maker(var, eqn, i, path)

    def note_inner_maker(self, var: Any, call: Any, position: int, path: Path) -> None:
        """Look a value up that a call hands out, where the body of the call makes it."""
        (body,) = bodies(call)
        inner = body.jaxpr.outvars[position]
        for eqn in body.jaxpr.eqns:
            if inner in eqn.outvars and eqn.primitive.name not in _ENTER:
                names = aliases(body.jaxpr.eqns).get(inner, ())
                place = eqn.outvars.index(inner)
                self.makers[var] = _Maker(eqn, place, module_path(eqn, path), names)

    def equation(
        self,
        eqn: Any,
        path: Path,
        needed: set[Any],
        labels: dict[Any, str],
        names: dict[Any, tuple[str, ...]],
        root: dict[Any, Any],
    ) -> Any:
        wanted = [v in needed for v in eqn.outvars]
        if not any(wanted):
            return eqn
        enter = _ENTER.get(eqn.primitive.name)
        if enter is not None:
            eqn, inputs = enter(self, eqn, path, wanted)
        else:
            own = checkpoint_name_of(eqn)  # here it names an input, which nothing in here makes
            for i, var in enumerate(eqn.outvars):
                made = _Maker(eqn, i, path, names.get(var, () if own is None else (own,)))
                text = self.label(var, made) if wanted[i] else None
                if text is not None:
                    labels[var] = text
                    wanted[i] = False
            inputs = [any(wanted)] * len(eqn.invars)
        for var, keep in zip(eqn.invars, inputs, strict=True):
            if keep and not isinstance(var, jec.Literal):
                needed.add(root.get(var, var))
        return eqn

    def body(self, body: Body, wanted: Sequence[bool], path: Path) -> tuple[Any, list[bool]]:
        """Label the values inside a body; return it and which of its inputs are needed."""
        outs = body.jaxpr.outvars
        needed = _variables([v for v, w in zip(outs, wanted, strict=True) if w])
        eqns, subst, needed = self.block(body.jaxpr.eqns, needed, path)
        outvars = [v if isinstance(v, jec.Literal) else subst.get(v, v) for v in outs]
        jaxpr = _jax.replace_body(body.jaxpr, eqns, outvars)
        inner = getattr(body.jaxpr, "jaxpr", body.jaxpr)
        return jaxpr, [v in needed for v in inner.invars]

    def scan(self, eqn: Any, path: Path, wanted: list[bool]) -> tuple[Any, list[bool]]:
        (body,) = bodies(eqn)
        consts, carry = _jax.scan_arity(eqn)
        while True:  # what the carry needs on the way in, it needs on the way out
            jaxpr, inputs = self.body(body, wanted, path)
            grown = [w or (i < carry and inputs[consts + i]) for i, w in enumerate(wanted)]
            if grown == wanted:
                break
            wanted = grown
        inputs = [
            n or (consts <= i < consts + carry and wanted[i - consts]) for i, n in enumerate(inputs)
        ]
        return eqn.replace(params={**eqn.params, "jaxpr": jaxpr}), inputs

    def cond(self, eqn: Any, path: Path, wanted: list[bool]) -> tuple[Any, list[bool]]:
        walked = [self.body(b, wanted, path) for b in bodies(eqn)]
        inputs = [any(column) for column in zip(*(i for _, i in walked), strict=True)]
        branches = tuple(j for j, _ in walked)
        return eqn.replace(params={**eqn.params, "branches": branches}), [True, *inputs]

    def call(self, eqn: Any, path: Path, wanted: list[bool]) -> tuple[Any, list[bool]]:
        (body,) = bodies(eqn)
        if self.primal is not None:
            inner = getattr(body.jaxpr, "jaxpr", body.jaxpr)
            for var, outer in zip(inner.invars, eqn.invars, strict=True):
                self.recomputed[var] = bool(_variables([outer])) and self.is_recomputed(outer)
        jaxpr, inputs = self.body(body, wanted, path)
        return eqn.replace(params={**eqn.params, body.key: jaxpr}), inputs


# Bodies that JAX itself enters with a checkpoint policy; every other equation is one value.
_CALLS = ("jit", "pjit", "shard_map")
_ENTER: dict[str, Callable[..., tuple[Any, list[bool]]]] = {
    "scan": _Walk.scan,
    "cond": _Walk.cond,
    **dict.fromkeys(_CALLS, _Walk.call),
}


def _roots(eqns: Sequence[Any]) -> dict[Any, Any]:
    """Map the output of each identity (a name, a rounding) to the value it hands on."""
    made = {v for e in eqns if not is_identity(e) for v in e.outvars}
    root: dict[Any, Any] = {}
    for eqn in eqns:
        if is_identity(eqn) and not isinstance(eqn.invars[0], jec.Literal):
            source = root.get(eqn.invars[0], eqn.invars[0])
            if source in made:
                root[eqn.outvars[0]] = source
    return root


def _insert(
    eqns: Sequence[Any], labels: dict[Any, str], root: dict[Any, Any]
) -> tuple[list[Any], dict[Any, Any]]:
    """Name each labelled value right where it is made, and use the named one everywhere.

    Names that the user gave move to the same place, so that every consumer, a derivative rule
    too, reads the named value.
    """
    given: dict[Any, list[Any]] = {}
    for eqn in eqns:
        if checkpoint_name_of(eqn) is not None and eqn.outvars[0] in root:
            given.setdefault(root[eqn.outvars[0]], []).append(eqn)
    subst: dict[Any, Any] = {}
    out: list[Any] = []

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, jec.Literal) else subst.get(atom, atom)

    for eqn in eqns:
        if eqn.outvars and eqn.outvars[0] in root:
            subst[eqn.outvars[0]] = read(root[eqn.outvars[0]])
            continue
        out.append(eqn.replace(invars=[read(v) for v in eqn.invars]))
        for var in eqn.outvars:
            last = var
            for name in given.get(var, ()):
                out.append(name.replace(invars=[last]))
                last = name.outvars[0]
            if var in labels:
                fresh = type(var)(var.aval)
                out.append(_jax.name_equation(last, fresh, labels[var], eqn))
                last = fresh
            if last is not var:
                subst[var] = last
    return out, subst
