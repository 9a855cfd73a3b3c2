"""Check that a decorated function is still the same function: compare values and gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from remat_kit import _jax
from remat_kit._errors import CheckError, UserError
from remat_kit._frameworks import flax as _flax
from remat_kit._program import program as _program
from remat_kit._program import value as _value
from remat_kit._program.steps.gradient import abstract, gradient_program, materialise
from remat_kit._program.steps.losses import step_of

# -- equivalence --------------------------------------------------------------------------------

_MOST_LINES = 8  # in a message


def assert_equivalent(
    f: Callable[..., Any],
    g: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    ulps: float = 4,
    exact: bool = False,
    jit: bool = True,
    seed: int = 0,
) -> None:
    """Fail unless two losses of the same arguments give the same loss, aux and gradients.

    Two versions of a training step must give the same results, and with NNX the same state.

    >>> import jax, jax.numpy as jnp, remat_kit
    >>> def loss(w, x):
    ...     return jnp.sum(jnp.sin(jnp.tanh(x @ w)))
    >>> w = x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    >>> assert_equivalent(loss, remat_kit.policy("dots")(loss), w, x)
    >>> assert_equivalent(loss, lambda w, x: 1.01 * loss(w, x), w, x)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    remat_kit._errors.CheckError: `assert_equivalent(f, g, ...)`: loss differs by ...

    A difference is measured in units of rounding, relative to the largest element of the leaf. The
    unit is ``eps`` of the coarsest floating-point type that the two programs compute in: that of
    bfloat16 for a model in bfloat16 with parameters in float32, and that of the default matrix
    product on a TPU or a GPU. The largest element is the reference because a gradient is a sum: a
    compiler that fuses two programs differently rounds the terms of a small element as coarsely as
    those of a large one. A difference of one unit of the largest of all gradients always passes,
    because some gradients are zero in exact arithmetic, like that of the bias of attention keys,
    and hold nothing but rounding errors.

    Args:
        f: called as ``f(*args)``; returns a real scalar, or a pair of a scalar and anything. Or a
            training step, which takes a gradient itself.
        g: the same; its results are compared with those of ``f``.
        args: arrays, or `jax.ShapeDtypeStruct` for seeded random values: floating-point values
            that shrink with the fan-in, zeros and ones for integers, and keys.
        argnums: which arguments to differentiate.
        ulps: the largest difference that passes, in the units above.
        exact: whether to compare bit by bit instead.
        jit: whether to run each gradient as one compiled program, as a training step does. False
            runs it operation by operation, so that different fusions cannot cause differences; a
            loop counts as one operation.
        seed: of the random values.

    Raises:
        CheckError: an `AssertionError`; the results differ, and the message names the worst leaf.
        UserError: the random values give nothing to compare, or ``ulps`` is negative.
        NotDifferentiableError: a loss has no gradient for these arguments.

    NaN equals NaN, infinities equal themselves, and integers must be equal.
    """
    __tracebackhide__ = True
    call = "assert_equivalent"
    if not ulps >= 0:
        raise UserError(
            f"`{call}(..., ulps={ulps!r})`: a tolerance is 0 or more", hint="leave it at 4"
        )
    programs, args = _programs((f, g), args, argnums, call)
    structs = abstract(args, call=call)
    values = seeded(args, seed)
    pair = _Pair.of(programs, values, jit=jit)
    if values is not args and not pair.says_something():
        raise UserError(
            f"`{call}`: with random values of seed {seed} every gradient of f is zero or not "
            "finite, so there is nothing to compare",
            hint="give arrays instead of shapes: initial parameters and one batch",
        )
    rounding = _rounding(programs, structs)
    if found := pair.differences(0.0 if exact else rounding, ulps):
        hint = _why(programs, values, pair, rounding, exact, jit)
        raise CheckError(_described(found, pair), hint=hint)


def _programs(
    functions: Sequence[Callable[..., Any]],
    args: tuple[Any, ...],
    argnums: int | Sequence[int],
    call: str,
) -> tuple[list[Callable[..., Any]], tuple[Any, ...]]:
    """Return functions of arrays that return named results, and their arguments."""
    if step_of(functions[0], args, argnums, call=call) is not None:
        pure = [_flax.functional(fn, args) for fn in functions]
        return [_named_results(fn) for fn, _ in pure], pure[0][1]
    structs = abstract(args, call=call)
    gradients = [gradient_program(fn, structs, argnums, call=call) for fn in functions]
    return [_labelled(program, structs) for program in gradients], args


def _named_results(step: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: {"result": step(*values)}


@dataclasses.dataclass(frozen=True)
class _Difference:
    """Two leaves that differ; ``excess`` is a multiple of the difference that would pass."""

    path: str
    count: int
    size: int
    index: tuple[int, ...]
    values: tuple[Any, Any]
    excess: float
    ulps: float | None

    @property
    def how(self) -> str:
        return "differs" + ("" if self.ulps is None else f" by {self.ulps:.3g} units of rounding")


@dataclasses.dataclass(frozen=True)
class _Pair:
    """The results of two gradient programs: paths and leaves, in one order."""

    paths: tuple[str, ...]
    left: tuple[np.ndarray, ...]
    right: tuple[np.ndarray, ...]

    @classmethod
    def of(
        cls, programs: Sequence[Callable[..., Any]], values: tuple[Any, ...], *, jit: bool
    ) -> _Pair:
        shapes = [jax.eval_shape(run, *values) for run in programs]
        _check_structure(*shapes)
        results = []
        for run in programs:
            # A step that runs operation by operation donates what its jit donates.
            copied = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, values)
            result = (jax.jit(run) if jit else _stepwise(run))(*copied)
            results.append(jax.block_until_ready(result))  # before the next starts: see `_in_turn`
        leaves, _ = jax.tree_util.tree_flatten_with_path(results[0])
        right = jax.tree.leaves(results[1])
        return cls(
            tuple(_path_text(path) for path, _ in leaves),
            tuple(_plain(leaf) for _, leaf in leaves),
            tuple(map(_plain, right)),
        )

    def says_something(self) -> bool:
        depends = [a for p, a in zip(self.paths, self.left) if p.startswith(("gradient", "result"))]
        return any(bool(np.any(np.isfinite(a) & (a != 0))) for a in depends)

    def differences(self, unit: float, ulps: float) -> list[_Difference]:
        """Return the leaves whose difference does not pass, the worst first."""
        gradients = [a for p, a in zip(self.paths, self.left) if p.startswith("gradient")]
        largest = max(map(_magnitude, gradients), default=0.0)
        found = []
        for path, a, b in zip(self.paths, self.left, self.right, strict=True):
            floor = largest if path.startswith("gradient") else 0.0
            if (difference := _difference(path, a, b, unit, ulps, floor)) is not None:
                found.append(difference)
        return sorted(found, key=lambda d: -d.excess)


def _labelled(program: Callable[..., Any], values: tuple[Any, ...]) -> Callable[..., Any]:
    """Return the gradient program with its results under the names that messages use."""
    value, _ = jax.eval_shape(program, *values)

    def run(*values: Any) -> dict[str, Any]:
        result, gradient = program(*values)
        named = {"gradient": gradient}
        if isinstance(value, tuple):
            return named | {"loss": result[0], "aux": result[1]}
        return named | {"loss": result}

    return run


def _stepwise(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that traces ``run`` and evaluates its operations one by one."""

    def evaluated(*values: Any) -> Any:
        closed, shapes = jax.make_jaxpr(run, return_shape=True)(*values)
        flat = _program.evaluate(_program.Program.of(closed), jax.tree.leaves(values), _in_turn)
        return jax.tree.unflatten(jax.tree.structure(shapes), flat)

    return evaluated


