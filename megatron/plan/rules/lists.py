"""The rules of a configuration, in the order of their messages.

A rule is in the module of its subject, and in one list here.

Invariant: a rule raises nothing and reads nothing but its context. All rules run, and all findings
are reported together. A rule in `if_given` finds nothing while its fields have their defaults, so
it runs only if one of them is given. Schedules check their own numbers when the plan builds them,
so there are no rules for these. Examples are the steps of a ramp-up, --min-lr above --lr, and
skipped ranges.

The defaults, and what may be combined, follow Megatron-LM and Megatron-DeepSpeed.
"""

from megatron.config.fields import ConfigWithOrigin, all_fields
from megatron.config.optimizer import OPTIMIZERS
from megatron.model.layer_parts import ACTIVATIONS, NORMS
from megatron.plan.rules import (
    data,
    kernels,
    layout,
    model,
    numbers,
    resume,
    training,
)
from megatron.plan.rules.finding import (
    Forbids,
    OneOf,
    PlanContext,
    ResumeContext,
    Rule,
    error,
    if_given,
    needs,
    no_effect,
    no_effect_unless,
    no_effect_without,
    warning,
)

_SAVE = "checkpoint.save"
_SCALING = "model.rope_scaling"
_KEEP_LATEST = "checkpoint.keep_latest_checkpoints"
_DEEPSPEED_OPTIMIZERS = ("optimizer.cpu_optimizer", "optimizer.use_bnb_optimizer")
_LOSS_SCALE = (
    *("precision.loss_scale", "precision.initial_loss_scale", "precision.min_loss_scale"),
    *("precision.loss_scale_window", "precision.hysteresis"),
)
_NOT_COMPARED = ": they were not compared with each other"

_WITHOUT_KERNEL = [name for name, row in ACTIVATIONS.list_rows() if not row.has_kernel]


def _list_fields(part: str) -> tuple[str, ...]:
    """Return the dotted names that contain a text, so that new fields need no entry here."""
    return tuple(dotted for dotted in all_fields() if part in dotted)


_TENSORBOARD = tuple(
    dotted for dotted in _list_fields("tensorboard") if dotted != "logging.tensorboard_dir"
)

