"""PULSE and ALERT lines of tools/slurm_status.py on a real Slurm, with a real mail server."""

import getpass
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from operations import alert_settings
from operations.receivers import mail_server
from slurm.cluster import Cluster

TOOL = Path(__file__).resolve().parents[2] / "tools" / "slurm_status.py"
BOUND_SECONDS = 60.0
NAME = "tr8-104B"
CLOCK = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@dataclass(frozen=True)
class Queue:
    cluster: Cluster
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "main_log.txt"

    def submit(self, *options: str, name: str = NAME) -> str:
        """Submit a job that sleeps, and return its number."""
        script = self.folder / "sleep.sh"
        script.write_text("#!/bin/bash\nexec sleep 300\n")
        fixed = (
            "--parsable",
            f"--job-name={name}",
            f"--output={self.folder}/%A_%a.out",
            f"--chdir={self.folder}",
        )
        return self.cluster.run("sbatch", *fixed, *options, str(script)).strip()

    def status(self, *arguments: str, code: int = 0) -> list[str]:
        """Run the tool and return the lines that it appended to the log."""
        before = ""
        if self.log.exists():
            before = self.log.read_text()
        command = [
            sys.executable,
            str(TOOL),
            "--job-name",
            NAME,
            "--main-log",
            str(self.log),
            *arguments,
        ]
        environment = {**os.environ, "SLURM_CONF": str(self.cluster.folder / "slurm.conf")}
        outcome = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=100, check=False
        )
        assert outcome.returncode == code, outcome.stderr
        text = self.log.read_text()
        assert text.startswith(before)
        return text.removeprefix(before).splitlines()

    def pulse(self) -> str:
        """Run the tool and return what its PULSE line has after the name of the run."""
        (line,) = self.status()
        match = re.fullmatch(rf"\[{CLOCK}\] PULSE: {NAME} is (.*)", line)
        assert match is not None, line
        return match[1]

    def wait_for(self, pattern: str) -> str:
        """Wait for a PULSE of this form. A new job has neither a reason nor nodes yet."""
        end = time.monotonic() + BOUND_SECONDS
        pulse = self.pulse()
        while re.fullmatch(pattern, pulse) is None:
            queue = self.cluster.run("squeue")
            assert time.monotonic() < end, f"the last PULSE is {pulse!r}\n{queue}"
            pulse = self.pulse()
        return pulse


@pytest.fixture
def queue(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    for name in alert_settings.NAMES:
        monkeypatch.delenv(name, raising=False)
    yield Queue(cluster, tmp_path)
    cluster.run("scancel", "--full", f"--user={getpass.getuser()}")
    end = time.monotonic() + BOUND_SECONDS
    while cluster.run("squeue", "--noheader") and time.monotonic() < end:
        time.sleep(0.1)


def test_pulse_of_an_array(queue: Queue) -> None:
    job = queue.submit("--array=1-3%1", "--nodes=2")
    running = rf"running for 0-00:00:\d\d since {CLOCK} \({job}_1 on n\[\d-\d\]\)"
    pending = rf"{job}_\[2-3%1\], JobArrayTaskLimit"
    waiting = rf"another is waiting for the previous array task \({pending}\)"
    queue.wait_for(f"{running}; {waiting}")
    queue.cluster.run("scancel", f"{job}_1")
    running = rf"running for 0-00:00:\d\d since {CLOCK} \({job}_2 on .*\)"
    queue.wait_for(rf"{running}; another is waiting for .*{job}_\[?3.*")


def test_pulse_of_pending_jobs(queue: Queue) -> None:
    first = queue.submit(name="another-run")
    job = queue.submit(f"--dependency=afterany:{first}")
    queue.wait_for(rf"waiting on a dependency \({job}, afterany:{first}\(unfulfilled\)\)")
    queue.cluster.run("scancel", job)
    job = queue.submit("--begin=now+1hour")
    queue.wait_for(rf"scheduled to start in 0-00:5\d:\d\d at {CLOCK} \({job}, BeginTime\)")
    queue.cluster.run("scancel", job)
    job = queue.submit("--hold")
    queue.wait_for(rf"pending for reason JobHeldUser \({job}\)")


def test_empty_queue_and_its_end_are_mailed_once(queue: Queue) -> None:
    with mail_server() as mailbox:
        where = ("--mail-to", "me@site.org", "--smtp", mailbox.address, "--user", getpass.getuser())
        for _ in range(2):
            pulse, alert = queue.status(*where, code=1)
            assert pulse.endswith(f"PULSE: {NAME} is neither running nor scheduled")
            assert f"ALERT: {NAME} is neither running nor scheduled; " in alert
        assert len(mailbox.messages) == 1
        queue.submit()
        pulse, recovered = queue.status(*where)
        assert "RECOVERED: " in recovered
        assert len(mailbox.messages) == 2


def test_job_that_can_never_start_is_an_alert(queue: Queue) -> None:
    """The job that it depends on has failed, so it would stay in the queue permanently."""
    first = queue.submit("--hold", name="another-run")
    job = queue.submit(f"--dependency=afterok:{first}")
    queue.wait_for(r"waiting on a dependency .*")
    queue.cluster.run("scancel", first)
    end = time.monotonic() + BOUND_SECONDS
    while "NeverSatisfied" not in queue.cluster.run("squeue", "--noheader", "--format=%r"):
        assert time.monotonic() < end
        time.sleep(0.2)
    _, alert = queue.status(code=1)
    assert f"nothing that is queued can start by itself: {job} (DependencyNeverSatisfied)" in alert


def test_unknown_user_is_an_alert(queue: Queue) -> None:
    """The exit code of squeue is 0 for an unknown user."""
    (line,) = queue.status("--user", "4242", code=2)
    assert "ALERT: tr8-104B: the queue cannot be queried" in line
    assert "squeue failed with code 0: squeue: error: Invalid user: 4242" in line
