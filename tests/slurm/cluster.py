"""A real Slurm with four nodes on this machine. The script `slurm-cluster` starts and stops it."""

import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from operations import alert_settings

PACKAGES = ("munge", "slurmctld", "slurmd", "slurm-client")
SCRIPT = Path(__file__).with_name("slurm-cluster")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
NODES = 4
ABSENT = 128
"""Number of nodes that never start, for `sbatch --test-only --partition=absent`."""
_TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""Variables that other tests leave in the environment. Jobs run without them."""


class NoSlurmError(Exception):
    """Slurm is not installed and cannot be installed, or its daemons do not start."""


@dataclass(frozen=True)
class Cluster:
    folder: Path
    """Folder of configuration, logs and sockets. The name is short, as paths of sockets must be."""

    def run(self, *command: str, **variables: str) -> str:
        """Run a client and return its output. A job inherits `variables` and the environment."""
        clean = {
            name: value
            for name, value in os.environ.items()
            if name not in {*_TORCHRUN, *alert_settings.NAMES}
        }
        environment = {
            **clean,
            "PATH": _PATH,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            **variables,
        }
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=300, check=False
        )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def read_controller_log(self) -> str:
        """Return what slurmctld has logged, or an empty text before its first line."""
        path = self.folder / "log" / "slurmctld.log"
        if path.exists():
            return path.read_text(errors="replace")
        return ""

    def start_daemons(self) -> None:
        """Start the daemons that do not run, and wait for their nodes.

        Raises:
            NoSlurmError: The daemons do not start.
        """
        environment = {**os.environ, "PATH": _PATH, "NODES": str(NODES)}
        done = subprocess.run(
            [SCRIPT, "start", self.folder],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        if done.returncode:
            raise NoSlurmError(f"daemons do not start: {(done.stdout + done.stderr)[-800:]}")

    def stop(self) -> None:
        subprocess.run([SCRIPT, "stop", self.folder], check=False, capture_output=True)


def install() -> None:
    """Install Slurm if it is missing.

    Raises:
        NoSlurmError: It is missing, and this is not root on a machine with apt and a network.
    """
    if all(
        shutil.which(program, path=_PATH) for program in ("munged", "slurmctld", "slurmd", "sbatch")
    ):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NoSlurmError(
            f"{' '.join(PACKAGES)} are not installed, and only root with apt-get can install them"
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ("update", "-q"),
        ("install", "-q", "-y", "--no-install-recommends", *PACKAGES),
    ):
        done = subprocess.run(
            ["apt-get", *command], capture_output=True, text=True, env=environment, check=False
        )
        if done.returncode:
            raise NoSlurmError(
                f"apt-get {' '.join(command)}: {(done.stderr or done.stdout)[-500:]}"
            )


def start(folder: Path) -> Cluster:
    """Start the daemons and wait for the nodes.

    Raises:
        NoSlurmError: The daemons do not start.
    """
    environment = {
        **os.environ,
        "PATH": _PATH,
        "NODES": str(NODES),
        "ABSENT": str(ABSENT),
        "PORT": str(_free_ports(NODES + 1)),
    }
    done = subprocess.run(
        [SCRIPT, "start", folder], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        # Some of them may run.
        Cluster(folder).stop()
        raise NoSlurmError(f"the daemons do not start here: {(done.stdout + done.stderr)[-800:]}")
    return Cluster(folder)


def _free_ports(count: int) -> int:
    """Return the first of `count` consecutive ports on which no process listens."""
    for first in range(16_817, 19_000, 10):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise NoSlurmError("no free ports")
