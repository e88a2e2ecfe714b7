"""Checks that read much, run by one thread of low priority while the run trains.

Invariant: a check delays neither the start nor a step. Its result is kept here until the run asks
for it, which it does before each save.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import xxhash

BLOCK = 4 << 20
"""Bytes that are read at once."""
# Linux's range is -20 (highest) to 19. Training and data loading go first.
_LOWEST_PRIORITY = 19
_CLOSING_SECONDS = 10.0
"""`close` does not wait longer than this for a read that does not return."""


def digest_blocks(blocks: Iterable[bytes | memoryview]) -> str:
    """Return xxh3_128 of all bytes, as `xxh128sum` prints it."""
    digest = xxhash.xxh3_128()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


class CancelledReadError(Exception):
    """The run ends before a check has read everything."""


class Background:
    """Run checks one after the other in a thread, which the first check starts.

    A check is a function that returns what is wrong, or None. An OSError in it means that the check
    could not be done. It is kept as a note and not as a problem.
    """

    def __init__(self) -> None:
        """Start without checks and without a thread."""
        self._waiting: deque[tuple[str, Callable[[], str | None]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._running = False
        self._cancelled = threading.Event()
        self._problems: list[str] = []
        self._notes: list[str] = []

    def submit(self, name: str, check: Callable[[], str | None]) -> None:
        """Run `check` later.

        Args:
            name: What is checked, for messages.
            check: Returns what is wrong, or None. It runs in the thread.
        """
        with self._changed:
            self._waiting.append((name, check))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="background checks", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def problems(self) -> list[str]:
        """Return the problems that were found so far."""
        with self._changed:
            return list(self._problems)

    def take_notes(self) -> list[str]:
        """Return which checks could not be done since the last call."""
        with self._changed:
            notes = list(self._notes)
            self._notes.clear()
            return notes

    def wait(self, seconds: float) -> bool:
        """Wait until all checks are done, and return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._running, seconds)

    def close(self) -> None:
        """Stop the thread. A check that runs is abandoned."""
        self._cancelled.set()
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            # A read from a file system that does not answer cannot be interrupted. The thread is a
            # daemon, so that it does not keep the process alive.
            self._thread.join(_CLOSING_SECONDS)

    def read(self, descriptor: int, begin: int, size: int) -> Iterator[memoryview]:
        """Yield the bytes [begin, begin + size) of a file in blocks.

        The file is read at no more than half of the disk's speed. A block is valid until the next
        one is requested.

        Raises:
            OSError: the file cannot be read, or is shorter.
            CancelledReadError: `close` was called.
        """
        buffer = bytearray(BLOCK)
        position = begin
        end = begin + size
        while position < end:
            started = time.monotonic()
            block = memoryview(buffer)[: min(BLOCK, end - position)]
            count = os.preadv(descriptor, [block], position)
            if count == 0:
                raise OSError(f"the file ends at byte {position}, before byte {end}")
            yield block[:count]
            # Pages that no process maps are dropped from the page cache. Otherwise a large file
            # would displace the pages that training reads.
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, position, count, os.POSIX_FADV_DONTNEED)
            position += count
            # Pause for as long as the block took. Half of the disk's time is left to training.
            if self._cancelled.wait(time.monotonic() - started):
                raise CancelledReadError

    def _work(self) -> None:
        """Run the checks in the order in which they were submitted. The thread runs this method."""
        # Linux has a priority for each thread. Elsewhere only the pace of `read` limits the load.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._cancelled.is_set())
                if self._cancelled.is_set():
                    return
                name, check = self._waiting.popleft()
                self._running = True
            # Without the lock, so that the run can ask for problems while a check reads.
            problem, note = _outcome(name, check)
            with self._changed:
                self._running = False
                self._problems += [problem] if problem else []
                self._notes += [note] if note else []
                self._changed.notify_all()


def _outcome(name: str, check: Callable[[], str | None]) -> tuple[str | None, str | None]:
    """Run a check. Return what is wrong, and why the check could not be done."""
    try:
        return check(), None
    except CancelledReadError:
        return None, None
    except OSError as error:
        return None, f"{name} could not be checked in the background: {error}"
