"""Plans with pieces of partitioned programs, run on eight CPU devices.

`test_mesh_pieces.py` runs it, in a process of its own, because XLA must be told of eight devices
before JAX starts. It prints, for each program and each sharding, what the plan says and what the
compiled program says and computes.
"""

import json
import os
import sys

DEVICES = 8

if __name__ == "__main__":  # pytest imports this file too, for its docstrings
    flag = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import remat_kit  # noqa: E402

SHARDINGS = {  # of the weights of the blocks, and of the embedding
    "data parallel": (P(), P()),
    "fully sharded": (P("data"), P("data")),
    "tensor parallel": (P(None, "model"), P()),
    "both": (P("data", "model"), P("data", "model")),
}
NAMES = (
    *(
        f"{layers} {what}, {sharding}"
        for layers in ("unrolled", "scanned")
        for what in ("loss", "step")
        for sharding in SHARDINGS
    ),
    *("dropout loss, data parallel", "dropout loss, both"),
)
BATCH, LENGTH, WIDTH, VOCABULARY, BLOCKS = 8, 128, 32, 512, 3


def block(x, weights, key=None):
    q, k, v, out = weights
    heads = [(x @ w).reshape(*x.shape[:2], 4, -1) for w in (q, k, v)]
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", *heads[:2]) / 4, axis=-1)
    if key is not None:
        scores = jnp.where(jax.random.bernoulli(key, 0.9, scores.shape), scores / 0.9, 0)
    return x + jnp.einsum("bhqk,bkhd->bqhd", scores, heads[2]).reshape(x.shape) @ out


def head(table, x, tokens):
    logits = jax.nn.log_softmax(x @ table.T)
    return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], axis=-1))


def unrolled(params, tokens, keys=(None,) * BLOCKS):
    blocks, table = params
    x = table[tokens]
    for i, key in enumerate(keys):
        with jax.named_scope(f"block_{i}"):
            x = block(x, [w[i] for w in blocks], key)
    return head(table, x, tokens)


def dropout(params, tokens):
    return unrolled(params, tokens, jax.random.split(jax.random.key(1), BLOCKS))


def scanned(params, tokens):
    blocks, table = params
    x, _ = jax.lax.scan(lambda x, ws: (block(x, ws), None), table[tokens], blocks)
    return head(table, x, tokens)


def arguments(weights_spec, table_spec):
    devices = np.array(jax.devices()[:DEVICES]).reshape(4, 2)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    draw = np.random.default_rng(0)

    def put(x, *spec):
        return jax.device_put(jnp.asarray(x), NamedSharding(mesh, P(*spec)))

    shape = BLOCKS, WIDTH, WIDTH
    blocks = [
        put(0.1 * draw.standard_normal(shape).astype("float32"), None, *weights_spec)
        for _ in range(4)
    ]
    table = put(0.1 * draw.standard_normal((VOCABULARY, WIDTH)).astype("float32"), *table_spec)
    tokens = put(draw.integers(0, VOCABULARY, (BATCH, LENGTH), dtype=np.int32), "data")
    return (tuple(blocks), table), tokens


def answers(kind, sharding):
    """Yield for two budgets what the plan says, and what its program says and computes."""
    layers, what = kind.split()
    loss = {"unrolled": unrolled, "scanned": scanned, "dropout": dropout}[layers]
    args = arguments(*SHARDINGS[sharding])
    fn = loss
    if what == "step":

        def step(params, tokens):
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, tokens))

        # It returns the parameters with the shardings with which it got them.
        fn = jax.jit(step, out_shardings=jax.tree.map(lambda x: x.sharding, args[0]))

    def result(fn):
        return jax.tree.leaves((jax.jit(jax.grad(fn)) if what == "loss" else fn)(*args))

    wanted = result(fn)
    lean = remat_kit.plan(fn, *args, budget="min", compiles=2).compiled_peak_bytes
    for budget in ("min", 0.5):
        plan = remat_kit.plan(fn, *args, budget=budget, pieces=True)
        program = remat_kit.policy(plan)(fn)
        leaves = list(zip(result(program), wanted, strict=True))
        yield {
            "without pieces": lean,
            "budget": plan.budget_bytes,
            "said": plan.compiled_peak_bytes,
            "is": remat_kit.measure(program, *args).peak_bytes,
            "devices": plan.compiled.devices,
            "pieces": any(" pieces " in line for line in plan.lines),
            "apart": max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in leaves),
            "same shardings": what == "loss"
            or all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in leaves),
        }


if __name__ == "__main__":
    names = sys.argv[1:] or NAMES
    print(json.dumps({name: list(answers(*name.split(", "))) for name in names}))
