"""Paths of modules and files."""

from remat_kit._program.paths import roll_up


def test_roll_up():
    assert roll_up("GPT/block_11/mlp") == "GPT/block_*/mlp"
    assert roll_up("GPT/layers/3/attn") == "GPT/layers/*/attn"
    assert roll_up("Net/conv2d/up") == "Net/conv2d/up"
    assert roll_up("") == ""
