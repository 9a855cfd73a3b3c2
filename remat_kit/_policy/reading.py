"""Which policy does a user mean by a value, a text, a policy callable of JAX or a table?"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from remat_kit._errors import PolicyError, unknown
from remat_kit._policy.algebra import (
    MAX_NAMES,
    MAX_NESTING,
    Policy,
    Selector,
    callable_policy,
    offload,
    recompute,
    save,
)
from remat_kit._policy.recipe import resolve
from remat_kit._policy.selectors import module, named, nothing, primitive
from remat_kit._units import shortened


def as_policy(obj: Any, *, call: str = "policy(...)") -> Policy | None:
    """Return the policy that ``obj`` stands for, or None if ``obj`` is None or ``"none"``.

    >>> from remat_kit import dots
    >>> as_policy(dots)
    save(dots)
    >>> as_policy({"save": ["attn_out"], "offload": {"module": "*/mlp"}})
    save(named('attn_out')) | offload(module('*/mlp'))

    Args:
      obj: a `Policy`; a `Selector`, whose values are saved; the name of a preset, the path of a
        recipe, or the repr of a policy; a policy callable of JAX; or a table from a configuration
        file. Such a table has either ``policy`` (a text) or any of ``save``, ``offload`` and
        ``recompute``. Each of these is a name pattern, a table of ``name``, ``module`` and
        ``primitive`` patterns, or a list of these. The values that ``recompute`` lists are
        recomputed even if another key lists them too. ``to`` is the memory kind for ``offload``.
      call: the call as the user wrote it, which messages quote.

    Raises:
      PolicyError: ``obj`` stands for no policy.
      UnknownNameError: a preset, a recipe or a key of the table does not exist.
    """
    if obj is None or obj == "none":
        return None
    if isinstance(obj, Policy):
        return obj
    if isinstance(obj, Selector):
        return save(obj)
    if isinstance(obj, str):
        return resolve(obj)
    if isinstance(obj, Mapping):
        return _from_table(obj, call)
    if callable(obj) and not isinstance(obj, type):
        return callable_policy(obj)
    raise PolicyError(
        f"`{call}`: {shortened(obj)} is not a policy",
        hint="give a preset ('dots'), a policy (save(named('attn_out'))), a selector, the path of "
        "a recipe, a policy of jax.checkpoint_policies, or None",
    )


_TABLE_KEYS = ("policy", "recompute", "save", "offload", "to")


_SELECTING = {"name": named, "module": module, "primitive": primitive}


def _from_table(table: Mapping[str, Any], call: str) -> Policy | None:
    for key in table:
        if key not in _TABLE_KEYS:
            raise unknown("key of a policy table", _key(key), _TABLE_KEYS, call=call)
    if "policy" in table and len(table) == 1:
        if isinstance(table["policy"], Mapping):
            raise PolicyError(
                f"`{call}`: 'policy' holds {shortened(table['policy'])}, a table in a table",
                hint="give its text, or put the inner table in the place of the outer one",
            )
        return as_policy(table["policy"], call=call)
    if "policy" in table or not {"recompute", "save", "offload"} & set(table):
        raise PolicyError(
            f"`{call}`: the table {shortened(dict(table))} must have 'policy' alone, or any of "
            "'save', 'offload' and 'recompute'",
            hint='for example {"save": ["attn_out"], "offload": {"module": "*/mlp"}}',
        )
    read = _TableReader(call)
    selectors = {verb: read.selector(table[verb]) for verb in table if verb != "to"}
    storing: list[Policy] = []
    if "save" in selectors:
        storing.append(save(selectors["save"]))
    if "offload" in selectors:
        storing.append(offload(selectors["offload"], table.get("to", "pinned_host")))
    if "recompute" not in selectors:
        return functools.reduce(lambda a, b: a | b, storing)
    recomputing = recompute(selectors["recompute"])
    return recomputing >> functools.reduce(lambda a, b: a | b, storing) if storing else recomputing


def _key(key: Any) -> str:
    return key if isinstance(key, str) else shortened(key)


class _TableReader:
    """Reads the selectors of one table, and counts its entries, since a list may contain itself."""

    def __init__(self, call: str):
        self.call = call
        self.count = 0

    def selector(self, entry: Any, depth: int = 0) -> Selector:
        self.count += 1
        if depth > MAX_NESTING or self.count > MAX_NAMES:
            what = "names" if self.count > MAX_NAMES else "lists inside of one another"
            raise PolicyError(
                f"`{self.call}`: a policy table with more than "
                f"{MAX_NAMES if what == 'names' else MAX_NESTING} {what}",
                hint="use patterns such as 'attn_*' in one list",
            )
        if isinstance(entry, str):
            return named(entry)
        if isinstance(entry, Mapping) and entry:
            return _either(self.by_key(_key(key), entry[key]) for key in entry)
        if isinstance(entry, list | tuple):
            names = [e for e in entry if isinstance(e, str)]
            self.count += len(names)
            rest = [self.selector(e, depth + 1) for e in entry if not isinstance(e, str)]
            return _either([*([named(*names)] if names else []), *rest]) if entry else nothing
        raise PolicyError(
            f"`{self.call}`: {shortened(entry)} selects no value",
            hint='give a name pattern, a table such as {"module": "*/mlp"}, or a list of these',
        )

    def by_key(self, key: str, patterns: Any) -> Selector:
        if key not in _SELECTING:
            raise unknown("key of a selector table", key, _SELECTING, call=self.call)
        patterns = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(patterns, list | tuple) or not all(isinstance(p, str) for p in patterns):
            raise PolicyError(
                f"`{self.call}`: {key!r} holds {shortened(patterns)}, not a pattern or a list of "
                "patterns",
                hint='for example {"module": ["*/mlp", "*/attn"]}',
            )
        self.count += len(patterns)
        return _SELECTING[key](*patterns)


def _either(selectors: Iterable[Selector]) -> Selector:
    return functools.reduce(lambda a, b: a | b, selectors)
