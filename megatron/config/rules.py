"""Rules about fields and their combinations that need only the configuration.

Rules that need the number of processes or a derived number are in `plan_rules.py`.

Invariant: a rule raises nothing and reads nothing but the configuration. All rules run, and all
failures are reported together. Schedules check their own numbers when the plan builds them, so
those errors are not reported here. Examples are the steps of a ramp-up, --min-lr above --lr, and
skipped ranges.

The defaults, and what may be combined, follow Megatron-LM and Megatron-DeepSpeed.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction

from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.curriculum import USED
from megatron.config.data import DataConfig
from megatron.config.fields import all_fields
from megatron.config.layer_choice import choose_layers
from megatron.config.parallel import STRATEGY_STAGES
from megatron.config.profiling import check_profile
from megatron.config.ranges import check_ranges
from megatron.config.recompute import OPERATORS
from megatron.config.spike_guard_rules import (
    check_spike_guard_can_roll_back,
    check_spike_guard_sizes,
)
from megatron.config.time_rules import check_length_by_time, check_one_wsd_decay, check_times
from megatron.config.tree import Config
from megatron.config.url import has_secret, is_url, redact
from megatron.config.warning_rules import WARNINGS

Rule = Callable[[ConfigWithOrigin], Iterator[str]]

DOCUMENT_FLAGS = ("data.reset_position_ids", "data.reset_attention_mask", "data.eod_mask_loss")
"""Fields that need the id of the end-of-document token."""

LAYER_CHOICES = ("model.no_rope_layers", "model.full_attention_layers")
"""Fields that choose layers."""


def check_rules(config: Config, origin: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the errors and the warnings of all rules.

    Args:
        config: The configuration to check.
        origin: Where each field came from, as in `LoadedConfig`. It may be empty.
    """
    settings = ConfigWithOrigin(config, origin)
    return _run(ERRORS, settings), _run(WARNINGS, settings)


def list_missing_for_training(config: Config) -> list[str]:
    """Return an error for each setting that a run needs, although a plan does without it."""
    return _run(NEEDED_BY_RUNS, ConfigWithOrigin(config, {}))


def _run(rules: tuple[Rule, ...], settings: ConfigWithOrigin) -> list[str]:
    return [message for rule in rules for message in rule(settings)]


