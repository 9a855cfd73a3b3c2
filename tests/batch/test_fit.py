"""The largest batch that fits, and the table of what fits."""

import dataclasses
import json

import pytest
from batch_programs import CHIP, MLP, SIZES, SMALL, measured, mlp, stack

import remat_kit
from remat_kit._batch import fit as _fit
from remat_kit._cli import progress as _progress
from remat_kit._errors import UserError

# -- the fit matrix ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table():
    return remat_kit.fit(
        mlp, policies=["nothing"], targets=[CHIP, "cpu@4MiB"], batches=[512, 32, 512]
    )


def test_fit_is_what_measure_says(table):
    assert [(c.target, c.batch, c.policy) for c in table.cells] == [
        (chip, batch, policy)
        for chip in (CHIP, "cpu@4MiB")
        for batch in (32, 512)
        for policy in ("none", "nothing")
    ]
    for cell in table.cells:
        memory = measured(cell.batch, cell.policy, cell.target)
        assert (cell.fits, cell.headroom_bytes) == (memory.fits, memory.headroom_bytes)
    assert [c.fits for c in table.cells] == [True, True, False, False, True, True, True, True]
    assert table[CHIP, "nothing", 512].headroom_bytes < 0
    with pytest.raises(KeyError):
        table[CHIP, "dots", 512]


def test_slowdowns_are_against_none():
    table = remat_kit.fit(stack, policies=["nothing"], targets=[CHIP], batches=[32, 512])
    assert [cell.fits for cell in table.cells] == [True, True, False, True]
    for cell in table.cells:
        none = table[cell.target, None, cell.batch]
        assert cell.slowdown == pytest.approx(cell.step_seconds / none.step_seconds)
        assert cell.baseline_batch == cell.batch
        assert (cell.slowdown == 1.0) == (cell.policy == "none")
    fn, args = stack(batch=512, policy="nothing")
    seconds = remat_kit.inspect(fn, *args, target=CHIP).readings[CHIP].estimate.seconds
    assert table[CHIP, "nothing", 512].step_seconds == pytest.approx(seconds)


def test_the_best_come_first(table):
    best = table.fitting[0]
    assert (best.target, best.policy, best.batch) == ("cpu@4MiB", "none", 512)
    assert all(cell.fits for cell in table.fitting)


def test_chips_that_the_compiler_cannot_tell_apart_share_their_programs(table):
    for cell in table.cells:
        if cell.target == "cpu@4MiB":
            assert cell.memory.cached


def test_fit_is_shown(table):
    lines = str(table).splitlines()
    assert lines[0] == table.headline
    lines = lines[2:]
    assert lines[0] == "what fits, build"
    assert lines[1].split("  ")[0] == "target"
    assert "batch 32" in lines[1]
    (row,) = [line for line in lines if line.startswith(CHIP) and "nothing" in line]
    assert "yes, " in row
    assert " over, ×1." in row
    assert "×: time of an example compared with none, by the roofline" in lines
    assert table._repr_html_().count("<tr>") == 5
    plain = json.loads(json.dumps(table.to_json()))
    assert plain["targets"] == [CHIP, "cpu@4MiB"]
    assert plain["policies"] == ["none", "nothing"]
    assert plain["batches"] == [32, 512]
    assert len(plain["cells"]) == 8
    assert plain["complete"] is True
    assert plain["cells"][0].keys() >= {"fits", "headroom_bytes", "slowdown", "step_seconds"}


def test_where_none_has_no_program_the_largest_that_has_one_stands_in():
    def cell(policy, batch, seconds):
        memory = dataclasses.replace(measured(32), fits=seconds is not None)
        return _fit.Cell("chip", policy, batch, memory, seconds)

    cells = [cell("none", 8, 1.0), cell("none", 16, 1.5), cell("none", 32, None)]
    cells += [cell("dots", 16, 1.8), cell("dots", 32, 3.6)]
    held = list(_fit._held_against_none(cells))
    assert [c.baseline_batch for c in held] == [8, 16, None, 16, 16]
    assert held[3].slowdown == pytest.approx(1.2)
    assert held[4].slowdown == pytest.approx(1.2)
    text = str(_fit.Fit(tuple(held)))
    assert "×1.20*" in text
    assert "*: none did not compile here" in text
    alone = list(_fit._held_against_none(cells[2:]))
    assert {c.slowdown for c in alone} == {None}


