"""The kind of the engine on DeepSpeed, for --deepspeed, and what DeepSpeed does not support here.

This module imports neither torch nor DeepSpeed, because the planning tool uses it too.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from megatron.base.errors import ConfigError
from megatron.config.table import Absent, Table
from megatron.config.tree import Config
from megatron.engine.kind import BuildEngine, EngineKind, FileSettings
from megatron.extras.interop.translators.deepspeed_json import (
    read_accumulation_steps,
    read_json,
    select_passed_on,
)
from megatron.plan.rules.finding import Finding, Rule, error
from megatron.plan.run_plan import Plan

OPTIMIZERS = Table(
    "--optimizer",
    {"adam": "AdamW"},
    Absent(
        "is for the native engine, and DeepSpeed's ZeRO runs AdamW here; use --optimizer adam, or "
        "remove --deepspeed"
    ),
)
"""Optimizers of DeepSpeed's engine -> their names in its settings."""


def check_layout(plan: Plan) -> Iterator[Finding]:
    """Check that DeepSpeed supports the layout.

    It does not support --hsdp-shard-size, --sharding-strategy hsdp, or ZeRO 2 with a pipeline.
    """
    parallel = plan.config.parallel
    pipelined = parallel.pipeline_model_parallel_size > 1
    if pipelined and parallel.zero_stage > 1:
        yield error(
            f"--zero-stage {parallel.zero_stage} with a pipeline: DeepSpeed's PipelineModule "
            "shards optimizer states only; use --zero-stage 1, or remove --deepspeed"
        )
    if plan.copies > 1:
        asked = []
        fixes = []
        if parallel.hsdp_shard_size is not None:
            asked.append(f"--hsdp-shard-size {parallel.hsdp_shard_size}")
            fixes.append("leave out --hsdp-shard-size")
        if parallel.sharding_strategy is not None:
            asked.append(f"--sharding-strategy {parallel.sharding_strategy}")
            fixes.append("use --sharding-strategy fsdp")
        yield error(
            f"{' with '.join(asked)}: DeepSpeed shards over all data-parallel ranks here; "
            f"{' and '.join(fixes)}, or remove --deepspeed"
        )
    if parallel.context_parallel_size > 1:
        yield error(
            f"--context-parallel-size {parallel.context_parallel_size}: DeepSpeed averages "
            "gradients over data-parallel ranks, each with samples of its own; remove --deepspeed"
        )
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        yield error(
            "--num-layers-per-virtual-pipeline-stage "
            f"{parallel.num_layers_per_virtual_pipeline_stage}: "
            "DeepSpeed's pipeline has one stage per rank; remove this flag or --deepspeed"
        )


def check_settings(plan: Plan) -> Iterator[Finding]:
    """Check that DeepSpeed supports the settings of the optimizer, the log and the guard."""
    config = plan.config
    parallel = plan.config.parallel
    try:
        OPTIMIZERS.require(config.optimizer.optimizer)
    except ConfigError as refused:
        yield error(str(refused))
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(config.optimizer, name) != "fp32":
            yield error(
                f"--{name.replace('_', '-')} {getattr(config.optimizer, name)}: DeepSpeed's ZeRO "
                "keeps moments in fp32; leave it out, give --use-bnb-optimizer for moments in 8 "
                "bits, or remove --deepspeed"
            )
    if config.logging.log_num_zeros_in_grad:
        yield error(
            "--log-num-zeros-in-grad: DeepSpeed does not expose its gradients; remove this flag"
        )
    if config.logging.log_layer_stats_interval is not None:
        yield error(
            f"--log-layer-stats-interval {config.logging.log_layer_stats_interval}: DeepSpeed does "
            "not expose its gradients; remove this flag or --deepspeed"
        )
    guard = config.guard
    if guard.spike_guard == "skip-step" and guard.watches_gradient_norm:
        yield error(
            "--spike-guard-signals both: DeepSpeed computes the gradient norm within the update, "
            "so a step cannot be dropped for it; use --spike-guard-signals loss"
        )
    if config.kernels.use_torch_compile:
        yield error(
            "--use-torch-compile is not tested with DeepSpeed; remove this flag or --deepspeed"
        )
    path = parallel.deepspeed_config
    # The engine sets the accumulation steps itself. A different number in the file would be ignored
    # without a message.
    if path is not None and Path(path).is_file():
        steps = read_accumulation_steps(read_json(path))
        share = config.batch.micro_batch_size * plan.data_parallel_size
        if steps is not None and steps * share != plan.batch_size.final:
            yield error(
                f"{path}: gradient_accumulation_steps is {steps}, but it must be the batch size "
                f"{plan.batch_size.final} / (micro-batch size {config.batch.micro_batch_size} x "
                f'{plan.data_parallel_size} data-parallel ranks); set it to "auto"'
            )


def check_model(plan: Plan) -> Iterator[Finding]:
    """Check that the model has no experts, and only usual attention."""
    model = plan.config.model
    variant = model.experimental_attention_variant
    refused = {
        "--multi-latent-attention": model.multi_latent_attention,
        f"--softmax-type {model.softmax_type}": model.softmax_type != "vanilla",
        f"--experimental-attention-variant {variant}": variant is not None,
    }
    for flag in (flag for flag, asked in refused.items() if asked):
        yield error(f"{flag} was not compared with DeepSpeed's engine; remove --deepspeed")
    experts = model.num_experts
    if experts is not None:
        yield error(
            f"--num-experts {experts}: DeepSpeed would divide the gradients of experts by another "
            "number of ranks; remove --deepspeed"
        )


RULES: tuple[Rule[Plan], ...] = (check_layout, check_settings, check_model)
"""What DeepSpeed cannot run."""


def _load(device_type: str) -> BuildEngine:
    """Import DeepSpeed and the engine on it. This takes seconds.

    Raises:
        ConfigError: DeepSpeed is not installed.
    """
    from megatron.extras.step.deepspeed.deepspeed import DeepSpeedEngine, import_deepspeed

    import_deepspeed(device_type)
    return DeepSpeedEngine


def check_file(config: Config) -> Iterator[Finding]:
    """Check that the file of --deepspeed-config exists."""
    path = config.parallel.deepspeed_config
    if path is not None and not Path(path).is_file():
        yield error(f"--deepspeed-config {path} does not exist; create it, or remove the flag")


def _describe_settings(config: Config) -> FileSettings | None:
    """Return the settings of DeepSpeed's JSON file that are not fields of the configuration.

    They are compared by content, because each machine may have another file of the same name.
    """
    path = config.parallel.deepspeed_config
    if path is None:
        return None
    # A rank that raised here would leave the others waiting. If no rank has the file, rank 0
    # refuses the flag.
    try:
        if not Path(path).is_file():
            return FileSettings(path, "nothing (the file does not exist)")
        stages = config.parallel.pipeline_model_parallel_size
        passed_on = select_passed_on(read_json(path), stages)
        return FileSettings(path, json.dumps(passed_on, sort_keys=True))
    except (ConfigError, OSError) as error:
        return FileSettings(path, f"nothing ({error})")


DEEPSPEED = EngineKind(
    "DeepSpeed",
    _load,
    flag="--deepspeed",
    rules=RULES,
    file_rules=(check_file,),
    describe_settings=_describe_settings,
)
