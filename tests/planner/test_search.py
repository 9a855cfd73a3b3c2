"""What fits, to the byte; which budgets there are; and whether an optimizer is counted."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest

import remat_kit
from remat_kit import testing
from remat_kit._chip import compile as _compile
from remat_kit._chip import target as _target
from remat_kit._cli import commands as _commands
from remat_kit._cli import main as _main
from remat_kit._errors import UnknownNameError, UserError
from remat_kit._planner import search as _search
from remat_kit._program import step as _step


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x)


ARGS = [struct(48, 48)] * 6, struct(4096, 48)


def build(batch=256, policy=None):
    layer = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
    layer = layer if policy is None else remat_kit.policy(policy)(layer)

    def loss(ws, x):
        for w in ws:
            x = layer(x, w)
        return jnp.mean(x)

    return loss, ([struct(48, 48)] * 3, struct(batch, 48))


# -- budgets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ("50%", 0.5),
        (" 12.5 % ", 0.125),
        ("100%", 1.0),
        ("0.5", 0.5),
        (0.5, 0.5),
        (1.0, 1.0),
        ("1e9", 10**9),
        (2e9, 2 * 10**9),
        ("14GiB", 14 * 2**30),
        ("1.5MiB", 3 * 2**19),
        ("4096", 4096),
        (4096, 4096),
        (jnp.int32(4096).item(), 4096),
        (" min", "min"),
        ("fit", "fit"),
    ],
)
def test_forms_of_a_budget(given, means):
    found = _search.parsed_budget(given)
    assert (found, type(found)) == (means, type(means))


WRONG = ["1.5", "banana", "None", "-1", "0", "0.0", "nan", "inf", "-inf", "150%", "0%", "-5%", ""]
WRONG += ["%", "9" * 5000, "1e999", "minimum", "1GiBB", "5 %%"]


@pytest.mark.parametrize("budget", [*WRONG, 1.5, None, True, float("nan"), -3, 0, [1], b"1", 2j])
def test_what_is_no_budget_is_said_before_anything_is_traced(budget):
    def never(w):
        raise AssertionError("traced")

    with pytest.raises(UserError) as caught:
        remat_kit.plan(never, struct(8), budget=budget)
    assert "budget" in caught.value.message
    assert all(form in caught.value.hint for form in ("14GiB", "0.5", "50%", "min", "free", "fit"))
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("optimizer", [None, optax.adam(1e-3)])
def test_less_than_the_arguments_is_said_before_anything_is_traced(optimizer):
    def never(w):
        raise AssertionError("traced")

    with pytest.raises(UserError, match=r"alone take 4(\.0\d)? KiB|alone take 12 KiB"):
        remat_kit.plan(never, struct(1024), budget="1KiB", optimizer=optimizer)


def test_the_command_line_says_it_before_the_model_is_loaded(capsys):
    for budget in ("1.5", "banana", "None", "-1", "0", "150%"):
        assert _main.main(["plan", "no/such/file.py:build", "--budget", budget]) == 2
        shown = capsys.readouterr().err
        assert f"--budget {budget}" in shown
        assert '"50%"' in shown
        assert "no/such" not in shown


# -- few compiles -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def least():
    return remat_kit.plan(loss, *ARGS, budget="min")


@pytest.mark.parametrize("compiles", [1, 2, 3])
def test_what_can_be_reached_is_reached_with_few_compiles(least, compiles):
    for budget in (least.compiled_peak_bytes, least.compiled_peak_bytes * 21 // 20):
        found = remat_kit.plan(loss, *ARGS, budget=budget, compiles=compiles)
        assert found.compiled_peak_bytes <= budget


def test_one_compile_is_kept_for_the_leanest(least, monkeypatch):
    """Predictions that promise too much must not use up all compiles."""
    honest = _search.Search.predicted

    def promising(self, place):
        found = honest(self, place)
        return found if place in self.known else min(found, self.limit(budget) or found)

    budget = least.compiled_peak_bytes
    monkeypatch.setattr(_search.Search, "predicted", promising)
    monkeypatch.setattr(_search.Search, "smallest", lambda s, p: (honest(s, p), 0.0))
    assert remat_kit.plan(loss, *ARGS, budget=budget, compiles=3).compiled_peak_bytes <= budget


def test_numbers_that_look_equal_are_given_to_the_byte(least):
    peak = least.compiled_peak_bytes
    with pytest.raises(UserError) as caught:
        remat_kit.plan(loss, *ARGS, budget=peak - 1, compiles=1)
    assert f"{peak - 1:,} bytes" in caught.value.message
    assert f"{peak:,} bytes" in caught.value.message
    with pytest.raises(testing.CheckError, match=f"needs {peak_of(loss):,} bytes"):
        testing.assert_peak_at_most(loss, *ARGS, target="cpu", peak=peak_of(loss) - 1)


def peak_of(fn):
    return remat_kit.measure(fn, *ARGS).peak_bytes


# -- what fits --------------------------------------------------------------------------------


@pytest.mark.parametrize("over", [-1, 0, 1, 700])
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_fits_and_headroom_are_one_comparison(platform, over):
    chip = dataclasses.replace(_target.target("cpu"), platform=platform, memory_bytes=10**6)
    names = ("alias", "temp", "generated_code", "host_argument", "host_output", "host_temp")
    stats = {f"{n}_size_in_bytes": 0 for n in (*names, "host_alias")}
    stats |= {"argument_size_in_bytes": 10**6 + over, "output_size_in_bytes": 0}
    stats |= {"peak_memory_in_bytes": 0}
    answer = {"memory": stats, "hlo": "", "compile_seconds": 0.0}
    memory = _compile._memory(answer, chip, False, (0, 0))
    assert memory.headroom_bytes == -over
    assert memory.fits == (over <= 0)
    if over == 1:
        assert "1,000,001 bytes" in str(memory)


@pytest.mark.parametrize("needs", ["15.75G", "15.7G", "20G", None])
def test_a_refused_program_has_no_room_left(needs):
    chip = dataclasses.replace(_target.target("cpu"), memory_bytes=int(15.75 * 2**30))
    how = "out of memory on hbm" if needs is None else f"Used {needs} of 15.75G hbm"
    memory = _compile._memory({"refused": f"RESOURCE_EXHAUSTED: {how}"}, chip, False, (0, 0))
    assert not memory.fits
    assert (memory.headroom_bytes is None) if needs is None else memory.headroom_bytes < 0


def test_a_program_that_runs_out_while_it_runs_has_no_headroom():
    memory = dataclasses.replace(remat_kit.measure(loss, *ARGS), fits=False)
    assert memory.headroom_bytes is None
    assert "needs more" in str(memory)


@pytest.mark.parametrize(
    ("size", "mib"), [("1KiB", 1), ("700KiB", 1), ("1MiB", 1), ("1.5MiB", 2), ("2MiB", 2)]
)
def test_a_tpu_is_told_of_no_less_memory_than_it_has(size, mib):
    chip = remat_kit.target(f"tpu-v5e@{size}")
    assert dict(chip.compiler_options)["xla_tpu_max_hbm_size_mib"] == str(mib)


def test_a_tpu_is_compared_to_the_byte():
    if not remat_kit.target("tpu-v5e").available:
        pytest.skip("libtpu is not installed")
    args = [struct(64, 64)], struct(2048, 64)
    peak = remat_kit.measure(loss, *args, target="tpu-v5e@2MiB").peak_bytes
    for size in (2**21, 2**21 - 1, 2**20 + 1, peak, peak - 1):
        # The compiler sets 1 MiB apart for itself, and may refuse what the figures would allow.
        memory = remat_kit.measure(loss, *args, target=f"tpu-v5e@{size}")
        assert memory.fits == (memory.headroom_bytes >= 0)
        assert memory.fits <= (size >= peak)


def test_several_targets_give_several_answers():
    found = remat_kit.measure(loss, *ARGS, target=["cpu", "cpu@1MiB"])
    assert [(m.target, m.fits) for m in found] == [("cpu", True), ("cpu@1MiB", False)]
    assert remat_kit.measure(loss, *ARGS, target=("cpu",))[0].fits
    for wrong in ([], 3, None):
        with pytest.raises(UserError, match="names no chip"):
            remat_kit.measure(loss, *ARGS, target=wrong)
    with pytest.raises(UserError, match="a chip has a name") as caught:
        remat_kit.plan(loss, *ARGS, budget="min", target=["cpu"])
    assert "measure" in caught.value.hint


def test_measure_shows_a_policy_that_takes_more_than_none(run, monkeypatch):
    whole = remat_kit.measure

    def measure(fn, *args, **how):
        memory = whole(fn, *args, **how)
        more = 3 * memory.temp_bytes if getattr(fn, "raised", False) else 0
        return dataclasses.replace(memory, temp_bytes=memory.temp_bytes + more)

    monkeypatch.setattr(_compile, "measure", measure)
    losses = {"none": build()}
    fn, args = build()
    wrapped = lambda *a: fn(*a)  # noqa: E731
    wrapped.raised = True
    losses["nothing"] = wrapped, args
    monkeypatch.setattr(_commands._Job, "losses", lambda self: losses)
    out = run("measure", MODEL, "--policy", "nothing")
    assert "lint: nothing: compiled for cpu the policy needs" in out
    plain = json.loads(run("measure", MODEL, "--policy", "nothing", "--json", "-"))
    assert [x["code"] for p in plain["policies"] for x in p["lints"]] == ["region-raises-peak"]


# -- the optimizer ----------------------------------------------------------------------------

MODEL = f"{__file__}:build"
PARAMETERS = 3 * 48 * 48 * 4


@pytest.fixture
def run(capsys):
    def run(*argv):
        assert _main.main(list(argv)) == 0
        return capsys.readouterr().out

    return run


def test_adamw_is_what_optax_makes_of_it():
    params = {"a": struct(31, 7), "b": struct(5, dtype=jnp.bfloat16)}
    assert _step.adamw_bytes((params,), 0, "measure") == _step.state_bytes(
        optax.adamw(1e-3), (params,), 0, "measure"
    )
    both = (struct(3), struct(4))
    assert _step.adamw_bytes(both, (0, 1), "measure") == 2 * 7 * 4 + 4


def test_figures_say_that_no_optimizer_is_counted():
    fn, args = build()
    added = 2 * PARAMETERS + 4
    memory = remat_kit.measure(fn, *args)
    assert memory.adamw_bytes == added
    answers = [
        memory,
        remat_kit.fit(build, batches=[64]),
        remat_kit.max_batch(build, target="cpu@1MiB"),
        remat_kit.inspect(fn, *args, target="cpu"),
    ]
    for answer in answers:
        assert "no optimizer is counted" in str(answer)
        assert str(added) in str(answer)
        assert any(str(added) in note for note in answer.to_json()["notes"])


def test_a_whole_step_has_its_optimizer_in_it():
    fn, args = build()
    step = lambda ws, x: jax.tree.map(jnp.subtract, ws, jax.grad(fn)(ws, x))  # noqa: E731
    assert remat_kit.measure(step, *args, argnums=None).adamw_bytes is None
    with pytest.raises(UserError, match="whole step has its optimizer"):
        remat_kit.measure(step, *args, argnums=None, optimizer=optax.sgd(1.0))


def test_the_optimizer_is_counted_where_it_is_given():
    fn, args = build()
    adamw = optax.adamw(1e-3)
    step, given, donated = _step.training_step(fn, adamw, args, 0, "measure")
    whole = remat_kit.measure(step, *given, argnums=None, donate_argnums=donated)
    state = 2 * PARAMETERS + 4
    memory = remat_kit.measure(fn, *args, optimizer=adamw)
    assert memory.peak_bytes == whole.peak_bytes
    assert memory.optimizer_bytes == state
    assert memory.alias_bytes >= state + PARAMETERS
    cell = remat_kit.fit(build, batches=[256], optimizer=adamw).cells[0]
    assert cell.memory.peak_bytes == memory.peak_bytes
    inspected = remat_kit.inspect(fn, *args, target="cpu", optimizer=adamw)
    assert inspected.memory["cpu"].peak_bytes == memory.peak_bytes
    assert "no optimizer" not in str(inspected)
    full = remat_kit.max_batch(build, target="cpu@1MiB", optimizer=adamw)
    assert full.best.memory.optimizer_bytes == state
    assert full.best.memory.alias_bytes >= state + PARAMETERS
    assert not any("no optimizer" in note for note in full.notes)


def test_commands_take_an_optimizer(run):
    fn, args = build()
    want = remat_kit.measure(fn, *args, optimizer=optax.adamw(1e-3)).peak_bytes
    for name in ("adamw", "optax.adamw(1e-3)", "adamw(1e-3, b1=0.9)"):
        plain = json.loads(run("measure", MODEL, "--optimizer", name, "--json", "-"))
        assert plain["policies"][0]["memory"]["cpu"]["peak_bytes"] == want
    plain = json.loads(
        run("inspect", MODEL, "--target", "cpu", "--optimizer", "adamw", "--json", "-")
    )
    assert plain["policies"][0]["memory"]["cpu"]["peak_bytes"] == want
    plain = json.loads(run("fit", MODEL, "--batch", "256", "--optimizer", "adamw", "--json", "-"))
    assert plain["cells"][0]["peak_bytes"] == want
    for command in (["measure"], ["fit", "--batch", "64"], ["max-batch", "--target", "cpu@1MiB"]):
        assert str(2 * PARAMETERS + 4) in run(command[0], MODEL, *command[1:])


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os')", "optax.adamw(open('x'))", "adamx", "a.b.adamw", "adamw()()", "1"),
        *("(" * 999, "optax.adamw(1e-3).init", "lambda: 1", "", "optax.adamw(bogus=1)"),
        "adamw(**{})",
    ],
)
def test_nothing_of_an_optimizers_text_is_run(text, capsys):
    with pytest.raises((UserError, UnknownNameError)):
        _commands._optimizer(text)
    assert _main.main(["measure", "no/such.py:build", f"--optimizer={text}"]) == 2
    assert "no/such" not in capsys.readouterr().err
