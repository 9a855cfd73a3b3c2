"""Random programs as data: short lists of operations that are read into functions of arrays.

A program is a value, so that `hypothesis` can shrink it and a failing example prints as a few
lines that can be pasted into a test::

    Program((Op("tanh", 0), Op("scan", 0, 1, 2, (Op("mul", 0, 1),))), outputs=(0,))

The function of a program takes ``(x, w, rest)``: two float arrays of one shape, and a dictionary
with what is not differentiated (integers, a random key, a Python float, a bool, None). Every
operation takes two arrays of that shape, ``a`` and ``b``, and returns one more, so that any list
of operations is a program and operations are compiled once for many programs. An operation reads
the ``a``-th and ``b``-th newest value (0 is the newest).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

COLUMNS = 4


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation: its name, which values it reads, a small number, and an inner program."""

    name: str
    a: int = 0
    b: int = 1
    k: int = 0
    body: tuple[Op, ...] = ()

    def __repr__(self) -> str:
        parts = [repr(self.name)]
        defaults = {"a": 0, "b": 1, "k": 0, "body": ()}
        given = {n: getattr(self, n) for n, d in defaults.items() if getattr(self, n) != d}
        parts += [f"{name}={value!r}" for name, value in given.items()]
        return f"Op({', '.join(parts)})"


@dataclasses.dataclass(frozen=True)
class Program:
    """Blocks of operations, each block in a named scope ``block_0``, ``block_1``, …

    Attributes:
        blocks: the operations of each block. A block begins with what the one before it returned.
        outputs: which values of the last block are returned, beside an integer and None.
        used: which of the outputs a loss reads.
        dtype: of the arrays.
        rows: the arrays have this many rows and four columns.
        new_key: whether the random key is a ``jax.random.key``.
    """

    blocks: tuple[tuple[Op, ...], ...]
    outputs: tuple[int, ...] = (0,)
    used: tuple[int, ...] = (0,)
    dtype: str = "float32"
    rows: int = 3
    new_key: bool = False

    def __repr__(self) -> str:
        shown = [repr(self.blocks)]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                shown.append(f"{field.name}={value!r}")
        return f"Program({', '.join(shown)})"

    def names(self) -> set[str]:
        """Return the names of all operations, of those inside others too."""

        def walk(ops: Sequence[Op]) -> set[str]:
            return {name for op in ops for name in ({op.name} | walk(op.body))}

        return {name for block in self.blocks for name in walk(block)}

    def fn(self, x: Any, w: Any, rest: dict[str, Any]) -> dict[str, Any]:
        """Run the program."""
        context = Context(rest, jnp.result_type(x), self.rows)
        values = [w, x]
        for i, block in enumerate(self.blocks):
            with jax.named_scope(f"block_{i}"):
                values = [w, x, *values[-1:]] if i else values
                values = context.run(block, values)
        return {
            "ys": tuple(values[-1 - i % len(values)] for i in self.outputs),
            "count": rest["n"] + 1,
            "none": None,
        }

    def arguments(self) -> tuple[Any, Any, dict[str, Any]]:
        """Return the arguments that the program is tried with."""
        rng = np.random.default_rng(7)
        shape = (self.rows, COLUMNS)
        dtype = jnp.dtype(self.dtype)

        def draw() -> Any:
            drawn = rng.uniform(-1.0, 1.0, shape)
            if dtype.kind == "c":
                drawn = drawn + 1j * rng.uniform(-1.0, 1.0, shape)
            return jnp.asarray(drawn, dtype)

        key = jax.random.key(3) if self.new_key else jax.random.PRNGKey(3)
        n = jnp.arange(max(self.rows, 1), dtype=jnp.int32)[::-1][: self.rows]
        rest = {"n": n, "key": key, "scale": 0.5, "flag": True, "none": None}
        return draw(), draw(), rest


@dataclasses.dataclass(frozen=True)
class Context:
    """What the operations of one run share."""

    rest: dict[str, Any]
    dtype: Any
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, COLUMNS

    def run(self, ops: Sequence[Op], values: Sequence[Any]) -> list[Any]:
        values = list(values)
        for op in ops:
            a, b = (values[-1 - i % len(values)] for i in (op.a, op.b))
            out = OPS[op.name](self, op, a, b)
            assert out.shape == self.shape, (op, out.shape)
            values.append(out.astype(self.dtype))
        return values

    def body(self, op: Op) -> Callable[..., Any]:
        """Return the inner program of an operation as a function of two arrays."""
        return lambda a, b: self.run(op.body, [b, a])[-1]


OPS: dict[str, Callable[[Context, Op, Any, Any], Any]] = {}
# What an operation is good for. One without a tag works on reals of any dtype and shape.
COMPLEX: set[str] = set()  # on complex numbers as well
ROWS: set[str] = set()  # only where there are three rows
F32: set[str] = set()  # only in single and double precision
BODY: set[str] = set()  # has an inner program
REVERSE: set[str] = set()  # has no forward-mode derivative
FIRST: set[str] = set()  # has no second derivative in reverse mode
FORWARD: set[str] = set()  # has no reverse-mode derivative
NONE: set[str] = set()  # has no derivative at all


