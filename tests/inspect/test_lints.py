"""Lints: each is found where it is planted, its fix takes it away, and sound programs have none."""

import dataclasses
import functools
import json
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import Mesh, PartitionSpec
from zoo import load

import remat_kit
from remat_kit import Comparison, Lint, UnknownNameError, inspect
from remat_kit._inspect.lints.lint import lints_of, raised_peak
from remat_kit._inspect.lints.scene import CompiledFacts, as_at, policy_call
from remat_kit._inspect.recomputed import forward_flops, recomputed_of
from remat_kit._inspect.residuals import kept_of
from remat_kit._jax import policy_names
from remat_kit._policy.reading import as_policy
from remat_kit._program.gradient import trace_gradient
from remat_kit._units import format_bytes

# Many of the programs are made to have a policy without an effect, which is a warning too.
pytestmark = pytest.mark.filterwarnings("ignore::remat_kit.RematKitWarning")


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def codes(report):
    return [lint.code for lint in report.lints]


def only(report, code):
    (found,) = [lint for lint in report.lints if lint.code == code]
    return found


def fixed(lint, fn, **names):
    """Run the text of a fix: what it applies is applied to ``fn``."""
    if lint.fix.startswith("layer = "):
        scope = {"remat_kit": remat_kit, "layer": fn}
        exec(lint.fix, scope)
        return scope["layer"]
    return eval(lint.fix, {"remat_kit": remat_kit, **names})(fn)


def same_gradients(f, g, *args):
    """The gradients of both, run operation by operation, are equal to the last bit."""
    filled = jax.tree.map(filled_like, args)
    with jax.disable_jit():  # a compiled loop may keep bfloat16 values wider than they are
        gradients = [jax.tree.leaves(jax.grad(h)(*filled)) for h in (f, g)]
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_array_equal(a, b)


def filled_like(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key(7)
    if x.dtype == jnp.uint32:
        return jax.random.PRNGKey(7)
    return jax.random.normal(jax.random.key(x.size), x.shape).astype(x.dtype)


# -- kept, though something smaller would do -----------------------------------------------------


def upcast(w, x):
    y = jnp.sin(x @ w).astype(jnp.float32)
    return jnp.sum(jnp.sin(y) * y)


def test_saved_upcast():
    args = bf16(32, 32), bf16(64, 32)
    lint = only(inspect(upcast, *args), "saved-upcast")
    assert lint.bytes == 64 * 32 * (4 - 2)
    assert "float32 copy of bfloat16 values, 8 KiB" in lint.message
    assert "its source takes 4 KiB" in lint.message
    assert "test_lints.py:" in lint.message
    assert lint.source in lint.message
    after = fixed(lint, upcast)
    assert "saved-upcast" not in codes(inspect(after, *args))
    assert inspect(after, *args).saved_bytes < inspect(upcast, *args).saved_bytes
    same_gradients(upcast, after, *args)


def test_saved_upcast_in_a_loop_is_fixed_in_its_body():
    def layer(c, w):
        y = (c @ w).astype(jnp.float32)
        return (jnp.sin(y) * y).astype(c.dtype), None

    def loss(layer, w, x):
        return jax.lax.scan(layer, x, w)[0].astype(jnp.float32).sum()

    args = bf16(4, 16, 16), bf16(8, 16)
    lint = only(inspect(functools.partial(loss, layer), *args), "saved-upcast")
    assert lint.bytes == 4 * 8 * 16 * 2
    assert "the body of the loop" in lint.fix
    after = functools.partial(loss, fixed(lint, layer))
    assert "saved-upcast" not in codes(inspect(after, *args))
    same_gradients(functools.partial(loss, layer), after, *args)


def test_upcast_that_a_policy_keeps():
    args = bf16(32, 32), bf16(64, 32)
    keep = "save(primitive('convert_element_type') | dots)"
    lint = only(inspect(upcast, *args, policy=keep), "saved-upcast")
    assert f">> {keep}" in lint.fix
    after = inspect(fixed(lint, upcast), *args)
    assert "saved-upcast" not in codes(after)
    assert {r.primitive for r in after.saved} == {"dot_general"}


def test_upcast_that_is_the_input_of_a_region():
    def loss(x):
        y = jnp.tanh(x).astype(jnp.float32)
        return jax.checkpoint(lambda y: jnp.sum(jnp.sin(jnp.exp(y))))(y)

    lint = only(inspect(loss, bf16(64)), "saved-upcast")
    assert lint.fix.startswith("# move this convert_element_type into the block")


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: upcast(w.astype(jnp.float32), x.astype(jnp.float32)) * 0.5,
        lambda w, x: jnp.sum(jnp.sin(x @ w).astype(jnp.float32)),
    ],
    ids=["of an argument's product", "linear from there on"],
)
def test_no_upcast(loss):
    assert "saved-upcast" not in codes(inspect(loss, f32(32, 32), f32(64, 32)))
    assert "saved-upcast" not in codes(inspect(loss, bf16(32, 32), f32(64, 32)))


