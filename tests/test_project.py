"""The project as a whole: the public names, the order of modules, the benchmarks."""

import ast
import collections
import doctest
import importlib.util
import inspect
import json
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import remat_kit

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "remat_kit"
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())

MODULES = sorted(PACKAGE.rglob("*.py"))


def layers():
    """The order of modules and subpackages: each imports only from those before it."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = re.search(r"^_errors .*?(?=^```)", text, re.M | re.S).group(0)
    root, *packages = block.splitlines()
    return root.split(), {line.split()[0]: line.split()[1:] for line in packages}


ROOT_MODULES, PACKAGES = layers()
ORDER = (*ROOT_MODULES, *PACKAGES)


def layer_of(module):
    """The subpackage of a module of remat_kit, or the module itself where it is in none."""
    return module.split(".")[1]


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


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


# -- the public names -------------------------------------------------------------------------

STUB = ast.parse((PACKAGE / "__init__.pyi").read_text())
EXPORTED = {
    alias.asname for node in STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names
}
PUBLIC = {name: getattr(remat_kit, name) for name in sorted(EXPORTED - {"testing"})}


def test_only_what_is_exported_shows():
    assert set(dir(remat_kit)) == EXPORTED
    assert not [
        name
        for name in vars(remat_kit)
        if name.isidentifier() and not (name.startswith("_") or name in EXPORTED)
    ]
    assert not [name for name, value in PUBLIC.items() if inspect.ismodule(value)]


def test_the_public_names_of_testing_show():
    stub = ast.parse((PACKAGE / "testing" / "__init__.pyi").read_text())
    exported = {alias.asname for node in stub.body for alias in node.names}
    assert set(dir(remat_kit.testing)) == exported
    for name in exported:
        assert inspect.getdoc(getattr(remat_kit.testing, name))


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_are_documented(name):
    value = PUBLIC[name]
    text = inspect.getdoc(value) or ""
    assert text, f"{name} has no docstring"
    assert text.splitlines()[0].endswith((".", ":")), text.splitlines()[0]
    elsewhere = "returns it and has an example" in " ".join(text.split())
    assert doctest.DocTestParser().get_examples(text) or elsewhere, f"{name} has no example"
    if inspect.isfunction(value):
        assert "Args:" in text or len(inspect.signature(value).parameters) <= 2


# What a docstring names as the source of a term, a behavior or an interface.
SOURCE = re.compile(
    r"\bjax\.|\bJAX|[Ff]lax|`nnx?\.|XLA|optax|PyTorch|torch|Megatron|MaxText|AXLearn|MindSpore"
    r"|Paddle|Keras|Python's|pytest|NumPy|Ruff|\b(19|20)\d\d\b"
)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_have_a_source(name):
    """A paper or another interface; errors and warnings are our own."""
    value = PUBLIC[name]
    is_error = inspect.isclass(value) and issubclass(value, (Exception, Warning))
    parts = doctest.DocTestParser().parse(inspect.getdoc(value) or "")
    text = "".join(part for part in parts if isinstance(part, str))  # without the examples
    assert is_error or SOURCE.search(text), name


def test_every_public_function_says_what_it_raises_or_cannot():
    for name, value in PUBLIC.items():
        if inspect.isfunction(value) and "raise " in inspect.getsource(value):
            assert "Raises:" in inspect.getdoc(value), name


# -- the modules ------------------------------------------------------------------------------


def imported(node):
    """The modules that an import statement may import; none for other statements."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: a relative import"
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def imports(path):
    """Yield (line, module) of every import of a file, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        yield from ((node.lineno, module) for module in imported(node))


def test_contributing_lists_every_module():
    root = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert root == set(ROOT_MODULES)
    for folder in PACKAGES:
        found = {p.stem for p in (PACKAGE / folder).glob("*.py")} - {"__init__"}
        found |= {p.parent.name for p in (PACKAGE / folder).glob("*/__init__.py")}
        assert found == set(PACKAGES[folder]), folder
    assert {p.parent.name for p in PACKAGE.glob("*/__init__.py")} == set(PACKAGES)


def test_no_folder_has_many_modules():
    folders = collections.Counter(path.parent for path in MODULES if path.stem != "__init__")
    assert not [str(folder) for folder, count in folders.items() if count > 13]


# Modules without a test file of their own: facts are tested by the programs in `tests/probes`.
UNTESTED = {"_backend/facts"}


def test_every_module_has_a_test_file():
    """`tests/planner/test_plan.py` tests `remat_kit/_planner/plan.py`, and so on."""
    inner = [path for path in MODULES if path.parent != PACKAGE and path.stem != "__init__"]
    names = {str(path.relative_to(PACKAGE).with_suffix("")) for path in inner}
    wanted = {
        name: ROOT / "tests" / re.sub(r"([^/]+)$", r"test_\1.py", name[name[0] == "_" :])
        for name in names - UNTESTED
    }
    assert not [name for name, path in wanted.items() if not path.exists()]


def test_no_two_classes_have_one_name():
    classes = collections.Counter(
        node.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in classes.items() if count > 1]


# One walk over nested schedules, whose inner function shares the counts.
LONG = {"remat_kit._planner.plan._by_module"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_functions_have_at_most_sixty_lines(path):
    """Without their docstrings. The linter counts their branches."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert lines <= 60 or f"{name_of(path)}.{node.name}" in LONG, (node.name, lines)