def op(*tags: set[str]) -> Callable[[Any], Any]:
    """Register an operation under its function's name without the leading underscore."""

    def add(fn: Any) -> Any:
        name = fn.__name__.removeprefix("_")
        OPS[name] = fn
        for tag in tags:
            tag.add(name)
        return fn

    return add


def _constant(k: int) -> float:
    return (0.5, 1.5, -0.75, 0.25)[k % 4]


# -- elementwise -----------------------------------------------------------------------------

_ELEMENTWISE = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / (2 + b * b),
    "tanh": lambda a, b: jnp.tanh(a),
    "sin": lambda a, b: jnp.sin(a),
    "cos": lambda a, b: jnp.cos(a),
    "exp": lambda a, b: jnp.exp(-a * a),
    "square": lambda a, b: jnp.square(a) / 2,
    "neg": lambda a, b: -a,
    "zero": lambda a, b: a * 0 + b,
    "twice": lambda a, b: a * a + jnp.sin(a) * a,
}
_REAL = {
    "log1p": lambda a, b: jnp.log1p(a * a),
    "expm1": lambda a, b: jnp.expm1(-jnp.abs(a)),
    "sqrt": lambda a, b: jnp.sqrt(1 + a * a),
    "rsqrt": lambda a, b: lax.rsqrt(1 + a * a),
    "abs": lambda a, b: jnp.abs(a),
    "sign": lambda a, b: jnp.sign(a) * b,
    "maximum": lambda a, b: jnp.maximum(a, b),
    "minimum": lambda a, b: jnp.minimum(a, b),
    "relu": lambda a, b: jax.nn.relu(a),
    "relu6": lambda a, b: jax.nn.relu6(a * 4),
    "gelu": lambda a, b: jax.nn.gelu(a),
    "silu": lambda a, b: jax.nn.silu(a),
    "softplus": lambda a, b: jax.nn.softplus(a),
    "logistic": lambda a, b: jax.nn.sigmoid(a),
    "where": lambda a, b: jnp.where(a > b, a, 2 * b),
    "clip": lambda a, b: jnp.clip(a, -0.5, 0.5),
    "erf": lambda a, b: lax.erf(a),
    "atan2": lambda a, b: jnp.arctan2(a, 2 + b * b),
    "floor": lambda a, b: jnp.floor(3 * a) + b,
    "rem": lambda a, b: lax.rem(a, jnp.full_like(a, 0.75)),
    "logaddexp": lambda a, b: jnp.logaddexp(a, b),
    "cbrt": lambda a, b: jnp.cbrt(1 + a * a),
    "pow": lambda a, b: jnp.power(1 + a * a, b),
    "nextafter": lambda a, b: a + lax.nextafter(*map(lax.stop_gradient, (b, a))),
    "reduce_precision": lambda a, b: lax.reduce_precision(a, 5, 7),
    "erf_inv": lambda a, b: lax.erf_inv(jnp.tanh(a) / 2),
    "lgamma": lambda a, b: lax.lgamma(2 + a * a),
    "is_finite": lambda a, b: jnp.where(jnp.isfinite(a), a, b),
}


def _elementwise(fn: Callable[..., Any]) -> Any:
    return lambda context, op, a, b: fn(a, b)


for _name, _fn in {**_ELEMENTWISE, **_REAL}.items():
    OPS[_name] = _elementwise(_fn)
COMPLEX |= set(_ELEMENTWISE)


@op(COMPLEX)
def _constant_times(context, op, a, b):
    return a * _constant(op.k)


@op(COMPLEX)
def _power(context, op, a, b):
    return a ** (2, 3, 1, -1)[op.k % 4] / 2 if op.k % 4 != 3 else (2 + a * a) ** -1


@op(COMPLEX)
def _weak(context, op, a, b):
    """A Python float among the arguments: a weakly typed tracer under `jit`."""
    return a * context.rest["scale"] + b


@op(COMPLEX)
def _array_constant(context, op, a, b):
    return a + jnp.asarray(np.full(context.shape, _constant(op.k)), context.dtype)


@op(COMPLEX)
def _stop_gradient(context, op, a, b):
    return lax.stop_gradient(a) + b


@op(COMPLEX)
def _constant_output(context, op, a, b):
    return jnp.full(context.shape, _constant(op.k), context.dtype)


@op(COMPLEX)
def _dead(context, op, a, b):
    jnp.tanh(a @ b.T)
    return a


@op(COMPLEX)
def _flag(context, op, a, b):
    return a if context.rest["flag"] else b


# -- dots, convolutions, reductions ------------------------------------------------------------


@op(COMPLEX)
def _dot(context, op, a, b):
    return a @ (b.T @ a) / 4


