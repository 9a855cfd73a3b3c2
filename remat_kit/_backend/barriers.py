"""Optimization barriers that keep a compiler from undoing a schedule.

A compiler may fuse or move operations across the boundary of a region and so save values that the
schedule recomputes. Each function here adds an optimization barrier on the compilers that need it
and changes nothing on the others.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp

from remat_kit._backend import facts as _facts
from remat_kit._jax import (
    ad,
    ad_util,
    batching,
    bind,
    core,
    dispatch,
    is_partitioned,
    lowering_platforms,
    mlir,
    own_primitive,
    partial_eval,
)

# -- the primitives -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Barrier:
    """A barrier on values, or on the operands of an equation."""

    primitive: Any

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the values; none of them can be used before all of them are computed."""
        return self.primitive.bind(*values) if values else []

    def before(self, eqn: Any) -> list[Any]:
        """Return the equation of a barrier on an equation's operands, and the equation behind it.

        All operands must be variables.
        """
        there = [type(v)(v.aval) for v in eqn.invars]
        own = eqn.replace(
            primitive=self.primitive, params={}, outvars=there, effects=core.no_effects
        )
        return [own, eqn.replace(invars=there)]


def barrier(
    platforms: Sequence[str], *, backward_only: bool = False, one_device: bool = False
) -> Barrier:
    """Return a barrier for these compilers; for all others, it is the identity.

    The results are there when all operands are, and so are their cotangents. With ``one_device`` it
    is also the identity in code that the compiler partitions. Seen on 0.10.2, 0.12.
    """
    # Tangents have a barrier of their own, from which dead-code elimination removes the tangents
    # that nothing reads. Otherwise JAX would call backward rules with cotangents of zeros. The
    # barrier of the primal values and that of the cotangents keep all of them, even if some are not
    # read.
    primitive, linear, cotangent = (
        own_primitive("remat_kit_barrier", "optimization_barrier") for _ in range(3)
    )

    def nonzero_only(barrier: Any, values: Sequence[Any]) -> list[Any]:
        """Leave symbolic zeros out: a barrier would allocate an array for each of them."""
        there = iter(Barrier(barrier)([v for v in values if type(v) is not ad_util.Zero]))
        return [v if type(v) is ad_util.Zero else next(there) for v in values]

    def jvp(primals: Any, tangents: Any) -> Any:
        # The same tracers are returned, so that a scan does not stack a value twice, once before
        # the barrier and once after it.
        through = list(primals) if backward_only else Barrier(primitive)(primals)
        return through, nonzero_only(linear, tangents)

    def transpose(cts: Any, *primals: Any) -> Any:
        undefined = [ad.is_undefined_primal(p) for p in primals]
        kept = [
            ct if lin else ad_util.Zero(core.typeof(p))
            for ct, lin, p in zip(cts, undefined, primals, strict=True)
        ]
        through = nonzero_only(cotangent, kept)
        return [None if type(ct) is ad_util.Zero else ct for ct in through]

    def dce(used: Sequence[bool], *rest: Any) -> Any:
        eqn = rest[-1]  # 0.12 says before which operands are alive
        if not any(used):
            return [False] * len(eqn.invars), None
        ins, outs = (
            [v for v, u in zip(variables, used, strict=True) if u]
            for variables in (eqn.invars, eqn.outvars)
        )
        return list(used), eqn.replace(invars=ins, outvars=outs)

    there = mlir.lower_fun(lambda *v: jax.lax.optimization_barrier(v), multiple_results=True)
    none = mlir.lower_fun(lambda *v: v, multiple_results=True)

    def lowered(ctx: Any, *values: Any) -> Any:
        return (none if one_device and is_partitioned(ctx) else there)(ctx, *values)

    for each in (primitive, linear, cotangent):
        each.multiple_results = True
        each.def_impl(functools.partial(dispatch.apply_primitive, each))
        each.def_abstract_eval(lambda *avals: avals)
        batching.primitive_batchers[each] = functools.partial(_batched_alike, each)
        ad.primitive_jvps[each] = jvp
        ad.primitive_transposes[each] = transpose
        mlir.register_lowering(each, none)
        for platform in lowering_platforms(platforms):
            if each is not primitive or not backward_only:
                mlir.register_lowering(each, lowered, platform)
    partial_eval.dce_rules[linear] = dce
    return Barrier(primitive)


