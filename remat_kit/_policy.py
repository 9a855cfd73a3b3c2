"""What to save, to offload and to recompute, as values.

A *selector* is a predicate on one intermediate value of a function. A *policy* is a total
function from values to decisions, ordered ``RECOMPUTE < OFFLOAD < SAVE``. Both are frozen, hashable
and comparable, both combine by operators, and the ``repr`` of either rebuilds it:

>>> p = save(named("attn_out")) | offload(module("*/mlp"))
>>> p
save(named('attn_out')) | offload(module('*/mlp'))
>>> p.decide(Value(primitives=("dot_general",), module="GPT/block_0/mlp/up"))
<Decision.OFFLOAD: 1>

==========================  =====================================================
selectors                   policies
==========================  =====================================================
``a | b`` either            ``a | b`` the stronger decision
``a & b`` both              ``a & b`` the weaker decision
``~a`` not                  ``a >> b`` the first that matches decides, the last
``a - b`` one, not other    one decides what nothing matched
==========================  =====================================================
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from remat_kit import _jax
from remat_kit._errors import InternalError, PolicyError, unknown

_PLAIN_HINT = "apply it with `remat_kit.policy(...)`, which sees modules, sizes and source lines"


class Decision(enum.IntEnum):
    """What becomes of one intermediate value between the forward and the backward pass.

    The order is that of strength: ``|`` of policies takes the larger and ``&`` the smaller.
    Compare decisions, never their numbers: a fourth one (a residual kept in fewer bits) has its
    place between two of these.

    >>> max(Decision.RECOMPUTE, Decision.OFFLOAD)
    <Decision.OFFLOAD: 1>
    """

    RECOMPUTE = 0
    OFFLOAD = 1
    SAVE = 2


@dataclasses.dataclass(frozen=True)
class Value:
    """One intermediate value, as selectors see it.

    >>> v = Value(primitives=("dot_general",), module="GPT/block_0/mlp/up", bytes=4096)
    >>> module("*/mlp").matches(v)
    True

    Attributes:
      primitives: the primitive that made it; for a call (``jit``, ``custom_jvp_call``) also those
        inside the call that made this output, outermost first.
      names: its checkpoint names.
      module: path of the module that made it, such as ``"GPT/block_0/attn/out"``; ``""`` at top.
      source: file and line; ``("", 0)`` where unknown.
      shape: axis sizes.
      dtype: name of the element type, such as ``"bfloat16"``.
      bytes: its size.
      flops: floating-point operations of the equation that made it.
      moved_bytes: bytes that this equation reads and writes.
      primitive: the primitive itself, the innermost where ``primitives`` lists several; JAX
        policies and `dots_no_batch` are asked with it, ``in_avals`` and ``params``. These three
        take no part in ``==`` and ``hash``.
      in_avals: abstract values of its inputs.
      params: its parameters.
    """

    primitives: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    module: str = ""
    source: tuple[str, int] = ("", 0)
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    bytes: int = 0
    flops: float = 0.0
    moved_bytes: float = 0.0
    primitive: Any = dataclasses.field(default=None, compare=False, repr=False)
    in_avals: tuple[Any, ...] = dataclasses.field(default=(), compare=False, repr=False)
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)


# ---------------------------------------------------------------------------------------------
# Bytes
# ---------------------------------------------------------------------------------------------

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_UNITS = {unit.upper(): size for unit, size in (_DECIMAL | _BINARY).items()}
_SIZE = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?(?:[eE]\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: int | str) -> int:
    """Read a size in bytes: an int, or a number with a unit.

    >>> parse_bytes("1.5MiB"), parse_bytes("2 kB"), parse_bytes(7)
    (1572864, 2000, 7)

    Args:
      text: ``kB``, ``MB``, ``GB``, … count in thousands, ``KiB``, ``MiB``, ``GiB``, … in 1024s; no
        unit or ``B`` means bytes. Case does not matter.

    Raises:
      PolicyError: not a number, negative, or not a unit.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text >= 0:
            return text
    elif isinstance(text, str):
        found = _SIZE.fullmatch(text)
        if found and found[2].upper() in _UNITS:
            scale = _UNITS[found[2].upper()]
            number = found[1].replace("_", "")
            return int(number) * scale if number.isdigit() else round(float(number) * scale)
    raise PolicyError(
        f"`parse_bytes({text!r})`: this is not a size in bytes",
        hint="write a number of bytes, or a number with a unit: '512KiB', '1.5MiB', '16GB'",
    )


def format_bytes(n: float) -> str:
    """Write a size for a reader, in the largest binary unit that keeps it at 1 or more.

    >>> format_bytes(1572864), format_bytes(1234), format_bytes(0), format_bytes(-2048)
    ('1.5 MiB', '1.21 KiB', '0 B', '-2 KiB')

    Args:
      n: bytes; a negative number is a difference.
    """
    for unit, size in reversed(_BINARY.items()):
        if abs(n) >= size:
            return f"{_short(n / size)} {unit}"
    return f"{_short(n)} B"


def _short(x: float) -> str:
    digits = 2 if abs(x) < 10 else 1
    return f"{x:.{digits}f}".rstrip("0").rstrip(".")


def _exact_bytes(n: int) -> int | str:
    """The shortest text that `parse_bytes` reads back as ``n``, for a repr."""
    for unit, size in reversed(_BINARY.items()):
        if n and n % size == 0:
            return f"{n // size}{unit}"
    return n


# ---------------------------------------------------------------------------------------------
# Module paths
# ---------------------------------------------------------------------------------------------


def path_matches(pattern: str, path: str) -> bool:
    """Whether the whole of a module path matches a pattern.

    ``*``, ``?`` and ``[...]`` match inside one component, ``**`` matches any number of components,
    none included. A leading ``*/`` matches one or more components, because a path may carry roots
    that the pattern's writer did not think of.

    >>> path_matches("*/mlp", "GPT/block_0/mlp"), path_matches("*/mlp", "mlp")
    (True, False)
    >>> path_matches("GPT/block_[01]/**", "GPT/block_1"), path_matches("**/mlp", "mlp")
    (True, True)

    Raises:
      PolicyError: the pattern is empty or has an empty component.
    """
    return _path_regex(pattern, "+").fullmatch(_closed(path)) is not None


@functools.lru_cache(maxsize=65536)
def prefix_matching(pattern: str, path: str) -> str | None:
    """Return the shortest prefix of a module path that matches a pattern, or None.

    The patterns of ``at=``: as in `path_matches`, but a leading ``*/`` may also match nothing,
    because functions and NNX modules may have no root.

    >>> prefix_matching("*/block_*", "GPT/decoder/block_3/mlp/up")
    'GPT/decoder/block_3'
    >>> prefix_matching("*/block_*", "block_0/mlp"), prefix_matching("*/block_*", "GPT/head")
    ('block_0', None)

    Raises:
      PolicyError: the pattern is empty or has an empty component.
    """
    regex = _path_regex(pattern, "*")
    return next((p for p in _prefixes(path) if regex.fullmatch(_closed(p))), None)


