"""Numbers of values: what a primitive is called has no bearing on what its result is."""

import dataclasses
import inspect

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import pytest
from jax.interpreters import ad, mlir

import remat_kit
from remat_kit._compiled import liveness as _liveness
from remat_kit._program import flow as _flow
from remat_kit._program import ops as _ops

X = jax.ShapeDtypeStruct((3, 4), jnp.float32)


def primitive(name):
    """Return a function of a new primitive of this name, the sine; two operands make its sum."""
    new = jec.Primitive(name)
    new.def_impl(lambda *xs, **_: jnp.sin(sum(xs)))
    new.def_abstract_eval(lambda *xs, **_: xs[0].update(weak_type=False))

    def jvp(primals, tangents, **params):
        slope = jnp.cos(sum(primals))
        moved = [slope * t for t in tangents if not isinstance(t, ad.Zero)]
        return new.bind(*primals, **params), sum(moved)

    ad.primitive_jvps[new] = jvp
    mlir.register_lowering(new, mlir.lower_fun(lambda *xs, **_: jnp.sin(sum(xs)), False))
    return lambda *xs, **params: new.bind(*xs, **params)


def program(function):
    """A loss with the function inside and outside of a loop, of a branch and of a region."""

    @jax.checkpoint
    def layer(x):
        return function(function(x, level=0), x, level=0, array=1)

    def body(x, _):
        y = function(layer(x), x)
        return function(y), function(y, x, index=0, branches=(0, 1))

    def loss(x):
        x, ys = jax.lax.scan(body, x, None, length=2)
        x = jax.lax.cond(x[0, 0] > 0, layer, function, x)
        return jnp.sum(jnp.cos(function(x)) * jnp.cos(ys[0]))

    return loss


def told(name):
    """All that is said of the program of a primitive of this name."""
    function = primitive(name)
    loss = program(function)
    report = remat_kit.inspect(loss, X, policy="nothing").to_json()
    change = remat_kit.diff(loss, remat_kit.policy("nothing")(loss), X).text()
    return repr(report), change


def renamed(texts, name):
    report, change = texts
    report = report.replace(f"unknown of {name}:", "unknown of mine:")
    return report.replace(f"'{name}'", "'mine'"), change.replace(f" {name} ", " mine ")


def our_words():
    """What this library calls kinds of values itself."""
    kinds = ["equation", "argument", "constant", "carry", "cond", "residual", "input", "body"]
    kinds += [_liveness.ARGUMENT, _liveness.OUTPUT, _liveness.TEMPORARY, _liveness.CONSTANT]
    kinds += [_flow.FORWARD, _flow.BACKWARD, "unique", "object", "hole", "last", "shard"]
    kinds += ["unshard", "element", "stack", "unknown", "empty", "parameter"]
    classes = inspect.getmembers(_flow, dataclasses.is_dataclass)
    # A primitive that is called as one of JAX's is that one, to all who read a program.
    return sorted({*kinds, *(name.lower() for name, _ in classes)} - {"cond", "empty", "stack"})


@pytest.fixture(scope="module")
def mine():
    return told("mine")


@pytest.mark.parametrize("name", our_words())
def test_a_primitive_may_be_called_as_we_call_something(name, mine):
    assert renamed(told(name), name) == renamed(mine, name)


def test_arrays_that_a_scan_stacks_in_its_body_are_inspected():
    def body(x, _):
        y = jnp.sin(jnp.stack([jnp.cos(x), x * x]))
        return (y * y).sum(0), y

    def loss(x):
        x, ys = jax.lax.scan(body, x, None, length=4)
        return (jnp.cos(ys) ** 2).sum() + x.sum()

    report = remat_kit.inspect(loss, X)
    assert any(r.shape == (4, 2, 3, 4) for r in report.saved)


@pytest.mark.parametrize(
    "move",
    [
        lambda x: jnp.stack([x, x.T]),
        lambda x: jnp.concatenate([x, x]),
        lambda x: jnp.unstack(x),
        lambda x: jnp.tile(x, (2, 2)),
        lambda x: jnp.split(x, 2),
        lambda x: x[jnp.array([1, 0])],
    ],
)
def test_what_moves_data_computes_nothing(move):
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    eqns = jax.make_jaxpr(move)(x).eqns
    moving = [e for e in eqns if e.outvars[0].aval.dtype == jnp.float32]
    assert moving
    assert sum(map(_ops.flops, moving)) == 0
