"""The sentence that opens every report: what a program needs, what holds it, and what to do.

The sentence has three parts: the memory that the program needs on a chip and what the chip has,
what holds the largest part of the peak, and the best thing to do with its price. It uses only what
the report has computed already. Where an answer would need a plan, it names the call that makes
one. Without a chip it says what the backward pass reads, and from which modules.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from remat_kit._chip.memory import Memory
from remat_kit._compiled.peak import BACKWARD, FORWARD, RECOMPUTE, UPDATE, Peak
from remat_kit._inspect.reading import Reading
from remat_kit._inspect.whatif import Counterfactual, worthwhile
from remat_kit._program.paths import roll_up
from remat_kit._units import format_apart, format_bytes, format_percent

if TYPE_CHECKING:
    from remat_kit._inspect.report import Report

NO_POLICY = "none"


_CHEAP = 0.05  # share of the step's time that a recomputation may take and still be called cheap


_WHERE = {
    FORWARD: "in the forward pass",
    RECOMPUTE: "during recomputation",
    BACKWARD: "in the backward pass",
    UPDATE: "in the optimizer's update",
}


# Lints which say that the compiler or the program undid a policy: its figures mean little then.
_VOID = ("cse-undone", "offload-dropped", "region-raises-peak")


@dataclasses.dataclass(frozen=True)
class Case:
    """A policy and the memory of the program that was compiled with it.

    Attributes:
        policy: its name in the sentence; ``none`` without a policy.
        memory: what the compiled program needs.
        seconds: its time by the roofline; None if unknown.
        reading: the compiled program in full, if it was read.
        void: the lint which says that the policy has no effect, or "".
    """

    policy: str
    memory: Memory
    seconds: float | None = None
    reading: Reading | None = None
    void: str = ""

    @property
    def needs(self) -> int | None:
        """Bytes that the program needs on the device, or None if the compiler does not say."""
        m = self.memory
        return m.peak_bytes if m.fits or m.needs_bytes is None else m.needs_bytes


def headline(reports: Sequence[Report], plan_command: str = "") -> str:
    """Return the sentence about the reports of one program, the one without a policy first.

    >>> import jax, jax.numpy as jnp
    >>> from remat_kit import inspect
    >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> print(headline([inspect(lambda w: jnp.sum(jnp.sin(jnp.exp(w @ w))), w)]))
    The backward pass reads 32 KiB of saved activations, all of them 2 arrays float32[64,64] \
