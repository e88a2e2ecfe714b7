"""The decisions of all ranks together once an iteration: to stop, and to continue a save.

A signal also ends an evaluation or a wait, and the start of a run (`Ranks.check_stop`).

Most decisions need no message of their own, because each rank's vote is summed with the loss of the
step. There is one more message after an evaluation or a save, because these take long. There is
also one if rank 0 decides about the next step, and if the ranks compare how fast they compute.

Only rank 0 reads the clock and looks for the kill switch. Ranks whose clocks or file systems differ
can therefore not disagree. A signal counts on whichever rank receives it.

After a reason to stop, the loop ends its iteration, and `save_at_end` in `loop` saves. Then
`pretrain` closes the files and ends the process.
"""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
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
from megatron.parallel.messages import OutOfStepError
from megatron.parallel.rank_progress import StopRequested
from megatron.parallel.ranks import Ranks
from megatron.schedule.clock import is_due

_REPEATED_SECONDS = 10.0
"""The same signal within this time counts as one. If it comes later, it ends the process.

Slurm sends a signal to a job's tasks and to srun, and srun passes it on to the tasks again.
"""
_REPEATED_KEY_SECONDS = 1.0
"""The same for SIGINT.

A terminal sends it to the launcher and to its processes, and the launcher passes it on immediately.
The limit is short, so that a second Ctrl-C of the user takes effect soon.
"""


_STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Ctrl-C, the end of a job, the end of a terminal, and the signals that Slurm may send before."""


def ignore_stop_signals() -> None:
    """Ignore all further signals to stop. Call it when everything is saved and closed.

    While Python ends, it gives every signal its default action again, unless it is ignored. A
    repeated signal would then end the process with an exit code that reads as a crash.
    """
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopReason(IntEnum):
    """Reasons to stop. If several apply, the highest value is reported."""

    NONE = 0
    INTERVAL = 1
    DURATION = 2
    KILL_SWITCH = 3
    SIGNAL = 4
    ROLLBACK = 5
    """The spike guard goes back to an earlier checkpoint, and the same processes continue there."""


_LAUNCHERS = frozenset(["TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"])
"""Variables of torchrun and Slurm, which kill a process some time after a signal."""
_SLOW_SECONDS = 20.0
"""Seconds of a step after which little of a launcher's 30 s is left for the save."""
_SIGNAL_VOTE = float(1 << 8)
"""The vote of a rank that has received a signal.

It is larger than any reason of rank 0, whose vote is the number of its reason.
"""
_READING_VOTE = float(1 << 24)
"""The vote of a rank that has not read its next batch, in the sum of the ranks that save.

It is larger than the number of ranks.
"""
_ITERATION_VOTE = float(1 << 29)
"""Each rank adds this times its iteration modulo 16 to its vote.

It is larger than the votes of a million ranks with a signal, and their sum is still exact in fp64.
"""
_ITERATIONS = 16


