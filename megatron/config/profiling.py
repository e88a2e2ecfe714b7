"""The rules of profiler traces, memory snapshots and statistics of layers."""

from collections.abc import Iterator

from megatron.base.errors import ConfigError
from megatron.config.config_with_origin import ConfigWithOrigin
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
    parent = config.checkpoint.save or logging.tensorboard_dir
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


def check_profile(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check the iterations and the folder of traces and snapshots."""
    config = settings.config
    try:
        parse_profile_iterations(config)
    except ConfigError as error:
        yield str(error)
    requested = find_requesting_field(config)
    if requested is not None and choose_profile_folder(config) is None:
        yield (
            f"{settings.describe(requested)} needs a folder: give --profile-dir, --save or "
            "--tensorboard-dir."
        )


def warn_layer_statistics_without_file(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn if statistics of layers are computed and no file receives them."""
    logging = settings.config.logging
    if logging.log_layer_stats_interval is not None and not (
        logging.tensorboard_dir or logging.metrics_file or settings.config.checkpoint.save
    ):
        yield (
            f"{settings.describe('logging.log_layer_stats_interval')} computes statistics that are "
            "not written anywhere: give --tensorboard-dir, --metrics-file or --save."
        )


def find_requesting_field(config: Config) -> str | None:
    """Return the field that requests traces or snapshots, or None."""
    logging = config.logging
    if logging.profile_iterations is not None:
        return "logging.profile_iterations"
    if logging.memory_snapshot:
        return "logging.memory_snapshot"
    return None