def test_saved_view():
    def loss(w, x):
        k = jnp.sin(x @ w)
        many = jnp.broadcast_to(k[None], (16, *k.shape))
        return jnp.sum(jnp.sin(many * many))

    args = f32(32, 32), f32(64, 32)
    lint = only(inspect(loss, *args), "saved-view")
    assert lint.bytes == 15 * 64 * 32 * 4
    assert "result of broadcast_in_dim, 128 KiB" in lint.message
    after = fixed(lint, loss)
    assert "saved-view" not in codes(inspect(after, *args))
    assert inspect(after, *args).saved_bytes <= inspect(loss, *args).saved_bytes - lint.bytes
    same_gradients(loss, after, *args)


def transposed(x, w):
    y = jnp.exp(x @ w)
    return jnp.sin(y) * (y.T * jnp.cos(y.T)).T


def test_saved_transpose_counts_in_a_loop_only():
    def looped(w, x):
        return jax.lax.scan(lambda c, w: (transposed(c, w), None), x, w)[0].sum()

    def once(w, x):
        return transposed(x, w).sum()

    lint = only(inspect(looped, f32(3, 8, 8), f32(8, 8)), "saved-view")
    assert "transpose" in lint.message
    assert "is in memory anyway" in lint.message
    assert lint.bytes == 3 * 8 * 8 * 4
    assert codes(inspect(once, f32(8, 8), f32(8, 8))) == []


def test_what_is_small_beside_the_rest_is_left_out():
    def loss(x, y):
        return upcast(*x) + jnp.sum(jnp.sin(jnp.tanh(y)))

    small = (bf16(2, 2), bf16(2, 2))
    assert "saved-upcast" not in codes(inspect(loss, small, f32(64, 64), argnums=(0, 1)))
    assert "saved-upcast" in codes(inspect(loss, small, f32(2, 2), argnums=(0, 1)))


# -- dropout -------------------------------------------------------------------------------------


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.Dense(16, name=f"dense_{i}")(x)
            x = jnp.sin(nn.Dropout(0.5, deterministic=False, name=f"drop_{i}")(x))
        return x


def linen_dropout(params, x, key):
    return Dropped().apply(params, x, rngs={"dropout": key}).sum()


KEYS = [jax.eval_shape(lambda: jax.random.key(0)), jax.eval_shape(lambda: jax.random.PRNGKey(0))]


@pytest.mark.parametrize("key", KEYS, ids=["typed key", "raw key"])
def test_dropout_mask(key):
    x = f32(8, 16)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    args = jax.eval_shape(Dropped().init, rngs, x), x, key
    before = inspect(linen_dropout, *args)
    lint = only(before, "dropout-mask-saved")
    assert (lint.module, lint.bytes) == ("Dropped/drop_*", 2 * 8 * 16)
    assert lint.fix == "remat_kit.policy(\"recompute(module('Dropped/drop_*'))\")"
    after = fixed(lint, linen_dropout)
    report = inspect(after, *args)
    assert "dropout-mask-saved" not in codes(report)
    assert "bool" not in {r.dtype for r in report.saved}
    assert report.saved_bytes < before.saved_bytes
    same_gradients(linen_dropout, after, *args)


def test_dropout_without_a_module():
    def loss(w, x, key):
        y = x @ w
        mask = jax.random.bernoulli(key, 0.5, y.shape)
        return jnp.sum(jnp.sin(jnp.where(mask, y, 0.0)))

    args = f32(16, 16), f32(8, 16), KEYS[0]
    lint = only(inspect(loss, *args), "dropout-mask-saved")
    assert "source(" in lint.fix
    after = fixed(lint, loss)
    assert "dropout-mask-saved" not in codes(inspect(after, *args))
    same_gradients(loss, after, *args)


def test_a_mask_that_is_no_dropout():
    def loss(w, x):
        y = x @ w
        return jnp.sum(jnp.sin(jnp.where(y > 0, y, 0.0)))

    assert codes(inspect(loss, f32(16, 16), f32(8, 16))) == []


