"""All keys of DeepSpeed's JSON that are accepted, and what becomes of each.

Invariant: the tables are closed. A key in none of them is an error, because DeepSpeed (0.19.8)
would ignore it or compute other numbers. The keys that go to DeepSpeed (`PASSED_TO_DEEPSPEED`)
were checked one by one. They set sizes, overlap and printing, and never change numbers.
"""

import difflib
import math
from collections.abc import Callable
from typing import Any

Convert = Callable[[Any], Any]
"""Converts a value, or raises ValueError with a text that begins with "must be"."""


def keep_value(value: Any) -> Any:
    """Return the value. `Field.convert` checks it later."""
    return value


def read_flag(value: Any) -> bool:
    """Return a boolean. Raise ValueError for any other value."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def read_number(value: Any) -> float:
    """Return a number as a float. Raise ValueError for any other value."""
    # bool is a subclass of int in Python, but true is not a number in JSON.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("must be finite") from None


def read_whole(value: Any) -> int:
    """Return a whole number. Raise ValueError for any other value.

    5e8 is one as well, because templates write sizes in this form.
    """
    # The last condition is true for numbers with a fraction.
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise ValueError("must be a whole number")
    return int(value)


def read_count(value: Any) -> int:
    """Return a whole number of at least 0. Raise ValueError for any other value."""
    if read_whole(value) < 0:
        raise ValueError("must be at least 0")
    return read_whole(value)


def read_positive(value: Any) -> int:
    """Return a whole number of at least 1. Raise ValueError for any other value."""
    if read_whole(value) < 1:
        raise ValueError("must be at least 1")
    return read_whole(value)


def read_text(value: Any) -> str:
    """Return a text. Raise ValueError for any other value."""
    if not isinstance(value, str):
        raise ValueError("must be text")
    return value


def read_list(read: Convert) -> Convert:
    """Return a reader for a list whose items another function reads."""

    def take(items: Any) -> list[Any]:
        if not isinstance(items, list):
            raise ValueError("must be a list")
        return [read(item) for item in items]

    return take


def _read_power_of_two(value: Any) -> float:
    """Return two to the power of the value."""
    power = read_whole(value)
    # math.ldexp raises OverflowError above 1023.
    if abs(power) > 1000:
        raise ValueError("must be between -1000 and 1000")
    return math.ldexp(1.0, power)


def _read_beta(index: int) -> Convert:
    """Return a reader for one of AdamW's two betas."""

    def take(betas: Any) -> float:
        if not isinstance(betas, list) or len(betas) != 2:
            raise ValueError("must be a list of two numbers")
        return read_number(betas[index])

    return take


