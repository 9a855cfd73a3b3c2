"""Programs that were once wrong, each as small as it could be made."""

import functools

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Application, Case, flagged
from jax.ad_checkpoint import checkpoint_name
from programs import Op, Program

import remat_kit
from remat_kit import dots, everything, module, nested, save
from remat_kit._apply.labels import keep_labelled
from remat_kit._policy import schedule as _schedule
from remat_kit._program import program as _program

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
POLICIES = ["nothing", "dots", "everything"]


def close(one, other):
    """Raise AssertionError where two pytrees differ by more than rounding."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# -- equal blocks that are not the same -------------------------------------------------------


def blocks(block, factors):
    def loss(x):
        for i, factor in enumerate(factors):
            with jax.named_scope(f"block_{i}"):
                x = block(x @ (x.T @ x) / 4, factor)
        return x.sum()

    return loss


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def spike(x, slope):
    return jnp.tanh(x)


@spike.defjvp
def _(slope, primals, tangents):
    (x,), (dx,) = primals, tangents
    return spike(x, slope), dx / (1 + (slope * x) ** 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def spike_vjp(x, slope):
    return jnp.tanh(x)


spike_vjp.defvjp(
    lambda x, slope: (jnp.tanh(x), x), lambda slope, x, ct: (ct / (1 + (slope * x) ** 2),)
)


def closed_over(x, slope):
    @jax.custom_jvp
    def inner(x):
        return jnp.tanh(x)

    inner.defjvp(lambda primals, tangents: (inner(*primals), tangents[0] * slope))
    return inner(x)


def constant(x, factor):
    return jnp.tanh(x * factor)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "block", [spike, spike_vjp, closed_over, constant], ids=lambda f: f.__name__
)
def test_blocks_that_differ_in_a_static_argument(block, policy, implementation):
    loss = blocks(block, (1.0, 10.0, 100.0))
    close(jax.grad(remat_kit.policy(policy, at="block_*")(loss))(X), jax.grad(loss)(X))


@pytest.mark.parametrize("policy", POLICIES)
def test_one_function_called_with_other_static_arguments(policy):
    loss = lambda x, slope: spike(x @ x.T, slope).sum()  # noqa: E731
    decorated = remat_kit.policy(policy, static_argnums=1)(loss)
    for slope in (1.0, 100.0):
        plain = jax.grad(lambda x: spike(x @ x.T, slope).sum())(X)  # noqa: B023
        close(jax.grad(lambda x: decorated(x, slope))(X), plain)  # noqa: B023


def test_blocks_that_differ_in_a_constant():
    loss = blocks(constant, (1.0, 10.0, 100.0))
    for policy in POLICIES:
        close(jax.grad(remat_kit.policy(policy, at="block_*")(loss))(X), jax.grad(loss)(X))


def test_blocks_are_told_apart_by_their_module():
    loss = blocks(lambda x, _: jnp.tanh(x @ x.T) @ x, range(3))
    chosen = save(dots) & save(module("block_1"))
    rows = remat_kit.inspect(remat_kit.policy(chosen, at="block_*")(loss), X).saved
    assert {row.module for row in rows if "save(" in row.reason} == {"block_1"}


# -- backward passes that are not linear in their cotangent -----------------------------------


@jax.custom_vjp
def two_outputs(x):
    return jnp.sin(x), jnp.cos(x)


# An unused output has no cotangent: JAX gives zeros, of which this makes NaN.
two_outputs.defvjp(
    lambda x: (two_outputs(x), x),
    lambda x, cts: (jnp.cos(x) * cts[0] + 1 + jnp.tanh(cts[1]) * x,),
)


@jax.custom_vjp
def normalised(x):
    return x * 1.0


normalised.defvjp(lambda x: (x, None), lambda _, ct: (ct / jnp.sqrt(jnp.sum(ct * ct)),))


@jax.custom_vjp
def fused_loss(x):
    return jnp.sum(x * x)


fused_loss.defvjp(lambda x: (jnp.sum(x * x), 2 * x), lambda gradient, ct: (gradient,))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "loss",
    [
        lambda x: two_outputs(jnp.tanh(x))[0].sum(),
        lambda x: (normalised(jnp.tanh(x)) + 0 * x).sum(),
        lambda x: jnp.stack([normalised(x), jnp.sin(x)])[1].sum(),
        lambda x: fused_loss(jnp.tanh(x)),
    ],
    ids=["unused output", "normalised", "not read", "fused loss"],
)
def test_a_backward_pass_that_is_not_linear(loss, policy, implementation):
    close(jax.grad(remat_kit.policy(policy)(loss))(X), jax.grad(loss)(X))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_unused_output_is_never_asked_for_its_cotangent(policy):
    pairs = lambda x: (normalised(jnp.sin(x)), jnp.cos(x))  # noqa: E731
    decorated = remat_kit.policy(policy)(pairs)
    close(jax.grad(lambda x: decorated(x)[1].sum())(X), jax.grad(lambda x: pairs(x)[1].sum())(X))


USES = {
    "stopped": lambda a, b: b.sum() + jax.lax.stop_gradient(a).sum(),
    "compared": lambda a, b: jnp.where(a > 0, b, 2 * b).sum(),
    "rounded": lambda a, b: jnp.round(a).sum() + b.sum(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_output_whose_cotangent_is_zero_is_not_asked_for_it(policy, use, implementation):
    """Under ``jax_remat3``, `jax.checkpoint` asks for it whatever its policy is."""
    if implementation and policy != "dots":
        pytest.skip("as under `jax.checkpoint`")
    pairs = lambda x: (normalised(jnp.sin(x)), jnp.cos(x))  # noqa: E731
    decorated = remat_kit.policy(policy)(pairs)
    close(*(jax.grad(lambda x, f=f: USES[use](*f(x)))(X) for f in (decorated, pairs)))


def branch(p, x):
    return jax.lax.cond(p > 0, lambda x: jnp.sin(x) * x, lambda x: x * x, x)


def branches_in_a_loop(p, x):
    return jax.lax.scan(lambda x, _: (branch(p, x), None), x, None, length=3)[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "fn", [branch, branches_in_a_loop, jax.checkpoint(branch)], ids=["plain", "loop", "region"]
)
def test_branches_with_a_mapped_predicate(fn, policy):
    """JAX batches our derivative rule, whose linear part then contains `stop_gradient`."""
    predicates, x = jnp.array([1.0, -1.0, 2.0]), jnp.array([0.3, 1.3, 2.3])
    decorated = remat_kit.policy(policy)(fn)
    close(*(jax.grad(lambda x, f=f: jax.vmap(f)(predicates, x).sum())(x) for f in (decorated, fn)))


# -- calls that nobody differentiates ---------------------------------------------------------


def with_callback(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jnp.sin(jax.pure_callback(np.sin, shape, jnp.tanh(x)))


def with_while(x):
    return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: jnp.exp(x) + 1, jnp.tanh(x))


def with_schur(x):
    return jax.lax.linalg.schur(x @ x.T)[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fn", [with_callback, with_while, with_schur], ids=lambda f: f.__name__)
def test_no_derivative_is_needed_where_none_is_taken(fn, policy, implementation):
    decorated = remat_kit.policy(policy)(fn)
    close(decorated(X), fn(X))
    close(jax.jit(decorated)(X), fn(X))
    close(jax.jvp(lambda t: (t, decorated(X)), (1.0,), (1.0,)), ((1.0, fn(X)), (1.0, 0 * fn(X))))


# -- parts of a program without a tangent -----------------------------------------------------


def scheduled(fn, text, *args):
    """Return a function under a plan that is given as text; ``N`` stands for its length."""
    flat = _program.flat_program(jax.make_jaxpr(fn)(*args))
    line = text.replace("N", str(len(flat.eqns)))
    return remat_kit.policy(remat_kit.planned(_schedule.describe(flat), *line.split(" / ")))(fn)


def test_a_plan_keeps_a_mask_of_integers():
    tokens = jnp.arange(4)

    def loss(x, tokens):
        mask = (tokens > 1).astype(jnp.int32) * 2
        y = jnp.tanh(x) * mask[None]
        return jnp.where(mask[None] > 0, y, jnp.sin(y)).sum()

    for text in (
        "0:N",
        "0:3 / 3:N",
        "0:3 save 1.0 2.0 / 3:N",
        "0:N save 1.0 around (0:3 save 1.0; 3:N)",
    ):
        got = jax.grad(scheduled(loss, text, X, tokens))(X, tokens)
        close(got, jax.grad(loss)(X, tokens))


@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_and_inputs_that_are_integers(policy, implementation):
    def fn(x, n):
        return jnp.tanh(x) * n, n + 1, x > 0

    decorated = remat_kit.policy(policy)(fn)
    loss = lambda f: lambda x: f(x, 3)[0].sum()  # noqa: E731
    close(jax.grad(loss(decorated))(X), jax.grad(loss(fn))(X))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("argument", [0, 1])
def test_only_some_inputs_of_a_shard_map_have_tangents(policy, argument, implementation):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")

    def local(x, w):
        return jax.lax.psum(jnp.tanh(x * jnp.sin(w)).sum(keepdims=True), "data")

    def loss(body):
        inside = jax.shard_map(
            body, mesh=mesh, in_specs=(spec, spec), out_specs=jax.sharding.PartitionSpec()
        )
        return lambda x, w: inside(x, w).sum()

    ours, plain = loss(remat_kit.policy(policy)(local)), loss(local)
    close(jax.grad(jax.jit(ours), argument)(X, X), jax.grad(jax.jit(plain), argument)(X, X))


# -- loops ------------------------------------------------------------------------------------


def regions(closed):
    """Yield the parameters of each checkpoint region of a program, those inside others too."""
    for eqn in closed.jaxpr.eqns:
        params = eqn.params.get("_prim", eqn).params
        if "prevent_cse" in params:
            yield params
        for body in _program.bodies(eqn):
            inner = body.jaxpr
            is_closed = isinstance(inner, jec.ClosedJaxpr) and hasattr(inner, "consts")
            yield from regions(inner if is_closed else jec.ClosedJaxpr(inner, ()))


def loss_of_block(x):
    return jnp.tanh(jnp.tanh(x @ x.T) @ x).sum()


def accumulate(loss, loop):
    grad = jax.grad(loss)
    xs = jnp.stack([X, 2 * X])
    if loop == "scan":
        return lambda: jax.lax.scan(lambda total, x: (total + grad(x), None), X, xs)[0]
    if loop == "fori_loop":
        return lambda: jax.lax.fori_loop(0, 2, lambda i, total: total + grad(xs[i]), X)
    return lambda: jax.lax.map(jax.jit(grad), xs)


@pytest.mark.parametrize("loop", ["scan", "fori_loop", "map"])
def test_a_gradient_inside_a_loop_keeps_its_barrier(loop):
    ours = accumulate(remat_kit.policy("nothing")(loss_of_block), loop)
    found = list(regions(jax.make_jaxpr(ours)()))
    assert found
    assert all(np.all(params["prevent_cse"]) for params in found)
    close(jax.jit(ours)(), accumulate(loss_of_block, loop)())


def test_a_loop_that_is_differentiated_needs_no_barrier():
    body = remat_kit.policy("nothing")(lambda x: jnp.tanh(x @ x.T) @ x)

    def loss(x):
        return jax.lax.scan(lambda x, _: (body(x), None), x, None, length=2)[0].sum()

    found = list(regions(jax.make_jaxpr(jax.grad(loss))(X)))
    assert found
    assert not any(np.any(params["prevent_cse"]) for params in found)


@pytest.mark.parametrize("reverse", [False, True])
def test_stacked_outputs_of_a_scan_in_two_loops(reverse):
    def loss(x):
        def body(carry, x):
            with jax.named_scope("block"):
                carry = jnp.tanh(carry + x)
            return carry, carry * 2

        _, ys = jax.lax.scan(body, x[0], x, reverse=reverse)
        return (ys * jnp.arange(12.0).reshape(3, 4)).sum()

    ours = remat_kit.policy(remat_kit.block(1), at="block")(loss)
    close(jax.grad(ours)(X), jax.grad(loss)(X))


def test_regions_for_the_first_iterations_of_a_scan():
    def loss(x):
        def body(carry, x):
            with jax.named_scope("block"):
                return jnp.tanh(carry + x), None

        return jax.lax.scan(body, x[0], x)[0].sum()

    closed = jax.make_jaxpr(remat_kit.policy(remat_kit.block(1), at="block")(loss))(X)
    scans = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan"]
    inside = {e.params["length"]: len(list(regions(e.params["jaxpr"]))) for e in scans}
    assert inside == {1: 1, 2: 0}


@pytest.mark.parametrize(
    "structure", [remat_kit.nested(), remat_kit.block(1), remat_kit.uniform(2)]
)
def test_a_scan_of_no_iterations(structure):
    def loss(x):
        def body(carry, x):
            with jax.named_scope("block"):
                return jnp.tanh(carry + x), carry

        carry, ys = jax.lax.scan(body, x[0], x[:0])
        return carry.sum() + ys.sum()

    close(jax.grad(remat_kit.policy(structure, at="block")(loss))(X), jax.grad(loss)(X))


# -- names ------------------------------------------------------------------------------------


def test_a_primitive_may_have_a_parameter_of_any_name():
    assert keep_labelled(jax.lax.add_p, prim=3, avals=4, params=5) is not None


@pytest.mark.parametrize("policy", POLICIES)
def test_complex_residuals(policy, implementation):
    z = X + 1j * X[::-1]
    loss = lambda z: jnp.abs(jnp.exp(z) * jnp.sin(z)).sum()  # noqa: E731
    close(jax.grad(remat_kit.policy(policy)(loss))(z), jax.grad(loss)(z))


def test_a_region_may_choose_a_branch(implementation):
    """The index of a conditional comes right out of a region."""

    def loss(x):
        with jax.named_scope("block"):
            index = jnp.minimum(jnp.max(jnp.arange(3)[: x.shape[0]]), jnp.argmax(x[0, :2]))
            index, y = jax.lax.clamp(0, index.astype(jnp.int32), 1), jnp.sin(x)
        return jax.lax.cond_p.bind(
            index, y, branches=tuple(jax.make_jaxpr(f)(y) for f in (jnp.cos, jnp.tanh))
        )[0].sum()

    close(jax.grad(remat_kit.policy("dots", at="block")(loss))(X), jax.grad(loss)(X))


# -- dead code --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_backward_rules_are_not_called_for_blocks_that_nothing_reads(policy, implementation):
    """The backward rule is not linear: for a cotangent of zeros it gives ones."""

    @jax.custom_vjp
    def rule(a):
        return jnp.sin(a)

    rule.defvjp(lambda a: (rule(a), a), lambda a, ct: (ct * jnp.cos(a) + 1,))

    def loss(x):
        with jax.named_scope("block_0"):
            y = x @ x.T @ x
            a = rule(y)
        with jax.named_scope("block_1"):
            z = jnp.sin(y) * x
        with jax.named_scope("block_2"):
            _ = a * a + y
        return z.sum()

    close(jax.grad(remat_kit.policy(policy, at="block_*")(loss))(X), jax.grad(loss)(X))


# -- found by random programs -----------------------------------------------------------------

FOUND = {
    "a forward pass is not computed as its derivative would": Case(
        Program(((Op("cumlogsumexp"),),)), Application("everything"), "value"
    ),
    "JAX pushes this forward and cannot linearize it": Case(
        Program(((Op("custom_vmap"),),)), Application("everything"), "jvp"
    ),
    "a region around others keeps complex values": Case(
        Program(
            ((Op("associative_scan", 3, 3),), (Op("associative_scan", 3, 3),), (Op("sum", 2),)),
            outputs=(1, 0, 2),
            used=(0, 1, 2),
            dtype="complex64",
        ),
        Application("schedule:2"),
        "linearized",
        flags=("jax_remat3",),
    ),
    "a forward pass is computed as JAX computes it on the way to its derivative": Case(
        Program(((Op("cond", body=(Op("abs"), Op("cumlogsumexp"))),),)),
        Application("everything"),
        "value",
        flags=("jax_remat3",),
    ),
}
_TWO = Op("vjp_two_outputs", 3, k=6)
FOUND["what a region only hands over has no cotangent"] = Case(
    Program(((_TWO, Op("checkpoint_names", b=2, k=3, body=(_TWO,))), (Op("abs", b=3, k=1),))),
    Application("schedule:2144"),
    "trained",
)
_ADD = (Op("nested_scan", 3, 0, 1, (Op("add", b=3),)), Op("add", 1, 0))
FOUND["tangents that nothing reads pass no barrier"] = Case(
    Program(((Op("linearize", 3, 0, 3, _ADD),), (Op("concatenate", 4, 4, 5),))),
    Application("schedule:6513"),
    "trained",
)
_OPS = (Op("dynamic_slice", 0, 2, 1), Op("prod", 0, 3, 6))
_MAPPED = Op("vmap", 4, k=4, body=_OPS)
FOUND["the body of a loop keeps nothing"] = Case(
    Program(
        (
            (_MAPPED,),
            (
                Op("scan_of_integers", k=1, body=(_MAPPED, Op("switch", 4, k=6, body=_OPS))),
                Op("dynamic_slice", 4, 3, 5),
            ),
        ),
        outputs=(0, 1),
    ),
    Application("plan:1"),
    "gradient of one",
)
for _name in ("jax_custom_jvp3", "jax_custom_vjp3"):
    FOUND[f"a backward rule is called once under {_name}"] = Case(
        Program(((Op("vjp_two_outputs", 2, 0, 6), Op("dot", 0, 4, 6)),)),
        Application("dots", at="block_*"),
        flags=("jax_remat3", _name),
    )
FOUND["names inside a jitted function inside a loop"] = Case(
    Program(((Op("map", body=(Op("clip", b=0),)),),)),
    Application(nested(keep=save(everything)), at="block_*"),
    "gradient",
    "traced",
    ("jax_remat3",),
)
FOUND["an index from one region is read in another one"] = Case(
    Program(
        (
            (
                Op("abs", b=0),
                Op("rsqrt", 2, 0, 0),
                Op("cond", 0, 1, 2, (Op("logsumexp", a=3, k=3),)),
            ),
        )
    ),
    Application("pieces:2466"),
    "mixed",
    "traced",
    ("jax_remat3",),
)
FOUND["what is behind a stop_gradient in pieces has no tangent"] = Case(
    Program(((Op("rsqrt", 4, 1, 3), Op("nextafter", 3, 2, 1)),), outputs=(0, 0), used=(1,)),
    Application("pieces:2466"),
    "mixed",
    "traced",
)
FOUND["a value that nothing reads is not divided"] = Case(
    Program(((Op("abs", b=0), Op("abs", 1, 0, 0)),)), Application("pieces:0"), mode="traced"
)
for _loop, _body in (("accumulated", "atan2"), ("nested_scan", "abs"), ("scan", "abs")):
    FOUND[f"{_loop} over arrays without elements"] = Case(
        Program(((Op(_loop, b=0, body=(Op(_body, b=0),)),),), outputs=(0,), rows=0),
        Application("plan:0"),
    )
if jax.__version_info__ >= (0, 11):  # before, `jax.checkpoint` gives other digits too
    FOUND["a product of complex numbers in a loop"] = Case(
        Program(
            ((Op("map", b=0, body=(Op("add", b=0), Op("prod", b=0))), Op("barrier", b=2)),),
            dtype="complex64",
        ),
        Application("dots"),
        "gradient of one",
        "traced",
        ("jax_remat3",),
    )
FOUND["a plan of a program with an array of NumPy"] = Case(
    Program(((Op("array_constant", b=0),),), outputs=(0,), used=(0,)), Application("plan:0")
)


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_random_programs_that_were_wrong(case):
    assert case.check()


def test_flags_are_put_back():
    before = jax.config.jax_remat3
    with flagged(("jax_remat3",)):
        assert jax.config.jax_remat3
    assert jax.config.jax_remat3 == before


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10 has no vmap of such regions")
def test_the_jvp_of_a_gradient_of_nested_regions_is_beyond_jax():
    """What docs/differences.md says of `jax.checkpoint` and of plans, under ``jax_remat3``."""
    named = jax.checkpoint_policies.save_only_these_names("inside")

    def inner(x):
        return jnp.sin(checkpoint_name(jnp.sin(x), "inside"))

    fn = jax.checkpoint(lambda x: jnp.cos(jax.checkpoint(inner)(x)), policy=named)
    loss = lambda x: jnp.sum(fn(x) ** 2)  # noqa: E731
    with flagged(("jax_remat3",)):
        assert jax.jacrev(jax.grad(loss))(X[0]).shape == (4, 4)
        with pytest.raises(AssertionError):
            jax.hessian(loss)(X[0])


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10 saves no names there")
def test_second_derivatives_that_jax_itself_changes_or_lacks():
    """What docs/differences.md says of ``jax_remat3``: `jax.checkpoint` alone does it."""

    @jax.custom_gradient
    def double(x):
        return jnp.sin(x), lambda ct: 2 * ct * jnp.cos(x)

    def fn(x):
        return jnp.sin(x * checkpoint_name(double(x), "inside"))

    def second(fn):
        first = jax.grad(lambda x: jnp.sum(fn(x) ** 2))
        return jax.grad(lambda x: jnp.sum(first(x) ** 2))

    policies = jax.checkpoint_policies
    offloaded = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["inside"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    with flagged(("jax_remat3",)):
        saved = second(jax.checkpoint(fn, policy=policies.save_only_these_names("inside")))
        assert not np.allclose(saved(X[0]), second(fn)(X[0]), rtol=1e-3)
        with pytest.raises(ValueError, match="host"):
            jax.make_jaxpr(second(jax.checkpoint(fn, policy=offloaded)))(X[0])
