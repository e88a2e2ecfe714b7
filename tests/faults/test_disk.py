"""Disks that fill up, refuse writes, or are read-only.

The failure is reported immediately and tried again, and never costs an older checkpoint. Each test
has its own small tmpfs. It is filled while the run is stopped, so the time of the failure is not
random.
"""

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults.launches import Launch, NewJob, loaded_line, saved_lines

from megatron.checkpoint.folder import read_pointed_iteration

Curves = Callable[..., dict[int, tuple[float, float]]]
ENDLESS = "--train-iters 3000"
ROOM = 1 << 20
"""Less than a checkpoint (about 2 MB) and the reserve that a save requires."""
PAUSE = {"megatron.run.loop._PAUSE_SECONDS": 0.05}


class Disk:
    """A tmpfs that a test fills."""

    def __init__(self, folder: Path, options: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.mounted = False
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            pytest.skip(
                "NOT TESTED: a full disk needs a tmpfs, and mounting one failed: "
                f"{done.stderr.strip()}"
            )
        self.mounted = True
        self._filler = folder / "filler"

    def fill(self, leave: int = 0) -> None:
        """Fill all but `leave` bytes."""
        stat = os.statvfs(self.folder)
        with open(self._filler, "ab") as file:
            os.posix_fallocate(
                file.fileno(), file.tell(), max(1, stat.f_bavail * stat.f_frsize - leave)
            )

    def fill_inodes(self, leave: int) -> None:
        """Leave inodes for `leave` files or folders."""
        (self.folder / "inodes").mkdir()
        for number in range(os.statvfs(self.folder).f_ffree - leave):
            (self.folder / "inodes" / str(number)).touch()

    def make_room(self) -> None:
        self._filler.unlink(missing_ok=True)
        if (self.folder / "inodes").is_dir():
            for path in (self.folder / "inodes").iterdir():
                path.unlink()
            (self.folder / "inodes").rmdir()

    def remount(self, how: str) -> bool:
        """Remount with `ro` or `rw`. Return False if files are open for writing."""
        return (
            subprocess.run(
                ["mount", "-o", f"remount,{how}", str(self.folder)], capture_output=True
            ).returncode
            == 0
        )

    def unmount(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


@pytest.fixture
def new_disk(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    disks: list[Disk] = []

    def make(options: str = "size=16m") -> Disk:
        disks.append(Disk(tmp_path / f"disk_{len(disks)}", options))
        return disks[-1]

    yield make
    for disk in disks:
        disk.unmount()


@pytest.fixture
def disk(new_disk: Callable[..., Disk]) -> Disk:
    return new_disk()


@pytest.fixture
def switch(tmp_path: Path) -> Path:
    """Return the path of the kill switch."""
    return tmp_path / "stop"


@pytest.fixture
def on_disk(disk: Disk, new_job: NewJob, switch: Path, tmp_path: Path) -> NewJob:
    """Return `on_disk(flags, ranks=1)`, which makes a job whose folder is on the small disk.

    Its metrics are on another disk.
    """
    return lambda flags, ranks=1: new_job(
        "job",
        f"--kill-switch-path {switch} {flags}",
        ranks,
        folder=disk.folder / "run",
        metrics=tmp_path / "metrics.jsonl",
    )


@contextlib.contextmanager
def between_saves(launch: Launch, folder: Path) -> Iterator[None]:
    """Stop the run while it has a checkpoint and writes none."""

    def caught() -> bool:
        launch.freeze()
        busy = not (folder / "latest").exists() or any(
            not re.fullmatch(r"global_step\d+", entry) for entry in steps(folder)
        )
        if busy:
            launch.thaw()
        return not busy

    launch.wait_for(caught, "a moment between two saves", step=0.002)
    try:
        yield
    finally:
        launch.thaw()


@contextlib.contextmanager
def in_a_save(launch: Launch, folder: Path) -> Iterator[None]:
    """Stop the run while it writes a checkpoint whose last file does not exist yet."""

    def caught() -> bool:
        if not any(entry.endswith(".unfinished") for entry in steps(folder)):
            return False
        launch.freeze()
        fresh = [folder / entry for entry in steps(folder) if entry.endswith(".unfinished")]
        if fresh and not (fresh[0] / "manifest.json").exists():
            return True
        launch.thaw()
        return False

    launch.wait_for(caught, "a moment in a save", step=0)
    try:
        yield
    finally:
        launch.thaw()


def steps(folder: Path) -> list[str]:
    return (
        [name for name in os.listdir(folder) if name.startswith("global_step")]
        if folder.exists()
        else []
    )


def failures(output: str) -> list[tuple[int, int]]:
    """Return (iteration, number of failures in a row) for each failed save."""
    return [
        (int(i), int(n))
        for i, n in re.findall(
            r"saving iteration (\d+) to .* failed \((\d+) of \d+ in a row\)", output
        )
    ]


def retries(output: str) -> list[int]:
    return [int(found) for found in re.findall(r"tried again after iteration (\d+)", output)]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", ["", pytest.param("--async-save", marks=pytest.mark.full)])
def test_save_without_enough_room_is_not_started(
    ranks: int, mode: str, disk: Disk, on_disk: NewJob, uninterrupted: Curves
) -> None:
    """A save without enough room is reported immediately and tried again, and then the run ends.

    With room, the same command resumes from the old checkpoint.
    """
    job = on_disk(f"--save-interval 4 --save-retry-interval 1 {mode}", ranks)
    job.succeed("--exit-interval 4")
    disk.fill(leave=ROOM)
    before = job.snapshot()
    output = job.fail()
    assert failures(output) == [(8, 1), (9, 2), (10, 3)]
    assert retries(output) == [9, 10]
    sizes = r"rank 0 on \S+: the checkpoint needs \d\.\d\d MB, and \S+ has \d\.\d\d MB free"
    assert len(re.findall(sizes, output)) == 3
    error = output.rpartition("CheckpointError:")[2]
    assert "the run ends here" in error
    assert "THERE IS NO ROOM: saves will fail" in output  # already at the start
    assert job.snapshot() == before
    job.check(4, saved=[4])
    assert max(job.curve()) == 10
    disk.make_room()
    assert loaded_line(job.succeed()) == 4
    assert job.curve() == uninterrupted("", 10, ranks)
    job.check(10, saved=[4, 8, 10])


def test_last_error_names_the_newest_checkpoint(disk: Disk, on_disk: NewJob) -> None:
    """The last error names the newest checkpoint, even one of an earlier launch."""
    job = on_disk("--save-interval 4 --max-save-failures 1")
    job.succeed("--exit-interval 4")
    disk.fill(leave=ROOM)
    error = job.fail().rpartition("CheckpointError:")[2]
    assert "global_step4" in error
    assert "the newest: none" not in error


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", ["--async-save", pytest.param("", marks=pytest.mark.full)])
def test_disk_that_fills_up_during_a_save(
    ranks: int, mode: str, disk: Disk, on_disk: NewJob, switch: Path, uninterrupted: Curves
) -> None:
    """A save fails if another process fills the disk, and a later one succeeds with room."""
    flags = (
        f"{ENDLESS} --save-interval 6 --save-retry-interval 2 --max-save-failures 100000 "
        "--keep-latest-checkpoints 2"
    )
    job = on_disk(f"{flags} {mode}", ranks)
    launch = job.launch()
    launch.wait_for_line("successfully saved checkpoint")
    with in_a_save(launch, job.folder):
        disk.fill()
    launch.wait_for_line(
        "in a row)", times=2
    )  # the interrupted save, and one that knows in advance
    first = launch.output()
    assert re.search(
        r"failed \(1 of 100000 in a row\):\n  rank \d on \S+: \[Errno 28\] No space left on device",
        first,
    ), first
    iterations = [iteration for iteration, _ in failures(first)]
    later = retries(first)[0] - iterations[0]
    # A save in the background may have failed before the run looks at it.
    assert later == 2 or (mode and later > 2), first
    with launch.frozen():
        left = [name for name in steps(job.folder) if name.endswith(".unfinished")]
        assert left == []  # the part that was written was removed
        safe = max(saved_lines(launch.output()))
        pointed = read_pointed_iteration(job.folder)
        assert pointed is not None
        assert pointed >= safe
        job.verify(pointed)
    saved = len(saved_lines(launch.output()))
    disk.make_room()
    launch.wait_for_line("successfully saved checkpoint", times=saved + 2)
    assert failures(launch.output())[-1][1] >= 2
    switch.touch()
    assert launch.codes() == [0] * ranks, launch.all_output()
    switch.unlink()
    last = max(job.curve())
    job.check(last)
    assert job.curve() == uninterrupted(ENDLESS, max(job.curve()), ranks)


@pytest.mark.parametrize(
    "left", [5, *(pytest.param(left, marks=pytest.mark.full) for left in range(5))]
)
def test_missing_inodes_at_every_step_of_a_save(
    left: int,
    new_disk: Callable[..., Disk],
    new_job: NewJob,
    switch: Path,
    tmp_path: Path,
    uninterrupted: Curves,
) -> None:
    """A save fails and is tried again, whichever of its files is the first without an inode.

    The files are folder, tensors, index, configuration, manifest and pointer.
    """
    disk = new_disk("size=64m,nr_inodes=200")
    flags = f"{ENDLESS} --save-retry-interval 1 --max-save-failures 100000"
    job = new_job(
        "job",
        f"{flags} --save-interval 6 --kill-switch-path {switch}",
        folder=disk.folder / "run",
        metrics=tmp_path / "metrics.jsonl",
    )
    launch = job.launch()
    launch.wait_for_line("successfully saved checkpoint")
    with between_saves(launch, job.folder):
        safe = read_pointed_iteration(job.folder)
        assert safe is not None
        disk.fill_inodes(leave=left)
    launch.wait_for_line("in a row)", times=2)
    output = launch.output()
    assert re.search(
        r"failed \(1 of 100000 in a row\):\n  rank 0 on \S+: \[Errno 28\] No space left on device",
        output,
    ), output
    with launch.frozen():
        assert read_pointed_iteration(job.folder) == safe
        assert max([safe, *saved_lines(launch.output())]) == safe
        job.verify(safe)
    saved = len(saved_lines(launch.output()))
    disk.make_room()
    launch.wait_for_line("successfully saved checkpoint", times=saved + 2)
    switch.touch()
    assert launch.codes() == [0], launch.all_output()
    job.check(max(job.curve()))
    assert job.curve() == uninterrupted(ENDLESS, max(job.curve()))


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.full), 1])
@pytest.mark.parametrize("mode", ["", pytest.param("--async-save", marks=pytest.mark.full)])
def test_rank_that_cannot_write_ends_all_ranks(
    victim: int, mode: str, new_job: NewJob, uninterrupted: Curves
) -> None:
    """A rank with a quota is named, and all ranks end together.

    The partial folder is removed, and the run resumes from the older checkpoint.
    """
    # Each rank's file is large with untied embeddings.
    layout = "--pipeline-model-parallel-size 2 --num-layers 2 --untie-embeddings-and-output-weights"
    flags = f"{layout} --save-interval 4 --save-retry-interval 2 --max-save-failures 2 {mode}"
    job = new_job("job", flags, 2)
    job.succeed("--exit-interval 4")
    before = job.snapshot()
    launch = job.launch(largest_file={victim: 200_000})
    codes = launch.codes(by_themselves=True)
    assert codes == [2, 2], launch.all_output()
    output = launch.output()
    assert failures(output) == [(8, 1), (10, 2)]
    assert len(re.findall(rf"rank {victim} on \S+: \[Errno 27\] File too large", output)) == 2
    assert f"rank {1 - victim} on" not in output
    assert job.snapshot() == before
    assert job.names() == {"global_step4"}
    assert loaded_line(job.succeed()) == 4
    assert job.curve() == uninterrupted(layout, 10, 2)
    job.check(10, saved=[4, 8, 10])


