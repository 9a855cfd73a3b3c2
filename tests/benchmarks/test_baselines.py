"""The published ways to choose checkpoints, each against what is known of it."""

import doctest
import itertools
import json
import math
import random

import _common
import baselines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from baselines import Dag, optimal_checkpoints, steps_run_again
from zoo import load

import remat_kit
from remat_kit._chip.target import target
from remat_kit._inspect import residuals as _residuals
from remat_kit._planner.costs import build as _build
from remat_kit._planner.costs import simulate as _simulate
from remat_kit._planner.costs.simulate import simulate
from remat_kit._policy.schedule import Segment

CHIP = target("cpu")
WIDTH, BATCH = 8, 32
ARRAY = 4 * WIDTH * BATCH


def chain(depth):
    """Equal layers with one array between them, which is also what each derivative needs.

    The gradient is that of the input, so that none of a parameter takes memory.
    """

    def loss(ws, x):
        for i in range(depth):
            with jax.named_scope(f"block_{i}"):
                x = jnp.exp(x @ ws[i])
        return jnp.sum(x)

    w, x = (jax.ShapeDtypeStruct((n, WIDTH), jnp.float32) for n in (WIDTH, BATCH))
    return _build.trace(loss, ([w] * depth, x), CHIP, argnums=1)


@pytest.fixture(scope="module")
def stack():
    """A small residual MLP: (loss, args, graph, pattern of its blocks)."""
    module = load("residual_mlp")
    fn, args = module.build(batch=16, width=8, layers=6)
    return fn, args, _build.trace(fn, args, CHIP), module.BLOCKS


# -- Chen et al. ------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [16, 36, 64])
def test_chen_takes_about_the_root(depth):
    graph = chain(depth)
    schedule = baselines.chen(graph)
    found = simulate(graph, schedule)
    assert 0.5 * math.sqrt(depth) <= len(schedule) <= 2 * math.sqrt(depth)
    # The checkpoints, the arrays of one segment, and what the operation at hand needs.
    assert found.peak_bytes <= (2 * math.sqrt(2 * depth) + 4) * ARRAY
    assert graph.forward_flops * 0.5 <= found.extra_flops <= graph.forward_flops


def test_chen_grows_as_the_root():
    peaks = [simulate(g, baselines.chen(g)).peak_bytes for g in (chain(16), chain(64))]
    assert peaks[1] / peaks[0] == pytest.approx(2, rel=0.2)
    none = [simulate(g, baselines.plain(g)).peak_bytes for g in (chain(16), chain(64))]
    assert none[1] / none[0] == pytest.approx(4, rel=0.1)


def test_a_larger_budget_makes_fewer_segments():
    graph = chain(64)
    counts = [len(baselines.chen(graph, scale)) for scale in (0.25, 1.0, 4.0)]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == 3


# -- Feng and Huang ---------------------------------------------------------------------------


def neighbours(dag):
    behind = [set() for _ in dag.costs]
    for v, before in enumerate(dag.before):
        for u in before:
            behind[u].add(v)
    return behind


def parts_of(dag, kept):
    """The parts that checkpoints leave, or None if one has more than one way in or out."""
    free = [v for v in range(1, len(dag.costs) - 1) if v not in kept]
    behind = neighbours(dag)
    parts, todo = [], set(free)
    while todo:
        part, queue = set(), [todo.pop()]
        while queue:
            v = queue.pop()
            part.add(v)
            near = (dag.before[v] | behind[v]) & todo
            todo -= near
            queue += near
        ways_in = {u for v in part for u in dag.before[v]} - part
        ways_out = {w for v in part for w in behind[v]} - part
        if len(ways_in) > 1 or len(ways_out) > 1:
            return None
        parts.append(part)
    return parts


def brute_force(dag):
    """The least of the checkpoints and the largest part, over all sets of checkpoints."""
    inner = range(1, len(dag.costs) - 1)
    best = math.inf
    for n in range(len(inner) + 1):
        for kept in itertools.combinations(inner, n):
            parts = parts_of(dag, set(kept))
            if parts is not None:
                largest = max((sum(dag.rebuilt[v] for v in p) for p in parts), default=0)
                best = min(best, sum(dag.costs[v] for v in kept) + largest)
    return best


def series_parallel(seed, size):
    """A graph made by putting vertices into edges and edges beside edges."""
    rng = random.Random(seed)
    edges = [("s", "t")]
    for n in range(size):
        a, b = edge = rng.choice(edges)
        if rng.random() < 0.6 or n == 0:
            edges.remove(edge)
        edges += [(a, n), (n, b)]
    return ordered(edges, rng)