def check_no_empty_text(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that no value is an empty string.

    An empty path would mean the current folder, or no path at all.
    """
    for dotted, value in settings.list_values().items():
        if value == "" or (isinstance(value, tuple) and "" in value):
            flag = all_fields()[dotted].flag
            yield (
                f"{flag} has an empty value; is a shell variable unset? Leave the flag out, or "
                "give a value."
            )


def check_one_training_length(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that one of --train-iters, --train-samples and --train-time gives the length."""
    batch = settings.config.batch
    lengths = ("batch.train_iters", "batch.train_samples", "batch.train_time")
    given = [dotted for dotted in lengths if settings[dotted] is not None]
    for first, second in itertools.pairwise(given):
        yield (
            f"{settings.describe(first, second)} both set the length of training; give one of them."
        )
    if not given and not batch.eval_only:
        yield (
            "the length of training is not given: use --train-iters or --train-samples "
            "(or --train-time, or --eval-only)."
        )


def check_one_unit_of_progress(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that the learning rate is given in the unit that gives the length of training.

    With --train-samples, warm-up and decay are in samples. With --train-iters, they are in
    iterations.
    """
    batch = settings.config.batch
    # Without exactly one length there is no unit to compare with. `check_one_training_length`
    # reports that.
    if (batch.train_iters is None) == (batch.train_samples is None):
        return
    length, foreign, own = (
        ("batch.train_iters", "samples", "iters")
        if batch.train_samples is None
        else ("batch.train_samples", "iters", "samples")
    )
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        dotted = f"optimizer.{name}_{foreign}"
        if settings[dotted]:
            instead = all_fields()[f"optimizer.{name}_{own}"].flag
            yield (
                f"{settings.describe(dotted)} cannot be combined with "
                f"{settings.describe(length)}; use {instead}."
            )


def check_one_warmup(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that the warm-up is given in one unit only.

    `check_one_unit_of_progress` reports iterations together with samples.
    """
    # 0 iterations, samples or tokens are the same as no flag. A fraction of 0 is a choice.
    given = [
        f"optimizer.lr_warmup_{unit}"
        for unit in ("fraction", "tokens", "iters", "samples")
        if settings[f"optimizer.lr_warmup_{unit}"]
        or (unit == "fraction" and settings.config.optimizer.lr_warmup_fraction is not None)
    ]
    for first, second in itertools.combinations(given, 2):
        if first in ("optimizer.lr_warmup_fraction", "optimizer.lr_warmup_tokens"):
            yield (
                f"{settings.describe(first, second)} both set the length of the warm-up; give one "
                "of them."
            )


def check_lr_is_given(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that --lr is given, unless the run only evaluates."""
    if settings.config.optimizer.lr is None and not settings.config.batch.eval_only:
        yield "--lr is required: the peak learning rate, as in 6e-5."


def check_one_batch_size_schedule(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that at most one schedule of the batch size is given."""
    batch = settings.config.batch
    if batch.rampup_batch_size is not None and batch.step_batch_size_schedule is not None:
        yield (
            f"{settings.describe('batch.rampup_batch_size', 'batch.step_batch_size_schedule')} "
            "exclude each other; give one of them."
        )


def check_one_source_of_lr_schedule(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that a resume takes the learning rate's schedule from one source only."""
    optimizer = settings.config.optimizer
    if optimizer.override_lr_scheduler and optimizer.use_checkpoint_lr_scheduler:
        both = settings.describe(
            "optimizer.override_lr_scheduler", "optimizer.use_checkpoint_lr_scheduler"
        )
        yield (
            f"{both} exclude each other: the schedule comes either from this configuration or "
            "from the checkpoint; give one of them."
        )


def check_one_precision(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that at most one of --fp16 and --bf16 is given."""
    if settings.config.precision.fp16 and settings.config.precision.bf16:
        yield (
            f"{settings.describe('precision.fp16', 'precision.bf16')} exclude each other; give "
            "one of them."
        )


def check_loss_scale_bounds(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that the dynamic loss scale does not start below its minimum."""
    precision = settings.config.precision
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield (
            f"{settings.describe('precision.min_loss_scale')} must not exceed "
            f"{settings.describe('precision.initial_loss_scale')}, the first value of the dynamic "
            "loss scale."
        )


def check_heads_divide_hidden_size(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that the heads divide the hidden size, and the key/value heads divide the heads."""
    model = settings.config.model
    # `check_ranges` reports this value. Here it would be a division by zero.
    if model.num_attention_heads < 1:
        return
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        yield (
            f"{settings.describe('model.num_attention_heads')} must divide "
            f"{settings.describe('model.hidden_size')}; change one, or set the width of a head "
            "with --kv-channels."
        )
    groups = model.num_query_groups
    if groups is not None and groups >= 1 and model.num_attention_heads % groups:
        divisors = [
            n for n in range(1, model.num_attention_heads + 1) if model.num_attention_heads % n == 0
        ]
        yield (
            f"{settings.describe('model.num_query_groups')} must divide "
            f"{settings.describe('model.num_attention_heads')}; use one of "
            f"{', '.join(map(str, divisors))}."
        )


def check_rotary_dim_is_even(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that the rotated channels of a head are an even number of at least 2.

    Rotary positions rotate channels in pairs.
    """
    model = settings.config.model
    if (
        # Values outside their range are reported by `check_ranges`. The arithmetic below needs
        # valid ones.
        model.position_embedding_type != "rotary"
        or model.num_attention_heads < 1
        or not 0 < model.rotary_percent <= 1
    ):
        return
    if model.kv_channels is not None:
        head = model.kv_channels
    else:
        head = model.hidden_size // model.num_attention_heads
    rotated = int(head * model.rotary_percent)
    if rotated < 2 or rotated % 2:
        yield (
            f"{settings.describe('model.rotary_percent')} of a head's {head} channels are "
            f"{rotated}, but rotary positions rotate pairs of channels; choose a head size or "
            "fraction that gives an even number of at least 2."
        )


def check_rope_scaling(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that the low and the high frequencies of Llama 3's scaling do not overlap."""
    model = settings.config.model
    if model.rope_scaling == "llama3" and model.rope_low_freq_factor >= model.rope_high_freq_factor:
        yield (
            f"{settings.describe('model.rope_low_freq_factor')} must be below "
            f"{settings.describe('model.rope_high_freq_factor')}; Llama 3 has 1 and 4."
        )


def check_layer_choices(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that each choice of layers is one, and chooses layers of the model."""
    num_layers = settings.config.model.num_layers
    # `check_ranges` reports this value.
    if num_layers < 1:
        return
    for dotted in LAYER_CHOICES:
        text = settings[dotted]
        # `check_no_empty_text` reports an empty text.
        if not text:
            continue
        try:
            choose_layers(text, num_layers)
        except ValueError as failure:
            yield f"{settings.describe(dotted)}: {failure}."


def check_one_activation(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that an activation without a gate is not combined with a gated MLP."""
    model = settings.config.model
    if model.activation != "gelu" and model.glu_activation is not None:
        yield (
            f"{settings.describe('model.activation', 'model.glu_activation')} exclude each other: "
            "the first is for an MLP without a gate; give one of them."
        )


def check_query_key_norm(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that queries and keys of all heads are normalised together by RMSNorm only."""
    model = settings.config.model
    if model.qk_norm == "full" and model.normalization != "RMSNorm":
        yield (
            f"{settings.describe('model.qk_norm')} needs --normalization RMSNorm, not "
            f"{model.normalization}; use it, or --qk-norm head."
        )


def check_positions_cover_sequence(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that the table of learned positions has a row for each token of a sample."""
    model = settings.config.model
    size = model.max_position_embeddings
    if size is not None and model.position_embedding_type == "absolute" and size < model.seq_length:
        yield (
            f"{settings.describe('model.max_position_embeddings')} must be at least "
            f"{settings.describe('model.seq_length')}: each token of a sample needs a position."
        )


def check_split_weights(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that --split consists of one to three weights, not negative and not all 0.

    Missing weights count as 0, as in Megatron-LM: `--split 1` trains on all documents.
    """
    text = settings.config.data.split
    try:
        # Slashes separate weights too, as in Megatron-LM.
        shares = [float(share) for share in text.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if (
        not 1 <= len(shares) <= 3
        or not all(math.isfinite(share) and share >= 0 for share in shares)
        or not sum(shares) > 0
    ):
        yield (
            f"{settings.describe('data.split')} must be one to three numbers, not negative and "
            "not all 0, as in 949,50,1; missing numbers count as 0."
        )


def check_data_path_has_pairs(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that a mixture in --data-path consists of pairs of a weight and a path."""
    values = settings.config.data.data_path
    # A single value is the path of one data set and has no weight.
    if len(values) < 2:
        return
    if len(values) % 2:
        yield (
            f"{settings.describe('data.data_path')} has {len(values)} values, but a mixture "
            "consists of pairs: WEIGHT PATH WEIGHT PATH ... (for a single data set give PATH "
            "alone)."
        )
        return
    for weight in values[::2]:
        if not _is_weight(weight):
            yield (
                f"{settings.describe('data.data_path')}: '{weight}' must be a weight, a number "
                "above 0, as in 0.7 PATH 0.3 PATH."
            )


def _is_weight(text: str) -> bool:
    """Return whether a text is a finite number above 0."""
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def check_one_description_of_data(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that each split of the data is described in one way only."""
    data = settings.config.data
    for which in ("train", "valid", "test"):
        paths = f"data.{which}_weighted_split_paths"
        file = f"data.{which}_weighted_split_paths_path"
        if settings[paths] and settings[file] is not None:
            yield f"{settings.describe(paths, file)} both name the data; give one of them."
        # --split divides the documents of --data-path, and weighted split paths name their own
        # parts of them.
        for dotted in (paths, file):
            if data.data_path and settings[dotted]:
                yield (
                    f"{settings.describe('data.data_path')} is divided by --split, but "
                    f"{settings.describe(dotted)} defines its own parts; give one of them."
                )


def check_phases_are_the_training_data(settings: ConfigWithOrigin) -> Iterator[str]:
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
            yield (
                f"{settings.describe('data.data_phases', f'data.{name}')} both name the training "
                "data; write the data into the first phase of the file."
            )


_STREAM_FLAGS = (
    "datasets",
    "weights",
    "bos_token",
    "eos_token",
    "strip_tokens",
    "max_document_tokens",
    "max_ngram_repetition",
    "drop_duplicates",
)


def check_streamed_data(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that flags for streamed data have --dataset-format, and that it has one folder."""
    data = settings.config.data
    if data.dataset_format is None:
        for name in _STREAM_FLAGS:
            value = settings[f"data.{name}"]
            # 0 is a token id, so `value` alone would be wrong.
            if value is not None and value is not False:
                yield (
                    f"{settings.describe(f'data.{name}')} needs --dataset-format parquet, arrow or "
                    "jsonl."
                )
        return
    if not data.mock_data and len(data.data_path) != 1:
        yield (
            f"{settings.describe('data.dataset_format')} needs one folder as --data-path, and it "
            f"has {len(data.data_path)} values. Name folders in it with --datasets and --weights."
        )
    for name in (
        *(f"{which}_weighted_split_paths" for which in ("train", "valid", "test")),
        *(f"{which}_weighted_split_paths_path" for which in ("train", "valid", "test")),
    ):
        if settings[f"data.{name}"]:
            yield (
                f"{settings.describe('data.dataset_format', f'data.{name}')} cannot be used "
                "together. Name the folders with --datasets and --weights."
            )
    yield from _check_urls(data)
    if data.weights is not None and data.datasets is None and data.data_phases is None:
        yield f"{settings.describe('data.weights')} needs --datasets."


def _check_urls(data: DataConfig) -> Iterator[str]:
    """Check that URLs hold no secrets, and that what is read from them can be stored."""
    for path in data.data_path:
        # The value is not printed with its secret, and must not get into logs and checkpoints.
        if is_url(path) and has_secret(path):
            yield (
                f"--data-path {redact(path)} has a password or a token in the URL. Leave it "
                "out, and give it in the environment, as in docs/streaming.md."
            )
        elif is_url(path) and data.data_cache_path is None:
            yield f"--data-path {path} needs --data-cache-path, a folder on this machine."


def check_needed_folders(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that flags for saving have --save, and flags for loading have --load."""
    checkpoint = settings.config.checkpoint
    batch = settings.config.batch
    # --save-interval is not in this list. Published scripts that measure speed have it without
    # --save, so it gives only a warning.
    saving = {
        "checkpoint.save_at": bool(checkpoint.save_at),
        # A run with --async-save and no folder would train to its end and leave no checkpoint.
        "checkpoint.async_save": checkpoint.async_save,
        "checkpoint.keep_latest_checkpoints": checkpoint.keep_latest_checkpoints is not None,
        "checkpoint.hf_export_interval": checkpoint.hf_export_interval is not None,
    }
    for dotted, wanted in saving.items():
        if wanted and checkpoint.save is None:
            yield f"{settings.describe(dotted)} needs --save: without it nothing would be saved."
    if checkpoint.keep_every is not None and checkpoint.keep_latest_checkpoints is None:
        yield (
            f"{settings.describe('checkpoint.keep_every')} needs --keep-latest-checkpoints: "
            "without it all checkpoints are kept."
        )
    # These flags have a meaning only for a checkpoint that is loaded.
    wanting = {
        "checkpoint.finetune": checkpoint.finetune,
        "checkpoint.require_load": checkpoint.require_load,
        "checkpoint.load_iteration": checkpoint.load_iteration is not None,
        "batch.eval_only": batch.eval_only,
    }
    for dotted, wanted in wanting.items():
        if wanted and checkpoint.load is None:
            yield f"{settings.describe(dotted)} needs --load, the folder of the checkpoint."


def check_eval_tasks(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that the flags of tasks in the loop are complete."""
    batch = settings.config.batch
    given = {
        "batch.eval_tasks_interval": batch.eval_tasks_interval is not None,
        "batch.eval_tasks_folder": batch.eval_tasks_folder is not None,
        "batch.eval_tasks_num_fewshot": batch.eval_tasks_num_fewshot is not None,
        "batch.eval_tasks_limit": batch.eval_tasks_limit is not None,
    }
    if not batch.eval_tasks:
        for dotted, wanted in given.items():
            if wanted:
                yield f"{settings.describe(dotted)} needs --eval-tasks, the names of the tasks."
    # --eval-only evaluates the tasks once.
    elif batch.eval_tasks_interval is None and not batch.eval_only:
        yield (
            f"{settings.describe('batch.eval_tasks')} needs --eval-tasks-interval, the iterations "
            "between two evaluations."
        )


def check_one_kind_of_start(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that --require-load and --allow-fresh-start are not combined."""
    if settings.config.checkpoint.require_load and settings.config.checkpoint.allow_fresh_start:
        yield (
            f"{settings.describe('checkpoint.require_load', 'checkpoint.allow_fresh_start')} "
            "exclude each other; give one of them."
        )


def check_deepspeed_optimizers(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that --cpu-optimizer and --use-bnb-optimizer are not combined, and need --deepspeed.

    The native engine (FSDP2) supports neither of them.
    """
    optimizer = settings.config.optimizer
    if optimizer.cpu_optimizer and optimizer.use_bnb_optimizer:
        yield (
            f"{settings.describe('optimizer.cpu_optimizer', 'optimizer.use_bnb_optimizer')} "
            "exclude each other; give one of them."
        )
    for dotted in ("optimizer.cpu_optimizer", "optimizer.use_bnb_optimizer"):
        if settings[dotted] and not settings.config.parallel.deepspeed:
            yield (
                f"{settings.describe(dotted)} needs --deepspeed; without it, --zero-stage shards "
                "the optimizer's states over the ranks."
            )


def check_sharding_strategy(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that --sharding-strategy, --zero-stage and --hsdp-shard-size do not contradict."""
    parallel = settings.config.parallel
    strategy = parallel.sharding_strategy
    size = parallel.hsdp_shard_size
    if strategy is not None and parallel.zero_stage != STRATEGY_STAGES[strategy]:
        yield (
            f"{settings.describe('parallel.sharding_strategy', 'parallel.zero_stage')} contradict: "
            f"{strategy} means --zero-stage {STRATEGY_STAGES[strategy]}. Give one of them; "
            "--zero-stage with --hsdp-shard-size shards less inside groups."
        )
    elif size is not None and strategy not in (None, "hsdp"):
        yield (
            f"{settings.describe('parallel.hsdp_shard_size', 'parallel.sharding_strategy')} "
            "contradict: only hsdp has groups. Use --sharding-strategy hsdp, or leave out "
            "--hsdp-shard-size."
        )
    elif size is not None and parallel.zero_stage == 0:
        yield (
            f"{settings.describe('parallel.hsdp_shard_size', 'parallel.zero_stage')} contradict: "
            "stage 0 shards nothing. Leave out --hsdp-shard-size, or use stage 1, 2 or 3."
        )


def check_grad_reduction(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that --grad-reduce-in-bf16 is used with --bf16."""
    config = settings.config
    if config.parallel.grad_reduce_in_bf16 and not config.precision.bf16:
        yield (
            "--grad-reduce-in-bf16 needs --bf16: gradients of fp16 and fp32 would lose precision "
            "or range. Add --bf16, or leave out --grad-reduce-in-bf16."
        )


def check_curriculum_flags(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that the curriculum's fields fit its type of schedule.

    A field that has no effect is an error here. If --curriculum-schedule-type was forgotten, the
    run would train with other sequence lengths than intended.
    """
    style = settings.config.curriculum.curriculum_schedule_type
    needed, taken = USED[style] if style is not None else (set(), set())
    for name in vars(settings.config.curriculum):
        dotted = f"curriculum.{name}"
        if name in needed and not settings.is_changed(dotted):
            yield (
                f"{settings.describe('curriculum.curriculum_schedule_type')} needs "
                f"{all_fields()[dotted].flag}."
            )
        elif name in {"curriculum_schedule_type", *needed, *taken} or not settings.is_changed(
            dotted
        ):
            continue
        elif style is None:
            yield (
                f"{settings.describe(dotted)} needs --curriculum-schedule-type; without it there "
                "is no curriculum."
            )
        else:
            yield (
                f"{settings.describe(dotted)} has no effect with "
                f"{settings.describe('curriculum.curriculum_schedule_type')}; leave it out."
            )


def check_one_partition_method(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that stages are not described by both a partition method and virtual stages."""
    method = "parallel.pp_partition_method"
    virtual = "parallel.num_layers_per_virtual_pipeline_stage"
    # Virtual stages divide layers uniformly, so the method "uniform" does not contradict them.
    if settings[virtual] is not None and (settings[method] or "uniform").lower() != "uniform":
        yield (
            f"{settings.describe(method, virtual)} both divide the layers into stages; give one "
            "of them."
        )


def check_end_of_document_is_known(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that a tokenizer is given if the id that ends documents is needed.

    Only a tokenizer knows this id. --vocab-size does not give it.
    """
    wanted = [dotted for dotted in DOCUMENT_FLAGS if settings[dotted]]
    tokenizer = settings.config.tokenizer
    # A tokenizer needs all of its files, so one that is missing makes the id unknown.
    if tokenizer.tokenizer_type == "GPT2BPETokenizer":
        files = [tokenizer.vocab_file, tokenizer.merge_file]
    else:
        files = [tokenizer.tokenizer_name_or_path]
    if wanted and None in files:
        yield (
            f"{settings.describe(*wanted)} must have the tokenizer of the data, because the id of "
            "its end-of-document token is needed: give --vocab-file and --merge-file, or "
            "--tokenizer-type and --tokenizer-name-or-path."
        )


def check_recompute_fraction(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that --checkpoint-fraction is a fraction above 0 and at most 1."""
    try:
        fraction = Fraction(settings.config.recompute.checkpoint_fraction)
    except (ValueError, ZeroDivisionError):
        # A text that is not a fraction counts as 0. 0 is out of range, so the message is the same.
        fraction = Fraction(0)
    if not 0 < fraction <= 1:
        yield (
            f"{settings.describe('recompute.checkpoint_fraction')} must be a fraction above 0 and "
            "at most 1: 1 for all layers, 1/3 for every third one, 0.5 for every other one."
        )


def check_kept_operators(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that --checkpoint-keep-operators names operators, and that they can be kept."""
    kept = settings.config.recompute.checkpoint_keep_operators
    if not kept:
        return
    asked = settings.describe("recompute.checkpoint_keep_operators")
    if not set(kept) <= set(OPERATORS):
        yield f"{asked}: an operator must be one of {', '.join(OPERATORS)}."
    if not settings.config.recompute.checkpoint_activations:
        yield f"{asked} needs --checkpoint-activations, which recomputes the other operators."
    for dotted in ("recompute.recompute_attention_core", "kernels.use_torch_compile"):
        if settings[dotted]:
            yield (
                f"{asked} is not possible with {settings.describe(dotted)}, which hides the "
                "operators; give one of them."
            )


def check_data_is_given(settings: ConfigWithOrigin) -> Iterator[str]:
    """Check that there is data to train on."""
    data = settings.config.data
    if not (
        data.mock_data
        or data.data_path
        or data.train_weighted_split_paths
        or data.train_weighted_split_paths_path
        or data.data_phases
    ):
        yield "there is no data to train on: give --data-path or --train-weighted-split-paths"


ERRORS: tuple[Rule, ...] = (
    check_no_empty_text,
    check_ranges,
    check_one_training_length,
    check_times,
    check_length_by_time,
    check_one_wsd_decay,
    check_one_unit_of_progress,
    check_one_warmup,
    check_lr_is_given,
    check_one_batch_size_schedule,
    check_one_source_of_lr_schedule,
    check_one_precision,
    check_loss_scale_bounds,
    check_heads_divide_hidden_size,
    check_rotary_dim_is_even,
    check_rope_scaling,
    check_layer_choices,
    check_one_activation,
    check_query_key_norm,
    check_positions_cover_sequence,
    check_split_weights,
    check_data_path_has_pairs,
    check_one_description_of_data,
    check_phases_are_the_training_data,
    check_streamed_data,
    check_needed_folders,
    check_eval_tasks,
    check_one_kind_of_start,
    check_spike_guard_can_roll_back,
    check_spike_guard_sizes,
    check_deepspeed_optimizers,
    check_sharding_strategy,
    check_grad_reduction,
    check_curriculum_flags,
    check_end_of_document_is_known,
    check_one_partition_method,
    check_recompute_fraction,
    check_kept_operators,
    check_profile,
)
"""All rules whose failure is an error, in the order in which their messages are reported."""

NEEDED_BY_RUNS: tuple[Rule, ...] = (check_data_is_given,)
"""Rules for a run that is about to start. A plan may be made before there is data."""
