"""The benchmarks that repeat Paddle's example and table and a training run."""

import doctest
import json

import bert_batch
import jax
import numpy as np
import paddle_recompute
import pytest
import wall_time


@pytest.fixture
def cifar_like():
    pytest.importorskip("PIL")  # reads scikit-learn's photographs
    import train_cifar_like

    return train_cifar_like


# -- Paddle's example -----------------------------------------------------------------------------


@pytest.mark.slow
def test_recompute_of_chosen_blocks_changes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(paddle_recompute, "WAYS", paddle_recompute.WAYS[:2])
    monkeypatch.setattr(paddle_recompute, "STEPS", 3)
    path = tmp_path / "paddle.json"
    assert paddle_recompute.main(["--smoke", "--json", str(path)]) == 0
    assert path.with_suffix(".md").read_text() == capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    assert [(row["form"], row["way"]) for row in rows] == [
        (form, way) for form in ("Linen", "NNX") for way in ("none", "blocks 1, 3")
    ]
    for plain, again in (rows[:2], rows[2:]):
        assert again["losses"] == plain["losses"]
        assert len(set(plain["losses"])) == 3
        assert plain["recomputed_flops"] == 0 < again["recomputed_flops"]
        assert again["saved_bytes"] < plain["saved_bytes"]


@pytest.mark.parametrize("form", ["Linen", "NNX"])
def test_checkpoints_by_name_change_nothing(form):
    found = []
    for way in (paddle_recompute.WAYS[0], paddle_recompute.WAYS[3]):
        loss, params = way.build(form, 10)
        x, key = paddle_recompute.batch_of(0, 4, 10), jax.random.PRNGKey(0)
        found.append(jax.jit(jax.value_and_grad(loss))(params, x, key))
        assert str(way) in ("none", "checkpoints block_1, block_3")
        other = loss(params, x, jax.random.PRNGKey(1))
        assert other != found[-1][0]  # the dropout is there
    assert paddle_recompute.difference(*map(jax.device_get, found)) == 0


def test_a_difference_is_seen():
    assert doctest.testmod(paddle_recompute) == (0, 1)
    one = {"w": np.zeros(2), "v": np.array([2.0, 1.0])}
    assert paddle_recompute.difference(one, one) == 0
    assert paddle_recompute.difference(one, one | {"w": np.ones(2)}) == 1


# -- training on photographs ------------------------------------------------------------------


def test_the_images_are_crops_of_their_places(cifar_like):
    images, labels, test_images, test_labels = cifar_like.places(0)
    assert images.shape == (2400, 32, 32, 3)
    assert images.dtype == np.float32
    assert test_images.shape == (480, 32, 32, 3)
    assert [len(images), len(test_images)] == [len(labels), len(test_labels)]
    assert set(np.bincount(labels)) == {200}
    assert set(np.bincount(test_labels)) == {40}
    place = np.zeros((96, 98, 3), np.uint8)  # has three positions
    assert len(cifar_like.crops(place, np.random.default_rng(0))) == 3
    np.testing.assert_array_equal(images, cifar_like.places(0)[0])
    assert doctest.testmod(cifar_like) == (0, 1)


@pytest.mark.slow
def test_training_with_a_plan(cifar_like, capsys, tmp_path):
    path = tmp_path / "cifar.json"
    assert cifar_like.main(["--smoke", "--json", str(path)]) == 0
    assert path.with_suffix(".md").read_text() == capsys.readouterr().out
    report = json.loads(path.read_text())
    plain, planned = report["runs"]
    assert len(plain["losses"]) == len(planned["losses"]) == 8
    assert report["max_ulps"] <= 4
    # On a CPU the derivative of max pooling makes the difference, and nothing is computed twice.
    sizes = [report["plan"][f"{which}_temp_bytes"] for which in ("baseline", "compiled")]
    assert sizes[1] < 0.5 * sizes[0]


def test_a_target_that_is_unknown_is_said(cifar_like, capsys):
    for script in (cifar_like, bert_batch):
        assert script.main(["--smoke", "--target", "nowhere"]) == 2
        assert "no target is named 'nowhere'" in capsys.readouterr().err


