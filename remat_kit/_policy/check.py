"""Which patterns of a policy match nothing in a program, and what may the user have meant?"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from remat_kit import _jax
from remat_kit._errors import unknown
from remat_kit._policy.algebra import Policy, Rule
from remat_kit._policy.patterns import prefixes
from remat_kit._policy.selectors import Module, Named, Primitive, any_match, is_under, nothing
from remat_kit._policy.structural import Segments
from remat_kit._program.value import Value

# ---------------------------------------------------------------------------------------------
# Checks against a real function
# ---------------------------------------------------------------------------------------------


def check(
    policy: Policy,
    values: Iterable[Value],
    primitives: Iterable[str] | None = None,
    *,
    call: str = "policy(...)",
) -> None:
    """Raise for a name, module or primitive pattern of ``policy`` that cannot match any value.

    Each pattern is checked on its own. Two kinds of pattern may match nothing without an error: one
    under ``strict=False``, and one for a primitive that JAX has and the function does not use.
    A rule that selects nothing for such a reason emits a warning (`remat_kit._apply.void`).

    >>> from remat_kit import named, save
    >>> check(save(named("atn_out")), [Value(names=("attn_out",))], call="policy(...)")
    Traceback (most recent call last):
      ...
    remat_kit._errors.UnknownNameError: `policy(...)`: no checkpoint name is named 'atn_out'
    hint: did you mean 'attn_out'?

    Args:
      policy: the policy.
      values: every intermediate value of the function.
      primitives: names of further primitives that exist; by default all primitives of JAX.
      call: the call as the user wrote it, which the message quotes.

    Raises:
      UnknownNameError: a pattern matches nothing; the hint lists similar names that exist.
    """
    values = list(values)
    names = {n for v in values for n in v.names}
    if isinstance(policy, Segments):
        for name in policy.names:
            if name not in names:
                raise unknown("checkpoint name", name, names, call=call)
    modules = {v.module for v in values}
    own_primitives = {p for v in values for p in v.primitives}
    for leaf in dict.fromkeys(policy.leaves()):
        if isinstance(leaf, Named) and leaf.strict:
            _check_names(leaf, names, call)
        elif isinstance(leaf, Module) and leaf.strict:
            _check_modules(leaf, modules, call)
        elif isinstance(leaf, Primitive):
            _check_primitives(leaf, own_primitives, primitives, call)


def _check_names(leaf: Named, names: set[str], call: str) -> None:
    for pattern in leaf.patterns:
        alone = dataclasses.replace(leaf, patterns=(pattern,))
        if not alone.matches(Value(names=tuple(names))):
            raise unknown("checkpoint name", pattern, names, call=call)


def _check_modules(leaf: Module, modules: set[str], call: str) -> None:
    for pattern in leaf.patterns:
        if not any(is_under(pattern, path) for path in modules):
            raise unknown("module", pattern, similar_paths(pattern, modules), call=call)


def similar_paths(pattern: str, modules: set[str]) -> set[str]:
    """Return the existing module paths, written in the form of ``pattern``.

    >>> similar_paths("*/mpl", {"GPT/block_0/mlp"}) == {"*/GPT", "*/block_0", "*/mlp"}
    True
    """
    parts = re.fullmatch(r"((?:\*{1,2}/)?)(.*?)((?:/\*\*)?)", pattern)
    assert parts is not None
    head, body, tail = parts.groups()
    depth = body.count("/") + 1
    paths = [p.split("/") for m in modules for p in prefixes(m) if p]
    if not head:
        return {"/".join(p) + tail for p in paths}
    return {head + "/".join(p[-depth:]) + tail for p in paths if len(p) >= depth}


def _check_primitives(
    leaf: Primitive, own: set[str], others: Iterable[str] | None, call: str
) -> None:
    missing = [p for p in leaf.patterns if not any_match(own, (p,))]
    if not missing:
        return
    known = own | set(_jax.known_primitives() if others is None else others)
    for pattern in missing:
        if not any_match(known, (pattern,)):
            raise unknown("primitive", pattern, known, call=call)


def unmatched(policy: Policy, values: Iterable[Value]) -> list[str]:
    """Return the repr of every rule of ``policy`` that selects none of ``values``.

    >>> from remat_kit import dots, named, offload, save
    >>> unmatched(save(dots) | offload(named("x", strict=False)), [Value(primitives=("max",))])
    ['save(dots)', "offload(named('x', strict=False))"]

    Args:
      policy: the policy; ``save(nothing)`` is never reported, because it is meant to select
        nothing.
      values: every intermediate value of the function.
    """
    values = list(values)
    rules = [r for r in policy.rules() if not (isinstance(r, Rule) and r.selector == nothing)]
    return [repr(r) for r in dict.fromkeys(rules) if not any(r.matches(v) for v in values)]
