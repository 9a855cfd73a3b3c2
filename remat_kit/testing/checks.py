"""Check that a step fits a chip: compile it, and fail with advice if it does not fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from remat_kit._apply import decorate as _decorate
from remat_kit._apply import void as _void
from remat_kit._chip import compile as _compile
from remat_kit._chip import target as _target
from remat_kit._chip.memory import Memory
from remat_kit._chip.target import Target
from remat_kit._errors import CheckError, PolicyError, RematKitError, UserError
from remat_kit._inspect import report as _report
from remat_kit._inspect.residuals import Residual
from remat_kit._program.steps.gradient import Argnums
from remat_kit._program.steps.losses import argnums_of
from remat_kit._units import format_apart, format_bytes, parse_bytes
from remat_kit.testing import baseline as _baseline

# -- memory -------------------------------------------------------------------------------------


def assert_fits(
    fn: Callable[..., Any],
    *args: Any,
    target: str | Target,
    budget: int | str | None = None,
    policy: Any = None,
    at: str | None = None,
    argnums: Argnums = 0,
    donate_argnums: int | Sequence[int] = (),
) -> Memory:
    """Compile the gradient of a loss for a chip and fail if it does not fit there.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    >>> w = x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> assert_fits(loss, w, x, target="cpu", budget="4MiB").fits
    True
    >>> assert_fits(loss, w, x, target="cpu", budget="512KiB")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    remat_kit._errors.CheckError: `assert_fits(..., target='cpu', budget='512KiB')`: needs ...

    Args:
        fn: called as ``fn(*args)``; returns a real scalar, or a pair of a scalar and anything.
        args: pytrees of arrays or `jax.ShapeDtypeStruct`.
        target: the chip to compile for.
        budget: the bytes that the step may take, as a number or as in ``"14GiB"``. The limit is
            never more than the memory of the chip, which is the default.
        policy: applied to ``fn`` first, as `remat_kit.policy` does; None changes nothing.
        at: the module paths that ``policy`` is applied at.
        argnums: which arguments to differentiate; None for a function that is a whole step.
        donate_argnums: the arguments whose memory the results may take over.

    Returns:
        The memory that the program needs.

    Raises:
        CheckError: an `AssertionError`; the peak is above the budget.
        RematKitError: another error of `remat_kit.measure`.
    """
    __tracebackhide__ = True
    chip = _target.target(target)
    given = "" if budget is None else f", budget={budget!r}"
    call = f"assert_fits(..., target={chip.name!r}{given})"
    limit = chip.memory_bytes if budget is None else min(_bytes(budget, call), chip.memory_bytes)
    _void.check_at(policy, at, "assert_fits")
    step = _Step(fn, args, policy, at, argnums)
    memory = step.measured(chip, donate_argnums, call="assert_fits")
    if memory.fits and (memory.peak_bytes or 0) <= limit:
        return memory
    raise _too_large(call, step, memory, limit, "the chip" if budget is None else "the budget")


def assert_peak_at_most(
    fn: Callable[..., Any],
    *args: Any,
    target: str | Target,
    peak: int | str,
    policy: Any = None,
    at: str | None = None,
    argnums: Argnums = 0,
    donate_argnums: int | Sequence[int] = (),
) -> Memory:
    """Compile the gradient of a loss for a chip and fail if its peak is above a limit.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    >>> w = x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> assert_peak_at_most(loss, w, x, target="cpu", peak="4MiB").argument_bytes
    524288

    Args:
        peak: the bytes that arguments, results and temporaries may take together, as a number or
            as in ``"12MiB"``; the memory of the chip does not matter.
        fn, args, target, policy, at, argnums, donate_argnums: as for `assert_fits`.

    Returns:
        The memory that the program needs.

    Raises:
        CheckError: an `AssertionError`; the peak is above the limit.
        RematKitError: another error of `remat_kit.measure`.
    """
    __tracebackhide__ = True
    chip = _target.target(target)
    call = f"assert_peak_at_most(..., target={chip.name!r}, peak={peak!r})"
    limit = _bytes(peak, call)
    _void.check_at(policy, at, "assert_peak_at_most")
    step = _Step(fn, args, policy, at, argnums)
    memory = step.measured(chip, donate_argnums, call="assert_peak_at_most")
    if memory.peak_bytes is not None and memory.peak_bytes <= limit:
        return memory
    raise _too_large(call, step, memory, limit, "the peak allowed")


def _bytes(size: int | str, call: str) -> int:
    try:
        return parse_bytes(size)
    except PolicyError as error:
        raise UserError(
            f"`{call}`: {size!r} is not a size in bytes",
            hint="write a number of bytes, or one with a unit: '512KiB', '14GiB', '16GB'",
        ) from error


@dataclasses.dataclass(frozen=True)
class _Step:
    """A loss, its arguments, and a policy on it."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    policy: Any
    at: str | None
    argnums: Argnums

    @property
    def loss(self) -> Callable[..., Any]:
        if self.policy is None:
            return self.fn
        return _decorate.policy(self.policy, at=self.at)(self.fn)

    def measured(self, chip: Target, donated: int | Sequence[int], *, call: str) -> Memory:
        program = _compile.compile_program(
            *(self.loss, self.args, chip),
            argnums=argnums_of(self.loss, self.args, self.argnums, donated, call=call),
            donate_argnums=donated,
            call=call,
        )
        return program.memory

    def saved(self) -> list[Residual] | None:
        return _baseline.saved_values(self.loss, self.args, self.argnums, call="assert_fits")

    def recomputing(self, at: str) -> _Step:
        """Return the same step with every value inside these modules recomputed."""
        return dataclasses.replace(self, fn=self.loss, policy="nothing", at=at)


