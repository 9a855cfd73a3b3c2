"""Reports, comparisons and differences: what they say, and how they print."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from report_programs import KEYS, MLP, W, X, gpt, loss, mlp

import remat_kit
from remat_kit import (
    Comparison,
    NotDifferentiableError,
    UnknownNameError,
    UserError,
    dots,
    inspect,
    offload,
    primitive,
    save,
)
from remat_kit._units import format_flops


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


def test_errors_name_the_call():
    with pytest.raises(NotDifferentiableError, match="`inspect`"):
        inspect(lambda x: x, X)
    with pytest.raises(NotDifferentiableError, match="int32"):
        inspect(lambda x: x.sum(), jax.ShapeDtypeStruct((2,), jnp.int32))
    with pytest.raises(UnknownNameError, match="dotts"):
        inspect(loss, W, X, policy="dotts")
    with pytest.raises(UnknownNameError, match="cpuu"):
        inspect(loss, W, X, target="cpuu")
    with pytest.raises(UserError, match="takes no gradient"):
        inspect(loss, W, X, argnums=None)


# -- how it prints --------------------------------------------------------------------------------


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


# -- on several devices -----------------------------------------------------------------------


def test_the_flops_of_what_devices_may_split_in_another_way_are_said_to_be_estimates():
    mesh = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def convolved(w, x):
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jnp.sum(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", None, None, dimensions))

    def notes(fn, x, spec, w):
        place = NamedSharding(mesh, PartitionSpec(*spec))
        x = jax.ShapeDtypeStruct(x, jnp.float32, sharding=place)
        report = remat_kit.inspect(fn, jax.ShapeDtypeStruct(w, jnp.float32), x)
        return [note for note in report.notes if "estimates" in note]

    kernel = (3, 3, 4, 4)
    assert len(notes(convolved, (8, 16, 16, 4), ("data",), kernel)) == 1
    assert not notes(convolved, (8, 16, 16, 4), (), kernel)
    assert not notes(lambda w, x: jnp.sum(x @ w), (8, 16), ("data",), (16, 4))

    def exchanged(w, x):  # the second product reads columns over "model", and returns none
        parts = (NamedSharding(mesh, PartitionSpec(*p)) for p in (("data", "model"), ("data",)))
        h = jax.lax.with_sharding_constraint(x @ w[0], next(parts))
        return jnp.mean(jax.lax.with_sharding_constraint(jnp.sin(h) @ w[1], next(parts)) ** 2)

    (note,) = notes(exchanged, (8, 16), (("data", "model"),), (2, 16, 16))
    assert "products" in note