FIELDS: dict[str, tuple[tuple[str, Convert], ...]] = {
    "train_micro_batch_size_per_gpu": (("batch.micro_batch_size", keep_value),),
    "train_batch_size": (("batch.global_batch_size", keep_value),),
    "gradient_clipping": (("optimizer.clip_grad", keep_value),),
    "zero_optimization.stage": (("parallel.zero_stage", keep_value),),
    "zero_optimization.offload_optimizer.device": (
        ("optimizer.cpu_optimizer", lambda device: device == "cpu"),
    ),
    # This is the name of offload_optimizer before DeepSpeed 0.3.16.
    "zero_optimization.cpu_offload": (("optimizer.cpu_optimizer", read_flag),),
    "fp16.enabled": (("precision.fp16", keep_value),),
    "bf16.enabled": (("precision.bf16", keep_value),),
    "optimizer.params.lr": (("optimizer.lr", keep_value),),
    "optimizer.params.betas": (
        ("optimizer.adam_beta1", _read_beta(0)),
        ("optimizer.adam_beta2", _read_beta(1)),
    ),
    "optimizer.params.eps": (("optimizer.adam_eps", keep_value),),
    "optimizer.params.weight_decay": (("optimizer.weight_decay", keep_value),),
    "activation_checkpointing.partition_activations": (
        ("recompute.partition_activations", keep_value),
    ),
    "activation_checkpointing.cpu_checkpointing": (("recompute.checkpoint_in_cpu", keep_value),),
    "curriculum_learning.min_difficulty": (("curriculum.curriculum_min_difficulty", keep_value),),
    "curriculum_learning.max_difficulty": (("curriculum.curriculum_max_difficulty", keep_value),),
    "curriculum_learning.schedule_type": (("curriculum.curriculum_schedule_type", keep_value),),
    "curriculum_learning.schedule_config.total_curriculum_step": (
        ("curriculum.curriculum_total_step", keep_value),
    ),
    "curriculum_learning.schedule_config.difficulty_step": (
        ("curriculum.curriculum_difficulty_step", keep_value),
    ),
    "curriculum_learning.schedule_config.root_degree": (
        ("curriculum.curriculum_root_degree", keep_value),
    ),
    "curriculum_learning.schedule_config.difficulty": (
        ("curriculum.curriculum_difficulties", keep_value),
    ),
    "curriculum_learning.schedule_config.max_step": (
        ("curriculum.curriculum_max_steps", keep_value),
    ),
}
"""Fields of the configuration under another name. A value that flags contradict is an error."""
LOSS_SCALE: dict[str, tuple[tuple[str, Convert], ...]] = {
    # DeepSpeed writes 0 for a dynamic scale, and this configuration writes None.
    "fp16.loss_scale": (("precision.loss_scale", lambda value: read_number(value) or None),),
    "fp16.initial_scale_power": (("precision.initial_loss_scale", _read_power_of_two),),
    "fp16.loss_scale_window": (("precision.loss_scale_window", read_whole),),
    "fp16.hysteresis": (("precision.hysteresis", read_whole),),
    "fp16.min_loss_scale": (("precision.min_loss_scale", read_number),),
}
"""The same as FIELDS, but the JSON's value replaces that of a flag."""
ACCUMULATION_STEPS = "gradient_accumulation_steps"
"""Follows from the batch sizes and the number of ranks, so the plan compares it."""
CHECKED: dict[str, Convert] = {
    ACCUMULATION_STEPS: read_positive,
    "curriculum_learning.enabled": read_flag,
}
"""Keys whose values are only checked here. Other code reads them."""

PASSED_TO_DEEPSPEED: dict[str, Convert] = {
    "steps_per_print": read_positive,
    "wall_clock_breakdown": read_flag,
    "memory_breakdown": read_flag,
    "dump_state": read_flag,
    "disable_python_gc": read_flag,
    "log_level": read_text,
    "comms_logger.enabled": read_flag,
    "comms_logger.verbose": read_flag,
    "comms_logger.prof_all": read_flag,
    "comms_logger.prof_ops": read_list(read_text),
    "comms_logger.debug": read_flag,
    "flops_profiler.enabled": read_flag,
    "flops_profiler.recompute_fwd_factor": read_number,
    "flops_profiler.profile_step": read_positive,
    "flops_profiler.module_depth": read_whole,
    "flops_profiler.top_modules": read_positive,
    "flops_profiler.detailed": read_flag,
    "flops_profiler.output_file": lambda value: None if value is None else read_text(value),
    "timers.throughput.enabled": read_flag,
    "timers.throughput.synchronized": read_flag,
    "pipeline.pipe_partitioned": read_flag,
    "pipeline.grad_partitioned": read_flag,
    "zero_optimization.contiguous_gradients": read_flag,
    "zero_optimization.overlap_comm": read_flag,
    "zero_optimization.reduce_scatter": read_flag,
    "zero_optimization.reduce_bucket_size": read_positive,
    "zero_optimization.use_multi_rank_bucket_allreduce": read_flag,
    "zero_optimization.allgather_partitions": read_flag,
    "zero_optimization.allgather_bucket_size": read_positive,
    "zero_optimization.sub_group_size": read_positive,
    # These sizes may be 0. The bucket sizes above may not.
    "zero_optimization.stage3_prefetch_bucket_size": read_count,
    "zero_optimization.stage3_param_persistence_threshold": read_count,
    "zero_optimization.stage3_model_persistence_threshold": read_count,
    "zero_optimization.stage3_max_live_parameters": read_count,
    "zero_optimization.stage3_max_reuse_distance": read_count,
    "zero_optimization.log_trace_cache_warnings": read_flag,
    "zero_optimization.enable_sanity_checks": read_flag,
    "zero_optimization.offload_optimizer.pin_memory": read_flag,
}
"""Keys that go to DeepSpeed unchanged, except those of `PIPELINE_TIMERS` under a pipeline."""