@op(COMPLEX)
def _batched_dot(context, op, a, b):
    return jnp.einsum("ij,ik->ijk", a, b).sum(1) / 4


@op(COMPLEX)
def _outer(context, op, a, b):
    return jnp.einsum("ij,kj->ik", a, b) @ a / 4


@op()
def _dot_in_f32(context, op, a, b):
    wide = lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return wide.astype(context.dtype) @ a / 4


@op(ROWS)
def _conv(context, op, a, b):
    kernel = b[:, :3].reshape(1, 1, 3, 3)
    dilation = (1 + op.k % 2,) * 2
    out = lax.conv_general_dilated(
        a.reshape(1, 1, *context.shape), kernel, (1, 1), "SAME", rhs_dilation=dilation
    )
    return out.reshape(context.shape) / 3


@op(ROWS)
def _depthwise_conv(context, op, a, b):
    kernel = b[:, :, None].transpose(2, 0, 1)[..., None].reshape(3, 4)[:, :4].T.reshape(4, 1, 3)
    out = lax.conv_general_dilated(a.T[None], kernel, (1,), "SAME", feature_group_count=4)
    return out[0].T / 3


@op(COMPLEX)
def _sum(context, op, a, b):
    return a + b.sum(op.k % 2, keepdims=True) / 4


@op(COMPLEX)
def _mean(context, op, a, b):
    return a - a.mean(1, keepdims=True)


@op(ROWS)
def _max(context, op, a, b):
    return b + a.max(op.k % 2, keepdims=True)


@op(COMPLEX)
def _prod(context, op, a, b):
    return b + a.prod(1, keepdims=True)


@op()
def _logsumexp(context, op, a, b):
    return b - jax.nn.logsumexp(a, 1, keepdims=True)


@op()
def _softmax(context, op, a, b):
    return jax.nn.softmax(a) * b


@op()
def _log_softmax(context, op, a, b):
    return jax.nn.log_softmax(a)


@op()
def _layer_norm(context, op, a, b):
    centred = a - a.mean(1, keepdims=True)
    return centred * lax.rsqrt((centred * centred).mean(1, keepdims=True) + 0.1)


@op(COMPLEX)
def _norm(context, op, a, b):
    return a / (1 + jnp.sqrt(1 + jnp.sum(jnp.real(a * a.conj()))))


@op()
def _argmax(context, op, a, b):
    return jax.nn.one_hot(jnp.argmax(a, 1), COLUMNS, dtype=context.dtype) * b


@op()
def _max_pool(context, op, a, b):
    window = ((2, 2), (1, 3), (2, 1))[op.k % 3]
    return lax.reduce_window(a, -jnp.inf, lax.max, window, (1, 1), "SAME")


@op(ROWS)
def _strided_max_pool(context, op, a, b):
    out = lax.reduce_window(a, -jnp.inf, lax.max, (2, 2), (1, 2), "SAME")
    return jnp.repeat(out, 2, 1)


@op()
def _min_pool(context, op, a, b):
    return lax.reduce_window(a, jnp.inf, lax.min, (2, 2), (1, 1), "SAME")


@op()
def _avg_pool(context, op, a, b):
    return lax.reduce_window(a, 0.0, lax.add, (2, 2), (1, 1), "SAME") / 4


@op()
def _cumsum(context, op, a, b):
    return lax.cumsum(a, op.k % 2, reverse=op.k % 4 > 1) / 2


@op()
def _cummax(context, op, a, b):
    return lax.cummax(a, 1)


@op()
def _cumprod(context, op, a, b):
    return lax.cumprod(jnp.tanh(a), 1)


@op()
def _cumlogsumexp(context, op, a, b):
    return lax.cumlogsumexp(a, 1)


@op(COMPLEX)
def _associative_scan(context, op, a, b):
    return lax.associative_scan(lambda u, v: u * 0.5 + v, a, axis=op.k % 2)


# -- order, places, shapes -------------------------------------------------------------------


@op()
def _sort(context, op, a, b):
    return jnp.sort(a, 1)


@op()
def _sort_pairs(context, op, a, b):
    return lax.sort((a, b), dimension=1, num_keys=1)[1]


@op()
def _top_k(context, op, a, b):
    values, places = lax.top_k(a, 2)
    return b + values.sum(1, keepdims=True) + places[:, :1].astype(context.dtype)


@op(ROWS, COMPLEX)
def _gather(context, op, a, b):
    return a[context.rest["n"]] * b


@op(COMPLEX)
def _take(context, op, a, b):
    places = jnp.asarray([0, 3, 3, 1])
    return jnp.take(a, places, axis=1) + jnp.take(a, places[::-1], axis=1, mode="clip")


@op()
def _take_along_axis(context, op, a, b):
    return jnp.take_along_axis(a, jnp.argsort(b, 1), 1)


