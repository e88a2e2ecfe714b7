"""Agreement between the ranks that save and load together, and waiting for work on files.

A collective must not wait for a file system, because it would time out without naming the slow
rank. So work on files runs in threads, and the ranks agree in short collectives who is done.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist

from megatron.base.errors import CheckpointError, MegatronError, make_error
from megatron.base.plain_text import format_some, print_line
from megatron.parallel.messages import broadcast_json, gather_json, gather_json_on_rank_0
from megatron.parallel.rank_progress import (
    FILE_THREAD,
    Phase,
    RankProgress,
    StopRequested,
    TimeLimit,
)
from megatron.parallel.roll_call import RollCall

PATIENCE_SECONDS = 3600.0
"""Seconds that ranks wait for the slowest one's work on files."""
_ROUND_SECONDS = 0.5
"""Seconds between two collectives that ask whether all ranks are done."""
_REPORT_SECONDS = 60.0
"""Seconds between two messages about a long wait."""
_SHOWN = 8
"""Number of ranks that a message names."""
Result = TypeVar("Result")


class Work(Generic[Result]):
    """A function call and its outcome, which is a result or an error."""

    def __init__(self, act: Callable[[], Result], *, in_thread: bool) -> None:
        """Call `act`, in a thread or at once. The error that it raises is stored, not raised."""
        self._act = act
        self.seconds = 0.0
        """How long the call took."""
        self.result: Result | None = None
        """What the call returned. None until it is done, and if it raised."""
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if in_thread:
            # A daemon thread does not keep the process alive when a file system hangs.
            self._thread = threading.Thread(target=self._run, name=FILE_THREAD, daemon=True)
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        start = time.monotonic()
        try:
            self.result = self._act()
        except BaseException as error:
            # The owner raises it again when all ranks have agreed on the outcome. An error that
            # ended the thread would only be printed.
            self.error = error
        self.seconds = time.monotonic() - start

    @property
    def done(self) -> bool:
        """Whether the call has returned or raised."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the call is done, at most `seconds` if given."""
        if self._thread is not None:
            self._thread.join(seconds)


