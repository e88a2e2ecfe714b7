"""Rules whose failure is a warning.

What was given trains, but a part of it has no effect or an unexpected one. Nothing is silently
ignored.

Invariant: as in `config/rules.py`, which runs them.
"""

import math
from collections.abc import Iterator

from megatron.config.config_with_origin import ConfigWithOrigin
from megatron.config.fields import all_fields
from megatron.config.kernel_rules import warn_fusion_with_shared_groups
from megatron.config.profiling import (
    warn_layer_statistics_without_file,
    warn_profile_settings_without_effect,
)

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


def warn_wsd_without_its_style(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about settings of WSD's final decay without --lr-decay-style WSD."""
    if settings.config.optimizer.lr_decay_style != "WSD":
        for name in ("iters", "samples", "fraction", "style"):
            dotted = f"optimizer.lr_wsd_decay_{name}"
            if settings.is_changed(dotted):
                yield f"{settings.describe(dotted)} has no effect without --lr-decay-style WSD."


def warn_decoupled_minimum_alone(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about --decoupled-min-lr without --decoupled-lr."""
    optimizer = settings.config.optimizer
    if optimizer.decoupled_lr is None and optimizer.decoupled_min_lr is not None:
        yield (
            f"{settings.describe('optimizer.decoupled_min_lr')} has no effect without "
            "--decoupled-lr."
        )


def warn_start_of_missing_warmup(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about settings that need a warm-up, which is not given."""
    optimizer = settings.config.optimizer
    units = ("fraction", "iters", "samples", "tokens")
    if any(settings[f"optimizer.lr_warmup_{unit}"] for unit in units):
        return
    for name in ("lr_warmup_init", "lr_warmup_style", "lr_decay_from_start"):
        if settings.is_changed(f"optimizer.{name}"):
            yield (
                f"{settings.describe(f'optimizer.{name}')} has no effect without a warm-up: "
                "give --lr-warmup-samples, -iters, -tokens or -fraction."
            )
    if optimizer.lr_decay_style == "inverse-square-root":
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


def warn_loss_scale_without_fp16(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about settings of the loss scale without --fp16."""
    precision = settings.config.precision
    if not precision.fp16:
        for name in (
            "loss_scale",
            "initial_loss_scale",
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
        ):
            if settings.is_changed(f"precision.{name}"):
                yield f"{settings.describe(f'precision.{name}')} has no effect without --fp16."
        logging = settings.config.logging
        # Without a folder, `warn_tensorboard_without_folder` reports this flag.
        if logging.tensorboard_dir is not None and not logging.log_loss_scale_to_tensorboard:
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


def warn_fp32_residual_in_fp32(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about --fp32-residual-connection in a run that computes in fp32 anyway."""
    precision = settings.config.precision
    if precision.fp32_residual_connection and not (precision.fp16 or precision.bf16):
        yield (
            f"{settings.describe('precision.fp32_residual_connection')} has no effect without "
            "--fp16 or --bf16: everything is in fp32."
        )


def warn_alibi_has_no_positions_to_reset(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about --reset-position-ids with ALiBi, which uses distances only."""
    if (
        settings.config.data.reset_position_ids
        and settings.config.model.position_embedding_type == "alibi"
    ):
        yield (
            f"{settings.describe('data.reset_position_ids')} has no effect with "
            "--position-embedding-type alibi, whose bias depends on distances only."
        )


def warn_data_with_mock_data(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about real data that are named together with --mock-data."""
    if not settings.config.data.mock_data:
        return
    for name in (
        "data_path",
        "data_phases",
        "train_weighted_split_paths",
        "train_weighted_split_paths_path",
    ):
        if settings[f"data.{name}"]:
            yield (
                f"{settings.describe(f'data.{name}')} has no effect with --mock-data, which trains "
                "on synthetic tokens."
            )


def warn_deepspeed_config_without_deepspeed(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about --deepspeed-config without --deepspeed."""
    parallel = settings.config.parallel
    if parallel.deepspeed_config is not None and not parallel.deepspeed:
        yield f"{settings.describe('parallel.deepspeed_config')} has no effect without --deepspeed."


def warn_save_without_interval(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn if nothing is saved, if only the end is saved, or if a save cannot be resumed."""
    checkpoint = settings.config.checkpoint
    for dotted in ("checkpoint.save_interval", "checkpoint.save_interval_time"):
        if settings[dotted] is not None and checkpoint.save is None:
            yield (f"{settings.describe(dotted)} has no effect without --save: nothing is saved.")
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


def warn_rotary_settings_without_rotary(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about settings of rotary positions without rotary positions."""
    if settings.config.model.position_embedding_type != "rotary":
        for dotted in (
            "model.rotary_percent",
            "model.rotary_base",
            "model.rope_scaling",
            "model.no_rope_layers",
        ):
            if settings.is_changed(dotted):
                yield (
                    f"{settings.describe(dotted)} has no effect without --position-embedding-type "
                    "rotary."
                )


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


def warn_biases_without_effect(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about flags for biases that are there or not there anyway."""
    model = settings.config.model
    for name in ("add_qkv_bias", "add_attention_bias", "add_mlp_bias"):
        if getattr(model, name) and model.add_bias_linear:
            yield (
                f"{settings.describe(f'model.{name}')} has no effect without "
                "--no-add-bias-linear: all linear layers have biases."
            )
    if not model.norm_bias and model.normalization == "RMSNorm" and not model.embed_layernorm:
        yield "--no-norm-bias has no effect with --normalization RMSNorm, which has no biases."


def warn_full_attention_without_window(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about layers without a sliding window in a model without one."""
    model = settings.config.model
    if model.full_attention_layers is not None and model.sliding_window is None:
        yield (
            f"{settings.describe('model.full_attention_layers')} has no effect without "
            "--sliding-window: all layers have full attention."
        )


def warn_goldfish_settings_without_goldfish(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about settings of the goldfish loss without it."""
    for dotted in ("loss.goldfish_k", "loss.goldfish_h"):
        if settings.is_changed(dotted) and not settings.config.loss.goldfish_loss:
            yield f"{settings.describe(dotted)} has no effect without --goldfish-loss."


def warn_recompute_flags_without_effect(settings: ConfigWithOrigin) -> Iterator[str]:
    """Warn about settings of recomputation that have no effect in this combination."""
    recompute = settings.config.recompute
    if (
        settings.is_changed("recompute.checkpoint_fraction")
        and not recompute.checkpoint_activations
    ):
        yield (
            f"{settings.describe('recompute.checkpoint_fraction')} has no effect without "
            "--checkpoint-activations."
        )
    for dotted in ("recompute.partition_activations", "recompute.checkpoint_in_cpu"):
        if settings[dotted] and not recompute.checkpoint_activations:
            yield f"{settings.describe(dotted)} has no effect without --checkpoint-activations."
    # With --sequence-parallel the inputs of layers are already sharded over the tensor ranks.
    if recompute.partition_activations and settings.config.parallel.sequence_parallel:
        yield (
            f"{settings.describe('recompute.partition_activations')} has no effect with "
            "--sequence-parallel, which already shards the kept inputs."
        )
    if (
        recompute.recompute_attention_core
        and recompute.checkpoint_activations
        # With a fraction below 1 some layers are not recomputed completely, and the flag still
        # applies to them.
        and recompute.checkpoint_fraction.strip() == "1"
    ):
        yield (
            f"{settings.describe('recompute.recompute_attention_core')} has no effect with "
            "--checkpoint-activations, which recomputes entire layers; with --checkpoint-fraction "
            "it applies to the other layers."
        )


WARNINGS = (
    warn_ramp_by_iterations,
    warn_decay_by_tokens_wins,
    warn_warmup_tokens_with_curriculum,
    warn_wsd_without_its_style,
    warn_decoupled_minimum_alone,
    warn_start_of_missing_warmup,
    warn_settings_of_another_optimizer,
    warn_loss_scale_without_fp16,
    warn_static_loss_scale_wins,
    warn_loss_scale_rounds,
    warn_fp32_residual_in_fp32,
    warn_alibi_has_no_positions_to_reset,
    warn_data_with_mock_data,
    warn_deepspeed_config_without_deepspeed,
    warn_save_without_interval,
    warn_tensorboard_without_folder,
    warn_rotary_settings_without_rotary,
    warn_size_of_missing_position_table,
    warn_rope_settings_without_scaling,
    warn_biases_without_effect,
    warn_full_attention_without_window,
    warn_goldfish_settings_without_goldfish,
    warn_recompute_flags_without_effect,
    warn_profile_settings_without_effect,
    warn_layer_statistics_without_file,
    warn_fusion_with_shared_groups,
)
"""All rules whose failure is a warning, in the order in which their messages are reported."""
