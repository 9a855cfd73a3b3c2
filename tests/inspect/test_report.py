"""Reports, comparisons and differences: what they say, and how they print."""

import io
import json
import re
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console
from zoo import load

import remat_kit
from remat_kit import (
    Comparison,
    NotDifferentiableError,
    UnknownNameError,
    UserError,
    diff,
    dots,
    inspect,
    offload,
    primitive,
    recompute,
    save,
)
from remat_kit._inspect.tables import policy_text
from remat_kit._program.paths import roll_up
from remat_kit._units import format_flops

gpt, mlp, resnet = map(load, ("gpt", "mlp", "resnet"))
MLP = {"batch": 4, "features": 8, "hidden": 6, "classes": 3}
RESNET = {"depth": 18, "batch": 2, "image": 32, "width": 4, "classes": 10}


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


W, X = f32(16, 16), f32(8, 16)


def loss(w, x):
    return jnp.sum(jnp.sin(jnp.exp(x @ w) @ w))


def tower(w, x):
    for _ in range(4):
        x = jnp.sin(x @ w)
    return jnp.sum(x**2)


def rich_text(shown, **kwargs):
    stream = io.StringIO()
    Console(file=stream, width=200, **kwargs).print(shown)
    return stream.getvalue()


# -- one report -----------------------------------------------------------------------------------

KEYS = {
    "policy": str,
    "saved_bytes": int,
    "offloaded_bytes": int,
    "saved": list,
    "inputs": list,
    "recomputed": list,
    "recomputed_flops": float,
    "forward_flops": float,
    "unknown_costs": list,
    "memory": dict,
    "hlo_recomputed_ops": dict,
    "hlo_recomputed_by_primitive": dict,
    "hlo_xla_remat": dict,
    "peak": dict,
    "timeline": dict,
    "regions": dict,
    "counterfactuals": dict,
    "hlo_recomputed": dict,
    "step_seconds": dict,
    "notes": list,
    "lints": list,
    "against": type(None),
}


def test_json_has_the_documented_keys():
    plain = json.loads(json.dumps(inspect(loss, W, X, policy="dots", target="cpu").to_json()))
    assert plain.keys() == KEYS.keys()
    for key, kind in KEYS.items():
        assert isinstance(plain[key], (kind, int) if kind is float else kind), key
    saved, again, memory = plain["saved"][0], plain["recomputed"][0], plain["memory"]["cpu"]
    assert saved.keys() >= {"shape", "dtype", "bytes", "module", "source", "reason"}
    assert again.keys() >= {"primitive", "module", "source", "count", "flops", "bytes"}
    figures = {f"{x}_bytes" for x in ("temp", "argument", "output", "alias", "host", "peak")}
    assert memory.keys() >= {*figures, "fits"}
    assert plain["hlo_recomputed_ops"].keys() == {"cpu"}
    schema = remat_kit.Report.to_json.__doc__ or ""
    for key in (*plain, *saved, *again, *memory):
        assert key in schema, key


def test_totals_are_those_of_the_lists(implementation):
    report = inspect(loss, W, X, policy="dots")
    assert report.policy == "dots"
    assert [r.primitive for r in report.saved] == ["dot_general", "dot_general"]
    assert report.saved_bytes == 2 * 8 * 16 * 4
    assert report.recomputed_flops == sum(r.flops for r in report.recomputed) == 8 * 16
    for totals in (report.by_module(), report.by_primitive()):
        assert sum(t.saved_bytes for t in totals.values()) == report.saved_bytes
        assert sum(t.recomputed_flops for t in totals.values()) == report.recomputed_flops
    assert report.by_primitive()["dot_general"].saved == 2
    assert report.by_primitive()["exp"].recomputed == 1


def test_at_finds_the_blocks_of_an_unedited_model(implementation):
    model, args = mlp.build(**MLP)
    report = inspect(model, *args, policy="nothing", at="*/block_*")
    assert {r.module for r in report.recomputed} == {"MLP/block_0", "MLP/block_1"}


def test_offloaded_bytes_are_apart():
    report = inspect(loss, W, X, policy=offload(dots) | save(primitive("exp")))
    assert report.offloaded_bytes == report.saved_bytes == 8 * 16 * 4