class Exits:
    """Decides when the run stops, and handles the signals that stop it."""

    def __init__(
        self, config: BatchConfig, ranks: Ranks, log: Callable[[str], None], *, saves: bool
    ) -> None:
        """Start the clock of the run.

        Args:
            config: The flags that stop a run.
            ranks: The ranks of the run.
            log: Prints a warning.
            saves: Whether the run has a folder to save to. Only messages depend on it.
        """
        self._config = config
        self._ranks = ranks
        self._log = log
        self._saves = saves
        self._start = time.monotonic()
        self._progress = ranks.progress
        self._signalled_at = 0.0
        self._steps = 0
        self._warned_slow = False
        self._switch_error: str | None = None
        """Why the last search for the kill switch failed. None if it did not fail."""
        self._votes: float | None = None
        """The sum of all ranks' votes in the last step. None if they did not vote."""
        self._stage_is_done = False
        """Whether no rank worked on a stage of a save when the ranks last voted or decided."""
        self.has_batch = False
        """Whether all ranks had read the next batch of training then."""

    def catch_signals(self) -> None:
        """Let the signals of `_STOP_SIGNALS` stop the run after its iteration."""
        for number in _STOP_SIGNALS:
            # A shell starts background jobs with SIGINT ignored, because Ctrl-C in the terminal is
            # meant for the program in the foreground. nohup ignores SIGHUP, so that the run goes on
            # when the terminal is closed.
            keeps_ignoring = number in (signal.SIGINT, signal.SIGHUP)
            if keeps_ignoring and signal.getsignal(number) is signal.SIG_IGN:
                continue
            signal.signal(number, self._handle_signal)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        # The handler only records the signal. Saving here would run in the middle of a collective,
        # and the other ranks may not have received the signal.
        one_signal = _REPEATED_SECONDS
        if number == signal.SIGINT:
            one_signal = _REPEATED_KEY_SECONDS
        first = self._progress.stop_signal
        # Slurm may send SIGUSR1 before the time limit, and SIGTERM at it. The save then still has
        # the 30 s until SIGKILL. So another signal than the first has no effect, except Ctrl-C.
        is_repeated = first and number in (signal.SIGINT, first)
        if is_repeated and time.monotonic() - self._signalled_at > one_signal:
            # A later signal gets its default action. It must end a process that hangs and never
            # reaches its next iteration.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if first:
            return
        self._progress.stop_signal = number
        self._signalled_at = time.monotonic()
        if self._progress.iteration == 0:
            # Nothing was trained yet, and a single process does not wait for others.
            if self._ranks.size == 1:
                raise StopRequested(number)
        elif number == signal.SIGINT and self._ranks.rank == 0:
            self._confirm_key()

    def _confirm_key(self) -> None:
        """Confirm Ctrl-C with a message, because the current iteration may take long."""
        what = "ends after this iteration and saves nothing, because --save was not given"
        if self._saves:
            what = "saves after this iteration and ends"
        line = f"\nreceived SIGINT (Ctrl-C): the run {what}; press Ctrl-C again to abort\n"
        # `print` raises an error in a signal handler that interrupts another `print`.
        with contextlib.suppress(OSError):
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())

    def warn_about_slow_step(self, iteration: int, seconds: float) -> None:
        """Warn if a launcher may end the ranks before a step and the save after it are complete.

        There is one warning at most. The first step of a launch is left out, because it may have
        compiled the model.
        """
        self._steps += 1
        if seconds <= _SLOW_SECONDS or self._steps == 1 or self._warned_slow:
            return
        if not _LAUNCHERS.isdisjoint(os.environ):
            advice = (
                "A run saves and ends after the step of a signal to stop, but torchrun kills it "
                "30 s after the signal (--shutdown-timeout), as Slurm does (KillWait). Raise that "
                "limit"
            )
        elif os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1):
            advice = "Other programs use the cores of this machine. OMP_NUM_THREADS=1 may help"
        else:
            return
        self._warned_slow = True
        self._log(f"warning: iteration {iteration} took {seconds:.0f} s. {advice}")

    def vote(self, before: int, after: int, waits: Sequence[bool]) -> tuple[float, float]:
        """Return this rank's votes on a step from iteration `before` to `after`.

        The sums of all votes go to `count_votes`.

        Args:
            before: The iteration before the step.
            after: The iteration after it.
            waits: Whether this rank works on a stage of a save, and whether it lacks the next
                batch.
        """
        reason = self._find_own_reason(before, after)
        vote = _SIGNAL_VOTE if reason == StopReason.SIGNAL else float(reason)
        working, reading = waits
        return _ITERATION_VOTE * (after % _ITERATIONS) + vote, working + _READING_VOTE * reading

    def count_votes(self, votes: Sequence[float] | None, after: int) -> None:
        """Remember the sums of the votes for `decide` and `take_stage_is_done`.

        Args:
            votes: The sums, and others after them. None if no message could carry it.
            after: The iteration after the step.

        Raises:
            OutOfStepError: A rank has voted on another step, because it has left out a message.
        """
        self._votes = None
        self.has_batch = False
        if votes is None:
            return
        stop, waits, *_ = votes
        reading, working = divmod(waits, _READING_VOTE)
        self._count_waits((working, reading))
        # A single rank has nobody to compare with.
        if self._ranks.size == 1:
            return
        iterations, self._votes = divmod(stop, _ITERATION_VOTE)
        if iterations != self._ranks.size * (after % _ITERATIONS):
            raise OutOfStepError({})

    def _count_waits(self, waits: Sequence[float]) -> None:
        """Remember the sums or the maxima of all ranks' `waits`."""
        self._stage_is_done, self.has_batch = (not number for number in waits)

    def take_stage_is_done(self) -> bool:
        """Return whether all ranks had finished the stage of a save that is in progress.

        All ranks get the same answer. An answer counts once, because the next stage may begin.
        """
        done = self._stage_is_done
        self._stage_is_done = False
        return done

    def decide(
        self,
        before: int,
        after: int,
        numbers: Sequence[float] = (),
        of_each_rank: float | None = None,
        *,
        ask_again: bool = False,
        waits: Sequence[bool],
    ) -> tuple[StopReason, list[float], list[float]]:
        """Return the reason to stop after a step or jump from iteration `before` to `after`.

        All ranks call it together and get the same answer.

        Args:
            before: The iteration before the step.
            after: The iteration after it.
            numbers: Decisions of rank 0, as many on each rank. They travel in the same message.
            of_each_rank: A number of this rank that all ranks get. Either each rank has one or
                none.
            ask_again: Whether much time has passed since the votes. A reason that came up since
                then must not wait for another step.
            waits: Whether this rank works on a stage of a save, and whether it lacks the next
                batch.

        Returns:
            The reason, rank 0's `numbers`, and the numbers of all ranks.

        Raises:
            OutOfStepError: A rank has sent another message than this one.
        """
        votes = self._votes
        # A vote counts for one step.
        self._votes = None
        shared = [] if of_each_rank is None else [of_each_rank]
        # A single rank needs no message.
        if self._ranks.size == 1:
            self._count_waits(waits)
            return self._find_own_reason(before, after), list(numbers), shared
        if votes is not None and not numbers and not shared and not ask_again:
            return _read_votes(votes), [], []
        own_reason = self._find_own_reason(before, after)
        if self._ranks.rank != 0:
            # The maximum is then rank 0's number, bit for bit.
            numbers = [-math.inf] * len(numbers)
        if of_each_rank is not None:
            # Each rank has a place of its own, and the maximum leaves its number as it is.
            shared = [-math.inf] * self._ranks.size
            shared[self._ranks.rank] = of_each_rank
        # The tensor is on the CPU and the control group uses gloo. The decision therefore does not
        # wait for work that is queued on the device.
        # If a rank has left out a collective, gloo mixes two messages. Maximum and minimum of the
        # iteration show that this has not happened.
        check = [float(after), -float(after)]
        own = [float(own_reason), *map(float, waits), *check, *numbers, *shared]
        agreed = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self._ranks.group)
        reason, working, reading, largest, smallest, *others = agreed.tolist()
        if [largest, smallest] != check:
            raise OutOfStepError({})
        self._count_waits((working, reading))
        return StopReason(int(reason)), others[: len(numbers)], others[len(numbers) :]

    def _find_own_reason(self, before: int, after: int) -> StopReason:
        """Return the reason that this rank sees by itself."""
        if self._progress.stop_signal:
            return StopReason.SIGNAL
        # Rank 0 alone looks for the others: kill switch, duration and interval.
        if self._ranks.rank != 0:
            return StopReason.NONE
        config = self._config
        if config.kill_switch_path and self._find_kill_switch(Path(config.kill_switch_path)):
            return StopReason.KILL_SWITCH
        minutes = config.exit_duration_in_mins
        if minutes is not None and time.monotonic() - self._start > 60 * minutes:
            return StopReason.DURATION
        if is_due(config.exit_interval, before, after):
            return StopReason.INTERVAL
        return StopReason.NONE

    def _find_kill_switch(self, path: Path) -> bool:
        """Return whether the kill switch exists. Return False if the file system fails.

        Such a failure may be temporary, and a signal can still stop the run. So it must not end the
        run.
        """
        try:
            found = path.exists()
        except OSError as error:
            reason = error.strerror or str(error)
            # Warn once for each new reason. A warning in each iteration would fill the log.
            if reason != self._switch_error:
                self._log(
                    f"warning: --kill-switch-path {path} cannot be looked for ({reason}); the run "
                    "continues and looks for it again after each iteration"
                )
            self._switch_error = reason
            return False
        if self._switch_error is not None:
            self._log(f"--kill-switch-path {path} can be looked for again")
            self._switch_error = None
        return found

    def format_stop_line(self, reason: StopReason, iteration: int) -> str:
        """Return the log line for a stop."""
        if reason == StopReason.KILL_SWITCH:
            return format_kill_switch_line(str(self._config.kill_switch_path))
        if reason == StopReason.DURATION:
            return format_exit_duration_line((time.monotonic() - self._start) / 60)
        if reason == StopReason.SIGNAL:
            return f"received a signal to stop; {format_exit_iteration_line(iteration)}"
        return format_exit_iteration_line(iteration)


def _read_votes(votes: float) -> StopReason:
    """Return the reason that a sum of votes stands for."""
    if votes >= _SIGNAL_VOTE:
        return StopReason.SIGNAL
    return StopReason(int(votes))