# These settings may be correct, but no test compares their results with this trainer's.
_NUMBERS = "DeepSpeed's results with it were not compared with this trainer's own"
_WEIGHTS_STAY = "weights stay on the device; --cpu-optimizer moves master weights and moments"
_MASTERS = "master weights, gradients and moments are fp32, and so are checkpoints"
_OVER_RANKS = "gradients are averaged over ranks, without scaling before"
ALLOWED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    # DeepSpeed reads the name without regard to case.
    "optimizer.type": (("Adam", "AdamW", "adam", "adamw"), "AdamW is the only optimizer"),
    "optimizer.params.adam_w_mode": ((True,), "weight decay is decoupled, as in AdamW"),
    "optimizer.params.bias_correction": ((True,), "AdamW corrects its moments"),
    "optimizer.params.torch_adam": ((True,), "torch's AdamW is used"),
    "fp16.consecutive_hysteresis": ((False,), "--hysteresis counts all overflows"),
    "fp16.auto_cast": ((False,), "the model's inputs are token ids"),
    "fp16.fp16_master_weights_and_grads": ((False,), _MASTERS),
    "bf16.bf16_master_weights_and_grads": ((False,), _MASTERS),
    "bf16.bf16_optimizer_states": ((False,), _MASTERS),
    "bf16.immediate_grad_update": ((False,), _NUMBERS),
    "bf16.check_grad_overflow": ((True,), "a step with an infinity is dropped"),
    # The names of DeepSpeed's DtypeEnum.
    "data_types.grad_accum_dtype": (
        ("fp32", "float32", "float", "torch.float32", None),
        "gradients are accumulated in fp32",
    ),
    "curriculum_learning.curriculum_type": (
        ("seqlen",),
        "only the length of sequences can change",
    ),
    "zero_optimization.offload_optimizer.device": (
        ("cpu", "none"),
        "checkpoints are read from memory",
    ),
    "zero_optimization.offload_optimizer.ratio": (
        (1.0,),
        "the optimizer moves completely or not at all",
    ),
    "zero_optimization.offload_optimizer.super_offload": ((False,), _NUMBERS),
    "zero_optimization.offload_param.device": (("none",), _WEIGHTS_STAY),
    "zero_optimization.cpu_offload_param": ((False,), _WEIGHTS_STAY),
    "zero_optimization.round_robin_gradients": (
        (False,),
        "checkpoints support one order of the partitions",
    ),
    "zero_optimization.parameter_alignment": (
        (False,),
        "checkpoints have no gaps between partitions",
    ),
    "zero_optimization.zero_hpz_partition_size": (
        (1,),
        "weights are sharded over all data-parallel ranks",
    ),
    "zero_optimization.zero_quantized_weights": ((False,), _NUMBERS),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), _NUMBERS),
    "zero_optimization.zero_quantized_gradients": ((False,), _NUMBERS),
    "zero_optimization.compute_grad_norm": ((True,), "the norm of the gradients is in the log"),
    "zero_optimization.ignore_unused_parameters": ((True,), "every parameter is used"),
    "zero_optimization.legacy_stage1": ((False,), "DeepSpeed has dropped it"),
    "zero_optimization.stage3_module_granularity_threshold": ((0,), _NUMBERS),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": ((False,), _NUMBERS),
    "zero_optimization.stage3_allgather_sequential": ((False,), _NUMBERS),
    "zero_optimization.memory_efficient_linear": ((True,), _NUMBERS),
    "zero_allow_untested_optimizer": ((True, False), "this trainer has its own optimizer"),
    "zero_force_ds_cpu_optimizer": ((False,), "this trainer has its own optimizer"),
    "prescale_gradients": ((False, True), _OVER_RANKS),
    "gradient_predivide_factor": ((1.0,), _OVER_RANKS),
    "gradient_allreduce_op": (("mean",), _OVER_RANKS),
    "sparse_gradients": ((False,), "gradients of embeddings are dense"),
    "managed_gradient_accumulation": (
        (True,),
        "the trainer's batch sizes determine the end of a step",
    ),
    "disable_allgather": ((False,), "DeepSpeed has dropped it"),
    "pipeline.activation_checkpoint_interval": (
        (0,),
        "--checkpoint-activations and related flags select what is recomputed",
    ),
    "checkpoint.load_universal": (
        (False,),
        "--load reads this trainer's checkpoints, at any layout",
    ),
}
"""Keys with which DeepSpeed could do what this trainer does not: the accepted values, and why."""

