"""Small graphs of costs for the tests of the planner."""

import jax.numpy as jnp
from shapes import struct

from remat_kit._chip.target import target
from remat_kit._planner.costs import build as _build
from remat_kit._planner.costs import simulate as _simulate
from remat_kit._planner.schedules.mincut import TIME

CHIP = target("cpu")


def traced(fn, *args):
    return _build.trace(fn, args, CHIP)


def work(graph, keep, worth=TIME):
    again = _simulate.closure(graph, graph.residuals, keep, 0, len(graph.equations)).again
    amounts = worth.equations(graph)
    return sum(amounts[i] for i in again)


def size(graph, tensors):
    return sum(graph.tensors[t].bytes for t in tensors)


def small_graphs():
    def diamond(w, x):
        a = jnp.tanh(x @ w)
        return jnp.sum(jnp.sin(a) * jnp.exp(a @ w))

    def skip(w, x):
        a = jnp.exp(x @ w)
        b = jnp.sin(a) @ w
        return jnp.sum(jnp.tanh(b + a))

    def dense(w, x):
        a = jnp.tanh(x @ w)
        b = jnp.tanh((x + a) @ w)
        return jnp.sum(a * b * x)

    return [traced(fn, struct(16, 16), struct(64, 16)) for fn in (diamond, skip, dense)]


def tower(depth, width=16, batch=64):
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    return traced(loss, [struct(width, width)] * depth, struct(batch, width))
