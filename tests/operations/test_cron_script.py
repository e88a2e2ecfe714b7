"""The cron of Slurm jobs when `squeue` fails. The commands of Slurm are replaced."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAILS = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
EMPTY = "exit 0"
PENDING = "echo '17 cron-daily PD'"


def run_cron(folder: Path, squeue: str, *, daily_has_run: bool = True) -> tuple[str, list[str]]:
    """Run the hourly cron once. Return its output, and the scripts that it submitted."""
    commands = folder / "commands"
    submitted = folder / "submitted.txt"
    for name in ("cron.hourly", "cron.daily", "commands"):
        (folder / name).mkdir()
    for name, body in (
        ("squeue", squeue),
        ("sbatch", f'for last in "$@"; do :; done; echo "$last" >> {submitted}'),
    ):
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    submitted.touch()
    if daily_has_run:
        (folder / "cron.daily.last-run").write_text("1000\n")
    subprocess.run(
        ["bash", str(ROOT / "slurm" / "cron-hourly.slurm")],
        check=True,
        env={
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "CRON": str(folder),
            "MEGATRON": str(ROOT),
            "SLURM_JOB_ID": "1",
        },
    )
    return (folder / "cron-hourly.out").read_text(), submitted.read_text().split()


@pytest.mark.parametrize(
    ("squeue", "expected"),
    [
        (EMPTY, ["slurm/cron-hourly.slurm", "slurm/cron-daily.slurm"]),
        (PENDING, []),
        # The own cycle must not end. That the other one was lost is not known.
        (FAILS, ["slurm/cron-hourly.slurm"]),
    ],
    ids=["empty", "pending", "fails"],
)
def test_queue_that_cannot_be_read_is_not_empty(
    squeue: str, expected: list[str], tmp_path: Path
) -> None:
    output, submitted = run_cron(tmp_path, squeue)
    assert submitted == expected
    assert ("ALERT: squeue failed" in output) == (squeue == FAILS)
    assert ("ALERT: cron-daily was lost" in output) == (squeue == EMPTY)


def test_cron_that_never_ran_is_submitted_without_an_alert(tmp_path: Path) -> None:
    output, submitted = run_cron(tmp_path, EMPTY, daily_has_run=False)
    assert submitted == ["slurm/cron-hourly.slurm", "slurm/cron-daily.slurm"]
    assert "cron-daily has not run yet; submitted" in output
    assert "ALERT" not in output