def test_fit_interrupted():
    seen = []

    def progress(line):
        seen.append(line)
        if len(seen) == 3:
            raise KeyboardInterrupt

    found = remat_kit.fit(mlp, policies=["nothing"], batches=[8, 16], progress=progress)
    assert seen[1:] == [
        "nothing on cpu: batch 8 (8 fits with none)",
        "none on cpu: batch 16 (8 fits with none)",
    ]
    assert not found.complete
    assert [(c.policy, c.batch) for c in found.cells] == [("none", 8), ("nothing", 8)]
    assert found.notes[0] == "interrupted: some are missing"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"batches": []}, "no batch size to compile for"),
        ({"batches": [8], "targets": []}, "no target to compile for"),
        ({"batches": [8, 0]}, "0 is no batch size"),
        ({"batches": [8], "policies": ["dost"]}, "'dost'"),
        ({"batches": [8], "targets": ["h10"]}, "'h10'"),
    ],
)
def test_what_fit_says_of_a_wrong_call(options, wanted):
    with pytest.raises(UserError, match=wanted):
        remat_kit.fit(mlp, **options)


# -- plans ------------------------------------------------------------------------------------


def test_a_plan_is_none_where_that_fits():
    found = remat_kit.fit(stack, policies=["plan"], targets=[CHIP], batches=[32, 512])
    none, plan = ({c.batch: c for c in found.cells if c.policy == p} for p in ("none", "plan"))
    assert [none[b].fits for b in (32, 512)] == [True, False]
    assert [plan[b].fits for b in (32, 512)] == [True, True]
    assert plan[32].slowdown < 1.001


@pytest.mark.slow
def test_where_no_plan_fits_the_least_is_shown():
    found = remat_kit.fit(stack, policies=["plan"], targets=[CHIP], batches=[4096])
    none, plan = found.cells
    assert (none.fits, plan.fits) == (False, False)
    assert plan.memory.peak_bytes < none.memory.peak_bytes


def test_command_fit(run, tmp_path):
    path = tmp_path / "out.json"
    batches = ("--batch", "32,512", "64")
    argv = ("fit", MLP, *SMALL, "--target", CHIP, "--policy", "nothing", *batches)
    status, out, err = run(*argv, "--json", path)
    assert status == 0, err
    plain = json.loads(path.read_text())
    assert plain["model"] == MLP
    assert plain["size"] == SIZES
    assert plain["batches"] == [32, 64, 512]
    assert [c["fits"] for c in plain["cells"]] == [True] * 4 + [False] * 2
    assert err.splitlines()[::5] == [
        f"1/6 none on {CHIP}: batch 32",
        f"6/6 nothing on {CHIP}: batch 512 (64 fits with none)",
    ]
    assert out.startswith(f"{plain['headline']}\n\nwhat fits, {MLP}\n")
    status, out, _ = run(*argv, "--json", "-")
    assert all(cell["cached"] for cell in json.loads(out)["cells"])


def test_commands_interrupted_show_what_is_known(run, monkeypatch):
    say = _progress.Progress.say
    seen = []

    def interrupt(self, text):
        say(self, text)
        seen.append(text)
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(_progress.Progress, "say", interrupt)
    status, out, err = run("max-batch", MLP, *SMALL, "--target", CHIP, "--json", "-")
    assert status == 130
    plain = json.loads(out)
    assert (plain["complete"], plain["results"][0]["compiles"]) == (False, 2)
    assert err.endswith("interrupted\n")
    seen.clear()
    status, out, err = run("fit", MLP, *SMALL, "--batch", "8,16,32", "--json", "-")
    assert status == 130
    assert len(json.loads(out)["cells"]) == 2
    seen[:] = [None] * 2
    assert run("fit", MLP, *SMALL, "--batch", "8") == (
        130,
        "",
        "1/1 none on cpu: batch 8\ninterrupted\n",
    )


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (("fit", MLP), "the following arguments are required: --batch"),
        (("fit", MLP, "--batch", "8,x"), "argument --batch: 'x' is not a whole number above 0"),
        (("max-batch", MLP, "--step", "0"), "argument --step: '0' is not a whole number above 0"),
        (
            ("max-batch", MLP, "--size", "batch=8"),
            f"`remat-kit max-batch {MLP}`: batch=8 is given, and it is what is varied here",
        ),
        (
            ("fit", MLP, "--batch", "8", "--batch-name", "bath"),
            f"`remat-kit fit {MLP}`: the builder `{MLP}` takes no 'bath', so nothing says how "
            "large the batch is; it takes batch, features, hidden, layers, classes, materialize, "
            "seed",
        ),
        (
            ("max-batch", MLP, "--size", "hiden=8"),
            f"`{MLP} --size hiden=...`: no size is named 'hiden'",
        ),
    ],
)
def test_what_the_commands_say_of_a_wrong_call(run, argv, wanted):
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    message, hint = err.strip().splitlines()[-2:]
    assert message == f"error: {wanted}"
    assert hint.startswith("hint: ")
