"""Reading ahead by threads: while a step computes, the batches after it are read.

Invariant: what `take` returns does not depend on the guesses; a wrong guess costs its work. Threads, not processes: there is
nothing that a fork could copy in a locked state, and reading releases the GIL.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


class Prefetcher(Generic[Request, Result]):
    """`threads` readers, none for 0: then `take` reads in the caller's thread."""

    def __init__(self, read: Callable[[Request], Result], threads: int) -> None:
        self._read, self.threads = read, threads
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[Request, Future[Result]]] = deque()

    def take(self, request: Request, guesses: Iterable[Request] = ()) -> Result:
        """The answer to a request; then read the guesses for the next ones ahead. Errors of the reader are raised here."""
        if self._ahead and self._ahead[0][0] == request:
            waiting = self._ahead.popleft()[1]
        else:
            self.discard()
            waiting = None
        if self.threads:
            self._look_ahead(list(guesses)[: self.threads])
        return self._read(request) if waiting is None else waiting.result()

    def discard(self) -> None:
        """Forget what was read ahead."""
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def close(self) -> None:
        """End the threads."""
        self.discard()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _look_ahead(self, guesses: Sequence[Request]) -> None:
        while self._ahead and self._ahead[-1][0] not in guesses:
            self._ahead.pop()[1].cancel()
        under_way = [request for request, _ in self._ahead]
        for guess in guesses:
            if guess not in under_way:
                self._pool = self._pool or ThreadPoolExecutor(
                    self.threads, thread_name_prefix="data"
                )
                self._ahead.append((guess, self._pool.submit(self._read, guess)))
