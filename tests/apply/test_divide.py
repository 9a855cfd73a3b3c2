"""Programs with segments in pieces, as a plan runs them: same values, in every mode."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit
from remat_kit import PolicyError, planned, policy
from remat_kit._apply.divide import divided, segment_of, split_of
from remat_kit._policy import schedule as _schedule
from remat_kit._policy.divisions import Division, lines
from remat_kit._program.program import flat_program

KEYS = jax.random.split(jax.random.key(0), 8)


def blocks(weights: Any, x: Any) -> Any:
    for w in weights:
        scores = jax.nn.softmax(x @ w @ x.mT)
        x = x + jnp.tanh(scores @ x)
    return jnp.mean(x**2)


def head(w: Any, x: Any, labels: Any) -> Any:
    logits = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))


def scanned(weights: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(jax.nn.softmax(x @ w @ x.mT) @ x), None

    return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


@functools.cache
def arguments() -> tuple[Any, Any]:
    weights = [jax.random.normal(k, (6, 6)) for k in KEYS[:3]]
    return weights, jax.random.normal(KEYS[3], (2, 10, 6))


def plan_of(fn: Any, args: Any, divisions: list[Division], segments: str = "") -> Any:
    program = flat_program(jax.make_jaxpr(fn)(*args))
    count = len(divided(program, divisions).program.eqns)
    return planned(_schedule.describe(program), *lines(divisions), segments or f"0:{count} plain")


def wide(fn: Any, args: Any, shape: tuple[int, ...], size: int, pieces: int, axis: int) -> Any:
    """Return a division for each product of this shape, and of the equations that follow it."""
    program = flat_program(jax.make_jaxpr(fn)(*args))
    at = [
        i
        for i, e in enumerate(program.eqns)
        if e.primitive.name == "dot_general" and e.outvars[0].aval.shape == shape
    ]
    return [Division(i, i + size, pieces, (i, 0), axis) for i in at]


def close(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5 * np.max(np.abs(x)))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("pieces", [2, 3])
def test_gradients_are_the_same(axis, pieces):
    args = arguments()
    found = wide(blocks, args, (2, 10, 10), 9, min(pieces, (2, 10)[axis]), axis)
    assert len(found) == 3
    lean = policy(plan_of(blocks, args, found))(blocks)
    close(jax.value_and_grad(blocks, (0, 1))(*args), jax.value_and_grad(lean, (0, 1))(*args))


def test_in_regions_that_save_nothing():
    args = arguments()
    found = wide(blocks, args, (2, 10, 10), 9, 2, 1)
    program = flat_program(jax.make_jaxpr(blocks)(*args))
    count = len(divided(program, found).program.eqns)
    plan = plan_of(blocks, args, found, f"0:{count}")
    lean = policy(plan)(blocks)
    close(jax.grad(blocks)(*args), jax.jit(jax.grad(lean))(*args))


@pytest.mark.slow
def test_forward_mode_second_order_and_vmap():
    weights, x = arguments()
    lean = policy(plan_of(blocks, (weights, x), wide(blocks, (weights, x), (2, 10, 10), 9, 5, 1)))(
        blocks
    )
    moved = [jnp.cos(w) for w in weights]
    for fn in (
        lambda f: jax.jvp(lambda w: f(w, x), (weights,), (moved,)),
        lambda f: jax.grad(lambda w: sum(jnp.sum(g**2) for g in jax.grad(f)(w, x)))(weights),
        lambda f: jax.vmap(jax.grad(f), (None, 0))(weights, jnp.stack([x, 2 * x])),
    ):
        close(fn(blocks), fn(lean))


def test_under_remat3():
    if "jax_remat3" not in jax.config.values:
        pytest.skip("this release of JAX has no such flag")
    args = arguments()
    expected = jax.grad(blocks)(*args)
    found = wide(blocks, args, (2, 10, 10), 9, 5, 1)
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    try:
        count = len(divided(flat_program(jax.make_jaxpr(blocks)(*args)), found).program.eqns)
        for segments in (f"0:{count} plain", f"0:{count}"):
            lean = policy(plan_of(blocks, args, found, segments))(blocks)
            close(expected, jax.grad(lean)(*args))
    finally:
        jax.config.update("jax_remat3", before)


def test_equal_blocks_share_one_loop():
    args = arguments()
    program = flat_program(jax.make_jaxpr(blocks)(*args))
    found = divided(program, wide(blocks, args, (2, 10, 10), 9, 2, 1))
    assert len(found.loops) == 3
    assert len(set(found.loops.values())) == 1
    equations = [found.program.eqns[i] for i in found.loops]
    assert len({id(e.params["call_jaxpr"]) for e in equations}) == 1
    assert len(found.program.eqns) < len(program.eqns)


def test_the_body_of_a_scan():
    weights, x = arguments()
    args = jnp.stack(weights), x
    program = flat_program(jax.make_jaxpr(scanned)(*args))
    (at,) = (i for i, e in enumerate(program.eqns) if e.primitive.name == "scan")
    body = flat_program(program.eqns[at].params["jaxpr"])
    first = next(i for i, e in enumerate(body.eqns) if e.outvars[0].aval.shape == (2, 10, 10))
    found = [Division(first, first + 8, 2, (first, 0), 1, (at,))]
    lean = policy(plan_of(scanned, args, found))(scanned)
    close(jax.value_and_grad(scanned)(*args), jax.value_and_grad(lean)(*args))
    inside = divided(program, found)
    assert [len(b.loops) for b in inside.bodies.values()] == [1]


def test_a_loss_head_needs_less_memory():
    structs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((32, 4096), (1024, 32))]
    args = *structs, jax.ShapeDtypeStruct((1024,), jnp.int32)
    program = flat_program(jax.make_jaxpr(head)(*args))
    division = Division(0, len(program.eqns), 16, (0, 0), 0)
    lean = policy(plan_of(head, args, [division]))(head)
    whole, split = (remat_kit.measure(f, *args, target="cpu") for f in (head, lean))
    assert (split.temp_bytes or 0) < (whole.temp_bytes or 0) / 4


def test_a_segment_that_cannot_run_in_pieces():
    args = arguments()
    program = flat_program(jax.make_jaxpr(blocks)(*args))
    (first, *_) = wide(blocks, args, (2, 10, 10), 9, 2, 2)
    part = segment_of(program, first.start, first.stop)
    blocked = split_of(part, (0, 0), 2)
    with pytest.raises(PolicyError, match="cannot run in pieces") as caught:
        divided(program, [first], "policy(p)")
    assert str(blocked) in caught.value.message


def test_a_plan_of_another_program_is_refused():
    args = arguments()
    plan = plan_of(blocks, args, wide(blocks, args, (2, 10, 10), 9, 2, 1))
    with pytest.raises(PolicyError, match="another program"):
        jax.grad(policy(plan)(lambda w, x: jnp.sin(blocks(w, x))))(*args)
    with pytest.raises(PolicyError, match="other shapes"):
        jax.grad(policy(plan)(blocks))(args[0], args[1][:, :8])


def test_an_argument_that_only_what_is_before_a_loop_reads_makes_no_other_loop():
    def scaled(weights: Any, x: Any) -> Any:
        for i, w in enumerate(weights):
            w = jnp.sin(w) if i == 2 else w
            x = jnp.tanh(x @ (2 * w))
        return jnp.sum(x)

    args = [jax.random.normal(KEYS[0], (6, 6))] * 3, jnp.ones((10, 6))
    program = flat_program(jax.make_jaxpr(scaled)(*args))
    ends = [i for i, e in enumerate(program.eqns) if e.primitive.name == "tanh"]
    found = divided(program, [Division(i - 2, i + 1, 5, (i, 0), 0) for i in ends])
    first, *others = found.loops.values()
    assert others[0] is others[1]
    assert first is not others[0]  # it reads an argument in pieces


def products(weights: Any, x: Any) -> Any:
    for up, down in weights:
        x = jnp.tanh(x @ up) @ down
    return jnp.sum(x)


@pytest.mark.slow
def test_a_tpu_copies_arguments_again_for_the_derivative():
    """A barrier is on the arguments of the program, and not on what the program computes."""
    weights = [(jax.random.normal(KEYS[0], (6, 8)), jax.random.normal(KEYS[1], (8, 6)))] * 3
    x = jax.random.normal(KEYS[2], (10, 6))
    program = flat_program(jax.make_jaxpr(products)(weights, x))
    found = [Division(i, i + 3, 5, (i, 0), 0) for i in (0, 3, 6)]
    loops = list(divided(program, found).loops.values())
    assert len(set(loops)) == 2  # the first reads an argument where the others read activations
    inputs = set(program.invars)
    assert [sum(v in loop.arguments for v, _ in loop.inputs) for loop in loops] == [3, 2, 2]
    assert all(loop.arguments <= inputs & {v for v, _ in loop.inputs} for loop in loops)
    lean = policy(plan_of(products, (weights, x), found))(products)
    gradient = jax.value_and_grad(lean, (0, 1))
    for platform, wanted in (("cpu", 0), ("cuda", 0), ("tpu", 3)):
        lowered = jax.jit(gradient).trace(weights, x).lower(lowering_platforms=(platform,))
        barriers = [s for s in lowered.as_text().splitlines() if "optimization_barrier" in s]
        tied = [s for s in barriers if "tensor<i1>" in s]
        assert len(tied) == wanted, platform
        assert not any("tensor<10x6xf32>" in s for s in tied[:2])
    close(jax.value_and_grad(products, (0, 1))(weights, x), gradient(weights, x))
    for mode in (jax.jacfwd, jax.jacrev):
        of_products, of_lean = (mode(jax.grad(fn, 1), 1)(weights, x) for fn in (products, lean))
        close(of_products, of_lean)
    mapped = jax.vmap(jax.grad(lean, 1), in_axes=(None, 0))
    close(mapped(weights, jnp.stack([x, 2 * x]))[0], jax.grad(products, 1)(weights, x))