def _in_turn(eqn: Any, values: list[Any]) -> list[Any]:
    """Evaluate one equation; with several processes, wait for its results.

    The devices of two processes may start operations that do not depend on each other in
    different orders. If both contain collectives, these can wait for each other forever (seen with
    gloo on jax 0.10.2, in some runs).
    """
    results = _jax.bind(eqn, values)
    return results if jax.process_count() == 1 else jax.block_until_ready(results)


def _plain(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        # Every process compares the whole arrays, so that all of them come to the same answer.
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def _path_text(path: Any) -> str:
    return str(path[0].key) + jax.tree_util.keystr(path[1:])


def _check_structure(left: Any, right: Any) -> None:
    __tracebackhide__ = True
    kinds = [
        {_path_text(p): f"{x.dtype}{list(x.shape)}" for p, x in found}
        for found in (jax.tree_util.tree_flatten_with_path(side)[0] for side in (left, right))
    ]
    for path in dict.fromkeys([*kinds[0], *kinds[1]]):
        f, g = (side.get(path, "nothing") for side in kinds)
        if f != g:
            raise CheckError(
                f"`assert_equivalent(f, g, ...)`: {path} is {f} in f and {g} in g",
                hint="the two losses have to give results of the same structure, shapes and types",
            )
    if jax.tree.structure(left) != jax.tree.structure(right):
        raise CheckError(
            "`assert_equivalent(f, g, ...)`: f and g give different pytrees: "
            f"{jax.tree.structure(left)} and {jax.tree.structure(right)}",
            hint="the two losses have to give results of the same structure, shapes and types",
        )


def _difference(
    path: str, a: np.ndarray, b: np.ndarray, unit: float, ulps: float, floor: float
) -> _Difference | None:
    """Compare two leaves; if ``unit`` is 0, their bits must be equal."""
    is_float = jnp.issubdtype(a.dtype, jnp.inexact)
    same = _same_bits(a, b) if unit == 0 or not is_float else _same_values(a, b)
    if same.all():
        return None
    # Half precision cannot represent the differences, and numpy cannot compute with bfloat16.
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    with np.errstate(all="ignore"):
        apart = np.where(same, 0.0, np.abs(a.astype(wide) - b.astype(wide)))
    apart = np.where(np.isnan(apart) | (~same & (apart == 0)), np.inf, apart)
    step = unit or (float(jnp.finfo(a.dtype).eps) if is_float else 1.0)
    scale = _magnitude(a)
    passes = unit * max(ulps * scale, min(ulps, 1.0) * floor) if is_float else 0.0
    wrong = apart > passes
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(apart)), apart.shape))
    worst = float(apart[index])
    return _Difference(
        path=path,
        count=int(wrong.sum()),
        size=a.size,
        index=index,
        values=(a[index], b[index]),
        excess=worst / passes if passes else math.inf,
        ulps=worst / (step * scale) if is_float and scale and math.isfinite(worst) else None,
    )


