"""The local folders and staging folders of hosts: what the store says always wins."""

import json
import os
import shutil
from pathlib import Path

import pytest
from object_store.faulty_proxy import FaultyProxy
from object_store.jobs import Stored
from object_store.one_process import PlayedRun, check_load

from megatron.base.errors import CheckpointError
from megatron.config.checkpoint import CheckpointConfig
from megatron.extras.object_store import objects
from megatron.extras.object_store.mirror import STAGING
from megatron.extras.object_store.objects import ObjectFolder
from megatron.extras.object_store.store import LoadedStore
from megatron.extras.operations.commands import rollback
from megatron.parallel.ranks import Ranks

pytestmark = pytest.mark.usefixtures("one_client")
NO_RECORDS = ["--tensorboard-dir", "nowhere", "--metrics-file", "nowhere"]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PART", 64 << 10)


def flip(path: Path, at: int = -9) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def play(address: str, local: Path, *iterations: int, other: Path | None = None) -> PlayedRun:
    """Start, save some iterations, and end."""
    run = PlayedRun(address, local, other)
    for iteration in iterations:
        assert run.save(iteration), run.log
    run.end()
    return run


def test_damaged_local_copies_are_read_again(address: str, tmp_path: Path) -> None:
    local = tmp_path / "a"
    play(address, local, 2, 4)
    damaged = [
        (
            "manifest.json",
            "config.yaml",
            "../course.json",
            "../latest",
            "../global_step2/manifest.json",
        ),
        ("stored_as",),
        ("../last_writer", "config.yaml"),
    ]
    for names in damaged:
        for name in names:
            flip(local / "global_step4" / name)
        run = play(address, local)
        assert run.iteration == 4, run.log
        assert not [line for line in run.log if "damaged" in line]
    Stored(address).check(2, 4)


