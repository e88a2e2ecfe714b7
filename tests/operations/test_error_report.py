"""Which hosts are at fault by what the ranks reported, and that a report is never torn."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.error_report import (
    FOLDER_VARIABLE,
    ErrorReport,
    build_report,
    host_io_error,
    hosts_at_fault,
    read_reports,
)
from megatron.errors import CheckpointError, ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]
RANKS = 150
LONG = "a message of many words " * 1_000
"""More than a page: a torn file would show."""

RANKS_THAT_END = """
import os, sys
from pathlib import Path
from megatron.error_report import build_report, write_report
from megatron.errors import ConfigError

folder, ranks, long = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ready, start = os.pipe()
children = []
for rank in range(ranks):
    child = os.fork()
    if child == 0:
        os.close(start)
        os.read(ready, 1)  # ends when the parent closes the other end: all begin at once
        for _ in range(2):
            environment = {"RANK": str(rank), "SLURMD_NODENAME": f"n{rank % 10}"}
            report = build_report(ConfigError(f"{rank} {long[137 * rank :]}"), environment)
            write_report(folder, report)
        os._exit(0)
    children.append(child)
os.close(start)
sys.exit(max(os.waitpid(child, 0)[1] for child in children))
"""


def test_many_ranks_that_report_at_once_tear_nothing(tmp_path: Path) -> None:
    """Processes that write at the same instant, twice each, and a reader that looks meanwhile: whatever it finds is whole."""
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


def test_what_a_killed_rank_left_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank_000001.json").write_text('{"rank": 1, "ho')
    (tmp_path / "rank_000002.json.new").write_text("")
    (tmp_path / "rank_000000.json").write_text(
        json.dumps({"rank": 0, "host": "n1", "kind": "DataError", "message": "m"})
    )
    reports, unreadable = read_reports(tmp_path)
    assert [report.rank for report in reports] == [0]
    assert unreadable == ["rank_000001.json", "rank_000002.json.new"]


def _raised(kind: type[Exception], message: str, number: int | None) -> BaseException:
    try:
        try:
            raise (
                OSError(number, "trouble", "file")
                if number is not None
                else ValueError("no number")
            )
        except (OSError, ValueError) as cause:
            raise kind(message) from cause
    except kind as error:
        return error


@pytest.mark.parametrize(
    ("kind", "number", "found"),
    [
        (DataError, errno.EIO, errno.EIO),
        (DataError, errno.ENOSPC, errno.ENOSPC),
        (CheckpointError, errno.ESTALE, errno.ESTALE),
        (CheckpointError, errno.ENOSPC, None),  # of the folder that all hosts share
        (CheckpointError, errno.EROFS, None),
        (DataError, errno.ENOENT, None),  # a wrong path
        (DataError, errno.EACCES, None),
        (ConfigError, None, None),
    ],
)
def test_which_errors_can_be_a_hosts(
    kind: type[Exception], number: int | None, found: int | None
) -> None:
    assert host_io_error(_raised(kind, "m", number)) == found


def test_a_read_error_of_the_kernel_is_known_through_a_message(tmp_path: Path) -> None:
    """A process that really gets EIO, from its own memory at address 0, in a file of the configuration."""
    try:
        try:
            Path("/proc/self/mem").read_bytes()
        except OSError as error:
            raise DataError("cannot be read") from error
    except DataError as error:
        report = build_report(error, {"RANK": "3", "SLURMD_NODENAME": "n2"})
    assert (report.rank, report.host, report.kind, report.io_error) == (
        3,
        "n2",
        "DataError",
        errno.EIO,
    )


def one(rank: int, host: str, message: str = "m", io_error: int | None = None) -> ErrorReport:
    return ErrorReport(rank, host, "DataError", message, io_error)


def test_one_host_with_an_io_error() -> None:
    assert set(hosts_at_fault([one(2, "n2", io_error=errno.EIO)], 4)) == {"n2"}
    assert set(
        hosts_at_fault([one(2, "n2", io_error=errno.EIO), one(3, "n2", "other", errno.EIO)], 4)
    ) == {"n2"}


def test_what_the_other_ranks_repeat_is_the_same_error() -> None:
    """Ranks agree on a failed save: all of them end with the message of the one that failed."""
    reports = [one(0, "n1"), one(1, "n1"), one(2, "n2", io_error=errno.EIO), one(3, "n2")]
    assert set(hosts_at_fault(reports, 2)) == {"n2"}


def test_what_every_rank_explains_alike_needs_a_person() -> None:
    assert hosts_at_fault([one(rank, f"n{rank}") for rank in range(4)], 4) == {}


def test_another_error_beside_it_needs_a_person() -> None:
    assert hosts_at_fault([one(0, "n1", "wrong flag"), one(2, "n2", io_error=errno.EIO)], 4) == {}


def test_io_errors_on_most_hosts_need_a_person() -> None:
    """A shared file system that fails excludes no host."""
    assert hosts_at_fault([one(rank, f"n{rank}", io_error=errno.EIO) for rank in range(3)], 4) == {}
    assert set(
        hosts_at_fault([one(rank, f"n{rank}", io_error=errno.EIO) for rank in range(2)], 4)
    ) == {"n0", "n1"}


def test_a_job_of_one_host_moves_to_another() -> None:
    assert set(hosts_at_fault([one(0, "n1", io_error=errno.EIO)], 1)) == {"n1"}


def test_torchruns_own_file_is_written_too(tmp_path: Path) -> None:
    """One process ends with a wrong flag: exit code 2, torchrun's record, and the report of the array task."""
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
