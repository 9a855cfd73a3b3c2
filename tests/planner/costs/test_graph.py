"""The graph of costs: its tensors, what derivatives need of them, and its standing memory."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from planner_graphs import traced
from shapes import struct

from remat_kit._apply.divide import divided
from remat_kit._chip.target import target
from remat_kit._inspect import residuals as _residuals
from remat_kit._planner.costs import build as _build


def chain(depth):
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    return loss, ([struct(16, 16)] * depth, struct(32, 16))


def test_each_operation_says_what_its_derivative_reads():
    graph = traced(lambda w, x: jnp.sum(jnp.sin(jnp.exp(x @ w))), struct(8, 8), struct(4, 8))
    dot, exp, sin, total = graph.equations
    assert [e.primitive for e in graph.equations] == ["dot_general", "exp", "sin", "reduce_sum"]
    assert [graph.tensors[t].producer for t in dot.needs] == [
        -1
    ]  # x alone: w has no use for itself
    assert exp.needs == exp.keeps == exp.makes
    assert sin.needs == exp.makes
    assert sin.keeps == ()
    assert sin.made_bytes == 4 * 8 * 4  # cos
    assert total.needs == ()
    assert graph.residuals == exp.makes
    assert graph.saved_bytes == 2 * 4 * 8 * 4


def test_saved_bytes_are_those_of_the_residuals():
    loss, args = chain(4)
    graph = traced(loss, *args)
    kept = _residuals.saved_residuals(loss, args)
    assert graph.saved_bytes == sum(r.bytes for r in kept if not r.is_input)


def test_reshapes_are_no_tensors_of_their_own():
    graph = traced(lambda x: jnp.sum(jnp.sin(jnp.exp(x).reshape(4, 2).T)), struct(8))
    made = [e.primitive for e in graph.equations if e.makes]
    assert made == ["exp", "sin", "reduce_sum"]
    assert all(e.flops == e.seconds == 0 for e in graph.equations if not e.makes)


def test_what_is_not_differentiated_needs_nothing():
    def loss(w, x):
        mask = jnp.exp(x) > 1
        return jnp.sum(jnp.where(mask, x @ w, 0.0)) + jnp.sum(jax.lax.stop_gradient(jnp.sin(x @ w)))

    graph = traced(loss, struct(8, 8), struct(8, 8))
    assert {graph.equations[graph.tensors[t].producer].primitive for t in graph.residuals} == {"gt"}


def gradients_of(batch, chip="cpu"):
    """The bytes that gradients take, after a chain of three matrices of 1 KiB."""
    loss, (ws, _) = chain(3)
    return _build.trace(loss, (ws, struct(batch, 16)), target(chip)).standing_bytes


def test_memory_that_nothing_can_use_is_set_apart_for_gradients():
    # Arrays of 2 KiB do not fit into what is there for a gradient of 1 KiB.
    assert set(gradients_of(32)) == {3 * 1024}
    # Those of 768 bytes do, as long as there are any that the backward pass has not passed.
    dots = [0, 2, 4]  # each with its tanh behind it, then the sum
    found = gradients_of(12)
    assert found[-1] == 0
    assert [found[i] for i in dots] == [3 * 1024, 2 * 1024, 1024]
    # Those of 64 bytes would leave most of it unused.
    assert set(gradients_of(1)) == {3 * 1024}
    # A TPU's compiler puts nothing there.
    assert set(gradients_of(12, "tpu-v5e")) == {3 * 1024}


def test_what_an_array_leaves_unused_counts_in_a_program_in_pieces():
    loss, (ws, _) = chain(3)
    graph = _build.trace(loss, (ws, struct(12, 16)), target("cpu"))
    in_pieces = dataclasses.replace(graph, divided=divided(graph.program, []))
    whole, found = graph.standing_bytes, in_pieces.standing_bytes
    assert (whole[-1], found[-1]) == (0, 3 * 256)  # 768 of 1,024 bytes are in use
    assert [found[i] for i in (0, 2, 4)] == [3 * 1024, 2 * 1024 + 256, 1024 + 2 * 256]


@pytest.mark.parametrize(("chip", "expected"), [("cpu", 1024), ("h100", 256)])
def test_a_gpu_puts_off_a_gradient_larger_than_what_it_is_computed_from(chip, expected):
    def loss(w, v, x):  # an array of 768 bytes, then a product of one row of 64 bytes
        return jnp.sum(jnp.sum(jnp.tanh(x @ w), axis=0, keepdims=True) @ v)

    args = struct(16, 16), struct(16, 16), struct(12, 16)
    graph = _build.trace(loss, args, target(chip), 1)
    assert max(t.gradient_bytes for t in graph.tensors) == 1024
    in_pieces = dataclasses.replace(graph, divided=divided(graph.program, []))
    # Without pieces, the gradient counts as computed before the array of 768 bytes is freed, so
    # that the array cannot lie in its memory.
    assert set(graph.standing_bytes) == {1024}
    # Otherwise 256 of its bytes are unused while the array is there, and all once it is freed.
    assert in_pieces.standing_bytes[-1] == expected
    assert in_pieces.standing_bytes[0] == 1024


def test_gradients_of_an_iteration_are_no_results_yet():
    def loss(ws, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])

    graph = traced(loss, struct(5, 16, 16), struct(32, 16))
    (scan,) = [e.loop for e in graph.equations if e.loop]
    assert set(graph.standing_bytes) == {5 * 1024}
    assert scan.gradient_bytes == 5 * 1024
    # In an iteration those of its matrix and of what came in, and none before it begins.
    assert scan.graph.standing_bytes[0] == 3 * 1024
    assert scan.graph.standing_bytes[-1] == 0


def crossed(graph, position):
    """The tensors that cross a position, by a look at all of them."""
    alive = (t for t in graph.tensors if t.producer >= 0 and t.users)
    return {t.index for t in alive if t.producer < position <= t.users[-1]}


@pytest.mark.parametrize("depth", [3, 32, 100])
def test_cuts_know_what_crosses_them(depth):
    def loss(ws, x):
        first = y = jnp.exp(x)
        for w in ws:
            y = jnp.tanh(y @ w)
        return jnp.sum(y * first)

    graph = traced(loss, [struct(16, 16)] * depth, struct(32, 16))
    for position in range(len(graph.equations) + 1):
        found = graph.crossing(position)
        assert set(found) == crossed(graph, position)
        assert len(found) == len(set(found))


def test_a_cut_looks_at_few_tensors_of_a_long_program():
    loss, args = chain(1000)
    graph = traced(loss, *args)
    assert max(map(len, graph._spans)) < 200


def test_memory_is_reserved_until_an_array_of_nearly_that_size_is_free():
    """Each gradient by a look at all arrays, for sizes that fit and sizes that do not."""

    def loss(ws, x):
        for a, b in ws:
            x = x + jnp.tanh(jnp.sin(x @ a) @ b)
        return jnp.sum(x)

    widths = (16, 48, 128, 16, 512, 20)
    weights = [(struct(32, w), struct(w, 32)) for w in widths]
    graph = traced(loss, weights, struct(64, 32))
    reserved = [0] * (len(graph.equations) + 1)
    for t in graph.tensors:
        if t.gradient_bytes and t.users:
            size, begins = t.gradient_bytes, t.users[-1]
            later = [
                other.producer
                for other in graph.tensors
                if other.in_memory and size // 2 <= other.bytes <= size and other.producer > begins
            ]
            reserved[min(later, default=-1)] += size
    assert reserved[-1]
    assert sum(map(bool, reserved)) > 2
    assert list(graph.standing_bytes) == [sum(reserved[i:]) for i in range(len(reserved))]
