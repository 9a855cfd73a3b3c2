"""What a gradient computes twice, and that equal numbers mean equal values."""

import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_programs import needs
from jax.extend.core import Literal
from zoo import load

import remat_kit
from remat_kit import _jax, primitive, recompute, save
from remat_kit._inspect.recomputed import forward_flops, recomputed, recomputed_of
from remat_kit._policy import schedule as _schedule
from remat_kit._program import program as _program
from remat_kit._program.flow import _CALLS, Flow, Numbering
from remat_kit._program.program import flat_program
from remat_kit._program.steps.gradient import trace_gradient

is_old = jax.__version_info__ < (0, 11)


gpt, mlp, resnet = map(load, ("gpt", "mlp", "resnet"))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


W, X, WS = f32(4, 4), f32(2, 4), f32(3, 4, 4)


def layer(w, x):
    return jnp.sin(jnp.tanh(x @ w) @ w)


def counts(f, *args, argnums=0):
    found = Counter()
    for r in recomputed(f, args, argnums):
        found[r.primitive] += r.count
    return dict(found)


# -- what is found --------------------------------------------------------------------------------


def test_nothing_is_computed_twice_without_a_region(implementation):
    def f(w, x):
        return (layer(w, x) + layer(w, x)).sum()  # the user's own repetition is none of ours

    assert counts(f, W, X) == {}


def test_a_region(implementation):
    """The last sine is not needed again; its cosine is new in the backward pass."""
    f = jax.checkpoint(layer)
    assert counts(lambda w, x: f(w, x).sum(), W, X) == {"dot_general": 2, "tanh": 1}


def test_what_is_kept_is_not_computed_twice(implementation):
    for what, expected in (
        (save(primitive("dot_general")), {"tanh": 1}),
        (save(primitive("tanh")), {"dot_general": 1}),
        (recompute(primitive("tanh")), {"tanh": 1}),
        ("everything", {}),
    ):
        f = remat_kit.policy(what)(layer)
        assert counts(lambda w, x, f=f: f(w, x).sum(), W, X) == expected, what


def test_each_of_nested_regions_computes_again(implementation):
    inner = jax.checkpoint(layer)
    f = jax.checkpoint(lambda w, x: inner(w, inner(w, x)))
    found = counts(lambda w, x: f(w, x).sum(), W, X)
    # The outer region runs the first inner one, and each inner region itself once more.
    assert found == {"dot_general": 6, "tanh": 3, "sin": 1}


def test_a_record(implementation):
    def f(w, x):
        with jax.named_scope("up"):
            return jax.checkpoint(layer)(w, x).sum()

    dot, tanh = sorted(recomputed(f, (W, X)), key=lambda r: r.primitive)
    line = layer.__code__.co_firstlineno + 1
    assert dot.source.endswith(f"test_recomputed.py:{line}")
    assert (dot.module, dot.region, dot.count, dot.shape) == ("up", "up", 2, (2, 4))
    assert (dot.flops, dot.bytes) == (2 * 2 * 2 * 4 * 4, 2 * 4 * 2 * 4)
    assert (tanh.flops, tanh.is_free) == (8, False)


def test_only_data_movement_is_free(implementation):
    def f(w, x):
        return jnp.sin(jnp.transpose(jnp.exp(x)) @ w)

    loss = remat_kit.policy("nothing")(f)
    found = {r.primitive: r for r in recomputed(lambda w, x: loss(w, x).sum(), (W, f32(4, 2)))}
    assert found["transpose"].is_free
    assert not found["exp"].is_free


@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_counts_each_iteration(implementation, reverse):
    def f(ws, x):
        def body(c, w):
            y = jax.checkpoint(layer)(w, c)
            return y, y.sum()

        c, ys = jax.lax.scan(body, x, ws, reverse=reverse)
        return c.sum() + (ys**2).sum()

    assert counts(f, WS, X) == {"dot_general": 6, "tanh": 3}


def test_a_region_around_a_loop(implementation):
    def f(ws, x):
        def loop(ws, x):
            (c, _), _ = jax.lax.scan(
                lambda c, w: ((jnp.tanh(c[0] @ w), c[1] + 1), None), (x, 0), ws
            )
            return c

        return jax.checkpoint(loop)(ws, x).sum()

    assert counts(f, WS, X) == {"dot_general": 3, "tanh": 3}


