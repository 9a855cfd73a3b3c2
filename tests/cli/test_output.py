"""Files and pipes that commands write to."""

import contextlib
import json
import os
import pathlib
import pty
import shlex
import subprocess
import sys
import threading

import pytest

from remat_kit._cli import arguments as _arguments
from remat_kit._cli import commands as _commands
from remat_kit._cli import main as _main
from remat_kit._cli.doctor import SCRIPT_COMMANDS

ROOT = pathlib.Path(__file__).parents[2]
MLP = "models/mlp.py:build"
SMALL = ["--size", "batch=8", "features=16", "hidden=32"]


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


def test_inspect_writes_a_page_a_picture_and_a_trace(run, tmp_path):
    pytest.importorskip("matplotlib")
    page, picture, trace = (tmp_path / f"out.{kind}" for kind in ("html", "png", "json"))
    files = ("--html", page, "--png", picture, "--perfetto", trace)
    status, out, err = run("inspect", MLP, *SMALL, "--policy", "dots", "--target", "cpu", *files)
    assert status == 0, err
    assert out.startswith("Without a policy the gradient needs ")
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


# -- terminals --------------------------------------------------------------------------------

GPT = ["models/gpt.py:build", "--size", "size=tiny", "batch=2"]
NARROW = ["--size", "features=16", "hidden=32"]
CAPTURED = {
    "inspect": ["inspect", MLP, *SMALL, "--policy", "dots", "--target", "cpu"],
    "inspect alone": ["inspect", *GPT, "--target", "cpu"],
    "measure": [
        "measure",
        MLP,
        *SMALL,
        "--policy",
        "dots",
        "nothing",
        "--target",
        "cpu",
        "cpu@1GiB",
    ],
    "plan": ["plan", MLP, *SMALL, "--budget", "min"],
    "fit": ["fit", MLP, *NARROW, "--policy", "dots", "--batch", "8,16,32,64"],
    "policies": ["policies"],
    "targets": ["targets"],
    "frontier": ["frontier", MLP, *SMALL],
    "max-batch": ["max-batch", MLP, *NARROW, "--policy", "dots", "--target", "cpu@100KiB"],
}


@pytest.fixture
def terminal(monkeypatch):
    """Run a command whose standard output is a terminal, and return the lines that it shows."""

    def terminal(argv, width):
        ours, theirs = pty.openpty()
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "dumb")
        parts = []

        def read():
            with contextlib.suppress(OSError):  # the other side has closed
                while chunk := os.read(ours, 65536):
                    parts.append(chunk)

        reader = threading.Thread(target=read)
        reader.start()
        with open(theirs, "w", encoding="utf-8") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            status = _main.main(argv)
            monkeypatch.undo()
        reader.join()
        os.close(ours)
        assert status == 0
        return b"".join(parts).decode().replace("\r\n", "\n").splitlines()

    return terminal


_LONG = ("fit", "frontier", "max-batch", "plan")  # take several seconds each


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in _LONG else []) for n in CAPTURED]
)
def test_a_terminal_breaks_no_word(terminal, run, monkeypatch, name):
    argv = CAPTURED[name]
    monkeypatch.chdir(ROOT)
    _, whole, _ = run(*argv)
    words = set(whole.split())
    for width in (80, 120):
        monkeypatch.chdir(ROOT)
        lines = terminal(argv, width)
        for line in lines:
            parts = line.split()
            # A word may be longer than the terminal is wide; then it has a line of its own.
            assert len(line.rstrip()) <= width or len(parts) <= 2, line
            for word in parts:
                assert (
                    # The line of what is the same in every row separates its cells, and may wrap.
                    word.rstrip(";") in words
                    or word in words
                    or word.endswith("…")
                    or word.startswith("…/")
                    or (line.startswith(LAID_OUT))
                ), (word, line)


# The lines that the layout adds: they consist of names of columns and of cells.
LAID_OUT = ("in every row: ", "without the columns ", "with long names cut")


def test_a_terminal_says_once_what_is_the_same_in_every_row(terminal, monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = terminal(CAPTURED["fit"], 80)
    (said,) = (line for line in lines if line.startswith("in every row: "))
    assert "target cpu" in said
    assert not any(line.startswith("target") for line in lines)


def test_full_shows_every_column_of_a_terminal(terminal, run, monkeypatch):
    monkeypatch.chdir(ROOT)
    argv = [*CAPTURED["measure"], "--full"]
    _, whole, _ = run(*argv)
    monkeypatch.chdir(ROOT)
    table = whole[whole.index("memory\n") :]
    assert "\n".join(terminal(argv, 80)).endswith(table.rstrip("\n"))


def test_inspect_with_a_policy_shows_what_it_keeps(run):
    _, out, _ = run("inspect", *GPT, "--policy", "dots")
    assert "with dots, kept for the backward pass: " in out
    assert "GPT/block_{0..1}/mlp/up ×2" in out
    assert "with dots, computed twice: " in out


def test_presets_are_grouped_by_origin(run):
    _, out, _ = run("policies")
    titles = [part.splitlines()[0] for part in out.split("\n\n")]
    assert titles == ["JAX", *sorted(titles[1:], key=str.lower)]
    assert {"MaxText", "Megatron-LM", "Pax", "MindSpore"} <= set(titles)


def test_every_example_in_the_help_is_a_call():
    parser = _arguments.argument_parser()
    (commands,) = (a.choices for a in parser._actions if isinstance(a.choices, dict))
    for name, command in commands.items():
        text = command.format_help()
        example = text[text.index("example:\n") :].splitlines()[1].partition(" > ")[0]
        words = shlex.split(example)
        assert words[:2] == ["remat-kit", name]
        if name in SCRIPT_COMMANDS:  # what follows the script is its own
            words = words[: words.index("train.py")]
        assert parser.parse_args(words[1:]).command == name
