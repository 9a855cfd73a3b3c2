"""Do two equations, or two programs, compute the same, from the same source lines?

If blocks of a model are equal, their derivatives and decisions are computed once for all of them.
Parameters of equations are compared by content. Derivative rules are compared by the identity of
the function and by the values that are bound to it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.extend.core as jec
import numpy as np

from remat_kit import _jax
from remat_kit._frames import is_library_file
from remat_kit._program.program import KeptName, checkpoint_name_of


@dataclasses.dataclass(frozen=True, eq=False)
class _Itself:
    """A key for an object that is equal to itself alone; the key keeps the object alive."""

    value: Any

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def structure_of(program: Any) -> Any:
    """Return a key that is equal for programs that compute the same from the same source lines."""
    number: dict[Any, int] = {}
    inputs = [*getattr(program, "constvars", ()), *program.invars]
    for var in inputs:
        number[var] = len(number)

    def atom(x: Any) -> Any:
        return _literal(x) if isinstance(x, jec.Literal) else number[x]

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
    """Return a key that is equal for equations that compute the same from equal inputs."""
    atoms = tuple(_literal(v) if isinstance(v, jec.Literal) else v.aval for v in eqn.invars)
    same = tuple(eqn.invars.index(v) for v in eqn.invars if not isinstance(v, jec.Literal))
    return eqn.primitive, _parameters(eqn), atoms, same, eqn.ctx


def _literal(x: Any) -> Any:
    """Return a key of a literal.

    Scalars are compared by their bytes, since 0.0 == -0.0 and 1 == True.
    """
    if getattr(x.val, "shape", ()) != ():
        return str(x.aval), _Itself(x.val)
    if isinstance(x.val, jax.Array):
        return str(x.aval), repr(x.val)
    value = np.asarray(x.val)  # to write it as text is slow
    return str(x.aval), repr(x.val) if value.dtype.hasobject else value.tobytes()


def _parameters(eqn: Any) -> Any:
    out = []
    for name, value in eqn.params.items():
        if name == "jvp_jaxpr_fun":
            out.append((name, _rule_key(eqn)))
        else:
            out.append((name, _parameter(value)))
    checkpoint_name = checkpoint_name_of(eqn)
    if isinstance(checkpoint_name, KeptName):  # its label takes no part in ==
        out.append(("label", checkpoint_name.label))
    return tuple(out)


def _parameter(value: Any) -> Any:
    if _jax.is_jaxpr(value):
        return structure_of(getattr(value, "jaxpr", value)), _consts(value)
    if isinstance(value, (tuple, list)) and any(map(_jax.is_jaxpr, value)):
        return tuple(map(_parameter, value))  # other values may be among them
    return _exact(value) if _hashable(value) else _Itself(value)


def _rule_key(eqn: Any) -> Any:
    """Return a key that is equal for `jax.custom_jvp` calls that have the same derivative.

    The rule alone does not identify the derivative, because JAX binds the arguments in
    ``nondiff_argnums`` and the structure of the other arguments to it.
    """
    rule_and_bound = _jax.rule_identity(eqn)
    if rule_and_bound is None:
        return _Itself(eqn.params["jvp_jaxpr_fun"])
    rule, around = rule_and_bound
    return _Itself(rule), tuple(map(_bound, around))


def _bound(value: Any) -> Any:
    """Return a key for a value that is bound to a rule.

    An object of an unknown type is equal to itself alone, because its ``==`` may ignore attributes
    that the rule reads.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value), repr(value)  # 1 == True, and 0.0 == -0.0
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_bound, value))
    if isinstance(value, dict):
        return dict, tuple((_bound(k), _bound(v)) for k, v in value.items())
    if _jax.is_structural(value):
        return type(value), value
    return _Itself(value)


def _exact(value: Any) -> Any:
    """Return a key for a parameter of an equation, which tells equal numbers such as 1 and True
    apart.
    """
    if isinstance(value, tuple):
        return tuple(map(_exact, value))
    return (type(value), repr(value)) if isinstance(value, (bool, int, float, complex)) else value


def _consts(jaxpr: Any) -> tuple[Any, ...]:
    return tuple(_Itself(c) for c in getattr(jaxpr, "consts", ()))


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
