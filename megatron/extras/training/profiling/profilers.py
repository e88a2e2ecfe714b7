"""The profiler and the memory history of a rank, as one part of a run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.base.plain_text import print_line
from megatron.config.profiling import ALL_RANKS, choose_profile_folder, parse_profile_iterations
from megatron.config.tree import Config
from megatron.extras.training.profiling.memory_history import MemoryHistory
from megatron.extras.training.profiling.profiler import Profiler
from megatron.run.parts import Profiling


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
        chosen = choose_profile_folder(config)
        if chosen is not None and not {rank, ALL_RANKS}.isdisjoint(logging.profile_ranks):
            folder = Path(chosen)
        iterations = parse_profile_iterations(config)
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
