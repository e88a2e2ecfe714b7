"""Two runs and one folder: who may write there, who takes over from whom, and who must leave."""

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launches import BOUND_SECONDS, ERROR, Job, Launch, NewJob, loaded_line, saved_lines

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
    """Ends a run well when it is made."""
    return tmp_path / "stop"


@pytest.fixture
def job(new_job: NewJob, switch: Path, tmp_path: Path) -> Job:
    flags = f"{ENDLESS} --save-interval 4 --keep-latest-checkpoints 2 --kill-switch-path {switch}"
    return new_job("job", flags, folder=tmp_path / "run", metrics=tmp_path / "first.jsonl")


def lease(job: Job) -> dict[str, Any]:
    return json.loads((job.folder / FILE).read_text())


def alter_lease(job: Job, changes: dict[str, Any]) -> None:
    """Whole at any instant, like one that was written by its owner."""
    altered = job.folder / "altered"
    altered.write_text(json.dumps({**lease(job), **changes}) + "\n")
    altered.replace(job.folder / FILE)


def with_a_checkpoint(job: Job, times: int = 1, **how: Any) -> Launch:
    launch = job.launch(**how)
    launch.wait_for_line("successfully saved checkpoint", times)
    return launch


def left_by_a_kill(job: Job, **how: Any) -> Launch:
    launch = with_a_checkpoint(job, **how)
    assert launch.kill() == list(range(job.ranks))
    assert lease(job)["pid"] == launch.pids[0]
    return launch


def end_well(launch: Launch, job: Job, switch: Path, uninterrupted: Curves) -> None:
    """It trained as if it had been alone, and leaves no lease."""
    switch.touch()
    assert launch.codes() == [0] * job.ranks, launch.all_output()
    switch.unlink()
    last = max(job.curve())
    job.check(last)
    assert not (job.folder / FILE).exists()
    assert [name for name in os.listdir(job.folder) if name.startswith(FILE)] == []
    assert job.curve() == uninterrupted(ENDLESS, last, job.ranks)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_the_second_job_on_a_folder_is_refused(
    ranks: int, job: Job, new_job: NewJob, switch: Path, uninterrupted: Curves
) -> None:
    job.ranks = ranks
    first = with_a_checkpoint(job)
    second = new_job("second", f"{ENDLESS} --save-interval 4", ranks, folder=job.folder)
    output = second.fail(f"--metrics-file {job.folder / 'second.jsonl'}")
    assert REFUSED in output
    assert f"process {first.pids[0]} on {socket.gethostname()}" in output
    assert WAITING not in output
    assert not (job.folder / "second.jsonl").exists()
    assert lease(job)["pid"] == first.pids[0]
    saved = len(saved_lines(first.output()))
    first.wait_for_line("successfully saved checkpoint", saved + 2)
    end_well(first, job, switch, uninterrupted)


@pytest.mark.full
def test_a_second_job_that_would_begin_anew_is_refused_too(
    job: Job, new_job: NewJob, switch: Path, uninterrupted: Curves
) -> None:
    """Before there is a checkpoint: only the lease can tell."""
    first = job.launch()
    first.wait_for(lambda: (job.folder / FILE).exists(), "a lease", step=0)
    second = new_job("second", f"{ENDLESS} --allow-fresh-start", folder=job.folder)
    output = second.fail(f"--metrics-file {job.folder / 'second.jsonl'}")
    assert REFUSED in output
    first.wait_for_line("successfully saved checkpoint")
    end_well(first, job, switch, uninterrupted)


@pytest.mark.full
def test_a_run_that_stands_still_is_alive(
    job: Job, new_job: NewJob, switch: Path, uninterrupted: Curves
) -> None:
    """On the same host the kernel is asked, not the clock."""
    first = with_a_checkpoint(job, constants=QUICK)
    with first.frozen():
        output = new_job("second", ENDLESS, folder=job.folder).fail(constants=QUICK)
        assert REFUSED in output
        assert WAITING not in output
    end_well(first, job, switch, uninterrupted)


def test_after_a_kill_on_the_same_host_the_next_one_takes_over_at_once(
    job: Job, switch: Path, uninterrupted: Curves
) -> None:
    """STALE_SECONDS is what it is."""
    dead = left_by_a_kill(job)
    launch = with_a_checkpoint(job)
    assert (
        f"was left by process {dead.pids[0]} on {socket.gethostname()}, {TAKEN}" in launch.output()
    )
    assert WAITING not in launch.output()
    assert loaded_line(launch.output()) > 0
    end_well(launch, job, switch, uninterrupted)


