"""Tests of the reader of files that somebody else may have made."""

import os
import tracemalloc
from pathlib import Path

import pytest

from megatron.base import outside_file
from megatron.base.outside_file import (
    check_regular,
    iterate_lines,
    load_bytes,
    load_json,
    load_text,
    open_regular,
)


def test_only_regular_files_and_links_to_them_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a\r\nb\rc\n")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "fifo")
    assert load_text(tmp_path / "link") == "a\nb\nc\n"
    for name in ("zero", "fifo"):
        with pytest.raises(OSError, match=f"it is not a regular file: '{tmp_path}/{name}'"):
            check_regular(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        load_bytes(tmp_path)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "link", flags=os.O_NOFOLLOW)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="more than 5 bytes"):
        load_bytes(tmp_path / "file", 5)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_no_file_can_have(name: str) -> None:
    with pytest.raises(OSError, match="its name is not possible"):
        open_regular(name)


def test_a_file_that_has_grown_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a file of /proc is 0 before it is read, as if it grew."""
    path = Path("/proc/self/status")
    assert b"State:" in load_bytes(path)
    with pytest.raises(OSError, match="more than 9 bytes"):
        load_bytes(path, 9)
    (tmp_path / "small").write_bytes(b"x" * 100)
    tracemalloc.start()
    load_bytes(tmp_path / "small", outside_file.INDEX_BYTES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_levels_and_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    for levels in (100, 101, 200_000):
        path.write_text('{"a": [' * (levels // 2) + "[" * (levels % 2) + "0")
        path.write_text(path.read_text() + "]" * (levels % 2) + "]}" * (levels // 2))
        if levels == 100:
            assert list(load_json(path)) == ["a"]
        else:
            with pytest.raises(ValueError, match="nested too deeply, in more than 100 levels"):
                load_json(path)
    path.write_text('["' + "[" * 500 + '"]')
    assert load_json(path) == ["[" * 500]
    monkeypatch.setattr(outside_file, "RECORD_BYTES", 4)
    path.write_text("abc\nabcd")
    assert list(iterate_lines(path)) == [b"abc\n", b"abcd"]
    assert list(iterate_lines(path, 4)) == [b"abcd"]
    path.write_text("abc\nabcd\n")
    with pytest.raises(OSError, match="a line of it has more than 4 bytes"):
        list(iterate_lines(path))
