"""Hostile input and broken surroundings: a test for each line of the table in `docs/errors.md`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings

import pytest
from watchdog import watched

import remat_kit
from remat_kit._chip import cache as _cache
from remat_kit._chip import compile as _compile
from remat_kit._chip import target as _target
from remat_kit._chip import worker as _worker
from remat_kit._cli import commands as _commands
from remat_kit._cli import main as _main
from remat_kit._errors import PolicyError, RematKitError
from remat_kit._policy import recipe as _recipe

ROOT = pathlib.Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
ROWS: dict[str, object] = {}
GOOD = """
import jax, jax.numpy as jnp
W = jax.ShapeDtypeStruct((4, 4), jnp.float32)
def build(policy=None):
    import remat_kit
    loss = lambda w: jnp.sum(jnp.sin(jnp.tanh(w @ w)))
    return (remat_kit.policy(policy)(loss) if policy else loss), (W,)
"""


def row(*texts):
    """Say which lines of the table a test is for."""

    def register(test):
        for text in texts:
            assert text not in ROWS
            ROWS[text] = test
        return test

    return register


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command line here: (status, stdout, stderr)."""
    monkeypatch.delenv("REMAT_KIT_DEBUG", raising=False)

    def run(*argv):
        status = _main.main([str(word) for word in argv])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out, err

    return run


@pytest.fixture
def refused(run):
    """Run a command that must be refused, and return its message."""

    def refused(*argv):
        with watched():
            status, out, err = run(*argv)
        assert (status, out) == (2, ""), err
        message, hint = err.strip().split("\n")[-2:]
        assert message.startswith("error: `")
        assert hint.startswith("hint: ")
        assert len(err) < 2000
        return message

    return refused


@pytest.fixture
def file(tmp_path):
    """Write a file and return its path."""

    def file(content, name="model.py"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return file


def process(*argv, path=ROOT, **kwargs):
    return subprocess.Popen(
        [sys.executable, *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [path, ROOT]))},
        # A shell's background job ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **kwargs,
    )


def interrupted(child, line):
    """Press Ctrl-C when a line has come; the process ends by that, not by itself."""
    try:
        while child.stderr.readline() != line + "\n":
            assert child.poll() is None
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
        child.communicate()
    assert (child.returncode, out, err) == (130, "", "interrupted\n")


def gone(pid, seconds=20):
    """Wait until a process has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


# -- recipes, policies and plans ----------------------------------------------------------------

MIB = 2**20


@row("a recipe of more than 1 MiB")
def test_a_long_recipe(refused, file):
    text = "policy = 'save(dots)'\n#" + "x" * MIB
    message = refused("policies", file(text, "long.toml"))
    assert "longer than 1 MiB" in message
    assert "longer than 1 MiB" in refused("policies", "save(dots)" + " " * MIB)


@row("a recipe or policy with more than 100 levels of brackets or dotted keys")
@pytest.mark.parametrize(
    "text",
    [
        "a=" + "[" * 5000,
        "a=" + "{b=" * 5000,
        "a" + ".a" * 50_000 + "=1",
        'a="x"\nb.' * 3 + "c." * 200,
    ],
)
def test_a_deep_recipe(refused, file, text):
    assert "too deeply nested" in refused("policies", file(text, "deep.toml"))
    for policy in ("(" * 5000, "~" * 200 + "(dots)", "save(" * 101 + ")" * 101):
        assert "too deeply nested" in refused("policies", policy)


@row("a recipe or policy with a number of more than 1,000 digits")
@pytest.mark.parametrize(
    "number", ["9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000, "1_" * 600 + "1"]
)
def test_a_long_number(refused, file, number):
    assert "1,000 digits" in refused("policies", file(f"a = {number}", "number.toml"))
    assert "1,000 digits" in refused("policies", f"save(larger_than({number}))")


@row("a recipe or policy with more than 10,000 names")
def test_many_names(refused, file):
    names = "\n".join(f"k{i} = 1" for i in range(9000))
    assert "10,000 names" in refused("policies", file(names, "names.toml"))
    listed = ", ".join(f"'n{i}'" for i in range(10_001))
    assert "10,000 names" in refused("policies", f"save(named({listed}))")


@row("a recipe that is not UTF-8")
def test_a_recipe_that_is_not_utf8(refused, file):
    assert "latin.toml`: this recipe cannot be read: it is not UTF-8" in refused(
        "policies", file("policy = 'é'".encode("latin-1"), "latin.toml")
    )


@row("a recipe that is not TOML")
@pytest.mark.parametrize("text", ["policy", "policy = \0", "d = 0000-00-00", "a = 1\na = 2", '"""'])
def test_a_recipe_that_is_not_toml(refused, file, text):
    message = refused("policies", file(text, "broken.toml"))
    assert "this is not TOML" in message
    assert "at " in message


