"""Every primitive of JAX in a program of its own: nothing that runs undecorated fails with us.

Each program stands alone, in the body of a scan, in a branch of a conditional, in a jitted function
and under `vmap`. It is decorated with policies that keep nothing, the products and everything, and
read by `inspect`, `diff` and `frontier`; gradients are those of the undecorated program. What JAX
itself refuses, undecorated or with its own policy, is left out.

The default run traces each primitive in one place, with one policy. The rest, gradients and
compiled programs of all primitives among it, is
``pytest -m slow tests/contract/test_primitives.py`` (half an hour).
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import one_by_one
from primitives import PROGRAMS, WITHOUT, X, primitives_of

import remat_kit
from remat_kit import _jax

NAMES = sorted(PROGRAMS.keys() & _jax.known_primitives())
# Each policy with JAX's own: what that one cannot do is not asked of ours.
POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}
# JAX 0.10.2 itself cannot differentiate a program that frees a reference.
# A compiled program with a callback names a function of this process.
CALLBACKS = {"pure_callback", "io_callback", "debug_callback", "debug_print", "inspect_sharding"}
UNDIFFERENTIABLE = {"empty_ref", "free_ref"} if jax.__version_info__ < (0, 11) else set()


def number(leaf):
    """The sum of an array of any type, as a float32 that is not large."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = leaf.real + leaf.imag
    leaf = leaf.astype(jnp.float32)
    return jnp.sum(leaf / (1 + jnp.abs(leaf)))


def layer(name):
    """A layer of a network around the program of a primitive."""

    def run(x):
        return jnp.tanh(x + 0.1 * sum(map(number, jax.tree.leaves(PROGRAMS[name](x)))))

    return run


PLACES = {
    "alone": lambda f: f,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "cond": lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, jnp.tanh, x),
    "jit": jax.jit,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x.T])).sum(0),
}


def loss_of(function):
    return lambda x: jnp.sum(function(x) ** 2)


@functools.cache
def gradient(name, place):
    """The jaxpr of the undecorated gradient, or None where JAX has none."""
    try:
        return derivative(PLACES[place](layer(name)))
    except Exception:
        if place == "alone" and name not in UNDIFFERENTIABLE:
            raise
        return None


def derivative(function):
    """The jaxpr of the gradient of a loss around a function."""
    return jax.make_jaxpr(jax.grad(loss_of(function)))(X)


def unless_jax_refuses(attempt, function, policy):
    """Return what the attempt gives; skip the test if it fails as JAX's own policy does."""
    try:
        return attempt()
    except Exception:
        try:
            derivative(jax.checkpoint(function, policy=POLICIES[policy]))
        except Exception as error:
            pytest.skip(f"JAX refuses it as well: {error}"[:120])
        raise


# Evaluated in one compiled program. JAX 0.12 misreads an array of another layout that a jitted
# function returns to an eager caller, so the undecorated gradient is wrong. JAX inspects shardings
# in compiled programs only.
COMPILED = {"layout_constraint", "inspect_sharding"}

# Evaluated without any compiled part. The result of `scaled_dot` is a bfloat16 array. XLA does not
# round it where it fuses the product with the operation that reads it, but a region that saves the
# result rounds it.
INTERPRETED = {"scaled_dot"}

UNTRANSLATED = {"pbroadcast"}  # JAX has no translation of it for CPUs


def evaluated(name, jaxpr):
    """Evaluate a gradient, operation by operation where JAX can do that."""
    run = functools.partial(jax.core.eval_jaxpr, jaxpr.jaxpr, jaxpr.consts)
    if name in COMPILED:
        return np.asarray(jax.jit(run)(X)[0])
    if name in INTERPRETED:
        return np.asarray(one_by_one(run, X)[0])
    try:
        (out,) = run(X)
    except NotImplementedError:  # JAX runs a few, such as `empty_ref`, in a jit alone
        (out,) = jax.jit(run)(X)
    return np.asarray(out)


