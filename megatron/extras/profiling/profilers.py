"""Builds the profiler and the memory history of a rank from the configuration."""

from collections.abc import Callable
from pathlib import Path

from megatron.config.profiling import ALL_RANKS, choose_profile_folder, parse_profile_iterations
from megatron.config.tree import Config
from megatron.extras.profiling.memory_history import MemoryHistory
from megatron.extras.profiling.profiler import Profiler
from megatron.run.start.join import print_line


def build_profilers(
    config: Config, rank: int, say: Callable[[str], None]
) -> tuple[Profiler, MemoryHistory]:
    """Build what writes profiler traces and memory snapshots.

    Args:
        config: The configuration.
        rank: This rank.
        say: Prints a line of the log on rank 0.
    """
    logging = config.logging
    # Each rank reports its own files.
    if rank != 0:
        say = print_line
    folder = None
    chosen = choose_profile_folder(config)
    if chosen is not None and not {rank, ALL_RANKS}.isdisjoint(logging.profile_ranks):
        folder = Path(chosen)
    iterations = parse_profile_iterations(config)
    profiler = Profiler(None if iterations is None else folder, iterations or (0, 0), rank, say)
    memory_history = MemoryHistory(
        folder if logging.memory_snapshot else None,
        logging.memory_snapshot_iterations,
        rank,
        say,
    )
    return profiler, memory_history
