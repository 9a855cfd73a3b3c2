"""What one operation costs and what kind it is: bytes, FLOPs, view, reduction, kernel.

FLOPs of a matrix product of shapes (m, k) and (k, n) are ``2 * m * k * n``; an elementwise
operation counts one for each element of its result. An operation whose cost nobody knows, such as a
custom call without an estimate, is listed by `unknown_costs` rather than counted as zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from remat_kit import _jax
from remat_kit._program import program as _program
from remat_kit._program.program import REDUCTIONS, SCANNED, SCATTERS, bodies

# -- one operation --------------------------------------------------------------------------------


def is_view(eqn: Any) -> bool:
    """Tell whether an equation's output is its input in another form, with no bytes of its own."""
    name = eqn.primitive.name
    if name in ("reshape", "squeeze", "expand_dims", "transpose", "copy", "copy_p"):
        return len(eqn.outvars) == 1
    return _program.is_identity(eqn)


_HEAVY = frozenset(
    {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "scan", "while"}
    | {"cond", "sort", "gather", "custom_vjp_call", "pallas_call", "fft", "top_k", "shard_map"}
    | {
        "random_bits",
        "threefry2x32",
        "rng_bit_generator",
        "rng_uniform",
        "custom_call",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
    }
    | {"cumlogsumexp", "cholesky", "triangular_solve", "lu", "qr", "eigh", "svd", "argsort"}
    | {"all_gather", "all_to_all", "psum", "ppermute", "reduce_scatter", "approx_top_k"}
    | {"remat2", "checkpoint", "custom_lin", "ffi_call", "select_and_scatter"}
    | {"select_and_scatter_add", "select_and_gather_add"}
)


def is_rounding(eqn: Any) -> bool:
    """Tell whether an equation is a product whose float32 operands a TPU rounds to bfloat16."""
    if eqn.primitive.name != "dot_general":
        return False
    precision = eqn.params["precision"]
    given = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, jax.lax.Precision.DEFAULT) for p in given)


def reduces(eqn: Any) -> bool:
    """Tell whether an operation is a reduction: elementwise operations fuse into it."""
    return eqn.primitive.name != "reduce" and eqn.primitive.name in _program.REDUCTIONS


def is_fusible(eqn: Any) -> bool:
    """Tell whether compilers fuse an operation into what reads its result."""
    name = eqn.primitive.name
    if name in _HEAVY or name in _program.SCATTERS or reduces(eqn):
        return False
    if is_kernel(eqn):
        return False
    if _program.checkpoint_name_of(eqn) is not None:
        return True
    if _jax.hi_primitive(eqn) is not None:
        return False
    return all(is_fusible(e) for b in _program.bodies(eqn) for e in getattr(b.jaxpr, "eqns", ()))


def is_single_gather(eqn: Any) -> bool:
    """Tell whether an equation picks single numbers: its derivative is no scatter but a selection,
    which fuses.
    """
    return eqn.primitive.name == "gather" and all(n == 1 for n in eqn.params["slice_sizes"])


