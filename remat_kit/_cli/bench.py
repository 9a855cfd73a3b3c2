"""Compare plans with the published table of gradient checkpointing on CNNs.

Feng and Huang ("Optimal gradient checkpoint search for arbitrary computation graphs", CVPR 2021)
measured 18 models on an RTX 2080 Ti. `bench` plans one of these models for a chip three times: with
the paper's memory, with the paper's extra work, and for the least memory. It compiles the plans and
compares them with the paper's figures. If it is asked to, it tries plans that run segments in
pieces where no other plan reaches a goal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_kit._chip.memory import temporaries
from remat_kit._chip.target import Target
from remat_kit._chip.target import target as find_target
from remat_kit._cli.published import COMPILES, Published, published
from remat_kit._errors import BuildError, UserError
from remat_kit._files import data_folder
from remat_kit._planner import frontier as _frontier
from remat_kit._planner.schedules.proposals import silent
from remat_kit._planner.search import Search
from remat_kit._program.builder import loaded
from remat_kit._show.table import Table
from remat_kit._units import format_bytes, format_seconds

MIB = 2**20


NOT_MEASURED = "not measured: no device"


_WANTED = 0.5  # fraction of the paper's work that a plan with the paper's memory may take


# -- one model on one chip ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The best compiled program for one of the three goals.

    Attributes:
        goal: ``"memory"``, at most the paper's fraction of the memory; ``"work"``, at most the
            paper's extra work; ``"least"``, the least memory.
        temp_bytes: temporaries of the compiled step; None if no compiled program meets the goal.
        fraction: the temporaries divided by the temporaries without a plan.
        extra_forward: recomputed FLOPs, in forward passes.
        extra_forward_time: their roofline time, in forward passes.
        extra_step_time: the same as a fraction of a step, as the paper gives it.
        bound_forward_time: a lower bound on the roofline time of any schedule with this predicted
            peak.
        step_seconds: measured time of a step, on the target ``local`` only.
        pieces: the numbers of pieces in which the plan runs segments; empty if it runs none so.
        limit: the limit of the goal: the most work for ``"memory"``, the largest fraction of the
            memory for the others.
        reached: whether the goal is reached.
        reason: why it is not reached.
    """

    goal: str
    temp_bytes: int | None
    fraction: float | None
    extra_forward: float | None
    extra_forward_time: float | None
    extra_step_time: float | None
    bound_forward_time: float | None
    step_seconds: float | None
    pieces: tuple[int, ...]
    limit: float
    reached: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One model of the paper, planned for one chip.

    Attributes:
        published: the paper's line.
        target: the chip.
        sizes: the sizes of the planned model.
        plain_temp_bytes: temporaries of the step without a plan.
        plain_step_seconds: measured time of that step, on the target ``local`` only.
        outcomes: for the paper's memory, the paper's work and the least memory.
        pieces: whether plans with pieces were tried for the goals that no other plan reaches.
        planning_seconds: how long tracing and solving took.
        seconds: how long the whole row took.
        compiled: how many programs were compiled.
        versions: of the libraries that took part.
    """

    published: Published
    target: str
    sizes: Mapping[str, Any] = dataclasses.field(hash=False)
    plain_temp_bytes: int
    plain_step_seconds: float | None
    outcomes: tuple[Outcome, ...]
    pieces: bool
    planning_seconds: float
    seconds: float
    compiled: int
    versions: Mapping[str, str] = dataclasses.field(hash=False)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        paper = self.published
        theirs = {
            "plain_mib": paper.plain_mib,
            "least_mib": paper.least_mib,
            "fraction": paper.fraction,
            "extra_step_time": paper.overhead,
            "extra_forward": paper.extra_forward,
        }
        plain = dataclasses.asdict(self) | {"arch": paper.arch, "title": paper.title}
        del plain["published"]
        return plain | {"published": theirs, "sizes_as_published": self.as_published}

    @property
    def as_published(self) -> bool:
        """Tell whether the model has the paper's sizes."""
        return dict(self.sizes) == dict(self.published.sizes)

    def table(self) -> Table:
        """Return a table of the three plans and the paper's figures."""
        paper = self.published
        plain = ("none", format_bytes(self.plain_temp_bytes), "100.0 %", "", "", "", "")
        theirs = (
            "paper, RTX 2080 Ti",
            format_bytes(paper.least_mib * MIB),
            f"{100 * paper.fraction:.1f} %",
            f"+{paper.extra_forward:.2f}",
            "",
            f"+{100 * paper.overhead:.0f} %",
            "",
        )
        rows = [_cells(outcome) for outcome in self.outcomes]
        columns = ("plan", "memory", "of none", "extra work", "its time", "step", "goal")
        if self.plain_step_seconds is not None:
            columns += ("measured step",)
            times = (self.plain_step_seconds, None, *(o.step_seconds for o in self.outcomes))
            shown = ["" if t is None else format_seconds(t) for t in times]
            plain, theirs, *rows = (
                (*row, time) for row, time in zip((plain, theirs, *rows), shown, strict=True)
            )
        return Table(
            f"{paper.title} on {self.target}",
            columns,
            (plain, theirs, *rows),
            "\n".join(self._notes()),
        )

    def _notes(self) -> list[str]:
        notes = [f"{o.goal}: {o.reason}" for o in self.outcomes if o.reason]
        if not self.as_published:
            notes.append("note: the sizes differ from the paper's, so do not compare the figures")
        if self.plain_step_seconds is None:
            notes.append(f"note: step times are roofline times; {NOT_MEASURED}")
        notes.append("note: work is in forward passes; memory excludes arguments and results")
        return notes