def _batched_alike(primitive: Any, values: Any, dims: Any) -> Any:
    """Batch an operation whose results are its operands."""
    return primitive.bind(*values), dims


# -- the barriers of plans -------------------------------------------------------------------------

# Each barrier acts on the compilers to which one fact applies. XLA's CPU compiler, for example,
# does not need `together` and would use a little more memory with it. `drawn_late` is needed where
# the random bits themselves are in memory. We do not use JAX's own
# barrier because JAX cannot transpose it where only some of the values have tangents. A barrier
# with `backward_only` acts on the cotangents and does not change the forward pass.
together = barrier(_facts.FUSES_GRADIENT_SUMS.backends)
together_backward = barrier(_facts.FUSES_GRADIENT_SUMS.backends, backward_only=True)
apart = barrier(_facts.FUSES_SUMS_INTO_READERS.backends)
apart_backward = barrier(_facts.FUSES_SUMS_INTO_READERS.backends, backward_only=True)
drawn_late = barrier(_facts.KEEPS_RANDOM_WORDS.backends)
computed_early = barrier(_facts.COMPUTES_MASKS_AGAIN.backends)
once = barrier(_facts.COMPUTES_RESULTS_AGAIN.backends)
again = barrier(_facts.KEEPS_COPIES_FOR_DERIVATIVES.backends)
kernel_first = barrier(_facts.DELAYS_KERNEL_GRADIENTS.backends)
_in_turn = barrier(_facts.DELAYS_BATCHED_GRADIENTS.backends, backward_only=True)
_in_turn_unless_fused = barrier(
    tuple(
        b
        for b in _facts.DELAYS_BATCHED_GRADIENTS.backends
        if b not in _facts.FUSES_PRODUCTS_WITH_SUMS.backends
    ),
    backward_only=True,
)
_side_by_side = barrier(
    _facts.DELAYS_WEIGHT_GRADIENTS.backends, backward_only=True, one_device=True
)


def materialized(values: dict[Any, Any], stacked: bool) -> dict[Any, Any]:
    """Keep the compiler from fusing the inputs of a region into every operation that reads them.

    A residual stream is a sum of many arrays. XLA's CPU compiler fuses the partial sum into each
    later block, so that all terms of the sum stay live until the last block: ResNet-152 then takes
    1051 MiB although the plan predicts 634 MiB (jax 0.12). In the backward pass the compiler does
    the same to the sum of the cotangents of a region's inputs, where parts of the region read that
    sum one after the other: the dense block in `tests/apply/test_run_schedule.py` then takes
    117 MiB instead of 88 MiB.

    On CPUs, keys of random numbers wait for the other inputs. Otherwise XLA's CPU compiler draws
    the random bits of all regions at the beginning of the program, because they depend on nothing
    but a key, and they stay live until they are used: eight bytes for each element of each mask of
    dropout. A plan of BERT then keeps the random bits of all layers, which it says it recomputes
    (jax 0.12, `tests/apply/test_run_schedule.py`).
    """
    found = _behind(apart_backward if stacked else apart, _floats(values))
    keys = {v: x for v, x in values.items() if is_key(jax.typeof(x))}
    return _behind(drawn_late, found | keys) if found and keys and not stacked else found


def computed_once(values: dict[Any, Any]) -> dict[Any, Any]:
    """Keep XLA's CPU compiler from computing the outputs of a region twice.

    The derivative of the operations that follow a region reads the region's outputs. XLA's CPU
    compiler recomputes the outputs there and saves everything that they are computed from. With
    that, the plan of ResNet-50 with the lowest peak took 196 MiB more (jax 0.12). GPUs do not need
    this barrier.
    """
    return _behind(once, _floats(values))


