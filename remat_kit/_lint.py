"""What looks wrong in what a gradient keeps, recomputes and offloads, each with a way out.

A lint is a fact about the traced (or compiled) program that nearly always costs memory or time for
nothing: a value kept in a wider type than it was computed in, a mask kept though its key is there,
one region around the whole loss. Every lint names the place and the bytes, and its ``fix`` is text
to paste. What is less than a hundredth of all that is kept is not worth a line and is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from remat_kit import _graph, _jax, _remat
from remat_kit import _policy as algebra
from remat_kit._dataflow import FORWARD, Frame, Gradient, Op, Region
from remat_kit._duplicates import Recomputed, duplicates
from remat_kit._errors import PolicyError, near_matches
from remat_kit._hlo import RecomputedOps
from remat_kit._policy import Decision, Policy, Selector, format_bytes
from remat_kit._region import keep_labelled, read_label
from remat_kit._residuals import Residual
from remat_kit._target import Memory

WORTH_A_LINE = 0.01  # of all bytes kept
TINY_BYTES = 64 * 2**10  # of one transfer
SMALL_BYTES = 2**20  # of all transfers of one value together
WHOLE = 0.9  # of the loss's FLOPs


@dataclasses.dataclass(frozen=True)
class Lint:
    """One thing that costs memory or time for nothing, and what to do about it.

    Attributes:
        code: which kind, such as ``"saved-upcast"``.
        message: what it is, where, how many bytes, and why it costs.
        fix: a policy or a line of code to paste.
        module: module path, repeated blocks rolled up (``GPT/block_*/mlp``); empty outside modules.
        source: ``file:line`` of the user's line; empty where no single line is at fault.
        bytes: what the fix is about: bytes that need not be kept, moved or computed again.
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
class Compiled:
    """What one target's compiler made of the gradient.

    Attributes:
        memory: of the compiled program.
        hlo: what it still computes twice; None where it did not compile.
        baseline: the memory of the same loss without a policy, where that was compiled.
    """

    memory: Memory
    hlo: RecomputedOps | None = None
    baseline: Memory | None = None


def lints_of(
    gradient: Gradient,
    kept: Sequence[tuple[Op, Residual]],
    recomputed: Sequence[Recomputed],
    *,
    forward_flops: float,
    policy: Policy | None = None,
    at: str | None = None,
    compiled: Mapping[str, Compiled] | None = None,
) -> tuple[Lint, ...]:
    """Return what looks wrong in a traced gradient, by kind, most bytes first.

    >>> import jax, jax.numpy as jnp
    >>> from remat_kit import inspect
    >>> x = jax.ShapeDtypeStruct((64,), jnp.bfloat16)
    >>> def loss(x):
    ...     y = jnp.sin(x).astype(jnp.float32)
    ...     return jnp.sum(jnp.sin(y) * y)
    >>> (lint,) = inspect(loss, x).lints
    >>> lint.code, lint.bytes
    ('saved-upcast', 128)
    >>> print(lint.fix)
    remat_kit.policy("recompute(primitive('convert_element_type') & dtype('float32'))")

    Args:
        gradient: as `trace_gradient` gives it.
        kept: as `kept_of` gives them.
        recomputed: as `recomputed_of` gives them.
        forward_flops: floating-point operations of the loss alone.
        policy: the outermost one that was applied to the loss, if it is known.
        at: the module paths it was applied at.
        compiled: by target.
    """
    scene = _Scene(
        gradient, tuple(kept), tuple(recomputed), forward_flops, policy, at, dict(compiled or {})
    )
    found = [lint for rule in _RULES for lint in _heaviest_first(rule(scene))]
    return tuple(dict.fromkeys(found))


def _heaviest_first(lints: Iterable[Lint]) -> list[Lint]:
    return sorted(lints, key=lambda lint: -lint.bytes)


