"""Does a name match a regular expression, decided in polynomial time for every pattern?"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any


@functools.lru_cache(maxsize=65536)
def matches(pattern: str, name: str) -> bool:
    """Tell whether a whole name matches a pattern.

    >>> matches(r"(q|k|v)_proj", "q_proj"), matches(r"(a+)+b", "a" * 100)
    (True, False)
    """
    return compiled(pattern).fullmatch(name)


@functools.lru_cache(maxsize=1024)
def compiled(pattern: str) -> Regex:
    """Return the compiled pattern; `Regex` says which patterns are refused."""
    return Regex(pattern)


# The private modules of `re` that parse and compile a pattern, as in CPython 3.11 to 3.14.
_parser: Any = importlib.import_module("re._parser")
_compiler: Any = importlib.import_module("re._compiler")


class Regex:
    """A regular expression that matches in polynomial time.

    `re` tries one way to match a pattern after another, and ``(a+)+b`` has exponentially many. Here
    each part of the pattern is matched once at each position of the text at which it may begin, and
    the result is the set of all positions at which it may end.

    Raises:
      ValueError: the pattern is too long or too deeply nested, or it has a part, such as a back
        reference, whose ends depend on more than the position at which the part begins.
    """

    def __init__(self, pattern: str):
        if len(pattern) > MAX_LENGTH:
            raise ValueError(f"more than {MAX_LENGTH:,} characters")
        self.whole = _parser.parse(pattern)
        # The compiled items that contain no other patterns, by identity.
        self.single: dict[int, re.Pattern[str]] = {}
        self._prepare(self.whole, 0)

    def _prepare(self, part: Any, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError(f"more than {_MAX_DEPTH} levels of groups")
        for item in part.data:
            name, inner = str(item[0]), _parts(item)
            if name in _REFUSED:
                raise ValueError(f"{_REFUSED[name]} cannot be matched in bounded time")
            if name == "SUBPATTERN" and (item[1][1] or item[1][2]):
                raise ValueError("flags for one group are not supported")
            for other in inner:
                self._prepare(other, depth + 1)
            if not inner:
                one = _parser.SubPattern(self.whole.state, [item])
                self.single[id(item)] = _compiler.compile(one)

    def fullmatch(self, text: str) -> bool:
        """Tell whether the whole text matches."""
        known: dict[tuple[int, int], set[int]] = {}

        def ends(part: Any, start: int) -> set[int]:
            key = id(part), start
            if key not in known:
                places = {start}
                for item in part.data:
                    places = after(item, places)
                known[key] = places
            return known[key]

        def through(part: Any, places: set[int]) -> set[int]:
            return set().union(*(ends(part, place) for place in places))

        def after(item: Any, places: set[int]) -> set[int]:
            name, inner = str(item[0]), _parts(item)
            if name in ("MAX_REPEAT", "MIN_REPEAT"):
                least, most, part = item[1]
                return repeated(least, most, part, places)
            if name in ("ASSERT", "ASSERT_NOT"):
                (part,), behind = inner, item[1][0] < 0
                return {x for x in places if holds(part, behind, x) == (name == "ASSERT")}
            if inner:
                return set().union(*(through(part, places) for part in inner))
            tried = (self.single[id(item)].match(text, place) for place in places)
            return {match.end() for match in tried if match is not None}

        def holds(part: Any, behind: bool, place: int) -> bool:
            if not behind:
                return bool(ends(part, place))
            begin = place - part.getwidth()[0]
            return begin >= 0 and place in ends(part, begin)

        def repeated(least: int, most: int, part: Any, places: set[int]) -> set[int]:
            enough = len(text) + 1  # among more repetitions one is empty, which changes nothing
            for _ in range(min(least, enough)):
                places = through(part, places)
            reached = places
            for _ in range(min(most - least, enough)):
                places = through(part, places) - reached
                if not places:
                    break
                reached = reached | places
            return reached

        return len(text) in ends(self.whole, 0)


MAX_LENGTH = 1000
_MAX_DEPTH = 100
_REFUSED = {
    "GROUPREF": "a reference to a group",
    "GROUPREF_EXISTS": "a condition on a group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repetition",
}


def _parts(item: Any) -> list[Any]:
    """Return the patterns inside an item of a parsed pattern."""
    op, arg = item
    if str(op) == "BRANCH":
        return arg[1]
    whole = str(op) in ("SUBPATTERN", "MAX_REPEAT", "MIN_REPEAT", "ASSERT", "ASSERT_NOT")
    return [arg[-1]] if whole else []
