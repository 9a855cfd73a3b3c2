"""Plans: the frontier, the budget, the compiled answer, the policy that runs it."""

import dataclasses
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import planner
import pytest
from shapes import struct
from zoo import load

import remat_kit
from remat_kit import PolicyError, RematKitWarning, UserError
from remat_kit._chip.target import target
from remat_kit._cli import main as _main
from remat_kit._planner import plan as _plan
from remat_kit._planner.schedules.proposals import silent
from remat_kit._planner.search import Answer, Search
from remat_kit._policy import recipe as _recipe


def mlp(ws, x):
    """A residual MLP."""
    for i, (up, down) in enumerate(ws):
        with jax.named_scope(f"block_{i}"):
            x = x + jnp.sin(jnp.tanh(x @ up)) @ down
    return jnp.mean(x**2)


LAYERS, BATCH = 8, 512


# There the least that small programs on the CPU compile to is mostly what they take anyway.
lean = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA:CPU of jax 0.10")
ARGS = ([(struct(16, 64), struct(64, 16))] * LAYERS, struct(BATCH, 16))


def scanned(ws, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(jnp.sin(x @ w)), None), x, ws)[0])


SCAN_ARGS = (struct(12, 32, 32), struct(256, 32))


@pytest.fixture(scope="module")
def front():
    return remat_kit.frontier(mlp, *ARGS)


