"""Manifests and lineages that were altered, with and without a matching digest."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import CheckpointError, DamagedError
from megatron.checkpoint.digest import digest_of_text
from megatron.checkpoint.folder import step_folder
from megatron.checkpoint.lineage import (
    LINEAGE_FILE,
    UNPUBLISHED_FILE,
    LineageEntry,
    find_lineage_before,
    find_run_lineage,
    is_entry_on_disk,
    make_entry,
    write_lineage,
)
from megatron.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    Manifest,
    TensorIndex,
    collect_digests,
    manifest_of_text,
    read_checked_text,
    read_manifest,
    read_text,
)

FILES = {INDEX: {"bytes": 2, "xxh128": digest_of_text("{}")}}
EARLIER: list[list[Any]] = [[2, "a" * 32, False, 2], [4, "b" * 32, True, 4]]


def make_manifest(iteration: int = 6, **changed: Any) -> Manifest:
    course: list[list[Any]] = [list(entry) for entry in EARLIER]
    fields: dict[str, Any] = {"files": FILES, "course": course, "keep": False} | changed
    return Manifest(iteration, "1", "1 rank", {"applied_steps": 6}, None, **fields)


def store(root: Path, manifest: Manifest) -> Path:
    folder = step_folder(root, manifest.iteration)
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(manifest.dump_json())
    return folder


def nest(depth: int = 100_000) -> str:
    """Return JSON text that exhausts the recursion of Python's parser."""
    return "[" * depth + "]" * depth


def do_nothing() -> None:
    """Confirm that a file may be replaced."""


@pytest.mark.parametrize(
    ("number", "way_out"),
    [(1, "load it with the version that wrote it"), (5, "update this installation")],
)
def test_manifest_of_an_unknown_format_names_the_way_out(number: int, way_out: str) -> None:
    text = make_manifest(format=number).dump_json()
    with pytest.raises(CheckpointError) as refused:
        manifest_of_text(text, Path("step"))
    assert not isinstance(refused.value, DamagedError)
    assert str(refused.value) == (
        f"step has format {number}; this version reads formats 2 to 4: {way_out}"
    )


def test_unknown_format_that_the_digest_does_not_confirm_is_damage() -> None:
    record = json.loads(make_manifest().dump_json()) | {"format": 5}
    with pytest.raises(DamagedError, match="its own digest field is"):
        manifest_of_text(json.dumps(record), Path("step"))


@pytest.mark.parametrize("text", ["", "[]", "{", nest()])
def test_manifest_that_is_no_object_is_damage(text: str) -> None:
    with pytest.raises(DamagedError, match=r"manifest\.json is not what was written") as damage:
        manifest_of_text(text, Path("step"))
    assert damage.value.file == MANIFEST


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"files": ["index.json"]}, "it has no 'files' or no 'course'"),
        ({"course": {}}, "it has no 'files' or no 'course'"),
        ({"files": {"../x": FILES[INDEX]}}, "names the file '../x'; a checkpoint has plain file"),
        ({"files": {"a\\b": FILES[INDEX]}}, "plain file names only, without separators"),
        ({"files": {"a\nb": FILES[INDEX]}}, "names the file 'a\\nb'"),
        ({"files": {MANIFEST: FILES[INDEX]}}, "names the file 'manifest.json'"),
        ({"files": {"": FILES[INDEX]}}, "names the file ''"),
        ({"files": {INDEX: 3}}, "index.json has no size or digest"),
        ({"files": {INDEX: {"bytes": -1, "xxh128": ""}}}, "index.json has no size or digest"),
        ({"files": {INDEX: {"bytes": True, "xxh128": ""}}}, "index.json has no size or digest"),
        ({"files": {INDEX: {"bytes": 2}}}, "index.json has no size or digest"),
        ({"iteration": "../../x"}, "'../../x' is not an iteration"),
        ({"iteration": True}, "True is not an iteration"),
        ({"course": [["../x", "a", False, 1]]}, "'../x' is not an iteration"),
        ({"course": [[1, "a"]]}, "None is not an iteration"),
    ],
)
def test_manifest_with_a_matching_digest_names_nothing_outside_its_folder(
    changed: dict[str, Any], message: str
) -> None:
    """An attacker can write a digest that fits, so the values are checked too."""
    with pytest.raises(DamagedError) as damage:
        manifest_of_text(make_manifest(**changed).dump_json(), Path("step"))
    assert message in str(damage.value)
    assert damage.value.file == MANIFEST


def test_index_is_read_only_if_the_manifest_confirms_it(tmp_path: Path) -> None:
    manifest = make_manifest()
    (tmp_path / INDEX).write_text("{}")
    assert read_checked_text(tmp_path, INDEX, manifest) == "{}"
    (tmp_path / INDEX).write_text("{ }")
    with pytest.raises(DamagedError, match=r"index\.json is not what was written"):
        read_checked_text(tmp_path, INDEX, manifest)
    with pytest.raises(DamagedError, match=r"manifest\.json does not name config\.yaml"):
        read_checked_text(tmp_path, "config.yaml", manifest)