_OWN_RECOMPUTATION = "layers are recomputed by this trainer's own code"
_NO_NVME = "nothing is moved to NVMe"
_OWN_CHECKPOINTS = "this trainer writes and reads its own checkpoints"
_OWN_DATA = "this trainer has its own data loader"
# Templates for DeepSpeed often have these keys, so they give a warning and not an error.
WITHOUT_EFFECT: dict[str, str] = {
    **dict.fromkeys(
        (
            "activation_checkpointing.contiguous_memory_optimization",
            "activation_checkpointing.number_checkpoints",
            "activation_checkpointing.profile",
            "activation_checkpointing.synchronize_checkpoint_boundary",
        ),
        _OWN_RECOMPUTATION,
    ),
    **dict.fromkeys(
        (
            "aio.block_size",
            "aio.queue_depth",
            "aio.thread_count",
            "aio.intra_op_parallelism",
            "aio.single_submit",
            "aio.overlap_events",
            "aio.use_gds",
            "zero_optimization.offload_optimizer.nvme_path",
            "zero_optimization.offload_optimizer.buffer_count",
            "zero_optimization.offload_optimizer.buffer_size",
            "zero_optimization.offload_optimizer.pipeline",
            "zero_optimization.offload_optimizer.pipeline_read",
            "zero_optimization.offload_optimizer.pipeline_write",
            "zero_optimization.offload_optimizer.fast_init",
            "zero_optimization.offload_optimizer.cpuadam_cores_perc",
            "zero_optimization.offload_param.nvme_path",
            "zero_optimization.offload_param.buffer_count",
            "zero_optimization.offload_param.buffer_size",
            "zero_optimization.offload_param.max_in_cpu",
            "zero_optimization.offload_param.pin_memory",
        ),
        _NO_NVME,
    ),
    **dict.fromkeys(
        (
            "checkpoint.tag_validation",
            "checkpoint.checkpoint_serialization",
            "checkpoint.use_node_local_storage",
            "checkpoint.writer",
            "checkpoint.parallel_write",
            "zero_optimization.load_from_fp32_weights",
            "zero_optimization.elastic_checkpoint",
            "zero_optimization.pipeline_loading_checkpoint",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        ),
        _OWN_CHECKPOINTS,
    ),
    "dataloader_drop_last": _OWN_DATA,
    "vocabulary_size": "the tokenizer gives the size of the vocabulary",
    "zero_optimization.override_module_apply": "this trainer builds the model itself",
    "seq_parallel_communication_data_type": "there is no sequence parallelism of DeepSpeed's kind",
    "use_data_before_expert_parallelism": "DeepSpeed runs no experts here",
}
"""Keys that change no number here, and why."""

VALUES_WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    # DeepSpeed divides by the number of ranks before the sum instead of after it.
    "prescale_gradients": (
        True,
        "gradients are accumulated in fp32 and averaged over the ranks once; dividing before the "
        "sum is the same average",
    ),
    "zero_allow_untested_optimizer": (False, "this trainer has its own optimizer"),
}
"""Accepted values that change no number here although this trainer works otherwise, and why."""

