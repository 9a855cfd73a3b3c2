"""Inputs of regions that are saved in slices over a mesh axis.

`tests/contract/test_slice_programs.py` has the programs on several devices.
"""

import collections
import doctest

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from report_programs import gpt

import remat_kit
from remat_kit import _jax, sliced
from remat_kit._apply import slices
from remat_kit._apply.slices import dimension_of
from remat_kit._program import communication
from remat_kit._program.program import Program

LAYERS, WIDTH, HIDDEN, ROWS, TOKENS = 3, 64, 256, 16, 32
MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
DATA, NONE = ("data",), ()


def test_examples():
    assert doctest.testmod(slices).failed == 0


@pytest.mark.parametrize(
    ("shape", "axes", "dimension"),
    [
        ((16, 32, 64), (DATA, NONE, NONE), 1),
        ((16, 31, 64), (DATA, NONE, NONE), 2),
        ((16, 32, 64), (NONE, DATA, NONE), 2),
        ((16, 32, 63), (NONE, DATA, NONE), 0),
        ((16, 32, 64), (NONE, NONE, NONE), 0),
        ((15, 32), (NONE, NONE), 1),
    ],
)
def test_the_first_dimension_after_the_split_one_is_sliced(shape, axes, dimension):
    assert dimension_of(jax.core.ShapedArray(shape, jnp.float32), axes, "model", 2) == dimension


@pytest.mark.parametrize(
    ("shape", "dtype", "axes", "reason"),
    [
        ((16, 32), jnp.float32, None, "is an argument"),
        ((16,), jnp.float32, (NONE,), "is no floating-point array"),
        ((16, 32), jnp.int32, (NONE, NONE), "is no floating-point array"),
        ((16, 32), jnp.float32, (DATA, ("model",)), "is split over 'model' already"),
        ((15, 31), jnp.bfloat16, (NONE, NONE), "has no whole dimension that 2"),
        ((16, 31), jnp.float32, (DATA, NONE), "has no whole dimension that 2"),
        ((0, 31), jnp.float32, (NONE, NONE), "has no whole dimension that 2"),
    ],
)
def test_why_an_input_stays_whole(shape, dtype, axes, reason):
    found = dimension_of(jax.core.ShapedArray(shape, dtype), axes, "model", 2)
    assert isinstance(found, str)
    assert reason in found


# -- a program with the tensor parallelism of Megatron-LM ---------------------------------------


def f32(*shape, split=()):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, P(*split)))


UP, DOWN = f32(WIDTH, HIDDEN, split=(None, "model")), f32(HIDDEN, WIDTH, split=("model", None))
ARGS = [(UP, DOWN)] * LAYERS, f32(ROWS, TOKENS, WIDTH, split=("data",))
ACTIVATION = 4 * ROWS * TOKENS * WIDTH // 4  # bytes on each of the four devices along "data"


def block(w, x):
    return x + jnp.tanh(x @ w[0]) @ w[1]


def loss(weights, x, block=block):
    x = jnp.sin(x)
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = block(w, x)
    return jnp.mean(x**2)


def decorated(policy):
    return remat_kit.policy(policy, at="layer_*")(loss)


