"""The lease of a folder that two runs use: who may write, who takes it over, and who must end."""

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.launches import BOUND_SECONDS, ERROR, Job, Launch, NewJob, loaded_line, saved_lines

from megatron.checkpoint.folder import list_saved_iterations, read_pointed_iteration
from megatron.checkpoint.lease import FILE

Curves = Callable[..., dict[int, tuple[float, float]]]
ENDLESS = "--train-iters 3000"
QUICK = {
    "megatron.checkpoint.lease.STALE_SECONDS": 2.0,
    "megatron.checkpoint.lease.BEAT_SECONDS": 0.1,
}
ELSEWHERE = {"host": "node7", "boot": "another-boot/pid:[1]"}
SAVE_INTERVAL = 8
WAITING = "waiting up to"
TAKEN = "which is gone; this run takes the folder over"
REFUSED = "two runs in one folder would destroy each other's checkpoints"


@pytest.fixture
def switch(tmp_path: Path) -> Path:
    """Return the path of the kill switch."""
    return tmp_path / "stop"


@pytest.fixture
def job(new_job: NewJob, switch: Path, tmp_path: Path) -> Job:
    flags = f"{ENDLESS} --save-interval 4 --keep-latest-checkpoints 2 --kill-switch-path {switch}"
    return new_job("job", flags, folder=tmp_path / "run", metrics=tmp_path / "first.jsonl")


def lease(job: Job) -> dict[str, Any]:
    """Return the lease of a job's folder."""
    return json.loads((job.folder / FILE).read_text())


def alter_lease(job: Job, changes: dict[str, Any]) -> None:
    """Change the lease atomically, as its owner does."""
    altered = job.folder / "altered"
    altered.write_text(json.dumps({**lease(job), **changes}) + "\n")
    altered.replace(job.folder / FILE)


def launch_until_saved(job: Job, times: int = 1, **how: Any) -> Launch:
    """Launch a job, and return when it has saved a checkpoint so many times."""
    launch = job.launch(**how)
    launch.wait_for_line("successfully saved checkpoint", times)
    return launch


def launch_and_kill(job: Job, **how: Any) -> Launch:
    """Launch a job, and kill it after its first checkpoint, so that its lease stays."""
    launch = launch_until_saved(job, **how)
    assert launch.kill() == list(range(job.ranks))
    assert lease(job)["pid"] == launch.pids[0]
    return launch


def stop_and_check(launch: Launch, job: Job, switch: Path, uninterrupted: Curves) -> None:
    """Stop a run, and check that it has the curve of an undisturbed run and leaves no lease."""
    switch.touch()
    assert launch.codes() == [0] * job.ranks, launch.all_output()
    switch.unlink()
    last = max(job.curve())
    job.check(last)
    assert not (job.folder / FILE).exists()
    assert [name for name in os.listdir(job.folder) if name.startswith(FILE)] == []
    assert job.curve() == uninterrupted(ENDLESS, last, job.ranks)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_second_job_on_a_folder_is_refused(
    ranks: int, job: Job, new_job: NewJob, switch: Path, uninterrupted: Curves
) -> None:
    job.ranks = ranks
    first = launch_until_saved(job)
    second = new_job("second", f"{ENDLESS} --save-interval 4", ranks, folder=job.folder)
    output = second.fail(f"--metrics-file {job.folder / 'second.jsonl'}")
    assert REFUSED in output
    assert f"process {first.pids[0]} on {socket.gethostname()}" in output
    assert WAITING not in output
    assert not (job.folder / "second.jsonl").exists()
    assert lease(job)["pid"] == first.pids[0]
    saved = len(saved_lines(first.output()))
    first.wait_for_line("successfully saved checkpoint", saved + 2)
    stop_and_check(first, job, switch, uninterrupted)


