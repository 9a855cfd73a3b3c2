"""A plan as it is applied: stretches of a traced program, and which of their values are kept.

The text of a stretch names equations by their place in the flat program, so a plan is bound to the
program that it was made for: `describe` gives the short form of a program that a plan carries, and
`check` says what changed when it does not fit.

    0:12 plain                        no region
    12:40 save 15.0 22.0              a region; outputs 0 of equations 15 and 22 are kept
    40:90 save 70.0 around (40:60; 60:90 save 70.0 81.0)    regions in a region that keeps one value
    140:141 plain loop 140 24*1 (0:9 save 3.0) 48*4 (0:9)     a scan: 24 rounds, then groups of 4
    0:9 save 3.0 offload in.2 5.0     argument 2 of the program and 5.0 wait in the host's memory
    12 times (5:40 save 9.0; 40:57)   the same for 12 blocks, of which 5:57 is the first
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from remat_kit import _graph, _jax
from remat_kit import _policy as algebra
from remat_kit._errors import PolicyError
from remat_kit._graph import Program
from remat_kit._region import keep_labelled, label, run_region

Place = tuple[int, int]  # equation, output; or `_GIVEN` and the place of an argument
_GIVEN = -1


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Consecutive equations, and what is kept of them; see `_simulate.Segment`.

    Attributes:
        start, stop: equations ``start <= i < stop``.
        save, offload: the values that are kept on the device and in the host's memory.
        plain: no region.
        inside: smaller stretches; this one is then a region around them, which keeps what it says
            through the first forward pass. They keep that too, and what else they say once it runs
            again.
        loops: the scans that are run in another way.
    """

    start: int
    stop: int
    save: tuple[Place, ...] = ()
    offload: tuple[Place, ...] = ()
    plain: bool = False
    inside: tuple[Stretch, ...] = ()
    loops: tuple[tuple[int, tuple[LoopPart, ...]], ...] = ()

    def __str__(self) -> str:
        words = [f"{self.start}:{self.stop}"]
        if self.plain:
            words.append("plain")
        for name, places in (("save", self.save), ("offload", self.offload)):
            if places:
                words += [name, *(f"{'in' if e == _GIVEN else e}.{p}" for e, p in places)]
        if self.inside:
            inner = "; ".join(map(str, self.inside))
            words.append(f"around ({inner})")
        for equation, parts in self.loops:
            words += ["loop", str(equation), *map(str, parts)]
        return " ".join(words)

    def shifted(self, by: int) -> Stretch:
        """Return the same so many equations later."""

        def places(given: tuple[Place, ...]) -> tuple[Place, ...]:
            return tuple((e if e == _GIVEN else e + by, p) for e, p in given)

        return dataclasses.replace(
            self,
            start=self.start + by,
            stop=self.stop + by,
            save=places(self.save),
            offload=places(self.offload),
            inside=tuple(part.shifted(by) for part in self.inside),
            loops=tuple((equation + by, parts) for equation, parts in self.loops),
        )


@dataclasses.dataclass(frozen=True)
class LoopPart:
    """Some iterations of a scan: in groups of ``group``, each iteration as ``body`` says."""

    times: int
    group: int
    body: tuple[Stretch, ...]

    def __str__(self) -> str:
        return f"{self.times}*{self.group} ({'; '.join(map(str, self.body))})"


# -- the text -----------------------------------------------------------------------------------


