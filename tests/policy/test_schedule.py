"""The text of a plan is held against the program when it is applied to it."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import one_by_one

import remat_kit
from remat_kit._errors import PolicyError
from remat_kit._planner import frontier as _frontier
from remat_kit._policy import schedule as _schedule
from remat_kit._program import program as _program


def chain(ws, x):
    for i, w in enumerate(ws):
        with jax.named_scope(f"block_{i}"):
            x = x + jnp.sin(jnp.tanh(x @ w))
    return jnp.sum(x**2)


def scanned(ws, x):
    def step(x, w):
        y = jnp.tanh(x @ w)
        return jnp.sin(y) + x, jnp.sum(y)

    x, sums = jax.lax.scan(step, x, ws)
    return jnp.sum(x**2) + jnp.sum(sums)


KEYS = jax.random.split(jax.random.key(0))
STACK, X = jax.random.normal(KEYS[0], (6, 8, 8)) / 3, jax.random.normal(KEYS[1], (64, 8))
ARGS = {chain: ([*STACK[:4]], X), scanned: (STACK, X)}
PROGRAMS = {"chain": chain, "scanned": scanned}


def program_of(fn):
    return _program.flat_program(jax.make_jaxpr(fn)(*ARGS[fn]))


def real_plans(fn, offload):
    target = "h100" if offload else "cpu"
    front = remat_kit.frontier(fn, *ARGS[fn], target=target, offload=offload)
    return [_frontier.policy_of(front.graph, point.schedule) for point in front.points]


def applied(fn, *lines):
    return remat_kit.policy(remat_kit.planned(_schedule.describe(program_of(fn)), *lines))(fn)


def refusal(fn, *lines):
    with pytest.raises(PolicyError) as caught:
        jax.eval_shape(applied(fn, *lines), *ARGS[fn])
    assert caught.value.hint
    return caught.value.message


N = len(program_of(chain).eqns)
SCAN = [e.primitive.name for e in program_of(scanned).eqns].index("scan")
LAST = len(program_of(scanned).eqns)
BODY = len(_program.flat_program(program_of(scanned).eqns[SCAN].params["jaxpr"]).eqns)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((), f"the plan ends before equation 0, but the program has {N}"),
        (("0:4",), f"ends before equation 4, but the program has {N}"),
        (("0:4", f"5:{N}"), "a gap: the next equation is 4"),
        (("0:4", f"3:{N}"), "an overlap: the next equation is 4"),
        ((f"1:{N}",), "a gap: the next equation is 0"),
        (("0:4", "4:4", f"4:{N}"), "it ends where it begins"),
        (("0:4", "4:2 plain", f"2:{N}"), "it ends where it begins, or before"),
        ((f"0:{N + 1}",), f"there are only {N} equations"),
        ((f"0:{N}", f"{N}:{N + 2} plain"), f"there are only {N} equations"),
        ((f"0:{N} save {N}.0",), "whose equation lies outside of it"),
        (("0:4 save 5.0", f"4:{N}"), "keeps 5.0, whose equation lies outside of it"),
        ((f"0:{N} save 1.1",), "keeps 1.1, but tanh has no such output"),
        ((f"0:{N} save 1.0 1.0",), "keeps one value twice"),
        ((f"0:{N} save 1.0 offload 1.0",), "keeps one value twice"),
        ((f"0:{N} save in.0",), "in.0 can wait on the host"),
        ((f"0:{N} offload in.9",), "keeps in.9, but there are 5 arguments"),
        (("0:4 plain", f"4:{N} offload in.7"), "but there are 5 arguments"),
        ((f"0:{N - 1}", f"{N - 1}:{N} offload in.4"), "keeps in.4, which it does not read"),
        ((f"0:{N} around (0:4; 4:{N} offload in.0)",), "in.0 can wait on the host"),
        ((f"0:{N} plain save 1.0",), "a plain segment is no region"),
        ((f"0:{N} plain around (0:{N})",), "a plain segment is no region"),
        ((f"0:{N} plain plain",), "'plain' stands twice"),
        ((f"0:{N} save 1.0 save 2.0",), "'save' stands twice"),
        ((f"0:{N} around (0:{N}) around (0:{N})",), "'around' stands twice"),
        ((f"0:{N} around (0:4; 5:{N})",), f"5:{N}: a gap"),
        ((f"0:{N} around (0:4; 4:{N - 1})",), f"the segments end at {N - 1} instead of {N}"),
        ((f"0:{N} save 1.0 around (0:4; 4:{N})",), "keeps 1.0, which no segment inside of it"),
        ((f"0:{N} plain loop 2 6*1 (0:3)",), "loop 2: sin is no scan"),
        ((f"0:{N} loop 2 6*1 (0:3)",), "only a plain segment runs a loop"),
        (("0:4 plain loop 5 6*1 (0:3)", f"4:{N}"), "loop 5: this equation lies outside"),
        ((f"0:{N} plain loop 2",), "'the end' is out of place"),
        (("7 times (0:4)", f"28:{N}"), "there are only"),
        (("2 times (5:5)",), "a block of 0 equations cannot be repeated"),
        (("99999 times (0:1; 1:2)",), "99999 times 2 segments"),
        (("99999 times (99999 times (0:1))",), "out of place"),
        (("9" * 5000 + ":1",), "out of place"),
        (("0:" + "9" * 5000,), "out of place"),
        (("0:٣",), "out of place"),
        ((f"0:{N} around (" * 150 + f"0:{N}" + ")" * 150,), "more than 100 segments inside"),
        (("",), "'the end' is out of place"),
        (("0:1 plain \ud800",), "out of place"),
    ],
)
def test_lines_that_do_not_fit_the_program_are_refused(lines, said):
    message = refusal(chain, *lines)
    assert said in message
    assert len(message) < 600
    assert not lines or "line " in message or "ends before" in message


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (f"5*1 (0:{BODY})", "5 iterations, but the scan has 6"),
        (f"3*1 (0:{BODY}) 4*2 (0:{BODY})", "7 iterations, but the scan has 6"),
        (f"6*0 (0:{BODY})", "groups of 0 among 6 iterations"),
        (f"6*7 (0:{BODY})", "groups of 7 among 6 iterations"),
        (f"6*1 (0:{BODY - 1})", f"end at {BODY - 1} instead of {BODY}"),
        (f"6*1 (0:{BODY + 1})", f"there are only {BODY} equations"),
        ("6*1 (0:2; 1:3)", "an overlap: the next equation is 2"),
        (f"6*1 (0:{BODY} save {BODY}.0)", "lies outside of it"),
        (f"6*1 (0:{BODY} offload in.7)", "there are 2 arguments"),
        (f"6*1 (0:{BODY} plain loop 0 6*1 (0:1))", "dot_general is no scan"),
        (f"6*1 (0:{BODY}) loop {SCAN} 6*1 (0:{BODY})", "two loops for one equation"),
    ],
)
def test_loops_that_do_not_fit_the_scan_are_refused(loop, said):
    line = f"0:{LAST} plain loop {SCAN} {loop}"
    message = refusal(scanned, line)
    assert said in message
    assert "line 1 of the plan" in message


def test_an_output_that_nothing_reads_may_be_named():
    def fn(x):
        return jnp.sum(jax.lax.top_k(jnp.sin(x), 3)[0])

    program = _program.flat_program(jax.make_jaxpr(fn)(X))
    n = len(program.eqns)
    (place,) = (i for i, e in enumerate(program.eqns) if e.primitive.name == "top_k")
    plan = remat_kit.planned(_schedule.describe(program), f"0:{n} save {place}.1")
    found = one_by_one(jax.grad(remat_kit.policy(plan)(fn)), X)
    np.testing.assert_array_equal(found, one_by_one(jax.grad(fn), X))


@pytest.mark.parametrize(
    "text", ["", "nonsense", "joined", "joined=", "shapes=1 sin=2", "=", "9" * 5000]
)
def test_the_short_form_of_a_program_that_is_none(text):
    plan = remat_kit.policy(remat_kit.planned(text, f"0:{N}"))
    with pytest.raises(PolicyError, match="which program the plan was made"):
        jax.eval_shape(plan(chain), *ARGS[chain])


def test_a_scan_of_another_length_is_refused_where_shapes_may_differ():
    line = f"0:{LAST} plain loop {SCAN} 6*1 (0:{BODY})"
    plan = remat_kit.planned(_schedule.describe(program_of(scanned)), line, strict=False)
    fewer = STACK[:5], X
    with pytest.raises(PolicyError, match="6 iterations, but the scan has 5"):
        jax.eval_shape(remat_kit.policy(plan)(scanned), *fewer)


@pytest.mark.parametrize(("name", "offload"), [("chain", False), ("scanned", True)])
def test_what_the_planner_writes_fits(name, offload):
    program = program_of(PROGRAMS[name])
    plans = real_plans(PROGRAMS[name], offload)
    assert plans
    for plan in plans:
        assert _schedule.read(plan.lines, program, call="policy(...)")


WORDS = ("plain", "save", "offload", "around", "hold", "drop", "loop", "times", "in", "2", ";", ")")


def mutations(lines):
    """Yield the lines with each number and each word changed, left out or moved."""
    for at, line in enumerate(lines):
        tokens = [(m.start(), m.end(), m[0]) for m in re.finditer(r"\d+|[a-z]+|[();:.*]", line)]
        for start, stop, token in tokens:
            number = token.isdigit()
            others = [int(token) + 1, int(token) - 1, 0, 99999] if number else ["", *WORDS]
            for other in dict.fromkeys(map(str, others)):
                if other != token:
                    changed = line[:start] + other + line[stop:]
                    yield (*lines[:at], changed, *lines[at + 1 :])
        yield (*lines[:at], *lines[at + 1 :])
        yield (*lines[: at + 1], line, *lines[at + 1 :])


SOME = {
    "chain": (
        "2 times (0:3 save 0.0; 3:4 plain)",
        f"8:{N} save 8.0 around (8:12 save 8.0 9.0; 12:{N})",
    ),
    "scanned": (
        f"0:{LAST} plain loop {SCAN} 4*2 (0:2 save 0.0; 2:{BODY} plain) "
        f"2*1 (0:{BODY} offload in.1)",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_changed_plan_is_refused_or_has_the_same_values(name):
    fn = PROGRAMS[name]
    program = program_of(fn)
    want = one_by_one(jax.value_and_grad(fn, (0, 1)), *ARGS[fn])
    accepted = {SOME[name]: None}
    refused = 0
    for lines in mutations(SOME[name]):
        try:
            _schedule.read(lines, program, call="policy(...)")
        except PolicyError:
            refused += 1
        else:
            accepted[lines] = None
    assert refused > len(accepted) > 5
    # Evaluating takes most of the time: a sample, always the same.
    for lines in itertools.islice(accepted, 0, None, max(1, len(accepted) // 4)):
        got = one_by_one(jax.value_and_grad(applied(fn, *lines), (0, 1)), *ARGS[fn])
        jax.tree.map(np.testing.assert_array_equal, got, want)
