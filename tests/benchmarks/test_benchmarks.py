"""The benchmarks that read compiled programs back, at smoke size."""

import doctest
import json

import _common
import _slice
import gpt3_memory
import jax
import jax.numpy as jnp
import mindspore_graphs
import numpy as np
import peak_table
import pytest

import remat_kit
from remat_kit import primitive, recompute
from remat_kit._chip.compile import compile_program
from remat_kit._compiled.hlo import parse
from remat_kit._compiled.peak import anatomy

# -- the walk's peak and the compiler's ---------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", pytest.param("gpt", marks=pytest.mark.slow)])
def test_peak_table(model, capsys, tmp_path):
    path = tmp_path / "peaks.json"
    argv = ["--smoke", "--model", model, "--target", "cpu", "--json", str(path)]
    assert peak_table.main(argv) == 0
    out, err = capsys.readouterr()
    assert path.with_suffix(".md").read_text() == out
    report = json.loads(path.read_text())
    assert peak_table.rendered(report) + "\n" == out
    assert [row["policy"] for row in report["rows"]] == list(peak_table.POLICIES)
    raw = json.loads((tmp_path / "raw" / "peaks.json").read_text())["rows"]
    assert all(0 < len(row["peak"]["buffers"]) <= peak_table.LARGEST for row in raw)
    assert report["rows"] == _common.without(raw, "buffers")
    for row in report["rows"]:
        peak = row["peak"]
        assert peak["bytes"] + peak["packing_bytes"] == peak["compiler_bytes"] > 0
        assert peak["attributed_fraction"] > 0.95
        assert row["read_seconds"] > 0
        assert f"{peak['difference_percent']:+.2f} %" in err


def test_peak_table_asks_the_compiler_where_the_walk_is_far_off(monkeypatch):
    monkeypatch.setattr(peak_table, "ASK_BEYOND", -1.0)
    case = peak_table.Case("MLP", "mlp", {"batch": 64})
    row = next(peak_table.rows([case], ["cpu"]))
    peak, witness = row["peak"], row["witness"]
    assert witness["live_bytes"] == pytest.approx(peak["bytes"], rel=0.01)
    assert witness["live_bytes"] + witness["gap_bytes"] == pytest.approx(
        peak["compiler_bytes"], rel=0.01
    )


def test_peak_table_sums_up_what_is_far_off():
    peak = {
        "bytes": 9 * 2**20,
        "compiler_bytes": 10 * 2**20,
        "difference_percent": -10.0,
        "phase": "backward",
        "attributed_fraction": 1.0,
    }
    witness = {"live_bytes": 9 * 2**20, "gap_bytes": 2**20, "difference_percent": 0.0}
    row = {"target": "tpu-v5e", "model": "M", "policy": "dots", "peak": peak, "read_seconds": 1.0}
    row["witness"] = witness
    near = row | {"peak": peak | {"difference_percent": 0.9}, "witness": None, "policy": "none"}
    unfit = row | {"peak": None, "witness": None, "target": "h100"}
    (line,) = peak_table._summary([near, row, unfit])
    assert "1 of 2 within 5 %" in line
    assert "the furthest is -10.00 %, M, `dots`" in line
    assert "the furthest is +0.90 %, M, `none`" in line
    assert "| -10.00 % | 9.0 | +0.00 % | 1.0 |" in peak_table._cells(row)
    assert "+0.00 % of what its dump has alive" in peak_table._line(row)
    for text in (peak_table._cells(row), peak_table._cells(near), peak_table._cells(unfit)):
        assert text.count("|") == 13
    assert "does not fit" in peak_table._line(unfit)


