"""A small program for every primitive of JAX, by the primitive's name.

A program takes a float32 matrix with entries between 0.1 and 0.9 and gives arrays of any type.
Where a primitive has no derivative the program shields it with `stop_gradient`, as a user must.
`WITHOUT` lists the primitives that no program is made for, with the reason.
"""

import functools

import jax
import jax.extend.core as jec
import jax.lax as lax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback, xla_metadata
from jax.sharding import NamedSharding, PartitionSpec

SIZE = 4
X = np.linspace(0.1, 0.9, SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)

PROGRAMS = {}


def words(text):
    return text.split()


def program(*names):
    """Register a function as the program of these primitives."""

    def register(function):
        PROGRAMS.update(dict.fromkeys(names, function))
        return function

    return register


def of(name):
    """Return the public function of `jax.lax` that a primitive is called through."""
    return lambda *args, **params: getattr(lax, name)(*args, **params)


def bound(name):
    """Return a function that binds one of JAX's published primitives."""
    return lambda *args, **params: getattr(jec.primitives, f"{name}_p").bind(*args, **params)


def integers(x):
    return jnp.round(x * 10).astype(jnp.int32)


def fixed(function):
    """The same function of a value that is not differentiated."""
    return lambda x: function(lax.stop_gradient(x))


# -- elementwise ----------------------------------------------------------------------------------

for _name in words(
    "abs asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc "
    "exp exp2 expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt "
    "square tan tanh"
):
    PROGRAMS[_name] = of(_name)
PROGRAMS["one_minus_square"] = bound("one_minus_square")
PROGRAMS["log2"] = jnp.log2
PROGRAMS["acos"] = lambda x: lax.acos(x)
PROGRAMS["acosh"] = lambda x: lax.acosh(x + 1)
PROGRAMS["integer_pow"] = lambda x: lax.integer_pow(x, 3)
for _name in words("add atan2 div max min mul pow rem sub"):
    PROGRAMS[_name] = functools.partial(lambda f, x: f(x + 1, 2 - x), of(_name))
for _name in words("eq ge gt le lt ne"):
    PROGRAMS[_name] = functools.partial(lambda f, x: f(x, x.T), of(_name))
for _name in words("eq_to le_to lt_to"):
    PROGRAMS[_name] = functools.partial(lambda f, x: f(x, x.T), bound(_name))
PROGRAMS["zeta"] = fixed(lambda x: lax.zeta(x + 1, x))
PROGRAMS["nextafter"] = fixed(lambda x: lax.nextafter(x, x.T))
PROGRAMS["igamma"] = lambda x: lax.igamma(jnp.full_like(x, 2.0), x)
PROGRAMS["igammac"] = lambda x: lax.igammac(jnp.full_like(x, 2.0), x)
PROGRAMS["igamma_grad_a"] = fixed(lambda x: lax.igamma_grad_a(x + 1, x))
PROGRAMS["polygamma"] = lambda x: jsp.special.polygamma(1, x)
PROGRAMS["regularized_incomplete_beta"] = lambda x: lax.betainc(
    jnp.full_like(x, 2.0), jnp.full_like(x, 3.0), x
)
PROGRAMS["polynomial"] = lambda x: bound("polynomial")(x, x + 1, x + 2)
PROGRAMS["clamp"] = lambda x: lax.clamp(0.3, x, 0.7)
PROGRAMS["select_n"] = lambda x: lax.select(x > 0.5, x, x * 2)
PROGRAMS["complex"] = lambda x: lax.complex(x, x.T) ** 2
PROGRAMS["real"] = lambda x: lax.real(jnp.exp(lax.complex(x, x.T)))
PROGRAMS["imag"] = lambda x: lax.imag(jnp.exp(lax.complex(x, x.T)))
PROGRAMS["conj"] = lambda x: lax.conj(jnp.exp(lax.complex(x, x.T)))
PROGRAMS["reduce_precision"] = lambda x: lax.reduce_precision(x, 5, 10)
PROGRAMS["convert_element_type"] = lambda x: x.astype(jnp.bfloat16) * 2
PROGRAMS["bitcast_convert_type"] = fixed(lambda x: lax.bitcast_convert_type(x, jnp.int32) % 7)
for _name in words("shift_left shift_right_arithmetic shift_right_logical"):
    PROGRAMS[_name] = functools.partial(lambda f, x: f(integers(x), integers(x) % 3), of(_name))
