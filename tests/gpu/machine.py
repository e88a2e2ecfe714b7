"""Record the machine, the versions and the commit that a report of `first_hour.py` belongs to."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.results import add_row

_PACKAGES = ("torch", "triton", "numpy", "transformers", "deepspeed", "tyro", "torchao")


def find_version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def run_command(*command: str) -> str | None:
    """Return the first line that a command prints, or None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0]


def read_memory() -> str:
    """Return the memory of the host."""
    wanted = ("MemTotal", "MemAvailable")
    lines = Path("/proc/meminfo").read_text().splitlines()
    return ", ".join(" ".join(line.split()) for line in lines if line.startswith(wanted))


def main() -> int:
    """Print and record the machine, and return the exit code."""
    values: dict[str, object] = {
        "host": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}",
        "python": platform.python_version(),
        "memory": read_memory(),
        "disk": f"{shutil.disk_usage(tempfile.gettempdir()).free / 1e9:.0f} GB free",
        "commit": run_command("git", "rev-parse", "--short", "HEAD") or os.environ.get("COMMIT"),
        "driver": run_command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }
    # Versions are known before torch is imported, which may fail.
    for package in _PACKAGES:
        values[package] = find_version(package)
    add_row("machine", **values)
    import torch

    values = {}
    values["cuda"] = torch.version.cuda
    values["gpus"] = torch.cuda.device_count()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        values["gpu"] = torch.cuda.get_device_name(0)
        values["gib"] = properties.total_memory / 2**30
        values["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        values["cudnn"] = torch.backends.cudnn.version()
        # Processes of an earlier command would disturb the measurements.
        values["others"] = run_command(
            "nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"
        )
    add_row("device", **values)
    return 0


if __name__ == "__main__":
    sys.exit(main())
