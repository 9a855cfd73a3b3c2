"""A cache of compiled answers on disk: content-addressed, checksummed and bounded in size.

Each answer is one file, named by its key. The file is written under another name and then renamed,
so that a reader sees a whole answer or none, whatever other processes do. A file that fails its
checksum counts as absent, and the next answer overwrites it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

from remat_kit._files import UNFINISHED, remove_file, write_atomically

_MAGIC = b"remat_kit 1\n"


_SUFFIX = ".answer"


_ABANDONED_SECONDS = 3600.0  # after this time, an unfinished file belongs to a killed process


_DEFAULT_LIMIT_BYTES = 2 * 2**30


def key_of(*parts: bytes | str) -> str:
    """Return one key for all ``parts``, which also depends on the boundaries between them.

    >>> key_of("ab", "c") == key_of("a", "bc")
    False
    """
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Cache:
    """A directory of answers that removes the least recently used ones above a size limit.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     cache = Cache(Path(directory), limit_bytes=1000)
    ...     cache.put(key_of("program"), b"answer")
    ...     cache.get(key_of("program")), cache.get(key_of("another"))
    (b'answer', None)

    Args:
        directory: where the answers are stored; created when the first one is written.
        limit_bytes: the size on disk above which old answers are removed.
    """

    directory: Path
    limit_bytes: int = _DEFAULT_LIMIT_BYTES

    def get(self, key: str) -> bytes | None:
        """Return the answer, or None if there is none or it is damaged."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return _unpack(data)

    def put(self, key: str, answer: bytes) -> None:
        """Store the answer; if the directory cannot be written, warn once and continue."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path(key), _pack(answer))
            self._evict()
        except OSError as error:
            _warn_once(self.directory, error)

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{_SUFFIX}"

    def _entries(self) -> list[Path]:
        return self._named(f"*{_SUFFIX}")

    def _named(self, pattern: str) -> list[Path]:
        try:
            return list(self.directory.glob(pattern))
        except OSError:  # this process may not be allowed to list the directory
            return []

    def _evict(self) -> None:
        for path in self._named(f"{UNFINISHED}*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - _ABANDONED_SECONDS:
                    path.unlink()
        found = []
        for path in self._entries():
            with contextlib.suppress(OSError):  # another process may have removed it
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in found) - self.limit_bytes
        for _, size, path in sorted(found)[:-1]:  # the newest is never removed, however large
            if excess <= 0:
                return
            excess -= size if remove_file(path) else 0


def default_cache() -> Cache:
    """Return the cache of this user.

    The directory is ``$REMAT_KIT_CACHE``, else ``$XDG_CACHE_HOME/remat_kit``, else
    ``~/.cache/remat_kit``. (The package `platformdirs` would replace one of the lines below. It
    puts the directory elsewhere on macOS and raises an error for a user without a home directory.)
    """
    if named := os.environ.get("REMAT_KIT_CACHE"):
        return Cache(Path(os.path.expanduser(named)))
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # Without a home directory, "~" is not expanded. No directory of that name is made here.
    return Cache(Path("/dev/null" if base.startswith("~") else base) / "remat_kit")


def _pack(answer: bytes) -> bytes:
    body = zlib.compress(answer, 6)
    return _MAGIC + hashlib.sha256(body).digest() + body


def _unpack(data: bytes) -> bytes | None:
    start = len(_MAGIC) + hashlib.sha256().digest_size
    digest, body = data[len(_MAGIC) : start], data[start:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != digest:
        return None
    try:
        return zlib.decompress(body)
    except zlib.error:
        return None


_warned: set[Path] = set()


def _warn_once(directory: Path, error: OSError) -> None:
    if directory in _warned:
        return
    _warned.add(directory)
    warnings.warn(
        f"compiled answers are not kept: {directory} cannot be written ({error.strerror}); "
        "set REMAT_KIT_CACHE to a directory that can",
        stacklevel=3,
    )