@pytest.mark.full
def test_the_number_of_a_dead_process_that_another_one_got(
    job: Job, switch: Path, uninterrupted: Curves
) -> None:
    """This very process is alive and has the number, and is not the one that held the folder."""
    left_by_a_kill(job)
    alter_lease(job, {"pid": os.getpid()})
    launch = with_a_checkpoint(job)
    assert TAKEN in launch.output()
    assert WAITING not in launch.output()
    end_well(launch, job, switch, uninterrupted)


def test_a_lease_of_another_host_that_does_not_move(
    job: Job, switch: Path, uninterrupted: Curves
) -> None:
    dead = left_by_a_kill(job)
    alter_lease(job, ELSEWHERE)
    launch = with_a_checkpoint(job, constants=QUICK)
    output = launch.output()
    assert (
        f"was left by process {dead.pids[0]} on node7; waiting up to 2 s for a sign of life"
        in output
    )
    assert f"process {dead.pids[0]} on node7, {TAKEN}" in output
    assert output.index(WAITING) < output.index(TAKEN) < output.index("successfully loaded")
    end_well(launch, job, switch, uninterrupted)


def test_a_lease_of_another_host_that_moves(
    job: Job, new_job: NewJob, switch: Path, uninterrupted: Curves
) -> None:
    """Its owner is a real run with a real heartbeat; only the name of its host is another one."""
    first = with_a_checkpoint(job, constants=QUICK)
    alter_lease(job, ELSEWHERE)
    output = new_job("second", f"{ENDLESS} --save-interval 4", folder=job.folder).fail(
        constants=QUICK
    )
    assert WAITING in output
    assert REFUSED in output
    assert f"process {first.pids[0]} on node7" in output
    saved = len(saved_lines(first.output()))
    first.wait_for_line("successfully saved checkpoint", saved + 1)
    end_well(first, job, switch, uninterrupted)


@pytest.mark.full
def test_a_job_that_ends_while_the_next_one_waits(job: Job, new_job: NewJob, switch: Path) -> None:
    """On another host: its lease goes, and the waiting one goes on from its last checkpoint."""
    slow = {
        "megatron.checkpoint.lease.STALE_SECONDS": 60.0,
        "megatron.checkpoint.lease.BEAT_SECONDS": 1000.0,
    }
    first = with_a_checkpoint(job, constants=slow)
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
def test_a_lease_that_is_garbage(text: str, job: Job, switch: Path, uninterrupted: Curves) -> None:
    left_by_a_kill(job)
    (job.folder / FILE).write_bytes(text.encode(errors="surrogateescape"))
    launch = with_a_checkpoint(job)
    assert lease(job)["pid"] == launch.pids[0]
    assert loaded_line(launch.output()) > 0
    end_well(launch, job, switch, uninterrupted)


def stop_between_saves(launch: Launch, job: Job) -> None:
    """The run stands still, and has no save under way."""

    def stopped() -> bool:
        launch.freeze()
        told, pointed, iteration = (
            saved_lines(launch.output()),
            read_pointed_iteration(job.folder),
            max(job.curve()),
        )
        assert pointed is not None
        at_rest = told[-1] == pointed and job.names() == {
            f"global_step{saved}" for saved in told[-2:]
        }
        if at_rest and pointed + 1 < iteration < pointed + SAVE_INTERVAL - 1:
            return True
        launch.thaw()
        return False

    launch.wait_for(stopped, "a moment between two saves")


def stop_before_the_pointers_move(launch: Launch, job: Job) -> None:
    """The run stands still; its newest checkpoint has its name, and the pointers still name the one before."""

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

    launch.wait_for(stopped, "a moment before the pointers move", step=0)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", ["", pytest.param("--async-save", marks=pytest.mark.full)])
