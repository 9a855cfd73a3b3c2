"""Programs with planted faults, and what their lints say."""

import types

import jax
import jax.numpy as jnp

import remat_kit
from remat_kit._chip.memory import Memory
from remat_kit._inspect.lints.lint import lints_of
from remat_kit._inspect.lints.scene import CompiledFacts
from remat_kit._inspect.recomputed import forward_flops, recomputed_of
from remat_kit._inspect.residuals import kept_of
from remat_kit._program.steps.gradient import trace_gradient


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


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


def tower(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


TOWER = [f32(32, 32)] * 3, f32(8, 32)


def named_tower(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(remat_kit.name(jnp.sin(x @ w), "attn_out"))
    return jnp.mean(x**2)


class ChipMemory(types.SimpleNamespace):
    """A `Memory` of a chip that has only the fields that lints read."""

    on_cpu = False
    devices = 1
    drops_offload = Memory.drops_offload


def codes_with(fn, hlo=None, **memory):
    gradient = trace_gradient(fn, TOWER, call="test")
    found = lints_of(
        gradient,
        kept_of(gradient),
        recomputed_of(gradient),
        forward_flops=forward_flops(gradient),
        compiled={"chip": CompiledFacts(ChipMemory(target="chip", **memory), hlo)}
        if memory
        else {"chip": CompiledFacts(ChipMemory(target="chip", host_bytes=None), hlo)},
    )
    return [lint.code for lint in found]


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


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
