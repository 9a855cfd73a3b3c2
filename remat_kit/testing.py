"""Checks for the tests of a project that trains: does the step fit, is it still the same step?

They compile for the chip that is named, which need not be there, and fail with a message that says
what to do. With `pytest` there is the fixture ``memory_baseline`` too, a `MemoryBaseline` whose
file lies beside the test: ``memory_baselines/<test file>/<test>.json``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_kit import _baseline, _graph, _remat, _report, _target
from remat_kit._baseline import MemoryBaseline as MemoryBaseline
from remat_kit._errors import CheckError as CheckError
from remat_kit._errors import PolicyError, RematKitError, UserError
from remat_kit._gradient import Argnums, abstract, gradient_program, materialise
from remat_kit._policy import format_bytes, parse_bytes
from remat_kit._residuals import Residual
from remat_kit._target import Memory, Target

# -- memory -------------------------------------------------------------------------------------


def assert_fits(
    fn: Callable[..., Any],
    *args: Any,
    target: str | Target,
    budget: int | str | None = None,
    policy: Any = None,
    at: str | None = None,
    argnums: Argnums = 0,
    donate_argnums: int | Sequence[int] = (),
) -> Memory:
    """Compile the gradient of a loss for a chip and fail if it does not fit there.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    >>> w = x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> assert_fits(loss, w, x, target="cpu", budget="4MiB").fits
    True
    >>> assert_fits(loss, w, x, target="cpu", budget="512KiB")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    remat_kit._errors.CheckError: `assert_fits(..., target='cpu', budget='512KiB')`: needs ...

    Args:
        fn: called as ``fn(*args)``; gives a real scalar, or a pair of one and anything.
        args: arrays or `jax.ShapeDtypeStruct`, in pytrees.
        target: the chip to compile for.
        budget: the bytes that the step may take, as a number or ``"14GiB"``; never more than the
            chip's memory, which is the default.
        policy: applied to ``fn`` first, as `remat_kit.policy` does; None leaves it alone.
        at: the module paths that ``policy`` is applied at.
        argnums: what to differentiate; None for a function that is a whole step.
        donate_argnums: the arguments whose memory the results may take over.

    Returns:
        What the program needs.

    Raises:
        CheckError: an `AssertionError`: the peak is above the budget.
        RematKitError: the call cannot work, as for `remat_kit.measure`.
    """
    __tracebackhide__ = True
    chip = _target.target(target)
    given = "" if budget is None else f", budget={budget!r}"
    call = f"assert_fits(..., target={chip.name!r}{given})"
    limit = chip.memory_bytes if budget is None else min(_bytes(budget, call), chip.memory_bytes)
    step = _Step(fn, args, policy, at, argnums)
    memory = step.measured(chip, donate_argnums, call="assert_fits")
    if memory.fits and (memory.peak_bytes or 0) <= limit:
        return memory
    raise _too_large(call, step, memory, limit, "the chip" if budget is None else "the budget")


def assert_peak_at_most(
    fn: Callable[..., Any],
    *args: Any,
    target: str | Target,
    peak: int | str,
    policy: Any = None,
    at: str | None = None,
    argnums: Argnums = 0,
    donate_argnums: int | Sequence[int] = (),
) -> Memory:
    """Compile the gradient of a loss for a chip and fail if its peak is above a figure.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    >>> w = x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> assert_peak_at_most(loss, w, x, target="cpu", peak="4MiB").argument_bytes
    524288

    Args:
        peak: the bytes that arguments, results and temporaries may take together, as a number or
            ``"12MiB"``; the chip's own memory does not matter.
        fn, args, target, policy, at, argnums, donate_argnums: as for `assert_fits`.

    Returns:
        What the program needs.

    Raises:
        CheckError: an `AssertionError`: the peak is above the figure.
        RematKitError: the call cannot work, as for `remat_kit.measure`.
    """
    __tracebackhide__ = True
    chip = _target.target(target)
    call = f"assert_peak_at_most(..., target={chip.name!r}, peak={peak!r})"
    limit = _bytes(peak, call)
    step = _Step(fn, args, policy, at, argnums)
    memory = step.measured(chip, donate_argnums, call="assert_peak_at_most")
    if memory.peak_bytes is not None and memory.peak_bytes <= limit:
        return memory
    raise _too_large(call, step, memory, limit, "the peak allowed")


def _bytes(size: int | str, call: str) -> int:
    try:
        return parse_bytes(size)
    except PolicyError as error:
        raise UserError(
            f"`{call}`: {size!r} is not a size in bytes",
            hint="write a number of bytes, or one with a unit: '512KiB', '14GiB', '16GB'",
        ) from error


@dataclasses.dataclass(frozen=True)
class _Step:
    """A loss, what it is called with, and a policy on it."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    policy: Any
    at: str | None
    argnums: Argnums

    @property
    def loss(self) -> Callable[..., Any]:
        if self.policy is None:
            return self.fn
        return _remat.policy(self.policy, at=self.at)(self.fn)

    def measured(self, chip: Target, donated: int | Sequence[int], *, call: str) -> Memory:
        program = _target.compile_program(
            *(self.loss, self.args, chip),
            argnums=self.argnums,
            donate_argnums=donated,
            call=call,
        )
        return program.memory

    def saved(self) -> list[Residual] | None:
        return _baseline.saved_values(self.loss, self.args, self.argnums, call="assert_fits")

    def recomputing(self, at: str) -> _Step:
        """The same step with every value inside these modules recomputed."""
        return dataclasses.replace(self, fn=self.loss, policy="nothing", at=at)


