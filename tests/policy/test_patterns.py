"""Patterns of paths."""

from __future__ import annotations

import pytest

from remat_kit._policy.patterns import path_matches, prefix_matching


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("GPT/mlp", "GPT/mlp", True),
        ("GPT/mlp", "GPT/mlp/up", False),
        ("*/mlp", "GPT/mlp", True),
        ("*/mlp", "Root/GPT/block_0/mlp", True),
        ("*/mlp", "mlp", False),
        ("**/mlp", "mlp", True),
        ("**/mlp", "a/b/mlp", True),
        ("*", "GPT", True),
        ("*", "GPT/mlp", False),
        ("GPT/*", "GPT/mlp", True),
        ("GPT/*", "GPT/mlp/up", False),
        ("GPT/*/up", "GPT/mlp/up", True),
        ("GPT/*/up", "GPT/a/b/up", False),
        ("GPT/**", "GPT", True),
        ("GPT/**/up", "GPT/up", True),
        ("GPT/**/up", "GPT/a/b/up", True),
        ("**", "", True),
        ("*", "", False),
        ("*/block_*", "GPT/block_12", True),
        ("*/block_*", "GPT/my_block_1", False),
        ("*/block_[0-3]", "GPT/block_3", True),
        ("*/block_[!0-3]", "GPT/block_3", False),
        ("*/block_?", "GPT/block_12", False),
        ("a.b/c+", "a.b/c+", True),
        ("a.b", "axb", False),
        ("x[", "x[", True),
    ],
)
def test_path_matches(pattern: str, path: str, expected: bool) -> None:
    assert path_matches(pattern, path) is expected


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("*/block_*", "GPT/block_0/attn/out", "GPT/block_0"),
        ("*/block_*", "Root/GPT/block_0", "Root/GPT/block_0"),
        ("*/block_*", "block_0/mlp", "block_0"),
        ("*/block_*", "block_0/block_1", "block_0"),
        ("block_*", "GPT/block_0", None),
        ("*/block_*", "GPT/head", None),
        ("*/block_*", "", None),
        ("**", "GPT", ""),
    ],
)
def test_prefix_matching(pattern: str, path: str, expected: str | None) -> None:
    assert prefix_matching(pattern, path) == expected
