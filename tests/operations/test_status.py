"""Findings of tools/slurm_status.py about queue, log and checkpoints.

A script replaces squeue. Its answers are those of Slurm 22.05.8 to our format. tests/slurm has the
tests with the real one.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from observe.reports import full_report
from operations.receivers import mail_server

from megatron.base.durable import append_lines
from megatron.base.errors import OperationsError
from megatron.checkpoint.folder import point_to, step_folder
from megatron.checkpoint.manifest import MANIFEST, Manifest
from megatron.extras.operations.commands import slurm_status
from megatron.extras.operations.monitor.alerts import log_line
from megatron.extras.operations.monitor.queue import (
    QueuedJob,
    find_idle_reason,
    format_duration,
    format_pulse,
    read_answer,
)
from megatron.extras.operations.monitor.status import (
    StatusLimits,
    StatusMemory,
    WatchedRun,
    check_run,
    read_tail,
)
from megatron.observe.log_line import (
    format_kill_switch_line,
    format_loaded_checkpoint_line,
    format_saved_checkpoint_line,
    format_slow_ranks_line,
    format_training_complete_line,
    format_training_line,
    format_validation_line,
)

HOUR = 3600.0
JOB = "tr8-104B"
RUNNING = (
    "1162855_4",
    "RUNNING",
    "None",
    "n[1-4]",
    "1-02:03:04",
    "2026-11-20T10:00:00",
    "(null)",
    JOB,
)
NEXT = ("1162855_[5-10%1]", "PENDING", "JobArrayTaskLimit", "", "0:00", "N/A", "(null)", JOB)
DEPENDS = ("12", "PENDING", "Dependency", "", "0:00", "N/A", "afterany:1162855(unfulfilled)", JOB)
LATER = ("13", "PENDING", "BeginTime", "", "0:00", "2026-11-21T13:00:01", "(null)", JOB)
NEVER = ("14", "PENDING", "DependencyNeverSatisfied", "", "0:00", "N/A", "afterok:2(failed)", JOB)
HELD = ("15", "PENDING", "JobHeldUser", "", "0:00", "N/A", "(null)", JOB)
ADMIN = ("16", "PENDING", "JobHeldAdmin", "", "0:00", "N/A", "(null)", JOB)
REQUEUED = ("1_[1,3-4]", "PENDING", "JobArrayTaskLimit,None", "", "0:00", "N/A", "(null)", JOB)
ENDING = ("17", "COMPLETING", "None", "n1", "1:00", "2026-11-21T11:00:00", "(null)", JOB)
WAITS_FOR_ROOM = ("18", "PENDING", "Resources", "", "0:00", "2026-11-21T11:00:00", "(null)", JOB)
NOON = time.mktime(time.strptime("2026-11-21 12:00:00", "%Y-%m-%d %H:%M:%S"))


def rows(*jobs: tuple[str, ...]) -> str:
    return "".join("\x1f".join(job) + "\n" for job in jobs)


Squeue = Callable[..., Path]


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Squeue:
    """Put a script before squeue in the PATH, as in `squeue(RUNNING)` and `squeue(code=1)`.

    The call returns the file with the arguments that the script received.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    # A user may have set this for interactive use.
    monkeypatch.setenv("SQUEUE_STATES", "SUSPENDED")

    def answer(*jobs: tuple[str, ...], stderr: str = "", code: int = 0) -> Path:
        (folder / "answer").write_text(rows(*jobs))
        lines = (
            "#!/bin/sh",
            f'echo "$@ $SQUEUE_STATES" > {folder}/asked',
            f"cat {folder}/answer",
            f'printf "%s" "{stderr}" >&2',
            f"exit {code}",
        )
        (folder / "squeue").write_text("\n".join(lines) + "\n")
        (folder / "squeue").chmod(0o755)
        return folder / "asked"

    return answer


def running(seconds: float) -> tuple[str, ...]:
    return (*RUNNING[:4], format_duration(seconds).removeprefix("0-"), *RUNNING[5:])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs" / "main_log.txt"


def train(log: Path, first: int, last: int, *, seconds_ago: float = 0.0, **fields: Any) -> None:
    """Append training output, and set the log's modification time to `seconds_ago`."""
    with log.open("a") as file:
        for iteration in range(first, last + 1):
            file.write(
                format_training_line(
                    replace(full_report(), nan_iterations=0, iteration=iteration, **fields)
                )
                + "\n"
            )
    then = time.time() - seconds_ago
    os.utime(log, (then, then))


