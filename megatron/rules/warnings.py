"""Rules whose failure is a warning.

What was given trains, but a part of it has no effect or an unexpected one. Nothing is silently
ignored.

Invariant: as in `rules/training.py`, which runs them.
"""

import math
from collections.abc import Callable, Iterator

from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.fields import all_fields
from megatron.config.profiling import find_requesting_field, warn_layer_statistics_without_file
from megatron.config.tree import Config
from megatron.rules.declared import NoEffect
from megatron.rules.float8 import warn_float8_after_the_end
from megatron.rules.kernels import warn_fusion_with_shared_groups

_OWN_SETTINGS = ("ademamix", "muon")
"""Optimizers whose settings have names that begin with theirs."""


def warn_ramp_by_iterations(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn if the batch size changes in a run whose length is given in iterations.

    The learning rate's schedule counts samples. It converts iterations with the final batch size.
    """
    batch = settings.config.batch
    if batch.rampup_batch_size is not None:
        changing = "batch.rampup_batch_size"
    else:
        changing = "batch.step_batch_size_schedule"
    if batch.train_iters is not None and settings[changing] is not None:
        yield (
            f"{settings.describe(changing)} with {settings.describe('batch.train_iters')}: the "
            "learning rate's warm-up and decay count each iteration with the final batch size, "
            "so they last longer than the given iterations; --train-samples and --lr-*-samples "
            "are exact."
        )


def warn_decay_by_tokens_wins(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn if a decay in samples or iterations is given together with one in tokens."""
    for dotted in ("optimizer.lr_decay_samples", "optimizer.lr_decay_iters"):
        if settings.config.optimizer.lr_decay_tokens is not None and settings[dotted] is not None:
            yield (
                f"{settings.describe(dotted)} has no effect with "
                f"{settings.describe('optimizer.lr_decay_tokens')}, which ends the decay."
            )


def warn_warmup_tokens_with_curriculum(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn if a warm-up in tokens is converted to samples although sequences start short."""
    curriculum = settings.config.curriculum.curriculum_schedule_type
    if settings.config.optimizer.lr_warmup_tokens and curriculum is not None:
        yield (
            f"{settings.describe('optimizer.lr_warmup_tokens')} is inexact with a curriculum: it "
            "is divided by the full --seq-length, and the first sequences are shorter; use "
            "--lr-warmup-samples for an exact length."
        )


def _has_no_warmup(config: Config) -> bool:
    """Return whether no length of a warm-up is given. A length of 0 is none."""
    optimizer = config.optimizer
    return not (
        optimizer.lr_warmup_fraction
        or optimizer.lr_warmup_iters
        or optimizer.lr_warmup_samples
        or optimizer.lr_warmup_tokens
    )


def warn_decay_of_missing_warmup(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about a decay that depends on the length of the warm-up, which is not given."""
    style = settings.config.optimizer.lr_decay_style
    if style == "inverse-square-root" and _has_no_warmup(settings.config):
        yield (
            f"{settings.describe('optimizer.lr_decay_style')} without a warm-up: --lr is the rate "
            "at the first sample, and falls to a tenth of it in 100 samples; give "
            "--lr-warmup-samples, -iters, -tokens or -fraction."
        )


def warn_settings_of_another_optimizer(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about settings of an optimizer that --optimizer does not name."""
    chosen = settings.config.optimizer.optimizer
    for dotted, field in all_fields().items():
        owner, _, _ = field.name.partition("_")
        if (
            field.group == "optimizer"
            and owner in _OWN_SETTINGS
            and owner != chosen
            and settings.is_changed(dotted)
        ):
            yield f"{settings.describe(dotted)} has no effect without --optimizer {owner}."


def warn_loss_scale_point_without_fp16(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about the flag for the loss scale's points in TensorBoard without --fp16."""
    logging = settings.config.logging
    # Without a folder, `warn_tensorboard_without_folder` reports this flag.
    if (
        not settings.config.precision.fp16
        and logging.tensorboard_dir is not None
        and not logging.log_loss_scale_to_tensorboard
    ):
        yield "--no-log-loss-scale-to-tensorboard has no effect without --fp16."


def warn_static_loss_scale_wins(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about settings of the dynamic loss scale together with a static one."""
    precision = settings.config.precision
    if precision.fp16 and precision.loss_scale is not None:
        for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
            if settings.is_changed(f"precision.{name}"):
                static = settings.describe("precision.loss_scale")
                yield (
                    f"{settings.describe(f'precision.{name}')} has no effect with {static}, "
                    "which is static."
                )


def warn_loss_scale_rounds(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about a loss scale that is not a power of two.

    A power of two changes exponents only. Any other scale rounds each gradient once more.
    """
    precision = settings.config.precision
    if not precision.fp16:
        return
    # A static scale replaces the dynamic one, so only the scales in use are checked.
    used = ["initial_loss_scale", "min_loss_scale"]
    if precision.loss_scale is not None:
        used = ["loss_scale"]
    for name in used:
        scale = settings[f"precision.{name}"]
        # frexp returns a mantissa in [0.5, 1). It is exactly 0.5 for powers of two and for nothing
        # else.
        if 0 < scale < math.inf and math.frexp(scale)[0] != 0.5:
            below = 2.0 ** (math.frexp(scale)[1] - 1)
            others = f"{below:.10g} or {2 * below:.10g}"
            yield (
                f"{settings.describe(f'precision.{name}')} is not a power of two, so scaling "
                f"rounds the gradients; use {others}."
            )


def warn_incomplete_saves(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn if a save cannot be resumed, or if only the end is saved."""
    checkpoint = settings.config.checkpoint
    if (
        # The same command resumes only if it loads what it saves. Then it would ask for a state
        # that was not saved.
        checkpoint.save is not None
        and not checkpoint.save_optim
        and checkpoint.load_optim
        and checkpoint.resumes_itself
    ):
        yield (
            "--no-save-optim: this command cannot resume from its own checkpoints, because they "
            "have no optimizer state; with --no-load-optim it resumes with new moments."
        )
    if (
        checkpoint.save is not None
        and checkpoint.save_interval is None
        and checkpoint.save_interval_time is None
        and not settings.config.batch.eval_only
    ):
        yield (
            f"{settings.describe('checkpoint.save')} without --save-interval saves only when "
            "training ends or is asked to stop."
        )


def warn_tensorboard_without_folder(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about settings of TensorBoard without --tensorboard-dir."""
    if settings.config.logging.tensorboard_dir is None:
        # Select by name, so that a new field for TensorBoard needs no entry here.
        for field in all_fields().values():
            if (
                field.group == "logging"
                and "tensorboard" in field.name
                and settings.is_changed(field.dotted)
            ):
                yield f"{settings.describe(field.dotted)} has no effect without --tensorboard-dir."


def warn_size_of_missing_position_table(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about --max-position-embeddings in a model without a table of learned positions."""
    positions = settings.config.model.position_embedding_type
    if positions != "absolute" and settings.is_changed("model.max_position_embeddings"):
        yield (
            f"{settings.describe('model.max_position_embeddings')} has no effect with "
            f"--position-embedding-type {positions}, which has no table of positions."
        )


def warn_rope_settings_without_scaling(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about settings of the scaling of rotary frequencies that this scaling does not use."""
    scaling = settings.config.model.rope_scaling
    used = {
        "model.rope_scaling_factor": ("linear", "llama3", "yarn"),
        "model.rope_low_freq_factor": ("llama3",),
        "model.rope_high_freq_factor": ("llama3",),
        "model.rope_original_length": ("llama3", "yarn"),
        "model.rope_beta_fast": ("yarn",),
        "model.rope_beta_slow": ("yarn",),
        "model.rope_truncate": ("yarn",),
        "model.rope_attention_factor": ("yarn",),
    }
    for dotted, scalings in used.items():
        if settings.is_changed(dotted) and scaling not in scalings:
            yield (
                f"{settings.describe(dotted)} has no effect without --rope-scaling "
                f"{' or '.join(scalings)}."
            )


def warn_missing_norm_biases(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about --no-norm-bias in a model whose norms have no biases anyway."""
    model = settings.config.model
    if not model.norm_bias and model.normalization == "RMSNorm" and not model.embed_layernorm:
        yield "--no-norm-bias has no effect with --normalization RMSNorm, which has no biases."


_LOSS_SCALE = (
    *("precision.loss_scale", "precision.initial_loss_scale", "precision.min_loss_scale"),
    *("precision.loss_scale_window", "precision.hysteresis"),
)

WARNINGS: tuple[Callable[[ConfigWithOrigin], Iterator[str]], ...] = (
    warn_ramp_by_iterations,
    warn_decay_by_tokens_wins,
    warn_warmup_tokens_with_curriculum,
    NoEffect(
        "without --lr-decay-style WSD",
        lambda config: config.optimizer.lr_decay_style != "WSD",
        tuple(f"optimizer.lr_wsd_decay_{it}" for it in ("iters", "samples", "fraction", "style")),
    ),
    NoEffect(
        "without --decoupled-lr",
        lambda config: config.optimizer.decoupled_lr is None,
        ("optimizer.decoupled_min_lr",),
    ),
    NoEffect(
        "without a warm-up: give --lr-warmup-samples, -iters, -tokens or -fraction",
        _has_no_warmup,
        ("optimizer.lr_warmup_init", "optimizer.lr_warmup_style", "optimizer.lr_decay_from_start"),
    ),
    warn_decay_of_missing_warmup,
    warn_settings_of_another_optimizer,
    NoEffect("without --fp16", lambda config: not config.precision.fp16, _LOSS_SCALE),
    warn_loss_scale_point_without_fp16,
    warn_static_loss_scale_wins,
    warn_loss_scale_rounds,
    NoEffect(
        "without --fp16 or --bf16: everything is in fp32",
        lambda config: not (config.precision.fp16 or config.precision.bf16),
        ("precision.fp32_residual_connection",),
    ),
    NoEffect(
        "with --position-embedding-type alibi, whose bias depends on distances only",
        lambda config: config.model.position_embedding_type == "alibi",
        ("data.reset_position_ids",),
    ),
    NoEffect(
        "with --mock-data, which trains on synthetic tokens",
        lambda config: config.data.mock_data,
        (
            *("data.data_path", "data.data_phases"),
            *("data.train_weighted_split_paths", "data.train_weighted_split_paths_path"),
        ),
    ),
    NoEffect(
        "without --deepspeed",
        lambda config: not config.parallel.deepspeed,
        ("parallel.deepspeed_config",),
    ),
    NoEffect(
        "without --context-parallel-size",
        lambda config: config.parallel.context_parallel_size == 1,
        ("parallel.cp_comm_type",),
    ),
    NoEffect(
        "without --save: nothing is saved",
        lambda config: config.checkpoint.save is None,
        ("checkpoint.save_interval", "checkpoint.save_interval_time"),
    ),
    warn_incomplete_saves,
    warn_tensorboard_without_folder,
    NoEffect(
        "without --position-embedding-type rotary",
        lambda config: config.model.position_embedding_type != "rotary",
        (
            *("model.rotary_percent", "model.rotary_base", "model.rope_scaling"),
            *("model.no_rope_layers", "kernels.rope_fusion"),
        ),
    ),
    NoEffect(
        "without --glu-activation",
        lambda config: config.model.glu_activation is None,
        ("kernels.bias_swiglu_fusion",),
    ),
    warn_size_of_missing_position_table,
    warn_rope_settings_without_scaling,
    NoEffect(
        "without --no-add-bias-linear: all linear layers have biases",
        lambda config: config.model.add_bias_linear,
        ("model.add_qkv_bias", "model.add_attention_bias", "model.add_mlp_bias"),
    ),
    warn_missing_norm_biases,
    NoEffect(
        "without --sliding-window: all layers have full attention",
        lambda config: config.model.sliding_window is None,
        ("model.full_attention_layers",),
    ),
    NoEffect(
        "without --goldfish-loss",
        lambda config: not config.loss.goldfish_loss,
        ("loss.goldfish_k", "loss.goldfish_h"),
    ),
    NoEffect(
        "without --checkpoint-activations",
        lambda config: not config.recompute.checkpoint_activations,
        (
            *("recompute.checkpoint_fraction", "recompute.partition_activations"),
            "recompute.checkpoint_in_cpu",
        ),
    ),
    # With --sequence-parallel the inputs of layers are already sharded over the tensor ranks.
    NoEffect(
        "with --sequence-parallel, which already shards the kept inputs",
        lambda config: config.parallel.sequence_parallel,
        ("recompute.partition_activations",),
    ),
    # With a fraction below 1 some layers are not recomputed completely, and the flag still applies
    # to them.
    NoEffect(
        "with --checkpoint-activations, which recomputes entire layers; with --checkpoint-fraction "
        "it applies to the other layers",
        lambda config: (
            config.recompute.checkpoint_activations
            and config.recompute.checkpoint_fraction.strip() == "1"
        ),
        ("recompute.recompute_attention_core",),
    ),
    NoEffect(
        "without --memory-snapshot",
        lambda config: not config.logging.memory_snapshot,
        ("logging.memory_snapshot_iterations",),
    ),
    NoEffect(
        "without --profile-iterations or --memory-snapshot",
        lambda config: find_requesting_field(config) is None,
        ("logging.profile_ranks", "logging.profile_dir"),
    ),
    NoEffect(
        "without --fp8-format",
        lambda config: config.precision.fp8_format is None,
        (
            *("precision.fp8_recipe", "precision.fp8_start_iteration", "precision.fp8_emulate"),
            "precision.first_last_layers_bf16",
        ),
    ),
    NoEffect(
        "without --first-last-layers-bf16",
        lambda config: not config.precision.first_last_layers_bf16,
        ("precision.num_layers_at_start_in_bf16", "precision.num_layers_at_end_in_bf16"),
    ),
    warn_layer_statistics_without_file,
    warn_fusion_with_shared_groups,
    warn_float8_after_the_end,
)
"""All rules whose failure is a warning, in the order in which their messages are reported."""
