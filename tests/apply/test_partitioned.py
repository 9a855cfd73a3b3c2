"""Where a decorated function finds how the devices split its inputs.

`tests/contract/test_collective_programs.py` has the programs on several devices.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit
from remat_kit._apply import partitioned
from remat_kit._program import communication
from remat_kit._program.program import Program

W, X = jnp.ones((8, 8)), jnp.ones((16, 8))


def layer(w, x):
    return jnp.tanh(x @ w)


FLAT = Program.of(jax.make_jaxpr(layer)(W, X))


def test_arrays_on_one_device_are_not_split():
    assert partitioned.marked(FLAT, [W, X]) is FLAT
    seen = []

    def loss(w):
        seen.append(partitioned.marked(FLAT, [w, X]))
        return jnp.sum(layer(w, X))

    jax.grad(loss)(W)
    assert seen == [FLAT]


@pytest.mark.filterwarnings("ignore:.*selects none:remat_kit.RematKitWarning")
def test_the_arguments_of_a_jitted_function_tell_the_shardings():
    seen = []

    @jax.jit
    def outer(w, x):
        if communication.current() is None:
            seen.append(partitioned.marked(FLAT, [w, x]))
        return remat_kit.policy("save(collective)")(layer)(w, x)

    jax.eval_shape(outer, W, X)
    # The decorated function asks again, and finds the answer of the same trace.
    assert len(seen) == 1


def test_nothing_is_known_in_a_scan_outside_of_jit():
    seen = []

    def body(x, w):
        seen.append(partitioned.marked(FLAT, [w, x]))
        return layer(w, x), None

    jax.lax.scan(body, X, W[None])
    assert seen
    assert all(found is None for found in seen)


def test_a_call_inside_of_a_trace_opens_no_context():
    steps = partitioned.CalledSteps()
    seen = []

    def outer(w):
        seen.append(steps.known_in(layer, (w, X), {}))
        return w

    jax.eval_shape(outer, W)
    assert [type(context) for context in seen] == [contextlib.nullcontext]
    assert not steps.known


@pytest.mark.filterwarnings("ignore:.*selects none:remat_kit.RematKitWarning")
def test_a_decorated_step_on_one_device_gives_what_it_gave():
    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum(layer(w, x)))(w)

    mine = remat_kit.policy("dots | save(collective)")(jax.jit(step))
    np.testing.assert_array_equal(mine(W, X), jax.jit(step)(W, X))