def combinations():
    """Every primitive in every place with every policy; each of them once in the default run."""
    for i, name in enumerate(NAMES):
        for j, place in enumerate(PLACES):
            for k, policy in enumerate(POLICIES):
                quick = (i + j) % len(PLACES) == 0 and (i + k) % len(POLICIES) == 0
                yield pytest.param(name, place, policy, marks=() if quick else pytest.mark.slow)


# Modules of JAX that are imported late, by another test or by a library such as Equinox, define
# more primitives. What JAX and the programs import by themselves is known in a new process.
_KNOWN = """
import primitives
from remat_kit import _jax
print(*(
    name
    for name in _jax.known_primitives()
    if _jax.is_own_primitive(name) and not name.startswith("remat_kit_")
))
"""


def known():
    """Return the names of the primitives that a process has which imports only the programs."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", _KNOWN]
    run = subprocess.run(
        command, cwd=here, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_every_primitive_has_a_program_or_a_reason():
    found = set()
    for name in NAMES:
        mine = primitives_of(jax.make_jaxpr(PROGRAMS[name])(X).jaxpr)
        if (derived := gradient(name, "alone")) is not None:
            mine |= primitives_of(derived.jaxpr)
        assert name in mine, f"the program of {name} has {sorted(mine)}"
        found |= mine
    assert sorted(known() - found - WITHOUT.keys()) == [], "nobody tries these"
    assert sorted(found & WITHOUT.keys()) == [], "these are tried after all"


@pytest.mark.parametrize(("name", "place", "policy"), list(combinations()))
def test_a_decorated_program_is_inspected(name, place, policy):
    if gradient(name, place) is None:
        pytest.skip("JAX does not differentiate it")
    function = PLACES[place](layer(name))
    loss = loss_of(remat_kit.policy(policy)(function))
    unless_jax_refuses(lambda: remat_kit.inspect(loss, X), function, policy)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place", "policy"), list(combinations()))
def test_a_decorated_program_has_the_same_gradient(name, place, policy):
    plain = gradient(name, place)
    if plain is None:
        pytest.skip("JAX does not differentiate it")
    function = PLACES[place](layer(name))
    decorated = remat_kit.policy(policy)(function)
    found = unless_jax_refuses(lambda: derivative(decorated), function, policy)
    if name in UNTRANSLATED:
        pytest.skip("JAX cannot evaluate the undecorated gradient on a CPU")
    expected = evaluated(name, plain)
    np.testing.assert_allclose(evaluated(name, found), expected, rtol=1e-5, atol=1e-6)
    remat_kit.diff(loss_of(function), loss_of(decorated), X).text()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", PLACES)
def test_a_program_is_planned(name, place):
    if gradient(name, place) is None:
        pytest.skip("JAX does not differentiate it")
    loss = loss_of(PLACES[place](layer(name)))
    remat_kit.inspect(loss, X)
    remat_kit.frontier(loss, X, target="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_compiled_program_of_all_primitives_is_read_back(place):
    """One program of them all, since compiling takes seconds."""
    left_out = CALLBACKS | UNTRANSLATED
    names = [n for n in NAMES if gradient(n, place) is not None and n not in left_out]

    def loss(x):
        return loss_of(lambda x: sum(PLACES[place](layer(n))(x) for n in names))(x)

    report = remat_kit.inspect(loss, X, target="cpu")
    (reading,) = report.readings.values()
    assert reading.peak.bytes > 0
    assert reading.estimate.total.bytes > 0


def test_a_compiled_program_of_some_primitives_is_read_back():
    names = ("sort", "reduce_window", "cumsum", "scatter-add", "top_k", "while", "cholesky")

    def loss(x):
        return loss_of(lambda x: sum(PLACES["cond"](layer(n))(x) for n in names))(x)

    (reading,) = remat_kit.inspect(loss, X, target="cpu").readings.values()
    assert reading.peak.bytes > 0
    assert reading.estimate.total.bytes > 0
