"""Reports of real ranks about an I/O error of their host, and about an error of every rank."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.launches import Job
from faults.test_disk import Disk, disk, new_disk  # noqa: F401

from megatron.base.error_report import FOLDER_VARIABLE, ErrorReport
from megatron.extras.operations.slurm.start import hosts_at_fault, read_reports

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def errors(tmp_path: Path) -> Path:
    """Return a folder for error reports, as an array task names it."""
    folder = tmp_path / "errors"
    folder.mkdir()
    return folder


@pytest.fixture
def full_cache(disk: Disk, corpus: str, tmp_path: Path) -> Iterator[Job]:  # noqa: F811
    """Return a job of two ranks whose index cache is on a full disk of the host."""
    job = Job(corpus, disk.folder / "cache", tmp_path / "run", tmp_path / "logs", "", 2, None)
    disk.fill()
    yield job
    job.close()


def launch_and_read_reports(job: Job, errors: Path, extra: str = "") -> list[ErrorReport]:
    """Launch, expect an error on every rank, and return the reports of the ranks."""
    launch = job.launch(extra, environment={FOLDER_VARIABLE: str(errors), "SLURMD_NODENAME": "n1"})
    assert launch.codes(by_themselves=True) == [2, 2], launch.all_output()
    reports, unreadable = read_reports(errors)
    assert unreadable == []
    return reports


def test_full_local_disk_is_attributed_to_the_host(full_cache: Job, errors: Path) -> None:
    reports = launch_and_read_reports(full_cache, errors)
    assert [(report.rank, report.host, report.kind, report.io_error) for report in reports] == [
        (rank, "n1", "DataError", errno.ENOSPC) for rank in (0, 1)
    ]
    assert set(hosts_at_fault(reports, hosts=2)) == {"n1"}


def test_wrong_flag_is_not_attributed_to_a_host(full_cache: Job, errors: Path) -> None:
    reports = launch_and_read_reports(full_cache, errors, "--micro-batch-size 3")
    assert {(report.kind, report.io_error) for report in reports} == {("ConfigError", None)}
    assert hosts_at_fault(reports, hosts=2) == {}


def test_error_at_the_end_of_a_run_is_reported(errors: Path) -> None:
    """The files of a run are closed after its last iteration, which may fail too."""
    code = """
import errno
from megatron.run import pretrain
def train(launch, closing):
    def fail():
        raise OSError(errno.EIO, "Input/output error")
    closing.callback(fail)
pretrain.pretrain = train
pretrain.run_launch(None)
"""
    environment = {**os.environ, FOLDER_VARIABLE: str(errors), "SLURMD_NODENAME": "n1"}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 1, ended.stderr
    assert "Input/output error" in ended.stderr
    reports, _ = read_reports(errors)
    assert [(report.host, report.io_error) for report in reports] == [("n1", errno.EIO)]
