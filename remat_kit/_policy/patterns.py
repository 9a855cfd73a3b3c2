"""Does a module path match a pattern?

In a pattern, ``*`` stands for a part of one component and ``**`` for any number of components.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator

from remat_kit._errors import PolicyError
from remat_kit._units import shortened

# ---------------------------------------------------------------------------------------------
# Module paths
# ---------------------------------------------------------------------------------------------


def path_matches(pattern: str, path: str) -> bool:
    """Whether the whole of a module path matches a pattern.

    ``*``, ``?`` and ``[...]`` match inside one component. ``**`` matches any number of components,
    including none. A leading ``*/`` matches one or more components, because the path of a model may
    begin with the names of the modules that contain the model.

    >>> path_matches("*/mlp", "GPT/block_0/mlp"), path_matches("*/mlp", "mlp")
    (True, False)
    >>> path_matches("GPT/block_[01]/**", "GPT/block_1"), path_matches("**/mlp", "mlp")
    (True, True)

    Raises:
      PolicyError: the pattern is empty or has an empty component.
    """
    return path_regex(pattern, "+").fullmatch(with_final_slash(path)) is not None


@functools.lru_cache(maxsize=65536)
def prefix_matching(pattern: str, path: str) -> str | None:
    """Return the shortest prefix of a module path that matches a pattern, or None.

    The patterns of ``at=`` are read in this way. They mean the same as in `path_matches`, except
    that a leading ``*/`` may also match nothing, since functions and NNX modules may have no root.

    >>> prefix_matching("*/block_*", "GPT/decoder/block_3/mlp/up")
    'GPT/decoder/block_3'
    >>> prefix_matching("*/block_*", "block_0/mlp"), prefix_matching("*/block_*", "GPT/head")
    ('block_0', None)

    Raises:
      PolicyError: the pattern is empty or has an empty component.
    """
    regex = path_regex(pattern, "*")
    return next((p for p in prefixes(path) if regex.fullmatch(with_final_slash(p))), None)


def prefixes(path: str) -> Iterator[str]:
    parts = path.split("/") if path else []
    return ("/".join(parts[:n]) for n in range(len(parts) + 1))


def with_final_slash(path: str) -> str:
    # Every component ends in a slash, so that one regex can match whole paths and their ancestors.
    return path + "/" if path else ""


@functools.lru_cache(maxsize=1024)
def path_regex(pattern: str, leading: str) -> re.Pattern[str]:
    steps = itertools.pairwise(["", *pattern.split("/")])
    parts = [part for before, part in steps if not before == part == "**"]
    if not all(parts) or "\0" in pattern:
        raise PolicyError(
            f"`module({shortened(pattern)})`: a pattern with an empty component or a NUL matches "
            "no module",
            hint="write paths such as 'GPT/block_0/mlp' or '*/mlp/**', with no slash at either end",
        )
    out = []
    for i, part in enumerate(parts):
        if part == "**":
            out.append("(?:[^/]+/)*")
        elif part == "*" and i == 0 and len(parts) > 1:
            out.append(f"(?:[^/]+/){leading}")
        else:
            out.append(_component_regex(part) + "/")
    try:
        return re.compile("".join(out))
    except (re.error, OverflowError, RecursionError) as error:
        raise PolicyError(
            f"`module({shortened(pattern)})`: this pattern cannot be read: {error}",
            hint="a set of characters is written as [abc] or [0-9], the smaller end first",
        ) from None


def _component_regex(part: str) -> str:
    def piece(wildcard: re.Match[str]) -> str:
        text = wildcard[0]
        if text[0] == "*":
            return "\0"
        if text == "?":
            return "[^/]"
        if len(text) > 2:
            body = re.sub(r"([\\\[&~|])", r"\\\1", text[1:-1])
            return f"[{'^' + body[1:] if body[0] == '!' else body}]"
        return re.escape(text)

    # A middle piece may take the first place at which it matches, because any later place leaves
    # less text for the rest. So the regex needs no backtracking (as in `fnmatch.translate`), with
    # which `*a*a*a*b` would take exponential time.
    first, *rest = re.sub(r"\?|\[[^\]]+\]|\*+|[^*]", piece, part).split("\0")
    if not rest:
        return first
    middle = "".join(f"(?>[^/]*?{m})" for m in rest[:-1])
    return f"{first}{middle}[^/]*{rest[-1]}"