CONFIG_RULES: tuple[Rule[ConfigWithOrigin], ...] = (
    # Errors.
    training.check_no_empty_text,
    numbers.check_ranges,
    training.check_one_training_length,
    if_given(training.check_times, *training.TIMES),
    if_given(training.check_length_by_time, "batch.train_time"),
    if_given(training.check_one_wsd_decay, "optimizer.lr_wsd_decay_fraction"),
    if_given(training.check_one_unit_of_progress, *_list_fields("optimizer.lr_")),
    if_given(
        training.check_one_warmup, "optimizer.lr_warmup_fraction", "optimizer.lr_warmup_tokens"
    ),
    training.check_lr_is_given,
    OneOf(
        (
            *("batch.rampup_batch_size", "batch.step_batch_size_schedule"),
            "batch.gradient_accumulation_steps",
        )
    ),
    OneOf(
        ("optimizer.override_lr_scheduler", "optimizer.use_checkpoint_lr_scheduler"),
        ": the schedule comes either from this configuration or from the checkpoint",
    ),
    OneOf(("precision.fp16", "precision.bf16")),
    if_given(
        numbers.check_loss_scale_bounds, "precision.min_loss_scale", "precision.initial_loss_scale"
    ),
    if_given(model.check_dropout, "model.hidden_dropout", "model.attention_dropout"),
    model.check_heads_divide_hidden_size,
    if_given(model.check_rotary_dim_is_even, "model.position_embedding_type"),
    if_given(model.check_rope_scaling, "model.rope_scaling"),
    if_given(model.check_layer_choices, *model.LAYER_CHOICES),
    OneOf(("model.activation", "model.glu_activation"), ": the first is for an MLP without a gate"),
    if_given(model.check_query_key_norm, "model.qk_norm"),
    if_given(model.check_softmax, "model.softmax_type"),
    OneOf((model.ATTENTION_GATE, "parallel.deepspeed"), _NOT_COMPARED),
    if_given(model.check_parametrization, "model.parametrization"),
    if_given(model.check_latent_attention, model.LATENT_ATTENTION),
    if_given(model.check_linear_attention, model.LINEAR_ATTENTION),
    needs(model.LINEAR_FREQUENCY, ", as in Qwen3-Next with 4", model.LINEAR_ATTENTION),
    OneOf((model.LINEAR_ATTENTION, "model.parametrization"), _NOT_COMPARED),
    if_given(model.check_experts, model.NUM_EXPERTS),
    if_given(model.check_positions_cover_sequence, "model.max_position_embeddings"),
    data.check_split_weights,
    data.check_data_path_has_pairs,
    if_given(data.check_one_description_of_data, *_list_fields("weighted_split_paths")),
    if_given(data.check_phases_are_the_training_data, "data.data_phases"),
    needs(
        *("data.dataset_format", " parquet, arrow or jsonl", "data.datasets", "data.weights"),
        *("data.bos_token", "data.eos_token", "data.strip_tokens", "data.max_document_tokens"),
        *("data.max_ngram_repetition", "data.drop_duplicates"),
    ),
    if_given(data.check_streamed_data, "data.dataset_format"),
    needs(_SAVE, ": the ids of the tracker's runs are stored there", "logging.tracker"),
    # --save-interval is not in this list. Published scripts that measure speed have it without
    # --save, so it gives only a warning. A run with --async-save and no folder would train to its
    # end and leave no checkpoint.
    needs(
        *(_SAVE, ": without it nothing would be saved", "checkpoint.save_at"),
        *("checkpoint.async_save", _KEEP_LATEST, "checkpoint.hf_export_interval"),
        "checkpoint.pretrained_checkpoint",
    ),
    if_given(
        data.check_addresses,
        *(_SAVE, "checkpoint.load", "checkpoint.pretrained_checkpoint"),
    ),
    needs("checkpoint.local_dir", ", for an address in --save", "checkpoint.save_staging"),
    needs(_KEEP_LATEST, ": without it all checkpoints are kept", "checkpoint.keep_every"),
    needs(_KEEP_LATEST, "", "checkpoint.keep_for_handover"),
    # These flags have a meaning only for a checkpoint that is loaded.
    needs(
        *("checkpoint.load", ", the folder of the checkpoint", "checkpoint.finetune"),
        *("checkpoint.require_load", "checkpoint.load_iteration", "batch.eval_only"),
    ),
    Forbids(
        lambda config: config.checkpoint.load is not None and not config.checkpoint.resumes_itself,
        error,
        "needs --load to be the folder of --save, where the run goes on, or to be left out",
        ("checkpoint.pretrained_checkpoint",),
    ),
    needs("batch.eval_tasks", ", the names of the tasks", *_list_fields("batch.eval_tasks_")),
    # --eval-only evaluates the tasks once.
    Forbids(
        lambda config: config.batch.eval_tasks_interval is None and not config.batch.eval_only,
        error,
        "needs --eval-tasks-interval, the iterations between two evaluations",
        ("batch.eval_tasks",),
    ),
    OneOf(("checkpoint.require_load", "checkpoint.allow_fresh_start")),
    if_given(training.check_spike_guard_can_roll_back, "guard.spike_guard"),
    if_given(
        training.check_spike_guard_sizes, "guard.spike_guard_min_steps", "guard.spike_guard_window"
    ),
    if_given(numbers.check_bf16_moments, "optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype"),
    OneOf(_DEEPSPEED_OPTIMIZERS),
    # The native engine (FSDP2) supports neither of them.
    needs(
        "parallel.deepspeed",
        "; without it, --zero-stage shards the optimizer's states over the ranks",
        *_DEEPSPEED_OPTIMIZERS,
    ),
    if_given(
        layout.check_sharding_strategy, "parallel.sharding_strategy", "parallel.hsdp_shard_size"
    ),
    if_given(numbers.check_grad_reduction, "parallel.grad_reduce_in_bf16"),
    OneOf(
        ("parallel.deepspeed", "parallel.replay_interval"),
        ": the engine of DeepSpeed cannot compute a microbatch twice",
    ),
    if_given(training.check_curriculum_flags, *_list_fields("curriculum.")),
    if_given(data.check_end_of_document_is_known, *data.DOCUMENT_FLAGS),
    if_given(layout.check_one_partition_method, "parallel.num_layers_per_virtual_pipeline_stage"),
    if_given(layout.check_recompute_fraction, "recompute.checkpoint_fraction"),
    if_given(layout.check_kept_operators, "recompute.checkpoint_keep_operators"),
    if_given(kernels.check_attention_backend, "kernels.attention_backend"),
    if_given(kernels.check_varlen_attention, "kernels.use_varlen_attention"),
    if_given(kernels.check_gradient_accumulation_fusion, "kernels.gradient_accumulation_fusion"),
    if_given(data.check_profile, "logging.profile_iterations", "logging.memory_snapshot"),
    if_given(kernels.check_float8, "precision.fp8_format"),
    # Warnings.
    Forbids(
        lambda config: True,
        warning,
        "trains without a checkpoint, and only tools/handover.py needs it",
        ("checkpoint.rehearsal",),
    ),
    no_effect_without(model.NUM_EXPERTS, "", *model.EXPERT_FIELDS),
    no_effect_without(model.LATENT_ATTENTION, "", *model.LATENT_WIDTHS, *model.YARN_SCALES),
    no_effect_unless(_SCALING, ("yarn",), *model.YARN_SCALES),
    no_effect_without(model.LINEAR_ATTENTION, "", *_list_fields("model.linear_")),
    if_given(model.warn_about_balance, model.NUM_EXPERTS),
    if_given(
        training.warn_ramp_by_iterations,
        "batch.rampup_batch_size",
        "batch.step_batch_size_schedule",
    ),
    no_effect(
        "with {optimizer.lr_decay_tokens}, which ends the decay",
        lambda config: config.optimizer.lr_decay_tokens is not None,
        *("optimizer.lr_decay_samples", "optimizer.lr_decay_iters"),
    ),
    if_given(training.warn_warmup_tokens_with_curriculum, "optimizer.lr_warmup_tokens"),
    no_effect_unless("optimizer.lr_decay_style", ("WSD",), *_list_fields("optimizer.lr_wsd_decay")),
    no_effect_without("optimizer.decoupled_lr", "", "optimizer.decoupled_min_lr"),
    no_effect(
        "without a warm-up: give --lr-warmup-samples, -iters, -tokens or -fraction",
        training.has_no_warmup,
        *("optimizer.lr_warmup_init", "optimizer.lr_warmup_style", "optimizer.lr_decay_from_start"),
    ),
    if_given(training.warn_decay_of_missing_warmup, "optimizer.lr_decay_style"),
    no_effect_unless("model.parametrization", ("mup", "completep"), *_list_fields("model.base_")),
    *(
        no_effect_unless("optimizer.optimizer", (name,), *_list_fields(f"optimizer.{row.flags}"))
        for name, row in OPTIMIZERS.list_rows()
        if row.flags
    ),
    no_effect_without("precision.fp16", "", *_LOSS_SCALE),
    # Without a folder, another rule reports this flag.
    no_effect(
        "without --fp16",
        lambda config: not config.precision.fp16 and config.logging.tensorboard_dir is not None,
        "logging.log_loss_scale_to_tensorboard",
    ),
    no_effect(
        "with {precision.loss_scale}, which is static",
        lambda config: config.precision.fp16 and config.precision.loss_scale is not None,
        *_LOSS_SCALE[1:],
    ),
    if_given(numbers.warn_loss_scale_rounds, "precision.fp16"),
    no_effect(
        "without --fp16 or --bf16: everything is in fp32",
        lambda config: not (config.precision.fp16 or config.precision.bf16),
        "precision.fp32_residual_connection",
    ),
    no_effect(
        "with --position-embedding-type alibi, whose bias depends on distances only",
        lambda config: config.model.position_embedding_type == "alibi",
        "data.reset_position_ids",
    ),
    no_effect(
        "with --mock-data, which trains on synthetic tokens",
        lambda config: config.data.mock_data,
        *("data.data_path", "data.data_phases"),
        *_list_fields("data.train_weighted_split_paths"),
    ),
    no_effect_without(
        *("data.dataset_format", ": prepared data have ids", "tokenizer.special_tokens_in_text")
    ),
    no_effect_without("parallel.deepspeed", "", "parallel.deepspeed_config"),
    no_effect(
        "without --replay-interval",
        lambda config: config.parallel.replay_interval == 0,
        "parallel.replay_action",
    ),
    no_effect(
        "without --context-parallel-size",
        lambda config: config.parallel.context_parallel_size == 1,
        "parallel.cp_comm_type",
    ),
    no_effect_without(_SAVE, ": nothing is saved", *_list_fields("checkpoint.save_interval")),
    data.warn_incomplete_saves,
    no_effect_without("logging.tensorboard_dir", "", *_TENSORBOARD),
    no_effect_unless(
        *("model.position_embedding_type", ("rotary",), "model.rotary_percent"),
        *("model.rotary_base", "model.rope_scaling", "model.no_rope_layers", "kernels.rope_fusion"),
    ),
    no_effect(
        f"with an activation that has no kernel: {', '.join(_WITHOUT_KERNEL)}",
        lambda config: config.model.activation_name in _WITHOUT_KERNEL,
        "kernels.bias_swiglu_fusion",
    ),
    no_effect(
        "without --norm-placement input",
        lambda config: not config.model.has_norms_first,
        "kernels.residual_norm_fusion",
    ),
    no_effect_unless("optimizer.optimizer", ("adam",), "kernels.adamw_fusion"),
    no_effect("with --deepspeed", lambda c: c.parallel.deepspeed, "kernels.adamw_fusion"),
    no_effect(
        "in compiled layers and with a residual stream in fp32",
        lambda c: c.kernels.use_torch_compile or c.precision.fp32_residual_connection,
        "kernels.residual_norm_fusion",
    ),
    no_effect(
        "with {model.position_embedding_type}, which has no table of positions",
        lambda config: config.model.position_embedding_type != "absolute",
        "model.max_position_embeddings",
    ),
    no_effect_unless(_SCALING, ("linear", "llama3", "yarn"), "model.rope_scaling_factor"),
    no_effect_unless(
        *(_SCALING, ("llama3",), "model.rope_low_freq_factor", "model.rope_high_freq_factor")
    ),
    no_effect_unless(_SCALING, ("llama3", "yarn"), "model.rope_original_length"),
    no_effect_unless(
        *(_SCALING, ("yarn",), "model.rope_beta_fast", "model.rope_beta_slow"),
        *("model.rope_truncate", "model.rope_attention_factor"),
    ),
    no_effect(
        "without --no-add-bias-linear: all linear layers have biases",
        lambda config: config.model.add_bias_linear,
        *("model.add_qkv_bias", "model.add_attention_bias", "model.add_mlp_bias"),
    ),
    no_effect(
        "with {model.normalization}, which has no biases",
        lambda config: (
            not config.model.embed_layernorm
            and not NORMS.require(config.model.normalization).has_bias
        ),
        "model.norm_bias",
    ),
    no_effect_without(
        "model.sliding_window", ": all layers have full attention", "model.full_attention_layers"
    ),
    no_effect_without("loss.goldfish_loss", "", "loss.goldfish_k", "loss.goldfish_h"),
    no_effect_without(
        *("recompute.checkpoint_activations", "", "recompute.checkpoint_fraction"),
        *("recompute.partition_activations", "recompute.checkpoint_in_cpu"),
    ),
    # With --sequence-parallel the inputs of layers are already sharded over the tensor ranks.
    no_effect(
        "with --sequence-parallel, which already shards the kept inputs",
        lambda config: config.parallel.sequence_parallel,
        "recompute.partition_activations",
    ),
    # With a fraction below 1 some layers are not recomputed completely, and the flag still applies
    # to them.
    no_effect(
        "with --checkpoint-activations, which recomputes entire layers; with --checkpoint-fraction "
        "it applies to the other layers",
        lambda config: (
            config.recompute.checkpoint_activations
            and config.recompute.checkpoint_fraction.strip() == "1"
        ),
        "recompute.recompute_attention_core",
    ),
    no_effect_without("logging.memory_snapshot", "", "logging.memory_snapshot_iterations"),
    no_effect(
        "without --profile-iterations or --memory-snapshot",
        lambda config: config.logging.profiling_field is None,
        *("logging.profile_ranks", "logging.profile_dir"),
    ),
    no_effect_without(
        *("precision.fp8_format", "", "precision.fp8_recipe", "precision.fp8_start_iteration"),
        *("precision.fp8_emulate", "precision.first_last_layers_bf16"),
    ),
    no_effect_without(
        *("precision.first_last_layers_bf16", "", "precision.num_layers_at_start_in_bf16"),
        "precision.num_layers_at_end_in_bf16",
    ),
    if_given(data.warn_layer_statistics_without_file, "logging.log_layer_stats_interval"),
    if_given(kernels.warn_about_masks_of_kernels, "kernels.attention_backend"),
    if_given(kernels.warn_fusion_with_shared_groups, "kernels.gradient_accumulation_fusion"),
    if_given(kernels.warn_float8_after_the_end, "precision.fp8_format"),
)
"""Rules that need only the configuration."""

