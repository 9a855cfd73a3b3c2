"""A GPT over eight CPU devices, with explicit axes or automatic ones; `test_models.py` runs it.

A process of its own, because XLA must be told of eight devices before JAX starts. It prints the
losses, the differences of the gradients, and what `measure` and `inspect` say.
"""

import importlib
import json
import os
import pathlib
import sys

DEVICES = 8

if __name__ == "__main__":  # pytest imports this file too, for its docstrings
    flag = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

import jax  # noqa: E402
import numpy as np  # noqa: E402

import remat_kit  # noqa: E402

NAMES = ("dp, scanned", "fsdp, unrolled")


def size_of(name, explicit):
    sharding, form = name.split(", ")
    how = {"mesh": f"data={DEVICES}", "sharding": sharding, "explicit": explicit}
    return {"size": "tiny", "batch": 16, "scan": form == "scanned", **how}


def build(policy, **size):
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "models"))
    return importlib.import_module("gpt").build(policy, **size)


def found(name, explicit, policy=None):
    """Return the loss and the gradients of a form, and a report of it."""
    loss, args = build(policy, materialize=True, **size_of(name, explicit))
    value, gradients = jax.jit(jax.value_and_grad(loss))(*args)
    loss, shapes = build(policy, **size_of(name, explicit))
    report = remat_kit.inspect(loss, *shapes, target="cpu")
    peak = remat_kit.measure(loss, *shapes, target="cpu").peak_bytes
    leaves = jax.tree.leaves(gradients)
    numbers = [np.asarray(leaf) for leaf in leaves]
    said = {
        "loss": float(value),
        "peak": peak,
        "recomputed": report.recomputed_flops,
        "gathers": sum(c.kind == "all-gather" for c in report.readings["cpu:8"].collectives),
        "gradients are split as the parameters": all(
            a.sharding == b.sharding for a, b in zip(leaves, jax.tree.leaves(args[0]), strict=True)
        ),
    }
    return said, numbers


def answers(name):
    plain, wanted = found(name, False)
    yield "automatic", plain
    for label, policy in (("explicit", None), ("explicit, nothing", "nothing")):
        said, numbers = found(name, True, policy)
        pairs = zip(numbers, wanted, strict=True)
        yield label, said | {"apart": max(float(np.max(np.abs(a - b))) for a, b in pairs)}


if __name__ == "__main__":
    print(json.dumps({name: dict(answers(name)) for name in NAMES}))
