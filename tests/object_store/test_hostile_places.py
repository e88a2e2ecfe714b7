"""Full disks, deleted buckets, foreign objects, odd keys and wrong clocks."""

import http.client
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint.test_save_and_load import file_size_limit
from object_store.conftest import BUCKET
from object_store.jobs import Stored
from object_store.one_process import PlayedRun

from megatron.base.errors import CheckpointError
from megatron.checkpoint import lease
from megatron.extras.object_store import objects, writer
from megatron.extras.object_store.objects import ObjectFolder

pytestmark = pytest.mark.usefixtures("one_client")


def send(port: int, method: str, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(method, path)
    connection.getresponse().read()
    connection.close()


def test_a_full_disk_in_the_middle_of_a_save(address: str, tmp_path: Path) -> None:
    run = PlayedRun(address, tmp_path / "a")
    assert run.save(2)
    for size in (100_000, 1000):
        with file_size_limit(size):
            assert not run.save(4)
        assert "File too large" in run.log[-1]
        assert f"saving iteration 4 to {address} failed" in run.log[-1]
        assert list(run.store._claimed.iterdir()) == []
        Stored(address).check(2)
    assert run.save(5)
    run.end()
    Stored(address).check(2, 5)


def test_a_bucket_that_is_deleted_in_the_middle(
    address: str, tmp_path: Path, moto_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_FRESH_SECONDS", 0.0)
    bucket = f"short-{os.getpid()}"
    place = address.replace(BUCKET, bucket, 1)
    send(moto_port, "PUT", f"/{bucket}")
    run = PlayedRun(place, tmp_path / "a")
    assert run.save(2)
    folder = ObjectFolder(place)
    folder.delete(folder.list())
    send(moto_port, "DELETE", f"/{bucket}")
    assert not run.save(4)
    assert f"the bucket {bucket} does not exist; create it" in run.log[-1]
    # An empty bucket with this name does not have what the run has made visible.
    send(moto_port, "PUT", f"/{bucket}")
    with pytest.raises(CheckpointError, match=r"lease.json was deleted, perhaps with its bucket"):
        run.save(5)
    run.kill()


def test_a_lease_is_renewed_at_most_once_in_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: clock.now))
    tags: list[str | None] = []

    def write_if(key: str, body: bytes, tag: str | None) -> str:
        tags.append(tag)
        return f"tag {len(tags)}"

    store: Any = SimpleNamespace(write_if=write_if, read_tagged=lambda key: None)
    held = writer.StoreLease.acquire_both(tmp_path, store, 0, print)
    for clock.now, writes in ((100.9, 1), (101.1, 2), (102.0, 2), (102.2, 3)):
        held.confirm()
        assert len(tags) == writes
    held.release()
    assert tags == [None, "tag 1", "tag 2", "tag 3"]


@pytest.mark.parametrize("number", [45, pytest.param(10_000, marks=pytest.mark.full)])
def test_many_foreign_objects_below_the_prefix(
    number: int,
    address: str,
    tmp_path: Path,
    moto_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if number < 100:
        monkeypatch.setattr(objects, "_PER_REQUEST", 10)
    places = ("", "local/", "global_step1/", "global_step2-1-zz/", "rolled-back/x/")
    path = address.removeprefix("s3:/")
    for index in range(number):
        send(moto_port, "PUT", f"{path}/{places[index % 5]}foreign-{index}")
    with pytest.raises(CheckpointError, match=r"latest.json does not exist"):
        PlayedRun(address, tmp_path / "a")
    run = PlayedRun(address, tmp_path / "a", allow_fresh_start=True)
    for iteration in (1, 2, 3):
        assert run.save(iteration)
    run.end()
    run = PlayedRun(address, tmp_path / "b")
    assert run.iteration == 3
    run.end()
    folder = ObjectFolder(address)
    kept = [key for key in folder.list() if "foreign-" in key]
    assert len(kept) == number
    assert not list((tmp_path / "b").rglob("foreign-*"))
    folder.delete(kept)
    Stored(address).check(2, 3)


@pytest.mark.parametrize("name", ["mein Lauf", "über/straße 1", "a+b%20c&d=e", "(x)~'!*;"])
def test_keys_with_spaces_umlauts_and_signs(address: str, tmp_path: Path, name: str) -> None:
    place = f"{address}/{name}"
    run = PlayedRun(place, tmp_path / "a")
    assert run.save(1)
    assert run.save(2)
    assert run.save(3)
    run.end()
    run = PlayedRun(place, tmp_path / "b", tmp_path / "a")
    assert run.iteration == 3
    run.end()
    Stored(place).check(2, 3)


def test_a_clock_that_is_an_hour_wrong(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.3)
    boots = iter(range(1 << 30))
    monkeypatch.setattr(lease, "read_process_space", lambda: f"boot-{next(boots)}")
    original = time.time
    for iteration, wrong in enumerate((0, 3600, -3600), 1):
        monkeypatch.setattr(time, "time", lambda wrong=wrong: original() + wrong)
        run = PlayedRun(address, tmp_path / str(iteration))
        assert run.iteration == iteration - 1
        assert run.save(iteration)
        # The next host sees no renewal, whatever its clock shows.
        run.kill()
    monkeypatch.setattr(time, "time", original)
    assert Stored(address).root["latest"] == "global_step3"