_LONGEST = 8  # lines of one message


def _too_large(call: str, step: _Step, memory: Memory, limit: int, of: str) -> CheckError:
    needs = "more than it has" if memory.peak_bytes is None else format_bytes(memory.peak_bytes)
    over = max(0, (memory.peak_bytes or 0) - limit)
    excess = f", {format_bytes(over)} too much" if over else ""
    lines = [f"`{call}`: needs {needs}; {of} has {format_bytes(limit)}{excess}", _parts(memory)]
    values = step.saved()
    if values:
        lines += _largest(values)
    elif values is None:
        lines.append(
            "argnums=None takes the function as a whole step: give the loss instead, to see what "
            "its backward pass keeps"
        )
    return CheckError("\n".join(lines), hint=_advice(step, memory, values or []))


def _parts(memory: Memory) -> str:
    parts = {
        "arguments": memory.argument_bytes,
        "outputs": memory.output_bytes,
        "aliased": -(memory.alias_bytes or 0),
        "temporaries": memory.temp_bytes or 0,
    }
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    verb = "refused by" if memory.temp_bytes is None else "compiled for"
    return f"{verb} {memory.target}: {sizes}"


def _largest(values: Sequence[Residual]) -> list[str]:
    """Return the lines for the modules that keep most."""
    groups: dict[str, dict[str, list[Residual]]] = {}
    for r in values:
        if r.memory == "device":
            kinds = groups.setdefault(_report.roll_up(r.module), {})
            kinds.setdefault(f"{r.primitive} {r.dtype}{list(r.shape)}", []).append(r)
    sizes = {m: sum(r.bytes for rs in kinds.values() for r in rs) for m, kinds in groups.items()}
    lines = [f"kept for the backward pass: {format_bytes(sum(sizes.values()))}, most of it by"]
    for module in sorted(sizes, key=lambda m: -sizes[m])[:_LONGEST]:
        kinds = sorted(groups[module].items(), key=lambda k: -sum(r.bytes for r in k[1]))
        what, found = kinds[0]
        count = f"{len(found)} × " if len(found) > 1 else ""
        more = f" and {len(kinds) - 1} more kinds" if len(kinds) > 1 else ""
        size = format_bytes(sizes[module])
        lines.append(f"  {size:>9}  {module or '(no module)'}: {count}{what}{more}")
    if len(sizes) > _LONGEST:
        lines.append(f"  … and {len(sizes) - _LONGEST} more modules")
    return lines


def _advice(step: _Step, memory: Memory, values: Sequence[Residual]) -> str:
    """Say what to do: the policy that keeps least, if tracing it shows that it helps."""
    kept = _on_device(values)
    tried = [(_kept_recomputing(step, at), at) for at in _block_patterns(values)]
    best = min(tried, default=(kept, ""))
    if best[0] < kept:
        return (
            f"recompute what these modules keep: policy='nothing', at={best[1]!r} keeps "
            f"{format_bytes(best[0])} instead of {format_bytes(kept)} (traced, not compiled); "
            "`remat_kit.inspect` shows each value"
        )
    if kept and not tried:
        return (
            "cut what repeats into regions: decorate each with remat_kit.policy('nothing'), or "
            "name them (Flax modules, jax.named_scope) and give policy= and at=; "
            "`remat_kit.inspect` shows what is kept"
        )
    fixed = memory.argument_bytes + memory.output_bytes - (memory.alias_bytes or 0)
    return (
        f"arguments and results take {format_bytes(fixed)}: donate what the step replaces "
        "(donate_argnums=), make the batch smaller or shard it; `remat_kit.inspect` shows what is "
        "kept"
    )


