"""A compiled program read back beside its traced program."""

import dataclasses
import time

import jax.numpy as jnp
import pytest
from compiled_programs import TARGETS, gpt, needs
from zoo import load

import remat_kit
from remat_kit import inspect
from remat_kit._chip.compile import compile_program
from remat_kit._inspect.reading import TracedReading, read
from remat_kit._inspect.residuals import residuals_of
from remat_kit._program.steps.gradient import trace_gradient
from remat_kit._program.steps.losses import LossGradient


@pytest.mark.parametrize("target", TARGETS)
def test_duplicates_in_the_compiled_program(target):
    model, args = gpt.build("nothing", size="tiny", batch=4, layers=3, scan=True)
    found = inspect(model, *args, target=needs(target)).to_json()["hlo_recomputed"][target]
    assert {r["state"] for r in found} <= {"kept", "fused", "removed"}
    up = [r for r in found if r["module"] == "GPT/block_scan/mlp/up" and r["heavy"]]
    assert [r["primitive"] for r in up] == ["dot_general"]
    # once in the text, three times in the run
    assert up[0]["flops"] == pytest.approx(3 * 2 * 4 * 16 * 32 * 128, rel=0.01)
    assert target == "tpu-v5e" or up[0]["bytes"] > 0  # so small that it stays in vector memory


def test_a_chip_of_ones_own_is_read_with_its_own_figures():
    known = remat_kit.target("cpu")
    mine = dataclasses.replace(
        known, name="mine", bandwidth_bytes_per_second=known.bandwidth_bytes_per_second / 1000
    )
    fn, x = (lambda x: (x * 2).sum()), jnp.ones((256, 256))
    fast, slow = (inspect(fn, x, target=chip).readings[chip.name] for chip in (known, mine))
    assert slow.estimate.seconds > 100 * fast.estimate.seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("resnet", {"depth": 152, "batch": 2, "policy": "nothing"}),
        ("gpt", {"size": "72l", "batch": 1, "seq": 256, "policy": "nothing"}),
    ],
    ids=["resnet-152", "gpt-72"],
)
def test_the_largest_programs_are_read_back_in_seconds(model, size, tmp_path):
    fn, args = load(model).build(**size)
    gradient = trace_gradient(fn, args, 0, call="test")
    traced = TracedReading.of(LossGradient(gradient, fn, args, 0), residuals_of(gradient))
    compiled = compile_program(fn, args, "cpu")
    begin = time.process_time()  # whatever else the machine does
    reading = read(compiled, [traced])
    seconds = time.process_time() - begin
    print(f"{model}: {len(reading.schedule.steps)} steps read back in {seconds:.2f} s")
    assert seconds < 10
    page = tmp_path / "page.html"
    inspect(fn, *args, target="cpu").to_html(page)
    print(f"{model}: a page of {page.stat().st_size / 2**20:.2f} MiB")
    assert page.stat().st_size < 5e6
