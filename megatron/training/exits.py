"""The decision to stop, made once an iteration by all ranks together.

Only rank 0 reads the clock and looks for the kill switch. Ranks whose clocks or file systems differ
can therefore not disagree. A signal counts on whichever rank receives it.
"""

import os
import signal
import time
from enum import IntEnum
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from megatron.config.batch import BatchConfig
from megatron.observe.log_line import (
    format_exit_duration_line,
    format_exit_iteration_line,
    format_kill_switch_line,
)
from megatron.parallel.mesh import Mesh

_REPEATED_SECONDS = 10.0
"""A signal repeated within this time counts as one signal.

Slurm sends a signal to a job's tasks and to srun, and srun passes it on to the tasks again.
"""


class StopReason(IntEnum):
    """Reasons to stop. If several apply, the highest value is reported."""

    NONE = 0
    INTERVAL = 1
    DURATION = 2
    KILL_SWITCH = 3
    SIGNAL = 4


class Exits:
    """Signal handlers and the decision to stop. Signals are caught from construction onwards."""

    def __init__(self, config: BatchConfig, mesh: Mesh) -> None:
        """Install the handlers for SIGTERM and SIGUSR1, and start the clock of the run."""
        self._config = config
        self._mesh = mesh
        self._start = time.monotonic()
        self._signal = 0
        self._signalled_at = 0.0
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle_signal)

        # The handler only records the signal. Saving here would run in the middle of a collective,
        # and the other ranks may not have received the signal.

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal and time.monotonic() - self._signalled_at > _REPEATED_SECONDS:
            # A later signal gets its default action. It must end a process that hangs and never
            # reaches its next iteration.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self._signal:
            self._signal = number
            self._signalled_at = time.monotonic()

    def decide(self, before: int, after: int) -> StopReason:
        """Return the reason to stop after a step or jump from iteration `before` to `after`.

        All ranks call it together and get the same answer.
        """
        if self._signal:
            mine = StopReason.SIGNAL
        else:
            mine = StopReason.NONE
        if self._mesh.rank == 0:
            mine = max(mine, self._rank_zero_reason(before, after))
        if self._mesh.grid.world_size == 1:
            return StopReason(mine)
        # The tensor is on the CPU and the control group uses gloo. The decision therefore does not
        # wait for work that is queued on the device.
        agreed = torch.tensor([int(mine)])
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._mesh.control)
        return StopReason(int(agreed.item()))

    def _rank_zero_reason(self, before: int, after: int) -> StopReason:
        """Return the reason that rank 0 alone can see: kill switch, duration or interval."""
        config = self._config
        if config.kill_switch_path and Path(config.kill_switch_path).exists():
            return StopReason.KILL_SWITCH
        minutes = config.exit_duration_in_mins
        if minutes is not None and time.monotonic() - self._start > 60 * minutes:
            return StopReason.DURATION
        # A skipped range is one jump over several iterations. It may pass a multiple of the
        # interval without ending on it.
        if config.exit_interval and after // config.exit_interval > before // config.exit_interval:
            return StopReason.INTERVAL
        return StopReason.NONE

    def format_stop_line(self, reason: StopReason, iteration: int) -> str:
        """Return the log line for a stop."""
        if reason == StopReason.KILL_SWITCH:
            return format_kill_switch_line(str(self._config.kill_switch_path))
        if reason == StopReason.DURATION:
            return format_exit_duration_line((time.monotonic() - self._start) / 60)
        if reason == StopReason.SIGNAL:
            return f"received a signal to stop; {format_exit_iteration_line(iteration)}"
        return format_exit_iteration_line(iteration)
