"""The simulation of a schedule: its peak, its extra work and what waits for the backward pass."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from planner_graphs import traced
from shapes import struct

import remat_kit
from remat_kit._chip.target import target
from remat_kit._planner import frontier as _frontier
from remat_kit._planner.costs import build as _build
from remat_kit._planner.costs import simulate as _simulate
from remat_kit._planner.costs.simulate import simulate
from remat_kit._policy.schedule import LoopPart, Segment


def chain(depth):
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    return loss, ([struct(16, 16)] * depth, struct(32, 16))


def stack(block, precision=None):
    def loss(ws, x):
        with jax.default_matmul_precision(precision):
            return jnp.sum(jax.lax.scan(lambda x, w: (block(x, w), None), x, ws)[0])

    return loss


@pytest.mark.parametrize(
    ("block", "single", "group"),
    [
        (lambda x, w: jnp.tanh(jnp.sin(x @ w)), 2, 2),
        (lambda x, w: x + jnp.tanh(jnp.sin(x @ w)), 2, 4),  # the sum is made again for the next one
        (lambda x, w: jnp.tanh(jnp.sin(jnp.tanh(x) @ w)), 4, 4),
        (lambda x, w: x * jnp.tanh(x @ w), 4, 4),  # the derivative reads it as it is
    ],
)
def test_what_products_alone_read_again_of_an_iteration_is_kept_in_half_precision(
    block, single, group
):
    graph = _build.trace(stack(block), (struct(6, 16, 16), struct(32, 16)), target("tpu-v5e"))
    (scan,) = [e.loop for e in graph.equations if e.loop]
    body = (Segment(0, len(scan.graph.equations)),)
    ones, groups = (_simulate.loop_cost(scan, (LoopPart(6, n, body),)) for n in (1, 3))
    assert ones.saved_bytes == 6 * 32 * 16 * single
    assert groups.saved_bytes == 2 * 32 * 16 * group


@pytest.mark.parametrize(
    ("block", "stacks"),
    [
        (lambda x, w: jnp.exp(x @ w), 2),  # what came in, for the product, and what comes out
        (lambda x, w: x + jnp.exp(x @ w), 2),
        (lambda x, w: x * jnp.exp(jnp.exp(x @ w)), 3),
        (lambda x, w: x + jnp.exp(w), 1),
    ],
)
def test_iterations_without_a_region_keep_what_came_in_if_a_derivative_reads_it(block, stacks):
    x = struct(2048, 128)
    ws = struct(8, 128, 128) if stacks > 1 else struct(8, 2048, 128)
    graph = traced(stack(block), ws, x)
    (scan,) = [e.loop for e in graph.equations if e.loop]
    plain = (LoopPart(8, 1, (Segment(0, len(scan.graph.equations), plain=True),)),)
    size = 8 * 2048 * 128 * 4
    assert _simulate.loop_cost(scan, plain).saved_bytes == stacks * size
    compiled = remat_kit.measure(stack(block), ws, x).temp_bytes
    assert stacks * size <= compiled <= stacks * size + 6 * 2048 * 128 * 4


def test_more_regions_mean_a_lower_peak_and_the_same_work():
    loss, args = chain(8)
    graph = traced(loss, *args)
    n = len(graph.equations)
    plain = simulate(graph, [Segment(0, n, plain=True)])
    one = simulate(graph, [Segment(0, n)])
    cuts = [0, 4, 8, 12, n]
    four = simulate(graph, [Segment(a, b) for a, b in itertools.pairwise(cuts)])
    assert plain.extra_flops == 0
    assert plain.saved_bytes == graph.saved_bytes
    assert four.peak_bytes < one.peak_bytes
    assert four.saved_bytes == 3 * 32 * 16 * 4
    assert four.extra_flops <= one.extra_flops <= graph.forward_flops


def test_a_saved_tensor_stops_the_recompute():
    loss, args = chain(4)
    graph = traced(loss, *args)
    n = len(graph.equations)
    dots = frozenset(t for e in graph.equations if e.primitive == "dot_general" for t in e.makes)
    kept = simulate(graph, [Segment(0, n, save=dots)])
    dot_flops = sum(e.flops for e in graph.equations if e.primitive == "dot_general")
    assert kept.extra_flops <= graph.forward_flops - dot_flops
    assert kept.saved_bytes == sum(graph.tensors[t].bytes for t in dots)


def test_nested_regions_hold_what_they_say():
    loss, args = chain(8)
    graph = traced(loss, *args)
    n = len(graph.equations)
    outs = [e.makes[0] for e in graph.equations if e.primitive == "tanh"]
    inner = tuple(
        Segment(a, b, save=frozenset(t for t in outs if a <= graph.tensors[t].producer < b - 1))
        for a, b in ((0, 4), (4, 8))
    )
    tail = Segment(8, n, plain=True)
    both = inner[0].save | inner[1].save
    held = simulate(graph, [Segment(0, 8, save=both, inside=inner), tail])
    dropped = simulate(graph, [Segment(0, 8, inside=inner), tail])
    assert held.saved_bytes == dropped.saved_bytes + 2 * 32 * 16 * 4
    assert held.extra_flops < dropped.extra_flops


def test_offloaded_bytes_are_not_on_the_device():
    loss, args = chain(4)
    graph = traced(loss, *args)
    n = len(graph.equations)
    dots = frozenset(t for e in graph.equations if e.primitive == "dot_general" for t in e.makes)
    found = simulate(graph, [Segment(0, n, offload=dots)], host_bandwidth=1e9)
    assert found.saved_bytes == 0
    assert found.host_bytes == sum(graph.tensors[t].bytes for t in dots)
    assert found.extra_seconds >= 2 * found.host_bytes / 1e9


def test_kept_arrays_go_as_the_backward_pass_needs_them():
    # Gradients grow while activations go, so the peak is not the sum of both.
    weights, x = [struct(256, 256)] * 32, struct(256, 256)

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    graph = traced(loss, weights, x)
    plain = simulate(graph, [Segment(0, len(graph.equations), plain=True)])
    one = 256 * 256 * 4
    assert plain.saved_bytes >= 32 * one
    assert plain.peak_bytes <= plain.saved_bytes + 4 * one


def test_a_region_of_an_iteration_stacks_what_it_keeps_and_hands_on_twice():
    def loss(ws, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(jnp.exp(x @ w)), None), x, ws)[0])

    graph = traced(loss, struct(6, 16, 16), struct(32, 16))
    (scan,) = [e.loop for e in graph.equations if e.loop]
    body = scan.graph
    (exp,) = [e for e in body.equations if e.primitive == "exp"]
    (made,) = exp.makes
    after = Segment(exp.index + 1, len(body.equations))
    kept, handed = (
        _simulate.loop_cost(scan, (LoopPart(6, 1, (Segment(0, after.start, save=save), after)),))
        for save in (frozenset({made}), frozenset[int]())
    )
    assert kept.saved_bytes - handed.saved_bytes == 6 * body.tensors[made].bytes
    # In a program it is there once.
    graph = traced(lambda w, x: jnp.sum(jnp.tanh(jnp.exp(x @ w))), struct(16, 16), struct(32, 16))
    (exp,) = [e for e in graph.equations if e.primitive == "exp"]
    rest = Segment(exp.index + 1, len(graph.equations))
    kept, handed = (
        simulate(graph, (Segment(0, exp.index + 1, save=frozenset(save)), rest))
        for save in (exp.makes, ())
    )
    assert kept.saved_bytes == handed.saved_bytes


def test_an_array_that_parts_of_an_iteration_share_has_one_stack():
    """A GPT of 72 layers took 35 GiB more than predicted, since it had one for each part."""

    def block(x, w):
        shared = jnp.exp(x @ w)  # kept by its own derivative, where no region is,
        again = checkpoint_name(jnp.cumsum(jnp.sin(shared), 0), "again")  # and read by two
        return jnp.tanh(jnp.cumsum(jnp.sin(shared) * jnp.sin(again), 0) @ w) * jnp.cos(again)

    ws, x = struct(32, 64, 64), struct(8192, 64)
    graph = traced(stack(block), ws, x)
    (scan,) = [e for e in graph.equations if e.loop]
    body = scan.loop.graph
    exp, first, second = (e.index for e in body.equations if e.primitive in ("exp", "cumsum"))
    cuts = [0, exp + 1, first + 1, second + 1, len(body.equations)]
    parts = tuple(Segment(a, b, plain=not a) for a, b in itertools.pairwise(cuts))
    plan = (LoopPart(32, 1, parts),)
    schedule = (Segment(0, len(graph.equations), plain=True, loops=((scan.index, plan),)),)
    planned = remat_kit.policy(_frontier.policy_of(graph, schedule))(stack(block))
    compiled = remat_kit.measure(planned, ws, x)
    # The result of ``exp``, of the first sum, of the second, and what comes in.
    assert _simulate.loop_bytes(scan.loop, plan) == 4 * 32 * 8192 * 64 * 4
    assert simulate(graph, schedule).peak_bytes == pytest.approx(compiled.temp_bytes, rel=0.05)


@pytest.mark.parametrize("chip", ["cpu", "h100"])
def test_ranges_of_a_scan_have_stacks_of_their_own(chip):
    def loss(ws, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])

    graph = _build.trace(loss, (struct(6, 16, 16), struct(32, 16)), target(chip))
    (scan,) = [e for e in graph.equations if e.loop]
    body = (Segment(0, len(scan.loop.graph.equations)),)
    whole, parted = (
        _simulate.loop_cost(scan.loop, tuple(LoopPart(n, 1, body) for n in ranges))
        for ranges in ((6,), (4, 2))
    )
    assert parted.peak_bytes - whole.peak_bytes == 6 * 1024
    # A CPU's compiler makes the zeros that they begin with before everything else.
    assert parted.saved_bytes - whole.saved_bytes == (6 * 1024 if chip == "cpu" else 0)


def test_what_crosses_the_edge_of_a_region_is_written_down():
    def loss(w, x):
        return jnp.sum(jnp.exp(jnp.sin(x @ w)) @ w.T)

    graph = _build.trace(loss, (struct(16, 4096), struct(64, 16)), target("h100"))
    dot, sin, exp, *_ = graph.equations
    assert [e.primitive for e in (dot, sin, exp)] == ["dot_general", "sin", "exp"]
    (between,) = sin.makes
    assert not graph.tensors[between].in_memory
    size = graph.tensors[between].bytes
    n = len(graph.equations)
    parted = simulate(graph, (Segment(0, exp.index), Segment(exp.index, n)))
    # What comes in is the cotangent of ``sin``; it and what the region computes again are read for
    # the cotangent of ``dot``.
    assert graph.arriving(exp.index).ends == {sin.index: size}
    assert graph.arriving(exp.index).fused_bytes == size
    assert graph.arriving(dot.index + 1).fused_bytes == 0
    assert parted.peak_bytes >= 3 * size


def test_what_is_remembered_does_not_change_the_answer():
    loss, args = chain(8)
    graph = traced(loss, *args)
    n = len(graph.equations)
    schedules = [
        (Segment(0, k), Segment(k, m, plain=True), Segment(m, n))
        for k, m in itertools.combinations(range(1, n), 2)
    ]
    together = [simulate(graph, s) for s in schedules]
    assert together == [simulate(traced(loss, *args), s) for s in schedules]


def test_what_a_fusion_reads_is_charged_to_what_it_writes():
    def loss(w, x):
        y = x @ w
        return jnp.sum(jnp.tanh(y * 2 + 1) @ w)

    graph = _build.trace(loss, (struct(64, 64), struct(4096, 64)), target("h100"))
    found = {e.primitive: e.seconds for e in graph.equations}
    assert found["mul"] == found["add"] == 0
    size = 4096 * 64 * 4  # bytes
    assert found["tanh"] == pytest.approx(2 * size / target("h100").bandwidth_bytes_per_second)
    # A region that keeps all that is written runs nothing again that derivatives would not.
    written = frozenset(t.index for t in graph.tensors if t.in_memory)
    region = (Segment(0, len(graph.equations), save=written),)
    assert simulate(graph, region).extra_seconds == 0
    assert simulate(graph, [Segment(0, len(graph.equations))]).extra_seconds > found["tanh"]
