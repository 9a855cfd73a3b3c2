"""The pytest plugin of remat_kit: the fixture ``memory_baseline``.

The module imports no JAX, because pytest imports every plugin before the ``conftest.py`` of a
project runs. If the plugin imported JAX, settings that JAX reads at its import would come too late.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from remat_kit.testing.baseline import MemoryBaseline

_OPTION = "--update-memory-baselines"
_FOLDER = "memory_baselines"
_PROPERTY = "memory_baseline"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("remat_kit")
    group.addoption(
        _OPTION,
        action="store_true",
        help="write the memory baselines of the tests that run, instead of comparing with them",
    )


@pytest.fixture
def memory_baseline(request: pytest.FixtureRequest) -> MemoryBaseline:
    """Compares the memory of programs with ``memory_baselines/<test file>/<test>.json``.

    ``memory_baseline.check(loss, *args, target="tpu-v5e")`` compiles the gradient of the loss for
    that chip and fails with a comparison by module if its peak has grown; see
    `remat_kit.testing.MemoryBaseline`. ``pytest --update-memory-baselines`` writes the file.
    """
    from remat_kit.testing.baseline import MemoryBaseline, file_name

    _, _, test = request.node.nodeid.partition("::")
    return MemoryBaseline(
        request.path.parent / _FOLDER / request.path.stem / file_name(test),
        test=test,
        update=bool(request.config.getoption(_OPTION)),
        command=f"pytest {_OPTION} {shlex.quote(f'{_place(request)}::{test}')}",
        # Properties travel from the workers of pytest-xdist to the process that prints.
        say=lambda text: request.node.user_properties.append((_PROPERTY, text)),
    )


def _place(request: pytest.FixtureRequest) -> str:
    """Return the path of the test file, relative to the directory where pytest was started."""
    try:
        place = os.path.relpath(request.path, request.config.invocation_params.dir)
    except ValueError:  # the file is on another drive
        return str(request.path)
    return Path(place).as_posix()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    said = list(_said(terminalreporter.stats))
    if said:
        terminalreporter.section("memory baselines")
        for test, text in said:
            terminalreporter.line(f"{test}: {text}")


def _said(stats: Any) -> Iterator[tuple[str, str]]:
    for reports in stats.values():
        for report in reports:
            # The last report of a test also contains the messages of its fixtures.
            if getattr(report, "when", None) == "teardown":
                for name, text in report.user_properties:
                    if name == _PROPERTY:
                        yield report.nodeid, text