@pytest.mark.full
def test_second_job_that_would_start_from_scratch_is_refused(
    job: Job, new_job: NewJob, switch: Path, uninterrupted: Curves
) -> None:
    """A second job is refused before the first checkpoint, when only the lease shows the first."""
    first = job.launch()
    first.wait_for(lambda: (job.folder / FILE).exists(), "a lease", step=0)
    second = new_job("second", f"{ENDLESS} --allow-fresh-start", folder=job.folder)
    output = second.fail(f"--metrics-file {job.folder / 'second.jsonl'}")
    assert REFUSED in output
    first.wait_for_line("successfully saved checkpoint")
    stop_and_check(first, job, switch, uninterrupted)


@pytest.mark.full
def test_lease_of_a_stopped_process_on_the_same_host_is_valid(
    job: Job, new_job: NewJob, switch: Path, uninterrupted: Curves
) -> None:
    """A stopped process on the same host keeps its lease, because the kernel knows the process."""
    first = launch_until_saved(job, constants=QUICK)
    with first.frozen():
        output = new_job("second", ENDLESS, folder=job.folder).fail(constants=QUICK)
        assert REFUSED in output
        assert WAITING not in output
    stop_and_check(first, job, switch, uninterrupted)


def test_lease_of_a_killed_run_on_the_same_host_is_taken_over_immediately(
    job: Job, switch: Path, uninterrupted: Curves
) -> None:
    """The lease of a killed run on the same host is taken over without waiting."""
    dead = launch_and_kill(job)
    launch = launch_until_saved(job)
    assert (
        f"was left by process {dead.pids[0]} on {socket.gethostname()}, {TAKEN}" in launch.output()
    )
    assert WAITING not in launch.output()
    assert loaded_line(launch.output()) > 0
    stop_and_check(launch, job, switch, uninterrupted)


@pytest.mark.full
def test_lease_with_a_reused_process_id_is_taken_over(
    job: Job, switch: Path, uninterrupted: Curves
) -> None:
    """A lease is taken over if another process has the id of the one that held it."""
    launch_and_kill(job)
    alter_lease(job, {"pid": os.getpid()})
    launch = launch_until_saved(job)
    assert TAKEN in launch.output()
    assert WAITING not in launch.output()
    stop_and_check(launch, job, switch, uninterrupted)


def test_lease_of_another_host_without_heartbeat_is_taken_over(
    job: Job, switch: Path, uninterrupted: Curves
) -> None:
    dead = launch_and_kill(job)
    alter_lease(job, ELSEWHERE)
    launch = launch_until_saved(job, constants=QUICK)
    output = launch.output()
    assert f"names process {dead.pids[0]} on node7; waiting up to 2 s for its heartbeat" in output
    assert f"process {dead.pids[0]} on node7, {TAKEN}" in output
    assert output.index(WAITING) < output.index(TAKEN) < output.index("successfully loaded")
    stop_and_check(launch, job, switch, uninterrupted)


def test_lease_of_another_host_with_heartbeat_is_respected(
    job: Job, new_job: NewJob, switch: Path, uninterrupted: Curves
) -> None:
    """A lease of another host with a heartbeat is respected.

    Its owner is a real run. Only the name of the host in the lease is changed.
    """
    first = launch_until_saved(job, constants=QUICK)
    alter_lease(job, ELSEWHERE)
    output = new_job("second", f"{ENDLESS} --save-interval 4", folder=job.folder).fail(
        constants=QUICK
    )
    assert WAITING in output
    assert REFUSED in output
    assert f"process {first.pids[0]} on node7" in output
    saved = len(saved_lines(first.output()))
    first.wait_for_line("successfully saved checkpoint", saved + 1)
    stop_and_check(first, job, switch, uninterrupted)


@pytest.mark.full
def test_lease_has_a_heartbeat_while_samples_are_shuffled(job: Job, new_job: NewJob) -> None:
    """The shuffle takes many times STALE_SECONDS."""
    first = job.launch("--train-iters 8000000", constants=QUICK)
    first.wait_for_line("building the index cache")
    alter_lease(job, ELSEWHERE)
    while "iteration        1/" not in first.output():
        started = time.monotonic()
        output = new_job("second", ENDLESS, folder=job.folder).fail(constants=QUICK)
        assert REFUSED in output
        assert time.monotonic() - started < BOUND_SECONDS
    first.kill()


