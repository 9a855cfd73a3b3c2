"""The information that every lint reads, and helpers for messages and fixes."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from remat_kit import _jax
from remat_kit._apply.region import user_name
from remat_kit._chip.memory import Memory
from remat_kit._compiled.collectives import Collective
from remat_kit._compiled.duplicates import RecomputedOps
from remat_kit._compiled.peak import Peak
from remat_kit._errors import PolicyError
from remat_kit._inspect.recomputed import Recomputed, duplicates
from remat_kit._inspect.residuals import Residual
from remat_kit._policy import algebra as _algebra
from remat_kit._policy import patterns as _patterns
from remat_kit._policy import reading as _reading
from remat_kit._policy import selectors as _selectors
from remat_kit._policy import structural as _structural
from remat_kit._policy.algebra import Policy, Selector
from remat_kit._program import paths as _paths
from remat_kit._program import value as _value
from remat_kit._program.flow import Argument, Element, Frame, Op, Region
from remat_kit._program.steps.gradient import Gradient

WORTH_A_LINE = 0.01  # fraction of all saved bytes


TINY_BYTES = 64 * 2**10  # size of one transfer


SMALL_BYTES = 2**20  # size of all transfers of one value together


WHOLE = 0.9  # fraction of the loss's FLOPs


@dataclasses.dataclass(frozen=True)
class Lint:
    """Something that costs memory or time without a benefit, and what to do about it.

    `Report.lints` holds them. A code stands for one kind of fault, as in a linter for source code
    such as Ruff.

    >>> lint = Lint("no-effect", "the region saves everything", "remat_kit.policy('nothing')")
    >>> print(lint)
    no-effect: the region saves everything
    fix: remat_kit.policy('nothing')

    Attributes:
        code: the kind, such as ``"saved-upcast"``.
        message: what it is, where, how many bytes, and why it costs.
        fix: a policy or a line of code to paste.
        module: module path, repeated blocks combined (``GPT/block_*/mlp``); empty outside modules.
        source: ``file:line`` of the user's line; empty if no single line is the cause.
        bytes: bytes that need not be saved, moved or recomputed.
    """

    code: str
    message: str
    fix: str
    module: str = ""
    source: str = ""
    bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return f"{self.code}: {self.message}\nfix: {self.fix}"


@dataclasses.dataclass(frozen=True)
class CompiledFacts:
    """What the compiler for one target did with the gradient.

    Attributes:
        memory: the memory of the compiled program.
        hlo: the operations that it computes twice; None if the program did not compile.
        collectives: the collectives of the compiled program.
        baseline: the memory of the same loss without a policy, if that was compiled.
        peak: the peak of the compiled program; None if the compiler returned no program.
    """

    memory: Memory
    hlo: RecomputedOps | None = None
    baseline: Memory | None = None
    collectives: tuple[Collective, ...] = ()
    peak: Peak | None = None


# -- what the lints look at -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Scene:
    """One gradient, with facts that several lints need computed once."""

    gradient: Gradient
    kept: tuple[tuple[Op, Residual], ...]
    recomputed: tuple[Recomputed, ...]
    forward_flops: float
    policy: Policy | None
    at: str | None
    compiled: dict[str, CompiledFacts]

    @functools.cached_property
    def on_device(self) -> list[tuple[Op, Residual]]:
        """The intermediate values that are saved on the device, each with its operation."""
        is_constant = self.gradient.flow.numbering.is_constant
        return [
            (op, r)
            for op, r in self.kept
            if not r.is_input and r.memory == "device" and not is_constant(op.inputs[0].number)
        ]

    @functools.cached_property
    def threshold(self) -> float:
        """The least number of bytes that a lint must be about."""
        return WORTH_A_LINE * sum(r.bytes for _, r in self.kept if not r.is_input)

    @functools.cached_property
    def alive(self) -> set[int]:
        """The numbers of the values that are in memory anyway."""
        core = self.gradient.flow.numbering.core
        return {core(op.inputs[0].number) for op, _ in self.kept}

    def lives(self, number: int) -> bool:
        """Tell whether a value is saved for itself, or is part of an argument."""
        numbering = self.gradient.flow.numbering
        number = numbering.core(number)
        while number not in self.alive:
            match numbering.key(number):
                case Element(array=array):
                    number = numbering.core(array)
                case Argument():
                    return True
                case _:
                    return False
        return True

    # .. regions

    @functools.cached_property
    def regions(self) -> list[tuple[Region, Frame]]:
        """The checkpoint regions of the loss, each with the frame of its equation."""
        return [(r, _frame_of(r)) for r in self.gradient.primal.regions if r.ops]

    @functools.cached_property
    def repeated(self) -> dict[Region, list[Op]]:
        """The recomputed operations of each region that has any."""
        home: dict[int, list[Region]] = {}
        for region, _ in self.regions:
            for op in region.ops:
                for number in op.numbers[:1]:
                    home.setdefault(number, []).append(region)
        found: dict[Region, list[Op]] = {}
        for duplicate in duplicates(self.gradient):
            for region in dict.fromkeys(home.get(duplicate.op.numbers[0], ())):
                found.setdefault(region, []).append(duplicate.op)
        return found

    @functools.cached_property
    def unattributed(self) -> list[Op]:
        """The recomputed operations that belong to no region of the loss called alone.

        The body of a `jax.custom_vjp` function and its forward rule may compute the same result in
        two ways. The trace then contains only the operations of the rule twice.
        """
        known = {number for region, _ in self.regions for op in region.ops for number in op.numbers}
        return [d.twin for d in duplicates(self.gradient) if d.op.numbers[0] not in known]

    @functools.cached_property
    def names(self) -> set[str]:
        """The checkpoint names that the user gave to values."""
        tables = (self.gradient.primal.names, self.gradient.flow.names)
        return {n for t in tables for ns in t.values() for n in map(user_name, ns) if n is not None}

    # .. fixes

    @functools.cached_property
    def blocks(self) -> str | None:
        """A pattern for the outermost repeated modules that do most of the work, or None."""
        flops: dict[str, float] = {}
        members: dict[str, set[str]] = {}
        for op in self.gradient.primal_live:
            if op.kind != "equation" or not op.flops:
                continue
            outside = _loop_depth(op)
            for depth in range(1, len(op.path) + 1):
                path = "/".join(op.path[:depth])
                pattern = _paths.roll_up(path)
                flops[pattern] = flops.get(pattern, 0.0) + op.flops
                # A value inside a loop occurs once for each iteration of the loop.
                rounds = [f"{path} again"] if outside is not None and depth > outside else []
                members.setdefault(pattern, set()).update([path, *rounds])
        depths = sorted(flops, key=lambda p: (p.count("/"), -flops[p]))
        for pattern in depths:
            if len(members[pattern]) > 1 and flops[pattern] > self.forward_flops / 2:
                return as_at(pattern)
        return None

    def instead(self, change: Callable[[Policy | None], Policy], r: Residual) -> str:
        """Return the call that applies a changed policy where ``r`` is computed."""
        if self.at is not None and _patterns.prefix_matching(self.at, r.module) is None:
            return policy_call(change(None), _paths.roll_up(r.module) or None)
        if self.policy is not None:
            return policy_call(changed_inside(self.policy, change), self.at)
        rule = rule_of(r)
        if rule is not None:
            return policy_call(change(rule), self._region_at(r))
        if self.blocks is not None and _patterns.prefix_matching(self.blocks, r.module):
            return policy_call(change(None), self.blocks)
        if r.times > 1:
            return f"layer = {policy_call(change(None))}(layer)  # the body of the loop"
        return policy_call(change(None))

    def _region_at(self, r: Residual) -> str | None:
        path = r.module
        found = {region.module for region, _ in self.regions}
        inside = [m for m in found if m and (path + "/").startswith(m + "/")]
        return as_at(_paths.roll_up(min(inside, key=len))) if inside else None


def _frame_of(region: Region) -> Frame:
    """Return the frame of the checkpoint equation; its parent is the code around the equation."""
    frame = region.ops[0].frame
    while frame.parent is not None and region in frame.parent.regions:
        frame = frame.parent
    return frame


def _loop_depth(op: Op) -> int | None:
    """Return the length of the module path of the outermost loop around an operation, or None."""
    frame, loop = op.frame, None
    while frame.parent is not None:
        if frame.times > frame.parent.times:
            loop = frame
        frame = frame.parent
    return None if loop is None else len(loop.path)


def changed_inside(policy: Policy, change: Callable[[Policy | None], Policy]) -> Policy:
    """Change a policy; for one that places regions, change what it saves inside them.

    `sliced` saves nothing inside, so another policy takes its place.
    """
    if isinstance(policy, _structural.Sliced):
        return change(policy.keep)
    if isinstance(policy, _structural.Structural):
        return dataclasses.replace(policy, keep=change(policy.keep))
    return change(policy)


def rule_of(r: Residual) -> Policy | None:
    """Return the rule that saves a value, if its reason is a rule."""
    text = re.sub(r" to \w+$", "", r.reason.removeprefix("not in "))
    try:
        return _reading.as_policy(text) if text.startswith(_VERBS) else None
    except PolicyError:  # the rule holds a function, which cannot be rebuilt from text
        return None


_VERBS = ("save(", "offload(", "recompute(")


def policy_call(policy: Policy | str, at: str | None = None) -> str:
    """Return the text of a decorator that needs no names but ``remat_kit``.

    >>> from remat_kit import dots, save
    >>> policy_call(save(dots), "*/block_*")
    'remat_kit.policy("save(dots)", at="*/block_*")'
    """
    text = (policy if isinstance(policy, str) else repr(policy)).replace('"', "'")
    place = "" if at is None else f', at="{at}"'
    return f'remat_kit.policy("{text}"{place})'


def as_at(pattern: str) -> str | None:
    """Return the pattern for ``at=`` that finds a rolled-up module path; None if it is empty.

    >>> as_at("GPT/block_*"), as_at("layer_*"), as_at("GPT/layers/*")
    ('*/block_*', '*/layer_*', '*/layers/*')
    """
    parts = pattern.split("/")
    if not pattern:
        return None
    return "/".join(["*", *(parts[1:] or parts)])


def recomputing_before(selector: Selector, policy: Policy | None) -> Policy:
    """Recompute the values of a selector, and decide about the rest as before."""
    dropped = _algebra.recompute(selector)
    return dropped if policy is None else dropped >> policy


def in_module(module: str) -> Selector | None:
    return _selectors.module(module) if module else None


def conjunction(*selectors: Selector | None) -> Selector:
    found = [s for s in selectors if s is not None]
    return functools.reduce(lambda a, b: a & b, found)


def at_place(module: str, source: str) -> str:
    if not module:
        return f" at {source}" if source else ""
    return f" in {module} ({source})" if source else f" in {module}"


def array_text(r: Residual) -> str:
    return f"{r.dtype}[{','.join(map(str, r.shape))}]"


def counted(n: int, what: str) -> str:
    return f"{n} {what}s" if n > 1 else f"a {what}"


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def is_product(op: Op) -> bool:
    return op.kind == "equation" and _selectors.dots.matches(
        _value.Value(primitives=(op.primitive,))
    )


KEEPS_NOTHING = _algebra.save(_selectors.nothing)


def region_params(frame: Frame) -> Mapping[str, Any]:
    hi = _jax.hi_primitive(frame.eqn)
    return frame.eqn.params if hi is None else hi.params
