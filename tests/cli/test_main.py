"""The command line: what it prints where, what it makes of mistakes, and how it ends."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from remat_kit._policy import recipe as _recipe

ROOT = pathlib.Path(__file__).parents[2]
MLP = "models/mlp.py:build"
SMALL = ["--size", "batch=8", "features=16", "hidden=32"]
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
        (["measure", MLP, "--size", "policy=dots"], "the policy is not a size", "--policy dots"),
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
        (["mesure", MLP], "no command is named 'mesure'", "'measure'"),
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
    "None": ("def build():\n    pass\n", "the builder returned None", ""),
    "one thing": ("def build():\n    return 1, 2, 3\n", "the builder returned a tuple of 3", ""),
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