@pytest.mark.full
def test_job_that_ends_while_the_next_one_waits(job: Job, new_job: NewJob, switch: Path) -> None:
    """A job that waits for another host's lease resumes from the last checkpoint once that ends."""
    slow = {
        "megatron.checkpoint.lease.STALE_SECONDS": 60.0,
        "megatron.checkpoint.lease.BEAT_SECONDS": 1000.0,
    }
    first = launch_until_saved(job, constants=slow)
    alter_lease(job, ELSEWHERE)
    second = new_job(
        "second", f"{ENDLESS} --save-interval 4", folder=job.folder, metrics=job.metrics_file
    )
    waiting = second.launch()
    waiting.wait_for_line(WAITING)
    switch.touch()
    assert first.codes() == [0], first.all_output()
    switch.unlink()
    last = max(job.curve())
    waiting.wait_for_line("successfully saved checkpoint")
    assert loaded_line(waiting.output()) == last
    waiting.kill()


@pytest.mark.parametrize(
    "text",
    [
        "",
        pytest.param("not json", marks=pytest.mark.full),
        pytest.param("[]", marks=pytest.mark.full),
        pytest.param('{"host": "x"}', marks=pytest.mark.full),
        pytest.param("\udcff\udcfe\x00", marks=pytest.mark.full),
    ],
)
def test_unreadable_lease_is_replaced(
    text: str, job: Job, switch: Path, uninterrupted: Curves
) -> None:
    launch_and_kill(job)
    (job.folder / FILE).write_bytes(text.encode(errors="surrogateescape"))
    launch = launch_until_saved(job, constants=QUICK)
    assert WAITING in launch.output()
    assert TAKEN in launch.output()
    assert lease(job)["pid"] == launch.pids[0]
    assert loaded_line(launch.output()) > 0
    stop_and_check(launch, job, switch, uninterrupted)


def stop_between_saves(launch: Launch, job: Job) -> None:
    """Stop the run while it writes no checkpoint."""

    def stopped() -> bool:
        launch.freeze()
        reported = saved_lines(launch.output())
        pointed = read_pointed_iteration(job.folder)
        iteration = max(job.curve())
        assert pointed is not None
        names = {f"global_step{saved}" for saved in reported[-2:]}
        at_rest = reported[-1] == pointed and job.names() == names
        if at_rest and pointed + 1 < iteration < pointed + SAVE_INTERVAL - 1:
            return True
        launch.thaw()
        return False

    launch.wait_for(stopped, "a time between two saves")


def stop_before_the_pointers_move(launch: Launch, job: Job) -> None:
    """Stop the run while the pointers still name the checkpoint before the newest one."""

    def seen() -> bool:
        pointed = (
            (job.folder / "latest").read_text(),
            (job.folder / "latest_checkpointed_iteration.txt").read_text(),
        )
        started = any(name.endswith(".new") for name in os.listdir(job.folder))
        newest = max(list_saved_iterations(job.folder))
        return not started and int(pointed[1]) < newest and pointed[0] == f"global_step{pointed[1]}"

    def stopped() -> bool:
        if not seen():
            return False
        launch.freeze()
        if seen():
            return True
        launch.thaw()
        return False

    launch.wait_for(stopped, "a save before its pointers are written", step=0)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", ["", pytest.param("--async-save", marks=pytest.mark.full)])
