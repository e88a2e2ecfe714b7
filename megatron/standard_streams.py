"""Standard output and error that do not end the process when nobody can write to them.

Invariant: a write to either never raises. A full disk under the log, or a reader of the pipe that went away, is reported once on
the other stream. Each further line is attempted again. When writing works again, the stream reports how many lines it lost.

Python's own streams keep what they could not write, raise at the next line, and end the interpreter with exit code 120.
"""

import contextlib
import io
import os
import sys
from typing import Any, TextIO

_LINE_BYTES = 1 << 16
"""A line up to this length is one write, so that lines of several processes do not mix."""


class _EnduringOutput(io.RawIOBase):
    """The raw end of a stream. `other` is the descriptor on which its failure is reported."""

    def __init__(self, descriptor: int, name: str, other: int) -> None:
        self._descriptor, self._name, self._other = descriptor, name, other
        self._error: OSError | None = None
        """Why the last attempt failed; None: it did not."""
        self._lost_lines = 0
        self._torn = False
        """The last byte that was written is not the end of a line."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        """Write all of `data`, or count its lines as lost. Returns its length in any case."""
        block = bytes(data)
        try:
            if self._error is not None:
                self._write_all(self._account(self._error))
                self._error, self._lost_lines = None, 0
            self._write_all(block)
        except OSError as error:
            first = self._error is None
            self._error = error
            self._lost_lines += block.count(b"\n")
            if first:
                self._report(error)
        return len(block)

    def _account(self, error: OSError) -> bytes:
        end_of_line = "\n" if self._torn else ""
        lost = f"warning: {self._lost_lines} lines of {self._name} were lost before this one ({error.strerror})"
        return f"{end_of_line}{lost}\n".encode()

    def _report(self, error: OSError) -> None:
        """Write to the descriptor itself: the other stream may be the one that is reporting."""
        line = f"warning: {self._name} cannot be written ({error.strerror}); the program goes on and attempts each line again\n"
        with contextlib.suppress(
            OSError
        ):  # both go to the same full disk; the account will follow when there is room
            os.write(self._other, line.encode())

    def _write_all(self, block: bytes) -> None:
        """Raises OSError: the rest of the block could not be written."""
        left = memoryview(block)
        while left:
            written = os.write(self._descriptor, left)
            self._torn = left[written - 1] != ord("\n")
            left = left[written:]


def protect_standard_streams() -> None:
    """Put streams that never raise in place of sys.stdout and sys.stderr. Call it first of all in a program.

    A stream that is closed, or that is no file descriptor (in a test), stays as it is.
    """
    output, error = _descriptor(sys.stdout), _descriptor(sys.stderr)
    if output is not None:
        sys.stdout = _protected(
            sys.stdout, _EnduringOutput(output, "standard output", 2 if error is None else error)
        )
    if error is not None:
        sys.stderr = _protected(
            sys.stderr, _EnduringOutput(error, "standard error", 1 if output is None else output)
        )


def _descriptor(stream: TextIO | None) -> int | None:
    """Return None for a stream that needs no protection, or has it."""
    if stream is None or isinstance(
        getattr(getattr(stream, "buffer", None), "raw", None), _EnduringOutput
    ):
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _protected(stream: TextIO, raw: _EnduringOutput) -> TextIO:
    with contextlib.suppress(OSError):
        stream.flush()  # what was printed before keeps its place
    buffered = io.BufferedWriter(raw, _LINE_BYTES)
    return io.TextIOWrapper(
        buffered, encoding=stream.encoding, errors=stream.errors, line_buffering=True
    )
