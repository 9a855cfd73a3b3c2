"""The published figures that a row is judged by."""

import inspect

import ogc_table
import pytest

from remat_kit._cli import published as _published

# The paper's cuts in percent, as it rounds them.
CUTS = (34, 22, 31, 31, 31, 35, 55, 63, 74, 81, 78, 82, 82, 85, 71, 81, 79, 80)


def test_the_published_figures_give_the_published_cuts():
    assert tuple(round(100 * (1 - line.fraction)) for line in _published.TABLE) == CUTS
    assert len({line.arch for line in _published.TABLE}) == 18


def test_a_step_is_three_forward_passes_and_no_operation_runs_a_third_time():
    assert _published.published("resnet50").extra_forward == pytest.approx(0.93)
    assert _published.published("inception").extra_forward == pytest.approx(0.87)
    assert _published.published("darts").extra_forward == 1.0


@pytest.mark.parametrize("line", _published.TABLE, ids=lambda line: line.arch)
def test_the_models_take_the_sizes(line):
    build = ogc_table._common.load(line.file).build
    given = inspect.signature(build).bind(**line.sizes)
    assert given.arguments["batch"] > 1