outside every module; target= (--target) compiles for a chip and says what fits.

    Args:
        reports: of one program with different policies.
        plan_command: a command that makes a plan, without its target; by default the Python call.
    """
    target = _tightest(reports[0].memory)
    if target is None:
        return _traced(reports)
    cases = [
        Case(
            r.policy,
            r.memory[target],
            r.readings[target].estimate.seconds if target in r.readings else None,
            r.readings.get(target),
            next((lint.code for lint in r.lints if lint.code in _VOID), ""),
        )
        for r in reports
        if target in r.memory
    ]
    held = holders(cases[0].reading.peak) if cases[0].reading else _saved(reports[0])
    call = f"{plan_command} --target {target}" if plan_command else plan_call(target)
    return compiled_headline(cases, held=held, plan=call)


def plan_call(target: str) -> str:
    """Return the Python call that makes a plan for a chip."""
    return f'remat_kit.plan(..., budget="fit", target="{target}")'


def compiled_headline(cases: Sequence[Case], *, held: str = "", plan: str = "") -> str:
    """Return the sentence about one program, compiled for one chip with different policies.

    Args:
        cases: the program without a policy first, if it was compiled without one.
        held: what holds its peak, as `holders` says it.
        plan: the call that would make a plan, or "" if none is to be named.
    """
    base, *others = cases
    parts = [_need(base, named=bool(others)), held, *_advice(base, others, plan)]
    return "; ".join(filter(None, parts)) + "."


def measured_headline(
    found: Mapping[str, Mapping[str, Memory]],
    void: Mapping[str, str],
    inspect_command: str,
    plan_command: str,
) -> str:
    """Return the sentence about programs of which only the memory is known.

    Args:
        found: the memory by policy and target, without a policy first.
        void: for each policy that has no effect, the lint which says so.
        inspect_command: the command that shows what holds the peak, without its target.
        plan_command: the command that makes a plan, without its target.
    """
    target = _tightest(next(iter(found.values())))
    assert target is not None
    cases = [
        Case(policy, by_target[target], void=void.get(policy, ""))
        for policy, by_target in found.items()
    ]
    asked = f"`{inspect_command} --target {target}` shows what holds the peak"
    plan = f"{plan_command} --target {target}"
    return compiled_headline(cases, held="" if len(cases) > 1 else asked, plan=plan)


def plan_headline(
    before: Memory, after: Memory, step_seconds: float, extra_seconds: float, phase: str
) -> str:
    """Return the sentence about a plan.

    Args:
        before: the memory without a plan.
        after: the memory with it.
        step_seconds: the roofline time of the step with the plan.
        extra_seconds: how much of this is recomputation.
        phase: where the peak is with the plan.
    """
    base = Case(NO_POLICY, before, step_seconds - extra_seconds)
    case = Case("this plan", after, step_seconds)
    if case.needs is None or (base.needs is not None and case.needs >= base.needs):
        done = "this plan does not lower it"
    else:
        done = f"this plan brings it to {_size_and_price(case, base)}"
    where = f"; its peak is then {_WHERE[phase]}" if phase in _WHERE else ""
    return f"{_need(base, named=True)}; {done}{where}.".replace("policy", "plan", 1)


def frontier_headline(
    target: str, memory_bytes: int, plain_bytes: int, steps: Sequence[tuple[int, float]]
) -> str:
    """Return the sentence about a frontier, whose figures are predictions.

    >>> print(frontier_headline("h100", 2**30, 2**31, [(2**28, 0.5), (2**30, 0.1), (2**31, 0.0)]))
    Without recomputation the gradient is predicted to need 2 GiB, and h100 has 1 GiB; 1 GiB is \
