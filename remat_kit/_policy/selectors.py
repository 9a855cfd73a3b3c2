"""Which values does a rule of a policy apply to?

A selector is a predicate on one intermediate value: on the primitive that computes it, its
checkpoint name, its module, size or element type, its source line, or the cost of computing it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

from remat_kit._errors import PolicyError
from remat_kit._policy import regex as _regex
from remat_kit._policy.algebra import Policy, Selector, qualified
from remat_kit._policy.patterns import path_regex, with_final_slash
from remat_kit._program.value import Value
from remat_kit._units import MAX_BYTES, exact_bytes, parse_bytes, shortened


def checked_patterns(call: str, patterns: tuple[Any, ...]) -> tuple[str, ...]:
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


def any_match(names: Iterable[str], patterns: Iterable[str]) -> bool:
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
        return any_match(value.primitives, self.patterns)


def primitive(*patterns: str) -> Selector:
    """Select by the primitive that computes the value.

    For a call (``jit``, or the ``custom_jvp_call`` of ``jax.nn.relu``), the primitives inside the
    call that compute its output count too.

    >>> primitive("dot_general", "conv_*").matches(Value(primitives=("conv_general_dilated",)))
    True

    Args:
      *patterns: names of primitives as `jax.make_jaxpr` prints them, with ``*``, ``?``, ``[...]``.
        A pattern that no primitive of JAX or of the function matches is an error when the policy
        is applied.

    Raises:
      PolicyError: no pattern, or one that is not a non-empty string.
    """
    return Primitive(checked_patterns("primitive", patterns))


@dataclasses.dataclass(frozen=True, repr=False)
class _NamePattern(_Patterned):
    strict: bool = True

    def __repr__(self) -> str:
        strict = "" if self.strict else ", strict=False"
        return f"{self._call}({', '.join(map(repr, self.patterns))}{strict})"


class Named(_NamePattern):
    """See `named`."""

    _call = "named"
    plain = True

    def matches(self, value: Value) -> bool:
        return any_match(value.names, self.patterns)


def named(*patterns: str, strict: bool = True) -> Selector:
    """Select by checkpoint name (`jax.ad_checkpoint.checkpoint_name`, `remat_kit.name`).

    ``save(named(...))`` follows `jax.checkpoint_policies.save_only_these_names`.

    >>> named("attn_*").matches(Value(names=("attn_out",)))
    True
    >>> named("attn_out", strict=False)
    named('attn_out', strict=False)

    Args:
      *patterns: names with ``*``, ``?``, ``[...]``.
      strict: a pattern that matches no name is an error when the policy is applied. With False
        one policy may serve several models: a rule that selects nothing in one of them emits a
        `RematKitWarning`.

    Raises:
      PolicyError: no pattern, or one that is not a non-empty string.
    """
    return Named(checked_patterns("named", patterns), bool(strict))


class NamedRegex(Named):
    """See `named_regex`."""

    _call = "named_regex"

    def matches(self, value: Value) -> bool:
        return any(_regex.matches(p, n) for n in value.names for p in self.patterns)


def named_regex(*patterns: str, strict: bool = True) -> Selector:
    """Select by checkpoint name with regular expressions, as AXLearn's remat policies do.

    >>> named_regex(r".*([qkvo]_proj|context)").matches(Value(names=("Attention.q_proj",)))
    True

    Args:
      *patterns: each must match the whole name (`re.fullmatch`). Back references, conditions on
        groups, atomic groups, possessive repetitions and flags for one group are refused, so that
        matching takes bounded time; so are patterns of more than 1,000 characters.
      strict: as in `named`.

    Raises:
      PolicyError: no pattern, or one that is not a regular expression or is refused.
    """
    for pattern in checked_patterns("named_regex", patterns):
        try:
            re.compile(pattern)
            _regex.compiled(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise PolicyError(
                f"`named_regex({shortened(pattern)})`: not a regular expression: {error}",
                hint="`named(...)` takes patterns such as 'attn_*'",
            ) from None
        except ValueError as error:
            raise PolicyError(
                f"`named_regex({shortened(pattern)})`: {error}",
                hint="write a simpler pattern; several patterns may be given",
            ) from None
    return NamedRegex(patterns, bool(strict))


class Module(_NamePattern):
    """See `module`."""

    _call = "module"

    def matches(self, value: Value) -> bool:
        return any(is_under(p, value.module) for p in self.patterns)


@functools.lru_cache(maxsize=65536)
def is_under(pattern: str, path: str) -> bool:
    return path_regex(pattern, "+").match(with_final_slash(path)) is not None


def module(*patterns: str, strict: bool = True) -> Selector:
    """Select the values that a module computes, itself or in its submodules.

    A value is selected if its module path, or that of any enclosing module, matches:
    ``module("*/mlp")`` selects everything inside every ``mlp`` below the root. Module paths are
    those of Flax (`flax.linen.Module.path`), Haiku and `jax.named_scope`.

    >>> value = Value(module="GPT/block_0/attn/out")
    >>> [module(p).matches(value) for p in ("*/attn", "*/attn/out", "**/block_[1-9]", "attn")]
    [True, True, False, False]

    Args:
      *patterns: slash-separated paths; ``*``, ``?``, ``[...]`` within one component, ``**`` for any
        number of components, a leading ``*/`` for one or more.
      strict: a pattern that matches no module is an error when the policy is applied. With False
        one policy may serve several models: a rule that selects nothing in one of them emits a
        `RematKitWarning`.

    Raises:
      PolicyError: no pattern, or one that is empty or has an empty component.
    """
    for pattern in checked_patterns("module", patterns):
        path_regex(pattern, "+")
    return Module(patterns, bool(strict))


class Dtype(_Patterned):
    """See `dtype`."""

    _call = "dtype"

    def matches(self, value: Value) -> bool:
        return any_match((value.dtype,), self.patterns)


def dtype(*patterns: str) -> Selector:
    """Select by element type, by the name that `jax.numpy` gives it.

    >>> dtype("float32", "*float16").matches(Value(dtype="bfloat16"))
    True

    Args:
      *patterns: names of dtypes, with ``*``, ``?``, ``[...]``.

    Raises:
      PolicyError: no pattern, or one that is not a non-empty string.
    """
    return Dtype(checked_patterns("dtype", patterns))


class Source(_Patterned):
    """See `source`."""

    _call = "source"

    def matches(self, value: Value) -> bool:
        return any(_from_source(p, value.source) for p in self.patterns)


_SOURCE = re.compile(r"(.+?)(?::(\d+)(?:-(\d+))?)?")


def _from_source(pattern: str, source_line: tuple[str, int]) -> bool:
    place = _SOURCE.fullmatch(pattern)
    assert place is not None
    wanted, first, last = place.groups()
    file, line = source_line[0].replace("\\", "/"), source_line[1]
    if first and not int(first) <= line <= int(last or first):
        return False
    wanted = wanted.replace("\\", "/")
    return file == wanted or file.endswith("/" + wanted)


def source(*places: str) -> Selector:
    """Select by the source line that computes the value.

    It is the line that `jax.ad_checkpoint.print_saved_residuals` prints.

    >>> source("net/model.py:120-140").matches(Value(source=("src/net/model.py", 131)))
    True

    Args:
      *places: the end of a file's path, then nothing, ``:line`` or ``:first-last``.

    Raises:
      PolicyError: there is no place, or the first line of a range is larger than the last.
    """
    for place in checked_patterns("source", places):
        parts = _SOURCE.fullmatch(place)
        lines = [n for n in parts.groups()[1:] if n] if parts else []
        if (
            parts is None
            or max(map(len, lines), default=0) > 9
            or [*map(int, lines)] != sorted(map(int, lines))
        ):
            raise PolicyError(
                f"`source({shortened(place)})`: this is not a file with a line or a range of lines",
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
        return f"larger_than({exact_bytes(self.n_bytes)!r})"


@dataclasses.dataclass(frozen=True, repr=False)
class SmallerThan(Selector):
    """See `smaller_than`."""

    n_bytes: int

    def matches(self, value: Value) -> bool:
        return value.bytes < self.n_bytes

    def __repr__(self) -> str:
        return f"smaller_than({exact_bytes(self.n_bytes)!r})"


def larger_than(size: int | str) -> Selector:
    """Select values of more than ``size`` bytes; the size is that of the whole array.

    Follows Keras's ``RematScope(mode="larger_than")``, which counts elements instead of bytes.

    >>> larger_than("1KiB"), larger_than("1KiB").matches(Value(bytes=1024))
    (larger_than('1KiB'), False)

    Args:
      size: a number of bytes, or a text such as ``"1MiB"`` or ``"2.5kB"``.

    Raises:
      PolicyError: ``size`` is not a size.
    """
    return LargerThan(parse_bytes(size))


def smaller_than(size: int | str) -> Selector:
    """Select values of fewer than ``size`` bytes; the size is that of the whole array.

    The opposite of `larger_than`, which follows Keras's ``RematScope``, except that neither of the
    two selects values of exactly ``size`` bytes.

    >>> smaller_than(1000), smaller_than("1kB").matches(Value(bytes=999))
    (smaller_than(1000), True)

    Args:
      size: a number of bytes, or a text such as ``"1MiB"`` or ``"2.5kB"``.

    Raises:
      PolicyError: ``size`` is not a size.
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
    """Select values whose equation computes few operations for the bytes that it moves.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, recompute the results of
    cheap operations and save the others.

    >>> relu = Value(flops=1e6, moved_bytes=8e6)
    >>> matmul = Value(flops=2e9, moved_bytes=12e6)
    >>> cheap(2).matches(relu), cheap(2).matches(matmul)
    (True, False)

    Args:
      flops_per_byte: the highest arithmetic intensity that counts as cheap, in FLOP per byte.

    Raises:
      PolicyError: ``flops_per_byte`` is not a finite number of zero or more.
    """
    if not isinstance(flops_per_byte, int | float) or not 0 <= flops_per_byte < MAX_BYTES:
        raise PolicyError(
            f"`cheap(flops_per_byte={shortened(flops_per_byte)})`: this is not a ratio",
            hint="give a finite number of zero or more, such as `cheap(flops_per_byte=1.0)`",
        )
    return Cheap(float(flops_per_byte))


