"""Traces of PyTorch's profiler, for chosen iterations and ranks.

Invariant: the profiler runs in no other iteration, and a trace that cannot be written never ends
training. A file with the name of a trace is complete.
"""

import gzip
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch

from megatron.base.durable import replace_file_by

if TYPE_CHECKING:
    from torch.profiler import profile


class Profiler:
    """Writes one trace of a range of iterations.

    It is a context manager around training. If training stops within the range, it writes the
    iterations that were trained. After an error it writes nothing.
    """

    def __init__(
        self,
        folder: Path | None,
        iterations: tuple[int, int],
        rank: int,
        log: Callable[[str], None],
    ) -> None:
        """Create a profiler of this rank.

        Args:
            folder: The folder of the traces, or None if this rank writes none.
            iterations: The first and the last iteration of the trace.
            rank: This rank.
            log: Prints a line of the log.
        """
        self._folder = folder
        self._first, self._last = iterations
        self._rank = rank
        self._log = log
        self._profile: profile | None = None
        self._recorded: list[int] = []

    def __enter__(self) -> "Profiler":
        """Return the profiler. It starts with the first iteration of the range."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Stop, and write the trace unless there was an error."""
        self._stop(write=kind is None)

    @contextmanager
    def record(self, iteration: int) -> Iterator[None]:
        """Profile the `with` block if `iteration` is in the range."""
        if self._folder is None:
            yield
            return
        if not self._first <= iteration <= self._last:
            # A skipped range of iterations may have passed the last one.
            self._stop(write=True)
            yield
            return
        if self._profile is None:
            self._profile = _start()
        # Tools for traces look for steps under this name.
        with torch.profiler.record_function(f"ProfilerStep#{iteration}"):
            yield
        self._recorded.append(iteration)
        if iteration == self._last:
            self._stop(write=True)

    def _stop(self, *, write: bool) -> None:
        """Stop the profiler if it runs, and write its trace if `write` is set."""
        if self._profile is None or self._folder is None:
            return
        stopped = self._profile
        recorded = self._recorded
        self._profile = None
        self._recorded = []
        if not (write and recorded):
            stopped.stop()
            return
        span = f"{recorded[0]}-{recorded[-1]}"
        # TensorBoard's plugin finds files that end like this.
        path = self._folder / f"iterations-{span}.rank-{self._rank}.pt.trace.json.gz"
        try:
            stopped.stop()
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file_by(path, lambda file: _export(stopped, path.parent, file))
        # PyTorch raises RuntimeErrors.
        except (OSError, RuntimeError) as error:
            self._log(
                f"warning: the trace {path} could not be written: {error}; training continues"
            )
            return
        self._log(f"rank {self._rank}: the trace of iterations {span} is in {path}")


def _start() -> "profile":
    """Return a profiler that runs. It records CUDA kernels too if there is a GPU."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)
    profiler.start()
    return profiler


def _export(stopped: "profile", folder: Path, file: BinaryIO) -> None:
    """Write a trace as compressed JSON.

    Raises:
        OSError: The trace is not complete.
    """
    # The exporter takes a file name, and does not report a full disk. The uncompressed file may be
    # too large for the system's folder of temporary files, so it is next to the trace.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".trace-") as temporary:
        plain = Path(temporary) / "trace.json"
        stopped.export_chrome_trace(str(plain))
        _check_complete(plain)
        with open(plain, "rb") as text, gzip.GzipFile(fileobj=file, mode="wb") as packed:
            shutil.copyfileobj(text, packed)


def _check_complete(path: Path) -> None:
    """Check that a file has the end of a trace, which names the file.

    Raises:
        OSError: The end is missing.
    """
    size = 0
    end = b""
    # If the exporter could write nothing, there is no file.
    if path.exists():
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            # The last field is the path as JSON text, in which a byte may take two characters.
            file.seek(max(0, size - 100 - 2 * len(os.fsencode(path))))
            end = file.read().rstrip()
    if not (b'"traceName"' in end and end.endswith(b"}")):
        raise OSError(f"only {size} bytes could be written; is the disk full?")