def nbytes(aval: Any) -> int:
    """Return the bytes of an array of this abstract value (0 for tokens and keys without size)."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return 0
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        base = math.prod(jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).shape)
        return int(math.prod(shape)) * base * 4
    if dtype == jax.dtypes.float0:
        return 0
    bits = _bits(dtype)
    return (int(math.prod(shape)) * bits + 7) // 8


@functools.cache
def _bits(dtype: Any) -> int:
    if np.dtype(dtype).kind in "V" or "int4" in str(dtype) or "int2" in str(dtype):
        info = jax.numpy.iinfo if "int" in str(dtype) else jax.numpy.finfo
        return int(info(dtype).bits)
    return np.dtype(dtype).itemsize * 8


_FREE = frozenset(
    {
        *("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose", "rev", "split"),
        *("copy", "copy_p", "name", "convert_element_type", "bitcast_convert_type", "iota"),
        *("slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad", "gather"),
        *("stop_gradient", "optimization_barrier", "reduce_precision", "device_put", "select_n"),
        *(
            "random_wrap",
            "random_unwrap",
            "pvary",
            "sharding_constraint",
            "stack",
            "unstack",
            "tile",
        ),
        # inside kernels
        *("get", "swap", "masked_load", "masked_swap", "program_id", "num_programs"),
    }
)


def flops(eqn: Any) -> float:
    """Return the floating-point operations of an equation, 0 where nobody knows them.

    A matrix product or convolution counts a multiply and an add each as one operation, as XLA
    and the literature do; an elementwise operation one per output element, a reduction one per
    input element; data movement none; a loop its body times its length; a conditional its most
    expensive branch, since which one runs is not known before the step runs. A kernel counts what
    it says of itself, else its body times its grid; what `unknown_costs` finds counts nothing.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (lhs_contract, _), _ = params["dimension_numbers"]
        k = math.prod(eqn.invars[0].aval.shape[d] for d in lhs_contract)
        return 2.0 * k * math.prod(eqn.outvars[0].aval.shape)
    if name == "conv_general_dilated":
        return _conv_flops(eqn)
    if name == "pallas_call":
        return _kernel_flops(eqn) or 0.0
    formula = _formula(name)
    if formula is not None:
        return float(formula(eqn))
    inner = bodies(eqn)
    if inner:
        costs = [b.times * sum(flops(e) for e in b.jaxpr.eqns) for b in inner]
        return max(costs) if name == "cond" else sum(costs)
    if name in _FREE or _is_opaque(eqn):
        return 0.0
    if name in SCATTERS:
        return 0.0 if name == "scatter" else float(_size(eqn.invars[2]))
    if name in REDUCTIONS or name in SCANNED:
        return float(sum(_size(v) for v in eqn.invars))
    return float(sum(_size(v) for v in eqn.outvars))


# .. kernels and library calls: operations whose inside is no jaxpr of JAX's own

# What runs code that JAX has only the shapes of. A while loop runs as often as its data say.
_OPAQUE = frozenset(
    {
        *("ffi_call", "custom_call", "tpu_custom_call", "triton_kernel_call", "cudnn_fusion"),
        *("pure_callback", "io_callback", "call_exported", "mpmd_map", "while"),
    }
)


def unknown_costs(eqn: Any) -> tuple[Any, ...]:
    """Return the equations that an equation is or holds whose operations nobody can count."""
    if _is_opaque(eqn):
        return (eqn,)
    inner = [body.jaxpr for body in bodies(eqn)]
    if eqn.primitive.name == "custom_linear_solve":
        inner = [eqn.params["jaxprs"].solve]
    return tuple(found for body in inner for e in body.eqns for found in unknown_costs(e))


def is_kernel(eqn: Any) -> bool:
    """Tell whether an equation is one call of code that no compiler fuses anything into."""
    name = eqn.primitive.name
    return name == "pallas_call" or _formula(name) is not None or _is_opaque(eqn)


def _is_opaque(eqn: Any) -> bool:
    primitive = eqn.primitive
    if primitive.name in _OPAQUE:
        return True
    if primitive.name == "pallas_call":
        return _kernel_flops(eqn) is None
    if primitive.name == "name" or _jax.hi_primitive(eqn) is not None:
        return False
    return not _jax.is_own_primitive(primitive.name) and not bodies(eqn)


def _kernel_flops(eqn: Any) -> float | None:
    """Return the operations of a Pallas kernel: by its estimate, else of its body for each place
    of its grid; None where the grid or a loop inside depends on data.
    """
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return float(estimate.flops + estimate.transcendentals)
    grid = eqn.params["grid_mapping"].grid
    body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
    if not all(isinstance(n, int) for n in grid):
        return None
    if any(found for e in body.eqns for found in unknown_costs(e)):
        return None
    return float(math.prod(grid)) * sum(flops(e) for e in body.eqns)


def _attention(times: float) -> Callable[[Any], float]:
    """Return the operations of cuDNN's attention: so many products of queries with keys."""

    def count(eqn: Any) -> float:
        query, key = (eqn.invars[i].aval.shape for i in (0, 1))
        layout = getattr(eqn.params.get("layout", 0), "value", eqn.params.get("layout", 0))
        sequence = -3 if layout == 0 else -2  # batch, sequence, heads, depth; or heads before it
        return times * 2 * math.prod(query) * key[sequence]

    return count


