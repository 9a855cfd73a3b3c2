"""Compare the reports of several policies."""

from __future__ import annotations

import dataclasses
from typing import Any

from remat_kit._inspect.headline import headline as _headline
from remat_kit._inspect.lints.lint import raised_peak
from remat_kit._inspect.report import Report, ShownReport
from remat_kit._inspect.tables import (
    NO_POLICY,
    lint_tables,
    memory_table,
    of_model,
    summary_table,
    today,
    unknown_table,
    versions,
)
from remat_kit._show.table import Lines, Table, headed

# -- several reports --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Comparison(ShownReport):
    """Reports of several policies for one loss; ``none`` comes first.

    The memory of each program is taken from `jax.stages.Compiled.memory_analysis`.

    >>> from remat_kit import inspect
    >>> import jax, jax.numpy as jnp
    >>> from remat_kit import inspect
    >>> w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> loss = lambda w: jnp.sum(jnp.sin(jnp.exp(w @ w)))
    >>> both = Comparison((inspect(loss, w, policy="dots"), inspect(loss, w)))
    >>> [r.policy for r in both.reports]
    ['none', 'dots']
    >>> print(both.tables()[1])
    policies
    policy  saved          offloaded  recomputed FLOPs
    ------  -------------  ---------  ----------------
    none    32 KiB         0 B        0 %
    dots    16 KiB  ×0.50  0 B        0.76 %

    Args:
        reports: reports that `inspect` returned for the same loss.
        model: the name of the loss.
        command: the command that made the reports; the page shows it.
    """

    reports: tuple[Report, ...]
    model: str = ""
    command: str = ""

    def __post_init__(self) -> None:
        ordered = sorted(self.reports, key=lambda r: r.policy != NO_POLICY)
        base = ordered[0] if ordered and ordered[0].policy == NO_POLICY else None
        reports = tuple(r if base is None or r is base else _beside(r, base) for r in ordered)
        object.__setattr__(self, "reports", reports)

    @property
    def headline(self) -> str:
        """The comparison in one sentence: what the first needs, and which policy is best."""
        return _headline(self.reports, self.reports[0].plan_command) if self.reports else ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values: ``headline``, ``versions``, and ``policies``, a list of reports.

        Each report is what `Report.to_json` returns; the report of ``none`` comes first if there
        is one. If there is a ``model``, its name precedes them.
        """
        named = {"model": self.model} if self.model else {}
        said = {"headline": self.headline, "versions": versions()}
        return named | said | {"policies": [r.to_json() for r in self.reports]}

    def _plain(self) -> dict[str, Any]:
        made = {"command": self.command, "date": today()}
        return self.to_json() | made | {"policies": [r._with_buffers() for r in self.reports]}

    def tables(self) -> list[Table | Lines]:
        """Return the headline, and tables: all policies, all targets, and any lints."""
        found: list[Table | Lines] = [headed(self.headline)] if self.headline else []
        found.append(summary_table(self.reports, title=f"policies{of_model(self.model)}"))
        if any(r.memory for r in self.reports):
            found.append(memory_table(self.reports))
        if self.reports and self.reports[0].unknown_costs:
            found.append(unknown_table(self.reports[0]))
        changes = [table for r in self.reports if r.change for table in r.change.tables()]
        return [*found, *lint_tables(self.reports), *changes]


def _beside(report: Report, base: Report) -> Report:
    """Add lints that need a comparison with the memory without a policy."""
    found = [raised_peak(m, base.memory.get(name)) for name, m in report.memory.items()]
    new = [lint for lint in found if lint is not None and lint not in report.lints]
    return dataclasses.replace(report, lints=(*report.lints, *new))
