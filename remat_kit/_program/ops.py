"""How many bytes and FLOPs does one operation cost, and does a compiler fuse it?

FLOPs of a matrix product of shapes (m, k) and (k, n) are ``2 * m * k * n``; an elementwise
operation counts one for each element of its result. An operation of unknown cost, such as a custom
call without an estimate, counts as zero, and `unknown_costs` lists it.
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
    """Tell whether the output of an equation shares the memory of its input, as a reshape does."""
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


def is_threefry(eqn: Any) -> bool:
    """Tell whether an equation draws 32 random bits for each element from a Threefry key.

    Threefry returns two words for each counter, and `jax.random` combines them to one. Without
    ``jax_threefry_partitionable`` each of them is an element of its own.
    """
    return (
        eqn.primitive.name == "random_bits"
        and str(eqn.invars[0].aval.dtype) == "key<fry>"
        and eqn.params["bit_width"] == 32
        and getattr(jax.config, "jax_threefry_partitionable", True)
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
    """Tell whether compilers fuse an operation into the operations that read its result."""
    name = _jax.name_of(eqn.primitive)
    if name in _HEAVY or name in _program.SCATTERS or reduces(eqn):
        return False
    if is_kernel(eqn) or collective_of(eqn) is not None:
        return False
    if _program.checkpoint_name_of(eqn) is not None:
        return True
    if _jax.hi_primitive(eqn) is not None:
        return False
    return all(is_fusible(e) for b in _program.bodies(eqn) for e in getattr(b.jaxpr, "eqns", ()))


_COLLECTIVES = {
    "psum": "all-reduce",
    "psum2": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
}


def collective_of(eqn: Any) -> tuple[str, tuple[str, ...]] | None:
    """Return XLA's name of a collective, and the axes of the mesh that it runs over, or None.

    Only the body of a `shard_map` has such equations. The names are those of 0.10.2 and 0.12.
    """
    kind = _COLLECTIVES.get(eqn.primitive.name)
    if kind is None:
        return None
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    return kind, tuple(a for a in axes if isinstance(a, str))


def is_single_gather(eqn: Any) -> bool:
    """Tell whether a gather reads single elements.

    Its derivative is then a selection, which compilers fuse, instead of a scatter.
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
            "reshard",
            "stack",
            "unstack",
            "tile",
        ),
        # inside kernels
        *("get", "swap", "masked_load", "masked_swap", "program_id", "num_programs"),
    }
)


def shard_bytes(struct: Any) -> int:
    """Return the bytes of an array on one device, of which its sharding may give it a part."""
    sharding = getattr(struct, "sharding", None)
    if sharding is None:
        return nbytes(struct)
    return nbytes(jax.ShapeDtypeStruct(sharding.shard_shape(struct.shape), struct.dtype))


def flops(eqn: Any) -> float:
    """Return the number of floating-point operations of an equation, or 0 if it is unknown.

    * A matrix product or convolution counts each multiplication and each addition as one operation,
      as XLA and the literature do.
    * An elementwise operation counts one operation for each element of its output, a reduction one
      for each element of its input, and data movement none.
    * A loop counts its body times its length. A conditional counts its most expensive branch, since
      the branch that runs is unknown before the step runs.
    * A kernel counts its own estimate, or without one its body times the size of its grid.
    * The equations that `unknown_costs` finds count nothing.
    """
    name, params = _jax.name_of(eqn.primitive), eqn.params
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


# .. kernels and library calls: operations without a jaxpr of JAX's own primitives inside

# JAX knows only the shapes of these. The number of iterations of a while loop depends on its data.
_OPAQUE = frozenset(
    {
        *("ffi_call", "custom_call", "tpu_custom_call", "triton_kernel_call", "cudnn_fusion"),
        *("pure_callback", "io_callback", "call_exported", "mpmd_map", "while"),
    }
)


def unknown_costs(eqn: Any) -> tuple[Any, ...]:
    """Return the equations of unknown cost: the given equation, or equations inside of it."""
    if _is_opaque(eqn):
        return (eqn,)
    inner = [body.jaxpr for body in bodies(eqn)]
    if eqn.primitive.name == "custom_linear_solve":
        inner = [eqn.params["jaxprs"].solve]
    return tuple(each for body in inner for e in body.eqns for each in unknown_costs(e))


def is_kernel(eqn: Any) -> bool:
    """Tell whether an equation calls a kernel or a library, into which compilers fuse nothing."""
    name = eqn.primitive.name
    return name == "pallas_call" or _formula(name) is not None or _is_opaque(eqn)


def _is_opaque(eqn: Any) -> bool:
    primitive, name = eqn.primitive, _jax.name_of(eqn.primitive)
    if name in _OPAQUE:
        return True
    if primitive.name == "pallas_call":
        return _kernel_flops(eqn) is None
    if primitive.name == "name" or _jax.hi_primitive(eqn) is not None:
        return False
    return not _jax.is_own_primitive(name) and not bodies(eqn)


def _kernel_flops(eqn: Any) -> float | None:
    """Return the number of operations of a Pallas kernel, or None if it depends on data.

    It is the estimate of the kernel itself, or without one the operations of its body times the
    size of its grid. It is unknown if the grid, or a loop in the body, depends on data.
    """
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return float(estimate.flops + estimate.transcendentals)
    grid = eqn.params["grid_mapping"].grid
    body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
    if not all(isinstance(n, int) for n in grid):
        return None
    if any(unknown_costs(e) for e in body.eqns):
        return None
    return float(math.prod(grid)) * sum(flops(e) for e in body.eqns)


def _attention(times: float) -> Callable[[Any], float]:
    """Return a function that counts cuDNN's attention as ``times`` products of query and key."""

    def count(eqn: Any) -> float:
        query, key = (eqn.invars[i].aval.shape for i in (0, 1))
        layout = getattr(eqn.params.get("layout", 0), "value", eqn.params.get("layout", 0))
        # Layout 0 is batch, sequence, heads, depth; the other is batch, heads, sequence, depth.
        sequence = -3 if layout == 0 else -2
        return times * 2 * math.prod(query) * key[sequence]

    return count


def _of_matrices(count: Callable[[int, int], float]) -> Callable[[Any], float]:
    """Return a function that counts the factorisation of each (m, n) matrix of the operand."""

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


# The factorisations are counted as in Golub and Van Loan, "Matrix computations", 4th edition.
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
    # A dilated input (as in the gradient of a strided convolution) consists mostly of zeros, and
    # compilers avoid multiplying by them.
    return taps / math.prod(eqn.params["lhs_dilation"] or (1,))


def moved_bytes(eqn: Any) -> float:
    """Return the number of bytes that an equation reads and writes."""
    return float(sum(nbytes(v.aval) for v in (*eqn.invars, *eqn.outvars)))
