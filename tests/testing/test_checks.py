"""What other projects' tests call: does a step fit, is it the same step, has it grown?"""

import re

import jax
import jax.numpy as jnp
import pytest
from shapes import struct

import remat_kit
from remat_kit import _units, testing
from remat_kit._errors import CheckError, NotDifferentiableError, UserError
from remat_kit._units import format_bytes

MIB = 2**20


def tower(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = x + jnp.sin(jnp.tanh(x @ w)) @ w.T
    return jnp.mean(x**2)


WEIGHTS, X = [struct(64, 256)] * 6, struct(1024, 64)


# -- does it fit ------------------------------------------------------------------------------


def test_a_step_that_fits_gives_its_memory():
    peak = remat_kit.measure(tower, WEIGHTS, X, target="cpu").peak_bytes
    for budget in (None, "1GiB", peak):
        memory = testing.assert_fits(tower, WEIGHTS, X, target="cpu", budget=budget)
        assert memory.peak_bytes == peak


def test_a_step_that_does_not_fit_says_what_holds_the_memory_and_what_to_do():
    peak = remat_kit.measure(tower, WEIGHTS, X).peak_bytes
    with pytest.raises(AssertionError) as caught:
        testing.assert_fits(tower, WEIGHTS, X, target="cpu", budget=peak - 1)
    assert isinstance(caught.value, CheckError)
    text = str(caught.value)
    assert f"`assert_fits(..., target='cpu', budget={peak - 1})`: needs" in text
    assert "the budget has" in text
    assert "1 B too much" in text
    kept = remat_kit.inspect(tower, WEIGHTS, X).saved_bytes
    assert f"kept for the backward pass: {format_bytes(kept)}" in text
    assert re.search(r"layer_\*: \d+ × \w+ float32\[1024, 256\]", text)
    assert "policy='nothing', at='layer_*' saves" in caught.value.hint


def test_the_advice_is_what_tracing_says():
    with pytest.raises(CheckError) as caught:
        testing.assert_fits(tower, WEIGHTS, X, target="cpu", budget=1)
    then, now = re.search(r"saves (.*) instead of (.*) \(traced", caught.value.hint).groups()
    report = remat_kit.inspect(tower, WEIGHTS, X, policy="nothing", at="layer_*")
    assert then == _units.format_bytes(report.saved_bytes)
    assert now == _units.format_bytes(remat_kit.inspect(tower, WEIGHTS, X).saved_bytes)


def test_a_policy_that_keeps_nothing_is_not_advised_again():
    with pytest.raises(CheckError) as caught:
        testing.assert_fits(
            tower, WEIGHTS, X, target="cpu", budget=1, policy="nothing", at="layer_*"
        )
    assert "arguments and results take" in caught.value.hint
    assert "donate" in caught.value.hint


def test_a_policy_is_applied():
    plain = testing.assert_fits(tower, WEIGHTS, X, target="cpu")
    kept = testing.assert_fits(tower, WEIGHTS, X, target="cpu", policy="nothing", at="layer_*")
    assert kept.temp_bytes < plain.temp_bytes
    with pytest.raises(CheckError):
        testing.assert_fits(tower, WEIGHTS, X, target="cpu", budget=kept.peak_bytes)
    testing.assert_fits(
        *(tower, WEIGHTS, X),
        target="cpu",
        budget=kept.peak_bytes,
        policy="nothing",
        at="layer_*",
    )


def test_the_budget_is_never_more_than_the_chip():
    with pytest.raises(CheckError, match="the budget has 1 MiB"):
        testing.assert_fits(tower, WEIGHTS, X, target="cpu@1MiB", budget="1GiB")
    with pytest.raises(CheckError, match="the chip has 1 MiB"):
        testing.assert_fits(tower, WEIGHTS, X, target="cpu@1MiB")


def test_what_a_whole_step_saves_is_that_of_its_loss():
    def step(weights, x):
        return jax.tree.map(jnp.subtract, weights, jax.grad(tower)(weights, x))

    memory = testing.assert_fits(step, WEIGHTS, X, target="cpu", argnums=None, donate_argnums=0)
    assert memory.alias_bytes == 6 * 64 * 256 * 4
    with pytest.raises(CheckError, match="kept for the backward pass"):
        testing.assert_fits(step, WEIGHTS, X, target="cpu", budget=1, argnums=None)
    with pytest.raises(CheckError, match="takes no gradient"):
        testing.assert_fits(lambda w, x: w, WEIGHTS, X, target="cpu", budget=1, argnums=None)


def test_the_peak_has_a_bound_of_its_own():
    peak = remat_kit.measure(tower, WEIGHTS, X).peak_bytes
    assert testing.assert_peak_at_most(tower, WEIGHTS, X, target="cpu", peak=peak).fits
    assert not testing.assert_peak_at_most(tower, WEIGHTS, X, target="cpu@1MiB", peak="1GiB").fits
    with pytest.raises(CheckError, match="the peak allowed has"):
        testing.assert_peak_at_most(tower, WEIGHTS, X, target="cpu", peak=peak - 1)


def test_what_the_compiler_refuses_does_not_fit():
    if not remat_kit.target("tpu-v5e").available:
        pytest.skip("the compiler for TPUs is not installed")
    loss, x = lambda w, x: jnp.sum(jnp.sin(jnp.sin(x @ w))), struct(2**20, 512)
    with pytest.raises(CheckError, match="too much") as caught:
        testing.assert_fits(loss, struct(512, 512), x, target="tpu-v5e@1GiB")
    assert "refused by tpu-v5e@1GiB: arguments 2 GiB" in str(caught.value)
    assert "(no module): 2 × cos float32[1048576, 512]" in str(caught.value)
    assert "jax.named_scope" in caught.value.hint
    with pytest.raises(CheckError, match="the peak allowed has 1 GiB"):
        testing.assert_peak_at_most(loss, struct(512, 512), x, target="tpu-v5e@1GiB", peak="1GiB")


@pytest.mark.parametrize("size", ["14 gigs", -1, None])
def test_a_size_that_is_none(size):
    with pytest.raises(UserError, match="is not a size") as caught:
        testing.assert_peak_at_most(tower, WEIGHTS, X, target="cpu", peak=size)
    assert not isinstance(caught.value, AssertionError)
    assert "14GiB" in caught.value.hint


def test_a_fault_of_the_call_is_no_failed_check():
    with pytest.raises(NotDifferentiableError, match="`assert_fits`"):
        testing.assert_fits(lambda x: x, X, target="cpu")
