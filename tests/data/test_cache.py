"""Index caches: reused, rebuilt when damaged, and built by one of many processes."""

import fcntl
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from megatron.base.errors import DataError
from megatron.data import building
from megatron.data import cache as cache_module
from megatron.data.background import Background
from megatron.data.cache import IndexCache

SHAPES = {"a": (np.int32, (1000,)), "b": (np.int64, (3, 2))}


def fill(arrays):
    arrays["a"][:] = np.arange(1000)
    arrays["b"][:] = 7


def fail_to_build(arrays):
    raise AssertionError("built although the entry exists")


@pytest.fixture
def built(tmp_path):
    """A cache with one entry."""
    cache = IndexCache(tmp_path / "cache")
    cache.open("kind", {"seed": 1}, SHAPES, fill)
    return cache


def find_stem(cache):
    """Return the first part of the file names of the only entry."""
    return next(cache.folder.glob("*.json")).stem


def list_temporaries(folder):
    return sorted(path.name for path in folder.glob("*.partial"))


def test_an_entry_is_built_once_then_mapped(built):
    arrays = IndexCache(built.folder).open("kind", {"seed": 1}, SHAPES, fail_to_build)
    assert arrays["a"].tolist() == list(range(1000))
    assert not arrays["a"].flags.writeable
    assert all(path.suffix in (".npy", ".json") for path in built.folder.iterdir()), (
        "a lock or a partial file is left"
    )
    assert built.notes == []


def test_another_key_is_another_entry(built):
    with pytest.raises(AssertionError, match="built although"):
        built.open("kind", {"seed": 2}, SHAPES, fail_to_build)
    assert list_temporaries(built.folder) == []


@pytest.mark.parametrize("kind", ["json", "npy"])
def test_an_entry_of_links_is_read(built, tmp_path, kind):
    """Links are followed on reading, so that a cache may be shared."""
    for path in built.folder.glob(f"*.{kind}"):
        moved = tmp_path / path.name
        path.rename(moved)
        path.symlink_to(moved)
    arrays = built.open("kind", {"seed": 1}, SHAPES, fail_to_build)
    assert arrays["a"].tolist() == list(range(1000))
    assert built.notes == []


def test_a_link_to_a_damaged_array_is_replaced_and_its_target_is_kept(built, tmp_path):
    array = next(built.folder.glob("*-a.npy"))
    target = tmp_path / "target"
    target.write_bytes(b"other data")
    array.unlink()
    array.symlink_to(target)
    assert built.open("kind", {"seed": 1}, SHAPES, fill)["a"].tolist() == list(range(1000))
    assert not array.is_symlink()
    assert target.read_bytes() == b"other data"


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_last_value(path):
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


def write_another_shape(path):
    np.save(path, np.zeros(4, np.int32))


def find_manifest(path):
    return next(path.parent.glob("*.json"))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "ValueError"),
        (flip_last_value, "the content of a has changed"),
        (write_another_shape, "a is int32[4], not int32[1000]"),
        (lambda path: path.unlink(), "FileNotFoundError"),
        (lambda path: path.write_bytes(b""), "EOFError"),
        (lambda path: find_manifest(path).write_text("{"), "JSONDecodeError"),
        (lambda path: find_manifest(path).write_text('{"key": 1}'), "belongs to another key"),
    ],
)
def test_a_damaged_entry_is_built_again_with_a_note(built, damage, reason):
    damage(next(built.folder.glob("*-a.npy")))
    arrays = built.open("kind", {"seed": 1}, SHAPES, fill)
    assert arrays["a"].tolist() == list(range(1000))
    (note,) = built.notes
    assert reason in note
    built.open("kind", {"seed": 1}, SHAPES, fail_to_build)


def test_large_arrays_are_checked_by_samples(built, monkeypatch):
    monkeypatch.setattr(cache_module, "WHOLE_BYTES", 100)
    monkeypatch.setattr(cache_module, "SAMPLE_BYTES", 10)
    built.open("kind", {"seed": 3}, SHAPES, fill)
    built.open("kind", {"seed": 3}, SHAPES, fail_to_build)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written \(Not a directory\)") as raised:
        IndexCache(tmp_path / "file" / "cache").open("kind", {}, SHAPES, fill)
    assert "--data-cache-path" in str(raised.value)


def test_an_entry_is_built_without_file_locks(tmp_path, monkeypatch):
    def raise_unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", raise_unsupported)
    cache = IndexCache(tmp_path)
    assert cache.open("kind", {}, SHAPES, fill)["b"].tolist() == [[7, 7]] * 3
    assert "has no file locks" in cache.notes[0]


