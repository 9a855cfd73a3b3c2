"""What recomputing a module would save, beside what it saves once it is done."""

import re

import pytest
from compiled_programs import MERGES, gpt

from remat_kit import inspect
from remat_kit._compiled.peak import BACKWARD


def test_what_recomputing_would_do_and_what_it_does():
    size = {"size": "tiny", "batch": 16, "layers": 6, "width": 64, "vocab": 32, "seq": 64}
    model, args = gpt.build(**size)
    before = inspect(model, *args, target="cpu")
    found = before.readings["cpu"].what_if
    block = next(c for c in found if c.module == "GPT/block_*")
    assert block.at == "GPT/block_*"
    assert block.policy == "recompute(module('GPT/block_*'))"
    assert 0 < block.saved_bytes < before.readings["cpu"].peak.bytes
    assert block.next_peak_bytes == before.readings["cpu"].peak.bytes - block.saved_bytes
    assert 0.5 < block.extra_flops_fraction < 1
    assert "GPT/block_*: -" in str(block)
    after = block.check(model, *args, target="cpu")
    saved = before.memory["cpu"].peak_bytes - after.peak_bytes
    # The model keeps the schedule, the compiler makes a new one.
    assert MERGES or saved == pytest.approx(block.saved_bytes, rel=0.35)
    inner = next(c for c in found if c.module == "GPT/block_*/mlp")
    if MERGES:  # both are held up by the same next peak, in the backward pass of an mlp
        assert inner.saved_bytes <= block.saved_bytes
        assert (inner.next_phase, block.next_phase) == (BACKWARD, BACKWARD)
        assert re.fullmatch(r"GPT/block_\d/mlp", inner.next_module)
        assert f"{block.next_module}/".startswith(f"{inner.next_module}/")
    else:
        assert inner.saved_bytes < block.saved_bytes
    assert inner.extra_flops_fraction < block.extra_flops_fraction
    assert before.to_json()["counterfactuals"]["cpu"][0]["module"] == found[0].module


def test_the_best_comes_first():
    model, args = gpt.build(size="tiny", batch=16, layers=4, width=64, scan=True)
    found = inspect(model, *args, target="cpu").readings["cpu"].what_if
    saved = [c.saved_bytes for c in found]
    assert saved == sorted(saved, reverse=True)
    assert any(c.at == "GPT/block_scan" for c in found)