_NAMES = {"memory": "at their memory", "work": "at their work", "least": "least memory"}


def _cells(outcome: Outcome) -> tuple[str, ...]:
    name = _NAMES[outcome.goal] + (", in pieces" if outcome.pieces else "")
    if outcome.temp_bytes is None:
        return (name, *[""] * 5, "no")
    assert outcome.fraction is not None
    return (
        name,
        format_bytes(outcome.temp_bytes),
        f"{100 * outcome.fraction:.1f} %",
        f"+{outcome.extra_forward:.2f}",
        f"+{outcome.extra_forward_time:.2f}",
        f"+{100 * (outcome.extra_step_time or 0):.0f} %",
        "reached" if outcome.reached else "no",
    )


def bench(
    arch: str,
    target: str = "cpu",
    *,
    models: str | pathlib.Path | None = None,
    sizes: Mapping[str, Any] | None = None,
    compiles: int = COMPILES,
    pieces: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Row:
    """Plan one model of the paper for a chip, three times, and compile the plans.

    >>> row = bench("vgg11", sizes={"batch": 2, "image": 32, "width": 4, "hidden": 16})
    >>> [outcome.goal for outcome in row.outcomes]
    ['memory', 'work', 'least']
    >>> row.outcomes[-1].fraction <= 1
    True

    Args:
        arch: as in `TABLE`.
        target: the chip to compile for; on ``local`` every program also runs.
        models: the folder of the model files; by default that of the package.
        sizes: for the builder of the model; they replace those of the paper.
        compiles: how many programs may be compiled for each of the three plans, in addition to the
            one without a plan.
        pieces: if no plan reaches a goal, also try plans that run segments in pieces, for which up
            to the same number of programs is compiled.
        progress: called with a line of text about the current work.

    Raises:
        UnknownNameError: the paper has no such model, or there is no such chip or size.
        BuildError: the file of the model does not exist.
        MissingPluginError: the compiler of the chip is not installed.
    """
    begun = time.perf_counter()
    paper = published(arch)
    chip = find_target(target)
    chosen = {**paper.sizes, **(sizes or {})}
    with loaded(_address(paper, models)) as builder:
        fn, args = builder.build(chosen)
        with builder.explained((fn, args)):
            judge = functools.partial(_judge, paper, fn, args, chip, compiles, progress or silent)
            judges = [judge(pieces=False)]
            outcomes = judges[0].outcomes()
            again = pieces and not all(outcome.reached for outcome in outcomes)
            if again:
                judges.append(judge(pieces=True))
                outcomes = tuple(map(_better, outcomes, judges[1].outcomes()))
    searches = [judged.search for judged in judges]
    plain = searches[0].known[searches[0].plain]
    return Row(
        published=paper,
        target=chip.name,
        sizes=chosen,
        plain_temp_bytes=temporaries(plain) or 0,
        plain_step_seconds=plain.step_seconds,
        outcomes=outcomes,
        pieces=again,
        planning_seconds=sum(search.frontier.planning_seconds for search in searches),
        seconds=time.perf_counter() - begun,
        compiled=sum(len(search.known) for search in searches) - len(searches) + 1,
        versions=dict(plain.versions),
    )


def _address(paper: Published, models: str | pathlib.Path | None) -> str:
    path = pathlib.Path(models or data_folder("models")) / f"{paper.file}.py"
    if not path.is_file():
        raise BuildError(
            f"`--models {models}`: this folder has no {path.name}, the model of {paper.arch}",
            hint="leave --models out to use the model that comes with remat_kit",
        )
    return f"{path}:build"


def _better(outcome: Outcome, other: Outcome) -> Outcome:
    """Return the one that reaches the goal or, if both or neither do, the first if it is as good.

    The better one for the paper's memory has less extra work; for the other goals, less memory.
    """

    def worth(found: Outcome) -> tuple[bool, float]:
        figure = found.extra_forward if found.goal == "memory" else found.fraction
        return not found.reached, math.inf if figure is None else figure

    return min(outcome, other, key=worth)


def _judge(
    paper: Published,
    fn: Callable[..., Any],
    args: Sequence[Any],
    chip: Target,
    compiles: int,
    tick: Callable[[str], None],
    *,
    pieces: bool,
) -> _Judge:
    front = _frontier.frontier(
        fn, *args, target=chip, objective="balanced", pieces=pieces, progress=tick
    )
    return _Judge(Search(fn, args, 0, chip, front, compiles, tick), paper)


@dataclasses.dataclass(frozen=True)
class _Judge:
    """Searches for plans for the three goals and compares them with the paper."""

    search: Search
    paper: Published

    def outcomes(self) -> tuple[Outcome, ...]:
        most = self.paper.extra_forward
        self.search.allowed = lambda point: point.extra_flops_fraction <= most
        for budget in (self.paper.fraction, "free", "min"):
            with contextlib.suppress(UserError):  # nothing fits, and the outcome says so
                self.search.run(budget)
        return self._at_memory(), self._below("work", "free"), self._below("least", "min")

    def _at_memory(self) -> Outcome:
        search, budget = self.search, self.paper.fraction
        limit = _WANTED * self.paper.extra_forward
        try:
            place = search.best(budget, search.limit(budget))
        except UserError:
            least = min(search.known, key=lambda p: temporaries(search.known[p]) or 0)
            return _unanswered("memory", limit, self._too_much(least))
        found = self._outcome("memory", place, limit)
        if search.points[place].extra_flops_fraction <= limit:
            return dataclasses.replace(found, reached=True)
        bound = found.bound_forward_time or 0.0
        reason = f"the compiled plans that fit take +{found.extra_forward:.2f} of a forward "
        reason += f"pass or more, and half of the paper's work is +{limit:.2f}; "
        every = "every schedule with these pieces and" if found.pieces else "every schedule with"
        reason += f"{every} this peak takes at least +{bound:.2f} of its roofline time"
        return dataclasses.replace(found, reason=reason)

    def _below(self, goal: str, budget: str) -> Outcome:
        place = self.search.best(budget, None)
        found = self._outcome(goal, place, self.paper.fraction)
        if found.fraction is not None and found.fraction < self.paper.fraction:
            return dataclasses.replace(found, reached=True)
        return dataclasses.replace(found, reason=self._too_much(place))

    def _outcome(self, goal: str, place: int, limit: float) -> Outcome:
        point, front = self.search.points[place], self.search.frontier
        memory = self.search.known[place]
        forward = front.forward_seconds
        return Outcome(
            goal=goal,
            temp_bytes=temporaries(memory) or 0,
            fraction=self._fraction(place),
            extra_forward=point.extra_flops_fraction,
            extra_forward_time=point.extra_seconds / forward,
            extra_step_time=point.extra_seconds / (forward + front.backward_seconds),
            bound_forward_time=point.bound_extra_seconds / forward,
            step_seconds=memory.step_seconds,
            pieces=point.pieces,
            limit=limit,
            reached=False,
            reason="",
        )

    def _fraction(self, place: int) -> float:
        known = self.search.known
        return (temporaries(known[place]) or 0) / max(temporaries(known[self.search.plain]) or 0, 1)

    def _too_much(self, place: int) -> str:
        """Say which fraction was reached, which was expected, and what is live at the peak."""
        front, point = self.search.frontier, self.search.points[place]
        graph = point.graph or front.graph
        start, stop = point.cost.peak_segment
        module = graph.equations[min(start, len(graph.equations) - 1)].module or "the top"
        held = "; ".join(_frontier.held_arrays(graph, start, stop))
        plain = max(temporaries(self.search.known[self.search.plain]) or 0, 1)
        expected = max(0, point.predicted_peak_bytes - front.argument_bytes - front.output_bytes)
        return (
            f"the least memory of a compiled plan is {100 * self._fraction(place):.1f} % of that "
            f"without a plan, and the paper's is {100 * self.paper.fraction:.1f} %; the planner "
            f"predicted {100 * expected / plain:.1f} % before compiling, with the peak in "
            f"the {point.cost.peak_kind} pass at {module}: {held}"
        )


def _unanswered(goal: str, limit: float, reason: str) -> Outcome:
    nothing = dict.fromkeys(
        (
            *("temp_bytes", "fraction", "extra_forward", "extra_forward_time", "extra_step_time"),
            *("bound_forward_time", "step_seconds"),
        )
    )
    return Outcome(goal=goal, pieces=(), limit=limit, reached=False, reason=reason, **nothing)