@dataclass(frozen=True)
class Ranks:
    """The ranks that save and load together. The default is one process alone."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """Group on the CPU for small messages. None for one process."""
    names: tuple[str, ...] = ("rank 0",)
    """Names of all ranks, for messages."""
    progress: RankProgress = field(default_factory=RankProgress, compare=False)
    """The phase of this rank, for the watchdog."""

    def log(self, line: str) -> None:
        """Print a line on rank 0. It is used before the reporter exists."""
        if self.rank == 0:
            print_line(line)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, on every rank. See `gather_json` for what a value may be."""
        return gather_json(value, self.group)

    def gather_on_rank_0(self, value: Any) -> list[Any] | None:
        """Return every rank's value on rank 0, and None elsewhere. It is for long values."""
        return gather_json_on_rank_0(value, self.group)

    def work(
        self, act: Callable[[], Result], what: str, log: Callable[[str], None] = lambda line: None
    ) -> Result:
        """Call a function that takes a different time on each rank. Return when all are done.

        It runs in a thread. A rank whose call fails raises immediately and does not wait for the
        others.

        Args:
            act: The function.
            what: The work in words, for messages.
            log: Called with a message if it takes long.

        Returns:
            What `act` returned on this rank.

        Raises:
            CheckpointError: See `wait_for`.
            StopRequested: See `check_stop`.
        """
        own = Work(act, in_thread=True)
        self.wait_for(own, what, log, until_failure=True)
        if own.error is not None:
            raise own.error
        # Not an assertion, because None may be what `act` returned.
        return cast(Result, own.result)

    def call_on_rank_0(
        self, act: Callable[[], Any], what: str, log: Callable[[str], None] = lambda line: None
    ) -> Any:
        """Call a function on rank 0 only. Return its result on every rank.

        All ranks call this together.

        Args:
            act: The function. Its result must have a form in JSON. See `gather_json`.
            what: The work in words, for messages.
            log: Called with a message if it takes long.

        Raises:
            MegatronError: `act` raised it. It is raised on every rank.
            CheckpointError: See `wait_for`.
        """

        # The error is returned, not raised. If rank 0 raised here, the others would wait for it.
        def attempt() -> tuple[Any, MegatronError | None]:
            if self.rank != 0:
                return None, None
            try:
                return act(), None
            except MegatronError as error:
                return None, error

        result, error = self.work(attempt, what, log)
        refusal = None
        if error is not None:
            refusal = [type(error).__name__, str(error)]
        result, refusal = broadcast_json([result, refusal], self.group)
        # Rank 0 raises its own error, because that has the cause.
        if error is not None:
            raise error
        if refusal is not None:
            raise make_error(*refusal)
        return result

    def wait_for(
        self,
        work: Work[Any],
        what: str,
        log: Callable[[str], None] = lambda line: None,
        *,
        until_failure: bool = False,
        is_repeated: bool = False,
        stage: str = "",
    ) -> None:
        """Wait until the work of all ranks is done, in rounds of short collectives.

        No collective times out because of a slow file system. A rank that hangs elsewhere is still
        found as fast as in training.

        Args:
            work: The work of this rank.
            what: The work in words, such as "saving iteration 3", for messages.
            log: Called with a message if it takes long.
            until_failure: Return as soon as this rank's own work has failed.
            is_repeated: See `Phase`.
            stage: See `Phase`.

        Raises:
            CheckpointError: On every rank, if a rank needs longer than PATIENCE_SECONDS. The
                message names it.
        """
        phase = Phase(what, is_repeated, in_threads=True, stage=stage)
        with self.progress.enter(phase):
            self._wait_in_rounds(work, what, log, until_failure=until_failure)
        completed = self.progress.completed
        completed[phase.kind] = max(work.seconds, completed[phase.kind])

    def check_stop(self) -> None:
        """Stop on all ranks if one of them has received a signal. All ranks call it together.

        Raises:
            StopRequested: On every rank.
        """
        self._ask(True, 0.0)

    def _wait_in_rounds(
        self, work: Work[Any], what: str, log: Callable[[str], None], *, until_failure: bool
    ) -> None:
        """Wait as `wait_for` does."""
        start = time.monotonic()
        reported = 0.0
        while True:
            work.wait(_ROUND_SECONDS)
            if until_failure and work.error is not None:
                return
            # All ranks use rank 0's time. With their own, some would raise and others would not.
            busy, seconds = self._ask(work.done, time.monotonic() - start)
            if not busy:
                return
            if seconds - reported < _REPORT_SECONDS and seconds < PATIENCE_SECONDS:
                continue
            reported = seconds
            names = format_some((self.names[rank] for rank in busy), _SHOWN)
            if seconds >= PATIENCE_SECONDS:
                raise CheckpointError(
                    f"{what} has taken {seconds:.0f} s, the longest time that ranks wait, and is "
                    f"not done on {names}; check the file system on that host, and start "
                    "again with the same command"
                )
            log(f"{what} has taken {seconds:.0f} s and is not done on {names}; the run waits")

    def _ask(self, done: bool, seconds: float) -> tuple[list[int], float]:
        """Return the ranks that are not done, and the seconds that rank 0 has waited.

        Raises:
            StopRequested: See `check_stop`.
        """
        stops = self.progress.may_stop and self.progress.stop_signal > 0
        # float64 holds the seconds and the flags in one message.
        own = torch.tensor([float(done), seconds, float(stops)], dtype=torch.float64)
        everyone = [own]
        if self.size > 1:
            everyone = [torch.empty_like(own) for _ in range(self.size)]
            dist.all_gather(everyone, own, group=self.group)
        finished, waited, stopping = torch.stack(everyone).T.tolist()
        if any(stopping):
            raise StopRequested(self.progress.stop_signal)
        return [rank for rank, done in enumerate(finished) if not done], waited[0]


def build_roll_call(
    ranks: Ranks,
    timeout_minutes: float,
    *,
    hang_timeout: float | None = None,
    load_watchdog: Callable[[], Callable[..., RollCall] | None] = lambda: None,
) -> RollCall:
    """Return a context that names the missing ranks when a collective fails within it.

    The run then ends with a `LostRanksError`. See `RollCall`.

    Args:
        ranks: All ranks.
        timeout_minutes: The value of `--distributed-timeout-minutes`.
        hang_timeout: The seconds of `--hang-timeout`, if it is a number.
        load_watchdog: Returns what builds the roll call of a run with a watchdog, or None without
            one.
    """
    store: dist.Store
    if ranks.group is None:
        # One process has no store, and needs one only to use the same code.
        store = dist.HashStore()
    else:
        # PyTorch has no public way to get the store of the default process group.
        store = dist.distributed_c10d._get_default_store()
    limit = TimeLimit(timeout_minutes, hang_timeout)
    build_watchdog = load_watchdog()
    if build_watchdog is None:
        return RollCall(store, ranks.rank, ranks.names, limit)
    progress = ranks.progress
    return build_watchdog(
        store, ranks.rank, ranks.names, limit, progress=progress, hang_timeout=hang_timeout
    )
