"""When to stop: asked once an iteration, decided by all ranks together.

Rank 0 alone looks at the clock and the kill switch, so that ranks whose clocks or file systems differ cannot disagree; a signal to
any rank counts.
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
"""A signal that comes again so soon is the same: Slurm signals a job's tasks, and srun, which passes it on."""


class StopReason(IntEnum):
    """Reasons, the graver the higher."""

    NO = 0
    INTERVAL = 1
    DURATION = 2
    KILL_SWITCH = 3
    SIGNAL = 4


class Exits:
    """Watches signals from its construction on."""

    def __init__(self, config: BatchConfig, mesh: Mesh) -> None:
        self._config = config
        self._mesh = mesh
        self._start = time.monotonic()
        self._signal, self._signalled_at = 0, 0.0
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle_signal)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal and time.monotonic() - self._signalled_at > _REPEATED_SECONDS:
            signal.signal(
                number, signal.SIG_DFL
            )  # a later one ends a process that no longer comes to its next iteration
            os.kill(os.getpid(), number)
        if not self._signal:
            self._signal, self._signalled_at = number, time.monotonic()

    def decide(self, before: int, after: int) -> StopReason:
        """The same answer on all ranks, for a step or jump from iteration `before` to `after`."""
        mine = StopReason.SIGNAL if self._signal else StopReason.NO
        if self._mesh.rank == 0:
            mine = max(mine, self._rank_zero_reason(before, after))
        if self._mesh.grid.world_size == 1:
            return StopReason(mine)
        agreed = torch.tensor([int(mine)])
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._mesh.control)
        return StopReason(int(agreed.item()))

    def _rank_zero_reason(self, before: int, after: int) -> StopReason:
        config = self._config
        if config.kill_switch_path and Path(config.kill_switch_path).exists():
            return StopReason.KILL_SWITCH
        minutes = config.exit_duration_in_mins
        if minutes is not None and time.monotonic() - self._start > 60 * minutes:
            return StopReason.DURATION
        if config.exit_interval and after // config.exit_interval > before // config.exit_interval:
            return StopReason.INTERVAL
        return StopReason.NO

    def format_stop_line(self, reason: StopReason, iteration: int) -> str:
        """What the log says of it."""
        if reason == StopReason.KILL_SWITCH:
            return format_kill_switch_line(str(self._config.kill_switch_path))
        if reason == StopReason.DURATION:
            return format_exit_duration_line((time.monotonic() - self._start) / 60)
        if reason == StopReason.SIGNAL:
            return f"received a signal to stop; {format_exit_iteration_line(iteration)}"
        return format_exit_iteration_line(iteration)