@op(ROWS, COMPLEX)
def _scatter_add(context, op, a, b):
    return a.at[context.rest["n"] // 2].add(b)


@op(ROWS, COMPLEX)
def _scatter_set(context, op, a, b):
    return a.at[context.rest["n"][1:]].set(b[1:])


@op(ROWS)
def _scatter_mul(context, op, a, b):
    return a.at[context.rest["n"]].multiply(b, unique_indices=True)


@op(ROWS)
def _segment_sum(context, op, a, b):
    return jax.ops.segment_sum(a, context.rest["n"] // 2, num_segments=3) + b


@op(ROWS)
def _segment_max(context, op, a, b):
    found = jax.ops.segment_max(a, context.rest["n"] // 2, num_segments=3)
    return jnp.where(jnp.isfinite(found), found, b)


@op(ROWS, COMPLEX)
def _dynamic_slice(context, op, a, b):
    row = lax.dynamic_slice(a, (context.rest["n"][0] // 2, 0), (1, COLUMNS))
    return lax.dynamic_update_slice(b, row, (context.rest["n"][1], 0))


@op(COMPLEX)
def _concatenate(context, op, a, b):
    return jnp.concatenate([a, b], 1)[:, 1:5] * jnp.concatenate([b, a], 1)[:, 3:7]


@op(COMPLEX)
def _stack(context, op, a, b):
    return jnp.stack([a, b, a * b]).sum(0)


@op(COMPLEX)
def _pad(context, op, a, b):
    return jnp.pad(a, ((0, 0), (1, 0)))[:, :COLUMNS] + b


@op(COMPLEX)
def _reshape(context, op, a, b):
    return jnp.rot90(a.reshape(context.shape[::-1]).T, 2).reshape(context.shape) * b


@op(COMPLEX)
def _split(context, op, a, b):
    left, _, right = jnp.split(a, [1, 2], 1)
    return b + left * right.sum(1, keepdims=True)


@op()
def _tri(context, op, a, b):
    return jnp.where(jnp.tri(*context.shape, dtype=bool), a, b)


# -- other types -------------------------------------------------------------------------------


@op()
def _half(context, op, a, b):
    return (a.astype(jnp.bfloat16) * b.astype(jnp.bfloat16)).astype(context.dtype)


@op()
def _through_integers(context, op, a, b):
    whole = jnp.round(4 * a).astype(jnp.int32)
    return a + (whole % 3).astype(context.dtype) * b


@op()
def _booleans(context, op, a, b):
    mask = (a > 0) & ~(b > 0.5) | jnp.any(a < -0.5, 1, keepdims=True)
    return jnp.where(mask, a, b) + jnp.all(mask).astype(context.dtype)


@op(F32)
def _complex(context, op, a, b):
    z = jnp.exp(1j * a) * (b + 1j)
    return jnp.real(z) + jnp.imag(z * z.conj()) + jnp.abs(z + 2)


@op(F32)
def _fft(context, op, a, b):
    spectrum = jnp.fft.fft(a, axis=1)
    return jnp.fft.ifft(spectrum * jnp.conj(spectrum), axis=1).real / 4 + b


@op(F32)
def _rfft(context, op, a, b):
    return jnp.fft.irfft(jnp.fft.rfft(a, axis=1) * 0.5, n=COLUMNS, axis=1)


@op(F32)
def _bitcast(context, op, a, b):
    bits = lax.bitcast_convert_type(a.astype(jnp.float32), jnp.int32) & 1
    return a + bits.astype(context.dtype)


# -- linear algebra ----------------------------------------------------------------------------


def _positive(a):
    return a.T @ a + 2 * jnp.eye(COLUMNS, dtype=a.dtype)


@op(F32)
def _cholesky(context, op, a, b):
    return b @ jnp.linalg.cholesky(_positive(a)) / 2


@op(F32)
def _solve(context, op, a, b):
    return jnp.linalg.solve(_positive(a), b.T).T


@op(F32)
def _triangular_solve(context, op, a, b):
    lower = jnp.tril(_positive(a))
    return lax.linalg.triangular_solve(lower, b, lower=True)


@op(F32)
def _inv(context, op, a, b):
    return b @ jnp.linalg.inv(_positive(a))


@op(F32)
def _slogdet(context, op, a, b):
    return b * jnp.linalg.slogdet(_positive(a))[1]


@op(F32)
def _eigh(context, op, a, b):
    spread = jnp.diag(jnp.arange(4, dtype=a.dtype) * 4)
    return b + jnp.linalg.eigvalsh(_positive(a) + spread)[None]


@op(F32)
def _qr(context, op, a, b):
    return b @ jnp.linalg.qr(_positive(a))[1] / 4


@op(NONE, F32)
def _schur(context, op, a, b):
    return b @ lax.linalg.schur(_positive(a))[0] / 4


# -- control flow ------------------------------------------------------------------------------


@op(BODY)
def _cond(context, op, a, b):
    inner = context.body(op)
    there = jnp.real(a).sum() > 0 if op.k % 2 else context.rest["n"].sum() > 2
    return lax.cond(there, inner, lambda a, b: a * b, a, b)


@op(BODY, COMPLEX)
def _switch(context, op, a, b):
    inner = context.body(op)
    branches = [lambda a, b: a, inner, lambda a, b: inner(b, a) * 2, lambda a, b: jnp.zeros_like(a)]
    place = context.rest["n"].max(initial=0) + op.k if op.k % 2 else jnp.int32(op.k)
    return lax.switch(place % 4, branches, a, b)


@op(BODY, FORWARD)
def _while(context, op, a, b):
    inner = context.body(op)

    def step(state):
        i, a = state
        return i + 1, inner(a, b) / 2

    return lax.while_loop(lambda state: state[0] < 2 + op.k % 2, step, (0, a))[1]


@op(BODY, FORWARD)
def _while_on_data(context, op, a, b):
    inner = context.body(op)
    small = lambda a: jnp.sum(jnp.abs(a)) > 0.5  # noqa: E731
    out = lax.while_loop(
        lambda s: small(s[1]) & (s[0] < 3), lambda s: (s[0] + 1, inner(s[1], b) / 2), (0, a)
    )
    return out[1]


@op(BODY, COMPLEX)
def _fori_loop(context, op, a, b):
    inner = context.body(op)
    return lax.fori_loop(0, op.k % 3, lambda i, a: inner(a, b) / 2 + i, a)


@op(BODY, COMPLEX)
def _scan(context, op, a, b):
    """A carry, a constant, slices and stacked outputs; forward, reversed, unrolled."""
    inner = context.body(op)
    xs = jnp.stack([a, b, a * b])

    def step(carry, x):
        carry = inner(carry, x) / 2 + b
        return carry, carry * x

    out, ys = lax.scan(step, a, xs, reverse=op.k % 2 == 1, unroll=1 + (op.k % 4) // 2)
    return out + ys.sum(0) / 4


@op(BODY, COMPLEX)
def _scan_of_integers(context, op, a, b):
    """Beside the array an integer and a bool are carried."""
    inner = context.body(op)

    def step(carry, i):
        a, n, odd = carry
        a = inner(a, b) / 2 + jnp.where(odd, n, i).astype(a.dtype)
        return (a, n + i, ~odd), (i, a)

    (a, n, _), (_, ys) = lax.scan(
        step, (a, jnp.int32(0), jnp.array(True)), jnp.arange(2 + op.k % 3)
    )
    return a + ys[0] + n.astype(a.dtype)


@op(BODY, COMPLEX)
def _nested_scan(context, op, a, b):
    inner = context.body(op)

    def row(a, _):
        return inner(a, b) / 2, None

    def outer(carry, x):
        out, _ = lax.scan(row, carry + x, None, length=1 + op.k % 2)
        return out, out

    out, ys = lax.scan(outer, a, jnp.stack([a, b]))
    return out + ys[0]


@op(BODY, COMPLEX)
def _empty_scan(context, op, a, b):
    inner = context.body(op)
    out, ys = lax.scan(lambda a, x: (inner(a, x), a), a, jnp.zeros((0, *context.shape), a.dtype))
    return out + ys.sum(0) + b


@op(BODY, COMPLEX)
def _map(context, op, a, b):
    inner = context.body(op)
    return lax.map(lambda x: inner(x, b), jnp.stack([a, b])).sum(0) / 2


@op(BODY, COMPLEX)
def _accumulated(context, op, a, b):
    """A gradient is taken in a loop."""
    inner = context.body(op)
    loss = jax.grad(lambda a, x: jnp.real(jnp.sum(inner(a, x))))

    def step(total, x):
        return total + loss(b, x), None

    return lax.scan(step, jnp.zeros_like(a), jnp.stack([a, b]))[0]


# -- custom derivatives ------------------------------------------------------------------------


def _spike(steep):
    return lambda a: 1 / (1 + (steep * a) ** 2)


@jax.custom_jvp
def _plain_rule(a):
    return jnp.tanh(a)


@_plain_rule.defjvp
def _(primals, tangents):
    (a,), (da,) = primals, tangents
    return _plain_rule(a), da * _spike(3.0)(a)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _static_rule(a, steep):
    return jnp.tanh(a)


@_static_rule.defjvp
def _(steep, primals, tangents):
    (a,), (da,) = primals, tangents
    return _static_rule(a, steep), da * _spike(steep)(a)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _function_rule(fn, a):
    return fn(a)


@_function_rule.defjvp
def _(fn, primals, tangents):
    (a,), (da,) = primals, tangents
    return fn(a), da * fn(2 * a)


def _closed_rule(steep):
    @jax.custom_jvp
    def rule(a):
        return jnp.tanh(a)

    @rule.defjvp
    def _(primals, tangents):
        (a,), (da,) = primals, tangents
        return rule(a), da * _spike(steep)(a)

    return rule


def _partial_rule(steep):
    rule = jax.custom_jvp(jnp.tanh)

    def derivative(steep, primals, tangents):
        return jnp.tanh(primals[0]), tangents[0] * _spike(steep)(primals[0])

    rule.defjvp(functools.partial(derivative, steep))
    return rule


@jax.custom_jvp
def _symbolic_rule(a, b):
    return a * jnp.tanh(b)


def _symbolic_derivative(primals, tangents):
    (a, b), (da, db) = primals, tangents
    out = _symbolic_rule(a, b)
    parts = []
    if not isinstance(da, SymbolicZero):
        parts.append(da * jnp.tanh(b))
    if not isinstance(db, SymbolicZero):
        parts.append(3 * db * a)
    return out, sum(parts) if parts else SymbolicZero.from_primal_value(out)


_symbolic_rule.defjvp(_symbolic_derivative, symbolic_zeros=True)


@jax.custom_jvp
def _two_outputs_rule(a, b):
    return a * b, jnp.round(3 * a).astype(jnp.int32), jnp.sin(a)


@_two_outputs_rule.defjvp
def _(primals, tangents):
    (a, b), (da, db) = primals, tangents
    out = _two_outputs_rule(a, b)
    return out, (da * b + 2 * db * a, np.zeros(a.shape, jax.dtypes.float0), da)


@op()
def _custom_jvp(context, op, a, b):
    return _plain_rule(a) * b


@op()
def _custom_jvp_static(context, op, a, b):
    return _static_rule(a, 1.0 + 4 * op.k)


@op()
def _custom_jvp_function(context, op, a, b):
    return _function_rule((jnp.sin, jnp.tanh, jnp.cos)[op.k % 3], a)


@op()
def _custom_jvp_symbolic(context, op, a, b):
    return _symbolic_rule(a, lax.stop_gradient(b) if op.k % 2 else b)


@op()
def _custom_jvp_two_outputs(context, op, a, b):
    y, n, z = _two_outputs_rule(a, b)
    return y + n.astype(a.dtype) if op.k % 2 else y * z


def _layer(context, rule):
    return lambda a, b: rule(a @ (b.T @ b) / 4)


@op()
def _layers(context, op, a, b):
    """Equal blocks on one line, which differ in a static argument alone."""
    rules = {
        0: lambda steep: functools.partial(_static_rule, steep=steep),
        1: _closed_rule,
        2: _partial_rule,
        3: lambda steep: functools.partial(_static_vjp, steep),
        4: lambda steep: functools.partial(_function_rule, lambda a: jnp.tanh(steep * a)),
        5: _closed_vjp,
        6: lambda steep: lambda a: jnp.tanh(a * steep),
    }
    rule = rules[op.k % len(rules)]
    for i, steep in enumerate((1.0, 10.0, 100.0)):
        with jax.named_scope(f"layer_{i}"):
            a = rule(steep)(a * 0.5 + b)
    return a


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _static_vjp(steep, a):
    return jnp.tanh(a)


_static_vjp.defvjp(lambda steep, a: (jnp.tanh(a), a), lambda steep, a, ct: (ct * _spike(steep)(a),))


def _closed_vjp(steep):
    @jax.custom_vjp
    def rule(a):
        return jnp.tanh(a)

    rule.defvjp(lambda a: (jnp.tanh(a), a), lambda a, ct: (ct * _spike(steep)(a),))
    return rule


@jax.custom_vjp
def _clipped(a):
    return a


_clipped.defvjp(lambda a: (a, None), lambda _, ct: (jnp.clip(ct, -0.3, 0.3),))


@jax.custom_vjp
def _normalised(a):
    return jnp.sin(a)


# Not linear in its cotangent, and NaN for a cotangent of zero.
_normalised.defvjp(
    lambda a: (jnp.sin(a), a), lambda a, ct: (jnp.cos(a) * ct / jnp.sqrt(jnp.sum(ct * ct)),)
)


@jax.custom_vjp
def _two_outputs(a, b):
    return a * b, jnp.sin(a)


def _two_outputs_bwd(kept, cts):
    a, b = kept
    dy, dz = cts
    return dy * b + jnp.tanh(dz) + 1, dy * a + 0.5


_two_outputs.defvjp(lambda a, b: (_two_outputs(a, b), (a, b)), _two_outputs_bwd)


@jax.custom_vjp
def _unused_one(a, b):
    return a * b, jnp.sin(a)


# Its derivative by each output is scaled to length one, which is NaN for an unused output.
def _unused_one_bwd(kept, cts):
    a, b = kept
    dy, dz = cts
    return dy / jnp.maximum(jnp.abs(dy).sum(), 1e-6) * b + dz, dy * a


_unused_one.defvjp(lambda a, b: (_unused_one(a, b), (a, b)), _unused_one_bwd)


@jax.custom_vjp
def _loss_of_its_own(a, b):
    return jnp.sum(a * b)


def _loss_of_its_own_fwd(a, b):
    return jnp.sum(a * b), (b, a)


# As fused losses do: the gradients are made in the forward pass, the cotangent is taken for 1.
_loss_of_its_own.defvjp(_loss_of_its_own_fwd, lambda kept, ct: kept)


@jax.custom_vjp
def _symbolic_vjp(a, b):
    return a * b, jnp.cos(b)


def _symbolic_vjp_fwd(a, b):
    perturbed = a.perturbed, b.perturbed
    a, b = a.value, b.value
    return (a * b, jnp.cos(b)), (a, b) if all(perturbed) else (a + 0, b)


def _symbolic_vjp_bwd(kept, cts):
    a, b = kept
    dy, dz = cts
    da, db = jnp.zeros_like(a), jnp.zeros_like(b)
    if not isinstance(dy, SymbolicZero):
        da, db = da + dy * b + 1, db + dy * a
    if not isinstance(dz, SymbolicZero):
        db = db + dz + 2
    return da, db


_symbolic_vjp.defvjp(_symbolic_vjp_fwd, _symbolic_vjp_bwd, symbolic_zeros=True)


@jax.custom_vjp
def _integer_vjp(a, n):
    return a * n[:, None].astype(a.dtype)


_integer_vjp.defvjp(
    lambda a, n: (_integer_vjp(a, n), n), lambda n, ct: (2 * ct * n[:, None].astype(ct.dtype), None)
)


@jax.custom_vjp
def _tree_vjp(tree):
    return {"sum": tree["a"] + tree["b"][0], "none": tree["none"]}


_tree_vjp.defvjp(
    lambda tree: (_tree_vjp(tree), None),
    lambda _, ct: ({"a": 2 * ct["sum"], "b": (ct["sum"],), "none": None},),
)


@op(REVERSE)
def _custom_vjp(context, op, a, b):
    return _static_vjp(1.0 + op.k, a)


@op(REVERSE)
def _vjp_clipped(context, op, a, b):
    return _clipped(a) * b


@op(REVERSE)
def _vjp_normalised(context, op, a, b):
    return _normalised(a) + b


@op(REVERSE)
def _vjp_two_outputs(context, op, a, b):
    y, z = _two_outputs(a, b)
    return (y, z, y * z, y + lax.stop_gradient(z))[op.k % 4]


@op(REVERSE)
def _vjp_unused(context, op, a, b):
    return _unused_one(a, b)[op.k % 2]


@op(REVERSE)
def _vjp_loss(context, op, a, b):
    return a * b + _loss_of_its_own(a, b)


@op(REVERSE)
def _vjp_symbolic(context, op, a, b):
    y, z = _symbolic_vjp(lax.stop_gradient(a) if op.k % 3 == 2 else a, b)
    return y if op.k % 2 else y + z


@op(REVERSE, ROWS)
def _vjp_integer(context, op, a, b):
    return _integer_vjp(a, context.rest["n"])


@op(REVERSE)
def _vjp_tree(context, op, a, b):
    return _tree_vjp({"a": a, "b": (b,), "none": None})["sum"]


@op(REVERSE, BODY)
def _vjp_body(context, op, a, b):
    """The forward pass keeps the pullback of an inner program.

    What the program reads is an argument: JAX calls the rules of a function that is closed over a
    traced value after the value is gone.
    """
    traced = {name: context.rest[name] for name in ("n", "key", "scale")}

    def inner(traced, a, b):
        there = dataclasses.replace(context, rest={**context.rest, **traced})
        return there.body(op)(a, b)

    @jax.custom_vjp
    def fn(traced, a, b):
        return inner(traced, a, b)

    def forward(traced, a, b):
        return jax.vjp(functools.partial(inner, traced), a, b)

    fn.defvjp(forward, lambda pull, ct: (None, *pull(2 * ct)))
    return fn(traced, a, b)


@op(REVERSE)
def _custom_gradient(context, op, a, b):
    @jax.custom_gradient
    def fn(a):
        return jnp.sin(a), lambda ct: 2 * ct * jnp.cos(a)

    return fn(a) * b


@op(NONE)
def _linear_call(context, op, a, b):
    def forward(scale, a):
        return a * (1 + scale * scale)

    return jax.custom_derivatives.linear_call(forward, forward, b, a)


@op()
def _custom_root(context, op, a, b):
    def of(c):
        return lax.custom_root(
            lambda y: y - c,
            jnp.zeros_like(c),
            lambda f, y: y - f(y),
            lambda g, y: y / g(jnp.ones_like(y)),
        )

    return of(jnp.tanh(a)) * b


@op(FORWARD)
def _custom_vmap(context, op, a, b):
    @jax.custom_batching.custom_vmap
    def fn(a):
        return jnp.sin(a)

    @fn.def_vmap
    def _(size, batched, a):
        return jnp.sin(a), batched[0]

    return fn(a) * b if op.k % 2 else lax.stop_gradient(fn(a)) * b


# -- transformations inside --------------------------------------------------------------------


@op(BODY, COMPLEX)
def _jit(context, op, a, b):
    return jax.jit(context.body(op))(a, b)


@op(BODY, COMPLEX)
def _vmap(context, op, a, b):
    inner = context.body(op)
    stacked = jnp.stack([a, b])
    return jax.vmap(inner, (0, None if op.k % 2 else 0))(stacked, b if op.k % 2 else stacked).sum(0)


@op(BODY, COMPLEX)
def _checkpoint(context, op, a, b):
    policies = (
        None,
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.everything_saveable,
    )
    inner = context.body(op)
    return jax.checkpoint(inner, policy=policies[op.k % 3], prevent_cse=op.k % 2 == 0)(a, b)


@op(BODY, COMPLEX)
def _checkpoint_names(context, op, a, b):
    policy = jax.checkpoint_policies.save_only_these_names("alpha")
    return jax.checkpoint(context.body(op), policy=policy)(a, b)


@op(BODY, COMPLEX)
def _grad(context, op, a, b):
    inner = context.body(op)
    return jax.grad(lambda a: jnp.real(jnp.sum(inner(a, b))))(a)


@op(BODY, COMPLEX)
def _jvp(context, op, a, b):
    inner = context.body(op)
    return jax.jvp(lambda a: inner(a, b), (a,), (b,))[1]


@op(BODY, COMPLEX)
def _linearize(context, op, a, b):
    inner = context.body(op)
    out, linear = jax.linearize(lambda a: inner(a, b), a)
    return out + linear(b) + linear(a)


@op(BODY, COMPLEX)
def _scope(context, op, a, b):
    with jax.named_scope("inner"):
        return context.run(op.body, [b, a])[-1]


@op(COMPLEX)
def _name(context, op, a, b):
    return checkpoint_name(jnp.tanh(a) * b, ("alpha", "beta", "gamma")[op.k % 3])


@op(COMPLEX)
def _named_input(context, op, a, b):
    return checkpoint_name(a, ("alpha", "beta", "gamma")[op.k % 3]) * b


@op(COMPLEX)
def _barrier(context, op, a, b):
    a, _, b = lax.optimization_barrier((a, context.rest["n"], b))
    return a * b


# -- random numbers, callbacks -----------------------------------------------------------------


@op()
def _dropout(context, op, a, b):
    key = jax.random.fold_in(context.rest["key"], op.k)
    keep = jax.random.bernoulli(key, 0.5, context.shape)
    return jnp.where(keep, a * 2, 0)


@op()
def _noise(context, op, a, b):
    key, other = jax.random.split(jax.random.fold_in(context.rest["key"], op.k))
    drawn = jax.random.normal(key, context.shape, jnp.float32)
    return a + drawn.astype(context.dtype) * b + jax.random.randint(other, (), 0, 3).astype(a.dtype)


@op(NONE)
def _callback(context, op, a, b):
    shape = jax.ShapeDtypeStruct(context.shape, context.dtype)
    return jax.pure_callback(lambda a: np.sin(a), shape, a, vmap_method="sequential")


@op()
def _unread_callback(context, op, a, b):
    shape = jax.ShapeDtypeStruct((), np.int32)
    n = jax.pure_callback(lambda n: np.int32(n), shape, context.rest["n"].sum())
    return a + n.astype(context.dtype)


@jax.custom_jvp
def _called(a):
    return jax.pure_callback(np.sin, jax.typeof(a), a, vmap_method="sequential")


@_called.defjvp
def _(primals, tangents):
    (a,), (da,) = primals, tangents
    return _called(a), jnp.cos(a) * da


@op(F32)
def _differentiable_callback(context, op, a, b):
    return _called(a) + b


@op()
def _debug(context, op, a, b):
    jax.debug.callback(lambda a: None, a)
    return a * b


def allowed(
    *, dtype: str = "float32", rows: int = 3, orders: str = "value"
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the operations that a program may be made of: those without a body, and those with.

    Args:
        dtype: of the arrays.
        rows: of the arrays.
        orders: what is done to the program: "value", "jvp", "gradient", or "second" for both.
    """
    names = set(OPS)
    if dtype.startswith("complex"):
        names &= COMPLEX
    if dtype not in ("float32", "float64"):
        names -= F32
    if rows != 3:
        names -= ROWS | F32
    if orders != "value":
        names -= NONE
    if orders in ("gradient", "second"):
        names -= FORWARD
    if orders in ("jvp", "second"):
        names -= REVERSE
    return tuple(sorted(names - BODY)), tuple(sorted(names & BODY))


def scale_of(values: Sequence[Any]) -> float:
    """Return the largest finite magnitude among some arrays, at least one."""
    largest = [1.0]
    for value in values:
        size = np.abs(np.asarray(value, np.complex128))
        size = size[np.isfinite(size)]
        largest.append(float(size.max()) if size.size else 0.0)
    return max(x for x in largest if not math.isnan(x))