def lines(schedule: Sequence[Stretch]) -> tuple[str, ...]:
    """Write a schedule down; neighbours that are treated alike, as the blocks of a model often are,
    share one line.

    >>> lines([Stretch(0, 2), Stretch(2, 4, plain=True), Stretch(4, 6), Stretch(6, 8, plain=True)])
    ('2 times (0:2; 2:4 plain)',)
    """
    alike = [s.shifted(-s.start) for s in schedule]

    def times(at: int, size: int) -> int:
        rest = range(at + size, len(alike) - size + 1, size)
        differs = (k for k in rest if alike[k : k + size] != alike[at : at + size])
        return (next(differs, at + size + len(rest) * size) - at) // size

    found, at = [], 0
    while at < len(schedule):
        sizes = range(1, max(2, 1 + (len(schedule) - at) // 2))
        size = max(sizes, key=lambda size: (size * (times(at, size) - 1), -size))
        count, text = times(at, size), "; ".join(map(str, schedule[at : at + size]))
        found.append(f"{count} times ({text})" if count > 1 else text)
        at += count * size
    return tuple(found)


def parse(text: str) -> tuple[Stretch, ...]:
    """Read a line: a stretch, or some that are repeated.

    >>> [str(s) for s in parse("40:90 save 70.0 around (40:60; 60:90 save 70.0 81.0)")]
    ['40:90 save 70.0 around (40:60; 60:90 save 70.0 81.0)']
    >>> [str(s) for s in parse("2 times (0:2 save 1.0; 2:3 plain)")]
    ['0:2 save 1.0', '2:3 plain', '3:5 save 4.0', '5:6 plain']

    Raises:
        PolicyError: the text is not that of a line.
    """
    reader = _Reader(text)
    found = reader.line()
    reader.end()
    return found


_PLACE = r"(?:\d+|in)\.\d+"


class _Reader:
    def __init__(self, text: str):
        self.text = text
        self.tokens = re.findall(r"\d+:\d+|(?:\d+|in)\.\d+|\d+\*\d+|\d+|[a-z]+|[();]|\S", text)
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, pattern: str) -> str:
        token = self.peek()
        if not re.fullmatch(pattern, token):
            raise PolicyError(
                f"`planned(...)`: {token or 'the end'!r} is out of place in {self.text[:80]!r}",
                hint="leave the lines of a plan as `remat-kit plan --save` wrote them",
            )
        self.at += 1
        return token

    def pair(self, separator: str) -> tuple[int, int]:
        first, second = self.take(rf"\d+{re.escape(separator)}\d+").split(separator)
        return int(first), int(second)

    def places(self) -> tuple[Place, ...]:
        found = []
        while not found or re.fullmatch(_PLACE, self.peek()):
            first, second = self.take(_PLACE).split(".")
            found.append((_GIVEN if first == "in" else int(first), int(second)))
        return tuple(found)

    def line(self) -> tuple[Stretch, ...]:
        if ":" in self.peek():
            return (self.stretch(),)
        times = int(self.take(r"[1-9]\d{0,4}"))
        self.take("times")
        block = self.stretches()
        step = block[-1].stop - block[0].start
        return tuple(s.shifted(k * step) for k in range(times) for s in block)

    def stretch(self) -> Stretch:
        start, stop = self.pair(":")
        fields: dict[str, Any] = {}
        loops: list[tuple[int, tuple[LoopPart, ...]]] = []
        while self.peek() not in ("", ")", ";"):
            word = self.take("plain|save|offload|around|hold|drop|loop")
            if word == "plain":
                fields["plain"] = True
            elif word in ("save", "offload"):
                fields[word] = self.places()
            elif word == "loop":
                equation = int(self.take(r"\d+"))
                parts = []
                while re.fullmatch(r"\d+\*\d+", self.peek()):
                    times, group = self.pair("*")
                    parts.append(LoopPart(times, group, self.stretches()))
                loops.append((equation, tuple(parts)))
            else:
                inside = fields["inside"] = self.stretches()
                if word == "hold":  # as plans were written once: it keeps all that they keep
                    for name in ("save", "offload"):
                        fields[name] = tuple(p for s in inside for p in getattr(s, name))
        return Stretch(start, stop, loops=tuple(loops), **fields)

    def stretches(self) -> tuple[Stretch, ...]:
        self.take(r"\(")
        found = [self.stretch()]
        while self.peek() == ";":
            self.take(";")
            found.append(self.stretch())
        self.take(r"\)")
        return tuple(found)

    def end(self) -> None:
        if self.peek():
            self.take("(?!)")


# -- the program a plan is bound to ---------------------------------------------------------------


def flat_program(closed: Any, base: tuple[str, ...] = ()) -> Program:
    """Return the program that plans are made for: calls and checkpoint regions spliced in."""
    return _graph.without_region_boundaries(Program.of(closed, base))


def describe(program: Program) -> str:
    """Return the short form of a program: its operations counted, a hash of how they are joined,
    one of their shapes.
    """
    numbers: dict[Any, int] = {}
    joined, shapes = hashlib.sha256(), hashlib.sha256()
    counts = collections.Counter(_graph.primitive_name(e) for e in program.eqns)
    for var in program.invars[len(program.consts) :]:
        numbers[var] = len(numbers)
        shapes.update(_aval(var).encode())
    for eqn in program.eqns:
        reads = [numbers.get(v, -1) for v in eqn.invars if not isinstance(v, jec.Literal)]
        for var in eqn.outvars:
            numbers[var] = len(numbers)
            shapes.update(_aval(var).encode())
        joined.update(f"{_graph.primitive_name(eqn)}{reads}{len(eqn.outvars)};".encode())
    ends = joined.hexdigest()[:12], shapes.hexdigest()[:12]
    listed = " ".join(f"{name}={count}" for name, count in sorted(counts.items()))
    return f"joined={ends[0]} shapes={ends[1]} {listed}"


def _aval(var: Any) -> str:
    return f"{getattr(var.aval, 'dtype', '')}{list(getattr(var.aval, 'shape', ()))};"


def check(planned: str, program: Program, *, strict: bool, call: str) -> None:
    """Raise if a plan was made for another program.

    Raises:
        PolicyError: says which operations came or went, or that only shapes differ.
    """
    found = describe(program)
    if found == planned:
        return
    before, now = (dict(w.split("=") for w in text.split()) for text in (planned, found))
    if before.get("joined") == now["joined"]:
        if strict:
            raise PolicyError(
                f"`{call}`: the plan was made for the same operations with other shapes or types",
                hint="plan again for these arguments, or accept it with "
                "`dataclasses.replace(plan.policy, strict=False)`; the memory is then another",
            )
        return
    changes = [
        f"{name} {before.get(name, 0)} -> {now.get(name, 0)}"
        for name in sorted({*before, *now} - {"joined", "shapes"})
        if before.get(name) != now.get(name)
    ]
    what = ", ".join(changes[:8]) if changes else "the same operations, joined in another way"
    raise PolicyError(
        f"`{call}`: the plan was made for another program: {what}",
        hint="plan again; a plan holds for one model, one version of JAX and the function it was "
        "made for",
    )


# -- running it -----------------------------------------------------------------------------------

_KEPT, _MOVED = "remat_kit plan: kept", "remat_kit plan: moved"
_NOTHING = algebra.save(algebra.nothing)


def run(
    program: Program,
    schedule: Sequence[Stretch],
    args: Sequence[Any],
    *,
    prevent_cse: bool,
    start: int = 0,
    around: Mapping[Place, int] | None = None,
    depth: int = 0,
    stacked: bool = False,
) -> list[Any]:
    """Evaluate a flat program with the regions of a schedule.

    Args:
        program: what to run.
        schedule: stretches that cover the program.
        args: one value or tracer for each of its arguments.
        prevent_cse: as in `jax.checkpoint`.
        start: the place of the program's first equation in the plan's count.
        around: what the regions around the program keep, and how deep the first that does is.
        depth: how many those are.
        stacked: whether the program is the body of a scan, which keeps a stack of each value that
            a derivative reads. A value behind a barrier is another one, so that there are none in
            the forward pass.
    """
    env = dict(zip(program.invars, (*program.consts, *args), strict=True))
    made = {v for e in program.eqns for v in e.outvars}
    regions = (program.eqns[s.start - start : s.stop - start] for s in schedule if not s.plain)
    entering = {v for eqns in regions for e in eqns for v in e.invars if _is_var(v)}
    last = _last_use(program)
    first = _first_readers(program, schedule, start)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jec.Literal) else env[atom]

    handed = set[Any]()  # by regions inside of this one
    for stretch in schedule:
        lo, hi = stretch.start - start, stretch.stop - start
        eqns = [*map(_jax.lean_pooling, program.eqns[lo:hi])]
        # What a region was given, its later stretches read once more.
        shared = {*program.invars} if depth and lo else set()
        reads = dict.fromkeys(v for e in eqns for v in e.invars if _is_var(v) and v in env)
        tied = {v: env[v] for v in reads if first.get(v, stretch) is not stretch}
        if stretch.plain:
            env.update(_written_down({v: env[v] for v in reads if v in shared}, stacked))
            env.update(_made_once({v: env[v] for v in reads if v in handed}))
            if tied:
                env.update(_waiting({v: env[v] for v in reads if v in tied or v in made}, stacked))
            loops = dict(stretch.loops)
            for place, eqn in enumerate(eqns, stretch.start):
                eqn = _jax.convolution_with_late_copies(eqn)
                if entering.intersection(eqn.outvars):
                    eqn = _jax.relu_by_output(eqn)
                values = [read(v) for v in eqn.invars]
                if place in loops:
                    outs = _scan(program, eqn, values, loops[place])
                else:
                    outs = _jax.bind(eqn, values)
                env.update(zip(eqn.outvars, outs, strict=True))
            env.update(tied)
            continue
        wanted = {v for e in eqns for v in e.outvars if last.get(v, -1) >= hi}
        same = _handed_through(eqns) if stacked else {}
        wanted -= {*same}
        part = _graph.part(eqns, wanted, program.base)
        env.update(
            _written_down({v: env[v] for v in part.invars if v in made or v in shared}, stacked)
        )
        if tied:
            env.update(
                _waiting({v: env[v] for v in part.invars if v in tied or v in made}, stacked)
            )
        values = [env[v] for v in part.invars]
        given = {program.invars[p]: p for e, p in stretch.offload if e == _GIVEN}
        outs = _region(part, stretch, values, prevent_cse, given, around or {}, depth)
        env.update(zip(part.outvars, outs, strict=True))
        env.update((v, env[source]) for v, source in same.items())
        if depth:
            env.update(_labelled(part, stretch, env, around or {}, depth))
            handed.update(part.outvars)
        env.update(tied)
    return [read(v) for v in program.outvars]