# -- regions -------------------------------------------------------------------------------------


def tower(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


TOWER = [f32(32, 32)] * 3, f32(8, 32)


@pytest.mark.parametrize("wrap", [remat_kit.policy("nothing"), jax.checkpoint])
def test_whole_loss_region(wrap):
    lint = only(inspect(wrap(tower), *TOWER), "whole-loss-region")
    assert "holds 100 % of the loss's FLOPs and computes 99 % again" in lint.message
    assert lint.fix == 'remat_kit.policy("nothing", at="*/layer_*")'
    assert codes(inspect(fixed(lint, tower), *TOWER)) == []


def test_whole_loss_region_of_a_scan():
    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w), None

    def loss(w, x, body=layer):
        return jnp.mean(jax.lax.scan(body, x, w)[0] ** 2)

    args = f32(4, 16, 16), f32(8, 16)
    lint = only(inspect(loss, *args, policy="nothing"), "whole-loss-region")
    assert lint.fix == 'remat_kit.policy("nothing", at="*/layer")'
    assert codes(inspect(fixed(lint, loss), *args)) == []
    body = remat_kit.policy("nothing")(layer)
    assert codes(inspect(functools.partial(loss, body=body), *args)) == []


def test_whole_loss_region_without_modules():
    def plain(w, x):
        for i in range(3):
            x = jnp.tanh(x @ w[i])
        return jnp.mean(x**2)

    lint = only(inspect(plain, f32(3, 16, 16), f32(8, 16), policy="nothing"), "whole-loss-region")
    assert lint.fix.startswith('layer = remat_kit.policy("nothing")(layer)')


@pytest.mark.parametrize("policy", ["dots", "nothing"])
def test_regions_of_layers_are_sound(policy):
    assert codes(inspect(tower, *TOWER, policy=policy, at="*/layer_*")) == []


def test_a_region_that_keeps_everything():
    lint = only(inspect(tower, *TOWER, policy="everything", at="*/layer_*"), "no-effect")
    assert "3 checkpoint regions of layer_*" in lint.message
    assert "everything that the backward pass needs of it is saved" in lint.message
    assert codes(inspect(fixed(lint, tower), *TOWER)) == []


def test_a_region_with_nothing_to_recompute():
    def loss(x):
        y = jnp.sin(jnp.tanh(x))
        return jax.checkpoint(lambda y: jnp.sum(2.0 * y))(y)

    lint = only(inspect(loss, f32(8)), "no-effect")
    assert "needs nothing that is computed in it" in lint.message


def test_a_rule_that_selects_nothing():
    policy = "save(dots) | offload(named('x', strict=False))"
    lint = only(inspect(tower, *TOWER, policy=policy), "no-effect")
    assert "offload(named('x', strict=False)) selects no value" in lint.message
    assert lint.fix == 'remat_kit.policy("save(dots)")'
    assert codes(inspect(fixed(lint, tower), *TOWER)) == []


