"""What a loop over pieces costs, by the model and by the compiler."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from zoo import load

from remat_kit import (
    UserError,
    _jax,
    estimate,
    inspect,
    measure,
    pieces,
    planned,
    policy,
    target,
)
from remat_kit._apply.divide import divided
from remat_kit._backend.interface import Backend
from remat_kit._planner.costs import build, simulate
from remat_kit._planner.costs import divided as _divided
from remat_kit._policy import schedule as _schedule
from remat_kit._policy.divisions import Division, lines
from remat_kit._policy.schedule import Segment
from remat_kit._program.pieces import Partial


def head(w, x, labels):
    logits = jax.nn.log_softmax(jnp.tanh(x) @ w)
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))


ARGS = (
    jax.ShapeDtypeStruct((64, 8192), jnp.float32),
    jax.ShapeDtypeStruct((2048, 64), jnp.float32),
    jax.ShapeDtypeStruct((2048,), jnp.int32),
)


def graph(count, axis=0, chip="cpu", args=ARGS):
    whole = build.trace(head, args, target(chip))
    (at,) = (e.index for e in whole.equations if e.primitive == "dot_general")
    division = Division(at, len(whole.equations), count, (at, 0), axis)
    found = divided(whole.program, [division])
    return whole, _divided.graph_of(whole, found, target(chip)), division


def struct(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def whole_segment(graph):
    return (Segment(0, len(graph.equations), plain=True),)


def loop_of(found):
    (at,) = found.divided.loops
    return found.equations[at]


def test_more_pieces_need_less_memory_and_no_less_time():
    costs = [loop_of(graph(k)[1]) for k in (2, 4, 8, 16)]
    for more, fewer in itertools.pairwise(costs):
        assert fewer.working_bytes < more.working_bytes
        assert fewer.transient_bytes < more.transient_bytes
        assert fewer.flops == pytest.approx(more.flops, rel=0.01)
        # The weights are read, and their gradient is added up, once for each piece.
        assert fewer.seconds >= more.seconds
        assert fewer.backward_seconds > more.backward_seconds
    logits = 2048 * 8192 * 4
    assert logits / 2 <= costs[0].transient_bytes <= 1.2 * logits


def test_the_loop_is_computed_again():
    whole, found, _ = graph(8)
    loop = loop_of(found)
    assert found.again_flops == loop.again_flops
    assert loop.flops == pytest.approx(whole.forward_flops, rel=0.05)
    # Of the loss itself, a sum, the derivative needs nothing.
    assert 0.98 * loop.flops < loop.again_flops < loop.flops


@pytest.mark.parametrize(
    "at",
    ["*/mlp", *(pytest.param(at, marks=pytest.mark.slow) for at in ("*/attn", "*/block_*", None))],
)
def test_estimate_prices_the_pieces_of_a_policy(at):
    """FLOPs as the report counts them, and bytes as the compiler needs them."""
    size = {"layers": 2, "width": 64, "heads": 4, "vocab": 4096, "seq": 128, "batch": 8}
    fn, args = load("gpt").build(**size)
    split = policy(pieces(8), at=at)(fn)
    point = estimate(split, *args, target="cpu")
    again = sum(r.flops for r in inspect(split, *args).recomputed)
    assert again > 0.05 * point.forward_flops
    assert point.extra_flops == pytest.approx(again, rel=1e-3)
    assert point.extra_seconds > 0
    # XLA:CPU of JAX 0.10.2 holds one more copy of these logits, with and without pieces.
    if _jax.JAX_VERSION >= (0, 11):
        memory = measure(split, *args, target="cpu", argnums=0)
        assert point.predicted_peak_bytes == pytest.approx(memory.peak_bytes, rel=0.2)


def test_estimate_prices_pieces_beside_checkpoints():
    fn, args = load("gpt").build(size="tiny")
    lean = policy(pieces(4), at="*/mlp")(fn)
    point, whole = (estimate(f, *args, checkpoints=["*/block_*"]) for f in (lean, fn))
    assert 0 < estimate(lean, *args).extra_flops < point.extra_flops
    # The derivative of the loop computes again what the region would compute again.
    assert point.extra_flops == pytest.approx(whole.extra_flops, rel=0.05)


def test_estimate_prices_pieces_inside_of_a_scan():
    found = []
    for scan in (False, True):
        fn, args = load("gpt").build(size="tiny", scan=scan)
        lean = policy(pieces(4), at="*/mlp")(fn)
        found.append(estimate(lean, *args).extra_flops)
    assert found[1] == pytest.approx(found[0], rel=0.02)


def test_estimate_without_checkpoints_or_pieces_is_refused():
    with pytest.raises(UserError, match="no checkpoint and no part in pieces"):
        estimate(head, *ARGS)


def test_prediction_and_compiler():
    for k in (4, 8):
        whole, found, division = graph(k)
        count = len(found.equations)
        plain = (Segment(0, count, plain=True),)
        lean = policy(
            planned(_schedule.describe(whole.program), *lines([division]), f"0:{count} plain")
        )(head)
        memory = measure(lean, *ARGS, target="cpu")
        predicted = simulate.simulate(found, plain).peak_bytes + memory.argument_bytes
        assert predicted == pytest.approx(memory.peak_bytes, rel=0.1)


def test_gradients_of_half_precision_are_added_up_beside_the_results(monkeypatch):
    half = tuple(x.update(dtype="bfloat16") if x.dtype == jnp.float32 else x for x in ARGS)

    def costs(args):
        found = loop_of(graph(8, args=args)[1])
        return found.working_bytes, found.backward_seconds

    narrow, wide = costs(half), costs(ARGS)
    monkeypatch.setattr(Partial, "dtype", lambda _, dtype: dtype)
    more = [a - b for a, b in zip(narrow, costs(half), strict=True)]
    weights = 64 * 8192
    assert more[0] == weights * 4
    assert more[1] == pytest.approx(8 * 3 * weights * 2 / target("cpu").bandwidth_bytes_per_second)
    assert costs(ARGS) == wide


@pytest.mark.parametrize(("images", "channels", "times"), [(64, 64, 2), (256, 128, 1), (32, 16, 8)])
def test_the_convolutions_of_a_piece_fill_tiles_on_tpus(images, channels, times):
    """In two pieces, of half of the images."""

    def chain(kernels, x):
        for kernel in kernels:
            numbers = "NHWC", "HWIO", "NHWC"
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        return x

    args = [struct((3, 3, channels, channels))] * 3, struct((images, 64, 64, channels))
    whole = build.trace(lambda *xs: jnp.sum(chain(*xs) ** 2), args, target("h100"))
    found = divided(whole.program, [Division(0, 3, 2, (0, 0), 0)])
    tpu, gpu = (
        loop_of(_divided.graph_of(whole, found, target(chip))) for chip in ("tpu-v5e", "h100")
    )
    piece = images // 2 * 64 * 64 * channels * 4
    assert gpu.working_bytes >= 2 * piece
    assert tpu.working_bytes == pytest.approx(times * gpu.working_bytes, rel=0.01)


def test_a_gpu_adds_up_the_gradients_of_kernels_beside_the_results(monkeypatch):
    def chain(kernels, x):
        for kernel in kernels:
            numbers = "NHWC", "HWIO", "NHWC"
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        return jnp.sum(x**2)

    def computed(kernels, x):
        return chain([jnp.sin(kernel) for kernel in kernels], x)

    def loop(chip, fn=chain):
        args = [struct((3, 3, 32, 32))] * 2, struct((8, 16, 16, 32))
        whole = build.trace(fn, args, target(chip))
        first = next(e.index for e in whole.equations if e.primitive == "conv_general_dilated")
        found = divided(whole.program, [Division(first, first + 2, 2, (first, 0), 0)])
        return loop_of(_divided.graph_of(whole, found, target(chip)))

    chips = "h100", "tpu-v5e", "cpu"
    found = [*(loop(chip) for chip in chips), loop("h100", computed)]
    monkeypatch.setattr(Backend, "summed_apart", lambda *_: False)
    without = [*(loop(chip) for chip in chips), loop("h100", computed)]
    more = [a.working_bytes - b.working_bytes for a, b in zip(found, without, strict=True)]
    # The gradient of a kernel that the program computes is no result.
    assert more == [2 * 9 * 32 * 32 * 4, 0, 0, 0]
    # Each sum is read and written once for each piece, wherever it lies.
    assert [e.backward_seconds for e in found] == [e.backward_seconds for e in without]


def test_a_loop_reads_constants_from_memory():
    """A causal mask, of which each head needs the whole, is an argument or computed."""

    def attention(q, k, mask):
        scores = jnp.einsum("hqd,hkd->hqk", q, k)
        return jnp.sum(jax.nn.softmax(jnp.where(mask, scores, -1e9)) ** 2)

    def causal(q, k):
        return attention(q, k, jnp.tril(jnp.ones((1, 256, 256), bool)))

    def loop(fn, *args):
        whole = build.trace(fn, args, target("tpu-v5e"))
        at = next(e.index for e in whole.equations if e.primitive == "dot_general")
        found = divided(whole.program, [Division(at, len(whole.equations), 4, (at, 0), 0)])
        return loop_of(_divided.graph_of(whole, found, target("tpu-v5e")))

    qk = [struct((8, 256, 64))] * 2
    given = loop(attention, *qk, jax.ShapeDtypeStruct((1, 256, 256), bool))
    computed = loop(causal, *qk)
    assert computed.working_bytes == given.working_bytes + 256 * 256
    assert computed.transient_bytes == given.transient_bytes + 256 * 256


def test_pieces_of_the_last_axis_are_not_proposed_for_a_softmax():
    with pytest.raises(Exception, match="cannot run in pieces"):
        graph(8, axis=1)


# -- programs over several devices ----------------------------------------------------------------


def head_of_batch(w, x, labels):
    logits = jax.nn.log_softmax(jnp.tanh(x) @ w)
    return -jnp.mean(jnp.take_along_axis(logits, labels[..., None], axis=-1))


COPIED, SHARDED = PartitionSpec(), PartitionSpec("data")


def graph_of_batch(batch, mesh=None, weights=COPIED):
    """The loss head of a batch, in 8 pieces of the sequence; on a mesh, its batch is split."""
    args = (
        jax.ShapeDtypeStruct((64, 8192), jnp.float32),
        jax.ShapeDtypeStruct((batch, 256, 64), jnp.float32),
        jax.ShapeDtypeStruct((batch, 256), jnp.int32),
    )
    if mesh is not None:
        specs = weights, SHARDED, SHARDED
        args = [a.update(sharding=NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
    whole = build.trace(head_of_batch, args, target("cpu"))
    (at,) = (e.index for e in whole.equations if e.primitive == "dot_general")
    division = Division(at, len(whole.equations), 8, (at, 0), 1)
    return whole, _divided.graph_of(whole, divided(whole.program, [division]), target("cpu"))


MESH = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))


def test_a_device_has_the_cost_of_its_part_of_the_batch():
    (_, alone), (_, split) = graph_of_batch(2), graph_of_batch(8, MESH)
    a, b = loop_of(alone), loop_of(split)
    for field in ("flops", "again_flops", "backward_flops", "seconds", "transient_bytes"):
        assert getattr(b, field) == pytest.approx(getattr(a, field), rel=0.02), field
    assert b.working_bytes == pytest.approx(a.working_bytes, rel=0.02)
    costs = [simulate.simulate(g, whole_segment(g)).peak_bytes for g in (alone, split)]
    assert costs[1] == pytest.approx(costs[0], rel=0.02)


def test_the_gradient_of_a_gathered_operand_is_added_up_as_a_whole():
    """The weights of fully sharded training; each device has a part of the sum of each entry."""
    _, copied = graph_of_batch(8, MESH)
    _, sharded = graph_of_batch(8, MESH, SHARDED)
    weights = 64 * 8192 * 4
    more = loop_of(sharded).working_bytes - loop_of(copied).working_bytes
    # The gathered weights, and three quarters of the sum over the pieces.
    assert weights <= more <= 2 * weights


def test_what_one_device_has_of_a_divided_program():
    whole, split = graph_of_batch(8, MESH)
    shards = split.partition.shards
    assert shards.inputs == whole.partition.shards.inputs
    assert len(shards.results) == len(split.program.eqns)
    for eqn, outs in zip(split.program.eqns, shards.results, strict=True):
        assert [len(v.aval.shape) for v in eqn.outvars] == [len(x.shape) for x in outs]


@pytest.mark.parametrize("batch", [8, 0])
def test_a_scan_inside_of_a_segment(batch):
    def loss(w, x):
        h = jnp.tanh(x @ w)
        h, _ = jax.lax.scan(lambda c, _: (0.5 * c + jnp.sin(h), None), h, None, length=3)
        return jnp.sum(h**2)

    def working(batch, mesh=None):
        args = [struct((16, 4096)), struct((batch, 256, 16))]
        if mesh is not None:
            specs = zip(args, (COPIED, SHARDED), strict=True)
            args = [a.update(sharding=NamedSharding(mesh, s)) for a, s in specs]
        whole = build.trace(loss, args, target("cpu"))
        division = Division(0, len(whole.equations), 8, (0, 0), 1)
        found = _divided.graph_of(whole, divided(whole.program, [division]), target("cpu"))
        return loop_of(found).working_bytes

    assert working(batch, MESH) == pytest.approx(working(batch // 4), rel=0.02)
