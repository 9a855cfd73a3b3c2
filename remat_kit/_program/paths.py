"""To which module does an equation belong, and how is a source file called in a report?"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from remat_kit import _jax

# Scopes that JAX adds around recomputed equations. They are not part of the path of a module.
# The last one marks them, in jaxprs and in compiled programs (0.10.2 and 0.12).
RECOMPUTED = "rematted_computation"
_REMAT_SCOPES = frozenset({"checkpoint", "remat", "remat2", RECOMPUTED})


# The scope of a loop over pieces, which says what the loop is; see `pieces_scope`.
PIECES = " pieces of axis "
_PIECES = re.compile(rf"\d+{PIECES}\d+", re.ASCII)


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

    A transformation that replays a call repeats the path (``jvp(Net)/jvp(Net)/up``). So a group
    that begins with the path of the groups before it replaces that path, and any other group is
    appended to it. The formula of an einsum (``bqhd,bkhd->bhqk``) is a scope that JAX adds and not
    a module.

    >>> join_scopes([["Net"], ["Net", "up"]]), join_scopes([["Net"], ["up"]])
    (('Net', 'up'), ('Net', 'up'))
    """
    path: list[str] = []
    for group in groups:
        clean = [s for s in group if s not in _REMAT_SCOPES and "->" not in s]
        clean = [s for s in clean if not _PIECES.fullmatch(s)]
        common = len(common_prefix(path, clean))
        path = clean if common and common == len(path) else path + clean
    return tuple(path)


def pieces_scope(pieces: int, axis: int) -> str:
    """Return the scope that a loop over pieces has in programs, compiled programs and profiles.

    It is not part of the path of a module.

    >>> pieces_scope(16, 0), join_scopes([["Net", pieces_scope(16, 0), "up"]])
    ('16 pieces of axis 0', ('Net', 'up'))
    """
    return f"{pieces}{PIECES}{axis}"


def piece_loop(groups: Sequence[Sequence[str]]) -> tuple[Path, str] | None:
    """Return the module path and the scope of the outermost loop over pieces in a name stack.

    >>> piece_loop([["Net"], ["head", "16 pieces of axis 0", "up"]])
    (('Net', 'head'), '16 pieces of axis 0')
    """
    for g, group in enumerate(groups):
        for i, scope in enumerate(group):
            if _PIECES.fullmatch(scope):
                return join_scopes([*groups[:g], group[:i]]), scope
    return None


def module_path(eqn: Any, base: Path = ()) -> Path:
    """Return the module path of an equation inside a body whose own path is ``base``."""
    return join_scopes([base, *_jax.name_stack_groups(eqn)])


def roll_up(path: str) -> str:
    """Return a module path with the numbers of repeated blocks left out.

    >>> roll_up("GPT/block_11/mlp"), roll_up("GPT/layers/3/attn")
    ('GPT/block_*/mlp', 'GPT/layers/*/attn')
    """
    return _NUMBER.sub("*", path)


def outermost_block(path: str) -> str:
    """Return a module path up to its first numbered module; "" if it has none.

    >>> [outermost_block(path) for path in ("GPT/block_11/mlp", "GPT/layers/3/attn", "GPT/ln_f")]
    ['GPT/block_11', 'GPT/layers/3', '']
    """
    found = _NUMBER.search(path)
    return path[: found.end()] if found else ""


_NUMBER = re.compile(r"(?<=_)\d+(?=/|$)|(?<=/)\d+(?=/|$)")


def folded(paths: Iterable[str]) -> str:
    """Return module paths that differ in the numbers of repeated blocks as one, with the numbers.

    >>> folded(f"GPT/block_{i}/mlp" for i in range(12)), folded(["GPT/block_3", "GPT/block_5"])
    ('GPT/block_{0..11}/mlp', 'GPT/block_{3,5}')

    Args:
        paths: with one common result of `roll_up`.
    """
    paths = list(paths)
    columns = zip(*(map(int, _NUMBER.findall(path)) for path in paths), strict=True)
    texts = iter([_numbers(sorted(set(column))) for column in columns])
    return _NUMBER.sub(lambda _: next(texts), paths[0])


def _numbers(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if first == last:
        return str(first)
    if last - first == len(numbers) - 1:
        return f"{{{first}..{last}}}"
    return f"{{{','.join(map(str, numbers))}}}" if len(numbers) <= 4 else "*"


def short_path(file: str) -> str:
    """Return the path of a file relative to the working directory or the installed packages.

    >>> short_path(os.path.join(os.getcwd(), "models", "gpt.py"))
    'models/gpt.py'

    A cell of a notebook is called by the number that the notebook shows: ``In[3]``.
    """
    if cell := _CELL.fullmatch(file):
        return _cell(cell.group(1))
    for folder in (os.getcwd(), *_package_folders()):
        if file.startswith(folder + os.sep):
            return file[len(folder) + 1 :]
    return file


# ipykernel gives each cell such a file name: a folder of its process and a hash of the cell's text.
_CELL = re.compile(r".*[\\/]ipykernel_\d+[\\/](\d+\.py)")


def _cell(file: str) -> str:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    compiler = getattr(shell, "compile", None)
    if compiler is not None and hasattr(compiler, "format_code_name"):
        # A program that an earlier process compiled has the name of the folder of that process.
        here = os.path.join(tempfile.gettempdir(), f"ipykernel_{os.getpid()}", file)
        if (kind_and_name := compiler.format_code_name(here)) is not None:
            return kind_and_name[1]
    return "a cell"


@functools.cache
def _package_folders() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
