"""Collectives of compiled programs: groups, axes, time, and which recomputation repeats."""

import collections
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from compiled_programs import needs
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import remat_kit
from remat_kit._chip.lowering import ProgramMesh
from remat_kit._compiled.collectives import ReplicaGroups, axes_of, link_seconds

LAYERS, WIDE, ROWS = 3, 256, 1024
MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
CPU, TPU = "cpu", "tpu-v5e"


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.Dense(4 * WIDE, name="up", use_bias=False)(x)
        return x + nn.Dense(WIDE, name="down", use_bias=False)(jnp.tanh(h)), None


class Net(nn.Module):
    scan: bool = False

    @nn.compact
    def __call__(self, x):
        if self.scan:
            axes, rngs = {"params": 0}, {"params": True}
            layers = nn.scan(Block, variable_axes=axes, split_rngs=rngs, length=LAYERS)
            return layers(name="block_scan")(x, None)[0]
        for i in range(LAYERS):
            x, _ = Block(name=f"block_{i}")(x)
        return x


SPLITS = {
    "fsdp": {"up": ("data", None), "down": ("data", None)},
    "tp": {"up": (None, "model"), "down": ("model", None)},
}


def program(sharding, scan=False):
    net = Net(scan)
    x = jax.ShapeDtypeStruct((ROWS, WIDE), jnp.float32)
    params = jax.eval_shape(net.init, jax.random.key(0), x)

    def place(path, leaf):
        name = next(name for name in SPLITS[sharding] if f"'{name}'" in jax.tree_util.keystr(path))
        spec = P(*(None,) * scan, *SPLITS[sharding][name])
        return leaf.update(sharding=NamedSharding(MESH, spec))

    params = jax.tree_util.tree_map_with_path(place, params)
    x = x.update(sharding=NamedSharding(MESH, P("data")))
    return lambda params, x: jnp.mean(net.apply(params, x) ** 2), (params, x)


def report(sharding, policy=None, target=CPU, scan=False):
    fn, args = program(sharding, scan)
    at = None if policy is None else "*/block_*"
    return remat_kit.inspect(fn, *args, policy=policy, at=at, target=needs(target))


def found(*args, **how):
    (reading,) = report(*args, **how).readings.values()
    return reading.collectives


# -- groups -------------------------------------------------------------------------------------


GROUPS = {
    "replica_groups={{0,2},{1,3}}": [(0, 2), (1, 3)],
    "replica_groups=[2,2]<=[4]": [(0, 1), (2, 3)],
    "replica_groups=[2,2]<=[2,2]T(1,0)": [(0, 2), (1, 3)],
    "replica_groups=mesh['a'=2,'b'=2] {'a'}": [(0, 2), (1, 3)],
    "replica_groups=mesh['a'=4] {'a':(1)2}": [(0, 2), (1, 3)],
    "replica_groups=mesh['a'=4] {'a':(2)2}": [(0, 1), (2, 3)],
    "replica_groups=mesh['a'=2,'b'=2] {'a','b'}": [(0, 1, 2, 3)],
    "replica_groups={}": [(0, 1, 2, 3)],
    "source_target_pairs={{0,1},{1,0},{2,3},{3,2}}": [(0, 1), (2, 3)],
}


@pytest.mark.parametrize("text", GROUPS)
def test_every_spelling_of_groups(text):
    groups = ReplicaGroups.parse(f"channel_id=1, {text}, dimensions={{0}}", 4)
    assert groups.groups == frozenset(GROUPS[text])


def test_groups_are_named_by_the_axes_of_the_mesh():
    mesh = ProgramMesh((("data", 2), ("one", 1), ("model", 2)))
    over = {
        names: ReplicaGroups.of(groups)
        for names, groups in {
            ("data",): [(0, 2), (1, 3)],
            ("model",): [(0, 1), (2, 3)],
            ("data", "model"): [(0, 1, 2, 3)],
            (): [(0, 3), (1, 2)],
        }.items()
    }
    assert {names: axes_of(groups, [mesh]) for names, groups in over.items()} == {
        names: names for names in over
    }
    turned = ProgramMesh((("x", 2), ("y", 2)), order=(0, 3, 1, 2))
    assert axes_of(over[()], [mesh, turned]) == ("y",)


# -- time ---------------------------------------------------------------------------------------