def test_the_picture_of_the_losses(cifar_like, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    plan = {"baseline_temp_bytes": 2**21, "compiled_temp_bytes": 2**20}
    losses = {"none": [2.0, 1.0, 0.5], "plan": [2.0, 1.0, 0.5]}
    runs = [{"name": name, "accuracy": 0.6, "losses": found} for name, found in losses.items()]
    report = {"plan": plan, "runs": runs}
    cifar_like.draw(report, tmp_path / "losses.png")
    assert image.imread(tmp_path / "losses.png").std() > 0.01


# -- the largest batch of BERT ------------------------------------------------------------------


@pytest.mark.slow
def test_bert_batch(capsys, tmp_path):
    path = tmp_path / "bert.json"
    argv = ["--smoke", "--target", "cpu@2MiB", "--layers", "none", "--json", str(path)]
    assert bert_batch.main(argv) == 0
    assert path.with_suffix(".md").read_text() == capsys.readouterr().out
    (row,) = json.loads(path.read_text())["rows"]
    check_row(row, 2 * 2**20)


def check_row(row, memory_bytes):
    assert 0 < row["peak_bytes"] <= row["memory_bytes"] == memory_bytes
    assert row["sentences_per_second"] * row["step_seconds"] == pytest.approx(row["batch"])
    trials = {trial["batch"]: trial["fits"] for trial in row["trials"]}
    assert trials[row["batch"]] is True
    assert trials[row["refused_batch"]] is False


@pytest.mark.slow
def test_bert_batch_with_layers_recomputed(tmp_path):
    path = tmp_path / "bert.json"
    argv = ["--smoke", "--target", "cpu@8MiB", "--layers", "none", "per-layer"]
    assert bert_batch.main([*argv, "--json", str(path)]) == 0
    plain, again = json.loads(path.read_text())["rows"]
    assert again["batch"] > plain["batch"]
    check_row(plain, 8 * 2**20)
    check_row(again, 8 * 2**20)


def test_the_moments_of_adam_are_counted():
    loss, args = bert_batch.SMOKE.loss("none")
    step, given = bert_batch.stepped(loss, args)
    assert jax.tree.structure(jax.eval_shape(step, *given)[:2]) == jax.tree.structure(given[:2])
    params = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[0]))
    moments = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(given[1]))
    assert moments == 2 * params + 4


@pytest.mark.slow
def test_a_planned_step_fits():
    chip = bert_batch.roomy(bert_batch.remat_kit.target("cpu@16MiB"), 4)
    way = bert_batch.Way(bert_batch.SMOKE, bert_batch.WAYS["plan"], chip)
    found = bert_batch.fastest_plan(way, 96)
    assert found is not None
    assert found[0].memory.fits


# -- wall time ------------------------------------------------------------------------------------


@pytest.mark.slow  # a time on the clock
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA:CPU undoes recompute outside loops")
@pytest.mark.parametrize("ways", [[], ["--pieces"]])
def test_planned_steps_are_timed_beside_the_prediction(tmp_path, capsys, ways):
    path = tmp_path / "times.json"
    argv = ["--smoke", *ways, "--pairs", "3", "--budget", "min", "1e-3", "--json", str(path)]
    assert wall_time.main(argv) == 0
    least, impossible = json.loads(path.read_text())["rows"]
    assert len(least["ratios"]) == 3
    assert sorted(least["ratios"])[1] == least["ratio"] > 0
    assert least["predicted_time_ratio"] > 1
    assert least["compiled_temp_bytes"] < least["baseline_temp_bytes"]
    assert "least memory that was reached" in impossible["error"]
    out = capsys.readouterr().out
    assert path.with_suffix(".md").read_text() == out
    assert f"python benchmarks/wall_time.py {' '.join(argv[:-2])}" in out


def test_a_run_that_is_cut_off_keeps_the_rows_it_has(tmp_path, capsys, monkeypatch):
    def cut_off(*args):
        yield {"model": "a model", "budget": "min", "error": "nothing fits"}
        raise KeyboardInterrupt

    monkeypatch.setattr(wall_time, "rows", cut_off)
    path = tmp_path / "times.json"
    with pytest.raises(KeyboardInterrupt):
        wall_time.main(["--smoke", "--json", str(path)])
    assert [row["model"] for row in json.loads(path.read_text())["rows"]] == ["a model"]
    assert "nothing fits" in path.with_suffix(".md").read_text()
    assert capsys.readouterr().err == "a model, min\n"