def copied_again(gate: Any, arguments: dict[Any, Any]) -> dict[Any, Any]:
    """Make the derivative of a loop over pieces copy arguments again.

    Where every piece reads a whole argument, such as the images if the channels of a convolution
    are cut into pieces, XLA's TPU compiler copies it to bfloat16 before the first piece. The loop
    of the derivative would read the same copy, which would be live in between: 392 MiB of the 1,281
    that the least plan of AlexNet then needs (1024 images, v5e, jax 0.12). What the program
    computes itself is stored only in the precision in which it is read. A barrier would keep it in
    float32, so there is none. The arguments are those of the function that a plan decorates. If a
    larger program computes them, the barrier saves nothing.

    Args:
        gate: a value that is there when the loop of the derivative begins.
        arguments: the arguments that the loop reads.

    Returns:
        The values to use instead.
    """
    if not arguments:
        return arguments
    return dict(zip(arguments, again([gate, *arguments.values()])[1:], strict=True))


def waiting_for_gradients(values: dict[Any, Any], stacked: bool) -> dict[Any, Any]:
    """Make the backward pass of a segment wait for the gradients that the segment adds to.

    Where an earlier segment reads the same argument (a tied embedding, for example), the gradient
    of that argument is a sum of several terms. XLA's TPU compiler fuses the addition into the
    matrix product that computes this segment's term. The product then runs only when the other
    term is there, and everything that the product reads, such as the logits, stays live through
    the backward pass of all layers (GPT-12 on a v5e, jax 0.12).
    """
    return _behind(together_backward if stacked else together, _floats(values))


