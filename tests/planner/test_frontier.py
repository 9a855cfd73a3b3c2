"""The frontier: its points, its objectives, its policies, and what is predicted of programs."""

import contextlib
import dataclasses
import io
import json
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import planner
import pytest
from interpreter import one_by_one
from jax.ad_checkpoint import print_saved_residuals
from pooled_network import pooled, pooled_args
from shapes import struct

import remat_kit
from remat_kit import UnknownNameError
from remat_kit._planner import frontier as _frontier
from remat_kit._planner.schedules import bounds as _bounds
from remat_kit._planner.schedules.mincut import Worth
from remat_kit._policy import schedule as _schedule


def mlp(ws, x):
    """A residual MLP."""
    for i, (up, down) in enumerate(ws):
        with jax.named_scope(f"block_{i}"):
            x = x + jnp.sin(jnp.tanh(x @ up)) @ down
    return jnp.mean(x**2)


def dropping(ws, x, key):
    """The same with dropout."""
    for i, (up, down) in enumerate(ws):
        h = jnp.tanh(x @ up)
        keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, h.shape)
        x = x + jnp.sin(jnp.where(keep, h / 0.9, 0.0)) @ down
    return jnp.mean(x**2)


LAYERS, BATCH = 8, 512
ARGS = ([(struct(16, 64), struct(64, 16))] * LAYERS, struct(BATCH, 16))


def values():
    keys = iter(jax.random.split(jax.random.key(1), 2 * LAYERS + 1))
    ws = [
        (jax.random.normal(next(keys), (16, 64)) / 4, jax.random.normal(next(keys), (64, 16)) / 8)
        for _ in range(LAYERS)
    ]
    return ws, jax.random.normal(next(keys), (BATCH, 16))


def scanned(ws, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(jnp.sin(x @ w)), None), x, ws)[0])


SCAN_ARGS = (struct(12, 32, 32), struct(256, 32))


@pytest.fixture(scope="module")
def front():
    return remat_kit.frontier(mlp, *ARGS)


def test_frontier_says_what_every_point_takes(front):
    plain = json.loads(json.dumps(front.to_json()))
    assert plain["equations"] > 30
    assert plain["planning_seconds"] > 0
    for point in plain["points"]:
        assert set(point) >= {
            *("predicted_peak_bytes", "saved_bytes", "extra_seconds", "extra_flops"),
            *("forward_flops", "bound_extra_seconds", "bound_extra_work", "gap"),
        }
        assert point["bound_extra_seconds"] == point["bound_extra_work"] <= point["extra_seconds"]
        assert point["gap"] >= 0
    # Memory against time, unless another objective is asked for.
    for extra in (
        [p["extra_seconds"] for p in plain["points"]],
        [p.extra_work for p in remat_kit.frontier(mlp, *ARGS, objective="balanced").points],
    ):
        assert extra == sorted(extra, reverse=True)
        assert extra[-1] == 0
    assert "extra FLOPs" in str(front)


_SLOW = [
    *(("gpt12", "cpu", 0.3, 0.3), ("gpt12", "h100", 0.3, 0.3), ("gpt72scan", "cpu", 0.3, 0.3)),
    *(("resnet50", "h100", 0.3, 0.4), ("resnet50", "cpu", 0.4, 0.4)),
    *(("resnet152", "cpu", 0.3, 0.3), ("nasnet", "cpu", 0.3, 0.3)),
]


@pytest.mark.parametrize(
    ("model", "chip", "objective", "least"),
    [
        ("gpt72scan", "h100", "time", 0.3),
        pytest.param("gpt72scan", "h100", "balanced", 0.3, marks=pytest.mark.slow),
        *(
            pytest.param(model, chip, objective, least, marks=pytest.mark.slow)
            for model, chip, *each in _SLOW
            for objective, least in zip(("time", "balanced"), each, strict=True)
        ),
    ],
)
def test_plans_of_real_models_are_near_the_bound(model, chip, objective, least):
    fn, args = planner.CASES[model].loss("none")
    front = remat_kit.frontier(fn, *args, target=chip, objective=objective)
    activations = front.plain.predicted_peak_bytes - front.argument_bytes
    worth = Worth.of_graph(front.graph, _frontier.OBJECTIVES[objective])
    bounds = _bounds.bounds(front.graph, worth)
    for p in front.points:
        assert bounds.work(p.cost.peak_bytes) <= p.extra_work * (1 + 1e-6)
        assert bounds.seconds(p.cost.peak_bytes) <= p.extra_seconds * (1 + 1e-6)

    def gap(budget):
        room = front.argument_bytes + budget * activations
        fitting = [p for p in front.points if p.predicted_peak_bytes <= room]
        return min(fitting, key=lambda p: p.extra_work).gap

    assert max(map(gap, np.arange(least, 1, 0.1))) <= 0.05
    # A little less memory costs little.
    assert gap(0.95) <= 0.015