@dataclasses.dataclass(frozen=True, repr=False)
class Where(Selector):
    """See `where`."""

    fn: Callable[[Value], bool]

    def matches(self, value: Value) -> bool:
        return bool(self.fn(value))

    def __repr__(self) -> str:
        return f"where({qualified(self.fn)})"


def where(fn: Callable[[Value], bool]) -> Selector:
    """Select the values for which a function returns True.

    The function plays the role of a policy callable of `jax.checkpoint`. The ``repr`` of the
    selector shows the qualified name of the function. Another process cannot rebuild the function
    from this name, so a recipe cannot contain this selector.

    >>> def four_axes(value):
    ...     return len(value.shape) == 4
    >>> where(four_axes).matches(Value(shape=(8, 32, 32, 3)))
    True

    Args:
      fn: called with a `Value`; its result should depend on nothing else.

    Raises:
      PolicyError: ``fn`` is not a function of a value.
    """
    if not callable(fn) or isinstance(fn, Selector | Policy):
        raise PolicyError(
            f"`where({fn!r})`: the argument must be a function of one `Value`",
            hint="for example `where(lambda value: len(value.shape) == 4)`",
        )
    return Where(fn)


_CONSTANTS: dict[str, tuple[str, ...]] = {
    "everything": ("*",),
    "nothing": (),
    # JAX turns an fp8 or mxfp8 product into a scaled matmul, which XLA sees as one call.
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
    """One of `everything`, `nothing`, `dots`, `dots_no_batch`, `collective`, `gathered_parameters`.

    * `everything` selects every value. ``save(everything)`` corresponds to
      `jax.checkpoint_policies.everything_saveable`.
    * `nothing` selects no value. ``save(nothing)`` corresponds to
      `jax.checkpoint_policies.nothing_saveable`.
    * `dots` selects the results of matrix products and convolutions, including ragged, scaled and
      batched products. `jax.checkpoint_policies.dots_saveable` saves matrix products only.
    * `dots_no_batch` selects the results of matrix products without batch axes, which
      `jax.checkpoint_policies.dots_with_no_batch_dims_saveable` saves. In a transformer these are
      the projections and not the attention scores.
    * `collective` selects the results of collectives, which each device receives from other
      devices. Inside of `shard_map` these are the results of `jax.lax.psum`,
      `jax.lax.all_gather`, `jax.lax.all_to_all`, …. In a program that XLA partitions, they are the
      operands that an operation needs gathered, and the results whose parts the devices add up, by
      the shardings that Shardy propagates. These shardings are known in `inspect`, `measure` and
      `diff`, in a decorated step that is called with arrays, and inside of a `jax.jit` whose
      arguments have shardings; elsewhere there is a `RematKitWarning`. With explicit axes they
      are the results of `jax.sharding.reshard` and the sums of parts.
    * `gathered_parameters` selects those results of collectives that are a gathered input of the
      decorated function, such as the parameters of fully sharded training (FSDP, ZeRO).

    >>> sin, psum = Value(primitives=("sin",)), Value(primitives=("psum",))
    >>> [s.matches(sin) for s in (everything, nothing, dots, dots_no_batch, collective)]
    [True, False, False, False, False]
    >>> dots.matches(Value(primitives=("dot_general",))), collective.matches(psum)
    (True, True)

    None of them takes an argument or raises an error.
    """

    label: str
    plain = True

    def matches(self, value: Value) -> bool:
        if self.label == "everything":
            return True
        if self.label == "gathered_parameters":
            return value.gathered_parameter
        if self.label == "collective" and value.collective:
            return True
        if not any_match(value.primitives, _CONSTANTS[self.label]):
            return False
        return self.label != "dots_no_batch" or _has_no_batch(value)

    def __repr__(self) -> str:
        return self.label


def _has_no_batch(value: Value) -> bool:
    if "dot_general" in value.primitives:
        numbers = value.params.get("dimension_numbers")
        return numbers is not None and not any(map(len, numbers[1]))
    # A scaled matmul always has a batch axis; a batch of one is a plain product (jax 0.10-0.12).
    return bool(value.in_avals) and value.in_avals[0].shape[0] == 1


everything = Constant("everything")


"""Every value."""


nothing = Constant("nothing")


"""No value."""


dots = Constant("dots")


"""Matrix products and convolutions, including ragged, scaled and batched ones."""


dots_no_batch = Constant("dots_no_batch")


"""Matrix products without batch axes: in a transformer, the projections, not the attention."""


collective = Constant("collective")


"""Results of collectives: ``psum``, ``all_gather``, …, and what the partitioner of XLA adds."""


gathered_parameters = Constant("gathered_parameters")


"""Parameters that a partitioned program gathers on each device before it uses them."""
