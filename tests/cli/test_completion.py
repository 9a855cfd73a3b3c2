"""The scripts that complete commands and options."""

import shutil
import subprocess

import pytest

from remat_kit._cli.arguments import argument_parser
from remat_kit._cli.completion import SHELLS, script


def completed(tmp_path, *words):
    path = tmp_path / "script"
    path.write_text(script(argument_parser(), "bash"))
    ask = f"source {path}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
    code = ask + '_remat_kit; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_options_and_files(tmp_path):
    assert completed(tmp_path, "remat-kit", "ma") == ["max-batch"]
    assert completed(tmp_path, "remat-kit", "plan", "x.py", "--bu") == ["--budget"]
    assert completed(tmp_path, "remat-kit", "measure", "x.py", "--bu") == []
    (tmp_path / "model.py").write_text("")
    assert completed(tmp_path, "remat-kit", "measure", "mo") == ["model.py"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_option_is_there(run, shell):
    status, out, err = run("completion", shell)
    assert (status, err) == (0, "")
    (commands,) = (a.choices for a in argument_parser()._actions if isinstance(a.choices, dict))
    for name, command in commands.items():
        assert name in out
        for action in command._actions:
            for option in action.option_strings[-1:]:
                assert (option if shell != "fish" else f"-l {option.lstrip('-')} ") in out
    if checker := shutil.which(shell):
        done = subprocess.run([checker, "-n"], input=out, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_another_shell_is_refused(refused):
    message, hint = refused("completion", "tcsh")
    assert "invalid choice: 'tcsh'" in message
    assert "--help" in hint
