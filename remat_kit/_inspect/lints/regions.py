"""Lints about regions and rules that have no effect."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from remat_kit import _frames
from remat_kit._apply import decorate as _decorate
from remat_kit._apply.labels import keep_labelled
from remat_kit._errors import near_matches
from remat_kit._inspect.lints.scene import (
    KEEPS_NOTHING,
    WHOLE,
    Lint,
    Scene,
    as_at,
    at_place,
    changed_inside,
    counted,
    grouped,
    is_product,
    policy_call,
    region_params,
)
from remat_kit._policy import algebra as _algebra
from remat_kit._policy import selectors as _selectors
from remat_kit._program import paths as _paths
from remat_kit._program import program as _program
from remat_kit._program import value as _value
from remat_kit._program.flow import Op, Region
from remat_kit._units import format_bytes

# -- regions that do nothing, or not what they should -----------------------------------------


def regions_without_effect(scene: Scene) -> Iterator[Lint]:
    groups = grouped(scene.regions, lambda found: _paths.roll_up(found[0].module))
    for module, found in groups.items():
        if any(region in scene.repeated for region, _ in found):
            continue
        region = found[0][0]
        if any((op.module + "/").startswith(region.module) for op in scene.unattributed):
            continue
        keeps = [r for op, r in scene.kept if _made_in(scene, op, region) and not r.is_input]
        what = counted(len(found), "checkpoint region") + (f" of {module}" if module else "")
        if keeps:
            message = (
                f"{what}: everything that the backward pass needs of it is saved, so the region "
                "has no effect"
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


def _made_in(scene: Scene, op: Op, region: Region) -> bool:
    core = scene.gradient.flow.numbering.core(op.inputs[0].number)
    return any(core in o.numbers for o in region.ops)


def rules_without_effect(scene: Scene) -> Iterator[Lint]:
    if scene.policy is None:
        return
    values = _Seen(scene)
    rules = [r for r in scene.policy.rules() if isinstance(r, _algebra.Rule)]
    for rule in dict.fromkeys(rules):
        if rule.selector == _selectors.nothing or any(rule.matches(v) for v in values):
            continue
        yield _rule_lint(scene, rule)


class _Seen:
    """The values inside the regions as selectors see them, each described once and when needed."""

    def __init__(self, scene: Scene) -> None:
        flows = (scene.gradient.primal, scene.gradient.flow)
        self.names = [flow.names for flow in flows]
        ops = [op for flow in flows for region in flow.regions for op in region.ops]
        self.todo = iter(ops)
        self.seen: dict[_value.Value, None] = {}

    def __iter__(self) -> Iterator[_value.Value]:
        yield from list(self.seen)
        for op in self.todo:
            for i in range(len(op.numbers)):
                value = self.describe(op, i)
                if value not in self.seen:
                    self.seen[value] = None
                    yield value

    def describe(self, op: Op, position: int) -> _value.Value:
        names = [n for table in self.names for n in table.get(op.numbers[position], ())]
        value = _value.value_of(op.eqn, position, op.path, names)
        # A selector also sees a call as one value.
        calls, frame = [], op.frame
        while frame.eqn is not None and frame.parent is not None:
            calls.append(_program.primitive_name(frame.eqn))
            frame = frame.parent
        return dataclasses.replace(value, primitives=(*reversed(calls), *value.primitives))


def _rule_lint(scene: Scene, rule: _algebra.Rule) -> Lint:
    assert scene.policy is not None
    named = [x for x in rule.selector.leaves() if isinstance(x, _selectors.Named)]
    near = [n for x in named for p in x.patterns for n in near_matches(p, scene.names, 1)]
    others = [r for r in scene.policy.rules() if r != rule]
    if near:
        better = dataclasses.replace(rule, selector=_selectors.named(*dict.fromkeys(near)))
        changed = [better if r == rule else r for r in scene.policy.rules()]
    else:
        changed = others or [_algebra.save(_selectors.nothing)]
    join = _algebra.First if isinstance(scene.policy, _algebra.First) else _algebra.Stronger
    policy = changed[0] if len(changed) == 1 else join(tuple(changed))
    fix = policy_call(changed_inside(scene.policy, lambda _: policy), scene.at)
    message = (
        f"the rule {rule!r} selects no value of the regions it is applied to, so it does nothing"
    )
    return Lint("no-effect", message, fix)


def never_read(scene: Scene) -> Iterator[Lint]:
    """Find parts of an argument that are never read, where other parts are."""
    live = scene.gradient.primal_live
    arguments = [op for op in scene.gradient.primal.ops if op.kind == "argument"]
    leaves: dict[str, tuple[bool, int]] = {}
    for name, op in zip(scene.gradient.names, arguments, strict=True):
        argument = scene.gradient.flow.numbering.key(op.numbers[0])
        shape, dtype = argument.shape, argument.dtype
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


def never_called(scene: Scene) -> Iterator[Lint]:
    """Find decorated classes in the files of the loss that nothing has called."""
    candidates = _decorate.uncalled()
    if not candidates:
        return
    files = {_frames.source_of(op.eqn)[0] for op in scene.gradient.primal.ops if op.eqn is not None}
    for module, call in candidates.items():
        file, line = _place_of(module)
        # A class without a file, such as one made by `exec`, is not related to the equations.
        if file and file in files:
            name = module.__name__
            message = (
                f"{call} decorates {name}, and no {name} has been called: either the model does "
                "not use it, or it was created before the class was decorated"
            )
            fix = f"x = {name}(...)(x)  # or remove the policy"
            yield Lint("no-effect", message, fix, source=f"{_paths.short_path(file)}:{line}")


def _place_of(module: type) -> tuple[str, int]:
    """Return the file and the line of a class; line 0 if its source cannot be read."""
    file = getattr(sys.modules.get(module.__module__), "__file__", None) or ""
    try:
        return file, inspect.getsourcelines(module)[1]
    except (OSError, TypeError):
        return file, 0


def whole_loss(scene: Scene) -> Iterator[Lint]:
    enough = WHOLE * scene.forward_flops
    for region, frame in scene.regions:
        around = frame.parent
        if around is None or around.times > 1 or around.regions or not scene.forward_flops:
            continue
        if any(len(op.frame.regions) > 1 for op in region.ops):
            continue  # the regions inside it decide when to recompute
        again = sum(op.flops for op in scene.repeated.get(region, ()))
        inside = sum(op.flops for op in region.ops if op in scene.gradient.primal_live)
        if min(again, inside) < enough:
            continue
        message = (
            f"one checkpoint region{at_place(region.module, '')} holds "
            f"{100 * inside / scene.forward_flops:.0f} % of the loss's FLOPs and computes "
            f"{100 * again / scene.forward_flops:.0f} % again, all at the start of the backward "
            "pass, so all its values are live at the same time, as without the region"
        )
        keep = scene.policy if scene.policy is not None and scene.at is None else None
        policy = "nothing" if keep is None or keep == KEEPS_NOTHING else keep
        if scene.blocks is not None:
            fix = policy_call(policy, scene.blocks)
        else:
            fix = f"layer = {policy_call(policy)}(layer)  # a region for each layer, not the loss"
        yield Lint("whole-loss-region", message, fix, region.module)


# -- regions that the compiler may undo -------------------------------------------------------


def cse_undone(scene: Scene) -> Iterator[Lint]:
    loose = [
        (region, frame)
        for region, frame in scene.regions
        if region in scene.repeated
        and frame.parent is not None
        and frame.parent.level == 0
        and not any(_flags(region_params(frame).get("prevent_cse", True)))
    ]
    if not loose:
        return
    ops = list(dict.fromkeys(op for region, _ in loose for op in scene.repeated[region]))
    evidence = _evidence(scene, ops)
    if evidence and not any(is_gone for is_gone, _ in evidence):
        return  # every compiler that was asked kept the recomputation
    region, frame = loose[0]
    module = _paths.roll_up(region.module)
    size = sum(op.result_bytes for op in ops)
    words = "; ".join(text for is_gone, text in evidence if is_gone)
    message = (
        f"prevent_cse=False on {counted(len(loose), 'region')} outside a loop"
        f"{at_place(module, '')}: the compiler may merge the recomputed operations with those of "
        f"the forward pass, and then the region saves nothing{f' ({words})' if words else ''}"
    )
    if region_params(frame).get("policy") is keep_labelled:
        policy = (
            "nothing" if scene.policy is None or scene.policy == KEEPS_NOTHING else scene.policy
        )
        fix = f"{policy_call(policy, scene.at)}  # without prevent_cse=False"
    else:
        fix = "prevent_cse=True  # in jax.checkpoint, or omit prevent_cse"
    yield Lint("cse-undone", message, fix, module, bytes=size)


def _flags(prevent_cse: Any) -> tuple[bool, ...]:
    return tuple(prevent_cse) if isinstance(prevent_cse, (tuple, list)) else (bool(prevent_cse),)


def _evidence(scene: Scene, ops: Sequence[Op]) -> list[tuple[bool, str]]:
    """For each target, whether most of the recomputation is gone, and a sentence about that."""
    heavy = [op for op in ops if is_product(op)]
    counted = len(heavy) or sum(op.flops > 0 for op in ops)
    what = "products" if heavy else "operations"
    found = []
    for target, c in scene.compiled.items():
        if c.hlo is not None:
            left = c.hlo.heavy if heavy else c.hlo.total
            text = f"{target}: {left} of {counted} recomputed {what} are left"
            found.append((2 * left < counted, text))
    return found