@pytest.mark.slow
def test_objectives_spend_least_of_what_they_say():
    # Where a matrix product is fast, time says to recompute it and FLOPs to keep it.
    args = [(struct(512, 512), struct(512, 512))] * 4, struct(4096, 512)
    by_time, by_flops, both = (
        remat_kit.frontier(mlp, *args, target="v100-32g", objective=o)
        for o in ("time", "flops", "balanced")
    )
    for budget in (0.6, 0.7):
        peak = budget * both.plain.predicted_peak_bytes
        least = {
            front.objective: min(
                (p for p in front.points if p.predicted_peak_bytes <= peak),
                key=lambda p: p.extra_work,
            )
            for front in (by_time, by_flops, both)
        }
        assert least["time"].extra_seconds <= least["flops"].extra_seconds
        assert least["flops"].extra_flops <= least["time"].extra_flops
        for other in ("time", "flops"):
            share = _frontier.OBJECTIVES["balanced"]
            mean = (1 - share) * least[other].extra_seconds / both.forward_seconds
            mean += share * least[other].extra_flops_fraction
            assert least["balanced"].extra_work / both.forward_seconds <= mean * 1.02
    with pytest.raises(UnknownNameError, match="did you mean"):
        remat_kit.frontier(mlp, *ARGS, objective="flop")


@pytest.mark.parametrize(
    ("objective", "columns"),
    [
        ("time", ["extra FLOPs", "extra time", "bound"]),
        ("flops", ["extra time", "extra FLOPs", "bound"]),
        ("balanced", ["extra FLOPs", "extra time", "extra work", "bound"]),
    ],
)
def test_the_gap_is_that_of_the_objective(objective, columns):
    found = remat_kit.frontier(mlp, *ARGS, target="h100", objective=objective)
    bounds = _bounds.bounds(
        found.graph, Worth.of_graph(found.graph, _frontier.OBJECTIVES[objective])
    )
    forward = found.forward_seconds
    for p in found.points:
        held = p.predicted_peak_bytes - found.argument_bytes
        assert p.bound_extra_work == pytest.approx(min(bounds.work(held), p.extra_work), abs=1e-15)
        assert bounds.work(held) <= p.extra_work * (1 + 1e-6) + 1e-15
        assert p.bound_extra_seconds <= p.extra_seconds
        assert p.gap == pytest.approx((p.extra_work - p.bound_extra_work) / forward, abs=1e-9)
    assert max(p.bound_extra_work for p in found.points) > 0
    table = found.table()
    assert list(table.columns[2:]) == columns
    place = max(range(len(found.points)), key=lambda k: found.points[k].bound_extra_work)
    share = 100 * found.points[place].bound_extra_work / forward
    assert table.rows[place][-1] == f"+{share:.1f} %"
    assert ("three parts FLOPs" in table.title) == (objective == "balanced")


def test_without_flops_every_objective_is_time():
    def moved(x):
        for _ in range(4):
            x = jnp.concatenate([x[1:], jax.lax.stop_gradient(x[:1])])
        return x[0]

    found = remat_kit.frontier(moved, struct(64), objective="flops")
    assert found.plain.forward_flops == 0
    assert found.table().columns[2:] == ("extra FLOPs", "extra time", "bound")


def test_the_gap_of_an_estimate_is_between_its_figures():
    """Also where parts run in pieces, which every schedule computes again."""
    args = struct(64, 64), struct(4096, 64)

    def loss(w, x):
        with jax.named_scope("first"):
            y = jnp.tanh(x @ w)
        return jnp.mean(jnp.tanh(y @ w) @ w)

    lean = remat_kit.policy(remat_kit.pieces(8))(loss)
    for fn, checkpoints in ((loss, ["first"]), (lean, [])):
        point = remat_kit.estimate(fn, *args, checkpoints=checkpoints)
        forward = remat_kit.frontier(fn, *args).forward_seconds
        assert point.bound_extra_work == point.bound_extra_seconds <= point.extra_work
        assert point.gap == pytest.approx(
            (point.extra_work - point.bound_extra_work) / forward, abs=1e-9
        )


