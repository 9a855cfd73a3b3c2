"""What lints see of a program."""

import pytest

from remat_kit._inspect.lints.scene import as_at

# Many of the programs are made to have a policy without an effect, which is a warning too.
pytestmark = pytest.mark.filterwarnings("ignore::remat_kit.RematKitWarning")


def test_patterns_for_at():
    assert as_at("") is None
    assert as_at("GPT/decoder/block_*") == "*/decoder/block_*"