@pytest.mark.parametrize("stop", [stop_between_saves, stop_before_the_pointers_move])
def test_run_that_lost_its_lease_ends_without_writing(
    stop: Callable[[Launch, Job], None],
    mode: str,
    ranks: int,
    new_job: NewJob,
    switch: Path,
    tmp_path: Path,
    uninterrupted: Curves,
) -> None:
    """A run that was stopped while another one took over its folder ends without writing.

    It is stopped as on a host whose network is down. The other run is on another host.
    """
    flags = f"{ENDLESS} --save-interval {SAVE_INTERVAL} --keep-latest-checkpoints 2 {mode}"
    job = new_job("job", flags, ranks, folder=tmp_path / "run", metrics=tmp_path / "first.jsonl")
    first = launch_until_saved(job, times=2, constants=QUICK)
    stop(first, job)
    alter_lease(job, ELSEWHERE)
    second = new_job(
        "second",
        f"{flags} --kill-switch-path {switch}",
        ranks,
        folder=job.folder,
        metrics=tmp_path / "second.jsonl",
    )
    started_from = read_pointed_iteration(job.folder)
    successor = second.launch(constants=QUICK)
    successor.wait_for_line("successfully saved checkpoint", 2)
    assert loaded_line(successor.output()) == started_from
    switch.touch()
    assert successor.codes() == [0] * ranks, successor.all_output()
    switch.unlink()
    last = max(second.curve())
    job.check(last)
    before = job.snapshot()
    # A third run holds the lease, so that the first one cannot take the folder over again.
    third = second.launch(constants=QUICK)
    third.wait_for(lambda: (job.folder / FILE).exists(), "a lease")
    with third.frozen():
        before |= job.snapshot()
        owner = lease(job)
        reported = len(saved_lines(first.output()))
        first.thaw()
        # Rank 0 reports the reason. The other ranks may only lose the connection to it.
        codes = first.codes(by_themselves=True)
        assert codes[0] == ERROR, first.all_output()
        assert all(codes), first.all_output()
        assert job.snapshot() == before
        assert lease(job) == owner  # the run that ends does not remove another run's lease
    output = first.output()
    assert f"was taken over by process {owner['pid']}" in output
    assert "CheckpointError" in output
    assert "it ends without writing there" in output
    assert len(saved_lines(output)) == reported
    third.wait_for_line("successfully saved checkpoint")
    assert loaded_line(third.output()) == last
    switch.touch()
    assert third.codes() == [0] * ranks, third.all_output()
    switch.unlink()
    last = max(second.curve())
    job.check(last)
    curve = uninterrupted(ENDLESS, last, ranks)
    assert second.curve() == {iteration: curve[iteration] for iteration in second.curve()}


@pytest.mark.full
def test_run_that_lost_its_lease_does_not_renew_another_runs_lease(
    new_job: NewJob, tmp_path: Path
) -> None:
    """A run that lost its lease does not renew the lease of a killed run that took it over.

    The first run has no further save at which it would notice the loss.
    """
    job = new_job(
        "job",
        f"--train-iters 300000 --save-at {SAVE_INTERVAL}",
        folder=tmp_path / "run",
        metrics=tmp_path / "first.jsonl",
    )
    first = launch_until_saved(job, constants=QUICK)
    first.freeze()
    alter_lease(job, ELSEWHERE)
    second = new_job(
        "second", "--train-iters 300000", folder=job.folder, metrics=tmp_path / "second.jsonl"
    )
    successor = second.launch(constants=QUICK)
    successor.wait_for_line("successfully loaded checkpoint")
    assert lease(job)["pid"] == successor.pids[0]
    successor.kill()
    alter_lease(job, ELSEWHERE)
    first.thaw()
    third = second.launch(constants=QUICK)
    third.wait_for_line("successfully loaded checkpoint")
    assert WAITING in third.output()
    assert TAKEN in third.output()


def test_removed_lease_is_written_again(
    job: Job, new_job: NewJob, switch: Path, uninterrupted: Curves
) -> None:
    launch = launch_until_saved(job)
    (job.folder / FILE).unlink()
    saved = len(saved_lines(launch.output()))
    launch.wait_for_line("successfully saved checkpoint", saved + 2)
    assert lease(job)["pid"] == launch.pids[0]
    output = new_job("second", ENDLESS, folder=job.folder).fail()
    assert f"process {launch.pids[0]} on" in output
    stop_and_check(launch, job, switch, uninterrupted)


