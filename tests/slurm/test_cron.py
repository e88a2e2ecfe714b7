"""Cron made of Slurm jobs, which submit themselves again and run the tools of a run."""

import getpass
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from operations.hub_server import HubServer
from slurm.cluster import Cluster

from megatron.observe.log_line import format_training_complete_line

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

ROOT = Path(__file__).resolve().parents[2]


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen in {seconds:g} s"
        time.sleep(0.2)


def test_cron_runs_again_syncs_and_writes_the_status(cluster: Cluster, tmp_path: Path) -> None:
    """Cron submits itself again and starts a lost daily job. An hour is four seconds here."""
    cron = tmp_path / "cron"
    tiny = tmp_path / "tiny"
    for folder in (
        cron / "cron.hourly",
        cron / "cron.daily",
        tiny / "tiny-logs" / "logs",
        tiny / "tiny-logs" / "tensorboard",
    ):
        folder.mkdir(parents=True)
    for script in ("tiny-hub-sync-logs.slurm", "tiny-slurm-status.slurm"):
        (cron / "cron.hourly" / script).symlink_to(ROOT / "train" / "tiny" / script)
    (cron / "cron.daily.last-run").write_text("1000\n")
    log = tiny / "tiny-logs" / "logs" / "main_log.txt"
    log.write_text("training ...\n")
    (tiny / "tiny-logs" / "tensorboard" / "events.out.tfevents.1").write_bytes(b"\0" * 5000)
    with HubServer() as hub:
        hub.create("org/tiny-logs")
        variables = {
            "CRON": str(cron),
            "CRON_SECONDS": "4",
            "TINY": str(tiny),
            "MEGATRON": str(ROOT),
            "HUB_REPO": "org/tiny-logs",
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": hub.token,
            "HF_HUB_DISABLE_XET": "1",
        }
        cluster.run(
            "sbatch",
            f"--output={cron}/first.out",
            str(ROOT / "slurm" / "cron-hourly.slurm"),
            **variables,
        )
        try:
            out = cron / "cron-hourly.out"
            wait_for(
                lambda: out.exists() and out.read_text().count("] cron-hourly, job") >= 2,
                "the second run",
            )
            assert "ALERT: cron-daily was lost" in out.read_text()
            wait_for(lambda: (cron / "cron-daily.out").exists(), "the daily run")
            wait_for(lambda: "ALERT: tiny" in log.read_text(), "the status")
            with open(log, "a") as file:
                file.write(f"{format_training_complete_line()}\n")
            seen = len(out.read_text())
            wait_for(lambda: "training is complete" in _remote(hub), "the sync of what was added")
            assert out.read_text()[seen:].count("ALERT") == 0
        finally:
            wait_for(lambda: _is_over(cluster), "an empty queue")
        assert hub.files("org/tiny-logs")["tensorboard/events.out.tfevents.1"] == b"\0" * 5000
    output = "".join(path.read_text() for path in cron.glob("*.out"))
    assert hub.token not in output
    assert hub.token not in log.read_text()


def _is_over(cluster: Cluster) -> bool:
    """Cancel all jobs again, because a running one may have submitted the next in the meantime."""
    cluster.run("scancel", f"--user={getpass.getuser()}")
    return not cluster.run("squeue", "--noheader").strip()


def _remote(hub: HubServer) -> str:
    """Return the main log on the Hub."""
    files = hub.files("org/tiny-logs")
    return "".join(
        content.decode()
        for name, content in sorted(files.items())
        if name.startswith("logs/main_log.txt")
    )