enough for +10 % of the forward pass's time, and 256 MiB for +50 %.

    Args:
        target: the chip.
        memory_bytes: its memory.
        plain_bytes: the peak without recomputation.
        steps: of each schedule the peak and the extra time as a share of the forward pass, the
            smallest peak first.
    """
    size, has = format_apart(plain_bytes, memory_bytes)
    fits = plain_bytes <= memory_bytes
    who = "Without recomputation the gradient is predicted to need"
    need = (
        f"{who} {size} of the {has} of {target}"
        if fits
        else f"{who} {size}, and {target} has {has}"
    )
    fitting = [s for s in steps if s[0] <= memory_bytes]
    if not steps:
        return f"{need}."
    if not fitting:
        least = format_bytes(steps[0][0])
        return f"{need}; the lowest peak that the planner reaches is {least}, which does not fit."
    shown = [steps[0]] if fits else list(dict.fromkeys([fitting[-1], steps[0]]))
    parts = [f"{format_bytes(peak)} for +{format_percent(extra)}" for peak, extra in shown]
    first, _, rest = parts[0].partition(" for ")
    said = f"{first} is enough for {rest} of the forward pass's time"
    return f"{need}; {', and '.join([said, *parts[1:]])}."


def doctor_headline(
    before: Memory, held: str, after: Memory | None, step_seconds: float, extra_seconds: float
) -> str:
    """Return the sentence about a step and its plan.

    Args:
        before: the memory without a plan.
        held: what holds its peak, as `holders` says it.
        after: the memory with the plan.
        step_seconds, extra_seconds: as for `plan_headline`.
    """
    base = Case(NO_POLICY, before, step_seconds - extra_seconds)
    done = ""
    if after is not None:
        case = Case("a plan", after, step_seconds)
        if case.needs is None or (base.needs is not None and case.needs >= base.needs):
            done = "no plan lowers it at this price"
        else:
            done = f"a plan brings it to {_size_and_price(case, base)}"
    return "; ".join(filter(None, [_need(base, named=False), held, done])) + "."


def batches_headline(rows: Iterable[tuple[str, str, int]]) -> str:
    """Return the sentence about the largest batches that fit.

    >>> print(batches_headline([("h100", "none", 16), ("h100", "nothing", 48)]))
    On h100 batch 48 fits with `nothing`, and batch 16 without a policy.

    Args:
        rows: a target, a policy, and a batch size that fits, or 0 if none does.
    """
    best: dict[str, dict[str, int]] = {}
    for target, policy, batch in rows:
        sizes = best.setdefault(target, {})
        sizes[policy] = max(batch, sizes.get(policy, 0))
    return " ".join(_largest_batch(target, sizes) for target, sizes in best.items())


def _largest_batch(target: str, sizes: Mapping[str, int]) -> str:
    plain = sizes.get(NO_POLICY, 0)
    policy = max(sizes, key=lambda name: (sizes[name], name == NO_POLICY))
    most = sizes[policy]
    if not most:
        return f"On {target} no batch fits."
    if policy == NO_POLICY:
        return f"On {target} batch {most} fits without a policy, and no policy fits more."
    rest = f"batch {plain} without a policy" if plain else "none without a policy"
    return f"On {target} batch {most} fits with `{policy}`, and {rest}."


# -- what it needs ----------------------------------------------------------------------------


def _tightest(found: Mapping[str, Memory]) -> str | None:
    """Return the target whose memory is filled most, or None without a target."""

    def filled(target: str) -> float:
        needs = Case("", found[target]).needs
        return math.inf if needs is None else needs / max(1, found[target].memory_bytes)

    return max(found, key=filled, default=None)


def _need(case: Case, named: bool) -> str:
    memory, needs = case.memory, case.needs
    what = "step" if memory.adamw_bytes is None else "gradient"
    if case.policy != NO_POLICY:
        who = f"With `{case.policy}` the {what}"
    else:
        who = f"Without a policy the {what}" if named else f"The {what}"
    if needs is None:
        return f"{who} needs more than the {format_bytes(memory.memory_bytes)} of {memory.target}"
    size, has = format_apart(needs, memory.memory_bytes)
    if memory.fits:
        return f"{who} needs {size} of the {has} of {memory.target}"
    return f"{who} needs {size}, and {memory.target} has {has}"


# -- what holds it ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Holder:
    """An array that is alive at the peak, or that is saved."""

    bytes: int
    array: str
    module: str
    kind: str

    @property
    def is_scores(self) -> bool:
        """Whether it has the form of attention scores: (…, queries, keys) in an attention."""
        sizes = re.findall(r"\d+", self.array.partition("[")[2])
        return len(sizes) >= 3 and sizes[-1] == sizes[-2] and "att" in self.module.lower()


_KINDS = {FORWARD: "activations", RECOMPUTE: "recomputed activations", BACKWARD: "cotangents"}


def holders(peak: Peak) -> str:
    """Return what holds the largest part of a peak: its kind, its share and its modules."""
    values = [
        _Holder(h.bytes, h.shape, h.module, h.phase if h.kind == "temporary" else h.kind)
        for h in peak.held
    ]
    if not any(v.bytes for v in values):
        return ""
    share, what = _largest(values)
    where = f", {_WHERE[peak.phase]}," if peak.phase in _WHERE else ""
    return f"{_share(share)} of its peak{where} is {what}"


def _saved(report: Report) -> str:
    """Return what holds most of the saved bytes, where the compiler gave no program."""
    values = _residuals(report)
    if not values:
        return ""
    share, what = _largest(values)
    return f"{_share(share)} of what it saves is {what}"


def _share(share: float) -> str:
    return "all" if share > 0.995 else format_percent(share)


def _residuals(report: Report) -> list[_Holder]:
    return [
        _Holder(r.bytes, f"{r.dtype}[{','.join(map(str, r.shape))}]", r.module, FORWARD)
        for r in report.saved
        if r.memory == "device" and r.bytes
    ]


def _largest(values: Sequence[_Holder]) -> tuple[float, str]:
    """Return the share and a description of the largest group of values.

    Arguments are a group, outputs are one, the values of repeated blocks are one, and the values
    outside of blocks are grouped by their shape, because a model has few of them.
    """
    groups = _grouped(values, _group)
    key, found = max(groups.items(), key=lambda g: _size(g[1]))
    if key in ("argument", "output"):
        what = {"argument": "arguments", "output": "outputs and gradients"}[key]
    elif "*" in key:
        found, what = _in_blocks(found)
    else:
        what = _outside(found)
    return _size(found) / _size(values), what


def _group(value: _Holder) -> str:
    if value.kind in ("argument", "output"):
        return value.kind
    before, star, _ = roll_up(value.module).partition("*")
    return before + star if star else value.array


def _in_blocks(values: Sequence[_Holder]) -> tuple[Sequence[_Holder], str]:
    """Return the part of the values to name, and its description.

    It is the attention scores if these are most of the values. Otherwise it is the deepest module
    that holds at least six tenths of the module around it.
    """
    scores = [v for v in values if v.is_scores]
    if 2 * _size(scores) >= _size(values):
        values, kind = scores, "attention scores"
    else:
        kind = ""
    prefix = _group(values[0])
    while True:
        depth = prefix.count("/") + 2
        inner = _grouped(values, lambda v: "/".join(roll_up(v.module).split("/")[:depth]))  # noqa: B023
        deepest, found = max(inner.items(), key=lambda g: _size(g[1]))
        if deepest == prefix or 10 * _size(found) < 6 * _size(values):
            break
        prefix, values = deepest, found
    kinds = _grouped(values, lambda v: v.kind)
    most = max(kinds, key=lambda k: _size(kinds[k]))
    blocks = {"/".join(v.module.split("/")[: prefix.count("/") + 1]) for v in values}
    kind = kind or _KINDS.get(most, "values of the update")
    if len(blocks) == 1:
        return values, f"{kind} in {blocks.pop()}"
    return values, f"{kind} in {len(blocks)} blocks ({prefix})"


def _outside(values: Sequence[_Holder]) -> str:
    modules = list(_grouped(values, lambda v: roll_up(v.module) or "outside every module"))
    where = " and ".join(m if m == "outside every module" else f"of {m}" for m in modules[:2])
    count = f"{len(values)} arrays" if len(values) > 1 else "an array"
    return f"{count} {values[0].array} {where}" + (" and others" if len(modules) > 2 else "")


def _grouped(values: Iterable[_Holder], key: Callable[[_Holder], str]) -> dict[str, list[_Holder]]:
    found: dict[str, list[_Holder]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return dict(sorted(found.items(), key=lambda g: -_size(g[1])))


def _size(values: Iterable[_Holder]) -> int:
    return sum(v.bytes for v in values)


# -- what to do -------------------------------------------------------------------------------


def _advice(base: Case, others: Sequence[Case], plan: str) -> list[str]:
    if base.void:
        return [f"the policy does not do what it says (lint `{base.void}`)"]
    if others:
        return _best_of(base, others, plan)
    memory = base.memory
    resident = memory.argument_bytes + memory.output_bytes - (memory.alias_bytes or 0)
    if not memory.fits and resident > memory.memory_bytes:
        size = format_bytes(resident)
        return [f"its arguments and outputs alone take {size}, which no recomputation lowers"]
    reading = base.reading
    tried = [] if reading is None or reading.regions else _priced(reading)
    if not memory.fits:
        excess = (base.needs or memory.memory_bytes) - memory.memory_bytes
        enough = [c for c, _ in tried if c.saved_bytes >= excess > 0]
        found = [(c, price) for c, price in tried if c in enough]
        if found:
            best, price = min(found, key=lambda x: x[1])
            left = format_bytes((base.needs or 0) - best.saved_bytes)
            return [
                f"`{_policy(best)}` is predicted to bring it to {left} for "
                f"+{format_percent(price)} time"
            ]
        return [f"`{plan}` searches for the fastest schedule that fits"] if plan else []
    if reading is None or reading.regions:
        return []
    cheap = [x for x in tried if x[1] <= _CHEAP]
    left = [] if cheap else ["nothing cheap is left to recompute"]
    if tried:
        best, price = max(cheap or tried, key=lambda x: x[0].saved_bytes)
        left.append(
            f"`{_policy(best)}` is predicted to lower it by {format_bytes(best.saved_bytes)} for "
            f"+{format_percent(price)} time"
        )
    return [", and ".join(left)]


def _policy(found: Counterfactual) -> str:
    return f'remat_kit.policy("{found.policy}", at="{found.at}")'


def _priced(reading: Reading) -> list[tuple[Counterfactual, float]]:
    """Return the suggestions that are worth their price, each with its share of the step's time."""
    whole, peak = reading.estimate.seconds, reading.peak.bytes
    some = (c for c in reading.what_if if worthwhile(c, peak, whole))
    return [(c, c.extra_seconds / whole if whole else 0.0) for c in some]


