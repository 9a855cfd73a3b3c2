"""Fixtures for the tests of the command line."""

import functools
import json
import pathlib
import sys
import textwrap

import jsonschema
import pytest

from remat_kit._cli import output as _output
from remat_kit._cli.schema import schema

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


@pytest.fixture(autouse=True)
def answers_follow_their_schemas(monkeypatch):
    """Check what each command of these tests writes as JSON, or would write, against its schema."""
    from remat_kit._cli import arguments as _arguments

    def checked(answer, options, plain, *rest):
        if options.command != "schema":  # what that one writes is a schema
            written = json.loads(json.dumps(plain), parse_constant=refused)
            validator(options.command).validate(written)
        return answer(options, plain, *rest)

    def refused(name):
        raise AssertionError(f"{name} is not JSON")

    for run, *_ in _arguments._COMMANDS.values():
        module = sys.modules[run.__module__]
        if hasattr(module, "answer"):
            wrapped = functools.partial(checked, _output.answer)
            monkeypatch.setattr(module, "answer", wrapped)


@functools.cache
def validator(command):
    return jsonschema.Draft202012Validator(schema(command))