def test_damage_in_the_staging_folder_is_downloaded_again(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.extras.object_store import ranges

    play(address, tmp_path / "a", 2)
    original = ranges.fetch_blocks
    left = [1]

    def damage(*arguments: object) -> None:
        original(*arguments)  # type: ignore[arg-type]
        if left.pop() if left else 0:
            flip(next(Path(str(arguments[-1])).glob("*.safetensors")))

    monkeypatch.setattr(ranges, "fetch_blocks", damage)
    run = PlayedRun(address, tmp_path / "a")
    assert run.iteration == 2
    assert not left
    # A disk that damages each copy is named, and not the object.
    left += [1, 1]
    assert run.checkpoint is not None
    with pytest.raises(CheckpointError, match="has other bytes than the intact object s3://"):
        check_load(run.store, run.checkpoint)
    run.end()
    Stored(address).check(2)


def test_the_store_wins_over_a_stale_folder_of_any_host(address: str, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    play(address, first, 2, 4)
    play(address, second)
    assert rollback.main([address, "--to", "2", *NO_RECORDS]) == 0
    # Another checkpoint of iteration 4. The first host still has the folder of the earlier one.
    play(address, second, 4, other=first)
    run = play(address, second, other=first)
    assert run.iteration == 4
    assert play(address, first, other=second).iteration == 4


def test_a_folder_of_another_address_is_refused(address: str, tmp_path: Path) -> None:
    play(address, tmp_path / "a", 2)
    with pytest.raises(CheckpointError, match="Give each run a --local-dir of its own"):
        PlayedRun(address + "-other", tmp_path / "a")


def test_pointers_among_the_records_do_nothing(address: str, tmp_path: Path) -> None:
    local = tmp_path / "a"
    play(address, local, 2, 4)
    (local / "metrics.jsonl").write_text("{}\n")
    (local / "tb").mkdir()
    (local / "tb" / "events.out.tfevents.1.host").write_bytes(b"1")
    (local / "notes.txt").write_text("mine")
    (local / "no_checkpoint_yet.new").write_text("x")
    play(address, local)
    folder = ObjectFolder(address)
    assert sorted(folder.list("local/")) == [
        "local/metrics.jsonl",
        "local/tb/events.out.tfevents.1.host",
    ]
    # Somebody copies the local folder to the bucket, with older pointers.
    (local / "latest").write_text("global_step2")
    (local / "latest_checkpointed_iteration.txt").write_text("2")
    keys = Stored(address).root["folders"]["global_step4"]
    for path in local.rglob("*"):
        if path.is_file():
            folder.write(f"local/{path.relative_to(local)}", path.read_bytes())
    folder.write(f"{keys}/stored_as", b"x" * 10)
    run = play(address, tmp_path / "new")
    assert run.iteration == 4
    assert any("is no record of a run" in line for line in run.log)
    assert not (tmp_path / "new" / "notes.txt").exists()
    assert (tmp_path / "new" / "metrics.jsonl").read_text() == "{}\n"
    assert play(address, tmp_path / "new").iteration == 4


def test_runs_that_share_a_staging_folder(address: str, tmp_path: Path) -> None:
    staging = str(tmp_path / "stage")
    runs = [PlayedRun(f"{address}-{name}", tmp_path / name, save_staging=staging) for name in "ab"]
    for iteration in (1, 2):
        for run in runs:
            folder = run.store.stage(tmp_path / f"global_step{iteration}.unfinished")
            (folder / "kept").write_text("x")
        for run in runs:
            assert (run.store._claimed / "kept").is_file()
            assert run.save(iteration)
    # A cleaner of temporary files removes a folder.
    runs[0].store._claimed.rmdir()
    assert runs[0].save(3)
    for run in runs:
        run.end()
    # What a killed process has left is removed, and what a living one has is not.
    left = tmp_path / "stage" / f"{runs[0].store._claimed.name[:-8]}deadbeef"
    left.mkdir()
    (left / "f").write_text("x")
    late = PlayedRun(f"{address}-c", tmp_path / "c", save_staging=staging)
    late.save(1)
    late.end()
    assert not left.exists()
    assert runs[0].store._claimed.is_dir()
    Stored(f"{address}-a").check(2, 3)
    Stored(f"{address}-b").check(1, 2)


def test_a_staging_folder_may_be_removed_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run that starts meanwhile takes it for one that a killed process has left."""
    config = CheckpointConfig(local_dir=str(tmp_path))
    lost: list[Path] = []
    original = os.open

    def lose_once(path: Path, *arguments: int) -> int:
        if not lost and path.parent.name == STAGING:
            lost.append(path)
            path.rmdir()
        return original(path, *arguments)

    monkeypatch.setattr(os, "open", lose_once)
    claimed = LoadedStore(config, Ranks())._claimed
    assert claimed.is_dir()
    assert lost != [claimed]
    assert not lost[0].exists()


@pytest.mark.parametrize("size", [1000, 200 << 10])
def test_a_file_that_has_changed_is_not_stored(
    address: str, tmp_path: Path, size: int, proxy: FaultyProxy
) -> None:
    import xxhash

    path = tmp_path / "f"
    path.write_bytes(bytes(size))
    digest = xxhash.xxh3_128_hexdigest(bytes(size))
    folder = ObjectFolder(address)
    folder.upload(path, "f", digest)
    assert folder.read("f") == bytes(size)
    flip(path)
    with pytest.raises(OSError, match=r"f is not what was written, so s3://\S+/g is not stored"):
        folder.upload(path, "g", digest)
    assert folder.list() == {"f": size}


def test_a_lost_root_and_lease_leave_no_objects(address: str, tmp_path: Path) -> None:
    for name in "abc":
        play(address, tmp_path / name, 2)
    folder = ObjectFolder(address)
    assert json.loads(folder.read("lease.json"))["generation"] == 3
    folder.delete(["latest.json", "lease.json"])
    for name in "abc":
        shutil.rmtree(tmp_path / name)
    with pytest.raises(CheckpointError, match="give --allow-fresh-start"):
        PlayedRun(address, tmp_path / "d")
    run = PlayedRun(address, tmp_path / "d", allow_fresh_start=True)
    assert run.save(1)
    run.end()
    Stored(address).check(1)