def test_loops_in_loops(implementation):
    def f(ws, x):
        def outer(c, ws):
            return jax.lax.scan(lambda c, w: (jax.checkpoint(layer)(w, c), None), c, ws)

        return jax.lax.scan(outer, x, ws)[0].sum()

    assert counts(f, f32(5, 3, 4, 4), X) == {"dot_general": 30, "tanh": 15}


def test_a_branch_inside_a_region(implementation):
    def f(w, x):
        def inner(w, x):
            return jax.lax.cond(x[0, 0] > 0, lambda: layer(w, x), lambda: jnp.cos(x) @ w)

        return jnp.exp(jax.checkpoint(inner)(w, x)).sum()

    found = counts(f, W, X)
    assert found["tanh"] == 1
    assert found["dot_general"] >= 2


def test_a_region_inside_a_branch(implementation):
    def f(w, x):
        return jax.lax.cond(x[0, 0] > 0, lambda: jax.checkpoint(layer)(w, x), lambda: x).sum()

    assert counts(f, W, X) == {"dot_general": 2, "tanh": 1}


def test_functions_with_their_own_derivative(implementation):
    @jax.custom_vjp
    def own(w, x):
        return jnp.tanh(x @ w)

    own.defvjp(
        lambda w, x: (jnp.tanh(x @ w), (w, x)),
        lambda kept, g: (kept[1].T @ g, g @ kept[0].T),
    )
    f = jax.checkpoint(lambda w, x: jax.nn.relu(own(w, own(w, x))))
    found = counts(lambda w, x: f(w, x).sum(), W, X)
    assert found["tanh"] >= 1
    assert found["dot_general"] >= 1


def test_a_device_mesh(implementation):
    if implementation and is_old:
        pytest.skip("the first jax_remat3 (jax 0.10) has no shard_map")
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")

    def f(w, x):
        local = jax.shard_map(
            lambda w, x: jnp.tanh(x @ w),
            mesh=mesh,
            in_specs=(jax.sharding.PartitionSpec(), spec),
            out_specs=spec,
        )
        return jax.checkpoint(lambda w, x: jnp.sin(local(w, x)))(w, x).sum()

    assert counts(f, W, X) == {"dot_general": 1, "tanh": 1}


def test_an_opaque_loop(implementation):
    def f(w, x):
        def inner(w, x):
            return jnp.sin(x @ jax.lax.stop_gradient(jax.lax.while_loop(small, double, w)))

        return jax.checkpoint(inner)(w, x).sum()

    def small(w):
        return jnp.max(w) < 1

    def double(w):
        return 2 * w

    assert counts(f, W, X, argnums=1)["while"] == 1


# -- on models ------------------------------------------------------------------------------------


def test_the_relus_of_the_mlp(implementation):
    for policy in ("nothing", recompute(primitive("max"))):
        loss, args = mlp.build(policy, batch=4, features=8, hidden=6, classes=3)
        found = recomputed(loss, args)
        assert {(r.primitive, r.module, r.count) for r in found} == {
            ("max", "MLP/block_0", 1),
            ("max", "MLP/block_1", 1),
        }


def test_the_products_of_a_gpt(implementation):
    """All but one of each block: what leaves `mlp/down` feeds a sum alone."""
    loss, args = gpt.build("nothing", size="tiny", batch=2, layers=12)
    found = [r for r in recomputed(loss, args) if r.primitive == "dot_general"]
    assert sum(r.count for r in found) == 12 * 7
    assert not any(r.module.endswith("/down") for r in found)
    assert {r.region for r in found} == {f"GPT/block_{i}" for i in range(12)}


def test_a_loop_and_its_unrolled_form_compute_the_same_again(implementation):
    totals = []
    for scan in (False, True):
        loss, args = gpt.build("nothing", size="tiny", batch=2, layers=4, scan=scan)
        found = Counter()
        for r in recomputed(loss, args):
            if not r.is_free and r.dtype == "float32":
                found[r.primitive, r.shape] += r.count
        totals.append(found)
    assert totals[0] == totals[1]


def test_the_convolutions_of_a_resnet(implementation):
    """Every convolution of every block: batch normalization's gradient reads what it gives."""
    loss, args = resnet.build("nothing", depth=50, batch=2, image=32, width=4, classes=10)
    found = [r for r in recomputed(loss, args) if r.primitive == "conv_general_dilated"]
    assert sum(r.count for r in found) == 16 * 3 + 4


