"""Steps of srun, Slurm's signals for the batch script, and lines of the main log."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from megatron.base.code_version import PACKAGE
from megatron.base.durable import append_lines
from megatron.base.errors import OperationsError
from megatron.base.plain_text import print_line, print_to_stderr
from megatron.extras.operations.monitor.alerts import format_time

CHECKOUT = PACKAGE.parent
"""Root of the repository, if the package runs from a checkout. The steps of srun run there."""


def run_step(
    main_log: Path,
    options: Sequence[str],
    program: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> int:
    """Run a step of this job and return its exit code.

    Its output is appended to the main log.

    Raises:
        OperationsError: srun cannot be started.
        subprocess.TimeoutExpired: The step took longer than `timeout` seconds.
    """
    line = ["srun", *options, sys.executable, *program]
    # In a checkout, `pretrain_gpt.py` is a path relative to it. An installed package has no such
    # file, and the paths are relative to the job's folder.
    folder = CHECKOUT if (CHECKOUT / "pretrain_gpt.py").is_file() else None
    environment = {**os.environ, **(variables or {})}
    # In append mode each write goes to the end of the file, because this script writes there too.
    with open(main_log, "ab") as log_file:
        # srun would forward this script's standard input to the tasks.
        streams = {"stdin": subprocess.DEVNULL, "stdout": log_file, "stderr": log_file}
        try:
            done = subprocess.run(
                line, **streams, cwd=folder, env=environment, timeout=timeout, check=False
            )  # type: ignore[call-overload]
        except OSError as error:
            raise OperationsError(
                f"srun cannot be started: {error}; Slurm's client must be on the PATH"
            ) from error
    return int(done.returncode)


def log(main_log: Path, text: str) -> None:
    """Print a line with the time, and append it to the main log."""
    line = f"[{format_time(time.time())}] {text}"
    print_line(line)
    try:
        # A full disk must not end this script. The line is already in Slurm's own output.
        append_lines(main_log, [line])
    except OSError as error:
        print_to_stderr(f"error: {main_log} cannot be written: {error}")


class Signals:
    """Record Slurm's signals, and keep this script alive.

    Slurm signals the training as well, which then saves and exits. This script must survive the
    signal to record how the training ended.
    """

    def __init__(self) -> None:
        """Install the handlers."""
        self.received = 0
        # Slurm sends SIGTERM when it ends a job. SIGUSR1 or SIGUSR2 is the signal before the time
        # limit (--signal=USR1@600), which goes to the tasks and may reach this script too.
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._handle_signal)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Record the signal, and do nothing else, because a handler may interrupt any code."""
        self.received = number
