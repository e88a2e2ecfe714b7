"""The prediction of a plan's step by the model of cost.

Nothing here looks at a device. docs/planner.md has the errors of the predictions.
"""

from dataclasses import replace
from fractions import Fraction

from megatron.cost.hardware import Hardware
from megatron.cost.layout import TRAINER, RankLayout, Recompute, Software
from megatron.cost.step import StepJob, StepPrediction
from megatron.plan import Plan


def get_recomputed_share(plan: Plan) -> Fraction:
    """Return the share of the layers that are recomputed.

    An invalid share is already among the plan's errors. All layers are assumed then, so that the
    rest of the plan can be reported.
    """
    try:
        return plan.config.recompute.recomputed_part
    except (ValueError, ZeroDivisionError):
        return Fraction(1)


def describe_software(plan: Plan) -> Software:
    """Return how this trainer runs the plan's configuration."""
    config = plan.config
    # What the flags change. The rest is the trainer itself.
    return replace(
        TRAINER,
        gradient_bytes=2 if config.parallel.grad_reduce_in_bf16 else 4,
        dropout=config.model.hidden_dropout > 0,
        half=config.precision.bf16 or config.precision.fp16,
        fp16=config.precision.fp16,
        fp32_residual=config.precision.fp32_residual_connection,
        optimizer=config.optimizer.optimizer,
    )


def describe_layout(plan: Plan) -> RankLayout:
    """Return the layout of the plan."""
    parallel = plan.config.parallel
    recompute: Recompute = "none"
    if plan.config.recompute.checkpoint_activations:
        recompute = "full"
    elif plan.config.recompute.recompute_attention_core:
        recompute = "selective"
    share = get_recomputed_share(plan)
    method = "uniform"
    if plan.stages_per_rank == 1 and parallel.pp_partition_method is not None:
        method = parallel.pp_partition_method
    return RankLayout(
        # A plan with errors may have a size of 0.
        tensor=max(1, parallel.tensor_model_parallel_size),
        pipeline=plan.pipeline_size,
        data=plan.data_parallel_size,
        micro_batch=max(1, plan.config.batch.micro_batch_size),
        virtual=plan.stages_per_rank,
        recompute=recompute,
        recomputed_share=share or Fraction(1),
        sequence_parallel=parallel.sequence_parallel,
        zero_stage=plan.zero_stage,
        shard=plan.shard_size,
        # Virtual stages have equal sizes, whatever the method.
        partition=method,
        # With sequence parallelism, a rank has only its part of the input already.
        partition_inputs=plan.config.recompute.partition_activations
        and not parallel.sequence_parallel,
        host_inputs=plan.config.recompute.checkpoint_in_cpu,
    )


def predict_plan(plan: Plan, hardware: Hardware) -> StepPrediction:
    """Predict a step of the plan at its final batch size.

    Raises:
        ConfigError: The run is in fp32, and the hardware has no peak for it.
    """
    return StepPrediction(
        StepJob(
            plan.shape,
            describe_layout(plan),
            plan.batch_size.final,
            describe_software(plan),
            hardware,
        )
    )


def can_be_predicted(plan: Plan, hardware: Hardware) -> bool:
    """Return whether the plan has no errors, and the hardware a peak for its precision."""
    known = describe_software(plan).half or hardware.fp32_tflops is not None
    return not plan.errors and known
