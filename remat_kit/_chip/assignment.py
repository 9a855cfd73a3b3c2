"""How much memory does a program take whose buffers are assigned, but that has no machine code yet?

XLA optimizes a program, assigns all of its buffers, and then generates machine code. For a TPU the
code takes nearly all of the time (``benchmarks/compile_time.py``), and the memory is known before.
If it is asked to (``xla_dump_to``), the compiler writes the assigned buffers and the optimized,
scheduled program into a folder before it starts with the code. `read` reads them, so that `worker`
can stop the compiler there.

`tests/chip/test_assignment.py` compares with programs that are compiled to the end. The module
imports nothing of the package, because the worker loads it on its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_KINDS = ("argument", "output", "alias", "temp")
FIELDS = tuple(f"{host}{kind}_size_in_bytes" for host in ("", "host_") for kind in _KINDS)
_TPU_UNIT = 16 * 1024  # bytes; the compiler for TPUs rounds the temporaries up to this
_HOST = "5"  # the color of buffers in the host's memory
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
    """Tell whether a compiler refused a program because it does not know one of the options.

    The compilers of jaxlib 0.10.2 for CPUs and GPUs do not.
    """
    return any(f"No such compile option: '{name}'" in str(error) for name in dump_options(""))


def read(folder: str, platform: str) -> dict[str, Any] | None:
    """Return the memory and the HLO of the only program in a folder; None if they are not there.

    Args:
        folder: of `dump_options`.
        platform: of the compiler: "cpu", "cuda" or "tpu".

    Returns:
        The optimized, scheduled program as ``"hlo"``, and the bytes of a `CompiledMemoryStats` as
        ``"memory"``, without those of the code and of the peak.
    """
    found = [*Path(folder).glob("*after_optimizations.txt")]  # written after the buffers
    begun = [*Path(folder).glob("*before_optimizations.txt")]  # other programs, if it compiles some
    if len(found) != 1 or len(begun) != 1:
        return None
    buffers = found[0].with_name(f"{found[0].stem}-buffer-assignment.txt")
    try:
        hlo, assigned = (path.read_text(encoding="utf-8") for path in (found[0], buffers))
    except OSError:
        return None
    # The main computation stands last; if its end is missing, the file is still being written.
    if "\nENTRY " not in hlo or not hlo.rstrip().endswith("\n}"):
        return None
    memory = sizes(assigned, platform)
    return None if memory is None else {"memory": memory, "hlo": hlo}


def sizes(text: str, platform: str) -> dict[str, int] | None:
    """Return the bytes of arguments, results and temporaries in the text of a buffer assignment.

    They are those of `CompiledMemoryStats`: a parameter that shares its memory with a result counts
    as an argument, as a result, and as an alias. On a TPU, buffers whose color is not that of the
    host are in memories inside of the chip and do not count. Its temporaries are rounded up to
    16 KiB; they count as nothing if all of them are the tables of addresses that tuples have. Seen
    on jaxlib 0.10.2 and 0.12, libtpu 0.0.52.

    >>> sizes(
    ...     "allocation 0: size 512, page 0, parameter 0, shape |f32[2]| at ShapeIndex {}:\\n"
    ...     "allocation 1: size 1024, page 0, maybe-live-out:\\n"
    ...     "allocation 2: size 20480, page 0, preallocated-temp:\\n"
    ...     " value: <7 sine @0> (size=20480,offset=0): f32[64,80]{1,0:T(8,128)}\\n"
    ...     "allocation 3: size 4096, color 1, page 0, preallocated-temp:\\n",
    ...     "tpu",
    ... )["temp_size_in_bytes"]
    32768
    """
    chip, host = (dict.fromkeys(_KINDS, 0) for _ in range(2))
    heads = [*_ALLOCATION.finditer(text)]
    if not heads:
        return None
    is_tpu = platform == "tpu"
    ends = [*(head.start() for head in heads[1:]), len(text)]
    for head, end in zip(heads, ends, strict=True):
        size, color, kind = int(head[1]), head[2], head[3]
        if is_tpu and color not in (None, _HOST):
            continue  # inside of the chip
        into = host if color == _HOST else chip
        is_result = "maybe-live-out" in kind
        if ", parameter " in kind:
            into["argument"] += size
            into["alias"] += size * is_result
        if is_result:
            into["output"] += size
        elif kind.endswith("preallocated-temp:"):
            if is_tpu and into is chip:
                size = _rounded(size) if _ARRAY.search(text, head.end(), end) else 0
            into["temp"] += size
    return dict(zip(FIELDS, (*chip.values(), *host.values()), strict=True))


def _rounded(size: int) -> int:
    return -(-size // _TPU_UNIT) * _TPU_UNIT


def needs(memory: dict[str, int]) -> int:
    """Return the bytes of the chip's memory that `sizes` finds."""
    argument, output, alias, temp, *_ = (memory[name] for name in FIELDS)
    return argument + output - alias + temp