def test_the_map_is_drawn_from_the_imports():
    spec = importlib.util.spec_from_file_location("module_map", ROOT / "docs" / "module_map.py")
    module_map = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module_map)
    wanted = module_map.BEGIN + module_map.rendered() + module_map.END
    assert wanted in (ROOT / "CONTRIBUTING.md").read_text(), "python docs/module_map.py --write"


INNER = [path for path in MODULES if path.stem != "__main__" and path.parent != PACKAGE]
INNER += [PACKAGE / f"{name}.py" for name in ROOT_MODULES]


@pytest.mark.parametrize("path", INNER, ids=name_of)
def test_imports_go_upwards(path):
    layer = layer_of(name_of(path))
    allowed = {*ORDER[: ORDER.index(layer)], *({layer} if layer in PACKAGES else ())}
    for line, module in imports(path):
        if module.startswith("remat_kit."):
            inner = layer_of(module)
            assert inner in allowed, f"{path.name}:{line} imports {inner}, which is not above it"


def test_modules_do_not_import_each_other():
    """Imports at the top of modules have no circle, whichever module is imported first."""
    names = {name_of(path): path for path in MODULES}
    uses = {
        name: {m for n in ast.parse(path.read_text()).body for m in imported(n)} & set(names)
        for name, path in names.items()
    }
    done: set[str] = set()
    while ready := {n for n in uses if n not in done and uses[n] <= done | {n}}:
        done |= ready
    assert not set(uses) - done


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_private_jax_is_in_one_module(path):
    if path.stem == "_jax":
        return
    text = path.read_text()
    assert not re.search(r"\bjax\._src\b|\bjaxlib\.", text)
    for line, module in imports(path):
        private = any(part.startswith("_") for part in module.split(".")[1:])
        assert not (module.startswith(("jax.", "jaxlib.", "flax.")) and private), (line, module)


def loaded_by(code):
    """The modules that are loaded once ``code`` has run in a process of its own."""
    code = f"{code}; import sys; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return set(done.stdout.split())


