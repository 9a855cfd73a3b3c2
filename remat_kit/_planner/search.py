"""Which schedule of the frontier fits a budget once the compiler has compiled it?

The model predicts the peak of each schedule, but only the compiler knows it. `Search` repeats three
steps: it chooses the schedule that should be the best for the budget, compiles it, and corrects the
predictions of the other schedules by the compiled peaks. It keeps every compiled program, so
searches for several budgets share them.

Example: the model predicts 30, 40 and 50 MiB for three schedules, and the first and the last
compile to 33 and 49 MiB. The prediction for the second is interpolated: 41 MiB. If a fourth
schedule is predicted at 20 MiB, below all compiled ones, it is shifted by the error of the nearest
one, 3 MiB, to 23 MiB:

    predicted by the model    20 MiB   30 MiB   40 MiB   50 MiB
    compiled                           33 MiB            49 MiB
    corrected prediction      23 MiB   33 MiB   41 MiB   49 MiB
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from remat_kit._apply.decorate import policy as apply
from remat_kit._chip.compile import Compiled, compile_program
from remat_kit._chip.memory import Memory, temporaries
from remat_kit._chip.target import Target
from remat_kit._compiled import hlo as _hlo
from remat_kit._compiled import peak as _peak
from remat_kit._compiled.collectives import collectives, link_times
from remat_kit._compiled.roofline import estimate
from remat_kit._errors import CompileError, PolicyError, UserError
from remat_kit._planner.frontier import OBJECTIVES, Frontier, Tick, held_arrays
from remat_kit._planner.point import Point
from remat_kit._planner.schedules import pieces as _pieces
from remat_kit._planner.schedules.pieces import Floor
from remat_kit._policy.structural import Planned
from remat_kit._program import ops as _ops
from remat_kit._program.steps import step as _step
from remat_kit._program.steps.gradient import Argnums, abstract
from remat_kit._units import format_apart, format_bytes, parse_bytes

# Share of the step's time that the recompute for the budget "free" may take.
_FREE_SHARE = 0.02


# Maximum extra work for the budget "min", in forward passes. Schedules with even more recompute
# save only a few bytes more, and compiling them takes many times longer.
_MOST_PASSES = 4


# Number of programs to compile beyond ``compiles`` before an error says that nothing fits. The
# lowest predicted peaks are within a few percent of each other, so any of these programs may be the
# one with the lowest compiled peak.
_BEYOND = 3


# Number of programs to compile beyond ``compiles`` while the best one that fits recomputes more
# than the next candidate, by at least this share of the forward pass. Otherwise, if the model
# predicts all peaks too low, the search ends at the leanest schedule, the only one that fits.
_REFINED = 3
_MUCH = 0.1


# The schedules of repeated blocks are compiled if the model predicts at most this multiple of the
# best schedule's work and of the budget for them.
_FAR = 2.0


# Two peaks count as equal if they differ by at most this share of the temporaries.
_EQUAL = 0.01


# With pieces, no program without them is compiled for a budget if all of their predicted peaks are
# above this multiple of it.
_HOPELESS = 1.25


# A number of bytes that no program fits.
_NEVER = 2**62


_FORMS = (
    'give bytes on the device ("14GiB", "512MiB", an integer), a share of the step\'s activations '
    'from 0 to 1 (0.5, "50%"), "min" (the least), "free" (the least at no more than 2 % extra '
    'time) or "fit" (what the chip has)'
)


# Pieces are proposed if the largest working set makes at least this share of the temporaries.
_HOLDS = 0.25


_WORDS = ("min", "free", "fit")


_LONGEST = 64  # maximum number of characters of a budget given as text


def parsed_budget(budget: Any, where: str | None = None) -> str | int | float:
    """Return a budget as a word, as a share of the activations (float) or as bytes (int).

    >>> parsed_budget("50%"), parsed_budget("2KiB"), parsed_budget(0.25), parsed_budget("fit")
    (0.5, 2048, 0.25, 'fit')

    Args:
        budget: the budget as the user gave it.
        where: the call that an error quotes; by default ``plan(..., budget=...)``.

    Raises:
        UserError: the budget is none of these.
    """
    if isinstance(budget, str) and budget.strip() in _WORDS:
        return budget.strip()
    amount = _amount(budget.strip()) if isinstance(budget, str) else budget
    if isinstance(amount, numbers.Integral) and not isinstance(amount, bool) and int(amount) > 0:
        return int(amount)
    if isinstance(amount, numbers.Real) and not isinstance(amount, numbers.Integral):
        share = float(amount)
        if 0 < share <= 1:
            return share
        if share > 1 and share.is_integer():
            return int(share)
    shown = repr(budget) if len(repr(budget)) <= _LONGEST else f"a {type(budget).__name__}"
    where = where or f"plan(..., budget={shown})"
    raise UserError(f"`{where}`: {_fault(amount)}", hint=_FORMS)


def _amount(text: str) -> int | float | None:
    """Return the share or the bytes that a text gives, or None if it gives neither."""
    if len(text) > _LONGEST:
        return None
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
            return share if share <= 1 else None
        return float(text) if "." in text or float(text) <= 1 else int(float(text))
    except (ValueError, OverflowError):
        pass
    try:
        return parse_bytes(text)
    except (PolicyError, OverflowError):
        return None


def _fault(found: Any) -> str:
    if isinstance(found, numbers.Real) and not isinstance(found, bool) and float(found) > 1:
        return "this is neither a share of at most 1 nor a whole number of bytes"
    return "this is not an amount of memory"


def check_reachable(
    budget: str | int | float,
    args: Sequence[Any],
    argnums: Argnums,
    optimizer: Any,
    call: str = "plan",
) -> None:
    """Raise `UserError` if a budget in bytes is too small for any schedule, without tracing.

    Every program needs memory for the arguments that are differentiated, or for their gradients,
    and for the optimizer's state.
    """
    if not isinstance(budget, int):
        return
    try:
        structs = abstract(args, call=call)
    except UserError:  # a step may have static arguments and NNX objects
        return
    chosen = [argnums] if isinstance(argnums, int) else list(argnums or ())
    kept: list[Any] = [structs[i] for i in chosen if -len(structs) <= i < len(structs)]
    what = "arguments"
    if optimizer is not None:
        kept.append(_step.state_of(optimizer, args, argnums, call))
        what = "parameters and the optimizer's state"
    least = sum(_ops.shard_bytes(leaf) for leaf in jax.tree.leaves(kept))
    if budget < least:
        given, needed = format_apart(budget, least)
        raise UserError(
            f"`{call}(..., budget={given!r})`: the {what} alone take {needed}",
            hint=f"recomputing cannot reduce these; {_FORMS}",
        )


@dataclasses.dataclass(frozen=True)
class Answer:
    """The point that a search chose.

    Attributes:
        place: the index of the point in ``Search.points``.
        limit: the budget in bytes, or None for "min" and "free".
        predicted: the predicted peak of the point before it was compiled, in bytes.
    """

    place: int
    limit: int | None
    predicted: int


@dataclasses.dataclass
class Search:
    """Searches the points of a frontier for budgets, and compiles a few of them.

    Attributes:
        fn, args, argnums: the loss, its arguments, and the positions of those to differentiate; of
            a step, ``argnums`` is None.
        chip: the chip to compile for.
        frontier: the frontier whose points may be chosen; the program without a plan is one too.
        compiles: number of programs to compile for each budget, unless `run` has a reason to
            compile more.
        tick: called with a description of the program that is compiled next.
        optimizer: the optimizer of the whole training step, or None to compile the gradients alone.
        decorated: returns the program with a plan; by default the plan is applied to ``fn``.
        run_local: whether programs that are compiled for the target ``local`` run, too.
        allowed: returns whether ``"free"`` may choose a point; if None, it may choose points with
            at most 2 % extra time.
        known: the memory of each compiled program, by the index of its point.
        texts: the text of each compiled program, by the index of its point.
        seconds: the roofline time of each compiled program that is partitioned over several
            devices, with its collectives, by the index of its point.
        refused: what the compiler said of each program that it refused, by the index of its point.
            The search goes on without these.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    argnums: Argnums
    chip: Target
    frontier: Frontier
    compiles: int
    tick: Tick
    optimizer: Any = None
    decorated: Callable[[Planned], Callable[..., Any]] | None = None
    run_local: bool = True
    allowed: Callable[[Point], bool] | None = None
    known: dict[int, Memory] = dataclasses.field(default_factory=dict)
    texts: dict[int, str | None] = dataclasses.field(default_factory=dict)
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    refused: dict[int, CompileError] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        front = self.frontier
        self.whole = None if front.whole is None else _Whole.of(self, front.whole)
        extra = [*front.blocks]
        if front.whole is not None:
            every = (*front.points, *front.leaner)
            whole = (*front.whole.points, *front.whole.leaner)
            extra += [p for p in whole if not any(p is q for q in every)]
        self.points = (*front.points, *front.leaner, *extra, front.plain)
        self.plain = len(self.points) - 1
        first = self.plain - len(extra)
        self.blocks = range(first, first + len(front.blocks))
        self.leaner = range(len(front.points), first)

    def run(self, budget: str | int | float) -> Answer:
        """Compile points for a budget, and return the best compiled one.

        Args:
            budget: the budget, as `parsed_budget` returns it.

        Raises:
            UserError: none of the compiled programs fits.
            CompileError: the compiler refuses the program without a plan, and either also the one
                with the lowest predicted peak, or the budget is a share of what is unknown then.
        """
        self.begin()
        limit = self.limit(budget)
        tried: dict[int, int] = {}  # the predicted peak of each point before it was compiled
        try:
            self.compile_for(budget, limit, tried)
        except KeyboardInterrupt:
            if not self.fitting(limit):
                raise
        return self.answer(budget, tried)

    def compile_for(
        self, budget: str | int | float, limit: int | None, tried: dict[int, int]
    ) -> None:
        """Compile the points that are promising for a budget.

        Args:
            budget: the budget, as `parsed_budget` returns it.
            limit: the budget in bytes, or None for "min" and "free".
            tried: filled with the predicted peak of each point before it was compiled.
        """

        def attempt(place: int) -> None:
            tried[place] = self.predicted(place)
            self.compile(place)

        if self.whole is not None:
            tried.update(self.whole.compiled_for(budget, limit))
        for left in range(self.compiles, 0, -1):
            choice = self.choice(budget, limit)
            if left == 1 and not self.fitting(limit):
                # If nothing fits yet, the last compile goes to the lowest predicted peak, which is
                # the most likely to fit.
                choice = self.leanest()
            if choice is None or not self.is_new(choice):
                break
            attempt(choice)
        if budget == "min" and (choice := self.saving_least()) is not None:
            attempt(choice)
        while (choice := self.unlike_predicted(limit)) is not None:
            attempt(choice)
        for _ in range(_BEYOND):
            choice = self.leanest()
            if choice is None or self.fitting(limit):
                break
            attempt(choice)
        for _ in range(_REFINED):
            choice = self.cheaper(budget, limit)
            if choice is None:
                break
            attempt(choice)

    def begin(self) -> None:
        """Compile the program without a plan or, if the compiler refuses it, a lean schedule.

        Raises:
            CompileError: the compiler refuses both.
        """
        self.compile(self.plain)
        if not self.known:
            most = _MOST_PASSES * self.frontier.forward_seconds
            others = [p for p in range(self.plain) if self.points[p].extra_work <= most]
            if others:
                self.compile(min(others, key=lambda p: self.points[p].predicted_peak_bytes))
        if not self.known:
            raise self.refused[self.plain]

    def place_of(self, point: Point) -> int:
        """Return the index of a point."""
        return next(p for p, other in enumerate(self.points) if other is point)

    def count(self) -> int:
        """Return how many programs were compiled, without those for the search without pieces.

        The program without a plan counts.
        """
        whole = self.whole
        return len(self.known) - (sum(p != whole.plain for p in whole.known) if whole else 0)

    def is_new(self, place: int) -> bool:
        """Tell whether the program of a point was neither compiled nor refused so far."""
        return place not in self.known and place not in self.refused

    def cheaper(self, budget: str | int | float, limit: int | None) -> int | None:
        """Return a point that should fit and recomputes much less than the best one, or None."""
        if limit is None or not self.fitting(limit):
            return None
        choice = self.choice(budget, limit)
        if choice is None or not self.is_new(choice):
            return None
        saved = self.points[self.best(budget, limit)].extra_work - self.points[choice].extra_work
        return choice if saved > _MUCH * self.frontier.forward_seconds else None

    def saving_least(self) -> int | None:
        """Return another point without pieces that may have the least memory, or None.

        It saves the fewest bytes of those whose predicted peaks are below all compiled ones. The
        predicted peaks of the leanest points are often about equal, while compilers keep more
        memory for those that save more.
        """
        if not self.has_pieces:
            return None
        lowest = min((self.measured(p) or 0 for p in self.fitting(None)), default=math.inf)
        leaner = [
            p
            for p, point in enumerate(self.points)
            if point.graph is None and self.is_new(p) and point.predicted_peak_bytes < lowest
        ]
        return min(leaner, key=lambda p: self.points[p].saved_bytes, default=None)

    def unlike_predicted(self, limit: int | None) -> int | None:
        """Return a point of a partitioned program that may fit although it should not, or None.

        The peak of a partitioned program depends on choices of the partitioner and the scheduler
        that the model does not know, so points with equal predictions may compile to different
        peaks. Therefore the schedules that recompute each repeated block are compiled too, unless
        they recompute far more than the best point. While compiles are left after that, points are
        compiled that have less predicted work than the best one, and nearly its predicted peak.
        """
        if limit is None or self.plain not in self.seconds:
            return None
        fitting = self.fitting(limit)
        enough = _FAR * self.points[self.best(limit, limit)].extra_work if fitting else math.inf
        for place in self.blocks:
            point = self.points[place]
            may_fit = self.is_new(place) and point.predicted_peak_bytes <= _FAR * limit
            if may_fit and point.extra_work <= enough:
                return place
        if self.count() > self.compiles or not fitting:
            return None
        best = self.points[self.best(limit, limit)]
        most = min(limit, (1 + _EQUAL) * best.predicted_peak_bytes)
        new = [
            p
            for p, point in enumerate(self.points)
            if self.is_new(p)
            and point.predicted_peak_bytes <= most
            and point.extra_work < best.extra_work
        ]
        return min(new, key=lambda p: self.points[p].predicted_peak_bytes, default=None)

    def work(self, place: int) -> float:
        """Return the extra work of a point in seconds, as the objective measures it.

        The model knows the collectives of a partitioned program only in part. If such a program
        was compiled and the objective is its time alone, the time of the compiled program takes the
        place of the predicted one.
        """
        is_time = OBJECTIVES[self.frontier.objective] == 0
        if is_time and place in self.seconds and self.plain in self.seconds:
            return self.seconds[place] - self.seconds[self.plain]
        return self.points[place].extra_work

    def leanest(self) -> int | None:
        """Return the point with the lowest predicted peak of those not compiled, or None."""
        new = [p for p in range(len(self.points)) if self.is_new(p)]
        return min(new, key=self.smallest, default=None)

    def answer(self, budget: str | int | float, tried: Mapping[int, int]) -> Answer:
        """Return the best of all programs compiled so far, for this and for other budgets.

        Args:
            budget: the budget, as `parsed_budget` returns it.
            tried: the predicted peaks of some points before they were compiled.

        Raises:
            UserError: none of the compiled programs fits.
        """
        limit = self.limit(budget)
        best = self.best(budget, limit)
        return Answer(best, limit, tried.get(best, self.predicted(best)))

    def limit(self, budget: str | int | float) -> int | None:
        """Return the budget in bytes, or None for "min" and "free"."""
        base = self.any_memory()
        if budget == "fit":
            return base.memory_bytes
        if isinstance(budget, str):
            return None
        if isinstance(budget, int):
            least = base.argument_bytes
            if budget < least:
                given, needed = format_apart(budget, least)
                raise UserError(
                    f"`plan(..., budget={given!r})`: the arguments alone take {needed}",
                    hint="use smaller parameters or inputs, or more devices; recomputing cannot "
                    "reduce the arguments",
                )
            return budget
        if self.plain in self.refused:
            raise CompileError(
                f"`plan(..., budget={budget!r})`: this is a share of the activations without a "
                f"plan, but the program without a plan does not compile; "
                f"{self.refused[self.plain].message}",
                hint="give the budget in bytes, or budget='fit'",
            )
        return self.fixed() + int(budget * (temporaries(base) or 0))

    def any_memory(self) -> Memory:
        """Return the memory of a compiled program, if possible of the one without a plan.

        All of the programs have the same arguments and results.
        """
        return self.known.get(self.plain) or next(iter(self.known.values()))

    def fixed(self) -> int:
        base = self.any_memory()
        return base.argument_bytes + base.output_bytes - (base.alias_bytes or 0)

    def compile(self, place: int) -> None:
        if not self.is_new(place):
            return
        point = self.points[place]
        fn = self.fn
        if place != self.plain:
            policy, step = self.frontier.policy(point), True if self.argnums is None else None
            fn = self.decorated(policy) if self.decorated else apply(policy, step=step)(fn)
        share = f"+{100 * point.extra_flops_fraction:.1f} % FLOPs"
        self.tick(f"compiling for {self.chip.name}: {share}{self.so_far()}")
        try:
            compiled = compile_program(
                *(fn, self.args, self.chip),
                argnums=self.argnums,
                optimizer=self.optimizer,
                call="plan",
                run=self.run_local,
                code=False,
            )
        except CompileError as error:
            self.refused[place] = error
            return
        self.known[place], self.texts[place] = compiled.memory, compiled.hlo_text
        self.chip = compiled.chip  # it has as many devices as the step's own jit names
        if compiled.memory.devices > 1 and compiled.hlo_text is not None:
            self.seconds[place] = _seconds(compiled)

    def so_far(self) -> str:
        peaks = [m.peak_bytes for m in self.known.values() if m.peak_bytes]
        return f" (best so far {format_bytes(min(peaks))})" if peaks else ""

    # .. predictions, corrected by the compiled peaks

    def measured(self, place: int) -> int | None:
        memory = self.known[place]
        return memory.peak_bytes if memory.peak_bytes is not None else memory.needs_bytes

    def predicted(self, place: int) -> int:
        """Return the predicted peak of a point, corrected by the peaks of compiled points.

        Between two compiled points, the function interpolates their peaks linearly. Beyond all
        compiled points, it adds the error of the nearest one. Only points that `compiled_alike`
        returns are compared. If there are none, the model's own prediction is returned.
        """
        return self.corrected(place, self.compiled_alike(place))

    def compared(self, place: int) -> int:
        """Return the prediction by which a point is compared with others, to find the lowest peak.

        Where nothing was compiled that divides the program like a point, those that divide the same
        segments into other numbers of pieces correct it. If one of these compiled to more than its
        prediction, a number of pieces that was not tried would look better only because nothing
        corrects it. As a prediction of the peak, the model's own is better than this correction,
        because the errors of other numbers of pieces differ.
        """
        alike = self.compiled_alike(place)
        segments = _segments(self.points[place])
        if not alike and segments:
            compiled = (p for p in self.known if self.measured(p))
            alike = [p for p in compiled if _segments(self.points[p]) == segments]
        return self.corrected(place, alike)

    def corrected(self, place: int, alike: Sequence[int]) -> int:
        """Return the predicted peak of a point, corrected by those of some compiled points."""
        if place in self.known and self.measured(place):
            return self.measured(place) or 0
        if place in self.refused:
            return _NEVER
        own = self.points[place].predicted_peak_bytes
        if place in self.leaner:
            return self.predicted_leaner(place)
        pairs = sorted((self.points[p].predicted_peak_bytes, self.measured(p) or 0) for p in alike)
        if not pairs:
            return own
        below = [pair for pair in pairs if pair[0] <= own]
        above = [pair for pair in pairs if pair[0] > own]
        if below and above:
            (x0, y0), (x1, y1) = below[-1], above[0]
            return round(y0 + (y1 - y0) * (own - x0) / max(x1 - x0, 1))
        x, y = (below or above)[-1 if below else 0]
        return max(self.fixed(), y + own - x)

    def compiled_alike(self, place: int) -> list[int]:
        """Return the compiled points whose errors say something about that of another point.

        For a point without pieces these are all others without pieces, if two are compiled: one is
        usually the program without regions, whose error says little about programs with regions.
        For a point with pieces they are those that divide the program alike.
        """
        graph = self.points[place].graph
        compiled = (p for p in self.known if self.measured(p))
        alike = [p for p in compiled if self.points[p].graph is graph]
        return alike if graph is not None or len(alike) > 1 else []

    def predicted_leaner(self, place: int) -> int:
        """Return the predicted peak of a leaner point, which saves less than the first point.

        If the first point was compiled, the peak is its compiled peak less the difference in saved
        bytes, but at least the model's own prediction for the leaner point. If it was not, the peak
        is above the first point's, so that the first point is compiled before.
        """
        own, first = self.points[place], self.points[0]
        if 0 not in self.known or not self.measured(0):
            return max(own.predicted_peak_bytes, self.predicted(0) + 1)
        least = max(own.predicted_peak_bytes, self.fixed())
        return max(least, self.predicted(0) - (first.saved_bytes - own.saved_bytes))

    def choice(self, budget: str | int | float, limit: int | None) -> int | None:
        """Return the point to compile next, or None if no other point is promising."""
        points = self.points
        if budget == "min":
            most = _MOST_PASSES * self.frontier.forward_seconds
            new = [
                p for p, point in enumerate(points) if self.is_new(p) and point.extra_work <= most
            ]
            if not new:
                return None
            best = min(new, key=self.smallest)
            least = min(self.measured(p) or _NEVER for p in self.known)
            if self.compared(best) < least or self.count() < 3:
                return best
            # The model's errors differ from one program with pieces to the next, so one with a
            # higher prediction may compile to less memory. Those with the least work come first.
            leaner = [p for p in new if points[p].predicted_peak_bytes < least]
            promising = [p for p in leaner if points[p].graph is not None]
            return min(promising, key=lambda p: points[p].extra_work, default=None)
        if budget == "free":
            allowed = self.free()
            return min(allowed, key=self.smallest)
        assert limit is not None
        fitting = [p for p in range(len(points)) if self.predicted(p) <= limit]
        if fitting:
            return min(fitting, key=lambda p: points[p].extra_work)
        return self.leanest()

    def smallest(self, place: int) -> tuple[int, float]:
        """Return a sort key: the predicted peak memory first, then the extra work."""
        return self.compared(place), self.points[place].extra_work

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
        if budget == "free":
            fitting = [p for p in fitting if p in self.free()]
        if limit is None and fitting:
            least = min(self.measured(p) or 0 for p in fitting)
            enough = least + _EQUAL * (least - self.fixed())
            fitting = [p for p in fitting if (self.measured(p) or 0) <= enough]
        if fitting:
            return min(fitting, key=lambda p: (self.work(p), self.measured(p)))
        if limit is None:  # the programs that "free" allows were refused
            raise next(iter(self.refused.values()))
        raise self.nothing_fits(limit)

    def nothing_fits(self, limit: int) -> UserError:
        least = min(self.known, key=lambda p: self.measured(p) or _NEVER)
        size = self.measured(least) or 0
        point = self.points[least]
        start, stop = point.cost.peak_segment
        graph = self.frontier.graph_of(point)
        holding = "; ".join(held_arrays(graph, start, stop))
        place = graph.equations[min(start, len(graph.equations) - 1)].module
        given, reached = format_apart(limit, size)
        lower = self.floor(size)
        refused = f"; {self.refusals()}" if self.refused else ""
        return UserError(
            f"`plan(..., budget={given!r})`: no schedule that was compiled fits. The least memory "
            f"that was reached is {reached}, of which {format_bytes(self.fixed())} are arguments "
            f"and results; its peak is in the {point.cost.peak_kind} pass at "
            f"{place or 'the top level'}, where these are the largest arrays: {holding}{refused}",
            hint="use a smaller batch or a chip with more memory; budget='min' returns the plan "
            f"with the least memory{'' if lower is None else f'; {lower}'}",
        )

    def refusals(self) -> str:
        """Say which programs the compiler refused, and why it refused the first of them."""
        plain = self.plain in self.refused
        others = len(self.refused) - plain
        what = ["the program without a plan"] if plain else []
        what += [f"{others} other candidate{'' if others == 1 else 's'}"] if others else []
        first = next(iter(self.refused.values()))
        return f"the compiler refused {' and '.join(what)}: {first.message}"

    def floor(self, peak: int) -> Floor | None:
        """Return what keeps a peak from falling further, if pieces could lower it.

        None if pieces are among the candidates already, or if what is live beside the largest
        working set makes most of the temporaries at the peak.
        """
        if self.has_pieces:
            return None
        found = _pieces.floor(self.frontier.graph, self.chip)
        if found is None or found.bytes < _HOLDS * (peak - self.fixed()):
            return None
        return found

    @property
    def has_pieces(self) -> bool:
        return any(p.graph is not None for p in self.points)

    def phase(self, place: int) -> str:
        """Return the phase of the compiled peak, or "" if the compiler returned no program."""
        text = self.texts.get(place)
        if text is None:
            return ""
        return _peak.anatomy(_hlo.parse(text), platform=self.chip.platform).peak.phase


