"""Lints about the rules of a policy: each is found, and its fix takes it away."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from lint_programs import TOWER, codes, codes_with, f32, fixed, named_tower, only, tower

import remat_kit
from remat_kit import UnknownNameError, inspect
from remat_kit._inspect.lints.scene import policy_call
from remat_kit._jax import JAX_VERSION, policy_names
from remat_kit._policy.reading import as_policy

# Many of the programs are made to have a policy without an effect, which is a warning too.
pytestmark = pytest.mark.filterwarnings("ignore::remat_kit.RematKitWarning")


def test_dropped_offload():
    moved = remat_kit.policy("offload(dots)", at="layer_*")(tower)
    assert "offload-dropped" in codes_with(moved, host_bytes=1024)
    assert "offload-dropped" not in codes_with(moved, host_bytes=3 * 8 * 32 * 4)
    assert "offload-dropped" not in codes_with(tower, host_bytes=0)


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


@jax.custom_vjp
def two_results(x):
    return _kernel(x)


def _two_fwd(x):
    out, rest = _both(x)
    return out, (out, rest)


@jax.custom_vjp
def _both(x):
    out = _kernel(x)
    return out, jnp.log(out[..., 0] ** 2 + 1.0)


_both.defvjp(lambda x: (_both(x), x), lambda x, g: (x,))
two_results.defvjp(_two_fwd, lambda kept, g: (g * kept[0] * kept[1][..., None],))


def test_a_kernel_whose_results_are_used_inside_of_a_custom_rule():
    """Its forward rule calls another custom rule, as the flash attention of JAX does."""

    def loss(w, x):
        return jnp.sum(jnp.exp(two_results(x @ w)))

    args = f32(16, 16), f32(8, 16)
    lint = only(inspect(remat_kit.policy("dots")(loss), *args), "opaque-kernel")
    report = inspect(fixed(lint, loss), *args)
    assert "pallas_call" not in {r.primitive for r in report.recomputed}
    assert report.saved_bytes < 3 * 8 * 16 * 4 + 16 * 16 * 4


# -- collectives of partitioned programs -----------------------------------------------------------

MESH = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))


def on_mesh(*dims, split):
    return jax.ShapeDtypeStruct(
        dims, jnp.float32, sharding=NamedSharding(MESH, PartitionSpec(*split))
    )


def gathering(weights, x):
    """A loss whose layers read parameters that are split over the devices of the batch."""
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = x + jnp.tanh(jnp.sin(x @ w) @ w.T)
    return jnp.mean(x**2)


GATHERING = ([on_mesh(64, 128, split=("data", None))] * 3, on_mesh(512, 64, split=("data", None)))


def adding(weights, x):
    """A loss whose first product in each layer has a split dimension that is added up."""
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = x + jnp.sin(jnp.tanh(x @ w) @ w.T)
    return jnp.mean(x**2)


ADDING = ([on_mesh(64, 128, split=(None, "data"))] * 3, on_mesh(512, 64, split=()))


def repeated(fn, args, **how):
    """Return the repeated collectives of a partitioned loss, and the fixes of the lints."""
    report = inspect(fn, *args, target="cpu", **how)
    found = [c for c in report.readings["cpu:4"].collectives if c.repeated]
    return found, [lint.fix for lint in report.lints if lint.code == "collective-repeated"]


def decorated(fix, fn):
    """Return a function with the policy of a fix."""
    return eval(fix, {"remat_kit": remat_kit})(fn)


def test_the_fix_of_gathered_parameters_removes_their_second_gathering():
    assert repeated(gathering, GATHERING) == ([], [])
    found, fixes = repeated(gathering, GATHERING, policy="nothing", at="layer_*")
    assert {c.kind for c in found} == {"all-gather"}
    assert set(fixes) == {'remat_kit.policy("save(collective)", at="layer_*")'}
    again = decorated(fixes[0], gathering)
    assert repeated(again, GATHERING) == ([], [])
    # The gathered parameters alone are saved: the activations are still recomputed.
    plain = inspect(gathering, *GATHERING, policy="nothing", at="layer_*")
    assert inspect(again, *GATHERING).recomputed_flops == plain.recomputed_flops > 0


def test_the_fix_keeps_what_the_policy_keeps():
    found, fixes = repeated(gathering, GATHERING, policy="save(primitive('sin'))", at="layer_*")
    assert found
    assert set(fixes) == {
        """remat_kit.policy("save(collective) | save(primitive('sin'))", at="layer_*")"""
    }
    assert repeated(decorated(fixes[0], gathering), GATHERING) == ([], [])


def test_a_repetition_that_the_selector_does_not_see_has_another_fix():
    """With explicit axes, a product gathers its operand without an operation that says so."""
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Explicit,))

    def loss(weights, x):
        for i, w in enumerate(weights):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(jnp.sin(jnp.dot(x, w, out_sharding=rows)))
        return jnp.mean(x**2)

    rows = NamedSharding(mesh, PartitionSpec("data", None))
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=rows)
    x = jax.ShapeDtypeStruct((512, 64), jnp.float32, sharding=rows)
    with jax.sharding.use_abstract_mesh(mesh):
        how = {"policy": "nothing | save(collective)", "at": "layer_*"}
        with pytest.warns(remat_kit.RematKitWarning, match="selects none"):
            found, fixes = repeated(loss, ([w] * 3, x), **how)
    assert {c.kind for c in found} == {"all-gather"}
    assert "named('gathered')" in fixes[0]


@pytest.mark.skipif(
    JAX_VERSION < (0, 11), reason="XLA:CPU of JAX 0.10.2 adds up once, whatever the policy says"
)
def test_the_fix_of_a_product_that_is_added_up_again_removes_the_second_sum():
    assert repeated(adding, ADDING) == ([], [])
    found, fixes = repeated(adding, ADDING, policy="nothing", at="layer_*")
    assert {c.kind for c in found} == {"all-reduce"}
    assert repeated(decorated(fixes[0], adding), ADDING) == ([], [])
