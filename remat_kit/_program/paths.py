"""Module paths from name stacks, and short names for source files."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from typing import Any

from remat_kit import _jax

# Scopes that JAX adds around what it recomputes; they are no part of a module's path.
_REMAT_SCOPES = frozenset({"checkpoint", "rematted_computation", "remat", "remat2"})


Path = tuple[str, ...]


# -- one equation ---------------------------------------------------------------------------


def common_prefix(*paths: Sequence[str]) -> Path:
    """Return the components that all paths begin with."""
    shared: list[str] = []
    for column in zip(*paths, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return tuple(shared)


def join_scopes(groups: Sequence[Sequence[str]]) -> Path:
    """Merge the groups of a name stack into one module path.

    A transformation that replays a call writes the path once more (``jvp(Net)/jvp(Net)/up``);
    a group that repeats the beginning replaces it, another one goes on from there. The formula of
    an einsum (``bqhd,bkhd->bhqk``) is a scope of JAX's and no module.
    """
    path: list[str] = []
    for group in groups:
        clean = [s for s in group if s not in _REMAT_SCOPES and "->" not in s]
        common = len(common_prefix(path, clean))
        path = clean if common and common == len(path) else path + clean
    return tuple(path)


def module_path(eqn: Any, base: Path = ()) -> Path:
    """Return the module path of an equation inside a body whose own path is ``base``."""
    return join_scopes([base, *_jax.name_stack_groups(eqn)])


def roll_up(path: str) -> str:
    """Return a module path with the numbers of repeated blocks left out.

    >>> roll_up("GPT/block_11/mlp"), roll_up("GPT/layers/3/attn")
    ('GPT/block_*/mlp', 'GPT/layers/*/attn')
    """
    return re.sub(r"(?<=_)\d+(?=/|$)|(?<=/)\d+(?=/|$)", "*", path)


def short_path(file: str) -> str:
    """Return a file's path relative to the working directory, or to where packages are installed.

    >>> short_path(os.path.join(os.getcwd(), "models", "gpt.py"))
    'models/gpt.py'

    A cell of a notebook goes by the number it shows: ``In[3]``.
    """
    if cell := _CELL.fullmatch(file):
        return _cell(cell.group(1))
    for folder in (os.getcwd(), *_package_folders()):
        if file.startswith(folder + os.sep):
            return file[len(folder) + 1 :]
    return file


# Where ipykernel says that a cell is compiled from: a folder of its process, a hash of the text.
_CELL = re.compile(r".*[\\/]ipykernel_\d+[\\/](\d+\.py)")


def _cell(file: str) -> str:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    compiler = getattr(shell, "compile", None)
    if compiler is not None and hasattr(compiler, "format_code_name"):
        # A program that was compiled by an earlier process has the names of that one's folder.
        here = os.path.join(tempfile.gettempdir(), f"ipykernel_{os.getpid()}", file)
        if (found := compiler.format_code_name(here)) is not None:
            return found[1]
    return "a cell"


@functools.cache
def _package_folders() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
