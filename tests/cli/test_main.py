"""The command line: what it prints where, what it makes of mistakes, and how it ends."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from remat_kit._chip.target import targets
from remat_kit._cli import commands as _commands
from remat_kit._cli import main as _main
from remat_kit._errors import UserError
from remat_kit._policy import recipe as _recipe
from remat_kit._program.builder import parse_sizes, user_line

ROOT = pathlib.Path(__file__).parents[2]
MLP = "models/mlp.py:build"
SMALL = ["--size", "batch=8", "features=16", "hidden=32"]


@pytest.fixture(autouse=True)
def in_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("REMAT_KIT_DEBUG", raising=False)


@pytest.fixture
def run(capsys):
    """Run the command line here: (status, stdout, stderr)."""

    def run(*argv):
        status = _main.main([str(word) for word in argv])
        out, err = capsys.readouterr()
        return status, out, err

    return run


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


HEAD = """
    import jax, jax.numpy as jnp
    W = jax.ShapeDtypeStruct((4, 4), jnp.float32)
"""


def process(*argv, **kwargs):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | kwargs.pop("env", {})
    return subprocess.run(
        [sys.executable, "-m", "remat_kit", *argv],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        **kwargs,
    )


# -- measure ----------------------------------------------------------------------------------


def test_measure_has_the_baseline_first(run):
    status, out, err = run("measure", MLP, *SMALL, "--policy", "dots", "nothing")
    assert status == 0
    lines = [line.split()[:2] for line in out.splitlines()[3:]]
    rows, footer = lines[:3], lines[3:]
    assert rows == [["none", "cpu"], ["dots", "cpu"], ["nothing", "cpu"]]
    assert all(word in ("note:", "lint:") for word, _ in footer)
    assert err.splitlines() == [
        "1/3 none, compiling for cpu",
        "2/3 dots, compiling for cpu",
        "3/3 nothing, compiling for cpu",
    ]


def test_measure_writes_what_it_shows(run, tmp_path):
    path = tmp_path / "out.json"
    argv = ["measure", MLP, *SMALL, "--policy", "none", "--policy", "dots", "--target", "cpu"]
    status, out, _ = run(*argv, "--json", path)
    assert status == 0
    found = json.loads(path.read_text())
    assert found["model"] == MLP
    assert found["size"] == {"batch": 8, "features": 16, "hidden": 32}
    assert [p["policy"] for p in found["policies"]] == ["none", "dots"]
    memory = found["policies"][1]["memory"]["cpu"]
    assert memory["fits"] is True
    assert memory["peak_bytes"] == (
        memory["argument_bytes"]
        + memory["output_bytes"]
        - memory["alias_bytes"]
        + memory["temp_bytes"]
    )
    # Three weights, three biases and the batch, in four bytes each.
    parameters = 16 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10
    assert memory["argument_bytes"] == 4 * (parameters + 8 * 16 + 8)
    status, out, _ = run(*argv, "--json", "-")
    assert status == 0
    again = json.loads(out)
    assert again["policies"][1]["memory"]["cpu"]["temp_bytes"] == memory["temp_bytes"]
    assert again["policies"][1]["memory"]["cpu"]["cached"] is True


def test_local_runs_the_program(run):
    status, out, _ = run("measure", MLP, *SMALL, "--target", "local", "--json", "-")
    assert status == 0
    assert json.loads(out)["policies"][0]["memory"]["local"]["step_seconds"] > 0


def test_a_target_that_is_too_small(run):
    status, out, _ = run("measure", MLP, *SMALL, "--target", "cpu@1KiB", "--json", "-")
    assert status == 0
    memory = json.loads(out)["policies"][0]["memory"]["cpu@1KiB"]
    assert memory["fits"] is False
    assert memory["headroom_bytes"] < 0


# -- inspect and diff -------------------------------------------------------------------------


KEYS = {"saved_bytes", "saved", "recomputed", "recomputed_flops", "forward_flops", "memory"}


def test_inspect_compares_side_by_side(run, tmp_path):
    path = tmp_path / "out.json"
    status, out, err = run(
        *("inspect", MLP, *SMALL, "--policy", "nothing", "--policy", "dots"),
        *("--target", "cpu", "--json", path),
    )
    assert status == 0, err
    assert all(name in out for name in ("none", "nothing", "dots"))
    assert "2/3 nothing, compiling for cpu" in err
    reports = json.loads(path.read_text())["policies"]
    assert [report["policy"] for report in reports] == ["none", "nothing", "dots"]
    for report in reports:
        assert set(report) >= KEYS | {"hlo_recomputed_ops"}
        assert report["memory"]["cpu"]["temp_bytes"] > 0
        assert report["saved_bytes"] > 0
    assert reports[0]["recomputed"] == []
    assert reports[1]["recomputed"] != []


def test_a_policy_goes_through_the_builder_or_to_module_paths(run):
    def saved_bytes(*more):
        status, out, err = run("inspect", MLP, *SMALL, "--policy", "nothing", "--json", "-", *more)
        assert status == 0, err
        return [report["saved_bytes"] for report in json.loads(out)["policies"]]

    through, at = saved_bytes(), saved_bytes("--at", "*/block_*")
    assert through == at
    first = saved_bytes("--at", "*/block_0")
    assert first[0] == through[0] > first[1] > through[1]


def test_inspect_without_a_target_compiles_nothing(run, monkeypatch):
    from remat_kit._chip import compile as _compile

    def refuse(*args, **kwargs):
        raise AssertionError("compiled")

    monkeypatch.setattr(_compile, "compile_program", refuse)
    status, out, err = run("inspect", MLP, *SMALL)
    assert status == 0, err
    assert "MLP/block_*" in out


def test_diff_shows_one_repeated_relu_for_each_hidden_layer(run):
    argv = ["diff", MLP, *SMALL, "--size", "layers=3", "--policy", 'recompute(primitive("max"))']
    status, out, err = run(*argv)
    assert status == 0, err
    assert "3 operations computed twice" in out
    status, out, err = run(*argv, "--json", "-")
    assert status == 0, err
    (diff,) = json.loads(out)["diffs"]
    assert diff["policy"] == diff["after"] == 'recompute(primitive("max"))'
    again = [(d["primitive"], d["module"]) for d in diff["duplicates"]]
    assert sorted(again) == [("max", f"MLP/block_{i}") for i in range(3)]
    for duplicate in diff["duplicates"]:
        (fed,) = duplicate["feeds"]
        assert "dot_general" in fed
        assert f"gradient of {duplicate['module']}/dense" in fed


def test_full_diff_is_longer(run):
    argv = ["diff", MLP, *SMALL, "--policy", "nothing"]
    short, full = run(*argv)[1], run(*argv, "--full")[1]
    assert len(full.splitlines()) > len(short.splitlines())


def test_diff_needs_a_policy(refused):
    message, hint = refused("diff", MLP)
    assert "nothing to compare" in message
    assert "--policy" in hint


# -- policies and targets ---------------------------------------------------------------------


def test_policies_lists_every_preset(run):
    status, out, err = run("policies")
    assert (status, err) == (0, "")
    assert all(recipe.usage in out for recipe in _recipe.recipes())
    status, out, _ = run("policies", "--json", "-")
    listed = json.loads(out)["policies"]
    assert [p["name"] for p in listed] == [r.name for r in _recipe.recipes()]


def test_policies_shows_one_by_name_alias_parameter_or_text(run):
    assert "save(dots)" in run("policies", "dots")[1]
    assert "maxtext_minimal" in run("policies", "minimal")[1]
    assert "uniform(2)" in run("policies", "uniform:2")[1]
    assert "save(dots & ~named('x'))" in run("policies", "save(dots - named('x'))")[1]
    status, out, _ = run("policies", "uniform:2", "--json", "-")
    assert (status, json.loads(out)["policy"]) == (0, "uniform(2)")


def test_targets_lists_every_chip(run):
    status, out, err = run("targets")
    assert (status, err) == (0, "")
    listed = {line.split()[0]: line for line in out.splitlines()[3:]}
    assert set(listed) == {chip.name for chip in targets()}
    for chip in targets():
        assert ("missing: pip install" in listed[chip.name]) is not chip.available
    by_name = {t["name"]: t for t in json.loads(run("targets", "--json", "-")[1])["targets"]}
    assert by_name["tpu-v5e"]["memory_bytes"] == 15.75 * 2**30


# -- wrong calls ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (["measure", MLP, "--policy", "dot"], "no preset is named 'dot'", "'dots'"),
        (["measure", MLP, "--policy", "save(named('a'"], "not the text of a policy", "repr"),
        (["measure", MLP, "--target", "h10"], "no target is named 'h10'", "'h100'"),
        (["measure", MLP, "--target", "tpu-v5e@1PiB"], "less than 1PiB", "smaller"),
        (["measure", MLP, "--size", "bach=3"], "no size is named 'bach'", "'batch'"),
        (["measure", MLP, "--size", "batch"], "not of the form name=value", "batch=64"),
        (["measure", MLP, "--size", "batch=1", "batch=2"], "given twice", "once"),
        (["measure", MLP, "--size", "policy=dots"], "the policy is no size", "--policy dots"),
        (["measure", MLP, "--size", "batch=0"], "ValueError: batch=0", "--debug"),
        (["measure", MLP, "--policy", "dots", "--at", "*/blok_*"], "'*/blok_*'", "'*/block_"),
        (["measure", MLP, "--policy", "save(named('x'))"], "no checkpoint name", "no checkpoint"),
        (["measure", "models/mpl.py:build"], "there is no file models/mpl.py", "models/mlp.py"),
        (["measure", "models"], "models is a folder", "mlp.py"),
        (["measure", "modles/mlp.py"], "there is no file", "there is no folder modles"),
        (["measure", "models/mlp.py:biuld"], "no builder is named 'biuld'", "'build'"),
        (["measure", "models/mlp.py:BLOCKS"], "BLOCKS is a value of type str", "loss_fn"),
        (["measure", "no_such_package.train:build"], "there is no module no_such_package", "file"),
        (["measure", ":build"], "named by a file or module", "models/gpt.py:build"),
        (["measure", "models/mlp.py:"], "named by a file or module", "models/gpt.py:build"),
        (["measure", ".mlp:build"], "not the name of a module", "my_package"),
        (["measure", "README.md:build"], "not a Python file", ".py"),
        (["measure", "--policy", "dots", MLP], "required: FILE_OR_MODULE", "comes first"),
        (["measure"], "required: FILE_OR_MODULE", "comes first"),
        (["mesure", MLP], "invalid choice: 'mesure'", "--help"),
        (["policies", "dot"], "no preset is named 'dot'", "'dots'"),
        (["policies", "uniform:x"], "not of the type 'int'", "uniform:2"),
        ([], "required: COMMAND", "--help"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_a_wrong_call_says_what_to_do(refused, argv, message, hint):
    found, advice = refused(*argv)
    assert message in found
    assert hint in advice


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/no/such/folder/out.json", "No such file or directory"),
        (".", "Is a directory"),
        ("models/mlp.py/out.json", "Not a directory"),
    ],
)
def test_json_is_checked_before_the_work(refused, monkeypatch, path, reason):
    monkeypatch.setattr(_commands, "loaded", None)  # would fail otherwise
    message, hint = refused("measure", MLP, "--json", path)
    assert message == f"`--json {path}`: it cannot be written: {reason}"
    assert "folder" in hint


def test_checking_leaves_no_file_and_harms_none(refused, tmp_path):
    fresh, kept = tmp_path / "fresh.json", tmp_path / "kept.json"
    kept.write_text("kept")
    refused("measure", "models/none.py", "--json", fresh)
    refused("measure", "models/none.py", "--json", kept)
    assert not fresh.exists()
    assert kept.read_text() == "kept"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_no_traceback(run):
    status, _, err = run("policies", "dots", "--json", "/dev/full")
    assert status == 2
    assert "No space left" in err
    assert "Traceback" not in err


def test_a_missing_compiler_names_the_extra(refused, monkeypatch):
    from remat_kit._chip import target as _target

    real = _target.importlib.util.find_spec
    monkeypatch.setattr(
        _target.importlib.util, "find_spec", lambda n, *a: None if n == "libtpu" else real(n, *a)
    )
    message, hint = refused("measure", MLP, "--target", "tpu-v5e")
    assert message == "`--target tpu-v5e`: the compiler for tpu is not installed"
    assert hint == "pip install 'remat-kit[tpu]'"


# -- models that cannot be worked on ----------------------------------------------------------

BROKEN = {
    "a loss that raises": (
        HEAD
        + """
    def build():
        def loss(w):
            raise RuntimeError("no luck")
        return loss, (W,)
    """,
        "RuntimeError: no luck (",
        "model.py:7)",
    ),
    "a loss that misuses jax": (
        HEAD
        + """
    def build():
        return (lambda w: jnp.sum(
            w @ jnp.ones((3, 3)))), (W,)
    """,
        "TypeError: dot_general",
        "model.py:7)",
    ),
    "a builder that raises": ("def build():\n    return 1 / 0\n", "ZeroDivisionError", "py:2)"),
    "a file that raises": ("import json\njson.loads('')\n", "JSONDecodeError", "py:2)"),
    "a file that does not parse": ("def build(:\n", "SyntaxError", "py:1)"),
    "a missing import": ("import no_such_thing\n", "ModuleNotFoundError: No module", "py:1)"),
    "a relative import": ("from . import other\n", "ImportError", "py:1)"),
    "a script": ("import sys\nsys.exit(3)\n", "it ended the program (exit status 3)", ""),
    "None": ("def build():\n    pass\n", "it returned None", ""),
    "one thing": ("def build():\n    return 1, 2, 3\n", "it returned a tuple of 3", ""),
    "arguments in no tuple": (
        HEAD + "\n    def build():\n        return (lambda w: w.sum()), W\n",
        "not a tuple",
        "",
    ),
    "too many arguments": (
        HEAD + "\n    def build():\n        return (lambda w: w.sum()), (W, W)\n",
        "cannot be called with the 2 arguments",
        "",
    ),
    "a vector": (
        HEAD + "\n    def build():\n        return (lambda w: w.sum(0)), (W,)\n",
        "float32[4]; a loss is one scalar",
        "",
    ),
    "integers": (
        HEAD
        + """
    def build():
        return (lambda w: w.sum() * 1.0), (jax.ShapeDtypeStruct((4,), jnp.int32),)
    """,
        "int32[4]; only floating-point values have a gradient",
        "",
    ),
    "no gradient": (
        HEAD
        + """
    def build():
        def loss(w):
            return jax.lax.while_loop(lambda x: x < 9, lambda x: x * 2, w.sum())
        return loss, (W,)
    """,
        "Reverse-mode differentiation does not work",
        "",
    ),
    "a string": (
        "def build():\n    return (lambda w: w), ('x',)\n",
        "not an array",
        "",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("command", ["measure", "inspect"])
def test_a_broken_model_is_explained(refused, model, command, name):
    text, message, where = BROKEN[name]
    found, hint = refused(command, model(text))
    assert message in found
    assert where in found
    assert hint


def test_a_builder_without_a_policy_wants_at(run, refused, model):
    path = model(
        HEAD
        + """
    def build(n=2):
        def loss(w):
            for i in range(n):
                with jax.named_scope(f"block_{i}"):
                    w = jnp.tanh(w @ w)
            return w.sum()
        return loss, (W,)
    """
    )
    message, hint = refused("measure", path, "--policy", "dots")
    assert "the builder takes no policy" in message
    assert "--at" in hint
    assert "`policy`" in hint
    assert run("measure", path, "--policy", "none")[0] == 0
    status, _, err = run("measure", path, "--policy", "dots", "--at", "block_*")
    assert status == 0, err


def test_a_builder_that_needs_a_size(refused, run, model):
    path = model(HEAD + "\n    def build(*, n):\n        return (lambda w: w.sum() * n), (W,)\n")
    message, hint = refused("measure", path)
    assert "missing a required" in message
    assert "--size" in hint
    assert run("measure", path, "--size", "n=1e-3")[0] == 0


def test_an_unknown_name_inside_the_builder_is_the_users(refused, model):
    path = model(
        HEAD
        + """
    import remat_kit
    def build():
        return remat_kit.policy("dost")(lambda w: w.sum()), (W,)
    """
    )
    message, hint = refused("measure", path)
    assert "'dost'" in message
    assert "'dots'" in hint


def test_what_the_model_prints_is_no_data(run, model):
    path = model(
        HEAD
        + """
    print("loading")
    def build():
        print("building")
        def loss(w):
            print("tracing")
            return w.sum()
        return loss, (W,)
    """
    )
    status, out, err = run("measure", path, "--json", "-")
    assert status == 0
    json.loads(out)
    assert all(word in err for word in ("loading", "building", "tracing"))


def test_a_file_finds_its_neighbours_even_late(run, model):
    model("from dataclasses import dataclass\n@dataclass\nclass C:\n    n: int = 4\n", "beside.py")
    model("VALUE = 2.0\n", "later.py")
    path = model(
        HEAD
        + """
    import beside
    def build():
        import later
        return (lambda w: w.sum() * later.VALUE * beside.C().n), (W,)
    """
    )
    before = list(sys.path)
    status, _, err = run("measure", path)
    assert status == 0, err
    assert sys.path == before


def test_a_module_is_addressed_by_name(tmp_path, monkeypatch, run, refused):
    package = tmp_path / "a_package_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sizes.py").write_text("N = 4\n")
    (package / "train.py").write_text(
        "import jax, jax.numpy as jnp\nfrom .sizes import N\n"
        "def build(bad=False):\n"
        "    if bad:\n        raise KeyError('bad')\n"
        "    return (lambda w: jnp.sum(w)), (jnp.ones((N, N)),)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert run("measure", "a_package_of_mine.train:build")[0] == 0
    assert run("measure", "a_package_of_mine.train")[0] == 0
    message, _ = refused("measure", "a_package_of_mine.train", "--size", "bad=true")
    assert "KeyError: 'bad' (a_package_of_mine/train.py:5)" in message
    message, _ = refused("measure", "a_package_of_mine.tran:build")
    assert "there is no module a_package_of_mine.tran" in message


# -- our own faults, and how it ends ----------------------------------------------------------


def broken_inside(monkeypatch):
    from remat_kit._chip import compile as _compile

    def fail(*args, **kwargs):
        raise IndexError("a bug")

    monkeypatch.setattr(_compile, "compile_program", fail)


def test_our_own_fault_is_told_apart(run, monkeypatch):
    broken_inside(monkeypatch)
    status, out, err = run("measure", MLP, *SMALL)
    assert (status, out) == (1, "")
    assert "internal error: IndexError: a bug\nhint: this is a fault of remat_kit" in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(run, monkeypatch):
    broken_inside(monkeypatch)
    status, _, err = run("measure", MLP, *SMALL, "--debug")
    assert status == 1
    assert "in fail" in err
    monkeypatch.setenv("REMAT_KIT_DEBUG", "1")
    status, _, err = run("policies", "dot")
    assert status == 2
    assert "Traceback" in err


def test_interrupted(run, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(_recipe, "recipes", interrupt)
    assert run("policies") == (130, "", "interrupted\n")


def test_interrupted_by_a_signal_while_it_traces(model):
    path = model(
        HEAD
        + """
    import time
    def build():
        print("building", flush=True)
        time.sleep(60)
    """
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "remat_kit", "measure", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        # A shell's background job ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert child.stderr.readline() == "building\n"
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
        child.communicate()
    assert (child.returncode, out) == (130, "")
    assert err == "interrupted\n"


def test_a_closed_pipe_is_silent():
    command = f"{sys.executable} -m remat_kit policies --json - | head -n 1"
    done = subprocess.run(
        ["bash", "-c", command + "; echo ${PIPESTATUS[0]}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stderr == ""
    first, status = done.stdout.splitlines()
    assert first == "{"
    assert int(status) in (0, 141)


def test_version_and_help(run):
    status, out, _ = run("--version")
    assert status == 0
    assert out.startswith("remat-kit")
    models = ("inspect", "diff", "measure", "plan", "frontier", "max-batch", "fit")
    for command in (*models, "bench", "policies", "targets"):
        status, out, _ = run(command, "--help")
        assert status == 0
        assert "--json" in out


def test_as_a_module_plain_when_piped():
    done = process("policies", env={"NO_COLOR": "1"})
    assert done.returncode == 0
    assert done.stderr == ""
    assert "\x1b[" not in done.stdout
    assert "megatron_selective" in done.stdout


@pytest.mark.parametrize("no_color", [False, True])
def test_colour_in_a_terminal(no_color):
    import pty

    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    environment |= {"NO_COLOR": "1"} if no_color else {}
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "remat_kit", "policies"],
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env=environment,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the other side has closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(ours)
    assert child.wait() == 0
    assert b"dots" in shown
    colours = [code for code in shown.split(b"\x1b[")[1:] if code[:2].startswith((b"3", b"9"))]
    assert not (no_color and colours)


def test_inspect_writes_a_page_a_picture_and_a_trace(run, tmp_path):
    pytest.importorskip("matplotlib")
    page, picture, trace = (tmp_path / f"out.{kind}" for kind in ("html", "png", "json"))
    files = ("--html", page, "--png", picture, "--perfetto", trace)
    status, out, err = run("inspect", MLP, *SMALL, "--policy", "dots", "--target", "cpu", *files)
    assert status == 0, err
    assert out.startswith("policies\n")
    assert f"<title>{MLP} · remat_kit</title>" in page.read_text(encoding="utf-8")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {e["pid"] for e in json.loads(trace.read_text())["traceEvents"]} == {1, 2}


def test_each_target_has_a_trace_of_its_own(run, tmp_path):
    targets = ("--target", "cpu", "cpu@4GiB")
    status, _, err = run("inspect", MLP, *SMALL, *targets, "--perfetto", tmp_path / "out.json")
    assert status == 0, err
    assert {p.name for p in tmp_path.iterdir()} == {"out-cpu.json", "out-cpu@4GiB.json"}


def test_a_page_needs_no_target(run, tmp_path):
    status, _, err = run("inspect", MLP, *SMALL, "--html", tmp_path / "out.html")
    assert status == 0, err
    assert (tmp_path / "out.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--png", "out.png"], "`--png out.png`: without a target nothing is compiled"),
        (["--perfetto", "o.json"], "`--perfetto o.json`: without a target nothing is compiled"),
        (
            ["--target", "cpu", "--png", "out.bmp"],
            "`--png out.bmp`: .bmp is not a known picture format",
        ),
        (["--html", "/no/folder/x.html"], "`--html /no/folder/x.html`: it cannot be written: No"),
        (["--html", "."], "`--html .`: it cannot be written: Is a directory"),
    ],
)
def test_files_are_checked_before_the_work(refused, monkeypatch, words, wanted):
    monkeypatch.setattr(_commands, "loaded", None)  # would fail otherwise
    message, hint = refused("inspect", MLP, *words)
    assert message.startswith(wanted)
    assert hint


# -- parts ------------------------------------------------------------------------------------


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
