"""Runs on a store that are killed, stopped, or whose store fails: nothing is lost or half visible.

The proxy holds one request, and the run is killed or stopped at that point. With small parts, a
save has about thirty requests.
"""

import os
import re
import uuid
from pathlib import Path

import pytest
from faults.launches import ERROR, Launch, loaded_line
from object_store.faulty_proxy import Fault, FaultyProxy
from object_store.jobs import NewStoreJob, Stored, StoreJob, saved_lines

from megatron.observe.metrics import read_metrics

SMALL_PARTS = {"megatron.extras.object_store.objects.PART": 256 << 10}
KEEP = "--keep-latest-checkpoints 2"


def on_another_host() -> str:
    """Take the place of `read_process_space`."""
    return "another-boot/pid:[1]"


ELSEWHERE = {"megatron.checkpoint.lease.read_process_space": on_another_host}


def wait_for_fault(launch: Launch, fault: Fault) -> None:
    launch.wait_for(fault.met.is_set, "the request that is held")


def check_visible(stored: Stored, at_least: int) -> int:
    """Check that each checkpoint that `latest.json` names is whole. Return the newest one."""
    import json

    import xxhash

    root = stored.root
    for name, keys in root["folders"].items():
        files = stored.read_files(f"{keys}/")
        for file, facts in json.loads(files["manifest.json"])["files"].items():
            assert xxhash.xxh3_128_hexdigest(files[file]) == facts["xxh128"], (name, file)
    latest = int((root["latest"] or "global_step0").removeprefix("global_step"))
    assert latest >= at_least
    assert latest == 0 or root["latest"] in root["folders"]
    return latest


@pytest.mark.parametrize("points", [6, pytest.param(50, marks=pytest.mark.full)])
def test_kills_at_many_points_of_uploads(
    points: int, new_store_job: NewStoreJob, proxy: FaultyProxy, address: str
) -> None:
    iterations = points + 6
    flags = f"--train-iters {iterations} --save-interval 1 {KEEP} --async-save"
    job = new_store_job(flags)
    stored = Stored(address)
    saved = 0
    for number in range(points):
        # Spread over the about sixty requests of two saves. The first points have the empty run.
        fault = proxy.add(
            "hold" if number % 2 else "hold_reply",
            part=f"{address.removeprefix('s3:/')}/" if number % 3 else "",
            skip=20 + round(number * 60 / points),
        )
        launch = job.launch(constants=SMALL_PARTS)
        wait_for_fault(launch, fault)
        assert launch.kill() == [0]
        proxy.faults.clear()
        fault.over.set()
        assert loaded_line(launch.output()) >= saved
        saved = check_visible(stored, max(saved_lines(launch.output()), default=saved))
    output = job.succeed(constants=SMALL_PARTS)
    assert loaded_line(output) == saved
    stored.check(iterations - 1, iterations)
    whole = new_store_job(flags, place=address + "-whole")
    whole.succeed()
    assert job.curve() == whole.curve()


@pytest.mark.full
@pytest.mark.parametrize("points", [6, 60])
def test_kills_of_single_ranks_and_of_all_in_saves_and_loads(
    points: int, new_store_job: NewStoreJob, proxy: FaultyProxy, address: str, tmp_path: Path
) -> None:
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 2"
    flags = f"--train-iters {points + 6} --save-interval 1 {KEEP} --async-save {layout}"
    job = new_store_job(flags, 4)
    stored = Stored(address)
    saved = 0
    for number in range(points):
        # A start has about 20 requests and 4 for each rank that loads, a save about 20.
        fault = proxy.add("hold" if number % 2 else "hold_reply", skip=8 + number * 37 % 90)
        launch = job.launch()
        wait_for_fault(launch, fault)
        victims = list(range(4)) if number % 3 == 0 else [number % 4]
        launch.kill(victims)
        proxy.faults.clear()
        fault.over.set()
        # The others end by themselves.
        assert all(launch.codes()), launch.all_output()
        assert loaded_line(launch.output()) in (0, *range(saved, points + 6))
        last = max(saved_lines(launch.output()), default=saved)
        # The first launches may end before the first save.
        saved = check_visible(stored, last) if last else 0
        # The next launch has other hosts in every second case.
        job.hosts = f"hosts_{number % 2}"
    job.succeed()
    stored.check(points + 5, points + 6)
    disk = new_store_job(flags, 4, str(tmp_path / "disk"))
    disk.succeed()
    whole = {
        entry["iteration"]: (entry["lm_loss"], entry["grad_norm"])
        for entry in read_metrics(tmp_path / "disk" / "metrics.jsonl")
    }
    assert job.curve().items() <= whole.items()
    assert sorted(job.curve())[-1] == points + 6


