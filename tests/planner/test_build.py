"""The cost graph of a loss, and the simulation of schedules over it."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import remat_kit
from remat_kit import UserError
from remat_kit._chip.target import target
from remat_kit._inspect import residuals as _residuals
from remat_kit._planner import build as _build
from remat_kit._planner import derivative as _derivative
from remat_kit._planner import frontier as _frontier
from remat_kit._planner import simulate as _simulate
from remat_kit._planner.simulate import LoopPlan, Segment, simulate
from remat_kit._program.program import flat_program

CHIP = target("cpu")


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def traced(fn, *args):
    return _build.trace(fn, args, CHIP)


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


def _with_axis(x, y):
    return x * y[None], x + y[None], x - y[None], jnp.sum(x, 0), jnp.concatenate([x, y[None]])


def _arithmetic(x, y):
    y = lax.broadcast_in_dim(y, (1, 8), (1,))
    return [p.bind(x, y) for p in (lax.add_p, lax.sub_p, lax.mul_p)]


@pytest.mark.parametrize("fn", [_with_axis, _arithmetic])
def test_what_is_known_of_a_derivative_is_what_linearizing_finds(fn):
    program = flat_program(jax.make_jaxpr(fn)(struct(4, 8), struct(8)))
    for eqn in program.eqns:
        for mask in itertools.product((True, False), repeat=len(eqn.invars)):
            if any(mask):
                assert _derivative.derivative_of(eqn, mask) == _derivative._linearized(eqn, mask), (
                    eqn
                )


def test_saved_bytes_are_those_of_the_residuals():
    loss, args = chain(4)
    graph = traced(loss, *args)
    kept = _residuals.saved_residuals(loss, args)
    assert graph.saved_bytes == sum(r.bytes for r in kept if not r.is_input)


def attention(ws, x):
    """The loss of a scan over layers with attention in each."""

    def layer(x, ws):
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
        q, k, v = (h @ w for w in ws[:3])
        return x + (jax.nn.softmax(q @ k.swapaxes(-1, -2) / 16) @ v) @ ws[3], None

    return jnp.sum(jax.lax.scan(layer, x, ws)[0] ** 2)


@pytest.mark.parametrize(
    ("chip", "precision", "share"),
    [("tpu-v5e", None, 2), ("tpu-v5e", "highest", 1), ("h100", None, 1)],
)
def test_tpus_store_what_only_products_read_in_half_precision(chip, precision, share):
    args = (struct(4, 16, 16),) * 4, struct(2, 32, 16)
    with jax.default_matmul_precision(precision):
        (scan,) = (e for e in _build.trace(attention, args, target(chip)).equations if e.loop)
    graph = scan.loop.graph
    dots = [e for e in graph.equations if e.primitive == "dot_general"]
    read = {t for e in dots for t in e.reads if graph.tensors[t].producer >= 0}
    rest = [e for e in graph.equations if e not in dots and e.makes]
    others = {t for e in rest for t in (*e.reads, *e.needs)}
    assert len(read - others) == 6  # norm, three projections, probabilities, their product
    for t in read:
        tensor = graph.tensors[t]
        whole = 4 * math.prod(tensor.shape)
        assert tensor.bytes == (whole if t in others else whole // share)


@pytest.mark.slow
@pytest.mark.skipif(not target("tpu-v5e").available, reason="needs libtpu")
def test_what_rounding_saves_on_a_tpu_is_what_its_compiler_says():
    args = (struct(16, 256, 256),) * 4, struct(32, 256, 256)

    def peaks(precision):
        with jax.default_matmul_precision(precision):
            found = remat_kit.frontier(attention, *args, target="tpu-v5e")
            point = found.points[-1]
            plain = remat_kit.policy(found.policy(point))(attention)
            compiled = remat_kit.measure(plain, *args, target="tpu-v5e")
            return np.array([point.predicted_peak_bytes, compiled.peak_bytes])

    predicted, compiled = peaks("highest") - peaks(None)
    assert predicted == pytest.approx(compiled, rel=0.05)


def stack(block, precision=None):
    def loss(ws, x):
        with jax.default_matmul_precision(precision):
            return jnp.sum(jax.lax.scan(lambda x, w: (block(x, w), None), x, ws)[0])

    return loss


@pytest.mark.parametrize(
    ("chip", "precision", "copied"),
    [("tpu-v5e", None, 3 * 16 * 16 * 2), ("tpu-v5e", "highest", 0), ("h100", None, 0)],
)
def test_tpus_copy_the_matrices_of_a_scan_in_half_precision(chip, precision, copied):
    args = struct(3, 16, 16), struct(8, 16)
    loss = stack(lambda x, w: jnp.tanh(x @ w) + jnp.sum(w), precision)
    graph = _build.trace(loss, args, target(chip))
    (scan,) = [e.loop for e in graph.equations if e.loop]
    assert scan.copied_bytes == copied
    assert set(graph.standing_bytes) == {3 * 16 * 16 * 4 + copied}


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
    ones, groups = (_simulate.loop_cost(scan, LoopPlan(((6, n, body),))) for n in (1, 3))
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
    plain = LoopPlan(((8, 1, (Segment(0, len(scan.graph.equations), plain=True),)),))
    size = 8 * 2048 * 128 * 4
    assert _simulate.loop_cost(scan, plain).saved_bytes == stacks * size
    compiled = remat_kit.measure(stack(block), ws, x).temp_bytes
    assert stacks * size <= compiled <= stacks * size + 6 * 2048 * 128 * 4


@pytest.mark.slow
@pytest.mark.skipif(not target("tpu-v5e").available, reason="needs libtpu")
def test_predictions_of_scans_on_a_tpu_are_what_its_compiler_says():
    loss = stack(lambda x, w: x + jnp.tanh(jnp.sin(x @ w)))
    args = struct(8, 4096, 4096), struct(8192, 4096)
    found = remat_kit.frontier(loss, *args, target="tpu-v5e")
    # Not of a body that is one region: its transients fuse better than modelled.
    for point in found.points[-2:]:
        planned = remat_kit.policy(found.policy(point))(loss)
        compiled = remat_kit.measure(planned, *args, target="tpu-v5e")
        assert point.predicted_peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.05)


def test_reshapes_are_no_tensors_of_their_own():
    graph = traced(lambda x: jnp.sum(jnp.sin(jnp.exp(x).reshape(4, 2).T)), struct(8))
    made = [e.primitive for e in graph.equations if e.makes]
    assert made == ["exp", "sin", "reduce_sum"]
    assert all(e.flops == e.seconds == 0 for e in graph.equations if not e.makes)


def test_fused_chains_move_their_bytes_once():
    def fused(x):
        return jnp.sum(jnp.exp(jnp.sin(x) * jnp.cos(x)))

    chip = target("tpu-v5e")
    graph = _build.trace(fused, (struct(1024),), chip)
    fused_bytes = sum(e.seconds for e in graph.equations) * chip.bandwidth_bytes_per_second
    assert fused_bytes < 2 * 4096 + 64


def test_what_is_not_differentiated_needs_nothing():
    def loss(w, x):
        mask = jnp.exp(x) > 1
        return jnp.sum(jnp.where(mask, x @ w, 0.0)) + jnp.sum(jax.lax.stop_gradient(jnp.sin(x @ w)))

    graph = traced(loss, struct(8, 8), struct(8, 8))
    assert {graph.equations[graph.tensors[t].producer].primitive for t in graph.residuals} == {"gt"}


def test_regions_of_the_model_are_spliced_in():
    block = jax.checkpoint(lambda x: jnp.tanh(jnp.sin(x)))
    graph = traced(lambda x: jnp.sum(block(x)), struct(8))
    assert [e.primitive for e in graph.equations] == ["sin", "tanh", "reduce_sum"]


def test_opaque_operations_are_one_equation():
    @jax.custom_vjp
    def own(x):
        return jnp.sin(jnp.exp(x))

    own.defvjp(lambda x: (own(x), (x, jnp.cos(x))), lambda r, g: (g * r[1],))
    graph = traced(lambda x: jnp.sum(own(jnp.tanh(x))), struct(64))
    assert [e.primitive for e in graph.equations] == ["tanh", "custom_vjp_call", "reduce_sum"]
    assert graph.equations[1].needs == graph.equations[0].makes


def test_scan_carries_the_graph_of_its_body():
    def loss(ws, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])

    graph = traced(loss, struct(6, 16, 16), struct(4, 16))
    (scan,) = [e for e in graph.equations if e.loop]
    assert scan.loop is not None
    assert scan.loop.length == 6
    assert scan.loop.carry_bytes == 256
    assert [e.primitive for e in scan.loop.graph.equations] == ["dot_general", "tanh"]
    assert scan.flops == 6 * scan.loop.graph.forward_flops
    whole = Segment(0, len(scan.loop.graph.equations))
    nothing = _simulate.loop_cost(scan.loop, LoopPlan(((6, 1, (whole,)),)))
    assert nothing.saved_bytes == 6 * 256
    grouped = _simulate.loop_cost(scan.loop, LoopPlan(((6, 3, (whole,)),)))
    assert grouped.saved_bytes == 2 * 256
    assert grouped.extra_flops == 2 * nothing.extra_flops


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
    found = simulate(graph, [Segment(0, n, save=dots, offload=dots)], host_bandwidth=1e9)
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
        _simulate.loop_cost(scan, LoopPlan(((6, 1, (Segment(0, after.start, save=save), after)),)))
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
    plan = LoopPlan(((32, 1, parts),))
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
        _simulate.loop_cost(scan.loop, LoopPlan(tuple((n, 1, body) for n in ranges)))
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


@pytest.mark.parametrize(
    ("chip", "window", "places"), [("cpu", 2, 1), ("cpu", 8, 1), ("cpu", 9, 16), ("h100", 2, 0)]
)
def test_max_pooling_on_a_cpu_keeps_where_in_its_window_each_is(chip, window, places):
    def pooled(x):
        shape, strides = (1, window, window, 1), (1, 2, 2, 1)
        y = jax.lax.reduce_window(jnp.exp(x), -jnp.inf, jax.lax.max, shape, strides, "SAME")
        return jnp.sum(y**2)

    graph = _build.trace(pooled, (struct(2, 16, 16, 4),), target(chip))
    (pool,) = [e for e in graph.equations if e.primitive == "reduce_window_max"]
    assert pool.made_bytes == places * 2 * 8 * 8 * 4
    assert bool(pool.keeps) == (chip != "cpu")


def test_what_is_no_loss_is_said():
    with pytest.raises(UserError, match="scalar"):
        traced(lambda x: x, struct(8))


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
