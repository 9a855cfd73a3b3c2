"""What is a value, and what is an equation, in pieces of an axis?

A value is split along an axis or a factor of one (`Along`), whole (None), or a `Partial` result. A
`Way` says this for each input and output of an equation. A `Piece` is some of the entries, and cuts
them out of a whole value:

>>> x = jnp.arange(12).reshape(2, 6)
>>> Piece(n=3, size=1, offset=2).cut(x, Along(axis=1, inner=2))
Array([[ 4,  5],
       [10, 11]], dtype=int32)
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Along:
    """A value is split along an axis, or along one factor of it.

    The axis has ``outer * n * inner`` entries, in this order, and a piece of ``size`` of the ``n``
    has ``outer * size * inner`` of them. So the rows (batch, token) of a matrix are split by tokens
    with ``outer`` equal to the batch size, and the columns (head, channel) by heads with ``inner``
    equal to the number of channels.
    """

    axis: int
    outer: int = 1
    inner: int = 1


class Partial(enum.Enum):
    """Each piece contributes to a value of full shape, and this operation joins contributions."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"

    def dtype(self, dtype: Any) -> Any:
        """Return the type in which contributions of a type are joined.

        Sums of half precision are added up in float32 and rounded once at the end. Otherwise each
        piece would add a rounding error, and the error would grow with the number of pieces.

        >>> Partial.SUM.dtype(jnp.bfloat16), Partial.MAX.dtype(jnp.bfloat16)
        (dtype('float32'), dtype(bfloat16))
        """
        is_half = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
        return jnp.dtype(jnp.float32 if self is Partial.SUM and is_half else dtype)

    def join(self, a: Any, b: Any) -> Any:
        """Join a contribution ``b`` with all earlier ones, ``a``, in the type of ``a``."""
        b = b.astype(a.dtype)
        if self is Partial.SUM:
            return a + b if a.dtype != bool else a | b
        return jnp.maximum(a, b) if self is Partial.MAX else jnp.minimum(a, b)


How = Along | Partial | None


@dataclasses.dataclass(frozen=True)
class Way:
    """One consistent way to run an equation in pieces: what each input and output is."""

    inputs: tuple[How, ...]
    outputs: tuple[How, ...]

    @property
    def partial(self) -> bool:
        return any(isinstance(how, Partial) for how in self.outputs)


@dataclasses.dataclass(frozen=True)
class In:
    """An input of an equation, by position."""

    position: int


@dataclasses.dataclass(frozen=True)
class Out:
    """An output of an equation, by position."""

    position: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """``size`` entries of ``n``, from ``offset``, which may be a tracer."""

    n: int
    size: int
    offset: Any

    def shape(self, shape: Sequence[int], how: How) -> tuple[int, ...]:
        """Return the shape of a piece of a value of this shape."""
        if not isinstance(how, Along):
            return tuple(shape)
        length = how.outer * self.size * how.inner
        return tuple(length if d == how.axis else s for d, s in enumerate(shape))

    def cut(self, x: Any, along: Along) -> Any:
        """Return the piece of a whole value."""
        factored = self._factored(x, along, self.n)
        piece = lax.dynamic_slice_in_dim(factored, self.offset, self.size, along.axis + 1)
        return piece.reshape(self.shape(jnp.shape(x), along))

    def put(self, x: Any, piece: Any, along: Along) -> Any:
        """Return a whole value with this piece of it replaced."""
        factored = self._factored(x, along, self.n)
        small = self._factored(piece, along, self.size)
        whole = lax.dynamic_update_slice_in_dim(factored, small, self.offset, along.axis + 1)
        return whole.reshape(jnp.shape(x))

    def _factored(self, x: Any, along: Along, entries: int) -> Any:
        s = jnp.shape(x)
        factors = (along.outer, entries, along.inner)
        return jnp.reshape(x, (*s[: along.axis], *factors, *s[along.axis + 1 :]))


def shape_of(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def fits(atom: Any, along: Along, n: int) -> bool:
    """Tell whether an axis of a value has the number of entries that `Along` says."""
    shape = shape_of(atom)
    return along.axis < len(shape) and shape[along.axis] == along.outer * n * along.inner


def candidates(atom: Any, n: int) -> Iterator[Along]:
    """Yield all ways to split a value, whole axes first."""
    for axis, length in enumerate(shape_of(atom)):
        if n > 1 and length and length % n == 0:
            rest = length // n
            for outer in (d for d in range(1, rest + 1) if rest % d == 0):
                yield Along(axis, outer, rest // outer)
