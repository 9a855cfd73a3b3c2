"""The sentence that opens a report: every figure in it is one of the report's."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from report_programs import W, X, gpt, loss, mlp

import remat_kit
from remat_kit import Comparison, inspect
from remat_kit._chip.memory import Memory
from remat_kit._compiled.peak import Held, Peak
from remat_kit._inspect import headline as _headline
from remat_kit._inspect.headline import Case, compiled_headline, holders
from remat_kit._inspect.whatif import Counterfactual, worthwhile
from remat_kit._units import format_bytes

LONG = {"size": "tiny", "seq": 256, "vocab": 64}


@pytest.fixture(scope="module")
def compiled():
    """A short model of long sequences: its attention scores are most of the peak."""
    model, args = gpt.build(**LONG)
    return inspect(model, *args, target="cpu@20MiB")


def memory(needs, has, fits=None, **rest):
    fits = needs <= has if fits is None else fits
    return Memory(
        **{"target": "chip", "argument_bytes": 10, "output_bytes": 2, "alias_bytes": 0}
        | {"temp_bytes": needs - 12, "code_bytes": 0, "host_bytes": 0, "peak_bytes": needs}
        | {"compiler_peak_bytes": needs, "memory_bytes": has, "fits": fits, "needs_bytes": None}
        | {"compile_seconds": 0.0, "cached": False, "versions": {}, "adamw_bytes": 4}
        | rest
    )


def test_without_a_chip_it_says_what_is_saved_and_where():
    model, args = gpt.build(**LONG)
    report = inspect(model, *args)
    scores = sum(r.bytes for r in report.saved if len(r.shape) == 4 and r.shape[-1] == 256)
    share = f"{100 * scores / report.saved_bytes:.2g} % of them attention scores in 2 blocks"
    assert report.headline.startswith(
        f"The backward pass reads {format_bytes(report.saved_bytes)} of saved activations, {share} "
        "(GPT/block_*/attn); target="
    )


def test_it_says_what_is_needed_and_what_holds_it(compiled):
    needed = format_bytes(compiled.memory["cpu@20MiB"].peak_bytes)
    said = compiled.headline
    assert said.startswith(f"The gradient needs {needed}, and cpu@20MiB has 20 MiB; ")
    peak = compiled.readings["cpu@20MiB"].peak
    scores = sum(h.bytes for h in peak.held if h.shape.endswith("256,256]") and "attn" in h.module)
    assert f"{100 * scores / peak.bytes:.2g} % of its peak, in the " in said
    assert "is attention scores in 2 blocks (GPT/block_*/attn)" in said
    assert '`remat_kit.plan(..., budget="fit", target="cpu@20MiB")` searches' in said
    assert said.endswith("that fits.")


def test_every_rendering_opens_with_it(compiled):
    said = compiled.headline
    assert str(compiled).startswith(said + "\n")
    assert compiled.to_json()["headline"] == said
    pair = Comparison((compiled,), model="small")
    assert str(pair).startswith(pair.headline + "\n")
    assert pair.to_json()["headline"] == pair.headline


def test_a_step_with_an_optimizer_is_a_step():
    model, args = mlp.build()
    report = inspect(model, *args, target="cpu", optimizer=optax.adamw(1e-3))
    assert report.headline.startswith("The step needs ")


def test_the_best_policy_is_named_with_its_price():
    model, args = gpt.build(**LONG)
    lean, _ = gpt.build("nothing", **LONG)
    reports = [
        inspect(f, *args, target=["cpu@1GiB", "cpu@40MiB"], label=label)
        for f, label in ((model, "none"), (lean, "nothing"))
    ]
    both = Comparison(tuple(reports))
    before, after = (r.readings["cpu@40MiB"].estimate.seconds for r in reports)
    needed = format_bytes(reports[1].memory["cpu@40MiB"].peak_bytes)
    price = f"+{100 * (after / before - 1):.2g} % time by the roofline."
    assert both.headline.startswith("Without a policy the gradient needs ")
    assert "and cpu@40MiB has 40 MiB" in both.headline  # the chip where it is tightest
    assert both.headline.endswith(f"`nothing` brings it to {needed} for {price}")


def test_traced_policies_are_compared_by_what_they_save():
    both = Comparison(tuple(inspect(loss, W, X, policy=p) for p in (None, "nothing")))
    assert "`nothing` saves 0 B and recomputes " in both.headline


def test_a_program_that_saves_nothing():
    said = inspect(lambda x: jnp.sum(x), X).headline
    assert said.startswith("The backward pass reads no saved activation; ")


# -- what to do -------------------------------------------------------------------------------


def suggestion(saved, seconds):
    return Counterfactual(
        module="Net/block_*",
        bytes_at_peak=saved,
        saved_bytes=saved,
        extra_flops_fraction=0.5,
        extra_seconds=seconds,
        next_peak_bytes=0,
        next_phase="backward",
        next_module="",
        policy="recompute(module('Net/block_*'))",
        at="Net/block_*",
    )


@pytest.mark.parametrize(
    ("saved", "seconds", "worth"),
    [(300, 0.2, True), (200, 0.2, True), (199, 0.2, False), (2, 0.0, False), (10, 0.0, True)],
)
def test_a_suggestion_must_be_worth_its_price(saved, seconds, worth):
    assert worthwhile(suggestion(saved, seconds), 1000, 1.0) is worth


class FakeReading:
    """The parts of a `Reading` that the advice uses."""

    regions = ()

    def __init__(self, *what_if):
        self.what_if = what_if
        self.estimate = type("Estimate", (), {"seconds": 1.0})
        self.peak = type("Peak", (), {"bytes": 1000})


@pytest.mark.parametrize(
    ("has", "what_if", "wanted"),
    [
        (
            700,
            [suggestion(400, 0.3), suggestion(310, 0.1), suggestion(100, 0.01)],
            "is predicted to bring it to 690 B for +10 % time.",
        ),
        (700, [suggestion(100, 0.01)], "`plan` searches for the fastest schedule that fits."),
        (
            9000,
            [suggestion(400, 0.3), suggestion(100, 0.01)],
            "predicted to lower it by 100 B for +1 % time.",
        ),
        (
            9000,
            [suggestion(400, 0.3)],
            "; nothing cheap is left to recompute, and `remat_kit.policy(",
        ),
        (9000, [suggestion(2, 0.78)], "; nothing cheap is left to recompute."),
        (9000, [], "; nothing cheap is left to recompute."),
    ],
)
def test_advice_for_a_program_alone(has, what_if, wanted):
    case = Case("none", memory(1000, has), 1.0, FakeReading(*what_if))
    assert wanted in compiled_headline([case], plan="plan")


def test_no_recomputation_helps_if_the_arguments_alone_are_too_much():
    case = Case("none", memory(1000, 500, argument_bytes=600), 1.0)
    said = compiled_headline([case], plan="plan")
    assert said.endswith(
        "its arguments and outputs alone take 602 B, which no recomputation lowers."
    )


def test_a_policy_without_an_effect_is_not_praised():
    base = Case("none", memory(1000, 9000), 1.0)
    void = Case("dots", memory(600, 9000), 1.0, void="cse-undone")
    dear = Case("nothing", memory(950, 9000), 1.5)
    assert "does not lower it at a fair price" in compiled_headline([base, void])
    assert "`dots`, `nothing` do not lower it" in compiled_headline([base, void, dear])
    assert "(lint `cse-undone`)" in compiled_headline([void])


def test_a_program_that_the_compiler_refused_without_a_figure():
    refused = memory(1000, 900, fits=False, peak_bytes=None, temp_bytes=None)
    said = compiled_headline([Case("none", refused)], plan="plan")
    assert said.startswith("The gradient needs more than the 900 B of chip; `plan` searches")


# -- what holds the peak ----------------------------------------------------------------------


def held(size, shape="f32[4]", module="", kind="temporary", phase="forward"):
    return Held(size, shape, kind, module, "", phase, "op")


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (
            [held(90, module="params", kind="argument"), held(10)],
            "90 % of its peak, in the backward pass, is arguments",
        ),
        (
            [held(20, module=f"N/block_{i}/mlp/up") for i in range(4)] + [held(20)],
            "80 % of its peak, in the backward pass, is activations in 4 blocks (N/block_*/mlp/up)",
        ),
        (
            [held(20, module=f"N/block_{i}/{m}") for i in range(2) for m in ("a", "b")],
            "all of its peak, in the backward pass, is activations in 2 blocks (N/block_*)",
        ),
        (
            [held(30, "f32[8,99]", "N/head"), held(30, "f32[8,99]", "loss"), held(40, "f32[3]")],
            "60 % of its peak, in the backward pass, is 2 arrays f32[8,99] of N/head and of loss",
        ),
        (
            [held(60, "f32[8,99]", "N/block_3/up", phase="backward"), held(40)],
            "60 % of its peak, in the backward pass, is cotangents in N/block_3/up",
        ),
    ],
)
def test_the_largest_group(values, wanted):
    peak = Peak(100, 100, "backward", 1, 2, "N", tuple(values))
    assert holders(peak) == wanted


# -- plans and batches ------------------------------------------------------------------------


def test_a_plan_says_what_it_brings():
    def tower(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8
    plan = remat_kit.plan(
        tower, weights, jax.ShapeDtypeStruct((4096, 64), jnp.float32), budget="min", compiles=1
    )
    before, after = (format_bytes(m.peak_bytes) for m in (plan.baseline, plan.compiled))
    assert re.fullmatch(
        rf"Without a plan the gradient needs {before} of the .* of cpu; this plan brings it to "
        rf"{after} for \+[\d.]+ % time by the roofline; its peak is then in the \w+ pass\.",
        plan.headline,
    )
    assert plan.to_json()["headline"] == plan.headline


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([("c", "none", 0), ("c", "dots", 0)], "On c no batch fits."),
        ([("c", "none", 4), ("c", "dots", 4)], "On c batch 4 fits without a policy, and no policy"),
        ([("c", "none", 0), ("c", "dots", 4)], "batch 4 fits with `dots`, and none without"),
        ([("c", "none", 8), ("c", "none", 4), ("d", "none", 2)], "On d batch 2 fits"),
    ],
)
def test_the_largest_batches(rows, wanted):
    assert wanted in _headline.batches_headline(rows)
