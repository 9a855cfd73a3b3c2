import jax
import pytest
from chain_of_blocks import ARGS, chain, compiled

from remat_kit._compiled import hlo as _hlo
from remat_kit._compiled.hlo import parse

# -- by hand --------------------------------------------------------------------------------


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="entry computation"):
        parse("HloModule m\n")


# -- compiled -------------------------------------------------------------------------------


def test_every_instruction_of_a_real_program_is_parsed():
    text = compiled(chain(jax.checkpoint), ARGS, "cpu").hlo_text
    program = parse(text)
    parsed = sum(1 for _ in program.instructions())
    assert parsed == sum(line.lstrip().removeprefix("ROOT ").startswith("%") and " = " in line
                         and line.startswith(" ") for line in text.splitlines())  # fmt: skip
    roots = [i for i in program.instructions() if i.is_root]
    assert len(roots) == len(program.computations)
    names = {i.name for i in program.instructions()}
    assert all(set(i.operands) <= names for i in program.instructions())


_TWICE = """HloModule m
%body (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0), metadata={op_name="f/jvp(a)/while"}
  ROOT %sin = f32[4]{0} sine(%p), metadata={op_name="f/jvp(a)/while/body/checkpoint/sin"}
}
%cond (q: f32[4]) -> pred[] {
  %q = f32[4]{0} parameter(0)
  ROOT %lt = pred[] constant(false), metadata={op_name="f/jvp(a)/while/cond/lt"}
}
%cosine (r: f32[4]) -> f32[4] {
  %r = f32[4]{0} parameter(0)
  ROOT %cos = f32[4]{0} cosine(%r), metadata={op_name="f/jvp(a)/while/body/while/body/cos"}
}
%inner (t: f32[4]) -> f32[4] {
  %t = f32[4]{0} parameter(0)
  ROOT %fusion = f32[4]{0} fusion(%t), kind=kLoop, calls=%cosine
}
%inner_cond (u: f32[4]) -> pred[] {
  %u = f32[4]{0} parameter(0)
  ROOT %lt.2 = pred[] constant(false)
}
%body.clone (s: f32[4]) -> f32[4] {
  %s = f32[4]{0} parameter(0)
  %exp = f32[4]{0} exponential(%s), metadata={op_name="f/jvp(a)/while/body/exp"}
  %kept = f32[4]{0} negate(%exp), metadata={op_name="f/hoisted"}
  ROOT %loop.3 = f32[4]{0} while(%kept), condition=%inner_cond, body=%inner, metadata=@1
}
ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %loop.1 = f32[4]{0} while(%x), condition=%cond, body=%body, metadata=@2
  ROOT %loop.2 = f32[4]{0} while(%loop.1), condition=%cond, body=%body.clone, metadata=@3
}
"""


def test_the_instructions_of_a_copied_loop_get_the_name_stack_of_the_loop():
    stacks = "f/jvp(a)/while/body/while", "f/jvp(a)/while", "f/transpose(jvp(b))/while"
    text = _TWICE
    for i, stack in enumerate(stacks):
        text = text.replace(f"@{i + 1}", f'{{op_name="{stack}"}}')
    found = {i.name: i.op_name for i in parse(text).instructions()}
    again = "f/transpose(jvp(b))/while/body"
    assert found["sin"] == "f/jvp(a)/while/body/checkpoint/sin"
    assert found["lt"] == "f/jvp(a)/while/cond/lt"
    assert found["exp"] == f"{again}/exp"
    assert found["loop.3"] == f"{again}/while"
    assert found["cos"] == f"{again}/while/body/cos"
    assert found["kept"] == "f/hoisted"


def test_library_frames_are_passed_over():
    frames = _hlo._Frames(
        [
            "FileNames",
            '1 "/site-packages/flax/linen/linear.py"',
            '2 "/home/me/model.py"',
            "FileLocations",
            "1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}",
            "2 {file_name_id=2 function_name_id=1 line=20 end_line=20 column=1 end_column=2}",
            "StackFrames",
            "1 {file_location_id=2 parent_frame_id=1}",
            "2 {file_location_id=1 parent_frame_id=2}",
        ]
    )
    assert frames.source('metadata={op_name="a" stack_frame_id=2}') == "/home/me/model.py:20"
