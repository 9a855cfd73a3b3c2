"""Conditionals read back: every branch is seen, and the most expensive one is what they cost."""

import jax
import jax.numpy as jnp
import pytest

import remat_kit
from remat_kit import target
from remat_kit._compiled import roofline as _roofline
from remat_kit._compiled.duplicates import recomputed_ops
from remat_kit._compiled.hlo import Instruction, parse
from remat_kit._compiled.liveness import schedule
from remat_kit._compiled.peak import anatomy, origins
from remat_kit._planner.costs.build import trace
from remat_kit._program import ops as _ops
from remat_kit._program.steps import gradient as _gradient

W = jax.ShapeDtypeStruct((48, 48), jnp.float32)
X = jax.ShapeDtypeStruct((80, 48), jnp.float32)
PRODUCT = 2 * 80 * 48 * 48


def products(count):
    def branch(x, w):
        for _ in range(count):
            x = jnp.tanh(x @ w)
        return x

    return branch


def branching(w, x, index, flag):
    x = jax.lax.switch(index, [products(n) for n in (1, 3, 0, 2)], x, w)
    x = jax.lax.cond(flag, products(1), products(2), x, w)
    return jnp.sum(x**2)


ARGUMENTS = (W, X, jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_))


@pytest.fixture(scope="module")
def report():
    decorated = remat_kit.policy("nothing")(branching)
    return remat_kit.inspect(decorated, *ARGUMENTS, target="cpu")


def test_a_compiled_program_with_conditionals_is_read_back(report):
    (reading,) = report.readings.values()
    # Of the dearest branch of each conditional: forward, again, and backward two products for each
    # but the first, whose input is not differentiated.
    assert reading.estimate.total.flops == pytest.approx(((3 + 2) * 4 - 1) * PRODUCT)
    assert reading.peak.bytes > 0


def test_a_conditional_costs_its_most_expensive_branch_in_every_figure():
    jaxpr = jax.make_jaxpr(branching)(*ARGUMENTS)
    by_graph = sum(_ops.flops(e) for e in jaxpr.eqns if e.primitive.name == "cond")
    elementwise = (3 + 2) * 80 * 48
    assert by_graph == (3 + 2) * PRODUCT + elementwise
    gradient = _gradient.trace_gradient(branching, ARGUMENTS, call="inspect")
    inside = [op for op in gradient.primal.ops if op.kind == "equation" and op.frame.eqn]
    assert sum(op.flops for op in inside) == by_graph


def test_the_planner_takes_the_seconds_of_the_most_expensive_branch():
    def cheap(x, w):
        del w
        return x

    def switched(*branches):
        def loss(w, x, index):
            return jnp.sum(jax.lax.switch(index, branches, x, w) ** 2)

        return trace(loss, ARGUMENTS[:3], target("cpu"))

    def the_switch(graph):
        return next(e for e in graph.equations if e.primitive == "cond")

    chain = products(3)
    (first, last, twice) = (
        the_switch(switched(*b)) for b in ((chain, cheap), (cheap, chain), (chain, chain))
    )
    assert first.seconds == last.seconds == twice.seconds > 0
    assert first.backward_seconds == last.backward_seconds == twice.backward_seconds
    alone = trace(lambda w, x: jnp.sum(chain(x, w) ** 2), (W, X), target("cpu"))
    inside = sum(e.seconds for e in alone.equations[:-2])
    assert first.seconds == pytest.approx(inside, rel=0.2)


# -- the forms in which a compiled program refers to other computations --------------------------

REFERENCES = {
    "branch_computations={%a.1, %b-2, %c_3}, metadata={op_name='x'}": ("a.1", "b-2", "c_3"),
    "true_computation=%a, false_computation=%b": ("a", "b"),
    "condition=%a, body=%b, backend_config={}": ("a", "b"),
    "kind=kLoop, calls=%fused_computation.7": ("fused_computation.7",),
    "window={size=2}, select=%ge, scatter=%add": ("ge", "add"),
    "dimensions={0}, is_stable=true, to_apply=%compare": ("compare",),
    'custom_call_target="f", called_computations={%a, %b}': ("a", "b"),
    "control-predecessors={%a, %b}, index=0": (),
    'metadata={op_name="body=%a calls=%b"}, backend_config="to_apply=%c"': (),
}