def test_convolutions_are_kept_or_not(implementation):
    small = {"depth": 18, "batch": 2, "image": 32, "width": 4, "classes": 10}
    convolutions = recompute(primitive("conv_general_dilated"))
    for policy, expected in (("dots", {}), (convolutions, {"conv_general_dilated": 8 * 2 + 3})):
        loss, args = resnet.build(policy, **small)
        found = Counter()
        for r in recomputed(loss, args):
            if policy == convolutions or r.primitive == "conv_general_dilated":
                found[r.primitive] += r.count
        assert found == expected, policy


def test_forward_flops_are_those_of_the_loss_alone(implementation):
    """Neither the policy nor what the derivative adds changes them, and a loop counts in full."""
    totals = set()
    for policy in (None, "nothing", "dots"):
        for scan in (False, True):
            loss, args = gpt.build(policy, size="tiny", batch=2, layers=3, scan=scan)
            totals.add(forward_flops(trace_gradient(loss, args, call="test")))
    assert len(totals) <= 2  # layer parameters are sliced out of a stack inside the loop
    assert max(totals) < 1.001 * min(totals)
    w, x = f32(4, 8), f32(2, 4)
    products = forward_flops(trace_gradient(lambda w, x: (x @ w).sum(), (w, x), call="test"))
    assert products == 2 * 2 * 4 * 8 + 2 * 8


@pytest.mark.slow
def test_numbering_is_no_slower_than_tracing():
    for build in (
        lambda: resnet.build("nothing", depth=152, batch=2, image=32, width=4),
        lambda: gpt.build("nothing", size="tiny", batch=2, layers=72),
    ):
        loss, args = build()
        began = time.perf_counter()
        jax.make_jaxpr(jax.value_and_grad(loss))(*args)
        tracing = time.perf_counter() - began
        began = time.perf_counter()
        recomputed_of(trace_gradient(loss, args, call="test"))
        assert time.perf_counter() - began < 3 * tracing + 1


# -- that numbers are true ------------------------------------------------------------------------


def numbers(f, *args, numbering):
    closed = jax.make_jaxpr(f)(*args)
    flow = Flow(numbering)
    return [v.number for v in flow.run(closed, flow.arguments(closed.in_avals))]


def same(f, g, *args):
    """Tell whether two functions have equal numbers, which says that they are equal."""
    numbering = Numbering()
    return numbers(f, *args, numbering=numbering) == numbers(g, *args, numbering=numbering)


def scan(body, x, ws, **kwargs):
    return jax.lax.scan(body, x, ws, **kwargs)[0]


def test_equal_programs_have_equal_numbers():
    def f(x, ws):
        return scan(lambda c, w: (jnp.tanh(c @ w), None), jnp.sin(x), ws)

    def named(x, ws):
        x = jax.lax.optimization_barrier(jax.jit(jnp.sin)(x))
        return scan(lambda c, w: (jax.jit(jnp.tanh)(c @ w), c), x, ws)

    def more_carried(x, ws):
        def body(c, w):
            i, c = c
            return (i + 1, jnp.tanh(c @ w)), None

        return scan(body, (0, jnp.sin(x)), ws)[1]

    assert same(f, f, X, WS)
    assert same(f, named, X, WS)
    assert same(f, more_carried, X, WS)


@pytest.mark.parametrize(
    "other",
    [
        lambda x, ws: scan(lambda c, w: (jnp.sin(c @ w), None), x, ws),
        lambda x, ws: scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws, reverse=True),
        lambda x, ws: scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws[::-1]),
        lambda x, ws: scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws[:2]),
        lambda x, ws: scan(lambda c, w: (jnp.tanh(c @ ws[0]), None), x, ws),
        lambda x, ws: scan(lambda c, w: (jnp.tanh(c @ w), None), 2 * x, ws),
    ],
)
def test_other_loops_have_other_numbers(other):
    assert not same(lambda x, ws: scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws), other, X, WS)


def test_carried_values_are_told_apart():
    def pair(swap):
        def f(x, ws):
            def body(c, w):
                a, b = c
                return ((b, a @ w) if swap else (a @ w, b @ w)), None

            return scan(body, (x, x), ws)

        return f

    assert not same(pair(False), pair(True), X, WS)
    a, b = numbers(pair(True), X, WS, numbering=Numbering())
    assert a != b