def _best_of(base: Case, others: Sequence[Case], plan: str) -> list[str]:
    """Return what the best of the compiled policies does."""
    sound = [case for case in others if not case.void and case.needs is not None]
    if not base.memory.fits:
        fitting = [case for case in sound if case.memory.fits]
        if fitting:
            best = min(fitting, key=lambda c: (c.seconds is None, c.seconds or 0.0, c.needs))
            return [f"{_named(best)} brings it to {_size_and_price(best, base)}"]
        least = min(sound, key=lambda c: c.needs or 0, default=None)
        said = ""
        if least is not None:
            said = f"{_named(least)} still needs {format_bytes(least.needs or 0)}"
        asked = f"`{plan}` searches for the fastest schedule that fits" if plan else ""
        return [", and ".join(filter(None, [said, asked]))]
    lower = [c for c in sound if 0 < _share_saved(c, base) >= max(0.01, _price(c, base) or 0.0)]
    if not lower:
        names = ", ".join(_named(c) for c in others)
        return [f"{names} {'does' if len(others) == 1 else 'do'} not lower it at a fair price"]
    best = min(lower, key=lambda c: c.needs or 0)
    return [f"{_named(best)} lowers that to {_size_and_price(best, base)}"]


def _named(case: Case) -> str:
    return f"`{case.policy}`"


