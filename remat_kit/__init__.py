"""Say, see and plan what a JAX training step keeps in memory.

The public names are in `__init__.pyi`, each with the module in which it lives. A name is imported
when it is first used, so `remat-kit --version` and the pytest plugin do not import JAX.
"""

import remat_kit._interrupt as _interrupt  # noqa: F401, I001 (first: Ctrl-C during the imports)
import lazy_loader as _lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)
