"""Operations that a compiled program runs twice, in made-up and in real programs."""

import os
import textwrap

import chain_of_blocks
import jax
import jax.numpy as jnp
import pytest
from chain_of_blocks import ARGS, DEPTH, chain, compiled
from shapes import struct

from remat_kit import _jax
from remat_kit._compiled.duplicates import module_and_primitive, recomputed_ops
from remat_kit._compiled.hlo import parse

FORWARD = "jit(f)/jvp(Net)/{}"
AGAIN = "jit(f)/transpose(jvp(Net))/jvp(Net)/checkpoint/rematted_computation/{}"
BACKWARD = "jit(f)/transpose(jvp(Net))/jvp(Net)/checkpoint/{}"


def hlo(body, before=""):
    return f"HloModule m, is_scheduled=true\n\n{textwrap.dedent(before)}\n" + textwrap.dedent(body)


def meta(scope, name):
    return f'metadata={{op_name="{scope.format(name)}"}}'


def test_product_whose_original_is_there_counts():
    text = hlo(f"""
        ENTRY %main (x: f32[4,4], w: f32[4,4]) -> f32[4,4] {{
          %x = f32[4,4]{{1,0}} parameter(0)
          %w = f32[4,4]{{1,0}} parameter(1)
          %dot.1 = f32[4,4]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}, {meta(FORWARD, "a/dot_general")}
          %dot.2 = f32[4,4]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}, {meta(AGAIN, "a/dot_general")}
          ROOT %dot.3 = f32[4,4]{{1,0}} dot(%dot.1, %dot.2), {meta(BACKWARD, "a/dot_general")}
        }}""")  # noqa: E501
    found = recomputed_ops(text)
    assert found.by_primitive == {"dot_general": 1}
    assert found.by_module == {"Net/a": 1}
    assert found.heavy == found.total == 1
    assert found.unmatched == ()


def test_product_whose_original_is_gone_does_not_count():
    text = hlo(f"""
        ENTRY %main (x: f32[4,4], w: f32[4,4]) -> f32[4,4] {{
          %x = f32[4,4]{{1,0}} parameter(0)
          %w = f32[4,4]{{1,0}} parameter(1)
          %dot.2 = f32[4,4]{{1,0}} dot(%x, %w), {meta(AGAIN, "a/dot_general")}
          ROOT %dot.3 = f32[4,4]{{1,0}} dot(%x, %dot.2), {meta(FORWARD, "b/dot_general")}
        }}""")
    found = recomputed_ops(text)
    assert found.total == 0
    assert [(op.module, op.primitive, op.count) for op in found.unmatched] == [
        ("Net/a", "dot_general", 1)
    ]


def test_copies_of_a_cheap_value_in_several_fusions_count_once():
    fusions = f"""
        %fused.1 (p0: f32[4], p1: f32[4]) -> f32[4] {{
          %p0 = f32[4]{{0}} parameter(0)
          %p1 = f32[4]{{0}} parameter(1)
          %tanh.7 = f32[4]{{0}} tanh(%p0), {meta(AGAIN, "a/tanh")}
          ROOT %mul.1 = f32[4]{{0}} multiply(%tanh.7, %p1)
        }}

        %fused.2 (q1: f32[1,4], q0: f32[4]) -> f32[1,4] {{
          %q0 = f32[4]{{0}} parameter(1)
          %q1 = f32[1,4]{{1,0}} parameter(0)
          %bitcast.1 = f32[1,4]{{1,0}} bitcast(%q0)
          %tanh.9 = f32[1,4]{{1,0}} tanh(%bitcast.1), {meta(AGAIN, "a/tanh")}
          ROOT %add.1 = f32[1,4]{{1,0}} add(%tanh.9, %q1)
        }}
        """
    entry = f"""
        ENTRY %main (x: f32[4], y: f32[4]) -> f32[4] {{
          %x = f32[4]{{0}} parameter(0)
          %y = f32[4]{{0}} parameter(1)
          %tanh.1 = f32[4]{{0}} tanh(%x), {meta(FORWARD, "a/tanh")}
          %fusion.1 = f32[4]{{0}} fusion(%x, %tanh.1), kind=kLoop, calls=%fused.1
          %bitcast.2 = f32[1,4]{{1,0}} bitcast(%fusion.1)
          %fusion.2 = f32[1,4]{{1,0}} fusion(%bitcast.2, %x), kind=kLoop, calls=%fused.2
          ROOT %bitcast.3 = f32[4]{{0}} bitcast(%fusion.2)
        }}"""
    assert recomputed_ops(hlo(entry, fusions)).by_primitive == {"tanh": 1}


