"""Traces of PyTorch's profiler for chosen iterations and ranks, and snapshots of CUDA's memory.

Invariants:
- The profiler runs in no other iteration.
- A trace or snapshot that cannot be written never ends training, and never hides an out-of-memory
  error. A file with the name of a trace is complete.

Snapshots are pickles for https://docs.pytorch.org/memory_viz. This program never reads them.
"""

import gzip
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch

from megatron.base.durable import replace_file_by
from megatron.base.plain_text import print_line
from megatron.config.logging import ALL_RANKS
from megatron.config.tree import Config
from megatron.run.parts import Profiling

if TYPE_CHECKING:
    from torch.profiler import profile


class Profilers(Profiling):
    """Writes profiler traces and memory snapshots. See `Profiling`."""

    def __init__(self, config: Config, rank: int, log: Callable[[str], None]) -> None:
        """Build both from the configuration.

        Args:
            config: The configuration.
            rank: This rank.
            log: Prints a line of the log on rank 0.
        """
        logging = config.logging
        # Each rank reports its own files.
        if rank != 0:
            log = print_line
        folder = None
        chosen = logging.choose_profile_folder(config.checkpoint.save_folder)
        if chosen is not None and not {rank, ALL_RANKS}.isdisjoint(logging.profile_ranks):
            folder = Path(chosen)
        iterations = logging.parse_profile_iterations()
        traces = None if iterations is None else folder
        snapshots = folder if logging.memory_snapshot else None
        self._profiler = Profiler(traces, iterations or (0, 0), rank, log)
        self._memory = MemoryHistory(snapshots, logging.memory_snapshot_iterations, rank, log)

    def __enter__(self) -> "Profilers":
        """Return the profilers. The first iteration to record starts them."""
        self._profiler.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Write the trace of the iterations so far, unless there was an error."""
        self._profiler.__exit__(kind, *error)

    @contextmanager
    def record(self, iteration: int) -> Iterator[None]:
        """Record the `with` block if `iteration` was chosen."""
        with self._profiler.record(iteration), self._memory.record(iteration):
            yield


_MAX_EVENTS = 100_000
"""Number of the latest allocations and releases in a snapshot, as in Megatron-LM."""


class MemoryHistory:
    """Records the allocations of this rank and writes snapshots."""

    def __init__(
        self,
        folder: Path | None,
        iterations: Collection[int],
        rank: int,
        log: Callable[[str], None],
    ) -> None:
        """Start to record if this rank writes snapshots and has a GPU.

        Args:
            folder: The folder of the snapshots, or None if this rank writes none.
            iterations: The iterations after which a snapshot is written.
            rank: This rank.
            log: Prints a line of the log.
        """
        self._folder = folder
        self._iterations = iterations
        self._rank = rank
        self._log = log
        if folder is None:
            return
        if not torch.cuda.is_available():
            self._folder = None
            log("warning: --memory-snapshot has no effect: there is no CUDA memory to record")
            return
        torch.cuda.memory._record_memory_history(max_entries=_MAX_EVENTS)

    @contextmanager
    def record(self, iteration: int) -> Iterator[None]:
        """Write a snapshot after the `with` block if it is due, or if memory runs out in it."""
        if self._folder is None:
            yield
            return
        try:
            yield
        except torch.OutOfMemoryError:
            self._write(self._folder / f"out-of-memory-{iteration}.rank-{self._rank}.pickle")
            raise
        if iteration in self._iterations:
            self._write(self._folder / f"iteration-{iteration}.rank-{self._rank}.pickle")

    def _write(self, path: Path) -> None:
        try:
            snapshot = torch.cuda.memory._snapshot()
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file_by(path, lambda file: pickle.dump(snapshot, file))
        # PyTorch raises RuntimeErrors. A snapshot needs host memory, which may be short too.
        except (OSError, RuntimeError, MemoryError) as error:
            self._log(f"warning: the memory snapshot {path} could not be written: {error}")
            return
        self._log(f"rank {self._rank}: a memory snapshot is in {path}")


@dataclass
class Profiler:
    """Writes one trace of a range of iterations.

    It is a context manager around training. If training stops within the range, it writes the
    iterations that were trained. After an error it writes nothing.
    """

    folder: Path | None
    """The folder of the traces, or None if this rank writes none."""
    iterations: tuple[int, int]
    """The first and the last iteration of the trace."""
    rank: int
    """This rank."""
    log: Callable[[str], None]
    """Prints a line of the log."""
    _profile: "profile | None" = None
    _recorded: list[int] = field(default_factory=list)

    def __enter__(self) -> "Profiler":
        """Return the profiler. It starts with the first iteration of the range."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Stop, and write the trace unless there was an error."""
        self._stop(write=kind is None)

    @contextmanager
    def record(self, iteration: int) -> Iterator[None]:
        """Profile the `with` block if `iteration` is in the range."""
        if self.folder is None:
            yield
            return
        first, last = self.iterations
        if not first <= iteration <= last:
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
        if iteration == last:
            self._stop(write=True)

    def _stop(self, *, write: bool) -> None:
        """Stop the profiler if it runs, and write its trace if `write` is set."""
        if self._profile is None or self.folder is None:
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
        path = self.folder / f"iterations-{span}.rank-{self.rank}.pt.trace.json.gz"
        try:
            stopped.stop()
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file_by(path, lambda file: _export(stopped, path.parent, file))
        # PyTorch raises RuntimeErrors.
        except (OSError, RuntimeError) as error:
            self.log(f"warning: the trace {path} could not be written: {error}; training continues")
            return
        self.log(f"rank {self.rank}: the trace of iterations {span} is in {path}")


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
