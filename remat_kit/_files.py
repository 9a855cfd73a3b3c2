"""Where are the files that come with the package, and how are files written whole or not at all?"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

UNFINISHED = ".writing-"


_PACKAGE = Path(__file__).parent


def data_folder(name: str) -> Path:
    """Return the folder of the models or the policies: in a wheel it is inside the package.

    >>> sorted(path.name for path in data_folder("models").glob("gpt*.py"))
    ['gpt.py', 'gpt_nnx.py']
    """
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def is_own_file(name: str) -> bool:
    """Tell whether a source file is one of this package. Its models are programs like a user's.

    >>> is_own_file(__file__), is_own_file(str(data_folder("models") / "gpt.py"))
    (True, False)
    """
    return name.startswith(f"{_PACKAGE}{os.sep}") and not name.startswith(_PACKAGED_MODELS)


_PACKAGED_MODELS = f"{_PACKAGE / 'models'}{os.sep}"


def write_atomically(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file by these bytes, so that a reader sees all of them or none.

    Args:
        path: of the file.
        data: all that it will hold.
        mode: its permissions, less those that the process's umask takes away.
    """
    beside = path.parent / f"{UNFINISHED}{secrets.token_hex(8)}"
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(beside, path)
    except BaseException:
        remove_file(beside)
        raise


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file that a user asked for: all of it, or else leave what was there as it was.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write_whole(f"{directory}/out.txt", "text")
    ...     Path(f"{directory}/out.txt").read_text(encoding="utf-8")
    'text'

    Args:
        path: of the file. A link stays one; a device or a pipe is written to as it is.
        content: text is written as UTF-8; what UTF-8 cannot say is escaped.

    Raises:
        OSError: it cannot be written, or not all of it.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    real = Path(os.path.realpath(path))
    try:
        status = real.stat()
    except FileNotFoundError:
        write_atomically(real, data, 0o666)
        return
    if not stat.S_ISREG(status.st_mode):
        real.write_bytes(data)
        return
    with real.open("ab"):
        pass  # raises where the user took away the right to change it
    try:
        write_atomically(real, data, 0o666)
    except PermissionError:  # a folder that takes no new files
        real.write_bytes(data)
    else:
        with contextlib.suppress(OSError):
            real.chmod(stat.S_IMODE(status.st_mode))


def remove_file(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