def test_one_primitive_of_two_layers_counts_twice():
    lines = [f"%t{i} = f32[4]{{0}} tanh(%p{i}), {meta(FORWARD, 'tanh')}" for i in range(2)]
    lines += [f"%r{i} = f32[4]{{0}} tanh(%p{i}), {meta(AGAIN, 'tanh')}" for i in range(2)]
    parameters = [f"%p{i} = f32[4]{{0}} parameter({i})" for i in range(2)]
    lines = [*parameters, *lines, "ROOT %sum = f32[4]{0} add(%r0, %r1)"]
    text = "HloModule m\nENTRY %e (p0: f32[4], p1: f32[4]) -> f32[4] {\n"
    text += "".join(f"  {line}\n" for line in lines) + "}\n"
    assert recomputed_ops(text).total == 2


@pytest.mark.parametrize(
    ("call", "counts"),
    [
        ('custom_call_target="__cudnn$convForward"', True),
        ('custom_call_target="__cublas$gemm"', True),
        ('custom_call_target="__onednn$matmul"', True),
        ('custom_call_target="AllocateBuffer"', False),
        ('custom_call_target="TopK"', False),
    ],
)
def test_library_calls_for_products_count(call, counts):
    text = hlo(f"""
        ENTRY %main (x: f32[4,4]) -> f32[4,4] {{
          %x = f32[4,4]{{1,0}} parameter(0)
          %c.1 = f32[4,4]{{1,0}} custom-call(%x), {call}, {meta(FORWARD, "conv")}
          ROOT %c.2 = (f32[4,4]{{1,0}}, s8[64]{{0}}) custom-call(%x), {call}, {meta(AGAIN, "conv")}
        }}""")
    assert recomputed_ops(text).heavy == int(counts)


def test_what_xla_rematerialized_itself_is_told_apart():
    text = hlo(f"""
        ENTRY %main (x: f32[4]) -> f32[4] {{
          %x = f32[4]{{0}} parameter(0)
          %sine.1 = f32[4]{{0}} sine(%x), {meta(FORWARD, "a/sin")}
          %sine.1.remat = f32[4]{{0}} sine(%x), {meta(FORWARD, "a/sin")}
          %sine.1.remat2.1 = f32[4]{{0}} sine(%x), {meta(FORWARD, "a/sin")}
          ROOT %add = f32[4]{{0}} add(%sine.1.remat, %sine.1)
        }}""")
    found = recomputed_ops(text)
    assert found.total == 0
    assert found.xla_remat == ("sine.1.remat", "sine.1.remat2.1")


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(f)/jvp(Net)/block_0/mlp/jit(relu)/max", ("Net/block_0/mlp", "max")),
        (
            "jit(f)/transpose(jvp(Net))/jvp(Net)/checkpoint/rematted_computation/block_0/add",
            ("Net/block_0", "add"),
        ),
        ("jit(f)/transpose(jvp(b0))/jvp(b0)/checkpoint/rematted_computation/dot", ("b0", "dot")),
        ("jit(f)/jvp(Net)/while/body/closed_call/layers/mlp/dot", ("Net/layers/mlp", "dot")),
        (
            "jit(f)/jvp(Net)/while/body/eval_jaxpr/l.<lambda>/blk/l.<lambda>/blk/jit(relu)/max",
            ("Net/l.<lambda>/blk", "max"),
        ),
        ("jit(f)/jvp()/reduce_sum", ("", "reduce_sum")),
        ("jit(f)/jvp(Net)/mlp/mlp/dot", ("Net/mlp/mlp", "dot")),
        ("", ("", "")),
    ],
)
def test_module_path_is_free_of_transformations(op_name, expected):
    assert module_and_primitive(op_name) == expected


