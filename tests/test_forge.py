"""The files for a forge: workflows that call what there is, forms, the citation, the changelog."""

import datetime
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tomllib

import pytest
import yaml

import remat_kit

ROOT = pathlib.Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Commands that are not of a package, and packages whose command has another name.
GIVEN = {"python", "test", "remat-kit"}
COMMANDS = {"sphinx-build": "sphinx"}


def parsed(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def packages(*extras):
    """The packages that the extras name, those of the extras that they name included."""
    found = {"pip"}
    for extra in extras:
        for requirement in CONFIG["optional-dependencies"][extra]:
            if inner := re.fullmatch(r"remat-kit\[(.*)\]", requirement):
                found |= packages(*inner.group(1).split(","))
            else:
                found.add(re.match(r"[\w-]+", requirement).group(0))
    return found


def steps(workflow):
    """Yield (job, step) of a workflow."""
    for name, job in workflow["jobs"].items():
        yield from ((name, step) for step in job["steps"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_commands_that_there_are(path):
    workflow = parsed(path)
    assert workflow[True]  # YAML 1.1 reads the key `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    installed = {}
    for job, step in steps(workflow):
        assert set(step) & {"run", "uses"}
        for line in step.get("run", "").splitlines():
            words = shlex.split(line)
            if extras := re.search(r"\.\[([\w,]+)\]", line):
                installed[job] = packages(*extras.group(1).split(","))
            command = words[2] if words[:2] == ["python", "-m"] else words[0]
            if (ROOT / command).is_file():
                assert os.access(ROOT / command, os.X_OK), line
                assert re.search(rf"^{words[1]}\(\)", (ROOT / command).read_text(), re.M), line
            elif command not in GIVEN:
                assert COMMANDS.get(command, command) in installed.get(job, {"pip"}), line
            for word in words[1:]:
                if word.startswith(("tests/", "docs/")) and "_build" not in word:
                    assert (ROOT / word).exists(), line
        for name in re.findall(r"matrix\.(\w+)", str(step)):
            assert name in workflow["jobs"][job]["strategy"]["matrix"]


def test_the_workflows_are_those_of_tests_docs_and_a_release():
    assert {path.stem for path in WORKFLOWS} == {"tests", "docs", "release"}
    runs = {
        path.stem: [step.get("run", "") for _, step in steps(parsed(path))] for path in WORKFLOWS
    }
    assert {".ci/run main", ".ci/run oldest"} <= set(runs["tests"])
    assert any("sphinx-build -W" in run for run in runs["docs"])
    assert any("twine check --strict" in run for run in runs["release"])
    release = parsed(ROOT / ".github" / "workflows" / "release.yml")
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}  # trusted publishing stores no token
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()


def test_the_versions_of_python_are_those_of_the_package():
    said = {c.rsplit(" ", 1)[1] for c in CONFIG["classifiers"] if re.search(r":: 3\.\d+$", c)}
    jobs = parsed(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]
    tested = {(ROOT / ".python-version").read_text().strip()}
    tested |= {str(v) for v in jobs["later"]["strategy"]["matrix"]["python"]}
    tested |= {s["with"]["python-version"] for s in jobs["oldest"]["steps"] if "with" in s}
    assert tested == said


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_script_of_the_checks_is_a_script():
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_an_issue_form_is_one(name):
    form = parsed(ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert {"name", "description", "body"} <= set(form)
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    for field in form["body"]:
        assert field["type"] in ("input", "textarea")
        assert field["attributes"]["label"]
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_the_version_and_the_address_are_the_same_everywhere():
    cited = parsed(ROOT / "CITATION.cff")
    assert cited["version"] == remat_kit.__version__
    assert cited["license"] == CONFIG["license"]
    assert cited["url"] == CONFIG["urls"]["Homepage"]
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (day,) = re.findall(rf"^## {re.escape(remat_kit.__version__)} \((.*)\)$", text, re.M)
    assert cited["date-released"] == datetime.date.fromisoformat(day)
