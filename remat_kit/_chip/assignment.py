"""How much memory does a program take whose buffers are assigned, but that has no machine code yet?

XLA's compiler for TPUs optimizes a program, assigns all of its buffers, and then generates machine
code. For a convolutional network the code takes nearly all of the time
(``benchmarks/compile_time.py``), and the memory is known before. If it is asked to
(``xla_dump_to``), the compiler writes the assigned buffers and the optimized, scheduled program
into a folder before it starts with the code. `read` reads them, so that `worker` can stop the
compiler there.

`tests/chip/test_assignment.py` compares with programs that are compiled to the end. The module
imports nothing of the package, because the worker loads it on its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_KINDS = ("argument", "output", "alias", "temp")
FIELDS = tuple(f"{host}{kind}_size_in_bytes" for host in ("", "host_") for kind in _KINDS)
_HEAP_UNIT = 16 * 1024  # bytes; the compiler rounds the temporaries up to this
_HOST = "5"  # the color of buffers in the host's memory; those in the chip's have none
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(?:, color (\d+))?(.*)$", re.M)
_ARRAY = re.compile(r"^ value: .*\): (?!\()", re.M)  # a value that is no tuple


def dump_options(folder: str) -> dict[str, str]:
    """Return the options with which a compiler writes about a program into a folder.

    The last two are those with which JAX prints a compiled program.
    """
    return {
        "xla_dump_to": folder,
        "xla_dump_hlo_as_text": "True",
        "xla_dump_compact_gte": "False",
        "xla_syntax_sugar_async_ops": "True",
    }


def is_unknown_option(error: BaseException | None) -> bool:
    """Tell whether a compiler refused a program because it knows one of these options not."""
    return any(f"No such compile option: '{name}'" in str(error) for name in dump_options(""))


def read(folder: str) -> dict[str, Any] | None:
    """Return the memory and the HLO of the only program in a folder; None if they are not there.

    The compiler writes the file that is looked for after those that are read.

    Args:
        folder: of `dump_options`.

    Returns:
        The optimized, scheduled program as ``"hlo"``, and the bytes of a `CompiledMemoryStats` as
        ``"memory"``, without those of the code and of the peak.
    """
    last = [*Path(folder).glob("*.after_optimizations_after_buffer_assignment.txt")]
    if len(last) != 1:
        return None
    stem = last[0].name.removesuffix("_after_buffer_assignment.txt")
    try:
        hlo = last[0].with_name(f"{stem}.txt").read_text(encoding="utf-8")
        buffers = last[0].with_name(f"{stem}-buffer-assignment.txt").read_text(encoding="utf-8")
    except OSError:
        return None
    memory = sizes(buffers)
    return None if memory is None else {"memory": memory, "hlo": hlo}


def sizes(text: str) -> dict[str, int] | None:
    """Return the bytes of arguments, results and temporaries in the text of a buffer assignment.

    They are those of `CompiledMemoryStats`: a parameter that shares its memory with a result counts
    in both, and as an alias. Temporaries are rounded up to 16 KiB, and a heap that holds nothing
    but tables of tuples is dropped. Seen on libtpu 0.0.52.

    >>> sizes(
    ...     "allocation 0: size 512, page 0, parameter 0, shape |f32[2]| at ShapeIndex {}:\\n"
    ...     "allocation 1: size 1024, page 0, maybe-live-out:\\n"
    ...     "allocation 2: size 20480, page 0, preallocated-temp:\\n"
    ...     " value: <7 sine @0> (size=20480,offset=0): f32[64,80]{1,0:T(8,128)}\\n"
    ...     "allocation 3: size 4096, color 1, page 0, preallocated-temp:\\n"
    ... )["temp_size_in_bytes"]
    32768
    """
    found = dict.fromkeys(_KINDS, 0)
    host = dict(found)
    heads = [*_ALLOCATION.finditer(text)]
    if not heads:
        return None
    ends = [*(head.start() for head in heads[1:]), len(text)]
    for head, end in zip(heads, ends, strict=True):
        size, color, kind = int(head[1]), head[2], head[3]
        if color not in (None, _HOST):
            continue  # memories inside of the chip
        into = found if color is None else host
        is_result = "maybe-live-out" in kind
        if ", parameter " in kind:
            into["argument"] += size
            into["alias"] += size * is_result
        if is_result:
            into["output"] += size
        elif kind.endswith("preallocated-temp:") and _ARRAY.search(text, head.end(), end):
            into["temp"] += -(-size // _HEAP_UNIT) * _HEAP_UNIT if color is None else size
    return dict(zip(FIELDS, (*found.values(), *host.values()), strict=True))


def needs(memory: dict[str, int]) -> int:
    """Return the bytes of the chip's memory that `sizes` finds."""
    argument, output, alias, temp, *_ = (memory[name] for name in FIELDS)
    return argument + output - alias + temp
