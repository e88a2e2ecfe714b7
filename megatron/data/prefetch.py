"""Reading ahead in threads: while a step computes, the next batches are read.

The caller guesses which requests come next. Invariant: what `take` returns does not depend on these
guesses. A wrong guess only wastes a read.

Threads are used instead of processes. A fork could copy a locked lock, and reading releases the GIL
anyway.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


class Prefetcher(Generic[Request, Result]):
    """Reads requests in `threads` threads. With 0 threads, `take` reads in the caller's thread."""

    def __init__(self, read: Callable[[Request], Result], threads: int) -> None:
        """Remember the reader. Threads are started by the first guess."""
        self._read = read
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[Request, Future[Result]]] = deque()

    def take(self, request: Request, guesses: Iterable[Request] = ()) -> Result:
        """Return the result of a request, and start to read the guesses for the next ones.

        Args:
            request: What the caller needs now.
            guesses: Requests that may follow, the most likely first.

        Raises:
            Exception: whatever the reader raises, in its thread or here.
        """
        if self.is_ahead(request):
            waiting = self._ahead.popleft()[1]
        else:
            # Nothing was read ahead, or the guesses were wrong, as when the batch size changes.
            self.discard()
            waiting = None
        if self.threads:
            # Submitted before the wait below, so that the threads do not become idle meanwhile.
            self._look_ahead(list(guesses)[: self.threads])
        if waiting is None:
            return self._read(request)
        return waiting.result()

    @property
    def has_next(self) -> bool:
        """Whether the first batch that was guessed is read."""
        return bool(self._ahead) and self._ahead[0][1].done()

    def read(self, request: Request) -> None:
        """Read a request, unless it is being read ahead, and wait for it. `take` returns it.

        No other method may be called meanwhile, except `close`.
        """
        if not self.is_ahead(request):
            self._look_ahead([request])
        wait([self._ahead[0][1]])

    def is_ahead(self, request: Request) -> bool:
        """Return whether a request is the next one that is being read ahead."""
        return bool(self._ahead) and self._ahead[0][0] == request

    def discard(self) -> None:
        """Forget what was read ahead."""
        # A read that runs cannot be cancelled. Its result is dropped when it is done.
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def close(self) -> None:
        """Wait for the reads that have already started, and stop the threads."""
        self.discard()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _look_ahead(self, guesses: Sequence[Request]) -> None:
        """Submit new guesses, and drop the last requests if they are no longer guessed."""
        while self._ahead and self._ahead[-1][0] not in guesses:
            self._ahead.pop()[1].cancel()
        under_way = [request for request, _ in self._ahead]
        for guess in guesses:
            if guess not in under_way:
                self._pool = self._pool or ThreadPoolExecutor(
                    max(1, self.threads), thread_name_prefix="data"
                )
                self._ahead.append((guess, self._pool.submit(self._read, guess)))