def named_tower(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(remat_kit.name(jnp.sin(x @ w), "attn_out"))
    return jnp.mean(x**2)


def test_a_rule_with_a_name_that_is_nearly_there():
    policy = "save(named('atn_out', strict=False))"
    lint = only(inspect(named_tower, *TOWER, policy=policy, at="layer_*"), "no-effect")
    assert lint.fix == 'remat_kit.policy("save(named(\'attn_out\'))", at="layer_*")'
    assert codes(inspect(fixed(lint, named_tower), *TOWER)) == []


def test_a_module_that_is_never_called():
    for policy, at in (("nothing", "*/extra"), ("recompute(module('**/extra'))", None)):
        with pytest.raises(UnknownNameError, match=r"no module is named '.*extra'"):
            inspect(tower, *TOWER, policy=policy, at=at)
    silent = "recompute(module('**/extra', strict=False)) >> save(dots)"
    lint = only(inspect(tower, *TOWER, policy=silent), "no-effect")
    assert "module('**/extra', strict=False)" in lint.message


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_decorated_class_that_is_never_called(kind):
    base = nn.Module if kind == "linen" else nnx.Module

    @remat_kit.policy("nothing")
    class Forgotten(base):
        def __call__(self, x):
            return jnp.sin(x)

    lint = only(inspect(tower, *TOWER), "no-effect")
    assert "remat_kit.policy('nothing') decorates Forgotten, and no Forgotten has been" in (
        lint.message
    )
    assert lint.source.startswith("tests/inspect/test_lints.py:")
    if kind == "linen":
        Forgotten().apply({}, jnp.ones(3))
    else:
        Forgotten()(jnp.ones(3))
    assert codes(inspect(tower, *TOWER)) == []


def test_a_class_of_another_file_is_not_missed():
    code = "import remat_kit\nfrom flax import linen as nn\n@remat_kit.policy('nothing')\n"
    module = types.ModuleType("another")
    exec(code + "class Forgotten(nn.Module): pass", module.__dict__)
    assert codes(inspect(tower, *TOWER)) == []
    # Some equations of this model have no file, as the class has none.
    fn, args = load("mlp").build(None, **SIZES["mlp"][0])
    assert codes(inspect(fn, *args)) == []


def test_parameters_that_nothing_reads():
    def loss(params, x):
        return jnp.sum(jnp.sin(x @ params["used"]["kernel"]))

    layer = {"kernel": f32(8, 8), "bias": f32(8)}
    params = {"used": {"kernel": f32(8, 8)}, "extra": layer}
    lint = only(inspect(loss, params, f32(4, 8)), "no-effect")
    assert "the argument params['extra'], 288 B, is ever read" in lint.message
    exec(lint.fix, {"params": params})
    assert codes(inspect(loss, params, f32(4, 8))) == []


# -- what the compiler undoes --------------------------------------------------------------------


def test_prevent_cse_outside_a_loop():
    loose = remat_kit.policy("nothing", at="layer_*", prevent_cse=False)(tower)
    lint = only(inspect(loose, *TOWER), "cse-undone")
    assert "prevent_cse=False on 3 regions outside a loop in layer_*" in lint.message
    assert "are left" not in lint.message
    lint = only(inspect(loose, *TOWER, target="cpu"), "cse-undone")
    assert "cpu: 0 of 3 recomputed products are left" in lint.message
    assert codes(inspect(fixed(lint, tower), *TOWER, target="cpu")) == []


def test_prevent_cse_of_jax():
    def loss(w, x, body, **kwargs):
        return jnp.mean(body(jax.checkpoint(lambda x, w: jnp.tanh(x @ w), **kwargs), w, x) ** 2)

    def unrolled(layer, w, x):
        return layer(layer(x, w[0]), w[1])

    def scanned(layer, w, x):
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]

    def found(body, **kwargs):
        return inspect(functools.partial(loss, body=body, **kwargs), f32(2, 8, 8), f32(4, 8))

    lint = only(found(unrolled, prevent_cse=False), "cse-undone")
    assert lint.fix.startswith("prevent_cse=True")
    assert "cse-undone" not in codes(found(unrolled))
    assert "cse-undone" not in codes(found(scanned, prevent_cse=False))


def test_prevent_cse_is_no_fault_where_the_recompute_is_left():
    loose = remat_kit.policy("nothing", at="layer_*", prevent_cse=False)(tower)
    assert "cse-undone" in codes_with(loose, types.SimpleNamespace(heavy=0, total=0))
    assert "cse-undone" not in codes_with(loose, types.SimpleNamespace(heavy=3, total=6))


def codes_with(fn, hlo=None, **memory):
    gradient = trace_gradient(fn, TOWER, call="test")
    found = lints_of(
        gradient,
        kept_of(gradient),
        recomputed_of(gradient),
        forward_flops=forward_flops(gradient),
        compiled={"chip": CompiledFacts(types.SimpleNamespace(target="chip", **memory), hlo)}
        if memory
        else {"chip": CompiledFacts(types.SimpleNamespace(target="chip", host_bytes=None), hlo)},
    )
    return [lint.code for lint in found]


def test_dropped_offload():
    moved = remat_kit.policy("offload(dots)", at="layer_*")(tower)
    assert "offload-dropped" in codes_with(moved, host_bytes=1024)
    assert "offload-dropped" not in codes_with(moved, host_bytes=3 * 8 * 32 * 4)
    assert "offload-dropped" not in codes_with(tower, host_bytes=0)


