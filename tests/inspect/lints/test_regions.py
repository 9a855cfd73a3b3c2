"""Lints about regions: each is found, and its fix takes it away."""

import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from lint_programs import SIZES, TOWER, codes, codes_with, f32, fixed, named_tower, only, tower
from zoo import load

import remat_kit
from remat_kit import UnknownNameError, inspect

# Many of the programs are made to have a policy without an effect, which is a warning too.
pytestmark = pytest.mark.filterwarnings("ignore::remat_kit.RematKitWarning")


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
    # The class is missed because the loss is in its file.
    def loss(weights, x):
        return tower(weights, jnp.sin(x))

    base = nn.Module if kind == "linen" else nnx.Module

    @remat_kit.policy("nothing")
    class Forgotten(base):
        def __call__(self, x):
            return jnp.sin(x)

    lint = only(inspect(loss, *TOWER), "no-effect")
    assert "remat_kit.policy('nothing') decorates Forgotten, and no Forgotten has been" in (
        lint.message
    )
    assert lint.source.startswith("tests/inspect/lints/test_regions.py:")
    if kind == "linen":
        Forgotten().apply({}, jnp.ones(3))
    else:
        Forgotten()(jnp.ones(3))
    assert codes(inspect(loss, *TOWER)) == []


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