def _of_matrices(count: Callable[[int, int], float]) -> Callable[[Any], float]:
    """Return the operations of a factorisation of each (m, n) matrix of the first operand."""

    def of_all(eqn: Any) -> float:
        *batch, m, n = eqn.invars[0].aval.shape
        return math.prod(batch) * count(m, n)

    return of_all


def _triangular_solve(eqn: Any) -> float:
    return float(eqn.invars[0].aval.shape[-1] * _size(eqn.outvars[0]))


def _fft(eqn: Any) -> float:
    points = math.prod(eqn.params["fft_lengths"])
    largest = max(_size(eqn.invars[0]), _size(eqn.outvars[0]))
    return 5.0 * largest * math.log2(max(2, points))


def _sort(eqn: Any) -> float:
    length = eqn.invars[0].aval.shape[eqn.params["dimension"]]
    return _size(eqn.invars[0]) * math.log2(max(2, length))


def _ragged_dot(eqn: Any) -> float:
    lhs, out = eqn.invars[0], eqn.outvars[0]
    (contracted, _), _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    k = math.prod(lhs.aval.shape[d] for d in contracted)
    return 2.0 * k * math.prod(out.aval.shape)


def _scaled_matmul(eqn: Any) -> float:
    return 2.0 * eqn.invars[0].aval.shape[-1] * _size(eqn.outvars[0])


def _linear_solve(eqn: Any) -> float:
    return sum(flops(e) for e in eqn.params["jaxprs"].solve.eqns)


# Golub and Van Loan, "Matrix computations", 4th edition, for the factorisations.
_FORMULAS: dict[str, Callable[[Any], float]] = {
    "dot_product_attention_fwd": _attention(2),
    "dot_product_attention_bwd": _attention(5),
    "dot_product_attention_fp8_fwd": _attention(2),
    "dot_product_attention_fp8_bwd": _attention(5),
    "scaled_matmul": _scaled_matmul,
    "ragged_dot_general": _ragged_dot,
    "cholesky": _of_matrices(lambda m, n: n**3 / 3),
    "lu": _of_matrices(lambda m, n: m * n * min(m, n) - min(m, n) ** 3 / 3),
    "qr": _of_matrices(lambda m, n: 2 * m * n * min(m, n)),
    "geqrf": _of_matrices(lambda m, n: 2 * m * n * min(m, n)),
    "householder_product": _of_matrices(lambda m, n: 2 * m * n * min(m, n)),
    "eigh": _of_matrices(lambda m, n: 9 * n**3),
    "eig": _of_matrices(lambda m, n: 25 * n**3),
    "schur": _of_matrices(lambda m, n: 25 * n**3),
    "hessenberg": _of_matrices(lambda m, n: 10 * n**3 / 3),
    "tridiagonal": _of_matrices(lambda m, n: 4 * n**3 / 3),
    "svd": _of_matrices(lambda m, n: 21 * m * n * min(m, n)),
    "triangular_solve": _triangular_solve,
    "custom_linear_solve": _linear_solve,
    "fft": _fft,
    "sort": _sort,
}


def _formula(name: str) -> Callable[[Any], float] | None:
    return _FORMULAS.get(name.removesuffix("_wrapper"))


def _size(atom: Any) -> int:
    return int(math.prod(getattr(atom.aval, "shape", ())))


def _conv_flops(eqn: Any) -> float:
    spec = eqn.params["dimension_numbers"]
    kernel = eqn.invars[1].aval.shape
    window = math.prod(kernel[d] for d in spec.rhs_spec[2:])
    out = math.prod(eqn.outvars[0].aval.shape)
    taps = 2.0 * out * kernel[spec.rhs_spec[1]] * window
    # A dilated input (the gradient of a strided convolution) is mostly zeros, which no backend
    # multiplies when it can help it.
    return taps / math.prod(eqn.params["lhs_dilation"] or (1,))


def moved_bytes(eqn: Any) -> float:
    """Return the bytes an equation reads and writes."""
    return float(sum(nbytes(v.aval) for v in (*eqn.invars, *eqn.outvars)))
