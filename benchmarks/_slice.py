"""A training step sharded over a slice of TPUs that is not there, compiled for one of its chips.

Parameters, optimizer state and gradients are split over both axes of the mesh: over ``data`` as in
ZeRO's third stage (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054), over ``model`` by
heads and hidden units as in Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053);
between layers the tokens of a sequence are split over ``model`` (Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198). What lies between is left to XLA's partitioner. A target of
`remat_kit.measure` is one device, so this asks JAX's own ahead-of-time compiler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import remat_kit
from remat_kit._chip.cache import default_cache, key_of

P = PartitionSpec

# By the end of a parameter's path in `models/gpt.py`, layers stacked; the rest is on every chip.
SPLITS = {
    "wte/embedding": P("model", "data"),
    "wpe/embedding": P(None, "data"),
    **{f"{name}/kernel": P(None, "data", "model") for name in ("query", "key", "value", "up")},
    **{f"{name}/bias": P(None, "model") for name in ("query", "key", "value", "up")},
    "out/kernel": P(None, "model", None, "data"),
    "down/kernel": P(None, "model", "data"),
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips in a mesh of ``data`` by ``model``, as libtpu names their topology."""

    topology: str
    data: int
    model: int

    @property
    def chips(self) -> int:
        return self.data * self.model

    def mesh(self) -> Mesh:
        """Return the mesh of compile-only devices.

        Raises:
            MissingPluginError: libtpu is not installed.
        """
        if not remat_kit.target("tpu-v5p").available:
            raise remat_kit.MissingPluginError(
                f"`{self}`: the compiler for tpu is not installed",
                hint="pip install 'remat-kit[tpu]'",
            )
        from jax.experimental import topologies

        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        with _quiet():
            devices = topologies.get_topology_desc(self.topology, "tpu").devices
        return Mesh(np.array(devices).reshape(self.data, self.model), ("data", "model"))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what libtpu prints while it loads: that there is no TPU here."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def split_between_layers(loss: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Return a GPT's loss with the tokens split over ``model`` wherever a layer begins."""
    tokens = NamedSharding(mesh, P("data", "model", None))

    def begin(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if type(context.module).__name__ == "Block" and context.method_name == "__call__":
            args = (jax.lax.with_sharding_constraint(args[0], tokens), *args[1:])
        return call(*args, **kwargs)

    def split(*args: Any) -> Any:
        with nn.intercept_methods(begin):
            return loss(*args)

    return split


def split_state(tree: Any, mesh: Mesh) -> Any:
    """Return the shapes of parameters, or of an optimizer's state, each with its sharding."""

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        name = "/".join(str(getattr(key, "key", "")) for key in path[-2:])
        sharding = NamedSharding(mesh, SPLITS.get(name, P()))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, tree)


def split_batch(tree: Any, mesh: Mesh) -> Any:
    """Return the shapes of a batch, its sequences split over ``data``."""
    sharding = NamedSharding(mesh, P("data"))
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


def compiled(step: Callable[..., Any], args: Sequence[Any], mesh: Mesh) -> dict[str, Any]:
    """Compile ``step(params, state, *batch)``; parameters and state are donated.

    Answers are kept on disk.

    Returns:
        ``peak_bytes`` of one chip and the optimised ``hlo`` that it runs; or ``refused``, the
        compiler's words, where the program does not fit.
    """
    same = [jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in args[:2]]
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*same, NamedSharding(mesh, P())))
    lowered = jitted.lower(*args)
    kind = f"{mesh.devices.flat[0].device_kind} {mesh.devices.shape}"
    key = key_of("slice 1", lowered.as_text(), kind, json.dumps(versions()))
    cache = default_cache()
    if (known := cache.get(key)) is not None:
        return json.loads(known)
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        answer: dict[str, Any] = {"refused": str(error)}
    else:
        stats = program.memory_analysis()
        assert stats is not None
        peak = stats.argument_size_in_bytes + stats.output_size_in_bytes
        peak += stats.temp_size_in_bytes - stats.alias_size_in_bytes
        answer = {"peak_bytes": peak, "hlo": program.as_text()}
    cache.put(key, json.dumps(answer).encode())
    return answer


def versions() -> dict[str, str]:
    """Return those of what takes part."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