def without_delay(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Make the two gradients of a product or a convolution wait for each other.

    XLA's GPU compiler may put off the gradient of a weight until the end of the backward pass. What
    that gradient reads, the recomputed input of the layer and the cotangent of its output, stays
    live until then: the dense layers of the probe `delays_weight_gradients` take 11 MiB instead of
    2.5 MiB (h100, jax 0.12). The barrier is for what a region recomputes. For saved arrays, it
    changed the memory of no plan that we tried. Products with batch dimensions, such as the scores
    of attention, read no weights. There is no barrier for a gradient that is much larger than what
    it reads (`has_large_gradient`): until it is computed, other arrays can use its memory.

    Where the compiler partitions the program, the gradient of a weight is there only when it is
    summed over the devices. The other gradient would wait for the communication, so there is no
    barrier then.

    Args:
        eqn: an equation.
        values: the values of its operands.

    Returns:
        The values to use instead.
    """
    return _side_by_side([*values]) if has_weight_gradient(eqn) else values


def without_delay_equations(eqn: Any) -> list[Any]:
    """Return a barrier on the operands and the equation behind it, as `without_delay` adds it.

    Equations without the gradient of a weight are returned alone.
    """
    return _side_by_side.before(eqn) if has_weight_gradient(eqn) else [eqn]


def batched_in_turn(
    eqn: Any, values: Sequence[Any], summed: Collection[int] = ()
) -> list[Any] | None:
    """Evaluate a product with batch dimensions so that its gradients are computed one by one.

    This is for the bodies of loops over pieces. Scores of attention have a cotangent that both
    gradients of their product read, often each in an order of axes of its own. In a loop, XLA's CPU
    compiler computes it once for each of them, and it is in memory twice, beside what it is
    computed from. A barrier on the cotangent prevents that. In the product of the attention weights
    and the values, an operand is larger than the result. The two gradients of this product wait for
    each other, so that the weights can be freed. A barrier on the cotangent of this product as well
    makes XLA use more memory for some shapes (jax 0.12).

    If a piece of the weights has many rows in float32, XLA fuses the product in the derivative of
    the softmax with the sums of that derivative. The gradient of the weights is then never in
    memory, and with a barrier it would be, so there is none.

    Args:
        eqn: an equation.
        values: the values of its operands, whole or in pieces.
        summed: the sizes of the arrays that the loop sums, such as the exponentials of a softmax.

    Returns:
        The results, or None if the equation is not such a product.
    """
    if eqn.primitive is not jax.lax.dot_general_p or not eqn.params["dimension_numbers"][1][0]:
        return None
    if eqn.outvars[0].aval.size > max(v.aval.size for v in eqn.invars):
        return list(_in_turn(bind(eqn, list(values))))
    wait = _in_turn_unless_fused if _sums_many_rows(eqn, values, summed) else _in_turn
    return bind(eqn, list(wait(list(values))))


# XLA's CPU compiler fuses a product and the sums of a softmax's derivative from this many rows on
# (fact `fuses_products_with_sums`). The rows are the queries of a piece, counted over all heads and
# examples. In a partitioned program each device has fewer, which is not considered here.
_FUSED_FROM = 4096


def _sums_many_rows(eqn: Any, values: Sequence[Any], summed: Collection[int]) -> bool:
    """Tell whether the loop sums many rows of the larger operand of a product, in float32."""
    sides = zip(eqn.invars, values, eqn.params["dimension_numbers"][0], strict=True)
    operand, value, columns = max(sides, key=lambda side: side[1].size)
    rows = value.size // math.prod(value.shape[axis] for axis in columns)
    is_summed = operand.aval.size in summed and value.dtype == jnp.float32
    return is_summed and rows >= _FUSED_FROM


def has_weight_gradient(eqn: Any) -> bool:
    """Tell whether an equation multiplies arrays by what may be weights: a product or convolution.

    Products with batch dimensions and those with a constant operand do not. Those with a gradient
    that takes less memory if it is computed late (`has_large_gradient`) do not count either.
    """
    if any(isinstance(v, jec.Literal) for v in eqn.invars):
        return False
    if eqn.primitive is jax.lax.conv_general_dilated_p:
        return True
    if eqn.primitive is not jax.lax.dot_general_p or eqn.params["dimension_numbers"][1][0]:
        return False
    return not has_large_gradient(eqn)


# A gradient is large if it has more than this many times the bytes that it is computed from. XLA
# puts off that of VGG-16's first dense layer, which has 55 times the bytes. Those of AlexNet have
# at most 3 times, and its plans are predicted well without this rule (h100).
_PUT_OFF_FROM = 4


def has_large_gradient(eqn: Any) -> bool:
    """Tell whether the gradient of a weight takes many times the bytes that it is computed from.

    XLA's GPU compiler computes such a gradient at the end of the program, and until then temporary
    arrays lie in its memory. What it reads stays live, which is little. The first dense layer of
    VGG-16 has a gradient of 392 MiB that is computed from 7 MiB.

    The weight is the second operand, as in ``x @ w`` and in the layers of Flax. If ``x`` is the
    larger one, its cotangent is needed at once.
    """
    if eqn.primitive is not jax.lax.dot_general_p:
        return False
    x, weight, out = (v.aval.size * v.aval.dtype.itemsize for v in (*eqn.invars, *eqn.outvars))
    return weight > _PUT_OFF_FROM * (x + out)


def _behind(
    barrier: Callable[[list[Any]], Sequence[Any]], values: dict[Any, Any]
) -> dict[Any, Any]:
    return dict(zip(values, barrier([*values.values()]), strict=True)) if values else {}


def _floats(values: dict[Any, Any]) -> dict[Any, Any]:
    return {v: x for v, x in values.items() if jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)}


def is_key(aval: Any) -> bool:
    """Tell whether values of a type may be keys of `jax.random`, typed ones or raw ones.

    Raw keys are a few words of uint32. Another array of that kind may be taken for one; it then
    waits behind a barrier, which changes no value.

    >>> [is_key(jax.typeof(x)) for x in (jax.random.key(0), jax.random.PRNGKey(0), jnp.ones(2))]
    [True, True, False]
    """
    if not isinstance(aval, core.ShapedArray):  # a reference, for example
        return False
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return True
    return aval.dtype == jnp.uint32 and aval.size <= _WORDS


# The most words of a key of any generator of JAX.
_WORDS = 4