PROGRAMS["and"] = lambda x: integers(x) & 3
PROGRAMS["or"] = lambda x: integers(x) | 3
PROGRAMS["xor"] = lambda x: integers(x) ^ 3
PROGRAMS["not"] = lambda x: ~integers(x)
PROGRAMS["mulhi"] = lambda x: lax.mulhi(integers(x), integers(x) + 2**28)
PROGRAMS["population_count"] = lambda x: lax.population_count(integers(x))
PROGRAMS["clz"] = lambda x: lax.clz(integers(x))

# -- shapes and places ----------------------------------------------------------------------------

PROGRAMS["broadcast_in_dim"] = lambda x: lax.broadcast_in_dim(x, (2, 4, 4), (1, 2)) * 2
PROGRAMS["concatenate"] = lambda x: jnp.sin(jnp.concatenate([x, x.T]))
PROGRAMS["stack"] = lambda x: jnp.sin(jnp.stack([jnp.cos(x), x.T]))
PROGRAMS["unstack"] = lambda x: jnp.unstack(jnp.sin(x))
PROGRAMS["tile"] = lambda x: jnp.sin(lax.tile(x, (2, 1)))
PROGRAMS["copy"] = jnp.copy
PROGRAMS["iota"] = lambda x: x * lax.iota(jnp.float32, SIZE)[:, None]
PROGRAMS["pad"] = lambda x: lax.pad(x, 0.5, ((1, 0, 0), (0, 1, 1)))
PROGRAMS["reshape"] = lambda x: jnp.sin(x.reshape(2, 8))
PROGRAMS["rev"] = lambda x: lax.rev(x, (0,)) * x
PROGRAMS["slice"] = lambda x: jnp.sin(x[1:3, ::2])
PROGRAMS["split"] = lambda x: [jnp.sin(part) for part in lax.split(x, (1, 3))]
PROGRAMS["squeeze"] = lambda x: jnp.sin(lax.squeeze(x[:, :1], (1,)))
PROGRAMS["transpose"] = lambda x: jnp.sin(x.T) * x
PROGRAMS["dynamic_slice"] = lambda x: lax.dynamic_slice(x * x, (integers(x)[0, 0], 1), (2, 2))
PROGRAMS["dynamic_update_slice"] = lambda x: lax.dynamic_update_slice(
    x, jnp.sin(x[:2, :2]), (integers(x)[0, 0], 1)
)
PROGRAMS["gather"] = lambda x: (x * x)[integers(x)[0] % SIZE]
for _name, _method in {
    "scatter": "set",
    "scatter-add": "add",
    "scatter-min": "min",
    "scatter-max": "max",
    "scatter-sub": "subtract",
}.items():
    PROGRAMS[_name] = functools.partial(
        lambda method, x: getattr(x.at[jnp.array([2, 0])], method)(jnp.sin(x[:2])), _method
    )

PROGRAMS["scatter-mul"] = lambda x: x.at[jnp.array([2, 0])].multiply(
    jnp.sin(x[:2]), unique_indices=True
)

# -- reductions, sorts, windows -------------------------------------------------------------------

for _name in words("sum prod max min"):
    PROGRAMS[f"reduce_{_name}"] = functools.partial(lambda f, x: f(x, axis=1), getattr(jnp, _name))
for _name in words("and or xor"):
    PROGRAMS[f"reduce_{_name}"] = functools.partial(
        lambda f, x: f(integers(x), axes=(1,)), of(f"reduce_{_name}")
    )