def any_graph(seed, size):
    rng = random.Random(seed)
    edges = []
    for b in range(1, size):
        edges += [(a, b) for a in range(b) if rng.random() < 0.35] or [(b - 1, b)]
    sources = set(range(size)) - {b for _, b in edges}
    sinks = set(range(size)) - {a for a, _ in edges}
    return ordered([*edges, *(("s", v) for v in sources), *((v, "t") for v in sinks)], rng)


def ordered(edges, rng):
    before = {}
    for a, b in edges:
        before.setdefault(a, set())
        before.setdefault(b, set()).add(a)
    order = []
    while len(order) < len(before):
        order += sorted(
            (v for v in before if v not in order and before[v] <= set(order) and v != "t"), key=str
        ) or ["t"]
    place = {v: i for i, v in enumerate(order)}
    costs = [0, *(rng.randint(1, 9) for _ in order[2:]), 0]
    rebuilt = [0, *(rng.randint(0, 9) for _ in order[2:]), 0]
    arrows = tuple(frozenset(place[u] for u in before[v]) for v in order)
    return Dag(tuple(costs), arrows, tuple(rebuilt))


def check_checkpoints(dag, found):
    """What was found is what it says."""
    parts = parts_of(dag, found.checkpoints)
    assert parts is not None
    largest = max((sum(dag.rebuilt[v] for v in p) for p in parts), default=0)
    assert found.cost == sum(dag.costs[v] for v in found.checkpoints) + largest
    assert {v for p in parts for v in p} == {v for p in found.parts for v in p}


@pytest.mark.parametrize("seed", range(8))
def test_ogc_is_the_optimum_of_a_chain(seed):
    rng = random.Random(seed)
    costs = (0, *(rng.randint(1, 9) for _ in range(9)), 0)
    rebuilt = (0, *(rng.randint(0, 9) for _ in range(9)), 0)
    dag = Dag(costs, tuple(frozenset({v - 1} - {-1}) for v in range(11)), rebuilt)
    found = optimal_checkpoints(dag)
    check_checkpoints(dag, found)
    assert found.cost == brute_force(dag)


@pytest.mark.parametrize("seed", range(30))
def test_ogc_is_the_optimum_of_branches(seed):
    dag = series_parallel(seed, 4 + seed % 6)
    found = optimal_checkpoints(dag)
    check_checkpoints(dag, found)
    assert found.cost == brute_force(dag)


@pytest.mark.parametrize("seed", range(30))
def test_ogc_of_any_graph_holds_what_it_says(seed):
    dag = any_graph(seed, 4 + seed % 6)
    found = optimal_checkpoints(dag)
    check_checkpoints(dag, found)
    # A set that neither splits nor branches is divided in one way alone.
    assert brute_force(dag) <= found.cost <= min(sum(dag.costs), sum(dag.rebuilt))


def test_ogc_with_few_tries_is_near():
    rng = random.Random(0)
    costs = (0, *(rng.randint(1, 99) for _ in range(60)), 0)
    dag = Dag(costs, tuple(frozenset({v - 1} - {-1}) for v in range(62)), costs)
    best = optimal_checkpoints(dag, tries=10_000).cost
    assert best <= optimal_checkpoints(dag, tries=20).cost <= 1.1 * best


def test_ogc_on_a_program():
    graph = chain(36)
    schedule = baselines.ogc(graph)
    found = simulate(graph, schedule)
    # Two checkpoint-sized arrays for each layer, of which the derivative needs one.
    assert found.peak_bytes <= (2 * math.sqrt(36) + 4) * ARRAY
    assert found.peak_bytes <= simulate(graph, baselines.chen(graph)).peak_bytes * 1.2


def test_the_activations_of_a_program(stack):
    _, _, graph, _ = stack
    dag, equations = baselines.dag_of(graph)
    assert equations[1:-1] == sorted(set(equations[1:-1]))
    assert all(max(before) < v for v, before in enumerate(dag.before) if v)
    assert sum(dag.rebuilt) <= sum(dag.costs)
    assert sum(dag.rebuilt) == pytest.approx(
        sum(baselines._bytes(graph, t) for t in graph.residuals), rel=0.05
    )


