"""FLOPs, bytes and seconds of a compiled program."""

import textwrap

import jax
import jax.numpy as jnp
import pytest
from compiled_programs import (
    DEPTH,
    MERGES,
    ROWS,
    WIDE,
    _slow,
    gpt,
    needs,
    report,
)

import remat_kit
from remat_kit import inspect
from remat_kit._compiled import roofline as _roofline
from remat_kit._compiled.hlo import parse
from remat_kit._compiled.peak import FORWARD, RECOMPUTE, origins
from remat_kit._compiled.roofline import estimate, trip_count


def small(body):
    return parse(f"HloModule m, is_scheduled=true\n{textwrap.dedent(body)}")


PRODUCT = 2 * ROWS * WIDE * WIDE  # FLOPs of one matrix product


@pytest.mark.parametrize("target", ["cpu", "h100", _slow("tpu-v5e")])
def test_flops_of_a_real_program(target):
    """Every product has two in its gradient, but for the first one's input; on every chip."""
    plain = report(needs(target)).readings[target].estimate
    assert plain.total.flops == pytest.approx((3 * 2 * DEPTH - 1) * PRODUCT, rel=0.01)
    assert plain.by_phase()[FORWARD].flops == pytest.approx(2 * DEPTH * PRODUCT, rel=0.01)
    if target == "cpu" and MERGES:
        return
    again = report(target, "nothing").readings[target].estimate
    # The second product of a block is its result: no gradient reads it.
    assert again.by_phase()[RECOMPUTE].flops == pytest.approx(DEPTH * PRODUCT, rel=0.01)
    assert again.total.flops == pytest.approx((3 * 2 * DEPTH - 1 + DEPTH) * PRODUCT, rel=0.01)


@pytest.mark.parametrize("target", ["cpu", "h100", _slow("tpu-v5e")])
def test_seconds_of_a_real_program(target):
    found = report(needs(target)).readings[target].estimate
    chip = remat_kit.target(target)
    fastest = max(chip.flops_per_second.values())
    assert found.seconds >= found.total.flops / fastest
    assert found.seconds >= found.total.bytes / chip.bandwidth_bytes_per_second
    assert (found.compiler_seconds is not None) == (target == "tpu-v5e")
    plain = report(target).to_json()["step_seconds"][target]
    assert plain["roofline"] == found.seconds
    assert plain["measured"] is None


@pytest.mark.parametrize("target", ["cpu", *(_slow(t) for t in ("h100", "tpu-v5e"))])
@pytest.mark.parametrize("policy", [_slow(None), "nothing"])
def test_loops_count_in_full(target, policy):
    """A scan and the same layers written out do the same work."""
    needs(target)
    totals = []
    for scan in (False, True):
        size = {"size": "tiny", "batch": 4, "layers": 5, "width": 64, "scan": scan}
        model, args = gpt.build(policy, **size)
        reading = inspect(model, *args, target=target).readings[target]
        assert not reading.estimate.endless
        totals.append(reading.estimate.total.flops)
    assert totals[1] == pytest.approx(totals[0], rel=0.02)


def conv(shape, kernel, **options):
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, kernel))
    return (
        lambda x, w: jax.lax.conv_general_dilated(
            x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
        ),
        (x, w),
    )


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (conv((2, 8, 8, 4), (3, 3, 4, 5), window_strides=(1, 1), padding="VALID"),
         2 * 2 * 6 * 6 * 5 * 9 * 4),
        (conv((2, 8, 8, 4), (1, 1, 4, 5), window_strides=(2, 2), padding="SAME"),
         2 * 2 * 4 * 4 * 5 * 4),
        # 'SAME': products with the padding are not counted: 22 pairs along each axis, not 24
        (conv((2, 8, 8, 4), (3, 3, 4, 5), window_strides=(1, 1), padding="SAME"),
         2 * 2 * 22 * 22 * 5 * 4),
        (conv((2, 8, 8, 4), (3, 3, 2, 6), window_strides=(1, 1), padding="VALID",
              feature_group_count=2), 2 * 2 * 6 * 6 * 6 * 9 * 2),
        (conv((2, 4, 4, 4), (2, 2, 4, 5), window_strides=(1, 1), padding=[(0, 0), (0, 0)],
              lhs_dilation=(2, 2)), 2 * 2 * 36 * 5 * 4),
    ],
    ids=["valid", "strided", "same", "grouped", "dilated"],
)  # fmt: skip
def test_flops_of_convolutions(case, expected):
    fn, args = case
    text = jax.jit(fn).lower(*args).compile().as_text()
    program = parse(text)
    found = estimate(program, remat_kit.target("cpu"), origins(program))
    assert found.total.flops == expected


