"""The walk over a schedule: shapes, aliases, loops, and which buffers are alive when."""

import textwrap

import pytest

from remat_kit._compiled.hlo import parse
from remat_kit._compiled.liveness import (
    ARGUMENT,
    CONSTANT,
    DEVICE,
    HOST,
    OUTPUT,
    TEMPORARY,
    VMEM,
    leaves,
    parse_shape,
    schedule,
)

KIB = 1024


def walk(body, **options):
    return schedule(parse(f"HloModule m, is_scheduled=true\n{textwrap.dedent(body)}"), **options)


def alive(found, kind=TEMPORARY):
    return {b.makers[0].name: b.alive for b in found.buffers if b.kind == kind}


# -- shapes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("f32[2,3]{1,0}", 24),
        ("bf16[2,3]{1,0}", 12),
        ("pred[5]{0}", 5),
        ("s4[5]{0}", 3),
        ("f8e4m3fn[6]{0}", 6),
        ("u32[]{:S(2)}", 4),
        ("f32[3,100]{1,0:T(8,128)}", 8 * 128 * 4),
        ("f32[3,100]{0,1:T(8,128)}", 104 * 128 * 4),  # the other way round
        ("bf16[3,100]{1,0:T(8,128)(2,1)}", 8 * 128 * 2),
        ("f32[5]{0:T(256)}", 1024),
        ("f32[]{:T(128)}", 512),
        ("f32[2,3,9,200]{3,2,1,0:T(8,128)}", 2 * 3 * 16 * 256 * 4),
        ("token[]", 0),
    ],
)
def test_bytes_of_a_shape(shape, size):
    assert parse_shape(shape).bytes == size


def test_tuples_and_memory_spaces():
    tree = parse_shape("((f32[2]{0}), bf16[4]{0:T(512)S(1)}, /*index=2*/f32[4]{0:S(5)})")
    assert [str(a) for a in leaves(tree)] == ["f32[2]", "bf16[4]", "f32[4]"]
    assert [a.space for a in leaves(tree)] == [DEVICE, VMEM, HOST]
    assert len(tree) == 3


def test_what_is_no_shape():
    with pytest.raises(ValueError, match="not a shape"):
        parse_shape("%x")


# -- the walk ---------------------------------------------------------------------------------


def test_a_value_lives_from_its_maker_to_its_last_reader():
    found = walk("""
        ENTRY %main (x: f32[256]) -> f32[] {
          %x = f32[256]{0} parameter(0)
          %c = f32[256]{0} constant({...})
          %a = f32[256]{0} reverse(%x), dimensions={0}
          %b = f32[256]{0} reverse(%a), dimensions={0}
          %d = f32[] dot(%a, %b)
          ROOT %e = f32[] dot(%d, %d)
        }""")
    assert alive(found) == {"a": ((0, 2),), "b": ((1, 2),), "d": ((2, 3),)}
    assert found.temporary_bytes == (KIB, 2 * KIB, 2 * KIB + 4, 4)
    assert found.peak_step == 2
    assert found.base_bytes == KIB + 4
    assert found.peak_bytes == 3 * KIB + 8
    assert set(alive(found, CONSTANT)) == {"c"}
    held = [(b.makers[0].name, b.kind) for b in found.alive_at(2)]
    assert sorted(held) == [
        ("a", TEMPORARY),
        ("b", TEMPORARY),
        ("d", TEMPORARY),
        ("e", OUTPUT),
        ("x", ARGUMENT),
    ]


def test_elementwise_results_take_over_what_nobody_reads_again():
    body = """
        ENTRY %main (x: f32[256]) -> f32[] {{
          %x = f32[256]{{0}} parameter(0)
          %a = f32[256]{{0}} reverse(%x), dimensions={{0}}
          %b = f32[256]{{0}} {opcode}(%a)
          ROOT %d = f32[] dot(%b, %b)
        }}"""
    assert max(walk(body.format(opcode="sine")).temporary_bytes) == KIB
    assert max(walk(body.format(opcode="reverse")).temporary_bytes) == 2 * KIB