@pytest.mark.parametrize("stop", [stop_between_saves, stop_before_the_pointers_move])
def test_a_run_that_lost_its_lease_ends_without_writing(
    stop: Callable[[Launch, Job], None],
    mode: str,
    ranks: int,
    new_job: NewJob,
    switch: Path,
    tmp_path: Path,
    uninterrupted: Curves,
) -> None:
    """It stood still, as a host whose network is gone; meanwhile another one, elsewhere, took over."""
    flags = f"{ENDLESS} --save-interval {SAVE_INTERVAL} --keep-latest-checkpoints 2 {mode}"
    job = new_job("job", flags, ranks, folder=tmp_path / "run", metrics=tmp_path / "first.jsonl")
    first = with_a_checkpoint(job, times=2, constants=QUICK)
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
    # Another one that lives there, so that the folder is not free for the taking.
    third = second.launch(constants=QUICK)
    third.wait_for(lambda: (job.folder / FILE).exists(), "a lease")
    with third.frozen():
        before |= job.snapshot()
        owner, said = lease(job), len(saved_lines(first.output()))
        first.thaw()
        codes = first.codes(by_themselves=True)  # rank 0 says why; the others may just lose it
        assert codes[0] == ERROR, first.all_output()
        assert all(codes), first.all_output()
        assert job.snapshot() == before
        assert lease(job) == owner  # leaving, it does not take the other one's along
    output = first.output()
    assert f"was taken over by process {owner['pid']}" in output
    assert "CheckpointError" in output
    assert "it ends without writing there" in output
    assert len(saved_lines(output)) == said
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
def test_a_run_that_lost_its_lease_keeps_no_other_ones_alive(
    new_job: NewJob, tmp_path: Path
) -> None:
    """It has no save to come; the one that took over is killed, and nothing must make that one look alive to the next."""
    job = new_job(
        "job",
        f"--train-iters 300000 --save-at {SAVE_INTERVAL}",
        folder=tmp_path / "run",
        metrics=tmp_path / "first.jsonl",
    )
    first = with_a_checkpoint(job, constants=QUICK)
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


def test_a_lease_that_an_operator_removed_is_made_again(
    job: Job, new_job: NewJob, switch: Path, uninterrupted: Curves
) -> None:
    launch = with_a_checkpoint(job)
    (job.folder / FILE).unlink()
    saved = len(saved_lines(launch.output()))
    launch.wait_for_line("successfully saved checkpoint", saved + 2)
    assert lease(job)["pid"] == launch.pids[0]
    output = new_job("second", ENDLESS, folder=job.folder).fail()
    assert f"process {launch.pids[0]} on" in output
    end_well(launch, job, switch, uninterrupted)


def test_a_requeued_job_takes_over_from_itself_at_once(
    job: Job, switch: Path, uninterrupted: Curves
) -> None:
    """Slurm has ended it on the other host; STALE_SECONDS is what it is."""
    left_by_a_kill(job, environment={"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "0"})
    alter_lease(job, ELSEWHERE)
    launch = with_a_checkpoint(job, environment={"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1"})
    assert WAITING not in launch.output()
    assert f"on node7, job 77, {TAKEN}" in launch.output()
    assert (lease(job)["job"], lease(job)["restart"]) == ("77", 1)
    end_well(launch, job, switch, uninterrupted)


@pytest.mark.full
@pytest.mark.parametrize(("number", "restart"), [("77", "0"), ("78", "1")])
def test_only_a_later_start_of_the_same_job_may(number: str, restart: str, job: Job) -> None:
    """The same start twice, or another job: a sign of life is waited for, and here there is one."""
    first = with_a_checkpoint(
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
    """Neither while another run holds it, nor when nobody does."""
    first = with_a_checkpoint(job)
    owner = lease(job)
    reader = new_job("reader", f"{ENDLESS} --eval-only --eval-iters 1", folder=job.folder)
    with first.frozen():
        before = job.snapshot()
        output = reader.succeed(f"--metrics-file {job.folder.parent / 'reader.jsonl'}")
        assert job.snapshot() == before
    assert loaded_line(output) > 0
    assert lease(job) == owner
    end_well(first, job, switch, uninterrupted)
    before = job.snapshot()
    reader.succeed(f"--metrics-file {job.folder.parent / 'reader.jsonl'}")
    assert job.snapshot() == before


@pytest.mark.parametrize(
    "attempt", [0, *(pytest.param(number, marks=pytest.mark.full) for number in range(1, 6))]
)
def test_many_starts_at_once_and_one_winner(
    attempt: int, job: Job, new_job: NewJob, switch: Path
) -> None:
    """After a kill, several copies of a command start together: one trains, the others leave, and name it."""
    left_by_a_kill(job)
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
    told = "\n".join(launch.all_output() for launch in launches)
    assert len(winners) == 1, told
    winner = launches[winners[0]]
    for rival, launch in zip(rivals, launches, strict=True):
        if launch is not winner:
            assert launch.codes() == [ERROR]
            assert f"process {winner.pids[0]} on" in launch.output(), told
            assert REFUSED in launch.output(), told
            assert rival.curve() == {}
    winner.wait_for_line("successfully saved checkpoint", 2)
    switch.touch()
    assert winner.codes() == [0], winner.all_output()
    job.check(max(rivals[winners[0]].curve()))