@row("a recipe that is a pipe or a device")
def test_a_recipe_that_never_ends(refused, tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    for name in ("pipe.toml", "zero.toml"):
        assert "not a regular file" in refused("policies", tmp_path / name)


@row("a policy table that contains itself")
def test_a_table_that_holds_itself():
    inside: list[object] = []
    inside.append(inside)
    twice: object = ["a"]
    for _ in range(60):
        twice = [twice, twice]
    for table in ({"save": inside}, {"save": twice}, {"offload": "a", "to": inside}):
        with pytest.raises(RematKitError) as caught:
            remat_kit.policy(table)
        assert caught.value.hint


@row("a policy built in Python more than 100 operators deep")
def test_a_policy_that_is_built_deep():
    chain = deep = remat_kit.dots
    for i in range(1000):
        chain = chain | remat_kit.named(f"a{i}")
    assert _recipe.parse(repr(remat_kit.save(chain))) == remat_kit.save(chain)
    for _ in range(49):
        deep = (deep | remat_kit.named("a")) & remat_kit.named("b")
    assert _recipe.parse(repr(remat_kit.save(deep))) == remat_kit.save(deep)
    deep = deep | remat_kit.named("a")
    with pytest.raises(PolicyError, match="too deeply nested"):
        deep & remat_kit.named("b")


@row("a plan that does not fit the program")
def test_a_plan_for_another_program(refused, file):
    model = file(GOOD)
    for lines in (["0:9"], ["0:2", "3:4"], ["nonsense"]):
        program = "joined=0 shapes=0 sin=1"
        text = f"policy = '''{remat_kit.planned(program, *lines)!r}'''"
        path = file(text, "plan.toml")
        assert "another program" in refused("measure", model, "--policy", path)
    assert "does not say which program" in refused(
        "measure", model, "--policy", "planned('', '0:1')"
    )


@row("a report for `--against` that is not JSON")
@pytest.mark.parametrize("text", ["", "\0", "[" * 50_000, "[]", "{}"])
def test_a_report_that_is_none(refused, file, text):
    refused("inspect", file(GOOD), "--against", file(text, "before.json"))


# -- models -------------------------------------------------------------------------------------


@row("a model file with NUL bytes")
def test_nul_bytes(refused, file):
    assert "model.py" in refused("measure", file(b"x = 1\0\n"))
    assert "NUL" in refused("measure", "mod\0el.py:build")


@row("a model file that is not UTF-8")
def test_a_model_that_is_not_utf8(refused, file):
    assert "model.py" in refused("measure", file("x = 'é'\n".encode("latin-1")))


@row("a model file with a syntax error")
@pytest.mark.parametrize("text", ["def build(:\n", "x = " + "(" * 300, "if x:\n", "x = '\n"])
def test_a_syntax_error(refused, file, text):
    assert "model.py" in refused("measure", file(text))


@row("a model file that raises when it is imported")
def test_a_model_that_raises(refused, file):
    assert "ZeroDivisionError: division by zero (" in refused("measure", file("x = 1\n1 / 0\n"))
    assert "model.py:2)" in refused("measure", file("def f(): f()\nf()\n")).replace(
        "py:1)", "py:2)"
    )


@row("a model file that calls `sys.exit`")
def test_a_model_that_exits(refused, file):
    for text in ("raise SystemExit(3)", "import sys\ndef build():\n    sys.exit(3)\n"):
        assert "it ended the program (exit status 3)" in refused("measure", file(text))


@row("a model file that raises a `BaseException` that is no `Exception`")
def test_a_model_that_raises_something_else(refused, file):
    message = refused("measure", file("class Stop(BaseException): pass\nraise Stop('now')\n"))
    assert "Stop: now (" in message
    assert "model.py:2)" in message


# -- files and streams --------------------------------------------------------------------------

full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")


@full
@row("a full disk under `--json`")
def test_a_full_disk(run):
    status, out, err = run("policies", "dots", "--json", "/dev/full")
    assert status == 2
    assert "save(dots)" in out
    assert "No space left" in err


@row("a file that may not grow (`ulimit -f`)")
def test_a_file_that_may_not_grow(run, tmp_path):
    path = tmp_path / "out.json"
    path.write_text("kept")
    path.chmod(0o640)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        status, out, err = run("policies", "--json", path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert status == 2
    assert "megatron" in out
    assert "too large" in err
    assert path.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [path]
    assert run("policies", "--json", path)[0] == 0
    assert json.loads(path.read_text())["policies"]
    assert path.stat().st_mode & 0o777 == 0o640


@full
@row("a full disk under standard output")
@pytest.mark.parametrize("words", [["dots"], ["dots", "--json", "-"]])
def test_a_full_disk_under_the_output(run, monkeypatch, words):
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        status, _, err = run("policies", *words)
        monkeypatch.undo()
    assert status == 2
    assert "standard output cannot be written: No space left" in err


@row("an output folder that cannot be written")
def test_an_output_folder_that_cannot_be_written(refused, monkeypatch):
    monkeypatch.setattr(_commands, "loaded", None)  # would fail otherwise
    for option in ("--json", "--html"):
        assert "cannot be written" in refused("inspect", "m.py", option, "/proc/out")
        assert "cannot be written" in refused("inspect", "m.py", option, "/no/such/folder/out")
    assert "cannot be written" in refused("plan", "m.py", "--budget", "min", "--save", "/proc/out")
    assert "cannot be written" in refused("frontier", "m.py", "--json", "a\0b")


@row("standard output that nobody reads")
def test_an_output_that_nobody_reads(run, monkeypatch):
    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        status, _, err = run("policies", "--json", "-")
        monkeypatch.undo()
    assert (status, err) == (141, "")


@row("standard output that is closed")
def test_an_output_that_is_closed(run, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)
    status, _, err = run("policies", "dots", "--json", tmp_path / "out.json")
    sys.stdout.close()
    monkeypatch.undo()
    assert (status, err) == (0, "")
    assert json.loads((tmp_path / "out.json").read_text())["policy"] == "save(dots)"


@row("a terminal that cannot show some characters")
def test_a_terminal_without_the_characters(run, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    status, _, err = run("policies", "save(named('→'))")
    assert (status, err) == (0, "")
    assert b"\\u2192" in written.getvalue()


@pytest.mark.slow
@row("`NO_COLOR`")
def test_no_color(run):
    import pty

    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "remat_kit", "policies"],
        stdout=theirs,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "NO_COLOR": "1"},
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(ours, 65536):
            shown += chunk
    assert child.wait() == 0
    codes = [code for code in shown.split(b"\x1b[")[1:] if code[:2].startswith((b"3", b"9"))]
    assert shown
    assert not codes


# -- surroundings -------------------------------------------------------------------------------


@row("no temporary directory")
def test_no_temporary_directory(monkeypatch):
    def refuse(*args, **kwargs):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with _worker._scratch_file() as file:
        file.write(b"words")
        file.seek(0)
        assert file.read() == b"words"


@row(
    "a cache entry that is damaged",
    "a cache entry with a valid checksum and wrong contents",
)
def test_wrong_answers_in_the_cache(run, file, tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_KIT_CACHE", str(tmp_path / "cache"))
    model = file(GOOD)

    def measured():
        status, out, err = run("measure", model, "--json", "-")
        assert status == 0, err
        return json.loads(out)["policies"][0]["memory"]["cpu"]

    want = measured()
    (entry,) = (tmp_path / "cache").glob("*.answer")
    cache = _cache.Cache(tmp_path / "cache")
    answer = json.loads(cache.get(entry.stem))
    assert measured()["cached"]
    for wrong in (
        *(b"", b"nonsense", b"[]", b"{}", b"3", b"null", b"[" * 50_000, b"\xff", b"{'a'"),
        *(b'{"refused": 3}', b'{"memory": {}, "hlo": "HloModule m", "compile_seconds": 1.0}'),
        *(json.dumps(answer | {key: None}).encode() for key in answer),
        json.dumps(answer | {"hlo": "another format"}).encode(),
        json.dumps(answer | {"memory": dict.fromkeys(answer["memory"], "1")}).encode(),
    ):
        cache.put(entry.stem, wrong)
        assert _compile._checked_answer(cache.get(entry.stem)) is None
    found = measured()
    assert not found["cached"]
    assert found["temp_bytes"] == want["temp_bytes"]
    for damaged in (b"", b"x", entry.read_bytes()[:-3], _cache._MAGIC + b"\0" * 40):
        entry.write_bytes(damaged)
        assert cache.get(entry.stem) is None
    assert not measured()["cached"]
    assert measured()["cached"]


WRITER = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("cache", sys.argv[1])
cache = importlib.util.module_from_spec(spec); sys.modules["cache"] = cache
spec.loader.exec_module(cache)
kept, key = cache.Cache(pathlib.Path(sys.argv[2])), cache.key_of("one")
print("begun", flush=True)
for i in range(int(sys.argv[3])):
    kept.put(key, bytes([i % 256]) * 300_000)
    found = kept.get(key)
    assert found is None or (len(found) == 300_000 and found == found[:1] * 300_000)
"""


@row("two processes with one cache folder, one of them killed")
def test_two_processes_on_one_cache(tmp_path):
    argv = ["-c", WRITER, _cache.__file__, tmp_path / "cache"]
    patient, killed = process(*argv, 60), process(*argv, 10**9)
    assert killed.stdout.readline() == "begun\n"
    time.sleep(0.2)
    killed.kill()
    killed.communicate()
    _, err = patient.communicate()
    assert patient.returncode == 0, err
    cache = _cache.Cache(tmp_path / "cache")
    assert len(cache.get(_cache.key_of("one"))) == 300_000
    for left in cache.directory.glob(".writing-*"):
        os.utime(left, (1, 1))  # long ago
    cache.put(_cache.key_of("two"), b"")
    assert not list(cache.directory.glob(".writing-*"))


@row("a cache folder that cannot be written", "no home directory")
@pytest.mark.parametrize("homeless", [False, True])
def test_a_cache_that_cannot_be_written(run, file, tmp_path, monkeypatch, homeless):
    if homeless:
        for name in ("REMAT_KIT_CACHE", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    else:
        monkeypatch.setenv("REMAT_KIT_CACHE", str(file("in the way", "file") / "cache"))
    monkeypatch.chdir(tmp_path)
    _cache._warned.clear()
    with pytest.warns(UserWarning, match="answers are not kept"):
        assert run("measure", file(GOOD))[0] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run("measure", file(GOOD))[0] == 0
    assert {path.name for path in tmp_path.iterdir()} <= {"model.py", "file", "__pycache__"}


@row("a target whose compiler is not installed")
def test_no_compiler(refused, monkeypatch):
    real = _target.importlib.util.find_spec
    monkeypatch.setattr(
        _target.importlib.util, "find_spec", lambda n, *a: None if n == "libtpu" else real(n, *a)
    )
    assert "is not installed" in refused("measure", "m.py", "--target", "tpu-v5e")


@row("a CUDA plugin that raises when it is imported")
@pytest.mark.parametrize("where", ["parent", "library"])
def test_a_broken_cuda_plugin(refused, run, tmp_path, monkeypatch, where):
    real = _target.importlib.util.find_spec

    def find(name, *rest):
        if not name.startswith("jax_plugins."):
            return real(name, *rest)
        if where == "parent":
            raise RuntimeError("no driver")
        return type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})

    (tmp_path / "xla_cuda_plugin.so").write_bytes(b"")
    monkeypatch.setattr(_target.importlib.util, "find_spec", find)
    assert run("targets")[0] == 0
    assert "is not installed" in refused("measure", "m.py", "--target", "h100")


# -- Ctrl-C and other signals -------------------------------------------------------------------


@row("Ctrl-C while the command line is imported")
def test_interrupted_while_it_is_imported(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(
        "import sys, time\nprint('importing', file=sys.stderr, flush=True)\ntime.sleep(60)\n"
    )
    interrupted(process("-m", "remat_kit", "targets", path=tmp_path), "importing")


@row("Ctrl-C while the model is imported or traced")
@pytest.mark.parametrize(
    "text",
    [
        "raise KeyboardInterrupt",
        "def build():\n    raise KeyboardInterrupt\n",
        GOOD.replace("jnp.sum(", "raise_(").replace(
            "W =",
            textwrap.dedent(
                """
            def raise_(x):
                raise KeyboardInterrupt
            W ="""
            ),
        ),
    ],
    ids=["imported", "built", "traced"],
)
@pytest.mark.parametrize("command", ["measure", "inspect", "max-batch"])
def test_interrupted_while_it_traces(run, file, text, command):
    if command == "max-batch":
        text = text.replace("def build(", "def build(batch=1, ").replace(", )", ")")
    status, _, err = run(command, file(text))
    assert status == 130
    assert err.endswith("interrupted\n")


@row("Ctrl-C while a process compiles")
def test_interrupted_while_a_process_compiles(interruptible, monkeypatch):
    # The request is never sent, so the process does not answer before the signal comes.
    monkeypatch.setattr(_worker, "send", lambda stream, message: None)
    worker = _worker.Worker({})
    seen = []

    def press():
        while worker._process is None:
            time.sleep(0.01)
        seen.append(worker._process.pid)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        worker.ask({"settings": {}})
    thread.join()
    assert gone(seen[0], seconds=2)


@pytest.mark.slow
@row("Ctrl-C while this process is inside of a compiler")
def test_interrupted_while_python_is_not_running(file):
    text = """
        import hashlib, sys
        def build():
            print("inside", file=sys.stderr, flush=True)
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**9)
    """
    child = process("-m", "remat_kit", "measure", file(textwrap.dedent(text)))
    interrupted(child, "inside")


PARENT = """
import importlib.util, sys, threading, time
spec = importlib.util.spec_from_file_location("worker", sys.argv[1])
worker = importlib.util.module_from_spec(spec); sys.modules["worker"] = worker
spec.loader.exec_module(worker)
child = worker.Worker({})
child._start()
print(child._process.pid, flush=True)
time.sleep(60)
"""


@row("the command line is killed")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_is_left(how):
    parent = process("-c", PARENT, _worker.__file__)
    pid = int(parent.stdout.readline())
    parent.send_signal(how)
    parent.communicate()
    assert parent.returncode == -how
    assert gone(pid)


# -- the table ----------------------------------------------------------------------------------


def test_the_table_and_the_tests_have_the_same_lines():
    _, _, catalogue = TABLE.partition("## The catalogue")
    lines = [line.strip("|").replace("\\|", "¦").split("|") for line in catalogue.splitlines()]
    listed = [cells[0].strip() for cells in lines if len(cells) == 3][2:]
    assert listed == list(dict.fromkeys(listed))
    assert set(listed) == set(ROWS)
    assert {cells[2].strip() for cells in lines[2:] if len(cells) == 3} <= {
        *("status", "---:", "0", "2", "130", "141", "–")
    }


def test_exit_codes_are_said_wherever_one_looks(run):
    status, out, _ = run("--help")
    assert status == 0
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Command line")[2].partition("\n## ")[0]
    for code in ("0", "1", "2", "130", "141"):
        assert f"\n  {code} " in out
        assert f"| {code} |" in TABLE
        assert re.search(rf"\b{code}\b", section)
