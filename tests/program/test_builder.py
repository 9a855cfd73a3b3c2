"""Builders of models: sizes from texts, and whose fault an error is."""

import pathlib

import pytest

from remat_kit._errors import UserError
from remat_kit._program.builder import parse_sizes, user_line

ROOT = pathlib.Path(__file__).parents[2]


def test_sizes():
    wanted = {"a=1": 1, "b=-2": -2, "c=1e-3": 1e-3, "d=.5": 0.5, "e=True": True, "f=false": False}
    wanted |= {"g=None": None, "h=bf16": "bf16", "i=": "", "j='1'": "1", "k=a=b": "a=b"}
    wanted |= {"l=1_000": 1000, "m=1e": "1e"}
    assert list(parse_sizes(list(wanted)).values()) == list(wanted.values())
    assert [type(v) for v in parse_sizes(["a=1", "b=1.0"]).values()] == [int, float]
    with pytest.raises(UserError, match="not of the form"):
        parse_sizes(["=1"])


def test_a_fault_after_the_users_last_line_is_ours(tmp_path):
    from remat_kit._policy.reading import as_policy

    source = tmp_path / "theirs.py"
    source.write_text("def call(fn):\n    return fn()\n")
    namespace = {}
    exec(compile(source.read_text(), str(source), "exec"), namespace)

    def caught(fn):
        try:
            namespace["call"](fn)
        except Exception as error:
            return user_line(error.__traceback__, tmp_path)

    assert caught(lambda: {}["x"]) == f"{source}:2"
    assert caught(lambda: as_policy("dost")) is None
