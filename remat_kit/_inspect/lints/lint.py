"""Run all lints on a gradient.

A lint is a property of the traced or compiled program that nearly always costs memory or time
without a benefit: a value saved in a wider type than it was computed in, a saved mask that its
random key could recompute, one region around the whole loss. Every lint names the place and the
bytes, and its ``fix`` is code to paste. A lint about less than 1 % of all saved bytes is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from remat_kit._chip.memory import Memory
from remat_kit._inspect.lints.copies import dropout_masks, saved_copies
from remat_kit._inspect.lints.regions import (
    cse_undone,
    never_called,
    never_read,
    regions_without_effect,
    rules_without_effect,
    whole_loss,
)
from remat_kit._inspect.lints.rules import (
    collectives,
    dropped_offloads,
    kernels,
    repeated_collectives,
    tiny_offloads,
    unknown_names,
)
from remat_kit._inspect.lints.scene import KEEPS_NOTHING, WORTH_A_LINE, CompiledFacts, Lint, Scene
from remat_kit._inspect.lints.working_set import peak_in_pieces
from remat_kit._inspect.recomputed import Recomputed
from remat_kit._inspect.residuals import Residual
from remat_kit._policy.algebra import Policy
from remat_kit._program.flow import Op
from remat_kit._program.steps.gradient import Gradient
from remat_kit._units import format_bytes


def lints_of(
    gradient: Gradient,
    kept: Sequence[tuple[Op, Residual]],
    recomputed: Sequence[Recomputed],
    *,
    forward_flops: float,
    policy: Policy | None = None,
    at: str | None = None,
    compiled: Mapping[str, CompiledFacts] | None = None,
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
        gradient: as `trace_gradient` returns it.
        kept: the residuals, as `kept_of` returns them.
        recomputed: as `recomputed_of` returns them.
        forward_flops: floating-point operations of the loss alone.
        policy: the outermost policy that was applied to the loss, if it is known.
        at: the module paths that it was applied at.
        compiled: facts about the compiled gradient, by target.
    """
    scene = Scene(
        gradient, tuple(kept), tuple(recomputed), forward_flops, policy, at, dict(compiled or {})
    )
    found = [lint for rule in _RULES for lint in _heaviest_first(rule(scene))]
    return tuple(dict.fromkeys(found))


def _heaviest_first(lints: Iterable[Lint]) -> list[Lint]:
    return sorted(lints, key=lambda lint: -lint.bytes)


def raised_peak(
    memory: Memory, baseline: Memory | None, *, policy: Policy | None = None, at: str | None = None
) -> Lint | None:
    """Return a lint if a target needs more temporary memory with a policy than without it.

    Args:
        memory: the memory with the policy.
        baseline: the memory without it; None if unknown.
        policy, at: what was applied, if it is known.
    """
    if baseline is None or memory.temp_bytes is None or baseline.temp_bytes is None:
        return None
    more = memory.temp_bytes - baseline.temp_bytes
    if more <= WORTH_A_LINE * baseline.temp_bytes:
        return None  # padding and packing change the memory by as much
    message = (
        f"compiled for {memory.target} the policy needs {format_bytes(memory.temp_bytes)} of "
        f"temporaries, {format_bytes(more)} more than the {format_bytes(baseline.temp_bytes)} "
        "without it"
    )
    text = "None" if policy is None or policy == KEEPS_NOTHING else "'nothing'"
    at_text = "" if at is None else f", at={at!r}"
    fix = f"remat_kit.policy({text}{at_text})" if text != "None" else "remat_kit.policy(None)"
    return Lint("region-raises-peak", message, fix, bytes=more)


def _raised_peaks(scene: Scene) -> Iterator[Lint]:
    if scene.regions:
        for c in scene.compiled.values():
            lint = raised_peak(c.memory, c.baseline, policy=scene.policy, at=scene.at)
            if lint is not None:
                yield lint


_RULES: tuple[Callable[[Scene], Iterator[Lint]], ...] = (
    *(whole_loss, regions_without_effect, rules_without_effect, never_read, never_called),
    *(unknown_names,),
    *(cse_undone, saved_copies, dropout_masks, collectives, repeated_collectives, kernels),
    *(tiny_offloads, dropped_offloads, _raised_peaks, peak_in_pieces),
)