def test_frontier_can_be_drawn(front, tmp_path):
    pytest.importorskip("matplotlib")
    front.to_png(tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes()[:4] == b"\x89PNG"
    front.to_html(tmp_path / "f.html")
    assert "<svg" in (tmp_path / "f.html").read_text()


@pytest.mark.parametrize("fn", [mlp, dropping])
def test_gradients_are_those_of_the_function_at_every_budget(fn):
    args = (*values(), jax.random.key(7))[: 2 if fn is mlp else 3]
    found = remat_kit.frontier(fn, *args)
    want = one_by_one(jax.value_and_grad(fn, (0, 1)), *args)
    for point in found.points[:: max(1, len(found.points) // 3)]:
        planned = _frontier.policy_of(found.graph, point.schedule)
        got = one_by_one(jax.value_and_grad(remat_kit.policy(planned)(fn), (0, 1)), *args)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_blocks_that_are_treated_alike_share_a_line():
    front = remat_kit.frontier(mlp, *ARGS)
    blocks = remat_kit.estimate(mlp, *ARGS, checkpoints=["block_*"])
    first, *_ = _frontier.policy_of(front.graph, blocks.schedule).lines
    assert first == f"{LAYERS} times (0:5)"
    for point in (blocks, *front.points):
        policy = _frontier.policy_of(front.graph, point.schedule)
        found = [s for line in policy.lines for s in _schedule.parse(line)]
        assert [(s.start, s.stop) for s in found] == [(s.start, s.stop) for s in point.schedule]
        assert _schedule.lines(found) == policy.lines
        for read, segment in zip(found, point.schedule, strict=True):
            kept = {front.graph.equations[e].makes[p] for e, p in read.save}
            assert kept == segment.save


def test_plans_go_through_scans():
    found = remat_kit.frontier(scanned, *SCAN_ARGS)
    assert found.points[0].predicted_peak_bytes < 0.6 * found.points[-1].predicted_peak_bytes
    plan = remat_kit.plan(scanned, *SCAN_ARGS, budget="min")
    assert any("loop" in line for line in plan.lines)
    assert plan.compiled.temp_bytes < plan.baseline.temp_bytes
    key = jax.random.key(3)
    args = jax.random.normal(key, (12, 32, 32)) / 6, jax.random.normal(key, (256, 32))
    want = one_by_one(jax.grad(scanned), *args)
    for point in found.points[:: max(1, len(found.points) // 4)]:
        planned = _frontier.policy_of(found.graph, point.schedule)
        got = one_by_one(jax.grad(remat_kit.policy(planned)(scanned)), *args)
        np.testing.assert_array_equal(got, want)


def two_products(ws, x):
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]), None), x, ws)
    return jnp.mean(jnp.tanh(x) ** 2)


@pytest.mark.parametrize("batch", [300, 2048])
def test_scans_are_predicted_before_any_compile(batch):
    """With activations that take as much as the stacks of gradients, and much more."""
    args = (struct(24, 256, 512), struct(24, 512, 256)), struct(batch, 256)
    found = remat_kit.frontier(two_products, *args)
    parted = [p for p in found.points if len(parts_of(p)) > 1]
    # Ranges of iterations have stacks of their own, which are to pay.
    assert bool(parted) == (batch > 1000)
    for point in {id(p): p for p in (*found.points[1::12], *parted[:1], *parted[-1:])}.values():
        fn = remat_kit.policy(found.policy(point))(two_products)
        compiled = remat_kit.measure(fn, *args, argnums=0)
        assert point.predicted_peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.05)


def parts_of(point):
    """The ranges of iterations that a scan's plan treats in different ways."""
    (plan,) = [plan for s in point.schedule for _, plan in s.loops]
    return plan


def test_no_schedule_offloads_more_than_the_host_has():
    chip = remat_kit.target("tpu-v5e")
    room = 48 * 2**30
    assert chip.host_memory_bytes == room
    args = struct(12, 16384, 16384), struct(65536, 16384)  # products that cost more than a transfer
    endless = dataclasses.replace(chip, host_memory_bytes=None)
    free = remat_kit.frontier(scanned, *args, target=endless, offload=True)
    assert max(p.host_bytes for p in free.points) > room
    with pytest.warns(remat_kit.RematKitWarning, match="the host has 48 GiB for each device"):
        found = remat_kit.frontier(scanned, *args, target=chip, offload=True)
    assert 0 < max(p.host_bytes for p in found.points) <= room
    assert found.points[-1].extra_work == 0.0


@pytest.mark.parametrize("chip", ["v100-32g", "h100"])
def test_a_choice_to_offload_is_never_worse(chip):
    here = remat_kit.frontier(scanned, *SCAN_ARGS, target=chip)
    found = remat_kit.frontier(scanned, *SCAN_ARGS, target=chip, offload=True)
    for p in here.points:
        least = min(
            (q.extra_work for q in found.points if q.cost.peak_bytes <= p.cost.peak_bytes),
            default=math.inf,
        )
        assert least <= p.extra_work * (1 + 1e-9)


