"""Checks that read much: one thread of low priority runs them while the run trains.

Invariant: a check delays neither start nor step. What it finds waits here until the run asks,
before each save.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

BLOCK = 4 << 20
"""Bytes that are read at once."""
_LOWEST_PRIORITY = 19
_CLOSING_SECONDS = 10.0


class Cancelled(Exception):
    """The run ends before a check has read everything."""


class Background:
    """Run checks one after the other in a thread, which is started by the first one.

    A check is a function that returns what is wrong, or None. An OSError in it is no finding: the
    check could not be done.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, Callable[[], str | None]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._running = False
        self._cancelled = threading.Event()
        self._problems: list[str] = []
        self._notes: list[str] = []

    def submit(self, name: str, check: Callable[[], str | None]) -> None:
        """Run `check` later; `name` says what is checked, for messages."""
        with self._changed:
            self._waiting.append((name, check))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="background checks", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def problems(self) -> list[str]:
        """Return what was found wrong so far."""
        with self._changed:
            return list(self._problems)

    def take_notes(self) -> list[str]:
        """Return which checks could not be done, each once."""
        with self._changed:
            notes = list(self._notes)
            self._notes.clear()
            return notes

    def wait(self, seconds: float) -> bool:
        """Wait until all checks are done; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._running, seconds)

    def close(self) -> None:
        """End the thread; a check under way is given up."""
        self._cancelled.set()
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            # A read from a file system that does not answer cannot be interrupted; the thread is a daemon.
            self._thread.join(_CLOSING_SECONDS)

    def read(self, descriptor: int, begin: int, size: int) -> Iterator[memoryview]:
        """Yield the bytes [begin, begin + size) of a file in blocks, at no more than half of the
        disk's speed.

        A block is valid until the next one is asked for. The pages are dropped from the page cache
        where nobody maps them, so that reading a large file does not displace what training uses.

        Raises:
            OSError: the file cannot be read, or is shorter. Cancelled: `close` was called.
        """
        buffer = bytearray(BLOCK)
        position, end = begin, begin + size
        while position < end:
            started = time.monotonic()
            block = memoryview(buffer)[: min(BLOCK, end - position)]
            count = os.preadv(descriptor, [block], position)
            if count == 0:
                raise OSError(f"the file ends at byte {position}, before byte {end}")
            yield block[:count]
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, position, count, os.POSIX_FADV_DONTNEED)
            position += count
            if self._cancelled.wait(time.monotonic() - started):
                raise Cancelled

    def _work(self) -> None:
        with contextlib.suppress(
            OSError
        ):  # Linux has a priority for each thread; elsewhere the pace must do
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._cancelled.is_set())
                if self._cancelled.is_set():
                    return
                name, check = self._waiting.popleft()
                self._running = True
            problem, note = _outcome(name, check)
            with self._changed:
                self._running = False
                self._problems += [problem] if problem else []
                self._notes += [note] if note else []
                self._changed.notify_all()


def _outcome(name: str, check: Callable[[], str | None]) -> tuple[str | None, str | None]:
    """Return what is wrong, and why the check could not be done."""
    try:
        return check(), None
    except Cancelled:
        return None, None
    except OSError as error:
        return None, f"{name} could not be checked in the background: {error}"