PROGRAMS["reduce"] = lambda x: lax.reduce(x, 0.0, lambda a, b: a + b * b, (1,))
PROGRAMS["reduce"] = fixed(PROGRAMS["reduce"])
PROGRAMS["argmax"] = lambda x: jnp.argmax(x, axis=1)
PROGRAMS["argmin"] = lambda x: jnp.argmin(x, axis=1)
for _name in words("cumsum cumprod cummax cummin cumlogsumexp"):
    PROGRAMS[_name] = functools.partial(lambda f, x: f(x, axis=1), of(_name))
PROGRAMS["sort"] = lambda x: lax.sort((-x, x * x), num_keys=1)
PROGRAMS["top_k"] = lambda x: lax.top_k(x, 2)
PROGRAMS["approx_top_k"] = lambda x: lax.approx_max_k(x, 2)


def window(x, init, combine):
    return lax.reduce_window(x, init, combine, (2, 2), (1, 1), "VALID")


PROGRAMS["reduce_window_max"] = lambda x: window(x, -jnp.inf, lax.max)
PROGRAMS["reduce_window_min"] = lambda x: window(x, jnp.inf, lax.min)
PROGRAMS["reduce_window_sum"] = lambda x: window(x * x, 0.0, lax.add)
PROGRAMS["reduce_window"] = fixed(lambda x: window(x, 1.0, lambda a, b: a * b + a))


@program("select_and_scatter_add", "select_and_gather_add")
def pooled_backwards(x):
    """The derivatives of a maximum over windows, as JAX's own rules make them."""
    pooled = functools.partial(window, init=-jnp.inf, combine=lax.max)
    _, back = jax.vjp(pooled, x)
    return back(jnp.cos(pooled(x)))


# -- products, linear algebra, transforms ---------------------------------------------------------


def positive(x):
    return x @ x.T + SIZE * jnp.eye(SIZE)


def images(x):
    return x.reshape(1, SIZE, SIZE, 1)


PROGRAMS["dot_general"] = lambda x: x @ jnp.cos(x)
PROGRAMS["conv_general_dilated"] = lambda x: lax.conv_general_dilated(
    images(x),
    jnp.sin(x[:2, :2]).reshape(2, 2, 1, 1),
    (1, 1),
    "SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
)
PROGRAMS["ragged_dot_general"] = lambda x: lax.ragged_dot(
    x, jnp.stack([x, jnp.cos(x)]), jnp.array([1, 3], jnp.int32)
)
PROGRAMS["fft"] = lambda x: jnp.fft.fft(x)
PROGRAMS["cholesky"] = lambda x: jnp.linalg.cholesky(positive(x))
PROGRAMS["cholesky_update"] = fixed(
    lambda x: lax.linalg.cholesky_update(jnp.linalg.cholesky(positive(x)).T, x[0])
)
PROGRAMS["eig"] = fixed(lambda x: lax.linalg.eig(x)[0])
PROGRAMS["eigh"] = lambda x: jnp.linalg.eigh(positive(x))
PROGRAMS["hessenberg"] = fixed(lax.linalg.hessenberg)
PROGRAMS["householder_product"] = fixed(lambda x: lax.linalg.householder_product(x, x[0]))
PROGRAMS["lu"] = lambda x: lax.linalg.lu(positive(x))
PROGRAMS["lu_pivots_to_permutation"] = lambda x: lax.linalg.lu_pivots_to_permutation(
    integers(x)[0] % SIZE, SIZE
)
PROGRAMS["qr"] = lambda x: jnp.linalg.qr(positive(x))
PROGRAMS["geqrf"] = fixed(lambda x: jnp.linalg.qr(positive(x), mode="raw"))
PROGRAMS["ormqr"] = fixed(lambda x: lax.linalg.ormqr(x, x[0], jnp.eye(SIZE)))
PROGRAMS["schur"] = fixed(lax.linalg.schur)
PROGRAMS["svd"] = lambda x: jnp.linalg.svd(positive(x))[1]
PROGRAMS["symmetric_product"] = fixed(
    lambda x: lax.linalg.symmetric_product(x, positive(x), symmetrize_output=True)
)
PROGRAMS["triangular_solve"] = lambda x: jsp.linalg.solve_triangular(positive(x), x)
PROGRAMS["tridiagonal"] = fixed(lambda x: lax.linalg.tridiagonal(positive(x))[1])
PROGRAMS["tridiagonal_solve"] = lambda x: lax.linalg.tridiagonal_solve(x[0], 9 + x[1], x[2], x)
PROGRAMS["custom_linear_solve"] = lambda x: jnp.linalg.solve(positive(x), x)

