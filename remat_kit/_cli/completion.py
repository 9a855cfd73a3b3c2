"""Scripts that complete commands and options in bash, zsh and fish.

A script is written from the parser of the command line. It holds the names of all commands and
options, so that completing them starts no Python.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence

SHELLS = ("bash", "zsh", "fish")


@dataclasses.dataclass(frozen=True)
class _Word:
    """A command or an option, and its help in a few words."""

    name: str
    about: str


_Table = Mapping[_Word, Sequence[_Word]]


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for a shell.

    Args:
        parser: of the command line; its only positional argument is the command.
        shell: one of ``SHELLS``.
    """
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    helps = {a.dest: a.help or "" for a in commands._choices_actions}
    table = {
        _Word(name, helps[name]): [
            _Word(action.option_strings[-1], action.help or "")
            for action in command._actions
            if action.option_strings
        ]
        for name, command in commands.choices.items()
    }
    return _SCRIPTS[shell](table)


def _bash(table: _Table) -> str:
    cases = "\n".join(f'    {c.name}) words="{_names(o)}" ;;' for c, o in table.items())
    return f"""\
_remat_kit() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{_names(table)}" -- "$cur"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if [[ "$cur" == -* ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
  else
    COMPREPLY=($(compgen -f -- "$cur"))
  fi
}}
complete -o filenames -F _remat_kit remat-kit
"""


def _zsh(table: _Table) -> str:
    def described(words: Sequence[_Word] | _Table, indent: str) -> str:
        return "\n".join(f"{indent}{_quoted(f'{w.name}:{_short(w.about)}')}" for w in words)

    cases = "\n".join(
        f"    {c.name})\n      options=(\n{described(o, ' ' * 8)}\n      ) ;;"
        for c, o in table.items()
    )
    return f"""\
#compdef remat-kit
_remat_kit() {{
  local -a commands options
  if (( CURRENT == 2 )); then
    commands=(
{described(table, " " * 6)}
    )
    _describe command commands
    return
  fi
  case "$words[2]" in
{cases}
  esac
  if [[ "$PREFIX" == -* ]]; then
    _describe option options
  else
    _files
  fi
}}
compdef _remat_kit remat-kit
"""


def _fish(table: _Table) -> str:
    lines = ["complete -c remat-kit -f -n __fish_use_subcommand"]
    for command, options in table.items():
        about = _quoted(_short(command.about))
        lines.append(f"complete -c remat-kit -n __fish_use_subcommand -a {command.name} -d {about}")
        there = _quoted(f"__fish_seen_subcommand_from {command.name}")
        for option in options:
            name, text = option.name.lstrip("-"), _quoted(_short(option.about))
            lines.append(f"complete -c remat-kit -n {there} -l {name} -d {text}")
    return "\n".join(lines) + "\n"


_SCRIPTS: Mapping[str, Callable[[_Table], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}


def _names(words: Sequence[_Word] | _Table) -> str:
    return " ".join(word.name for word in words)


def _short(about: str) -> str:
    """Return the first clause of a help text, without what a shell would read as its own."""
    text = about.partition(";")[0].partition(" (")[0].replace("%%", "%")
    return text.replace(":", ",").replace("[", "").replace("]", "")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "") + "'"