def _handed_through(eqns: Sequence[Any]) -> dict[Any, Any]:
    """Map what is an input of a region by another name to that input."""
    inside = {v for e in eqns for v in e.outvars}
    found: dict[Any, Any] = {}
    for eqn in eqns:
        if _graph.is_identity(eqn) and _is_var(eqn.invars[0]):
            source = found.get(eqn.invars[0], eqn.invars[0])
            if source not in inside:
                found[eqn.outvars[0]] = source
    return found


def _labelled(
    part: Program,
    stretch: Stretch,
    env: Mapping[Any, Any],
    around: Mapping[Place, int],
    depth: int,
) -> dict[Any, Any]:
    """Put the labels of what a region keeps on what it hands on, for the regions around it: of a
    region inside of another JAX keeps nothing but what that one's own derivative reads.
    """
    names = _names(stretch, around, depth)
    found = {}
    for place, eqn in enumerate(part.eqns, stretch.start):
        for position, var in enumerate(eqn.outvars):
            if (place, position) in names and var in part.outvars:
                found[var] = checkpoint_name(env[var], _label(names[place, position]))
    return found


def _names(stretch: Stretch, around: Mapping[Place, int], depth: int) -> dict[Place, str]:
    """The names of what a region keeps, which say how deep the outermost is that does."""
    return {
        place: _name(what, around.get(place, depth))
        for what, places in ((_KEPT, stretch.save), (_MOVED, stretch.offload))
        for place in places
    }


