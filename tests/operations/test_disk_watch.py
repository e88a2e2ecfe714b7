"""Numbers of tools/fs_watchdog.py, compared with those of df and du, and its alerts."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from operations.receivers import mail_server

from megatron.base.errors import OperationsError
from megatron.base.plain_text import format_bytes
from megatron.checkpoint.folder import step_folder
from megatron.checkpoint.manifest import MANIFEST, Manifest
from megatron.extras.operations.commands import fs_watchdog
from megatron.extras.operations.commands.fs_watchdog import (
    DiskWatch,
    check_disks,
    estimate_daily_growth,
    measure_file_system,
    measure_folder,
    parse_watch,
)
from megatron.extras.operations.monitor.alerts import CheckFindings

DAY = 86_400.0
NOW = 1_800_000_000.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Nested folders with hard and symbolic links, a hole, and a name that is not UTF-8."""
    root = tmp_path / "work"
    for name in ("a/b/c", "empty"):
        (root / name).mkdir(parents=True)
    (root / "a" / "one").write_bytes(bytes(100_000))
    (root / "a" / "b" / "two").write_bytes(bytes(50_000))
    os.link(root / "a" / "one", root / "a" / "b" / "c" / "one-again")
    (root / "loop").symlink_to(root)
    (root / "dangling").symlink_to("nowhere")
    with (root / "hole").open("wb") as file:
        file.truncate(10**9)
    (root / os.fsdecode(b"\xff")).write_text("x")
    return root


def du(*flags: str) -> int:
    return int(
        subprocess.run(
            ["du", "--summarize", *flags], capture_output=True, check=True
        ).stdout.split()[0]
    )


def texts(report: CheckFindings) -> list[str]:
    return [alert.text for alert in report.alerts]


@pytest.mark.parametrize(
    ("text", "watch"),
    [
        ("/scratch=90%", DiskWatch(Path("/scratch"), 90.0)),
        ("/work=2TB,500k-inodes", DiskWatch(Path("/work"), None, 2 * 10**12, 500_000)),
        ("/odd=name=1.5GiB", DiskWatch(Path("/odd=name"), None, 3 * 2**29)),
        ("/w=95.5%, 1000inodes,100B", DiskWatch(Path("/w"), 95.5, 100, 1000)),
        ("rel/path=3M-inodes", DiskWatch(Path("rel/path"), None, None, 3_000_000)),
    ],
)
def test_limits_are_parsed(text: str, watch: DiskWatch) -> None:
    assert parse_watch(text) == watch


@pytest.mark.parametrize(
    "text",
    [
        "/work",
        "=90%",
        "/work=",
        "/work=90",
        "/work=0%",
        "/work=101%",
        "/work=0TB",
        "/work=2TB,3TB",
        "/work=-1GB",
        "/work=1XB",
    ],
)
def test_wrong_limits_are_refused(text: str) -> None:
    with pytest.raises(OperationsError, match=r"--watch '.*(write PATH=90%|must be above 0)"):
        parse_watch(text)


def test_folder_usage_equals_that_of_du(folder: Path) -> None:
    usage = measure_folder(folder)
    assert usage.bytes == du("--block-size=1", str(folder))
    assert usage.bytes < 10**9
    assert usage.inodes == du("--inodes", str(folder))
    assert usage.inodes == 11
    assert usage.unread == 0
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert measure_folder(link) == usage


def test_file_system_usage_equals_that_of_df(tmp_path: Path) -> None:
    done = subprocess.run(
        ["df", "--block-size=1", "--output=used,avail,iused,iavail", tmp_path],
        capture_output=True,
        text=True,
        check=True,
    )
    used, free, inodes, inodes_free = (
        int(word) if word.isdecimal() else 0 for word in done.stdout.split()[-4:]
    )
    gauges = measure_file_system(tmp_path, 50)
    expected = ((used, free), (inodes, inodes_free))
    for gauge, (df_used, df_free) in zip(gauges, expected, strict=inodes > 0):
        # Other processes write at the same time.
        assert gauge.used == pytest.approx(df_used, rel=0.01)
        assert gauge.full == pytest.approx(df_used + df_free, rel=0.01)
        assert gauge.limit == round(gauge.full / 2)