# -- random numbers -------------------------------------------------------------------------------


def key(x, impl=None):
    return jax.random.fold_in(jax.random.key(7, impl=impl), integers(x)[0, 0])


PROGRAMS["random_seed"] = lambda x: jax.random.key_data(jax.random.key(integers(x)[0, 0]))
PROGRAMS["random_fold_in"] = lambda x: jax.random.key_data(key(x))
PROGRAMS["random_bits"] = lambda x: x * jax.random.uniform(key(x), x.shape)
PROGRAMS["random_split"] = lambda x: [jax.random.uniform(k) for k in jax.random.split(key(x))]
PROGRAMS["random_clone"] = lambda x: jax.random.uniform(jax.random.clone(key(x)))
PROGRAMS["random_gamma"] = lambda x: jax.random.gamma(key(x), x + 1)
PROGRAMS["random_unwrap"] = lambda x: jax.random.key_data(key(x))
PROGRAMS["random_wrap"] = lambda x: jax.random.uniform(
    jax.random.wrap_key_data(jax.random.key_data(key(x)))
)
PROGRAMS["threefry2x32"] = lambda x: bound("threefry2x32")(
    *(integers(x)[i].astype(jnp.uint32) for i in range(4))
)
PROGRAMS["rng_bit_generator"] = lambda x: lax.rng_bit_generator(
    integers(x)[0].astype(jnp.uint32), (3,)
)
# From an empty interval, since every call draws other numbers.
PROGRAMS["rng_uniform"] = fixed(lambda x: x * lax.rng_uniform(x[0, 0], x[0, 0], (SIZE,))[:, None])

# -- control flow, calls, rules -------------------------------------------------------------------

PROGRAMS["cond"] = lambda x: lax.cond(x[0, 0] > 0.5, jnp.sin, lambda x: x @ x, x)
PROGRAMS["scan"] = lambda x: lax.scan(lambda c, row: (c * row, jnp.sin(c)), x[0], x)
PROGRAMS["while"] = fixed(
    lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x))[1]
)
PROGRAMS["jit"] = lambda x: jax.jit(lambda y: jnp.sin(y) * y)(x)
PROGRAMS["remat2"] = lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.cos(y)))(x)
PROGRAMS["custom_jvp_call"] = jax.nn.relu
PROGRAMS["composite"] = fixed(lax.composite(lambda y: jnp.sin(y) * y, name="our.sine"))
PROGRAMS["name"] = lambda x: jnp.sin(checkpoint_name(jnp.cos(x), "cosine"))
PROGRAMS["optimization_barrier"] = lambda x: lax.optimization_barrier(jnp.sin(x))
PROGRAMS["stop_gradient"] = lambda x: x * lax.stop_gradient(jnp.sin(x))
PROGRAMS["empty"] = lambda x: x + 0 * lax.empty((SIZE, SIZE), jnp.float32)
PROGRAMS["scaled_dot"] = fixed(lambda x: lax.scaled_dot(x, x))
PROGRAMS["dce_sink"] = fixed(lambda x: (lax.dce_sink(x), jnp.sin(x))[1])
PROGRAMS["create_token"] = lambda x: (lax.create_token(), jnp.sin(x))[1]
PROGRAMS["after_all"] = lambda x: (lax.after_all(lax.create_token()), jnp.sin(x))[1]
PROGRAMS["device_put"] = lambda x: jax.device_put(jnp.sin(x), jax.devices()[0])
PROGRAMS["platform_index"] = lambda x: lax.platform_dependent(
    x, cpu=jnp.sin, tpu=jnp.cos, default=jnp.tanh
)