# -- what the lints look at -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Scene:
    """One gradient, with what several lints ask of it worked out once."""

    gradient: Gradient
    kept: tuple[tuple[Op, Residual], ...]
    recomputed: tuple[Recomputed, ...]
    forward_flops: float
    policy: Policy | None
    at: str | None
    compiled: dict[str, Compiled]

    @functools.cached_property
    def on_device(self) -> list[tuple[Op, Residual]]:
        """The intermediate values that the device keeps, with what hands them over."""
        is_constant = self.gradient.flow.numbering.is_constant
        return [
            (op, r)
            for op, r in self.kept
            if not r.is_input and r.memory == "device" and not is_constant(op.inputs[0].number)
        ]

    @functools.cached_property
    def threshold(self) -> float:
        """The bytes that are worth a line."""
        return WORTH_A_LINE * sum(r.bytes for _, r in self.kept if not r.is_input)

    @functools.cached_property
    def alive(self) -> set[int]:
        """The numbers of what is in memory anyway."""
        core = self.gradient.flow.numbering.core
        return {core(op.inputs[0].number) for op, _ in self.kept}

    def lives(self, number: int) -> bool:
        """Tell whether a value is kept for itself, or is a part of an argument."""
        numbering = self.gradient.flow.numbering
        number = numbering.core(number)
        while number not in self.alive:
            match numbering.key(number):
                case ("element", _, array, _):
                    number = numbering.core(array)
                case ("argument", *_):
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
        """The recomputed operations that are in no region of the loss as it is called alone.

        The body of a `jax.custom_vjp` function and its forward rule may compute the same in two
        ways, and then only what the rule does is seen twice.
        """
        known = {number for region, _ in self.regions for op in region.ops for number in op.numbers}
        return [d.twin for d in duplicates(self.gradient) if d.op.numbers[0] not in known]

    @functools.cached_property
    def names(self) -> set[str]:
        """The checkpoint names that the user gave to values."""
        tables = (self.gradient.primal.names, self.gradient.flow.names)
        return {n for t in tables for names in t.values() for n in names if read_label(n) is None}

    # .. fixes

    @functools.cached_property
    def blocks(self) -> str | None:
        """A pattern of the outermost module paths that repeat and do most of the work, or None."""
        flops: dict[str, float] = {}
        members: dict[str, set[str]] = {}
        for op in self.gradient.primal_live:
            if op.kind != "equation" or not op.flops:
                continue
            outside = _loop_depth(op)
            for depth in range(1, len(op.path) + 1):
                path = "/".join(op.path[:depth])
                pattern = _graph.roll_up(path)
                flops[pattern] = flops.get(pattern, 0.0) + op.flops
                # What is inside a loop is there once for each of its rounds.
                rounds = [f"{path} again"] if outside is not None and depth > outside else []
                members.setdefault(pattern, set()).update([path, *rounds])
        depths = sorted(flops, key=lambda p: (p.count("/"), -flops[p]))
        for pattern in depths:
            if len(members[pattern]) > 1 and flops[pattern] > self.forward_flops / 2:
                return as_at(pattern)
        return None

    def instead(self, change: Callable[[Policy | None], Policy], r: Residual) -> str:
        """Return the call that applies a changed policy to where ``r`` is computed."""
        if self.at is not None and algebra.prefix_matching(self.at, r.module) is None:
            return policy_call(change(None), _graph.roll_up(r.module) or None)
        if self.policy is not None:
            return policy_call(_within(self.policy, change), self.at)
        rule = _rule_of(r)
        if rule is not None:
            return policy_call(change(rule), self._region_at(r))
        if self.blocks is not None and algebra.prefix_matching(self.blocks, r.module):
            return policy_call(change(None), self.blocks)
        if r.times > 1:
            return f"layer = {policy_call(change(None))}(layer)  # the body of the loop"
        return policy_call(change(None))

    def _region_at(self, r: Residual) -> str | None:
        path = r.module
        found = {region.module for region, _ in self.regions}
        inside = [m for m in found if m and (path + "/").startswith(m + "/")]
        return as_at(_graph.roll_up(min(inside, key=len))) if inside else None


def _frame_of(region: Region) -> Frame:
    """Return the frame of the checkpoint equation, whose parent is what is around it."""
    frame = region.ops[0].frame
    while frame.parent is not None and region in frame.parent.regions:
        frame = frame.parent
    return frame


def _loop_depth(op: Op) -> int | None:
    """Return how long the module path of the outermost loop around an operation is, or None."""
    frame, loop = op.frame, None
    while frame.parent is not None:
        if frame.times > frame.parent.times:
            loop = frame
        frame = frame.parent
    return None if loop is None else len(loop.path)


def _within(policy: Policy, change: Callable[[Policy | None], Policy]) -> Policy:
    """Change a policy; of one that says where regions are, what is kept inside them."""
    if isinstance(policy, algebra.Structural):
        return dataclasses.replace(policy, keep=change(policy.keep))
    return change(policy)


def _rule_of(r: Residual) -> Policy | None:
    """Return the rule that keeps a value, where its reason is one."""
    text = re.sub(r" to \w+$", "", r.reason.removeprefix("not in "))
    try:
        return algebra.as_policy(text) if text.startswith(_VERBS) else None
    except PolicyError:  # it holds a function, which no text rebuilds
        return None


_VERBS = ("save(", "offload(", "recompute(")


def policy_call(policy: Policy | str, at: str | None = None) -> str:
    """Return the text of a decorator; it needs no names but ``remat_kit``.

    >>> from remat_kit import dots, save
    >>> policy_call(save(dots), "*/block_*")
    'remat_kit.policy("save(dots)", at="*/block_*")'
    """
    text = (policy if isinstance(policy, str) else repr(policy)).replace('"', "'")
    place = "" if at is None else f', at="{at}"'
    return f'remat_kit.policy("{text}"{place})'