# Imports every module of remat_kit after the modules that these import from others, and prints what
# is then different in the tables of JAX's rules, in its settings and in its registered classes.
CHANGES = """
import importlib, pkgutil, sys
import remat_kit
names = [m.name for m in pkgutil.walk_packages(remat_kit.__path__, "remat_kit.")]
names = [name for name in names if not name.endswith("__main__")]
others = sys.argv[1:]
for name in others:
    importlib.import_module(name)
if others:
    import jax
    from jax._src import dispatch
    from jax._src.interpreters import ad, batching, mlir, partial_eval
    tables = {f"{m.__name__}.{k}": v for m in (ad, batching, mlir, partial_eval, dispatch)
              for k, v in vars(m).items() if isinstance(v, dict) and not k.startswith("__")}
    tables |= {f"lowering on {k}": v for k, v in mlir._platform_specific_lowerings.items()}
    tables["settings"] = jax.config.values
    before = {name: dict(table) for name, table in tables.items()}
    assert any(p.name == "dot_general" for p in before["jax._src.interpreters.ad.primitive_jvps"])
for name in names:
    importlib.import_module(name)
if not others:
    print(*[m for m in sys.modules if m.split(".")[0] in ("jax", "flax", "numpy", "mcp")])
else:
    for name, table in tables.items():
        for key in {**before[name], **table}:
            ours = str(getattr(key, "name", key)).startswith("remat_kit_")
            if not ours and before[name].get(key) is not table.get(key):
                print(name, key, sep=": ", end="; ")
"""


def test_the_import_changes_nothing_in_jax():
    def run(*modules):
        words = [sys.executable, "-c", CHANGES, *modules]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert not done.returncode, done.stderr
        return done.stdout

    modules = run().split()
    assert "jax._src.lax.lax" in modules
    assert run(*modules) == ""


def test_heavy_imports_are_late():
    assert not {"jax", "numpy", "rich"} & loaded_by("import remat_kit, remat_kit.testing.plugin")
    heavy = {"flax", "matplotlib", "sklearn", "optax", "libtpu", "hypothesis", "pytest"}
    loaded = loaded_by("import remat_kit; remat_kit.plan")
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


# -- benchmarks -------------------------------------------------------------------------------


@pytest.fixture
def bench(request):
    return importlib.import_module(request.param)


@pytest.mark.slow  # a time on the clock
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


@pytest.mark.parametrize(
    ("model", "forms"),
    [
        pytest.param("gpt", ["nn.remat", "class", "at"], marks=pytest.mark.slow),
        ("function", ["jax.checkpoint", "function"]),
        ("blocks", ["jax.checkpoint", "at"]),
        pytest.param("step", ["plain step", "planned step"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("bench", ["trace_overhead"], indirect=True)
def test_trace_overhead(bench, model, forms, capsys, tmp_path):
    path = tmp_path / "overhead.json"
    argv = ["--smoke", "--rounds", "1", "--policy", "dots", "--model", model]
    assert bench.main([*argv, "--limit", "100", "--json", str(path)]) == 0
    runs = json.loads(path.read_text())["runs"]
    assert [run["form"] for run in runs] == forms
    assert runs[0]["ratios"] == [1.0]
    policy = "plan" if model == "step" else "dots"
    assert all(run["policy"] == policy and run["trace_seconds"][0] > 0 for run in runs)


@pytest.mark.parametrize("bench", ["trace_overhead"], indirect=True)
def test_trace_overhead_can_fail_and_show_where_the_time_goes(bench, capsys):
    argv = ["--smoke", "--rounds", "1", "--policy", "dots"]
    assert bench.main([*argv, "--model", "function", "--limit", "0.001"]) == 1
    assert "times as long as with jax.checkpoint" in capsys.readouterr().err
    assert bench.main([*argv, "--model", "blocks", "--profile", "at"]) == 0
    assert "cumtime" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", [pytest.param("gpt", marks=pytest.mark.slow), "function", "blocks"]
)
@pytest.mark.parametrize("bench", ["trace_overhead"], indirect=True)
def test_trace_overhead_compares_equal_programs(bench, name):
    import jax
    import jax.numpy as jnp
    import numpy as np

    case = bench.SMOKE[name]
    gradients = []
    for form in case.forms:
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


@pytest.mark.slow
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
