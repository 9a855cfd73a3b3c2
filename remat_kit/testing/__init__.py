"""Checks for the tests of a project that trains a model: memory and equivalence of a step.

The checks compile for a chip that need not be in this machine. If a check fails, its message says
what to do. `pytest` also gets the fixture ``memory_baseline``, a `MemoryBaseline` whose file lies
beside the test: ``memory_baselines/<test file>/<test>.json``.
"""

# Lazy, because pytest imports the plugin early, and the plugin must not import JAX.
import lazy_loader as _lazy_loader

__getattr__, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)
