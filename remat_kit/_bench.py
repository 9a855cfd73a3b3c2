"""The published table of gradient checkpointing on CNNs, and what the planner makes of its models.

Feng and Huang ("Optimal gradient checkpoint search for arbitrary computation graphs", CVPR 2021)
measured 18 models on an RTX 2080 Ti. `bench` plans one of them for a chip three times, at their
memory, at their work and for the least memory, compiles the plans and judges them by theirs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from remat_kit import _frontier
from remat_kit._builder import loaded
from remat_kit._errors import BuildError, UserError, unknown
from remat_kit._policy import format_bytes
from remat_kit._search import Search, temporaries
from remat_kit._solve import silent
from remat_kit._table import Table, format_seconds
from remat_kit._target import target as find_target

MIB = 2**20
COMPILES = 3  # for each of the three plans
NOT_MEASURED = "not measured: no device"

# A backward pass is about two forward passes of work, so a step is three.
_FORWARDS_PER_STEP = 3
_WANTED = 0.5  # of their work, at their memory


@dataclasses.dataclass(frozen=True)
class Published:
    """One line of the paper's table.

    Attributes:
        arch: the name for ``--arch``.
        title: the paper's name.
        file: of the model, in the folder of models, without its suffix.
        sizes: for its builder. Dropout is off, as in the authors' script.
        plain_mib: peak memory beyond weights and their gradients, without checkpoints.
        least_mib: the same with theirs.
        overhead: extra time of a step, as a fraction of it.
    """

    arch: str
    title: str
    file: str
    sizes: Mapping[str, Any] = dataclasses.field(hash=False)
    plain_mib: int
    least_mib: int
    overhead: float

    @property
    def fraction(self) -> float:
        """Memory with their checkpoints over memory without."""
        return self.least_mib / self.plain_mib

    @property
    def extra_forward(self) -> float:
        """Their extra work, in forward passes.

        A step is three forward passes, so +31 % of a step is 0.93 of one. It is at most 1, for
        their method runs an operation twice at the most; time beyond that is no work.
        """
        return min(1.0, _FORWARDS_PER_STEP * self.overhead)


# arch, title, file, sizes, MiB without, MiB with theirs, extra time of a step
TABLE = (
    Published("alexnet", "AlexNet", "alexnet", {"batch": 1024, "dropout": 0.0}, 4955, 3287, 0.34),
    Published(
        "vgg11", "VGG-11", "vgg", {"depth": 11, "batch": 64, "dropout": 0.0}, 3577, 2781, 0.34
    ),
    Published(
        "vgg13", "VGG-13", "vgg", {"depth": 13, "batch": 64, "dropout": 0.0}, 5136, 3565, 0.33
    ),
    Published(
        "vgg16", "VGG-16", "vgg", {"depth": 16, "batch": 64, "dropout": 0.0}, 5136, 3565, 0.32
    ),
    Published(
        "vgg19", "VGG-19", "vgg", {"depth": 19, "batch": 64, "dropout": 0.0}, 5189, 3565, 0.33
    ),
    Published("resnet18", "ResNet-18", "resnet", {"depth": 18, "batch": 256}, 5635, 3677, 0.30),
    Published("resnet34", "ResNet-34", "resnet", {"depth": 34, "batch": 128}, 4079, 1838, 0.35),
    Published("resnet50", "ResNet-50", "resnet", {"depth": 50, "batch": 64}, 5323, 1973, 0.31),
    Published("resnet101", "ResNet-101", "resnet", {"depth": 101, "batch": 32}, 3934, 1024, 0.35),
    Published("resnet152", "ResNet-152", "resnet", {"depth": 152, "batch": 16}, 2767, 526, 0.37),
    Published(
        "densenet121", "DenseNet-121", "densenet", {"depth": 121, "batch": 32}, 4027, 898, 0.34
    ),
    Published(
        "densenet161", "DenseNet-161", "densenet", {"depth": 161, "batch": 16}, 3751, 666, 0.36
    ),
    Published(
        "densenet169", "DenseNet-169", "densenet", {"depth": 169, "batch": 32}, 4862, 897, 0.32
    ),
    Published(
        "densenet201", "DenseNet-201", "densenet", {"depth": 201, "batch": 16}, 3146, 474, 0.53
    ),
    Published(
        "inception", "Inception-v3", "inception", {"batch": 32, "dropout": 0.0}, 3074, 881, 0.29
    ),
    Published("nasnet", "NASNet", "cells", {"arch": "nasnet", "batch": 64}, 5832, 1129, 0.31),
    Published(
        "amoebanet", "AmoebaNet", "cells", {"arch": "amoebanet", "batch": 64}, 4944, 1058, 0.36
    ),
    Published("darts", "DARTS", "cells", {"arch": "darts", "batch": 64}, 5627, 1115, 0.55),
)


def published(arch: str, *, call: str = "bench") -> Published:
    """Return the paper's line for an architecture.

    >>> line = published("resnet101")
    >>> line.plain_mib, line.least_mib, round(line.fraction, 2), line.extra_forward
    (3934, 1024, 0.26, 1.0)

    Args:
        arch: as in `TABLE`.
        call: what an error names.

    Raises:
        UnknownNameError: the paper has no such model.
    """
    by_name = {line.arch: line for line in TABLE}
    if arch not in by_name:
        raise unknown("architecture", arch, by_name, call=call)
    return by_name[arch]


# -- one model on one chip ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The best compiled program for one of the three questions.

    Attributes:
        goal: ``"memory"``, at most their fraction of the memory; ``"work"``, at most their extra
            work; ``"least"``, the least memory.
        temp_bytes: temporaries of the compiled step; None when nothing that was compiled answers.
        fraction: these over the temporaries without a plan.
        extra_forward: operations computed twice, in forward passes.
        extra_forward_time: their roofline time, in forward passes.
        extra_step_time: the same as a fraction of a step, as the paper gives its own.
        bound_forward_time: the least roofline time of any schedule with this predicted peak.
        step_seconds: measured, on the target ``local`` alone.
        limit: what the goal asks: the most work for ``"memory"``, a fraction of the memory to be
            below for the others.
        reached: whether the goal is reached.
        reason: why not, where it is not.
    """

    goal: str
    temp_bytes: int | None
    fraction: float | None
    extra_forward: float | None
    extra_forward_time: float | None
    extra_step_time: float | None
    bound_forward_time: float | None
    step_seconds: float | None
    limit: float
    reached: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One model of the paper, planned for one chip.

    Attributes:
        published: the paper's line.
        target: the chip.
        sizes: of the model as it was planned.
        plain_temp_bytes: temporaries of the step without a plan.
        plain_step_seconds: measured, on the target ``local`` alone.
        outcomes: for their memory, their work and the least memory.
        planning_seconds: what tracing and solving took.
        seconds: what the whole row took.
        compiled: how many programs were compiled.
        versions: of what took part.
    """

    published: Published
    target: str
    sizes: Mapping[str, Any] = dataclasses.field(hash=False)
    plain_temp_bytes: int
    plain_step_seconds: float | None
    outcomes: tuple[Outcome, ...]
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
        """Return the three plans beside the paper's figures."""
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
            notes.append("note: other sizes than the paper's, so its figures are no measure")
        if self.plain_step_seconds is None:
            notes.append(f"note: step times are of a roofline; {NOT_MEASURED}")
        notes.append("note: work in forward passes; memory without arguments and results")
        return notes


