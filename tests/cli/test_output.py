"""Files and pipes that commands write to."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from remat_kit._cli import commands as _commands

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