def test_one_of_many_processes_builds(tmp_path):
    program = f"""
import os, time, numpy as np
from megatron.data.cache import IndexCache
def build(arrays):
    print("built", flush=True)
    time.sleep(0.3)
    arrays["a"][:] = 5
shapes = {{"a": (np.int32, (10,))}}
array = IndexCache({str(tmp_path)!r}).open("kind", {{}}, shapes, build)["a"]
assert array.tolist() == [5] * 10
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert "".join(outputs) == "built\n"


def test_abandoned_files_of_another_host_are_removed_after_an_hour(built):
    stem = find_stem(built)
    for path in built.folder.iterdir():
        path.unlink()
    names = {
        age: f"{stem}-a.npy.host.{age}.0123456789ab-0123456789ab.partial" for age in (5, 3500, 3700)
    }
    for age, name in names.items():
        (built.folder / name).write_bytes(b"half")
        os.utime(built.folder / name, (time.time() - age,) * 2)
    (built.folder / "mine.bin.partial").write_bytes(b"of another program")
    os.utime(built.folder / "mine.bin.partial", (0, 0))
    built.open("kind", {"seed": 1}, SHAPES, fill)
    assert list_temporaries(built.folder) == sorted([names[5], names[3500], "mine.bin.partial"])


def start_process(folder, body="arrays['a'][:] = 5", before=""):
    """Start a process that opens an entry of 4 MB.

    Args:
        folder: The folder of the cache.
        body: What `build` does, in one line.
        before: Lines that run before the cache is imported.
    """
    text = f"""
import os, sys, time, numpy as np
{before}
from megatron.data.cache import IndexCache
def build(arrays):
    print("building", flush=True)
    {body}
cache = IndexCache({str(folder)!r}, wait_seconds=60)
array = cache.open("kind", {{}}, {{"a": (np.int32, (1_000_000,))}}, build)["a"]
assert array.min() == array.max() == 5
"""
    return subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_killed_builder_is_replaced_and_its_files_are_removed(tmp_path):
    killed = start_process(tmp_path, "time.sleep(100)")
    assert killed.stdout.readline() == "building\n"
    waiting = start_process(tmp_path)
    assert len(list_temporaries(tmp_path)) == 1
    killed.kill()
    killed.communicate()
    output, errors = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, errors
    assert output == "building\n"
    assert list_temporaries(tmp_path) == []


NO_LOCKS = {
    "of one host": "import fcntl; fcntl.flock = lambda *_: None",
    "unsupported": """
import fcntl, errno
def flock(*_):
    raise OSError(errno.ENOLCK, 'no locks')
fcntl.flock = flock
""",
}
"""Code that makes file locks useless.

"of one host" does what a file system does whose locks are invisible to other hosts.
"""


@pytest.mark.parametrize("locks", NO_LOCKS)
def test_builders_that_do_not_see_each_others_locks_do_no_harm(tmp_path, locks):
    body = "arrays['a'][:] = 5; time.sleep(1.5)"
    processes = [start_process(tmp_path, body, NO_LOCKS[locks]) for _ in range(3)]
    for process in processes:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert output == "building\n", "a process had to build twice, as its files were removed"
    assert list_temporaries(tmp_path) == []


@pytest.mark.parametrize("locks", NO_LOCKS)
def test_many_opens_at_once_without_locks(tmp_path, locks):
    """Four processes that open the same fifty entries at once do not fail.

    Without locks, one process must not remove the manifest that another one is reading.
    """
    body = f"""
{NO_LOCKS[locks]}
import numpy as np
from megatron.data.cache import IndexCache
def build(arrays):
    arrays["a"][:] = 5
shapes = {{"a": (np.int32, (1000,))}}
failed = 0
for number in range(50):
    try:
        cache = IndexCache({str(tmp_path)!r}, [])
        array = cache.open("kind", {{"n": number}}, shapes, build)["a"]
        failed += array.tolist() != [5] * 1000
    except BaseException as error:
        failed += 1
        print(type(error).__name__, error)
assert failed == 0, failed
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, "".join(outputs)
    assert list_temporaries(tmp_path) == []