def kinds(log: Path) -> list[str]:
    """Return PULSE, ALERT or RECOVERED for each line of the tools."""
    return re.findall(
        r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ([A-Z]+): ", log.read_text(), re.MULTILINE
    )


def found(log: Path, *, run: Path | None = None, now: float | None = None, **limits: float) -> str:
    """Return the texts of all alerts of one check."""
    findings = check_run(WatchedRun(JOB, log, run, limits=StatusLimits(**limits)), now)
    assert findings.troubles == []
    assert all(alert.kind in findings.watched for alert in findings.alerts)
    return "\n".join(alert.text for alert in findings.alerts)


# The queue


@pytest.mark.parametrize(
    ("jobs", "text"),
    [
        (
            (RUNNING,),
            "tr8-104B is running for 1-02:03:04 since 2026-11-20 10:00:00 (1162855_4 on n[1-4])",
        ),
        (
            (NEXT,),
            "tr8-104B is waiting for the previous array task (1162855_[5-10%1], JobArrayTaskLimit)",
        ),
        ((DEPENDS,), "tr8-104B is waiting on a dependency (12, afterany:1162855(unfulfilled))"),
        (
            (LATER,),
            "tr8-104B is scheduled to start in 0-01:00:01 at 2026-11-21 13:00:01 (13, BeginTime)",
        ),
        ((HELD,), "tr8-104B is pending for reason JobHeldUser (15)"),
        (
            (NEVER,),
            "tr8-104B is pending for reason DependencyNeverSatisfied (14, afterok:2(failed))",
        ),
        # The expected start is in the past.
        ((WAITS_FOR_ROOM,), "tr8-104B is pending for reason Resources (18)"),
        (
            (REQUEUED,),
            "tr8-104B is waiting for the previous array task (1_[1,3-4], JobArrayTaskLimit)",
        ),
        ((ENDING,), "tr8-104B is completing (17 on n1)"),
        ((), "tr8-104B is neither running nor scheduled"),
        (
            # Running jobs come first, and jobs that are stuck come last.
            (NEVER, DEPENDS, NEXT, LATER, RUNNING),
            "tr8-104B is running for 1-02:03:04 since 2026-11-20 10:00:00 (1162855_4 on n[1-4]); "
            "another is waiting on a dependency (12, afterany:1162855(unfulfilled)); "
            "another is waiting for the previous array task (1162855_[5-10%1], JobArrayTaskLimit); "
            "another is scheduled to start in 0-01:00:01 at 2026-11-21 13:00:01 (13, BeginTime); "
            "and 1 more",
        ),
    ],
)
def test_pulse_of_each_state(jobs: tuple[tuple[str, ...], ...], text: str) -> None:
    assert format_pulse(JOB, read_answer(rows(*jobs), JOB), NOON) == text


def test_jobs_that_cannot_start_by_themselves_are_an_alert() -> None:
    def idle_reason(*jobs: tuple[str, ...]) -> str:
        return find_idle_reason(JOB, read_answer(rows(*jobs), JOB)) or ""

    assert "tr8-104B is neither running nor scheduled" in idle_reason()
    for job in (RUNNING, NEXT, DEPENDS, LATER, HELD, REQUEUED, ENDING, WAITS_FOR_ROOM):
        assert idle_reason(job, NEVER) == ""
    stuck = idle_reason(NEVER, ADMIN)
    assert "nothing that is queued can start by itself" in stuck
    assert "14 (DependencyNeverSatisfied), 16 (JobHeldAdmin)" in stuck
    requeue_held = ("19", "PENDING", "launch failed requeued held", *NEXT[3:])
    assert "can start by itself" in idle_reason(requeue_held)


def test_answer_of_squeue_is_parsed() -> None:
    (job,) = read_answer(
        "CLUSTER: big\n"
        + rows(("7", "RUNNING", "None", "n1", "INVALID", "N/A", "(null)", "a|b, c")),
        "a|b, c",
    )
    assert job == QueuedJob(
        id="7",
        state="RUNNING",
        reason="",
        nodes="n1",
        running_seconds=None,
        start=None,
        dependency="",
    )
    for text, seconds in (
        ("0:07", 7),
        ("59:59", 3599),
        ("23:00:00", 82_800),
        ("12-00:00:01", 1_036_801),
    ):
        (job,) = read_answer(rows((*RUNNING[:4], text, *RUNNING[5:])), JOB)
        assert job.running_seconds == seconds
    with pytest.raises(OperationsError, match="must support --noheader and --format"):
        read_answer("JOBID PARTITION\n", JOB)


