"""Hypothesis strategies for programs, policies, and what is done to a program."""

from __future__ import annotations

import dataclasses
import functools

from harness import FLAGS, MODES, TRANSFORMS, Application, Case
from hypothesis import strategies as st
from programs import FORWARD, NONE, REVERSE, Op, Program, allowed

import remat_kit as rk

# -- policies ------------------------------------------------------------------------------------

_ATOMS = [
    rk.primitive("tanh"),
    rk.primitive("mul", "add"),
    rk.primitive("dot_general"),
    rk.primitive("custom_*"),
    rk.primitive("*"),
    rk.named("alpha", strict=False),
    rk.named("*", strict=False),
    rk.module("block_0", strict=False),
    rk.module("**/inner", "**/layer_1", strict=False),
    rk.dots,
    rk.dots_no_batch,
    rk.larger_than("20B"),
    rk.smaller_than("48B"),
    rk.dtype("float32"),
    rk.dtype("bfloat16", "int32", "bool"),
    rk.cheap(1.0),
    rk.source("programs.py"),
    rk.everything,
    rk.nothing,
]
selectors = st.recursive(
    st.sampled_from(_ATOMS),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a - b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=3,
)
algebra = st.recursive(
    st.one_of(
        st.builds(rk.save, selectors),
        st.builds(rk.offload, selectors),
        st.builds(rk.recompute, selectors),
    ),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a >> b, inner, inner),
    ),
    max_leaves=3,
)
PRESETS = [
    *("nothing", "everything", "dots", "dots_no_batch", "offload_dots", "larger_than:20B"),
    *("mindspore_cell", "mindspore_primitive:mul,tanh", "pax_save_dot_only", "t5x_minimal"),
]
BLOCKS = "block_*"
keeps = st.sampled_from(
    [
        rk.nothing,
        rk.dots,
        rk.everything,
        rk.primitive("tanh"),
        rk.save(rk.dots) | rk.offload(rk.named("*", strict=False)),
    ]
)
structures = st.one_of(
    st.builds(rk.uniform, st.integers(1, 3), keeps),
    st.builds(rk.block, st.integers(1, 3), keeps),
    st.builds(rk.nested, st.sampled_from([None, 1, 2]), keeps),
)
_segments = st.builds(rk.segments, st.just("alpha"), keep=keeps)
cse = st.sampled_from([None, None, None, True, False])
applications = st.one_of(
    st.builds(Application, algebra, prevent_cse=cse),
    st.builds(Application, algebra, prevent_cse=cse),
    st.builds(Application, st.sampled_from(PRESETS)),
    st.builds(Application, algebra, at=st.sampled_from([BLOCKS, BLOCKS, "block_1", "**/inner"])),
    st.builds(Application, structures, at=st.just(BLOCKS)),
    st.builds(
        Application, st.builds(rk.segments, st.just("alpha"), keep=keeps), at=st.just(BLOCKS)
    ),
    st.builds(Application, st.integers(0, 10**6).map("schedule:{}".format)),
)
in_pieces = st.builds(Application, st.integers(0, 10**6).map("pieces:{}".format))
plans = st.builds(Application, st.integers(0, 15).map("plan:{}".format))


# -- programs ------------------------------------------------------------------------------------

_DTYPES = ["float32"] * 8 + ["bfloat16", "float16", "float64", "complex64"]
_ROWS = [3] * 9 + [0]


@functools.cache
def _operations(dtype: str, rows: int, orders: str) -> st.SearchStrategy[Op]:
    plain, outer = allowed(dtype=dtype, rows=rows, orders=orders)
    places = st.integers(0, 4)
    leaf = st.builds(Op, st.sampled_from(plain), places, places, st.integers(0, 6))

    def around(inner: st.SearchStrategy[Op]) -> st.SearchStrategy[Op]:
        body = st.lists(inner, min_size=1, max_size=2).map(tuple)
        return st.builds(Op, st.sampled_from(outer), places, places, st.integers(0, 6), body)

    once = around(leaf)
    return st.one_of(leaf, leaf, once, around(st.one_of(leaf, once))).filter(_possible)


@st.composite
def programs(draw: st.DrawFn, orders: str) -> Program:
    dtype = draw(st.sampled_from(_DTYPES))
    rows = draw(st.sampled_from(_ROWS))
    operation = _operations(dtype, rows, orders)
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (1, 1), (2, 1), (1, 2), (1, 1, 1)]))
    blocks = tuple(tuple(draw(operation) for _ in range(size)) for size in sizes)
    outputs = draw(st.sampled_from([(0,), (0,), (0, 1), (0, 0), (1, 0, 2)]))
    used = draw(st.sampled_from([(0,), (1,), (0, 1, 2)]))
    return Program(blocks, outputs, used, dtype, rows, draw(st.booleans()))


def _possible(op: Op, inside: frozenset[str] = frozenset()) -> bool:
    """Tell whether JAX can run an operation inside those around it."""
    reverse = inside & {"grad", "accumulated", "vjp_body"}
    if reverse and op.name in FORWARD | NONE:
        return False
    if inside & {"jvp", "linearize"} and op.name in NONE:
        return False
    if "jvp" in inside and op.name in REVERSE:
        return False
    return all(_possible(each, inside | {op.name}) for each in op.body)


def _fitting(program: Program, application: Application) -> Program:
    """Return a program that has what a policy speaks of."""
    if str(application.policy).startswith("plan:") and program.dtype.startswith("complex"):
        program = dataclasses.replace(program, dtype="float32")  # a frontier is of real arguments
    first = program.blocks[0]
    if isinstance(application.policy, rk.segments("alpha").__class__):
        first = (*first, Op("name"))
    if application.at == "**/inner" and "scope" not in program.names():
        first = (*first[:-1], Op("scope", body=first[-1:]))
    return dataclasses.replace(program, blocks=(first, *program.blocks[1:]))


@st.composite
def cases(
    draw: st.DrawFn,
    transforms: tuple[str, ...] = tuple(TRANSFORMS),
    modes: tuple[str, ...] = MODES,
    how: st.SearchStrategy[Application] = applications,
) -> Case:
    transform = draw(st.sampled_from(transforms))
    application = draw(how)
    program = _fitting(draw(programs(TRANSFORMS[transform][0])), application)
    mode = draw(st.sampled_from(modes))
    some = [(), (), FLAGS[:1], FLAGS[:1], FLAGS[1:2], FLAGS[2:3], FLAGS[3:], FLAGS]
    return Case(program, application, transform, mode, draw(st.sampled_from(some)))
