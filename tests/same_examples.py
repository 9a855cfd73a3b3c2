"""Let Hypothesis draw the same examples in every run, so that no run fails by chance.

Hypothesis also draws numbers that stand in the source of imported modules. Examples would depend
on what is imported, and would change with every edit of the package. Importing this module
switches that off and seeds each test by its name. ``REMAT_KIT_SEED`` seeds others
(tests/contract/test_random_programs.py).
"""

from hypothesis import settings
from hypothesis.internal.conjecture.providers import HypothesisProvider

# An internal method (Hypothesis 6.131 to 6.170). Where it is gone, examples change more often.
if hasattr(HypothesisProvider, "_maybe_draw_constant"):
    HypothesisProvider._maybe_draw_constant = lambda *_, **__: None  # type: ignore[method-assign]

settings.register_profile("same examples", derandomize=True, database=None, deadline=None)
settings.load_profile("same examples")