def test_stacks_and_slices_cancel():
    def stacked(x, ws):
        def body(c, w):
            return c @ w, jnp.exp(c)

        return jax.lax.scan(body, x, ws)[1]

    def twice(x, ws):
        return jax.lax.scan(lambda c, e: (c, e), 0, stacked(x, ws))[1]

    def backwards(x, ws):
        return jax.lax.scan(lambda c, e: (c, e), 0, stacked(x, ws), reverse=True)[1]

    def flipped(x, ws):
        return stacked(x, ws)[::-1]

    assert same(stacked, twice, X, WS)
    assert same(stacked, backwards, X, WS)
    assert not same(stacked, flipped, X, WS)


def test_an_inner_slice_is_no_outer_slice():
    square = f32(3, 3)

    def rows(x):
        return jax.lax.scan(lambda _, r: (0, jax.lax.scan(lambda _, e: (0, e), 0, r)[1]), 0, x)[1]

    def diagonal(x):
        def outer(_, r):
            return 0, jax.lax.scan(lambda _, c: (0, c.sum() + r.sum()), 0, x)[1]

        return jax.lax.scan(outer, 0, x)[1]

    def transposed(x):
        def outer(_, r):
            return 0, jax.lax.scan(lambda _, c: (0, r.sum() + c.sum()), 0, x)[1]

        return jax.lax.scan(outer, 0, x)[1]

    assert same(rows, lambda x: x, square)
    assert not same(diagonal, transposed, square)


def test_branches_are_told_apart():
    def f(up, down):
        return lambda x: jax.lax.cond(x[0, 0] > 0, up, down, x)

    assert same(f(jnp.sin, jnp.cos), f(jnp.sin, jnp.cos), X)
    assert not same(f(jnp.sin, jnp.cos), f(jnp.cos, jnp.sin), X)
    assert same(f(jnp.sin, jnp.sin), jnp.sin, X)


def test_parameters_and_literals_count():
    assert not same(lambda x: x.sum(0), lambda x: x.sum(1), f32(4, 4))
    assert not same(lambda x: x * 2.0, lambda x: x * 3.0, X)
    assert not same(lambda x: x * 0.0, lambda x: x * -0.0, X)
    assert not same(lambda x: x.astype(jnp.bfloat16), lambda x: x.astype(jnp.float16), X)
    assert not same(lambda x, y: x - y, lambda x, y: y - x, X, X)
    assert same(lambda x: x.astype(jnp.float32), lambda x: x, X)
    assert not same(
        lambda x: jax.lax.reduce_precision(x, 8, 7), lambda x: jax.lax.reduce_precision(x, 5, 10), X
    )


def test_large_constants_are_known_by_identity():
    a, b = jnp.arange(100.0), jnp.arange(100.0) + 1
    assert same(lambda x: x + a, lambda x: x + a, f32(100))
    assert not same(lambda x: x + a, lambda x: x + b, f32(100))


