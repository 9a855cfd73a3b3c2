import multiprocessing
import os
import warnings

import pytest

from remat_kit import _files
from remat_kit._chip.cache import Cache, default_cache, key_of


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "answers")


def test_answer_comes_back(cache):
    cache.put(key_of("a"), b"one" * 1000)
    assert cache.get(key_of("a")) == b"one" * 1000
    assert cache.get(key_of("b")) is None


def test_second_answer_replaces_the_first(cache):
    cache.put(key_of("a"), b"one")
    cache.put(key_of("a"), b"two")
    assert cache.get(key_of("a")) == b"two"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-5],
        lambda data: data[:10],
        lambda data: b"",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: b"X" + data[1:],
        lambda data: data + b"more",
    ],
    ids=["cut", "cut head", "empty", "one bit", "other format", "longer"],
)
def test_damaged_answer_counts_as_absent_and_is_replaced(cache, damage):
    key = key_of("a")
    cache.put(key, b"one" * 1000)
    (path,) = cache.directory.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get(key) is None
    cache.put(key, b"two")
    assert cache.get(key) == b"two"


def test_least_recently_used_goes_first(tmp_path):
    cache = Cache(tmp_path, limit_bytes=3500)
    keys = [key_of(str(i)) for i in range(4)]
    for age, key in enumerate(keys[:3]):
        cache.put(key, os.urandom(1000))
        os.utime(cache._path(key), (age, age))
    assert cache.get(keys[0]) is not None  # now the most recent
    cache.put(keys[3], os.urandom(1000))
    assert [cache.get(key) is not None for key in keys] == [True, False, True, True]


def test_answer_larger_than_the_limit_is_kept(tmp_path):
    cache = Cache(tmp_path, limit_bytes=10)
    cache.put(key_of("a"), b"first")
    cache.put(key_of("b"), os.urandom(1000))
    assert cache.get(key_of("b")) is not None
    assert cache.get(key_of("a")) is None


def test_place_that_cannot_be_written_warns_once(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = Cache(tmp_path / "file" / "answers")
    with pytest.warns(UserWarning, match="REMAT_KIT_CACHE"):
        cache.put(key_of("a"), b"one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put(key_of("a"), b"one")
    assert cache.get(key_of("a")) is None


def test_failed_write_leaves_nothing_behind(cache, monkeypatch):
    def refuse(*_):
        raise OSError(28, "no space left")

    monkeypatch.setattr(_files.os, "replace", refuse)
    with pytest.warns(UserWarning, match="no space left"):
        cache.put(key_of("a"), b"one")
    assert list(cache.directory.iterdir()) == []


def _write_many(directory, start):
    cache = Cache(directory, limit_bytes=40_000)
    for i in range(100):
        cache.put(key_of(str((start + i) % 30)), bytes([(start + i) % 30]) * 5000 + os.urandom(900))
        found = cache.get(key_of(str(i % 30)))
        assert found is None or found[:5000] == bytes([i % 30]) * 5000


def test_two_processes_share_a_directory(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_write_many, args=(tmp_path, n)) for n in (0, 15)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert not list(tmp_path.glob(".writing-*"))


def test_environment_decides_the_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("REMAT_KIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache().directory == tmp_path / "xdg" / "remat_kit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache().directory == tmp_path / "home" / ".cache" / "remat_kit"
    monkeypatch.setenv("REMAT_KIT_CACHE", str(tmp_path / "own"))
    default_cache().put(key_of("a"), b"one")
    assert default_cache().directory == tmp_path / "own"
    assert default_cache().get(key_of("a")) == b"one"