def as_at(pattern: str) -> str | None:
    """Return what ``at=`` finds a rolled-up module path with, None for the empty path.

    >>> as_at("GPT/block_*"), as_at("layer_*"), as_at("GPT/layers/*")
    ('*/block_*', '*/layer_*', '*/layers/*')
    """
    parts = pattern.split("/")
    if not pattern:
        return None
    return "/".join(["*", *(parts[1:] or parts)])


def _before(selector: Selector, policy: Policy | None) -> Policy:
    """Recompute what a selector takes, and decide the rest as before."""
    dropped = algebra.recompute(selector)
    return dropped if policy is None else dropped >> policy


def _in(module: str) -> Selector | None:
    return algebra.module(module) if module else None


def _all(*selectors: Selector | None) -> Selector:
    found = [s for s in selectors if s is not None]
    return functools.reduce(lambda a, b: a & b, found)


def _place(module: str, source: str) -> str:
    if not module:
        return f" at {source}" if source else ""
    return f" in {module} ({source})" if source else f" in {module}"


def _array(r: Residual) -> str:
    return f"{r.dtype}[{','.join(map(str, r.shape))}]"


def _count(n: int, what: str) -> str:
    return f"{n} {what}s" if n > 1 else f"a {what}"


def _grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


# -- kept, though something smaller would do --------------------------------------------------

