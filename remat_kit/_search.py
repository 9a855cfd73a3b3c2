"""The search for one budget: compile, correct the prediction by the compiler's figures, choose
again. What was compiled for one budget is there for the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_kit import _anatomy, _hlo, _step
from remat_kit._errors import UserError
from remat_kit._frontier import Frontier, Point, Tick, held_arrays, policy_of
from remat_kit._gradient import Argnums
from remat_kit._policy import format_bytes, parse_bytes
from remat_kit._remat import policy as apply
from remat_kit._target import Memory, Target, compile_program

_FREE_SHARE = 0.02  # of the step, what "free" may cost

# How many forward passes more "min" may take: below that a few bytes take many, and the compiler
# as many times longer.
_MOST_PASSES = 4

# Programs whose peaks differ by less of their temporaries are as good as each other.
_EQUAL = 0.01


def parsed_budget(budget: str | int | float) -> str | int | float:
    """Return a word, a fraction (float) or bytes (int)."""
    if isinstance(budget, str):
        text = budget.strip()
        if text in ("min", "free", "fit"):
            return text
        try:
            number = float(text)
        except ValueError:
            return parse_bytes(text)
        budget = number if "." in text or number <= 1 else int(number)
    if isinstance(budget, bool) or budget <= 0:
        raise UserError(
            f"`plan(..., budget={budget!r})`: this is no amount of memory",
            hint='give bytes ("14GiB"), a fraction of the activations (0.5), "min", "free" or '
            '"fit"',
        )
    return float(budget) if isinstance(budget, float) and budget <= 1 else int(budget)


def temporaries(memory: Memory) -> int | None:
    """Return the bytes of temporaries; of a program that the compiler refuses, since the chip has
    too little, those of what it says that it needs.
    """
    if memory.temp_bytes is not None or memory.needs_bytes is None:
        return memory.temp_bytes
    return max(0, memory.needs_bytes - memory.argument_bytes - memory.output_bytes)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a search chose.

    Attributes:
        place: of the point, in ``Search.points``.
        limit: the budget in bytes; None where it is no amount.
        predicted: what was expected of the point before it was compiled.
    """

    place: int
    limit: int | None
    predicted: int