PIPELINE_TIMERS = ("wall_clock_breakdown", "flops_profiler.enabled")
"""Keys that switch on DeepSpeed's timers. The timers fail or hang in DeepSpeed's pipeline, so the
keys are not passed on if there are several stages."""

_MONITORS = "use --tensorboard-dir; the same numbers are in metrics.jsonl"
UNSUPPORTED_BLOCKS: dict[str, str] = {
    "amp": "use --fp16 or --bf16",
    "torch_autocast": "use --fp16 or --bf16",
    "elasticity": "--global-batch-size and --rampup-batch-size set the batch sizes",
    "data_efficiency": "this trainer sets the order of the data, which is in its checkpoints",
    "tensorboard": _MONITORS,
    "wandb": _MONITORS,
    "csv_monitor": _MONITORS,
    "comet": _MONITORS,
    "compression_training": "weights are neither pruned nor quantised here",
    "sparse_attention": "attention is dense here",
    "quantize_training": "weights are not quantised here",
    **dict.fromkeys(
        ("autotuning", "eigenvalue", "hybrid_engine", "nebula", "progressive_layer_drop"),
        "leave it out",
    ),
}
"""Blocks that are accepted only if they request no feature, and what to do instead."""
ALTERNATIVES: dict[str, str] = {
    "scheduler": "use --lr-decay-style and related flags for the learning rate",
    "compile": "leave it out; --use-torch-compile compiles, without --deepspeed",
    "tensor_parallel": "use --tensor-model-parallel-size",
    "sequence_parallel_size": "use --sequence-parallel; it spans the tensor-parallel ranks",
    "pipeline.stages": "use --pipeline-model-parallel-size",
    "communication_data_type": "leave it out; gradients are communicated in bf16 with --bf16, "
    "and otherwise in fp32",
    "zero_optimization.cpu_offload_use_pin_memory": "use offload_optimizer.pin_memory",
    "data_types.param_dtype": "use --fp16 or --bf16",
}
"""What to do instead, for some keys that are not accepted."""

# A key may be in two tables. offload_optimizer.device is in FIELDS and ALLOWED_VALUES.
ACCEPTED_KEYS = {
    *FIELDS,
    *LOSS_SCALE,
    *CHECKED,
    *PASSED_TO_DEEPSPEED,
    *ALLOWED_VALUES,
    *WITHOUT_EFFECT,
}
# Every proper prefix of an accepted key that ends before a dot is the name of a block.
BLOCK_NAMES = {
    key[:index] for key in ACCEPTED_KEYS for index, letter in enumerate(key) if letter == "."
}
# DeepSpeed itself accepts "auto" in these blocks.
_AUTO = ("zero_optimization.", "fp16.", "bf16.")


def can_be_auto(key: str) -> bool:
    """Return whether "auto" is accepted for a key.

    For fields of the configuration it means the value of the flags. In some blocks DeepSpeed
    accepts the word, and it means DeepSpeed's default.
    """
    return key in FIELDS or key in LOSS_SCALE or key == ACCUMULATION_STEPS or key.startswith(_AUTO)


def suggest_fix(key: str) -> str:
    """Return what to do about a key that is not accepted."""
    block, _, name = key.rpartition(".")
    siblings = [
        known.rpartition(".")[2]
        for known in ACCEPTED_KEYS | BLOCK_NAMES | set(UNSUPPORTED_BLOCKS)
        if known.rpartition(".")[0] == block
    ]
    # Look for a similar name in the same block first, then for the same name in another block.
    close = difflib.get_close_matches(name.strip().lower(), sorted(siblings), n=2, cutoff=0.75)
    elsewhere = sorted(
        known for known in ACCEPTED_KEYS | BLOCK_NAMES if known.rpartition(".")[2] == name
    )[:2]
    if key in ALTERNATIVES:
        return ALTERNATIVES[key]
    if close or elsewhere:
        return f"perhaps you meant {' or '.join(close or elsewhere)}"
    if key.startswith("optimizer."):
        return "see --optimizer and related flags"
    return "leave it out"
