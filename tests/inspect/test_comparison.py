"""Several reports side by side."""

import json

import jax
from report_programs import KEYS, W, X, loss, rich_text

from remat_kit import (
    Comparison,
    inspect,
)


def test_a_comparison_puts_none_first_and_compares_with_it():
    reports = [inspect(loss, W, X, policy=p, target="cpu") for p in ("nothing", None, "dots")]
    comparison = Comparison(reports, model="small")
    assert [r.policy for r in comparison.reports] == ["none", "nothing", "dots"]
    plain = json.loads(json.dumps(comparison.to_json()))
    assert [p["policy"] for p in plain["policies"]] == ["none", "nothing", "dots"]
    assert plain["model"] == "small"
    assert plain["versions"]["jax"] == jax.__version__
    assert plain["policies"][1].keys() == KEYS.keys()
    text = str(comparison)
    assert "×0.00" in text  # nothing is kept: 0 B of 1 KiB
    assert "×1.00" in text
    assert "policies of small" in rich_text(comparison)
    assert "model" not in Comparison(reports).to_json()
