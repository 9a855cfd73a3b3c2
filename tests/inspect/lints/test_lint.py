"""All lints together: sound programs have none, and reports show them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from lint_programs import (
    SIZES,
    TOWER,
    codes,
    fixed,
    only,
    tower,
)
from zoo import load

from remat_kit import Comparison, Lint, RematKitWarning, inspect
from remat_kit._inspect.lints.lint import raised_peak
from remat_kit._units import format_bytes

# Many of the programs are made to have a policy without an effect, which is a warning too.
pytestmark = pytest.mark.filterwarnings("ignore::remat_kit.RematKitWarning")


def test_a_policy_that_raises_the_peak():
    report = inspect(tower, *TOWER, policy="nothing", at="layer_*", target="cpu")
    memory = report.memory["cpu"]
    less = dataclasses.replace(memory, temp_bytes=memory.temp_bytes // 2)
    lint = raised_peak(memory, less)
    assert lint is not None
    assert lint.bytes == memory.temp_bytes - memory.temp_bytes // 2
    assert f"{format_bytes(memory.temp_bytes)} of temporaries" in lint.message
    assert raised_peak(less, memory) is None
    assert raised_peak(memory, None) is None
    none = dataclasses.replace(inspect(tower, *TOWER), memory={"cpu": less})
    both = Comparison((report, none))
    assert [codes(r) for r in both.reports] == [[], ["region-raises-peak"]]
    assert "region-raises-peak" in str(both)
    again = Comparison(both.reports)
    assert codes(again.reports[1]) == ["region-raises-peak"]


@pytest.mark.parametrize("policy", [None, "nothing", "dots"])
@pytest.mark.parametrize(("name", "size"), [(n, s) for n, sizes in SIZES.items() for s in sizes])
def test_models_have_no_lint(name, size, policy):
    fn, args = load(name).build(policy, **size)
    assert inspect(fn, *args).lints == ()


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", ["gpt", "gpt_nnx"])
def test_models_with_dropout(name, scan):
    fn, args = load(name).build(size="tiny", batch=2, dropout=0.1, scan=scan)
    before = inspect(fn, *args)
    assert set(codes(before)) == {"dropout-mask-saved"}
    lint = before.lints[0]
    assert lint.module.endswith("attn/dropout")
    after = inspect(fixed(lint, fn), *args)
    assert lint.module not in {x.module for x in after.lints}
    assert after.saved_bytes < before.saved_bytes


def test_whole_gpt_as_one_region():
    fn, args = load("gpt").build(size="tiny", batch=2)
    lint = only(inspect(fn, *args, policy="nothing"), "whole-loss-region")
    assert lint.fix == 'remat_kit.policy("nothing", at="*/block_*")'
    assert codes(inspect(fixed(lint, fn), *args)) == []


def test_reports_show_lints():
    report = inspect(tower, *TOWER, policy="nothing")
    (lint,) = report.lints
    assert isinstance(lint, Lint)
    plain = json.loads(json.dumps(report.to_json()))["lints"]
    assert plain == [lint.to_json()]
    assert plain[0].keys() == {"code", "message", "fix", "module", "source", "bytes"}
    for shown in (str(report), str(Comparison((report, inspect(tower, *TOWER))))):
        assert "whole-loss-region" in shown
        assert lint.fix in shown
    assert str(lint).endswith(f"fix: {lint.fix}")
    sound = inspect(tower, *TOWER, policy="nothing", at="layer_*")
    for shown in (sound, Comparison((sound,))):
        assert "lints" not in [table.title for table in shown.tables()[1:]]


def test_inspect_knows_what_a_step_needs_without_the_policy():
    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum(jnp.sin(jnp.tanh(x @ w))))(w)

    args = jnp.ones((64, 64)), jnp.ones((4096, 64))
    with pytest.warns(RematKitWarning, match="the policy on the step saves no memory"):
        report = inspect(step, *args, policy="everything", target="cpu")
    plain = inspect(step, *args, target="cpu").memory["cpu"].temp_bytes
    more = report.memory["cpu"].temp_bytes - plain
    assert ("region-raises-peak" in codes(report)) == (more > 0.01 * plain)
