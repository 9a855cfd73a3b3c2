"""The project as a whole: the wheel, the public names, the order of modules, the benchmarks."""

import ast
import doctest
import importlib
import inspect
import json
import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest

import remat_kit

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "remat_kit"
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Each module imports only from those before it.
ORDER = (
    *("_errors", "_jax", "_policy", "_recipe", "_gradient", "_step", "_flax", "_graph"),
    *(
        "_dataflow",
        "_region",
        "_schedule",
        "_remat",
        "_cache",
        "_hlo",
        "_liveness",
        "_anatomy",
        "_roofline",
    ),
    *(
        "_compile_worker",
        "_target",
        "_residuals",
        "_fusion",
        "_cost",
        "_simulate",
        "_cut",
        "_chain",
        "_compose",
        "_solve",
    ),
    *("_duplicates", "_lint"),
    *("_verdict", "_whatif", "_reading", "_table", "_figures", "_frontier", "_search", "_plan"),
    *("_compare", "_diff"),
    *("_html", "_report", "_baseline", "testing", "_builder", "_fit", "_bench", "_cli"),
    *("__init__", "__main__"),
)
MODULES = sorted(PACKAGE.glob("*.py"))


def tracked():
    """The files of the repository that are text, with their paths."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix != ".png":
            yield name, path.read_text(encoding="utf-8")


# -- the wheel --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
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
    return zipfile.ZipFile(path)


def test_wheel_holds_the_package_with_the_recipes_inside_and_the_plugin(wheel):
    names = [n for n in wheel.namelist() if not n.split("/")[0].endswith(".dist-info")]
    assert {n.split("/")[0] for n in names} == {"remat_kit", "pytest_remat_kit.py"}
    recipes = {n.split("/")[-1] for n in names if n.startswith("remat_kit/policies/")}
    assert recipes >= {p.name for p in (ROOT / "policies").glob("*.toml")}
    assert "remat_kit/py.typed" in names
    parts = {p.name for p in PACKAGE.glob("_html.*")}
    assert parts == {"_html.py", "_html.html", "_html.css", "_html.js"}
    assert {f"remat_kit/{part}" for part in parts} <= set(names)
    modules = {n.split("/")[-1] for n in names if n.endswith(".py")}
    assert modules == {p.name for p in MODULES} | {"pytest_remat_kit.py"}


def test_wheel_says_who_it_is(wheel):
    (metadata,) = [n for n in wheel.namelist() if n.endswith("METADATA")]
    text = wheel.read(metadata).decode()
    assert "Requires-Python: >=3.11" in text
    assert "License-Expression: Apache-2.0" in text
    (scripts,) = [n for n in wheel.namelist() if n.endswith("entry_points.txt")]
    assert "remat-kit = remat_kit._cli:main" in wheel.read(scripts).decode()
    assert "[pytest11]\nremat_kit = pytest_remat_kit" in wheel.read(scripts).decode()


def test_installed_wheel_finds_its_recipes(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = "import remat_kit; print(remat_kit.__file__); print(len(remat_kit.recipes()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    place, count = done.stdout.split()
    assert pathlib.Path(place).is_relative_to(tmp_path)
    assert int(count) == len(list((ROOT / "policies").glob("*.toml")))


# -- the public names -------------------------------------------------------------------------

# `remat_kit.testing` shows once it was imported, which other tests may have done.
PUBLIC = {
    name: value
    for name, value in vars(remat_kit).items()
    if not name.startswith("_") and value is not sys.modules.get("remat_kit.testing")
}


def test_only_what_is_exported_shows():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    exported = {
        alias.asname
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(PUBLIC) == exported
    assert not [name for name, value in PUBLIC.items() if inspect.ismodule(value)]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_are_documented(name):
    value = PUBLIC[name]
    text = inspect.getdoc(value) or ""
    assert text, f"{name} has no docstring"
    assert text.splitlines()[0].endswith((".", ":")), text.splitlines()[0]
    is_function = inspect.isfunction(value)
    if is_function:
        assert doctest.DocTestParser().get_examples(text), f"{name} has no example"
        if inspect.signature(value).parameters:
            assert "Args:" in text or len(inspect.signature(value).parameters) <= 2


def test_every_public_function_says_what_it_raises_or_cannot():
    for name, value in PUBLIC.items():
        if inspect.isfunction(value) and "raise " in inspect.getsource(value):
            assert "Raises:" in inspect.getdoc(value), name


# -- the modules ------------------------------------------------------------------------------


def imports(path):
    """Yield (line, module) of every import of a file, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: a relative import"
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_every_module_has_its_place():
    assert {path.stem for path in MODULES} <= set(ORDER)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_go_upwards(path):
    above = ORDER[: ORDER.index(path.stem)]
    for line, module in imports(path):
        package, _, rest = module.partition(".")
        if package == "remat_kit" and rest.startswith("_"):
            inner = rest.partition(".")[0]
            assert inner in above, f"{path.name}:{line} imports {inner}, which is not above it"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_private_jax_is_in_one_module(path):
    if path.stem == "_jax":
        return
    text = path.read_text()
    assert not re.search(r"\bjax\._src\b|\bjaxlib\.", text)
    for line, module in imports(path):
        private = any(part.startswith("_") for part in module.split(".")[1:])
        assert not (module.startswith(("jax.", "jaxlib.", "flax.")) and private), (line, module)


