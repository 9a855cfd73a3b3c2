"""Scans that run part by part have the values and the derivatives of the scan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_kit._apply import scans
from remat_kit._program.program import Program, evaluate

XS = jnp.linspace(-1.0, 1.0, 14).reshape(7, 2)


def scan(w, xs, reverse=False):
    def step(carry, x):
        (y, count) = carry
        y = jnp.sin(y * w + x)
        return (y, count + 1), y * x

    carry, ys = jax.lax.scan(step, (jnp.zeros(2), 0), xs, reverse=reverse)
    return [*carry, ys]


def region(fn, args):
    return jax.checkpoint(lambda *args: fn(args), prevent_cse=False)(*args)


def grouped(*sizes):
    return [(times, group, region) for times, group in sizes]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "parts",
    [
        [(7, 1, None)],
        [(3, 1, None), (4, 1, None)],
        grouped((7, 1)),
        grouped((7, 3)),
        grouped((7, 9)),
        [*grouped((4, 2)), (1, 1, None), *grouped((2, 2))],
    ],
)
@pytest.mark.usefixtures("optimized")  # a scan is compiled as a whole, and its parts too
def test_parts_have_the_values_of_the_scan(parts, reverse):
    w = jnp.array([0.3, 0.7])
    (eqn,) = (
        e
        for e in jax.make_jaxpr(lambda w, xs: scan(w, xs, reverse))(w, XS).eqns
        if e.primitive.name == "scan"
    )
    program = Program.of(eqn.params["jaxpr"], ())

    def body(args):
        return evaluate(program, args)

    def run(w, xs):
        made = [scans.Part(times, body, group, around) for times, group, around in parts]
        return scans.run(eqn, [w, jnp.zeros(2), 0, xs], made)

    def total(fn):
        return lambda w, xs: jnp.sum(fn(w, xs)[-1] ** 2)

    for got, want in zip(run(w, XS), scan(w, XS, reverse), strict=True):
        np.testing.assert_array_equal(got, want)
    got = jax.grad(total(run), (0, 1))(w, XS)
    want = jax.grad(total(lambda w, xs: scan(w, xs, reverse)), (0, 1))(w, XS)
    for a, b in zip(got, want, strict=True):
        # Groups add the terms of the constant's gradient up in another order.
        np.testing.assert_allclose(a, b, rtol=1e-5)
    text = str(jax.make_jaxpr(run)(w, XS))
    assert text.count("prevent_cse") >= sum(around is not None for *_, around in parts)


def test_a_scan_without_iterations_returns_its_carry():
    xs = XS[:0]
    w = jnp.ones(2)
    (eqn,) = (e for e in jax.make_jaxpr(scan)(w, xs).eqns if e.primitive.name == "scan")
    program = Program.of(eqn.params["jaxpr"], ())
    parts = [scans.Part(0, lambda args: evaluate(program, args))]
    carry, count, ys = scans.run(eqn, [w, jnp.zeros(2), 0, xs], parts)
    assert carry.tolist() == [0.0, 0.0]
    assert count == 0
    assert ys.shape == (0, 2)
