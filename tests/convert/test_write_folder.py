"""Test that a folder is written by one process at a time, completely or not at all."""

import os
from pathlib import Path

import pytest

from megatron.base.errors import ConfigError
from megatron.extras.interop.convert.tensors import divide_by_size
from megatron.extras.interop.convert.writing import write_folder


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_second_process_is_refused_and_leaves_the_first_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with write_folder(out) as folder:
        (folder / "first").write_text("1")
        with pytest.raises(ConfigError, match="another process is writing"), write_folder(out):
            pytest.fail("two processes write one folder")
        assert list_names(folder) == ["first"]
    assert list_names(tmp_path) == ["out"]
    with pytest.raises(ConfigError, match="exists"), write_folder(out):
        pytest.fail("it exists")
    assert list_names(out) == ["first"]


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("1")
    left = tmp_path / "out.unfinished"
    (left / "part").mkdir(parents=True)
    (left / "part" / "file").write_text("2")
    (left / "link").symlink_to(tmp_path / "kept")
    with write_folder(tmp_path / "out") as folder:
        assert list_names(folder) == []
        (folder / "new").write_text("3")
    assert list_names(tmp_path) == ["kept", "out"]
    assert list_names(tmp_path / "kept") == ["file"]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "part").write_text("1")
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"), write_folder(tmp_path / "out") as folder:
        fail(folder)
    assert list_names(tmp_path) == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("1")
    (tmp_path / "out.unfinished").symlink_to(tmp_path / "kept")
    with pytest.raises(OSError, match=r"out\.unfinished"), write_folder(tmp_path / "out"):
        pytest.fail("the folder of another")
    assert list_names(tmp_path / "kept") == ["file"]
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling")
    with pytest.raises(ConfigError, match="exists"), write_folder(tmp_path / "dangling"):
        pytest.fail("the name is taken")


def test_files_have_at_most_the_bytes_that_are_given() -> None:
    sizes = {"a": 3, "b": 4, "c": 1, "d": 8, "e": 2, "f": 6}
    assert list(divide_by_size(sizes.items(), 7)) == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    assert list(divide_by_size(sizes.items(), 8)) == [["a", "b", "c"], ["d"], ["e", "f"]]