def test_the_compiled_program_computes_again_what_the_jaxpr_says():
    """Every product that the report lists is still there twice after the compiler's passes."""
    model, args = gpt.build("nothing", size="tiny", batch=2, layers=2)
    report = inspect(model, *args, target="cpu")
    products = sum(r.count for r in report.recomputed if r.primitive == "dot_general")
    assert products == 14
    assert report.hlo["cpu"].by_primitive["dot_general"] == products


def test_several_targets_and_one_target():
    assert list(inspect(loss, W, X, target=["cpu"]).memory) == ["cpu"]
    assert inspect(loss, W, X).memory == {}


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


def test_errors_name_the_call():
    with pytest.raises(NotDifferentiableError, match="`inspect`"):
        inspect(lambda x: x, X)
    with pytest.raises(NotDifferentiableError, match="int32"):
        inspect(lambda x: x.sum(), jax.ShapeDtypeStruct((2,), jnp.int32))
    with pytest.raises(UnknownNameError, match="dotts"):
        inspect(loss, W, X, policy="dotts")
    with pytest.raises(UnknownNameError, match="cpuu"):
        inspect(loss, W, X, target="cpuu")
    with pytest.raises(UserError, match="where its forward pass ends"):
        inspect(loss, W, X, argnums=None)


# -- how it prints --------------------------------------------------------------------------------


def test_repeated_blocks_are_rolled_up_in_tables_alone():
    model, args = gpt.build("dots", size="tiny", batch=2, layers=3)
    report = inspect(model, *args)
    text = str(report)
    assert "GPT/block_*/mlp/up ×3" in text
    assert "GPT/block_1/" not in text
    modules = {r["module"] for r in report.to_json()["saved"]}
    assert {f"GPT/block_{i}/mlp/up" for i in range(3)} <= modules


def test_roll_up():
    assert roll_up("GPT/block_11/mlp") == "GPT/block_*/mlp"
    assert roll_up("GPT/layers/3/attn") == "GPT/layers/*/attn"
    assert roll_up("Net/conv2d/up") == "Net/conv2d/up"
    assert roll_up("") == ""


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


def test_html_is_self_contained_and_escaped():
    with jax.named_scope("<b>"):
        shown = inspect(loss, W, X, policy="dots")._repr_html_()
    assert shown.startswith("<div")
    assert "<script" not in shown
    assert "http" not in shown
    comparison = Comparison((inspect(loss, W, X, label="<i>"),))._repr_html_()
    assert "&lt;i&gt;" in comparison
    assert "<i>" not in comparison


def test_numbers_for_readers():
    assert format_flops(0) == "0 FLOP"
    assert format_flops(1.5e12) == "1.5 TFLOP"


def test_rich_is_imported_when_it_is_needed():
    code = "import sys, remat_kit; print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -- several reports ------------------------------------------------------------------------------


def test_a_comparison_puts_none_first_and_compares_with_it():
    reports = [inspect(loss, W, X, policy=p, target="cpu") for p in ("nothing", None, "dots")]
    comparison = Comparison(reports, model="small")
    assert [r.policy for r in comparison.reports] == ["none", "nothing", "dots"]
    plain = json.loads(json.dumps(comparison.to_json()))
    assert [p["policy"] for p in plain["policies"]] == ["none", "nothing", "dots"]
    assert plain["model"] == "small"
    assert plain["versions"]["jax"] == jax.__version__
    assert plain["policies"][1].keys() == KEYS.keys()
    text = str(comparison)
    assert "×0.00" in text  # nothing is kept: 0 B of 1 KiB
    assert "×1.00" in text
    assert "policies of small" in rich_text(comparison)
    assert "model" not in Comparison(reports).to_json()


# -- differences ----------------------------------------------------------------------------------


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
    assert "test_report.py:" in text


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
    assert found._repr_html_().startswith("<pre")
    plain = json.loads(json.dumps(found.to_json()))
    assert [d["primitive"] for d in plain["duplicates"]] == ["dot_general", "exp", "dot_general"]
    assert plain["duplicates"][0]["feeds"]
    assert diff(loss, after, W, X, full=True).text() == diff(loss, after, W, X).text(full=True)


def test_a_difference_of_something_else_is_an_error():
    with pytest.raises(NotDifferentiableError, match="`diff`"):
        diff(loss, lambda w, x: w, W, X)