def test_a_wait_is_reported_and_its_limit_is_an_error(tmp_path, monkeypatch):
    """The error names the lock file and the process that holds it."""
    monkeypatch.setattr(building, "SAY_AFTER_SECONDS", 0.2)
    messages: list[str] = []
    builder = IndexCache(tmp_path, log=messages.append)
    waiting = IndexCache(tmp_path, log=messages.append, wait_seconds=1)
    holder = f"process {os.getpid()} on "
    errors = []

    def build_while_another_waits(arrays):
        with pytest.raises(DataError, match="has been locked by") as raised:
            waiting.open("kind", {"seed": 9}, SHAPES, fill)
        errors.append(str(raised.value))
        fill(arrays)

    started = time.monotonic()
    builder.open("kind", {"seed": 9}, SHAPES, build_while_another_waits)
    assert 1 < time.monotonic() - started < 10
    assert holder in errors[0]
    assert f"lock file {tmp_path}" in errors[0]
    assert "--data-cache-path" in errors[0]
    first_words = sorted(line.split(" the index cache")[0] for line in messages)
    assert first_words == ["building", "waiting for"]
    assert holder in next(line for line in messages if line.startswith("waiting"))


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_in_the_place_of_the_lock_file_empties_nothing(built, tmp_path, link):
    stem = find_stem(built)
    precious = tmp_path / "precious"
    precious.write_text("data of a user")
    for path in built.folder.iterdir():
        path.unlink()
    link(precious, built.folder / f"{stem}.lock")
    assert built.open("kind", {"seed": 1}, SHAPES, fill)["a"].tolist() == list(range(1000))
    assert precious.read_text() == "data of a user"


def write_archive(path):
    np.savez(path.with_suffix(".npz"), a=np.arange(1000, dtype=np.int32))
    os.replace(path.with_suffix(".npz"), path)


def write_pickle(path):
    with open(path, "wb") as file:
        np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def write_nested_header(path):
    header = b"{'descr': " + b"(" * 3000 + b")" * 3000 + b"}"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("kind", ["json", "npy"])
@pytest.mark.parametrize(
    "damage",
    [
        write_archive,
        write_pickle,
        write_nested_header,
        make_pipe,
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text('{"key":' * 100_000),
        lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)),
        lambda path: path.write_text("[]"),
        lambda path: path.write_bytes(os.urandom(5000)),
        lambda path: os.truncate(path, 40),
    ],
)
def test_anything_in_the_place_of_a_file_is_built_again(built, damage, kind):
    damage(next(built.folder.glob(f"*.{kind}")))
    assert built.open("kind", {"seed": 1}, SHAPES, fill)["a"].tolist() == list(range(1000))
    (note,) = built.notes
    assert note.endswith("built again")
    built.open("kind", {"seed": 1}, SHAPES, fail_to_build)


def test_a_change_of_any_byte_of_a_manifest_is_found(built):
    (manifest,) = built.folder.glob("*.json")
    original = manifest.read_bytes()
    for at in range(0, len(original) - 1, 7):
        manifest.write_bytes(original[:at] + bytes([original[at] ^ 1]) + original[at + 1 :])
        # A changed space has no effect on what the manifest holds.
        try:
            changed = json.loads(manifest.read_bytes()) != json.loads(original)
        except ValueError:
            changed = True
        if changed:
            before = len(built.notes)
            built.open("kind", {"seed": 1}, SHAPES, fill)
            assert len(built.notes) == before + 1, at


# 17 MiB, more than what is read completely at the start.
BIG = {"a": (np.int64, (17 << 17,))}


def fill_big(arrays):
    arrays["a"][:] = 3


def verify(folder):
    """Open the entry as a run does. Return what the background check finds, and the notes."""
    background = Background()
    cache = IndexCache(folder, [], background=background)
    cache.open("big", {}, BIG, fill_big)
    assert background.wait(60)
    background.close()
    assert background.take_notes() == []
    return background.problems(), cache.notes


@pytest.mark.parametrize("step", [997, pytest.param(1, marks=pytest.mark.full)])
def test_a_flipped_bit_in_any_block_of_a_large_array_is_found(tmp_path, monkeypatch, step):
    """Samples have 16 bytes, so that the check at the start finds few of the bits."""
    monkeypatch.setattr(cache_module, "SAMPLE_BYTES", 16)
    assert verify(tmp_path) == ([], [])
    (file,) = tmp_path.glob("*.npy")
    (manifest,) = tmp_path.glob("*.json")
    original = manifest.read_bytes()
    for block in range(0, file.stat().st_size // 4096, step):
        at = 200 + 4096 * block + block % 3000
        flip_bit(file, at)
        problems, notes = verify(tmp_path)
        if notes == []:
            assert len(problems) == 1, block
            assert f"{file} is damaged" in problems[0]
            assert not manifest.exists()
            manifest.write_bytes(original)
            flip_bit(file, at)
        else:
            assert "built again" in notes[0]


def flip_bit(file, at):
    with open(file, "rb+") as raw:
        raw.seek(at)
        (value,) = raw.read(1)
        raw.seek(at)
        raw.write(bytes([value ^ 16]))