def test_a_fusion_takes_over_what_it_reads_element_by_element():
    body = """
        %f (p: f32[256], q: f32[256]) -> f32[256] {{
          %p = f32[256]{{0}} parameter(0)
          %q = f32[256]{{0}} parameter(1)
          %r = f32[256]{{0}} {opcode}(%p)
          ROOT %s = f32[256]{{0}} add(%r, %q)
        }}
        ENTRY %main (x: f32[256]) -> f32[] {{
          %x = f32[256]{{0}} parameter(0)
          %a = f32[256]{{0}} reverse(%x), dimensions={{0}}
          %b = f32[256]{{0}} fusion(%a, %x), kind=kLoop, calls=%f
          ROOT %d = f32[] dot(%b, %b)
        }}"""
    assert max(walk(body.format(opcode="sine")).temporary_bytes) == KIB
    assert max(walk(body.format(opcode="reverse")).temporary_bytes) == 2 * KIB


def test_a_fusion_takes_over_where_it_sums_up_what_it_writes():
    body = """
        %sum (a: f32[], b: f32[]) -> f32[] {{
          %a = f32[] parameter(0)
          %b = f32[] parameter(1)
          ROOT %c = f32[] add(%a, %b)
        }}
        %f (p: f32[256]) -> (f32[256], f32[]) {{
          %p = f32[256]{{0}} parameter(0)
          %r = f32[256]{{0}} sine(%p)
          %z = f32[] constant(0)
          %s = f32[] reduce({summed}, %z), dimensions={{0}}, to_apply=%sum
          ROOT %t = (f32[256]{{0}}, f32[]) tuple(%r, %s)
        }}
        ENTRY %main (x: f32[256]) -> f32[] {{
          %x = f32[256]{{0}} parameter(0)
          %a = f32[256]{{0}} reverse(%x), dimensions={{0}}
          %b = (f32[256]{{0}}, f32[]) fusion(%a), kind={kind}, calls=%f
          %c = f32[256]{{0}} get-tuple-element(%b), index=0
          %e = f32[] get-tuple-element(%b), index=1
          ROOT %d = f32[] dot(%c, %c)
        }}"""
    takes = walk(body.format(summed="%r", kind="kInput"))
    assert max(takes.temporary_bytes) == KIB
    for summed, kind in (("%p", "kInput"), ("%r", "kLoop")):
        assert max(walk(body.format(summed=summed, kind=kind)).temporary_bytes) == 2 * KIB


@pytest.mark.parametrize(
    ("operand", "result", "opcode", "takes"),
    [
        ("f32[256]{0}", "f32[256]{0}", "sine", True),
        ("f32[256]{0}", "f32[256]{0}", "copy", False),
        ("s32[256]{0}", "f32[256]{0}", "convert", False),
        ("f32[16,16]{0,1}", "f32[16,16]{1,0}", "sine", False),
    ],
)
def test_a_result_takes_over_what_has_its_type_and_layout(operand, result, opcode, takes):
    found = walk(f"""
        ENTRY %main (x: f32[256]) -> f32[] {{
          %x = f32[256]{{0}} parameter(0)
          %a = {operand} custom-call(%x), custom_call_target="k"
          %b = {result} {opcode}(%a)
          ROOT %d = f32[] dot(%b, %b)
        }}""")
    assert max(found.temporary_bytes) == (KIB if takes else 2 * KIB)


def test_a_fusion_takes_over_what_it_reads_through_a_view_on_some_chips():
    body = """
        %f (p: f32[256]) -> f32[256] {
          %p = f32[256]{0} parameter(0)
          %v = f32[16,16]{1,0} bitcast(%p)
          %r = f32[16,16]{1,0} sine(%v)
          ROOT %s = f32[256]{0} bitcast(%r)
        }
        ENTRY %main (x: f32[256]) -> f32[] {
          %x = f32[256]{0} parameter(0)
          %a = f32[256]{0} reverse(%x), dimensions={0}
          %b = f32[256]{0} fusion(%a), kind=kLoop, calls=%f
          ROOT %d = f32[] dot(%b, %b)
        }"""
    assert max(walk(body).temporary_bytes) == 2 * KIB
    assert max(walk(body, through_views=True).temporary_bytes) == KIB