def _name(what: str, depth: int) -> str:
    return f"{what} at depth {depth}" if depth else what


def _label(name: str) -> str:
    decision = algebra.Decision.SAVE if name.startswith(_KEPT) else algebra.Decision.OFFLOAD
    text = label(decision, repr(_rule(name)), "pinned_host")
    assert text is not None
    return text


def _first_readers(program: Program, schedule: Sequence[Stretch], start: int) -> dict[Any, Stretch]:
    """Return the first stretch that reads each argument; constants have no gradient."""
    given = {*program.invars[len(program.consts) :]}
    found: dict[Any, Stretch] = {}
    for stretch in schedule:
        for eqn in program.eqns[stretch.start - start : stretch.stop - start]:
            for v in eqn.invars:
                if _is_var(v) and v in given:
                    found.setdefault(v, stretch)
    return found


def _written_down(values: dict[Any, Any], stacked: bool) -> dict[Any, Any]:
    """Keep the compiler from fusing what comes into a region into what follows it as well.

    A residual stream is a sum of many arrays. XLA's CPU compiler fuses the sum so far into each
    later block, so that all of its terms live on to the last one: ResNet-152 then takes 1051 MiB
    where 634 are planned for (jax 0.12). In the backward pass it does the same to the sum of the
    cotangents of what a region is given, where parts of the region read it one after the other:
    the dense block in `tests/test_plan.py` then takes 117 MiB instead of 88.
    """
    return _behind(_jax.apart_backward if stacked else jax.lax.optimization_barrier, values)


