"""Digests of whole files: computed once, and again whenever the file may have changed."""

import os
import shutil
import subprocess

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


def digested(file, folder):
    """The digest that a run learns of, and whether the file was read for it."""
    read = []
    background = Background()
    digests = ContentDigests(background)
    original = content.digest_of_file
    content.digest_of_file = lambda path: read.append(path) or original(path)
    try:
        digests.request(file, folder)
    finally:
        content.digest_of_file = original
    background.close()
    return digests.known[str(file)], bool(read)


def test_a_digest_is_that_of_xxh128sum_and_is_computed_once(file, tmp_path):
    expected = xxhash.xxh3_128_hexdigest(b"a" * 100_000)
    assert digested(file, tmp_path / "cache") == (expected, True)
    assert digested(file, tmp_path / "cache") == (expected, False)
    assert digested(file, tmp_path / "another") == (expected, True)


def rewritten(path):
    path.write_bytes(b"a" * 99_999 + b"b")


def one_byte_in_place(path):
    with open(path, "rb+") as raw:
        raw.write(b"b")


def copied_over(path):
    other = path.with_name("other")
    other.write_bytes(b"b" * 100_000)
    shutil.copystat(path, other)
    subprocess.run(["cp", "-p", other, path], check=True)


def renamed_over(path):
    """As rsync -t does."""
    other = path.with_name("other")
    other.write_bytes(b"b" * 100_000)
    shutil.copystat(path, other)
    os.replace(other, path)


@pytest.mark.parametrize("alter", [rewritten, one_byte_in_place, copied_over, renamed_over])
def test_a_change_that_keeps_size_and_mtime_is_found(file, tmp_path, alter):
    before = file.stat()
    first, _ = digested(file, tmp_path / "cache")
    alter(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    again, read = digested(file, tmp_path / "cache")
    assert read
    assert again != first


@pytest.mark.parametrize("damage", ["", "[", "[" * 100_000, "{}", None])
def test_a_damaged_record_is_no_digest(file, tmp_path, damage):
    first, _ = digested(file, tmp_path / "cache")
    (record,) = (tmp_path / "cache").iterdir()
    text = record.read_text()
    record.write_text(
        text.replace(first, first[:-1] + ("0" if first[-1] != "0" else "1"))
        if damage is None
        else damage
    )
    assert digested(file, tmp_path / "cache") == (first, True)


def test_a_large_file_is_read_in_the_background_only(file, tmp_path, monkeypatch):
    monkeypatch.setattr(content, "SMALL_BYTES", 10)
    background = Background()
    digests = ContentDigests(background)
    digests.request(file, tmp_path / "cache")
    assert background.wait(30)
    assert digests.known == {str(file): digest_of_file(file)}
    assert DigestFolder(tmp_path / "cache").get(FileIdentity.of(file)) == digest_of_file(file)
    background.close()


def test_a_file_that_vanishes_is_no_finding_but_is_said(file, tmp_path, monkeypatch):
    monkeypatch.setattr(content, "SMALL_BYTES", 10)
    background = Background()
    digests = ContentDigests(background)
    background.submit("first", lambda: file.unlink())
    digests.request(file, tmp_path / "cache")
    assert background.wait(30)
    assert background.problems() == []
    (note,) = background.take_notes()
    assert f"the content of {file} could not be checked" in note
    background.close()


def test_a_folder_that_cannot_be_written_is_said(file, tmp_path):
    (tmp_path / "blocked").write_text("")
    background = Background()
    digests = ContentDigests(background)
    digests.request(file, tmp_path / "blocked" / "cache")
    assert digests.known == {str(file): digest_of_file(file)}
    assert "cannot be kept" in digests.notes[0]
    background.close()


def test_what_changed_a_moment_ago_is_not_kept(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(b"a" * 10)
    assert digested(path, tmp_path / "cache")[1]
    assert digested(path, tmp_path / "cache")[1]
