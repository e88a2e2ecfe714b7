"""The prediction of a plan's step by the model of cost.

Nothing here looks at a device. docs/planner_errors.md has the errors of the predictions.
"""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal, cast

from megatron.config.optimizer import OPTIMIZERS
from megatron.config.parallel import EXCHANGES_HEADS
from megatron.config.precision import PrecisionConfig
from megatron.config.tree import Config
from megatron.extras.planner.cost.hardware import Hardware, find_hardware
from megatron.extras.planner.cost.layout import (
    TRAINER,
    Float8,
    Overhead,
    RankLayout,
    Recompute,
    Software,
    StepJob,
)
from megatron.extras.planner.cost.memory import BALANCED_ENDS, count_virtual_layers
from megatron.extras.planner.cost.parameters import reduces_each_microbatch
from megatron.extras.planner.cost.search import SearchSpace
from megatron.extras.planner.cost.step_prediction import StepPrediction
from megatron.extras.step.float8.recipe import ROWWISE, list_float8_layers
from megatron.plan.kernel_choice import CPU, KernelDevice, choose_kernels, runs_eager_passes
from megatron.plan.run_plan import Plan
from megatron.tokenizer.vocabulary import compute_padded_vocab_size

_CPU_OVERHEAD = Overhead(fixed_gib=0.4)
"""Python and the libraries of a process without a GPU."""


def get_recomputed_share(plan: Plan) -> Fraction:
    """Return the share of the layers that are recomputed.

    An invalid share is already among the plan's errors. All layers are assumed then, so that the
    rest of the plan can be reported.
    """
    try:
        share = plan.config.recompute.recomputed_part
    except (ValueError, ZeroDivisionError):
        return Fraction(1)
    return min(max(share, Fraction(0)), Fraction(1))


def describe_software(plan: Plan, hardware: Hardware) -> Software:
    """Return how this trainer runs the plan's configuration on a kind of device."""
    config = plan.config
    kernels = choose_kernels(plan, describe_device(hardware)).kernels
    half = config.precision.bf16 or config.precision.fp16
    logit_bytes = TRAINER.logit_bytes
    if kernels.cross_entropy_loss_fusion:
        # The product writes a logit, two kernels read it, and the second one writes its gradient.
        logit_bytes = 8 if half else 16
    # What the flags change. The rest is the trainer itself.
    return replace(
        TRAINER,
        flash=hardware.has_flash,
        overhead=TRAINER.overhead if hardware.has_gpu else _CPU_OVERHEAD,
        step_gap=TRAINER.step_gap * hardware.has_gpu,
        pads_products=hardware.has_gpu,
        compiled=config.kernels.use_torch_compile,
        cudnn=kernels.attention_backend[:1] == ("fused",),
        gradient_bytes=2 if config.parallel.grad_reduce_in_bf16 else 4,
        dropout=config.model.hidden_dropout > 0,
        attends_in_blocks=config.model.attention_dropout > 0 and not kernels.names_fused_attention,
        half=half,
        fp16=config.precision.fp16,
        float8=_describe_float8(config, hardware),
        fp32_residual=config.precision.fp32_residual_connection,
        kept_operators=config.recompute.checkpoint_keep_operators,
        fused_gradients=bool(kernels.gradient_accumulation_fusion),
        # A graph alone reuses the memory of activations for gradients, as an eager pass does.
        kept_gradients=kernels.cuda_graph == "on" and runs_eager_passes(config),
        fused_rotation=bool(kernels.rope_fusion),
        fused_gate=bool(kernels.bias_swiglu_fusion),
        fused_loss=bool(kernels.cross_entropy_loss_fusion),
        fused_update=bool(kernels.adamw_fusion),
        logit_bytes=logit_bytes,
        optimizer=config.optimizer,
    )


def describe_device(hardware: Hardware) -> KernelDevice:
    """Return what the choice of kernels knows about a kind of device. Triton is assumed."""
    if not hardware.has_gpu:
        return KernelDevice(CPU)
    if hardware.prefers_cudnn:
        return KernelDevice("9.0")
    return KernelDevice("GPU")


def find_float8_obstacle(config: Config, hardware: Hardware) -> str:
    """Return why float8 is not predicted, or an empty text."""
    if hardware.float8_tflops is None:
        return f"{hardware.name} has no float8 products"
    if "gated_delta_net" in config.model.attention_kinds:
        return "the model of costs has no float8 for gated delta nets"
    return ""


