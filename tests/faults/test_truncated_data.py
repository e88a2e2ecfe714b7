"""A data file that is truncated while a run reads it."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from faults.launches import ERROR, NewJob


@pytest.mark.parametrize(
    ("suffix", "ranks"),
    [(".bin", 1), (".idx", 1), pytest.param(".bin", 2, marks=pytest.mark.full)],
)
def test_truncated_file_is_named(
    suffix: str, ranks: int, new_job: NewJob, corpus: str, tmp_path: Path
) -> None:
    """Reading a mapped byte beyond the end of a file would end the process without a message."""
    for attempt in range(3):
        for name in (".bin", ".idx"):
            shutil.copy(f"{corpus}{name}", tmp_path / f"own{name}")
        flags = f"--train-iters 300000 --data-path {tmp_path / 'own'}"
        launch = new_job(f"job{attempt}", flags, ranks).launch()
        launch.wait_for_line("iteration        3/")
        left = (tmp_path / f"own{suffix}").stat().st_size // 4
        os.truncate(tmp_path / f"own{suffix}", left)
        code = launch.codes()[0]
        # Each read checks the size first. If the file shrinks between the two, nothing helps.
        if code != -signal.SIGBUS:
            break
    assert code == ERROR, launch.all_output()
    assert f"{tmp_path / 'own'}{suffix} was truncated while it is in use" in launch.output()
    assert f"and has {left} now" in launch.output()


def test_file_that_is_replaced_is_not_truncated(
    new_job: NewJob, corpus: str, tmp_path: Path
) -> None:
    """The mapped file stays complete if another one gets its name."""
    for name in (".bin", ".idx"):
        shutil.copy(f"{corpus}{name}", tmp_path / f"own{name}")
    switch = tmp_path / "stop"
    job = new_job(
        "job",
        f"--train-iters 300000 --data-path {tmp_path / 'own'} --kill-switch-path {switch}",
    )
    launch = job.launch()
    launch.wait_for_line("iteration        3/")
    (tmp_path / "short").write_bytes(b"")
    (tmp_path / "short").replace(tmp_path / "own.bin")
    seen = max(job.curve())
    launch.wait_for(lambda: max(job.curve()) > seen + 20, "further iterations")
    switch.touch()
    assert launch.codes() == [0], launch.all_output()