def _on_device(values: Sequence[Residual]) -> int:
    return sum(r.bytes for r in values if r.memory == "device")


def _kept_recomputing(step: _Step, at: str) -> float:
    try:
        return _on_device(step.recomputing(at).saved() or [])
    except RematKitError:  # a region there is not possible; then it is no advice either
        return math.inf


def _block_patterns(values: Sequence[Residual]) -> list[str]:
    """Return the repeated modules that keep values, as patterns, outermost first, most first.

    >>> paths = "Net/block_0/up", "Net/block_1/up", "Net/head"
    >>> _block_patterns([Residual((2,), "float32", 8, p, "", "exp", (), "") for p in paths])
    ['Net/block_*']
    """
    sizes: dict[str, int] = {}
    for r in values:
        parts = _report.roll_up(r.module).split("/")
        ends = [i for i, part in enumerate(parts) if "*" in part]
        if ends:
            pattern = "/".join(parts[: ends[0] + 1])
            sizes[pattern] = sizes.get(pattern, 0) + r.bytes
    return sorted(sizes, key=lambda p: -sizes[p])[:3]


# -- equivalence --------------------------------------------------------------------------------


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

    >>> import jax, jax.numpy as jnp, remat_kit
    >>> def loss(w, x):
    ...     return jnp.sum(jnp.sin(jnp.tanh(x @ w)))
    >>> w = x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    >>> assert_equivalent(loss, remat_kit.policy("dots")(loss), w, x)
    >>> assert_equivalent(loss, lambda w, x: 1.01 * loss(w, x), w, x)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    remat_kit._errors.CheckError: `assert_equivalent(f, g, ...)`: loss differs by ...

    A difference is measured in units of the rounding of the coarsest floating-point type that the
    two programs compute in (``eps`` of bfloat16 for a model in bfloat16 with parameters in
    float32; that of a TPU's or a GPU's default matrix product where there is one), relative to the
    largest element of the leaf: a gradient is a sum, and a compiler that fuses two programs
    differently rounds the terms of a small element as it does those of a large one. One such unit
    of the largest gradient of all always passes, for a leaf whose gradient is zero in exact
    arithmetic, like the bias of attention's keys, holds nothing but rounding.

    Args:
        f: called as ``f(*args)``; gives a real scalar, or a pair of one and anything.
        g: the same; its results are compared with those of ``f``.
        args: arrays, or `jax.ShapeDtypeStruct` for seeded random values: floating-point values
            that shrink with the fan-in, zeros and ones for integers, keys.
        argnums: what to differentiate.
        ulps: the largest difference that passes, in the units above.
        exact: compare bit by bit instead.
        jit: whether to run each gradient as one compiled program, as a training step does. False
            runs it operation by operation, so that no fusion stands between the two; a loop is one
            operation.
        seed: of the random values.

    Raises:
        CheckError: an `AssertionError`: the results differ; it names the worst leaf.
        UserError: the random values give nothing to compare, or ``ulps`` is negative.
        NotDifferentiableError: a loss has no gradient there.

    NaN equals NaN, infinities equal themselves, integers have to be equal.
    """
    __tracebackhide__ = True
    call = "assert_equivalent"
    if not ulps >= 0:
        raise UserError(
            f"`{call}(..., ulps={ulps!r})`: a tolerance is 0 or more", hint="leave it at 4"
        )
    structs = abstract(args, call=call)
    programs = [gradient_program(fn, structs, argnums, call=call) for fn in (f, g)]
    values = _seeded(args, seed)
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


@dataclasses.dataclass(frozen=True)
class _Difference:
    """Two leaves that are not the same; ``excess`` is in multiples of what would pass."""

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
    """What two gradient programs give: paths and leaves, in one order."""

    paths: tuple[str, ...]
    left: tuple[np.ndarray, ...]
    right: tuple[np.ndarray, ...]

    @classmethod
    def of(
        cls, programs: Sequence[Callable[..., Any]], values: tuple[Any, ...], *, jit: bool
    ) -> _Pair:
        runs = [_labelled(p, values) for p in programs]
        shapes = [jax.eval_shape(run, *values) for run in runs]
        _check_structure(*shapes)
        results = [(jax.jit(run) if jit else _stepwise(run))(*values) for run in runs]
        leaves, _ = jax.tree_util.tree_flatten_with_path(results[0])
        right = jax.tree.leaves(results[1])
        return cls(
            tuple(_path_text(path) for path, _ in leaves),
            tuple(_plain(leaf) for _, leaf in leaves),
            tuple(map(_plain, right)),
        )

    def says_something(self) -> bool:
        gradients = [a for p, a in zip(self.paths, self.left) if p.startswith("gradient")]
        return any(bool(np.any(np.isfinite(a) & (a != 0))) for a in gradients)

    def differences(self, unit: float, ulps: float) -> list[_Difference]:
        """Return the leaves that differ by more than what passes, the worst first."""
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
    """Return a function that traces ``run`` and evaluates one operation after the other."""

    def evaluated(*values: Any) -> Any:
        closed, shapes = jax.make_jaxpr(run, return_shape=True)(*values)
        flat = _graph.evaluate(_graph.Program.of(closed), jax.tree.leaves(values))
        return jax.tree.unflatten(jax.tree.structure(shapes), flat)

    return evaluated


def _plain(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
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
    """Compare two leaves; ``unit`` 0 asks for equal bits."""
    is_float = jnp.issubdtype(a.dtype, jnp.inexact)
    same = _same_bits(a, b) if unit == 0 or not is_float else _same_values(a, b)
    if same.all():
        return None
    # Half precision has no room for differences, nor numpy for its arithmetic.
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
    return "\n".join([*lines, *(f"  {d.path} {d.how}" for d in found[1:_LONGEST])])


_LIKE_ROUNDING = 64  # units below which a difference looks like another order of the same sums


def _why(
    programs: Sequence[Callable[..., Any]],
    values: tuple[Any, ...],
    pair: _Pair,
    rounding: float,
    exact: bool,
    jit: bool,
) -> str:
    """Say which of the two faults it is: another function, or another order of rounding."""
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
            "the difference is of the size of rounding: if the two are meant to do the same "
            f"operations (the body of a loop is fused whatever jit= says), {looser}"
        )
    return (
        "the two compute something else, also where nothing is fused: look at what depends on "
        "random keys, on state or on the policy"
    )


# .. rounding

_BACKEND_PRODUCTS = {"tpu": 2.0**-7, "gpu": 2.0**-10, "cuda": 2.0**-10}  # bfloat16, tensorfloat32
_PRODUCTS = ("dot_general", "conv_general_dilated")


def _rounding(programs: Sequence[Callable[..., Any]], structs: Sequence[Any]) -> float:
    """Return the coarsest ``eps`` that two programs compute with."""
    found = [float(jnp.finfo(jnp.float64).eps)]
    product = _BACKEND_PRODUCTS.get(jax.default_backend(), 0.0)
    for program in programs:
        for value in _graph.values(
            _graph.Program.of(jax.make_jaxpr(program)(*structs)), full=False
        ):
            dtype = jnp.dtype(value.dtype) if _is_float(value.dtype) else None
            if dtype is not None:
                found.append(float(jnp.finfo(dtype).eps))
                if value.primitive in _PRODUCTS and dtype == jnp.float32:
                    found.append(product)
    return max(found)


def _is_float(name: str) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(name), jnp.inexact))
    except TypeError:  # keys and tokens
        return False


# .. values


def _seeded(args: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """Return the arguments with every `jax.ShapeDtypeStruct` replaced by random values.

    >>> w = jax.ShapeDtypeStruct((2,), jnp.float32)
    >>> bool((_seeded((w,), 0)[0] == _seeded((w,), 0)[0]).all())
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
    # As initial weights are: a deep product of them neither overflows nor drowns.
    spread = max(1, math.prod(leaf.shape[:-1])) ** -0.5
    return jnp.asarray(spread * random.standard_normal(leaf.shape), leaf.dtype)
