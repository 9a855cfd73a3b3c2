"""`remat-kit models`: the models that come with the package."""

import ast
import importlib.util
import inspect
import json
import pathlib

import pytest

from remat_kit._cli.models import described
from remat_kit._errors import BuildError
from remat_kit._program.builder import loaded, packaged_models

ROOT = pathlib.Path(__file__).parents[2]


def test_models_lists_every_model(run):
    status, out, err = run("models")
    assert (status, err) == (0, "")
    _, listed, _ = run("models", "--json", "-")
    found = {model["name"]: model for model in json.loads(listed)["models"]}
    assert set(found) == {path.stem for path in (ROOT / "models").glob("*.py")}
    for name, model in found.items():
        assert f"\n{name} " in out
        assert model["description"].endswith(".")
        assert pathlib.Path(model["file"]).is_file()


@pytest.mark.parametrize("name", packaged_models())
def test_the_sizes_are_the_parameters_of_the_builder(name):
    """They are read from the text of the file, which is quicker than to import it."""
    spec = importlib.util.spec_from_file_location(f"model_{name}", packaged_models()[name])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parameters = inspect.signature(module.build).parameters
    sizes = {
        n: p.default for n, p in parameters.items() if n not in ("policy", "materialize", "seed")
    }
    assert described(name)["sizes"] == sizes
    assert ast.get_docstring(ast.parse(packaged_models()[name].read_text()))


def test_models_shows_one(run):
    status, out, _ = run("models", "gpt")
    assert status == 0
    assert "size=small batch=8" in out
    assert str(ROOT / "models" / "gpt.py") in out


def test_a_wrong_name_has_a_near_match_and_the_list(refused, tmp_path):
    message, hint = refused("models", "gtp")
    assert "no model is named 'gtp'" in message
    assert "'gpt'" in hint
    message, hint = refused("inspect", "resnte")
    assert "there is no module resnte, and no model of that name" in message
    assert "did you mean 'resnet'?" in hint
    for name in packaged_models():
        assert name in hint


def test_an_address_of_the_checkout_leads_to_the_model_of_the_package(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BuildError, match="remat_kit is called 'gpt'"):
        loaded("models/gpt.py:build").__enter__()


def test_a_name_is_a_model_unless_the_user_has_a_module_of_that_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlp").mkdir()  # a folder of results
    for address in ("mlp", "mlp:build"):
        with loaded(address) as builder:
            assert builder.root == ROOT / "models"
            assert builder.takes("features")
    (tmp_path / "mlp").rmdir()
    (tmp_path / "mlp.py").write_text("def build(own=1): return (lambda x: x), (1.0,)\n")
    with loaded("mlp") as builder:
        assert builder.root == tmp_path
        assert builder.takes("own")