def _describe_float8(config: Config, hardware: Hardware) -> Float8 | None:
    """Return how float8 is used. None if it is not, or if it is not predicted."""
    precision = config.precision
    if precision.fp8_format is None or precision.fp8_recipe is None or precision.fp8_emulate:
        return None
    if find_float8_obstacle(config, hardware):
        return None
    layers = list_float8_layers(config)
    every = len(layers) == config.model.num_layers
    return Float8(layers=None if every else layers, rowwise=ROWWISE[precision.fp8_recipe])


def propose_float8(config: Config) -> PrecisionConfig:
    """Return the precision of a configuration with the float8 that the search proposes."""
    return replace(config.precision, fp8_format="hybrid", fp8_recipe="tensorwise")


def describe_layout(plan: Plan) -> RankLayout:
    """Return the layout of the plan."""
    parallel = plan.config.parallel
    recompute: Recompute = "none"
    if plan.config.recompute.checkpoint_activations:
        recompute = "full"
    elif plan.config.recompute.recompute_attention_core:
        recompute = "selective"
    share = get_recomputed_share(plan)
    several = parallel.tensor_model_parallel_size > 1
    method = "uniform"
    if plan.stages_per_rank == 1:
        method = parallel.pp_partition_method or method
    elif len({len(stage.layers) for stage in plan.stages}) > 1:
        # Virtual stages are uneven only if the embedding and the output layer count as layers.
        method = BALANCED_ENDS
    return RankLayout(
        # A plan with errors may have a size of 0.
        tensor=max(1, parallel.tensor_model_parallel_size),
        pipeline=plan.pipeline_size,
        data=plan.data_parallel_size,
        context=plan.weight_ranks // plan.data_parallel_size,
        exchange_heads=parallel.exchanges_heads,
        micro_batch=max(1, plan.config.batch.micro_batch_size),
        virtual=plan.stages_per_rank,
        recompute=recompute,
        recomputed_share=share or Fraction(1),
        # Both have no effect on a single tensor-parallel rank.
        sequence_parallel=parallel.sequence_parallel and several,
        zero_stage=plan.zero_stage,
        shard=plan.shard_size,
        partition=method,
        # With sequence parallelism, a rank has only its part of the input already.
        partition_inputs=plan.config.recompute.partition_activations
        and several
        and not parallel.sequence_parallel,
        host_inputs=plan.config.recompute.checkpoint_in_cpu,
        expert=plan.expert_size,
    )


def predict_plan(plan: Plan, hardware: Hardware) -> StepPrediction:
    """Predict a step of the plan at its final batch size.

    Raises:
        ConfigError: The run is in fp32, and the hardware has no peak for it.
    """
    return StepPrediction(
        StepJob(
            plan.shape,
            replace(describe_layout(plan), imbalance=hardware.expert_imbalance),
            plan.batch_size.final,
            describe_software(plan, hardware),
            hardware,
        )
    )


def can_be_predicted(plan: Plan, hardware: Hardware) -> bool:
    """Return whether the plan has no errors, and the hardware has a peak for it."""
    known = describe_software(plan, hardware).half or hardware.fp32_tflops is not None
    return not plan.errors and known


def describe_prediction(plan: Plan, device_name: str) -> dict[str, Any]:
    """Return what the model of cost predicts for a step, for the record of a launch.

    It is empty if the model does not know the device.
    """
    hardware = find_hardware(device_name)
    if hardware is None or not can_be_predicted(plan, hardware):
        return {}
    prediction = predict_plan(plan, hardware)
    return {
        "predicted": {
            "hardware": hardware.name,
            "seconds": round(prediction.seconds, 6),
            "batch_size": plan.batch_size.final,
            "memory_gib": round(prediction.peak_bytes / 2**30, 2),
            "verdict": prediction.verdict,
        }
    }


def build_search_space(plan: Plan, hardware: Hardware) -> SearchSpace:
    """Return the layouts of the plan's model, batch and number of devices."""
    tokenizer = plan.config.tokenizer

    def pad(tensor: int) -> int:
        return compute_padded_vocab_size(
            plan.vocab_size,
            tokenizer.make_vocab_size_divisible_by,
            tensor,
            tokenizer.pad_vocab_size_to,
        )

    deepspeed = plan.config.parallel.deepspeed
    return SearchSpace(
        plan.shape,
        plan.batch_size.final,
        plan.world_size,
        hardware,
        describe_software(plan, hardware),
        # The caller tries larger sizes if nothing fits.
        context=plan.config.parallel.context_parallel_size,
        exchange_heads=EXCHANGES_HEADS[plan.config.parallel.cp_comm_type],
        # DeepSpeed has neither of them (`megatron/extras/step/deepspeed/kind.py`).
        virtual=1 if deepspeed else None,
        hsdp=False if deepspeed else None,
        pad=pad,
        accepts=build_layout_rules(plan),
        fuses_gradients=_build_rule_of_sums(plan, hardware),
    )