def evaluated(jaxpr, args):
    """Evaluate a program without loops; yield the results of each operation, in order."""
    open_jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    env = dict(zip(open_jaxpr.invars, args, strict=True))
    env.update(zip(open_jaxpr.constvars, getattr(jaxpr, "consts", ()), strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in open_jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        bodies = _program.bodies(eqn)
        name = _program.primitive_name(eqn)
        if len(bodies) == 1 and name in {*_CALLS, "RematTraced"}:
            outs = yield from evaluated(bodies[0].jaxpr, values)
        else:
            outs = _jax.bind(eqn, values)
            if not Flow()._is_identity(eqn, name):
                yield eqn, outs
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in open_jaxpr.outvars]


@pytest.mark.parametrize(
    "build",
    [
        lambda: mlp.build("nothing", batch=4, features=8, hidden=6, classes=3, materialize=True),
        lambda: gpt.build(
            "dots", size="tiny", layers=2, vocab=11, seq=4, batch=2, dropout=0.1, materialize=True
        ),
    ],
    ids=["mlp", "gpt"],
)
@pytest.mark.slow
def test_equal_numbers_are_equal_values(implementation, build):
    """Run the gradient: operations with one number give the same bits."""
    loss, args = build()
    closed = jax.make_jaxpr(jax.value_and_grad(loss))(*args)
    flow = Flow()
    flow.run(closed, flow.arguments(closed.in_avals))
    ops = [op for op in flow.ops if op.kind == "equation"]
    jax.config.update("jax_remat3", False)  # JAX compiles each operation once for both
    results = list(evaluated(closed, jax.tree.leaves(args)))
    assert [op.eqn for op in ops] == [eqn for eqn, _ in results]
    first, repeated = {}, 0
    for op, (_, values) in zip(ops, results, strict=True):
        repeated += op.numbers[0] in first
        for a, b in zip(first.setdefault(op.numbers[0], values), values, strict=True):
            if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            np.testing.assert_array_equal(a, b)
    assert repeated > 2


def head(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


@pytest.mark.parametrize("k", [4, 5])  # five pieces of 32 rows: the last one is smaller
def test_a_loop_over_pieces_computes_each_piece_twice(k, implementation):
    w, x = f32(8, 16), f32(32, 8)
    split = remat_kit.policy(remat_kit.pieces(k))(head)
    for loss in (split, jax.jit(split)):
        found = recomputed(loss, (w, x))
        assert {r.pieces for r in found} == {f"{k} pieces of axis 0"}
        flops = {
            p: sum(r.flops for r in found if r.primitive == p) for p in ("dot_general", "tanh")
        }
        assert flops == {"dot_general": 2 * 32 * 16 * 8, "tanh": 32 * 16}
        rows = {r.shape[0]: r.count for r in found if r.primitive == "tanh"}
        assert rows == ({8: 4} if k == 4 else {7: 4, 4: 1})
    assert not any(r.pieces for r in recomputed(remat_kit.policy("nothing")(head), (w, x)))


def test_pieces_of_modules_are_regions_with_their_paths():
    loss, args = gpt.build(size="tiny", batch=4, layers=2)
    split = remat_kit.policy(remat_kit.pieces(4), at="*/mlp")(loss)
    report = remat_kit.inspect(split, *args, target="cpu")
    found = [r for r in report.recomputed if r.pieces and r.flops]
    assert {r.region for r in found} == {"GPT/block_0/mlp", "GPT/block_1/mlp"}
    assert all(r.module.startswith(r.region) for r in found)
    whole = recomputed(remat_kit.policy("nothing", at="*/mlp")(loss), args)
    assert max(r.flops for r in found) == max(r.flops for r in whole)
    regions = report.readings["cpu"].regions
    assert {v.module: v.pieces for v in regions} == {r.region: r.pieces for r in found}
    assert all(v.message.startswith(v.pieces) for v in regions)
    assert str(found[0].pieces) in str(report)
    # Nothing else becomes a region because of the loops.
    assert not [r for r in recomputed(loss, args) if r.pieces]


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_the_compiled_program_keeps_equal_loops_over_pieces(target):
    """Equal blocks share one loop, whose instructions XLA:GPU names after the first block."""
    w, x = f32(4, 16, 16), f32(32, 16)

    def loss(w, x):
        for i in range(4):
            with jax.named_scope(f"block_{i}"):
                x = x + jnp.tanh(x @ w[i]) @ w[i].T
        return jnp.sum(x**2)

    flat = flat_program(jax.make_jaxpr(loss)(w, x))
    tanh = [i for i, eqn in enumerate(flat.eqns) if eqn.primitive.name == "tanh"]
    lines = [f"{i - 1}:{i + 1} pieces 4 of {i}.0 axis 0" for i in tanh]
    rest = len(flat.eqns) - len(tanh)  # each segment in pieces is one equation of the plan
    plan = remat_kit.planned(_schedule.describe(flat), *lines, f"0:{rest} plain")
    report = remat_kit.inspect(remat_kit.policy(plan)(loss), w, x, target=needs(target))
    regions = {v.module: v for v in report.readings[target].regions if v.pieces}
    assert set(regions) == {f"block_{i}" for i in range(4)}
    assert {v.verdict for v in regions.values()} == {"effective"}
    flops = {v.recomputed_flops for v in regions.values()}
    assert len(flops) == 1


def test_a_diff_names_the_loop_over_pieces():
    w, x = f32(8, 16), f32(32, 8)
    found = remat_kit.diff(head, remat_kit.policy(remat_kit.pieces(4))(head), w, x)
    assert {d.pieces for d in found.duplicates} == {"4 pieces of axis 0"}
    assert "4 pieces of axis 0" in str(found)


def test_a_loop_without_a_counterpart_is_a_warning(monkeypatch):
    split = remat_kit.policy(remat_kit.pieces(4))(head)
    monkeypatch.setattr("remat_kit._inspect.recomputed.duplicates", lambda gradient: iter(()))
    with pytest.warns(remat_kit.RematKitWarning, match="not counted as recomputed"):
        remat_kit.inspect(split, f32(8, 16), f32(32, 8))
