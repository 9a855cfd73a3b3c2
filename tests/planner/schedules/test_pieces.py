"""The planner chooses segments, axes and numbers of pieces."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from zoo import load

import remat_kit
from remat_kit import UserError, frontier, plan, policy, target
from remat_kit._backend.interface import Backend
from remat_kit._planner.costs import build
from remat_kit._planner.schedules import pieces
from remat_kit._planner.schedules.mincut import TIME
from remat_kit._policy.divisions import is_division

GPT = {"layers": 2, "width": 32, "heads": 4, "vocab": 2048, "seq": 128, "batch": 4}


@functools.cache
def gpt(**more):
    return load("gpt").build(**GPT, **more)


def norm(tree):
    return sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(tree)) ** 0.5


ONE_LAYER = {**GPT, "layers": 1}


@functools.cache
def one_layer():
    return load("gpt").build(**ONE_LAYER)


@functools.cache
def planned_least():
    fn, args = one_layer()
    return plan(fn, *args, target="cpu", budget="min", pieces=True, compiles=1)


@functools.cache
def found(**more):
    fn, args = gpt(**more)
    return [
        frontier(fn, *args, target="cpu", objective="balanced", pieces=on) for on in (False, True)
    ]


def test_variants_divide_the_largest_arrays_first_and_equal_blocks_alike():
    fn, args = gpt()
    graph = build.trace(fn, args, target("cpu"))
    some = [v.divided.divisions for v in pieces.variants(graph, target("cpu"))]
    assert len(some[0]) == 1  # the loss head
    (last,) = some[0]
    assert graph.program.eqns[last.of[0]].outvars[0].aval.shape == (4, 128, 2048)
    for divisions in some:
        by_size = {}
        for d in divisions:
            shape = graph.program.eqns[d.of[0]].outvars[0].aval.shape
            by_size.setdefault(shape, set()).add((d.stop - d.start, d.pieces, d.axis))
        assert all(len(alike) == 1 for alike in by_size.values())
        counts = [
            sum(graph.program.eqns[d.of[0]].outvars[0].aval.shape == shape for d in divisions)
            for shape in by_size
        ]
        assert set(counts) <= {1, 2}
        assert all(a.stop <= b.start for a, b in itertools.pairwise(divisions))


def scan_between_products(params, x):
    """One segment from the first product to the loss has the scan inside, and so do its pieces."""
    scales, wide = params

    def step(carry, scale):
        z = jnp.sin(carry[:, :, None] * scale[None, None])
        return carry + jnp.mean(jnp.exp(z) * z, -1), None

    h = jnp.tanh(x @ wide)
    return jnp.mean(jnp.tanh(jax.lax.scan(step, jnp.exp(h) * h, scales)[0]) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "before", "after"),
    [
        ("tpu-v5e", (16, 8), (16, 16)),  # 64 and 128 images in a piece
        ("tpu-v5e", (4, 8, 16), (16, 16, 16)),
        ("tpu-v5e", (32, 16), (32, 16)),  # 32 and 64, stored alike
        ("tpu-v5e", (8, 4), (8, 4)),  # 128 and 256
        ("tpu-v5e", (64, 8), (64, 8)),  # the second cannot run in 64 pieces
        ("tpu-v5e", (16, None, 8), (16, None, 8)),  # a segment between them has no images
        ("h100", (16, 8), (16, 8)),
    ],
)
def test_segments_that_follow_each_other_store_their_images_alike(chip, before, after):
    cost = build.PieceCost(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def way(place, count):
        of_images = count is not None
        division = pieces.Division(place, place + 1, count or 2, (place, 0), 0)
        return pieces.PieceWay(division, cost, 1024 // count if of_images else 0)

    options = [
        pieces.Option(k, k + 1, tuple(way(k, count and n) for n in (2, 4, 8, 16, 32)))
        for k, count in enumerate(before)
    ]
    ways = [way(k, count) for k, count in enumerate(before)]
    found = pieces.in_equal_pieces(options, ways, Backend(target(chip).platform))
    assert tuple(w.division.pieces if w.images else None for w in found) == after


def test_the_images_of_convolutions_are_divided_alike_on_a_tpu():
    fn, args = load("alexnet").build(batch=1024)
    graph = build.trace(fn, args, target("tpu-v5e"))
    pairs = [
        (1024 // a.pieces, 1024 // b.pieces)
        for v in pieces.variants(graph, target("tpu-v5e"))
        for a, b in itertools.pairwise(v.divided.divisions)
        if a.stop == b.start and a.axis == b.axis == 0
    ]
    assert (64, 64) in pairs  # without the rule (64, 128)
    assert all((a < 128) == (b < 128) for a, b in pairs), pairs


def test_a_segment_with_a_scan_inside_leaves_the_body_of_the_scan_whole():
    shapes = (4, 8), (16, 512), (8, 16)
    scales, wide, x = (jax.random.normal(jax.random.key(0), shape) for shape in shapes)
    args = (scales * 0.01, wide * 0.1), x
    front = frontier(scan_between_products, *args, pieces=True)
    graph = build.trace(scan_between_products, args, target("cpu"))
    (scan,) = (e.index for e in graph.equations if e.loop)
    divided = [p for p in front.points if p.graph is not None]
    assert any(d.start <= scan < d.stop for p in divided for d in p.graph.divided.divisions)
    gradient = jax.grad(scan_between_products)(*args)
    for point in divided:
        found = jax.grad(policy(front.policy(point))(scan_between_products))(*args)
        difference = jax.tree.map(jnp.subtract, found, gradient)
        assert norm(difference) < 1e-6 * norm(gradient)


@pytest.mark.slow
def test_the_frontier_goes_on_below_the_least_without_pieces():
    without, with_pieces = found()
    least, lower = without.points[0], with_pieces.points[0]
    assert lower.graph is not None
    assert lower.predicted_peak_bytes < 0.5 * least.predicted_peak_bytes
    points = with_pieces.points
    for a, b in itertools.pairwise(points):
        assert a.predicted_peak_bytes < b.predicted_peak_bytes
        assert a.extra_work > b.extra_work
    # Without a budget, nothing runs in pieces.
    assert points[-1].extra_flops == 0
    assert points[-1].graph is None


@pytest.mark.slow
def test_no_budget_takes_more_work_with_pieces():
    without, with_pieces = found()
    for point in without.points:
        within = [
            p for p in with_pieces.points if p.predicted_peak_bytes <= point.predicted_peak_bytes
        ]
        best = min(within, key=lambda p: p.extra_work)
        assert best.extra_flops <= point.extra_flops * (1 + 1e-6)
        assert best.extra_seconds <= point.extra_seconds * (1 + 1e-6)


def test_the_default_has_no_pieces():
    without, _ = found()
    for point in (*without.points, *without.leaner):
        assert point.graph is None
        assert not any(map(is_division, without.policy(point).lines))


@pytest.mark.slow
def test_a_plan_is_compiled_applied_and_explained():
    fn, args = one_layer()
    lean = planned_least()
    without = frontier(fn, *args, target="cpu")
    assert lean.compiled_peak_bytes < 0.5 * without.points[0].predicted_peak_bytes
    assert any(map(is_division, lean.lines))
    text = str(lean.explain())
    assert "in pieces: " in text
    assert "of axis 1 of float32[4,128,2048]" in text
    assert any(m.pieces for m in lean.modules)
    values = load("gpt").build(**ONE_LAYER, materialize=True)[1]
    grads = [jax.grad(f)(*values) for f in (fn, policy(repr(lean.policy))(fn))]
    difference = jax.tree.map(jnp.subtract, *grads)
    assert norm(difference) < 1e-5 * norm(grads[0])


@pytest.mark.slow
def test_a_plan_is_saved_and_read(tmp_path):
    fn, args = one_layer()
    lean = planned_least()
    lean.save(tmp_path / "plan.toml")
    read = policy(str(tmp_path / "plan.toml"))(fn)
    expected = remat_kit.measure(policy(lean)(fn), *args, target="cpu")
    assert remat_kit.measure(read, *args, target="cpu").temp_bytes == expected.temp_bytes


@pytest.mark.slow
def test_layers_in_a_scan():
    without, with_pieces = found(scan=True)
    least = with_pieces.points[0]
    assert least.predicted_peak_bytes < 0.5 * without.points[0].predicted_peak_bytes
    assert any(d.loop for d in least.graph.divided.divisions)


@pytest.mark.slow
def test_a_step():
    fn, args = gpt()

    def step(params, tokens):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(fn)(params, tokens))

    lean = plan(jax.jit(step), *args, target="cpu", budget="min", pieces=True, compiles=2)
    assert lean.step
    assert any(map(is_division, lean.lines))
    assert lean.compiled_peak_bytes < 0.6 * lean.baseline.peak_bytes


def test_a_program_without_segments_to_divide():
    def small(w, x):
        return jnp.sum(jnp.sort(jnp.cumsum((x @ w).ravel())))

    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    graph = build.trace(small, args, target("cpu"))
    assert list(pieces.explored(graph, target("cpu"), TIME, 0.0, 0.0, lambda what: None)) == []
    both = [frontier(small, *args, pieces=on) for on in (False, True)]
    assert [len(f.points) for f in both] == [len(both[0].points)] * 2
    with pytest.warns(remat_kit.RematKitWarning, match="pieces=True has no effect"):
        plan(small, *args, budget="min", pieces=True)


@pytest.mark.slow
def test_a_batch_that_fits():
    def build(batch=8):
        w = jax.ShapeDtypeStruct((16, 4096), jnp.float32)
        x = jax.ShapeDtypeStruct((batch, 16), jnp.float32)
        return lambda w, x: jnp.mean(jax.nn.logsumexp(x @ w, axis=-1)), (w, x)

    how = {"target": "cpu@4MiB", "policy": "plan", "at_most": 1024}
    without, with_pieces = (remat_kit.max_batch(build, pieces=on, **how) for on in (False, True))
    assert with_pieces.batch > 2 * without.batch
    with pytest.raises(UserError, match="pieces=True"):
        remat_kit.max_batch(build, target="cpu@4MiB", pieces=True)
    cells = remat_kit.fit(
        build, batches=[without.batch * 2], policies=["plan"], targets=["cpu@4MiB"], pieces=True
    )
    assert [c.fits for c in cells.cells] == [False, True]


@pytest.mark.slow
def test_auto_with_pieces():
    fn, args = gpt()
    auto = remat_kit.auto("min", target="cpu", pieces=True)
    assert repr(auto) == "auto('min', target='cpu', pieces=True)"
    values = load("gpt").build(**GPT, materialize=True)[1]
    lean = remat_kit.policy(auto)(fn)
    memory = remat_kit.measure(lean, *args, target="cpu")
    assert memory.temp_bytes < 0.5 * remat_kit.measure(fn, *args, target="cpu").temp_bytes
    assert jnp.isfinite(jax.value_and_grad(lean)(*values)[0])


# -- without pieces: what they could do -----------------------------------------------------------

LOGITS = {"size": "tiny", "batch": 8, "layers": 1, "vocab": 20000}


def test_the_floor_is_the_largest_working_set():
    graph = build.trace(*load("gpt").build(**LOGITS), target("cpu"))
    least = pieces.floor(graph, target("cpu"))
    assert (least.module, least.array) == ("GPT/wte.attend", "float32[8,16,20000]")
    logits = 8 * 16 * 20000 * 4
    assert 2 * logits <= least.bytes <= 2.2 * logits  # with their cotangent
    assert least.way.cost.backward_bytes < least.bytes / 2
    # The search for variants begins with the same array.
    first = next(pieces.variants(graph, target("cpu")))
    assert least.way.division.of in {d.of for d in first.divided.divisions}


def test_no_floor_is_named_where_no_axis_can_be_divided():
    def loss(x):
        return jnp.sum(jnp.sin(jnp.cumsum(jnp.exp(x))))

    graph = build.trace(loss, (jax.ShapeDtypeStruct((4096,), jnp.float32),), target("cpu"))
    assert pieces.floor(graph, target("cpu")) is None


@pytest.mark.slow
def test_a_least_plan_and_an_error_without_pieces_name_the_floor():
    fn, args = load("gpt").build(**LOGITS)
    least = plan(fn, *args, budget="min", compiles=2)
    for text in (str(least), least.explain().text()):
        assert "GPT/wte.attend (`dot_general`, float32[8,16,20000])" in text
        assert "pieces=True (--pieces) may go below" in text
    with pytest.raises(UserError, match=r"GPT/wte\.attend.*pieces=True \(--pieces\) may go below"):
        plan(fn, *args, budget=least.compiled_peak_bytes * 2 // 3, compiles=2)
    in_pieces = plan(fn, *args, budget="min", pieces=True, compiles=2)
    assert in_pieces.compiled_peak_bytes < least.compiled_peak_bytes
    assert "may go below" not in str(in_pieces)
    assert least.baseline is not None
    if least.compiled_peak_bytes < least.baseline.peak_bytes:  # not with jax 0.10
        assert "may go below" not in str(plan(fn, *args, budget="fit", compiles=2))


def test_a_segment_does_not_begin_with_scores_in_half_precision():
    def loss(w, x):
        x = x @ w
        scores = jnp.einsum("bqd,bkd->bqk", x, x)
        weights = jax.nn.softmax(scores.astype("float32"), -1).astype("bfloat16")
        return jnp.sum(jnp.einsum("bqk,bkd->bqd", weights, x).astype("float32") ** 2)

    half = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16, 16), (2, 1024, 16))]
    graph = build.trace(loss, half, target("h100"))
    product = next(
        e.index
        for e in graph.equations
        if [graph.tensors[t].shape for t in e.makes] == [(2, 1024, 1024)]
    )
    (division, *_) = next(pieces.variants(graph, target("h100"))).divided.divisions
    assert division.start <= product < division.stop
    assert division.pieces > 2


# -- programs over several devices ----------------------------------------------------------------


def sharded(*specs):
    """A language model without blocks, and arguments that are split over eight devices."""
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def loss(table, tokens):
        logits = jax.nn.log_softmax(jnp.tanh(table[tokens]) @ table.T)
        return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], axis=-1))

    args = jax.ShapeDtypeStruct((4096, 32), "float32"), jax.ShapeDtypeStruct((8, 256), "int32")
    placed = (NamedSharding(mesh, spec) for spec in specs)
    return loss, [a.update(sharding=s) for a, s in zip(args, placed, strict=True)]


@pytest.mark.parametrize("table", [PartitionSpec(), PartitionSpec("data")], ids=str)
def test_a_partitioned_program_is_divided_along_an_axis_that_every_device_has(table):
    fn, args = sharded(table, PartitionSpec("data"))
    front = frontier(fn, *args, target="cpu:8", pieces=True)
    whole = front.whole.points[0]
    least = front.points[0]
    assert {d.axis for d in least.graph.divided.divisions} == {1}  # the batch is axis 0
    compiled = [
        remat_kit.measure(policy(front.policy(p))(fn), *args, target="cpu:8")
        for p in (least, whole)
    ]
    assert {memory.devices for memory in compiled} == {8}
    assert compiled[0].peak_bytes < 0.25 * compiled[1].peak_bytes


def test_an_axis_that_the_mesh_splits_is_not_divided():
    fn, args = sharded(PartitionSpec(), PartitionSpec("data", "model"))
    front = frontier(fn, *args, target="cpu:8", pieces=True)
    assert all(p.graph is None for p in front.points)
    with pytest.warns(remat_kit.RematKitWarning, match="axis that the mesh does not split"):
        plan(fn, *args, target="cpu:8", budget="fit", pieces=True, compiles=1)


def test_a_mesh_with_explicit_axes_is_refused():
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Explicit,))

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    w = jax.ShapeDtypeStruct((16, 4096), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    split = NamedSharding(mesh, PartitionSpec("data"))
    args = w, jax.ShapeDtypeStruct((1024, 16), "float32", sharding=split)
    with jax.sharding.use_abstract_mesh(mesh):
        assert frontier(loss, *args, target="cpu:8").points
        with pytest.raises(UserError, match="automatic axes only"):
            frontier(loss, *args, target="cpu:8", pieces=True)
