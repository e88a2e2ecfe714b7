"""Standard output and standard error that do not end the process when they cannot be written.

Invariant: a write to either stream never raises. If the disk of the log is full, or the reader of
the pipe has ended, this is reported once on the other stream. Each further line is attempted again.
When writing works again, the stream reports how many lines were lost.

Python's own streams keep the lines that could not be written, and raise at the next line. At exit,
they end the interpreter with exit code 120.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_LINE_BYTES = 1 << 16
"""A line up to this length is one write, so that lines of several processes do not mix."""


class _EnduringOutput(io.RawIOBase):
    """Raw stream that never raises in `write`."""

    def __init__(self, descriptor: int, name: str, other: int) -> None:
        """Create a stream.

        Args:
            descriptor: Where its bytes are written.
            name: Its name, for messages.
            other: The descriptor on which a failure is reported.
        """
        self._descriptor = descriptor
        self._name = name
        self._other = other
        self._error: OSError | None = None
        """The error of the last attempt. None if it succeeded."""
        self._lost_lines = 0
        self._torn = False
        """The last byte that was written is not the end of a line."""

    def writable(self) -> bool:
        """Return True, because `io.BufferedWriter` demands it."""
        return True

    def fileno(self) -> int:
        """Return the descriptor, which subprocesses and `faulthandler` need."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether the stream is a terminal. Progress bars depend on it."""
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        """Write all of `data`, or count its lines as lost. Return its length in both cases."""
        # A smaller number would make `io.BufferedWriter` keep the rest and raise later.
        block = bytes(data)
        try:
            if self._error is not None:
                self._write_all(self._account(self._error))
                self._error = None
                self._lost_lines = 0
            self._write_all(block)
        except OSError as error:
            first = self._error is None
            self._error = error
            self._lost_lines += block.count(b"\n")
            if first:
                self._report(error)
        return len(block)

    def _account(self, error: OSError) -> bytes:
        """Return the line that reports how many lines were lost."""
        # Without this, the report would continue a line that was written in part.
        end_of_line = "\n" if self._torn else ""
        lost = (
            f"warning: {self._lost_lines} lines of {self._name} were lost before this one "
            f"({error.strerror})"
        )
        return f"{end_of_line}{lost}\n".encode()

    def _report(self, error: OSError) -> None:
        """Report a failure on the descriptor of the other stream.

        It does not use the other stream object, which may be reporting its own failure.
        """
        line = (
            f"warning: {self._name} cannot be written ({error.strerror}); "
            "the program continues and attempts each line again\n"
        )
        # Both streams may go to the same full disk. The number of lost lines is then reported when
        # there is space again.
        with contextlib.suppress(OSError):
            os.write(self._other, line.encode())

    def _write_all(self, block: bytes) -> None:
        """Write all bytes of a block.

        Raises:
            OSError: If the rest of the block could not be written.
        """
        # `os.write` may take a part only, for example into a pipe that is almost full.
        left = memoryview(block)
        while left:
            written = os.write(self._descriptor, left)
            self._torn = left[written - 1] != ord("\n")
            left = left[written:]


@contextlib.contextmanager
def end_without_reader() -> Iterator[None]:
    """End with exit code 0 if the reader of standard output has ended, as in `--help | head`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python would try to write the rest once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def protect_standard_streams() -> None:
    """Replace `sys.stdout` and `sys.stderr` with streams that never raise.

    Call it first in a program. A stream stays as it is if it is closed, or if it has no file
    descriptor, as in a test.
    """
    # If the other stream is not replaced, its usual descriptor number is used for the report. A
    # failure there is ignored.
    output = _descriptor(sys.stdout)
    error = _descriptor(sys.stderr)
    if output is not None:
        sys.stdout = _protected(
            sys.stdout, _EnduringOutput(output, "standard output", 2 if error is None else error)
        )
    if error is not None:
        sys.stderr = _protected(
            sys.stderr, _EnduringOutput(error, "standard error", 1 if output is None else output)
        )


def _descriptor(stream: TextIO | None) -> int | None:
    """Return the descriptor of a stream, or None if it cannot be protected or already is."""
    if stream is None or isinstance(
        getattr(getattr(stream, "buffer", None), "raw", None), _EnduringOutput
    ):
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _protected(stream: TextIO, raw: _EnduringOutput) -> TextIO:
    """Return a text stream over `raw` with the encoding of `stream`."""
    # Text that was printed before must come before the text of the new stream.
    with contextlib.suppress(OSError):
        stream.flush()
    buffered = io.BufferedWriter(raw, _LINE_BYTES)
    return io.TextIOWrapper(
        buffered, encoding=stream.encoding, errors=stream.errors, line_buffering=True
    )