def test_path_over_a_limit_is_an_alert(folder: Path, tmp_path: Path) -> None:
    def check(text: str) -> CheckFindings:
        report = check_disks(
            [parse_watch(f"{folder}={text}")], [], tmp_path / "history.json", days_left=3
        )
        assert report.troubles == []
        return report

    assert texts(check("10MB,12-inodes")) == []
    (text,) = texts(check("10MB,11-inodes"))
    assert text.startswith(f"{folder} is full: folder 11 inodes of 11 inodes (100.0 %)")
    (text,) = texts(check("150kB,11-inodes"))
    assert "of 150 kB" in text
    assert "; folder 11 inodes of 11" in text
    assert texts(check("100%")) == []
    (text,) = texts(check("0.000001%"))
    assert f"{folder} is full: file system " in text
    used = measure_folder(folder).bytes
    percent = f"{used / 1e5:.1f} %"
    assert check("10MB").pulses == [f"{folder}: folder {format_bytes(used)} of 10.0 MB ({percent})"]


def test_growth_and_days_left(folder: Path, tmp_path: Path) -> None:
    """Growth is estimated for a folder that gains a megabyte every six hours."""
    history = tmp_path / "history.json"
    watches = [parse_watch(f"{folder}=20MB")]
    reports = []
    for step in range(12):
        (folder / f"grown{step}").write_bytes(b"x" * 1_000_000)
        reports.append(check_disks(watches, [], history, days_left=2.0, now=NOW + step * DAY / 4))
    # The first check has nothing to compare with.
    assert "a day" not in reports[0].pulses[0]
    assert ", 4.01 MB more a day, full in 4.4 days" in reports[1].pulses[0]
    soon = [bool(report.alerts) for report in reports]
    assert soon == [False] * 11 + [True] or soon == [False] * 10 + [True] * 2
    assert f"{folder} is soon full: folder " in texts(reports[-1])[0]
    for step in range(12):
        (folder / f"grown{step}").unlink()
    # Growth does not use points that are older than 3 days.
    shrunk = check_disks(watches, [], history, days_left=2.0, now=NOW + 10 * DAY)
    assert shrunk.alerts == []
    assert "a day" not in shrunk.pulses[0]
    assert f"disk {folder} soon full" in shrunk.watched
    points = json.loads(history.read_text())[f"{folder} folder bytes"]
    # Points that are older than 7 days are dropped.
    assert [at for at, _ in points] == [NOW + 10 * DAY]


def test_growth_is_measured_after_the_clock_was_set_back(folder: Path, tmp_path: Path) -> None:
    history = tmp_path / "history.json"
    watches = [parse_watch(f"{folder}=20MB")]
    check_disks(watches, [], history, days_left=0.0, now=NOW + 2 * DAY)
    reports = []
    for step in range(12):
        (folder / f"grown{step}").write_bytes(b"x" * 1_000_000)
        reports.append(check_disks(watches, [], history, days_left=0.0, now=NOW + step * DAY / 4))
    assert "a day" not in reports[0].pulses[0]
    # Also when the clock has passed the point that was in the future.
    for report in reports[1:]:
        assert " MB more a day" in report.pulses[0]
    points = json.loads(history.read_text())[f"{folder} folder bytes"]
    assert len(points) == 12
    assert points == sorted(points)


def test_growth_is_a_trend_and_not_a_step() -> None:
    def saw(hours: int) -> float:
        # A checkpoint is saved every 12 hours and deleted 6 hours later.
        if hours % 12 >= 6:
            return 124.0 + hours
        return 100.0 + hours

    points = [(NOW + 3600 * hours, saw(hours)) for hours in range(72)]
    assert estimate_daily_growth(points, points[-1][0]) == pytest.approx(24, rel=0.3)
    # Five hours are too few.
    assert estimate_daily_growth(points[:6], points[5][0]) is None
    assert estimate_daily_growth([], NOW) is None


