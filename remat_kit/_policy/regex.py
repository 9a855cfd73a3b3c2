"""Regular expressions that match in polynomial time, so that no pattern takes forever."""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any


@functools.lru_cache(maxsize=65536)
def matches(pattern: str, name: str) -> bool:
    """Tell whether a whole name matches a pattern."""
    return compiled(pattern).fullmatch(name)


@functools.lru_cache(maxsize=1024)
def compiled(pattern: str) -> Regex:
    """Return the pattern, read; see `Regex` for what is refused."""
    return Regex(pattern)


# The parts of `re` that read a pattern and compile what was read; CPython 3.11 to 3.14.
_parser: Any = importlib.import_module("re._parser")
_compiler: Any = importlib.import_module("re._compiler")


class Regex:
    """A regular expression that matches in polynomial time.

    `re` tries one way through a pattern after another, which for ``(a+)+b`` are more than can be
    tried. Here each part of the pattern is asked once for each place of the text where it may
    begin, and answers with all places where it may end.

    Raises:
      ValueError: the pattern is long or deep, or has a part whose ends depend on more than the
        place where it begins, such as a back reference.
    """

    def __init__(self, pattern: str):
        if len(pattern) > MAX_LENGTH:
            raise ValueError(f"more than {MAX_LENGTH:,} characters")
        self.whole = _parser.parse(pattern)
        self.single: dict[int, re.Pattern[str]] = {}  # by the identity of a part that has none
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
            found = (self.single[id(item)].match(text, place) for place in places)
            return {one.end() for one in found if one is not None}

        def holds(part: Any, behind: bool, place: int) -> bool:
            if not behind:
                return bool(ends(part, place))
            begin = place - part.getwidth()[0]
            return begin >= 0 and place in ends(part, begin)

        def repeated(least: int, most: int, part: Any, places: set[int]) -> set[int]:
            enough = len(text) + 1  # of more repetitions, one is empty and can be left out
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