def test_a_report_says_that_the_inputs_are_saved_in_slices():
    whole = remat_kit.inspect(decorated("nothing"), *ARGS, target="cpu")
    parts = remat_kit.inspect(decorated(sliced("model")), *ARGS, target="cpu")
    inputs = [r for r in whole.saved if r.reason.startswith("input of region")]
    cut = [r for r in parts.saved if r.reason.startswith("sliced('model'), input of region layer")]
    assert [r.bytes for r in inputs] == [ACTIVATION] * LAYERS
    assert [r.bytes for r in cut] == [ACTIVATION // 2] * LAYERS
    assert [(r.module, r.primitive, r.shape) for r in inputs] == [
        (r.module, r.primitive, r.shape) for r in cut
    ]
    assert sum(r.bytes for r in whole.saved) - sum(r.bytes for r in parts.saved) == sum(
        r.bytes for r in cut
    )
    reading = parts.readings["cpu:8"]
    for i, verdict in enumerate(reading.regions):
        assert (verdict.module, verdict.verdict) == (f"layer_{i}", "effective")
        assert "saved in slices over 'model', 16 KiB on each device" in verdict.message
    gathers = [c for c in reading.collectives if c.kind == "all-gather"]
    assert [(c.module, c.bytes, c.axes, c.phase, c.repeated) for c in gathers] == [
        (f"layer_{i}", ACTIVATION, ("model",), "recompute", True) for i in (2, 1, 0)
    ]
    # Nothing else is exchanged.
    kinds = [
        collections.Counter(c.kind for c in r.readings["cpu:8"].collectives if not c.repeated)
        for r in (whole, parts)
    ]
    assert kinds[0] == kinds[1]
    assert not [x for x in parts.lints if x.code == "collective-repeated"]


def test_a_value_that_is_also_saved_whole_counts_twice():
    def both(weights, x):
        x = jnp.sin(x * weights[0][0][0, 0])
        squares = jnp.mean(x * x)
        with jax.named_scope("layer_0"):
            return squares + jnp.mean(block(weights[0], x) ** 2)

    fn = remat_kit.policy(sliced("model"), at="layer_*")(both)
    found = [r for r in remat_kit.inspect(fn, *ARGS).saved if r.primitive == "sin"]
    assert sorted((r.bytes, r.reason.split(",")[0]) for r in found) == [
        (ACTIVATION // 2, "sliced('model')"),
        (ACTIVATION, "needed by the backward pass"),
    ]


@pytest.mark.skipif(_jax.JAX_VERSION < (0, 11), reason="XLA:CPU of jax 0.10 merges regions")
def test_the_compiled_program_takes_less_by_what_is_saved_in_slices():
    args = [(UP, DOWN)] * 8, f32(4 * ROWS, 4 * TOKENS, WIDTH, split=("data",))
    temp = [
        remat_kit.measure(decorated(p), *args, target="cpu").temp_bytes
        for p in ("nothing", sliced("model"))
    ]
    assert temp[0] - temp[1] >= 7 * 16 * ACTIVATION // 2


def test_diff_shows_the_same_recomputation():
    found = [remat_kit.diff(loss, decorated(p), *ARGS) for p in ("nothing", sliced("model"))]
    assert found[0].duplicates == found[1].duplicates
    assert len(found[0].duplicates) == 2 * LAYERS


@pytest.mark.slow
def test_a_model_with_an_axis_that_splits_no_activation():
    on = {"mesh": "data=4,model=2", "sharding": "fsdp"}
    sizes = {"size": "tiny", "batch": 16, "layers": 3}
    whole, cut = (
        remat_kit.inspect(*_flat(gpt.build(policy, **sizes, **on))).saved
        for policy in ("nothing", "mindspore_recompute_slice_activation:model")
    )
    block = 4 * 16 * 16 * 32 // 4
    assert sum(r.bytes for r in whole) - sum(r.bytes for r in cut) == 3 * block // 2


@pytest.mark.slow
def test_the_fix_for_other_collectives_is_another_policy():
    on = {"mesh": "data=4,model=2", "sharding": "fsdp"}
    fn, args = gpt.build(size="tiny", batch=16, layers=3, **on)
    report = remat_kit.inspect(fn, *args, policy="sliced('model')", at="*/block_*", target="cpu")
    found = [x for x in report.lints if x.code == "collective-repeated"]
    assert found
    assert all("over data" in x.message for x in found)
    assert {x.fix for x in found} == {'remat_kit.policy("save(collective)", at="*/block_*")'}


def _flat(built):
    loss, args = built
    return loss, *args


# -- what is said -------------------------------------------------------------------------------


def test_a_mesh_without_the_axis():
    with pytest.raises(remat_kit.UserError, match=r"has no axis 'modle'\n.*'data', 'model'"):
        remat_kit.inspect(decorated(sliced("modle")), *ARGS)


@pytest.mark.parametrize(
    ("fn", "args", "reason"),
    [
        (decorated(sliced("data")), ARGS, "is split over 'data' already"),
        (remat_kit.policy(sliced("model"))(loss), ARGS, "inputs of the regions are arguments"),
        (
            decorated(sliced("model")),
            ([(jnp.ones((8, 8)),) * 2] * 2, jnp.ones((4, 8))),
            "the program splits no array over a mesh",
        ),
    ],
    ids=["split", "arguments", "one device"],
)
def test_a_warning_if_no_input_is_sliced(fn, args, reason):
    with pytest.warns(remat_kit.RematKitWarning, match=f"can be saved in slices(.|\n)*{reason}"):
        remat_kit.inspect(fn, *args)


def test_a_model_that_splits_the_tokens_already():
    on = {"mesh": "data=4,model=2", "sharding": "fsdp+tp"}
    fn, args = gpt.build("sliced('model')", size="tiny", batch=16, layers=2, **on)
    with pytest.warns(remat_kit.RematKitWarning, match="is split over 'model' already"):
        remat_kit.inspect(fn, *args)


def test_a_warning_where_the_shardings_are_unknown():
    mine = remat_kit.policy(sliced("model"))(block)
    w = jnp.ones((8, 8)), jnp.ones((8, 8))
    with pytest.warns(remat_kit.RematKitWarning, match="it is unknown here"):
        jax.grad(lambda x: jnp.sum(mine(w, jnp.sin(x))))(jnp.ones((4, 8)))
    assert mine(w, jnp.ones((4, 8))).shape == (4, 8)  # without a gradient nothing is said


def test_a_region_with_a_mutable_array_saves_its_inputs_whole():
    def changing(x):
        ref = jax.new_ref(jnp.sin(x))
        ref[0] = x[1]
        return ref[...]

    x = jnp.ones((16, 8))
    program = Program.of(jax.make_jaxpr(changing)(x))
    key = communication.key_of((), [jax.typeof(x)])
    known = communication.Known({key: {(NamedSharding(MESH, P("data")),)}}, {key: {(False,)}})
    slicing = slices.Slicing(remat_kit.policy(sliced("model")).args[0])
    with communication.within(known):
        assert slicing.slices(program, [x], ()) == ()
        plain = Program.of(jax.make_jaxpr(jnp.sin)(x))
        assert [(s.input, s.dimension) for s in slicing.slices(plain, [x], ())] == [(0, 1)]
    assert list(slicing.whole) == ["a region has an effect or a mutable array"]


def test_inside_of_a_shard_map():
    mine = remat_kit.policy(sliced("model"))(jnp.tanh)

    def mapped(x):
        split = P("data")
        return jnp.sum(jax.shard_map(mine, mesh=MESH, in_specs=split, out_specs=split)(x))

    with pytest.raises(remat_kit.UserError, match="inside of a `shard_map`"):
        remat_kit.inspect(mapped, ARGS[1])


def test_a_plan_of_a_function_whose_regions_ask_for_shardings():
    for policy in (sliced("model"), "save(collective)"):
        assert remat_kit.plan(decorated(policy), *ARGS, budget="min", target="cpu").policy