@pytest.mark.parametrize("attributes", REFERENCES)
def test_every_computation_that_an_instruction_refers_to_is_found(attributes):
    instruction = Instruction("i", "custom-call", "f32[]", (), f", {attributes}", "")
    assert instruction.called == REFERENCES[attributes]


def branches(cheap, dear, written):
    """A program that takes one of two branches, written in either of XLA's two forms."""
    return f"""HloModule m, is_scheduled=true
%cheap (p: f32[256]) -> f32[256] {{
  %p = f32[256]{{0}} parameter(0)
  ROOT %sin = f32[256]{{0}} sine(%p)
}}
%dear (q: f32[256]) -> f32[256] {{
  %q = f32[256]{{0}} parameter(0)
  %wide = f32[1024]{{0}} broadcast(%q), dimensions={{0}}
  %out = f32[256]{{0}} slice(%wide), slice={{[0:256]}}
  ROOT %cos = f32[256]{{0}} cosine(%out)
}}
ENTRY %main (x: f32[256], c: pred[]) -> f32[256] {{
  %x = f32[256]{{0}} parameter(0)
  %c = pred[] parameter(1)
  ROOT %r = f32[256]{{0}} conditional(%c, %x, %x), {written.format(cheap, dear)}
}}
"""


FORMS = ("branch_computations={{%{}, %{}}}", "true_computation=%{}, false_computation=%{}")


@pytest.mark.parametrize("written", FORMS)
@pytest.mark.parametrize("order", [("cheap", "dear"), ("dear", "cheap")])
def test_a_walk_sees_every_branch_whatever_the_order(order, written):
    program = parse(branches(*order, written))
    chip = target("cpu")
    time = _roofline.estimate(program, chip, origins(program))
    assert time.total.bytes == 4 * ((256 + 1024) + (256 + 256) + (256 + 256))
    assert anatomy(program).peak.bytes == schedule(program).peak_bytes
    assert max(schedule(program).temporary_bytes) >= 4 * 1024
    assert recomputed_ops(program).total == 0


def test_what_runs_in_the_background_is_walked():
    program = parse("""HloModule m, is_scheduled=true
%work (p: f32[256]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  %wide = f32[1024]{0} broadcast(%p), dimensions={0}
  ROOT %out = f32[256]{0} slice(%wide), slice={[0:256]}
}
ENTRY %main (x: f32[256]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  %s = ((f32[256]{0}), f32[256]{0}, u32[]) call-start(%x), to_apply=%work
  ROOT %d = f32[256]{0} call-done(%s)
}
""")
    parts = anatomy(program)
    assert max(parts.schedule.temporary_bytes) >= 4 * 1024
    assert {"wide", "out"} <= parts.origins.keys()


def test_reductions_of_one_array_that_combine_differently_are_two_values():
    def text(first, second):
        name = 'metadata={op_name="jit(f)/jvp(N)/b/reduce"}'
        return f"""HloModule m
%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}
%max (c: f32[], d: f32[]) -> f32[] {{
  %c = f32[] parameter(0)
  %d = f32[] parameter(1)
  ROOT %m = f32[] maximum(%c, %d)
}}
ENTRY %main (x: f32[4], z: f32[]) -> f32[] {{
  %x = f32[4]{{0}} parameter(0)
  %z = f32[] parameter(1)
  %one = f32[] reduce(%x, %z), dimensions={{0}}, to_apply=%{first}, {name}
  %two = f32[] reduce(%x, %z), dimensions={{0}}, to_apply=%{second}, {name}
  ROOT %r = f32[] add(%one, %two)
}}
"""

    assert recomputed_ops(text("add", "add")).forward["N/b", "reduce"] == 1
    assert recomputed_ops(text("add", "max")).forward["N/b", "reduce"] == 2