def test_concatenations_are_appended_to():
    def loss(ws, x):
        parts = [x @ ws[0]]
        for w in ws[1:]:
            joined = jnp.concatenate(parts, 1)
            parts.append(jnp.exp(joined[:, -16:] @ w))
        return jnp.sum(jnp.exp(jnp.concatenate(parts, 1)))

    shape = jax.ShapeDtypeStruct
    args = [shape((16, 16), jnp.float32)] * 6, shape((32, 16), jnp.float32)
    graph = _build.trace(loss, args, CHIP)
    dag, equations = baselines.dag_of(graph)
    joins = [
        v
        for v, i in enumerate(equations[:-1])
        if v and graph.equations[i].primitive == "concatenate"
    ]
    assert len(joins) == 5
    for before, after in itertools.pairwise(joins):
        assert before in dag.before[after]
        assert len(dag.before[after]) <= 2


# -- Griewank and Walther ---------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
def test_binomial_runs_as_few_steps_as_the_theorem(slots):
    for length in range(2, 40):
        # With r the least number such that C(slots + r, slots) >= length.
        r = next(r for r in itertools.count() if math.comb(slots + r, slots) >= length)
        assert steps_run_again(length, slots) == r * length - math.comb(slots + r, r - 1)


@pytest.mark.parametrize(("depth", "slots"), [(10, 2), (10, 3), (21, 2), (21, 5), (16, 16)])
def test_binomial_on_a_program(depth, slots):
    graph = chain(depth)
    steps = baselines.block_steps(graph, "block_*")
    assert len(steps) == depth
    schedule = baselines.binomial(graph, steps, slots)
    found = simulate(graph, schedule)
    step = sum(e.flops for e in graph.equations[slice(*steps[0])])
    tail = 0 if schedule[-1].plain else sum(e.flops for e in graph.equations[slice(*steps[-1])])
    assert found.extra_flops == steps_run_again(depth, slots) * step + tail
    # The input is an argument; the last step keeps its own input and its residual.
    assert found.saved_bytes <= (slots + 1) * ARRAY
    assert found.peak_bytes <= (slots + 4) * ARRAY


def test_too_few_slots_reverse_nothing():
    graph = chain(4)
    assert baselines.binomial(graph, baselines.block_steps(graph, "block_*"), 0) is None


def test_without_blocks_the_chain_is_cut_at_single_arrays():
    graph = chain(12)
    steps = baselines.chain_steps(graph)
    assert [a for a, _ in steps] + [steps[-1][1]] == sorted({*itertools.chain(*steps)})
    assert (steps[0][0], steps[-1][1]) == (0, len(graph.equations))
    assert 12 <= len(steps) <= 2 * 12 + 1


# -- blocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["nothing", "dots"])
def test_presets_keep_what_jax_keeps(stack, policy):
    fn, args, graph, at = stack
    found = simulate(graph, baselines.preset(graph, at, policy))
    loss = remat_kit.policy(policy, at=at)(fn)
    kept = _residuals.saved_residuals(loss, args)
    assert found.saved_bytes == pytest.approx(
        sum(r.bytes for r in kept if not r.is_input), rel=0.05
    )
    report = remat_kit.inspect(loss, *args)
    assert found.extra_flops / graph.forward_flops == pytest.approx(
        report.recomputed_flops / report.forward_flops, abs=0.05
    )


def test_blocks_are_found_by_path(stack):
    _, _, graph, at = stack
    found = baselines.block_ranges(graph, at)
    assert len(found) == 6
    assert all(a < b <= c for (a, b), (c, _) in itertools.pairwise(found))
    assert baselines.preset(graph, "*/elsewhere_*", "dots") is None


# -- PyTorch's budget -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_the_knapsack_is_filled(seed):
    rng = np.random.default_rng(seed)
    sizes, values = rng.integers(1, 50, 10), rng.random(10)
    room = int(sizes.sum() * 0.4)
    chosen = baselines._fill(sizes.tolist(), values.tolist(), room)
    assert sizes[chosen].sum() <= room
    best = max(
        values[list(items)].sum()
        for n in range(11)
        for items in itertools.combinations(range(10), n)
        if sizes[list(items)].sum() <= room
    )
    assert values[chosen].sum() == pytest.approx(best)


def small_loss(w, v, x):
    y = jnp.tanh(x @ w)
    z = jnp.exp(jnp.sin(y[:, :4]) @ v)
    return jnp.sum(jnp.sin(z) * jnp.cos(z)) + jnp.sum(jnp.sin(y))


