"""What real ranks report of an I/O error of their host, and of an error that every rank has."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from launches import Job
from test_disk import Disk, disk, new_disk  # noqa: F401

from megatron.error_report import FOLDER_VARIABLE, ErrorReport, hosts_at_fault, read_reports


@pytest.fixture
def errors(tmp_path: Path) -> Path:
    """The folder that an array task names."""
    folder = tmp_path / "errors"
    folder.mkdir()
    return folder


@pytest.fixture
def full_cache(disk: Disk, corpus: str, tmp_path: Path) -> Iterator[Job]:  # noqa: F811
    """A job of two ranks, whose index cache lies on a disk of the host that is full."""
    job = Job(corpus, disk.folder / "cache", tmp_path / "run", tmp_path / "logs", "", 2, None)
    disk.fill()
    yield job
    job.close()


def reports_of(job: Job, errors: Path, extra: str = "") -> list[ErrorReport]:
    """What the ranks of a launch that ends with an error wrote."""
    launch = job.launch(extra, environment={FOLDER_VARIABLE: str(errors), "SLURMD_NODENAME": "n1"})
    assert launch.codes(by_themselves=True) == [2, 2], launch.all_output()
    reports, unreadable = read_reports(errors)
    assert unreadable == []
    return reports


def test_a_full_local_disk_is_the_hosts(full_cache: Job, errors: Path) -> None:
    reports = reports_of(full_cache, errors)
    assert [(report.rank, report.host, report.kind, report.io_error) for report in reports] == [
        (rank, "n1", "DataError", errno.ENOSPC) for rank in (0, 1)
    ]
    assert set(hosts_at_fault(reports, hosts=2)) == {"n1"}


def test_a_wrong_flag_is_a_persons(full_cache: Job, errors: Path) -> None:
    reports = reports_of(full_cache, errors, "--micro-batch-size 3")
    assert {(report.kind, report.io_error) for report in reports} == {("ConfigError", None)}
    assert hosts_at_fault(reports, hosts=2) == {}
