"""Snapshots of CUDA's memory with the history of its allocations.

Invariant: a snapshot that cannot be written never ends training, and never hides the out-of-memory
error. Snapshots are pickles for https://docs.pytorch.org/memory_viz. This program never reads
them.
"""

import pickle
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron.base.durable import replace_file_by

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