def test_history_that_is_damaged_or_cannot_be_written_is_reported(
    folder: Path, tmp_path: Path
) -> None:
    history = tmp_path / "history.json"
    for damage in ("{", "[1]", '{"a": 3}', '{"a": [[1]]}'):
        history.write_text(damage)
        report = check_disks([parse_watch(f"{folder}=20MB")], [], history, days_left=3)
        assert "started from scratch" in report.troubles[0]
        assert len(report.pulses) == 1
    report = check_disks(
        [parse_watch(f"{folder}=20MB")], [], tmp_path / "gone" / "history.json", days_left=3
    )
    assert "cannot be written" in report.troubles[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_folder_that_cannot_be_read_is_reported(folder: Path, tmp_path: Path) -> None:
    (folder / "a" / "b").chmod(0)
    tmp_path.chmod(0o755)
    # It runs in the folder itself, because only root may enter the folder's parents.
    code = f"""
import os
from pathlib import Path
from megatron.extras.operations.commands.fs_watchdog import check_disks, parse_watch
os.chdir({str(tmp_path)!r})
os.seteuid(65534)
report = check_disks([parse_watch("work=20MB")], [], Path("/tmp/gone/h.json"), days_left=3)
print(report.troubles[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "1 entries of work could not be read" in done.stdout
    assert "work/a/b: Permission denied" in done.stdout
    (folder / "a" / "b").chmod(0o755)


def test_bytes_are_formatted_with_three_digits() -> None:
    sizes = (0, 999, 1000, 9994, 9996, 99_940, 99_960, 999_400, 999_600, 2e12, 1e18)
    assert [format_bytes(size) for size in sizes] == [
        "0 bytes",
        "999 bytes",
        "1.00 kB",
        "9.99 kB",
        "10.0 kB",
        "99.9 kB",
        "100 kB",
        "999 kB",
        "1.00 MB",
        "2.00 TB",
        "1,000 PB",
    ]


# Checkpoints


def save(run: Path, iteration: int, size: int, days_ago: float) -> None:
    folder = step_folder(run, iteration)
    folder.mkdir(parents=True)
    manifest = Manifest(
        iteration, "0", "", {}, None, {"tensors": {"bytes": size, "xxh128": ""}}, [], False
    )
    (folder / MANIFEST).write_text(manifest.dump_json())
    then = time.time() - days_ago * DAY
    os.utime(folder / MANIFEST, (then, then))


def test_checkpoints_growth_and_room_are_reported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    history = tmp_path / "history.json"
    run.mkdir()
    assert check_disks([], [run], history, days_left=3).pulses == [f"{run}: no checkpoints"]
    for number in range(5):
        save(run, 300 * (number + 1), 4_000_000, days_ago=2 - 0.5 * number)
    report = check_disks([], [run], history, days_left=3)
    assert f"{run}: 5 checkpoints, the newest of 4.00 MB, " in report.pulses[0]
    assert "one every 0.5 days, 8.00 MB a day are kept; room for " in report.pulses[0]
    assert report.alerts == []
    # The limit of a folder that holds the run counts as well.
    (text,) = texts(check_disks([parse_watch(f"{tmp_path}=8MB")], [run], history, days_left=3))
    room = format_bytes(8_000_000 - measure_folder(tmp_path).bytes)
    assert f"{run}: room for 1 more checkpoints of 4.00 MB ({room} free)" in text
    save(run, 1800, 10**18, days_ago=0)
    (text,) = texts(check_disks([], [run], history, days_left=3))
    assert "room for 0 more checkpoints of 1,000 PB" in text


def test_damaged_checkpoint_is_reported_and_the_others_are_counted(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save(tmp_path, number, 1000, days_ago=4 - number)
    (tmp_path / "global_step2" / MANIFEST).write_text("{}")
    report = check_disks([], [tmp_path], tmp_path / "history.json", days_left=3)
    assert "2 checkpoints" in report.pulses[0]
    assert "global_step2: manifest.json is not what was written" in report.troubles[0]


# The tool


def test_missing_paths_do_not_prevent_the_check_of_others(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "disks.txt"
    limits = ("/absent=90%", f"{folder}=100kB", f"{folder / 'hole'}=1GB")
    watches = [f"--watch={limit}" for limit in limits]
    with mail_server() as mailbox:
        mail = ["--mail-to", "a@site.org", "--smtp", mailbox.address]
        arguments = ["--main-log", str(log), *watches, "--run", "/no/run", *mail]
        assert fs_watchdog.main(arguments) == 2
        assert fs_watchdog.main(arguments) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "--watch /absent cannot be checked: No such file or directory" in errors[0]
    assert f"--watch {folder / 'hole'} cannot be checked: Not a directory" in errors[1]
    assert "--run /no/run cannot be checked: No such file or directory" in errors[2]
    assert len(mailbox.messages) == 1
    assert f"{folder} is full" in mailbox.messages[0].get_content()
    lines = log.read_text().splitlines()
    assert [line.split("] ")[1].split(":")[0] for line in lines] == (["PULSE"] + ["ALERT"] * 4) * 2


def test_exit_codes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "disks.txt"

    def check(*arguments: str) -> int:
        return fs_watchdog.main(["--main-log", str(log), *arguments])

    assert check(f"--watch={folder}=1GB", f"--watch={tmp_path}=1GB") == 0
    assert check(f"--watch={folder}=1kB") == 1
    assert check(f"--watch={folder}=1GB") == 0
    words = [line.split("] ")[1].split(":")[0] for line in log.read_text().splitlines()]
    assert words == ["PULSE", "PULSE", "PULSE", "ALERT", "PULSE", "RECOVERED"]
    assert capsys.readouterr().out == log.read_text()
    assert check() == 2
    assert "nothing to watch" in capsys.readouterr().err
    assert check(f"--watch={folder}") == 2
    assert "has no limit" in capsys.readouterr().err