def _share_saved(case: Case, base: Case) -> float:
    return 1 - (case.needs or 0) / base.needs if base.needs else 0.0


def _price(case: Case, base: Case) -> float | None:
    """Return the extra time as a share of the step without a policy, or None if unknown."""
    if case.seconds is None or not base.seconds:
        return None
    return case.seconds / base.seconds - 1


def _size_and_price(case: Case, base: Case) -> str:
    size, price = format_bytes(case.needs or 0), _price(case, base)
    if price is None:
        return size
    if price < 0.0005:
        return f"{size} without extra time by the roofline"
    return f"{size} for +{format_percent(price)} time by the roofline"


# -- without a chip ---------------------------------------------------------------------------


def _traced(reports: Sequence[Report]) -> str:
    """Return the sentence about traced programs: what is saved, and in which modules."""
    first, *others = reports
    who = "" if first.policy == NO_POLICY else f"With `{first.policy}` "
    the = "The" if not who else "the"
    values = _residuals(first)
    parts = [f"{who}{the} backward pass reads no saved activation"]
    if values:
        share, what = _largest(values)
        size = format_bytes(first.saved_bytes)
        parts = [
            f"{who}{the} backward pass reads {size} of saved activations, "
            f"{_share(share)} of them {what}"
        ]
    if first.recomputed_flops and first.forward_flops:
        parts.append(f"it recomputes {_again(first)}")
    if others:
        best = min(others, key=lambda r: r.saved_bytes)
        parts.append(
            f"`{best.policy}` saves {format_bytes(best.saved_bytes)} and recomputes {_again(best)}"
        )
    parts.append("target= (--target) compiles for a chip and says what fits")
    return "; ".join(parts) + "."


def _again(report: Report) -> str:
    share = report.recomputed_flops / report.forward_flops if report.forward_flops else 0.0
    return f"{format_percent(share)} of the forward FLOPs"