TARGETS = ["cpu", "tpu-v5e", "h100"]


def products(text):
    return sum(i.is_heavy for i in parse(text).instructions())


@pytest.mark.parametrize("name", TARGETS)
def test_block_with_nothing_saved_runs_its_products_twice(name):
    program = compiled(chain(jax.checkpoint), ARGS, name)
    found = recomputed_ops(program.hlo_text)
    plain = compiled(chain(lambda f: f), ARGS, name)
    assert found.heavy == products(program.hlo_text) - products(plain.hlo_text)
    if name == "cpu" and _jax.JAX_VERSION < (0, 11):
        return  # this release merges what a region recomputes with its original on the CPU
    assert found.by_primitive["dot_general"] == 2 * DEPTH
    assert found.by_primitive["tanh"] == 2 * DEPTH
    assert {m: n for m, n in found.by_module.items() if m} == {
        f"block_{i}": 4 for i in range(DEPTH)
    }
    assert all(op.source.startswith(os.path.relpath(chain_of_blocks.__file__)) for op in found.ops)


@pytest.mark.parametrize("name", TARGETS)
def test_each_of_the_regions_around_a_product_runs_it_again(name):
    """The first block is in as many regions as there are blocks, the last in one."""

    def blocks(ws, x):
        if not ws:
            return x
        x = jax.checkpoint(blocks)(ws[:-1], x)
        with jax.named_scope(f"block_{len(ws) - 1}"):
            return jnp.tanh(x @ ws[-1])

    def loss(ws, x):
        return jnp.sum(jax.checkpoint(blocks)(ws, x) ** 2)

    args = ([struct(64, 64)] * DEPTH, struct(512, 64))
    found = recomputed_ops(compiled(loss, args, name).hlo_text)
    if name == "cpu" and _jax.JAX_VERSION < (0, 11):
        return  # see above
    by_module = {m: n for m, n in found.by_module.items() if m}
    assert by_module == {f"block_{i}": 2 * (DEPTH - i) for i in range(DEPTH)}
    assert not any(op.heavy for op in found.unmatched)


@pytest.mark.parametrize("name", TARGETS)
def test_program_without_regions_recomputes_nothing(name):
    program = compiled(chain(lambda f: f), ARGS, name)
    assert "dot_general" in program.hlo_text
    found = recomputed_ops(program.hlo_text)
    assert found.ops == found.unmatched == ()


@pytest.mark.parametrize("name", TARGETS)
def test_regions_that_common_subexpressions_undo_count_nothing(name):
    def remat(f):
        return jax.checkpoint(f, prevent_cse=False)

    found = recomputed_ops(compiled(chain(remat), ARGS, name).hlo_text)
    assert found.heavy == 0


@pytest.mark.parametrize("name", TARGETS)
def test_body_of_a_scan_counts_once(name):
    def body(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(jnp.tanh(x @ w) @ w), None

    def loss(ws, x):
        return jnp.sum(jax.lax.scan(jax.checkpoint(body, prevent_cse=False), x, ws)[0] ** 2)

    found = recomputed_ops(compiled(loss, (struct(5, 64, 64), struct(512, 64)), name).hlo_text)
    assert found.by_primitive["dot_general"] == 2
    assert found.by_module["layer"] >= 2


@pytest.mark.parametrize("name", ["cpu", "h100"])
def test_convolutions_count(name):
    def block(x, w):
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
        return jnp.tanh(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims))

    def loss(ws, x):
        for i, w in enumerate(ws):
            with jax.named_scope(f"block_{i}"):
                x = jax.checkpoint(block)(x, w)
        return jnp.sum(x * x)

    args = ([struct(3, 3, 32, 32)] * 2, struct(2, 16, 16, 32))
    text = compiled(loss, args, name).hlo_text
    found = recomputed_ops(text)
    # Each of the four takes one product forward and two backward, but the gradient of the first
    # input is not asked for.
    forward_and_backward = 3 * 4 - 1
    assert found.heavy == products(text) - forward_and_backward
    if name == "cpu" and _jax.JAX_VERSION < (0, 11):
        return
    assert found.by_primitive["conv_general_dilated"] == 4
