"""Digests of complete files: computed once, and again whenever the file may have changed."""

import os
import shutil
import subprocess
import threading

import pytest
import xxhash

from megatron.data import content
from megatron.data.background import Background
from megatron.data.content import ContentDigests, DigestFolder, FileIdentity, digest_of_file


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "_SETTLED_NS", 0)
    path = tmp_path / "data.bin"
    path.write_bytes(b"a" * 100_000)
    return path


@pytest.fixture
def background():
    checks = Background()
    yield checks
    checks.close()


def request_digest(file, folder):
    """Return the digest that a run gets, and whether the file was read for it."""
    read = []

    def count_and_digest(path):
        read.append(path)
        return digest_of_file(path)

    background = Background()
    digests = ContentDigests(background)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content, "digest_of_file", count_and_digest)
        digests.request(file, folder)
    background.close()
    return digests.known[str(file)], bool(read)


def test_a_digest_equals_that_of_xxh128sum_and_is_computed_once(file, tmp_path):
    expected = xxhash.xxh3_128_hexdigest(b"a" * 100_000)
    assert request_digest(file, tmp_path / "cache") == (expected, True)
    assert request_digest(file, tmp_path / "cache") == (expected, False)
    assert request_digest(file, tmp_path / "another") == (expected, True)


def test_a_link_to_a_data_file_has_the_digest_of_the_file(file, tmp_path):
    link = tmp_path / "link.bin"
    link.symlink_to(file)
    expected = xxhash.xxh3_128_hexdigest(b"a" * 100_000)
    assert request_digest(link, tmp_path / "cache") == (expected, True)
    assert request_digest(file, tmp_path / "cache") == (expected, False)


def rewrite(path):
    path.write_bytes(b"a" * 99_999 + b"b")


def change_one_byte(path):
    with open(path, "rb+") as raw:
        raw.write(b"b")


def copy_over(path):
    other = path.with_name("other")
    other.write_bytes(b"b" * 100_000)
    shutil.copystat(path, other)
    subprocess.run(["cp", "-p", other, path], check=True)


def rename_over(path):
    """Replace the file as `rsync -t` does."""
    other = path.with_name("other")
    other.write_bytes(b"b" * 100_000)
    shutil.copystat(path, other)
    os.replace(other, path)


@pytest.mark.parametrize("alter", [rewrite, change_one_byte, copy_over, rename_over])
def test_a_change_that_keeps_size_and_mtime_is_found(file, tmp_path, alter):
    before = file.stat()
    first, _ = request_digest(file, tmp_path / "cache")
    alter(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    again, read = request_digest(file, tmp_path / "cache")
    assert read
    assert again != first


@pytest.mark.parametrize("damaged", ["", "[", "[" * 100_000, "{}"])
def test_a_damaged_record_is_replaced(file, tmp_path, damaged):
    first, _ = request_digest(file, tmp_path / "cache")
    (record,) = (tmp_path / "cache").iterdir()
    record.write_text(damaged)
    assert request_digest(file, tmp_path / "cache") == (first, True)


def test_a_record_with_another_digest_is_replaced(file, tmp_path):
    first, _ = request_digest(file, tmp_path / "cache")
    (record,) = (tmp_path / "cache").iterdir()
    last = "1" if first[-1] == "0" else "0"
    record.write_text(record.read_text().replace(first, first[:-1] + last))
    assert request_digest(file, tmp_path / "cache") == (first, True)


def test_a_large_file_is_read_in_the_background_only(file, tmp_path, monkeypatch, background):
    monkeypatch.setattr(content, "SMALL_BYTES", 10)
    digests = ContentDigests(background)
    digests.request(file, tmp_path / "cache")
    assert background.wait(30)
    assert digests.known == {str(file): digest_of_file(file)}
    assert DigestFolder(tmp_path / "cache").get(FileIdentity.of(file)) == digest_of_file(file)


def test_a_file_that_vanishes_is_a_note_and_not_a_problem(file, tmp_path, monkeypatch, background):
    monkeypatch.setattr(content, "SMALL_BYTES", 10)
    digests = ContentDigests(background)
    requested = threading.Event()

    def remove() -> None:
        requested.wait(30)
        file.unlink()

    # The file must still exist when it is requested.
    background.submit("first", remove)
    digests.request(file, tmp_path / "cache")
    requested.set()
    assert background.wait(30)
    assert background.problems() == []
    (note,) = background.take_notes()
    assert f"the content of {file} could not be checked" in note


def test_a_folder_that_cannot_be_written_is_noted(file, tmp_path, background):
    (tmp_path / "blocked").write_text("")
    digests = ContentDigests(background)
    digests.request(file, tmp_path / "blocked" / "cache")
    assert digests.known == {str(file): digest_of_file(file)}
    assert "cannot be stored" in digests.notes[0]


def test_the_digest_of_a_file_that_has_just_changed_is_not_stored(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(b"a" * 10)
    for _ in range(2):
        _, read = request_digest(path, tmp_path / "cache")
        assert read
