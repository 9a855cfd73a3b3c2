"""Differences of two gradients: what is computed twice, moved and gone."""

import json
from collections import Counter

import jax.numpy as jnp
import pytest
from report_programs import MLP, RESNET, W, X, gpt, loss, mlp, resnet, rich_text

import remat_kit
from remat_kit import (
    NotDifferentiableError,
    diff,
    inspect,
    primitive,
    recompute,
)


def test_one_relu_of_each_layer_is_computed_twice_and_feeds_its_gradient(implementation):
    before, args = mlp.build(**MLP)
    after, _ = mlp.build(recompute(primitive("max")), **MLP)
    found = diff(before, after, *args)
    assert sorted((d.primitive, d.module, d.count) for d in found.duplicates) == [
        ("max", "MLP/block_0", 1),
        ("max", "MLP/block_1", 1),
    ]
    for d in found.duplicates:
        (fed,) = d.feeds
        assert fed.startswith("dot_general %")
        assert fed.endswith(f"(gradient of {d.module}/dense)")
        assert d.source.endswith("mlp.py:22")
        assert f"⟲ {d.twin} max f32[4,6]" in str(found)
    counts = found.counts()
    assert (counts["added"], counts["removed"], counts["moved"]) == (2, 0, 0)


def test_the_convolutions_feed_their_normalizations(implementation):
    before, args = resnet.build(**RESNET)
    after, _ = resnet.build(recompute(primitive("conv_general_dilated")), **RESNET)
    found = diff(before, after, *args)
    assert len(found.duplicates) == 8 * 2 + 3
    for d in found.duplicates:
        assert d.primitive == "conv_general_dilated"
        block, _, name = d.module.rpartition("/")
        norm = f"{block}/{name.replace('conv', 'bn')}"
        assert d.feeds
        assert all(f.endswith(f"(gradient of {norm})") for f in d.feeds), d


def test_without_a_change_there_is_no_difference(implementation):
    model, args = gpt.build("dots", size="tiny", batch=2, scan=True)
    found = diff(model, model, *args)
    assert set(Counter(x.sign for x in found.lines)) == {" "}
    assert found.duplicates  # the policy's own, in both


def test_duplicates_are_those_of_inspect(implementation):
    before, args = gpt.build(size="tiny", batch=2, layers=3, scan=True)
    after, _ = gpt.build("nothing", size="tiny", batch=2, layers=3, scan=True)
    found = diff(before, after, *args)
    report = inspect(after, *args)
    assert sum(d.count for d in found.duplicates) == sum(r.count for r in report.recomputed)
    assert sum(d.flops for d in found.duplicates) == report.recomputed_flops


def test_what_moves_and_what_goes():
    def other(w, x):
        return jnp.sum(jnp.sin(jnp.tanh(x @ w) @ w))

    found = diff(loss, other, W, X)
    assert {x.op.primitive for x in found.lines if x.sign == "-"} >= {"exp"}
    assert {x.op.primitive for x in found.lines if x.sign == "+"} >= {"tanh"}
    cosine = [x for x in diff(loss, remat_kit.policy("nothing")(loss), W, X).lines if x.sign == "~"]
    assert [x.op.primitive for x in cosine] == ["cos"]  # forward before, backward after


def test_lines_name_their_operands():
    text = diff(loss, loss, W, X, full=True).text()
    assert "%1 = dot_general f32[8,16] x w" in text
    assert "%2 = exp f32[8,16] %1" in text
    assert "report_programs.py:" in text


def test_a_difference_prints_short_or_full():
    after = remat_kit.policy("nothing")(loss)
    found = diff(loss, after, W, X, labels=("none", "nothing"))
    short, full = str(found), found.text(full=True)
    assert short.splitlines()[0] == full.splitlines()[0]
    assert short.startswith("none → nothing: 3 operations computed twice")
    assert len(full.splitlines()) >= len(found.lines)
    assert "…" not in full
    assert "\x1b" not in short
    assert "⟲" in rich_text(found, force_terminal=True)
    assert found._repr_html_().startswith('<div class="remat-kit"><pre')
    plain = json.loads(json.dumps(found.to_json()))
    assert [d["primitive"] for d in plain["duplicates"]] == ["dot_general", "exp", "dot_general"]
    assert plain["duplicates"][0]["feeds"]
    assert diff(loss, after, W, X, full=True).text() == diff(loss, after, W, X).text(full=True)


def test_a_difference_of_something_else_is_an_error():
    with pytest.raises(NotDifferentiableError, match="`diff`"):
        diff(loss, lambda w, x: w, W, X)