@pytest.mark.parametrize("kind", ["png"])
def test_missing_matplotlib_is_named_before_the_search(kind, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = str(tmp_path / f"f.{kind}")
    assert _main.main(["frontier", "models/mlp.py:build", f"--{kind}", path]) == 2
    said = capsys.readouterr().err
    assert f"--{kind} {path}" in said
    assert "remat-kit[plot]" in said
    assert "tracing" not in said


def test_the_command_line_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = {kind: tmp_path / f"front.{kind}" for kind in ("png", "html")}
    asked = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    assert _main.main(["frontier", "models/mlp.py:build", *asked]) == 0
    assert all(path.stat().st_size > 1000 for path in files.values())
    assert _main.main(["frontier", "models/mlp.py:build", "--png", "front.jpeg2"]) == 2
    assert "is not a known picture format" in capsys.readouterr().err


@lean
def test_plan_fits_its_budget_and_peaks_do_not_jump():
    budgets = (0.5, 0.7, 1.0)
    plans = [remat_kit.plan(mlp, *ARGS, budget=b) for b in budgets]
    for plan in plans:
        assert plan.compiled_peak_bytes <= plan.budget_bytes
        compiled = remat_kit.measure(remat_kit.policy(plan)(mlp), *ARGS)
        assert compiled.peak_bytes <= plan.budget_bytes
    peaks = [p.compiled_peak_bytes for p in plans]
    assert peaks == sorted(peaks)
    assert plans[-1].point.extra_flops == 0
    assert plans[0].compiled.temp_bytes < plans[-1].compiled.temp_bytes


@pytest.mark.slow
@lean
def test_budgets_share_what_is_compiled(monkeypatch):
    """What a compiler makes of a schedule, 30 % more or less than was predicted here, may suit an
    earlier budget better than what was compiled for it.
    """
    plain = Search.measured
    monkeypatch.setattr(
        Search, "measured", lambda self, p: round((plain(self, p) or 0) * (1 + 0.3 * math.sin(p)))
    )
    first = []
    run = Search.run
    monkeypatch.setattr(Search, "run", lambda self, b: first.append(run(self, b)) or first[-1])
    budgets = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    found = [p for p in _plan.plans(mlp, *ARGS, budgets=budgets) if isinstance(p, remat_kit.Plan)]
    work = [p.point.extra_work for p in found]
    assert len(work) == len(first) > 4
    assert work == sorted(work, reverse=True)
    front = remat_kit.frontier(mlp, *ARGS)
    points = (*front.points, *front.leaner, front.plain)
    assert work != [points[a.place].extra_work for a in first]


@lean
@pytest.mark.slow  # pytest -m slow tests/planner/test_plan.py
def test_residual_mlp_is_monotone_from_a_twentieth_to_all():
    fn, args = load("residual_mlp").build(batch=4096, width=64, layers=12, features=64)
    peaks = []
    for budget in (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0):
        try:
            plan = remat_kit.plan(fn, *args, budget=budget)
        except UserError:
            assert not peaks  # only below the least
            continue
        assert plan.compiled_peak_bytes <= plan.budget_bytes
        peaks.append(plan.compiled_peak_bytes)
    assert len(peaks) >= 5
    assert peaks == sorted(peaks)


@lean
def test_plan_in_words_and_as_json():
    plan = remat_kit.plan(mlp, *ARGS, budget="min")
    plain = json.loads(json.dumps(plan.to_json()))
    assert set(plain) >= {
        *("budget_bytes", "predicted_peak_bytes", "compiled_peak_bytes", "baseline_peak_bytes"),
        *("extra_flops_fraction", "step_seconds", "minimum_bytes", "bound_extra_seconds", "gap"),
        *("objective", "extra_work", "bound_extra_work"),
    }
    assert plain["compiled_peak_bytes"] < plain["baseline_peak_bytes"]
    assert plain["budget_bytes"] is None
    assert plain["objective"] == "balanced"
    assert 0 <= plain["bound_extra_work"] <= plain["extra_work"]
    table = str(plan.explain())
    assert "block_*" in table
    assert "recomputed" in table
    free = remat_kit.plan(mlp, *ARGS, budget="free")
    assert free.point.extra_seconds <= 0.02 * free.step_seconds


def test_a_refused_program_has_the_memory_that_it_needs():
    """A TPU's compiler refuses what does not fit, and says how much it needs."""
    plan = remat_kit.plan(mlp, *ARGS, budget="min")
    refused = dataclasses.replace(
        plan.baseline, temp_bytes=None, fits=False, peak_bytes=10**9, needs_bytes=10**9
    )
    found = dataclasses.replace(plan, baseline=refused).to_json() | {"budget": "min"}
    fixed = refused.argument_bytes + refused.output_bytes
    assert found["baseline_peak_bytes"] - found["baseline_temp_bytes"] == fixed
    found |= {"first_predicted_peak_bytes": None, "extra_products_fraction": 0.0}
    assert "954" in planner._plan_line("mlp", found, 1.0)


@lean
def test_a_plan_is_a_recipe(tmp_path):
    plan = remat_kit.plan(mlp, *ARGS, budget=0.6)
    assert _recipe.parse(repr(plan)) == plan.policy
    plan.save(tmp_path / "plan.toml")
    again = remat_kit.policy(str(tmp_path / "plan.toml"))(mlp)
    assert remat_kit.measure(again, *ARGS).peak_bytes <= 1.05 * plan.compiled_peak_bytes

    def changed(ws, x):
        return jnp.exp(mlp(ws, x))

    with pytest.raises(PolicyError, match="another program: exp 0 -> 1"):
        jax.eval_shape(remat_kit.policy(plan)(changed), *ARGS)
    other = (ARGS[0], struct(2 * BATCH, 16))
    with pytest.raises(PolicyError, match="other shapes"):
        jax.eval_shape(remat_kit.policy(plan)(mlp), *other)
    loose = dataclasses.replace(plan.policy, strict=False)
    assert remat_kit.measure(remat_kit.policy(loose)(mlp), *other).temp_bytes
    with pytest.raises(UserError, match="at="):
        jax.eval_shape(remat_kit.policy(plan, at="block_*")(mlp), *ARGS)
    for line in ("0:3 hide 1.0", "0 times (0:3)", "2 items (0:3)", "2 times 0:3"):
        broken = remat_kit.planned(plan.program, line)
        with pytest.raises(PolicyError, match="out of place"):
            jax.eval_shape(remat_kit.policy(broken)(mlp), *ARGS)


def wide_first(ws, x):
    """The first operations' working set is the peak, whatever the blocks keep."""
    x = jnp.tanh(jnp.sin(x @ ws[0]) @ ws[1])
    for i, w in enumerate(ws[2:]):
        with jax.named_scope(f"block_{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean(x)


WIDE_ARGS = [struct(16, 512), struct(512, 16), *[struct(16, 16)] * 10], struct(4096, 16)


def test_where_the_model_misses_something_plans_keep_less():
    front = remat_kit.frontier(wide_first, *WIDE_ARGS, target="h100")
    first = front.points[0]
    assert front.leaner
    for point in front.leaner:
        assert point.saved_bytes < first.saved_bytes
        assert point.extra_work > first.extra_work
        assert point.predicted_peak_bytes <= 1.03 * first.predicted_peak_bytes
    search = Search(wide_first, WIDE_ARGS, 0, target("h100"), front, 3, silent)
    memory = remat_kit.measure(wide_first, *WIDE_ARGS)

    def measured(point, factor):
        peak = round(factor * point.predicted_peak_bytes)
        return dataclasses.replace(memory, peak_bytes=peak)

    search.known = {search.plain: measured(front.plain, 1.0), 0: measured(first, 1.0)}
    assert all(search.predicted(p) >= first.predicted_peak_bytes for p in search.leaner)
    search.known = {search.plain: measured(front.plain, 1.3), 0: measured(first, 1.3)}
    choice = search.choice("min", None)
    assert choice in search.leaner
    # No less than the model says, and less than what was found by no more than is kept less.
    found, point = search.predicted(choice), search.points[choice]
    assert point.predicted_peak_bytes <= found < search.predicted(0)
    assert search.predicted(0) - found <= first.saved_bytes - point.saved_bytes


def test_predictions_are_corrected_by_programs_of_their_kind(front):
    search = Search(mlp, ARGS, 0, target("cpu"), front, 3, silent)
    memory = remat_kit.measure(mlp, *ARGS)
    own = [p.predicted_peak_bytes for p in search.points]
    first, middle = 0, len(front.points) // 2

    def measured(place, factor):
        return dataclasses.replace(memory, peak_bytes=round(factor * own[place]))

    # The program without regions says nothing of those with some.
    search.known = {search.plain: measured(search.plain, 1.3)}
    assert search.predicted(first) == own[first] < own[middle] == search.predicted(middle)
    # Between two that were compiled it is in proportion.
    search.known[first] = measured(first, 1.1)
    share = (own[middle] - own[first]) / (own[search.plain] - own[first])
    ends = 1.1 * own[first], 1.3 * own[search.plain]
    assert search.predicted(middle) == pytest.approx(ends[0] + share * (ends[1] - ends[0]))
    # What was compiled is as it was compiled.
    search.known[middle] = measured(middle, 0.9)
    assert search.predicted(middle) == round(0.9 * own[middle])


def test_the_leanest_schedule_is_not_the_answer_where_others_fit(front):
    """A model that predicts all peaks but the lowest too low must not end at the lowest."""
    memory = remat_kit.measure(mlp, *ARGS)
    own = [p.predicted_peak_bytes for p in (*front.points, *front.leaner, front.plain)]
    room = own[-1] - own[0]
    # The compiled peak rises from the lowest prediction to that of the program without a plan, but
    # most of the rise comes early, so that interpolation is wrong by up to a quarter of it.
    peaks = [own[0] + round(room * ((x - own[0]) / room) ** 0.5) for x in own]

    class Compiled(Search):
        def compile(self, place):
            self.known[place] = dataclasses.replace(memory, peak_bytes=peaks[place])

    budget = own[0] + room // 2
    fitting = [p for p, peak in enumerate(peaks) if peak <= budget]
    least = min(front.points[p].extra_work for p in fitting)
    search = Compiled(mlp, ARGS, 0, target("cpu"), front, 2, silent)
    found = search.points[search.run(budget).place]
    assert found.predicted_peak_bytes > own[0]
    assert found.extra_work <= least + 0.1 * front.forward_seconds
    assert len(search.known) <= 1 + 2 + 3


def test_of_equal_peaks_the_least_work_is_compiled_first(front):
    search = Search(mlp, ARGS, 0, target("cpu"), front, 3, silent)
    own = [p.predicted_peak_bytes for p in search.points]
    memory = dataclasses.replace(remat_kit.measure(mlp, *ARGS), peak_bytes=own[-1])
    search.known = {search.plain: memory}
    assert search.choice("min", None) == 0
    # Where the model is no less for either, to compute more is of no use.
    search.points = tuple(
        dataclasses.replace(p, predicted_peak_bytes=max(p.predicted_peak_bytes, own[1]))
        for p in search.points
    )
    assert search.points[0].extra_work > search.points[1].extra_work
    everything = Search(mlp, ARGS, 0, target("cpu"), front, 3, silent, allowed=lambda p: True)
    everything.points, everything.known = search.points, search.known
    assert search.choice("min", None) == everything.choice("free", None) == 1


def test_the_least_memory_is_not_had_at_any_price(front):
    search = Search(mlp, ARGS, 0, target("cpu"), front, 3, silent)
    search.known = {search.plain: remat_kit.measure(mlp, *ARGS)}
    dear = dataclasses.replace(search.points[0], extra_work=4.1 * front.forward_seconds)
    search.points = (dear, *search.points[1:])
    assert search.choice("min", None) == 1
    # A budget that nothing else fits is one.
    limit = dear.predicted_peak_bytes
    assert search.points[1].predicted_peak_bytes > limit
    assert search.choice(limit, limit) == 0


def test_an_offload_that_the_compiler_drops_is_a_warning(monkeypatch):
    def run(search, wanted):
        """The plan that moves most, and a compiler that moves nothing."""
        place = max(range(len(search.points)), key=lambda i: search.points[i].host_bytes)
        assert search.points[place].host_bytes > 0
        memory = remat_kit.measure(scanned, *SCAN_ARGS)
        for which in (place, search.plain):
            search.known[which] = dataclasses.replace(memory, target="h100", host_bytes=0)
        return Answer(place, None, 0)

    monkeypatch.setattr(Search, "run", run)
    with pytest.warns(RematKitWarning, match="left arrays on the device that the plan") as caught:
        plan = remat_kit.plan(scanned, *SCAN_ARGS, budget="min", target="h100", offload=True)
    assert len(caught) == 1
    assert any("left arrays on the device" in note for note in plan.notes)


def test_a_cpu_has_no_host_to_move_to():
    with pytest.raises(UserError, match="a CPU's memory is the host's"):
        remat_kit.plan(scanned, *SCAN_ARGS, budget=0.5, offload=True)


def test_budgets_that_cannot_be_are_said():
    with pytest.raises(UserError, match="arguments alone"):
        remat_kit.plan(mlp, *ARGS, budget="1KiB")
    with pytest.raises(UserError, match=r"least memory that was reached .*its peak is in the"):
        remat_kit.plan(mlp, *ARGS, budget=0.01, compiles=2)
    with pytest.raises(UserError, match="not an amount of memory"):
        remat_kit.plan(mlp, *ARGS, budget=0)
    with pytest.raises(UserError):
        remat_kit.plan(mlp, *ARGS, budget="a lot")
    with pytest.raises(UserError, match="scalar"):
        remat_kit.frontier(lambda x: x, struct(4))


def test_the_command_line_plans(tmp_path, capsys):
    model = ["models/mlp.py:build", "--size", "batch=8192"]
    assert _main.main(["frontier", *model, "--json", str(tmp_path / "front.json")]) == 0
    shown = capsys.readouterr()
    assert "extra FLOPs" in shown.out
    assert "tracing" in shown.err
    front = json.loads((tmp_path / "front.json").read_text())
    assert len(front["points"]) >= 2
    saved = tmp_path / "plan.toml"
    assert _main.main(["plan", *model, "--budget", "min", "--save", str(saved), "--json", "-"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["compiled_peak_bytes"] <= plain["baseline_peak_bytes"]
    assert _recipe.load(str(saved)).policy == _recipe.parse(plain["policy"])
    assert _main.main(["plan", *model, "--budget", "1KiB"]) == 2
    assert "arguments alone" in capsys.readouterr().err
    assert _main.main(["plan", *model, "--budget", "min", "--target", "cpu", "cpu@1GiB"]) == 2
    assert "one chip" in capsys.readouterr().err


@lean
@pytest.mark.slow
def test_a_whole_training_step_is_counted():
    args = [(struct(256, 256), struct(256, 256))] * 4, struct(8192, 256)
    parameters = 8 * 256 * 256 * 4
    loss = remat_kit.plan(mlp, *args, budget="min")
    step = remat_kit.plan(mlp, *args, budget="min", optimizer=optax.adam(1e-3))
    given = step.compiled.argument_bytes - loss.compiled.argument_bytes
    assert 2 * parameters <= given <= 2 * parameters + 64  # two moments, and a count of steps
    # What is donated needs no room of its own for the result.
    assert step.compiled.alias_bytes >= 3 * parameters
    assert loss.peak_phase in ("recompute", "backward")
    assert step.to_json()["peak_phase"] == step.peak_phase
    assert step.baseline.peak_bytes > step.compiled_peak_bytes

    few = args[0], struct(8, 256)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    small = remat_kit.plan(mlp, *few, budget="min", optimizer=clipped)
    # All gradients are there when the norm is known, whatever was recomputed.
    assert small.peak_phase == "update"
    assert any("update" in note for note in small.notes)

    front = remat_kit.frontier(mlp, *args, optimizer=optax.adam(1e-3))
    assert front.argument_bytes == step.compiled.argument_bytes


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(UserError, match=r"optax\.adam"):
        remat_kit.plan(mlp, *ARGS, budget="min", optimizer="adam")
    with pytest.raises(UserError, match="one argument"):
        remat_kit.plan(mlp, *ARGS, budget="min", argnums=(0, 1), optimizer=optax.sgd(0.1))


def test_the_command_line_counts_the_step(capsys, tmp_path):
    model = ["frontier", "models/mlp.py:build", "--json", "-"]
    assert _main.main([*model, "--optimizer", "adamw"]) == 0
    step = json.loads(capsys.readouterr().out)
    assert _main.main(model) == 0
    loss = json.loads(capsys.readouterr().out)
    assert step["argument_bytes"] > 2 * loss["argument_bytes"]
    assert _main.main([*model, "--optimizer", "admaw"]) == 2
    assert "adamw" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_a_loss_that_captures_an_array(kind):
    mask = kind(np.tri(4, dtype=np.float32))

    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.sin(x @ w) * mask) * mask)

    args = jnp.full((4, 4), 0.3), jnp.full((4, 4), 0.5)
    found = remat_kit.plan(loss, *args, budget="min")
    front = remat_kit.frontier(loss, *args)
    for policy in (found, front.policy(front.points[0])):
        expected, got = (jax.grad(f)(*args) for f in (loss, remat_kit.policy(policy)(loss)))
        np.testing.assert_array_equal(got, expected)


# -- functions with regions of their own --------------------------------------------------------


def step_of(loss):
    return lambda ws, x: jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))


@lean
@pytest.mark.parametrize("what", [lambda loss: loss, step_of], ids=["loss", "step"])
@pytest.mark.parametrize("budget", ["min", 1.0, pytest.param("free", marks=pytest.mark.slow)])
def test_a_plan_of_a_function_with_regions_has_the_figures_of_the_program_that_it_runs(
    budget, what
):
    fn = what(remat_kit.policy("nothing", at="block_*")(mlp))
    args = ([(struct(16, 64), struct(64, 16))] * LAYERS, struct(4096, 16))
    found = remat_kit.plan(fn, *args, budget=budget)
    assert (
        found.compiled_peak_bytes
        == remat_kit.measure(remat_kit.policy(found)(fn), *args).peak_bytes
    )
    assert found.baseline.peak_bytes == remat_kit.measure(fn, *args).peak_bytes
    (note,) = (note for note in found.notes if "regions of its own" in note)
    is_plain = all(line.endswith("plain") for line in found.lines if ":" in line)
    assert ("leaves them as they are" in note) == is_plain
    assert not any("regions of its own" in n for n in remat_kit.plan(mlp, *ARGS, budget=1.0).notes)