def test_scans_keep_what_they_hold_on_the_host():
    here = remat_kit.frontier(scanned, *SCAN_ARGS, target="h100")
    found = remat_kit.frontier(scanned, *SCAN_ARGS, target="h100", offload=True)
    assert all(p.host_bytes == 0 for p in here.points)
    moved = [p for p in found.points if p.host_bytes]
    assert moved
    least = min(here.points, key=lambda p: p.predicted_peak_bytes)
    assert found.points[0].predicted_peak_bytes < least.predicted_peak_bytes
    assert "on the host" in str(found)
    assert "on the host" not in str(here)
    lines = [str(line) for p in moved for line in found.policy(p).lines]
    assert any("offload in." in line for line in lines)
    for line in lines:
        assert _schedule.lines(_schedule.parse(line)) == (line,)
    key = jax.random.key(3)
    args = jax.random.normal(key, (12, 32, 32)) / 6, jax.random.normal(key, (256, 32))
    want = one_by_one(jax.grad(scanned), *args)
    for point in (moved[0], moved[-1]):
        lean = remat_kit.policy(found.policy(point))(scanned)
        np.testing.assert_array_equal(one_by_one(jax.grad(lean), *args), want)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            print_saved_residuals(lean, *args)
        assert "<host>[" in out.getvalue()


def test_opaque_operations_are_planned_around():
    @jax.custom_vjp
    def own(x):
        return jnp.sin(x)

    own.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, g: (2 * g * c,))

    def loss(w, x):
        for _ in range(4):
            x = own(jnp.tanh(x @ w))
            x = jax.lax.fori_loop(0, 3, lambda _, y: y * 1.01, x)
        x = jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
        return jnp.sum(x)

    key = jax.random.key(5)
    args = jax.random.normal(key, (32, 32)) / 6, jax.random.normal(key, (128, 32))
    found = remat_kit.frontier(loss, *args)
    # One operation at a time, since fusions round in another way. JAX swaps the operands of a
    # matrix product in the backward pass of a region, and on some processors that rounds in another
    # way too, so the reference is a region of JAX's own.
    want = jax.grad(jax.checkpoint(loss))(*args)
    for point in found.points[:: max(1, len(found.points) // 2)]:
        planned = _frontier.policy_of(found.graph, point.schedule)
        got = jax.grad(remat_kit.policy(planned)(loss))(*args)
        # jax 0.10 compiles a region's backward pass as one program, whose fusions round.
        ulps = 0 if jax.__version_info__ >= (0, 11) else 2
        largest = np.abs(want).max()
        np.testing.assert_allclose(got, want, rtol=0, atol=ulps * np.spacing(largest))


def test_estimate_takes_names_and_modules():
    def tower(ws, x):
        for i, w in enumerate(ws):
            with jax.named_scope(f"layer_{i}"):
                x = remat_kit.name(jnp.tanh(x @ w), f"out_{i}")
        return jnp.mean(x)

    args = [struct(32, 32)] * 6, struct(1024, 32)
    one = remat_kit.estimate(tower, *args, checkpoints=["out_2"])
    all_ = remat_kit.estimate(tower, *args, checkpoints=["layer_*"])
    assert one.extra_flops < all_.extra_flops
    assert all_.saved_bytes == 5 * 1024 * 32 * 4  # the mean does not need the last
    with pytest.raises(UnknownNameError, match="out_3"):
        remat_kit.estimate(tower, *args, checkpoints=["out_33"])


@pytest.mark.slow
def test_plans_of_pooled_networks_compose():
    weights, x = pooled_args()
    one = jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
    front = remat_kit.frontier(pooled, weights, one)
    planned = remat_kit.policy(front.policy(front.points[0]))(pooled)

    def all_of(f):
        def twice(w):
            return sum(jnp.vdot(g, g) for g in jax.grad(f)(w, x[:1]))

        return (
            jax.vmap(jax.value_and_grad(f), (None, 0))(weights, x[:, None]),
            jax.jvp(lambda w: f(w, x[:1]), (weights,), (weights,)),
            jax.grad(twice)(weights),
        )

    for found, wanted in zip(all_of(planned), all_of(pooled), strict=True):
        chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-7)
    found, wanted = (one_by_one(jax.grad(f), weights, x[:1]) for f in (planned, pooled))
    chex.assert_trees_all_equal(found, wanted)
    # As a user compiles.
    fully = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    found, wanted = (
        jax.jit(jax.grad(f), compiler_options=fully)(weights, x[:1]) for f in (planned, pooled)
    )
    for one, other in zip(found, wanted, strict=True):
        assert jnp.abs(one - other).max() <= 4 * jnp.finfo(one.dtype).eps * jnp.abs(other).max()
