"""Programs that run in pieces: same values, less memory, and errors that say what blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from zoo import load

from remat_kit import PolicyError, UserError, _jax, everything, measure, pieces, policy, recompute
from remat_kit._apply.pieces import PieceLoop, chosen, loop_of
from remat_kit._program.program import bodies, flat_program

_GPT = {"layers": 2, "width": 32, "heads": 4, "vocab": 256, "seq": 32, "batch": 4}


@functools.cache
def model(name: str, **size: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    built: tuple[Callable[..., Any], tuple[Any, ...]] = load(name).build(**size, materialize=True)
    return built


def same(expected: Any, found: Any, tolerance: float = 1e-5) -> None:
    """Compare two pytrees within rounding.

    The gradient of the bias of a key is zero, and what is computed is rounding alone.
    """
    largest = max(float(np.max(np.abs(a))) for a in jax.tree.leaves(expected) if np.size(a))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        scale = max(1e-2 * largest, float(np.max(np.abs(a)))) if np.size(a) else 1.0
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=tolerance * scale)


def compiled(fn: Callable[..., Any], args: Any) -> Any:
    return jax.jit(jax.value_and_grad(fn)).lower(*args).compile()


def temporaries(fn: Callable[..., Any], args: Any) -> int:
    return int(compiled(fn, args).memory_analysis().temp_size_in_bytes)


def compare(fn: Callable[..., Any], split: Callable[..., Any], args: Any) -> None:
    same(*(compiled(f, args)(*args) for f in (fn, split)))


@functools.cache
def whole(name: str, **size: Any) -> tuple[Any, int]:
    """Return what a model computes that does not run in pieces, and its temporary memory."""
    loss, args = model(name, **size)
    program = compiled(loss, args)
    return program(*args), program.memory_analysis().temp_size_in_bytes


# -- the models -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "what"),
    [
        ("*/mlp", pieces(4)),
        ("*/mlp", pieces(8, axis=1)),
        ("*/mlp", pieces(8, axis=2)),  # partial sums of the output
        ("*/attn", pieces(4, axis=1)),  # heads
        ("*/attn", pieces(8, axis=2)),  # query rows
        ("*/block_*", pieces(4)),
        (None, pieces(3)),  # a last piece of its own
        (None, pieces(8, axis=1)),
    ],
    ids=str,
)
def test_gpt(at: str | None, what: Any) -> None:
    loss, args = model("gpt", **_GPT)
    expected, most = whole("gpt", **_GPT)
    program = compiled(policy(what, at=at)(loss), args)
    same(expected, program(*args))
    assert program.memory_analysis().temp_size_in_bytes < most


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "size", "at", "what"),
    [
        slow("gpt", {**_GPT, "scan": True}, "*/mlp", pieces(4)),
        slow("gpt", {**_GPT, "dropout": 0.3}, "*/mlp", pieces(4)),
        ("gpt", {**_GPT, "dropout": 0.3}, "*/attn", pieces(8, axis=2)),
        ("gpt_nnx", _GPT, "*/mlp", pieces(4)),
        ("gpt_nnx", {**_GPT, "dropout": 0.3}, "*/attn", pieces(4, axis=1)),
        slow("vgg", {"image": 32, "batch": 4, "width": 4, "hidden": 16}, "*/block_0", pieces(4)),
        slow("vgg", {"image": 32, "batch": 4, "width": 4, "hidden": 16}, None, pieces(4)),
        slow(
            "llama_nnx",
            {"size": "tiny", "batch": 2, "seq": 32, "layers": 2},
            "*/mlp",
            pieces(8, axis=1),
        ),
        slow("bert", {"size": "tiny", "batch": 4}, "*/block_*", pieces(4)),
        slow("vit", {"size": "tiny", "batch": 4}, "*/block_*", pieces(4)),
        slow("lstm", {"batch": 4}, None, pieces(4)),
    ],
    ids=str,
)
def test_models(name: str, size: dict[str, Any], at: str | None, what: Any) -> None:
    loss, args = model(name, **size)
    split = policy(what, at=at)(loss)
    assert any(loop_of(eqn) for eqn in every_equation(jax.make_jaxpr(split)(*args)))
    same(whole(name, **size)[0], compiled(split, args)(*args))


def every_equation(closed: Any) -> Iterator[Any]:
    for eqn in closed.jaxpr.eqns:
        yield eqn
        for body in bodies(eqn):
            yield from every_equation(body)


@pytest.mark.parametrize("at", ["*/mlp", None])
def test_both_implementations_of_regions(at: str | None, implementation: Any) -> None:
    loss, args = model("gpt", **_GPT)
    same(whole("gpt", **_GPT)[0], compiled(policy(pieces(4), at=at)(loss), args)(*args))


# -- all transformations --------------------------------------------------------------------------


def head(w: Any, x: Any, labels: Any) -> Any:
    logits = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))


def _head_arguments() -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0))
    w, x = jax.random.normal(keys[0], (8, 50)), jax.random.normal(keys[1], (37, 8))
    return w, x, jnp.arange(37)


_ORDERS: list[Any] = [
    lambda f, w, v: jax.jvp(f, (w,), (v,)),
    lambda f, w, v: jax.vjp(f, w)[1](jnp.float32(2.0)),
    lambda f, w, v: jax.grad(lambda w: jnp.vdot(jax.grad(f)(w), v))(w),
    lambda f, w, v: jax.jvp(jax.grad(f), (w,), (v,)),
    lambda f, w, v: jax.grad(lambda w: jax.jvp(f, (w,), (v,))[1])(w),
    lambda f, w, v: jax.jvp(lambda w: jax.jvp(f, (w,), (v,))[1], (w,), (v,)),
    lambda f, w, v: jax.vmap(jax.grad(f))(jnp.stack([w, 2 * w])),
    lambda f, w, v: jax.grad(lambda w: jax.vmap(f)(jnp.stack([w, 2 * w])).sum())(w),
    lambda f, w, v: jax.jacfwd(jax.grad(f))(w),
    lambda f, w, v: jax.vmap(
        lambda a: jax.jvp(lambda w: jax.jvp(f, (w,), (v,)), (w,), (a,)), out_axes=(None, 0)
    )(jnp.stack([v, w])),
    lambda f, w, v: jax.linearize(f, w)[1](v),
    lambda f, w, v: jax.grad(jax.checkpoint(f))(w),
    lambda f, w, v: jax.grad(jax.jit(f))(w),
    lambda f, w, v: jax.grad(
        lambda w: jax.lax.scan(lambda c, s: (c + f(s * w), None), 0.0, jnp.arange(1.0, 4.0))[0]
    )(w),
]


# Each transformation under one of JAX's implementations; the slow tests have it under the other.
@pytest.mark.parametrize(
    ("order", "implementation"),
    [
        *((order, i % 2 == 1) for i, order in enumerate(_ORDERS)),
        *(
            pytest.param(order, i % 2 == 0, marks=pytest.mark.slow)
            for i, order in enumerate(_ORDERS)
        ),
    ],
    indirect=["implementation"],
)
def test_transformations(order: Any, implementation: Any) -> None:
    w, x, labels = _head_arguments()
    v = jnp.cos(w)
    whole, split = (
        order(lambda w, f=f: f(w, x, labels), w, v) for f in (head, policy(pieces(4))(head))
    )
    same(whole, split)


def test_a_linear_map_of_what_is_not_mapped() -> None:
    """Its results are mapped only where it contains a collective operation over the axis."""

    def doubled(x: Any) -> Any:
        return _jax.linear_map(lambda _, t: [2 * t], lambda _, cts: [2 * cts[0]], [x], [x])[0]

    def summed(x: Any) -> Any:
        def add(_: Any, t: Any) -> list[Any]:
            return [jax.lax.psum(t, "rows")]

        return _jax.linear_map(add, lambda _, cts: add(_, cts[0]), [x], [x])[0]

    x, rows = jnp.float32(1.5), jnp.arange(3)
    mapped = functools.partial(jax.vmap, axis_name="rows")
    np.testing.assert_array_equal(mapped(lambda _: doubled(x), out_axes=None)(rows), 3.0)
    np.testing.assert_array_equal(mapped(lambda _: summed(x))(rows), [4.5, 4.5, 4.5])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "order",
    [
        lambda f, w, x: jax.grad(f, (0, 1))(w, x),
        lambda f, w, x: jax.jvp(f, (w, x), (jnp.sin(w), jnp.cos(x))),
        lambda f, w, x: jax.jvp(jax.grad(f, (0, 1)), (w, x), (jnp.sin(w), jnp.cos(x))),
    ],
)
def test_results_have_the_sharding_of_explicit_axes(axis: int, order: Any) -> None:
    """Of the axis that is cut, too. The types are checked without devices."""
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"), axis_types=(explicit,) * 2)

    def put(shape: tuple[int, ...], *spec: Any) -> Any:
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def loss(w: Any, x: Any) -> Any:
        return -jnp.mean(jax.nn.log_softmax(jnp.tanh(x) @ w)[..., 0])

    split = policy(pieces(3 if axis else 2, axis=axis))(loss)
    with jax.sharding.use_abstract_mesh(mesh):
        whole, found = (
            jax.eval_shape(functools.partial(order, f), put((8, 50)), put((8, 36, 8), "data"))
            for f in (loss, split)
        )
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, whole)


def test_pieces_have_to_be_split_as_explicit_axes_split_the_whole() -> None:
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((40, 8), jnp.float32, sharding=sharding)

    def total(x: Any) -> Any:
        return jnp.sum(jnp.exp(jnp.tanh(x)))

    def pieces_of(count: int, axis: int | None = 0) -> Any:
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.eval_shape(policy(pieces(count, axis=axis))(total), x)

    for count in (2, 5, 10):
        pieces_of(count)
    for count, entries in ((4, 10), (8, 5), (40, 1)):
        with pytest.raises(PolicyError, match=f"axis 0 into 4, .* a piece of {entries} entries"):
            pieces_of(count)
    pieces_of(4, None)  # of the other axis


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_shard_map(check_vma: bool) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    here, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")

    def sharded(fn: Any) -> Any:
        def local(*args: Any) -> Any:
            return jax.lax.pmean(fn(*args), "data")

        specs = (here, rows, rows)
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=here, check_vma=check_vma)

    compare(sharded(head), sharded(policy(pieces(4))(head)), _head_arguments())


@pytest.mark.parametrize("count", [1, 2, 5, 36, 37])
def test_any_number_of_pieces(count: int) -> None:
    args = _head_arguments()
    compare(head, policy(pieces(count))(head), args)


def test_integer_and_bool_results() -> None:
    def fn(x: Any, y: Any) -> Any:
        wide = jnp.tanh(x[:, None] * y)  # (12, 40)
        return jnp.argmax(wide, 1), jnp.any(wide > 0.9), jnp.sum(wide > 0, 0), jnp.sum(wide * wide)

    x, y = jnp.linspace(-1.0, 1.0, 12), jnp.linspace(-2.0, 2.0, 40)[None]
    for a, b in zip(fn(x, y), policy(pieces(4, axis=0))(fn)(x, y), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert a.dtype == b.dtype
    with pytest.raises(PolicyError, match="`argmax` mixes the 40 entries"):
        policy(pieces(4, axis=1))(fn)(x, y)


def test_a_softmax_without_its_gradient_through_the_maximum() -> None:
    """The maximum over pieces is exact, and its gradient is not used."""

    def spread(x: Any) -> Any:
        wide = jnp.exp(x[:, None] * jnp.arange(40.0)[None])
        return jnp.sum(wide) / jax.lax.stop_gradient(jnp.max(wide))

    x = jnp.linspace(0.1, 0.2, 12)
    compare(spread, policy(pieces(4))(spread), (x,))


@jax.custom_jvp
def _without_derivative(x: Any) -> Any:
    return x * 2


@functools.partial(_without_derivative.defjvp, symbolic_zeros=True)
def _refuse_tangents(primals: Any, tangents: Any) -> Any:
    (d,) = tangents
    assert isinstance(d, jax.custom_derivatives.SymbolicZero)
    return _without_derivative(*primals), d


@pytest.mark.parametrize("around", [False, True], ids=["alone", "in a region"])
def test_a_result_behind_a_stop_gradient_has_no_tangent(around: bool) -> None:
    """As without pieces, what reads it needs no derivative."""

    def halves(x: Any) -> tuple[Any, Any]:
        wide = jnp.sin(x)[:, None] * jnp.arange(40.0)[None]
        still = jax.lax.stop_gradient(jnp.sum(jnp.cos(wide), 1))
        return jnp.sum(wide * wide, 1), still + jnp.sign(jnp.sum(wide, 1))

    def loss(halves: Any, x: Any) -> Any:
        moving, still = halves(x)
        return jnp.sum(moving * _without_derivative(still))

    split = policy(pieces(4, axis=0))(halves)
    whole, found = functools.partial(loss, halves), functools.partial(loss, split)
    if around:
        found = policy(recompute(everything))(found)
    x = jnp.linspace(0.1, 0.9, 12)
    compare(whole, found, (x,))
    same(jax.jacfwd(jax.grad(whole))(x), jax.jacfwd(jax.grad(found))(x))


# -- errors ---------------------------------------------------------------------------------------


def test_an_error_names_what_blocks_and_what_works() -> None:
    args = _head_arguments()
    with pytest.raises(
        PolicyError, match=r"pieces of axis 1: `.*` needs all pieces of the max"
    ) as e:
        policy(pieces(4, axis=1))(head)(*args)
    assert "hint: axis 0 can be divided" in str(e.value)
    assert "f32[37,50] of `dot_general`" in str(e.value)
    with pytest.raises(PolicyError, match="has no axis 2"):
        policy(pieces(4, axis=2))(head)(*args)
    with pytest.raises(PolicyError, match="37 entries, fewer than 38 pieces"):
        policy(pieces(38, axis=0))(head)(*args)
    compare(head, policy(pieces(4, axis=-2))(head), args)


def test_every_axis_may_be_blocked() -> None:
    def fn(x: Any) -> Any:
        wide = jnp.fft.fft(jnp.tile(x[None], (8, 1)), axis=1)
        return jnp.sum(jnp.abs(jnp.fft.fft2(wide)))

    with pytest.raises(PolicyError, match=r"axis 0: .*; axis 1: .*`fft` mixes the 6 entries"):
        policy(pieces(2))(fn)(jnp.ones(6))


def test_batch_statistics_block_the_batch() -> None:
    loss, args = model("resnet", depth=18, batch=4, image=32, width=4, classes=10)
    with pytest.raises(PolicyError, match="needs all pieces of the sum that `reduce_sum` computes"):
        policy(pieces(4, axis=0), at="*/block_0")(loss)(*args)


def test_effects_block() -> None:
    def fn(x: Any) -> Any:
        y = jnp.tanh(x[:, None] * jnp.ones((1, 20)))
        jax.debug.print("{}", y[0, 0])
        return jnp.sum(y)

    with pytest.raises(PolicyError, match="has an effect"):
        policy(pieces(2))(fn)(jnp.ones(6))


# -- modules --------------------------------------------------------------------------------------


class _Wide(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(4)(nn.gelu(nn.Dense(64)(x)))


class _WideNNX(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(4, 64, rngs=rngs), nnx.Linear(64, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> Any:
        self.calls[...] = self.calls[...] + 1
        return self.down(self.drop(nnx.gelu(self.up(x))))


def test_a_linen_class() -> None:
    x = jnp.ones((8, 4))
    params = _Wide().init(jax.random.key(0), x)
    lean = policy(pieces(4))(_Wide)()

    def loss(module: Any, params: Any) -> Any:
        return jnp.sum(module.apply(params, x) ** 2)

    compare(functools.partial(loss, _Wide()), functools.partial(loss, lean), (params,))
    assert jax.tree.structure(lean.init(jax.random.key(0), x)) == jax.tree.structure(params)


def test_an_nnx_class_keeps_its_state_and_its_masks() -> None:
    def run(cls: Any) -> Any:
        module, x = cls(nnx.Rngs(0)), jnp.linspace(-1, 1, 32).reshape(8, 4)
        grads = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(module)
        return jax.tree.leaves(grads), module.calls[...], module(x)

    same(run(_WideNNX), run(policy(pieces(4))(_WideNNX)))


def test_a_step_with_donation() -> None:
    loss, args = model("gpt", **_GPT)

    def step(params: Any, tokens: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, tokens))

    whole = jax.jit(step)(*args)
    lean = policy(pieces(4), at="*/mlp")(jax.jit(step, donate_argnums=0))
    same(whole, lean(jax.tree.map(jnp.copy, args[0]), args[1]))


# -- what the compiler makes of it ----------------------------------------------------------------


def test_buffers_depend_on_data() -> None:
    """No loop starts from an array of zeros that the compiler could make ahead of time."""
    loss, args = model("gpt", **_GPT)
    lean = policy(pieces(4), at="*/mlp")(loss)
    scans = 0
    todo = [jax.make_jaxpr(jax.grad(lean))(*args).jaxpr]
    while todo:
        jaxpr = todo.pop()
        made = {v: e for e in jaxpr.eqns for v in e.outvars}

        def constant(v: Any, made: Any = made) -> bool:
            if isinstance(v, jax.extend.core.Literal):
                return True
            return v in made and all(map(constant, made[v].invars))

        for eqn in jaxpr.eqns:
            todo += [getattr(b.jaxpr, "jaxpr", b.jaxpr) for b in bodies(eqn)]
            if eqn.primitive.name == "scan":
                scans += 1
                arrays = [v for v in eqn.invars if getattr(v.aval, "ndim", 0) > 1]
                assert arrays
                assert not any(map(constant, arrays))
    assert scans >= 4  # forward and backward of two layers


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda a, w, u: jnp.sin(a @ w) @ u, {"a", "w", "u", "result"}),
        (lambda a, w, u: jnp.sin(a @ w) @ u + a, {"w", "u"}),
        (
            lambda a, w, u: (jnp.sin(a.reshape(16, 8, 1)[..., 0] @ w) @ u).T,
            {"a", "w", "u", "result"},
        ),
        (lambda a, w, u: jnp.matmul(jnp.sin(a @ w), u, precision="highest"), {"a", "w"}),
    ],
)
def test_what_only_products_read_or_compute(fn: Any, expected: set[str]) -> None:
    """The buffers of a loop depend on these inputs and outputs in half precision."""
    shapes = {"a": (16, 8), "w": (8, 64), "u": (64, 8)}
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes.values()]
    program = flat_program(jax.make_jaxpr(fn)(*args))
    loop = PieceLoop(chosen(program, pieces(4, axis=0), "call"), 4)
    (result,) = program.outvars
    names = dict(zip(program.invars, shapes, strict=True)) | {result: "result"}
    assert {names.get(v, "another") for v in loop._multiplied} == expected


def test_the_axis_that_keeps_the_fewest_bytes_alive() -> None:
    def fn(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(jnp.einsum("btd,dv->btv", x, w)))

    def axis(*shape: int) -> int:
        args = jax.ShapeDtypeStruct((4, 64), "float32"), jax.ShapeDtypeStruct(shape, "float32")
        program = flat_program(jax.make_jaxpr(fn)(*args))
        found = chosen(program, pieces(4), "call")
        (way,) = [w for i, w in found.ways.items() if program.eqns[i].primitive.name == "sin"]
        how: Any = way.outputs[0]
        return how.axis

    assert axis(8, 16, 4) == 0
    assert axis(2, 16, 4) == 1  # two sequences make no four pieces


def test_pieces_inside_of_regions() -> None:
    loss, args = model("gpt", **_GPT)
    split = policy("nothing", at="*/block_*")(policy(pieces(4), at="*/attn")(loss))
    program = compiled(split, args)
    same(whole("gpt", **_GPT)[0], program(*args))
    regions = policy("nothing", at="*/block_*")(loss)
    assert program.memory_analysis().temp_size_in_bytes < temporaries(regions, args)


@pytest.mark.slow
def test_less_memory_on_a_tpu() -> None:
    loss, args = load("gpt").build(size="tiny", layers=1, width=64, vocab=16384, seq=512, batch=4)
    split = policy(pieces(16))(loss)
    whole, found = (measure(f, *args, target="tpu-v5e").temp_bytes for f in (loss, split))
    assert whole > 4 * 512 * 16384 * 4  # the logits
    assert found < 0.1 * whole


@pytest.mark.slow
def test_a_tpu_stores_no_cotangent_in_float32_for_the_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only products read the cotangent of the attention, so XLA stores it in bfloat16.

    If the buffers depend on its first entry in float32, XLA writes all of it in float32 as well, in
    tiles that it does not fill.
    """
    llama = {"width": 512, "heads": 8, "kv_heads": 8, "hidden": 512, "vocab": 1024}
    loss, args = load("llama_nnx").build(layers=1, seq=8192, **llama)
    split = policy("nothing", at="*/block_*")(policy(pieces(64, axis=3), at="*/attn")(loss))
    found = measure(split, *args, target="tpu-v5e").temp_bytes
    monkeypatch.setattr(PieceLoop, "_multiplied", frozenset())
    whole = measure(split, *args, target="tpu-v5e").temp_bytes
    assert found < 0.5 * whole