def test_save_at_an_iteration_is_tried_again(disk: Disk, on_disk: NewJob) -> None:
    job = on_disk("--save-at 6 --save-retry-interval 2 --max-save-failures 2")
    job.succeed("--exit-interval 2")
    disk.fill(leave=ROOM)
    output = job.fail()
    assert failures(output) == [(6, 1), (8, 2)]
    job.check(2, saved=[2])
    disk.make_room()
    job.succeed()
    job.check(10, saved=[2, 6, 10])


def test_save_at_the_end_of_a_run_waits_for_room(
    disk: Disk, on_disk: NewJob, uninterrupted: Curves
) -> None:
    """The save at the end is repeated until it succeeds, as no later iteration can do that."""
    job = on_disk("--max-save-failures 100000")
    job.succeed("--exit-interval 2")
    disk.fill(leave=ROOM)
    launch = job.launch(constants=PAUSE)
    launch.wait_for_line("in a row)", times=3)
    assert {iteration for iteration, _ in failures(launch.output())} == {10}
    disk.make_room()
    assert launch.codes() == [0], launch.all_output()
    assert saved_lines(launch.output()) == [10]
    job.check(10, saved=[2, 10])
    assert job.curve() == uninterrupted("", 10)


@pytest.mark.full
def test_end_of_a_run_without_room_is_an_error(disk: Disk, on_disk: NewJob) -> None:
    job = on_disk("")
    job.succeed("--exit-interval 2")
    disk.fill(leave=ROOM)
    output = job.fail(constants=PAUSE)
    assert failures(output) == [(10, 1), (10, 2), (10, 3)]
    assert "the run ends here" in output.rpartition("CheckpointError:")[2]
    job.check(2, saved=[2])
    disk.make_room()
    assert loaded_line(job.succeed()) == 2
    job.check(10, saved=[2, 10])