def test_tool_writes_its_lines_to_the_log(
    squeue: Squeue, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = squeue(RUNNING, NEXT)
    train(log, 1, 3)
    assert slurm_status.main(["--job-name", JOB, "--main-log", str(log)]) == 0
    assert log.read_text().splitlines()[-1] == capsys.readouterr().out.strip()
    assert "] PULSE: tr8-104B is running for 1-02:03:04 since" in log.read_text()
    words = asked.read_text().split()
    assert words[:4] == ["--noheader", "--all", f"--user={os.getuid()}", f"--name={JOB}"]
    assert "SUSPENDED" not in words
    squeue()
    assert slurm_status.main(["--job-name", JOB, "--main-log", str(log)]) == 1
    squeue(RUNNING)
    assert slurm_status.main(["--job-name", JOB, "--main-log", str(log)]) == 0
    assert kinds(log) == ["PULSE", "PULSE", "ALERT", "PULSE", "RECOVERED"]


@pytest.mark.parametrize(
    ("stderr", "code", "message"),
    [
        (
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
            1,
            "Unable to contact slurm controller",
        ),
        # squeue 22.05 ends with 0 after this error.
        ("squeue: error: Invalid user: 4242", 0, "Invalid user"),
    ],
)
def test_failure_of_squeue_is_not_an_empty_queue(
    stderr: str,
    code: int,
    message: str,
    squeue: Squeue,
    log: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    squeue()
    slurm_status.main(["--job-name", JOB, "--main-log", str(log)])
    squeue(stderr=stderr, code=code)
    assert slurm_status.main(["--job-name", JOB, "--main-log", str(log)]) == 2
    assert message in capsys.readouterr().err
    assert "ALERT: tr8-104B: the queue cannot be queried" in log.read_text()
    assert f"squeue failed with code {code}: " in log.read_text()
    squeue()
    slurm_status.main(["--job-name", JOB, "--main-log", str(log)])
    # The alert that nothing is queued lasted. The one that squeue failed has ended.
    assert kinds(log) == ["PULSE", "ALERT", "ALERT", "PULSE", "ALERT", "RECOVERED"]


def test_missing_squeue_and_loss_are_both_alerts(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(log.parent))
    train(log, 1, 30, lm_loss=float("nan"))
    assert slurm_status.main(["--job-name", JOB, "--main-log", str(log)]) == 2
    assert "squeue was not found" in capsys.readouterr().err
    assert kinds(log) == ["ALERT", "ALERT"]
    assert "not finite" in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--user", "nobody-of-that-name"], "this host has no such user"),
        (["--job-name", "a,b"], "commas separate names"),
        (["--slower-than", "70"], "must be a fraction"),
        (["--stalled-minutes", "0"], "--stalled-minutes 0 must be above 0"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str],
    message: str,
    squeue: Squeue,
    log: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    squeue(RUNNING)
    names = [] if "--job-name" in arguments else ["--job-name", JOB]
    assert slurm_status.main([*names, "--main-log", str(log), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("problem", ["folder", "absent"])
def test_alerts_are_mailed_if_the_log_cannot_be_written(
    problem: str, squeue: Squeue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    squeue()
    log = tmp_path
    if problem == "absent":
        log = tmp_path / "gone" / "log.txt"
    with mail_server() as mailbox:
        mail = ["--mail-to", "a@site.org", "--smtp", mailbox.address]
        assert slurm_status.main(["--job-name", JOB, "--main-log", str(log), *mail]) == 2
    assert f"{log} cannot be written" in capsys.readouterr().err
    assert "neither running nor scheduled" in mailbox.messages[0].get_content()


# A log that stopped growing


def test_stall_is_measured_from_the_last_training_output(squeue: Squeue, log: Path) -> None:
    squeue(running(5 * HOUR))
    train(log, 1, 5, seconds_ago=59 * 60)
    assert found(log) == ""
    train(log, 6, 6, seconds_ago=61 * 60)
    assert "has written nothing to" in found(log)
    assert found(log, stalled_minutes=90) == ""
    # A job that started after that has run for ten minutes.
    squeue(running(10 * 60))
    assert found(log) == ""
    squeue(NEXT)
    assert found(log) == ""


def test_lines_of_the_tool_are_not_training_output(squeue: Squeue, log: Path) -> None:
    """A stall is found although each check changes the log's modification time."""
    squeue(running(9 * HOUR))
    train(log, 1, 5, seconds_ago=50 * 60)
    arguments = ["--job-name", JOB, "--main-log", str(log)]
    assert slurm_status.main(arguments) == 0
    assert slurm_status.main(arguments) == 0
    assert found(log, now=time.time() + 9 * 60) == ""
    assert "for 0-01:01" in found(log, now=time.time() + 11 * 60)
    train(log, 6, 6, seconds_ago=-11 * 60)
    assert found(log, now=time.time() + 12 * 60) == ""


def test_stall_is_found_without_the_memory_file(
    squeue: Squeue, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line of the tool after all training output then gives the time of that output."""
    squeue(running(9 * HOUR))
    train(log, 1, 5)
    arguments = ["--job-name", JOB, "--main-log", str(log)]
    assert slurm_status.main(arguments) == 0
    memory = WatchedRun(JOB, log).memory
    memory.unlink()
    assert slurm_status.main(arguments) == 0
    assert capsys.readouterr().err == ""
    for damage in ("{", "[]", '{"read_bytes": "all"}', '{"other": 1}'):
        memory.write_text(damage)
        assert slurm_status.main(arguments) == 2
        assert "started from scratch" in capsys.readouterr().err
    memory.unlink()
    assert "has written nothing" in found(log, now=time.time() + 61 * 60)
    assert "has written nothing" in found(log, now=time.time() + 62 * 60)


def test_first_line_of_the_tool_after_all_output_gives_its_time(log: Path) -> None:
    train(log, 1, 5)
    append_lines(log, [log_line("PULSE", "as it was", NOON)])
    append_lines(log, [log_line("PULSE", "as it was", NOON + HOUR)])
    assert read_tail(log, StatusMemory()).output_at == NOON
    train(log, 6, 6, seconds_ago=HOUR)
    assert read_tail(log, StatusMemory()).output_at == log.stat().st_mtime


def test_missing_log_is_a_stall_after_an_hour(squeue: Squeue, log: Path) -> None:
    squeue(running(30 * 60))
    assert found(log) == ""
    squeue(running(2 * HOUR))
    assert "for 0-02:00:00; the log has no training output" in found(log)


def test_line_that_a_killed_process_left_incomplete_is_no_growth(squeue: Squeue, log: Path) -> None:
    """The PULSE line that follows it begins on a line of its own."""
    squeue(running(9 * HOUR))
    log.write_text(format_training_line(full_report())[:50])
    os.utime(log, (time.time() - 50 * 60,) * 2)
    assert slurm_status.main(["--job-name", JOB, "--main-log", str(log)]) == 0
    assert log.read_text()[50] == "\n"
    assert "has written nothing" in found(log, now=time.time() + 11 * 60)


def test_log_that_became_shorter_is_read_again(squeue: Squeue, log: Path) -> None:
    squeue(running(9 * HOUR))
    train(log, 1, 40, seconds_ago=50 * 60)
    assert found(log) == ""
    log.write_text("")
    train(log, 1, 2, lm_loss=float("nan"))
    # There is no alert that the log does not grow.
    (text,) = found(log, now=time.time() + 20 * 60).splitlines()
    assert "2 of the newest 2 log lines" in text


def test_only_the_end_of_a_long_log_is_read(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(log, 1, 100)
    size = log.stat().st_size
    line = len(format_training_line(full_report())) + 1
    for tail in (10 * line, 10 * line - 1, 10 * line + 1):
        monkeypatch.setattr("megatron.extras.operations.monitor.status._TAIL_BYTES", tail)
        read = read_tail(log, StatusMemory(read_bytes=size - 3 * line))
        assert [report["iteration"] for report in read.reports] == list(
            range(101 - tail // line, 101)
        )
        assert read.fresh == 3
        assert read.read_bytes == size


# Losses, speed


@pytest.mark.parametrize(
    "bad",
    [{"lm_loss": float("nan")}, {"lm_loss": float("inf")}, {"lm_loss": None, "nan_iterations": 1}],
)
def test_losses_that_are_not_finite_are_an_alert(
    bad: dict[str, Any], squeue: Squeue, log: Path
) -> None:
    squeue(running(HOUR))
    train(log, 1, 50)
    with log.open("a") as file:
        file.write(
            format_training_line(
                replace(full_report(), iteration=51, **{"nan_iterations": 0, **bad})
            )
            + "\n"
        )
    train(log, 52, 99)
    text = found(log)
    assert "1 of the newest 99 log lines have a loss or gradient that is not finite" in text
    assert "the last at iteration 51" in text
    # It was reported, and more than 20 good lines follow it.
    assert found(log) == ""
    train(log, 100, 200)
    assert found(log) == ""


def test_dropped_step_of_fp16_is_no_alert(squeue: Squeue, log: Path) -> None:
    squeue(running(HOUR))
    train(log, 1, 5, lm_loss=None, skipped_iterations=1, grad_norm=float("inf"))
    assert found(log) == ""


def test_lower_throughput_is_an_alert(squeue: Squeue, log: Path) -> None:
    squeue(running(HOUR))
    train(log, 1, 30, tflops=150.0)
    train(log, 31, 34, tflops=60.0)
    assert found(log) == ""
    train(log, 35, 40, tflops=60.0)
    text = found(log)
    assert "has become slower: 60 TFLOPs (median of the newest 10 log lines)" in text
    assert "150 earlier, 40%" in text
    assert found(log, slower_than=0.39) == ""
    # While no job runs, the speed is not checked.
    squeue(NEXT)
    assert found(log) == ""
    squeue(running(HOUR))
    train(log, 41, 60, tflops=150.0)
    assert found(log) == ""


def test_few_slow_lines_are_no_alert(squeue: Squeue, log: Path) -> None:
    squeue(running(HOUR))
    train(log, 1, 30, tflops=150.0)
    # An evaluation or a save makes a few lines slow.
    train(log, 31, 34, tflops=1.5)
    train(log, 35, 40, tflops=150.0)
    assert found(log) == ""


@pytest.mark.parametrize("name", ["tokens", "samples"])
def test_other_rates_are_compared_if_tflops_are_too_small(
    squeue: Squeue, log: Path, name: str
) -> None:
    def add(first: int, last: int, size: int, rate: float) -> None:
        rates = {f"{name}_per_second": rate}
        train(log, first, last, tflops=0.01, global_batch_size=size, **rates)
        if name == "samples":
            # Older logs have no tokens per second.
            log.write_text(re.sub(r" tokens per second: [\d.]+ \|", "", log.read_text()))

    squeue(running(HOUR))
    add(1, 30, 16, 50.0)
    add(31, 50, 32, 20.0)
    # The batch size is another one, so these are not compared.
    assert found(log) == ""
    add(51, 60, 32, 10.0)
    assert f"has become slower: 10 {name} per second" in found(log)


def test_slow_ranks_are_an_alert_until_they_are_fast_again(squeue: Squeue, log: Path) -> None:
    squeue(running(HOUR))

    def report(iteration: int, slow: dict[str, float]) -> str:
        train(log, iteration - 5, iteration)
        line = format_slow_ranks_line(iteration, slow, ("rank 1 on n2", 1.04), 0.0012)
        append_lines(log, [f"warning: {line}"])
        return found(log)

    assert report(10, {}) == ""
    text = report(20, {"rank 3 on n4 (pipeline 1, data 0, tensor 1)": 2.4})
    assert "tr8-104B: the others wait for slow ranks at iteration 20: rank 3 on n4" in text
    assert "2.40 x the median of 1.2 ms" in text
    # Later lines do not end it.
    train(log, 21, 25)
    assert "rank 3 on n4" in found(log)
    assert report(30, {}) == ""
    assert "rank 5 on n6" in report(40, {"rank 5 on n6": 1.6})
    # The next launch may run on other hosts.
    append_lines(log, [format_loaded_checkpoint_line("/run", 40)])
    assert found(log) == ""


def test_finished_run_is_no_alert(squeue: Squeue, log: Path) -> None:
    squeue()
    train(log, 1, 100)
    assert "neither running nor scheduled" in found(log)
    with log.open("a") as file:
        file.write(format_validation_line(100, 2.0) + "\n")
        file.write(f"{format_training_complete_line()} at iteration 100\n")
    findings = check_run(WatchedRun(JOB, log))
    assert findings.pulses[0] == "tr8-104B is finished: training is complete"
    assert findings.alerts == []
    # The run was rolled back and continued.
    train(log, 90, 91)
    assert "neither running nor scheduled" in found(log)


@pytest.mark.parametrize("before_start", [False, True])
def test_run_that_was_stopped_by_its_kill_switch_is_no_alert(
    squeue: Squeue, log: Path, before_start: bool
) -> None:
    squeue()
    train(log, 1, 100)
    line = format_kill_switch_line("/runs/a/kill-switch", before_start=before_start)
    with log.open("a") as file:
        file.write(f"{line}\n")
        file.write("successfully saved checkpoint at iteration 100 to /runs/a\n")
        file.write("[2026-11-22 10:00:00] array task 7_1 ended at iteration 100: kill switch\n")
    findings = check_run(WatchedRun(JOB, log))
    (pulse,) = findings.pulses
    assert "was stopped by its kill switch" in pulse
    assert "remove /runs/a/kill-switch and submit" in pulse
    assert findings.alerts == []
    # A job that cannot start was not stopped by anybody.
    squeue(NEVER)
    assert "nothing that is queued can start by itself" in found(log)
    squeue()
    train(log, 101, 102)
    assert "neither running nor scheduled" in found(log)


# Checkpoints


def save(run: Path, iteration: int, seconds_ago: float, now: float | None = None) -> None:
    folder = step_folder(run, iteration)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(iteration, "0", "", {}, None, {}, [], False)
    (folder / MANIFEST).write_text(manifest.dump_json())
    then = (now or time.time()) - seconds_ago
    os.utime(folder / MANIFEST, (then, then))
    point_to(run, iteration)


def test_old_newest_checkpoint_is_an_alert(squeue: Squeue, log: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    squeue(running(20 * HOUR))
    train(log, 1, 5)
    save(run, 100, 30 * HOUR)
    text = found(log, run=run)
    assert f"no checkpoint in {run} since global_step100, saved at " in text
    # The other ten hours were spent in the queue.
    assert "jobs ran for 0-20:00:00" in text
    assert found(log, run=run, checkpoint_minutes=21 * 60) == ""
    save(run, 200, 11 * HOUR)
    assert found(log, run=run) == ""


def test_time_of_array_tasks_that_never_save_is_added_up(
    squeue: Squeue, log: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    now = time.time()
    train(log, 1, 5)
    save(run, 100, 0.5 * HOUR, now)
    texts = []
    for hour in range(20):
        if hour % 2 == 0:
            squeue(running(0.5 * HOUR))
        else:
            squeue(NEXT)
        texts.append(
            found(
                log,
                run=run,
                now=now + hour * HOUR,
                checkpoint_minutes=4 * 60 + 15,
                stalled_minutes=1e9,
            )
        )
    # By then, 9 tasks ran for half an hour each.
    assert [bool(text) for text in texts].index(True) == 16


def test_run_without_a_checkpoint_is_an_alert(squeue: Squeue, log: Path, tmp_path: Path) -> None:
    train(log, 1, 5)
    squeue(running(11 * HOUR))
    assert found(log, run=tmp_path / "absent") == ""
    squeue(running(13 * HOUR))
    (tmp_path / "empty").mkdir()
    text = found(log, run=tmp_path / "empty", now=time.time() + 2 * HOUR, stalled_minutes=1e9)
    assert f"{tmp_path / 'empty'} has no checkpoint yet; jobs ran for 0-13:00:0" in text


def test_pointer_to_a_missing_checkpoint_is_an_alert(
    squeue: Squeue, log: Path, tmp_path: Path
) -> None:
    squeue(running(HOUR))
    train(log, 1, 5)
    save(tmp_path / "run", 100, 0)
    (tmp_path / "run" / "latest").write_text("global_step300")
    text = found(log, run=tmp_path / "run")
    assert "names global_step300" in text
    assert "global_step100" in text


def test_line_of_a_save_is_training_output(squeue: Squeue, log: Path) -> None:
    squeue(running(3 * HOUR))
    train(log, 1, 5, seconds_ago=2 * HOUR)
    with log.open("a") as file:
        file.write(format_saved_checkpoint_line(5, "run") + "\n")
    assert found(log) == ""


def test_memory_file_has_only_these_keys(squeue: Squeue, log: Path) -> None:
    squeue(RUNNING)
    train(log, 1, 5)
    found(log)
    assert set(json.loads(WatchedRun(JOB, log).memory.read_text())) == {
        "read_bytes",
        "output_at",
        "saved_at",
        "unsaved_seconds",
        "checked_at",
    }


@pytest.mark.parametrize("name", ["slurm_status", "fs_watchdog"])
def test_tools_of_cron_do_not_import_torch(name: str) -> None:
    code = f"import runpy, sys; runpy.run_path('tools/{name}.py'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