def test_time_by_kind_and_link():
    host, four = remat_kit.target("h100:8"), remat_kit.target("h100:4x8")
    eight, all_of_them = (ReplicaGroups.of([range(n)]) for n in (8, 32))
    size = 10**9
    gather = link_seconds("all-gather", size, eight, host)
    assert gather == pytest.approx(size * 7 / 8 / 450e9)
    assert link_seconds("all-reduce", size, eight, host) == pytest.approx(2 * gather)
    assert link_seconds("reduce-scatter", size // 8, eight, host) == pytest.approx(gather)
    # Eight GPUs of a host share its network, which is then as fast as NVLink.
    across = link_seconds("all-gather", size, all_of_them, four)
    assert across == pytest.approx(size * max(3 / 4 / (8 * 50e9), 31 / 32 / 450e9))
    one_of_each = ReplicaGroups.of([range(i, 32, 8) for i in range(8)])
    assert link_seconds("all-gather", size, one_of_each, four) == pytest.approx(size * 3 / 4 / 50e9)
    assert link_seconds("all-gather", size, ReplicaGroups.of([[0]]), host) == 0


# -- compiled programs --------------------------------------------------------------------------


def counted(text):
    """Count the collectives in a compiled text by kind, without the ends of those in pairs."""
    kinds = r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    return collections.Counter(re.findall(rf" = \S.* {kinds}", text))


@pytest.mark.parametrize("policy", [None, "nothing"])
@pytest.mark.parametrize("sharding", SPLITS)
def test_all_collectives_of_the_text_are_listed(sharding, policy):
    fn, args = program(sharding)
    if policy is not None:
        fn = remat_kit.policy(policy, at="*/block_*")(fn)
    from remat_kit._chip.compile import compile_program

    text = compile_program(fn, args, CPU).hlo_text
    assert counted(text) == collections.Counter(c.kind for c in found(sharding, policy))


@pytest.mark.parametrize("target", [CPU, pytest.param(TPU, marks=pytest.mark.slow)])
def test_recomputation_gathers_parameters_again(target):
    assert not any(c.repeated for c in found("fsdp", target=target))
    again = [c for c in found("fsdp", "nothing", target) if c.repeated]
    assert len(again) == 2 * LAYERS
    for c in again:
        assert (c.kind, c.axes, c.group) == ("all-gather", ("data",), 4)
        assert c.phase in ("recompute", "backward")
        assert c.module.startswith("Net/block_")
        assert c.seconds > 0
        assert "test_collectives.py" in c.source


def test_what_the_backward_pass_needs_anyway_is_not_repeated():
    """A scan gathers a layer's parameters in both passes, with a policy or without."""
    plain, again = found("fsdp", scan=True), found("fsdp", "nothing", scan=True)
    assert len(plain) == len(again)
    assert not any(c.repeated for c in again)
    assert {c.times for c in again if c.kind == "all-gather"} == {LAYERS}


def test_json_and_notes_of_a_partitioned_program():
    plain = report("fsdp", "nothing").to_json()
    assert plain["devices"] == {"cpu:8": 8}
    assert plain["mesh"] == {"cpu:8": {"data": 4, "model": 2}}
    rows = plain["collectives"]["cpu:8"]
    needed = {"kind", "bytes", "axes", "group", "module", "source", "phase", "seconds", "repeated"}
    assert all(needed <= row.keys() for row in rows)
    gathers = [row for row in rows if row["kind"] == "all-gather"]
    assert {row["bytes"] for row in gathers} == {4 * 4 * WIDE * WIDE}
    assert plain["step_seconds"]["cpu:8"]["links"] == pytest.approx(sum(r["seconds"] for r in rows))
    assert plain["memory"]["cpu:8"]["devices"] == 8
    (lint, *_) = [x for x in plain["lints"] if x["code"] == "collective-repeated"]
    assert "remat_kit.policy" in lint["fix"]


def test_residuals_have_the_bytes_of_one_device():
    whole = ROWS * WIDE * 4
    saved = [r for r in report("fsdp", "nothing").saved if r.primitive == "add"]
    assert saved
    assert {r.bytes for r in saved} == {whole // 4}
    assert {r.shape for r in saved} == {(ROWS, WIDE)}


def test_programs_for_one_device_have_none():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    plain = remat_kit.inspect(lambda x: jnp.sum(jnp.tanh(x @ x)), x, target=CPU).to_json()
    assert (plain["devices"], plain["mesh"], plain["collectives"]) == (
        {"cpu": 1},
        {"cpu": {}},
        {"cpu": []},
    )
