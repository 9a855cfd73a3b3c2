"""Progress on standard error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat_kit._cli.output import BASELINE


class Progress:
    """The current work, on standard error: a bar in a terminal, plain lines otherwise.

    Args:
      total: the number of pieces of work; 0 if unknown, which shows a spinner instead.
    """

    def __init__(self, total: int = 0):
        self._total = total
        self._begun = 0
        from rich.console import Console

        self._console = Console(stderr=True)
        self._shown: Any = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            from rich import progress

            bar = (*progress.Progress.get_default_columns()[:2], progress.MofNCompleteColumn())
            spinner = (progress.SpinnerColumn(), progress.TextColumn("{task.description}"))
            columns = (*(bar if self._total else spinner), progress.TimeElapsedColumn())
            self._shown = progress.Progress(*columns, console=self._console, transient=True)
            self._shown.add_task("reading the model", total=self._total or None)
            self._shown.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown is not None:
            self._shown.stop()

    def say(self, text: str) -> None:
        """Show the current work and the best answer so far."""
        if self._shown is not None:
            from rich.markup import escape

            self._shown.update(self._shown.task_ids[0], description=escape(text))
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self) -> None:
        """Count one piece of the work as done."""
        if self._shown is not None:
            self._shown.advance(self._shown.task_ids[0])

    def count(self, text: str) -> None:
        """Show the next piece of work, and count the one before it as done."""
        if self._begun:
            self.advance()
        self._begun += 1
        self.say(text if self._shown is not None else f"{self._begun}/{self._total} {text}")

    def compiling(self, policy: str, targets: Sequence[str]) -> None:
        """Show the next piece of work: a policy, for some chips."""
        what = f"compiling for {', '.join(targets)}" if targets else "tracing"
        self.count(f"{what} without a policy" if policy == BASELINE else f"{what} with {policy}")
