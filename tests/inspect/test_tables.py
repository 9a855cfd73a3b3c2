"""The tables of a report: names of policies, repeated blocks, long tables, plain and rich text."""

import re

import jax
import jax.numpy as jnp
from report_programs import W, X, gpt, loss, rich_text, tower

import remat_kit
from remat_kit import (
    dots,
    inspect,
    save,
)
from remat_kit._inspect.tables import policy_text


def test_names_of_policies():
    assert policy_text(None) == "none"
    assert inspect(loss, W, X, policy=save(dots)).policy == "save(dots)"
    assert inspect(loss, W, X, label="mine").policy == "mine"


def test_a_plan_has_a_short_name():
    """Its text has a line for each block, which is no cell of a table."""
    plan, other = (remat_kit.plan(f, W, X, budget="min") for f in (loss, tower))
    report = inspect(loss, W, X, policy=plan)
    assert re.fullmatch(r"plan [0-9a-f]{6}", report.policy)
    assert report.policy == policy_text(plan.policy) != policy_text(other)
    assert report.policy in str(report)
    assert plan.program not in str(report)


def test_repeated_blocks_are_rolled_up_in_tables_alone():
    model, args = gpt.build("dots", size="tiny", batch=2, layers=3)
    report = inspect(model, *args)
    text = str(report)
    assert "GPT/block_{0..2}/mlp/up ×3" in text
    assert "GPT/block_1/" not in text
    modules = {r["module"] for r in report.to_json()["saved"]}
    assert {f"GPT/block_{i}/mlp/up" for i in range(3)} <= modules


def test_long_tables_are_cut():
    def many(w, x):
        for i in range(60):
            with jax.named_scope(f"part{chr(97 + i % 26)}{i}x"):
                x = jnp.sin(x @ w)
        return x.sum()

    text = str(inspect(many, W, X))
    assert "… and " in text
    assert " more kinds of values" in text


def test_plain_text_is_plain_and_rich_has_the_same_words():
    report = inspect(loss, W, X, policy="dots", target="cpu")
    plain = str(report)
    assert "\x1b" not in plain
    coloured = rich_text(report, force_terminal=True)
    for word in ("kept for the backward pass: 1 KiB", "save(dots)", "computed twice", "headroom"):
        assert word in plain
        assert word in coloured