def test_failed_save_at_the_end_announces_no_later_iteration(disk: Disk, on_disk: NewJob) -> None:
    """A failed save at the end does not announce a retry after an iteration that never comes."""
    disk.fill(leave=ROOM)
    output = on_disk("").fail(constants=PAUSE)
    assert not [iteration for iteration in retries(output) if iteration > 10]


def test_a_full_disk_before_the_start(disk: Disk, on_disk: NewJob) -> None:
    """Nothing is trained if the disk is full at the start, and the message gives the reason."""
    job = on_disk("--save-interval 2")
    job.succeed("--exit-interval 2")
    disk.fill()
    before = job.snapshot()
    curve = job.curve()
    output = job.fail()
    error = output.rpartition("CheckpointError:")[2]
    assert f"--save {job.folder} cannot be written" in error
    assert "No space left on device" in error
    assert job.curve() == curve
    assert job.snapshot() == before
    disk.make_room()
    assert loaded_line(job.succeed()) == 2


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_read_only_file_system_before_the_start(ranks: int, disk: Disk, on_disk: NewJob) -> None:
    job = on_disk("--save-interval 2", ranks)
    job.succeed("--exit-interval 2")
    assert disk.remount("ro")
    curve = job.curve()
    output = job.fail()
    error = output.rpartition("CheckpointError:")[2]
    assert f"--save {job.folder} cannot be written" in error
    assert "Read-only file system" in error
    assert job.curve() == curve
    assert disk.remount("rw")
    assert loaded_line(job.succeed()) == 2
    job.check(10)


