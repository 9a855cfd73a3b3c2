"""A decorated function is told apart from one under `jax.checkpoint` by what is saved alone.

Each test states what `jax.checkpoint` does, and runs with it and with policies of ours.
"""

from __future__ import annotations

import contextlib
import functools
import io
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

import remat_kit

Decorator = Callable[..., Any]


def _ours(what: Any) -> Decorator:
    def decorate(fn: Any, **options: Any) -> Any:
        return remat_kit.policy(what, **options)(fn)

    return decorate


DECORATORS = {
    "jax": jax.checkpoint,
    "nothing": _ours("nothing"),
    "dots": _ours("dots"),
    "everything": _ours("everything"),
}

_KEEP_NOTHING = (DECORATORS["jax"], DECORATORS["nothing"])

each = pytest.mark.parametrize("decorate", DECORATORS.values(), ids=DECORATORS.keys())


@pytest.fixture(params=[False, True], ids=["remat2", "remat3"])
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    before = jax.config.values["jax_remat3"]
    jax.config.update("jax_remat3", request.param)
    yield
    jax.config.update("jax_remat3", before)


# -- what is remembered -------------------------------------------------------------------------


class Counted:
    """A function that counts how often Python runs it."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, x: Any, *rest: Any) -> Any:
        self.runs += 1
        return jnp.sin(jnp.dot(x, x)), 3.0


@each
@pytest.mark.usefixtures("implementation")
def test_eager_calls_trace_once(decorate: Decorator) -> None:
    fn = Counted()
    decorated = decorate(fn)
    x = jnp.arange(3.0)
    for _ in range(4):
        decorated(x)
        jax.grad(lambda x: decorated(x)[0])(x)
    assert fn.runs == 1
    decorated(jnp.arange(4.0))
    assert fn.runs == 2


@each
def test_static_arguments_trace_once_for_each_value(decorate: Decorator) -> None:
    fn = Counted()
    decorated = decorate(fn, static_argnums=(1, -1))
    for _ in range(3):
        decorated(2.0, "one", 1)
        decorated(2.0, "two", 1)
        decorated(2.0, "one", 2)
    assert fn.runs == 3


@each
def test_closures_are_read_once_and_forgotten_with_the_caches(decorate: Decorator) -> None:
    scale = jnp.float32(2.0)

    @decorate
    def f(x: Any) -> Any:
        return x * scale

    assert float(f(3.0)) == 6.0
    scale = jnp.float32(5.0)
    assert float(f(3.0)) == 6.0  # as for `jax.jit`
    jax.clear_caches()
    assert float(f(3.0)) == 15.0


@each
def test_functions_made_anew_share_nothing(decorate: Decorator) -> None:
    def scaled(scale: float) -> Any:
        return decorate(lambda x: jnp.sin(x * scale))

    for scale in (1.0, 2.0, 3.0):
        np.testing.assert_allclose(scaled(scale)(1.0), np.sin(scale), rtol=1e-6)
        np.testing.assert_allclose(jax.grad(scaled(scale))(1.0), scale * np.cos(scale), rtol=1e-6)


def test_an_object_that_is_no_array_may_change_between_calls() -> None:
    class Settings:
        scale = 2.0

    settings = Settings()
    decorated = remat_kit.policy("dots")(lambda x, settings: x * settings.scale)
    assert float(decorated(jnp.float32(3.0), settings)) == 6.0
    settings.scale = 5.0
    assert float(decorated(jnp.float32(3.0), settings)) == 15.0


@pytest.mark.parametrize("what", ["nothing", "dots"])
def test_constants_that_are_equal_but_differ_are_told_apart(what: str) -> None:
    decorated = remat_kit.policy(what, static_argnums=(1,))(lambda x, c: x + c / 2)
    assert decorated(jnp.float32(0.0), 1).dtype == jnp.float32
    flag = remat_kit.policy(what, static_argnums=(1,))(lambda x, c: x * (c is True))
    assert [float(flag(jnp.float32(1.0), c)) for c in (1, True, 1.0)] == [0.0, 1.0, 0.0]
    sign = remat_kit.policy(what, static_argnums=(1,))(lambda x, c: x * np.copysign(1.0, c))
    assert [float(sign(jnp.float32(1.0), c)) for c in (0.0, -0.0)] == [1.0, -1.0]


# -- arguments ----------------------------------------------------------------------------------


@each
def test_static_argnums_out_of_range(decorate: Decorator) -> None:
    with pytest.raises(ValueError, match="static_argnums"):
        decorate(lambda x: x, static_argnums=(4,))(1.0)


@each
def test_static_arguments_need_no_hash(decorate: Decorator) -> None:
    decorated = decorate(lambda x, sizes: x * sum(sizes), static_argnums=(1,))
    assert float(jax.grad(decorated)(2.0, [1, 2])) == 3.0


@each
def test_python_floats_are_traced(decorate: Decorator) -> None:
    @decorate
    def f(x: Any) -> Any:
        return x.sum() if x > 0 else x  # line of the user

    assert float(decorate(lambda x: x.sum())(2.0)) == 2.0
    with pytest.raises(jax.errors.TracerBoolConversionError, match="static_argnums") as caught:
        f(2.0)
    assert "line of the user" in "".join(traceback.format_exception(caught.value))
    assert "argument x" in str(caught.value)


@each
@pytest.mark.usefixtures("implementation")
def test_weak_types_stay(decorate: Decorator) -> None:
    fn = decorate(lambda x, n: {"a": x * 2, "b": (n, jnp.sin(x))})
    want = jax.eval_shape(lambda x, n: {"a": x * 2, "b": (n, jnp.sin(x))}, 2.0, 3)
    got = fn(2.0, 3)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    types = [jax.typeof(v) for v in jax.tree.leaves(got)]
    expected = [(v.dtype, v.weak_type) for v in jax.tree.leaves(want)]
    assert [(t.dtype, getattr(t, "weak_type", None)) for t in types] == expected


# -- barriers -----------------------------------------------------------------------------------


def _barriers(decorate: Decorator, prevent_cse: Any) -> list[int]:
    """The number of values behind each barrier of a gradient."""

    def layer(given: Any, x: Any) -> Any:
        return jnp.tanh(x @ given["w"] + given["b"]) + jnp.array([1.0, 2.0, 3.0])

    decorated = decorate(layer, prevent_cse=prevent_cse)

    def loss(given: Any, x: Any) -> Any:
        return jnp.sum(decorated(given, decorated(given, x)) ** 2)

    given = {"w": jnp.ones((3, 3)), "b": jnp.ones(3)}
    text = jax.jit(jax.grad(loss)).lower(given, jnp.ones(3)).as_text()
    return [line.count("tensor<") for line in text.splitlines() if "optimization_barrier" in line]


@pytest.mark.parametrize(
    "prevent_cse", [True, False, (False, True), ({"w": True, "b": False}, False)], ids=str
)
@pytest.mark.filterwarnings("ignore:.*prevent_cse=False outside of a loop")
def test_prevent_cse_is_a_prefix_of_the_arguments(prevent_cse: Any) -> None:
    want = _barriers(jax.checkpoint, prevent_cse)
    assert _barriers(_ours("nothing"), prevent_cse) == want
    assert bool(_barriers(_ours("dots"), prevent_cse)) == bool(want)


def test_a_tuple_of_flags_stands_for_any_container() -> None:
    by_name = _barriers(_ours("nothing"), ({"b": True, "w": False}, False))
    assert _barriers(_ours("nothing"), ((True, False), False)) == by_name


def test_flags_that_do_not_match_are_refused() -> None:
    decorated = remat_kit.policy("dots", prevent_cse=(True, False))(jnp.sin)
    with pytest.raises(ValueError, match="prevent_cse"):
        decorated(1.0)
    with pytest.raises(ValueError, match="several regions"):
        remat_kit.policy("dots", at="layer_*", prevent_cse=(True,))(jnp.sin)(1.0)


# -- what users see -----------------------------------------------------------------------------


def _said(fn: Any, *args: Any) -> list[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print_saved_residuals(fn, *args)
    return out.getvalue().splitlines()


@pytest.mark.usefixtures("implementation")
def test_saved_residuals_have_the_names_of_the_user() -> None:
    def f(x: Any, w: Any) -> Any:
        h = checkpoint_name(x @ w, "hidden")
        return checkpoint_name(jnp.sin(h), "out") @ w

    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))
    keep = jax.checkpoint_policies.save_only_these_names("hidden")
    want = [line for line in _said(jax.checkpoint(f, policy=keep), x, w) if "named" in line]
    assert len(want) == 1
    if jax.__version_info__ < (0, 11) and jax.config.values["jax_remat3"]:
        pytest.skip("jax_remat3 of jax 0.10.2 finds names by their text alone")
    for what in (keep, remat_kit.named("hidden"), "dots"):
        lines = [line for line in _said(remat_kit.policy(what)(f), x, w) if "named" in line]
        assert lines == want


@each
def test_filtered_tracebacks_have_no_frames_of_the_package(decorate: Decorator) -> None:
    @decorate
    def f(x: Any) -> Any:
        return jnp.dot(x, jnp.ones(7))

    package = str(Path(remat_kit.__file__).parent)
    before = jax.config.values["jax_traceback_filtering"]
    jax.config.update("jax_traceback_filtering", "remove_frames")
    try:
        for call in (f, jax.jit(f), jax.grad(f)):
            with pytest.raises(TypeError) as caught:
                call(jnp.ones(3))
            files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
            assert not [name for name in files if name.startswith(package)]
            assert __file__ in files
    finally:
        jax.config.update("jax_traceback_filtering", before)


@each
def test_inner_jits_stay_where_nothing_is_kept(decorate: Decorator) -> None:
    if decorate not in _KEEP_NOTHING:
        pytest.skip("a region that keeps values is taken apart")
    text = str(jax.make_jaxpr(decorate(jax.jit(lambda x: 2 * x)))(1.0))
    assert "jit[" in text


@jax.jit
def _normalized(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.tanh(x @ x) * jnp.exp(x)).sum(axis=0)


def _initial(key: jax.Array) -> jax.Array:
    return jax.nn.initializers.lecun_normal()(key, (64, 32), jnp.float32)


@pytest.mark.parametrize("what", ["dots", "everything"])
@pytest.mark.parametrize("at", [None, "**/inner"])
@pytest.mark.usefixtures("implementation")
@pytest.mark.filterwarnings("ignore:.*no input of the decorated function has a gradient")
def test_eager_calls_run_jitted_functions_compiled(what: str, at: str | None) -> None:
    """Compiled as one and operation by operation, a function has other last digits."""

    def named(fn: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("outer/inner"):
            return fn(x) * 3.1

    x = jax.random.normal(jax.random.key(0), (64, 64))
    for fn, argument in [(_normalized, x), (_initial, jax.random.key(1))]:
        function = functools.partial(named, fn)
        decorated = remat_kit.policy(what, at=at)(function)
        np.testing.assert_array_equal(decorated(argument), function(argument), strict=True)


@each
@pytest.mark.usefixtures("implementation")
def test_no_tracer_leaks(decorate: Decorator) -> None:
    if jax.config.values["jax_remat3"] and decorate not in _KEEP_NOTHING:
        pytest.skip("under jax_remat3 JAX itself leaks a tracer where a policy keeps something")
    decorated = decorate(lambda x, w: jnp.sin(x @ w))
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda w: decorated(x, w).sum()))(w)
        jax.vmap(jax.grad(lambda w: decorated(x, w).sum()))(jnp.stack([w, w]))


# -- shapes and types at the edge ---------------------------------------------------------------


@pytest.mark.parametrize("at", [None, "**/block"])
@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("what", ["nested", "nested:2", "block:2", "uniform:2", "dots"])
def test_scans_of_any_length(what: str, length: int, at: str | None) -> None:
    def f(w: Any, x: Any) -> Any:
        def body(c: Any, w: Any) -> Any:
            with jax.named_scope("block"):
                c = jnp.tanh(c @ w)
            return c, c.sum()

        c, ys = lax.scan(body, x, w)
        return c.sum() + ys.sum()

    args = jnp.full((length, 3, 3), 0.3), jnp.ones((2, 3))
    want = jax.value_and_grad(f, (0, 1))(*args)
    got = jax.value_and_grad(remat_kit.policy(what, at=at)(f), (0, 1))(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, want)


@pytest.mark.parametrize("what", ["nothing", "dots", "everything", "offloaded"])
def test_complex_values_can_be_kept(what: str) -> None:
    def f(x: Any) -> Any:
        y = jnp.sin(x @ x)
        return jnp.real(jnp.exp(y) @ y).sum()

    chosen = remat_kit.offload(remat_kit.dots) if what == "offloaded" else what
    x = jnp.full((3, 3), 0.3 + 0.2j, jnp.complex64)
    got = jax.jit(jax.grad(remat_kit.policy(chosen)(f)))(x)
    np.testing.assert_allclose(got, jax.grad(f)(x), rtol=1e-5)


@each
@pytest.mark.usefixtures("implementation")
def test_a_view_of_a_reference_is_an_argument(decorate: Decorator) -> None:
    try:
        view = jax.new_ref(jnp.arange(6.0).reshape(2, 3)).at[1]
    except NotImplementedError:
        pytest.skip("references have no views in jax 0.10.2")
    decorated = decorate(lambda x, view: jnp.sum(x * view[...]))
    assert decorated(jnp.ones(3), view) == 12.0


def test_the_path_of_a_linen_module_is_written_as_under_nn_remat() -> None:
    def paths(decorate: Decorator) -> list[Any]:
        seen: list[Any] = []

        class Inner(nn.Module):
            @nn.compact
            def __call__(self, x: Any) -> Any:
                assert self.scope is not None
                seen.append((self.scope.path, self.scope.debug_path))
                return nn.Dense(2)(x)

        class Outer(nn.Module):
            @decorate
            @nn.compact
            def __call__(self, x: Any) -> Any:
                return Inner(name="inner")(x)

        model, x = Outer(), jnp.ones((1, 2))
        model.apply(model.init(jax.random.key(0), x), x)
        return sorted(set(seen))

    assert paths(_ours("nothing")) == paths(nn.remat)
    assert paths(_ours("dots")) == paths(nn.remat)