def test_what_is_updated_in_place_afterwards_takes_nothing_over():
    body = """
        ENTRY %main (x: f32[256], n: s32[], u: f32[1]) -> f32[] {{
          %x = f32[256]{{0}} parameter(0)
          %n = s32[] parameter(1)
          %u = f32[1]{{0}} parameter(2)
          %a = f32[256]{{0}} reverse(%x), dimensions={{0}}
          %b = f32[256]{{0}} sine(%a)
          %c = {update}
          ROOT %d = f32[] dot(%c, %c)
        }}"""
    in_place = body.format(update="f32[256]{0} dynamic-update-slice(%b, %u, %n)")
    assert max(walk(in_place).temporary_bytes) == 2 * KIB
    assert max(walk(body.format(update="f32[256]{0} cosine(%b)")).temporary_bytes) == KIB


def test_views_are_no_buffers():
    found = walk("""
        ENTRY %main (x: f32[256]) -> f32[] {
          %x = f32[256]{0} parameter(0)
          %a = f32[256]{0} reverse(%x), dimensions={0}
          %t = (f32[256]{0}, f32[256]{0}) tuple(%a, %x)
          %g = f32[256]{0} get-tuple-element(%t), index=0
          %v = f32[16,16]{1,0} bitcast(%g)
          ROOT %d = f32[] dot(%v, %v)
        }""")
    assert alive(found) == {"a": ((0, 1),)}


def test_an_update_in_place():
    body = """
        ENTRY %main (x: f32[256], u: f32[1], i: s32[]) -> f32[] {
          %x = f32[256]{0} parameter(0)
          %u = f32[1]{0} parameter(1)
          %i = s32[] parameter(2)
          %a = f32[256]{0} reverse(%x), dimensions={0}
          %b = f32[256]{0} dynamic-update-slice(%a, %u, %i)
          ROOT %d = f32[] dot(%b, %b)
        }"""
    assert alive(walk(body)) == {"a": ((0, 2),)}
    fused = """
        %f (p: f32[256], q: f32[1], r: s32[]) -> (f32[256], f32[256]) {
          %p = f32[256]{0} parameter(0)
          %q = f32[1]{0} parameter(1)
          %r = s32[] parameter(2)
          %s = f32[256]{0} dynamic-update-slice(%p, %q, %r)
          %z = f32[256]{0} broadcast(%r), dimensions={}
          ROOT %t = (f32[256]{0}, f32[256]{0}) tuple(%s, %z)
        }
        ENTRY %main (x: f32[256], u: f32[1], i: s32[]) -> f32[] {
          %x = f32[256]{0} parameter(0)
          %u = f32[1]{0} parameter(1)
          %i = s32[] parameter(2)
          %a = f32[256]{0} reverse(%x), dimensions={0}
          %b = (f32[256]{0}, f32[256]{0}) fusion(%a, %u, %i), kind=kLoop, calls=%f
          %g = f32[256]{0} get-tuple-element(%b), index=0
          %h = f32[256]{0} get-tuple-element(%b), index=1
          ROOT %d = f32[] dot(%g, %h)
        }"""
    assert alive(walk(fused)) == {"a": ((0, 2),), "b": ((1, 2),)}


def test_a_declared_alias():
    found = walk(
        """
        ENTRY %main (x: f32[256]) -> f32[] {
          %x = f32[256]{0} parameter(0)
          %a = f32[256]{0} reverse(%x), dimensions={0}
          %b = (f32[256]{0}, f32[256]{0}) custom-call(%x, %a), custom_call_target="k",
            output_to_operand_aliasing={{1}: (1, {})}
          %g = f32[256]{0} get-tuple-element(%b), index=1
          ROOT %d = f32[] dot(%g, %g)
        }""".replace('"k",\n            ', '"k", ')
    )
    assert alive(found) == {"a": ((0, 2),), "b": ((1, 1),)}


