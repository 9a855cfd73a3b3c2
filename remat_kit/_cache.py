"""Compiled answers on disk: content-addressed, checksummed, bounded.

One file per answer, named by its key. A file is written beside its place and moved there, so a
reader sees a whole answer or none, whatever other processes do; a file that fails its checksum
counts as absent and is overwritten by the next answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"remat_kit 1\n"
_SUFFIX = ".answer"
_DEFAULT_LIMIT_BYTES = 2 * 2**30


def key_of(*parts: bytes | str) -> str:
    """Return one key for all ``parts``; the boundaries between them count.

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
    """A directory of answers, least recently used first to go when it outgrows its limit.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     cache = Cache(Path(directory), limit_bytes=1000)
    ...     cache.put(key_of("program"), b"answer")
    ...     cache.get(key_of("program")), cache.get(key_of("another"))
    (b'answer', None)

    Args:
        directory: where the answers lie; made when the first one is written.
        limit_bytes: the size on disk above which old answers are removed.
    """

    directory: Path
    limit_bytes: int = _DEFAULT_LIMIT_BYTES

    def get(self, key: str) -> bytes | None:
        """Return the answer, or None when there is none or it is damaged."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return _unpack(data)

    def put(self, key: str, answer: bytes) -> None:
        """Keep the answer; where the directory cannot be written, warn once and go on."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path(key), _pack(answer))
            self._evict()
        except OSError as error:
            _warn_once(self.directory, error)

    def clear(self) -> int:
        """Remove every answer and return how many there were."""
        return sum(_remove(path) for path in self._entries())

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{_SUFFIX}"

    def _entries(self) -> list[Path]:
        return list(self.directory.glob(f"*{_SUFFIX}")) if self.directory.is_dir() else []

    def _evict(self) -> None:
        found = []
        for path in self._entries():
            with contextlib.suppress(OSError):  # another process may have removed it
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in found) - self.limit_bytes
        for _, size, path in sorted(found)[:-1]:  # the newest stays, however large
            if excess <= 0:
                return
            excess -= size if _remove(path) else 0


def default_cache() -> Cache:
    """Return the cache of this user.

    ``$REMAT_KIT_CACHE``, else ``$XDG_CACHE_HOME/remat_kit``, else ``~/.cache/remat_kit``.
    """
    if named := os.environ.get("REMAT_KIT_CACHE"):
        return Cache(Path(named).expanduser())
    base = os.environ.get("XDG_CACHE_HOME")
    return Cache((Path(base) if base else Path.home() / ".cache") / "remat_kit")


def clear_cache() -> int:
    """Remove every compiled answer kept on disk and return how many there were.

    >>> import os, tempfile
    >>> os.environ["REMAT_KIT_CACHE"] = tempfile.mkdtemp()
    >>> clear_cache()
    0
    >>> del os.environ["REMAT_KIT_CACHE"]
    """
    return default_cache().clear()


def _pack(answer: bytes) -> bytes:
    body = zlib.compress(answer, 6)
    return _MAGIC + hashlib.sha256(body).digest() + body


def _unpack(data: bytes) -> bytes | None:
    start = len(_MAGIC) + hashlib.sha256().digest_size
    digest, body = data[len(_MAGIC) : start], data[start:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != digest:
        return None
    return zlib.decompress(body)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file by these bytes, so that a reader sees all of them or none."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        _remove(Path(name))
        raise


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


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