def test_pieces_have_no_common_subexpressions_to_prevent():
    with pytest.raises(UserError, match="leave prevent_cse= out"):
        policy(pieces(4), prevent_cse=False)


# -- rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_many_pieces_round_half_precision_as_few(dtype: str, mode: str) -> None:
    """The gradient of the weights, and a sum over pieces of hidden units, have one rounding."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, up, down = (
        jax.random.normal(key, shape).astype(dtype)
        for key, shape in zip(keys, [(2048, 16), (16, 256), (256, 16)], strict=True)
    )

    def hidden(x: Any, up: Any, down: Any) -> Any:  # its largest array is (2048, 256)
        return jnp.tanh(x @ up / 4) @ down / 16

    def loss(x: Any, up: Any, down: Any) -> Any:
        return jnp.mean(jnp.square(hidden(x, up, down).astype("float32")))

    def error(fn: Any) -> float:
        """Return the error against float32, in units of the largest entry."""
        if mode == "reverse":
            run = jax.jit(jax.grad(fn, argnums=(1, 2)))
        else:
            run = jax.jit(lambda *args: jax.jvp(fn, args, args)[1])
        exact = jax.tree.leaves(run(*(v.astype("float32") for v in (x, up, down))))
        found = jax.tree.leaves(run(x, up, down))
        return max(
            float(jnp.linalg.norm(a.astype("float32") - b) / jnp.linalg.norm(b))
            for a, b in zip(found, exact, strict=True)
        )

    axis, fn = (0, loss) if mode == "reverse" else (1, hidden)
    few, many = (error(policy(pieces(n, axis=axis))(fn)) for n in (2, 128))
    assert 0 < many < 1.5 * few
