"""The package: what the wheel holds, and what works once it is installed, far from a checkout."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

import remat_kit
from remat_kit._chip.target import target

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "remat_kit"
README = ROOT / "README.md"
GETTING_STARTED = ROOT / "docs" / "getting_started.md"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The path of a wheel, built from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            *(sys.executable, "-m", "build", "--wheel", "--no-isolation"),
            *("--outdir", str(folder), str(ROOT)),
        ],
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def contents(wheel):
    return zipfile.ZipFile(wheel)


# -- what the wheel holds ---------------------------------------------------------------------


def test_the_wheel_holds_the_package_with_the_recipes_and_the_models_inside(contents):
    names = [n for n in contents.namelist() if not n.split("/")[0].endswith(".dist-info")]
    assert {n.split("/")[0] for n in names} == {"remat_kit"}
    recipes = {n.split("/")[-1] for n in names if n.startswith("remat_kit/policies/")}
    assert recipes >= {p.name for p in (ROOT / "policies").glob("*.toml")}
    assert "remat_kit/py.typed" in names
    parts = {f"remat_kit/_show/page.{kind}" for kind in ("html", "css", "js")}
    parts.add("remat_kit/_cli/schemas.json")
    stubs = {"remat_kit/__init__.pyi", "remat_kit/testing/__init__.pyi"}
    assert parts | stubs <= set(names)
    modules = {str(p.relative_to(ROOT)) for p in PACKAGE.rglob("*.py")}
    models = {f"remat_kit/models/{p.name}" for p in (ROOT / "models").glob("*.py")}
    assert {n for n in names if n.endswith(".py")} == modules | models


def test_the_wheel_says_who_it_is(contents):
    (metadata,) = [n for n in contents.namelist() if n.endswith("METADATA")]
    text = contents.read(metadata).decode()
    assert "Requires-Python: >=3.11" in text
    assert "License-Expression: Apache-2.0" in text
    assert f"Version: {remat_kit.__version__}\n" in text
    assert re.search(r"^Project-URL: Homepage, https://", text, re.M)
    assert re.search(r"^Author: \S", text, re.M)
    extras = set(re.findall(r"^Provides-Extra: (\S+)$", text, re.M))
    assert extras == {"cuda", "dev", "docs", "mcp", "plot", "test", "tpu"}
    (scripts,) = [n for n in contents.namelist() if n.endswith("entry_points.txt")]
    assert "remat-kit = remat_kit._cli.main:main" in contents.read(scripts).decode()
    assert "[pytest11]\nremat_kit = remat_kit.testing.plugin" in contents.read(scripts).decode()


def test_the_folders_of_the_wheel_are_not_in_the_checkout():
    assert not (PACKAGE / "models").exists()
    assert not (PACKAGE / "policies").exists()


# -- in an environment without the checkout ---------------------------------------------------


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Install the wheel in a new environment; return a function that runs a command there.

    The environment sees the packages that the wheel requires where these tests see them. A path
    file adds their folder after its own packages, and path files inside that folder are not read,
    so an editable installation of the checkout is out of sight.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    seen = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "dependencies.pth").write_text("\n".join(sorted(seen)) + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True)
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "REMAT_KIT_CACHE"}
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | {
        "JAX_PLATFORMS": "cpu",
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "REMAT_KIT_CACHE": str(folder / "cache"),
    }

    def run(*words, cwd, status=0):
        done = subprocess.run(
            words, cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stderr
        return done.stdout if status == 0 else done.stderr

    return run


def test_the_installed_package_is_that_of_the_wheel_and_finds_its_recipes(installed, tmp_path):
    code = "import remat_kit; print(remat_kit.__file__, len(remat_kit.recipes()))"
    place, count = installed("python", "-c", code, cwd=tmp_path).split()
    assert not pathlib.Path(place).is_relative_to(ROOT)
    assert "site-packages" in place
    assert int(count) == len(list((ROOT / "policies").glob("*.toml")))
    said = installed("remat-kit", "--version", cwd=tmp_path)
    assert said == f"remat-kit {remat_kit.__version__}\n"


def test_a_model_of_the_package_works_from_an_empty_folder(installed, tmp_path):
    out = installed("remat-kit", "inspect", "mlp", "--json", "-", cwd=tmp_path)
    (report,) = json.loads(out)["policies"]
    sources = {saved["source"].split(":")[0] for saved in report["saved"]}
    assert "remat_kit/models/mlp.py" in sources
    assert not [source for source in sources if "remat_kit/_" in source]
    assert not list(tmp_path.iterdir())


def test_a_fault_in_the_call_of_a_packaged_model_is_the_users(installed, tmp_path):
    """The model's file is inside the package, and its errors are still those of a model."""
    said = installed("remat-kit", "inspect", "gpt", "--size", "size=b9", cwd=tmp_path, status=2)
    assert "ValueError: size='b9'" in said
    assert "remat_kit/models/gpt.py:" in said


def commands_of(page):
    """The commands in the console blocks of a page: lines that start with `$ remat-kit`."""
    blocks = re.findall(r"^```console\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    text = "".join(blocks).replace("\\\n", " ")
    return re.findall(r"^\$ (remat-kit .*)$", text, re.M)


@pytest.mark.slow
def test_the_commands_of_getting_started_work_from_an_empty_folder(installed, tmp_path):
    commands = [shlex.split(line) for line in commands_of(GETTING_STARTED)]
    assert len(commands) >= 10
    compiled = "remat-kit inspect gpt --size size=tiny --target tpu-v5e"
    for command in [*commands, compiled.split()]:
        chips = [w for w in command if re.fullmatch(r"(tpu|h100|a100|cpu)[\w@-]*", w)]
        if all(target(chip).available for chip in chips):
            assert installed(*command, cwd=tmp_path).strip(), command


@pytest.mark.slow
def test_the_python_of_the_readme_runs_outside_of_the_checkout(installed, tmp_path):
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert blocks
    program = "\n".join(blocks)
    if not target("tpu-v5e").available:
        program = program.replace("tpu-v5e", "cpu")
    script = tmp_path / "readme.py"
    script.write_text(program, encoding="utf-8")
    assert installed("python", str(script), cwd=tmp_path).strip()