def test_a_loop_that_does_not_tell_how_often_it_runs():
    def fn(x):
        return jax.lax.while_loop(lambda v: v.sum() < 10, lambda v: v @ v, x)

    program = parse(
        jax.jit(fn).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).compile().as_text()
    )
    found = estimate(program, remat_kit.target("cpu"), origins(program))
    assert len(found.endless) == 1
    assert found.total.flops == 2 * 8**3


def test_trip_counts_that_are_read_from_the_condition():
    program = small("""
        %cond (p: (s32[], s32[])) -> pred[] {
          %p = (s32[], s32[]) parameter(0)
          %i = s32[] get-tuple-element(%p), index=0
          %n = s32[] get-tuple-element(%p), index=1
          ROOT %lt = pred[] compare(%i, %n), direction=LT
        }
        %body (q: (s32[], s32[])) -> (s32[], s32[]) {
          ROOT %q = (s32[], s32[]) parameter(0)
        }
        ENTRY %main (x: s32[]) -> s32[] {
          %zero = s32[] constant(2)
          %seven = s32[] constant(7)
          %copy = s32[] copy(%seven)
          %init = (s32[], s32[]) tuple(%zero, %copy)
          %loop = (s32[], s32[]) while(%init), condition=%cond, body=%body
          ROOT %out = s32[] get-tuple-element(%loop), index=0
        }""")
    (loop,) = (i for i in program.instructions() if i.opcode == "while")
    assert trip_count(program, loop, "main") == 5


_FUSED_UPDATE = """
        %f (a: f32[8,64], i: s32[], u: f32[1,64]) -> f32[8,64] {
          %a = f32[8,64]{1,0} parameter(0)
          %i = s32[] parameter(1)
          %u = f32[1,64]{1,0} parameter(2)
          %zero = s32[] constant(0)
          ROOT %d = f32[8,64]{1,0} dynamic-update-slice(%a, %u, %i, %zero)
        }
"""
_SHAPES = "(f32[8,64]{1,0}, s32[], f32[1,64]{1,0}), f32[8,64]{1,0}, u32[]"


def test_an_update_in_place_moves_what_it_writes_also_on_another_stream():
    main = """
        ENTRY %main (x: f32[8,64], i: s32[], u: f32[1,64]) -> f32[8,64] {
          %x = f32[8,64]{1,0} parameter(0)
          %n = s32[] parameter(1)
          %v = f32[1,64]{1,0} parameter(2)
          BODY
        }"""
    here = "ROOT %r = f32[8,64]{1,0} fusion(%x, %n, %v), kind=kLoop, calls=%f"
    there = f"""%s = ({_SHAPES}) fusion-start(%x, %n, %v), kind=kLoop, calls=%f
          ROOT %r = f32[8,64]{{1,0}} fusion-done(%s)"""
    for body in (here, there):
        program = small(_FUSED_UPDATE + main.replace("BODY", body))
        found = estimate(program, remat_kit.target("cpu"), origins(program))
        assert found.total.bytes == 2 * 4 * 64 + 4  # the part read and written, and its place


def test_several_updates_in_place_move_what_they_write():
    program = small(
        """
        %f (a: f32[8,64], i: s32[], u: f32[1,64]) -> (f32[1,64], f32[8,64]) {
          %a = f32[8,64]{1,0} parameter(0)
          %i = s32[] parameter(1)
          %u = f32[1,64]{1,0} parameter(2)
          %zero = s32[] constant(0)
          %d = f32[8,64]{1,0} dynamic-update-slice(%a, %u, %i, %zero)
          %sine = f32[1,64]{1,0} sine(%u)
          ROOT %t = (f32[1,64]{1,0}, f32[8,64]{1,0}) tuple(%sine, %d)
        }
        ENTRY %main (x: f32[8,64], i: s32[], u: f32[1,64]) -> (f32[1,64], f32[8,64]) {
          %x = f32[8,64]{1,0} parameter(0)
          %n = s32[] parameter(1)
          %v = f32[1,64]{1,0} parameter(2)
          ROOT %r = (f32[1,64]{1,0}, f32[8,64]{1,0}) fusion(%x, %n, %v), kind=kLoop, calls=%f
        }"""
    )
    found = estimate(program, remat_kit.target("cpu"), origins(program))
    assert found.total.bytes == 3 * 4 * 64 + 4


def test_costs_add_up():
    one = _roofline.Cost(1.0, 2.0, 3.0, 4.0, 5.0)
    assert one + one == one * 2 == _roofline.Cost(2.0, 4.0, 6.0, 8.0, 10.0)