LOOP = """
    %cond (p: (s32[], f32[256], f32[4,256])) -> pred[] {
      %p = (s32[], f32[256]{0}, f32[4,256]{1,0}) parameter(0)
      %n = s32[] constant(4)
      %i = s32[] get-tuple-element(%p), index=0
      ROOT %lt = pred[] compare(%i, %n), direction=LT
    }
    %body (q: (s32[], f32[256], f32[4,256])) -> (s32[], f32[256], f32[4,256]) {
      %q = (s32[], f32[256]{0}, f32[4,256]{1,0}) parameter(0)
      %j = s32[] get-tuple-element(%q), index=0
      %one = s32[] constant(1)
      %k = s32[] add(%j, %one)
      %c = f32[256]{0} get-tuple-element(%q), index=1
      %s = f32[4,256]{1,0} get-tuple-element(%q), index=2
      %new = f32[256]{0} reverse(%c), dimensions={0}
      %row = f32[1,256]{1,0} bitcast(%new)
      %up = f32[4,256]{1,0} dynamic-update-slice(%s, %row, %j, %one)
      ROOT %out = (s32[], f32[256]{0}, f32[4,256]{1,0}) tuple(%k, %new, %up)
    }
    ENTRY %main (x: f32[256], z: f32[]) -> f32[] {
      %x = f32[256]{0} parameter(0)
      %z = f32[] parameter(1)
      %zero = s32[] constant(0)
      %start = f32[256]{0} reverse(%x), dimensions={0}
      %stack = f32[4,256]{1,0} broadcast(%z), dimensions={}
      %init = (s32[], f32[256]{0}, f32[4,256]{1,0}) tuple(%zero, %start, %stack)
      %while = (s32[], f32[256]{0}, f32[4,256]{1,0}) while(%init), condition=%cond, body=%body
      %ys = f32[4,256]{1,0} get-tuple-element(%while), index=2
      ROOT %d = f32[] dot(%ys, %ys)
    }"""


def test_a_loop_reuses_the_buffers_it_is_given():
    found = walk(LOOP)
    by_name = {b.makers[0].name: b for b in found.buffers if b.kind == TEMPORARY}
    assert {"start", "stack"} <= by_name.keys()
    assert "new" not in by_name  # it lies where the carry lies
    assert by_name["stack"].stacked
    assert not by_name["start"].stacked
    assert by_name["stack"].alive == ((1, len(found.steps) - 1),)
    assert max(found.temporary_bytes) < 6 * KIB
    assert [i.name for i in found.steps].count("new") == 1  # the body stands once


def test_the_branches_of_a_condition_share_the_result():
    found = walk("""
        %yes (p: f32[256]) -> f32[256] {
          %p = f32[256]{0} parameter(0)
          ROOT %y = f32[256]{0} reverse(%p), dimensions={0}
        }
        %no (q: f32[256]) -> f32[256] {
          %q = f32[256]{0} parameter(0)
          ROOT %w = f32[256]{0} reverse(%q), dimensions={0}
        }
        ENTRY %main (c: pred[], x: f32[256]) -> f32[] {
          %c = pred[] parameter(0)
          %x = f32[256]{0} parameter(1)
          %r = f32[256]{0} conditional(%c, %x, %x), true_computation=%yes, false_computation=%no
          ROOT %d = f32[] dot(%r, %r)
        }""")
    assert len(alive(found)) == 1
    assert max(found.temporary_bytes) == KIB


def test_copies_in_the_background_hold_both_ends():
    found = walk("""
        ENTRY %main (x: f32[256]) -> f32[] {
          %x = f32[256]{0} parameter(0)
          %a = f32[256]{0} reverse(%x), dimensions={0}
          %s = (f32[256]{0:S(5)}, f32[256]{0}, u32[]) copy-start(%a)
          %b = f32[256]{0} reverse(%x), dimensions={0}
          %h = f32[256]{0:S(5)} copy-done(%s)
          %t = (f32[256]{0}, f32[256]{0:S(5)}, u32[]) copy-start(%h)
          %u = f32[256]{0} copy-done(%t)
          ROOT %d = f32[] dot(%u, %b)
        }""")
    by_name = {b.makers[0].name: b for b in found.buffers if b.kind == TEMPORARY and b.bytes > 4}
    assert by_name["a"].alive == ((0, 3),)
    assert by_name["s"].space == HOST
    assert by_name["t"].space == DEVICE
    assert max(found.temporary_bytes) <= 2 * KIB + 8  # what waits on the host is not counted


