"""The table of plans with pieces, at a small size."""

import doctest
import json

import pieces
import pytest

import remat_kit


@pytest.mark.slow
def test_smoke_run_is_kept(capsys, monkeypatch, tmp_path):
    path = tmp_path / "table.json"
    given = ["--smoke", "--json", str(path)]
    assert pieces.main(given) == 0
    report = json.loads(path.read_text())
    (row,) = report["rows"]
    assert row["complete"]
    regions, divided = row["regions"], row["pieces"]
    assert set(divided) == {"min", "0.5", "least"}
    assert set(regions) == {"min", "0.5"}
    assert divided["min"][0] < 0.5 * regions["min"][0]
    assert divided["least"][0] <= regions["min"][0] < row["none_mib"]
    assert divided["min"][4] > 0
    assert regions["min"][4:6] == [0, []]
    assert all(figures[-1] for figures in (*divided.values(), *regions.values()) if figures)
    table = pieces.rendered(report)
    assert table + "\n" == path.with_suffix(".md").read_text() == capsys.readouterr().out

    def refused(*_):
        raise AssertionError("the model was taken again")

    monkeypatch.setattr(pieces, "rows_of", refused)
    assert pieces.main(given) == 0
    assert json.loads(path.read_text())["rows"] == [row]
    monkeypatch.setattr(pieces, "REVISION", -1)
    assert pieces.main(given) == 1
    assert "AssertionError: the model was taken again" in path.with_suffix(".md").read_text()


def test_a_model_that_fails_has_a_row_that_says_so(capsys, monkeypatch, tmp_path):
    def rows_of(case, target, shares, tick):
        if case.name == pieces.CASES["vgg16"].name:
            raise RuntimeError("no memory\nat all")
        yield {**pieces.current(case.name, target), "shares": [*shares], "complete": True}

    monkeypatch.setattr(pieces, "rows_of", rows_of)
    path = tmp_path / "table.json"
    assert pieces.main(["--models", "vgg16", "alexnet", "--json", str(path)]) == 1
    assert "| VGG-16, batch 64 | RuntimeError: no memory |" in capsys.readouterr().out
    failed, taken = json.loads(path.read_text())["rows"]
    assert "error" in failed
    assert taken["complete"]


def test_no_plan_is_searched_below_the_least_memory():
    class Search:
        def limit(self, budget):
            return int(budget * 100 * pieces.MIB)

        def fixed(self):
            return 0

        def run(self, budget):
            if budget == 0.5:
                return "a plan"
            raise remat_kit.UserError("nothing fits")

    assert pieces._answer(Search(), 0.5, [50.0]) == "a plan"
    assert pieces._answer(Search(), 0.4, [40.0]) is None
    assert pieces._answer(Search(), 0.5, [50.1]) is None
    with pytest.raises(remat_kit.UserError):
        pieces._answer(Search(), "min", None)


def test_files_are_merged_by_model(tmp_path):
    for name, case, version in (("a", "gpt12", "1"), ("b", "vgg16", "2")):
        row = {**pieces.current(pieces.CASES[case].name, "cpu"), "complete": True}
        row |= {"versions": {"jax": version}, "regions": {"0.1": None}, "pieces": {}}
        report = pieces.reported([], [row | {"shares": [0.1]}])
        pieces._written(tmp_path / f"{name}.json", report)
    path = tmp_path / "c.json"
    files = [str(tmp_path / f"{name}.json") for name in "ab"]
    assert pieces.main(["--merge", *files, "--json", str(path)]) == 0
    models = [row["model"] for row in json.loads(path.read_text())["rows"]]
    assert models == ["GPT-12, batch 8", "VGG-16, batch 64"]
    assert "VGG-16, batch 64: with jax 2." in path.with_suffix(".md").read_text()


def test_longest_sequence_of_each_way(capsys, monkeypatch, tmp_path):
    path = tmp_path / "longest.json"
    most = {"blocks": 100, "regions": 150, "pieces": 1000}
    asked = []

    def fits(case, length, way, target):
        asked.append((way, length))
        return length <= most[way]

    monkeypatch.setattr(pieces, "fits", fits)
    given = ["--smoke", "--longest", "--json", str(path)]
    assert pieces.main(given) == 0
    assert "| Llama, tiny | cpu | pieces | 960 | 10.0 |" in capsys.readouterr().out
    tokens = {row["way"]: row["tokens"] for row in json.loads(path.read_text())["longest"]}
    assert tokens == {"blocks": 96, "regions": 144, "pieces": 960}
    assert len(asked) == len(set(asked))
    asked.clear()
    assert pieces.main(given) == 0
    assert asked == []
    assert doctest.testmod(pieces).failed == 0


@pytest.mark.slow
def test_whether_a_length_fits():
    small = pieces.SMOKE_LLAMA
    for way in pieces.WAYS:
        assert pieces.fits(small, 64, way, "cpu@64MiB")
        assert not pieces.fits(small, 64, way, "cpu@100KiB")


def test_a_length_that_the_compiler_refuses_does_not_fit(monkeypatch):
    def refused(*_, **__):
        raise remat_kit.CompileError("refused")

    monkeypatch.setattr(remat_kit, "plan", refused)
    assert not pieces.fits(pieces.SMOKE_LLAMA, 64, "pieces", "cpu")