@program("custom_vjp_call")
def with_a_derivative_of_its_own(x):
    @jax.custom_vjp
    def sine(y):
        return jnp.sin(y)

    sine.defvjp(lambda y: (jnp.sin(y), jnp.cos(y)), lambda slope, ct: (ct * slope * 2,))
    return sine(x)


@program("custom_vmap_call")
def with_a_batching_of_its_own(x):
    @jax.custom_batching.custom_vmap
    def sine(y):
        return jnp.sin(y)

    @sine.def_vmap
    def batched(axis_size, in_batched, y):
        del axis_size
        return jnp.sin(y), in_batched[0]

    return sine(lax.stop_gradient(x))


@program("linear_call")
def linear(x):
    def forward(residual, y):
        return residual * y

    return jax.custom_derivatives.linear_call(forward, forward, jnp.cos(lax.stop_gradient(x)), x)


@program("remat_opt")
def optimized_remat(x):
    sine = jax.custom_vjp(lambda y: jnp.sin(y))
    sine.defvjp(
        lambda y: (jnp.sin(y), jnp.cos(y)), lambda slope, ct: (ct * slope,), optimize_remat=True
    )
    return sine(x)


@program("custom_partitioning")
def partitioned(x):
    from jax.experimental.custom_partitioning import custom_partitioning

    sine = custom_partitioning(lambda y: jnp.sin(y))
    sine.def_partition(
        partition=lambda mesh, args, result: (mesh, jnp.sin, result.sharding, ()),
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="i j -> i j",
    )
    return sine(lax.stop_gradient(x))


@program("call_exported")
def exported(x):
    struct = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    return jax.export.export(jax.jit(jnp.sin))(struct).call(lax.stop_gradient(x))


@program("pallas_call")
def kernel(x):
    from jax.experimental import pallas as pl

    def sine(read, write):
        write[...] = jnp.sin(read[...])

    call = pl.pallas_call(sine, jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32), interpret=True)
    return call(lax.stop_gradient(x))


# -- effects --------------------------------------------------------------------------------------

STRUCT = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)

PROGRAMS["pure_callback"] = fixed(
    lambda x: jax.pure_callback(np.sin, STRUCT, x, vmap_method="expand_dims")
)
PROGRAMS["io_callback"] = fixed(lambda x: io_callback(np.sin, STRUCT, x))


@program("debug_callback")
def watched(x):
    jax.debug.callback(lambda _: None, x)
    return jnp.sin(x)


@program("debug_print")
def printed(x):
    jax.debug.print("", ordered=False)
    return jnp.sin(x)


@program("new_ref", "get", "swap", "freeze")
def mutable(x):
    ref = jax.new_ref(lax.stop_gradient(x))
    ref[0] = jnp.sin(ref[1])
    return jax.freeze(ref)


@program("addupdate")
def added(x):
    ref = jax.new_ref(lax.stop_gradient(x))
    jax.ref.addupdate(ref, ..., x * 0 + 2.0)
    return jax.freeze(ref)


@program("empty_ref", "free_ref")
def written(x):
    def double(x):
        ref = jax.empty_ref(STRUCT)
        ref[...] = x
        found = ref[...] * 2
        jax.free_ref(ref)
        return found

    return double(lax.stop_gradient(x))


# -- places, shardings, collectives over a mesh of one device -------------------------------------


def mesh():
    return jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


ROWS = PartitionSpec("data")


def sharded(function, out=ROWS, **options):
    """The function, run by each device of a mesh on its rows."""
    return lambda x: jax.shard_map(function, mesh=mesh(), in_specs=ROWS, out_specs=out, **options)(
        x
    )


