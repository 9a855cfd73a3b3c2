"""Lints about names that match nothing, kernels, collectives and offloads."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from remat_kit import _jax
from remat_kit._apply.labels import keep_labelled
from remat_kit._compiled.collectives import Collective
from remat_kit._errors import near_matches
from remat_kit._inspect.lints.scene import (
    KEEPS_NOTHING,
    SMALL_BYTES,
    TINY_BYTES,
    Lint,
    Scene,
    array_text,
    at_place,
    changed_inside,
    conjunction,
    counted,
    grouped,
    is_product,
    policy_call,
    region_params,
    rule_of,
)
from remat_kit._inspect.recomputed import Recomputed
from remat_kit._inspect.residuals import Residual, sliced_input
from remat_kit._policy import algebra as _algebra
from remat_kit._policy import selectors as _selectors
from remat_kit._policy.algebra import Decision, Policy, Selector
from remat_kit._program import paths as _paths
from remat_kit._program import value as _value
from remat_kit._program.flow import Region
from remat_kit._units import format_bytes, format_seconds


def unknown_names(scene: Scene) -> Iterator[Lint]:
    asked: dict[str, tuple[Mapping[str, frozenset[str]], Region]] = {}
    for region, frame in scene.regions:
        wanted = _jax.policy_names(region_params(frame).get("policy"))
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
            fix = f"x = remat_kit.name(x, {name!r})  # where the value is computed"
        message = (
            f"a policy of jax.checkpoint{at_place(_paths.roll_up(region.module), '')} asks for the "
            f"name {name!r}, which no value has, so it does nothing; {hint}"
        )
        yield Lint("unknown-name", message, fix, _paths.roll_up(region.module))


def _by_names(wanted: Mapping[str, frozenset[str]], better: Mapping[str, str]) -> Policy:
    def chosen(kind: str) -> Selector | None:
        names = dict.fromkeys(better.get(n, n) for n in sorted(wanted.get(kind, ())))
        return _selectors.named(*names) if names else None

    saved, moved, dropped = map(chosen, ("save", "offload", "recompute"))
    parts: list[Policy] = []
    if saved is not None:
        parts.append(_algebra.save(saved))
    if moved is not None:
        parts.append(_algebra.offload(moved))
    if dropped is not None:
        parts.append(_algebra.save(_selectors.named("*") - dropped))
    return functools.reduce(lambda a, b: a | b, parts)


# -- expensive operations that are recomputed -------------------------------------------------

_KERNELS = frozenset(
    (
        *("pallas_call", "ffi_call", "tpu_custom_call", "custom_call", "triton_kernel_call"),
        *("dot_product_attention_fwd_wrapper", "dot_product_attention_fwd"),
    )
)


def collectives(scene: Scene) -> Iterator[Lint]:
    def is_collective(r: Recomputed) -> bool:
        return _selectors.collective.matches(_value.Value(primitives=(r.primitive,)))

    why = "the devices communicate a second time, and all of them wait for it"
    yield from _dear(scene, "collective-recomputed", is_collective, _selectors.collective, why)


def repeated_collectives(scene: Scene) -> Iterator[Lint]:
    """Find the collectives of a compiled program that only recomputation needs a second time."""
    for target, facts in scene.compiled.items():
        again = [c for c in facts.collectives if c.repeated and not _gathers_slices(scene, c)]

        def key(c: Collective) -> Any:
            return c.kind, c.axes, _paths.roll_up(c.module), c.source

        for (kind, axes, module, source), found in grouped(again, key).items():
            size = sum(c.bytes * c.times for c in found)
            seconds = sum(c.seconds for c in found)
            over = f" over {' and '.join(axes)}" if axes else ""
            message = (
                f"compiled for {target}, {kind}{over}{at_place(module, source)} runs "
                f"{_times(sum(c.times for c in found))} only because of recomputation: "
                f"{format_bytes(size)}, {format_seconds(seconds)} on the links"
            )
            fix = _without_repetition(scene, kind, module)
            yield Lint("collective-repeated", message, fix, module, source, size)


def _gathers_slices(scene: Scene, c: Collective) -> bool:
    """Tell whether a collective gathers an input that a region saves in slices, as it should."""
    sliced = {found for _, r in scene.kept if (found := sliced_input(r))}
    regions = [region for axis, region in sliced if c.axes == (axis,)]
    is_inside = any(not r or f"{c.module}/".startswith(f"{r}/") for r in regions)
    return c.kind == "all-gather" and is_inside


def _without_repetition(scene: Scene, kind: str, module: str) -> str:
    """Return the policy that saves what collectives give.

    If the policy reads collectives already, it does not see this one.
    """
    leaves = scene.policy.leaves() if scene.policy is not None else ()
    if _selectors.collective not in leaves:
        return _also(scene, _selectors.collective)
    return _instead_of_gathering(scene) if kind == "all-gather" else _kept_product(scene, module)


def _kept_product(scene: Scene, module: str) -> str:
    """Return the policy that saves the product whose parts a collective adds up."""
    place = _selectors.module(module) if module else None
    return _also(scene, conjunction(place, _selectors.dots))


def _instead_of_gathering(scene: Scene) -> str:
    """Return the line that names a gathered array, and the policy that saves it.

    XLA gathers an array where a constraint asks for it, so that the whole array has a name.
    """
    place = "jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())"
    line = f"w = remat_kit.name(jax.lax.with_sharding_constraint(w, {place}), 'gathered')"
    return f"{line}  # with {_also(scene, _selectors.named('gathered'))}"


def kernels(scene: Scene) -> Iterator[Lint]:
    """Find recomputed kernels, if a policy saves matrix products: it cannot see inside a kernel."""
    if not _keeps_products(scene):
        return
    why = (
        "for a policy a kernel is one opaque operation, which `dots` does not select, so its "
        "products run twice; save what it computes by its primitive"
    )
    for primitive in sorted({r.primitive for r in scene.recomputed} & _KERNELS):

        def is_this(r: Recomputed, primitive: str = primitive) -> bool:
            return r.primitive == primitive

        selector = _selectors.primitive(primitive)
        if scene.policy is None:
            selector = selector | _selectors.dots
        yield from _dear(scene, "opaque-kernel", is_this, selector, why)


def _keeps_products(scene: Scene) -> bool:
    """Tell whether a policy of this gradient saves matrix products, so that recomputing hurts."""
    rules = scene.policy.rules() if scene.policy is not None else ()
    texts = [*(r.reason for _, r in scene.kept), *map(repr, rules)]
    if any(re.search(r"\bdots", text) for text in texts):
        return True
    for region, frame in scene.regions:
        policy = region_params(frame).get("policy")
        product = next(filter(is_product, region.ops), None)
        if product is not None and policy not in (None, keep_labelled):
            value = _value.value_of(product.eqn, 0, product.path, full=False)
            if _algebra.callable_policy(policy).decide(value) is not Decision.RECOMPUTE:
                return True
    return False


def _dear(
    scene: Scene,
    code: str,
    is_dear: Callable[[Recomputed], bool],
    selector: Selector,
    why: str,
) -> Iterator[Lint]:
    def key(r: Recomputed) -> Any:
        return r.primitive, _paths.roll_up(r.module), r.source

    found = filter(is_dear, scene.recomputed)
    for (primitive, module, source), again in grouped(found, key).items():
        size = sum(r.bytes for r in again)
        message = (
            f"{primitive} is recomputed {_times(sum(r.count for r in again))}"
            f"{at_place(module, source)}, {format_bytes(size)}: {why}"
        )
        yield Lint(code, message, _also(scene, selector), module, source, size)


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"


def _also(scene: Scene, selector: Selector) -> str:
    """Return the call of a policy that also saves the values of a selector."""

    def change(policy: Policy | None) -> Policy:
        kept = _algebra.save(selector)
        return kept if policy is None or policy == KEEPS_NOTHING else kept | policy

    policy = change(None) if scene.policy is None else changed_inside(scene.policy, change)
    if scene.policy is not None:
        return policy_call(policy, scene.at)
    rules = {repr(rule): rule for _, r in scene.kept if (rule := rule_of(r)) is not None}
    return policy_call(functools.reduce(lambda a, b: a | b, rules.values(), policy))


# -- offloading -------------------------------------------------------------------------------


def tiny_offloads(scene: Scene) -> Iterator[Lint]:
    moved = [r for _, r in scene.kept if not r.is_input and r.memory != "device"]

    def key(r: Residual) -> Any:
        return _paths.roll_up(r.module), r.source, r.dtype, r.shape

    for (module, source, *_), found in grouped(moved, key).items():
        each, size = found[0].bytes // found[0].times, sum(r.bytes for r in found)
        if each >= TINY_BYTES and size >= SMALL_BYTES:
            continue
        limit = TINY_BYTES if each < TINY_BYTES else SMALL_BYTES
        message = (
            f"{counted(len(found), 'value')} such as {array_text(found[0])}, {format_bytes(size)} "
            f"in transfers of {format_bytes(each)}, offloaded{at_place(module, source)}: a "
            "transfer over PCIe takes about 10 µs to start, in which 16 lanes of PCIe 5.0 move "
            "600 KiB, so this offload frees almost no memory for its time"
        )
        yield Lint(
            "tiny-offload", message, _offload_fix(scene, found[0], limit), module, source, size
        )


def _offload_fix(scene: Scene, r: Residual, limit: int) -> str:
    def change(policy: Policy | None) -> Policy:
        rules = [] if policy is None else list(policy.rules())
        moved = [
            x.selector
            for x in rules
            if isinstance(x, _algebra.Rule) and x.decision is Decision.OFFLOAD
        ]
        selector = functools.reduce(lambda a, b: a | b, moved) if moved else _selectors.everything
        small = _algebra.save(selector & _selectors.smaller_than(limit))
        return small if policy is None else small | policy

    if scene.policy is None and rule_of(r) is None:  # for a policy of JAX, the rule is unknown
        place = _selectors.module(r.module) if r.module else _selectors.everything
        kept = _algebra.save(place & _selectors.smaller_than(limit))
        return policy_call(kept | _algebra.offload(place), scene._region_at(r))
    return scene.instead(change, r)


def dropped_offloads(scene: Scene) -> Iterator[Lint]:
    size = sum(r.bytes for _, r in scene.kept if not r.is_input and r.memory != "device")
    for target, c in scene.compiled.items():
        if not c.memory.drops_offload(size):
            continue
        host = c.memory.host_bytes or 0
        message = (
            f"{format_bytes(size)} are offloaded in the traced program, but compiled for {target} "
            f"only {format_bytes(host)} are in the host's memory: the compiler removed the "
            "transfers, and the values stay on the device"
        )
        policy = scene.policy
        if policy is None:
            fix = "jax.lax.scan(layer, x, params)  # in a loop the compiler keeps the transfers"
        else:
            fix = policy_call(changed_inside(policy, _without_offload), scene.at)
        yield Lint("offload-dropped", message, fix, bytes=size - host)


def _without_offload(policy: Policy | None) -> Policy:
    """Return the rules of a policy, with the values that it offloads recomputed instead."""
    assert policy is not None
    rules = list(policy.rules())
    left = [
        r for r in rules if not (isinstance(r, _algebra.Rule) and r.decision is Decision.OFFLOAD)
    ]
    return functools.reduce(lambda a, b: a | b, left) if left else KEEPS_NOTHING
