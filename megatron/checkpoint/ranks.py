"""Agreement between the ranks that save and load together, and waiting for work on files."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.errors import CheckpointError
from megatron.parallel.messages import gather_json

PATIENCE_SECONDS = 3600.0
"""How long ranks wait for the slowest one's work on files."""
_ROUND_SECONDS = 0.5
"""Between two questions whether all ranks are done."""
_REPORT_SECONDS = 60.0
_SHOWN = 8
Result = TypeVar("Result")


class Work:
    """An act and what became of it: its result, or what went wrong."""

    def __init__(self, act: Callable[[], Any], *, in_thread: bool) -> None:
        self._act = act
        self.result: Any = None
        self.error: BaseException | None = None
        self._thread = (
            threading.Thread(target=self._run, name="save", daemon=True) if in_thread else None
        )
        if self._thread is None:
            self._run()
        else:
            self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._act()
        except BaseException as error:  # raised again where the ranks meet
            self.error = error

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Return when the act is done, or after so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)


@dataclass(frozen=True)
class Ranks:
    """Who saves together."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """For small messages, on the CPU."""
    names: tuple[str, ...] = ("rank 0",)
    """Of all ranks, for messages."""

    def gather(self, mine: Any) -> list[Any]:
        """Return every rank's value, on every rank; see `gather_json` for what a value may be."""
        return gather_json(mine, self.group)

    def all(self, mine: bool) -> bool:
        """Whether it holds on every rank; cheaper than `gather`."""
        if self.size == 1:
            return mine
        agreed = torch.tensor([int(mine)])
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self.group)
        return bool(agreed.item())

    def work(
        self, act: Callable[[], Result], what: str, say: Callable[[str], None] = lambda line: None
    ) -> Result:
        """Do something that takes ranks unequally long; return its result when all are done.

        It runs in a thread. A rank whose act fails raises at once, and does not wait for the others.

        Raises:
            CheckpointError: see `wait_for`.
        """
        own = Work(act, in_thread=self.size > 1)
        self.wait_for(own, what, say, until_failure=True)
        if own.error is not None:
            raise own.error
        result: Result = own.result
        return result

    def wait_for(
        self,
        work: Work,
        what: str,
        say: Callable[[str], None] = lambda line: None,
        *,
        until_failure: bool = False,
    ) -> None:
        """Wait until the work of all ranks is done, in rounds of short collectives.

        So no collective times out for a slow file system, and a rank that stands still is found
        as fast as in training.

        Args:
            what: the work in words, "saving iteration 3", for messages.
            until_failure: return as soon as this rank's own work has failed.

        Raises:
            CheckpointError: on every rank; a rank needs longer than PATIENCE_SECONDS. It is named.
        """
        start = time.monotonic()
        reported = 0.0
        while True:
            work.wait(_ROUND_SECONDS)
            if self.size == 1:
                work.wait()
            if self.size == 1 or (until_failure and work.error is not None):
                return
            busy, seconds = self._ask(work.done, time.monotonic() - start)
            if not busy:
                return
            if seconds - reported < _REPORT_SECONDS and seconds < PATIENCE_SECONDS:
                continue
            reported = seconds
            names = ", ".join(self.names[rank] for rank in busy[:_SHOWN])
            more = f" and {len(busy) - _SHOWN} more" if len(busy) > _SHOWN else ""
            if seconds >= PATIENCE_SECONDS:
                raise CheckpointError(
                    f"{what} has taken {seconds:.0f} s, the longest that ranks wait for each other's "
                    f"files, and is not done on {names}{more}; look at the file system as that host "
                    "sees it, and start again with the same command"
                )
            say(
                f"{what} has taken {seconds:.0f} s and is not done on {names}{more}; the other ranks wait"
            )

    def _ask(self, done: bool, seconds: float) -> tuple[list[int], float]:
        """Return the ranks that are not done, and the seconds by rank 0's clock, which decides."""
        everyone = [torch.empty(2, dtype=torch.float64) for _ in range(self.size)]
        dist.all_gather(
            everyone, torch.tensor([float(done), seconds], dtype=torch.float64), group=self.group
        )
        busy = [
            rank
            for rank, (finished, _) in enumerate(torch.stack(everyone).tolist())
            if not finished
        ]
        return busy, float(everyone[0][1])
