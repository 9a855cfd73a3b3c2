"""Which values of a forward program are kept, and the names that tell JAX so.

`jax.checkpoint` saves a value if its policy accepts the name of it, so every decision of a policy
becomes a name that no user writes (see `label`), and `keep_labelled` is the policy that reads it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jec

from remat_kit import _jax
from remat_kit._policy.algebra import Decision, Policy, Rule, save
from remat_kit._policy.selectors import nothing
from remat_kit._program.paths import Path, module_path
from remat_kit._program.program import (
    Body,
    KeptName,
    Program,
    bodies,
    checkpoint_name_of,
    is_identity,
)
from remat_kit._program.value import Value, aliases, effect_of, value_of

# -- names that carry decisions ---------------------------------------------------------------

LABEL_PREFIX = "remat_kit"


def label(decision: Decision, rule: str, destination: str = "") -> str | None:
    """Return the checkpoint name that carries a decision, None for recompute.

    >>> label(Decision.SAVE, "save(dots)")
    'remat_kit:save:save(dots)'
    """
    if decision is Decision.SAVE:
        return f"{LABEL_PREFIX}:save:{rule}"
    if decision is Decision.OFFLOAD:
        return f"{LABEL_PREFIX}:offload={destination}:{rule}"
    return None


def read_label(name: str) -> tuple[Decision, str, str] | None:
    """Return (decision, rule, destination) of a name that carries a label, None for another name.

    >>> read_label("remat_kit:offload=pinned_host:offload(dots)")
    (<Decision.OFFLOAD: 1>, 'offload(dots)', 'pinned_host')
    """
    name = name.label if isinstance(name, KeptName) else name
    prefix, _, rest = name.partition(":")
    if prefix != LABEL_PREFIX:
        return None
    what, _, rule = rest.partition(":")
    verb, _, destination = what.partition("=")
    decision = Decision.SAVE if verb == "save" else Decision.OFFLOAD
    return decision, rule, destination


def keep_labelled(prim: Any, /, *avals: Any, **params: Any) -> Any:
    """Answer `jax.checkpoint`: keep what carries one of our labels, where the label says.

    A debug callback is kept, which for JAX means that it is repeated only if the recompute has all
    that it reads. `choose` arranges what it has.
    """
    if _jax.is_debug_callback(prim):
        return True
    if prim is not _jax.name_primitive():
        return _jax.RECOMPUTE
    read = read_label(params["name"])
    if read is None:
        return _jax.RECOMPUTE
    decision, _, destination = read
    if decision is Decision.SAVE:
        return _jax.SAVEABLE
    return _jax.offloadable("device", destination)


# -- the choice -------------------------------------------------------------------------------


def choose(
    forward: Program, residuals: Sequence[Any], policy: Policy, *, full: bool = True
) -> tuple[Program, list[str]]:
    """Put a label on each value that a recompute of ``residuals`` would stop at.

    The walk goes backward from the residuals: a value that the policy keeps is labelled and its
    inputs are not visited; one that it recomputes needs its inputs. So only values that are
    really held carry a label, and what is visited without one is exactly what is recomputed.

    The policy decides about debug callbacks too. One that it does not keep is repeated with what is
    recomputed, so what it reads is needed as well; it reads copies, since JAX repeats it only if it
    reads no saved value itself.

    Returns the labelled program and its labels.
    """
    outputs = forward.outvars[: len(forward.outvars) - len(residuals)]
    walk = _LabelWalk(
        policy, full, _primal_values(forward, outputs) if _has_default(policy) else None
    )
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
    walk = _LabelWalk(save(nothing), False, None)
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
class _LabelWalk:
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
    repeated: list[Any] = dataclasses.field(default_factory=list)  # callbacks that are not kept
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
        repeated = {id(eqn) for eqn in self.repeated}
        eqns, subst = _insert(list(reversed(rewritten)), labels, root, repeated)
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
        """Note which equation in the body of a call computes a result of the call."""
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
        if _jax.is_debug_callback(eqn.primitive):
            self.callback(eqn, path, needed, root)
            return eqn
        wanted = [v in needed for v in eqn.outvars]
        enter = _ENTER.get(eqn.primitive.name)
        if not any(wanted) and (enter is None or not _jax.has_debug_effect(eqn)):
            return eqn
        if enter is not None:
            eqn, inputs = enter(self, eqn, path, wanted)
        else:
            own = checkpoint_name_of(eqn)  # names an input, which no equation here computes
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

    def callback(self, eqn: Any, path: Path, needed: set[Any], root: dict[Any, Any]) -> None:
        needed.update(root.get(v, v) for v in _variables(eqn.invars))
        if self.policy.decide(effect_of(eqn, path, full=self.full)) is Decision.RECOMPUTE:
            self.repeated.append(eqn)

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
        while True:  # the body must return each carried value that it reads
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
    "scan": _LabelWalk.scan,
    "cond": _LabelWalk.cond,
    **dict.fromkeys(_CALLS, _LabelWalk.call),
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
    eqns: Sequence[Any], labels: dict[Any, str], root: dict[Any, Any], repeated: set[int]
) -> tuple[list[Any], dict[Any, Any]]:
    """Name each labelled value right where it is made, and use the named one everywhere.

    The callbacks in ``repeated`` use copies.

    Names that the user gave move to the same place, so that every consumer, a derivative rule
    too, reads the named value. The last of them carries the label, so that JAX, which says what is
    saved, says it with the user's name.
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
        invars = [read(v) for v in eqn.invars]
        if id(eqn) in repeated:
            for i, atom in enumerate(invars):
                if not isinstance(atom, jec.Literal):
                    invars[i] = type(atom)(atom.aval)
                    out.append(_jax.copy_equation(atom, invars[i], eqn))
        same = all(a is b for a, b in zip(invars, eqn.invars, strict=True))
        out.append(eqn if same else eqn.replace(invars=invars))
        for var in eqn.outvars:
            named, last = _with_names(var, eqn, given.get(var, ()), labels.get(var))
            out.extend(named)
            if last is not var:
                subst[var] = last
    return out, subst


def _with_names(
    var: Any, eqn: Any, names: Sequence[Any], text: str | None
) -> tuple[list[Any], Any]:
    """Return the equations that name a value, and the variable of the named value.

    Args:
        var: the value.
        eqn: the equation that makes it.
        names: the equations by which the user named it.
        text: its label, or None.
    """
    out, last = [], var
    for name in names:
        out.append(name.replace(invars=[last]))
        last = name.outvars[0]
    if text is not None and names and _jax.can_be_renamed(names[-1]):
        given = checkpoint_name_of(names[-1]) or ""
        before = out[-1].invars[0]
        out[-1] = _jax.renamed_equation(names[-1], KeptName(given, text), before)
    elif text is not None:
        fresh = type(var)(var.aval)
        out.extend(_jax.name_equations(last, fresh, text, eqn))
        last = fresh
    return out, last
