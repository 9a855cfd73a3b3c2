"""The largest batch that fits: the search on made-up programs, and compiled."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest
from batch_programs import CHIP, MLP, ROOT, SMALL, measured, mlp, stack
from zoo import load

import remat_kit
from remat_kit._batch import max_batch as _max_batch
from remat_kit._batch import model as _model
from remat_kit._chip import compile as _compile
from remat_kit._chip.target import target
from remat_kit._errors import CompileError, PolicyError, UserError


@dataclasses.dataclass(frozen=True)
class MadeUp:
    """What is read of a `Memory`."""

    peak_bytes: int | None
    memory_bytes: int

    @property
    def temp_bytes(self):
        return self.peak_bytes and int(0.8 * self.peak_bytes)

    notes = all_notes = ()
    argument_bytes = output_bytes = alias_bytes = 0


class Search(_max_batch._Search):
    def __init__(self, peak, memory_bytes, *, step=1, at_most=2**20, says=True):
        chip = dataclasses.replace(target("cpu"), memory_bytes=memory_bytes)
        model = _model.Model(_model._Given("made up", peak, ROOT))
        super().__init__(model, None, chip, step, at_most, "max_batch")
        self.peak, self.says = peak, says

    def tried(self, batch):
        peak, limit = self.peak(batch), self.chip.memory_bytes
        known = peak if self.says or peak <= limit else None
        self.trials.append(_max_batch.Trial(batch, peak <= limit, MadeUp(known, limit)))
        return self.trials[-1]


def affine(batch):
    return 1_000_000 + 5_000 * batch


def padded(batch):
    return affine(-(-batch // 8) * 8)


def steeper(batch):
    return 1_000_000 + 2_000 * batch + 7_000 * max(0, batch - 3_000)


def flatter(batch):
    return 1_000_000 + 9_000 * batch - 7_000 * max(0, batch - 3_000)


def quadratic(batch):
    return 1_000_000 + 300 * batch**2


def first_fast(batch):
    return int(1_000_000 + 1e6 * batch**0.5)


PROGRAMS = (affine, padded, steeper, flatter, quadratic, first_fast)


@pytest.mark.parametrize("peak", PROGRAMS, ids=lambda peak: peak.__name__)
@pytest.mark.parametrize("start", [1, 8, 300, 2**20])
@pytest.mark.parametrize("limit", [900_000, 1_400_000, 30_000_000, 800_000_000])
@pytest.mark.parametrize("says", [True, False], ids=["", "silent"])
def test_the_answer_fits_and_the_next_does_not(peak, start, limit, says):
    search = Search(peak, limit, says=says)
    found = search.result(lambda _: None, start)
    known = {trial.batch: trial.fits for trial in found.trials}
    assert len(known) == found.compiles  # none is compiled twice
    assert known.get(found.batch, found.batch == 0)
    assert known[found.batch + 1] is False
    assert found.complete
    assert found.refused.batch == found.batch + 1


@pytest.mark.parametrize(("limit", "batch"), [(2_000_000, 200), (900_000_000, 179_800)])
def test_a_straight_line_takes_four_programs(limit, batch):
    found = Search(affine, limit).result(lambda _: None, 8)
    assert (found.batch, found.compiles) == (batch, 4)
    assert found.bytes_per_example == 5_000


def test_no_program_takes_more_than_halving_does():
    for peak in PROGRAMS:
        found = Search(peak, 800_000_000).result(lambda _: None, 8)
        assert found.compiles <= 20


def test_only_multiples_of_the_step_are_tried():
    found = Search(affine, 30_000_000, step=64).result(lambda _: None, 100)
    assert found.batch == 5_800 // 64 * 64
    assert found.refused.batch == found.batch + 64
    assert not any(trial.batch % 64 for trial in found.trials)


def test_nothing_above_the_limit_is_tried():
    found = Search(affine, 30_000_000, at_most=100).result(lambda _: None, 8)
    assert (found.batch, found.refused) == (100, None)
    assert found.notes[0] == "nothing above 100 was tried"


def test_lines_of_progress_have_the_best_so_far():
    lines = []
    Search(affine, 2_000_000).result(lines.append, 256)
    assert lines == [
        "none on cpu: batch 256",
        "none on cpu: batch 216 (256 does not)",
        "none on cpu: batch 200 (216 does not)",
        "none on cpu: batch 201 (200 fits, 216 does not)",
    ]


# pytest -m slow tests/batch/test_max_batch.py
@pytest.mark.parametrize("policy", [None, pytest.param("nothing", marks=pytest.mark.slow)])
def test_max_batch(policy):
    found = remat_kit.max_batch(mlp, target=CHIP, policy=policy)
    assert measured(found.batch, policy).fits
    assert not measured(found.batch + 1, policy).fits
    assert found.best.peak_bytes == measured(found.batch, policy).peak_bytes
    assert found.compiles <= 8
    assert found.step_seconds > 0
    assert found.examples_per_second == found.batch / found.step_seconds


def test_recomputing_makes_room():
    largest = functools.partial(remat_kit.max_batch, stack, target=CHIP, step=32)
    none = largest()
    recipe = largest(policy=str(ROOT / "policies" / "nothing.toml"))
    placed = largest(policy="nothing", at="layer")
    assert recipe.batch == placed.batch > none.batch
    value = largest(policy=remat_kit.save(remat_kit.nothing))
    assert (value.batch, value.policy) == (placed.batch, "save(nothing)")


def test_max_batch_is_plain_data():
    found = remat_kit.max_batch(mlp, target=CHIP, step=16)
    plain = json.loads(json.dumps(found.to_json()))
    assert plain["batch"] % 16 == 0
    assert plain["refused_batch"] == plain["batch"] + 16
    assert plain["peak_bytes"] <= plain["memory_bytes"] == 2**20 < plain["refused_peak_bytes"]
    assert plain["headroom_bytes"] == plain["memory_bytes"] - plain["peak_bytes"]
    assert plain["compiles"] == len(plain["trials"]) >= plain["cached"]
    assert plain["trials"][0]["batch"] == 32  # the model's own
    assert str(found).startswith("the largest batch that fits\n")
    assert found._repr_html_().count("<tr>") == 2


def test_none_fits():
    found = remat_kit.max_batch(mlp, target="cpu@16KiB")
    assert (found.batch, found.best, found.step_seconds) == (0, None, None)
    assert not measured(1, chip="cpu@16KiB").fits
    assert found.refused.batch == 1
    assert found.notes[0].startswith("arguments and results alone take ")
    assert "none fits" in str(found)


def test_another_name_and_a_whole_step():
    def build(examples):
        def step(w, x):
            return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

        w, x = (jax.ShapeDtypeStruct((n, 16), jnp.float32) for n in (16, examples))
        return step, (w, x)

    wanted = {"batch_name": "examples", "argnums": None, "donate_argnums": 0}
    found = remat_kit.max_batch(build, target="cpu@256KiB", **wanted)
    assert found.trials[0].batch == 8
    assert found.batch > 1000
    assert found.best.memory.alias_bytes == 16 * 16 * 4


def test_interrupted_after_two():
    seen = []

    def progress(line):
        seen.append(line)
        if len(seen) == 3:
            raise KeyboardInterrupt

    found = remat_kit.max_batch(mlp, target=CHIP, progress=progress)
    assert (found.complete, found.compiles) == (False, 2)
    assert found.batch == max(t.batch for t in found.trials if t.fits)
    assert found.notes[0] == "interrupted: a larger batch may fit"
    assert found.step_seconds > 0


def test_what_the_compiler_refuses_bounds_the_batch(monkeypatch):
    compile_program = _compile.compile_program

    def refuse(fn, args, *rest, **options):
        if args[1].shape[0] > 40:
            raise CompileError("`max_batch`: too wide", hint="none")
        return compile_program(fn, args, *rest, **options)

    monkeypatch.setattr(_compile, "compile_program", refuse)
    found = remat_kit.max_batch(mlp, target=CHIP)
    assert (found.batch, found.refused.batch) == (40, 41)
    assert "41: `max_batch`: too wide" in found.notes
    assert "41: refused by the compiler" in str(found)
    with pytest.raises(CompileError, match="too wide"):
        remat_kit.max_batch(mlp, target=CHIP, start=41)


@pytest.mark.parametrize(
    ("build", "options", "wanted"),
    [
        (lambda policy=None, size=3: None, {}, "takes no 'batch', .* it takes size"),
        (functools.partial(mlp, batch=8), {"batch_name": "bath"}, "takes no 'bath'"),
        ("models/mlp.py", {}, "'models/mlp.py' is no builder"),
        (mlp, {"step": 0}, "step=0.* no batch size"),
        (mlp, {"start": 1.5}, "start=1.5.* no batch size"),
        (mlp, {"step": 8, "at_most": 4}, "no multiple of 8 is that small"),
        (mlp, {"batch_name": "seed"}, "seed=8 and seed=.* give the same program"),
        (lambda batch: mlp(batch=batch), {"policy": "dots"}, "takes no policy"),
    ],
)
def test_what_max_batch_says_of_a_wrong_call(build, options, wanted):
    with pytest.raises(UserError, match=wanted) as error:
        remat_kit.max_batch(build, target=CHIP, **options)
    assert error.value.hint


def test_a_fault_of_the_builder_stays_what_it_is():
    def build(batch):
        raise RuntimeError("theirs")

    with pytest.raises(RuntimeError, match="theirs"):
        remat_kit.max_batch(build)
    with pytest.raises(PolicyError):
        remat_kit.max_batch(mlp, policy=3)


@pytest.mark.slow
def test_a_plan_makes_as_much_room_as_any_preset():
    preset = remat_kit.max_batch(stack, target=CHIP, policy="nothing", step=32)
    found = remat_kit.max_batch(stack, target=CHIP, policy="plan", step=32)
    assert found.policy == "plan"
    assert found.batch >= preset.batch
    fn, args = stack(batch=found.batch)
    lean = remat_kit.frontier(fn, *args, target=CHIP)
    memory = remat_kit.measure(remat_kit.policy(lean.policy(lean.points[0]))(fn), *args)
    assert memory.peak_bytes == found.best.peak_bytes <= found.memory_bytes
    # The step at that batch is the fastest that fits, not the one of least memory.
    planned = remat_kit.plan(fn, *args, budget="fit", target=CHIP)
    assert planned.compiled.fits
    assert found.compiles == len(found.trials) + planned.tried
    assert found.step_seconds > 0


def test_a_plan_needs_a_gradient():
    with pytest.raises(UserError, match="takes no gradient"):
        remat_kit.max_batch(stack, policy="plan", argnums=None)


@pytest.mark.slow
@pytest.mark.skipif(not target("tpu-v5e").available, reason="needs libtpu")
def test_max_batch_where_the_compiler_refuses():
    build = functools.partial(load("mlp").build, features=512, hidden=1024)
    found = remat_kit.max_batch(build, target="tpu-v5e@24MiB", step=64)
    assert found.batch > 0
    assert found.best.memory.fits
    assert found.refused.memory.temp_bytes is None
    table = remat_kit.fit(build, targets=["tpu-v5e@24MiB"], batches=[64, found.refused.batch])
    assert [cell.fits for cell in table.cells] == [True, False]
    assert [cell.slowdown for cell in table.cells] == [1.0, None]


@pytest.mark.slow
def deep(batch=8):
    def loss(weights, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0] ** 2)

    shapes = (48, 16, 16), (batch, 16)
    return loss, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


@pytest.mark.slow
@pytest.mark.skipif(not target("h100").available, reason="needs the CUDA plugin")
def test_a_plan_that_offloads_fits_several_times_the_batch():
    here, away = (
        remat_kit.max_batch(deep, target="h100@4MiB", policy=policy, step=512, start=start)
        for policy, start in (("plan", 2560), ("plan+offload", 15360))
    )
    assert away.batch > 4 * here.batch
    assert here.refused is not None
    assert away.refused is not None


@pytest.mark.skipif(not target("h100").available, reason="needs the CUDA plugin")
def test_max_batch_on_a_gpu_that_is_absent():
    found = remat_kit.max_batch(mlp, target="h100@4MiB", step=16)
    assert measured(found.batch, chip="h100@4MiB").fits
    assert not measured(found.batch + 16, chip="h100@4MiB").fits


def test_command_max_batch(run, tmp_path):
    path = tmp_path / "out.json"
    given = ("--target", CHIP, "--step", "32", "--policy", "nothing", "--json", path)
    status, out, err = run("max-batch", MLP, *SMALL, *given)
    assert status == 0, err
    plain = json.loads(path.read_text())
    assert (plain["model"], plain["batch_name"], plain["complete"]) == (MLP, "batch", True)
    found = {(r["target"], r["policy"]): r for r in plain["results"]}
    assert list(found) == [(CHIP, "none"), (CHIP, "nothing")]
    wanted = remat_kit.max_batch(mlp, target=CHIP, policy="nothing", step=32)
    assert found[CHIP, "nothing"]["batch"] == wanted.batch
    assert out.startswith(f"{plain['headline']}\n\nthe largest batch that fits, {MLP}\n")
    assert f"×{wanted.batch / found[CHIP, 'none']['batch']:.3g}" in out
    lines = err.splitlines()
    assert lines[0] == f"none on {CHIP}: batch 32"
    assert len(lines) == sum(r["compiles"] for r in plain["results"])


def test_command_max_batch_takes_where_to_begin(run):
    given = ("--target", CHIP, "--start", "64", "--step", "32", "--at-most", "128")
    status, out, err = run("max-batch", MLP, *SMALL, *given, "--json", "-")
    assert status == 0, err
    (found,) = json.loads(out)["results"]
    assert [t["batch"] for t in found["trials"]] == [64, 128]
    assert (found["batch"], found["refused_batch"]) == (128, None)
