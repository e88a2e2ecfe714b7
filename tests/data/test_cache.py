"""Index caches: reused, never half there, rebuilt when damaged, built by one of many processes."""

import fcntl
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from megatron.data import array_file, building
from megatron.data.background import Background
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
    assert all(path.suffix in (".npy", ".json") for path in built.folder.iterdir()), (
        "no lock and no partial file is left"
    )
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
        (
            lambda path: next(path.parent.glob("*.json")).write_text('{"key": 1}'),
            "belongs to another key",
        ),
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
    monkeypatch.setattr(array_file, "WHOLE_BYTES", 100)
    monkeypatch.setattr(array_file, "SAMPLE_BYTES", 10)
    built.open("kind", {"seed": 3}, SHAPES, fill)
    built.open("kind", {"seed": 3}, SHAPES, never)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"file/cache cannot be written \(Not a directory\).*--data-cache-path"
    ):
        IndexCache(tmp_path / "file" / "cache").open("kind", {}, SHAPES, fill)


def test_without_file_locks_it_is_built_all_the_same(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
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
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert "".join(said) == "built\n"


def temporaries(folder):
    return sorted(path.name for path in folder.glob("*.partial"))


def test_what_another_host_abandoned_is_removed_by_the_clock_of_the_file_system(built, tmp_path):
    stem = next(built.folder.glob("*.json")).stem
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
    assert temporaries(built.folder) == sorted([names[5], names[3500], "mine.bin.partial"])


def program(folder, body="arrays['a'][:] = 5", before=""):
    """A process that opens an entry of 4 MB."""
    text = f"""
import os, sys, time, numpy as np
{before}
from megatron.data.cache import IndexCache
def build(arrays):
    print("building", flush=True)
    {body}
cache = IndexCache({str(folder)!r}, wait_seconds=WAIT if "WAIT" in globals() else 60)
array = cache.open("kind", {{}}, {{"a": (np.int32, (1_000_000,))}}, build)["a"]
assert array.min() == array.max() == 5
"""
    return subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_killed_builder_is_replaced_and_what_it_left_is_removed(tmp_path):
    killed = program(tmp_path, "time.sleep(100)")
    assert killed.stdout.readline() == "building\n"
    waiting = program(tmp_path)
    assert len(temporaries(tmp_path)) == 1
    killed.kill()
    killed.communicate()
    said, errors = waiting.communicate(timeout=60)
    assert (waiting.returncode, said) == (0, "building\n"), errors
    assert temporaries(tmp_path) == []


# As where a lock is known to one host only: each builder is alone with its lock.
NO_LOCKS = {
    "of one host": "import fcntl; fcntl.flock = lambda *_: None",
    "unsupported": "import fcntl, errno\ndef flock(*_): raise OSError(errno.ENOLCK, 'no locks')\nfcntl.flock = flock",
}


@pytest.mark.parametrize("locks", NO_LOCKS)
def test_builders_that_do_not_see_each_others_locks_do_no_harm(tmp_path, locks):
    body = "arrays['a'][:] = 5; time.sleep(1.5)"
    processes = [program(tmp_path, body, NO_LOCKS[locks]) for _ in range(3)]
    for process in processes:
        said, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert said == "building\n", "once: nobody removed what it was writing"
    assert temporaries(tmp_path) == []


@pytest.mark.parametrize("locks", NO_LOCKS)
def test_many_opens_at_once_without_locks(tmp_path, locks):
    """Four processes open the same fifty entries; without locks the manifest of one must not vanish under another."""
    body = f"""
{NO_LOCKS[locks]}
import numpy as np
from megatron.data.cache import IndexCache
def build(arrays):
    arrays["a"][:] = 5
failed = 0
for number in range(50):
    try:
        array = IndexCache({str(tmp_path)!r}, []).open("kind", {{"n": number}}, {{"a": (np.int32, (1000,))}}, build)["a"]
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
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, "".join(said)
    assert temporaries(tmp_path) == []


def test_a_wait_is_said_and_has_a_limit_that_names_lock_file_and_holder(built, monkeypatch):
    monkeypatch.setattr(building, "SAY_AFTER_SECONDS", 0.2)
    said = []
    cache = IndexCache(built.folder, say=said.append, wait_seconds=1)
    started = time.monotonic()

    def build_and_wait(arrays):
        with pytest.raises(
            DataError, match=rf"process {os.getpid()} on .*lock file .*\.lock\).*--data-cache-path"
        ):
            cache.open("kind", {"seed": 9}, SHAPES, fill)
        fill(arrays)

    built._say = said.append
    built.open("kind", {"seed": 9}, SHAPES, build_and_wait)
    assert 1 < time.monotonic() - started < 10
    assert sorted(line.split(" the index cache")[0] for line in said) == ["building", "waiting for"]
    assert f"process {os.getpid()} on " in next(line for line in said if line.startswith("waiting"))


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_in_the_place_of_the_lock_file_empties_nothing(built, tmp_path, link):
    stem = next(built.folder.glob("*.json")).stem
    precious = tmp_path / "precious"
    precious.write_text("data of somebody")
    for path in built.folder.iterdir():
        path.unlink()
    link(precious, built.folder / f"{stem}.lock")
    assert built.open("kind", {"seed": 1}, SHAPES, fill)["a"].tolist() == list(range(1000))
    assert precious.read_text() == "data of somebody"


def zipped(path):
    np.savez(path.with_suffix(".npz"), a=np.arange(1000, dtype=np.int32))
    os.replace(path.with_suffix(".npz"), path)


def pickled(path):
    with open(path, "wb") as file:
        np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def nested_header(path):
    header = b"{'descr': " + b"(" * 3000 + b")" * 3000 + b"}"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("of", ["json", "npy"])
@pytest.mark.parametrize(
    "damage",
    [
        zipped,
        pickled,
        nested_header,
        pipe,
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text('{"key":' * 100_000),
        lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)),
        lambda path: path.write_text("[]"),
        lambda path: path.write_bytes(os.urandom(5000)),
        lambda path: os.truncate(path, 40),
    ],
)
def test_whatever_stands_in_a_files_place_is_built_again(built, damage, of):
    damage(next(built.folder.glob(f"*.{of}")))
    assert built.open("kind", {"seed": 1}, SHAPES, fill)["a"].tolist() == list(range(1000))
    assert len(built.notes) == 1
    assert built.notes[0].endswith("built again")
    built.open("kind", {"seed": 1}, SHAPES, never)


def test_every_byte_of_a_manifest_counts(built):
    (manifest,) = built.folder.glob("*.json")
    whole = manifest.read_bytes()
    for at in range(0, len(whole) - 1, 7):
        manifest.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        same = json.loads(whole)
        try:
            changed = json.loads(manifest.read_bytes()) != same
        except ValueError:
            changed = True
        if changed:
            before = len(built.notes)
            built.open("kind", {"seed": 1}, SHAPES, fill)
            assert len(built.notes) == before + 1, at


BIG = {"a": (np.int64, (17 << 17,))}  # 17 MiB, above the limit of what is read at the start


def verify(folder):
    """Open the entry as a run does; return what the background check finds."""
    background = Background()
    cache = IndexCache(folder, [], background=background)
    cache.open("big", {}, BIG, lambda arrays: arrays["a"].__setitem__(slice(None), 3))
    assert background.wait(60)
    background.close()
    assert background.take_notes() == []
    return background.problems(), cache.notes


@pytest.mark.parametrize("step", [211, pytest.param(1, marks=pytest.mark.full)])
def test_a_flipped_bit_in_any_block_of_a_large_array_is_found(tmp_path, monkeypatch, step):
    """Samples of 16 bytes, so that the check at the start finds few of them."""
    monkeypatch.setattr(array_file, "SAMPLE_BYTES", 16)
    assert verify(tmp_path) == ([], [])
    (file,) = tmp_path.glob("*.npy")
    (manifest,) = tmp_path.glob("*.json")
    whole = manifest.read_bytes()
    for block in range(0, file.stat().st_size // 4096, step):
        at = 200 + 4096 * block + block % 3000
        flip_bit(file, at)
        problems, notes = verify(tmp_path)
        if notes == []:
            assert len(problems) == 1, block
            assert f"{file} is damaged" in problems[0]
            assert not manifest.exists()
            manifest.write_bytes(whole)
            flip_bit(file, at)
        else:
            assert "built again" in notes[0]


def flip_bit(file, at):
    with open(file, "rb+") as raw:
        raw.seek(at)
        (value,) = raw.read(1)
        raw.seek(at)
        raw.write(bytes([value ^ 16]))
