"""Rules about what a run reads and writes: data, tokenizer, checkpoints, TensorBoard, traces."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from megatron.base.errors import ConfigError
from megatron.base.plain_text import find_address_mistake, format_some, has_secret, is_url, redact
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.fields import ConfigWithOrigin
from megatron.data.splits import parse_split
from megatron.plan.rules.finding import Finding, PlanContext, error, warning
from megatron.tokenizer.vocabulary import describe_absence, describe_lack, find_tokenizer_folder


def check_tokenizer_files(config: TokenizerConfig) -> Iterator[Finding]:
    """Check that each file that a run needs is on this machine.

    A run must not guess the size of its vocabulary. Only a plan may guess it (`find_vocab_size`).
    """
    stated = config.vocab_size is not None
    without = "or leave it out and give --vocab-size N, if no tokenizer is needed"
    name = config.tokenizer_name_or_path
    if config.has_two_files:
        for flag, path in (
            ("--vocab-file", config.vocab_file),
            ("--merge-file", config.merge_file),
        ):
            if path is not None and not os.path.isfile(path):
                yield error(f"{flag} {path} does not exist. Correct the path, {without}.")
        if config.vocab_file is None and not stated:
            yield error(
                "the size of the vocabulary is unknown: give --vocab-file and --merge-file, "
                "--tokenizer-type with --tokenizer-name-or-path, or --vocab-size N."
            )
    elif find_tokenizer_folder(name) is not None:
        return
    elif name is None:
        # If the size is given, no text is tokenized.
        if not stated:
            yield error(describe_lack(config))
    # A name may be on the Hugging Face Hub. If the size is given, the name alone is enough.
    elif not stated or name.startswith((".", "/", "~")):
        yield error(describe_absence(config))


DOCUMENT_FLAGS = ("data.reset_position_ids", "data.reset_attention_mask", "data.eod_mask_loss")
"""Fields that need the id of the end-of-document token."""


def check_split_weights(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that --split consists of one to three weights, not negative and not all 0.

    Missing weights count as 0, as in Megatron-LM: `--split 1` trains on all documents.
    """
    if parse_split(settings.config.data.split) is None:
        yield error(
            f"{settings.describe('data.split')} must be one to three numbers, not negative and "
            "not all 0, as in 949,50,1; missing numbers count as 0."
        )