_NAMES = {"memory": "at their memory", "work": "at their work", "least": "least memory"}


def _cells(outcome: Outcome) -> tuple[str, ...]:
    name = _NAMES[outcome.goal]
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
    models: str | pathlib.Path = "models",
    sizes: Mapping[str, Any] | None = None,
    compiles: int = COMPILES,
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
        target: the chip to compile for; on ``local`` every program is run too.
        models: the folder of the model files.
        sizes: for the model's builder, over those of the paper.
        compiles: how many programs may be compiled for each of the three, beside the one without a
            plan.
        progress: called with what is worked on.

    Raises:
        UnknownNameError: the paper has no such model, or there is no such chip or size.
        BuildError: the model's file is not there.
        MissingPluginError: the chip's compiler is not installed.
    """
    begun = time.perf_counter()
    paper = published(arch)
    chip = find_target(target)
    chosen = {**paper.sizes, **(sizes or {})}
    with loaded(_address(paper, models)) as builder:
        fn, args = builder.build(chosen)
        with builder.explained((fn, args)):
            found = _frontier.frontier(
                fn, *args, target=chip, objective="balanced", progress=progress
            )
            search = Search(
                *(fn, args, 0, chip, found, compiles, progress or silent),
            )
            outcomes = _Judge(search, paper).outcomes()
    plain = search.known[search.plain]
    return Row(
        published=paper,
        target=chip.name,
        sizes=chosen,
        plain_temp_bytes=temporaries(plain) or 0,
        plain_step_seconds=plain.step_seconds,
        outcomes=outcomes,
        planning_seconds=found.planning_seconds,
        seconds=time.perf_counter() - begun,
        compiled=len(search.known),
        versions=dict(plain.versions),
    )


def _address(paper: Published, models: str | pathlib.Path) -> str:
    path = pathlib.Path(models) / f"{paper.file}.py"
    if not path.is_file():
        raise BuildError(
            f"`--models {models}`: there is no {path.name} in it, the model of {paper.arch}",
            hint="the models do not come with the package: run this in a checkout of remat_kit, or "
            "name its folder of models with --models DIR",
        )
    return f"{path}:build"


@dataclasses.dataclass(frozen=True)
class _Judge:
    """Searches for the three budgets, and holds what was found against the paper."""

    search: Search
    paper: Published

    def outcomes(self) -> tuple[Outcome, ...]:
        most = self.paper.extra_forward
        self.search.allowed = lambda point: point.extra_flops_fraction <= most
        for budget in (self.paper.fraction, "free", "min"):
            with contextlib.suppress(UserError):  # nothing fits: the outcome says so
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
        reason = f"of what was compiled, what fits takes +{found.extra_forward:.2f} of a forward "
        reason += f"pass or more, and half of theirs is +{limit:.2f}; "
        reason += f"no schedule with its peak takes less than +{bound:.2f} of the time of one"
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
            limit=limit,
            reached=False,
            reason="",
        )

    def _fraction(self, place: int) -> float:
        known = self.search.known
        return (temporaries(known[place]) or 0) / max(temporaries(known[self.search.plain]) or 0, 1)

    def _too_much(self, place: int) -> str:
        """Say how little was reached, what was expected, and what holds the peak."""
        front, point = self.search.frontier, self.search.points[place]
        start, stop = point.cost.peak_segment
        module = front.graph.equations[min(start, front.equations - 1)].module or "the top"
        held = "; ".join(_frontier.held_arrays(front.graph, start, stop))
        plain = max(temporaries(self.search.known[self.search.plain]) or 0, 1)
        expected = max(0, point.predicted_peak_bytes - front.argument_bytes - front.output_bytes)
        return (
            f"the least that was compiled is {100 * self._fraction(place):.1f} % of the memory "
            f"without a plan, and theirs is {100 * self.paper.fraction:.1f} %; the planner's "
            f"model, before compiling, has {100 * expected / plain:.1f} % for it, with the peak in "
            f"the {point.cost.peak_kind} pass at {module}: {held}"
        )


def _unanswered(goal: str, limit: float, reason: str) -> Outcome:
    nothing = dict.fromkeys(
        (
            *("temp_bytes", "fraction", "extra_forward", "extra_forward_time", "extra_step_time"),
            *("bound_forward_time", "step_seconds"),
        )
    )
    return Outcome(goal=goal, limit=limit, reached=False, reason=reason, **nothing)
