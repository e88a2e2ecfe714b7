"""Rules about what a run writes: checkpoints, TensorBoard, traces and memory snapshots."""

from collections.abc import Iterator

from megatron.base.errors import ConfigError
from megatron.base.plain_text import find_address_mistake, is_url
from megatron.config.fields import ConfigWithOrigin
from megatron.plan.rules.finding import Finding, PlanContext, error, warning


def check_addresses(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that checkpoints on an object store have a usable address and a local folder."""
    checkpoint = settings.config.checkpoint
    found = False
    for name in ("save", "load", "pretrained_checkpoint"):
        address = getattr(checkpoint, name) or ""
        found |= is_url(address)
        # Every address has a scheme, whose slashes may be wrong.
        if ":" in address and (mistake := find_address_mistake(address)) is not None:
            yield error(f"--{name.replace('_', '-')} {mistake}.")
    if found and checkpoint.local_dir is None:
        yield error(
            "a --save or --load with an address needs --local-dir, a folder of each host for "
            "metrics, events and files on their way."
        )
    if found and checkpoint.hf_export_interval is not None and is_url(checkpoint.save or ""):
        yield error(
            f"{settings.describe('checkpoint.hf_export_interval')} needs a folder for --save, "
            "because an export reads whole checkpoints from this host's disk. With an address, "
            "use tools/convert_checkpoint.py on another machine."
        )


def check_profile(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check the iterations and the folder of traces and snapshots."""
    config = settings.config
    try:
        config.logging.parse_profile_iterations()
    except ConfigError as failure:
        yield error(str(failure))
    requested = config.logging.profiling_field
    folder = config.logging.choose_profile_folder(config.checkpoint.save_folder)
    if requested is not None and folder is None:
        yield error(
            f"{settings.describe(requested)} needs a folder: give --profile-dir, --save or "
            "--tensorboard-dir."
        )


def warn_layer_statistics_without_file(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Warn if statistics of layers are computed but not written to a file."""
    logging = settings.config.logging
    if logging.log_layer_stats_interval is not None and not (
        logging.tensorboard_dir or logging.metrics_file or settings.config.checkpoint.save
    ):
        yield warning(
            f"{settings.describe('logging.log_layer_stats_interval')} computes statistics that are "
            "not written anywhere: give --tensorboard-dir, --metrics-file or --save."
        )


def warn_incomplete_saves(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Warn if the run cannot resume from its own checkpoints, or saves only at its end."""
    checkpoint = settings.config.checkpoint
    if (
        # The same command resumes only if it loads something (`choose_own_run`). Then it would ask
        # for a state that was not saved.
        checkpoint.save is not None
        and not checkpoint.save_optim
        and checkpoint.load_optim
        and (checkpoint.load or checkpoint.pretrained_checkpoint)
    ):
        yield warning(
            "--no-save-optim: this command cannot resume from its own checkpoints, because they "
            "have no optimizer state; with --no-load-optim it resumes with new moments."
        )
    if (
        checkpoint.save is not None
        and checkpoint.save_interval is None
        and checkpoint.save_interval_time is None
        and not settings.config.batch.eval_only
    ):
        yield warning(
            f"{settings.describe('checkpoint.save')} without --save-interval saves only when "
            "training ends or is asked to stop."
        )


def check_profiled_ranks(context: PlanContext) -> Iterator[Finding]:
    """Check that the ranks of traces and memory snapshots exist, and the run reaches the trace."""
    logging = context.config.logging
    world_size = context.plan.world_size
    if logging.profiling_field is None:
        return
    if logging.profile_ranks and max(logging.profile_ranks) >= world_size > 0:
        yield error(
            f"{context.describe('logging.profile_ranks')} names a rank that does not exist: there "
            f"are {world_size} processes, 0 to {world_size - 1}; give -1 for all of them."
        )
    try:
        iterations = logging.parse_profile_iterations()
    except ConfigError:
        # `check_profile` reports a range that cannot be read.
        return
    train_iters = context.plan.train_iters
    if iterations is not None and iterations[0] > train_iters:
        yield warning(
            f"{context.describe('logging.profile_iterations')} begins after the last iteration, "
            f"{train_iters}: no trace is written; choose earlier iterations."
        )
