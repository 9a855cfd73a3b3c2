"""Run the examples of the pages, and write what they print into the pages.

    python docs/run_pages.py docs/howto/*.md          # runs them
    python docs/run_pages.py --write docs/howto/*.md  # and stores what they print

The ``python`` blocks of a page are one program and run one after the other. If the block after one
of them is a ``text`` block, it is what the program printed there. A block whose first line is a
comment such as ``# train.py`` is also written to that file. In ``console`` and ``sh`` blocks, lines
that begin with ``$ remat-kit`` or ``$ pytest`` run in the folder of these files, and what follows a
command is what it printed. All other blocks are only shown.

``<!-- not executed -->`` above a block says that it is not run, and why.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import linecache
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH = 80  # columns of a sentence that an example prints
_BLOCK = re.compile(
    r"^```(python|console|sh)\n(.*?)^```\n(?:\n^```text\n(.*?)^```\n)?", re.M | re.S
)
_FILE = re.compile(r"# ([\w/]+\.py)\n")
_SKIPPED = "<!-- not executed"


# A terminal without colors, as `rich` reads it from the environment.
_TERMINAL = {"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}


class _Terminal(io.TextIOWrapper):
    """Standard output that is a terminal of 80 columns, so that tables are fitted into it."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def _captured() -> Iterator[io.BytesIO]:
    """Collect what is printed; progress on standard error is dropped."""
    raw = io.BytesIO()
    out = _Terminal(raw, encoding="utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    before = {name: os.environ.get(name) for name in _TERMINAL}
    os.environ.update(_TERMINAL)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield raw
        out.detach()  # closing the wrapper would close what it wrote to
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run_python(text: str, name: str, line: int, namespace: dict[str, object]) -> str:
    """Execute a block of a page; reports and tracebacks name the file and the line given."""
    padded = "\n" * line + text
    linecache.cache[name] = (len(padded), None, padded.splitlines(keepends=True), name)
    with _captured() as raw:
        exec(compile(padded, name, "exec", dont_inherit=True), namespace)
    return raw.getvalue().decode()


def _run_command(command: str) -> str:
    """Run one line of a console block here, and return what it prints."""
    from remat_kit._cli import main as command_line

    program, *argv = shlex.split(command)
    if program == "pytest":
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *argv],
            capture_output=True,
            text=True,
            check=False,
            env=env,
        )
        if done.returncode:
            raise RuntimeError(f"{command}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout
    if program != "remat-kit":
        raise ValueError(f"{command}: only `remat-kit` and `pytest` are run")
    with _captured() as raw:
        status = command_line.main(argv)
    if status:
        raise RuntimeError(f"{command}: status {status}\n{raw.getvalue().decode()}")
    return raw.getvalue().decode()


def _commands(text: str) -> list[str]:
    """Return the commands of a console block.

    >>> _commands("$ remat-kit targets\\n$ remat-kit plan gpt \\\\\\n    --budget min\\nnothing")
    ['remat-kit targets', 'remat-kit plan gpt     --budget min']
    """
    joined = text.replace("\\\n", "")
    return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


def run(page: Path) -> str:
    """Run all blocks of a page in the current folder, and return its text with their output."""
    text = page.read_text(encoding="utf-8")
    script = f"{page.stem}.py"
    namespace: dict[str, object] = {"__name__": page.stem}
    parts, end, lines = [], 0, 0
    for found in _BLOCK.finditer(text):
        language, block, shown = found.groups()
        parts.append(text[end : found.start()])
        end = found.end()
        before = text[: found.start()].rstrip().rpartition("\n")[2]
        if before.startswith(_SKIPPED):
            parts.append(found.group(0))
            continue
        if language == "python":
            file = _FILE.match(block)
            if file:
                Path(file.group(1)).write_text(block, encoding="utf-8")
            name, line = (file.group(1), 0) if file else (script, lines)
            printed = _run_python(block, name, line, namespace)
            lines += 0 if file else block.count("\n") + 1
            output = "" if shown is None else f"\n```text\n{_trimmed(printed)}```\n"
            parts.append(f"```python\n{block}```\n{output}")
        else:
            parts.append(f"```{language}\n{_ran(block)}```\n")
    return "".join([*parts, text[end:]])


def _ran(block: str) -> str:
    """Run the commands of a console block; return the block with what they print."""
    shown = re.findall(r"^\$ (?:.*\\\n)*.*\n", block, re.M)
    return "".join(
        written + _trimmed(_run_command(command))
        for written, command in zip(shown, _commands(block), strict=True)
    )


def _trimmed(printed: str) -> str:
    """Return lines without trailing blanks; a long sentence becomes several lines.

    >>> _trimmed("a  b \\n\\n")
    'a  b\\n'
    """
    # A terminal wraps a line before the long path of this checkout, which a reader does not see.
    printed = printed.replace(f"\n{ROOT}{os.sep}", "   ").replace(f"{ROOT}{os.sep}", "")
    lines = []
    for line in printed.strip("\n").splitlines():
        is_sentence = len(line) > WIDTH and "  " not in line.strip()
        wrapped = textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False)
        lines += wrapped if is_sentence else [line.rstrip()]
    return "".join(f"{line}\n" for line in lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("pages", type=Path, nargs="+", metavar="PAGE")
    parser.add_argument("--write", action="store_true", help="store what the examples print")
    options = parser.parse_args(argv)
    for page in options.pages:
        path = page.resolve()
        # The README's commands are for a checkout, those of the pages for any folder.
        at_root = contextlib.nullcontext(ROOT)
        place = at_root if path.parent == ROOT else tempfile.TemporaryDirectory()
        with place as folder, contextlib.chdir(folder):
            text = run(path)
        if options.write:
            path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # The package of this checkout, and a cache of its own: what is shown was compiled.
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as cache:
        os.environ["REMAT_KIT_CACHE"] = cache
        sys.exit(main())