@dataclasses.dataclass
class _Whole(Search):
    """The search among the points without pieces, as if there were no others.

    Its predictions are corrected by the programs that it chose itself, so it finds the points that
    a search without pieces would find. Another search, whose points may have pieces, compiles them.
    """

    owner: Search = dataclasses.field(kw_only=True, repr=False)

    @classmethod
    def of(cls, owner: Search, frontier: Frontier) -> _Whole:
        given = {f.name: getattr(owner, f.name) for f in dataclasses.fields(Search)}
        own = dict[str, Any](known={}, texts={}, seconds={}, refused={})
        return cls(**given | own | {"frontier": frontier, "owner": owner})

    def compile(self, place: int) -> None:
        if not self.is_new(place):
            return
        owner = self.owner
        there = owner.place_of(self.points[place])
        owner.compile(there)
        self.chip = owner.chip
        for name in ("known", "texts", "seconds", "refused"):
            if there in (found := getattr(owner, name)):
                getattr(self, name)[place] = found[there]

    def compiled_for(self, budget: str | int | float, limit: int | None) -> dict[int, int]:
        """Compile the points that are promising for a budget, unless all are too large by far.

        Returns:
            the predicted peak of each point before it was compiled, by the index that the point has
            for the owner.
        """
        try:
            self.begin()
        except CompileError:  # a program with pieces may still compile
            return {}
        least = min(map(self.predicted, range(len(self.points))))
        if limit is not None and least > _HOPELESS * limit:
            return {}
        tried: dict[int, int] = {}
        self.compile_for(budget, limit, tried)
        return {self.owner.place_of(self.points[p]): peak for p, peak in tried.items()}


def _seconds(compiled: Compiled) -> float:
    """Return the roofline time of a compiled program, with the collectives that it waits for."""
    program = _hlo.parse(compiled.hlo_text or "")
    origins = _peak.origins(program)
    chip = compiled.chip
    moves = collectives(program, origins, chip, compiled.meshes)
    return estimate(program, chip, origins, chip_name=chip.name, **link_times(moves)).seconds


def _segments(point: Point) -> list[tuple[Any, ...]]:
    """Return the segments that a point runs in pieces, each with its axis."""
    divided = None if point.graph is None else point.graph.divided
    divisions = divided.divisions if divided else ()
    return [(d.start, d.stop, d.axis, d.loop) for d in divisions]