def test_a_policy_that_raises_the_peak():
    report = inspect(tower, *TOWER, policy="nothing", at="layer_*", target="cpu")
    memory = report.memory["cpu"]
    less = dataclasses.replace(memory, temp_bytes=memory.temp_bytes // 2)
    lint = raised_peak(memory, less)
    assert lint is not None
    assert lint.bytes == memory.temp_bytes - memory.temp_bytes // 2
    assert f"{format_bytes(memory.temp_bytes)} of temporaries" in lint.message
    assert raised_peak(less, memory) is None
    assert raised_peak(memory, None) is None
    none = dataclasses.replace(inspect(tower, *TOWER), memory={"cpu": less})
    both = Comparison((report, none))
    assert [codes(r) for r in both.reports] == [[], ["region-raises-peak"]]
    assert "region-raises-peak" in str(both)
    again = Comparison(both.reports)
    assert codes(again.reports[1]) == ["region-raises-peak"]


# -- names ---------------------------------------------------------------------------------------


def jax_named(*names, **kwargs):
    make = kwargs.pop("make", jax.checkpoint_policies.save_only_these_names)
    policy = make(*names, **kwargs)

    def loss(weights, x):
        def layer(x, w):
            return jnp.tanh(remat_kit.name(jnp.sin(x @ w), "attn_out"))

        for w in weights:
            x = jax.checkpoint(layer, policy=policy)(x, w)
        return jnp.mean(x**2)

    return loss


def test_unknown_name_of_a_jax_policy():
    lint = only(inspect(jax_named("atn_out"), *TOWER), "unknown-name")
    assert "asks for the name 'atn_out', which no value has" in lint.message
    assert "did you mean 'attn_out'?" in lint.message
    assert lint.fix == "remat_kit.policy(\"save(named('attn_out'))\")"
    assert "unknown-name" not in codes(inspect(jax_named("attn_out"), *TOWER))
    lint = only(inspect(jax_named("attn_out", "zzz"), *TOWER), "unknown-name")
    assert "there are: 'attn_out'" in lint.message
    assert "remat_kit.name(x, 'zzz')" in lint.fix


def test_unknown_name_of_ours_is_an_error():
    with pytest.raises(UnknownNameError, match=r"'atn_out'[\s\S]*did you mean 'attn_out'"):
        inspect(named_tower, *TOWER, policy="save(named('atn_out'))")


def test_names_of_jax_policies():
    policies = jax.checkpoint_policies
    only_these = policies.save_only_these_names("a", "b")
    assert policy_names(only_these) == {"save": {"a", "b"}}
    assert policy_names(policies.save_any_names_but_these("c")) == {"recompute": {"c"}}
    moved = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["a"],
        names_which_can_be_offloaded=["d"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    assert policy_names(moved) == {"save": {"a"}, "offload": {"d"}}
    both = policies.save_from_both_policies(only_these, policies.save_only_these_names("e"))
    assert policy_names(both) == {"save": {"a", "b", "e"}}
    for other in (None, policies.dots_saveable, lambda *_, **__: True, as_policy("dots")):
        assert policy_names(other) == {}


# -- offloading, collectives, kernels ------------------------------------------------------------


def test_tiny_offload():
    lint = only(inspect(tower, *TOWER, policy="offload(dots)", at="layer_*"), "tiny-offload")
    assert "3 values such as float32[8,32], 3 KiB in transfers of 1 KiB" in lint.message
    assert "10 µs" in lint.message
    after = inspect(fixed(lint, tower), *TOWER)
    assert after.offloaded_bytes == 0
    assert sum(r.bytes for r in after.saved if r.primitive == "dot_general") == lint.bytes
    large = [f32(512, 512)], f32(1024, 512)
    assert codes(inspect(tower, *large, policy="offload(dots)", at="layer_*")) == []


def test_tiny_offload_of_a_jax_policy():
    kwargs = {"offload_src": "device", "offload_dst": "pinned_host"}
    loss = jax_named(
        make=jax.checkpoint_policies.save_and_offload_only_these_names,
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["attn_out"],
        **kwargs,
    )
    lint = only(inspect(loss, *TOWER), "tiny-offload")
    assert as_policy(lint.fix.split('"')[1]) is not None


def test_recomputed_collective():
    mesh = Mesh(np.array(jax.devices()[:1]), ("i",))
    specs = {"in_specs": (PartitionSpec("i"), PartitionSpec(None, "i"))}

    @functools.partial(jax.shard_map, mesh=mesh, **specs, out_specs=PartitionSpec())
    def loss(w, x):
        y = jax.lax.psum(x @ w, "i")
        return jnp.sum(jnp.sin(y) * jnp.exp(y))

    args = f32(16, 16), f32(8, 16)
    lint = only(inspect(loss, *args, policy="nothing"), "collective-recomputed")
    assert lint.bytes == 8 * 16 * 4
    assert lint.message.startswith("psum")
    assert "is recomputed once" in lint.message
    assert lint.fix == 'remat_kit.policy("save(collective)")'
    assert codes(inspect(fixed(lint, loss), *args)) == []
    assert codes(inspect(loss, *args)) == []


def _sine(x_ref, o_ref):
    o_ref[...] = jnp.sin(x_ref[...])


def _kernel(x):
    return pl.pallas_call(_sine, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(
        x
    )


@jax.custom_vjp
def kernel(x):
    return _kernel(x)


def _kernel_fwd(x):
    out = _kernel(x)
    return out, out


kernel.defvjp(_kernel_fwd, lambda out, g: (g * out,))


def with_kernel(w, x):
    return jnp.sum(jnp.exp(kernel(x @ w)))


@pytest.mark.parametrize(
    ("before", "keep"),
    [
        (remat_kit.policy("dots")(with_kernel), "save(primitive('pallas_call')) | save(dots)"),
        (
            jax.checkpoint(with_kernel, policy=jax.checkpoint_policies.dots_saveable),
            "save(primitive('pallas_call') | dots)",
        ),
    ],
    ids=["remat_kit", "jax"],
)
def test_opaque_kernel(before, keep):
    args = f32(16, 16), f32(8, 16)
    lint = only(inspect(before, *args), "opaque-kernel")
    assert "pallas_call is recomputed once" in lint.message
    assert lint.bytes == 8 * 16 * 4
    assert lint.fix == policy_call(keep)
    assert "opaque-kernel" not in codes(inspect(fixed(lint, with_kernel), *args))


def test_a_kernel_that_was_to_be_recomputed():
    report = inspect(with_kernel, f32(16, 16), f32(8, 16), policy="nothing")
    assert "pallas_call" in {r.primitive for r in report.recomputed}
    assert "opaque-kernel" not in codes(report)


# -- sound models have none ----------------------------------------------------------------------

SIZES = {
    "mlp": [{"batch": 4, "features": 8, "hidden": 6, "classes": 3}],
    "gpt": [
        {"size": "tiny", "batch": 2},
        {"size": "tiny", "batch": 2, "scan": True},
        {"size": "tiny", "batch": 2, "dtype": "bf16"},
    ],
    "gpt_nnx": [{"size": "tiny", "batch": 2}],
    "resnet": [{"depth": 18, "batch": 2, "image": 32, "width": 4, "classes": 10}],
}


@pytest.mark.parametrize("policy", [None, "nothing", "dots"])
@pytest.mark.parametrize(("name", "size"), [(n, s) for n, sizes in SIZES.items() for s in sizes])
def test_models_have_no_lint(name, size, policy):
    fn, args = load(name).build(policy, **size)
    assert inspect(fn, *args).lints == ()


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", ["gpt", "gpt_nnx"])
def test_models_with_dropout(name, scan):
    fn, args = load(name).build(size="tiny", batch=2, dropout=0.1, scan=scan)
    before = inspect(fn, *args)
    assert set(codes(before)) == {"dropout-mask-saved"}
    lint = before.lints[0]
    assert lint.module.endswith("attn/dropout")
    after = inspect(fixed(lint, fn), *args)
    assert lint.module not in {x.module for x in after.lints}
    assert after.saved_bytes < before.saved_bytes


def test_whole_gpt_as_one_region():
    fn, args = load("gpt").build(size="tiny", batch=2)
    lint = only(inspect(fn, *args, policy="nothing"), "whole-loss-region")
    assert lint.fix == 'remat_kit.policy("nothing", at="*/block_*")'
    assert codes(inspect(fixed(lint, fn), *args)) == []


# -- how they print ------------------------------------------------------------------------------


def test_reports_show_lints():
    report = inspect(tower, *TOWER, policy="nothing")
    (lint,) = report.lints
    assert isinstance(lint, Lint)
    plain = json.loads(json.dumps(report.to_json()))["lints"]
    assert plain == [lint.to_json()]
    assert plain[0].keys() == {"code", "message", "fix", "module", "source", "bytes"}
    for shown in (str(report), str(Comparison((report, inspect(tower, *TOWER))))):
        assert "whole-loss-region" in shown
        assert lint.fix in shown
    assert str(lint).endswith(f"fix: {lint.fix}")
    sound = inspect(tower, *TOWER, policy="nothing", at="layer_*")
    for shown in (sound, Comparison((sound,))):
        assert "lints" not in [table.title for table in shown.tables()]


def test_patterns_for_at():
    assert as_at("") is None
    assert as_at("GPT/decoder/block_*") == "*/decoder/block_*"