PROGRAMS["sharding_constraint"] = lambda x: lax.with_sharding_constraint(
    jnp.sin(x), NamedSharding(mesh(), ROWS)
)
PROGRAMS["shard_map"] = sharded(jnp.sin)
PROGRAMS["psum_invariant"] = sharded(lambda x: lax.psum(x * x, "data"), PartitionSpec())
PROGRAMS["pvary"] = PROGRAMS["psum_invariant"]
PROGRAMS["psum"] = sharded(lambda x: lax.psum(x * x, "data"), check_vma=False)
PROGRAMS["pmax"] = fixed(sharded(lambda x: lax.pmax(x, "data"), PartitionSpec()))
PROGRAMS["pmin"] = fixed(sharded(lambda x: lax.pmin(x, "data"), PartitionSpec()))
PROGRAMS["all_gather"] = sharded(lambda x: lax.all_gather(x * x, "data"))
PROGRAMS["all_to_all"] = sharded(lambda x: lax.all_to_all(x * x, "data", 1, 0, tiled=True))
PROGRAMS["axis_index"] = sharded(lambda x: x * lax.axis_index("data"))
PROGRAMS["ppermute"] = sharded(lambda x: lax.ppermute(x * x, "data", [(0, 0)]))
PROGRAMS["pbroadcast"] = fixed(sharded(lambda x: lax.pbroadcast(x, ("data",), 0)))
PROGRAMS["reduce_scatter"] = sharded(lambda x: lax.psum_scatter(x * x, "data", tiled=True))


@program("inspect_sharding")
def inspected(x):
    jax.debug.inspect_array_sharding(x, callback=lambda _: None)
    return jnp.sin(x)


@program("layout_constraint")
def laid_out(x):
    from jax.experimental.layout import Layout, with_layout_constraint

    return with_layout_constraint(jnp.sin(x), Layout((1, 0)))


@program("xla_metadata_value")
def tagged(x):
    return jnp.tanh(xla_metadata.set_xla_metadata(jnp.sin(x), tag="value"))


@program("xla_metadata_call")
def tagged_call(x):
    return xla_metadata.xla_metadata_call(jnp.sin, tag="call")(x)


# -- what no program is made for ------------------------------------------------------------------

_REASONS = {
    "it appears only while other primitives are lowered or differentiated": """
        accum_grad_in_ref after custom_lin eval_jaxpr geqp3 iota_2x32_shape philox2x32 philox4x32
        stage threefry4x32 tie to_edtype from_edtype unreachable select_and_scatter call
        call_hi_primitive closed_call convolutions
        """,
    "it belongs inside of kernels or of what discharges them": """
        broadcast_to check core_map create_linear pin run_state unpin with_memory_space_constraint
        relayout box_get box_set new_box new_log log_extend log_read
        """,
    "it needs dimensions without a size, which only exporting has": """
        dim_as_value dimension_size shape_assertion
        """,
    "it needs several devices, or types that vary over an explicit mesh": """
        all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start
        all_gather_start all_to_all_done all_to_all_start pbroadcast_done pbroadcast_dynamic
        pbroadcast_start ppermute_done ppermute_start precv preduced psend psum_done
        psum_invariant_start psum_start ragged_all_to_all reduce_scatter_done
        reduce_scatter_start reduced_vary_cast reduced_vary_cast_p unreduced_pmax unreduced_pmin
        unreduced_psum unreduced_psum_start unreduced_reduce_scatter
        unreduced_reduce_scatter_start vary_unreduced_cast vary_unreduced_cast_p
        """,
    "it is a kernel of NVIDIA's libraries, which no other chip can compile": """
        cudnn_fusion dot_product_attention_bwd dot_product_attention_bwd_wrapper
        dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
        dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
        dot_product_attention_fwd dot_product_attention_fwd_wrapper scaled_matmul
        scaled_matmul_wrapper
        """,
    "it calls a compiled library that somebody has to write": "ffi_call",
}
WITHOUT = {name: why for why, names in _REASONS.items() for name in names.split()}


def primitives_of(jaxpr):
    """The names of the primitives of a jaxpr and of all that is inside."""
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                found |= primitives_of(getattr(value, "jaxpr", value))
    return found


def _is_jaxpr(value):
    return hasattr(getattr(value, "jaxpr", value), "eqns")