def _made_once(values: dict[Any, Any]) -> dict[Any, Any]:
    """Keep XLA's CPU compiler from making what a region hands on once more for the derivative of
    what follows it, and from keeping all that it is made of for that: the least plan of ResNet-50
    took 196 MiB more (jax 0.12). GPUs do well without.
    """
    return _behind(_jax.together_on_cpus, values)


def _waiting(values: dict[Any, Any], stacked: bool) -> dict[Any, Any]:
    """Let the backward pass go on from a stretch when the gradients that it adds to are there.

    Where an earlier stretch reads an argument too, a tied embedding, its gradient is a sum. XLA's
    TPU compiler fuses that into the product that makes this term, which then waits for the other
    one with all that it reads: the logits, through all layers (GPT-12 on a v5e, jax 0.12).
    """
    return _behind(_jax.together_backward if stacked else _jax.together, values)


def _behind(
    barrier: Callable[[list[Any]], Sequence[Any]], values: dict[Any, Any]
) -> dict[Any, Any]:
    floats = {v: x for v, x in values.items() if jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)}
    return dict(zip(floats, barrier([*floats.values()]), strict=True)) if floats else {}


def _last_use(program: Program) -> dict[Any, int]:
    last = {v: i for i, e in enumerate(program.eqns) for v in e.invars if _is_var(v)}
    return last | {v: len(program.eqns) for v in program.outvars if _is_var(v)}


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, jec.Literal)


def _region(
    part: Program,
    stretch: Stretch,
    values: Sequence[Any],
    prevent_cse: bool,
    given: Collection[Any],
    around: Mapping[Place, int],
    depth: int,
) -> list[Any]:
    """Run one region; those of its inputs that are ``given`` wait in the host's memory."""
    if stretch.inside:
        kept = dict.fromkeys((*stretch.save, *stretch.offload), depth) | dict(around)

        def inner(*args: Any) -> list[Any]:
            return run(
                part,
                stretch.inside,
                args,
                prevent_cse=prevent_cse,
                start=stretch.start,
                around=kept,
                depth=depth + 1,
            )

        policy = _keeping(depth) if kept else None
        return jax.checkpoint(inner, prevent_cse=prevent_cse, policy=policy)(*values)
    names = _names(stretch, around, depth)
    rules = [_rule(name) for name in dict.fromkeys(names.values())]
    policy = algebra.first(*rules) if len(rules) > 1 else (rules or [_NOTHING])[0]
    named = _named(part, stretch, names, given)
    return run_region(named, policy, values, prevent_cse=prevent_cse, full=False)


@functools.lru_cache
def _keeping(depth: int) -> Any:
    """Return the policy of a region around regions: it keeps what it or one around it keeps."""
    labels = [_label(_name(what, d)) for what in (_KEPT, _MOVED) for d in range(depth + 1)]

    def keep(prim: Any, *avals: Any, **params: Any) -> Any:
        known = params.get("name") in labels
        return keep_labelled(prim, *avals, **params) if known else _jax.RECOMPUTE

    return _jax.keep_names(labels, keep)