def test_index_names_only_files_of_the_manifest() -> None:
    boxes = [{"file": "../other", "begin": 0, "offset": [0], "shape": [1]}]
    index = TensorIndex({"weight/a": {"shape": [1], "boxes": boxes}}, {})
    with pytest.raises(DamagedError, match=r"index\.json names '\.\./other', which manifest"):
        collect_digests(make_manifest(), index)


def test_missing_and_undecodable_files_are_damage_and_other_errors_are_not(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=r"index\.json is missing"):
        read_text(tmp_path, INDEX)
    (tmp_path / INDEX).write_bytes(b"\xff\xfe")
    with pytest.raises(DamagedError, match=r"index\.json is not what was written: 'utf-8' codec"):
        read_text(tmp_path, INDEX)
    with pytest.raises(DamagedError, match=r"x is missing"):
        read_text(tmp_path / INDEX, "x")
    (tmp_path / "folder").mkdir()
    # Any other error may be temporary, so the checkpoint does not count as damaged.
    with pytest.raises(CheckpointError, match="fix the file system or the permissions") as refused:
        read_text(tmp_path, "folder")
    assert not isinstance(refused.value, DamagedError)


def test_lineage_comes_from_its_copy_if_the_manifest_is_damaged(tmp_path: Path) -> None:
    manifest = make_manifest()
    folder = store(tmp_path, manifest)
    write_lineage(tmp_path, manifest, do_nothing)
    expected = tuple(LineageEntry(*entry) for entry in EARLIER)
    assert find_lineage_before(tmp_path, 6) == expected
    (folder / MANIFEST).write_text("damaged")
    assert find_lineage_before(tmp_path, 6) == expected
    # The copy belongs to iteration 6 and to no other.
    assert find_lineage_before(tmp_path, 5) is None


def sign(course: Any) -> str:
    record = {"iteration": 6, "course": course}
    return json.dumps({**record, "digest": digest_of_text(json.dumps(record))})


@pytest.mark.parametrize(
    "text",
    [
        sign([["../x", "a", False, 1]]),
        sign([[1]]),
        sign(3),
        sign(EARLIER).replace("true", "false"),
        "[]",
        "{}",
        nest(),
    ],
)
def test_damaged_copy_of_the_lineage_is_not_used(tmp_path: Path, text: str) -> None:
    (tmp_path / LINEAGE_FILE).write_text(text)
    assert find_lineage_before(tmp_path, 6) is None


def test_folder_that_was_renamed_by_hand_has_no_lineage(tmp_path: Path) -> None:
    folder = store(tmp_path, make_manifest())
    folder.rename(step_folder(tmp_path, 7))
    assert find_lineage_before(tmp_path, 7) is None


def test_unpublished_checkpoints_of_the_run_follow_in_its_lineage(tmp_path: Path) -> None:
    """Records of checkpoints that are gone, damaged or of another run are passed over."""
    first = make_manifest()
    store(tmp_path, first)
    course = [*EARLIER, [6, first.digest, False, 6]]
    second = make_manifest(8, course=course)
    store(tmp_path, second)
    foreign = make_manifest(10, course=[[1, "c" * 32, False, 1]])
    store(tmp_path, foreign)
    damaged = store(tmp_path, make_manifest(12, course=course))
    (damaged / MANIFEST).write_text("damaged")
    records = [[8, second.digest], [10, foreign.digest], [12, "d" * 32], [14, "e" * 32]]
    (tmp_path / UNPUBLISHED_FILE).write_text(json.dumps(records))
    found = find_run_lineage(tmp_path, first)
    assert [entry.iteration for entry in found] == [2, 4, 6, 8]
    assert found[-1].digest == second.digest
    (tmp_path / UNPUBLISHED_FILE).write_text(nest())
    assert [entry.iteration for entry in find_run_lineage(tmp_path, first)] == [2, 4, 6]


def test_entry_is_on_disk_only_if_its_manifest_proves_it(tmp_path: Path) -> None:
    manifest = make_manifest()
    folder = store(tmp_path, manifest)
    entry = make_entry(manifest)
    assert is_entry_on_disk(tmp_path, entry)
    assert not is_entry_on_disk(tmp_path, LineageEntry(6, "f" * 32, False))
    (folder / MANIFEST).write_text(make_manifest(format=5).dump_json())
    assert not is_entry_on_disk(tmp_path, entry)
    (folder / MANIFEST).write_text("damaged")
    assert not is_entry_on_disk(tmp_path, entry)
    (folder / MANIFEST).unlink()
    assert not is_entry_on_disk(tmp_path, entry)
    # An I/O error proves nothing, so the caller must hear of it before it removes anything.
    (folder / MANIFEST).mkdir()
    with pytest.raises(OSError, match="cannot be read"):
        is_entry_on_disk(tmp_path, entry)


def test_manifest_survives_its_text(tmp_path: Path) -> None:
    manifest = make_manifest()
    assert read_manifest(store(tmp_path, manifest)) == manifest
