"""Programs for the tests of reports, and the keys of a report."""

import io

import jax
import jax.numpy as jnp
from rich.console import Console
from zoo import load

gpt, mlp, resnet = map(load, ("gpt", "mlp", "resnet"))
MLP = {"batch": 4, "features": 8, "hidden": 6, "classes": 3}


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


W, X = f32(16, 16), f32(8, 16)


def loss(w, x):
    return jnp.sum(jnp.sin(jnp.exp(x @ w) @ w))


KEYS = {
    "headline": str,
    "policy": str,
    "saved_bytes": int,
    "offloaded_bytes": int,
    "saved": list,
    "inputs": list,
    "recomputed": list,
    "parameters": int,
    "parameter_bytes": int,
    "recomputed_flops": float,
    "forward_flops": float,
    "unknown_costs": list,
    "memory": dict,
    "hlo_recomputed_ops": dict,
    "hlo_recomputed_by_primitive": dict,
    "hlo_xla_remat": dict,
    "peak": dict,
    "timeline": dict,
    "regions": dict,
    "counterfactuals": dict,
    "hlo_recomputed": dict,
    "devices": dict,
    "mesh": dict,
    "collectives": dict,
    "step_seconds": dict,
    "losses": list,
    "notes": list,
    "lints": list,
    "against": type(None),
}
RESNET = {"depth": 18, "batch": 2, "image": 32, "width": 4, "classes": 10}


def rich_text(shown, **kwargs):
    stream = io.StringIO()
    Console(file=stream, width=200, **kwargs).print(shown)
    return stream.getvalue()


def tower(w, x):
    for _ in range(4):
        x = jnp.sin(x @ w)
    return jnp.sum(x**2)