def _rule(name: str) -> Any:
    make = algebra.save if name.startswith(_KEPT) else algebra.offload
    return make(algebra.named(name, strict=False))


def _named(
    part: Program, stretch: Stretch, names: Mapping[Place, str], given: Collection[Any]
) -> Program:
    """Put the names that carry the plan on the values that it keeps."""
    if not names:
        return part
    subst: dict[Any, Any] = {}
    eqns = []

    def carry(var: Any, text: str, eqn: Any) -> None:
        fresh = type(var)(var.aval)
        eqns.append(_jax.name_equation(var, fresh, text, eqn))
        subst[var] = fresh

    for var in part.invars:
        if var in given:
            carry(var, _MOVED, part.eqns[0])

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, jec.Literal) else subst.get(atom, atom)

    for place, eqn in enumerate(part.eqns, stretch.start):
        eqns.append(eqn.replace(invars=[read(v) for v in eqn.invars]))
        for position, var in enumerate(eqn.outvars):
            if (place, position) in names:
                carry(var, names[place, position], eqn)
    outvars = tuple(read(v) for v in part.outvars)
    return dataclasses.replace(part, eqns=tuple(eqns), outvars=outvars)


# -- scans ----------------------------------------------------------------------------------------


def _scan(
    program: Program, eqn: Any, values: Sequence[Any], parts: Sequence[LoopPart]
) -> list[Any]:
    consts, carried = _jax.scan_arity(eqn)
    path = program.path(eqn)
    given, carry = values[:consts], tuple(values[consts : consts + carried])
    xs = tuple(values[consts + carried :])
    if eqn.params["reverse"]:
        xs = tuple(jnp.flip(x, 0) for x in xs)
    body = flat_program(eqn.params["jaxpr"], path)
    stacked, done = [], 0
    with _scoped(path[len(program.base) :]):
        for part in parts:
            some = tuple(x[done : done + part.times] for x in xs)
            carry, ys = _iterations(body, part, given, carry, some)
            stacked.append(ys)
            done += part.times
    ys = [y[0] if len(y) == 1 else jnp.concatenate(y) for y in zip(*stacked, strict=True)]
    if eqn.params["reverse"]:
        ys = [jnp.flip(y, 0) for y in ys]
    return [*carry, *ys]


def _iterations(
    body: Program, part: LoopPart, consts: Sequence[Any], carry: Any, xs: Any
) -> tuple[Any, Any]:
    def loop(consts: Any, carry: Any, xs: Any, length: int) -> tuple[Any, Any]:
        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            outs = run(body, part.body, [*consts, *carry, *x], prevent_cse=False, stacked=True)
            return tuple(outs[: len(carry)]), tuple(outs[len(carry) :])

        return jax.lax.scan(step, carry, xs, length=length)

    if part.group == 1:
        return loop(consts, carry, xs, part.times)

    def group(size: int) -> Any:
        def one(consts: Any, carry: Any, xs: Any) -> tuple[Any, Any]:
            return loop(consts, carry, xs, size)

        return jax.checkpoint(one, prevent_cse=False)

    groups, rest = divmod(part.times, part.group)
    done = groups * part.group
    head = jax.tree.map(lambda x: x[:done].reshape(groups, part.group, *x.shape[1:]), xs)
    carry, ys = jax.lax.scan(
        lambda c, x: group(part.group)(consts, c, x), carry, head, length=groups
    )
    ys = jax.tree.map(lambda y: y.reshape(done, *y.shape[2:]), ys)
    if rest:
        carry, tail = group(rest)(consts, carry, jax.tree.map(lambda x: x[done:], xs))
        ys = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), ys, tail)
    return carry, ys


def _scoped(parts: Sequence[str]) -> Any:
    return jax.named_scope("/".join(parts)) if parts else contextlib.nullcontext()


def innermost(schedule: Sequence[Stretch]) -> Iterator[Stretch]:
    """Yield the stretches that hold no others, in order."""
    for stretch in schedule:
        if stretch.inside:
            yield from innermost(stretch.inside)
        else:
            yield stretch
