"""The spike guard's rollback on a store: another host must find it from the decision on."""

from pathlib import Path

import pytest
from faults.launches import Launch
from object_store.faulty_proxy import Fault, FaultyProxy
from object_store.jobs import NewStoreJob, Stored, StoreJob
from object_store.one_process import PlayedRun
from training.spiky_corpus import random_stretch, write_corpus
from training.test_spike_guard_runs import make_argv, read_losses

from megatron.extras.object_store.objects import ObjectFolder
from megatron.extras.operations.rollback.execution import roll_back_within_run
from megatron.extras.operations.rollback.rollback_plan import NOTHING, RollbackRequest

ITERATIONS = 60
FLAGS = (
    "--spike-guard rollback --spike-guard-skip-before 10 --spike-guard-skip-after 9 "
    "--keep-latest-checkpoints 2 --save-interval 5"
)


@pytest.mark.usefixtures("one_client")
def test_a_rollback_within_a_run_is_visible_at_once(address: str, tmp_path: Path) -> None:
    local = tmp_path / "a"
    run = PlayedRun(address, local)
    for iteration in (2, 4):
        assert run.save(iteration)
    (local / "interventions.jsonl").write_text('{"decided": 1}\n')
    before = Stored(address).root
    run.store.publish_rollback()
    assert Stored(address).root == before
    assert ObjectFolder(address).read("local/interventions.jsonl") == b'{"decided": 1}\n'
    request = RollbackRequest(2, tensorboard_dir=NOTHING, metrics_file=NOTHING)
    roll_back_within_run(local, request, run.lease, print)
    run.store.publish_rollback()
    root = Stored(address).root
    assert root["latest"] == "global_step2"
    assert sum(name.startswith("rolled-back/") for name in root["folders"]) == 1
    # The host is lost before the next save.
    run.end()
    run = PlayedRun(address, tmp_path / "b", local)
    assert run.iteration == 2
    assert '"action": "rollback"' in (tmp_path / "b" / "interventions.jsonl").read_text()
    assert run.save(4)
    run.end()


@pytest.fixture
def spiky(tmp_path: Path, new_store_job: NewStoreJob, address: str) -> tuple[StoreJob, Path]:
    """Return a job whose data have a spike, and the folder of the same run on a disk."""
    corpus = write_corpus(tmp_path / "data" / "text", ITERATIONS, random_stretch(43, 52))
    argv = make_argv(tmp_path / "disk", corpus, ITERATIONS, FLAGS)
    on_disk = new_store_job("")
    on_disk.argv = argv
    on_disk.succeed()
    places = {str(tmp_path / "disk"): address}
    job = new_store_job("")
    job.argv = [*(places.get(flag, flag) for flag in argv), "--local-dir", "local"]
    return job, tmp_path / "disk"


def kill_at(launch: Launch, fault: Fault, proxy: FaultyProxy) -> None:
    """Kill a launch whose request is held."""
    launch.wait_for(fault.met.is_set, "the request that is held")
    launch.kill()
    proxy.faults.clear()
    fault.over.set()


@pytest.mark.full
@pytest.mark.parametrize("host", ["hosts", "others"])
@pytest.mark.parametrize("point", ["decided", "changed here", "visible", "recorded"])
def test_a_kill_around_a_rollback_leads_to_the_same_rollback(
    point: str, host: str, spiky: tuple[StoreJob, Path], proxy: FaultyProxy, address: str
) -> None:
    job, disk = spiky

    def is_decided() -> bool:
        return any(m == "PUT" and "local/interventions" in path for m, path in proxy.requests[:-1])

    part = "latest.json" if point in ("changed here", "visible") else "local/interventions"
    fault = Fault(
        "hold" if point == "changed here" else "hold_reply",
        lambda method, path: (
            method == "PUT" and part in path and (point == "decided" or is_decided())
        ),
        times=1,
    )
    proxy.faults.append(fault)
    kill_at(job.launch(), fault, proxy)
    job.hosts = host
    output = job.succeed()
    if point in ("decided", "changed here"):
        assert "the spike guard of an earlier launch decided at iteration" in output
    stored = Stored(address)
    name = f"global_step{ITERATIONS}"
    assert stored.root["latest"] == name
    weights = stored.files(ITERATIONS)["rank_00000.safetensors"]
    assert weights == (disk / name / "rank_00000.safetensors").read_bytes()
    of_disk = read_losses(disk)
    for iteration, loss in read_losses(job.folder / host / "host_0" / "local").items():
        assert loss == of_disk[iteration], iteration