@pytest.mark.parametrize("mode", ["", pytest.param("--async-save", marks=pytest.mark.full)])
def test_a_file_system_that_becomes_read_only(
    mode: str, disk: Disk, on_disk: NewJob, switch: Path, uninterrupted: Curves
) -> None:
    flags = (
        f"{ENDLESS} --save-interval 4 --save-retry-interval 1 --max-save-failures 100000 "
        "--keep-latest-checkpoints 2"
    )
    job = on_disk(f"{flags} {mode}")
    launch = job.launch()
    launch.wait_for_line("successfully saved checkpoint")
    with between_saves(launch, job.folder):
        assert disk.remount("ro")
        safe = read_pointed_iteration(job.folder)
        assert safe is not None
    launch.wait_for_line("in a row)", times=3)
    output = launch.output()
    assert re.search(
        r"failed \(1 of 100000 in a row\):\n  rank 0 on \S+: \[Errno 30\] Read-only file system",
        output,
    ), output
    assert read_pointed_iteration(job.folder) == safe
    job.verify(safe)
    saved = len(saved_lines(output))
    assert disk.remount("rw")
    launch.wait_for_line("successfully saved checkpoint", times=saved + 2)
    switch.touch()
    assert launch.codes() == [0], launch.all_output()
    job.check(max(job.curve()))
    assert job.curve() == uninterrupted(ENDLESS, max(job.curve()))


@pytest.mark.full
def test_a_file_system_that_stays_read_only_ends_the_run(
    disk: Disk, on_disk: NewJob, uninterrupted: Curves
) -> None:
    flags = f"{ENDLESS} --save-interval 4 --save-retry-interval 1"
    job = on_disk(flags)
    launch = job.launch()
    launch.wait_for_line("successfully saved checkpoint")
    with between_saves(launch, job.folder):
        assert disk.remount("ro")
        safe = read_pointed_iteration(job.folder)
        assert safe is not None
    assert launch.codes() == [2], launch.all_output()
    assert [number for _, number in failures(launch.output())] == [1, 2, 3]
    assert f"checkpoints are untouched, the newest: global_step{safe}" in launch.output()
    job.verify(safe)
    assert disk.remount("rw")
    # The lease that could not be removed does not prevent the next launch.
    output = job.succeed(f"--exit-interval {safe + 8}")
    assert loaded_line(output) == safe
    assert job.curve() == uninterrupted(ENDLESS, max(job.curve()))
