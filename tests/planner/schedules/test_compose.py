"""The dynamic program over chains, beside the binomial schedule and the simulation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planner_graphs import tower, traced
from shapes import struct

from remat_kit._planner.costs.simulate import simulate
from remat_kit._planner.schedules import compose as _compose
from remat_kit._planner.schedules import mincut as _mincut
from remat_kit._planner.schedules import proposals as _proposals
from remat_kit._planner.schedules.chain import Chain
from remat_kit._planner.schedules.chain import positions as _positions
from remat_kit._policy.schedule import Segment


def cumulative(depth, size=1024):
    """A chain of equal steps of one operation each, whose derivative reads its input."""

    def loss(x):
        for _ in range(depth):
            x = jnp.sin(jax.lax.cumsum(x))
        return jnp.sum(x)

    return traced(loss, struct(size))


def binomial(steps, slots):
    """Griewank's schedule: how many forward steps it runs again, and where it splits."""
    if steps == 1:
        return 0, 0
    if slots == 1:
        return sum(range(steps)), steps - 1
    return min(
        (k + binomial(steps - k, slots - 1)[0] + binomial(k, slots)[0], k) for k in range(1, steps)
    )


def binomial_schedule(marks, slots):
    """The same as nested regions over the segments between ``marks``."""
    steps = len(marks) - 1
    if steps == 1:
        return (Segment(marks[0], marks[1]),)
    _, k = binomial(steps, slots)
    first = binomial_schedule(marks[: k + 1], slots)
    if k > 1:
        first = (Segment(marks[0], marks[k], inside=first),)
    return (*first, *binomial_schedule(marks[k:], max(1, slots - 1)))


def test_homogeneous_chains_are_no_worse_than_binomial():
    depth = 12
    graph = cumulative(depth, size=4096)
    starts = [e.index for e in graph.equations if e.primitive == "cumsum"]
    marks = [*starts, len(graph.equations)]
    found = _proposals.candidates(graph)
    for slots in (1, 2, 3, 4, 6):
        theirs = simulate(graph, binomial_schedule(marks, slots))
        ours = [c.cost.extra_seconds for c in found if c.cost.peak_bytes <= theirs.peak_bytes]
        assert ours, slots
        assert min(ours) <= theirs.extra_seconds * (1 + 1e-9), slots


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_chain_knows_what_its_schedules_take(share, monkeypatch):
    graph = tower(24, batch=256)
    worth = _mincut.Worth.of_graph(graph, share)
    seen, forms = [], set()
    schedule = _compose.Composer.schedule

    def spy(self, choice, chosen, region, m):
        found, size = schedule(self, choice, chosen, region, m), self.size
        cost = simulate(graph, found)
        t, room, work = 0, m, 0.0
        while t < self.chain.count:
            item, region = chosen[t].item(t, choice[t, region, room])
            work += item.work
            if item.form in ("nest", "layer"):
                inside = self.inside(item.form, item.level, item.first, item.last)
                work += inside[room - item.room(size)]
            forms.add(item.form)
            room -= item.slots(size)[0]
            t = item.last + 1
        seen.append((m * size, cost.peak_bytes, work, self.chain.worth.extra(cost)))
        return found

    monkeypatch.setattr(_compose.Composer, "schedule", spy)
    _proposals.candidates(graph, worth=worth)
    assert len(seen) > 20
    assert forms >= {"plain", "leaf", "layer", "nest"}
    for room, peak, work, extra in seen:
        assert 0.85 * room <= peak <= 1.05 * room
        assert extra == pytest.approx(work, rel=1e-6, abs=1e-12)


def least_work(layer, slots):
    """The table of `Layer.solve`, by every part of every run of blocks at every limit."""
    k, longest = layer.chain.count, layer.value.shape[1]
    found = np.full((k, longest, slots + 1), np.inf)
    for s in range(k - 1, -1, -1):
        for part, (alone, need, kept) in zip(layer.parts[s], layer.slots[s], strict=True):
            for last in range(part.last, min(k, s + longest)):
                for m in range(alone if last == part.last else need, slots + 1):
                    if last == part.last:
                        work = part.less
                    else:
                        work = found[part.last + 1, last - part.last - 1, m - kept] + part.work
                    found[s, last - s, m] = min(found[s, last - s, m], work)
    return found


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3])
def test_a_layer_finds_the_least_work_for_each_amount_of_memory(share):
    graph = tower(12, batch=256)
    cuts = [*range(0, len(graph.equations) - 2, 2), len(graph.equations)]
    chain = Chain(graph, cuts)
    residuals = sorted(graph.residuals)
    level = chain.level(frozenset(residuals[::3]))
    more = [frozenset(), frozenset(residuals), frozenset(residuals[::2])]
    layer = _compose.Layer(chain, level, more)
    slots = 24
    size = share * float(chain.plain.sum()) / slots
    table = np.empty((chain.count, 24, slots + 1))
    layer.solve(size, table)
    assert np.array_equal(table, least_work(layer, slots))
    fits = np.argwhere(np.isfinite(table))
    assert len(fits) > 100
    for s, length, m in fits[:: max(1, len(fits) // 50)].tolist():
        region = layer.segment(s, s + length, m)
        assert (region.start, region.stop) == (cuts[s], cuts[s + length + 1])


def test_a_short_look_drops_no_option_that_is_the_best_anywhere(monkeypatch):
    graph = tower(24, batch=256)
    chain = Chain(graph, _positions(graph))
    levels = [chain.level(frozenset(some)) for some in ((), graph.residuals[::2], graph.residuals)]

    def tables():
        composer = _compose.Composer(chain, levels, {})
        layers = [_compose.Layer(chain, levels[0], [frozenset(graph.residuals[::2])])]
        found = composer.solve(1.2 * float(chain.plain.sum()), 200, layers)
        return found, composer.table(200)[:2]

    looked, (best, choice) = tables()
    every = lambda self, options, best: np.arange(len(options.last))  # noqa: E731
    monkeypatch.setattr(_compose.Composer, "promising", every)
    compared, (least, chosen) = tables()
    assert looked == compared
    assert len(looked) > 10
    assert np.array_equal(best, least)
    assert np.array_equal(choice, chosen)
