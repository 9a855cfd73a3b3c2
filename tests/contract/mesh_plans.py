"""Plans of partitioned losses, run on eight CPU devices; `test_mesh_plans.py` runs it.

A process of its own, because XLA must be told of eight devices before JAX starts. It prints, for
each loss and each sharding, what the plan says and what the compiled program says.
"""

import json
import os

DEVICES = 8

if __name__ == "__main__":  # pytest imports this file too, for its docstrings
    flag = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import remat_kit  # noqa: E402

# XLA:CPU of JAX 0.10.2 brings some of the unrolled losses to no more than 0.8.
BUDGETS = (0.8, 0.6, "min") if jax.__version_info__ >= (0, 11) else ("min",)
SHARDINGS = {  # of the weights and of the batch
    "data parallel": (P(), P(("data", "model"))),
    "fully sharded": (P("data"), P(("data", "model"))),
    "tensor parallel": (P(None, "model"), P("data")),
}
NAMES = tuple(f"{kind}, {sharding}" for kind in ("unrolled", "scanned") for sharding in SHARDINGS)


def layer(x, w):
    return x + jnp.sin(jnp.tanh(x @ w)) @ w.T


def unrolled(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = layer(x, w)
    return jnp.mean(x**2)


def scanned(weights, x):
    def body(x, w):
        return layer(x, w), None

    return jnp.mean(jax.lax.scan(body, x, weights)[0] ** 2)


def arguments(kind, weights_spec, batch_spec):
    mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(4, 2), ("data", "model"))
    draw = np.random.default_rng(0)
    layers = [draw.standard_normal((64, 256)).astype(np.float32) / 16 for _ in range(8)]
    x = draw.standard_normal((4096, 64)).astype(np.float32)
    if kind == "scanned":
        stacked = NamedSharding(mesh, P(None, *weights_spec))
        weights = jax.device_put(np.stack(layers), stacked)
    else:
        weights = [jax.device_put(w, NamedSharding(mesh, weights_spec)) for w in layers]
    return weights, jax.device_put(x, NamedSharding(mesh, batch_spec))


def compiled(fn, args):
    return jax.jit(jax.value_and_grad(fn)).lower(*args).compile()


def answers(kind, sharding):
    """Yield for each budget what the plan says, and what its program says and computes."""
    loss, args = (
        {"unrolled": unrolled, "scanned": scanned}[kind],
        arguments(kind, *SHARDINGS[sharding]),
    )
    wanted = compiled(loss, args)(*args)
    for budget in BUDGETS:
        plan = remat_kit.plan(loss, *args, budget=budget)
        program = compiled(remat_kit.policy(plan)(loss), args)
        found = program(*args)
        leaves = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
        yield {
            "target": plan.target,
            "budget": plan.budget_bytes,
            "baseline": plan.baseline.peak_bytes,
            "said": plan.compiled.temp_bytes,
            "peak": plan.compiled_peak_bytes,
            "predicted": plan.predicted_peak_bytes,
            "is": program.memory_analysis().temp_size_in_bytes,
            "apart": max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in leaves),
            "same shardings": all(a.sharding == b.sharding for a, b in leaves),
        }


if __name__ == "__main__":
    print(json.dumps({name: list(answers(*name.split(", "))) for name in NAMES}))