def _same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    both_nan = np.isnan(a) & np.isnan(b) if jnp.issubdtype(a.dtype, jnp.inexact) else False
    raw = [np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape, -1) for x in (a, b)]
    return (raw[0] == raw[1]).all(axis=-1) | both_nan


def _same_values(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a == b) | (np.isnan(a) & np.isnan(b))


def _magnitude(a: np.ndarray) -> float:
    """Return the largest absolute value that is a number."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return 0.0
    wide = np.abs(a.astype(np.complex128 if np.iscomplexobj(a) else np.float64))
    return float(np.max(wide, initial=0.0, where=np.isfinite(wide)))


def _described(found: Sequence[_Difference], pair: _Pair) -> str:
    worst = found[0]
    f, g = worst.values
    index = f" at {list(worst.index)}" if worst.index else ""
    lines = [
        f"`assert_equivalent(f, g, ...)`: {worst.path} {worst.how}{index}: {f!s} in f, {g!s} in g",
        f"in {worst.count} of its {worst.size} elements; {len(found)} of {len(pair.paths)} results "
        "differ",
    ]
    return "\n".join([*lines, *(f"  {d.path} {d.how}" for d in found[1:_MOST_LINES])])


_LIKE_ROUNDING = 64  # units; a smaller difference looks like another order of the same sums


def _why(
    programs: Sequence[Callable[..., Any]],
    values: tuple[Any, ...],
    pair: _Pair,
    rounding: float,
    exact: bool,
    jit: bool,
) -> str:
    """Say which of two causes is likely: another function, or another order of rounding."""
    apart = pair.differences(rounding, 0)
    units = max((d.ulps for d in apart if d.ulps is not None), default=0.0)
    looser = "leave exact=True out" if exact else f"allow ulps={math.ceil(units)}"
    if jit and not _Pair.of(programs, values, jit=False).differences(0.0, 0):
        return (
            "operation by operation the two are equal bit by bit, so the compiler fuses them "
            f"differently: compare with jit=False, or {looser}"
        )
    if not pair.differences(rounding, _LIKE_ROUNDING):
        return (
            "the difference is of the size of rounding errors: if the two are meant to do the same "
            f"operations (the body of a loop is fused whatever jit= says), {looser}"
        )
    return (
        "the two compute different results even if nothing is fused: check what depends on random "
        "keys, on state or on the policy"
    )


# .. rounding

# The precision of the default matrix product in float32.
_BACKEND_PRODUCTS = {"tpu": 2.0**-7, "gpu": 2.0**-10, "cuda": 2.0**-10}  # bfloat16, tensorfloat32


_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


def _rounding(programs: Sequence[Callable[..., Any]], structs: Sequence[Any]) -> float:
    """Return the coarsest ``eps`` that two programs compute with."""
    found = [float(jnp.finfo(jnp.float64).eps)]
    product = _BACKEND_PRODUCTS.get(jax.default_backend(), 0.0)
    for program in programs:
        for value in _value.values(
            _program.Program.of(jax.make_jaxpr(program)(*structs)), full=False
        ):
            dtype = jnp.dtype(value.dtype) if _is_float(value.dtype) else None
            if dtype is not None:
                found.append(float(jnp.finfo(dtype).eps))
                if not _PRODUCTS.isdisjoint(value.primitives) and dtype == jnp.float32:
                    found.append(product)
    return max(found)


def _is_float(name: str) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(name), jnp.inexact))
    except TypeError:  # keys and tokens have no such dtype
        return False


# .. values


def seeded(args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """Return the arguments with every `jax.ShapeDtypeStruct` replaced by random values.

    >>> w = jax.ShapeDtypeStruct((2,), jnp.float32)
    >>> bool((seeded((w,), 0)[0] == seeded((w,), 0)[0]).all())
    True
    """
    leaves, tree = jax.tree.flatten(args)
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return args
    random = np.random.default_rng(seed)
    return tree.unflatten([_drawn(leaf, random) for leaf in leaves])


def _drawn(leaf: Any, random: np.random.Generator) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return materialise((leaf,))[0]
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.asarray(random.integers(0, 2, leaf.shape), leaf.dtype)
    # Scaled like initial weights, so that a deep product neither overflows nor underflows.
    spread = max(1, math.prod(leaf.shape[:-1])) ** -0.5
    return jnp.asarray(spread * random.standard_normal(leaf.shape), leaf.dtype)