def test_slices_in_the_background_are_views_of_what_they_read():
    found = walk("""
        ENTRY %main (x: f32[256]) -> f32[] {
          %x = f32[256]{0} parameter(0)
          %a = f32[256]{0} reverse(%x), dimensions={0}
          %s = ((f32[256]{0}), f32[64]{0:S(1)}, s32[]) slice-start(%a), slice={[0:64]}
          %v = f32[64]{0:S(1)} slice-done(%s)
          ROOT %d = f32[] dot(%v, %v)
        }""")
    assert max(found.temporary_bytes) <= KIB + 4


def test_a_fusion_in_the_background_writes_in_place():
    found = walk(
        """
        %f (p: f32[256], q: f32[1], n: s32[]) -> f32[256] {
          %p = f32[256]{0} parameter(0)
          %q = f32[1]{0} parameter(1)
          %n = s32[] parameter(2)
          ROOT %r = f32[256]{0} dynamic-update-slice(%p, %q, %n)
        }
        ENTRY %main (x: f32[256], q: f32[1], n: s32[]) -> f32[] {
          %x = f32[256]{0} parameter(0)
          %q = f32[1]{0} parameter(1)
          %n = s32[] parameter(2)
          %a = f32[256]{0} reverse(%x), dimensions={0}
          %s = ((f32[256]{0}, f32[1]{0}, s32[]), f32[256]{0}, u32[]) fusion-start(%a, %q, %n),
              kind=kLoop, calls=%f
          %b = f32[256]{0} fusion-done(%s)
          ROOT %d = f32[] dot(%b, %b)
        }""".replace(",\n              kind", ", kind")
    )
    (held,) = (b for b in found.buffers if b.kind == TEMPORARY and b.bytes == KIB)
    # What merely reads an array is not one of its makers.
    assert [m.name for m in held.makers] == ["a", "s"]
    assert max(found.temporary_bytes) == KIB


def test_reading_in_the_background_makes_nothing():
    found = walk("""
        %f (p: f32[256], n: s32[]) -> f32[1] {
          %p = f32[256]{0} parameter(0)
          %n = s32[] parameter(1)
          ROOT %r = f32[1]{0} dynamic-slice(%p, %n), dynamic_slice_sizes={1}
        }
        ENTRY %main (x: f32[256], n: s32[]) -> f32[] {
          %x = f32[256]{0} parameter(0)
          %n = s32[] parameter(1)
          %a = f32[256]{0} reverse(%x), dimensions={0}
          %s = ((f32[256]{0}, s32[]), f32[1]{0}, u32[]) fusion-start(%a, %n), kind=kLoop, calls=%f
          %b = f32[1]{0} fusion-done(%s)
          ROOT %d = f32[] dot(%b, %b)
        }""")
    (held,) = (b for b in found.buffers if b.kind == TEMPORARY and b.bytes == KIB)
    assert [m.name for m in held.makers] == ["a"]


def test_temporaries_lie_in_outputs_that_are_not_written_yet():
    body = """
        ENTRY %main (x: f32[256]) -> f32[256] {
          %x = f32[256]{0} parameter(0)
          %a = f32[2048]{0} broadcast(%x), dimensions={0}
          %b = f32[2048]{0} reverse(%a), dimensions={0}
          %c = f32[] dot(%b, %b)
          ROOT %o = f32[2048]{0} broadcast(%c), dimensions={}
        }"""
    assert max(walk(body).temporary_bytes) == 8 * KIB + 4
    assert [b.makers[0].name for b in walk(body).buffers if b.within] == ["a"]
    assert max(walk(body, reuses_outputs=False).temporary_bytes) == 16 * KIB


def test_an_output_overwrites_the_temporary_that_lies_in_it():
    body = """
        ENTRY %main (x: f32[256]) -> f32[256] {{
          %x = f32[256]{{0}} parameter(0)
          %a = f32[256]{{0}} reverse(%x), dimensions={{0}}
          ROOT %o = f32[256]{{0}} {opcode}(%a)
        }}"""
    assert max(walk(body.format(opcode="sine")).temporary_bytes) == 0
    for opcode in ("reverse", "copy"):
        assert max(walk(body.format(opcode=opcode)).temporary_bytes) == KIB
    # In an output, a result takes nothing over from the heap.
    apart = walk(body.format(opcode="sine"), reuses_outputs=False)
    assert max(apart.temporary_bytes) == KIB


