"""Random programs under random policies are what they are undecorated.

    pytest tests/contract                                              eighty examples
    REMAT_KIT_EXAMPLES=2000 pytest tests/contract                      two thousand
    REMAT_KIT_SEED=5 REMAT_KIT_EXAMPLES=2000 pytest tests/contract     two thousand others

The examples are the same in every run unless a seed is given. A failing example prints as a `Case`
that can be pasted into ``test_counterexamples.py``.
"""

import os

import pytest
import strategies
from harness import SECOND_ORDER
from hypothesis import HealthCheck, Phase, assume, given, seed, settings

EXAMPLES = int(os.environ.get("REMAT_KIT_EXAMPLES", "80"))
SEED = os.environ.get("REMAT_KIT_SEED", "0")

# What is done, in which way it runs, and the share of the examples.
GROUPS = {
    "value": (("value", "unrelated jvp"), ("traced", "traced", "vmap", "eager"), 0.15),
    "gradient": (
        ("gradient", "gradient of one", "pullback", "accumulated", "over a loop", "trained"),
        ("traced", "traced", "vmap"),
        0.30,
    ),
    "jvp": (("jvp", "jvp of one", "linearized", "slopes"), ("traced", "vmap"), 0.15),
    "second order": (
        SECOND_ORDER,
        ("traced", "traced", "vmap"),
        0.20,
    ),
    "compiled": (
        ("gradient", "pullback", "accumulated", "over a loop", "jvp", "mixed"),
        ("jit", "eager"),
        0.08,
    ),
    "planned": (("gradient", "gradient of one", "mixed", "value"), ("traced",), 0.02),
    "in pieces": (
        (
            "gradient",
            "gradient of one",
            "pullback",
            "jvp",
            "over a loop",
            "mixed",
            "gradient of jvp",
            "slopes",
            "jvp of slopes",
            "gradient of slopes",
        ),
        ("traced", "traced", "vmap", "jit"),
        0.10,
    ),
}


def test_the_shares_add_up():
    assert sum(share for *_, share in GROUPS.values()) == pytest.approx(1)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # a policy need not fit a random program
def test_random_programs(group):
    transforms, modes, share = GROUPS[group]
    special = {"planned": strategies.plans, "in pieces": strategies.in_pieces}
    how = special.get(group, strategies.applications)

    @settings(
        max_examples=max(1, round(EXAMPLES * share)),
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(strategies.cases(transforms, modes, how))
    def check(case):
        assume(case.check())

    seed(f"{group} {SEED}")(check)()