def test_peak_table_says_what_is_wrong(capsys):
    assert peak_table.main(["--smoke", "--target", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        peak_table.main(["--smoke", "--model", "resnet"])
    assert "no model of mlp, gpt" in capsys.readouterr().err


# -- MindSpore's graphs ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mlp_diff():
    _, case, again = mindspore_graphs.CASES[0]
    plain, args = case.loss("none")
    after, _ = case.loss(recompute(primitive(again)))
    return remat_kit.diff(plain, after, *args)


def test_the_graph_of_the_mlp_before_and_after(mlp_diff):
    assert len(mlp_diff.duplicates) == 2
    duplicate = mlp_diff.duplicates[-1]
    before, after = mindspore_graphs.graphs(mlp_diff, duplicate)
    reader = duplicate.feeds[0].split()[1]
    # Before, the weight gradient reads the forward ReLU; after, the one that is computed again.
    assert (duplicate.twin, reader) in before.edges
    assert duplicate.id not in before.nodes
    assert (duplicate.id, reader) in after.edges
    assert (duplicate.twin, reader) not in after.edges
    assert [name for name, node in after.nodes.items() if node.duplicate] == [duplicate.id]
    assert set(after.nodes) == set(before.nodes) | {duplicate.id}
    phases = {name: node.phase for name, node in after.nodes.items()}
    assert (phases[duplicate.twin], phases[reader]) == ("forward", "backward")
    # The two read the same pre-activation.
    makers = {a for a, b in after.edges if b in (duplicate.id, duplicate.twin)}
    assert len(makers) == 1


def test_mindspore_graphs(capsys, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "graphs.json"
    argv = ["--smoke", "--out", str(tmp_path), "--json", str(path)]
    assert mindspore_graphs.main(argv) == 0
    assert "2 operations computed twice" in capsys.readouterr().out
    results = json.loads(path.read_text())["results"]
    for (name, _, again), found in zip(mindspore_graphs.SMOKE, results, strict=True):
        assert {d["primitive"] for d in found["duplicates"]} == {again}
        text = (tmp_path / f"{name}.txt").read_text()
        assert text.count("⟲") == len(found["duplicates"]) > 1
        assert "python benchmarks/mindspore_graphs.py --smoke" in text
        assert image.imread(tmp_path / "raw" / f"{name}.png").std() > 0.01
    with pytest.raises(SystemExit, match="2"):
        mindspore_graphs.main(["--out", str(tmp_path / "nowhere")])


# -- the memory of a training step ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("form", ["unrolled", "scan", "slice"])
def test_gpt3_memory(form, capsys, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    if form == "slice" and not remat_kit.target("tpu-v5p").available:
        pytest.skip("the compiler for TPUs is not installed")
    path, png = tmp_path / "gpt3.json", tmp_path / "gpt3.png"
    argv = ["--smoke", "--form", form, "--target", "cpu", "--json", str(path), "--png", str(png)]
    assert gpt3_memory.main(argv) == 0
    assert path.with_suffix(".md").read_text() == capsys.readouterr().out
    report = json.loads(path.read_text())
    assert gpt3_memory.rendered(report) + "\n" == path.with_suffix(".md").read_text()
    raw = json.loads((tmp_path / "raw" / "gpt3.json").read_text())["rows"]
    assert report["rows"] == _common.without(raw, "curve") != raw
    assert [max(p["bytes"] for p in row["curve"]) for row in raw] == [r["bytes"] for r in raw]
    rows = {row["policy"]: row for row in report["rows"]}
    planned = [] if form == "unrolled" else ["plan min"]
    assert list(rows) == ["none", "nothing", "dots", *planned]
    for row in rows.values():
        assert max(row["phase_peaks"].values()) == row["bytes"]
        assert row["phase_peaks"][row["phase"]] == row["bytes"]
        assert sum(row["held"].values()) == row["bytes"]
        assert set(row["phase_peaks"]) >= {"forward", "backward", "update"}
        assert row["target"] == ("4 × tpu-v5p" if form == "slice" else "cpu")
    plain = rows.pop("none")
    assert plain["extra_flops_fraction"] == 0
    for policy in ("nothing", *planned):
        row = rows[policy]
        assert 0 < row["extra_flops_fraction"] < 1
        assert gpt3_memory.activation_bytes(plain) > 2 * gpt3_memory.activation_bytes(row)
        assert gpt3_memory.temporary_bytes(plain) > gpt3_memory.temporary_bytes(row)
    assert image.imread(png).std() > 0.01


def test_gpt3_memory_names_what_is_wrong(capsys):
    assert gpt3_memory.main(["--smoke", "--target", "nowhere"]) == 2
    assert "no target is named 'nowhere'" in capsys.readouterr().err
    assert doctest.testmod(gpt3_memory) == (0, 2)


def test_the_loss_lies_between_forward_and_backward():
    import optax

    loss, (params, *batch) = gpt3_memory.SMOKE[1].loss("none")
    optimizer = optax.sgd(0.1)
    args = (params, optimizer.init(params), *batch)
    step = gpt3_memory.training_step(loss, optimizer)
    text = compile_program(step, args, "cpu", argnums=None, donate_argnums=(0, 1)).hlo_text
    parts = anatomy(parse(text))
    phases = gpt3_memory.phases_of(parts)
    found = [s for s, phase in enumerate(phases) if phase == gpt3_memory.LOSS]
    ops = {parts.schedule.steps[s].op_name.rpartition("/")[2] for s in found}
    assert {"exp", "reduce_max", "reduce_sum"} <= ops
    assert "dot_general" not in ops
    assert all(
        "/" not in parts.origins[parts.schedule.steps[s].name].module
        for s in found
        if parts.schedule.steps[s].op_name
    )


# -- the same on a slice --------------------------------------------------------------------------


@pytest.fixture
def mesh():
    """One CPU as a mesh of both axes."""
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


def test_every_matrix_of_a_full_layer_is_split_over_the_whole_slice(mesh):
    case, chips = gpt3_memory.CASES[-1], gpt3_memory.SLICE
    _, (params, tokens) = case.loss("none")
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 131_114_459_136
    assert jax.tree.leaves(params["block_scan"]["mlp"]["up"]["kernel"])[0].shape[1] == 12288
    state = jax.eval_shape(gpt3_memory.adamw().init, params)
    sizes = {"data": chips.data, "model": chips.model}
    for leaf in jax.tree.leaves(_slice.split_state((params, state), mesh)):
        parts = 1
        for length, axis in zip(leaf.shape, leaf.sharding.spec):
            parts *= sizes.get(axis, 1)
            assert length % sizes.get(axis, 1) == 0
        matrix = leaf.size > 1e8
        assert (parts == chips.chips) == matrix, leaf
    (split,) = _slice.split_batch((tokens,), mesh)
    assert tokens.shape[0] % chips.data == 0
    assert split.sharding.spec == jax.sharding.PartitionSpec("data")


def test_a_step_for_a_slice_has_the_values_of_one_for_a_chip(mesh):
    loss, shapes = gpt3_memory.SMOKE[-1].loss("none")
    args = jax.tree.map(
        lambda s: jnp.linspace(0, 0.1, s.size).reshape(s.shape).astype(s.dtype), shapes
    )
    split = _slice.split_between_layers(loss, mesh)
    assert "sharding_constraint" in str(jax.make_jaxpr(split)(*args))
    quick = {"xla_backend_optimization_level": 0}
    one, other = jax.jit(lambda *args: (split(*args), loss(*args)), compiler_options=quick)(*args)
    assert one == other


def test_a_step_for_a_slice_is_compiled_once(mesh, monkeypatch):
    params, batch = {"up": {"kernel": jax.ShapeDtypeStruct((2, 8, 8), "float32")}}, (2, 8)
    args = (_slice.split_state(params, mesh), _slice.split_state({}, mesh))
    args += (_slice.split_batch(jax.ShapeDtypeStruct(batch, "float32"), mesh),)

    def step(params, state, x):
        new = jax.tree.map(lambda w: w * 2.0, params)
        return new, state, sum(jnp.sum(jnp.tanh(x @ w)) for w in params["up"]["kernel"])

    first = _slice.compiled(step, args, mesh)
    assert first["peak_bytes"] >= 2 * 8 * 8 * 4
    assert parse(first["hlo"])
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    assert _slice.compiled(step, args, mesh) == first


def test_a_plan_for_a_slice_is_a_point_of_the_frontier():
    loss, args = gpt3_memory.Case(
        "MLP", "residual_mlp", {"batch": 512, "width": 8, "layers": 2}
    ).loss("none")
    found = remat_kit.frontier(loss, *args)
    fixed = found.argument_bytes + found.output_bytes
    point = gpt3_memory.chosen(found, "0.5")
    half = 0.5 * (found.plain.predicted_peak_bytes - fixed)
    assert point.predicted_peak_bytes - fixed <= half
    cheaper = [p for p in found.points if p.extra_work < point.extra_work]
    assert cheaper
    assert all(p.predicted_peak_bytes - fixed > half for p in cheaper)
    assert gpt3_memory.chosen(found, "min") == found.points[0]