def test_requeued_job_takes_over_its_own_lease_immediately(
    job: Job, switch: Path, uninterrupted: Curves
) -> None:
    """A requeued job does not wait for its own lease, because Slurm has ended the earlier start."""
    launch_and_kill(job, environment={"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "0"})
    alter_lease(job, ELSEWHERE)
    launch = launch_until_saved(job, environment={"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1"})
    assert WAITING not in launch.output()
    assert f"on node7, job 77, {TAKEN}" in launch.output()
    assert lease(job)["job"] == "77"
    assert lease(job)["restart"] == 1
    stop_and_check(launch, job, switch, uninterrupted)


@pytest.mark.full
@pytest.mark.parametrize(("number", "restart"), [("77", "0"), ("78", "1")])
def test_only_a_later_start_of_the_same_job_takes_over_immediately(
    number: str, restart: str, job: Job
) -> None:
    """The same start of a job, or another job, waits for a heartbeat and is refused."""
    first = launch_until_saved(
        job, constants=QUICK, environment={"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "0"}
    )
    alter_lease(job, ELSEWHERE)
    output = job.fail(
        constants=QUICK, environment={"SLURM_JOB_ID": number, "SLURM_RESTART_COUNT": restart}
    )
    assert WAITING in output
    assert REFUSED in output
    assert "job 77" in output
    assert first.running() == [0]
    first.kill()


def test_evaluation_takes_no_lease(
    job: Job, new_job: NewJob, switch: Path, uninterrupted: Curves
) -> None:
    """An evaluation takes no lease, whether another run holds it or not."""
    first = launch_until_saved(job)
    owner = lease(job)
    reader = new_job("reader", f"{ENDLESS} --eval-only --eval-iters 1", folder=job.folder)
    with first.frozen():
        before = job.snapshot()
        output = reader.succeed(f"--metrics-file {job.folder.parent / 'reader.jsonl'}")
        assert job.snapshot() == before
    assert loaded_line(output) > 0
    assert lease(job) == owner
    stop_and_check(first, job, switch, uninterrupted)
    before = job.snapshot()
    reader.succeed(f"--metrics-file {job.folder.parent / 'reader.jsonl'}")
    assert job.snapshot() == before


@pytest.mark.parametrize(
    "attempt", [0, *(pytest.param(number, marks=pytest.mark.full) for number in range(1, 6))]
)
def test_one_of_many_simultaneous_starts_gets_the_lease(
    attempt: int, job: Job, new_job: NewJob, switch: Path
) -> None:
    """One of several simultaneous starts trains, and the others end and name it."""
    launch_and_kill(job)
    flags = f"{ENDLESS} --save-interval 4 --kill-switch-path {switch}"
    outer = job.folder.parent
    rivals = [
        new_job(f"rival_{n}", flags, folder=job.folder, metrics=outer / f"rival_{n}.jsonl")
        for n in range(3)
    ]
    launches = [rival.launch() for rival in rivals]
    end = time.monotonic() + BOUND_SECONDS
    while sum(len(launch.running()) for launch in launches) > 1 and time.monotonic() < end:
        time.sleep(0.01)
    winners = [number for number, launch in enumerate(launches) if launch.running()]
    outputs = "\n".join(launch.all_output() for launch in launches)
    assert len(winners) == 1, outputs
    winner = launches[winners[0]]
    for rival, launch in zip(rivals, launches, strict=True):
        if launch is not winner:
            assert launch.codes() == [ERROR]
            assert f"process {winner.pids[0]} on" in launch.output(), outputs
            assert REFUSED in launch.output(), outputs
            assert rival.curve() == {}
    winner.wait_for_line("successfully saved checkpoint", 2)
    switch.touch()
    assert winner.codes() == [0], winner.all_output()
    job.check(max(rivals[winners[0]].curve()))