def test_heavy_imports_are_late():
    code = "import remat_kit, sys; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    heavy = {"flax", "matplotlib", "sklearn", "optax", "libtpu", "hypothesis", "pytest"}
    assert "jax" in loaded
    assert not heavy & loaded


# -- the repository ---------------------------------------------------------------------------


def test_no_file_speaks_of_a_machine():
    # "/home/me" is the reader's, in examples.
    home = r"(?<![\w.])/(?:home(?!/me\b)|root|Users|mnt|workspace|work|opt)/[\w.]+"
    found = [
        f"{name}: {match.group(0)}" for name, text in tracked() for match in re.finditer(home, text)
    ]
    assert not found


def test_no_file_is_left_in_conflict_or_unended():
    for name, text in tracked():
        assert not re.search(r"^(<{7}|>{7}) ", text, re.M), name
        assert not text or text.endswith("\n"), f"{name} does not end in a newline"


def test_versions_agree():
    wanted = CONFIG["project"]["requires-python"].removeprefix(">=")
    assert CONFIG["tool"]["ruff"]["target-version"] == "py" + wanted.replace(".", "")
    assert CONFIG["tool"]["pyright"]["pythonVersion"] == wanted
    ci = (ROOT / ".ci" / "run").read_text()
    assert f"oldest_python={wanted}\n" in ci
    oldest = re.search(r"oldest_packages=\((.*)\)", ci).group(1).replace("==", ">=").split()
    assert set(oldest) <= set(CONFIG["project"]["dependencies"])


def test_contributing_lists_the_modules_in_order():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = re.search(r"^_errors .*?(?=^```)", text, re.M | re.S).group(0)
    assert block.split() == [name for name in ORDER if not name.startswith("__")]


# -- benchmarks -------------------------------------------------------------------------------


@pytest.fixture
def bench(request):
    return importlib.import_module(request.param)


@pytest.mark.parametrize("bench", ["import_time"], indirect=True)
def test_import_takes_little(bench):
    # The least of some: the other tests that run beside only add to it.
    assert min(bench.added_seconds(5)) < bench.LIMIT_SECONDS


@pytest.mark.parametrize("bench", ["import_time"], indirect=True)
def test_import_time_can_fail(bench, capsys, tmp_path):
    path = tmp_path / "import.json"
    assert bench.main(["--times", "1", "--limit", "0", "--json", str(path)]) == 1
    assert json.loads(path.read_text())["seconds"][0] > 0
    assert "more than 0 s" in capsys.readouterr().err


@pytest.mark.parametrize("bench", ["trace_overhead"], indirect=True)
def test_trace_overhead(bench, capsys, tmp_path):
    path = tmp_path / "overhead.json"
    argv = ["--smoke", "--rounds", "1", "--model", "gpt"]
    assert bench.main([*argv, "--limit", "100", "--json", str(path)]) == 0
    runs = json.loads(path.read_text())["runs"]
    assert [run["form"] for run in runs] == ["nn.remat", "class", "at"] * 2
    assert [run["policy"] for run in runs] == ["nothing"] * 3 + ["dots"] * 3
    assert runs[0]["ratios"] == [1.0]
    assert all(run["trace_seconds"][0] > 0 for run in runs)
    assert bench.main([*argv, "--limit", "0.001"]) == 1
    assert "times as long as with nn.remat" in capsys.readouterr().err
    assert bench.main([*argv, "--policy", "dots", "--profile", "at"]) == 0
    assert "cumtime" in capsys.readouterr().out


@pytest.mark.parametrize("bench", ["trace_overhead"], indirect=True)
def test_trace_overhead_compares_equal_programs(bench):
    import jax
    import jax.numpy as jnp
    import numpy as np

    case = bench.SMOKE["gpt"]
    gradients = []
    for form in bench.FORMS:
        fn, shapes = case.loss(form, "dots")
        args = jax.tree.map(lambda s: jnp.full(s.shape, 0.01, s.dtype), shapes)
        gradients.append(jax.jit(jax.grad(fn))(*args))
        assert "remat" in str(jax.make_jaxpr(jax.grad(fn))(*args))
    for other in gradients[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
            gradients[0],
            other,
        )


@pytest.mark.parametrize("bench", ["readme_table"], indirect=True)
def test_readme_table(bench, capsys, tmp_path):
    path = tmp_path / "table.json"
    assert bench.main(["--smoke", "--target", "cpu", "--json", str(path)]) == 0
    table = capsys.readouterr().out
    assert path.with_suffix(".md").read_text() == table
    report = json.loads(path.read_text())
    assert bench.rendered(report) + "\n" == table
    assert [row["policy"] for row in report["rows"]] == list(bench.POLICIES) * 2
    assert set(report["versions"]) >= {"python", "jax", "jaxlib"}
    assert doctest.testmod(bench).failed == 0
    assert bench.main(["--smoke", "--target", "nowhere"]) == 2


@pytest.mark.parametrize("bench", ["readme_table"], indirect=True)
def test_readme_table_says_what_does_not_fit(bench):
    memory = {"target": "tpu-v5e", "fits": False, "needs_bytes": 3 * 2**30, "temp_bytes": None}
    assert bench._cell(memory) == "does not fit: needs 3 GiB"
    memory = {"target": "h100", "fits": False, "needs_bytes": 3 * 2**30, "temp_bytes": 2**31}
    assert bench._cell(memory) == "2,048 (does not fit)"
    assert bench._cell(memory | {"target": "cpu"}) == "2,048"
    with pytest.raises(ValueError, match="must hold"):
        bench.with_results("no markers", "table")