def lie_in_outputs(found):
    return [b.makers[0].name for b in found.buffers if b.within and b.bytes >= KIB]


def test_of_equal_temporaries_the_first_operand_lies_in_the_output():
    body = """
        ENTRY %main (x: f32[256]) -> f32[512] {{
          %x = f32[256]{{0}} parameter(0)
          %a = f32[512]{{0}} broadcast(%x), dimensions={{0}}
          %b = f32[512]{{0}} broadcast(%x), dimensions={{0}}
          %c = f32[] dot({operands})
          ROOT %o = f32[512]{{0}} broadcast(%c), dimensions={{}}
        }}"""
    assert lie_in_outputs(walk(body.format(operands="%a, %b"))) == ["a"]
    assert lie_in_outputs(walk(body.format(operands="%b, %a"))) == ["b"]


def test_a_temporary_lies_in_the_last_of_equal_outputs():
    found = walk("""
        ENTRY %main (x: f32[256]) -> (f32[512], f32[512]) {
          %x = f32[256]{0} parameter(0)
          %a = f32[512]{0} broadcast(%x), dimensions={0}
          %d = f32[512]{0} reverse(%a), dimensions={0}
          %f = f32[] dot(%a, %d)
          %o = f32[512]{0} broadcast(%f), dimensions={}
          %g = f32[] dot(%d, %d)
          %p = f32[512]{0} broadcast(%g), dimensions={}
          ROOT %t = (f32[512]{0}, f32[512]{0}) tuple(%o, %p)
        }""")
    assert lie_in_outputs(found) == ["a"]  # in p, so that there is no place for d


# -- donated arguments ------------------------------------------------------------------------

STEP = """
    ENTRY %main (x: f32[256], s: f32[2048]) -> (f32[], f32[2048]) {
      %s = f32[2048]{0} parameter(1)
      %x = f32[256]{0} parameter(0)
      %n = f32[2048]{0} reverse(%s), dimensions={0}
      %m = f32[] dot(%n, %n)
      %a = f32[1024]{0} broadcast(%m), dimensions={}
      %l = f32[] dot(%a, %a)
      %o = f32[2048]{0} broadcast(%l), dimensions={}
      ROOT %t = (f32[], f32[2048]{0}) tuple(%l, %o)
    }"""


def donating(aliased, body=STEP):
    header = f"HloModule m, is_scheduled=true, input_output_alias={aliased}, x={{1}}\n"
    return schedule(parse(header + textwrap.dedent(body)))


def test_a_result_takes_the_place_of_a_donated_argument():
    kept, found = walk(STEP), donating("{ {1}: (1, {}, may-alias) }")
    assert kept.base_bytes == (1 + 8 + 8) * KIB + 4
    assert found.base_bytes == (1 + 8) * KIB + 4
    (donated,) = (b for b in found.buffers if b.donated)
    assert donated.kind == ARGUMENT
    assert [m.name for m in donated.makers] == ["s", "o"]
    assert not any(b.donated for b in kept.buffers)


def test_temporaries_lie_in_a_donated_argument_after_its_last_use():
    found = donating("{ {1}: (1, {}, may-alias) }")
    assert {b.makers[0].name: b.within for b in found.buffers if b.kind == TEMPORARY} == {
        "n": False,  # the argument is read then
        "m": True,
        "a": True,
    }
    assert max(found.temporary_bytes) == 8 * KIB
    in_place = STEP.replace("reverse(%s), dimensions={0}", "negate(%s)")
    assert max(donating("{ {1}: (1, {}, may-alias) }", in_place).temporary_bytes) == 0


def test_a_donated_argument_that_is_the_only_result():
    body = """
        ENTRY %main (x: f32[256]) -> f32[256] {
          %x = f32[256]{0} parameter(0)
          ROOT %y = f32[256]{0} sine(%x)
        }"""
    assert walk(body).peak_bytes == 2 * KIB
    assert donating("{ {}: (0, {}, must-alias) }", body).peak_bytes == KIB
