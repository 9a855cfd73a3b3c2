"""The JSON Schemas of what the commands write, against what they write."""

import copy
import importlib.util
import json
import pathlib

import jsonschema
import pytest

from remat_kit._cli import arguments as _arguments
from remat_kit._cli.schema import _definitions, schema

ROOT = pathlib.Path(__file__).parents[2]
DEFINITIONS = _definitions()["$defs"]
COMMANDS = set(_arguments._ANSWERS) - {"schema"}
SMALL = ["mlp", "--size", "batch=4", "features=8", "hidden=8"]
CALLS = {
    "inspect": [*SMALL, "--policy", "dots", "--target", "cpu", "--optimizer", "sgd"],
    "diff": [*SMALL, "--policy", "nothing"],
    "measure": [*SMALL, "--policy", "dots", "--target", "cpu@1KiB", "local"],
    "plan": [*SMALL, "--budget", "min"],
    "frontier": SMALL,
    "max-batch": [*SMALL[:1], "--size", "features=8", "--target", "cpu@1MiB", "--at-most", "64"],
    "fit": [*SMALL[:1], "--size", "features=8", "--batch", "4", "--target", "cpu@1MiB"],
    "bench": None,  # takes long; the fixture of this folder checks it in `test_bench.py`
    "doctor": None,  # likewise in `test_doctor.py`
    "policies": [],
    "targets": [],
    "models": [],
}


def objects(part, path=""):
    """Yield the path and the schema of every object that has a fixed set of fields."""
    if isinstance(part, dict):
        if "properties" in part and part.get("type") == "object":
            yield path, part
        for name, inner in part.items():
            yield from objects(inner, f"{path}/{name}")
    elif isinstance(part, list):
        for number, inner in enumerate(part):
            yield from objects(inner, f"{path}/{number}")


def test_every_command_has_a_schema():
    assert set(CALLS) == COMMANDS
    assert set(DEFINITIONS) >= COMMANDS


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_schema_is_one_is_complete_and_is_used(name):
    jsonschema.Draft202012Validator.check_schema(schema(name))
    for _, part in objects(schema(name)):
        assert part["additionalProperties"] is False
        assert part["required"] == list(part["properties"])
        for field, what in part["properties"].items():
            assert what["description"], field
    used = set().union(*(schema(command)["$defs"] for command in COMMANDS))
    assert name in used | COMMANDS


@pytest.mark.parametrize("command", [name for name, call in CALLS.items() if call is not None])
def test_what_a_command_writes_follows_its_schema(run, tmp_path, command):
    path = tmp_path / "out.json"
    status, _, err = run(command, *CALLS[command], "--json", path)
    assert status == 0, err
    written = json.loads(path.read_text())
    validator = jsonschema.Draft202012Validator(schema(command))
    validator.validate(written)
    assert not validator.is_valid(written | {"new": 1})
    for field in written:
        assert not validator.is_valid({k: v for k, v in written.items() if k != field})
    if command == "inspect":
        inner = copy.deepcopy(written)
        inner["policies"][1]["peak"]["cpu"]["buffers"][0]["new"] = 1
        assert not validator.is_valid(inner)
        earlier = tmp_path / "earlier.json"
        earlier.write_text(json.dumps(written))
        assert run(command, *CALLS[command], "--against", earlier, "--json", path)[0] == 0
        validator.validate(json.loads(path.read_text()))


@pytest.mark.parametrize("call", [["policies", "uniform:2"], ["models", "gpt"]])
def test_what_a_command_writes_about_one_name_follows_its_schema(run, call):
    jsonschema.validate(json.loads(run(*call, "--json", "-")[1]), schema(call[0]))


def test_the_command_prints_schemas(run, refused):
    status, out, _ = run("schema")
    assert status == 0
    for name in DEFINITIONS:
        assert f"\n{name} " in out
    status, out, _ = run("schema", "plan")
    assert (status, json.loads(out)) == (0, schema("plan"))
    assert json.loads(run("schema", "plan", "--json", "-")[1]) == schema("plan")
    message, hint = refused("schema", "pln")
    assert "no schema is named 'pln'" in message
    assert "'plan'" in hint


def test_the_table_of_the_docs_has_every_field():
    spec = importlib.util.spec_from_file_location("json_fields", ROOT / "docs" / "json_fields.py")
    json_fields = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(json_fields)
    text = json_fields.rendered()
    page = (ROOT / "docs" / "reference" / "json.md").read_text(encoding="utf-8")
    assert "<!-- generated: json -->" in page
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    assert set(sections) == {f"`{name}`" for name in DEFINITIONS}
    for name, part in DEFINITIONS.items():
        for _, inner in objects(part):
            for field, what in inner["properties"].items():
                assert f"{field}`" in sections[f"`{name}`"], (name, field)
                assert what["description"].replace("|", "\\|") in sections[f"`{name}`"]
