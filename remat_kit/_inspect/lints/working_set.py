"""A lint about peaks that are the working set of one operation, which could run in pieces."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from remat_kit._compiled.peak import Held
from remat_kit._inspect.lints.scene import SMALL_BYTES, Lint, Scene
from remat_kit._program import paths as _paths
from remat_kit._program import program as _program
from remat_kit._program.pieces import shape_of
from remat_kit._program.pieces import split as _split
from remat_kit._program.pieces.split import Split
from remat_kit._program.program import Program, flat_program, primitive_name
from remat_kit._units import format_bytes

# The arrays of a working set are at least this share of the largest one.
_ALIKE = 0.5


# One operation works on no more large arrays than these: an input, an output and their cotangents.
_MOST_ARRAYS = 4


# The working set makes at least this share of the temporaries at the peak, and of the whole peak.
_OF_TEMPORARIES, _OF_PEAK = 0.5, 0.25


_PIECES = 16  # the number of pieces that the message speaks about


def peak_in_pieces(scene: Scene) -> Iterator[Lint]:
    """Find peaks that are mostly a few large arrays, which pieces of an axis would divide."""
    program: Program | None = None
    for target, facts in scene.compiled.items():
        if facts.peak is None or facts.memory.devices > 1:
            continue
        large = _working_set(facts.peak.held)
        size = sum(h.bytes for h in large)
        if size < max(SMALL_BYTES, _OF_PEAK * facts.peak.bytes):
            continue
        if program is None:
            program = _program.without_dead(flat_program(scene.gradient.loss))
        found = _division(program, large)
        if found is None:
            continue
        loop, axis = found
        k = min(_PIECES, loop.n)
        eqn = next(e for e in program.eqns if loop.value in e.outvars)
        module = _paths.roll_up("/".join(program.path(eqn)))
        message = (
            f"compiled for {target}, {format_bytes(size)} of the {format_bytes(facts.peak.bytes)} "
            f"at the peak are {len(large)} arrays like "
            f"{loop.value.aval.str_short(short_dtypes=True)} of `{primitive_name(eqn)}`"
            f"{f' in {module}' if module else ''}; in {k} pieces of axis {axis} only 1/{k} of each "
            "would be live at once"
        )
        fix = (
            f"remat_kit.policy(remat_kit.plan(loss, *args, budget='min', target={target!r}, "
            "pieces=True))"
        )
        yield Lint("peak-in-pieces", message, fix, module, bytes=size)


def _working_set(held: Sequence[Held]) -> list[Held]:
    """Return the few large temporaries that make most of a peak, or nothing."""
    temporaries = [h for h in held if h.kind == "temporary"]
    largest = max((h.bytes for h in temporaries), default=0)
    large = [h for h in temporaries if h.bytes >= _ALIKE * largest]
    if len(large) > _MOST_ARRAYS or any(h.pieces for h in large):
        return []
    enough = _OF_TEMPORARIES * sum(h.bytes for h in temporaries)
    return large if sum(h.bytes for h in large) >= enough else []


def _elements(held: Held) -> int:
    """Return how many elements a buffer has; compilers change the shapes of arrays."""
    dims = re.search(r"\[([\d,]*)\]", held.shape)
    return math.prod(int(d) for d in dims[1].split(",") if d) if dims else 0


def _division(program: Program, large: Sequence[Held]) -> tuple[Split, int] | None:
    """Return the best loop over pieces that contains arrays of all these sizes, and its axis."""
    wanted = {_elements(h) for h in large}
    value = _value(program, max(large, key=_elements))
    best: tuple[Split, int] | None = None
    for axis in range(len(shape_of(value)) if value is not None else 0):
        found = _split.split(program, value, axis)
        if not isinstance(found, Split) or found.saved_bytes(_PIECES) <= 0:
            continue
        sizes = {math.prod(shape_of(v)) for v in found.how}
        if wanted <= sizes and (best is None or _saved(found) > _saved(best[0])):
            best = found, axis
    return best


def _saved(loop: Split) -> float:
    return loop.saved_bytes(_PIECES)


def _value(program: Program, held: Held) -> Any | None:
    """Return the first value of the size of a buffer; one of the buffer's module if there is."""
    found = [
        (v, "/".join(program.path(eqn)))
        for eqn in program.eqns
        for v in eqn.outvars
        if math.prod(shape_of(v)) == _elements(held) and v not in program.outvars
    ]
    there = (v for v, path in found if path == held.module)
    return next(there, found[0][0] if found else None)