def check_data_path_has_pairs(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that a mixture in --data-path consists of pairs of a weight and a path."""
    values = settings.config.data.data_path
    # A single value is the path of one data set and has no weight.
    if len(values) < 2:
        return
    if len(values) % 2:
        yield error(
            f"{settings.describe('data.data_path')} has {len(values)} values, but a mixture "
            "consists of pairs: WEIGHT PATH WEIGHT PATH ... (for a single data set give PATH "
            "alone)."
        )
        return
    wrong = [f"'{weight}'" for weight in values[::2] if not _is_weight(weight)]
    if wrong:
        yield error(
            f"{settings.describe('data.data_path')}: {format_some(wrong)} must be a weight, a "
            "number above 0, as in 0.7 PATH 0.3 PATH."
        )


def _is_weight(text: str) -> bool:
    """Return whether a text is a finite number above 0."""
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def check_one_description_of_data(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that each split of the data is described in one way only."""
    data = settings.config.data
    for which in ("train", "valid", "test"):
        paths = f"data.{which}_weighted_split_paths"
        file = f"data.{which}_weighted_split_paths_path"
        if settings[paths] and settings[file] is not None:
            yield error(f"{settings.describe(paths, file)} both name the data; give one of them.")
        # --split divides the documents of --data-path, and weighted split paths name their own
        # parts of them.
        for dotted in (paths, file):
            if data.data_path and settings[dotted]:
                yield error(
                    f"{settings.describe('data.data_path')} is divided by --split, but "
                    f"{settings.describe(dotted)} defines its own parts; give one of them."
                )


def check_phases_are_the_training_data(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that no other flag names the training data together with --data-phases."""
    data = settings.config.data
    if data.data_phases is None:
        return
    names = ["data_path", "train_weighted_split_paths", "train_weighted_split_paths_path"]
    if data.dataset_format is not None:
        # The phases name folders below --data-path.
        names = ["datasets", "weights"]
    for name in names:
        if settings[f"data.{name}"]:
            yield error(
                f"{settings.describe('data.data_phases', f'data.{name}')} both name the training "
                "data; write the data into the first phase of the file."
            )


def check_streamed_data(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that streamed data have one folder, and no flags of other data."""
    data = settings.config.data
    if data.dataset_format is None:
        return
    if not data.mock_data and len(data.data_path) != 1:
        yield error(
            f"{settings.describe('data.dataset_format')} needs one folder as --data-path, and it "
            f"has {len(data.data_path)} values. Name folders in it with --datasets and --weights."
        )
    for name in (
        *(f"{which}_weighted_split_paths" for which in ("train", "valid", "test")),
        *(f"{which}_weighted_split_paths_path" for which in ("train", "valid", "test")),
    ):
        if settings[f"data.{name}"]:
            yield error(
                f"{settings.describe('data.dataset_format', f'data.{name}')} cannot be used "
                "together. Name the folders with --datasets and --weights."
            )
    yield from _check_urls(data)
    if data.weights is not None and data.datasets is None and data.data_phases is None:
        yield error(f"{settings.describe('data.weights')} needs --datasets.")


def _check_urls(data: DataConfig) -> Iterator[Finding]:
    """Check that URLs hold no secrets, and that what is read from them can be stored."""
    for path in data.data_path:
        # The value is not printed with its secret, and must not get into logs and checkpoints.
        if is_url(path) and has_secret(path):
            yield error(
                f"--data-path {redact(path)} has a password or a token in the URL. Leave it "
                "out, and give it in the environment, as in docs/streaming.md."
            )
        elif is_url(path) and data.data_cache_path is None:
            yield error(f"--data-path {path} needs --data-cache-path, a folder on this machine.")


def check_end_of_document_is_known(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that a tokenizer is given if the id that ends documents is needed.

    Only a tokenizer knows this id. --vocab-size does not give it.
    """
    wanted = [dotted for dotted in DOCUMENT_FLAGS if settings[dotted]]
    tokenizer = settings.config.tokenizer
    # A tokenizer needs all of its files, so one that is missing makes the id unknown.
    files = [tokenizer.tokenizer_name_or_path]
    if tokenizer.has_two_files:
        files = [tokenizer.vocab_file, tokenizer.merge_file]
    if wanted and None in files:
        yield error(
            f"{settings.describe(*wanted)} must have the tokenizer of the data, because the id of "
            "its end-of-document token is needed: give --vocab-file and --merge-file, or "
            "--tokenizer-type and --tokenizer-name-or-path."
        )


def check_data_is_given(settings: ConfigWithOrigin) -> Iterator[Finding]:
    """Check that there is data to train on."""
    data = settings.config.data
    if not (
        data.mock_data
        or data.data_path
        or data.train_weighted_split_paths
        or data.train_weighted_split_paths_path
        or data.data_phases
    ):
        yield error(
            "there is no data to train on: give --data-path or --train-weighted-split-paths"
        )


def warn_about_phases(context: PlanContext) -> Iterator[Finding]:
    """Warn about phases of --data-phases that begin after the end of training."""
    train_iters = context.plan.train_iters
    for planned in context.plan.data_phases[1:]:
        if planned.first_iteration > train_iters > 0:
            yield warning(
                f"{planned.phase.origin}: the phase begins with iteration "
                f"{planned.first_iteration}, and training ends after iteration {train_iters}; its "
                "data are not read. Let it begin earlier, or remove it."
            )


def warn_about_files(context: PlanContext) -> Iterator[Finding]:
    """Warn about files that are not on this machine. Only the training machine needs them."""
    if not context.may_read_files:
        return
    parallel = context.config.parallel
    data = context.config.data
    phases = context.plan.data_phases
    named: list[tuple[str, tuple[str, ...]]] = [
        (context.describe("data.data_path"), data.data_path),
        *((f"{planned.phase.origin} data_path", planned.phase.data_path) for planned in phases),
    ]
    if data.dataset_format is not None:
        # A folder with files. It is listed when the run starts.
        named = []
        for folder in data.data_path:
            if not is_url(folder) and not Path(folder).exists():
                yield warning(
                    f"{context.describe('data.data_path')}: {folder} is not on this machine."
                )
    if data.mock_data:
        named = []
    for where, values in named:
        # With several data sets the list alternates between weight and prefix.
        prefixes = values[1::2] if len(values) > 1 else values
        files = [name if name.endswith(".json") else f"{name}.idx" for name in prefixes]
        missing = [file for file in files if not Path(file).is_file()]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            yield warning(f"{where}: {format_some(missing)} {verb} not on this machine.")
    if (
        parallel.deepspeed
        and parallel.deepspeed_config
        and not Path(parallel.deepspeed_config).is_file()
    ):
        yield warning(
            f"{context.describe('parallel.deepspeed_config')} does not exist: what it sets "
            "(curriculum, precision) is not in this plan."
        )


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