@pytest.mark.parametrize(
    "part", ["latest.json", pytest.param("config.yaml", marks=pytest.mark.full)]
)
def test_a_stopped_writer_cannot_publish_after_a_takeover(
    part: str, new_store_job: NewStoreJob, proxy: FaultyProxy, address: str
) -> None:
    flags = f"--train-iters 4 --save-interval 2 {KEEP}"
    first = new_store_job(flags)
    # The writes of the start pass: the probe, the lease and the first `latest.json`.
    fault = proxy.add("hold", "PUT", part, skip=1 if part == "latest.json" else 0, times=1)
    stopped = first.launch(constants={**ELSEWHERE, **SMALL_PARTS})
    wait_for_fault(stopped, fault)
    with stopped.frozen():
        fault.over.set()
        second = new_store_job(flags)
        output = second.succeed()
        assert "waiting up to 2 s for a renewal" in output
        assert "which is gone; this run takes the address over" in output
        assert saved_lines(output) == [2, 4]
        before = Stored(address).root
    assert stopped.codes()[0] == ERROR, stopped.all_output()
    assert "taken over by" in stopped.output()
    assert saved_lines(stopped.output()) == []
    assert Stored(address).root == before
    # The next start removes what the stopped run uploaded after its end.
    second.succeed()
    Stored(address).check(2, 4)


def test_a_second_run_at_an_address_is_refused(
    new_store_job: NewStoreJob, proxy: FaultyProxy, address: str
) -> None:
    first = new_store_job("--train-iters 4 --save-interval 2")
    fault = proxy.add("hold", "PUT", "manifest.json", times=1)
    running = first.launch()
    wait_for_fault(running, fault)
    output = new_store_job("--train-iters 4 --save-interval 2").fail()
    assert f"{address} is being written to by process {running.pids[0]}" in output
    assert "end that one, or give another --save" in output
    # Another host sees the renewals.
    output = new_store_job("--train-iters 4").fail(constants=ELSEWHERE)
    assert "waiting up to 2 s for a renewal" in output
    assert f"{address} is being written to by process {running.pids[0]}" in output
    fault.over.set()
    assert running.codes() == [0]
    Stored(address).check(2, 4)


def test_credentials_that_expire_fail_one_save(
    new_store_job: NewStoreJob, proxy: FaultyProxy, address: str
) -> None:
    job = new_store_job("--train-iters 4 --save-interval 2 --save-retry-interval 1")
    proxy.add("ExpiredToken", "POST", "uploads", times=1)
    output = job.succeed(constants=SMALL_PARTS)
    assert re.search(
        rf"saving iteration 2 to .* failed .*\n.*{address}/global_step2-\S+/rank_00000\S+: "
        r"the credentials have expired \(ExpiredToken\); renew",
        output,
    )
    assert saved_lines(output) == [3, 4]
    Stored(address).check(3, 4)


def test_a_missing_bucket_is_reported_before_training(new_store_job: NewStoreJob) -> None:
    name = f"none-{uuid.uuid4().hex[:8]}"
    output = new_store_job("--train-iters 2", place=f"s3://{name}/run").fail()
    assert f"the bucket {name} does not exist; create it, or correct the address" in output
    assert " iteration " not in output


@pytest.fixture
def saved_job(new_store_job: NewStoreJob) -> StoreJob:
    """Return a job with checkpoints of iterations 2 and 4."""
    job = new_store_job("--train-iters 6 --save-interval 2")
    job.succeed("--exit-interval 4")
    return job


def test_deleted_and_damaged_objects_give_an_older_checkpoint(
    saved_job: StoreJob, address: str
) -> None:
    stored = Stored(address)
    key = stored.key(4, "rank_00000.safetensors")
    content = bytearray(stored.objects.read(key))
    content[-1] ^= 1
    stored.objects.write(key, bytes(content))
    # On a host without a copy of anything.
    saved_job.hosts = "others"
    output = saved_job.succeed("--exit-interval 4")
    assert f"{address}/{key} is not what was written: the " in output
    assert "global_step4 is renamed to global_step4.damaged" in output
    assert loaded_line(output) == 2
    root = stored.root
    assert sorted(root["folders"]) == ["global_step2", "global_step4", "global_step4.damaged"]
    assert stored.key(4) != f"{root['folders']['global_step4.damaged']}/"

    stored.objects.delete([stored.key(4, "index.json")])
    output = saved_job.succeed()
    assert f"{stored.objects.name(root['folders']['global_step4'])}/index.json does not exist" in (
        output
    )
    assert "Restore the object from a version or a copy" in output
    assert loaded_line(output) == 2
    assert saved_lines(output) == [4, 6]


def test_a_lost_or_damaged_root_is_an_error(saved_job: StoreJob, address: str) -> None:
    stored = Stored(address)
    content = stored.objects.read("latest.json")
    stored.objects.write("latest.json", content[:-20])
    assert f"{address}/latest.json is not what was written" in saved_job.fail()
    stored.objects.delete(["latest.json"])
    output = saved_job.fail()
    assert f"{address}/latest.json does not exist, and there are global_step4-" in output
    assert "Restore the object from a version" in output
    stored.objects.write("latest.json", content)
    assert loaded_line(saved_job.succeed()) == 4


def test_a_local_folder_that_is_emptied_loses_nothing(
    saved_job: StoreJob, address: str, proxy: FaultyProxy
) -> None:
    fault = proxy.add("hold", "PUT", "global_step6", times=1)
    running = saved_job.launch()
    wait_for_fault(running, fault)
    for folder in saved_job.local.glob("global_step[24]"):
        for path in folder.iterdir():
            os.unlink(path)
        folder.rmdir()
    fault.over.set()
    assert running.codes() == [0]
    Stored(address).check(2, 4, 6)