@dataclasses.dataclass
class Search:
    """Compiles, corrects the prediction, chooses again.

    Attributes:
        fn, args, argnums: the loss, and what to differentiate.
        chip: to compile for.
        frontier: its points are chosen from, and the program without a plan.
        compiles: how many programs may be compiled for each budget.
        tick: told what is compiled.
        optimizer: of the whole training step; None for the gradients alone.
        allowed: tells which points ``"free"`` may take; None for those of little extra time.
        known: what was compiled, by the place of the point.
        texts: the compiled programs.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    argnums: Argnums
    chip: Target
    frontier: Frontier
    compiles: int
    tick: Tick
    optimizer: Any = None
    allowed: Callable[[Point], bool] | None = None
    known: dict[int, Memory] = dataclasses.field(default_factory=dict)
    texts: dict[int, str | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        front = self.frontier
        self.points = (*front.points, *front.leaner, front.plain)
        self.plain = len(self.points) - 1
        self.leaner = range(len(front.points), self.plain)

    def run(self, budget: str | int | float) -> Answer:
        """Return the best that was compiled for a budget, as `parsed_budget` gives it.

        Raises:
            UserError: nothing that was compiled fits.
        """
        self.compile(self.plain)
        limit = self.limit(budget)
        tried: dict[int, int] = {}  # point, what was predicted of it
        try:
            for _ in range(self.compiles):
                choice = self.choice(budget, limit)
                if choice is None or choice in self.known:
                    break
                tried[choice] = self.predicted(choice)
                self.compile(choice)
        except KeyboardInterrupt:
            if not self.fitting(limit):
                raise
        return self.answer(budget, tried)

    def answer(self, budget: str | int | float, tried: Mapping[int, int]) -> Answer:
        """Return the best for a budget of what was compiled so far, for others too; ``tried`` says
        what was predicted of some before.

        Raises:
            UserError: none of it fits.
        """
        limit = self.limit(budget)
        best = self.best(budget, limit)
        return Answer(best, limit, tried.get(best, self.predicted(best)))

    def limit(self, budget: str | int | float) -> int | None:
        """The budget in bytes; None where it is no amount."""
        base = self.known[self.plain]
        if budget == "fit":
            return base.memory_bytes
        if isinstance(budget, str):
            return None
        if isinstance(budget, int):
            least = base.argument_bytes
            if budget < least:
                raise UserError(
                    f"`plan(..., budget={format_bytes(budget)!r})`: the arguments alone take "
                    f"{format_bytes(least)}",
                    hint="smaller parameters or inputs, or more devices; recomputing cannot help",
                )
            return budget
        return self.fixed() + int(budget * (temporaries(base) or 0))

    def fixed(self) -> int:
        base = self.known[self.plain]
        return base.argument_bytes + base.output_bytes - (base.alias_bytes or 0)

    def compile(self, place: int) -> None:
        if place in self.known:
            return
        point = self.points[place]
        fn = self.fn
        if place != self.plain:
            fn = apply(policy_of(self.frontier.graph, point.schedule))(fn)
        share = f"+{100 * point.extra_flops_fraction:.1f} % FLOPs"
        self.tick(f"compiling for {self.chip.name}: {share}{self.so_far()}")
        args, argnums, donated = self.args, self.argnums, ()
        if self.optimizer is not None:
            fn, args, donated = _step.training_step(fn, self.optimizer, args, argnums, "plan")
            argnums = None
        compiled = compile_program(
            fn, args, self.chip, argnums=argnums, donate_argnums=donated, call="plan"
        )
        self.known[place], self.texts[place] = compiled.memory, compiled.hlo_text

    def so_far(self) -> str:
        peaks = [m.peak_bytes for m in self.known.values() if m.peak_bytes]
        return f" (best so far {format_bytes(min(peaks))})" if peaks else ""

    # .. prediction, through what was compiled

    def measured(self, place: int) -> int | None:
        memory = self.known[place]
        return memory.peak_bytes if memory.peak_bytes is not None else memory.needs_bytes

    def predicted(self, place: int) -> int:
        """The peak of a point: between compiled points in proportion, below them in parallel.

        The program without regions alone says little about those that have some, which the model
        predicts better: until another is compiled, they are as predicted.
        """
        if place in self.known and self.measured(place):
            return self.measured(place) or 0
        own = self.points[place].predicted_peak_bytes
        if place in self.leaner:
            return self.predicted_leaner(place)
        pairs = sorted(
            (self.points[p].predicted_peak_bytes, self.measured(p) or 0)
            for p in self.known
            if self.measured(p)
        )
        if len(pairs) < 2:
            return own
        below = [pair for pair in pairs if pair[0] <= own]
        above = [pair for pair in pairs if pair[0] > own]
        if below and above:
            (x0, y0), (x1, y1) = below[-1], above[0]
            return round(y0 + (y1 - y0) * (own - x0) / max(x1 - x0, 1))
        x, y = (below or above)[-1 if below else 0]
        return max(self.fixed(), y + own - x)

    def predicted_leaner(self, place: int) -> int:
        """The peak of a point that keeps less than the first: by so much less, where the first took
        more than its model; above the first else.
        """
        own, first = self.points[place], self.points[0]
        if 0 not in self.known or not self.measured(0):
            return max(own.predicted_peak_bytes, self.predicted(0) + 1)
        least = max(own.predicted_peak_bytes, self.fixed())
        return max(least, self.predicted(0) - (first.saved_bytes - own.saved_bytes))

    def choice(self, budget: str | int | float, limit: int | None) -> int | None:
        """The point to compile next."""
        points = self.points
        if budget == "min":
            most = _MOST_PASSES * self.frontier.forward_seconds
            new = [
                p
                for p, point in enumerate(points)
                if p not in self.known and point.extra_work <= most
            ]
            if not new:
                return None
            best = min(new, key=self.smallest)
            least = min(self.measured(p) or 2**62 for p in self.known)
            small = self.predicted(best) < least or len(self.known) < 3
            return best if small else None
        if budget == "free":
            allowed = self.free()
            return min(allowed, key=self.smallest)
        assert limit is not None
        fitting = [p for p in range(len(points)) if self.predicted(p) <= limit]
        if fitting:
            return min(fitting, key=lambda p: points[p].extra_work)
        new = [p for p in range(len(points)) if p not in self.known]
        return min(new, key=self.smallest) if new else None

    def smallest(self, place: int) -> tuple[int, float]:
        """What the least of comes first: the peak; where that is the same, the extra work."""
        return self.predicted(place), self.points[place].extra_work

    def free(self) -> list[int]:
        return [p for p, point in enumerate(self.points) if (self.allowed or self.cheap)(point)]

    def cheap(self, point: Point) -> bool:
        step = self.frontier.forward_seconds + self.frontier.backward_seconds
        return point.extra_seconds <= _FREE_SHARE * step

    def fitting(self, limit: int | None) -> list[int]:
        sizes = {p: self.measured(p) for p in self.known}
        return [p for p, size in sizes.items() if size and (limit is None or size <= limit)]

    def best(self, budget: str | int | float, limit: int | None) -> int:
        fitting = self.fitting(limit)
        points = self.points
        if budget == "free":
            fitting = [p for p in fitting if p in self.free()]
        if limit is None and fitting:
            least = min(self.measured(p) or 0 for p in fitting)
            enough = least + _EQUAL * (least - self.fixed())
            fitting = [p for p in fitting if (self.measured(p) or 0) <= enough]
        if fitting:
            return min(fitting, key=lambda p: (points[p].extra_work, self.measured(p)))
        raise self.nothing_fits(limit or 0)

    def nothing_fits(self, limit: int) -> UserError:
        least = min(self.known, key=lambda p: self.measured(p) or 2**62)
        size = self.measured(least) or 0
        point = self.points[least]
        start, stop = point.cost.peak_segment
        holding = "; ".join(held_arrays(self.frontier.graph, start, stop))
        place = self.frontier.graph.equations[min(start, self.frontier.equations - 1)].module
        return UserError(
            f"`plan(..., budget={format_bytes(limit)!r})`: the least that was reached is "
            f"{format_bytes(size)}, of which {format_bytes(self.fixed())} are arguments and "
            f"results; its peak is in the {point.cost.peak_kind} pass at {place or 'the top'}: "
            f"{holding}",
            hint="a smaller batch, or a chip with more memory; budget='min' gives the least",
        )

    def phase(self, place: int) -> str:
        """The phase of the compiled program's peak; "" where the compiler gave no program."""
        text = self.texts.get(place)
        if text is None:
            return ""
        return _anatomy.anatomy(_hlo.parse(text), platform=self.chip.platform).peak.phase
