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