def test_the_cut_is_the_cheapest():
    shapes = [(16, 16), (4, 4), (8, 16)]
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    graph = _build.trace(small_loss, args, CHIP)
    dots = {e.index for e in graph.equations if e.primitive == "dot_general"}
    needed = baselines.closure_of(graph)
    made = [t for i in needed for t in graph.equations[i].makes]

    def runs_again(kept):
        whole = Segment(0, len(graph.equations), save=frozenset(kept))
        wanted = {t for e in graph.equations for t in e.needs}
        return _simulate.closure(graph, wanted, whole.save, 0, len(graph.equations)).again

    for once in ((), dots, {min(dots)}):
        cut = baselines.cheapest_cut(graph, once)
        assert dots.isdisjoint(runs_again(cut)) or once != dots
        assert not set(once) & set(runs_again(cut))
        best = min(
            sum(graph.tensors[t].bytes for t in kept)
            for n in range(4)
            for kept in itertools.combinations(made, n)
            if not set(once) & set(runs_again(kept))
        )
        assert sum(graph.tensors[t].bytes for t in cut) == best


def test_a_budget_bounds_what_is_kept(stack):
    _, _, graph, _ = stack
    found = [simulate(graph, baselines.knapsack(graph, b)) for b in baselines.BUDGETS]
    full = found[-1].saved_bytes
    assert found[0].saved_bytes == 0
    for budget, point in zip(baselines.BUDGETS, found, strict=True):
        assert point.saved_bytes <= budget * full * 1.01
    seconds = [point.extra_seconds for point in found]
    assert seconds[-1] < seconds[5] < seconds[0]
    dots = sum(e.flops for e in graph.equations if e.primitive == "dot_general")
    assert found[-1].extra_flops <= graph.forward_flops - dots


# -- all of them ------------------------------------------------------------------------------


def test_points_of_a_program(stack):
    _, _, graph, at = stack
    found = {point.name: point for point in baselines.points(graph, at)}
    none = found["none"].simulated
    assert none.saved_bytes == graph.saved_bytes
    assert none.extra_flops == 0
    assert {"chen", "ogc", "binomial 2", "block nothing", "block dots", "knapsack 0.5"} <= set(
        found
    )
    for point in found.values():
        assert point.schedule[0].start == 0
        assert point.schedule[-1].stop == len(graph.equations)
        assert all(a.stop == b.start for a, b in itertools.pairwise(point.schedule))
        # One region around everything computes all of it again before it frees anything.
        assert point.simulated.peak_bytes <= none.peak_bytes or "knapsack" in point.name


def test_points_of_a_scan():
    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.sin(jnp.tanh(x @ w)), None

    def loss(ws, x):
        return jnp.sum(jax.lax.scan(layer, x, ws)[0])

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 8, 8), (32, 8))]
    graph = _build.trace(loss, args, CHIP)
    found = {point.name: point.simulated for point in baselines.points(graph, "layer")}
    assert found["none"].saved_bytes >= 2 * 64 * ARRAY
    assert found["block nothing"].saved_bytes == 64 * ARRAY
    assert found["chen"].peak_bytes < found["block nothing"].peak_bytes
    assert found["ogc"].peak_bytes < found["block nothing"].peak_bytes
    (scan,) = [e for e in graph.equations if e.loop]
    assert 4 <= baselines._ogc_group(scan) <= 8  # the root of 64 layers, of two or three arrays
    assert found["ogc"].extra_flops == pytest.approx(scan.flops)


@pytest.mark.slow
def test_baselines_table(capsys, tmp_path):
    path = tmp_path / "baselines.json"
    assert baselines.main(["--smoke", "--chip", "cpu", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert path.with_suffix(".md").read_text() == out
    report = json.loads(path.read_text())
    assert baselines.rendered(report) + "\n" == out
    points = [_common.unpacked(row["points"]) for row in report["rows"]]
    names = [{point["name"] for point in row} for row in points]
    assert {"none", "chen", "ogc", "binomial 2", "block nothing"} <= names[0]
    assert {"none", "ogc", "block nothing"} <= names[1]
    assert doctest.testmod(baselines).failed == 0


@pytest.mark.slow  # pytest -m slow tests/benchmarks/test_baselines.py
@pytest.mark.parametrize("chip", ["cpu", "h100", "tpu-v5e"])
@pytest.mark.parametrize("name", list(baselines.CASES))
def test_no_baseline_beats_the_plans(name, chip):
    (row,) = baselines.rows([baselines.CASES[name]], chip)
    worse = {
        point["name"]: (point["work_fraction"], point["plan_work_fraction"])
        for point in _common.unpacked(row["points"])
        if point["plan_work_fraction"] is None
        or point["plan_work_fraction"] > point["work_fraction"] * 1.001 + 1e-9
    }
    assert not worse