def _build_rule_of_sums(plan: Plan, hardware: Hardware) -> Callable[[RankLayout], bool] | None:
    """Return a function that tells whether sums of gradients are in fp32 by default in a layout.

    It is that of `megatron.plan.kernel_choice`. None if the layout does not matter.
    """
    config = plan.config
    given = config.kernels.gradient_accumulation_fusion is not None
    if given or config.parallel.deepspeed or not hardware.has_gpu:
        return None
    smallest = min(plan.batch_size.get_size(0, 0), plan.batch_size.final)

    def fuses(layout: RankLayout) -> bool:
        rounds = -(-smallest // (layout.data * layout.micro_batch))
        return not reduces_each_microbatch(layout, rounds)

    return fuses


def build_layout_rules(plan: Plan) -> Callable[[RankLayout], bool]:
    """Return a function that returns whether the trainer accepts a layout of the plan's model.

    The layout must divide the model and the final batch.
    """
    # See `check_batch_sizes`. A plan without errors has sizes that do not fit its own ranks only
    # before its position, and these do not matter.
    own = plan.config.batch.micro_batch_size * plan.data_parallel_size
    sizes = [
        size
        for size in plan.batch_size.iterate_upcoming(0, 0, plan.config.model.seq_length)
        if size % own == 0
    ]
    # See `check_tensor_parallel` and `check_muon`.
    row = OPTIMIZERS.require(plan.config.optimizer.optimizer)
    whole_groups = plan.config.model.qk_norm == "full" or row.layer_matrices_only

    tensor_divides = plan.config.model.moe_shared_expert_intermediate_size or 0

    # See `check_linear_heads`.
    key_heads = plan.config.model.linear_num_key_heads if plan.shape.linear_layers else 0

    def accepts(layout: RankLayout) -> bool:
        if tensor_divides % layout.tensor or key_heads % (layout.tensor * layout.context):
            return False
        if any(size % (layout.data * layout.micro_batch) for size in sizes):
            return False
        return not whole_groups or plan.shape.query_groups >= layout.tensor

    return accepts


def change_layout(config: Config, layout: RankLayout) -> Config:
    """Return the configuration with the flags that choose a layout.

    `layout` must divide the layers.
    """
    parallel = config.parallel
    per_virtual = count_virtual_layers(config.model.num_layers, layout)
    method: str | None = layout.partition
    if layout.virtual > 1 and method == "uniform":
        method = None
    elif method == (parallel.pp_partition_method or "uniform"):
        # The default is kept as it was asked for.
        method = parallel.pp_partition_method
    full = layout.recompute == "full"
    recompute = replace(
        config.recompute,
        checkpoint_activations=full,
        recompute_attention_core=layout.recompute == "selective",
        partition_activations=layout.partition_inputs,
        checkpoint_in_cpu=layout.host_inputs,
        # They are kept in the recomputation of layers only.
        checkpoint_keep_operators=config.recompute.checkpoint_keep_operators if full else (),
    )
    # Without recomputation the fraction has no effect.
    if full and Fraction(recompute.checkpoint_fraction) != layout.recomputed_share:
        recompute = replace(recompute, checkpoint_fraction=str(layout.recomputed_share))
    grouped = layout.copies > 1 and layout.zero_stage > 0
    return replace(
        config,
        parallel=replace(
            parallel,
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            context_parallel_size=layout.context,
            num_layers_per_virtual_pipeline_stage=per_virtual,
            pp_partition_method=method,
            sequence_parallel=layout.sequence_parallel,
            zero_stage=cast(Literal[0, 1, 2, 3], layout.zero_stage),
            expert_model_parallel_size=layout.expert or parallel.expert_model_parallel_size,
            sharding_strategy=None,
            hsdp_shard_size=layout.shard_size if grouped else None,
        ),
        batch=replace(config.batch, micro_batch_size=layout.micro_batch),
        recompute=recompute,
    )
