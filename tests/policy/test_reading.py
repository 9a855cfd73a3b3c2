"""What a user may write for a policy."""

from __future__ import annotations

import jax
import pytest

from remat_kit._errors import PolicyError, UnknownNameError
from remat_kit._policy.algebra import (
    callable_policy,
    offload,
    recompute,
    save,
)
from remat_kit._policy.reading import as_policy
from remat_kit._policy.selectors import (
    dots,
    module,
    named,
    nothing,
    primitive,
)
from remat_kit._policy.structural import uniform


def test_as_policy() -> None:
    assert as_policy(None) is None
    assert as_policy("none") is None
    assert as_policy(dots) == save(dots)
    assert as_policy(save(dots)) == save(dots)
    assert as_policy("dots") == save(dots)
    assert as_policy("recompute(primitive('max'))") == recompute(primitive("max"))
    saveable = jax.checkpoint_policies.nothing_saveable
    assert as_policy(saveable) == callable_policy(saveable)


def test_tables_from_configuration_files() -> None:
    assert as_policy({"policy": "uniform:2"}) == uniform(2)
    assert as_policy({"policy": "none"}) is None
    assert as_policy({"save": "a", "offload": "b"}) == save(named("a")) | offload(named("b"))
    table = {
        "recompute": {"primitive": ["max", "exp"]},
        "save": ["a", "b", {"module": "*/attn", "primitive": "tanh"}],
        "offload": {"module": ["*/mlp"]},
        "to": "unpinned_host",
    }
    assert as_policy(table) == recompute(primitive("max", "exp")) >> (
        save(named("a", "b") | module("*/attn") | primitive("tanh"))
        | offload(module("*/mlp"), to="unpinned_host")
    )
    assert as_policy({"recompute": {"name": "x"}}) == recompute(named("x"))
    assert as_policy({"save": []}) == save(nothing)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"sav": ["a"]}, "did you mean 'save'"),
        ({"save": {"modul": "*/mlp"}}, "did you mean 'module'"),
        ({}, "must have 'policy' alone"),
        ({"to": "pinned_host"}, "must have 'policy' alone"),
        ({"policy": "dots", "save": ["a"]}, "must have 'policy' alone"),
        ({"save": 3}, "3 selects no value"),
        ({"save": {}}, "selects no value"),
    ],
)
def test_tables_that_are_none(table: dict, said: str) -> None:
    with pytest.raises((PolicyError, UnknownNameError), match=said):
        as_policy(table)
