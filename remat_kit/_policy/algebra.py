"""What is a policy, and how do policies and selectors combine?

A *selector* is a predicate on one intermediate value of a function. A *policy* is a function from
values to decisions, which are ordered ``RECOMPUTE < OFFLOAD < SAVE``. Both are frozen, hashable and
comparable. Operators combine them, and evaluating the ``repr`` of either rebuilds it:

>>> from remat_kit import module, named
>>> p = save(named("attn_out")) | offload(module("*/mlp"))
>>> p
save(named('attn_out')) | offload(module('*/mlp'))
>>> p.decide(Value(primitives=("dot_general",), module="GPT/block_0/mlp/up"))
<Decision.OFFLOAD: 1>

==========================  =====================================================
selectors                   policies
==========================  =====================================================
``a | b`` either            ``a | b`` the stronger decision
``a & b`` both              ``a & b`` the weaker decision
``~a`` not                  ``a >> b`` the first that matches decides, the last
``a - b`` one, not other    one decides what nothing matched
==========================  =====================================================
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax

from remat_kit import _jax
from remat_kit._errors import PolicyError, unknown
from remat_kit._program.value import Value
from remat_kit._units import shortened

# Largest depth and number of names of a policy. A policy that a person writes has a few levels and
# tens of names. Beyond these bounds Python's recursion limit and algorithms of quadratic cost would
# become noticeable.
MAX_NESTING = 100


MAX_NAMES = 10_000


_PLAIN_HINT = "apply it with `remat_kit.policy(...)`, which sees modules, sizes and source lines"


class Decision(enum.IntEnum):
    """What happens to one intermediate value between the forward and the backward pass.

    Decisions are ordered: ``|`` of policies takes the larger decision and ``&`` the smaller.
    Compare decisions, never their numbers, because a fourth one (a residual saved in fewer bits)
    would lie between two of these. `jax.checkpoint` has the same three: a policy callable returns
    True, False or an offload.

    >>> max(Decision.RECOMPUTE, Decision.OFFLOAD)
    <Decision.OFFLOAD: 1>
    """

    RECOMPUTE = 0
    OFFLOAD = 1
    SAVE = 2


# ---------------------------------------------------------------------------------------------
# Selectors
# ---------------------------------------------------------------------------------------------


class Selector:
    """A predicate on one `Value`; combine with ``|``, ``&``, ``~`` and ``-``.

    Where a function expects a policy, a selector ``s`` means ``save(s)``. A selector plays the role
    of a policy callable of `jax.checkpoint`.

    Raises:
      TypeError: an operand of ``|``, ``&`` or ``-`` is neither a selector nor a policy.

    >>> from remat_kit import dots, larger_than, named
    >>> s = (named("attn_*") | dots) - larger_than("1MiB")
    >>> s
    (named('attn_*') | dots) & ~larger_than('1MiB')
    """

    _precedence = 9
    _depth = 1
    plain = False
    """Whether the selector reads only what JAX tells its policies: primitive and parameters."""

    def matches(self, value: Value) -> bool:
        """Whether ``value`` is selected."""
        raise NotImplementedError

    def leaves(self) -> Iterator[Selector]:
        """Iterate over the selectors that operators have combined into this one."""
        yield self

    def __or__(self, other: Selector) -> Selector:
        return _join(Union, self, other)

    def __and__(self, other: Selector) -> Selector:
        return _join(Intersection, self, other)

    def __sub__(self, other: Selector) -> Selector:
        if not isinstance(other, Selector):
            return NotImplemented
        return _join(Intersection, self, ~other)

    def __invert__(self) -> Selector:
        return _at_depth(Complement(self), self._depth + 1)

    def __rshift__(self, other: Any) -> Policy:
        return first(self, other)


def _join(kind: type, a: Selector, b: Selector) -> Any:
    # The operators are associative, so nested nodes of one kind are one flat node, and
    # `(a | b) | c == a | (b | c)`.
    if not isinstance(b, Selector):
        return NotImplemented
    parts = [p.parts if isinstance(p, _Combined) and type(p) is kind else (p,) for p in (a, b)]
    return _at_depth(kind(parts[0] + parts[1]), _depth_of(kind, a, b))


def _depth_of(kind: type, *parts: Any) -> int:
    """Return the nesting depth of a node; parts of the same kind add no level to it."""
    return max(p._depth + (type(p) is not kind) for p in parts)


def _at_depth(node: Any, depth: int) -> Any:
    """Record the depth of a node, to which its repr, hash and decisions recurse.

    Raises:
      PolicyError: the node is deeper than `MAX_NESTING`.
    """
    if depth > MAX_NESTING:
        raise PolicyError(
            f"`{type(node).__name__.lower()} of ...`: this is too deeply nested, more than "
            f"{MAX_NESTING} operators inside of one another",
            hint="a chain such as a | b | c has a depth of one; alternate less often between | and "
            "&, or give one selector several patterns: named('a', 'b')",
        )
    object.__setattr__(node, "_depth", depth)
    return node


def _wrapped(node: Any, precedence: int) -> str:
    return repr(node) if node._precedence > precedence else f"({node!r})"


@dataclasses.dataclass(frozen=True, repr=False)
class _Combined(Selector):
    parts: tuple[Selector, ...]

    def leaves(self) -> Iterator[Selector]:
        for part in self.parts:
            yield from part.leaves()


class Union(_Combined):
    """Selects the values that any of ``parts`` selects, written ``a | b``."""

    _precedence = 1

    def matches(self, value: Value) -> bool:
        return any(p.matches(value) for p in self.parts)

    def __repr__(self) -> str:
        return " | ".join(_wrapped(p, 1) for p in self.parts)


class Intersection(_Combined):
    """Selects the values that all of ``parts`` select, written ``a & b``."""

    _precedence = 2

    def matches(self, value: Value) -> bool:
        return all(p.matches(value) for p in self.parts)

    def __repr__(self) -> str:
        return " & ".join(_wrapped(p, 2) for p in self.parts)


@dataclasses.dataclass(frozen=True, repr=False)
class Complement(Selector):
    """Selects the values that ``part`` does not select, written ``~a``."""

    part: Selector
    _precedence = 4

    def matches(self, value: Value) -> bool:
        return not self.part.matches(value)

    def leaves(self) -> Iterator[Selector]:
        return self.part.leaves()

    def __repr__(self) -> str:
        return "~" + _wrapped(self.part, 3)


def qualified(fn: Any) -> str:
    named_by = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{named_by.__module__}.{named_by.__qualname__}"


# ---------------------------------------------------------------------------------------------
# Policies
# ---------------------------------------------------------------------------------------------


class Policy:
    """A function from values to decisions; combine policies with ``|``, ``&`` and ``>>``.

    A policy whose selectors are `primitive`, `named`, `named_regex`, the constants and wrapped JAX
    policies is itself a JAX policy: give it to `jax.checkpoint`, `flax.linen.remat` or
    `flax.nnx.remat` as it is. JAX then asks about a value and its named copy separately, so that
    ``~named("x")`` selects the value without the name.

    Under the flag ``jax_remat3``, JAX asks a policy less often: jax 0.12 asks about names, products
    and convolutions only, and jax 0.10.2 never asks, unless the policy is one of JAX's own.
    `remat_kit.policy` applies every decision under this flag too.

    Raises:
      TypeError: an operand of ``|`` or ``&`` is not a policy.
      PolicyError: an operand of ``>>`` is not a policy or cannot be combined.

    >>> import jax, jax.numpy as jnp
    >>> from remat_kit import primitive
    >>> f = jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x)), policy=save(primitive("tanh")))
    >>> jax.grad(f)(0.0)
    Array(1., dtype=float32, weak_type=True)
    """

    # `structural.Structural`, whose policies also say where regions are, overrides both.
    places_regions: ClassVar[bool] = False
    _head: ClassVar[str] = ""
    _takes_keep: ClassVar[bool] = True
    _precedence = 9
    _depth = 1

    def decide(self, value: Value) -> Decision:
        """Return the decision about ``value``."""
        return self.deciding(value)._verdict(value)

    def matches(self, value: Value) -> bool:
        """Whether a rule of this policy selects ``value``, rather than deciding by default."""
        raise NotImplementedError

    def rule(self, value: Value) -> str:
        """Return the repr of the single rule that decides ``value``."""
        return repr(self.deciding(value))

    def destination(self, value: Value) -> str:
        """Return the memory kind that stores ``value``: ``"device"``, unless it is offloaded."""
        return self.deciding(value)._destination(value)

    def deciding(self, value: Value) -> _Leaf:
        """Return the single rule that decides ``value``."""
        raise NotImplementedError

    def rules(self) -> Iterator[_Leaf]:
        """Iterate over the single rules that operators have combined into this policy."""
        raise NotImplementedError

    def leaves(self) -> Iterator[Selector]:
        """Iterate over the leaf selectors of all rules."""
        for rule in self.rules():
            if isinstance(rule, Rule):
                yield from rule.selector.leaves()

    def __or__(self, other: Any) -> Policy:
        return _combine(Stronger, "|", self, other)

    def __ror__(self, other: Any) -> Policy:
        return _combine(Stronger, "|", other, self)

    def __and__(self, other: Any) -> Policy:
        return _combine(Weaker, "&", self, other)

    def __rand__(self, other: Any) -> Policy:
        return _combine(Weaker, "&", other, self)

    def __rshift__(self, other: Any) -> Policy:
        return _combine(First, ">>", self, other)

    def __rrshift__(self, other: Any) -> Policy:
        return _combine(First, ">>", other, self)

    def __call__(self, prim: Any, *in_avals: Any, **params: Any) -> Any:
        """Decide as a policy of `jax.checkpoint`: True, False or, with offloading, an enum.

        Raises:
          PolicyError: a selector needs what JAX does not tell its policies.
        """
        blind = _needs_more(self)
        if blind:
            raise PolicyError(
                f"`jax.checkpoint(policy={self!r})`: JAX tells its policies the primitive and "
                f"its parameters only, but {blind} needs more",
                hint=_PLAIN_HINT,
            )
        name = params.get("name") if prim.name == "name" else None
        value = Value(
            primitives=(_jax.name_of(prim),),
            names=(name,) if isinstance(name, str) else (),
            primitive=prim,
            in_avals=in_avals,
            params=params,
        )
        return self._for_jax(value)

    def _for_jax(self, value: Value) -> Any:
        leaf = self.deciding(value)
        decision = leaf._verdict(value)
        if decision is Decision.OFFLOAD:
            return _jax.offloadable("device", leaf._destination(value))
        if not _has_offload(self):
            return decision is Decision.SAVE
        return _jax.SAVEABLE if decision is Decision.SAVE else _jax.RECOMPUTE


@functools.lru_cache(maxsize=1024)
def _needs_more(policy: Policy) -> str:
    if policy.places_regions:
        return f"`{policy!r}` says where regions are and"
    blind = [f"`{s!r}`" for s in policy.leaves() if not s.plain]
    return " and ".join(dict.fromkeys(blind))


@functools.lru_cache(maxsize=1024)
def _has_offload(policy: Policy) -> bool:
    return any(isinstance(r, Rule) and r.decision is Decision.OFFLOAD for r in policy.rules())


def read(obj: Any, *, call: str) -> Policy | None:
    """Return the policy that an operand stands for: `remat_kit._policy.reading.as_policy`.

    That module builds policies from texts and tables, so it is imported when it is first needed.
    """
    from remat_kit._policy.reading import as_policy

    return as_policy(obj, call=call)


def _combine(kind: type, sign: str, *operands: Any) -> Any:
    policies = [_operand(p, sign) for p in operands]
    parts = [p.parts if isinstance(p, _Node) and type(p) is kind else (p,) for p in policies]
    return _at_depth(kind(tuple(itertools.chain(*parts))), _depth_of(kind, *policies))


def _operand(obj: Any, sign: str) -> Policy:
    policy = read(obj, call=f"... {sign} ...")
    if policy is None:
        raise PolicyError(
            f"`... {sign} {obj!r}`: None means that no policy is applied, and cannot be combined "
            "with a policy",
            hint="`save(everything)` saves all residuals, as JAX does without a policy; "
            "`save(nothing)` saves none",
        )
    if policy.places_regions:
        raise PolicyError(
            f"`... {sign} {policy!r}`: a policy that says where regions are cannot be combined",
            hint=f"put the rest inside it: `{policy._head}, keep=...)`"
            if policy._takes_keep
            else "decorate twice, or apply each with its own at=",
        )
    return policy


class _Leaf(Policy):
    """A policy that consists of a single rule."""

    def deciding(self, value: Value) -> _Leaf:
        return self

    def rules(self) -> Iterator[_Leaf]:
        yield self

    def _verdict(self, value: Value) -> Decision:
        raise NotImplementedError

    def _destination(self, value: Value) -> str:
        raise NotImplementedError


_VERBS = {Decision.SAVE: "save", Decision.OFFLOAD: "offload", Decision.RECOMPUTE: "recompute"}


_HOST_KINDS = ("pinned_host", "unpinned_host")


@dataclasses.dataclass(frozen=True, repr=False)
class Rule(_Leaf):
    """One decision about the values that a selector matches: see `save`, `offload`, `recompute`.

    Attributes:
      decision: the decision about the values that ``selector`` matches.
      selector: the predicate.
      to: the memory kind that stores offloaded values; ``"device"`` for the other decisions.
    """

    decision: Decision
    selector: Selector
    to: str = "device"

    def matches(self, value: Value) -> bool:
        return self.selector.matches(value)

    def _verdict(self, value: Value) -> Decision:
        if self.selector.matches(value):
            return self.decision
        return Decision.SAVE if self.decision is Decision.RECOMPUTE else Decision.RECOMPUTE

    def _destination(self, value: Value) -> str:
        return self.to if self.selector.matches(value) else "device"

    def __repr__(self) -> str:
        to = f", to={self.to!r}" if self.to not in ("device", "pinned_host") else ""
        return f"{_VERBS[self.decision]}({self.selector!r}{to})"


def _selector(call: str, obj: Any) -> Selector:
    if isinstance(obj, Selector):
        return obj
    hints = {
        str: f"to select by name write `{call}(named({obj!r}))`",
        type(None): f"to select no value write `{call}(nothing)`",
    }
    raise PolicyError(
        f"`{call}({obj!r})`: the argument must be a selector, not a {type(obj).__name__}",
        hint=hints.get(type(obj), f"for example `{call}(dots)` or `{call}(module('*/mlp'))`"),
    )


def save(selector: Selector) -> Policy:
    """Save the values that ``selector`` selects, and recompute the rest.

    Follows `jax.checkpoint_policies`, such as ``dots_saveable`` and ``save_only_these_names``.

    >>> from remat_kit import dots
    >>> save(dots).decide(Value(primitives=("tanh",)))
    <Decision.RECOMPUTE: 0>

    Raises:
      PolicyError: ``selector`` is not a selector.
    """
    return Rule(Decision.SAVE, _selector("save", selector))


def offload(selector: Selector, to: str = "pinned_host") -> Policy:
    """Offload the values that ``selector`` selects to host memory, and recompute the rest.

    The backward pass copies an offloaded value back to the device before it reads the value.

    Follows `jax.checkpoint_policies.save_and_offload_only_these_names`.

    >>> from remat_kit import module
    >>> p = offload(module("*/mlp"))
    >>> p.destination(Value(module="GPT/mlp")), p.destination(Value(module="GPT/attn"))
    ('pinned_host', 'device')

    Args:
      selector: selects the values to offload.
      to: the memory kind that stores them, ``"pinned_host"`` or ``"unpinned_host"``.

    Raises:
      PolicyError: ``selector`` is not a selector.
      UnknownNameError: ``to`` is not a memory kind of the host.
    """
    if to not in _HOST_KINDS:
        shown = shortened(to)
        word = to if isinstance(to, str) else shown
        raise unknown("host memory kind", word, _HOST_KINDS, call=f"offload(..., to={shown})")
    return Rule(Decision.OFFLOAD, _selector("offload", selector), to)


def recompute(selector: Selector) -> Policy:
    """Recompute the values that ``selector`` selects, and save the rest, as ``save(~selector)``.

    The two differ in values that only a derivative rule computes, such as the ``2 * x`` of
    ``x ** 2``. ``save(~selector)`` saves such a value and so avoids recomputing ``x``, whereas
    ``recompute(selector)`` treats it like the value that it is computed from. Follows
    `jax.checkpoint_policies.save_anything_except_these_names`.

    >>> from remat_kit import primitive
    >>> recompute(primitive("max")).decide(Value(primitives=("dot_general",)))
    <Decision.SAVE: 2>

    Raises:
      PolicyError: ``selector`` is not a selector.
    """
    return Rule(Decision.RECOMPUTE, _selector("recompute", selector))


@dataclasses.dataclass(frozen=True, repr=False)
class _Node(Policy):
    parts: tuple[Policy, ...]
    _sign = ""

    def matches(self, value: Value) -> bool:
        return any(p.matches(value) for p in self.parts)

    def rules(self) -> Iterator[_Leaf]:
        for part in self.parts:
            yield from part.rules()

    def __repr__(self) -> str:
        return f" {self._sign} ".join(_wrapped(p, self._precedence) for p in self.parts)


class Stronger(_Node):
    """The strongest decision of ``parts``, written ``a | b``."""

    _sign, _precedence = "|", 1

    def deciding(self, value: Value) -> _Leaf:
        leaves = [p.deciding(value) for p in self.parts]
        return max(leaves, key=lambda leaf: (leaf._verdict(value), leaf.matches(value)))


class Weaker(_Node):
    """The weakest decision of ``parts``, written ``a & b``."""

    _sign, _precedence = "&", 2

    def deciding(self, value: Value) -> _Leaf:
        leaves = [p.deciding(value) for p in self.parts]
        return min(leaves, key=lambda leaf: (leaf._verdict(value), not leaf.matches(value)))


class First(_Node):
    """The decision of the first of ``parts`` that matches, or else of the last: ``a >> b``."""

    _sign, _precedence = ">>", 3

    def deciding(self, value: Value) -> _Leaf:
        part = next((p for p in self.parts if p.matches(value)), self.parts[-1])
        return part.deciding(value)


def first(*policies: Any) -> Policy:
    """Let the first policy that matches a value decide it, and the last one if none matches.

    JAX has `jax.checkpoint_policies.save_from_both_policies` for two policies without an order.

    >>> from remat_kit import dots, primitive
    >>> p = first(recompute(primitive("max")), save(dots))
    >>> p == recompute(primitive("max")) >> save(dots)
    True
    >>> [p.decide(Value(primitives=(x,))).name for x in ("max", "dot_general", "tanh")]
    ['RECOMPUTE', 'SAVE', 'RECOMPUTE']

    Args:
      *policies: one or more policies, in any form that `remat_kit.policy` accepts.

    Raises:
      PolicyError: no policy was given, or one of them cannot be combined.
    """
    if not policies:
        raise PolicyError(
            "`first()`: no policy was given", hint="write `first(a, b, ...)` or `a >> b`"
        )
    head, *rest = policies
    return _combine(First, ">>", head, *rest) if rest else _operand(head, ">>")


# ---------------------------------------------------------------------------------------------
# JAX's own policies
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class Wrapped(_Leaf):
    """A policy that asks a policy callable of JAX: see `callable_policy`."""

    fn: Callable[..., Any]

    def matches(self, value: Value) -> bool:
        return self._verdict(value) is not Decision.RECOMPUTE

    def _verdict(self, value: Value) -> Decision:
        return self._answer(value)[0]

    def _destination(self, value: Value) -> str:
        return self._answer(value)[1]

    def _answer(self, value: Value) -> tuple[Decision, str]:
        answers: list[Any] = []
        if value.primitive is not None:
            answers.append(self.fn(value.primitive, *value.in_avals, **value.params))
        # JAX asks separately about a value and about its named copy. Here the two are one value, so
        # the stronger of the answers counts.
        if getattr(value.primitive, "name", "") != "name":
            name_p, avals = _jax.name_primitive(), value.in_avals[:1]
            answers += [self.fn(name_p, *avals, name=n) for n in value.names]
        decisions = [_normalised(answer, self) for answer in answers]
        return max(decisions, key=lambda d: d[0], default=(Decision.RECOMPUTE, "device"))

    def __repr__(self) -> str:
        known = vars(jax.checkpoint_policies).items()
        own = next((name for name, fn in known if fn is self.fn), None)
        return f"callable_policy({f'jax.checkpoint_policies.{own}' if own else qualified(self.fn)})"


def _normalised(answer: Any, policy: Wrapped) -> tuple[Decision, str]:
    if isinstance(answer, _jax.Offloadable):
        return Decision.OFFLOAD, answer.dst
    if isinstance(answer, bool):
        return (Decision.SAVE if answer else Decision.RECOMPUTE), "device"
    if answer is _jax.SAVEABLE or answer is _jax.RECOMPUTE:
        return (Decision.SAVE if answer is _jax.SAVEABLE else Decision.RECOMPUTE), "device"
    raise PolicyError(
        f"`{policy!r}`: the wrapped policy returned {answer!r}, which is not a decision",
        hint="a policy of JAX returns a bool, Saveable, Recompute or Offloadable(src, dst); "
        "call a policy factory such as `save_only_these_names` with its names first",
    )


def callable_policy(fn: Callable[..., Any]) -> Policy:
    """Wrap a policy callable of JAX (`jax.checkpoint_policies`), which may offload too.

    The policy matches the values that the callable saves or offloads.

    >>> import jax
    >>> from remat_kit import named
    >>> p = callable_policy(jax.checkpoint_policies.everything_saveable) & save(named("x"))
    >>> p
    callable_policy(jax.checkpoint_policies.everything_saveable) & save(named('x'))

    Args:
      fn: called as ``fn(primitive, *in_avals, **params)``.

    Raises:
      PolicyError: ``fn`` is not callable. When the policy is applied: ``fn`` returned something
        that is not a decision.
    """
    if not callable(fn) or isinstance(fn, Selector):
        raise PolicyError(
            f"`callable_policy({fn!r})`: the argument must be a policy callable of JAX",
            hint="for example `callable_policy(jax.checkpoint_policies.dots_saveable)`",
        )
    return fn if isinstance(fn, Policy) else Wrapped(fn)