_VIEWS = frozenset(
    ("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "rev", "copy")
)


@dataclasses.dataclass(frozen=True)
class _Copy:
    """A kept value that is only another form of a smaller one, or of one that is kept too."""

    residual: Residual
    primitives: tuple[str, ...]
    source_type: str
    source_bytes: int
    source_lives: bool

    @property
    def spared_bytes(self) -> int:
        return self.residual.bytes - (0 if self.source_lives else self.source_bytes)

    @property
    def is_cast(self) -> bool:
        return "convert_element_type" in self.primitives and self.source_type != self.residual.dtype


def _copies(scene: _Scene) -> list[_Copy]:
    found = (_copy(scene, op, r) for op, r in scene.on_device)
    return [copy for copy in found if copy is not None]


def _copy(scene: _Scene, op: Op, r: Residual) -> _Copy | None:
    made, names = op.producer, []
    best: _Copy | None = None
    while made.kind == "equation" and made.primitive in (*_VIEWS, "convert_element_type"):
        names.append(made.primitive)
        read, aval = made.inputs[0], made.eqn.invars[0].aval
        if scene.gradient.flow.numbering.is_constant(read.number):
            return None  # compilers fold it
        size = round(_graph.nbytes(aval) * made.times)
        lives = scene.lives(read.number)
        candidate = _Copy(r, tuple(dict.fromkeys(names)), str(aval.dtype), size, lives)
        # Outside a loop compilers read a transposed or reshaped array where it lies; a loop stacks
        # both.
        wasted = lives and (made.times > 1 or size < r.bytes)
        if size <= r.bytes and (wasted or 2 * size <= r.bytes):
            best = candidate if best is None or lives or size < best.source_bytes else best
        if lives or read.origin is None:
            break
        made = read.origin.producer
    return best


def _saved_copies(scene: _Scene) -> Iterator[Lint]:
    def key(copy: _Copy) -> Any:
        r = copy.residual
        place = _graph.roll_up(r.module), r.source, r.reason.startswith("input of region")
        return copy.is_cast, copy.primitives, r.dtype, copy.source_type, copy.source_lives, *place

    for (is_cast, primitives, *_), copies in _grouped(_copies(scene), key).items():
        if sum(c.spared_bytes for c in copies) >= scene.threshold:
            yield (_upcast if is_cast else _view)(scene, copies, primitives)


def _upcast(scene: _Scene, copies: Sequence[_Copy], primitives: tuple[str, ...]) -> Lint:
    first, r = copies[0], copies[0].residual
    what = f"{r.dtype} {'copies' if len(copies) > 1 else 'copy'} of {first.source_type} values"
    dtype = algebra.dtype(r.dtype)
    return _copy_lint("saved-upcast", scene, copies, what, primitives, dtype)


def _view(scene: _Scene, copies: Sequence[_Copy], primitives: tuple[str, ...]) -> Lint:
    verb = " and ".join(primitives)
    what = f"{'results' if len(copies) > 1 else 'result'} of {verb}"
    return _copy_lint("saved-view", scene, copies, what, primitives, None)


def _copy_lint(
    code: str,
    scene: _Scene,
    copies: Sequence[_Copy],
    what: str,
    primitives: tuple[str, ...],
    dtype: Selector | None,
) -> Lint:
    r, module = copies[0].residual, _graph.roll_up(copies[0].residual.module)
    size, spared = sum(c.residual.bytes for c in copies), sum(c.spared_bytes for c in copies)
    if copies[0].source_lives:
        why = "what it is made of is in memory anyway"
    else:
        why = f"what it is made of takes {format_bytes(sum(c.source_bytes for c in copies))}"
    message = (
        f"{len(copies)} {what}, {format_bytes(size)}, kept for the backward pass"
        f"{_place(module, r.source)}; {why}, and making it again moves data and computes nothing"
    )
    if r.reason.startswith("input of region"):
        fix = (
            f"# move this {primitives[0]} into the block, so that the block's input is the "
            f"{'smaller' if not copies[0].source_lives else 'kept'} value"
        )
    else:
        selector = _all(algebra.primitive(*primitives), dtype, _in(module))
        fix = scene.instead(lambda policy: _before(selector, policy), r)
    return Lint(code, message, fix, module, r.source, spared)


# -- dropout ----------------------------------------------------------------------------------

_RANDOM = frozenset(("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"))


def _random_ops(gradient: Gradient) -> set[Op]:
    """Return the forward operations that draw from a random key, and read nothing but keys."""
    from_keys: set[Op] = set()
    drawn: set[Op] = set()
    key_of = gradient.flow.numbering.key
    for op in gradient.flow.ops:
        if op.frame.phase != FORWARD:
            break
        if op.kind == "argument":
            dtype = key_of(op.numbers[0])[2][1]
            pure = dtype == "uint32" or dtype.startswith("key")
        else:
            read = op.inputs[:1] if op.kind == "carry" else op.inputs
            origins = [v.origin for v in read if v.origin is not None]
            pure = op.kind == "constant" or all(o in from_keys for o in origins)
            draws = op.kind == "equation" and op.primitive in _RANDOM
            if pure and (draws or any(o in drawn for o in origins)):
                drawn.add(op)
        if pure:
            from_keys.add(op)
    return drawn


def _dropout_masks(scene: _Scene) -> Iterator[Lint]:
    drawn = _random_ops(scene.gradient)
    masks = [
        (op, r)
        for op, r in scene.on_device
        if op.producer in drawn and not r.dtype.startswith(("key", "uint32"))
    ]

    def key(mask: tuple[Op, Residual]) -> Any:
        return _graph.roll_up(mask[1].module), mask[1].source

    for (module, source), found in _grouped(masks, key).items():
        size = sum(r.bytes for _, r in found)
        if size < scene.threshold:
            continue
        op, r = found[0]
        selector = _mask_selector(scene, op.producer, drawn, module)
        message = (
            f"{_count(len(found), 'random mask')} such as {_array(r)}, {format_bytes(size)}, kept "
            f"for the backward pass{_place(module, source)}; the random key, a few bytes, makes "
            "the same mask again"
        )
        fix = scene.instead(lambda policy, s=selector: _before(s, policy), r)
        yield Lint("dropout-mask-saved", message, fix, module, source, size)


def _mask_selector(scene: _Scene, mask: Op, drawn: set[Op], module: str) -> Selector:
    """Select everything between the key and the mask: by module or line, if that is all cheap."""
    cone = _cone(mask, drawn)
    products = [op for op in scene.gradient.primal.ops if _is_product(op)]

    def is_cheap(place: Callable[[Op], str]) -> bool:
        here = place(mask)
        return (
            bool(here)
            and all(place(op) == here for op in cone)
            and all(place(op) != here for op in products)
        )

    if is_cheap(lambda op: op.module):
        return algebra.module(module)
    if is_cheap(lambda op: op.source):
        return algebra.source(mask.source)
    primitives = algebra.primitive(*dict.fromkeys(op.primitive for op in cone))
    return _all(primitives, _in(module))


def _is_product(op: Op) -> bool:
    return op.kind == "equation" and algebra.dots.matches(algebra.Value(primitives=(op.primitive,)))


def _cone(mask: Op, drawn: set[Op]) -> list[Op]:
    todo, found = [mask], {}
    while todo:
        op = todo.pop()
        if op in found or op not in drawn:
            continue
        found[op] = None
        todo.extend(v.origin for v in op.inputs if v.origin is not None)
    return [op for op in found if op.kind == "equation"]


# -- regions that do nothing, or not what they should -----------------------------------------


def _regions_without_effect(scene: _Scene) -> Iterator[Lint]:
    groups = _grouped(scene.regions, lambda found: _graph.roll_up(found[0].module))
    for module, found in groups.items():
        if any(region in scene.repeated for region, _ in found):
            continue
        region = found[0][0]
        if any((op.module + "/").startswith(region.module) for op in scene.unattributed):
            continue
        keeps = [r for op, r in scene.kept if _made_in(scene, op, region) and not r.is_input]
        what = _count(len(found), "checkpoint region") + (f" of {module}" if module else "")
        if keeps:
            message = (
                f"{what}: everything that the backward pass needs of it is kept, so it is as if "
                "there were no region"
            )
            fix = policy_call("nothing", scene.at or as_at(module))
        else:
            message = (
                f"{what}: the backward pass needs nothing that is computed in it, so there is "
                "nothing to save and nothing to recompute"
            )
            parent = module.rpartition("/")[0]
            fix = policy_call("nothing", as_at(parent) or scene.blocks)
        yield Lint("no-effect", message, fix, module)


def _made_in(scene: _Scene, op: Op, region: Region) -> bool:
    core = scene.gradient.flow.numbering.core(op.inputs[0].number)
    return any(core in o.numbers for o in region.ops)


def _rules_without_effect(scene: _Scene) -> Iterator[Lint]:
    if scene.policy is None:
        return
    values = _Seen(scene)
    rules = [r for r in scene.policy.rules() if isinstance(r, algebra.Rule)]
    for rule in dict.fromkeys(rules):
        if rule.selector == algebra.nothing or any(rule.matches(v) for v in values):
            continue
        yield _rule_lint(scene, rule)


class _Seen:
    """The values inside the regions, described to selectors once and only as far as is asked."""

    def __init__(self, scene: _Scene) -> None:
        flows = (scene.gradient.primal, scene.gradient.flow)
        self.names = [flow.names for flow in flows]
        ops = [op for flow in flows for region in flow.regions for op in region.ops]
        self.todo = iter(ops)
        self.seen: dict[algebra.Value, None] = {}

    def __iter__(self) -> Iterator[algebra.Value]:
        yield from list(self.seen)
        for op in self.todo:
            for i in range(len(op.numbers)):
                value = self.describe(op, i)
                if value not in self.seen:
                    self.seen[value] = None
                    yield value

    def describe(self, op: Op, position: int) -> algebra.Value:
        names = [n for table in self.names for n in table.get(op.numbers[position], ())]
        value = _graph.value_of(op.eqn, position, op.path, names)
        # A selector sees a call as one value too.
        calls, frame = [], op.frame
        while frame.eqn is not None and frame.parent is not None:
            calls.append(_graph.primitive_name(frame.eqn))
            frame = frame.parent
        return dataclasses.replace(value, primitives=(*reversed(calls), *value.primitives))


def _rule_lint(scene: _Scene, rule: algebra.Rule) -> Lint:
    assert scene.policy is not None
    named = [x for x in rule.selector.leaves() if isinstance(x, algebra.Named)]
    near = [n for x in named for p in x.patterns for n in near_matches(p, scene.names, 1)]
    others = [r for r in scene.policy.rules() if r != rule]
    if near:
        better = dataclasses.replace(rule, selector=algebra.named(*dict.fromkeys(near)))
        changed = [better if r == rule else r for r in scene.policy.rules()]
    else:
        changed = others or [algebra.save(algebra.nothing)]
    join = algebra.First if isinstance(scene.policy, algebra.First) else algebra.Stronger
    policy = changed[0] if len(changed) == 1 else join(tuple(changed))
    fix = policy_call(_within(scene.policy, lambda _: policy), scene.at)
    message = (
        f"the rule {rule!r} selects no value of the regions it is applied to, so it does nothing"
    )
    return Lint("no-effect", message, fix)


def _never_read(scene: _Scene) -> Iterator[Lint]:
    """Find parts of an argument, a pytree otherwise read, in which nothing is read."""
    live = scene.gradient.primal_live
    arguments = [op for op in scene.gradient.primal.ops if op.kind == "argument"]
    leaves: dict[str, tuple[bool, int]] = {}
    for name, op in zip(scene.gradient.names, arguments, strict=True):
        shape, dtype = scene.gradient.flow.numbering.key(op.numbers[0])[2]
        if not dtype.startswith(("float", "bfloat")):
            continue
        leaves[name] = op in live, math.prod(shape) * int(re.sub(r"\D", "", dtype[-2:])) // 8
    trees = [re.findall(r"^\w+|\[[^\]]+\]|\.\w+", name) for name in leaves]
    read = {tuple(t[:n]) for t, (r, _) in zip(trees, leaves.values()) if r for n in range(len(t))}
    unread: dict[str, int] = {}
    for tree, (is_read, size) in zip(trees, leaves.values(), strict=True):
        depth = next((n for n in range(1, len(tree)) if tuple(tree[:n]) not in read), None)
        if not is_read and depth is not None and depth > 1:
            place = "".join(tree[:depth])
            unread[place] = unread.get(place, 0) + size
    for place, size in unread.items():
        message = (
            f"nothing in the argument {place}, {format_bytes(size)}, is ever read: a module "
            "that is never called computes no value, so a policy on it changes nothing"
        )
        yield Lint("no-effect", message, f"del {place}  # or call the module", bytes=size)


def _never_called(scene: _Scene) -> Iterator[Lint]:
    """Find decorated classes, written where the loss is written, that nothing has called."""
    candidates = _remat.uncalled()
    if not candidates:
        return
    files = {_graph.source_of(op.eqn)[0] for op in scene.gradient.primal.ops if op.eqn is not None}
    for module, call in candidates.items():
        file, line = _place_of(module)
        # A class of no file, as `exec` makes it, has nothing to do with equations of no file.
        if file and file in files:
            name = module.__name__
            message = (
                f"{call} decorates {name}, and no {name} has been called: either the model does "
                "not use it, or it was made from the class as it was before"
            )
            fix = f"x = {name}(...)(x)  # or take the policy off"
            yield Lint("no-effect", message, fix, source=f"{_graph.short_path(file)}:{line}")


def _place_of(module: type) -> tuple[str, int]:
    """The file and the line of a class; line 0 where its source cannot be read."""
    file = getattr(sys.modules.get(module.__module__), "__file__", None) or ""
    try:
        return file, inspect.getsourcelines(module)[1]
    except (OSError, TypeError):
        return file, 0


def _whole_loss(scene: _Scene) -> Iterator[Lint]:
    enough = WHOLE * scene.forward_flops
    for region, frame in scene.regions:
        around = frame.parent
        if around is None or around.times > 1 or around.regions or not scene.forward_flops:
            continue
        if any(len(op.frame.regions) > 1 for op in region.ops):
            continue  # regions inside it time the recompute
        again = sum(op.flops for op in scene.repeated.get(region, ()))
        inside = sum(op.flops for op in region.ops if op in scene.gradient.primal_live)
        if min(again, inside) < enough:
            continue
        message = (
            f"one checkpoint region{_place(region.module, '')} holds "
            f"{100 * inside / scene.forward_flops:.0f} % of the loss's FLOPs and computes "
            f"{100 * again / scene.forward_flops:.0f} % again at once, when the backward pass "
            "begins: all its values are in memory together then, as without it"
        )
        keep = scene.policy if scene.policy is not None and scene.at is None else None
        policy = "nothing" if keep is None or keep == _NOTHING else keep
        if scene.blocks is not None:
            fix = policy_call(policy, scene.blocks)
        else:
            fix = f"layer = {policy_call(policy)}(layer)  # each layer a region, not the loss"
        yield Lint("whole-loss-region", message, fix, region.module)


_NOTHING = algebra.save(algebra.nothing)


# -- regions that the compiler may undo -------------------------------------------------------


def _cse_undone(scene: _Scene) -> Iterator[Lint]:
    loose = [
        (region, frame)
        for region, frame in scene.regions
        if region in scene.repeated
        and frame.parent is not None
        and frame.parent.level == 0
        and not any(_flags(_region_params(frame).get("prevent_cse", True)))
    ]
    if not loose:
        return
    ops = list(dict.fromkeys(op for region, _ in loose for op in scene.repeated[region]))
    evidence = _evidence(scene, ops)
    if evidence and not any(is_gone for is_gone, _ in evidence):
        return  # every compiler that was asked kept the recompute
    region, frame = loose[0]
    module = _graph.roll_up(region.module)
    size = sum(_graph.nbytes(v.aval) for op in ops for v in op.eqn.outvars)
    words = "; ".join(text for is_gone, text in evidence if is_gone)
    message = (
        f"prevent_cse=False on {_count(len(loose), 'region')} outside a loop"
        f"{_place(module, '')}: the compiler may merge the recomputed operations with the first "
        f"ones, and then the region saves nothing{f' ({words})' if words else ''}"
    )
    if _region_params(frame).get("policy") is keep_labelled:
        policy = "nothing" if scene.policy is None or scene.policy == _NOTHING else scene.policy
        fix = f"{policy_call(policy, scene.at)}  # without prevent_cse=False"
    else:
        fix = "prevent_cse=True  # in jax.checkpoint, or leave prevent_cse out"
    yield Lint("cse-undone", message, fix, module, bytes=size)


def _region_params(frame: Frame) -> Mapping[str, Any]:
    hi = _jax.hi_primitive(frame.eqn)
    return frame.eqn.params if hi is None else hi.params


def _flags(prevent_cse: Any) -> tuple[bool, ...]:
    return tuple(prevent_cse) if isinstance(prevent_cse, (tuple, list)) else (bool(prevent_cse),)


def _evidence(scene: _Scene, ops: Sequence[Op]) -> list[tuple[bool, str]]:
    """For each compiled target: whether most of the recompute is gone, and that in words."""
    heavy = [op for op in ops if _is_product(op)]
    counted = len(heavy) or sum(op.flops > 0 for op in ops)
    what = "products" if heavy else "operations"
    found = []
    for target, c in scene.compiled.items():
        if c.hlo is not None:
            left = c.hlo.heavy if heavy else c.hlo.total
            text = f"{target}: {left} of {counted} recomputed {what} are left"
            found.append((2 * left < counted, text))
    return found


def _unknown_names(scene: _Scene) -> Iterator[Lint]:
    asked: dict[str, tuple[Mapping[str, frozenset[str]], Region]] = {}
    for region, frame in scene.regions:
        wanted = _jax.policy_names(_region_params(frame).get("policy"))
        for name in sorted(set().union(*wanted.values()) - scene.names):
            asked.setdefault(name, (wanted, region))
    for name, (wanted, region) in asked.items():
        near = near_matches(name, scene.names)
        if near:
            hint = "did you mean " + " or ".join(map(repr, near)) + "?"
            missing = set().union(*wanted.values()) - scene.names
            better = {n: m for n in missing for m in near_matches(n, scene.names, 1)}
            fix = policy_call(_by_names(wanted, better))
        else:
            some = ", ".join(map(repr, sorted(scene.names)[:12]))
            hint = f"there are: {some}" if some else "no value has a name"
            fix = f"x = remat_kit.name(x, {name!r})  # where the value is made"
        message = (
            f"a policy of jax.checkpoint{_place(_graph.roll_up(region.module), '')} asks for the "
            f"name {name!r}, which no value has, so it does nothing; {hint}"
        )
        yield Lint("unknown-name", message, fix, _graph.roll_up(region.module))


def _by_names(wanted: Mapping[str, frozenset[str]], better: Mapping[str, str]) -> Policy:
    def chosen(kind: str) -> Selector | None:
        names = dict.fromkeys(better.get(n, n) for n in sorted(wanted.get(kind, ())))
        return algebra.named(*names) if names else None

    saved, moved, dropped = map(chosen, ("save", "offload", "recompute"))
    parts: list[Policy] = []
    if saved is not None:
        parts.append(algebra.save(saved))
    if moved is not None:
        parts.append(algebra.offload(moved))
    if dropped is not None:
        parts.append(algebra.save(algebra.named("*") - dropped))
    return functools.reduce(lambda a, b: a | b, parts)


# -- dear things recomputed -------------------------------------------------------------------

_KERNELS = frozenset(
    (
        *("pallas_call", "ffi_call", "tpu_custom_call", "custom_call", "triton_kernel_call"),
        *("dot_product_attention_fwd_wrapper", "dot_product_attention_fwd"),
    )
)


def _collectives(scene: _Scene) -> Iterator[Lint]:
    def is_collective(r: Recomputed) -> bool:
        return algebra.collective.matches(algebra.Value(primitives=(r.primitive,)))

    why = "what the other devices sent is sent once more, and both sides wait for it"
    yield from _dear(scene, "collective-recomputed", is_collective, algebra.collective, why)


def _kernels(scene: _Scene) -> Iterator[Lint]:
    """A policy that keeps matrix products does not see those inside a kernel."""
    if not _keeps_products(scene):
        return
    why = (
        "to a policy a kernel is one opaque operation, which `dots` does not select, so its "
        "products run twice; name its outputs with remat_kit.name or keep it by its primitive"
    )
    for primitive in sorted({r.primitive for r in scene.recomputed} & _KERNELS):

        def is_this(r: Recomputed, primitive: str = primitive) -> bool:
            return r.primitive == primitive

        selector = algebra.primitive(primitive)
        if scene.policy is None:
            selector = selector | algebra.dots
        yield from _dear(scene, "opaque-kernel", is_this, selector, why)


def _keeps_products(scene: _Scene) -> bool:
    """Tell whether a policy of this gradient keeps matrix products, so that recompute hurts."""
    rules = scene.policy.rules() if scene.policy is not None else ()
    texts = [*(r.reason for _, r in scene.kept), *map(repr, rules)]
    if any(re.search(r"\bdots", text) for text in texts):
        return True
    for region, frame in scene.regions:
        policy = _region_params(frame).get("policy")
        product = next(filter(_is_product, region.ops), None)
        if product is not None and policy not in (None, keep_labelled):
            value = _graph.value_of(product.eqn, 0, product.path, full=False)
            if algebra.callable_policy(policy).decide(value) is not Decision.RECOMPUTE:
                return True
    return False


def _dear(
    scene: _Scene,
    code: str,
    is_dear: Callable[[Recomputed], bool],
    selector: Selector,
    why: str,
) -> Iterator[Lint]:
    def key(r: Recomputed) -> Any:
        return r.primitive, _graph.roll_up(r.module), r.source

    found = filter(is_dear, scene.recomputed)
    for (primitive, module, source), again in _grouped(found, key).items():
        size = sum(r.bytes for r in again)
        message = (
            f"{primitive} is recomputed {_times(sum(r.count for r in again))}"
            f"{_place(module, source)}, {format_bytes(size)}: {why}"
        )
        yield Lint(code, message, _also(scene, selector), module, source, size)


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"


def _also(scene: _Scene, selector: Selector) -> str:
    """Return the call of the policy that keeps a selector's values too."""

    def change(policy: Policy | None) -> Policy:
        kept = algebra.save(selector)
        return kept if policy is None or policy == _NOTHING else kept | policy

    policy = change(None) if scene.policy is None else _within(scene.policy, change)
    if scene.policy is not None:
        return policy_call(policy, scene.at)
    rules = {repr(rule): rule for _, r in scene.kept if (rule := _rule_of(r)) is not None}
    return policy_call(functools.reduce(lambda a, b: a | b, rules.values(), policy))


# -- offloading -------------------------------------------------------------------------------


def _tiny_offloads(scene: _Scene) -> Iterator[Lint]:
    moved = [r for _, r in scene.kept if not r.is_input and r.memory != "device"]

    def key(r: Residual) -> Any:
        return _graph.roll_up(r.module), r.source, r.dtype, r.shape

    for (module, source, *_), found in _grouped(moved, key).items():
        each, size = found[0].bytes // found[0].times, sum(r.bytes for r in found)
        if each >= TINY_BYTES and size >= SMALL_BYTES:
            continue
        limit = TINY_BYTES if each < TINY_BYTES else SMALL_BYTES
        message = (
            f"{_count(len(found), 'value')} such as {_array(found[0])}, {format_bytes(size)} in "
            f"transfers of {format_bytes(each)}, offloaded{_place(module, source)}: a transfer "
            "over PCIe takes about 10 µs to begin, in which 16 lanes of PCIe 5.0 move 600 KiB, and "
            "this frees next to nothing"
        )
        yield Lint(
            "tiny-offload", message, _offload_fix(scene, found[0], limit), module, source, size
        )


def _offload_fix(scene: _Scene, r: Residual, limit: int) -> str:
    def change(policy: Policy | None) -> Policy:
        rules = [] if policy is None else list(policy.rules())
        moved = [
            x.selector
            for x in rules
            if isinstance(x, algebra.Rule) and x.decision is Decision.OFFLOAD
        ]
        selector = functools.reduce(lambda a, b: a | b, moved) if moved else algebra.everything
        small = algebra.save(selector & algebra.smaller_than(limit))
        return small if policy is None else small | policy

    if scene.policy is None and _rule_of(r) is None:  # a policy of JAX: the rule is not known
        place = algebra.module(r.module) if r.module else algebra.everything
        kept = algebra.save(place & algebra.smaller_than(limit))
        return policy_call(kept | algebra.offload(place), scene._region_at(r))
    return scene.instead(change, r)


def _dropped_offloads(scene: _Scene) -> Iterator[Lint]:
    size = sum(r.bytes for _, r in scene.kept if not r.is_input and r.memory != "device")
    for target, c in scene.compiled.items():
        host = c.memory.host_bytes
        if not size or host is None or 2 * host >= size or target.split("@")[0] == "cpu":
            continue
        message = (
            f"{format_bytes(size)} are offloaded in the traced program, but compiled for {target} "
            f"only {format_bytes(host)} are in the host's memory: the compiler took the transfers "
            "out, and the values stay on the device"
        )
        policy = scene.policy
        if policy is None:
            fix = "jax.lax.scan(layer, x, params)  # in a loop the compiler keeps the transfers"
        else:
            fix = policy_call(_within(policy, _without_offload), scene.at)
        yield Lint("offload-dropped", message, fix, bytes=size - host)


def _without_offload(policy: Policy | None) -> Policy:
    """Return the rules of a policy with what they offload recomputed."""
    assert policy is not None
    rules = list(policy.rules())
    left = [
        r for r in rules if not (isinstance(r, algebra.Rule) and r.decision is Decision.OFFLOAD)
    ]
    return functools.reduce(lambda a, b: a | b, left) if left else _NOTHING


def raised_peak(
    memory: Memory, baseline: Memory | None, *, policy: Policy | None = None, at: str | None = None
) -> Lint | None:
    """Return the lint for a policy with which a target needs more temporary memory than without.

    Args:
        memory: with the policy.
        baseline: without it; None where that is not known.
        policy, at: what was applied, if it is known.
    """
    if baseline is None or memory.temp_bytes is None or baseline.temp_bytes is None:
        return None
    more = memory.temp_bytes - baseline.temp_bytes
    if more <= WORTH_A_LINE * baseline.temp_bytes:
        return None  # padding and packing move that much
    message = (
        f"compiled for {memory.target} the policy takes {format_bytes(memory.temp_bytes)} of "
        f"temporaries, {format_bytes(more)} more than the {format_bytes(baseline.temp_bytes)} "
        "without it"
    )
    text = "None" if policy is None or policy == _NOTHING else "'nothing'"
    at_text = "" if at is None else f", at={at!r}"
    fix = f"remat_kit.policy({text}{at_text})" if text != "None" else "remat_kit.policy(None)"
    return Lint("region-raises-peak", message, fix, bytes=more)


def _raised_peaks(scene: _Scene) -> Iterator[Lint]:
    if scene.regions:
        for c in scene.compiled.values():
            lint = raised_peak(c.memory, c.baseline, policy=scene.policy, at=scene.at)
            if lint is not None:
                yield lint


_RULES: tuple[Callable[[_Scene], Iterator[Lint]], ...] = (
    *(_whole_loss, _regions_without_effect, _rules_without_effect, _never_read, _never_called),
    *(_unknown_names,),
    *(_cse_undone, _saved_copies, _dropout_masks, _collectives, _kernels),
    *(_tiny_offloads, _dropped_offloads, _raised_peaks),
)
