"""Fixtures for the tests of the command line."""

import pathlib
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("REMAT_KIT_DEBUG", raising=False)


@pytest.fixture
def refused(run):
    """Run a command that must end as a user's mistake, and return its message and hint."""

    def refused(*argv, status=2):
        found, out, err = run(*argv)
        assert found == status, err
        assert out == ""
        assert "Traceback" not in err
        message, hint = err.strip().split("\n")[-2:]
        assert message.startswith("error: ")
        assert hint.startswith("hint: ")
        return message.removeprefix("error: "), hint.removeprefix("hint: ")

    return refused


@pytest.fixture
def model(tmp_path):
    """Write a model file and return its path."""

    def model(text, name="model.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return model
