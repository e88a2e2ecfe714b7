"""DeepSpeed's configuration, built from a plan and the user's JSON."""

from collections.abc import Mapping
from typing import Any

from megatron.extras.interop.translators.deepspeed_json import read_json, select_passed_on
from megatron.plan.run_plan import Plan


def build_settings(plan: Plan) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a plan.

    The values of our configuration replace those of the user's JSON.
    """
    config = plan.config
    path = config.parallel.deepspeed_config
    precision = config.precision
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.batch.micro_batch_size,
        # The number of microbatches changes with the ramp-up of the batch size. `train_batch`
        # sets it before each step.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.clip_grad,
        "zero_optimization": {"stage": plan.zero_stage},
        # By default DeepSpeed refuses bitsandbytes' optimizer with ZeRO. With offload it
        # refuses every optimizer but its own, which needs a C++ extension.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if config.optimizer.cpu_optimizer:
        ours["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if config.parallel.sequence_parallel:
        # The activations are already sharded over tensor-parallel ranks. By default DeepSpeed
        # assumes replicas and sends a part from each rank, which would mix the shards.
        ours["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    if precision.fp16:
        # A static scale keeps DeepSpeed from starting its own search. `train_batch` replaces
        # the scaler before each step (`FixedLossScaler`).
        ours["fp16"] = {"enabled": True, "loss_scale": 1.0}
        # DeepSpeed would cast the fp32 sums to fp16. There they overflow at a lower loss scale
        # than the gradients of one microbatch.
        ours["communication_data_type"] = "fp32"
    if precision.bf16:
        ours["bf16"] = {"enabled": True, "check_grad_overflow": True}
    if precision.fp16 or precision.bf16:
        ours["data_types"] = {"grad_accum_dtype": "fp32"}
    # DeepSpeed prints a line every `steps_per_print` steps. The training loop logs instead.
    # Its throughput timer would wait for the device twice in each microbatch.
    base: dict[str, Any] = {
        "steps_per_print": 10**9,
        "timers": {"throughput": {"enabled": False}},
    }
    if path:
        base |= select_passed_on(read_json(path), config.parallel.pipeline_model_parallel_size)
    return _merge_settings(base, ours)


def _merge_settings(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the two nested dictionaries merged. Values of `above` take precedence."""
    result = dict(below)
    for key, value in above.items():
        inner = result.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            result[key] = _merge_settings(inner, value)
        else:
            result[key] = value
    return result