def _prefixes(path: str) -> Iterator[str]:
    parts = path.split("/") if path else []
    return ("/".join(parts[:n]) for n in range(len(parts) + 1))


def _closed(path: str) -> str:
    # Every component ends in a slash, so that one regex serves whole paths and ancestors.
    return path + "/" if path else ""


@functools.lru_cache(maxsize=1024)
def _path_regex(pattern: str, leading: str) -> re.Pattern[str]:
    parts = pattern.split("/")
    if not all(parts):
        raise PolicyError(
            f"`module({pattern!r})`: an empty component matches no module",
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
    return re.compile("".join(out))


def _component_regex(part: str) -> str:
    def piece(found: re.Match[str]) -> str:
        text = found[0]
        if text == "*":
            return "[^/]*"
        if text == "?":
            return "[^/]"
        if len(text) > 2:
            body = text[1:-1].replace("\\", r"\\").replace("[", r"\[").replace("&", r"\&")
            return f"[{'^' + body[1:] if body[0] == '!' else body}]"
        return re.escape(text)

    return re.sub(r"\*|\?|\[[^\]]+\]|.", piece, part)


# ---------------------------------------------------------------------------------------------
# Selectors
# ---------------------------------------------------------------------------------------------


class Selector:
    """A predicate on one `Value`; combine with ``|``, ``&``, ``~`` and ``-``.

    Where a policy is wanted, a selector ``s`` means ``save(s)``.

    >>> s = (named("attn_*") | dots) - larger_than("1MiB")
    >>> s
    (named('attn_*') | dots) & ~larger_than('1MiB')
    """

    _precedence = 9
    plain = False
    """Whether JAX's own policy call, which sees a primitive and its parameters, is enough."""

    def matches(self, value: Value) -> bool:
        """Whether ``value`` is selected."""
        raise NotImplementedError

    def leaves(self) -> Iterator[Selector]:
        """Iterate over the selectors that operators have combined into this one."""
        yield self

    def __or__(self, other: Selector) -> Selector:
        return _join(Union, self, other)

    def __and__(self, other: Selector) -> Selector:
        return _join(Intersection, self, other)

    def __sub__(self, other: Selector) -> Selector:
        if not isinstance(other, Selector):
            return NotImplemented
        return _join(Intersection, self, Complement(other))

    def __invert__(self) -> Selector:
        return Complement(self)

    def __rshift__(self, other: Any) -> Policy:
        return first(self, other)


def _join(kind: type, a: Selector, b: Selector) -> Any:
    # The operators are associative, so nested nodes of one kind are one flat node, and
    # `(a | b) | c == a | (b | c)`.
    if not isinstance(b, Selector):
        return NotImplemented
    parts = [p.parts if isinstance(p, _Combined) and type(p) is kind else (p,) for p in (a, b)]
    return kind(parts[0] + parts[1])


def _wrapped(node: Any, precedence: int) -> str:
    return repr(node) if node._precedence > precedence else f"({node!r})"


@dataclasses.dataclass(frozen=True, repr=False)
class _Combined(Selector):
    parts: tuple[Selector, ...]

    def leaves(self) -> Iterator[Selector]:
        for part in self.parts:
            yield from part.leaves()


class Union(_Combined):
    """What any of ``parts`` selects, written ``a | b``."""

    _precedence = 1

    def matches(self, value: Value) -> bool:
        return any(p.matches(value) for p in self.parts)

    def __repr__(self) -> str:
        return " | ".join(_wrapped(p, 1) for p in self.parts)


class Intersection(_Combined):
    """What all of ``parts`` select, written ``a & b``."""

    _precedence = 2

    def matches(self, value: Value) -> bool:
        return all(p.matches(value) for p in self.parts)

    def __repr__(self) -> str:
        return " & ".join(_wrapped(p, 2) for p in self.parts)


@dataclasses.dataclass(frozen=True, repr=False)
class Complement(Selector):
    """What ``part`` does not select, written ``~a``."""

    part: Selector
    _precedence = 4

    def matches(self, value: Value) -> bool:
        return not self.part.matches(value)

    def leaves(self) -> Iterator[Selector]:
        return self.part.leaves()

    def __repr__(self) -> str:
        return "~" + _wrapped(self.part, 3)


def _patterns(call: str, patterns: tuple[Any, ...]) -> tuple[str, ...]:
    bad = [p for p in patterns if not isinstance(p, str) or not p]
    if patterns and not bad:
        return patterns
    given = f"{bad[0]!r} is not a pattern" if bad else "no pattern was given"
    raise PolicyError(
        f"`{call}({', '.join(map(repr, patterns))})`: {given}",
        hint=f"give one or more non-empty strings, such as `{_EXAMPLES[call]}`",
    )


_EXAMPLES = {
    "primitive": 'primitive("dot_general", "conv_*")',
    "named": 'named("attn_*")',
    "named_regex": 'named_regex(r".*_proj")',
    "module": 'module("*/mlp/**")',
    "dtype": 'dtype("float32")',
    "source": 'source("model.py:120-140")',
    "segments": 'segments("block_1", "block_2")',
}


def _any_match(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(n, p) for n in names for p in patterns)


@dataclasses.dataclass(frozen=True, repr=False)
class _Patterned(Selector):
    patterns: tuple[str, ...]
    _call = ""

    def __repr__(self) -> str:
        return f"{self._call}({', '.join(map(repr, self.patterns))})"


class Primitive(_Patterned):
    """See `primitive`."""

    _call = "primitive"
    plain = True

    def matches(self, value: Value) -> bool:
        return _any_match(value.primitives, self.patterns)


def primitive(*patterns: str) -> Selector:
    """Select by the primitive that makes the value.

    Inside a call (``jit``, ``custom_jvp_call``, as of ``jax.nn.relu``) the primitives that make the
    call's output count too.

    >>> primitive("dot_general", "conv_*").matches(Value(primitives=("conv_general_dilated",)))
    True

    Args:
      *patterns: names of primitives as `jax.make_jaxpr` prints them, with ``*``, ``?``, ``[...]``.
        A pattern that no primitive of JAX or of the function matches is an error when the policy
        is applied.

    Raises:
      PolicyError: no pattern, or one that is not a non-empty string.
    """
    return Primitive(_patterns("primitive", patterns))


@dataclasses.dataclass(frozen=True, repr=False)
class _Checked(_Patterned):
    strict: bool = True

    def __repr__(self) -> str:
        strict = "" if self.strict else ", strict=False"
        return f"{self._call}({', '.join(map(repr, self.patterns))}{strict})"


class Named(_Checked):
    """See `named`."""

    _call = "named"
    plain = True

    def matches(self, value: Value) -> bool:
        return _any_match(value.names, self.patterns)


def named(*patterns: str, strict: bool = True) -> Selector:
    """Select by checkpoint name (`jax.ad_checkpoint.checkpoint_name`, `remat_kit.name`).

    >>> named("attn_*").matches(Value(names=("attn_out",)))
    True
    >>> named("attn_out", strict=False)
    named('attn_out', strict=False)

    Args:
      *patterns: names with ``*``, ``?``, ``[...]``.
      strict: a pattern that matches no name is an error when the policy is applied; False lets
        it pass, for a policy that serves several models.

    Raises:
      PolicyError: no pattern, or one that is not a non-empty string.
    """
    return Named(_patterns("named", patterns), bool(strict))


class NamedRegex(Named):
    """See `named_regex`."""

    _call = "named_regex"

    def matches(self, value: Value) -> bool:
        return any(re.fullmatch(p, n) for n in value.names for p in self.patterns)


def named_regex(*patterns: str, strict: bool = True) -> Selector:
    """Select by checkpoint name with regular expressions, as AXLearn's remat policies do.

    >>> named_regex(r".*([qkvo]_proj|context)").matches(Value(names=("Attention.q_proj",)))
    True

    Args:
      *patterns: each must match the whole name (`re.fullmatch`).
      strict: as in `named`.

    Raises:
      PolicyError: no pattern, or one that is not a regular expression.
    """
    for pattern in _patterns("named_regex", patterns):
        try:
            re.compile(pattern)
        except re.error as error:
            raise PolicyError(
                f"`named_regex({pattern!r})`: not a regular expression: {error}",
                hint="for globs such as 'attn_*' there is `named(...)`",
            ) from None
    return NamedRegex(patterns, bool(strict))


class Module(_Checked):
    """See `module`."""

    _call = "module"

    def matches(self, value: Value) -> bool:
        return any(_under(p, value.module) for p in self.patterns)


@functools.lru_cache(maxsize=65536)
def _under(pattern: str, path: str) -> bool:
    return _path_regex(pattern, "+").match(_closed(path)) is not None


def module(*patterns: str, strict: bool = True) -> Selector:
    """Select what a module makes, itself or through its submodules.

    A value is selected when its module path, or that of any enclosing module, matches as in
    `path_matches`: ``module("*/mlp")`` takes everything inside every ``mlp`` below the root.

    >>> value = Value(module="GPT/block_0/attn/out")
    >>> [module(p).matches(value) for p in ("*/attn", "*/attn/out", "**/block_[1-9]", "attn")]
    [True, True, False, False]

    Args:
      *patterns: slash-separated paths; ``*``, ``?``, ``[...]`` within one component, ``**`` for any
        number of components, a leading ``*/`` for one or more.
      strict: a pattern that matches no module is an error when the policy is applied; False lets
        it pass, for a policy that serves several models.

    Raises:
      PolicyError: no pattern, or one that is empty or has an empty component.
    """
    for pattern in _patterns("module", patterns):
        _path_regex(pattern, "+")
    return Module(patterns, bool(strict))


class Dtype(_Patterned):
    """See `dtype`."""

    _call = "dtype"

    def matches(self, value: Value) -> bool:
        return _any_match((value.dtype,), self.patterns)


def dtype(*patterns: str) -> Selector:
    """Select by element type.

    >>> dtype("float32", "*float16").matches(Value(dtype="bfloat16"))
    True

    Args:
      *patterns: names of dtypes, with ``*``, ``?``, ``[...]``.

    Raises:
      PolicyError: no pattern, or one that is not a non-empty string.
    """
    return Dtype(_patterns("dtype", patterns))


class Source(_Patterned):
    """See `source`."""

    _call = "source"

    def matches(self, value: Value) -> bool:
        return any(_from_source(p, value.source) for p in self.patterns)


_SOURCE = re.compile(r"(.+?)(?::(\d+)(?:-(\d+))?)?")


def _from_source(pattern: str, source_line: tuple[str, int]) -> bool:
    found = _SOURCE.fullmatch(pattern)
    assert found is not None
    file, line = source_line[0].replace("\\", "/"), source_line[1]
    if found[2] and not int(found[2]) <= line <= int(found[3] or found[2]):
        return False
    wanted = found[1].replace("\\", "/")
    return file == wanted or file.endswith("/" + wanted)


def source(*places: str) -> Selector:
    """Select by the source line that makes the value.

    >>> source("net/model.py:120-140").matches(Value(source=("src/net/model.py", 131)))
    True

    Args:
      *places: the end of a file's path, then nothing, ``:line`` or ``:first-last``.

    Raises:
      PolicyError: no place, or a range that runs backwards.
    """
    for place in _patterns("source", places):
        found = _SOURCE.fullmatch(place)
        if found is None or (found[3] and int(found[3]) < int(found[2])):
            raise PolicyError(
                f"`source({place!r})`: this is not a file with a line or a range of lines",
                hint=f"write it as in `{_EXAMPLES['source']}`, the smaller line first",
            )
    return Source(places)


@dataclasses.dataclass(frozen=True, repr=False)
class LargerThan(Selector):
    """See `larger_than`."""

    n_bytes: int

    def matches(self, value: Value) -> bool:
        return value.bytes > self.n_bytes

    def __repr__(self) -> str:
        return f"larger_than({_exact_bytes(self.n_bytes)!r})"


@dataclasses.dataclass(frozen=True, repr=False)
class SmallerThan(Selector):
    """See `smaller_than`."""

    n_bytes: int

    def matches(self, value: Value) -> bool:
        return value.bytes < self.n_bytes

    def __repr__(self) -> str:
        return f"smaller_than({_exact_bytes(self.n_bytes)!r})"


def larger_than(size: int | str) -> Selector:
    """Select values of more than ``size`` bytes.

    >>> larger_than("1KiB"), larger_than("1KiB").matches(Value(bytes=1024))
    (larger_than('1KiB'), False)

    Args:
      size: bytes, or a text that `parse_bytes` reads.

    Raises:
      PolicyError: not a size.
    """
    return LargerThan(parse_bytes(size))


def smaller_than(size: int | str) -> Selector:
    """Select values of fewer than ``size`` bytes.

    >>> smaller_than(1000), smaller_than("1kB").matches(Value(bytes=999))
    (smaller_than(1000), True)

    Args:
      size: bytes, or a text that `parse_bytes` reads.

    Raises:
      PolicyError: not a size.
    """
    return SmallerThan(parse_bytes(size))


@dataclasses.dataclass(frozen=True, repr=False)
class Cheap(Selector):
    """See `cheap`."""

    flops_per_byte: float

    def matches(self, value: Value) -> bool:
        return value.flops <= self.flops_per_byte * value.moved_bytes

    def __repr__(self) -> str:
        return f"cheap(flops_per_byte={self.flops_per_byte!r})"


def cheap(flops_per_byte: float = 1.0) -> Selector:
    """Select values whose equation does few operations for the bytes that it moves.

    >>> relu = Value(flops=1e6, moved_bytes=8e6)
    >>> matmul = Value(flops=2e9, moved_bytes=12e6)
    >>> cheap(2).matches(relu), cheap(2).matches(matmul)
    (True, False)

    Args:
      flops_per_byte: the highest arithmetic intensity that counts as cheap, in FLOP per byte.

    Raises:
      PolicyError: not a number of zero or more.
    """
    if not isinstance(flops_per_byte, int | float) or not flops_per_byte >= 0:
        raise PolicyError(
            f"`cheap(flops_per_byte={flops_per_byte!r})`: this is not a ratio",
            hint="give a number of zero or more, such as `cheap(flops_per_byte=1.0)`",
        )
    return Cheap(float(flops_per_byte))


@dataclasses.dataclass(frozen=True, repr=False)
class Where(Selector):
    """See `where`."""

    fn: Callable[[Value], bool]

    def matches(self, value: Value) -> bool:
        return bool(self.fn(value))

    def __repr__(self) -> str:
        return f"where({_qualified(self.fn)})"


def where(fn: Callable[[Value], bool]) -> Selector:
    """Select what a function says.

    Its ``repr`` shows the function's qualified name, which does not rebuild it in another
    process, so a recipe cannot hold it.

    >>> def four_axes(value):
    ...     return len(value.shape) == 4
    >>> where(four_axes).matches(Value(shape=(8, 32, 32, 3)))
    True

    Args:
      fn: called with a `Value`; should depend on nothing else.

    Raises:
      PolicyError: not callable.
    """
    if not callable(fn) or isinstance(fn, Selector | Policy):
        raise PolicyError(
            f"`where({fn!r})`: a function of one `Value` is wanted",
            hint="for example `where(lambda value: len(value.shape) == 4)`",
        )
    return Where(fn)


def _qualified(fn: Any) -> str:
    named_by = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{named_by.__module__}.{named_by.__qualname__}"


_CONSTANTS: dict[str, tuple[str, ...]] = {
    "everything": ("*",),
    "nothing": (),
    # A scaled matmul is what JAX makes of an fp8 or mxfp8 product; XLA sees it as one call.
    "dots": (
        "dot_general",
        "conv_general_dilated",
        "ragged_dot*",
        "scaled_dot",
        "scaled_matmul*",
    ),
    "dots_no_batch": ("dot_general", "scaled_matmul_wrapper"),
    "collective": (
        "psum*",
        "pmax",
        "pmin",
        "ppermute*",
        "all_gather*",
        "all_to_all*",
        "ragged_all_to_all",
        "reduce_scatter*",
        "psend",
        "precv",
        "unreduced_*",
    ),
}


@dataclasses.dataclass(frozen=True, repr=False)
class Constant(Selector):
    """One of `everything`, `nothing`, `dots`, `dots_no_batch` and `collective`."""

    label: str
    plain = True

    def matches(self, value: Value) -> bool:
        if self.label == "everything":
            return True
        if not _any_match(value.primitives, _CONSTANTS[self.label]):
            return False
        return self.label != "dots_no_batch" or _has_no_batch(value)

    def __repr__(self) -> str:
        return self.label


def _has_no_batch(value: Value) -> bool:
    if "dot_general" in value.primitives:
        numbers = value.params.get("dimension_numbers")
        return numbers is not None and not any(map(len, numbers[1]))
    # A scaled matmul is always batched; a batch of one is a plain product (as in jax 0.10-0.12).
    return bool(value.in_avals) and value.in_avals[0].shape[0] == 1


everything = Constant("everything")
"""Every value."""
nothing = Constant("nothing")
"""No value."""
dots = Constant("dots")
"""Matrix products and convolutions, ragged, scaled and batched ones included."""
dots_no_batch = Constant("dots_no_batch")
"""Matrix products without batch axes: in a transformer the projections, not the attention."""
collective = Constant("collective")
"""What a collective brings from other devices (``psum``, ``all_gather``, ``all_to_all``, …)."""


# ---------------------------------------------------------------------------------------------
# Policies
# ---------------------------------------------------------------------------------------------


class Policy:
    """A total function from values to decisions; combine with ``|``, ``&`` and ``>>``.

    A policy whose selectors are `primitive`, `named`, `named_regex`, the constants and wrapped JAX
    policies is itself a JAX policy: give it to `jax.checkpoint`, `flax.linen.remat` or
    `flax.nnx.remat` as it is. There a value and its named copy are two values, so that
    ``~named("x")`` takes the first of them.

    Under the flag ``jax_remat3`` JAX itself asks a policy less: 0.12 at names, products and
    convolutions only, 0.10.2 never, unless the policy is one of its own. `remat_kit.policy` keeps
    every decision there too.

    >>> import jax, jax.numpy as jnp
    >>> f = jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x)), policy=save(primitive("tanh")))
    >>> jax.grad(f)(0.0)
    Array(1., dtype=float32, weak_type=True)
    """

    _precedence = 9

    def decide(self, value: Value) -> Decision:
        """Return what becomes of ``value``."""
        return self.deciding(value)._verdict(value)

    def matches(self, value: Value) -> bool:
        """Whether a rule of this policy selects ``value``, rather than deciding by default."""
        raise NotImplementedError

    def rule(self, value: Value) -> str:
        """Return the repr of the single rule that decides ``value``."""
        return repr(self.deciding(value))

    def destination(self, value: Value) -> str:
        """Return the memory kind in which ``value`` waits: ``"device"``, unless offloaded."""
        return self.deciding(value)._destination(value)

    def deciding(self, value: Value) -> _Leaf:
        """Return the single rule that decides ``value``."""
        raise NotImplementedError

    def rules(self) -> Iterator[_Leaf]:
        """Iterate over the single rules that operators have combined into this policy."""
        raise NotImplementedError

    def leaves(self) -> Iterator[Selector]:
        """Iterate over the leaf selectors of all rules."""
        for rule in self.rules():
            if isinstance(rule, Rule):
                yield from rule.selector.leaves()

    def __or__(self, other: Any) -> Policy:
        return _combine(Stronger, "|", self, other)

    def __ror__(self, other: Any) -> Policy:
        return _combine(Stronger, "|", other, self)

    def __and__(self, other: Any) -> Policy:
        return _combine(Weaker, "&", self, other)

    def __rand__(self, other: Any) -> Policy:
        return _combine(Weaker, "&", other, self)

    def __rshift__(self, other: Any) -> Policy:
        return _combine(First, ">>", self, other)

    def __rrshift__(self, other: Any) -> Policy:
        return _combine(First, ">>", other, self)

    def __call__(self, prim: Any, *in_avals: Any, **params: Any) -> Any:
        """Decide as a policy of `jax.checkpoint`: True, False or, with offloading, an enum.

        Raises:
          PolicyError: a selector needs what JAX does not tell its policies.
        """
        blind = _needs_more(self)
        if blind:
            raise PolicyError(
                f"`jax.checkpoint(policy={self!r})`: JAX tells its policies the primitive and "
                f"its parameters only, but {blind} needs more",
                hint=_PLAIN_HINT,
            )
        name = params.get("name") if prim.name == "name" else None
        value = Value(
            primitives=(prim.name,),
            names=(name,) if isinstance(name, str) else (),
            primitive=prim,
            in_avals=in_avals,
            params=params,
        )
        return self._for_jax(value)

    def _for_jax(self, value: Value) -> Any:
        leaf = self.deciding(value)
        decision = leaf._verdict(value)
        if decision is Decision.OFFLOAD:
            return _jax.offloadable("device", leaf._destination(value))
        if not _has_offload(self):
            return decision is Decision.SAVE
        return _jax.SAVEABLE if decision is Decision.SAVE else _jax.RECOMPUTE


@functools.lru_cache(maxsize=1024)
def _needs_more(policy: Policy) -> str:
    if isinstance(policy, Structural):
        return f"`{policy!r}` says where regions are and"
    blind = [f"`{s!r}`" for s in policy.leaves() if not s.plain]
    return " and ".join(dict.fromkeys(blind))


@functools.lru_cache(maxsize=1024)
def _has_offload(policy: Policy) -> bool:
    return any(isinstance(r, Rule) and r.decision is Decision.OFFLOAD for r in policy.rules())


def _combine(kind: type, sign: str, a: Any, b: Any) -> Any:
    a, b = _operand(a, sign), _operand(b, sign)
    parts = [p.parts if isinstance(p, _Node) and type(p) is kind else (p,) for p in (a, b)]
    return kind(parts[0] + parts[1])


def _operand(obj: Any, sign: str) -> Policy:
    policy = as_policy(obj, call=f"... {sign} ...")
    if policy is None:
        raise PolicyError(
            f"`... {sign} {obj!r}`: None means that no policy is applied, which combines with none",
            hint="`save(everything)` keeps all that JAX would keep; `save(nothing)` keeps nothing",
        )
    if isinstance(policy, Structural):
        raise PolicyError(
            f"`... {sign} {policy!r}`: a policy that says where regions are cannot be combined",
            hint=f"put the rest inside it: `{policy._head}, keep=...)`",
        )
    return policy


class _Leaf(Policy):
    """A policy that is one rule."""

    def deciding(self, value: Value) -> _Leaf:
        return self

    def rules(self) -> Iterator[_Leaf]:
        yield self

    def _verdict(self, value: Value) -> Decision:
        raise NotImplementedError

    def _destination(self, value: Value) -> str:
        raise NotImplementedError


_VERBS = {Decision.SAVE: "save", Decision.OFFLOAD: "offload", Decision.RECOMPUTE: "recompute"}
_HOST_KINDS = ("pinned_host", "unpinned_host")


@dataclasses.dataclass(frozen=True, repr=False)
class Rule(_Leaf):
    """One decision for what a selector matches: see `save`, `offload` and `recompute`.

    Attributes:
      decision: for what ``selector`` matches.
      selector: the predicate.
      to: memory kind of what is offloaded; ``"device"`` for the other decisions.
    """

    decision: Decision
    selector: Selector
    to: str = "device"

    def matches(self, value: Value) -> bool:
        return self.selector.matches(value)

    def _verdict(self, value: Value) -> Decision:
        if self.selector.matches(value):
            return self.decision
        return Decision.SAVE if self.decision is Decision.RECOMPUTE else Decision.RECOMPUTE

    def _destination(self, value: Value) -> str:
        return self.to if self.selector.matches(value) else "device"

    def __repr__(self) -> str:
        to = f", to={self.to!r}" if self.to not in ("device", "pinned_host") else ""
        return f"{_VERBS[self.decision]}({self.selector!r}{to})"


def _selector(call: str, obj: Any) -> Selector:
    if isinstance(obj, Selector):
        return obj
    hints = {
        str: f"to select by name write `{call}(named({obj!r}))`",
        type(None): f"to select no value write `{call}(nothing)`",
    }
    raise PolicyError(
        f"`{call}({obj!r})`: a selector is wanted, this is a {type(obj).__name__}",
        hint=hints.get(type(obj), f"for example `{call}(dots)` or `{call}(module('*/mlp'))`"),
    )


def save(selector: Selector) -> Policy:
    """Keep what ``selector`` matches, recompute the rest.

    >>> save(dots).decide(Value(primitives=("tanh",)))
    <Decision.RECOMPUTE: 0>

    Raises:
      PolicyError: not a selector.
    """
    return Rule(Decision.SAVE, _selector("save", selector))


def offload(selector: Selector, to: str = "pinned_host") -> Policy:
    """Move what ``selector`` matches to the host until it is needed, recompute the rest.

    >>> p = offload(module("*/mlp"))
    >>> p.destination(Value(module="GPT/mlp")), p.destination(Value(module="GPT/attn"))
    ('pinned_host', 'device')

    Args:
      selector: the values.
      to: memory kind, ``"pinned_host"`` or ``"unpinned_host"``.

    Raises:
      PolicyError: not a selector.
      UnknownNameError: not a memory kind of the host.
    """
    if to not in _HOST_KINDS:
        raise unknown("host memory kind", str(to), _HOST_KINDS, call=f"offload(..., to={to!r})")
    return Rule(Decision.OFFLOAD, _selector("offload", selector), to)


def recompute(selector: Selector) -> Policy:
    """Recompute what ``selector`` matches, keep the rest: decides as ``save(~selector)`` does.

    One difference: the rest is what the program computes. A value that only a derivative rule makes
    (the ``2 * x`` of ``x ** 2``) goes with what it is made of, where ``save(~selector)`` keeps it
    and so spares the recompute of ``x``.

    >>> recompute(primitive("max")).decide(Value(primitives=("dot_general",)))
    <Decision.SAVE: 2>

    Raises:
      PolicyError: not a selector.
    """
    return Rule(Decision.RECOMPUTE, _selector("recompute", selector))


@dataclasses.dataclass(frozen=True, repr=False)
class _Node(Policy):
    parts: tuple[Policy, ...]
    _sign = ""

    def matches(self, value: Value) -> bool:
        return any(p.matches(value) for p in self.parts)

    def rules(self) -> Iterator[_Leaf]:
        for part in self.parts:
            yield from part.rules()

    def __repr__(self) -> str:
        return f" {self._sign} ".join(_wrapped(p, self._precedence) for p in self.parts)


class Stronger(_Node):
    """The strongest decision of ``parts``, written ``a | b``."""

    _sign, _precedence = "|", 1

    def deciding(self, value: Value) -> _Leaf:
        leaves = [p.deciding(value) for p in self.parts]
        return max(leaves, key=lambda leaf: (leaf._verdict(value), leaf.matches(value)))


class Weaker(_Node):
    """The weakest decision of ``parts``, written ``a & b``."""

    _sign, _precedence = "&", 2

    def deciding(self, value: Value) -> _Leaf:
        leaves = [p.deciding(value) for p in self.parts]
        return min(leaves, key=lambda leaf: (leaf._verdict(value), not leaf.matches(value)))


class First(_Node):
    """The decision of the first of ``parts`` that matches, else of the last: ``a >> b``."""

    _sign, _precedence = ">>", 3

    def deciding(self, value: Value) -> _Leaf:
        part = next((p for p in self.parts if p.matches(value)), self.parts[-1])
        return part.deciding(value)


def first(*policies: Any) -> Policy:
    """Let the first policy that matches a value decide it, and the last what none matched.

    >>> p = first(recompute(primitive("max")), save(dots))
    >>> p == recompute(primitive("max")) >> save(dots)
    True
    >>> [p.decide(Value(primitives=(x,))).name for x in ("max", "dot_general", "tanh")]
    ['RECOMPUTE', 'SAVE', 'RECOMPUTE']

    Args:
      *policies: one or more of what `as_policy` takes.

    Raises:
      PolicyError: none given, or one that cannot be combined.
    """
    if not policies:
        raise PolicyError(
            "`first()`: no policy was given", hint="write `first(a, b, ...)` or `a >> b`"
        )
    return functools.reduce(
        lambda a, b: _combine(First, ">>", a, b), policies[1:], _operand(policies[0], ">>")
    )


# ---------------------------------------------------------------------------------------------
# JAX's own policies
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class Wrapped(_Leaf):
    """A policy callable of JAX: see `callable_policy`."""

    fn: Callable[..., Any]

    def matches(self, value: Value) -> bool:
        return self._verdict(value) is not Decision.RECOMPUTE

    def _verdict(self, value: Value) -> Decision:
        return self._answer(value)[0]

    def _destination(self, value: Value) -> str:
        return self._answer(value)[1]

    def _answer(self, value: Value) -> tuple[Decision, str]:
        asked: list[Any] = []
        if value.primitive is not None:
            asked.append(self.fn(value.primitive, *value.in_avals, **value.params))
        # JAX asks about a value and about its named copy; here they are one value.
        if getattr(value.primitive, "name", "") != "name":
            name_p, avals = _jax.name_primitive(), value.in_avals[:1]
            asked += [self.fn(name_p, *avals, name=n) for n in value.names]
        answers = [_normalised(a, self) for a in asked]
        return max(answers, key=lambda a: a[0], default=(Decision.RECOMPUTE, "device"))

    def __repr__(self) -> str:
        known = vars(jax.checkpoint_policies).items()
        own = next((name for name, fn in known if fn is self.fn), None)
        return (
            f"callable_policy({f'jax.checkpoint_policies.{own}' if own else _qualified(self.fn)})"
        )


def _normalised(answer: Any, policy: Wrapped) -> tuple[Decision, str]:
    if isinstance(answer, _jax.Offloadable):
        return Decision.OFFLOAD, answer.dst
    if isinstance(answer, bool):
        return (Decision.SAVE if answer else Decision.RECOMPUTE), "device"
    if answer is _jax.SAVEABLE or answer is _jax.RECOMPUTE:
        return (Decision.SAVE if answer is _jax.SAVEABLE else Decision.RECOMPUTE), "device"
    raise PolicyError(
        f"`{policy!r}`: the wrapped policy answered {answer!r}",
        hint="a policy of JAX returns a bool, Saveable, Recompute or Offloadable(src, dst); "
        "call a policy factory such as `save_only_these_names` with its names first",
    )


def callable_policy(fn: Callable[..., Any]) -> Policy:
    """Wrap a policy callable of JAX (`jax.checkpoint_policies`), offloading ones included.

    It matches what it saves or offloads.

    >>> import jax
    >>> p = callable_policy(jax.checkpoint_policies.everything_saveable) & save(named("x"))
    >>> p
    callable_policy(jax.checkpoint_policies.everything_saveable) & save(named('x'))

    Args:
      fn: called as ``fn(primitive, *in_avals, **params)``.

    Raises:
      PolicyError: not callable, or when asked, an answer that is no decision.
    """
    if not callable(fn) or isinstance(fn, Selector):
        raise PolicyError(
            f"`callable_policy({fn!r})`: a policy callable of JAX is wanted",
            hint="for example `callable_policy(jax.checkpoint_policies.dots_saveable)`",
        )
    return fn if isinstance(fn, Policy) else Wrapped(fn)


# ---------------------------------------------------------------------------------------------
# Where the regions are
# ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class Structural(Policy):
    """A policy that also says where checkpoint regions begin and end.

    Attributes:
      keep: the policy for the values inside a region; ``decide``, ``matches``, ``rule`` and
        ``destination`` are its own. Structural policies do not combine with others.
    """

    keep: Policy = dataclasses.field(default=Rule(Decision.SAVE, nothing), kw_only=True)
    _head = ""

    def matches(self, value: Value) -> bool:
        return self.keep.matches(value)

    def deciding(self, value: Value) -> _Leaf:
        return self.keep.deciding(value)

    def rules(self) -> Iterator[_Leaf]:
        return self.keep.rules()

    def _shown(self, name: str, *args: Any) -> str:
        shown = [repr(a) for a in args]
        if self.keep != Rule(Decision.SAVE, nothing):
            shown.append(f"keep={self.keep!r}")
        return f"{name}({', '.join(shown)})"


def _kept(call: str, keep: Any) -> Policy:
    policy = as_policy(keep, call=call)
    if policy is None or isinstance(policy, Structural):
        raise PolicyError(
            f"`{call[:-1]}, keep={keep!r})`: a policy for the values inside a region is wanted",
            hint="for example `keep=save(dots)`; the default keeps nothing",
        )
    return policy


def _count(call: str, n: Any) -> int:
    if isinstance(n, int) and not isinstance(n, bool) and n >= 1:
        return n
    raise PolicyError(f"`{call}`: {n!r} is not a count", hint="give an integer of one or more")


@dataclasses.dataclass(frozen=True, repr=False)
class Uniform(Structural):
    """See `uniform`."""

    n: int
    _head = "uniform(n"

    def __repr__(self) -> str:
        return self._shown("uniform", self.n)


def uniform(n: int, keep: Any = nothing) -> Uniform:
    """Make one region of every ``n`` consecutive blocks.

    The blocks are what ``at=`` matches, in the order in which they run; the last region may be
    shorter. Megatron-LM's ``--recompute-method uniform --recompute-num-layers n``.

    >>> uniform(2, keep=dots)
    uniform(2, keep=save(dots))

    Args:
      n: blocks per region.
      keep: what is kept inside a region, by default nothing.

    Raises:
      PolicyError: ``n`` is not a positive int, or ``keep`` is not a policy for values.
    """
    call = f"uniform({n!r})"
    return Uniform(_count(call, n), keep=_kept(call, keep))


@dataclasses.dataclass(frozen=True, repr=False)
class Block(Structural):
    """See `block`."""

    n: int
    _head = "block(n"

    def __repr__(self) -> str:
        return self._shown("block", self.n)


def block(n: int, keep: Any = nothing) -> Block:
    """Make a region of each of the first ``n`` blocks, and leave the other blocks alone.

    The blocks are what ``at=`` matches, in the order in which they run. Megatron-LM's
    ``--recompute-method block --recompute-num-layers n``.

    >>> block(4)
    block(4)

    Args:
      n: blocks that become regions.
      keep: what is kept inside a region, by default nothing.

    Raises:
      PolicyError: ``n`` is not a positive int, or ``keep`` is not a policy for values.
    """
    call = f"block({n!r})"
    return Block(_count(call, n), keep=_kept(call, keep))


@dataclasses.dataclass(frozen=True, repr=False)
class Segments(Structural):
    """See `segments`."""

    names: tuple[str, ...]
    _head = "segments(*names"

    def __repr__(self) -> str:
        return self._shown("segments", *self.names)


def segments(*names: str, keep: Any = nothing) -> Segments:
    """Cut a function at these checkpoint names and make a region of each part.

    Between two cuts nothing is kept but the named values; what follows the last cut is left
    alone. Paddle's ``RecomputeOptimizer._set_checkpoints``.

    >>> segments("block_1", "block_2")
    segments('block_1', 'block_2')

    Args:
      *names: checkpoint names, in the order in which the function makes them.
      keep: what is kept inside a region, by default nothing.

    Raises:
      PolicyError: no name, a name given twice, or ``keep`` is not a policy for values.
    """
    _patterns("segments", names)
    call = f"segments({', '.join(map(repr, names))})"
    if len(set(names)) < len(names):
        raise PolicyError(f"`{call}`: a name is given twice", hint="each cut has its own name")
    return Segments(names, keep=_kept(call, keep))


@dataclasses.dataclass(frozen=True, repr=False)
class Nested(Structural):
    """See `nested`."""

    group: int | None = None
    _head = "nested(group"

    def __repr__(self) -> str:
        return self._shown("nested", *(() if self.group is None else (self.group,)))


def nested(group: int | None = None, keep: Any = nothing) -> Nested:
    """Turn a scan over L layers into a scan over groups of layers, each group a region.

    Only the carries between groups are kept for the whole of the backward pass: about 2·√L of
    them at the peak instead of L (Chen et al. 2016, "Training Deep Nets with Sublinear Memory
    Cost"; Haliax's ``ScanCheckpointPolicy(nested=...)``).

    >>> nested(), nested(4, keep=dots)
    (nested(), nested(4, keep=save(dots)))

    Args:
      group: layers per group; None takes about √L.
      keep: what is kept inside a layer, by default nothing.

    Raises:
      PolicyError: ``group`` is not a positive int or None, or ``keep`` is not a policy for values.
    """
    call = f"nested({group!r})"
    return Nested(None if group is None else _count(call, group), keep=_kept(call, keep))


@dataclasses.dataclass(frozen=True, repr=False)
class Planned(Structural):
    """See `planned`."""

    program: str
    lines: tuple[str, ...]
    strict: bool = True
    _head = "planned(program"

    def __repr__(self) -> str:
        lines = ", ".join(map(repr, (self.program, *self.lines)))
        return f"planned({lines}{'' if self.strict else ', strict=False'})"

    @property
    def title(self) -> str:
        """What reports call it: its text has a line for each block of a model."""
        return f"plan {hashlib.sha256(repr(self).encode()).hexdigest()[:6]}"


def planned(program: str, *lines: str, strict: bool = True) -> Planned:
    """Run one program with the regions of a plan; `plan` writes such a policy.

    >>> planned("joined=1f shapes=2e sin=2", "0:1 plain", "1:2 save 1.0")
    planned('joined=1f shapes=2e sin=2', '0:1 plain', '1:2 save 1.0')

    Args:
      program: what the plan was made for, in short; another program is refused.
      lines: stretches of the program, in order, with what is kept of each; blocks that are treated
        alike share a line.
      strict: whether other shapes are refused too.
    """
    return Planned(program=program, lines=lines, strict=strict)


# ---------------------------------------------------------------------------------------------
# Whatever a user writes for a policy
# ---------------------------------------------------------------------------------------------

_read_text: Callable[[str], Policy] | None = None


def read_text_with(reader: Callable[[str], Policy]) -> None:
    """Register the reader of presets, recipe paths and policy expressions (`remat_kit._recipe`)."""
    global _read_text
    _read_text = reader


def as_policy(obj: Any, *, call: str = "policy(...)") -> Policy | None:
    """Return the policy that ``obj`` stands for; None and ``"none"`` stand for no policy at all.

    >>> as_policy(dots)
    save(dots)
    >>> as_policy({"save": ["attn_out"], "offload": {"module": "*/mlp"}})
    save(named('attn_out')) | offload(module('*/mlp'))

    Args:
      obj: a `Policy`; a `Selector` (saved); the name of a preset, the path of a recipe, or the repr
        of a policy; a policy callable of JAX; or a table from a configuration file. Such a table
        has ``policy`` (a text) or any of ``save``, ``offload`` and ``recompute``, each a name
        pattern, a table of ``name``, ``module`` and ``primitive`` patterns, or a list of such; what
        ``recompute`` lists goes before the rest. ``to`` is the memory kind for ``offload``.
      call: what the user wrote, for messages.

    Raises:
      PolicyError: stands for no policy.
      UnknownNameError: a preset, recipe or key of the table that does not exist.
    """
    if obj is None or obj == "none":
        return None
    if isinstance(obj, Policy):
        return obj
    if isinstance(obj, Selector):
        return save(obj)
    if isinstance(obj, str):
        if _read_text is None:
            raise InternalError("remat_kit._recipe was not imported", hint="import remat_kit")
        return _read_text(obj)
    if isinstance(obj, Mapping):
        return _from_table(obj, call)
    if callable(obj) and not isinstance(obj, type):
        return callable_policy(obj)
    raise PolicyError(
        f"`{call}`: {obj!r} is not a policy",
        hint="give a preset ('dots'), a policy (save(named('attn_out'))), a selector, the path of "
        "a recipe, a policy of jax.checkpoint_policies, or None",
    )


_TABLE_KEYS = ("policy", "recompute", "save", "offload", "to")
_SELECTING = {"name": named, "module": module, "primitive": primitive}


def _from_table(table: Mapping[str, Any], call: str) -> Policy | None:
    for key in table:
        if key not in _TABLE_KEYS:
            raise unknown("key of a policy table", str(key), _TABLE_KEYS, call=call)
    if "policy" in table and len(table) == 1:
        return as_policy(table["policy"], call=call)
    if "policy" in table or not {"recompute", "save", "offload"} & set(table):
        raise PolicyError(
            f"`{call}`: the table {dict(table)!r} must have 'policy' alone, or any of 'save', "
            "'offload' and 'recompute'",
            hint='for example {"save": ["attn_out"], "offload": {"module": "*/mlp"}}',
        )
    chosen = {verb: _table_selector(table[verb], call) for verb in table if verb != "to"}
    kept: list[Policy] = []
    if "save" in chosen:
        kept.append(save(chosen["save"]))
    if "offload" in chosen:
        kept.append(offload(chosen["offload"], table.get("to", "pinned_host")))
    if "recompute" not in chosen:
        return functools.reduce(lambda a, b: a | b, kept)
    dropped = recompute(chosen["recompute"])
    return dropped >> functools.reduce(lambda a, b: a | b, kept) if kept else dropped


def _table_selector(entry: Any, call: str) -> Selector:
    if isinstance(entry, str):
        return named(entry)
    if isinstance(entry, Mapping) and entry:
        for key in entry:
            if key not in _SELECTING:
                raise unknown("key of a selector table", str(key), _SELECTING, call=call)
        chosen = [_SELECTING[k](*([v] if isinstance(v, str) else v)) for k, v in entry.items()]
        return functools.reduce(lambda a, b: a | b, chosen)
    if isinstance(entry, list | tuple):
        names = [e for e in entry if isinstance(e, str)]
        rest = [_table_selector(e, call) for e in entry if not isinstance(e, str)]
        chosen = ([named(*names)] if names else []) + rest
        return functools.reduce(lambda a, b: a | b, chosen, *([] if chosen else [nothing]))
    raise PolicyError(
        f"`{call}`: {entry!r} selects no value",
        hint='give a name pattern, a table such as {"module": "*/mlp"}, or a list of such',
    )


# ---------------------------------------------------------------------------------------------
# Checks against a real function
# ---------------------------------------------------------------------------------------------


def check(
    policy: Policy,
    values: Iterable[Value],
    primitives: Iterable[str] | None = None,
    *,
    call: str = "policy(...)",
) -> None:
    """Raise for a name, module or primitive pattern of ``policy`` that can match nothing.

    Each pattern is checked on its own. A primitive that JAX has but the function lacks is no
    error, nor is what stands under ``strict=False``.

    >>> check(save(named("atn_out")), [Value(names=("attn_out",))], call="policy(...)")
    Traceback (most recent call last):
      ...
    remat_kit._errors.UnknownNameError: `policy(...)`: no checkpoint name is named 'atn_out'
    hint: did you mean 'attn_out'?

    Args:
      policy: the policy.
      values: every intermediate value of the function.
      primitives: names of further primitives that exist; by default all that JAX has.
      call: what the user wrote, for the message.

    Raises:
      UnknownNameError: with near matches from what exists.
    """
    values = list(values)
    names = {n for v in values for n in v.names}
    if isinstance(policy, Segments):
        for name in policy.names:
            if name not in names:
                raise unknown("checkpoint name", name, names, call=call)
    modules = {v.module for v in values}
    own_primitives = {p for v in values for p in v.primitives}
    for leaf in dict.fromkeys(policy.leaves()):
        if isinstance(leaf, Named) and leaf.strict:
            _check_names(leaf, names, call)
        elif isinstance(leaf, Module) and leaf.strict:
            _check_modules(leaf, modules, call)
        elif isinstance(leaf, Primitive):
            _check_primitives(leaf, own_primitives, primitives, call)


def _check_names(leaf: Named, names: set[str], call: str) -> None:
    for pattern in leaf.patterns:
        alone = dataclasses.replace(leaf, patterns=(pattern,))
        if not alone.matches(Value(names=tuple(names))):
            raise unknown("checkpoint name", pattern, names, call=call)


def _check_modules(leaf: Module, modules: set[str], call: str) -> None:
    for pattern in leaf.patterns:
        if not any(_under(pattern, path) for path in modules):
            raise unknown("module", pattern, similar_paths(pattern, modules), call=call)


def similar_paths(pattern: str, modules: set[str]) -> set[str]:
    """The existing module paths, in the form in which the pattern is written."""
    found = re.fullmatch(r"((?:\*{1,2}/)?)(.*?)((?:/\*\*)?)", pattern)
    assert found is not None
    head, body, tail = found.groups()
    depth = body.count("/") + 1
    paths = [p.split("/") for m in modules for p in _prefixes(m) if p]
    if not head:
        return {"/".join(p) + tail for p in paths}
    return {head + "/".join(p[-depth:]) + tail for p in paths if len(p) >= depth}


def _check_primitives(
    leaf: Primitive, own: set[str], others: Iterable[str] | None, call: str
) -> None:
    missing = [p for p in leaf.patterns if not _any_match(own, (p,))]
    if not missing:
        return
    known = own | set(_jax.known_primitives() if others is None else others)
    for pattern in missing:
        if not _any_match(known, (pattern,)):
            raise unknown("primitive", pattern, known, call=call)


def unmatched(policy: Policy, values: Iterable[Value]) -> list[str]:
    """Return the repr of every rule of ``policy`` that selects none of ``values``.

    >>> unmatched(save(dots) | offload(named("x", strict=False)), [Value(primitives=("max",))])
    ['save(dots)', "offload(named('x', strict=False))"]

    Args:
      policy: the policy; ``save(nothing)`` in it is not reported, for it means what it says.
      values: every intermediate value of the function.
    """
    values = list(values)
    rules = [r for r in policy.rules() if not (isinstance(r, Rule) and r.selector == nothing)]
    return [repr(r) for r in dict.fromkeys(rules) if not any(r.matches(v) for v in values)]
