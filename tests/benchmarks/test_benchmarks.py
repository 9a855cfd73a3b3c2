"""The benchmarks that read compiled programs back, at smoke size."""

import doctest
import json
import math

import _common
import compile_time
import gpt3_memory
import jax
import mindspore_graphs
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


@pytest.mark.slow
def test_compile_time(capsys, tmp_path):
    if not remat_kit.target("tpu-v5e").available:
        pytest.skip("the compiler for tpu-v5e is not installed")
    path = tmp_path / "times.json"
    argv = ["--smoke", "--target", "tpu-v5e", "--json", str(path)]
    assert compile_time.main(argv) == 0
    report = json.loads(path.read_text())
    assert capsys.readouterr().out == compile_time.rendered(report) + "\n"
    for row in report["rows"]:
        assert row["stopped"]
        assert row["bytes"][0]["temp_bytes"] > 0
        assert row["seconds"][1] < row["seconds"][0]
        assert compile_time.is_same(row)
    other = report["rows"][0]["bytes"][1] | {"temp_bytes": 0}
    assert not compile_time.is_same({"bytes": [report["rows"][0]["bytes"][0], other]})


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
        assert row["target"] == ("tpu-v5p:2x2x1" if form == "slice" else "cpu")
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


def test_every_matrix_of_a_full_layer_is_split_over_the_whole_slice():
    case = gpt3_memory.CASES[-1]
    _, (params, tokens) = case.loss("none")
    chips = remat_kit.target(gpt3_memory.SLICE).devices
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 131_114_459_136
    assert params["block_scan"]["mlp"]["up"]["kernel"].shape[1] == 12288
    for leaf in jax.tree.leaves(params):
        shard = leaf.sharding.shard_shape(leaf.shape)
        is_matrix = leaf.size > 1e8
        assert (math.prod(leaf.shape) == chips * math.prod(shard)) == is_matrix, leaf
    assert tokens.sharding.spec == jax.sharding.PartitionSpec("data", None)
    assert tokens.sharding.shard_shape(tokens.shape)[0] == 1


def test_rows_of_an_earlier_run_stay():
    def run(*names, number):
        rows = [{"form": form, "policy": policy, "number": number} for form, policy in names]
        return {"command": f"run {number}", "date": "today", "versions": {}, "rows": rows}

    plain, again, scan = ("slice", "none"), ("slice", "dots"), ("scan", "none")
    first = gpt3_memory.merged(None, run(plain, again, scan, number=1))
    second = gpt3_memory.merged(first, run(again, number=2))
    third = gpt3_memory.merged(second, run(scan, number=3))
    assert [(r["form"], r["policy"], r["number"]) for r in third["rows"]] == [
        (*plain, 1),
        (*again, 2),
        (*scan, 3),
    ]
    assert [(run["command"], run["rows"]) for run in third["earlier"]] == [
        ("run 1", [list(plain)]),
        ("run 2", [list(again)]),
    ]
    assert "earlier" not in gpt3_memory.merged(third, run(plain, again, scan, number=4))
    with pytest.raises(SystemExit, match="2"):
        gpt3_memory.main(["--smoke", "--policy", "plan 7"])