PLAN_RULES: tuple[Rule[PlanContext], ...] = (
    layout.check_grid,
    if_given(
        layout.check_tensor_parallel,
        "parallel.tensor_model_parallel_size",
        "parallel.sequence_parallel",
        "recompute.partition_activations",
    ),
    if_given(layout.check_context_parallel, "parallel.context_parallel_size"),
    if_given(model.check_linear_heads, model.LINEAR_ATTENTION),
    if_given(layout.check_muon, "optimizer.optimizer"),
    if_given(kernels.warn_about_cuda_graph, "kernels.cuda_graph"),
    if_given(model.check_expert_parallel, model.EXPERT_RANKS),
    if_given(training.warn_about_bare_thresholds, "batch.step_batch_size_schedule"),
    if_given(training.check_final_step, "batch.step_batch_size_schedule"),
    training.check_batch_sizes,
    if_given(training.check_first_batch, "batch.train_samples"),
    training.warn_missing_warmup,
    if_given(training.warn_about_last_batch, "batch.train_samples"),
    if_given(training.warn_about_skipped_end, "batch.skip_train_iteration_range"),
    if_given(training.check_curriculum, "curriculum.curriculum_schedule_type"),
    if_given(training.check_cut_sequences, "curriculum.curriculum_schedule_type"),
    if_given(training.warn_about_curriculum_end, "curriculum.curriculum_schedule_type"),
    if_given(data.check_profiled_ranks, "logging.profile_iterations", "logging.memory_snapshot"),
    if_given(data.warn_about_phases, "data.data_phases"),
    model.warn_about_shape,
    if_given(layout.warn_about_pipeline, "parallel.pipeline_model_parallel_size"),
    data.warn_about_files,
)
"""Rules that need the number of ranks, or what follows from it."""

RESUME_RULES: tuple[Rule[ResumeContext], ...] = (
    resume.check_optimizer,
    resume.check_curriculum,
    resume.check_schedule,
    resume.warn_about_skip_ranges,
    resume.warn_about_trained_range,
    resume.check_tokenizer,
    resume.warn_about_changes,
    resume.warn_about_new_states,
)
"""Rules that need the checkpoint that a run continues."""

NEEDED_BY_RUNS: tuple[Rule[ConfigWithOrigin], ...] = (data.check_data_is_given,)
"""Rules for a run that is about to start. A plan may be made before there is data."""
