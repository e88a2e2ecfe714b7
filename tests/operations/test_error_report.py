"""Error reports of ranks: no report is torn, and the hosts at fault are found."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.base.error_report import FOLDER_VARIABLE, ErrorReport, build_report, host_io_error
from megatron.base.errors import CheckpointError, ConfigError, DataError
from megatron.extras.operations.slurm.start import hosts_at_fault, read_reports

ROOT = Path(__file__).resolve().parents[2]
RANKS = 150
LONG = "a message of many words " * 1_000
"""Longer than a page of memory, so that a torn file would be noticed."""

RANKS_THAT_END = """
import os, sys
from pathlib import Path
from megatron.base.error_report import build_report, write_report
from megatron.base.errors import ConfigError

folder, ranks, long = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ready, start = os.pipe()
children = []
for rank in range(ranks):
    child = os.fork()
    if child == 0:
        os.close(start)
        # This returns when the parent closes the other end, so all begin at the same time.
        os.read(ready, 1)
        for _ in range(2):
            environment = {"RANK": str(rank), "SLURMD_NODENAME": f"n{rank % 10}"}
            report = build_report(ConfigError(f"{rank} {long[137 * rank :]}"), environment)
            write_report(folder, report)
        os._exit(0)
    children.append(child)
os.close(start)
sys.exit(max(os.waitpid(child, 0)[1] for child in children))
"""


def test_reports_of_many_ranks_at_the_same_time_are_complete(tmp_path: Path) -> None:
    """A reader finds only complete reports while many processes write theirs, twice each."""
    words = [sys.executable, "-c", RANKS_THAT_END, str(tmp_path), str(RANKS), LONG]
    writers = subprocess.Popen(words, cwd=ROOT)
    looks = 0
    while writers.poll() is None:
        for path in tmp_path.glob("*.json"):
            assert json.loads(path.read_text())["kind"] == "ConfigError"
            looks += 1
    assert writers.returncode == 0
    assert looks > 0
    reports, unreadable = read_reports(tmp_path)
    assert unreadable == []
    assert [(report.rank, report.host) for report in reports] == [
        (rank, f"n{rank % 10}") for rank in range(RANKS)
    ]
    assert all(report.message == f"{report.rank} {LONG[137 * report.rank :]}" for report in reports)


@pytest.mark.parametrize("damage", [{"rank": "x"}, {"message": None}, {"hung_hosts": [None]}])
def test_report_with_a_value_of_another_type_is_named(
    damage: dict[str, object], tmp_path: Path
) -> None:
    good = {"rank": 1, "host": "n1", "kind": "DataError", "message": "no data"}
    (tmp_path / "rank_0.json").write_text(json.dumps({**good, **damage}))
    (tmp_path / "rank_1.json").write_text(json.dumps(good))
    reports, unreadable = read_reports(tmp_path)
    assert [report.rank for report in reports] == [1]
    assert unreadable == ["rank_0.json"]


def test_files_that_hold_no_report_are_named(tmp_path: Path) -> None:
    (tmp_path / "rank_000001.json").write_text('{"rank": 1, "ho')
    (tmp_path / "rank_000002.json.new").write_text("")
    (tmp_path / "rank_000003.json").write_text("[" * 100_000)
    (tmp_path / "rank_000000.json").write_text(
        json.dumps({"rank": 0, "host": "n1", "kind": "DataError", "message": "m"})
    )
    reports, unreadable = read_reports(tmp_path)
    assert [report.rank for report in reports] == [0]
    assert unreadable == ["rank_000001.json", "rank_000002.json.new", "rank_000003.json"]


def _raised(kind: type[Exception], message: str, number: int | None) -> BaseException:
    """Return an error of a kind whose cause is an OSError with this number, or a ValueError."""
    cause: Exception = ValueError("no number")
    if number is not None:
        cause = OSError(number, "trouble", "file")
    try:
        raise kind(message) from cause
    except kind as error:
        return error


@pytest.mark.parametrize(
    ("kind", "number", "found"),
    [
        (DataError, errno.EIO, errno.EIO),
        (DataError, errno.ENOSPC, errno.ENOSPC),
        (CheckpointError, errno.ESTALE, errno.ESTALE),
        # All hosts share the folder of checkpoints.
        (CheckpointError, errno.ENOSPC, None),
        (CheckpointError, errno.EROFS, None),
        # A wrong path is not the fault of a host.
        (DataError, errno.ENOENT, None),
        (DataError, errno.EACCES, None),
        (ConfigError, None, None),
    ],
)
def test_only_errors_of_disks_and_mounts_can_be_the_fault_of_a_host(
    kind: type[Exception], number: int | None, found: int | None
) -> None:
    assert host_io_error(_raised(kind, "m", number)) == found


def test_io_error_of_the_kernel_is_found_as_the_cause_of_another_error() -> None:
    """The report has EIO, which reading one's own memory at address 0 gives."""
    try:
        try:
            Path("/proc/self/mem").read_bytes()
        except OSError as error:
            raise DataError("cannot be read") from error
    except DataError as error:
        report = build_report(error, {"RANK": "3", "SLURMD_NODENAME": "n2"})
    assert report.rank == 3
    assert report.host == "n2"
    assert report.kind == "DataError"
    assert report.io_error == errno.EIO


def report_of(rank: int, host: str, message: str = "m", io_error: int | None = None) -> ErrorReport:
    return ErrorReport(rank=rank, host=host, kind="DataError", message=message, io_error=io_error)


def test_host_with_io_errors_is_at_fault() -> None:
    first = report_of(2, "n2", io_error=errno.EIO)
    second = report_of(3, "n2", "other", errno.EIO)
    assert set(hosts_at_fault([first], 4)) == {"n2"}
    assert set(hosts_at_fault([first, second], 4)) == {"n2"}


def test_message_that_other_ranks_repeat_is_the_same_error() -> None:
    """After a failed save, all ranks end with the message of the rank that failed."""
    reports = [
        report_of(0, "n1"),
        report_of(1, "n1"),
        report_of(2, "n2", io_error=errno.EIO),
        report_of(3, "n2"),
    ]
    assert set(hosts_at_fault(reports, 2)) == {"n2"}


def test_same_error_on_all_ranks_needs_a_person() -> None:
    assert hosts_at_fault([report_of(rank, f"n{rank}") for rank in range(4)], 4) == {}


def test_io_error_together_with_another_error_needs_a_person() -> None:
    flag = report_of(0, "n1", "wrong flag")
    disk = report_of(2, "n2", io_error=errno.EIO)
    assert hosts_at_fault([flag, disk], 4) == {}


def test_io_errors_on_more_than_half_of_the_hosts_need_a_person() -> None:
    """A shared file system that fails excludes no host."""
    reports = [report_of(rank, f"n{rank}", io_error=errno.EIO) for rank in range(3)]
    assert hosts_at_fault(reports, 4) == {}
    assert set(hosts_at_fault(reports[:2], 4)) == {"n0", "n1"}


def test_only_host_of_a_job_is_excluded() -> None:
    assert set(hosts_at_fault([report_of(0, "n1", io_error=errno.EIO)], 1)) == {"n1"}


def test_error_file_of_torchrun_is_written_too(tmp_path: Path) -> None:
    """A wrong flag gives exit code 2, torchrun's file, and the report for the array task."""
    environment = os.environ | {
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
        FOLDER_VARIABLE: str(tmp_path),
        "RANK": "0",
    }
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", "--no-such-flag"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "no-such-flag" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    (tmp_path / "error.json").unlink()
    (report,) = read_reports(tmp_path)[0]
    assert report.kind == "ConfigError"
    assert report.io_error is None
