"""Index caches: reused, never half there, rebuilt when damaged, built by one of many processes."""

import subprocess
import sys

import numpy as np
import pytest

from megatron.data import cache as cache_module
from megatron.data.cache import IndexCache
from megatron.errors import DataError

SHAPES = {"a": (np.int32, (1000,)), "b": (np.int64, (3, 2))}


def fill(arrays):
    arrays["a"][:] = np.arange(1000)
    arrays["b"][:] = 7


def never(arrays):
    raise AssertionError("built although it was there")


@pytest.fixture
def built(tmp_path):
    cache = IndexCache(tmp_path / "cache")
    cache.open("kind", {"seed": 1}, SHAPES, fill)
    return cache


def test_built_once_then_mapped(built):
    arrays = IndexCache(built.folder).open("kind", {"seed": 1}, SHAPES, never)
    assert arrays["a"].tolist() == list(range(1000))
    assert not arrays["a"].flags.writeable
    assert all(path.suffix in (".npy", ".json") for path in built.folder.iterdir()), "no lock and no partial file is left"
    assert built.notes == []


def test_another_key_is_another_entry(built):
    with pytest.raises(AssertionError, match="built although"):
        built.open("kind", {"seed": 2}, SHAPES, never)
    assert not [path for path in built.folder.iterdir() if "partial" in path.name]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


def another_shape(path):
    np.save(path, np.zeros(4, np.int32))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "ValueError"),
        (flip, "the content of a has changed"),
        (another_shape, r"a is int32\[4\], not int32\[1000\]"),
        (lambda path: path.unlink(), "FileNotFoundError"),
        (lambda path: path.write_bytes(b""), "EOFError"),
        (lambda path: next(path.parent.glob("*.json")).write_text("{"), "JSONDecodeError"),
        (lambda path: next(path.parent.glob("*.json")).write_text('{"key": 1}'), "belongs to another key"),
    ],
)
def test_a_damaged_entry_is_built_again_and_it_is_said(built, damage, reason):
    damage(next(built.folder.glob("*-a.npy")))
    arrays = built.open("kind", {"seed": 1}, SHAPES, fill)
    assert arrays["a"].tolist() == list(range(1000))
    assert len(built.notes) == 1
    with pytest.raises(ValueError, match=reason):
        raise ValueError(built.notes[0])
    built.open("kind", {"seed": 1}, SHAPES, never)


def test_large_arrays_are_checked_by_blocks(built, monkeypatch):
    monkeypatch.setattr(cache_module, "_WHOLE_BYTES", 100)
    monkeypatch.setattr(cache_module, "_BLOCK_BYTES", 10)
    built.open("kind", {"seed": 3}, SHAPES, fill)
    built.open("kind", {"seed": 3}, SHAPES, never)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/cache cannot be written \(Not a directory\).*--data-cache-path"):
        IndexCache(tmp_path / "file" / "cache").open("kind", {}, SHAPES, fill)


def test_without_file_locks_it_is_built_all_the_same(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(cache_module.fcntl, "flock", unsupported)
    cache = IndexCache(tmp_path)
    assert cache.open("kind", {}, SHAPES, fill)["b"].tolist() == [[7, 7]] * 3
    assert "has no file locks" in cache.notes[0]


def test_of_many_processes_one_builds(tmp_path):
    program = f"""
import os, time, numpy as np
from megatron.data.cache import IndexCache
def build(arrays):
    print("built", flush=True)
    time.sleep(0.3)
    arrays["a"][:] = 5
(array := IndexCache({str(tmp_path)!r}).open("kind", {{}}, {{"a": (np.int32, (10,))}}, build)["a"])
assert array.tolist() == [5] * 10
"""
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert "".join(said) == "built\n"


def test_what_a_killed_builder_left_is_removed(built):
    stem = next(built.folder.glob("*.json")).stem
    for path in built.folder.iterdir():
        path.unlink()
    (built.folder / f"{stem}-a.npy.host.1.partial").write_bytes(b"half")
    built.open("kind", {"seed": 1}, SHAPES, fill)
    assert not list(built.folder.glob("*.partial"))
