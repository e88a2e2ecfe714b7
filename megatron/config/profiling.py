"""Where profiler traces and memory snapshots go, and which iterations a trace has."""

from megatron.config.tree import Config
from megatron.schedule.skip import parse_range

ALL_RANKS = -1
"""The number in --profile-ranks that stands for every rank."""


def choose_profile_folder(config: Config) -> str | None:
    """Return the folder of traces and snapshots, or None if none can be derived."""
    logging = config.logging
    if logging.profile_dir is not None:
        return logging.profile_dir
    # Not below --tensorboard-dir if there is a choice, because that folder is often uploaded.
    parent = config.checkpoint.save_folder or logging.tensorboard_dir
    if parent is None:
        return None
    return f"{parent}/profile"


def parse_profile_iterations(config: Config) -> tuple[int, int] | None:
    """Return the first and the last iteration of the trace, or None without a trace.

    Raises:
        ConfigError: --profile-iterations is not FIRST-LAST.
    """
    text = config.logging.profile_iterations
    if text is None:
        return None
    return parse_range(text, "--profile-iterations")


def find_requesting_field(config: Config) -> str | None:
    """Return the field that requests traces or snapshots, or None."""
    logging = config.logging
    if logging.profile_iterations is not None:
        return "logging.profile_iterations"
    if logging.memory_snapshot:
        return "logging.memory_snapshot"
    return None
