"""What the compiler made of each region."""

import pytest
from compiled_programs import TARGETS, gpt, needs, report

import remat_kit
from remat_kit import inspect


@pytest.mark.parametrize("target", TARGETS)
def test_a_region_that_the_compiler_kept(target):
    model, args = gpt.build("nothing", size="tiny", batch=4, layers=3)
    found = inspect(model, *args, target=needs(target)).readings[target].regions
    assert sorted(v.module for v in found) == [f"GPT/block_{i}" for i in range(3)]
    natural = inspect(gpt.build(size="tiny", batch=4, layers=3)[0], *args)
    kept = inspect(model, *args)
    for v in found:
        assert v.verdict == "effective", v
        assert v.kept_fraction > 0.75
        assert v.recomputed_flops > 0
        assert v.recomputed_seconds > 0
    inside = [
        sum(r.bytes for r in x.saved if r.module.startswith("GPT/block_")) for x in (natural, kept)
    ]
    assert sum(v.saved_bytes for v in found) == inside[0] - inside[1] > 0


@pytest.mark.filterwarnings("ignore::remat_kit.RematKitWarning")
@pytest.mark.parametrize("target", ["h100", "tpu-v5e"])
def test_a_region_that_the_compiler_undid(target):
    model, args = gpt.build(size="tiny", batch=4, layers=3)
    wrong = remat_kit.policy("nothing", at="*/block_*", prevent_cse=False)(model)
    found = inspect(wrong, *args, target=needs(target)).readings[target].regions
    assert {v.verdict for v in found} == {"undone by CSE"}
    assert all("prevent_cse" in v.message for v in found)


@pytest.mark.parametrize("target", TARGETS)
def test_a_region_in_a_loop(target):
    model, args = gpt.build("nothing", size="tiny", batch=4, layers=3, scan=True)
    (found,) = inspect(model, *args, target=needs(target)).readings[target].regions
    assert (found.module, found.verdict) == ("GPT/block_scan", "effective")


def test_a_region_that_recomputes_nothing():
    model, args = gpt.build("everything", size="tiny", batch=4)
    found = inspect(model, *args, target="cpu").readings["cpu"].regions
    assert {v.verdict for v in found} == {"recomputes nothing"}
    assert {v.saved_bytes for v in found} == {0}


@pytest.mark.filterwarnings("ignore::remat_kit.RematKitWarning")
def test_an_offload_that_was_dropped():
    model, args = gpt.build(size="tiny", batch=64, layers=2, width=128, seq=64)
    wrong = remat_kit.policy("offload_dots", at="*/block_*", prevent_cse=False)(model)
    found = inspect(wrong, *args, target=needs("h100"))
    assert found.memory["h100"].host_bytes == 0
    assert {v.verdict for v in found.readings["h100"].regions} == {"offload dropped"}


def test_without_a_region_there_is_no_verdict():
    assert report("cpu").readings["cpu"].regions == ()
