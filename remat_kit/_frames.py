"""Does a source line belong to the user, or to JAX, Flax or this package?"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import sysconfig
import warnings
from typing import Any

from remat_kit import _jax
from remat_kit._errors import RematKitWarning
from remat_kit._files import is_own_file


@functools.cache
def _flax_folder() -> str:
    import flax

    return os.path.dirname(flax.__file__) + os.sep


def _is_flax_or_own(name: str) -> bool:
    return name.startswith(_flax_folder()) or is_own_file(name)


@functools.lru_cache(maxsize=4096)
def is_library_file(name: str) -> bool:
    """Tell whether a source file is one of JAX, Flax, remat_kit or the standard library."""
    return _jax.is_jax_file(name) or _is_flax_or_own(name)


def is_installed_file(name: str) -> bool:
    """Tell whether a source file is one of an installed package or of the standard library."""
    return is_library_file(name) or name.startswith(("<frozen ", *_installed()))


@functools.cache
def _installed() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})


def source_of(eqn: Any) -> tuple[str, int]:
    """Return (file, line) of the innermost frame of the user's code, or ("", 0) if there is none.

    Frames of JAX, Flax and remat_kit are skipped, so an `nn.Dense` inside a model is reported at
    the line of the model that called it.
    """
    first = ("", 0)
    for file, line, _ in _jax.user_frames(eqn):
        if not _is_flax_or_own(file):
            return file, line
        first = first if first[1] else (file, line)
    return first


def stack_of(eqn: Any, most: int) -> list[tuple[str, int, str]]:
    """Return (file, line, function) of the ``most`` innermost frames of the user's code."""
    ours = (
        (file, line, name.rpartition("<locals>.")[2])
        for file, line, name in _jax.user_frames(eqn)
        if not _is_flax_or_own(file)
    )
    return list(itertools.islice(ours, most))


def warn(message: str, hint: str) -> None:
    """Emit a `RematKitWarning` that points to the innermost line of the user's code."""
    depth, frame = 1, sys._getframe(0)
    while frame is not None and is_library_file(frame.f_code.co_filename):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(f"{message}\nhint: {hint}", RematKitWarning, stacklevel=depth)