_LONGEST = 8  # lines in a message


def _too_large(call: str, step: _Step, memory: Memory, limit: int, of: str) -> CheckError:
    needs, has = format_apart(memory.peak_bytes or 0, limit)
    if memory.peak_bytes is None:
        needs = "more than it has"
    over = max(0, (memory.peak_bytes or 0) - limit)
    excess = f", {format_bytes(over)} too much" if over else ""
    lines = [f"`{call}`: needs {needs}; {of} has {has}{excess}", _parts(memory)]
    values = step.saved()
    if values:
        lines += _largest(values)
    elif values is None:
        lines.append(
            "argnums=None takes the function as it is, and it takes no gradient: give the loss to "
            "see what its backward pass reads"
        )
    return CheckError("\n".join(lines), hint=_advice(step, memory, values or []))


def _parts(memory: Memory) -> str:
    parts = {
        "arguments": memory.argument_bytes,
        "outputs": memory.output_bytes,
        "aliased": -(memory.alias_bytes or 0),
        "temporaries": memory.temp_bytes or 0,
    }
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    verb = "refused by" if memory.temp_bytes is None else "compiled for"
    return f"{verb} {memory.target}: {sizes}"


def _largest(values: Sequence[Residual]) -> list[str]:
    """Return the lines for the modules that save most."""
    groups: dict[str, dict[str, list[Residual]]] = {}
    for r in values:
        if r.memory == "device":
            kinds = groups.setdefault(_report.roll_up(r.module), {})
            kinds.setdefault(f"{r.primitive} {r.dtype}{list(r.shape)}", []).append(r)
    sizes = {m: sum(r.bytes for rs in kinds.values() for r in rs) for m, kinds in groups.items()}
    lines = [f"kept for the backward pass: {format_bytes(sum(sizes.values()))}, most of it by"]
    for module in sorted(sizes, key=lambda m: -sizes[m])[:_LONGEST]:
        kinds = sorted(groups[module].items(), key=lambda k: -sum(r.bytes for r in k[1]))
        what, found = kinds[0]
        count = f"{len(found)} × " if len(found) > 1 else ""
        more = f" and {len(kinds) - 1} more kinds" if len(kinds) > 1 else ""
        size = format_bytes(sizes[module])
        lines.append(f"  {size:>9}  {module or '(no module)'}: {count}{what}{more}")
    if len(sizes) > _LONGEST:
        lines.append(f"  … and {len(sizes) - _LONGEST} more modules")
    return lines


def _advice(step: _Step, memory: Memory, values: Sequence[Residual]) -> str:
    """Say what to do: the policy that saves least, if tracing it shows that it helps."""
    kept = _on_device(values)
    tried = [(_kept_recomputing(step, at), at) for at in _block_patterns(values)]
    best = min(tried, default=(kept, ""))
    if best[0] < kept:
        return (
            f"recompute the residuals of these modules: policy='nothing', at={best[1]!r} saves "
            f"{format_bytes(best[0])} instead of {format_bytes(kept)} (traced, not compiled); "
            "`remat_kit.inspect` shows each value"
        )
    if kept and not tried:
        return (
            "divide the model into regions: decorate each repeated part with "
            "remat_kit.policy('nothing'), or name the parts (Flax modules, jax.named_scope) and "
            "give policy= and at=; `remat_kit.inspect` shows what is saved"
        )
    fixed = memory.argument_bytes + memory.output_bytes - (memory.alias_bytes or 0)
    return (
        f"arguments and results take {format_bytes(fixed)}: donate what the step replaces "
        "(donate_argnums=), make the batch smaller or shard it; `remat_kit.inspect` shows what is "
        "saved"
    )


def _on_device(values: Sequence[Residual]) -> int:
    return sum(r.bytes for r in values if r.memory == "device")


def _kept_recomputing(step: _Step, at: str) -> float:
    try:
        return _on_device(step.recomputing(at).saved() or [])
    except RematKitError:  # a region is not possible there, so do not advise it
        return math.inf


def _block_patterns(values: Sequence[Residual]) -> list[str]:
    """Return patterns for the repeated modules that save values: outermost, most bytes first.

    >>> paths = "Net/block_0/up", "Net/block_1/up", "Net/head"
    >>> _block_patterns([Residual((2,), "float32", 8, p, "", "exp", (), "") for p in paths])
    ['Net/block_*']
    """
    sizes: dict[str, int] = {}
    for r in values:
        parts = _report.roll_up(r.module).split("/")
        ends = [i for i, part in enumerate(parts) if "*" in part]
        if ends:
            pattern = "/".join(parts[: ends[0] + 1])
            sizes[pattern] = sizes.get(pattern, 0) + r.bytes
    return sorted(sizes, key=lambda p: -sizes[p])[:3]
